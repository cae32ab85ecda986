"""Request traces from files: formats known by their content, read into columns, refused by line and column."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workloads.adapters import adapter_numbers
from workloads.cells import HEADERS, Table, header_cells, json_objects, read_beginning, read_bytes, read_lines
from workloads.columns import NS_PER_S, IntArray, first_row
from workloads.components import BLOCK_TOKENS, ComponentOrder, Prompts, check_order, components_of, lengths_beside
from workloads.exports import MissingOutput, Rules, read_export, says_requests
from workloads.functions import function_counts, function_invocations
from workloads.media import CELLS, Medium, columns_of, parse_cell
from workloads.sources import is_parquet, trace_files
from workloads.trace import Trace
from workloads.windows import Cut, Window

FORMATS = (
    *("azure_llm", "burstgpt", "mooncake", "components", "plain", "azure_functions_2019", "azure_functions_2021"),
    "export",
)
_JSON = ("mooncake", "components")
"""Formats with a request a line of JSON."""

# github.com/kvcache-ai/Mooncake hashes prompts in blocks of 512 tokens; each of the 12,031 prompts of its
# conversation trace has ceil(input_length / 512) ids.
MOONCAKE_BLOCK_TOKENS = 512

_PIECE = 20_000
"""Rows that are read at a time where most are left out."""

_PLAIN_NAMES = {"model": "models", "class": "classes", "tenant": "tenants"}
_PREFIX_COLUMN = re.compile(r"prefix_blocks_([1-9][0-9]*)")


def read_trace(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    limit: int | None = None,
    sort: bool = False,
    drop_empty: bool = False,
    models: Sequence[str] | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    columns: Mapping[str, str] | None = None,
    missing_output: MissingOutput | None = None,
    keep_failed: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    timed: bool = True,
    seed: int = 0,
    since: str | float | None = None,
    until: str | float | None = None,
    component_order: ComponentOrder = "as_sent",
) -> Trace:
    """The requests of a trace file, as it is or packed by gzip or zstd; time runs from its first arrival where the file has dates.

    Formats, told apart by their header or first line unless *format* names one: `azure_llm` (2023 and 2024),
    `burstgpt`, `mooncake`, `components` (ids by kind, whose tokens a table beside the file has; *component_order*: see
    `workloads.components`), `plain` (what `Trace.to_csv` writes), and `azure_functions_2019` and `_2021`, which
    have functions in place of models and no lengths: they need *models* (function i counts as model i mod n)
    and *prompt_tokens*, take *output_tokens* (0 where not given), and read the window from *start_s* to *end_s*
    (see `read_function_counts`, `read_function_invocations`). Minutes of the 2019 trace are spread evenly; draw
    them with `GammaWindows` for random arrivals.

    Everything else is an `export`: CSV, JSON lines, JSON documents and Parquet files, folders of them and patterns such as
    `logs/*.gz` (in order of name), in which the names that tools give to columns are known, and *columns* names others: what is
    said (arrival, prompt_tokens, output_tokens, ...) to a dotted path. Of exports alone: *missing_output* says what becomes of
    requests without an output length (drop: left out; max_tokens: what the client allowed; draw: the lengths of others, by *seed*);
    *keep_failed* keeps failed requests that have tokens; *tokenizer*, a tokenizer.json, counts the tokens of texts, which without
    it is approximate; without *timed* all requests arrive at 0, whatever the file says. `Trace.notes` says what was left out and
    what was assumed.

    *since* and *until* keep the requests that arrive from the one on and before the other: dates such as 2026-11-03T09:00 (UTC
    where no zone is said), or seconds from the first row. Time runs from the first request that is kept. Where times are in order,
    reading stops at *until*; what is outside is not held.

    *limit* keeps the first requests, *sort* accepts arrivals out of order, *drop_empty* leaves out rows with
    neither prompt nor output tokens. Raises ValueError naming file, line, column and value of what is wrong.

    With a *limit* a file is read no further than that takes, and nothing is said of what is behind; but all of it with *sort*,
    which may find the first requests at its end, and in the azure_functions formats, which have a line a function or go by end.
    """
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format is auto or one of {', '.join(FORMATS)}; got {format!r}")
    rules = Rules(
        columns=columns or {},
        missing_output=missing_output,
        keep_failed=keep_failed,
        tokenizer=tokenizer,
        timed=timed,
        seed=seed,
        window=Window(since=since, until=until),
    )
    files = trace_files(path)
    if not files:
        raise ValueError(f"{path}: no file is there that could be part of a trace")
    name = format if format != "auto" else _format_of(path, files, rules)
    check_order(component_order)
    if component_order != "as_sent" and name != "components":
        raise ValueError(
            f"{path}: component_order is of prompts made of components, and this file is {name}; leave it out"
        )
    if name == "export":
        return read_export(path, files, limit=limit, rules=rules)
    of_exports = {"columns": columns, "missing_output": missing_output, "tokenizer": tokenizer}
    of_exports["keep_failed"] = keep_failed or None
    _refuse(path, of_exports, f"belong to exports, and this file is {name}; leave them out")
    of_functions = {"models": models, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    of_functions |= {"start_s": start_s, "end_s": end_s}
    if not name.startswith("azure_functions"):
        _refuse(
            path,
            of_functions,
            f"belong to the azure_functions formats and this file is {name}; use with_models or window on the trace",
        )
        order = _Order(sort=sort, drop_empty=drop_empty, component_order=component_order)
        trace = _of_requests(path, name, rules.window, limit=limit, order=order)
    elif rules.window:
        raise ValueError(f"{path}: since and until are not of {name}; give start_s and end_s")
    else:
        trace = _of_functions(path, name, **of_functions)
    return trace if limit is None else trace.limit(limit)


def _format_of(path: Any, files: Sequence[Path], rules: Rules) -> str:
    """The format of one file of a known form; everything else is an export."""
    if rules.columns or files != [Path(path)] or is_parquet(path):
        return "export"
    return _recognise(path, read_beginning(path, 1)[0], rules)


def _refuse(path: Any, given: Mapping[str, Any], why: str) -> None:
    """ValueError that names those of *given* that are given, and *why* they may not be."""
    if misplaced := [key for key, value in given.items() if value is not None]:
        raise ValueError(f"{path}: {', '.join(misplaced)} {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The way in which rows, and what is in them, may lie."""

    sort: bool
    drop_empty: bool
    component_order: ComponentOrder


