"""Settings of LoRA adapters: those that requests ask for, and the slots that servers have for them: `adapters`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hwmodels.adapters import least_slot_rank
from sim.scenario.section import Section

_Count = Annotated[int, Field(ge=1, le=100_000)]
_Weight = Annotated[float, Field(ge=0)]


class Popularity(Section):
    """How often each adapter is asked for: one of the two."""

    zipf: Annotated[float, Field(ge=0)] | None = None
    """Adapter i, from 1, is asked for in proportion to i to the power of minus this."""
    shares: list[_Weight] | None = None
    """Measured: a number in proportion for each adapter, or for each of the first few, dealt out in turn to the others."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.zipf is None) == (self.shares is None):
            raise ValueError("give zipf or shares, one of the two")
        if self.shares is not None and not sum(self.shares):
            raise ValueError("shares are not all 0")
        return self


class AdapterSettings(Section):
    """LoRA adapters. The traffic's part is `count`, `rank`, `popularity` and `base_share`; the others are the server's, called as
    vLLM's flags."""

    count: _Count
    """Adapters that requests ask for, numbered from 0."""
    rank: Annotated[int, Field(ge=1, le=512)] | list[Annotated[int, Field(ge=1, le=512)]] = 16
    """The rank of every adapter, or ranks that are dealt out to them in turn."""
    popularity: Literal["uniform", "trace"] | Popularity = "uniform"
    """How often each is asked for; `trace`: the trace's column `adapter` says it, and leaves it empty for the base model."""
    base_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the requests that ask for the base model."""
    max_loras: _Count = 1
    """Slots of the device: different adapters that a batch has at most. Their memory is taken from the KV cache."""
    max_lora_rank: Annotated[int, Field(ge=1)] | None = None
    """The rank that each slot has room for; where it is left out, the least of vLLM's that has room for every adapter."""
    max_cpu_loras: _Count | None = None
    """Adapters that host memory keeps; where it is left out, as many as there are slots."""
    loaded_at_start: bool = True
    """Servers have loaded every adapter once before the first request, as for `--lora-modules`; those that have no room any more
    are read from disk when they are asked for."""
    placement: Literal["everywhere", "apart"] = "everywhere"
    """`apart`: each adapter has one machine, in turn, that gets all of its requests; `everywhere`: the router says which."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each adapter."""
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
        given = self.popularity.shares or [1.0]
        return [given[number % len(given)] for number in range(self.count)]

    @property
    def slot_rank(self) -> int:
        """The rank that each slot has room for. ValueError where no slot has room for every adapter."""
        return least_slot_rank(max(self.ranks)) if self.max_lora_rank is None else self.max_lora_rank

    @property
    def slots_on_host(self) -> int:
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.rank, list) and not 1 <= len(self.rank) <= self.count:
            raise ValueError(f"rank has one rank for each of the {self.count} adapters at most, and one at least")
        if isinstance(self.popularity, Popularity) and len(self.popularity.shares or ()) > self.count:
            raise ValueError(f"popularity.shares has one number for each of the {self.count} adapters at most")
        if self.popularity == "trace" and self.base_share:
            raise ValueError("base_share is drawn, and popularity trace says what each request asks for; leave one out")
        if self.slots_on_host < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is at least max_loras ({self.max_loras}), since host memory keeps those in slots as well"
            )
        if self.max_lora_rank is not None and self.max_lora_rank < max(self.ranks):
            raise ValueError(f"max_lora_rank {self.max_lora_rank} has no room for an adapter of rank {max(self.ranks)}")
        return self
