"""The time that servers take to start, phase by phase, as published."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from hwmodels.tables import ROOM, read_toml


class ColdStart(NamedTuple):
    """One that was measured."""

    what: str
    """Model, device and stack."""
    phases: tuple[tuple[str, float], ...]
    """The phases in order, with their seconds."""
    source: str


@functools.lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Mapping[str, Any]]:
    return read_toml(ROOM / "cold_starts.toml")


def cold_starts() -> tuple[str, ...]:
    """Their names."""
    return tuple(_catalogue())


def cold_start(name: str) -> ColdStart:
    """The one called *name*; KeyError where there is none."""
    found = _catalogue()[name]
    return ColdStart(found["what"], tuple(found["phases"].items()), found["source"])
