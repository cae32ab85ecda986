"""Measured serving runs and iterations, predicted: deployments from the rows of a file, simulated in the engine.

What a row does not say is taken from how such benchmarks are run, one rule for all rows:

* A closed loop sends ten requests a client, all clients starting at once, and every request counts. Lengths vary evenly
  between 80 and 100 % of the nominal ones (InferenceX's `--random-range-ratio 0.8`), except in runs that a provenance
  column traces to a gap analysis with fixed lengths.
* Attention caches in 8 bits where the weights are in 8 bits or fewer.
* Degrees of parallelism whose product exceeds a node although its square root does not were written down twice, once
  for attention and once for the experts: the root is the number of devices.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment, deploy
from hwmodels.device import load_device
from hwmodels.model import ModelSpec
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals
from sim.errors import RooftraceError

if TYPE_CHECKING:
    from hwmodels.measured import Measurement
    from policies.view import Scheduler
    from sim.engine.columns import Columns
    from workloads import ClosedLoop, Trace

REQUESTS_PER_CLIENT = 10
SHORTEST_SHARE = 0.8
FIXED_LENGTHS = ("internal-gap-analysis",)
"""Provenances of runs whose requests all have the nominal lengths."""
_NARROW = ("fp8", "fp8_block", "fp8_static", "nvfp4", "fp4", "w4a16_mxfp4", "mxfp4", "int4_wo", "int8_wo", "w4afp8")
_FORMATS = {"fp8": "fp8", "fp8_block": "fp8", "fp8_static": "fp8", "nvfp4": "nvfp4", "fp4": "nvfp4", "bfloat16": "bf16",
            "bf16": "bf16", "float16": "fp16", "int4_wo": "int4", "int8_wo": "int8", "mxfp4": "mxfp4",
            "w4a16_mxfp4": "mxfp4"}  # fmt: skip
_MODES = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4_wo", "bf16": "bf16", "fp16": "float16"}
"""Formats of rows that name a precision and no mode."""
RECORDED_SEQUENCES = 128
"""Most running sequences (max_num_seqs) of recorded runs: where the public one's time series levels off."""
_SEED = 0
_SPECULATIVE = ("model_path", "system", "backend", "backend_version", "gemm_quant_mode", "isl", "osl", "concurrency",
                "measured", "provenance", "ttft_ms", "tpot_ms")  # fmt: skip


class Unmodelled(RooftraceError, ValueError):
    """A row that cannot be predicted; the message is the reason that reports count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One closed-loop benchmark."""

    model: ModelSpec
    device: str
    parallel: ParallelConfig
    kv_precision: str
    stack: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    shortest_share: float = SHORTEST_SHARE


def model_of(label: str) -> ModelSpec:
    """The catalogue's model for a label such as llama3.1-8b, llama2-70b or openai/gpt-oss-120b."""
    from hwmodels.measured import catalogue_model

    try:
        return catalogue_model(label)
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None


def speculates(row: Mapping[str, Any]) -> bool:
    """Whether a serving row ran with multi-token prediction: by its speculation column, else by the list beside this file.

    `sim/validation/speculative_runs.csv` names rows of aiconfigurator's silicon sample, which has no such column, by what the
    launch recipes of the day ordered (InferenceX, `.github/configs/nvidia-master.yaml`: image, lengths, concurrency).
    Where a recipe orders a point both with and without, the faster row of the pair is the one with. The list was not
    made here and no prediction enters it.
    """
    if "speculation" in row:
        return str(row["speculation"]) not in ("", "nan", "none", "unknown")
    return _identity(row) in _speculative_runs()


SPECULATIVE_RUNS = Path(__file__).with_name("speculative_runs.csv")


@functools.cache
def speculative_rows() -> tuple[dict[str, str], ...]:
    """The rows of the list, in its order."""
    with SPECULATIVE_RUNS.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@functools.cache
def _speculative_runs() -> frozenset[tuple[str, ...]]:
    return frozenset(_identity(row) for row in speculative_rows())


def _identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    def text(value: Any) -> str:
        try:
            return f"{float(value):.6g}"
        except ValueError:
            return str(value)

    return tuple(text(row.get(name, "")) for name in _SPECULATIVE)


