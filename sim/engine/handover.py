"""The two stages of a request's life where prefill and decode are apart.

A request is routed to a machine that computes its prompt, which then holds the KV blocks; another machine takes room for them; they
cross the link between the two; the first gives its blocks back, and the second decodes from there. With `room: before_prefill` the
second takes room before the first has the prompt. Requests wait in turn for room, first come, first served, and for the link.

With `room: before_prefill` memory is taken in one order, that of the machine that decodes before that of the machine that computes:
no request waits for the former while it holds some of the latter, so that requests never wait for each other in a circle. Where the
decode machine of a computed prompt goes, the prompt takes room at another one at once, or gives its KV up and comes again.
"""

# pyright: reportPrivateUsage=false
# The functions below the class are its own, kept outside of it so that either can be read in one sitting.

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Final, Protocol

import numpy as np

from sim.engine.columns import ABORTED, UNFINISHED
from sim.engine.events import HANDOVERS, Alarm, Clock
from sim.engine.exchange import ASK, COLLECT, DROP, LAND
from sim.engine.gate import Gate
from sim.engine.links import Link, Transfer
from sim.engine.machine import Machine
from sim.engine.requests import RequestState
from sim.engine.roles import HandoverSpec, KvPath, Role
from sim.engine.tenant import Tenant

_ARRIVED: Final = 0
_GONE: Final = 1
_ROOM: Final = 2
_PREFILLED: Final = 3
_NO_ROOM: Final = 4

HEARD_AFTER_NS: Final = 1
"""What a machine says is heard by another this much later; see `sim.engine.cluster.FELT_AFTER_NS`."""

_TIMES: Final = ("prefilled_ns", "room_ns", "sent_ns", "landed_ns", "joined_ns")


class Rejects(Protocol):
    """What this tells the cluster."""

    def rejected(self, id_: int, reason: str, /) -> None: ...

    def first_token_elsewhere(self, id_: int, at_ns: int, /) -> None:
        """A request has its first token, from the machine that computed its prompt."""
        ...


class Present(Protocol):
    """What this asks of machines that come and go, and tells them."""

    def ready(self, machines: Sequence[Machine], /) -> list[Machine]: ...

    def took(self, id_: int, machines: Sequence[Machine], stage: int, /) -> None:
        """A request has come for a stage of its life to one of *machines*, or would have."""
        ...

    def hold(self, id_: int, /) -> None:
        """No machine is ready: a request waits until one is, or is lost."""
        ...

    def hold_computed(self, id_: int, /) -> bool:
        """No machine that decodes is ready for one whose prompt has been computed: whether it waits; else it is lost."""
        ...

    def computed(self, machine: Machine, /) -> None:
        """A prompt that is decoded elsewhere has been computed."""
        ...

    def compute_again(self, id_: int, /) -> None:
        """A computed prompt gives its KV up, and its request comes again."""
        ...

    def perhaps_empty(self, machine: Machine, /) -> None:
        """A request between machines needs *machine* no more."""
        ...


PREFILLS: Final = 1
DECODES: Final = 2
"""Stages of a request's life."""


