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
        return np.repeat(of_spans, self.n)

    @cached_property
    def step(self) -> IntArray:
        """The position of each within its span, from 0."""
        return np.arange(int(self.n.sum())) - self.each(np.cumsum(self.n) - self.n)

    @cached_property
    def start_ns(self) -> IntArray:
        return self._span_start_ns + (self._start >> TICK_BITS)

    @property
    def duration_ns(self) -> IntArray:
        end = self._start + self._first
        if self._growth is not None:
            end += self.step * self._growth
        return self._span_start_ns + (end >> TICK_BITS) - self.start_ns

    @cached_property
    def _span_start_ns(self) -> IntArray:
        return self.column("start_ns")

    @cached_property
    def _first(self) -> IntArray:
        return self.column("first_ticks")

    @cached_property
    def _growth(self) -> IntArray | None:
        """None where no iteration is longer than the one before it."""
        return self.column("growth_ticks") if self._spans["growth_ticks"].any() else None

    @cached_property
    def _start(self) -> IntArray:
        """Ticks from the span's start in nanoseconds."""
        start = self.column("start_frac") + self.step * self._first
        if self._growth is not None:
            start += self._growth * (self.step * (self.step - 1) // 2)
        return start


@dataclass(frozen=True, slots=True)
class IterationRows:
    """The rows of one replica's iterations."""

    replica: int
    queued_ns: IntArray
    taken: Callable[[IntArray, IntArray], IntArray] | None
    """KV blocks that sequences take from one round to another; None where every span is one iteration."""
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
        first = of.each(of.counts("kv_blocks_used"))
        if self.taken is None:
            return first
        round_ = of.each(of.counts("round"))
        return first + self.taken(round_ + 1, round_ + of.step + 1)

    def _waiting(self, spans: NDArray[Any], of: Expanded) -> IntArray:
        """Requests in the queue: as many as when the span started, and those that have joined since."""
        then = spans["waiting"] - np.searchsorted(self.queued_ns, spans["start_ns"], side="right")
        return of.each(then) + np.searchsorted(self.queued_ns, of.start_ns, side="right")


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
