"""Device-hours, money and energy of runs that can be counted by hand, and the fit of the power model on rows that it has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sim
from hwmodels.power import fit_power, power_model, power_share
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
