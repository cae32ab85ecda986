"""From a command to a scenario, and what of the command it does not say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import RooftraceError, ScenarioError
from sim.launch import sglang, trtllm, vllm
from sim.launch.arguments import Command, read_command
from sim.launch.reading import Reading
from sim.launch.tiers import GIB
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
    """The scenario of a command that starts a server, or of several, one a line, which are pools of it.

    *hardware* is a name of `rooftrace hardware`, which no command says; *assignments* are KEY=VALUE settings beside the
    commands'. RooftraceError for a command that is not understood or that makes no scenario.
    """
    servers = list(_servers(command))
    model = _assigned_model(assignments)
    readings = [_read(server.text, model) for server in servers]
    notes = [note for reading in readings for note in reading.notes]
    if hardware is None:
        notes.append("a command does not say on what it runs; --hardware NAME does, and h100-sxm is assumed")
    notes.append("a command says nothing of the traffic: workload is the built-in conversation; replace it by yours")
    settings: dict[str, Any] = {} if hardware is None else {"hardware": hardware}
    settings |= _one(servers[0], readings[0], notes) if len(servers) == 1 else _pools(servers, readings, notes)
    settings["workload"] = {"trace": "conversation"}
    scenario = _scenario(settings, assignments)
    timing, front = zip(*(reading.left() for reading in readings), strict=True)
    return Translation(
        scenario=_with_host_tiers(scenario, readings),
        not_modelled=tuple(dict.fromkeys(text for texts in timing for text in texts)),
        without_effect=tuple(dict.fromkeys(text for texts in front for text in texts)),
        notes=tuple(dict.fromkeys(notes)),
    )


def models_of(command: str, *, assignments: Sequence[str] = ()) -> tuple[str, ...]:
    """The models that `scenario_from` reads for a command: those of *assignments* stand in the place of the command's."""
    given = _assigned_model(assignments)
    return tuple(dict.fromkeys(given or _command_of(server.text)[1] for server in _servers(command)))


def _assigned_model(assignments: Sequence[str]) -> str | None:
    """The model that an assignment of `model` gives in the place of the commands'; None without one."""
    values = [text for key, _, text in (each.partition("=") for each in assignments) if key.strip() == "model"]
    return values[-1].strip() if values else None


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A command, and what the comment above it says: name and role of its pool, how many there are, and their router."""

    text: str
    name: str | None = None
    replicas: int = 1
    router: str | None = None


_COMMENT = re.compile(
    r"# (?:pool (?P<name>[\w-]+), .*: )?start this (?P<times>\d+) times(?:, behind a router \((?P<router>[\w:.]+)\))?$"
)
"""As `export` writes it."""


def _servers(text: str) -> Iterator[_Server]:
    said: dict[str, Any] = {}
    found = False
    for line in text.replace("\\\n", " ").splitlines():
        if match := _COMMENT.match(line.strip()):
            said = {"name": match["name"], "replicas": int(match["times"]), "router": match["router"]}
        elif line.strip() and not line.lstrip().startswith("#"):
            yield _Server(text=line, **said)
            said, found = {}, True
    if not found:
        yield _Server(text=text)


def _command_of(text: str) -> tuple[Reading, str]:
    """A command that is read as options, and the model that it names."""
    found = read_command(text)
    if found.engine == "vllm":
        found = _with_file(found)
    reading = Reading(found)
    option = _MODEL_OPTIONS.get(found.engine)
    model = (reading.text(option) if option else None) or found.model
    if model is None:
        raise RooftraceError(f"the command of {found.engine} names no model")
    return reading, model


def _read(text: str, instead: str | None) -> Reading:
    """The reading of one server's command, whose model *instead* stands for where it is given."""
    reading, model = _command_of(text)
    model = instead or model
    found = reading.command
    reading.put("model", model)
    try:
        from hwmodels.model import load_model

        experts = load_model(model).experts is not None
    except ValueError as error:
        raise RooftraceError(
            f"{error}; or set one in its place: --set model=NAME, or the folder of its config.json"
        ) from None
    _READERS[found.engine](reading, experts=experts)
    aside = [word for word in found.aside if not word.startswith("LMCACHE_")]
    if aside:
        reading.notes.append(f"not read, because it stands before the server's own words: {' '.join(aside)}")
    return reading


