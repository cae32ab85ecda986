"""The kinds of measurements: the columns of each, and the pattern that names of files usually follow."""

from __future__ import annotations

_PREFILL = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "latency_us")
_DECODE = ("batch_size", "kv_len", "num_heads", "num_kv_heads", "head_dim", "latency_us")
_WINDOW = ("window_size", "query_dtype", "kv_dtype")
_PAGED = (
    "is_prefill", "batch_size", "prefill_chunk_size", "kv_cache_size", "latency_us", "heads_per_rank",
    "kv_heads_per_rank",
)  # fmt: skip
_SILICON = (
    "model_path", "system", "backend", "backend_version", "precision", "gemm_quant_mode", "moe_quant_mode", "mode",
    "isl", "osl", "concurrency",
)  # fmt: skip
_MODULE = ("gemm_dtype", "query_dtype", "kv_dtype", "num_heads", "batch_size")
_NODE = r"(?P<device>[a-z0-9]+)"
_SOFTWARE = r"(?P<source>[a-z]+)(?P<version>[0-9][0-9a-z.]*)?"
SAME_FORMAT = {
    "fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "float32": "fp32", "fp8block": "fp8_block",
    "fp8static": "fp8", "fp4": "nvfp4",
}  # fmt: skip
# Back ends of `hwmodels.calibrate`, which add the spread of their repeats, and formats to more names.
CALIBRATING = ("torch", "jax", "numpy", "fake")
_SPREAD = ("min_us", "max_us", "repeats")
# Columns that tables of products on AMD's GPUs, TPUs and Trainium have beside the time.
_ACCELERATORS = (
    "library", "p10_us", "p90_us", "samples", "queued_us", "dispatch_to_ready_us", "series", "executed_m", "executed_n",
    "executed_k", "tensor_engine_active_us", "dma_active_us", "hbm_read_bytes", "hbm_write_bytes",
)  # fmt: skip
# Columns that tables of sessions have beside those that are replayed or compared.
_SUMMED = tuple(f"{what}_{how}_ms" for what in ("ttft", "tpot", "itl", "e2e") for how in ("mean", "p50", "p90", "p99"))
_AGENTIC = (
    *_SUMMED, "ep", "aggregate", "requests_file", "requests", "input_tokens_per_s", "output_tokens_per_s",
    *(f"{what}_len_{how}" for what in ("input", "output") for how in ("mean", "p50", "p90")), "prompt_tokens",
    "generated_tokens", "theoretical_hit_rate", "weights_gib_per_gpu", "kv_use_max", "running_mean", "running_max",
    "waiting_mean", "waiting_max", "preemptions", "stalls", "stalls_s", "longest_stall_s",
)  # fmt: skip
_MULTI_TURN = (
    *_SUMMED, "requests_per_s", "input_tokens_per_s", "total_tokens_per_s", "running_mean", "waiting_mean", "preemptions",
)  # fmt: skip
# Any format's name, so that one without a model is counted by that name and not read as part of another word.
DTYPE = (
    r"(?:_(?P<dtype>(?:(?:bfloat|float|bf|tf|mxfp|nvfp|fp|int)\d+q?|w\d+a(?:fp)?\d+)"
    r"(?:_?(?:block|static|wo|ootb|mxfp\d|tensor))*))?"
)

