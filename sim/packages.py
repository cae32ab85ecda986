"""The four packages that Rooftrace is made of: whether they are its own, as their names are common ones, and names handed on."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_NEEDED = {"hwmodels": "cost.py", "policies": "view.py", "workloads": "trace.py"}
"""A file that only ours has, for each package beside `sim`."""


def home() -> Path:
    """The folder in which the four packages lie."""
    return Path(os.path.abspath(__file__)).parents[1]


def intruder() -> str:
    """A sentence that names the package which is not Rooftrace's, and what to do; empty where all lie beside `sim`."""
    folder = str(home())
    for name, file in _NEEDED.items():
        spec = PathFinder.find_spec(name)
        places = [] if spec is None else [os.path.abspath(place) for place in spec.submodule_search_locations or ()]
        if places != [os.path.join(folder, name)]:
            found = places[0] if places else (spec.origin if spec is not None else None)
            return (
                f"the package {name} would be loaded from {found or 'nowhere'}, and Rooftrace's lies in {folder}: another "
                f"project's package of that name comes first on Python's path; give Rooftrace an environment of its own"
            )
        if not os.path.isfile(os.path.join(folder, name, file)):
            return (
                f"the package {name} in {folder} is not Rooftrace's (it has no {file}): another distribution has overwritten it; "
                "install Rooftrace into an environment of its own"
            )
    return ""


def handed_on(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of *module* (PEP 562) for names that others have: *homes* says which module, with `:name` where it is called
    otherwise there, and `:` for the module itself. It is imported when the name is first looked at; ImportError where one of the
    four packages is another's."""

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        strange = intruder()
        if strange:
            raise ImportError(strange)
        home, colon, called = homes[name].partition(":")
        imported = importlib.import_module(home)
        return imported if colon and not called else getattr(imported, called or name)

    return found
