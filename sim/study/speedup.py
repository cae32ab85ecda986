"""Speculative decoding through the event loop, for laying over the closed forms of `sim.theory.speculative`.

Everything here makes an `Experiment` and runs it with the engine; nothing is computed from a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hwmodels.cost import CostModel, Work
from hwmodels.latency_models import LinearTime, StepTime
from hwmodels.totals import Totals, seen
from policies.acceptance import Acceptance, Iid, MeanLength
from policies.decoding import DraftStatistics, Speculative, statistics_of_counts
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.engine.batch.decoding import Decoding
from sim.theory.speculative import SPECDECODE_BENCH, LinearServer
from workloads import ClosedLoop, Trace, Workload

FloatArray = NDArray[np.float64]
Z_99 = 2.5758
"""Two-sided 99 % point of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A mean over independent requests and the half-width of its 99 % confidence interval."""

    mean: float
    half_width: float

    def covers(self, value: float) -> bool:
        """Whether *value* lies in the interval, to rounding."""
        return abs(value - self.mean) <= self.half_width + 1e-9 * abs(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneRun:
    """Requests served one after another by a replica of its own."""

    speedup: Measured
    tokens_per_round: Measured
    statistics: DraftStatistics
    seconds_per_token: float
    query_tokens_per_token: float
    rounds: NDArray[np.int64]
    """The numbers of rounds that put out 1, 2, ... tokens."""


def alone(
    acceptance: Acceptance | float,
    k: int,
    *,
    target_s: float = 1.0,
    draft_s: float = 0.0,
    overhead_s: float = 0.0,
    requests: int = 40,
    output_tokens: int = 4001,
    method: str = "draft_model",
    seed: int = 0,
) -> AloneRun:
    """Decode *requests* outputs at batch one: a step of the target takes *target_s*, a draft pass *draft_s*.

    The speed-up is over *target_s* a token. Its interval is of the mean over requests; what the end of an output cuts
    off a last round stays in (about half a round in an output).
    """
    process = Iid(alpha=float(acceptance)) if isinstance(acceptance, int | float) else acceptance
    decoding = Speculative(method=cast(Any, method), num_speculative_tokens=k, acceptance=process)
    columns = _one_by_one(
        StepTime(step_s=target_s),
        decoding,
        StepTime(step_s=draft_s),
        np.ones(requests, np.int64),
        np.full(requests, output_tokens),
        overhead_s=overhead_s,
        seed=seed,
    )
    per_token_s = _decode_s(columns) / (output_tokens - 1)
    counts = columns.replicas[0].speculation or {}
    rounds = np.array(counts[k, process.width(k) - 1] if k else [requests * (output_tokens - 1)], np.int64)
    n = np.arange(1, len(rounds) + 1)
    drawn = float(rounds.sum())
    mean = float((rounds * n).sum()) / drawn
    spread = float(np.sqrt(max((rounds * (n - mean) ** 2).sum() / drawn, 0.0) / drawn))
    spans = columns.replicas[0].spans
    queries = int((spans["n"].astype(np.int64) * spans["decode_seqs"] * spans["query_tokens"]).sum())
    return AloneRun(
        speedup=_ratio_of_mean(target_s, per_token_s),
        tokens_per_round=Measured(mean=mean, half_width=Z_99 * spread),
        statistics=statistics_of_counts(counts),
        seconds_per_token=float(per_token_s.mean()),
        query_tokens_per_token=queries / (requests * (output_tokens - 1)),
        rounds=rounds,
    )


def costs_of(server: LinearServer, k: int) -> tuple[LinearTime, LinearTime]:
    """Cost models of *server*'s target and of one pass of its draft, whose time for a proposal is spread over the *k* passes."""
    target = LinearTime(
        fixed_s=server.base_s + server.overhead_s, row_s=server.per_token_s, kv_token_s=server.per_kv_token_s
    )
    passes = max(k, 1)
    draft = LinearTime(fixed_s=server.draft_base_s / passes, kv_token_s=server.draft_per_kv_token_s / passes)
    return target, draft


