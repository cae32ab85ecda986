"""Eviction policies: which of the cached blocks that no sequence holds give way to new ones.

An `Eviction` ranks blocks, and the lowest rank goes first; of equal ranks those go first that came to be free first, and of a
sequence the last block. Blocks that were used together are ranked apart where the rank changes with the place in the prompt (not
where it comes back to the same at the end). Whatever the ranks are, blocks of a device stay while others behind them are cached:
these could not be found without them. Blocks of a tier go by their ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
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
    idle_s: float = 0.0
    """The time since they were used last: 0, but where they are ranked again (see `lasts`)."""
    service_class: str = ""
    """The class of service of the request that used them last; empty: it has none."""


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


def lasts(eviction: Eviction | RankFunction | None) -> Callable[[CachedBlocks], float] | None:
    """How long after their latest use (seconds; inf: always) a policy's rank of blocks holds, by its method `lasts_s`; None: it has
    none. Then they are ranked again, once, and count as used at that moment.
    """
    return getattr(eviction, "lasts_s", None)


def asks_for_more(eviction: Eviction | RankFunction | None) -> bool:
    """Whether a policy asks for what a tier does not know of its blocks."""
    return foresees(eviction) or getattr(eviction, "by_request", False)


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
class Filo:
    """The blocks that entered last go first: SGLang's `--radix-eviction-policy filo`."""

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return -blocks.entered


@dataclass(frozen=True)
class Slru:
    """The least recently used blocks go first, those with *protected_from* uses after all others: SGLang's
    `--radix-eviction-policy slru`."""

    protected_from: int = 2

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return blocks.uses >= self.protected_from, blocks.used


@dataclass(frozen=True)
class Retention:
    """Blocks of lower retention priority go first, of equals the least recently used.

    TensorRT-LLM gives priorities from 0 to 100 to ranges of a prompt's tokens, 35 where a request says nothing
    (`KvCacheRetentionConfig`). Here one range, from the beginning of each prompt, has a priority of its own, or of its request's
    class of service, for a time or for ever.
    """

    tokens: int
    """Tokens at the beginning of each prompt that have *priority*."""
    priority: int = 100
    others: int = 35
    """The priority of all other tokens."""
    duration_s: float | None = None
    """The time after their latest use for which those tokens keep their priority; then they have that of the others, and count as
    used last. None: for ever."""
    classes: Mapping[str, int] | None = field(default=None, hash=False)
    """Priorities in place of *priority*, by the name of the class of service."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens is at least 1; got {self.tokens}")
        named = {f"classes.{name}": value for name, value in (self.classes or {}).items()}
        for name, value in {"priority": self.priority, "others": self.others, **named}.items():
            if not 0 <= value <= 100:
                raise ValueError(f"{name} is from 0 to 100; got {value}")
        if self.duration_s is not None and not (isfinite(self.duration_s) and self.duration_s > 0):
            raise ValueError(f"duration_s is more than 0; got {self.duration_s}")

    @property
    def by_request(self) -> bool:
        return self.duration_s is not None or bool(self.classes)

    def lasts_s(self, blocks: CachedBlocks, /) -> float:
        return self.duration_s if self.duration_s is not None and blocks.first_token < self.tokens else inf

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        priority = self.others
        if blocks.first_token < self.tokens and blocks.idle_s < self.lasts_s(blocks):
            priority = (self.classes or {}).get(blocks.service_class, self.priority)
        return priority, blocks.used


@dataclass(frozen=True)
class Belady:
    """The blocks whose next use is the latest go first: no policy finds more, and only a trace can tell.

    Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal 5(2), 1966).
    """

    foresees: ClassVar[bool] = True

    def rank(self, blocks: CachedBlocks, /) -> Rank:
        return -blocks.next_use, blocks.used
