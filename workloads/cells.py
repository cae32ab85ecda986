"""Cells of trace files as numbers: parsed column by column from bytes, refused by line and column."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from workloads.columns import NS_PER_S, IntArray
from workloads.sources import opened

HEADERS: dict[str, tuple[str, ...]] = {
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


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, unpacked where gzip or zstd packed it; ValueError for one that is damaged, or no text."""
    return read_beginning(path, None)[0]


def read_beginning(path: str | os.PathLike[str], n_lines: int | None) -> tuple[bytes, bool]:
    """The first *n_lines* lines of a file that are not empty (None: all of it), and whether that is all. Little more than them is
    read. Unpacked, and refused, as by `read_bytes`; a cell in quotes is never cut."""
    with _whole(path) as file:
        data = file.read() if n_lines is None else _lines_of(file, n_lines)
        is_all = n_lines is None or not file.read(1)
    data = _text(path, data, 0)
    if not data.strip():
        raise ValueError(f"{path}: the file is empty; a trace needs at least one request")
    return data, is_all


def read_pieces(path: str | os.PathLike[str], n_lines: int) -> Iterator[bytes]:
    """A file in pieces of *n_lines* lines that are not empty, each unpacked and refused as by `read_beginning`."""
    with _whole(path) as file:
        at = 0
        while data := _lines_of(file, n_lines):
            yield _text(path, data, at)
            at += len(data)


def _text(path: Any, data: bytes, at: int) -> bytes:
    """*data*, which begins at a byte of a file, with line ends of one kind; ValueError where it is no text."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {at + error.start} is not UTF-8 text; convert the file to UTF-8") from None
    data = data if at else data.removeprefix(_MARK)
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


_MARK = b"\xef\xbb\xbf"
"""The mark that UTF-8 files may begin with."""


@contextlib.contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked; ValueError where that shows that it is damaged."""
    with opened(path) as (file, packed):
        try:
            yield file
        except (OSError, EOFError, zlib.error) as error:
            if not packed:
                raise
            raise ValueError(f"{path}: the compressed file is damaged ({error}); fetch it again") from None


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a file one by one, unpacked as by `read_bytes`; a lone carriage return ends a line as well."""
    with _whole(path) as file:
        for at, piece in enumerate(file):
            piece = piece.removeprefix(_MARK) if at == 0 else piece
            if b"\r" in piece[:-2]:
                yield from piece.splitlines()
            else:
                yield piece


def _lines_of(file: IO[bytes], n_lines: int) -> bytes:
    kept = bytearray()
    found, in_quotes = 0, False
    while piece := file.readline():
        # A lone carriage return ends a line as well; a file of these alone is one piece.
        kept += piece
        in_quotes ^= piece.count(b'"') % 2 == 1
        found += sum(1 for line in piece.splitlines() if line) if b"\r" in piece[:-2] else piece not in (b"\n", b"\r\n")
        if found >= n_lines and not in_quotes:
            break
    return bytes(kept)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Cells of a CSV file as byte ranges of one buffer, so that columns are parsed without a string a cell."""

    path: Any
    buffer: NDArray[np.uint8]
    starts: IntArray
    ends: IntArray
    lines: IntArray
    header: tuple[str, ...]

    @classmethod
    def parse(cls, path: Any, data: bytes, needed: Sequence[str], before: int = 0) -> Table:
        """The cells of *data*, which has *before* lines of the file between its first line and the others."""
        header = header_cells(data)
        if missing := [name for name in needed if name not in header]:
            raise ValueError(
                f"{path}, line 1: column {missing[0]} is missing; "
                f"expected {','.join(needed)}, got {','.join(header)[:200]}"
            )
        if len(set(header)) != len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: column {twice} is there twice; leave one")
        split = _split_quoted if b'"' in data else _split_plain
        buffer, starts, ends, lines = split(path, data, len(header), before)
        if len(starts) == 0:
            raise ValueError(f"{path}: a header and no rows; a trace needs at least one request")
        return cls(path=path, buffer=buffer, starts=starts, ends=ends, lines=lines, header=header)

    @classmethod
    def pieces(cls, path: Any, n_lines: int, needed: Sequence[str]) -> Iterator[Table]:
        """The cells of a file in tables of *n_lines* lines."""
        for data, before in csv_pieces(path, n_lines):
            yield cls.parse(path, data, needed, before)

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self, rows: Sequence[int]) -> Table:
        """Some rows of this table."""
        index = np.array(rows, dtype=np.int64)
        return replace(self, starts=self.starts[index], ends=self.ends[index], lines=self.lines[index])

    @classmethod
    def joined(cls, tables: Sequence[Table]) -> Table:
        """The rows of several tables of one file, at least one."""
        shifts = np.cumsum([0, *(len(table.buffer) for table in tables[:-1])])
        placed = list(zip(tables, shifts.tolist(), strict=True))
        return replace(
            tables[0],
            buffer=np.concatenate([table.buffer for table in tables]),
            starts=np.concatenate([table.starts + shift for table, shift in placed]),
            ends=np.concatenate([table.ends + shift for table, shift in placed]),
            lines=np.concatenate([table.lines for table in tables]),
        )

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

    def _parsed(self, name: str, parse: _Parse, blank: int | None) -> tuple[IntArray, list[int]]:
        """A column as *parse* reads it, with *blank* in empty cells, and the rows that it could not read."""
        start, end = self.cells(name)
        value, good = parse(self.buffer, start, end)
        if blank is not None:
            empty = start == end
            value[empty] = blank
            good |= empty
        return value, np.flatnonzero(~good).tolist()

    def integers(self, name: str, *, blank: int | None = None) -> IntArray:
        """A column of whole numbers from 0; a whole number written as a decimal (12.0) counts as one."""
        value, unread = self._parsed(name, _digits, blank)
        for row in unread:
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
        value, unread = self._parsed(name, _decimals, blank)
        for row in unread:
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


