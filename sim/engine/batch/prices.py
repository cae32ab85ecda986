"""Ticks of an iteration: by a cost model, or from a table of measured latencies."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.cost import CostModel
from hwmodels.totals import Totals
from sim.engine.batch.pricing import Line, LineAt, Prices, Pricing
from sim.engine.time.clock import TICK_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Latencies of a single-pass model by batch size: whole nanoseconds of every stage, with no hand-over between them.

    It replaces a cost model where requests generate nothing. An iteration with n prompts costs the row of n.
    """

    batch_sizes: tuple[int, ...]
    stage_ns: tuple[tuple[int, ...], ...]
    """Nanoseconds of every stage, for each of `batch_sizes`."""

    def __post_init__(self) -> None:
        sizes = self.batch_sizes
        if not sizes or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"batch_sizes are ascending and start with 1; got {sizes!r}")
        if len(self.stage_ns) != len(sizes):
            raise ValueError(f"stage_ns has a row for each of the {len(sizes)} batch sizes; got {len(self.stage_ns)}")
        n = self.n_stages
        for stages in self.stage_ns:
            if len(stages) != n or not n or min(stages) < 0:
                raise ValueError(f"stage_ns has {n} times of at least 0 for each batch size; got {stages!r}")

    @property
    def n_stages(self) -> int:
        return len(self.stage_ns[0])

    @property
    def window_tokens(self) -> None:
        return None

    def of(self, batch: int) -> tuple[int, ...]:
        """Nanoseconds of every stage for *batch* requests; ValueError for a size that the table lacks."""
        if batch not in self.batch_sizes:
            raise ValueError(f"no latency for a batch of {batch}; the table has {self.batch_sizes}")
        return self.stage_ns[self.batch_sizes.index(batch)]


class TablePrices(Prices):
    """Prices of a `StageTable`, exact to the nanosecond."""

    def __init__(self, table: StageTable) -> None:
        self._table = table

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt:
        raise ValueError(
            "a table of single-pass latencies has no decode steps; give requests that generate a cost model"
        )

    def iteration(self, totals: Totals, draft_steps: int, /) -> int:
        return sum(self.stages(totals, draft_steps)[0])

    def stages(self, totals: Totals, draft_steps: int, /) -> tuple[list[int], int]:
        if totals.decode_seqs:
            self.decode_lines(totals.decode_seqs, 1, 0)
        return [ns << TICK_BITS for ns in self._table.of(totals.prefill_chunks)], 0


class AdapterPrices(Prices):
    """Prices of iterations with LoRA adapters: those of *base*, and what the adapters of the coming iteration add."""

    def __init__(self, base: Prices) -> None:
        self._base = base
        self.extra_ticks = 0
        """Ticks that adapters add to an iteration that is priced now."""

    def decode_lines(self, n: int, query_tokens: int, draft_steps: int, /) -> LineAt:
        line_at = self._base.decode_lines(n, query_tokens, draft_steps)

        def longer(kv: int, kv_window: int, /) -> Line:
            base, slope, slope_window, kv_end, kv_window_end = line_at(kv, kv_window)
            return Line(base + self.extra_ticks, slope, slope_window, kv_end, kv_window_end)

        return longer

    def iteration(self, totals: Totals, draft_steps: int, /) -> int:
        return self._base.iteration(totals, draft_steps) + self.extra_ticks

    def stages(self, totals: Totals, draft_steps: int, /) -> tuple[list[int], int]:
        durations, handover = self._base.stages(totals, draft_steps)
        durations[0] += self.extra_ticks
        return durations, handover


def prices_of(
    cost: CostModel | StageTable, draft_cost: CostModel | None, speculation_overhead_s: float, *, drafts_prompts: bool
) -> Prices:
    """Prices of an engine core's iterations."""
    if isinstance(cost, StageTable):
        return TablePrices(cost)
    return Pricing(cost, draft_cost, speculation_overhead_s, drafts_prompts=drafts_prompts)
