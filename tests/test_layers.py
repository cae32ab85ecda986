"""Imports run downwards only, and packages come from where they should."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("sim", "hwmodels", "policies", "workloads")
GROUND = ("hwmodels", "policies", "workloads")


@functools.cache
def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("room", GROUND)
def test_ground_floor_rooms_import_nothing_of_ours_but_themselves(room: str) -> None:
    others = [other for other in ROOMS if other != room]
    for path in files(room):
        wrong = {name for name in imports(path) if name.split(".")[0] in others}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_engine_knows_no_concrete_policy_or_hardware_model() -> None:
    allowed = {
        *("hwmodels.cost", "hwmodels.totals", "policies.view", "policies.routers", "workloads"),
        *(
            "hwmodels.cost.CostModel",
            "workloads.ClosedLoop",
            "workloads.Follows",
            "workloads.Trace",
            "workloads.chained",
        ),
        *(f"hwmodels.totals.{name}" for name in ("Totals", "Chunk", "seen", "pairs_within")),
        *(f"policies.routers.{name}" for name in ("Router", "RoutedRequest", "ReplicaLoad", "Refused", "route_of")),
        *(f"policies.routers.{name}" for name in ("Knowledge", "knowledge_of")),
    }
    for path in files("sim/engine"):
        ours = {name for name in imports(path) if name.split(".")[0] in GROUND}
        wrong = {name for name in ours - allowed if not name.startswith("policies.view.")}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


FLOORS = (
    ("errors", "text", "packages"),
    ("theory", "tokens"),
    ("engine",),
    ("scenario", "metrics", "warmup", "protocols", "results", "run"),
    ("study", "plots", "report", "reproduce", "validation", "placement"),
    ("cli",),
)
"""Rooms of `sim/`, from the ground up."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def known() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    names = {}
    for room in ROOMS:
        for path in files(room):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def arrows() -> dict[str, set[str]]:
    """What of ours each module imports, anywhere in it; a package only where something of its own is taken."""
    modules = known()
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = imports(path)
        # `from sim import plots` names both; the longer one is meant.
        meant = {
            each for each in named if not any(other.startswith(f"{each}.") and other in modules for other in named)
        }
        taken = {max((part for part in prefixes(each) if part in modules), key=len, default="") for each in meant}
        found[name] = {other for other in taken if other and other != name and not is_face(other, modules)}
    return found


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def is_face(name: str, modules: dict[str, Path]) -> bool:
    """Whether a module is a package that only hands on the names of its modules."""
    if modules[name].name != "__init__.py" or not any(other.startswith(f"{name}.") for other in modules):
        return False
    body = ast.parse(modules[name].read_text(encoding="utf-8")).body
    return not any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[:2] != "__" for node in body)


def rooms(below: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """*below* between rooms, the first *depth* parts of a name, and not within them."""
    found: dict[str, set[str]] = {}
    for name, others in below.items():
        room = ".".join(name.split(".")[:depth])
        into = found.setdefault(room, set())
        into |= {other for other in (".".join(each.split(".")[:depth]) for each in others) if other != room}
    return found


def in_circles(below: dict[str, set[str]]) -> set[str]:
    """Those that are left when everything whose needs are met has been taken away, again and again."""
    done: set[str] = set()
    while free := {name for name, needs in below.items() if name not in done and not (needs & set(below)) - done}:
        done |= free
    return set(below) - done


def test_rooms_of_sim_know_none_on_a_floor_above() -> None:
    for path in files("sim"):
        room = path.relative_to(ROOT / "sim").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in FLOOR, f"sim/{room} is on no floor of tests/test_layers.py"
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("sim.") else room
            assert FLOOR.get(other, 0) <= FLOOR[room], f"{path.relative_to(ROOT)} climbs to {name}"


def test_no_circle_ties_files_or_rooms() -> None:
    below = arrows()
    assert in_circles(below) == set()
    assert in_circles(rooms(below, 2)) == set()


@pytest.mark.parametrize("room", ROOMS)
def test_packages_are_loaded_from_here(room: str) -> None:
    where = Path(importlib.import_module(room).__file__ or "").resolve()
    assert where.is_relative_to(ROOT), f"{room} was loaded from {where}: that file shadows this project's package"


def test_there_is_no_module_level_state() -> None:
    for room in ROOMS:
        for path in files(room):
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if line.strip().startswith("global ")], path


def test_no_class_of_the_engine_is_more_than_a_sitting() -> None:
    for path in files("sim/engine"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 330, f"{path.name}: {node.name}"


def test_every_error_of_sim_is_of_one_family_but_those_of_our_own_making() -> None:
    ours = {"RooftraceError"}
    found = [
        (path, node)
        for path in files("sim")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(_is_error(base) for base in node.bases)
    ]
    for _ in found:
        ours |= {node.name for _, node in found if any(ast.unparse(base) in ours for base in node.bases)}
    outside = {(node.name, tuple(map(ast.unparse, node.bases))) for _, node in found if node.name not in ours}
    # The engine turns the second into a PolicyError; the first says that the engine itself is wrong.
    assert outside == {("InvariantError", ("AssertionError",)), ("OutOfBlocks", ("Exception",))}
    assert {"ScenarioError", "OutputError", "PolicyError", "Unmodelled"} < ours


def _is_error(base: ast.expr) -> bool:
    name = ast.unparse(base)
    kind = getattr(builtins, name, None)
    return name.endswith("Error") or (isinstance(kind, type) and issubclass(kind, BaseException))


def test_the_page_on_architecture_names_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    # Of these the folder is named: a file a command, a kernel, a kind of measurement, a backend, a table of a paper.
    together = ("sim/cli/commands", "sim/reproduce", "hwmodels/kernels", "hwmodels/measured", "hwmodels/calibrate")
    for path in (path for room in ROOMS for path in files(room) if path.name not in ("__init__.py", "_checks.py")):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(together) and not place.startswith(("sim/theory", "sim/tokens")):
            named = (f"`{path.stem}`", f"{path.name}`")
            assert any(name in text for name in named), f"docs/architecture.md does not say what {place} is"
