"""Records that went to a file on the way are those that stayed in memory, to the byte."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import sim.engine.record.spill as spill
from hwmodels.totals import Totals
from sim.engine import Columns, Experiment, run
from sim.engine.record.columns import SPAN, Recorder, Tally
from sim.engine.record.streaming import Stream
from sim.engine.time.clock import TICK_BITS
from sim.work import work_done
from tests.engine.random_runs import an_experiment, apart, with_fleet, with_ranks, with_tiers

MADE: dict[str, Callable[[int], Experiment]] = {
    "plain": lambda seed: an_experiment(seed, speculative=False),
    "speculative": lambda seed: an_experiment(seed, speculative=True),
    "ranks": lambda seed: with_ranks(an_experiment(seed, speculative=False), seed),
    "tiers": lambda seed: with_tiers(an_experiment(seed, speculative=False), seed),
    "apart": lambda seed: apart(seed, speculative=seed % 2 == 0),
    "fleet": lambda seed: with_fleet(an_experiment(seed, speculative=False), seed),
    "streamed": lambda seed: replace(an_experiment(seed, speculative=seed % 2 == 0), stream=Stream(interval=3)),
}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, runs write to the file whatever is more than a dozen spans."""

    def now() -> None:
        monkeypatch.setattr(spill, "IN_MEMORY_BYTES", 1)
        monkeypatch.setattr(spill, "_LEAST_BYTES", 2000)

    return now


def in_file(columns: Columns) -> list[bool]:
    """Whether the spans of each replica lie in a file."""
    bases = [replica.spans.base for replica in columns.replicas]
    return [isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) for base in bases]


def assert_same_records(a: Columns, b: Columns) -> None:
    for name, column in a.requests.items():
        assert np.array_equal(column, b.requests[name])
    for one, other in zip(a.replicas, b.replicas, strict=True):
        for field in fields(one):
            mine, its = getattr(one, field.name), getattr(other, field.name)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == its.dtype
                assert mine.tobytes() == its.tobytes(), field.name
        assert one.busy_ns() == other.busy_ns()
    blocks = list(a.iteration_blocks(50))
    assert sum(len(block["lane"]) for block in blocks) == sum(replica.spans["n"].sum() for replica in a.replicas)
    for left, right in zip(blocks, b.iteration_blocks(50), strict=True):
        assert all(np.array_equal(left[name], right[name]) for name in left)
    for left, right in zip(a.itl_blocks(50), b.itl_blocks(50), strict=True):
        assert all(map(np.array_equal, left, right))


@pytest.mark.parametrize("kind", MADE)
def test_what_went_to_the_file_is_what_stays_in_memory(kind: str, little_memory: Callable[[], None]) -> None:
    seeds = range(2)
    kept = [run(MADE[kind](seed)) for seed in seeds]
    assert not any(any(in_file(columns)) for columns in kept)
    little_memory()
    written = [run(MADE[kind](seed)) for seed in seeds]
    assert sum(sum(in_file(columns)) for columns in written) >= 2
    for seed, a, b in zip(seeds, kept, written, strict=True):
        assert_same_records(a, b)
        assert work_done(MADE[kind](seed), a) == work_done(MADE[kind](seed), b)


def test_records_in_the_file_can_be_sent_to_another_process(little_memory: Callable[[], None]) -> None:
    little_memory()
    columns = run(MADE["plain"](0))
    assert any(in_file(columns))
    spans = columns.replicas[0].spans
    assert pickle.loads(pickle.dumps(spans)).tobytes() == spans.tobytes()


def test_spans_in_flight_stay_where_they_can_be_forgotten(little_memory: Callable[[], None]) -> None:
    little_memory()
    file = spill.Spill(None, 1)
    recorder = Recorder(file, n_recent=5, n_stages=2)
    kept: list[int] = []
    for start_ns in range(400):
        recorder.add_iteration(start_ns << TICK_BITS, 1 << TICK_BITS, Totals(*[0] * 10), Tally(), (0, 0, 0, 0, 0))
        for stage in range(2):
            recorder.stages.add(start_ns, stage, start_ns, 1, 0, 0)
        kept.append(start_ns)
        if start_ns % 7 == 6:
            # A machine fails with five micro-batches in flight.
            recorder.spans.drop_last(5)
            recorder.stages.drop_last(10)
            del kept[-5:]
    recorder.close(16)
    assert recorder.all_spans(16)["start_ns"].tolist() == kept
    assert recorder.all_stages()["start_ns"].tolist() == np.repeat(kept, 2).tolist()
    assert file.array((0, 156), SPAN.dtype)["start_ns"] == 0


def test_nothing_is_left_in_the_folder_of_the_file(tmp_path: Path, little_memory: Callable[[], None]) -> None:
    little_memory()
    columns = run(MADE["plain"](0), spill_to=tmp_path)
    assert any(in_file(columns))
    assert not os.listdir(tmp_path)


def test_memory_is_given_back_after_a_look_at_records_in_the_file(tmp_path: Path) -> None:
    file = spill.Spill(tmp_path, 1)
    records = file.array(file.write(np.arange(1 << 20)), np.dtype(np.int64))
    assert _resident_kb(records) == 0
    total = sum(int(block.sum()) for block in spill.in_blocks(records, 1 << 15))
    assert total == (1 << 20) * ((1 << 20) - 1) // 2
    assert _resident_kb(records) == 0
    assert int(records.sum()) == total
    assert _resident_kb(records) >= 8192


def _resident_kb(records: np.ndarray) -> int:
    """The part of the mapping of *records* that is in memory; skips where the system does not say."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("no /proc/self/smaps here")
    at = records.ctypes.data
    inside = False
    for line in maps.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= at < end
        elif inside and head == "Rss:":
            return int(line.split()[1])
    raise AssertionError("the mapping is not there")
