"""What to simulate, as a person writes it: strict settings, read from YAML, with errors that say the way out."""

from __future__ import annotations

from sim.scenario.settings import Scenario

__all__ = ["Scenario"]
