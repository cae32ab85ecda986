"""A scenario chooses policies, arrival processes and distributions of lengths by name, and gives each its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from policies.eviction import foresees
from sim.scenario import named
from sim.scenario.section import Named, Policy

_OWN = {"type": "string", "pattern": "^[A-Za-z_][\\w.]*:[A-Za-z_][\\w.]*$"}
_OWN_WITH_SETTINGS = {"type": "object", "properties": {"policy": _OWN}, "required": ["policy"]}


class Own(Policy):
    """Something of the user's own, package.module:Class, and its settings."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [_OWN, _OWN_WITH_SETTINGS]}


class BuiltIn(Policy):
    """A policy that may be one of a table."""

    table: ClassVar[Mapping[str, str]]
    method: ClassVar[str]

    def made(self, key: str, over: Mapping[str, Any] | None = None) -> Any:
        """The policy, the setting at *key*, with *over* in place of its settings; ScenarioError as of `named.policy`."""
        settings = self.settings if over is None else over
        return named.policy(self.policy, settings, self.table, key=key, method=self.method)

    @classmethod
    def offers(cls, policy: Any) -> bool:
        """Whether the class *policy* of the table may be chosen here."""
        return True

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        offered = {name: path for name, path in cls.table.items() if cls.offers(named.load(path))}
        # Those that need no settings; of a wrapper's, `inner` is one.
        loaded = {name: named.parameters(named.load(path)) for name, path in offered.items()}
        alone = [name for name, settings in loaded.items() if not any(needed for _, needed in settings.values())]
        again = handler(core_schema.definition_reference_schema(cast("str", schema.get("ref"))))
        options = _options("policy", offered, again)
        return {"anyOf": [{"type": "string", "enum": alone}, _OWN, *options, _OWN_WITH_SETTINGS]}


class Scheduler(BuiltIn):
    table, method = named.SCHEDULERS, "plan"


class Router(BuiltIn):
    table, method = named.ROUTERS, "route"


class Eviction(BuiltIn):
    table, method = named.EVICTIONS, "rank"


class TierEviction(Eviction):
    @classmethod
    def offers(cls, policy: Any) -> bool:
        # A tier is not told which request looks for its blocks next (`sim.engine.tiers.TierSpec`).
        return not foresees(policy)


class Control(BuiltIn):
    table, method = named.CONTROLS, "wanted"


class Process(Named):
    """An arrival process by name; every other key is a setting of it."""

    process: Annotated[str, Field(min_length=1)]

    def made(self, key: str, over: Mapping[str, Any] | None = None, also: tuple[str, ...] = ()) -> Any:
        """The process, the setting at *key*, with *over* in place of its settings; ScenarioError as of `named.choice`."""
        settings = self.settings if over is None else over
        return named.choice(self.process, settings, named.PROCESSES, key=key, what="an arrival process", also=also)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": _options("process", named.PROCESSES)}


class Distribution(Named):
    """A distribution of lengths by name; every other key is a setting of it. A number alone is a fixed length."""

    distribution: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool)
        return {"distribution": "fixed", "tokens": value} if number else value

    def made(self, key: str) -> Any:
        """The distribution, the setting at *key*; ScenarioError as of `named.choice`."""
        return named.choice(self.distribution, self.settings, named.DISTRIBUTIONS, key=key, what="a distribution")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 0}, *_options("distribution", named.DISTRIBUTIONS)]}


def _options(key: str, table: Mapping[str, str], inner: Any = None) -> list[dict[str, Any]]:
    """JSON Schema of each way of choosing from *table*; *inner*: of what a policy is around."""
    return [
        {
            "type": "object",
            **_description(made),
            "properties": {key: {"const": name}, **named.schema(made, inner)},
            "required": [key, *(setting for setting, (_, needed) in named.parameters(made).items() if needed)],
            "additionalProperties": False,
        }
        for name, path in table.items()
        for made in map(named.load, path.split("|"))
    ]


def _description(made: Any) -> dict[str, str]:
    first = (made.__doc__ or "").strip().split("\n")[0]
    # A dataclass without a docstring of its own shows its signature, which the properties say better.
    return {} if not first or first.startswith(f"{made.__name__}(") else {"description": first}
