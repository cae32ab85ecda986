"""Invariants of every event of every run, by name; `run(..., check_invariants=True)` checks them after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.disaggregation.course import Course
from sim.engine.disaggregation.handovers import Handovers
from sim.engine.fleet.fleet import Fleet
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.encoder import Encoder
from sim.engine.machine.groups import Group
from sim.engine.record.columns import FINISHED, UNFINISHED
from sim.engine.requests.state import RequestState
from sim.engine.serve.engine_core import EngineCore
from sim.engine.serve.kv_connector import ASK
from sim.engine.spec.lifecycle import DRAINING, FAILED, OFF, READY, STARTING
from sim.engine.time.errors import InvariantError
from sim.engine.time.events import Clock

INVARIANTS = {
    "INV-1": "blocks held by sequences, each counted once, and blocks free are all the blocks of a pool",
    "INV-2": "a request is in one place: one queue, or one micro-batch once",
    "INV-3": "the clock never goes backwards",
    "INV-4": "a request that has finished has emitted what was asked",
    "INV-5": "tokens computed for a sequence are those whose KV exists: none are computed twice, none are skipped",
    "INV-6": "what ends was started before, and what starts has arrived",
    "INV-7": "within an instant ranks never go back: nothing that a machine does is felt by another in the same nanosecond",
    "INV-8": "micro-batches of ranks that run together start together and end together",
    "INV-9": "blocks that a tier keeps, each counted once, are the bytes that it says it keeps, and no more than it has room for",
    "INV-10": "KV that is on its way was computed: its sender holds the blocks until it has arrived, its receiver keeps room",
    "INV-11": "a request that has come and not ended is with a machine that serves, held for one or on its way again: one of these",
    "INV-12": "where nothing is to happen any more, no blocks are held for machines that there are, and no request is between two",
    "INV-13": "a machine that hands over decodes no sequence",
    "INV-14": "adapters of an iteration in flight are in slots, no more of them than there are; the queue counts those that wait",
    "INV-15": "encodings of images are no more than the encoder's cache has room for",
}


def _tokens_of(core: EngineCore | None, id_: int, *, kept: bool) -> int:
    """Tokens that the blocks hold which *core* has lent, or keeps, for a request."""
    if core is None:
        return 0
    books = core.sequences.connector.machines
    held = (books.in_transit if kept else books.lent).get(id_)
    return 0 if held is None else held.blocks * core.sequences.kv.block_tokens


def core_ids(core: EngineCore) -> set[int]:
    """Requests that wait or run there."""
    grammars = core.sequences.grammars
    compiling = () if grammars is None else grammars.ids()
    return {seq.id for seq in core.sequences.queue}.union(compiling, *(batch.admitted for batch in core.batches))


class Watch:
    """Steps the clock and checks the machines after each event."""

    def __init__(
        self, state: RequestState, machines: Sequence[AnyMachine], clock: Clock, handovers: Handovers | None = None,
        fleet: Fleet | None = None, course: Course[Any] | None = None,
    ) -> None:  # fmt: skip
        self._course = course
        self._handovers = handovers
        self._fleet = fleet
        self._state = state
        self._machines = machines
        self._clock = clock

    def run(self, until_ns: int | None) -> None:
        """As `Clock.run`, with a look after every event, none of which is skipped."""
        self._clock.agenda.short_cuts = False
        before = (-1, 0)
        while (due := self._clock.next_due()) is not None and (until_ns is None or due[0] < until_ns):
            if due < before:
                self._fail("INV-3" if due[0] < before[0] else "INV-7", f"{due} after {before} (ns, rank)")
            before = due
            self._clock.step()
            self.check()
        if self._clock.next_due() is None:
            self._check_the_end()
        if until_ns is not None:
            self._clock.run(until=until_ns)

    def _check_the_end(self) -> None:
        if self._handovers is not None and self._handovers.ongoing:
            self._fail("INV-12", f"requests {list(self._handovers.ongoing)} are between machines")
        # Requests whose prompt no machine is left to decode.
        awaiting = set[int]() if self._handovers is None else set(self._handovers.awaiting)
        for machine in self._machines:
            for books in [core.sequences.connector.machines for core in machine.cores]:
                left = {*books.wanted, *books.in_transit, *books.lent} - awaiting
                if left:
                    self._fail("INV-12", f"machine {machine.index} asks or holds blocks for requests {sorted(left)}")

    def check(self) -> None:
        """InvariantError naming what does not hold."""
        now_ns = self._clock.now_ns
        seen: set[int] = set()
        for machine in self._machines:
            for core in machine.cores:
                self._check_hosted(machine, core, seen)
            for group in machine.groups:
                self._check_steps(machine, group)
            self._check_encodings(machine)
        if self._fleet is not None:
            self._check_fleet(self._fleet, seen)
        self._check_ends(seen, now_ns)
        if self._handovers is not None:
            self._check_handovers(self._handovers)

    def _check_encodings(self, machine: AnyMachine) -> None:
        caches = [core.images.cache for core in machine.cores if core.images is not None]
        for cache in [*caches, machine.cache] if isinstance(machine, Encoder) else caches:
            if cache.held > cache.size:
                self._fail("INV-15", f"machine {machine.index} keeps {cache.held} embeddings")

    def _check_steps(self, machine: AnyMachine, group: Group) -> None:
        for batches in zip(*(core.batches for core in group.cores), strict=True):
            spans = [batch.span for batch in batches if batch.span is not None]
            steps = {(span.start_ticks, span.n, span.end(span.n)) for span in spans}
            if len(steps) > 1:
                self._fail("INV-8", f"machine {machine.index} is in {len(steps)} steps at once")

    def _check_ends(self, seen: set[int], now_ns: int) -> None:
        state = self._state
        for id_, status in enumerate(state.status):
            if status == UNFINISHED:
                continue
            if status == FINISHED and (state.left[id_] or id_ in seen):
                self._fail("INV-4", f"request {id_} finished with {state.left[id_]} tokens to emit")
            if status == FINISHED and not state.arrival[id_] <= state.scheduled[id_] <= state.finish[id_] <= now_ns:
                self._fail("INV-6", f"request {id_}")
            if id_ in seen:
                self._fail("INV-2", f"request {id_} has ended and is still here")

    def _check_handovers(self, handovers: Handovers) -> None:
        """While KV is on a link, the sender holds the blocks of the whole prompt, and the receiver those that it took for it.
        Routers count requests that have been sent to a machine and wait elsewhere."""
        awaited = Counter(leg.receiver.index for leg in handovers.ongoing.values() if leg.keeper is None)
        awaited.update(leg.sender.index for leg in handovers.ongoing.values() if not leg.delivered)
        for machine in self._machines:
            if machine.awaited != awaited[machine.index]:
                self._fail("INV-2", f"machine {machine.index} awaits {machine.awaited}, not {awaited[machine.index]}")
        for id_, leg in handovers.ongoing.items():
            tokens = self._state.to_hand(id_)
            lent = _tokens_of(leg.lender, id_, kept=False)
            kept = _tokens_of(leg.keeper, id_, kept=True)
            if leg.computed and lent < tokens:
                self._fail("INV-10", f"request {id_} has {tokens} tokens to send, and its sender holds room for {lent}")
            if leg.sends and kept < tokens:
                self._fail(
                    "INV-10",
                    f"request {id_} is on its way with {tokens} tokens, and its receiver keeps room for {kept}",
                )

    def _check_fleet(self, fleet: Fleet, seen: set[int]) -> None:
        self._check_places(fleet, seen)
        serving = (READY, DRAINING)
        for machine, now in zip(self._machines, fleet.states, strict=True):
            loads = any(core.n_loading for core in machine.cores)
            if now in (OFF, STARTING, FAILED) and (machine.running or machine.waiting or loads):
                self._fail("INV-11", f"machine {machine.index} does not serve and has requests")
            for connector in [core.sequences.connector for core in machine.cores]:
                if now not in serving and (connector.awaits or connector.mail):
                    self._fail("INV-11", f"machine {machine.index} does not serve and holds KV for others")
        for id_, leg in () if self._handovers is None else self._handovers.ongoing.items():
            if any(fleet.states[each.index] not in serving for each in (leg.sender, leg.receiver)):
                self._fail("INV-11", f"request {id_} is between machines of which one does not serve")

    def _check_places(self, fleet: Fleet, seen: set[int]) -> None:
        held = list(fleet.held)
        cores = [core for machine in self._machines for core in machine.cores]
        landing = {id_ for core in cores for id_ in core.sequences.connector.landing()}
        for id_, status in enumerate(self._state.status):
            if status == UNFINISHED and fleet.came[id_]:
                places = (id_ in seen) + held.count(id_) + (id_ in fleet.again) + (id_ in landing)
                places += 0 if self._course is None else self._course.places(id_)
                if places != 1:
                    self._fail("INV-11", f"request {id_} is in {places} places")

    def _check_hosted(self, machine: AnyMachine, core: EngineCore, seen: set[int]) -> None:
        sequences = core.sequences
        self._check_queue(core, seen)
        if core.driven is not None:
            # Its scheduler keeps the sequences and their blocks.
            for id_ in core.batches[0].admitted:
                self._once(id_, seen)
            return
        held = sum(self._check_batch(machine, core, batch, seen) for batch in core.batches)
        held += self._check_connector(machine, core, seen)
        kv = sequences.kv
        if kv.caches:
            fault = kv.fault()
            if fault is not None:
                self._fail("INV-1", f"machine {machine.index}: {fault}")
            # Sequences that have ended and not freed their blocks yet are in no micro-batch any more.
            held += sum(blocks for _, _, blocks, _ in sequences.prefix_lookup.ended) - kv.held_again
        if held != kv.used:
            self._fail("INV-1", f"machine {machine.index}: {held} blocks held, {kv.used} of {kv.total} taken")
        if sequences.n_admitted != sum(len(batch.admitted) for batch in core.batches):
            self._fail("INV-2", f"machine {machine.index} counts {sequences.n_admitted} admitted")

    def _check_queue(self, core: EngineCore, seen: set[int]) -> None:
        """Waiting requests wait once, and those with KV hold its blocks."""
        fault = None if core.adapters is None else core.adapters.fault(core.batches)
        if fault is not None:
            self._fail("INV-14", fault)
        connector, grammars = core.sequences.connector, core.sequences.grammars
        for id_ in () if grammars is None else grammars.ids():
            self._once(id_, seen)
        for seq in core.sequences.queue:
            self._once(seq.id, seen)
            for books, blocks in ((connector.machines, seq.kept_blocks), (connector.tiers, seq.shared_blocks)):
                held = books.here.get(seq.id)
                if held is not None and held.blocks != blocks:
                    self._fail("INV-1", f"request {seq.id} waits with {blocks} blocks of {held.blocks} that it holds")
            # A request with nothing to compute lacks the KV of its latest token, as all that decode do.
            if (seq.tokens or 1) + seq.cached_tokens != self._context(seq.id):
                self._fail("INV-5", f"request {seq.id} waits with {seq.cached_tokens} + {seq.tokens} tokens")

    def _check_batch(self, machine: AnyMachine, core: EngineCore, batch: MicroBatch, seen: set[int]) -> int:
        """The blocks that a micro-batch's sequences hold."""
        held = 0
        for id_ in batch.admitted:
            self._once(id_, seen)
            held += self._check_sequence(core, batch, id_)
        if len(batch.admitted) != len(batch.partial) + len(batch.paused) + batch.decoding.n:
            self._fail("INV-2", f"a micro-batch of machine {machine.index} has sequences that were not admitted")
        if core.sequences.hands_over and batch.decoding.n:
            self._fail("INV-13", f"machine {machine.index} decodes {batch.decoding.n} sequences")
        return held + batch.blocks_taken

    def _check_connector(self, machine: AnyMachine, core: EngineCore, seen: set[int]) -> int:
        """The blocks held for KV that is on its way or here before its sequence is admitted, and for other machines."""
        connector, books = core.sequences.connector, core.sequences.connector.machines
        told_to_go = connector.told_to_go()
        if connector.n_unread != sum(what == ASK for _, what, _, _ in connector.mail):
            self._fail("INV-2", f"machine {machine.index} has not read of {connector.n_unread} requests")
        if core.sequences.n_computed != sum(not seq.tokens for seq in core.sequences.queue):
            self._fail(
                "INV-2", f"machine {machine.index} counts {core.sequences.n_computed} computed sequences that wait"
            )
        elsewhere = {*books.wanted, *books.in_transit, *books.lent}
        for id_ in (elsewhere & core_ids(core)) - told_to_go if elsewhere else ():
            self._fail("INV-2", f"request {id_} is between machines and at machine {machine.index}")
        for id_ in connector.tiers.in_transit:
            self._once(id_, seen)
        fault = None if core.loading is None else core.loading.tiers.fault()
        if fault is not None:
            self._fail("INV-9", f"machine {machine.index}: {fault}")
        return books.blocks + connector.tiers.blocks

    def _check_sequence(self, core: EngineCore, batch: MicroBatch, id_: int) -> int:
        """The blocks that it holds."""
        seq = core.sequences.running_seq(batch, id_)
        if id_ in batch.partial:
            partial = batch.partial[id_]
            if partial.cached_tokens + partial.remaining_tokens != self._context(id_):
                self._fail(
                    "INV-5",
                    f"request {id_} is computed to {partial.cached_tokens}, {partial.remaining_tokens} are left",
                )
            return seq.blocks
        if id_ in batch.paused and seq.cached_tokens != self._context(id_) - 1:
            self._fail("INV-5", f"request {id_} pauses with {seq.cached_tokens} tokens cached")
        if id_ in batch.decoding and seq.cached_tokens < self._context(id_) - 1:
            # Tokens emitted since it joined are counted when it leaves.
            self._fail("INV-5", f"request {id_} decodes with {seq.cached_tokens} tokens cached")
        if id_ in batch.decoding and seq.blocks < core.sequences.kv.blocks(seq.cached_tokens):
            self._fail("INV-1", f"request {id_} holds {seq.blocks} blocks for {seq.cached_tokens} tokens")
        return seq.blocks

    def _context(self, id_: int) -> int:
        """Tokens of the prompt and those emitted; the latest of these is not cached."""
        state = self._state
        return (state.prompt[id_] or 1) + state.output[id_] - state.left[id_]

    def _once(self, id_: int, seen: set[int]) -> None:
        if id_ in seen:
            self._fail("INV-2", f"request {id_} is in two places")
        seen.add(id_)

    def _fail(self, name: str, what: str) -> None:
        raise InvariantError(f"{name} at t={self._clock.now_ns} ns ({INVARIANTS[name]}): {what}")
