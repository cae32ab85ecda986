"""Faults by a script, for those who test what stands in front of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import ScenarioError
from sim.scenario.yaml import parse_yaml

_KEYS = ("from_s", "to_s", "status", "cut_after", "every", "model")
_EXAMPLE = "such as [{from_s: 30, to_s: 40, status: 503}]"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of requests that come from *from_s* on and before *to_s*, in seconds of the simulated clock."""

    from_s: float = 0.0
    to_s: float = float("inf")
    status: int | None = None
    """They are answered by an error of this status ..."""
    cut_after: int | None = None
    """... or their connection is cut when so many tokens have been written; 0: before the answer begins."""
    every: int = 1
    """One in so many, the first of them included."""
    model: str | None = None
    """Those that ask for it alone."""


class Script:
    """Faults, the first that applies to a request being the one that it gets."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self._faults = faults
        self._met = [0] * len(faults)

    def fault_of(self, now_s: float, model: str) -> Fault | None:
        """The fault of a request for *model* that comes now; None: it has none."""
        for i, fault in enumerate(self._faults):
            if fault.from_s <= now_s < fault.to_s and fault.model in (None, model):
                self._met[i] += 1
                if (self._met[i] - 1) % fault.every == 0:
                    return fault
        return None


def read_script(path: Path) -> Script:
    """The script in the YAML file at *path*: a list of faults. ScenarioError where it cannot be read or understood."""
    try:
        found = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"--script: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, list):
        raise ScenarioError(f"--script: {path} is a list of faults, {_EXAMPLE}")
    return Script(tuple(_fault(path, i, each) for i, each in enumerate(found)))


def _fault(path: Path, i: int, given: Any) -> Fault:
    where = f"--script: {path}: fault {i + 1}"
    if not isinstance(given, dict):
        raise ScenarioError(f"{where} is a mapping; got {given!r}: {_EXAMPLE}")
    if strange := [key for key in given if key not in _KEYS]:
        raise ScenarioError(f"{where}: {strange[0]} is none of {', '.join(_KEYS)}")
    for key, least, most in (("status", 400, 599), ("cut_after", 0, 10**9), ("every", 1, 10**9)):
        value = given.get(key)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise ScenarioError(f"{where}: {key} is a whole number from {least} to {most}; got {value!r}")
    for key in ("from_s", "to_s"):
        value = given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise ScenarioError(f"{where}: {key} is a time of at least 0; got {value!r}")
    if not isinstance(given.get("model", ""), str):
        raise ScenarioError(f"{where}: model is a name; got {given['model']!r}")
    if (given.get("status") is None) == (given.get("cut_after") is None):
        raise ScenarioError(f"{where}: give one of status and cut_after")
    return Fault(**{key: value for key, value in given.items() if value is not None})
