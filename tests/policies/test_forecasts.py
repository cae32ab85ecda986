"""Control policies by forecast: each forecast beside a second model of it, and the machines that are asked for."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, pi, sin
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.control import (
    Arima,
    Forecast,
    History,
    HoltWinters,
    Kalman,
    LastValue,
    PoolSeen,
    RateModel,
    SeasonalNaive,
    Seen,
    TargetTracking,
    remembers_s,
)
from policies.control.forecasts.seasonal import smoothed
from sim import Scenario, ScenarioError, simulate
from sim.metrics.fleet import READY, _levels

STEP_S = 60.0
SEASON = 6
HOW = {"rate_per_s": 1.0, "step_s": STEP_S}
SEASONAL: list[Forecast] = [
    SeasonalNaive(season_s=SEASON * STEP_S, seasons=2, **HOW),
    HoltWinters(season_s=SEASON * STEP_S, seasons=4, **HOW),
    HoltWinters(season_s=SEASON * STEP_S, seasons=3, level=0.3, trend=0.1, season=0.4, **HOW),
]
ALL: list[Forecast] = [LastValue(**HOW), Kalman(remembered_s=600.0, **HOW), *SEASONAL]


def history(rates: Sequence[float], first: int = 0) -> History:
    return History(tuple(map(float, rates)), first, STEP_S)


def seen(came: Sequence[int], policy: Forecast, interval_s: float = 15.0, **pool: int) -> Seen:
    """The view that *policy* has after intervals in which so many requests came: those that it remembers."""
    each = [PoolSeen(came=n) for n in came]
    each[-1] = replace(each[-1], **pool)
    kept = max(ceil(remembers_s(policy) / interval_s - 1e-9), 1)
    return Seen(now_s=len(came) * interval_s, interval_s=interval_s, mine=each[-1], past=tuple(each[-kept:]))


# What is forecast.


@given(rate=st.floats(0, 1e4), n=st.integers(1, 40), steps=st.integers(1, 10), policy=st.sampled_from(ALL))
@settings(max_examples=100, deadline=None)
def test_a_constant_load_is_forecast_to_go_on(rate: float, n: int, steps: int, policy: Forecast) -> None:
    assert policy.ahead(history([rate] * n), steps) == pytest.approx([rate] * steps, rel=1e-9, abs=1e-9)


@given(
    season=st.lists(st.floats(0, 1e3), min_size=SEASON, max_size=SEASON),
    n=st.integers(2 * SEASON, 5 * SEASON),
    steps=st.integers(1, 2 * SEASON),
    policy=st.sampled_from(SEASONAL),
)
@settings(max_examples=60, deadline=None)
def test_a_load_that_repeats_is_forecast_exactly(season: list[float], n: int, steps: int, policy: Forecast) -> None:
    coming = [season[(n + h) % SEASON] for h in range(steps)]
    found = policy.ahead(history([season[i % SEASON] for i in range(n)]), steps)
    assert found == pytest.approx(coming, rel=1e-6, abs=1e-6)


@given(begin=st.floats(-100, 100), slope=st.floats(-5, 5), n=st.integers(2, 10), steps=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_kalman_goes_on_along_a_line(begin: float, slope: float, n: int, steps: int) -> None:
    found = Kalman(remembered_s=600.0, **HOW).ahead(history([begin + slope * i for i in range(n)]), steps)
    assert found == pytest.approx([begin + slope * (n + h) for h in range(steps)], abs=1e-6)


def test_a_trend_that_fades_adds_less_in_each_step() -> None:
    found = Kalman(damping=0.5, **HOW).ahead(history([1, 2, 3]), 3)
    assert found == pytest.approx([4.0, 4.5, 4.75])


def test_holt_winters_goes_on_along_a_line_with_a_season() -> None:
    rates = [10 + 0.5 * i + [3, -1, 0, 2, -3, -1][i % SEASON] for i in range(40)]
    found = HoltWinters(season_s=SEASON * STEP_S, seasons=4, **HOW).ahead(history(rates[:28]), 12)
    assert found == pytest.approx(rates[28:])


def test_seasonal_naive_takes_the_mean_of_its_seasons_and_the_last_rate_before_it_has_one() -> None:
    rates = [*range(6), *range(10, 16), 1, 2]
    once, twice = (SeasonalNaive(season_s=SEASON * STEP_S, seasons=n, **HOW) for n in (1, 2))
    assert list(once.ahead(history(rates[8:]), 7)) == [12, 13, 14, 15, 1, 2, 12]
    assert list(twice.ahead(history(rates[2:]), 4)) == [7, 8, 9, 10]
    assert list(twice.ahead(history(rates[:5]), 2)) == [4, 4]


def test_kalman_is_the_mean_of_what_comes_given_what_was_seen() -> None:
    """Beside the conditional mean of one large normal distribution, in which nothing is known of the first level and trend."""
    rng = np.random.default_rng(0)
    for level, trend, n in ((0.1, 0.001, 12), (1.0, 0.3, 5), (0.0, 0.0, 9), (3.0, 0.0, 2)):
        rates, steps = rng.normal(5, 2, n), 4
        # Each row: how an observation is made of the first level and trend, and of all changes since.
        rows = [
            [1, i, *(j < i for j in range(n + steps)), *(max(i - 1 - j, 0) for j in range(n + steps))]
            for i in range(n + steps)
        ]
        variances = [1e7, 1e7, *[level] * (n + steps), *[trend] * (n + steps)]
        made = np.array(rows, float)
        together = made @ np.diag(variances) @ made.T + np.eye(n + steps)
        expected = together[n:, :n] @ np.linalg.solve(together[:n, :n], rates)
        found = Kalman(level=level, trend=trend, remembered_s=1200.0, **HOW).ahead(history(rates.tolist()), steps)
        assert found == pytest.approx(expected, abs=1e-3)


def test_holt_winters_follows_its_equations() -> None:
    """Beside the equations of Winters as columns of a table, one column for each quantity."""
    rng = np.random.default_rng(1)
    m, alpha, beta, gamma = 4, 0.3, 0.15, 0.45
    y = rng.normal(20, 4, 17)
    b = (y[4:8].mean() - y[:4].mean()) / m
    steady = y[:4].mean() - 2.5 * b
    apart = [y[i] - (steady + b * (i + 1)) for i in range(8)]
    levels, trends, seasons = [steady], [b], [(apart[i] + apart[i + 4]) / 2 for i in range(4)]
    for t, each in enumerate(y):
        levels.append(alpha * (each - seasons[t]) + (1 - alpha) * (levels[-1] + trends[-1]))
        trends.append(beta * (levels[-1] - levels[-2]) + (1 - beta) * trends[-1])
        seasons.append(gamma * (each - levels[-1]) + (1 - gamma) * seasons[t])
    expected = [levels[-1] + (h + 1) * trends[-1] + seasons[len(y) + h % m] for h in range(6)]
    policy = HoltWinters(season_s=m * STEP_S, seasons=5, level=alpha, trend=beta, season=gamma, **HOW)
    assert policy.ahead(history(y.tolist()), 6) == pytest.approx(expected)


def test_holt_winters_is_that_of_statsmodels() -> None:
    smoothing = pytest.importorskip("statsmodels.tsa.holtwinters")
    rng = np.random.default_rng(2)
    m, alpha, beta, gamma = 4, 0.3, 0.15, 0.45
    y = rng.normal(20, 4, 17)
    b = (y[4:8].mean() - y[:4].mean()) / m
    level = y[:4].mean() - 2.5 * b
    apart = y[:8] - level - b * np.arange(1, 9)
    model = smoothing.ExponentialSmoothing(
        y, trend="add", seasonal="add", seasonal_periods=m, initialization_method="known", initial_level=level,
        initial_trend=b, initial_seasonal=(apart[:4] + apart[4:]) / 2,
    )  # fmt: skip
    # It weighs the season's error before the level has moved, and this one what is left of it.
    theirs = model.fit(
        smoothing_level=alpha, smoothing_trend=beta, smoothing_seasonal=gamma * (1 - alpha), optimized=False
    )
    ours = HoltWinters(season_s=m * STEP_S, seasons=5, level=alpha, trend=beta, season=gamma, **HOW)
    # Its fourth step ahead leaves out what the last observation says of its season.
    near, far = [0, 1, 2, 4, 5], ours.ahead(history(y.tolist()), 6)
    assert [far[h] for h in near] == pytest.approx(theirs.forecast(6)[near])


def noisy(seasons: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [float(10 + 5 * sin(2 * pi * i / SEASON) + rng.normal(0, 1 + seed % 2)) for i in range(seasons * SEASON)]


@pytest.mark.parametrize("seed", range(4))
def test_holt_winters_finds_weights_of_little_error(seed: int) -> None:
    policy = HoltWinters(season_s=SEASON * STEP_S, seasons=8, **HOW)
    rates = noisy(8, seed)
    ours = smoothed(rates, SEASON, policy.weights(history(rates)))[3]
    grid = [smoothed(rates, SEASON, each)[3] for each in product((0.0, 0.1, 0.3, 0.6, 1.0), repeat=3)]
    assert ours <= 1.01 * min(grid)
    assert policy.weights(history(rates)) != HoltWinters(season_s=SEASON * STEP_S, seasons=8, level=1.0, **HOW).weights(
        history(rates)
    )


def test_weights_change_with_a_season_and_not_within_it() -> None:
    policy, rates = HoltWinters(season_s=SEASON * STEP_S, seasons=4, **HOW), noisy(12, 1)
    # What it remembers goes on as time does: the oldest steps are forgotten one by one.
    found = [policy.weights(history(rates[: i + 1]).last(policy.history_s)) for i in range(6 * SEASON - 1, 8 * SEASON)]
    by_season = [set(found[:SEASON]), set(found[SEASON : 2 * SEASON])]
    assert [len(each) for each in by_season] == [1, 1]
    assert by_season[0] != by_season[1]


# ARIMA, where statsmodels is installed.


def test_arima_without_statsmodels_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    with pytest.raises(ScenarioError, match=r"autoscale.policy: arima needs statsmodels: pip install statsmodels;"):
        simulate(a_day({"policy": "arima"}))


def test_arima_is_that_of_statsmodels() -> None:
    models = pytest.importorskip("statsmodels.tsa.arima.model")
    rates = noisy(10, 3)
    policy = Arima(order=(1, 0, 1), remembered_s=60 * STEP_S, refit_s=SEASON * STEP_S, **HOW)
    found = policy.ahead(history(rates), 5)
    theirs = models.ARIMA(np.array(rates), order=(1, 0, 1)).fit().forecast(5)
    assert found == pytest.approx(theirs, rel=0.01)
    # Between two fits the parameters stay, and what has come since counts.
    later = policy.ahead(history([*rates, 30.0]), 1)[0]
    assert later != pytest.approx(found[1], rel=0.01)


def test_arima_repeats_what_does_not_change_and_a_season_that_repeats() -> None:
    pytest.importorskip("statsmodels")
    policy = Arima(remembered_s=60 * STEP_S, refit_s=STEP_S, **HOW)
    assert policy.ahead(history([3.0] * 50), 3) == [3.0] * 3
    seasonal = Arima(season_s=SEASON * STEP_S, remembered_s=60 * STEP_S, refit_s=STEP_S, **HOW)
    assert seasonal.ahead(history([i % SEASON for i in range(50)]), 8) == [i % SEASON for i in range(50, 58)]


# What is counted.


def test_steps_are_the_same_whatever_is_forgotten() -> None:
    """Beside counts of the whole run: random intervals, steps and histories, after each interval."""
    rng = random.Random(0)
    for _ in range(40):
        each, kept = rng.randrange(1, 5), rng.randrange(1, 8)
        policy = replace(
            SEASONAL[0], step_s=15.0 * each, season_s=30.0 * each, seasons=kept,
            before=tuple(float(rng.randrange(9)) for _ in range(rng.randrange(10))),
        )  # fmt: skip
        came = [rng.randrange(9) for _ in range(rng.randrange(1, 60))]
        whole = [sum(came[i : i + each]) / policy.step_s for i in range(0, len(came) - each + 1, each)]
        known = [*policy.before, *whole][-2 * kept :]
        found = policy.history(seen(came, policy))
        assert list(found.rates_per_s) == known
        if known:
            assert found.first == len(whole) - len(known)


@dataclass(frozen=True, kw_only=True)
class Rising(Forecast):
    """A forecaster of one's own: the last rate, and as much more in each step."""

    more_per_s: float = 0.0

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        return [history.rates_per_s[-1] + h * self.more_per_s for h in range(steps)]


