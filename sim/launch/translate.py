"""From a command to a scenario, and what of the command it does not say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import RooftraceError, ScenarioError
from sim.launch import sglang, trtllm, vllm
from sim.launch.arguments import Command, read_command
from sim.launch.reading import Reading
from sim.scenario import Scenario
from sim.scenario.yaml import parse_yaml

_READERS: Mapping[str, Callable[..., None]] = {
    "vllm": vllm.settings,
    "sglang": sglang.settings,
    "trtllm": trtllm.settings,
}


_MODEL_OPTIONS = {"vllm": "model", "sglang": "model-path"}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A scenario, and everything of its command that it leaves out."""

    scenario: Scenario
    not_modelled: tuple[str, ...]
    """Options that may change how long requests take."""
    without_effect: tuple[str, ...]
    """Options that cannot."""
    notes: tuple[str, ...]


def scenario_from(command: str, *, hardware: str | None = None, assignments: Sequence[str] = ()) -> Translation:
    """The scenario of a command that starts a server.

    *hardware* is a name of `rooftrace hardware`, which no command says; *assignments* are KEY=VALUE settings beside the
    command's. RooftraceError for a command that is not understood or that makes no scenario.
    """
    found = read_command(command)
    if found.engine == "vllm":
        found = _with_file(found)
    reading = Reading(found)
    option = _MODEL_OPTIONS.get(found.engine)
    model = (reading.text(option) if option else None) or found.model
    if model is None:
        raise RooftraceError(f"the command of {found.engine} names no model")
    reading.put("model", model)
    reading.put("hardware", hardware)
    if hardware is None:
        reading.notes.append("a command does not say on what it runs; --hardware NAME does, and h100-sxm is assumed")
    try:
        from hwmodels.model import load_model

        experts = load_model(model).experts is not None
    except ValueError as error:
        raise RooftraceError(f"{error}; or give the folder of its config.json in place of the name") from None
    _READERS[found.engine](reading, experts=experts)
    if found.aside:
        reading.notes.append(f"not read, because it stands before the server's own words: {' '.join(found.aside)}")
    timing, front = reading.left()
    settings = {**reading.settings, "workload": {"trace": "conversation"}}
    reading.notes.append(
        "a command says nothing of the traffic: workload is the built-in conversation; replace it by yours"
    )
    scenario = _scenario(found, settings, assignments)
    return Translation(
        scenario=scenario, not_modelled=tuple(timing), without_effect=tuple(front), notes=tuple(reading.notes)
    )


def _scenario(command: Command, settings: dict[str, Any], assignments: Sequence[str]) -> Scenario:
    decoding = settings.pop("decoding", None)
    base = Scenario.from_mapping(settings, source=f"the command of {command.engine}")
    if decoding is None:
        return base.with_set(*assignments)
    # What drafts are worth is in no command; it comes with the assignments, all at once.
    said = [f"decoding.{key}={value}" for key, value in _flat(decoding)]
    try:
        return base.with_set(*said, *assignments)
    except ScenarioError as error:
        raise ScenarioError(
            f"{error}; a command does not say it, --set does (--set 'decoding.acceptance={{alpha: 0.7}}')"
        ) from None


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def _with_file(command: Command) -> Command:
    """vLLM's --config: a YAML file of options, over which the command's own go."""
    path = command.options.get("config")
    if path is None:
        return command
    try:
        given = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise RooftraceError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(given, Mapping):
        raise RooftraceError(f"--config {path} holds no options: keys with values are expected")
    words = ["vllm", "serve"]
    for key, value in given.items():
        name = f"--{str(key).replace('_', '-')}"
        if value is True:
            words.append(name)
        elif value is False:
            words.append(f"--no-{name[2:]}")
        elif isinstance(value, Mapping):
            words += [name, json.dumps(value)]
        else:
            words += [name, *map(str, value)] if isinstance(value, list) else [name, str(value)]
    from_file = read_command(shlex.join(words))
    own = {name: value for name, value in command.options.items() if name != "config"}
    return Command(
        engine=command.engine,
        model=command.model or from_file.model,
        options={**from_file.options, **own},
        aside=command.aside,
    )
