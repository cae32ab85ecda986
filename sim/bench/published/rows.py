"""Published serving rows as measured runs, and the servers behind them.

A row is run by the protocol of its family (`protocol_of`) on servers with the settings of its launch script (`servers`), under its
stack's own scheduler and account of memory. What a row does not say is taken from how such benchmarks are run, one rule for all
rows. Degrees of parallelism whose product exceeds a node although its square root does not were written down twice, once for
attention and once for the experts: the root is the number of devices.

A row of separate pools says how many workers of each kind there were and how each was split. The rest is what is public of the
recipes (NVIDIA/srt-slurm) and of Dynamo: `ASSUMED` has it in words, for docs/validation.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment, deploy
from hwmodels.device import load_device
from hwmodels.graphs import GraphSettings
from hwmodels.measured import catalogue_model, catalogue_name
from hwmodels.model import ModelSpec
from hwmodels.model.names import releases_fp8_in_blocks
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals
from policies.routers import RoundRobin
from sim.bench import fields
from sim.bench.load import NotReplayable, load_of
from sim.bench.measured import BenchRun, Latency, Lengths, Offered, RequestRows
from sim.bench.published.machines import Speculation, Unmodelled, devices_of, machine_of
from sim.bench.published.servers import (
    GAP_ANALYSIS,
    ServerSettings,
    described_by,
    published_by,
    settings_of,
    warmed_up,
)
from sim.bench.published.speculated import NOT_KNOWN, speculation_of
from sim.bench.replay import figures_of
from sim.engine import Experiment
from sim.engine import run as simulated
from sim.engine.record.streaming import Stream
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from sim.protocols import Figures, Protocol, protocol

if TYPE_CHECKING:
    from hwmodels.measured import Measurement
    from sim.engine.record.columns import Columns

_FORMATS = {"fp8": "fp8", "fp8_block": "fp8_block", "fp8_static": "fp8_static", "nvfp4": "nvfp4",
            "fp4": "nvfp4", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "int4_wo": "int4", "int8_wo": "int8",
            "mxfp4": "mxfp4", "w4a16_mxfp4": "mxfp4"}  # fmt: skip
_MODES = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4_wo", "bf16": "bf16", "fp16": "float16"}
"""Formats of rows that name a precision and no mode."""
RECORDED_SEQUENCES = 128
"""Most running sequences (max_num_seqs) of recorded runs: where the public one's time series levels off."""
_SEED = 0
SAME_MODEL = {"deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3"}
"""Names of one model."""
PREFILL_TOKENS, PREFILL_SEQUENCES = 16384, 16
"""The most tokens and sequences of an iteration of a prefill rank."""
LINK_BYTES_PER_S = 50e9
"""The bandwidth of one GPU's network card: 400 Gbit/s."""
ASSUMED = """\
* Workers are chosen in turn, for prefill and for decode. The decode worker gets a request when its prompt has been computed, and
  sends the first token to the client after the KV has crossed one 400 Gbit/s card for each GPU that sends.
* The ranks of a prefill worker of SGLang are not chosen in turn: a prompt goes to the number of its room modulo the ranks, and
  Dynamo draws that number (SGLang 0.5.8, Dynamo 0.8).
* A prefill rank computes up to 16 prompts and 16,384 tokens an iteration, as the public recipes of TensorRT-LLM have it; SGLang's
  ranks share as many.
* The decode seats of TensorRT-LLM (max_batch_size) are the largest of 1, 2, 3, 4, 6, 8, 12, ... that the highest concurrency
  with the same layout and lengths fills, and have no limit where that is a power of two. Where every concurrency of a model on
  a device is a fifth above a power of two of seats (H100: 20 rows of 20, elsewhere 13 of 97), each has a recipe of its own with
  those seats; so has one of fewer than two requests a rank, with one seat. SGLang's seats have no limit.
* Clients follow `srt-slurm` above. The stack's own front end of its newest release stands for Dynamo's. Cache formats are those of
  the stack's launch scripts on the same device.
* Rows with multi-token prediction drafted and accepted as many tokens as the stack's aggregated runs.
"""
_PHASES = ("prefill", "decode")
_LAYOUT = ("system", "backend", "precision", "isl", "osl", "measured", "speculation",
           *(f"{phase}_{what}" for phase in _PHASES for what in ("num_workers", "tp_size", "pp_size", "attention_dp_size",
             "moe_tp_size", "moe_ep_size")))  # fmt: skip
