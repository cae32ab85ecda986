import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sim import OutputError, RooftraceError, Scenario, simulate, sweep
from sim.cli import build_app
from sim.study.sweep import SweepResult, short_table
from sim.study.table import aggregate, flatten
from tests.sample import ALL

TINY = Scenario.default().with_set("scheduler={policy: sarathi}", "workload.limit=8")
ARRIVING = Scenario.default().with_set(
    "scheduler={policy: sarathi}",
    "workload={arrivals: {process: poisson, rate_per_s: 4}, prompt_tokens: 100, output_tokens: 10, requests: 20}",
)


def rooftrace(*arguments):
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


def stored(folder):
    return {path.name: path.stat().st_mtime_ns for path in (Path(folder) / "points").iterdir()}


def test_the_table_has_a_row_a_point_with_dotted_columns(tmp_path):
    result = sweep(TINY, axes={"scheduler.token_budget": [256, 512], "replicas": "1,2"}, out=tmp_path / "s", jobs=1)
    assert result.table[["scheduler.token_budget", "replicas"]].to_numpy().tolist() == [
        [256, 1],
        [256, 2],
        [512, 1],
        [512, 2],
    ]
    for row in result.table.to_dict("records"):
        scenario = TINY.with_value("scheduler.token_budget", row["scheduler.token_budget"])
        summary = simulate(scenario.with_value("replicas", row["replicas"])).summary
        expected = {key: value for key, value in flatten(summary).items() if key != "wall_s" and value is not None}
        assert {key: row[key] for key in expected} == expected
    assert "wall_s" not in result.table
    assert result.table["gpus"].tolist() == [1, 2, 1, 2]
    assert pd.read_csv(tmp_path / "s" / "results.csv").shape == result.table.shape
    assert result.varied == ["scheduler.token_budget", "replicas"]


def test_replications_give_means_and_half_widths():
    result = sweep(ARRIVING, axes={"scheduler.token_budget": [64, 512]}, replications=4, jobs=1)
    assert len(result.runs) == 8
    for _, point in result.runs.groupby("point"):
        row = result.table.iloc[int(point["point"].iloc[0])]
        assert row["ttft_s.p99"] == pytest.approx(point["ttft_s.p99"].mean())
        # t(0.975, 3) = 3.182
        assert row["ttft_s.p99.half_width"] == pytest.approx(3.18245 * point["ttft_s.p99"].std() / 2, rel=1e-5)
    assert result.runs["run_seed"].tolist() == [0, 1, 2, 3] * 2


