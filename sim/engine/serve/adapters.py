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
from sim.engine.time.events import Clock


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

    def __init__(self, spec: AdapterSpec, queue: AdapterQueue, prices: AdapterPrices, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self.of = queue.of
        self._queue = queue
        self._prices = prices
        self._host: dict[int, None] = {}
        self._slots: dict[int, None] = {}
        """Adapters in slots, the next to go first; the base model is among them where it takes a slot."""
        self._use = _Use()
        self.n_running = 0
        """Different adapters of the latest iteration begun, without the base model."""
        self._taken: set[int] | None = None
        """Adapters that run in the iterations in flight, where those take all slots."""
        self._since_ns = -1
        """Requests that wait for a slot are counted up to here; -1: nothing is in flight."""
        queue.changing = self._count_waiting
        self._batch: set[int] | None = None
        """Adapters of the latest iteration, all in slots and used last; None: others have been used since."""
        self._slotless = set[int]() if spec.base_has_slot else {BASE_MODEL}
        """Adapters that run without a slot."""
        self.reset()

    def reset(self) -> None:
        """The machine starts anew."""
        spec = self._spec
        self._host.clear()
        self._slots.clear()
        self._batch = None
        self._since_ns = -1
        if spec.base_has_slot:
            self._slots[BASE_MODEL] = None
        for adapter in range(len(spec.ranks)) if spec.loaded else ():
            _use(self._host, adapter, spec.max_cpu_loras)
            if not spec.base_has_slot:
                _use(self._slots, adapter, spec.max_loras)

    @property
    def extra_ticks(self) -> int:
        """Ticks that the adapters of the latest iteration begun add to it, loads included."""
        return self._prices.extra_ticks

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
            missing = self.wanted(batch, batch.run, batch.decodes) - self._slotless - set(self._slots)
            if batch.span is not None and missing:
                return f"adapter {min(missing)} runs without a slot"
        if len(self._slots) > self._spec.max_loras or len(self._host) > self._spec.max_cpu_loras:
            return f"{len(self._slots)} adapters in slots, {len(self._host)} in host memory"
        counts = Counter(self.of[seq.id] for seq in self._queue)
        return None if counts == self._queue.counts else f"{counts} wait, and {self._queue.counts} are counted"

    def wanted(self, batch: MicroBatch, run: tuple[tuple[int, int], ...], decodes: bool) -> set[int]:
        """Adapters of an iteration of the prompt chunks of *run* and, where it *decodes*, of all decodes; the base model among
        them."""
        of = self.of
        wanted = {of[id_] for id_, _ in run}
        if decodes:
            wanted.update([of[id_] for id_ in batch.decoding])
        return wanted

    def begin(self, batch: MicroBatch, wanted: set[int], rows: int, ticks: int) -> bool:
        """Bring the *wanted* adapters of the iteration that starts at *ticks* to slots, and have it priced with them; whether any
        was loaded. It has *rows* tokens."""
        wanted, load_ticks = wanted - self._slotless, 0
        if wanted != self._batch:
            load_ticks = (
                self._share_out(wanted, ticks) if self._spec.base_has_slot else self._take_in_turn(wanted, ticks)
            )
            self._batch = wanted
        ranks = [self._spec.ranks[adapter] for adapter in wanted if adapter != BASE_MODEL]
        self._prices.extra_ticks = load_ticks + to_ticks(self._spec.step_s(rows, ranks))
        self.n_running = len(ranks)
        running = {self.of[id_] for id_ in batch.admitted} - self._slotless
        self._taken = running | self._slotless if len(running) >= self._spec.max_loras else None
        self._since_ns = ticks >> TICK_BITS
        return load_ticks > 0

    def _take_in_turn(self, wanted: set[int], ticks: int) -> int:
        """Ticks in which the *wanted* adapters come to slots, one after the other; each counts as used when it does."""
        spec, spent = self._spec, 0
        # The scheduler's set has no order; that of the numbers stands in.
        for adapter in sorted(wanted):
            spent += self._read(adapter, ticks + spent)
            if adapter not in self._slots:
                spent += self._loaded(adapter, ticks + spent, spec.slot_s(spec.ranks[adapter]), 1)
            _use(self._slots, adapter, spec.max_loras)
        return spent

    def _share_out(self, wanted: set[int], ticks: int) -> int:
        """The same where all of them count as used first, and none is evicted for another of them: SGLang's
        `LoRAMemoryPool.prepare_lora_batch`. A slot is cleared for the base model, which is no load."""
        spec, slots, spent = self._spec, self._slots, 0
        for adapter in sorted(wanted & self._host.keys()):
            _use(self._host, adapter, spec.max_cpu_loras)
        for adapter in sorted(wanted - {BASE_MODEL}):
            spent += self._read(adapter, ticks + spent)
            if adapter not in slots:
                spent += self._loaded(adapter, ticks + spent, spec.slot_s(spec.ranks[adapter]), 1)
        others = [adapter for adapter in slots if adapter not in wanted]
        others.sort(key=lambda adapter: adapter == BASE_MODEL)
        for adapter in others[: max(len(others) + len(wanted) - spec.max_loras, 0)]:
            del slots[adapter]
        for adapter in sorted(wanted) if spec.eviction == "lru" else sorted(wanted - slots.keys()):
            slots.pop(adapter, None)
            slots[adapter] = None
        return spent

    def _read(self, adapter: int, ticks: int) -> int:
        """Ticks in which *adapter* comes to host memory, where it counts as used now."""
        spec, spent = self._spec, 0
        if adapter not in self._host:
            spent = self._loaded(adapter, ticks, spec.disk_s(spec.ranks[adapter]), 0)
        dropped = _use(self._host, adapter, spec.max_cpu_loras)
        if dropped is not None:
            self._slots.pop(dropped, None)
        return spent

    def _loaded(self, adapter: int, ticks: int, seconds: float, to: int) -> int:
        spent = to_ticks(seconds)
        self._use.loads.append((ticks >> TICK_BITS, adapter, to, spent >> TICK_BITS))
        return spent

    def _count_waiting(self, now_ns: int = -1) -> None:
        """Count the requests in the queue whose adapter none of the running sequences has, where these have as many as there are
        slots: up to now, since the queue is about to change, or up to *now_ns*."""
        since_ns = self._since_ns
        if since_ns < 0:
            return
        now_ns = self._clock.now_ns if now_ns < 0 else now_ns
        if now_ns > since_ns:
            self._since_ns = now_ns
            if self._taken is not None and self._queue:
                counts = self._queue.counts
                n = len(self._queue) - sum([counts.get(adapter, 0) for adapter in self._taken])
                self._use.waiting_ns += (now_ns - since_ns) * n

    def ran(self, start_ticks: int, end_ticks: int) -> None:
        """The iterations begun last have lasted from *start_ticks* to *end_ticks*."""
        end_ns = end_ticks >> TICK_BITS
        self._count_waiting(end_ns)
        self._since_ns = -1
        use, ns = self._use, end_ns - (start_ticks >> TICK_BITS)
        use.busy_ns += ns
        use.adapter_ns += ns * self.n_running
        use.most = max(use.most, self.n_running)

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
