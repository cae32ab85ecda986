"""Closed forms that the simulator is laid over, and a table of them by name.

Each is a function of numbers and numpy arrays in ``sim.theory.speculative``, ``sim.theory.queueing`` or
``sim.theory.sarathi``; :data:`THEORIES` lists those that ``rooftrace theory`` can describe and evaluate.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from sim.theory import queueing, sarathi, speculative


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


def _named(group: str, *functions: Callable[..., Any]) -> dict[str, Theory]:
    return {f.__name__: Theory(name=f.__name__, group=group, function=f) for f in functions}


THEORIES: Mapping[str, Theory] = MappingProxyType(
    {
        **_named(
            "speculative",
            speculative.expected_tokens,
            speculative.accepted_drafts,
            speculative.tokens_pmf,
            speculative.tokens_variance,
            speculative.expected_rounds,
            speculative.speedup,
            speculative.operations_factor,
            speculative.memory_reads_reduction,
            speculative.improves,
            speculative.guaranteed_speedup,
            speculative.break_even_alpha,
            speculative.optimal_k,
            speculative.best_speedup,
            speculative.oracle_tokens,
            speculative.measured_rate_speedup,
            speculative.time_for_tokens_s,
            speculative.acceptance,
            speculative.naive_acceptance,
            speculative.one_shot_acceptance,
            speculative.lenient_acceptance,
            speculative.lenient_output,
            speculative.lenient_distance,
            speculative.alpha_from_mean_length,
            speculative.draft_acceptance_rate,
            speculative.mean_length_from_positions,
            speculative.unconditional_rates,
            speculative.conditional_rates,
            speculative.medusa_speedup,
            speculative.typical_acceptance_threshold,
            speculative.dense_tree_nodes,
            speculative.dense_tree_mean_length,
            speculative.sparse_tree_mean_length,
            speculative.load_aware_speedup,
            speculative.server_speedup,
            speculative.crossover_batch,
            speculative.free_verification_batch,
        ),
        **_named(
            "queueing",
            queueing.utilisation,
            queueing.md1_wait_s,
            queueing.mm1_wait_s,
            queueing.mg1_wait_s,
            queueing.dd1_wait_s,
            queueing.erlang_c,
            queueing.mmc_wait_s,
            queueing.priority_wait_s,
            queueing.simple_placement_latency_s,
            queueing.pipeline_latency_s,
            queueing.pipeline_placement_latency_s,
            queueing.tolerable_communication,
            queueing.tolerable_unevenness,
        ),
        **_named(
            "sarathi",
            sarathi.kv_bytes_per_token,
            sarathi.batch_capacity,
            sarathi.implied_pool_bytes,
            sarathi.tile_adjusted_chunk,
            sarathi.optimal_pd_ratio,
            sarathi.chunk_count,
            sarathi.kv_chunk_reads,
            sarathi.linear_intensity,
            sarathi.attention_intensity,
            sarathi.ridge_intensity,
            sarathi.ridge_tokens,
        ),
    }
)
