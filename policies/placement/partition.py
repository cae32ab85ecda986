"""AlpaServe's Algorithm 2: models in buckets of like latency, devices split between the buckets."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from policies.placement.groups import BudgetSpent, Cluster, ModelView, Placement, Scorer, uniform_groups
from policies.placement.selection import Best, Run, check_beam, drive, selection


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
        check_beam(self.beam)
        for name in ("max_inter_op", "max_intra_op", "max_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1; got {getattr(self, name)!r}")
        if not (isfinite(self.same_bucket) and self.same_bucket >= 0):
            raise ValueError(f"same_bucket is a finite share of at least 0; got {self.same_bucket!r}")

    def search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, /) -> Placement:
        whole = Best()
        with contextlib.suppress(BudgetSpent):
            self._search(cluster, models, score, whole)
        return whole.found(uniform_groups(cluster.n_devices, 1, 1))

    def _search(self, cluster: Cluster, models: Sequence[ModelView], score: Scorer, whole: Best) -> None:
        # All models in one bucket first: an answer to fall back on when the time is short.
        everyone = tuple(range(len(models)))
        drive(self._runs(cluster, models, everyone, cluster.n_devices, whole), score)
        if not self.buckets:
            return
        for bucketing in bucketings(models, self.same_bucket):
            if len(bucketing) < 2:
                continue
            splits = device_splits(cluster.n_devices, bucketing, models, self.max_splits)
            needed = sorted({part for split in splits for part in zip(bucketing, split, strict=True)})
            bests = {part: Best() for part in needed}
            runs: list[tuple[Run, Best]] = []
            for (bucket, n_devices), best in bests.items():
                runs += self._runs(cluster, models, bucket, n_devices, best)
            drive(runs, score)
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
        self, cluster: Cluster, models: Sequence[ModelView], bucket: tuple[int, ...], n_devices: int, best: Best
    ) -> list[tuple[Run, Best]]:
        return [
            (selection(uniform_groups(n_devices, *shape), cluster, models, bucket, self.beam), best)
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
