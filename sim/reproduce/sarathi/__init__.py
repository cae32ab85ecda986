"""SARATHI (Agrawal et al., arXiv 2308.16369) and Sarathi-Serve (OSDI 2024), from the event loop.

`machines` says what prices each machine, `runs` what is run, `misses` what is missing where a row misses; the rows are in
the other modules, `pictures` draws.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from sim.reproduce.rows import Part, Row, with_reasons
from sim.reproduce.sarathi import gains, iterations, memory, pipelines, serving
from sim.reproduce.sarathi.memory import stated_batches
from sim.reproduce.sarathi.misses import REASONS
from sim.reproduce.sarathi.pictures import plots

__all__ = ["PARTS", "TITLE", "plots", "rows", "stated_batches"]

TITLE = "SARATHI: chunked prefill, decode-maximal batches, pipelines"


def _part(name: str, run: Callable[[bool], Iterable[Row]], seconds: float) -> Part:
    return Part(name, lambda quick: with_reasons(run(quick), REASONS), seconds)


PARTS = (
    _part("iterations", lambda _: iterations.rows(), 2),
    _part("peak gains", gains.rows, 6),
    _part("memory", lambda _: memory.rows(), 1),
    _part("pipelines", pipelines.rows, 35),
    _part("serving", serving.rows, 35),
)


def rows(quick: bool) -> list[Row]:
    """Every published number beside the simulated one; *quick* runs fewer requests."""
    return list(itertools.chain.from_iterable(part.run(quick) for part in PARTS))
