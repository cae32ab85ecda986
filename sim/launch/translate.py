"""From a command to a scenario, and what of the command it does not say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwmodels.adapters import targets_of
from hwmodels.device import load_device
from hwmodels.model import load_model
from hwmodels.overheads import is_before, known_for
from sim.errors import RooftraceError, ScenarioError
from sim.launch.arguments import NO_SERVER, Command, read_words, release_note, release_of, yaml_file
from sim.launch.documents import is_document, read_documents
from sim.launch.engines import launches, reader_of
from sim.launch.reading import Reading
from sim.launch.script import Script, Server, masked, read_script
from sim.launch.tiers import GIB
from sim.scenario import Scenario
from sim.scenario.assembly.memory import memory_plan_of
from sim.scenario.keys import BUILT_IN_TRACES


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A scenario, and everything of its command that it leaves out."""

    scenario: Scenario
    strange: tuple[str, ...]
    """Sentences about options that the release does not have: removed, of other releases, or misspelt."""
    not_modelled: tuple[str, ...]
    """Options that may change how long requests take."""
    without_effect: tuple[str, ...]
    """Options that cannot."""
    notes: tuple[str, ...]


def scenario_from(
    command: str,
    *,
    hardware: str | None = None,
    assignments: Sequence[str] = (),
    strict: bool = False,
    release: str | None = None,
    source: str = "the command",
) -> Translation:
    """The scenario of a command that starts a server, or of several, one a line, which are pools of it.

    *command* is shell text, docker's and podman's commands included, or YAML: manifests of Kubernetes, KServe and Dynamo, docker
    compose, values of charts; *source* says where it is from. *hardware* is a name of `rooftrace hardware`, which no command
    says; *assignments* are KEY=VALUE settings beside the commands', of which `model=` stands for names that are not known.
    Options are those of *release*, or of the one that the tag of an image says, or of the newest; *strict* refuses others.
    RooftraceError for what is not understood or makes no scenario.
    """
    release = release if release is None else re.sub(r"^[vV](?=\d)", "", release)
    script = _script(command, source)
    servers = script.servers if release is None else [replace(each, release=release) for each in script.servers]
    model = _assigned_model(assignments)
    readings = [_read(server, model, strict) for server in servers]
    notes = [*script.notes, *(note for reading in readings for note in reading.notes)]
    settings = _settings(servers, readings, hardware, notes)
    scenario = _scenario(settings, readings, assignments, notes)
    if scenario.workload.trace in BUILT_IN_TRACES:
        notes.append(
            "a command says nothing of the traffic: workload is the built-in conversation; replace it with yours"
        )
    others = [text for reading in readings for text in reading.command.others]
    timing, front = zip(*(reading.left() for reading in readings), strict=True)
    return Translation(
        scenario=_with_host_tiers(scenario, readings),
        strange=tuple(dict.fromkeys(text for reading in readings for text in reading.command.strange)),
        not_modelled=tuple(dict.fromkeys([*(text for texts in timing for text in texts), *others])),
        without_effect=tuple(dict.fromkeys(text for texts in front for text in texts)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _settings(
    servers: Sequence[Server], readings: Sequence[Reading], hardware: str | None, notes: list[str]
) -> dict[str, Any]:
    """The settings that the commands say, on *hardware* or on what they run."""
    devices = [_device(server, notes) for server in servers]
    hardware = hardware or (devices[0] if len(set(devices)) == 1 else None)
    if hardware is None and None in devices:
        notes.append("a command does not say on what it runs; --hardware NAME does, and h100-sxm is assumed")
    settings: dict[str, Any] = {} if hardware is None else {"hardware": hardware}
    settings |= _one(servers[0], readings[0], notes) if len(servers) == 1 else _pools(servers, readings, notes)
    if hardware is None and len(servers) > 1:
        for pool, device in zip(settings["pools"].values(), devices, strict=True):
            pool |= {} if device is None else {"hardware": device}
    return {**settings, "workload": {"trace": "conversation"}}


def models_of(command: str, *, assignments: Sequence[str] = (), source: str = "the command") -> tuple[str, ...]:
    """The models that `scenario_from` reads for a command: those of *assignments* stand in the place of the command's."""
    given = _assigned_model(assignments)
    named = [given or _command_of(server, strict=False)[1] for server in _script(command, source).servers]
    return tuple(dict.fromkeys(filter(None, named)))


def _assigned_model(assignments: Sequence[str]) -> str | None:
    """The model that an assignment of `model` gives in the place of the commands'; None without one."""
    values = [text for key, _, text in (each.partition("=") for each in assignments) if key.strip() == "model"]
    return values[-1].strip() if values else None


def _device(server: Server, notes: list[str]) -> str | None:
    """The catalogue's name of the device that a manifest asks for."""
    if server.hardware is None:
        return None
    label = re.sub("-SHARED$", "", server.hardware)
    try:
        return load_device(label).name
    except ValueError:
        notes.append(
            f"not read: {server.hardware} is no device of the catalogue; --hardware NAME says which it is like"
        )
        return None


def _script(text: str, source: str) -> Script:
    """The servers that *text* starts: commands, or YAML; RooftraceError where there are none."""
    found = read_documents(text, source) if is_document(text) else read_script(text)
    if not found.servers:
        said = f"; {'; '.join(found.notes[:3])}" if found.notes else ""
        raise RooftraceError(NO_SERVER.replace("the command", source) + said)
    return found


def _command_of(server: Server, *, strict: bool) -> tuple[Reading, str | None]:
    """A command that is read as options, and the model that it names."""
    words, role = _of_dynamo(server)
    found = read_words(words, strict=strict, release=server.release)
    found = _with_file(found, strict, server.release)
    reading = Reading(found, role)
    option = launches()[found.engine].model_option
    return reading, (reading.text(option) if option else None) or found.model


def _read(server: Server, instead: str | None, strict: bool) -> Reading:
    """The reading of one server's command, whose model *instead* stands for where it is given."""
    reading, named = _command_of(server, strict=strict)
    found, model = reading.command, instead or named
    if model is None:
        raise RooftraceError(f"the command of {found.engine} names no model; --set model=NAME does")
    if instead and named and instead != named:
        reading.notes.append(f"the command's model is {named}, in whose place --set model={instead} stands")
    reading.put("model", model)
    _put_release(reading, server.release)
    try:
        spec = load_model(model)
    except ValueError as error:
        raise RooftraceError(
            f"{error}; or set one in its place: --set model=NAME, or the folder of its config.json"
        ) from None
    reading.encoders = tuple(
        what for what, tower in (("images", spec.vision), ("speech", spec.speech)) if tower is not None
    )
    try:
        targets_of(spec)
    except ValueError as error:
        reading.no_adapters = str(error).partition(";")[0]
    reader_of(found.engine)(reading, experts=spec.experts is not None)
    aside = [word for word in reading.aside if not word.startswith("LMCACHE_")]
    if aside:
        reading.notes.append(f"not read, because it stands before the server's own words: {' '.join(masked(aside))}")
    return reading


def _put_release(reading: Reading, release: str | None) -> None:
    """Overheads and memory of the release that is named, where it is not the one that is taken without a name."""
    engine = reading.command.engine
    if release is None:
        return
    try:
        known_for(release, (release_of(engine),))
    except ValueError as error:
        raise RooftraceError(f"--release: {error}") from None
    if not is_before(release, release_of(engine)) and not is_before(release_of(engine), release):
        return
    reading.release = release
    reading.notes.append(release_note(engine, release))
    for key in ("serving_release", "memory.release"):
        reading.put(key, release)


def _of_dynamo(server: Server) -> tuple[list[str], str | None]:
    """The words of a server, and its role: Dynamo's workers say it by options that the servers themselves do not have."""
    words, role = list(server.words), server.role
    if any(word.startswith("dynamo.") for word in words):
        for option, meant in (("--is-prefill-worker", "prefill"), ("--is-decode-worker", "decode")):
            if option in words:
                words.remove(option)
                role = meant
        for launch in launches().values():
            option = launch.dynamo_role_option
            if option in words and launch.dynamo_module in words:
                at = words.index(option)
                if words[at + 1 : at + 2] in (["prefill"], ["decode"]):
                    role = words[at + 1]
                    del words[at : at + 2]
    return words, role


def _one(server: Server, reading: Reading, notes: list[str]) -> dict[str, Any]:
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
    if server.autoscale is not None:
        settings["autoscale"] = dict(server.autoscale)
    return settings


_OF_ALL_POOLS = ("router", "stream_interval", "encode", "adapters")


def _pools(servers: Sequence[Server], readings: Sequence[Reading], notes: list[str]) -> dict[str, Any]:
    """Settings of several commands: a pool each, called as the comment above it says, or by its role, or by its number."""
    pools: dict[str, Any] = {}
    for at, (server, reading) in enumerate(zip(servers, readings, strict=True)):
        names = (server.name, reading.role) if server.named else (reading.role, server.name)
        name = next(name for name in (*names, f"pool{at + 1}", f"server{at + 1}") if name not in (None, *pools))
        settings = {key: value for key, value in reading.settings.items() if key not in _OF_ALL_POOLS}
        if reading.role is not None:
            settings["role"] = reading.role
        replicas = server.replicas * settings.pop("replicas", 1)
        pools[name] = {**settings, **({"replicas": replicas} if replicas > 1 else {})}
        if server.autoscale is not None:
            pools[name]["autoscale"] = dict(server.autoscale)
    found: dict[str, Any] = {"model": readings[0].settings["model"], "scheduler": readings[0].settings["scheduler"]}
    intervals = {reading.settings.get("stream_interval", 1) for reading in readings}
    if len(intervals) > 1:
        raise RooftraceError("--stream-interval is of all pools; give the same to every command")
    if encode := next((reading.settings["encode"] for reading in readings if "encode" in reading.settings), None):
        found["encode"] = encode
    slots = [reading.settings.get("adapters") for reading in readings]
    if all(each == slots[0] for each in slots):
        found |= {} if slots[0] is None else {"adapters": slots[0]}
    else:
        notes.append(
            "the commands say different adapters, and those of a scenario are of all pools: adapters is left out"
        )
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


def _scenario(
    settings: dict[str, Any], readings: Sequence[Reading], assignments: Sequence[str], notes: list[str]
) -> Scenario:
    pools = settings.get("pools", {})
    decoding = {"": settings.pop("decoding", None)}
    decoding |= {f"pools.{name}.": pool.pop("decoding", None) for name, pool in pools.items()}
    base = Scenario.from_mapping(settings, source="the command")
    # What drafts are worth is in no command; it comes with the assignments, all at once.
    said = [f"{at}decoding.{key}={value}" for at, of in decoding.items() for key, value in _flat(of or {})]
    for at, reading in zip([f"pools.{name}." for name in pools] or [""], readings, strict=True):
        for key, (value, note) in reading.assumed.items():
            if not any(each.startswith((f"{at}{key}", key)) for each in assignments):
                said.append(f"{at}{key}={json.dumps(value)}")
                notes.append(note)
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


def _with_file(command: Command, strict: bool, release: str | None) -> Command:
    """The command with the options of its YAML file, over which its own go."""
    launch = launches()[command.engine]
    path = None if launch.file_option is None else command.options.get(launch.file_option)
    if path is None:
        return command
    given = yaml_file(path, "--config")
    if not isinstance(given, Mapping):
        raise RooftraceError(f"--config {path} holds no options: keys with values are expected")
    words = list(launch.entry)
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
    from_file = read_words(words, strict=strict, release=release)
    own = {name: value for name, value in command.options.items() if name != launch.file_option}
    return Command(
        engine=command.engine,
        model=command.model or from_file.model,
        options={**from_file.options, **own},
        aside=command.aside,
        strange=(*from_file.strange, *command.strange),
        others=(*from_file.others, *command.others),
    )