class Leg:
    """A request between two machines."""

    __slots__ = (
        "carrier", "computed", "delivered", "found", "has_room", "keeper", "late", "lender", "number", "prompt_tokens",
        "receiver", "sender", "sends",
    )  # fmt: skip

    def __init__(self, number: int, receiver: Machine, sender: Machine, prompt_tokens: int) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.receiver = receiver
        self.sender = sender
        # Until the one is asked and the other has the request, routers count it there all the same.
        receiver.awaited += 1
        sender.awaited += 1
        sender.awaited_tokens += prompt_tokens
        self.keeper: Tenant | None = None
        """Of the receiver's tenants the one that was asked for room ..."""
        self.lender: Tenant | None = None
        """... and of the sender's the one that computed the prompt."""
        self.computed = False
        """It is known that the prompt has been computed."""
        self.delivered = False
        """The sender has the request, or has computed its prompt (`deliver`)."""
        self.late = False
        """The receiver was chosen when the prompt had been computed, although room is taken before."""
        self.has_room = False
        self.sends = False
        """It is on the link."""
        self.carrier: tuple[Link, Transfer] | None = None
        """What it is on, where it has any bytes to send."""
        self.found = 0
        """Tokens that the receiver has in its prefix cache."""

    def ask(self, id_: int) -> None:
        """Have the receiver take room."""
        self.receiver.awaited -= 1
        self.keeper = self.receiver.tenant_for(id_)
        self.receiver.post(self.keeper, id_, ASK, self.number)

    def deliver(self) -> None:
        """The sender has the request."""
        if not self.delivered:
            self.delivered = True
            self.sender.awaited -= 1
            self.sender.awaited_tokens -= self.prompt_tokens

    def end(self) -> None:
        """It is over: whom it has not come to does not await it any more."""
        self.receiver.awaited -= self.keeper is None
        self.deliver()

    def drop(self, id_: int) -> None:
        """The receiver need not keep room, if it was asked to."""
        if self.keeper is not None:
            self.receiver.post(self.keeper, id_, DROP)

    def collect(self, id_: int) -> None:
        """The sender may free its blocks."""
        assert self.lender is not None
        self.sender.post(self.lender, id_, COLLECT)


