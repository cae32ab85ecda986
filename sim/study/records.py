"""The result of one run of a study: a record of its settings and summary, or of its error."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import RooftraceError
from sim.extrapolated import SOME_OUTSIDE
from sim.results import Result
from sim.run import run_built
from sim.scenario import Scenario
from sim.scenario.assembly import Built, resolve
from sim.scenario.assembly.pools import pools_of
from sim.study.store import Store


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one run. *record* is its JSON text where it is still to be stored."""

    key: str
    error: str
    seconds: float
    record: str | None = None


def run_batch(batch: Sequence[tuple[str, Scenario]], folder: str | None, owner: int | None = None) -> list[Outcome]:
    """Run scenarios one after another; store each in *folder* when it ends, or hand its record back without one.

    Where *owner*, the process that handed the batch over, is no longer this one's parent, this one ends: the runs may
    by now be done by a sweep that goes on with the killed one.
    """
    store = None if folder is None else Store(Path(folder))
    outcomes = []
    for key, scenario in batch:
        begun = time.perf_counter()
        record = run_record(key, scenario)
        text = json.dumps(record, allow_nan=False)
        if owner is not None and os.getppid() != owner:
            os._exit(0)
        if store is not None:
            store.put(key, text)
        outcomes.append(
            Outcome(key, record.get("error", ""), time.perf_counter() - begun, None if store is not None else text)
        )
    return outcomes


def run_record(key: str, scenario: Scenario) -> dict[str, Any]:
    """The stored record of one run: its summary, or the error that it ended with."""
    record = beginning(key, scenario)
    try:
        built = resolve(scenario)
        return {**record, **finished(scenario, built, run_built(built))}
    except RooftraceError as error:
        return failed(record, str(error))
    except Exception as error:
        # A policy of the user's own, or a defect of ours: the other points go on, and the table says what happened.
        return failed(record, f"{type(error).__name__}: {error}")


def finished(scenario: Scenario, built: Built, result: Result) -> dict[str, Any]:
    """The part of the record of *scenario* that its run adds: *result*, of what was *built* of it."""
    return {
        "label": result.label,
        "gpus": gpus(scenario),
        **_fleet(built.manifest),
        "summary": result.summary,
        "notes": _notes(built.manifest["notes"], result.manifest["notes"]),
    }


def beginning(key: str, scenario: Scenario) -> dict[str, Any]:
    """The part of the record of *scenario* that is known before it runs."""
    return {"key": key, "seed": scenario.seed, "settings": scenario.settings()}


def _notes(before: list[str], after: list[str]) -> list[str]:
    """The notes of a run among many, in which what was found when it had ended has no figures, which differ from run to run."""
    return before if len(after) == len(before) else [*before, SOME_OUTSIDE]


def gpus(scenario: Scenario) -> int:
    """GPUs that *scenario* occupies: those of a replica times the replicas, over all pools."""
    if scenario.pools is None and scenario.placement is None:
        return scenario.replicas * scenario.parallel.gpus

    return sum(pool.gpus for pool in pools_of(scenario))


def _fleet(manifest: dict[str, Any]) -> dict[str, Any]:
    """The most power that all pools together draw; empty without pools."""
    if "pools" not in manifest:
        return {}
    parts = [(pool["gpus"], pool["hardware"]) for pool in manifest["pools"].values()]
    return {"fleet": {"tdp_w": sum(n * hardware["tdp_w"] for n, hardware in parts)}}


def failed(record: dict[str, Any], error: str) -> dict[str, Any]:
    """*record* of a run that ended with *error*."""
    return {**record, "error": error or "an error without a message"}
