"""Queueing closed forms against printed values, each other, and a short Lindley recursion."""

import numpy as np
import pytest

from sim.theory import queueing as qu
from sim.theory.published import published

ROWS = [{k: float(v) for k, v in row.items()} for row in published("alpaserve_md1")]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"load-{r['load']}")
def test_alpaserve_closed_forms(row):
    load = row["load"]
    assert qu.tolerable_communication(load) == pytest.approx(row["alpha"], abs=1e-6)
    assert qu.tolerable_unevenness(load) == pytest.approx(row["beta"], abs=1e-6)
    assert qu.simple_placement_latency_s(load, 1.0) == pytest.approx(row["simple_latency_over_service"], abs=1e-6)
    assert qu.pipeline_placement_latency_s(load, 1.0) == pytest.approx(row["pipeline_latency_over_service"], abs=1e-6)


def test_break_even_overheads_make_both_placements_equal():
    load = np.array([0.1, 0.4, 0.8, 1.2, 1.6, 1.9])
    simple = qu.simple_placement_latency_s(load, 1.0)
    slow = qu.pipeline_placement_latency_s(load, 1.0, communication=qu.tolerable_communication(load))
    uneven = qu.pipeline_placement_latency_s(load, 1.0, unevenness=qu.tolerable_unevenness(load))
    np.testing.assert_allclose(slow, simple, rtol=1e-9)
    np.testing.assert_allclose(uneven, simple, rtol=1e-9)


def test_communication_bound_peaks_at_1_138_near_load_1_17():
    load = np.linspace(0.0, 1.99, 2000)
    alpha = qu.tolerable_communication(load)
    assert alpha.max() == pytest.approx(1.138, abs=5e-4)
    assert load[alpha.argmax()] == pytest.approx(1.17, abs=0.01)
    assert alpha[0] == 1.0


def test_unevenness_bound_falls_from_root_two():
    assert qu.tolerable_unevenness(0.0) == pytest.approx(np.sqrt(2.0))
    assert (np.diff(qu.tolerable_unevenness(np.linspace(0.0, 1.99, 50))) < 0.0).all()


def test_pipelining_halves_the_wait():
    rate, service = 3.0, 0.39625
    wait_simple = qu.simple_placement_latency_s(rate, service) - service
    wait_pipeline = qu.pipeline_placement_latency_s(rate, service) - service
    assert wait_simple / wait_pipeline == pytest.approx(2.0, rel=1e-12)


def test_erlang_c_by_hand():
    # Two servers, an offered load of 1: B = 1/5, C = B / (1 - rho (1 - B)) = 1/3.
    assert qu.erlang_c(0.5, 2) == pytest.approx(1 / 3)
    np.testing.assert_allclose(qu.erlang_c([0.3, 1.0, 2.0], 1), [0.3, 1.0, 1.0])
    assert qu.mmc_wait_s(1.0, 1.0, 2) == pytest.approx(1 / 3)
    np.testing.assert_allclose(qu.mmc_wait_s([0.5, 1.0], 1.0, 1), [qu.mm1_wait_s(0.5, 1.0), np.inf])


def test_priority_waits_by_hand_and_by_conservation():
    # Cobham, one server, exponential: W0 = 0.6; 0.6 / 0.8, 0.6 / (0.8 * 0.4).
    np.testing.assert_allclose(qu.priority_wait_s([0.2, 0.4], 1.0), [0.75, 1.875])
    for servers in (1, 3):
        rates = np.array([0.2, 0.3, 0.3]) * servers
        waits = qu.priority_wait_s(rates, 1.0, servers)
        # Kleinrock's law: whoever goes first, waits weighted by load are those without classes.
        assert rates @ waits == pytest.approx(rates.sum() * qu.mmc_wait_s(rates.sum(), 1.0, servers))
    assert qu.priority_wait_s([0.5], 1.0, service_cv=0.0) == pytest.approx(qu.md1_wait_s(0.5, 1.0))
    np.testing.assert_allclose(qu.priority_wait_s([0.5, 0.6], 1.0), [2.0, np.inf])


def test_two_model_example():
    rate, service = 3.0, 0.39625
    pipeline = qu.pipeline_placement_latency_s(rate, service)
    assert qu.simple_placement_latency_s(rate, service) / pipeline == pytest.approx(1.27, abs=0.005)
    assert qu.simple_placement_latency_s(rate, service, share=0.2) / pipeline == pytest.approx(6.44, abs=0.005)


def test_a_device_without_requests_does_not_count():
    assert qu.simple_placement_latency_s(0.5, 1.0, share=0.0) == pytest.approx(1.0 + qu.md1_wait_s(0.5, 1.0))


def test_single_queue_waits():
    assert qu.md1_wait_s(0.5, 1.0) == pytest.approx(0.5)
    assert qu.mm1_wait_s(0.5, 1.0) == pytest.approx(1.0)
    assert qu.mg1_wait_s(0.5, 1.0, 2.0) == pytest.approx(2.5)
    assert qu.md1_wait_s(0.0, 1.0) == 0.0


def test_a_full_queue_waits_forever():
    np.testing.assert_array_equal(qu.md1_wait_s([1.0, 2.0], 1.0), [np.inf, np.inf])


def test_evenly_spaced_arrivals_wait_only_above_capacity():
    assert qu.dd1_wait_s(0.5, 1.0, 1000) == 0.0
    np.testing.assert_allclose(qu.dd1_wait_s(2.0, 1.0, [0, 1, 10]), [0.0, 0.5, 5.0])


def test_utilisation():
    assert qu.utilisation(3.0, 0.4, servers=2) == pytest.approx(0.6)


@pytest.mark.parametrize(("cv", "load"), [(0.0, 0.6), (0.0, 0.8), (1.0, 0.6)])
def test_waits_agree_with_a_simulated_queue(cv, load):
    # 40 independent runs of 20,000 requests; |error| < 4.5 standard errors fails by chance once in 1e4 (t, 39 d.f.).
    rng = np.random.default_rng([11, int(10 * load), int(cv)])
    runs, n = 40, 20_000
    gaps = rng.exponential(1.0 / load, (runs, n))
    service = np.ones((runs, n)) if cv == 0.0 else rng.exponential(1.0, (runs, n))
    steps = np.cumsum(service[:, :-1] - gaps[:, 1:], axis=1)
    waits = steps - np.minimum(np.minimum.accumulate(steps, axis=1), 0.0)
    means = waits[:, 2000:].mean(axis=1)
    error = means.mean() - qu.mg1_wait_s(load, 1.0, cv)
    assert abs(error) < 4.5 * means.std(ddof=1) / np.sqrt(runs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qu.md1_wait_s(-1.0, 1.0), "rate_per_s must be 0 or more"),
        (lambda: qu.tolerable_communication(2.0), "below 2"),
        (lambda: qu.pipeline_latency_s(1.0, 0.1, 0.2), "at least slowest_stage_s"),
        (
            lambda: qu.pipeline_placement_latency_s(1.0, 0.1, communication=0.9),
            "communication is a factor of 1 or more",
        ),
        (lambda: qu.pipeline_placement_latency_s(1.0, 0.1, unevenness=2.1), "unevenness is slowest stage over half"),
        (lambda: qu.priority_wait_s([0.1], 1.0, 2, 0.0), "exponential service"),
        (lambda: qu.simple_placement_latency_s(1.0, 0.1, share=1.5), "share is a probability"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
