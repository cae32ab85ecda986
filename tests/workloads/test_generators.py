"""Statistical tests use fixed seeds and intervals of 5 standard errors: a false-alarm rate of 6e-7 for each."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import (
    ClosedLoop,
    Deterministic,
    Empirical,
    Fixed,
    Gamma,
    GammaWindows,
    LogNormal,
    Mmpp,
    Pareto,
    Poisson,
    Resampled,
    Trace,
    Uniform,
    Zipf,
    arrivals_ns,
    assign_models,
    azure_conversation_like,
    closed_loop,
    fit_gamma_windows,
    gamma_windows_from_counts,
    multi_model,
    power_law_rates,
    read_trace,
    split_total,
    synthesize,
)
from workloads.gamma_windows import gamma_shape

PROCESSES = [
    Poisson(rate_per_s=5.0),
    Gamma(rate_per_s=5.0, cv=3.0),
    Gamma(rate_per_s=5.0, cv=0.5),
    Gamma(rate_per_s=5.0, cv=0.0),
    Deterministic(rate_per_s=3.0),
    Pareto(rate_per_s=5.0, tail=4.5),
    Mmpp(rates_per_s=(2.0, 40.0), mean_state_s=(2.0, 0.5)),
    Mmpp(rates_per_s=(0.0, 5.0, 20.0), mean_state_s=(1.0, 2.0, 0.5)),
]


def gaps_s(process, n=100_000, seed=0):
    return np.diff(arrivals_ns(process, seed, n_requests=n), prepend=0) / 1e9


def squared_cv(gaps):
    return gaps.var() / gaps.mean() ** 2


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_the_long_run_rate_is_the_stated_one(process):
    # Means over 100 stretches, so that the standard error also holds where neighbouring gaps depend.
    stretches = gaps_s(process).reshape(100, 1000).mean(axis=1)
    error = stretches.std(ddof=1) / 10
    assert abs(stretches.mean() - 1 / process.mean_rate_per_s) <= 5 * error + 1e-9


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_gaps_have_the_stated_cv(cv):
    # The relative standard error of a sample variance is sqrt((kurtosis - 1) / n), kurtosis 3 + 6 cv^2, and the
    # mean adds no more than 2 cv / sqrt(n).
    n = 100_000
    error = (np.sqrt((2 + 6 * cv**2) / n) + 2 * cv / np.sqrt(n)) * cv**2
    assert abs(squared_cv(gaps_s(Gamma(rate_per_s=5.0, cv=cv), n)) - cv**2) <= 5 * error


def test_poisson_gaps_are_exponential():
    from scipy.stats import kstest

    # Kolmogorov-Smirnov at a false-alarm rate of 1e-4, met by this seed.
    assert kstest(gaps_s(Poisson(rate_per_s=5.0), 20_000) * 5, "expon").pvalue > 1e-4


def test_pareto_gaps_have_the_stated_tail():
    from scipy.stats import kstest

    tail, rate = 1.5, 2.0
    assert (
        kstest(gaps_s(Pareto(rate_per_s=rate, tail=tail), 20_000) * rate / (tail - 1), "lomax", (tail,)).pvalue > 1e-4
    )


def test_deterministic_arrivals_do_not_drift():
    times = arrivals_ns(Deterministic(rate_per_s=3.0), 0, n_requests=300_000)
    assert np.array_equal(times, [round(k * 10**9 / 3) for k in range(1, 300_001)])


def test_mmpp_is_burstier_than_poisson_as_its_closed_form_says():
    # Index of dispersion of counts of a two-state MMPP in the long run (Heffes and Lucantoni, 1986):
    # 1 + 2 (a - b)^2 p q / ((p + q)^2 (a q + b p)), with rates a, b and rates p, q of leaving their states.
    a, b, p, q = 2.0, 40.0, 1 / 2.0, 1 / 0.5
    expected = 1 + 2 * (a - b) ** 2 * p * q / ((p + q) ** 2 * (a * q + b * p))
    times = arrivals_ns(Mmpp(rates_per_s=(a, b), mean_state_s=(1 / p, 1 / q)), 3, duration_s=40_000.0) / 1e9
    counts = np.histogram(times, bins=np.arange(0, 40_001, 50))[0]
    measured = counts.var() / counts.mean()
    # 800 bins: relative standard error sqrt(2 / 800) = 5 %; bins of 50 s fall short of the limit by under 1 %.
    assert abs(measured / expected - 1) < 0.26


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_more_requests_or_time_add_to_the_end(process):
    long = arrivals_ns(process, 7, n_requests=10_000)
    assert np.array_equal(arrivals_ns(process, 7, n_requests=100), long[:100])
    assert np.array_equal(arrivals_ns(process, 7, duration_s=20.0), long[long < 20_000_000_000])
    assert np.all(np.diff(long) >= 0)


def test_a_short_time_may_bring_no_request():
    assert len(arrivals_ns(Poisson(rate_per_s=1e-9), 0, duration_s=1.0)) == 0
    with pytest.raises(ValueError, match=r"brings no request before 1\.0 s"):
        synthesize(
            arrivals=Poisson(rate_per_s=1e-9), prompt=Fixed(tokens=1), output=Fixed(tokens=1), duration_s=1.0, seed=0
        )


def test_a_rate_too_low_for_the_clock_is_refused():
    with pytest.raises(ValueError, match="more than 146 years"):
        arrivals_ns(Poisson(rate_per_s=1e-9), 0, n_requests=1000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(rate_per_s=0), "rate_per_s is a finite number above 0; got 0"),
        (lambda: Poisson(rate_per_s=float("nan")), "rate_per_s is a finite number above 0; got nan"),
        (lambda: Gamma(rate_per_s=1, cv=-1), "cv is a finite number from 0; got -1"),
        (lambda: Pareto(rate_per_s=1, tail=1), "tail is a number above 1"),
        (lambda: Mmpp(rates_per_s=(1,), mean_state_s=(1,)), "at least two states"),
        (lambda: Mmpp(rates_per_s=(0, 0), mean_state_s=(1, 1)), "a rate above 0; got only zeros"),
        (lambda: Uniform(min_tokens=5, max_tokens=4), "max_tokens is at least min_tokens; got 4 below 5"),
        (lambda: Fixed(tokens=1.5), "tokens is a whole number from 0; got 1.5"),
        (lambda: LogNormal.from_mean_median(mean=1, median=2), "mean is at least its median"),
        (lambda: Empirical(probabilities=(0, 0.5), tokens=(1, 2)), "probabilities rise from 0 to 1"),
        (lambda: Empirical(probabilities=(0, 1), tokens=(2, 1)), "do not fall"),
        (lambda: Resampled(tokens=()), "at least one length"),
        (lambda: arrivals_ns(Poisson(rate_per_s=1), -1, n_requests=1), "seed is an integer from 0; got -1"),
        (lambda: arrivals_ns(Poisson(rate_per_s=1), 0), "give one of n_requests and duration_s"),
        (lambda: power_law_rates(1.0, 0), "n_models is a whole number from 1; got 0"),
    ],
)
def test_settings_without_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def sample(distribution, n=100_000, seed=0):
    return distribution.sample(np.random.default_rng(seed), n)


def test_uniform_includes_both_ends():
    assert set(sample(Uniform(min_tokens=3, max_tokens=6)).tolist()) == {3, 4, 5, 6}


def test_lognormal_has_the_stated_mean_and_median():
    values = sample(LogNormal.from_mean_median(mean=1500.0, median=1000.0))
    assert abs(values.mean() - 1500) <= 5 * values.std() / np.sqrt(len(values))
    # Standard error of a median: 1 / (2 f sqrt(n)), f the density at the median.
    sigma = np.sqrt(2 * np.log(1.5))
    assert abs(np.median(values) - 1000) <= 5 * 1000 * sigma * np.sqrt(np.pi / 2 / len(values)) + 1


def test_lognormal_is_clipped_to_its_range():
    values = sample(LogNormal(mu=5.0, sigma=3.0, min_tokens=10, max_tokens=1000))
    assert values.min() == 10
    assert values.max() == 1000


def test_zipf_follows_its_power_law():
    theta, low, high, n = 0.4, 1024, 4096, 200_000
    values = sample(Zipf(theta=theta, min_tokens=low, max_tokens=high), n)
    assert values.min() >= low
    assert values.max() <= high
    weight = np.arange(1, high - low + 2) ** -theta
    share = weight / weight.sum()
    support = np.arange(low, high + 1)
    mean = (share * support).sum()
    error = np.sqrt((share * (support - mean) ** 2).sum() / n)
    assert abs(values.mean() - mean) <= 5 * error
    assert abs((values == low).mean() - share[0]) <= 5 * np.sqrt(share[0] / n)


def test_resampled_lengths_are_those_seen():
    values = sample(Resampled(tokens=(5, 5, 5, 9)))
    assert set(values.tolist()) == {5, 9}
    assert abs((values == 9).mean() - 0.25) <= 5 * np.sqrt(0.25 * 0.75 / len(values))


def test_empirical_lengths_have_the_given_quantiles():
    distribution = Empirical(probabilities=(0.0, 0.5, 1.0), tokens=(0, 100, 1000))
    assert abs((sample(distribution) <= 100).mean() - 0.5) <= 0.01
    exact = sample(Empirical(probabilities=(0.0, 0.5, 1.0), tokens=(0, 100, 1000), stratified=True), 1000)
    assert abs(np.median(exact) - 100) <= 1
    assert not np.all(np.diff(exact) >= 0)


@given(st.integers(2, 10**9), st.floats(0.01, 1000))
def test_a_split_keeps_the_total_and_both_parts(total, ratio):
    prompt, output = split_total([total], ratio)
    assert prompt[0] + output[0] == total
    assert min(prompt[0], output[0]) >= 1


def test_a_split_has_the_stated_ratio():
    prompt, output = split_total([1100, 2200], 10.0)
    assert prompt.tolist() == [1000, 2000]
    assert output.tolist() == [100, 200]


BASE = {
    "arrivals": Gamma(rate_per_s=4.0, cv=2.0),
    "prompt": Uniform(min_tokens=1, max_tokens=1000),
    "output": Zipf(theta=0.5, min_tokens=1, max_tokens=500),
    "n_requests": 50,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"arrivals": Poisson(rate_per_s=9.0)}, "arrival_ns"),
        ({"prompt": LogNormal(mu=5.0, sigma=1.0)}, "prompt_tokens"),
        ({"output": Fixed(tokens=7)}, "output_tokens"),
    ],
)
def test_changing_one_kind_of_draw_leaves_the_others(change, moved):
    before, after = synthesize(**BASE), synthesize(**(BASE | change))
    for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(before, name), getattr(after, name)) == (name != moved)


def test_the_same_seed_gives_the_same_trace_and_another_does_not():
    assert synthesize(**BASE) == synthesize(**BASE)
    other = synthesize(**(BASE | {"seed": 4}))
    for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert not np.array_equal(getattr(synthesize(**BASE), name), getattr(other, name))


def test_streams_of_one_seed_are_unrelated():
    same = Uniform(min_tokens=1, max_tokens=10**6)
    trace = synthesize(**(BASE | {"prompt": same, "output": same, "n_requests": 10_000}))
    gaps = np.diff(trace.arrival_ns, prepend=0)
    for one, other in itertools.combinations((gaps, trace.prompt_tokens, trace.output_tokens), 2):
        assert abs(np.corrcoef(one, other)[0, 1]) <= 5 / np.sqrt(len(trace))


def test_power_law_rates_fall_as_the_square_root_and_sum_to_the_total():
    rates = power_law_rates(30.0, 4)
    assert rates.sum() == pytest.approx(30.0)
    assert (rates[0] / rates).tolist() == pytest.approx([1, 2**0.5, 3**0.5, 2])


def test_models_keep_their_draws_when_another_joins():
    lengths = {"prompt": Uniform(min_tokens=1, max_tokens=99), "duration_s": 50.0, "seed": 1}
    two = multi_model({"a": Poisson(rate_per_s=2.0), "b": Gamma(rate_per_s=3.0, cv=4.0)}, **lengths)
    three = multi_model(
        {"a": Poisson(rate_per_s=2.0), "b": Gamma(rate_per_s=3.0, cv=4.0), "c": Poisson(rate_per_s=5.0)}, **lengths
    )
    assert three.model_index is not None
    kept = three.take(three.model_index < 2)
    assert np.array_equal(kept.arrival_ns, two.arrival_ns)
    assert np.array_equal(kept.prompt_tokens, two.prompt_tokens)
    assert np.array_equal(kept.model_index, two.model_index)


def test_multi_model_counts_requests_of_all_models_together():
    arrivals = {f"m{i}": Gamma(rate_per_s=rate, cv=4.0) for i, rate in enumerate(power_law_rates(64.0, 8))}
    few = multi_model(arrivals, prompt=Fixed(tokens=2048), n_requests=500, seed=2)
    many = multi_model(arrivals, prompt=Fixed(tokens=2048), n_requests=5000, seed=2)
    assert len(few) == 500
    assert np.array_equal(few.arrival_ns, many.arrival_ns[:500])
    assert few.output_tokens.tolist() == [0] * 500


def test_lengths_may_differ_by_model():
    trace = multi_model(
        {"a": Poisson(rate_per_s=2.0), "b": Poisson(rate_per_s=2.0)},
        prompt={"a": Fixed(tokens=10), "b": Fixed(tokens=20)},
        n_requests=20,
        seed=0,
    )
    assert trace.model_index is not None
    assert trace.prompt_tokens.tolist() == [10 + 10 * m for m in trace.model_index.tolist()]
    with pytest.raises(ValueError, match="'b' is missing"):
        multi_model(
            {"a": Poisson(rate_per_s=2.0), "b": Poisson(rate_per_s=2.0)},
            prompt={"a": Fixed(tokens=10)},
            n_requests=20,
            seed=0,
        )


def test_models_are_assigned_by_popularity():
    n = 50_000
    trace = Trace.from_arrays(arrival_ns=np.arange(n), prompt_tokens=1, output_tokens=1)
    counts = assign_models(trace, ["a", "b", "c"], [3, 0, 1], seed=0).describe()["requests_of_model"]
    assert counts["b"] == 0
    assert abs(counts["a"] / n - 0.75) <= 5 * np.sqrt(0.75 * 0.25 / n)
    with pytest.raises(ValueError, match="popularity is one number from 0"):
        assign_models(trace, ["a", "b"], [1.0], seed=0)


def test_the_fitted_shape_agrees_with_scipy():
    from scipy.stats import gamma

    for shape in (0.05, 0.3, 1.0, 5.0, 100.0):
        values = np.random.default_rng(0).gamma(shape, 1.0, 500)
        ours = gamma_shape(float(np.log(values.mean()) - np.log(values).mean()))
        assert ours == pytest.approx(gamma.fit(values, floc=0)[0], rel=1e-6)


@pytest.mark.parametrize("method", ["likelihood", "moments"])
def test_windows_are_fitted_with_the_rate_and_cv_they_were_drawn_from(method):
    drawn = GammaWindows(
        rate_per_s=np.array([[20.0, 5.0], [0.0, 40.0]]), cv=np.array([[0.5, 2.0], [1.0, 1.0]]), window_s=1000.0
    )
    fitted = fit_gamma_windows(drawn.arrivals_ns(0), window_s=1000.0, duration_s=2000.0, method=method)
    # The least of them has 5,000 gaps of CV 2: standard errors of 3 % in the mean and 5 % in the CV.
    np.testing.assert_allclose(fitted.rate_per_s, drawn.rate_per_s, rtol=0.15)
    np.testing.assert_allclose(fitted.cv, drawn.cv, rtol=0.25)


def test_scales_multiply_rate_and_cv():
    windows = GammaWindows(rate_per_s=np.array([[50.0]]), cv=np.array([[1.0]]), window_s=2000.0)
    (times,) = windows.arrivals_ns(0, rate_scale=2.0, cv_scale=3.0)
    gaps = np.diff(times) / 1e9
    # 200,000 gaps of CV 3: standard errors 0.7 % of the mean, 1.7 % of the variance.
    assert 1 / gaps.mean() == pytest.approx(100.0, rel=0.035)
    assert np.sqrt(squared_cv(gaps)) == pytest.approx(3.0, rel=0.06)


def test_a_rate_fitted_to_crowded_arrivals_is_reset():
    crowded = np.arange(10) * 1_000_000_000 // 10
    spread = np.arange(10) * 6_000_000_000
    fitted = fit_gamma_windows([crowded, spread], window_s=60.0, duration_s=60.0)
    assert fitted.rate_per_s[:, 0].tolist() == pytest.approx([10 / 60, 1 / 6])


def test_windows_with_fewer_than_three_arrivals_are_counted_not_fitted():
    fitted = fit_gamma_windows([np.array([0, 1_000_000])], window_s=10.0, duration_s=20.0)
    assert fitted.rate_per_s.tolist() == [[0.2, 0.0]]
    assert fitted.cv.tolist() == [[1.0, 1.0]]


def test_counts_become_windows_with_a_given_cv():
    windows = gamma_windows_from_counts([[60, 0], [0, 1200]], cv=1.0)
    assert windows.rate_per_s.tolist() == [[1.0, 0.0], [0.0, 20.0]]
    trace = windows.trace(models=["a", "b"], prompt=Fixed(tokens=2048), seed=0)
    assert trace.model_index is not None
    assert np.array_equal(trace.model_index == 1, trace.arrival_ns >= 60_000_000_000)
    assert abs(int((trace.model_index == 1).sum()) - 1200) <= 5 * np.sqrt(1200)


def test_closed_loop_draws_lengths_like_an_open_one():
    loop = closed_loop(n_requests=50, concurrency=8, prompt=BASE["prompt"], output=BASE["output"], seed=3)
    trace = synthesize(**BASE)
    assert len(loop) == 50
    assert loop.think_ns is None
    assert np.array_equal(loop.prompt_tokens, trace.prompt_tokens)
    assert np.array_equal(loop.output_tokens, trace.output_tokens)


def test_closed_loop_clients_may_think():
    settings = {"concurrency": 8, "prompt": Fixed(tokens=10), "output": Fixed(tokens=5), "seed": 3}
    loop = closed_loop(n_requests=10_000, mean_think_s=2.0, **settings)
    assert loop.think_ns is not None
    assert abs(loop.think_ns.mean() / 1e9 - 2) <= 5 * 2 / 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": 0}, "concurrency is a whole number from 1; got 0"),
        ({"prompt_tokens": [0, 1], "output_tokens": [0, 1]}, "row 0: a request needs"),
        ({"prompt_tokens": [], "output_tokens": []}, "at least one request"),
        ({"think_ns": [1]}, "think_ns needs one value a request"),
    ],
)
def test_bad_closed_loops_are_refused(change, message):
    good = {"prompt_tokens": [1, 2], "output_tokens": [1, 2], "concurrency": 4}
    with pytest.raises(ValueError, match=message):
        ClosedLoop(**(good | change))


# Mean, median, p90, p99 of AzureLLMInferenceTrace_conv.csv; the next test holds them against the file.
CONVERSATION = {
    "prompt_tokens": {"mean": 1154.70, "median": 1020.0, "p90": 2734.5, "p99": 4142.0},
    "output_tokens": {"mean": 211.126, "median": 129.0, "p90": 424.0, "p99": 601.0},
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1000, 3000])
def test_the_built_in_workload_follows_the_azure_conversation_trace(seed, n):
    facts = azure_conversation_like(n, seed).describe()
    for column, expected in CONVERSATION.items():
        for name, value in expected.items():
            assert facts[column][name] == pytest.approx(value, rel=0.02), (column, name)
    # CV 1.094: five standard errors of the mean gap and (two-moment, as above) of the CV.
    assert facts["rate_per_s"] == pytest.approx(5.530, rel=5 * 1.094 / np.sqrt(n))
    assert facts["interarrival_cv"] == pytest.approx(1.094, rel=5 * (np.sqrt(9.2 / n) + 2.2 / np.sqrt(n)) / 2)


def test_the_embedded_statistics_are_those_of_the_published_file(real_trace):
    facts = read_trace(real_trace("AzureLLMInferenceTrace_conv.csv")).describe()
    for column, expected in CONVERSATION.items():
        for name, value in expected.items():
            assert facts[column][name] == pytest.approx(value, rel=1e-5)
    assert facts["rate_per_s"] == pytest.approx(5.530, rel=1e-3)
    assert facts["interarrival_cv"] == pytest.approx(1.094, rel=1e-3)


def test_the_built_in_workload_has_no_hidden_link_between_lengths():
    trace = azure_conversation_like(5000, 0)
    assert abs(np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1]) <= 5 / np.sqrt(5000)


def test_the_package_loads_no_heavy_library():
    import subprocess
    import sys

    heavy = "{'pandas', 'scipy', 'matplotlib', 'pyarrow'}"
    code = f"import sys, workloads; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_all_public_names_exist():
    import workloads

    assert len(set(workloads.__all__)) == len(workloads.__all__)
    assert all(hasattr(workloads, name) for name in workloads.__all__)
