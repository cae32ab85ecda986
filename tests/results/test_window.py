"""Figures over a part of a run: literals by hand, and what the whole run says unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from sim import RooftraceError, Scenario, metrics, simulate
from sim.cli import build_app
from sim.engine.spec.lifecycle import READY
from sim.metrics.fleet import _levels
from sim.results import Result, over, window_text
from tests.results.fakes import FakeColumns, iterations, plausible, requests

SECOND = 1_000_000_000
PART = {"rule": "arrivals", "from_s": 2.0, "to_s": 6.0}


def by_hand() -> FakeColumns:
    """Five requests at 0, 2, 4, 6 and 10 s, each 3 s long with its first token after 1 s; iterations of a second each."""
    arrival = np.array([0, 2, 4, 6, 10]) * SECOND
    return FakeColumns(
        requests=requests(arrival, first_token_ns=arrival + SECOND, finish_ns=arrival + 3 * SECOND, preemptions=[9, 1, 0, 2, 7]),
        iteration_columns=iterations(
            np.arange(13) * SECOND, SECOND, emitted_tokens=np.arange(13), kv_blocks_used=np.arange(13) * 10
        ),
        gaps=(np.array([SECOND]), np.array([5])),
    )  # fmt: skip


def test_figures_of_a_stated_range_of_arrivals_are_those_by_hand():
    found = metrics.summary(by_hand(), slo={"e2el_s": 3.0}, window=PART)
    assert found["requests"]["total"] == 3
    assert found["window"]["requests"] == 3
    assert (found["window"]["from_s"], found["window"]["to_s"]) == (2.0, 6.0)
    assert found["makespan_s"] == 4.0
    # Finishes at 3 and 5 s lie inside, the one at 7 s and later do not.
    assert found["requests_per_s"] == 2 / 4
    assert found["goodput_requests_per_s"] == 2 / 4
    # Iterations that end at 3, 4, 5 and 6 s emit 2, 3, 4 and 5 tokens.
    assert found["output_tokens_per_s"] == 14 / 4
    # First tokens at 3 and 5 s, of prompts of 100 tokens.
    assert found["total_tokens_per_s"] == (14 + 200) / 4
    assert found["preemptions"] == 3
    assert found["iterations"] == 4
    assert found["busy_fraction"] == 1.0
    # 20, 30, 40 and 50 of 1,000 blocks, a second each.
    assert found["kv_utilization"]["mean"] == pytest.approx(0.035)
    assert found["kv_utilization"]["max"] == 0.05
    assert found["slo_attainment"] == 1.0
    assert "itl_s" in found["window"]["whole_run"]


def test_a_range_without_an_end_leaves_out_the_tail_after_the_last_arrival():
    found = metrics.summary(by_hand(), window={"rule": "arrivals", "from_s": 4.0, "to_s": None})
    assert found["window"]["to_s"] == 10.0
    assert found["makespan_s"] == 6.0
    assert found["requests"]["total"] == 3
    assert metrics.summary(by_hand())["makespan_s"] == 13.0
    late = metrics.summary(by_hand(), window={"rule": "arrivals", "from_s": 4.0, "to_s": 99.0})
    assert late == found


def test_latencies_are_of_the_requests_that_arrive_in_the_window():
    columns = plausible()
    window = {"rule": "arrivals", "from_s": 20.0, "to_s": 50.0}
    arrival = columns.requests["arrival_ns"]
    inside = (arrival - arrival.min() >= 20 * SECOND) & (arrival - arrival.min() <= 50 * SECOND)
    found = metrics.summary(columns, window=window)
    assert found["e2el_s"]["mean"] == pytest.approx(metrics.e2el_s(columns.requests)[inside].mean())
    assert (metrics.in_window(columns.requests, found) == inside).all()
    assert metrics.in_window(columns.requests, metrics.summary(columns)).all()


def backlog(n_at_once: int, n: int = 2000) -> FakeColumns:
    """A server of 10 ms a request at a load of a half, that begins with *n_at_once* requests in line."""
    gaps = np.random.default_rng(3).exponential(0.02, n)
    gaps[:n_at_once] = 0
    arrival = np.rint(np.cumsum(gaps) * 1e9).astype(np.int64)
    before = np.arange(n) * SECOND // 100
    start = np.maximum.accumulate(arrival - before) + before
    end = start + SECOND // 100
    return FakeColumns(
        requests=requests(arrival, scheduled_ns=start, first_token_ns=end, finish_ns=end),
        iteration_columns=iterations(start, SECOND // 100, emitted_tokens=1),
        gaps=(np.array([SECOND]), np.array([1])),
    )


def test_mser_5_is_applied_where_it_is_asked_for_and_nowhere_else():
    """Latency is 10 ms + 5 ms in the long run (M/D/1 at 0.5); 200 requests in line at the start make it far more."""
    columns = backlog(200)
    whole = metrics.summary(columns)
    after = metrics.summary(columns, window={"rule": "after_warmup", "from_s": None, "to_s": None})
    assert whole["e2el_s"]["mean"] > 0.1
    assert whole["window"]["requests"] == 2000
    assert after["e2el_s"]["mean"] == pytest.approx(0.015, rel=0.15)
    assert 1000 < after["window"]["requests"] < 1800
    assert after["window"]["from_s"] > 2
    arrival = columns.requests["arrival_ns"]
    assert after["window"]["to_s"] == pytest.approx((arrival.max() - arrival.min()) * 1e-9)


def test_a_run_that_never_settles_says_what_to_do():
    growing = backlog(2000)
    with pytest.raises(RooftraceError, match=r"after_warmup cannot be had .* window: \{from_s: 60\}"):
        metrics.summary(growing, window={"rule": "after_warmup", "from_s": None, "to_s": None})
    with pytest.raises(RooftraceError, match=r"no request arrives in it; arrivals last 10 s, and it begins at 11 s"):
        metrics.summary(by_hand(), window={"rule": "arrivals", "from_s": 11.0, "to_s": None})
    with pytest.raises(RooftraceError, match=r"arrivals last 10 s, and it begins at 7 s and ends at 9\.5 s"):
        metrics.summary(by_hand(), window={"rule": "arrivals", "from_s": 7.0, "to_s": 9.5})


@pytest.mark.parametrize("window", ["after_warmup", "{from_s: 1000}"])
def test_a_run_whose_window_cannot_be_had_is_kept_with_figures_of_the_whole_run(tmp_path, window):
    arguments = ["run", "--set", "workload.limit=10", "--no-plots", "--out", str(tmp_path / "a")]
    found = CliRunner().invoke(build_app(), [*arguments, "--set", f"window={window}"], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    assert "Note: window: " in found.stderr
    assert "All figures are over the whole run." in found.stderr
    kept, whole = Result.load(tmp_path / "a"), simulate(Scenario.default().with_set("workload.limit=10"))
    assert kept.summary["window"]["rule"] == "whole"
    assert kept.in_window.all()
    assert any(note.startswith("window: ") for note in kept.manifest["notes"])
    for name in ("ttft_s", "e2el_s", "makespan_s", "output_tokens_per_s"):
        assert kept.summary[name] == whole.summary[name]
    # In Python the figures are refused, and the way to those of the whole run is a method.
    refused = simulate(Scenario.default().with_set("workload.limit=10", f"window={window}"))
    with pytest.raises(RooftraceError, match="window"):
        _ = refused.summary
    assert refused.or_whole().summary["ttft_s"] == whole.summary["ttft_s"]


def with_unsent(columns: FakeColumns, n: int) -> FakeColumns:
    """The same with *n* requests more that their clients never sent: the run ended before it was their turn."""
    unsent = requests(
        np.full(n, -1), scheduled_ns=-1, first_token_ns=-1, finish_ns=-1, emitted_tokens=0, replica=-1, status=2
    )
    both = {name: np.concatenate((column, unsent[name])) for name, column in columns.requests.items()}
    return replace(columns, requests=both)


@pytest.mark.parametrize(
    "window", [metrics.WHOLE, {"rule": "arrivals", "from_s": 3.0, "to_s": 40.0}, {"rule": "after_warmup"}]
)
def test_requests_that_were_never_sent_change_no_figure_but_their_own_count(window):
    columns = plausible(n_iterations=20_000)
    # The first request comes late: what was never sent is no arrival before it.
    for name in ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns"):
        columns.requests[name] += 30 * SECOND
    columns.requests["tenant_index"] = np.arange(500) % 2
    more = with_unsent(
        replace(columns, requests={k: v for k, v in columns.requests.items() if k != "tenant_index"}), 200
    )
    more.requests["tenant_index"] = np.arange(700) % 2
    one, other = (metrics.summary(each, window=window, tenants=("a", "b")) for each in (columns, more))
    for key in set(one) - {"requests", "window", "tenants"}:
        assert one[key] == other[key], key
    assert one["window"]["from_s"] == other["window"]["from_s"]
    assert one["window"]["to_s"] == other["window"]["to_s"]


def test_requests_that_were_never_sent_are_no_reason_to_call_a_queue_growing():
    """From 100 s on ten arrive each second; the queue grows until 150 s and stays as long from there on."""
    arrival = np.arange(1000) * SECOND // 10 + 100 * SECOND
    wait = np.minimum(np.arange(1000), 500) * SECOND // 100
    columns = FakeColumns(requests(arrival, scheduled_ns=arrival + wait), iterations([], 1), gaps=([], []))
    assert metrics.saturated(columns.requests) is False
    assert metrics.saturated(with_unsent(columns, 50).requests) is False


@pytest.mark.parametrize(
    ("from_s", "to_s", "finished", "first_tokens", "emitted"),
    [
        (3.0, 7.0, 2, 2, 3 + 4 + 5 + 6),
        (3.0, 6.0, 1, 1, 3 + 4 + 5),
        (4.0, 7.0, 2, 2, 4 + 5 + 6),
        (2.0, 5.0, 2, 2, 2 + 3 + 4),
    ],
)
def test_what_comes_at_the_first_instant_is_of_the_window_before(from_s, to_s, finished, first_tokens, emitted):
    """Requests finish at 3, 5, 7, 9 and 13 s with first tokens at 1, 3, 5, 7 and 11 s, of prompts of 100 tokens; n - 1 tokens
    come at n s. Arrivals at both instants are of the window."""
    window = {"rule": "arrivals", "from_s": from_s, "to_s": to_s}
    found = metrics.summary(by_hand(), slo={"e2el_s": 3.0}, window=window)
    span_s = to_s - from_s
    assert found["requests"]["total"] == sum(from_s <= at_s <= to_s for at_s in (0, 2, 4, 6, 10))
    assert found["requests_per_s"] == found["goodput_requests_per_s"] == finished / span_s
    assert found["output_tokens_per_s"] == emitted / span_s
    assert found["total_tokens_per_s"] == (emitted + 100 * first_tokens) / span_s


def test_a_window_that_is_the_whole_run_changes_no_figure():
    columns = plausible()
    whole = metrics.summary(columns, slo={"ttft_s": 1.0})
    stated = metrics.summary(columns, slo={"ttft_s": 1.0}, window={"rule": "arrivals", "from_s": 0.0, "to_s": None})
    for key in ("requests", "ttft_s", "tpot_s", "e2el_s", "queue_s", "slo_attainment", "itl_s", "preemptions"):
        assert stated[key] == whole[key]
    assert whole["window"]["rule"] == "whole"
    assert whole["window"]["whole_run"] == []


def test_the_scenario_says_the_window_and_the_summary_repeats_it(tmp_path):
    base = Scenario.default().with_set("workload.limit=300")
    result = simulate(base.with_set("window={from_s: 20, to_s: 40}"))
    assert result.summary["window"]["rule"] == "arrivals"
    assert result.summary["window"]["requests"] == result.in_window.sum() < 300
    result.save(tmp_path / "run")
    assert Result.load(tmp_path / "run").in_window.sum() == result.in_window.sum()
    plain = simulate(base)
    assert plain.summary["window"]["rule"] == "whole"
    assert plain.in_window.all()
    assert base.hash == base.with_set("window=whole").hash != base.with_set("window=after_warmup").hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("window=warm", "did you mean|is one of"),
        ("window={from_s: 5, to_s: 5}", "to_s lies after from_s"),
        ("window={rule: after_warmup, from_s: 5}", "takes no from_s"),
        ("window={rule: arrivals}", "needs from_s or to_s"),
        ("window={frm_s: 5}", "did you mean"),
    ],
)
def test_a_window_that_says_nothing_is_refused(text, message):
    with pytest.raises(RooftraceError, match=message):
        Scenario.default().with_set(text)


def test_tables_say_which_part_their_figures_are_over(tmp_path):
    arguments = ["run", "--set", "workload.limit=200", "--no-plots", "--out", str(tmp_path / "a")]
    whole = CliRunner().invoke(build_app(), arguments, env={"COLUMNS": "200"})
    assert "the whole run, from the first arrival to the last finish" in whole.stdout
    part = CliRunner().invoke(build_app(), [*arguments[:-1], str(tmp_path / "b"), "--set", "window={from_s: 10}"],
                              env={"COLUMNS": "200"})  # fmt: skip
    assert "requests that arrive 10 s to" in part.stdout
    assert "over the whole run: ITL, MFU, MBU" in part.stdout
    swept = [
        "sweep",
        "--set",
        "workload.limit=100",
        "--axis",
        "replicas=1,2",
        "--jobs",
        "1",
        "--set",
        "window={from_s: 3}",
    ]
    table = CliRunner().invoke(build_app(), [*swept, "--out", str(tmp_path / "s")], env={"COLUMNS": "200"})
    assert "requests that arrive from 3 s after the first to the last arrival" in table.stdout
    assert "window.requests" in (tmp_path / "s" / "results.csv").read_text().splitlines()[0]
    assert (
        over({"window": {"rule": "after_warmup"}})
        == "runs after warm-up (MSER-5), to the last arrival; columns window.*"
    )
    assert over({}, ["window.from_s"]) == "what each point's window says"
    assert window_text(metrics.WHOLE).startswith("the whole run")


def test_busy_fraction_is_of_the_whole_run_where_a_pipeline_stands_beside_a_shared_machine():
    """Three stages, three replicas and two machines: equal counts of stages and replicas do not make one stage each."""
    small = {"model": "llama-3.2-1b"}
    pools = {"shared": {"models": ["llama-3.2-1b", "qwen3-0.6b"]}, "pipeline": {**small, "parallel": {"pipeline": 2}}}
    mix = {"llama-3.2-1b": 1, "qwen3-0.6b": 1}
    load = {"arrivals": {"process": "poisson", "rate_per_s": 40}, "models": mix, "requests": 20}
    workload = {**load, "prompt_tokens": 500, "output_tokens": 30}
    found = simulate(Scenario.from_mapping({"pools": pools, "workload": workload, "window": {"from_s": 0.1}}))
    whole = simulate(Scenario.from_mapping({"pools": pools, "workload": workload}))
    assert "busy_fraction" in found.summary["window"]["whole_run"]
    assert found.summary["busy_fraction"] == whole.summary["busy_fraction"]


def test_busy_fraction_of_a_window_is_of_ranks_as_of_machines():
    # Every rank counts as a replica with one stage: nothing overlaps, and iterations say when each was busy.
    whole = {"workload": {"trace": "conversation", "requests": 20, "rate_scale": 20}, "window": {"from_s": 0.0}}
    machine = {"model": "qwen3-30b-a3b", "parallel": {"data": 2, "expert": 2}}
    found = simulate(Scenario.from_mapping({**machine, **whole})).summary
    assert "busy_fraction" not in found["window"]["whole_run"]
    assert 0.5 < found["busy_fraction"] <= 1.0


def test_machines_of_a_run_without_length_are_counted():
    log = {"at_ns": [0, 0], "machine": [0, 1], "state": [READY, READY]}
    _, levels = _levels({"log": log, "pools": [0, 0]}, READY, 0, 0)
    assert levels.max() == 2
