import json
import math

import numpy as np
import pytest

from sim import engine, metrics
from sim.engine.spec import lifecycle as lives
from sim.metrics import columns as metric_columns
from sim.metrics import fleet as metric_fleet
from sim.metrics.spread import block_quantile
from tests.results.fakes import FakeColumns, iterations, plausible, requests

SECOND = 1_000_000_000


def columns(request_columns, iteration_columns=None, gaps=((), ()), **meta):
    return FakeColumns(
        requests=request_columns,
        iteration_columns=iterations([], []) if iteration_columns is None else iteration_columns,
        gaps=(np.array(gaps[0], dtype=np.int64), np.array(gaps[1], dtype=np.int64)),
        meta={"kv_blocks_total": [100], "wall_s": 0.0, "busy_ns": 0, "n_stages": 1, "n_machines": 1, **meta},
    )


def test_codes_are_those_of_the_engine():
    """Metrics read columns, which may come from a folder, and do not import the engine."""
    codes = ("FINISHED", "REJECTED", "UNFINISHED", "ABORTED", "LOST")
    assert [getattr(metric_columns, name) for name in codes] == [getattr(engine, name) for name in codes]
    assert metrics.STATUS_NAMES == engine.STATUS_NAMES == tuple(map(str.lower, codes))
    states = [name.upper() for name in metrics.MACHINE_STATES]
    assert (
        [getattr(lives, name) for name in states] == [getattr(metric_fleet, name) for name in states] == [0, 1, 2, 3, 4]
    )


def test_a_machine_serves_while_it_is_ready_and_while_it_drains():
    log = {"at_ns": [0, 0, 4, 6], "machine": [0, 1, 1, 1], "state": [2, 2, 3, 0], "phase": [-1, -1, -1, -1]}
    meta = {"fleet": {"log": {**log, "at_ns": [at * SECOND for at in log["at_ns"]]}, "pools": [0, 0]}}
    assert metric_fleet.serving_s(meta, 0, 10 * SECOND).tolist() == [10.0, 6.0]
    assert metric_fleet.serving_s(meta, 5 * SECOND, 10 * SECOND).tolist() == [5.0, 1.0]


def test_latencies_of_one_request_by_hand():
    one = requests(
        [1 * SECOND], scheduled_ns=2 * SECOND, first_token_ns=3 * SECOND, finish_ns=9 * SECOND, output_tokens=4
    )
    assert metrics.queue_s(one).tolist() == [1.0]
    assert metrics.ttft_s(one).tolist() == [2.0]
    assert metrics.e2el_s(one).tolist() == [8.0]
    assert metrics.tpot_s(one).tolist() == [2.0]


def test_one_output_token_has_no_tpot():
    summary = metrics.summary(columns(requests([0], output_tokens=1, emitted_tokens=1, finish_ns=10)))
    assert summary["tpot_s"] == dict.fromkeys(metrics.STATISTICS)
    assert summary["ttft_s"]["mean"] == pytest.approx(1e-8)


def test_unfinished_and_rejected_requests_stay_out_of_latencies_and_count_as_slo_misses():
    mixed = requests(
        [0, 0, 0, 0],
        status=[0, 1, 2, 0],
        scheduled_ns=[0, -1, 5, 0],
        first_token_ns=[1 * SECOND, -1, -1, 3 * SECOND],
        finish_ns=[4 * SECOND, -1, -1, 4 * SECOND],
        emitted_tokens=[3, 0, 0, 3],
    )
    summary = metrics.summary(columns(mixed), slo={"ttft_s": 2.0, "tpot_s": None})
    assert summary["requests"] == {"total": 4, "finished": 2, "rejected": 1, "unfinished": 1}
    assert summary["ttft_s"]["mean"] == 2.0
    assert summary["slo_attainment"] == 0.25
    assert summary["goodput_requests_per_s"] == 0.25
    assert summary["requests_per_s"] == 0.5
    assert summary["output_tokens_per_s"] == 1.5
    assert summary["total_tokens_per_s"] == (6 + 200) / 4


