"""`rooftrace reproduce` counts by evidence, writes booleans, and says how far it is."""

from __future__ import annotations

import types

import pandas as pd
import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.cli.commands import reproduce as command
from sim.cli.commands.reproduce import _facts, _Progress, _run, _Task
from sim.reproduce import Part, Row, groups, load_group, parts
from tests.study.test_sweep import InThreads


def row(case: str, simulated: float, **settings) -> Row:
    defaults = {"evidence": "event loop against measurement", "within_pct": 3.0}
    return Row(
        experiment="queue", case=case, quantity="s", published=1.0, simulated=simulated, kind="calibrated",
        **(defaults | settings),
    )  # fmt: skip


ROWS = [
    row("near", 1.01),
    row("far", 1.20, note="the queue was longer then"),
    row("not judged", 3.0, evidence="shown only", within_pct=None, note="its load is not published"),
    row("theory", 1.0, evidence="event loop against theory"),
]


@pytest.fixture
def reproduce(monkeypatch):
    group = types.SimpleNamespace(
        TITLE="Two queues",
        PARTS=(Part("first", lambda quick: ROWS[:2], 100.0), Part("second", lambda quick: ROWS[2:], 1.0)),
        plots=lambda folder: [],
    )
    monkeypatch.setattr("sim.reproduce.groups", lambda: ["queues"])
    monkeypatch.setattr("sim.reproduce.load_group", lambda name: group)
    return lambda *arguments: CliRunner().invoke(build_app(), ["reproduce", "--jobs", "1", *arguments])


def test_the_summary_counts_by_evidence_and_judges_what_is_judged(reproduce):
    answer = reproduce("queues")
    assert answer.exit_code == 1
    assert "4 rows, 3 judged, 2 of those within tolerance, 1 not" in answer.stdout
    line = next(line for line in answer.stdout.splitlines() if line.strip().startswith("shown only"))
    assert line.split()[2:] == ["1", "0", "0", "0"]


def test_a_miss_is_printed_with_its_reason(reproduce):
    answer = reproduce("queues", "--failures")
    assert "Out of tolerance: queue, far, s: the queue was longer then" in answer.stdout
    assert "not judged" not in answer.stdout


def test_ok_in_the_file_is_a_boolean_and_empty_where_nothing_is_judged(reproduce, tmp_path):
    reproduce("queues", "--out", str(tmp_path))
    table = pd.read_csv(tmp_path / "reproduce.csv")
    assert table[table.ok == False].case.tolist() == ["far"]  # noqa: E712
    assert table[table.ok.isna()].evidence.tolist() == ["shown only"]
    assert pd.read_csv(tmp_path / "reproduce.csv", dtype={"ok": "boolean"}).ok.sum() == 2


def test_what_would_make_a_group_shorter_is_said_before_it_runs(monkeypatch):
    group = load_group("alpaserve")
    monkeypatch.setattr(group, "loop_is_compiled", lambda: True)
    assert group.note() is None
    monkeypatch.setattr(group, "loop_is_compiled", lambda: False)
    monkeypatch.setattr(command, "_computed", lambda names, quick, jobs: iter([(name, []) for name in names]))
    assert "plain Python here" in CliRunner().invoke(build_app(), ["reproduce", "alpaserve"]).stderr


def test_a_long_run_says_how_far_it_is_and_what_is_left(reproduce):
    assert "0 of 2 parts, about 2 min left" in reproduce("queues").stderr


def test_what_is_left_follows_the_pace_and_counts_what_is_under_way(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    tasks = [_Task("queues", place, "", seconds) for place, seconds in enumerate([40.0, 40.0, 20.0, 20.0])]
    progress = _Progress(tasks, 2, began_s=now)
    assert progress.left_s() == 60
    now += 20
    assert progress.left_s() == 40
    # Thrice as long as expected and nothing done yet: half of 80 s of work took 120 s, and 80 s of it are left.
    now += 100
    assert progress.left_s() == 240
    # The first is done, the second and the third half.
    progress.done.append(tasks[0])
    assert progress.left_s() == pytest.approx(50 * 120 / 70)
    assert str(progress) == "1 of 4 parts, about 86 s left"
    progress.done += tasks[1:]
    assert progress.left_s() == 0


@pytest.mark.slow(reason="processes are started and ended")
def test_parts_run_in_processes_give_the_rows_that_they_give_here():
    tasks = [
        _Task("alpaserve", place, "", 1.0)
        for place, part in enumerate(load_group("alpaserve").PARTS)
        if "V100" in part.name
    ]
    tasks += [_Task("speculative", 7, "", 1.0)]
    alone, together = (dict(_run(tasks, True, jobs)) for jobs in (1, 2))
    assert alone == together


def test_each_part_that_workers_run_is_yielded_with_its_own_rows(monkeypatch):
    monkeypatch.setattr("joblib.externals.loky.ProcessPoolExecutor", InThreads)
    monkeypatch.setattr(command, "_part_rows", lambda group, place, quick: [row(f"{group} {place}", 1.0)])
    tasks = [_Task(group, place, "", 1.0) for group in ("a", "b") for place in range(3)]
    found = {task: [each.case for each in rows] for task, rows in _run(tasks, True, 2)}
    assert found == {task: [f"{task.group} {task.place}"] for task in tasks}


def test_every_group_can_be_run_in_parts():
    for name in groups():
        group = load_group(name)
        assert all(part.seconds >= 0 and callable(part.run) for part in parts(group))


def test_a_row_shown_only_has_no_tolerance_and_says_why_and_a_judged_one_has_one():
    with pytest.raises(ValueError, match="give one of within_abs, within_pct, holds, or shown only"):
        row("x", 1.0, evidence="shown only", note="nobody timed it")
    with pytest.raises(ValueError, match="give one of within_abs, within_pct, holds, or shown only"):
        row("x", 1.0, within_pct=None)
    with pytest.raises(ValueError, match="note says why"):
        row("x", 1.0, evidence="shown only", within_pct=None)
    assert row("x", 3.0, evidence="shown only", within_pct=None, note="nobody timed it").ok is None


def test_json_says_of_each_row_whether_it_is_judged():
    said = _facts(ROWS, failures_only=False)["rows"]
    assert [(each["ok"], each["informational"]) for each in said] == [
        (True, False), (False, False), (None, True), (True, False),
    ]  # fmt: skip
    assert said[0]["error_pct"] == pytest.approx(1.0)


def test_ok_is_a_plain_boolean_for_numbers_of_numpy():
    import numpy as np

    assert row("x", np.float64(1.2)).ok is False
    assert row("x", np.float64(1.0)).ok is True
