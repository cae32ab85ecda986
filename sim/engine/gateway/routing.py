"""Knowledge of routers: loads, what machines have cached, where prompts were sent, and which machine served a session.

It is kept only for routers that need it (`policies.routers.Knowledge`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from policies.routers import AdapterLoad, Booked, Knowledge, RoutedRequest, knowledge_of
from sim.engine.gateway.booked import Ledger
from sim.engine.kv.content import Contents
from sim.engine.kv.content_store import ContentStore, Piece
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.loads import left_waiting
from sim.engine.requests.state import RequestState
from sim.engine.time.events import ARRIVALS, Alarm, Clock


class SentTo(ContentStore):
    """Blocks that were sent to one machine, the least recently sent forgotten first, and of a prompt the first block."""

    first_block_first: ClassVar[bool] = True

    def __init__(self, capacity_blocks: int, max_age_ns: int | None) -> None:
        super().__init__(capacity_blocks)
        self._max_age_ns = max_age_ns
        self._sent: deque[tuple[int, int]] = deque()
        """The last stamp of each sending, and when it was."""

    def found(self, pieces: Sequence[Piece], now_ns: int) -> int:
        """The number of named blocks of *pieces*, from the first on, that are remembered."""
        self._grow_old(now_ns)
        return self.covered([piece for piece in pieces if piece[0][1] >= 0], 0, now_ns)

    def add(self, pieces: Sequence[Piece], now_ns: int) -> None:
        """A prompt of *pieces* is sent."""
        self._grow_old(now_ns)
        self.put(pieces, now_ns, now_ns)
        if self._max_age_ns is not None:
            self._sent.append((self._stamp, now_ns))

    def _grow_old(self, now_ns: int) -> None:
        if self._max_age_ns is None:
            return
        sent, oldest = self._sent, self._oldest
        while sent and sent[0][1] < now_ns - self._max_age_ns:
            stamp, _ = sent.popleft()
            while oldest and oldest[0][1] <= stamp:
                self._evict(self.used_bytes, [])


class Seen:
    """A machine as a router sees it that needs more than loads: a `policies.routers.ReplicaLoad`."""

    __slots__ = ("_of", "index", "loads", "machine", "no_hit_order")

    def __init__(self, machine: AnyMachine, of: Routing) -> None:
        self.index = machine.index
        self.no_hit_order = -1
        self.loads: tuple[int, int, int, float, int] | None = None
        """Loads at the latest poll; None: the present ones."""
        self.machine = machine
        self._of = of

    def read(self) -> tuple[int, int, int, float, int]:
        """Waiting, running, KV blocks, the share of these, tokens to compute.

        An engine publishes its loads when it has planned an iteration: waiting are the requests that the plan left waiting.
        """
        machine, now_ns = self.machine, self._of.now_ns
        return (
            sum(left_waiting(core, now_ns) for core in machine.cores),
            machine.running,
            machine.kv_blocks_used,
            machine.kv_use,
            machine.prefill_tokens,
        )

    @property
    def waiting(self) -> int:
        return self.machine.waiting if self.loads is None else self.loads[0]

    @property
    def running(self) -> int:
        return self.machine.running if self.loads is None else self.loads[1]

    @property
    def kv_blocks_used(self) -> int:
        return self.machine.kv_blocks_used if self.loads is None else self.loads[2]

    @property
    def kv_use(self) -> float:
        return self.machine.kv_use if self.loads is None else self.loads[3]

    @property
    def prefill_tokens(self) -> int:
        return self.machine.prefill_tokens if self.loads is None else self.loads[4]

    @property
    def prompt_tokens(self) -> int:
        """The present ones: engines publish no such figure, and what counts it has sent the prompts itself."""
        return self.machine.prompt_tokens

    @property
    def block_tokens(self) -> int:
        return self.machine.block_tokens

    @property
    def promised_ns(self) -> int:
        return self.machine.promised_ns

    def done_ns(self, model: int, *, waiting: bool) -> int:
        return self.machine.done_ns(model, waiting=waiting)

    @property
    def adapter_load(self) -> AdapterLoad:
        return self.machine.adapter_load

    def found_tokens(self, request: RoutedRequest) -> int:
        return self._of.found_tokens(request, self.machine)

    def booked(self, request: RoutedRequest) -> Booked:
        return self._of.booked(request, self.index)


class Routing:
    """Keeps what a router needs to know."""

    def __init__(self, knows: Knowledge, machines: Sequence[AnyMachine], clock: Clock, state: RequestState) -> None:
        self.seen = [Seen(machine, self) for machine in machines]
        self._served_by: dict[int, int] = {}
        """The machine that got each session's last request."""
        self._knows = knows
        self._clock = clock
        self._prompt = state.prompt
        self._model = state.model
        self._delay_ns = round(knows.event_delay_s * 1e9) if knows.sent is None and knows.prefixes else 0
        self._poll_ns = round(knows.poll_s * 1e9)
        if self._poll_ns:
            for machine in machines:
                for core in machine.cores:
                    core.sequences.note_arrivals()
        self._blocks_then: dict[int, list[int]] = {}
        """For each expected request, what each machine had cached of it at the delayed look."""
        self._loads_then: dict[int, list[tuple[int, int, int, float, int]]] = {}
        self._latest: tuple[int, list[tuple[int, int, int, float, int]]] = (-1, [])
        self._polling: Alarm | None = None
        """Set while requests arrive one by one."""
        self._found: dict[int, int] = {}
        """Tokens found for the present request, by machine."""
        self._n_unhit = 0
        self._sent: list[SentTo] = []
        self._sizes: list[int] = []
        """Tokens of a block of the index, for each machine."""
        self._contents: dict[int, Contents] = {}
        self._present: tuple[int, dict[int, list[Piece]]] = (-1, {})
        """The present request, and its parts in blocks of each size."""
        if knows.sent is not None and state.contents_in is not None:
            sent = knows.sent
            serving = [machine for machine in machines if machine.cores]
            self._sizes = [sent.tokens_in(machine.block_tokens) for machine in serving]
            self._contents = {size: state.contents_in(size) for size in set(self._sizes)}
            age_ns = None if sent.max_age_s is None else round(sent.max_age_s * 1e9)
            self._sent = [
                SentTo(machine.kv_blocks if sent.capacity_blocks is None else sent.capacity_blocks, age_ns)
                for machine in serving
            ]
        self._ledger = Ledger(machines, state) if knows.booked else None

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns

    # Requests that arrive one by one.

    def begin_live(self) -> None:
        """Read loads at every poll from now on, since future requests are not known."""
        if self._poll_ns:
            self._polling = Alarm(self._clock, ARRIVALS, self._on_poll)
            self._polling.set(self._clock.now_ns)

    def end_live(self) -> None:
        """Stop polling: no more requests arrive."""
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def _on_poll(self, _event: object) -> None:
        now_ns = self._clock.now_ns
        self._latest = (now_ns, [seen.read() for seen in self.seen])
        if self._polling is not None:
            self._polling.set(now_ns + self._poll_ns)

    # Delayed knowledge.

    def expect(self, ids: Sequence[int], seen_ns: Sequence[int]) -> None:
        """Note that requests reach the router at *seen_ns*, in this order."""
        if self._delay_ns:
            self._walk(ids, [max(at - self._delay_ns, 0) for at in seen_ns], self._look)
        if self._poll_ns:
            self._walk(ids, [at - at % self._poll_ns for at in seen_ns], self._poll)

    def expect_one(self, id_: int, seen_ns: int) -> None:
        """Note that a request unknown before reaches the router at *seen_ns*; looks that were due before now happen now."""
        now_ns = self._clock.now_ns
        polled = (self._poll_ns and seen_ns % self._poll_ns) if self._polling is None else 0
        for age_ns, look in ((self._delay_ns, self._look), (polled, self._poll)):
            if age_ns:
                # An event of another machine is felt a nanosecond later at the earliest.
                at_ns = min(max(seen_ns - age_ns, now_ns + 1), seen_ns)
                Alarm(self._clock, ARRIVALS, lambda _event, look=look: look(id_)).set(at_ns)

    def _walk(self, ids: Sequence[int], at_ns: list[int], look: Callable[[int], None]) -> None:
        place = 0

        def ring(_event: object) -> None:
            nonlocal place
            now_ns = at_ns[place]
            while place < len(at_ns) and at_ns[place] == now_ns:
                look(ids[place])
                place += 1
            if place < len(at_ns):
                alarm.set(at_ns[place])

        alarm = Alarm(self._clock, ARRIVALS, ring)
        if at_ns:
            alarm.set(at_ns[0])

    def _look(self, id_: int) -> None:
        model = 0 if self._model is None else self._model[id_]
        request = RoutedRequest(id_, self._prompt[id_], model)
        machines = [seen.machine for seen in self.seen]
        self._blocks_then[id_] = [each.found_tokens(request) if each.hosts(model) else 0 for each in machines]

    def _poll(self, id_: int) -> None:
        now_ns = self._clock.now_ns
        if self._latest[0] != now_ns:
            self._latest = (now_ns, [seen.read() for seen in self.seen])
        self._loads_then[id_] = self._latest[1]

    # One request.

    def show(self, request: RoutedRequest, machines: Sequence[AnyMachine]) -> tuple[RoutedRequest, list[Seen]]:
        """Return what the router sees of a request that has reached it, and of *machines*."""
        self._found.clear()
        if self._ledger is not None:
            self._ledger.settle(self._clock.now_ns)
        if self._poll_ns:
            loads = self._loads_then.pop(request.id, None) if self._polling is None else self._latest[1]
            for seen in self.seen:
                seen.loads = None if loads is None else loads[seen.index]
        shown = self.seen if len(machines) == len(self.seen) else [self.seen[machine.index] for machine in machines]
        last = self._served_by.get(request.session, -1)
        if last >= 0:
            request = request._replace(served_by=next((i for i, seen in enumerate(shown) if seen.index == last), -1))
        return request, shown

    def found_tokens(self, request: RoutedRequest, machine: AnyMachine) -> int:
        """Tokens of the present request that *machine* is thought to have."""
        index = machine.index
        found = self._found.get(index)
        if found is None:
            if self._knows.sent is not None:
                found = self._found_sent(request.id, index) if self._sent else 0
            elif self._delay_ns and request.id in self._blocks_then:
                found = self._blocks_then[request.id][index]
            else:
                found = machine.found_tokens(request)
            self._found[index] = found
        return found

    def _pieces_of(self, id_: int, index: int) -> list[Piece]:
        """The part of a prompt that a machine's index looks at."""
        if self._present[0] != id_:
            self._present = (id_, {})
        size = self._sizes[index]
        known = self._present[1].get(size)
        if known is not None:
            return known
        sent = self._knows.sent
        assert sent is not None
        prompt = self._prompt[id_]
        blocks = sent.blocks_of(prompt, size)
        full, space = min(blocks, prompt // size), (0, size, 1)
        pieces: list[Piece] = [((space, chain), lo, hi) for chain, lo, hi in self._contents[size].path(id_, full)]
        if blocks > full:
            pieces.append(((space, -1 - id_), full, blocks))
        self._present[1][size] = pieces
        return pieces

    def _found_sent(self, id_: int, index: int) -> int:
        return self._sent[index].found(self._pieces_of(id_, index), self._clock.now_ns) * self._sizes[index]

    def booked(self, request: RoutedRequest, index: int) -> Booked:
        """The router's own account of machine *index*."""
        return Booked() if self._ledger is None else self._ledger.of(request, index)

    def leave(self, id_: int) -> None:
        """A request has passed the stage of the router's machines."""
        if self._ledger is not None:
            self._ledger.leave(id_)

    def sent(self, request: RoutedRequest, machine: AnyMachine) -> None:
        """Note that the present request is sent to *machine*."""
        index = machine.index
        if request.session >= 0 and self._knows.sessions:
            self._served_by[request.session] = index
        if self._knows.no_hits and not any(self._found.values()):
            self.seen[index].no_hit_order = self._n_unhit
            self._n_unhit += 1
        if self._sent:
            self._sent[index].add(self._pieces_of(request.id, index), self._clock.now_ns)
        if self._ledger is not None:
            self._ledger.enter(request, index, self.found_tokens(request, machine))
        self._blocks_then.pop(request.id, None)


def routing_of(router: object, machines: Sequence[AnyMachine], clock: Clock, state: RequestState) -> Routing | None:
    """The `Routing` that *router* needs, if any."""
    knows = knowledge_of(router)
    return None if knows is None else Routing(knows, machines, clock, state)
