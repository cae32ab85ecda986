"""Policies, arrival processes and distributions by short name, or as package.module:Class, with their settings.

A policy that wraps another has a setting `inner`, which is a policy in turn. A policy may also be package.module:function.
"""

from __future__ import annotations

import importlib
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hwmodels.stacks import stacks
from sim.errors import ScenarioError
from sim.scenario.explain import describe, misspelt
from sim.scenario.section import INNER
from sim.text import shown, unknown, without_addresses

SCHEDULERS: Mapping[str, str] = {
    "static": "policies.published:Static",
    "fastertransformer": "policies.published:FasterTransformer",
    "orca": "policies.published:Orca",
    "orca_paged": "policies.published:OrcaPaged",
    "sarathi": "policies.schedulers:Sarathi",
    "decode_maximal": "policies.sarathi:DecodeMaximal",
    "chunked_only": "policies.sarathi:ChunkedOnly",
    "evict_newest": "policies.wrappers:EvictNewest",
    "pad": "policies.wrappers:Pad",
    "order": "policies.wrappers:Order",
    "cap": "policies.wrappers:Cap",
    "reject": "policies.wrappers:RejectLate",
    "preempt": "policies.classes:Preempt",
    "weighted_fair": "policies.classes:WeightedFair",
    "keep_slo": "policies.classes:KeepSlo",
    **{name: each.policy for stack in stacks().values() for name, each in stack.schedulers.items()},
}
SOUGHT: Mapping[str, str] = {
    **{name: now for stack in stacks().values() for name, now in stack.renamed.items()},
    **dict.fromkeys(("hpa", "horizontal_pod_autoscaler", "horizontalpodautoscaler"), "target_tracking"),
    **dict.fromkeys(("keda", "scaled_object", "scaledobject"), "concurrency"),
    "kpa": "knative",
}
"""Names that one may look for, and the policy of the same rule: Kubernetes' names of autoscalers among them."""
AUTO = ("token_budget", "chunk", "max_num_batched_tokens")
"""Scheduler settings that may be AUTO_VALUE: chosen from the cost model."""
AUTO_VALUE = "auto"
ITERATION_TOKENS = ("token_budget", "max_num_batched_tokens", "max_num_tokens", "chunked_prefill_size", "chunk")
"""The names that schedulers have for the most tokens of an iteration, for the batch of the profile run."""
SEQUENCES = ("max_sequences", "max_num_seqs", "max_running_requests", "max_batch_size", "batch_size")
"""The names that they have for the most sequences."""
ROUTERS: Mapping[str, str] = {
    "round_robin": "policies.routers:RoundRobin",
    "random": "policies.routers:Random",
    "least_outstanding": "policies.routers:LeastOutstanding",
    "power_of_two": "policies.routers:PowerOfTwo",
    "least_kv": "policies.routers:LeastKv",
    "least_queue": "policies.routers:LeastQueue",
    "least_kv_use": "policies.routers:LeastKvUse",
    "session": "policies.routers:SessionAffinity",
    "prefix": "policies.routers:Prefix",
    "llm_d": "policies.routers:LlmD",
    "dynamo": "policies.routers:Dynamo",
    "adapter": "policies.routers:AdapterAffinity",
    "reserve": "policies.routers:Reserve",
    "shed": "policies.routers:Shed",
    **{name: path for stack in stacks().values() for name, path in stack.routers.items()},
}


EVICTIONS: Mapping[str, str] = {
    "lru": "policies.eviction:Lru",
    "mru": "policies.eviction:Mru",
    "lfu": "policies.eviction:Lfu",
    "fifo": "policies.eviction:Fifo",
    "filo": "policies.eviction:Filo",
    "slru": "policies.eviction:Slru",
    "retention": "policies.eviction:Retention",
    "belady": "policies.eviction:Belady",
}
CONTROLS: Mapping[str, str] = {
    "target_tracking": "policies.control:TargetTracking",
    "concurrency": "policies.control:Concurrency",
    "knative": "policies.control:Knative",
    "rate_model": "policies.control:RateModel",
    "schedule": "policies.control:Schedule",
    "perfect": "policies.control:Perfect",
    "last_value": "policies.control:LastValue",
    "seasonal_naive": "policies.control:SeasonalNaive",
    "holt_winters": "policies.control:HoltWinters",
    "arima": "policies.control:Arima",
    "kalman": "policies.control:Kalman",
}


