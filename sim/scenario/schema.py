"""The JSON Schema of a scenario file, for editors and for checking files without running them."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from typing import Any, get_args

from sim.scenario.keys import Settings
from sim.scenario.section import Section, is_section, settings_of


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) in which every built-in policy, process and distribution lists its settings."""
    schema = schema_of(Settings, "Rooftrace scenario")
    definitions = schema["$defs"]
    acceptance = definitions["AcceptanceSettings"]
    del acceptance["properties"]["policy"]
    definitions["AcceptanceSettings"] = {"anyOf": [acceptance, {"$ref": "#/$defs/Own"}]}
    for section in (schema, definitions["Pool"]):
        plain = section["properties"]["hardware"]
        limited = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "power_limit_w": section["properties"]["power_limit_w"]},
            "additionalProperties": False,
        }
        about = {key: plain.pop(key) for key in ("description", "default", "title") if key in plain}
        section["properties"]["hardware"] = {"anyOf": [*plain.get("anyOf", [plain]), limited], **about}
    rules = definitions["Window"]["properties"]["rule"]["enum"]
    definitions["Window"] = {
        "anyOf": [{"type": "string", "enum": [rule for rule in rules if rule != "arrivals"]}, definitions["Window"]]
    }
    return schema


def schema_of(settings: type[Section], title: str) -> dict[str, Any]:
    """JSON Schema of *settings* with the docstring below each of them, and of a section's own the first paragraph.

    pydantic can do so itself (use_attribute_docstrings), but at every import: a fifth of the time to start.
    """
    schema = settings.model_json_schema()
    sections = _sections_in(settings)
    for name, found in {settings.__name__: schema, **schema["$defs"]}.items():
        if "description" in found:
            found["description"] = found["description"].partition("\n\n")[0]
        for node, following in itertools.pairwise(_written(sections[name].__module__)[sections[name].__name__].body):
            match node, following:
                case ast.AnnAssign(target=ast.Name(id=setting)), ast.Expr(value=ast.Constant(value=text)):
                    found["properties"][setting]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


@functools.cache
def _written(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module as they stand in its source."""
    # Read once: `inspect.getsource` of a class reads the whole of its module again for each.
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {each.name: each for each in body if isinstance(each, ast.ClassDef)}


def _sections_in(kind: Any) -> dict[str, type]:
    """The sections that *kind* is and has in it, by the names of their classes."""
    if not is_section(kind):
        return {name: found for part in get_args(kind) for name, found in _sections_in(part).items()}
    inner = [_sections_in(each) for each in settings_of(kind).values()]
    return {name: found for each in inner for name, found in each.items()} | {kind.__name__: kind}
