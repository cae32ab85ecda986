"""Production traffic by client and window of time, as ServeGen publishes it: requests are drawn from its parameters.

ServeGen (alibaba/ServeGen, Apache-2.0) gives each client's rate, burstiness and histograms of lengths. Two tables are read:

* arrivals: model, client, window_start_s (windows of 600 s), rate_req_s, cv, family (Gamma, Weibull), shape, scale_s;
* lengths: model, client, window_start_s (windows of 6 h), field, value, probability.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import MinLen
from numpy.typing import NDArray

from workloads.columns import NS_PER_S, IntArray
from workloads.streams import FromZero, Positive, Stream, check_bounds, stream
from workloads.trace import Trace

WINDOW_S = 600
_PROMPT = {"input_tokens": None, "text_tokens": None, "image_tokens": "image_count", "audio_tokens": "audio_count",
           "video_tokens": "video_count"}  # fmt: skip
"""Fields that are tokens of the prompt, and how many times a request has each."""
_ARRIVALS = ("model", "client", "window_start_s", "rate_req_s", "family", "shape")
_LENGTHS = ("model", "client", "window_start_s", "field", "value", "probability")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeGen:
    """Production traffic drawn from the parameters that ServeGen publishes by client and window of time.

    Each client's arrivals in a window are as many as its rate says, at gaps drawn from its family and shape and stretched over
    the window. All lengths of a request are quantiles at one uniform number, so that long prompts have long answers; this is the
    publication's assumption, not a measurement. A prompt counts images as many times as it has them. `Trace.session` is the client.
    """

    arrivals: Path
    """Parquet file: model, client, window_start_s, rate_req_s, family, shape."""
    lengths: Path
    """Parquet file: model, client, window_start_s, field, value, probability."""
    model: Annotated[str, MinLen(1)]
    """The model's name in the files (m-small, deepseek-r1, mm-image), not in the scenario."""
    start_s: FromZero = 0.0
    """The beginning of the traffic in the recording."""
    duration_s: Positive = 86_400.0
    rate_scale: Positive = 1.0
    """Times as many requests of each client, in the same time."""
    clients: Annotated[tuple[int, ...], MinLen(1)] | None = None
    """Some of its clients; all of them where it is left out."""
    leave_out_without_lengths: bool = False
    """Leave out clients whose lengths were not published; otherwise they are an error that names their share."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def trace(self, seed: int) -> Trace:
        """The requests, with arrivals from 0. ValueError where the tables lack what is asked for."""
        table = _table(self.arrivals, _ARRIVALS, self.model)
        starts = table["window_start_s"]
        chosen = (starts + WINDOW_S > self.start_s) & (starts < self.start_s + self.duration_s)
        if self.clients is not None:
            known = set(table["client"].tolist())
            if strange := [client for client in self.clients if client not in known]:
                raise ValueError(f"{self.arrivals}: {self.model} has no client {strange[0]}; it has {len(known)}")
            chosen &= np.isin(table["client"], self.clients)
        histograms = _histograms(_table(self.lengths, _LENGTHS, self.model))
        chosen &= self._with_lengths(table, chosen, {client for client, _ in histograms})
        rows = np.flatnonzero(chosen)
        parts = [self._window({name: column[row] for name, column in table.items()}, histograms, seed) for row in rows]
        parts = [part for part in parts if len(part[0])]
        if not parts:
            raise ValueError(
                f"{self.arrivals}: no request of {self.model} between {self.start_s:g} and "
                f"{self.start_s + self.duration_s:g} s"
            )
        arrival, prompt, output, client = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(arrival, kind="stable")
        return Trace(
            arrival_ns=arrival[order],
            prompt_tokens=prompt[order],
            output_tokens=output[order],
            session=client[order],
            source=f"ServeGen {self.model}, {self.start_s:g} to {self.start_s + self.duration_s:g} s, "
            f"rate x {self.rate_scale:g}, seed {seed}",
        )

    def _with_lengths(
        self, table: dict[str, NDArray[Any]], chosen: NDArray[np.bool_], having: set[int]
    ) -> NDArray[np.bool_]:
        has = np.isin(table["client"], sorted(having))
        missing = chosen & ~has
        if missing.any() and not self.leave_out_without_lengths:
            share = float(table["rate_req_s"][missing].sum() / table["rate_req_s"][chosen].sum())
            n = len(set(table["client"][missing].tolist()))
            raise ValueError(
                f"{self.lengths}: {n} clients of {self.model} with {share:.0%} of the requests have no lengths; name others in "
                "clients, or leave_out_without_lengths"
            )
        return has

    def _window(
        self, row: dict[str, Any], histograms: dict[tuple[int, int], _Lengths], seed: int
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        client, start = int(row["client"]), int(row["window_start_s"])
        rng = stream(seed, Stream.ARRIVALS, client, start // WINDOW_S)
        wanted = float(row["rate_req_s"]) * self.rate_scale * WINDOW_S
        n = int(wanted) + int(rng.random() < wanted % 1)
        if n == 0:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty, empty
        gaps = _gaps(str(row["family"]), float(row["shape"]), n + 1, rng)
        # One gap more than requests: the last reaches from the last request to the end of the window.
        seconds = start + np.cumsum(gaps)[:-1] / max(float(gaps.sum()), 1e-300) * WINDOW_S - self.start_s
        uniform = stream(seed, Stream.PROMPT_LENGTHS, client, start // WINDOW_S).random(n)
        prompt, output = _lengths_at(histograms, client, start).quantiles(uniform)
        kept = (seconds >= 0) & (seconds < self.duration_s)
        arrival = np.rint(seconds * NS_PER_S).astype(np.int64)
        return arrival[kept], prompt[kept], output[kept], np.full(int(kept.sum()), client, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Histograms of one client and window by field: values in order, and their cumulative probability."""

    fields: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]

    def quantiles(self, uniform: NDArray[np.float64]) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens of requests at these quantiles: a token of each at least."""
        drawn = {name: self._at(name, uniform) for name in self.fields}
        prompt = np.zeros(len(uniform))
        for name, count in _PROMPT.items():
            if name in drawn:
                prompt += drawn[name] * (1 if count is None else drawn.get(count, 0))
        output = drawn.get("output_tokens", np.ones(len(uniform)))
        return np.maximum(np.rint(prompt), 1).astype(np.int64), np.maximum(np.rint(output), 1).astype(np.int64)

    def _at(self, name: str, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        values, cumulative = self.fields[name]
        return values[np.minimum(np.searchsorted(cumulative, uniform, side="right"), len(values) - 1)]


def _lengths_at(histograms: dict[tuple[int, int], _Lengths], client: int, start_s: int) -> _Lengths:
    """The row of the window that holds *start_s*, or else of the client's nearest."""
    own = [window for each, window in histograms if each == client]
    before = [window for window in own if window <= start_s]
    return histograms[client, max(before) if before else min(own)]


