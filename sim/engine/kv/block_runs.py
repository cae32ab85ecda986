"""Cached KV blocks as runs: consecutive blocks that have the same holders and were freed together.

The module knows which copy of a block is found first, the queue of blocks that no sequence holds, and how runs are split.
`sim.engine.cache.block_cache` says when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, Final

from sim.engine.kv.caching_pool import CachingPool, Held
from sim.engine.kv.content import Contents
from sim.engine.kv.pool import WHOLE_PROMPTS, OutOfBlocks, Slots

NO_LOOK: Final = (-1, 0, 0, 0)


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
        self.writers: dict[int, int] = {}
        """Admitted requests that emit tokens of this chain, and the block up to which they do."""


class Run:
    """Blocks *lo* to *hi* of a chain, held by the same sequences or by none."""

    used: int
    """The number of its latest use. This and what follows is kept for an eviction policy alone."""
    uses: int
    """Requests that have held it."""
    place: int
    """Its place among runs that the policy ranks; 0: it has none."""
    used_ns: int
    idle_s: float
    user: int

    __slots__ = (
        "after", "again", "before", "chain", "entered", "hi", "idle_s", "lo", "place", "refs", "rest", "used", "used_ns",
        "user", "uses",
    )  # fmt: skip

    def __init__(self, chain: Chain | None, lo: int, hi: int, entered: int, again: bool) -> None:
        self.chain = chain
        self.lo = lo
        self.hi = hi
        self.entered = entered
        """The number of its entry: of blocks with equal content the first to enter are found."""
        self.again = again
        """Whether its blocks were cached already when it came."""
        self.refs = 0
        self.rest: Run | None = None
        """The part that was split off it last: holders of more than this run go on there."""
        self.before: Run | None = None
        """The run before it in the queue of unheld runs, next evicted first; each loses its last block first."""
        self.after: Run | None = None

    def was_used(self, number: int, now_ns: int, user: int) -> None:
        """Notes the latest use, for an eviction policy."""
        self.used, self.used_ns, self.idle_s, self.user = number, now_ns, 0.0, user


class HeldRuns(Held):
    """A sequence's part of the cache."""

    __slots__ = ("computed", "entries", "full")

    def __init__(self, order: int, found: int) -> None:
        self.order = order
        self.found = found
        self.full = 0
        """Full blocks whose content is cached; others that it holds have none yet."""
        self.computed = 0
        """Full blocks whose content could be cached; counted where that is put off (`BlockCache.puts_off`)."""
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


