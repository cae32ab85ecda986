"""Columns of a run as Parquet files, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.results.folder import reading
from workloads.write import open_whole

if TYPE_CHECKING:
    import pyarrow as pa

_ABSENT_IS_NULL = (
    *("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "replica"),
    *("prefill_replica", "prefilled_ns", "room_ns", "sent_ns", "landed_ns", "joined_ns"),
    "adapter",
    *("encoder", "encode_begin_ns", "encoded_ns", "encode_landed_ns"),
)
_MAY_LACK = (
    *("loaded_tokens", "loads_under_way", "stores_under_way"),  # on replicas without tiers
    "adapters",  # on replicas without adapters
)
"""Columns of iterations that are null somewhere."""
_CHANGING = ("kv_blocks_used",)
"""Columns of 32 bits that change from one iteration to the next."""
_WIDE = ("start_ns", "duration_ns", "kv_tokens")  # iteration columns that need more than 32 bits
_TEXTS = {"what": metrics.TRANSFER_NAMES, "source": metrics.PLACES, "destination": metrics.PLACES}
"""Columns of transfers that are text."""
TRANSFERS = "kv_transfers.parquet"
_ALWAYS = {"requests.parquet": "status", "iterations.parquet": "duration_ns", TRANSFERS: "what"}
"""A column that each file of a run has."""
_STATUS_CODES = {name: code for code, name in enumerate(metrics.STATUS_NAMES)}


def request_table(columns: metrics.Columns) -> pa.Table:
    """Requests as an Arrow table: times in ns, null where absent; status and reason as text."""
    given = columns.requests
    out: dict[str, pa.Array] = {}
    for name, values in given.items():
        if name == "status":
            out[name] = _text_column(values, metrics.STATUS_NAMES)
        elif name == "reason":
            out[name] = _text_column(values, columns.reasons)
        else:
            column = values.astype(np.int64, copy=False)
            out[name] = _number_column(column, (values < 0) if name in _ABSENT_IS_NULL else None)
    return _table(out, (*_ABSENT_IS_NULL, "reason"))


def iteration_table(iterations: Mapping[str, NDArray[Any]]) -> pa.Table:
    """Iterations as an Arrow table: times and KV tokens 64 bits wide, counts 32, null where absent."""
    out: dict[str, pa.Array] = {}
    for name, values in iterations.items():
        width = np.int64 if name in _WIDE or name.endswith("_ns") else np.int32
        column = values if values.dtype.kind == "f" else values.astype(width, copy=False)
        out[name] = _number_column(column, (values < 0) if name in _MAY_LACK else None)
    return _table(out, _MAY_LACK)


def transfer_table(transfers: Mapping[str, NDArray[Any]]) -> pa.Table:
    """Transfers of KV as an Arrow table: what they were, from where and to where as text."""
    return _table(
        {
            name: _text_column(values, _TEXTS[name]) if name in _TEXTS else _number_column(values.astype(np.int64))
            for name, values in transfers.items()
        },
        (),
    )


def _table(columns: Mapping[str, pa.Array], may_be_null: Sequence[str]) -> pa.Table:
    """*columns* by name; those that are never null say so, since levels of nulls take a fifth of the time to write."""
    import pyarrow as pa

    fields = [pa.field(name, column.type, name in may_be_null) for name, column in columns.items()]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def write_parquet(tables: Iterable[pa.Table], path: Path) -> None:
    """Write *tables* of one schema, at least one, under each other; equal tables make equal files.

    Integers of 64 bits are stored as packed differences (DELTA_BINARY_PACKED), those of 32, most of which are the same in iteration
    after iteration, as they are under Snappy: for 3.9 million iterations smaller (47 MB for 52) and faster (0.23 s for 0.36) than
    packed differences alone, and than dictionaries with any compressor. Of times alone the least and largest are stored as well.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = iter(tables)
    first = next(tables)
    packed = [each.name for each in first.schema if pa.types.is_int64(each.type) or each.name in _CHANGING]
    texts = [field.name for field in first.schema if pa.types.is_string(field.type)]
    with (
        open_whole(path, binary=True) as file,
        pq.ParquetWriter(
            file,
            first.schema,
            compression={name: "none" if name in packed else "snappy" for name in first.schema.names},  # type: ignore[arg-type]
            write_statistics=[name for name in first.schema.names if name.endswith("_ns")],  # type: ignore[arg-type]
            use_dictionary=texts,  # type: ignore[arg-type]  # the stubs know only bool
            column_encoding=dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
        ) as writer,
    ):
        for table in itertools.chain([first], tables):
            writer.write_table(table)


@dataclass(frozen=True)
class StoredColumns:
    """Columns read back from a results folder; gaps between tokens are not among them, and iterations and transfers are read when
    asked for."""

    requests: Mapping[str, NDArray[Any]]
    reasons: tuple[str, ...]
    meta: Mapping[str, Any]
    folder: Path
    files: Sequence[str]

    def iterations(self) -> Mapping[str, NDArray[Any]]:
        parts = list(self.iteration_blocks())
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def iteration_blocks(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        import pyarrow.parquet as pq

        path = self.folder / "iterations.parquet"
        with reading(path), pq.ParquetFile(path) as file:
            for row_group in range(file.num_row_groups):
                part = file.read_row_group(row_group)
                yield {name: part.column(name).fill_null(-1).to_numpy() for name in part.column_names}

    def transfers(self) -> Mapping[str, NDArray[Any]] | None:
        import pyarrow.parquet as pq

        if TRANSFERS not in self.files:
            return None
        path = self.folder / TRANSFERS
        with reading(path):
            table = pq.read_table(path)
            return {
                name: np.array([_TEXTS[name].index(text) for text in table.column(name).to_pylist()], np.int8)
                if name in _TEXTS
                else table.column(name).to_numpy()
                for name in table.column_names
            }

    def itl_blocks(self) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return (self.itl(),)

    def itl(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        raise ValueError("gaps between tokens are not stored in a results folder; simulate its scenario again")


def stored_columns(
    folder: Path, files: Sequence[str], manifest: Mapping[str, Any], summary: Mapping[str, Any]
) -> StoredColumns:
    """The columns that are stored in the *files* of the results *folder*; OutputError where one is missing or damaged."""
    for name in _ALWAYS:
        if name in files:
            _check(folder / name)
    requests, reasons = _read_requests(folder / "requests.parquet")
    meta = {"kv_blocks_total": manifest.get("kv_blocks_total", []), "wall_s": summary.get("wall_s")}
    return StoredColumns(requests=requests, reasons=reasons, meta=meta, folder=folder, files=files)


def _read_requests(path: Path) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """The columns of requests, and the reasons that their column of reasons counts in."""
    import pyarrow.parquet as pq

    requests: dict[str, NDArray[Any]] = {}
    reasons: tuple[str, ...] = ()
    with reading(path):
        table = pq.read_table(path)
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
    return requests, reasons


def _check(path: Path) -> None:
    """OutputError where *path* is not a file of a run: found at once, and not when its rows are asked for."""
    import pyarrow.parquet as pq

    with reading(path):
        if (column := _ALWAYS[path.name]) not in pq.read_schema(path).names:
            raise ValueError(f"it has no column {column}")


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
