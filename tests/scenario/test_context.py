"""memory.max_model_len: answers end at it, prompts beyond it are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly.experiment import resolve


def a_trace(folder: Path, *lengths: tuple[int, int]) -> str:
    file = folder / "trace.csv"
    rows = (f"{i},{prompt},{output}\n" for i, (prompt, output) in enumerate(lengths))
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(rows))
    return str(file)


def of(trace: str, **memory: Any) -> Scenario:
    return Scenario.from_mapping(
        {
            "model": "qwen3-8b",
            "hardware": "h200",
            "serving_stack": "vllm",
            "workload": {"trace": trace},
            "memory": memory,
        }
    )


def test_answers_end_at_the_limit_and_longer_prompts_are_rejected(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, (50, 50), (50, 51), (99, 10), (100, 1), (500, 5), (10, 5))
    result = simulate(of(trace, max_model_len=100))
    frame = result.requests
    assert list(frame["status"]) == ["finished"] * 3 + ["rejected"] * 2 + ["finished"]
    assert list(frame["output_tokens"][[0, 1, 2, 5]]) == [50, 50, 1, 5]
    assert any("cuts the answers of 2 of 6 requests" in note for note in result.manifest["notes"])


def test_a_limit_beyond_all_requests_changes_nothing(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, (50, 50), (800, 51))
    plain, limited = (simulate(of(trace, **given)).requests for given in ({}, {"max_model_len": 20_000}))
    assert plain.equals(limited)


def test_a_limit_above_the_models_own_context_is_said_to_be_one(tmp_path: Path) -> None:
    built = resolve(of(a_trace(tmp_path, (50, 50)), max_model_len=100_000))
    assert any("the model's config ends at 40,960 tokens" in note for note in built.manifest["notes"])


def test_vllm_does_not_start_where_the_cache_holds_no_such_request(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="does not hold one request of 40,000 tokens"):
        resolve(of(a_trace(tmp_path, (50, 50)), max_model_len=40_000, gpu_memory_utilization=0.15))


def test_pools_of_one_model_have_one_limit(tmp_path: Path) -> None:
    settings = of(a_trace(tmp_path, (50, 50))).settings()
    settings["pools"] = {"prefill": {"role": "prefill"}, "decode": {"role": "decode", "memory": {"max_model_len": 100}}}
    with pytest.raises(ScenarioError, match="have different ones \\(100 and none\\)"):
        resolve(Scenario.from_mapping({**settings, "links": {"net": {}}}))
