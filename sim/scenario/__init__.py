"""Scenarios as people write them: strict settings, read from YAML, with errors that say the way out.

`keys` has the settings as pydantic models, `settings` has `Scenario` (changed by key, known by a hash of everything that it names),
`named` finds policies by name, `workload` makes the requests. `assembly` makes the objects that the engine runs. Read `keys` first.
"""

from __future__ import annotations

from sim.scenario.settings import Scenario

__all__ = ["Scenario"]
