"""A model on devices: what it weighs there, how much cache is left, and the cost model that prices it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.cache import StageCache, cached_kinds
from hwmodels.calibrated import Calibrated
from hwmodels.cost import CostFactory, CostModel
from hwmodels.device import Device, device_catalogue
from hwmodels.hardware import load_hardware
from hwmodels.memory import MemoryPlan, memory_plan, with_slots
from hwmodels.model import ModelSpec, load_model
from hwmodels.operations import StageWork
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision as number_format
from hwmodels.profiles import Profile
from hwmodels.published import PROVENANCE as PUBLISHED_TIMES
from hwmodels.published import Published
from hwmodels.roofline import Roofline
from hwmodels.stack_kernels import RECURRENT_BYTES_SHARE, RECURRENT_FLOPS_SHARE
from hwmodels.steps.cost import StepTimes
from hwmodels.work import stage_work


class FrontEnd(NamedTuple):
    """Seconds from a request's arrival until a scheduler sees it."""

    admission_s: float = 0.0
    admission_s_per_token: float = 0.0
    """Tokenisation, for each prompt token."""
    admission_serial_s: float = 0.0
    """The time of its work for one request that others wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One replica of *model* on `parallel.n_devices` of *device*."""

    model: ModelSpec
    device: Device
    parallel: ParallelConfig
    kv_precision: str
    cost: CostModel = field(compare=False, repr=False)
    made_by: CostFactory = field(default=Roofline, compare=False, repr=False)
    """The function that made the cost model: other models on the same terms are priced by it too."""

    @property
    def front_end(self) -> FrontEnd:
        """The front end between a request's arrival and the scheduler; no delay where no serving stack is priced."""
        if not isinstance(self.made_by, Calibrated | StepTimes):
            return FrontEnd()
        own = self.made_by.stack.overheads
        return FrontEnd(own.admission_s, own.admission_s_per_token, own.admission_serial_s)

    @property
    def measured_as(self) -> str:
        """The name under which runs on the device were measured; one that no run has for a datasheet of one's own."""
        name = self.device.name
        return name if device_catalogue().get(name) == self.device else f"the {name} of a file"

    @property
    def profile(self) -> Profile | None:
        """The calibrated profile behind the prices; None where there is none."""
        return self.made_by.load(self.device) if isinstance(self.made_by, Calibrated) else None

    @property
    def provenance(self) -> Mapping[str, Any]:
        """For manifests: what the prices come from."""
        if isinstance(self.made_by, Calibrated):
            return self.made_by.provenance(self.device)
        if self.made_by is Roofline:
            return {"profile": "datasheet roofline: peaks of the datasheet, no calibration, no overheads"}
        if self.made_by is Published:
            return {"profile": PUBLISHED_TIMES}
        if isinstance(self.made_by, StepTimes):
            return self.made_by.provenance
        return {"profile": f"a cost model of one's own: {getattr(self.made_by, '__qualname__', self.made_by)}"}

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """A sentence for each kernel that another format's, software's or device's measurements price."""
        if not isinstance(self.made_by, Calibrated):
            return ()
        return self.made_by.stand_ins(self.model, self.device, self._stages())

    @property
    def least_step_s(self) -> float:
        """The weights that a step reads for one sequence, over the datasheet's bandwidth: no token takes less."""
        read_bytes = sum(
            sum(linear.weight_bytes for linear in stage.linears)
            + (0.0 if stage.experts is None else float(stage.experts.read_bytes(1.0)))
            for stage in self._stages()
        )
        return read_bytes / self.device.hbm_bytes_per_s

    def loan(self, *, network_alone: bool = False) -> tuple[float, float]:
        """The factors of what is priced between which the times of lent kernels lie nine times in ten; (1, 1) where none is lent.

        *network_alone*: of those that run over the network between nodes.
        """
        if not isinstance(self.made_by, Calibrated):
            return 1.0, 1.0
        return self.made_by.loan(self.model, self.device, self._stages(), network_alone=network_alone)

    @property
    def lent_factors(self) -> Mapping[str, Sequence[float]]:
        """The factors of what is priced, by family of kernels, within which those that are lent lie nine times in ten."""
        if not isinstance(self.made_by, Calibrated):
            return {}
        return self.made_by.lent_factors(self.model, self.device, self._stages())

    def _stages(self) -> tuple[StageWork, ...]:
        return _stages(self.model, self.parallel, self.kv_precision)

    @property
    def weight_bytes_per_device(self) -> float:
        """Weights on one device of the fullest stage."""
        return max(stage.resident_bytes for stage in self._stages())

    @property
    def kv_bytes_per_token_per_device(self) -> float:
        """Cache of one token on one device of the stage with the most layers; replicated heads are counted."""
        return max(_kv_bytes(stage) for stage in self._stages())

    @property
    def stage_kv_bytes_per_token(self) -> tuple[float, ...]:
        """Cache of one token on one device of each stage."""
        return tuple(_kv_bytes(stage) for stage in self._stages())

    @property
    def notes(self) -> tuple[str, ...]:
        """The things that the model leaves out or approximates, and what prices it without having been measured."""
        if isinstance(self.made_by, StepTimes):
            return *self.model.notes, *self.made_by.notes
        linear, profile = self.model.layer_is_linear, self.profile
        if not any(linear) or profile is None or profile.has("linear_decode"):
            return self.model.notes
        return (
            *self.model.notes,
            f"The linear attention of {self.model.name} has not been measured on {self.device.name}: convolution and state "
            f"are priced at {RECURRENT_FLOPS_SHARE:g} of the datasheet's arithmetic and {RECURRENT_BYTES_SHARE:g} of its "
            "bandwidth, which are assumptions.",
        )

    def stage_bytes(self) -> tuple[tuple[float, float, range], ...]:
        """For each stage, on one device: weights, cache of one token, and which layers."""
        return tuple(
            (stage.resident_bytes, _kv_bytes(stage), layers)
            for stage, layers in zip(self._stages(), self.parallel.stage_layers(self.model.n_layers), strict=True)
        )

    def stage_caches(self) -> tuple[StageCache, ...]:
        """For each stage, what one of its devices keeps, layer by layer."""
        kinds, stages = cached_kinds(self.model), self._stages()
        # Pages are as large on every stage, whichever kinds of layer it has.
        uneven = self.model.local_attention is not None
        token_bytes = max(_layer_bytes(stage, False if uneven else None) for stage in stages)
        local_bytes = max(_layer_bytes(stage, True) for stage in stages) if uneven else None
        states = [stage.recurrence for stage in stages if stage.recurrence is not None]
        state_bytes = max((state.held_bytes / state.layers for state in states), default=0.0)
        return tuple(
            StageCache(
                kinds=kinds,
                layers=layers,
                token_bytes=token_bytes,
                local_token_bytes=local_bytes,
                state_bytes=state_bytes,
                window_tokens=self.model.window_tokens,
            )
            for layers in self.parallel.stage_layers(self.model.n_layers)
        )

    def fitted(self, plan: MemoryPlan) -> MemoryPlan:
        """*plan*, where the model fits with at least one block that a sequence can get; ValueError otherwise, saying what is
        missing and what would fit."""
        if plan.device_blocks - plan.null_blocks >= 1:
            return plan
        if plan.override is not None:
            raise ValueError(
                f"kv_blocks {plan.override} leaves no block for a sequence; give at least {plan.null_blocks + 1}"
            )
        stage = plan.tightest
        lost = stage.used_bytes - stage.weight_bytes
        missing = (stage.block_bytes * (1 + plan.null_blocks) - stage.kv_bytes) / 1e9
        if stage.budget_bytes <= stage.reserve_bytes:
            raise ValueError(
                f"reserve_bytes ({stage.reserve_bytes / 1e9:.1f} GB) leaves nothing of the {plan.share:.0%} of a "
                f"{self.device.name}'s {stage.device_bytes / 1e9:.1f} GB; reserve less"
            )
        beside = f" and {lost / 1e9:.1f} GB of what else its stack sets aside" if lost else ""
        raise ValueError(
            f"{self.model.name} ({_formats(self.model)}) does not fit: a {self.device.name} offers "
            f"{stage.budget_bytes / 1e9:.1f} GB for it ({plan.share:.0%} of its memory) and it takes "
            f"{stage.weight_bytes / 1e9:.1f} GB of weights{beside} on each device, so {missing:.1f} GB is missing with "
            f"{_degrees(self.parallel)}; {self._plan_way_out(plan)}"
        )

    def _plan_way_out(self, plan: MemoryPlan) -> str:
        reserve = plan.stages[0].reserve_bytes

        def fits(device: Device, parallel: ParallelConfig) -> bool:
            other = dataclasses.replace(self, device=device, parallel=parallel)
            found = memory_plan(
                other,
                plan.rules,
                largest=plan.largest,
                share=plan.share,
                reserve_bytes=reserve,
                block_tokens=plan.block_tokens,
            )
            if plan.adapters is not None:
                if parallel.pipeline > 1:
                    return False  # adapters on the stages of a pipeline are not modelled
                found = with_slots(found, dataclasses.replace(plan.adapters, parallel=parallel))
            return found.device_blocks > found.null_blocks

        fewer = "" if plan.adapters is None else "; fewer adapters.max_loras, or a lower max_lora_rank, take less"
        return self._offers(fits) + fewer

    def _offers(self, in_memory: Callable[[Device, ParallelConfig], bool]) -> str:
        """The nearest layouts and device on which the model runs and *in_memory* holds, in words."""

        def fits(device: Device, parallel: ParallelConfig) -> bool:
            try:
                parallel.check(self.model)
                for fmt in (self.model.attention_precision, self.model.expert_precision, self.model.base_precision):
                    device.first_peak(number_format(fmt).math, fmt)
            except ValueError:
                return False
            return in_memory(device, parallel)

        offers: list[str] = []
        for name in ("tensor", "pipeline"):
            for degree in (1, 2, 4, 8, 16, 32, 64):
                if degree <= getattr(self.parallel, name):
                    continue
                if fits(self.device, dataclasses.replace(self.parallel, **{name: degree})):
                    offers.append(f"{name} {degree}")
                    break
        # Of the same maker: a stack, or its kernels, may not run on another's.
        known = [d for d in device_catalogue().values() if d.vendor == self.device.vendor]
        larger = [d for d in known if d.memory_bytes > self.device.memory_bytes]
        for device in sorted(larger, key=lambda d: (d.memory_bytes, d.name)):
            if fits(device, self.parallel):
                offers.append(f"{device.name} ({device.memory_bytes / 1e9:.0f} GB)")
                break
        if not offers:
            return "no tensor or pipeline degree up to 64 and no larger device fits; use a smaller precision or model"
        return f"it would fit with {' or with '.join(offers)}"


