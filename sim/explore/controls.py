"""Settings that the page offers: keys of a scenario with the bounds, the choices and the words of its schema."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.device import device_catalogue
from hwmodels.model import model_catalogue
from sim.explore.answer import at
from sim.scenario import Scenario
from sim.scenario.schema import json_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One setting on the page. What is left out is as the schema has it."""

    key: str
    label: str
    unit: str = ""
    log: bool = False
    minimum: float | None = None
    maximum: float | None = None
    """Ends of a slider; the schema's bounds hold beside them."""
    choices: tuple[Any, ...] = ()
    labels: tuple[str, ...] = ()
    """Words for `choices`, where their values are none."""
    also: tuple[tuple[str, Any], ...] = ()
    """Settings that it needs beside it, where they are not there yet."""
    kind: str = ""


_POISSON = (("workload.arrivals.process", "poisson"),)
_TRAFFIC: Mapping[str, tuple[str, str]] = {
    "trace": ("built-in conversation trace", "{trace: conversation}"),
    "prompt_tokens": (
        "rate and lengths",
        "{arrivals: {process: poisson, rate_per_s: 5}, prompt_tokens: 1000, output_tokens: 200, requests: 2500}",
    ),
    "conversations": (
        "conversations of several turns",
        "{conversations: {sessions: 500, turns: 5, user_tokens: 200, answer_tokens: 200, system_prompt_tokens: 500, "
        "mean_think_s: 10}, arrivals: {process: poisson, rate_per_s: 1}}",
    ),
    "shared_prefix": (
        "shared system prompts",
        "{shared_prefix: {groups: 20, prompts_per_group: 50, system_prompt_tokens: 1000, question_tokens: 200, output_tokens: 200, "
        "stages: [{rate_per_s: 5, duration_s: 300}]}}",
    ),
}
"""Kinds of traffic by the setting that only they have: what they are called, and the section that begins one."""
_DECODING: Mapping[str, tuple[str, str]] = {
    "autoregressive": ("one token a step", "{method: autoregressive}"),
    "draft_model": (
        "a draft model",
        "{method: draft_model, num_speculative_tokens: 4, acceptance: {alpha: 0.7}, draft: {cost_ratio: 0.1}}",
    ),
    "ngram": ("n-gram look-up", "{method: ngram, num_speculative_tokens: 4, acceptance: {alpha: 0.5}}"),
    "eagle": (
        "EAGLE",
        "{method: eagle, num_speculative_tokens: 4, acceptance: {alpha: 0.75}, draft: {cost_ratio: 0.05}}",
    ),
    "medusa": ("Medusa", "{method: medusa, num_speculative_tokens: 4, acceptance: {alpha: 0.6}}"),
    "mtp": ("the model's own extra layers (MTP)", "{method: mtp, num_speculative_tokens: 1, acceptance: {alpha: 0.8}}"),
}
"""Methods of decoding likewise."""


