"""The content of a result file, asked for by name and kind: numbers that are numbers, and one sentence where they are not."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sim.bench.measured import MEDIAN, BenchRun, Latency, Lengths, Offered, RequestRows
from sim.errors import RooftraceError
from sim.text import shown

LARGEST = 1e15
"""Beyond it no time in seconds, no count and no rate of a benchmark lies."""


STATISTICS = {name: name for name in ("mean", "median", "std", "min", "max")}
QUANTITIES = ("ttft", "tpot", "itl", "e2el")


class Unreadable(RooftraceError, ValueError):
    """A file, or a part of one, that no measured run can be made of; the message is one sentence."""


class Fields:
    """A mapping of a file with the path that leads to it, for errors."""

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, Mapping):
            raise Unreadable(f"{where or 'the file'} is a mapping of names to values; got {shown(values)}")
        self.values: Mapping[str, Any] = values
        self.where = where

    def path(self, key: str) -> str:
        """The dotted name of *key*."""
        return f"{self.where}.{key}" if self.where else key

    def inner(self, key: str) -> Fields:
        """The mapping at *key*; an empty one where it is absent or null."""
        value = self.values.get(key)
        return Fields({} if value is None else value, self.path(key))

    def items(self, key: str) -> list[Any]:
        """The list at *key*; an empty one where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return []
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise Unreadable(f"{self.path(key)} is a list; got {shown(value)}")
        return list(value)

    def number(self, key: str, *, least: float | None = 0.0, scale: float = 1.0) -> float | None:
        """The number at *key* times *scale*; None where it is absent, null or not a number by its own word (NaN)."""
        return number(self.values.get(key), self.path(key), least=least, scale=scale)

    def first(self, *keys: str, least: float | None = 0.0, scale: float = 1.0) -> float | None:
        """The number at the first of *keys* that is there."""
        for key in keys:
            value = self.number(key, least=least, scale=scale)
            if value is not None:
                return value
        return None

    def count(self, key: str) -> int | None:
        """The whole number at *key*; None where it is absent."""
        return count(self.values.get(key), self.path(key))

    def statistics(self, names: Mapping[str, str] = STATISTICS, *, scale: float = 1.0) -> dict[str, float]:
        """The figures of a quantity by statistic: those at the keys of *names*, and those at p99 and the like."""
        found = {key: names.get(key, key if re.fullmatch(r"p\d+(\.\d+)?", str(key)) else None) for key in self.values}
        values = {statistic: self.number(key, scale=scale) for key, statistic in found.items() if statistic is not None}
        return {statistic: value for statistic, value in values.items() if value is not None}

    def text(self, key: str) -> str | None:
        """The word at *key*; None where it is absent, null or empty."""
        value = self.values.get(key)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise Unreadable(f"{self.path(key)} is text; got {shown(value)}")
        return value


