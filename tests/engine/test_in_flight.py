"""Traces whose clients have a limited number of requests under way: when what waits in the client is sent, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from workloads import ClosedLoop, Follows, Trace

MS = 1_000_000


def an_experiment(arrival_ms: list[int], in_flight: int | None, output: int = 3) -> Experiment:
    n = len(arrival_ms)
    trace = Trace(arrival_ns=np.array(arrival_ms) * MS, prompt_tokens=np.full(n, 4), output_tokens=np.full(n, output))
    replica = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=OrcaPaged(max_sequences=8), kv_blocks=100)
    return Experiment(workload=trace, replicas=(replica,), router=RoundRobin(), in_flight=in_flight)


def test_who_comes_beyond_the_limit_is_sent_when_one_has_ended():
    # An iteration takes 1 ms, an answer of three tokens three.
    requests = run(an_experiment([0, 1, 10, 10], 1)).requests
    assert requests["arrival_ns"].tolist() == [0, 3 * MS, 10 * MS, 13 * MS]
    assert requests["finish_ns"].tolist() == [3 * MS, 6 * MS + 1, 13 * MS, 16 * MS + 1]


def test_a_limit_that_is_never_reached_changes_nothing():
    free, limited = (run(an_experiment([0, 1, 2, 30], limit)).requests for limit in (None, 4))
    assert all((free[name] == limited[name]).all() for name in free)


def test_requests_that_are_all_ready_at_once_are_a_closed_loop():
    experiment = an_experiment([0] * 20, 3)
    trace = experiment.workload
    assert isinstance(trace, Trace)
    clients = ClosedLoop(prompt_tokens=trace.prompt_tokens, output_tokens=trace.output_tokens, concurrency=3)
    closed = Experiment(workload=clients, replicas=experiment.replicas, router=RoundRobin())
    ours, theirs = run(experiment).requests, run(closed).requests
    assert all((ours[name] == theirs[name]).all() for name in ("arrival_ns", "first_token_ns", "finish_ns"))


def test_a_limit_is_refused_where_it_could_not_be_kept():
    with pytest.raises(ValueError, match="in_flight is at least 1; got 0"):
        an_experiment([0], 0)
    follows = Follows(offsets=np.array([0, 0, 1]), rows=np.array([0]), delay_ns=np.array([0]))
    two = np.array([3, 3])
    trace = Trace(arrival_ns=0 * two, prompt_tokens=two, output_tokens=two, follows=follows)
    with pytest.raises(ValueError, match="wait for no others"):
        Experiment(workload=trace, replicas=an_experiment([0], 1).replicas, router=RoundRobin(), in_flight=1)
