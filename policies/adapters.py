"""The limit of LoRA adapters in a batch, around any scheduler that admits the queue in its order and stops at the first that does
not fit.

vLLM (v1/core/sched/scheduler.py, `Scheduler.schedule`, 0.32.0 and 0.33.0): a waiting request whose adapter would be one more than
`max_loras` different ones is passed over, and those behind it are looked at; it may wait for as long as others keep the slots.
SGLang (managers/scheduler.py of 0.5.23): the same with `max_loras_per_batch`, where the base model is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from policies.schedulers import checked_as_given, setting_at_least
from policies.view import BASE_MODEL, AdaptersSeen, Plan, PlanFunction, ReplicaView, Scheduler, WaitingSeq, plan_of


class Admissible(Sequence[WaitingSeq]):
    """The waiting requests that are not passed over if each that is looked at is admitted; found as they are looked at."""

    def __init__(self, queue: Sequence[WaitingSeq], seen: AdaptersSeen, taken: set[int], rule: MaxLoras) -> None:
        self._queue = queue
        self._seen = seen
        self._taken = taken
        self._rule = rule

    def __iter__(self) -> Iterator[WaitingSeq]:
        taken, of, most, counts_base = set(self._taken), self._seen.of, self._rule.max_loras, self._rule.counts_base
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


@checked_as_given
@dataclass(frozen=True)
class MaxLoras:
    """A batch has at most *max_loras* different adapters: waiting requests that would bring one more are passed over.

    Inside is a scheduler that admits in the order of the queue and stops at the first that does not fit.
    """

    inner: Scheduler | PlanFunction
    max_loras: int = 1
    counts_base: bool = False
    """The base model takes one of the places, as in SGLang."""
    counts_leaving: bool = False
    """Sequences that have had their last token and have not left yet keep their adapter's place, as in vLLM from 0.33 on. Before it
    counted those that take a step."""

    def __post_init__(self) -> None:
        plan_of(self.inner)
        setting_at_least(self, "max_loras", 1)

    @cached_property
    def _plan_inner(self) -> PlanFunction:
        return plan_of(self.inner)

    def plan(self, view: ReplicaView, /) -> Plan:
        seen = view.adapters
        if seen is None or not view.waiting:
            return self._plan_inner(view)
        taken = seen.running(leaving=self.counts_leaving)
        asked = taken.union(seen.waiting)
        if not self.counts_base:
            taken.discard(BASE_MODEL)
            asked.discard(BASE_MODEL)
        if len(asked) <= self.max_loras:
            return self._plan_inner(view)
        shown = Admissible(view.waiting, seen, taken, self)
        return self._plan_inner(replace(view, waiting=shown))
