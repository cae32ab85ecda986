"""The scheduler of an installed vLLM, which decides itself what each iteration runs: `worker` runs beside the release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from policies.adapters import ADAPTERS_SAY
from policies.driving import Asked, Driven, Engine
from policies.installed.settings import Installed
from policies.schedulers import setting_at_least
from policies.vllm_settings import Rules

_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class VllmInstalled(Installed):
    """The scheduler class of the vLLM that an interpreter has, with its own KV blocks and its own prefix cache.

    *options* are further settings of the release's `SchedulerConfig`.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    async_scheduling: bool = True
    max_loras: int = 0
    """Adapters that a step may have; 0: there are none."""

    not_settings: ClassVar[Mapping[str, str]] = {
        "max_loras": ADAPTERS_SAY,
        "adapters": "a scenario says it as adapters.count",
    }
    rules = Rules()
    """Rules of the engine around the scheduler: what it drafts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_loras", 0)):
            setting_at_least(self, name, least)

    def with_max_loras(self, max_loras: int) -> Self:
        """The same with a limit of adapters in a step."""
        return replace(self, max_loras=max_loras)

    def connect(self, engine: Engine, /) -> Driven:
        """The release, started for *engine*; DrivingError where it cannot be driven."""
        names = ("max_num_batched_tokens", "max_num_seqs", "async_scheduling", "max_loras")
        return self.connected(_WORKER, engine, {name: getattr(self, name) for name in names})

    def asked(self, id_: int, seed: int, /) -> Asked:
        """Features that a request uses and workloads have no column for: its grammar."""
        return Asked(grammar_ns=self.grammar_ns(id_, seed))
