"""The JSON Schema of a scenario file, for editors and for checking files without running them."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from sim.scenario import decoding, fleet, keys, named, section, tiers
from sim.scenario.keys import Settings


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) in which every built-in policy, process and distribution lists its settings."""
    schema = Settings.model_json_schema()
    _describe(schema)
    definitions = schema["$defs"]
    definitions["Scheduler"] = _policy("policy", named.SCHEDULERS, short=True, foreign=True)
    definitions["Router"] = _policy("policy", named.ROUTERS, short=True, foreign=True, inner="Router")
    definitions["Eviction"] = _policy("policy", named.EVICTIONS, short=True, foreign=True)
    definitions["Generator"] = _policy("policy", {}, short=True, foreign=True)
    definitions["Control"] = _policy("policy", named.CONTROLS, short=True, foreign=True)
    definitions["Autoscale"]["properties"]["policy"] = {"$ref": "#/$defs/Control"}
    definitions["Process"] = _policy("process", named.PROCESSES)
    definitions["Distribution"] = _policy("distribution", named.DISTRIBUTIONS, number=True)
    acceptance = definitions["AcceptanceSettings"]
    del acceptance["properties"]["policy"], definitions["Policy"]
    definitions["AcceptanceSettings"] = {"anyOf": [acceptance, *_policy("policy", {}, foreign=True)["anyOf"]]}
    for key, name in (("scheduler", "Scheduler"), ("router", "Router")):
        kept = {kind: value for kind, value in schema["properties"][key].items() if kind in ("default", "description")}
        schema["properties"][key] = {"$ref": f"#/$defs/{name}", **kept}
    rules = definitions["Window"]["properties"]["rule"]["enum"]
    definitions["Window"] = {
        "anyOf": [{"type": "string", "enum": [rule for rule in rules if rule != "arrivals"]}, definitions["Window"]]
    }
    for properties, key, name in (
        (definitions["Pool"]["properties"], "scheduler", "Scheduler"),
        (definitions["Pool"]["properties"], "rank_router", "Router"),
        (schema["properties"], "rank_router", "Router"),
        (definitions["HandoverSettings"]["properties"], "router", "Router"),
        (definitions["Memory"]["properties"], "eviction", "Eviction"),
        (definitions["Workload"]["properties"], "generator", "Generator"),
    ):
        described = {kind: value for kind, value in properties[key].items() if kind == "description"}
        properties[key] = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}], "default": None, **described}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Rooftrace scenario"}


def _describe(schema: dict[str, Any]) -> None:
    """Put the docstring below each setting into the schema.

    pydantic can do so itself (use_attribute_docstrings), but at every import: a fifth of the time to start.
    """
    sections = {
        node.name: node
        for module in (keys, decoding, tiers, fleet, section)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
    }
    for name, properties in {"Settings": schema, **schema["$defs"]}.items():
        body = sections[name].body
        for node, following in itertools.pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                assert isinstance(node.target, ast.Name)
                assert isinstance(following.value, ast.Constant)
                properties["properties"][node.target.id]["description"] = following.value.value


def _policy(
    key: str,
    table: Mapping[str, str],
    *,
    short: bool = False,
    foreign: bool = False,
    number: bool = False,
    inner: str = "Scheduler",
) -> dict[str, Any]:
    options: list[dict[str, Any]] = []
    pattern = {"type": "string", "pattern": "^[A-Za-z_][\\w.]*:[A-Za-z_][\\w.]*$"}
    if short and table:
        # Those that need no settings; of a wrapper's, `inner` is one.
        alone = [
            name for name, path in table.items() if not any(n for _, n in named.parameters(named.load(path)).values())
        ]
        options.append({"type": "string", "enum": alone})
    if short and foreign:
        options.append(pattern)
    if number:
        options.append({"type": "integer", "minimum": 0})
    for name, path in table.items():
        for variant in path.split("|"):
            cls = named.load(variant)
            required = [field for field, (_, needed) in named.parameters(cls).items() if needed]
            options.append(
                {
                    "type": "object",
                    **_description(cls),
                    "properties": {key: {"const": name}, **named.schema(cls, inner)},
                    "required": [key, *required],
                    "additionalProperties": False,
                }
            )
    if foreign:
        options.append({"type": "object", "properties": {key: pattern}, "required": [key]})
    return {"anyOf": options}


def _description(cls: Any) -> dict[str, str]:
    first = (cls.__doc__ or "").strip().split("\n")[0]
    # A dataclass without a docstring of its own shows its signature, which the properties say better.
    return {} if not first or first.startswith(f"{cls.__name__}(") else {"description": first}
