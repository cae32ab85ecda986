"""Rows of files whose columns are not known beforehand: CSV, JSON lines, JSON documents and Parquet, OTLP and Loki among them."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workloads.cells import Table, csv_pieces, header_cells, json_objects, read_beginning, read_bytes, read_lines
from workloads.sources import is_parquet, opened

_BLANK = frozenset({"", "-", "null", "none", "nan", "n/a", "na", "\\n", "<na>", "nat", "undefined"})
_LISTS = (
    *(
        "data",
        "items",
        "results",
        "result",
        "records",
        "rows",
        "logs",
        "requests",
        "observations",
        "generations",
        "hits",
    ),
    *("events", "spans", "runs", "traces", "entries", "value", "instances", "samples"),
)
"""Keys of documents below which the rows are."""
_DEEPEST = 8
_SAMPLE = 200
_FIRST_LINES = 2
"""Enough to tell JSON lines from a document."""
_PIECE = 20_000
"""Rows that are read at a time where most are left out."""
_ALIKE = 4096
"""Different values of a column that are kept once each, however many rows have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a file, or those that it begins with."""

    path: Path
    names: tuple[str, ...]
    """Its columns, dotted paths into what is nested."""
    numbers: list[int]
    """The line of each row, or its number where rows are not lines."""
    is_all: bool
    source: Table | list[dict[str, Any]] | dict[str, list[Any]]
    """Cells, records, or the columns that were asked for when the rows were read."""
    where: str = "line"

    def __len__(self) -> int:
        return len(self.numbers)

    def column(self, name: str) -> list[Any]:
        """The values of a column, None where a row has none."""
        if isinstance(self.source, Table):
            return [None if text.lower() in _BLANK else text for text in self.source.texts(name)]
        if isinstance(self.source, dict):
            return self.source[name]
        return [value_at(record, name) for record in self.source]

    def has(self, name: str) -> bool:
        return name in self.names or (
            not isinstance(self.source, Table) and any(each is not None for each in self.column(name))
        )

    def refuse(self, name: str, row: int, expected: str, got: Any) -> ValueError:
        return ValueError(
            f"{self.path}, {self.where} {self.numbers[row]}, column {name}: expected {expected}; got {str(got)[:60]!r}"
        )


Wanted = Callable[[Rows], Collection[str]]


def rows_of(path: Path, n_lines: int | None, wanted: Wanted | None = None) -> Rows:
    """The rows of a file, of lines the first *n_lines*, read no further; ValueError where it has none.

    Of all JSON lines and of Parquet, columns alone are kept which *wanted* names when it is shown a sample of the rows.
    """
    if is_parquet(path):
        return _parquet(path, n_lines) if wanted is None else _columns_of_parquet(path, wanted)
    if n_lines is None and wanted is not None and _is_lines(path):
        return _columns_of_lines(path, wanted)
    data, is_all = read_beginning(path, n_lines)
    begin = data.lstrip()[:1]
    if begin not in (b"{", b"["):
        return _csv(path, data, is_all)
    if begin == b"{" and _first_line(data) is not None:
        found = list(json_objects(path, data.split(b"\n")))
        if len(found) > 1 or not is_all:
            placed = [(line, record) for line, each in found for record in _of_line(each)]
            return _json(path, [record for _, record in placed], [line for line, _ in placed], is_all, "line")
        records = _of_document(found[0][1])
    else:
        try:
            document = json.loads(data if is_all else read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: neither JSON lines nor a JSON document: {error}") from None
        records = _of_document(document)
    return _json(path, records, list(range(1, len(records) + 1)), True, "row")


def pieces_of(path: Path) -> Iterator[Rows]:
    """The rows of a file in its order, some at a time, of which none are held here; of a JSON document all at once."""
    if is_parquet(path):
        yield from _pieces_of_parquet(path)
    elif _is_lines(path):
        placed = ((line, record) for line, each in json_objects(path, read_lines(path)) for record in _of_line(each))
        while piece := list(itertools.islice(placed, _PIECE)):
            yield _json(path, [record for _, record in piece], [line for line, _ in piece], False, "line")
    elif read_beginning(path, 1)[0].lstrip()[:1] in (b"{", b"["):
        yield rows_of(path, None)
    else:
        for data, before in csv_pieces(path, _PIECE):
            yield _csv(path, data, False, before)


def _is_lines(path: Path) -> bool:
    """Whether a file is JSON lines, more than one."""
    data, is_all = read_beginning(path, _FIRST_LINES)
    return data.lstrip()[:1] == b"{" and _first_line(data) is not None and (not is_all or data.strip().count(b"\n") > 0)


def _columns_of_lines(path: Path, wanted: Wanted) -> Rows:
    """All rows of JSON lines. The file is read twice: for the names of its columns, and for what is in those that are wanted."""
    # What is no object is refused where all lines are read, which knows their numbers.
    objects = filter(None, map(_first_line, _sampled(read_lines(path))))
    sample = list(itertools.chain.from_iterable(map(_of_line, objects)))
    found = _json(path, sample, list(range(1, len(sample) + 1)), False, "line")
    kept: dict[str, list[Any]] = {name: [] for name in wanted(found)}
    columns = [(name, values, {}) for name, values in kept.items()]
    numbers = []
    for line, each in json_objects(path, read_lines(path)):
        for record in _of_line(each):
            numbers.append(line)
            for name, values, once in columns:
                values.append(_once(value_at(record, name), once))
    return Rows(path=path, names=found.names, numbers=numbers, is_all=True, source=kept)


def _once(value: Any, once: dict[str, str]) -> Any:
    """*value*, or the text equal to it that is kept already."""
    if not isinstance(value, str):
        return value
    return once.setdefault(value, value) if len(once) < _ALIKE else once.get(value, value)


def _sampled(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The first lines, and of all of them as many again, evenly spread."""
    spread: list[bytes] = []
    step = 1
    for at, line in enumerate(lines):
        if at < _SAMPLE:
            yield line
        if at % step == 0:
            spread.append(line)
            if len(spread) > 2 * _SAMPLE:
                spread, step = spread[::2], 2 * step
    yield from spread


