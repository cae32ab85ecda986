"""Commands that start servers: what they say becomes settings, nothing is dropped in silence, and exports are read back."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hwmodels.overheads import at_or_before
from policies.vllm_settings import RELEASES
from sim.errors import RooftraceError
from sim.launch import export, recommended, scenario_from
from sim.launch.arguments import ENGINES, _gone_from, _listed, _plain, options_of, read_words, release_of
from sim.launch.chosen import Chosen
from sim.launch.translate import Translation
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from tests.cli.test_run import APP, rooftrace


def test_a_command_of_vllm_becomes_the_scenario_that_it_describes() -> None:
    found = scenario_from(
        "VLLM_LOGGING_LEVEL=INFO vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4 --max-num-seqs 512 --max-num-batched-tokens 4k "
        "--gpu-memory-utilization=0.95 --kv-cache-dtype fp8_e4m3 --no-enable-prefix-caching --port 8080 --max-model-len 32k "
        "--enforce-eager",
        hardware="h100-sxm",
    )
    assert found.scenario.settings() == {
        "model": "meta-llama/Llama-3.1-70B-Instruct",
        "hardware": "h100-sxm",
        "kv_precision": "fp8",
        "serving_stack": "vllm",
        "parallel": {"tensor": 4},
        "scheduler": {"policy": "vllm", "max_num_seqs": 512, "max_num_batched_tokens": 4000},
        "memory": {"gpu_memory_utilization": 0.95, "max_model_len": 32_000, "prefix_caching": False},
        "cuda_graphs": {"eager": True},
        "workload": {"trace": "conversation"},
    }
    assert found.not_modelled == ()
    assert found.without_effect == ("--port 8080",)
    assert any("VLLM_LOGGING_LEVEL" in note for note in found.notes)


def test_slots_of_adapters_are_read_and_the_adapters_that_are_named_are_counted() -> None:
    found = scenario_from(
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-lora --max-loras 4 --max-lora-rank 32 --max-cpu-loras 8 "
        "--lora-modules sql=/a/sql chat=/a/chat code=/a/code law=/a/law art=/a/art",
        hardware="h100-sxm",
    )
    assert found.scenario.settings()["adapters"] == {
        "count": 5, "rank": 32, "max_loras": 4, "max_lora_rank": 32, "max_cpu_loras": 8,
    }  # fmt: skip
    assert found.not_modelled == ()
    assert any("adapters.popularity are the traffic's" in note for note in found.notes)
    written = export(Chosen(scenario=found.scenario, reasons=()), "vllm")
    assert any("--lora-modules NAME=PATH" in text for text in written.left_out)
    again = scenario_from(written.text, hardware="h100-sxm").scenario.adapters
    assert again is not None
    assert (again.max_loras, again.max_lora_rank, again.max_cpu_loras) == (4, 32, 8)


def test_slots_of_sglang_are_read_and_written() -> None:
    found = scenario_from(
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --lora-paths sql=/a/sql chat=/a/chat "
        "--max-loras-per-batch 2 --max-lora-rank 32 --max-loaded-loras 4 --lora-target-modules q_proj o_proj "
        "--lora-eviction-policy fifo --lora-backend triton",
        hardware="h100-sxm",
    )
    assert found.scenario.settings()["adapters"] == {
        "count": 2, "rank": 32, "max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": 4,
        "target_modules": ["q_proj", "o_proj"], "eviction": "fifo",
    }  # fmt: skip
    assert found.not_modelled == ("--lora-backend triton",)
    written = export(Chosen(scenario=found.scenario, reasons=()), "sglang")
    assert any("--lora-paths NAME=PATH" in text for text in written.left_out)
    again = scenario_from(written.text, hardware="h100-sxm").scenario.adapters
    assert again == found.scenario.adapters


def test_sglang_has_eight_slots_where_a_command_says_no_number() -> None:
    found = scenario_from(
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --enable-lora",
        hardware="h100-sxm",
    )
    assert found.scenario.settings()["adapters"] == {"count": 8, "rank": 16, "max_loras": 8}
    assert any("since their files say the rank" in note for note in found.notes)


@pytest.mark.parametrize("rank", [12, 24, 48, 1024])
def test_a_rank_of_slots_that_vllm_does_not_take_is_refused_where_it_is_read(rank: int) -> None:
    command = f"vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-lora --max-lora-rank {rank}"
    with pytest.raises(RooftraceError, match=f"--max-lora-rank is one of 8, 16, .* in vLLM; got {rank}"):
        scenario_from(command, hardware="h100-sxm")


def test_slots_without_the_switch_are_named_as_without_a_place() -> None:
    found = scenario_from("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-loras 4", hardware="h100-sxm")
    assert found.scenario.adapters is None
    assert found.without_effect == ("--max-loras 4",) or found.not_modelled == ("--max-loras 4",)


def test_a_command_of_sglang_with_a_chain_of_drafts() -> None:
    found = scenario_from(
        "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 4 --mem-fraction-static 0.85 --page-size 64 "
        "--chunked-prefill-size 4096 --disable-radix-cache --speculative-algorithm STANDALONE --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-draft-model-path qwen3-0.6b",
        hardware="h200",
        assignments=["decoding.acceptance={alpha: 0.7}"],
    )
    settings = found.scenario.settings()
    assert settings["parallel"] == {"tensor": 4}
    assert settings["memory"] == {"mem_fraction_static": 0.85, "block_tokens": 64, "prefix_caching": False}
    assert settings["scheduler"] == {"policy": "sglang", "chunked_prefill_size": 4096, "disable_radix_cache": True}
    assert settings["decoding"]["num_speculative_tokens"] == 3
    assert settings["decoding"]["draft"] == {"model": "qwen3-0.6b"}
    assert not found.not_modelled


def test_a_drafter_of_sglang_without_a_checkpoint_is_the_models_own_layers() -> None:
    command = (
        "python -m sglang.launch_server --model-path deepseek-v3 --tp 8 --speculative-algorithm EAGLE "
        "--speculative-num-steps 1"
    )
    given = {"hardware": "b200", "assignments": ["decoding.acceptance={alpha: 0.8}"]}
    assert scenario_from(command, **given).scenario.decoding.method == "mtp"
    own = [*given["assignments"], "decoding.draft={cost_ratio: 0.1}"]
    other = scenario_from(f"{command} --speculative-draft-model-path x", hardware="b200", assignments=own)
    assert other.scenario.decoding.method == "eagle"
    assert any("speculative-draft-model-path" in option for option in other.not_modelled)


def test_a_command_of_trtllm_and_the_file_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "extra.yaml"
    file.write_text(
        "kv_cache_config: {free_gpu_memory_fraction: 0.8, enable_block_reuse: false, dtype: fp8, use_kv_cache_manager_v2: auto, "
        "max_util_for_resume: 0.9}\n"
        "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\nmoe_config: {backend: CUTLASS}\n"
        "cuda_graph_config: null\n"
    )
    found = scenario_from(f"trtllm-serve qwen3-32b --tp_size 2 --extra_llm_api_options {file}", hardware="h200")
    settings = found.scenario.settings()
    assert settings["memory"] == {"free_gpu_memory_fraction": 0.8, "prefix_caching": False}
    assert settings["kv_precision"] == "fp8"
    assert settings["cuda_graphs"] == {"eager": True}
    assert settings["scheduler"] == {
        "policy": "trtllm",
        "capacity_scheduler_policy": "MAX_UTILIZATION",
        "max_util_for_resume": 0.9,
    }
    assert any("use_kv_cache_manager_v2 auto is left to the server" in note for note in found.notes)
    assert any("moe_config.backend is not modelled" in note for note in found.notes)

    packed = Scenario.from_mapping(
        {
            "serving_stack": "trtllm",
            "scheduler": {"policy": "trtllm", "use_kv_cache_manager_v2": True, "max_util_for_resume": 0.9},
        }
    )
    written = export(Chosen(scenario=packed, reasons=()), "trtllm")
    assert "use_kv_cache_manager_v2: true" in written.text
    assert "max_util_for_resume: 0.9" in written.text
    assert not [text for text in written.left_out if "scheduler" in text]


def test_trtllm_cuts_prompts_coarsely_where_layers_have_windows_and_has_none_wait() -> None:
    def chosen(model: str, **scheduler: Any) -> tuple[int, bool]:
        settings = {"serving_stack": "trtllm", "model": model, "scheduler": {"policy": "trtllm", **scheduler}}
        (machine,) = resolve(Scenario.from_mapping(settings)).experiment.hosted
        inner = machine.scheduler.inner
        return inner.chunk_unit_size, inner.enable_prefix_aware_scheduling

    assert chosen("llama-3.1-8b") == (0, True)
    assert chosen("gpt-oss-20b") == (256, False)
    assert chosen("gpt-oss-20b", chunk_unit_size=64, enable_prefix_aware_scheduling=True) == (64, True)


@pytest.mark.parametrize(
    ("command", "backend"),
    [
        ("vllm serve openai/gpt-oss-120b --moe-backend marlin", "marlin"),
        ("VLLM_MXFP4_USE_MARLIN=1 vllm serve openai/gpt-oss-120b", "marlin"),
        ("VLLM_USE_FLASHINFER_MOE_MXFP4_BF16=1 vllm serve openai/gpt-oss-120b", "flashinfer_trtllm_bf16"),
        ("VLLM_MXFP4_USE_MARLIN=0 vllm serve openai/gpt-oss-120b --moe-backend auto", None),
    ],
)
def test_the_backend_of_experts_is_read_and_written(command: str, backend: str | None) -> None:
    found = scenario_from(command, hardware="b200")
    assert found.scenario.settings().get("experts", {}).get("backend") == backend
    assert not any("MARLIN" in note for note in found.notes)
    written = export(Chosen(scenario=found.scenario, reasons=()), "vllm")
    assert (f"--moe-backend {backend}" in written.text) == (backend is not None)


def test_ranks_and_experts_of_a_mixture() -> None:
    found = scenario_from(
        "vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel --enable-eplb", hardware="h200"
    )
    settings = found.scenario.settings()
    assert settings["parallel"] == {"data": 8, "expert": 8}
    assert settings["experts"] == {"placement": "eplb"}
    written = export(Chosen(scenario=found.scenario, reasons=()), "vllm")
    assert "--data-parallel-size 8" in written.text
    assert "--enable-expert-parallel" in written.text
    assert "--enable-eplb" in written.text


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ("--enforce-eager --cudagraph-capture-sizes 1 2 4", {"eager": True}),
        ("--enforce-eager --max-cudagraph-capture-size 8", {"eager": True}),
        ("--cudagraph-capture-sizes 1 2 4 --max-cudagraph-capture-size 4", {"sizes": [1, 2, 4]}),
    ],
)
def test_what_a_server_without_graphs_or_with_all_sizes_takes_no_heed_of_is_left_out(options, graphs) -> None:
    found = scenario_from(f"vllm serve Qwen/Qwen3-8B {options}", hardware="h200")
    assert found.scenario.settings()["cuda_graphs"] == graphs


def test_a_negative_number_is_a_value() -> None:
    command = (
        "python -m sglang.launch_server --model-path m --chunked-prefill-size -1 --schedule-conservativeness -.5 --tp 2"
    )
    options = read_words(shlex.split(command)).options
    assert options["chunked-prefill-size"] == "-1"
    assert options["schedule-conservativeness"] == "-.5"
    assert options["tp-size"] == "2"


@pytest.mark.parametrize("written", ["-O3", "-O=3", "-O 3", "--optimization-level 3"])
def test_levels_of_optimisation_are_read_however_they_are_written(written: str) -> None:
    assert read_words(shlex.split(f"vllm serve m {written} -tp 2")).options == {
        "optimization-level": "3",
        "tensor-parallel-size": "2",
    }


def test_replicas_of_a_dense_model_are_its_data_parallel_ranks() -> None:
    found = scenario_from("vllm serve Qwen/Qwen3-32B --data-parallel-size 3", hardware="h200")
    assert (found.scenario.replicas, found.scenario.router.policy) == (3, "least_outstanding")


def test_options_of_a_file_stand_under_those_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: Qwen/Qwen3-32B\ntensor-parallel-size: 4\nmax-num-seqs: 64\nenable-prefix-caching: false\n")
    found = scenario_from(f"vllm serve --config {file} --max-num-seqs 128", hardware="h200")
    assert found.scenario.scheduler.settings == {"max_num_seqs": 128}
    assert found.scenario.parallel.tensor == 4
    assert found.scenario.memory.prefix_caching is False


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("nginx -g off", "starts no server"),
        ("vllm serve Qwen/Qwen3-32B --max-num-seqs", "needs a value"),
        ("vllm serve Qwen/Qwen3-32B --max-num-seqs many", "takes a whole number"),
        ("vllm serve Qwen/Qwen3-32B other", "belongs to no option"),
        ("vllm serve Qwen/Qwen3-32B --speculative-config {method:ngram}", "not JSON"),
        (
            'vllm serve Qwen/Qwen3-32B --speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\'',
            "a command does not say it",
        ),
        (
            'vllm serve Qwen/Qwen3-32B --speculative-config \'{"method": "mtp", "num_speculative_tokens": "many"}\'',
            "num_speculative_tokens takes a whole number; got 'many'",
        ),
        ("vllm serve Qwen/Qwen3-32B --max-num 4", "may be --max-num-"),
        ("vllm serve", "names no model"),
        ("vllm serve nobody/no-such-model", "config.json"),
        ("vllm serve 'Qwen/Qwen3-32B", "not complete"),
        ("trtllm-serve qwen3-32b --config /no/such.yaml", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(command: str, says: str) -> None:
    with pytest.raises(RooftraceError, match=says) as caught:
        scenario_from(command, hardware="h200")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--xyzzy 3 4", "is no option of vllm 0.32.0, nor of any from 0.11.0 to 0.33.0; the release's --help lists its"),
        ("--tensor-parallel-sze 4", "nor of any from 0.11.0 to 0.33.0; did you mean --tensor-parallel-size?"),
        ("--swap-space 8", "--swap-space was removed from vllm before 0.32.0; it gave the CPU memory"),
        ("--cuda-graph-sizes 1 2", "said for which sizes CUDA graphs are captured; it is read as --cudagraph-capture-sizes"),
    ],
)  # fmt: skip
def test_options_that_the_release_does_not_have_are_warnings_or_refused(options: str, says: str) -> None:
    command = f"vllm serve Qwen/Qwen3-32B {options} --max-num-seqs 64"
    found = scenario_from(command, hardware="h200")
    assert found.scenario.scheduler.settings == {"max_num_seqs": 64}
    assert len(found.strange) == 1
    assert says in found.strange[0]
    with pytest.raises(RooftraceError, match=re.escape(says)):
        scenario_from(command, hardware="h200", strict=True)


def _of_release(options: str, release: str | None, image: str | None = None) -> Translation:
    start = "vllm serve" if image is None else f"docker run {image}"
    return scenario_from(f"{start} --model Qwen/Qwen3-32B {options}", hardware="h200", release=release)


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("vllm/vllm-openai:v0.22.0", "0.22.0"),
        ("my.registry:5000/vllm/vllm-openai:v0.19.1@sha256:00ff", "0.19.1"),
        ("vllm/vllm-openai:v0.28.0rc1", "0.28.0rc1"),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai:v0.32.0", None),
    ],
)
def test_the_tag_of_an_engines_image_names_its_release(image: str, release: str | None) -> None:
    found = _of_release("--max-num-seqs 8", None, image)
    assert found.scenario.serving_release == found.scenario.memory.release == release
    assert found.strange == ()
    assert any(f"are those of vllm {release}" in note for note in found.notes) == (release is not None)


@pytest.mark.parametrize(
    ("command", "stack", "release"),
    [
        (
            "lmsysorg/sglang:v0.5.14-cu126 python -m sglang.launch_server --model-path Qwen/Qwen3-32B",
            "sglang",
            "0.5.14",
        ),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.1.0 trtllm-serve Qwen/Qwen3-32B", "trtllm", "1.1.0"),
        (
            "nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.6.1 python -m dynamo.sglang --model-path Qwen/Qwen3-32B",
            "sglang",
            None,
        ),
    ],
)
def test_images_of_other_engines_name_releases_too_and_those_of_others_do_not(
    command: str, stack: str, release: str | None
) -> None:
    found = scenario_from(f"docker run --gpus all {command}", hardware="h200").scenario
    assert (found.serving_stack, found.serving_release, found.memory.release) == (stack, release, release)


def test_a_release_that_is_named_stands_over_that_of_the_image() -> None:
    assert _of_release("", "0.24.0", "vllm/vllm-openai:v0.22.0").scenario.serving_release == "0.24.0"


@pytest.mark.parametrize(
    ("release", "options", "rules", "said"),
    [
        ("0.33.0", "", "0.33", False),
        ("v0.28.0", "", "0.28", False),
        ("0.30.2", "", "0.28", True),
        ("0.22.0", "", "0.24", True),
        ("0.22.0", "--max-num-active-seqs 16", "0.32", True),
        ("0.99", "", "0.33", True),
    ],
)
def test_the_scheduler_has_the_rules_of_the_release_or_of_the_nearest_that_is_known(
    release: str, options: str, rules: str, said: bool
) -> None:
    found = _of_release(options, release)
    assert found.scenario.scheduler.settings.get("release", "0.32") == rules
    assert any(f"those of {rules} are taken" in note for note in found.notes) == said
    # It can be simulated, and written as a command again.
    (machine,) = resolve(found.scenario).experiment.hosted
    assert machine.scheduler.rules == RELEASES[rules]
    assert not [
        text for text in export(Chosen(scenario=found.scenario, reasons=()), "vllm").left_out if "scheduler" in text
    ]


def test_a_release_whose_options_are_not_listed_is_said_to_be_read_as_another_and_as_nothing_else() -> None:
    notes = [note for note in _of_release("", "0.99").notes if "0.99" in note]
    assert notes == [
        "vllm 0.99 is newer than the newest release whose options are listed: they are those of 0.33.0, and overheads and memory "
        "those of the nearest releases that are known"
    ]


def test_options_are_those_of_the_release() -> None:
    options = "--num-lookahead-slots 4 --swap-space 8 --max-num-active-seqs 16"
    old, now = _of_release(options, "0.11.0"), _of_release(options, None)

    assert old.not_modelled == (
        "--num-lookahead-slots 4 of vllm 0.11.0, which reserved KV slots for drafts; drafts reserve their own now",
        "--swap-space 8 of vllm 0.11.0, which gave the CPU memory that preempted sequences were swapped to; they are "
        "computed again now and memory.tiers with memory.preemption: swap simulates it",
    )
    assert old.strange == (
        "--max-num-active-seqs is no option of vllm 0.11.0; those from 0.32.0 have it, and it is read as theirs",
    )
    assert [text.split()[0] for text in now.strange] == ["--num-lookahead-slots", "--swap-space"]
    assert old.scenario.scheduler.settings == now.scenario.scheduler.settings == {"max_num_active_seqs": 16}


def test_an_option_of_another_release_alone_is_named_with_it() -> None:
    assert _of_release("--monokernel", "0.33.0").not_modelled == ("--monokernel of vllm 0.33.0",)
    assert _of_release("--monokernel", None).strange == ("--monokernel is no option of vllm 0.32.0; 0.33.0 has it",)
    with pytest.raises(RooftraceError, match=r"--monokernel is no option of vllm 0\.24\.0; 0\.33\.0 has it"):
        scenario_from("vllm serve Qwen/Qwen3-32B --monokernel", release="0.24.0", strict=True)


def test_a_release_between_two_that_are_listed_has_what_either_has() -> None:
    # 0.13.0 has --swap-space and 0.19.0 has not.
    assert _of_release("--swap-space 8", "0.15.1").strange == ()
    assert len(_of_release("--swap-space 8", "0.19.0").strange) == 1


@pytest.mark.parametrize(
    ("release", "said"), [("0.6.3", "older than the oldest release"), ("0.99", "newer than the newest release")]
)
def test_a_release_beyond_those_that_are_listed_is_said(release: str, said: str) -> None:
    assert any(said in note for note in _of_release("", release).notes)


@pytest.mark.parametrize("release", ["new", "0.zz"])
def test_what_is_no_release_is_refused(release: str) -> None:
    with pytest.raises(RooftraceError, match="--release: a release"):
        _of_release("", release)


def test_every_option_that_is_read_is_one_of_the_release_that_is_read() -> None:
    for engine in ENGINES:
        releases, having = _listed(engine)
        newest = release_of(engine)
        for option in options_of(engine).values():
            name = f"--{option.name}"
            assert name not in having or newest in having[name], name
        assert at_or_before(newest, releases) == newest


def test_the_model_may_stand_behind_an_unknown_option() -> None:
    command = read_words(shlex.split("vllm serve --xyzzy 3 Qwen/Qwen3-32B"))
    assert command.model == "Qwen/Qwen3-32B"
    assert command.strange[0].startswith("--xyzzy 3 is no option")


def test_options_that_were_removed_are_none_of_the_release_and_lead_to_some_that_are() -> None:
    for engine in ENGINES:
        for name, gone in _gone_from(engine).items():
            assert name not in options_of(engine)
            assert not gone.now or f"--{gone.now}" in options_of(engine)
    assert _gone_from("vllm")


def test_set_model_stands_for_a_name_that_is_not_known() -> None:
    found = scenario_from("vllm serve my/own-7 -tp 2", hardware="h200", assignments=["model=qwen3-32b"])
    assert (found.scenario.model, found.scenario.parallel.tensor) == ("qwen3-32b", 2)
    assert any("the command's model is my/own-7" in note for note in found.notes)


def _speculation(method: str, model: str | None, k: int) -> str:
    config = {"method": method, "num_speculative_tokens": k} | ({} if model is None else {"model": model})
    return f"vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --speculative-config '{json.dumps(config)}'"


@pytest.mark.parametrize(
    ("method", "drafter", "k", "acceptance"),
    [
        ("mtp", None, 1, {"published": "deepseek-v3"}),
        ("deepseek_mtp", None, 3, {"alpha": 0.875}),
        ("eagle", "a/EAGLE-X", 5, {"mean_length": 2.43, "at_k": 5}),
        ("eagle3", "a/EAGLE3-X", 9, {"mean_length": 2.79, "at_k": 3}),
        ("eagle3", "nvidia/Llama-4-Maverick-17B-128E-Eagle3", 4, {"mean_length": 3.26, "at_k": 4}),
    ],
)
def test_published_acceptance_is_assumed_of_drafters_and_said_to_be(
    method: str, drafter: str | None, k: int, acceptance: dict[str, Any]
) -> None:
    found = scenario_from(_speculation(method, drafter, k), hardware="b200")
    assert found.scenario.settings()["decoding"]["acceptance"] == acceptance
    assert any(note.startswith("decoding.acceptance is assumed:") for note in found.notes)
    own = scenario_from(
        _speculation(method, drafter, k), hardware="b200", assignments=["decoding.acceptance={alpha: 0.6}"]
    )
    assert own.scenario.settings()["decoding"]["acceptance"] == {"alpha": 0.6}
    assert not any("decoding.acceptance is assumed" in note for note in own.notes)


def test_a_conversion_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert rooftrace("scenario", "from", "vllm serve Qwen/Qwen3-32B -tp 2", "--out", str(file)).exit_code == 0
    before = file.read_text()
    assert Scenario.from_yaml(before).parallel.tensor == 2
    failed = rooftrace("scenario", "from", "vllm serve no/model", "-o", str(file))
    assert (failed.exit_code, file.read_text()) == (2, before)


def test_manifests_are_read_from_files_and_from_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(
        "services: {a: {image: 'vllm/vllm-openai:latest', command: '--model Qwen/Qwen3-8B --api-key xyz'}}\n"
    )
    out = rooftrace("scenario", "from", str(file))
    assert out.exit_code == 0
    assert out.stdout.startswith(f"# from {file}\n")
    assert CliRunner().invoke(APP, ["scenario", "from", "-"], input="vllm serve Qwen/Qwen3-8B").exit_code == 0
    missing = rooftrace("scenario", "from", str(tmp_path / "no.yaml"))
    assert missing.exit_code == 2
    assert "cannot be read" in missing.stderr


_SETTINGS = {
    "vllm": {
        "parallel": {"tensor": 2, "pipeline": 2},
        "scheduler": {"policy": "vllm", "max_num_seqs": 256, "max_num_batched_tokens": 2048, "async_scheduling": False},
        "memory": {
            "gpu_memory_utilization": 0.8,
            "block_tokens": 32,
            "max_model_len": 16_384,
            "prefix_caching": True,
            "tiers": [{"kind": "host", "gib": 64.0}],
        },
        "cuda_graphs": {"sizes": [1, 2, 8]},
        "kv_precision": "fp8",
        "stream_interval": 4,
        "decoding": {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.6}},
    },
    "sglang": {
        "parallel": {"tensor": 2},
        "scheduler": {"policy": "sglang", "chunked_prefill_size": 4096, "schedule_policy": "lof"},
        "memory": {"mem_fraction_static": 0.8, "kv_blocks": 90_000, "max_model_len": 16_384},
        "cuda_graphs": {"largest": 64},
        "kv_precision": "fp8",
        "decoding": {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.6}},
    },
    "trtllm": {
        "parallel": {"tensor": 2},
        "scheduler": {
            "policy": "trtllm",
            "max_batch_size": 256,
            "max_num_tokens": 4096,
            "enable_chunked_prefill": True,
        },
        "memory": {"free_gpu_memory_fraction": 0.8, "max_model_len": 16_384},
        "kv_precision": "fp8",
    },
}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_exported_is_read_back_as_it_was(engine: str) -> None:
    settings = {
        "model": "qwen3-32b",
        "hardware": "h200",
        "serving_stack": engine,
        "workload": {"trace": "conversation"},
    }
    scenario = Scenario.from_mapping({**settings, **_SETTINGS[engine]})
    written = export(Chosen(scenario=scenario, reasons=("because",)), engine)
    assert written.left_out == ()
    assert "#   because" in written.text
    command = "".join(line + "\n" for line in written.text.splitlines() if not line.startswith("#"))
    set_ = ["decoding.acceptance={alpha: 0.6}"] if "decoding" in settings | _SETTINGS[engine] else []
    again = scenario_from(command, hardware="h200", assignments=set_).scenario.settings()
    assert again.pop("model") == "Qwen/Qwen3-32B"
    wanted = scenario.settings()
    del wanted["model"]
    assert again == wanted


@pytest.mark.parametrize("engine", ENGINES)
def test_every_model_that_a_server_loads_has_its_name_on_the_hub(engine: str) -> None:
    decoding = {"method": "draft_model", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.6}}
    scenario = Scenario.from_mapping(
        {
            **{"model": "qwen3-32b", "hardware": "h200", "serving_stack": engine, "scheduler": {"policy": engine}},
            **{"decoding": {**decoding, "draft": {"model": "qwen3-0.6b"}}},
        }
    )
    text = export(Chosen(scenario=scenario, reasons=()), engine).text
    command = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(("# qwen3-32b", "# as")))
    assert "Qwen/Qwen3-32B" in command
    assert "Qwen/Qwen3-0.6B" in command
    assert "qwen3" not in command


def test_what_an_export_cannot_say_is_said() -> None:
    scenario = Scenario.from_mapping(
        {
            "model": "qwen3-32b",
            "hardware": "h200",
            "scheduler": {"policy": "sarathi", "token_budget": 512},
            "memory": {"reserve_bytes": 1e9},
        }
    )
    left = export(Chosen(scenario=scenario, reasons=()), "vllm").left_out
    assert any("sarathi is not vllm's own" in text for text in left)
    assert "memory.reserve_bytes: 1000000000.0" in left


def test_the_best_candidate_of_a_folder_is_what_is_started(tmp_path: Path) -> None:
    base = Scenario.from_mapping({"model": "qwen3-32b", "hardware": "h200", "scheduler": {"policy": "vllm"}}).resolved()
    axes = {"parallel.tensor": [2, 4], "scheduler.max_num_seqs": [64]}
    (tmp_path / "manifest.json").write_text(json.dumps({"base": base, "axes": axes}))
    head = "parallel.tensor,scheduler.max_num_seqs,keeps,slo_attainment,tokens_per_s_per_gpu,usd_per_mtoken\n"
    (tmp_path / "ranked.csv").write_text(head + "4,64,True,0.995,500,3.25\n2,64,False,0.5,700,\n")
    written = export(recommended(tmp_path), "vllm")
    assert "best of 2 candidates, 1 of which keep the SLO" in written.text
    assert "3.25 $ per million output tokens" in written.text
    assert written.text.endswith(
        "vllm serve Qwen/Qwen3-32B \\\n    --tensor-parallel-size 4 \\\n    --max-num-seqs 64\n"
    )
    assert written.left_out == ()
    (tmp_path / "ranked.csv").write_text(head + "2,64,False,0.5,700,\n")
    with pytest.raises(RooftraceError, match="none of the 1 candidates"):
        recommended(tmp_path)


def test_dynamos_manifest_names_every_pool_with_its_devices() -> None:
    import yaml

    scenario = Scenario.from_mapping(
        {
            "scheduler": {"policy": "vllm"},
            "router": {"policy": "dynamo"},
            "pools": {
                "large": {"model": "llama-3.1-70b", "parallel": {"tensor": 4}},
                "small": {"model": "llama-3.1-8b", "replicas": 2},
            },
        }
    )
    document = yaml.safe_load(export(Chosen(scenario=scenario, reasons=("because",)), "dynamo").text)
    components = {each["name"]: each for each in document["spec"]["components"]}
    assert {name: each["replicas"] for name, each in components.items()} == {"Frontend": 1, "large": 1, "small": 2}
    assert {name: each["type"] for name, each in components.items()} == {
        "Frontend": "frontend",
        "large": "worker",
        "small": "worker",
    }
    containers = {name: each["podTemplate"]["spec"]["containers"][0] for name, each in components.items()}
    assert containers["large"]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert containers["Frontend"]["env"] == [{"name": "DYN_ROUTER_MODE", "value": "kv"}]
    assert containers["small"]["args"] == ["-m", "dynamo.vllm", "--model", "meta-llama/Meta-Llama-3.1-8B"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_of_a_list_can_be_read(engine: str) -> None:
    start = {"vllm": "vllm serve m", "sglang": "python -m sglang.launch_server", "trtllm": "trtllm-serve m"}[engine]
    for spelling, option in options_of(engine).items():
        value = "" if option.takes == "switch" else " 1"
        assert option.name in read_words(shlex.split(f"{start} {spelling}{value}")).options


_PARSERS = {
    "vllm": """
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
}
_PRINT = """
import json
print(json.dumps([[action.option_strings, action.nargs] for action in parser._actions if action.option_strings]))
"""


