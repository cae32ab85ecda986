"""LoRA adapters in commands of vLLM: read and written."""

from __future__ import annotations

from hwmodels.adapters import slot_rules
from sim.errors import RooftraceError
from sim.launch.adapters import at_least_one, put_adapters, write_adapters
from sim.launch.reading import Reading
from sim.launch.writing import Writing

_RANK = 16
"""The rank of slots where the command does not say it (config/lora.py)."""


def read(reading: Reading) -> None:
    """Put the slots that the command says, and as many adapters as it names, of the rank of the slots."""
    if not reading.switch("enable-lora"):
        return
    rules = slot_rules("vllm")
    slots, rank = at_least_one(reading, "max-loras") or rules.max_loras, at_least_one(reading, "max-lora-rank") or _RANK
    if rank not in rules.ranks:
        raise RooftraceError(f"--max-lora-rank is one of {', '.join(map(str, rules.ranks))} in vLLM; got {rank}")
    server = {
        "max_loras": slots,
        "max_lora_rank": rank,
        "max_cpu_loras": at_least_one(reading, "max-cpu-loras"),
        "target_modules": reading.words("lora-target-modules") or None,
    }
    put_adapters(reading, named=len(reading.words("lora-modules")), rank=rank, server=server)


def write(command: Writing) -> None:
    adapters = write_adapters(command, slots="--max-loras", in_host_memory="--max-cpu-loras", paths="--lora-modules")
    if adapters is not None:
        command.several("--lora-target-modules", adapters.target_modules)
