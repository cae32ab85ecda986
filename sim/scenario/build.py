"""From a scenario to the objects that the engine runs."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sim.errors import RooftraceError, ScenarioError
from sim.scenario import named
from sim.scenario.decoding import BuiltDecoding, build_decoding
from sim.scenario.explain import unknown
from sim.scenario.settings import Scenario, Workload

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.device import Device
    from sim.engine import Experiment
    from workloads import ClosedLoop, Trace

BUILT_IN_TRACES = ("conversation",)
BUILT_IN_REQUESTS = 2500
SAME_FOR_KV = ("bf16", "fp16", "fp32", "fp8")
"""Weight formats that the KV cache takes over; integer and 4-bit weights leave it in the checkpoint's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An experiment, and what its results should say about where it came from."""

    experiment: Experiment
    manifest: dict[str, Any]
    slo: dict[str, float | None]


def build(scenario: Scenario) -> Experiment:
    """The experiment that *scenario* describes; ScenarioError where something cannot be found, read or fitted."""
    return resolve(scenario).experiment


def resolve(scenario: Scenario) -> Built:
    """The experiment that *scenario* describes, with its provenance.

    Raises ScenarioError, naming the scenario and the key, where something cannot be found, read or fitted.
    """
    from hwmodels.calibrated import overheads_of
    from sim.engine import Experiment, ReplicaSpec

    deployment = deployment_of(scenario)
    workload = workload_of(scenario)
    chosen = _chosen(scenario, deployment, workload)
    scheduler = _policy(
        scenario, "scheduler", named.SCHEDULERS, "plan", {key: tokens for key, (tokens, _) in chosen.items()}
    )
    if scenario.memory.preemption == "recompute":
        from policies.schedulers import EvictNewest

        scheduler = EvictNewest(inner=scheduler)
    router = _policy(scenario, "router", named.ROUTERS, "route")
    memory = scenario.memory
    pool = {
        "gpu_fraction": memory.gpu_fraction,
        "reserve_bytes": memory.reserve_bytes,
        "block_tokens": memory.block_tokens,
    }
    with _told_by(scenario):
        kv_blocks = deployment.kv_pool_blocks(**pool)
    with _told_by(scenario):
        decoding = build_decoding(
            scenario.decoding,
            target=deployment,
            kv_blocks=kv_blocks,
            pool=pool,
            scheduler=scheduler,
            workload=workload,
            find=scenario.find,
        )
    if deployment.model.is_encoder and workload.output_tokens.any():
        raise ScenarioError(
            f"{scenario.source}: {deployment.model.name} is an encoder and emits no tokens, but the workload asks for "
            "some; give output_tokens: 0 or another model"
        )
    replica = ReplicaSpec(
        cost=deployment.cost,
        scheduler=scheduler,
        kv_blocks=kv_blocks,
        block_tokens=memory.block_tokens,
        micro_batches=scenario.micro_batches,
        max_model_len=deployment.model.max_positions,
    )
    if decoding is not None:
        replica = replace(
            replica,
            decoding=decoding.decoding,
            draft_cost=decoding.draft_cost,
            kv_blocks=decoding.kv_blocks,
            speculation_overhead_s=decoding.overhead_s,
        )
    front_end = overheads_of(deployment.cost)
    experiment = Experiment(
        workload=workload,
        replicas=(replica,) * scenario.replicas,
        router=router,
        seed=scenario.seed,
        admission_s=front_end.admission_s,
        admission_s_per_token=front_end.admission_s_per_token,
    )
    manifest = _manifest(scenario, deployment, experiment, decoding)
    if chosen:
        manifest["auto"] = {f"scheduler.{key}": {"tokens": n, "why": why} for key, (n, why) in chosen.items()}
    return Built(
        experiment=experiment,
        manifest=manifest,
        slo=scenario.slo.model_dump(),
    )


