"""Images in the steps of an engine core: which are encoded in which step, and the cache of their encodings.

Where a scheduler plans them, the rules are vLLM's (0.33, `v1/core/encoder_cache_manager.py` and
`Scheduler._try_schedule_encoder_inputs`): an image is encoded in the step that computes its first token, all of it at once; an
encoding stays while a request needs it, and then until its room is needed, the one that has been without users longest going first.
Where budget or cache do not hold an image, the chunk of the prompt ends ahead of it. Encodings are given up by a request when a
step that computes the last of their tokens has been planned; vLLM's asynchronous scheduler does so when that step has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.requests.state import RequestState
from sim.engine.spec.images import Image, ImagesSpec
from sim.engine.time.clock import TICK_BITS, to_ticks
from sim.engine.time.errors import PolicyError


class EncoderCache:
    """Encodings by the content of their image, each with its embeddings and the requests that need it."""

    def __init__(self, size: int, encodings: Mapping[int, tuple[int, set[int]]] | None = None) -> None:
        """*encodings*: those that are here, the ones without users as they are to go."""
        self.size = size
        self._encodings = {content: (held, set(users)) for content, (held, users) in (encodings or {}).items()}
        self.held = sum(held for held, _ in self._encodings.values())
        """Embeddings of all encodings."""
        self._unused = dict.fromkeys(content for content, (_, users) in self._encodings.items() if not users)

    def copy(self) -> EncoderCache:
        used = {content: each for content, each in self._encodings.items() if each[1]}
        return EncoderCache(self.size, {**used, **{content: self._encodings[content] for content in self._unused}})

    def uses(self, id_: int, image: Image) -> bool:
        """Whether an encoding is here, which the request then uses."""
        found = self._encodings.get(image.content)
        if found is None:
            return False
        self._unused.pop(image.content, None)
        found[1].add(id_)
        return True

    def has_room(self, embeddings: int) -> bool:
        """Whether so many fit, when encodings without users have gone, as many as it takes."""
        lacks = embeddings + self.held - self.size
        if lacks > sum(self._encodings[content][0] for content in self._unused):
            return False
        while lacks > 0:
            content = next(iter(self._unused))
            del self._unused[content]
            gone, _ = self._encodings.pop(content)
            self.held -= gone
            lacks -= gone
        return True

    def put(self, id_: int, image: Image) -> None:
        self._encodings[image.content] = image.embeddings, {id_}
        self.held += image.embeddings

    def leaves(self, id_: int, image: Image) -> None:
        """The request needs the encoding no more."""
        found = self._encodings.get(image.content)
        if found is not None and id_ in found[1]:
            found[1].remove(id_)
            if not found[1]:
                self._unused[image.content] = None


class PlannedImages:
    """The images that a plan encodes on its way, one sequence after the other."""

    def __init__(self, of: Sequence[tuple[Image, ...]], budget: int, cache: EncoderCache) -> None:
        self._of = of
        self._cache = cache
        self._left = budget
        self._asked: tuple[int, list[Image]] = (-1, [])
        self._taken: dict[int, list[Image]] = {}

    def fits(self, id_: int, cached: int, tokens: int) -> int:
        """How many of *tokens* tokens behind *cached* ones can be computed: those ahead of the first image that is not encoded
        and cannot be."""
        new, left = list[Image](), self._left
        self._asked = id_, new
        for image in self._of[id_]:
            if image.first >= cached + tokens:
                break
            if image.first + image.tokens <= cached or any(each.content == image.content for each in new):
                continue
            if self._cache.uses(id_, image):
                continue
            needed = image.embeddings + sum(each.embeddings for each in new)
            if image.embeddings > left or not self._cache.has_room(needed):
                return max(image.first - cached, 0)
            new.append(image)
            left -= image.embeddings
        return tokens

    def take(self, id_: int) -> list[Image]:
        """The sequence asked about last is planned: the images that are encoded for it."""
        asked, new = self._asked
        assert asked == id_
        for image in new:
            self._cache.put(id_, image)
            self._left -= image.embeddings
        self._taken[id_] = new
        return new

    def computes(self, id_: int, cached: int, tokens: int) -> int:
        """As many of *tokens* tokens as fit, which are planned."""
        tokens = self.fits(id_, cached, tokens)
        if tokens:
            self.take(id_)
        return tokens

    def undo(self, id_: int) -> None:
        """A sequence is preempted."""
        self._left += sum(image.embeddings for image in self._taken.pop(id_, ()))
        for image in self._of[id_]:
            self._cache.leaves(id_, image)


class Images:
    """The images of the requests of an engine core."""

    def __init__(self, spec: ImagesSpec, state: RequestState, batches: Sequence[MicroBatch]) -> None:
        self._spec = spec
        self._batches = batches
        self.cache = EncoderCache(spec.cache)
        self._state = state
        state.keep_images()
        self._here: set[int] = set()
        """Requests that may need encodings."""

    def planned(self) -> PlannedImages:
        """For a plan, which changes nothing here."""
        self._give_up()
        assert self._spec.budget is not None
        return PlannedImages(self._spec.of, self._spec.budget, self.cache.copy())

    def _give_up(self) -> None:
        """Requests need the encodings of tokens no more that are computed, and none when they have left."""
        for id_ in list(self._here):
            partial = next((batch.partial[id_] for batch in self._batches if id_ in batch.partial), None)
            for image in self._spec.of[id_]:
                if partial is None or image.first + image.tokens <= partial.cached_tokens:
                    self.cache.leaves(id_, image)
            if partial is None:
                self._here.remove(id_)

    def encode(self, batch: MicroBatch, run: Sequence[tuple[int, int]]) -> int:
        """Encode what the prompt chunks of *run*, which have been taken into *batch*, need; the ticks that it takes."""
        if not any(self._spec.of[id_] for id_, _ in run):
            return 0
        self._give_up()
        chunks = [(id_, batch.partial[id_].cached_tokens - tokens, tokens) for id_, tokens in run if self._spec.of[id_]]
        encoded = self._as_needed(chunks) if self._spec.budget is None else self._as_planned(self._spec.budget, chunks)
        sizes: list[int] = []
        state = self._state
        for (id_, before, tokens), new in zip(chunks, encoded, strict=True):
            # One that begins in what a prefix cache has found is needed from the request's first chunk on.
            since = before if id_ in self._here else 0
            began = [image for image in self._within(id_, before, tokens) if image.first >= since]
            state.encoded_images[id_] += len(new)
            state.image_hits[id_] += sum(image not in new for image in began)
            sizes += [image.size for image in new]
            self._here.add(id_)
        if not sizes:
            return 0
        ticks = to_ticks(self._spec.seconds(tuple(sorted(sizes))))
        for (id_, *_), new in zip(chunks, encoded, strict=True):
            if new:
                state.encode_ns[id_] += ticks >> TICK_BITS
        return ticks

    def _within(self, id_: int, before: int, tokens: int) -> list[Image]:
        """The images of which a chunk holds tokens."""
        return [
            image
            for image in self._spec.of[id_]
            if image.first < before + tokens and image.first + image.tokens > before
        ]

    def _as_planned(self, budget: int, chunks: Sequence[tuple[int, int, int]]) -> list[list[Image]]:
        """The images that are encoded for each chunk, which its scheduler has planned."""
        work, found = PlannedImages(self._spec.of, budget, self.cache), list[list[Image]]()
        for id_, before, tokens in chunks:
            if work.fits(id_, before, tokens) < tokens:
                raise PolicyError(
                    f"request {id_} was planned to compute {tokens} tokens behind {before}, with an image among them that neither "
                    "is encoded nor can be in this iteration; a scheduler asks `ReplicaView.images`"
                )
            found.append(work.take(id_))
        return found

    def _as_needed(self, chunks: Sequence[tuple[int, int, int]]) -> list[list[Image]]:
        """The images that are encoded for each chunk: those that are not kept, whatever room there is.

        SGLang's rule (0.5.23, `_batch_encode_per_image_misses`): all of them in one pass, equal ones once; then they are kept, one
        after the other, those that were used longest ago going first. A chunk with part of an image that is not kept encodes it
        whole again.
        """
        found: list[list[Image]] = []
        seen: set[int] = set()
        for id_, before, tokens in chunks:
            new: list[Image] = []
            for image in self._within(id_, before, tokens):
                if image.content not in seen:
                    seen.add(image.content)
                    if self.cache.uses(id_, image):
                        self.cache.leaves(id_, image)
                    else:
                        new.append(image)
            found.append(new)
        for (id_, *_), new in zip(chunks, found, strict=True):
            for image in new:
                if self.cache.has_room(image.embeddings):
                    self.cache.put(id_, image)
                    self.cache.leaves(id_, image)
        return found

    def reset(self) -> None:
        """The machine has stopped, and nothing is left of what it encoded."""
        self.cache = EncoderCache(self._spec.cache)
        self._here.clear()
