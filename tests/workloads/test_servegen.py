"""Traffic drawn from published parameters of clients: counts, times and lengths against the tables themselves."""

from __future__ import annotations

from math import gamma, sqrt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workloads import ServeGen


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    arrivals = pa.table(
        {
            "model": ["a", "a", "a", "b"],
            "client": [0, 0, 1, 0],
            "window_start_s": [0, 600, 0, 0],
            "rate_req_s": [1.0, 2.0, 0.5, 9.0],
            "family": ["Gamma", "Weibull", "Gamma", "Gamma"],
            "shape": [1.0, 0.7, 0.3, 1.0],
        }
    )
    lengths = pa.table(
        {
            "model": ["a"] * 6,
            "client": [0, 0, 0, 0, 1, 1],
            "window_start_s": [0] * 6,
            "field": [
                "input_tokens",
                "input_tokens",
                "output_tokens",
                "output_tokens",
                "input_tokens",
                "output_tokens",
            ],
            "value": [10.0, 100.0, 1.0, 7.0, 50.0, 5.0],
            "probability": [0.5, 0.5, 0.5, 0.5, 1.0, 1.0],
        }
    )
    paths = tmp_path / "arrivals.parquet", tmp_path / "lengths.parquet"
    pq.write_table(arrivals, paths[0])
    pq.write_table(lengths, paths[1])
    return paths


def test_requests_are_as_many_as_the_rates_say_and_as_long_as_the_histograms(files: tuple[Path, Path]) -> None:
    trace = ServeGen(arrivals=files[0], lengths=files[1], model="a", duration_s=1200.0).trace(1)
    assert trace.session is not None
    seconds = trace.arrival_ns / 1e9
    by = {(c, w): int(((trace.session == c) & (seconds // 600 == w)).sum()) for c in (0, 1) for w in (0, 1)}
    assert by == {(0, 0): 600, (0, 1): 1200, (1, 0): 300, (1, 1): 0}
    own = trace.session == 0
    assert set(zip(trace.prompt_tokens[own].tolist(), trace.output_tokens[own].tolist(), strict=True)) == {
        (10, 1),
        (100, 7),
    }
    assert set(trace.prompt_tokens[~own].tolist()) == {50}
    assert (trace.prompt_tokens[own] == 100).mean() == pytest.approx(0.5, abs=0.06)


def test_a_part_of_the_day_starts_at_zero_and_keeps_its_requests(files: tuple[Path, Path]) -> None:
    whole = ServeGen(arrivals=files[0], lengths=files[1], model="a", duration_s=1200.0).trace(1)
    part = ServeGen(arrivals=files[0], lengths=files[1], model="a", start_s=300.0, duration_s=600.0).trace(1)
    shifted = whole.arrival_ns - 300 * 10**9
    kept = (shifted >= 0) & (shifted < 600 * 10**9)
    assert np.array_equal(part.arrival_ns, shifted[kept])
    assert np.array_equal(part.prompt_tokens, whole.prompt_tokens[kept])


def test_a_scaled_rate_brings_as_many_times_the_requests(files: tuple[Path, Path]) -> None:
    trace = ServeGen(arrivals=files[0], lengths=files[1], model="a", duration_s=1200.0, rate_scale=1.5).trace(1)
    assert len(trace) == 1.5 * (600 + 1200 + 300)


def test_gaps_vary_as_their_family_and_shape_say(files: tuple[Path, Path]) -> None:
    """60,000 gaps: a coefficient of variation is known to about 1 %, and Weibull's 1.46 at shape 0.7 lies far from Gamma's 1.20."""
    given = {"arrivals": files[0], "lengths": files[1], "model": "a", "clients": (0,), "rate_scale": 50.0}
    for start_s, wanted in ((0.0, 1.0), (600.0, sqrt(gamma(1 + 2 / 0.7) / gamma(1 + 1 / 0.7) ** 2 - 1))):
        gaps = np.diff(ServeGen(**given, start_s=start_s, duration_s=600.0).trace(1).arrival_ns)
        assert gaps.std() / gaps.mean() == pytest.approx(wanted, rel=0.04)


def test_fractions_of_requests_come_as_often_as_they_say(files: tuple[Path, Path], tmp_path: Path) -> None:
    """0.25 requests in each of 400 windows: a binomial number of them, within 4 standard deviations."""
    table, n = pq.read_table(files[0]), 400
    rows = {"model": ["a"], "client": [0], "rate_req_s": [0.25 / 600], "family": ["Gamma"], "shape": [1.0]}
    many = {name: value * n for name, value in rows.items()} | {"window_start_s": [600 * i for i in range(n)]}
    pq.write_table(pa.table(many, schema=table.schema), tmp_path / "many.parquet")
    trace = ServeGen(arrivals=tmp_path / "many.parquet", lengths=files[1], model="a", duration_s=600.0 * n).trace(1)
    assert abs(len(trace) - n / 4) < 4 * sqrt(n * 0.25 * 0.75)


def test_lengths_are_of_the_latest_window_that_has_begun(files: tuple[Path, Path], tmp_path: Path) -> None:
    table = pq.read_table(files[1])
    later = table.slice(0, 4).to_pydict() | {"window_start_s": [600] * 4, "value": [3.0, 3.0, 2.0, 2.0]}
    both = tmp_path / "both.parquet"
    pq.write_table(pa.concat_tables([table, pa.table(later, schema=table.schema)]), both)
    trace = ServeGen(arrivals=files[0], lengths=both, model="a", clients=(0,), duration_s=1200.0).trace(1)
    first = trace.arrival_ns < 600 * 10**9
    assert set(trace.prompt_tokens[first].tolist()) == {10, 100}
    assert set(trace.prompt_tokens[~first].tolist()) == {3}


def test_what_the_tables_lack_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not among its models: a, b"):
        ServeGen(arrivals=files[0], lengths=files[1], model="c").trace(1)
    with pytest.raises(ValueError, match="no client 5"):
        ServeGen(arrivals=files[0], lengths=files[1], model="a", clients=(5,)).trace(1)
    with pytest.raises(ValueError, match="no column rate_req_s"):
        ServeGen(arrivals=files[1], lengths=files[1], model="a").trace(1)
    table = pq.read_table(files[1])
    fewer = tmp_path / "fewer.parquet"
    pq.write_table(table.slice(0, 4), fewer)
    with pytest.raises(ValueError, match="1 clients of a with 14% of the requests have no lengths"):
        ServeGen(arrivals=files[0], lengths=fewer, model="a").trace(1)
    left = ServeGen(arrivals=files[0], lengths=fewer, model="a", duration_s=1200.0, leave_out_without_lengths=True)
    assert len(left.trace(1)) == 1800