def _policy(
    scenario: Scenario, key: str, table: Mapping[str, str], method: str, chosen: Mapping[str, int] | None = None
) -> Any:
    settings = getattr(scenario, key)
    with _told_by(scenario, key):
        return named.policy(settings.policy, {**settings.settings, **(chosen or {})}, table, key=key, method=method)


def _chosen(scenario: Scenario, deployment: Deployment, workload: Trace | ClosedLoop) -> dict[str, tuple[int, str]]:
    """Scheduler settings that are `auto`, with the tokens chosen from the cost model and the reason."""
    settings = scenario.scheduler.settings
    keys = [key for key in named.AUTO if settings.get(key) == named.AUTO_VALUE]
    if not keys:
        return {}
    from sim.capacity import saturating_tokens, tokens_within

    limit_s = scenario.slo.tpot_s
    with _told_by(scenario, f"scheduler.{keys[0]}"):
        if limit_s is None:
            tokens = saturating_tokens(deployment.cost)
            why = "fewest tokens that reach 80 % of the best throughput"
        else:
            decodes = settings.get("max_sequences", 128)
            context = int((workload.prompt_tokens + workload.output_tokens).mean())
            tokens = tokens_within(deployment.cost, tbt_s=limit_s, decodes=decodes, context_tokens=context)
            why = f"most tokens within slo.tpot_s {limit_s:g} s beside {decodes} decodes of {context} tokens"
    return {key: (tokens, why) for key in keys}


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that *scenario* describes, its memory not yet looked at."""
    from hwmodels.calibrated import Calibrated
    from hwmodels.deployment import deploy
    from hwmodels.model import load_model
    from hwmodels.roofline import Roofline

    with _told_by(scenario, "model"):
        model = load_model(scenario.find(scenario.model) or scenario.model)
    with _told_by(scenario, "hardware"):
        hardware, profile = _hardware(scenario)
    factory = Roofline if scenario.cost_model == "roofline" else Calibrated.for_stack(scenario.serving_stack, profile)
    precision, kv_precision = scenario.precision, scenario.kv_precision
    if kv_precision is None and precision in SAME_FOR_KV:
        kv_precision = precision
    with _told_by(scenario):
        return deploy(
            model=model,
            hardware=hardware,
            parallel=scenario.parallel.model_dump(),
            precision=precision,
            kv_precision=kv_precision,
            cost=factory,
        )


def _hardware(scenario: Scenario) -> tuple[Device, str | None]:
    """The device, and the path of the calibrated profile that the scenario names in its place."""
    from hwmodels.device import load_device
    from hwmodels.profiles import device_of, is_profile, load_profile

    file = scenario.find(scenario.hardware)
    if file is not None and is_profile(file):
        if scenario.cost_model == "roofline":
            raise ScenarioError(
                f"{file} is a calibrated profile and cost_model asks for the datasheet; name the device, or leave "
                "cost_model out"
            )
        return device_of(load_profile(str(file))), str(file)
    return load_device(file or scenario.hardware), None


def _calibration(scenario: Scenario, deployment: Deployment) -> dict[str, Any]:
    """What the manifest says of the times: profile, stack, and where both come from."""
    if scenario.cost_model == "roofline":
        return {"profile": "datasheet roofline: peaks of the datasheet, no calibration, no overheads"}
    from hwmodels.calibrated import provenance

    return provenance(deployment.cost)


def _manifest(
    scenario: Scenario, deployment: Deployment, experiment: Experiment, decoding: BuiltDecoding | None
) -> dict[str, Any]:
    workload = experiment.workload
    model, device, parallel = deployment.model, deployment.device, deployment.parallel
    gpus = scenario.replicas * parallel.n_devices
    speculation = "" if decoding is None else f", {scenario.decoding.method}"
    return {
        "label": f"{model.name} on {gpus} x {device.name}, {scenario.scheduler.policy}{speculation}",
        "hash": scenario.hash,
        "seed": scenario.seed,
        "scenario": scenario.resolved(),
        "model": {
            "name": model.name,
            "source": model.source,
            "params": model.params,
            "weight_bytes_per_device": deployment.weight_bytes_per_device,
            "kv_precision": deployment.kv_precision,
        },
        "hardware": {
            "name": device.name,
            "title": device.title,
            **_calibration(scenario, deployment),
            "memory_bytes": device.memory_bytes,
            "hbm_bytes_per_s": device.hbm_bytes_per_s,
            "peak_flops_per_s": dict(device.peak_flops_per_s),
            "tdp_w": device.tdp_w,
            "price_usd_per_hour": device.price_usd_per_hour,
            "sources": dict(device.sources),
        },
        "scheduler": repr(experiment.replicas[0].scheduler),
        "router": repr(experiment.router),
        "decoding": {"method": "autoregressive"} if decoding is None else decoding.manifest,
        "workload": {"source": workload.source, "requests": len(workload)},
        "notes": _notes(workload, model.name) + list(model.notes) + list(_borrowed(scenario, deployment)),
        "versions": versions(),
    }


def _borrowed(scenario: Scenario, deployment: Deployment) -> Iterator[str]:
    """Says so where another device's measurements stand in."""
    if scenario.cost_model == "calibrated":
        from hwmodels.calibrated import links_measured, profile_of

        profile = profile_of(deployment.cost)
        if deployment.parallel.n_devices > 1 and not links_measured(profile):
            yield (
                f"{deployment.device.name}'s links have not been measured: what crosses them is priced as rings at the "
                "datasheet's bandwidth."
            )
        if profile.note.startswith("efficiencies"):
            yield f"{deployment.device.name} has not been calibrated: {profile.note}."


