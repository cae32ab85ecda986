import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rooftrace
import sim
import sim.engine as sim_engine
import sim.placement as sim_placement
import sim.results as sim_results
from sim import packages
from sim.placement.scenario import SEARCHES
from sim.scenario import named

ROOT = Path(sim.__file__).parents[1]


def test_all_is_honest():
    for name in sim.__all__:
        assert getattr(sim, name).__name__.removeprefix("sim.") == name
    assert set(sim.__all__) <= set(dir(sim))
    assert sorted(sim.__all__) == list(sim.__all__)


def test_the_three_lines_of_the_docstring_run():
    outcome = doctest.testmod(sim)
    assert (outcome.attempted, outcome.failed) == (3, 0)


def test_one_module_has_every_public_name():
    for name in rooftrace.__all__:
        assert getattr(rooftrace, name) is not None
    assert sorted(rooftrace._HOMES) == rooftrace.__all__
    assert {name: getattr(rooftrace, name) for name in sim.__all__} == {
        name: getattr(sim, name) for name in sim.__all__
    }
    outcome = doctest.testmod(rooftrace)
    assert (outcome.attempted, outcome.failed) == (3, 0)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(sim, "simulat")
    assert not hasattr(rooftrace, "simulat")


def test_the_reference_lists_what_packages_hand_out():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    rows = dict(row.strip("| ").split(" | ", 1) for row in page.splitlines() if row.startswith("| `"))
    for module in (rooftrace, sim, sim_engine, sim_results, sim_placement):
        listed = set(re.findall(r"`(\w+)`", rows[f"`{module.__name__}`"]))
        assert listed == set(module.__all__), module.__name__
    for row in ("`sim.study.speedup`", "`hwmodels.deployment`, `hwmodels.cost`, `hwmodels.totals`, `hwmodels.budget`"):
        modules = [importlib.import_module(name) for name in re.findall(r"`([\w.]+)`", row)]
        missing = [n for n in re.findall(r"`(\w+)`", rows[row]) if not any(hasattr(module, n) for module in modules)]
        assert missing == []


def test_the_reference_has_every_policy_that_a_scenario_may_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w.]+)`", page))
    tables = (named.SCHEDULERS, named.ROUTERS, named.EVICTIONS, named.CONTROLS, SEARCHES)
    assert {path.partition(":")[0] for table in tables for path in table.values()} <= listed
    for row in re.findall(r"^\| `policies.*", page, re.MULTILINE):
        modules, names = (re.findall(r"`([\w.]+)`", cell) for cell in row.strip("| ").split(" | "))
        found = [importlib.import_module(module) for module in modules]
        assert all(any(hasattr(module, name) for module in found) for name in names), row


def start(*path: Path) -> subprocess.CompletedProcess[str]:
    """`rooftrace --version` with these folders first on Python's path."""
    code = "import sys; from sim.cli import main; sys.argv = ['rooftrace', '--version']; main()"
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-P", "-c", code], env=told, capture_output=True, text=True, check=False)


def test_a_package_of_another_project_is_named_at_the_start(tmp_path):
    stranger = tmp_path / "policies"
    stranger.mkdir()
    (stranger / "__init__.py").touch()
    done = start(tmp_path, ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"Error: the package policies would be loaded from {stranger}, and Rooftrace's lies in"
    )
    assert len(done.stderr.splitlines()) == 1
    assert start(ROOT, tmp_path).returncode == 0


def test_a_package_that_was_overwritten_is_named_too(tmp_path, monkeypatch):
    for name in ("sim", "hwmodels", "policies", "workloads"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for file in ("hwmodels/cost.py", "policies/view.py"):
        (tmp_path / file).touch()
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "sim" / "packages.py"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "the package workloads" in packages.intruder()
    assert "another distribution has overwritten it" in packages.intruder()
    (tmp_path / "workloads" / "trace.py").touch()
    assert packages.intruder() == ""


def test_from_python_the_first_name_says_so(monkeypatch):
    monkeypatch.setattr(packages, "intruder", lambda: "the package policies is a stranger")
    with pytest.raises(ImportError, match="policies is a stranger"):
        getattr(sim, "simulate")  # noqa: B009


def test_nobody_is_told_to_install_a_package_of_our_name():
    """The index may have one, which is not ours: what is told installs the folder at hand."""
    told = re.compile(r"\binstall [^\n&;|`]*?[\s'\"]?\brooftrace\b(?![/.])")
    rooms = (
        ROOT / name for name in ("sim", "hwmodels", "policies", "workloads", "tests", "docs", "notebooks", "benchmarks")
    )
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".ipynb")
    paths = [path for room in (*rooms, ROOT / "examples") for path in room.rglob("*") if path.suffix in kinds]
    wrong = [
        f"{path}: {line}"
        for path in (*paths, *ROOT.glob("*.md"), ROOT / ".ci" / "run")
        for line in path.read_text(encoding="utf-8").splitlines()
        if told.search(line)
    ]
    assert wrong == []
    command = "pip install "
    assert told.search(f"{command}'rooftrace[serve]'")
    assert told.search(f"{command}--upgrade rooftrace")
    assert not told.search(f"{command}-e '.[serve]' && .venv/bin/rooftrace run")