def test_machines_are_those_of_the_highest_rate_until_one_that_starts_now_serves() -> None:
    # 120 requests in the step from 60 s, and a look 15 s into the next: the horizon reaches from 135 to 285 s, the steps from 120.
    policy = Rising(rate_per_s=1.0, step_s=STEP_S, more_per_s=1.0).fitting(15.0, 135.0)
    found = policy.outlook(seen([15] * 4 + [30] * 5, policy))
    assert found.begin_s == 120.0
    assert found.rates_per_s == (2.0, 3.0, 4.0)
    assert found.machines == 4
    assert replace(policy, headroom=0.5).wanted(seen([15] * 4 + [30] * 5, policy)) == 6
    # 300 that wait are two a second until the horizon.
    assert policy.wanted(seen([15] * 4 + [30] * 5, policy, waiting=300)) == 6


def test_before_a_step_is_complete_the_mean_of_what_was_seen_counts() -> None:
    policy = LastValue(**HOW)
    assert policy.outlook(seen([30, 60], policy)).rates_per_s == (3.0,)
    assert replace(policy, before=(7.0,)).outlook(seen([30, 60], policy)).rates_per_s == (7.0,)


@pytest.mark.parametrize(("came", "waiting", "running", "machines"), [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1)])
def test_without_load_a_machine_is_asked_for_where_somebody_waits(
    came: int, waiting: int, running: int, machines: int
) -> None:
    policy = LastValue(**HOW)
    assert policy.wanted(seen([came] * 8, policy, waiting=waiting, running=running)) == machines


