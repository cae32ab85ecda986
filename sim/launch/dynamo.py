"""A manifest for Dynamo's operator: a frontend with its router, and one kind of worker a pool.

As the templates of release 1.6.1 have it (dynamo/profiler/templates/dgd, v1beta1); names of router modes from
dynamo/common/configuration/groups/router_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from hwmodels.device import device_catalogue
from sim.launch.chosen import Chosen, Export
from sim.launch.engines import launches
from sim.launch.writers import commands, of_the_whole
from sim.launch.writing import Writing
from sim.scenario import Scenario

_MODULES = {name: launch.dynamo_module for name, launch in launches().items() if launch.dynamo_module is not None}
_IMAGE = "nvcr.io/nvidia/ai-dynamo/{engine}-runtime:1.6.1"
ROUTER_MODES: Mapping[str, str] = {
    "round_robin": "round-robin",
    "random": "random",
    "power_of_two": "power-of-two",
    "least_outstanding": "least-loaded",
    "dynamo": "kv",
    "prefix": "kv",
    "llm_d": "kv",
}
"""Modes of the frontend by the scenario's routers."""


def manifest(chosen: Chosen) -> Export:
    """One document, the reasons as comments above it."""
    scenario = chosen.scenario
    left = [*of_the_whole(scenario), *_router_left_out(scenario)]
    # The images of all engines have the frontend.
    image = scenario.serving_stack if scenario.serving_stack in _MODULES else next(iter(_MODULES))
    frontend = _component("Frontend", "frontend", 1, _container(image, "dynamo.frontend", []))
    mode = ROUTER_MODES.get(scenario.router.policy, "round-robin")
    frontend["podTemplate"]["spec"]["containers"][0]["env"] = [{"name": "DYN_ROUTER_MODE", "value": mode}]
    components = [frontend]
    for name, command in commands(scenario, None):
        part, name = command.scenario, name or "worker"
        parallel = part.parallel
        container = _container(command.target, _MODULES[command.target], _arguments(command))
        devices = parallel.gpus
        known = device_catalogue().get(str(part.device_name))
        if known is not None and known.vendor == "AMD":
            command.not_carried(
                f"hardware: {part.device_name}; ROCm's image, and amd.com/gpu in the place of nvidia.com/gpu"
            )
        container["resources"] = {"limits": {"nvidia.com/gpu": str(devices)}}
        kind = "worker" if command.role == "both" else command.role
        components.append(_component(name, kind, part.replicas, container))
        left += [f"{name}: {text}" for text in command.left_out()]
    document = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "rooftrace"},
        "spec": {"components": components},
    }
    reasons = "".join(f"# {reason}\n" for reason in chosen.reasons)
    return Export(text=reasons + yaml.safe_dump(document, sort_keys=False), left_out=tuple(dict.fromkeys(left)))


def _router_left_out(scenario: Scenario) -> list[str]:
    policy = scenario.router.policy
    if policy not in ROUTER_MODES:
        return [f"router {policy}: the frontend has none of that kind and goes round-robin"]
    if scenario.pools:
        return []  # Its settings are named with what is of all pools.
    return [f"router.{key}: {value}" for key, value in scenario.router.settings.items()]


def _arguments(command: Writing) -> list[str]:
    """The words of a plain server without those that start it."""
    launch, words = launches()[command.target], command.words[1:]
    if launch.dynamo_model_option is not None:
        words = [launch.dynamo_model_option, *words]
    if launch.dynamo_role_option is not None and command.role != "both":
        words += [launch.dynamo_role_option, command.role]
    return words


def _container(engine: str, module: str, arguments: list[str]) -> dict[str, Any]:
    args = ["-m", module, *arguments]
    return {"name": "main", "image": _IMAGE.format(engine=engine), "command": ["python3"], "args": args}


def _component(name: str, kind: str, replicas: int, container: Mapping[str, Any]) -> dict[str, Any]:
    template = {"spec": {"containers": [dict(container)]}}
    return {"name": name, "type": kind, "replicas": replicas, "podTemplate": template}
