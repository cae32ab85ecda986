"""The rules of the Chrome trace event format that viewers hold to, over a whole run."""

import itertools
import json

import pytest

from sim import Scenario, simulate
from sim.report.timeline import events, write_timeline


@pytest.fixture(scope="module")
def run():
    return simulate(Scenario.default().with_set("scheduler={policy: sarathi}", "workload.limit=40", "replicas=2"))


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "out.json"
    count = write_timeline(run.columns, path)
    found = json.loads(path.read_text())["traceEvents"]
    assert len(found) == count
    return found


def of(found, *phases):
    return [event for event in found if event["ph"] in phases]


def test_every_event_has_what_its_phase_needs(written):
    assert {event["ph"] for event in written} == {"M", "X", "C", "b", "e", "s", "t", "f"}
    for event in written:
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    assert all(event["dur"] >= 0 and isinstance(event["tid"], int) for event in of(written, "X"))
    assert all(all(isinstance(value, int) for value in event["args"].values()) for event in of(written, "C"))
    assert all(event["args"]["name"] for event in of(written, "M"))


def test_slices_of_a_thread_do_not_overlap_and_say_what_they_hold(written, run):
    slices = of(written, "X")
    assert len(slices) == len(run.iterations)
    for pid in (0, 1):
        mine = sorted((event["ts"], event["dur"]) for event in slices if event["pid"] == pid)
        assert all(a + length <= b + 1e-3 for (a, length), (b, _) in itertools.pairwise(mine))
    assert sum(event["args"]["prefill_tokens"] for event in slices) == run.iterations["prefill_tokens"].sum()


def test_begins_and_ends_of_requests_pair_up(written):
    opened = {}
    for event in sorted(of(written, "b", "e"), key=lambda event: (event["ts"], event["ph"] == "b")):
        key = (event["cat"], event["id"], event["name"])
        if event["ph"] == "b":
            assert key not in opened
            opened[key] = event["ts"]
        else:
            assert opened.pop(key) <= event["ts"]
    assert opened == {}


def test_each_request_flows_from_its_first_iteration_to_its_last(written, run):
    slices = [(event["pid"], event["tid"], event["ts"], event["ts"] + event["dur"]) for event in of(written, "X")]
    starts, ends = of(written, "s"), of(written, "f")
    assert len(starts) == len(ends) == len(run.requests)
    requests = run.requests.set_index("request_id")
    for event in of(written, "s", "t", "f"):
        around = [s for s in slices if s[:2] == (event["pid"], event["tid"]) and s[2] <= event["ts"] <= s[3]]
        assert len(around) == 1
        if event["ph"] == "s":
            assert around[0][3] * 1e3 > requests.loc[event["id"], "scheduled_ns"]
        if event["ph"] == "f":
            assert event["bp"] == "e"
            assert around[0][2] * 1e3 < requests.loc[event["id"], "finish_ns"]


def test_a_stretch_has_whole_flows_only(run):
    found = list(events(run.columns, begin_s=2.0, end_s=5.0))
    flows = [{event["id"] for event in of(found, phase)} for phase in "sf"]
    assert flows[0] == flows[1]
    assert 0 < len(flows[0]) < len(run.requests)
