"""One published number beside the simulated one."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from workloads.write import open_whole

Kind = Literal["theory", "calibrated", "emulated", "qualitative"]
Evidence = Literal[
    "event loop against measurement",
    "event loop against theory",
    "closed form against print",
    "input returned",
    "shown only",
]
"""The worth of a row as evidence: who computed the simulated value, and what stands beside it.

* event loop against measurement: the discrete-event engine (or the loop that a test proves equal to it) ran, and the
  published value was timed or counted by somebody on a machine and is not among the inputs;
* event loop against theory: the engine ran against a closed form, a bound, an order that a document states, or the
  recorded output of somebody else's simulator, which nobody timed;
* closed form against print: a formula of `sim.theory`, or sampling over a vocabulary, against what a document prints;
  no event was simulated;
* input returned: the published value went in, as itself or as the constant that it fixes, and came back;
* shown only: not judged, because what one would need is not published, or no tolerance can be given; the row says why.
"""
EVIDENCE: tuple[str, ...] = get_args(Evidence)
COLUMNS = (
    *("experiment", "case", "quantity", "published", "simulated", "error_pct", "tolerance", "kind", "evidence", "ok"),
    "note",
)


class Part(NamedTuple):
    """One piece of a group's work."""

    name: str
    run: Callable[[bool], Iterable[Row]]
    """From *quick* to rows."""
    seconds: float
    """About what it takes; read for the time that a run has left and for nothing else."""


@dataclass(frozen=True, slots=True)
class Row:
    """A quantity that a document prints, and what the simulator gives for it; the first five places are those of COLUMNS.

    *kind*: theory (an identity), calibrated (constants in, other numbers out), emulated (a published experiment run
    here) or qualitative (a sign, an order, a bound). *evidence*: see `Evidence`; rows that are "shown only" never fail.
    Others have exactly one tolerance: absolute, percent of the published value, or *holds* for qualitative rows. *note*:
    why a row is shown only, why it misses, or which of its constants are ours, with the range in which the statement holds.
    """

    experiment: str
    case: str
    quantity: str
    published: float | str
    simulated: float | str
    _: KW_ONLY
    kind: Kind
    evidence: Evidence
    within_abs: float | None = None
    within_pct: float | None = None
    holds: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        given = [self.within_abs is not None, self.within_pct is not None, self.holds is not None, self.informational]
        if sum(given) != 1:
            raise ValueError(
                f"{self.experiment}, {self.case}: give one of within_abs, within_pct, holds, or shown only as its evidence"
            )
        if self.informational and not self.note:
            raise ValueError(f"{self.experiment}, {self.case}: note says why the row is shown only")

    @property
    def informational(self) -> bool:
        """Whether the row is shown and not judged."""
        return self.evidence == "shown only"

    @property
    def error_pct(self) -> float | None:
        """Simulated against published in percent; None where either is not a number or the published one is 0."""
        if isinstance(self.published, str) or isinstance(self.simulated, str) or self.published == 0:
            return None
        return 100.0 * (self.simulated - self.published) / abs(self.published)

    @property
    def ok(self) -> bool | None:
        """Whether the simulated value is within its tolerance; None where nothing is judged."""
        if self.informational:
            return None
        if self.holds is not None:
            return bool(self.holds)
        if isinstance(self.published, str) or isinstance(self.simulated, str):
            return self.published == self.simulated
        distance = abs(self.simulated - self.published)
        if not math.isfinite(distance):
            return False
        if self.within_abs is not None:
            return bool(distance <= self.within_abs)
        assert self.within_pct is not None
        return bool(distance <= self.within_pct / 100.0 * abs(self.published))

    @property
    def tolerance(self) -> str:
        if self.informational:
            return "none"
        if self.within_abs is not None:
            return f"{self.within_abs:g}"
        if self.within_pct is not None:
            return f"{self.within_pct:g} %"
        return "holds"

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of COLUMNS."""
        error = self.error_pct
        return (
            self.experiment,
            self.case,
            self.quantity,
            _text(self.published),
            _text(self.simulated),
            "" if error is None else f"{error:.2f}",
            self.tolerance,
            self.kind,
            self.evidence,
            "" if self.ok is None else str(self.ok),
            self.note,
        )


class Reason(NamedTuple):
    """Why rows miss whose case and quantity begin so."""

    experiment: str
    case: str
    quantity: str
    why: str


def with_reasons(rows: Iterable[Row], reasons: Sequence[Reason]) -> Iterator[Row]:
    """*rows*, of which those that miss without a note get that of the first reason that fits."""
    for row in rows:
        if row.ok is False and not row.note:
            fitting = (
                each.why
                for each in reasons
                if row.experiment == each.experiment
                and row.case.startswith(each.case)
                and row.quantity.startswith(each.quantity)
            )
            row = dataclasses.replace(row, note=next(fitting, ""))
        yield row


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write *rows* to *path*, whole or not at all."""
    with open_whole(path) as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(row.cells() for row in rows)
