"""Encoders of images and speech in commands: read, written, and never left out in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sim.errors import RooftraceError
from sim.launch import export, scenario_from
from sim.launch.chosen import Chosen
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build
from sim.scenario.assembly.memory import memory_plan_of

VLLM, SGLANG = "vllm serve {}", "python -m sglang.launch_server --model-path {}"


@pytest.mark.parametrize(
    "start",
    [VLLM, SGLANG, "docker run --gpus all vllm/vllm-openai:latest --model {}"],
    ids=["vllm", "sglang", "docker"],
)
@pytest.mark.parametrize(
    ("model", "traffic"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "images, .*workload.images says what"),
        ("Qwen/Qwen2-Audio-7B-Instruct", "speech, .*workload.audio says what"),
        ("Qwen/Qwen2.5-Omni-7B", "images and of speech, .*workload.images and workload.audio say what"),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_servers_encode_in_their_steps_where_the_model_has_an_encoder(
    start: str, model: str, traffic: str | None
) -> None:
    found = scenario_from(start.format(model), hardware="h100-sxm")
    assert found.scenario.settings().get("encode") == (None if traffic is None else {"at": "engine"})
    said = [note for note in found.notes if "has an encoder" in note]
    assert [bool(re.search(traffic or "", note)) for note in said] == ([] if traffic is None else [True])


def test_pools_encode_as_a_whole() -> None:
    lines = [
        f"{SGLANG.format('Qwen/Qwen3-VL-8B-Instruct')} --disaggregation-mode {role}" for role in ("prefill", "decode")
    ]
    found = scenario_from("\n".join(lines), hardware="h100-sxm").scenario.settings()
    assert found["encode"] == {"at": "engine"}
    assert [sorted(pool) for pool in found["pools"].values() if "encode" in pool] == []


@pytest.mark.parametrize("start", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_server_of_the_language_model_alone_encodes_nothing(start: str) -> None:
    found = scenario_from(f"{start.format('Qwen/Qwen3-VL-8B-Instruct')} --language-model-only", hardware="h100-sxm")
    assert found.scenario.encode is None
    assert found.not_modelled == ()


def test_what_encodes_is_said_by_set_in_the_place_of_the_server() -> None:
    said = {"replicas": 2, "bandwidth_gb_per_s": 25}
    found = scenario_from(VLLM.format("Qwen/Qwen3-VL-8B-Instruct"), assignments=[f"encode={said}"])
    assert found.scenario.settings()["encode"] == said


def test_a_scheduler_that_encodes_nothing_in_steps_is_said_to() -> None:
    found = scenario_from("trtllm-serve Qwen/Qwen3-VL-8B-Instruct", hardware="h100-sxm")
    assert found.scenario.encode is None
    (said,) = (note for note in found.notes if "encoder" in note)
    assert "write encode: {replicas: N, bandwidth_gb_per_s: GB} by hand" in said


@pytest.mark.parametrize(("start", "option"), [(VLLM, "--mm-encoder-only"), (SGLANG, "--encoder-only")])
def test_a_server_that_only_encodes_is_refused_with_the_way_to_say_it(start: str, option: str) -> None:
    with pytest.raises(
        RooftraceError, match=f"{option} starts a machine that only encodes.*write encode: {{replicas: N"
    ):
        scenario_from(f"{start.format('Qwen/Qwen3-VL-8B-Instruct')} {option}")


def test_a_server_that_leaves_encoding_to_others_has_them_written_by_hand() -> None:
    command = f"{SGLANG.format('Qwen/Qwen3-VL-8B-Instruct')} --language-only --encoder-urls http://a:1 http://b:1"
    found = scenario_from(command, hardware="h100-sxm")
    assert found.scenario.encode is None
    assert found.not_modelled == ()
    assert any("--language-only" in note and "encode: {replicas: 2," in note for note in found.notes)


def test_options_of_the_front_ends_images_stay_not_modelled() -> None:
    options = ("--limit-mm-per-prompt 2", "--mm-processor-cache-gb 8")
    found = scenario_from(f"{VLLM.format('Qwen/Qwen3-VL-8B-Instruct')} {' '.join(options)}", hardware="h100-sxm")
    assert {*options} <= {*found.not_modelled, *found.without_effect}


@pytest.mark.parametrize("pools", [None, {"a": {}, "b": {"replicas": 2}}], ids=["alone", "pools"])
@pytest.mark.parametrize("target", ["vllm", "sglang", "kubernetes", "dynamo"])
def test_an_export_carries_encoding_in_steps_and_says_what_else_encodes(target: str, pools: Any) -> None:
    def left_out(**encode: Any) -> list[str]:
        stack = target if target in ("vllm", "sglang") else "vllm"
        settings = {
            "model": "qwen3-vl-8b",
            "hardware": "h100-sxm",
            "scheduler": {"policy": stack},
            "serving_stack": stack,
        }
        scenario = Scenario.from_mapping({**settings, "encode": encode, **({"pools": pools} if pools else {})})
        return [text for text in export(Chosen(scenario=scenario, reasons=()), target).left_out if "encode" in text]

    assert left_out(at="engine") == []
    assert left_out(at="engine", cache_tokens=100) == ["encode.cache_tokens: 100"]
    (said,) = left_out(replicas=2, bandwidth_gb_per_s=5)
    assert said.startswith("encode: {replicas: 2, bandwidth_gb_per_s: 5.0} (the command encodes on the same machine")


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_encoding_in_steps_changes_memory_alone_where_no_request_has_images(stack: str) -> None:
    load = {
        "requests": 20,
        "arrivals": {"process": "poisson", "rate_per_s": 20},
        "prompt_tokens": 300,
        "output_tokens": 20,
    }
    settings = {
        "model": "qwen3-vl-8b",
        "hardware": "h100-sxm",
        "scheduler": stack,
        "serving_stack": stack,
        "workload": load,
    }
    with_, without = (Scenario.from_mapping({**settings, **encode}) for encode in ({"encode": {"at": "engine"}}, {}))
    blocks = [memory_plan_of(each)[1].rank_blocks for each in (with_, without)]
    assert blocks[0] < blocks[1]
    same = [simulate(build(each.with_set("memory.kv_blocks=1000"))).requests for each in (with_, without)]
    assert same[0].equals(same[1])
