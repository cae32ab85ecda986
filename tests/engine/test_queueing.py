"""The event loop against queueing theory."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
from scipy import stats

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.lives import FleetSpec
from sim.theory.queueing import md1_wait_s
from tests.engine.costs import Linear
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


SERVERS, TOKENS, STEP_S = 4, 200, 1e-3


def mean_wait_behind_servers_s(load: float, seed: int, n: int) -> float:
    """Mean time in the queue of requests with a geometric number of tokens, on a machine that decodes four at a time in steps that
    take equally long however many there are."""
    rng = np.random.default_rng(seed)
    arrival_s = rng.exponential(TOKENS * STEP_S / (load * SERVERS), n).cumsum()
    workload = Trace(
        arrival_ns=np.rint(arrival_s * 1e9).astype(np.int64),
        prompt_tokens=np.ones(n, np.int64),
        output_tokens=rng.geometric(1 / TOKENS, n),
    )
    replica = ReplicaSpec(cost=Linear(fixed_s=STEP_S), scheduler=OrcaPaged(max_sequences=SERVERS), kv_blocks=10_000)
    fleet = FleetSpec(pools=(0,), names=("all",), scaling=(None,), failing=(None,))
    requests = run(Experiment(workload=workload, replicas=(replica,), router=RoundRobin(), fleet=fleet)).requests
    return float((requests["scheduled_ns"] - requests["arrival_ns"])[n // 10 :].mean()) / 1e9


def erlang_wait_s(load: float) -> float:
    """Mean wait of an M/M/c queue: Erlang's C over what the servers could do beyond what comes (Erlang 1917)."""
    busy = load * SERVERS
    last = busy**SERVERS / factorial(SERVERS) / (1 - load)
    waits = last / (sum(busy**k / factorial(k) for k in range(SERVERS)) + last)
    return waits * TOKENS * STEP_S / (SERVERS * (1 - load))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_requests_wait_as_in_an_m_m_c_queue(load: float) -> None:
    """The closed form lies within the 99.9 % Student interval of 20 independent runs, widened by a step: who comes in the middle of
    one waits for its end, and a geometric number of steps varies a little less than an exponential time."""
    waits = np.array([mean_wait_behind_servers_s(load, seed, 8_000) for seed in range(REPLICATIONS)])
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, REPLICATIONS - 1) * waits.std(ddof=1) / np.sqrt(REPLICATIONS)
    expected = erlang_wait_s(load)
    assert abs(waits.mean() - expected) <= half + STEP_S
    # Narrow enough to tell three servers as fast together, or fixed service, whose wait is about half as long.
    assert half + STEP_S < 0.25 * expected
