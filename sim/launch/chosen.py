"""The servers that are to be started, and what has been written for them."""

from __future__ import annotations

from dataclasses import dataclass

from sim.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files or commands for one target, and what they do not carry."""

    text: str
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A scenario to be started, and the figures for which it was chosen."""

    scenario: Scenario
    reasons: tuple[str, ...]