# Two ways of saying the same thing are written with a bar between them; the settings given tell which is meant.
PROCESSES: Mapping[str, str] = {
    "poisson": "workloads:Poisson",
    "gamma": "workloads:Gamma",
    "deterministic": "workloads:Deterministic",
    "pareto": "workloads:Pareto",
    "mmpp": "workloads:Mmpp",
    "piecewise": "workloads:Piecewise",
    "sinusoidal": "workloads:Sinusoidal",
    "closed_loop": "sim.scenario.named:Clients",
}
DISTRIBUTIONS: Mapping[str, str] = {
    "fixed": "workloads:Fixed",
    "uniform": "workloads:Uniform",
    "lognormal": "workloads:LogNormal|workloads:LogNormal.from_mean_median",
    "zipf": "workloads:Zipf",
    "empirical": "workloads:Empirical|workloads:Resampled",
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
    """The object that package.module:Name stands for; ImportError or AttributeError where it is not there."""
    module_name, _, name = path.partition(":")
    found = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def policy(name: str, settings: Mapping[str, Any], table: Mapping[str, str], *, key: str, method: str) -> Any:
    """The policy called *name* in *table*, or imported where *name* is package.module:Class or package.module:function.

    A setting `inner` is built as a policy first. Raises ScenarioError naming *key* for an unknown name, a module or class that
    is not there, a class without *method*, a function that does not take what *method* does, and settings that do not fit.
    """
    if name in table:
        factory = load(table[name])
    elif (now := SOUGHT.get(name.lower())) in table:
        raise ScenarioError(f"{key}: {name!r} is called {now} here; did you mean {now}?")
    elif ":" not in name:
        raise ScenarioError(unknown(f"{key}: {name!r} is not a policy", name, [*table, "package.module:Class"]))
    else:
        factory = _imported(name, key=key, method=method)
    if not isinstance(factory, type):
        if settings:
            raise ScenarioError(
                f"{key}.{next(iter(settings))} is not a setting of {name}, which is a function and has none; "
                "write a frozen dataclass for a policy with settings"
            )
        return factory
    if INNER in settings and INNER in parameters(factory):
        inner = settings[INNER]
        inner = {"policy": inner} if isinstance(inner, str) else inner
        within = f"{key}.{INNER}"
        if not isinstance(inner, Mapping) or not isinstance(inner.get("policy"), str):
            meant = misspelt("policy", inner)
            got = f"got {shown(inner)}" if meant is None else f"{meant} is not a setting there, did you mean policy?"
            raise ScenarioError(f"{within} is a policy, such as {{policy: {next(iter(table))}}}; {got}")
        rest = {setting: value for setting, value in inner.items() if setting != "policy"}
        made = policy(inner["policy"], rest, table, key=within, method=method)
        return make(factory, settings, key=key, name=name, made={INNER: made})
    return make(factory, settings, key=key, name=name)


def imported(name: str, *, key: str) -> Any:
    """The object of the user's own that package.module:Name stands for; ScenarioError naming *key* where it is not there."""
    try:
        return load(name)
    except AttributeError:
        raise ScenarioError(f"{key}: {name.partition(':')[0]} has no {name.partition(':')[2]!r}") from None
    except Exception as error:
        # A module of the user's own may fail in any way while it is imported.
        raise ScenarioError(f"{key}: cannot import {name!r}: {type(error).__name__}: {error}") from error


def _imported(name: str, *, key: str, method: str) -> Any:
    found = imported(name, key=key)
    if isinstance(found, type) and callable(getattr(found, method, None)):
        return found
    if inspect.isfunction(found) and method in _ARGUMENTS and _takes(found, _ARGUMENTS[method]):
        return found
    function = f", or a function of ({', '.join(_ARGUMENTS[method])})" if method in _ARGUMENTS else ""
    raise ScenarioError(f"{key}: a policy is a class with the method {method}{function}; {name!r} is {shown(found)}")


_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "plan": ("view",),
    "route": ("request", "replicas"),
    "wanted": ("seen",),
    "rank": ("blocks",),
}
"""The arguments that a policy's method takes, and the function that may stand for it."""


