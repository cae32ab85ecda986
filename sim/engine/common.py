"""What a step takes that the ranks of a machine take together: rows padded as engines pad them, and one price."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from hwmodels.totals import Totals
from sim.engine.clock import to_ticks
from sim.engine.pricing import LineAt, Prices, Pricing

IDLE: Final = Totals(*(0,) * len(Totals._fields))
"""What a rank does that has nothing to do."""


class CommonCost(Protocol):
    """A cost model that knows what a step of several ranks takes."""

    def common_step(self, ranks: Sequence[Totals], /) -> Any:
        """Seconds of a step whose ranks have these totals, elementwise as `CostModel.iteration_s`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How many rows each rank puts through its layers in a common step.

    Where a graph replays a step, it has the rows of one captured size on every rank, the smallest that holds those of the fullest.
    Other steps have on every rank what it has.
    """

    sizes: tuple[int, ...] = ()
    """Captured, ascending; none: no step is replayed."""
    prompts: bool = False
    """Steps with prompt tokens are replayed as well, up to the largest size; otherwise those alone that decode everywhere."""
    most_beyond: bool = False
    """Decode steps beyond the largest size have on every rank the rows of the fullest, where these are at most twice the sum."""
    idle_rows: int = 0
    """Rows of a rank that has nothing to do while others step."""

    def __post_init__(self) -> None:
        if self.sizes and (self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes))):
            raise ValueError(f"sizes of graphs are ascending and at least 1; got {self.sizes!r}")
        if self.idle_rows < 0:
            raise ValueError(f"idle_rows is at least 0; got {self.idle_rows}")

    def rows(self, own: Sequence[int], prompts: bool) -> list[int]:
        """Rows of each rank, of which *own* are its tokens; *prompts*: some of all these are of prompts."""
        rows = [tokens or self.idle_rows for tokens in own]
        if prompts and not self.prompts:
            return rows
        most = max(rows)
        if self.sizes and most <= self.sizes[-1]:
            return [self.sizes[bisect_left(self.sizes, most)]] * len(rows)
        if self.most_beyond and not prompts and most * len(rows) <= 2 * sum(rows):
            return [most] * len(rows)
        return rows


def padded_to(totals: Totals, rows: int, query_tokens: int) -> Totals:
    """*totals* with *rows* rows: those that are added decode after no context, or are of its prompts where it has any."""
    more = rows - totals.rows
    if more <= 0:
        return totals
    if totals.prefill_chunks:
        return totals._replace(rows=rows, prefill_rows=totals.prefill_rows + more)
    seqs = -(-more // query_tokens)
    return totals._replace(
        rows=totals.rows + seqs * query_tokens,
        decode_seqs=totals.decode_seqs + seqs,
        decode_kv_tokens=totals.decode_kv_tokens + seqs * query_tokens,
        decode_kv_window=totals.decode_kv_window and totals.decode_kv_window + seqs * query_tokens,
    )


class CommonPrices(Prices):
    """Ticks of the steps of ranks."""

    def __init__(self, pricing: Pricing, n_ranks: int, padding: Padding) -> None:
        self._pricing = pricing
        self._n_ranks = n_ranks
        self._padding = padding
        self._cost = cast(CommonCost, pricing.cost)
        # A draft that is spread over the ranks as the target is takes its passes in common, too.
        self._draft = cast("CommonCost | None", pricing.draft if hasattr(pricing.draft, "common_step") else None)

    def step(self, ranks: Sequence[Totals], draft_steps: Sequence[int]) -> int:
        """Of one step, all ranks named; who has nothing to do has `IDLE`."""
        rows = self._padding.rows([totals.rows for totals in ranks], any(totals.prefill_rows for totals in ranks))
        query = max(((t.rows - t.prefill_rows) // t.decode_seqs for t in ranks if t.decode_seqs), default=1)
        priced = [padded_to(totals, padded, query) for totals, padded in zip(ranks, rows, strict=True)]
        ticks = to_ticks(float(self._cost.common_step(priced)))
        return ticks + self._draft_ticks(ranks, draft_steps) if self._pricing.speculative else ticks

    def _draft_ticks(self, ranks: Sequence[Totals], draft_steps: Sequence[int]) -> int:
        pricing = self._pricing
        if self._draft is None:
            # Each rank drafts by itself; the next pass of the target waits for the last.
            return max(pricing.draft_ticks(totals, steps) for totals, steps in zip(ranks, draft_steps, strict=True))
        seconds = 0.0
        if any(totals.prefill_rows for totals in ranks):
            seconds += self._draft.common_step([_prompts_of(totals) for totals in ranks])
        steps = max(draft_steps)
        if steps and any(totals.decode_seqs for totals in ranks):
            seconds += steps * self._draft.common_step([_decodes_of(totals) for totals in ranks])
        verifies = any(totals.rows - totals.prefill_rows > totals.decode_seqs for totals in ranks)
        return to_ticks(float(seconds)) + verifies * pricing.round_ticks

    # What a rank asks of its own prices.

    def stages(self, totals: Totals, draft_steps: int, /) -> tuple[list[int], int]:
        """Of a step in which the others have nothing to do: no step of it takes less."""
        return [self.iteration(totals, draft_steps)], 0

    def iteration(self, totals: Totals, draft_steps: int, /) -> int:
        others = self._n_ranks - 1
        return self.step([totals, *(IDLE,) * others], [draft_steps, *(0,) * others])

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt:
        raise ValueError("steps of ranks are priced together, one by one")


def _prompts_of(totals: Totals) -> Totals:
    return IDLE._replace(
        rows=totals.prefill_rows,
        prefill_rows=totals.prefill_rows,
        prefill_chunks=totals.prefill_chunks,
        prefill_pairs=totals.prefill_pairs,
        prefill_kv_tokens=totals.prefill_kv_tokens,
        prefill_pairs_window=totals.prefill_pairs_window,
    )


def _decodes_of(totals: Totals) -> Totals:
    """One token of each sequence that decodes."""
    n = totals.decode_seqs
    return IDLE._replace(
        rows=n,
        decode_seqs=n,
        decode_kv_tokens=totals.decode_kv_tokens,
        logit_rows=n,
        decode_kv_window=totals.decode_kv_window,
    )
