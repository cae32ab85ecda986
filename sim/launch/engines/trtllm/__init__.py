"""`trtllm-serve`."""

from sim.launch.start import Launch

LAUNCH = Launch(
    example="trtllm-serve MODEL",
    programs=(("trtllm-serve", "serve"), ("trtllm-serve",)),
    released_as=("tensorrt-llm/release",),
)
