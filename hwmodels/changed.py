"""A cost model whose device or host were faster or slower by so much, for asking what a change of hardware would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from hwmodels.kernels.protocol import HostTimes, Kernels
from hwmodels.layerwise import LayerwiseCost
from hwmodels.operations import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The factors on what a cost model says of times; 1.0: as it is."""

    bandwidth: float = 1.0
    """Reading weights and KV cache: kernels' time for one row, and attention of decodes."""
    arithmetic: float = 1.0
    """Kernels' time beyond that for one row, experts that more rows wake with it, and attention of prompts."""
    links: float = 1.0
    """Collectives, exchanges with experts and hand-overs between stages."""
    host: float = 1.0
    """Host work of steps, sequences and rows, launches, and sampling."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "arithmetic", "links", "host"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"the factor {name} is above 0 and finite; got {getattr(self, name)!r}")


def changed(cost: LayerwiseCost, factors: Factors) -> LayerwiseCost:
    """*cost* with its times by *factors*."""
    return cost.priced_by(cast(Kernels, _Changed(cost.kernels, factors)))


class _Changed:
    """Kernels with their times by factors; all that is not said here is theirs."""

    def __init__(self, kernels: Kernels, factors: Factors) -> None:
        self._kernels, self._factors = kernels, factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    @property
    def host(self) -> HostTimes:
        own, by = self._kernels.host, self._factors
        of_host = ("step_s", "sequence_s", "row_s", "prompt_floor_s", "decode_floor_s", "launch_floor_s")
        return replace(
            own,
            compute_factor=own.compute_factor * by.arithmetic,
            bandwidth_factor=own.bandwidth_factor * by.bandwidth,
            **{name: getattr(own, name) * by.host for name in of_host},
        )

    # What follows is stretched with the kernels around it, as a stack's factors are: what it takes for one row by the bandwidth's,
    # and the rest by the arithmetic's. It is the links' and the host's, so that both are taken back.
    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        least_s = self._kernels.collective_s(kind, np.minimum(size_bytes, _ROW_BYTES), n)
        return self._unstretched(least_s, self._kernels.collective_s(kind, size_bytes, n))

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        least_s = self._kernels.exchange_s(np.minimum(rows, 1.0), exchange)
        return self._unstretched(least_s, self._kernels.exchange_s(rows, exchange))

    def _unstretched(self, least_s: Any, seconds: Any) -> Any:
        by = self._factors
        return by.links * (least_s / by.bandwidth + np.maximum(seconds - least_s, 0.0) / by.arithmetic)

    def sample_s(self, logit_rows: Any) -> Any:
        return self._kernels.sample_s(logit_rows) * (self._factors.host / self._factors.bandwidth)

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        return self._kernels.send_s(size_bytes, between_nodes) * self._factors.links


_ROW_BYTES = 16384
"""The bytes of one row of a collective: 8,192 numbers of 16 bits, the widest hidden size of most models. Shorter messages take as
long as this one, within a few percent."""
