"""The KV connector of an engine core: KV of its sequences that is elsewhere, on its way, or here before they are admitted.

A sequence's KV is *wanted* while the request asks for blocks to take it in, *in transit* when it has them, *here* when it has
arrived and the sequence waits with it to be admitted, and *lent* while the only other copy of it is still on its way, or kept, in
another place. KV comes from other machines or from tiers (`sim.engine.serve.loading`), and goes to both.

Messages of other machines come from outside (`tell`) and are read when an iteration is planned, as an engine reads its own
connector's; a plan made ahead knows those that had arrived when the iteration before it started.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from policies.view import ALWAYS_NS, WaitingSeq
from sim.engine.batch.async_scheduling import AsyncScheduling
from sim.engine.batch.micro_batch import Ended, MicroBatch, Paused
from sim.engine.batch.version import Version
from sim.engine.kv.pool import KvPool
from sim.engine.record.columns import ABORTED, FINISHED, Recorder
from sim.engine.requests.reservations import Reservations
from sim.engine.requests.state import RequestState
from sim.engine.spec.roles import Part
from sim.engine.tiers.stores import Store
from sim.engine.time.clock import TICK_BITS

ASK: Final = 0
"""A request asks for blocks for its prompt's KV."""
LAND: Final = 1
"""KV has arrived for one that has blocks."""
DROP: Final = 2
"""A request that asked or has blocks is not served here."""
COLLECT: Final = 3
"""Lent KV has arrived; its blocks may be freed."""


class Outside(Protocol):
    """The cluster, as a machine calls it."""

    def finished(self, id_: int, now_ns: int, /) -> None: ...

    def rejected(self, id_: int, reason: str, /) -> None: ...

    def prefilled(self, id_: int, end_ns: int, /) -> None:
        """A prompt is computed that is decoded elsewhere."""
        ...

    def has_room(self, id_: int, now_ns: int, found_tokens: int, leg: int, /) -> None:
        """Blocks are free for KV that was computed elsewhere, *found_tokens* tokens of which are cached here; *leg*: for what."""
        ...

    def no_room(self, id_: int, now_ns: int, leg: int, /) -> None:
        """A request that asked for blocks has to wait for them."""
        ...


class Own(Protocol):
    """The engine core's `sim.engine.serve.sequences.Sequences`."""

    kv: KvPool
    state: RequestState
    queue: deque[WaitingSeq]
    reservations: Reservations
    ahead: AsyncScheduling | None
    given_up: dict[int, int]
    n_admitted: int
    version: Version
    n_computed: int

    def paused_growth(self, batch: MicroBatch, paused: Paused, /) -> int: ...


class Held(NamedTuple):
    """Blocks of a request for KV that comes from elsewhere or goes there."""

    blocks: int
    tokens: int = 0
    """Tokens in KV when all of it has come; 0: the message that it has come says so."""
    on_device: int = 0
    """Tokens of these that the prefix cache had."""
    by_tier: tuple[tuple[int, int], ...] = ()
    """Tokens of these in tiers: (tier, tokens)."""
    moved: bool = False
    """It was preempted and moved to host memory."""
    ends_ns: int = ALWAYS_NS
    """The end of its load; ALWAYS_NS: a message says it."""
    order: int = 0
    preempted: bool = False
    sources: tuple[Store, ...] = ()
    """Stores that it is read from."""
    broken: bool = False
    """A source is gone: the load fails."""


@dataclass(slots=True)
class Books:
    """KV from and to one kind of place, by request."""

    wanted: dict[int, int] = field(default_factory=dict[int, int])
    """Requests that ask for blocks, the longest wait first, and the numbers of their hand-overs: one that returns has another."""
    in_transit: dict[int, Held] = field(default_factory=dict[int, Held])
    here: dict[int, Held] = field(default_factory=dict[int, Held])
    lent: dict[int, Held] = field(default_factory=dict[int, Held])
    """Other machines: blocks of prompts whose KV has not arrived there yet. Tiers: preempted sequences that were moved to host
    memory, and have no blocks."""

    def clear(self) -> None:
        for each in (self.wanted, self.in_transit, self.here, self.lent):
            each.clear()

    @property
    def blocks(self) -> int:
        """Blocks that are held."""
        return sum(held.blocks for each in (self.in_transit, self.here, self.lent) for held in each.values())


