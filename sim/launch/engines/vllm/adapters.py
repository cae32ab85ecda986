"""LoRA adapters in commands of vLLM: read and written."""

from __future__ import annotations

from sim.launch.reading import Reading
from sim.launch.writing import Writing

_RANK = 16
"""The rank of slots where the command does not say it (config/lora.py)."""


def read(reading: Reading) -> None:
    """Put the slots that the command says, and as many adapters as it names, of the rank of the slots."""
    if not reading.switch("enable-lora"):
        return
    slots, rank = reading.integer("max-loras") or 1, reading.integer("max-lora-rank") or _RANK
    modules = reading.words("lora-modules")
    reading.put("adapters.count", len(modules) or slots)
    reading.put("adapters.rank", rank)
    reading.put("adapters.max_loras", slots)
    reading.put("adapters.max_lora_rank", rank)
    reading.put("adapters.max_cpu_loras", reading.integer("max-cpu-loras"))
    named = "the command names" if modules else "the command names none, so as many as there are slots"
    reading.notes.append(
        f"adapters.count, adapters.rank and adapters.popularity are the traffic's: {named}, of the rank of the slots, and all are "
        "asked for equally often; say otherwise where that is known"
    )


def write(command: Writing) -> None:
    adapters = command.scenario.adapters
    command.carries("adapters")
    if adapters is None:
        return
    command.flag("--enable-lora", True)
    command.flag("--max-loras", adapters.max_loras)
    command.flag("--max-lora-rank", adapters.slot_rank)
    command.flag("--max-cpu-loras", adapters.max_cpu_loras)
    command.not_carried(f"the {adapters.count} adapters: name each and its folder with --lora-modules NAME=PATH")
    if adapters.placement != "everywhere":
        command.not_carried("adapters.placement: start each server with its own adapters, and route by adapter")