def _notes(workload: Trace | ClosedLoop, model: str) -> list[str]:
    """What of the workload the run leaves out."""
    notes = []
    models = getattr(workload, "models", ())
    if len(models) > 1:
        notes.append(f"The trace asks for {len(models)} models ({', '.join(models[:4])}); all requests go to {model}.")
    if getattr(workload, "prefix_blocks", None) is not None:
        notes.append("The trace says which prompts share a beginning; every prompt is computed in full all the same.")
    return notes


@contextlib.contextmanager
def _told_by(scenario: Scenario, key: str = "") -> Iterator[None]:
    """Errors from below become scenario errors that name the scenario and the key."""
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(f"{scenario.source}: {error}") from error
    except (ValueError, RooftraceError) as error:
        where = f"{scenario.source}: {key}: " if key else f"{scenario.source}: "
        raise ScenarioError(f"{where}{error}") from error
    except OSError as error:
        raise ScenarioError(f"{scenario.source}: {key}: cannot read {error.filename}: {error.strerror}") from error


def workload_of(scenario: Scenario) -> Trace | ClosedLoop:
    """The requests that *scenario* replays or generates, its limit and rate scale applied."""
    with _told_by(scenario, "workload"):
        settings = scenario.workload
        source = _read(scenario, settings) if settings.trace is not None else None
        made = source if settings.arrivals is None else _generate(settings, source, scenario.seed)
        assert made is not None
        if settings.limit is not None:
            made = _first(made, settings.limit)
        if settings.rate_scale != 1.0:
            if not hasattr(made, "scale_rate"):
                raise ScenarioError(
                    "workload.rate_scale is for arrivals in time, and closed-loop clients have none; "
                    "change workload.arrivals.concurrency instead"
                )
            made = made.scale_rate(settings.rate_scale)  # type: ignore[union-attr]
        return made


