"""The load of inference-perf behind a client that has a limit of requests under way."""

import numpy as np
import pytest

from sim.engine import run
from sim.scenario import Scenario
from sim.scenario.assembly import build
from sim.scenario.workload import workload_of
from workloads import LoadStage, SharedPrefix

STAGES = ((8.0, 3.0), (40.0, 2.0), (5.0, 4.0))


def load(in_flight=None, **changed):
    settings = {"groups": 3, "prompts_per_group": 4, "system_prompt_tokens": 300, "question_tokens": 20, "output_tokens": 30,
                "pause_s": 0.5, "stages": tuple(LoadStage(rate_per_s=r, duration_s=s) for r, s in STAGES)}  # fmt: skip
    return SharedPrefix(**settings | changed, in_flight=in_flight)


def scenario(in_flight=None, **changed):
    workload = {
        "shared_prefix": {
            "groups": 3, "prompts_per_group": 4, "system_prompt_tokens": 300, "question_tokens": 20, "output_tokens": 30,
            "pause_s": 0.5, "stages": [{"rate_per_s": r, "duration_s": s} for r, s in STAGES], "in_flight": in_flight,
        }
    }  # fmt: skip
    return Scenario.from_mapping({"model": "llama-3.1-8b", "hardware": "h100-sxm", "workload": workload, **changed})


def served(loop, service_ns):
    """When each request is sent and ends, by clients alone, if each is served for *service_ns*, whatever is under way."""
    clients, sent, ends = loop.clients(), {}, []
    pending = [pair for at in clients.starts_ns for pair in clients.start(at)]
    while pending or ends:
        sent.update(pending)
        ends += [(at + service_ns[row], row) for row, at in pending]
        ends.sort()
        now_ns, row = ends.pop(0)
        pending = list(clients.ended(row, now_ns))
        assert all(at >= now_ns for _, at in pending)
    return np.array([sent[row] for row in range(len(loop))])


@pytest.mark.parametrize("limit", [1, 2, 7, 50])
def test_no_more_are_under_way_than_the_limit_and_each_is_sent_as_early_as_that_allows(limit):
    loop = load(limit).requests(3)
    service_ns = np.random.default_rng(0).integers(10**7, 2 * 10**9, len(loop))
    sent = served(loop, service_ns)
    ends = sent + service_ns
    begin_ns = np.zeros(len(loop), np.int64)
    for stage in (1, 2):
        begin_ns[loop.stage == stage] = ends[loop.stage == stage - 1].max()
    due = begin_ns + loop.due_ns
    for row in range(len(loop)):
        mine = loop.stage[:row] == loop.stage[row]
        under_way = np.sort(ends[:row][mine])
        free = under_way[-limit] if len(under_way) >= limit else 0
        assert sent[row] == max(due[row], free, begin_ns[row]), row


def test_a_limit_that_nothing_meets_changes_nothing():
    trace, loop = load().trace(1), load(10_000).requests(1)
    assert len(loop) == len(trace)
    for seed_limit in (None, 10_000):
        columns = run_of(scenario(seed_limit))
        if seed_limit is None:
            without = columns
    for name in ("arrival_ns", "first_token_ns", "finish_ns", "prefix_hit_tokens"):
        assert (columns.requests[name] == without.requests[name]).all(), name


def run_of(asked):
    return run(build(asked))


@pytest.mark.parametrize("limit", [1, 4])
def test_the_wait_in_the_client_is_in_no_latency(limit):
    requests = run_of(scenario(limit)).requests
    ttft_s = (requests["first_token_ns"] - requests["arrival_ns"]) / 1e9
    assert ttft_s.max() < 0.2
    events = sorted([(at, 1) for at in requests["arrival_ns"]] + [(at, -1) for at in requests["finish_ns"]])
    assert max(np.cumsum([step for _, step in events])) == limit


def test_a_part_of_the_load_keeps_its_stages():
    loop = workload_of(scenario(4)).limit(30)
    assert loop.stage.tolist() == [0] * 24 + [1] * 6
    assert len(served(loop, np.full(30, 10**8))) == 30


def test_a_gateway_delays_what_its_router_sees():
    plain, late = (
        run_of(scenario(10, gateway=gateway)).requests for gateway in ({}, {"delay_s": 0.05, "delay_s_per_token": 1e-4})
    )
    first = [each["scheduled_ns"][0] - each["arrival_ns"][0] for each in (plain, late)]
    assert first[1] - first[0] == pytest.approx((0.05 + 1e-4 * 320) * 1e9, abs=1e6)


def test_a_gateway_that_tokenizes_takes_as_long_for_a_token_as_the_engines_front_end():
    plain, twice = (build(scenario(10, gateway={"tokenizes": yes})) for yes in (False, True))
    assert twice.admission_s_per_token == 2 * plain.admission_s_per_token > 0
    assert twice.admission_s == plain.admission_s
