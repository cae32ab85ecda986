import numpy as np
import pytest

from sim.plots import latency, levels
from sim.text import seconds_text


def test_ecdf_steps_at_the_values():
    x, share = latency.ecdf(np.array([3.0, 1.0, 2.0]), np.array([1, 1, 2]))
    assert x.tolist() == [1.0, 2.0, 3.0]
    assert share.tolist() == [0.25, 0.75, 1.0]


def test_a_gathered_ecdf_stays_close_to_the_exact_one():
    values = np.random.default_rng(0).lognormal(0, 1, 50_000)
    x, share = latency.ecdf(values)
    exact = np.searchsorted(np.sort(values), x, side="right") / values.size
    assert np.abs(share - exact).max() < 0.002


def test_mean_level_integrates_the_counting_process():
    edges = np.array([0.0, 10.0, 20.0])
    level = levels.mean_level(edges, enter_ns=np.array([0, 5]), leave_ns=np.array([15, 20]))
    assert level.tolist() == pytest.approx([1.5, 1.5])


def test_rate_spreads_an_iteration_over_its_duration():
    edges = np.array([0.0, 1e9, 2e9, 3e9])
    rate = levels.rate_per_s(
        edges, np.array([0, 2_000_000_000]), np.array([2_000_000_000, 500_000_000]), np.array([8, 3])
    )
    assert rate.tolist() == pytest.approx([4.0, 4.0, 3.0])


@pytest.mark.parametrize(
    ("value_s", "text"), [(8.31e-3, "8.31 ms"), (1.2, "1.2 s"), (3e-5, "30 µs"), (1260.0, "21 min"), (0.0, "0 s")]
)
def test_seconds_are_written_for_people(value_s, text):
    assert seconds_text(value_s) == text
