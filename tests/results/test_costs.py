"""Device-hours, money and energy of runs that can be counted by hand, and the fit of the power model on rows that it has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sim
from hwmodels.power import fit_power, power_model, power_share
from sim.engine import Columns
from sim.results.costs import costs_of
from sim.scenario import Scenario

ALONE = {
    "scheduler": {"policy": "vllm"},
    "workload": {
        "requests": 1,
        "prompt_tokens": 100,
        "output_tokens": 200,
        "arrivals": {"process": "deterministic", "rate_per_s": 1},
    },
}


def costs(**settings: Any) -> dict[str, Any]:
    return sim.simulate(Scenario.from_mapping({**ALONE, **settings})).summary


def test_a_run_costs_its_devices_for_as_long_as_it_lasts() -> None:
    found = costs(parallel={"tensor": 2}, replicas=3, costs={"usd_per_device_hour": 2.0})
    hours = 6 * found["makespan_s"] / 3600
    assert found["costs"]["device_hours"] == pytest.approx(hours)
    assert found["costs"]["usd"] == pytest.approx(2 * hours)
    assert found["costs"]["usd_per_m_output"] == pytest.approx(2 * hours / 200 * 1e6)
    shared = found["costs"]["usd_per_m_input"] * 100 + found["costs"]["usd_per_m_generated"] * 200
    assert shared == pytest.approx(2 * hours * 1e6)


CLASSES: dict[str, Any] = {
    "classes": {"chat": {"share": 0.5}, "batch": {"share": 0.5}},
    "workload": {
        "requests": 40,
        "prompt_tokens": {"distribution": "uniform", "min_tokens": 50, "max_tokens": 4000},
        "output_tokens": {"distribution": "uniform", "min_tokens": 1, "max_tokens": 200},
        "arrivals": {"process": "poisson", "rate_per_s": 5},
    },
}


def test_what_classes_cost_adds_up_to_what_the_run_costs() -> None:
    found = costs(**CLASSES)["costs"]
    of = found["classes"]
    assert set(of) == {"chat", "batch"}
    assert sum(each["usd"] for each in of.values()) == pytest.approx(found["usd"], rel=1e-12)
    for kind, rate in (("input", "usd_per_m_input"), ("generated", "usd_per_m_generated")):
        tokens = "input_tokens" if kind == "input" else "output_tokens"
        paid = sum(each[f"usd_{kind}"] for each in of.values())
        assert paid == pytest.approx(found[rate] * sum(each[tokens] for each in of.values()) / 1e6, rel=1e-12)
        # A class's own rate is what it pays for its own tokens.
        assert all(each[rate] == pytest.approx(each[f"usd_{kind}"] / each[tokens] * 1e6) for each in of.values())


def hand_made(**meta: float) -> tuple[Any, dict[str, Any]]:
    """Two classes on one device of 3,600 $ an hour for 10 s. The first: 300 prompt tokens of which 200 were cached, 10 emitted; the
    second: 100 and 30 in one request, 500 in another that got no answer."""
    requests = {
        "arrival_ns": np.zeros(3, np.int64),
        "first_token_ns": np.array([1, 1, -1]),
        "finish_ns": np.array([10**10, 1, -1]),
        "prompt_tokens": np.array([300, 100, 500]),
        "computed_prompt_tokens": np.array([100, 100, 0]),
        "emitted_tokens": np.array([10, 30, 0]),
        "class_index": np.array([0, 1, 1]),
    }
    facts = {"power_share_s": [0.5], "busy_s": [1.0], "prompt_share": 0.4, **meta}
    columns = Columns(requests=requests, reasons=(), replicas=(), meta=facts)
    manifest = {
        "classes": [{"name": "a"}, {"name": "b"}],
        "hardware": {"name": "h100-sxm", "tdp_w": 700.0, "price_usd_per_hour": 3600.0},
        "scenario": {"parallel": {"tensor": 1, "pipeline": 1, "data": 1}, "replicas": 1},
    }
    return columns, manifest


def test_what_a_class_costs_by_hand() -> None:
    """10 $: 4 for prompts, 6 for answers. By tokens each class has half of the prompts, and the first a quarter of the answers."""
    found = costs_of(*hand_made(prompt_attention_share=0.0, decode_kv_share=0.0))
    assert found is not None
    one, two = (found["classes"][name] for name in "ab")
    assert (one["usd_input"], two["usd_input"]) == pytest.approx((2.0, 2.0))
    assert (one["usd_generated"], two["usd_generated"]) == pytest.approx((1.5, 4.5))
    assert (one["input_tokens"], one["cached_tokens"], one["output_tokens"]) == (100, 200, 10)
    assert (two["input_tokens"], two["cached_tokens"], two["output_tokens"]) == (100, 0, 30)
    assert one["usd_per_m_input"] == pytest.approx(2.0 / 100 * 1e6)
    assert (one["usd_per_m_cached"], one["usd_per_m_output"]) == (0.0, pytest.approx(3.5 / 10 * 1e6))
    # By attention: 100 tokens behind 200 others attend to 20,000 + 5,050, 100 alone to 5,050; 10 tokens behind 300 read 3,000 + 45,
    # 30 behind 100 read 3,000 + 435.
    found = costs_of(*hand_made(prompt_attention_share=0.5, decode_kv_share=1.0))
    assert found is not None
    one, two = (found["classes"][name] for name in "ab")
    assert one["usd_input"] == pytest.approx(1.0 + 2.0 * 25_050 / 30_100)
    assert one["usd_generated"] == pytest.approx(6.0 * 3_045 / 6_480)
    assert one["usd"] + two["usd"] == pytest.approx(10.0)


def test_nothing_is_said_of_classes_whose_models_differ_or_where_no_price_is_known() -> None:
    columns, manifest = hand_made(prompt_attention_share=0.0, decode_kv_share=0.0)
    assert "classes" not in (costs_of(columns, {**manifest, "models": ["x", "y"]}) or {})
    unpriced = {**manifest, "hardware": {**manifest["hardware"], "price_usd_per_hour": None}}
    assert "classes" not in (costs_of(columns, unpriced) or {})


def test_attention_takes_all_of_a_long_prompt_that_is_read_and_none_where_there_is_hardly_any() -> None:
    """Of a decode step of one sequence the KV share is its bytes over all bytes: 200 tokens behind 100 are a thousandth of an 8B
    model's weights, behind 100,000 most of it."""
    short, long = (
        sim.simulate(
            Scenario.from_mapping({**ALONE, "workload": {**ALONE["workload"], "prompt_tokens": tokens}})
        ).columns.meta
        for tokens in (100, 100_000)
    )
    kv_bytes, weights = 131_072, 2 * 8.03e9
    for meta, context in ((short, 200), (long, 100_100)):
        assert meta["decode_kv_share"] == pytest.approx(context * kv_bytes / (context * kv_bytes + weights), rel=0.08)
    assert short["prompt_attention_share"] < 0.02 < 0.3 < long["prompt_attention_share"]


