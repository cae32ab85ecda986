"""KV loaded for waiting sequences, or moved to host memory when they were preempted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.view import WaitingSeq
from sim.engine.kv.pool import KvPool
from sim.engine.requests.state import RequestState


class AtHand(NamedTuple):
    """KV loaded for a waiting sequence, which holds it until admitted."""

    blocks: int
    tokens: int
    on_device: int
    """Tokens of these that were on the device."""
    by_tier: tuple[tuple[int, int], ...]
    """Tokens in tiers: (tier, tokens)."""
    moved: bool
    """It was preempted and moved to host memory."""


class LoadedKv:
    """KV that an engine core's waiting sequences have, or could have, beside prefix hits; idle without tiers."""

    __slots__ = ("_kv", "_state", "at_hand", "forgets", "kinds", "loaded_last", "moved", "moves_out")

    def __init__(self, kv: KvPool, state: RequestState) -> None:
        self._kv = kv
        self._state = state
        self.at_hand: dict[int, AtHand] = {}
        """Loaded KV by sequence."""
        self.moved: dict[int, int] = {}
        """Tokens in host memory by preempted sequence."""
        self.loaded_last = 0
        """Tokens that had been loaded for the sequence that was admitted last."""
        self.kinds: tuple[str, ...] = ()
        """Tier kinds, nearest first."""
        self.moves_out: Callable[[int, int], bool] | None = None
        """Moves a preempted sequence with so many tokens to host memory; whether it did."""
        self.forgets: Callable[[int], None] | None = None
        """Tells the tier that a sequence is not needed there any more."""

    def give_back(self, id_: int) -> None:
        """Frees blocks of a waiting sequence, if it holds any."""
        held = self.at_hand.pop(id_, None)
        if held is not None:
            self._kv.release(id_, held.blocks, held.tokens)

    def gone(self, id_: int) -> None:
        """A sequence has left the queue and was not admitted."""
        self.give_back(id_)
        self.forget_moved(id_)

    def forget_moved(self, id_: int) -> None:
        """Drops what host memory has of a preempted sequence, if it has anything."""
        if self.moved.pop(id_, 0):
            assert self.forgets is not None
            self.forgets(id_)

    def admitted(self, seq: WaitingSeq) -> None:
        """A sequence is admitted: its loaded blocks are freed, to be taken for it again, but for those with content."""
        id_, state, kv = seq.id, self._state, self._kv
        held = self.at_hand.pop(id_, None)
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
        elif id_ in self.moved:
            # It is computed again all the same.
            state.recomputed[id_] += self.moved[id_]
        self.forget_moved(id_)

    def reset(self) -> None:
        """Drops all KV."""
        self.at_hand.clear()
        for id_ in list(self.moved):
            self.forget_moved(id_)
