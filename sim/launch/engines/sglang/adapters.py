"""LoRA adapters in commands of SGLang: read and written (release 0.5.23, srt/arg_groups/fields/lora.py and lora_hook.py)."""

from __future__ import annotations

from hwmodels.adapters import slot_rules
from sim.launch.adapters import at_least_one, put_adapters, write_adapters
from sim.launch.reading import Reading
from sim.launch.writing import Writing

_RANK = 16
"""The rank of adapters where the command does not give --max-lora-rank; slots then have the highest rank of the adapters."""


def read(reading: Reading) -> None:
    """Put the slots that the command says, and as many adapters as it names."""
    enabled, paths = reading.switch("enable-lora"), reading.words("lora-paths")
    if enabled is False or not (enabled or paths):
        return
    rank = at_least_one(reading, "max-lora-rank")
    server = {
        "max_loras": at_least_one(reading, "max-loras-per-batch") or slot_rules("sglang").max_loras,
        "max_lora_rank": rank,
        "max_cpu_loras": at_least_one(reading, "max-loaded-loras"),
        "target_modules": reading.words("lora-target-modules") or None,
        "eviction": reading.text("lora-eviction-policy"),
    }
    why = f"of rank {_RANK}, since their files say the rank" if rank is None else "of the rank of the slots"
    put_adapters(reading, named=len(paths), rank=rank or _RANK, server=server, why=why)


def write(command: Writing) -> None:
    adapters = write_adapters(
        command, slots="--max-loras-per-batch", in_host_memory="--max-loaded-loras", paths="--lora-paths"
    )
    if adapters is not None:
        command.several("--lora-target-modules", adapters.target_modules or slot_rules("sglang").modules)
        command.flag("--lora-eviction-policy", adapters.eviction)
