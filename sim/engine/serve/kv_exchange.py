"""KV blocks that an engine core holds for sequences that another machine computes or decodes.

A machine that computes prompts has *lent* blocks: the prompt is computed and the KV has not arrived yet. A machine that decodes has
requests that *ask* for blocks, *kept* blocks while KV is on its way, and sequences that have *landed* with it in the queue.

Messages come from outside (`tell`) and are read when an iteration is planned, as an engine reads its own connector's; a plan made
ahead knows those that had arrived when the iteration before it started.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final, Protocol

from policies.view import ALWAYS_NS, WaitingSeq
from sim.engine.batch.async_scheduling import AsyncScheduling
from sim.engine.batch.micro_batch import Ended, MicroBatch, Paused
from sim.engine.batch.version import Version
from sim.engine.cache.prefix_lookup import PrefixLookup
from sim.engine.kv.pool import KvPool
from sim.engine.record.columns import ABORTED, FINISHED, Recorder
from sim.engine.requests.reservations import Reservations
from sim.engine.requests.state import RequestState
from sim.engine.spec.roles import Part
from sim.engine.tiers.loaded import LoadedKv
from sim.engine.time.clock import TICK_BITS

ASK: Final = 0
"""A request asks for blocks for its prompt's KV."""
LAND: Final = 1
"""KV has arrived for one that has blocks."""
DROP: Final = 2
"""A request that asked or has blocks is not served here."""
COLLECT: Final = 3
"""Lent KV has arrived; its blocks may be freed."""


class Elsewhere(Protocol):
    """The cluster's methods."""

    def prefilled(self, id_: int, end_ns: int, /) -> None: ...

    def has_room(self, id_: int, now_ns: int, found_tokens: int, leg: int, /) -> None: ...

    def no_room(self, id_: int, now_ns: int, leg: int, /) -> None: ...


class Own(Protocol):
    """The engine core's `sim.engine.serve.sequences.Sequences`."""

    kv: KvPool
    state: RequestState
    queue: deque[WaitingSeq]
    reservations: Reservations
    ahead: AsyncScheduling | None
    given_up: dict[int, int]
    prefix_lookup: PrefixLookup
    loaded_kv: LoadedKv
    n_admitted: int
    version: Version
    n_computed: int

    def paused_growth(self, batch: MicroBatch, paused: Paused, /) -> int: ...


