"""The event loop against queueing theory."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import stdtrit

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.wrappers import Order
from sim.engine import Experiment, ReplicaSpec, run
from sim.theory.queueing import md1_wait_s, mmc_wait_s, priority_wait_s
from tests.engine.costs import Linear
from tests.sample import with_all
from workloads import Fixed, Poisson, Trace, synthesize

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


@pytest.mark.slow(reason="enough samples for narrow statistics")
@pytest.mark.parametrize("load", [pytest.param(0.3, marks=with_all), pytest.param(0.6, marks=with_all), 0.8])
def test_single_pass_requests_wait_as_in_an_m_d_1_queue(load: float) -> None:
    """The closed form lies within the 99.9 % Student interval of 20 independent runs: a false alarm in 1,000 per load."""
    waits = np.array([mean_wait_s(load, seed) for seed in range(REPLICATIONS)])
    half = stdtrit(REPLICATIONS - 1, 0.5 + CONFIDENCE / 2) * waits.std(ddof=1) / np.sqrt(REPLICATIONS)
    expected = float(md1_wait_s(load / SERVICE_S, SERVICE_S))
    assert abs(waits.mean() - expected) <= half
    # Narrow enough to tell an M/M/1 queue, whose wait is twice as long, or a slip of one service time.
    assert half < 0.1 * expected


def test_a_short_run_agrees_with_m_d_1_within_ten_percent() -> None:
    assert mean_wait_s(0.6, seed=0) == pytest.approx(float(md1_wait_s(0.6 / SERVICE_S, SERVICE_S)), rel=0.1)


STEP_S = 1e-4
"""A decode step: service of a geometric number of them, 200 on average, is exponential within half a percent."""


def waits_by_class_s(shares: tuple[float, ...], load: float, servers: int, seed: int, n: int = 20_000) -> np.ndarray:
    """Mean time in the queue by class: *servers* sequences decode at a time, and whoever has the smaller priority goes first."""
    rng = np.random.default_rng([17, seed])
    steps = round(SERVICE_S / STEP_S)
    classes = rng.choice(len(shares), n, p=shares)
    trace = Trace(
        arrival_ns=np.cumsum(rng.exponential(SERVICE_S / (load * servers) * 1e9, n)).astype(np.int64),
        prompt_tokens=np.ones(n, np.int64),
        output_tokens=rng.geometric(1 / steps, n),
        priority=classes,
    )
    scheduler = Order(OrcaPaged(max_sequences=servers), by="priority")
    replica = ReplicaSpec(cost=Linear(fixed_s=STEP_S), scheduler=scheduler, kv_blocks=2_000)
    requests = run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin())).requests
    assert (requests["status"] == 0).all()
    waits = (requests["scheduled_ns"] - requests["arrival_ns"]) / 1e9
    return np.array([waits[2_000:][classes[2_000:] == row].mean() for row in range(len(shares))])


@pytest.mark.slow(reason="enough samples for narrow statistics")
@pytest.mark.parametrize(
    ("load", "servers"), [(0.8, 4), *(pytest.param(*case, marks=with_all) for case in ((0.6, 1), (0.8, 1), (0.6, 4)))]
)
def test_classes_wait_as_in_an_m_m_c_queue_with_priorities(load: float, servers: int) -> None:
    """Cobham's formula lies within the 99.9 % Student interval of 20 independent runs for each of three classes, widened by one
    decode step, to whose end whoever comes waits."""
    shares = (0.2, 0.3, 0.5)
    waits = np.array([waits_by_class_s(shares, load, servers, seed) for seed in range(REPLICATIONS)])
    half = stdtrit(REPLICATIONS - 1, 0.5 + CONFIDENCE / 2) * waits.std(ddof=1, axis=0) / np.sqrt(REPLICATIONS)
    rates = np.array(shares) * load * servers / SERVICE_S
    expected = priority_wait_s(rates, SERVICE_S, servers)
    assert (np.abs(waits.mean(axis=0) - expected) <= half + STEP_S).all()
    # Narrow enough to tell the classes from each other and from a queue without classes.
    assert (half[:2] < 0.1 * expected[:2]).all()
    assert expected[1] + half[1] < mmc_wait_s(float(rates.sum()), SERVICE_S, servers)


def test_a_short_run_agrees_with_priorities_within_fifteen_percent() -> None:
    waits = np.mean([waits_by_class_s((0.5, 0.5), 0.7, 2, seed, n=6_000) for seed in range(2)], axis=0)
    rates = np.array([0.5, 0.5]) * 0.7 * 2 / SERVICE_S
    np.testing.assert_allclose(waits, priority_wait_s(rates, SERVICE_S, 2), rtol=0.15)
