"""Placing many models on one cluster by simulation: `find` a placement, `serve` traffic with it, save and load it.

`serving` turns a placement into groups of devices, `groups` serves requests with them by events, and `screening` without, as
searches (`planning`) ask for it thousands of times; `generative` places models that emit tokens. Read `groups` first.
"""

from sim.placement.planning import Plan, Scoring, find, serve
from sim.placement.serving import (
    ARTIFACT_OVERHEAD_S,
    ARTIFACT_STAGE_OVERHEAD,
    Outcome,
    Serving,
    evaluate,
    evaluate_windows,
)
from sim.scenario.placement_file import load_placement, save_placement

__all__ = [
    "ARTIFACT_OVERHEAD_S",
    "ARTIFACT_STAGE_OVERHEAD",
    "Outcome",
    "Plan",
    "Scoring",
    "Serving",
    "evaluate",
    "evaluate_windows",
    "find",
    "load_placement",
    "save_placement",
    "serve",
]
