"""The resource that bounds a deployment, and the effect of a tenth more of each, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hwmodels.changed import Factors, changed
from hwmodels.layerwise import LayerwiseCost
from hwmodels.slowed import Slowed
from sim.engine import Experiment, MachineSpec, ReplicaSpec
from sim.run import simulate
from sim.study.explain import FULL, Explained

Mend = Callable[[Experiment], Experiment]

_TENTH = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of more of one resource on a run: each mean over what it was, less 1; None where the run has no such mean."""

    name: str
    ttft: float | None
    tpot: float | None
    e2el: float | None


def bound(explained: Explained) -> str:
    """A sentence that names what bounds the deployment: the resource that the time of its machines goes to, or KV memory or slots
    for adapters where requests wait for them."""
    busy_s = sum(explained.busy_s.values())
    if not busy_s:
        return "Nothing ran, so that nothing bounds it."
    if explained.short_of_memory > 0.5:
        return (
            f"KV memory bounds it: for {explained.short_of_memory:.0%} of the time that its machines are busy requests wait while "
            f"{FULL:.0%} of the KV blocks are in use, or so many that a prompt of mean length does not fit."
        )
    if explained.waiting_for_slot >= 1.0 and explained.waiting_for_slot > explained.waiting / 2:
        # Requests in the queue are counted at the start of each iteration, those without a slot at every instant.
        share = min(explained.waiting_for_slot / explained.waiting, 1.0)
        return (
            f"Adapter slots bound it: {explained.waiting_for_slot:,.3g} requests wait for one on average, {share:.0%} of those "
            "that wait; rooftrace advise --only adapters says how many to set."
        )
    share = {cause: seconds / busy_s for cause, seconds in explained.busy_s.items()}
    groups = {name: sum(share[cause] for cause in causes) for name, (causes, _) in _BOUNDS.items()}
    first, *others = sorted(groups, key=lambda name: -groups[name])
    named = [first, *(name for name in others if groups[name] >= _NEARLY * groups[first])]

    def parts(name: str) -> str:
        causes, said = _BOUNDS[name]
        return ", ".join(f"{share[cause]:.0%} {said[cause]}" for cause in causes if share[cause] >= 0.005)

    beside = f", and {' and '.join(map(str.lower, named[1:]))} nearly as much" if len(named) > 1 else ""
    return (
        f"{first} {'bound' if first.endswith('s') else 'bounds'} it{beside}: of the time that its machines are busy, "
        f"{'; '.join(map(parts, named))}."
    )


_NEARLY = 0.8
"""A resource to which so much of the first one's time goes is named beside it, for chance decides which of them is first."""
_BOUNDS: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "Memory bandwidth": (
        ("weights", "kv", "elementwise"),
        {
            "weights": "goes to reading weights",
            "kv": "to reading the KV cache",
            "elementwise": "to norms and other kernels that stream",
        },
    ),
    "Arithmetic": (
        ("arithmetic", "prompt_attention"),
        {"arithmetic": "goes to the products of many rows", "prompt_attention": "to the attention of prompts"},
    ),
    "Experts": (("experts",), {"experts": "goes to their weights and products"}),
    "Links": (("collectives",), {"collectives": "goes to collectives and exchanges"}),
    "Host": (("host",), {"host": "goes to host work and launches that the device waits for"}),
    "Padding": (("padding",), {"padding": "goes to rows that pad a step to a captured graph"}),
    "Drafting": (("drafting",), {"drafting": "goes to the drafter"}),
    "Adapters": (
        ("adapters", "adapter_loads"),
        {"adapters": "goes to kernels of LoRA adapters", "adapter_loads": "to loading them"},
    ),
    "Images": (("images",), {"images": "goes to encoding them"}),
    "Masks": (("masks",), {"masks": "goes to masks of grammars"}),
    "Imbalance": (
        ("waiting_inside",),
        {"waiting_inside": "goes to waiting for other ranks, stages or a slower machine"},
    ),
}


def effects(experiment: Experiment, summary: Mapping[str, Any]) -> Iterator[Effect]:
    """The same run with a tenth more of one resource at a time, against *summary* of the run as it is; each as it has run."""
    for name, mend in _MENDS.items():
        yield Effect(name=name, **_means(simulate(mend(experiment)).summary, summary))


def _means(summary: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float | None]:
    pairs = {name: (summary[f"{name}_s"]["mean"], before[f"{name}_s"]["mean"]) for name in ("ttft", "tpot", "e2el")}
    return {name: after / was - 1.0 if after and was else None for name, (after, was) in pairs.items()}


def _by(factors: Factors) -> Mend:
    def mended(experiment: Experiment) -> Experiment:
        made: dict[int, Any] = {}

        def cost(own: Any) -> Any:
            if isinstance(own, Slowed):
                return replace(own, inner=cost(own.inner))
            if not isinstance(own, LayerwiseCost):
                return own
            if id(own) not in made:
                made[id(own)] = changed(own, factors)
            return made[id(own)]

        return _each(experiment, lambda spec: replace(spec, cost=cost(spec.cost), draft_cost=cost(spec.draft_cost)))

    return mended


def _each(experiment: Experiment, of_spec: Callable[[ReplicaSpec], ReplicaSpec]) -> Experiment:
    """*experiment* with *of_spec* of every model on every machine."""
    made: dict[int, Any] = {}

    def machine(own: ReplicaSpec | MachineSpec) -> Any:
        # Machines that are alike stay one object, whose prices are made once.
        if id(own) not in made:
            one = isinstance(own, ReplicaSpec)
            made[id(own)] = of_spec(own) if one else replace(own, hosted=tuple(map(of_spec, own.hosted)))
        return made[id(own)]

    return replace(experiment, replicas=tuple(machine(each) for each in experiment.replicas))


def _less_host(experiment: Experiment) -> Experiment:
    own = _by(Factors(host=_TENTH))(experiment)
    names = ("admission_s", "admission_s_per_token", "admission_serial_s")
    return replace(own, **{name: getattr(own, name) / _TENTH for name in names})


def _more_memory(experiment: Experiment) -> Experiment:
    return _each(experiment, lambda spec: replace(spec, kv_blocks=int(np.ceil(spec.kv_blocks * _TENTH))))


_MENDS: Mapping[str, Mend] = {
    "a tenth more memory bandwidth": _by(Factors(bandwidth=_TENTH)),
    "a tenth more arithmetic": _by(Factors(arithmetic=_TENTH)),
    "a tenth more KV memory": _more_memory,
    "links a tenth faster": _by(Factors(links=_TENTH)),
    "host work and front end a tenth faster": _less_host,
}
