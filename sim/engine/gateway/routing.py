"""Knowledge of routers: loads, what machines have cached, where prompts were sent, and which machine served a session.

It is kept only for routers that need it (`policies.routers.Knowledge`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from policies.routers import Knowledge, RoutedRequest, knowledge_of
from sim.engine.kv.content import Contents
from sim.engine.machine.loads import left_waiting
from sim.engine.machine.machine import Machine
from sim.engine.time.events import ARRIVALS, Alarm, Clock

_NO_NODES: NDArray[np.int64] = np.empty(0, np.int64)


class SentTo:
    """Blocks that were sent to one machine, the least recently sent forgotten first: a set of nodes (named blocks), and a count of
    blocks that no other request has in common.

    Each sending stamps its nodes in turn, and nodes stamped below a mark are forgotten: looking up and adding are a few operations
    on arrays, however many blocks there are.
    """

    __slots__ = ("_capacity", "_count", "_grows", "_mark", "_max_age_ns", "_next", "_sendings", "_stamps")

    def __init__(self, capacity: int, max_age_ns: int | None, n_nodes: int) -> None:
        self._capacity = capacity
        self._max_age_ns = max_age_ns
        self._stamps = np.zeros(n_nodes, np.int64)
        self._grows = not n_nodes
        self._mark = self._next = 1
        self._count = 0
        self._sendings: deque[tuple[int, NDArray[np.int64], int, int]] = deque()
        """First stamp, nodes, further blocks, and when."""

    def found(self, nodes: NDArray[np.int64], now_ns: int) -> int:
        """The number of *nodes*, from the first on, that are remembered."""
        self._make_room_for(nodes)
        self._grow_old(now_ns)
        missing = self._stamps[nodes] < self._mark
        return int(missing.argmax()) if missing.any() else len(nodes)

    def add(self, nodes: NDArray[np.int64], others: int, now_ns: int) -> None:
        """Add a prompt of *nodes* and *others* blocks behind them."""
        self._make_room_for(nodes)
        self._grow_old(now_ns)
        self._count += int(np.count_nonzero(self._stamps[nodes] < self._mark)) + others
        self._stamps[nodes] = np.arange(self._next, self._next + len(nodes))
        self._sendings.append((self._next, nodes, others, now_ns))
        self._next += len(nodes) + others
        while self._count > self._capacity:
            self._forget(self._count - self._capacity)

    def _make_room_for(self, nodes: NDArray[np.int64]) -> None:
        """Extend the array for nodes with new numbers, where they were not numbered beforehand."""
        if not self._grows:
            return
        most = int(nodes.max()) + 1 if len(nodes) else 0
        if most > len(self._stamps):
            self._stamps = np.concatenate((self._stamps, np.zeros(max(most, 1024), np.int64)))

    def _grow_old(self, now_ns: int) -> None:
        if self._max_age_ns is not None:
            while self._sendings and self._sendings[0][3] < now_ns - self._max_age_ns:
                self._forget(self._count + 1)

    def _forget(self, blocks: int) -> None:
        """Forget up to *blocks* blocks of the first sending."""
        first, nodes, others, at_ns = self._sendings.popleft()
        mine = np.flatnonzero(self._stamps[nodes] == np.arange(first, first + len(nodes)))
        if blocks >= len(mine) + others:
            self._count -= len(mine) + others
            self._mark = first + len(nodes) + others
            return
        self._count -= blocks
        if blocks < len(mine):
            cut = int(mine[blocks - 1]) + 1
        else:
            cut = len(nodes)
            others -= blocks - len(mine)
        self._mark = first + cut
        self._sendings.appendleft((self._mark, nodes[cut:], others, at_ns))


class _Nodes:
    """The blocks of a workload's prompts, numbered so that equal blocks after equal blocks have one number."""

    __slots__ = ("_base", "_contents", "n")

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        ends = list(contents.start)
        for chain, named in zip(contents.chain, contents.named, strict=True):
            if chain >= 0:
                ends[chain] = max(ends[chain], named)
        for start, parent in zip(contents.start, contents.parent, strict=True):
            if parent >= 0:
                ends[parent] = max(ends[parent], start)
        self.n = 0
        self._base: list[int] = []
        for start, end in zip(contents.start, ends, strict=True):
            self._base.append(self.n - start)
            self.n += end - start

    def of(self, id_: int, blocks: int) -> NDArray[np.int64]:
        """The named blocks among the first *blocks* blocks of a request."""
        contents = self._contents
        chain, hi = contents.chain[id_], min(contents.named[id_], blocks)
        pieces: list[NDArray[np.int64]] = []
        while chain >= 0 and hi > 0:
            start = contents.start[chain]
            if hi > start:
                pieces.append(np.arange(self._base[chain] + start, self._base[chain] + hi))
                hi = start
            chain = contents.parent[chain]
        return np.concatenate(pieces[::-1]) if pieces else _NO_NODES