class Handovers:
    """Requests between the machine that computes their prompt and the one that decodes them."""

    def __init__(
        self, spec: HandoverSpec, machines: Sequence[Machine], entry: Gate, gate: Gate, state: RequestState,
        clock: Clock, outside: Rejects,
    ) -> None:  # fmt: skip
        """*entry*: to where prompts are computed; *gate*: to where they are decoded."""
        self._spec = spec
        self._entry = entry
        self._gate = gate
        self._state = state
        self._clock = clock
        self._outside = outside
        self._machines = machines
        self._links: dict[tuple[int, ...], Link] = {}
        self.legs: dict[int, Leg] = {}
        """Those between machines, and those whose receiver has been chosen."""
        self._alarm = Alarm(clock, HANDOVERS, self._on_news)
        self._due: list[tuple[int, int, int, int]] = []
        """When, what, of whom: within an instant in this order, whichever machine spoke first; and of which leg, or which time that
        its prompt is computed, since what is said of one that is over is not heard."""
        self._n_legs = 0
        self.present: Present | None = None
        """Who knows which machines are ready; None: all are."""
        self.awaiting: dict[int, None] = {}
        """Whose prompt has been computed, and for whom no machine that decodes is ready, the longest first."""
        self._set_to = -1
        n = len(state.prompt)
        self._at: dict[str, array[int]] = {name: array("q", [-1]) * n for name in _TIMES}
        self.passages = array("i", bytes(4 * n))
        """How often a request's prompt has been given up that was computed for another machine, or was to be."""
        self.n_computed = array("i", bytes(4 * n))
        """How often it has been computed."""
        self._sent_bytes = array("q", bytes(8 * n))
        self._found = array("q", bytes(8 * n))
        self.prefill_replica: array[int] = array("i", [-1]) * n
        self._lenders = [(machine, tenant) for machine in machines for tenant in machine.tenants]
        self._kinds: dict[int, dict[int, list[tuple[Machine, Tenant]]]] = {}
        """For each model the machines that decode it, those of equal memory together."""
        self.least_left = 0 if spec.first_token == "decode" else 1
        """Tokens that prefill gives."""
        for machine in machines:
            for tenant in machine.tenants:
                if tenant.sequences.exchange is not None:
                    tenant.sequences.exchange.joined_ns = self._at["joined_ns"]

    def clear(self) -> None:
        """There are no requests."""
        for column, _ in self._columns():
            del column[:]
        self._gate.clear()

    def add(self, model: int, session: int) -> None:
        """One request more, behind the others."""
        for column, blank in self._columns():
            column.append(blank)
        self._gate.add(model, session)

    def _columns(self) -> list[tuple[array[int], int]]:
        """All that is kept of requests, and what stands there for one of which nothing is known yet."""
        times = [(values, -1) for values in self._at.values()]
        counts = (self._sent_bytes, self._found, self.passages, self.n_computed)
        return [*times, (self.prefill_replica, -1), *((values, 0) for values in counts)]

    # A request comes.

    def come(self, id_: int) -> None:
        """A request has come through the front end, or comes again."""
        spec, state, present = self._spec, self._state, self.present
        if state.carried is not None:
            state.carried[id_] = state.output[id_] - state.left[id_]
        receiver = None
        # Who asks for no more than prefill gives has nothing to decode.
        decodes = self.decodes(id_)
        able = self.able(id_) if decodes else []
        hosting = self._entry.hosting(id_)
        firsts, seconds = hosting, able
        if present is not None:
            firsts, seconds = _ready_for(spec, present, hosting, able)
            may_stay = bool(seconds) and spec.local_tokens > 0
            if not firsts and not may_stay and (hosting or self.is_short(id_, able)):
                present.hold(id_)
                return
        if spec.chosen_at_arrival and seconds:
            receiver = self._gate.choose(id_, seconds)
            if receiver is None:
                return
            if _stays(self, id_, receiver):
                self._took(id_, receiver, DECODES)
                receiver.deliver(id_)
                return
        if present is not None and hosting and not firsts:
            present.hold(id_)
            return
        machine = self._entry.choose(id_, firsts)
        if machine is None:
            return
        self._took(id_, machine, PREFILLS)
        if spec.roles[machine.index] == "both" or not decodes:
            machine.deliver(id_)
            return
        if not able:
            state.replica[id_] = machine.tenant_of(self._model(id_)).number
            self._outside.rejected(id_, _never(self, id_))
            return
        if receiver is not None:
            self._took(id_, receiver, DECODES)
            self.legs[id_] = self._leg(id_, receiver, machine)
        if spec.room == "after_prefill":
            if receiver is not None:
                self.legs[id_].deliver()
            machine.deliver(id_)
            return
        assert receiver is not None
        if machine.tenant_of(self._model(id_)).sequences.refusal(id_) is not None:
            # It says why.
            self.legs.pop(id_).end()
            machine.deliver(id_)
            return
        leg = self.legs[id_]
        leg.ask(id_)
        assert leg.keeper is not None
        state.replica[id_] = leg.keeper.number

    def role_of(self, machine: Machine) -> Role:
        return self._spec.roles[machine.index]

    def decodes(self, id_: int) -> bool:
        """Whether anything is left to decode when the prompt has been computed."""
        return self._state.left[id_] > self.least_left

    def is_short(self, id_: int, able: Sequence[Machine]) -> bool:
        """Whether a prompt stays with the machine that decodes it, whatever that has cached."""
        return bool(able) and self._state.to_hand(id_) <= self._spec.local_tokens

    def _leg(self, id_: int, receiver: Machine, sender: Machine) -> Leg:
        self._n_legs += 1
        return Leg(self._n_legs, receiver, sender, self._state.to_hand(id_))

    def _took(self, id_: int, machine: Machine, stage: int) -> None:
        if self.present is not None:
            self.present.took(id_, (machine,), stage)

    def _model(self, id_: int) -> int:
        return 0 if self._state.model is None else self._state.model[id_]

    def able(self, id_: int) -> list[Machine]:
        """Machines that can decode the request: whose memory could ever hold it."""
        model, hosting = self._model(id_), self._gate.hosting(id_)
        kinds = self._kinds.get(model)
        if kinds is None:
            kinds = self._kinds[model] = {}
            for machine in hosting:
                tenant = machine.tenant_of(model)
                kinds.setdefault(id(tenant.spec), []).append((machine, tenant))
        refusing = [kind for kind, each in kinds.items() if each[0][1].sequences.refusal(id_) is not None]
        if not refusing:
            return hosting
        gone = {machine for kind in refusing for machine, _ in kinds[kind]}
        return [machine for machine in hosting if machine not in gone]

    # What machines tell.

    def prefilled(self, id_: int, end_ns: int) -> None:
        """A prompt has been computed, and its first token."""
        state = self._state
        self._at["prefilled_ns"][id_] = end_ns
        self.prefill_replica[id_] = state.replica[id_]
        self.n_computed[id_] += 1
        if self._spec.first_token == "prefill":
            if state.first_token[id_] < 0:
                state.first_token[id_] = end_ns
            self._outside.first_token_elsewhere(id_, end_ns)
        if self.present is not None:
            self.present.computed(self._lenders[state.replica[id_]][0])
        self._later(end_ns + HEARD_AFTER_NS, _PREFILLED, id_, self.passages[id_])

    def ended(self, id_: int, now_ns: int) -> None:
        """A request has ended on the machine that computes prompts, or been rejected there."""
        if id_ in self.legs:
            self._later(now_ns + HEARD_AFTER_NS, _GONE, id_, 0)

    def has_room(self, id_: int, now_ns: int, found_tokens: int, number: int) -> None:
        """The receiver has taken room, where it has *found_tokens* tokens already, for the leg with that number."""
        leg = self.legs.get(id_)
        if leg is None or leg.number != number:
            # Its client has gone, or its sender, of which a plan that is made ahead does not know yet; the room is given back when
            # one does.
            return
        self._at["room_ns"][id_] = now_ns
        leg.has_room, leg.found = True, found_tokens
        self._later(now_ns + HEARD_AFTER_NS, _ROOM, id_, number)

    def no_room(self, id_: int, now_ns: int, number: int) -> None:
        """The receiver has looked for the first time for room for the leg with that number, and found none yet."""
        leg = self.legs.get(id_)
        if leg is not None and leg.number == number and leg.late:
            self._later(now_ns + HEARD_AFTER_NS, _NO_ROOM, id_, number)

    # What machines hear.

    def _later(self, at_ns: int, what: int, id_: int, which: int) -> None:
        heappush(self._due, (at_ns, what, id_, which))
        if self._due[0][0] != self._set_to:
            self._set_to = self._due[0][0]
            self._alarm.set(self._set_to)

    def _on_news(self, _event: object) -> None:
        due, now_ns = self._due, self._clock.now_ns
        # While it runs nothing needs to be set.
        self._set_to = now_ns
        while due and due[0][0] <= now_ns:
            _, what, id_, which = heappop(due)
            if what == _PREFILLED:
                if which == self.passages[id_]:
                    self._on_prefilled(id_)
            elif what == _GONE:
                leg = self.legs.pop(id_, None)
                if leg is not None:
                    leg.end()
                    leg.drop(id_)
                    self._needs_no_more(leg.sender, leg.receiver)
            elif id_ in self.legs and self.legs[id_].number == which:
                if what == _ROOM:
                    self._on_room(id_)
                elif what == _ARRIVED:
                    self._on_arrived(id_)
                elif not self.legs[id_].has_room:
                    _on_no_room(self, id_)
        self._set_to = -1
        if due:
            self._set_to = due[0][0]
            self._alarm.set(self._set_to)

    def _on_prefilled(self, id_: int) -> None:
        leg = self.legs.get(id_)
        if self._state.status[id_] != UNFINISHED:
            # Its client has gone meanwhile.
            self._collect(id_)
            return
        sender, lender = self._lenders[self.prefill_replica[id_]]
        if leg is None:
            late = self._spec.room == "before_prefill"
            # Where all are of one kind, they were found able when it came.
            one_kind = len(self._kinds[self._model(id_)]) == 1
            able = None if one_kind and self.present is None else self.able(id_)
            if self.present is not None and able is not None:
                able = self.present.ready(able)
                if not able and late:
                    self.present.compute_again(id_)
                    return
                if not able:
                    self._await(id_)
                    return
            receiver = self._gate.choose(id_, able)
            if receiver is None:
                self._collect(id_)
                return
            self._took(id_, receiver, DECODES)
            leg = self.legs[id_] = self._leg(id_, receiver, sender)
            leg.late = late
        leg.lender = lender
        leg.computed = True
        leg.deliver()
        if leg.has_room:
            _send(self, id_, leg)
        elif leg.keeper is None:
            leg.ask(id_)

    def _await(self, id_: int) -> None:
        """No machine that decodes is ready for one whose prompt has been computed."""
        assert self.present is not None
        self.awaiting[id_] = None
        if not self.present.hold_computed(id_):
            self.awaiting.pop(id_, None)

    def _collect(self, id_: int) -> None:
        """The machine that computed a prompt may give its blocks back."""
        sender, lender = self._lenders[self.prefill_replica[id_]]
        sender.post(lender, id_, COLLECT)
        self._needs_no_more(sender)

    def choose_again(self, id_: int) -> None:
        """A machine that decodes may be ready for one that awaits it."""
        del self.awaiting[id_]
        self._on_prefilled(id_)

    def _needs_no_more(self, *machines: Machine) -> None:
        if self.present is not None:
            for machine in machines:
                self.present.perhaps_empty(machine)

    def _on_room(self, id_: int) -> None:
        leg = self.legs.get(id_)
        if leg is None or self._state.status[id_] != UNFINISHED:
            return
        if self._at["prefilled_ns"][id_] < 0:
            leg.deliver()
            leg.sender.deliver(id_)
        else:
            _send(self, id_, leg)

    def _on_arrived(self, id_: int) -> None:
        now_ns, state = self._clock.now_ns, self._state
        leg = self.legs.pop(id_)
        assert leg.keeper is not None
        leg.collect(id_)
        self._needs_no_more(leg.sender, leg.receiver)
        if state.status[id_] != UNFINISHED:
            leg.drop(id_)
            return
        self._at["landed_ns"][id_] = now_ns
        tokens = state.to_hand(id_)
        first_token = self._spec.first_token
        if first_token == "decode":
            # The last token is computed again.
            tokens -= 1
            state.recomputed[id_] += 1
        elif first_token == "arrival":
            if state.first_token[id_] < 0:
                state.first_token[id_] = now_ns
            else:
                leg.keeper.recorder.resumed_gaps_ns.append(now_ns - state.token_ns[id_])
            state.token_ns[id_] = now_ns
            self._outside.first_token_elsewhere(id_, now_ns)
        state.replica[id_] = leg.keeper.number
        leg.receiver.post(leg.keeper, id_, LAND, tokens)


