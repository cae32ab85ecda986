"""LoRA adapters in commands: what a run takes becomes settings, and everything else is said or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sim.errors import RooftraceError
from sim.launch import export, scenario_from
from sim.launch.chosen import Chosen
from sim.scenario.assembly import build

VLLM = "vllm serve {} --enable-lora"
SGLANG = "python -m sglang.launch_server --model-path {} --enable-lora"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize("start", [VLLM, SGLANG], ids=["vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "dense"),
    [(LLAMA, True), ("google/gemma-3-27b-it", True), ("deepseek-ai/DeepSeek-V3", False), ("Qwen/Qwen3-30B-A3B", False)],
)
def test_what_a_command_says_of_adapters_is_what_a_run_takes(start: str, model: str, dense: bool) -> None:
    short = ["workload={requests: 2, arrivals: {process: poisson, rate_per_s: 1}, prompt_tokens: 8, output_tokens: 2}"]
    tensor = "--tp-size 8" if start is SGLANG else "-tp 8"
    found = scenario_from(f"{start.format(model)} {tensor}", hardware="h200", assignments=short)
    build(found.scenario)
    assert (found.scenario.adapters is not None) == dense
    said = "the command's adapters are left out: adapters are modelled for dense models .* is another$"
    assert [bool(re.match(said, note)) for note in found.notes if "adapters" in note] == [not dense]


@pytest.mark.parametrize(("second", "same"), [("--max-loras 4", True), ("--max-loras 2", False)])
def test_pools_have_the_adapters_that_all_their_commands_say(second: str, same: bool) -> None:
    commands = [f"{VLLM.format(LLAMA)} --max-loras 4", f"{VLLM.format(LLAMA)} {second}"]
    found = scenario_from("\n".join(commands), hardware="h100-sxm")
    slots = found.scenario.settings().get("adapters", {}).get("max_loras")
    assert slots == (4 if same else None)
    assert any("commands say different adapters" in note for note in found.notes) != same


@pytest.mark.parametrize(
    ("start", "option"),
    [
        (VLLM, "--max-loras"), (VLLM, "--max-lora-rank"), (VLLM, "--max-cpu-loras"),
        (SGLANG, "--max-loras-per-batch"), (SGLANG, "--max-lora-rank"), (SGLANG, "--max-loaded-loras"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_of_slots_below_one_are_refused(start: str, option: str, value: int) -> None:
    with pytest.raises(RooftraceError, match=f"^{option} is at least 1; got {value}$"):
        scenario_from(f"{start.format(LLAMA)} {option} {value}")


@pytest.mark.parametrize(("start", "option"), [(VLLM, "--lora-modules"), (SGLANG, "--lora-paths")])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_notes_say_how_many_adapters_there_are(start: str, option: str, n: int) -> None:
    named = f"{option} {' '.join(f'a{at}=/x/{at}' for at in range(n))}" if n else ""
    found = scenario_from(f"{start.format(LLAMA)} {named}", hardware="h100-sxm")
    (note,) = (note for note in found.notes if "adapters.count" in note)
    assert re.search(rf"the command names {n or 'none'}, ", note)
    assert found.scenario.adapters is not None
    scenario: Any = found.scenario
    left = export(Chosen(scenario=scenario, reasons=()), "vllm" if start is VLLM else "sglang").left_out
    count = found.scenario.adapters.count
    assert f"the paths of the adapters (count {count}): name them with {option} NAME=PATH" in left