"""Columns that one recipe has in common."""
_MACHINES = ("system", "backend", "precision")
"""Columns of devices whose recipes were written alike."""
DEPLOYMENT = ("model_path", "system", "backend", "backend_version", "gemm_quant_mode", "moe_quant_mode", "tp_size",
              "attention_dp_size", "moe_tp_size", "moe_ep_size")  # fmt: skip
"""Columns of a deployment of aggregated rows, which is fitted or held back as a whole."""
_HALVED = ("system", "backend", "precision", "tp_size", "attention_dp_size", "moe_ep_size",
               *(f"{phase}_{what}" for phase in _PHASES
                 for what in ("num_workers", "tp_size", "attention_dp_size", "moe_ep_size")))  # fmt: skip
"""Columns of a deployment whose rows are in one half, of either kind of row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Replicas of one kind."""

    parallel: ParallelConfig
    settings: ServerSettings
    """The settings of each rank."""
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A measured run, and the servers behind it."""

    run: BenchRun
    model: ModelSpec
    device: str
    stack: str
    kv_precision: str
    decode: Workers
    """The workers that decode, and compute prompts too where there are no others."""
    prefill: Workers | None = None
    release: str | None = None
    """The release of the stack; None: the row does not say, and the terms are those of the newest."""
    speculation: Speculation | None = None

    @property
    def concurrency(self) -> int:
        """The most requests in flight."""
        return self.run.offered.concurrency or RECORDED_SEQUENCES

    @property
    def asked(self) -> str:
        """Everything that a prediction hangs on: equal for runs that were measured again."""
        run = BenchRun(name="", file="", format="", offered=self.run.offered, protocol=self.run.protocol)
        return repr(replace(self, run=run))


def is_apart(row: Mapping[str, Any]) -> bool:
    """Whether a row is of separate pools."""
    return "decode_num_workers" in row


def concurrency_of(row: Mapping[str, Any]) -> int:
    """Requests in flight: as the row says, or from the batch of those that decode; 0: not known."""
    prefix = "decode_" if is_apart(row) else ""
    ranks = whole(row, f"{prefix}num_workers", int(not prefix)) * whole(row, f"{prefix}attention_dp_size", 1)
    return whole(row, "concurrency", 0) or whole(row, f"{prefix}batch_size", 0) * ranks


def _facts(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    model = str(row["model_path"])
    return (SAME_MODEL.get(model, model), *(str(row.get(name, "")) for name in columns))


def deployment_of(row: Mapping[str, Any]) -> str:
    """The deployment whose rows are held back together: model, devices, stack, format and layout."""
    return "|".join(_facts(row, _HALVED))


def half_of(deployment: str) -> int:
    """0: fitted; 1: held back. By a hash of the name, so that no figure enters the choice."""
    return hashed(deployment)[0] % 2


def hashed(text: str) -> bytes:
    """Eight bytes of a hash of *text*."""
    # Not a CRC: that is linear in the bits of the text, and names that differ in pairs fall together.
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def layout_of(row: Mapping[str, Any]) -> tuple[str, int]:
    """The layout of an aggregated row in words, and its GPUs; nothing and 0 for separate pools and what cannot be replayed."""
    try:
        parallel = None if is_apart(row) else served_run(row).decode.parallel
    except Unmodelled:
        parallel = None
    if parallel is None:
        return "", 0
    degrees = (("TP", parallel.tensor), ("PP", parallel.pipeline), ("DP", parallel.data), ("EP", parallel.expert))
    return " ".join(f"{name}{n}" for name, n in degrees if n > 1) or "TP1", parallel.n_devices


def most_clients(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The highest concurrency that rows of the recipe of each have: of the same model, devices, layout and lengths.

    A row has a recipe of its own where all concurrencies of its model on its devices are made for their seats
    (`_made_for`), and where it has fewer than two requests a rank.
    """
    most: dict[tuple[str, ...], int] = {}
    swept: dict[tuple[str, ...], bool] = {}
    kinds = [_facts(row, _MACHINES) for row in rows]
    for kind, row in zip(kinds, rows, strict=True):
        swept[kind] = swept.get(kind, False) or _made_for(concurrency_of(row), *_decode_ranks(row)) is None
    keys: list[tuple[str, ...]] = []
    for kind, row in zip(kinds, rows, strict=True):
        workers, ranks = _decode_ranks(row)
        own = not swept[kind] or concurrency_of(row) < 2 * workers * ranks
        keys.append((*_facts(row, _LAYOUT), *([str(concurrency_of(row))] if own else [])))
        most[keys[-1]] = max(most.get(keys[-1], 0), concurrency_of(row))
    return [most[key] for key in keys]


