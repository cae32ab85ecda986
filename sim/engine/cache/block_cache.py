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

from policies.driving import driving
from policies.eviction import foresees, lasts, rank_of
from policies.view import NO_BLOCKS, looks_itself, rule_of
from sim.engine.cache.radix_cache import RadixCache
from sim.engine.kv.block_runs import Chain, HeldRuns, Run, RunPool, parts_of
from sim.engine.kv.content import Contents
from sim.engine.kv.next_uses import NextUses
from sim.engine.kv.pool import WHOLE_PROMPTS, KvPool, Slots
from sim.engine.requests.state import RequestState
from sim.engine.spec.experiment import LeftBehind, ReplicaSpec


class BlockCache(RunPool):
    """A pool whose blocks are found again by their content."""

    __slots__ = ("_entered", "_writes", "left_behind")

    def __init__(self, total: int, block_tokens: int, contents: Contents, slots: Slots = WHOLE_PROMPTS) -> None:
        super().__init__(total, block_tokens, contents, slots)
        self.names_next = contents.next_tokens > 0
        self.left_behind: LeftBehind | None = None
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
        """Blocks that a request with *tokens* tokens would find: one token at least is computed."""
        upto = (tokens - 1) // self.block_tokens
        chain = self._own.get(id_)
        if chain is None:
            contents = self._contents
            named, number = contents.named[id_], contents.chain[id_]
            if named < upto:
                upto = named
            chain = self._chains.get(number) or self._chain(number)
        if self._writes:
            self._catch_up(chain)
        while chain is not None:
            start, end = chain.start, chain.end
            if upto > start:
                if end > start:
                    found = end if end < upto else upto
                    return found - 1 if self.drops_last else found
                upto = start
            chain = chain.parent
        return 0

    def unheld_blocks(self, id_: int, blocks: int, held: Mapping[object, int] = NO_BLOCKS) -> int:
        """Blocks, of a request's first *blocks* cached ones, that no sequence holds: they count as free until taken."""
        unheld = 0
        for run, lo, hi in self._copies(self._last_chain(id_), blocks):
            if not run.refs:
                unheld += hi - lo
        return unheld

    def _catch_up(self, chain: Chain | None) -> None:
        """Caches the tokens emitted by now that *chain* and those before it name."""
        while chain is not None:
            for id_ in chain.writers:
                assert self.progress is not None
                self.cached(id_, self.progress(id_))
            chain = chain.parent

    # Moves.

    def admit(self, id_: int, blocks: int) -> None:
        """A request holds its first *blocks* blocks, which are cached, unless it holds some already."""
        if id_ in self._held:
            return
        self._n_admitted += 1
        held = self._held[id_] = HeldRuns(self._n_admitted, blocks)
        if self._log is not None:
            self._log.append((self._held.pop, id_))
        elif self.next_uses is not None:
            self.next_uses.begin(id_)
        if not blocks:
            return
        held.full = blocks
        entries = held.entries
        for run, lo, hi in self._copies(self._last_chain(id_), blocks):
            entries.append((self._touch(run, lo, hi), hi))

    def loaded(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of a request have been copied to blocks that it holds for them."""
        self.cached(id_, tokens)
        held = self._held[id_]
        held.found = held.full

    def writes_on(self, id_: int, prompt_tokens: int) -> None:
        """Registers an admitted request as a writer of the chains that name its output, if any."""
        prompt_blocks = prompt_tokens // self.block_tokens
        if self._contents.named[id_] > prompt_blocks:
            for chain in self._written(id_, prompt_blocks):
                chain.writers[id_] = None
                self._writes += 1

    def _written(self, id_: int, first: int) -> list[Chain]:
        """The chains that name blocks of a request from *first* on."""
        found: list[Chain] = []
        chain = self._chain(self._contents.chain[id_])
        while chain is not None:
            found.append(chain)
            chain = chain.parent if chain.start > first else None
        return found

    def full_blocks(self, id_: int) -> int:
        """Blocks of an admitted request whose content is cached."""
        return self._held[id_].full

    def cached(self, id_: int, tokens: int, *, is_all: bool = False) -> None:
        """The first *tokens* tokens of an admitted request are computed, or about to be: its full blocks can be found. *is_all*: no
        token is known behind these, which the name of the last block may need."""
        if is_all:
            tokens -= self.names_next
        held, upto = self._held[id_], tokens // self.block_tokens
        at = held.full
        if at >= upto:
            return
        if self._log is not None:
            self._log += ((setattr, held, "full", at), (setattr, held, "entries", list(held.entries)))
        contents = self._contents
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
        if self._log is not None:
            self._log.append((self._own.pop, id_))
        return chain

    def _write(self, held: HeldRuns, chain: Chain, at: int, to: int, again: bool) -> None:
        """Blocks of *held* get the content *at* to *to* of *chain*; *again*: it is cached already."""
        log, entries = self._log, held.entries
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
                if log is not None:
                    log += ((setattr, last, "hi", at), (setattr, chain, "end", chain.end))
                last.hi = to
                entries[-1] = (first, to)
                if to > chain.end:
                    chain.end = to
                return
        self._entered += 1
        run = Run(chain, at, to, self._entered, again)
        run.refs = 1
        if log is not None:
            log += (
                (setattr, chain, "end", chain.end),
                (setattr, chain, "overlaps", chain.overlaps),
                (self._remove, chain, run),
            )
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
        alone = self._found_by_nobody(id_, tokens, ended)
        self.cached(id_, tokens - alone * self.block_tokens)
        held = self._held.pop(id_)
        if self._writes:
            for written in self._written(id_, 0):
                self._writes -= written.writers.pop(id_, 0) is None
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

    def _found_by_nobody(self, id_: int, tokens: int, ended: bool) -> int:
        """Blocks of a request that has *ended*, of its first *tokens* tokens, that need no place among what is found: those that it
        alone has, which are evicted first of its blocks. An eviction policy and tiers look at them."""
        if not ended or self.eviction is not None or self.gives_up is not None or id_ in self._own:
            return 0
        return max(tokens // self.block_tokens - self._contents.named[id_], 0)

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
        self._writes = 0


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
        pool = blocks = BlockCache(spec.kv_blocks, spec.block_tokens, contents, slots)
        blocks.left_behind = spec.left_behind
    pool.drops_last = drops_last
    if spec.eviction is not None:
        pool.eviction, pool.lasts_s = rank_of(spec.eviction), lasts(spec.eviction)
        pool.classes = state.terms.classes
    if foresees(spec.eviction):
        pool.next_uses = NextUses(contents, state.prompt)
    return pool
