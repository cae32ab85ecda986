"""The decoding sequences of one micro-batch slot, as running totals: the interface of both kinds of sets.

Work per round does not grow with the batch: finish rounds sit in a heap, KV blocks grow by a histogram of residues (or, where
speculation makes progress uneven, by each request's drawn rounds, added up once on joining), and totals change by differences.
A *round* is one decode step of all sequences in the set; rounds are counted from the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from sim.engine.batch.pricing import Prices
from sim.engine.batch.span import Span
from sim.engine.record.columns import IntArray, RoundCounts


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
    """Tokens that a decode step submits and that come out of it; see policies.decoding for implementations."""

    @property
    def max_query_tokens(self) -> int: ...

    def query_tokens(self, n_decoding: int, /) -> int: ...

    def k(self, n_decoding: int, /) -> int: ...

    def draft_steps(self, n_decoding: int, /) -> int: ...

    def round_tokens(self, request_id: int, round_start: int, n_tokens: int, k: int, seed: int, /) -> IntArray: ...


class RunningSet:
    """The decoding sequences of a micro-batch as an engine core sees them; only the set knows if they speculate."""

    # A base class and not a protocol, whose methods are looked up by name: with this one and `Prices` as protocols the compiled
    # conversation trace takes 9 % longer (0.30 for 0.28 s, Sarathi 0.36 for 0.33).

    n: int
    cached: int
    """KV tokens cached by all of them."""
    round: int
    query_tokens: int
    """Tokens that each submits in a round."""
    draft_steps: int
    """Steps of the draft model before a round."""

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    def __contains__(self, id_: int, /) -> bool:
        raise NotImplementedError

    @property
    def growth_blocks(self) -> int:
        """New KV blocks that the next round needs."""
        raise NotImplementedError

    def follow_batch(self) -> None:
        """Chooses what the next round drafts by the number of sequences."""
        raise NotImplementedError

    def join(self, id_: int, cached: int, remaining: int, token_ns: int, blocks: int, /) -> None:
        """Adds a sequence with *cached* tokens and *remaining* >= 1 tokens to emit, the latest emitted at *token_ns*; it holds
        *blocks* KV blocks."""
        raise NotImplementedError

    def leave(self, id_: int, /) -> Departure:
        """Removes a sequence before it has finished."""
        raise NotImplementedError

    def growth_of(self, id_: int, /) -> int:
        """New KV blocks that one sequence needs for the next round."""
        raise NotImplementedError

    def state_of(self, id_: int, /) -> tuple[int, int]:
        """(cached tokens, KV blocks) of one sequence."""
        raise NotImplementedError

    def last_emitted(self, id_: int, /) -> int:
        """Tokens that one sequence emitted in the latest round; 0: none since it joined."""
        raise NotImplementedError

    def after(self, rounds: int, id_: int, /) -> tuple[int, int]:
        """(cached tokens, tokens emitted in the latest round) of one sequence after *rounds* rounds, none beyond the first
        finish."""
        raise NotImplementedError

    def next_round(self) -> tuple[int, int]:
        """Tokens that the next round emits, and KV tokens within the window that it reads."""
        raise NotImplementedError

    def span(
        self, start_ticks: int, hold: int, until_ns: int, free_blocks: int, growth: int, pricing: Prices, /
    ) -> Span:
        """The next rounds as one event: *hold* at most, within *free_blocks*, none that starts at *until_ns* or later.

        The first takes *growth* blocks. A span ends at the first finish and where a window fills up.
        """
        raise NotImplementedError

    def blocks_for(self, rounds: int, /) -> int:
        """New KV blocks that the next *rounds* rounds need together."""
        raise NotImplementedError

    def advance(self, rounds: int, /) -> Sequence[Departure]:
        """Runs *rounds* rounds, none beyond the first finish; returns sequences that finish in the last, by age."""
        raise NotImplementedError

    def speculation(self) -> RoundCounts:
        """Rounds that drafted, by tokens accepted."""
        raise NotImplementedError

    def emitted(self) -> IntArray | None:
        """Tokens of every round of the sequences that have left, in order of leaving. Shape [rounds]; None where all
        are one."""
        raise NotImplementedError
