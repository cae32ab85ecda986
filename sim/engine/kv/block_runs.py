"""Cached KV blocks as runs: consecutive blocks that have the same holders and were freed together.

The module knows which copy of a block is found first, the queue of blocks that no sequence holds, how runs are split, and how moves
that were only tried out are taken back. `sim.engine.cache.block_cache` says when.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, Final

from sim.engine.kv.pool import KvPool, OutOfBlocks


class Chain:
    """Cached blocks of one chain of contents; see `sim.engine.kv.content`."""

    __slots__ = ("end", "number", "overlaps", "owner", "parent", "runs", "start", "writers")

    def __init__(self, start: int, parent: Chain | None, owner: int, number: int = -1) -> None:
        self.number = number
        """Its number in the workload; -1: a request's own."""
        self.start = start
        self.parent = parent
        self.owner = owner
        """The only request that has this content; -1: a chain that the workload names."""
        self.end = start
        """Blocks below it are cached: a hit that reaches the chain ends here."""
        self.runs: list[Run] = []
        """Ordered by their first blocks, the older one of equals first."""
        self.overlaps = 0
        """Runs that came while their blocks were cached already: while there are any, a block may be in several."""
        self.writers: dict[int, None] = {}
        """Admitted requests that emit tokens of this chain."""


class Run:
    """Blocks *lo* to *hi* of a chain, held by the same sequences or by none."""

    __slots__ = ("after", "again", "before", "chain", "hi", "lo", "rank", "refs", "rest")

    def __init__(self, chain: Chain | None, lo: int, hi: int, rank: int, again: bool) -> None:
        self.chain = chain
        self.lo = lo
        self.hi = hi
        self.rank = rank
        """Look-ups find the lowest rank of blocks with equal content."""
        self.again = again
        """Whether its blocks were cached already when it came."""
        self.refs = 0
        self.rest: Run | None = None
        """The part that was split off it last: holders of more than this run go on there."""
        self.before: Run | None = None
        """The run before it in the queue of unheld runs, next evicted first; each loses its last block first."""
        self.after: Run | None = None


class Held:
    """A sequence's part of the cache."""

    __slots__ = ("entries", "found", "full", "order")

    def __init__(self, order: int, found: int) -> None:
        self.order = order
        """The number of its admission."""
        self.found = found
        """Blocks that were cached when it was admitted."""
        self.full = 0
        """Full blocks whose content is cached; others that it holds have none yet."""
        self.entries: list[tuple[Run, int]] = []
        """Runs, and the block up to which they and parts split off them are held."""


def parts_of(run: Run, hi: int) -> list[Run]:
    """The runs that *run* has become, up to block *hi*."""
    found = [run]
    while run.hi < hi:
        assert run.rest is not None
        run = run.rest
        found.append(run)
    return found


