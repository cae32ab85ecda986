"""Which times a scenario uses, and what its manifest says of them."""

import re
from typing import Any

import pytest

from hwmodels.device import CATALOGUE, read_devices
from hwmodels.overheads import serving_stack
from sim import Scenario, ScenarioError, simulate
from sim.scenario.assembly import resolve

FEW = {"trace": "conversation", "requests": 40}


def scenario(**settings):
    return Scenario(**{"workload": FEW, **settings})


def test_calibrated_times_are_the_default_and_the_manifest_says_where_they_come_from():
    manifest = resolve(scenario()).manifest
    assert manifest["hardware"]["profile"] == "h100-sxm"
    assert "gemm_h100_bf16_vllm0.24.csv" in manifest["hardware"]["files"]
    stack = manifest["hardware"]["serving_stack"]
    assert stack["name"] == "vllm"
    assert set(stack["terms"]) == set(stack["sources"])
    assert manifest["notes"] == []


def test_a_device_that_was_not_measured_says_whose_efficiencies_it_borrows():
    (note,) = resolve(scenario(hardware="gb200")).manifest["notes"]
    assert note.startswith("gb200 has not been calibrated: efficiencies and latencies borrowed from b200, ")
    assert re.search(r"nine times in ten a kernel's time is within a factor of what is priced: GEMM 1\.\d", note)


def test_the_datasheet_has_to_be_asked_for():
    built = resolve(scenario(cost_model="roofline"))
    assert built.manifest["hardware"]["profile"].startswith("datasheet roofline")
    assert built.experiment.admission_s == 0.0
    tpot = simulate(scenario(cost_model="roofline")).summary["tpot_s"]["mean"]
    assert tpot < simulate(scenario()).summary["tpot_s"]["mean"]


def test_an_ideal_stack_is_faster_than_a_real_one_and_has_no_front_end():
    ideal, real = (simulate(scenario(serving_stack=name)).summary for name in ("ideal", "vllm"))
    assert ideal["tpot_s"]["mean"] < real["tpot_s"]["mean"]
    assert ideal["ttft_s"]["mean"] < real["ttft_s"]["mean"]
    assert resolve(scenario(serving_stack="ideal")).experiment.admission_s == 0.0


def test_an_eager_stack_launches_every_layer_of_a_decode():
    eager, graph = (simulate(scenario(serving_stack=name)).summary for name in ("eager", "vllm"))
    assert eager["tpot_s"]["mean"] > 1.5 * graph["tpot_s"]["mean"]


def test_an_unknown_stack_is_answered_with_the_known_ones():
    with pytest.raises(
        ScenarioError, match="serving_stack is one of vllm, trtllm, sglang, vllm-rocm, sglang-rocm, eager, ideal"
    ):
        scenario(serving_stack="vlllm")


def test_a_shipped_profile_can_be_named_by_its_path(tmp_path):
    from hwmodels.profiles import load_profile, write_profile

    path = tmp_path / "mine.toml"
    write_profile(load_profile("h200"), path)
    manifest = resolve(scenario(hardware=str(path))).manifest
    assert (manifest["hardware"]["name"], manifest["hardware"]["profile"]) == ("h200", "h200")
    with pytest.raises(ScenarioError, match="is a calibrated profile and cost_model asks for the datasheet"):
        resolve(scenario(hardware=str(path), cost_model="roofline"))


def test_links_that_nobody_measured_are_priced_by_the_datasheet_and_the_run_says_so():
    scenario = Scenario.default().with_set(
        "hardware=tpu-v6e", "model=llama-3.1-70b", "parallel={tensor: 8}", "workload={trace: conversation, limit: 20}"
    )
    built = resolve(scenario)
    assert any("tpu-v6e's links have not been measured" in note for note in built.manifest["notes"])
    assert simulate(scenario).summary["requests"]["finished"] == 20


def test_a_model_whose_kernels_nobody_measured_for_the_device_is_refused():
    scenario = Scenario.default().with_set("hardware=tpu-v6e", "model=qwen3-30b-a3b", "parallel={tensor: 8}")
    with pytest.raises(ScenarioError, match=r"a mixture of experts, which nobody has measured .*cost_model: roofline"):
        resolve(scenario)
    assert resolve(scenario.with_set("cost_model=roofline")).experiment.replicas


