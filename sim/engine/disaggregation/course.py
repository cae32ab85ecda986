"""The course of requests through the stages of their life. Here there is one, in which a machine serves a request to its end.

A course has a router for each stage, routes requests from stage to stage, and says for which machines a request waits and which it
needs. `sim.engine.disaggregation.handovers` is the course whose stages are prefill and decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final, Generic, Protocol

from sim.engine.gateway.gateway import Gateway
from sim.engine.machine.any_machine import AnyMachine, M
from sim.engine.requests.state import RequestState
from sim.engine.time.events import HANDOVERS, Alarm, Clock

HEARD_AFTER_NS: Final = 1
"""Messages from one machine reach another this much later; see `sim.engine.simulation.cluster.FELT_AFTER_NS`."""


class Present(Protocol):
    """The fleet, where machines start and stop: it says which are ready, and hears of requests."""

    def ready(self, machines: Sequence[M], /) -> list[M]: ...

    def took(self, id_: int, machine: AnyMachine, stage: str, /) -> None:
        """A request has reached *machine* for a stage of its life."""
        ...

    def hold(self, id_: int, /) -> bool:
        """Whether a request for which no machine is ready waits until one is; else it is lost."""
        ...

    def computed(self, machine: AnyMachine, tokens: int, /) -> None:
        """*machine* has done its stage of a request, which has *tokens* output tokens of it."""
        ...

    def discarded(self, tokens: int, /) -> None:
        """Output tokens that no client ever got are given up."""
        ...

    def send_again(self, ids: list[int], /) -> None:
        """Requests are routed anew."""
        ...

    def perhaps_empty(self, machine: AnyMachine, /) -> None:
        """A request between machines needs *machine* no more."""
        ...


@dataclass(slots=True)
class Interrupted:
    """The requests that had to do with a machine that stops."""

    here: set[int]
    """Requests that are queued, loading, landing or running there."""
    lost_kv: list[int] = field(default_factory=list[int])
    """Requests between it and another machine whose KV is lost, or given up."""
    kept_kv: list[int] = field(default_factory=list[int])
    """Requests whose KV was on its way to it: the machine that has it still sends it to another one."""
    unharmed: list[int] = field(default_factory=list[int])
    """Requests that wait for room before anything is computed: they are routed again and have lost nothing."""
    chosen_again: int = 0
    """Requests for which another machine that decodes is chosen: their prompt is computed, or on its way to be, elsewhere."""


class Course(Generic[M]):
    """The course of requests that one machine serves from beginning to end."""

    stages: tuple[str, ...] = ("serve",)

    def __init__(self, entry: Gateway[M], state: RequestState) -> None:
        """*entry* routes new requests."""
        self._entry = entry
        self._state = state
        self.present: Present | None = None
        """The fleet, which knows the ready machines; None: all are."""
        self.awaiting: dict[int, None] = {}
        """Requests with a computed prompt for which no machine that decodes is ready, the longest wait first."""

    def attend(self, present: Present) -> None:
        """Ask and tell *present* about machines from now on."""
        self.present = present

    def come(self, id_: int) -> None:
        """Route a request that has passed the front end, or is routed again."""
        machines, present = self._entry.hosting(id_), self.present
        if present is not None:
            ready = present.ready(machines)
            if machines and not ready:
                present.hold(id_)
                return
            machines = ready
        machine = self._entry.choose(id_, machines)
        if machine is not None:
            self._took(id_, machine, self.stages[0])
            machine.deliver(id_)

    def _took(self, id_: int, machine: M, stage: str) -> None:
        if self.present is not None:
            self.present.took(id_, machine, stage)

    def come_again(self, id_: int) -> None:
        """Begin anew with a request: nothing of its earlier stages counts."""

    def ended(self, id_: int, now_ns: int) -> None:
        """A request has ended on a machine, or been rejected there."""

    def give_up(self, id_: int) -> bool:
        """Abort a request whose client has gone; False where it is at a machine, which has to abort it."""
        return False

    # Questions of the fleet.

    def role_of(self, machine: AnyMachine) -> str:
        """The stage that *machine* does, or `both`."""
        return "both"

    def wanted(self, id_: int) -> list[tuple[str, Sequence[AnyMachine]]]:
        """The stages of which a held request needs a ready machine to go on, and the machines that could do each."""
        return [(self.stages[0], self._entry.hosting(id_))]

    def ways(self, id_: int) -> list[list[Sequence[AnyMachine]]]:
        """The ways in which a held request can be served to its end, as the machines of which each needs one."""
        return [[self._entry.hosting(id_)]]

    def first_token_by(self, id_: int) -> list[int]:
        """Numbers of the engine cores that have their part in the first token of a request."""
        return [self._state.replica[id_]]

    def last_tokens(self, id_: int) -> int:
        """Output tokens of a finished request that the machine of its last stage has emitted."""
        return self._state.output[id_]

    def needs(self, machine: AnyMachine) -> bool:
        """Whether a request that is not at *machine* needs it."""
        return False

    def interrupt(self, machine: AnyMachine, keeps_kv: Callable[[int], bool]) -> Interrupted:
        """End everything between *machine*, which stops, and others, before its state is lost; *keeps_kv*: whether a request whose
        KV was on its way there is to have it sent to another one."""
        return Interrupted(requests_at(machine))

    # Results, and what is checked.

    def places(self, id_: int) -> int:
        """The number of places between machines where a request is."""
        return 0

    def facts(self) -> dict[str, Any]:
        """Facts about the whole run."""
        return {}

    def columns(self) -> dict[str, Any]:
        """The columns of requests that the course adds, by name."""
        return {}


class Messages:
    """Messages that are heard later: those of one instant in the order of their kind and of requests."""

    def __init__(self, clock: Clock, hear: Callable[[int, int, int], None]) -> None:
        """*hear* gets a message's kind, its request, and a number by which those of something that is over are known."""
        self._clock = clock
        self._hear = hear
        self._alarm = Alarm(clock, HANDOVERS, self._on_due)
        self._due: list[tuple[int, int, int, int]] = []
        self._set_to = -1

    def later(self, at_ns: int, what: int, id_: int, which: int) -> None:
        """Have a message heard at *at_ns*."""
        heappush(self._due, (at_ns, what, id_, which))
        if self._due[0][0] != self._set_to:
            self._set_to = self._due[0][0]
            self._alarm.set(self._set_to)

    def _on_due(self, _event: object) -> None:
        due, now_ns = self._due, self._clock.now_ns
        # While it runs nothing needs to be set.
        self._set_to = now_ns
        while due and due[0][0] <= now_ns:
            _, what, id_, which = heappop(due)
            self._hear(what, id_, which)
        self._set_to = -1
        if due:
            self._set_to = due[0][0]
            self._alarm.set(self._set_to)


def requests_at(machine: AnyMachine) -> set[int]:
    """Requests that are queued, loading, landing or running at *machine*."""
    here: set[int] = set()
    for core in machine.cores:
        here.update(seq.id for seq in core.sequences.queue)
        here.update(id_ for batch in core.batches for id_ in batch.admitted)
        here.update(core.sequences.connector.tiers.in_transit)
        here.update(core.sequences.connector.landing())
        if core.sequences.grammars is not None:
            here.update(core.sequences.grammars.ids())
    return here
