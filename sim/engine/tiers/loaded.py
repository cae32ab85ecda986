"""KV that those who wait have had loaded, or that was moved to host memory when they gave way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.view import WaitingSeq
from sim.engine.kv.pool import KvPool
from sim.engine.requests.state import RequestState


class AtHand(NamedTuple):
    """What one that waits has been loaded, and holds until it is admitted."""

    blocks: int
    tokens: int
    on_device: int
    """Tokens of these that were on the device ..."""
    by_tier: tuple[tuple[int, int], ...]
    """... and in tiers: (tier, tokens)."""
    moved: bool
    """It had given way and been moved to host memory."""


class Brought:
    """What a tenant's waiting sequences have, or could have, beside what the prefix cache finds; idle without tiers."""

    __slots__ = ("_kv", "_state", "at_hand", "forgets", "kinds", "loaded_last", "moved", "moves_out")

    def __init__(self, kv: KvPool, state: RequestState) -> None:
        self._kv = kv
        self._state = state
        self.at_hand: dict[int, AtHand] = {}
        """Whose KV has been loaded."""
        self.moved: dict[int, int] = {}
        """Of those that gave way: tokens whose KV is in host memory."""
        self.loaded_last = 0
        """Tokens that had been loaded for the sequence that was admitted last."""
        self.kinds: tuple[str, ...] = ()
        """Of the tiers, nearest first."""
        self.moves_out: Callable[[int, int], bool] | None = None
        """Moves a sequence with so many tokens that gives way to host memory; whether it did."""
        self.forgets: Callable[[int], None] | None = None
        """Tells the tier that a sequence is not needed there any more."""

    def give_back(self, id_: int) -> None:
        """One that waits holds blocks no more, if it holds any."""
        held = self.at_hand.pop(id_, None)
        if held is not None:
            self._kv.release(id_, held.blocks, held.tokens)

    def gone(self, id_: int) -> None:
        """One that waited does so no more, and was not admitted."""
        self.give_back(id_)
        self.forget_moved(id_)

    def forget_moved(self, id_: int) -> None:
        """What host memory has of a sequence that gave way is not needed any more, if it has anything."""
        if self.moved.pop(id_, 0):
            assert self.forgets is not None
            self.forgets(id_)

    def admitted(self, seq: WaitingSeq) -> None:
        """A sequence is admitted: the blocks that it holds are whoever's to take who admits it, but for those with content."""
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
            # It was found worth computing again.
            state.recomputed[id_] += self.moved[id_]
        self.forget_moved(id_)

    def reset(self) -> None:
        """Nobody waits."""
        self.at_hand.clear()
        for id_ in list(self.moved):
            self.forget_moved(id_)
