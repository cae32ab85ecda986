"""Runs that rows of speculative decoding share, and short ways to write rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from policies.acceptance import Iid, MeanLength, PerPosition
from sim.reproduce.rows import Evidence, Row
from sim.study.speedup import AloneRun, Measured, alone
from sim.theory import speculative as theory

_REQUESTS, _QUICK_REQUESTS, _TOKENS = 60, 12, 4001
# Chen et al., arXiv 2302.01318: 70B target and 4B draft, both on 16 TPU v4.
CHINCHILLA_TARGET_S, CHINCHILLA_DRAFT_S = 14.1e-3, 1.8e-3


def speedup_rows(
    experiment: str, alpha: float, k: int, c: float, printed: float, tolerance: float, quick: bool, name: str = ""
) -> Iterator[Row]:
    """A printed speed-up beside theorem 3.8 and beside the event loop, which is given three standard errors more."""
    case = name or f"alpha {alpha:g}, K {k}, c {c:g}"
    closed, run = float(theory.speedup(alpha, k, c)), iid_run(alpha, k, c, quick)
    yield from twice(experiment, case, "speed-up", printed, closed, run.speedup, tolerance)


def twice(
    experiment: str, case: str, quantity: str, printed: float, closed: float, simulated: Measured, tolerance: float
) -> Iterator[Row]:
    """A printed value beside the closed form and beside the event loop, which is given three standard errors more."""
    made: tuple[tuple[str, float, float, Evidence], ...] = (
        ("closed form", closed, 1e-9, "closed form against print"),
        ("event loop", simulated.mean, three_sigma(simulated.half_width), "event loop against theory"),
    )
    for by, value, slack, evidence in made:
        yield Row(
            experiment, case, f"{quantity}, {by}" if quantity else by, printed, value, kind="theory", evidence=evidence,
            within_abs=tolerance + slack,
        )  # fmt: skip


def statement(
    experiment: str, case: str, quantity: str, printed: str, simulated: object, holds: bool,
    evidence: Evidence = "event loop against theory", note: str = "",
) -> Row:  # fmt: skip
    """A row about an order, a sign or a bound."""
    return Row(
        experiment, case, quantity, printed, str(simulated), kind="qualitative", evidence=evidence, holds=bool(holds),
        note=note,
    )  # fmt: skip


def shown(experiment: str, case: str, quantity: str, printed: float | str, simulated: float | str, why: str) -> Row:
    """A row that is not judged, and why."""
    return Row(experiment, case, quantity, printed, simulated, kind="qualitative", evidence="shown only", note=why)


def size(quick: bool) -> int:
    """Requests of a run."""
    return _QUICK_REQUESTS if quick else _REQUESTS


def iid_run(alpha: float, k: int, draft_s: float, quick: bool, target_s: float = 1.0) -> AloneRun:
    """Requests one after another, tokens accepted with *alpha* each."""
    return alone_run(Iid(alpha=alpha), k, target_s, draft_s, 0.0, size(quick), "draft_model")


def measured_rate_run(r_prime: float, k: int, quick: bool) -> AloneRun:
    """Chinchilla's pair with r' (k + 1) tokens a round."""
    process = MeanLength(mean=r_prime * (k + 1), at_k=k)
    return alone_run(process, k, CHINCHILLA_TARGET_S, CHINCHILLA_DRAFT_S, 0.0, size(quick), "draft_model")


@functools.lru_cache(maxsize=512)
def alone_run(
    process: Iid | MeanLength | PerPosition, k: int, target_s: float, draft_s: float, overhead_s: float, requests: int,
    method: str,
) -> AloneRun:  # fmt: skip
    """`sim.study.speedup.alone` on the same draws for all rows."""
    return alone(
        process, k, target_s=target_s, draft_s=draft_s, overhead_s=overhead_s, requests=requests, output_tokens=_TOKENS,
        method=method, seed=20,
    )  # fmt: skip


def three_sigma(half_width_99: float) -> float:
    """Three standard errors, from the half-width of a 99 % interval."""
    return 3.0 / 2.5758 * half_width_99


def spread(run: AloneRun) -> float:
    """Standard deviation of the tokens of a round."""
    n = np.arange(1, len(run.rounds) + 1)
    mean = run.tokens_per_round.mean
    return float(np.sqrt((run.rounds * (n - mean) ** 2).sum() / run.rounds.sum()))
