"""Imports run downwards only, and packages come from where they should."""

from __future__ import annotations

import ast
import builtins
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("sim", "hwmodels", "policies", "workloads")
GROUND = ("hwmodels", "policies", "workloads")


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
        *("hwmodels.cost.CostModel", "hwmodels.totals.Totals", "workloads.ClosedLoop", "workloads.Trace"),
        *(f"policies.routers.{name}" for name in ("Router", "RoutedRequest", "ReplicaLoad", "Refused", "route_of")),
    }
    for path in files("sim/engine"):
        ours = {name for name in imports(path) if name.split(".")[0] in GROUND}
        wrong = {name for name in ours - allowed if not name.startswith("policies.view.")}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_nothing_below_the_command_line_knows_it() -> None:
    for path in files("sim"):
        if "cli" not in path.relative_to(ROOT / "sim").parts:
            wrong = {name for name in imports(path) if name.startswith("sim.cli")}
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("room", ROOMS)
def test_packages_are_loaded_from_here(room: str) -> None:
    where = Path(importlib.import_module(room).__file__ or "").resolve()
    assert where.is_relative_to(ROOT), f"{room} was loaded from {where}: that file shadows this project's package"


def test_there_is_no_module_level_state() -> None:
    for room in ROOMS:
        for path in files(room):
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if line.strip().startswith("global ")], path


def test_no_circle_ties_files_of_the_engine_and_no_class_there_is_more_than_a_sitting() -> None:
    below = {
        path.stem: {name.split(".")[2] for name in imports(path) if name.startswith("sim.engine.")}
        for path in files("sim/engine")
        if path.stem != "__init__"
    }
    done: set[str] = set()
    while free := {name for name, needs in below.items() if name not in done and not (needs & set(below)) - done}:
        done |= free
    assert done == set(below), f"circles among {sorted(set(below) - done)}"
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
