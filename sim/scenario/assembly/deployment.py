"""A model on devices, its memory not yet looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment, deploy
from hwmodels.device import Device
from hwmodels.experts import ExpertLayout, read_popularity
from hwmodels.graphs import GraphSettings
from hwmodels.hardware import load_hardware
from hwmodels.model import load_model
from hwmodels.overheads import ServingStack, serving_stack
from hwmodels.power import power_model
from hwmodels.roofline import Roofline
from hwmodels.stack_files import load_stack_file
from hwmodels.steps.cost import StepTimes
from hwmodels.steps.files import digest_of
from hwmodels.tables import is_profile
from sim.errors import ScenarioError
from sim.scenario.assembly.acceptance import largest_k
from sim.scenario.explain import told_by
from sim.scenario.keys import StepHardware
from sim.scenario.settings import Scenario

SAME_FOR_KV = ("bf16", "fp16", "fp32")
"""Weight formats that the KV cache takes over: those of the whole model. Narrower weights leave it in the checkpoint's own, or
in the 16 bits of the model: engines narrow the cache only where they are told to."""


def deployment_of(scenario: Scenario) -> Deployment:
    """The replica that *scenario* describes, its memory not yet looked at; ScenarioError where it has pools."""
    if scenario.pools is not None or scenario.placement is not None:
        what = "pools" if scenario.pools is not None else "placement"
        raise ScenarioError(
            f"{scenario.source}: {what}: this is about one deployment; leave {what} out (--set {what}=null)"
        )
    if scenario.cost_model == "roofline" and scenario.serving_release is not None:
        raise ScenarioError(
            f"{scenario.source}: serving_release: cost_model roofline has no overheads, of this release or another; leave "
            "serving_release out (--set serving_release=null), or cost_model"
        )
    precision, kv_precision = scenario.precision, scenario.kv_precision
    given = [name for name, value in (("precision", precision), ("kv_precision", kv_precision)) if value is not None]
    with told_by(scenario, "model"):
        model = load_model(scenario.find(scenario.model) or scenario.model, given=given)
    if scenario.memory.max_model_len is not None:
        model = replace(model, max_positions=scenario.memory.max_model_len)
    stack = _stack(scenario)
    with told_by(scenario, "hardware"):
        times = _step_times(scenario, stack)
        hardware, profile = _hardware(scenario, times)
    calibrated = _limited(scenario, hardware, Calibrated(stack=stack, profile=profile))
    if (graphs := scenario.cuda_graphs) is not None:
        calibrated = replace(calibrated, graphs=_graphs(scenario, graphs, model.mtp_layers))
        with told_by(scenario, "cuda_graphs"):
            calibrated.captured(hardware, scenario.parallel.tensor)
    factory = times or (Roofline if scenario.cost_model == "roofline" else calibrated)
    if kv_precision is None and precision in SAME_FOR_KV:
        kv_precision = precision
    with told_by(scenario, "experts"):
        layout = _layout(scenario)
    with told_by(scenario):
        return deploy(
            model=model,
            hardware=hardware,
            parallel={**scenario.parallel.model_dump(), "layout": layout},
            precision=calibrated.stack.fp8 if precision == "fp8" else precision,
            kv_precision=kv_precision,
            cost=factory,
        )


def _stack(scenario: Scenario) -> ServingStack:
    """The serving stack that the scenario names, or that of its file."""
    file = scenario.stack_file
    if file is None:
        with told_by(scenario, "serving_release"):
            return serving_stack(scenario.serving_stack, scenario.serving_release)
    with told_by(scenario, "serving_stack"):
        found = load_stack_file(file)
    if scenario.cost_model == "roofline":
        raise ScenarioError(
            f"{scenario.source}: serving_stack: {file} has overheads and efficiencies over calibrated kernels, which cost_model "
            "roofline does not have; leave cost_model out, or name a stack"
        )
    if scenario.serving_release is not None and scenario.serving_release != found.release:
        raise ScenarioError(
            f"{scenario.source}: serving_release: {file} was fitted over {found.stack.name} "
            f"{found.release or 'of no stated release'}; leave serving_release out (--set serving_release=null)"
        )
    return found.stack


def _limited(scenario: Scenario, device: Device, made_by: Calibrated) -> Calibrated:
    """*made_by* for devices at the clock that `power_limit_w` leaves them: all arithmetic takes as many times as long."""
    if scenario.power_limit_w is None:
        return made_by
    with told_by(scenario, "power_limit_w"):
        clock = power_model(device.name).limited(scenario.power_limit_w, device.tdp_w).clock_share
        if scenario.cost_model == "roofline" or made_by.load(device).kind == "cpu":
            raise ValueError(
                "cost_model roofline and processors have their arithmetic at any power; leave out power_limit_w, or take a "
                "calibrated accelerator"
            )
    stack, own = made_by.stack, made_by.stack.overheads
    slower = replace(own, compute_excess=(1.0 + own.compute_excess) / clock - 1.0)
    why = f"a clock of {clock:.1%} under power_limit_w {scenario.power_limit_w:g}"
    sources = {**stack.sources, "compute_excess": why}
    return replace(made_by, stack=replace(stack, overheads=slower, sources=sources))


def _graphs(scenario: Scenario, given: GraphSettings, mtp_layers: int) -> GraphSettings:
    """In tokens of a step; some stacks count sequences, each of which verifies K + 1 tokens."""
    if scenario.cost_model == "roofline":
        raise ScenarioError(
            f"{scenario.source}: cuda_graphs: cost_model roofline has no launches and pads nothing; leave cuda_graphs out"
        )
    with told_by(scenario, "cuda_graphs"):
        tokens = _tokens_per_sequence(scenario, mtp_layers)
        sizes = None if given.sizes is None else tuple(size * tokens for size in given.sizes)
        largest = None if given.largest is None else given.largest * tokens
        return replace(given, largest=largest, sizes=sizes)


def _tokens_per_sequence(scenario: Scenario, mtp_layers: int) -> int:
    """Tokens of a decode step for each sequence that its graph was captured for, at the largest K."""
    settings, graphs = scenario.decoding, scenario.stack.graphs
    if graphs is None or not graphs.of_sequences or settings.method == "autoregressive":
        return 1
    own_layers = settings.num_speculative_tokens is None and settings.draft is None and settings.method == "mtp"
    return 1 + (mtp_layers if own_layers else largest_k(settings))


def _layout(scenario: Scenario) -> ExpertLayout:
    given = scenario.experts or ExpertLayout()
    if not isinstance(given.popularity, Path):
        return given
    file = scenario.find(str(given.popularity))
    if file is None:
        raise ValueError(
            f"popularity {str(given.popularity)!r} is neither measured, even, {{zipf: EXPONENT}} nor a file"
        )
    return replace(given, popularity=read_popularity(file))


def _step_times(scenario: Scenario, stack: ServingStack) -> StepTimes | None:
    """The measured steps that price the scenario's, if any; ValueError for settings that they cannot follow."""
    given = scenario.hardware
    if isinstance(given, str):
        return None
    file = scenario.find(given.steps)
    if file is None:
        raise ValueError(f"steps: {given.steps} does not exist")
    without = {
        "cost_model roofline": scenario.cost_model == "roofline",
        "cuda_graphs": scenario.cuda_graphs is not None,
        "experts": scenario.experts is not None,
        "power_limit_w": scenario.power_limit_w is not None,
    }
    for what, is_given in without.items():
        if is_given:
            raise ValueError(f"{what} changes no time that {given.steps} has measured; leave it out, or hardware.steps")
    if scenario.decoding.method != "autoregressive":
        raise ValueError(
            f"{given.steps} has the times of steps that decode one token a sequence, and neither those of a draft nor of verifying "
            f"several; leave decoding out, or hardware.steps (method {scenario.decoding.method})"
        )
    where = tuple((given.where or {}).items())
    return StepTimes(file=file, digest=digest_of(file), stack=stack, where=where, host_s=given.host_s)


def _device_of(scenario: Scenario, given: StepHardware, times: StepTimes) -> Device:
    """The device that is given beside measured steps, or the one that their file names."""
    if given.device is not None:
        return load_hardware(scenario.find(given.device) or given.device)
    name = next((times.rows.says[key] for key in ("system", "gpu") if key in times.rows.says), None)
    if name is None:
        raise ValueError(f"{given.steps} does not say its device; give hardware.device, for its memory and links")
    try:
        return load_hardware(name)
    except ValueError as error:
        raise ValueError(f"{given.steps} is of a device that is not known; give hardware.device ({error})") from None


def _hardware(scenario: Scenario, times: StepTimes | None) -> tuple[Device, str | None]:
    """The device, and the path of the calibrated profile that the scenario names in its place."""
    if not isinstance(scenario.hardware, str):
        assert times is not None
        return _device_of(scenario, scenario.hardware, times), None
    file = scenario.find(scenario.hardware)
    if file is not None and is_profile(file):
        if scenario.cost_model == "roofline":
            raise ScenarioError(
                f"{file} is a calibrated profile and cost_model asks for the datasheet; name the device, or leave "
                "cost_model out"
            )
        return load_hardware(file), str(file)
    return load_hardware(file or scenario.hardware), None