def _one(server: _Server, reading: Reading, notes: list[str]) -> dict[str, Any]:
    if reading.role is not None:
        other = {"prefill": "decode", "decode": "prefill"}[reading.role]
        notes.append(
            f"the server has role {reading.role}, and is read as one that does both; give the command of role {other} beside it, "
            "one a line, for a scenario with both"
        )
    settings = dict(reading.settings)
    if server.replicas > 1:
        settings["replicas"] = server.replicas * settings.get("replicas", 1)
    if server.router is not None:
        settings["router"] = server.router
    return settings


def _pools(servers: Sequence[_Server], readings: Sequence[Reading], notes: list[str]) -> dict[str, Any]:
    """Settings of several commands: a pool each, called as the comment above it says, or by its role, or by its number."""
    pools: dict[str, Any] = {}
    for at, (server, reading) in enumerate(zip(servers, readings, strict=True)):
        name = server.name or (reading.role if reading.role not in (None, *pools) else None) or f"pool{at + 1}"
        settings = {key: value for key, value in reading.settings.items() if key not in ("router", "stream_interval")}
        if reading.role is not None:
            settings["role"] = reading.role
        replicas = server.replicas * settings.pop("replicas", 1)
        pools[name] = {**settings, **({"replicas": replicas} if replicas > 1 else {})}
    found: dict[str, Any] = {"model": readings[0].settings["model"], "scheduler": readings[0].settings["scheduler"]}
    intervals = {reading.settings.get("stream_interval", 1) for reading in readings}
    if len(intervals) > 1:
        raise RooftraceError("--stream-interval is of all pools; give the same to every command")
    if intervals != {1}:
        found["stream_interval"] = intervals.pop()
    router = next((server.router for server in servers if server.router is not None), None)
    if router is not None:
        found["router"] = router
    if any(reading.role is not None for reading in readings):
        connector = next((each.connector for each in readings if each.connector is not None), None)
        found["links"] = {"net": {} if connector is None else {"connector": connector}}
        notes.append(
            "how fast KV gets from one pool to the other stands in no command: links is the datasheet's network"
        )
    return {**found, "pools": pools}


def _with_host_tiers(scenario: Scenario, readings: Sequence[Reading]) -> Scenario:
    """*scenario* with host tiers that are as large as a multiple of the KV cache, now that its size is known."""
    from sim.scenario.assembly.memory import memory_plan_of

    for name, reading in zip(scenario.pools or ("",), readings, strict=True):
        if reading.host_tier is None:
            continue
        ratio, tier = reading.host_tier
        deployment, plan = memory_plan_of(scenario.pool(name) if name else scenario)
        block_bytes = sum(stage.block_bytes for stage in plan.stages) * deployment.parallel.tensor
        gib = ratio * plan.device_blocks * plan.groups * block_bytes / GIB
        key = f"pools.{name}.memory.tiers" if name else "memory.tiers"
        scenario = scenario.with_value(key, [{**tier, "gib": gib}])
    return scenario


def _scenario(settings: dict[str, Any], assignments: Sequence[str]) -> Scenario:
    pools = settings.get("pools", {})
    decoding = {"": settings.pop("decoding", None)}
    decoding |= {f"pools.{name}.": pool.pop("decoding", None) for name, pool in pools.items()}
    base = Scenario.from_mapping(settings, source="the command")
    # What drafts are worth is in no command; it comes with the assignments, all at once.
    said = [f"{at}decoding.{key}={value}" for at, of in decoding.items() for key, value in _flat(of or {})]
    try:
        return base.with_set(*said, *assignments)
    except ScenarioError as error:
        if not said:
            raise
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
