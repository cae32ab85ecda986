"""Published measurements of power as runs: servers kept at their limit of running sequences, and what their GPUs drew meanwhile.

A row is of the steady part of a run (ML.ENERGY's benchmark): as many requests as the server takes are always in flight. What it
does not say is taken alike for all rows of a task (`TASKS`): lengths of prompts, which are published nowhere, and how answers
spread around the mean that the row has. Its figures here are those of the time between the first requests' answers and the
last request that is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hwmodels.model import LatentAttention
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.power import ARITHMETIC_EXPONENT, arithmetic_term, power_model
from sim.bench.measured import BenchRun, Lengths, Offered
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import Served, experiment_of, served_run, whole
from sim.engine import run as simulated
from sim.work import iterations_of

STACK = "vllm"
RELEASES = {"mlenergy2": "0.5", "mlenergy3": "0.11.1"}
"""The release of vLLM behind each set; that of the older is not published, and of its time."""


class Task(NamedTuple):
    """Lengths of a task's requests."""

    prompt_tokens: int
    """Mean; prompts spread like an exponential distribution."""
    answer_spread: float
    """Standard deviation of answers over their mean."""


TASKS = {
    "lm-arena-chat": Task(300, 0.95),
    "gpqa": Task(250, 0.7),
    "sourcegraph-fim": Task(4500, 1.5),
    "chat": Task(150, 1.0),
    "code": Task(200, 1.5),
}
"""Prompts are assumptions: with these, dense models on H100 were measured at 0.94 to 1.02 of the simulated speed in the median.
Spreads of answers are of the histograms that the same benchmark publishes; those of the older set's two tasks are assumed too."""
HOSTS = {"mlenergy3": {"step_s": 1.43e-3, "sequence_s": 3.2e-5}}
"""Host terms of a set's servers in place of those of their release, as `sim.validation.fit_power` has them of its rows on H100:
0.11 has those of 0.12 otherwise, which were fitted to rows of 0.12 alone."""
LONE_HOSTS = {("mlenergy3", "b200"): {"step_s": 3.1e-3, "sequence_s": 6.1e-5}}
"""The same of a set's servers of one device of this kind, as the rows of these have them, all of them."""
_FORMATS = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "mxfp4"}
_ROUNDS = 0.8
"""Requests that are sent after those that fill the server, over its seats."""
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The power of one GPU of a server in the steady part of its run, and the work it did: means over the time."""

    device: str
    watt: float
    tokens_per_s: float
    """Output tokens of all GPUs of the server together."""
    devices: int
    busy: float
    """Share of the time in which an iteration runs; the two below are means of that time."""
    bandwidth: float
    arithmetic: float
    """Not the share of peak arithmetic, rows that only fill tiles among it, but its `arithmetic_term`."""

    @property
    def joule_per_token(self) -> float:
        return self.watt * self.devices / self.tokens_per_s

    def at(self, tokens_per_s: float) -> tuple[float, float]:
        """Bandwidth and arithmetic over all of the time, at another speed: a slower server waits between iterations, a
        faster one does the same in less time."""
        faster = tokens_per_s / self.tokens_per_s
        arithmetic = self.arithmetic * self.busy * (faster if faster < 1 else faster**ARITHMETIC_EXPONENT)
        return min(1.0, self.bandwidth * self.busy * faster), arithmetic


def server_of(row: Mapping[str, Any], release: str) -> Served:
    """The server of a row under its load; `Unmodelled` names what is missing."""
    task = TASKS.get(str(row["task"]))
    if task is None:
        raise Unmodelled(f"prompts of {row['task']} have images or videos of unknown size")
    devices, data = whole(row, "num_gpus", 1), whole(row, "dp", 1)
    seats, answer = whole(row, "max_num_seqs", 0), float(row["avg_output_len"])
    if whole(row, "pp", 1) > 1:
        raise Unmodelled("power was fitted without pipelines")
    served = served_run(
        {
            "model_path": row["model"],
            "system": str(row["gpu"]).lower(),
            "backend": STACK,
            "backend_version": release,
            "precision": _FORMATS.get(str(row.get("precision", "bfloat16")), "bf16"),
            "gemm_quant_mode": "",
            "moe_quant_mode": "",
            "mode": "agg",
            "isl": task.prompt_tokens,
            "osl": max(1, round(answer)),
            "concurrency": seats,
            "tp_size": devices // data,
            "attention_dp_size": data,
            # Experts lie whole on the GPUs, as the launch scripts of the benchmark have it.
            "moe_ep_size": devices,
        }
    )
    rng, n = np.random.default_rng(_SEED), seats + int(_ROUNDS * seats) + 24
    prompts = np.maximum(1, np.rint(rng.exponential(task.prompt_tokens, n)))
    answers = rng.gamma(task.answer_spread**-2, answer * task.answer_spread**2, n)
    answers = np.maximum(1, np.rint(answers * (answer / answers.mean())))
    load = Offered(
        concurrency=seats,
        requests=n,
        prompt=Lengths(each_tokens=tuple(prompts.astype(int).tolist())),
        output=Lengths(each_tokens=tuple(answers.astype(int).tolist())),
    )
    parallel = served.decode.parallel
    if isinstance(served.model.attention, LatentAttention) and served.model.expert_precision == "fp8_block":
        # Told not to use DeepGEMM, as their steps have it: these grow with the experts that are awake, from 18 ms with 7 of a
        # device's 32 to 41 with 28 (the others' have the same part whatever is awake), as Triton's do.
        parallel = replace(parallel, layout=replace(parallel.layout, backend="triton"))
    settings = replace(served.decode.settings, max_sequences=seats)
    decode = replace(served.decode, parallel=parallel, settings=settings)
    return replace(served, run=BenchRun(name="", file="", format="", offered=load), decode=decode)


def stack_of(release: str, lone: str = "") -> ServingStack:
    """The stack of a release as the rows' servers ran it, with the terms of their hosts; *lone*: the device of a server of one."""
    stack = serving_stack(STACK, release)
    of = next((name for name, each in RELEASES.items() if each == release), "")
    terms = LONE_HOSTS.get((of, lone), HOSTS.get(of, {}))
    return replace(stack, overheads=replace(stack.overheads, **terms))


