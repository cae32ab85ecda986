"""One wrong thing in a valid scenario: it is refused in one sentence that names the key, and what was expected or meant."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from sim.cli import build_app
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from tests.scenario.random_scenarios import draw, write_files

NAMES = ("pools", "classes", "links", "models", "start")
"""Mappings whose keys are names of the user's choice."""
CHOSEN = (
    "serving_stack",
    "cost_model",
    "precision",
    "kv_precision",
    "method",
    "process",
    "policy",
    "model",
    "hardware",
    "role",
)
"""Settings whose value is a name that can be misspelt."""

OTHERS = ("b200",)
"""Names that a slip makes of another and that are right as well."""


class Mistake(NamedTuple):
    kind: str
    key: str
    """Dotted, as it stands in the scenario with the mistake."""
    meant: str
    """The right key or name; "" where a value of the wrong kind stands there."""
    scenario: dict[str, Any]


def _places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key that is no name of the user's choice."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not (path and path[-1] in NAMES):
                yield (*path, key)
            yield from _places(inner, (*path, key))


def _section(scenario: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for part in path:
        scenario = scenario[part]
    return scenario


def _misspelt(rng: Random, word: str) -> str:
    at = rng.randrange(len(word) - 1)
    return rng.choice(
        [
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        ]
    )


def _contradictions(scenario: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that contradict others of *scenario*: the dotted key of one, and the scenario with it."""
    workload = scenario["workload"]
    if "pools" in scenario:
        yield "placement", {**scenario, "placement": "placement.json"}
    elif "placement" in scenario:
        yield "pools", {**scenario, "pools": {"a": {}}}
    if "links" not in scenario:
        yield "links", {**scenario, "links": {"net": {}}}
    if "trace" in workload and "arrivals" not in workload:
        yield "workload.output_tokens", {**scenario, "workload": {**workload, "output_tokens": 3}}
    elif "trace" not in workload:
        yield "workload.trace", {**scenario, "workload": {**workload, "trace": "conversation"}}
    if "autoscale" in scenario:
        yield "autoscale", {**scenario, "autoscale": {**scenario["autoscale"], "min": 9, "max": 2}}


def mistaken(seed: int) -> Mistake:
    """A scenario with one mistake, which is none of a value that happens to be right all the same."""
    rng = Random(seed)
    while True:
        scenario = copy.deepcopy(draw(rng))
        path = rng.choice(list(_places(scenario)))
        section, key = _section(scenario, path[:-1]), path[-1]
        value, dotted = section[key], ".".join(path)
        kind = rng.choice(["key", "name", "type", "contradiction"])
        if kind == "key" and len(key) > 3:
            wrong = _misspelt(rng, key)
            if wrong != key and wrong not in section:
                section[wrong] = section.pop(key)
                return Mistake(kind, ".".join([*path[:-1], wrong]), key, scenario)
        elif kind == "name" and key in CHOSEN and isinstance(value, str) and len(value) > 3 and ":" not in value:
            wrong = _misspelt(rng, value)
            if wrong != value and wrong not in OTHERS:
                section[key] = wrong
                return Mistake(kind, dotted, value, scenario)
        elif kind == "contradiction" and (found := list(_contradictions(scenario))):
            key, scenario = rng.choice(found)
            return Mistake(kind, key, "", scenario)
        elif kind == "type" and isinstance(value, int | float | bool | dict):
            section[key] = [[]] if isinstance(value, dict) else rng.choice([{"a": 1}, "plenty", [[]]])
            return Mistake(kind, dotted, "", scenario)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return folder


def assert_refused(seed: int, files: Path) -> None:
    mistake = mistaken(seed)
    told = f"seed {seed}: {mistake.kind} {mistake.key} (meant {mistake.meant!r})"
    try:
        resolve(Scenario.from_mapping(mistake.scenario, source="mine.yaml", folder=files))
    except ScenarioError as error:
        text = str(error)
    else:
        pytest.fail(f"{told}: accepted")
    told = f"{told}: {text}"
    assert "\n" not in text, told
    assert text.startswith("mine.yaml"), told
    # The key, by its last part: above it stand names of pools and classes in words of their own.
    assert mistake.key.rsplit(".", 1)[-1] in text, told
    if mistake.kind in ("key", "name"):
        assert mistake.meant in text, told


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_one_mistake_is_refused_in_one_sentence_that_names_the_key_and_what_was_meant(first: int, files: Path) -> None:
    for seed in range(first, first + 20):
        assert_refused(seed, files)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_each_of_500_mistakes_is_refused_in_one_sentence(first: int, files: Path) -> None:
    for seed in range(first, first + 50):
        assert_refused(seed, files)


@pytest.mark.slow(reason="many random runs")
def test_the_command_ends_with_2_and_one_sentence(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    for seed in range(700, 740):
        Path("mine.yaml").write_text(yaml.safe_dump(mistaken(seed).scenario))
        done = CliRunner().invoke(build_app(), ["run", "mine.yaml", "--out", "out"])
        assert done.exit_code == 2, (seed, done.output)
        assert "Traceback" not in done.output
        assert not Path("out").exists()
