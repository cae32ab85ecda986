"""KV memory of a machine's model, in blocks. The one place where the number of free blocks changes."""

from __future__ import annotations


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class KvPool:
    """Blocks that the sequences of a tenant hold, and blocks that are free."""

    __slots__ = ("_limit", "block_tokens", "by_chunk", "free", "lookahead_tokens", "total")

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