def _stays(handovers: Handovers, id_: int, receiver: Machine) -> bool:
    """Whether the machine that decodes computes the prompt as well, which is short or most of which it has."""
    local = handovers._spec.local_tokens
    if not local:
        return False
    prompt = handovers._state.to_hand(id_)
    return prompt <= local or prompt - receiver.found_tokens(handovers._gate.request(id_)) <= local


def _never(handovers: Handovers, id_: int) -> str:
    machines = handovers._gate.hosting(id_)
    if not machines:
        return "no machine decodes for the model"
    return f"to decode it, {machines[0].tenant_of(handovers._model(id_)).sequences.refusal(id_)}"


def _on_no_room(handovers: Handovers, id_: int) -> None:
    leg = handovers.legs.pop(id_)
    leg.end()
    leg.drop(id_)
    handovers._needs_no_more(leg.receiver)
    assert handovers.present is not None
    handovers.present.compute_again(id_)


def _ready_for(
    spec: HandoverSpec, present: Present, firsts: Sequence[Machine], able: Sequence[Machine]
) -> tuple[list[Machine], list[Machine]]:
    """Of the machines to which a request comes, and of those *able* to decode it, those that are ready; where room is taken first
    and no machine decodes, those of the first that do both."""
    ready, seconds = present.ready(firsts), present.ready(able)
    if able and not seconds and spec.room == "before_prefill":
        ready = [machine for machine in ready if spec.roles[machine.index] == "both"]
    return ready, seconds


