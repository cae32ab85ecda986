"""Exports of traces as tools write them, by the names of the tools: small files, and the requests that are in them.

Each says the same four requests unless it says otherwise: arrivals 0, 1.5, 2 and 10.25 s after the first.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

START = datetime(2025, 5, 1, 12, 0, 0, tzinfo=UTC)
AFTER_S = (0.0, 1.5, 2.0, 10.25)
PROMPTS = (812, 77, 4096, 1300)
OUTPUTS = (120, 9, 512, 64)
FOUR = tuple(zip(AFTER_S, PROMPTS, OUTPUTS, strict=True))


def at(after_s: float) -> datetime:
    return START + timedelta(seconds=after_s)


def iso(after_s: float, end: str = "Z") -> str:
    return at(after_s).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + end


def blank(after_s: float) -> str:
    return at(after_s).strftime("%Y-%m-%d %H:%M:%S.%f")


def epoch_s(after_s: float) -> float:
    return at(after_s).timestamp()


def lines(records: Sequence[Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def csv_of(header: str, rows: Sequence[Sequence[Any]]) -> bytes:
    return "".join(",".join(map(str, row)) + "\n" for row in [header.split(","), *rows]).encode()


@dataclass(frozen=True, kw_only=True)
class Export:
    """A file of a tool, and what reading it gives."""

    tool: str
    name: str
    content: bytes | dict[str, bytes]
    """The files of a folder by name."""
    arrival_s: tuple[float, ...] | None = AFTER_S
    """None: the file does not say."""
    prompts: tuple[int, ...] | None = PROMPTS
    """None: counted from texts."""
    outputs: tuple[int, ...] | None = OUTPUTS
    refused: tuple[str, ...] = ()
    """Words of the sentence of a refusal."""
    way_out: dict[str, Any] = field(default_factory=dict)
    """Settings of `read_trace` with which it is read all the same."""
    notes: tuple[str, ...] = ()
    """Words of the notes."""


def chat(prompt: str, answer: str | None = None) -> list[dict[str, str]]:
    said = [{"role": "system", "content": "You are a careful assistant. " * 20}, {"role": "user", "content": prompt}]
    return said if answer is None else [*said, {"role": "assistant", "content": answer}]


def openai_responses() -> bytes:
    return lines(
        [
            {
                "id": f"chatcmpl-{i}", "object": "chat.completion", "created": int(epoch_s(t)), "model": "gpt-4o-2024-08-06",
                "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
                "usage": {
                    "prompt_tokens": p, "completion_tokens": o, "total_tokens": p + o,
                    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
                    "completion_tokens_details": {"reasoning_tokens": 0},
                },
                "system_fingerprint": "fp_1",
            }
            for i, (t, p, o) in enumerate(FOUR)
        ]
    )  # fmt: skip


def openai_usage_page() -> bytes:
    result = {"object": "organization.usage.completions.result", "input_tokens": 81200, "output_tokens": 900}
    return json.dumps(
        {
            "object": "page",
            "data": [
                {"object": "bucket", "start_time": 1746100800, "end_time": 1746104400,
                 "results": [result | {"num_model_requests": 100}]},
            ],
            "has_more": False,
        }
    ).encode()  # fmt: skip


VLLM_LOG = b"""INFO 05-01 12:00:00 [logger.py:43] Received request chatcmpl-1: prompt: 'Hi', params: SamplingParams(n=1)
INFO 05-01 12:00:00 [async_llm.py:270] Added request chatcmpl-1.
INFO 05-01 12:00:10 [loggers.py:118] Engine 000: Avg prompt throughput: 81.2 tokens/s, Running: 1 reqs, Waiting: 0 reqs
"""


def vllm_bench() -> bytes:
    return json.dumps(
        {
            "date": "20250501-120000", "backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B-Instruct", "num_prompts": 4,
            "request_rate": "inf", "duration": 12.0, "completed": 4, "input_lens": PROMPTS, "output_lens": OUTPUTS,
            "ttfts": [0.1] * 4, "itls": [[0.01], [0.01], [0.01], [0.01]], "start_times": [7000.5 + t for t in AFTER_S],
            "errors": ["", "", "", ""],
        }
    ).encode()  # fmt: skip


LITELLM = (
    "request_id,call_type,api_key,spend,total_tokens,prompt_tokens,completion_tokens,startTime,endTime,completionStartTime,"
    "model,model_group,custom_llm_provider,user,metadata,cache_hit,team_id,end_user,status,session_id"
)


def litellm_rows() -> list[dict[str, Any]]:
    found = []
    for i, (t, p, o) in enumerate(FOUR):
        row = dict.fromkeys(LITELLM.split(","), "")
        row |= {
            "request_id": f"r{i}",
            "call_type": "acompletion",
            "spend": 0.01,
            "total_tokens": p + o,
            "prompt_tokens": p,
        }
        row |= {"completion_tokens": o, "startTime": iso(t), "endTime": iso(t + 3), "completionStartTime": iso(t + 0.2)}
        row |= {"model": "azure/gpt-4o", "cache_hit": "False", "status": "success", "session_id": f"s{i % 2}"}
        found.append(row)
    failed = found[1] | {
        "request_id": "rf",
        "status": "failure",
        "completion_tokens": 0,
        "total_tokens": 0,
        "prompt_tokens": 0,
    }
    return [*found[:2], failed, *found[2:]]


def litellm_csv() -> bytes:
    rows = litellm_rows()
    for row in rows:
        row["metadata"] = '"{""user_api_key"": ""k"", ""tags"": [""a"", ""b""]}"'
        row["startTime"], row["endTime"] = (
            row["startTime"].replace("T", " ")[:-1],
            row["endTime"].replace("T", " ")[:-1],
        )
    return csv_of(LITELLM, [list(row.values()) for row in rows])


def langfuse_rows() -> list[dict[str, Any]]:
    # The newest first, with a span around each generation, which has no tokens of its own.
    found = []
    for i, (t, p, o) in reversed(list(enumerate(FOUR))):
        generation = {
            "id": f"g{i}", "traceId": f"t{i}", "type": "GENERATION", "name": "answer", "startTime": iso(t), "endTime": iso(t + 2),
            "completionStartTime": iso(t + 1), "model": "claude-sonnet-4", "modelParameters": {"max_tokens": 1024},
            "level": "DEFAULT",
            "statusMessage": None, "usageDetails": {"input": p, "output": o, "total": p + o}, "usage": {"input": p,
            "output": o, "unit": "TOKENS"},
            "costDetails": {"input": 0.001, "output": 0.002}, "parentObservationId": f"s{i}",
        }  # fmt: skip
        span = {
            "id": f"s{i}",
            "traceId": f"t{i}",
            "type": "SPAN",
            "name": "handle",
            "startTime": iso(t),
            "endTime": iso(t + 3),
        }
        found += [generation, span | {"level": "DEFAULT", "usageDetails": {}, "model": None}]
    return found


def langfuse_csv() -> bytes:
    return csv_of(
        "id,name,type,level,startTime,endTime,latency,timeToFirstToken,model,inputTokens,outputTokens,totalTokens,totalCost",
        [[f"g{i}", "answer", "GENERATION", "DEFAULT", iso(t), iso(t + 2), 2.0, 1.0, "gpt-4o", p, o, p + o, 0.1]
         for i, (t, p, o) in enumerate(FOUR)],
    )  # fmt: skip


def envoy() -> bytes:
    records: list[dict[str, Any]] = [
        {
            "start_time": iso(t), "method": "POST", "path": "/v1/chat/completions", "x-envoy-origin-path": "/v1/chat/completions",
            "response_code": 200, "duration": 1830, "bytes_received": 3000, "upstream_host": "10.0.0.1:443",
            "gen_ai.request.model": "llama-3.1-70b", "gen_ai.usage.input_tokens": p, "gen_ai.usage.output_tokens": o,
        }
        for t, p, o in FOUR
    ]  # fmt: skip
    refused = records[0] | {"response_code": 429, "gen_ai.usage.input_tokens": "-", "gen_ai.usage.output_tokens": "-"}
    return lines([*records, refused])


def helicone() -> bytes:
    header = "request_id,request_created_at,response_created_at,response_status,"
    header += "request_model,prompt_tokens,completion_tokens,delay_ms,user_id"
    return csv_of(
        header,
        [
            [f"h{i}", blank(t) + "+00", blank(t + 1) + "+00", 200, "gpt-4o", p, o, 1000, ""]
            for i, (t, p, o) in enumerate(FOUR)
        ],
    )


def portkey() -> bytes:
    return lines(
        [
            {
                "id": f"p{i}", "trace_id": f"t{i}", "created_at": iso(t), "ai_org": "openai", "ai_model": "gpt-4o", "req_units": p,
                "res_units": o, "total_units": p + o, "cost": 0.1, "cost_currency": "USD", "response_time": 1830,
                "response_status_code": 200, "is_success": True, "mode": "single", "config": None,
            }
            for i, (t, p, o) in enumerate(FOUR)
        ]
    )  # fmt: skip


def openrouter() -> bytes:
    header = (
        "generation_id,created_at,cost_total,tokens_prompt,tokens_completion,tokens_reasoning,tokens_cached,model_permaslug,"
        "provider_name,cancelled,streamed,finish_reason_normalized,generation_time_ms,time_to_first_token_ms,app_name"
    )
    return csv_of(
        header,
        [[f"gen-{i}", blank(t), 0.1, p, o, 0, 0, "meta-llama/llama-3.3-70b", "Together", "false", "true", "stop", 900, 200, "app"]
         for i, (t, p, o) in reversed(list(enumerate(FOUR)))],
    )  # fmt: skip


def kafka(payload_as_text: bool) -> bytes:
    found = []
    for i, (t, p, o) in enumerate(FOUR):
        value: Any = {"model": "m", "prompt_tokens": p, "output_tokens": o, "stream": True}
        found.append(
            {
                "topic": "llm.requests", "partition": 0, "offset": 17 + i, "key": f"k{i}",
                **({"tstype": "create", "ts": round(epoch_s(t) * 1e3), "payload": json.dumps(value)} if payload_as_text
                   else {"timestamp": round(epoch_s(t) * 1e3), "value": value}),
            }
        )  # fmt: skip
    return lines(found)


def azure_diagnostics() -> bytes:
    properties = {
        "apiName": "Azure OpenAI API",
        "requestLength": 3000,
        "responseLength": 512,
        "streamType": "Streaming",
        "modelName": "gpt-4o",
    }
    return lines(
        [
            {
                "time": iso(t), "resourceId": "/SUBSCRIPTIONS/X", "category": "RequestResponse",
                "operationName": "ChatCompletions_Create",
                "durationMs": 1830, "resultSignature": "200", "location": "eastus", "properties": json.dumps(properties),
            }
            for t in AFTER_S
        ]
    )  # fmt: skip


def azure_gateway() -> bytes:
    return csv_of(
        "TimeGenerated [UTC],CorrelationId,OperationName,DeploymentName,ModelName,"
        "PromptTokens,CompletionTokens,TotalTokens,IsStreamCompletion",
        [[blank(t) + "0Z", f"c{i}", "chat", "d", "gpt-4o", p, o, p + o, "true"] for i, (t, p, o) in enumerate(FOUR)],
    )


def sharegpt() -> bytes:
    turns = [
        {"from": "human", "value": "What is a roofline? " * 40},
        {"from": "gpt", "value": "A bound on performance by bandwidth and arithmetic. " * 10},
        {"from": "human", "value": "And where is its ridge?"},
        {"from": "gpt", "value": "Where both bounds meet."},
    ]
    return json.dumps(
        [{"id": "a_0", "conversations": turns}, {"id": "b_0", "conversations": turns[:2]}], indent=1
    ).encode()


def otlp_span(t: float, attributes: dict[str, Any], status: int = 1) -> dict[str, Any]:
    def value(of: Any) -> dict[str, Any]:
        return {"intValue": str(of)} if isinstance(of, int) else {"stringValue": of}

    start = round(epoch_s(t) * 1e9)
    return {
        "traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "chat llama", "kind": 3,
        "startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 10**9), "status": {"code": status},
        "attributes": [{"key": key, "value": value(each)} for key, each in attributes.items()],
    }  # fmt: skip


def otlp() -> bytes:
    def document(spans: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "resourceSpans": [
                {"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "llm"}, "spans": spans}]}
            ]
        }

    spans = [
        otlp_span(
            t,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": "llama",
                "gen_ai.usage.input_tokens": p,
                "gen_ai.usage.output_tokens": o,
            },
        )
        for t, p, o in FOUR
    ]
    agent = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.usage.input_tokens": sum(PROMPTS),
        "gen_ai.usage.output_tokens": sum(OUTPUTS),
    }
    other = otlp_span(0.1, {"http.request.method": "POST"})
    # As the file exporter of the collector writes: a document a line.
    return lines([document([*spans[:2], other]), document([*spans[2:], otlp_span(0.0, agent)])])


def datadog() -> bytes:
    return json.dumps(
        {
            "data": [
                {
                    "id": f"d{i}", "type": "span",
                    "attributes": {
                        "span_id": f"{i}", "trace_id": f"t{i}", "ml_app": "app", "span_kind": "llm", "model_name": "gpt-4o",
                        "status": "ok",
                        "start_ns": round(epoch_s(t) * 1e9), "duration": 1.83e9,
                        "metrics": {"input_tokens": p, "output_tokens": o, "total_tokens": p + o},
                    },
                }
                for i, (t, p, o) in enumerate(FOUR)
            ],
            "meta": {"page": {}},
        }
    ).encode()  # fmt: skip


def app_line(t: float, p: int, o: int) -> str:
    return json.dumps(
        {"level": "info", "msg": "request done", "num_input_tokens": p, "num_output_tokens": o, "at": iso(t)}
    )


def loki_lines() -> bytes:
    return lines([{"labels": {"app": "gw"}, "line": app_line(*each), "timestamp": iso(each[0])} for each in FOUR])


def loki_api() -> bytes:
    values = [[str(round(epoch_s(each[0]) * 1e9)), app_line(*each)] for each in FOUR]
    result = [{"stream": {"app": "gw"}, "values": values[:3]}, {"stream": {"app": "gw2"}, "values": values[3:]}]
    return json.dumps({"status": "success", "data": {"resultType": "streams", "result": result}}).encode()


def nginx() -> bytes:
    # nginx writes a line when the request has ended.
    took = (0.25, 0.5, 4.0, 1.0)
    rows = [
        {
            "time_iso8601": at(t + s).astimezone(timezone(timedelta(hours=2))).isoformat(), "msec": f"{epoch_s(t + s):.3f}",
            "status": "200",
            "request_time": f"{s:.3f}", "request": "POST /v1/completions HTTP/1.1",
            "upstream": {"addr": "10.0.0.1:8000", "usage": {"prompt_tokens": p, "completion_tokens": o}},
        }
        for (t, p, o), s in zip(FOUR, took, strict=True)
    ]  # fmt: skip
    return lines(rows)


def pandas_odd() -> bytes:
    return csv_of(",Zeitstempel,Len In,Len Out,Kunde", [[i, blank(t), p, o, "k"] for i, (t, p, o) in enumerate(FOUR)])


def parquet() -> bytes:
    import pandas

    frame = pandas.DataFrame(
        {"ts": [at(t) for t in AFTER_S], "n_input": PROMPTS, "n_output": OUTPUTS, "host": ["a"] * 4}
    )
    stream = io.BytesIO()
    frame.to_parquet(stream)
    return stream.getvalue()


def hourly() -> dict[str, bytes]:
    header = "timestamp,prompt_tokens,completion_tokens"
    files = [csv_of(header, [[iso(t), p, o] for t, p, o in part]) for part in (FOUR[:2], FOUR[2:])]
    return {"2025-05-01-12.csv": files[0], "2025-05-01-13.csv": files[1], ".part": b"\x00", "_SUCCESS": b""}


def openai_chat() -> bytes:
    return lines([{"messages": chat(f"Question {i}?", "An answer. " * (i + 1))} for i in range(3)])


def openai_batch() -> bytes:
    return lines(
        [
            {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "gpt-4o-mini", "messages": chat(f"Question {i}?"), "max_tokens": 200 + i}}
            for i in range(3)
        ]
    )  # fmt: skip


def sglang() -> bytes:
    found = []
    for i, (t, p, o) in enumerate(FOUR):
        out = {
            "text": "x",
            "meta_info": {
                "id": f"{i}",
                "prompt_tokens": p,
                "completion_tokens": o,
                "cached_tokens": 0,
                "e2e_latency": 1.0,
            },
        }
        asked = {"sampling_params": {"max_new_tokens": 1024, "temperature": 0}}
        found.append({"timestamp": iso(t), "event": "request.received", "rid": f"{i}", "obj": asked})
        # Said when the answer has ended.
        found.append({"timestamp": iso(t + 1.0), "event": "request.finished", "rid": f"{i}", "obj": asked, "out": out})
    return lines(found)


def bedrock() -> bytes:
    return lines(
        [
            {
                "schemaType": "ModelInvocationLog", "schemaVersion": "1.0", "timestamp": iso(t), "accountId": "1",
                "region": "us-east-1",
                "requestId": f"{i}", "operation": "Converse", "modelId": "anthropic.claude",
                "input": {"inputContentType": "application/json", "inputTokenCount": p},
                "output": {"outputContentType": "application/json", "outputTokenCount": o},
            }
            for i, (t, p, o) in enumerate(FOUR)
        ]
    )  # fmt: skip


def langsmith() -> bytes:
    return csv_of(
        "id,name,run_type,start_time,end_time,status,latency,first_token_time,prompt_tokens,completion_tokens,total_tokens,session_id",
        [[f"l{i}", "ChatOpenAI", "llm", iso(t, "") + "000", iso(t + 1, ""), "success", 1.0, "", p, o, p + o, "project"]
         for i, (t, p, o) in enumerate(FOUR)],
    )  # fmt: skip


def elastic() -> bytes:
    hits = [
        {"_index": "gw", "_id": f"{i}", "_score": 1.0,
         "_source": {"@timestamp": iso(t), "http": {"response": {"status_code": 200}}, "llm": {"usage": {"prompt_tokens": p,
         "completion_tokens": o}}}}
        for i, (t, p, o) in enumerate(FOUR)
    ]  # fmt: skip
    return json.dumps({"took": 3, "timed_out": False, "hits": {"total": {"value": 4}, "hits": hits}}).encode()


def vertex() -> bytes:
    return lines(
        [
            {"logging_time": iso(t), "model": "gemini-2.0-flash",
             "full_response": {"usageMetadata": {"promptTokenCount": p, "candidatesTokenCount": o, "totalTokenCount": p + o}}}
            for t, p, o in FOUR
        ]
    )  # fmt: skip


def wildchat() -> bytes:
    return lines(
        [
            {"conversation_hash": f"c{i}", "model": "gpt-4", "timestamp": iso(t), "turn": 1, "language": "English",
             "conversation": [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi. " * 5}]}
            for i, t in enumerate(AFTER_S)
        ]
    )  # fmt: skip


EXPORTS: tuple[Export, ...] = (
    # `created` is a whole second.
    Export(tool="OpenAI responses", name="responses.jsonl", content=openai_responses(), arrival_s=(0, 1, 2, 10)),
    Export(tool="OpenAI usage page", name="usage.json", content=openai_usage_page(), refused=("summed", "a row a request")),
    Export(tool="vLLM server log", name="vllm.log", content=VLLM_LOG, refused=("no columns", "JSON lines")),
    Export(tool="vLLM bench result", name="bench.json", content=vllm_bench()),
    Export(tool="LiteLLM spend logs CSV", name="spend.csv", content=litellm_csv(), notes=("1 failed",)),
    Export(tool="LiteLLM spend logs JSON", name="spend.json", content=json.dumps(litellm_rows()).encode(), notes=("1 failed",)),
    Export(tool="Langfuse JSONL", name="observations.jsonl", content=lines(langfuse_rows()), notes=("4 without",)),
    Export(tool="Langfuse CSV", name="observations.csv", content=langfuse_csv()),
    Export(tool="Envoy AI gateway", name="access.log", content=envoy(), notes=("1 failed",)),
    Export(tool="Helicone", name="helicone.csv", content=helicone()),
    Export(tool="Portkey", name="portkey.jsonl", content=portkey()),
    Export(tool="OpenRouter activity", name="activity.csv", content=openrouter()),
    Export(tool="Kafka values", name="topic.jsonl", content=kafka(payload_as_text=False)),
    Export(tool="Kafka payloads as text", name="kcat.jsonl", content=kafka(payload_as_text=True)),
    Export(tool="Azure OpenAI diagnostics", name="PT1H.json", content=azure_diagnostics(), refused=("prompt_tokens", "--map")),
    Export(tool="Azure API management", name="query.csv", content=azure_gateway()),
    Export(
        tool="Azure LLM trace",
        name="azure.csv",
        content=csv_of("TIMESTAMP,ContextTokens,GeneratedTokens", [[blank(t) + "0", p, o] for t, p, o in FOUR]),
    ),
    Export(
        tool="BurstGPT",
        name="burst.csv",
        content=csv_of("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", [[t, "GPT-4", p, o, p + o,
        "API log"] for t, p, o in FOUR]),
    ),
    Export(
        tool="Mooncake",
        name="mooncake.jsonl",
        content=lines([{"timestamp": round(t * 1e3), "input_length": p, "output_length": o,
        "hash_ids": list(range(-(-p // 512)))} for t, p, o in FOUR]),
    ),
    Export(tool="ShareGPT", name="sharegpt.json", content=sharegpt(), arrival_s=None, prompts=None, outputs=None,
    notes=("approximate",)),
    Export(tool="OpenAI chat JSONL", name="train.jsonl", content=openai_chat(), arrival_s=None, prompts=None, outputs=None,
    notes=("approximate",)),
    Export(
        tool="OpenAI batch input", name="batch.jsonl", content=openai_batch(), arrival_s=None, prompts=None, outputs=(200,
        201, 202),
        refused=("output", "missing_output"), way_out={"missing_output": "max_tokens"},
    ),
    Export(tool="OpenTelemetry GenAI spans", name="traces.json", content=otlp(), notes=("1 without", "invoke_agent")),
    Export(tool="Datadog LLM observability", name="spans.json", content=datadog()),
    Export(tool="Loki lines", name="logcli.jsonl", content=loki_lines()),
    Export(tool="Loki API", name="query_range.json", content=loki_api()),
    Export(tool="nginx JSON log", name="access.json", content=nginx(), notes=("end",)),
    Export(
        tool="pandas CSV with odd names", name="frame.csv", content=pandas_odd(), refused=("Zeitstempel", "Len In", "--map"),
        way_out={"columns": {"arrival": "Zeitstempel", "prompt_tokens": "Len In", "output_tokens": "Len Out"}},
    ),
    Export(tool="Parquet", name="log.parquet", content=parquet()),
    Export(tool="hourly files", name="hours", content=hourly()),
    Export(tool="SGLang request log", name="sglang.jsonl", content=sglang(), notes=("4 without",)),
    Export(tool="Bedrock invocation log", name="bedrock.json", content=bedrock()),
    Export(tool="LangSmith runs", name="runs.csv", content=langsmith()),
    Export(tool="Elasticsearch hits", name="hits.json", content=elastic()),
    Export(tool="Vertex request log", name="vertex.jsonl", content=vertex()),
    Export(tool="WildChat", name="wildchat.jsonl", content=wildchat(), prompts=None, outputs=None, notes=("approximate",)),
)  # fmt: skip
