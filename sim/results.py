"""What a run leaves: columns and a manifest in memory, and the folder that holds them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim import metrics
from sim.errors import OutputError
from sim.text import seconds_text

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FORMAT = "rooftrace-results-1"
FILES = (
    "summary.json",
    "requests.parquet",
    "iterations.parquet",
    "manifest.json",
    "latency.png",
    "timeline.png",
)
_MARK = "manifest.json"
_ABSENT_IS_NULL = ("scheduled_ns", "first_token_ns", "finish_ns", "replica")
_WIDE = ("start_ns", "duration_ns", "kv_tokens")  # iteration columns that need more than 32 bits
_STATUS_CODES = {name: code for code, name in enumerate(metrics.STATUS_NAMES)}


class Result:
    """A finished run. `summary`, `requests` and `iterations` are worked out when first looked at.

    *columns* are the engine's, *manifest* says what was run, *slo* holds the limits in seconds that goodput is
    counted against (keys `ttft_s`, `tpot_s`, `e2el_s`).
    """

    def __init__(
        self, columns: metrics.Columns, *, manifest: Mapping[str, Any], slo: Mapping[str, float | None] | None = None
    ) -> None:
        self.columns = columns
        self.manifest = dict(manifest)
        self.slo = dict(slo or {})

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """Every metric, nested as in summary.json, over the scenario's `window`; see `sim.metrics.summary`."""
        return metrics.summary(self.columns, slo=self.slo, window=self._window, models=self.manifest.get("models", ()))

    @property
    def _window(self) -> Mapping[str, Any]:
        return self.manifest.get("scenario", {}).get("window", metrics.WHOLE)

    @property
    def in_window(self) -> NDArray[np.bool_]:
        """Which requests the latencies of `summary` are of: shape [requests]."""
        return metrics.in_window(self.columns.requests, self.summary)

    @functools.cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request: the stored columns, and ttft_s, tpot_s, e2el_s and queue_s worked out from them."""
        frame = request_table(self.columns).to_pandas()
        columns = self.columns.requests
        for measure in (metrics.ttft_s, metrics.tpot_s, metrics.e2el_s, metrics.queue_s):
            frame[measure.__name__] = measure(columns)
        return frame

    @functools.cached_property
    def iterations(self) -> pd.DataFrame:
        """One row an iteration, in the order of iterations.parquet."""
        import pyarrow as pa

        return pa.concat_tables(map(iteration_table, self.columns.iteration_blocks())).to_pandas()

    def kept(self) -> Result:
        """The same result with iterations, where they are few blocks, worked out once: for files and pictures together."""
        if isinstance(self.columns, _Once):
            return self
        found = Result(_Once(self.columns), manifest=self.manifest, slo=self.slo)
        if "summary" in self.__dict__:
            found.__dict__["summary"] = self.summary
        return found

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the results folder and return its path; a folder of older results is replaced as a whole.

        Pictures are drawn by `sim.plots.save_run`. Raises OutputError where the folder cannot be written or holds files that
        are not Rooftrace's.
        """
        with staging(folder) as scratch:
            self.write(scratch)
        return Path(folder)

    def write(self, folder: Path) -> None:
        """Write every file of the results folder straight into an existing *folder* (see `staging`)."""
        kept = self.kept()
        summary = self.__dict__.setdefault("summary", kept.summary)
        write_json(folder / "summary.json", summary)
        pools = [int(blocks) for blocks in self.columns.meta["kv_blocks_total"]]
        manifest = {"format": FORMAT, **self.manifest, "slo": self.slo, "kv_blocks_total": pools}
        if summary["speculation"] is not None:
            manifest["speculation"] = summary["speculation"]
        write_json(folder / "manifest.json", manifest)
        write_parquet([request_table(self.columns)], folder / "requests.parquet")
        write_parquet(map(iteration_table, kept.columns.iteration_blocks()), folder / "iterations.parquet")

    @property
    def rejections(self) -> dict[str, int]:
        """How many requests were rejected for each reason."""
        reason = self.columns.requests["reason"]
        counts = np.bincount(reason[reason >= 0], minlength=len(self.columns.reasons)).tolist()
        return dict(zip(self.columns.reasons, counts, strict=True))

    @property
    def label(self) -> str:
        """What was run, in a few words: model, hardware and scheduler."""
        return str(self.manifest.get("label", "")) or "run"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Result:
        """The result stored in *folder*: summary, requests, iterations and manifest as they were written.

        Gaps between single tokens are not stored, only their statistics in the summary; `columns.itl()` of a
        loaded result says so. Raises OutputError where *folder* is not a complete results folder.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise OutputError(f"{folder} is not a folder; give the folder that `rooftrace run` wrote")
        missing = [name for name in FILES[:4] if not (folder / name).is_file()]
        if missing:
            raise OutputError(f"{folder} is not a results folder: {', '.join(missing)} is missing")
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        found = manifest.pop("format", None)
        if found != FORMAT:
            raise OutputError(f"{folder} has results of format {found!r}; this version reads {FORMAT!r}: run it again")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        columns = _stored_columns(folder, manifest, summary)
        result = cls(columns, manifest=manifest, slo=manifest.get("slo"))
        result.__dict__["summary"] = summary
        return result

    def __repr__(self) -> str:
        counts = self.summary["requests"]
        return f"Result({self.label!r}, {counts['finished']} of {counts['total']} requests finished)"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            + "".join(f"<td style='text-align:right'>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for name, cells in latency_rows(self.summary)
        )
        heads = "".join(f"<th>{head}</th>" for head in LATENCY_HEADS)
        facts = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in fact_rows(self.summary)
        )
        return (
            f"<div><b>{escape(self.label)}</b>"
            f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
            f"<table><tbody>{facts}</tbody></table></div>"
        )


class _Once:
    """Columns whose gaps, and iterations where they are few blocks, are worked out once while a folder is written."""

    def __init__(self, columns: metrics.Columns) -> None:
        self.requests = columns.requests
        self.reasons = columns.reasons
        self.meta = columns.meta
        self.itl_blocks = columns.itl_blocks
        self._columns = columns
        self._kept: list[Mapping[str, NDArray[Any]]] = []

    def iteration_blocks(self) -> Iterable[Mapping[str, NDArray[Any]]]:
        if self._kept:
            return self._kept
        blocks = iter(self._columns.iteration_blocks())
        first = list(itertools.islice(blocks, _BLOCKS_TO_KEEP + 1))
        if len(first) <= _BLOCKS_TO_KEEP:
            self._kept = first
        return itertools.chain(first, blocks)


_BLOCKS_TO_KEEP = 8


LATENCY_HEADS = ("mean", "p50", "p90", "p95", "p99", "max")


def latency_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Latencies for a table: a name and a text for each of `LATENCY_HEADS`."""
    names = {
        "ttft_s": "TTFT (first token)",
        "tpot_s": "TPOT (per later token)",
        "itl_s": "ITL (token gap)",
        "e2el_s": "E2EL (whole request)",
        "queue_s": "Queue (before work starts)",
    }
    return [
        (name, ["-" if summary[key][head] is None else seconds_text(summary[key][head]) for head in LATENCY_HEADS])
        for key, name in names.items()
    ]


