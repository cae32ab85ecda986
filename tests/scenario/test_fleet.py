"""`autoscale` and `failures` in scenarios: what they make, what they refuse, what a run says."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sim
from hwmodels.cold_starts import cold_start, cold_starts
from sim import ScenarioError
from sim.engine.spec.lifecycle import Outage
from sim.scenario import Scenario
from sim.scenario.assembly import build
from sim.scenario.assembly.fleet import _known_arrivals_s
from sim.scenario.assembly.pools import PoolOf
from workloads import Trace

SMALL: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "scheduler": {"policy": "vllm"},
    "workload": {
        "arrivals": {"process": "deterministic", "rate_per_s": 4},
        "prompt_tokens": 400,
        "output_tokens": 40,
        "requests": 200,
    },
}
SCALED: dict[str, Any] = {"policy": {"policy": "concurrency", "target": 2}, "max": 3, "interval_s": 5.0}


def scenario(**settings: Any) -> Scenario:
    return Scenario.from_mapping({**SMALL, **settings})


@pytest.mark.parametrize("path", ["cold", "restore"])
def test_measured_starts_are_those_that_were_published(shared: Path, path: str) -> None:
    with (shared / "serving" / "cold_start_qwen3-32b.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["path"] == path]
    whole = [float(row["seconds"]) for row in rows if not row["phase"].startswith(("  ", "TOTAL"))]
    total = next(float(row["seconds"]) for row in rows if row["phase"].startswith("TOTAL"))
    found = [seconds for _, seconds in cold_start(f"qwen3-32b-h100-{path}").phases]
    assert found == whole
    assert sum(found) == pytest.approx(total, abs=0.05)
    assert len(cold_starts()) == 2


def test_a_scenario_says_how_machines_start_and_how_many_there_may_be() -> None:
    autoscale = {**SCALED, "min": 0, "start": "qwen3-32b-h100-restore", "provision_s": 30.0}
    experiment = build(scenario(replicas=2, autoscale=autoscale))
    assert len(experiment.machines) == 3
    assert experiment.fleet is not None
    (scaling,) = experiment.fleet.scaling
    assert scaling is not None
    assert scaling.phases == (("provision", 30.0), ("container", 6.0), ("restore", 8.0), ("wake_up", 4.0))
    assert (scaling.min_machines, scaling.initial, scaling.down_window_s) == (0, 2, 300.0)


@pytest.mark.parametrize(
    ("windows", "rule", "down_s"),
    [({}, "default", 300.0), ({"up_window_s": 0}, "behavior", 300.0), ({"down_window_s": 60}, "behavior", 60.0)],
)
def test_a_window_that_is_given_is_a_behavior_even_if_it_is_of_no_length(
    windows: dict[str, int], rule: str, down_s: float
) -> None:
    fleet = build(scenario(replicas=2, autoscale={**SCALED, **windows})).fleet
    assert fleet is not None
    (scaling,) = fleet.scaling
    assert scaling is not None
    assert (scaling.hpa, scaling.down_window_s, scaling.up_window_s) == (rule, down_s, 0.0)


def test_a_control_policy_is_named_as_other_policies_are() -> None:
    """By its name alone where it needs no settings, and with settings put to a name by key."""
    named = {"policy": "tests.scenario.test_fleet:always_two", "max": 3}
    assert build(scenario(replicas=2, autoscale=named)).fleet is not None
    with pytest.raises(ScenarioError, match=r"autoscale\.policy\.target is missing; concurrency needs it"):
        build(scenario(autoscale={"policy": "concurrency", "max": 3}))
    told = scenario(autoscale={"policy": "concurrency", "max": 3}).with_set("autoscale.policy.target=2")
    assert told.autoscale == scenario(autoscale={"policy": {"policy": "concurrency", "target": 2}, "max": 3}).autoscale


@pytest.mark.parametrize(
    ("name", "here"),
    [("keda", "concurrency"), ("hpa", "target_tracking"), ("HPA", "target_tracking"), ("kpa", "knative")],
)
def test_autoscalers_of_kubernetes_are_told_under_which_name_they_are_here(name: str, here: str) -> None:
    with pytest.raises(ScenarioError, match=f"autoscale.policy: '{name}' is called {here} here; did you mean {here}"):
        build(scenario(autoscale={"policy": name, "max": 3}))


def always_two(seen: object) -> int:
    return 2


def test_a_control_policy_may_be_a_function_also_inside_a_forecast() -> None:
    """It is asked, and asks for what a schedule of as many machines does."""
    forecast = {"policy": "last_value", "rate_per_s": 1e9, "step_s": 60, "inner": {"policy": f"{__name__}:always_two"}}
    schedule = {"policy": "schedule", "at_s": [0], "machines": [2]}
    runs = [
        sim.simulate(scenario(replicas=2, autoscale={"policy": policy, "max": 3})).requests
        for policy in (f"{__name__}:always_two", forecast, schedule)
    ]
    assert runs[0].equals(runs[2])
    assert runs[1].equals(runs[2])


def test_a_schedule_begins_with_what_it_says() -> None:
    schedule = {"policy": "schedule", "at_s": [0.0, 10.0], "machines": [2, 3]}
    fleet = build(scenario(autoscale={"policy": schedule, "max": 3})).fleet
    assert fleet is not None
    (scaling,) = fleet.scaling
    assert scaling is not None
    assert (scaling.initial, scaling.down_window_s) == (2, 0.0)


def test_failures_are_drawn_listed_and_slow() -> None:
    failures = {
        "mean_up_s": 100.0, "mean_down_s": 10.0, "shape": 2.0, "times": [{"machine": 1, "at_s": 5.0, "for_s": 2.0}],
        "slow": [{"machine": 0, "factor": 3.0}], "in_flight": "retry", "when_none": "lose", "retries": None,
    }  # fmt: skip
    experiment = build(scenario(replicas=2, failures=failures))
    fleet = experiment.fleet
    assert fleet is not None
    assert fleet.outages == (Outage(machine=1, at_s=5.0, for_s=2.0),)
    assert (fleet.in_flight, fleet.when_none, fleet.retries) == ("retry", "lose", None)
    assert fleet.failing[0] is not None
    assert (fleet.failing[0].up.mean_s, fleet.failing[0].up.shape, fleet.failing[0].down.mean_s) == (100.0, 2.0, 10.0)
    from hwmodels.totals import Totals

    step = Totals(8, 0, 0, 0, 0, 8, 4000, 8, 0, 0)
    slow, plain = (spec.cost.iteration_s(step) for spec in experiment.hosted)  # type: ignore[union-attr]
    assert slow == 3.0 * plain


def test_a_slow_machine_drafts_as_slowly_as_it_verifies() -> None:
    decoding = {
        "method": "draft_model", "num_speculative_tokens": 2, "acceptance": {"alpha": 0.7},
        "draft": {"model": "llama-3.2-1b"}, "overhead_s": 0.001,
    }  # fmt: skip
    slow_one = {"slow": [{"machine": 0, "factor": 3.0}]}
    slow, plain = build(scenario(replicas=2, failures=slow_one, decoding=decoding)).hosted
    from hwmodels.totals import Totals

    step = Totals(8, 0, 0, 0, 0, 8, 4000, 8, 0, 0)
    assert slow.draft_cost is not None
    assert plain.draft_cost is not None
    assert slow.draft_cost.iteration_s(step) == 3.0 * plain.draft_cost.iteration_s(step)
    assert slow.speculation_overhead_s == 3.0 * plain.speculation_overhead_s == 0.003


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"autoscale": {**SCALED, "min": 4}}, "max is at least min; got 3 and 4"),
        (
            {"replicas": 4, "autoscale": SCALED},
            r"begins with 4 machines \(replicas\), and there are 1 \(min\) to 3 \(max\)",
        ),
        (
            {"autoscale": {**SCALED, "policy": {"policy": "schedule", "at_s": [0.0, 60.0], "machines": [1, 0]}}},
            r"the schedule asks for 0 machines, and there are 1 \(min\) to 3 \(max\)",
        ),
        (
            {"autoscale": {**SCALED, "policy": {"policy": "schedule", "at_s": [9.0], "machines": [1]}}},
            "at_s starts with 0",
        ),
        ({"autoscale": {**SCALED, "policy": {"policy": "pid"}}}, "'pid' is not a policy"),
        ({"autoscale": {**SCALED, "policy": {"policy": "concurrency", "targe": 2}}}, "targe is not a setting"),
        ({"autoscale": {**SCALED, "start": "qwen3-32b"}}, "'qwen3-32b' is not a measured start"),
        ({"failures": {"mean_up_s": 5.0}}, "mean_up_s and mean_down_s go together"),
        ({"failures": {"times": [{"machine": 1, "at_s": 0.0}]}}, "there is no machine 1; they count from 0 to 0"),
        ({"failures": {"slow": [{"machine": 1, "factor": 2.0}]}}, "there is no machine 1; they count from 0 to 0"),
        (
            {"failures": {"slow": [{"machine": 0, "factor": 0.5}]}},
            "at least 1, and a machine at half its speed has 2; got 0.5",
        ),
        ({"failures": {"in_flight": "forget"}}, "in_flight"),
        (
            {
                "autoscale": {**SCALED, "policy": {"policy": "perfect", "rate_per_s": 5.0}},
                "workload": {**SMALL["workload"], "arrivals": {"process": "closed_loop", "concurrency": 2}},
            },
            "perfect knows when requests of a trace arrive",
        ),
        (
            {
                "pools": {
                    name: {"autoscale": {**SCALED, "policy": {"policy": "perfect", "rate_per_s": 5.0}}} for name in "ab"
                }
            },
            r"pools\.a\.autoscale\.policy: perfect knows .* where several pools serve a model",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ScenarioError, match=text):
        build(scenario(**settings))


def test_pools_that_prefill_and_pools_that_decode_grow_each_by_a_policy_of_its_own() -> None:
    grows = {"policy": {"policy": "schedule", "at_s": [0.0, 20.0], "machines": [1, 2]}, "max": 4, "interval_s": 5.0}
    result = sim.simulate(
        scenario(
            pools={
                "p": {"role": "prefill", "autoscale": SCALED},
                "d": {"role": "decode", "autoscale": grows},
            },
            links={"net": {"bandwidth_gb_per_s": 50.0, "latency_s": 0.001}},
            failures={"times": [{"machine": 3, "at_s": 10.0, "for_s": 2.0}], "in_flight": "retry"},
        )
    )
    assert result.columns.meta["fleet"]["pools"] == [0, 0, 0, 1, 1, 1, 1]
    found = result.summary["fleet"]
    assert found["failures"] == 1
    assert found["starts"] == 1
    # The only machine that decodes was down.
    assert found["without_machine_s"] == pytest.approx(2.0)
    assert found["requests"]["retried"] > 0
    assert found["requests"]["held"] > 0
    assert result.summary["requests"]["finished"] == 200
    assert result.summary["handover"]["requests"] == 200
    assert found["machine_hours"] < 7 * result.summary["makespan_s"] / 3600
    assert result.summary["costs"]["device_hours"] == pytest.approx(found["machine_hours"])


def test_the_perfect_policy_knows_what_comes_to_a_pool_that_alone_serves_its_stage_or_its_model() -> None:
    """Requests come for 50 s, 4 each second; a machine is to do 5/s, or 2/s of those that decode."""

    def perfect(rate_per_s: float) -> dict[str, Any]:
        return {**SCALED, "policy": {"policy": "perfect", "rate_per_s": rate_per_s, "step_s": 5.0}}

    links = {"net": {"bandwidth_gb_per_s": 50.0, "latency_s": 0.001}}
    stages = {"p": {"role": "prefill", "autoscale": perfect(5.0)}, "d": {"role": "decode", "autoscale": perfect(2.0)}}
    fleet = build(scenario(pools=stages, links=links)).fleet
    assert fleet is not None
    assert [each.initial for each in fleet.scaling if each is not None] == [1, 2]
    # Short prompts may be computed where they are decoded.
    with pytest.raises(ScenarioError, match=r"pools\.p\.autoscale\.policy: perfect knows"):
        build(scenario(pools=stages, links=links, handover={"local_prefill_tokens": 50}))


def test_of_several_models_the_perfect_policy_knows_the_arrivals_of_its_own() -> None:
    trace = Trace(
        arrival_ns=np.array([0, 1, 2, 3]) * 10**9, prompt_tokens=[8] * 4, output_tokens=[2] * 4, model_index=[0, 1, 2, 0],
        models=("x", "y", "z"),
    )  # fmt: skip
    one = scenario()
    pools = [PoolOf(name=name, serves=serves, scenarios=(one,)) for name, serves in (("a", ("x", "z")), ("b", ("y",)))]
    assert [_known_arrivals_s(one, pool, pools, trace) for pool in pools] == [[0.0, 2.0, 3.0], [1.0]]
    both = [*pools, PoolOf(name="c", serves=("z",), scenarios=(one,))]
    assert [_known_arrivals_s(one, pool, both, trace) for pool in both] == [None, [1.0], None]
    # A machine that does both stages may take what one that prefills, or decodes, would.
    parts = [PoolOf(name=role, serves=("x",), scenarios=(one,), role=role) for role in ("prefill", "decode", "both")]
    assert [_known_arrivals_s(one, pool, parts[:2], trace) for pool in parts[:2]] == [[0.0, 3.0]] * 2
    assert [_known_arrivals_s(one, pool, parts, trace) for pool in parts] == [None] * 3


def test_a_summary_says_what_machines_did_and_weighs_by_it(tmp_path: Path) -> None:
    autoscale = {
        "policy": {"policy": "schedule", "at_s": [0.0, 20.0], "machines": [2, 1]},
        "max": 2,
        "interval_s": 10.0,
    }
    result = sim.simulate(
        scenario(autoscale=autoscale, failures={"times": [{"machine": 0, "at_s": 30.0, "for_s": 5.0}]})
    )
    found = result.summary["fleet"]
    seconds = found["machine_s"]
    makespan_s = result.summary["makespan_s"]
    assert sum(seconds.values()) == pytest.approx(2 * makespan_s)
    assert seconds["failed"] == pytest.approx(5.0)
    assert found["machine_hours"] == pytest.approx((2 * makespan_s - seconds["off"]) / 3600)
    served_s = seconds["ready"] + seconds["draining"]
    assert found["availability"] == pytest.approx(served_s / (served_s + 5.0))
    assert result.summary["busy_fraction"] == pytest.approx(result.columns.meta["busy_ns"] * 1e-9 / served_s)
    # Both machines have one device, so that either could do half of the run's peak while it served.
    meta = result.columns.meta
    for share, done, peak in (("mfu", "flops", "peak_flops_per_s"), ("mbu", "hbm_bytes", "peak_bytes_per_s")):
        assert result.summary[share] == pytest.approx(meta[done] / (served_s * meta[peak] / 2))
    assert found["without_machine_s"] == pytest.approx(5.0)
    # 4 requests/s for 5 s, and the one or two that were under way.
    assert 20 <= found["requests"]["held"] <= 23
    assert found["drains"] == found["failures"] == 1
    assert result.summary["requests"]["finished"] == 200
    folder = result.save(tmp_path / "run")
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["fleet"] == found
    rows = dict(sim.results.fact_rows(result.summary))
    assert rows["Failures"].startswith("1, availability 9")
    assert rows["No machine ready"].startswith("5 s: 2")


def test_starts_that_nobody_gave_and_those_of_another_are_noted() -> None:
    from sim.scenario.assembly import resolve

    (bare,) = [note for note in resolve(scenario(autoscale=SCALED)).manifest["notes"] if "autoscale" in note]
    assert bare.startswith("autoscale.start says nothing, so that machines are ready after no time at all")
    lent = resolve(scenario(autoscale={**SCALED, "start": "qwen3-32b-h100-cold"})).manifest["notes"]
    assert any(note.startswith("Machines start as measured of Qwen3-32B") for note in lent)