def test_nothing_finished_gives_null_and_never_nan():
    nothing = requests([0, 5], status=1, scheduled_ns=-1, first_token_ns=-1, finish_ns=-1, emitted_tokens=0)
    summary = metrics.summary(columns(nothing), slo={"ttft_s": 1.0})
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text)["e2el_s"]["p99"] is None
    assert summary["requests_per_s"] is None
    assert summary["slo_attainment"] == 0.0
    assert summary["kv_utilization"] == {"mean": None, "max": None}


def test_without_slo_goodput_is_unknown():
    summary = metrics.summary(columns(requests([0])))
    assert summary["slo_attainment"] is None
    assert summary["goodput_requests_per_s"] is None


def test_summary_has_the_documented_keys():
    summary = metrics.summary(plausible())
    assert list(summary) == [
        "requests", "ttft_s", "tpot_s", "itl_s", "e2el_s", "queue_s", "output_tokens_per_s", "total_tokens_per_s",
        "requests_per_s", "goodput_requests_per_s", "slo_attainment", "makespan_s", "iterations", "preemptions",
        "mfu", "mbu", "busy_fraction", "kv_utilization", "saturated", "speculation", "wall_s", "window",
    ]  # fmt: skip
    for key in ("ttft_s", "tpot_s", "itl_s", "e2el_s", "queue_s"):
        assert set(summary[key]) == {"mean", "median", "std", "p50", "p90", "p95", "p99", "max"}


def test_utilisation_by_hand():
    run = iterations([0, 6 * SECOND], [2 * SECOND, 4 * SECOND], kv_blocks_used=[50, 25])
    one = requests([0], finish_ns=10 * SECOND)
    summary = metrics.summary(
        columns(one, run, busy_ns=6 * SECOND, flops=20.0, peak_flops_per_s=4.0, hbm_bytes=30.0, peak_bytes_per_s=6.0)
    )
    assert summary["busy_fraction"] == pytest.approx(0.6)
    assert summary["kv_utilization"]["mean"] == pytest.approx((0.5 * 2 + 0.25 * 4) / 10)
    assert summary["kv_utilization"]["max"] == 0.5
    assert summary["mfu"] == pytest.approx(0.5)
    assert summary["mbu"] == pytest.approx(0.5)
    assert summary["iterations"] == 2


@pytest.mark.parametrize("seed", range(20))
def test_weighted_quantile_equals_numpy_on_expanded_values(seed):
    rng = np.random.default_rng(seed)
    values = rng.lognormal(rng.uniform(0, 20), 2.0, size=rng.integers(1, 300)).astype(np.int64)
    weights = rng.integers(1, 50, size=values.size)
    probabilities = (0.0, 0.001, 0.5, 0.9, 0.95, 0.99, 1.0)
    expected = np.quantile(np.repeat(values, weights), probabilities)
    np.testing.assert_array_equal(metrics.weighted_quantile(values, weights, probabilities), expected)


def test_weighted_statistics_equal_plain_ones_on_expanded_values():
    rng = np.random.default_rng(1)
    values, weights = rng.integers(1, 10**9, 400), rng.integers(1, 9, 400)
    plain = metrics.statistics(np.repeat(values, weights) * 1e-9)
    weighted = metrics.weighted_statistics(lambda: ((values, weights),))
    assert weighted == pytest.approx(plain, rel=1e-12)


