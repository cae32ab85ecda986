"""Loads of measured runs, and their simulation under their own protocol."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from sim.bench import BenchRun, Latency, Lengths, NotReplayable, Offered, RequestRows, SharedPrompts, replay
from sim.bench.compare import compared, load_text
from sim.bench.facts import FactError, all_with_facts, divided, with_facts
from sim.bench.fields import split_gaps
from sim.bench.load import load_of
from sim.bench.reading import read_bytes
from sim.scenario import Scenario
from tests.bench import own
from workloads import ClosedLoop, Trace

SCENARIO = Scenario.from_mapping({"model": "llama-3.1-8b", "hardware": "h100-sxm", "scheduler": "vllm"})


def a_run(**offered: object) -> BenchRun:
    given = {
        "rate_per_s": 10.0, "burstiness": 1.0, "requests": 60, "prompt": Lengths(mean_tokens=200.0, std_tokens=0.0),
        "output": Lengths(mean_tokens=20.0, std_tokens=0.0), **offered,
    }  # fmt: skip
    latency = Latency(mean_s=0.1, median_s=0.1, quantiles_s={0.99: 0.2})
    return BenchRun(
        name="a", file="a", format="x", offered=Offered(**given), ttft=latency, tpot=latency, itl=latency, duration_s=6.5  # type: ignore[arg-type]
    )  # fmt: skip


def arrivals_s(run: BenchRun, seed: int = 0) -> np.ndarray:
    workload = load_of(run, seed).workload
    assert isinstance(workload, Trace)
    return workload.arrival_ns / 1e9


def test_times_are_stretched_where_the_tool_does_it() -> None:
    assert arrivals_s(a_run(fills_time=True))[-1] == pytest.approx(6.0)
    assert arrivals_s(a_run())[-1] != pytest.approx(6.0, rel=1e-3)


def test_even_and_ramped_times() -> None:
    assert np.diff(arrivals_s(a_run(burstiness=math.inf))) == pytest.approx(0.1)
    ramp = {"strategy": "linear", "start_per_s": 1.0, "end_per_s": 10.0}
    gaps = np.diff(arrivals_s(a_run(burstiness=math.inf, ramp=ramp)))
    assert gaps[0] > 0.8
    assert gaps[-1] == pytest.approx(0.1, rel=0.01)


def test_clients_without_a_rate_are_a_closed_loop_that_may_start_one_by_one() -> None:
    load = load_of(a_run(rate_per_s=math.inf, concurrency=4, ramp={"clients_s": 3.0}), 0)
    assert isinstance(load.workload, ClosedLoop)
    assert load.workload.start_ns is not None
    assert (load.workload.start_ns / 1e9).tolist() == [0, 1, 2, 3]


def test_a_rate_behind_a_limit_on_requests_in_flight() -> None:
    load = load_of(a_run(concurrency=3), 0)
    assert load.in_flight == 3


def test_lengths_of_single_requests_are_kept() -> None:
    (run,) = read_bytes(json.dumps(own.VLLM_DETAILED).encode(), name="a", file="a").runs
    load = load_of(run, 0)
    assert load.workload.prompt_tokens.tolist() == [100, 110, 90]
    assert isinstance(load.workload, Trace)
    assert (load.workload.arrival_ns / 1e9).tolist() == [0.0, 0.4, 1.0]


def test_prompts_that_begin_alike_on_a_warm_server_find_all_but_the_end() -> None:
    shared = SharedPrompts(groups=2, prefix_tokens=128, prompts_per_group=3, warm=True)
    warm, cold = a_run(shared=shared), a_run(shared=replace(shared, warm=False))
    load = load_of(warm, 0)
    assert load.warm_requests == 6
    assert isinstance(load.workload, Trace)
    assert load.workload.prefix_blocks is not None
    texts = {tuple(load.workload.prefix_of(row).tolist()) for row in range(len(load.workload))}
    assert len(texts) == 6
    assert len({text[:8] for text in texts}) == 2
    times = [replay(SCENARIO, run, seeds=[0]).predicted["ttft_mean_s"] for run in (warm, cold, a_run())]
    assert times[0] < times[1] < times[2]


def test_the_figures_are_those_that_the_file_gives_and_all_means_and_medians() -> None:
    found = replay(SCENARIO, a_run(), seeds=[0, 1])
    assert set(found.measured) <= set(found.predicted)
    assert {"ttft_p99_s", "itl_p99_s", "tpot_mean_s", "e2el_median_s", "requests_per_s"} <= set(found.predicted)
    assert found.replications == 2
    assert found.spread["ttft_mean_s"] > 0
    assert found.error("ttft_mean_s") == pytest.approx(found.predicted["ttft_mean_s"] / 0.1 - 1)


def test_what_a_run_leaves_out_at_its_ends_is_in_none_of_its_figures() -> None:
    # 40 requests at once, and then one every 0.1 s: the burst is over when the warm-up is.
    sent_s = np.concatenate((np.zeros(40), 2.0 + np.arange(60) * 0.1)).astype(np.float64)
    rows = RequestRows(
        sent_s=sent_s, ttft_s=np.full(100, 0.1), e2el_s=np.full(100, 0.5),
        prompt_tokens=np.full(100, 500), output_tokens=np.full(100, 10), failed=np.zeros(100, bool),
    )  # fmt: skip
    whole = a_run(rate_per_s=None, requests=100)
    whole = replace(whole, rows=rows, requests_per_s=1.0)
    late = replace(whole, offered=replace(whole.offered, warmup_s=1.95))
    middle = replace(whole, offered=replace(whole.offered, warmup_s=1.95, cooldown_s=3.0))
    found = [replay(SCENARIO, run, seeds=[0]).predicted for run in (whole, late, middle)]
    assert found[0]["ttft_mean_s"] > 2 * found[1]["ttft_mean_s"]
    # Over the time that is left, not over the whole run.
    for each in found[1:]:
        assert each["requests_per_s"] == pytest.approx(10.0, rel=0.05)
        assert each["output_tokens_per_s"] == pytest.approx(100.0, rel=0.05)
        assert each["duration_s"] == found[0]["duration_s"]
    none = replace(whole, offered=replace(whole.offered, warmup_s=60.0))
    with pytest.raises(
        NotReplayable, match="leave out 60 s at the beginning and 0 s at the end, and none of its 100 requests"
    ):
        replay(SCENARIO, none, seeds=[0])


def test_a_run_made_by_the_simulator_is_found_again() -> None:
    run = a_run(requests=200)
    truth = replay(SCENARIO, run, seeds=[7])
    made = {name: Latency(mean_s=truth.predicted[f"{name}_mean_s"], median_s=truth.predicted[f"{name}_median_s"])
            for name in ("ttft", "tpot", "e2el")}  # fmt: skip
    again = replay(SCENARIO, replace(run, duration_s=truth.predicted["duration_s"], **made), seeds=[1, 2, 3])
    assert abs(again.error("tpot_mean_s") or 1) < 0.05
    assert abs(again.error("ttft_median_s") or 1) < 0.05


def test_gaps_in_which_a_prompt_ended_are_told_from_the_others() -> None:
    # The second request's first token comes while the first has its third gap; clients see tokens of one step 2 ms apart.
    gaps = [[0.010, 0.010, 0.050, 0.010, 0.010], [0.012, 0.010]]
    found = split_gaps([1.0, 1.072], gaps)
    assert [found[name].count for name in ("itl_prompt", "itl_decode")] == [1, 6]
    assert found["itl_prompt"].mean_s == pytest.approx(0.05)
    file = {**own.VLLM_DETAILED, "start_times": [10.0, 10.02, 11.0, 11.5]}
    (run,) = read_bytes(json.dumps(file).encode(), name="a", file="a").runs
    # The second one's first token, at 10.08, is in the last gap of the first, 10.06 to 10.09; who failed has none.
    assert (run.itl_prompt.count, run.itl_prompt.mean_s) == (1, pytest.approx(0.03))
    assert run.itl_decode.count == 5


def test_simulated_gaps_are_split_by_the_same_rule() -> None:
    gaps = Latency(mean_s=0.01, median_s=0.01)
    several = replace(a_run(concurrency=4, rate_per_s=math.inf, requests=40), itl_prompt=gaps, itl_decode=gaps)
    found = replay(
        SCENARIO, replace(several, offered=replace(several.offered, prompt=Lengths(mean_tokens=3000.0))), seeds=[0]
    )
    assert found.predicted["itl_prompt_mean_s"] > 3.0 * found.predicted["itl_decode_mean_s"]
    assert found.error("itl_decode_mean_s") == pytest.approx(found.predicted["itl_decode_mean_s"] / 0.01 - 1.0)
    # Nobody's first token comes between those of one client alone.
    alone = replay(SCENARIO, replace(several, offered=replace(several.offered, concurrency=1)), seeds=[0])
    assert "itl_prompt_mean_s" not in alone.predicted
    assert alone.predicted["itl_decode_mean_s"] == pytest.approx(alone.predicted["itl_mean_s"])


def test_a_rate_beyond_what_the_server_takes_is_named_saturated() -> None:
    slow = Lengths(mean_tokens=4000.0, std_tokens=0.0)
    found = replay(SCENARIO, a_run(rate_per_s=60.0, requests=300, prompt=slow), seeds=[0])
    assert found.saturated
    assert not replay(SCENARIO, a_run(rate_per_s=2.0, requests=40), seeds=[0]).saturated
    assert a_run().saturated is False
    assert replace(a_run(), duration_s=20.0).saturated is True
    assert replace(a_run(requests=10), duration_s=20.0).saturated is None


def poisson_end_s(n: int, seed: int, answer_s: float, server_per_s: float = math.inf) -> float:
    """When the last of *n* requests that come at 10/s is answered by a server that takes so many a second, one after another."""
    free = 0.0
    for sent in np.cumsum(np.random.default_rng(seed).exponential(0.1, n)):
        free = max(free, float(sent)) + 1.0 / server_per_s
    return free + answer_s


@pytest.mark.parametrize("n", [30, 200, 1000])
def test_a_late_end_of_times_that_are_drawn_is_luck_and_no_queue(n: int) -> None:
    # At random ends a third of such runs more than 3 % late; three standard deviations leave one in 700.
    run = replace(a_run(requests=n), ttft=Latency(mean_s=0.1, min_s=0.08))
    named = [replace(run, duration_s=poisson_end_s(n, seed, 2.0)).saturated for seed in range(40)]
    assert named == [False] * 40
    late = replace(run, duration_s=n / 10 * 1.15 + 2.1)
    assert late.saturated is (n == 1000)
    assert replace(late, offered=replace(late.offered, fills_time=True)).saturated is True
    assert replace(late, offered=replace(late.offered, burstiness=math.inf)).saturated is True


def test_a_queue_shows_itself_by_its_waits_or_by_clients_at_their_limit() -> None:
    took_s = poisson_end_s(200, 0, 2.0, server_per_s=8.5)
    run = replace(a_run(requests=200), duration_s=took_s)
    assert run.saturated is False
    waits = Latency(mean_s=(took_s - 20.0) / 2, min_s=0.05)
    assert replace(run, ttft=waits).saturated is True
    # One long prefill is no queue.
    assert replace(run, ttft=Latency(mean_s=(took_s - 20.0) / 2, min_s=(took_s - 20.0) / 2.2)).saturated is False
    limited = replace(run, offered=replace(run.offered, concurrency=20), requests_per_s=8.5)
    assert replace(limited, e2el=Latency(mean_s=2.3)).saturated is True
    assert replace(limited, e2el=Latency(mean_s=0.8)).saturated is False


def test_recorded_instants_say_how_long_sending_took() -> None:
    sent_s = np.linspace(0.0, 9.0, 60).astype(np.float64)
    each = {name: np.full(60, 0.2) for name in ("ttft_s", "e2el_s")}
    tokens = {name: np.full(60, 20) for name in ("prompt_tokens", "output_tokens")}
    rows = RequestRows(sent_s=sent_s, failed=np.zeros(60, bool), **each, **tokens)
    assert replace(a_run(), rows=rows, duration_s=9.2 + 2.0).saturated is False
    assert replace(a_run(), rows=rows, duration_s=9.2 + 2.5).saturated is True


def test_a_rate_that_rises_is_sent_so_behind_a_limit_too() -> None:
    ramp = {"strategy": "linear", "start_per_s": 1.0, "end_per_s": 10.0}
    for rate in (math.inf, None):
        load = load_of(a_run(rate_per_s=rate, concurrency=4, ramp=ramp), 0)
        assert isinstance(load.workload, Trace)
        assert load.in_flight == 4
        run = a_run(rate_per_s=rate, ramp=ramp)
        assert run.missing == ()
        assert load_text(run) == "1 to 10/s"
        assert run.saturated is False
        assert replace(run, duration_s=40.0).saturated is True


def test_a_file_may_claim_any_number_of_requests() -> None:
    many = replace(a_run(requests=10**15), duration_s=10.0**15)
    assert many.saturated is True
    rising = {"strategy": "linear", "start_per_s": 5.0, "end_per_s": 15.0}
    assert replace(many, offered=replace(many.offered, ramp=rising)).saturated is True
    with pytest.raises(NotReplayable, match="requests are more than the 5,000,000 that are simulated"):
        load_of(many, 0)


def test_what_is_missing_is_asked_for_by_name_and_may_be_given() -> None:
    run = a_run(rate_per_s=None, requests=None, output=Lengths())
    asked = r"run.rate_per_s \(or run.concurrency\), run.output_tokens, run.requests; give each with --set"
    with pytest.raises(NotReplayable, match=asked):
        load_of(run, 0)
    settings, facts = divided(
        [
            "replicas=2",
            "run.concurrency=4",
            "run.requests=20",
            "run.output_tokens={distribution: uniform, min_tokens: 5, max_tokens: 9}",
        ]
    )
    assert settings == ("replicas=2",)
    outputs = load_of(all_with_facts([run], facts)[0], 0).workload.output_tokens
    assert len(outputs) == 20
    assert set(outputs.tolist()) == {5, 6, 7, 8, 9}


def test_how_long_was_sent_takes_the_place_of_how_many() -> None:
    run = with_facts(a_run(), {"sending_s": 3.0})
    assert len(load_of(run, 0).workload.prompt_tokens) == 30
    assert run.notes == ("run.sending_s is given as 3.0, in place of the 60 requests of the file",)
    assert (run.saturated, replace(run, duration_s=8.0).saturated) == (False, True)
    both = with_facts(a_run(), {"sending_s": 3.0, "requests": 50})
    assert len(load_of(both, 0).workload.prompt_tokens) == 50
    with pytest.raises(FactError, match="warmup_requests: it is not a fact of a run"):
        divided(["run.warmup_requests=3"])


def test_a_fact_that_contradicts_the_file_is_noted() -> None:
    run = with_facts(a_run(), {"prompt_tokens": 300})
    assert run.notes == ("run.prompt_tokens is given as 300, in place of what the file says",)


def test_a_fact_may_be_of_one_run_by_its_name_or_that_of_its_file() -> None:
    runs = [
        replace(a_run(), name=name, file=f"logs/{name}.csv")
        for name in ("open", "closed", "closed-16", "odd [1], run.x")
    ]
    assignments = ["run.requests=10", "closed:run.concurrency=4", "closed-*.csv:run.concurrency=16"]
    assignments += ["closed-16:run.requests=20", "odd [1], run.x:run.requests=7"]
    told = all_with_facts(runs, divided(assignments)[1])
    assert [(run.offered.requests, run.offered.concurrency) for run in told] == [
        (10, None),
        (10, 4),
        (20, 16),
        (7, None),
    ]
    with pytest.raises(FactError, match=r"--set clsed:run.concurrency: no run is called so; did you mean closed\?"):
        all_with_facts(runs, divided(["clsed:run.concurrency=4"])[1])


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("run.rate_per=3", "is not a fact of a run; did you mean rate_per_s"),
        ("run.rate_per_s=-1", "run.rate_per_s is above 0 or inf; got -1"),
        ("run.requests=2.5", "run.requests is a whole number; got 2.5"),
        ("run.prompt_tokens=many", "run.prompt_tokens is a number; got 'many'"),
        ("run.shared={groups: 3}", "run.shared needs groups and prefix_tokens"),
        ("run.fills_time=1", "run.fills_time is true or false; got 1"),
        ("run.ramp={strategy: linear}", "run.ramp needs start_per_s and end_per_s"),
    ],
)
def test_a_fact_that_cannot_be_one_is_one_sentence(assignment: str, words: str) -> None:
    with pytest.raises(FactError, match=words.replace("{", r"\{")):
        all_with_facts([a_run()], divided([assignment])[1])


def test_errors_are_told_apart_by_saturation_and_held_to_limits() -> None:
    found = compared(SCENARIO, [a_run(), replace(a_run(), duration_s=20.0), a_run(rate_per_s=None)], replications=1)
    assert len(found.replays) == 2
    assert found.problems[0].startswith("a: the file does not say run.rate_per_s")
    assert found.errors()["tpot"].runs == found.errors(saturated=True)["tpot"].runs == 1
    assert found.exceeded({"tpot": 100.0, "ttft": 100.0}) == []
    (sentence,) = found.exceeded({"tpot": 0.01})
    assert sentence.startswith("tpot: mean error ")
    unknown = "e2el: no run below saturation gives it or is judged by it, so that its error is not known"
    assert found.exceeded({"e2el": 1.0}) == [unknown]


def test_a_request_runs_from_when_it_is_scheduled() -> None:
    alone = replay(SCENARIO, a_run(rate_per_s=0.5, requests=3), seeds=[0]).predicted
    in_front_s = alone["ttft_mean_s"] + 19 * alone["tpot_mean_s"] - 20 * alone["running_s_per_token"]
    # What passes before the scheduler sees a request is no part of it: 17.26 ms and 5 us a token of the prompt.
    assert in_front_s == pytest.approx(0.01726 + 200 * 4.967e-6, rel=0.02)
