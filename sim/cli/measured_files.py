"""Measured runs as commands take them: their files, what the files do not say, and which runs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from sim.bench import BenchRun
from sim.bench.compare import strange
from sim.bench.facts import all_with_facts, divided
from sim.bench.load import assumed
from sim.bench.reading import read_files
from sim.cli.exits import USER_ERROR
from sim.cli.given import read_scenario
from sim.cli.tables import print_notes
from sim.errors import RooftraceError
from sim.scenario import Scenario


def read(
    files: Sequence[Path], facts: Mapping[str, Mapping[str, Any]], where: Sequence[str], before: Path | None = None
) -> list[BenchRun]:
    """The runs of *files* with *facts* told, those that *where* picks; a sentence on standard error for what could not be read, and
    exit code 2 where nothing is left."""
    found = read_files(files, before=before)
    print_notes(found.problems, head="Not read")
    runs = list(found.runs)
    for condition in where:
        key, equals, value = condition.partition("=")
        if not equals:
            raise RooftraceError(f"--where {condition!r}: expected KEY=VALUE, such as arm=plain")
        if runs and not any(key in run.config for run in runs):
            keys = sorted({key for run in runs for key in run.config})
            raise RooftraceError(f"--where {key}: no run's configuration has it; there are {', '.join(keys) or 'none'}")
        runs = [run for run in runs if str(run.config.get(key)) == value]
    if not runs:
        if found.runs:
            raise RooftraceError(f"--where {' '.join(where)}: none of {len(found.runs)} runs is so")
        raise typer.Exit(USER_ERROR)
    return all_with_facts(runs, facts)


def read_both(
    scenario: Path,
    files: Sequence[Path],
    set_: Sequence[str] | None,
    where: Sequence[str] | None,
    before: Path | None,
) -> tuple[Scenario, list[BenchRun]]:
    """The deployment and its measured runs, with the settings and facts that --set gives; a note says where models differ."""
    settings, facts = divided(set_ or ())
    chosen = read_scenario(scenario, settings)
    runs = read(files, facts, where or (), before)
    print_notes(strange(chosen, runs))
    return chosen, runs


def print_assumed(runs: Sequence[BenchRun]) -> None:
    """Print what was read and taken for granted, on standard error."""
    print_notes(by_run((run.name, sentence) for run in runs for sentence in (*run.notes, *assumed(run))))


def by_run(said: Iterable[tuple[str, str]]) -> list[str]:
    """Sentences about runs, each once, behind the first run that it is about and the number of the others."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        names.setdefault(sentence, []).append(name)
    return [f"{several(names)}: {sentence}" for sentence, names in names.items()]


def several(names: Sequence[str]) -> str:
    """The first of *names*, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