class Exchange:
    """The part of an engine core's `Sequences` that deals with other machines, where its machine has a part in handing over."""

    __slots__ = (
        "_alone", "_gives_token", "_legs", "_lent_tokens", "_outside", "_recorder", "asked", "drops_token", "hands_over",
        "headroom_tokens", "joined_ns", "kept", "landed", "lent", "mail", "n_unread", "promised", "sequences",
    )  # fmt: skip

    def __init__(self, sequences: Own, part: Part, outside: Elsewhere, recorder: Recorder, *, alone: bool) -> None:
        self.sequences = sequences
        self._outside = outside
        self._recorder = recorder
        self._alone = alone
        self.joined_ns: array[int] | None = None
        """Each request's admission with its KV (ns)."""
        self.hands_over = part.role == "prefill"
        self.drops_token = self.hands_over and part.drops_token
        """Prompts that are done emit nothing here: the machine that decodes computes their last token again."""
        self._gives_token = part.gives_token
        self.headroom_tokens = part.headroom_tokens
        self.mail: deque[tuple[int, int, int, int]] = deque()
        """Messages: time, kind, request, and tokens that arrived with it; a request for blocks has the number of its leg
        instead."""
        self.n_unread = 0
        """Unread requests for blocks."""
        self.asked: deque[int] = deque()
        self._legs: dict[int, int] = {}
        """Leg numbers of requests that ask for blocks: a request that returns has another."""
        self.kept: dict[int, int] = {}
        """KV blocks of requests whose KV is on its way."""
        self.landed: dict[int, int] = {}
        """KV blocks of requests that wait in the queue with all their KV, ahead of all others."""
        self.lent: dict[int, int] = {}
        self._lent_tokens: dict[int, int] = {}
        self.promised = 0
        """Blocks that `Reservations` counts for landed requests, where the scheduler reserves."""

    @property
    def coming(self) -> int:
        """Requests on their way here whose messages have been read."""
        return len(self.asked) + len(self.kept)

    @property
    def holds(self) -> bool:
        """Whether blocks are held for a request that neither waits nor runs here, and will be given back or used."""
        return bool(self.lent or self.kept)

    def tell(self, now_ns: int, what: int, id_: int, tokens: int) -> None:
        """Add a message."""
        self.sequences.version.hear(now_ns)
        self.mail.append((now_ns, what, id_, tokens))
        self.n_unread += what == ASK

    def read(self, batch: MicroBatch, ticks: int) -> None:
        """Read the messages that the coming plan knows, and give blocks to requests that ask for them, first come, first served."""
        ahead = self.sequences.ahead
        mail, known_ns = self.mail, ALWAYS_NS if ahead is None else ahead.seen_ns
        new: list[int] = []
        while mail and mail[0][0] <= known_ns:
            _, what, id_, tokens = mail.popleft()
            self.sequences.version.changes += 1
            if what == ASK:
                self.n_unread -= 1
                self.asked.append(id_)
                self._legs[id_] = tokens
                new.append(id_)
            elif what == LAND:
                self._land(id_, tokens)
            elif what == DROP:
                self._drop(id_)
            else:
                self._collect(id_)
        while self.asked and self._make_room(self.asked[0], batch, ticks):
            self.asked.popleft()
        for id_ in new:
            if id_ in self._legs:
                self._outside.no_room(id_, ticks >> TICK_BITS, self._legs[id_])

    def _make_room(self, id_: int, batch: MicroBatch, ticks: int) -> bool:
        sequences = self.sequences
        kv, state, reservations = sequences.kv, sequences.state, sequences.reservations
        tokens = state.to_hand(id_)
        needed = kv.held(tokens)
        # As for one that is computed here, one token of it is never found.
        found = kv.found_blocks(id_, tokens) if kv.caches else 0
        fresh = needed - found + (kv.unheld_blocks(id_, found) if found else 0)
        if fresh + self._spoken_for(batch) > kv.free:
            return False
        if not reservations.has_room_for(id_):
            return False
        if kv.caches:
            kv.admit(id_, found)
        kv.take(needed - found)
        reservations.make(id_)
        self.kept[id_] = needed
        self._outside.has_room(id_, ticks >> TICK_BITS, found * kv.block_tokens, self._legs.pop(id_))
        return True

    def _spoken_for(self, batch: MicroBatch) -> int:
        """Free blocks that the coming iteration takes, or is not to know of, and those left free for sequences to grow."""
        sequences, decoding = self.sequences, batch.decoding
        blocks = decoding.growth_blocks if decoding.n else 0
        for paused in batch.paused.values():
            blocks += sequences.paused_growth(batch, paused)
        ahead = sequences.ahead
        if ahead is not None and ahead.seen_ns != ALWAYS_NS:
            for gone in batch.leaving.values():
                blocks += (0 if sequences.kv.caches else gone.blocks) + gone.growth_blocks * gone.steps_on
        if self.headroom_tokens:
            others = sequences.n_admitted + len(self.kept) + len(self.landed)
            blocks += sequences.kv.blocks(self.headroom_tokens * others)
        return blocks

    def _land(self, id_: int, tokens: int) -> None:
        sequences = self.sequences
        blocks = self.kept.pop(id_)
        if sequences.kv.caches:
            sequences.kv.loaded(id_, tokens)
        seq = sequences.state.waiting_seq(id_, cached_tokens=tokens)._replace(kept_blocks=blocks)
        # Ahead of requests without KV: one whose blocks are not free would keep back others whose blocks are here.
        sequences.queue.insert(n_with_blocks(sequences), seq)
        self.landed[id_] = blocks
        self.promised += sequences.reservations.counted(id_)
        sequences.n_computed += not seq.tokens

    def take_in(self, id_: int, now_ns: int) -> None:
        """One that has landed is admitted."""
        if self.joined_ns is not None and self.joined_ns[id_] < 0:
            self.joined_ns[id_] = now_ns
        self._out_of_the_queue(id_)
        if self.sequences.kv.caches:
            self.sequences.kv.writes_on(id_, self.sequences.state.prompt[id_])

    def _out_of_the_queue(self, id_: int) -> None:
        del self.landed[id_]
        self.promised -= self.sequences.reservations.counted(id_)

    def _drop(self, id_: int) -> None:
        if id_ in self.asked:
            self.asked.remove(id_)
            del self._legs[id_]
        elif id_ in self.kept:
            self.sequences.kv.release(id_, self.kept.pop(id_), 0)
            self.sequences.reservations.end(id_)

    def leave_the_queue(self, id_: int, tokens: int) -> None:
        """One that has landed, with the KV of *tokens* tokens, is given up in the queue."""
        blocks = self.landed[id_]
        self._out_of_the_queue(id_)
        self.sequences.reservations.end(id_)
        self.sequences.kv.release(id_, blocks, tokens)

    def surrender(self) -> bool:
        """Return the last landed request to be computed here from the beginning; False where there is none.

        A machine needs it on which no sequence runs or can be admitted, as all blocks are kept for waiting requests with their KV:
        each lacks a block for its next token.
        """
        if not self.landed:
            return False
        sequences, state = self.sequences, self.sequences.state
        id_ = next(reversed(self.landed))
        seq = next(seq for seq in sequences.queue if seq.id == id_)
        sequences.queue.remove(seq)
        sequences.n_computed -= not seq.tokens
        self.leave_the_queue(id_, seq.cached_tokens)
        state.preemptions[id_] += 1
        state.recomputed[id_] += seq.cached_tokens
        sequences.queue.insert(n_with_blocks(sequences), state.waiting_seq(id_, preempted=True))
        sequences.version.changes += 1
        return True

    def leaves(self, id_: int) -> bool:
        """Whether a prompt that has been computed here is decoded elsewhere: where anything is left to decode."""
        return self.hands_over and self.sequences.state.left[id_] > (0 if self.drops_token else 1)

    def depart(self, batch: MicroBatch, id_: int, cached: int, end_ns: int) -> None:
        """A prompt is done; its blocks stay until its KV has arrived elsewhere."""
        sequences, state = self.sequences, self.sequences.state
        gone = sequences.given_up.pop(id_, None) is not None
        if not self.drops_token:
            state.left[id_] -= 1
            if self._gives_token:
                if state.first_token[id_] >= 0:
                    self._recorder.resumed_gaps_ns.append(end_ns - state.token_ns[id_])
                state.token_ns[id_] = end_ns
        if sequences.ahead is not None:
            # It is known to end with this token, so that the coming plan has no step of it; its seat is not free yet.
            batch.leaving[id_] = Ended(cached, 0, 0, False, 0, 0)
        else:
            del batch.admitted[id_]
        sequences.n_admitted -= 1
        sequences.version.changes += 1
        if gone:
            state.status[id_] = ABORTED
            sequences.reservations.end(id_)
            sequences.kv.release(id_, sequences.kv.held(cached), cached)
            return
        self.lent[id_] = sequences.kv.held(cached)
        self._lent_tokens[id_] = cached
        self._outside.prefilled(id_, end_ns)

    def _collect(self, id_: int) -> None:
        sequences = self.sequences
        sequences.reservations.end(id_)
        sequences.kv.release(id_, self.lent.pop(id_), self._lent_tokens.pop(id_))

    def landing(self) -> dict[int, int]:
        """Tokens of arrived KV that has not been read yet, by request."""
        return {id_: tokens for _, what, id_, tokens in self.mail if what == LAND}

    def told_to_go(self) -> set[int]:
        """Requests that hold blocks here only because the message that frees them has not been read."""
        return {id_ for _, what, id_, _ in self.mail if what in (DROP, COLLECT)}

    def hand_back(self) -> list[int]:
        """Forget all; return unfinished requests that had asked or were on their way here."""
        ids = [*self.asked, *self.kept]
        for each in (self.asked, self._legs, self.kept, self.landed, self.lent, self._lent_tokens, self.mail):
            each.clear()
        self.promised = self.n_unread = 0
        return [id_ for id_ in ids if self.sequences.state.status[id_] != FINISHED]


def n_with_blocks(sequences: Own) -> int:
    """Number of sequences at the head of the queue that hold their blocks already."""
    n = 0
    for seq in sequences.queue:
        if not (seq.kept_blocks or seq.id in sequences.loaded_kv.at_hand):
            break
        n += 1
    return n
