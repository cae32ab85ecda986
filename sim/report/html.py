"""Reports of a run or a sweep in one HTML file: tables, pictures, scenario and provenance, and nothing to load."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sim.plots import run_figures, sweep_figures
from sim.plots.style import svg_bytes
from sim.results import Result, fact_rows, tables
from sim.results.trust import interval_text
from sim.study.sweep import SweepResult, expected_facts, short_table
from sim.text import seconds_text
from workloads.write import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 2000
_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --soft: #444; --page: #fff; --line: #ddd; --head: #888; --block: #f5f5f5;
  --note: #fdf6e8; --bad: #fdf0e8; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --soft: #b5b5b5; --page: #15181c; --line: #3a3f45; --head: #8a9199;
  --block: #20242a; --note: #332a15; --bad: #3a2114; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1180px; margin: 2em auto;
  padding: 0 1em; overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
.lead { color: var(--soft); margin-top: 0; } .note { border-left: 4px solid #E69F00; padding: 0.2em 0.8em;
  background: var(--note); }
.bad { border-left-color: #D55E00; background: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25em 0.7em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--head); }
table.facts td { text-align: left; white-space: normal; } table.facts th { text-align: left; font-weight: 600; }
table.sortable thead th { cursor: pointer; } th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
/* Pictures are drawn on white, which they keep in the dark. */
img { max-width: 100%; height: auto; display: block; margin: 0.8em 0; background: #fff; border-radius: 4px; } pre {
  background: var(--block); padding: 0.8em;
  overflow-x: auto; font-size: 13px; } details { margin: 0.6em 0; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 640px) { body { margin: 1em auto; padding: 0 0.7em; } th, td { padding: 0.25em 0.45em; }
  table.facts, table.facts tbody, table.facts tr, table.facts th, table.facts td { display: block; border: 0; }
  table.facts tr { border-bottom: 1px solid var(--line); padding: 0.3em 0; } table.facts th, table.facts td { padding: 0; }
  .picture { overflow-x: auto; } .picture img { min-width: 35em; } }
@media print { :root { color-scheme: light; } body { max-width: none; } details > *:not(summary) { display: block; } }
"""
# Sorts a table by the column whose head is clicked: numbers by data-value, texts by letter.
_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], [p, q] = [parseFloat(x), parseFloat(y)];
      const order = isNaN(p) || isNaN(q) ? x.localeCompare(y) : p - q;
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows);
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
  }));
}
"""


def write_run_report(result: Result, path: str | os.PathLike[str]) -> Path:
    """Write the report of one run to *path*, whole or not at all, and return the path."""
    summary, manifest = result.summary, result.manifest
    body = [_head(result.label, _run_lead(summary))]
    body += [_note(note) for note in manifest.get("notes", ())]
    if summary["saturated"]:
        body.append(_note("The queue still grows when arrivals end: latencies tell how long the run was.", bad=True))
    body += [f"<h2>{title}</h2>" + _table(("", *heads), rows) for title, heads, rows in tables(summary)]
    body.append("<h2>The run</h2>" + _facts(fact_rows(summary)))
    if result.rejections:
        rows = sorted(result.rejections.items(), key=lambda item: -item[1])
        body.append("<h2>Rejected requests</h2>" + _facts([(f"{count:,}", reason) for reason, count in rows]))
    if summary["requests"]["finished"]:
        body.append("<h2>Pictures</h2>")
        figures = run_figures(result.requests, result.columns.iteration_blocks)
        body += [_picture(name, figure) for name, figure in figures.items()]
    body.append(_provenance(manifest.get("scenario"), manifest))
    return _write(Path(path), result.label, body)


def write_sweep_report(sweep: SweepResult | str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the report of a sweep, or of the folder of one, to *path*, whole or not at all, and return the path.

    The table holds the first 2,000 points, and says so where there are more.
    """
    result = sweep if isinstance(sweep, SweepResult) else SweepResult(sweep)
    counts = result.counts
    title = f"Sweep over {', '.join(result.varied) or 'replications'}"
    replications = result.manifest["replications"]
    lead = f"{counts['points']:,} points, {counts['runs']:,} runs"
    if replications > 1:
        lead += f"; means of {replications} replications ± half-widths of intervals at {result.manifest['level']:.0%}"
    body = [_head(title, lead)]
    if counts["saturated"]:
        body.append(
            _note(f"{counts['saturated']:,} points are saturated: arrivals outrun the deployment, and latencies are that "
                  "word instead of a number that would only tell how long the run was.")
        )  # fmt: skip
    if counts["failed"]:
        rows = [(", ".join(f"{key}={row[key]}" for key in result.axes), row["error"]) for row in result.failures(50)]
        body.append(_note(f"{counts['failed']:,} run{'s' * (counts['failed'] != 1)} failed.", bad=True) + _facts(rows))
    try:
        figures = sweep_figures(result.table, result.axes)
    except ValueError as error:
        body.append(_note(f"No picture: {error}."))
    else:
        body.append("<h2>Pictures</h2>")
        body += [_picture(name, figure) for name, figure in figures.items()]
    heads, rows = short_table(result, most=_MOST_ROWS)
    body.append("<h2>Points</h2>" + _table(heads, rows, values=_values(result, heads), sortable=True))
    if counts["points"] > len(rows):
        body.append(f"<p>The first {len(rows):,} of {counts['points']:,}; all are in results.parquet and .csv.</p>")
    body.append(_facts(expected_facts(result)))
    body.append(_provenance(result.manifest.get("base"), result.manifest))
    return _write(Path(path), title, body)