def _decode_ranks(row: Mapping[str, Any]) -> tuple[int, int]:
    """The workers that decode, and the ranks of each."""
    return whole(row, "decode_num_workers", 1), whole(row, "decode_attention_dp_size", 1)


def _made_for(clients: int, workers: int, ranks: int) -> int | None:
    """The seats of each rank, a power of two, that a recipe's concurrency is a fifth above, rounded up for each of *workers* of
    so many *ranks*; None: there is no such power."""
    seats = 1
    while (load := workers * math.ceil(1.2 * seats * ranks)) < clients:
        seats *= 2
    return seats if load == clients else None


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


def served_run(row: Mapping[str, Any], folder: Path | None = None, *, clients: int = 0) -> Served:
    """The benchmark that a row of an e2e_silicon file describes; `Unmodelled` names what is missing.

    *folder* holds the settings that servers were started with (`servers.SETTINGS`); without them they are the stacks' defaults.
    *clients*: the highest concurrency that rows of its recipe have, for separate pools.
    """
    speculative, apart = surely_speculates(row), is_apart(row)
    if apart and not all(whole(row, f"{phase}_num_workers", 0) for phase in _PHASES):
        raise Unmodelled("the numbers of prefill and decode workers are not known")
    model = formatted(row)
    if not apart and str(row["mode"]) != "agg":
        raise Unmodelled(f"mode {row['mode']} is not aggregated serving")
    for name in ("isl", "osl"):
        if not whole(row, name, 0):
            raise Unmodelled(f"{name} is not known")
    stack = str(row["backend"])
    try:
        device = load_device(str(row["system"]))
        serving_stack(stack)
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    concurrency = concurrency_of(row)
    if not concurrency:
        raise Unmodelled("neither concurrency nor batch size is known")
    prefix = "decode_" if apart else ""
    # A worker of separate pools may be of several nodes.
    parallel = _parallel(row, prefix, model, math.inf if apart else device.devices_per_node)
    # As a script of the stack for the same model and device has it.
    degrees = {name: row.get(f"{prefix}{name}") for name in ("tp_size", "attention_dp_size")}
    settings = settings_of({**row, **degrees}, folder)
    speculation = speculation_of(model.name, stack, ranks=parallel.data) if speculative else None
    found = Served(
        run=run_of(row, protocol("srt-slurm") if apart else protocol_of(row, folder), concurrency),
        model=model,
        device=device.name,
        stack=stack,
        kv_precision=settings.kv_precision or model.kv_precision or model.base_precision,
        decode=Workers(parallel=parallel, settings=settings),
        release=None if apart else release_of(row),
        speculation=speculation,
    )
    if not apart:
        return found
    workers = whole(row, "decode_num_workers", 0)
    seats = seats_of(stack, max(clients, concurrency), workers, parallel.data)
    each = 1 if speculation is None else speculation.k + 1
    return replace(
        found,
        prefill=Workers(
            number=whole(row, "prefill_num_workers", 0),
            parallel=_parallel(row, "prefill_", model, math.inf),
            settings=ServerSettings(
                known_from="recipe",
                token_budget=PREFILL_TOKENS,
                max_prefill_tokens=PREFILL_TOKENS,
                max_sequences=PREFILL_SEQUENCES,
            ),
        ),
        decode=Workers(
            number=workers,
            parallel=parallel,
            settings=ServerSettings(
                known_from="recipe",
                token_budget=None if seats is None else max(seats * each, 16),
                max_sequences=seats,
            ),
        ),
    )


