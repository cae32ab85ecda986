"""AlpaServe (Li et al., OSDI 2023, arXiv 2302.11665): many models on one cluster, placed by simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from sim.placement.groups import loop_is_compiled
from sim.reproduce.alpaserve import pictures, policies, queueing, recorded, sharing, stages, very_large
from sim.reproduce.rows import Part, Row, with_reasons

TITLE = "AlpaServe, OSDI 2023"


def _recorded(name: str, run: Callable[[bool], Iterable[Row]], seconds: float) -> Part:
    return Part(name, lambda quick: with_reasons(run(quick), recorded.REASONS), seconds)


PARTS = (
    Part("two models on two GPUs", queueing.two_models, 2),
    Part("M/D/1", queueing.closed_forms, 4),
    Part("stages on V100", stages.rows, 1),
    _recorded("recorded on the cluster", recorded.cluster, 16),
    _recorded("ablation, up to 40 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and devices <= 40), 16),
    _recorded(
        "ablation, 41 to 88 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and 40 < devices <= 88), 40
    ),
    _recorded(
        "ablation, 89 to 136 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and 88 < devices <= 136), 40
    ),
    _recorded("ablation, from 137 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and devices > 136), 34),
    _recorded("ablation, rates", recorded.ablation(lambda _, rate: rate != 64.0), 25),
    _recorded("ablation, CV and SLO", recorded.ablation_points, 5),
    Part("Azure Functions", recorded.azure, 0),
    Part("104B models", very_large.very_large, 2),
    Part("when model parallelism helps", sharing.when_it_helps, 7),
    Part("policies", policies.policies, 15),
)


def rows(quick: bool = False) -> list[Row]:
    """Published numbers beside simulated ones; *quick* takes fewer seeds and a part of the ablation."""
    return list(itertools.chain.from_iterable(part.run(quick) for part in PARTS))


def note() -> str | None:
    """A sentence on what would make the experiments shorter, where the loop is plain Python."""
    if loop_is_compiled():
        return None
    return (
        "The loop that screens placements is plain Python here, with which the searches take most of an hour instead of a "
        "quarter; rooftrace doctor says why it is not compiled, and --quick takes less"
    )


def plots(folder: Path) -> list[Path]:
    """Draw the two-model example, the sweeps of the policies, set S4, and simulator against cluster."""
    return pictures.plots(folder)
