"""Loads from tiers, and preempted sequences that are moved to host memory.

A plan that admits a sequence of which a tier has more than the device starts its load, and is made again without it: the sequence
takes the blocks that the KV needs, no seat and none of the batch's tokens. Once loaded it stands at the head of the queue, with
fewer tokens to compute, until a plan admits it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from policies.view import WaitingSeq
from sim.engine.serve.kv_connector import Held
from sim.engine.serve.sequences import Sequences
from sim.engine.tiers.stores import Store
from sim.engine.tiers.tiers import Segment, Tiers

_TRIES = 2
"""Wasted loads after which a sequence is computed, and one that was swapped out is loaded alone: loading sequences could else
evict each other for ever."""
_TRIES_ALONE = 4
"""Wasted loads after which a swapped sequence is computed, too: its scheduler may prefer another one after every load."""


class Loading:
    """The part of an engine core's KV connector that deals with tiers."""

    def __init__(self, sequences: Sequences, tiers: Tiers, *, swaps: bool) -> None:
        """*swaps*: preempted sequences are moved to host memory."""
        self._sequences = sequences
        self._connector = connector = sequences.connector
        self._books = connector.tiers
        self.tiers = tiers
        self._n = 0
        self._gave_back: Counter[int] = Counter()
        """Number of times a sequence's loaded KV was freed before it was admitted."""
        self.rings_at: Callable[[int], None] = _nobody
        """Has the machine look again at an instant; set by it."""
        connector.kinds = tuple(spec.kind for spec in tiers.specs)
        connector.forgets = tiers.forget
        sequences.state.keep_tier_hits((*connector.kinds, "again", *(("swap",) if swaps else ())))
        if swaps:
            connector.moves_out = self._move_out

    # Starting.

    def _wants(self, id_: int, tokens: int) -> WaitingSeq | None:
        """One of the queue that is to be computed, and that a tier may have something of."""
        sequences = self._sequences
        seq = next((seq for seq in sequences.queue if seq.id == id_), None) if tokens else None
        tries = _TRIES_ALONE if id_ in self._books.lent else _TRIES
        if seq is None or seq.cached_tokens or self._gave_back[id_] >= tries:
            return None
        return seq

    def _worth(self, seq: WaitingSeq, *, lent: bool = False) -> tuple[int, list[Segment]]:
        """Blocks of a sequence on the device, and which tiers have more; of one that is *lent* host memory has all."""
        kv = self._sequences.kv
        on_device = kv.found_blocks(seq.id, seq.tokens) if kv.caches else 0
        return on_device, [] if lent else self.tiers.segments(seq.id, on_device, (seq.tokens - 1) // kv.block_tokens)

    def wanted(self, run: Sequence[tuple[int, int]]) -> bool:
        """Whether a tier has KV of a request that *run* admits."""
        return len(self.before_the_first(run)) < len(run)

    def before_the_first(self, run: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """*run* without the admissions from the first one on of which a tier has KV."""
        kept: list[tuple[int, int]] = []
        waits = False
        for id_, tokens in run:
            seq = self._wants(id_, tokens)
            waits = waits or (seq is not None and (id_ in self._books.lent or bool(self._worth(seq)[1])))
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
            moved = 0 if id_ not in self._books.lent else self._books.lent[id_].tokens
            on_device, segments = self._worth(seq, lent=moved > 0)
            found = on_device * kv.block_tokens
            by_tier: tuple[tuple[int, int], ...]
            if moved:
                if found >= moved:
                    # The device has it all.
                    self._connector.forget_moved(id_)
                    continue
                blocks, tokens, by_tier = kv.blocks(moved), moved, ((self.tiers.home, moved - found),)
            elif segments:
                blocks = segments[-1].hi
                tokens = blocks * kv.block_tokens
                by_tier = tuple((each.tier, (each.hi - each.lo) * kv.block_tokens) for each in segments)
            else:
                continue
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
            self._books.in_transit[id_] = Held(
                blocks, tokens, found, by_tier, moved > 0, ends_ns, self._n, seq.preempted,
                tuple(each.source for each in segments),
            )  # fmt: skip
            sequences.state.load_began(id_, tiers.now_ns)
            sequences.version.changes += 1
            self.rings_at(ends_ns)
            return 1
        return 0

    def _has_to_wait(self, id_: int) -> bool:
        """Whether a load would be beside one of a sequence whose loads were wasted too often."""
        loaded, tries = (*self._books.in_transit, *self._books.here), self._gave_back
        return bool(loaded and tries) and any(tries[each] >= _TRIES for each in (id_, *loaded))

    # Ending.

    def land(self, known_ns: int) -> None:
        """Put sequences loaded by *known_ns* at the head of the queue, the earliest first."""
        now_ns = min(known_ns, self.tiers.now_ns)
        due = [
            (held.ends_ns, held.order, id_) for id_, held in self._books.in_transit.items() if held.ends_ns <= now_ns
        ]
        for _, _, id_ in sorted(due, reverse=True):
            self._land(id_)

    def _land(self, id_: int) -> None:
        sequences, state = self._sequences, self._sequences.state
        held = self._books.in_transit.pop(id_)
        if held.broken:
            sequences.kv.release(id_, held.blocks, held.on_device)
            seq = state.waiting_seq(id_, preempted=held.preempted)
        else:
            if sequences.kv.caches:
                sequences.kv.loaded(id_, held.tokens)
            seq = self._connector.bring(id_, held.tokens, preempted=held.preempted)._replace(shared_blocks=held.blocks)
            self._books.here[id_] = held
        sequences.queue.appendleft(seq)
        sequences.version.changes += 1
        state.load_ended(id_, held.ends_ns)

    def let_go_of_last(self) -> None:
        """Free the blocks of the last loaded sequence in the queue; it is loaded again, or computed after `_TRIES` times."""
        sequences = self._sequences
        seq = next(seq for seq in reversed(sequences.queue) if seq.id in self._books.here)
        self._gave_back[seq.id] += 1
        at = sequences.queue.index(seq)
        sequences.n_computed -= not seq.tokens
        self._connector.give_back(seq.id)
        sequences.queue[at] = sequences.state.waiting_seq(seq.id, preempted=seq.preempted)
        sequences.version.changes += 1

    def make_room(self, blocks: int) -> None:
        """Free the blocks of loaded sequences that wait, the last of the queue first, until *blocks* blocks are free."""
        while self._books.here and self._sequences.kv.free < blocks:
            self.let_go_of_last()

    # Swapping out.

    def _move_out(self, id_: int, tokens: int) -> bool:
        """Move a preempted sequence to host memory, if there is room for it."""
        sequences = self._sequences
        if not tokens or self.tiers.move_out_of_the_device(id_, sequences.kv.blocks(tokens)) < 0:
            return False
        self._books.lent[id_] = Held(0, tokens)
        return True

    def lose_sources(self, gone: Sequence[Store], now_ns: int) -> None:
        """End loads from memory that is gone now, in vain: their sequences are at the head of the queue with what they had."""
        for id_, held in self._books.in_transit.items():
            if any(source is each for source in held.sources for each in gone):
                self._books.in_transit[id_] = held._replace(ends_ns=now_ns, broken=True)
                self.rings_at(now_ns)

    def stop(self, now_ns: int) -> dict[int, int]:
        """Stop all loads with the machine; return, by swapped-out sequence, the tokens whose KV is gone."""
        for id_ in self._books.in_transit:
            self._sequences.state.load_ended(id_, now_ns)
        self._gave_back.clear()
        return {id_: held.tokens for id_, held in self._books.lent.items()}


def _nobody(at_ns: int) -> None:
    pass
