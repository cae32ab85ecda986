"""Token-level speculative sampling on finite vocabularies: distributions in, tokens out, exact laws beside."""

from sim.tokens.distributions import Markov, filtered
from sim.tokens.ngram import (
    Tokenizer,
    bundled_text,
    ngram_acceptance,
    ngram_models,
    one_target_two_drafts,
    train_ngram,
)
from sim.tokens.speculate import AcceptanceStatistics, Rounds, Speculator, autoregressive, residual

__all__ = [
    "AcceptanceStatistics",
    "Markov",
    "Rounds",
    "Speculator",
    "Tokenizer",
    "autoregressive",
    "bundled_text",
    "filtered",
    "ngram_acceptance",
    "ngram_models",
    "one_target_two_drafts",
    "residual",
    "train_ngram",
]
