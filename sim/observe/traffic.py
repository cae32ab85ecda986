"""The traffic of a deployment, rebuilt from what it counted: when requests came, how long they were, and what prompts share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.errors import RooftraceError
from workloads import Stream, Trace, stream

if TYPE_CHECKING:
    from sim.observe.curves import Observed

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BLOCK_TOKENS = 16
NO_CLASS = "unknown"
"""The class of requests of which a log with classes says none, as in traces that are imported."""
MOST_REQUESTS = 2_000_000
MOST_INTERVALS = 2_000_000
"""Times between samples: a year of one each 15 s."""
_NS = 1e9
_POOLED = 300.0
"""Lengths of which a distribution is made."""
_TOP = 2.0
"""The open bucket of a histogram is taken to end at so many times its lower edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsOverTime:
    """Tokens of prompts or of outputs by interval of time: means, and how many values each bucket of a histogram has."""

    mean_tokens: FloatArray
    """Shape [n]; NaN where no request ended."""
    edges_tokens: FloatArray
    """Upper edges of the buckets; empty where only means are known."""
    buckets: FloatArray
    """Shape [n, edges + 1], the open bucket last."""

    @property
    def overall(self) -> float | None:
        """The mean over all intervals; None where it is not known."""
        known = np.isfinite(self.mean_tokens)
        if not known.any():
            return None
        n = self.buckets.sum(axis=1)
        return float(np.average(self.mean_tokens[known], weights=(n if n.sum() > 0 else np.ones(len(n)))[known]))

    @property
    def precision(self) -> str:
        """A sentence on what the buckets allow to be known of single lengths."""
        n = self.buckets.sum(axis=0)
        if not self.edges_tokens.size or not n.sum():
            return "only means are known; every request of an interval is taken to be as long"
        share = np.cumsum(n) / n.sum()
        middle = int(np.searchsorted(share, 0.5))
        low = 0.0 if middle == 0 else self.edges_tokens[middle - 1]
        high = self.edges_tokens[middle] if middle < len(self.edges_tokens) else np.inf
        used = int((n > 0).sum())
        return (
            f"means are exact, single lengths lie in {used} buckets: the median is between {low:,.0f} and "
            f"{'more' if np.isinf(high) else f'{high:,.0f}'} tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Requests that were logged one by one, in order of arrival: columns of one length."""

    at_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    cached_tokens: IntArray | None = None
    """Tokens of each prompt that were found in the prefix cache; -1 where the log does not say."""
    session: IntArray | None = None
    """The conversation of each; -1: none."""
    instance: tuple[str, ...] | None = None
    """The instance that served each."""
    service_class: tuple[str, ...] | None = None
    """The name of each one's class of service; NO_CLASS where a row says none."""
    ttft_s: FloatArray | None = None
    e2el_s: FloatArray | None = None
    notes: tuple[str, ...] = ()
    """A sentence for whatever the log said that is not in the columns."""

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraffic:
    """Requests over time. Arrays of shape [n] have a value an interval, n + 1 *edges_s* bound them."""

    begin_s: float
    """Unix time of the first edge."""
    edges_s: FloatArray
    """From 0."""
    arrivals: FloatArray
    """Requests that came in each interval; a fraction where a rate was measured."""
    prompt: LengthsOverTime
    output: LengthsOverTime
    prefix_hit: FloatArray
    """Share of prompt tokens found in the prefix cache; NaN where it is not known."""
    logged: Arrival | None = None
    """The requests themselves, where a log has them."""
    share_groups: int = 1
    """Beginnings that prompts share, where hits of the prefix cache are counted."""
    in_flight: int | None = None
    """The most requests that clients have in flight, beyond which they wait to send; None: they do not wait."""
    how: tuple[str, ...] = ()
    """How arrivals and lengths were found, and what they cannot say, a sentence each."""

    @property
    def rate_per_s(self) -> FloatArray:
        """Requests a second by interval."""
        return self.arrivals / np.diff(self.edges_s)

    @property
    def requests(self) -> int:
        return round(float(self.arrivals.sum())) if self.logged is None else len(self.logged)

    def workload(self, seed: int) -> Trace:
        """The requests: those of the log, or as many as came in each interval at times drawn evenly within it, with lengths drawn
        from its buckets so that its means are kept. RooftraceError where there is none."""
        if self.logged is not None:
            return _as_logged(self.logged)
        return _drawn(self, seed)


def observed_traffic(
    seen: Observed, *, since_s: float | None = None, until_s: float | None = None, every_s: float | None = None,
    prompt_tokens: float | None = None, output_tokens: float | None = None, logged: Arrival | None = None,
) -> ObservedTraffic:  # fmt: skip
    """The traffic of *seen* between two instants, by intervals of *every_s* (by default as far apart as scrapes were).

    Requests that came are those that finished and those more that are in flight; where no metric counts the finished, first tokens,
    and where none counts requests, tokens over the mean lengths that are given. *prompt_tokens*, *output_tokens*: means, where
    the deployment counts none. RooftraceError names what is missing.
    """
    begin_s = seen.begin_s if since_s is None else max(since_s, seen.begin_s)
    end_s = seen.end_s if until_s is None else min(until_s, seen.end_s)
    every_s = seen.scrape_s if every_s is None else every_s
    n = round(min((end_s - begin_s) / max(every_s, 1e-9), 1e18))
    if n > MOST_INTERVALS:
        raise RooftraceError(
            f"samples run from {begin_s:.6g} to {end_s:.6g} s, {every_s:.3g} s apart: more than {MOST_INTERVALS:,}; is the time of "
            "one of them wrong? --since and --until narrow them"
        )
    if n < 1 and end_s > begin_s:
        raise RooftraceError(
            f"{end_s - begin_s:.3g} s are observed, less than half of the time between two samples ({every_s:.3g} s); move --since "
            "or --until"
        )
    if n < 1:
        raise RooftraceError(
            f"nothing lies between the two instants: samples run from {seen.begin_s:.0f} to {seen.end_s:.0f} (Unix time)"
        )
    edges_s = begin_s + (end_s - begin_s) * np.arange(n + 1) / n
    if logged is not None and not (prompt_tokens is output_tokens is None):
        raise RooftraceError(
            "--prompt-tokens and --output-tokens are for metrics alone: a log says the lengths of each request"
        )
    how: list[str] = []
    # A log says the lengths of its requests, so that those of the metrics are not needed.
    of_lengths = how if logged is None else []
    prompt = _lengths(seen, "prompt_length", "prompt_tokens", edges_s, prompt_tokens, of_lengths)
    output = _lengths(seen, "output_length", "output_tokens", edges_s, output_tokens, of_lengths)
    if logged is None:
        arrivals = _arrivals(seen, edges_s, prompt, output, how)
    else:
        every = len(logged)
        logged = _between(logged, begin_s, end_s)
        how.extend(logged.notes)
        if len(logged) < every:
            how.append(f"{every - len(logged):,} requests of the log came outside the time that is observed")
        arrivals = np.histogram(logged.at_s, edges_s)[0].astype(np.float64)
        how.append(f"{len(logged):,} requests are those of the log, sent when they were")
        logged = replace(logged, at_s=logged.at_s - begin_s)
    return ObservedTraffic(
        begin_s=begin_s,
        edges_s=edges_s - begin_s,
        arrivals=arrivals,
        prompt=prompt,
        output=output,
        prefix_hit=_hit(seen, edges_s, how),
        logged=logged,
        how=tuple(how),
    )


def _between(logged: Arrival, begin_s: float, end_s: float) -> Arrival:
    return taken(logged, np.flatnonzero((logged.at_s >= begin_s) & (logged.at_s <= end_s)))


def taken(logged: Arrival, rows: IntArray) -> Arrival:
    """The *rows* of a log."""
    return Arrival(
        at_s=logged.at_s[rows],
        prompt_tokens=logged.prompt_tokens[rows],
        output_tokens=logged.output_tokens[rows],
        cached_tokens=None if logged.cached_tokens is None else logged.cached_tokens[rows],
        session=None if logged.session is None else logged.session[rows],
        instance=None if logged.instance is None else tuple(logged.instance[row] for row in rows.tolist()),
        service_class=None
        if logged.service_class is None
        else tuple(logged.service_class[row] for row in rows.tolist()),
        ttft_s=None if logged.ttft_s is None else logged.ttft_s[rows],
        e2el_s=None if logged.e2el_s is None else logged.e2el_s[rows],
        notes=logged.notes,
    )


def _arrivals(
    seen: Observed, edges_s: FloatArray, prompt: LengthsOverTime, output: LengthsOverTime, how: list[str]
) -> FloatArray:
    """Requests that came by interval, by the first way that the counters allow."""
    came = seen.grown("came", edges_s)
    if came is not None:
        how.append("requests are those that the gateway counted as they came")
        return came
    in_flight = seen.in_flight(edges_s)
    ended = seen.grown("finished", edges_s)
    first = seen.mean("ttft", edges_s)
    if ended is None and first is not None:
        ended, in_flight = first[0], seen.level("waiting", edges_s)
        how.append("requests that came are first tokens, and those that wait more than before")
    elif ended is not None:
        how.append("requests that came are those that finished, and those that are in flight more than before")
    else:
        ended = _by_tokens(seen, edges_s, prompt, output, how)
    if in_flight is None:
        how.append("requests in flight are not counted, so that requests count when they end, not when they come")
        return ended
    return _not_negative(ended + np.diff(in_flight))


def _by_tokens(
    seen: Observed, edges_s: FloatArray, prompt: LengthsOverTime, output: LengthsOverTime, how: list[str]
) -> FloatArray:
    """Requests that ended by interval, from counts of tokens alone."""
    for quantity, lengths in (("output_tokens", output), ("prompt_tokens", prompt)):
        tokens = seen.grown(quantity, edges_s)
        if tokens is not None and np.isfinite(lengths.mean_tokens).any():
            how.append(
                f"requests that ended are {quantity.replace('_', ' ')} over their mean, for requests are not counted"
            )
            return tokens / np.nanmean(lengths.mean_tokens)
    raise RooftraceError(
        "no metric counts requests (finished, first tokens), and without mean lengths tokens do not say how many there were; give "
        "--prompt-tokens and --output-tokens, or a log of requests"
    )


def _not_negative(arrivals: FloatArray) -> FloatArray:
    """The same total without intervals below 0, which gauges and counters of slightly different instants give: what is missing is
    taken from the intervals before."""
    total = np.maximum.accumulate(np.concatenate(([0.0], np.cumsum(arrivals))))
    return np.diff(total)


def _lengths(
    seen: Observed, histogram: str, counted: str, edges_s: FloatArray, given: float | None, how: list[str]
) -> LengthsOverTime:
    found = seen.histograms.get(histogram)
    n = len(edges_s) - 1
    what = "prompts" if counted == "prompt_tokens" else "outputs"
    if found and given is None:
        mean = seen.mean(histogram, edges_s)
        assert mean is not None
        edges = next(iter(found.values())).edges
        alike = [each for each in found.values() if len(each.edges) == len(edges) and (each.edges == edges).all()]
        if len(alike) < len(found):
            how.append(f"instances count {what} in different buckets: only means are used")
            edges = np.empty(0)
        buckets = np.zeros((n, len(edges) + 1))
        for row, (low, high) in enumerate(itertools.pairwise(edges_s)):
            buckets[row] = sum((each.buckets(low, high) for each in alike if edges.size), np.zeros(len(edges) + 1))
        lengths = LengthsOverTime(mean_tokens=mean[1], edges_tokens=edges, buckets=buckets)
        how.append(f"{what}: {lengths.precision}")
        return lengths
    mean_tokens = np.full(n, np.nan if given is None else given)
    if given is None:
        tokens = seen.grown(counted, edges_s)
        requests = seen.grown("finished", edges_s)
        if tokens is not None and requests is not None and requests.sum() > 0:
            mean_tokens = np.full(n, tokens.sum() / requests.sum())
            how.append(f"{what}: tokens over requests, one mean for all; how they spread is not known")
    else:
        how.append(f"{what}: {given:g} tokens each, as given")
    return LengthsOverTime(mean_tokens=mean_tokens, edges_tokens=np.empty(0), buckets=np.zeros((n, 1)))


def _hit(seen: Observed, edges_s: FloatArray, how: list[str]) -> FloatArray:
    """The share of prompt tokens that were found, by interval.

    vLLM counts queries again each time that it tries to schedule a request that does not fit: hits over prompt tokens say more,
    while they are no more than all.
    """
    n = len(edges_s) - 1
    hits = seen.grown("prefix_hits", edges_s)
    if hits is None:
        gauge = seen.gauge("prefix_hit", edges_s)
        return np.full(n, np.nan) if gauge is None else gauge
    prompts, queries = (seen.grown(name, edges_s) for name in ("prompt_tokens", "prefix_queries"))
    of = prompts if prompts is not None and hits.sum() <= prompts.sum() else queries
    if of is None or of.sum() <= 0:
        return np.full(n, np.nan)
    if queries is not None and prompts is not None and queries.sum() > 1.05 * prompts.sum() > 0:
        how.append(
            f"the prefix cache was asked for {queries.sum() / prompts.sum():.1f} times the prompt tokens, since requests that do "
            "not fit ask again: hits are over prompt tokens"
        )
    return np.where(of > 0, np.clip(hits / np.maximum(of, 1e-9), 0.0, 1.0), np.nan)


def _drawn(traffic: ObservedTraffic, seed: int) -> Trace:
    counts = _whole(traffic.arrivals)
    n = int(counts.sum())
    if n < 1:
        raise RooftraceError("no request came in the time that is observed")
    if n > MOST_REQUESTS:
        raise RooftraceError(
            f"{n:,} requests are more than the {MOST_REQUESTS:,} that are simulated; narrow --since and --until"
        )
    rng = stream(seed, Stream.ARRIVALS)
    interval = np.repeat(np.arange(len(counts)), counts)
    widths_s = np.diff(traffic.edges_s)
    at_s = traffic.edges_s[interval] + rng.random(n) * widths_s[interval]
    order = np.argsort(at_s, kind="stable")
    at_s, interval = at_s[order], interval[order]
    prompt = _tokens(traffic.prompt, interval, stream(seed, Stream.PROMPT_LENGTHS), "prompts", "--prompt-tokens")
    output = _tokens(traffic.output, interval, stream(seed, Stream.OUTPUT_LENGTHS), "outputs", "--output-tokens")
    hit = np.nan_to_num(traffic.prefix_hit)[interval]
    shared = np.minimum((hit * prompt / BLOCK_TOKENS).round().astype(np.int64), (prompt - 1) // BLOCK_TOKENS)
    group = stream(seed, Stream.PROMPTS).integers(0, traffic.share_groups, n)
    return _trace(at_s, prompt, output, shared, group, f"observed traffic, seed {seed}")


def _as_logged(logged: Arrival) -> Trace:
    n = len(logged)
    if n < 1:
        raise RooftraceError("the log has no request in the time that is observed")
    cached = np.zeros(n, np.int64) if logged.cached_tokens is None else np.maximum(logged.cached_tokens, 0)
    prompt = np.maximum(logged.prompt_tokens, 1)
    shared = np.minimum(cached // BLOCK_TOKENS, (prompt - 1) // BLOCK_TOKENS)
    session = np.full(n, -1, np.int64) if logged.session is None else logged.session
    output = np.maximum(logged.output_tokens, 1)
    trace = _trace(logged.at_s, prompt, output, shared, session, "the requests of the log", logged.session)
    if logged.service_class is None:
        return trace
    place = {name: at for at, name in enumerate(dict.fromkeys(logged.service_class))}
    return replace(trace, classes=tuple(place), class_index=np.array([place[name] for name in logged.service_class]))


def _trace(
    at_s: FloatArray, prompt: IntArray, output: IntArray, shared: IntArray, group: IntArray, source: str,
    session: IntArray | None = None,
) -> Trace:  # fmt: skip
    """A trace of prompts that begin with so many *shared* blocks, and are their own behind them.

    The shared ones are of a beginning that its *group* has in common; with a *session*, of the prompt before it in its session.
    """
    prefixes = {}
    if shared.any():
        blocks = prompt // BLOCK_TOKENS
        offsets = np.concatenate(([0], np.cumsum(blocks)))
        longest = int(shared.max())
        ids = np.arange(int(offsets[-1]), dtype=np.int64) + (int(group.max()) + 2) * longest
        latest: dict[int, int] = {}
        for row, (of, k) in enumerate(zip(group.tolist(), shared.tolist(), strict=True)):
            begin = int(offsets[row])
            before = latest.get(of) if session is not None and of >= 0 else None
            if before is None:
                ids[begin : begin + k] = (of + 1 if session is None else 0) * longest + np.arange(k)
            else:
                k = min(k, int(blocks[before]))
                ids[begin : begin + k] = ids[offsets[before] : offsets[before] + k]
            latest[of] = row
        prefixes = {"prefix_blocks": ids, "prefix_offsets": offsets, "prefix_block_tokens": BLOCK_TOKENS}
    return Trace(
        arrival_ns=np.rint(at_s * _NS).astype(np.int64),
        prompt_tokens=prompt,
        output_tokens=output,
        session=session,
        source=source,
        **prefixes,
    )


def _whole(arrivals: FloatArray) -> IntArray:
    """Whole numbers whose running totals are those of *arrivals*, rounded."""
    return np.diff(np.concatenate(([0], np.rint(np.cumsum(arrivals)).astype(np.int64))))


def _tokens(lengths: LengthsOverTime, interval: IntArray, rng: np.random.Generator, what: str, option: str) -> IntArray:
    """Lengths of requests by the interval that each came in.

    Within a bucket lengths are drawn evenly; then those of a pool (`_pools`) are brought to its mean by moving all of them within
    their buckets by the same share, towards one end.
    """
    if not np.isfinite(lengths.mean_tokens).any():
        raise RooftraceError(f"no metric says how long {what} are; give their mean with {option}, or a log of requests")
    edges = lengths.edges_tokens
    pool, counts, means = _pools(lengths)
    mine_of = pool[interval]
    if not edges.size or not counts.sum():
        # Rounded up as often as the fraction says, so that the mean stays.
        return np.maximum(np.floor(means[mine_of] + rng.random(len(interval))), 1).astype(np.int64)
    low = np.concatenate(([0.0], edges))
    high = np.concatenate((edges, [_TOP * edges[-1]]))
    found = np.empty(len(interval), np.int64)
    for at in np.unique(mine_of):
        mine = np.flatnonzero(mine_of == at)
        bucket = rng.choice(len(counts[at]), size=len(mine), p=counts[at] / counts[at].sum())
        found[mine] = _moved(low[bucket], high[bucket], float(means[at]), rng)
    return found


def _pools(lengths: LengthsOverTime) -> tuple[IntArray, FloatArray, FloatArray]:
    """Intervals joined until each pool has `_POOLED` lengths, since a request is counted when it ends and not when it comes: the
    pool of each interval, and the buckets and the mean of each pool."""
    n = lengths.buckets.sum(axis=1)
    means = np.nan_to_num(lengths.mean_tokens)
    if not n.sum():
        known = np.isfinite(lengths.mean_tokens)
        return np.zeros(len(n), np.int64), np.zeros((1, 1)), np.array([means[known].mean()])
    pool = np.minimum(np.cumsum(n) - n, n.sum() - 1e-9) // max(min(_POOLED, float(n.sum())), 1e-9)
    # The rest behind the last whole pool belongs to it.
    pool = np.unique(np.minimum(pool, max(n.sum() // _POOLED - 1, 0)), return_inverse=True)[1].astype(np.int64)
    buckets = np.zeros((int(pool.max()) + 1, lengths.buckets.shape[1]))
    np.add.at(buckets, pool, lengths.buckets)
    total = np.bincount(pool, weights=n * means)
    return pool, buckets, total / buckets.sum(axis=1)


def _moved(low: FloatArray, high: FloatArray, mean: float, rng: np.random.Generator) -> IntArray:
    """One length for each bucket from above *low* to *high*, with their *mean* as far as buckets allow."""
    values = low + rng.random(len(low)) * (high - low)
    now = float(values.mean())
    towards = high if mean > now else low
    reach = float(towards.mean()) - now
    share = 0.0 if abs(reach) < 1e-9 else float(np.clip((mean - now) / reach, 0.0, 1.0))
    values = values + share * (towards - values)
    return np.maximum(np.floor(values + rng.random(len(low))), 1).astype(np.int64)


def sentences(traffic: ObservedTraffic) -> Iterator[str]:
    """How the traffic was found, and what its replay takes for granted."""
    yield from traffic.how
    if traffic.logged is None:
        yield "within an interval requests are sent at times drawn evenly, and a request's two lengths independently"
        if np.nan_to_num(traffic.prefix_hit).any():
            groups = "one beginning" if traffic.share_groups == 1 else f"{traffic.share_groups} beginnings"
            yield f"prompts share {groups} as long as the hits say; --prefix-groups says otherwise"