def _of_requests(path: Any, name: str, window: Window, *, limit: int | None, order: _Order) -> Trace:
    """The requests of a file with a line each, or at least *limit* of them: it is read no further than that takes."""
    lines = int(limit) + 1 if limit and limit > 0 and not order.sort else None  # the first may be a header
    while True:
        read = _Read.within(path, name, lines, window) if window else _Read.beginning(path, name, lines)
        trace = _assemble(path, name, read, order)
        if read.is_all or (trace is not None and limit is not None and len(trace) >= limit):
            assert trace is not None
            return trace
        # Empty rows that are left out, and rows of several lines.
        assert lines is not None
        lines *= 2


def _of_functions(
    path: Any, name: str, *, models: Sequence[str] | None, prompt_tokens: int | None, output_tokens: int | None,
    start_s: float | None, end_s: float | None,
) -> Trace:  # fmt: skip
    if not models or prompt_tokens is None:
        raise ValueError(
            f"{path}: {name} names functions and has no lengths; give models and prompt_tokens to read it as requests"
        )
    functions = (function_counts if name == "azure_functions_2019" else function_invocations)(path, read_bytes(path))
    return functions.trace(
        models=models,
        prompt_tokens=prompt_tokens,
        output_tokens=0 if output_tokens is None else output_tokens,
        start_s=0.0 if start_s is None else start_s,
        end_s=end_s,
    )


