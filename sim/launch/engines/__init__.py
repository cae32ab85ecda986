"""The engines whose commands are read and written. A folder here is an engine, called as its stack in `hwmodels.stacks`: `LAUNCH`
says how its server is started (`sim.launch.start`), `reader.settings` reads a command, `writer.write` writes one, options.csv lists
the options of the release and removed.csv those that older ones had. Engines' names stand nowhere else. Read `vllm` first.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hwmodels.stacks import servers
from sim.launch.start import Launch

FOLDER = Path(__file__).parent


@functools.cache
def launches() -> Mapping[str, Launch]:
    """Every engine's way of starting by the name of its stack, in the order of stacks."""
    return {name: _part(name).LAUNCH for name in servers() if (FOLDER / name).is_dir()}


def reader_of(engine: str) -> Callable[..., None]:
    """The function that puts what a command says into a `Reading`."""
    return _part(f"{engine}.reader").settings


def writer_of(engine: str) -> Callable[[Any], None]:
    """The function that writes a command into a `Writing`."""
    return _part(f"{engine}.writer").write


def _part(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
