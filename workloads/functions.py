"""Calls of serverless functions, as the Azure Functions traces tell them, and traces of models that take their place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workloads.cells import HEADERS, Table, read_bytes
from workloads.columns import NS_PER_S, IntArray
from workloads.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionCounts:
    """Calls of each function in each bin of time, as the Azure Functions trace of 2019 tells it."""

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
        model, bins = np.divmod(np.repeat(np.arange(counts.size), calls), counts.shape[1])
        nth = np.arange(total) - np.repeat(np.cumsum(calls) - calls, calls)
        per_bin = np.repeat(calls, calls)
        bin_ns = self.bin_s * NS_PER_S
        arrival = bins * bin_ns + (2 * nth + 1) * bin_ns // (2 * per_bin)
        order = np.lexsort((model, arrival))
        spread = f"calls spread evenly over each {self.bin_s} s"
        calls_ns = (arrival[order], model[order])
        return _requests(self.source, calls_ns, models, (prompt_tokens, output_tokens), (start_s, end_s), spread)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionInvocations:
    """The times at which each function was called, as the Azure Functions trace of 2021 tells it."""

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
        return _requests(self.source, (arrival, model), models, (prompt_tokens, output_tokens), (start_s, end_s))


def _requests(
    source: str,
    calls: tuple[IntArray, IntArray],
    models: Sequence[str],
    tokens: tuple[int, int],
    window_s: tuple[float, float | None],
    how: str = "",
) -> Trace:
    """A trace of *calls*, times and rows of *models*, each with *tokens* of prompt and output. ValueError where there are none."""
    arrival, model = calls
    if len(arrival) == 0:
        start_s, end_s = window_s
        raise ValueError(
            f"{source}: no function is called from {start_s} s to {end_s or 'the end'}; take another window"
        )
    prompt, output = (np.full(len(arrival), each) for each in tokens)
    return Trace(
        arrival_ns=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        model_index=model,
        models=tuple(models),
        source=f"{source}, {how}" if how else source,
    )


def read_function_counts(*paths: str | os.PathLike[str]) -> FunctionCounts:
    """Calls a minute from files of the Azure Functions trace of 2019; several files are days one after another.

    Columns HashOwner, HashApp, HashFunction, Trigger and 1, 2, ... up to 1440. Raises as `read_trace` does.
    """
    if not paths:
        raise ValueError("give at least one file")
    days = [function_counts(path, read_bytes(path)) for path in paths]
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
    return function_invocations(path, read_bytes(path))


def function_counts(path: Any, data: bytes) -> FunctionCounts:
    """`read_function_counts` of what was read of one file."""
    table = Table.parse(path, data, HEADERS["azure_functions_2019"])
    minutes = [name for name in table.header if name.isascii() and name.isdigit()]
    if minutes != [str(k) for k in range(1, len(minutes) + 1)]:
        raise ValueError(f"{path}, line 1: the minutes are columns 1, 2, 3, ... in order; got {','.join(minutes)[:80]}")
    counts = np.column_stack([table.integers(name, blank=0) for name in minutes])
    names = ["/".join(key) for key in zip(*(table.texts(c) for c in HEADERS["azure_functions_2019"][:3]), strict=True)]
    functions = tuple(dict.fromkeys(names))
    position = {name: i for i, name in enumerate(functions)}
    # A function with several triggers has a row for each.
    joined = np.zeros((len(functions), len(minutes)), dtype=np.int64)
    np.add.at(joined, [position[name] for name in names], counts)
    return FunctionCounts(functions=functions, counts=joined, source=Path(path).name)


def function_invocations(path: Any, data: bytes) -> FunctionInvocations:
    """`read_function_invocations` of what was read of a file."""
    table = Table.parse(path, data, HEADERS["azure_functions_2021"])
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
