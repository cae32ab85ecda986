"""Recorded sessions: each request is sent when the answer before it has come and a person or a tool has taken their time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.arrivals import ArrivalProcess, arrivals_ns
from workloads.cells import json_objects, read_lines
from workloads.columns import INT64_MAX, IntArray, first_row, int_column
from workloads.follows import Follows
from workloads.trace import Trace

NS_PER_MS = 1_000_000
_NEEDED = ("session_id", "input_length", "output_length", "hash_ids")
_ROWS = 500
"""Rows of a Parquet file of which the ids are read at once."""
_OPTIONAL = ("agent", "request", "timestamp", "delay", "spawned_by_request")


def read_sessions(
    path: str | os.PathLike[str], *, starts: ArrivalProcess, seed: int = 0, block_tokens: int | None = None
) -> Trace:
    """The sessions of a file as a trace whose requests wait for each other; sessions start as *starts* says.

    *path*: Parquet, or JSON lines, a request a row, in the columns of the Mooncake format and those that AIPerf adds: session_id,
    input_length and output_length (tokens), hash_ids (ids of the prompt's blocks), and where known timestamp and delay (ms), agent
    (0: the main one), request (its number within the agent) and spawned_by_request (of a sub-agent: the number of the main agent's
    request that started it). Rows of a session are in order of sending.

    A request is sent when the answer before it of the same agent has ended and `delay` is over (0 where it is not known). The first
    of a sub-agent follows the request that started it, and the main agent's next request waits for the sub-agents that the one
    before it started. Where the next prompt goes on from a prompt and its answer, its ids name the answer too. *block_tokens*:
    tokens of one id; found from the lengths where it is left out. `Trace.session` numbers the sessions by first appearance. Raises
    ValueError naming file, row and column of what is wrong.
    """
    columns = _parquet(path) if _is_parquet(path) else _json_lines(path)
    try:
        return _trace(columns, starts, seed, block_tokens, Path(path).name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _trace(columns: dict[str, Any], starts: ArrivalProcess, seed: int, block_tokens: int | None, source: str) -> Trace:
    prompt = int_column(columns["input_length"], "input_length", minimum=1, rows_from=1)
    output = int_column(columns["output_length"], "output_length", rows_from=1)
    n = len(prompt)
    ids: list[NDArray[np.integer]] = columns["hash_ids"]
    numbers = int_column(columns["session_id"], "session_id", rows_from=1)
    session = np.unique(numbers, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(session[1], kind="stable"), kind="stable")
    session_of = rank[session[2]].astype(np.int64)
    n_sessions = len(session[1])
    agent = _whole(columns.get("agent"), n, "agent", 0)
    stamp_ns = _ms(columns.get("timestamp"), n, "timestamp")
    offsets, rows, delay_ns = _edges(session_of, agent, columns, n)
    follows = Follows(offsets=offsets, rows=rows, delay_ns=delay_ns)
    start_ns = arrivals_ns(starts, seed, n_requests=n_sessions)
    # What waits has a place in the order only: never before those that it waits for.
    nominal = start_ns[session_of] + _not_before(follows, stamp_ns)
    order = np.lexsort((np.arange(n), nominal))
    counts = np.array([len(each) for each in ids])
    tokens = block_tokens if block_tokens is not None else _block_tokens(prompt, counts)
    if (row := first_row((counts > 0) & (counts < prompt // tokens))) is not None:
        raise ValueError(
            f"row {row + 1}, column hash_ids: {counts[row]} ids of {tokens} tokens do not cover the prompt of {prompt[row]}; mend "
            "the row, or leave its ids empty"
        )
    pieces = _with_answers(ids, follows, prompt, output, tokens)
    pieces = [pieces[row] for row in order.tolist()]
    new_offsets = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces])))
    blocks = np.concatenate(pieces)
    blocks.flags.writeable = False
    return Trace(
        arrival_ns=nominal[order],
        prompt_tokens=prompt[order],
        output_tokens=output[order],
        session=session_of[order],
        prefix_blocks=blocks,
        prefix_offsets=new_offsets,
        prefix_block_tokens=tokens,
        follows=follows.take(order),
        source=f"{n_sessions} sessions of {source}, started by {starts!r}, seed {seed}",
    )


def _with_answers(
    pieces: list[NDArray[np.integer]], follows: Follows, prompt: IntArray, output: IntArray, block_tokens: int
) -> list[NDArray[np.integer]]:
    """The ids of each prompt, and behind them those of its answer where the next prompt goes on from both.

    It does where it begins with the full blocks of the prompt before it and is long enough for the answer as well.
    """
    through = prompt + output
    done = list(pieces)
    for row in np.flatnonzero(follows.counts).tolist():
        before = int(follows.rows[follows.offsets[row]])
        shared, full = int(prompt[before]) // block_tokens, int(through[before]) // block_tokens
        goes_on = prompt[row] >= through[before] and len(pieces[row]) >= full
        if goes_on and np.array_equal(pieces[row][:shared], pieces[before][:shared]):
            done[before] = pieces[row][:full]
    return done


def _edges(
    session_of: IntArray, agent: IntArray, columns: dict[str, Any], n: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The requests that each request waits for and how long after, as offsets, rows and delays."""
    delay = _ms(columns.get("delay"), n, "delay").tolist()
    spawner = _whole(columns.get("spawned_by_request"), n, "spawned_by_request", -1).tolist()
    number = _whole(columns.get("request"), n, "request", -1).tolist()
    last: dict[tuple[int, int], int] = {}
    by_number: dict[tuple[int, int], int] = {}
    started: dict[int, list[tuple[int, int]]] = {}
    before: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    mains: list[int] = []
    for row, key in enumerate(zip(session_of.tolist(), agent.tolist(), strict=True)):
        if key[1] == 0:
            mains.append(row)
        if key in last:
            before[row].append((last[key], delay[row]))
        elif key[1]:
            parent = by_number.get((key[0], spawner[row])) if spawner[row] >= 0 else None
            if parent is None:
                raise ValueError(
                    f"row {row + 1}, column spawned_by_request: agent {key[1]} needs a request of its session's main agent, above "
                    f"it in the file; got {spawner[row] if spawner[row] >= 0 else 'none'}"
                )
            before[row].append((parent, delay[row]))
            started.setdefault(parent, []).append(key)
        if key[1] == 0:
            by_number[key[0], number[row]] = row
        last[key] = row
    for row in mains:
        for key in started.get(before[row][0][0], ()) if before[row] else ():
            before[row].append((last[key], 0))
    counts = [len(each) for each in before]
    flat = [edge for each in before for edge in each]
    return (
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.array([row for row, _ in flat], dtype=np.int64),
        np.array([ns for _, ns in flat], dtype=np.int64),
    )


def _not_before(follows: Follows, stamp_ns: IntArray) -> IntArray:
    """Stamps raised where one is before that of a request waited for."""
    stamps = stamp_ns.tolist()
    offsets, rows = follows.offsets.tolist(), follows.rows.tolist()
    order = np.lexsort((np.arange(len(stamps)), stamp_ns)).tolist()
    changed = True
    while changed:
        changed = False
        for row in order:
            for place in range(offsets[row], offsets[row + 1]):
                if stamps[rows[place]] > stamps[row]:
                    stamps[row] = stamps[rows[place]]
                    changed = True
    return np.array(stamps, dtype=np.int64)


def _block_tokens(prompt: IntArray, counts: IntArray) -> int:
    """The tokens of one block, from how many ids prompts of what length have: full blocks, or a partly filled last one as well."""
    named = counts > 0
    if not named.any():
        raise ValueError("no prompt has hash_ids; give a file that says which prompts share blocks")
    for rows in (slice(None), named):
        # A row without ids has a short prompt, or one of which nothing is said.
        if (found := _fits(prompt[rows], counts[rows])) is not None:
            return found
    raise ValueError(
        "the lengths of prompts and of hash_ids leave open how many tokens an id stands for; give block_tokens, and mend rows "
        "whose ids do not cover their prompt"
    )


def _fits(prompt: IntArray, counts: IntArray) -> int | None:
    """The only number of tokens, of those that are powers of two or else of all, that all counts agree with."""
    named = counts > 0
    length, n = prompt[named].astype(float), counts[named].astype(float)
    for low, high in ((length / (n + 1), length / n), (length / n, length / np.maximum(n - 1, 1e-9))):
        # floor(length / b) == n is low < b <= high, ceil(length / b) == n is low <= b < high.
        least, most = int(np.floor(low.max())), int(np.ceil(high.min()))
        fits = [b for b in range(max(1, least), min(most, least + 64) + 1) if _names(prompt, counts, b)]
        fits = [b for b in fits if b & (b - 1) == 0] or fits
        if len(fits) == 1:
            return fits[0]
    return None


def _names(prompt: IntArray, counts: IntArray, tokens: int) -> bool:
    return bool(np.array_equal(prompt // tokens, counts) or np.array_equal(-(-prompt // tokens), counts))


def _whole(values: Any, n: int, name: str, unknown: int) -> IntArray:
    """A column of whole numbers in which *unknown* stands for what is not said."""
    if values is None:
        return np.full(n, unknown, dtype=np.int64)
    numbers = np.asarray(values, dtype=float)
    return int_column(np.where(np.isnan(numbers), unknown, numbers), name, minimum=unknown, rows_from=1)


def _ms(values: Any, n: int, name: str) -> IntArray:
    """Nanoseconds from milliseconds; what is not known is 0."""
    if values is None:
        return np.zeros(n, dtype=np.int64)
    ms = np.asarray(values, dtype=float)
    ms = np.where(np.isnan(ms), 0.0, ms)
    if (row := first_row(~np.isfinite(ms) | (ms < 0) | (ms * NS_PER_MS >= INT64_MAX))) is not None:
        raise ValueError(f"row {row + 1}, column {name}: expected milliseconds from 0; got {values[row]}")
    return np.rint(ms * NS_PER_MS).astype(np.int64)


def _is_parquet(path: Any) -> bool:
    with Path(path).open("rb") as file:
        return file.read(4) == b"PAR1"


def _parquet(path: Any) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        _check_names(path, names)
        table = file.read([name for name in (*_NEEDED, *_OPTIONAL) if name in names and name != "hash_ids"])
        if not table.num_rows:
            raise ValueError(f"{path}: no requests")
        columns: dict[str, Any] = {}
        for name in table.column_names:
            kind = table.schema.field(name).type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
                raise ValueError(f"{path}, column {name}: expected numbers; got {kind}")
            columns[name] = _in_numpy(table.column(name).combine_chunks())
        columns["hash_ids"] = _ids(path, file)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a Parquet file that can be read; {error}") from None
    return columns


def _ids(path: Any, file: Any) -> list[NDArray[np.integer]]:
    """The ids of each row of a Parquet file, of which there may be thousands. It is read piece by piece and on one thread, which
    takes a third of the time and of the memory."""
    import pyarrow as pa

    kind = file.schema_arrow.field("hash_ids").type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise ValueError(f"{path}, column hash_ids: expected lists of whole numbers; got {kind}")
    found: list[NDArray[np.integer]] = []
    for batch in file.iter_batches(_ROWS, columns=["hash_ids"], use_threads=False):
        lists = batch.column(0)
        if lists.null_count:
            raise ValueError(f"{path}, column hash_ids: expected a list in every row; some have none")
        offsets = _in_numpy(lists.offsets)
        flat = lists.values[offsets[0] : offsets[-1]]
        offsets = offsets - offsets[0]
        if flat.null_count:
            place = int(flat.is_null().to_numpy(zero_copy_only=False).argmax())
            raise ValueError(_of_an_id(path, len(found), offsets, place, "nothing"))
        ids = _in_numpy(flat) if len(flat) else np.empty(0, np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() > INT64_MAX):
            place = int(np.argmax((ids < 0) | (ids > INT64_MAX)))
            raise ValueError(_of_an_id(path, len(found), offsets, place, ids[place]))
        short = len(ids) == 0 or ids.max() <= np.iinfo(np.int32).max
        # Copies, so that the memory that the file was read to is used again for the next rows.
        found += np.split(ids.astype(np.int32 if short else np.int64), offsets[1:-1])
    return found


_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""numpy's names of Arrow's floating-point types; those of whole numbers are the same."""


def _in_numpy(column: Any) -> NDArray[Any]:
    """Numbers of an Arrow array, what is missing as NaN. Its own `to_numpy` would import pandas, 0.3 s that nothing else needs, and
    so would `to_pandas_dtype` before pyarrow 15."""
    if column.null_count:
        return np.array(column.to_pylist(), dtype=float)
    name = str(column.type)
    kind = np.dtype(_FLOATS.get(name, name))
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)


def _of_an_id(path: Any, before: int, offsets: IntArray, place: int, got: object) -> str:
    """An error that says what is wrong with the id at *place* of the rows behind the first *before*."""
    row = before + int(np.searchsorted(offsets, place, side="right"))
    return f"{path}, row {row}, column hash_ids: expected whole numbers from 0 that fit in 64 bits; got {got}"


def _json_lines(path: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line, record in json_objects(path, read_lines(path)):
        _check_names(f"{path}, line {line}", record)
        ids = record["hash_ids"]
        if not isinstance(ids, list) or not all(type(block) is int and 0 <= block <= INT64_MAX for block in ids):
            raise ValueError(
                f"{path}, line {line}, column hash_ids: expected a list of whole numbers from 0; got {str(ids)[:60]}"
            )
        rows.append(record)
    if not rows:
        raise ValueError(f"{path}: no requests")
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in _NEEDED if name != "hash_ids"}
    for name in _OPTIONAL:
        if any(row.get(name) is not None for row in rows):
            columns[name] = _numbers([row.get(name) for row in rows], name)
    columns["hash_ids"] = [np.array(row["hash_ids"], dtype=np.int64) for row in rows]
    return columns


def _numbers(values: list[Any], name: str) -> NDArray[np.float64]:
    for row, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"row {row + 1}, column {name}: expected a number; got {value!r}")
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _check_names(where: Any, names: Any) -> None:
    if missing := [name for name in _NEEDED if name not in names]:
        raise ValueError(f"{where}: sessions need the columns {', '.join(_NEEDED)}; {missing[0]} is missing")
