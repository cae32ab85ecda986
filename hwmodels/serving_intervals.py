"""The errors of served runs whose deployment, model or device no fit had seen: 90 % intervals for TPOT and TTFT.

The widths are in serving_intervals.toml, which `python -m sim.validation.fit_stacks --intervals` writes: for each stack the ends of
measured over predicted, on rows of which the fit had seen nothing of the deployment, of the model, or of the device. Rows of one
deployment lie together, so that the 5th and 95th percentile of few deployments hold less than nine in ten rows of another: as much
is left out on either side, 5 percent at most, as lets them hold that many. A prediction is multiplied by them. They are of means
over closed-loop benchmarks, the kind of figure that was held back.

Those rows are of GPUs whose kernels were measured, but for a few that their profiles borrow, whose errors the rows contain. On a
device that no row is of, and over a network between nodes, both ends move out by the interval of what is lent, that of the family
with the widest: an upper bound, as if all of a step's time were that family's and its error came on top of what the rows show.

Two things are in serving_kinds.toml (`python -m sim.validation.fit_kinds`). The rows that were held back of SGLang have few
clients: the ends are no nearer than those of all rows at any load. And a kind of model, an architecture in a format, that none of
the stack's runs is of moves both ends out by as much as the architecture needed that lay farthest out of the others' interval.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hwmodels.model import CompressedAttention, LatentAttention, ModelSpec
from hwmodels.tables import ROOM, read_toml

FILE = ROOM / "serving_intervals.toml"
KINDS = ROOM / "serving_kinds.toml"
ANY = "any"
"""The entry of serving_kinds.toml for kinds without runs."""
QUANTITIES = ("tpot_s", "ttft_s")
KIND = "gpu"
"""The kind of device that the rows are of; they say nothing of another."""


class Factors(NamedTuple):
    """The factors on a prediction for the ends of its 90 % interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInterval:
    """90 % intervals of the mean TPOT and TTFT of a deployment."""

    tpot: Factors
    ttft: Factors
    unseen: str
    """The kind of those deployments: of whose deployment alone, or also model or device, the fit had seen nothing."""
    basis: str
    """The runs whose errors they are from, in words."""

    @property
    def facts(self) -> dict[str, Any]:
        """For manifests."""
        return {"tpot_s": list(self.tpot), "ttft_s": list(self.ttft), "basis": self.basis}


def architecture_of(model: ModelSpec) -> str:
    """hybrid (linear attention in some layers), latent, experts or dense."""
    if any(model.layer_is_linear):
        return "hybrid"
    if isinstance(model.attention, (LatentAttention, CompressedAttention)):
        return "latent"
    return "dense" if model.experts is None else "experts"


def kind_of(model: ModelSpec) -> str:
    """The architecture and the format of most weights: 'dense bf16', 'experts fp4'."""
    weights = model.mlp_precision if model.experts is None else model.expert_precision
    formats = {"fp16": "bf16", "nvfp4": "fp4", "mxfp4": "fp4"}
    return f"{architecture_of(model)} {formats.get(weights, weights.partition('_')[0])}"


@functools.cache
def _kinds() -> Mapping[str, Mapping[str, Any]]:
    return read_toml(KINDS)


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return read_toml(FILE)


def has_rows(stack: str, device: str) -> bool:
    """Whether rows of *stack* on *device* (catalogue names) were held back."""
    return device in _table().get(stack, {}).get("devices", ())


def serving_interval(
    stack: str,
    model: str,
    device: str,
    *,
    kind: str = KIND,
    loan: tuple[float, float] = (1.0, 1.0),
    model_kind: str | None = None,
) -> ServingInterval | None:
    """The interval of *model* on *device* (catalogue names) behind *stack*; None for a stack that no runs were held back of, and
    for a device of another *kind* (gpu, tpu or cpu) than those of the rows.

    It widens where the model, or the device, is not among those that the stack's terms were fitted to; where neither is, both
    widenings count. *loan*: between which factors the kernels' measured times lie nine times in ten, where others lent them; an
    end that would narrow the interval counts as 1. *model_kind*: of `kind_of`; None: one that the stack's runs have.
    """
    entry = _table().get(stack)
    if entry is None or kind != KIND:
        return None
    strange = [
        what
        for what, name, known in (("model", model, "models"), ("device", device, "devices"))
        if name not in entry[known]
    ]
    kinds = _kinds()
    new_kind = model_kind is not None and model_kind not in kinds[stack]["kinds"]
    found = {}
    for quantity in QUANTITIES:
        widths, of_all = entry[quantity], kinds[stack][quantity]
        low, high = min(widths["deployment"][0], of_all[0]), max(widths["deployment"][1], of_all[1])
        for what in strange:
            # Never narrower than that of a deployment alone, and one widening on top of the other.
            low *= min(1.0, widths[what][0] / widths["deployment"][0])
            high *= max(1.0, widths[what][1] / widths["deployment"][1])
        if new_kind:
            low, high = low * kinds[ANY][quantity][0], high * kinds[ANY][quantity][1]
        found[quantity] = Factors(low * min(1.0, loan[0]), high * max(1.0, loan[1]))
    held = {"": "deployment", "model": "model", "device": "device", "model device": "model and device"}[
        " ".join(strange)
    ]
    basis = f"{entry['rows']:,} rows of {stack} whose {held} no fit had seen"
    if new_kind:
        basis += f", wider since no row is of {str(model_kind).replace(' ', ' models in ')}"
    if loan[0] < 1.0 or loan[1] > 1.0:
        basis += f", times {loan[0]:.2g} to {loan[1]:.2g} for kernels that were not measured on {device}"
    return ServingInterval(tpot=found["tpot_s"], ttft=found["ttft_s"], unseen=held, basis=basis)
