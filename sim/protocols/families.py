"""Protocols by name, and which of them a row of a serving file was measured with."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hwmodels.tables import read_toml
from sim.protocols.client import Protocol

FILE = Path(__file__).with_name("protocols.toml")


@functools.cache
def protocols() -> Mapping[str, Protocol]:
    """The protocols that are known: name -> protocol, read once from protocols.toml."""
    table = read_toml(FILE)
    return {name: protocol({**entry, "name": name}) for name, entry in table.items()}


def protocol(given: str | Mapping[str, Any] | Protocol) -> Protocol:
    """A protocol by name, by its keys, or as it is.

    Keys may name a known one as *like* and change some of it. ValueError for a name or key that is not one, with the nearest.
    """
    if isinstance(given, Protocol):
        return given
    if isinstance(given, str):
        found = protocols().get(given)
        if found is None:
            near = difflib.get_close_matches(given, protocols(), n=1)
            way_out = (
                f"did you mean {near[0]}?" if near else f"valid here: {', '.join(protocols())}, or keys of one's own"
            )
            raise ValueError(f"{given!r} is not a protocol; {way_out}")
        return found
    keys = [field.name for field in fields(Protocol)]
    rest = dict(given)
    like = rest.pop("like", None)
    for key in rest:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            way_out = f"did you mean {near[0]}?" if near else f"valid here: like, {', '.join(keys)}"
            raise ValueError(f"protocol.{key} is not a setting; {way_out}")
    if like is not None:
        known = protocol(like)
        rest = {**{key: getattr(known, key) for key in keys if key not in ("name", "source")}, **rest}
    return Protocol(**rest)
