"""Protocols: who sends when, which requests count, and what of them is reported; on runs small enough for a desk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.vllm import Vllm
from sim.engine import Experiment, ReplicaSpec, run
from sim.protocols import Protocol, protocol, protocols
from tests.engine.costs import Linear
from workloads import ClosedLoop, Trace

MS = 1_000_000


def served(workload, **front_end):
    """Iterations of a millisecond."""
    spec = ReplicaSpec(cost=Linear(), scheduler=Sarathi(token_budget=10_000), kv_blocks=10_000)
    return run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), **front_end), check_invariants=True)


def asked(rule, *, concurrency=2, prompt_tokens=10, output_tokens=3, **front_end):
    workload = rule.workload(prompt_tokens=prompt_tokens, output_tokens=output_tokens, concurrency=concurrency)
    return served(workload, **front_end)


def test_clients_of_a_closed_loop_wait_for_their_answer():
    columns = asked(Protocol(requests_per_client=3))
    # Three iterations a request, both clients in step; an answer is felt 1 ns after it was given.
    assert (columns.requests["arrival_ns"] // MS).tolist() == [0, 0, 3, 3, 6, 6]
    assert Protocol(requests_per_client=3).figures(columns, 2) == (pytest.approx(1e-3, abs=1e-8), pytest.approx(1e-3))


def test_nobody_waits_in_an_open_loop():
    rule = Protocol(loop="open", rate_per_s=1000.0, requests_per_client=50)
    workload = rule.workload(prompt_tokens=10, output_tokens=3, concurrency=4)
    assert isinstance(workload, Trace)
    assert len(workload) == 200
    assert np.diff(workload.arrival_ns).mean() == pytest.approx(MS, rel=0.2)
    # The same requests behind a server that never answers come at the same times.
    assert (
        rule.workload(prompt_tokens=10, output_tokens=300, concurrency=4).arrival_ns.tolist()
        == workload.arrival_ns.tolist()
    )


def test_ramped_clients_start_one_by_one():
    rule = Protocol(rate_per_s=100.0, requests_per_client=5)
    workload = rule.workload(prompt_tokens=10, output_tokens=3, concurrency=3)
    assert isinstance(workload, ClosedLoop)
    starts = workload.start_ns.tolist()
    assert starts[0] == 0
    assert starts == sorted(starts)
    arrival = served(workload).requests["arrival_ns"].tolist()
    # Gaps of about ten milliseconds, and an answer takes three: whoever is alone goes on at once.
    assert set(starts) <= set(arrival)
    together = asked(replace(rule, rate_per_s=None), concurrency=3).requests["arrival_ns"].tolist()
    assert together[:3] == [0, 0, 0]


def test_a_client_that_starts_late_may_find_that_all_has_been_sent():
    clients = ClosedLoop(concurrency=2, prompt_tokens=[1, 1], output_tokens=[1, 1], start_ns=[0, 50 * MS])
    assert served(clients).requests["arrival_ns"].tolist() == [0, MS]
    with pytest.raises(ValueError, match=r"start_ns needs one value a client \(2\); got 1"):
        ClosedLoop(concurrency=2, prompt_tokens=[1, 1], output_tokens=[1, 1], start_ns=[0])


def test_a_warm_up_apart_leaves_the_burst_among_those_that_count():
    rule = Protocol(requests_per_client=2, warmup_per_client=3, warmup="apart")
    assert rule.requests(4) == 8
    assert rule.counted(np.arange(8), 4).all()


def test_a_warm_up_that_runs_on_is_thrown_away():
    rule = Protocol(requests_per_client=2, warmup_per_client=1, warmup="running")
    assert rule.requests(2) == 6
    assert rule.counted(np.array([0, 0, 3, 3, 6, 6]), 2).tolist() == [False, False, True, True, True, True]


def test_shares_of_the_requests_are_dropped_by_when_they_were_sent():
    rule = Protocol(requests_per_client=5, drop_first=0.2, drop_last=0.4)
    assert rule.counted(np.array([4, 3, 2, 1, 0]), 1).tolist() == [False, False, True, True, False]


def test_lengths_vary_from_a_share_of_the_nominal_to_all_of_it():
    drawn = Protocol(requests_per_client=500, shortest_share=0.8).workload(
        prompt_tokens=100, output_tokens=50, concurrency=4
    )
    assert (drawn.prompt_tokens.min(), drawn.prompt_tokens.max()) == (80, 100)
    assert (drawn.output_tokens.min(), drawn.output_tokens.max()) == (40, 50)
    equal = Protocol().workload(prompt_tokens=100, output_tokens=50, concurrency=4)
    assert set(equal.prompt_tokens.tolist()) == {100}


def test_a_mean_feels_the_burst_that_a_median_does_not():
    # Prompts one at a time: of four that start together the last waits for three; later ones find the server free.
    spec = ReplicaSpec(cost=Linear(), scheduler=Sarathi(token_budget=10), kv_blocks=1000)
    rule = Protocol(requests_per_client=2)
    workload = rule.workload(prompt_tokens=10, output_tokens=1, concurrency=4)
    columns = run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin()))
    ttft_ms = np.sort((columns.requests["first_token_ns"] - columns.requests["arrival_ns"]) / MS).round(3).tolist()
    assert ttft_ms == [1, 2, 3, 4, 4, 4, 4, 4]
    assert rule.figures(columns, 4).ttft_s == pytest.approx(26 / 8 * 1e-3)
    assert replace(rule, statistic="median").figures(columns, 4).ttft_s == pytest.approx(4e-3)
    assert np.isnan(rule.figures(columns, 4).tpot_s)


def test_a_front_end_that_serves_one_at_a_time_spreads_a_burst():
    spread = asked(Protocol(requests_per_client=1), concurrency=3, admission_serial_s=5e-3, admission_s=1e-3)
    assert spread.requests["scheduled_ns"].tolist() == [6 * MS, 11 * MS, 16 * MS]
    trace = Trace.from_arrays(arrival_ns=[0, 0, 20 * MS], prompt_tokens=[1] * 3, output_tokens=[1] * 3)
    assert served(trace, admission_serial_s=5e-3).requests["scheduled_ns"].tolist() == [5 * MS, 10 * MS, 25 * MS]


def test_who_comes_to_the_desk_is_in_order_of_sending_and_not_of_ending():
    # Client 0 ends first and thinks for 10 ms; client 1 ends 1 ms later and thinks for 2 ms.
    clients = ClosedLoop(
        concurrency=2, prompt_tokens=[1] * 4, output_tokens=[1, 2, 1, 1], think_ns=[0, 0, 10 * MS, 2 * MS]
    )
    columns = served(clients, admission_serial_s=1e-3)
    arrival, scheduled = (columns.requests[name].tolist() for name in ("arrival_ns", "scheduled_ns"))
    assert arrival[3] < arrival[2]
    assert scheduled[2] == arrival[2] + MS
    assert scheduled[3] == arrival[3] + MS


def test_published_protocols_are_known_by_name_and_say_their_source():
    assert set(protocols()) == {"inferencex", "inferencex-2025", "genai-perf", "srt-slurm"}
    assert all(each.source and each.name for each in protocols().values())
    assert protocol("inferencex").shortest_share == 0.8
    assert protocol("genai-perf").shortest_share == 1.0
    assert (protocol("inferencex").warmup_per_client, protocol("inferencex-2025").warmup_per_client) == (2, 0)


def test_a_protocol_may_be_like_another_but_for_some_keys():
    mine = protocol({"like": "inferencex", "requests_per_client": 3})
    assert (mine.requests_per_client, mine.shortest_share, mine.name) == (3, 0.8, "")
    assert protocol(mine) is mine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("inferencx", "'inferencx' is not a protocol; did you mean inferencex"),
        ({"request_per_client": 1}, "protocol.request_per_client is not a setting; did you mean requests_per_client"),
        ({"loop": "open"}, "an open loop needs rate_per_s"),
        ({"loop": "half"}, "loop is closed or open"),
        ({"warmup": "first"}, "warmup is apart or running"),
        ({"statistic": "p99"}, "statistic is mean or median"),
        ({"requests_per_client": 0}, "requests_per_client is a whole number of at least 1; got 0"),
        ({"warmup_per_client": 1.5}, "warmup_per_client is a whole number of at least 0; got 1.5"),
        ({"rate_per_s": 0.0}, "rate_per_s is a positive number"),
        ({"shortest_share": 0.0}, "shortest_share is a share of the nominal length"),
        ({"drop_first": 0.5, "drop_last": 0.5}, "shares that leave some requests"),
        ({"think_s": -1.0}, "think_s is a finite time of at least 0"),
        ({"loop": "open", "rate_per_s": 1.0, "think_s": 1.0}, "think_s is for a closed loop"),
    ],
)
def test_what_no_client_does_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        protocol(given)


def test_one_prompt_an_iteration_beside_the_decodes():
    from policies.view import PartialSeq, ReplicaView, WaitingSeq
    from policies.wrappers import Cap

    queue = (WaitingSeq(1, 100), WaitingSeq(2, 100))
    alone = Cap(inner=Vllm(), max_prompts=1)
    assert alone.plan(ReplicaView(waiting=queue, n_decoding=3, free_blocks=100)).run == ((1, 100),)
    # One that is computed in part is the iteration's prompt.
    half = ReplicaView(waiting=queue, prefilling=(PartialSeq(9, 50, 50),), n_decoding=3, free_blocks=100)
    assert alone.plan(half).run == ((9, 50),)
