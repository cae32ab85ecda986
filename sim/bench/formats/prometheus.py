"""The metrics that vLLM and SGLang expose to Prometheus, as text: histograms, KV use, queue, preemptions, cache hits, accepted
drafts.

Counters and histograms run since the server started. Quantiles are interpolated within buckets, as histogram_quantile of PromQL
does; those in the last, open bucket are not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sim.bench.fields import LARGEST, Unreadable, whole_number
from sim.bench.measured import BenchRun, Latency, Lengths, Offered, ServerSide

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?\s+([^\s]+)(?:\s+(-?[\d.eE+]+))?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_TYPE = re.compile(r"^# TYPE (\S+) (\w+)\s*$", re.MULTILINE)
_COUNTED = (
    "_total", ":prompt_tokens", ":generation_tokens", ":gpu_prefix_cache_hits", ":gpu_prefix_cache_queries", ":num_preemptions",
)  # fmt: skip
"""Ends of names of counters, where an exposition does not say the types."""
_QUANTILES = (0.1, 0.25, 0.75, 0.9, 0.95, 0.99)
_LATENCIES = {
    "ttft": ("time_to_first_token_seconds",),
    "tpot": ("request_time_per_output_token_seconds",),
    "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2el": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
    "prefill": ("request_prefill_time_seconds",),
    "decode": ("request_decode_time_seconds",),
}
_GAUGES = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
}
_SHARES = {
    "kv_used": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage"),
    "accepted": ("spec_accept_rate",),
}


@dataclass
class _Family:
    total: float = 0.0
    samples: int = 0
    buckets: dict[float, float] = field(default_factory=dict)
    sum: float = 0.0
    count: float = 0.0
    labels: list[Mapping[str, str]] = field(default_factory=list)

    def add(self, sample: _Sample) -> None:
        match sample.suffix:
            case "_bucket":
                self.buckets[sample.edge] = self.buckets.get(sample.edge, 0.0) + sample.value
            case "_sum":
                self.sum += sample.value
            case "_count":
                self.count += sample.value
            case _:
                self.total += sample.value
        self.samples += 1
        self.labels.append(sample.labels)


def is_one(text: str) -> bool:
    """Whether *text* is an exposition of Prometheus, or a list of families of one."""
    lines = [line for line in text.splitlines() if line.strip()][:40]
    if any(re.match(r"#\s(HELP|TYPE)\s\S", line) for line in lines):
        return True
    return bool(lines) and any(re.match(r"(vllm|sglang):\w+[{ ]", line) for line in lines)


def read(text: str, name: str, file: str, before: str | None = None) -> list[BenchRun]:
    """The server's side of *text*; what it has counted since *before*, where that is given."""
    families, broken = _families(text)
    engine = _engine(families, text)
    notes = ["counters and histograms run since the server started, not over one benchmark"]
    if before is not None:
        families = _since(families, _families(before)[0], dict(_TYPE.findall(text)))
        notes = ["counters and histograms are those of this scrape less those of the one before"]
    own = {key.partition(":")[2]: family for key, family in families.items() if key.startswith(f"{engine}:")}
    if broken:
        notes.append(f"{broken} lines are not samples of Prometheus and are left out")
    server = _server(own, notes)
    models = dict.fromkeys(
        labels["model_name"] for family in own.values() for labels in family.labels if labels.get("model_name")
    )
    run = BenchRun(
        name=name,
        file=file,
        format=f"Prometheus of {'vLLM' if engine == 'vllm' else 'SGLang'}",
        offered=Offered(
            prompt=Lengths(mean_tokens=_mean_of(own, "request_prompt_tokens", server.prompt_tokens, server.finished)),
            output=Lengths(
                mean_tokens=_mean_of(own, "request_generation_tokens", server.output_tokens, server.finished)
            ),
        ),
        completed=server.finished,
        input_tokens=server.prompt_tokens,
        output_tokens=server.output_tokens,
        server=server,
        config={"model": ", ".join(models)} if models else {},
        notes=tuple(notes),
    )
    return [run]


