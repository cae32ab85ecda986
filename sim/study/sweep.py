"""Runs a sweep into a folder, or goes on with one; reads it back."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import OutputError, RooftraceError
from sim.results import reading
from sim.scenario import Scenario
from sim.scenario.assembly.manifest import versions
from sim.study.backends import Backend, Cluster, Inline, Processes
from sim.study.execute import execute
from sim.study.notes import Noted, read_notes
from sim.study.points import Run, Sweep, axis_values, code_digest, frame_rows, load_sweep
from sim.study.progress import Progress, shown
from sim.study.statistics import LEVEL
from sim.study.store import Store
from sim.study.table import HALF_WIDTH, RunIndex, read_failures, write_tables
from sim.text import is_share, points_text, seconds_text, told_apart
from workloads.write import write_whole

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "rooftrace-sweep-1"
_POINTS = "points"


class SweepResult:
    """A finished sweep, read from its folder when looked at.

    `table` has a row a point: the axes' columns, `replications`, `failed`, `error` and every metric under its dotted
    name, with `NAME.half_width` beside it where there are replications. `runs` has a row a run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
            found = self.manifest.get("format")
        except (OSError, ValueError, RecursionError, AttributeError):
            raise OutputError(f"{folder} is not the folder of a sweep: it has no readable manifest.json") from None
        if found != FORMAT:
            raise OutputError(f"{folder} is not the folder of a sweep: its manifest says {found}")
        if self.manifest.get("counts") is None:
            raise OutputError(f"{folder} holds an unfinished sweep; the same `rooftrace sweep` command goes on with it")

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """One row a point."""
        return self._table("results.parquet", "replications")

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run, as it came out: no mean, and no verdict in the place of a value."""
        return self._table("runs.parquet", "run_seed")

    def _table(self, name: str, always: str) -> pd.DataFrame:
        """The table in the file *name*; OutputError where it is missing, damaged, or without a column that it *always* has."""
        import pandas as pd

        with reading(self.folder / name):
            table = pd.read_parquet(self.folder / name)
            if always not in table:
                raise ValueError(f"it has no column {always}")
            return table

    def summaries(self) -> Iterator[list[Mapping[str, Any] | None]]:
        """The summaries of the runs of each point, in the order of `table`; None for a run that failed."""
        store = Store(self.folder / _POINTS)
        for _, mine in self.runs.groupby("point", sort=True):
            yield [
                None if isinstance(error, str) else store.get(key)["summary"]
                for key, error in zip(mine["key"], mine["error"], strict=True)
            ]

    @property
    def level(self) -> float:
        """The confidence of its intervals."""
        return self.manifest["level"]

    @property
    def axes(self) -> list[str]:
        """The columns that were varied, `meta.` columns included, in order."""
        return list(self.manifest["columns"])

    @property
    def varied(self) -> list[str]:
        """Those of `axes` that are settings and take more than one value."""
        settings = [key for key in self.axes if not key.startswith("meta.")]
        return [key for key in settings if len(set(self.table[key].map(str))) > 1]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.manifest["counts"])

    @property
    def notes(self) -> tuple[Noted, ...]:
        """Notes of the runs, each sentence once, with the points that it holds for."""
        return read_notes(self.manifest["notes"])

    def failures(self, n: int = 20) -> list[dict[str, str]]:
        """The first *n* failed runs: their axes' values, `run_seed` and `error`."""
        return read_failures(self.folder / "failures.csv", n) if self.counts["failed"] else []

    def __repr__(self) -> str:
        counts = self.counts
        failed = f", {counts['failed']} run{'s' * (counts['failed'] != 1)} failed" if counts["failed"] else ""
        return f"SweepResult({str(self.folder)!r}, {counts['points']} points, {counts['runs']} runs{failed})"

    def _repr_html_(self) -> str:
        heads, rows = short_table(self, most=30)
        head = "".join(f"<th>{escape(name)}</th>" for name in heads)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:right'>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        more = self.counts["points"] - len(rows)
        tail = f"<p>and {more:,} more points in <code>.table</code></p>" if more > 0 else ""
        return (
            f"<div><b>{escape(repr(self))}</b><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{tail}</div>"
        )


HEADLINE = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99", "requests_per_s", "output_tokens_per_s")


