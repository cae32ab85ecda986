"""`adapters`: what a scenario makes of them, what a run says of them, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwmodels.device import load_device
from policies.adapters import MaxLoras
from policies.vllm import Vllm
from policies.wrappers import Order
from sim.errors import ScenarioError
from sim.results import fact_rows
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from sim.serve.setup import set_up
from workloads import concat, read_trace

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
    assert adapters_of(popularity={"shares": [0, 1]})[1::2] == [0, 0]
    assert 40 < adapters_of(base_share=0.5)[0] < 80
    plain, drawn = build(scenario(None)).workload, build(scenario({"count": 4})).workload
    np.testing.assert_array_equal(plain.sent_ns, drawn.sent_ns)
    np.testing.assert_array_equal(plain.prompt_tokens, drawn.prompt_tokens)


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
    assert isinstance(scheduler.inner, MaxLoras)
    assert isinstance(scheduler.inner.inner, Vllm)


def test_sequences_that_leave_keep_their_slot_from_the_release_on_that_counts_all_running_ones() -> None:
    def rule(release: str) -> bool:
        scheduler = build(scenario({"count": 2}, scheduler={"policy": "vllm", "release": release})).hosted[0].scheduler
        assert isinstance(scheduler, MaxLoras)
        return scheduler.counts_leaving

    assert (rule("0.32"), rule("0.33")) == (False, True)


@pytest.mark.parametrize(
    ("adapters", "settings", "says"),
    [
        ({"count": 2, "max_lora_rank": 8, "rank": 16}, {}, "max_lora_rank 8 has no room for an adapter of rank 16"),
        ({"count": 2, "max_lora_rank": 17}, {}, "max_lora_rank is one of 8, 16, 32, 64, 128, 256, 320, 512"),
        ({"count": 2, "max_loras": 3, "max_cpu_loras": 2}, {}, "max_cpu_loras is at least max_loras"),
        ({"count": 2, "popularity": "trace"}, {}, "popularity trace goes by a column adapter"),
        ({"count": 2, "popularity": {"shares": [1, 2, 3]}}, {}, "one number for each of the 2 adapters at most"),
        ({"count": 2, "popularity": {}}, {}, "give zipf or shares"),
        ({"count": 2}, {"scheduler": "sglang"}, "slots are modelled for schedulers that admit in the order of arrival"),
        ({"count": 2}, {"scheduler": {"policy": "vllm", "scheduling_policy": "priority"}}, "in the order of arrival"),
        ({"count": 2}, {"parallel": {"pipeline": 2}}, "adapters beside ranks, a pipeline or several micro-batches"),
        ({"count": 2}, {"model": "mixtral-8x7b"}, "adapters are modelled for dense models"),
        ({"count": 2, "placement": "apart"}, {"autoscale": AUTOSCALE}, "leave out one of the two"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(adapters: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        build(scenario(adapters, **settings))


TRACE = "arrival_s,prompt_tokens,output_tokens,adapter\n0.0,70,5,1\n0.1,70,5,\n0.2,70,5,0\n"


def test_a_trace_says_which_adapters_its_requests_ask_for(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(TRACE)
    trace = {"workload": {"trace": "log.csv"}}
    asked = build(scenario({"count": 2, "popularity": "trace"}, tmp_path, **trace)).workload.adapter
    assert asked is not None
    assert asked.tolist() == [1, -1, 0]
    with pytest.raises(ScenarioError, match="give popularity: trace"):
        build(scenario({"count": 2}, tmp_path, **trace))
    with pytest.raises(ScenarioError, match="adapter is a number below the 1 there are; got 1"):
        build(scenario({"count": 1, "popularity": "trace"}, tmp_path, **trace))
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
