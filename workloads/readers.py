"""Request traces from files: formats known by their content, read into columns, refused by line and column."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from workloads.trace import NS_PER_S, IntArray, Trace

FORMATS = ("azure_llm", "burstgpt", "mooncake", "plain", "azure_functions_2019", "azure_functions_2021")

# github.com/kvcache-ai/Mooncake hashes prompts in blocks of 512 tokens; each of the 12,031 prompts of its
# conversation trace has ceil(input_length / 512) ids.
MOONCAKE_BLOCK_TOKENS = 512

_HEADERS: dict[str, tuple[str, ...]] = {
    # github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023 and 2024
    "azure_llm": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    # github.com/HPMLL/BurstGPT
    "burstgpt": ("Timestamp", "Model", "Request tokens", "Response tokens"),
    "plain": ("arrival_s", "prompt_tokens", "output_tokens"),
    # github.com/Azure/AzurePublicDataset, AzureFunctionsDataset2019: one column a minute of the day
    "azure_functions_2019": ("HashOwner", "HashApp", "HashFunction", "Trigger", "1"),
    # github.com/Azure/AzurePublicDataset, AzureFunctionsInvocationTrace2021
    "azure_functions_2021": ("app", "func", "end_timestamp", "duration"),
}
_PLAIN_OPTIONAL = ("model", "deadline_s", "session", "priority", "max_tokens", "abort_s")
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
) -> Trace:
    """The requests of a trace file (plain or gzipped); time runs from its first arrival where the file has dates.

    Formats, told apart by their header or first line unless *format* names one: `azure_llm` (2023 and 2024),
    `burstgpt`, `mooncake`, `plain` (what `Trace.to_csv` writes), and `azure_functions_2019` and `_2021`, which
    have functions in place of models and no lengths: they need *models* (function i counts as model i mod n)
    and *prompt_tokens*, take *output_tokens* (0 where not given), and read the window from *start_s* to *end_s*
    (see `read_function_counts`, `read_function_invocations`). Minutes of the 2019 trace are spread evenly; draw
    them with `GammaWindows` for random arrivals.

    *limit* keeps the first requests, *sort* accepts arrivals out of order, *drop_empty* leaves out rows with
    neither prompt nor output tokens. Raises ValueError naming file, line, column and value of what is wrong.
    """
    data = _read(path)
    name = _recognise(path, data) if format == "auto" else format
    if name not in FORMATS:
        raise ValueError(f"format is auto or one of {', '.join(FORMATS)}; got {format!r}")
    if name.startswith("azure_functions"):
        if not models or prompt_tokens is None:
            raise ValueError(
                f"{path}: {name} names functions and has no lengths; "
                "give models and prompt_tokens to read it as requests"
            )
        functions = (
            _function_counts(path, data) if name == "azure_functions_2019" else _function_invocations(path, data)
        )
        trace = functions.trace(
            models=models,
            prompt_tokens=prompt_tokens,
            output_tokens=0 if output_tokens is None else output_tokens,
            start_s=0.0 if start_s is None else start_s,
            end_s=end_s,
        )
        return trace if limit is None else trace.limit(limit)
    given = {"models": models, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    given |= {"start_s": start_s, "end_s": end_s}
    if misplaced := [key for key, value in given.items() if value is not None]:
        raise ValueError(
            f"{path}: {', '.join(misplaced)} belong to the azure_functions formats and this file is {name}; "
            "use with_models or window on the trace"
        )
    if name == "mooncake":
        parts, lines = _mooncake(path, data)
    else:
        table = _Table.parse(path, data, _HEADERS[name])
        parts = {"azure_llm": _azure_llm, "burstgpt": _burstgpt, "plain": _plain}[name](table)
        lines = table.lines
    trace = _assemble(path, parts, lines, sort=sort, drop_empty=drop_empty, rebase=name == "azure_llm")
    return trace if limit is None else trace.limit(limit)


def _assemble(
    path: Any, parts: dict[str, Any], lines: IntArray, *, sort: bool, drop_empty: bool, rebase: bool
) -> Trace:
    arrival = parts["arrival_ns"]
    prompt, output = parts["prompt_tokens"], parts["output_tokens"]
    prompt_name, output_name, arrival_name = parts.pop("names")
    keep = np.arange(len(arrival))
    empty = (prompt == 0) & (output == 0)
    if empty.any():
        if not drop_empty:
            line = lines[int(np.argmax(empty))]
            raise ValueError(
                f"{path}, line {line}: a request needs {prompt_name} or {output_name} above 0; got 0 and 0: "
                "mend the file or read it with drop_empty (workload.drop_empty: true, --drop-empty)"
            )
        keep = keep[~empty]
    if len(keep) == 0:
        raise ValueError(f"{path}: no requests left to read; every row has 0 prompt and 0 output tokens")
    order = keep[np.argsort(arrival[keep], kind="stable")]
    if not sort:
        falls = np.diff(arrival[keep]) < 0
        if falls.any():
            row = int(np.argmax(falls))
            raise ValueError(
                f"{path}, line {lines[keep[row + 1]]}, column {arrival_name}: arrivals are out of order; this one is "
                f"{(arrival[keep[row]] - arrival[keep[row + 1]]) / NS_PER_S:.9g} s before the one above it: "
                "sort the file or read it with sort (workload.sort: true, --sort)"
            )
        order = keep
    prefix = parts.pop("prefix", None)
    models = parts.pop("models", ())
    blocks = {}
    if prefix is not None:
        ids, counts, block_tokens = prefix
        offsets = np.concatenate(([0], np.cumsum(counts)))
        too_many = counts > -(-prompt // block_tokens)
        if too_many.any():
            row = int(np.argmax(too_many))
            raise ValueError(
                f"{path}, line {lines[row]}: {counts[row]} prefix blocks of {block_tokens} tokens cannot belong to a "
                f"prompt of {prompt[row]}; mend the row"
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
    if rebase:
        columns["arrival_ns"] = columns["arrival_ns"] - columns["arrival_ns"][0]
    return Trace(**columns, **blocks, models=models, source=Path(path).name)


def _read(path: str | os.PathLike[str]) -> bytes:
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: the compressed file is damaged ({error}); fetch it again") from None
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8 text; convert the file to UTF-8") from None
    if not data.strip():
        raise ValueError(f"{path}: the file is empty; a trace needs at least one request")
    return data


def _recognise(path: Any, data: bytes) -> str:
    if data.lstrip().startswith(b"{"):
        return "mooncake"
    cells = _header_cells(data)
    header = set(cells)
    for name, needed in _HEADERS.items():
        if header >= set(needed):
            return name
    # A header that has most of a format's columns is that format with a column missing, which its reader says.
    near = max(_HEADERS, key=lambda name: len(header & set(_HEADERS[name])) / len(_HEADERS[name]))
    if len(header & set(_HEADERS[near])) >= 2:
        return near
    known = "; ".join(f"{name}: {','.join(needed)}" for name, needed in _HEADERS.items())
    raise ValueError(
        f"{path}: the first line is none of the formats known ({known}; mooncake: JSON lines); "
        f"got {','.join(cells)[:80]!r}: rename the columns or name the format"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """Cells of a CSV file as byte ranges of one buffer, so that columns are parsed without a string a cell."""

    path: Any
    buffer: NDArray[np.uint8]
    starts: IntArray
    ends: IntArray
    lines: IntArray
    header: tuple[str, ...]

    @classmethod
    def parse(cls, path: Any, data: bytes, needed: Sequence[str]) -> _Table:
        header = _header_cells(data)
        if missing := [name for name in needed if name not in header]:
            raise ValueError(
                f"{path}, line 1: column {missing[0]} is missing; "
                f"expected {','.join(needed)}, got {','.join(header)[:200]}"
            )
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: column {twice} is there twice; leave one")
        split = _split_quoted if b'"' in data else _split_plain
        buffer, starts, ends, lines = split(path, data, len(header))
        if len(starts) == 0:
            raise ValueError(f"{path}: a header and no rows; a trace needs at least one request")
        return cls(path=path, buffer=buffer, starts=starts, ends=ends, lines=lines, header=header)

    def __len__(self) -> int:
        return len(self.lines)

    def cells(self, name: str) -> tuple[IntArray, IntArray]:
        column = self.header.index(name)
        return self.starts[:, column], self.ends[:, column]

    def text(self, name: str, row: int) -> str:
        start, end = self.cells(name)
        return self.buffer[start[row] : end[row]].tobytes().decode("utf-8", "replace")

    def texts(self, name: str) -> list[str]:
        start, end = self.cells(name)
        data = self.buffer.tobytes()
        return [data[a:b].decode("utf-8") for a, b in zip(start.tolist(), end.tolist(), strict=True)]

    def refuse(self, name: str, row: int, expected: str) -> NoReturn:
        raise ValueError(
            f"{self.path}, line {self.lines[row]}, column {name}: expected {expected}; "
            f"got {self.text(name, row)[:60]!r}"
        )

    def integers(self, name: str, *, blank: int | None = None) -> IntArray:
        """A column of whole numbers from 0; a whole number written as a decimal (12.0) counts as one."""
        start, end = self.cells(name)
        value, good = _digits(self.buffer, start, end)
        empty = start == end
        if blank is not None:
            value[empty] = blank
            good |= empty
        for row in np.flatnonzero(~good).tolist():
            try:
                number = Decimal(self.text(name, row))
                whole = int(number) if number.is_finite() and number == number.to_integral_value() else -1
            except InvalidOperation:
                whole = -1
            if not 0 <= whole < 2**63:
                self.refuse(name, row, "a whole number from 0")
            value[row] = whole
        return value

    def whole_numbers(self, name: str, *, blank: int) -> IntArray:
        """A column of whole numbers of either sign."""
        numbers = []
        for row, text in enumerate(self.texts(name)):
            try:
                numbers.append(int(text) if text else blank)
            except ValueError:
                self.refuse(name, row, "a whole number")
            if abs(numbers[-1]) >= 2**63:
                self.refuse(name, row, "a whole number that fits in 64 bits")
        return np.array(numbers, dtype=np.int64)

    def nanoseconds(self, name: str, *, blank: int | None = None) -> IntArray:
        """A column of seconds from 0 as nanoseconds: exact up to nine decimals, rounded to nearest beyond."""
        start, end = self.cells(name)
        value, good = _decimals(self.buffer, start, end)
        empty = start == end
        if blank is not None:
            value[empty] = blank
            good |= empty
        for row in np.flatnonzero(~good).tolist():
            try:
                number = Decimal(self.text(name, row))
            except InvalidOperation:
                self.refuse(name, row, "a number from 0")
            if not number.is_finite() or number < 0 or number * NS_PER_S >= 2**63:
                self.refuse(name, row, "a finite number from 0")
            value[row] = round(number * NS_PER_S)
        return value

    def timestamps_ns(self, name: str) -> IntArray:
        """Nanoseconds since 1970 of a column like 2023-11-16 18:17:03.9799600 (or with T, Z, +00:00)."""
        start, end = self.cells(name)
        value, good = _timestamps(self.buffer, start, end)
        if not good.all():
            row = int(np.argmin(good))
            self.refuse(name, row, "a time like 2023-11-16 18:17:03.9799600")
        return value


def _header_cells(data: bytes) -> tuple[str, ...]:
    # The csv module refuses cells above 128 KiB, which a file that is no CSV at all may begin with.
    first = data.lstrip().split(b"\n", 1)[0][:100_000].decode("utf-8", "replace").strip()
    return tuple(cell.strip() for cell in next(csv.reader([first], skipinitialspace=True), []))


_Cells = tuple[NDArray[np.uint8], IntArray, IntArray, IntArray]


def _split_plain(path: Any, data: bytes, n_columns: int) -> _Cells:
    if not data.endswith(b"\n"):
        data += b"\n"
    buffer = np.frombuffer(data, dtype=np.uint8)
    stops = np.flatnonzero(buffer == ord("\n"))
    begins = np.concatenate(([0], stops[:-1] + 1))
    lines = np.arange(1, len(stops) + 1)
    filled = stops > begins
    begins, stops, lines = begins[filled][1:], stops[filled][1:], lines[filled][1:]
    if len(lines) == 0:
        none = np.empty((0, n_columns), dtype=np.int64)
        return buffer, none, none, lines
    commas = np.flatnonzero(buffer == ord(","))
    commas = commas[commas >= begins[0]]
    _check_widths(path, np.searchsorted(commas, stops) - np.searchsorted(commas, begins) + 1, lines, n_columns)
    inner = commas.reshape(len(lines), n_columns - 1)
    starts = np.column_stack((begins, inner + 1))
    ends = np.column_stack((inner, stops))
    # Blanks around a cell are not part of it; nearly no file has any.
    while (pad := (starts < ends) & (buffer[starts] == ord(" "))).any():
        starts = starts + pad
    while (pad := (starts < ends) & (buffer[ends - 1] == ord(" "))).any():
        ends = ends - pad
    return buffer, starts, ends, lines


def _split_quoted(path: Any, data: bytes, n_columns: int) -> _Cells:
    reader = csv.reader(io.StringIO(data.decode("utf-8"), newline=""), skipinitialspace=True)
    rows, lines = [], []
    try:
        for row in reader:
            if row:
                rows.append([cell.strip().encode() for cell in row])
                lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not a row of a CSV file; {error}") from None
    rows, line_numbers = rows[1:], np.array(lines[1:], dtype=np.int64)
    _check_widths(path, np.array([len(row) for row in rows], dtype=np.int64), line_numbers, n_columns)
    cells = [cell for row in rows for cell in row]
    ends = np.cumsum(np.array([len(cell) for cell in cells], dtype=np.int64))
    starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    buffer = np.frombuffer(b"".join(cells), dtype=np.uint8)
    shape = (len(rows), n_columns)
    return buffer, starts.reshape(shape), ends.reshape(shape), line_numbers


def _check_widths(path: Any, widths: IntArray, lines: IntArray, n_columns: int) -> None:
    wrong = widths != n_columns
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{path}, line {lines[row]}: expected {n_columns} columns; got {widths[row]}")


def _digits(
    buffer: NDArray[np.uint8], start: IntArray, end: IntArray, most: int = 18
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Values of digit strings, and which cells are 1 to *most* digits and nothing else."""
    width = end - start
    good = (width > 0) & (width <= most)
    value = np.zeros(len(start), dtype=np.int64)
    longest = int(width[good].max(initial=0))
    for k in range(longest):
        at = start + k
        inside = good & (at < end)
        digit = buffer[np.where(inside, at, 0)].astype(np.int64) - ord("0")
        good &= ~inside | ((digit >= 0) & (digit <= 9))
        value = np.where(inside & good, value * 10 + digit, value)
    return value, good


