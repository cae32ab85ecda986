"""Counts of what is served, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping


class Histogram:
    """How many values were at or below each of *bounds*, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def n(self) -> int:
        return sum(self.counts)

    def quantile_s(self, share: float) -> float:
        """The upper bound of the bucket that the quantile lies in; infinite beyond the last."""
        wanted, seen = share * self.n, 0
        for count, bound in zip(self.counts, (*self.bounds, float("inf")), strict=True):
            seen += count
            if seen >= wanted:
                return bound
        return float("inf")

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """Its samples."""
        below = 0
        for count, bound in zip(self.counts, (*self.bounds, float("inf")), strict=True):
            below += count
            edge = "+Inf" if bound == float("inf") else repr(float(bound))
            yield sample(f"{name}_bucket", {**labels, "le": edge}, below)
        yield sample(f"{name}_sum", labels, self.total)
        yield sample(f"{name}_count", labels, self.n)


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """One line."""
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def head(name: str, kind: str, text: str) -> list[str]:
    """The lines before a metric's samples."""
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