def number(value: Any, name: str, *, least: float | None = 0.0, scale: float = 1.0) -> float | None:
    """*value* as a number times *scale*; None for None and NaN. `Unreadable` for what is none, and for a time or count below
    *least* or beyond `LARGEST`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable(f"{name} is a number; got {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        raise Unreadable(f"{name} is a number of reasonable size; got one of {len(str(abs(value)))} digits") from None
    if math.isnan(found):
        return None
    if least is not None and found < least:
        clock = re.search(r"_ms$|(?<!per)_s$|latenc|ttft|tpot|itl|time", name)
        backwards = " (a clock that ran backwards?)" if clock else ""
        raise Unreadable(f"{name} is at least {least:g}; got {found:g}{backwards}")
    if not abs(found) * scale <= LARGEST:
        raise Unreadable(f"{name} is a finite number of reasonable size; got {found:g}")
    return found * scale


def count(value: Any, name: str) -> int | None:
    """*value* as a whole number from 0; None for None."""
    found = number(value, name)
    if found is None:
        return None
    if found != int(found):
        raise Unreadable(f"{name} is a whole number; got {found:g}")
    return int(found)


def whole_number(value: float | None) -> int | None:
    """*value* without its fraction; None for None."""
    return None if value is None else int(value)


def rate(value: Any, name: str) -> float | None:
    """A request rate: a number above 0, or infinity ('inf', Infinity): all at once."""
    if value is None:
        return None
    if isinstance(value, str):
        if value.strip().lower() in ("inf", "infinity"):
            return math.inf
        raise Unreadable(f"{name} is a number of requests a second or inf; got {shown(value)}")
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return math.inf
    found = number(value, name, least=None)
    if found is not None and found <= 0:
        raise Unreadable(f"{name} is above 0 or inf; got {found:g}")
    return found


def burstiness(value: Any, name: str) -> float | None:
    """The shape of gamma-distributed gaps: above 0, or infinity."""
    return rate(value, name)


def column(values: Sequence[Any], name: str, *, scale: float = 1.0, least: float | None = None) -> list[float]:
    """A list of numbers, NaN for null."""
    found = []
    for at, value in enumerate(values):
        each = number(value, f"{name}[{at}]", least=least, scale=scale)
        found.append(math.nan if each is None else each)
    return found


def latency(found: Mapping[str, float], *, how: str = "as given", count: int | None = None) -> Latency | None:
    """A latency of *found*: statistic -> seconds; None where nothing is known."""
    if not found:
        return None
    quantiles = {share(name): value for name, value in found.items() if name[0] == "p"}
    median = found.get("median", quantiles.pop(MEDIAN, None))
    quantiles.pop(MEDIAN, None)
    return Latency(
        mean_s=found.get("mean"),
        median_s=median,
        std_s=found.get("std"),
        min_s=found.get("min"),
        max_s=found.get("max"),
        quantiles_s=dict(sorted(quantiles.items())),
        count=count,
        how=how,
    )


def lengths(found: Mapping[str, float]) -> Lengths:
    """Lengths of *found*: statistic -> tokens."""
    quantiles = {share(name): value for name, value in found.items() if name[0] == "p"}
    if "median" in found:
        quantiles[MEDIAN] = found["median"]
    return Lengths(
        mean_tokens=found.get("mean"),
        std_tokens=found.get("std"),
        min_tokens=found.get("min"),
        max_tokens=found.get("max"),
        quantiles_tokens=dict(sorted(quantiles.items())),
    )


def share(name: str) -> float:
    """0.99 for 'p99', 0.999 for 'p99.9'."""
    try:
        found = float(name.removeprefix("p")) / 100
    except ValueError:
        raise Unreadable(f"{name[:20]} is not a percentile, such as p99") from None
    if not 0 <= found <= 1:
        raise Unreadable(f"percentiles lie between p0 and p100; got {name[:20]}")
    return round(found, 12)


def config(**values: Any) -> dict[str, str | int | float | bool]:
    """The entries of *values* that are there, words and numbers alone."""
    return {key: value for key, value in values.items() if isinstance(value, str | int | float | bool) and value != ""}


def checked(run: BenchRun) -> BenchRun:
    """*run*, its counts and times compared with each other; what does not add up becomes a note.

    `Unreadable` where no request completed: nothing was measured.
    """
    if run.completed == 0:
        raise Unreadable("no request completed, so that nothing was measured")
    notes = list(_contradictions(run))
    if run.failed and run.completed:
        notes.append(
            f"{run.failed} of {run.completed + run.failed} requests failed; the latencies are of those that completed"
        )
    return run.noting(*notes) if notes else run


def _contradictions(run: BenchRun) -> Iterable[str]:
    if run.duration_s is not None and run.duration_s <= 0:
        raise Unreadable(f"duration is above 0; got {run.duration_s:g} s")
    # Counts are of what the figures are over.
    window_s = (run.duration_s or 0.0) - (run.offered.warmup_s or 0.0) - (run.offered.cooldown_s or 0.0)
    for what, amount, per_s in (
        ("requests", run.completed, run.requests_per_s),
        ("input tokens", run.input_tokens, run.input_tokens_per_s),
        ("output tokens", run.output_tokens, run.output_tokens_per_s),
    ):
        if amount and per_s and window_s > 0 and abs(per_s * window_s / amount - 1) > 0.05:
            true = amount / window_s
            yield f"{amount:,} {what} in {window_s:.4g} s are {true:.4g} a second; the file says {per_s:.4g}"
    if run.output_tokens_per_s and run.input_tokens_per_s and run.total_tokens_per_s:
        total = run.output_tokens_per_s + run.input_tokens_per_s
        if abs(total / run.total_tokens_per_s - 1) > 0.05:
            yield f"{total:.4g} input and output tokens/s do not add up to the {run.total_tokens_per_s:.4g} that the file gives"
    for side, amount in (("prompt", run.input_tokens), ("output", run.output_tokens)):
        each = getattr(run.offered, side).each_tokens
        if each and amount and abs(sum(each) / amount - 1) > 0.01:
            yield f"{side} tokens of the requests add up to {sum(each):,}; the file gives {amount:,}"
    yield from _contradictory_latencies(run)


_POSSIBLE_S = {"ttft": (1e-3, math.inf), "tpot": (1e-4, 10.0)}
"""Between which a mean or median lies: a step of the smallest models takes longer than the least, and beyond the most nobody reads.
Figures beyond them are most often of another unit than they are said to be."""


def _contradictory_latencies(run: BenchRun) -> Iterable[str]:
    for name in ("ttft", "tpot", "itl", "e2el"):
        found: Latency | None = getattr(run, name)
        if found is None:
            continue
        middle = found.mean_s if found.mean_s is not None else found.median_s
        least, most = _POSSIBLE_S.get(name, (0.0, math.inf))
        of_one_token = name == "tpot" and run.offered.output.mean_tokens == 1
        if middle is not None and not least <= middle <= most and not of_one_token:
            yield f"a {name.upper()} of {middle * 1e3:.4g} ms is of no server: is its unit another than the file says?"
        points = sorted(found.quantiles_s.items())
        if found.median_s is not None:
            points = sorted([*points, (MEDIAN, found.median_s)])
        if any(late < early * (1 - 1e-6) - 1e-9 for (_, early), (_, late) in itertools.pairwise(points)):
            yield f"percentiles of {name.upper()} do not rise"
    if run.ttft and run.e2el and run.ttft.mean_s and run.e2el.mean_s and run.ttft.mean_s > run.e2el.mean_s * 1.0001:
        yield f"the mean TTFT, {run.ttft.mean_s:.4g} s, is above the mean latency of whole requests, {run.e2el.mean_s:.4g} s"


def rows_of(
    *,
    sent_s: ArrayLike,
    ttft_s: ArrayLike,
    e2el_s: ArrayLike,
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    failed: ArrayLike,
) -> tuple[RequestRows, list[str]]:
    """Rows of requests with what cannot be so taken out of them, and a note on each kind of it."""
    sent, ttft, e2el = (np.asarray(values, np.float64) for values in (sent_s, ttft_s, e2el_s))
    sent = sent - np.nanmin(sent) if np.isfinite(sent).any() else sent
    bad = np.asarray(failed, bool)
    notes = []
    with np.errstate(invalid="ignore"):
        backwards = ~bad & ((ttft < 0) | (e2el < 0) | (e2el < ttft - 1e-6))
    if backwards.any():
        notes.append(
            f"{int(backwards.sum())} requests end before they begin, by their clocks, and are counted as failed"
        )
    bad = bad | backwards
    prompt, output = (
        np.where(np.isfinite(values), values, -1).astype(np.int64)
        for values in (np.asarray(prompt_tokens, np.float64), np.asarray(output_tokens, np.float64))
    )
    rows = RequestRows(
        sent_s=sent,
        ttft_s=np.where(bad, np.nan, ttft),
        e2el_s=np.where(bad, np.nan, e2el),
        prompt_tokens=prompt,
        output_tokens=output,
        failed=bad,
    )
    return rows, notes


def latencies_of(rows: RequestRows) -> dict[str, Any]:
    """TTFT, TPOT and E2EL of the rows that did not fail."""
    return {name: of_values(getattr(rows, f"{name}_s")[~rows.failed]) for name in ("ttft", "tpot", "e2el")}


def of_values(values: Any) -> Latency | None:
    """The usual figures of single values in seconds, NaN left out; None where there is none."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    shares = (0.1, 0.25, 0.75, 0.9, 0.95, 0.99)
    return Latency(
        mean_s=float(values.mean()),
        median_s=float(np.median(values)),
        std_s=float(values.std()),
        min_s=float(values.min()),
        max_s=float(values.max()),
        quantiles_s=dict(zip(shares, map(float, np.quantile(values, shares)), strict=True)),
        count=int(values.size),
        how="from rows",
    )


