"""Jobs about closed forms: each drawn over what the event loop makes of the same case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hwmodels.latency_models import LinearTime
from policies.acceptance import Iid
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from sim.engine import Experiment, ReplicaSpec, run
from sim.errors import RooftraceError
from sim.explore.answer import at
from sim.explore.work import Asked
from sim.metrics import tpot_s, ttft_s
from sim.placement.groups import GroupExperiment, GroupSpec, run_groups
from sim.study.speedup import alone, at_batch, costs_of
from sim.text import unknown
from sim.theory.queueing import pipeline_placement_latency_s, simple_placement_latency_s
from sim.theory.sarathi import chunk_count
from sim.theory.speculative import SPECDECODE_BENCH, expected_tokens, server_speedup, speedup
from workloads import Fixed, Gamma, Trace, multi_model

Events = Iterator[tuple[str, dict[str, Any]]]
_ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
_BATCHES = (1, 4, 16, 64)
_CONTEXT = 500
_DECODES = 8
"""Sequences that decode beside a prompt in chunks."""
_CHUNKS = (64, 128, 256, 512, 1024, 2048)
_STAGES = (1, 2, 4, 8)
_SERVICE_S = 0.1
_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
_CVS = (0.5, 1.0, 2.0, 4.0, 8.0)
_NS = 1_000_000_000


def theory(asked: Asked, view: Any) -> Events:
    """The closed forms of a *view* over the event loop's points, each picture as it is there."""
    if view not in VIEWS:
        raise RooftraceError(unknown(f"view {view} is not known", str(view), list(VIEWS)))
    yield from (("lines", each) for each in VIEWS[view](asked))
    yield "done", {}


def _picture(title: str, x: tuple[str, str], y: tuple[str, str], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    (x_label, x_unit), (y_label, y_unit) = x, y
    return {
        "title": title,
        "x": {"label": x_label, "unit": x_unit},
        "y": {"label": y_label, "unit": y_unit},
        "lines": list(lines),
    }


def _line(name: str, kind: str, x: Any, y: Any, **ends: Any) -> dict[str, Any]:
    values = {"x": x, "y": y, **ends}
    return {"name": name, "kind": kind, **{key: np.asarray(each, float).tolist() for key, each in values.items()}}


def _speculation(asked: Asked) -> Iterator[dict[str, Any]]:
    """Speed-up over the acceptance at batch 1, and over the batch at the acceptance of the scenario."""
    settings = asked.scenario.resolved()
    k, alpha = at(settings, "decoding.num_speculative_tokens"), at(settings, "decoding.acceptance.alpha")
    k = k if isinstance(k, int) and 0 < k <= 16 else 4
    alpha = 0.7 if alpha is None else alpha
    c = at(settings, "decoding.draft.cost_ratio")
    c = 0.1 if c is None else c
    grid = np.linspace(0.0, 0.98, 50)
    runs = [alone(each, k, draft_s=c, requests=12, output_tokens=801, seed=i).speedup for i, each in enumerate(_ALPHAS)]
    yield _picture(
        f"Speed-up of {k} drafted tokens, one sequence, a draft pass at {c:g} of a step",
        ("acceptance of a drafted token", ""), ("speed-up", ""),
        [
            _line("closed form", "theory", grid, speedup(grid, k, c)),
            _line("event loop", "simulated", _ALPHAS, [each.mean for each in runs],
                  low=[each.mean - each.half_width for each in runs], high=[each.mean + each.half_width for each in runs]),
        ],
    )  # fmt: skip
    length = float(expected_tokens(alpha, k))
    batches = np.unique(np.geomspace(1, 256, 40).round())
    target, draft = costs_of(SPECDECODE_BENCH, k)
    points = [
        at_batch(target, draft, Iid(alpha=alpha), k, each, _CONTEXT, rounds=64, least_rounds=4000) for each in _BATCHES
    ]
    yield _picture(
        f"Speed-up of {k} drafted tokens by batch, acceptance {alpha:g} (Llama-3.1-8B with EAGLE on an H100)",
        ("sequences that decode", ""), ("speed-up", ""),
        [
            _line("closed form", "theory", batches, server_speedup(length, k, batches, _CONTEXT)),
            _line("event loop", "simulated", _BATCHES, points),
        ],
    )  # fmt: skip


def _chunks(asked: Asked) -> Iterator[dict[str, Any]]:
    """Time to the first token, and between the tokens of others, over the size of chunks."""
    server = SPECDECODE_BENCH
    fixed_s, row_s = server.base_s + server.overhead_s, server.per_token_s
    prompt = 4096
    sizes = np.union1d(np.geomspace(_CHUNKS[0], _CHUNKS[-1], 40).round(), _CHUNKS)

    def ttft(size: Any) -> Any:
        n = np.asarray(chunk_count(prompt, np.asarray(size) - _DECODES))
        return n * fixed_s + row_s * (prompt + _DECODES * n)

    found = [_beside_decodes(LinearTime(fixed_s=fixed_s, row_s=row_s), prompt, each) for each in _CHUNKS]
    yield _picture(
        f"First token of a prompt of {prompt:,} tokens beside {_DECODES} decodes", ("token budget", "tokens"), ("TTFT", "s"),
        [
            _line("closed form", "theory", sizes, ttft(sizes)),
            _line("event loop", "simulated", _CHUNKS, [each for each, _ in found]),
        ],
    )  # fmt: skip
    yield _picture(
        "Time between the tokens of those that decode beside it", ("token budget", "tokens"), ("time between tokens", "s"),
        [
            _line("closed form", "theory", sizes, fixed_s + row_s * sizes),
            _line("event loop", "simulated", _CHUNKS, [each for _, each in found]),
        ],
    )  # fmt: skip


def _beside_decodes(cost: Any, prompt: int, budget: int) -> tuple[float, float]:
    """Seconds to the first token of a prompt that comes with `_DECODES` sequences, and the longest between tokens of theirs."""
    n = _DECODES + 1
    workload = Trace.from_arrays(
        arrival_ns=np.zeros(n, np.int64),
        prompt_tokens=np.array([*[1] * _DECODES, prompt]),
        output_tokens=np.array([*[400] * _DECODES, 1]),
    )
    spec = ReplicaSpec(cost=cost, scheduler=Sarathi(token_budget=budget), kv_blocks=prompt)
    columns = run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), seed=0))
    longest_ns = max(int(gaps.max()) for gaps, _ in columns.itl_blocks())
    return float(ttft_s(columns.requests)[-1]), longest_ns / _NS


