"""Published numbers beside simulated ones. Each module or package here but `rows` reproduces one group of documents.

A group `sim.reproduce.NAME` has `TITLE`, `rows(quick: bool) -> list[Row]` and `plots(folder: Path) -> list[Path]`; it is
found by being there. It may have `PARTS`, the pieces that `rows` puts together, so that a long run can say how far it is, and
`note() -> str | None`, what a person should know before it runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from sim.reproduce.rows import COLUMNS, EVIDENCE, Part, Row, write_csv

__all__ = ["COLUMNS", "EVIDENCE", "Part", "Row", "groups", "load_group", "parts", "summary", "write_csv"]

_HELPERS = ("rows",)
_UNKNOWN_SECONDS = 60.0


def groups() -> list[str]:
    """Names of the groups of documents that can be reproduced."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _HELPERS)


def load_group(name: str) -> ModuleType:
    """The module of one group; ValueError naming the groups there are otherwise."""
    if name not in groups():
        raise ValueError(f"{name} is not a group of documents; there are {', '.join(groups())}")
    return importlib.import_module(f"sim.reproduce.{name}")


def parts(group: ModuleType) -> tuple[Part, ...]:
    """The pieces of a group in their order; a group that names none is one piece."""
    return getattr(group, "PARTS", None) or (Part("all rows", group.rows, _UNKNOWN_SECONDS),)


def summary(rows: Iterable[Row]) -> list[tuple[str, int, int, int]]:
    """For each kind of evidence: its name, rows, rows that are judged, and rows within their tolerance."""
    found = list(rows)
    return [
        (
            name,
            sum(row.evidence == name for row in found),
            sum(row.evidence == name and row.ok is not None for row in found),
            sum(row.evidence == name and row.ok is True for row in found),
        )
        for name in EVIDENCE
    ]
