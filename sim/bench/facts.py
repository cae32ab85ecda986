"""Facts of a measured run that its file does not say, given by hand: `run.KEY=VALUE` among the assignments of --set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.bench.fields import Unreadable, number, rate
from sim.bench.formats import vllm_log
from sim.bench.measured import BenchRun, Lengths, SharedPrompts
from sim.errors import RooftraceError
from sim.scenario.yaml import parse_yaml
from sim.text import shown, unknown

PREFIX = "run."
EVERY = "*"
_SHARED = ("groups", "prefix_tokens", "prompts_per_group", "warm")
_RAMP = ("strategy", "start_per_s", "end_per_s", "clients_s")


class FactError(RooftraceError, ValueError):
    """A fact that cannot be one; the message says which, and what was expected."""


def divided(assignments: Iterable[str]) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Assignments of a scenario's settings, and facts of runs: those that begin with `run.`, their values read as YAML.

    Facts are by name, and by whose they are: EVERY for all runs, or the RUN of `RUN:run.KEY=VALUE` (`BenchRun.is_called`).
    """
    settings: list[str] = []
    facts: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        whose, _, name = key.strip().rpartition(f":{PREFIX}")
        if not whose and not key.strip().startswith(PREFIX):
            settings.append(assignment)
            continue
        name = name.removeprefix(PREFIX)
        if not equals:
            raise FactError(f"--set {assignment!r}: expected run.KEY=VALUE, such as run.rate_per_s=4")
        if name not in KEYS:
            raise FactError(unknown(f"--set {key.strip()}: it is not a fact of a run", name, KEYS))
        facts.setdefault(whose or EVERY, {})[name] = parse_yaml(text, f"--set {key.strip()}")
    return tuple(settings), facts


def all_with_facts(runs: Sequence[BenchRun], facts: Mapping[str, Mapping[str, Any]]) -> list[BenchRun]:
    """*runs* with the *facts* that `divided` found for each, those of all first; FactError where some are of no run."""
    for whose, of in facts.items():
        if runs and not any(run.is_called(whose) for run in runs):
            names = [run.name for run in runs]
            raise FactError(unknown(f"--set {whose}:{PREFIX}{next(iter(of))}: no run is called so", whose, names))
    order = sorted(facts, key=lambda whose: whose != EVERY)
    told = []
    for run in runs:
        of_run: dict[str, Any] = {}
        for whose in order:
            of_run |= facts[whose] if run.is_called(whose) else {}
        told.append(with_facts(run, of_run))
    return told


def with_facts(run: BenchRun, facts: Mapping[str, Any]) -> BenchRun:
    """*run* with *facts* in place of what its file says; where that was something else, a note says so. FactError names the key."""
    offered = run.offered
    notes = []
    for name, value in facts.items():
        key = f"{PREFIX}{name}"
        try:
            field, parse = _FACTS[name]
            new = parse(value, key)
        except Unreadable as error:
            raise FactError(str(error)) from None
        old = getattr(offered, field)
        if _said(old) and old != new:
            notes.append(f"{key} is given as {shown(value)}, in place of what the file says")
        offered = replace(offered, **{field: new})
        if name == "sending_s" and new is not None and offered.requests is not None and "requests" not in facts:
            notes.append(f"{key} is given as {shown(value)}, in place of the {offered.requests:,} requests of the file")
            offered = replace(offered, requests=None)
    told = replace(run, offered=offered, notes=(*run.notes, *notes))
    return vllm_log.with_load(told) if run.format == vllm_log.FORMAT else told


def _said(old: Any) -> bool:
    return old.known if isinstance(old, Lengths) else old not in (None, {}, False)


def _whole(value: Any, key: str) -> int | None:
    found = number(value, key, least=1.0)
    if found is not None and found != int(found):
        raise Unreadable(f"{key} is a whole number; got {found:g}")
    return None if found is None else int(found)


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise Unreadable(f"{key} is true or false; got {shown(value)}")
    return value


def _lengths(value: Any, key: str) -> Lengths:
    if isinstance(value, Mapping):
        if not isinstance(value.get("distribution"), str):
            raise Unreadable(f"{key} is a number of tokens or {{distribution: uniform, ...}}; got {shown(dict(value))}")
        return Lengths(distribution=dict(value))
    tokens = _whole(value, key)
    if tokens is None:
        raise Unreadable(f"{key} is a number of tokens or {{distribution: uniform, ...}}; got nothing")
    return Lengths(mean_tokens=float(tokens), std_tokens=0.0, min_tokens=float(tokens), max_tokens=float(tokens))


def _section(value: Any, key: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Unreadable(f"{key} is a mapping of {', '.join(names)}; got {shown(value)}")
    for name in value:
        if name not in names:
            raise Unreadable(unknown(f"{key}.{name} is not a setting", str(name), names))
    return value


def _shared(value: Any, key: str) -> SharedPrompts:
    given = _section(value, key, _SHARED)
    groups, tokens = (_whole(given.get(name), f"{key}.{name}") for name in ("groups", "prefix_tokens"))
    if groups is None or tokens is None:
        raise Unreadable(f"{key} needs groups and prefix_tokens")
    each = _whole(given.get("prompts_per_group"), f"{key}.prompts_per_group")
    warm = _flag(given.get("warm", False), f"{key}.warm")
    return SharedPrompts(groups=groups, prefix_tokens=tokens, prompts_per_group=each, warm=warm)


def _ramp(value: Any, key: str) -> dict[str, Any]:
    given = dict(_section(value, key, _RAMP))
    if "strategy" in given:
        if given["strategy"] not in ("linear", "exponential"):
            raise Unreadable(f"{key}.strategy is linear or exponential; got {shown(given['strategy'])}")
        for name in ("start_per_s", "end_per_s"):
            per_s = rate(given.get(name), f"{key}.{name}")
            if per_s is None or math.isinf(per_s):
                raise Unreadable(f"{key} needs start_per_s and end_per_s, requests a second")
    elif number(given.get("clients_s"), f"{key}.clients_s") is None:
        raise Unreadable(f"{key} needs a strategy with its rates, or clients_s")
    return given


_FACTS: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    "rate_per_s": ("rate_per_s", rate),
    "concurrency": ("concurrency", _whole),
    "burstiness": ("burstiness", rate),
    "fills_time": ("fills_time", _flag),
    "requests": ("requests", _whole),
    "sending_s": ("duration_s", number),
    "prompt_tokens": ("prompt", _lengths),
    "output_tokens": ("output", _lengths),
    "shared": ("shared", lambda value, key: None if value is None else _shared(value, key)),
    "ramp": ("ramp", _ramp),
    "warmup_s": ("warmup_s", number),
    "cooldown_s": ("cooldown_s", number),
}
"""Facts by key: the field of `Offered`, and what reads its value."""
KEYS = tuple(_FACTS)
"""The facts that may be given; `docs/how-to/your-benchmark.md` says what each is."""