def run_of(row: Mapping[str, Any], asked: Protocol, concurrency: int) -> BenchRun:
    """A row as a measured run whose clients followed the protocol *asked*."""
    prompt, output = (whole(row, name, 0) for name in ("isl", "osl"))
    measured_s = {name: float(row.get(f"{name}_ms") or math.nan) * 1e-3 for name in ("ttft", "tpot")}
    latencies: dict[str, Any] = {
        name: Latency(mean_s=value) if asked.statistic == "mean" else Latency(median_s=value)
        for name, value in measured_s.items()
        if math.isfinite(value)
    }
    return BenchRun(
        name=f"{prompt} + {output} tokens, {concurrency} clients",
        file="",
        format=family_of(row),
        offered=Offered(
            concurrency=concurrency,
            requests=asked.requests(concurrency),
            prompt=Lengths(mean_tokens=prompt),
            output=Lengths(mean_tokens=output),
        ),
        protocol=asked,
        **latencies,
    )


def requests_of(measurement: Measurement) -> RequestRows:
    """The requests of an e2e_requests_* file."""
    columns = measurement.columns
    first, last, sent = (columns[name] for name in ("first_token_s", "last_token_s", "arrival_s"))
    found, _ = fields.rows_of(
        sent_s=sent,
        ttft_s=first - sent,
        e2el_s=last - sent,
        prompt_tokens=columns["input_toks"],
        output_tokens=columns["output_toks"],
        failed=np.zeros(len(sent), bool),
    )
    return found


def recorded_run(measurement: Measurement) -> Served:
    """The benchmark whose requests an e2e_requests_* file has; `Unmodelled` where its model or device is not known."""
    rows = requests_of(measurement)
    model = model_of(measurement.labels["model"])
    try:
        parallel = ParallelConfig(tensor=int(measurement.labels["tp"]))
        device = catalogue_name(measurement.device)
        serving_stack(measurement.source)
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    return Served(
        run=BenchRun(
            name=measurement.path.stem,
            file=str(measurement.path),
            format="e2e_requests",
            offered=Offered(
                requests=len(rows),
                prompt=Lengths(each_tokens=tuple(rows.prompt_tokens.tolist())),
                output=Lengths(each_tokens=tuple(rows.output_tokens.tolist())),
            ),
            rows=rows,
            **fields.latencies_of(rows),
        ),
        model=model,
        device=device,
        stack=measurement.source,
        kv_precision=model.kv_precision or model.base_precision,
        decode=Workers(
            parallel=parallel, settings=ServerSettings(known_from="defaults", max_sequences=RECORDED_SEQUENCES)
        ),
    )


def seats_of(stack: str, clients: int, workers: int, ranks: int) -> int | None:
    """Sequences that each rank of *workers* of so many *ranks* decodes at once; None: no limit that *clients* would meet."""
    share = clients / (workers * ranks)
    if not published_by(stack).seats_by_load or (clients & (clients - 1) == 0 and not 1.0 < share < 2.0):
        return None
    if (made_for := _made_for(clients, workers, ranks)) is not None:
        return made_for
    power = 1 << max(int(share).bit_length() - 1, 0)
    return power * 3 // 2 if power > 1 and power * 1.5 <= share else power


def formatted(row: Mapping[str, Any]) -> ModelSpec:
    """The model of a serving row in the formats that it names."""
    gemm, moe = (str(row[name]) for name in ("gemm_quant_mode", "moe_quant_mode"))
    if gemm in ("", "nan"):
        gemm = _MODES.get(str(row["precision"]), "")
    label = str(row["model_path"])
    if gemm == "fp8" and not releases_fp8_in_blocks(label):
        gemm = serving_stack(str(row["backend"])).fp8
    elif gemm == "fp8" and label.lower().endswith("-fp8"):
        gemm = "fp8_block"
    return _in_format(model_of(label), gemm, moe)


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


