"""AlpaServe (Li et al., OSDI 2023, arXiv 2302.11665): many models on one cluster, placed by simulation."""

from __future__ import annotations

import itertools
from pathlib import Path

from sim.reproduce.alpaserve import queueing, recorded, stages, statements
from sim.reproduce.rows import Part, Row

TITLE = "AlpaServe, OSDI 2023"

PARTS = (
    Part("two models on two GPUs", queueing.two_models, 2),
    Part("M/D/1", queueing.closed_forms, 4),
    Part("stages on V100", stages.rows, 1),
    Part("recorded on the cluster", recorded.cluster, 16),
    Part("ablation, up to 40 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and devices <= 40), 16),
    Part("ablation, 41 to 88 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and 40 < devices <= 88), 40),
    Part("ablation, 89 to 136 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and 88 < devices <= 136), 40),
    Part("ablation, from 137 GPUs", recorded.ablation(lambda devices, rate: rate == 64.0 and devices > 136), 34),
    Part("ablation, rates", recorded.ablation(lambda _, rate: rate != 64.0), 25),
    Part("ablation, CV and SLO", recorded.ablation_points, 5),
    Part("Azure Functions", recorded.azure, 0),
    Part("104B models", statements.very_large, 2),
    Part("when model parallelism helps", statements.when_it_helps, 7),
    Part("policies", statements.policies, 15),
)


def rows(quick: bool = False) -> list[Row]:
    """Published numbers beside simulated ones; *quick* takes fewer seeds and a part of the ablation."""
    return list(itertools.chain.from_iterable(part.run(quick) for part in PARTS))


def plots(folder: Path) -> list[Path]:
    """Draw the two-model example, the sweeps of the policies, set S4, and simulator against cluster."""
    from sim.reproduce.alpaserve import pictures

    return pictures.plots(folder)
