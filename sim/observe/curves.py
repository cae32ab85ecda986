"""Counts of a deployment by itself, as quantities over time by instance, whatever its maker calls them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.errors import RooftraceError
from sim.observe.names import COUNTERS, GAUGES, LATENCIES, LENGTHS, Maker, Name, makers, makers_of
from sim.observe.samples import Series, labels_of

FloatArray = NDArray[np.float64]
_INSTANCE = ("pod", "instance", "kubernetes_pod_name", "hostname", "worker_id")
"""Labels that name a server, of which the first that is there counts."""
_RANK = ("engine", "engine_index", "dp_rank")
"""Labels that name an engine within a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity over time: totals of a counter since the first sample, its restarts bridged, or values of a gauge."""

    at_s: FloatArray
    values: FloatArray

    def at(self, instants_s: FloatArray) -> FloatArray:
        """Straight lines between samples, and what was first or last outside them."""
        return np.interp(instants_s, self.at_s, self.values)

    def mean_between(self, edges_s: FloatArray) -> FloatArray:
        """Means of samples by interval, n for n + 1 *edges_s*; NaN where one has no sample."""
        place = np.searchsorted(edges_s, self.at_s, side="right") - 1
        inside = (place >= 0) & (place < len(edges_s) - 1)
        n = np.bincount(place[inside], minlength=len(edges_s) - 1)
        total = np.bincount(place[inside], weights=self.values[inside], minlength=len(edges_s) - 1)
        return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def counter(series: Iterable[Series]) -> Curve:
    """The growth of counters together. Each that falls has begun anew at 0, as Prometheus takes it: nothing is lost but what it
    counted between its last sample and its end."""
    each = list(series)
    at_s = np.unique(np.concatenate([one.at_s for one in each]))
    total = np.zeros(len(at_s))
    for one in each:
        steps = np.diff(one.values)
        grown = np.concatenate(([0.0], np.cumsum(np.where(steps < 0, one.values[1:], steps))))
        total += np.interp(at_s, one.at_s, grown)
    return Curve(at_s=at_s, values=total)


def restarts(series: Series) -> int:
    """How often a counter began anew."""
    return int((np.diff(series.values) < 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A histogram over time: how many values, their sum, and how many were at most each of the upper edges of its buckets."""

    count: Curve
    total: Curve
    edges: FloatArray
    """Rising and finite; empty where only the mean is known."""
    below: tuple[Curve, ...] = ()

    def between(self, edges_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """How many values each interval has and their sum."""
        return np.diff(self.count.at(edges_s)), np.diff(self.total.at(edges_s))

    def mean(self, edges_s: FloatArray) -> FloatArray:
        """Means by interval; NaN where there is none."""
        n, total = self.between(edges_s)
        return np.where(n > 1e-9, total / np.maximum(n, 1e-9), np.nan)

    def buckets(self, begin_s: float, end_s: float) -> FloatArray:
        """Values in each bucket between two instants, the open one last."""
        span = np.array([begin_s, end_s])
        below = [float(np.diff(each.at(span))[0]) for each in (*self.below, self.count)]
        return np.maximum(np.diff(np.concatenate(([0.0], below))), 0.0)


ByInstance = Mapping[str, Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Quantities over time by instance: '' is an instance of which no label says the name."""

    makers: tuple[str, ...]
    """Titles of those whose names were found."""
    begin_s: float
    """The first sample, Unix time."""
    end_s: float
    scrape_s: float
    """The median time between samples."""
    counters: Mapping[str, ByInstance] = field(default_factory=dict)
    gauges: Mapping[str, ByInstance] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[str, Counted]] = field(default_factory=dict)
    kv_tokens: Mapping[str, float] = field(default_factory=dict)
    """The KV capacity that instances say."""
    kv_blocks: Mapping[str, float] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """A sentence for each quantity that was not found, with the names that were looked for."""
    notes: tuple[str, ...] = ()

    @property
    def instances(self) -> tuple[str, ...]:
        """Every instance that serves requests, by name."""
        tables = (*self.gauges.values(), *self.counters.values(), *self.histograms.values())
        return tuple(sorted({name for table in tables for name in table}))

    def grown(self, quantity: str, edges_s: FloatArray) -> FloatArray | None:
        """The growth of a counter over all instances by interval; None where no metric counts it."""
        curves = self.counters.get(quantity)
        return None if not curves else np.sum([np.diff(each.at(edges_s)) for each in curves.values()], axis=0)

    def level(self, quantity: str, instants_s: FloatArray) -> FloatArray | None:
        """A gauge at instants, added up over the instances that were there then; None where no metric has it."""
        curves = self.gauges.get(quantity)
        if not curves:
            return None
        near = 1.5 * self.scrape_s
        there = [(instants_s >= each.at_s[0] - near) & (instants_s <= each.at_s[-1] + near) for each in curves.values()]
        return np.sum(
            [np.where(up, each.at(instants_s), 0.0) for up, each in zip(there, curves.values(), strict=True)], axis=0
        )

    def in_flight(self, instants_s: FloatArray) -> FloatArray | None:
        """Requests that run or wait at instants; None where no metric says either."""
        names = ("in_flight",) if "in_flight" in self.gauges else ("running", "waiting")
        known = [level for name in names if (level := self.level(name, instants_s)) is not None]
        return np.sum(known, axis=0) if known else None

    def gauge(self, quantity: str, edges_s: FloatArray) -> FloatArray | None:
        """Means of a gauge by interval: the sum over instances, or of a share their mean."""
        curves = self.gauges.get(quantity)
        if not curves:
            return None
        means = np.array([each.mean_between(edges_s) for each in curves.values()])
        known = ~np.isnan(means)
        total = np.where(known, means, 0.0).sum(axis=0)
        of = known.sum(axis=0) if quantity in ("kv_used", "prefix_hit") else np.ones(means.shape[1])
        return np.where(known.any(axis=0), total / np.maximum(of, 1), np.nan)

    def mean(self, quantity: str, edges_s: FloatArray) -> tuple[FloatArray, FloatArray] | None:
        """How many values of a histogram each interval has over all instances, and their mean; None where no metric has it."""
        found = self.histograms.get(quantity)
        if not found:
            return None
        pairs = [each.between(edges_s) for each in found.values()]
        n, total = (np.sum([pair[i] for pair in pairs], axis=0) for i in range(2))
        return n, np.where(n > 1e-9, total / np.maximum(n, 1e-9), np.nan)


def observed(series: Sequence[Series], where: str, pick: str = "") -> Observed:
    """The quantities of *series*, which were read from *where*; RooftraceError where none has a name that is known.

    *pick* says how one deployment of several is picked, where that is not --match.
    """
    found = makers_of({each.metric for each in series})
    if not found:
        known = ", ".join(f"{each.title} ({min(each.metrics)}, ...)" for each in makers().values())
        raise RooftraceError(f"{where}: none of its {len(series)} series has a name that is known; looked for {known}")
    engines = [each for each in found if each.role == "engine"]
    if len(engines) > 1:
        raise RooftraceError(
            f"{where}: it has metrics of {' and '.join(each.title for each in engines)}, and one deployment is observed at a "
            f"time; {pick or 'pick it with --match LABEL=VALUE'}"
        )
    runs = list(labels_of(series, "run"))
    if len(runs) > 1:
        raise RooftraceError(
            f"{where}: it has {len(runs)} runs; {pick or f'pick one with --match run=NAME ({runs[0]}, ...)'}"
        )
    models = tuple(labels_of(series, "model_name"))
    if len(models) > 1:
        raise RooftraceError(
            f"{where}: it serves {', '.join(models)}; {pick or f'pick one with --match model_name={models[0]}'}"
        )
    reader = _Reader(series, found)
    times = [each.at_s for each in series]
    begin_s, end_s = min(float(at[0]) for at in times), max(float(at[-1]) for at in times)
    if end_s <= begin_s:
        raise RooftraceError(
            f"{where}: all samples are of one instant, and rates need two; give a scrape from before, or a range"
        )
    gaps = np.concatenate([np.diff(at) for at in times if len(at) > 1] or [np.array([end_s - begin_s])])
    return Observed(
        makers=tuple(each.title for each in found),
        begin_s=begin_s,
        end_s=end_s,
        scrape_s=float(np.median(gaps)),
        counters={key: of for key in COUNTERS if (of := reader.counters(key))},
        gauges={key: of for key in GAUGES if (of := reader.gauges(key))},
        histograms={key: of for key in (*LATENCIES, *LENGTHS) if (of := reader.histograms(key))},
        kv_tokens=reader.kv_tokens(),
        kv_blocks=reader.kv_blocks(),
        models=models,
        missing=tuple(reader.missing()),
        notes=tuple(reader.notes()),
    )


class _Reader:
    """Series by the names that makers have for quantities."""

    def __init__(self, series: Sequence[Series], found: Sequence[Maker]) -> None:
        self._found = found
        self._by_metric: dict[str, list[Series]] = {}
        for each in series:
            self._by_metric.setdefault(each.metric, []).append(each)

    def _of(self, name: Name, suffix: str = "") -> list[Series]:
        found = self._by_metric.get(name.metric + suffix, [])
        return [each for each in found if name.label is None or each.labels.get(name.label) == name.value]

    def _first(self, kind: str, quantity: str) -> tuple[Maker, list[Series]] | None:
        for maker in self._found:
            for name in getattr(maker, kind).get(quantity, ()):
                if series := self._of(name):
                    return maker, series
        return None

    def counters(self, quantity: str) -> dict[str, Curve]:
        found = self._first("counter", quantity)
        return {} if found is None else {key: counter(group) for key, group in _by_instance(found[1]).items()}

    def gauges(self, quantity: str) -> dict[str, Curve]:
        found = self._first("gauge", quantity)
        if found is None:
            return {}
        scale = found[0].scale.get(quantity, 1.0)
        return {
            key: Curve(at_s=group[0].at_s, values=scale * _added(group, mean=quantity in ("kv_used", "prefix_hit")))
            for key, group in _by_instance(found[1]).items()
        }

    def histograms(self, quantity: str) -> dict[str, Counted]:
        for maker in self._found:
            scale = maker.scale.get(quantity, 1.0)
            for name in maker.histogram.get(quantity, ()):
                if counts := self._of(name, "_count"):
                    return self._counted(name, counts, scale)
            pair = maker.pair.get(quantity, ())
            if pair and (totals := self._of(pair[0])) and (counts := self._of(pair[1])):
                sums = _by_instance(totals)
                return {
                    key: Counted(count=counter(group), total=_scaled(counter(sums[key]), scale), edges=np.empty(0))
                    for key, group in _by_instance(counts).items()
                    if key in sums
                }
        return {}

    def _counted(self, name: Name, counts: Sequence[Series], scale: float) -> dict[str, Counted]:
        sums, buckets = _by_instance(self._of(name, "_sum")), _by_instance(self._of(name, "_bucket"))
        found = {}
        for key, group in _by_instance(counts).items():
            if key not in sums:
                continue
            by_edge: dict[float, list[Series]] = {}
            for each in buckets.get(key, []):
                try:
                    edge = float(each.labels["le"])
                except (KeyError, ValueError):
                    raise RooftraceError(f"{name.metric}_bucket: a sample has no number in its label le") from None
                if math.isfinite(edge):
                    by_edge.setdefault(edge, []).append(each)
            edges = sorted(by_edge)
            found[key] = Counted(
                count=counter(group),
                total=_scaled(counter(sums[key]), scale),
                edges=np.array(edges) * scale,
                below=tuple(counter(by_edge[edge]) for edge in edges),
            )
        return found

    def kv_blocks(self) -> dict[str, float]:
        """KV blocks that instances say, by instance."""
        for maker in self._found:
            for info, blocks, _ in (tuple(each.metric for each in names) for names in maker.facts.values()):
                found: dict[str, float] = {}
                for each in self._by_metric.get(info, []):
                    if each.labels.get(blocks, "").isdigit():
                        found[_instance_of(each)] = float(each.labels[blocks])
                if found:
                    return found
        return {key: float(curve.values[-1]) for key, curve in self.gauges("kv_blocks").items()}

    def kv_tokens(self) -> dict[str, float]:
        """KV tokens that instances say, by instance."""
        return {key: float(curve.values[-1]) for key, curve in self.gauges("kv_tokens").items()}

    def missing(self) -> list[str]:
        """A sentence for each quantity that none of the makers that were found gives."""
        found = []
        for quantity, text in _NEEDED.items():
            if self.counters(quantity) or self.gauges(quantity) or self.histograms(quantity):
                continue
            looked = [name for maker in self._found for name in maker.names_of(quantity)]
            titles = " or ".join(maker.title for maker in self._found)
            found.append(
                f"{text} not found; looked for {', '.join(looked)}"
                if looked
                else f"{text} not found: {titles} has no metric for it"
            )
        return found

    def notes(self) -> list[str]:
        counted = {name.metric for maker in self._found for names in maker.counter.values() for name in names}
        n = max((restarts(each) for name in counted for each in self._by_metric.get(name, [])), default=0)
        return (
            [f"counters began anew {n} times: what was counted between a last scrape and a restart is lost"]
            if n
            else []
        )


_NEEDED = {
    "finished": "The number of finished requests was",
    "prompt_tokens": "Prompt tokens were",
    "output_tokens": "Output tokens were",
    "prompt_length": "The lengths of prompts were",
    "output_length": "The lengths of outputs were",
    "running": "Running requests were",
    "waiting": "Waiting requests were",
    "kv_used": "KV use was",
    "ttft": "TTFT was",
    "itl": "ITL was",
    "prefix_hits": "Prompt tokens found in the prefix cache were",
}


def _instance_of(series: Series) -> str:
    parts = [
        next((series.labels[label] for label in labels if label in series.labels), "") for labels in (_INSTANCE, _RANK)
    ]
    return "/".join(filter(None, parts))


def _by_instance(series: Iterable[Series]) -> dict[str, list[Series]]:
    found: dict[str, list[Series]] = {}
    for each in series:
        found.setdefault(_instance_of(each), []).append(each)
    return found


def _added(group: Sequence[Series], *, mean: bool) -> FloatArray:
    at_s = group[0].at_s
    values = np.array([np.interp(at_s, each.at_s, each.values) for each in group])
    return values.mean(axis=0) if mean else values.sum(axis=0)


def _scaled(curve: Curve, scale: float) -> Curve:
    return Curve(at_s=curve.at_s, values=curve.values * scale)