def _formats(spec: ModelSpec) -> str:
    formats = dict.fromkeys((spec.mlp_precision, spec.attention_precision, spec.expert_precision))
    if spec.experts is None:
        formats = dict.fromkeys((spec.mlp_precision, spec.attention_precision))
    return "/".join(str(number_format(fmt)) for fmt in formats)


def _degrees(parallel: ParallelConfig) -> str:
    return f"tensor {parallel.tensor}, pipeline {parallel.pipeline}" + (
        f", expert {parallel.expert}, data {parallel.data}" if parallel.expert * parallel.data > 1 else ""
    )


def _layer_bytes(stage: StageWork, windowed: bool | None) -> float:
    """Cache of one token in one layer of softmax attention, of those with a window, those without, or (None) all; 0 where the
    stage has none."""
    shapes = [shape for shape in stage.attention if windowed is None or shape.windowed == windowed]
    layers = sum(shape.layers for shape in shapes if shape.kind != "indexer")
    return sum(shape.kv_bytes * shape.layers for shape in shapes) / layers if layers else 0.0


def _kv_bytes(stage: StageWork) -> float:
    return sum(shape.kv_bytes * shape.layers for shape in stage.attention)


@functools.lru_cache(maxsize=1024)
def _stages(spec: ModelSpec, parallel: ParallelConfig, kv_precision: str) -> tuple[StageWork, ...]:
    return tuple(stage_work(spec, parallel, s, kv_precision=kv_precision) for s in range(parallel.pipeline))


