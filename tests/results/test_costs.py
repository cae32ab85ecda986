"""Device-hours, money, power and energy of runs that can be counted by hand."""

from __future__ import annotations

import itertools
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sim
from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import load_model
from hwmodels.power import basis_of, power_model
from hwmodels.totals import Totals
from sim.engine import Columns
from sim.errors import ScenarioError
from sim.results.costs import costs_of
from sim.scenario import Scenario
from sim.scenario.assembly import deployment_of

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
        "hardware": {"name": "h100-sxm", "tdp_w": 700.0, "price_usd_per_hour": 3600.0, "sources": {}},
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
    """The KV share of a decode step of one sequence is its bytes over all bytes: 200 tokens behind 100 are a thousandth of an 8B
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


LAYERS, WIDTH, INNER, WORDS, KV_WIDTH = 32, 4096, 14336, 128256, 1024
"""Llama-3.1-8B, from its config.json."""


def by_hand(result: Any, prompt_tokens: int) -> dict[str, float]:
    """Work, energy and the share of prompts of a run of llama-3.1-8b on one H100 whose prompts run whole, iteration by iteration:
    weights are read once, two operations a weight and row, four a pair of query and key and channel, two bytes everywhere."""
    iterations = result.columns.iterations()
    prefill, decode, kv = (iterations[name].astype(float) for name in ("prefill_tokens", "decode_tokens", "kv_tokens"))
    seconds = iterations["duration_ns"] * 1e-9
    weights = LAYERS * (2 * WIDTH**2 + 2 * WIDTH * KV_WIDTH + 3 * WIDTH * INNER)
    head, kv_bytes, pair = WIDTH * WORDS, 2 * 2 * KV_WIDTH * LAYERS, 4 * WIDTH * LAYERS
    prompts = prefill / prompt_tokens
    flops_of_prompts = (
        2 * prefill * weights + 2 * prompts * head + pair * prompts * prompt_tokens * (prompt_tokens + 1) / 2
    )
    flops_of_decodes = 2 * decode * (weights + head) + pair * kv
    n_bytes = 2 * (weights + head) + kv_bytes * (kv + prefill + decode)
    peak_flops, peak_bytes = 989.4e12, 3.35e12

    def alone_s(flops: Any, kv_tokens: Any, rows: Any) -> Any:
        read = 2 * (weights + head) + kv_bytes * kv_tokens
        return np.maximum(flops / peak_flops, read / peak_bytes) * (rows > 0)

    of_prompts, of_decodes = alone_s(flops_of_prompts, prefill, prefill), alone_s(flops_of_decodes, kv + decode, decode)
    flops = flops_of_prompts + flops_of_decodes
    # Of 4 query heads a KV head kernels multiply 64 rows.
    multiplied = flops + 15 * pair * (kv + decode) * (decode > 0)
    rows, no = (prefill + decode).astype(np.int64), np.zeros(len(prefill), np.int64)
    cost = Calibrated.for_stack("vllm")(load_model("llama-3.1-8b"), load_device("h100-sxm"))
    still_s = cost.work(Totals(rows, *[no] * 9)).still_s
    multiplying = 1 - still_s / seconds
    terms = tomllib.loads((Path(sim.__file__).parents[1] / "hwmodels" / "power.toml").read_text())["h100-sxm"]
    share = np.minimum(
        1.0,
        terms["idle"]
        + terms["memory"] * n_bytes / seconds / peak_bytes
        + terms["compute"] * multiplying * (multiplied / seconds / multiplying / peak_flops) ** (1 / 4),
    )
    return {
        **terms,
        "flops": float(flops.sum()),
        "hbm_bytes": float(n_bytes.sum()),
        "prompt_share": float((of_prompts / (of_prompts + of_decodes) * seconds).sum() / seconds.sum()),
        "busy_joule": float(700.0 * (share * seconds).sum()),
        "busy_s": float(seconds.sum()),
        "peak_watt": float(700.0 * share.max()),
    }


@pytest.mark.parametrize("rate_per_s", [1.0, 10.0])
def test_energy_and_its_split_are_those_counted_iteration_by_iteration(rate_per_s: float) -> None:
    result = sim.simulate(
        Scenario.from_mapping(
            {
                "scheduler": {"policy": "vllm"},
                "workload": {
                    "requests": 30,
                    "prompt_tokens": 700,
                    "output_tokens": 200,
                    "arrivals": {"process": "poisson", "rate_per_s": rate_per_s},
                },
                "costs": {"usd_per_device_hour": 3.0, "pue": 1.5},
            }
        )
    )
    hand, meta, found = by_hand(result, 700), result.columns.meta, result.summary["costs"]
    assert meta["flops"] == pytest.approx(hand["flops"], rel=1e-6)
    assert meta["hbm_bytes"] == pytest.approx(hand["hbm_bytes"], rel=1e-3)
    assert found["prompt_share"] == pytest.approx(hand["prompt_share"], rel=1e-3)
    requests = result.columns.requests
    span_s = (requests["finish_ns"].max() - requests["arrival_ns"].min()) / 1e9
    joule = 1.5 * (hand["busy_joule"] + 700.0 * hand["idle"] * (span_s - hand["busy_s"]))
    assert found["joule"] == pytest.approx(joule, rel=1e-3)
    assert found["joule_low"] == pytest.approx(hand["watt"][0] * joule, rel=1e-3)
    assert found["joule_high"] == pytest.approx(min(hand["watt"][1] * joule, 1.5 * 700.0 * span_s), rel=1e-3)
    assert found["mean_w_high"] == pytest.approx(found["joule_high"] / span_s)
    assert found["joule_per_output_token_low"] == pytest.approx(hand["joule"][0] * joule / 6000, rel=1e-3)
    assert found["joule_per_output_token_high"] == pytest.approx(hand["joule"][1] * joule / 6000, rel=1e-3)
    assert found["tdp_joule"] == pytest.approx(1.5 * 700.0 * span_s)
    assert found["joule_per_output_token"] == pytest.approx(found["joule"] / 6000)
    usd = 3.0 * span_s / 3600
    assert found["usd_per_m_input"] == pytest.approx(usd * hand["prompt_share"] / 21_000 * 1e6, rel=1e-3)
    assert found["usd_per_m_generated"] == pytest.approx(usd * (1 - hand["prompt_share"]) / 6_000 * 1e6, rel=1e-3)


def test_machines_that_are_off_cost_nothing() -> None:
    """One machine for 20 s, and one more from then on, which takes 10 s to start."""
    result = sim.simulate(
        Scenario.from_mapping(
            {
                "scheduler": {"policy": "vllm"},
                "autoscale": {
                    "policy": {"policy": "schedule", "at_s": [0, 20], "machines": [1, 2]},
                    "max": 3,
                    "interval_s": 5,
                    "start": {"load": 10},
                },
                "workload": {
                    "requests": 31,
                    "prompt_tokens": 10,
                    "output_tokens": 2,
                    "arrivals": {"process": "deterministic", "rate_per_s": 1},
                },
                "costs": {"usd_per_device_hour": 3.6},
            }
        )
    )
    requests, found = result.columns.requests, result.summary["costs"]
    end_s, begin_s = requests["finish_ns"].max() / 1e9, requests["arrival_ns"].min() / 1e9
    paid_s = (end_s - begin_s) + (end_s - 20)
    assert found["device_hours"] == pytest.approx(paid_s / 3600)
    assert found["usd"] == pytest.approx(paid_s / 1000)
    assert found["tdp_joule"] == pytest.approx(700 * paid_s)


def a_fleet(seed: int) -> Scenario:
    """Machines that fail, come and go, requests that are lost, rejected, held to the end or never sent: anything of these."""
    rng = random.Random(seed)
    closed = {"process": "closed_loop", "concurrency": rng.randrange(1, 6)}
    poisson = {"process": "poisson", "rate_per_s": rng.choice([2.0, 10.0])}
    failures: dict[str, Any] = {
        "in_flight": rng.choice(["resume", "retry", "lose", "lose"]),
        "when_none": rng.choice(["wait", "lose", "lose"]),
        "times": [
            {"machine": machine, "at_s": rng.random() * 2, "for_s": rng.choice([None, None, None, 1.0])}
            for machine in range(rng.choice([0, 1, 2, 2, 2]))
        ],
        **({"mean_up_s": 3.0, "mean_down_s": 1.0} if rng.random() < 0.4 else {}),
    }
    autoscale = {"policy": {"policy": "concurrency", "target": 3}, "max": 4, "interval_s": 0.5, "start": {"load": 0.7}}
    return Scenario.from_mapping(
        {
            "model": "llama-3.2-3b",
            "scheduler": {"policy": "vllm"},
            "seed": seed,
            "replicas": 2,
            "parallel": {"tensor": rng.choice([1, 2])},
            "memory": {"kv_blocks": rng.choice([20, 60, 2000])},
            "workload": {
                "requests": 12,
                "prompt_tokens": {"distribution": "uniform", "min_tokens": 50, "max_tokens": 600},
                "output_tokens": {"distribution": "uniform", "min_tokens": 1, "max_tokens": 1500},
                "arrivals": closed if rng.random() < 0.3 else poisson,
            },
            "failures": failures,
            "costs": {"usd_per_device_hour": 3600.0, "pue": 1.2},
            **({"autoscale": autoscale} if rng.random() < 0.25 else {}),
            **({"window": {"from_s": 0.0}} if rng.random() < 0.2 else {}),
        }
    )


def test_hours_money_and_joules_are_of_one_time_whatever_is_lost() -> None:
    unlike = 0
    for seed in range(12, 24):
        scenario = a_fleet(seed)
        result = sim.simulate(scenario)
        found, meta = result.summary["costs"], result.columns.meta
        iterations, requests = result.columns.iterations(), result.columns.requests
        # By the machines' own log: a change of state counts until the next, or until the last thing that is done.
        last_ns = max(
            int((iterations["start_ns"] + iterations["duration_ns"]).max(initial=-1)), requests["finish_ns"].max()
        )
        sent_ns = requests["arrival_ns"][requests["arrival_ns"] >= 0]
        begin_ns, paid_ns = int(sent_ns.min()), 0
        unlike += last_ns != requests["finish_ns"].max()
        log = meta["fleet"]["log"]
        for machine in range(len(meta["fleet"]["pools"])):
            rows = [
                (at, state)
                for at, of, state in zip(log["at_ns"], log["machine"], log["state"], strict=True)
                if of == machine
            ]
            for (at, state), (until, _) in itertools.pairwise([*rows, (last_ns, 0)]):
                paid_ns += (state > 0) * max(0, min(until, last_ns) - max(at, begin_ns))
        devices = scenario.parallel.tensor
        assert found["device_hours"] * 3600 == pytest.approx(devices * paid_ns * 1e-9)
        assert found["usd"] == pytest.approx(devices * paid_ns * 1e-9)
        assert found["tdp_joule"] == pytest.approx(1.2 * 700 * devices * paid_ns * 1e-9)
        assert sum(meta["busy_s"]) <= paid_ns * 1e-9 + 1e-6
        idle = power_model("h100-sxm").idle * found["tdp_joule"]
        assert idle * (1 - 1e-9) <= found["joule"] <= found["tdp_joule"] * (1 + 1e-9)
        span_s = (last_ns - begin_ns) * 1e-9
        assert found["mean_w"] == (pytest.approx(found["joule"] / span_s) if last_ns > begin_ns else None)
        if result.summary["window"]["rule"] == "whole":
            assert result.summary["fleet"]["machine_hours"] * devices == pytest.approx(found["device_hours"])
            assert result.summary["makespan_s"] == pytest.approx(max(span_s, 0.0))
    assert unlike > 2


def test_a_run_whose_requests_are_all_lost_is_paid_all_the_same() -> None:
    """Twenty requests of 2,000 tokens from 0 s on, and the only machine fails for good at 5 s, in the middle of an iteration."""
    lost = {"times": [{"machine": 0, "at_s": 5}], "in_flight": "lose", "when_none": "lose"}
    workload = {
        "requests": 20,
        "prompt_tokens": 100,
        "output_tokens": 2000,
        "arrivals": {"process": "deterministic", "rate_per_s": 2},
    }
    found = costs(failures=lost, workload=workload, costs={"usd_per_device_hour": 3600.0})
    assert found["requests"]["lost"] == 20
    assert found["costs"]["usd"] == pytest.approx(found["makespan_s"])
    assert 4.4 < found["costs"]["usd"] < 5.0
    assert found["costs"]["joule"] < 700 * found["costs"]["usd"]


def test_what_was_not_measured_says_so_and_lies_in_a_wider_interval() -> None:
    assert basis_of(["b200", "b200", "h100-sxm"]) == "measured on b200 and h100-sxm"
    assert (
        basis_of(["l4", "l4", "h200"])
        == "shares of TDP as measured on h100-sxm and b200 and a100-40gb-sxm, not on l4 and h200"
    )
    assert basis_of(["l4", "b200"]).startswith("measured on b200; shares of TDP as measured on")
    lent = power_model("l4")
    assert lent == power_model("h200")
    for name in ("b200", "h100-sxm", "a100-40gb-sxm"):
        own = power_model(name)
        for theirs, mine in ((lent.watt, own.watt), (lent.joule, own.joule)):
            assert theirs[0] <= mine[0] < 1 < mine[1] <= theirs[1]


def test_power_of_a_known_step_by_hand() -> None:
    """A decode of 32 sequences with 1,000 cached tokens each on llama-3.1-8b and one H100, in 10 ms."""
    model = power_model("h100-sxm")
    n_bytes = 2 * 7.505e9 + 32 * 1001 * 131_072  # weights without the embedding, keys and values
    flops = 2 * 7.505e9 * 32 + 32 * 1001 * 4 * 4096 * 32
    memory, arithmetic = n_bytes / 0.010 / 3.35e12, flops / 0.010 / 989.4e12
    tiles = 15 * 32 * 1001 * 4 * 4096 * 32  # 64 rows are multiplied for the 4 query heads of a KV head
    multiplied = arithmetic + tiles / 0.010 / 989.4e12
    cost = deploy(model="llama-3.1-8b", hardware="h100-sxm").cost
    work = cost.work(Totals(32, 0, 0, 0, 0, 32, 32 * 1001, 32))
    still = 0.1  # norms, of which a roofline knows nothing
    assert work.still_s == 0.0
    share = model.idle + model.memory * memory + model.compute * (1 - still) * (multiplied / (1 - still)) ** (1 / 4)
    multiplied = work.flops + work.tile_flops
    reached = work.hbm_bytes / 0.010 / cost.peak_bytes_per_s, multiplied / 0.010 / cost.peak_flops_per_s
    assert float(model.iteration_share(*reached, still)) == pytest.approx(share, rel=1e-3)
    assert 0.5 < share < 1.0


WORKLOAD = {
    "requests": 20, "prompt_tokens": 300, "output_tokens": 50, "arrivals": {"process": "poisson", "rate_per_s": 50.0},
}  # fmt: skip


def test_less_is_drawn_while_kernels_stream_and_send(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.from_mapping(
        {"hardware": "h100-sxm", "cost_model": "calibrated", "parallel": {"tensor": 2}, "workload": WORKLOAD}
    )
    joule, work = sim.simulate(scenario).summary["costs"]["joule"], LayerwiseCost.work
    monkeypatch.setattr(LayerwiseCost, "work", lambda cost, totals: work(cost, totals)._replace(still_s=0.0))
    assert joule < 0.99 * sim.simulate(scenario).summary["costs"]["joule"]


def test_power_rises_with_what_is_reached_and_never_beyond_the_limit() -> None:
    grid, model = np.linspace(0, 1, 11), power_model("b200")
    assert np.all(np.diff(model.iteration_share(grid, 0.0)) >= 0)
    assert np.all(np.diff(model.iteration_share(0.0, grid)) >= 0)
    assert np.all(np.diff(model.iteration_share(0.2, 0.1, grid)) <= 0)
    # Kernels multiply for a twentieth of the time at least.
    nearly, least, none = model.iteration_share(0.2, 0.001, np.array([0.9, 0.95, 1.0]))
    assert nearly > least == pytest.approx(none)
    assert model.iteration_share(1.0, 1.0) == 1.0
    assert model.limited(500.0, 1000.0).iteration_share(1.0, 1.0) == 0.5


def test_a_lower_limit_slows_arithmetic_down_and_not_the_memory() -> None:
    full, half = Scenario.from_mapping({}), Scenario.from_mapping({"hardware": {"power_limit_w": 350}})
    # What a device draws beyond idling goes by the cube of its clock.
    idle = power_model("h100-sxm").idle
    clock = ((0.5 - idle) / (1.0 - idle)) ** (1 / 3)
    prompts = Totals(16384, 16384, 8, 8 * 2048 * 2049 // 2, 16384, 0, 0, 8)
    decodes = Totals(8, 0, 0, 0, 0, 8, 8 * 500, 8)
    slower, slow = (
        deployment_of(half).cost.iteration_s(each) / deployment_of(full).cost.iteration_s(each)
        for each in (prompts, decodes)
    )
    assert slower == pytest.approx(1 / clock, rel=0.05)
    assert 1.0 <= slow < 1.02


def test_devices_under_a_limit_draw_no_more_and_take_less_energy() -> None:
    limited = sim.simulate(Scenario.from_mapping({**ALONE, "hardware": {"power_limit_w": 350}}))
    full, half = costs(), limited.summary
    (note,) = [note for note in limited.manifest["notes"] if "power_limit_w 350" in note]
    assert note.endswith("no measurement of a limit is behind it.")
    assert limited.manifest["hardware"]["power_limit_w"] == 350.0
    assert half["costs"]["mean_w"] <= half["costs"]["mean_w_high"] <= 350.0 < full["costs"]["mean_w"]
    assert half["costs"]["tdp_joule"] == pytest.approx(350 / 700 * full["costs"]["tdp_joule"], rel=0.1)
    assert half["costs"]["joule_per_output_token"] < full["costs"]["joule_per_output_token"]


def test_a_power_limit_is_a_setting_of_the_hardware_and_of_a_pool() -> None:
    base = Scenario.from_mapping({"hardware": {"name": "b200", "power_limit_w": 700}})
    assert (base.hardware, base.power_limit_w) == ("b200", 700.0)
    assert Scenario.from_mapping({}).with_set("hardware.power_limit_w=500").power_limit_w == 500.0
    pools = base.with_set("pools={a: {}, b: {hardware: l4}, c: {hardware: {power_limit_w: 600}}}")
    assert [pools.pool(name).power_limit_w for name in "abc"] == [700.0, None, 600.0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hardware": {"power_limit_w": 800}}, "power_limit_w lies above"),
        ({"hardware": {"power_limit_w": 10}}, "power_limit_w lies above"),
        ({"hardware": {"power_limit_w": 0}}, "power_limit_w is a number above 0"),
        ({"hardware": {"power_limit": 500}}, "hardware has no power_limit; did you mean power_limit_w?"),
        (
            {"power_limit_w": 500, "cost_model": "roofline"},
            "cost_model roofline and processors have their arithmetic at any power",
        ),
    ],
)
def test_power_limits_that_cannot_be_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        costs(**settings)
