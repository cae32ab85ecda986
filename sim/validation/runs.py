"""Measured serving runs and iterations, predicted: deployments from the rows of a file, simulated in the engine.

A row is run by the protocol of its family (`protocol_of`) on a server with the settings of its launch script
(`sim.validation.servers`), under its stack's own scheduler and account of memory. What a row does not say is taken from how such
benchmarks are run, one rule for all rows. Degrees of parallelism whose product exceeds a node although its square root does not
were written down twice, once for attention and once for the experts: the root is the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment, deploy
from hwmodels.device import load_device
from hwmodels.graphs import DEFAULT_GRAPHS, GraphSettings
from hwmodels.measured import catalogue_model, catalogue_name
from hwmodels.model import ModelSpec
from hwmodels.model.names import releases_fp8_in_blocks
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals
from policies.routers import RoundRobin
from sim.engine import Experiment
from sim.engine import run as simulated
from sim.protocols import Figures, Protocol, protocol
from sim.validation.machines import Speculation, Unmodelled, devices_of, machine_of, stream_of
from sim.validation.servers import GAP_ANALYSIS, ServerSettings, settings_of, warmed_up
from sim.validation.speculated import NOT_KNOWN, speculation_of
from workloads import Trace, Workload

if TYPE_CHECKING:
    from hwmodels.measured import Measurement
    from sim.engine.record.columns import Columns

_FORMATS = {"fp8": "fp8", "fp8_block": "fp8_block", "fp8_static": "fp8_static", "nvfp4": "nvfp4", "fp4": "nvfp4",
            "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "int4_wo": "int4", "int8_wo": "int8", "mxfp4": "mxfp4",
            "w4a16_mxfp4": "mxfp4"}  # fmt: skip
_MODES = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4_wo", "bf16": "bf16", "fp16": "float16"}
"""Formats of rows that name a precision and no mode."""
RECORDED_SEQUENCES = 128
"""Most running sequences (max_num_seqs) of recorded runs: where the public one's time series levels off."""
RECORDED_SERVER = ServerSettings(known_from="defaults")
MEASURED_VLLM = "0.19"
"""The release whose account of memory stands for those of measured runs (0.11 to 0.20)."""
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One benchmark: a server, and the clients that ask it."""

    model: ModelSpec
    device: str
    parallel: ParallelConfig
    kv_precision: str
    stack: str
    prompt_tokens: int
    """Nominal, as are those of the output."""
    output_tokens: int
    concurrency: int
    protocol: Protocol
    settings: ServerSettings
    release: str | None = None
    """The release of the stack; None: the row does not say, and the terms are those of the newest."""
    speculation: Speculation | None = None


def model_of(label: str) -> ModelSpec:
    """The catalogue's model for a label such as llama3.1-8b, llama2-70b or openai/gpt-oss-120b."""
    try:
        return catalogue_model(label)
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None


def speculates(row: Mapping[str, Any]) -> bool:
    """Whether a serving row ran with multi-token prediction, or may have, by its speculation column."""
    return str(row.get("speculation", "")) not in ("", "nan", "none")


def surely_speculates(row: Mapping[str, Any]) -> bool:
    """Whether it did; `Unmodelled` where it may have."""
    if str(row.get("speculation", "")) == "unknown":
        raise Unmodelled(NOT_KNOWN)
    return speculates(row)


def family_of(row: Mapping[str, Any]) -> str:
    """Which benchmark a serving row is of; a table of one's own says its protocol."""
    if own := _own_protocol(row):
        return f"own, {own}"
    return GAP_ANALYSIS if str(row.get("provenance")) == GAP_ANALYSIS else "InferenceX"


def _own_protocol(row: Mapping[str, Any]) -> str:
    return str(row.get("protocol", ""))


def protocol_of(row: Mapping[str, Any], folder: Path | None = None) -> Protocol:
    """The protocol of the clients of a serving row's family; one for each family, whatever the row.

    Families are benchmarks: InferenceX, before and since it warms its servers up, and the one behind internal-gap-analysis
    (fixed lengths, a generator's servers). A row that names its protocol has that one.
    """
    if own := _own_protocol(row):
        try:
            return protocol(own)
        except ValueError as error:
            raise Unmodelled(f"protocol {error}") from None
    if family_of(row) == GAP_ANALYSIS:
        return protocol("genai-perf")
    return protocol("inferencex" if warmed_up(row, folder) else "inferencex-2025")


