"""KV memory of a machine's model, in blocks. The one place where the number of free blocks changes."""

from __future__ import annotations


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class KvPool:
    """Blocks that the sequences of a tenant hold, and blocks that are free."""

    __slots__ = ("block_tokens", "free", "total")

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.free = total

    @property
    def used(self) -> int:
        return self.total - self.free

    def blocks(self, tokens: int) -> int:
        """Blocks that *tokens* tokens of one sequence occupy."""
        return -(-tokens // self.block_tokens)

    def take(self, blocks: int) -> None:
        """OutOfBlocks, and nothing taken, where fewer are free."""
        if blocks > self.free:
            raise OutOfBlocks
        self.free -= blocks

    def give(self, blocks: int) -> None:
        self.free += blocks
