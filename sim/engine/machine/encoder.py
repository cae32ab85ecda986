"""A machine of the stage that encodes what comes with prompts: a queue, batches and a link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sim.engine.machine.any_machine import AnyMachine
from sim.engine.serve.images import EncoderCache
from sim.engine.spec.encoding import EncoderSpec, EncodeSpec
from sim.engine.spec.images import Image
from sim.engine.tiers.links import Link
from sim.engine.time.events import MACHINES, Alarm, Clock


class Encoder(AnyMachine):
    """A machine that encodes. It has no engine core and no KV."""

    def __init__(
        self,
        index: int,
        spec: EncoderSpec,
        sizes: Sequence[int],
        images: Sequence[tuple[Image, ...]] | None,
        clock: Clock,
    ) -> None:
        super().__init__(index)
        self.link = Link(spec.link)
        self.begun: Callable[[int, int, int, int], None] | None = None
        """Called with each request that is being encoded from now on, the instant, and how many of its images are encoded and found
        encoded."""
        self.done: Callable[[Encoder, list[int], int], None] | None = None
        """Called with a batch that has been encoded, and the instant."""
        self._spec = spec
        self._sizes = sizes
        self._images = images
        self.cache = EncoderCache(spec.cache)
        self._clock = clock
        self._alarm = Alarm(clock, MACHINES, self._on_turn)
        self._queue: deque[int] = deque()
        self._batch: list[int] = []
        self._n_batches = 0

    def _on_turn(self, _event: object) -> None:
        now_ns, spec = self._clock.now_ns, self._spec
        assert self.done is not None
        if self._batch:
            batch, self._batch = self._batch, []
            self._n_batches += 1
            self.done(self, batch, now_ns)
        if self._queue:
            self._batch = [self._queue.popleft() for _ in range(min(spec.max_batch, len(self._queue)))]
            self._alarm.set(now_ns + max(round(self._begin(now_ns) * 1e9), 1))

    def _begin(self, now_ns: int) -> float:
        """The seconds of the batch that begins."""
        assert self.begun is not None
        spec, seconds, sizes = self._spec, self._spec.batch_s, list[int]()
        for id_ in self._batch:
            size, n_found = self._sizes[id_], 0
            new: Sequence[Image] = ()
            if self._images is not None:
                images = self._images[id_]
                new = [image for image in images if not self._finds(id_, image)]
                n_found = len(images) - len(new)
                if n_found:
                    size = sum(image.embeddings for image in new)
                sizes += [image.size for image in new]
            self.begun(id_, now_ns, len(new), n_found)
            if spec.request_s is not None:
                seconds += spec.request_s(size)
        return seconds + spec.together_s(tuple(sizes)) if spec.together_s is not None and sizes else seconds

    def _finds(self, id_: int, image: Image) -> bool:
        """Whether an image is encoded already, or in this batch; it is kept from now on, if it can be."""
        found = self.cache.uses(id_, image)
        if not found and self.cache.has_room(image.embeddings):
            self.cache.put(id_, image)
        self.cache.leaves(id_, image)
        return found

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
        self.cache = EncoderCache(self._spec.cache)
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
    return [Encoder(first + i, each, spec.sizes, spec.images, clock) for i, each in enumerate(spec.machines)]
