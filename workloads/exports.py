"""Traces as tools export them: columns found by what tools call them, or named; what is left out and assumed is said."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from workloads.adapters import adapter_numbers
from workloads.chains import chained
from workloads.columns import INT64_MAX, IntArray
from workloads.media import CELLS, Medium, columns_of, parse_cell
from workloads.prompts import BLOCK_TOKENS, Prompts
from workloads.records import Rows, rows_of
from workloads.streams import Stream, stream
from workloads.synonyms import AT_LOG, FIELDS, STATUSES, SUMS, SYNONYMS, matching, unit_of
from workloads.texts import Tokens, tokens_of
from workloads.times import UNITS_NS, is_format, moments_ns, number_of, unit_word
from workloads.trace import Trace
from workloads.windows import Cut, Window, rows_within

MissingOutput = Literal["drop", "max_tokens", "draw"]
MISSING_OUTPUT: tuple[MissingOutput, ...] = ("drop", "max_tokens", "draw")
_HASH_IDS_TOKENS = 512
"""Tokens that one of Mooncake's `hash_ids` stands for."""
_ABOUT_OTHERS = frozenset({"invoke_agent", "create_agent", "execute_tool", "invoke_workflow"})
"""Spans of OpenTelemetry's GenAI conventions whose tokens, if any, are those of spans below them."""
_FAILED = frozenset(
    {
        "error",
        "errored",
        "failed",
        "failure",
        "fail",
        "exception",
        "timeout",
        "timed_out",
        "rejected",
        "throttled",
        "critical",
    }
)
_MEDIA: Mapping[str, Medium] = {cells.column: medium for medium, cells in CELLS.items()}