def window_text(window: Mapping[str, Any]) -> str:
    """Which part of a run the figures of a summary are over, for people."""
    if window["rule"] == "whole":
        return "the whole run, from the first arrival to the last finish"
    how = {"after_warmup": "after warm-up by MSER-5: ", "arrivals": ""}[window["rule"]]
    names = {"itl_s": "ITL", "mfu": "MFU", "mbu": "MBU", "busy_fraction": "busy"}
    whole = [names.get(str(name), str(name)) for name in window["whole_run"]]
    return (
        f"{how}{window['requests']:,} requests that arrive {seconds_text(window['from_s'])} to "
        f"{seconds_text(window['to_s'])} after the first; over the whole run: {', '.join(whole)}"
    )


def over(settings: Mapping[str, Any], axes: Sequence[str] = ()) -> str:
    """Which part of their runs the figures of many are over, for people, by the scenario's *settings*."""
    if any(key.split(".")[0] == "window" for key in axes):
        return "what each point's window says"
    window = settings.get("window", metrics.WHOLE)
    if window["rule"] == "whole":
        return "whole runs, from the first arrival to the last finish"
    if window["rule"] == "after_warmup":
        return "runs after warm-up (MSER-5), to the last arrival; columns window.*"
    end = "the last arrival" if window["to_s"] is None else f"{window['to_s']:g} s"
    return f"requests that arrive from {window['from_s'] or 0:g} s after the first to {end}; columns window.*"


