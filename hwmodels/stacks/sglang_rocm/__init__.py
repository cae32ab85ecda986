"""SGLang on AMD's GPUs."""

from hwmodels.stacks.description import Stack

STACK = Stack(name="sglang-rocm", title="SGLang on AMD's GPUs", place=11, like="sglang", vendors=("AMD",))