def _groups() -> Mapping[str, tuple[Control, ...]]:
    return {
        "Model": (
            Control(key="model", label="Model", choices=tuple(model_catalogue())),
            Control(key="precision", label="Weights"),
            Control(key="kv_precision", label="KV cache"),
        ),
        "Device": (
            Control(key="hardware", label="Device", choices=tuple(device_catalogue())),
            Control(key="replicas", label="Machines", maximum=64, log=True),
            Control(key="power_limit_w", label="Power limit", unit="W", minimum=100, maximum=1500),
        ),
        "Layout": (
            Control(key="parallel.tensor", label="Tensor parallel", choices=(1, 2, 4, 8, 16)),
            Control(key="parallel.pipeline", label="Pipeline stages", choices=(1, 2, 4, 8)),
            Control(key="parallel.data", label="Data-parallel ranks", choices=(1, 2, 4, 8, 16)),
            Control(key="parallel.expert", label="Expert groups", choices=(1, 2, 4, 8, 16, 32)),
        ),
        "Stack": (
            Control(key="serving_stack", label="Serving stack"),
            Control(key="scheduler.max_num_batched_tokens", label="Token budget", unit="tokens", minimum=256, maximum=32768,
                    log=True, kind="integer"),
            Control(key="scheduler.max_num_seqs", label="Sequences at once", minimum=1, maximum=2048, log=True, kind="integer"),
            Control(key="memory.prefix_caching", label="Prefix caching"),
            Control(key="memory.gpu_memory_utilization", label="Memory of the GPU", unit="share", minimum=0.1, maximum=1.0),
            Control(key="adapters.max_loras", label="Adapter slots", minimum=1, maximum=256, log=True, kind="integer"),
            Control(key="encode.cache_tokens", label="Encoder cache", unit="tokens", minimum=1024, maximum=1 << 20, log=True,
                    kind="integer"),
            Control(key="router", label="Router"),
            Control(key="cost_model", label="Prices"),
        ),
        "Workload": (
            Control(key="workload", label="Traffic", choices=_texts(_TRAFFIC), labels=_called(_TRAFFIC)),
            Control(key="workload.rate_scale", label="Rate", unit="times", minimum=0.1, maximum=20, log=True),
            Control(key="workload.arrivals.rate_per_s", label="Requests a second", unit="requests/s", minimum=0.1, maximum=200,
                    log=True, also=_POISSON, kind="number"),
            Control(key="workload.prompt_tokens.tokens", label="Prompt", unit="tokens", minimum=1, maximum=32768, log=True,
                    kind="integer"),
            Control(key="workload.output_tokens.tokens", label="Answer", unit="tokens", minimum=1, maximum=8192, log=True,
                    kind="integer"),
            Control(key="workload.conversations.sessions", label="Sessions", minimum=1, maximum=5000, log=True),
            Control(key="workload.conversations.system_prompt_tokens", label="System prompt", unit="tokens", maximum=8192),
            Control(key="workload.conversations.mean_think_s", label="Time to think", unit="s", minimum=0, maximum=120),
            Control(key="workload.shared_prefix.system_prompt_tokens", label="Shared prefix", unit="tokens", maximum=8192),
            Control(key="workload.requests", label="Requests", minimum=100, maximum=20_000, log=True),
            Control(key="workload.limit", label="First requests alone", minimum=100, maximum=20_000, log=True),
            Control(key="seed", label="Seed", maximum=100),
        ),
        "SLO": (
            Control(key="slo.ttft_s", label="TTFT of each", unit="s", minimum=0.05, maximum=30, log=True),
            Control(key="slo.tpot_s", label="TPOT of each", unit="s", minimum=0.005, maximum=1, log=True),
            Control(key="slo.e2el_s", label="End to end of each", unit="s", minimum=0.5, maximum=300, log=True),
            Control(key="slo.ttft_p95_s", label="TTFT p95", unit="s", minimum=0.05, maximum=30, log=True, kind="number"),
            Control(key="slo.tpot_p95_s", label="TPOT p95", unit="s", minimum=0.005, maximum=1, log=True, kind="number"),
        ),
        "Decoding": (
            Control(key="decoding", label="Method", choices=_texts(_DECODING), labels=_called(_DECODING)),
            Control(key="decoding.num_speculative_tokens", label="Drafted tokens", minimum=1, maximum=16, kind="integer"),
            Control(key="decoding.acceptance.alpha", label="Acceptance of each", unit="share", minimum=0, maximum=1),
            Control(key="decoding.draft.cost_ratio", label="Cost of a draft", unit="of a step", minimum=0, maximum=1),
        ),
        "Prices": (
            Control(key="costs.usd_per_device_hour", label="Device", unit="$/h", minimum=0.1, maximum=20),
            Control(key="costs.carbon_g_per_kwh", label="Carbon", unit="g/kWh", minimum=0, maximum=1000),
            Control(key="costs.pue", label="Building (PUE)", minimum=1, maximum=2),
        ),
    }  # fmt: skip


