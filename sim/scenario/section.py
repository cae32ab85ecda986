"""The base of the sections of a scenario, and those that name something and give its settings: policies among them."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


Mark = MayBeFile | Open
FilePath = Annotated[str, Field(min_length=1), MayBeFile()]
"""A file, or a name that the setting knows."""
ModelName = Annotated[str, Field(min_length=1), MayBeFile(is_model=True)]
"""A model by its name, or the path of its config.json."""


class Section(BaseModel):
    """Keys are fixed, values keep their types, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


class Named(Section):
    """Something by name; every other key is a setting of it."""

    model_config = ConfigDict(extra="allow")

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Policy(Named):
    """A policy by name; every other key is a setting of that policy, checked when it is made."""

    policy: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value


def content_of(value: Any, change: Callable[[str, Mark], Any], mark: Mark | None = None) -> Any:
    """*value*, a section or part of one, as plain values, in which *change* has replaced each text that carries a mark."""
    if isinstance(value, Section):
        within = Open(isinstance(value, Policy)) if isinstance(value, Named) else None
        fields = {name: getattr(value, name) for name in type(value).model_fields} | (value.model_extra or {})
        marks = _marks(type(value))
        return {name: content_of(each, change, marks.get(name, within)) for name, each in fields.items()}
    if isinstance(value, Mapping):
        return {key: content_of(each, change, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [content_of(each, change, mark) for each in value]
    return change(value, mark) if mark is not None and isinstance(value, str) else value


@functools.cache
def _marks(section: type[Section]) -> dict[str, MayBeFile]:
    found = {name: _mark((field.annotation, *field.metadata)) for name, field in section.model_fields.items()}
    return {name: mark for name, mark in found.items() if mark is not None}


def _mark(parts: tuple[Any, ...]) -> MayBeFile | None:
    """The mark among the *parts* of an annotation, however deep."""
    for part in parts:
        found = part if isinstance(part, MayBeFile) else _mark(typing.get_args(part))
        if found is not None:
            return found
    return None