@functools.lru_cache(maxsize=256)
def _deployment(
    spec: ModelSpec, device: Device, parallel: ParallelConfig, kv_precision: str, cost: CostFactory
) -> Deployment:
    return Deployment(
        model=spec,
        device=device,
        parallel=parallel,
        kv_precision=kv_precision,
        cost=cost(spec, device, parallel, kv_precision=kv_precision),
        made_by=cost,
    )


def deploy(
    *,
    model: str | Path | ModelSpec,
    hardware: str | Path | Device,
    parallel: ParallelConfig | Mapping[str, Any] | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
    expert_precision: str | None = None,
    cost: CostFactory = Roofline,
) -> Deployment:
    """One replica of *model* on *hardware*: the entry for scenarios.

    *precision* None keeps the checkpoint's own formats; *kv_precision* None takes the checkpoint's, else its base
    format (16 bits for quantised weights). *expert_precision* sets experts apart. Equal arguments give the same object.
    Whether it fits in memory is asked of `memory_plan` and `Deployment.fitted`. ValueError for unknown names and impossible
    combinations.
    """
    given = [name for name, value in (("precision", precision), ("kv_precision", kv_precision)) if value is not None]
    spec = model if isinstance(model, ModelSpec) else load_model(model, given=given)
    device = hardware if isinstance(hardware, Device) else load_hardware(hardware)
    if parallel is None:
        parallel = ParallelConfig()
    elif not isinstance(parallel, ParallelConfig):
        fields = [f.name for f in dataclasses.fields(ParallelConfig)]
        for key in parallel:
            if key not in fields:
                raise ValueError(f"parallel.{key} is not a degree of parallelism; valid: {', '.join(fields)}")
        parallel = ParallelConfig(**parallel)
    if precision is not None:
        spec = spec.with_precision(precision, experts=expert_precision)
    elif expert_precision is not None:
        if spec.experts is None:
            raise ValueError(f"expert_precision is set but {spec.name} has no experts; set precision")
        spec = dataclasses.replace(spec, expert_precision=number_format(expert_precision).name)
    cache = number_format(kv_precision or spec.kv_precision or spec.base_precision).name
    return _deployment(spec, device, parallel, cache, cost)
