"""Scenarios as people write them: strict settings, read from YAML, with errors that say the way out."""

from __future__ import annotations

from sim.scenario.settings import Scenario

__all__ = ["Scenario"]
