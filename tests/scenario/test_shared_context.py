"""Scenarios whose devices share sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.errors import ScenarioError
from sim.launch import scenario_from
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build

LOAD = {
    "arrivals": {"process": "poisson", "rate_per_s": 0.5},
    "prompt_tokens": 30_000,
    "output_tokens": 40,
    "requests": 12,
}


def scenario(parallel: dict[str, int], **settings: Any) -> Scenario:
    given = {
        "model": "deepseek-v3",
        "hardware": "h200",
        "workload": LOAD,
        "parallel": {"tensor": 8, "expert": 8, **parallel},
    }
    return Scenario.from_mapping(given | settings)


def test_more_sequences_are_there_at_once_where_devices_share_them() -> None:
    tight = {"memory": {"kv_blocks": 6_000}}
    alone, shared = (simulate(build(scenario(each, **tight))) for each in ({}, {"decode_context": 8}))
    assert shared.summary["ttft_s"]["mean"] < 0.95 * alone.summary["ttft_s"]["mean"]
    assert shared.summary["kv_utilization"]["max"] < 0.5 < 0.9 < alone.summary["kv_utilization"]["max"]
    assert build(scenario({"decode_context": 8}, **tight)).hosted[0].block_tokens == 128


def test_degrees_of_one_are_the_same_run_to_the_nanosecond() -> None:
    plain, said = (
        simulate(build(scenario(each))).columns.requests
        for each in ({}, {"decode_context": 1, "prefill_context": 1, "kv_interleave": 1})
    )
    for name, column in plain.items():
        np.testing.assert_array_equal(column, said[name])


def test_devices_are_counted_with_the_groups_that_share_prompts() -> None:
    found = simulate(build(scenario({"expert": 16, "prefill_context": 2})))
    assert scenario({"expert": 16, "prefill_context": 2}).parallel.gpus == 16
    assert found.summary["requests"]["finished"] == 12


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"serving_stack": "sglang", "scheduler": "sglang"},
            "decode_context with serving_stack sglang is not modelled",
        ),
        (
            {"decoding": {"method": "mtp", "num_speculative_tokens": 1, "acceptance": {"alpha": 0.8}}},
            "with decoding.method mtp",
        ),
        ({"memory": {"tiers": [{"kind": "host", "gib": 100}]}}, "with memory.tiers is not modelled"),
        (
            {"pools": {"p": {"role": "prefill"}, "d": {"role": "decode"}}, "links": {"net": {}}},
            "with a pool that can only prefill is not modelled",
        ),
    ],
)
def test_what_is_not_modelled_beside_it_is_one_sentence(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        build(scenario({"decode_context": 2}, **settings))


def test_flags_of_commands_are_read() -> None:
    command = "vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --enable-expert-parallel -dcp 4 --cp-kv-cache-interleave-size 2"
    read = scenario_from(command, hardware="h200").scenario.parallel
    assert (read.tensor, read.expert, read.decode_context, read.kv_interleave, read.prefill_context) == (8, 8, 4, 2, 1)
    groups = scenario_from("vllm serve deepseek-ai/DeepSeek-V3 -tp 8 -pcp 2 --enable-expert-parallel", hardware="h200")
    read = groups.scenario.parallel
    assert (read.tensor, read.expert, read.prefill_context) == (8, 16, 2)
