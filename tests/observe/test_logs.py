"""Logs of requests as they come: incomplete, given twice, with clocks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim import Scenario
from sim.errors import RooftraceError
from sim.observe.observation import Source, traffic_of
from sim.observe.replay import beside, hours, replay
from sim.observe.traffic import Arrival, ObservedTraffic
from tests.observe.observing import log


def observed_log(path: Path) -> tuple[Arrival, ObservedTraffic]:
    seen, rows = Source(files=(path,)).read()
    traffic = traffic_of(Source(), seen, rows)
    assert traffic.logged is not None
    return traffic.logged, traffic


def test_means_over_all_intervals_are_of_all_requests_that_each_side_has(tmp_path: Path) -> None:
    ttft_s = (0.09, 0.05, 0.16, 0.06)
    path = log(tmp_path, *({"arrival_s": float(at), "ttft_s": each} for at, each in enumerate(ttft_s)))
    seen, rows = Source(files=(path,)).read()
    traffic = traffic_of(Source(), seen, rows)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    replayed = replay(Scenario.default(), traffic, edges_s, seeds=[0])
    whole = beside(seen, edges_s, replayed).whole("ttft_s")
    requests = replayed.runs[0].columns.requests
    simulated_s = (requests["first_token_ns"] - requests["arrival_ns"]).mean() / 1e9
    assert whole == (pytest.approx(np.mean(ttft_s)), pytest.approx(simulated_s))


@pytest.mark.parametrize(
    "row", [{"prompt_tokens": -5}, {"prompt_tokens": "many"}, {"arrival_s": None}, {"output_tokens": 0}], ids=str
)
def test_rows_that_are_no_requests_are_counted_in_a_note(row: dict[str, Any], tmp_path: Path) -> None:
    found, traffic = observed_log(log(tmp_path, {}, {"arrival_s": 1.0}, row))
    assert len(found) == 2
    assert any("1 of 3 rows left out: no time, prompt or output" in each for each in traffic.how)


def test_a_request_after_the_last_known_end_is_replayed(tmp_path: Path) -> None:
    found, _ = observed_log(log(tmp_path, {}, {"arrival_s": 9.0, "e2el_s": None}))
    assert found.at_s.tolist() == [0.0, 9.0]


@pytest.mark.parametrize("e2el_s", [-1.0, 0.01])
def test_a_request_that_ends_before_its_first_token_has_no_end(e2el_s: float, tmp_path: Path) -> None:
    found, traffic = observed_log(log(tmp_path, {}, {"e2el_s": e2el_s}))
    assert found.e2el_s is not None
    assert np.isnan(found.e2el_s).tolist() == [False, True]
    assert any("1 rows end before they begin or before their first token" in each for each in traffic.how)


def test_classes_of_a_log_are_replayed(tmp_path: Path) -> None:
    late = {"class": "batch", "arrival_s": 2.0}
    _, traffic = observed_log(log(tmp_path, late, {"class": "chat"}, {"arrival_s": 1.0}))
    trace = traffic.workload(0)
    assert trace.class_index is not None
    assert [trace.classes[row] for row in trace.class_index.tolist()] == ["chat", "unknown", "batch"]


def test_classes_stay_where_one_of_two_logs_has_them(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = (log(tmp_path, {"class": "chat"}), log(tmp_path / "other", {"arrival_s": 1.0}))
    seen, rows = Source(files=files).read()
    logged = traffic_of(Source(), seen, rows).logged
    assert logged is not None
    assert logged.service_class == ("chat", "unknown")


def test_notes_of_a_log_say_nothing_of_lengths(tmp_path: Path) -> None:
    _, traffic = observed_log(log(tmp_path, {}, {}))
    assert not any(each.startswith(("prompts:", "outputs:")) for each in traffic.how)


def test_requests_outside_the_time_that_is_observed_are_counted_in_a_note(tmp_path: Path) -> None:
    seen, rows = Source(files=(log(tmp_path, {}, {"arrival_s": 1.0}, {"arrival_s": 2.0}),)).read()
    assert "1 requests of the log came outside" in " ".join(traffic_of(Source(since_s=0.5), seen, rows).how)


def test_a_log_whose_ends_are_all_wrong_adds_nothing_to_metrics(tmp_path: Path) -> None:
    table = tmp_path / "counters.csv"
    table.write_text("t_s,finished_total\n0,0\n5,2\n10,3\n")
    seen, rows = Source(files=(table, log(tmp_path, {"e2el_s": -1.0}))).read()
    assert rows is not None
    assert set(seen.counters) == {"finished"}


@pytest.mark.parametrize(("end_s", "every_s"), [(10.0, 1e-5), (1e15, None)])
def test_more_intervals_than_anybody_reads_are_refused(end_s: float, every_s: float | None) -> None:
    with pytest.raises(RooftraceError, match="a longer --every makes fewer"):
        hours(0.0, end_s, end_s, every_s)