class RunPool(KvPool):
    """A pool whose free blocks are blank or in the queue of unheld cached runs."""

    __slots__ = ("_blank", "_chains", "_head", "_held", "_log", "_own", "_prepaid", "gives_up")

    def __init__(
        self,
        total: int,
        block_tokens: int,
        *,
        by_chunk: bool = False,
        lookahead_tokens: int = 0,
        limit: int | None = None,
    ) -> None:
        super().__init__(total, block_tokens, by_chunk=by_chunk, lookahead_tokens=lookahead_tokens, limit=limit)
        self.caches = True
        self._blank = total
        """Free blocks without content: the first to be taken."""
        self._held: dict[int, Held] = {}
        self._chains: dict[int, Chain] = {}
        self._own: dict[int, Chain] = {}
        self._head = head = Run(None, 0, 0, 0, False)
        head.before = head.after = head
        self._prepaid = 0
        self._log: list[tuple[Any, ...]] | None = None
        self.gives_up: Callable[[int, int, int], None] | None = None
        """Called on eviction: the chain's number (-1 - id: a request's own), the first block, and the one after the last."""

    def prepay(self, blocks: int) -> None:
        """Takes blocks ahead of a later call of `take`."""
        before, self._prepaid = self._prepaid, 0
        self.take(blocks)
        self._prepaid = before + blocks

    def hand_over(self, blocks: int) -> None:
        """Moves prepaid blocks to a sequence that is preempted after all."""
        self._prepaid -= blocks

    def take(self, blocks: int) -> None:
        if not blocks:
            return
        if self._prepaid:
            prepaid = min(blocks, self._prepaid)
            blocks -= prepaid
            self._prepaid -= prepaid
        if blocks > self.free:
            raise OutOfBlocks
        blank, log = self._blank, self._log
        if log is not None:
            log.append(("take", self.free, blank, self.evicted))
        self.free -= blocks
        if blocks <= blank:
            self._blank = blank - blocks
            return
        blocks -= blank
        self._blank = 0
        self.evicted += blocks
        gives_up = self.gives_up if log is None else None
        while blocks:
            run = self._head.after
            assert run is not None
            assert run.chain is not None
            chain, lo, hi = run.chain, run.lo, run.hi
            size = hi - lo
            alone = not chain.overlaps
            if log is not None:
                log.append(("evict", run, hi, chain.end, chain.overlaps))
            if size > blocks:
                run.hi = top = hi - blocks
                blocks = 0
            else:
                blocks -= size
                top = lo
                self._unlink(run)
                self._drop(chain, run)
            if gives_up is not None and (chain.number >= 0 or chain.owner >= 0):
                gives_up(chain.number if chain.owner < 0 else -1 - chain.owner, top, hi)
            chain.end = top if alone else max((run.hi for run in chain.runs), default=chain.start)

    def _drop(self, chain: Chain, run: Run) -> None:
        """Removes a run without blocks."""
        chain.runs.remove(run)
        chain.overlaps -= run.again
        if self._log is not None:
            self._log.append(("drop", chain, run))
        if chain.owner >= 0 and not chain.runs:
            if self._log is not None:
                self._log.append(("own", chain))
            del self._own[chain.owner]

    def _leave_behind(self, blocks: int) -> None:
        """Up to *blocks* free blocks have content from now on that no look-up finds: the last to be evicted."""
        blocks = min(blocks, self.free)
        if blocks <= 0:
            return
        prepaid, self._prepaid = self._prepaid, 0
        self.take(blocks)
        self._prepaid = prepaid
        self.free += blocks
        chain = Chain(0, None, -1)
        chain.end = blocks
        run = Run(chain, 0, blocks, 0, False)
        chain.runs.append(run)
        last = self._head.before
        assert last is not None
        run.before, run.after = last, self._head
        last.after = self._head.before = run

    def _copies(self, chain: Chain | None, upto: int) -> list[tuple[Run, int, int]]:
        """(run, first block, end) of cached blocks below *upto* of content that ends on *chain*, each at its lowest rank."""
        pieces: list[tuple[Chain, int]] = []
        while chain is not None and upto > 0:
            if upto > chain.start:
                pieces.append((chain, upto))
                upto = chain.start
            chain = chain.parent
        if len(pieces) == 1:
            piece, hi = pieces[0]
            if not piece.overlaps and piece.runs and piece.runs[0].hi >= hi:
                return [(piece.runs[0], piece.start, hi)]
        return [part for piece, hi in reversed(pieces) for part in _first_runs(piece, hi)]

    def _insert(self, chain: Chain, run: Run) -> None:
        runs = chain.runs
        at = len(runs)
        while at and (runs[at - 1].lo, runs[at - 1].rank) > (run.lo, run.rank):
            at -= 1
        runs.insert(at, run)

    def _touch(self, run: Run, lo: int, hi: int) -> Run:
        """Adds a holder to blocks *lo* to *hi* of *run*; returns their run."""
        if run.refs == 0:
            if self._log is not None:
                self._log.append(("free", self.free))
            self.free -= hi - lo
        if lo > run.lo:
            run = self._split(run, lo)
        if hi < run.hi:
            self._split(run, hi)
        if run.refs == 0:
            self._unlink(run)
        run.refs += 1
        if self._log is not None:
            self._log.append(("refs", run))
        return run

    def _split(self, run: Run, at: int) -> Run:
        """Splits *run*; returns the part from *at* on. The order of eviction stays."""
        chain = run.chain
        assert chain is not None
        rest = Run(chain, at, run.hi, run.rank, run.again)
        rest.refs = run.refs
        rest.rest = run.rest
        run.hi = at
        run.rest = rest
        self._insert(chain, rest)
        chain.overlaps += run.again
        if not run.refs:
            before = run.before
            assert before is not None
            rest.before, rest.after = before, run
            before.after = run.before = rest
        if self._log is not None:
            self._log.append(("split", run, rest))
        return rest

    def _unlink(self, run: Run) -> None:
        assert run.before is not None
        assert run.after is not None
        run.before.after = run.after
        run.after.before = run.before
        if self._log is not None:
            self._log.append(("unlink", run))

    @property
    def held_again(self) -> int:
        runs = (run for chain in (*self._chains.values(), *self._own.values()) for run in chain.runs)
        return sum((run.hi - run.lo) * (run.refs - 1) for run in runs if run.refs > 1)

    # Trial of a plan.

    def try_out(self) -> None:
        """Begins to log moves, for `undo`."""
        self._log = []

    def undo(self) -> None:
        """Undoes all moves since `try_out`, the last first."""
        log = self._log
        assert log is not None
        self._log = None
        while log:
            kind, *entry = log.pop()
            if kind == "take":
                self.free, self._blank, self.evicted = entry
            elif kind == "free":
                (self.free,) = entry
            elif kind == "drop":
                self._insert(*entry)
            elif kind == "own":
                (chain,) = entry
                self._own[chain.owner] = chain
            elif kind == "owned":
                del self._own[entry[0]]
            elif kind == "held":
                del self._held[entry[0]]
            else:
                _UNDO[kind](*entry)

    def fault(self) -> str | None:
        """The first invariant of the pool that does not hold, in words; None where all do."""
        holders: dict[Run, int] = {}
        for id_, held in self._held.items():
            parts = [run for first, hi in held.entries for run in parts_of(first, hi)]
            for run in parts:
                holders[run] = holders.get(run, 0) + 1
            blocks = sum(run.hi - run.lo for run in parts)
            if blocks != held.full:
                return f"request {id_} has {held.full} blocks with content, and its runs {blocks}"
        queued = self._queued()
        chains = (*self._chains.values(), *self._own.values())
        for chain in chains:
            fault = _fault_of(chain, holders, queued)
            if fault is not None:
                return fault
        seen = sum(len(chain.runs) for chain in chains)
        left = sum(run.chain is not None and run.chain.number < 0 and run.chain.owner < 0 for run in queued)
        if seen + left < len(holders.keys() | queued.keys()):
            return "somebody holds blocks that cannot be found"
        free = self._blank + sum(run.hi - run.lo for run in queued)
        return None if free == self.free else f"{free} blocks are free and {self.free} are said to be"

    def _queued(self) -> dict[Run, None]:
        """Runs that may be evicted, the next one first."""
        queued: dict[Run, None] = {}
        waiting = self._head.after
        while waiting is not self._head:
            assert waiting is not None
            queued[waiting] = None
            waiting = waiting.after
        return queued