def test_energy_lies_between_idle_and_the_limit_and_grows_with_the_building() -> None:
    plain, building = costs()["costs"], costs(costs={"pue": 1.5, "carbon_g_per_kwh": 360.0})["costs"]
    assert plain["joule"] < plain["tdp_joule"]
    assert plain["joule_low"] < plain["joule"] < plain["joule_high"] <= plain["tdp_joule"]
    assert building["joule"] == pytest.approx(1.5 * plain["joule"])
    assert building["carbon_g"] == pytest.approx(building["joule"] / 1e4)
    assert plain["carbon_g"] is None


def test_a_machine_that_waits_draws_idle_power() -> None:
    """Two machines, of which one has nothing to do."""
    one, two = costs(), costs(replicas=2)
    limit_w = 700.0
    extra = two["costs"]["joule"] - one["costs"]["joule"]
    assert extra == pytest.approx(power_model("h100-sxm").idle * limit_w * one["makespan_s"])


def test_what_was_not_measured_says_so() -> None:
    assert power_model("b200").basis == "measured on b200"
    assert "no power of l4 was" in power_model("l4").basis


def test_power_rises_with_what_is_reached_and_never_beyond_the_limit() -> None:
    grid = np.linspace(0, 1, 11)
    assert np.all(np.diff(power_share(grid, 0.0)) >= 0)
    assert np.all(np.diff(power_share(0.0, grid)) >= 0)
    assert power_share(1.0, 1.0) == 1.0
    assert power_share(0.0, 0.0) == pytest.approx(power_model("b200").idle)


def test_a_fit_finds_the_parameters_that_made_its_rows() -> None:
    rng = np.random.default_rng(5)
    kinds = {}
    for name, most in (("a", (1.0, 0.05)), ("b", (0.3, 0.3)), ("c", (0.6, 0.1))):
        memory, compute = rng.random(400) * most[0], rng.random(400) * most[1]
        memory[0] = compute[0] = 0.0
        kinds[name] = (memory, compute, 500 * (0.2 + 0.3 * memory**0.5 + 0.4 * compute**0.7))
    found = fit_power(kinds, 500.0)
    wanted = {"idle": 0.2, "memory": 0.3, "memory_exponent": 0.5, "compute": 0.4, "compute_exponent": 0.7}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0.02)
    assert (found["low"], found["high"]) == pytest.approx((1.0, 1.0), abs=0.01)