def _parallel(row: Mapping[str, Any], prefix: str, model: ModelSpec, node: float) -> ParallelConfig:
    tensor, data, pipeline = (whole(row, f"{prefix}{name}", 1) for name in ("tp_size", "attention_dp_size", "pp_size"))
    experts = [f"{prefix}{name}" for name in ("moe_tp_size", "moe_ep_size")]
    if model.experts is not None and "0" in [_digits(row, name) for name in experts]:
        raise Unmodelled("moe_tp_size or moe_ep_size is 0 for a model with experts")
    # Without experts the columns say nothing: 0 and blank mean 1.
    expert_tensor, expert = (whole(row, name, 1) for name in experts)
    total = tensor * data
    root = math.isqrt(total)
    if total > node and root * root == total and expert_tensor * expert == total:
        tensor, data = (1, root) if data > 1 else (root, 1)
        expert = min(expert, root)
    elif total == 1 and 1 < expert_tensor * expert <= node:
        tensor = expert_tensor * expert
    return devices_of(model, tensor=tensor, pipeline=pipeline, data=data, expert=expert)


def experiment_of(
    served: Served, *, stack: ServingStack | None = None, profile: str | None = None
) -> tuple[Experiment, Deployment]:
    """The run on machines behind *stack*, and what it is priced as; `Unmodelled` where it cannot be or does not fit in memory.

    Groups of data-parallel attention are ranks, among which requests are spread as the stack does by itself.
    """
    stack = stack or serving_stack(served.stack, served.release)
    apart: dict[str, Any] = {}
    deployments, machines = [], []
    for workers in filter(None, (served.prefill, served.decode)):
        speculation = served.speculation if workers is served.decode else None
        deployment = _deployed(served, workers, stack, profile)
        machine = machine_of(
            deployment,
            stack,
            workers.settings,
            concurrency=-(-served.concurrency // workers.number),
            speculation=speculation,
            prefills=workers is served.prefill,
        )
        deployments.append(deployment)
        machines += [machine] * workers.number
    if (prefill := served.prefill) is not None:
        path = KvPath(
            link=LinkSpec(LINK_BYTES_PER_S, concurrent_transfers=prefill.parallel.data),
            # What a GPU of the receiver keeps comes over its own card.
            bytes_per_token=deployments[-1].kv_bytes_per_token_per_device,
        )
        numbers = (prefill.number, served.decode.number)
        apart["handover"] = HandoverSpec(
            roles=("prefill",) * numbers[0] + ("decode",) * numbers[1],
            pools=(0,) * numbers[0] + (1,) * numbers[1],
            paths={(0, 1): path},
            router=RoundRobin(),
            first_token="decode",
        )
    experiment = Experiment(
        workload=load_of(served.run, _SEED).workload,
        replicas=tuple(machines),
        router=RoundRobin(),
        **deployments[0].front_end._asdict(),
        stream=Stream(served.decode.settings.stream_interval, described_by(stack.name).stream_by),
        **apart,
    )
    return experiment, deployments[0]


def _deployed(served: Served, workers: Workers, stack: ServingStack, profile: str | None) -> Deployment:
    largest = workers.settings.graph_sequences
    graphs = described_by(stack.name).graphs
    if served.speculation is not None and largest is not None and graphs is not None and graphs.of_sequences:
        # Each sequence has as many rows as it verifies tokens.
        largest *= served.speculation.k + 1
    try:
        return deploy(
            model=served.model,
            hardware=served.device,
            parallel=workers.parallel,
            kv_precision=served.kv_precision,
            cost=Calibrated(
                stack=stack,
                profile=profile,
                graphs=GraphSettings(largest=largest),
                handed_over=served.prefill is not None and workers is served.decode,
            ),
        )
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None


def served_s(served: Served, *, stack: ServingStack | None = None, profile: str | None = None) -> Figures:
    """TTFT and TPOT in seconds, as the protocol of the run reports them; `Unmodelled` where it cannot be priced or does not fit."""
    asked = served.run.protocol
    assert asked is not None
    columns = simulated(experiment_of(served, stack=stack, profile=profile)[0])
    try:
        found = figures_of(columns, load_of(served.run, _SEED), served.run)
    except NotReplayable:
        raise Unmodelled("no request finishes: its KV cache does not fit") from None
    return Figures(*(found.get(f"{name}_{asked.statistic}_s", math.nan) for name in ("ttft", "tpot")))


def replayed(measurement: Measurement, *, stack: ServingStack | None = None, profile: str | None = None) -> Columns:
    """The simulated run of an e2e_requests_* file's arrivals, in their order."""
    return simulated(experiment_of(recorded_run(measurement), stack=stack, profile=profile)[0])


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