def _read(scenario: Scenario, settings: Workload) -> Trace:
    name = settings.trace
    assert name is not None
    if name in BUILT_IN_TRACES:
        from workloads.generators import azure_conversation_like

        asked = [key for key in ("sort", "drop_empty") if getattr(settings, key)]
        asked += ["format"] if settings.format != "auto" else []
        if asked:
            raise ScenarioError(f"workload.{asked[0]} is about reading a file, and {name!r} is built in")
        return azure_conversation_like(settings.requests or BUILT_IN_REQUESTS, scenario.seed)
    file = scenario.find(name)
    if file is None:
        if "/" not in name and "." not in name:
            raise ScenarioError(
                unknown(f"workload.trace {name!r} is neither a file nor built in", name, BUILT_IN_TRACES)
            )
        raise ScenarioError(f"workload.trace: {name} does not exist, neither beside the scenario nor in this folder")
    if settings.requests is not None and settings.arrivals is None:
        raise ScenarioError("workload.requests is for generated workloads; use workload.limit to shorten a trace")
    from workloads import read_trace

    return read_trace(file, settings.format, sort=settings.sort, drop_empty=settings.drop_empty)


def _generate(settings: Workload, lengths: Trace | None, seed: int) -> Trace | ClosedLoop:
    from workloads import generators

    assert settings.arrivals is not None
    process = named.choice(
        settings.arrivals.process,
        settings.arrivals.settings,
        named.PROCESSES,
        key="workload.arrivals",
        what="an arrival process",
    )
    if lengths is not None:
        if settings.requests is not None and settings.requests > len(lengths):
            raise ScenarioError(f"workload.requests is {settings.requests}, but the trace has only {len(lengths)}")
        lengths = lengths if settings.requests is None else lengths.limit(settings.requests)
        if isinstance(process, named.Clients):
            return _closed_loop_of(lengths, process, seed)
        return replace(
            lengths,
            arrival_ns=generators.arrivals_ns(process, seed, n_requests=len(lengths)),
            source=f"lengths of {lengths.source}, arrivals {process!r}, seed {seed}",
        )
    prompt, output = (
        named.choice(
            distribution.distribution,
            distribution.settings,
            named.DISTRIBUTIONS,
            key=f"workload.{key}",
            what="a distribution",
        )
        for key, distribution in (("prompt_tokens", settings.prompt_tokens), ("output_tokens", settings.output_tokens))
        if distribution is not None
    )
    assert settings.requests is not None
    if isinstance(process, named.Clients):
        return generators.closed_loop(
            n_requests=settings.requests,
            concurrency=process.concurrency,
            prompt=prompt,
            output=output,
            seed=seed,
            mean_think_s=process.mean_think_s,
        )
    return generators.synthesize(
        arrivals=process, prompt=prompt, output=output, n_requests=settings.requests, seed=seed
    )


def _closed_loop_of(lengths: Trace, clients: named.Clients, seed: int) -> ClosedLoop:
    from workloads import generators

    think_ns = None
    if clients.mean_think_s:
        # The draws of generators.closed_loop, so that both sources of lengths meet the same think times.
        none = generators.Fixed(tokens=1)
        think_ns = generators.closed_loop(
            n_requests=len(lengths),
            concurrency=clients.concurrency,
            prompt=none,
            output=none,
            seed=seed,
            mean_think_s=clients.mean_think_s,
        ).think_ns
    return generators.ClosedLoop(
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
        concurrency=clients.concurrency,
        think_ns=think_ns,
        source=f"closed loop of {clients.concurrency} clients, lengths of {lengths.source}, seed {seed}",
    )


def _first(workload: Trace | ClosedLoop, n: int) -> Trace | ClosedLoop:
    if hasattr(workload, "limit"):
        return workload.limit(n)  # type: ignore[union-attr]
    if n >= len(workload):
        return workload
    think_ns = workload.think_ns  # type: ignore[union-attr]
    return replace(
        workload,
        prompt_tokens=workload.prompt_tokens[:n],
        output_tokens=workload.output_tokens[:n],
        think_ns=None if think_ns is None else think_ns[:n],
    )


def versions() -> dict[str, str]:
    """Versions of Python, Rooftrace and the libraries whose numbers a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("rooftrace", "numpy", "simpy", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
