"""Files spoiled at random are read or refused in a sentence: nothing else happens."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from sim.bench import measured_figures, to_frame
from sim.bench.reading import read_bytes
from tests.bench.fuzz import samples, spoiled

MOST_EVENTS = 15
"""Calls and returns of functions for a byte of a file, and for each of a thousand more; files take up to five, and work that grows
with the square of their length would take thousands. A regular expression that goes back and forth is one call."""


def events_to_read(data: bytes, name: str) -> tuple[Any, int]:
    """The benchmark that *data* is read as, and how many calls and returns of functions it took."""
    events = 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return read_bytes(data, name=name, file=name), events
    finally:
        sys.setprofile(before)


def go(seed: int, n: int) -> tuple[int, int]:
    """How many of *n* spoiled files were read, and how many were not."""
    rng, files = random.Random(seed), samples()
    read = 0
    for at in range(n):
        name, data = files[at % len(files)]
        bad = spoiled(data, rng)
        found, events = events_to_read(bad, name)
        assert events < MOST_EVENTS * (1000 + len(bad))
        assert found.runs or found.problems, "a file cannot be read, and nobody says so"
        for sentence in found.problems:
            assert sentence.startswith(f"{name}: ")
            assert sentence.isprintable()
            assert len(sentence) < 500
        for run in found.runs:
            run.to_record()
            measured_figures(run)
        if found.runs and at % 20 == 0:
            to_frame(found.runs)
        read += bool(found.runs)
    return read, n - read


def test_a_few_hundred_spoiled_files() -> None:
    read, refused = go(0, 210)
    # Both must be met, or the files are spoiled too much or too little.
    assert read > 40
    assert refused > 40


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(1, 6))
def test_ten_thousand_spoiled_files(seed: int) -> None:
    read, refused = go(seed, 2000)
    assert min(read, refused) > 300


def test_files_as_they_were_are_read() -> None:
    for name, data in samples():
        found = read_bytes(data, name=name, file=name)
        assert found.runs or name.startswith("vllm_metric_families"), found.problems