class RunPool(CachingPool[HeldRuns]):
    """A pool whose free blocks are blank or in the queue of unheld cached runs."""

    __slots__ = (
        "_behind",
        "_chains",
        "_head",
        "_looked",
        "_n_placed",
        "_n_uses",
        "_owed",
        "_own",
        "_prepaid",
        "_ranked",
        "_unfound",
    )

    def __init__(self, total: int, block_tokens: int, contents: Contents, slots: Slots = WHOLE_PROMPTS) -> None:
        super().__init__(total, block_tokens, contents, slots)
        self._chains: dict[int, Chain] = {}
        self._own: dict[int, Chain] = {}
        self._head = head = Run(None, 0, 0, 0, False)
        head.before = head.after = head
        self._unfound = Chain(0, None, -1)
        """The chain of blocks that no look-up finds, which does not know them."""
        self._prepaid = self._n_placed = 0
        self._owed = 0
        """Blocks that have been taken while the least recently used ones whose content is evicted for them are still queued."""
        self._n_uses: int = 0
        self._looked = NO_LOOK
        """The latest look-up, while nothing that it found can have changed: the request, its tokens, the blocks found, and how many
        may be evicted of those that it went by."""
        self._ranked: list[tuple[Any, int, Run]] = []
        """A heap of unheld runs by the rank that the eviction policy gives them; outdated entries stay until they are met."""
        self._behind: defaultdict[Chain, dict[Chain, None]] = defaultdict(dict)
        """Chains with cached blocks that leave each, for the policy."""

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
        blank = self._blank
        self.free -= blocks
        if blocks <= blank:
            self._blank = blank - blocks
        else:
            self._blank = 0
            self.evicted += blocks - blank
            self._owed += blocks - blank
            if self._looked[3]:
                self._looked = NO_LOOK
            if self.eviction is not None or self.gives_up is not None or self._owed > self.total:
                self._settle()

    def _settle(self) -> None:
        """Evicts what is owed. It is put off until somebody might find it: which blocks go is known, the first in the queue."""
        blocks, self._owed = self._owed, 0
        if blocks and self._due:
            self.rank_again()
        gives_up = self.gives_up
        while blocks:
            run = self._head.after if self.eviction is None else self._ranked_first()
            assert run is not None
            assert run.chain is not None
            chain, lo, hi = run.chain, run.lo, run.hi
            top = hi - blocks
            if top > lo:
                run.hi = top
            else:
                top = lo
                self._unlink(run)
            blocks -= hi - top
            if chain is self._unfound:
                continue
            alone = not chain.overlaps
            if top == lo:
                self._remove(chain, run)
            if gives_up is not None and (chain.number >= 0 or chain.owner >= 0):
                gives_up(chain.number if chain.owner < 0 else -1 - chain.owner, top, hi)
            chain.end = top if alone else max((run.hi for run in chain.runs), default=chain.start)

    def _remove(self, chain: Chain, run: Run) -> None:
        """Forgets a run that has been evicted."""
        chain.runs.remove(run)
        chain.overlaps -= run.again
        if not chain.runs:
            if chain.owner >= 0:
                del self._own[chain.owner]
            if self.eviction is not None and chain.parent is not None:
                del self._behind[chain.parent][chain]

    # An eviction policy's order.

    def _place(self, run: Run) -> None:
        """Ranks an unheld run, of which blocks with another next use or another rank are split off."""
        assert run.chain is not None
        next_use, upto = inf, run.hi
        if self.next_uses is not None:
            next_use, upto = self.next_uses.of(run.chain.number, run.lo, upto)
        upto = self._end_of_rank(run, upto, next_use)
        if upto < run.hi:
            self._split(run, upto)
        self._push(run)

    def _rank_the_freed(self, runs: Sequence[Run], id_: int) -> None:
        """Ranks the runs that a request has used last and that no request holds now."""
        self.rank_again()
        self._n_uses += 1
        for run in runs:
            run.was_used(self._n_uses, self.now_ns(), id_)
        for run in runs:
            self._place(run)

    def _push(self, run: Run) -> None:
        assert run.chain is not None
        next_use = inf if self.next_uses is None else self.next_uses.of(run.chain.number, run.lo, run.hi)[0]
        self._n_placed = run.place = self._n_placed + 1
        heappush(self._ranked, (self._rank(run, run.lo, next_use), run.place, run))
        self._note_when_due(run, run.place, next_use)

    def _rank_again(self, number: int, used: int, part: Run) -> None:
        if part.place == number:
            self._idle(part)
            self._n_uses += 1
            part.used = self._n_uses
            self._place(part)

    def _ranked_first(self) -> Run:
        """The unheld run with the lowest rank or, where others behind it could not be found without it, the last of these."""
        ranked = self._ranked
        while ranked[0][1] != ranked[0][2].place:
            heappop(ranked)
        run = ranked[0][2]
        while True:
            assert run.chain is not None
            cut, behind = _goes_from(run, self._behind[run.chain])
            if behind is None or behind.refs:
                return run if cut <= run.lo else self._split(run, cut)
            run = behind

    def has_blank(self, blocks: int) -> bool:
        """Whether *blocks* blocks can be taken that have no content."""
        return blocks <= self._blank

    def may_evict(self, blocks: int, path: Sequence[Chain], upto: int, kept: Container[Chain]) -> bool:
        """Whether *blocks* more might be taken by evicting blocks below *upto* of the chains of *path*; those of *kept* stay."""
        left = blocks - self._blank
        if left <= 0:
            return False
        if self._due and self._due[0][0] <= self.now_ns():
            return True
        for run in self._next_to_go():
            chain = run.chain
            assert chain is not None
            # A policy spares blocks without which others behind them could not be found: these go first.
            if chain in path and (self.eviction is not None or (run.lo < upto and run.hi - left < upto)):
                return True
            if chain not in kept:
                left -= run.hi - run.lo
                if left <= 0:
                    break
        return False

    def _next_to_go(self) -> Iterator[Run]:
        """Unheld runs in the order in which they are evicted, but for what a policy spares."""
        if self.eviction is None:
            run = self._head.after
            while run is not None and run is not self._head:
                yield run
                run = run.after
            return
        for _, place, run in in_order(self._ranked):
            if place == run.place:
                yield run

    def _leave_behind(self, blocks: int) -> None:
        """Up to *blocks* free blocks have content from now on that no look-up finds: the last to be evicted."""
        blocks = min(blocks, self.free)
        if blocks <= 0:
            return
        prepaid, self._prepaid = self._prepaid, 0
        self.take(blocks)
        self._prepaid = prepaid
        self.free += blocks
        self._queue_unfound(blocks)

    def _queue_unfound(self, blocks: int) -> int:
        """Queues free blocks, if any, with content that no look-up finds; returns how many."""
        if not blocks:
            return 0
        run = Run(self._unfound, 0, blocks, 0, False)
        self._append(run)
        if self.eviction is not None:
            run.uses = 1
            run.was_used(self._n_uses, self.now_ns(), -1)
            self._place(run)
        return blocks

    def _unheld(self, chain: Chain | None, upto: int) -> int:
        """Cached blocks below *upto* of content that ends on *chain* that no sequence holds."""
        unheld = 0
        while chain is not None and upto > 0:
            if upto > chain.start:
                if chain.overlaps:
                    for run, lo, hi in _first_runs(chain, min(upto, chain.end)):
                        unheld += 0 if run.refs else hi - lo
                else:
                    for run in reversed(chain.runs):
                        if run.lo < upto:
                            if run.refs:
                                # Who holds it holds all before it.
                                break
                            unheld += (run.hi if run.hi < upto else upto) - run.lo
                upto = chain.start
            chain = chain.parent
        return unheld

    def _copies(self, chain: Chain | None, upto: int) -> list[tuple[Run, int, int]]:
        """(run, first block, end) of cached blocks below *upto* of content that ends on *chain*, each at the first to enter."""
        pieces: list[tuple[Chain, int]] = []
        while chain is not None and upto > 0:
            if upto > chain.start:
                pieces.append((chain, upto))
                upto = chain.start
            chain = chain.parent
        found: list[tuple[Run, int, int]] = []
        for piece, hi in reversed(pieces):
            if piece.overlaps:
                found += _first_runs(piece, min(hi, piece.end))
                continue
            for run in piece.runs:
                if run.hi >= hi:
                    if run.lo < hi:
                        found.append((run, run.lo, hi))
                    break
                found.append((run, run.lo, run.hi))
        return found

    def _insert(self, chain: Chain, run: Run) -> None:
        runs = chain.runs
        at = len(runs)
        while at and (runs[at - 1].lo, runs[at - 1].entered) > (run.lo, run.entered):
            at -= 1
        runs.insert(at, run)
        if self.eviction is not None and chain.parent is not None:
            self._behind[chain.parent][chain] = None

    def _touch(self, run: Run, lo: int, hi: int) -> Run:
        """Adds a holder to blocks *lo* to *hi* of *run*; returns their run."""
        if run.refs == 0:
            self.free -= hi - lo
        if lo > run.lo:
            run = self._split(run, lo, is_held=True)
        if hi < run.hi:
            self._split(run, hi)
        if run.refs == 0:
            self._unlink(run)
        run.refs += 1
        if self.eviction is not None:
            run.uses += 1
        return run

    def _split(self, run: Run, at: int, *, is_held: bool = False) -> Run:
        """Splits *run*; returns the part from *at* on. The order of eviction stays. *is_held*: that part is about to be held, and
        no policy ranks it, nor splits it further."""
        chain = run.chain
        assert chain is not None
        rest = Run(chain, at, run.hi, run.entered, run.again)
        rest.refs = run.refs
        rest.rest = run.rest
        if self.eviction is not None:
            rest.uses, rest.place = run.uses, 0
            rest.was_used(run.used, run.used_ns, run.user)
            rest.idle_s = run.idle_s
        run.hi = at
        run.rest = rest
        self._insert(chain, rest)
        chain.overlaps += run.again
        if not run.refs:
            before = run.before
            assert before is not None
            rest.before, rest.after = before, run
            before.after = run.before = rest
            if self.eviction is not None and not is_held:
                self._place(rest)
        return rest

    def _append(self, run: Run) -> None:
        """Queues an unheld run behind all others."""
        last = self._head.before
        assert last is not None
        run.before, run.after = last, self._head
        last.after = self._head.before = run

    def _unlink(self, run: Run) -> None:
        assert run.before is not None
        assert run.after is not None
        run.before.after = run.after
        run.after.before = run.before
        run.place = 0

    def _parts(self, id_: int) -> Iterator[Run]:
        for first, hi in self._held[id_].entries:
            yield from parts_of(first, hi)

    def _all(self) -> Iterator[Run]:
        self._settle()
        for chain in (*self._chains.values(), *self._own.values()):
            yield from chain.runs

    def fault(self) -> str | None:
        """The first invariant of the pool that does not hold, in words; None where all do."""
        holders: dict[Any, int] = self._holders()
        for id_, held in self._held.items():
            blocks = sum(run.hi - run.lo for run in self._parts(id_))
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
        if self.eviction is not None and {run for _, place, run in self._ranked if place == run.place} != queued.keys():
            return "the runs that the eviction policy ranks are not those that may be evicted"
        free = self._blank + sum(run.hi - run.lo for run in queued)
        return None if free == self.free else f"{free} blocks are free and {self.free} are said to be"

    def _queued(self) -> dict[Run, None]:
        """Runs that may be evicted, the next one first."""
        self._settle()
        queued: dict[Run, None] = {}
        waiting = self._head.after
        while waiting is not self._head:
            assert waiting is not None
            queued[waiting] = None
            waiting = waiting.after
        return queued


