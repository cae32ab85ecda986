"""Turns what is wrong with a scenario into one sentence: which file, which key, what was expected, what came."""

from __future__ import annotations

import contextlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sim.errors import RooftraceError, ScenarioError
from sim.scenario.section import INNER, Policy, Section, is_section, settings_of
from sim.text import nearest, shown, unknown

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "path_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "finite_number": "a finite number",
    "dict_type": "a mapping of settings",
    "list_type": "a list",
    "tuple_type": "a list",
}
_STRANGE = ("extra_forbidden", "unexpected_keyword_argument")
"""The errors for a key that a section does not have."""
_PLAIN = ("literal_error", "int_type", "float_type", "string_type", "bool_type", "list_type")
"""The errors for a value that is no word, number or list."""
_KIND = re.compile(r"[\w-]+\[.*\]$|constrained-\w+$")
"""A kind of value in pydantic's paths."""
_NAMED = 6
"""Settings that stand for all where there are more."""
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def check_mapping(found: object, model: type, source: str, what: str) -> None:
    """ScenarioError where *found* is no mapping, and so not *what*, a thing of *model*'s settings."""
    if not isinstance(found, Mapping):
        names = list(settings_of(model))
        listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        # None is what an empty file holds, or one with comments alone.
        got = f"got {shown(found)}" if found is not None else f"{source} is empty; write it, or name another file"
        raise ScenarioError(f"{source}: {what} is a mapping of settings ({listed}); {got}")


def sentence(error: ValidationError, model: type, source: str) -> str:
    """The first thing wrong with a scenario, in words: unknown keys first, being the likelier slip, and last what is wrong with
    a value as a whole that may be of several kinds."""
    found = sorted(error.errors(include_url=False), key=_unlikely)
    more = len(_wrong([_path(each) for each in found])) - 1
    also = f" ({more} more setting{'s are' if more > 1 else ' is'} wrong)" if more else ""
    return f"{source}: {describe(found[0], model)}{also}"


def _unlikely(details: ErrorDetails) -> tuple[bool, bool, bool]:
    """The sort key of an error, the likeliest first: unknown keys, others, then those of a whole value of several kinds. Where a
    mapping is given, that it is no word, number or list is unlikely to be the fault."""
    whole = bool(details["loc"]) and _KIND.match(str(details["loc"][-1])) is not None
    plain = details["type"] in _PLAIN and isinstance(details["input"], Mapping)
    return details["type"] not in _STRANGE, whole, plain


def _path(details: ErrorDetails) -> list[str]:
    """The place of an error, without the kinds of value that were tried there."""
    return [str(part) for part in details["loc"] if not _KIND.match(str(part))]


def _wrong(paths: Iterable[Sequence[str]]) -> set[tuple[str, ...]]:
    """The settings that are wrong: of a value that may be of several kinds, and what is wrong with each, the value alone."""
    found = {tuple(path) for path in paths}
    return {path for path in found if not any(path[:n] in found for n in range(len(path)))}


