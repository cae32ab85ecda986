"""`vllm serve`."""

from __future__ import annotations

from sim.launch.start import Launch


def _levels(word: str) -> list[str]:
    """-O3, -O=3 and -O 3 as the option that they stand for (vllm/utils/argparse_utils.py)."""
    if not word.startswith("-O"):
        return [word]
    level = word[2:].removeprefix("=")
    return ["--optimization-level", level] if level else ["--optimization-level"]


LAUNCH = Launch(
    example="vllm serve MODEL",
    programs=(("vllm", "serve"),),
    modules=("vllm.entrypoints.openai.api_server", "dynamo.vllm"),
    model_option="model",
    file_option="config",
    abbreviates=True,
    respelt=_levels,
    image="vllm/vllm-openai:v{0}",
    released_as=("vllm-openai",),
    entry=("vllm", "serve"),
    entry_images=("vllm-openai", "huggingfaceserver"),
    address_variable="VLLM_NIXL_SIDE_CHANNEL_HOST",
    chart_command="vllmServe",
    metrics={
        "vllm:num_requests_waiting": "waiting",
        "vllm:num_requests_running": "running",
        "vllm:kv_cache_usage_perc": "kv_use",
        "vllm:num_requests": "concurrency",
    },
    total='sum(vllm:num_requests_running{{service="{0}"}}) + sum(vllm:num_requests_waiting{{service="{0}"}})',
    proxy=("vllm-router", "vllm-router", "--vllm-pd-disaggregation"),
    dynamo_module="dynamo.vllm",
    dynamo_model_option="--model",
    dynamo_role_option="--disaggregation-mode",
)
