"""Settings of LoRA adapters: those that requests ask for, and the slots that servers have for them: `adapters`."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from hwmodels.adapters import SlotRules, modules_of
from sim.scenario.section import Section

_Count = Annotated[int, Field(ge=1, le=100_000)]
_Weight = Annotated[float, Field(ge=0)]
_Rank = Annotated[int, Field(ge=1, le=512)]


class Popularity(Section):
    """How often each adapter is asked for: one of the two."""

    zipf: Annotated[float, Field(ge=0)] | None = None
    """Adapter i, from 1, is asked for in proportion to i to the power of minus this."""
    shares: list[_Weight] | None = None
    """Measured: a number in proportion for each adapter."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.zipf is None) == (self.shares is None):
            raise ValueError("give zipf or shares, one of the two")
        if self.shares is not None and not sum(self.shares):
            raise ValueError("shares are not all 0")
        return self


class RankShares(Section):
    """The share of the adapters that has each rank."""

    ranks: Annotated[list[_Rank], Field(min_length=1)]
    shares: list[_Weight]
    """A number in proportion for each of the ranks."""

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.shares) != len(self.ranks) or not sum(self.shares):
            raise ValueError("shares has one number for each of the ranks, and they are not all 0")
        return self

    def dealt(self, count: int) -> tuple[int, ...]:
        """Ranks of *count* adapters, each the one that lacks most of its share so far; of equals the first."""
        whole, had, found = sum(self.shares), [0] * len(self.ranks), list[int]()
        for number in range(1, count + 1):
            lacks = [share * number / whole - n for share, n in zip(self.shares, had, strict=True)]
            place = lacks.index(max(lacks))
            had[place] += 1
            found.append(self.ranks[place])
        return tuple(found)


class Slots(NamedTuple):
    """The slots of a server."""

    max_loras: int
    max_cpu_loras: int
    rank: int
    modules: tuple[str, ...] | None


class AdapterSettings(Section):
    """LoRA adapters. The traffic's part is `count`, `rank`, `popularity` and `base_share`; the others are the server's, called as
    vLLM's flags where it has them."""

    count: _Count
    """Adapters that requests ask for, numbered from 0."""
    rank: _Rank | list[_Rank] | RankShares = 16
    """The rank of every adapter, or ranks that are dealt out to them in turn, or the share of the adapters that has each."""
    popularity: Literal["uniform", "trace"] | Popularity = "uniform"
    """How often each is asked for; `trace`: the trace's column `adapter` says it, and leaves it empty for the base model."""
    base_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the requests that ask for the base model."""
    max_loras: _Count | None = None
    """Slots of the device: different adapters that a batch has at most (SGLang's `max_loras_per_batch`, where the base model counts
    as one). Their memory is taken from the KV cache. Where it is left out, the engine's default: 1 of vLLM, 8 of SGLang."""
    max_lora_rank: Annotated[int, Field(ge=1)] | None = None
    """The rank that each slot has room for; where it is left out, the least of the engine's that has room for every adapter."""
    target_modules: list[str] | None = None
    """The layers that have slots, such as q_proj or gate_up_proj; `[all]`: every one. Where it is left out: of vLLM all, of SGLang
    the linear ones."""
    max_cpu_loras: _Count | None = None
    """Adapters that host memory keeps (SGLang's `max_loaded_loras`); where it is left out, of vLLM as many as there are slots, of
    SGLang all."""
    eviction: Literal["lru", "fifo"] | None = None
    """The adapter that gives up its slot: the one used longest ago, or, of SGLang, the first that came (`lora_eviction_policy`)."""
    loaded_at_start: bool = True
    """Servers have loaded every adapter once before the first request, as for `--lora-modules` and `--lora-paths`; those that have
    no room any more are read from disk when they are asked for."""
    placement: Literal["everywhere", "apart"] = "everywhere"
    """`apart`: each adapter has one machine, in turn, that gets all of its requests; `everywhere`: the router says which."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each adapter."""
        if isinstance(self.rank, RankShares):
            return self.rank.dealt(self.count)
        given = [self.rank] if isinstance(self.rank, int) else self.rank
        return tuple(given[number % len(given)] for number in range(self.count))

    @property
    def shares(self) -> list[float] | None:
        """The share of each adapter; None where the trace says it."""
        if self.popularity == "trace":
            return None
        if isinstance(self.popularity, str):
            return [1.0] * self.count
        if self.popularity.zipf is not None:
            return [float((number + 1) ** -self.popularity.zipf) for number in range(self.count)]
        return self.popularity.shares

    def slots(self, rules: SlotRules) -> Slots:
        """The server's part for an engine with these *rules*. ValueError for what the engine does not take."""
        max_loras = rules.max_loras if self.max_loras is None else self.max_loras
        usual = max(max_loras, self.count) if rules.keeps_all else max_loras
        max_cpu_loras = usual if self.max_cpu_loras is None else self.max_cpu_loras
        if max_cpu_loras < max_loras:
            raise ValueError(
                f"max_cpu_loras {max_cpu_loras} is less than max_loras {max_loras}, and host memory keeps those in slots as well; "
                f"give adapters.max_cpu_loras of at least {max_loras}, or leave it out"
            )
        if self.eviction == "fifo" and not rules.base_has_slot:
            raise ValueError(
                "eviction fifo is SGLang's, and here the adapter used longest ago gives up its slot; leave it out"
            )
        return Slots(
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            rank=rules.least_rank(max(self.ranks)) if self.max_lora_rank is None else self.max_lora_rank,
            modules=None if self.target_modules is None else modules_of(self.target_modules),
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.rank, list) and not 1 <= len(self.rank) <= self.count:
            raise ValueError(
                f"rank lists {len(self.rank)} ranks and count is {self.count}; give one rank, or as many adapters "
                "as ranks at least"
            )
        shares = self.popularity.shares if isinstance(self.popularity, Popularity) else None
        if shares is not None and len(shares) != self.count:
            raise ValueError(
                f"popularity.shares has {len(shares)} number{'s' * (len(shares) > 1)} and count is {self.count}; give a "
                f"number for each adapter, or count: {len(shares)}"
            )
        if self.popularity == "trace" and self.base_share:
            raise ValueError("base_share is drawn, and popularity trace says what each request asks for; leave one out")
        if self.target_modules is not None:
            modules_of(self.target_modules)
        if self.max_lora_rank is not None and self.max_lora_rank < max(self.ranks):
            raise ValueError(f"max_lora_rank {self.max_lora_rank} has no room for an adapter of rank {max(self.ranks)}")
        return self
