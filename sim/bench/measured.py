"""One measured run of a served model: what its clients offered, what they measured, and what the file says of the server.

None stands for what a file does not say, never for a default. Times are seconds, rates are per second.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

    from sim.protocols import Protocol

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
MEDIAN = 0.5
FEWEST = 20
"""Requests of which the end of a run says whether a queue grew."""
_LATE = 0.03
"""The share of the time of sending by which a run may end late."""
_BY_CHANCE = 3.0
"""Standard deviations of the time of sending that are no more than chance."""
_PLACES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One quantity of a run, in seconds, over its requests (ITL: over the gaps between tokens)."""

    mean_s: float | None = None
    median_s: float | None = None
    std_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    quantiles_s: Mapping[float, float] = field(default_factory=dict)
    """Share below -> seconds, as given: 0.99 is the 99th percentile. The median is `median_s`."""
    count: int | None = None
    """Over how many values, where that is said."""
    how: str = "as given"
    """Where the figures come from: as given, from rows, interpolated in the buckets of a histogram, corrected."""

    def at(self, statistic: str) -> float | None:
        """A figure by name: mean, median, std, min, max, or pNN for a quantile (p99, p99.9; p50 is the median)."""
        if statistic in ("mean", "median", "std", "min", "max"):
            return getattr(self, f"{statistic}_s")
        share = float(statistic.removeprefix("p")) / 100
        if share == MEDIAN:
            return self.median_s
        return next((value for of, value in self.quantiles_s.items() if abs(of - share) < 1e-9), None)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of what is there: mean, median, std, and quantiles in order."""
        named = [name for name in ("mean", "median", "std", "min", "max") if getattr(self, f"{name}_s") is not None]
        return (*named, *(quantile_name(share) for share in sorted(self.quantiles_s)))


def quantile_name(share: float) -> str:
    """'p99' for 0.99, 'p99.9' for 0.999."""
    return f"p{100 * share:.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts or of outputs: what is known of them, from a mean to one number a request."""

    mean_tokens: float | None = None
    std_tokens: float | None = None
    min_tokens: float | None = None
    max_tokens: float | None = None
    quantiles_tokens: Mapping[float, float] = field(default_factory=dict)
    each_tokens: tuple[int, ...] = ()
    """One a request, in the order in which they were sent; empty where they are not known one by one."""
    distribution: Mapping[str, Any] | None = None
    """As in `workload.prompt_tokens` of a scenario, {distribution: uniform, ...}, where it was asked for so."""

    @property
    def known(self) -> bool:
        """Whether they can be drawn: a mean, a distribution, or all of them."""
        return self.mean_tokens is not None or self.distribution is not None or bool(self.each_tokens)

    @property
    def spread_unknown(self) -> bool:
        """Whether they differ, which a mean that is no whole number says, and nothing says how.

        A whole one is what fixed lengths have, which `vllm bench serve` draws by default (--random-range-ratio 0): of others one
        total in as many as there are requests comes out so.
        """
        told = self.each_tokens or self.distribution is not None or self.quantiles_tokens or self.std_tokens
        return not told and not self.equal and self.mean_tokens is not None and self.mean_tokens % 1 != 0

    @property
    def equal(self) -> bool | None:
        """Whether all are of one length; None where that is not known."""
        if self.each_tokens:
            return min(self.each_tokens) == max(self.each_tokens)
        if self.distribution is not None:
            return self.distribution.get("distribution") == "fixed"
        if self.std_tokens is not None:
            return self.std_tokens == 0
        if self.min_tokens is not None and self.max_tokens is not None:
            return self.min_tokens == self.max_tokens
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """The beginnings that prompts have in common: groups with a beginning of their own, and how many different prompts each has."""

    groups: int
    prefix_tokens: int
    prompts_per_group: int | None = None
    """None: every prompt is different behind its prefix."""
    warm: bool = False
    """Whether the server has seen all of them before the run, as in the later stages of a load that repeats its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The load that the clients offered. An open load has a rate, a closed one requests in flight, and a limited open one has
    both."""

    rate_per_s: float | None = None
    """Requests a second; infinity: all are ready at once."""
    concurrency: int | None = None
    """Requests in flight at most; those beyond it wait in the client, and TTFT and E2EL do not see it."""
    burstiness: float | None = None
    """Shape of the gamma-distributed times between requests: 1 is Poisson, infinity is even."""
    fills_time: bool = False
    """Whether times between requests are stretched so that all are sent in exactly requests / rate (vLLM, inference-perf)."""
    ramp: Mapping[str, Any] = field(default_factory=dict)
    """The way in which the rate grows over the run: strategy (linear, exponential), start_per_s, end_per_s; or how clients start:
    clients_s, seconds over which they start one after another."""
    warmup_requests: int | None = None
    """Sent and answered before the run, and counted nowhere."""
    warmup_s: float | None = None
    """The time at the run's beginning that its figures leave out."""
    cooldown_s: float | None = None
    """The time at its end that they leave out."""
    requests: int | None = None
    """The number of requests that were sent, those that failed included."""
    duration_s: float | None = None
    """The time over which they were sent, where that was asked for rather than a number of requests."""
    prompt: Lengths = field(default_factory=Lengths)
    output: Lengths = field(default_factory=Lengths)
    shared: SharedPrompts | None = None

    @property
    def open(self) -> bool:
        """Whether requests come at a rate of their own."""
        return self.rate_per_s is not None and np.isfinite(self.rate_per_s)

    @property
    def ramped(self) -> bool:
        """Whether they come at a rate of their own that rises, whatever `rate_per_s` says."""
        return "strategy" in self.ramp

    @property
    def sent(self) -> int | None:
        """The number of requests: as it is said, or what a rate of their own makes in the time of sending."""
        if self.requests is None and self.open and self.duration_s is not None:
            return int((self.rate_per_s or 0.0) * self.duration_s)
        return self.requests

    def rates_per_s(self, n: int) -> FloatArray:
        """The rate at which each of *n* requests is followed by the next; ValueError where there is none of their own."""
        if self.ramped:
            # As `vllm bench serve` raises it.
            start, end = float(self.ramp["start_per_s"]), float(self.ramp["end_per_s"])
            progress = np.arange(n) / max(n - 1, 1)
            if self.ramp["strategy"] == "exponential":
                return start * (end / start) ** progress
            return start + (end - start) * progress
        if not self.open:
            raise ValueError(
                f"requests come at a rate of their own in an open load alone; this one has {self.rate_per_s}"
            )
        return np.full(n, self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestRows:
    """One row a request, columns of one length n; NaN (-1 for tokens) where a row does not say."""

    sent_s: FloatArray
    """The time at which each was sent, from the first of them."""
    ttft_s: FloatArray
    e2el_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    failed: NDArray[np.bool_]

    def __post_init__(self) -> None:
        n = len(self.sent_s)
        for name in ("ttft_s", "e2el_s", "prompt_tokens", "output_tokens", "failed"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} needs one value a request ({n}); got {len(getattr(self, name))}")

    def __len__(self) -> int:
        return len(self.sent_s)

    @property
    def tpot_s(self) -> FloatArray:
        """(E2EL - TTFT) / (output tokens - 1); NaN below two tokens."""
        more = self.output_tokens > 1
        return np.where(more, (self.e2el_s - self.ttft_s) / np.where(more, self.output_tokens - 1, 1), np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSide:
    """The figures that the server gives of itself: gauges as scraped, counters since it started, shares between 0 and 1."""

    ttft: Latency | None = None
    tpot: Latency | None = None
    itl: Latency | None = None
    e2el: Latency | None = None
    queue: Latency | None = None
    prefill: Latency | None = None
    decode: Latency | None = None
    running: float | None = None
    """Requests."""
    running_error: float | None = None
    """Standard error of that mean, as a share of it; None where it is not known."""
    waiting: float | None = None
    kv_used: float | None = None
    """Share of the KV cache."""
    kv_tokens: int | None = None
    """Capacity, where it is said."""
    preemptions: int | None = None
    prefix_hit: float | None = None
    """Share of prompt tokens found in the prefix cache."""
    accepted: float | None = None
    """Share of drafted tokens that were accepted."""
    acceptance_length: float | None = None
    """Tokens of a speculative round, the target's own included."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finished: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One measured run, as its file has it."""

    name: str
    """The name of the file, and which part of it where there are several."""
    file: str
    format: str
    """The format of the file: the tool and what it wrote, such as 'vllm bench serve'."""
    offered: Offered = field(default_factory=Offered)
    protocol: Protocol | None = None
    """The way in which its clients asked, and which requests its figures are over, where a benchmark is known for one."""
    duration_s: float | None = None
    """The time from the first request sent to the last answer."""
    completed: int | None = None
    failed: int | None = None
    input_tokens: int | None = None
    """The prompt tokens of all that completed."""
    output_tokens: int | None = None
    requests_per_s: float | None = None
    """Completed."""
    goodput_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    ttft: Latency | None = None
    """Time to first token, from when the client sent."""
    tpot: Latency | None = None
    """Time per output token after the first, a value a request."""
    itl: Latency | None = None
    """Gaps between tokens, a value a gap."""
    itl_prompt: Latency | None = None
    """Those in which another request's first token came: steps that end a prompt are in them."""
    itl_decode: Latency | None = None
    """Those in which none came."""
    e2el: Latency | None = None
    """End-to-end latency."""
    rows: RequestRows | None = None
    server: ServerSide | None = None
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """The file's facts about the deployment and the tool: model, tokenizer, backend, tensor_parallel, date, ..."""
    notes: tuple[str, ...] = ()
    """The points that were corrected, were left out or look wrong, a sentence each."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Facts that a simulation of the run needs and the file does not say, by the names that `--set run.NAME=` takes."""
        offered, names = self.offered, []
        timed = offered.ramped or _has_times(self.rows)
        if offered.rate_per_s is None and offered.concurrency is None and not timed:
            names.append("rate_per_s")
            names.append("concurrency")
        if not offered.prompt.known:
            names.append("prompt_tokens")
        if not offered.output.known:
            names.append("output_tokens")
        if offered.sent is None:
            names.append("requests")
        return tuple(names)

    @property
    def saturated(self) -> bool | None:
        """Whether an open load was more than the server could take: answers ended later than sending and one answer explain.

        Sending takes requests / rate; the last answer then takes what an answer takes without a queue, the smallest TTFT that is
        given and the decoding of an output. 3 % beyond that is called saturated, where it is more than chance in sending: times
        between requests that are drawn and not stretched (`Offered.fills_time`) end late as often as early. None for a closed load,
        for fewer than `FEWEST` requests, and where the file does not say enough.
        """
        offered, n = self.offered, self.offered.sent or 0
        if not (offered.open or offered.ramped) or self.duration_s is None or n < FEWEST:
            return None
        stretched = offered.fills_time and not offered.ramped
        recorded = None if stretched or offered.concurrency is not None else _sent_until_s(self.rows)
        # A file may claim any number of requests: a rate that rises is looked at in so many places at most.
        places = min(n, _PLACES) if offered.ramped else 1
        gaps_s = 1.0 / offered.rates_per_s(places)
        sending_s = float(gaps_s.sum()) * n / places if recorded is None else recorded
        first_s = 0.0
        if self.ttft is not None:
            given = [self.ttft.min_s, *self.ttft.quantiles_s.values(), self.ttft.median_s, self.ttft.mean_s]
            first_s = min((value for value in given if value is not None), default=0.0)
        tokens = offered.output.mean_tokens or (max(offered.output.each_tokens, default=0))
        gap_s = (self.tpot and (self.tpot.mean_s or self.tpot.median_s)) or 0.0
        late_s = self.duration_s - sending_s - first_s - gap_s * tokens
        if late_s <= _LATE * sending_s:
            return False
        shape = 1.0 if offered.burstiness is None else offered.burstiness
        if recorded is not None or stretched or not np.isfinite(shape):
            return True
        chance_s = float(np.sqrt((gaps_s**2).sum() * n / places / shape))
        return late_s > _LATE * sending_s + _BY_CHANCE * chance_s or self._waited(late_s)

    def _waited(self, late_s: float) -> bool:
        """Whether requests waited as they do behind a queue that is *late_s* long at its end: half of that on average in the
        server, or, behind a limit of clients, with that many in flight."""
        waited_s = (self.ttft and (self.ttft.mean_s or self.ttft.median_s)) or 0.0
        if self.ttft is not None and self.ttft.min_s is not None:
            waited_s -= self.ttft.min_s
        if waited_s > late_s / 4:
            return True
        latency_s = (self.e2el and (self.e2el.mean_s or self.e2el.median_s)) or 0.0
        limit = self.offered.concurrency
        return bool(limit) and latency_s * (self.requests_per_s or 0.0) > limit / 2

    @property
    def running_s_per_token(self) -> float | None:
        """Seconds that a request runs, from when it is first scheduled, over its output tokens: requests running on average over
        output tokens a second, by Little's law. None where the server does not say both."""
        if self.server is None or not self.server.running or not self.output_tokens_per_s:
            return None
        return self.server.running / self.output_tokens_per_s

    def is_called(self, pattern: str) -> bool:
        """Whether *pattern* is the run's name, its file's or its path, whole and as it is, or like it with `*` and `?`."""
        names = (self.name, PurePath(self.file).name, self.file)
        return pattern in names or any(fnmatch.fnmatchcase(name, pattern) for name in names)

    def noting(self, *sentences: str) -> BenchRun:
        """The same run with sentences added to its notes."""
        return replace(self, notes=(*self.notes, *sentences))

    def to_record(self) -> dict[str, Any]:
        """The run as one flat row: names with units, plain values; rows of single requests are not in it."""
        offered = self.offered
        row: dict[str, Any] = {"run": self.name, "file": self.file, "format": self.format}
        row |= {
            "rate_req_s": offered.rate_per_s,
            "concurrency": offered.concurrency,
            "burstiness": offered.burstiness,
            "ramp": ", ".join(f"{key} {value}" for key, value in offered.ramp.items()) or None,
            "warmup_requests": offered.warmup_requests,
            "requests": offered.requests,
            "sending_s": offered.duration_s,
            "prompt_tokens_mean": _mean(offered.prompt),
            "output_tokens_mean": _mean(offered.output),
            "prefix_groups": None if offered.shared is None else offered.shared.groups,
            "prefix_tokens": None if offered.shared is None else offered.shared.prefix_tokens,
            "duration_s": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
        }
        names = ("requests_per_s", "goodput_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
        row |= {name: getattr(self, name) for name in names}
        row["saturated"] = self.saturated
        for name in ("ttft", "tpot", "itl", "itl_prompt", "itl_decode", "e2el"):
            row |= _figures(name, getattr(self, name))
        if self.server is not None:
            for name in ("ttft", "tpot", "itl", "e2el", "queue", "prefill", "decode"):
                row |= _figures(f"server_{name}", getattr(self.server, name))
            for name in ("running", "waiting", "kv_used", "kv_tokens", "preemptions", "prefix_hit", "accepted"):
                row[f"server_{name}"] = getattr(self.server, name)
            for name in ("acceptance_length", "prompt_tokens", "output_tokens", "finished"):
                row[f"server_{name}"] = getattr(self.server, name)
        row |= {f"config_{key}": value for key, value in self.config.items()}
        row["missing"] = ", ".join(self.missing) or None
        row["notes"] = " ".join(self.notes) or None
        return row


def _has_times(rows: RequestRows | None) -> bool:
    """Whether it is known of every request that was answered when it was sent."""
    if rows is None or rows.failed.all():
        return False
    return bool(np.isfinite(rows.sent_s[~rows.failed]).all())


def _sent_until_s(rows: RequestRows | None) -> float | None:
    """The time at which the last request was sent, where that is known of all that were answered."""
    return float(np.nanmax(rows.sent_s)) if rows is not None and _has_times(rows) else None


def _mean(lengths: Lengths) -> float | None:
    if lengths.mean_tokens is None and lengths.each_tokens:
        return float(np.mean(lengths.each_tokens))
    return lengths.mean_tokens


def _figures(name: str, latency: Latency | None) -> dict[str, float | None]:
    if latency is None:
        return {}
    return {f"{name}_{statistic}_s": latency.at(statistic) for statistic in latency.statistics}


def to_frame(runs: Iterable[BenchRun]) -> pd.DataFrame:
    """Runs as a table, one row each; columns that no run has a value for are left out, but the first three."""
    import pandas as pd

    frame = pd.DataFrame([run.to_record() for run in runs])
    kept = [name for at, name in enumerate(frame.columns) if at < 3 or frame[name].notna().any()]
    return frame[kept]