def _decimals(buffer: NDArray[np.uint8], start: IntArray, end: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Decimal seconds as nanoseconds, and which cells are digits with at most one point and nothing else."""
    point = end.copy()
    for k in range(int((end - start).max(initial=0))):
        at = start + k
        inside = at < end
        found = inside & (point == end) & (buffer[np.where(inside, at, 0)] == ord("."))
        point = np.where(found, at, point)
    whole, good = _digits(buffer, start, point, most=9)
    after = np.minimum(point + 1, end)
    places = end - after
    fraction, fraction_good = _digits(buffer, after, end)
    good &= fraction_good | (places == 0)
    power = np.power(10, np.abs(9 - np.clip(places, 0, 18)), dtype=np.int64)
    short = np.where(places <= 9, fraction, 0) * power
    rounded, rest = np.divmod(fraction, power)
    # Exact halves are left to the slow path, which rounds them to even.
    good &= (places <= 9) | (2 * rest != power)
    return whole * NS_PER_S + np.where(places <= 9, short, rounded + (2 * rest > power)), good


def _timestamps(buffer: NDArray[np.uint8], start: IntArray, end: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    good = end - start >= 19

    def char(at: IntArray) -> NDArray[np.uint8]:
        return buffer[np.minimum(at, len(buffer) - 1)]

    def number(offset: int, width: int, low: int, high: int) -> IntArray:
        nonlocal good
        value = np.zeros(len(start), dtype=np.int64)
        for k in range(offset, offset + width):
            digit = char(start + k).astype(np.int64) - ord("0")
            good = good & (digit >= 0) & (digit <= 9)
            value = value * 10 + digit
        good = good & (value >= low) & (value <= high)
        return value

    year = number(0, 4, 1970, 2199)
    month = number(5, 2, 1, 12)
    day = number(8, 2, 1, 31)
    hour = number(11, 2, 0, 23)
    minute = number(14, 2, 0, 59)
    second = number(17, 2, 0, 59)
    for offset, allowed in ((4, "-"), (7, "-"), (10, " T"), (13, ":"), (16, ":")):
        mark = char(start + offset)
        good = good & np.any([mark == ord(c) for c in allowed], axis=0)
    # numpy months run from 1970-01; the day is checked against the length of its month.
    months = np.where(good, (year - 1970) * 12 + month - 1, 0)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    following = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    good = good & (day <= following - first)

    at = start + 19
    fraction = np.zeros(len(start), dtype=np.int64)
    has_point = good & (at < end) & (char(at) == ord("."))
    at = at + has_point
    begin = at.copy()
    running = has_point.copy()
    for _ in range(9):
        digit = char(at).astype(np.int64) - ord("0")
        running = running & (at < end) & (digit >= 0) & (digit <= 9)
        fraction = np.where(running, fraction * 10 + digit, fraction)
        at = at + running
    fraction = fraction * np.power(10, 9 - (at - begin), dtype=np.int64)
    good = good & (~has_point | (at > begin))

    rest = end - at
    utc = (rest == 1) & (char(at) == ord("Z"))
    sign = char(at)
    offset_form = (rest == 6) & ((sign == ord("+")) | (sign == ord("-"))) & (char(at + 3) == ord(":"))
    digits = [char(at + k).astype(np.int64) - ord("0") for k in (1, 2, 4, 5)]
    for digit in digits:
        offset_form = offset_form & (digit >= 0) & (digit <= 9)
    minutes = (digits[0] * 10 + digits[1]) * 60 + digits[2] * 10 + digits[3]
    shift = np.where(offset_form, np.where(sign == ord("+"), -minutes, minutes), 0)
    good = good & ((rest == 0) | utc | offset_form)

    seconds = ((first + day - 1) * 24 + hour) * 3600 + (minute + shift) * 60 + second
    return np.where(good, seconds, 0) * NS_PER_S + np.where(good, fraction, 0), good


def _azure_llm(table: _Table) -> dict[str, Any]:
    return {
        "arrival_ns": table.timestamps_ns("TIMESTAMP"),
        "prompt_tokens": table.integers("ContextTokens"),
        "output_tokens": table.integers("GeneratedTokens"),
        "names": ("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    }


def _burstgpt(table: _Table) -> dict[str, Any]:
    models, index = _names(table, "Model")
    return {
        "arrival_ns": table.nanoseconds("Timestamp"),
        "prompt_tokens": table.integers("Request tokens"),
        "output_tokens": table.integers("Response tokens"),
        "model_index": index,
        "models": models,
        "session": _session_numbers(table, "Session ID") if "Session ID" in table.header else None,
        "names": ("Request tokens", "Response tokens", "Timestamp"),
    }


def _plain(table: _Table) -> dict[str, Any]:
    prefix_name = next((name for name in table.header if _PREFIX_COLUMN.fullmatch(name)), None)
    known = {*_HEADERS["plain"], *_PLAIN_OPTIONAL, prefix_name}
    if unknown := [name for name in table.header if name not in known]:
        raise ValueError(
            f"{table.path}, line 1: {unknown[0]!r} is not a column of the plain format; known are "
            f"{', '.join((*_HEADERS['plain'], *_PLAIN_OPTIONAL))} and prefix_blocks_N: rename or remove it"
        )
    parts: dict[str, Any] = {
        "arrival_ns": table.nanoseconds("arrival_s"),
        "prompt_tokens": table.integers("prompt_tokens"),
        "output_tokens": table.integers("output_tokens"),
        "names": ("prompt_tokens", "output_tokens", "arrival_s"),
    }
    if "model" in table.header:
        parts["models"], parts["model_index"] = _names(table, "model")
    if "deadline_s" in table.header:
        parts["deadline_ns"] = table.nanoseconds("deadline_s", blank=-1)
    if "session" in table.header:
        parts["session"] = table.integers("session", blank=-1)
    if "abort_s" in table.header:
        parts["abort_ns"] = table.nanoseconds("abort_s", blank=-1)
    if "max_tokens" in table.header:
        parts["max_tokens"] = table.integers("max_tokens")
    if "priority" in table.header:
        parts["priority"] = table.whole_numbers("priority", blank=0)
    if prefix_name is not None:
        counts, ids = np.zeros(len(table), dtype=np.int64), []
        for row, text in enumerate(table.texts(prefix_name)):
            words = text.split()
            if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
                table.refuse(prefix_name, row, "block ids: whole numbers from 0 between blanks")
            ids.extend(map(int, words))
            counts[row] = len(words)
        block_tokens = int(prefix_name.rpartition("_")[2])
        parts["prefix"] = (np.array(ids, dtype=np.int64), counts, block_tokens)
    return parts


def _names(table: _Table, column: str) -> tuple[tuple[str, ...], IntArray]:
    names = table.texts(column)
    if "" in names:
        table.refuse(column, names.index(""), "a model name")
    models = tuple(dict.fromkeys(names))
    position = {name: i for i, name in enumerate(models)}
    return models, np.array([position[name] for name in names], dtype=np.int64)


def _session_numbers(table: _Table, column: str) -> IntArray:
    """Sessions numbered by first appearance; blank cells are -1."""
    position: dict[str, int] = {}
    numbers = [-1 if text == "" else position.setdefault(text, len(position)) for text in table.texts(column)]
    return np.array(numbers, dtype=np.int64)


def _mooncake(path: Any, data: bytes) -> tuple[dict[str, Any], IntArray]:
    def whole(record: dict[str, Any], key: str, line: int) -> int:
        if key not in record:
            raise ValueError(f"{path}, line {line}: {key} is missing; got the keys {', '.join(record)}")
        value = record[key]
        bad = isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63
        if bad or value != int(value):
            raise ValueError(f"{path}, line {line}, column {key}: expected a whole number from 0; got {value!r}")
        return int(value)

    arrival, prompt, output, counts, lines = [], [], [], [], []
    ids: list[int] = []
    for line, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: expected one JSON object; {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {line}: expected one JSON object; got {text[:60].decode(errors='replace')}")
        stamp = record.get("timestamp")
        if isinstance(stamp, float) and 0 <= stamp * 1e6 < 2**63:
            arrival.append(round(Decimal(repr(stamp)) * 1_000_000))
        else:
            arrival.append(whole(record, "timestamp", line) * 1_000_000)
        prompt.append(whole(record, "input_length", line))
        output.append(whole(record, "output_length", line))
        blocks = record.get("hash_ids", [])
        good = isinstance(blocks, list) and all(type(block) is int and 0 <= block < 2**63 for block in blocks)
        if not good:
            raise ValueError(
                f"{path}, line {line}, column hash_ids: expected a list of whole numbers from 0; got {str(blocks)[:60]}"
            )
        ids.extend(blocks)
        counts.append(len(blocks))
        lines.append(line)
    parts = {
        "arrival_ns": np.array(arrival, dtype=np.int64),
        "prompt_tokens": np.array(prompt, dtype=np.int64),
        "output_tokens": np.array(output, dtype=np.int64),
        "prefix": (np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64), MOONCAKE_BLOCK_TOKENS),
        "names": ("input_length", "output_length", "timestamp"),
    }
    return parts, np.array(lines, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionCounts:
    """How often each function was called in each bin of time, as the Azure Functions trace of 2019 tells it."""

    functions: tuple[str, ...]
    """`owner/app/function` in the order of the file."""
    counts: IntArray
    """Calls, functions x bins."""
    bin_s: int = 60
    source: str = ""

    def stripe(self, n_models: int, *, start_s: float = 0.0, end_s: float | None = None) -> IntArray:
        """Calls of each model in each bin of a window, models x bins.

        Functions without a call in the window are left out; of the others, the i-th counts as model
        i mod *n_models*. The window is in whole bins.
        """
        n_bins = self.counts.shape[1]
        first, last = start_s / self.bin_s, n_bins if end_s is None else end_s / self.bin_s
        if first != int(first) or last != int(last) or not 0 <= first < last <= n_bins:
            raise ValueError(
                f"the window is whole bins of {self.bin_s} s within 0 to {n_bins * self.bin_s} s; "
                f"got {start_s} to {end_s}"
            )
        part = self.counts[:, int(first) : int(last)]
        part = part[part.any(axis=1)]
        out = np.zeros((_positive(n_models, "n_models"), part.shape[1]), dtype=np.int64)
        np.add.at(out, np.arange(len(part)) % n_models, part)
        return out

    def trace(
        self,
        *,
        models: Sequence[str],
        prompt_tokens: int,
        output_tokens: int = 0,
        start_s: float = 0.0,
        end_s: float | None = None,
    ) -> Trace:
        """Requests with the k-th of a bin's c calls of a model at (k + 1/2) / c of the bin."""
        counts = self.stripe(len(models), start_s=start_s, end_s=end_s)
        calls = counts.ravel()
        total = int(calls.sum())
        if total == 0:
            raise ValueError(
                f"{self.source}: no function is called from {start_s} s to {end_s or 'the end'}; take another window"
            )
        model, bins = np.divmod(np.repeat(np.arange(counts.size), calls), counts.shape[1])
        nth = np.arange(total) - np.repeat(np.cumsum(calls) - calls, calls)
        per_bin = np.repeat(calls, calls)
        bin_ns = self.bin_s * NS_PER_S
        arrival = bins * bin_ns + (2 * nth + 1) * bin_ns // (2 * per_bin)
        order = np.lexsort((model, arrival))
        return Trace(
            arrival_ns=arrival[order],
            prompt_tokens=np.full(total, prompt_tokens),
            output_tokens=np.full(total, output_tokens),
            model_index=model[order],
            models=tuple(models),
            source=f"{self.source}, calls spread evenly over each {self.bin_s} s",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionInvocations:
    """When each function was called, as the Azure Functions trace of 2021 tells it."""

    functions: tuple[str, ...]
    """`app/function` in order of first appearance in the file."""
    function_index: IntArray
    arrival_ns: IntArray
    """Start of each call (its end less its duration), nanoseconds from the origin of the file; sorted."""
    source: str = ""

    def stripe(self, n_models: int, *, start_s: float = 0.0, end_s: float | None = None) -> tuple[IntArray, ...]:
        """Arrival times of each model in a window, nanoseconds from *start_s*.

        Functions without a call in the window are left out; of the others, the i-th counts as model
        i mod *n_models*.
        """
        arrival, model = self._window(n_models, start_s, end_s)
        return tuple(arrival[model == m] for m in range(n_models))

    def _window(self, n_models: int, start_s: float, end_s: float | None) -> tuple[IntArray, IntArray]:
        _positive(n_models, "n_models")
        if not start_s >= 0 or (end_s is not None and end_s <= start_s):
            raise ValueError(f"a window needs 0 <= start_s < end_s; got {start_s!r} and {end_s!r}")
        start_ns = round(start_s * NS_PER_S)
        inside = self.arrival_ns >= start_ns
        if end_s is not None:
            inside &= self.arrival_ns < round(end_s * NS_PER_S)
        _, rank = np.unique(self.function_index[inside], return_inverse=True)
        return self.arrival_ns[inside] - start_ns, (rank % n_models).astype(np.int64)

    def trace(
        self,
        *,
        models: Sequence[str],
        prompt_tokens: int,
        output_tokens: int = 0,
        start_s: float = 0.0,
        end_s: float | None = None,
    ) -> Trace:
        """The calls of a window as requests, each at its own time."""
        arrival, model = self._window(len(models), start_s, end_s)
        if len(arrival) == 0:
            raise ValueError(
                f"{self.source}: no function is called from {start_s} s to {end_s or 'the end'}; take another window"
            )
        return Trace(
            arrival_ns=arrival,
            prompt_tokens=np.full(len(arrival), prompt_tokens),
            output_tokens=np.full(len(arrival), output_tokens),
            model_index=model,
            models=tuple(models),
            source=self.source,
        )


def read_function_counts(*paths: str | os.PathLike[str]) -> FunctionCounts:
    """Calls a minute from files of the Azure Functions trace of 2019; several files are days one after another.

    Columns HashOwner, HashApp, HashFunction, Trigger and 1, 2, ... up to 1440. Raises as `read_trace` does.
    """
    if not paths:
        raise ValueError("give at least one file")
    days = [_function_counts(path, _read(path)) for path in paths]
    if len(days) == 1:
        return days[0]
    names = tuple(dict.fromkeys(name for day in days for name in day.functions))
    position = {name: i for i, name in enumerate(names)}
    blocks = []
    for day in days:
        block = np.zeros((len(names), day.counts.shape[1]), dtype=np.int64)
        block[[position[name] for name in day.functions]] = day.counts
        blocks.append(block)
    return FunctionCounts(
        functions=names, counts=np.concatenate(blocks, axis=1), source=" + ".join(day.source for day in days)
    )


def read_function_invocations(path: str | os.PathLike[str]) -> FunctionInvocations:
    """Calls from a file of the Azure Functions trace of 2021: app, func, end_timestamp, duration, in seconds.

    The file is in order of ends; the calls are given in order of starts. A call that started before the origin
    of the file (its end less its duration is negative) counts as started at 0. Raises as `read_trace` does.
    """
    return _function_invocations(path, _read(path))


def _function_counts(path: Any, data: bytes) -> FunctionCounts:
    table = _Table.parse(path, data, _HEADERS["azure_functions_2019"])
    minutes = [name for name in table.header if name.isascii() and name.isdigit()]
    if minutes != [str(k) for k in range(1, len(minutes) + 1)]:
        raise ValueError(f"{path}, line 1: the minutes are columns 1, 2, 3, ... in order; got {','.join(minutes)[:80]}")
    counts = np.column_stack([table.integers(name, blank=0) for name in minutes])
    names = ["/".join(key) for key in zip(*(table.texts(c) for c in _HEADERS["azure_functions_2019"][:3]), strict=True)]
    functions = tuple(dict.fromkeys(names))
    position = {name: i for i, name in enumerate(functions)}
    # A function with several triggers has a row for each.
    joined = np.zeros((len(functions), len(minutes)), dtype=np.int64)
    np.add.at(joined, [position[name] for name in names], counts)
    return FunctionCounts(functions=functions, counts=joined, source=Path(path).name)


def _function_invocations(path: Any, data: bytes) -> FunctionInvocations:
    table = _Table.parse(path, data, _HEADERS["azure_functions_2021"])
    names = ["/".join(key) for key in zip(table.texts("app"), table.texts("func"), strict=True)]
    functions = tuple(dict.fromkeys(names))
    position = {name: i for i, name in enumerate(functions)}
    index = np.array([position[name] for name in names], dtype=np.int64)
    start = np.maximum(table.nanoseconds("end_timestamp") - table.nanoseconds("duration"), 0)
    order = np.argsort(start, kind="stable")
    return FunctionInvocations(
        functions=functions, function_index=index[order], arrival_ns=start[order], source=Path(path).name
    )


def _positive(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is a positive integer; got {value!r}")
    return int(value)