def _run_lead(summary: Mapping[str, Any]) -> str:
    counts, first = summary["requests"], summary["ttft_s"]
    text = f"{counts['finished']:,} of {counts['total']:,} requests finished"
    if first["p99"] is None:
        return text
    text += f"; half see a first token within {seconds_text(first['p50'])}, 99 % within {seconds_text(first['p99'])}"
    return f"{text}. To be measured: {interval_text(summary['intervals'])}" if "intervals" in summary else text


def _values(result: SweepResult, heads: Sequence[str]) -> list[list[Any]]:
    table = result.table.head(_MOST_ROWS)
    return [[row[name] for name in heads] for row in table.to_dict("records")]


def _head(title: str, lead: str) -> str:
    return f"<h1>{escape(title)}</h1><p class='lead'>{escape(lead)}</p>"


def _note(text: str, *, bad: bool = False) -> str:
    return f"<p class='note{' bad' if bad else ''}'>{escape(text)}</p>"


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<div class='scroll'><table class='facts'><tbody>{cells}</tbody></table></div>"


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    values: Sequence[Sequence[Any]] | None = None,
    sortable: bool = False,
) -> str:
    def cell(row: int, column: int, text: str) -> str:
        value = None if values is None else values[row][column]
        number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        return f"<td data-value='{value!r}'>{escape(text)}</td>" if number else f"<td>{escape(text)}</td>"

    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in heads)
    lines = ("<tr>" + "".join(cell(i, j, text) for j, text in enumerate(row)) + "</tr>" for i, row in enumerate(rows))
    kind = " class='sortable'" if sortable else ""
    return (
        f"<div class='scroll'><table{kind}><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _picture(name: str, figure: Figure) -> str:
    # As an image rather than inline, so that the names within one picture cannot meet those of another.
    data = base64.b64encode(svg_bytes(figure)).decode()
    return f"<div class='picture'><img alt='{escape(name.replace('-', ' '))}' src='data:image/svg+xml;base64,{data}'></div>"


def _provenance(scenario: Any, manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key not in ("scenario", "base", "notes")}

    def block(title: str, content: Any) -> str:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
        return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"

    return (
        "<h2>Scenario and provenance</h2>" + block("Scenario, defaults included", scenario) + block("Provenance", rest)
    )


def _write(path: Path, title: str, body: Sequence[str]) -> Path:
    text = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + f"\n<script>{_SCRIPT}</script></body></html>\n"
    )
    write_whole(path, text)
    return path