def _engine(families: Mapping[str, _Family], text: str) -> str:
    """The engine whose metrics these are; `Unreadable` where there is none."""
    for engine in ("vllm", "sglang"):
        if any(name.startswith(f"{engine}:") for name in families):
            return engine
    if re.search(r"^(vllm|sglang):\w+ (counter|gauge|histogram|summary)\s*$", text, re.MULTILINE):
        raise Unreadable("it lists the names of metrics and holds no values; save what the server's /metrics answers")
    raise Unreadable("it has metrics of Prometheus, and none of vLLM (vllm:...) or SGLang (sglang:...) among them")


def _server(own: Mapping[str, _Family], notes: list[str]) -> ServerSide:
    """The figures of one engine's families by name; *notes* get what they leave out."""
    latencies: dict[str, Any] = {key: _latency(own, names, key, notes) for key, names in _LATENCIES.items()}
    gauges: dict[str, Any] = {key: _gauge(own, names) for key, names in _GAUGES.items()}
    shares: dict[str, Any] = {key: _share(own, names, notes) for key, names in _SHARES.items()}
    hits, queries = (
        _counter(own, f"prefix_cache_{what}_total", f"gpu_prefix_cache_{what}_total", f"gpu_prefix_cache_{what}")
        for what in ("hits", "queries")
    )
    hit = _ratio(hits, queries)
    if hit is None:
        hit = _share(own, ("cache_hit_rate",), notes)
    elif hit > 1:
        notes.append(f"a share of {hit:.3g} of prompt tokens found in the cache cannot be, and is left out")
        hit = None
    drafts, drafted, accepted = (
        _counter(own, f"spec_decode_num_{what}_total") for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    share, per_draft = _ratio(accepted, drafted), _ratio(accepted, drafts)
    if share is not None:
        shares["accepted"] = share
    finished = _counter(own, "request_success_total", "num_requests_total")
    latest = own.get("e2e_request_latency_seconds")
    if finished is None and latest is not None:
        finished = latest.count
    return ServerSide(
        **latencies,
        **gauges,
        **shares,
        kv_tokens=_capacity(own),
        preemptions=whole_number(
            _counter(own, "num_preemptions_total", "num_preemptions", "num_retracted_requests_total")
        ),
        prefix_hit=hit,
        acceptance_length=_gauge(own, ("spec_accept_length",)) if per_draft is None else 1 + per_draft,
        prompt_tokens=whole_number(_counter(own, "prompt_tokens_total", "prompt_tokens")),
        output_tokens=whole_number(_counter(own, "generation_tokens_total", "generation_tokens")),
        finished=whole_number(finished),
    )


def _ratio(part: float | None, total: float | None) -> float | None:
    return part / total if part is not None and total else None


def _families(text: str) -> tuple[dict[str, _Family], int]:
    """Samples by family, and how many lines are none: engines and pods of one server added up."""
    families: dict[str, _Family] = {}
    broken = 0
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        sample = _sample(line)
        if sample is None:
            broken += 1
        elif not math.isnan(sample.value):
            families.setdefault(sample.family, _Family()).add(sample)
    return families, broken


class _Sample(NamedTuple):
    """One line of an exposition; *edge* is the upper bound of a histogram's bucket, NaN for other samples."""

    family: str
    suffix: str
    labels: dict[str, str]
    value: float
    edge: float


class TextSample(NamedTuple):
    """One line of an exposition as it is written; *at* is its time stamp, NaN where it has none."""

    name: str
    labels: dict[str, str]
    value: float
    at: float


def text_sample(line: str) -> TextSample | None:
    """The sample of a *line*; None where it is none."""
    match = _SAMPLE.match(line)
    if match is None:
        return None
    try:
        value, at = float(match[3]), math.nan if match[4] is None else float(match[4])
    except ValueError:
        return None
    return TextSample(match[1], dict(_LABEL.findall(match[2] or "")), value, at)


def _sample(line: str) -> _Sample | None:
    written = text_sample(line)
    if written is None:
        return None
    name, labels, value, _ = written
    suffixes = (each for each in ("_bucket", "_sum", "_count") if name.endswith(each))
    suffix = next((each for each in suffixes if each != "_bucket" or "le" in labels), "")
    try:
        edge = float(labels["le"]) if suffix == "_bucket" else math.nan
    except ValueError:
        return None
    return None if abs(value) > LARGEST else _Sample(name.removesuffix(suffix), suffix, labels, value, edge)


def _since(after: Mapping[str, _Family], before: Mapping[str, _Family], types: Mapping[str, str]) -> dict[str, _Family]:
    """The growth of counters and histograms, gauges as they are; *types* as the exposition has them. `Unreadable` where one
    fell."""
    found: dict[str, _Family] = {}
    for name, family in after.items():
        early = before.get(name, _Family())
        if family.count or family.buckets:
            found[name] = replace(
                family,
                sum=family.sum - early.sum,
                count=family.count - early.count,
                buckets={edge: count - early.buckets.get(edge, 0.0) for edge, count in family.buckets.items()},
            )
            fell = found[name].count < 0 or min(found[name].buckets.values(), default=0.0) < 0
        elif types.get(name, "counter" if name.endswith(_COUNTED) else "") == "counter":
            found[name] = replace(family, total=family.total - early.total)
            fell = found[name].total < 0
        else:
            found[name], fell = family, False
        if fell:
            raise Unreadable(f"{name} is less than before: the server was started anew between, or the two are swapped")
    return found


def _latency(own: Mapping[str, _Family], names: Sequence[str], key: str, notes: list[str]) -> Latency | None:
    family = next((own[name] for name in names if name in own and own[name].count > 0), None)
    if family is None:
        return None
    if family.sum < 0:
        raise Unreadable(f"the histogram of {key.upper()} has a negative sum: a clock ran backwards")
    known = {share: value for share in (*_QUANTILES, 0.5) if (value := quantile(family.buckets, share)) is not None}
    median = known.pop(0.5, None)
    finite = max((count for edge, count in family.buckets.items() if math.isfinite(edge)), default=0.0)
    if family.buckets and finite < 0.5 * family.count:
        notes.append(
            f"{1 - finite / family.count:.0%} of {key.upper()} lie above the last bucket: percentiles there are not known"
        )
    return Latency(
        mean_s=family.sum / family.count,
        median_s=median,
        quantiles_s=known,
        count=int(family.count),
        how="mean of the histogram, percentiles interpolated in its buckets",
    )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value below which *share* of a cumulative histogram lies, linear within a bucket; None in the open one."""
    edges = sorted(buckets)
    if not edges or buckets[edges[-1]] <= 0:
        return None
    rank = share * buckets[edges[-1]]
    low, before = 0.0, 0.0
    for edge in edges:
        count = buckets[edge]
        if count >= rank and count > before:
            return None if math.isinf(edge) else low + (edge - low) * (rank - before) / (count - before)
        low, before = edge, max(count, before)
    return None


def _counter(own: Mapping[str, _Family], *names: str) -> float | None:
    return next((own[name].total for name in names if name in own and own[name].total >= 0), None)


def _gauge(own: Mapping[str, _Family], names: Sequence[str]) -> float | None:
    """Added up over the engines of a server."""
    return next((own[name].total for name in names if name in own), None)


def _share(own: Mapping[str, _Family], names: Sequence[str], notes: list[str]) -> float | None:
    """The mean over the engines of a server."""
    family = next((own[name] for name in names if name in own), None)
    if family is None:
        return None
    value = family.total / family.samples
    if not 0 <= value <= 1:
        notes.append(f"a share of {value:.3g} of {names[0]} cannot be, and is left out")
        return None
    return value


def _mean_of(own: Mapping[str, _Family], histogram: str, total: float | None, finished: float | None) -> float | None:
    family = own.get(histogram)
    if family is not None and family.count > 0:
        return family.sum / family.count
    return _ratio(total, finished)


def _capacity(own: Mapping[str, _Family]) -> int | None:
    """KV tokens of the server, of what it says of its cache."""
    if "max_total_num_tokens" in own:
        return int(own["max_total_num_tokens"].total)
    info = own.get("cache_config_info")
    tokens = 0
    for labels in info.labels if info is not None else []:
        try:
            tokens += int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        except (KeyError, ValueError):
            return None
    return tokens if 0 < tokens < LARGEST else None