@pytest.mark.slow(reason="whole lists of a release")
@pytest.mark.parametrize("engine", sorted(_PARSERS))
def test_the_lists_are_those_of_the_releases(engine: str) -> None:
    variable = f"ROOFTRACE_{engine.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"{variable} names no Python that has {engine}")
    ran = subprocess.run(
        [python, "-c", _PARSERS[engine] + _PRINT], capture_output=True, text=True, check=True, timeout=300
    )
    actions = [([_plain(name) for name in names], n) for names, n in json.loads(ran.stdout.splitlines()[-1])]
    theirs = {name for names, _ in actions for name in names} - {"-h", "--help"}
    table = options_of(engine)
    opposites = {f"--no-{name[2:]}" for name, option in table.items() if option.negated and name.startswith("--")}
    assert theirs <= set(table) | opposites
    assert set(table) <= theirs
    for names, n in actions:
        takes = {"0": "switch", "*": "list", "+": "list", "?": "optional", "None": "value"}[str(n)]
        assert all(table[name].takes == takes for name in names if name in table), names


def test_the_traffic_is_said_to_be_the_built_in_one_only_where_it_is():
    of_ones_own = (
        "workload={arrivals: {process: poisson, rate_per_s: 2}, prompt_tokens: 5, output_tokens: 5, requests: 3}"
    )
    for assignment, is_said in (("seed=3", True), ("workload.rate_scale=2", True), (of_ones_own, False)):
        found = scenario_from("vllm serve Qwen/Qwen3-8B", hardware="h200", assignments=[assignment])
        assert any("workload is the built-in conversation" in note for note in found.notes) == is_said


