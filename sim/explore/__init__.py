"""A page in the browser that answers while settings are moved: what `rooftrace run`, `sweep`, `explain` and the others say, live.

The server runs on this machine (`app`, `server`); runs go to processes that are kept warm (`workers`), which carry out what `work`
has: one generator of events for each question of the page. It knows no command line. Read `app` first.

`sim.explore(scenario)` shows the page in a notebook: the room itself can be called (`notebook.explore`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A module that can be called: the name of the room is also that of what it is for."""

    def __call__(self, *given: Any, **how: Any) -> Any:
        return importlib.import_module("sim.explore.notebook").explore(*given, **how)


sys.modules[__name__].__class__ = _Room
