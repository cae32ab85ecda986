"""The requests that the clients of a measured run send, as a workload of the simulator: the same load drawn anew for each seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from sim.bench.fields import latencies_of
from sim.bench.measured import BenchRun, Lengths, RequestRows, SharedPrompts
from sim.errors import RooftraceError
from sim.scenario import named
from workloads import ClosedLoop, Empirical, Fixed, LengthDistribution, Stream, Trace, Workload, stream

MOST_REQUESTS = 5_000_000
"""The most requests in one run: what memory and an afternoon hold."""
_BLOCK_TOKENS = 16
_WARM_S = 3600.0
"""Before the load of a warm run begins: time enough for every prompt to have been answered, and none to the simulator."""
_NS = 1e9


class NotReplayable(RooftraceError, ValueError):
    """A run that cannot be simulated; the message says what is missing and how to give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a run, the limit of its clients, and how many of the first requests only warm the server up."""

    workload: Workload
    in_flight: int | None = None
    warm_requests: int = 0


def load_of(run: BenchRun, seed: int) -> Load:
    """The load of *run*, drawn with *seed*.

    A recorded run is sent as it was, one with clients in a closed loop, one with a rate by gamma-distributed times, behind its
    clients' limit on requests in flight. `NotReplayable` names the facts that are missing.
    """
    if run.protocol is not None:
        prompt, output = (round(lengths.mean_tokens or 0.0) for lengths in (run.offered.prompt, run.offered.output))
        clients = run.offered.concurrency or 1
        return Load(
            workload=run.protocol.workload(prompt_tokens=prompt, output_tokens=output, concurrency=clients, seed=seed)
        )
    missing = run.missing
    if missing:
        either = {"rate_per_s", "concurrency"} <= set(missing)
        names = [name for name in missing if not (either and name in ("rate_per_s", "concurrency"))]
        asked = (["run.rate_per_s (or run.concurrency)"] if either else []) + [f"run.{name}" for name in names]
        raise NotReplayable(f"{run.name}: the file does not say {', '.join(asked)}; give each with --set NAME=VALUE")
    recorded = recorded_load(run)
    if recorded is not None:
        return recorded
    offered = run.offered
    n = offered.sent or 0
    if n < 1:
        raise NotReplayable(f"{run.name}: no request was sent, so that there is nothing to simulate")
    if n > MOST_REQUESTS:
        raise NotReplayable(
            f"{run.name}: {n:,} requests are more than the {MOST_REQUESTS:,} that are simulated; "
            "a part of them stands for all (--set run.requests=NUMBER)"
        )
    if offered.shared is not None:
        return _sharing(run, offered.shared, n, seed)
    prompt = _tokens(run, "prompt", n, seed, Stream.PROMPT_LENGTHS)
    output = _tokens(run, "output", n, seed, Stream.OUTPUT_LENGTHS)
    source = f"the load of {run.name}, seed {seed}"
    timed = offered.open or offered.ramped
    if timed or offered.concurrency is None:
        trace = Trace(arrival_ns=_planned_ns(run, n, seed), prompt_tokens=prompt, output_tokens=output, source=source)
        limit = offered.concurrency if offered.concurrency is None or offered.concurrency < n else None
        return Load(workload=trace, in_flight=limit)
    clients = min(offered.concurrency, n)
    ramp_s = float(offered.ramp.get("clients_s", 0.0) or 0.0)
    starts = np.rint(np.linspace(0.0, ramp_s, clients) * _NS).astype(np.int64) if ramp_s else None
    loop = ClosedLoop(prompt_tokens=prompt, output_tokens=output, concurrency=clients, start_ns=starts, source=source)
    return Load(workload=loop)


def recorded_load(run: BenchRun) -> Load | None:
    """The requests of the rows of *run* at the instants at which they were sent; None where rows do not say, or where clients
    waited for the server, so that the instants are its doing."""
    rows = run.rows
    if rows is None or run.offered.concurrency is not None or run.offered.shared is not None:
        return None
    order = sent_order(rows)
    if not order.size or not np.isfinite(rows.sent_s[~rows.failed]).all():
        return None
    sent_s = rows.sent_s[order]
    trace = Trace(
        arrival_ns=np.rint((sent_s - sent_s[0]) * _NS).astype(np.int64),
        prompt_tokens=rows.prompt_tokens[order],
        output_tokens=rows.output_tokens[order],
        source=f"the requests of {run.name} as they were sent",
    )
    return Load(workload=trace)


def sent_order(rows: RequestRows) -> np.ndarray:
    """The rows that can be sent again, in the order in which they were."""
    usable = ~rows.failed & np.isfinite(rows.sent_s) & (rows.prompt_tokens >= 0) & (rows.output_tokens >= 1)
    return np.flatnonzero(usable)[np.argsort(rows.sent_s[usable], kind="stable")]


def shortened(run: BenchRun, most: int) -> BenchRun:
    """*run* with its first *most* requests alone, which a note says; as it is where figures hang on how long it was.

    Shortened are open loads that their server kept up with: figures of the first thousand requests there are those of all but for
    chance. A load beyond saturation has a queue that grows as long as it runs; clients in a closed loop begin with a burst whose
    share in the figures is that of the whole run. A recorded run is compared with what was measured of the same requests.
    """
    recorded = recorded_load(run)
    if recorded is not None:
        rows = run.rows
        assert rows is not None
        if int((~rows.failed).sum()) <= most:
            return run
        order = np.argsort(np.where(rows.failed, np.inf, rows.sent_s), kind="stable")[:most]
        few = RequestRows(**{each.name: getattr(rows, each.name)[order] for each in fields(rows)})
        shorter = replace(run, rows=few, itl=None, itl_prompt=None, itl_decode=None, **latencies_of(few))
        return shorter.noting(f"the first {most:,} requests that were answered stand for all {len(rows):,}")
    offered = run.offered
    n = offered.sent
    steady = offered.open and not run.saturated and offered.shared is None and not offered.ramp
    if n is None or n <= most or not steady or offered.warmup_s or offered.cooldown_s:
        return run
    shorter = replace(run, offered=replace(offered, requests=most, duration_s=None))
    return shorter.noting(
        f"{most:,} requests are simulated for its {n:,}: the server kept up, so that more are more of the same"
    )


def in_step(run: BenchRun) -> bool:
    """Whether simulated clients go in step as the measured ones did not: each waits for its answer, and answers that differed in
    length, by an unknown spread, are simulated as equal. All prompts then come at once, which is in the first tokens alone."""
    offered = run.offered
    several = offered.concurrency is not None and min(offered.concurrency, offered.requests or offered.concurrency) > 1
    closed = several and not (offered.open or offered.ramped) and offered.shared is None
    return closed and offered.output.spread_unknown and recorded_load(run) is None


def assumed(run: BenchRun) -> Iterator[str]:
    """The assumptions that a simulation of *run* makes because its file does not say it, a sentence each."""
    offered = run.offered
    if recorded_load(run) is not None:
        assert run.rows is not None
        left_out = int((run.rows.failed | (run.rows.output_tokens < 1)).sum())
        if run.offered.rate_per_s is None:
            yield "requests are sent when they were; if clients waited for answers, run.concurrency says so"
        if left_out:
            yield f"{left_out} requests failed or have no answer; the simulation leaves them out, though the server had them"
        return
    for name, lengths in (("prompt", offered.prompt), ("output", offered.output)):
        mean, each, quantiles = lengths.mean_tokens, lengths.each_tokens, lengths.quantiles_tokens
        if mean is None or each or lengths.distribution is not None or quantiles or lengths.equal:
            continue
        if lengths.std_tokens:
            yield (
                f"{name}s are drawn from a normal distribution of the mean and spread that the file has; "
                f"run.{name}_tokens={{distribution: ...}} says otherwise"
            )
        else:
            yield (
                f"all {name}s are taken to be as long as their mean, for the file has no more of them; "
                f"run.{name}_tokens={{distribution: ...}} says how they spread"
            )
    if in_step(run):
        yield (
            "outputs of one length put clients in step, which those measured were not: TTFT is not judged; "
            "run.output_tokens={distribution: ...} or a file with single requests (vLLM's --save-detailed) says how they spread"
        )
    if (offered.open or offered.ramped) and offered.burstiness is None:
        yield "requests are taken to come at random (Poisson); run.burstiness says otherwise, infinity for evenly"
    if run.failed:
        yield f"{run.failed} requests failed; the simulation answers all"


def _tokens(run: BenchRun, name: str, n: int, seed: int, of: Stream) -> np.ndarray:
    lengths: Lengths = getattr(run.offered, name)
    if lengths.each_tokens:
        each = np.asarray(lengths.each_tokens, np.int64)
        # The tools send their requests in the order of the file; a count given by hand goes through them again.
        return np.maximum(np.resize(each, n), 1)
    return np.maximum(_distribution(run, name, lengths).sample(stream(seed, of), n), 1)


class _Normal:
    """Whole numbers around a mean, kept within what was seen."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths

    def sample(self, rng: np.random.Generator, n: int, /) -> np.ndarray:
        of = self._lengths
        drawn = rng.normal(of.mean_tokens or 0.0, of.std_tokens or 0.0, n)
        return np.rint(np.clip(drawn, of.min_tokens or 1, of.max_tokens)).astype(np.int64)


