"""The two stages of a request's life where prefill and decode are apart.

A request is routed to a machine that computes its prompt, which then holds the KV blocks; another machine takes room for them; they
cross the link between the two; the first gives its blocks back, and the second decodes from there. With `room: before_prefill` the
second takes room before the first has the prompt. Requests wait in turn for room, first come, first served, and for the link.
"""

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
from sim.engine.links import Link
from sim.engine.machine import Machine
from sim.engine.requests import RequestState
from sim.engine.roles import HandoverSpec, KvPath
from sim.engine.sequences import refusal
from sim.engine.tenant import Tenant

_ARRIVED: Final = 0
_GONE: Final = 1
_ROOM: Final = 2
_PREFILLED: Final = 3

HEARD_AFTER_NS: Final = 1
"""What a machine says is heard by another this much later; see `sim.engine.cluster.FELT_AFTER_NS`."""

_TIMES: Final = ("prefilled_ns", "room_ns", "sent_ns", "landed_ns", "joined_ns")


class Rejects(Protocol):
    """What this tells the cluster."""

    def rejected(self, id_: int, reason: str, /) -> None: ...

    def first_token_elsewhere(self, id_: int, at_ns: int, /) -> None:
        """A request has its first token, from the machine that computed its prompt."""
        ...


class Leg:
    """A request between two machines."""

    __slots__ = ("computed", "found", "has_room", "keeper", "lender", "receiver", "sender", "sends")

    def __init__(self, receiver: Machine, sender: Machine) -> None:
        self.receiver = receiver
        self.sender = sender
        self.keeper: Tenant | None = None
        """Of the receiver's tenants the one that was asked for room ..."""
        self.lender: Tenant | None = None
        """... and of the sender's the one that computed the prompt."""
        self.computed = False
        """It is known that the prompt has been computed."""
        self.has_room = False
        self.sends = False
        """It is on the link."""
        self.found = 0
        """Tokens that the receiver has in its prefix cache."""

    def ask(self, id_: int) -> None:
        """Have the receiver take room."""
        self.keeper = self.receiver.tenant_for(id_)
        self.receiver.post(self.keeper, id_, ASK)

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
        self._due: list[tuple[int, int, int]] = []
        """When, what, of whom: within an instant in this order, whichever machine spoke first."""
        self._set_to = -1
        n = len(state.prompt)
        self._at: dict[str, array[int]] = {name: array("q", [-1]) * n for name in _TIMES}
        self._sent_bytes = array("q", bytes(8 * n))
        self._found = array("q", bytes(8 * n))
        self._prefill_replica: array[int] = array("i", [-1]) * n
        self._lenders = [(machine, tenant) for machine in machines for tenant in machine.tenants]
        self._kinds: dict[int, dict[int, list[tuple[Machine, Tenant]]]] = {}
        """For each model the machines that decode it, those of equal memory together."""
        self._least_left = 0 if spec.first_token == "decode" else 1
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
        return [*times, (self._prefill_replica, -1), (self._sent_bytes, 0), (self._found, 0)]

    # A request comes.

    def come(self, id_: int) -> None:
        """A request has come through the front end."""
        spec = self._spec
        receiver = None
        # Who asks for no more than prefill gives has nothing to decode.
        decodes = self._state.output[id_] > self._least_left
        able = self._able(id_) if decodes else []
        if spec.chosen_at_arrival and able:
            receiver = self._gate.choose(id_, able)
            if receiver is None:
                return
            if self._stays(id_, receiver):
                receiver.deliver(id_)
                return
        machine = self._entry.choose(id_)
        if machine is None:
            return
        if spec.roles[machine.index] == "both" or not decodes:
            machine.deliver(id_)
            return
        if not able:
            self._state.replica[id_] = machine.tenant_of(self._model(id_)).number
            self._outside.rejected(id_, self._never(id_))
            return
        if receiver is not None:
            self.legs[id_] = Leg(receiver, machine)
        if spec.room == "after_prefill":
            machine.deliver(id_)
            return
        assert receiver is not None
        if refusal(machine.tenant_of(self._model(id_)).sequences, id_) is not None:
            # It says why.
            del self.legs[id_]
            machine.deliver(id_)
            return
        leg = self.legs[id_]
        leg.ask(id_)
        assert leg.keeper is not None
        self._state.replica[id_] = leg.keeper.number

    def _stays(self, id_: int, receiver: Machine) -> bool:
        """Whether the machine that decodes computes the prompt as well, which is short or most of which it has."""
        local = self._spec.local_tokens
        if not local:
            return False
        prompt = self._state.prompt[id_] or 1
        return prompt <= local or prompt - receiver.found_tokens(self._gate.request(id_)) <= local

    def _model(self, id_: int) -> int:
        return 0 if self._state.model is None else self._state.model[id_]

    def _able(self, id_: int) -> list[Machine]:
        """Machines that can decode the request: whose memory could ever hold it."""
        model, hosting = self._model(id_), self._gate.hosting(id_)
        kinds = self._kinds.get(model)
        if kinds is None:
            kinds = self._kinds[model] = {}
            for machine in hosting:
                tenant = machine.tenant_of(model)
                kinds.setdefault(id(tenant.spec), []).append((machine, tenant))
        refusing = [kind for kind, each in kinds.items() if refusal(each[0][1].sequences, id_) is not None]
        if not refusing:
            return hosting
        gone = {machine for kind in refusing for machine, _ in kinds[kind]}
        return [machine for machine in hosting if machine not in gone]

    def _never(self, id_: int) -> str:
        machines = self._gate.hosting(id_)
        if not machines:
            return "no machine decodes for the model"
        return f"to decode it, {refusal(machines[0].tenant_of(self._model(id_)).sequences, id_)}"

    # What machines tell.

    def prefilled(self, id_: int, end_ns: int) -> None:
        """A prompt has been computed, and its first token."""
        state = self._state
        self._at["prefilled_ns"][id_] = end_ns
        self._prefill_replica[id_] = state.replica[id_]
        if self._spec.first_token == "prefill":
            state.first_token[id_] = end_ns
            self._outside.first_token_elsewhere(id_, end_ns)
        self._later(end_ns + HEARD_AFTER_NS, _PREFILLED, id_)

    def ended(self, id_: int, now_ns: int) -> None:
        """A request has ended on the machine that computes prompts, or been rejected there."""
        if id_ in self.legs:
            self._later(now_ns + HEARD_AFTER_NS, _GONE, id_)

    def has_room(self, id_: int, now_ns: int, found_tokens: int) -> None:
        """The receiver has taken room, where it has *found_tokens* tokens already."""
        self._at["room_ns"][id_] = now_ns
        leg = self.legs.get(id_)
        if leg is None:
            # Its client has gone, of which a plan that is made ahead does not know yet; the room is given back when one does.
            return
        leg.has_room, leg.found = True, found_tokens
        self._later(now_ns + HEARD_AFTER_NS, _ROOM, id_)

    # What machines hear.

    def _later(self, at_ns: int, what: int, id_: int) -> None:
        heappush(self._due, (at_ns, what, id_))
        if self._due[0][0] != self._set_to:
            self._set_to = self._due[0][0]
            self._alarm.set(self._set_to)

    def _on_news(self, _event: object) -> None:
        due, now_ns = self._due, self._clock.now_ns
        # While it runs nothing needs to be set.
        self._set_to = now_ns
        while due and due[0][0] <= now_ns:
            _, what, id_ = heappop(due)
            if what == _PREFILLED:
                self._on_prefilled(id_)
            elif what == _ROOM:
                self._on_room(id_)
            elif what == _GONE:
                leg = self.legs.pop(id_, None)
                if leg is not None:
                    leg.drop(id_)
            else:
                self._on_arrived(id_)
        self._set_to = -1
        if due:
            self._set_to = due[0][0]
            self._alarm.set(self._set_to)

    def _on_prefilled(self, id_: int) -> None:
        leg = self.legs.get(id_)
        sender, lender = self._lenders[self._prefill_replica[id_]]
        if self._state.status[id_] != UNFINISHED:
            # Its client has gone meanwhile.
            sender.post(lender, id_, COLLECT)
            return
        if leg is None:
            # Where all are of one kind, they were found able when it came.
            one_kind = len(self._kinds[self._model(id_)]) == 1
            receiver = self._gate.choose(id_, None if one_kind else self._able(id_))
            if receiver is None:
                sender.post(lender, id_, COLLECT)
                return
            leg = self.legs[id_] = Leg(receiver, sender)
        leg.lender = lender
        leg.computed = True
        if leg.has_room:
            self._send(id_, leg)
        elif leg.keeper is None:
            leg.ask(id_)

    def _on_room(self, id_: int) -> None:
        leg = self.legs.get(id_)
        if leg is None or self._state.status[id_] != UNFINISHED:
            return
        if self._at["prefilled_ns"][id_] < 0:
            leg.sender.deliver(id_)
        else:
            self._send(id_, leg)

    def _send(self, id_: int, leg: Leg) -> None:
        """All is ready: the KV goes its way."""
        now_ns, state = self._clock.now_ns, self._state
        sender, receiver = leg.sender, leg.receiver
        leg.sends = True
        pools = self._spec.pools
        path = self._spec.paths[pools[sender.index], pools[receiver.index]]
        tokens = (state.prompt[id_] or 1) - leg.found
        n_bytes = path.n_bytes(tokens)
        self._found[id_], self._sent_bytes[id_] = leg.found, n_bytes
        arrived_ns = now_ns
        if n_bytes:
            since_ns, last_bytes = None, 0
            if path.layers > 1 and not state.preemptions[id_]:
                begun_ns = state.scheduled[id_]
                since_ns = begun_ns + (self._at["prefilled_ns"][id_] - begun_ns) // path.layers
                last_bytes = -(-n_bytes // path.layers)
            transfer = self._link(path, sender, receiver).send(
                now_ns, n_bytes, since_ns=since_ns, last_bytes=last_bytes
            )
            self._at["sent_ns"][id_] = max(transfer.begin_ns, now_ns)
            arrived_ns = transfer.arrived_ns + round(n_bytes * path.repack_s_per_byte * 1e9)
        else:
            self._at["sent_ns"][id_] = now_ns
        self._later(arrived_ns, _ARRIVED, id_)

    def _link(self, path: KvPath, sender: Machine, receiver: Machine) -> Link:
        pools = self._spec.pools
        between = pools[sender.index], pools[receiver.index]
        shared = path.shared
        key = {
            "sender": (*between, sender.index, -1),
            "receiver": (*between, -1, receiver.index),
            "pair": (*between, sender.index, receiver.index),
            "pools": (*between, -1, -1),
        }[shared]
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = Link(path.link)
        return link

    def _on_arrived(self, id_: int) -> None:
        now_ns, state = self._clock.now_ns, self._state
        leg = self.legs.pop(id_)
        assert leg.keeper is not None
        leg.collect(id_)
        if state.status[id_] != UNFINISHED:
            leg.drop(id_)
            return
        self._at["landed_ns"][id_] = now_ns
        tokens = state.prompt[id_] or 1
        first_token = self._spec.first_token
        if first_token == "decode":
            # The last token is computed again.
            tokens -= 1
            state.recomputed[id_] += 1
        elif first_token == "arrival":
            state.first_token[id_] = state.token_ns[id_] = now_ns
            self._outside.first_token_elsewhere(id_, now_ns)
        state.replica[id_] = leg.keeper.number
        leg.receiver.post(leg.keeper, id_, LAND, tokens)

    # Clients who go.

    def give_up(self, id_: int) -> bool:
        """The client of a request has gone. True: it was between machines, and has been seen to; else it is at a machine."""
        state = self._state
        leg = self.legs.get(id_)
        prefilled = self._at["prefilled_ns"][id_] >= 0
        if prefilled and self._at["landed_ns"][id_] < 0:
            state.status[id_] = ABORTED
            if leg is not None and not leg.sends:
                # What is on the link goes to its end.
                self.legs.pop(id_)
                leg.drop(id_)
                if leg.computed:
                    leg.collect(id_)
            return True
        if leg is None or prefilled:
            return False
        if self._spec.room == "after_prefill":
            # Its receiver has been chosen and knows nothing of it.
            del self.legs[id_]
            return False
        del self.legs[id_]
        leg.drop(id_)
        if leg.sender.tenants[0].number <= state.replica[id_] <= leg.sender.tenants[-1].number:
            return False
        state.status[id_] = ABORTED
        return True

    # Afterwards.

    def columns(self) -> dict[str, Any]:
        """What is added to the columns of requests."""
        times = {name: np.frombuffer(values, np.int64) for name, values in self._at.items()}
        return {
            "prefill_replica": np.frombuffer(self._prefill_replica, np.int32),
            **times,
            "sent_bytes": np.frombuffer(self._sent_bytes, np.int64),
            "found_at_decode_tokens": np.frombuffer(self._found, np.int64),
        }

    def links(self) -> list[dict[str, int]]:
        """Of every link that carried anything: whose it was (-1: of all of the pool), and how long it was at work."""
        return [
            {
                "from_pool": key[0], "to_pool": key[1], "sender": key[2], "receiver": key[3], "busy_ns": link.busy_ns,
                "places": link.spec.concurrent_transfers,
            }
            for key, link in sorted(self._links.items())
        ]  # fmt: skip
