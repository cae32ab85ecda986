"""Policies, arrival processes and distributions by short name, or as package.module:Class, with their settings."""

from __future__ import annotations

import importlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sim.errors import ScenarioError
from sim.scenario.explain import describe, shown, unknown

SCHEDULERS: Mapping[str, str] = {
    "static": "policies.schedulers:Static",
    "orca": "policies.schedulers:Orca",
    "vllm": "policies.schedulers:Vllm",
    "sarathi": "policies.schedulers:Sarathi",
    "decode_maximal": "policies.sarathi:DecodeMaximal",
    "chunked_only": "policies.sarathi:ChunkedOnly",
    "padded": "policies.sarathi:Padded",
}
AUTO = ("token_budget", "chunk")
"""Scheduler settings that may be AUTO_VALUE: chosen from the cost model."""
AUTO_VALUE = "auto"
ROUTERS: Mapping[str, str] = {
    "round_robin": "policies.routers:RoundRobin",
    "random": "policies.routers:Random",
    "least_outstanding": "policies.routers:LeastOutstanding",
    "power_of_two": "policies.routers:PowerOfTwo",
    "least_kv": "policies.routers:LeastKv",
}


# Two ways of saying the same thing are written with a bar between them; the settings given tell which is meant.
PROCESSES: Mapping[str, str] = {
    "poisson": "workloads.generators:Poisson",
    "gamma": "workloads.generators:Gamma",
    "deterministic": "workloads.generators:Deterministic",
    "pareto": "workloads.generators:Pareto",
    "mmpp": "workloads.generators:Mmpp",
    "closed_loop": "sim.scenario.named:Clients",
}
DISTRIBUTIONS: Mapping[str, str] = {
    "fixed": "workloads.generators:Fixed",
    "uniform": "workloads.generators:Uniform",
    "lognormal": "workloads.generators:LogNormal|workloads.generators:LogNormal.from_mean_median",
    "zipf": "workloads.generators:Zipf",
    "empirical": "workloads.generators:Empirical|workloads.generators:Resampled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """A fixed number of clients, each sending its next request when its last one has ended."""

    concurrency: int
    mean_think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is at least 1; got {self.concurrency}")
        if self.mean_think_s < 0:
            raise ValueError(f"mean_think_s is at least 0; got {self.mean_think_s}")


def load(path: str) -> Any:
    """What package.module:Name stands for; ImportError or AttributeError where it is not there."""
    module_name, _, name = path.partition(":")
    found = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def policy(name: str, settings: Mapping[str, Any], table: Mapping[str, str], *, key: str, method: str) -> Any:
    """The policy called *name* in *table*, or imported where *name* is package.module:Class.

    Raises ScenarioError naming *key* for an unknown name, a module or class that is not there, a class without
    *method*, and settings that do not fit.
    """
    if name in table:
        return make(load(table[name]), settings, key=key, name=name)
    if ":" not in name:
        choices = [*table, "package.module:Class"]
        raise ScenarioError(unknown(f"{key}: {name!r} is not a policy", name, choices))
    try:
        found = load(name)
    except AttributeError:
        raise ScenarioError(f"{key}: {name.partition(':')[0]} has no {name.partition(':')[2]!r}") from None
    except Exception as error:
        # A module of the user's own may fail in any way while it is imported.
        raise ScenarioError(f"{key}: cannot import {name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(found, type) or not callable(getattr(found, method, None)):
        raise ScenarioError(f"{key}: a policy is a class with the method {method}; {name!r} is {shown(found)}")
    return make(found, settings, key=key, name=name)


def choice(name: str, settings: Mapping[str, Any], table: Mapping[str, str], *, key: str, what: str) -> Any:
    """The arrival process or distribution called *name* in *table*, made from *settings*."""
    if name not in table:
        raise ScenarioError(unknown(f"{key}: {name!r} is not {what}", name, table))
    variants = [load(path) for path in table[name].split("|")]
    fitting = [variant for variant in variants if set(settings) <= set(parameters(variant))]
    for variant in fitting:
        if all(setting in settings for setting, (_, required) in parameters(variant).items() if required):
            return make(variant, settings, key=key, name=name)
    if not fitting:
        known = list(dict.fromkeys(setting for variant in variants for setting in parameters(variant)))
        stranger = next((setting for setting in settings if setting not in known), None)
        if stranger is not None:
            raise ScenarioError(unknown(f"{key}.{stranger} is not a setting of {name}", stranger, known))
    ways = " or ".join(
        ", ".join(setting for setting, (_, required) in parameters(variant).items() if required) for variant in variants
    )
    raise ScenarioError(f"{key}: {name} needs {ways}; got {', '.join(settings) or 'nothing'}")


def make(factory: Callable[..., Any], settings: Mapping[str, Any], *, key: str, name: str) -> Any:
    """What *factory* (a class or function) makes of *settings*, checked against the types of its parameters.

    Raises ScenarioError naming `key.setting` for an unknown, missing or unfit one.
    """
    known = parameters(factory)
    for setting in settings:
        if setting not in known:
            of = f"{key}.{setting} is not a setting of {name}"
            raise ScenarioError(unknown(of, setting, known) if known else f"{of}, which has none")
    values: dict[str, Any] = {}
    for setting, (hint, required) in known.items():
        if setting in settings:
            values[setting] = _checked(settings[setting], hint, f"{key}.{setting}")
        elif required:
            raise ScenarioError(f"{key}.{setting} is missing; {name} needs it")
    try:
        return factory(**values)
    except (ValueError, TypeError) as error:
        raise ScenarioError(f"{key}: {error}") from error


def parameters(factory: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """The settings that *factory* takes: name to (type, whether it must be given)."""
    hints = typing.get_type_hints(factory)
    if not isinstance(factory, type) or not hints:
        hints = typing.get_type_hints(getattr(factory, "__init__", factory)) if isinstance(factory, type) else hints
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        parameter.name: (hints.get(parameter.name, Any), parameter.default is inspect.Parameter.empty)
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind not in variadic
    }


def schema(factory: Callable[..., Any]) -> dict[str, Any]:
    """JSON Schema properties of the settings that *factory* takes, with their defaults."""
    signature = inspect.signature(factory)
    out = {}
    for name, (hint, required) in parameters(factory).items():
        properties = TypeAdapter(hint).json_schema()
        if name in AUTO:
            properties = {"anyOf": [properties, {"const": AUTO_VALUE}]}
        if not required:
            properties["default"] = signature.parameters[name].default
        out[name] = properties
    return out


def _checked(value: Any, hint: Any, key: str) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
    except Exception:
        # A class or protocol of the policy's own that pydantic cannot check; its constructor will.
        return value
    try:
        # By way of JSON, because strict JSON takes a list for a tuple and YAML has no tuples.
        return adapter.validate_json(json.dumps(value))
    except TypeError:
        raise ScenarioError(f"{key}: got {shown(value)}, which is neither number, text, list nor mapping") from None
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        details = {**details, "loc": (key, *details["loc"])}
        raise ScenarioError(describe(details, None)) from None  # type: ignore[arg-type]
