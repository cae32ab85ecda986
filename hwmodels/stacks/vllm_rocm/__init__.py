"""vLLM on AMD's GPUs."""

from hwmodels.stacks.amd import on_amd

STACK = on_amd("vllm", "vLLM", place=10)
