"""`adapters`: what a scenario makes of them, what a run says of them, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwmodels.device import load_device
from policies.adapters import MaxLoras
from policies.vllm import Vllm
from policies.wrappers import EvictNewest, Order
from sim.errors import ScenarioError
from sim.results import fact_rows
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.adapters import adapter_cost_of
from sim.scenario.assembly.deployment import deployment_of
from sim.serve.setup import set_up
from workloads import check_adapters, concat, read_trace

DRAWN = {
    "arrivals": {"process": "poisson", "rate_per_s": 20.0},
    "prompt_tokens": 70,
    "output_tokens": 20,
    "requests": 120,
}

AUTOSCALE = {
    "policy": {"policy": "target_tracking", "measure": "concurrency", "target": 24},
    "max": 4,
    "provision_s": 10,
}

OWN = {"policy": "adapter", "apart": True}


def scenario(adapters: dict[str, Any] | None, folder: Path = Path(), **settings: Any) -> Scenario:
    given = {"model": "llama-3.1-8b", "scheduler": "vllm", "workload": DRAWN, "adapters": adapters, **settings}
    return Scenario.from_mapping(given, folder=folder)


def adapters_of(**given: Any) -> list[int]:
    column = build(scenario({"count": 4, **given})).workload.adapter
    assert column is not None
    return np.bincount(column + 1, minlength=5).tolist()


def test_adapters_are_drawn_by_their_popularity_and_leave_arrivals_and_lengths_as_they_are() -> None:
    base, *uniform = adapters_of()
    assert base == 0
    assert min(uniform) > 15
    assert adapters_of(popularity={"zipf": 3.0})[1] > 80
    assert adapters_of(popularity={"shares": [0, 1, 0, 1]})[1::2] == [0, 0]
    assert 40 < adapters_of(base_share=0.5)[0] < 80
    plain, drawn = build(scenario(None)).workload, build(scenario({"count": 4})).workload
    np.testing.assert_array_equal(plain.sent_ns, drawn.sent_ns)
    np.testing.assert_array_equal(plain.prompt_tokens, drawn.prompt_tokens)


def test_where_all_requests_ask_for_the_base_model_they_take_as_long_as_without_adapters() -> None:
    same = {"memory": {"kv_blocks": 400}, "replicas": 2}
    given, without = (
        simulate(build(scenario(adapters, **same))).columns.requests
        for adapters in ({"count": 3, "base_share": 1}, None)
    )
    for name, column in without.items():
        np.testing.assert_array_equal(given[name], column, err_msg=name)
    assert (given["adapter"] == -1).all()


def test_turns_of_a_session_and_samples_of_a_prompt_ask_for_one_adapter() -> None:
    talks = {"sessions": 12, "turns": 4, "user_tokens": 20, "answer_tokens": 10}
    workload = {"arrivals": DRAWN["arrivals"], "conversations": talks}
    found = resolve(scenario({"count": 5, "max_loras": 5}, workload=workload)).experiment.workload
    assert found.session is not None
    assert found.adapter is not None
    assert len({*zip(found.session.tolist(), found.adapter.tolist(), strict=True)}) == 12
    assert len({*found.adapter.tolist()}) > 1
    rollout = {"rollout": {"prompts": 8, "samples": 4, "steps": 2}, "prompt_tokens": 70, "output_tokens": 20}
    sampled = resolve(scenario({"count": 5, "max_loras": 5}, workload=rollout)).experiment.workload
    assert sampled.adapter is not None
    groups = sampled.adapter.reshape(-1, 4)
    assert (groups == groups[:, :1]).all()
    assert len({*groups[:, 0].tolist()}) > 1


def test_a_load_takes_no_less_than_its_bytes_over_the_link_to_the_host() -> None:
    def slot_s(rank: int) -> float:
        given = scenario({"count": 1, "rank": rank, "max_loras": 1}, hardware="h100-sxm")
        adapters = resolve(given).experiment.machines[0].hosted[0].adapters
        assert adapters is not None
        return adapters.slot_s(rank)

    # Rank 256 of Llama-3.1-8B: 256 rows and columns of 16 bits for each of the 32 layers' products.
    numbers = 256 * 32 * (4096 * 4 + 2 * 1024 + 2 * 4096 + 3 * (4096 + 14336))
    host = load_device("h100-sxm").host
    assert host is not None
    assert slot_s(256) == pytest.approx(2 * numbers / host.bytes_per_s, rel=1e-6)
    assert slot_s(16) < slot_s(256) / 2


def test_what_would_fit_counts_the_slots_of_adapters() -> None:
    slots = {"count": 1, "max_loras": 300, "max_lora_rank": 128}
    with pytest.raises(ScenarioError, match=r"it would fit with gb300 \(278 GB\); fewer adapters\.max_loras"):
        build(scenario(slots))
    build(scenario(slots, hardware="gb300"))


SGLANG = {"scheduler": "sglang", "serving_stack": "sglang"}


def test_slots_of_sglang_have_room_for_the_highest_rank_in_the_layers_that_are_named() -> None:
    def slots_mib(**given: Any) -> float:
        cost = adapter_cost_of(scenario({"count": 9, "max_loras": 1, **given}, **SGLANG), deployment_of(scenario(None)))
        assert cost is not None
        return cost.memory_bytes(range(32)) / 2**20

    # Rows and columns of 32 layers' products for each rank, in 16 bits.
    of_rank = 2 * 32 * (4096 * 4 + 2 * 1024 + 2 * 4096 + 3 * (4096 + 14336)) / 2**20
    ends = 2 * (128_256 + 4096) / 2**20
    shares = {"ranks": [8, 17], "shares": [0.9, 0.1]}
    assert slots_mib(rank=shares) == pytest.approx(17 * of_rank)
    assert slots_mib(rank=shares, max_loras=8) == pytest.approx(8 * 17 * of_rank)
    assert slots_mib(rank=shares, max_lora_rank=64) == pytest.approx(64 * of_rank)
    # SGLang allocates the embedding and the head twice where both are named.
    assert slots_mib(rank=1, target_modules=["all"]) == pytest.approx(of_rank + 4 * ends)
    assert slots_mib(rank=1, target_modules=["q_proj"]) == pytest.approx(2 * 32 * (3 * 4096 + 4096 + 2 * 1024) / 2**20)


def test_shares_of_ranks_are_those_of_the_adapters_and_each_costs_its_own() -> None:
    shares = {"ranks": [8, 16, 64], "shares": [0.5, 0.3, 0.2]}
    costs = {}
    for stack in ("vllm", "sglang"):
        given = scenario({"count": 100, "rank": shares}, scheduler=stack, serving_stack=stack)
        adapters = costs[stack] = resolve(given).experiment.machines[0].hosted[0].adapters
        assert adapters is not None
        assert [adapters.ranks.count(rank) for rank in (8, 16, 64)] == [50, 30, 20]
        assert {*adapters.ranks[:5]} == {8, 16, 64}
        assert adapters.disk_s(8) < adapters.disk_s(64)
    # Kernels of vLLM compute all rows of a slot, those of SGLang as many as the adapter has.
    assert costs["vllm"].step_s(10, [8]) == costs["vllm"].step_s(10, [64])
    assert costs["sglang"].step_s(10, [8]) < costs["sglang"].step_s(10, [64])


def test_steps_of_the_base_model_alone_launch_kernels_of_adapters_as_the_release_does() -> None:
    def base_step_s(stack: str, **settings: Any) -> float:
        given = scenario({"count": 2}, scheduler=stack, serving_stack=stack, **settings)
        adapters = resolve(given).experiment.machines[0].hosted[0].adapters
        assert adapters is not None
        assert adapters.step_s(10, [16]) > 0
        return adapters.step_s(10, [])

    assert base_step_s("vllm") == 0
    assert base_step_s("vllm", serving_release="0.8.5") > 0
    assert base_step_s("sglang") > 0


def test_defaults_are_those_of_the_engine() -> None:
    def slots(stack: str) -> tuple[int, int]:
        adapters = (
            resolve(scenario({"count": 20}, scheduler=stack, serving_stack=stack))
            .experiment.machines[0]
            .hosted[0]
            .adapters
        )
        assert adapters is not None
        return adapters.max_loras, adapters.max_cpu_loras

    assert slots("vllm") == (1, 1)
    assert slots("sglang") == (8, 20)


def test_slots_take_their_memory_from_the_cache_whatever_is_in_them() -> None:
    def blocks(**given: Any) -> int:
        return build(scenario({"count": 2, "rank": 8, **given})).hosted[0].kv_blocks

    # A slot of rank 16 is 85.0 MiB (the embedding and the head are of 128,256 tokens), and a block of 16 tokens 2 MiB.
    without, one, ten = (
        build(scenario(None)).hosted[0].kv_blocks,
        blocks(max_lora_rank=16),
        blocks(max_loras=10, max_lora_rank=16),
    )
    slot_mib = (2_621_440 + 2 * (128_256 + 4096)) * 16 * 2 / 2**20
    assert without - one == pytest.approx(slot_mib / 2, abs=1)
    assert without - ten == pytest.approx(10 * slot_mib / 2, abs=1)
    assert blocks(max_loras=10) > ten


def test_the_summary_has_what_ran_what_was_loaded_and_what_waited() -> None:
    asked = {"count": 6, "max_loras": 2, "max_cpu_loras": 3, "loaded_at_start": False}
    result = simulate(scenario(asked))
    found = result.summary["adapters"]
    assert found["max_loras"] == found["running_max"] == 2
    assert 1 < found["running_mean"] <= 2
    assert found["waiting_for_slot_mean"] > 0
    assert found["disk_loads"] >= 6
    assert found["slot_loads"] >= found["disk_loads"]
    # 55.6 ms of tensors and the bytes of rank 16 at 3 GB/s.
    assert found["disk_load_s"] / found["disk_loads"] == pytest.approx(0.0835, rel=0.01)
    rows = dict(fact_rows(result.summary))
    assert rows["Adapters"].startswith(f"{found['running_mean']:.3g} of 2 slots")
    assert "from disk" in rows["Adapter loads"]


def test_a_scenario_without_adapters_says_nothing_of_them() -> None:
    assert "adapters" not in simulate(scenario(None)).summary


def test_the_limit_stands_inside_what_orders_the_queue() -> None:
    scheduler = (
        build(scenario({"count": 2}, scheduler={"policy": "order", "by": "priority", "inner": "vllm"}))
        .hosted[0]
        .scheduler
    )
    assert isinstance(scheduler, Order)
    assert scheduler.inner == Vllm(max_loras=1)


def test_schedulers_without_a_rule_of_their_own_are_held_to_the_limit_from_outside() -> None:
    for stack, counts_base in (("vllm", False), ("sglang", True)):
        given = scenario({"count": 2, "max_loras": 2}, scheduler="sarathi", serving_stack=stack)
        scheduler = build(given).hosted[0].scheduler
        assert isinstance(scheduler, EvictNewest)
        assert isinstance(scheduler.inner, MaxLoras)
        assert scheduler.inner.counts_base is counts_base


@pytest.mark.parametrize(
    ("adapters", "settings", "says"),
    [
        ({"count": 2, "max_lora_rank": 8, "rank": 16}, {}, "max_lora_rank 8 has no room for an adapter of rank 16"),
        ({"count": 2, "max_lora_rank": 17}, {}, r"adapters: max_lora_rank is one of 8, 16, 32, 64, 128, 256, 320, 512; got 17"),
        ({"count": 1, "rank": [8, 16]}, {}, "adapters: rank lists 2 ranks and count is 1; give one rank, or as many"),
        ({"count": 1, "rank": []}, {}, "adapters: rank lists 0 ranks and count is 1; give one rank"),
        ({"count": 2, "max_loras": 3, "max_cpu_loras": 2}, {}, "give adapters.max_cpu_loras of at least 3, or leave it out"),
        ({"count": 2, "popularity": "trace"}, {}, "popularity trace goes by a column adapter"),
        ({"count": 2, "popularity": {"shares": [1, 2, 3]}}, {}, "has 3 numbers and count is 2; give a number for each"),
        ({"count": 40, "popularity": {"shares": [0.5, 0.5]}}, {}, "has 2 numbers and count is 40; .* or count: 2$"),
        ({"count": 2, "popularity": {}}, {}, "give zipf or shares"),
        ({"count": 2}, {"scheduler": "trtllm"}, "slots are modelled for schedulers that admit in the order of arrival"),
        ({"count": 2}, {"scheduler": {"policy": "vllm", "max_loras": 2}}, "a scenario says it as adapters.max_loras"),
        ({"count": 2, "eviction": "fifo"}, {}, "the adapter used longest ago gives up its slot; leave it out"),
        ({"count": 2, "target_modules": ["q"]}, {}, "target_modules are among q_proj"),
        ({"count": 2, "rank": {"ranks": [8, 16], "shares": [1]}}, {}, "one number for each of the ranks"),
        ({"count": 2}, {"parallel": {"pipeline": 2}}, "adapters beside ranks, a pipeline or several micro-batches"),
        ({"count": 2}, {"model": "mixtral-8x7b"}, "adapters are modelled for dense models"),
        ({"count": 2, "placement": "apart"}, {"autoscale": AUTOSCALE}, "leave out one of the two"),
        ({"count": 2}, {"autoscale": AUTOSCALE, "router": OWN}, "leave out one of the two"),
        ({"count": 2, "placement": "apart"}, {"replicas": 4, "router": OWN}, "both say .* leave out one of the two"),
        ({"count": 2}, {"replicas": 2, "router": {**OWN, "each": 5}}, "router: each adapter has 5 machines, and there are 2; "),
        ({"count": 2}, {"replicas": 2, "router": {"policy": "reserve", "machines": 1, "inner": {**OWN, "each": 5}}}, "there are 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(adapters: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        build(scenario(adapters, **settings))


@pytest.mark.parametrize(
    ("popularity", "says"),
    [
        ({"zipf": "a"}, "adapters.popularity.zipf is a number; got 'a'"),
        ({"zipf": -1}, "adapters.popularity.zipf is a number at least 0; got -1"),
        ({"zipf": 1, "share": [1]}, "adapters.popularity.share is not a setting; did you mean shares?"),
        ({"shares": [-1, 2]}, "adapters.popularity.shares.0 is a number at least 0; got -1"),
        ({}, "adapters.popularity: give zipf or shares, one of the two"),
        ("zipf", "adapters.popularity is one of uniform, trace; got 'zipf'"),
        ([1, 2], "adapters.popularity is one of uniform, trace; got [1, 2]"),
    ],
)
def test_a_popularity_that_is_none_is_one_sentence_about_one_setting(popularity: Any, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario({"count": 2, "popularity": popularity})
    assert str(caught.value).endswith(f": {says}")


def test_what_is_wrong_with_each_kind_of_a_value_counts_once_beside_other_settings() -> None:
    with pytest.raises(
        ScenarioError, match=r"adapters.count is a number at least 1; got 0 \(2 more settings are wrong\)$"
    ):
        scenario({"count": 0, "base_share": 2, "popularity": {"zipf": "a"}})


@pytest.mark.parametrize(
    "router", ["adapter", {"policy": "llm_d", "adapter": 3}, {"policy": "reserve", "machines": 1, "inner": "adapter"}]
)
def test_a_router_that_goes_by_adapters_is_refused_where_there_are_none(router: Any) -> None:
    with pytest.raises(
        ScenarioError, match="routes by the LoRA adapters that machines have, and the scenario has none"
    ):
        build(scenario(None, replicas=2, router=router))
    build(scenario({"count": 2}, replicas=2, router=router))


def test_a_score_of_adapters_is_what_is_left_where_nothing_says_how_prompts_begin() -> None:
    def said(**weights: float) -> str:
        router = {"policy": "llm_d", **weights}
        (note,) = [
            each
            for each in resolve(scenario({"count": 2}, replicas=2, router=router)).manifest["notes"]
            if "finds nothing anywhere" in each
        ]
        return note

    assert said(adapter=3.0).endswith("goes by loads and adapters alone.")
    assert said().endswith("goes by loads alone.")


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"max_cpu_loras": 100_000}, 40), ({"max_loras": 3}, 3), ({"max_loras": 3, "max_cpu_loras": 5}, 5)],
)
def test_a_note_says_how_much_host_memory_the_adapters_take_that_it_keeps(given: dict[str, Any], kept: int) -> None:
    asked = {"count": 40, "rank": [*[8] * 35, *[64] * 5], **given}
    # A and B of Llama-3.1-8B's linear layers, 16 bits each, for each rank; the five of rank 64 are the largest.
    rank_bytes = 2 * 32 * (4096 * 4 + 2 * 1024 + 2 * 4096 + 3 * (4096 + 14336))
    gib = rank_bytes * (min(kept, 5) * 64 + max(kept - 5, 0) * 8) / 2**30
    (note,) = [each for each in resolve(scenario(asked)).manifest["notes"] if "host memory" in each]
    assert f"Up to {kept} adapters take {gib:.3g} GiB of host memory for each device" in note


TRACE = "arrival_s,prompt_tokens,output_tokens,adapter\n0.0,70,5,1\n0.1,70,5,\n0.2,70,5,0\n"


def test_a_trace_says_which_adapters_its_requests_ask_for(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(TRACE)
    trace = {"workload": {"trace": "log.csv"}}
    asked = build(scenario({"count": 2, "popularity": "trace"}, tmp_path, **trace)).workload.adapter
    assert asked is not None
    assert asked.tolist() == [1, -1, 0]
    with pytest.raises(ScenarioError, match="give popularity: trace"):
        build(scenario({"count": 2}, tmp_path, **trace))
    with pytest.raises(
        ScenarioError, match=r"request 1 of the trace, which arrives at 0 s, asks for adapter 1, .* the 1 there are"
    ):
        build(scenario({"count": 1, "popularity": "trace"}, tmp_path, **trace))
    with pytest.raises(ValueError, match="request 1 of the trace asks for adapter 1"):
        check_adapters(read_trace(tmp_path / "log.csv").behind(2), 1)
    notes = resolve(scenario(None, tmp_path, **trace)).manifest["notes"]
    assert any("no section adapters" in note for note in notes)
    plain = read_trace(tmp_path / "log.csv")
    plain.to_csv(tmp_path / "again.csv")
    both = concat([plain, read_trace(tmp_path / "again.csv")]).adapter
    assert both is not None
    assert both.tolist() == [1, -1, 0] * 2


def test_an_endpoint_serves_no_adapters() -> None:
    with pytest.raises(ScenarioError, match="leave adapters out"):
        set_up(scenario({"count": 2}))
