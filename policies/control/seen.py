"""What a controller sees of a fleet at the end of each interval, and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """Equal machines at one instant, and what came and went in the interval before it."""

    machines: int = 0
    """That are wanted: ready, starting or failed. Those that drain are not among them."""
    ready: int = 0
    waiting: int = 0
    """Requests in the queues of its machines, and those that are held because none is ready."""
    running: int = 0
    kv_use: float = 0.0
    """Share of KV blocks in use, the mean of ready machines."""
    came: int = 0
    """Requests that were sent to its machines or had to be held, in the interval, and the tokens of their prompts."""
    came_tokens: int = 0
    finished: int = 0
    """Requests that ended on its machines in the interval, and the tokens that they emitted."""
    finished_tokens: int = 0
    ttft_mean_s: float | None = None
    """Of requests whose first token came in the interval; None: of none."""
    ttft_p95_s: float | None = None

    @property
    def concurrency(self) -> int:
        """Requests that wait or run."""
        return self.waiting + self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a policy is shown: its pool, all pools by name, and what it saw of its pool at the ends of intervals before."""

    now_s: float = 0.0
    interval_s: float = 15.0
    mine: PoolSeen = field(default_factory=PoolSeen)
    pools: Mapping[str, PoolSeen] = field(default_factory=dict[str, PoolSeen], hash=False)
    past: Sequence[PoolSeen] = ()
    """Of intervals that ended within `remembers_s`, the oldest first, the present one last."""


class Control(Protocol):
    """Says how many machines a pool should have. May have `remembers_s`: seconds of the past that it asks to be shown."""

    def wanted(self, seen: Seen, /) -> int: ...


def remembers_s(control: object) -> float:
    """How much of the past *control* asks for; 0: the interval that has just ended."""
    seconds = float(getattr(control, "remembers_s", 0.0))
    if not (isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{control!r} remembers {seconds} s; expected a finite time of at least 0")
    return seconds


def stabilised(
    asked: Sequence[tuple[float, int]], now_s: float, current: int, *, down_window_s: float, up_window_s: float = 0.0
) -> int:
    """Of what a policy has *asked* for so far, (when, how many) with the latest last, the number to go to.

    Never fewer than the most that was asked for within the last *down_window_s*, nor more than the least within *up_window_s*, as
    the Kubernetes HorizontalPodAutoscaler stabilises recommendations (kubernetes/kubernetes, pkg/controller/podautoscaler/
    horizontal.go, stabilizeRecommendationWithBehaviors; from knowledge, to be checked there).
    """
    up = min([asked[-1][1], *(n for at_s, n in asked if at_s > now_s - up_window_s)])
    down = max([asked[-1][1], *(n for at_s, n in asked if at_s > now_s - down_window_s)])
    return min(max(current, up), down)