def _send(handovers: Handovers, id_: int, leg: Leg) -> None:
    """All is ready: the KV goes its way."""
    now_ns, state = handovers._clock.now_ns, handovers._state
    sender, receiver = leg.sender, leg.receiver
    leg.sends = True
    pools = handovers._spec.pools
    path = handovers._spec.paths[pools[sender.index], pools[receiver.index]]
    tokens = state.to_hand(id_) - leg.found
    n_bytes = path.n_bytes(tokens)
    handovers._found[id_] = leg.found
    handovers._sent_bytes[id_] += n_bytes
    arrived_ns = now_ns
    if n_bytes:
        since_ns, last_bytes = None, 0
        came_once = not state.preemptions[id_] and not (state.again is not None and state.again[id_])
        if path.layers > 1 and came_once and not leg.late:
            begun_ns = state.scheduled[id_]
            since_ns = begun_ns + (handovers._at["prefilled_ns"][id_] - begun_ns) // path.layers
            last_bytes = -(-n_bytes // path.layers)
        link = _link(handovers, path, sender, receiver)
        transfer = link.send(now_ns, n_bytes, since_ns=since_ns, last_bytes=last_bytes)
        leg.carrier = link, transfer
        handovers._at["sent_ns"][id_] = max(transfer.begin_ns, now_ns)
        arrived_ns = transfer.arrived_ns + round(n_bytes * path.repack_s_per_byte * 1e9)
    else:
        handovers._at["sent_ns"][id_] = now_ns
    handovers._later(arrived_ns, _ARRIVED, id_, leg.number)


def _link(handovers: Handovers, path: KvPath, sender: Machine, receiver: Machine) -> Link:
    pools = handovers._spec.pools
    between = pools[sender.index], pools[receiver.index]
    shared = path.shared
    key = {
        "sender": (*between, sender.index, -1),
        "receiver": (*between, -1, receiver.index),
        "pair": (*between, sender.index, receiver.index),
        "pools": (*between, -1, -1),
    }[shared]
    link = handovers._links.get(key)
    if link is None:
        link = handovers._links[key] = Link(path.link)
    return link


def give_up(handovers: Handovers, id_: int) -> bool:
    """The client of a request has gone. True: it was between machines, and has been seen to; else it is at a machine."""
    state = handovers._state
    leg = handovers.legs.get(id_)
    prefilled = handovers._at["prefilled_ns"][id_] >= 0
    if prefilled and handovers._at["landed_ns"][id_] < 0:
        state.status[id_] = ABORTED
        if id_ in handovers.awaiting:
            del handovers.awaiting[id_]
            handovers._collect(id_)
        if leg is not None and not leg.sends:
            # What is on the link goes to its end.
            handovers.legs.pop(id_).end()
            leg.drop(id_)
            if leg.computed:
                leg.collect(id_)
            handovers._needs_no_more(leg.sender, leg.receiver)
        return True
    if leg is None or prefilled:
        return False
    if handovers._spec.room == "after_prefill":
        # Its receiver has been chosen and knows nothing of it.
        handovers.legs.pop(id_).end()
        handovers._needs_no_more(leg.receiver)
        return False
    handovers.legs.pop(id_).end()
    leg.drop(id_)
    handovers._needs_no_more(leg.sender, leg.receiver)
    if leg.sender.tenants[0].number <= state.replica[id_] <= leg.sender.tenants[-1].number:
        return False
    state.status[id_] = ABORTED
    return True


def columns_of(handovers: Handovers) -> dict[str, Any]:
    """What is added to the columns of requests."""
    times = {name: np.frombuffer(values, np.int64) for name, values in handovers._at.items()}
    return {
        "prefill_replica": np.frombuffer(handovers.prefill_replica, np.int32),
        **times,
        "sent_bytes": np.frombuffer(handovers._sent_bytes, np.int64),
        "found_at_decode_tokens": np.frombuffer(handovers._found, np.int64),
        **({} if handovers.present is None else {"prompts_computed": np.frombuffer(handovers.n_computed, np.int32)}),
    }


def links_of(handovers: Handovers) -> list[dict[str, int]]:
    """Of every link that carried anything: whose it was (-1: of all of the pool), and how long it was at work."""
    return [
        {
            "from_pool": key[0], "to_pool": key[1], "sender": key[2], "receiver": key[3], "busy_ns": link.busy_ns,
            "places": link.spec.concurrent_transfers,
        }
        for key, link in sorted(handovers._links.items())
    ]  # fmt: skip
