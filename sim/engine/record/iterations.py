"""The table of a run's iterations, made from its spans: one row each, a column when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.record.streaming import IntArray
from sim.engine.time.clock import TICK_BITS


class IterationTable(Mapping[str, NDArray[Any]]):
    """Columns by name. Each is worked out once, by its entry of *makers*: most readers need few of them."""

    def __init__(self, makers: Mapping[str, Callable[[], NDArray[Any]]]) -> None:
        self._makers = makers
        self._made: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def joined(tables: Sequence[Mapping[str, NDArray[Any]]]) -> Mapping[str, NDArray[Any]]:
    """*tables* of the same columns under each other."""
    if len(tables) == 1:
        return tables[0]

    def maker(name: str) -> Callable[[], NDArray[Any]]:
        return lambda: np.concatenate([table[name] for table in tables])

    return IterationTable({name: maker(name) for name in tables[0]})


class Expanded:
    """The iterations of some spans of a replica, one after another. Arrays have an entry for each iteration."""

    def __init__(self, spans: NDArray[Any]) -> None:
        self._spans = spans
        self.n: IntArray = spans["n"].astype(np.int64)

    def column(self, name: str) -> NDArray[Any]:
        """A field of the spans."""
        return self.each(np.ascontiguousarray(self._spans[name]))

    def counts(self, name: str) -> IntArray:
        """A field of the spans, in 64 bits, one entry a span."""
        return self._spans[name].astype(np.int64)

    def each(self, of_spans: NDArray[Any]) -> NDArray[Any]:
        """Values of spans, for the iterations of each."""
        return of_spans[self._span]

    @cached_property
    def _span(self) -> IntArray:
        # An index is looked up in half the time that np.repeat takes.
        return np.repeat(np.arange(len(self.n)), self.n)

    @cached_property
    def step(self) -> IntArray:
        """The position of each within its span, from 0."""
        return np.arange(len(self._span)) - self.each(np.cumsum(self.n) - self.n)

    @cached_property
    def start_ns(self) -> IntArray:
        # Ticks from the span's start in nanoseconds.
        start = self.column("first_ticks")
        start *= self.step
        if self._spans["growth_ticks"].any():
            grown = self.step * (self.step - 1)
            grown >>= 1
            grown *= self.column("growth_ticks")
            start += grown
        start += self.column("start_frac")
        start >>= TICK_BITS
        start += self.column("start_ns")
        return start

    @property
    def duration_ns(self) -> IntArray:
        """The time to the next of the span and, of its last, to the span's end."""
        start_ns = self.start_ns
        duration_ns = np.empty_like(start_ns)
        np.subtract(start_ns[1:], start_ns[:-1], out=duration_ns[:-1])
        last = np.cumsum(self.n) - 1
        duration_ns[last] = self.after(self.n) - start_ns[last]
        return duration_ns

    def after(self, step: IntArray) -> IntArray:
        """The instant after so many iterations of each span, ns."""
        ticks = self.counts("start_frac") + step * self._spans["first_ticks"]
        ticks += self._spans["growth_ticks"] * (step * (step - 1) // 2)
        return self._spans["start_ns"] + (ticks >> TICK_BITS)


@dataclass(frozen=True, slots=True)
class IterationRows:
    """The rows of one replica's iterations."""

    replica: int
    queued_ns: IntArray
    taken: Callable[[int, int], IntArray] | None
    """KV blocks that sequences have taken in all before each round from one to another, since the first; None where every span is
    one iteration."""
    has_prefix_cache: bool
    of_tiers: Mapping[str, NDArray[Any] | None]
    """Transfers to be counted while they are under way, by the name of their column; None where this replica has no tiers."""
    of_adapters: tuple[NDArray[Any] | None, ...] = ()
    """Records of how many adapters run, structured by EXTRA; None where this replica has no adapters, empty where none has."""

    def table(self, spans: NDArray[Any]) -> IterationTable:
        of = Expanded(spans)
        decode_tokens = partial(_decode_tokens, of)
        makers: dict[str, Callable[[], NDArray[Any]]] = {
            "replica": lambda: of.each(np.full(len(spans), self.replica, np.int32)),
            "lane": lambda: of.column("lane"),
            "start_ns": lambda: of.start_ns,
            "duration_ns": lambda: of.duration_ns,
            "rows": lambda: of.each(of.counts("prefill_rows") + decode_tokens()),
            "prefill_tokens": lambda: of.each(of.counts("prefill_rows")),
            "decode_tokens": lambda: of.each(decode_tokens()),
            "sequences": lambda: of.each(of.counts("decode_seqs") + of.counts("prefill_chunks")),
            "running": lambda: of.each(of.counts("running")),
            "waiting": lambda: self._waiting(spans, of),
            "kv_tokens": lambda: of.column("decode_kv_tokens") + of.each(of.counts("decode_seqs")) * of.step,
            "kv_blocks_used": lambda: self._used(of),
            "emitted_tokens": lambda: of.each(of.counts("emitted")),
            "bubble_ns": lambda: of.column("bubble_ns"),
        }
        if self.has_prefix_cache:
            makers["prefix_hit_tokens"] = lambda: of.column("found")
            makers["prefix_evictions"] = lambda: of.each(of.counts("evicted"))
        if self.of_tiers:
            tiered = all(transfers is not None for transfers in self.of_tiers.values())
            makers["loaded_tokens"] = lambda: of.column("loaded") if tiered else of.each(np.full(len(spans), -1))
        for name, transfers in self.of_tiers.items():
            makers[name] = partial(_under_way, transfers, of)
        for extras in self.of_adapters:
            makers["adapters"] = partial(_adapters, extras, spans, of)
        return IterationTable(makers)

    def _used(self, of: Expanded) -> IntArray:
        """KV blocks in use. The recorded value is of the span's first iteration; the rounds behind that one have added theirs."""
        used = of.counts("kv_blocks_used")
        if self.taken is None or not len(used):
            return of.each(used)
        round_ = of.counts("round")
        first = int(round_.min()) + 1
        taken = self.taken(first, int((round_ + of.n).max()))
        at = round_ + 1 - first
        at_each = of.each(at)
        at_each += of.step
        return of.each(used - taken[at]) + taken[at_each]

    def _waiting(self, spans: NDArray[Any], of: Expanded) -> IntArray:
        """Requests in the queue: as many as when the span started, and those that have joined since."""
        before = np.searchsorted(self.queued_ns, spans["start_ns"], side="right")
        waiting = of.each(of.counts("waiting"))
        # Few spans see anybody join.
        joined_in = np.searchsorted(self.queued_ns, of.after(of.n - 1), side="right") > before
        if joined_in.any():
            some = Expanded(spans[joined_in])
            since = np.searchsorted(self.queued_ns, some.start_ns, side="right") - some.each(before[joined_in])
            waiting[np.flatnonzero(of.each(joined_in))] += since
        return waiting


def _decode_tokens(of: Expanded) -> IntArray:
    return of.counts("decode_seqs") * of.counts("query_tokens")


def _under_way(transfers: NDArray[Any] | None, of: Expanded) -> IntArray:
    """Requested *transfers* that have not arrived at the start of each iteration; -1 where a replica has no tiers."""
    if transfers is None:
        return of.each(np.full(len(of.n), -1))
    asked, arrived = np.sort(transfers["asked_ns"]), np.sort(transfers["arrived_ns"])
    return np.searchsorted(asked, of.start_ns, side="right") - np.searchsorted(arrived, of.start_ns, side="right")


def _adapters(extras: NDArray[Any] | None, spans: NDArray[Any], of: Expanded) -> IntArray:
    """Different adapters in each iteration: as many as when its span started, which ends where they change."""
    if extras is None:
        return of.each(np.full(len(spans), -1))
    found = np.zeros(len(spans), np.int64)
    start_ticks = (spans["start_ns"] << TICK_BITS) + spans["start_frac"]
    for lane in np.unique(spans["lane"]).tolist():
        mine = spans["lane"] == lane
        found[mine] = latest(extras[extras["lane"] == lane], start_ticks[mine])
    return of.each(found)


def latest(extras: NDArray[Any], start_ticks: IntArray) -> IntArray:
    """The amounts of *extras*, of one kind and micro-batch, for iterations that start at *start_ticks*: for each the latest that
    begins by then."""
    at = np.searchsorted(extras["start_ticks"], start_ticks, side="right")
    return np.concatenate((np.zeros(1, np.int64), extras["amount"]))[at]
