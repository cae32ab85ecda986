"""Measured serving runs with prefill and decode on separate workers, predicted: pools of machines and links between them.

A row of an e2e_silicon_disagg file says how many workers of each kind there were and how each was split, and the requests in
flight. What it does not say is taken from what is public of the recipes (NVIDIA/srt-slurm) and of Dynamo, one rule for all rows:
`ASSUMED` has them in words, for docs/validation.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwmodels.device import load_device
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.parallel import ParallelConfig
from policies.routers import RoundRobin
from sim.engine import Experiment
from sim.engine import run as simulated
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from sim.protocols import Figures, Protocol, protocol
from sim.validation.machines import Speculation, Unmodelled, devices_of, machine_of, stream_of
from sim.validation.runs import MEASURED_VLLM, deployed_on, formatted, surely_speculates, whole
from sim.validation.servers import ServerSettings, settings_of
from sim.validation.speculated import speculation_of

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.model import ModelSpec
    from sim.engine.record.columns import Columns
    from sim.engine.spec.roles import Role

SAME_MODEL = {"deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3"}
"""Names of one model."""
PREFILL_TOKENS, PREFILL_SEQUENCES = 16384, 16
"""The most tokens and sequences of an iteration of a prefill rank."""
LINK_BYTES_PER_S = 50e9
"""The bandwidth of one GPU's network card: 400 Gbit/s."""
ASSUMED = """\
* Workers are chosen in turn, for prefill and for decode. The decode worker gets a request when its prompt has been computed, and
  sends the first token to the client after the KV has crossed one 400 Gbit/s card for each GPU that sends.
* A prefill rank computes up to 16 prompts and 16,384 tokens an iteration, as the public recipes of TensorRT-LLM have it.
* The decode seats of TensorRT-LLM (max_batch_size) are the largest of 1, 2, 3, 4, 6, 8, 12, ... that the highest concurrency
  with the same layout and lengths fills, and have no limit where that is a power of two. SGLang's seats have no limit.
* Clients follow `srt-slurm` above. The stack's own front end of its newest release stands for Dynamo's. Cache formats are those of
  the stack's launch scripts on the same device.
* Rows with multi-token prediction drafted and accepted as many tokens as the stack's aggregated runs.
"""
_LAYOUT = ("system", "backend", "precision", "isl", "osl", "measured", "speculation",
           *(f"{phase}_{what}" for phase in ("prefill", "decode") for what in ("num_workers", "tp_size", "pp_size",
             "attention_dp_size", "moe_tp_size", "moe_ep_size")))  # fmt: skip
"""Columns that one recipe has in common."""
_DEPLOYMENT = ("system", "backend", "precision", "tp_size", "attention_dp_size", "moe_ep_size",
               *(f"{phase}_{what}" for phase in ("prefill", "decode")
                 for what in ("num_workers", "tp_size", "attention_dp_size", "moe_ep_size")))  # fmt: skip
"""Columns of a deployment, of either kind of file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Replicas of one kind."""

    number: int
    parallel: ParallelConfig
    settings: ServerSettings
    """The settings of each rank."""

    @property
    def ranks(self) -> int:
        return self.number * self.parallel.data


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartRun:
    """One benchmark of separate pools."""

    model: ModelSpec
    device: str
    stack: str
    kv_precision: str
    prefill: Workers
    decode: Workers
    prompt_tokens: int
    """Nominal, as are those of the output."""
    output_tokens: int
    concurrency: int
    protocol: Protocol
    speculation: Speculation | None = None


def concurrency_of(row: Mapping[str, Any]) -> int:
    """Requests in flight: as the row says, or from the batch of its decode workers; 0: not known."""
    ranks = whole(row, "decode_num_workers", 0) * whole(row, "decode_attention_dp_size", 1)
    return whole(row, "concurrency", 0) or whole(row, "decode_batch_size", 0) * ranks


