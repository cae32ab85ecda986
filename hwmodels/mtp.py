"""Multi-token prediction: the target's own extra layers as its draft, priced and placed beside it.

A round drafts K tokens in K passes of one layer each: pass i runs module i of those that there are, and goes round where K is more
(vLLM's mtp, SGLang's NEXTN, TensorRT-LLM's MTP in its EAGLE form). The first pass reads what the target has just computed, as many
tokens a sequence as it verified; each further pass reads one. Prompts pass through every module that drafts, for each keeps a cache
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from hwmodels.calibrated import Calibrated
from hwmodels.cost import CostFactory, CostModel, RankedCostModel, Work
from hwmodels.deployment import Deployment, deploy
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals


class MtpCost:
    """`CostModel` of one pass of *layer*, with prompts going through *modules* such layers."""

    reads_whole_step = True
    """The first pass of a round reads every token that the target verified (`sim.engine.batch.pricing`)."""

    def __init__(self, layer: CostModel, modules: int, parallel: ParallelConfig) -> None:
        if modules < 1:
            raise ValueError(f"modules is at least 1; got {modules}")
        self.layer, self.modules, self.parallel = layer, modules, parallel
        self.n_stages = 1
        self.window_tokens = layer.window_tokens
        self.peak_flops_per_s = layer.peak_flops_per_s
        self.peak_bytes_per_s = layer.peak_bytes_per_s

    def _times(self, totals: Totals) -> Any:
        prompt = totals.prefill_rows
        return (
            np.where(prompt > 0, self.modules, 1) if isinstance(prompt, np.ndarray) else self.modules if prompt else 1
        )

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        """The time of prompt chunks, or of one pass of decodes; the two are never asked for together."""
        return self._times(totals) * self.layer.iteration_s(totals)

    def common_step(self, ranks: Sequence[Totals], stage: int = 0, /) -> Any:
        """The same of all ranks of data-parallel attention, together."""
        prompts = any(np.any(totals.prefill_rows) for totals in ranks)
        return (self.modules if prompts else 1) * cast(RankedCostModel, self.layer).common_step(ranks)

    def handover_s(self, rows: Any, /) -> Any:
        return 0.0 * rows

    def work(self, totals: Totals, /) -> Work:
        one, times = self.layer.work(totals), self._times(totals)
        return Work(times * one.flops, times * one.hbm_bytes, times * one.tile_flops, times * one.still_s)

    def __repr__(self) -> str:
        return f"MtpCost({self.layer!r}, modules={self.modules})"


class MtpDraft(NamedTuple):
    """The parts that multi-token prediction adds to a target."""

    cost: MtpCost
    """The cost of one pass."""
    held: Deployment
    """All extra layers: their weights and cache are loaded and kept, whichever of them a round uses."""


def mtp_draft(target: Deployment, k: int) -> MtpDraft:
    """The extra layers of *target* drafting at most *k* tokens a round, on its devices and split as it is.

    A pass has no host work of its own: stacks launch the passes of a round with the step that they follow. ValueError where the
    model has no such layers, or they cannot be priced.
    """
    model, parallel = target.model, replace(target.parallel, pipeline=1)
    made_by: CostFactory = target.made_by
    if isinstance(made_by, Calibrated):
        own = replace(made_by.stack.overheads, step_s=0.0, sequence_s=0.0, row_s=0.0)
        made_by = replace(made_by, stack=replace(made_by.stack, overheads=own))

    def deployed(layers: int) -> Deployment:
        return deploy(
            model=model.mtp_draft(layers),
            hardware=target.device,
            parallel=parallel,
            kv_precision=target.kv_precision,
            cost=made_by,
        )

    return MtpDraft(MtpCost(deployed(1).cost, min(model.mtp_layers, max(k, 1)), parallel), deployed(model.mtp_layers))
