"""Commands, containers and manifests as people write them are taken, or refused with the way out; nothing is dropped in silence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml

from sim.errors import RooftraceError
from sim.launch import scenario_from
from tests.cli.test_run import rooftrace
from tests.launch.as_written import WRITTEN, Written
from tests.sample import ALL


def leaf(settings: Any, path: str) -> Any:
    for key in path.split("."):
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings


@pytest.mark.parametrize("written", [pytest.param(each, id=name) for name, each in WRITTEN.items()])
def test_it_is_taken_or_refused_with_the_way_out(written: Written) -> None:
    if written.refused is not None:
        with pytest.raises(RooftraceError) as refused:
            scenario_from(written.text)
        assert written.refused in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    found = scenario_from(written.text)
    resolved = found.scenario.model_dump()
    resolved["scheduler"] = found.scenario.settings()["scheduler"]
    for path, value in written.settings.items():
        assert leaf(found.scenario.settings(), path) == value or leaf(resolved, path) == value, path
    said = "\n".join((*found.strange, *found.not_modelled, *found.without_effect, *found.notes))
    for text in written.says:
        assert text in said


def test_there_are_sixty() -> None:
    assert len(WRITTEN) == 60


_JUNK: tuple[Any, ...] = (3, [3], "x 'y", None, {}, [{}], [[]], {"a": 3}, "", True, ["a"], -1)


def _with_junk(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """*value* with one part of it replaced."""
    if isinstance(value, dict | list) and value and (depth == 0 or rng.random() < 0.85):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        at = rng.choice(keys)
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[at] = _with_junk(rng, value[at], depth + 1)
        return copy
    return rng.choice(_JUNK)


@pytest.mark.parametrize(
    "name", [name for name, each in WRITTEN.items() if each.text.startswith(("apiV", "serv", "model", "app"))]
)
def test_manifests_with_a_broken_part_are_read_or_refused_in_one_sentence(name: str) -> None:
    documents = list(yaml.safe_load_all(WRITTEN[name].text))
    for seed in range(60 if ALL else 25):
        rng = random.Random(f"{name} {seed}")
        broken = _with_junk(rng, documents)
        said = ""
        try:
            scenario_from(yaml.safe_dump_all(broken))
        except RooftraceError as error:
            said = str(error)
        assert "\n" not in said


def test_text_in_quotes_is_one_word_whatever_is_in_it() -> None:
    found = scenario_from('vllm serve Qwen/Qwen3-8B --hf-overrides "{\\"a\\": \\"b;c|d & e\\"}" && echo \'a;b\'')
    assert found.not_modelled == ('--hf-overrides {"a": "b;c|d & e"}',)
    assert "not read: echo 'a;b'" in found.notes


def test_what_is_secret_does_not_travel() -> None:
    out = rooftrace(
        "scenario", "from", "HF_TOKEN=abc vllm serve Qwen/Qwen3-8B --api-key=sk-1 --max-num-batched-tokens 512"
    )
    assert "sk-1" not in out.stdout
    assert "abc" not in out.stdout + out.stderr
    assert "512" in out.stdout.splitlines()[0]
