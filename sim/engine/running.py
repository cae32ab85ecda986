"""The decoding sequences of one micro-batch slot, as running totals: what the two kinds of sets have in common.

Work per round does not grow with the batch: finish rounds sit in a heap, KV blocks grow by a histogram of residues (or, where
speculation makes progress uneven, by per-request tapes that are added up once on joining), and the totals change by what changed.
A *round* is one decode step of all sequences in the set; rounds are counted from the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from sim.engine.columns import IntArray, RoundCounts
from sim.engine.pricing import LineAt
from sim.engine.span import Span


class Departure(NamedTuple):
    """A sequence taken out of the set."""

    id: int
    cached_tokens: int
    blocks: int
    emitted: int
    """Tokens emitted since it joined."""
    since: int
    """Round after which it joined, with *cached_before* tokens, its latest token being of *token_ns*."""
    cached_before: int
    token_ns: int
    emitted_last: int = 1
    """Tokens emitted in its last round, where that was its end."""


class Decoding(Protocol):
    """How many tokens a decode step submits and how many come out; see policies.decoding for implementations."""

    @property
    def max_query_tokens(self) -> int: ...

    def query_tokens(self, n_decoding: int, /) -> int: ...

    def k(self, n_decoding: int, /) -> int: ...

    def draft_steps(self, n_decoding: int, /) -> int: ...

    def tape(self, request_id: int, round_start: int, n_tokens: int, k: int, seed: int, /) -> IntArray: ...


class DecodePrices(Protocol):
    """Ticks of decode iterations; see `sim.engine.pricing.Pricing`."""

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt: ...


class RunningSet(Protocol):
    """What a tenant knows of its decoding sequences; whether they speculate is known to the set alone."""

    n: int
    cached: int
    """KV tokens cached by all of them."""
    round: int
    query_tokens: int
    """Tokens that each submits in a round ..."""
    draft_steps: int
    """... and steps of the draft model before it."""

    def __iter__(self) -> Iterator[int]: ...

    def __contains__(self, id_: int, /) -> bool: ...

    @property
    def growth_blocks(self) -> int: ...

    def follow_batch(self) -> None: ...

    def join(self, id_: int, cached: int, remaining: int, token_ns: int, /) -> None: ...

    def leave(self, id_: int, /) -> Departure: ...

    def growth_of(self, id_: int, /) -> int: ...

    def state_of(self, id_: int, /) -> tuple[int, int]: ...

    def next_round(self) -> tuple[int, int]: ...

    def span(
        self, start_ticks: int, hold: int, until_ns: int, free_blocks: int, growth: int, pricing: DecodePrices, /
    ) -> Span: ...

    def blocks_for(self, rounds: int, /) -> int: ...

    def advance(self, rounds: int, /) -> list[Departure]: ...

    def speculation(self) -> RoundCounts: ...
