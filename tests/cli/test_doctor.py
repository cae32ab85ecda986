"""The parts of an installation, and how commands are grouped."""

from __future__ import annotations

import importlib.metadata
import json
import pkgutil

import pytest
from typer.testing import CliRunner

from sim.cli import build_app, commands
from sim.cli.app import _QUESTIONS


def test_doctor_says_what_is_installed() -> None:
    done = CliRunner().invoke(build_app(), ["doctor", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rooftrace"] == importlib.metadata.version("rooftrace")
    assert f"numpy {importlib.metadata.version('numpy')}" in found["packages"]
    assert found["other_packages_in_the_way"] == "none"
    both = {*found["extras"].split(", "), *found["extras_not_installed"].split(", ")}
    assert {"serve", "torch", "jax"} <= both
    assert set(found["extras"].split(", ")).isdisjoint(found["extras_not_installed"].split(", "))


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_a_command_that_lacks_a_package_says_what_to_install(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.cli.extras.find_spec", lambda package: None if package == "httptools" else object())
    done = CliRunner().invoke(build_app(), [command])
    assert done.exit_code == 2
    assert f"rooftrace {command} needs httptools: pip install httptools" in " ".join(done.stderr.split())


def test_every_command_stands_below_one_question() -> None:
    listed = [name for names in _QUESTIONS.values() for name in names]
    assert sorted(listed) == sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
    shown = CliRunner().invoke(build_app(), ["--help"]).stdout
    places = [shown.index(question) for question in _QUESTIONS]
    assert places == sorted(places)
    assert places[0] < shown.index("\n│ sweep ") < places[1]


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in CliRunner().invoke(build_app(), ["--help"]).stdout