def _bubbles(asked: Asked) -> Iterator[dict[str, Any]]:
    """Idle share of a pipeline's stages over the micro-batches in flight."""
    lines = []
    most = _STAGES[-1]
    for p in _STAGES[1:]:
        m = np.arange(1, most + 1)
        lines.append(_line(f"{p} stages, closed form", "theory", m, np.maximum(0.0, 1.0 - m / p)))
        lines.append(_line(f"{p} stages, event loop", "simulated", m, [_idle_share(p, int(each)) for each in m]))
    yield _picture(
        "Idle share of the stages of a pipeline, all stages alike",
        ("micro-batches in flight", ""),
        ("idle share", ""),
        lines,
    )


def _idle_share(stages: int, micro_batches: int) -> float:
    """The share of the stages' time in which they idle while sequences decode, one to a micro-batch."""
    n, output = micro_batches, 201
    workload = Trace.from_arrays(
        arrival_ns=np.zeros(n, np.int64), prompt_tokens=np.ones(n, np.int64), output_tokens=np.full(n, output)
    )
    step_s = 1e-3
    cost: Any = LinearTime(fixed_s=step_s, n_stages=stages)
    scheduler = OrcaPaged(max_sequences=1, watermark=0.0)
    spec = ReplicaSpec(cost=cost, scheduler=scheduler, kv_blocks=64 * n, micro_batches=micro_batches)
    columns = run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), seed=0))
    # A step takes stages x step_s of work, and its tokens come as often as the pipeline lets it.
    per_token_s = float(tpot_s(columns.requests).mean())
    return 1.0 - micro_batches * step_s / per_token_s


def _placement(asked: Asked) -> Iterator[dict[str, Any]]:
    """Two models on two devices, one on each or both across both: latency over the load, attainment over burstiness."""
    layouts = {"one model on each device": _apart(), "both models across both devices": _across()}
    forms: Mapping[str, Callable[..., Any]] = dict(
        zip(layouts, (simple_placement_latency_s, pipeline_placement_latency_s), strict=True)
    )
    grid = np.linspace(0.05, 0.93, 45)
    lines = []
    for name, groups in layouts.items():
        lines.append(_line(f"{name}, closed form", "theory", grid, forms[name](grid * 2 / _SERVICE_S, _SERVICE_S)))
        found = [_latencies_s(groups, load, 1.0, 40_000).mean() for load in _LOADS]
        lines.append(_line(f"{name}, event loop", "simulated", _LOADS, found))
    yield _picture("Mean latency of two models on two devices", ("load of a device", "share"), ("latency", "s"), lines)
    lines = []
    for name, groups in layouts.items():
        kept = [float((_latencies_s(groups, 0.6, cv, 20_000) <= 5 * _SERVICE_S).mean()) for cv in _CVS]
        lines.append(_line(name, "simulated", _CVS, kept))
    yield _picture(
        "Requests within five times the service, at a load of 0.6", ("burstiness (CV of the times between requests)", ""),
        ("attainment", "share"), lines,
    )  # fmt: skip


def _apart() -> tuple[GroupSpec, ...]:
    whole = (round(_SERVICE_S * _NS),)
    return tuple(GroupSpec(models=(model,), stage_ns=((whole,),), n_stages=1) for model in (0, 1))


def _across() -> tuple[GroupSpec, ...]:
    half = (round(_SERVICE_S / 2 * _NS),) * 2
    return (GroupSpec(models=(0, 1), stage_ns=((half,), (half,)), n_stages=2),)


def _latencies_s(groups: tuple[GroupSpec, ...], load: float, cv: float, n: int) -> Any:
    rate = load / _SERVICE_S
    arrivals = {name: Gamma(rate_per_s=rate, cv=cv) for name in ("a", "b")}
    workload = multi_model(arrivals, prompt=Fixed(tokens=1), n_requests=n, seed=1)
    found = run_groups(GroupExperiment(workload=workload, groups=groups))
    return (found.finish_ns - workload.arrival_ns) * 1e-9


VIEWS: Mapping[str, Callable[[Asked], Iterator[dict[str, Any]]]] = {
    "speculation": _speculation,
    "chunks": _chunks,
    "bubbles": _bubbles,
    "placement": _placement,
}
