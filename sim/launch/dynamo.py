"""A manifest for Dynamo's operator: a frontend with its router, and one kind of worker a pool (release 1.6.1, v1alpha1)."""

from __future__ import annotations

from typing import Any

import yaml

from sim.launch.chosen import Chosen, Export
from sim.launch.writers import WRITERS
from sim.launch.writing import Writing

_MODULES = {"vllm": "dynamo.vllm", "sglang": "dynamo.sglang"}
_IMAGES = {
    "vllm": "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1",
    "sglang": "nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.6.1",
}
_ROUTED_BY_CACHE = ("dynamo", "prefix", "llm_d")


def manifest(chosen: Chosen) -> Export:
    """One document, the reasons as comments above it."""
    scenario = chosen.scenario
    left: list[str] = []
    services: dict[str, Any] = {"Frontend": _frontend(scenario.router.policy)}
    parts = {name: scenario.pool(name) for name in scenario.pools} if scenario.pools else {"worker": scenario}
    for name, part in parts.items():
        role = scenario.pools[name].role if scenario.pools else "both"
        engine = part.serving_stack if part.serving_stack in _MODULES else "vllm"
        if part.serving_stack != engine:
            left.append(f"{name}: Dynamo's workers here run {engine}, and it was simulated with {part.serving_stack}")
        command = Writing(part, engine)
        WRITERS[engine](command)
        services[name] = _worker(part, role, engine, command)
        left += [f"{name}: {text}" for text in command.left_out()]
    document = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "rooftrace"},
        "spec": {"services": services},
    }
    reasons = "".join(f"# {reason}\n" for reason in chosen.reasons)
    return Export(text=reasons + yaml.safe_dump(document, sort_keys=False), left_out=tuple(left))


def _frontend(router: str) -> dict[str, Any]:
    mode = "kv" if router in _ROUTED_BY_CACHE else "round-robin"
    return {"componentType": "frontend", "replicas": 1, "envs": [{"name": "DYN_ROUTER_MODE", "value": mode}]}


def _worker(part: Any, role: str, engine: str, command: Writing) -> dict[str, Any]:
    # The words that start a plain server (and name a model beside no option) are replaced by Dynamo's module.
    words = command.words[1:]
    if engine == "vllm":
        words = ["--model", *words]
    if role != "both":
        words += ["--disaggregation-mode", role]
    parallel = part.parallel
    devices = parallel.tensor * parallel.pipeline * parallel.data
    found: dict[str, Any] = {"componentType": "worker", "replicas": part.replicas}
    if role != "both":
        found["subComponentType"] = role
    found["resources"] = {"limits": {"gpu": str(devices)}}
    container = {"image": _IMAGES[engine], "command": ["python3", "-m", _MODULES[engine]], "args": words}
    found["extraPodSpec"] = {"mainContainer": container}
    return found