def json_objects(path: Any, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of JSON *lines*, each with the number of its line; ValueError names the first line that is none."""
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {line}: not UTF-8 text; convert the file to UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {line}: expected one JSON object; {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {line}: expected one JSON object; got {text[:60].decode(errors='replace')}")
        yield line, record


def csv_pieces(path: Any, n_lines: int) -> Iterator[tuple[bytes, int]]:
    """A CSV file in pieces that all begin with its header, and the lines of the file that are between that and the rest of each."""
    header, lines = b"", 0
    for piece in read_pieces(path, n_lines):
        if not header:
            header = piece.lstrip().split(b"\n", 1)[0] + b"\n"
            yield piece, 0
        elif piece.strip():
            yield header + piece, lines - 1
        lines += piece.count(b"\n")


def header_cells(data: bytes) -> tuple[str, ...]:
    """The names in the first line; of a file that is no CSV, whatever stands there."""
    # The csv module refuses cells above 128 KiB, which a file that is no CSV at all may begin with.
    first = data.lstrip().split(b"\n", 1)[0][:100_000].decode("utf-8", "replace").strip()
    return tuple(cell.strip() for cell in next(csv.reader([first], skipinitialspace=True), []))


_Parse = Callable[[NDArray[np.uint8], IntArray, IntArray], tuple[IntArray, NDArray[np.bool_]]]
_Cells = tuple[NDArray[np.uint8], IntArray, IntArray, IntArray]


def _split_plain(path: Any, data: bytes, n_columns: int, before: int) -> _Cells:
    if not data.endswith(b"\n"):
        data += b"\n"
    buffer = np.frombuffer(data, dtype=np.uint8)
    stops = np.flatnonzero(buffer == ord("\n"))
    begins = np.concatenate(([0], stops[:-1] + 1))
    lines = np.arange(1, len(stops) + 1) + before
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


def _split_quoted(path: Any, data: bytes, n_columns: int, before: int) -> _Cells:
    reader = csv.reader(io.StringIO(data.decode("utf-8"), newline=""), skipinitialspace=True)
    rows, lines = [], []
    try:
        for row in reader:
            if row:
                rows.append([cell.strip().encode() for cell in row])
                lines.append(reader.line_num + before)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num + before}: not a row of a CSV file; {error}") from None
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
