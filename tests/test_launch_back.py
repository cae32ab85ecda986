"""From a scenario to a command and back: what differs afterwards has been named."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import hwmodels
from sim import simulate
from sim.errors import RooftraceError
from sim.launch import export, recommended, scenario_from
from sim.launch.arguments import ENGINES
from sim.launch.chosen import Chosen
from sim.launch.dynamo import ROUTER_MODES
from sim.launch.export import TARGETS
from sim.scenario import Scenario
from tests.cli.test_run import rooftrace

GIB = 1 << 30
_NOT_OF_A_SERVER = ("workload", "slo", "window", "seed", "costs", "cost_model", "decoding.acceptance")


def leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict) and values:
        return {key: value for name, of in values.items() for key, value in leaves(of, f"{prefix}{name}.").items()}
    return {} if values is None else {prefix.removesuffix("."): values}


def a_scenario(rng: random.Random, engine: str) -> Scenario:
    """Any settings that a server has, and some that none has."""
    own: dict[str, dict[str, Any]] = {
        "vllm": {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "async_scheduling": False,
            "scheduling_policy": "priority",
            "watermark": 0.02,
            "long_prefill_token_threshold": 512,
            "enable_chunked_prefill": True,
        },
        "sglang": {
            "chunked_prefill_size": 4096,
            "schedule_policy": "lof",
            "max_running_requests": 100,
            "schedule_conservativeness": 0.5,
            "enable_mixed_chunk": True,
            "disable_overlap_schedule": True,
        },
        "trtllm": {
            "max_batch_size": 128,
            "max_num_tokens": 4096,
            "capacity_scheduler_policy": "MAX_UTILIZATION",
            "disable_overlap_scheduler": True,
            "batch_wait_timeout_iters": 3,
        },
    }
    share = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static", "trtllm": "free_gpu_memory_fraction"}
    whole_gb = {"kind": "host", "gib": 8e9 / GIB}
    host = {"vllm": {"kind": "host", "gib": 64.0}, "sglang": whole_gb, "trtllm": {**whole_gb, "write": "eviction"}}
    memory = {
        share[engine]: 0.8,
        "kv_blocks": 5000,
        "block_tokens": 32,
        # SGLang has one unless told otherwise, and no option that asks for it.
        "prefix_caching": engine != "sglang",
        "reserve_bytes": 1e9,
        "preemption": "swap",
        "tiers": [host[engine]],
    }
    disk = {"kind": "disk", "gib": 500.0, "read_gb_per_s": 5.0}
    settings: dict[str, Any] = {
        "kv_precision": "fp8",
        "precision": "fp8",
        "parallel": {"tensor": 2, "pipeline": rng.choice([1, 2])},
        "stream_interval": 4,
        "cuda_graphs": rng.choice([{"eager": True}, {"largest": 64}, {"sizes": [1, 8]}, {"decode_only": True}]),
        "micro_batches": 3,
        "replicas": 3,
        "router": rng.choice(["least_outstanding", {"policy": "dynamo", "temperature": 0.5}]),
        "decoding": rng.choice(
            [
                {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.6}},
                {
                    "method": "draft_model",
                    "num_speculative_tokens": 2,
                    "acceptance": {"alpha": 0.6},
                    "draft": {"model": "Qwen/Qwen3-0.6B", "tensor": 1},
                    "overhead_s": 0.001,
                },
            ]
        ),
        "classes": {"chat": {"share": 1, "priority": 2, "slo": {"ttft_s": 1.0}}},
        "autoscale": {"policy": {"policy": "knative", "target": 10}, "max": 4},
        "failures": {"mean_up_s": 100, "mean_down_s": 10},
        "rank_router": "round_robin",
    }
    chosen = {key: value for key, value in settings.items() if rng.random() < 0.4}
    chosen["memory"] = {key: value for key, value in memory.items() if rng.random() < 0.4}
    if "tiers" in chosen["memory"] and rng.random() < 0.5:
        chosen["memory"]["tiers"] = [{**host[engine], "latency_ms": 0.1}, disk]
    scheduler = {"policy": engine, **{key: value for key, value in own[engine].items() if rng.random() < 0.4}}
    around = rng.choice([None, None, {"policy": "preempt"}, {"policy": "keep_slo", "otherwise": "demote"}])
    chosen["scheduler"] = scheduler if around is None else {**around, "inner": scheduler}
    return Scenario.from_mapping(
        {"model": "Qwen/Qwen3-32B", "hardware": "h200", "serving_stack": engine, **chosen},
    )


def read_back(text: str, folder: Path, scenario: Scenario) -> Scenario:
    """The scenario that is read of an export, whose files are written beside it first."""
    for name, body in re.findall(r"^# (config[\w-]*\.yaml):\n((?:#   .*\n)*)", text, re.MULTILINE):
        (folder / name).write_text("".join(line[4:] + "\n" for line in body.splitlines()))
    text = re.sub(r"--config (\S+)", lambda found: f"--config {folder / found[1]}", text)
    set_ = [f"decoding.acceptance={scenario.decoding.acceptance.model_dump(exclude_unset=True)}".replace("'", "")] if (
        scenario.decoding.acceptance is not None
    ) else []  # fmt: skip
    return scenario_from(text, hardware=scenario.hardware, assignments=set_).scenario


def inmost(scheduler: Any) -> Any:
    while isinstance(scheduler, dict) and "inner" in scheduler:
        scheduler = scheduler["inner"]
    return scheduler


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_export_does_not_carry_is_named(engine: str, tmp_path: Path) -> None:
    named = carried = 0
    for seed in range(40):
        scenario = a_scenario(random.Random(f"{engine} {seed}"), engine)
        written = export(Chosen(scenario=scenario, reasons=("because",)), engine)
        again = read_back(written.text, tmp_path, scenario)
        before, after = (each.model_dump(exclude_defaults=True) for each in (scenario, again))
        before["scheduler"] = inmost(before["scheduler"])
        old, new = leaves(before), leaves(after)
        said = "\n".join(written.left_out)
        for key in set(old) | set(new):
            # A router of one, and the two settings that SGLang's one switch makes.
            same = scenario.replicas == 1 if key.startswith("router") else key == "scheduler.disable_radix_cache"
            if key.startswith(_NOT_OF_A_SERVER) or same:
                continue
            if old.get(key) == new.get(key):
                carried += 1
                continue
            named += 1
            section = key.split(".")[0]
            assert key in said or f"\n{section}: " in f"\n{said}", (seed, key, old.get(key), new.get(key), said)
        if "inner" in scenario.scheduler.settings:
            assert scenario.scheduler.policy in said
    assert named > 50
    assert carried > 100


@pytest.mark.parametrize("engine", ENGINES)
def test_pools_go_and_come_back(engine: str, tmp_path: Path) -> None:
    scenario = Scenario.from_mapping(
        {
            "model": "Qwen/Qwen3-8B",
            "hardware": "h200",
            "serving_stack": engine,
            "scheduler": engine,
            "router": "least_outstanding",
            "pools": {
                "first": {"role": "prefill", "replicas": 2},
                "second": {"role": "decode", "parallel": {"tensor": 2}, "memory": {"prefix_caching": False}},
            },
            "links": {"net": {}},
        }
    )
    again = read_back(export(Chosen(scenario=scenario, reasons=()), engine).text, tmp_path, scenario)
    assert again.router.policy == "least_outstanding"
    assert again.pools is not None
    assert {name: pool.role for name, pool in again.pools.items()} == {"first": "prefill", "second": "decode"}
    for name in ("first", "second"):
        wanted, found = (each.pool(name).model_dump(exclude_defaults=True) for each in (scenario, again))
        assert {**found, "scheduler": engine} == {**wanted, "scheduler": engine}
        assert again.pool(name).scheduler.policy == engine


def test_every_side_of_a_handover_says_what_it_is() -> None:
    scenario = Scenario.from_mapping(
        {
            "scheduler": "vllm",
            "pools": {"p": {"role": "prefill", "memory": {"tiers": [{"kind": "host", "gib": 2}]}}, "d": {"role": "decode"}},
            "links": {"net": {"connector": "mooncake_vllm", "bandwidth_gb_per_s": 50}},
            "handover": {"like": "vllm"},
        }
    )  # fmt: skip
    chosen = Chosen(scenario=scenario, reasons=())
    written = export(chosen, "vllm")
    configs = [json.loads(found) for found in re.findall(r"--kv-transfer-config '(.*)'", written.text)]
    inner = configs[0]["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in inner] == ["MooncakeConnector", "OffloadingConnector"]
    assert inner[1]["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2 * GIB}
    assert configs[1] == {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    for key in ("links", "handover"):
        assert any(text.startswith(f"{key}: ") for text in written.left_out)
    again = scenario_from(written.text).scenario
    assert again.pool("p").memory.tiers == scenario.pool("p").memory.tiers
    assert again.links is not None
    assert again.links["net"].connector == "mooncake_vllm"
    document = yaml.safe_load(export(chosen, "dynamo").text)
    of_prefill = document["spec"]["components"][1]
    assert of_prefill["type"] == "prefill"
    args = of_prefill["podTemplate"]["spec"]["containers"][0]["args"]
    # Dynamo's prefill worker of vLLM does not start without the connector.
    assert "--kv-transfer-config" in args
    assert args[-2:] == ["--disaggregation-mode", "prefill"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_folder_of_a_run_with_tiers_is_exported(target: str, tmp_path: Path) -> None:
    tiers = [{"kind": "host", "gib": 64}, {"kind": "remote", "gib": 100, "read_gb_per_s": 5}]
    scenario = Scenario.from_mapping(
        {"scheduler": "vllm", "memory": {"tiers": tiers}, "workload": {"trace": "conversation", "limit": 5}}
    )
    simulate(scenario).save(tmp_path / "run")
    written = export(recommended(tmp_path / "run"), target)
    assert any(
        text.endswith("memory.tiers.1 (remote): set up its backend beside the command") for text in written.left_out
    )
    assert "64" in written.text or target in ("sglang", "trtllm")


_OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("command", "tiers", "says"),
    [
        ("vllm serve m --kv-offloading-size 20", [{"kind": "host", "gib": 20.0}], ""),
        ("vllm serve m --kv-offloading-size 20 --kv-offloading-backend lmcache", [], "LMCache's own server"),
        (
            "vllm serve m --kv-transfer-config '"
            + json.dumps(
                {
                    **_OFFLOADING,
                    "kv_connector_extra_config": {
                        "cpu_bytes_to_use": 3 * GIB,
                        "eviction_policy": "arc",
                        "secondary_tiers": [{"type": "fs"}],
                    },
                }
            )
            + "'",
            [{"kind": "host", "gib": 3.0}],
            'secondary tier fs: how fast the disk is; eviction_policy "arc" is not modelled',
        ),
        (
            'vllm serve m --kv-transfer-config \'{"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", '
            '"kv_connector_extra_config": {"lazy_offload": true}}\'',
            [{"kind": "host", "gib": 8.0, "write": "eviction"}],
            "",
        ),
        (
            "LMCACHE_MAX_LOCAL_CPU_SIZE=20 LMCACHE_LOCAL_DISK=/x LMCACHE_CHUNK_SIZE=256 vllm serve m -tp 2 "
            '--kv-transfer-config \'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}\'',
            [{"kind": "host", "gib": 40.0}],
            "how fast the disk is; chunk_size 256 is not modelled",
        ),
        (
            'vllm serve m --kv-transfer-config \'{"kv_connector": "HF3FSKVConnector", "kv_role": "kv_both"}\'',
            [],
            "HF3FSKVConnector is not modelled",
        ),
        (
            "python -m sglang.launch_server --model-path m --tp 2 --enable-hierarchical-cache --hicache-size 50",
            [{"kind": "host", "gib": 100e9 / GIB}],
            "",
        ),
        (
            "python -m sglang.launch_server --model-path m --enable-hicache --hicache-size 50 --hicache-write-policy write_back "
            "--hicache-storage-backend mooncake",
            [{"kind": "host", "gib": 50e9 / GIB, "write": "eviction"}],
            "how fast the remote is",
        ),
        ("python -m sglang.launch_server --model-path m --hicache-size 50", [], ""),
        (
            "LMCACHE_MAX_LOCAL_CPU_SIZE=3 python -m sglang.launch_server --model-path m --enable-lmcache",
            [{"kind": "host", "gib": 3.0}],
            "",
        ),
        (
            "python -m sglang.launch_server --model-path m --enable-hierarchical-cache --hicache-size 50 "
            "--radix-eviction-policy slru",
            [{"kind": "host", "gib": 50e9 / GIB, "eviction": {"policy": "slru"}}],
            "",
        ),
        (
            "LMCACHE_CACHE_POLICY=LFU python -m sglang.launch_server --model-path m --enable-lmcache "
            "--radix-eviction-policy slru",
            [{"kind": "host", "gib": 5.0, "eviction": {"policy": "lfu"}}],
            "",
        ),
        (
            "LMCACHE_CACHE_POLICY=S3FIFO python -m sglang.launch_server --model-path m --enable-lmcache",
            [{"kind": "host", "gib": 5.0}],
            "cache_policy S3FIFO is not modelled",
        ),
    ],
)  # fmt: skip
def test_memory_behind_the_kv_cache_is_read(command: str, tiers: list[dict[str, Any]], says: str) -> None:
    found = scenario_from(re.sub(r" m\b", " Qwen/Qwen3-32B", command, count=1), hardware="h200")
    assert [tier.model_dump(exclude_unset=True) for tier in found.scenario.memory.tiers] == tiers
    for text in filter(None, says.split("; ")):
        assert text in "\n".join(found.notes)


@pytest.mark.parametrize(
    ("connector", "extra", "says"),
    [
        ("OffloadingConnector", {"cpu_bytes_to_use": "lots"}, "cpu_bytes_to_use is a number above 0; got 'lots'"),
        ("OffloadingConnector", {}, "needs cpu_bytes_to_use"),
        ("OffloadingConnector", [1], "kv_connector_extra_config is an object"),
        ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": -1}, "cpu_bytes_to_use is a number above 0; got -1"),
        ("LMCacheConnectorV1", {"lmcache.max_local_cpu_size": "x"}, "max_local_cpu_size is a number above 0"),
        ("MultiConnector", {"connectors": [3]}, "takes a list of connectors"),
    ],
)
def test_connectors_that_cannot_be_are_one_sentence(connector: str, extra: Any, says: str) -> None:
    config = json.dumps({"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra})
    with pytest.raises(RooftraceError, match=says):
        scenario_from(f"vllm serve Qwen/Qwen3-32B --kv-transfer-config '{config}'", hardware="h200")


@pytest.mark.parametrize(
    ("target", "device", "host", "flag", "lost"),
    [
        ("sglang", "slru", "slru", "--radix-eviction-policy slru", ""),
        (
            "sglang",
            "slru",
            None,
            "--radix-eviction-policy slru",
            "memory.tiers.0.eviction: lru; sglang evicts there by slru",
        ),
        ("sglang", None, "lfu", "--hicache-size", "memory.tiers.0.eviction: lfu; sglang evicts there by lru"),
        ("vllm", None, "lfu", "--kv-offloading-size", "memory.tiers.0.eviction: lfu; vllm evicts there by lru"),
        ("vllm", None, "lru", "--kv-offloading-size", ""),
    ],
)
def test_the_eviction_policy_of_host_memory_is_written_or_said_to_be_lost(
    target: str, device: str | None, host: str | None, flag: str, lost: str
) -> None:
    tier = {"kind": "host", "gib": 8e9 / GIB, "eviction": host}
    memory = {"eviction": device, "tiers": [{key: value for key, value in tier.items() if value is not None}]}
    given = {key: value for key, value in memory.items() if value is not None}
    scenario = Scenario.from_mapping({"scheduler": target, "serving_stack": target, "memory": given})
    written = export(Chosen(scenario=scenario, reasons=()), target)
    assert flag in written.text
    assert [text for text in written.left_out if "eviction" in text] == ([lost] if lost else [])


def test_hierarchical_cache_is_a_multiple_of_the_device_s() -> None:
    command = "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2 --enable-hierarchical-cache"
    given = {"hardware": "h200", "assignments": ["memory.kv_blocks=1000", "memory.block_tokens=1"]}
    (tier,) = scenario_from(f"{command} --hicache-ratio 3", **given).scenario.memory.tiers
    # 64 layers, 8 KV heads of 128 in two bytes each, keys and values.
    assert tier.gib == pytest.approx(3 * 1000 * 64 * 8 * 128 * 2 * 2 / GIB)
    (tier,) = scenario_from(command, **given).scenario.memory.tiers
    assert tier.gib == pytest.approx(2 * 1000 * 64 * 8 * 128 * 2 * 2 / GIB)


def test_the_model_that_was_asked_for_is_the_one_that_is_served() -> None:
    scenario = scenario_from("vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4", hardware="h200").scenario
    assert "vllm serve meta-llama/Llama-3.1-70B-Instruct" in export(Chosen(scenario=scenario, reasons=()), "vllm").text


@pytest.mark.parametrize(
    ("file", "loaded", "named"), [("mine/config.json", "mine", False), ("mine.json", "mine.json", True)]
)
def test_a_server_loads_no_description_of_a_model(tmp_path: Path, file: str, loaded: str, named: bool) -> None:
    """A config.json stands for the folder that it lies in; of another file it is said that no server loads it."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(Path(hwmodels.__file__).with_name("models").joinpath("llama-3.1-8b.json").read_text())
    found = export(Chosen(scenario=Scenario(model=str(path)), reasons=()), "vllm")
    assert f"vllm serve {tmp_path / loaded}\n" in f"{found.text}\n"
    assert any("holds no weights" in each for each in found.left_out) == named