def _gaps(family: str, shape: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if family == "Gamma":
        return rng.standard_gamma(shape, n)
    if family == "Weibull":
        return rng.weibull(shape, n)
    raise ValueError(f"gaps of family {family!r} are not known; ServeGen has Gamma and Weibull")


def _histograms(table: dict[str, NDArray[Any]]) -> dict[tuple[int, int], _Lengths]:
    found: dict[tuple[int, int], _Lengths] = {}
    keys = np.lexsort((table["value"], table["field"], table["window_start_s"], table["client"]))
    columns = {name: column[keys] for name, column in table.items()}
    same = [columns[name][1:] == columns[name][:-1] for name in ("client", "window_start_s", "field")]
    edges = np.flatnonzero(~np.logical_and.reduce(same)) + 1
    for begin, end in zip(np.r_[0, edges], np.r_[edges, len(keys)], strict=True):
        mass = columns["probability"][begin:end].astype(float)
        cumulative = np.cumsum(mass) / mass.sum()
        at = (int(columns["client"][begin]), int(columns["window_start_s"][begin]))
        lengths = found.setdefault(at, _Lengths({}))
        lengths.fields[str(columns["field"][begin])] = (columns["value"][begin:end].astype(float), cumulative)
    return found


def _table(path: str | os.PathLike[str], columns: Sequence[str], model: str) -> dict[str, NDArray[Any]]:
    """The rows of *model* in a Parquet file, by column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    if missing := [name for name in columns if name not in table.column_names]:
        raise ValueError(f"{path} has no column {missing[0]}; ServeGen's tables have {', '.join(columns)}")
    models = _plain(table["model"])
    if model not in (names := set(models.tolist())):
        raise ValueError(f"{path}: {model!r} is not among its models: {', '.join(sorted(names))}")
    kept = table.filter(pa.array(models == model))
    return {name: _plain(kept[name]) for name in columns if name != "model"}


def _plain(column: Any) -> NDArray[Any]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    found = column.to_numpy()
    return found.astype(str) if found.dtype == object else found
