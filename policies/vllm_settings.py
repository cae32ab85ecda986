"""Settings of vLLM's scheduler and the rules in which releases differ; `policies.vllm` has the decisions.

They are apart because the compiled build keeps no annotation of a setting but the name of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final, Literal, NamedTuple, Self

from policies.adapters import ADAPTERS_SAY
from policies.schedulers import setting_at_least, setting_is_fraction
from policies.view import Encodes, Largest


class Rules(NamedTuple):
    """The rules in which releases differ."""

    counts_draft_slots: bool = True
    """Slots that drafting takes count as tokens of the iteration."""
    spares_one_prompt: bool = True
    """`long_prefill_token_threshold` does not cut the prompt of a sequence that is the only one."""
    lacks: tuple[str, ...] = ()
    """Settings that came later."""
    goes_on: bool = False
    """Where the sequence of the lowest priority has preempted itself, those behind it are tried."""
    counts_leaving: bool = False
    """Sequences that have had their last token and have not left yet keep their adapter's place; otherwise only those that take a
    step do."""
    caches_verified: bool = False
    """Verified tokens can be found when their iteration has ended; otherwise when the sequence is planned for again."""
    names_next_token: bool = False
    """The name of a block has the token behind it, where a drafter reads that one: its hits lose no block."""
    drafts_if_used: bool = False
    """An iteration whose drafts no sequence can use leaves out all passes but the first of a drafter that reads the target's
    states; of others it takes all (`v1/worker/gpu/spec_decode`: `propose` of target_dependent_ar and of standalone_ar)."""


_LATE_SETTINGS: Final = ("max_num_active_seqs", "long_prefill_token_threshold_adaptive")
RELEASES: Final[dict[str, Rules]] = {
    "0.24": Rules(counts_draft_slots=False, spares_one_prompt=False, lacks=_LATE_SETTINGS),
    "0.28": Rules(spares_one_prompt=False, lacks=_LATE_SETTINGS),
    "0.32": Rules(),
    "0.33": Rules(goes_on=True, counts_leaving=True, caches_verified=True, names_next_token=True, drafts_if_used=True),
}
"""The releases whose rules are known, the oldest first."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of `policies.vllm.Vllm`."""

    max_num_batched_tokens: int = 8192
    """Tokens of an iteration at most."""
    max_num_seqs: int = 1024
    max_num_active_seqs: int | None = None
    """Sequences admitted at once, where these are to be fewer than *max_num_seqs*."""
    max_num_scheduled_tokens: int | None = None
    """Tokens of an iteration without those that drafting adds; None: *max_num_batched_tokens*."""
    long_prefill_token_threshold: int = 0
    """Prompt tokens of one sequence in an iteration at most, when it is not the only one; 0: no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """The threshold is no lower than an even share of the budget."""
    enable_chunked_prefill: bool = True
    """False: a prompt is admitted when what is left of the budget holds all of it."""
    scheduler_reserve_full_isl: bool = True
    """A sequence is admitted when the free blocks hold all of its tokens; False: when they hold its first chunk."""
    watermark: float = 0.0
    """Share of all blocks that admission leaves free, unless nothing runs."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    """Each iteration is planned while the one before it runs; see `policies.view.plans_ahead`."""
    prefill_schedule_interval: int = 1
    """Ranks compute prompts in every so many of their common steps, unless the last such step left some waiting or none decodes.
    Without ranks it has no effect."""
    release: str = "0.32"
    """The release whose rules hold, one of `RELEASES`."""
    max_loras: int | None = None
    """The most different LoRA adapters in an iteration; None: no request asks for an adapter."""

    by_chunk: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    admits_in_turn: ClassVar[bool] = True
    encodes: ClassVar[Encodes] = "as planned"
    not_settings: ClassVar[Mapping[str, str]] = {
        "max_num_partial_prefills": "release 0.32.0 has it no more; long_prefill_token_threshold limits what one prompt takes",
        "max_long_partial_prefills": "release 0.32.0 has it no more; long_prefill_token_threshold limits what one prompt takes",
        "token_budget": "it is max_num_batched_tokens here; token_budget is sarathi's",
        "max_loras": ADAPTERS_SAY,
    }

    @property
    def orders_queue(self) -> bool:
        """See `policies.view.orders_queue`."""
        return self.scheduling_policy != "fcfs"

    def __post_init__(self) -> None:
        self._check_release()
        setting_at_least(self, "max_num_batched_tokens", 1)
        setting_at_least(self, "max_num_seqs", 1)
        setting_at_least(self, "long_prefill_token_threshold", 0)
        setting_at_least(self, "prefill_schedule_interval", 1)
        for name in ("max_num_active_seqs", "max_num_scheduled_tokens", "max_loras"):
            if getattr(self, name) is not None:
                setting_at_least(self, name, 1)
        setting_is_fraction(self, "watermark")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy is fcfs or priority; got {self.scheduling_policy!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is at least max_num_seqs ({self.max_num_seqs}), or not "
                "all sequences could take a step"
            )
        if (self.max_num_active_seqs or 1) > self.max_num_seqs:
            raise ValueError(f"max_num_active_seqs is at most max_num_seqs; got {self.max_num_active_seqs}")
        if (self.max_num_scheduled_tokens or 1) > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens is at most max_num_batched_tokens; got {self.max_num_scheduled_tokens}"
            )

    def _check_release(self) -> None:
        if self.release not in RELEASES:
            known = ", ".join(RELEASES)
            raise ValueError(
                f"release is one whose scheduler is known: {known}; got {self.release!r}; "
                "policy vllm_installed runs the scheduler of any release that is installed"
            )
        for name in self.rules.lacks:
            if getattr(self, name):
                first = next(release for release, rules in RELEASES.items() if name not in rules.lacks)
                raise ValueError(
                    f"release {self.release} has no {name}; leave it out, or take release {first} or a later one"
                )

    @cached_property
    def rules(self) -> Rules:
        """Rules that differ between releases."""
        return RELEASES[self.release]

    @cached_property
    def limits(self) -> tuple[int, int, int, bool, int]:
        """Tokens that an iteration schedules, and those with what drafting adds; sequences admitted at once; whether first come is
        first served; and prompt tokens of one sequence, 0: no limit. Every plan asks for them."""
        return (
            self.max_num_scheduled_tokens or self.max_num_batched_tokens,
            self.max_num_batched_tokens,
            self.max_num_active_seqs or self.max_num_seqs,
            self.scheduling_policy == "fcfs",
            self.long_prefill_token_threshold,
        )

    def with_max_loras(self, max_loras: int) -> Self:
        """The same with a limit of adapters in an iteration."""
        return replace(self, max_loras=max_loras)

    def never_planned(self, largest: Largest) -> str | None:
        scheduled = self.max_num_scheduled_tokens or self.max_num_batched_tokens
        if not self.enable_chunked_prefill and largest.request_tokens > scheduled:
            # Release 0.32.0 asks for a budget of its longest context then, `SchedulerConfig.verify_max_model_len`.
            return (
                f"without enable_chunked_prefill an iteration holds all tokens of a request, {largest.request_tokens} in this "
                f"workload, and max_num_batched_tokens is {scheduled}; give more, or leave enable_chunked_prefill on"
            )
        if scheduled < largest.query_tokens or self.max_num_batched_tokens < largest.drafting_tokens:
            return (
                f"max_num_batched_tokens ({min(scheduled, self.max_num_batched_tokens)}) holds no round of speculation, "
                f"{largest.drafting_tokens} tokens of a sequence; vLLM verifies a part of one, which is not modelled: give more, "
                "or draft fewer"
            )
        return None

    @property
    def counts_steps(self) -> bool:
        """See `policies.view.counts_steps`."""
        return self.prefill_schedule_interval > 1
