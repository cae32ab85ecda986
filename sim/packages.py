"""Whether the four packages that Rooftrace is made of are its own: their names are common ones."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from pathlib import Path

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