def served_run(row: Mapping[str, Any]) -> ServedRun:
    """The benchmark that a row of an e2e_silicon_agg file describes; `Unmodelled` names what is missing."""
    gemm, moe = (str(row[name]) for name in ("gemm_quant_mode", "moe_quant_mode"))
    if gemm in ("", "nan"):
        gemm = _MODES.get(str(row["precision"]), "")
    model = _in_format(model_of(str(row["model_path"])), gemm, moe)
    if str(row["mode"]) != "agg":
        raise Unmodelled(f"mode {row['mode']} is not aggregated serving")
    for name in ("isl", "osl"):
        if not _whole(row, name, 0):
            raise Unmodelled(f"{name} is not known")
    try:
        device = load_device(str(row["system"]))
        serving_stack(str(row["backend"]))
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    groups = _whole(row, "attention_dp_size", 1)
    concurrency = _whole(row, "concurrency", 0) or _whole(row, "batch_size", 0) * groups
    if not concurrency:
        raise Unmodelled("neither concurrency nor batch size is known")
    narrow = gemm in _NARROW or str(row["precision"]) in ("fp8", "fp4", "int4")
    return ServedRun(
        model=model,
        device=device.name,
        parallel=_parallel(row, model, device.devices_per_node),
        kv_precision="fp8" if narrow else "bf16",
        stack=str(row["backend"]),
        prompt_tokens=_whole(row, "isl", 0),
        output_tokens=_whole(row, "osl", 0),
        concurrency=concurrency,
        shortest_share=1.0 if str(row.get("provenance")) in FIXED_LENGTHS else SHORTEST_SHARE,
    )


def _whole(row: Mapping[str, Any], name: str, default: int) -> int:
    value = float(row[name]) if row.get(name) not in (None, "") else math.nan
    return int(value) if value > 0 else default


def _digits(row: Mapping[str, Any], name: str) -> str:
    return f"{float(row[name]):g}" if row.get(name) not in (None, "") else ""


def _in_format(model: ModelSpec, gemm: str, moe: str) -> ModelSpec:
    """Checkpoints that come quantised keep their formats, except where their experts were converted further."""
    gemm_format, moe_format = _FORMATS.get(gemm), _FORMATS.get(moe)
    if gemm in ("", "nan"):
        return model
    if gemm_format is None:
        raise Unmodelled(f"gemm_quant_mode {gemm} has no price")
    if model.experts is None:
        return model.with_precision(gemm_format)
    if moe in ("", "nan"):
        moe_format = gemm_format
    if moe_format is None:
        raise Unmodelled(f"moe_quant_mode {moe} has no price")
    # Experts in 4 bits of their own: the mode names the arithmetic. NVFP4 releases of int4 models are conversions.
    own = model.expert_precision
    if own == "mxfp4" or (own.startswith("int4") and moe_format != "nvfp4"):
        return model
    if gemm_format == "fp8":
        return model.with_precision("fp8")
    if gemm_format == "nvfp4":
        # NVIDIA's releases convert the MLPs and leave attention in the checkpoint's format.
        return replace(model, mlp_precision="nvfp4", expert_precision="nvfp4")
    return model.with_precision(gemm_format)


def _parallel(row: Mapping[str, Any], model: ModelSpec, node: int) -> ParallelConfig:
    tensor, data, pipeline = (_whole(row, name, 1) for name in ("tp_size", "attention_dp_size", "pp_size"))
    if model.experts is not None and "0" in (_digits(row, "moe_tp_size"), _digits(row, "moe_ep_size")):
        raise Unmodelled("moe_tp_size or moe_ep_size is 0 for a model with experts")
    # Without experts the columns say nothing: 0 and blank mean 1.
    expert_tensor, expert = (_whole(row, name, 1) for name in ("moe_tp_size", "moe_ep_size"))
    total = tensor * data
    root = math.isqrt(total)
    if total > node and root * root == total and expert_tensor * expert == total:
        tensor, data = (1, root) if data > 1 else (root, 1)
        expert = min(expert, root)
    elif total == 1 and 1 < expert_tensor * expert <= node:
        tensor = expert_tensor * expert
    try:
        if model.experts is None:
            parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        else:
            while (tensor * data) % expert:
                expert -= 1
            parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
        parallel.check(model)
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    return parallel


def scheduler_of(stack: ServingStack, sequences: int) -> Scheduler:
    """How *stack* batches with its defaults, for at most *sequences* at a time."""
    from policies.schedulers import Sarathi
    from policies.vllm import VllmV0
    from policies.wrappers import EvictNewest

    if stack.prefill_first:
        inner: Scheduler = VllmV0(max_num_batched_tokens=stack.token_budget, max_num_seqs=sequences)
    else:
        inner = Sarathi(token_budget=stack.token_budget, max_sequences=sequences)
    return EvictNewest(inner=inner)


def serve(deployment: Deployment, stack: ServingStack, workload: Trace | ClosedLoop, sequences: int) -> Columns:
    """Run *workload* on one replica of *deployment* behind *stack*; `Unmodelled` where it does not fit in memory."""
    from policies.routers import RoundRobin
    from sim.engine import Experiment, ReplicaSpec, run

    try:
        blocks = deployment.kv_pool_blocks()
    except ValueError as error:
        raise Unmodelled(f"does not fit: {str(error).partition(':')[0]}") from None
    experiment = Experiment(
        workload=workload,
        replicas=(ReplicaSpec(cost=deployment.cost, scheduler=scheduler_of(stack, sequences), kv_blocks=blocks),),
        router=RoundRobin(),
        admission_s=stack.overheads.admission_s,
        admission_s_per_token=stack.overheads.admission_s_per_token,
    )
    return run(experiment)