def test_a_run_gives_the_interval_of_its_means_where_deployments_were_held_back() -> None:
    asked = {"protocol": "inferencex", "concurrency": 2, "prompt_tokens": 200, "output_tokens": 20}
    result = simulate(scenario(serving_stack="vllm", workload=asked))
    intervals = result.summary["intervals"]
    assert (intervals["level"], set(intervals["figures"])) == (0.9, {"tpot_s.mean", "ttft_s.mean"})
    for name, found in intervals["figures"].items():
        assert found["low"] < result.summary[name.removesuffix(".mean")]["mean"] < found["high"]
    assert "no fit had seen" in intervals["basis"]
    # All requests of this protocol count, so that its figures are the means.
    means = (result.summary["ttft_s"]["mean"], result.summary["tpot_s"]["mean"])
    assert result.figures == pytest.approx(means, rel=1e-9)


def test_a_release_of_the_stack_has_overheads_of_its_own() -> None:
    manifest = resolve(scenario(serving_stack="vllm", serving_release="0.12")).manifest
    assert manifest["hardware"]["serving_stack"]["release"] == "0.12"
    assert resolve(scenario(serving_stack="vllm")).manifest["hardware"]["serving_stack"]["release"] == "0.14"
    with pytest.raises(
        ScenarioError, match=r"serving_release: a release begins with numbers, such as 0\.14 or 0\.12; got 'new'"
    ):
        resolve(scenario(serving_stack="vllm", serving_release="new"))
    with pytest.raises(ScenarioError, match="ideal has no releases"):
        resolve(scenario(serving_stack="ideal", serving_release="1"))
    with pytest.raises(ScenarioError, match=r"serving_release: a release is numbers with dots, .* got '0\.zz'"):
        resolve(scenario(serving_stack="vllm", serving_release="0.zz"))
    with pytest.raises(
        ScenarioError, match=r"serving_release: cost_model roofline has no overheads.*leave serving_release out"
    ):
        resolve(scenario(serving_stack="vllm", serving_release="0.12", cost_model="roofline"))


@pytest.mark.parametrize("release", ["0.12", "0.12.0rc6", "1", "1.2.0.post1", "0.19.1+cu129", "0.5.6.dev3"])
def test_releases_are_read_with_what_may_follow_their_numbers(release: str) -> None:
    assert serving_stack("vllm", release).release in ("0.12", "0.14")


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("0.32.0", "0.32"), ("0.22.0", "0.19"), ("0.33.0rc2", "0.32"), ("0.12", "0.11"), ("0.8", "0.11")],
)
def test_memory_takes_any_release_as_overheads_do(asked: str, taken: str) -> None:
    built = resolve(scenario(serving_stack="vllm", serving_release=asked, memory={"release": asked}))

    assert built.manifest["memory"]["account"].startswith(f"vllm {taken}")
    older = [note for note in built.manifest["notes"] if "older than all of vllm whose account of memory" in note]
    assert len(older) == (asked == "0.8")


@pytest.mark.parametrize(
    "release", ["0.13b", "0.13rc", "0.13.", "0..13", "0.13 ", "0.13-", "v0.13", "0.13.x", "latest", "0.13b+"]
)
def test_what_is_no_release_is_refused(release: str) -> None:
    with pytest.raises(ScenarioError, match=r"serving_release.* such as "):
        resolve(scenario(serving_stack="vllm", serving_release=release))


def test_overheads_of_one_release_beside_the_memory_of_another_are_told() -> None:
    def told(memory: dict[str, Any] | None = None, release: str = "0.19.1") -> list[str]:
        asked = {"serving_stack": "vllm", "serving_release": release, "memory": memory or {}}
        return [note for note in resolve(scenario(**asked)).manifest["notes"] if "serving_release" in note]

    assert (
        told({"release": "0.19"})
        == told({"kv_blocks": 99})
        == told({"release": "0.11"}, "0.12")
        == told(release="0.33")
        == []
    )
    assert told({"release": "0.11"}) == [
        "serving_release is 0.19.1, and memory is divided as vllm 0.11 does it; the account of memory for that release is "
        "memory.release: '0.19'."
    ]
    # Where no release of the memory is given, it is the newest, as the key says.
    assert told() == []


def test_what_the_cache_would_have_been_made_of_is_told_where_its_blocks_are_given() -> None:
    def told(**memory: Any) -> list[str]:
        built = resolve(scenario(serving_stack="vllm", memory={"kv_blocks": 99, **memory}))
        assert built.experiment.replicas[0].kv_blocks == 98
        return [note for note in built.manifest["notes"] if "memory.kv_blocks" in note]

    assert told() == []
    (note,) = told(gpu_memory_utilization=0.8)
    assert "memory.gpu_memory_utilization beside it changes the account" in note
    (note,) = told(reserve_bytes=1e9, release="0.19")
    assert "memory.reserve_bytes and memory.release beside it change the account" in note


