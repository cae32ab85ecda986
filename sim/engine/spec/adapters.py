"""The LoRA adapters that a model on a machine can serve: slots, costs, and the place of each at the start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Slots on the device and in host memory, and what adapters add to iterations.

    Adapters of a batch are brought to slots before it starts, in the iteration itself: from disk to host memory, where the least
    recently used one is dropped, and from there to a slot of the device, likewise unless *eviction* says otherwise.
    """

    ranks: tuple[int, ...]
    """The rank of each adapter."""
    max_loras: int
    """Slots on the device."""
    max_cpu_loras: int
    """Adapters that host memory keeps, those in slots included."""
    step_s: Callable[[int, Collection[int]], float] = field(hash=False)
    """(tokens of the iteration, the ranks of the different adapters among them) -> seconds that adapters add to an iteration."""
    disk_s: Callable[[int], float] = field(hash=False)
    """Seconds to read an adapter of a rank into host memory."""
    slot_s: Callable[[int], float] = field(hash=False)
    """Seconds to copy an adapter of a rank from host memory to a slot."""
    loaded: bool = True
    """At the start all adapters have been loaded once, in order, as far as there is room."""
    base_has_slot: bool = False
    """The base model takes a slot like an adapter, is in one at the start, and gives it up if no adapter can. Slots are then filled
    in iterations alone, and no adapter gives its slot up for another of the same iteration (SGLang). False: each adapter takes the
    place of the one that was used longest ago, be that of the same iteration (vLLM)."""
    eviction: Literal["lru", "fifo"] = "lru"
    """Where the base model has a slot: the adapter that gives its slot up is the one used longest ago, or the first that came."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks has a rank of at least 1 for each adapter; got {self.ranks!r}")
        if self.max_loras < 1:
            raise ValueError(f"max_loras is at least 1; got {self.max_loras}")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is at least max_loras ({self.max_loras}), since host memory keeps those in slots as well; got "
                f"{self.max_cpu_loras}"
            )
