"""Imports run downwards only, and packages come from where they should."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import sim
from tests.sources import nodes, statements, tree

ROOT = Path(__file__).parents[1]
ROOMS = ("sim", "hwmodels", "policies", "workloads")
GROUND = ("hwmodels", "policies", "workloads")


@functools.cache
def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth of nesting."""
    return set(bound_in(path).values())


@functools.cache
def bound_in(path: Path) -> dict[str, str]:
    return bound(statements(tree(path).body), path.relative_to(ROOT).parent.parts)


def bound(code: Iterable[ast.AST], package: tuple[str, ...]) -> dict[str, str]:
    """The imports of the *code* of a file in *package*: by the name it has there, with its line, the whole dotted name."""
    names: dict[str, str] = {}
    for node in code:
        if isinstance(node, ast.Import):
            names |= {f"{alias.asname or alias.name} {node.lineno}": alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            names |= {f"{alias.asname or alias.name} {node.lineno}": f"{module}.{alias.name}" for alias in node.names}
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
        *(
            "hwmodels.cost",
            "hwmodels.reach",
            "hwmodels.totals",
            "policies.view",
            "policies.routers",
            "policies.ranks",
            "workloads",
        ),
        *(
            "hwmodels.cost.CostModel",
            "hwmodels.cost.RankedCostModel",
            "workloads.Stop",
            "workloads.Trace",
            "workloads.Workload",
            "workloads.chained",
            "workloads.token_costs",
        ),
        *(f"hwmodels.reach.{name}" for name in ("Chunk", "Window")),
        *(f"hwmodels.totals.{name}" for name in ("Totals", "seen", "pairs_within")),
        *(
            f"policies.routers.{name}"
            for name in (
                *("Booked", "Router", "RoutedRequest", "ReplicaLoad", "Refused", "RouteFunction", "route_of"),
                *("SpreadFunction", "least_of", "spread_of", "AdapterLoad", "NO_ADAPTERS"),
            )
        ),
        *(f"policies.routers.{name}" for name in ("Knowledge", "knowledge_of")),
        *(
            f"policies.control.{name}"
            for name in ("Control", "PoolSeen", "Seen", "remembers_s", "stabilised", "wanted_of")
        ),
        *(f"policies.control.{name}" for name in ("Hpa", "highest", "most_at_once")),
        *(f"policies.driving.{name}" for name in ("Driven", "Driving", "DrivingError", "Engine", "driving")),
        *(f"policies.ranks.{name}" for name in ("Balance", "Moment", "PromptBalance", "RankWork", "balance_of")),
        *(
            f"policies.eviction.{name}"
            for name in (
                "CachedBlocks",
                "Eviction",
                "Rank",
                "RankFunction",
                "asks_for_more",
                "foresees",
                "lasts",
                "rank_of",
            )
        ),
    }
    for path in files("sim/engine"):
        ours = {name for name in imports(path) if name.split(".")[0] in GROUND}
        wrong = {name for name in ours - allowed if not name.startswith("policies.view.")}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def rooms_of_the_engine() -> list[str]:
    """The rooms of `sim/engine/` in the order of the table of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)` \|", text.partition("## Rooms of the engine")[2].partition("## ")[0], re.MULTILINE)


def test_a_room_of_the_engine_knows_only_those_above_it_in_the_table() -> None:
    order = rooms_of_the_engine()
    assert set(order) == {path.parent.name for path in files("sim/engine")} - {"engine"}
    for path in files("sim/engine"):
        own = path.parent.name
        if own == "engine":
            continue
        others = {name.split(".")[2] for name in imports(path) if name.startswith("sim.engine.")}
        wrong = {other for other in others if order.index(other) > order.index(own)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


FLOORS = (
    ("errors", "text", "packages", "under_way", "processes"),
    ("theory", "tokens"),
    ("engine",),
    ("build", "scenario", "metrics", "warmup", "protocols", "results", "run", "work", "extrapolated"),
    (
        "bench",
        "study",
        "plots",
        "report",
        "reproduce",
        "validation",
        "placement",
        "launch",
        "serve",
        "explore",
        "observe",
    ),
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
    """The modules of ours that each module imports, anywhere in it, by the modules where that is written."""
    modules = known()
    return {
        name: {home for each in imports(path) for home in homes(each, modules)} - {name}
        for name, path in modules.items()
    }


def homes(name: str, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that *name* brings: the one that it is written in, not the package that hands it on; where it is such
    a package as a whole, all that are behind it."""
    module = max((part for part in prefixes(name) if part in modules), key=len, default="")
    if not module or not is_face(module, modules):
        return {module} - {""}
    handed = bound_in(modules[module])
    wanted = name.removeprefix(module).removeprefix(".").split(".")[0]
    behind = {whole for key, whole in handed.items() if wanted in ("", "*", key.split()[0])}
    return {home for whole in behind if whole != name for home in homes(whole, modules)} or {module}


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def is_face(name: str, modules: dict[str, Path]) -> bool:
    """Whether a module is a package that only hands on the names of its modules."""
    if modules[name].name != "__init__.py" or not any(other.startswith(f"{name}.") for other in modules):
        return False
    body = tree(modules[name]).body
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
            assert floor_of(name) <= FLOOR[room], f"{path.relative_to(ROOT)} climbs to {name}"


