import json
import os
from collections import Counter
from functools import partial

import numpy as np
import pandas as pd
import pytest

import sim.metrics as metrics
from sim import Scenario, simulate
from sim.engine.record.iterations import IterationTable, joined
from sim.errors import OutputError
from sim.plots import save_run
from sim.results import FILES, Result, staging
from sim.results.parquet import iteration_table
from sim.results.words import fact_rows
from tests.results.fakes import FakeColumns, iterations, plausible, requests


def result(**kwargs):
    return Result(plausible(60, 300, **kwargs), manifest={"label": "toy model on toy chip", "seed": 0})


def read_all(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_save_writes_the_whole_folder_and_nothing_beside_it(tmp_path):
    made = result()
    made.save(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES[:4])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    drawn = save_run(made, tmp_path / "out")
    assert [path.name for path in drawn] == list(FILES[4:])
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_pictures_of_a_stored_result_want_gaps_that_it_has_not(tmp_path):
    stored = Result.load(result().save(tmp_path / "out"))
    with pytest.raises(ValueError, match="gaps between tokens are not stored"):
        save_run(stored, tmp_path)


class Split(FakeColumns):
    """Offers its iterations in pieces of seventy."""

    def iteration_blocks(self):
        for at in range(0, len(self.iteration_columns["start_ns"]), 70):
            yield {name: column[at : at + 70] for name, column in self.iteration_columns.items()}


def test_iterations_in_pieces_give_the_same_folder(tmp_path):
    whole = plausible(60, 300)
    split = Split(requests=whole.requests, iteration_columns=whole.iteration_columns, gaps=whole.gaps, meta=whole.meta)
    first, second = (Result(columns, manifest={}) for columns in (whole, split))
    save_run(first, first.save(tmp_path / "whole"))
    save_run(second, second.save(tmp_path / "split"))
    pd.testing.assert_frame_equal(first.iterations, second.iterations)
    stored = [pd.read_parquet(tmp_path / name / "iterations.parquet") for name in ("whole", "split")]
    pd.testing.assert_frame_equal(*stored)
    assert first.summary["kv_utilization"] == pytest.approx(second.summary["kv_utilization"], rel=1e-12)
    for key in ("iterations", "makespan_s", "busy_fraction"):
        assert first.summary[key] == second.summary[key]
    assert (tmp_path / "whole" / "timeline.png").read_bytes() == (tmp_path / "split" / "timeline.png").read_bytes()


def test_saving_twice_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        result().save(tmp_path / name)
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")


def test_absent_times_are_null_and_status_and_reason_are_text(tmp_path):
    columns = FakeColumns(
        requests=requests(
            [0, 1, 2],
            status=[0, 1, 2],
            reason=[-1, 0, -1],
            scheduled_ns=[0, -1, 5],
            first_token_ns=[7, -1, -1],
            finish_ns=[9, -1, -1],
            replica=[0, -1, 0],
        ),
        iteration_columns=iterations([0], [9]),
        gaps=(np.array([1]), np.array([2])),
        reasons=("prompt of 90 tokens exceeds the KV pool",),
    )
    Result(columns, manifest={}).save(tmp_path / "out")
    table = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    assert table["status"].tolist() == ["finished", "rejected", "unfinished"]
    assert table["reason"].dropna().tolist() == ["prompt of 90 tokens exceeds the KV pool"]
    assert table["finish_ns"].isna().tolist() == [False, True, True]
    assert table["arrival_ns"].tolist() == [0, 1, 2]
    assert not (tmp_path / "out" / "latency.png").exists()


def test_iterations_of_replicas_without_adapters_have_null_of_them_and_other_columns_are_never_null():
    table = iteration_table({"start_ns": np.array([0, 1]), "adapters": np.array([-1, 2])})
    assert table["adapters"].to_pylist() == [None, 2]
    assert [field.nullable for field in table.schema] == [False, True]


def test_a_loaded_result_equals_the_saved_one(tmp_path):
    saved = result()
    loaded = Result.load(saved.save(tmp_path / "out"))
    assert loaded.summary == saved.summary
    assert loaded.label == saved.label
    pd.testing.assert_frame_equal(loaded.requests, saved.requests)
    pd.testing.assert_frame_equal(loaded.iterations, saved.iterations)
    with pytest.raises(ValueError, match="simulate its scenario again"):
        loaded.columns.itl()


def test_request_frame_carries_latencies(tmp_path):
    frame = result().requests
    assert np.allclose(frame["e2el_s"], (frame["finish_ns"] - frame["arrival_ns"]) * 1e-9)


def test_summary_json_has_no_nan_when_nothing_ran(tmp_path):
    nothing = FakeColumns(
        requests=requests([0], status=2, scheduled_ns=-1, first_token_ns=-1, finish_ns=-1, emitted_tokens=0),
        iteration_columns=iterations([], []),
        gaps=(np.array([], dtype=np.int64), np.array([], dtype=np.int64)),
    )
    Result(nothing, manifest={}).save(tmp_path / "out")
    text = (tmp_path / "out" / "summary.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["ttft_s"]["p99"] is None


def test_older_results_are_replaced_as_a_whole(tmp_path):
    (result().save(tmp_path / "out") / "latency.png").touch()
    result(seed=1).save(tmp_path / "out")
    assert not (tmp_path / "out" / "latency.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("with_results", [False, True])
def test_a_folder_with_other_files_is_left_alone(tmp_path, with_results):
    out = tmp_path / "out"
    out.mkdir()
    if with_results:
        result().save(out)
    (out / "thesis.txt").write_text("years of work")
    before = read_all(out)
    with pytest.raises(OutputError, match=r"thesis\.txt.*choose another --out"):
        result().save(out)
    assert read_all(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        result().save(tmp_path / "out")
    with pytest.raises(OutputError, match="out is a file, not a folder"):
        result().save(tmp_path / "out" / "deeper")
    assert (tmp_path / "out").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.isdir("/proc/self"), reason="needs a folder nobody can write to")
def test_an_unwritable_folder_is_found_out_before_the_run(tmp_path):
    if os.geteuid() == 0:
        target = "/proc/self/rooftrace-out"
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        target = tmp_path / "locked" / "out"
    with pytest.raises(OutputError, match="choose another --out"), staging(target):
        pytest.fail("the block must not be entered")


def write_half(folder, error):
    with staging(folder) as scratch:
        (scratch / "summary.json").write_text("{")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_the_older_results_and_no_scratch(tmp_path, error):
    out = result().save(tmp_path / "deep" / "out")
    before = read_all(out)
    with pytest.raises(error):
        write_half(out, error)
    assert read_all(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_interrupted_first_run_leaves_no_folder_at_all(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "results" / "first", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"), [("missing", "is missing"), ("format", "this version reads"), ("absent", "not a folder")]
)
def test_loading_something_else_is_refused(tmp_path, damage, words):
    out = result().save(tmp_path / "out")
    if damage == "missing":
        (out / "requests.parquet").unlink()
    elif damage == "format":
        (out / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(OutputError, match=words):
        Result.load(tmp_path / "nowhere" if damage == "absent" else out)


def test_html_shows_the_latency_table():
    html = result()._repr_html_()
    assert "TTFT" in html
    assert "<table>" in html
    assert "toy model on toy chip" in html


def test_the_table_counts_requests_that_were_given_up(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,abort_s\n0,1000,200,0.5\n0.1,1000,20,\n")
    summary = simulate(Scenario(workload={"trace": str(trace)})).summary
    assert dict(fact_rows(summary))["Requests"] == "2: 1 finished, 1 aborted"


def test_folder_looks_at_a_long_run_as_few_times_as_it_must(tmp_path, monkeypatch):
    """One look at the iterations each for summary, file, picture and the last end; of the gaps three for statistics, two for the
    picture. Beside them one at the iterations finds that there are too many to be kept."""
    monkeypatch.setattr("sim.metrics.spread._BYTES_TO_KEEP", 0)
    monkeypatch.setattr("sim.results.result._ROWS_TO_KEEP", 0)
    looks = Counter[str]()

    class Looked(FakeColumns):
        def iteration_blocks(self):
            looks["iterations"] += 1
            return super().iteration_blocks()

        def itl_blocks(self):
            looks["gaps"] += 1
            return super().itl_blocks()

    whole = plausible(60, 300)
    made = Result(Looked(whole.requests, whole.iteration_columns, whole.gaps, meta=whole.meta), manifest={}).kept()
    save_run(made, made.save(tmp_path / "out"))
    assert looks == {"iterations": 4, "gaps": 5}


def test_columns_that_every_look_needs_are_worked_out_once_where_iterations_are_many(monkeypatch):
    monkeypatch.setattr("sim.results.result._ROWS_TO_KEEP", 0)
    monkeypatch.setattr("sim.results.result._DEAR_ROWS_TO_KEEP", 5)
    made = Counter[str]()

    class Blocks(FakeColumns):
        def iteration_blocks(self):
            for begin in (0, 3, 6):
                names = ("replica", "start_ns", "running")
                yield IterationTable({name: partial(self._column, name, begin) for name in names})

        def _column(self, name, begin):
            made[f"{name} {begin}"] += 1
            return np.arange(begin, begin + 3)

    whole = plausible(60, 300)
    columns = (
        Result(Blocks(whole.requests, whole.iteration_columns, whole.gaps, meta=whole.meta), manifest={}).kept().columns
    )
    for _ in range(3):
        found = [
            {name: block[name].tolist() for name in ("start_ns", "running")} for block in columns.iteration_blocks()
        ]
        assert found == [{"start_ns": [i, i + 1, i + 2], "running": [i, i + 1, i + 2]} for i in (0, 3, 6)]
    assert [made[f"start_ns {begin}"] for begin in (0, 3, 6)] == [1, 3, 3]
    assert made["running 0"] == 3


def test_gaps_that_are_few_are_looked_at_once():
    looks = []

    def blocks():
        looks.append(1)
        yield np.array([5, 7 << 40]), np.array([1, 300])
        yield np.array([0]), np.array([70_000])

    kept = metrics.kept_blocks(blocks)
    assert metrics.kept_blocks(kept) is kept
    next(iter(kept()))  # A look that is not taken to its end keeps nothing.
    for _ in range(3):
        assert [(values.tolist(), weights.tolist()) for values, weights in kept()] == [
            ([5, 7 << 40], [1, 300]), ([0], [70_000]),
        ]  # fmt: skip
        assert all(column.dtype == np.int64 for pair in kept() for column in pair)
    assert len(looks) == 2


def test_columns_of_iterations_are_made_when_they_are_asked_for():
    made = []

    def maker(name):
        return lambda: made.append(name) or np.arange(3)

    table = IterationTable({name: maker(name) for name in ("start_ns", "waiting")})
    assert "waiting" in table
    assert table["start_ns"] is table["start_ns"]
    assert joined([table, table])["start_ns"].tolist() == [0, 1, 2, 0, 1, 2]
    assert made == ["start_ns"]