def controls(scenario: Scenario) -> dict[str, Any]:
    """The controls of the page by group, with the values that *scenario* has."""
    resolved = scenario.resolved()
    return {
        "groups": [
            {"name": name, "controls": [dict(_facts(each, resolved)) for each in group if _applies(each, resolved)]}
            for name, group in _groups().items()
        ]
    }


def _texts(kinds: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(text for _, text in kinds.values())


def _called(kinds: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(name for name, _ in kinds.values())


def _applies(control: Control, resolved: Mapping[str, Any]) -> bool:
    """Whether *control* is about the workload, decoding, adapters and encoder that there are; of other settings always."""
    first, _, rest = control.key.partition(".")
    if first in ("adapters", "encode"):
        return at(resolved, first) is not None
    if first == "decoding" and rest:
        # Of what is drafted, what is given.
        return at(resolved, control.key) is not None
    if first != "workload" or not rest:
        return True
    workload = resolved["workload"]
    own = rest.partition(".")[0]
    if own == "arrivals":
        return "rate_per_s" in workload[own] if workload.get(own) else workload.get("trace") is not None
    if own == "rate_scale":
        return workload.get("arrivals") is None and workload.get("protocol") is None
    if own in ("limit", "trace"):
        return workload.get("protocol") is None
    # A setting of one kind of traffic, or of a length that is the same for all.
    return at(resolved, control.key) is not None


def _value(control: Control, resolved: Mapping[str, Any]) -> Any:
    if control.key == "workload":
        return next((text for key, (_, text) in _TRAFFIC.items() if resolved["workload"].get(key) is not None), None)
    if control.key == "decoding":
        return _DECODING[resolved["decoding"]["method"]][1]
    value = at(resolved, control.key)
    return value.get("policy", value.get("name", value.get("device"))) if isinstance(value, Mapping) else value


def _facts(control: Control, resolved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    schema = dict(_schema_of(control.key))
    choices = list(control.choices) or _choices(schema)
    kind = control.kind or _kind(schema, bool(choices))
    value = _value(control, resolved)
    yield "key", control.key
    yield "label", control.label
    yield "kind", "choice" if choices else kind
    if choices:
        if value is not None and value not in choices:
            choices.insert(0, value)
        yield "choices", choices
    if control.labels:
        yield "labels", list(control.labels)
    if kind in ("number", "integer"):
        low, high = control.minimum, control.maximum
        yield (
            "minimum",
            next(each for each in (low, schema.get("minimum"), schema.get("exclusiveMinimum"), 0) if each is not None),
        )
        yield "maximum", next(each for each in (high, schema.get("maximum"), 100) if each is not None)
        yield "step", 1 if kind == "integer" else "any"
        yield "scale", "log" if control.log else "linear"
    if control.unit:
        yield "unit", control.unit
    if control.also:
        yield "also", dict(control.also)
    yield "help", " ".join(str(schema.get("description", "")).split())
    yield "value", value


@functools.cache
def _whole() -> Mapping[str, Any]:
    return json_schema()


def _schema_of(key: str) -> Mapping[str, Any]:
    """The schema of the setting at the dotted *key*, without null and references; empty for a setting of a policy or a process."""
    at: Mapping[str, Any] = _whole()
    for part in key.split("."):
        below = [found["properties"][part] for found in _kinds_of(at) if part in found.get("properties", {})]
        if not below:
            return {}
        at = below[0]
    own = [each for each in _kinds_of(at) if each.get("type") != "null"]
    about = {name: at[name] for name in ("description", "default") if name in at}
    return {**(own[0] if own else {}), **about}


def _kinds_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas that *schema* may be, one by one."""
    if "$ref" in schema:
        return _kinds_of(_whole()["$defs"][schema["$ref"].rpartition("/")[2]])
    found = [each for option in schema.get("anyOf", ()) for each in _kinds_of(option)]
    return found or [schema]


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("enum", ()))


def _kind(schema: Mapping[str, Any], chosen: bool) -> str:
    kinds = {"number": "number", "integer": "integer", "boolean": "boolean"}
    return "choice" if chosen else kinds.get(str(schema.get("type")), "text")
