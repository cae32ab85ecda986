"""Published numbers beside simulated ones. Each module of this package but `rows` reproduces one group of documents.

A module `sim.reproduce.NAME` has `TITLE`, `rows(quick: bool) -> list[Row]` and `plots(folder: Path) -> list[Path]`;
it is found by being there.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from sim.reproduce.rows import COLUMNS, Row, write_csv

__all__ = ["COLUMNS", "Row", "groups", "load_group", "write_csv"]


def groups() -> list[str]:
    """Names of the groups of documents that can be reproduced."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "rows")


def load_group(name: str) -> ModuleType:
    """The module of one group; ValueError naming the groups there are otherwise."""
    if name not in groups():
        raise ValueError(f"{name} is not a group of documents; there are {', '.join(groups())}")
    return importlib.import_module(f"sim.reproduce.{name}")
