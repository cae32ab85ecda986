"""What arrives: request traces, the files they come from, and generators of synthetic ones."""

from workloads.readers import (
    FORMATS,
    FunctionCounts,
    FunctionInvocations,
    read_function_counts,
    read_function_invocations,
    read_trace,
)
from workloads.trace import Trace, concat, merge

__all__ = [
    "FORMATS",
    "FunctionCounts",
    "FunctionInvocations",
    "Trace",
    "concat",
    "merge",
    "read_function_counts",
    "read_function_invocations",
    "read_trace",
]