class GrowingNodes:
    """The same for prompts that arrive one by one: blocks are numbered when they are first looked up."""

    __slots__ = ("_contents", "_numbers", "n")

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._numbers: list[array[int]] = []
        """The block numbers of each chain."""
        self.n = 0

    def of(self, id_: int, blocks: int) -> NDArray[np.int64]:
        """The named blocks among the first *blocks* blocks of a request."""
        contents, numbers = self._contents, self._numbers
        while len(numbers) < len(contents.start):
            numbers.append(array("q"))
        chain, hi = contents.chain[id_], min(contents.named[id_], blocks)
        pieces: list[array[int]] = []
        while chain >= 0 and hi > 0:
            start, mine = contents.start[chain], numbers[chain]
            if hi > start:
                missing = hi - start - len(mine)
                if missing > 0:
                    mine.extend(range(self.n, self.n + missing))
                    self.n += missing
                pieces.append(mine[: hi - start])
                hi = start
            chain = contents.parent[chain]
        return np.concatenate([np.array(piece, np.int64) for piece in reversed(pieces)]) if pieces else _NO_NODES


class Seen:
    """A machine as a router sees it that needs more than loads: a `policies.routers.ReplicaLoad`."""

    __slots__ = ("_of", "index", "loads", "machine", "no_hit_order")

    def __init__(self, machine: Machine, of: Routing) -> None:
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
    def block_tokens(self) -> int:
        return self.machine.block_tokens

    @property
    def promised_ns(self) -> int:
        return self.machine.promised_ns

    def done_ns(self, model: int, *, waiting: bool) -> int:
        return self.machine.done_ns(model, waiting=waiting)

    def found_tokens(self, request: RoutedRequest) -> int:
        return self._of.found_tokens(request, self.machine)


class Routing:
    """Keeps what a router needs to know."""

    def __init__(
        self, knows: Knowledge, machines: Sequence[Machine], clock: Clock, prompt: Sequence[int],
        model: Sequence[int] | None, contents_in: Callable[[int], Contents] | None,
    ) -> None:  # fmt: skip
        """*prompt*, *model*: of each request, None: all ask for one model; *contents_in*: the workload's contents in blocks of so
        many tokens, None: it names none."""
        self.seen = [Seen(machine, self) for machine in machines]
        self._served_by: dict[int, int] = {}
        """The machine that got each session's last request."""
        self._knows = knows
        self._clock = clock
        self._prompt = prompt
        self._model = model
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
        self._nodes: _Nodes | GrowingNodes | None = None
        self._of_it: tuple[int, NDArray[np.int64], int] = (-1, _NO_NODES, 0)
        if knows.sent is not None and contents_in is not None:
            sent = knows.sent
            contents = contents_in(sent.block_tokens)
            self._nodes = _Nodes(contents) if len(contents.chain) else GrowingNodes(contents)
            age_ns = None if sent.max_age_s is None else round(sent.max_age_s * 1e9)
            self._sent = [SentTo(sent.capacity_blocks, age_ns, self._nodes.n) for _ in machines]

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

    def show(self, request: RoutedRequest, machines: Sequence[Machine]) -> tuple[RoutedRequest, list[Seen]]:
        """Return what the router sees of a request that has reached it, and of *machines*."""
        self._found.clear()
        if self._poll_ns:
            loads = self._loads_then.pop(request.id, None) if self._polling is None else self._latest[1]
            for seen in self.seen:
                seen.loads = None if loads is None else loads[seen.index]
        shown = self.seen if len(machines) == len(self.seen) else [self.seen[machine.index] for machine in machines]
        last = self._served_by.get(request.session, -1)
        if last >= 0:
            request = request._replace(served_by=next((i for i, seen in enumerate(shown) if seen.index == last), -1))
        return request, shown

    def found_tokens(self, request: RoutedRequest, machine: Machine) -> int:
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

    def _blocks_of(self, id_: int) -> tuple[NDArray[np.int64], int]:
        """The named blocks of the part of a prompt that is looked at, and the number of blocks after them."""
        if self._of_it[0] != id_:
            sent = self._knows.sent
            assert sent is not None
            assert self._nodes is not None
            blocks = self._prompt[id_] // sent.block_tokens
            if sent.max_blocks is not None:
                blocks = min(blocks, sent.max_blocks)
            nodes = self._nodes.of(id_, blocks)
            self._of_it = (id_, nodes, blocks - len(nodes))
        return self._of_it[1], self._of_it[2]

    def _found_sent(self, id_: int, index: int) -> int:
        assert self._knows.sent is not None
        nodes, _ = self._blocks_of(id_)
        return self._sent[index].found(nodes, self._clock.now_ns) * self._knows.sent.block_tokens

    def sent(self, request: RoutedRequest, machine: Machine) -> None:
        """Note that the present request is sent to *machine*."""
        index = machine.index
        if request.session >= 0 and self._knows.sessions:
            self._served_by[request.session] = index
        if self._knows.no_hits and not any(self._found.values()):
            self.seen[index].no_hit_order = self._n_unhit
            self._n_unhit += 1
        if self._sent:
            nodes, others = self._blocks_of(request.id)
            self._sent[index].add(nodes, others, self._clock.now_ns)
        self._blocks_then.pop(request.id, None)


def routing_of(
    router: object, machines: Sequence[Machine], clock: Clock, prompt: Sequence[int], model: Sequence[int] | None,
    contents_in: Callable[[int], Contents] | None,
) -> Routing | None:  # fmt: skip
    """The `Routing` that *router* needs, if any."""
    knows = knowledge_of(router)
    return None if knows is None else Routing(knows, machines, clock, prompt, model, contents_in)
