"""The scheduler of an installed SGLang, which decides itself what each iteration runs: `worker` runs beside the release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from policies.driving import Asked, Driven, Engine
from policies.installed.settings import Installed
from policies.sglang.settings import Settings

_WORKER = Path(__file__).with_name("worker.py")
_NAMES = (
    "chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests", "schedule_policy", "schedule_conservativeness",
    "enable_mixed_chunk", "scheduler_recv_interval", "disable_overlap_schedule", "ignore_eos",
    "prefill_decode_interval", "prefill_decode_interval_min_bs",
)  # fmt: skip


@dataclass(frozen=True)
class SglangInstalled(Installed, Settings):
    """The scheduler class of the SGLang that an interpreter has, with its own memory pool and its own radix cache.

    Settings are those of `sglang`, with every `schedule_policy` that the release has; *options* are further server arguments of the
    release that its scheduler reads.
    """

    reserves: ClassVar[bool] = True
    schedule_policies: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        Installed.__post_init__(self)
        Settings.__post_init__(self)
        if self.enable_prefill_delayer:
            raise ValueError("an installed SGLang is driven without ranks; leave enable_prefill_delayer out")

    def connect(self, engine: Engine, /) -> Driven:
        """The release, started for *engine*; DrivingError where it cannot be driven."""
        given = {name: getattr(self, name) for name in _NAMES}
        return self.connected(
            _WORKER,
            engine,
            {
                **given,
                "max_loras": self.max_loras_per_batch or 0,
                "seats": self.seats(engine.kv_blocks * engine.block_tokens, engine.max_model_len),
                "prefix_cache": engine.prefix_cache and not self.disable_radix_cache,
            },
        )

    def asked(self, id_: int, seed: int, /) -> Asked:
        """Features that a request uses and workloads have no column for: its grammar."""
        return Asked(grammar_ns=self.grammar_ns(id_, seed))
