"""One way to run anything: a scenario or an experiment in, a result out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import ScenarioError
from sim.results import Result

if TYPE_CHECKING:
    from hwmodels.cost import CostModel
    from sim.engine import Columns, Experiment
    from sim.scenario import Scenario
    from sim.scenario.assembly import Built


_SPAN_FIELDS = (
    *("n", "prefill_rows", "prefill_chunks", "prefill_pairs", "prefill_kv_tokens", "decode_seqs", "query_tokens"),
    *("decode_kv_tokens", "completions", "prefill_pairs_window", "decode_kv_window", "window_growth"),
    "draft_steps",
)
_SPANS_AT_ONCE = 1 << 17


def simulate(what: Scenario | Experiment, *, fast_forward: bool = True) -> Result:
    """Run a scenario, or an experiment made by hand, to its end.

    With *fast_forward* off every iteration is an event of its own: the same result, slower. Raises ScenarioError
    (a ValueError) for a scenario that cannot be built, and for a policy that breaks its rules.
    """
    from sim.engine import Experiment

    if isinstance(what, Experiment):
        manifest = {"label": "experiment", "seed": what.seed, **_classes(what)}
        return Result(_run(what, fast_forward), manifest=manifest)
    from sim.scenario import Scenario

    if not isinstance(what, Scenario):
        raise TypeError(f"simulate takes a Scenario or an Experiment; got {type(what).__name__}")
    from sim.scenario.assembly import resolve

    return run_built(resolve(what), fast_forward=fast_forward)


def run_built(built: Built, *, fast_forward: bool = True) -> Result:
    """Run what `sim.scenario.assembly.resolve` made of a scenario."""
    columns = _run(built.experiment, fast_forward)
    return Result(columns, manifest={**built.manifest, **_classes(built.experiment)}, slo=built.slo)


def _classes(experiment: Experiment) -> dict[str, Any]:
    """Classes of service and tenants of a workload by their rows, for the manifest; nothing where there are none."""
    from workloads import ServiceClass, Trace

    workload = experiment.workload
    found: dict[str, Any] = {}
    if isinstance(workload, Trace) and workload.class_index is not None:
        terms = workload.terms or tuple(ServiceClass(name=name) for name in workload.classes)
        found["classes"] = [
            {
                "name": each.name,
                "priority": each.priority,
                "weight": each.weight,
                "deadline_s": each.deadline_s,
                "slo": {"ttft_s": each.ttft_s, "tpot_s": each.tpot_s, "e2el_s": each.e2el_s},
            }
            for each in terms
        ]
    if isinstance(workload, Trace) and workload.tenant_index is not None:
        found["tenants"] = list(workload.tenants)
    return found


def _run(experiment: Experiment, fast_forward: bool) -> Columns:
    from sim.engine import PolicyError, run

    try:
        columns = run(experiment, fast_forward=fast_forward)
    except PolicyError as error:
        way_out = "; in a scenario: memory.preemption: recompute" if error.short_of_memory else ""
        raise ScenarioError(f"{error}{way_out}") from error
    columns.meta.update(work_done(experiment, columns))
    rounds = [replica.speculation for replica in columns.replicas if replica.speculation is not None]
    if rounds:
        from sim.engine.columns import sum_rounds

        columns.meta["speculation"] = sum_rounds(rounds)
    return columns


def work_done(experiment: Experiment, columns: Columns) -> dict[str, float]:
    """Arithmetic and memory traffic of a run over all replicas, and what their GPUs could do in a second.

    Keys: flops, hbm_bytes, peak_flops_per_s, peak_bytes_per_s. Within a span only the KV tokens read change, evenly,
    and work is affine in them: the mean of its first and last iteration is that of all. Empty where a model is known by a table
    of latencies only, which says nothing of its work.
    """
    from sim.engine.prices import StageTable

    done = {"flops": 0.0, "hbm_bytes": 0.0, "peak_flops_per_s": 0.0, "peak_bytes_per_s": 0.0}
    rows = iter(columns.replicas)
    for machine in experiment.machines:
        spans = [next(rows).spans for _ in range(len(machine.tenants) * machine.ranks)]
        costs = [spec.cost for spec in machine.tenants if not isinstance(spec.cost, StageTable)]
        if len(costs) < len(machine.tenants):
            return {}
        # Models that share a machine share its GPUs; one that computes in a narrower format has the higher peak.
        done["peak_flops_per_s"] += max(cost.peak_flops_per_s for cost in costs)
        done["peak_bytes_per_s"] += max(cost.peak_bytes_per_s for cost in costs)
        if machine.ranks > 1:
            spans = [_together(spans)]
        for cost, spec, of_it in zip(costs, machine.tenants, spans, strict=True):
            _add_work(done, cost, spec.draft_cost, of_it)
    return done


def _together(of_ranks: list[np.ndarray]) -> np.ndarray:
    """The steps of ranks, each an iteration of all of them: what is read once by all is counted once."""
    spans = np.concatenate(of_ranks)
    starts, step = np.unique(spans["start_ns"], return_inverse=True)
    found = np.zeros(len(starts), [(name, np.int64) for name in _SPAN_FIELDS])
    for name in _SPAN_FIELDS:
        np.add.at(found[name], step, spans[name].astype(np.int64))
    found["n"] = 1
    queries = np.zeros(len(starts), np.int64)
    np.add.at(queries, step, spans["decode_seqs"].astype(np.int64) * spans["query_tokens"])
    found["query_tokens"] = -(-queries // np.maximum(found["decode_seqs"], 1))
    found["draft_steps"] = 0
    np.maximum.at(found["draft_steps"], step, spans["draft_steps"].astype(np.int64))
    return found


def _add_work(done: dict[str, float], cost: CostModel, draft_cost: CostModel | None, spans_of: np.ndarray) -> None:
    """What a model did on a machine, by its records."""
    from hwmodels.totals import Totals

    for at in range(0, len(spans_of), _SPANS_AT_ONCE):
        spans = spans_of[at : at + _SPANS_AT_ONCE]
        span = {name: spans[name].astype(np.int64) for name in _SPAN_FIELDS}
        queries = span["decode_seqs"] * span["query_tokens"]
        for steps in (0, span["n"] - 1):
            totals = Totals(
                rows=span["prefill_rows"] + queries,
                prefill_rows=span["prefill_rows"],
                prefill_chunks=span["prefill_chunks"],
                prefill_pairs=span["prefill_pairs"],
                prefill_kv_tokens=span["prefill_kv_tokens"],
                decode_seqs=span["decode_seqs"],
                decode_kv_tokens=span["decode_kv_tokens"] + steps * span["decode_seqs"],
                logit_rows=queries + span["completions"],
                prefill_pairs_window=span["prefill_pairs_window"],
                decode_kv_window=span["decode_kv_window"] + steps * span["window_growth"],
            )
            work = cost.work(totals)
            done["flops"] += 0.5 * float(_total(work.flops, span["n"]))
            done["hbm_bytes"] += 0.5 * float(_total(work.hbm_bytes, span["n"]))
        if draft_cost is not None:
            _add_draft_work(done, draft_cost, span)


def _add_draft_work(done: dict[str, float], draft: CostModel, span: Mapping[str, Any]) -> None:
    """Prompts and passes of the draft model; a draft of which only a time is known adds nothing."""
    from hwmodels.totals import Totals

    zero = np.zeros_like(span["n"])
    prompts = Totals(
        rows=span["prefill_rows"],
        prefill_rows=span["prefill_rows"],
        prefill_chunks=span["prefill_chunks"],
        prefill_pairs=span["prefill_pairs"],
        prefill_kv_tokens=span["prefill_kv_tokens"],
        decode_seqs=zero,
        decode_kv_tokens=zero,
        logit_rows=zero,
        prefill_pairs_window=span["prefill_pairs_window"],
        decode_kv_window=zero,
    )
    seqs, kv = span["decode_seqs"], span["decode_kv_tokens"]
    window = zero if draft.window_tokens is None else span["decode_kv_window"]
    passes = Totals(seqs, zero, zero, zero, zero, seqs, kv, seqs, zero, window)
    decoding = span["draft_steps"] * (seqs > 0)
    done_by = [(prompts, span["n"] * (span["prefill_rows"] > 0)), (passes, span["n"] * decoding)]
    if getattr(draft, "reads_whole_step", False):
        first = (decoding > 0).astype(np.int64)
        whole = passes._replace(rows=seqs * span["query_tokens"])
        done_by[1:] = [(whole, span["n"] * first), (passes, span["n"] * (decoding - first))]
    for totals, times in done_by:
        work = draft.work(totals)
        done["flops"] += float(_total(work.flops, times))
        done["hbm_bytes"] += float(_total(work.hbm_bytes, times))


def _total(each: Any, times: np.ndarray) -> Any:
    return (np.broadcast_to(each, times.shape) * times).sum()