def test_intervals_widen_on_borrowed_devices_and_are_of_gpus_alone() -> None:
    def interval(**settings: object) -> dict:
        return resolve(scenario(**settings)).manifest.get("interval", {})

    own, lent = interval(), interval(hardware="gb200")
    (low, high), (lower, higher) = own["tpot_s"], lent["tpot_s"]
    assert (lower < 0.8 * low, higher > 1.25 * high) == (True, True)
    assert lent["basis"].endswith("for kernels that were not measured on gb200")
    assert interval(hardware="tpu-v6e") == interval(hardware="tpu-v7") == {}


def test_no_interval_reaches_below_the_reading_of_the_weights() -> None:
    asked = {"protocol": "inferencex", "concurrency": 1, "prompt_tokens": 200, "output_tokens": 20}
    found = simulate(scenario(hardware="l4", model="llama-3.1-8b", workload=asked)).summary["intervals"]["figures"][
        "tpot_s.mean"
    ]
    # All but the embedding: 8.03e9 less 128,256 x 4,096 parameters in 16 bits at 300 GB/s.
    assert found["low"] == pytest.approx(2 * (8.030e9 - 128256 * 4096) / 300e9, rel=2e-3)


def test_a_saturated_run_has_no_interval() -> None:
    asked = {
        "arrivals": {"process": "poisson", "rate_per_s": 400.0},
        "requests": 400,
        "prompt_tokens": 2000,
        "output_tokens": 50,
    }
    result = simulate(scenario(workload=asked))
    assert result.summary["saturated"] is True
    assert "interval" in result.manifest
    assert result.summary["intervals"] == {"why_not": "the run is saturated, and the runs that were held back are not"}


def test_a_release_before_all_that_are_known_is_noted() -> None:
    def notes(release: str) -> list[str]:
        found = resolve(scenario(serving_stack="vllm", serving_release=release)).manifest["notes"]
        return [note for note in found if "stand in" in note]

    assert notes("0.9") == [
        "serving_release 0.9 is older than all of vllm whose overheads are known: those of 0.12 stand in."
    ]
    assert notes("0.12") == notes("0.13.1") == notes("0.20") == []


def test_the_note_of_a_borrowed_device_names_what_the_model_uses() -> None:
    (note,) = resolve(scenario(hardware="gb200")).manifest["notes"]
    within = note.rpartition("what is priced: ")[2]
    assert [word.rpartition(" ")[0] for word in within.split(", ")] == ["GEMM", "prompts", "decodes"]


def test_a_datasheet_under_a_catalogue_name_is_another_device(tmp_path) -> None:
    """It borrows of the measured device of that name, the nearest there is, and its interval is not that device's."""
    own = read_devices(CATALOGUE)["h200"]
    numbers = {name: [value, "a file of the test"] for name, value in own.peak_flops_per_s.items()}
    peaks = ", ".join(f'{name} = [{value}, "{source}"]' for name, (value, source) in numbers.items())
    (tmp_path / "mine.toml").write_text(
        f"""[h200]
title = "H200 with a slower memory"
vendor = "NVIDIA"
peak = {{ {peaks} }}
memory_bytes = [{own.memory_bytes}, "a file of the test"]
hbm_bytes_per_s = [{0.9 * own.hbm_bytes_per_s}, "a file of the test"]
l2_bytes = [{own.l2_bytes}, "a file of the test"]
n_cores = [{own.n_cores}, "a file of the test"]
link = {{ kind = "NVLink", latency_s = [1e-6, "test"], bytes_per_s = [450e9, "test"] }}
network = {{ kind = "InfiniBand", latency_s = [5e-6, "test"], bytes_per_s = [50e9, "test"] }}
devices_per_node = [8, "test"]
tdp_w = [700, "test"]
"""
    )
    mine, catalogue = (resolve(scenario(hardware=name)).manifest for name in (str(tmp_path / "mine.toml"), "h200"))
    assert "borrowed from h200, " in mine["notes"][0]
    assert mine["interval"]["tpot_s"][1] > 1.2 * catalogue["interval"]["tpot_s"][1]
    assert "device" in mine["interval"]["basis"].partition("no fit")[0]
    assert "device" not in catalogue["interval"]["basis"]
