"""LoRA adapters in commands: what engines have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.adapters import slot_rules
from sim.errors import RooftraceError
from sim.launch.reading import Reading
from sim.launch.writing import Writing
from sim.scenario.adapters import AdapterSettings


def at_least_one(reading: Reading, option: str) -> int | None:
    """The number of *option*; None where it was not given. RooftraceError below 1, which servers refuse."""
    value = reading.integer(option)
    if value is not None and value < 1:
        raise RooftraceError(f"--{option} is at least 1; got {value}")
    return value


def put_adapters(
    reading: Reading, *, named: int, rank: int, server: Mapping[str, Any], why: str = "of the rank of the slots"
) -> None:
    """Put as many adapters as the command names, of *rank*, or as many as there are slots, and the *server*'s part of the settings;
    *why* that rank. A note, and no adapters, for a model whose adapters are not modelled."""
    if reading.no_adapters:
        reading.notes.append(f"the command's adapters are left out: {reading.no_adapters}")
        return
    reading.put("adapters.count", named or server["max_loras"])
    reading.put("adapters.rank", rank)
    for key, value in server.items():
        reading.put(f"adapters.{key}", value)
    said = f"the command names {named}" if named else "the command names none, so as many as there are slots"
    reading.notes.append(
        f"adapters.count, adapters.rank and adapters.popularity are the traffic's: {said}, {why}, and all are asked for equally "
        "often; say otherwise where that is known"
    )


def write_adapters(command: Writing, *, slots: str, in_host_memory: str, paths: str) -> AdapterSettings | None:
    """Write the slots of the scenario's adapters, and say what the command cannot carry; returns the adapters, None without any.

    *slots*, *in_host_memory* and *paths* are the engine's options for the number of slots, the adapters that host memory keeps and
    the files of adapters.
    """
    adapters, rules = command.scenario.adapters, slot_rules(command.target)
    command.carries("adapters")
    if adapters is None:
        return None
    server = adapters.slots(rules)
    command.flag("--enable-lora", True)
    command.flag(slots, server.max_loras)
    command.flag("--max-lora-rank", server.rank)
    command.flag(in_host_memory, adapters.max_cpu_loras)
    command.not_carried(f"the paths of the adapters (count {adapters.count}): name them with {paths} NAME=PATH")
    if adapters.placement != "everywhere":
        command.not_carried("adapters.placement: start each server with its own adapters, and route by adapter")
    return adapters
