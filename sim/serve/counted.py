"""Counts that vLLM makes of requests, by model, on the simulated clock: names and buckets of release 0.32.0 (`vllm/v1/metrics`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.engine import LiveRun
from sim.serve.exchange import Exchange
from sim.serve.prometheus import Histogram, head, sample

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

_HISTOGRAMS = {
    "time_to_first_token_seconds": (TTFT_S, "Histogram of time to first token in seconds."),
    "inter_token_latency_seconds": (ITL_S, "Histogram of inter-token latency in seconds."),
    "request_time_per_output_token_seconds": (ITL_S, "Histogram of time_per_output_token_seconds per request."),
    "e2e_request_latency_seconds": (REQUEST_S, "Histogram of e2e request latency in seconds."),
    "request_queue_time_seconds": (REQUEST_S, "Histogram of time spent in WAITING phase for request."),
    "request_prefill_time_seconds": (REQUEST_S, "Histogram of time spent in PREFILL phase for request."),
    "request_decode_time_seconds": (REQUEST_S, "Histogram of time spent in DECODE phase for request."),
    "request_inference_time_seconds": (REQUEST_S, "Histogram of time spent in RUNNING phase for request."),
    "request_prompt_tokens": (TOKENS, "Number of prefill tokens processed."),
    "request_generation_tokens": (TOKENS, "Number of generation tokens processed."),
    "request_params_max_tokens": (TOKENS, "Histogram of the max_tokens request parameter."),
}
_COUNTERS = {
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
}
_REASONS = ("stop", "length", "abort", "error")


class _Engine:
    """The counts of one model on one machine."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.ended: dict[str, int] = dict.fromkeys(_REASONS, 0)


class Counted:
    """All counts of a session."""

    def __init__(self, models: Sequence[str]) -> None:
        self._names = tuple(models)
        self._engines = {(model, 0): _Engine() for model in range(len(models))}
        """By model and machine; what has not been given to a machine counts at the first."""

    def _of(self, run: LiveRun, exchange: Exchange) -> _Engine:
        return self._engines.setdefault((exchange.model, max(run.replica(exchange.id), 0)), _Engine())

    def came(self, model: int, max_tokens: int) -> None:
        """A request was sent to the engine."""
        self._engines[model, 0].histograms["request_params_max_tokens"].add(max_tokens)

    def got(self, run: LiveRun, exchange: Exchange, tokens: int, now_ns: int) -> None:
        """*exchange* gets *tokens* more; its own account is that from before."""
        mine = self._of(run, exchange)
        mine.counters["generation_tokens"] += tokens
        if exchange.first_ns >= 0:
            mine.histograms["inter_token_latency_seconds"].add((now_ns - exchange.latest_ns) * 1e-9)

    def first(self, run: LiveRun, exchange: Exchange) -> None:
        """Its first token is there."""
        mine, now_ns, prompt_tokens = self._of(run, exchange), exchange.first_ns, exchange.prompt_tokens
        mine.histograms["time_to_first_token_seconds"].add((now_ns - run.arrival_ns(exchange.id)) * 1e-9)
        mine.counters["prompt_tokens"] += prompt_tokens
        mine.counters["prefix_cache_queries"] += prompt_tokens
        mine.counters["prefix_cache_hits"] += run.cached_tokens(exchange.id)

    def ended(self, run: LiveRun, exchange: Exchange, reason: str) -> None:
        """It is over."""
        mine, id_ = self._of(run, exchange), exchange.id
        mine.ended[reason] += 1
        mine.counters["num_preemptions"] += run.preemptions(id_)
        if exchange.ended_ns < 0:
            return
        came, scheduled, first, ended = run.arrival_ns(id_), run.scheduled_ns(id_), exchange.first_ns, exchange.ended_ns
        seconds = {
            "e2e_request_latency_seconds": ended - came,
            "request_queue_time_seconds": scheduled - came,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": ended - first,
            "request_inference_time_seconds": ended - scheduled,
        }
        for name, ns in seconds.items():
            mine.histograms[name].add(ns * 1e-9)
        if exchange.got > 1:
            mine.histograms["request_time_per_output_token_seconds"].add((ended - first) * 1e-9 / (exchange.got - 1))
        mine.histograms["request_prompt_tokens"].add(exchange.prompt_tokens)
        mine.histograms["request_generation_tokens"].add(exchange.got)

    def lines(self, run: LiveRun) -> Iterable[str]:
        """All samples; one engine label for each model on a machine, gauges of those that are up alone."""
        loads = run.loads()
        labels = [
            {"model_name": name, "engine": str(engine)}
            for engine, load in enumerate(loads)
            if load.up
            for name in (self._names if load.model < 0 else (self._names[load.model],))
        ]
        for label in labels:
            self._engines.setdefault((self._names.index(label["model_name"]), int(label["engine"])), _Engine())
        gauges = {
            "num_requests_running": (
                "Number of requests in model execution batches.",
                [each.running for each in loads],
            ),
            "num_requests_waiting": ("Number of requests waiting to be processed.", [each.waiting for each in loads]),
            "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", [each.kv_use for each in loads]),
        }
        for name, (text, values) in gauges.items():
            yield from head(f"vllm:{name}", "gauge", text)
            for label in labels:
                yield sample(f"vllm:{name}", label, values[int(label["engine"])])
        of_models = [
            ({"model_name": self._names[model], "engine": str(engine)}, mine)
            for (model, engine), mine in sorted(self._engines.items(), key=lambda item: item[0])
        ]
        for name, text in _COUNTERS.items():
            yield from head(f"vllm:{name}_total", "counter", text)
            for label, mine in of_models:
                yield sample(f"vllm:{name}_total", label, mine.counters[name])
        yield from head("vllm:request_success_total", "counter", "Count of successfully processed requests.")
        for label, mine in of_models:
            for reason, count in mine.ended.items():
                yield sample("vllm:request_success_total", {**label, "finished_reason": reason}, count)
        for name, (_, text) in _HISTOGRAMS.items():
            yield from head(f"vllm:{name}", "histogram", text)
            for label, mine in of_models:
                yield from mine.histograms[name].lines(f"vllm:{name}", label)