def _first_runs(chain: Chain, hi: int) -> list[tuple[Run, int, int]]:
    """(run, first block, end) of the cached blocks of *chain* below *hi*, each at its lowest rank."""
    if not chain.overlaps:
        below = takewhile(lambda run: run.lo < hi, chain.runs)
        return [(run, run.lo, run.hi if run.hi < hi else hi) for run in below]
    found: list[tuple[Run, int, int]] = []
    at = chain.start
    while at < hi:
        first = min((run for run in chain.runs if run.lo <= at < run.hi), key=lambda run: run.rank)
        earlier = (run.lo for run in chain.runs if run.lo > at and run.rank < first.rank)
        to = min(first.hi, hi, *earlier)
        found.append((first, at, to))
        at = to
    return found


def _fault_of(chain: Chain, holders: dict[Run, int], queued: dict[Run, None]) -> str | None:
    """The first invariant of a chain that does not hold, or None."""
    at = chain.start
    for run in chain.runs:
        if run.lo > at or run.hi <= run.lo:
            return f"blocks {at} to {run.lo} of a chain are missing before others of it"
        at = max(at, run.hi)
        if run.refs != holders.get(run, 0):
            return f"a run is counted {run.refs} times and held by {holders.get(run, 0)}"
        if (run in queued) != (not run.refs):
            return f"a run that {run.refs} hold is {'' if run in queued else 'not '}among those that may be evicted"
    if at != chain.end:
        return f"a chain is said to be cached up to block {chain.end}, and is up to {at}"
    if chain.end > chain.start and chain.parent is not None and chain.parent.end < chain.start:
        return f"a chain is cached from block {chain.start} on, and the one before it up to {chain.parent.end}"
    if chain.overlaps != sum(run.again for run in chain.runs):
        return "a chain does not know how many of its runs came again"
    return None


# Moves undone, by the name under which they were logged.


def _undo_evict(run: Any, hi: int, end: int, overlaps: int) -> None:
    run.hi = hi
    run.chain.end, run.chain.overlaps = end, overlaps


def _undo_unlink(run: Any) -> None:
    run.before.after = run.after.before = run


def _undo_refs(run: Any) -> None:
    run.refs -= 1


def _undo_split(run: Any, rest: Any) -> None:
    run.hi, run.rest = rest.hi, rest.rest
    run.chain.runs.remove(rest)
    run.chain.overlaps -= run.again
    if not run.refs:
        rest.before.after = run
        run.before = rest.before


def _undo_new(run: Any, chain: Any, end: int, overlaps: int) -> None:
    chain.runs.remove(run)
    chain.end, chain.overlaps = end, overlaps


def _undo_longer(run: Any, hi: int, chain: Any, end: int) -> None:
    run.hi = hi
    chain.end = end


def _undo_full(held: Any, full: int, entries: Any) -> None:
    held.full, held.entries = full, entries


_UNDO: Final[dict[str, Callable[..., None]]] = {
    "evict": _undo_evict,
    "unlink": _undo_unlink,
    "refs": _undo_refs,
    "split": _undo_split,
    "new": _undo_new,
    "longer": _undo_longer,
    "full": _undo_full,
}
