"""The event loop against queueing theory."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Experiment, ReplicaSpec, run
from sim.theory.queueing import md1_wait_s
from tests.engine.costs import Linear
from workloads import Fixed, Poisson, synthesize

SERVICE_S = 0.02
REPLICATIONS = 20
CONFIDENCE = 0.999


def mean_wait_s(load: float, seed: int) -> float:
    """Mean time in the queue of single-pass requests served one at a time."""
    workload = synthesize(
        arrivals=Poisson(rate_per_s=load / SERVICE_S),
        prompt=Fixed(tokens=8),
        output=Fixed(tokens=0),
        n_requests=20_000,
        seed=seed,
    )
    replica = ReplicaSpec(cost=Linear(fixed_s=SERVICE_S), scheduler=OrcaPaged(max_sequences=1), kv_blocks=10)
    requests = run(Experiment(workload=workload, replicas=(replica,), router=RoundRobin())).requests
    return float((requests["scheduled_ns"] - requests["arrival_ns"])[2_000:].mean()) / 1e9


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_single_pass_requests_wait_as_in_an_m_d_1_queue(load: float) -> None:
    """The closed form lies within the 99.9 % Student interval of 20 independent runs: a false alarm in 1,000 per load."""
    waits = np.array([mean_wait_s(load, seed) for seed in range(REPLICATIONS)])
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, REPLICATIONS - 1) * waits.std(ddof=1) / np.sqrt(REPLICATIONS)
    expected = float(md1_wait_s(load / SERVICE_S, SERVICE_S))
    assert abs(waits.mean() - expected) <= half
    # Narrow enough to tell an M/M/1 queue, whose wait is twice as long, or a slip of one service time.
    assert half < 0.1 * expected


def test_a_short_run_agrees_with_m_d_1_within_ten_percent() -> None:
    waits = [mean_wait_s(0.6, seed) for seed in range(4)]
    assert np.mean(waits) == pytest.approx(float(md1_wait_s(0.6 / SERVICE_S, SERVICE_S)), rel=0.1)
