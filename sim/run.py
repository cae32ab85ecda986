"""One way to run anything: a scenario or an experiment in, a result out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.engine import Columns, Experiment, PolicyError, run
from sim.engine.record.columns import sum_rounds
from sim.errors import ScenarioError
from sim.extrapolated import beyond_measured
from sim.results import Result
from sim.results.costs import powers_of
from sim.scenario import Scenario
from sim.scenario.assembly import Built, resolve
from sim.under_way import under_way
from sim.work import work_done
from workloads import ServiceClass


def simulate(what: Scenario | Experiment, *, fast_forward: bool = True, spill_to: Path | None = None) -> Result:
    """Run a scenario, or an experiment made by hand, to its end.

    With *fast_forward* off every iteration is an event of its own: the same result, slower. Records of iterations beyond
    64 MB go to a file without a name in the folder *spill_to*, or in that of temporary files (TMPDIR), and vanish with the
    result. Raises ScenarioError (a ValueError) for a scenario that cannot be built, and for a policy that breaks its rules.
    """
    if isinstance(what, Experiment):
        manifest = {"label": "experiment", "seed": what.seed, **_classes(what, {})}
        return Result(_run(what, manifest, fast_forward, spill_to), manifest=manifest)

    if not isinstance(what, Scenario):
        raise TypeError(f"simulate takes a Scenario or an Experiment; got {type(what).__name__}")

    return run_built(resolve(what), fast_forward=fast_forward, spill_to=spill_to)


def run_built(built: Built, *, fast_forward: bool = True, spill_to: Path | None = None) -> Result:
    """Run what `sim.scenario.assembly.resolve` made of a scenario; *spill_to* as of `simulate`."""
    columns = _run(built.experiment, built.manifest, fast_forward, spill_to)
    notes = [*built.manifest["notes"], *beyond_measured(built.experiment, columns)]
    manifest = {**built.manifest, "notes": notes, **_classes(built.experiment, built.class_limits)}
    return Result(columns, manifest=manifest, slo=built.slo)


def _classes(experiment: Experiment, limits: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Classes of service and tenants of a workload by their rows, for the manifest; nothing where there are none. *limits*: those
    that a class's requests keep together."""
    workload = experiment.workload
    found: dict[str, Any] = {}
    if workload.class_index is not None:
        terms = workload.terms or tuple(ServiceClass(name=name) for name in workload.classes)
        found["classes"] = [
            {
                "name": each.name,
                "priority": each.priority,
                "weight": each.weight,
                "deadline_s": each.deadline_s,
                "slo": {
                    "ttft_s": each.ttft_s,
                    "tpot_s": each.tpot_s,
                    "e2el_s": each.e2el_s,
                    **limits.get(each.name, {}),
                },
            }
            for each in terms
        ]
    if workload.tenant_index is not None:
        found["tenants"] = list(workload.tenants)
    return found


def _run(experiment: Experiment, manifest: Mapping[str, Any], fast_forward: bool, spill_to: Path | None) -> Columns:
    n = len(experiment.workload)
    try:
        columns = run(
            experiment,
            fast_forward=fast_forward,
            spill_to=spill_to,
            followed=lambda ended: under_way("Simulating", unit="requests", done=ended, total=lambda: n),
        )
    except PolicyError as error:
        way_out = "; in a scenario: memory.preemption: recompute" if error.short_of_memory else ""
        raise ScenarioError(f"{error}{way_out}") from error
    return completed(experiment, columns, manifest)


def completed(experiment: Experiment, columns: Columns, manifest: Mapping[str, Any]) -> Columns:
    """*columns* with what is worked out once a run has ended: the work that was done, and how its drafts fared."""
    columns.meta.update(work_done(experiment, columns, powers_of(manifest, columns.meta.get("fleet"))))
    rounds = [replica.speculation for replica in columns.replicas if replica.speculation is not None]
    if rounds:
        columns.meta["speculation"] = sum_rounds(rounds)
    return columns
