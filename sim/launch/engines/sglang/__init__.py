"""`python -m sglang.launch_server`."""

from sim.launch.start import Launch

LAUNCH = Launch(
    example="python -m sglang.launch_server --model-path MODEL",
    programs=(("sglang", "serve"),),
    modules=("sglang.launch_server", "dynamo.sglang"),
    model_option="model-path",
    abbreviates=True,
    image="lmsysorg/sglang:v{0}",
    released_as=("sglang",),
    entry=("python3", "-m", "sglang.launch_server"),
    listens=("--host", "0.0.0.0"),
    metrics={
        "sglang:num_queue_reqs": "waiting",
        "sglang:num_running_reqs": "running",
        "sglang:token_usage": "kv_use",
    },
    total='sum(sglang:num_running_reqs{{service="{0}"}}) + sum(sglang:num_queue_reqs{{service="{0}"}})',
    proxy=("sglang-router", "python3 -m sglang_router.launch_router", "--pd-disaggregation"),
    dynamo_module="dynamo.sglang",
)
