"""Ticks of steps and micro-batches that the ranks of a machine take together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from hwmodels.cost import RankedCostModel
from hwmodels.totals import Totals
from sim.engine.batch.pricing import LineAt, Prices, Pricing, whole_ticks
from sim.engine.record.columns import IntArray
from sim.engine.time.clock import to_ticks

IDLE: Final = Totals(*(0,) * len(Totals._fields))
"""The totals of a rank with nothing to do."""


class CommonPrices(Prices):
    """Ticks of the steps of ranks."""

    def __init__(self, pricing: Pricing, n_ranks: int) -> None:
        self._pricing = pricing
        self._n_ranks = n_ranks
        self._cost = cast(RankedCostModel, pricing.cost)
        # A draft that is spread over the ranks as its target is takes its passes in common, too.
        spread = getattr(getattr(pricing.draft, "parallel", None), "data", 1) == n_ranks
        self._draft = cast("RankedCostModel | None", pricing.draft if spread else None)

    def step(self, ranks: Sequence[Totals], draft_steps: Sequence[int], stage: int = 0) -> int:
        """Ticks of one step of all *ranks* on one stage, the drafts' with the first; an idle rank has `IDLE`."""
        ticks = to_ticks(float(self._cost.common_step(ranks, stage)))
        return ticks + self._draft_ticks(ranks, draft_steps) if self._pricing.speculative and not stage else ticks

    def common_stages(self, ranks: Sequence[Totals], draft_steps: Sequence[int]) -> tuple[list[int], int]:
        """Ticks of each stage for a micro-batch of all *ranks*, and of a hand-over between two.

        Ranks hand their rows over at the same time, each from its own devices to its own devices, so that all have those of the
        fullest when the next stage begins: as long as a micro-batch takes in which every rank has as many.
        """
        fullest = max([totals.rows for totals in ranks])
        handover = to_ticks(float(self._cost.handover_s(len(ranks) * fullest)))
        return [self.step(ranks, draft_steps, stage) for stage in range(self._cost.n_stages)], handover

    def steps(self, ranks: Sequence[Totals], growth: Sequence[tuple[int, int]], n: int) -> IntArray:
        """Ticks of *n* steps of decodes alone, without drafts, from *ranks* on: the same as one by one. Shape [n]. *growth*: KV
        tokens that a rank's step reads more than the one before, and those within the window."""
        step = np.arange(n)
        later = [
            totals._replace(
                decode_kv_tokens=totals.decode_kv_tokens + step * kv,
                decode_kv_window=totals.decode_kv_window + step * window,
            )
            for totals, (kv, window) in zip(ranks, growth, strict=True)
        ]
        return whole_ticks(np.broadcast_to(self._cost.common_step(later), n)).astype(np.int64)

    def _draft_ticks(self, ranks: Sequence[Totals], draft_steps: Sequence[int]) -> int:
        pricing = self._pricing
        if self._draft is None:
            # Each rank drafts by itself; the next pass of the target waits for the last.
            if pricing.drafts_prompts:
                # Ranks leave passes out where all can.
                draft_steps = [max(draft_steps)] * len(ranks)
            return max(pricing.draft_ticks(totals, steps) for totals, steps in zip(ranks, draft_steps, strict=True))
        seconds = 0.0
        if any(totals.prefill_rows for totals in ranks):
            seconds += self._draft.common_step([_prompts_of(totals) for totals in ranks])
        steps = max(draft_steps)
        decodes = any(totals.decode_seqs for totals in ranks)
        if steps and decodes and pricing.draft_rereads:
            seconds += self._draft.common_step(
                [_decodes_of(totals, totals.rows - totals.prefill_rows) for totals in ranks]
            )
            steps -= 1
        elif steps and not decodes:
            steps -= 1
        if steps and (decodes or pricing.drafts_prompts):
            later = [pricing.later_passes(totals) for totals in ranks]
            seconds += steps * self._draft.common_step(
                [
                    IDLE._replace(rows=n, decode_seqs=n, decode_kv_tokens=kv, logit_rows=n, decode_kv_window=within)
                    for n, _, kv, within in later
                ]
            )
        verifies = any(totals.rows - totals.prefill_rows > totals.decode_seqs for totals in ranks)
        return to_ticks(float(seconds)) + verifies * pricing.round_ticks

    # Prices of a single rank's steps.

    def stages(self, totals: Totals, draft_steps: int, /) -> tuple[list[int], int]:
        """Ticks of a micro-batch with the other ranks idle: none of it takes less."""
        others = self._n_ranks - 1
        return self.common_stages([totals, *(IDLE,) * others], [draft_steps, *(0,) * others])

    def iteration(self, totals: Totals, draft_steps: int, /) -> int:
        raise ValueError("steps of ranks are priced together")

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


def _decodes_of(totals: Totals, tokens: int) -> Totals:
    """Totals of a pass over *tokens* tokens of decoding sequences, with one proposal for each."""
    n = totals.decode_seqs
    return IDLE._replace(
        rows=tokens,
        decode_seqs=n,
        decode_kv_tokens=totals.decode_kv_tokens,
        logit_rows=n,
        decode_kv_window=totals.decode_kv_window,
    )