def at_batch(
    target: Any,
    draft: Any,
    acceptance: Acceptance,
    k: int,
    batch: int,
    context: int,
    *,
    rounds: int = 128,
    least_rounds: int = 40_000,
    seed: int = 0,
) -> float:
    """Speed-up in tokens per second of *batch* sequences that all decode, their context *context* tokens on average.

    *target* is the target's cost model, *draft* that of one pass of the draft (`costs_of` a linear server). Runs are repeated on
    other draws until *least_rounds* rounds of sequences have been seen; prompts are not timed.
    """
    decoding = Speculative(method="eagle", num_speculative_tokens=k, acceptance=acceptance)
    length = acceptance.mean_length(k)
    plain = _rate_per_s(target, None, None, batch, context, round(rounds * length), 1.0, 0)
    repeats = -(-least_rounds // (rounds * batch)) if 0.0 < length - 1.0 < k else 1
    runs = [_rate_per_s(target, decoding, draft, batch, context, rounds, length, seed + i) for i in range(repeats)]
    # Every run lasts equally many rounds, so the mean of rates weighs them by time as one long run would.
    return float(np.mean(runs)) / plain


def _rate_per_s(
    target: Any, decoding: Decoding | None, draft: Any, batch: int, context: int, rounds: int,
    length: float, seed: int,
) -> float:  # fmt: skip
    """Tokens per second over *rounds* decode iterations in which no sequence finishes."""
    ahead = round(rounds * length)
    prompt = max(1, context - ahead // 2)
    most = rounds * (1 if decoding is None else decoding.max_query_tokens) + 2
    workload = Trace.from_arrays(
        arrival_ns=np.zeros(batch, np.int64),
        prompt_tokens=np.full(batch, prompt),
        output_tokens=np.full(batch, most),
    )
    step_s = float(target.iteration_s(Totals(batch * 32, 0, 0, 0, 0, batch, batch * (prompt + most), batch, 0, 0)))
    step_s += 0.0 if draft is None else 16 * float(draft.iteration_s(Totals(batch, decode_kv_tokens=batch * prompt)))
    columns = _run(
        target,
        decoding,
        draft,
        workload,
        batch=batch,
        seed=seed,
        horizon_ns=int(1e9 * (rounds * step_s + 2 * target.iteration_s(Totals(batch * prompt)))) + 1,
    )
    iterations = columns.iterations()
    decodes = np.flatnonzero((iterations["decode_tokens"] > 0) & (iterations["prefill_tokens"] == 0))[:rounds]
    if len(decodes) < rounds:
        raise AssertionError(f"the horizon of the run left {len(decodes)} of {rounds} rounds")
    seconds = float(iterations["duration_ns"][decodes].sum()) * 1e-9
    return float(iterations["emitted_tokens"][decodes].sum()) / seconds


class _BesideIterations:
    """All of *cost* but the time of an iteration."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.n_stages, self.window_tokens = cost.n_stages, cost.window_tokens
        self.peak_flops_per_s, self.peak_bytes_per_s = cost.peak_flops_per_s, cost.peak_bytes_per_s

    def handover_s(self, rows: Any, /) -> Any:
        return self._cost.handover_s(rows)

    def work(self, totals: Totals, /) -> Work:
        return self._cost.work(totals)


class VerifyForFree(_BesideIterations):
    """*cost* with decode steps at the cost of one query token per sequence: the premise of the paper's speed-up."""

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        seqs = totals.decode_seqs
        surplus = totals.rows - totals.prefill_rows - seqs
        return self._cost.iteration_s(
            totals._replace(
                rows=totals.rows - surplus,
                logit_rows=totals.logit_rows - surplus,
                decode_kv_tokens=totals.decode_kv_tokens - surplus,
            ),
            stage,
        )


class PromptsForFree(_BesideIterations):
    """*cost* of the decodes only: an iteration without any takes no time."""

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        queries = totals.rows - totals.prefill_rows
        alone = totals._replace(
            rows=queries, prefill_rows=0 * queries, prefill_chunks=0 * queries, prefill_pairs=0 * queries,
            prefill_kv_tokens=0 * queries, logit_rows=queries, prefill_pairs_window=0 * queries,
        )  # fmt: skip
        seconds = self._cost.iteration_s(alone, stage)
        return seconds * (totals.decode_seqs > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The steps from the paper's speed-up to that of a deployment: *speedups[i]* holds with all effects up to labels[i]."""

    labels: tuple[str, ...]
    speedups: tuple[float, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss by each effect, in the order of labels from the second on; negative where it adds."""
        return tuple(before - after for before, after in zip(self.speedups, self.speedups[1:], strict=False))


def explain_gap(experiment: Experiment, *, alone_requests: int = 150) -> Gap:
    """Why a deployment does not see the paper's speed-up, one effect after another, each step a pair of runs.

    *experiment* speculates on a trace of arrivals, or for clients in a closed loop, whose number is the batch. The paper's
    speed-up takes the mean acceptance length of its k at batch one and c from the two cost models at the mean context.
    Requests one by one add the ends of outputs (ratio of decode times) and the target's prompts (ratio of end-to-end
    latencies, as from here on). The deployment's load then adds waiting, batching and the token budget that drafts take,
    first with a verify step as short as a plain one and prompts that cost the draft nothing; the width of the verify step,
    the fixed overhead and the draft's prompts are added under that load, at the batches that it makes.
    """
    spec = experiment.replicas[0]
    if not isinstance(spec, ReplicaSpec) or any(replica != spec for replica in experiment.replicas):
        raise ValueError("explain_gap takes an experiment on replicas that are alike, with one model each")
    decoding, draft = spec.decoding, spec.draft_cost
    trace = experiment.workload
    if not isinstance(decoding, Speculative) or (trace.planned_ns is None and not isinstance(trace, ClosedLoop)):
        raise ValueError("explain_gap takes an experiment that speculates, on a trace of arrivals or in a closed loop")
    prompts, outputs = trace.prompt_tokens[:alone_requests], trace.output_tokens[:alone_requests]
    some = outputs > 1
    prompts, outputs = prompts[some], outputs[some]
    total = float(outputs.sum())
    context = round(float(((prompts + outputs / 2) * outputs).sum()) / total)
    cost = cast(CostModel, spec.cost)
    one = Totals(1, 0, 0, 0, 0, 1, context, 1, 0, seen(context, cost.window_tokens) if cost.window_tokens else 0)
    target_s = sum(float(cost.iteration_s(one, stage)) for stage in range(cost.n_stages))
    c = 0.0 if draft is None else float(draft.iteration_s(one)) / target_s
    k = decoding.k(1)
    # Without a draft model, or with heads inside the target, a pass costs nothing or is part of the overhead.
    paper = decoding.acceptance.mean_length(k) / (1.0 + decoding.draft_steps(1) * c)

    free_width = cast(CostModel, VerifyForFree(cost))
    own_prompts = draft if draft is None else cast(CostModel, PromptsForFree(draft))

    def one_by_one(price: CostModel, measure: Callable[[Columns], FloatArray]) -> float:
        seed = experiment.seed
        fast = _one_by_one(price, decoding, own_prompts, prompts, outputs, overhead_s=0.0, seed=seed)
        slow = _one_by_one(price, None, None, prompts, outputs, overhead_s=0.0, seed=seed)
        return float(measure(slow).sum() / measure(fast).sum())

    def loaded_s(replica: ReplicaSpec) -> float:
        replicas = (replica,) * len(experiment.replicas)
        return float(_latency_s(run(replace(experiment, replicas=replicas))).mean())

    plain_s = loaded_s(replace(spec, decoding=None, draft_cost=None, speculation_overhead_s=0.0))
    free = replace(spec, cost=free_width, draft_cost=own_prompts, speculation_overhead_s=0.0)
    steps = {
        "paper's formula": paper,
        "ends of outputs": one_by_one(cast(CostModel, PromptsForFree(free_width)), _decode_s),
        "target's prompts": one_by_one(free_width, _latency_s),
        "queueing and batching": plain_s / loaded_s(free),
        "width of the verify step": plain_s / loaded_s(replace(free, cost=cost)),
        "fixed overhead": plain_s / loaded_s(replace(spec, draft_cost=own_prompts)),
        "draft's prompts": plain_s / loaded_s(spec),
    }
    return Gap(labels=tuple(steps), speedups=tuple(steps.values()))


def plain_step_s(cost: CostModel, *, output_tokens: int = 129) -> float:
    """Mean seconds of a plain decode step at batch one, over *output_tokens* tokens after a short prompt."""
    ones = np.ones(1, np.int64)
    columns = _one_by_one(cost, None, None, ones, ones * output_tokens, overhead_s=0.0, seed=0)
    return float(_decode_s(columns)[0]) / (output_tokens - 1)


def specdecode_speedup(batch: int, *, k: int = 5, mean_length: float = 3.0, context: int = 500) -> float:
    """Simulated speed-up of Llama-3.1-8B with EAGLE on an H100, from SpecDecode-Bench's constants."""
    return at_batch(*costs_of(SPECDECODE_BENCH, k), MeanLength(mean=mean_length, at_k=k), k, batch, context)


def _one_by_one(
    target: Any,
    decoding: Decoding | None,
    draft: Any,
    prompts: NDArray[np.int64],
    outputs: NDArray[np.int64],
    *,
    overhead_s: float,
    seed: int,
) -> Columns:
    workload = ClosedLoop(prompt_tokens=prompts, output_tokens=outputs, concurrency=1)
    return _run(target, decoding, draft, workload, batch=1, overhead_s=overhead_s, seed=seed)


def _run(
    target: Any,
    decoding: Decoding | None,
    draft: Any,
    workload: Workload,
    *,
    batch: int,
    seed: int,
    overhead_s: float = 0.0,
    horizon_ns: int | None = None,
) -> Columns:
    lookahead = 0 if decoding is None else decoding.max_query_tokens
    most = int((workload.prompt_tokens + workload.output_tokens).max()) + lookahead
    spec = ReplicaSpec(
        cost=target,
        scheduler=OrcaPaged(max_sequences=batch, watermark=0.0),
        kv_blocks=batch * (-(-most // 16) + 1),
        decoding=decoding,
        draft_cost=draft,
        speculation_overhead_s=overhead_s,
    )
    return run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), seed=seed, horizon_ns=horizon_ns))


def _decode_s(columns: Columns) -> FloatArray:
    """Seconds from the first token to the last of each request."""
    return (columns.requests["finish_ns"] - columns.requests["first_token_ns"]) * 1e-9


def _latency_s(columns: Columns) -> FloatArray:
    done = columns.requests["status"] == 0
    return (columns.requests["finish_ns"] - columns.requests["arrival_ns"])[done] * 1e-9


def _ratio_of_mean(numerator: float, values: FloatArray) -> Measured:
    """numerator / mean(values) with its interval: an interval of the mean, turned over."""
    mean = float(values.mean())
    half = 0.0
    if values.size > 1:
        from scipy.special import stdtrit

        half = float(stdtrit(values.size - 1, 0.995)) * float(values.std(ddof=1)) / float(np.sqrt(values.size))
    return Measured(mean=numerator / mean, half_width=numerator * half / mean**2)


def grid(
    alphas: Sequence[float], ks: Sequence[int], cs: Sequence[float], *, requests: int = 30, output_tokens: int = 4001
) -> list[tuple[float, int, float, AloneRun]]:
    """`alone` at every combination, each with a seed of its own."""
    points = [(a, k, c) for a in alphas for k in ks for c in cs]
    return [
        (a, k, c, alone(a, k, draft_s=c, requests=requests, output_tokens=output_tokens, seed=1000 + i))
        for i, (a, k, c) in enumerate(points)
    ]
