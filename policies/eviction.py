"""Eviction policies: which of the cached blocks that no sequence holds give way to new ones.

An `Eviction` ranks blocks, and the lowest rank goes first; of equal ranks those go first that came to be free first, and of a
sequence the last block. Blocks that were used together are ranked apart where the rank changes with the place in the prompt (not
where it comes back to the same at the end). Whatever the ranks are, blocks of a device stay while others behind them are cached:
these could not be found without them. Blocks of a tier go by their ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple, Protocol


class CachedBlocks(NamedTuple):
    """Consecutive cached blocks of one content that no sequence holds, and that were used together."""

    used: int = 0
    """The number of their latest use: the lower, the longer ago."""
    entered: int = 0
    """The number of their entry into the cache."""
    uses: int = 1
    """Requests that have used them, the one that computed them included; of a tier: the write, and each load."""
    first_token: int = 0
    """Tokens of the prompt before them."""
    next_use: float = inf
    """The number of the next request that has them in its prompt; inf: none, or the policy does not ask (see `foresees`)."""


Rank = float | tuple[float, ...]
"""The lower it is, the sooner blocks go."""


class Eviction(Protocol):
    """An eviction policy: a frozen dataclass with one pure method."""

    def rank(self, blocks: CachedBlocks, /) -> Rank: ...


RankFunction = Callable[[CachedBlocks], Rank]
"""An eviction policy without settings may be a function."""


def rank_of(eviction: Eviction | RankFunction) -> RankFunction:
    return eviction if callable(eviction) else eviction.rank


def foresees(eviction: Eviction | RankFunction | None) -> bool:
    """Whether a policy asks for the next use of blocks, which only a trace can tell."""
    return getattr(eviction, "foresees", False)


@dataclass(frozen=True)
class Lru:
    """The least recently used blocks go first, as in vLLM and SGLang."""

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return blocks.used


@dataclass(frozen=True)
class Mru:
    """The most recently used blocks go first: SGLang's `--radix-eviction-policy mru`."""

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return -blocks.used


@dataclass(frozen=True)
class Lfu:
    """The blocks with the fewest uses go first, of equals the least recently used: SGLang's `--radix-eviction-policy lfu`."""

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return blocks.uses, blocks.used


@dataclass(frozen=True)
class Fifo:
    """The blocks that entered first go first: SGLang's `--radix-eviction-policy fifo`."""

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return blocks.entered


@dataclass(frozen=True)
class Retention:
    """Blocks of lower retention priority go first, of equals the least recently used.

    TensorRT-LLM gives priorities from 0 to 100 to ranges of a prompt's tokens, 35 where a request says nothing
    (`KvCacheRetentionConfig`). Here one range, from the beginning of each prompt, has a priority of its own.
    """

    tokens: int
    """Tokens at the beginning of each prompt that have *priority*."""
    priority: int = 100
    others: int = 35

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens is at least 1; got {self.tokens}")
        for name in ("priority", "others"):
            if not 0 <= getattr(self, name) <= 100:
                raise ValueError(f"{name} is from 0 to 100; got {getattr(self, name)}")

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return self.priority if blocks.first_token < self.tokens else self.others, blocks.used


@dataclass(frozen=True)
class Belady:
    """The blocks whose next use is the latest go first: no policy finds more, and only a trace can tell.

    Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal 5(2), 1966).
    """

    foresees: ClassVar[bool] = True

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return -blocks.next_use, blocks.used
