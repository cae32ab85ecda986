"""KV memory of a machine's model, in blocks. The one place where the number of free blocks changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from policies.eviction import CachedBlocks
from policies.view import NO_BLOCKS, Looks, PlannedBlocks


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class Slots(NamedTuple):
    """Slots for tokens that a sequence holds."""

    by_chunk: bool = False
    """Prompts take blocks as they are computed, and not all when they are admitted."""
    lookahead_tokens: int = 0
    """Slots beyond its tokens, where blocks are taken by chunk."""
    limit: int | None = None
    """The most that a sequence holds."""


WHOLE_PROMPTS: Final = Slots()


class KvPool:
    """Blocks that the sequences of an engine core hold, and blocks that are free."""

    __slots__ = (
        "_limit",
        "block_tokens",
        "by_chunk",
        "caches",
        "caches_late",
        "evicted",
        "free",
        "lasts_s",
        "lookahead_tokens",
        "names_next",
        "now_ns",
        "progress",
        "queue_looks",
        "total",
    )

    def __init__(self, total: int, block_tokens: int, slots: Slots = WHOLE_PROMPTS) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.free: int = total
        self.by_chunk, lookahead_tokens, self._limit = slots
        self.lookahead_tokens = lookahead_tokens if self.by_chunk else 0
        self.caches = False
        """Whether blocks are found again by their content."""
        self.caches_late = False
        """Whether that is only after the iteration that computed it has ended."""
        self.evicted = 0
        """Blocks with content that were evicted."""
        self.lasts_s: Callable[[CachedBlocks], float] | None = None
        """How long the ranks of an eviction policy hold (`policies.eviction.lasts`)."""
        self.now_ns: Callable[[], int] = int
        """The clock, for such a policy."""
        self.names_next = False
        """Whether a block's name has the token behind it."""
        self.queue_looks = 0
        """Plans whose scheduler had looked over the queue; see `policies.view.Looks`."""
        self.progress: Callable[[int], int] | None = None
        """Tokens of an admitted request whose content is known by now; called where the workload names its output."""

    @property
    def used(self) -> int:
        return self.total - self.free

    def blocks(self, tokens: int) -> int:
        """Blocks that *tokens* tokens of one sequence occupy."""
        return -(-tokens // self.block_tokens)

    def held(self, cached: int, remaining: int = 0) -> int:
        """Blocks that a sequence holds between iterations: for *cached* tokens, and, where prompts take all blocks at once, for
        *remaining* ones."""
        if not self.by_chunk:
            return -(-(cached + remaining) // self.block_tokens)
        if not cached:
            return 0
        slots, limit = cached + self.lookahead_tokens, self._limit
        return -(-(slots if limit is None or slots < limit else limit) // self.block_tokens)

    def take(self, blocks: int) -> None:
        """Takes all, or raises OutOfBlocks if fewer are free."""
        if blocks > self.free:
            raise OutOfBlocks
        self.free -= blocks

    def give(self, blocks: int) -> None:
        self.free += blocks

    def release(self, id_: int, blocks: int, tokens: int, *, ended: bool = False) -> None:
        """Frees all *blocks* blocks of a sequence; its first *tokens* tokens are cached, where blocks are. *ended*: nobody looks
        for what it alone has."""
        self.give(blocks)

    def reset(self) -> None:
        """Frees every block."""
        self.free = self.total

    # Pools whose blocks are found again (`caches`) override these: `sim.engine.cache.block_cache`.

    @property
    def writes(self) -> bool:
        """Whether a sequence emits what may be found."""
        return False

    def found_blocks(self, id_: int, tokens: int) -> int:
        """Blocks that a waiting request with *tokens* tokens would find now, while nothing changes: one token at least is
        computed."""
        return 0

    def use(self, looks: Looks) -> None:
        """Marks a scheduler's own look-ups, for a plan that is carried out, as use, where looking counts as use."""

    def beginning(self, id_: int, tokens: int) -> object:
        """A name of the first *tokens* tokens of a request: equal for all that begin with them. None: unknown."""
        return None

    def unheld_blocks(self, id_: int, blocks: int, held: Mapping[object, int] = NO_BLOCKS) -> int:
        """Blocks, of a request's first *blocks* cached ones, that no sequence holds: they count as free until taken. *held*: what
        some are to hold."""
        return 0

    def planned(self) -> PlannedBlocks:
        """The blocks that a plan takes and finds, while the pool stays as it is."""
        raise NotImplementedError

    def hold(self, id_: int, blocks: int, held: dict[object, int]) -> None:
        """Notes in *held* that a request is to hold its first *blocks* blocks."""

    def admit(self, id_: int, blocks: int) -> None:
        """A request holds its first *blocks* blocks, which are cached."""

    def loaded(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of a request have been copied to blocks that it holds for them."""

    def writes_on(self, id_: int, prompt_tokens: int) -> None:
        """An admitted request may emit what the workload names."""

    def found(self, id_: int) -> int:
        """Blocks that an admitted request found."""
        return 0

    @property
    def held_again(self) -> int:
        """Holds of blocks by sequences, beyond the first of each."""
        return 0

    def fault(self) -> str | None:
        """The first invariant that does not hold, in words, or None."""
        return None

    def order(self, id_: int) -> int:
        """The number of its admission."""
        return 0

    def shared_blocks(self, id_: int) -> int:
        """Blocks of a request that other sequences hold too."""
        return 0

    def prepay(self, blocks: int) -> None:
        """Takes blocks ahead of a later call of `take`."""

    def hand_over(self, blocks: int) -> None:
        """Moves prepaid blocks to a sequence that is preempted after all."""

    def cached(self, id_: int, tokens: int, *, is_all: bool = False) -> None:
        """The first *tokens* tokens of an admitted request are computed, or about to be."""

    def computed(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of an admitted request have been computed, and can be found from now on."""

    def make_room(self, blocks: int) -> None:
        """As many blocks are about to be taken, or looked for in vain."""

    def gave_way(self, kept: int) -> None:
        """One of a batch was preempted, and *kept* sequences go on."""

    def before_prompts(self, tokens: int, prompts: int) -> None:
        """An iteration with *prompts* prompts of *tokens* tokens is about to take its blocks."""

    def before_decodes(self, sequences: int) -> None:
        """A decode step of *sequences* is about to take its blocks."""

    def freed_by(self, id_: int, gone: dict[object, int]) -> int:
        """Cached blocks that preempting a request after others frees; *gone* counts the holds given up, by run."""
        return 0

    def full_blocks(self, id_: int) -> int:
        """Blocks of an admitted request whose content is cached."""
        return 0