def short_table(result: SweepResult, *, most: int, errors: bool = True) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the first *most* points for people: axes and the metrics most asked for.

    Where points cost different sums, $ a month are there too. Where the deployment is saturated, its latencies are that word; a
    failed point shows its error, or without *errors* the word failed.
    """
    table = result.table.head(most)
    metrics = [
        name
        for name in (*HEADLINE, "slo_attainment", "slo_kept")
        if name in table and bool(table[name].notna().to_numpy().any())
    ]
    # What all points cost alike is no difference between them.
    metrics += [name for name in ("costs.usd_per_month",) if name in table and table[name].nunique() > 1]
    heads = [*result.axes, *(metrics or ["outcome"])]
    rows = []
    settings = [told_apart([_text(value) for value in table[key]]) for key in result.axes]
    for at, values in enumerate(table.to_dict("records")):
        row = [texts[at] for texts in settings]
        if not values["replications"]:
            failed = [f"failed: {values['error']}"] if errors else ["failed"] * (len(heads) - len(row))
            rows.append([*row, *failed, *[""] * (len(heads) - len(row) - len(failed))])
            continue
        for name in metrics:
            value = values[name]
            if _absent(value):
                row.append("saturated" if values.get("saturated") and name.startswith(("ttft", "e2el")) else "-")
                continue
            half = values.get(name + HALF_WIDTH)
            row.append(_figure(name, value) + ("" if _absent(half) else f" ± {_figure(name, half, width=True)}"))
        rows.append([*row, *["-"] * (len(heads) - len(row))])
    return heads, rows


def expected_facts(result: SweepResult) -> list[tuple[str, str]]:
    """Rows for people that say by whose errors the points have intervals of what would be measured, or why they have none."""
    table = result.table
    rows: list[tuple[str, str]] = []
    for column, said in (("intervals.basis", "90 % intervals in columns intervals.*, by the errors on {}"),
                         ("intervals.why_not", "no interval: {}")):  # fmt: skip
        for text, n in table[column].value_counts().items() if column in table else ():
            where = "" if n == len(table) else f" ({n:,} of {len(table):,} points)"
            rows.append(("" if rows else "Expect to measure", said.format(text) + where))
    return rows


def _absent(value: Any) -> bool:
    return value is None or value != value


def _figure(name: str, value: Any, *, width: bool = False) -> str:
    """A figure for people, or the *width* around it, which is in points where the figure is a share."""
    if isinstance(value, str | bool):
        return _text(value)
    if "_s." in name:
        return seconds_text(value)
    if is_share(name):
        return points_text(value, signed=False) if width else f"{value:.1%}"
    return _text(value)


def _text(value: Any) -> str:
    if _absent(value):
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"


def sweep(
    scenario: Scenario | Sweep | str | os.PathLike[str] | None = None,
    *,
    axes: Mapping[str, Any] | None = None,
    points: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | pd.DataFrame | None = None,
    replications: int | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    retry_failed: bool = False,
    progress: Callable[[Progress], None] | bool | None = None,
) -> SweepResult:
    """Run every combination of the *axes*' values for every row of *points*, and return their tidy table.

    *scenario*: a Scenario, a Sweep, or the path of a scenario or sweep file; None for the default scenario.
    *axes*: dotted key to a list of values, or to a text such as '256,512' or '0.5:2:7'. *points*: rows of dotted keys
    (a CSV file, mappings, or a DataFrame); `meta.` columns go along. *replications* of each point share seeds with
    those of every other. Finished runs found in *out* are not run again; without *out* they go to a temporary folder
    that lives as long as the result. *jobs*: processes, all cores by default. *cluster*: address of a Dask scheduler
    instead. *progress*: a function called after each run, or whether to show a bar (by default where someone watches).

    A run that fails is recorded in the table, not raised; `SweepResult.failures()` lists them. Raises RooftraceError
    for a key that is no setting, and OutputError for a folder that cannot be used.
    """
    plan = _plan(scenario, axes, points, replications)
    temporary = out is None
    if out is None:
        out = tempfile.mkdtemp(prefix="rooftrace-sweep-")
    with shown(progress) as report:
        run_sweep(plan, Path(out), jobs=jobs, cluster=cluster, retry_failed=retry_failed, on_progress=report)
    result = SweepResult(out)
    if temporary:
        weakref.finalize(result, shutil.rmtree, out, ignore_errors=True)
    return result


def _plan(scenario: Any, axes: Any, points: Any, replications: int | None) -> Sweep:
    found = load_sweep(scenario) if isinstance(scenario, str | os.PathLike) else scenario
    if found is None:
        found = Scenario.default()
    if isinstance(points, str | os.PathLike):
        points = Path(points)
    elif points is not None and hasattr(points, "to_dict"):
        points = frame_rows(points)
    listed = {key: axis_values(values, key) for key, values in (axes or {}).items()}
    if isinstance(found, Sweep):
        return Sweep(
            base=found.base,
            axes={**found.axes, **listed},
            points=found.points if points is None else points,
            replications=found.replications if replications is None else replications,
        )
    if not isinstance(found, Scenario):
        raise TypeError(f"sweep takes a Scenario, a Sweep or the path of a file; got {type(found).__name__}")
    return Sweep(base=found, axes=listed, points=points, replications=1 if replications is None else replications)


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    jobs: int | None = None,
    cluster: str | None = None,
    retry_failed: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, int]:
    """Run what of *sweep* is not yet in the folder *out*, then write its tables; returns counts (see `write_tables`).

    Interrupted at any moment, it leaves the finished runs, and the same call goes on from there.
    """
    if jobs is not None and jobs < 1:
        raise RooftraceError(f"jobs is at least 1; got {jobs}")
    if jobs is not None and cluster is not None:
        raise RooftraceError("the Dask scheduler knows its workers; leave out jobs or cluster")
    total = len(sweep) * sweep.replications
    if not total:
        where = (
            f"{sweep.points} has no row below its first line" if isinstance(sweep.points, Path) else "points is empty"
        )
        raise RooftraceError(f"there is no point to run: {where}")
    _check_any(sweep)
    folder = _open(out)
    store = Store(folder)
    store.clear_scratch()
    manifest = {"format": FORMAT, **_provenance(sweep)}
    _write_manifest(out, {**manifest, "counts": None})
    tally = {"done": 0, "failed": 0, "reused": 0}
    begun = time.monotonic()

    def tell(key: str, error: str) -> None:
        tally["done"] += 1
        tally["failed"] += bool(error)
        on_progress(Progress(total=total, elapsed_s=time.monotonic() - begun, key=key, error=error, **tally))

    def wanted(index: RunIndex) -> Iterator[Run]:
        claimed: dict[str, None] = {}
        for point in sweep:
            for run in sweep.runs(point):
                index.add(run)
                if run.scenario is None:
                    tell(run.key, run.error)
                elif run.key in claimed or _finished(store, run.key, retry_failed):
                    # A key may come twice in a sweep: its second appearance counts as found, and is never run again.
                    tally["reused"] += 1
                    tell(run.key, "")
                else:
                    claimed[run.key] = None
                    if len(claimed) > _RECENT:
                        del claimed[next(iter(claimed))]
                    yield run

    with RunIndex() as index:
        runs = wanted(index)
        first = next(runs, None)
        if first is not None:
            backend = _backend(folder, jobs, cluster, total)
            execute(itertools.chain([first], runs), store, backend, lambda outcome: tell(outcome.key, outcome.error))
        counts, notes = write_tables(sweep, store, out, index)
    _write_manifest(out, {**manifest, "counts": counts, "notes": [asdict(each) for each in notes]})
    return counts


def _check_any(sweep: Sweep) -> None:
    """RooftraceError where none of the points is a scenario: a slip in an axis, and no sweep with failures in it."""
    reason = ""
    for point in sweep:
        run = sweep.runs(point)[0]
        if run.scenario is not None:
            return
        where = ", ".join(f"{key}={value}" for key, value in point.settings.items())
        reason = reason or f"{where}: {run.error}" if where else run.error
    raise RooftraceError(f"no point of the sweep can be run; the first, {reason}")


# Keys of runs handed out and perhaps not yet stored: more than are ever under way at once.
_RECENT = 10_000


def _finished(store: Store, key: str, retry_failed: bool) -> bool:
    if key not in store:
        return False
    return not (retry_failed and "error" in store.get(key))


def _backend(folder: Path, jobs: int | None, cluster: str | None, total: int) -> Backend:
    if cluster is not None:
        return Cluster(cluster)
    if jobs is None:
        import joblib

        jobs = joblib.cpu_count()
    jobs = min(jobs, total)
    return Inline(folder) if jobs == 1 else Processes(jobs, folder)


def _open(out: Path) -> Path:
    """The folder of finished runs in *out*, made where it is missing; OutputError where *out* is something else."""
    try:
        names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out} is a file, not a folder; choose another --out")
        if names and _format_of(out) != FORMAT and set(names) - {_POINTS}:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise OutputError(f"{out} holds files that are not a Rooftrace sweep ({shown}); choose another --out")
        (out / _POINTS).mkdir(parents=True, exist_ok=True)
        for name in names:
            if name.startswith(".") and name.split(".")[1] in ("results", "runs", "failures", "manifest"):
                (out / name).unlink(missing_ok=True)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write into {out}: {error.strerror}; choose another --out") from error
    return out / _POINTS


def _format_of(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("format") if isinstance(found, dict) else None


def _provenance(sweep: Sweep) -> dict[str, Any]:
    columns = list(dict.fromkeys([*sweep.columns(), *sweep.axes]))
    return {**sweep.describe(), "columns": columns, "level": LEVEL, "code": code_digest(), "versions": versions()}


def _write_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    write_whole(out / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False, default=str) + "\n")