class KvConnector:
    """KV of an engine core's sequences that is elsewhere, on its way, or here before they are admitted."""

    __slots__ = (
        "_gives_token", "_outside", "_recorder", "drops_token", "forgets", "hands_over", "headroom_tokens", "joined_ns", "kinds",
        "loaded_last", "machines", "mail", "moves_out", "n_unread", "promised", "sequences", "takes_part", "tiers",
    )  # fmt: skip

    def __init__(self, sequences: Own, part: Part | None, outside: Outside, recorder: Recorder) -> None:
        """*part*: what the machine has to do with handing over; None: nothing."""
        self.sequences = sequences
        self._outside = outside
        self._recorder = recorder
        self.machines = Books()
        self.tiers = Books()
        self.joined_ns: array[int] | None = None
        """Each request's admission with its KV (ns)."""
        self.takes_part = part is not None
        self.hands_over = part is not None and part.role == "prefill"
        self.drops_token = self.hands_over and part is not None and part.drops_token
        """Prompts that are done emit nothing here: the machine that decodes computes their last token again."""
        self._gives_token = part is not None and part.gives_token
        self.headroom_tokens = 0 if part is None else part.headroom_tokens
        self.mail: deque[tuple[int, int, int, int]] = deque()
        """Messages: time, kind, request, and tokens that arrived with it; a request for blocks has the number of its leg
        instead."""
        self.n_unread = 0
        """Unread requests for blocks."""
        self.promised = 0
        """Blocks that `Reservations` counts for requests whose KV has come from a machine, where the scheduler reserves."""
        self.loaded_last = 0
        """Tokens that had been loaded for the sequence that was admitted last."""
        self.kinds: tuple[str, ...] = ()
        """Tier kinds, nearest first."""
        self.moves_out: Callable[[int, int], bool] | None = None
        """Moves a preempted sequence with so many tokens to host memory; whether it did."""
        self.forgets: Callable[[int], None] | None = None
        """Tells the tier that a sequence is not needed there any more."""

    @property
    def coming(self) -> int:
        """Requests on their way here from machines whose messages have been read."""
        return len(self.machines.wanted) + len(self.machines.in_transit)

    def prompts_coming(self) -> int:
        """Tokens of the prompts of requests on their way here from machines, whether their messages have been read or not."""
        machines, prompt = self.machines, self.sequences.state.prompt
        unread = sum(prompt[id_] for _, what, id_, _ in self.mail if what == ASK)
        return unread + sum(prompt[id_] for each in (machines.wanted, machines.in_transit) for id_ in each)

    @property
    def awaits(self) -> bool:
        """Whether something will come from another machine that frees blocks or brings work."""
        return bool(self.machines.lent or self.machines.in_transit)

    def n_with_blocks(self) -> int:
        """Number of sequences at the head of the queue that hold their blocks already."""
        machines, tiers, n = self.machines.here, self.tiers.here, 0
        for seq in self.sequences.queue:
            if seq.id not in machines and seq.id not in tiers:
                break
            n += 1
        return n

    # Messages of other machines.

    def tell(self, now_ns: int, what: int, id_: int, tokens: int) -> None:
        """Add a message."""
        self.sequences.version.hear(now_ns)
        self.mail.append((now_ns, what, id_, tokens))
        self.n_unread += what == ASK

    def read(self, batch: MicroBatch, ticks: int) -> None:
        """Read the messages that the coming plan knows, and give blocks to requests that ask for them, first come, first served."""
        ahead, wanted = self.sequences.ahead, self.machines.wanted
        mail, known_ns = self.mail, ALWAYS_NS if ahead is None else ahead.seen_ns
        new: list[int] = []
        while mail and mail[0][0] <= known_ns:
            _, what, id_, tokens = mail.popleft()
            self.sequences.version.changes += 1
            if what == ASK:
                self.n_unread -= 1
                wanted[id_] = tokens
                new.append(id_)
            elif what == LAND:
                self._land(id_, tokens)
            elif what == DROP:
                self._drop(id_)
            else:
                self._collect(id_)
        while wanted and self._make_room(next(iter(wanted)), batch, ticks):
            pass
        for id_ in new:
            if id_ in wanted:
                self._outside.no_room(id_, ticks >> TICK_BITS, wanted[id_])

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
        self.machines.in_transit[id_] = Held(needed)
        self._outside.has_room(id_, ticks >> TICK_BITS, found * kv.block_tokens, self.machines.wanted.pop(id_))
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
            others = sequences.n_admitted + len(self.machines.in_transit) + len(self.machines.here)
            blocks += sequences.kv.blocks(self.headroom_tokens * others)
        return blocks

    def _land(self, id_: int, tokens: int) -> None:
        sequences = self.sequences
        blocks = self.machines.in_transit.pop(id_).blocks
        if sequences.kv.caches and not sequences.kv.caches_late:
            sequences.kv.loaded(id_, tokens)
        # Ahead of requests without KV: one whose blocks are not free would keep back others whose blocks are here.
        place = self.n_with_blocks()
        seq = self.bring(id_, tokens)._replace(kept_blocks=blocks)
        sequences.queue.insert(place, seq)
        self.machines.here[id_] = Held(blocks, tokens)
        self.promised += sequences.reservations.counted(id_)

    def bring(self, id_: int, tokens: int, *, preempted: bool = False) -> WaitingSeq:
        """Count KV of *tokens* tokens as arrived; return its request as it is to wait."""
        sequences = self.sequences
        seq = sequences.state.waiting_seq(id_, cached_tokens=tokens, preempted=preempted)
        if self.hands_over and not seq.tokens:
            # It is decoded elsewhere: here its last token is computed, with which it leaves.
            seq = seq._replace(tokens=1)
        sequences.n_computed += not seq.tokens
        return seq

    def _drop(self, id_: int) -> None:
        if id_ in self.machines.in_transit:
            self.sequences.kv.release(id_, self.machines.in_transit.pop(id_).blocks, 0)
            self.sequences.reservations.end(id_)
        else:
            self.machines.wanted.pop(id_, None)

    def _collect(self, id_: int) -> None:
        self.sequences.reservations.end(id_)
        held = self.machines.lent.pop(id_)
        self.sequences.kv.release(id_, held.blocks, held.tokens)

    def landing(self) -> dict[int, int]:
        """Tokens of arrived KV that has not been read yet, by request."""
        return {id_: tokens for _, what, id_, tokens in self.mail if what == LAND}

    def told_to_go(self) -> set[int]:
        """Requests that hold blocks here only because the message that frees them has not been read."""
        return {id_ for _, what, id_, _ in self.mail if what in (DROP, COLLECT)}

    # Requests in the queue with their KV.

    def admitted(self, seq: WaitingSeq, now_ns: int) -> bool:
        """A sequence is admitted; return whether all its KV is here, from a machine.

        Blocks that were loaded for it are freed, to be taken for it again, but for those with content.
        """
        id_, state, kv = seq.id, self.sequences.state, self.sequences.kv
        if seq.kept_blocks:
            if self.joined_ns is not None and self.joined_ns[id_] < 0:
                self.joined_ns[id_] = now_ns
            self._out_of_the_queue(id_)
            if kv.caches:
                kv.writes_on(id_, state.prompt[id_])
            return True
        self.sequences.reservations.make(id_)
        held = self.tiers.here.pop(id_, None)
        self.loaded_last = 0
        if held is not None:
            self.loaded_last = sum(tokens for _, tokens in held.by_tier)
            again = seq.preempted or (state.again is not None and state.again[id_] > 0)
            if kv.caches:
                hits = state.prefix_hits_again if again else state.prefix_hits
                hits[id_] += held.on_device
            for tier, tokens in held.by_tier:
                kind = "swap" if held.moved else "again" if again else self.kinds[tier]
                state.tier_hits[kind][id_] += tokens
            kv.give(held.blocks - kv.found(id_))
        elif id_ in self.tiers.lent:
            # It is computed again all the same.
            state.recomputed[id_] += self.tiers.lent[id_].tokens
        self.forget_moved(id_)
        return False

    def _out_of_the_queue(self, id_: int) -> Held:
        self.promised -= self.sequences.reservations.counted(id_)
        return self.machines.here.pop(id_)

    def gone(self, id_: int) -> None:
        """A request has left the queue and was not admitted: blocks that it holds are freed, here and in host memory."""
        if id_ in self.machines.here:
            held = self._out_of_the_queue(id_)
            self.sequences.reservations.end(id_)
            self.sequences.kv.release(id_, held.blocks, held.tokens)
        self.give_back(id_)
        self.forget_moved(id_)

    def give_back(self, id_: int) -> None:
        """Free the blocks that were loaded for a waiting request, if any were."""
        held = self.tiers.here.pop(id_, None)
        if held is not None:
            self.sequences.kv.release(id_, held.blocks, held.tokens)

    def forget_moved(self, id_: int) -> None:
        """Drop what host memory has of a preempted sequence, if it has anything."""
        if self.tiers.lent.pop(id_, None) is not None:
            assert self.forgets is not None
            self.forgets(id_)

    def surrender(self) -> bool:
        """Return the last request whose KV has come from a machine to be computed here from the beginning; False where there is
        none.

        A machine needs it on which no sequence runs or can be admitted, as all blocks are kept for waiting requests with their KV:
        each lacks a block for its next token.
        """
        if not self.machines.here:
            return False
        sequences, state = self.sequences, self.sequences.state
        id_ = next(reversed(self.machines.here))
        seq = next(seq for seq in sequences.queue if seq.id == id_)
        sequences.queue.remove(seq)
        sequences.n_computed -= not seq.tokens
        self.gone(id_)
        state.preemptions[id_] += 1
        state.recomputed[id_] += seq.cached_tokens
        sequences.queue.insert(self.n_with_blocks(), state.waiting_seq(id_, preempted=True))
        sequences.version.changes += 1
        return True

    # Prompts that are decoded elsewhere.

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
        self.machines.lent[id_] = Held(sequences.kv.held(cached), cached)
        self._outside.prefilled(id_, end_ns)

    # A machine that stops.

    def hand_back(self) -> list[int]:
        """Forget all; return unfinished requests that had asked or whose KV was on its way here."""
        machines, tiers, status = self.machines, self.tiers, self.sequences.state.status
        ids = [id_ for id_ in (*machines.wanted, *machines.in_transit) if status[id_] != FINISHED]
        ids += tiers.in_transit
        for id_ in list(tiers.lent):
            self.forget_moved(id_)
        machines.clear()
        tiers.clear()
        self.mail.clear()
        self.promised = self.n_unread = 0
        return ids
