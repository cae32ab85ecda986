"""Sequences whose KV is on its way from a tier, or has arrived and waits with them to be admitted.

A plan that admits a sequence of which a tier has more than the device starts its load, and is made again without it: the sequence
takes the blocks that the KV needs, no seat and none of the batch's tokens. Once loaded it stands at the head of the queue, with
fewer tokens to compute, until a plan admits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.view import ALWAYS_NS, WaitingSeq
from sim.engine.serve.sequences import Sequences
from sim.engine.tiers.loaded import AtHand
from sim.engine.tiers.stores import Store
from sim.engine.tiers.tiers import Segment, Tiers

_TRIES = 2
"""Loads in vain after which a sequence is computed, and one that was swapped out is loaded alone: loading sequences could else
evict each other for ever."""
_TRIES_ALONE = 4
"""Loads in vain after which a swapped sequence is computed, too: its scheduler may prefer another one after every load."""


class Load(NamedTuple):
    """A load in flight."""

    ends_ns: int
    order: int
    blocks: int
    """Device blocks that its sequence holds."""
    tokens: int
    """Tokens in KV after the load."""
    preempted: bool
    on_device: int
    """Tokens of these found on the device."""
    by_tier: tuple[tuple[int, int], ...]
    """Tokens of these in tiers: (tier, tokens)."""
    moved: bool
    """Whether it was swapped out when it was preempted."""
    sources: tuple[Store, ...] = ()
    """Stores that it is read from."""
    broken: bool = False
    """A source is gone: the load fails."""


class Loading:
    """An engine core's loads."""

    def __init__(self, sequences: Sequences, tiers: Tiers, *, swaps: bool) -> None:
        """*swaps*: preempted sequences are moved to host memory."""
        self._sequences = sequences
        self.tiers = tiers
        self.in_flight: dict[int, Load] = {}
        self._n = 0
        self._gave_back: dict[int, int] = {}
        """Number of times a sequence's loaded KV was freed before it was admitted."""
        self.rings_at: Callable[[int], None] = _nobody
        """Has the machine look again at an instant; set by it."""
        sequences.loaded_kv.kinds = tuple(spec.kind for spec in tiers.specs)
        sequences.loaded_kv.forgets = tiers.forget
        sequences.state.keep_tier_hits((*sequences.loaded_kv.kinds, "again", *(("swap",) if swaps else ())))
        if swaps:
            sequences.loaded_kv.moves_out = self._move_out

    # Starting.

    def _wants(self, id_: int, tokens: int) -> WaitingSeq | None:
        """One of the queue that is to be computed, and that a tier may have something of."""
        sequences = self._sequences
        seq = next((seq for seq in sequences.queue if seq.id == id_), None) if tokens else None
        tries = _TRIES_ALONE if id_ in sequences.loaded_kv.moved else _TRIES
        if seq is None or seq.cached_tokens or self._gave_back.get(id_, 0) >= tries:
            return None
        return seq

    def _worth(self, seq: WaitingSeq) -> tuple[int, list[Segment]]:
        """Blocks of a sequence on the device, and which tiers have more."""
        kv = self._sequences.kv
        on_device = kv.found_blocks(seq.id, seq.tokens) if kv.caches else 0
        return on_device, self.tiers.segments(seq.id, on_device, (seq.tokens - 1) // kv.block_tokens)

    def wanted(self, run: Sequence[tuple[int, int]]) -> bool:
        """Whether a tier has KV of a request that *run* admits."""
        return len(self.before_the_first(run)) < len(run)

    def before_the_first(self, run: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """*run* without the admissions from the first one on of which a tier has KV."""
        kept: list[tuple[int, int]] = []
        waits = False
        for id_, tokens in run:
            seq = self._wants(id_, tokens)
            waits = waits or (seq is not None and (id_ in self._sequences.loaded_kv.moved or bool(self._worth(seq)[1])))
            if not waits or all(seq.id != id_ for seq in self._sequences.queue):
                kept.append((id_, tokens))
        return tuple(kept)

    def that_fit(self, run: Sequence[tuple[int, int]], held_back: int) -> tuple[tuple[int, int], ...]:
        """*run* without the admissions for which loads in flight leave no memory: some schedulers take a machine without running
        sequences to be empty. *held_back*: free blocks that others are to take."""
        sequences, kv = self._sequences, self._sequences.kv
        waiting = {seq.id: seq for seq in sequences.queue}
        kept: list[tuple[int, int]] = []
        free = kv.free - held_back
        for id_, tokens in run:
            seq = waiting.get(id_)
            if seq is not None and free >= 0:
                cached, held = seq.cached_tokens, seq.shared_blocks
                if not cached and kv.caches:
                    held = kv.found_blocks(id_, seq.tokens)
                    free -= kv.unheld_blocks(id_, held)
                free -= (kv.held(cached + tokens) if kv.by_chunk else kv.blocks(cached + seq.tokens)) - held
            if seq is None or free >= 0:
                kept.append((id_, tokens))
        return tuple(kept)

    def start(self, run: Sequence[tuple[int, int]], held_back: int) -> int:
        """Start the load of the first request that *run* admits of which a tier has KV: 1, or 0 where there is none.

        -1 where memory is short, so that it and those behind it have to wait. *held_back*: free blocks that others are to take.
        """
        sequences, kv = self._sequences, self._sequences.kv
        for id_, tokens in run:
            seq = self._wants(id_, tokens)
            if seq is None:
                continue
            if self._has_to_wait(id_):
                return -1
            moved = sequences.loaded_kv.moved.get(id_, 0)
            by_tier: tuple[tuple[int, int], ...]
            if moved:
                on_device = kv.found_blocks(id_, seq.tokens) if kv.caches else 0
                blocks, reach, segments = kv.blocks(moved), moved, list[Segment]()
                if on_device * kv.block_tokens >= moved:
                    # The device has it all.
                    sequences.loaded_kv.forget_moved(id_)
                    continue
                by_tier = ((self.tiers.home, moved - on_device * kv.block_tokens),)
            else:
                on_device, segments = self._worth(seq)
                if not segments:
                    continue
                blocks = segments[-1].hi
                reach = blocks * kv.block_tokens
                by_tier = tuple((each.tier, (each.hi - each.lo) * kv.block_tokens) for each in segments)
            new = blocks - on_device
            needed = new + (kv.unheld_blocks(id_, on_device) if on_device else 0)
            if needed + held_back > kv.free:
                return -1
            sequences.queue.remove(seq)
            tiers = self.tiers
            # Asked for before the device gives something up for it, which might be written over what is to be read.
            ends_ns = tiers.move_back(id_, new) if moved else tiers.load(id_, segments)
            kv.admit(id_, on_device)
            kv.take(new)
            self._n += 1
            self.in_flight[id_] = Load(
                ends_ns, self._n, blocks, reach, seq.preempted, on_device * kv.block_tokens, by_tier, moved > 0,
                tuple(each.source for each in segments),
            )  # fmt: skip
            sequences.state.load_began(id_, tiers.now_ns)
            sequences.version.changes += 1
            self.rings_at(ends_ns)
            return 1
        return 0

    def _has_to_wait(self, id_: int) -> bool:
        """Whether a load would be beside one of a sequence that was loaded in vain too often."""
        loaded = (*self.in_flight, *self._sequences.loaded_kv.at_hand)
        tries = self._gave_back
        return bool(loaded and tries) and any(tries.get(each, 0) >= _TRIES for each in (id_, *loaded))

    # Ending.

    def land(self, known_ns: int) -> bool:
        """Put sequences loaded by *known_ns* at the head of the queue, the earliest first; return whether there were any."""
        if not self.in_flight:
            return False
        now_ns = min(known_ns, self.tiers.now_ns)
        due = sorted((load.ends_ns, load.order, id_) for id_, load in self.in_flight.items() if load.ends_ns <= now_ns)
        for _, _, id_ in reversed(due):
            self._land(id_)
        return bool(due)

    def next_ns(self) -> int:
        """The end of the next load (ns)."""
        return min((load.ends_ns for load in self.in_flight.values()), default=ALWAYS_NS)

    def _land(self, id_: int) -> None:
        sequences = self._sequences
        load = self.in_flight.pop(id_)
        if load.broken:
            sequences.kv.release(id_, load.blocks, load.on_device)
            sequences.queue.appendleft(sequences.state.waiting_seq(id_, preempted=load.preempted))
            sequences.version.changes += 1
            sequences.state.load_ended(id_, load.ends_ns)
            return
        seq = sequences.state.waiting_seq(id_, cached_tokens=load.tokens, preempted=load.preempted)
        if sequences.hands_over and not seq.tokens:
            # It is decoded elsewhere: here its last token is computed, with which it leaves.
            seq = seq._replace(tokens=1)
        if sequences.kv.caches:
            sequences.kv.loaded(id_, load.tokens)
        sequences.loaded_kv.at_hand[id_] = AtHand(load.blocks, load.tokens, load.on_device, load.by_tier, load.moved)
        sequences.queue.appendleft(seq._replace(shared_blocks=load.blocks))
        sequences.n_computed += not seq.tokens
        sequences.version.changes += 1
        sequences.state.load_ended(id_, load.ends_ns)

    def let_go_of(self, id_: int) -> None:
        """Free the blocks of a loaded sequence that has not been admitted; it is loaded again, or computed after `_TRIES` times."""
        sequences = self._sequences
        self._gave_back[id_] = self._gave_back.get(id_, 0) + 1
        seq = next(seq for seq in sequences.queue if seq.id == id_)
        at = sequences.queue.index(seq)
        sequences.n_computed -= not seq.tokens
        sequences.loaded_kv.give_back(id_)
        sequences.queue[at] = sequences.state.waiting_seq(id_, preempted=seq.preempted)
        sequences.version.changes += 1

    def make_room(self, blocks: int) -> bool:
        """Free the blocks of loaded sequences that wait, the last of the queue first, until *blocks* blocks are free; return
        whether any did."""
        sequences = self._sequences
        did = False
        while sequences.loaded_kv.at_hand and sequences.kv.free < blocks:
            last: WaitingSeq = next(seq for seq in reversed(sequences.queue) if seq.id in sequences.loaded_kv.at_hand)
            self.let_go_of(last.id)
            did = True
        return did

    # Swapping out.

    def _move_out(self, id_: int, tokens: int) -> bool:
        """Move a preempted sequence to host memory, if there is room for it."""
        sequences = self._sequences
        if not tokens or self.tiers.move_out_of_the_device(id_, sequences.kv.blocks(tokens)) < 0:
            return False
        sequences.loaded_kv.moved[id_] = tokens
        return True

    def lose_sources(self, gone: Sequence[Store], now_ns: int) -> None:
        """End loads from memory that is gone now, in vain: their sequences are at the head of the queue with what they had."""
        for id_, load in self.in_flight.items():
            if any(source is each for source in load.sources for each in gone):
                self.in_flight[id_] = load._replace(ends_ns=now_ns, broken=True)
                self.rings_at(now_ns)

    def stop(self, now_ns: int) -> dict[int, int]:
        """Stop all loads with the machine; return, by swapped-out sequence, the tokens whose KV is gone."""
        state = self._sequences.state
        for id_ in self.in_flight:
            state.load_ended(id_, now_ns)
        self._gave_back.clear()
        return dict(self._sequences.loaded_kv.moved)

    def reset(self) -> list[int]:
        """Drop all loads; return their requests."""
        ids = list(self.in_flight)
        self.in_flight.clear()
        return ids


def _nobody(at_ns: int) -> None:
    pass