def single_server_queue(load: float, n: int, seed: int):
    """Poisson arrivals to one server with unit service: arrival and start-of-service times."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(SECOND / load, n)).astype(np.int64)
    slack = arrival - np.arange(n) * SECOND
    start = np.maximum.accumulate(slack) + np.arange(n) * SECOND
    return requests(arrival, scheduled_ns=start, first_token_ns=start, finish_ns=start + SECOND)


@pytest.mark.parametrize(("load", "expected", "wrong_allowed"), [(0.5, False, 0), (0.9, False, 4), (1.25, True, 0)])
def test_saturated_tells_overload_from_a_stable_queue(load, expected, wrong_allowed):
    # 200 seeds; at load 0.9 a false alarm in at most 2 % of runs is accepted.
    verdicts = [metrics.saturated(single_server_queue(load, 1500, seed)) for seed in range(200)]
    assert sum(verdict is not expected for verdict in verdicts) <= wrong_allowed


def test_saturated_is_unknown_for_a_burst_and_for_a_handful():
    assert metrics.saturated(requests(np.zeros(500))) is None
    assert metrics.saturated(requests(np.arange(20) * SECOND)) is None


def test_requests_never_scheduled_keep_the_queue_growing():
    arrival = np.arange(400) * SECOND
    stuck = requests(arrival, status=2, scheduled_ns=-1, first_token_ns=-1, finish_ns=-1)
    assert metrics.saturated(stuck) is True


def test_rejected_requests_do_not_count_as_queue():
    arrival = np.arange(400) * SECOND
    half = np.arange(400) % 2
    mixed = requests(arrival, status=half, scheduled_ns=np.where(half, -1, arrival))
    assert metrics.saturated(mixed) is False


def test_quantiles_of_many_machines_take_no_histogram_each(monkeypatch):
    # As of 3,000 machines with a few gaps each. A histogram has a million bins.
    rng = np.random.default_rng(5)
    blocks = [(rng.integers(0, 2**40, 3), rng.integers(1, 9, 3)) for _ in range(3000)]
    histograms, counted = [], np.bincount
    monkeypatch.setattr(np, "bincount", lambda *args, **kwargs: histograms.append(1) or counted(*args, **kwargs))
    found = block_quantile(lambda: iter(blocks), (0.0, 0.5, 0.99, 1.0))
    values = np.concatenate([np.repeat(*block) for block in blocks])
    np.testing.assert_array_equal(found, np.quantile(values, (0.0, 0.5, 0.99, 1.0)))
    assert len(histograms) == 1


def test_an_empty_weighted_quantile_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        metrics.weighted_quantile(np.array([], dtype=np.int64), np.array([], dtype=np.int64), (0.5,))
    assert math.isnan(metrics.tpot_s(requests([0], output_tokens=0))[0])


def test_a_single_pass_request_meets_a_first_token_limit_only_with_its_answer():
    two = requests([0, 0], first_token_ns=-1, finish_ns=[SECOND, 3 * SECOND], output_tokens=0, emitted_tokens=0)
    assert metrics.slo_met(two, ttft_limit_s=2.0).tolist() == [True, False]


def test_a_request_s_own_deadline_counts():
    two = requests([0, 0], finish_ns=[SECOND, 3 * SECOND], deadline_ns=[2 * SECOND, 2 * SECOND])
    assert metrics.slo_met(two).tolist() == [True, False]
    run = iterations([0], [SECOND])
    assert metrics.summary(columns(two, run))["slo_attainment"] == 0.5


def test_utilisation_is_shared_by_replicas_and_stages():
    run = iterations([0, 0], [2 * SECOND, 4 * SECOND], replica=[0, 1], kv_blocks_used=[50, 25])
    one = requests([0], finish_ns=10 * SECOND)
    found = metrics.summary(columns(one, run, kv_blocks_total=[100, 100], busy_ns=6 * SECOND, n_stages=2))
    assert found["busy_fraction"] == pytest.approx(0.3)
    assert found["kv_utilization"]["mean"] == pytest.approx((0.5 * 2 + 0.25 * 4) / 20)


def test_memory_is_held_from_one_micro_batch_to_the_next_and_not_while_idle():
    run = iterations(
        [0, SECOND, 6 * SECOND], [3 * SECOND, 3 * SECOND, SECOND], lane=[0, 1, 0], kv_blocks_used=[10, 20, 40]
    )
    one = requests([0], finish_ns=10 * SECOND)
    found = metrics.summary(columns(one, run))
    # 10 for 1 s, 20 until the second micro-batch ends at 4 s, then idle, then 40 for 1 s.
    assert found["kv_utilization"]["mean"] == pytest.approx((0.1 * 1 + 0.2 * 3 + 0.4 * 1) / 10)