def latencies_s(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """TTFT and TPOT of every request, in seconds; NaN where it did not finish or emitted one token only."""
    names = ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
    arrival, first, finish, output = (np.asarray(columns.requests[name], float) for name in names)
    done = finish >= 0
    ttft = np.where(done, (first - arrival) * 1e-9, np.nan)
    tpot = np.where(done & (output > 1), (finish - first) * 1e-9 / np.maximum(output - 1, 1), np.nan)
    return ttft, tpot


def closed_loop_s(
    run: ServedRun, *, stack: ServingStack | None = None, profile: str | None = None
) -> tuple[float, float]:
    """Mean TTFT and TPOT of *run* in seconds; `Unmodelled` where it cannot be priced or does not fit."""
    from workloads import Fixed, Uniform, closed_loop

    stack = stack or serving_stack(run.stack)
    try:
        deployment = deploy(
            model=run.model,
            hardware=run.device,
            parallel=run.parallel,
            kv_precision=run.kv_precision,
            cost=Calibrated(stack=stack, profile=profile),
        )
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None

    def lengths(nominal: int) -> Fixed | Uniform:
        least = max(1, int(run.shortest_share * nominal))
        return Uniform(min_tokens=least, max_tokens=nominal) if least < nominal else Fixed(tokens=nominal)

    workload = closed_loop(
        n_requests=REQUESTS_PER_CLIENT * run.concurrency,
        concurrency=run.concurrency,
        prompt=lengths(run.prompt_tokens),
        output=lengths(run.output_tokens),
        seed=_SEED,
    )
    ttft, tpot = latencies_s(serve(deployment, stack, workload, max(256, run.concurrency)))
    if np.isnan(ttft).all():
        raise Unmodelled("no request finishes: its KV cache does not fit")
    return float(np.nanmean(ttft)), float("nan") if np.isnan(tpot).all() else float(np.nanmean(tpot))


def rows_of(measurement: Measurement) -> list[dict[str, Any]]:
    """The rows of a measurement as mappings."""
    names = list(measurement.columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*measurement.columns.values(), strict=True)]


def iteration_s(
    row: Mapping[str, Any], *, stack: ServingStack | None = None, profile: str | None = None
) -> tuple[float, float]:
    """Seconds of the prompt iteration and the mean decode iteration of one row of an iteration_* file."""
    if str(row.get("flag", "ok")) not in ("ok", ""):
        raise Unmodelled(f"flagged {row['flag']}")
    model = model_of(str(row["model"]))
    try:
        deployment = deploy(
            model=model,
            hardware=str(row["hardware"]),
            parallel=ParallelConfig(tensor=int(row["tensor_parallel"])),
            cost=Calibrated(stack=stack or serving_stack("eager"), profile=profile),
        )
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    n, prompt, tokens = (int(row[name]) for name in ("batch_size", "prompt_size", "token_size"))
    pairs = n * (prompt * (prompt + 1) // 2)
    prompt_s = deployment.cost.iteration_s(Totals(n * prompt, n * prompt, n, pairs, n * prompt, 0, 0, n))
    context = prompt + max(1, tokens // 2)
    decode_s = deployment.cost.iteration_s(Totals(n, 0, 0, 0, 0, n, n * context, n))
    return prompt_s, decode_s


def replayed(
    measurement: Measurement,
    *,
    sequences: int = RECORDED_SEQUENCES,
    stack: ServingStack | None = None,
    profile: str | None = None,
) -> tuple[Columns, np.ndarray]:
    """The simulated run of an e2e_requests_* file's arrivals, at most *sequences* at once, and the order of its rows."""
    from hwmodels.measured import catalogue_name
    from workloads import Trace

    try:
        found = stack or serving_stack(measurement.source)
        deployment = deploy(
            model=model_of(measurement.labels["model"]),
            hardware=catalogue_name(measurement.device),
            parallel=ParallelConfig(tensor=int(measurement.labels["tp"])),
            cost=Calibrated(stack=found, profile=profile),
        )
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    columns = measurement.columns
    order = np.argsort(columns["arrival_s"], kind="stable")
    trace = Trace.from_arrays(
        arrival_ns=np.rint(columns["arrival_s"][order] * 1e9).astype(np.int64),
        prompt_tokens=columns["input_toks"][order].astype(np.int64),
        output_tokens=columns["output_toks"][order].astype(np.int64),
    )
    return serve(deployment, found, trace, sequences), order