def drawn(row: Mapping[str, Any], release: str, stack: ServingStack | None = None) -> Drawn:
    """The power of the GPUs of a row's server, with the terms of *stack* or those of `stack_of`; `Unmodelled` where it cannot be
    priced or does not fit."""
    served = server_of(row, release)
    lone = str(row["gpu"]).lower() if whole(row, "num_gpus", 1) == 1 else ""
    experiment, deployment = experiment_of(served, stack=stack or stack_of(release, lone))
    columns = simulated(experiment)
    finished = np.sort(columns.requests["finish_ns"][columns.requests["finish_ns"] >= 0])
    seats = served.concurrency
    if len(finished) <= seats:
        raise Unmodelled("its KV cache does not hold a request")
    # Until the first of them have ended none has: contexts are too short.
    begin_ns, end_ns = finished[min(seats // 2, len(finished) - seats - 1)], finished[len(finished) - seats]
    steps = iterations_of(deployment.cost, columns, from_ns=int(begin_ns), to_ns=int(end_ns))
    span_s = (end_ns - begin_ns) * 1e-9
    busy_s = float(steps.seconds.sum())
    if busy_s <= 0 or not math.isfinite(busy_s):
        raise Unmodelled("no iteration runs in the steady part")
    model = power_model(deployment.device.name)
    share_s = float((model.iteration_share(steps.bandwidth, steps.arithmetic, steps.still) * steps.seconds).sum())

    def mean(values: np.ndarray) -> float:
        return float((values * steps.seconds).sum() / busy_s)

    return Drawn(
        device=deployment.device.name,
        watt=deployment.device.tdp_w * (share_s + model.idle * max(0.0, span_s - busy_s)) / max(span_s, busy_s),
        tokens_per_s=steps.tokens / span_s,
        devices=deployment.parallel.n_devices,
        busy=min(1.0, busy_s / span_s),
        bandwidth=mean(np.minimum(steps.bandwidth, 1.0)),
        arithmetic=mean(arithmetic_term(steps.arithmetic, steps.still)),
    )
