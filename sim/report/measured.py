"""A page of measured runs beside their simulation: errors, runs, every figure, and what was taken for granted."""

from __future__ import annotations

import os
from pathlib import Path

from sim.bench.compare import HEADLINES, Compared, frame_of, headline, load_text, saturation_text
from sim.plots.measured import measured_figure
from sim.report.html import _facts, _head, _note, _picture, _provenance, _table, _write
from sim.scenario import Scenario

_NAMES = {"tpot": "TPOT", "ttft": "TTFT", "e2el": "E2EL", "output_tokens_per_s": "output tokens/s"}


def write_measured_report(found: Compared, scenario: Scenario, path: str | os.PathLike[str]) -> Path:
    """Write the page to *path*, whole or not at all, and return the path."""
    runs = len(found.replays)
    body = [_head("Measured runs beside their simulation", f"{runs} runs on {scenario.name}, nothing fitted to them")]
    body += [_note(problem, bad=True) for problem in found.problems]
    for saturated, title in ((False, "Errors below saturation"), (True, "Errors beyond saturation")):
        errors = found.errors(saturated=saturated)
        if errors:
            rows = [
                (_NAMES[name], f"{of.runs}", f"{of.mean:.1%}", f"{of.median:.1%}", f"{of.worst:+.1%}")
                for name, of in errors.items()
            ]
            body.append(f"<h2>{title}</h2>" + _table(("", "runs", "mean", "median", "farthest"), rows))
    if found.replays:
        body.append("<h2>Picture</h2>" + _picture("measured-runs", measured_figure(found.replays)))
        heads = ["run", "load", "saturation"]
        heads += [f"{_NAMES[name]}{what}" for name in HEADLINES for what in (", measured", ", simulated", ", error")]
        rows, values = [], []
        for each in found.replays:
            cells: list[str] = [each.run.name, load_text(each.run), saturation_text(each)]
            sorts: list[object] = list(cells)
            for quantity in HEADLINES:
                name, theirs, ours, error = headline(each, quantity)
                cells += [_figure(name, theirs), _figure(name, ours), "" if error is None else f"{error:+.1%}"]
                sorts += [theirs, ours, error]
            rows.append(cells)
            values.append(sorts)
        body.append("<h2>Runs</h2>" + _table(heads, rows, values=values, sortable=True))
        frame = frame_of(found)
        columns = ("run", "figure", "measured", "predicted", "predicted_std", "error")
        table = [tuple("" if row[key] != row[key] or row[key] is None else _cell(row[key]) for key in columns)
                 for row in frame.to_dict("records")]  # fmt: skip
        body.append(
            "<details><summary>Every figure (times in seconds)</summary>" + _table(columns, table) + "</details>"
        )
        said = [(each.run.name, sentence) for each in found.replays for sentence in (*each.run.notes, *each.assumed)]
        if said:
            body.append("<h2>What was noted and taken for granted</h2>" + _facts(said))
    body.append(_provenance(scenario.resolved(), {"scenario_hash": scenario.hash, "source": scenario.source}))
    return _write(Path(path), "Measured runs beside their simulation", body)


def _figure(name: str, value: float | None) -> str:
    if value is None or value != value:
        return ""
    return f"{value * 1e3:.4g} ms" if name.endswith("_s") and not name.endswith("per_s") else f"{value:,.1f}"


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
