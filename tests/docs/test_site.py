"""The documents build without a warning, and their commands run."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sim.scenario import named
from sim.scenario.schema import json_schema

ROOT = Path(__file__).parents[2]
MARK = "<!-- executed by tests/docs -->"
PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if MARK in path.read_text(encoding="utf-8")]


def commands(page):
    return re.findall(re.escape(MARK) + r"\n```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_every_mark_has_its_commands():
    for page in PAGES:
        assert len(commands(page)) == page.read_text(encoding="utf-8").count(MARK) > 0


def test_the_page_of_settings_has_every_section_and_every_policy():
    pytest.importorskip("mkdocs", reason="needs the extra [docs]")
    page = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["scenario"]()
    keys = set(re.findall(r"^\\| `([\w.]+)`", page, re.MULTILINE))
    for key in (
        "memory.tiers.N.store",
        "failures.times.N.at_s",
        "classes.NAME.slo.ttft_s",
        "window.from_s",
        "pools.NAME.role",
    ):
        assert key in keys
    definitions = json_schema()["$defs"]
    for name, definition in definitions.items():
        for shape in (definition, *definition.get("anyOf", ())):
            # A constant is the name that is chosen, which is a heading.
            settings = {key for key, what in shape.get("properties", {}).items() if "const" not in what}
            settings -= {key for key in settings if "pattern" in shape["properties"][key]}
            assert settings <= {key.rpartition(".")[2] for key in keys}, name
    for table in (
        named.SCHEDULERS,
        named.ROUTERS,
        named.EVICTIONS,
        named.CONTROLS,
        named.PROCESSES,
        named.DISTRIBUTIONS,
    ):
        assert set(table) <= set(re.findall(r"^### (\S+)", page, re.MULTILINE))


@pytest.mark.slow(reason="whole commands in processes of their own")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run_one_after_another(page, tmp_path):
    # The command of this environment, whatever else is called rooftrace on the machine.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "rooftrace"
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c 'from sim.cli import main; main()' \"$@\"\n")
    script.chmod(0o755)
    (tmp_path / "here").mkdir()
    environment = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for command in commands(page):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path / "here",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow(reason="whole commands in processes of their own")
def test_the_site_builds_with_warnings_as_errors(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra [docs]")
    pytest.importorskip("mkdocstrings", reason="needs the extra [docs]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    commands_page = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    settings_page = (tmp_path / "site" / "reference" / "scenario" / "index.html").read_text(encoding="utf-8")
    python_page = (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "rooftrace sweep" in commands_page
    assert "--replications" in commands_page
    assert "memory.gpu_memory_utilization" in settings_page
    assert "token_budget" in settings_page
    assert "mser5" in python_page
