"""A router's own account of machines: the prompts of the requests that it sent there and that have not ended."""

from __future__ import annotations

from collections.abc import Sequence

from policies.routers import Booked, RoutedRequest
from sim.engine.kv.content import Contents, Piece
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.record.columns import UNFINISHED
from sim.engine.requests.state import RequestState


class _Entry:
    """A request that is under way on a machine."""

    __slots__ = ("blocks", "machine", "pieces", "tokens")

    def __init__(self, machine: int, blocks: int, pieces: list[Piece], tokens: int) -> None:
        self.machine = machine
        self.blocks = blocks
        """Blocks that no other request can have."""
        self.pieces = pieces
        """Blocks that others may share, by chain of contents."""
        self.tokens = tokens
        """Prompt tokens to compute, until there is a first token."""


class Ledger:
    """The account of all machines. A request leaves it when it has ended, or where its stage has."""

    def __init__(self, machines: Sequence[AnyMachine], state: RequestState) -> None:
        self._sizes = [machine.block_tokens for machine in machines]
        self._state = state
        self._contents: dict[int, Contents] = {}
        self._present: tuple[int, dict[int, tuple[list[Piece], int]]] = (-1, {})
        """The present request, and its parts in blocks of each size."""
        if state.contents_in is not None:
            for size in {machine.block_tokens for machine in machines if machine.cores}:
                self._contents[size] = state.contents_in(size)
        self._entries: dict[int, _Entry] = {}
        self._blocks = [0] * len(machines)
        self._tokens = [0] * len(machines)
        self._ends: list[dict[int, dict[int, int]]] = [{} for _ in machines]
        """For each machine and chain of contents the blocks at which requests leave it, and how many do: all begin at its first."""

    def settle(self, now_ns: int) -> None:
        """Take out what has ended by now, and prompts that have their first token."""
        state = self._state
        status, first_token = state.status, state.first_token
        ended: list[int] = []
        for id_, entry in self._entries.items():
            if status[id_] != UNFINISHED:
                ended.append(id_)
            elif entry.tokens and 0 <= first_token[id_] <= now_ns:
                self._tokens[entry.machine] -= entry.tokens
                entry.tokens = 0
        for id_ in ended:
            self.leave(id_)

    def leave(self, id_: int) -> None:
        """A request has ended, or goes elsewhere."""
        entry = self._entries.pop(id_, None)
        if entry is None:
            return
        index, ends = entry.machine, self._ends[entry.machine]
        self._tokens[index] -= entry.tokens
        self._blocks[index] -= entry.blocks
        for chain, lo, hi in entry.pieces:
            mine = ends[chain]
            before = max(mine)
            mine[hi] -= 1
            if not mine[hi]:
                del mine[hi]
            self._blocks[index] -= before - max(mine, default=lo)
            if not mine:
                del ends[chain]

    def enter(self, request: RoutedRequest, index: int, cached_tokens: int) -> None:
        """The request is sent to a machine that is thought to have *cached_tokens* of its prompt."""
        self.leave(request.id)
        pieces, own = self._parts(request, index)
        ends = self._ends[index]
        for chain, lo, hi in pieces:
            mine = ends.setdefault(chain, {})
            self._blocks[index] += max(hi - max(mine, default=lo), 0)
            mine[hi] = mine.get(hi, 0) + 1
        tokens = max(request.prompt_tokens - cached_tokens, 0)
        self._blocks[index] += own
        self._tokens[index] += tokens
        self._entries[request.id] = _Entry(index, own, pieces, tokens)

    def of(self, request: RoutedRequest, index: int) -> Booked:
        """The account of a machine, for *request*, which comes next."""
        ends, shared = self._ends[index], 0
        for chain, lo, hi in self._parts(request, index)[0]:
            shared += max(min(hi, max(ends.get(chain, ()), default=lo)) - lo, 0)
        return Booked(self._blocks[index], shared, self._tokens[index])

    def _parts(self, request: RoutedRequest, index: int) -> tuple[list[Piece], int]:
        """The full blocks of a prompt that others may have, and the number of the rest."""
        if self._present[0] != request.id:
            self._present = (request.id, {})
        size, known = self._sizes[index], self._present[1]
        if size not in known:
            contents = self._contents.get(size)
            pieces: list[Piece] = []
            if contents is not None:
                path = contents.path(request.id, request.prompt_tokens // size)
                pieces = [piece for piece in path if piece[0] >= 0]
            own = -(-request.prompt_tokens // size) - sum(hi - lo for _, lo, hi in pieces)
            known[size] = pieces, own
        return known[size]