def layout_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The facts that rows of one recipe have in common: model, devices, layout and lengths."""
    model = str(row["model_path"])
    return (SAME_MODEL.get(model, model), *(str(row.get(name, "")) for name in _LAYOUT))


def deployment_of(row: Mapping[str, Any]) -> str:
    """The deployment whose rows are held back together: model, devices, stack, format and layout."""
    model = str(row["model_path"])
    return "|".join([SAME_MODEL.get(model, model), *(str(row.get(name, "")) for name in _DEPLOYMENT)])


def half_of(deployment: str) -> int:
    """0: fitted; 1: held back. By a hash of the name, so that no figure enters the choice."""
    return hashlib.blake2b(deployment.encode(), digest_size=8).digest()[0] % 2


def most_clients(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], int]:
    """The highest concurrency of each layout."""
    found: dict[tuple[str, ...], int] = {}
    for row in rows:
        key = layout_of(row)
        found[key] = max(found.get(key, 0), concurrency_of(row))
    return found


def apart_run(row: Mapping[str, Any], folder: Path | None = None, *, clients: int | None = None) -> ApartRun:
    """The benchmark that a row of an e2e_silicon_disagg file describes; `Unmodelled` names what is missing.

    *clients*: the highest concurrency that rows of its layout have; None: its own.
    """
    speculative = surely_speculates(row)
    for phase in ("prefill", "decode"):
        if not whole(row, f"{phase}_num_workers", 0):
            raise Unmodelled("the numbers of prefill and decode workers are not known")
    model = formatted(row)
    for name in ("isl", "osl"):
        if not whole(row, name, 0):
            raise Unmodelled(f"{name} is not known")
    concurrency = concurrency_of(row)
    if not concurrency:
        raise Unmodelled("neither concurrency nor batch size is known")
    try:
        device = load_device(str(row["system"]))
        serving_stack(str(row["backend"]))
    except ValueError as error:
        raise Unmodelled(str(error).partition(";")[0]) from None
    stack = str(row["backend"])
    decode = _parallel(row, "decode_", model)
    workers = whole(row, "decode_num_workers", 0)
    # As a script of the stack for the same model and device has it.
    known = settings_of(
        {**row, "tp_size": row["decode_tp_size"], "attention_dp_size": row["decode_attention_dp_size"]}, folder
    )
    seats = seats_of(stack, max(clients or 0, concurrency), workers * decode.data)
    speculation = speculation_of(model.name, stack, ranks=decode.data) if speculative else None
    each = 1 if speculation is None else speculation.k + 1
    return ApartRun(
        model=model,
        device=device.name,
        stack=stack,
        kv_precision=known.kv_precision or model.kv_precision or model.base_precision,
        prefill=Workers(
            number=whole(row, "prefill_num_workers", 0),
            parallel=_parallel(row, "prefill_", model),
            settings=ServerSettings(
                known_from="recipe",
                token_budget=PREFILL_TOKENS,
                max_prefill_tokens=PREFILL_TOKENS,
                max_sequences=PREFILL_SEQUENCES,
            ),
        ),
        decode=Workers(
            number=workers,
            parallel=decode,
            settings=ServerSettings(
                known_from="recipe",
                token_budget=None if seats is None else max(seats * each, 16),
                max_sequences=seats,
            ),
        ),
        prompt_tokens=whole(row, "isl", 0),
        output_tokens=whole(row, "osl", 0),
        concurrency=concurrency,
        protocol=protocol("srt-slurm"),
        speculation=speculation,
    )


def seats_of(stack: str, clients: int, ranks: int) -> int | None:
    """Sequences that each of *ranks* decode ranks runs at once; None: no limit that *clients* would meet."""
    if stack != "trtllm" or clients & (clients - 1) == 0:
        return None
    share = clients / ranks
    power = 1 << max(int(share).bit_length() - 1, 0)
    return power * 3 // 2 if power > 1 and power * 1.5 <= share else power


def _parallel(row: Mapping[str, Any], prefix: str, model: ModelSpec) -> ParallelConfig:
    tensor, data, pipeline, expert = (
        whole(row, f"{prefix}{name}", 1) for name in ("tp_size", "attention_dp_size", "pp_size", "moe_ep_size")
    )
    if model.experts is not None and tensor * data == 1:
        # Experts are split over more devices than attention is said to be.
        tensor = whole(row, f"{prefix}moe_tp_size", 1) * expert
    return devices_of(model, tensor=tensor, pipeline=pipeline, data=data, expert=expert)


def experiment_of(
    run: ApartRun,
    *,
    stack: ServingStack | None = None,
    profile: str | None = None,
    seed: int = 0,
) -> Experiment:
    """Everything that *run* needs; `Unmodelled` where it cannot be priced or does not fit."""
    stack = stack or serving_stack(run.stack)
    deployments: list[Deployment] = []
    machines = []
    for workers in (run.prefill, run.decode):
        deployment = deployed_on(run.model, run.device, workers.parallel, run.kv_precision, stack, profile)
        deployments.append(deployment)
        machine = machine_of(
            deployment,
            stack,
            workers.settings,
            concurrency=-(-run.concurrency // workers.number),
            release=MEASURED_VLLM,
            speculation=run.speculation if workers is run.decode else None,
        )
        machines += [machine] * workers.number
    path = KvPath(
        link=LinkSpec(LINK_BYTES_PER_S, concurrent_transfers=run.prefill.parallel.data),
        # What a GPU of the receiver keeps comes over its own card.
        bytes_per_token=deployments[1].kv_bytes_per_token_per_device,
    )
    roles: list[Role] = []
    for _ in range(run.prefill.number):
        roles.append("prefill")
    for _ in range(run.decode.number):
        roles.append("decode")
    return Experiment(
        workload=run.protocol.workload(
            prompt_tokens=run.prompt_tokens, output_tokens=run.output_tokens, concurrency=run.concurrency, seed=seed
        ),
        replicas=tuple(machines),
        router=RoundRobin(),
        **deployments[0].front_end._asdict(),
        stream=stream_of(run.stack, run.decode.settings),
        handover=HandoverSpec(
            roles=tuple(roles),
            pools=tuple(int(role == "decode") for role in roles),
            paths={(0, 1): path},
            router=RoundRobin(),
            first_token="decode",
        ),
    )


def apart(run: ApartRun, *, stack: ServingStack | None = None, profile: str | None = None) -> Columns:
    """The simulated run; `Unmodelled` where it cannot be priced, does not fit or completes no request."""
    columns = simulated(experiment_of(run, stack=stack, profile=profile))
    if not (columns.requests["finish_ns"] >= 0).any():
        raise Unmodelled("no request finishes: its KV cache does not fit")
    return columns


def apart_s(run: ApartRun, *, stack: ServingStack | None = None, profile: str | None = None) -> Figures:
    """TTFT and TPOT of *run* in seconds, as its protocol reports them."""
    return run.protocol.figures(apart(run, stack=stack, profile=profile), run.concurrency)
