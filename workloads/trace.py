"""What arrives: the requests of one workload as columns of integers."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.columns import INT64_MAX, NS_PER_S, IntArray, first_row, int_column, seconds_to_ns
from workloads.write import write_whole

_OPTIONAL = {
    "model_index": 0,
    "deadline_ns": -1,
    "session": -1,
    "priority": -INT64_MAX,
    "max_tokens": 0,
    "abort_ns": -1,
}
"""Columns that a trace may have beside those that it must, with the least value of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Trace:
    """Requests in order of arrival; all columns are read-only int64 arrays of one length n >= 1.

    Raises ValueError, naming row (from 0), column and value, for negative, fractional, NaN or infinite
    numbers, arrivals out of order, and a request with neither prompt nor output tokens. A request too long
    for any machine is legal here: the engine rejects it at admission.
    """

    arrival_ns: IntArray
    """When each request arrives, nanoseconds from the start of the run; non-decreasing."""
    prompt_tokens: IntArray
    output_tokens: IntArray
    """Tokens to generate; 0 for one-shot models, whose answer is one pass over the prompt."""
    model_index: IntArray | None = None
    """Row of `models` that each request asks for; None where there is at most one model."""
    models: tuple[str, ...] = ()
    """Names of the models; empty for a single model without a name."""
    deadline_ns: IntArray | None = None
    """Nanoseconds after its arrival by which a request should be finished; -1 where it has no deadline."""
    session: IntArray | None = None
    """Conversation that each request belongs to; -1 where it has none."""
    priority: IntArray | None = None
    """Smaller goes first, as in vLLM; 0 where nothing else is said. What it does is up to the scheduler."""
    max_tokens: IntArray | None = None
    """Output tokens that the client allows at most; None: as many as come out. Schedulers that plan for what may come see it."""
    abort_ns: IntArray | None = None
    """Nanoseconds after its arrival at which the client gives a request up; -1 where it waits for the end."""
    prefix_blocks: IntArray | None = None
    """Block ids of all requests end to end; equal ids at the beginning are equal tokens, as far as two requests have them. Where a
    request has more of them than its prompt needs, they name the tokens that it emits as well, which a later prompt may contain;
    what comes after the last is its own. Row i owns `prefix_of(i)`."""
    prefix_offsets: IntArray | None = None
    """n + 1 offsets into `prefix_blocks`."""
    prefix_block_tokens: int | None = None
    """Tokens that one block id stands for (the last block of a request may be partly filled)."""
    source: str = ""
    """Where the requests come from, in words."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
            put(self, name, int_column(getattr(self, name), name))
        n = len(self.arrival_ns)
        if n == 0:
            raise ValueError("a trace needs at least one request; got none")
        for name, floor in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None:
                put(self, name, int_column(value, name, minimum=floor))
        for name in ("prompt_tokens", "output_tokens", *_OPTIONAL):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise ValueError(f"{name} needs one value a request ({n}); got {len(value)}")
        if self.max_tokens is not None and (row := first_row(self.max_tokens < self.output_tokens)) is not None:
            raise ValueError(
                f"row {row}: a request emits no more than its max_tokens; got {self.output_tokens[row]} output tokens and "
                f"max_tokens {self.max_tokens[row]}"
            )
        if (row := first_row(np.diff(self.arrival_ns) < 0)) is not None:
            raise ValueError(
                f"arrival_ns must not decrease; row {row + 1} has {self.arrival_ns[row + 1]} "
                f"after {self.arrival_ns[row]}: sort the requests by arrival (Trace.from_arrays(..., sort=True))"
            )
        empty = (self.prompt_tokens == 0) & (self.output_tokens == 0)
        if (row := first_row(empty)) is not None:
            raise ValueError(
                f"row {row}: a request needs prompt_tokens or output_tokens above 0; got 0 and 0: leave it out"
            )
        self._check_models()
        self._check_prefixes(n)

    def _check_models(self) -> None:
        models = tuple(self.models)
        object.__setattr__(self, "models", models)
        if any(not isinstance(name, str) or not name for name in models):
            raise ValueError(f"models are non-empty names; got {models!r}")
        if len(set(models)) != len(models):
            raise ValueError(f"models must differ; got {models!r}")
        if self.model_index is None:
            if len(models) > 1:
                raise ValueError(f"a trace of {len(models)} models needs model_index; got none")
            return
        if not models:
            raise ValueError("model_index needs the names in models; got no names")
        if (row := first_row(self.model_index >= len(models))) is not None:
            raise ValueError(
                f"row {row}: model_index is a row of the {len(models)} models; got {self.model_index[row]}"
            )
        if len(models) == 1:
            # One canonical form, so that equal traces compare equal.
            object.__setattr__(self, "model_index", None)

    def _check_prefixes(self, n: int) -> None:
        parts = (self.prefix_blocks, self.prefix_offsets, self.prefix_block_tokens)
        if all(part is None for part in parts):
            return
        if self.prefix_blocks is None or self.prefix_offsets is None or self.prefix_block_tokens is None:
            raise ValueError("prefix_blocks, prefix_offsets and prefix_block_tokens go together; got only some of them")
        blocks = int_column(self.prefix_blocks, "prefix_blocks")
        offsets = int_column(self.prefix_offsets, "prefix_offsets")
        object.__setattr__(self, "prefix_blocks", blocks)
        object.__setattr__(self, "prefix_offsets", offsets)
        tokens = self.prefix_block_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 1:
            raise ValueError(f"prefix_block_tokens is a positive integer; got {tokens!r}")
        object.__setattr__(self, "prefix_block_tokens", int(tokens))
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(blocks) or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"prefix_offsets are {n + 1} non-decreasing numbers from 0 to the {len(blocks)} of prefix_blocks; "
                f"got {offsets!r}"
            )
        counts = np.diff(offsets)
        if (row := first_row(counts > -(-(self.prompt_tokens + self.output_tokens) // int(tokens)))) is not None:
            raise ValueError(
                f"row {row}: prefix_blocks has {counts[row]} blocks of {tokens} tokens for {self.prompt_tokens[row]} prompt and "
                f"{self.output_tokens[row]} output tokens; blocks cannot outnumber them"
            )

    @classmethod
    def from_arrays(
        cls,
        *,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        arrival_s: ArrayLike | None = None,
        arrival_ns: ArrayLike | None = None,
        model: str | Sequence[str] | None = None,
        deadline_s: ArrayLike | None = None,
        session: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        max_tokens: ArrayLike | None = None,
        abort_s: ArrayLike | None = None,
        sort: bool = False,
        source: str = "arrays",
    ) -> Trace:
        """A trace from arrays or sequences, with arrivals in seconds (rounded to ns) or nanoseconds.

        Token counts, deadlines and priorities may be single numbers for all requests. *model* is one name, or a name a
        request. *deadline_s* counts from the arrival; NaN means none. *sort* orders by arrival, equal
        arrivals staying as they are. *abort_s* counts from the arrival as well. Raises as Trace does.
        """
        if (arrival_s is None) == (arrival_ns is None):
            raise ValueError("give the arrivals once: arrival_s or arrival_ns")
        arrival = (
            seconds_to_ns(arrival_s, "arrival_s") if arrival_s is not None else int_column(arrival_ns, "arrival_ns")  # type: ignore[arg-type]
        )
        n = len(arrival)

        def column(value: ArrayLike, name: str, minimum: int = 0) -> IntArray:
            scalar = np.ndim(value) == 0
            return int_column(np.full(n, value) if scalar else value, name, minimum=minimum)

        models: tuple[str, ...] = ()
        model_index = None
        if isinstance(model, str):
            models = (model,)
        elif model is not None:
            names = list(model)
            models = tuple(dict.fromkeys(names))
            position = {name: i for i, name in enumerate(models)}
            model_index = np.array([position[name] for name in names], dtype=np.int64)

        def after_arrival(value: ArrayLike | None, name: str) -> IntArray | None:
            if value is None:
                return None
            seconds = np.asarray(value, dtype=float)
            seconds = np.full(n, seconds) if seconds.ndim == 0 else seconds
            absent = np.isnan(seconds)
            return np.where(absent, -1, seconds_to_ns(np.where(absent, 0.0, seconds), name))

        parts: dict[str, Any] = {
            "arrival_ns": arrival,
            "prompt_tokens": column(prompt_tokens, "prompt_tokens"),
            "output_tokens": column(output_tokens, "output_tokens"),
            "model_index": model_index,
            "deadline_ns": after_arrival(deadline_s, "deadline_s"),
            "abort_ns": after_arrival(abort_s, "abort_s"),
            "max_tokens": None if max_tokens is None else column(max_tokens, "max_tokens"),
            "session": None if session is None else column(session, "session", -1),
            "priority": None if priority is None else column(priority, "priority", -INT64_MAX),
        }
        if sort:
            order = np.argsort(arrival, kind="stable")
            for name, value in parts.items():
                if value is not None:
                    if len(value) != n:
                        raise ValueError(f"{name} needs one value a request ({n}); got {len(value)}")
                    parts[name] = value[order]
        return cls(**parts, models=models, source=source)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def __repr__(self) -> str:
        models = f", {len(self.models)} models" if len(self.models) > 1 else ""
        return f"Trace({len(self)} requests in {self.duration_s:.6g} s{models}, source={self.source!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            arrays = isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray)
            if not (np.array_equal(mine, theirs) if arrays else mine == theirs):
                return False
        return True

    def __hash__(self) -> int:
        columns = (self.arrival_ns, self.prompt_tokens, self.output_tokens)
        return hash((self.models, self.source, *(column.tobytes() for column in columns)))

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return int(self.arrival_ns[-1] - self.arrival_ns[0]) / NS_PER_S

    @property
    def arrival_s(self) -> NDArray[np.float64]:
        return self.arrival_ns / NS_PER_S

    def prefix_of(self, row: int) -> IntArray:
        """Block ids of one request's prompt, in order; empty without prefix blocks."""
        if self.prefix_blocks is None or self.prefix_offsets is None:
            return np.empty(0, dtype=np.int64)
        row = range(len(self))[row]
        return self.prefix_blocks[self.prefix_offsets[row] : self.prefix_offsets[row + 1]]

    def model_of(self, row: int) -> str | None:
        """The name of the model that a request asks for; None without names."""
        row = range(len(self))[row]
        if not self.models:
            return None
        return self.models[0 if self.model_index is None else int(self.model_index[row])]

    def take(self, rows: ArrayLike) -> Trace:
        """The requests of the given rows (indices in order, or a boolean mask); arrivals unchanged."""
        index = np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        changes: dict[str, Any] = {}
        for name in ("arrival_ns", "prompt_tokens", "output_tokens", *_OPTIONAL):
            value = getattr(self, name)
            changes[name] = None if value is None else value[index]
        if self.prefix_blocks is not None and self.prefix_offsets is not None:
            counts = np.diff(self.prefix_offsets)[index]
            offsets = np.concatenate(([0], np.cumsum(counts)))
            first = np.repeat(self.prefix_offsets[:-1][index] - offsets[:-1], counts)
            changes["prefix_offsets"] = offsets
            changes["prefix_blocks"] = self.prefix_blocks[first + np.arange(offsets[-1])]
        return replace(self, **changes)

    def limit(self, n: int) -> Trace:
        """The first *n* requests, or all where there are fewer."""
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ValueError(f"limit is a positive number of requests; got {n!r}")
        return self if n >= len(self) else self.take(np.arange(n))

    def window(self, start_s: float, end_s: float) -> Trace:
        """The requests that arrive in [start_s, end_s), with time counted from *start_s*.

        Raises ValueError where no request arrives in the window.
        """
        if not 0 <= start_s < end_s:
            raise ValueError(f"a window needs 0 <= start_s < end_s; got {start_s!r} and {end_s!r}")
        start_ns = round(start_s * NS_PER_S)
        end_ns = INT64_MAX if math.isinf(end_s) else round(end_s * NS_PER_S)
        low, high = np.searchsorted(self.arrival_ns, [start_ns, end_ns], side="left")
        if low == high:
            raise ValueError(
                f"no request arrives in [{start_s}, {end_s}) s; arrivals run from "
                f"{self.arrival_ns[0] / NS_PER_S} to {self.arrival_ns[-1] / NS_PER_S} s"
            )
        part = self.take(np.arange(low, high))
        return replace(part, arrival_ns=part.arrival_ns - start_ns)

    def scale_rate(self, factor: float) -> Trace:
        """The same requests arriving *factor* times as fast.

        Arrivals are divided by the decimal value that *factor* prints as, in exact integer arithmetic,
        and rounded to the nearest nanosecond (halves upwards), so that order is kept. Deadlines stay.
        """
        if isinstance(factor, bool) or not math.isfinite(factor) or factor <= 0:
            raise ValueError(f"rate factor is a positive number; got {factor!r}")
        exact = Fraction(str(float(factor)))
        top, bottom = exact.denominator, exact.numerator
        largest = int(self.arrival_ns[-1]) * top + bottom // 2
        if (largest // bottom) > INT64_MAX:
            raise ValueError(f"rate factor {factor!r} stretches the trace beyond 292 years; use a larger one")
        if 2 * largest <= INT64_MAX and 2 * bottom <= INT64_MAX:
            scaled = (2 * self.arrival_ns * top + bottom) // (2 * bottom)
        else:
            wide = self.arrival_ns.astype(object)
            scaled = ((2 * wide * top + bottom) // (2 * bottom)).astype(np.int64)
        return replace(self, arrival_ns=scaled)

    def with_models(self, models: str | Sequence[str], model_index: ArrayLike | None = None) -> Trace:
        """The same requests asking for other models: one name for all, or names and a row of them a request."""
        names = (models,) if isinstance(models, str) else tuple(models)
        index = None if model_index is None else int_column(model_index, "model_index")
        return replace(self, models=names, model_index=index)

    def with_deadline(self, deadline_s: ArrayLike | None) -> Trace:
        """The same requests with deadlines in seconds after arrival.

        One number for all; one for each of `models`, in a mapping from name to seconds; one a request; or
        None for no deadlines. NaN or a missing model means no deadline.
        """
        if deadline_s is None:
            return replace(self, deadline_ns=None)
        if isinstance(deadline_s, dict):
            unknown = set(deadline_s) - set(self.models)
            if unknown:
                raise ValueError(f"deadlines name models of the trace {self.models!r}; got {sorted(unknown)!r}")
            each = np.array([deadline_s.get(name, math.nan) for name in self.models], dtype=float)
            index = np.zeros(len(self), dtype=np.int64) if self.model_index is None else self.model_index
            seconds = each[index]
        else:
            seconds = np.broadcast_to(np.asarray(deadline_s, dtype=float), len(self))
        absent = np.isnan(seconds)
        deadline_ns = np.where(absent, -1, seconds_to_ns(np.where(absent, 0.0, seconds), "deadline_s"))
        return replace(self, deadline_ns=deadline_ns)

    def describe(self) -> dict[str, Any]:
        """What the trace looks like, as numbers ready for JSON.

        `rate_per_s` is the arrivals after the first over the time from first to last, None where they
        coincide; `interarrival_cv` the standard deviation of the times between arrivals over their mean.
        """
        gaps_s = np.diff(self.arrival_ns) / NS_PER_S
        mean_gap_s = float(gaps_s.mean()) if len(gaps_s) else 0.0

        def lengths(values: IntArray) -> dict[str, float | int]:
            p50, p90, p99 = (float(x) for x in np.percentile(values, [50, 90, 99]))
            return {
                "mean": float(values.mean()),
                "median": p50,
                "p90": p90,
                "p99": p99,
                "min": int(values.min()),
                "max": int(values.max()),
                # Python integers: sums of legal token counts may pass int64.
                "total": sum(values.tolist()),
            }

        out: dict[str, Any] = {
            "source": self.source,
            "requests": len(self),
            "duration_s": self.duration_s,
            "rate_per_s": len(gaps_s) / self.duration_s if self.duration_s > 0 else None,
            "interarrival_cv": float(gaps_s.std()) / mean_gap_s if mean_gap_s > 0 else None,
            "prompt_tokens": lengths(self.prompt_tokens),
            "output_tokens": lengths(self.output_tokens),
        }
        if self.models:
            index = np.zeros(len(self), dtype=np.int64) if self.model_index is None else self.model_index
            counts = np.bincount(index, minlength=len(self.models))
            out["requests_of_model"] = dict(zip(self.models, counts.tolist(), strict=True))
        if self.deadline_ns is not None:
            out["with_deadline"] = int(np.count_nonzero(self.deadline_ns >= 0))
        if self.session is not None:
            out["sessions"] = len(np.unique(self.session[self.session >= 0]))
        if self.priority is not None:
            values, counts = np.unique(self.priority, return_counts=True)
            out["priorities"] = {str(value): n for value, n in zip(values.tolist(), counts.tolist(), strict=True)}
        if self.abort_ns is not None:
            out["given_up"] = int(np.count_nonzero(self.abort_ns >= 0))
        if self.max_tokens is not None:
            out["max_tokens"] = lengths(self.max_tokens)
        if self.prefix_blocks is not None and self.prefix_block_tokens is not None:
            distinct = len(np.unique(self.prefix_blocks))
            total = len(self.prefix_blocks)
            out["prefix_block_tokens"] = self.prefix_block_tokens
            out["prefix_blocks_seen_before"] = 1 - distinct / total if total else 0.0
        return out

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the plain format, whole or not at all; `read_trace` gives the same columns back.

        Columns: arrival_s (nine decimals), prompt_tokens, output_tokens and, where present, model,
        deadline_s, session, priority, max_tokens, abort_s and prefix_blocks_N (ids between blanks, N tokens a block).
        """
        header = ["arrival_s", "prompt_tokens", "output_tokens"]
        columns: list[list[Any]] = [
            [_decimal_s(ns) for ns in self.arrival_ns.tolist()],
            self.prompt_tokens.tolist(),
            self.output_tokens.tolist(),
        ]
        if self.models:
            index = [0] * len(self) if self.model_index is None else self.model_index.tolist()
            header.append("model")
            columns.append([self.models[i] for i in index])
        if self.deadline_ns is not None:
            header.append("deadline_s")
            columns.append(["" if ns < 0 else _decimal_s(ns) for ns in self.deadline_ns.tolist()])
        if self.session is not None:
            header.append("session")
            columns.append(["" if s < 0 else s for s in self.session.tolist()])
        if self.priority is not None:
            header.append("priority")
            columns.append(self.priority.tolist())
        if self.max_tokens is not None:
            header.append("max_tokens")
            columns.append(self.max_tokens.tolist())
        if self.abort_ns is not None:
            header.append("abort_s")
            columns.append(["" if ns < 0 else _decimal_s(ns) for ns in self.abort_ns.tolist()])
        if self.prefix_blocks is not None and self.prefix_offsets is not None:
            header.append(f"prefix_blocks_{self.prefix_block_tokens}")
            ids, offsets = self.prefix_blocks.tolist(), self.prefix_offsets.tolist()
            columns.append([" ".join(map(str, ids[offsets[i] : offsets[i + 1]])) for i in range(len(self))])
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(zip(*columns, strict=True))
        write_whole(Path(path), text.getvalue())


def _decimal_s(ns: int) -> str:
    return f"{ns // NS_PER_S}.{ns % NS_PER_S:09d}"