def in_order(heap: list[Any]) -> Iterator[Any]:
    """The items of a heap, which stays as it is, from the least one on."""
    ahead: list[tuple[Any, int]] = [(heap[0], 0)] if heap else []
    while ahead:
        item, at = heappop(ahead)
        yield item
        for below in (2 * at + 1, 2 * at + 2):
            if below < len(heap):
                heappush(ahead, (heap[below], below))


def _first_runs(chain: Chain, hi: int) -> list[tuple[Run, int, int]]:
    """(run, first block, end) of the cached blocks of *chain* below *hi*, each at the first to enter, where some came twice."""
    found: list[tuple[Run, int, int]] = []
    at = chain.start
    while at < hi:
        first = min((run for run in chain.runs if run.lo <= at < run.hi), key=lambda run: run.entered)
        earlier = (run.lo for run in chain.runs if run.lo > at and run.entered < first.entered)
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


def _goes_from(run: Run, behind: Iterable[Chain]) -> tuple[int, Run | None]:
    """The block from which on a run may go, or the run that has to go before it: without it, that could not be found."""
    chain = run.chain
    assert chain is not None
    others = [other for other in chain.runs if other is not run]
    child = max(behind, key=_by_number, default=None)
    last = others[-1] if others else None
    first_needed = max(-1 if last is None else last.lo, -1 if child is None else child.start)
    if first_needed < run.hi:
        return first_needed, None
    at = run.hi
    while at > run.lo:
        # Blocks that are cached in another run as well may go.
        at, before = min((other.lo for other in others if other.lo < at <= other.hi), default=at), at
        if at == before:
            break
    if at < run.hi:
        return at, None
    return run.lo, child.runs[-1] if child is not None and child.start == first_needed else last


def _by_number(chain: Chain) -> tuple[int, int, int]:
    return chain.start, chain.number, chain.owner
