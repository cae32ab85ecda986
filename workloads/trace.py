"""A trace: the requests of one workload, made from arrays, cut, stretched, described and written."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workloads.columns import INT64_MAX, NS_PER_S, IntArray, int_column, seconds_to_ns
from workloads.describe import describe
from workloads.loops import ClosedLoop
from workloads.plain import plain_csv
from workloads.requests import Requests
from workloads.workload import Workload
from workloads.write import write_whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Trace(Requests):
    """Requests in order of arrival; `Workload` and `Requests` list the columns.

    Raises ValueError as `Requests` does. Whatever cuts or changes a trace gives a new one.
    """

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

    def behind(self, in_flight: int) -> ClosedLoop:
        if self.follows is not None or self.abort_ns is not None:
            raise ValueError("in_flight is for requests that wait for no others and that are not given up")
        columns = {each.name: getattr(self, each.name) for each in fields(Workload)}
        return ClosedLoop(**columns, concurrency=in_flight, due_ns=self.arrival_ns)

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
        """The trace described as numbers ready for JSON.

        `rate_per_s` is the arrivals after the first over the time from first to last, None where they
        coincide; `interarrival_cv` the standard deviation of the times between arrivals over their mean.
        """
        return describe(self)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the plain format, whole or not at all; `read_trace` gives the same columns back.

        Columns: arrival_s (nine decimals), prompt_tokens, output_tokens and, where present, model,
        deadline_s, session, adapter, priority, max_tokens, abort_s, class, tenant, predicted_tokens, encoder_tokens, images,
        audio_s and prefix_blocks_N (ids between blanks, N tokens a block).
        """
        if self.follows is not None:
            raise ValueError("the plain format cannot say which requests wait for others; keep the file of sessions")
        write_whole(path, plain_csv(self))