@pytest.mark.parametrize(
    ("image", "command", "release"),
    [
        ("vllm/vllm-openai:v0.6.3", "", "0.6.3"),
        ("vllm/vllm-openai:v0.19.0-cu130", "", "0.19.0"),
        ("vllm/vllm-openai:v0.32.0", "", None),
        ("vllm/vllm-openai:nightly", "", None),
        ("lmsysorg/sglang:v0.5.6.post2-cu129", "python3 -m sglang.launch_server", "0.5.6.post2"),
        # Of whoever built it around the engine.
        ("nvcr.io/nvidia/ai-dynamo/sglang-runtime:0.8.1", "python3 -m sglang.launch_server", None),
    ],
)
def test_an_images_tag_says_whose_overheads_and_memory_a_server_has(
    image: str, command: str, release: str | None
) -> None:
    model = "--model-path Qwen/Qwen3-8B" if command else "--model Qwen/Qwen3-8B"
    scenario = scenario_from(f"docker run --gpus all {image} {command} {model}").scenario
    assert (scenario.serving_release, scenario.memory.release) == (release, release)


@pytest.mark.parametrize(
    ("option", "graphs", "left"),
    [
        ('{"cudagraph_mode": "FULL_DECODE_ONLY"}', {"decode_only": True}, ()),
        ('{"cudagraph_mode": "NONE", "level": 3}', {"eager": True}, ('--compilation-config {"level": 3}',)),
        ('{"cudagraph_mode": "PIECEWISE"}', None, ('--compilation-config {"cudagraph_mode": "PIECEWISE"}',)),
        ("3", None, ("--compilation-config 3",)),
    ],
)
def test_vllms_compilation_config_says_what_is_captured(
    option: str, graphs: dict[str, Any] | None, left: tuple[str, ...]
) -> None:
    found = scenario_from(f"vllm serve Qwen/Qwen3-8B --compilation-config '{option}'", hardware="h200")
    assert found.scenario.settings().get("cuda_graphs") == graphs
    assert found.not_modelled == left


def test_graphs_for_decode_steps_alone_come_back_from_vllm_and_are_named_for_the_others() -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        asked = {"model": "qwen3-8b", "hardware": "h200", "serving_stack": engine, "cuda_graphs": {"decode_only": True}}
        written = export(Chosen(scenario=Scenario.from_mapping(asked), reasons=()), engine)
        said = "FULL_DECODE_ONLY" in written.text
        assert said == (engine == "vllm")
        assert any("cuda_graphs.decode_only" in each for each in written.left_out) != said
