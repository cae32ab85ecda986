"""The lines that a vLLM server logs every ten seconds: throughput, requests running and waiting, KV use, cache hits, drafts.

vllm-project/vllm, vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py (0.8 to 0.32).
"""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import replace

import numpy as np

from sim.bench.fields import Unreadable
from sim.bench.measured import BenchRun, Lengths, Offered, ServerSide

FORMAT = "vLLM log"
_LINE = re.compile(
    r"Avg prompt throughput: (\d{1,12}(?:\.\d{1,9})?) tokens/s, Avg generation throughput: (\d{1,12}(?:\.\d{1,9})?) tokens/s, "
    r"Running: (\d{1,9}) reqs, "
    r"(?:Swapped: \d+ reqs, )?(?:Waiting|Pending): (\d{1,9}) reqs"
)
_KV = re.compile(r"KV cache usage: (\d{1,12}(?:\.\d{1,9})?)%")
_HITS = re.compile(r"Prefix cache hit rate: (?:GPU: )?(\d{1,12}(?:\.\d{1,9})?)%")
_PREEMPTIONS = re.compile(r"Preemptions: (\d{1,12})")
_CAPACITY = re.compile(r"KV cache size: ([\d,]{1,15}) tokens")
_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d{1,12})")
_DRAFTS = re.compile(
    r"Mean acceptance length: (\d{1,12}(?:\.\d{1,9})?).*?Avg Draft acceptance rate: (\d{1,12}(?:\.\d{1,9})?)%",
    re.IGNORECASE,
)
_TIME = re.compile(r"\b(\d{2})-(\d{2}) (\d{2}):(\d{2}):(\d{2})\b")
_EVERY_S = 10.0
"""The time between lines (VLLM_LOG_STATS_INTERVAL), where they have no times."""
_SATURATED = 0.05
"""Requests waiting over requests running, from which the rate that came out is not what was offered."""
_ENGINE = re.compile(r"\bEngine (\d{1,6}): Avg prompt")
_CACHED = 0.01
"""Share of prompt tokens found in the prefix cache, from which prompts that follow from throughput are shorter than they were."""
_VERSION = re.compile(r"vLLM (?:API server )?version v?(\d+\.\d+[\w.]*)")


def is_one(text: str) -> bool:
    """Whether *text* is such a log."""
    return "Avg prompt throughput:" in text or "Avg generation throughput:" in text


def read(text: str, name: str, file: str) -> list[BenchRun]:
    """The averages of the busy lines of *text*: those with requests running or waiting."""
    lines = [(match, line) for line in text.splitlines() if (match := _LINE.search(line))]
    if not lines:
        raise Unreadable(
            "no line of the log is whole: 'Avg prompt throughput: ..., Running: ... reqs, Waiting: ... reqs, ...'"
        )
    busy = [(match, line) for match, line in lines if int(match[3]) or int(match[4])]
    if not busy:
        raise Unreadable(f"the server was idle in each of the {len(lines)} lines of its log")
    engines = _by_engine(busy)
    prompts_per_s, tokens_per_s, running, waiting = (_together(engines, group) for group in (1, 2, 3, 4))
    duration_s = max(len(own) for own in engines) * _interval_s([line for _, line in lines])
    version, blocks = _VERSION.search(text), _BLOCKS.search(text)
    return [
        BenchRun(
            name=name,
            file=file,
            format=FORMAT,
            offered=Offered(duration_s=duration_s),
            duration_s=None,
            input_tokens_per_s=prompts_per_s,
            output_tokens_per_s=tokens_per_s,
            server=_server(text, [line for _, line in busy], engines, running=running, waiting=waiting),
            config={
                **({"version": version[1]} if version else {}),
                **({"kv_blocks": int(blocks[1])} if blocks else {}),
            },
            notes=_notes(len(busy), len(lines), engines=len(engines), waits=waiting > _SATURATED * running),
        )
    ]


def _by_engine(busy: list[tuple[re.Match[str], str]]) -> list[list[re.Match[str]]]:
    """The lines of each engine: a server with several logs one of each, and what it does is what they do together."""
    engines: dict[str, list[re.Match[str]]] = {}
    for match, line in busy:
        engine = _ENGINE.search(line)
        engines.setdefault("" if engine is None else engine[1], []).append(match)
    return list(engines.values())


def _together(engines: list[list[re.Match[str]]], group: int) -> float:
    return sum(statistics.fmean(float(match[group]) for match in own) for own in engines)


