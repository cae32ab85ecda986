"""KV blocks that stay cached for later requests with the same beginning: the prefix cache of vLLM v1.

The rules are those of `vllm/v1/core/block_pool.py`, `kv_cache_manager.py` and `single_type_kv_cache_manager.py` of release 0.32.0:

* a full block is cached from the moment at which its last token is scheduled, named by all tokens up to its end;
* a request finds the longest run of cached blocks from its beginning, all tokens but one at most;
* from release 0.33.0 on the name of a block has the token behind it where a drafter reads that one, and no block is found
  before that token is known; until then the last block found was computed again;
* blocks are shared by count and never moved: content that is computed twice is held twice, and found where it was first;
* freed blocks stay until they are allocated again: blank ones go first, then the least recently freed, a sequence's last block
  first;
* groups of layers take their blocks from one pool, and blocks that have left a group's window are kept like the rest. Here
  they are freed when a sequence ends, before its own blocks; hits do not depend on them.

vLLM keeps a record for each block. Here a *run* (`sim.engine.kv.block_runs`) is one record for consecutive blocks that have
the same holders and were freed together, so that work grows with the forks of prompts, and not with their length or the size of
the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify
from typing import Any, Final

from policies.driving import driving
from policies.eviction import foresees, lasts, rank_of
from policies.view import NO_BLOCKS, looks_itself, rule_of
from sim.engine.cache.radix_cache import RadixCache
from sim.engine.kv.block_runs import NO_LOOK, Chain, HeldRuns, Run, RunPool, parts_of
from sim.engine.kv.content import Contents
from sim.engine.kv.next_uses import NextUses
from sim.engine.kv.pool import WHOLE_PROMPTS, KvPool, Slots
from sim.engine.kv.run_twins import Twins
from sim.engine.requests.state import RequestState
from sim.engine.spec.experiment import LeftBehind, ReplicaSpec

NO_ENDS: Final[Mapping[Chain, int]] = {}
NOTHING_FOUND: Final = (0, 0)


class BlockCache(RunPool):
    """A pool whose blocks are found again by their content."""

    __slots__ = ("_entered", "_writes", "left_behind", "puts_off")

    def __init__(self, total: int, block_tokens: int, contents: Contents, slots: Slots = WHOLE_PROMPTS) -> None:
        super().__init__(total, block_tokens, contents, slots)
        self.names_next = contents.next_tokens > 0
        self.left_behind: LeftBehind | None = None
        self.puts_off = False
        """Whether what a request alone has is cached when it leaves: it is the only one that could find it, and not before.
        Neither an eviction policy nor tiers may look at it."""
        self._entered = self._writes = 0

    # Contents.

    def _chain(self, number: int) -> Chain | None:
        chains, contents = self._chains, self._contents
        missing: list[int] = []
        while number >= 0 and number not in chains:
            missing.append(number)
            number = contents.parent[number]
        chain = chains.get(number)
        for at in reversed(missing):
            chain = chains[at] = Chain(contents.start[at], chain, -1, at)
        return chain

    def _last_chain(self, id_: int) -> Chain | None:
        """The chain on which a request's known content ends: its own, or the last that the workload names."""
        number = self._contents.chain[id_]
        return self._own.get(id_) or self._chains.get(number) or self._chain(number)

    @property
    def writes(self) -> bool:
        """Whether a sequence emits what the workload names, so that hits may grow with every step."""
        return self._writes > 0

    def beginning(self, id_: int, tokens: int) -> object:
        """A name of the first *tokens* tokens of a request, which fill blocks: equal for all that begin with them."""
        blocks = tokens // self.block_tokens
        return self._contents.path(id_, blocks, blocks - 1)[0][0]

    # Look-ups.

    def found_blocks(self, id_: int, tokens: int) -> int:
        """Blocks that a request with *tokens* tokens finds, all that has been emitted included: one token at least is computed."""
        # A scheduler has often looked it up for the plan that admits it.
        looked = self._looked
        if looked[0] == id_ and looked[1] == tokens and not self._writes:
            return looked[2]
        return self.finds(id_, tokens)[0]

    def finds(self, id_: int, tokens: int, ends: Mapping[Chain, int] = NO_ENDS) -> tuple[int, int]:
        """Blocks that a request with *tokens* tokens would find, and how many of them no sequence holds. *ends*: blocks below which
        chains are to be cached in any case."""
        upto = (tokens - 1) // self.block_tokens
        chain = self._own.get(id_)
        if chain is None:
            contents = self._contents
            named, number = contents.named[id_], contents.chain[id_]
            if named < upto:
                upto = named
            chain = self._chains.get(number) or self._chain(number)
        found, last = self._end_of_hit(chain, upto, ends)
        if not found:
            return NOTHING_FOUND
        unheld = self._unheld(last, found)
        if unheld and self._owed:
            self._settle()
            return self.finds(id_, tokens, ends)
        may_go = unheld
        if self.drops_last:
            found -= 1
            unheld = self._unheld(last, found)
        if not ends:
            self._looked = (id_, tokens, found, may_go)
        return found, unheld

    def _end_of_hit(self, chain: Chain | None, upto: int, ends: Mapping[Chain, int]) -> tuple[int, Chain | None]:
        """The blocks, *upto* at most, that are found of content that ends on *chain*, and the chain on which they end."""
        while chain is not None:
            start = chain.start
            if upto > start:
                end = chain.end
                if chain.writers:
                    end = self._emitted_end(chain)
                if ends and chain in ends:
                    end = max(end, ends[chain])
                if end > start:
                    return (end if end < upto else upto), chain
                upto = start
            chain = chain.parent
        return 0, None

    def unheld_blocks(self, id_: int, blocks: int, held: Mapping[object, int] = NO_BLOCKS) -> int:
        """Blocks, of a request's first *blocks* cached ones, that no sequence holds: they count as free until taken."""
        self._settle()
        return self._unheld(self._last_chain(id_), blocks)

    def _emitted_end(self, chain: Chain) -> int:
        """The block below which *chain* is cached once the tokens are that have been emitted by now."""
        assert self.progress is not None
        end = chain.end
        for id_, hi in chain.writers.items():
            end = max(end, min(self.progress(id_) // self.block_tokens, hi))
        return end

    def _catch_up(self, chain: Chain | None) -> None:
        """Caches the tokens emitted by now that *chain* and those before it name."""
        while chain is not None:
            for id_ in chain.writers:
                assert self.progress is not None
                self.cached(id_, self.progress(id_))
            chain = chain.parent

    def path(self, id_: int) -> list[Chain]:
        """The chains of a request's known content, the last one first."""
        found: list[Chain] = []
        chain = self._last_chain(id_)
        while chain is not None:
            found.append(chain)
            chain = chain.parent
        return found

    def unheld_chains(self, id_: int, blocks: int) -> set[Chain]:
        """The chains of which a request's first *blocks* cached blocks have some that no sequence holds."""
        copies = self._copies(self._last_chain(id_), blocks)
        return {run.chain for run, _, _ in copies if not run.refs and run.chain is not None}

    def named_ends(self, id_: int, first: int, upto: int) -> list[tuple[Chain, int]]:
        """The chains that name blocks *first* to *upto* of a request, and the ends of those blocks on them."""
        hi = min(upto, self._contents.named[id_])
        found: list[tuple[Chain, int]] = []
        if hi <= first:
            return found
        chain = self._chain(self._contents.chain[id_])
        while chain is not None and hi > first:
            if hi > chain.start:
                found.append((chain, hi))
                hi = chain.start
            chain = chain.parent
        return found

    # Moves.

    def admit(self, id_: int, blocks: int) -> None:
        """A request holds its first *blocks* blocks, which are cached, unless it holds some already."""
        if id_ in self._held:
            return
        self._n_admitted += 1
        held = self._held[id_] = HeldRuns(self._n_admitted, blocks)
        if self.next_uses is not None:
            self.next_uses.begin(id_)
        if not blocks:
            return
        held.full = blocks
        entries, chain = held.entries, self._last_chain(id_)
        if self._writes:
            self._catch_up(chain)
        for run, lo, hi in self._copies(chain, blocks):
            if run.hi >= hi:
                entries.append((self._touch(run, lo, hi), hi))
                continue
            # A run of which two parts are found, around blocks that are found elsewhere, has been split.
            for part in parts_of(run, hi):
                if part.hi > lo:
                    end = min(hi, part.hi)
                    entries.append((self._touch(part, max(lo, part.lo), end), end))

    def loaded(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of a request have been copied to blocks that it holds for them."""
        self.cached(id_, tokens)
        held = self._held[id_]
        held.found = held.full

    def writes_on(self, id_: int, prompt_tokens: int) -> None:
        """Registers an admitted request as a writer of the chains that name its output, if any."""
        prompt_blocks = prompt_tokens // self.block_tokens
        if self._contents.named[id_] > prompt_blocks:
            for chain, hi in self.named_ends(id_, prompt_blocks, self._contents.named[id_]):
                chain.writers[id_] = hi
                self._writes += 1

    def full_blocks(self, id_: int) -> int:
        """Blocks of an admitted request whose content is cached."""
        return self._held[id_].full

    def cached(self, id_: int, tokens: int, *, is_all: bool = False) -> None:
        """The first *tokens* tokens of an admitted request are computed, or about to be: its full blocks can be found. *is_all*: no
        token is known behind these, which the name of the last block may need."""
        if is_all:
            tokens -= self.names_next
        held, upto = self._held[id_], tokens // self.block_tokens
        if self.puts_off and upto > (named := self._contents.named[id_]) and id_ not in self._own:
            held.computed = max(held.computed, upto)
            upto = named
        self._cache(id_, held, upto)

    def _cache(self, id_: int, held: HeldRuns, upto: int) -> None:
        """The first *upto* blocks of an admitted request can be found."""
        at, contents = held.full, self._contents
        if at >= upto:
            return
        named = contents.named[id_]
        held.full = upto
        chain: Chain | None
        while at < upto:
            to = upto
            if at >= named:
                chain = self._own.get(id_) or self._own_chain(id_, named)
            else:
                number = contents.chain[id_]
                chain = self._chains.get(number) or self._chain(number)
                assert chain is not None
                if named < to:
                    to = named
                while at < chain.start:
                    if chain.start < to:
                        to = chain.start
                    chain = chain.parent
                    assert chain is not None
            end = chain.end
            again = at < end
            if again and end < to:
                to = end
            self._write(held, chain, at, to, again)
            at = to

    def _own_chain(self, id_: int, named: int) -> Chain:
        """A new chain for a request's own content behind its *named* blocks."""
        chain = self._own[id_] = Chain(named, self._last_chain(id_), id_)
        return chain

    def _write(self, held: HeldRuns, chain: Chain, at: int, to: int, again: bool) -> None:
        """Blocks of *held* get the content *at* to *to* of *chain*; *again*: it is cached already."""
        self._looked = NO_LOOK
        entries = held.entries
        if entries and not again:
            first, hi = entries[-1]
            last = first if first.hi >= hi else parts_of(first, hi)[-1]
            if (
                last.chain is chain
                and hi == at
                and last.hi == at
                and last.refs == 1
                and (self.eviction is None or last.uses == 1)
            ):
                last.hi = to
                entries[-1] = (first, to)
                if to > chain.end:
                    chain.end = to
                return
        self._entered += 1
        run = Run(chain, at, to, self._entered, again)
        run.refs = 1
        if self.eviction is not None:
            run.uses, run.place = 1, 0
            run.was_used(self._n_uses, 0, -1)
        self._insert(chain, run)
        chain.overlaps += again
        if to > chain.end:
            chain.end = to
        entries.append((run, to))

    def release(self, id_: int, blocks: int, tokens: int, *, ended: bool = False) -> None:
        """Frees all *blocks* blocks of a request, with *tokens* tokens cached. Its last block is evicted first."""
        self._looked = NO_LOOK
        held = self._held[id_]
        upto = max(tokens // self.block_tokens, held.computed)
        alone = self._found_by_nobody(id_, upto, ended)
        self._cache(id_, held, upto - alone)
        del self._held[id_]
        if self._writes:
            for written in self.path(id_):
                self._writes -= written.writers.pop(id_, -1) >= 0
        left = self.left_behind
        if left is not None:
            self._leave_behind(round(max(held.full + alone - held.found - left.window_blocks, 0) * left.per_block))
        blank = blocks - held.full - alone
        self._blank += blank
        free = self.free + blank
        free += self._queue_unfound(alone)
        head = self._head
        latest: Run | None = None
        freed: list[Run] = []
        for first, hi in reversed(held.entries):
            for run in (first,) if first.hi >= hi else reversed(parts_of(first, hi)):
                run.refs -= 1
                if run.refs:
                    latest = None
                    continue
                free += run.hi - run.lo
                chain = run.chain
                assert chain is not None
                if (
                    latest is not None
                    and latest.chain is chain
                    and latest.lo == run.hi
                    and not chain.overlaps
                    and (self.eviction is None or latest.uses == run.uses)
                ):
                    latest.lo = run.lo
                    latest.entered = run.entered
                    chain.runs.remove(run)
                    continue
                last = head.before
                assert last is not None
                run.before, run.after = last, head
                last.after = head.before = run
                latest = run
                if self.eviction is not None:
                    freed.append(run)
        self.free = free
        if freed:
            self._rank_the_freed(freed, id_)

    def _found_by_nobody(self, id_: int, blocks: int, ended: bool) -> int:
        """How many of the first *blocks* blocks of a request that has *ended* need no place among what is found: it alone has
        them, and they are evicted first of its blocks. An eviction policy and tiers look at them."""
        if not ended or self.eviction is not None or self.gives_up is not None or id_ in self._own:
            return 0
        return max(blocks - self._contents.named[id_], 0)

    # Plans.

    def planned(self) -> PlannedBlocks:
        return PlannedBlocks(self)

    def copied(self) -> BlockCache:
        """A pool with the same blocks and sequences, whose moves leave this one as it is."""
        pool = BlockCache(self.total, self.block_tokens, self._contents)
        pool.drops_last, pool.progress, pool.now_ns, pool.classes = (
            self.drops_last, self.progress, self.now_ns, self.classes,
        )  # fmt: skip
        pool.puts_off = self.puts_off
        pool.eviction, pool.lasts_s = self.eviction, self.lasts_s
        pool.next_uses = None if self.next_uses is None else self.next_uses.copied()
        pool.free = self.free
        self._settle()
        chains = (*self._chains.values(), *self._own.values())
        twins = Twins(chains, self._unfound, self._queued(), ranked=self.eviction is not None)
        ranked = [
            (rank, place, twins.runs[run])
            for rank, place, run in self._ranked
            if run in twins.runs and place == run.place
        ]
        due = [(at_ns, number, used, twins.runs[run]) for at_ns, number, used, run in self._due if run in twins.runs]
        held = {id_: twins.held(held) for id_, held in self._held.items()}
        pool.adopt(twins, held, self._blank, ranked, due, (self._entered, self._n_placed, self._n_uses, self._writes))
        return pool

    def adopt(
        self, twins: Twins, held: dict[int, HeldRuns], blank: int, ranked: list[tuple[Any, int, Run]],
        due: list[tuple[int, int, int, Any]], counts: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        """Takes over *twins* of all that another pool has."""
        self._held, self._blank, self._ranked, self._due = held, blank, ranked, due
        heapify(ranked)
        heapify(due)
        self._entered, self._n_placed, self._n_uses, self._writes = counts
        for chain in twins.chains.values():
            if chain.number >= 0:
                self._chains[chain.number] = chain
            elif chain.owner >= 0:
                self._own[chain.owner] = chain
            else:
                self._unfound = chain
            if chain.parent is not None and chain.runs:
                self._behind[chain.parent][chain] = None
        for run in twins.queue:
            self._append(run)

    def reset(self) -> None:
        """Frees every block, and caches nothing."""
        self.free = self._blank = self.total
        self._held.clear()
        self._chains.clear()
        self._own.clear()
        self._head.before = self._head.after = self._head
        self._ranked.clear()
        self._due.clear()
        self._behind.clear()
        self._writes = self._owed = 0
        self._looked = NO_LOOK


TAKE, CACHED, ADMIT = range(3)


class PlannedBlocks:
    """The blocks that a plan takes and finds, one sequence after the other, while the cache stays as it is.

    Answers are those of the cache where nothing planned can change them: new content goes on where chains end, and evictions are
    counted along the runs that go first. Where they might, the moves are made in a copy of the cache, which answers from then on.
    """

    __slots__ = ("_blocks", "_cache", "_copy", "_ends", "_full", "_moves", "_touched")

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._copy: BlockCache | None = None
        self._moves: list[tuple[int, int, int]] = []
        self._blocks = 0
        """New blocks that are taken."""
        self._ends: dict[Chain, int] = {}
        """Blocks below which chains are to be cached."""
        self._full: dict[int, int] = {}
        """Full blocks of sequences that are to be admitted."""
        self._touched: set[Chain] = set()
        """Chains with blocks that nobody holds yet, and sequences that are to be admitted will."""

    def take(self, blocks: int) -> None:
        """New blocks are taken, for which others are evicted."""
        if blocks:
            self._move(TAKE, -1, blocks)
            self._blocks += blocks

    def admit(self, id_: int, blocks: int) -> None:
        """A sequence takes the first *blocks* blocks that are found."""
        if self._copy is None:
            self._full[id_] = blocks
            self._touched |= self._cache.unheld_chains(id_, blocks)
        self._move(ADMIT, id_, blocks)

    def cached(self, id_: int, tokens: int, *, is_all: bool = False) -> None:
        """An admitted sequence is to be computed to *tokens* tokens: its full blocks can be found. *is_all*: it has no token behind
        these yet."""
        if is_all:
            tokens -= self._cache.names_next
        if self._copy is None:
            first = self._full[id_] if id_ in self._full else self._cache.full_blocks(id_)
            for chain, hi in self._cache.named_ends(id_, first, tokens // self._cache.block_tokens):
                self._ends[chain] = max(self._ends.get(chain, 0), hi)
        self._move(CACHED, id_, tokens)

    def finds(self, id_: int, tokens: int) -> tuple[int, int]:
        """Blocks that a waiting sequence with so many tokens would find now, and how many of them no sequence holds."""
        cache = self._cache
        if self._copy is not None:
            return self._copy.finds(id_, tokens)
        both = found, unheld = cache.finds(id_, tokens, self._ends)
        if found and (unheld or cache.drops_last) and self._may_change(id_, found + cache.drops_last):
            self._copy = cache.copied()
            for move in self._moves:
                self._move(*move)
            return self._copy.finds(id_, tokens)
        return both

    def _may_change(self, id_: int, found: int) -> bool:
        """Whether what is planned may change what is found in blocks below *found*, or which requests hold them."""
        cache, touched = self._cache, self._touched
        if not touched and cache.has_blank(self._blocks):
            return False
        path = cache.path(id_)
        return not touched.isdisjoint(path) or cache.may_evict(self._blocks, path, found, touched)

    def _move(self, what: int, id_: int, number: int) -> None:
        pool = self._copy
        if pool is None:
            self._moves.append((what, id_, number))
        elif what == TAKE:
            pool.take(number)
        elif what == CACHED:
            pool.cached(id_, number)
        else:
            pool.admit(id_, number)


def pool_of(spec: ReplicaSpec, state: RequestState, *, by_chunk: bool, connected: bool) -> KvPool:
    """The KV memory of a model on a machine: blocks are counted, or found again where the workload names their content.
    *connected*: KV goes to other machines or tiers, or comes from there, where blocks have the names of any engine."""
    slots = Slots(by_chunk, spec.lookahead_tokens, spec.max_model_len)
    if state.contents_in is None or spec.prefix_cache is None or driving(spec.scheduler):
        return KvPool(spec.kv_blocks, spec.block_tokens, slots)
    pool: RadixCache | BlockCache
    drops_last = spec.prefix_drops_last
    if spec.prefix_cache == "tree":
        contents = state.contents_in(spec.block_tokens)
        pool = tree = RadixCache(
            spec.kv_blocks, spec.block_tokens, contents, state.prompt, token_contents=state.contents_in(1), slots=slots
        )
        tree.used_by_looks = looks_itself(spec.scheduler)
    else:
        names_next = drops_last and not connected and bool(rule_of(spec.scheduler, "names_next_token"))
        drops_last = drops_last and not names_next
        contents = state.contents_in(spec.block_tokens, int(names_next))
        puts_off = contents.is_whole and not connected and spec.eviction is None
        pool = blocks = BlockCache(
            spec.kv_blocks, spec.block_tokens, contents.shared() if puts_off else contents, slots
        )
        blocks.left_behind, blocks.puts_off = spec.left_behind, puts_off
    pool.drops_last = drops_last
    if spec.eviction is not None:
        pool.eviction, pool.lasts_s = rank_of(spec.eviction), lasts(spec.eviction)
        pool.classes = state.terms.classes
    if foresees(spec.eviction):
        pool.next_uses = NextUses(contents, state.prompt)
    return pool
