import functools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.placement.scenario import describe_schema
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.scenario.settings import DEFAULT_SCENARIO
from sim.scenario.yaml import parse_yaml

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


@functools.cache
def written():
    """The schema as the command writes it."""
    return json.loads(CliRunner().invoke(build_app(), ["schema"]).stdout)


def accepts(schema, value):
    """Whether *value* keeps to *schema*, for the keywords that occur in ours (JSON Schema, draft 2020-12)."""
    if "$ref" in schema and not accepts(written()["$defs"][schema["$ref"].rpartition("/")[2]], value):
        return False
    if "anyOf" in schema and not any(accepts(option, value) for option in schema["anyOf"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        limits = (("minimum", value.__ge__), ("exclusiveMinimum", value.__gt__), ("maximum", value.__le__))
        if any(limit in schema and not keeps(schema[limit]) for limit, keeps in limits):
            return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None and len(value) >= schema.get("minLength", 0)
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if any(name not in value for name in schema.get("required", ())):
            return False
        if schema.get("additionalProperties") is False and set(value) - set(known):
            return False
        others = schema.get("additionalProperties", {})
        return all(accepts(known.get(name, others or {}), inner) for name, inner in value.items())
    return True


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_accepts_every_example(path):
    assert accepts(written(), parse_yaml(path.read_text(), path.name))


def test_the_schema_accepts_the_default_and_what_a_manifest_holds():
    assert accepts(written(), parse_yaml(DEFAULT_SCENARIO, "default"))
    assert accepts(written(), Scenario.default().resolved())


@pytest.mark.parametrize(
    "text",
    [
        "replikas: 2",
        "replicas: 0",
        "replicas: two",
        "scheduler: sarthi",
        "scheduler: {policy: sarathi, token_bugdet: 3}",
        "memory: {gpu_memory_utilization: 1.5}",
        "workload: {trace: 3}",
        "workload: {arrivals: {process: poisson}}",
        "slo: {ttft_s: 0}",
        "precision: fb8",
        "pools: {a: {modle: llama-3.1-8b}}",
        "pools: {a: {replicas: 0}}",
        "scheduler: {policy: evict_newest, inner: {policy: sarthi}}",
        "scheduler: {policy: evict_newest}",
        "scheduler: evict_newest",
        "router: reserve",
        "autoscale: {policy: concurrency, max: 2}",
        "workload: {trace: conversation, models: {a: x}}",
    ],
)
def test_the_schema_refuses_what_the_scenario_refuses(text):
    assert not accepts(written(), parse_yaml(text, "bad"))


OFFERED = {
    "Scheduler": "scheduler: NAME",
    "Router": "replicas: 2\nadapters: {count: 2}\nscheduler: vllm\nrouter: NAME",
    "Eviction": "memory: {prefix_caching: true, eviction: NAME}",
    "TierEviction": "memory: {prefix_caching: true, tiers: [{kind: host, gib: 1, eviction: NAME}]}",
    "Control": "autoscale: {policy: NAME, max: 2}",
}


@pytest.mark.parametrize("kind", OFFERED)
def test_what_the_schema_offers_by_a_name_alone_can_be_run(kind):
    names = written()["$defs"][kind]["anyOf"][0]["enum"]
    assert names or kind == "Control", "each controller has something to set"
    for name in names:
        text = f"workload: {{trace: conversation, limit: 2}}\n{OFFERED[kind].replace('NAME', name)}"
        resolve(Scenario.from_mapping(parse_yaml(text, name)))


def test_settings_are_described_and_defaults_given():
    assert "HuggingFace" in written()["properties"]["model"]["description"]
    assert written()["properties"]["hardware"]["default"] == "h100-sxm"
    sarathi = next(
        option
        for option in written()["$defs"]["Scheduler"]["anyOf"]
        if option.get("properties", {}).get("policy") == {"const": "sarathi"}
    )
    assert sarathi["properties"]["token_budget"] == {"anyOf": [{"type": "integer"}, {"const": "auto"}], "default": 512}


def _references(schema):
    if isinstance(schema, dict):
        yield from [schema["$ref"]] if "$ref" in schema else []
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


@pytest.mark.parametrize("schema_of", [written, describe_schema], ids=["a scenario", "a placement"])
def test_every_reference_leads_to_a_definition(schema_of):
    schema = schema_of()
    assert set(_references(schema)) <= {f"#/$defs/{name}" for name in schema["$defs"]}
