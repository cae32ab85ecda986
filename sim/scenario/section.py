"""The base of the sections of a scenario, and those that name something and give its settings: policies among them.

A section whose settings are what a room makes something of is the room's own frozen dataclass; pydantic checks it like the others.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class MayBeFile:
    """Marks a setting whose text may be the path of a file, so that what the file holds belongs to the scenario's content."""

    names: tuple[str, ...] = ()
    """Texts that are never a file's."""
    is_model: bool = False
    """Whether it is a model, whose config.json may lie in a cache under a name of the HuggingFace hub."""
    lists_models: bool = False
    """Whether the file names models, which may be files in turn."""
    several: bool = False
    """Whether it may be a folder or a pattern, which stand for the files in them."""


@dataclass(frozen=True, slots=True)
class Open:
    """Marks the settings of something that is chosen by name: any text in them may be a file, and of a *policy* a module."""

    policy: bool


class OneOf:
    """Marks a setting whose text is one of these names."""

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(self._names)


Mark = MayBeFile | Open
INNER = "inner"
"""The setting of a policy around another that is a policy itself."""
FilePath = Annotated[str, Field(min_length=1), MayBeFile()]
"""A file, or a name that the setting knows."""
ModelName = Annotated[str, Field(min_length=1), MayBeFile(is_model=True)]
"""A model by its name, or the path of its config.json."""


def _take_plain(schema: Any, handler: GetCoreSchemaHandler, seen: set[int]) -> None:
    """Let the dataclasses in *schema* be made of mappings, their tuples of lists their paths of texts, and be dumped so."""
    if isinstance(schema, list | tuple):
        for each in schema:
            _take_plain(each, handler, seen)
    elif isinstance(schema, dict) and id(schema) not in seen:
        seen.add(id(schema))
        kind: Any = schema.get("type")
        if kind == "definition-ref":
            _take_plain(handler.resolve_ref_schema(typing.cast("CoreSchema", schema)), handler, seen)
        elif kind in ("dataclass", "tuple", "lax-or-strict"):
            schema["strict"] = False
        if kind in ("dataclass", "tuple"):
            schema["serialization"] = core_schema.plain_serializer_function_ser_schema(_plain, info_arg=True)
        for each in schema.values():
            _take_plain(each, handler, seen)


def _plain(value: Any, info: core_schema.SerializationInfo) -> Any:
    """A dataclass as plain values; without its defaults where those of a section are left out."""
    if dataclasses.is_dataclass(value):
        short = info.exclude_unset or info.exclude_defaults
        given = {field: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {
            field.name: _plain(each, info) for field, each in given.items() if not (short and each == field.default)
        }
    if isinstance(value, list | tuple):
        return [_plain(each, info) for each in value]
    if isinstance(value, BaseModel):
        # Up to 2.13 pydantic fails where it is left a section whose schema was not built yet.
        how = ("mode", "by_alias", "exclude_unset", "exclude_defaults", "exclude_none")
        return value.model_dump(**{name: getattr(info, name) for name in how})
    return str(value) if isinstance(value, Path) else value


class Section(BaseModel):
    """Keys are fixed, values keep their types, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    short: ClassVar[str | None] = None
    """The setting that a text alone, in the place of the section, stands for; None where none does."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        found = handler(source)
        _take_plain(handler.resolve_ref_schema(found), handler, set())
        return found


def is_section(kind: Any) -> bool:
    """Whether *kind* is the class of a section, pydantic's or a room's."""
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


@functools.cache
def settings_of(section: type) -> Mapping[str, Any]:
    """The settings of a section by name, each with its type, whose metadata are those of the whole setting."""
    if not issubclass(section, BaseModel):
        hints = typing.get_type_hints(section, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}
    fields = section.model_fields.items()
    return {
        name: Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for name, field in fields
    }


class Named(Section):
    """Something by name; every other key is a setting of it."""

    model_config = ConfigDict(extra="allow")

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Policy(Named):
    """A policy by name; every other key is a setting of that policy, checked when it is made."""

    short: ClassVar[str | None] = "policy"

    policy: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value


def content_of(value: Any, change: Callable[[str, Mark], Any], mark: Mark | None = None) -> Any:
    """*value*, a section or part of one, as plain values, in which *change* has replaced each text that carries a mark."""
    if isinstance(value, str):
        return value if mark is None else change(value, mark)
    if value is None or isinstance(value, int | float):
        return value
    if is_section(type(value)):
        within = Open(isinstance(value, Policy)) if isinstance(value, Named) else None
        fields = {name: getattr(value, name) for name in settings_of(type(value))}
        fields |= getattr(value, "model_extra", None) or {}
        marks = _marks(type(value))
        return {name: content_of(each, change, marks.get(name, within)) for name, each in fields.items()}
    if isinstance(value, Mapping):
        return {key: content_of(each, change, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [content_of(each, change, mark) for each in value]
    if isinstance(value, Path):
        return change(str(value), MayBeFile())
    return value


@functools.cache
def _marks(section: type) -> dict[str, MayBeFile]:
    found = {name: mark_in(kind) for name, kind in settings_of(section).items()}
    return {name: mark for name, mark in found.items() if mark is not None}


def mark_in(kind: Any) -> MayBeFile | None:
    """The mark in the type of a setting, however deep."""
    parts = (*typing.get_args(kind), *getattr(kind, "__metadata__", ()))
    return next(
        (found for part in parts if (found := part if isinstance(part, MayBeFile) else mark_in(part)) is not None), None
    )
