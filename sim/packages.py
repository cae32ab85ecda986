"""Whether the four packages that Rooftrace is made of are its own: their names are common ones."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder

_NEEDED = {"hwmodels": "cost.py", "policies": "view.py", "workloads": "trace.py"}
"""A file that only ours has, for each package beside `sim`."""


def intruder() -> str:
    """A sentence that names the package which is not Rooftrace's, and what to do; empty where all lie beside `sim`."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name, file in _NEEDED.items():
        spec = PathFinder.find_spec(name)
        places = [] if spec is None else [os.path.abspath(place) for place in spec.submodule_search_locations or ()]
        if places != [os.path.join(home, name)]:
            found = places[0] if places else (spec.origin if spec is not None else None)
            return (
                f"the package {name} would be loaded from {found or 'nowhere'}, and Rooftrace's lies in {home}: another project's "
                f"package of that name comes first on Python's path; give Rooftrace an environment of its own"
            )
        if not os.path.isfile(os.path.join(home, name, file)):
            return (
                f"the package {name} in {home} is not Rooftrace's (it has no {file}): another distribution has overwritten it; "
                "install Rooftrace into an environment of its own"
            )
    return ""