def split_gaps(first_s: Sequence[float], gaps_s: Sequence[Sequence[float]]) -> dict[str, Latency | None]:
    """The gaps between the tokens of requests whose first tokens came at *first_s*: those in which another's first token came, and
    the others. First tokens count within half a usual gap around a step's end, for clients see tokens of one step apart."""
    lengths = np.array([len(gaps) for gaps in gaps_s], np.int64)
    gaps = np.array([gap for each in gaps_s for gap in each], np.float64)
    if not (gaps.size and np.isfinite(gaps).all() and np.isfinite(first_s).all()):
        return {}
    total = np.concatenate(([0.0], np.cumsum(gaps)))
    begin = np.cumsum(lengths) - lengths
    ends = np.repeat(np.asarray(first_s, np.float64) - total[begin], lengths) + total[1:]
    late_s, firsts = 0.5 * float(np.median(gaps)), np.sort(first_s)
    came = np.searchsorted(firsts, ends + late_s, "right") - np.searchsorted(firsts, ends - gaps + late_s, "right")
    return {"itl_prompt": of_values(gaps[came > 0]), "itl_decode": of_values(gaps[came == 0])}


def run_of_rows(rows: RequestRows, notes: Iterable[str], **known: Any) -> BenchRun:
    """The run whose requests *rows* are, sent when they were; *known* are further facts of it, its name among them. `Unreadable`
    where no request completed."""
    good = ~rows.failed
    if not good.any():
        raise Unreadable("no request completed, so that nothing was measured")
    ends = (rows.sent_s + rows.e2el_s)[good]
    duration = float(np.nanmax(ends)) if np.isfinite(ends).any() else 0.0
    prompt, output = (each[good & (each > 0)] for each in (rows.prompt_tokens, rows.output_tokens))
    output_tokens = int(output.sum()) or None
    offered = Offered(
        requests=len(rows),
        prompt=Lengths(each_tokens=tuple(prompt.tolist())),
        output=Lengths(each_tokens=tuple(output.tolist())),
        **known.pop("offered", {}),
    )
    completed = int(good.sum())
    return checked(
        BenchRun(
            offered=offered,
            duration_s=duration if duration > 0 else None,
            completed=completed,
            failed=len(rows) - completed,
            input_tokens=int(prompt.sum()) or None,
            output_tokens=output_tokens,
            requests_per_s=completed / duration if duration > 0 else None,
            output_tokens_per_s=output_tokens / duration if duration > 0 and output_tokens else None,
            rows=rows,
            notes=tuple(notes),
            **latencies_of(rows),
            **known,
        )
    )
