"""Which build of the engine runs here: compiled by mypyc, or plain Python and why."""

from __future__ import annotations

import functools
import json
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from sim.engine.machine import machine


def is_compiled(module: ModuleType = machine) -> bool:
    """Whether *module* was compiled where Rooftrace was installed."""
    return not str(module.__file__).endswith(".py")


def engine_build() -> str:
    """The build in words: what compiled it or, of plain Python, the reason that the installation has noted."""
    noted = _noted()
    if is_compiled():
        return f"compiled ({noted['with']})" if "with" in noted else "compiled"
    return f"plain Python: {_why_plain(noted)}"


def _why_plain(noted: dict[str, Any]) -> str:
    if "with" in noted:
        # Of an editable installation, whose compiled modules are found by a module that hatch_build.py puts beside it.
        finder = sys.modules.get("rooftrace_compiled")
        changed = finder.changed_sources() if finder is not None else []
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return f"{changed[0]}{more} changed since the engine was compiled; install again to compile it"
        return "the installation that has the compiled engine is of another folder"
    return str(noted.get("why", "the installation has no note on it"))


def _noted() -> dict[str, Any]:
    """The note that hatch_build.py wrote into the installation."""
    try:
        text = metadata.distribution("rooftrace").read_text("extra_metadata/engine.json")
    except metadata.PackageNotFoundError:
        return {"why": "Rooftrace is not installed; its sources are run"}
    return json.loads(text) if text else {}


@functools.cache
def installed(package: str) -> str:
    """The version of a package that is installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