def fact_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything of the summary but the latencies, for people: pairs of name and text."""
    counts = summary["requests"]
    kv = summary["kv_utilization"]

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def rate(value: float | None, unit: str) -> str:
        if value is None:
            return "-"
        return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"

    ends = [
        f"{counts[key]:,} {key}" for key in ("finished", "rejected", "unfinished") if key == "finished" or counts[key]
    ]
    rows = [
        ("Requests", f"{counts['total']:,}: " + ", ".join(ends)),
        ("Request throughput", rate(summary["requests_per_s"], "requests/s")),
        ("Output throughput", rate(summary["output_tokens_per_s"], "tokens/s")),
        ("Total throughput", rate(summary["total_tokens_per_s"], "tokens/s (prompt and output)")),
    ]
    if summary["slo_attainment"] is not None:
        good = rate(summary["goodput_requests_per_s"], "requests/s")
        rows.append(("Within the SLO", f"{share(summary['slo_attainment'])} of requests, goodput {good}"))
    window = summary.get("window", metrics.WHOLE)
    rows.insert(1, ("Figures over", window_text(window)))
    saturated = {True: "yes: the queue still grows when arrivals end", False: "no", None: "cannot be said"}
    rows += [
        ("Simulated time", f"{seconds_text(summary['makespan_s'])} in {summary['iterations']:,} iterations"),
        ("Busy", f"{share(summary['busy_fraction'])}, MFU {share(summary['mfu'])}, MBU {share(summary['mbu'])}"),
        ("KV memory in use", f"{share(kv['mean'])} on average, {share(kv['max'])} at most"),
        ("Preemptions", f"{summary['preemptions']:,}"),
        ("Saturated", saturated[summary["saturated"]]),
    ]
    for name, model in summary.get("models", {}).items():
        first, whole = model["ttft_s"]["p99"], model["e2el_s"]["p99"]
        texts = [f"{model['requests']['total']:,} requests"]
        texts += [] if first is None else [f"p99 TTFT {seconds_text(first)}"]
        texts += [] if whole is None else [f"p99 E2EL {seconds_text(whole)}"]
        texts += [] if model["slo_attainment"] is None else [f"{share(model['slo_attainment'])} within the SLO"]
        rows.append((name, ", ".join(texts)))
    speculation = summary.get("speculation")
    if speculation is not None and speculation["num_drafts"]:
        rows += [
            (
                "Speculation",
                f"{speculation['mean_acceptance_length']:.2f} tokens a round, "
                f"{share(speculation['draft_acceptance_rate'])} of drafted tokens accepted, "
                f"alpha {speculation['alpha']:.3f}",
            ),
            ("Accepted by position", ", ".join(share(rate) for rate in speculation["acceptance_rate_per_pos"])),
        ]
    if summary["wall_s"] is not None:
        rows.append(("Spent simulating", seconds_text(summary["wall_s"])))
    return rows


def request_table(columns: metrics.Columns) -> pa.Table:
    """Requests as an Arrow table: times in ns, null where absent; status and reason as text."""
    import pyarrow as pa

    given = columns.requests
    out: dict[str, Any] = {}
    for name, values in given.items():
        if name == "status":
            out[name] = _text_column(values, metrics.STATUS_NAMES)
        elif name == "reason":
            out[name] = _text_column(values, columns.reasons)
        else:
            absent = (values < 0) if name in _ABSENT_IS_NULL else None
            out[name] = _number_column(values.astype(np.int64, copy=False), absent)
    return pa.table(out)


def iteration_table(iterations: Mapping[str, NDArray[Any]]) -> pa.Table:
    """Iterations as an Arrow table: times and KV tokens 64 bits wide, counts 32."""
    import pyarrow as pa

    out = {}
    for name, values in iterations.items():
        width = np.int64 if name in _WIDE or name.endswith("_ns") else np.int32
        out[name] = _number_column(values if values.dtype.kind == "f" else values.astype(width, copy=False))
    return pa.table(out)


def write_parquet(tables: Iterable[pa.Table], path: Path) -> None:
    """Write *tables* of one schema, at least one, under each other; equal tables make equal files.

    Integers are stored as packed differences (DELTA_BINARY_PACKED), which for 450,000 iterations is both smaller
    and faster to write than dictionaries with any compressor.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = iter(tables)
    first = next(tables)
    packed = [field.name for field in first.schema if pa.types.is_integer(field.type)]
    texts = [field.name for field in first.schema if pa.types.is_string(field.type)]
    with pq.ParquetWriter(
        path,
        first.schema,
        compression="none",
        use_dictionary=texts,  # type: ignore[arg-type]  # the stubs know only bool
        column_encoding=dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
    ) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def write_json(path: Path, value: Any) -> None:
    """Write *value* as indented JSON with a newline at the end; NaN is refused."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def staging(folder: str | os.PathLike[str], *, files: Sequence[str] = FILES) -> Iterator[Path]:
    """A hidden scratch folder beside *folder* that takes its place when the block ends well, and vanishes otherwise.

    Entered before a run, it finds out at once whether the folder can be written. An existing folder is replaced
    only if it is empty or holds nothing but *files* with a manifest among them. Raises OutputError.
    """
    target = Path(folder).resolve()
    _check_replaceable(target, files)
    # Named before they are made, so that an interruption at any point finds what to remove.
    made = _missing_parents(target.parent)
    scratch = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    done = False
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.mkdir()
            yield scratch
            _check_replaceable(target, files)
            _swap_in(scratch, target)
        except OutputError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write results into {folder}: {reason}; choose another --out") from error
        done = True
    finally:
        if not done:
            shutil.rmtree(scratch, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _check_replaceable(target: Path, files: Sequence[str]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"{target} is a file, not a folder; choose another --out")
    try:
        names = sorted(entry.name for entry in target.iterdir())
    except OSError as error:
        raise OutputError(f"cannot read {target}: {error.strerror}; choose another --out") from None
    foreign = [name for name in names if name not in files]
    if foreign or (names and _MARK not in names):
        shown = ", ".join((foreign or names)[:3]) + (", ..." if len(foreign or names) > 3 else "")
        raise OutputError(f"{target} holds files that are not Rooftrace results ({shown}); choose another --out")


def _missing_parents(folder: Path) -> list[Path]:
    """Those of *folder* and its parents that are not there, innermost first."""
    missing = list(itertools.takewhile(lambda parent: not parent.exists(), (folder, *folder.parents)))
    nearest = missing[-1].parent if missing else folder
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file, not a folder; choose another --out")
    return missing


def _swap_in(scratch: Path, target: Path) -> None:
    """Rename *scratch* to *target*; what was there is put back if that fails."""
    if not target.exists():
        scratch.rename(target)
        return
    old = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
    try:
        target.rename(old)
        scratch.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _number_column(values: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow column over the memory of *values*, null where *absent*.

    From buffers, because `pyarrow.array` imports pandas on its first call: 0.25 s that a run has no other use for.
    """
    import pyarrow as pa

    valid = None if absent is None else pa.py_buffer(np.packbits(~absent, bitorder="little"))
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, data])