def test_replications_in_which_nothing_is_random_have_no_interval(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,20,3\n")
    result = sweep(Scenario.default().with_value("workload", {"trace": str(trace)}), replications=3, jobs=1)
    assert result.table["ttft_s.p50"].notna().all()
    assert result.table["ttft_s.p50.half_width"].isna().all()
    assert result.counts["alike"] == 1


def test_a_saturated_point_has_the_verdict_in_the_place_of_its_latencies():
    runs = [
        {"ttft_s.p99": 9.0, "tpot_s.p50": 0.1, "saturated": True},
        {"ttft_s.p99": 7.0, "tpot_s.p50": 0.3, "saturated": True},
        {"ttft_s.p99": 1.0, "tpot_s.p50": 0.2, "saturated": False},
    ]
    row = aggregate(runs)
    assert row["saturated"] is True
    assert row["ttft_s.p99"] is None
    assert row["ttft_s.p99.half_width"] is None
    assert row["tpot_s.p50"] == pytest.approx(0.2)
    calm = aggregate([{**run, "saturated": None} for run in runs])
    assert (calm["saturated"], calm["ttft_s.p99"]) == (None, pytest.approx(17 / 3))


def test_overload_is_seen_in_the_table_and_told_to_people():
    busy = ARRIVING.with_value("workload", {**ARRIVING.settings()["workload"], "requests": 400})
    busy = busy.with_set("scheduler.max_sequences=2")
    result = sweep(busy, axes={"workload.rate_scale": [0.1, 50]}, jobs=1)
    assert result.table["saturated"].tolist() == [False, True]
    assert math.isnan(result.table["ttft_s.p99"][1])
    assert result.runs["ttft_s.p99"].notna().all()
    assert "saturated" in result._repr_html_()


def test_a_failing_point_is_recorded_and_the_rest_goes_on(tmp_path):
    axes = {"scheduler.token_budget": [256, -1, 512], "replicas": [1, 0]}
    result = sweep(TINY, axes=axes, out=tmp_path, jobs=1)
    assert result.counts == {"points": 6, "runs": 6, "failed": 4, "saturated": 0, "alike": 0}
    errors = result.table["error"].fillna("").tolist()
    assert [bool(error) for error in errors] == [False, True, True, True, False, True]
    assert "token_budget" in errors[2]
    assert "replicas is a number at least 1" in errors[1]
    assert len(result.failures()) == 4
    assert result.table["ttft_s.p50"].notna().tolist() == [True, False, False, False, True, False]


def test_finished_runs_are_not_run_again_and_new_ones_are(tmp_path):
    sweep(TINY, axes={"scheduler.token_budget": [256, 512]}, out=tmp_path, jobs=1)
    before = stored(tmp_path)
    seen = []
    result = sweep(TINY, axes={"scheduler.token_budget": [512, 256, 1024]}, out=tmp_path, jobs=1, progress=seen.append)
    after = stored(tmp_path)
    assert len(after) == 3
    assert {name: after[name] for name in before} == before
    assert result.table["scheduler.token_budget"].tolist() == [512, 256, 1024]
    assert (seen[-1].done, seen[-1].total, seen[-1].reused) == (3, 3, 2)


def test_failed_runs_are_kept_unless_asked_for_again(tmp_path, monkeypatch):
    (tmp_path / "fickle_policy.py").write_text(
        "from dataclasses import dataclass\nfrom policies.schedulers import Sarathi\n@dataclass(frozen=True)\n"
        "class Fickle:\n    def plan(self, view, /):\n        import pathlib\n"
        f"        if not pathlib.Path({str(tmp_path / 'calm')!r}).exists():\n            raise OSError('not today')\n"
        "        return Sarathi().plan(view)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = TINY.with_set("scheduler=fickle_policy:Fickle")
    first = sweep(base, axes={"replicas": [1]}, out=tmp_path / "s", jobs=1)
    assert "not today" in first.table["error"][0]
    (tmp_path / "calm").touch()
    assert sweep(base, axes={"replicas": [1]}, out=tmp_path / "s", jobs=1).counts["failed"] == 1
    assert sweep(base, axes={"replicas": [1]}, out=tmp_path / "s", jobs=1, retry_failed=True).counts["failed"] == 0


def test_rows_may_be_mappings_or_a_frame_and_meta_columns_stay(tmp_path):
    frame = pd.DataFrame({"replicas": [1, 2], "router": [None, "random"], "meta.site": ["a", "b"]})
    result = sweep(TINY, points=frame, jobs=1)
    assert result.table["meta.site"].tolist() == ["a", "b"]
    assert result.table["router"].isna().tolist() == [True, False]
    assert sweep(TINY, points=frame.to_dict("records")[1:], jobs=1).table["gpus"].tolist() == [2]


def test_a_key_twice_in_a_sweep_is_run_once(tmp_path):
    result = sweep(TINY, points=[{"replicas": 1, "meta.n": 1}, {"replicas": 1, "meta.n": 2}], out=tmp_path, jobs=1)
    assert len(stored(tmp_path)) == 1
    assert result.table["meta.n"].tolist() == [1, 2]
    assert result.table["iterations"].nunique() == 1


def test_large_numbers_are_written_out_in_the_table(tmp_path):
    heads, rows = short_table(sweep(TINY, axes={"replicas": [1, 2]}, jobs=1), most=5)
    assert [row[heads.index("costs.usd_per_month")] for row in rows] == ["5,022", "10,045"]


def test_an_axis_without_values_is_told_before_the_scenario_that_they_are_taken_for():
    done = rooftrace("sweep", "--axis", "replicas", "1,2")
    assert done.exit_code == 2
    assert "replicas" in done.output
    assert "does not exist" not in done.output


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(OutputError, match="not a Rooftrace sweep"):
        sweep(TINY, axes={"replicas": [1]}, out=tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        sweep(TINY, axes={"replicas": [1]}, out=tmp_path / "file")
    with pytest.raises(OutputError, match="not the folder of a sweep"):
        SweepResult(tmp_path)


def test_jobs_and_clusters_exclude_each_other():
    with pytest.raises(RooftraceError, match="leave out jobs or cluster"):
        sweep(TINY, axes={"replicas": [1]}, jobs=2, cluster="tcp://127.0.0.1:1")


class InThreads(ThreadPoolExecutor):
    def __init__(self, *, max_workers, timeout, env):
        super().__init__(max_workers)

    def shutdown(self, wait=True, kill_workers=False):
        super().shutdown(wait)


@pytest.mark.parametrize(
    "workers", ["threads", pytest.param("processes", marks=pytest.mark.slow(reason="processes are started and ended"))]
)
def test_two_workers_give_the_table_of_one(tmp_path, monkeypatch, workers):
    if workers == "threads":
        monkeypatch.setattr("joblib.externals.loky.ProcessPoolExecutor", InThreads)
        monkeypatch.setattr(os, "getppid", os.getpid)  # a worker whose parent is another than its owner ends
    axes = {"workload.rate_scale": "0.5:3:2"}
    alone = sweep(TINY, axes=axes, replications=2, out=tmp_path / "alone", jobs=1)
    both = sweep(TINY, axes=axes, replications=2, out=tmp_path / "both", jobs=2)
    pd.testing.assert_frame_equal(alone.table, both.table)
    pd.testing.assert_frame_equal(alone.runs, both.runs)


@pytest.mark.slow(reason="processes are started and ended")
def test_a_process_that_dies_costs_only_the_run_that_killed_it(tmp_path, monkeypatch):
    (tmp_path / "deadly_policy.py").write_text(
        "from dataclasses import dataclass\nfrom policies.schedulers import Sarathi\n@dataclass(frozen=True)\n"
        "class Deadly:\n    kills: bool = False\n    def plan(self, view, /):\n"
        "        import os\n        if self.kills:\n            os.kill(os.getpid(), 9)\n"
        "        return Sarathi().plan(view)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = TINY.with_set("scheduler=deadly_policy:Deadly")
    axes = {"scheduler.kills": [False, True], "workload.limit": [5, 6, 7, 8]}
    result = sweep(base, axes=axes, out=tmp_path / "s", jobs=2)
    assert result.counts["failed"] == 4
    assert result.table["error"].notna().tolist() == [False] * 4 + [True] * 4
    assert "died twice" in result.table["error"][4]


def test_the_command_prints_a_table_and_says_where_it_is(tmp_path):
    out = tmp_path / "s"
    done = rooftrace("sweep", "--set", "workload.limit=8", "--axis", "replicas=1,2", "--out", out, "--jobs", 1)
    assert done.exit_code == 0, done.output
    assert "ttft_s.p99" in done.stdout
    assert str(out) in done.stdout.replace("\n", "")
    assert done.stderr == ""


def test_the_command_ends_with_one_where_a_point_failed(tmp_path):
    done = rooftrace(
        "sweep", "--set", "workload.limit=8", "--axis", "replicas=1,0", "--out", tmp_path / "s", "--jobs", 1
    )
    assert done.exit_code == 1
    assert "1 run failed:" in done.stderr
    assert "replicas=0: " in done.stderr
    assert len(SweepResult(tmp_path / "s").table) == 2


def test_a_sweep_in_which_all_points_fail_still_prints_its_table(tmp_path):
    done = rooftrace("sweep", "--axis", "scheduler.max_nun_seqs=1,2", "--jobs", "1", "--out", str(tmp_path / "o"))
    assert done.exit_code == 1, done.output
    assert done.stdout.count("failed") == 2
    assert "did you mean max_num_seqs" in done.stderr
    assert SweepResult(tmp_path / "o")._repr_html_().count("did you mean max_num_seqs") == 2


def test_json_is_a_line_a_run_and_one_at_the_end(tmp_path):
    done = rooftrace(
        "sweep", "--set", "workload.limit=8", "--axis", "replicas=1,0", "--out", tmp_path / "s", "--jobs", 1, "--json"
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["run", "run", "end"]
    assert sorted(event["done"] for event in events[:2]) == [1, 2]
    assert events[2]["failed"] == 1
    assert sum("error" in event for event in events[:2]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to vary"),
        (("--axis", "replicsa=1"), "did you mean replicas"),
        (("--axis", "replicas=1", "--axis", "replicas=2"), "given twice"),
        (("--points", "nowhere.csv"), "cannot read points"),
        (("--points", "heads-only.csv"), "no row below its first line"),
        (("nowhere.yaml", "--axis", "replicas=1"), "does not exist"),
        (("--axis", "replicas=0,-1"), "no point of the sweep can be run; the first, replicas=0: default scenario:"),
        (("--axis", "replicas=1", "--cluster", "tcp://127.0.0.1:9", "--jobs", "2"), "leave out"),
    ],
)
def test_what_the_command_cannot_use_is_one_sentence_and_exit_code_two(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("heads-only.csv").write_text("scheduler.token_budget\n")
    done = rooftrace("sweep", *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not Path("results").exists()


COMMAND = [
    *(sys.executable, "-c", "from sim.cli import main; main()", "sweep", "--jobs", "2", "--replications", "2"),
    *(
        "--set",
        "workload.limit=40",
        "--set",
        "scheduler={policy: sarathi}",
        "--axis",
        "scheduler.token_budget=128:1024:8",
    ),
    *("--axis", "workload.rate_scale=0.5:2.5:8"),
]


def start(out, log):
    return subprocess.Popen([*COMMAND, "--out", str(out)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def kill_all(process, *, whole_group):
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow(reason="processes are started and ended")
def test_kills_at_random_times_end_with_the_same_table(tmp_path):
    import random

    wanted = 100 if ALL else 20
    expected = tmp_path / "expected"
    with (tmp_path / "log").open("w") as log:
        begun = time.monotonic()
        assert start(expected, log).wait() == 0
        whole_s = time.monotonic() - begun
        rng, kills, round_ = random.Random(1), 0, 0
        while kills < wanted:
            out = tmp_path / f"killed{round_}"
            round_ += 1
            held = {}
            while kills < wanted:
                process = start(out, log)
                # Every other kill takes the pool's processes along, as a power cut or the kernel would.
                try:
                    code = process.wait(timeout=rng.uniform(0.05, 0.6) * min(whole_s, 3))
                except subprocess.TimeoutExpired:
                    kill_all(process, whole_group=kills % 2 == 0)
                    kills += 1
                else:
                    assert code == 0
                    break
                now = stored(out) if (out / "points").is_dir() else {}
                # Nothing that was finished is lost, and nothing is done again.
                finished = {name: at for name, at in now.items() if not name.startswith(".")}
                assert {name: finished.get(name) for name in held} == held
                held = finished
            process = start(out, log)
            assert process.wait() == 0
            after = stored(out)
            assert {name: after[name] for name in held} == held
            assert sorted(after) == sorted(stored(expected))
            for name in ("results.parquet", "results.csv", "runs.parquet"):
                assert (out / name).read_bytes() == (expected / name).read_bytes()
    assert kills == wanted
