"""CUDA graphs of decode steps: the sizes that stacks capture, and how many rows a step has once it is padded to one.

Some stacks count tokens and some sequences, taken as tokens here (`hwmodels.stacks.description.Graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, MinLen

from hwmodels.stacks import stacks

STACKS = tuple(name for name, stack in stacks().items() if stack.graphs is not None)
"""Those that replay graphs of given sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """Which decode steps are replayed as CUDA graphs, padded to the next size that was captured."""

    largest: Annotated[int, Ge(1)] | None = None
    """The largest: tokens (vLLM's max_cudagraph_capture_size), or sequences, which with drafts have several tokens each (SGLang's
    cuda-graph-max-bs, max_batch_size of TensorRT-LLM's cuda_graph_config). Where it is left out, the stack's default on the device.
    Larger steps are launched kernel by kernel."""
    sizes: Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1)] | None = None
    """All of them, in place of the stack's list (vLLM's cudagraph_capture_sizes)."""
    eager: bool = False
    """None (vLLM's --enforce-eager, SGLang's --disable-cuda-graph): nothing is padded, every step is launched kernel by kernel."""
    decode_only: bool = False
    """Steps with prompts are launched kernel by kernel (vLLM's cudagraph_mode FULL_DECODE_ONLY)."""

    def __post_init__(self) -> None:
        for name, given in (("largest", self.largest), *(("sizes", size) for size in self.sizes or ())):
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                raise ValueError(f"{name} of CUDA graphs are whole numbers of at least 1; got {given!r}")
        if self.sizes is not None and not self.sizes:
            raise ValueError("sizes of CUDA graphs has none; give eager: true for a server without graphs")
        if self.sizes is not None and self.largest is not None:
            raise ValueError("sizes of CUDA graphs say the largest too; leave largest out")
        if self.eager and self.decode_only:
            raise ValueError(
                "a server without graphs (eager) has none for decode steps either; leave out eager or decode_only"
            )
        if self.eager and (self.sizes is not None or self.largest is not None):
            raise ValueError("a server without graphs (eager) has no sizes of them; leave out one or the other")


DEFAULT_GRAPHS = GraphSettings()


def captured_sizes(stack: str, settings: GraphSettings, default_largest: int) -> tuple[int, ...]:
    """The sizes of the graphs of *stack*, ascending; none where it runs eagerly or is no server."""
    described = stacks().get(stack)
    graphs = None if described is None or settings.eager else described.graphs
    if graphs is None:
        return ()
    if settings.sizes is not None:
        return tuple(sorted(set(settings.sizes)))
    largest = settings.largest or default_largest
    sizes = graphs.sizes(largest)
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def padded(sizes: tuple[int, ...], rows: np.ndarray) -> np.ndarray:
    """The least of *sizes* that holds each of *rows*; rows beyond the largest, and none, stay as they are."""
    if not sizes:
        return rows
    at = np.searchsorted(sizes, rows)
    reached = np.asarray(sizes, rows.dtype)[np.minimum(at, len(sizes) - 1)]
    return np.where((rows > 0) & (rows <= sizes[-1]), reached, rows)
