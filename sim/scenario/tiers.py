"""Settings of the memory behind a machine's KV cache: `memory.tiers`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sim.engine.record.columns import TierKind
from sim.engine.tiers.links import Slowdown, not_at_once
from sim.scenario.chosen import TierEviction
from sim.scenario.section import Section

_Rate = Annotated[float, Field(gt=0)]
Degraded = Annotated[tuple[Slowdown, ...], AfterValidator(not_at_once)]
"""Times for which a link is degraded."""

_ONLY_OF = {
    "write": ("host", "disk", "remote"),
    "eviction": ("host", "disk", "remote"),
    "write_gb_per_s": ("host", "disk", "remote"),
    "staged": ("disk", "remote", "peer"),
    "store": ("remote",),
    "store_read_gb_per_s": ("remote",),
    "store_write_gb_per_s": ("remote",),
    "fabric": ("disk", "remote", "peer"),
}
"""Settings that say nothing of a tier of another kind."""


class Fabric(Section):
    """A network that links cross, and what it carries at most: tiers and links that name the same one share that."""

    name: Annotated[str, Field(min_length=1)]
    gb_per_s: _Rate
    """The rate of all transfers together, in both directions, in 10^9 bytes a second."""


class Tier(Section):
    """Memory behind the KV cache of each replica, nearest first: blocks that the device has given up are loaded from there."""

    kind: TierKind
    """`host` memory and `disk` are a replica's own, a `remote` store is shared by all, `peer` is the host memory of the other
    replicas."""
    gib: Annotated[float, Field(gt=0)] | None = None
    """Its size in GiB: of each replica, of a `remote` store in all. A `peer` has none of its own."""
    read_gb_per_s: _Rate | None = None
    """Bandwidth of a replica's link to it in GB/s, all of its GPUs together; for a `host` tier, where it is left out, the link of
    the GPU's datasheet, once for each GPU."""
    write_gb_per_s: _Rate | None = None
    """Where it is left out, as it reads. Both directions share the link."""
    latency_ms: Annotated[float, Field(ge=0)] | None = None
    """Latency of each load and store, beside its bytes; where it is left out, none, and for a `host` tier that of the datasheet."""
    write: Literal["through", "eviction"] = "through"
    """`through`: prompt blocks are written when they have been computed, as vLLM's offloading and LMCache do; `eviction`: when the
    device, or the tier before this one, gives them up."""
    eviction: TierEviction | None = None
    """Which of its blocks go first when new ones are written; where it is left out, the least recently used ones."""
    min_load_tokens: Annotated[int, Field(ge=0)] = 0
    """A load that would gain fewer tokens is left out."""
    skip_when_slower: bool = False
    """A load is left out that would take longer, its turn on the link included, than to compute its tokens."""
    concurrent_transfers: Annotated[int, Field(ge=1)] = 1
    """Transfers that the link does at once, each at its whole bandwidth."""
    staged: bool = False
    """Loaded blocks come to host memory first: the time of a copy from there to the GPUs is added, but no wait for its turn."""
    store: str = "shared"
    """The store of a `remote` tier; replicas that name the same one share it."""
    store_read_gb_per_s: _Rate | None = None
    """The most that the store of a `remote` tier sends to all replicas together, in GB/s; where it is left out, as much as their
    links take."""
    store_write_gb_per_s: _Rate | None = None
    """The most that it receives from all replicas together."""
    fabric: Fabric | None = None
    """A network that its transfers share with others."""
    degraded: Degraded = ()
    """Times for which the link, of all replicas, has less bandwidth or takes longer; no two at once."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.kind != "host" and self.read_gb_per_s is None:
            raise ValueError(f"a tier of kind {self.kind} needs read_gb_per_s, the bandwidth of a replica's link to it")
        if self.kind == "peer" and self.gib is not None:
            raise ValueError("a tier of kind peer is the host memory of the other replicas: leave gib out")
        if self.kind != "peer" and self.gib is None:
            raise ValueError(f"a tier of kind {self.kind} needs gib, its size in GiB")
        for name, kinds in _ONLY_OF.items():
            if self.kind not in kinds and name in self.model_fields_set:
                peers = (
                    ", the host memory of other replicas, whose own tier of kind host says it"
                    if self.kind == "peer"
                    else ""
                )
                raise ValueError(
                    f"{name} is of a tier of kind {' or '.join(kinds)}; leave it out of this {self.kind}{peers}"
                )
        return self
