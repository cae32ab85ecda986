"""vLLM on AMD's GPUs."""

from hwmodels.stacks.description import Stack

STACK = Stack(name="vllm-rocm", title="vLLM on AMD's GPUs", place=10, like="vllm", vendors=("AMD",))
