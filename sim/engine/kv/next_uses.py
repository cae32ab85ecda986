"""The next uses of cached blocks, which a trace tells: for `policies.eviction` that foresee."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sim.engine.kv.content import Contents


class NextUses:
    """For each block, the first request in order of arrival that has not begun and looks for it."""

    __slots__ = ("_at", "_begun", "_uses")

    def __init__(self, contents: Contents, prompts: Sequence[int]) -> None:
        self._begun = bytearray(len(contents.chain))
        self._uses: list[list[tuple[int, int]]] = [[] for _ in contents.start]
        """(request, the block up to which it uses the chain), by chain."""
        for id_, named in enumerate(contents.named):
            upto = min(named, (prompts[id_] - 1) // contents.block_tokens)
            for chain, _, hi in contents.path(id_, upto):
                self._uses[chain].append((id_, hi))
        self._at = [0] * len(self._uses)
        """Uses of each chain that are over."""

    def copied(self) -> NextUses:
        """One that may begin requests by itself."""
        twin = NextUses(Contents(1), ())
        twin.become(self._begun[:], self._uses, self._at[:])
        return twin

    def become(self, begun: bytearray, uses: list[list[tuple[int, int]]], at: list[int]) -> None:
        self._begun, self._uses, self._at = begun, uses, at

    def begin(self, id_: int) -> None:
        """A request has looked up what it finds."""
        self._begun[id_] = True

    def of(self, chain: int, block: int, upto: int) -> tuple[float, int]:
        """The next request that looks for a block of a chain (inf: none), and the block up to which it is, *upto* at most."""
        if chain < 0:
            return inf, upto
        uses, begun, at = self._uses[chain], self._begun, self._at[chain]
        while at < len(uses) and begun[uses[at][0]]:
            at += 1
        self._at[chain] = at
        found = next(((id_, hi) for id_, hi in uses[at:] if hi > block and not begun[id_]), (inf, upto))
        return found[0], min(found[1], upto)