def value_at(record: Any, path: str) -> Any:
    """The value at a dotted *path* of nested objects; objects written as texts are looked into, and keys may have dots."""
    if isinstance(record, str):
        record = _object_in(record)
    if not isinstance(record, dict):
        return None
    if path in record:
        value = record[path]
        return None if isinstance(value, str) and value.strip().lower() in _BLANK else value
    at = path.rfind(".")
    while at > 0:
        if path[:at] in record and (value := value_at(record[path[:at]], path[at + 1 :])) is not None:
            return value
        at = path.rfind(".", 0, at)
    return None


def _first_line(data: bytes) -> dict[str, Any] | None:
    """The object that the first line is; None where the lines are none."""
    try:
        record = json.loads(data.lstrip().split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _object_in(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json(path: Path, records: list[dict[str, Any]], numbers: list[int], is_all: bool, where: str) -> Rows:
    if not records:
        raise ValueError(f"{path}: no objects that could be requests; a trace is a row a request")
    step = max(1, len(records) // _SAMPLE)
    sample = itertools.chain(records[:_SAMPLE], records[::step])
    names = dict.fromkeys(name for record in sample for name in _leaves(record))
    return Rows(path=path, names=tuple(names), numbers=numbers, is_all=is_all, source=records, where=where)


def _leaves(record: dict[str, Any], depth: int = 0) -> Iterator[str]:
    for key, value in record.items():
        inner = _object_in(value) if isinstance(value, str) else value
        if isinstance(inner, dict) and inner and depth < _DEEPEST:
            yield from (f"{key}.{name}" for name in _leaves(inner, depth + 1))
        else:
            yield str(key)


def _of_line(record: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if "resourceSpans" in record:
        return _spans(record)
    inner = record.get("records")
    return inner if isinstance(inner, list) and all(isinstance(each, dict) for each in inner) else (record,)


def _of_document(document: Any) -> list[dict[str, Any]]:
    """The records of a whole JSON document: those of its list, its spans, its streams or its columns, or itself."""
    if isinstance(document, list):
        found = [each for each in document if isinstance(each, dict)]
        return [record for each in found for record in _of_line(each)] if len(found) == len(document) else []
    if not isinstance(document, dict):
        return []
    if "resourceSpans" in document:
        return list(_spans(document))
    lists = list(_lists_in(document))
    if lists:
        longest = max(lists, key=len)
        if all({"stream", "values"} <= each.keys() for each in longest):
            return [{"time": at, "line": line, **each["stream"]} for each in longest for at, line, *_ in each["values"]]
        return list(itertools.chain.from_iterable(map(_unfolded, longest)))
    return _of_columns(document) or [document]


def _unfolded(record: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The records of a list in *record*, such as the spans of a trace, with what is said of all of them; or *record* itself."""
    for key in ("results", "spans"):
        inner = record.get(key)
        if isinstance(inner, list) and inner and all(isinstance(each, dict) for each in inner):
            outer = {name: value for name, value in record.items() if name != key}
            return ({**outer, **each} for each in inner)
    return (record,)


def _lists_in(document: dict[str, Any], depth: int = 0) -> Iterator[list[dict[str, Any]]]:
    for key, value in document.items():
        if isinstance(value, dict) and depth < 3:
            yield from _lists_in(value, depth + 1)
        elif key in _LISTS and isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            yield value


def _of_columns(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a document that has a list a column, as `vllm bench serve --save-detailed` writes it."""
    columns = {key: value for key, value in document.items() if isinstance(value, list) and value}
    columns = {key: value for key, value in columns.items() if not isinstance(value[0], dict)}
    sizes = [len(value) for value in columns.values()]
    if len(sizes) < 2:
        return []
    most = max(set(sizes), key=sizes.count)
    chosen = {key: value for key, value in columns.items() if len(value) == most}
    return [dict(zip(chosen, row, strict=True)) for row in zip(*chosen.values(), strict=True)]


def _spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of an OTLP document as flat records of their attributes, behind those of the server that emitted them."""
    for resource in document["resourceSpans"]:
        server = (resource.get("resource") or {}).get("attributes", ())
        own = {each["key"]: _attribute(each.get("value")) for each in server}
        for scope in resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or ():
            for span in scope.get("spans", ()):
                record = own | {each["key"]: _attribute(each.get("value")) for each in span.get("attributes", ())}
                code = (span.get("status") or {}).get("code", 0)
                record["status"] = "error" if code in (2, "STATUS_CODE_ERROR") else "ok"
                record |= {key: span[key] for key in ("name", "startTimeUnixNano", "endTimeUnixNano") if key in span}
                yield record


def _attribute(value: Any) -> Any:
    for key, each in (value or {}).items():
        if key == "intValue":
            return int(each)
        if key == "arrayValue":
            return [_attribute(inner) for inner in each.get("values", ())]
        return each
    return None


def _csv(path: Path, data: bytes, is_all: bool, before: int = 0) -> Rows:
    first = data.lstrip().split(b"\n", 1)[0]
    mark = max((b",", b";", b"\t", b"|"), key=first.count)
    if mark != b",":
        data = _with_commas(data, mark.decode())
    header = header_cells(data)
    if len(header) < 2 or any(len(cell.split()) > 6 or len(cell) > 80 for cell in header):
        raise ValueError(
            f"{path}: no columns are found in its first line, {first[:60].decode(errors='replace')!r}; a trace is CSV with a "
            "header, JSON lines, a JSON document or Parquet, with a row a request"
        )
    table = Table.parse(path, data, (), before)
    return Rows(path=path, names=header, numbers=table.lines.tolist(), is_all=is_all, source=table)


def _with_commas(data: bytes, mark: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(
        csv.reader(io.StringIO(data.decode("utf-8"), newline=""), delimiter=mark)
    )
    return text.getvalue().encode()


def _columns_of_parquet(path: Path, wanted: Wanted) -> Rows:
    """All rows of a Parquet file, of the columns that hold what is wanted."""
    sample = _parquet(path, 2 * _SAMPLE)
    if sample.is_all:
        return sample
    names = wanted(sample)
    return replace(
        _parquet(path, None, lambda column: any(f"{name}.".startswith(f"{column}.") for name in names)),
        names=sample.names,
    )


def _parquet(path: Path, n_rows: int | None, takes: Callable[[str], bool] = lambda _column: True) -> Rows:
    with _parquet_file(path) as (pyarrow, file):
        total = file.metadata.num_rows
        taken = [name for name in file.schema_arrow.names if takes(name)]
        batches = file.iter_batches(batch_size=min(n_rows or 65536, 65536), columns=taken)
        kept: list[Any] = []
        while (
            sum(map(len, kept)) < (total if n_rows is None else n_rows) and (batch := next(batches, None)) is not None
        ):
            kept.append(batch)
        table = pyarrow.Table.from_batches(
            kept, schema=pyarrow.schema([file.schema_arrow.field(name) for name in taken])
        )
    return _of_table(path, pyarrow, table, before=0, is_all=len(table) == total)


def _pieces_of_parquet(path: Path) -> Iterator[Rows]:
    before = 0
    with _parquet_file(path) as (pyarrow, file):
        for batch in file.iter_batches(batch_size=_PIECE):
            yield _of_table(path, pyarrow, batch, before=before, is_all=False)
            before += len(batch)


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[tuple[Any, Any]]:
    """pyarrow, and a Parquet file that it reads; ValueError where the file is damaged."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow, or write CSV") from None
    try:
        with opened(path) as (raw, packed), parquet.ParquetFile(io.BytesIO(raw.read()) if packed else path) as file:
            yield pyarrow, file
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: the Parquet file cannot be read ({error}); fetch it again") from None


def _of_table(path: Path, pyarrow: Any, table: Any, *, before: int, is_all: bool) -> Rows:
    columns = {
        name: _plain(pyarrow, table.column(name)) for name in table.schema.names if not name.startswith("__index_")
    }
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    numbers = list(range(before + 1, before + len(records) + 1))
    return _json(path, records, numbers, is_all, "row")


def _plain(pyarrow: Any, column: Any) -> list[Any]:
    """A column of Parquet as plain values; times are nanoseconds since 1970."""
    if pyarrow.types.is_timestamp(column.type):
        column = column.cast(pyarrow.timestamp("ns", column.type.tz), safe=False).cast(pyarrow.int64())
    return column.to_pylist()