def test_a_forecast_is_never_below_none() -> None:
    policy = Kalman(remembered_s=600.0, **HOW).fitting(15.0, 285.0)
    assert policy.outlook(seen([40] * 4 + [10] * 4, policy)).rates_per_s[-1] == 0.0


def test_a_policy_within_has_at_least_what_it_asks_for_of_what_it_remembers() -> None:
    policy = LastValue(inner=TargetTracking(target=4.0), **HOW)
    assert policy.wanted(seen([0] * 8, policy, machines=2, ready=2, running=20)) == 5
    assert policy.wanted(seen([600] * 8, policy, machines=2, ready=2, running=20)) == 40
    # 600 requests in an interval long ago: the forecast remembers them for its season, the policy within for 15 s.
    recent = RateModel(rate_per_s=1.0, ttft_s=1.0, remembers_s=15.0)
    far = SeasonalNaive(season_s=SEASON * STEP_S, inner=recent, **HOW)
    assert far.wanted(seen([600, *[0] * 20, 15], far)) == recent.wanted(seen([15], far)) == 3


# In a run.


def a_day(policy: Mapping[str, object], **autoscale: object) -> Scenario:
    """Two minutes of few requests and one of many, on machines that take twelve seconds to start."""
    return Scenario.from_mapping(
        {
            "model": "llama-3.1-8b",
            "hardware": "h100-sxm",
            "autoscale": {
                "policy": {"rate_per_s": 1.0, **policy},
                "min": 1,
                "max": 4,
                "start": {"weights": 12.0},
                "interval_s": 6.0,
                **autoscale,
            },
            "workload": {
                "arrivals": {"process": "piecewise", "rates_per_s": [0.4, 4.0], "window_s": 120.0, "cv": 0.0},
                "prompt_tokens": 200,
                "output_tokens": 20,
                "duration_s": 180,
            },
        }
    )