def _takes(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def chain(settings: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The settings of a policy and of those that it wraps, outermost first, each with its dotted key."""
    found = [(key, settings)]
    while isinstance(settings.get(INNER), Mapping | str):
        inner = settings[INNER]
        settings = {"policy": inner} if isinstance(inner, str) else inner
        key = f"{key}.{INNER}"
        found.append((key, settings))
    return found


def layers(policy: Any) -> Iterator[Any]:
    """A policy that is made and those that it wraps, outermost first."""
    while policy is not None:
        yield policy
        policy = getattr(policy, INNER, None)


def innermost(policy: Any, settings: Mapping[str, Any], key: str, holds: Callable[[Any], bool]) -> tuple[str, str]:
    """The dotted key and the name of the innermost of *policy* and those that it wraps for which *holds*, or of *policy* itself."""
    pairs = list(zip(layers(policy), chain(settings, key), strict=False))
    _, (at, own) = next((pair for pair in reversed(pairs) if holds(pair[0])), pairs[0])
    return at, str(own["policy"])


def limit_of(scheduler: Any, names: tuple[str, ...]) -> int | None:
    """The smallest that *scheduler*, or one that it wraps, sets of these; None where none does."""
    found = [getattr(each, name, None) for each in layers(scheduler) for name in names]
    return min((value for value in found if isinstance(value, int)), default=None)


def shown_policy(policy: Any) -> str:
    """A policy as manifests show it: its settings; a function by its name, which an address would follow."""
    return without_addresses(repr(policy))


def choice(
    name: str, settings: Mapping[str, Any], table: Mapping[str, str], *, key: str, what: str, also: tuple[str, ...] = ()
) -> Any:
    """The arrival process or distribution called *name* in *table*, made from *settings*; *also*: settings that it has beside those
    of the class, for whoever misspelt one."""
    if name not in table:
        raise ScenarioError(unknown(f"{key}: {name!r} is not {what}", name, table))
    variants = [load(path) for path in table[name].split("|")]
    fitting = [variant for variant in variants if set(settings) <= set(parameters(variant))]
    for variant in fitting:
        if all(setting in settings for setting, (_, required) in parameters(variant).items() if required):
            return make(variant, settings, key=key, name=name)
    if not fitting:
        known = list(dict.fromkeys([*also, *(setting for variant in variants for setting in parameters(variant))]))
        stranger = next((setting for setting in settings if setting not in known), None)
        if stranger is not None:
            raise ScenarioError(unknown(f"{key}.{stranger} is not a setting of {name}", stranger, known))
    ways = " or ".join(
        ", ".join(setting for setting, (_, required) in parameters(variant).items() if required) for variant in variants
    )
    raise ScenarioError(f"{key}: {name} needs {ways}; got {', '.join(settings) or 'nothing'}")


def make(
    factory: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    key: str,
    name: str,
    made: Mapping[str, Any] | None = None,
) -> Any:
    """The policy that *factory* (a class or function) makes of *settings*, checked against the types of its parameters, and of what
    has been *made* of some of them already.

    Raises ScenarioError naming `key.setting` for an unknown, missing or unfit one. A class may say in
    `not_settings` what to write in place of one that is looked for.
    """
    known = parameters(factory)
    for setting in settings:
        if setting not in known:
            of = f"{key}.{setting} is not a setting of {name}"
            instead = getattr(factory, "not_settings", {}).get(setting)
            if instead is not None:
                raise ScenarioError(f"{of}: {instead}")
            raise ScenarioError(unknown(of, setting, known) if known else f"{of}, which has none")
    values: dict[str, Any] = {}
    for setting, (hint, required) in known.items():
        if made is not None and setting in made:
            values[setting] = made[setting]
        elif setting in settings:
            values[setting] = checked(settings[setting], hint, f"{key}.{setting}")
        elif required:
            raise ScenarioError(f"{key}.{setting} is missing; {name} needs it")
    try:
        return factory(**values)
    except Exception as error:
        if ":" in name:
            # A class or function of the user's own may fail in any way.
            given = f" with {shown(dict(settings))}" if settings else ""
            said = " ".join(str(error).split())
            raise ScenarioError(f"{key}: {name} failed{given}: {type(error).__name__}: {said}") from error
        if isinstance(error, ValueError | TypeError):
            raise ScenarioError(f"{key}: {error}") from error
        raise


def parameters(factory: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """The settings that *factory* takes: name to (type, whether it must be given), without those among its `not_settings`."""
    hints = typing.get_type_hints(factory, include_extras=True)
    if isinstance(factory, type) and not hints:
        hints = typing.get_type_hints(getattr(factory, "__init__", factory), include_extras=True)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    elsewhere = getattr(factory, "not_settings", {})
    return {
        parameter.name: (hints.get(parameter.name, Any), parameter.default is inspect.Parameter.empty)
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind not in variadic and parameter.name not in elsewhere
    }


def schema(factory: Callable[..., Any], inner: Any = None) -> dict[str, Any]:
    """JSON Schema properties of the settings that *factory* takes, with their defaults; *inner*: that of what a wrapper wraps."""
    signature = inspect.signature(factory)
    out = {}
    for name, (hint, required) in parameters(factory).items():
        if name == INNER:
            out[name] = inner
            continue
        properties = TypeAdapter(hint).json_schema()
        if name in AUTO:
            properties = {"anyOf": [properties, {"const": AUTO_VALUE}]}
        if not required:
            properties["default"] = signature.parameters[name].default
        out[name] = properties
    return out


def checked(value: Any, hint: Any, key: str) -> Any:
    """*value* as the type *hint* has it; ScenarioError that names the *key* where it is of another."""
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
