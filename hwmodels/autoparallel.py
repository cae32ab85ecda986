"""Splitting a model over the stages of a pipeline so that the slowest stage is as fast as it can be.

AlpaServe's automatic parallelisation (Li et al., OSDI 2023, arXiv 2302.11665, section 4.1): a dynamic programme over
layer groups for the stages, F(s, k) = min over i of max(F(s - 1, i), latency of groups i + 1 ... k), with the cost of
splitting each stage over devices taken from a cost model with its collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hwmodels.cost import CostFactory
from hwmodels.device import Device
from hwmodels.model import ModelSpec
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """A model's layer groups on the stages of a pipeline."""

    bounds: tuple[int, ...]
    """Stage s runs layer groups bounds[s] up to bounds[s + 1]."""
    stage_s: tuple[float, ...]
    """The time of each stage, the hand-over to the next included."""
    single_device_s: float
    """The time of the whole model on one device."""
    intra_op: int

    @property
    def pass_s(self) -> float:
        """The time from the first stage to the last, nothing else being in the way."""
        return sum(self.stage_s)

    @property
    def alpha(self) -> float:
        """Communication overhead: the pass, times the devices of a stage, over the single-device latency."""
        return self.pass_s * self.intra_op / self.single_device_s

    @property
    def beta(self) -> float:
        """Unevenness: the slowest stage over the mean stage."""
        return max(self.stage_s) * len(self.stage_s) / self.pass_s


def balance(groups_s: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Bounds of *n_stages* runs of consecutive groups whose slowest sum is least; each stage has at least one group.

    Of the splits with the least slowest stage, the one whose later stages are filled first. ValueError for more stages
    than groups, or for times that are negative or not finite.
    """
    times = np.asarray(groups_s, float)
    n = len(times)
    if not 1 <= n_stages <= n:
        raise ValueError(f"n_stages is from 1 to the {n} layer groups; got {n_stages}")
    if not np.all(np.isfinite(times) & (times >= 0)):
        raise ValueError("layer groups take finite times of at least 0")
    sums = np.concatenate(([0.0], np.cumsum(times)))
    best = sums.copy()
    best[0] = np.inf
    choices = []
    for _ in range(1, n_stages):
        # slowest[i, k]: the last of the stages holds groups i ... k - 1.
        slowest = np.maximum(best[:, None], sums[None, :] - sums[:, None])
        slowest[np.tri(n + 1, dtype=bool)] = np.inf
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    bounds = [n]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return (0, *reversed(bounds))


def plan(
    groups_s: Sequence[float],
    n_stages: int,
    *,
    single_device_s: float,
    intra_op: int = 1,
    handover_s: Callable[[int], float] | None = None,
) -> ParallelPlan:
    """The plan with the fastest slowest stage; *handover_s* maps each stage but the last to its seconds of sending."""
    bounds = balance(groups_s, n_stages)
    sums = np.concatenate(([0.0], np.cumsum(groups_s)))

    sending = [handover_s(s) if handover_s and s + 1 < n_stages else 0.0 for s in range(n_stages)]
    return ParallelPlan(
        bounds=bounds,
        stage_s=tuple(float(sums[b] - sums[a]) + s for (a, b), s in zip(pairwise(bounds), sending, strict=True)),
        single_device_s=single_device_s,
        intra_op=intra_op,
    )


@functools.lru_cache(maxsize=256)
def layer_seconds(
    spec: ModelSpec, device: Device, tensor: int, tokens: int, cost: CostFactory = Roofline
) -> tuple[float, ...]:
    """Seconds of each layer of one request of *tokens* tokens, every layer split over *tensor* devices.

    The embedding belongs to the first layer and the head, over all tokens, to the last. Priced as a pipeline of one
    layer a stage, so that collectives are those of the cost model.
    """
    parallel = ParallelConfig(tensor=tensor, pipeline=spec.n_layers)
    model = cost(spec, device, parallel)
    pairs = tokens * (tokens + 1) // 2
    totals = Totals(
        rows=tokens,
        prefill_rows=tokens,
        prefill_chunks=1,
        prefill_pairs=pairs,
        prefill_kv_tokens=tokens,
        logit_rows=tokens if spec.lm_head else 0,
        prefill_pairs_window=pairs,
    )
    return tuple(float(model.iteration_s(totals, stage)) for stage in range(spec.n_layers))


def parallelise(
    spec: ModelSpec, device: Device, *, inter_op: int, intra_op: int, tokens: int, cost: CostFactory = Roofline
) -> ParallelPlan:
    """The best plan of *spec* on inter_op * intra_op devices for one request of *tokens* tokens, from the cost model.

    ValueError where the model cannot be split so.
    """
    groups = layer_seconds(spec, device, intra_op, tokens, cost)
    sender = cost(spec, device, ParallelConfig(tensor=intra_op, pipeline=inter_op))
    hop_s = float(sender.handover_s(tokens)) if inter_op > 1 else 0.0
    return plan(
        groups,
        inter_op,
        single_device_s=sum(layer_seconds(spec, device, 1, tokens, cost)),
        intra_op=intra_op,
        handover_s=lambda _stage: hop_s,
    )