def all_ready_s(scenario: Scenario) -> float:
    """The instant from which on four machines are ready."""
    at_ns, levels = _levels(simulate(scenario).columns.meta["fleet"], READY, 0, 180_000_000_000)
    return float(at_ns[levels.tolist().index(4)]) * 1e-9


DAY_BEFORE = [0.4] * 20 + [3.7] * 20


def test_a_season_that_is_known_has_machines_ready_when_its_load_comes() -> None:
    known = {"step_s": 6.0, "season_s": 240.0, "before": DAY_BEFORE}
    assert all_ready_s(a_day({"policy": "seasonal_naive", **known})) == pytest.approx(120)
    # The horizon is the time that a machine takes to start, and an interval: with less they come later.
    assert all_ready_s(a_day({"policy": "seasonal_naive", "horizon_s": 6.0, **known})) == pytest.approx(132)
    assert all_ready_s(a_day({"policy": "last_value", "step_s": 6.0})) == pytest.approx(138)


@pytest.mark.parametrize("name", ["seasonal_naive", "holt_winters", "kalman", "last_value"])
def test_every_forecast_runs_by_its_short_name(name: str) -> None:
    found = simulate(
        a_day({"policy": name, "step_s": 6.0, "headroom": 0.1, "inner": {"policy": "concurrency", "target": 8}})
    )
    assert found.summary["fleet"]["starts"] >= 3