# fmt: off
# kind -> (usual pattern of the stem, columns that must be there, columns that may be)
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (
        rf"gemm_{_NODE}{DTYPE}(?:_(?P<model>[a-z0-9.-]+?))?_{_SOFTWARE}",
        ("m", "n", "k", "latency_us"),
        ("model", "op", "tp", "layer", *_SPREAD, *_ACCELERATORS),
    ),
    "attention_prefill": (
        rf"attention_prefill_{_NODE}{DTYPE}_{_SOFTWARE}", _PREFILL, ("past_len", *_SPREAD)
    ),
    "attention_decode": (
        rf"attention_decode_{_NODE}{DTYPE}_{_SOFTWARE}", _DECODE, ("query_len", *_SPREAD)
    ),
    "attention_windowed_prefill": (
        rf"attention_windowed_prefill_{_NODE}{DTYPE}_{_SOFTWARE}", (*_PREFILL, *_WINDOW), ("past_len", *_SPREAD)
    ),
    "attention_windowed_decode": (
        rf"attention_windowed_decode_{_NODE}{DTYPE}_{_SOFTWARE}", (*_DECODE, *_WINDOW), ("query_len", *_SPREAD)
    ),
    "encoder_attention": (
        rf"encoder_attention_{_NODE}{DTYPE}_{_SOFTWARE}",
        ("num_heads", "head_dim", "batch_size", "seq_len", "latency_us"),
        (),
    ),
    "host": (rf"host_{_NODE}{DTYPE}_{_SOFTWARE}", ("op", "layers", "latency_us"), _SPREAD),
    "attention_mixed": (
        rf"attention_mixed_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "latency_us"),
        (),
    ),
    "attention_paged": (rf"attention_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}", _PAGED, ()),
    "collectives_nccl": (
        rf"collectives_(?P<source>nccl|rccl)_{_NODE}(?:_(?P<topology>[a-z_]+))?",
        ("collective", "dtype", "num_gpus", "message_bytes", "latency_us"),
        _SPREAD,
    ),
    "collectives_nodes": (
        rf"collectives_{_NODE}_(?P<topology>[a-z_]+)_(?P<source>vidur)",
        ("collective", "num_workers", "devices_per_node", "size_bytes", "latency_us"),
        ("min_us",),
    ),
    "allreduce": (
        rf"allreduce_(?P<source>[a-z]+)custom_{_NODE}",
        ("backend", "num_gpus", "message_bytes", "latency_us"),
        (),
    ),
    "dispatch": (
        rf"dispatch_{_NODE}_(?P<library>[a-z]+)_{_SOFTWARE}",
        ("mode", "num_gpus", "sms", "hidden_size", "topk", "num_experts", "num_tokens", "dispatch_us", "combine_us"),
        (),
    ),
    "elementwise": (
        rf"elementwise_{_NODE}{DTYPE}_(?P<source>vidur|{'|'.join(CALIBRATING)})(?P<version>[0-9][0-9a-z.]*)?",
        ("model", "op", "tp", "m", "width", "gated", "latency_us"),
        _SPREAD,
    ),
    "elementwise_rates": (
        rf"elementwise_{_NODE}_(?P<source>llmcompass)",
        ("op", "rows", "cols", "gelements_per_s", "latency_us"),
        (),
    ),
    "computescale": (
        rf"computescale_{_NODE}{DTYPE}_{_SOFTWARE}", ("m", "k", "static_us", "dynamic_us", "latency_us"), ()
    ),
    "quantize": (rf"quantize_{_NODE}{DTYPE}_{_SOFTWARE}", ("m", "k", "latency_us"), _SPREAD),
    "layers": (
        rf"layers_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}",
        ("model", "tp", "layer", "m", "n", "k", "latency_us"),
        (),
    ),
    "moe": (
        rf"moe_{_NODE}{DTYPE}_{_SOFTWARE}",
        (
            "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
            "moe_ep_size", "distribution", "latency_us",
        ),
        ("activation", "stage1_us", "stage2_us"),
    ),
    "moe_layer": (
        rf"moe_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("tokens", "activated_experts", "latency_us"),
        (),
    ),
    "mla": (
        rf"mla_(?P<phase>prefill|decode)_{_NODE}{DTYPE}(?:_{_SOFTWARE})?",
        ("batch_size", "isl", "step", "num_heads", "tp_size", "latency_us"),
        (),
    ),
    "mla_module_prefill": (rf"mla_module_prefill_{_NODE}_{_SOFTWARE}", (*_MODULE, "seq_len", "latency_us"), ()),
    "mla_module_decode": (rf"mla_module_decode_{_NODE}_{_SOFTWARE}", (*_MODULE, "kv_len", "latency_us"), ()),
    "mla_bmm": (rf"mla_bmm_{_NODE}_{_SOFTWARE}", ("op", "dtype", "num_tokens", "num_heads", "latency_us"), ()),
    "linear_attention": (
        rf"linear_attention_{_NODE}_{_SOFTWARE}",
        ("kernel", "phase", "batch_size", "seq_len", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim",
         "d_conv", "latency_us"),
        (),
    ),
    "kda": (
        rf"kda_{_NODE}{DTYPE}_{_SOFTWARE}", ("kernel", "phase", "num_heads", "batch_size", "seq_len", "latency_us"), ()
    ),
    "mamba2": (
        rf"mamba2_{_NODE}{DTYPE}_{_SOFTWARE}",
        ("kernel", "phase", "batch_size", "seq_len", "num_heads", "head_dim", "n_groups", "d_state", "chunk_size", "d_conv",
         "latency_us"),
        ("d_model",),
    ),
    "compressed_prefill": (
        rf"dsv4_(?P<layer>csa|hca)_module_prefill_{_NODE}_{_SOFTWARE}",
        ("model", "gemm_dtype", "num_heads", "batch_size", "seq_len", "kv_len", "latency_us"),
        (),
    ),
    "compressed_decode": (
        rf"dsv4_(?P<layer>csa|hca)_module_decode_{_NODE}_{_SOFTWARE}",
        ("model", "gemm_dtype", "num_heads", "batch_size", "kv_len", "latency_us"),
        (),
    ),
    "blocks_prefill": (
        rf"msa_module_prefill_{_NODE}_{_SOFTWARE}",
        ("gemm_dtype", "kv_dtype", "num_heads", "batch_size", "seq_len", "kv_len", "latency_us"),
        (),
    ),
    "blocks_decode": (
        rf"msa_module_decode_{_NODE}_{_SOFTWARE}",
        ("gemm_dtype", "kv_dtype", "num_heads", "batch_size", "kv_len", "latency_us"),
        (),
    ),
    "sparse_prefill": (
        rf"dsa_module_prefill_{_NODE}_{_SOFTWARE}",
        ("model", "gemm_dtype", "kv_dtype", "num_heads", "batch_size", "seq_len", "kv_len", "latency_us"),
        ("indexer", "kernel"),
    ),
    "sparse_decode": (
        rf"dsa_module_decode_{_NODE}_{_SOFTWARE}",
        ("model", "gemm_dtype", "kv_dtype", "num_heads", "batch_size", "kv_len", "latency_us"),
        ("indexer", "kernel"),
    ),
    "hyper_connections": (
        rf"mhc_module_{_NODE}{DTYPE}_{_SOFTWARE}", ("op", "kernel", "hidden_size", "num_tokens", "latency_us"), ()
    ),
    "tpu_attention": (r"tpu_(?P<device>[a-z0-9]+)_attention_(?P<model>[a-z0-9.-]+)", _PAGED, ()),
    "tpu_layers": (
        r"tpu_(?P<device>[a-z0-9]+)_layers_(?P<model>[a-z0-9.-]+)",
        ("layer", "m", "n", "k", "latency_us", "flag"),
        (),
    ),
    "iteration": (
        rf"iteration_(?P<source>[a-z]+)_{_NODE}_(?P<model>[a-z0-9.-]+)",
        (
            "model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size", "prompt_time_ms",
            "token_time_ms",
        ),
        ("repeats", "e2e_time_ms", "prompt_std_ms", "flag"),
    ),
    "e2e_silicon_agg": (
        r"e2e_silicon_agg",
        (*_SILICON, "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "ttft_ms",
         "tpot_ms"),
        ("measured", "provenance", "speculation"),
    ),
    "e2e_settings": (
        r"e2e_settings_agg",
        ("model_path", "system", "backend", "backend_version", "precision", "isl", "osl", "concurrency", "tp_size",
         "attention_dp_size", "moe_tp_size", "moe_ep_size", "measured", "provenance", "script", "token_budget",
         "max_sequences", "kv_dtype"),
        ("speculation", "warmup_per_client", "max_prefill_tokens", "cuda_graph_batch", "receive_interval",
         "stream_interval", "wait_iterations", "wait_tokens_share", "prefix_cache", "memory_fraction"),
    ),
    "e2e_silicon_disagg": (
        r"e2e_silicon_disagg",
        (
            *_SILICON,
            *(
                f"{phase}_{what}"
                for phase in ("prefill", "decode")
                for what in ("batch_size", "num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size",
                             "moe_ep_size")
            ),
            "ttft_ms",
            "tpot_ms",
        ),
        ("measured", "provenance", "speculation"),
    ),
    "e2e_power": (
        r"power_(?P<source>mlenergy)(?P<version>\d+)_[a-z]+",
        ("task", "model", "gpu", "num_gpus", "tp", "max_num_seqs", "avg_batch_size", "avg_output_len",
         "output_tokens_per_s", "joules_per_token", "power_w", "power_per_gpu_w"),
        ("precision", "total_params_b", "active_params_b", "dp", "ep", "pp", "max_batch_size", "itl_p50_ms", "itl_p90_ms",
         "itl_p99_ms", "tpot_mean_ms", "joules_per_request"),
    ),
    "e2e_requests": (
        rf"e2e_requests_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("request_id", "input_toks", "output_toks", "arrival_s", "queued_s", "scheduled_s", "first_token_s",
         "last_token_s"),
        (),
    ),
    "e2e_timeseries": (
        rf"e2e_timeseries_{_NODE}_(?P<model>[a-z0-9.-]+)_tp(?P<tp>\d+)_{_SOFTWARE}",
        ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct"),
        (),
    ),
    "e2e_agentic": (
        rf"agentic_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}",
        ("run", "tp", "users", "kv_offload", "clean", "duration_s", "requests_ok", "ttft_p50_ms", "itl_p50_ms",
         "output_len_mean", "prefix_hit_rate", "cpu_prefix_hit_rate", "kv_tokens", "kv_use_mean"),
        _AGENTIC,
    ),
    "e2e_agentic_requests": (
        rf"agentic_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}_requests",
        ("run", "user", "request_idx", "trace_id", "start_s", "input_tokens", "output_tokens", "e2e_ms",
         "client_hit_blocks", "ok"),
        ("output_expected", "ttft_ms", "itl_ms", "think_s", "client_miss_blocks"),
    ),
    "e2e_agentic_series": (
        rf"agentic_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}_series",
        ("run", "t_s", "running", "waiting", "kv_use"),
        ("prompt_tokens_total", "generation_tokens_total", "prefix_hits", "prefix_queries", "cpu_prefix_hits"),
    ),
    "e2e_agentic_users": (
        rf"agentic_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}_users",
        ("run", "user", "start_s", "trace_id", "first_request", "requests_left", "first_input_tokens"),
        (),
    ),
    "e2e_multiturn": (
        rf"multiturn_{_NODE}_(?P<model>[a-z0-9.-]+)_{_SOFTWARE}",
        ("tp", "clients", "kv_offload", "requests", "kv_tokens", "ttft_p50_ms", "tpot_p50_ms", "gpu_hit_rate",
         "cpu_hit_rate", "kv_use_max"),
        _MULTI_TURN,
    ),
    "e2e_multiturn_conversations": (
        rf"multiturn_{_NODE}_(?P<model>[a-z0-9.-]+)_conversations",
        ("conversation", "turn", "prompt_tokens", "output_tokens"),
        ("client", "start_s"),
    ),
}
# fmt: on
# Lines with several times: each becomes a row of its own.
SEVERAL = {"dispatch": ("dispatch_us", "combine_us")}
TEXT = {
    "library",
    "series",
    "activation",
    "model",
    "task",
    "gpu",
    "op",
    "layer",
    "kernel",
    "phase",
    "gemm_dtype",
    "query_dtype",
    "kv_dtype",
    "collective",
    "dtype",
    "backend",
    "moe_dtype",
    "distribution",
    "flag",
    "hardware",
    "model_path",
    "system",
    "backend_version",
    "precision",
    "gemm_quant_mode",
    "moe_quant_mode",
    "mode",
    "operation",
    "request_id",
    "measured",
    "provenance",
    "speculation",
    "script",
    "prefix_cache",
    "run",
    "user",
    "trace_id",
    "kv_offload",
    "clean",
    "aggregate",
    "requests_file",
}  # fmt: skip
FLAGS = {"is_prefill", "gated", "ok"}
COUNTS = {
    "m", "n", "k", "batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", "heads_per_rank",
    "kv_heads_per_rank", "num_gpus", "num_workers", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts",
    "moe_tp_size", "moe_ep_size", "width", "rows", "cols", "window_size", "num_k_heads", "head_k_dim", "num_v_heads",
    "head_v_dim", "d_conv", "n_groups", "d_state", "chunk_size",
}  # fmt: skip
# Blank cells that the conventions allow: operations that are no GEMM, one-dimensional operations, unknown settings.
MAY_BE_BLANK = {
    "layers": {"n", "k"},
    "tpu_layers": {"n", "k"},
    "elementwise_rates": {"rows", "cols"},
    "moe": {"stage1_us", "stage2_us"},
    "e2e_silicon_agg": None,
    "e2e_silicon_disagg": None,
    "e2e_settings": None,
    "e2e_power": None,
    "e2e_agentic": None,
    "e2e_multiturn": None,
    "iteration": {"prompt_std_ms", "e2e_time_ms", "prompt_time_ms"},
}
