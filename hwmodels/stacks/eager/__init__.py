"""PyTorch launched kernel by kernel: no server."""

from hwmodels.stacks.description import Stack

STACK = Stack(name="eager", title="PyTorch, kernel by kernel", place=100)
