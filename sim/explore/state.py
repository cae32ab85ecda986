"""The state of the page: settings over the scenario that it was opened with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import RooftraceError
from sim.scenario import Scenario
from sim.scenario.yaml import parse_yaml
from sim.text import shown


class Refused(RooftraceError):
    """A client asks for something that cannot be: a sentence, and the setting that it is about where one is known."""

    def __init__(self, sentence: str, key: str | None = None) -> None:
        super().__init__(sentence)
        self.key = key

    @property
    def facts(self) -> dict[str, Any]:
        """For the page."""
        return {"sentence": str(self), **({} if self.key is None else {"key": self.key})}


def settings_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of *state* by dotted key, sections before what is in them; a text is read as `--set` reads it. Refused where it
    has none."""
    given = state.get("set", {})
    if not isinstance(given, Mapping) or not all(isinstance(key, str) and key for key in given):
        raise Refused(f"set is a mapping from dotted settings to values; got {shown(given)}")
    ordered = sorted(given.items(), key=lambda each: each[0].count("."))
    return {key: parse_yaml(value, f"--set {key}") if isinstance(value, str) else value for key, value in ordered}


def scenario_in(base: Scenario, state: Mapping[str, Any]) -> Scenario:
    """*base* with the settings of *state*. Refused, in the sentence of the command, where that is no scenario."""
    settings: Mapping[str, Any] = {}
    try:
        settings = settings_in(state)
        return base.with_values(settings)
    except Refused:
        raise
    except RooftraceError as error:
        raise refusal(error, settings) from None


def refusal(error: RooftraceError, settings: Mapping[str, Any]) -> Refused:
    """*error* with the longest key of *settings* that its sentence names, or begins to."""
    if isinstance(error, Refused):
        return error
    sentence = str(error)
    named = [key for key in settings if key in sentence]
    within = [key for key in settings if key.split(".")[0] in sentence.split()]
    return Refused(sentence, max(named or within, key=len, default=None))
