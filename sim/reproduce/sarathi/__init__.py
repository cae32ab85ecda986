"""SARATHI (Agrawal et al., arXiv 2308.16369) and Sarathi-Serve (OSDI 2024), from the event loop.

`machines` says what prices each machine, `runs` what is run; the rows are in the other modules, `pictures` draws.
"""

from __future__ import annotations

from sim.reproduce.rows import Row
from sim.reproduce.sarathi import gains, iterations, memory, pipelines, serving
from sim.reproduce.sarathi.memory import stated_batches
from sim.reproduce.sarathi.pictures import plots

__all__ = ["TITLE", "plots", "rows", "stated_batches"]

TITLE = "SARATHI: chunked prefill, decode-maximal batches, pipelines"


def rows(quick: bool) -> list[Row]:
    """Every published number beside the simulated one; *quick* runs fewer requests."""
    return [
        *iterations.rows(),
        *gains.rows(quick),
        *memory.rows(),
        *pipelines.rows(quick),
        *serving.rows(quick),
    ]
