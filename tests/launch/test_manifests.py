"""Manifests that are written: whole by their schemas, read back as they were, and what they do not carry is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwmodels.device import load_device
from sim.errors import RooftraceError
from sim.launch import export, scenario_from
from sim.launch.chosen import Chosen
from sim.launch.kubernetes import PRODUCTS
from sim.scenario import Scenario
from tests.cli.test_run import rooftrace
from tests.test_launch_back import _NOT_OF_A_SERVER, a_scenario, inmost, leaves

TARGETS = ("kubernetes", "llm-d", "kserve", "dynamo")


def of(settings: dict[str, Any]) -> Chosen:
    base = {"model": "Qwen/Qwen3-8B", "hardware": "h200", "serving_stack": "vllm", "scheduler": "vllm"}
    return Chosen(scenario=Scenario.from_mapping({**base, **settings}), reasons=("because",))


PAIR = {
    "pools": {
        "prefill": {"role": "prefill", "replicas": 2, "memory": {"max_model_len": 8192}},
        "decode": {
            "role": "decode",
            "parallel": {"tensor": 2},
            "memory": {"max_model_len": 8192, "prefix_caching": False},
        },
    },
    "links": {"net": {}},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_a_manifest_does_not_carry_is_named(target: str, engine: str) -> None:
    carried = 0
    for seed in range(20):
        scenario = a_scenario(random.Random(f"{engine} {target} {seed}"), engine)
        written = export(Chosen(scenario=scenario, reasons=("because",)), target)
        said = "\n" + "\n".join(text.removeprefix("worker: ") for text in written.left_out)
        settings = scenario.decoding.acceptance
        set_ = [] if settings is None else [f"decoding.acceptance={{alpha: {settings.alpha}}}"]
        again = scenario_from(written.text, hardware="h200", assignments=set_).scenario
        before, after = (each.model_dump(exclude_defaults=True) for each in (scenario, again))
        before["scheduler"] = inmost(scenario.scheduler.model_dump())
        after["scheduler"] = again.scheduler.model_dump()
        old, new = leaves(before), leaves(after)
        for key in set(old) | set(new):
            alone = key.startswith("router") and scenario.replicas == 1
            if key.startswith(_NOT_OF_A_SERVER) or alone or key == "scheduler.disable_radix_cache":
                continue
            if old.get(key) == new.get(key):
                carried += 1
            else:
                assert key in said or f"\n{key.split('.')[0]}: " in said, (seed, key, old.get(key), new.get(key), said)
    assert carried > 50


@pytest.mark.parametrize("target", TARGETS)
def test_a_pair_that_prefills_and_decodes_comes_back(target: str) -> None:
    chosen = of(PAIR)
    again = scenario_from(export(chosen, target).text, hardware="h200" if target == "dynamo" else None).scenario
    assert again.pools is not None
    assert again.links is not None
    for name in ("prefill", "decode"):
        wanted, found = (each.pool(name).model_dump(exclude_defaults=True) for each in (chosen.scenario, again))
        own = {"scheduler": "its own", "router": None}
        assert {**found, **own} == {**wanted, **own}
        assert again.pools[name].role == name


@pytest.mark.parametrize("policy", ["target_tracking", "concurrency"])
def test_what_scales_a_deployment_comes_back(policy: str) -> None:
    measure = {"measure": "waiting"} if policy == "target_tracking" else {}
    autoscale = {"policy": {"policy": policy, "target": 12, **measure}, "min": 2, "max": 9, "down_window_s": 60}
    chosen = of({"autoscale": autoscale, "replicas": 3})
    again = scenario_from(export(chosen, "kubernetes").text).scenario
    assert again.autoscale == chosen.scenario.autoscale
    assert (again.replicas, again.hardware) == (3, "h200")


def test_a_behavior_without_a_window_for_scale_down_has_that_of_kubernetes() -> None:
    chosen = of({"autoscale": {"policy": {"policy": "concurrency", "target": 12}, "min": 2, "max": 9}, "replicas": 3})
    documents = list(yaml.safe_load_all(export(chosen, "kubernetes").text))
    (scaler,) = [each for each in documents if each["kind"] == "ScaledObject"]
    policies = [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    behavior = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"policies": policies}}
    scaler["spec"]["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": behavior}}
    read = scenario_from(yaml.safe_dump_all(documents))
    autoscale = read.scenario.autoscale
    assert autoscale is not None
    assert (autoscale.up_window_s, autoscale.down_window_s) == (0.0, 300.0)
    assert any("policies in behavior" in text for text in read.notes)


def test_kserve_scales_by_requests_under_way() -> None:
    chosen = of({"autoscale": {"policy": {"policy": "concurrency", "target": 12}, "min": 2, "max": 9}, "replicas": 2})
    written = export(chosen, "kserve")
    assert scenario_from(written.text).scenario.autoscale == chosen.scenario.autoscale


def test_what_has_no_counterpart_among_scalers_is_named() -> None:
    chosen = of({"autoscale": {"policy": {"policy": "knative", "target": 12}, "max": 9, "provision_s": 30}})
    for target in ("kubernetes", "kserve", "llm-d"):
        assert any("autoscale: " in text for text in export(chosen, target).left_out)
    assert "autoscale.provision_s: 30.0" in export(chosen, "kubernetes").left_out


def test_manifests_for_amd_say_what_is_nvidias_in_them() -> None:
    for stack in ("vllm-rocm", "sglang-rocm"):
        left = export(of({"hardware": "mi355x", "serving_stack": stack}), "kubernetes").left_out
        assert any("ROCm's image and amd.com/gpu" in text for text in left)
    left = export(of({"hardware": "mi355x", "serving_stack": "vllm"}), "dynamo").left_out
    assert any("ROCm's image, and amd.com/gpu" in text for text in left)
    assert not any("ROCm" in text for text in export(of({"hardware": "b300"}), "kubernetes").left_out)


def test_every_object_of_kubernetes_refers_to_one_that_is_there() -> None:
    scaled = {"autoscale": {"policy": {"policy": "concurrency", "target": 8}, "max": 4}}
    pools = {name: {**pool, **scaled} for name, pool in PAIR["pools"].items()}
    documents = list(yaml.safe_load_all(export(of({**PAIR, "pools": pools}), "kubernetes").text))
    of_kind: dict[str, dict[str, Any]] = {}
    for each in documents:
        assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
        assert each["metadata"]["name"] not in of_kind.setdefault(each["kind"], {})
        of_kind[each["kind"]][each["metadata"]["name"]] = each["spec"]
    assert set(of_kind) == {"Deployment", "Service", "ScaledObject"}
    for name, spec in of_kind["Deployment"].items():
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == of_kind["Service"][name]["selector"]
        pod = spec["template"]["spec"]
        mounted = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        (container,) = pod["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        assert {port["targetPort"] for port in of_kind["Service"][name]["ports"]} == ports
    for name, spec in of_kind["ScaledObject"].items():
        assert spec["scaleTargetRef"]["name"] == name
        assert name in of_kind["Deployment"]
    (script,) = (spec["template"]["spec"]["containers"][0]["command"][2] for name, spec in of_kind["Deployment"].items()
                 if name.endswith("-proxy"))  # fmt: skip
    assert "--prefill http://rooftrace-prefill:8000 --decode http://rooftrace-decode:8000" in script


def test_targets_of_one_model_refuse_what_is_more() -> None:
    chosen = of({"pools": {"a": {}, "b": {"model": "qwen3-32b"}}})
    with pytest.raises(RooftraceError, match="one pool, or one that prefills and one that decodes"):
        export(chosen, "llm-d")
    again = scenario_from(export(chosen, "kserve").text).scenario
    assert again.pools is not None
    assert list(again.pools) == ["a", "b"]


def test_labels_of_gpus_are_those_that_are_read() -> None:
    for device, label in PRODUCTS.items():
        assert load_device(label).name == device


def test_an_export_needs_no_run(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.yaml", tmp_path / "k8s.yaml"
    file.write_text("model: qwen3-8b\nhardware: h200\nscheduler: vllm\nworkload: {trace: conversation}\n")
    assert rooftrace("export", str(file), "--for", "kubernetes", "-o", str(out)).exit_code == 0
    assert rooftrace("scenario", "from", str(out)).exit_code == 0
    refused = rooftrace("export", str(tmp_path / "none.yaml"), "--for", "kubernetes")
    assert refused.exit_code == 2
    assert len(refused.stderr.strip().splitlines()) == 1