_Records = list[tuple[int, dict[str, Any]]]
"""Objects, each with the number of its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One batch of rows of a file: cells of a table, or objects of JSON lines."""

    source: Table | _Records
    is_all: bool
    """Whether nothing is behind it, or nothing that is asked for."""
    notes: tuple[str, ...] = ()
    rebased: bool = False
    """Whether time is to run from the first request."""

    @classmethod
    def beginning(cls, path: Any, name: str, n_lines: int | None) -> _Read:
        data, is_all = read_beginning(path, n_lines)
        if name in _JSON:
            return cls(source=list(json_objects(path, data.split(b"\n"))), is_all=is_all)
        return cls(source=Table.parse(path, data, HEADERS[name]), is_all=is_all, rebased=name == "azure_llm")

    @classmethod
    def within(cls, path: Any, name: str, n_rows: int | None, window: Window) -> _Read:
        """The rows in *window*, of these the first *n_rows*."""
        cut = Cut(window)
        kept: list[Any] = []
        notes: list[str] = []
        n_kept, is_all = 0, True
        for piece in _pieces(path, name):
            rows = cut.rows(_arrivals_ns(path, name, piece).tolist())
            if rows:
                kept.append(piece.rows(rows) if isinstance(piece, Table) else [piece[row] for row in rows])
                n_kept += len(rows)
            if cut.stopped_at is not None:
                line = piece.lines[cut.stopped_at] if isinstance(piece, Table) else piece[cut.stopped_at][0]
                notes.append(f"{Path(path).name}: {cut.stop('line', int(line))}")
                break
            if n_rows is not None and n_kept >= n_rows:
                is_all = False
                break
        why = "; ".join(f"{count:,} {reason}" for reason, count in cut.left_out.most_common())
        if not kept:
            said = "; ".join(filter(None, [why, cut.span()]))
            raise ValueError(f"{path}: no requests are left of {cut.left_out.total():,} rows: {said}")
        if why:
            total = n_kept + cut.left_out.total()
            notes.insert(0, f"{Path(path).name}: of {total:,} rows {n_kept:,} are taken; left out are {why}.")
        source = Table.joined(kept) if isinstance(kept[0], Table) else [each for piece in kept for each in piece]
        return cls(source=source, is_all=is_all, notes=tuple(notes), rebased=True)


def _pieces(path: Any, name: str) -> Iterator[Table | _Records]:
    if name not in _JSON:
        yield from Table.pieces(path, _PIECE, HEADERS[name])
        return
    objects = json_objects(path, read_lines(path))
    while piece := list(itertools.islice(objects, _PIECE)):
        yield piece


def _arrivals_ns(path: Any, name: str, source: Table | _Records) -> IntArray:
    if not isinstance(source, Table):
        return np.array([_mooncake_ns(path, line, record) for line, record in source], dtype=np.int64)
    if name == "azure_llm":
        return source.timestamps_ns("TIMESTAMP")
    return source.nanoseconds("Timestamp" if name == "burstgpt" else "arrival_s")


