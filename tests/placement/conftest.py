"""Small clusters and traffic that tests of placements share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hwmodels.single_pass import load_single_pass
from policies.placement import Cluster
from sim.placement import Serving
from workloads import Fixed, Gamma, Trace, multi_model, power_law_rates

GIB = 2**30


@pytest.fixture
def names() -> list[str]:
    return [f"m{i}" for i in range(6)]


@pytest.fixture
def serving(names: Sequence[str]) -> Serving:
    """Six models of 2.7B on eight devices of 13 GiB."""
    return Serving(
        cluster=Cluster(n_devices=8, memory_bytes=13 * GIB),
        models=dict.fromkeys(names, load_single_pass("bert-2.7b")),
        slo_scale=5.0,
    )


@pytest.fixture
def traffic(names: Sequence[str]) -> Trace:
    rates = power_law_rates(16.0, len(names))
    arrivals = {name: Gamma(rate_per_s=float(rate), cv=3.0) for name, rate in zip(names, rates, strict=True)}
    return multi_model(arrivals, prompt=Fixed(tokens=2048), duration_s=60.0, seed=7)
