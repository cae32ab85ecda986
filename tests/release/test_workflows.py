"""The workflows name commands, files, jobs and modules that are there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = [ROOT / ".ci" / "run", ROOT / ".ci" / "on_wheel", *sorted((ROOT / ".ci" / "release").glob("[a-z]*[!.]"))]
TOOLS = {"pip", "pytest", "build", "cibuildwheel", "twine", "cyclonedx_py", "uv", "venv"}
"""Modules that requirements bring."""


def steps_of(workflow: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, step) for name, job in workflow["jobs"].items() for step in job.get("steps", ())]


def missing_in(command: str, root: Path = ROOT) -> list[str]:
    """The paths that *command* names and the repository does not have."""
    found = []
    for module in re.findall(r"python3? -m ([\w.]+)", command):
        place = root.joinpath(*([".ci"] if module.startswith("release.") else []), *module.split("."))
        if module not in TOOLS and not place.with_suffix(".py").is_file() and not (place / "__main__.py").is_file():
            found.append(module)
    words = shlex.split(command, comments=True)
    for word in words:
        named = word.rpartition("=")[2].split("[")[0]
        ours = re.match(r"(\.?/?)(\.ci|\.github|benchmarks|docs|examples|notebooks|tests)/", named)
        if ours and "$" not in named and not (root / named).exists():
            found.append(named)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_the_steps_of_a_workflow_name_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    for job, step in steps_of(workflow):
        assert len({"uses", "run"} & set(step)) == 1, f"{path.name}, {job}: a step runs something or uses an action"
        assert not missing_in(step.get("run", "")), f"{path.name}, {job}"
        assert "@v" in step.get("uses", "@v"), f"{path.name}, {job}: an action without its version"
    for name, job in workflow["jobs"].items():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"]), f"{path.name}, {name}"
        called = job.get("uses", ".github")
        assert (ROOT / called.removeprefix("./")).exists(), f"{path.name}, {name}"
        assert "runs-on" in job or "uses" in job


def test_a_command_that_names_what_is_not_there_is_found() -> None:
    assert missing_in("python -m benchmarks.mutations --named") == []
    assert missing_in("python -m benchmarks.mutation --named") == ["benchmarks.mutation"]
    assert missing_in("bash .ci/release/smoke dist/rooftrace-*.whl && pip install -c .ci/requirements/none.txt .") == [
        ".ci/requirements/none.txt"
    ]


def test_flags_of_our_own_tools_in_the_workflows_are_theirs() -> None:
    for path in WORKFLOWS:
        for job, step in steps_of(yaml.safe_load(path.read_text(encoding="utf-8"))):
            for module, rest in re.findall(r"python -m ((?:benchmarks|release)\.\w+)(.*)", step.get("run", "")):
                source = (
                    ROOT.joinpath(*([".ci"] if module.startswith("release.") else []), *module.split("."))
                    .with_suffix(".py")
                    .read_text(encoding="utf-8")
                )
                flags = [word for word in shlex.split(rest) if re.match(r"--[a-z]+$", word)]
                assert all(f'"{flag}"' in source for flag in flags), f"{path.name}, {job}: {module} {flags}"


def test_every_supported_python_is_tested_built_and_smoked() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert len(pythons) == 3
    assert re.search(r'(?m)^build = \["' + r'-\*", "'.join(f"cp{python.replace('.', '')}" for python in pythons), text)
    for name, job in (("tests", "plain"), ("release", "smoke")):
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
        assert workflow["jobs"][job]["strategy"]["matrix"]["python"] == pythons


def test_scripts_name_files_that_are_there() -> None:
    assert len(SCRIPTS) > 4
    for path in SCRIPTS:
        if not path.suffix:
            lines = path.read_text(encoding="utf-8").splitlines()
            for line in lines:
                for module in re.findall(r'python"? -m ((?:benchmarks|release|tests)\.[\w.]+)', line):
                    assert not missing_in(f"python -m {module}"), f"{path.name}: {module}"
                for named in re.findall(r"(?:bash|-c|-r) (\.ci/[\w./]+)", line):
                    assert (ROOT / named).is_file(), f"{path.name}: {named}"


def test_locks_name_no_index() -> None:
    for lock in (ROOT / ".ci" / "requirements").glob("*.txt"):
        for line in lock.read_text(encoding="utf-8").splitlines():
            assert re.match(r"[a-z0-9-]+==[\w.!+]+( ; .*)?$", line), f"{lock.name}: {line}"


def test_extras_that_are_installed_are_there():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    asked = set[str]()
    for path in [*WORKFLOWS, *SCRIPTS, ROOT / "CONTRIBUTING.md", ROOT / "README.md"]:
        text = path.read_text()
        for names in re.findall(r"(?:\.|\$1|\$wheel|whl|rooftrace)\[([a-z, ]+)\]", text):
            asked.update(names.replace(" ", "").split(","))
        asked.update(re.findall(r"--extra ([a-z]+)", text))
    assert {"dev", "explore", "serve", "forecast"} <= asked <= extras
