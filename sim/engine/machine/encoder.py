"""A machine of the stage that encodes what comes with prompts: a queue, batches and a link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sim.engine.machine.any_machine import AnyMachine
from sim.engine.spec.encoding import EncoderSpec, EncodeSpec
from sim.engine.tiers.links import Link
from sim.engine.time.events import MACHINES, Alarm, Clock


class Encoder(AnyMachine):
    """A machine that encodes. It has no engine core and no KV."""

    def __init__(self, index: int, spec: EncoderSpec, sizes: Sequence[int], clock: Clock) -> None:
        super().__init__(index)
        self.link = Link(spec.link)
        self.begun: Callable[[int, int], None] | None = None
        """Called with each request that is being encoded from now on, and the instant."""
        self.done: Callable[[Encoder, list[int], int], None] | None = None
        """Called with a batch that has been encoded, and the instant."""
        self._spec = spec
        self._sizes = sizes
        self._clock = clock
        self._alarm = Alarm(clock, MACHINES, self._on_turn)
        self._queue: deque[int] = deque()
        self._batch: list[int] = []
        self._n_batches = 0

    def _on_turn(self, _event: object) -> None:
        now_ns, spec = self._clock.now_ns, self._spec
        assert self.begun is not None
        assert self.done is not None
        if self._batch:
            batch, self._batch = self._batch, []
            self._n_batches += 1
            self.done(self, batch, now_ns)
        if self._queue:
            self._batch = [self._queue.popleft() for _ in range(min(spec.max_batch, len(self._queue)))]
            for id_ in self._batch:
                self.begun(id_, now_ns)
            self._alarm.set(now_ns + max(round(self._batch_s() * 1e9), 1))

    def _batch_s(self) -> float:
        """Seconds of the batch that begins."""
        spec, seconds = self._spec, self._spec.batch_s
        if spec.request_s is not None:
            seconds += sum(spec.request_s(self._sizes[id_]) for id_ in self._batch)
        return seconds if spec.together_s is None else seconds + spec.together_s(self._batch)

    def deliver(self, id_: int, kv_tokens: int = 0) -> None:
        """Queue a request."""
        self._queue.append(id_)
        if not self._batch:
            self._alarm.set(self._clock.now_ns)

    def give_up(self, id_: int) -> None:
        """The client of a request that is here has gone: it leaves the queue; in a batch it is encoded to no use."""
        if id_ in self._queue:
            self._queue.remove(id_)

    def abort(self, now_ns: int) -> list[int]:
        """Stop; the requests that are here, running ones before waiting ones."""
        ids = [*self._batch, *self._queue]
        self._batch = []
        self._queue.clear()
        self._alarm.cancel()
        return ids

    # What routers and the fleet see.

    @property
    def has(self) -> set[int]:
        """Requests that wait or are encoded here."""
        return {*self._batch, *self._queue}

    @property
    def events(self) -> int:
        """Batches that have ended."""
        return self._n_batches

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._batch)


def encoders_of(spec: EncodeSpec, first: int, clock: Clock) -> list[Encoder]:
    """The machines of the stage; *first*: the number of the first."""
    return [Encoder(first + i, each, spec.sizes, clock) for i, each in enumerate(spec.machines)]
