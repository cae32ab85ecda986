"""Runs of users with sessions beside their simulation: hit rates, KV in use, times between tokens and to the first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.bench.published.machines import Unmodelled
from sim.bench.published.sessions import AGENTIC, MULTI_TURN, KvInUse, Seen, SessionRun, replayed, session_runs
from sim.under_way import steps

if TYPE_CHECKING:
    from hwmodels.measured import Measurement

HIT_APART = 0.06
GAP_ERROR, TTFT_ERROR = 0.12, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A run of a table of sessions, measured and simulated."""

    file: str
    name: str
    tensor: int
    users: int
    offload: bool
    clean: bool
    measured: Seen
    simulated: Seen
    kv: KvInUse

    @property
    def hit_apart(self) -> float:
        return abs(self.simulated.hit - self.measured.hit)

    @property
    def gap_error(self) -> float:
        return self.simulated.gap_s / self.measured.gap_s - 1.0

    @property
    def ttft_error(self) -> float:
        return self.simulated.ttft_s / self.measured.ttft_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """The sessions of a folder, and why a table has none."""

    runs: tuple[Session, ...] = ()
    unmodelled: Mapping[str, str] | None = None
    """Reason by file."""


def sessions(measurements: Sequence[Measurement], *, hardware: str | None = None) -> Sessions:
    """Every run of every table of sessions among *measurements*, on *hardware* in place of the table's device where it is given."""
    runs: list[Session] = []
    reasons: dict[str, str] = {}
    for measurement in measurements:
        if measurement.kind not in (AGENTIC, MULTI_TURN):
            continue
        try:
            found = session_runs(measurement, measurements)
            runs += [_beside(run, *replayed(run, hardware)) for run in steps(found, f"runs of {measurement.path.name}")]
        except Unmodelled as error:
            reasons[measurement.path.name] = str(error)
    return Sessions(runs=tuple(runs), unmodelled=reasons)


def _beside(run: SessionRun, simulated: Seen, kv: KvInUse) -> Session:
    return Session(
        file=run.file, name=run.name, tensor=run.tensor, users=run.users, offload=run.offload, clean=run.clean,
        measured=run.measured, simulated=simulated, kv=kv,
    )  # fmt: skip


def collapse(rates: Iterable[tuple[int, float]]) -> int | None:
    """The least users from which on the hit rate stays below half of the highest; None where it does not."""
    by_users = sorted(rates)
    if not by_users:
        return None
    bound = max(rate for _, rate in by_users) / 2
    found = None
    for users, rate in reversed(by_users):
        if rate >= bound:
            break
        found = users
    return found


def verdicts(runs: Sequence[Session]) -> Iterator[str]:
    """The outcome of the clean runs of a file, in sentences."""
    clean = [run for run in runs if run.clean]
    if not clean:
        return
    apart = [run.hit_apart for run in clean if math.isfinite(run.hit_apart)]
    near = sum(each <= HIT_APART for each in apart)
    yield f"hit rate within {HIT_APART} in {near} of {len(apart)} clean runs, {max(apart):.3f} apart at most"
    for tensor in sorted({run.tensor for run in clean}):
        mine = [run for run in clean if run.tensor == tensor]
        ladder = sorted({run.users for run in mine})
        measured, simulated = (
            collapse((run.users, getattr(run, which).hit) for run in mine) for which in ("measured", "simulated")
        )
        if measured is None and simulated is None:
            continue
        where = [f"{which} at {users or 'none'}" for which, users in (("measured", measured), ("simulated", simulated))]
        yield f"hit rate collapses on {_counted(tensor, 'GPU')}, of the users {', '.join(map(str, ladder))}: {', '.join(where)}"
    for what, bound in (("gap", GAP_ERROR), ("ttft", TTFT_ERROR)):
        sizes: list[float] = [abs(getattr(run, f"{what}_error")) for run in clean]
        errors = sorted(size for size in sizes if math.isfinite(size))
        inside = sum(error <= bound for error in errors)
        name = {"gap": "time between tokens", "ttft": "TTFT"}[what]
        middle = 100 * errors[len(errors) // 2]
        yield f"median {name} within {100 * bound:.0f} % in {inside} of {len(errors)} clean runs, {middle:.0f} % off in the median"


HEADS = ("run", "done", "hit rate", "from host memory", "KV in use", "apart", "ITL ms", "TTFT s")
PRINTED = (0, 2, 3, 4, 6, 7)
"""Columns for which a terminal has room."""


def cells(run: Session) -> tuple[str, ...]:
    """One row of the table under `HEADS`: as measured / as simulated."""
    seen, made = run.measured, run.simulated

    def pair(what: str, how: str) -> str:
        return f"{_shown(getattr(seen, what), how)} / {_shown(getattr(made, what), how)}"

    def latency(value: float, how: str, error: float) -> str:
        return f"{_shown(value, how)} ({_shown(100 * error, '+.0f')} %)"

    return (
        f"{_counted(run.tensor, 'GPU')}, {_counted(run.users, 'user')}{'' if run.clean else ', stalled'}",
        pair("requests", ",.0f"),
        pair("hit", ".3f"),
        pair("host_hit", ".3f") if run.offload else "",
        pair("kv_use", ".2f"),
        _shown(run.kv.apart, ".2f"),
        latency(seen.gap_s * 1e3, ".1f", run.gap_error),
        latency(seen.ttft_s, ".3g", run.ttft_error),
    )


def _shown(value: float, how: str) -> str:
    return format(value, how) if math.isfinite(value) else "-"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def by_file(found: Sessions) -> dict[str, list[Session]]:
    """The runs of each file, in its order."""
    files: dict[str, list[Session]] = {}
    for run in found.runs:
        files.setdefault(run.file, []).append(run)
    return files


def sessions_markdown(found: Sessions) -> str:
    """The section of docs/validation.md on sessions; empty where there are none."""
    if not found.runs:
        return ""
    parts = ["## Sessions\n", _HEAD.rstrip()]
    for file, runs in by_file(found).items():
        parts += [f"\n### `{file}`\n", f"| {' | '.join(HEADS)} |", f"| --- |{' --: |' * (len(HEADS) - 1)}"]
        parts += [f"| {' | '.join(cells(run))} |" for run in runs]
        parts += ["", *(f"* {verdict}" for verdict in verdicts(runs))]
    return "\n".join(parts)


_HEAD = """\
Users of one server with a prefix cache, replayed from what they sent ([errors](validation/sessions.md)). The hit
rate is that of vLLM's counters, which look the first waiting request up at every step; `host` is what host memory gave of the
prompts; `apart` is the mean distance of KV in use over time. ITL and TTFT are medians. Each cell is measured / simulated, or
measured with the error in brackets; a run that is stalled stood still for a minute or ended early, and does not count below.
"""