def _text_column(codes: NDArray[Any], names: Sequence[str]) -> pa.Array:
    """An Arrow column of texts, *names* by *codes*, null where a code is negative."""
    import pyarrow as pa

    encoded = [name.encode() for name in names]
    ends = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    data = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    texts = pa.Array.from_buffers(pa.string(), len(names), data)
    indices = _number_column(codes.astype(np.int32), codes < 0)
    return pa.DictionaryArray.from_arrays(indices, texts).dictionary_decode()


@dataclass(frozen=True)
class StoredColumns:
    """Columns read back from a results folder; gaps between tokens are not among them."""

    requests: Mapping[str, NDArray[Any]]
    reasons: tuple[str, ...]
    meta: Mapping[str, Any]
    iteration_columns: Mapping[str, NDArray[Any]] = field(repr=False)

    def iterations(self) -> Mapping[str, NDArray[Any]]:
        return self.iteration_columns

    def iteration_blocks(self) -> tuple[Mapping[str, NDArray[Any]], ...]:
        return (self.iterations(),)

    def itl_blocks(self) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return (self.itl(),)

    def itl(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        raise ValueError("gaps between tokens are not stored in a results folder; simulate its scenario again")


def _stored_columns(folder: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> StoredColumns:
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "requests.parquet")
    requests: dict[str, NDArray[Any]] = {}
    reasons: tuple[str, ...] = ()
    for name in table.column_names:
        column = table.column(name)
        if name == "status":
            codes = [_STATUS_CODES[text] for text in column.to_pylist()]
            requests[name] = np.array(codes, dtype=np.int8)
        elif name == "reason":
            texts = column.to_pylist()
            reasons = tuple(dict.fromkeys(text for text in texts if text is not None))
            codes = {None: -1} | {text: code for code, text in enumerate(reasons)}
            requests[name] = np.array([codes[text] for text in texts], dtype=np.int64)
        else:
            requests[name] = column.fill_null(-1).to_numpy()
    stored = pq.read_table(folder / "iterations.parquet")
    iterations = {name: stored.column(name).to_numpy() for name in stored.column_names}
    meta = {"kv_blocks_total": manifest.get("kv_blocks_total", []), "wall_s": summary.get("wall_s")}
    return StoredColumns(requests=requests, reasons=reasons, meta=meta, iteration_columns=iterations)
