"""KV blocks that stay after their sequence has gone, for whoever begins as it did: the prefix cache of vLLM v1.

The rules are those of `vllm/v1/core/block_pool.py`, `kv_cache_manager.py` and `single_type_kv_cache_manager.py` of release 0.32.0:

* a full block is cached from the moment at which its last token is scheduled, named by all tokens up to its end;
* a request finds the longest run of cached blocks from its beginning, all tokens but one at most;
* blocks are shared by count, and nobody's blocks are moved: content that is computed twice is held twice, and found where it was
  first;
* freed blocks stay until their room is needed: those without content go first, then the least recently freed, of one sequence the
  last block first.

vLLM keeps a record for each block. Here a *run* is one record for blocks behind each other that have the same holders and were freed
together, so that work follows how often prompts fork, and not how long they are or how many blocks the cache has.
"""

from __future__ import annotations

from typing import Any

from sim.engine.content import Contents
from sim.engine.experiment import ReplicaSpec
from sim.engine.kv import KvPool, OutOfBlocks
from sim.engine.requests import RequestState


class Chain:
    """Cached blocks of one chain of contents; see `sim.engine.content`."""

    __slots__ = ("end", "overlaps", "owner", "parent", "runs", "start", "writers")

    def __init__(self, start: int, parent: Chain | None, owner: int) -> None:
        self.start = start
        self.parent = parent
        self.owner = owner
        """The request whose content this is and nobody else's; -1: a chain that the workload names."""
        self.end = start
        """Blocks below it are cached: those of a request that is found ends here."""
        self.runs: list[Run] = []
        """In order of their first blocks, of equals the one that was there first."""
        self.overlaps = 0
        """Runs that came while their blocks were cached already: as long as there are any, a block may be in several."""
        self.writers: dict[int, None] = {}
        """Admitted requests that emit what this chain names."""


class Run:
    """Blocks *lo* to *hi* of a chain, held by the same sequences or by nobody."""

    __slots__ = ("after", "again", "before", "chain", "hi", "lo", "rank", "refs", "rest")

    def __init__(self, chain: Chain | None, lo: int, hi: int, rank: int, again: bool) -> None:
        self.chain = chain
        self.lo = lo
        self.hi = hi
        self.rank = rank
        """Of blocks with the same content that of the lowest rank is found."""
        self.again = again
        """Whether its blocks were cached already when it came."""
        self.refs = 0
        self.rest: Run | None = None
        """The part that was split off it last: who holds more than this run goes on there."""
        self.before: Run | None = None
        """In the queue of those that nobody holds, first to be evicted first; the last block of each goes first."""
        self.after: Run | None = None


class Held:
    """What a sequence holds of the cache."""

    __slots__ = ("entries", "found", "full", "order")

    def __init__(self, order: int, found: int) -> None:
        self.order = order
        """Of admission."""
        self.found = found
        """Blocks that were cached when it was admitted."""
        self.full = 0
        """Full blocks whose content is cached; others that it holds have none yet."""
        self.entries: list[tuple[Run, int]] = []
        """Runs, and up to which block they and what was split off them are its own."""


def parts_of(run: Run, hi: int) -> list[Run]:
    """The runs that *run* has become, up to block *hi*."""
    found = [run]
    while run.hi < hi:
        assert run.rest is not None
        run = run.rest
        found.append(run)
    return found


