"""SGLang on AMD's GPUs."""

from hwmodels.stacks.amd import on_amd

STACK = on_amd("sglang", "SGLang", place=11)
