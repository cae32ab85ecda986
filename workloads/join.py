"""Several traces as one: on one clock, or one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workloads.classes import ServiceClass
from workloads.columns import NS_PER_S, IntArray
from workloads.follows import Follows
from workloads.media import joined
from workloads.trace import Trace


def merge(traces: Sequence[Trace], *, shared_ids: bool = False) -> Trace:
    """One trace of all requests on one clock, by arrival; equal arrivals in the order of *traces*.

    Models are joined by name. Sessions and prefix blocks of different traces are kept apart by renumbering,
    unless *shared_ids* says that equal numbers mean the same thing. Raises ValueError where named and unnamed
    models or different prefix block sizes meet.
    """
    return _join(list(traces), shared_ids=shared_ids, sort=True)


def concat(traces: Sequence[Trace], *, gap_s: float = 0.0, shared_ids: bool = False) -> Trace:
    """One trace after the other: each starts *gap_s* seconds after the last arrival of the one before.

    The clock of each later trace runs from its own zero. Otherwise as `merge`.
    """
    if not math.isfinite(gap_s) or gap_s < 0:
        raise ValueError(f"gap_s is a number of seconds from 0; got {gap_s!r}")
    shifted: list[Trace] = []
    for trace in traces:
        if shifted:
            start_ns = int(shifted[-1].arrival_ns[-1]) + round(gap_s * NS_PER_S)
            trace = replace(trace, arrival_ns=trace.arrival_ns + start_ns)
        shifted.append(trace)
    return _join(shifted, shared_ids=shared_ids, sort=False)


def _join(traces: list[Trace], *, shared_ids: bool, sort: bool) -> Trace:
    if not traces:
        raise ValueError("joining needs at least one trace; got none")
    arrival = np.concatenate([trace.arrival_ns for trace in traces])
    order = np.argsort(arrival, kind="stable") if sort else np.arange(len(arrival))
    # Rows are put in order before the Trace is made, which checks it; prefix blocks follow through `take`.
    unsorted = Trace(
        arrival_ns=np.zeros(len(arrival), dtype=np.int64),
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces]),
        output_tokens=np.concatenate([trace.output_tokens for trace in traces]),
        **_models(traces),
        deadline_ns=_column(traces, "deadline_ns"),
        session=_column(traces, "session") if shared_ids else _renumbered(traces, "session"),
        priority=_column(traces, "priority", absent=0),
        max_tokens=_max_tokens(traces),
        abort_ns=_column(traces, "abort_ns"),
        **_by_name(traces, "class_index", "classes"),
        **_by_name(traces, "tenant_index", "tenants"),
        terms=_terms(traces),
        predicted_tokens=_of_all(traces, "predicted_tokens"),
        encoder_tokens=_of_all(traces, "encoder_tokens"),
        adapter=_column(traces, "adapter"),
        follows=_follows(traces),
        **_prefixes(traces, shared_ids=shared_ids),
        **joined(traces, shared=shared_ids),
        source=" + ".join(dict.fromkeys(trace.source for trace in traces)),
        notes=tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
    )
    return replace(unsorted.take(order), arrival_ns=arrival[order])


def _column(traces: Sequence[Trace], name: str, *, absent: int = -1) -> IntArray | None:
    """A column that some *traces* have; requests of the others have *absent*."""
    columns = [getattr(trace, name) for trace in traces]
    if all(each is None for each in columns):
        return None
    return np.concatenate(
        [
            np.full(len(trace), absent, dtype=np.int64) if each is None else each
            for trace, each in zip(traces, columns, strict=True)
        ]
    )


def _renumbered(traces: Sequence[Trace], name: str) -> IntArray | None:
    """A column of numbers from 0, with other numbers for each trace; -1 stays none."""
    found = _column(traces, name)
    if found is None:
        return None
    base = 0
    for own in np.split(found, np.cumsum([len(trace) for trace in traces])[:-1]):
        own[own >= 0] += base
        base = max(base, int(own.max(initial=-1)) + 1)
    return found


def _max_tokens(traces: Sequence[Trace]) -> IntArray | None:
    """Limits of outputs; where a trace has none, its outputs."""
    if all(trace.max_tokens is None for trace in traces):
        return None
    return np.concatenate([trace.output_tokens if trace.max_tokens is None else trace.max_tokens for trace in traces])


def _models(traces: Sequence[Trace]) -> dict[str, Any]:
    """The models of all *traces*, joined by name; a trace without an index is of its only model."""
    if len({bool(trace.models) for trace in traces}) > 1:
        raise ValueError("traces with and without model names cannot be joined; name them all with with_models")
    models = tuple(dict.fromkeys(name for trace in traces for name in trace.models))
    if len(models) <= 1:
        return {"models": models}
    position = {name: i for i, name in enumerate(models)}
    index = []
    for trace in traces:
        own = np.zeros(len(trace), dtype=np.int64) if trace.model_index is None else trace.model_index
        index.append(np.array([position[name] for name in trace.models], dtype=np.int64)[own])
    return {"models": models, "model_index": np.concatenate(index)}


def _prefixes(traces: Sequence[Trace], *, shared_ids: bool) -> dict[str, Any]:
    """The blocks of all prompts."""
    sizes = {trace.prefix_block_tokens for trace in traces if trace.prefix_block_tokens is not None}
    if len(sizes) > 1:
        raise ValueError(f"traces with prefix blocks of different sizes cannot be joined; got {sorted(sizes)}")
    if not sizes:
        return {}
    ids, counts, base = [], [], 0
    for trace in traces:
        if trace.prefix_blocks is None or trace.prefix_offsets is None:
            counts.append(np.zeros(len(trace), dtype=np.int64))
            continue
        ids.append(np.add(trace.prefix_blocks, base, dtype=np.int64))
        if not shared_ids:
            base = int(ids[-1].max(initial=base - 1)) + 1
        counts.append(np.diff(trace.prefix_offsets))
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return {"prefix_blocks": np.concatenate(ids), "prefix_offsets": offsets, "prefix_block_tokens": sizes.pop()}


def _of_all(traces: Sequence[Trace], name: str) -> IntArray | None:
    """A column that all *traces* have, or none."""
    columns = [getattr(trace, name) for trace in traces]
    if all(each is None for each in columns):
        return None
    if any(each is None for each in columns):
        raise ValueError(f"traces with and without {name} cannot be joined; give it to all of them, or to none")
    return np.concatenate(columns)


def _by_name(traces: Sequence[Trace], index: str, table: str) -> dict[str, Any]:
    """Rows of tables of names, joined by name."""
    rows = _of_all(traces, index)
    if rows is None:
        return {}
    names = tuple(dict.fromkeys(name for trace in traces for name in getattr(trace, table)))
    position = {name: row for row, name in enumerate(names)}
    moved = [np.array([position[name] for name in getattr(trace, table)])[getattr(trace, index)] for trace in traces]
    return {table: names, index: np.concatenate(moved)}


def _terms(traces: Sequence[Trace]) -> tuple[ServiceClass, ...]:
    """Terms of the classes of all *traces*, which say the same of a class that several have."""
    found: dict[str, ServiceClass] = {}
    for trace in traces:
        if bool(trace.terms) != bool(traces[0].terms):
            raise ValueError("traces with and without terms of their classes cannot be joined; declare all or none")
        for each in trace.terms:
            if found.setdefault(each.name, each) != each:
                raise ValueError(f"two traces say different things of class {each.name}; call one of them otherwise")
    return tuple(found.values())


def _follows(traces: Sequence[Trace]) -> Follows | None:
    """The requests that wait for others, rows counted through all *traces*."""
    if all(trace.follows is None for trace in traces):
        return None
    counts, rows, delays, base = [], [], [], 0
    for trace in traces:
        counts.append(np.zeros(len(trace), dtype=np.int64) if trace.follows is None else trace.follows.counts)
        if trace.follows is not None:
            rows.append(trace.follows.rows + base)
            delays.append(trace.follows.delay_ns)
        base += len(trace)
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return Follows(offsets=offsets, rows=np.concatenate(rows), delay_ns=np.concatenate(delays))