def test_one_side_of_a_handover_alone_is_said_to_be_one() -> None:
    config = '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
    found = scenario_from(f"vllm serve Qwen/Qwen3-32B --kv-transfer-config '{config}'", hardware="h200")
    assert any("has role decode, and is read as one that does both" in note for note in found.notes)


def test_several_commands_are_pools_on_the_command_line() -> None:
    out = rooftrace(
        "scenario", "from", "vllm serve Qwen/Qwen3-32B\nvllm serve Qwen/Qwen3-8B -tp 2", "--hardware", "h200"
    )
    assert out.exit_code == 0
    scenario = Scenario.from_yaml(out.stdout)
    assert scenario.pools is not None
    assert [pool.model for pool in scenario.pools.values()] == ["Qwen/Qwen3-32B", "Qwen/Qwen3-8B"]


@pytest.mark.slow(reason="whole lists of a release")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_dynamos_manifest_is_like_those_of_the_release(engine: str) -> None:
    folder = os.environ.get("ROOFTRACE_DYNAMO_PACKAGE")
    if folder is None:
        pytest.skip("ROOFTRACE_DYNAMO_PACKAGE names no folder of ai-dynamo 1.6.1 (its dynamo/)")
    file = Path(folder) / "profiler" / "templates" / "dgd" / engine / "disagg.yaml"
    theirs = yaml.safe_load(file.read_text())
    scenario = Scenario.from_mapping(
        {
            "serving_stack": engine,
            "scheduler": engine,
            "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
            "links": {"net": {}},
        }
    )
    ours = yaml.safe_load(export(Chosen(scenario=scenario, reasons=()), "dynamo").text)
    assert (ours["apiVersion"], ours["kind"]) == (theirs["apiVersion"], theirs["kind"])
    those = {each["name"]: each for each in theirs["spec"]["components"]}
    for each in ours["spec"]["components"]:
        other = those[each["name"]]
        assert set(each) <= set(other)
        assert each["type"] == other["type"]
        mine, its = (of["podTemplate"]["spec"]["containers"][0] for of in (each, other))
        assert set(mine) - {"env"} <= set(its)
        assert mine["image"] == its["image"]
        assert mine.get("resources") == (None if "resources" not in its else {"limits": its["resources"]["limits"]})
        words = [*its["command"], *its["args"]]
        assert [*mine["command"], *mine["args"]][:3] == words[:3]
        flags = [word for word in mine["args"] if word.startswith("--")]
        assert set(flags) <= {word for word in words if word.startswith("--")} | {"--kv-transfer-config"}
    text = (Path(folder) / "common" / "configuration" / "groups" / "router_args.py").read_text()
    modes = text[text.index('flag_name="--router-mode"') :]
    modes = modes[modes.index("choices=[") : modes.index("]")]
    assert all(f'"{mode}"' in modes for mode in ROUTER_MODES.values())
