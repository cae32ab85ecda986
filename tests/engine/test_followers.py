"""Requests that wait for others: when they are sent, by hand, and that none is sent before its time."""

from __future__ import annotations

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import LeastOutstanding, RoundRobin
from sim.engine import FINISHED, REJECTED, Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from workloads import Follows, Trace

MS = 1_000_000


def replica(kv_blocks: int = 100) -> ReplicaSpec:
    return ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=OrcaPaged(max_sequences=8), kv_blocks=kv_blocks)


def a_trace(
    waits: list[list[tuple[int, int]]], *, arrival_ms: list[int] | None = None, prompt: list[int] | None = None
) -> Trace:
    n = len(waits)
    return Trace(
        arrival_ns=np.array(arrival_ms or [0] * n) * MS,
        prompt_tokens=np.array(prompt or [4] * n),
        output_tokens=np.full(n, 3),
        follows=Follows(
            offsets=np.cumsum([0, *(len(each) for each in waits)]),
            rows=np.array([row for each in waits for row, _ in each], dtype=np.int64),
            delay_ns=np.array([delay * MS for each in waits for _, delay in each], dtype=np.int64),
        ),
    )


def test_a_turn_is_sent_when_the_answer_and_the_delay_are_over():
    # An iteration takes 1 ms, an answer of three tokens three.
    columns = run(Experiment(workload=a_trace([[], [(0, 5)], [(1, 0)]]), replicas=(replica(),), router=RoundRobin()))
    assert columns.requests["arrival_ns"].tolist() == [0, 8 * MS, 11 * MS]
    # What follows at once is felt a nanosecond after the end.
    assert columns.requests["finish_ns"].tolist() == [3 * MS, 11 * MS, 14 * MS + 1]


def test_an_agent_waits_for_its_own_delay_and_for_its_sub_agents():
    waits = [[], [(0, 1)], [(0, 2)], [(0, 3), (1, 0), (2, 0)]]
    columns = run(Experiment(workload=a_trace(waits), replicas=(replica(), replica()), router=LeastOutstanding()))
    finish = columns.requests["finish_ns"]
    assert columns.requests["arrival_ns"][1:3].tolist() == [4 * MS, 5 * MS]
    assert columns.requests["arrival_ns"][3] == finish[2] > finish[1]


def test_a_session_goes_on_after_a_rejected_request():
    trace = a_trace([[], [(0, 2)]], prompt=[4000, 4])
    columns = run(Experiment(workload=trace, replicas=(replica(kv_blocks=10),), router=RoundRobin()))
    assert columns.requests["status"].tolist() == [REJECTED, FINISHED]
    assert columns.requests["arrival_ns"].tolist() == [0, 2 * MS]


def test_the_first_of_a_session_arrives_by_itself():
    columns = run(
        Experiment(
            workload=a_trace([[], [], [(0, 0)]], arrival_ms=[0, 7, 7]), replicas=(replica(),), router=RoundRobin()
        )
    )
    assert columns.requests["arrival_ns"].tolist() == [0, 7 * MS, 3 * MS]


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        ([[(0, 0)]], "row 0: a request cannot wait for itself"),
        ([[], [(2, 0)], [(1, 0)]], "row 1: a request cannot wait for itself, nor for one that waits for it"),
        ([[(7, 0)]], "rows are requests from 0 to 0; got 7"),
        ([[], [(0, -1)]], "delay_ns must be at least 0"),
    ],
)
def test_whom_nobody_can_wait_for_is_refused(waits, message):
    with pytest.raises(ValueError, match=message):
        a_trace(waits)


def test_who_waits_may_stand_above_whom_it_waits_for():
    columns = run(Experiment(workload=a_trace([[(1, 0)], []]), replicas=(replica(),), router=RoundRobin()))
    assert columns.requests["arrival_ns"].tolist() == [3 * MS, 0]


def test_requests_that_wait_are_not_given_up():
    with pytest.raises(ValueError, match="cannot be given up"):
        Trace(
            arrival_ns=[0, 0],
            prompt_tokens=[1, 1],
            output_tokens=[1, 1],
            abort_ns=[5, -1],
            follows=Follows(offsets=[0, 0, 1], rows=[0], delay_ns=[0]),
        )