def describe(details: ErrorDetails, model: type | None) -> str:
    """One of pydantic's errors as a sentence with its dotted key, what is expected there and what came."""
    kind, value = details["type"], details["input"]
    path = _path(details)
    key = _dotted(path, model) or "the scenario"
    context: Mapping[str, Any] = details.get("ctx", {})
    if kind in _STRANGE:
        return _unknown_key(path, model)
    if kind == "missing":
        meant = misspelt(str(details["loc"][-1]), value)
        instead = "" if meant is None else f"; {meant} is not a setting there, did you mean {details['loc'][-1]}?"
        return f"{key} is missing{instead}"
    if kind in ("model_type", "model_attributes_type", "dataclass_type"):
        inner = _section(model, path)
        names = "" if inner is None else f" ({', '.join(settings_of(inner))})"
        return f"{key} is a mapping of settings{names}; got {shown(value)}"
    if kind in ("literal_error", "enum"):
        expected = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        close = nearest(str(value), expected)
        meant = f"; did you mean {close}?" if close else ""
        return f"{key} is one of {', '.join(expected)}; got {shown(value)}{meant}"
    if kind in _LIMITS:
        limit, words = _LIMITS[kind]
        return f"{key} is a number {words} {context[limit]:g}; got {shown(value)}"
    if kind == "too_short":
        return f"{key} is a list of at least {context['min_length']}; got {shown(value)}"
    if kind in ("string_type", "path_type") and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{key} is text; got {value}, a number: write '{value}' (in a shell \"{key}='{value}'\")"
    if kind in _EXPECTED:
        return f"{key} is {_EXPECTED[kind]}; got {shown(value)}"
    if kind == "value_error":
        return f"{key}: {context['error']}" if details["loc"] else str(context["error"])
    return f"{key}: {details['msg'][0].lower()}{details['msg'][1:]}; got {shown(value)}"


def misspelt(missing: str, given: object) -> str | None:
    """The key among those *given* that may have been meant for the one that is *missing*; None where none is near."""
    return nearest(missing, [str(key) for key in given]) if isinstance(given, Mapping) else None


def _unknown_key(path: list[str], model: type | None) -> str:
    section = _section(model, path[:-1])
    key = path[-1]
    dotted = _dotted(path, model)
    if "." in key:
        first, _, rest = key.partition(".")
        return f"{dotted} is not a setting; in a file, write it nested: '{first}: {{{rest}: ...}}'"
    choices = list(settings_of(section)) if section is not None else []
    if nearest(key, choices) is None:
        elsewhere = [full for full in _all_keys(model) if full.rsplit(".", 1)[-1] == key]
        if elsewhere:
            return f"{dotted} is not a setting; did you mean {elsewhere[0]}?"
    return unknown(f"{dotted} is not a setting", key, choices)


def _dotted(path: list[str], model: type | None) -> str:
    """The key at pydantic's *path*, which has the section that was tried in it where a value may be of several."""
    sections = [_section(model, path[:i]) for i in range(len(path))]
    kinds = [section.__name__ if section else "" for section in sections]
    return ".".join(part for part, kind in zip(path, kinds, strict=True) if part != kind)


def _section(model: type | None, path: list[str]) -> type | None:
    at = model
    named = False
    for part in path:
        if named:
            # The name of an entry, such as that of a pool.
            named = False
            continue
        if part.isdecimal():
            # The place of an entry in a list, whose section it has.
            continue
        if at is not None and part == at.__name__:
            continue
        if at is None or part not in settings_of(at):
            return None
        annotation = settings_of(at)[part]
        entries = entries_in(annotation)
        named = entries is not None
        at = entries or section_in(annotation)
    return None if named else at


def short_key(model: type, path: list[str]) -> str | None:
    """The key of the section at *path* that a text in its place stands for, such as `policy`; None where none does."""
    if path[-1] == INNER:
        return Policy.short
    section = _section(model, path)
    return section.short if section is not None and issubclass(section, Section) else None


def entries_in(annotation: Any) -> type | None:
    """The section of each entry, where a setting maps names to sections."""
    if typing.get_origin(annotation) is dict:
        return section_in(typing.get_args(annotation)[1])
    found = (entries_in(inner) for inner in typing.get_args(annotation))
    return next((entries for entries in found if entries is not None), None)


def section_in(annotation: Any) -> type | None:
    """The section that a setting of this type may be; None for one that is none, and for names mapped to sections."""
    if is_section(annotation):
        return annotation
    if typing.get_origin(annotation) in (dict, Literal):
        return None
    found = (section_in(inner) for inner in typing.get_args(annotation))
    return next((section for section in found if section is not None), None)


def _all_keys(model: type | None, prefix: str = "") -> Iterable[str]:
    for name, annotation in settings_of(model).items() if model is not None else ():
        yield prefix + name
        inner = section_in(annotation)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


class Sourced(Protocol):
    """Whatever says where it was read from."""

    @property
    def source(self) -> str: ...


@contextlib.contextmanager
def told_by(scenario: Sourced, key: str = "") -> Iterator[None]:
    """Errors from below become scenario errors that name the scenario and the key."""
    try:
        yield
    except ScenarioError as error:
        if str(error).startswith(f"{scenario.source}: "):
            raise
        raise ScenarioError(f"{scenario.source}: {error}") from error
    except (ValueError, RooftraceError) as error:
        where = f"{scenario.source}: {key}: " if key else f"{scenario.source}: "
        raise ScenarioError(f"{where}{error}") from error
    except OSError as error:
        raise ScenarioError(f"{scenario.source}: {key}: cannot read {error.filename}: {error.strerror}") from error
