"""The scheduler of an installed vLLM, which decides itself what each iteration runs: `worker` runs beside the release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    adapters: int = 0
    """Adapters that requests ask for in turn."""

    rules = Rules()
    """Rules of the engine around the scheduler: what it drafts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("max_loras", 0), ("adapters", 0)):
            setting_at_least(self, name, least)
        if (self.max_loras > 0) != (self.adapters > 0):
            raise ValueError(f"max_loras and adapters go together; got {self.max_loras} and {self.adapters}")

    def connect(self, engine: Engine, /) -> Driven:
        """The release, started for *engine*; DrivingError where it cannot be driven."""
        names = ("max_num_batched_tokens", "max_num_seqs", "async_scheduling", "max_loras")
        return self.connected(_WORKER, engine, {name: getattr(self, name) for name in names})

    def asked(self, id_: int, seed: int, /) -> Asked:
        """Features that a request uses and workloads have no column for: its adapter, its grammar."""
        return Asked(
            adapter=id_ % self.adapters + 1 if self.adapters else 0,
            grammar_ns=self.grammar_ns(id_, seed),
        )