class BlockCache(KvPool):
    """A pool whose blocks are found again by their content."""

    __slots__ = (
        "_blank", "_chains", "_contents", "_head", "_held", "_log", "_n_admitted", "_own", "_prepaid", "_rank", "_writes", "drops_last",
    )  # fmt: skip

    def __init__(
        self, total: int, block_tokens: int, contents: Contents, *, by_chunk: bool = False, lookahead_tokens: int = 0,
        limit: int | None = None, drops_last: bool = False,
    ) -> None:  # fmt: skip
        """*drops_last*: of what is found the last block is computed again, for a drafter that needs the target's states there."""
        super().__init__(total, block_tokens, by_chunk=by_chunk, lookahead_tokens=lookahead_tokens, limit=limit)
        self.caches = True
        self.drops_last = drops_last
        self._contents = contents
        self._blank = total
        """Free blocks without content: the first to be taken."""
        self._held: dict[int, Held] = {}
        self._chains: dict[int, Chain] = {}
        self._own: dict[int, Chain] = {}
        self._head = head = Run(None, 0, 0, 0, False)
        head.before = head.after = head
        self._rank = self._n_admitted = 0
        self._writes = self._prepaid = 0
        self._log: list[tuple[Any, ...]] | None = None

    # Contents.

    def _chain(self, number: int) -> Chain | None:
        chains, contents = self._chains, self._contents
        missing: list[int] = []
        while number >= 0 and number not in chains:
            missing.append(number)
            number = contents.parent[number]
        chain = chains.get(number)
        for at in reversed(missing):
            chain = chains[at] = Chain(contents.start[at], chain, -1)
        return chain

    def _last_chain(self, id_: int) -> Chain | None:
        """Where a request's content ends as far as it is known: its own chain, or the last that the workload names."""
        own = self._own.get(id_)
        return own if own is not None else self._chain(self._contents.chain[id_])

    @property
    def writes(self) -> bool:
        """Whether somebody emits what the workload names, so that others may find more with every step."""
        return self._writes > 0

    # What is found.

    def found_blocks(self, id_: int, tokens: int) -> int:
        """Blocks that a request with *tokens* tokens would find: one token at least is computed."""
        upto = (tokens - 1) // self.block_tokens
        chain = self._last_chain(id_)
        if self._own.get(id_) is None:
            upto = min(upto, self._contents.named[id_])
        if self._writes:
            self._catch_up(chain)
        while chain is not None:
            if chain.end > chain.start and upto > chain.start:
                found = min(chain.end, upto)
                return found - 1 if self.drops_last else found
            upto = min(upto, chain.start)
            chain = chain.parent
        return 0

    def unheld_blocks(self, id_: int, blocks: int) -> int:
        """Of the first *blocks* cached blocks of a request those that nobody holds: they count as free until it takes them."""
        return sum(hi - lo for run, lo, hi in self._copies(self._last_chain(id_), blocks) if not run.refs)

    def _copies(self, chain: Chain | None, upto: int) -> list[tuple[Run, int, int]]:
        """The cached blocks below *upto* that end on *chain*, each where it is found first: runs, and which blocks of them."""
        pieces: list[tuple[Chain, int]] = []
        while chain is not None and upto > 0:
            if upto > chain.start:
                pieces.append((chain, upto))
                upto = chain.start
            chain = chain.parent
        found: list[tuple[Run, int, int]] = []
        for piece, hi in reversed(pieces):
            if not piece.overlaps:
                for run in piece.runs:
                    if run.lo >= hi:
                        break
                    found.append((run, run.lo, min(run.hi, hi)))
                continue
            at = piece.start
            while at < hi:
                first = min((run for run in piece.runs if run.lo <= at < run.hi), key=lambda run: run.rank)
                to = min(first.hi, hi)
                for run in piece.runs:
                    if at < run.lo < to and run.rank < first.rank:
                        to = run.lo
                found.append((first, at, to))
                at = to
        return found

    def _catch_up(self, chain: Chain | None) -> None:
        """What has been emitted by now of what *chain* and those before it name is cached."""
        while chain is not None:
            for id_ in chain.writers:
                assert self.progress is not None
                self.cached(id_, self.progress(id_))
            chain = chain.parent

    # Moves.

    def admit(self, id_: int, blocks: int) -> None:
        """A request holds its first *blocks* blocks, which are cached."""
        self._n_admitted += 1
        held = self._held[id_] = Held(self._n_admitted, blocks)
        held.full = blocks
        if self._log is not None:
            self._log.append(("held", id_))
        chain = self._last_chain(id_)
        for run, lo, hi in self._copies(chain, blocks):
            held.entries.append((self._touch(run, lo, hi), hi))

    def writes_on(self, id_: int, prompt_tokens: int) -> None:
        """An admitted request emits what the workload names, if it names more of it than the prompt."""
        for chain in self._written(id_, prompt_tokens // self.block_tokens):
            chain.writers[id_] = None
            self._writes += 1

    def _written(self, id_: int, first: int) -> list[Chain]:
        """The chains that name blocks of a request from *first* on."""
        found: list[Chain] = []
        chain = self._chain(self._contents.chain[id_]) if self._contents.named[id_] > first else None
        while chain is not None:
            found.append(chain)
            chain = chain.parent if chain.start > first else None
        return found

    def found(self, id_: int) -> int:
        """Blocks that a request found when it was admitted."""
        return self._held[id_].found

    def order(self, id_: int) -> int:
        """Of admissions which one it was."""
        return self._held[id_].order

    def shared_blocks(self, id_: int) -> int:
        """Blocks of a request that somebody else holds as well."""
        held = self._held.get(id_)
        if held is None:
            return 0
        return sum(run.hi - run.lo for first, hi in held.entries for run in parts_of(first, hi) if run.refs > 1)

    def freed_by(self, id_: int, gone: dict[Any, int]) -> int:
        """Blocks with content that come free when a request gives way, others having given way before; *gone* keeps count of these."""
        held, freed = self._held[id_], 0
        for first, hi in held.entries:
            for run in parts_of(first, hi):
                before = gone[run] = gone.get(run, 0) + 1
                freed += run.hi - run.lo if before == run.refs else 0
        return freed

    def full_blocks(self, id_: int) -> int:
        """Blocks of an admitted request whose content is cached."""
        return self._held[id_].full

    def prepay(self, blocks: int) -> None:
        """Take blocks now that `take` will be asked for."""
        before, self._prepaid = self._prepaid, 0
        self.take(blocks)
        self._prepaid = before + blocks

    def hand_over(self, blocks: int) -> None:
        """Blocks that were taken ahead are those of a sequence that gives way after all."""
        self._prepaid -= blocks

    def take(self, blocks: int) -> None:
        if self._prepaid:
            prepaid = min(blocks, self._prepaid)
            blocks -= prepaid
            self._prepaid -= prepaid
        if blocks > self.free:
            raise OutOfBlocks
        if self._log is not None:
            self._log.append(("take", self.free, self._blank, self.evicted))
        self.free -= blocks
        if blocks <= self._blank:
            self._blank -= blocks
            return
        blocks -= self._blank
        self._blank = 0
        self.evicted += blocks
        while blocks:
            run = self._head.after
            assert run is not None and run.chain is not None
            chain, size = run.chain, run.hi - run.lo
            alone = not chain.overlaps
            if self._log is not None:
                self._log.append(("evict", run, run.hi, chain.end, chain.overlaps))
            if size > blocks:
                run.hi -= blocks
                top = run.hi
                blocks = 0
            else:
                blocks -= size
                top = run.lo
                self._unlink(run)
                self._drop(chain, run)
            chain.end = top if alone else max((run.hi for run in chain.runs), default=chain.start)

    def _drop(self, chain: Chain, run: Run) -> None:
        """A run has no blocks any more."""
        chain.runs.remove(run)
        chain.overlaps -= run.again
        if self._log is not None:
            self._log.append(("drop", chain, run))
        if chain.owner >= 0 and not chain.runs:
            if self._log is not None:
                self._log.append(("own", chain))
            del self._own[chain.owner]

    def give(self, blocks: int) -> None:
        """Blocks without content come back."""
        self.free += blocks
        self._blank += blocks

    def cached(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of an admitted request are computed, or about to be: its full blocks can be found."""
        held, upto = self._held[id_], tokens // self.block_tokens
        at = held.full
        if at >= upto:
            return
        if self._log is not None:
            self._log.append(("full", held, at, list(held.entries)))
        named = self._contents.named[id_]
        held.full = upto
        while at < upto:
            if at >= named:
                chain, to = self._own_chain(id_, named), upto
            else:
                chain, to = self._chain(self._contents.chain[id_]), min(named, upto)
                assert chain is not None
                while at < chain.start:
                    to = min(to, chain.start)
                    chain = chain.parent
                    assert chain is not None
            if at < chain.end:
                to = min(to, chain.end)
            self._write(held, chain, at, to, again=at < chain.end)
            at = to

    def _own_chain(self, id_: int, named: int) -> Chain:
        chain = self._own.get(id_)
        if chain is None:
            chain = self._own[id_] = Chain(named, self._chain(self._contents.chain[id_]), id_)
            if self._log is not None:
                self._log.append(("owned", id_))
        return chain

    def _write(self, held: Held, chain: Chain, at: int, to: int, *, again: bool) -> None:
        """Blocks of *held* get the content at *at* to *to* of *chain*."""
        log = self._log
        if held.entries and not again:
            first, hi = held.entries[-1]
            last = parts_of(first, hi)[-1]
            if last.chain is chain and hi == at and last.hi == at and last.refs == 1:
                if log is not None:
                    log.append(("longer", last, at, chain, chain.end))
                last.hi = to
                held.entries[-1] = (first, to)
                chain.end = max(chain.end, to)
                return
        self._rank += 1
        run = Run(chain, at, to, self._rank, again)
        run.refs = 1
        if log is not None:
            log.append(("new", run, chain, chain.end, chain.overlaps))
        self._insert(chain, run)
        chain.overlaps += again
        chain.end = max(chain.end, to)
        held.entries.append((run, to))

    def _insert(self, chain: Chain, run: Run) -> None:
        runs = chain.runs
        at = len(runs)
        while at and (runs[at - 1].lo, runs[at - 1].rank) > (run.lo, run.rank):
            at -= 1
        runs.insert(at, run)

    def release(self, id_: int, blocks: int, tokens: int) -> None:
        """A request gives back all of its *blocks*; *tokens* of its tokens are cached. The last block is the first to be evicted."""
        self.cached(id_, tokens)
        held = self._held.pop(id_)
        if self._writes:
            for chain in self._written(id_, 0):
                self._writes -= chain.writers.pop(id_, 0) is None
        self.give(blocks - held.full)
        latest: Run | None = None
        for first, hi in reversed(held.entries):
            for run in reversed(parts_of(first, hi)):
                run.refs -= 1
                if run.refs:
                    latest = None
                    continue
                self.free += run.hi - run.lo
                chain = run.chain
                assert chain is not None
                if latest is not None and latest.chain is chain and latest.lo == run.hi and not chain.overlaps:
                    latest.lo = run.lo
                    latest.rank = run.rank
                    chain.runs.remove(run)
                    continue
                self._append(run)
                latest = run

    def reset(self) -> None:
        """Nobody holds anything, and nothing is cached."""
        self.free = self._blank = self.total
        self._held.clear()
        self._chains.clear()
        self._own.clear()
        self._head.before = self._head.after = self._head
        self._writes = 0

    def _touch(self, run: Run, lo: int, hi: int) -> Run:
        """Somebody more holds blocks *lo* to *hi* of *run*: the run of these alone."""
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
        """Two runs of one, the second from *at* on; nobody's order of eviction changes."""
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
        assert run.before is not None and run.after is not None
        run.before.after = run.after
        run.after.before = run.before
        if self._log is not None:
            self._log.append(("unlink", run))

    def _append(self, run: Run) -> None:
        head = self._head
        last = head.before
        assert last is not None
        run.before, run.after = last, head
        last.after = head.before = run

    @property
    def held_again(self) -> int:
        runs = (run for chain in (*self._chains.values(), *self._own.values()) for run in chain.runs)
        return sum((run.hi - run.lo) * (run.refs - 1) for run in runs if run.refs > 1)

    def fault(self) -> str | None:
        """What of the books does not hold, in words; None where all does. For `sim.engine.invariants`."""
        holders: dict[Run, int] = {}
        for id_, held in self._held.items():
            blocks = 0
            for first, hi in held.entries:
                for run in parts_of(first, hi):
                    holders[run] = holders.get(run, 0) + 1
                    blocks += run.hi - run.lo
            if blocks != held.full:
                return f"request {id_} has {held.full} blocks with content, and its runs {blocks}"
        queued: dict[Run, None] = {}
        run = self._head.after
        while run is not self._head:
            assert run is not None
            queued[run] = None
            run = run.after
        seen = 0
        for chain in (*self._chains.values(), *self._own.values()):
            at = chain.start
            for run in chain.runs:
                if run.lo > at or run.hi <= run.lo:
                    return f"blocks {at} to {run.lo} of a chain are missing before others of it"
                at = max(at, run.hi)
                if run.refs != holders.get(run, 0):
                    return f"a run is counted {run.refs} times and held by {holders.get(run, 0)}"
                if (run in queued) != (not run.refs):
                    return f"a run that {run.refs} hold is {'' if run in queued else 'not '}among those that may be evicted"
                seen += 1
            if at != chain.end:
                return f"a chain is said to be cached up to block {chain.end}, and is up to {at}"
            if chain.end > chain.start and chain.parent is not None and chain.parent.end < chain.start:
                return f"a chain is cached from block {chain.start} on, and the one before it up to {chain.parent.end}"
            if chain.overlaps != sum(run.again for run in chain.runs):
                return "a chain does not know how many of its runs came again"
        if seen < len(holders.keys() | queued.keys()):
            return "somebody holds blocks that cannot be found"
        free = self._blank + sum(run.hi - run.lo for run in queued)
        return None if free == self.free else f"{free} blocks are free and {self.free} are said to be"

    # What a plan would do.

    def try_out(self) -> None:
        """From here on moves are noted, for `undo`."""
        self._log = []

    def undo(self) -> None:
        """Take back all moves since `try_out`, the last first."""
        log = self._log
        assert log is not None
        self._log = None
        for entry in reversed(log):
            kind = entry[0]
            if kind == "take":
                _, self.free, self._blank, self.evicted = entry
            elif kind == "evict":
                _, run, hi, end, overlaps = entry
                run.hi = hi
                run.chain.end, run.chain.overlaps = end, overlaps
            elif kind == "drop":
                self._insert(entry[1], entry[2])
            elif kind == "own":
                self._own[entry[1].owner] = entry[1]
            elif kind == "owned":
                del self._own[entry[1]]
            elif kind == "unlink":
                run = entry[1]
                run.before.after = run.after.before = run
            elif kind == "refs":
                entry[1].refs -= 1
            elif kind == "free":
                self.free = entry[1]
            elif kind == "split":
                _, run, rest = entry
                run.hi, run.rest = rest.hi, rest.rest
                run.chain.runs.remove(rest)
                run.chain.overlaps -= run.again
                if not run.refs:
                    rest.before.after = run
                    run.before = rest.before
            elif kind == "new":
                _, run, chain, end, overlaps = entry
                chain.runs.remove(run)
                chain.end, chain.overlaps = end, overlaps
            elif kind == "longer":
                _, run, hi, chain, end = entry
                run.hi = hi
                chain.end = end
            elif kind == "full":
                _, held, full, entries = entry
                held.full, held.entries = full, entries
            else:
                del self._held[entry[1]]


def pool_of(spec: ReplicaSpec, state: RequestState, *, by_chunk: bool) -> KvPool:
    """The KV memory of a model on a machine: blocks that are counted, or found again where the workload says what is in them."""
    if state.contents_in is None or spec.prefix_cache is None:
        return KvPool(
            spec.kv_blocks,
            spec.block_tokens,
            by_chunk=by_chunk,
            lookahead_tokens=spec.lookahead_tokens,
            limit=spec.max_model_len,
        )
    return BlockCache(
        spec.kv_blocks,
        spec.block_tokens,
        state.contents_in(spec.block_tokens),
        by_chunk=by_chunk,
        lookahead_tokens=spec.lookahead_tokens,
        limit=spec.max_model_len,
        drops_last=spec.prefix_drops_last,
    )
