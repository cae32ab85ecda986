"""What a replica keeps: the state of requests, and lanes with their iteration in flight."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import simpy

from policies.view import PartialSeq, RunningSeq, WaitingSeq
from sim.engine.clock import Clock
from sim.engine.columns import BUBBLES
from sim.engine.running import TapedSet, UniformSet


class Cluster(Protocol):
    """What a replica tells the cluster."""

    turn: int
    """Priority of the event that is having its turn in this instant."""

    def finished(self, now_ns: int, turn: int, /) -> None: ...

    def rejected(self, id_: int, reason: str, /) -> None: ...


class PolicyError(ValueError):
    """A plan that cannot be carried out; the message says which policy, what it asked and the way out."""


class RequestState:
    """What is known of every request, by id: columns shared by all replicas of a run."""

    def __init__(
        self, prompt: array[int], output: array[int], arrival: array[int],
        model: array[int] | None, deadline: array[int] | None, pipelined: bool,
    ) -> None:  # fmt: skip
        n = len(prompt)
        self.prompt = prompt
        self.output = output
        self.model = model
        self.deadline = deadline
        """Relative to arrival, -1 absent; None: nobody has one."""
        self.left = output[:]
        """Tokens still to emit."""
        self.arrival = arrival
        blank = array("q", [-1]) * n
        self.scheduled = array("q", blank)
        self.first_token = array("q", blank)
        self.finish = array("q", blank)
        self.bubbles = tuple(array("q", bytes(8 * n)) for _ in BUBBLES) if pipelined else ()
        """Idle time of stages ahead of its micro-batches, by kind."""
        self.replica = array("i", [-1]) * n
        self.preemptions = array("i", bytes(4 * n))
        self.status = bytearray([2]) * n
        self.reason = array("i", [-1]) * n


class Turn(simpy.Event):
    """A replica's turn at the end of an instant. One that has fired can be armed again."""

    _value = None
    _ok = True
    _defused = False

    def __init__(self, env: Clock, callbacks: list[Any]) -> None:
        self.env = env
        self.callbacks: Any = None
        self._mine = callbacks
        self.lane: Any = None

    def arm(self, priority: int, delay: int) -> None:
        self.callbacks = self._mine
        self.env.schedule(self, priority, delay)


class QueueView(Sequence[WaitingSeq]):
    """The queue as policies see it: nothing to write with."""

    __slots__ = ("_queue",)

    def __init__(self, queue: deque[WaitingSeq]) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __iter__(self) -> Iterator[WaitingSeq]:
        return iter(self._queue)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._queue)[index] if isinstance(index, slice) else self._queue[index]


class RunningView(Sequence[RunningSeq]):
    """A lane's admitted sequences, oldest first, built when looked at."""

    __slots__ = ("_describe", "_lane")

    def __init__(self, lane: Lane, describe: Callable[[Lane, int], RunningSeq]) -> None:
        self._lane = lane
        self._describe = describe

    def __len__(self) -> int:
        return len(self._lane.admitted)

    def __getitem__(self, index: Any) -> Any:
        ids = list(self._lane.admitted)
        if isinstance(index, slice):
            return tuple(self._describe(self._lane, id_) for id_ in ids[index])
        return self._describe(self._lane, ids[index])

    def __reversed__(self) -> Iterator[RunningSeq]:
        for id_ in list(reversed(self._lane.admitted)):
            yield self._describe(self._lane, id_)


class Paused:
    """A decoding sequence that the present plan leaves out."""

    __slots__ = ("blocks", "cached", "token_ns")

    def __init__(self, cached: int, blocks: int, token_ns: int) -> None:
        self.cached = cached
        self.blocks = blocks
        self.token_ns = token_ns


class Lane:
    """A micro-batch slot: its running set and the iteration in flight."""

    __slots__ = (
        "admitted",
        "bubbles",
        "bubbles_at_join",
        "chunks",
        "completing",
        "decodes",
        "decoding",
        "end_ticks",
        "event",
        "first_ticks",
        "growth_first",
        "growth_ticks",
        "in_flight",
        "index",
        "last_round_ns",
        "n",
        "partial",
        "paused",
        "record",
        "running_view",
        "span_end_ticks",
        "start_ticks",
        "taped",
        "through_arrivals",
    )

    def __init__(self, index: int, decoding: UniformSet | TapedSet) -> None:
        self.index = index
        # Any: which of the two it is, `taped` says, in the inner loop.
        self.decoding: Any = decoding
        self.taped = isinstance(decoding, TapedSet)
        self.admitted: dict[int, None] = {}
        self.partial: dict[int, PartialSeq] = {}
        self.paused: dict[int, Paused] = {}
        self.last_round_ns = -1
        self.in_flight = False
        self.event: Turn | None = None
        self.n = 0
        self.start_ticks = 0
        self.span_end_ticks = 0
        self.bubbles = [0] * len(BUBBLES)
        """Idle time of stages ahead of its decodes in ns, all rounds together, by kind."""
        self.bubbles_at_join: dict[int, list[int]] = {}
        self.first_ticks = 0
        self.growth_ticks = 0
        self.end_ticks: Any = None
        """Taped spans: the end of each iteration, ticks from the start."""
        self.decodes = False
        self.chunks: tuple[tuple[int, int], ...] = ()
        self.completing: list[int] = []
        self.growth_first = 0
        self.through_arrivals = True
        self.record: tuple[Any, ...] = ()
        self.running_view: Sequence[RunningSeq] = ()
