"""Writes the reference of commands and settings while the documents are built, from the commands and the schema themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File

NAMED = ("Scheduler", "Router", "Eviction", "Control", "Process", "Distribution")
"""Policies and distributions that are chosen by name, with settings of its own, which are described below those of the scenario."""


def on_files(files: Any, config: Any) -> Any:
    for path, text in (("reference/commands.md", commands()), ("reference/scenario.md", scenario())):
        files.append(File.generated(config, path, content=text))
    return files


def commands() -> str:
    """Every command with its arguments and options."""
    import typer

    from sim.cli import build_app

    parts = ["# Commands\n"]
    group: Any = typer.main.get_command(build_app())
    parts += _command(group, "rooftrace")
    return "\n".join(parts)


def _command(command: Any, name: str) -> Iterator[str]:
    if name != "rooftrace":
        yield f"## {name}\n"
        yield f"{(command.help or '').strip()}\n"
        rows = [row for parameter in command.params for row in _parameter(parameter)]
        if rows:
            yield "| | | default |\n|---|---|---|"
            yield from rows
            yield ""
    for inner in getattr(command, "commands", {}).values():
        yield from _command(inner, f"{name} {inner.name}")


def _parameter(parameter: Any) -> Iterator[str]:
    if parameter.name == "help":
        return
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{each}`" for each in names) if names[0].startswith("-") else f"`{names[0].upper()}`"
    default = parameter.default
    text = "" if default is None or callable(default) or default == [] or default is False else f"`{default}`"
    help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    yield f"| {shown} | {help_text} | {text} |"


def scenario() -> str:
    """Every setting of a scenario, from its JSON Schema."""
    from sim.scenario.schema import json_schema

    schema = json_schema()
    parts = ["# Settings of a scenario\n", "Unknown keys are refused. `rooftrace schema` prints this as JSON Schema.\n"]
    parts += _settings(schema, schema["$defs"], "")
    for name in NAMED:
        parts.append(f"## {name}\n")
        for option in schema["$defs"][name]["anyOf"]:
            parts += _option(option)
    return "\n".join(parts)


def _settings(schema: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[str]:
    """A table of the settings of a section, and one of each section within it; those of a pool are like those of the top level."""
    inner: list[tuple[str, dict[str, Any]]] = []
    yield f"## {prefix.rstrip('.') or 'Top level'}\n"
    yield f"{schema.get('description', '')}\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for key, found in schema["properties"].items():
        section, among = _section(found, definitions)
        if section is not None:
            inner.append((f"{prefix}{key}.{among}", section))
        default = f"`{json.dumps(found['default'])}`" if found.get("default") is not None and section is None else ""
        described = (found.get("description") or "").replace("|", "\\|").replace("\n", " ")
        yield f"| `{prefix}{key}` | {_type(found)} | {default.replace('|', chr(92) + '|')} | {described} |"
    yield ""
    for key, section in inner if prefix != "pools.NAME." else ():
        yield from _settings(section, definitions, key)


def _section(found: dict[str, Any], definitions: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The section that a setting is, or has many of, and how one of them is named; None for a setting that is none."""
    for candidate in (found, *found.get("anyOf", ())):
        for of, among in (
            (candidate, ""),
            (candidate.get("items"), "N."),
            (candidate.get("additionalProperties"), "NAME."),
        ):
            name = of.get("$ref", "").rpartition("/")[2] if isinstance(of, dict) else ""
            section = definitions.get(name, {})
            for shape in (section, *(section.get("anyOf", ()) if name not in NAMED else ())):
                if "properties" in shape:
                    return shape, among
    return None, ""


def _type(found: dict[str, Any]) -> str:
    if "$ref" in found:
        return found["$ref"].rpartition("/")[2]
    if "anyOf" in found:
        return " or ".join(dict.fromkeys(_type(each) for each in found["anyOf"] if each.get("type") != "null"))
    if "enum" in found:
        return ", ".join(f"`{each}`" for each in found["enum"])
    if "const" in found:
        return f"`{found['const']}`"
    if "$ref" in found.get("items", {}):
        return f"array of {_type(found['items'])}"
    if isinstance(found.get("additionalProperties"), dict) and "$ref" in found["additionalProperties"]:
        return f"{_type(found['additionalProperties'])} by name"
    bounds = [
        f"{sign} {found[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in found
    ]
    return " ".join([str(found.get("type", "")), *bounds]).strip()


def _option(option: dict[str, Any]) -> Iterator[str]:
    properties = option.get("properties")
    if not properties:
        return
    (_, kind), *rest = properties.items()
    name = kind.get("const")
    if name is None:
        return
    yield f"### {name}\n"
    if option.get("description"):
        yield f"{option['description']}\n"
    if rest:
        yield "| key | type | default |\n|---|---|---|"
        for setting, found in rest:
            default = (
                "needed"
                if setting in option.get("required", ())
                else f"`{json.dumps(found.get('default'), default=str)}`"
            )
            yield f"| `{setting}` | {_type(found)} | {default} |"
        yield ""
