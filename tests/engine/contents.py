"""Traces whose prompts say what is in them."""

from __future__ import annotations

import numpy as np

from sim.engine import Columns
from workloads import Trace

S = 10**9


def trace_of_ids(*requests: tuple[float, int, int, list[int]], tokens: int) -> Trace:
    """(arrival in seconds, prompt, output, ids of blocks of so many *tokens*)."""
    return Trace(
        arrival_ns=[round(at * S) for at, *_ in requests],
        prompt_tokens=[prompt for _, prompt, _, _ in requests],
        output_tokens=[output for _, _, output, _ in requests],
        prefix_blocks=np.array([id_ for *_, ids in requests for id_ in ids], np.int64),
        prefix_offsets=np.cumsum([0, *(len(ids) for *_, ids in requests)]),
        prefix_block_tokens=tokens,
    )


def hits(columns: Columns) -> list[int]:
    return columns.requests["prefix_hit_tokens"].tolist()