def served_run(row: Mapping[str, Any], folder: Path | None = None) -> ServedRun:
    """The benchmark that a row of an e2e_silicon_agg file describes; `Unmodelled` names what is missing.

    *folder* holds the settings that servers were started with (`sim.validation.servers.SETTINGS`); without them they are the
    stacks' defaults.
    """
    speculative = surely_speculates(row)
    model = formatted(row)
    if str(row["mode"]) != "agg":
        raise Unmodelled(f"mode {row['mode']} is not aggregated serving")
    for name in ("isl", "osl"):
        if not whole(row, name, 0):
            raise Unmodelled(f"{name} is not known")
    try:
        device = load_device(str(row["system"]))
        serving_stack(str(row["backend"]))
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    groups = whole(row, "attention_dp_size", 1)
    concurrency = whole(row, "concurrency", 0) or whole(row, "batch_size", 0) * groups
    if not concurrency:
        raise Unmodelled("neither concurrency nor batch size is known")
    settings = settings_of(row, folder)
    parallel = _parallel(row, model, device.devices_per_node)
    return ServedRun(
        model=model,
        device=device.name,
        parallel=parallel,
        kv_precision=settings.kv_precision or model.kv_precision or model.base_precision,
        stack=str(row["backend"]),
        prompt_tokens=whole(row, "isl", 0),
        output_tokens=whole(row, "osl", 0),
        concurrency=concurrency,
        protocol=protocol_of(row, folder),
        settings=settings,
        release=release_of(row),
        speculation=speculation_of(model.name, str(row["backend"]), ranks=parallel.data) if speculative else None,
    )


def formatted(row: Mapping[str, Any]) -> ModelSpec:
    """The model of a serving row in the formats that it names."""
    gemm, moe = (str(row[name]) for name in ("gemm_quant_mode", "moe_quant_mode"))
    if gemm in ("", "nan"):
        gemm = _MODES.get(str(row["precision"]), "")
    if gemm == "fp8" and not releases_fp8_in_blocks(str(row["model_path"])):
        gemm = serving_stack(str(row["backend"])).fp8
    return _in_format(model_of(str(row["model_path"])), gemm, moe)


def release_of(row: Mapping[str, Any]) -> str | None:
    """The release of the stack behind a serving row; None where it is not said by numbers (a nightly build)."""
    text = str(row.get("backend_version", ""))
    return text if text[:1].isdigit() else None


def whole(row: Mapping[str, Any], name: str, default: int) -> int:
    """The whole number in a column; *default* where it is blank, 0 or less."""
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
    if gemm_format in ("fp8", "fp8_static", "fp8_block"):
        # Experts with scales a block are of releases whose dense layers have them too.
        return model.with_precision("fp8_block" if "fp8_block" in (gemm_format, moe_format) else gemm_format)
    if gemm_format == "nvfp4":
        # NVIDIA's releases convert the MLPs and leave attention in the checkpoint's format.
        return replace(model, mlp_precision="nvfp4", expert_precision="nvfp4")
    return model.with_precision(gemm_format)


def _parallel(row: Mapping[str, Any], model: ModelSpec, node: int) -> ParallelConfig:
    tensor, data, pipeline = (whole(row, name, 1) for name in ("tp_size", "attention_dp_size", "pp_size"))
    if model.experts is not None and "0" in (_digits(row, "moe_tp_size"), _digits(row, "moe_ep_size")):
        raise Unmodelled("moe_tp_size or moe_ep_size is 0 for a model with experts")
    # Without experts the columns say nothing: 0 and blank mean 1.
    expert_tensor, expert = (whole(row, name, 1) for name in ("moe_tp_size", "moe_ep_size"))
    total = tensor * data
    root = math.isqrt(total)
    if total > node and root * root == total and expert_tensor * expert == total:
        tensor, data = (1, root) if data > 1 else (root, 1)
        expert = min(expert, root)
    elif total == 1 and 1 < expert_tensor * expert <= node:
        tensor = expert_tensor * expert
    return devices_of(model, tensor=tensor, pipeline=pipeline, data=data, expert=expert)