def floor_of(name: str) -> int:
    """The floor of what is imported; that of all rooms where it is `sim` as a whole or a name that `sim` hands on."""
    if name != "sim" and not name.startswith("sim."):
        return 0
    other = name.removeprefix("sim").removeprefix(".").split(".")[0]
    if other in ("", "*") or name in [f"sim.{handed_on}" for handed_on in sim.__all__]:
        return len(FLOORS) - 1
    assert other in FLOOR, f"{name} is of no floor of tests/test_layers.py"
    return FLOOR[other]


def test_floors_are_of_what_is_imported() -> None:
    assert floor_of("numpy.random") == floor_of("policies.view") == floor_of("simpy") == floor_of("sim.errors.X") == 0
    assert floor_of("sim.run.simulate") == FLOOR["run"]
    assert floor_of("sim.simulate") == floor_of("sim") == FLOOR["cli"]
    with pytest.raises(AssertionError, match=r"sim\.cellar is of no floor"):
        floor_of("sim.cellar")


def test_relative_imports_are_seen() -> None:
    package = ("sim", "metrics")
    assert bound(ast.walk(ast.parse("from ..results import Result")), package) == {"Result 1": "sim.results.Result"}
    assert bound(ast.walk(ast.parse("from . import figures as f\nfrom .trend import x")), package) == {
        "f 1": "sim.metrics.figures",
        "x 2": "sim.metrics.trend.x",
    }


def test_names_are_followed_through_packages_that_hand_them_on() -> None:
    modules = known()
    assert homes("sim.results.Result", modules) == {"sim.results.result"}
    assert homes("sim.Result", modules) == {"sim.results.result"}
    assert homes("sim.simulate", modules) == homes("sim.run.simulate", modules) == {"sim.run"}
    assert homes("numpy.random", modules) == set()
    assert homes("sim.metrics", modules) > {"sim.metrics.requests", "sim.metrics.figures"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("sim.metrics.figures", "from sim.results import Result"),
        ("sim.metrics.figures", "from sim import simulate"),
        ("sim.warmup", "from sim.run import simulate"),
        ("sim.warmup", "from .run import simulate"),
    ],
)
def test_a_circle_through_a_package_is_found(module: str, line: str) -> None:
    modules = known()
    package = tuple(module.split(".")[:-1])
    added = {home for name in bound(ast.walk(ast.parse(line)), package).values() for home in homes(name, modules)}
    assert in_circles({**arrows(), module: arrows()[module] | added})


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


def test_every_error_of_sim_is_of_one_family_but_those_of_our_own_making() -> None:
    ours = {"RooftraceError"}
    found = [
        (path, node)
        for path in files("sim")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and any(_is_error(base) for base in node.bases)
    ]
    for _ in found:
        ours |= {node.name for _, node in found if any(ast.unparse(base) in ours for base in node.bases)}
    outside = {(node.name, tuple(map(ast.unparse, node.bases))) for _, node in found if node.name not in ours}
    # The engine turns the second into a PolicyError; the first says that the engine itself is wrong; the third is a signal.
    assert outside == {
        ("InvariantError", ("AssertionError",)), ("OutOfBlocks", ("Exception",)), ("Terminated", ("KeyboardInterrupt",))
    }  # fmt: skip
    assert {"ScenarioError", "OutputError", "PolicyError", "Unmodelled"} < ours


def _is_error(base: ast.expr) -> bool:
    name = ast.unparse(base)
    kind = getattr(builtins, name, None)
    return name.endswith("Error") or (isinstance(kind, type) and issubclass(kind, BaseException))


def compiled_modules() -> set[str]:
    """The modules that `hatch_build.py` compiles, as dotted names."""
    body = tree(ROOT / "hatch_build.py").body
    (value,) = (
        each.value for each in body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "COMPILED"
    )
    files = eval(compile(ast.Expression(value), "hatch_build.py", "eval"))
    return {each.removesuffix(".py").replace("/", ".") for each in files}


def test_what_is_derived_from_a_compiled_class_is_compiled() -> None:
    """mypyc makes no objects of a class that is not compiled and derives from one that is: the compiled build would end in the
    middle of a run."""
    compiled, modules = compiled_modules(), known()
    assert compiled <= set(modules)
    classes = {
        f"{name}.{node.name}": node
        for name in compiled
        for node in tree(modules[name]).body
        if isinstance(node, ast.ClassDef)
    }
    assert "sim.engine.machine.machine.Machine" in classes
    for name in set(modules) - compiled:
        names = {key.split()[0]: whole for key, whole in bound_in(modules[name]).items() if whole in classes}
        for node in tree(modules[name]).body if names else ():
            bases = [names.get(ast.unparse(base), "") for base in node.bases] if isinstance(node, ast.ClassDef) else []
            for whole in filter(None, bases):
                plain = {ast.unparse(base) for base in classes[whole].bases} & {"Protocol", "NamedTuple", "Exception"}
                assert plain, f"{name} derives from {whole}: add it to COMPILED of hatch_build.py"