def _assemble(path: Any, name: str, read: _Read, given: _Order) -> Trace | None:
    """The requests of what is read; None where it has none and is not all of the file."""
    if isinstance(read.source, Table):
        parts = {"azure_llm": _azure_llm, "burstgpt": _burstgpt, "plain": _plain}[name](read.source)
        lines = read.source.lines
    else:
        parts = (
            _mooncake(path, read.source)
            if name == "mooncake"
            else _components(path, read.source, given.component_order)
        )
        lines = np.array([line for line, _ in read.source], dtype=np.int64)
    arrival = parts["arrival_ns"] = _arrivals_ns(path, name, read.source)
    prompt, output = parts["prompt_tokens"], parts["output_tokens"]
    prompt_name, output_name, arrival_name = parts.pop("names")
    keep = np.arange(len(arrival))
    empty = (prompt == 0) & (output == 0)
    if empty.any():
        if not given.drop_empty:
            line = lines[int(np.argmax(empty))]
            raise ValueError(
                f"{path}, line {line}: a request needs {prompt_name} or {output_name} above 0; got 0 and 0: "
                "mend the file or read it with drop_empty (--set workload.drop_empty=true; --drop-empty of rooftrace trace)"
            )
        keep = keep[~empty]
    if len(keep) == 0:
        if not read.is_all:
            return None
        raise ValueError(f"{path}: no requests left to read; every row has 0 prompt and 0 output tokens")
    order = keep[np.argsort(arrival[keep], kind="stable")]
    if not given.sort:
        falls = np.diff(arrival[keep]) < 0
        if falls.any():
            row = int(np.argmax(falls))
            raise ValueError(
                f"{path}, line {lines[keep[row + 1]]}, column {arrival_name}: arrivals are out of order; this one is "
                f"{(arrival[keep[row]] - arrival[keep[row + 1]]) / NS_PER_S:.9g} s before the one above it: "
                "sort the file or read it with sort (--set workload.sort=true; --sort of rooftrace trace)"
            )
        order = keep
    prefix, notes = parts.pop("prefix", None), (*read.notes, *parts.pop("notes", ()))
    media = parts.pop("media", {})
    tables = {name: parts.pop(name, ()) for name in ("models", "classes", "tenants")}
    blocks = {}
    if prefix is not None:
        ids, counts, block_tokens = prefix
        offsets = np.concatenate(([0], np.cumsum(counts)))
        too_many = counts > -(-(prompt + output) // block_tokens)
        if too_many.any():
            row = int(np.argmax(too_many))
            raise ValueError(
                f"{path}, line {lines[row]}: {counts[row]} prefix blocks of {block_tokens} tokens cannot belong to a "
                f"prompt of {prompt[row]} and {output[row]} output tokens; mend the row"
            )
        new_counts = counts[order]
        new_offsets = np.concatenate(([0], np.cumsum(new_counts)))
        source_rows = np.repeat(offsets[:-1][order] - new_offsets[:-1], new_counts) + np.arange(new_offsets[-1])
        blocks = {
            "prefix_blocks": ids[source_rows],
            "prefix_offsets": new_offsets,
            "prefix_block_tokens": block_tokens,
        }
    columns = {key: value[order] for key, value in parts.items() if value is not None}
    if read.rebased:
        columns["arrival_ns"] = columns["arrival_ns"] - columns["arrival_ns"][0]
    for medium, cells in media.items():
        blocks |= columns_of(medium, [cells[row] for row in order.tolist()])
    return Trace(**columns, **blocks, **tables, source=Path(path).name, notes=notes)


def _recognise(path: Any, data: bytes, rules: Rules) -> str:
    """The format of a file: one of those that have a reader of their own, or `export`."""
    begin = data.lstrip()[:1]
    if begin in (b"{", b"["):
        return _json_format(data) if begin == b"{" else "export"
    cells = header_cells(data)
    header = set(cells)
    for name, needed in HEADERS.items():
        if header >= set(needed):
            return name
    if says_requests(Path(path), rules):
        return "export"
    # A header that has most of a format's columns is that format with a column missing, which its reader says.
    near = max(HEADERS, key=lambda name: len(header & set(HEADERS[name])) / len(HEADERS[name]))
    return near if len(header & set(HEADERS[near])) >= 2 else "export"


def _json_format(data: bytes) -> str:
    """The format of lines of JSON, by the first of them."""
    try:
        record = json.loads(data.lstrip().split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return "export"
    if isinstance(record, dict) and "timestamp" in record and {"input_length", "output_length"} & record.keys():
        return "components" if isinstance(record.get("hash_ids"), dict) else "mooncake"
    return "export"


def _azure_llm(table: Table) -> dict[str, Any]:
    return {
        "prompt_tokens": table.integers("ContextTokens"),
        "output_tokens": table.integers("GeneratedTokens"),
        "names": ("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    }


def _burstgpt(table: Table) -> dict[str, Any]:
    models, index = _names(table, "Model")
    return {
        "prompt_tokens": table.integers("Request tokens"),
        "output_tokens": table.integers("Response tokens"),
        "model_index": index,
        "models": models,
        "session": _session_numbers(table, "Session ID") if "Session ID" in table.header else None,
        "names": ("Request tokens", "Response tokens", "Timestamp"),
    }


def _plain(table: Table) -> dict[str, Any]:
    prefix_name = next((name for name in table.header if _PREFIX_COLUMN.fullmatch(name)), None)
    of_media = [cells.column for cells in CELLS.values()]
    columns = (*HEADERS["plain"], *_PLAIN_NAMES, *_PLAIN_NUMBERS, "adapter", *of_media)
    known = {*columns, prefix_name}
    if unknown := [name for name in table.header if name not in known]:
        raise ValueError(
            f"{table.path}, line 1: {unknown[0]!r} is not a column of the plain format; known are "
            f"{', '.join(columns)} and prefix_blocks_N: rename or remove it"
        )
    parts: dict[str, Any] = {
        "prompt_tokens": table.integers("prompt_tokens"),
        "output_tokens": table.integers("output_tokens"),
        "names": ("prompt_tokens", "output_tokens", "arrival_s"),
    }
    for column, names in _PLAIN_NAMES.items():
        if column in table.header:
            parts[names], parts[f"{column}_index"] = _names(table, column)
    if prefix_name is not None:
        parts["prefix"] = _blocks(table, prefix_name)
    parts["media"] = {medium: _media(table, medium) for medium, cells in CELLS.items() if cells.column in table.header}
    parts |= {key: read(table) for column, (key, read) in _PLAIN_NUMBERS.items() if column in table.header}
    if "adapter" in table.header:
        parts["adapter"], notes = adapter_numbers(table.texts("adapter"), partial(table.refuse, "adapter"))
        parts["notes"] = [f"{Path(table.path).name}: {note}." for note in notes]
    over = parts.get("max_tokens", parts["output_tokens"]) < parts["output_tokens"]
    if (row := first_row(over)) is not None:
        table.refuse("max_tokens", row, f"at least the {parts['output_tokens'][row]} output tokens")
    return parts


_PLAIN_NUMBERS: Mapping[str, tuple[str, Callable[[Table], IntArray]]] = {
    "deadline_s": ("deadline_ns", lambda table: table.nanoseconds("deadline_s", blank=-1)),
    "session": ("session", lambda table: table.integers("session", blank=-1)),
    "abort_s": ("abort_ns", lambda table: table.nanoseconds("abort_s", blank=-1)),
    "max_tokens": ("max_tokens", lambda table: table.integers("max_tokens")),
    "priority": ("priority", lambda table: table.whole_numbers("priority", blank=0)),
    "predicted_tokens": ("predicted_tokens", lambda table: table.integers("predicted_tokens")),
    "encoder_tokens": ("encoder_tokens", lambda table: table.integers("encoder_tokens")),
}


def _media(table: Table, medium: Medium) -> list[list[tuple[int, ...]]]:
    cells, found, sizes = CELLS[medium], [], dict[int, tuple[int, ...]]()
    for row, text in enumerate(table.texts(cells.column)):
        try:
            found.append(parse_cell(medium, text))
        except ValueError:
            table.refuse(cells.column, row, cells.expected)
        for *size, content in found[-1]:
            if content >= 0 and sizes.setdefault(content, tuple(size)) != tuple(size):
                table.refuse(
                    cells.column, row, f"#{content} to be of the same size as before, or another number for it"
                )
    return found


def _blocks(table: Table, column: str) -> tuple[IntArray, IntArray, int]:
    """Ids of blocks, how many each row has, and the tokens of one."""
    counts, ids = np.zeros(len(table), dtype=np.int64), []
    for row, text in enumerate(table.texts(column)):
        words = text.split()
        if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
            table.refuse(column, row, "block ids: whole numbers from 0 between blanks")
        ids.extend(map(int, words))
        counts[row] = len(words)
    return np.array(ids, dtype=np.int64), counts, int(column.rpartition("_")[2])


def _names(table: Table, column: str) -> tuple[tuple[str, ...], IntArray]:
    names = table.texts(column)
    if "" in names:
        table.refuse(column, names.index(""), f"a {column.lower()} name")
    found = tuple(dict.fromkeys(names))
    position = {name: i for i, name in enumerate(found)}
    return found, np.array([position[name] for name in names], dtype=np.int64)


def _session_numbers(table: Table, column: str) -> IntArray:
    """Sessions numbered by first appearance; blank cells are -1."""
    position: dict[str, int] = {}
    numbers = [-1 if text == "" else position.setdefault(text, len(position)) for text in table.texts(column)]
    return np.array(numbers, dtype=np.int64)


def _whole(path: Any, line: int, record: dict[str, Any], key: str) -> int:
    if key not in record:
        raise ValueError(f"{path}, line {line}: {key} is missing; got the keys {', '.join(record)}")
    value = record[key]
    bad = isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63
    if bad or value != int(value):
        raise ValueError(f"{path}, line {line}, column {key}: expected a whole number from 0; got {value!r}")
    return int(value)


def _mooncake_ns(path: Any, line: int, record: dict[str, Any]) -> int:
    stamp = record.get("timestamp")
    if isinstance(stamp, float) and 0 <= stamp * 1e6 < 2**63:
        return round(Decimal(repr(stamp)) * 1_000_000)
    return _whole(path, line, record, "timestamp") * 1_000_000


def _components(path: Any, records: _Records, order: ComponentOrder) -> dict[str, Any]:
    prompts = Prompts(lengths_beside(path), order)
    prompt, output, session, counts = [], [], [], []
    names: list[IntArray] = [np.empty(0, np.int64)]
    for line, record in records:
        where = f"{path}, line {line}"
        prompt.append(_whole(path, line, record, "input_length"))
        output.append(_whole(path, line, record, "output_length"))
        session.append(_whole(path, line, record, "session") if "session" in record else -1)
        names.append(prompts.add(where, components_of(where, record)))
        if len(names[-1]) * BLOCK_TOKENS > prompt[-1]:
            raise ValueError(
                f"{where}: its components have {len(names[-1]) * BLOCK_TOKENS} tokens and more, and input_length is {prompt[-1]}; "
                "mend the row, or the table of lengths"
            )
        counts.append(len(names[-1]))
    share = 100 * prompts.seen_tokens / max(sum(prompt), 1)
    note = f"{Path(path).name}: {share:.1f} % of the prompt tokens are of components that an earlier prompt had, at whatever place"
    return {
        "prompt_tokens": np.array(prompt, dtype=np.int64),
        "output_tokens": np.array(output, dtype=np.int64),
        "session": np.array(session, dtype=np.int64) if max(session, default=-1) >= 0 else None,
        "prefix": (np.concatenate(names), np.array(counts, dtype=np.int64), BLOCK_TOKENS),
        "names": ("input_length", "output_length", "timestamp"),
        "notes": (f"{note}; components are {_ORDERS[order]}.",),
    }


_ORDERS = {
    "as_sent": "in the order that was sent",
    "seen": "put in the order of earlier prompts",
}


def _mooncake(path: Any, records: _Records) -> dict[str, Any]:
    prompt, output, counts = [], [], []
    ids: list[int] = []
    for line, record in records:
        prompt.append(_whole(path, line, record, "input_length"))
        output.append(_whole(path, line, record, "output_length"))
        blocks = record.get("hash_ids", [])
        good = isinstance(blocks, list) and all(type(block) is int and 0 <= block < 2**63 for block in blocks)
        if not good:
            raise ValueError(
                f"{path}, line {line}, column hash_ids: expected a list of whole numbers from 0; got {str(blocks)[:60]}"
            )
        if blocks and len(blocks) < prompt[-1] // MOONCAKE_BLOCK_TOKENS:
            raise ValueError(
                f"{path}, line {line}, column hash_ids: {len(blocks)} ids of {MOONCAKE_BLOCK_TOKENS} tokens do not cover the "
                f"prompt of {prompt[-1]}; mend the row, or leave its ids out"
            )
        ids.extend(blocks)
        counts.append(len(blocks))
    return {
        "prompt_tokens": np.array(prompt, dtype=np.int64),
        "output_tokens": np.array(output, dtype=np.int64),
        "prefix": (np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64), MOONCAKE_BLOCK_TOKENS),
        "names": ("input_length", "output_length", "timestamp"),
    }
