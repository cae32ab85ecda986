"""Arrivals that a log rounded are told, and spread again on request."""

from dataclasses import replace

import numpy as np
import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.scenario import Scenario
from workloads import read_trace
from workloads.ticks import rounded, spread, tick_ns

S = 1_000_000_000


@pytest.fixture
def exact_and_whole(tmp_path):
    """Four requests a second for a minute, as they came and by whole seconds."""
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(0.25, 240))
    files = []
    for name, times in (("exact", arrival_s), ("whole", np.floor(arrival_s))):
        rows = "".join(f"{at:.6f},1500,20\n" for at in times)
        (tmp_path / f"{name}.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
        files.append(tmp_path / f"{name}.csv")
    return files


def test_the_tick_is_what_all_arrivals_are_multiples_of():
    assert tick_ns(np.repeat([0, 3, 9, 12], 6) * S) == 3 * S
    assert tick_ns(np.repeat([5, 6, 8], 7) * S) == S  # from the first on
    assert tick_ns(np.arange(30) * S) == 0  # none come together
    assert tick_ns(np.repeat([0, 1, 2], 3) * S) == 0  # too few to say
    assert tick_ns(np.repeat(np.arange(10), 4) * 1_000_000) == 0  # a millisecond is nothing
    assert tick_ns(np.zeros(40, np.int64)) == 0


def test_spreading_keeps_rows_and_seconds_and_is_drawn_by_the_seed(exact_and_whole):
    _, file = exact_and_whole
    trace = read_trace(file)
    found = spread(trace, 0)
    assert (found.arrival_ns // S == trace.arrival_ns // S).all()
    assert (np.diff(found.arrival_ns) >= 0).all()
    assert (found.prompt_tokens == trace.prompt_tokens).all()
    assert (spread(trace, 0).arrival_ns == found.arrival_ns).all()
    assert (spread(trace, 1).arrival_ns != found.arrival_ns).any()
    assert "multiples of 1 s" in found.notes[-1]
    # A few rows of the same log are spread too, and those of one instant left.
    few = spread(trace.limit(12), 0)
    assert (few.arrival_ns // S == trace.arrival_ns[:12] // S).all()
    at_once = replace(trace, arrival_ns=np.zeros(len(trace), np.int64))
    assert spread(at_once, 0) is at_once


def test_whole_seconds_make_requests_wait_and_spreading_takes_it_back(exact_and_whole):
    exact, whole = (Scenario.default().with_set(f"workload.trace={file}") for file in exact_and_whole)
    found = {name: simulate(each) for name, each in
             (("exact", exact), ("whole", whole), ("spread", whole.with_set("workload.spread_arrivals=true")))}  # fmt: skip
    ttft = {name: each.summary["ttft_s"]["mean"] for name, each in found.items()}
    assert ttft["whole"] > 1.3 * ttft["exact"]
    assert ttft["spread"] == pytest.approx(ttft["exact"], rel=0.1)
    notes = {name: " ".join(each.manifest["notes"]) for name, each in found.items()}
    assert "requests wait longer here than they did; workload.spread_arrivals: true" in notes["whole"]
    assert "spread_arrivals" not in notes["exact"] + notes["spread"]


def test_what_cannot_be_spread_is_one_sentence(exact_and_whole):
    exact, whole = exact_and_whole
    assert rounded(read_trace(exact)) == ""
    scenario = Scenario.default().with_set(f"workload.trace={exact}", "workload.spread_arrivals=true")
    with pytest.raises(ScenarioError, match=r"are no multiples of 0.1 s or more; leave it out$"):
        simulate(scenario)
    arrivals = {"process": "poisson", "rate_per_s": 4}
    with pytest.raises(ScenarioError, match=r"arrivals draws others; leave out one of them"):
        Scenario(workload={"trace": str(whole), "spread_arrivals": True, "arrivals": arrivals})
