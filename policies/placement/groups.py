"""Placements, the input of searches (cluster, models and scores), and a check whether a placement fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Group:
    """Devices that run one parallel configuration, and the models that share them."""

    inter_op: int
    """Pipeline stages."""
    intra_op: int
    """Devices that share each stage."""
    models: tuple[int, ...] = ()
    """Rows of the cluster's models, ascending."""

    def __post_init__(self) -> None:
        for name in ("inter_op", "intra_op"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is a whole number of at least 1; got {value!r}")
        if list(self.models) != sorted(set(self.models)) or any(model < 0 for model in self.models):
            raise ValueError(f"models of a group are different rows from 0 in ascending order; got {self.models!r}")

    @property
    def n_devices(self) -> int:
        return self.inter_op * self.intra_op

    @property
    def shape(self) -> tuple[int, int]:
        return self.inter_op, self.intra_op

    def adding(self, model: int) -> Group:
        """The group hosting *model* too."""
        return replace(self, models=tuple(sorted((*self.models, model))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Groups on the devices of a cluster, one after another from device 0."""

    groups: tuple[Group, ...]

    @property
    def n_devices(self) -> int:
        return sum(group.n_devices for group in self.groups)

    @property
    def replicas(self) -> int:
        """Copies of models, all groups together."""
        return sum(len(group.models) for group in self.groups)

    def adding(self, model: int, group: int) -> Placement:
        """The placement with *model* on *group* too."""
        groups = list(self.groups)
        groups[group] = groups[group].adding(model)
        return Placement(groups=tuple(groups))

    def describe(self) -> str:
        """Shapes of the groups in words, such as '4 x (8, 1), 2 x (4, 1)'."""
        counts: dict[tuple[int, int], int] = {}
        for group in self.groups:
            counts[group.shape] = counts.get(group.shape, 0) + 1
        return ", ".join(f"{n} x ({inter}, {intra})" for (inter, intra), n in counts.items()) or "no groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model, as a search knows it."""

    name: str
    latency_s: float
    """Latency of one request alone on one device."""
    rate_per_s: float
    """Rate of its requests in the sample of traffic that placements are scored on."""
    device_bytes: Mapping[tuple[int, int], float] = field(hash=False)
    """(inter_op, intra_op) -> weights on each device of the fullest stage; shapes that it cannot run on are absent."""

    def __post_init__(self) -> None:
        if not (isfinite(self.latency_s) and self.latency_s > 0):
            raise ValueError(f"{self.name}: latency_s is a finite time above 0; got {self.latency_s!r}")
        if not (isfinite(self.rate_per_s) and self.rate_per_s >= 0):
            raise ValueError(f"{self.name}: rate_per_s is a finite rate of at least 0; got {self.rate_per_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind, in nodes."""

    n_devices: int
    memory_bytes: float
    """For weights, of each device."""
    devices_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("n_devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1; got {getattr(self, name)!r}")
        if not (isfinite(self.memory_bytes) and self.memory_bytes > 0):
            raise ValueError(f"memory_bytes is a finite size above 0; got {self.memory_bytes!r}")


class Score(NamedTuple):
    """A placement's results on the sample of traffic."""

    value: float
    """Higher is better."""
    unserved: Sequence[int]
    """For each model, requests that missed their deadline or found no group."""
    requests: Sequence[int]
    """For each group, requests that it served."""


Scorer = Callable[[Sequence[Placement]], Sequence[Score]]
"""Scores several placements at once, so that they can be simulated in parallel; may raise `BudgetSpent`."""


class BudgetSpent(Exception):
    """Raised by a scorer when there is no time left; searches answer with the best placement so far."""


class PlacementSearch(Protocol):
    """Finds a placement by simulating candidates. Implementations are frozen dataclasses."""

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        """The best placement found within the cluster's devices and memory; of the best so far where *score* raises BudgetSpent."""
        ...


def group_bytes(group: Group, models: Sequence[ModelView]) -> float:
    """Bytes on each device of *group*: for each model its fullest stage; infinite where one cannot run there."""
    return sum(models[model].device_bytes.get(group.shape, float("inf")) for model in group.models)


def check(placement: Placement, cluster: Cluster, models: Sequence[ModelView]) -> None:
    """ValueError in one sentence if *placement* takes more devices or memory than *cluster* has."""
    if placement.n_devices > cluster.n_devices:
        raise ValueError(
            f"the placement takes {placement.n_devices} devices and the cluster has {cluster.n_devices}; drop a group"
        )
    for index, group in enumerate(placement.groups):
        for model in group.models:
            if model >= len(models):
                raise ValueError(f"group {index} hosts model {model}, and there are only {len(models)}")
            if group.shape not in models[model].device_bytes:
                raise ValueError(
                    f"group {index}: {models[model].name} cannot run on (inter_op, intra_op) = {group.shape}"
                )
        used = group_bytes(group, models)
        if used > cluster.memory_bytes:
            raise ValueError(
                f"group {index} {group.shape} needs {used / 1e9:.2f} GB of weights on each device and has "
                f"{cluster.memory_bytes / 1e9:.2f} GB; host fewer models or take a larger group"
            )


def uniform_groups(n_devices: int, inter_op: int, intra_op: int) -> Placement:
    """As many groups of one shape as fit; the devices left over form groups of falling powers of two."""
    size = inter_op * intra_op
    shapes = [(inter_op, intra_op)] * (n_devices // size)
    left, power = n_devices % size, 1 << max(size.bit_length() - 1, 0)
    while left:
        if power <= left:
            intra = min(intra_op, power)
            shapes.append((power // intra, intra))
            left -= power
        else:
            power >>= 1
    return Placement(groups=tuple(Group(inter_op=inter, intra_op=intra) for inter, intra in shapes))