def _distribution(run: BenchRun, name: str, lengths: Lengths) -> LengthDistribution:
    if lengths.distribution is not None:
        settings = dict(lengths.distribution)
        kind = settings.pop("distribution", None)
        if not isinstance(kind, str):
            raise NotReplayable(f"run.{name}_tokens is a number or {{distribution: uniform, ...}}; got {settings!r}")
        return named.choice(kind, settings, named.DISTRIBUTIONS, key=f"run.{name}_tokens", what="a distribution")
    mean = lengths.mean_tokens
    if mean is None:
        raise NotReplayable(f"{run.name}: the file does not say run.{name}_tokens; give it with --set")
    if lengths.equal or not (lengths.quantiles_tokens or lengths.std_tokens):
        return Fixed(tokens=max(1, round(mean)))
    if lengths.quantiles_tokens and lengths.min_tokens is not None and lengths.max_tokens is not None:
        points = {0.0: lengths.min_tokens, **lengths.quantiles_tokens, 1.0: lengths.max_tokens}
        shares = sorted(points)
        tokens = np.maximum.accumulate([points[share] for share in shares])
        return Empirical(probabilities=tuple(shares), tokens=tuple(float(each) for each in tokens))
    return _Normal(lengths)


def _planned_ns(run: BenchRun, n: int, seed: int) -> np.ndarray:
    """The times at which *n* requests would be sent if none waited for others."""
    offered = run.offered
    rate = offered.rate_per_s
    rng = stream(seed, Stream.ARRIVALS)
    if not (offered.open or offered.ramped):
        return np.zeros(n, np.int64)
    rates = offered.rates_per_s(n)
    shape = 1.0 if offered.burstiness is None else offered.burstiness
    gaps_s = (rng.standard_gamma(shape, n) / shape if np.isfinite(shape) else np.ones(n)) / rates
    at_s = np.cumsum(gaps_s)
    if offered.fills_time and not offered.ramped:
        assert rate is not None
        at_s *= n / rate / at_s[-1]
    return np.rint(at_s * _NS).astype(np.int64)


