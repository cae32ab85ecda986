"""What becomes of requests between two machines when one of these goes.

Where the machine that decodes goes before KV is on its way to it, another is chosen, whatever the rule for requests in flight. What
is on the link, or waits or runs at a machine that goes, falls under that rule (`sim.engine.fleet`).
"""

# pyright: reportPrivateUsage=false
# These are functions of `Handovers`, kept outside of it so that either can be read in one sitting.

from __future__ import annotations

from typing import NamedTuple

from sim.engine.columns import UNFINISHED
from sim.engine.handover import _PREFILLED, HEARD_AFTER_NS, Handovers
from sim.engine.links import Link, Transfer
from sim.engine.machine import Machine


class Cut(NamedTuple):
    """Whom a machine that goes had to do with."""

    here: set[int]
    """Who waits or runs there."""
    lent: list[int]
    """Whose prompt it has computed and whose KV has not arrived elsewhere."""
    on_link: list[int]
    """Whose KV is on its way to it from a machine that has it still."""
    unharmed: list[int]
    """Who waits for room before anything is computed: they go to the router again and have lost nothing."""
    chosen_again: int
    """For so many another machine that decodes is chosen: those whose prompt is computed, or on its way to be, elsewhere."""


def cut(handovers: Handovers, machine: Machine) -> Cut:
    """End all that is between *machine* and others, before it forgets what it has."""
    state, clock = handovers._state, handovers._clock
    here: set[int] = set()
    for tenant in machine.tenants:
        here.update(seq.id for seq in tenant.sequences.queue)
        here.update(id_ for lane in tenant.lanes for id_ in lane.admitted)
        here.update(() if tenant.loading is None else tenant.loading.in_flight)
        exchange = tenant.sequences.exchange
        here.update(() if exchange is None else exchange.landing())
    on_link: list[int] = []
    cancelled: list[tuple[Link, Transfer]] = []
    unharmed: list[int] = []
    chosen_again = 0
    for id_, leg in list(handovers.legs.items()):
        if leg.sender is not machine and leg.receiver is not machine:
            continue
        del handovers.legs[id_]
        delivered = leg.delivered
        leg.end()
        goes_on = state.status[id_] == UNFINISHED
        if leg.sender is machine:
            leg.drop(id_)
            handovers._needs_no_more(leg.receiver)
            if not delivered and goes_on:
                unharmed.append(id_)
            continue
        handovers._needs_no_more(leg.sender)
        if leg.carrier is not None:
            cancelled.append(leg.carrier)
        if leg.sends and not goes_on:
            leg.collect(id_)
        elif leg.sends:
            on_link.append(id_)
        elif delivered:
            chosen_again += 1
            if leg.computed:
                choose_anew(handovers, id_)
        elif goes_on:
            unharmed.append(id_)
    lent = [id_ for id_ in _lent(machine) if is_between(handovers, id_, machine)]
    for id_ in _lent(machine):
        # News of it is not heard any more, be it that its client has gone.
        handovers.passages[id_] += 1
    # The last first: the place of one behind which another waited is free when that is.
    for link, transfer in sorted(cancelled, key=lambda each: each[1].sent_ns, reverse=True):
        link.cancel(transfer, clock.now_ns)
    for key, link in handovers._links.items():
        if machine.index in key[2:]:
            link.stop(clock.now_ns)
    return Cut(here, [id_ for id_ in lent if state.status[id_] == UNFINISHED], on_link, unharmed, chosen_again)


def _lent(machine: Machine) -> list[int]:
    return [
        id_
        for tenant in machine.tenants
        if tenant.sequences.exchange is not None
        for id_ in tenant.sequences.exchange.lent
    ]


def is_between(handovers: Handovers, id_: int, sender: Machine | None = None) -> bool:
    """Whether the KV of a request is with the machine that computed it, *sender* where that is given, and has not arrived."""
    number = handovers.prefill_replica[id_]
    if handovers._at["prefilled_ns"][id_] < 0 or handovers._at["landed_ns"][id_] >= 0:
        return False
    return sender is None or handovers._lenders[number][0] is sender


def waits_for_room(handovers: Handovers, id_: int) -> bool:
    """Whether a request waits for room before its prompt goes to be computed."""
    leg = handovers.legs.get(id_)
    return leg is not None and not leg.delivered


def needs(handovers: Handovers, machine: Machine) -> bool:
    """Whether any request between machines needs *machine*."""
    return any(leg.sender is machine or leg.receiver is machine for leg in handovers.legs.values()) or any(
        handovers._state.status[id_] == UNFINISHED and is_between(handovers, id_, machine) for id_ in _lent(machine)
    )


def choose_anew(handovers: Handovers, id_: int) -> None:
    """Another machine that decodes is chosen for one whose prompt has been computed."""
    for name in ("room_ns", "sent_ns"):
        handovers._at[name][id_] = -1
    handovers._later(handovers._clock.now_ns + HEARD_AFTER_NS, _PREFILLED, id_, handovers.passages[id_])


def give_up_kv(handovers: Handovers, id_: int, *, sender_is_there: bool) -> int:
    """The KV of one between machines is given up: tokens that had been emitted and that nobody got."""
    state = handovers._state
    handovers.awaiting.pop(id_, None)
    state.recomputed[id_] += state.to_hand(id_)
    if sender_is_there:
        handovers._collect(id_)
    if handovers._spec.first_token != "arrival":
        return 0
    state.left[id_] += 1
    return 1


def come_again(handovers: Handovers, id_: int) -> None:
    """A request begins its way anew: what was said of it is not heard any more."""
    handovers.passages[id_] += 1
    for column in handovers._at.values():
        column[id_] = -1
    handovers.prefill_replica[id_] = -1