_RESPONSE_TIME_MS = ("response_time", "total_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules by which an export is read."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """The column that something is in, in place of what names say: one of `FIELDS` to a dotted path. Paths with + between are added
    up; `:ms` behind the path of a time says its unit, `:%d.%m.%Y %H:%M:%S` how its dates are written."""
    missing_output: MissingOutput | None = None
    """The fate of requests without an output length: left out, given their max_tokens, or drawn from the others' lengths.
    None: left out, and refused where no request has one."""
    keep_failed: bool = False
    timed: bool = True
    """Whether arrivals are needed; otherwise all are at 0."""
    tokenizer: str | os.PathLike[str] | None = None
    """A tokenizer.json, or its folder, that counts the tokens of texts."""
    seed: int = 0
    scale: float | None = None
    """Tokens that are counted of texts for one that was logged; found in the first file where it is None."""
    window: Window = field(default_factory=Window)
    """The arrivals that are taken; others are left out."""
    origin_ns: int | None = None
    """The time of the first row, from which a window may count; found in the first file where it is None."""


def read_export(name: str | os.PathLike[str], files: Sequence[Path], *, limit: int | None, rules: Rules) -> Trace:
    """The requests of *files*, of which the first *limit* are taken and no more read than that needs; `read_trace` says more."""
    if rules.missing_output not in (None, *MISSING_OUTPUT):
        raise ValueError(f"missing_output is one of {', '.join(MISSING_OUTPUT)}; got {rules.missing_output!r}")
    if unknown := sorted(set(rules.columns) - set(FIELDS)):
        near = difflib.get_close_matches(unknown[0], FIELDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
        raise ValueError(f"{unknown[0]!r} is no column of a trace; {meant}")
    if rules.window and not rules.timed:
        raise ValueError("since and until are about arrivals, which are not read here; leave them out")
    tokens = tokens_of(rules.tokenizer)
    parts: list[_Part] = []
    for file in files:
        wanted = None if limit is None else limit - sum(len(part.prompt) for part in parts)
        if wanted is not None and wanted <= 0:
            break
        parts.append((_part_within if rules.window else _part)(file, wanted, rules, tokens))
        rules = replace(rules, scale=parts[-1].scale, origin_ns=parts[-1].origin_ns)
    return _trace(name, parts, limit, rules)


def says_requests(path: Path, rules: Rules) -> bool:
    """Whether the names of a file's columns say when requests came and how long they are."""
    try:
        rows = rows_of(path, 2)
        chosen = _choose(rows, rules)
    except ValueError:
        return False
    return not _missing(chosen, rules) and bool({"output_tokens", "prompt"} & chosen.of.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Which columns of a file say what."""

    of: dict[str, str]
    statuses: tuple[str, ...]
    operation: str | None
    """The column of what kind of work a span is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The requests that one file gives."""

    arrival_ns: list[int]
    prompt: list[int]
    output: list[int]
    """-1 where it is to be drawn."""
    optional: dict[str, list[Any]]
    left_out: Counter[str]
    n_rows: int
    notes: tuple[str, ...]
    ids: list[Sequence[int]] | None
    block_tokens: int
    scale: float | None
    origin_ns: int | None = None
    span: str = ""
    """The requests or rows from which a window was cut, in words."""


def _part_within(file: Path, wanted: int | None, rules: Rules, tokens: Tokens) -> _Part:
    """The requests of a file that arrive in the window."""
    n_rows = None if wanted is None else wanted + 1
    of: dict[str, str] = {}

    def arrivals(piece: Rows) -> list[int | None]:
        if not of:
            chosen = _choose(piece, rules)
            _refuse_missing(piece, chosen, rules)
            of.update(chosen.of)
        return _arrivals(piece, of, rules)[0]

    while True:
        cut = Cut(rules.window, rules.origin_ns)
        rows, notes = rows_within(file, n_rows, cut, arrivals, lambda piece: _wanted(piece.names, rules))
        part = _read_rows(rows, rules, tokens) if len(rows) else _nothing(rules)
        if n_rows is None or wanted is None or rows.is_all or len(part.prompt) >= wanted:
            return replace(
                part,
                left_out=cut.left_out + part.left_out,
                n_rows=part.n_rows + cut.left_out.total(),
                notes=(*notes, *part.notes),
                origin_ns=cut.origin_ns,
                span=cut.span(),
            )
        n_rows *= 2


def _nothing(rules: Rules) -> _Part:
    return _Part(
        arrival_ns=[], prompt=[], output=[], optional={}, left_out=Counter(), n_rows=0, notes=(), ids=None,
        block_tokens=BLOCK_TOKENS, scale=rules.scale,
    )  # fmt: skip


def _part(file: Path, wanted: int | None, rules: Rules, tokens: Tokens) -> _Part:
    if wanted is not None:
        n_lines = wanted + 1
        while not (rows := rows_of(file, n_lines)).is_all:
            # What a file has may be in none of its first rows.
            if not _missing(_choose(rows, rules), rules):
                part = _read_rows(rows, rules, tokens)
                if len(part.prompt) >= wanted:
                    return part
            n_lines *= 2
    return _read_rows(rows_of(file, None, lambda rows: _wanted(rows.names, rules)), rules, tokens)


def _choose(rows: Rows, rules: Rules) -> _Chosen:
    for said, path in rules.columns.items():
        for each in _paths(said, path):
            if not rows.has(each):
                raise ValueError(
                    f"{rows.path}: no column {each!r}, which {said} is said to be in; it has {_listed(rows.names)}: "
                    f"name another with --map {said}=COLUMN (workload.columns)"
                )
    return _chosen(rows.names, rules)


def _wanted(names: Sequence[str], rules: Rules) -> set[str]:
    """The columns that are read."""
    chosen = _chosen(names, rules)
    told = (*chosen.of.items(), *rules.columns.items())
    used = {path for said, text in told for path in _paths(said, text)} | set(chosen.statuses)
    return used | {name for name, _ in matching(names, SUMS)} | ({chosen.operation} if chosen.operation else set())


def _chosen(names: Sequence[str], rules: Rules) -> _Chosen:
    of: dict[str, str] = {}
    for said in SYNONYMS:
        if hits := matching(names, SYNONYMS[said]):
            of[said] = hits[0][0]
    # What is anthropic's: tokens read from and written to a cache are counted beside `input_tokens`.
    prompt = of.get("prompt_tokens", "")
    head = prompt[: -len("input_tokens")]
    cached = [f"{head}{each}" for each in ("cache_read_input_tokens", "cache_creation_input_tokens")]
    if prompt.endswith("input_tokens") and (cached := [each for each in cached if each in names]):
        of["prompt_tokens"] = "+".join([prompt, *cached])
    if "end" in rules.columns:
        of.pop("arrival", None)
    of |= rules.columns
    if "arrival" in of:
        of = {said: path for said, path in of.items() if said not in ("end", "duration")}
    statuses = (
        (rules.columns["status"],) if "status" in rules.columns else tuple(n for n, _ in matching(names, STATUSES))
    )
    operation = next((n for n, _ in matching(names, ("gen_ai_operation_name",))), None)
    return _Chosen(of=of, statuses=statuses, operation=operation)


def _paths(said: str, path: str) -> list[str]:
    """The paths of columns that a setting names, without the unit."""
    if said in ("arrival", "end", "duration"):
        return [_unit(path)[0]]
    return path.split("+") if said.endswith("_tokens") else [path]


def _unit(path: str) -> tuple[str, str | None]:
    """The path of a column of times without its unit or format, and the one that is said by it or by its name."""
    head, colon, unit = path.rpartition(":")
    if colon and unit in UNITS_NS:
        return head, unit
    head, colon, form = path.partition(":%")
    if colon:
        return head, f"%{form}"
    return path, unit_of(path)


def _missing(chosen: _Chosen, rules: Rules) -> list[str]:
    of = chosen.of
    lacking = []
    if rules.timed and not {"arrival", "end"} & of.keys():
        lacking.append("arrival")
    if not {"prompt_tokens", "prompt"} & of.keys():
        lacking.append("prompt_tokens")
    return lacking


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """The lengths of prompts and answers, and the blocks of tokens that they share."""

    row_of: list[int]
    """The row that each request is from; conversations by turns have several."""
    prompt: list[int | None] | None
    output: list[int | None] | None
    ids: list[Sequence[int]] | None
    block_tokens: int
    scale: float | None
    notes: tuple[str, ...]


def _read_rows(rows: Rows, rules: Rules, tokens: Tokens) -> _Part:
    chosen = _choose(rows, rules)
    _refuse_sums(rows)
    _refuse_missing(rows, chosen, rules)
    n, of = len(rows), chosen.of
    arrival, notes = _arrivals(rows, of, rules) if rules.timed else ([0] * n, [])
    lengths = _lengths(rows, of, rules, tokens)
    allowed = _counts(rows, of, "max_tokens")
    kept, outputs, left_out = _taken(rows, chosen, rules, lengths, arrival, allowed)
    if rules.missing_output is None and not kept and left_out["without output tokens"] and rows.is_all:
        raise ValueError(
            f"{rows.path}: no request has output tokens ({_listed(rows.names)}); name their column with --map "
            "output_tokens=COLUMN, or take as many as clients allowed: missing_output max_tokens (--missing-output, "
            "workload.missing_output)"
        )
    for_row = [lengths.row_of[at] for at in kept]
    prompt = lengths.prompt or []
    return _Part(
        arrival_ns=[arrival[row] or 0 for row in for_row],
        prompt=[prompt[at] or 0 for at in kept],
        output=outputs,
        optional=_said_beside(rows, of, for_row, allowed, several=len(lengths.row_of) > n),
        left_out=left_out,
        n_rows=len(lengths.row_of),
        notes=(*notes, *lengths.notes, *_unused(rows, chosen)),
        ids=None if lengths.ids is None else [lengths.ids[at] for at in kept],
        block_tokens=lengths.block_tokens,
        scale=lengths.scale,
    )


def _refuse_missing(rows: Rows, chosen: _Chosen, rules: Rules) -> None:
    lacking = _missing(chosen, rules)
    if not lacking:
        return
    if any(number_of(name) is not None for name in rows.names):
        raise ValueError(
            f"{rows.path}: its first line, {_listed(rows.names)}, is a row and has no names of columns; put a line with names "
            "above it, such as arrival_s,prompt_tokens,output_tokens"
        )
    columns = ",".join(f"{each}=COLUMN" for each in lacking)
    other = "" if lacking != ["arrival"] else ", or draw them (workload.arrivals)"
    raise ValueError(
        f"{rows.path}: no column is known to say {' and '.join(lacking)}; it has {_listed(rows.names)}: name them, with "
        f"--map {columns} (workload.columns){other}"
    )


def _lengths(rows: Rows, of: Mapping[str, str], rules: Rules, tokens: Tokens) -> _Lengths:
    """By the columns of counts, and by texts where there are any and a count or the blocks are not said."""
    logged = _Lengths(
        row_of=list(range(len(rows))), prompt=_counts(rows, of, "prompt_tokens"), output=_counts(rows, of, "output_tokens"),
        ids=_blocks(rows, of), block_tokens=_HASH_IDS_TOKENS, scale=rules.scale, notes=(),
    )  # fmt: skip
    found = logged if "prompt" not in of else _with_texts(rows, of, rules, tokens, logged)
    if rules.tokenizer is None or any(found.ids or ()):
        return found
    return replace(found, notes=(*found.notes, "The tokenizer counts nothing: no column has texts."))


def _with_texts(rows: Rows, of: Mapping[str, str], rules: Rules, tokens: Tokens, logged: _Lengths) -> _Lengths:
    texts = Prompts.read(rows, of, tokens, logged.prompt, rules.scale)
    if texts is None:
        if logged.prompt is None and rows.is_all:
            raise ValueError(
                f"{rows.path}: column {of['prompt']} holds neither a text, messages nor token numbers; name another with "
                "--map prompt=COLUMN or prompt_tokens=COLUMN (workload.columns)"
            )
        return logged
    by_texts = logged.ids is None
    return _Lengths(
        row_of=texts.rows,
        prompt=texts.prompt if logged.prompt is None or texts.turns else logged.prompt,
        output=texts.output if logged.output is None or texts.turns else logged.output,
        ids=texts.ids if by_texts else logged.ids,
        block_tokens=BLOCK_TOKENS if by_texts else logged.block_tokens,
        scale=texts.scale,
        notes=texts.notes,
    )


def _taken(
    rows: Rows, chosen: _Chosen, rules: Rules, lengths: _Lengths, arrival: Sequence[int | None],
    allowed: Sequence[int | None] | None,
) -> tuple[list[int], list[int], Counter[str]]:  # fmt: skip
    """The requests that are taken, their outputs (-1: to be drawn), and how many are left out, by the reason."""
    rule = rules.missing_output
    failed = [False] * len(rows) if rules.keep_failed else _failures(rows, chosen)
    about = [None] * len(rows) if chosen.operation is None else rows.column(chosen.operation)
    kept: list[int] = []
    outputs: list[int] = []
    left_out: Counter[str] = Counter()

    def output_of(at: int, row: int) -> int | None:
        output = None if lengths.output is None else lengths.output[at]
        if output is None and rule == "max_tokens" and allowed is not None:
            output = allowed[row]
        return -1 if output is None and rule == "draw" else output

    def left_out_as(at: int, row: int) -> str | None:
        prompt = None if lengths.prompt is None else lengths.prompt[at]
        if failed[row]:
            return "failed"
        if about[row] in _ABOUT_OTHERS:
            return f"{about[row]}, which sums up others"
        if prompt is None or (prompt == 0 and not (lengths.output and lengths.output[at])):
            return "without prompt tokens"
        return "without a time" if arrival[row] is None else None

    for at, row in enumerate(lengths.row_of):
        why, output = left_out_as(at, row), output_of(at, row)
        if why is None and output is None:
            why = "without output tokens" + (" or max_tokens" if rule == "max_tokens" else "")
        if why is not None:
            left_out[why] += 1
        elif output is not None:
            kept.append(at)
            outputs.append(output)
    return kept, outputs, left_out


def _said_beside(
    rows: Rows, of: Mapping[str, str], for_row: Sequence[int], allowed: Sequence[int | None] | None, *, several: bool
) -> dict[str, list[Any]]:
    """The other columns of the requests that are taken, each of its row; *several*: one row may give several requests."""
    found: dict[str, list[Any]] = {}
    for said in ("model", "session", "tenant", "class", "priority", "deadline_s", "abort_s", "adapter", *_MEDIA):
        if said in of:
            values = rows.column(of[said])
            found[said] = [values[row] for row in for_row]
    for said in ("encoder_tokens", "predicted_tokens"):
        if (counts := _counts(rows, of, said)) is not None:
            found[said] = [counts[row] for row in for_row]
    if allowed is not None and for_row:
        found["max_tokens"] = [allowed[row] for row in for_row]
    if "prompt" in of and several and "session" not in found:
        found["session"] = [f"{rows.path}:{row}" for row in for_row]
    return found


def _refuse_sums(rows: Rows) -> None:
    for name, _ in matching(rows.names, SUMS):
        if any((number_of(value) or 0) > 1 for value in rows.column(name)):
            raise ValueError(
                f"{rows.path}: its rows are summed over requests ({name}); a trace has a row a request: log each request's usage"
            )


def _arrivals(rows: Rows, of: Mapping[str, str], rules: Rules) -> tuple[list[int | None], list[str]]:
    """The arrival of each request, and what was taken for granted of it."""
    if "arrival" in of:
        path, unit = _unit(of["arrival"])
        found, said = _moments(rows, "arrival", path, unit)
        notes = [f"Arrivals are {path}" + (f", {said}." if said else ".")]
        logged = matching([path], AT_LOG)
        took = matching(rows.names, SYNONYMS["duration"])
        if logged and took and "arrival" not in rules.columns:
            notes[0] += f" If that is when requests ended: --map end={path},duration={took[0][0]}."
        return found, notes
    path, unit = _unit(of["end"])
    ends, said = _moments(rows, "end", path, unit)
    said = f", {said}" if said else ""
    if "duration" not in of:
        return ends, [f"Arrivals are {path}, when requests ended{said}: no column says how long they took."]
    lasting, unit = _unit(of["duration"])
    if is_format(unit):
        raise ValueError(
            f"duration={of['duration']}: a duration is a number, and dates alone have a format; give a unit, {lasting}:ms"
        )
    if unit is None:
        unit = "ms" if matching([lasting], _RESPONSE_TIME_MS) else "s"
    durations: list[int | None] = []
    for row, value in enumerate(rows.column(lasting)):
        number = number_of(value)
        if number is None and value is not None:
            raise rows.refuse(lasting, row, "a duration", value)
        durations.append(None if number is None else round(number * UNITS_NS[unit]))
    started = [None if e is None or d is None else e - d for e, d in zip(ends, durations, strict=True)]
    return started, [f"Arrivals are the end, {path}{said}, less {lasting} in {unit_word(unit)}."]


def _moments(rows: Rows, what: str, path: str, unit: str | None) -> tuple[list[int | None], str]:
    values = rows.column(path)
    found, bad, said = moments_ns(values, unit)
    if bad is not None:
        if is_format(unit):
            raise rows.refuse(path, bad, f"a time written as {unit}", values[bad])
        refused = rows.refuse(path, bad, "a time such as 2025-05-01T12:00:00Z or a number", values[bad])
        raise ValueError(
            f"{refused}; say how other dates are written behind the column: --map "
            f"'{what}={path}:%d.%m.%Y %H:%M:%S' (workload.columns)"
        )
    return found, said


def _counts(rows: Rows, of: Mapping[str, str], said: str) -> list[int | None] | None:
    """Counts of tokens; None in rows that say none, and None alone where no row does."""
    if said not in of:
        return None
    total: list[int | None] = [None] * len(rows)
    for path in _paths(said, of[said]):
        for row, value in enumerate(rows.column(path)):
            if value is None:
                continue
            number = number_of(value)
            if number is None or number != int(number) or not 0 <= number < 2**53:
                raise rows.refuse(path, row, "a whole number of tokens from 0", value)
            total[row] = (total[row] or 0) + int(number)
    return total if any(each is not None for each in total) else None


def _blocks(rows: Rows, of: Mapping[str, str]) -> list[Sequence[int]] | None:
    if "blocks" not in of:
        return None
    found = []
    for row, value in enumerate(rows.column(of["blocks"])):
        if value is not None and not (
            isinstance(value, list) and all(type(each) is int and 0 <= each < 2**63 for each in value)
        ):
            raise rows.refuse(of["blocks"], row, "a list of whole numbers from 0", value)
        found.append(value or [])
    return found


def _failures(rows: Rows, chosen: _Chosen) -> list[bool]:
    failed = [False] * len(rows)
    for name in chosen.statuses:
        is_error = bool(matching([name], ("error", "errors")))
        is_good = bool(matching([name], ("is_success", "success")))
        for row, value in enumerate(rows.column(name)):
            failed[row] = failed[row] or _says_failed(value, is_error=is_error, is_good=is_good)
    return failed


def _says_failed(value: Any, *, is_error: bool, is_good: bool) -> bool:
    if value is None or value == {} or value == []:
        return False
    text = str(value).strip().lower()
    if is_error:
        return text not in ("false", "0", "")
    if is_good:
        return text in ("false", "0")
    return text in _FAILED or (text.isdigit() and len(text) == 3 and int(text) >= 400)


def _unused(rows: Rows, chosen: _Chosen) -> list[str]:
    used = (
        {path for said, text in chosen.of.items() for path in _paths(said, text)}
        | set(chosen.statuses)
        | {chosen.operation}
    )
    others = [name for name in rows.names if name and name not in used]
    return [f"Columns that are not used: {_listed(others)}."] if others else []


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(name or "(no name)" for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _trace(name: Any, parts: Sequence[_Part], limit: int | None, rules: Rules) -> Trace:
    source = Path(name).name
    notes = [*_left_out(name, parts, rules), *(note for part in parts for note in part.notes)]
    arrival_ns = _from_first(name, parts)
    prompt = np.array([each for part in parts for each in part.prompt], dtype=np.int64)
    output, drawn = _outputs(name, parts, rules)
    order = np.argsort(arrival_ns[: limit or len(prompt)], kind="stable")
    columns, more = _optional(parts, output)
    columns = {key: value[order] if isinstance(value, np.ndarray) else value for key, value in columns.items()}
    notes += [*drawn, *_moved(arrival_ns[: len(order)], limit), *more]
    return Trace(
        arrival_ns=arrival_ns[order] - arrival_ns[order][0],
        prompt_tokens=prompt[order],
        output_tokens=output[order],
        **columns,
        **_prefixes(parts, order, prompt + output),
        **_media(parts, order),
        source=source,
        notes=tuple(f"{source}: {note}" for note in dict.fromkeys(notes)),
    )


def _left_out(name: Any, parts: Sequence[_Part], rules: Rules) -> Iterator[str]:
    """A note of the rows that are left out, where some are; ValueError where none is taken."""
    left_out: Counter[str] = sum((part.left_out for part in parts), Counter())
    n_rows = sum(part.n_rows for part in parts)
    taken = sum(len(part.prompt) for part in parts)
    why = "; ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    if taken == 0:
        said = "; ".join(filter(None, [why, *(part.span for part in parts)]))
        raise ValueError(f"{name}: no requests are left of {n_rows:,} rows: {said}" + _ways(left_out, rules))
    if left_out:
        yield f"of {n_rows:,} rows {taken:,} are taken; left out are {why}{_ways(left_out, rules)}."


def _from_first(name: Any, parts: Sequence[_Part]) -> IntArray:
    """Nanoseconds from the first arrival, in the order of the file."""
    arrival = np.array([each for part in parts for each in part.arrival_ns], dtype=object)
    first = min(arrival)
    if int(max(arrival)) - int(first) > INT64_MAX:
        raise ValueError(f"{name}: its arrivals are more than 292 years apart")
    return (arrival - first).astype(np.int64)


def _outputs(name: Any, parts: Sequence[_Part], rules: Rules) -> tuple[IntArray, list[str]]:
    """Output tokens, where they are missed drawn from the others', and a note that says so."""
    output = np.array([each for part in parts for each in part.output], dtype=np.int64)
    missed = output < 0
    if not missed.any():
        return output, []
    if missed.all():
        raise ValueError(
            f"{name}: no request has output tokens to draw the others' from; use missing_output max_tokens"
        )
    pool, n = output[~missed], int(missed.sum())
    output[missed] = stream(rules.seed, Stream.MISSING_OUTPUTS).choice(pool, n)
    return output, [f"outputs of {n:,} requests are drawn from those of the other {len(pool):,}."]


def _moved(arrival_ns: IntArray, limit: int | None) -> Iterator[str]:
    """A note where rows were sorted; *limit*: only so many were read, where the file has them."""
    if moved := int(np.count_nonzero(np.diff(arrival_ns) < 0)):
        read = f" Of the file the first {limit:,} are read, in its own order." if limit == len(arrival_ns) else ""
        yield f"{moved:,} rows came before the one above them; all are sorted by arrival.{read}"


def _ways(left_out: Counter[str], rules: Rules) -> str:
    ways = []
    if left_out["failed"]:
        ways.append("--keep-failed keeps the failed ones that have tokens")
    if left_out["without output tokens"] and rules.missing_output != "drop":
        ways.append("--missing-output max_tokens or draw keeps those without an output")
    return f" ({'; '.join(ways)})" if ways else ""


def _optional(parts: Sequence[_Part], output: IntArray) -> tuple[dict[str, Any], list[str]]:
    """Columns that a trace may have beside those that it must, and notes on what is left out of them."""
    notes: list[str] = []
    found = _names(parts)
    if (each := _values(parts, "session")) is not None:
        place = {value: at for at, value in enumerate(dict.fromkeys(str(v) for v in each if v is not None))}
        if len(place) == 1 and len(each) > 1:
            notes.append("All rows are of one session, which is left out.")
        elif place:
            found["session"] = np.array([-1 if v is None else place[str(v)] for v in each], dtype=np.int64)
    if (each := _values(parts, "max_tokens")) is not None:
        without = sum(value is None for value in each)
        if without:
            notes.append(f"max_tokens, which {without:,} of the requests lack, is left out.")
        else:
            allowed = np.array(each, dtype=np.int64)
            if over := int(np.count_nonzero(allowed < output)):
                notes.append(f"{over:,} outputs are longer than their max_tokens, which counts as their length.")
            found["max_tokens"] = np.maximum(allowed, output)
    if (each := _values(parts, "adapter")) is not None:

        def refuse(row: int, expected: str) -> NoReturn:
            raise ValueError(f"column adapter: expected {expected}; got {each[row]!r}")

        found["adapter"], said = adapter_numbers(each, refuse)
        notes += [f"{note}." for note in said]
    return found | _numbers(parts), notes


def _values(parts: Sequence[_Part], said: str) -> list[Any] | None:
    if not any(said in part.optional for part in parts):
        return None
    return [value for part in parts for value in part.optional.get(said, [None] * len(part.prompt))]


def _names(parts: Sequence[_Part]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for said, names, index in (
        ("model", "models", "model_index"),
        ("tenant", "tenants", "tenant_index"),
        ("class", "classes", "class_index"),
    ):
        if (each := _values(parts, said)) is not None and any(value is not None for value in each):
            texts = ["unknown" if value is None else str(value) for value in each]
            place = {text: at for at, text in enumerate(dict.fromkeys(texts))}
            found[names] = tuple(place)
            found[index] = np.array([place[text] for text in texts], dtype=np.int64)
    return found


def _numbers(parts: Sequence[_Part]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for said, key, scale, absent in (
        ("priority", "priority", 1, 0),
        ("deadline_s", "deadline_ns", 10**9, -1),
        ("abort_s", "abort_ns", 10**9, -1),
        ("encoder_tokens", "encoder_tokens", 1, 0),
        ("predicted_tokens", "predicted_tokens", 1, None),
    ):
        if (each := _values(parts, said)) is not None:
            numbers = [absent if value is None else number_of(value) for value in each]
            if None in numbers:
                raise ValueError(f"column {said}: expected numbers; got {each[numbers.index(None)]!r}")
            found[key] = np.array(
                [n if n == absent else round(n * scale) for n in numbers if n is not None], dtype=np.int64
            )
    return found


def _media(parts: Sequence[_Part], order: IntArray) -> dict[str, Any]:
    """Images and clips of speech, in cells as in the plain format."""
    found: dict[str, Any] = {}
    for column, medium in _MEDIA.items():
        if (each := _values(parts, column)) is None:
            continue
        items: list[list[tuple[int, ...]]] = []
        for row in order.tolist():
            try:
                items.append(parse_cell(medium, "" if each[row] is None else str(each[row])))
            except ValueError:
                raise ValueError(f"column {column}: expected {CELLS[medium].expected}; got {each[row]!r}") from None
        found |= columns_of(medium, items)
    return found


def _prefixes(parts: Sequence[_Part], order: IntArray, through: IntArray) -> dict[str, Any]:
    """Ids of blocks, as small numbers that stand for chained hashes."""
    if not any(part.ids is not None and any(part.ids) for part in parts):
        return {}
    block_tokens = next(part.block_tokens for part in parts if part.ids is not None)
    ids = [each for part in parts for each in (part.ids if part.ids is not None else [[]] * len(part.prompt))]
    kept = [ids[row][: -(-int(through[row]) // block_tokens)] for row in order.tolist()]
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in kept]))).astype(np.int64)
    flat = np.array([each for row in kept for each in row], dtype=np.int64)
    return {"prefix_blocks": chained(flat, offsets), "prefix_offsets": offsets, "prefix_block_tokens": block_tokens}
