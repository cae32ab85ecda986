"""Closed forms that the simulator is laid over, and a table of them by name.

Each is a function of numbers and numpy arrays in ``sim.theory.speculative``, ``sim.theory.queueing``,
``sim.theory.sarathi`` or ``sim.theory.rollout``; :data:`THEORIES` lists those that ``rooftrace theory`` can describe and evaluate.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from sim.theory import queueing, rollout, sarathi
from sim.theory.speculative import gains, heads, load, rates, rounds, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of a closed form. *default* is None where *required*."""

    name: str
    required: bool
    default: Any
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """A closed form with what its signature and docstring say of it."""

    name: str
    group: str
    function: Callable[..., Any]

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").splitlines()[0]

    @property
    def description(self) -> str:
        """The whole docstring."""
        return inspect.getdoc(self.function) or ""

    @property
    def source(self) -> str:
        """Paper and equation."""
        text = self.description.partition("Source:")[2]
        return " ".join(text.split())

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Arguments that a command line can give, in order; a server's constants have defaults and are left out."""
        found = []
        for p in inspect.signature(self.function).parameters.values():
            if p.default is not p.empty and not isinstance(p.default, int | float):
                continue
            required = p.default is p.empty
            default = None if required else p.default
            found.append(Parameter(name=p.name, required=required, default=default, whole=p.annotation == "int"))
        return tuple(found)

    def evaluate(self, arguments: Mapping[str, Any], /) -> Any:
        """The value for *arguments*: numbers, arrays, or text as :func:`parse_value` reads it.

        ValueError for an argument that the form does not have, or one that it needs and did not get.
        """
        known = {p.name: p for p in self.parameters}
        for name in arguments:
            if name not in known:
                raise ValueError(
                    f"{self.name} has no argument {name}{_nearest(name, known)}; it takes {', '.join(known)}"
                )
        missing = [p.name for p in known.values() if p.required and p.name not in arguments]
        if missing:
            raise ValueError(f"{self.name} needs {', '.join(missing)} as well: {self.summary}")
        values = {}
        for name, value in arguments.items():
            parsed = parse_value(value) if isinstance(value, str) else value
            if known[name].whole:
                parsed = _whole(self.name, name, parsed)
            values[name] = parsed
        return self.function(**values)


def parse_value(text: str) -> Any:
    """Numbers from text: 0.8 · 0.5,0.7,0.9 · 1:8 (whole numbers, both ends) · 0.6,0.2;0.5,0.1 (rows) · true."""
    words = {"true": True, "false": False}
    stripped = text.strip()
    if stripped.lower() in words:
        return words[stripped.lower()]
    try:
        if ";" in stripped:
            return [[_number(x) for x in row.split(",")] for row in stripped.split(";")]
        if ":" in stripped:
            low, high = (int(x) for x in stripped.split(":"))
            if high < low:
                raise ValueError
            return np.arange(low, high + 1)
        if "," in stripped:
            return np.array([_number(x) for x in stripped.split(",")])
        return _number(stripped)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a value; give a number, a list 0.5,0.7, a range of whole numbers 1:8, "
            "or rows 0.6,0.2;0.5,0.1"
        ) from None


def theory(name: str) -> Theory:
    """The closed form called *name*; ValueError naming the nearest one otherwise."""
    if name not in THEORIES:
        raise ValueError(f"{name} is not a theory{_nearest(name, THEORIES)}; rooftrace theory lists them all")
    return THEORIES[name]


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _whole(theory_name: str, name: str, value: Any) -> int:
    if np.ndim(value) or isinstance(value, bool) or value != int(value):
        raise ValueError(f"{name} of {theory_name} is one whole number; got {value!r}")
    return int(value)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {match[0]}?" if match else ""


def _of(group: str, *modules: ModuleType) -> dict[str, Theory]:
    """The closed forms of *modules*, which are their functions whose docstring says the source."""
    functions = (each for module in modules for each in vars(module).values() if inspect.isfunction(each))
    stated = (f for f in functions if f.__module__.startswith(f"{__name__}.{group}") and "Source:" in (f.__doc__ or ""))
    return {f.__name__: Theory(name=f.__name__, group=group, function=f) for f in stated}


THEORIES: Mapping[str, Theory] = MappingProxyType(
    {
        **_of("speculative", rounds, gains, sampling, rates, heads, load),
        **_of("queueing", queueing),
        **_of("sarathi", sarathi),
        **_of("rollout", rollout),
    }
)
