"""A Kubernetes HorizontalPodAutoscaler: the number of machines that it sets, from the numbers that its metric has asked for.

kubernetes/kubernetes, pkg/controller/podautoscaler/horizontal.go, and pkg/apis/autoscaling/v2/defaults.go for the defaults of
`behavior`. KEDA makes an ordinary one (kedacore/keda, controllers/keda/hpa.go).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final, Literal

Hpa = Literal["default", "behavior"]
"""A HorizontalPodAutoscaler whose spec says nothing of `behavior`, or one whose spec gives some of it."""

WINDOW_S: Final = 300.0
"""Stabilisation, `--horizontal-pod-autoscaler-downscale-stabilization`."""
_PERIOD_S: Final = 15.0
"""Both default policies for scaling up look at the changes of so many seconds."""


def highest(asked: Sequence[tuple[float, int]], now_s: float, window_s: float) -> int:
    """The most that was asked for within the window, whether it is more or fewer than there are (`stabilizeRecommendation`).

    *asked* is (when, how many), the latest last.
    """
    return max([asked[-1][1], *(n for at_s, n in asked if at_s > now_s - window_s)])


def most_at_once(hpa: Hpa, current: int, changes: Sequence[tuple[float, int]], now_s: float) -> int:
    """The limit on scaling up from *current* machines.

    Without `behavior` twice as many, or 4 (`calculateScaleUpLimit`). With it twice as many as there were 15 s ago, or 4 more than
    there were (`calculateScaleUpLimitWithScalingRules`, and the default policies). *changes* are (when, how many more), the latest
    last.
    """
    if hpa == "default":
        return max(2 * current, 4)
    lately = takewhile(lambda change: change[0] > now_s - _PERIOD_S, reversed(changes))
    before = current - sum(more for _, more in lately)
    return max(2 * before, before + 4, current)
