"""What sections of a scenario have in common, and those that name something and give its settings: policies among them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Keys are fixed, values keep their types, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


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
