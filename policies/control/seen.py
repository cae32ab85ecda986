"""A controller's view of a fleet at the end of each interval, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """Equal machines at one instant, and the requests of the interval before it."""

    machines: int = 0
    """Wanted machines: ready, starting or failed, without those that drain."""
    ready: int = 0
    pending: int = 0
    """Starting machines on which no server runs yet: being provisioned, or getting their image."""
    waiting: int = 0
    """Requests in the queues of its machines, and those held because no machine is ready."""
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
    """TTFT of requests with a first token in the interval; None: no request."""
    ttft_p95_s: float | None = None

    @property
    def concurrency(self) -> int:
        """Requests that wait or run."""
        return self.waiting + self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A policy's view: its pool, all pools by name, and its pool at the ends of earlier intervals."""

    now_s: float = 0.0
    interval_s: float = 15.0
    mine: PoolSeen = field(default_factory=PoolSeen)
    pools: Mapping[str, PoolSeen] = field(default_factory=dict[str, PoolSeen], hash=False)
    past: Sequence[PoolSeen] = ()
    """Intervals that ended within `remembers_s`, the oldest first, the present one last."""


class Control(Protocol):
    """Decides how many machines a pool should have. May have `remembers_s`: seconds of the past that it needs to see."""

    def wanted(self, seen: Seen, /) -> int: ...


def wanted_of(control: Control | Callable[[Seen], int]) -> Callable[[Seen], int]:
    """The function that decides: the policy's method, or the function itself."""
    return cast("Callable[[Seen], int]", getattr(control, "wanted", control))


def remembers_s(control: object) -> float:
    """Seconds of the past that *control* needs; 0: the interval that has just ended."""
    seconds = float(getattr(control, "remembers_s", 0.0))
    if not (isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{control!r} remembers {seconds} s; expected a finite time of at least 0")
    return seconds


def stabilised(
    asked: Sequence[tuple[float, int]], now_s: float, current: int, *, down_window_s: float, up_window_s: float = 0.0
) -> int:
    """The number of machines to have, from a policy's answers so far: (when, how many), the latest last.

    Never fewer than the most that was asked for within the last *down_window_s*, nor more than the least within *up_window_s*, as a
    HorizontalPodAutoscaler with a `behavior` stabilises recommendations (kubernetes/kubernetes, pkg/controller/podautoscaler/
    horizontal.go, stabilizeRecommendationWithBehaviors; from knowledge: of what was asked for before a limit on scaling up, it adds
    no machines when fewer are asked for now).
    """
    up = min([asked[-1][1], *(n for at_s, n in asked if at_s > now_s - up_window_s)])
    down = max([asked[-1][1], *(n for at_s, n in asked if at_s > now_s - down_window_s)])
    return min(max(current, up), down)
