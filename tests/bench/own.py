"""Files of our own making, after the fields of tools that publish no sample: small, and of no measured server."""

from __future__ import annotations

import json

VLLM_DETAILED = {
    "date": "20260101-000000", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "m", "tokenizer_id": "m",
    "num_prompts": 4, "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": None, "duration": 2.5, "completed": 3, "failed": 1,
    "total_input_tokens": 300, "total_output_tokens": 9, "request_throughput": 1.2, "request_goodput": None,
    "output_throughput": 3.6, "total_token_throughput": 123.6, "input_lens": [100, 110, 90, 100], "output_lens": [3, 4, 2, 0],
    "ttfts": [0.05, 0.06, 0.04, 0.0], "itls": [[0.01, 0.03], [0.01, 0.01, 0.01], [0.02], []],
    "start_times": [10.0, 10.4, 11.0, 11.5], "generated_texts": ["", "", "", ""], "errors": ["", "", "", "timeout"],
    "mean_ttft_ms": 50.0, "median_ttft_ms": 50.0, "std_ttft_ms": 8.2, "p99_ttft_ms": 59.8, "mean_tpot_ms": 16.7,
    "median_tpot_ms": 20.0, "std_tpot_ms": 4.7, "p99_tpot_ms": 20.0, "mean_itl_ms": 15.0, "median_itl_ms": 10.0,
    "std_itl_ms": 7.6, "p99_itl_ms": 29.5,
}  # fmt: skip
SGLANG = {
    "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": 8,
    "sharegpt_output_len": None,
    "random_input_len": 1024, "random_output_len": 128, "random_range_ratio": 0.5,
    "server_info": {"tp_size": 2, "version": "0.5.9"},
    "duration": 10.0, "completed": 40, "total_input_tokens": 30720, "total_output_tokens": 3840,
    "total_output_tokens_retokenized": 3835, "request_throughput": 4.0, "input_throughput": 3072.0, "output_throughput": 384.0,
    "total_throughput": 3456.0, "mean_e2e_latency_ms": 900.0, "median_e2e_latency_ms": 880.0, "std_e2e_latency_ms": 50.0,
    "p99_e2e_latency_ms": 1000.0, "mean_ttft_ms": 60.0, "median_ttft_ms": 58.0, "std_ttft_ms": 5.0, "p99_ttft_ms": 80.0,
    "mean_tpot_ms": 8.8, "median_tpot_ms": 8.7, "std_tpot_ms": 0.2, "p99_tpot_ms": 9.5, "mean_itl_ms": 8.8,
    "median_itl_ms": 8.5, "std_itl_ms": 1.0, "p95_itl_ms": 10.0, "p99_itl_ms": 12.0, "concurrency": 3.6, "accept_length": None,
}  # fmt: skip
GENAI_PERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 2.0},
    "request_latency": {
        "unit": "ms",
        "avg": 500.0,
        "p50": 490.0,
        "p99": 600.0,
        "min": 400.0,
        "max": 610.0,
        "std": 20.0,
    },
    "time_to_first_token": {"unit": "ms", "avg": 30.0, "p50": 29.0, "p99": 40.0, "min": 20.0, "max": 41.0, "std": 3.0},
    "inter_token_latency": {"unit": "ms", "avg": 7.4, "p50": 7.3, "p99": 8.0, "min": 7.0, "max": 8.1, "std": 0.1},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 128.0},
    "output_sequence_length": {
        "unit": "tokens",
        "avg": 64.0,
        "p50": 64.0,
        "p99": 64.0,
        "min": 64.0,
        "max": 64.0,
        "std": 0.0,
    },
    "input_sequence_length": {
        "unit": "tokens",
        "avg": 200.0,
        "p50": 200.0,
        "p99": 202.0,
        "min": 198.0,
        "max": 202.0,
        "std": 1.0,
    },
    "request_count": {"unit": "count", "avg": 20.0},
    "input_config": {
        "perf_analyzer": {"stimulus": {"concurrency": 1}},
        "endpoint": {"type": "chat", "model_names": ["m"]},
    },
}
VLLM_PROMETHEUS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 400.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 6.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.02",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.04",model_name="m"} 8.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 10.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.35
"""
VLLM_LOG = """\
INFO 11-21 10:00:00 [__init__.py:1] vLLM API server version 0.19.1
INFO 11-21 10:00:01 [kv_cache_utils.py:1] GPU KV cache size: 446,128 tokens
INFO 11-21 10:00:10 [loggers.py:1] Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 20.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 10.0%, Prefix cache hit rate: 50.0%
INFO 11-21 10:00:20 [loggers.py:1] Engine 000: Avg prompt throughput: 300.0 tokens/s, Avg generation throughput: 60.0 tokens/s, Running: 4 reqs, Waiting: 2 reqs, Preemptions: 3, GPU KV cache usage: 30.0%, Prefix cache hit rate: 60.0%
INFO 11-21 10:00:30 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 60.0%
"""  # noqa: E501 (lines as a server logs them)
REQUEST_LOG = """\
arrival_s,first_token_s,end_s,prompt_tokens,output_tokens,status
100.0,100.05,100.35,200,31,ok
100.5,100.56,100.76,180,21,ok
101.0,,,190,,timeout
100.7,100.77,101.07,210,31,ok
"""
RUNS = """\
rate_req_s,requests,prompt_tokens,output_tokens,ttft_mean_ms,p99_tpot_ms,arm
2,100,512,128,40,9.5,a
4,200,512,128,x,9.9,b
8,400,512,128,60,12.0,c
"""
REQUESTS_OF_INFERENCE_PERF = [
    {
        "start_time": 5.0 + at, "end_time": 5.4 + at, "request": "", "response": "", "error": None,
        "info": {"input_tokens": 100, "output_tokens": 5,
                 "output_token_times": [5.1 + at, 5.2 + at, 5.3 + at, 5.35 + at, 5.4 + at]},
    }
    for at in range(3)
]  # fmt: skip

FILES: dict[str, str] = {
    "vllm_detailed.json": json.dumps(VLLM_DETAILED, indent=1),
    "sglang.jsonl": "\n".join(json.dumps({**SGLANG, "request_rate": rate}) for rate in (2.0, 4.0, float("inf"))),
    "genai_perf.json": json.dumps(GENAI_PERF),
    "vllm.prom": VLLM_PROMETHEUS,
    "vllm.log": VLLM_LOG,
    "requests.csv": REQUEST_LOG,
    "runs.csv": RUNS,
    "requests.json": json.dumps(REQUESTS_OF_INFERENCE_PERF),
}
