"""KV memory of a machine's model, in blocks. The one place where the number of free blocks changes."""

from __future__ import annotations

from collections.abc import Callable

from policies.view import Looks


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class KvPool:
    """Blocks that the sequences of a tenant hold, and blocks that are free."""

    __slots__ = (
        "_limit",
        "block_tokens",
        "by_chunk",
        "caches",
        "caches_late",
        "evicted",
        "free",
        "lookahead_tokens",
        "progress",
        "queue_looks",
        "total",
    )

    def __init__(
        self,
        total: int,
        block_tokens: int,
        *,
        by_chunk: bool = False,
        lookahead_tokens: int = 0,
        limit: int | None = None,
    ) -> None:
        """*by_chunk*: prompts take blocks as they are computed, and not all when they are admitted; a sequence then holds
        *lookahead_tokens* slots more than it has tokens, *limit* slots at most."""
        self.total = total
        self.block_tokens = block_tokens
        self.free = total
        self.by_chunk = by_chunk
        self.lookahead_tokens = lookahead_tokens if by_chunk else 0
        self._limit = limit
        self.caches = False
        """Whether blocks are found again by their content ..."""
        self.caches_late = False
        """... and that only from when the iteration has ended which computed it."""
        self.evicted = 0
        """Blocks with content that gave way to others."""
        self.queue_looks = 0
        """Plans whose scheduler had looked over the queue; see `policies.view.Looks`."""
        self.progress: Callable[[int], int] | None = None
        """Tokens of an admitted request whose content is known by now; asked of those who emit what the workload names."""

    @property
    def used(self) -> int:
        return self.total - self.free

    def blocks(self, tokens: int) -> int:
        """Blocks that *tokens* tokens of one sequence occupy."""
        return -(-tokens // self.block_tokens)

    def held(self, cached: int, remaining: int = 0) -> int:
        """Blocks that a sequence holds between iterations: for *cached* tokens, and, where prompts take them whole, for those that
        it still has to compute."""
        if not self.by_chunk:
            return self.blocks(cached + remaining)
        if not cached:
            return 0
        slots = cached + self.lookahead_tokens
        return self.blocks(slots if self._limit is None else min(slots, self._limit))

    def take(self, blocks: int) -> None:
        """OutOfBlocks, and nothing taken, where fewer are free."""
        if blocks > self.free:
            raise OutOfBlocks
        self.free -= blocks

    def give(self, blocks: int) -> None:
        self.free += blocks

    def release(self, id_: int, blocks: int, tokens: int) -> None:
        """A sequence gives back all of its *blocks*; *tokens* of its tokens are known by their content where blocks are."""
        self.give(blocks)

    def reset(self) -> None:
        """Nobody holds anything."""
        self.free = self.total

    # What a pool whose blocks can be found again answers (`caches`): `sim.engine.cache.block_cache`.

    @property
    def writes(self) -> bool:
        """Whether somebody emits what others may find."""
        return False

    def found_blocks(self, id_: int, tokens: int) -> int:
        """Blocks that a waiting request with *tokens* tokens would find now: one token at least is computed."""
        return 0

    def use(self, looks: Looks) -> None:
        """A plan is carried out for which a scheduler has looked for itself; where looking counts as use, it has been used."""

    def beginning(self, id_: int, tokens: int) -> object:
        """What the first *tokens* tokens of a request are called: the same for all that begin with them. None: nobody knows."""
        return None

    def unheld_blocks(self, id_: int, blocks: int) -> int:
        """Of the first *blocks* cached blocks of a request those that nobody holds: they count as free until it takes them."""
        return 0

    def admit(self, id_: int, blocks: int) -> None:
        """A request holds its first *blocks* blocks, which are cached."""

    def loaded(self, id_: int, tokens: int) -> None:
        """Of a request that holds blocks for them the first *tokens* tokens have come from elsewhere."""

    def writes_on(self, id_: int, prompt_tokens: int) -> None:
        """An admitted request may emit what the workload names."""

    def found(self, id_: int) -> int:
        """Blocks that an admitted request found."""
        return 0

    @property
    def held_again(self) -> int:
        """Blocks that more than one holds, each time after the first."""
        return 0

    def fault(self) -> str | None:
        """What of the books does not hold, in words; None where all does."""
        return None

    def order(self, id_: int) -> int:
        """Of admissions which one it was."""
        return 0

    def shared_blocks(self, id_: int) -> int:
        """Blocks of a request that somebody else holds as well."""
        return 0

    def prepay(self, blocks: int) -> None:
        """Take blocks now that `take` will be asked for."""

    def hand_over(self, blocks: int) -> None:
        """Blocks that were taken ahead are those of a sequence that gives way after all."""

    def cached(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of an admitted request are computed, or about to be."""

    def computed(self, id_: int, tokens: int) -> None:
        """The first *tokens* tokens of an admitted request have been computed, and can be found from now on."""

    def make_room(self, blocks: int) -> None:
        """As many blocks are about to be taken, or looked for in vain."""

    def gave_way(self, kept: int) -> None:
        """One of a batch has given way, and *kept* sequences go on."""

    def before_prompts(self, tokens: int, prompts: int) -> None:
        """An iteration with so many prompts, and *tokens* tokens of them, is about to take its blocks."""

    def before_decodes(self, sequences: int) -> None:
        """A decode step of so many sequences is about to take its blocks."""

    def freed_by(self, id_: int, gone: dict[object, int]) -> int:
        """Blocks with content that come free when a request gives way after others; *gone* keeps count of these."""
        return 0

    def full_blocks(self, id_: int) -> int:
        """Blocks of an admitted request whose content is cached."""
        return 0

    def try_out(self) -> None:
        """From here on moves are noted, for `undo`."""

    def undo(self) -> None:
        """Take back all moves since `try_out`, the last first."""
