"""LoRA adapters of a model on a machine: which sequences ask for them, and which are in slots and in host memory.

An iteration starts when all of its adapters are in slots; loads are part of it, as in vLLM (lora/worker_manager.py,
`_apply_adapters`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from policies.routers import AdapterLoad
from policies.view import BASE_MODEL, WaitingSeq
from sim.engine.batch.micro_batch import MicroBatch, QueueView
from sim.engine.batch.prices import AdapterPrices
from sim.engine.record.columns import AdapterColumns
from sim.engine.serve.adapter_queue import AdapterQueue
from sim.engine.spec.adapters import AdapterSpec
from sim.engine.time.clock import TICK_BITS, to_ticks


@dataclass(slots=True)
class _Use:
    """Sums over the iterations of a run."""

    busy_ns: int = 0
    adapter_ns: int = 0
    waiting_ns: int = 0
    most: int = 0
    loads: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])


class SeenAdapters:
    """A `policies.view.AdaptersSeen` of a micro-batch."""

    def __init__(self, queue: AdapterQueue, batch: MicroBatch) -> None:
        self.of = queue.of
        self.waiting: Mapping[int, int] = queue.counts
        self._queue = queue
        self._batch = batch

    def among(
        self, waiting: Sequence[WaitingSeq], adapters: set[int], behind: WaitingSeq | None, /
    ) -> Iterator[WaitingSeq]:
        if isinstance(waiting, QueueView):
            return waiting.within(self._queue.among(adapters, -1 if behind is None else behind.id))
        rest = iter(waiting)
        if behind is not None:
            next(seq for seq in rest if seq.id == behind.id)
        return (seq for seq in rest if self.of[seq.id] in adapters)

    def running(self, *, leaving: bool) -> set[int]:
        batch, of = self._batch, self.of
        if leaving or not batch.leaving:
            return {of[id_] for id_ in batch.admitted}
        gone = {id_ for id_, ended in batch.leaving.items() if not ended.steps_on}
        return {of[id_] for id_ in batch.admitted if id_ not in gone}


class Adapters:
    """Slots of the device and of host memory, each the least recently used first."""

    def __init__(self, spec: AdapterSpec, queue: AdapterQueue, prices: AdapterPrices) -> None:
        self._spec = spec
        self.of = queue.of
        self._queue = queue
        self._prices = prices
        self._host: dict[int, None] = {}
        self._slots: dict[int, None] = {}
        self._use = _Use()
        self._n_running = self._n_waiting = 0
        self._batch: set[int] | None = None
        """Adapters of the latest iteration, all in slots and used last; None: others have been used since."""
        self.reset()

    def reset(self) -> None:
        """The machine starts anew."""
        spec = self._spec
        self._host.clear()
        self._slots.clear()
        self._batch = None
        for adapter in range(len(spec.ranks)) if spec.loaded else ():
            _use(self._host, adapter, spec.max_cpu_loras)
            _use(self._slots, adapter, spec.max_loras)

    def seen(self, batch: MicroBatch) -> SeenAdapters:
        """The view that schedulers have of it."""
        return SeenAdapters(self._queue, batch)

    def load(self, batches: Sequence[MicroBatch]) -> AdapterLoad:
        """The view that routers have of it."""
        running = frozenset(self.of[id_] for batch in batches for id_ in batch.admitted if id_ not in batch.leaving)
        base = {BASE_MODEL}
        return AdapterLoad(running - base, frozenset(self._queue.counts) - base, self._spec.max_loras)

    def fault(self, batches: Sequence[MicroBatch]) -> str | None:
        """The way in which slots and queue are not as they should be, if any."""
        for batch in batches:
            running = {self.of[id_] for id_, _ in batch.run}
            running.update([self.of[id_] for id_ in batch.decoding] if batch.decodes else [])
            missing = running - {BASE_MODEL} - set(self._slots)
            if batch.span is not None and missing:
                return f"adapter {min(missing)} runs without a slot"
        if len(self._slots) > self._spec.max_loras or len(self._host) > self._spec.max_cpu_loras:
            return f"{len(self._slots)} adapters in slots, {len(self._host)} in host memory"
        counts = Counter(self.of[seq.id] for seq in self._queue)
        return None if counts == self._queue.counts else f"{counts} wait, and {self._queue.counts} are counted"

    def begin(self, batch: MicroBatch, run: tuple[tuple[int, int], ...], n: int, rows: int, ticks: int) -> bool:
        """Bring the adapters of the iteration that starts at *ticks* to slots, and have it priced with them; whether any was
        loaded. It has *rows* tokens, the prompt chunks of *run* and, where *n* is not 0, all decodes."""
        of = self.of
        wanted = {of[id_] for id_, _ in run}
        if n:
            wanted.update([of[id_] for id_ in batch.decoding])
        wanted.discard(BASE_MODEL)
        load_ticks = 0
        if wanted != self._batch:
            # The scheduler's set has no order; that of the numbers stands in.
            for adapter in sorted(wanted):
                load_ticks += self._bring(adapter, ticks + load_ticks)
            self._batch = wanted
        self._prices.extra_ticks = load_ticks + to_ticks(self._spec.step_s(rows, len(wanted)))
        self._n_running = len(wanted)
        self._n_waiting = self._without_slot(batch)
        return load_ticks > 0

    def _bring(self, adapter: int, ticks: int) -> int:
        """Ticks in which *adapter* comes to a slot; it counts as used now."""
        spec, rank, spent = self._spec, self._spec.ranks[adapter], 0
        if adapter not in self._host:
            spent += self._loaded(adapter, ticks, spec.disk_s(rank), 0)
        dropped = _use(self._host, adapter, spec.max_cpu_loras)
        if dropped is not None:
            self._slots.pop(dropped, None)
        if adapter not in self._slots:
            spent += self._loaded(adapter, ticks + spent, spec.slot_s(rank), 1)
        _use(self._slots, adapter, spec.max_loras)
        return spent

    def _loaded(self, adapter: int, ticks: int, seconds: float, to: int) -> int:
        spent = to_ticks(seconds)
        self._use.loads.append((ticks >> TICK_BITS, adapter, to, spent >> TICK_BITS))
        return spent

    def _without_slot(self, batch: MicroBatch) -> int:
        """Requests in the queue whose adapter none of the running sequences has, where these have as many as there are slots."""
        queue = self._queue
        if not queue:
            return 0
        running = {self.of[id_] for id_ in batch.admitted}
        running.discard(BASE_MODEL)
        if len(running) < self._spec.max_loras:
            return 0
        counts = queue.counts
        return len(queue) - counts.get(BASE_MODEL, 0) - sum([counts.get(adapter, 0) for adapter in running])

    def ran(self, start_ticks: int, end_ticks: int) -> None:
        """The iterations begun last have lasted from *start_ticks* to *end_ticks*."""
        use, ns = self._use, (end_ticks >> TICK_BITS) - (start_ticks >> TICK_BITS)
        use.busy_ns += ns
        use.adapter_ns += ns * self._n_running
        use.waiting_ns += ns * self._n_waiting
        use.most = max(use.most, self._n_running)

    def columns(self) -> AdapterColumns:
        """The record of the run."""
        use = self._use
        return AdapterColumns(
            max_loras=self._spec.max_loras, busy_ns=use.busy_ns, adapter_ns=use.adapter_ns, waiting_ns=use.waiting_ns,
            most_running=use.most, loads=tuple(use.loads),
        )  # fmt: skip


def _use(kept: dict[int, None], adapter: int, room: int) -> int | None:
    """Note that *adapter* is used last among those that are *kept*, which have *room*; the one that is dropped for it, if any, the
    least recently used."""
    if adapter in kept:
        del kept[adapter]
        kept[adapter] = None
        return None
    dropped = None
    if len(kept) >= room:
        dropped = next(iter(kept))
        del kept[dropped]
    kept[adapter] = None
    return dropped
