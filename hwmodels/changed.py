"""A cost model whose device or host were faster or slower by so much, for asking what a change of hardware would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from hwmodels.kernels.protocol import HostTimes, Kernels
from hwmodels.kernels.rates import with_rates
from hwmodels.layerwise import LayerwiseCost
from hwmodels.operations import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """How many times as fast each resource is; 1.0: as it is."""

    bandwidth: float = 1.0
    """Memory: reading weights, experts and KV cache."""
    arithmetic: float = 1.0
    """All peaks: products of many rows, attention of prompts."""
    links: float = 1.0
    """Collectives, exchanges with experts and hand-overs between stages."""
    host: float = 1.0
    """Host work of steps, sequences and rows, launches, and sampling."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "arithmetic", "links", "host"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"the factor {name} is above 0 and finite; got {getattr(self, name)!r}")


def changed(cost: LayerwiseCost, factors: Factors) -> LayerwiseCost:
    """*cost* on a device with other rates, and with other links and another host."""
    kernels = with_rates(cost.kernels, bandwidth=factors.bandwidth, arithmetic=factors.arithmetic)
    return cost.priced_by(cast(Kernels, _Changed(kernels, factors)))


class _Changed:
    """Kernels with the times of links and host by factors; all that is not said here is theirs."""

    def __init__(self, kernels: Kernels, factors: Factors) -> None:
        self._kernels, self._factors = kernels, factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def with_rates(self, *, bandwidth: float, arithmetic: float) -> _Changed:
        return _Changed(with_rates(self._kernels, bandwidth=bandwidth, arithmetic=arithmetic), self._factors)

    @property
    def host(self) -> HostTimes:
        own = self._kernels.host
        of_host = ("step_s", "sequence_s", "row_s", "prompt_floor_s", "decode_floor_s", "launch_floor_s")
        return replace(own, **{name: getattr(own, name) / self._factors.host for name in of_host})

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        return self._kernels.collective_s(kind, size_bytes, n) / self._factors.links

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        return self._kernels.exchange_s(rows, exchange) / self._factors.links

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        return self._kernels.send_s(size_bytes, between_nodes) / self._factors.links

    def sample_s(self, logit_rows: Any) -> Any:
        return self._kernels.sample_s(logit_rows) / self._factors.host
