"""The limit of LoRA adapters in a batch: which requests it passes over, and a wrapper for schedulers without a rule of their own.

vLLM (v1/core/sched/scheduler.py, `Scheduler.schedule`, 0.24.0 to 0.33.0): a waiting request whose adapter would be one more than
`max_loras` different ones is passed over, and those behind it are looked at; it may wait for as long as others keep the slots.
Releases before 0.32 put a request that was passed over ahead of preempted ones, which is not modelled.
SGLang (managers/scheduler.py of 0.5.23, `can_schedule_lora_req`): the same with `max_loras_per_batch`, where the base model is one
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from policies.schedulers import setting_at_least
from policies.view import BASE_MODEL, AdaptersSeen, Plan, PlanFunction, ReplicaView, Scheduler, WaitingSeq, plan_of

ADAPTERS_SAY = "a scenario says it as adapters.max_loras"
"""The reason in `not_settings` of schedulers whose limit of adapters the scenario sets."""


class Admissible(Sequence[WaitingSeq]):
    """The waiting requests that are not passed over if each that is looked at is admitted; found as they are looked at."""

    def __init__(
        self, queue: Sequence[WaitingSeq], seen: AdaptersSeen, taken: set[int], most: int, *, counts_base: bool
    ) -> None:
        """*taken*: adapters that have their places, of which there are *most*; *counts_base*: the base model needs one, too."""
        self._queue = queue
        self._seen = seen
        self._taken = taken
        self._most = most
        self._counts_base = counts_base

    def __iter__(self) -> Iterator[WaitingSeq]:
        taken, of, most, counts_base = set(self._taken), self._seen.of, self._most, self._counts_base
        latest: WaitingSeq | None = None
        if len(taken) < most:
            for latest in self._queue:
                adapter = of[latest.id]
                if adapter != BASE_MODEL or counts_base:
                    taken.add(adapter)
                yield latest
                if len(taken) >= most:
                    break
            else:
                return
        yield from self._seen.among(self._queue, taken if counts_base else taken | {BASE_MODEL}, latest)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    @overload
    def __getitem__(self, index: int) -> WaitingSeq: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[WaitingSeq, ...]: ...

    def __getitem__(self, index: int | slice) -> WaitingSeq | tuple[WaitingSeq, ...]:
        return tuple(self)[index]


def admissible(
    queue: Sequence[WaitingSeq], seen: AdaptersSeen | None, most: int, *, leaving: bool, counts_base: bool = False
) -> Sequence[WaitingSeq]:
    """*queue* without the requests that are passed over where a batch has at most *most* adapters. *leaving*: sequences that take
    no step any more keep their adapter's place; *counts_base*: the base model takes a place like an adapter."""
    if seen is None or not queue:
        return queue
    taken = seen.running(leaving=leaving)
    asked = taken.union(seen.waiting)
    if not counts_base:
        taken.discard(BASE_MODEL)
        asked.discard(BASE_MODEL)
    return queue if len(asked) <= most else Admissible(queue, seen, taken, most, counts_base=counts_base)


@dataclass(frozen=True)
class MaxLoras:
    """A batch has at most *max_loras* different adapters: waiting requests that would bring one more are passed over.

    Inside is a scheduler without a rule of its own that admits in the order of the queue and stops at the first that does not fit.
    """

    inner: Scheduler | PlanFunction
    max_loras: int = 1
    counts_base: bool = False
    """The base model takes one of the places."""

    def __post_init__(self) -> None:
        plan_of(self.inner)
        setting_at_least(self, "max_loras", 1)

    @cached_property
    def _plan_inner(self) -> PlanFunction:
        return plan_of(self.inner)

    def plan(self, view: ReplicaView, /) -> Plan:
        shown = admissible(view.waiting, view.adapters, self.max_loras, leaving=False, counts_base=self.counts_base)
        return self._plan_inner(view if shown is view.waiting else replace(view, waiting=shown))