def _server(
    text: str, busy: list[str], engines: list[list[re.Match[str]]], *, running: float, waiting: float
) -> ServerSide:
    """The means over the *busy* lines, and the last of those that count from the server's start."""

    def found(pattern: re.Pattern[str]) -> list[str]:
        return [match[1] for line in busy if (match := pattern.search(line))]

    capacity, drafts = _CAPACITY.findall(text), _DRAFTS.findall(text)
    hits, preemptions = found(_HITS), found(_PREEMPTIONS)
    return ServerSide(
        running=running,
        running_error=_error([[float(match[3]) for match in own] for own in engines]),
        waiting=waiting,
        kv_used=_mean_share(found(_KV)),
        kv_tokens=sum(int(each.replace(",", "")) for each in capacity if each.strip(",")) or None,
        prefix_hit=float(hits[-1]) / 100 if hits else None,
        preemptions=int(preemptions[-1]) if preemptions else None,
        acceptance_length=statistics.fmean(float(length) for length, _ in drafts) if drafts else None,
        accepted=_mean_share([rate for _, rate in drafts]),
    )


def _mean_share(percentages: list[str]) -> float | None:
    return statistics.fmean(float(each) / 100 for each in percentages) if percentages else None


def _notes(busy: int, lines: int, *, engines: int, waits: bool) -> tuple[str, ...]:
    notes = [
        f"means over {busy} of {lines} lines, those with requests under way; a log says nothing of single requests, "
        "so that no latency is known"
    ]
    if engines > 1:
        notes.append(f"{engines} engines log here; what they do is added up")
    if waits:
        notes.append(
            "requests waited, so that the rate that came out is not what was offered: run.rate_per_s says that"
        )
    else:
        notes.append(
            "run.output_tokens or run.rate_per_s says the load, for the other and the prompts follow from throughput"
        )
    return tuple(notes)


def _error(engines: list[list[float]]) -> float | None:
    """Standard error of the sum of the means of *engines* over that sum, none smaller than of requests that come at random; None
    for a sum of 0."""
    means = [statistics.fmean(values) for values in engines]
    variances = [
        max(statistics.pvariance(values), mean) / len(values) for values, mean in zip(engines, means, strict=True)
    ]
    return sum(variances) ** 0.5 / sum(means) if sum(means) else None


def _interval_s(lines: list[str]) -> float:
    """Seconds from a line to the next, the median."""
    at = []
    for line in lines:
        match = _TIME.search(line)
        if match is not None:
            _, day, hour, minute, second = map(int, match.groups())
            at.append(86400 * day + 3600 * hour + 60 * minute + second)
    steps = [late - early for early, late in itertools.pairwise(at) if late > early]
    return float(statistics.median(steps)) if steps else _EVERY_S


def with_load(run: BenchRun) -> BenchRun:
    """The open load behind the log of *run*: what was told of rate and outputs, and the other and the prompts from throughput.

    Where requests waited nothing follows from throughput but the lengths at a rate that was told.
    """
    offered, server = run.offered, run.server
    tokens_per_s, prompts_per_s = run.output_tokens_per_s, run.input_tokens_per_s
    if server is None or not tokens_per_s or offered.concurrency is not None or run.rows is not None:
        return run
    rate, output, notes = offered.rate_per_s, offered.output, []
    mean = output.mean_tokens
    waits = (server.waiting or 0.0) > _SATURATED * (server.running or 0.0)
    if rate is None and mean and not waits:
        rate = tokens_per_s / mean
        notes.append(f"{rate:.4g} requests/s follow from {tokens_per_s:,.1f} output tokens a second")
    elif rate is not None and np.isfinite(rate) and not output.known and tokens_per_s >= rate and not waits:
        output = Lengths(mean_tokens=tokens_per_s / rate)
        notes.append(f"outputs of {tokens_per_s / rate:,.1f} tokens follow from throughput and rate")
    prompt = offered.prompt
    if (
        rate is not None
        and np.isfinite(rate)
        and not prompt.known
        and prompts_per_s
        and prompts_per_s >= rate
        and not waits
    ):
        prompt = Lengths(mean_tokens=prompts_per_s / rate)
        notes.append(f"prompts of {prompts_per_s / rate:,.1f} tokens follow from throughput and rate")
        if (server.prefix_hit or 0.0) > _CACHED:
            notes.append(
                f"{server.prefix_hit:.0%} of prompt tokens were found in the prefix cache: newer releases log those that were "
                "computed, and prompts are longer; run.prompt_tokens and run.shared say how long and what they have in common"
            )
    return replace(
        run, offered=replace(offered, rate_per_s=rate, prompt=prompt, output=output), notes=(*run.notes, *notes)
    )
