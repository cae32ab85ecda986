"""Acceptance that a benchmark's server is made to have, written and read back."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from sim.errors import RooftraceError
from sim.launch import export, scenario_from
from sim.launch.chosen import Chosen
from sim.scenario import Scenario

PER_POSITION = {"per_position": [0.9, 0.8, 0.5], "kind": "conditional"}


def drafting(acceptance: Any = PER_POSITION, **given: Any) -> Scenario:
    decoding = {"method": "mtp", "num_speculative_tokens": 3, "acceptance": acceptance, **given}
    return Scenario(model="deepseek-v3", hardware="h200", precision="fp8", parallel={"tensor": 8}, decoding=decoding)


def written(scenario: Scenario, target: str) -> tuple[str, tuple[str, ...]]:
    found = export(Chosen(scenario=scenario, reasons=()), target, forced_acceptance=True)
    return found.text, found.left_out


def config_of(text: str) -> dict[str, Any]:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return json.loads(words[words.index("--speculative-config") + 1])


def test_vllm_is_told_the_chance_that_all_drafts_up_to_each_are_accepted() -> None:
    config = config_of(written(drafting(), "vllm")[0])

    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.9, 0.72, 0.36]


@pytest.mark.parametrize(
    "acceptance",
    [
        {"alpha": 0.7},
        {"published": "deepseek-v3"},
        {"mean_length": 2.5},
        {"beta": {"mean": 0.7, "sd": 0.2}},
        PER_POSITION,
    ],
)
def test_rates_are_as_many_as_drafts_and_do_not_rise(acceptance: Any) -> None:
    k = 1 if "published" in acceptance else 3
    rates = config_of(written(drafting(acceptance, num_speculative_tokens=k), "vllm")[0])["synthetic_acceptance_rates"]

    # What the release checks of them (config/speculative.py).
    assert len(rates) == k
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert rates == sorted(rates, reverse=True)


def test_sglang_is_told_the_mean_tokens_of_a_step() -> None:
    text, left = written(drafting(), "sglang")

    assert re.search(r"^SGLANG_SIMULATE_ACC_LEN=2\.98 python -m sglang\.launch_server", text, re.MULTILINE)
    assert any("SGLang forces a mean length" in each for each in left)


def test_tensorrt_llm_is_not_told_and_the_number_to_force_is_named() -> None:
    _, left = written(drafting(), "trtllm")

    assert any("forced acceptance: 1.98 accepted drafts a step" in each for each in left)


def test_what_vllm_is_told_reads_back_as_the_same_acceptance() -> None:
    found = scenario_from(written(drafting(), "vllm")[0], hardware="h200")

    assert found.scenario.settings()["decoding"]["acceptance"] == {
        "per_position": [0.9, 0.72, 0.36],
        "kind": "unconditional",
    }
    assert not [note for note in found.notes if "decoding.acceptance is assumed" in note]
    assert found.not_modelled == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_forced_length_reads_as_the_whole_numbers_around_it(engine: str) -> None:
    config = json.dumps({
        "method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.4,
    })  # fmt: skip
    commands = {
        "vllm": f"vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --speculative-config '{config}'",
        "sglang": "SGLANG_SIMULATE_ACC_LEN=2.4 python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 "
        "--speculative-algorithm NEXTN --speculative-num-steps 3",
    }

    found = scenario_from(commands[engine], hardware="h200")
    assert found.scenario.settings()["decoding"]["acceptance"]["per_position"] == pytest.approx([1.0, 0.4, 0.0])
    assert not [note for note in found.notes if "SGLANG_SIMULATE" in note]


def test_a_forced_length_beyond_the_drafts_is_refused() -> None:
    with pytest.raises(RooftraceError, match=r"lies between 1 and one more than the drafted tokens \(3\); got 5"):
        scenario_from(
            "SGLANG_SIMULATE_ACC_LEN=5 python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 "
            "--speculative-algorithm NEXTN --speculative-num-steps 3"
        )


def test_without_the_option_no_acceptance_is_forced() -> None:
    found = export(Chosen(scenario=drafting(), reasons=()), "vllm")

    assert "synthetic" not in found.text


@pytest.mark.parametrize(
    ("scenario", "target", "said"),
    [
        (drafting(num_speculative_tokens="adaptive"), "vllm", "give decoding.num_speculative_tokens a number"),
        (drafting(), "kubernetes", "--forced-acceptance is of commands"),
        (
            drafting({"tree": {"accuracies": [[0.6, 0.2], [0.5, 0.1]], "branching": [2, 2]}}, num_speculative_tokens=2),
            "vllm",
            "not of a tree",
        ),
        (Scenario(), "sglang", "the scenario drafts nothing"),
    ],
)
def test_what_cannot_be_forced_is_refused(scenario: Scenario, target: str, said: str) -> None:
    with pytest.raises(RooftraceError, match=said):
        written(scenario, target)
