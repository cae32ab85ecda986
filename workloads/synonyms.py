"""Names that tools give to the columns of a request log, and which of a file's columns say what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        # When a request came, by its name.
        *("arrival_s", "arrival", "arrival_time", "arrival_timestamp", "arrival_ts", "arrived_at", "arrival_ns"),
        *("arrival_ms", "request_created_at"),  # Helicone
        *("request_timestamp", "requested_at", "received_at", "submitted_at", "queued_at", "request_start_time"),
        *("start_time", "start_times"),  # LiteLLM (startTime), Langfuse, Envoy, LangSmith; vllm bench serve
        *("start_time_unix_nano", "start_ns"),  # OTLP, Datadog
        *("started_at", "start_timestamp", "start_ts", "start_date", "start"),
        # When a line was written, which of most tools is when the request came.
        *("created_at", "created", "created_time"),  # Portkey, OpenRouter; OpenAI
        *("timestamp", "ts", "time_generated", "logging_time"),  # Azure, BurstGPT; kcat; API management; Vertex
        *("event_time", "log_time", "datetime", "date_time", "_time", "time", "date", "at"),
    ),
    "end": (
        *("end_time", "end_time_unix_nano", "ended_at", "end_timestamp", "end_ts", "end_ns", "finished_at", "completed_at"),
        *("response_created_at", "finish_time"),  # Helicone
        *("msec", "time_iso8601", "time_local"),  # nginx, which writes a line when a request has ended
    ),
    "duration": (
        *("request_time",),  # nginx
        *("duration", "duration_s", "duration_ms", "duration_ns", "latency", "latency_s", "latency_ms", "e2e_latency"),
        *("delay_ms", "response_time", "response_time_ms", "generation_time_ms"),  # Helicone, Portkey, OpenRouter
        *("elapsed", "elapsed_s", "elapsed_ms", "total_time", "total_time_ms"),
    ),
    "prompt_tokens": (
        *("prompt_tokens", "usage_details_input", "input_tokens"),  # OpenAI, vLLM, LiteLLM; Langfuse; OTLP, Datadog, Anthropic
        *("num_prompt_tokens", "num_input_tokens", "n_prompt_tokens", "n_input_tokens"),
        *("prompt_token_count", "input_token_count"),  # Vertex, Bedrock
        *("tokens_prompt", "tokens_input", "tokens_in", "token_count_prompt"),  # OpenRouter; OpenInference
        *("context_tokens", "request_tokens", "input_length", "req_units"),  # Azure, BurstGPT, Mooncake, Portkey
        *("usage_input", "usage_prompt", "prompt_eval_count"),  # Langfuse; Ollama
        *("input_lens", "input_len", "prompt_len", "prompt_lens", "prompt_length", "n_input", "n_prompt"),  # vllm bench serve
        *("in_tokens", "context_len", "isl"),
    ),
    "output_tokens": (
        *("completion_tokens", "output_tokens", "usage_details_output"),
        *("num_completion_tokens", "num_output_tokens", "num_generated_tokens", "n_completion_tokens", "n_output_tokens"),
        *("candidates_token_count", "output_token_count", "completion_token_count"),
        *("tokens_completion", "tokens_output", "tokens_out", "token_count_completion"),
        *("generated_tokens", "response_tokens", "output_length", "res_units"),
        *("usage_output", "usage_completion", "eval_count"),
        *("output_lens", "output_len", "completion_len", "completion_length", "n_output", "n_completion", "n_generated"),
        *("out_tokens", "gen_tokens", "osl"),
    ),
    "max_tokens": (
        *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"),  # OpenAI, vLLM; Gemini; SGLang
        "num_predict",
    ),
    "model": (
        *("request_model", "model", "model_name", "ai_model", "model_permaslug", "model_id", "deployment_name"),
        "response_model",
    ),
    "session": (
        *("session_id", "conversation_id", "conversation_hash", "thread_id", "chat_id", "x_session_id", "session"),
    ),
    "prompt": (
        *("messages", "conversations", "conversation"),  # OpenAI, ShareGPT, WildChat
        *("prompt_token_ids", "input_token_ids", "input_ids", "input_messages", "prompt_text", "prompt", "input"),
    ),
    "answer": (
        *("choices", "output_messages", "generated_text", "response_text", "completion_text", "completion", "output"),
        *("answer", "response"),
    ),
    "blocks": ("hash_ids",),  # Mooncake
}  # fmt: skip
"""Names by what they say, the surest first. Case and what is between words do not count, and those of outer objects may be
in front: `response.usage.promptTokens` is `prompt_tokens`, and `usageDetails.input` is `usage_details_input`."""

OTHERS = (
    *(
        "tenant",
        "class",
        "priority",
        "deadline_s",
        "abort_s",
        "encoder_tokens",
        "predicted_tokens",
        "adapter",
        *("images", "audio_s"),
        "status",
    ),
)
"""Fields that --map can name besides; of these only `status` is looked for by itself."""
FIELDS = (*SYNONYMS, *OTHERS)

AT_LOG = frozenset(SYNONYMS["arrival"][SYNONYMS["arrival"].index("created_at") :])
"""Names of times at which a line was written, be that when the request came or when it ended."""

STATUSES = (
    *("status_code", "response_code", "response_status", "response_status_code", "http_status", "http_status_code"),
    *("result_signature", "status", "is_success", "success", "level", "error", "errors"),
)
"""Names of columns that say that a request failed."""

SUMS = ("num_model_requests", "num_requests", "request_count", "requests_count", "n_requests", "api_requests")
"""Names of columns that say of how many requests a row is the sum."""

_UNITS = {
    "s": "s",
    "sec": "s",
    "secs": "s",
    "seconds": "s",
    "ms": "ms",
    "msecs": "ms",
    "millis": "ms",
    "milliseconds": "ms",
}
_UNITS |= {
    "us": "us",
    "micros": "us",
    "microseconds": "us",
    "ns": "ns",
    "nano": "ns",
    "nanos": "ns",
    "nanoseconds": "ns",
}


def words_of(name: str) -> list[str]:
    """The words of a column's name, small: those of `promptTokens`, `prompt_tokens` and `Prompt Tokens` are the same."""
    plain = re.sub(r"[\[(].*?[\])]", " ", name)
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", plain).lower())


def _tails(path: str) -> list[str]:
    """The names that a path may have: its last part, its last two, ..., each as one word."""
    parts = ["".join(words_of(part)) for part in path.split(".")]
    return ["".join(parts[at:]) for at in range(len(parts))]


def matching(names: Iterable[str], wanted: Iterable[str]) -> list[tuple[str, str]]:
    """The columns *names* that are called one of *wanted*, with which: by the order of *wanted*, outer ones first."""
    rank = {"".join(words_of(each)): (at, each) for at, each in reversed(list(enumerate(wanted)))}
    found = []
    for place, name in enumerate(names):
        hits = [rank[tail] for tail in _tails(name) if tail in rank]
        if hits:
            at, each = min(hits)
            found.append(((at, name.count("."), place), name, each))
    return [(name, each) for _, name, each in sorted(found)]


def unit_of(name: str) -> str | None:
    """The unit of time that a column's name ends in; None where it says none."""
    bracket = re.search(r"[\[(]([a-z]+)[\])]\s*$", name.lower())
    if bracket and bracket[1] in _UNITS:
        return _UNITS[bracket[1]]
    words = words_of(name.rpartition(".")[2])
    return _UNITS.get(words[-1]) if len(words) > 1 else None