def _sharing(run: BenchRun, shared: SharedPrompts, n: int, seed: int) -> Load:
    """The load where prompts begin alike; request i asks text i modulo their number, in an order that is shuffled once."""
    offered = run.offered
    per_group = shared.prompts_per_group
    texts = shared.groups * per_group if per_group is not None else max(n, shared.groups)
    order = stream(seed, Stream.PROMPTS).permutation(texts)
    tokens_of_text = np.maximum(_tokens(run, "prompt", texts, seed, Stream.PROMPT_LENGTHS), shared.prefix_tokens + 1)
    group_of_text = np.arange(texts) % shared.groups
    text = order[np.arange(n) % texts]
    planned_ns = _planned_ns(run, n, seed)
    output = _tokens(run, "output", n, seed, Stream.OUTPUT_LENGTHS)
    warm = 0
    if shared.warm:
        warm = texts
        text = np.concatenate((order, text))
        planned_ns = np.concatenate((np.zeros(texts, np.int64), planned_ns + int(_WARM_S * _NS)))
        output = np.concatenate((np.ones(texts, np.int64), output))
    head = shared.prefix_tokens // _BLOCK_TOKENS
    blocks = -(-tokens_of_text // _BLOCK_TOKENS)
    own_start = shared.groups * head + np.concatenate(([0], np.cumsum(blocks - head)))
    ids = [
        np.concatenate(
            (
                group_of_text[t] * head + np.arange(head),
                own_start[t] + np.arange(blocks[t] - head),
            )
        )
        for t in range(texts)
    ]
    trace = Trace(
        arrival_ns=planned_ns,
        prompt_tokens=tokens_of_text[text],
        output_tokens=output,
        prefix_blocks=np.concatenate([ids[t] for t in text]).astype(np.int64),
        prefix_offsets=np.concatenate(([0], np.cumsum(blocks[text]))),
        prefix_block_tokens=_BLOCK_TOKENS,
        source=f"the load of {run.name}, {shared.groups} groups of prompts, seed {seed}",
    )
    limit = offered.concurrency
    return Load(workload=trace, in_flight=limit if limit is not None and limit < n else None, warm_requests=warm)
