"""Kernels and nothing else: no server."""

from hwmodels.stacks.description import Stack

STACK = Stack(name="ideal", title="kernels and nothing else", place=101)
