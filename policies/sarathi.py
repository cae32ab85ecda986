"""SARATHI's batches as published, and what it is compared with. Sarathi-Serve's token budget is `schedulers.Sarathi`.

SARATHI = Agrawal et al., arXiv 2308.16369; Sarathi-Serve = Agrawal et al., OSDI 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.schedulers import (
    admissible_blocks,
    checked_as_given,
    chunks_within,
    setting_at_least,
    setting_is_fraction,
)
from policies.view import UNTIL_CHANGE, Plan, ReplicaView


@checked_as_given
@dataclass(frozen=True)
class DecodeMaximal:
    """SARATHI: each hybrid batch has exactly one prompt chunk of fixed size, and the decodes fill the rest.

    With *align* the chunk is C - (B - 1), so that chunk and B - 1 decodes fill *chunk* and its tiles (section 4.4);
    without, it is C. A prompt's last chunk is what is left of it. Decodes run alone when no prompt is left.

    With *chunk_when_full* a prompt is cut only if B - 1 decodes are there to ride along, and runs whole and alone
    otherwise: the paper's account of ratios of prompt to output above the optimum, where decodes run out and the rest
    runs as its baseline does. Without, every prompt is cut, which keeps the decodes from stalling.
    """

    chunk: int = 256
    max_sequences: int = 18
    align: bool = True
    chunk_when_full: bool = False
    watermark: float = 0.0

    def __post_init__(self) -> None:
        setting_at_least(self, "chunk", 1)
        setting_at_least(self, "max_sequences", 1)
        setting_is_fraction(self, "watermark")
        if self.align and self.chunk < self.max_sequences:
            raise ValueError(
                f"chunk {self.chunk} leaves no prompt tokens beside {self.max_sequences - 1} decodes; "
                "give a larger chunk or align: false"
            )

    @property
    def prompt_chunk(self) -> int:
        """Prompt tokens of a hybrid batch."""
        return self.chunk - (self.max_sequences - 1) if self.align else self.chunk

    def plan(self, view: ReplicaView, /) -> Plan:
        decode = view.n_decoding > 0
        if view.prefilling:
            seq = view.prefilling[0]
            return Plan(decode, ((seq.id, min(seq.remaining_tokens, self.prompt_chunk)),))
        full = view.n_running >= self.max_sequences
        if view.waiting and not full:
            first = view.waiting[0]
            if view.blocks_to_admit(first) <= admissible_blocks(view, self.watermark):
                if self.chunk_when_full and view.n_decoding < self.max_sequences - 1:
                    return Plan(run=((first.id, first.tokens),))
                return Plan(decode, ((first.id, min(first.tokens, self.prompt_chunk)),))
            full = True
        return Plan(decode, hold=UNTIL_CHANGE, through_arrivals=full)


@checked_as_given
@dataclass(frozen=True)
class ChunkedOnly:
    """Ablation of Sarathi-Serve (table 4): prompts in chunks up to a token budget, never in one batch with decodes.

    While prompts are unfinished, batches of chunks and batches of decodes take turns.
    """

    token_budget: int = 512
    max_sequences: int = 128
    watermark: float = 0.01

    def __post_init__(self) -> None:
        setting_at_least(self, "token_budget", 1)
        setting_at_least(self, "max_sequences", 1)
        setting_is_fraction(self, "watermark")

    def plan(self, view: ReplicaView, /) -> Plan:
        chunks, full = chunks_within(view, self.token_budget, self.max_sequences, self.watermark)
        if not view.n_decoding:
            return Plan(run=chunks)
        if not chunks:
            return Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=full)
        return Plan(decode=True) if view.after_prefill else Plan(run=chunks)