def test_a_forecaster_of_ones_own_is_named_by_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by that of this file: the scenario has the digest of the module's package, and the package of all tests is large.
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom policies.control import Forecast\n\n"
    (tmp_path / "my_forecasts.py").write_text(imports + inspect.getsource(Rising))
    monkeypatch.syspath_prepend(tmp_path)
    found = simulate(a_day({"policy": "my_forecasts:Rising", "more_per_s": 1.0, "step_s": 6.0}))
    # From the first complete step on it expects one a second more with each of three steps.
    assert found.summary["fleet"]["starts"] == 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"policy": "kalman", "step_s": 9.0},
            "autoscale.policy: step_s is a multiple of the interval of 6 s; got 9",
        ),
        ({"policy": "kalman", "level": -1.0}, "level is a ratio of variances of at least 0"),
        ({"policy": "kalman", "damping": 2.0}, "damping is a share from 0 to 1"),
        ({"policy": "kalman", "remembered_s": 300.0}, "remembered_s is two steps at least"),
        ({"policy": "last_value", "headroom": -0.1}, "headroom is a share of at least 0"),
        ({"policy": "last_value", "before": [-1.0]}, "before has rates of at least 0"),
        ({"policy": "last_value", "rate_per_s": 0.0}, "rate_per_s is a number above 0"),
        ({"policy": "seasonal_naive", "season_s": 1000.0}, r"season_s is a multiple of step_s \(300 s\)"),
        ({"policy": "seasonal_naive", "seasons": 0}, "seasons is at least 1"),
        ({"policy": "holt_winters", "seasons": 1}, "seasons is at least 2"),
        ({"policy": "holt_winters", "trend": 1.5}, "trend is a weight from 0 to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScenarioError, match=sentence):
        simulate(a_day(settings))
