"""Published serving runs as cases of a fit: rows of aggregated serving, by deployment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.bench.cases import case_of
from sim.bench.fitting import Case
from sim.bench.parameters import Setting
from sim.validation.fit_stacks import DEPLOYMENT
from sim.validation.runs import (
    MEASURED_VLLM,
    Unmodelled,
    deployed,
    experiment_of,
    rows_of,
    served_run,
    speculates,
)

if TYPE_CHECKING:
    from sim.engine.columns import Columns


def deployments(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of the e2e_silicon_agg table in *folder* by deployment and source, without speculation, in the order of the table."""
    from hwmodels.measured import read

    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(read(folder / "e2e_silicon_agg.csv")):
        if not speculates(row):
            found.setdefault("|".join(str(row[name]) for name in (*DEPLOYMENT, "provenance")), []).append(row)
    return found


def case_of_row(row: Mapping[str, Any], folder: Path) -> tuple[Case, Setting]:
    """A row as a case, and the stack that its deployment has before any fit; `Unmodelled` where it cannot be simulated."""
    from hwmodels.overheads import serving_stack

    run = served_run(row, folder)
    stack = serving_stack(run.stack, run.release)
    deployment = deployed(run, stack)
    workload = run.protocol.workload(
        prompt_tokens=run.prompt_tokens, output_tokens=run.output_tokens, concurrency=run.concurrency, seed=0
    )
    experiment = experiment_of(
        deployment, stack, workload, settings=run.settings, concurrency=run.concurrency, release=MEASURED_VLLM
    )

    def figure(columns: Columns) -> tuple[np.ndarray, dict[str, float]]:
        counted = run.protocol.counted(columns.requests["arrival_ns"], run.concurrency)
        return counted, run.protocol.figures(columns, run.concurrency)._asdict()

    name = f"{run.prompt_tokens} + {run.output_tokens} tokens, {run.concurrency} clients"
    measured_s = {"tpot_s": row["tpot_ms"] * 1e-3, "ttft_s": row["ttft_ms"] * 1e-3}
    return case_of(name, measured_s, experiment, deployment, figure), Setting(stack=stack)


__all__ = ["Unmodelled", "case_of_row", "deployments"]
