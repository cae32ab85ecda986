"""Selection of models for groups of given shapes: AlpaServe's Algorithm 1 and its fast heuristic, many of them in step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from policies.placement.groups import Cluster, Group, ModelView, Placement, Score, Scorer, group_bytes


class Room:
    """The groups with memory left for a model, kept up to date as a placement grows."""

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


Run = Generator[list[Placement], Sequence[Score], None]
"""Yields placements to be scored and is sent their scores; many runs proceed in step, so that theirs are scored at once."""


class Best:
    """The best placement that a run has seen; none where the budget was spent before its first score."""

    def __init__(self) -> None:
        self.value = float("-inf")
        self.placement: Placement | None = None

    def see(self, placement: Placement, value: float) -> None:
        if value > self.value:
            self.value, self.placement = value, placement

    def found(self, otherwise: Placement) -> Placement:
        return otherwise if self.placement is None else self.placement


def drive(runs: Iterable[tuple[Run, Best]], score: Scorer) -> None:
    """Run all to their ends, in step; the best placement of each is in its `Best`, also when the budget is spent."""
    active: list[tuple[Run, Best, list[Placement]]] = []
    for run, best in runs:
        asked = next(run, None)
        if asked:
            active.append((run, best, asked))
    while active:
        scores = score([placement for _, _, asked in active for placement in asked])
        following: list[tuple[Run, Best, list[Placement]]] = []
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


def selection(
    empty: Placement, cluster: Cluster, models: Sequence[ModelView], among: Sequence[int], beam: int | None
) -> Run:
    """A run of Algorithm 1 that fills the groups of *empty* with the models *among*: by the fast heuristic, or by beam search of
    width *beam*."""
    return _heuristic(empty, cluster, models, among) if beam is None else _beam(empty, cluster, models, among, beam)


def _heuristic(empty: Placement, cluster: Cluster, models: Sequence[ModelView], among: Sequence[int]) -> Run:
    """Simulate once; put the model with most unserved requests on the least asked group with room; again."""
    room = Room(empty, cluster, models)
    replicas = dict.fromkeys(among, 0)
    for model in among:
        replicas[model] = sum(model in group.models for group in empty.groups)
    while True:
        (found,) = yield [room.placement]
        unserved = (model for model in sorted(among, key=lambda m: -found.unserved[m]) if found.unserved[model])
        model = next((model for model in unserved if room.groups(model)), None)
        if model is None:
            break
        room.put(model, min(room.groups(model), key=lambda g: (found.requests[g], g)))
        replicas[model] += 1
    if _fill_up(room, models, replicas, list(found.requests)):
        yield [room.placement]


def _fill_up(room: Room, models: Sequence[ModelView], replicas: dict[int, int], requests: list[int]) -> bool:
    """Give memory that is left to further replicas, first of models with the fewest for their load; return whether any had room.

    They cost nothing, and help when the traffic is not that of the sample. *requests* are counted by group.
    """
    filled = False
    waiting = list(replicas)
    while waiting:
        model = max(waiting, key=lambda m: (models[m].rate_per_s * models[m].latency_s / (replicas[m] + 1), -m))
        groups = room.groups(model)
        if not groups:
            waiting.remove(model)
            continue
        chosen = min(groups, key=lambda g: (requests[g], g))
        room.put(model, chosen)
        replicas[model] += 1
        requests[chosen] += 1
        filled = True
    return filled


def _beam(empty: Placement, cluster: Cluster, models: Sequence[ModelView], among: Sequence[int], width: int) -> Run:
    """Algorithm 1: try every model on every group with room, keep the *width* best placements, again."""
    yield [empty]
    beams = [empty]
    while beams:
        candidates: dict[tuple[Group, ...], Placement] = {}
        for beam in beams:
            room = Room(beam, cluster, models)
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


def check_beam(beam: object) -> None:
    """ValueError but for None and whole numbers from 1."""
    if beam is not None and (isinstance(beam, bool) or not isinstance(beam, int) or beam < 1):
        raise ValueError(f"beam is a whole number of at least 1, or nothing for the fast heuristic; got {beam!r}")
