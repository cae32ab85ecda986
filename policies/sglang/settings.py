"""Settings of SGLang's scheduler, under the release's names, and what follows from settings alone: seats and the ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar, Self

from policies.adapters import ADAPTERS_SAY
from policies.schedulers import at_least

INIT_NEW_TOKEN_RATIO = 0.7
"""Share of what a request may still emit that is kept for it at first; this and the next two: environ.py."""
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
"""The lowest share, as a part of the first one."""
NEW_TOKEN_RATIO_DECAY_STEPS = 600
"""Decode steps in which it falls so far."""
PROMPT_STEP = 1000
"""Weight of a step with prompt tokens towards `scheduler_recv_interval`; one of decodes has 1: environ.py."""
BY_THE_CACHE = ("dfs-weight", "hrrn", "shortest-prefill-first")


@dataclass(frozen=True)
class Settings:
    """Settings of `Sglang`, refused where the release refuses them or where they are not supported here."""

    chunked_prefill_size: int = 8192
    """Prompt tokens of an iteration at most, one prompt being cut at a time; -1: none is. Scenarios take that of their device."""
    max_prefill_tokens: int = 16384
    """No further prompt joins an iteration that has as many tokens."""
    prefill_max_requests: int | None = None
    """Prompts of an iteration at most."""
    max_running_requests: int | None = None
    """None: 2,048, or up to 4,096 where the pool holds more than four times the model's context (kv_cache_configurator.py)."""
    schedule_policy: str = "fcfs"
    """fcfs; lof: requests that may emit most first; or lpm: longest prefix-cache hits first, as long as no more than 128 wait.
    Without a prefix cache lpm is fcfs."""
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    scheduler_recv_interval: int = 1
    """Decode steps between two polls for new requests; a step with prompt tokens is always followed by one."""
    disable_overlap_schedule: bool = False
    """False: each iteration is planned while the one before it runs; see `policies.view.plans_ahead`."""
    ignore_eos: bool = False
    """Every request emits all that it may, and its client has said so, as benchmarks do: all of it is kept for it."""
    disable_radix_cache: bool = False
    """True: nothing is looked up, and with *ignore_eos* a request joins as soon as the pool lasts at each of the ends to come. The
    setting `memory.prefix_caching` decides whether KV is found again."""

    prefill_decode_interval: int = 0
    """Rounds without prompts after a step with prompt tokens, with ranks after one on any of them. Rounds in which nothing runs
    anywhere take no time."""
    prefill_decode_interval_min_bs: int = 0
    """A smaller decode batch ends these rounds on its rank."""

    max_loras_per_batch: int | None = None
    """The most different LoRA adapters in a batch, the base model counted as one; None: no request asks for an adapter."""

    enable_prefill_delayer: bool = False
    """Ranks start prompts together (`policies.sglang.delayer`)."""
    prefill_delayer_max_delay_passes: int = 30
    prefill_delayer_token_usage_low_watermark: float | None = None
    prefill_delayer_queue_min_ratio: float | None = None
    prefill_delayer_max_delay_ms: float | None = None
    """None: 5,000."""

    not_settings: ClassVar[Mapping[str, str]] = {"max_loras_per_batch": ADAPTERS_SAY}
    schedule_policies: ClassVar[tuple[str, ...]] = ("fcfs", "lof", "lpm")
    """Orders of the queue that are there; (): whichever the release has."""

    def __post_init__(self) -> None:
        if self.chunked_prefill_size != -1:
            at_least("chunked_prefill_size", self.chunked_prefill_size, 1)
        at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        at_least("scheduler_recv_interval", self.scheduler_recv_interval, 1)
        for name in ("prefill_max_requests", "max_running_requests", "max_loras_per_batch"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        at_least("prefill_decode_interval", self.prefill_decode_interval, 0)
        at_least("prefill_decode_interval_min_bs", self.prefill_decode_interval_min_bs, 0)
        at_least("prefill_delayer_max_delay_passes", self.prefill_delayer_max_delay_passes, 1)
        if self.enable_prefill_delayer and self.disable_overlap_schedule:
            raise ValueError("enable_prefill_delayer needs overlap; leave disable_overlap_schedule out")
        if self.enable_prefill_delayer and self.prefill_decode_interval_min_bs:
            raise ValueError(
                "with prefill_decode_interval_min_bs some ranks ask for prompts while others do not, and the release's prefill "
                "delayer waits for all of them for ever; leave one of the two out"
            )
        if self.scheduler_recv_interval > PROMPT_STEP:
            raise ValueError(f"scheduler_recv_interval is at most {PROMPT_STEP}; got {self.scheduler_recv_interval}")
        if self.schedule_policies and self.schedule_policy not in self.schedule_policies:
            self._refuse_policy()
        if not (isfinite(self.schedule_conservativeness) and self.schedule_conservativeness >= 0):
            raise ValueError(
                f"schedule_conservativeness is a number of at least 0; got {self.schedule_conservativeness!r}"
            )
        if self.enable_mixed_chunk and self.chunked_prefill_size <= (self.max_running_requests or 4096):
            raise ValueError(
                f"enable_mixed_chunk leaves no prompt tokens in a chunk of {self.chunked_prefill_size} beside "
                f"{self.max_running_requests or 'up to 4096'} decodes; give max_running_requests below chunked_prefill_size"
            )

    def _refuse_policy(self) -> None:
        if self.schedule_policy in BY_THE_CACHE:
            raise ValueError(
                f"schedule_policy {self.schedule_policy} orders requests by the prefix cache in a way that is not modelled here; "
                "lpm is the one that is"
            )
        raise ValueError(f"schedule_policy is fcfs, lof or lpm; got {self.schedule_policy!r}")

    def with_max_loras(self, max_loras: int) -> Self:
        """The same with a limit of adapters in a batch."""
        return replace(self, max_loras_per_batch=max_loras)

    @property
    def by_prefix(self) -> bool:
        """Whether the queue is sorted by what its requests would find."""
        return self.schedule_policy == "lpm"

    @property
    def counts_steps(self) -> bool:
        """See `policies.view.counts_steps`."""
        return self.prefill_decode_interval > 0

    @property
    def async_scheduling(self) -> bool:
        return not self.disable_overlap_schedule

    @property
    def to_its_end(self) -> bool:
        """Whether requests join by `add_one_req_ignore_eos`."""
        return self.ignore_eos and self.disable_radix_cache

    @property
    def first_ratio(self) -> float:
        return min(INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0)

    @property
    def last_ratio(self) -> float:
        return min(self.first_ratio * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)

    def ratio_after(self, ratio: float, steps: int) -> float:
        """The new-token ratio *steps* decode steps after it was *ratio*; taken off step by step, for floats to round as there."""
        least = self.last_ratio
        decay = (self.first_ratio - least) / NEW_TOKEN_RATIO_DECAY_STEPS
        for _ in range(steps if decay else 0):
            ratio -= decay
            if ratio <= least:
                return least
        return ratio

    def seats(self, pool_tokens: int, context_tokens: int) -> int:
        """Requests that run at once over a KV pool of so many tokens: `resolve_max_num_reqs`."""
        seats = self.max_running_requests
        if seats is None:
            seats = max(min(int(pool_tokens / context_tokens * 512), 4096), 2048)
        return max(min(seats, pool_tokens // 2), 1)
