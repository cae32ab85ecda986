"""`memory.prefix_caching`: where it is on, what it changes, and what is said where a trace's ids are not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.errors import ScenarioError
from sim.plots.runs import timeline_figure
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from workloads import read_trace

ROWS = "\n".join(f"{i},120,3,1 2 3 4 {100 + 4 * i} {101 + 4 * i} {102 + 4 * i} {103 + 4 * i}" for i in range(6))
TRACE = f"arrival_s,prompt_tokens,output_tokens,prefix_blocks_16\n{ROWS}\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "shared.csv"
    path.write_text(TRACE)
    return path


def scenario(trace: Path, **settings: str) -> Scenario:
    found = Scenario.default().with_set(f"workload={{trace: {trace}}}")
    for key, value in settings.items():
        found = found.with_set(f"{key.replace('__', '.')}={value}")
    return found


@pytest.mark.parametrize(
    ("stack", "cache"),
    [("vllm", "blocks"), ("trtllm", "blocks"), ("sglang", "tree"), ("eager", None), ("ideal", None)],
)
def test_it_is_on_where_the_stack_has_it_on(trace: Path, stack: str, cache: str | None) -> None:
    built = resolve(scenario(trace, serving_stack=stack))
    assert built.experiment.hosted[0].prefix_cache == cache
    others = [note for note in built.manifest["notes"] if "evicted by vLLM's rules" in note]
    assert len(others) == (stack == "trtllm")
    said = [note for note in built.manifest["notes"] if "share a beginning" in note]
    assert len(said) == (cache is None)
    if said:
        assert said[0].startswith(
            f"The trace says which prompts share a beginning, and serving_stack {stack} has no prefix cache"
        )


def test_what_is_found_is_in_the_summary_and_the_requests(trace: Path) -> None:
    built = resolve(scenario(trace))
    result = simulate(built.experiment)
    assert result.summary["prefix_cache"] == {
        "hit_rate": 5 * 64 / 720, "queries": 720, "hits": 5 * 64, "hits_after_preemption": 0, "evictions": 0,
    }  # fmt: skip
    assert result.requests["prefix_hit_tokens"].tolist() == [0, 64, 64, 64, 64, 64]
    assert result.requests["computed_prompt_tokens"].tolist() == [120, 56, 56, 56, 56, 56]


def test_switched_off_the_run_is_that_of_a_trace_without_ids(trace: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(line.rpartition(",")[0] for line in TRACE.splitlines()) + "\n")
    off = resolve(scenario(trace, memory__prefix_caching="false"))
    assert "memory.prefix_caching is off: every prompt is computed in full." in "".join(off.manifest["notes"])
    without, with_ids = simulate(resolve(scenario(bare)).experiment), simulate(off.experiment)
    assert "prefix_cache" not in with_ids.summary
    for name, column in without.requests.items():
        assert column.tolist() == with_ids.requests[name].tolist(), name


def test_blocks_that_fit_no_ids_are_refused_in_a_sentence(trace: Path) -> None:
    with pytest.raises(ScenarioError, match="the trace's ids stand for 16 tokens each and a KV block holds 24"):
        resolve(scenario(trace, memory__block_tokens="24"))
    assert resolve(scenario(trace, memory__block_tokens="24", memory__prefix_caching="false"))


def test_ids_that_do_not_cover_the_prompt_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0]}\n')
    with pytest.raises(
        ValueError, match="line 1, column hash_ids: 1 ids of 512 tokens do not cover the prompt of 1100"
    ):
        read_trace(path)


def test_drafters_that_read_the_target_lose_a_block(trace: Path) -> None:
    eagle = scenario(
        trace,
        decoding="{method: eagle, num_speculative_tokens: 3, acceptance: {alpha: 0.7}, draft: {cost_ratio: 0.05}}",
    )
    assert resolve(eagle).experiment.hosted[0].prefix_drops_last
    assert not resolve(scenario(trace)).experiment.hosted[0].prefix_drops_last


@pytest.mark.parametrize(("model", "per_block", "share"), [("gpt-oss-20b", 1.0, "1/2"), ("gemma-3-12b", 5.0, "1/6")])
def test_layers_with_windows_leave_something_behind_in_vllms_cache(
    trace: Path, model: str, per_block: float, share: str
) -> None:
    built = resolve(scenario(trace, model=model, hardware="h200"))
    left = built.experiment.hosted[0].left_behind
    assert left is not None
    assert left.per_block == per_block
    # Windows of 128 and 1,024 tokens in blocks of 16: so many blocks at most have tokens that are still read.
    assert left.window_blocks == (9 if model == "gpt-oss-20b" else 65)
    assert f"about {share} of the cache can be found again" in "".join(built.manifest["notes"])
    for settings in ({"memory__prefix_caching": "false"}, {"serving_stack": "sglang"}):
        others = resolve(scenario(trace, model=model, hardware="h200", **settings))
        assert others.experiment.hosted[0].left_behind is None
        assert "layers with windows have passed" not in "".join(others.manifest["notes"])
    assert resolve(scenario(trace)).experiment.hosted[0].left_behind is None


def test_lpm_without_a_cache_says_that_it_sorts_by_nothing(trace: Path) -> None:
    asked = {"serving_stack": "sglang", "scheduler": "{policy: sglang, schedule_policy: lpm}"}
    note = "scheduler.schedule_policy is lpm and there is no radix cache: requests are served first come, first served."
    assert note not in resolve(scenario(trace, **asked)).manifest["notes"]
    assert note in resolve(scenario(trace, **asked, memory__prefix_caching="false")).manifest["notes"]


def test_a_scheduler_without_its_cache_has_none(trace: Path) -> None:
    asked = {"serving_stack": "sglang", "scheduler": "{policy: sglang, disable_radix_cache: true}"}
    built = resolve(scenario(trace, **asked))
    assert built.experiment.hosted[0].prefix_cache is None
    assert "scheduler.disable_radix_cache is on: every prompt is computed in full." in "".join(built.manifest["notes"])
    with pytest.raises(
        ScenarioError, match=r"memory\.prefix_caching is on and scheduler.disable_radix_cache is as well"
    ):
        resolve(scenario(trace, **asked, memory__prefix_caching="true"))


def test_the_picture_of_a_run_shows_the_share_that_is_found(trace: Path, tmp_path: Path) -> None:
    result = simulate(resolve(scenario(trace)).experiment)
    arguments: dict[str, Any] = {
        "iterations": result.columns.iteration_blocks,
        "last_end_ns": 0,
        "kv_blocks_total": [9],
    }
    figure = timeline_figure(requests=result.columns.requests, title="", **arguments)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels[2:4] == ["KV blocks used, %", "prompt found, %"]
    share = figure.axes[3].patches[0].get_data().values
    assert np.nanmax(share) == pytest.approx(100 * 64 / 120)
    bare = {name: column for name, column in result.columns.requests.items() if name != "prefix_hit_tokens"}
    assert len(timeline_figure(requests=bare, title="", **arguments).axes) == 5