def experiment_of(
    deployment: Deployment,
    stack: ServingStack,
    workload: Workload,
    *,
    settings: ServerSettings,
    concurrency: int,
    release: str | None = None,
    speculation: Speculation | None = None,
) -> Experiment:
    """*workload* on one replica of *deployment* behind *stack*; `Unmodelled` where it does not fit in memory.

    At most *concurrency* requests are in flight. *release*: whose account of memory it is, for vLLM. Groups of data-parallel
    attention are ranks, among which requests are spread as the stack does by itself.
    """
    machine = machine_of(deployment, stack, settings, concurrency=concurrency, release=release, speculation=speculation)
    return Experiment(
        workload=workload,
        replicas=(machine,),
        router=RoundRobin(),
        **deployment.front_end._asdict(),
        stream=stream_of(stack.name, settings),
    )


def latencies_s(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """TTFT and TPOT of every request, in seconds; NaN where it did not finish or emitted one token only."""
    names = ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
    arrival, first, finish, output = (np.asarray(columns.requests[name], float) for name in names)
    done = finish >= 0
    ttft = np.where(done, (first - arrival) * 1e-9, np.nan)
    tpot = np.where(done & (output > 1), (finish - first) * 1e-9 / np.maximum(output - 1, 1), np.nan)
    return ttft, tpot


def served_s(run: ServedRun, *, stack: ServingStack | None = None, profile: str | None = None) -> Figures:
    """TTFT and TPOT of *run* in seconds, as its protocol reports them; `Unmodelled` where it cannot be priced or does not fit."""
    return run.protocol.figures(served(run, stack=stack, profile=profile)[1], run.concurrency)


def served(
    run: ServedRun, *, stack: ServingStack | None = None, profile: str | None = None
) -> tuple[Deployment, Columns]:
    """The deployment that *run* ran on, and its simulated run; `Unmodelled` where it cannot be priced, does not fit or
    completes no request."""
    stack = stack or serving_stack(run.stack, run.release)
    deployment = deployed(run, stack, profile)
    workload = run.protocol.workload(
        prompt_tokens=run.prompt_tokens, output_tokens=run.output_tokens, concurrency=run.concurrency, seed=_SEED
    )
    experiment = experiment_of(
        deployment,
        stack,
        workload,
        settings=run.settings,
        concurrency=run.concurrency,
        release=MEASURED_VLLM,
        speculation=run.speculation,
    )
    columns = simulated(experiment)
    if not (columns.requests["finish_ns"] >= 0).any():
        raise Unmodelled("no request finishes: its KV cache does not fit")
    return deployment, columns


def deployed(run: ServedRun, stack: ServingStack, profile: str | None = None) -> Deployment:
    """The deployment that *run* ran on, priced under *stack*; `Unmodelled` where it cannot be."""
    graphs = run.settings.graphs(stack.name)
    if run.speculation is not None and graphs.largest is not None and stack.name != "vllm":
        # They count sequences, each of which has as many rows as it verifies tokens.
        graphs = replace(graphs, largest=graphs.largest * (run.speculation.k + 1))
    return deployed_on(run.model, run.device, run.parallel, run.kv_precision, stack, profile, graphs=graphs)


def deployed_on(
    model: ModelSpec,
    device: str,
    parallel: ParallelConfig,
    kv_precision: str,
    stack: ServingStack,
    profile: str | None = None,
    *,
    graphs: GraphSettings = DEFAULT_GRAPHS,
) -> Deployment:
    """*model* on one replica of *device*s, priced under *stack*; `Unmodelled` where it cannot be."""
    try:
        return deploy(
            model=model,
            hardware=device,
            parallel=parallel,
            kv_precision=kv_precision,
            cost=Calibrated(stack=stack, profile=profile, graphs=graphs),
        )
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None


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
    settings = replace(RECORDED_SERVER, max_sequences=sequences)
    experiment = experiment_of(
        deployment, found, trace, settings=settings, concurrency=sequences, release=MEASURED_VLLM
    )
    return simulated(experiment), order
