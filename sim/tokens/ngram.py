"""N-gram models trained on text: small real language models, whose mutual acceptance is not made up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from sim.tokens.distributions import IntArray, Markov
from sim.tokens.speculate import AcceptanceStatistics, Speculator

Level: TypeAlias = Literal["character", "word"]

# One table of doubles; larger ones belong in a real model, not in a teaching one.
MAX_TABLE_BYTES = 1 << 30
UNKNOWN = "<unk>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Text to token ids and back. The unknown token, if there is one, stands for all that is not in the vocabulary."""

    level: Level
    vocabulary: tuple[str, ...]

    @classmethod
    def of(cls, text: str, *, level: Level = "character", max_vocabulary: int | None = None) -> Tokenizer:
        """The tokenizer of a text's own characters or words (lower case, punctuation apart), most frequent first.

        Beyond *max_vocabulary* tokens, one of them the unknown token, the rare ones are left out.
        """
        pieces = _pieces(text, level)
        if not pieces:
            raise ValueError("the text is empty; give some to learn from")
        counts: dict[str, int] = {}
        for piece in pieces:
            counts[piece] = counts.get(piece, 0) + 1
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
        if max_vocabulary is not None and len(ranked) > max_vocabulary:
            if max_vocabulary < 2:
                raise ValueError(f"max_vocabulary has room for a token and {UNKNOWN}, 2 or more; got {max_vocabulary}")
            ranked = [*ranked[: max_vocabulary - 1], UNKNOWN]
        return cls(level=level, vocabulary=tuple(ranked))

    def encode(self, text: str) -> IntArray:
        """Token ids of *text*; ValueError for an unknown piece where the vocabulary has no unknown token."""
        ids = {piece: i for i, piece in enumerate(self.vocabulary)}
        unknown = ids.get(UNKNOWN)
        out = []
        for piece in _pieces(text, self.level):
            i = ids.get(piece, unknown)
            if i is None:
                raise ValueError(f"{piece!r} is not in the vocabulary, which has no unknown token")
            out.append(i)
        return np.array(out, dtype=np.int64)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Text of token ids."""
        pieces = [self.vocabulary[i] for i in np.asarray(tokens).tolist()]
        return "".join(pieces) if self.level == "character" else " ".join(pieces)


def bundled_text() -> str:
    """The project's own text about queues and rooflines, about two thousand words."""
    return (files("sim.tokens") / "text.txt").read_text(encoding="utf-8")


def train_ngram(tokens: Sequence[int] | IntArray, vocabulary: int, n: int, *, pseudo_count: float = 0.1) -> Markov:
    """The n-gram model (n = 1: unigram, 2: bigram) of a sequence of token ids, smoothed.

    Unigrams get *pseudo_count* for every token; each longer context is mixed with the shorter one by Witten and Bell's
    weight, seen / (seen + distinct followers), so that every token keeps a positive probability. Witten, Bell, IEEE
    Trans. Information Theory 37(4), 1991, method C.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if n < 1 or vocabulary < 1 or not 0.0 < pseudo_count < np.inf:
        raise ValueError(f"n and vocabulary are 1 or more, pseudo_count above 0; got {n}, {vocabulary}, {pseudo_count}")
    if ids.ndim != 1 or ids.size < n or ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"tokens are at least {n} ids in [0, {vocabulary})")
    if vocabulary**n * 8 > MAX_TABLE_BYTES:
        raise ValueError(
            f"an {n}-gram table over {vocabulary} tokens takes {vocabulary**n * 8 / 2**30:.1f} GiB; "
            "lower n or max_vocabulary"
        )
    p = (np.bincount(ids, minlength=vocabulary) + pseudo_count)[None, :]
    p = p / p.sum()
    for order in range(1, n):
        rows = vocabulary**order
        cell = np.zeros(ids.size - order, dtype=np.int64)
        for i in range(order + 1):
            cell = cell * vocabulary + ids[i : ids.size - order + i]
        counts = np.bincount(cell, minlength=rows * vocabulary).reshape(rows, vocabulary)
        seen, followers = counts.sum(axis=1, keepdims=True), (counts > 0).sum(axis=1, keepdims=True)
        shorter = np.tile(p, (vocabulary, 1))
        # A context never seen has no followers and takes the shorter context's distribution as it is.
        p = np.where(seen > 0, (counts + followers * shorter) / np.maximum(seen + followers, 1), shorter)
    return Markov(order=n - 1, probabilities=p)


def ngram_acceptance(
    target_n: int,
    draft_n: int,
    k: int,
    *,
    text: str | None = None,
    level: Level = "character",
    max_vocabulary: int | None = None,
) -> AcceptanceStatistics:
    """Exact acceptance of a *draft_n*-gram draft by a *target_n*-gram target, both trained on *text* (the bundled one).

    `Markov.filtered` gives models temperature and filters, which a `Speculator` takes as they are.
    """
    target, draft = ngram_models((target_n, draft_n), text=text, level=level, max_vocabulary=max_vocabulary)
    return Speculator(target, draft).statistics(k)


def ngram_models(
    sizes: Iterable[int],
    *,
    text: str | None = None,
    level: Level = "character",
    max_vocabulary: int | None = None,
) -> list[Markov]:
    """N-gram models of the given sizes over one vocabulary, trained on *text* (the bundled one)."""
    corpus = bundled_text() if text is None else text
    tokenizer = Tokenizer.of(corpus, level=level, max_vocabulary=max_vocabulary)
    tokens = tokenizer.encode(corpus)
    return [train_ngram(tokens, len(tokenizer.vocabulary), n) for n in sizes]


def one_target_two_drafts() -> tuple[Markov, Markov, Markov]:
    """A target over five words, a draft that is close to it, and one that guesses uniformly.

    Whatever the draft, the output is the target's; only the number of tokens per round changes.
    """
    target = Markov.from_distribution([0.40, 0.25, 0.20, 0.10, 0.05])
    close = Markov.from_distribution([0.45, 0.20, 0.15, 0.15, 0.05])
    uniform = Markov.from_distribution([0.20, 0.20, 0.20, 0.20, 0.20])
    return target, close, uniform


def _pieces(text: str, level: str) -> list[str]:
    if level == "character":
        return list(re.sub(r"\s+", " ", text.lower()).strip())
    if level == "word":
        return re.findall(r"[a-z0-9'-]+|[^\sa-z0-9]", text.lower())
    raise ValueError(f"level is character or word; got {level!r}")
