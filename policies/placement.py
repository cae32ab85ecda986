"""Which models share which devices: placements, and searches for good ones.

A search is a frozen dataclass with one pure method, `search(cluster, models, score)`. It proposes placements and is
told how well each serves a sample of the traffic; who simulates, caches or counts the seconds is not its business.
Algorithms 1 and 2 are those of AlpaServe (Li et al., OSDI 2023, arXiv 2302.11665, section 4), in the details that its
artifact gives (alpa-projects/mms).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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
    """What a search may know of a model."""

    name: str
    latency_s: float
    """Of one request on one device with nothing else to do."""
    rate_per_s: float
    """Of its requests in the sample of traffic that placements are scored on."""
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
    """How well a placement served the sample of traffic."""

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
    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement: ...


def group_bytes(group: Group, models: Sequence[ModelView]) -> float:
    """Bytes on each device of *group*: for each model its fullest stage; infinite where one cannot run there."""
    return sum(models[model].device_bytes.get(group.shape, float("inf")) for model in group.models)


def check(placement: Placement, cluster: Cluster, models: Sequence[ModelView]) -> None:
    """ValueError in one sentence if *placement* asks for more devices or memory than *cluster* has."""
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


class _Room:
    """Which models still fit where, kept up to date as a placement grows."""

    def __init__(self, placement: Placement, cluster: Cluster, models: Sequence[ModelView]) -> None:
        self._cluster, self._models = cluster, models
        self.placement = placement
        self._free = [cluster.memory_bytes - group_bytes(group, models) for group in placement.groups]

    def groups(self, model: int) -> list[int]:
        """Groups that do not host *model* and have memory for it."""
        sizes = self._models[model].device_bytes
        return [
            index
            for index, group in enumerate(self.placement.groups)
            if model not in group.models and sizes.get(group.shape, float("inf")) <= self._free[index]
        ]

    def put(self, model: int, group: int) -> None:
        self.placement = self.placement.adding(model, group)
        # Summed afresh rather than subtracted, so that `check` finds the same bytes later.
        self._free[group] = self._cluster.memory_bytes - group_bytes(self.placement.groups[group], self._models)


_Run = Generator[list[Placement], Sequence[Score], None]
"""Yields placements to be scored and is sent their scores; many runs go in step, so that theirs are scored at once."""


class _Best:
    def __init__(self) -> None:
        self.value = float("-inf")
        self.placement: Placement | None = None

    def see(self, placement: Placement, value: float) -> None:
        if value > self.value:
            self.value, self.placement = value, placement


def _drive(runs: Iterable[tuple[_Run, _Best]], score: Scorer) -> None:
    """Run all to their ends, in step; the best placement of each is in its `_Best`, also when the budget is spent."""
    active: list[tuple[_Run, _Best, list[Placement]]] = []
    for run, best in runs:
        asked = next(run, None)
        if asked:
            active.append((run, best, asked))
    while active:
        scores = score([placement for _, _, asked in active for placement in asked])
        following: list[tuple[_Run, _Best, list[Placement]]] = []
        at = 0
        for run, best, asked in active:
            mine = scores[at : at + len(asked)]
            at += len(asked)
            for placement, found in zip(asked, mine, strict=True):
                best.see(placement, found.value)
            try:
                following.append((run, best, run.send(mine)))
            except StopIteration:
                continue
        active = following


def _heuristic(empty: Placement, cluster: Cluster, models: Sequence[ModelView], among: Sequence[int]) -> _Run:
    """Simulate once; put the model with most unserved requests on the least asked group with room; again."""
    room = _Room(empty, cluster, models)
    replicas = dict.fromkeys(among, 0)
    for model in among:
        replicas[model] = sum(model in group.models for group in empty.groups)

    def put(model: int, group: int) -> None:
        room.put(model, group)
        replicas[model] += 1

    while True:
        (found,) = yield [room.placement]
        changed = False
        for model in sorted(among, key=lambda m: -found.unserved[m]):
            if not found.unserved[model]:
                break
            groups = room.groups(model)
            if groups:
                put(model, min(groups, key=lambda g: (found.requests[g], g)))
                changed = True
                break
        if not changed:
            break
    # Memory that is left goes to further replicas, those first that have fewest for their load: they cost nothing, and
    # help when the traffic is not that of the sample.
    filled = False
    requests = list(found.requests)
    waiting = list(among)
    while waiting:
        model = max(waiting, key=lambda m: (models[m].rate_per_s * models[m].latency_s / (replicas[m] + 1), -m))
        groups = room.groups(model)
        if not groups:
            waiting.remove(model)
            continue
        chosen = min(groups, key=lambda g: (requests[g], g))
        put(model, chosen)
        requests[chosen] += 1
        filled = True
    if filled:
        yield [room.placement]


def _beam(empty: Placement, cluster: Cluster, models: Sequence[ModelView], among: Sequence[int], width: int) -> _Run:
    """Algorithm 1: try every model on every group with room, keep the *width* best placements, again."""
    yield [empty]
    beams = [empty]
    while beams:
        candidates: dict[tuple[Group, ...], Placement] = {}
        for beam in beams:
            room = _Room(beam, cluster, models)
            for model in among:
                # Groups that are alike in shape and models are alike to the score: one of each is enough.
                alike: set[Group] = set()
                for group in room.groups(model):
                    if beam.groups[group] not in alike:
                        alike.add(beam.groups[group])
                        grown = beam.adding(model, group)
                        candidates.setdefault(tuple(sorted(grown.groups)), grown)
        if not candidates:
            return
        asked = list(candidates.values())
        scores = yield asked
        ranked = sorted(range(len(asked)), key=lambda i: (-scores[i].value, i))
        beams = [asked[i] for i in ranked[:width]]


def _selection(
    empty: Placement, cluster: Cluster, models: Sequence[ModelView], among: Sequence[int], beam: int | None
) -> _Run:
    return _heuristic(empty, cluster, models, among) if beam is None else _beam(empty, cluster, models, among, beam)


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


def _check_beam(beam: object) -> None:
    if beam is not None and (isinstance(beam, bool) or not isinstance(beam, int) or beam < 1):
        raise ValueError(f"beam is a whole number of at least 1, or nothing for the fast heuristic; got {beam!r}")


def _found(best: _Best, otherwise: Placement) -> Placement:
    return otherwise if best.placement is None else best.placement


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualGroups:
    """Groups of one shape, models chosen by simulation (Algorithm 1, or its fast heuristic)."""

    inter_op: int = 4
    intra_op: int = 1
    beam: int | None = None
    """Placements kept at each step of Algorithm 1; without it the fast heuristic."""

    def __post_init__(self) -> None:
        _check_beam(self.beam)
        Group(inter_op=self.inter_op, intra_op=self.intra_op)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        empty, best = uniform_groups(cluster.n_devices, self.inter_op, self.intra_op), _Best()
        with contextlib.suppress(BudgetSpent):
            _drive([(_selection(empty, cluster, models, range(len(models)), self.beam), best)], score)
        return _found(best, empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveReplication:
    """Every device a group of its own, models replicated by simulation: no model parallelism."""

    beam: int | None = None

    def __post_init__(self) -> None:
        _check_beam(self.beam)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        return EqualGroups(inter_op=1, intra_op=1, beam=self.beam).search(cluster, models, score)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockworkPlusPlus:
    """Selective replication that is solved anew for each window of the traffic that it serves, moving at no cost.

    A search sees one window; whoever serves the traffic calls it for each (`sim.placement.serve` does).
    """

    window_s: float
    beam: int | None = None

    def __post_init__(self) -> None:
        _check_beam(self.beam)
        if not (isfinite(self.window_s) and self.window_s > 0):
            raise ValueError(f"window_s is a finite time above 0; got {self.window_s!r}")

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        return SelectiveReplication(beam=self.beam).search(cluster, models, score)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Equal groups; models are dealt to groups in turn until the one whose turn it is does not fit.

    Nothing is simulated. A group that hosts the model already is passed over. Where the artifact stops is not published;
    this rule follows from drops in its recorded results, which therefore cannot judge it.
    """

    inter_op: int = 4
    intra_op: int = 1

    def __post_init__(self) -> None:
        Group(inter_op=self.inter_op, intra_op=self.intra_op)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        placement = uniform_groups(cluster.n_devices, self.inter_op, self.intra_op)
        room = _Room(placement, cluster, models)
        n = len(placement.groups)
        if n:
            turn = 0
            for model in itertools.cycle(range(len(models))):
                hosting = [group for group in range(n) if model in room.placement.groups[group].models]
                if len(hosting) == n:
                    break
                while turn % n in hosting:
                    turn += 1
                if turn % n not in room.groups(model):
                    break
                room.put(model, turn % n)
                turn += 1
        return room.placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DedicatedGroups:
    """One group of the given shape for each model, the busiest models first. Nothing is simulated."""

    inter_op: int
    intra_op: int = 1

    def __post_init__(self) -> None:
        Group(inter_op=self.inter_op, intra_op=self.intra_op)

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        groups = list(uniform_groups(cluster.n_devices, self.inter_op, self.intra_op).groups)
        order = sorted(range(len(models)), key=lambda m: -models[m].rate_per_s * models[m].latency_s)
        for index, model in enumerate(order):
            if index < len(groups):
                hosting = groups[index].adding(model)
                if group_bytes(hosting, models) <= cluster.memory_bytes:
                    groups[index] = hosting
        return Placement(groups=tuple(groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSearch:
    """Algorithm 2: models in buckets of like latency, devices split between them, equal groups of each shape in each.

    For each bucket and number of devices every shape is tried with Algorithm 1 (or its fast heuristic), alone; the best
    of each are then put together and scored as a whole.
    """

    max_inter_op: int = 8
    max_intra_op: int = 4
    buckets: bool = True
    """Off: all models share all devices."""
    same_bucket: float = 0.38
    """Models in order of latency are never parted where the next is slower by this share or less."""
    max_splits: int = 8
    """Ways to divide devices between buckets that are tried: those nearest to the buckets' shares of the load.

    The artifact tries up to 99, which takes as many times longer.
    """
    beam: int | None = None

    def __post_init__(self) -> None:
        _check_beam(self.beam)
        for name in ("max_inter_op", "max_intra_op", "max_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1; got {getattr(self, name)!r}")
        if not (isfinite(self.same_bucket) and self.same_bucket >= 0):
            raise ValueError(f"same_bucket is a finite share of at least 0; got {self.same_bucket!r}")

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        whole = _Best()
        with contextlib.suppress(BudgetSpent):
            self._search(cluster, models, score, whole)
        return _found(whole, uniform_groups(cluster.n_devices, 1, 1))

    def _search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, whole: _Best) -> None:
        # All models in one bucket first: an answer to fall back on when the time is short.
        everyone = tuple(range(len(models)))
        _drive(self._runs(cluster, models, everyone, cluster.n_devices, whole), score)
        if not self.buckets:
            return
        for bucketing in bucketings(models, self.same_bucket):
            if len(bucketing) < 2:
                continue
            splits = device_splits(cluster.n_devices, bucketing, models, self.max_splits)
            needed = sorted({part for split in splits for part in zip(bucketing, split, strict=True)})
            bests = {part: _Best() for part in needed}
            runs: list[tuple[_Run, _Best]] = []
            for (bucket, n_devices), best in bests.items():
                runs += self._runs(cluster, models, bucket, n_devices, best)
            _drive(runs, score)
            joined: list[Placement] = []
            for split in splits:
                parts = [bests[part].placement for part in zip(bucketing, split, strict=True)]
                if all(part is not None for part in parts):
                    groups = tuple(group for part in parts if part is not None for group in part.groups)
                    joined.append(Placement(groups=groups))
            if joined:
                for placement, found in zip(joined, score(joined), strict=True):
                    whole.see(placement, found.value)

    def _runs(
        self, cluster: Cluster, models: Sequence[ModelView], bucket: tuple[int, ...], n_devices: int, best: _Best
    ) -> list[tuple[_Run, _Best]]:
        return [
            (_selection(uniform_groups(n_devices, *shape), cluster, models, bucket, self.beam), best)
            for shape in self.shapes(cluster, n_devices)
            if any(models[model].device_bytes.get(shape, float("inf")) <= cluster.memory_bytes for model in bucket)
        ]

    def shapes(self, cluster: Cluster, n_devices: int) -> list[tuple[int, int]]:
        """Shapes of groups on *n_devices*: sizes of powers of two, beyond a node multiples of it; every factor pair."""
        found: list[tuple[int, int]] = []
        size = 1
        while size <= n_devices:
            if size <= cluster.devices_per_node or size % cluster.devices_per_node == 0:
                intra = 1
                while intra <= min(size, self.max_intra_op):
                    if size // intra <= self.max_inter_op:
                        found.append((size // intra, intra))
                    intra *= 2
            size *= 2
        return found


def bucketings(models: Sequence[ModelView], same_bucket: float) -> list[tuple[tuple[int, ...], ...]]:
    """Ways to cut the models, in order of latency, into buckets, where latency jumps by more than *same_bucket*."""
    order = sorted(range(len(models)), key=lambda m: (models[m].latency_s, m))
    cuts = [
        at
        for at in range(1, len(order))
        if models[order[at]].latency_s > (1.0 + same_bucket) * models[order[at - 1]].latency_s
    ]
    found: list[tuple[tuple[int, ...], ...]] = []
    for chosen in range(1 << len(cuts)):
        edges = [0, *(cut for bit, cut in enumerate(cuts) if chosen >> bit & 1), len(order)]
        found.append(tuple(tuple(sorted(order[a:b])) for a, b in itertools.pairwise(edges)))
    return found


def device_splits(
    n_devices: int, bucketing: Sequence[Sequence[int]], models: Sequence[ModelView], most: int
) -> list[tuple[int, ...]]:
    """Ways to divide devices between buckets, at most *most* of them.

    They are kept by distance between each bucket's share of the devices and of the load (rate times latency), within a
    threshold that tightens (1, 0.5, 0.3, 0.2, 0.1) until few enough are left, and then the nearest of those.
    """
    loads = [sum(models[m].rate_per_s * models[m].latency_s for m in bucket) for bucket in bucketing]
    total = sum(loads) or 1.0
    shares = [load / total for load in loads]

    def ways(left: int, buckets: int) -> Iterable[tuple[int, ...]]:
        if buckets == 1:
            yield (left,)
            return
        for first in range(1, left - buckets + 2):
            for rest in ways(left - first, buckets - 1):
                yield (first, *rest)

    def distance(split: tuple[int, ...]) -> float:
        return max(abs(part / n_devices - share) for part, share in zip(split, shares, strict=True))

    if n_devices < len(bucketing):
        return []
    found = list(ways(n_devices, len(bucketing)))
    for threshold in (1.0, 0.5, 0.3, 0.2, 0.1):
        kept = [split for split in found if distance(split) <= threshold]
        if kept:
            found = kept
        if len(found) <= most:
            break
    return sorted(found, key=lambda split: (distance(split), split))[:most]
