"""Fit serving stacks' overheads to measured serving runs and iterations, deployments and models held back.

`python -m sim.validation.fit_stacks MEASURED [STACK ...]` prints, for each stack, the terms of a fit on all deployments as they
stand in its overheads.toml, and the errors on rows whose deployment, and on rows whose model, no fit of theirs saw; --out
writes those errors row by row, and --intervals the widths of `hwmodels.serving_intervals`. With --as-they-stand nothing is
fitted: the errors and widths are of the terms of overheads.toml at today's prices. Terms are of a stack; those of
`RELEASED` are of each release that is listed, for releases differ in what asynchronous scheduling hides and in the front end. A
term that the data put on zero is left out and the others fitted again; one that moves nothing is left out too; one that ends on
its upper bound is an error.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.device import load_device
from hwmodels.kernels.parameters import bounds
from hwmodels.measured import Measurement, read
from hwmodels.overheads import Overheads, ServingStack, serving_stack, stack_releases
from hwmodels.tables import read_toml
from sim import metrics
from sim.bench.cases import Replay
from sim.bench.descent import Lines, cauchy, descended, least
from sim.bench.fitting import QUANTITIES, Simulated
from sim.bench.load import NotReplayable, sent_order
from sim.bench.parameters import Setting
from sim.bench.public import case_of_row
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import (
    DEPLOYMENT,
    family_of,
    hashed,
    iteration_s,
    release_of,
    replayed,
    requests_of,
    rows_of,
    served_run,
    speculates,
)
from sim.bench.published.servers import GAP_ANALYSIS
from workloads.write import open_whole, write_whole

SERVED = ("step_s", "sequence_s", "row_s", "expert_host_s", "latent_host_s", "launch_overlap", "sustained_loss", "narrow_loss",
          "admission_s", "admission_s_per_token", "admission_serial_s")  # fmt: skip
RELEASED = ("step_s", "sequence_s", "expert_host_s", "admission_s", "admission_s_per_token")
"""Terms that each listed release has of its own."""
EAGER = ("step_s", "sequence_s", "row_s", "layer_host_s", "sustained_loss")
RECORDED = "e2e_requests_*.csv"
START = {"step_s": 2e-4, "sequence_s": 1e-5, "row_s": 2e-6, "layer_host_s": 3e-4, "expert_host_s": 3e-4, "latent_host_s": 3e-4,
         "launch_overlap": 0.1, "sustained_loss": 0.3, "narrow_loss": 0.4, "admission_s": 2e-2, "admission_s_per_token": 4e-6,
         "admission_serial_s": 2e-3}  # fmt: skip
EAGER_START = {"step_s": 2e-3, "sequence_s": 1e-4, "row_s": 2e-5, "layer_host_s": 4e-4, "sustained_loss": 0.2}
# Tighter than what `Overheads` accepts of anyone: more is no compiled stack's host work.
_HIGH = {"step_s": 1e-2, "sequence_s": 2e-4, "row_s": 5e-5}
MARGIN = 0.01
"""A fitted value this share of the range from a bound, or nearer, lies on it."""
_SAME_MODEL = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-V3",
}
"""Names of one model; it is held back under all of them."""
_WEIGHTS = np.array([1.0, 0.5])  # a run's TTFT varies several times as much between repeats as its TPOT
_RECORDED_WEIGHT = 30.0
"""Rows that the recorded run counts for: those of a deployment."""
FOLDS = 5
"""Parts of the deployments, by a hash of their names, that are held back in turn."""
LEVEL = 0.9
"""Share of the rows that intervals are to hold."""
_TAILS = np.arange(5.0, 0.0, -0.25)
"""Percents that an interval may leave out on either side."""
_SCATTER = 0.08
"""Log ratios up to this size count by their square, larger ones less and less (Cauchy)."""

Versions = Mapping[str, ServingStack]
"""A stack's releases that have terms of their own, the newest first."""
Price = Callable[[Sequence["Point"], Versions, Mapping[str, float]], np.ndarray]
"""Predicted TPOT and TTFT of each point in seconds (NaN where it cannot be priced), and how their logarithms move with each term by
the step given for it: shape [points, 1 + terms, 2]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A row, its measured seconds of two quantities, and what must be held back together with it."""

    row: Mapping[str, Any]
    measured_s: tuple[float, float]
    """TPOT and TTFT."""
    group: str
    """The deployment."""
    model: str = ""
    device: str = ""
    """The name of the device in the catalogue."""
    release: str = ""
    """The release whose terms price it."""
    folder: Path | None = None
    """The folder of the servers' settings."""
    recorded: Measurement | None = None
    """A run replayed request by request; its prediction is the median ratio times the measured median."""
    weight: float = 1.0

    @property
    def family(self) -> str:
        """Which benchmark it is of."""
        return family_of(self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a stack is fitted; stacks.toml says what each of these is."""

    taken_from: str = ""
    taken: tuple[str, ...] = ()
    not_offered: tuple[str, ...] = ()
    rows: int = 80
    most_clients: float = np.inf
    rounds: int = 5
    strange: tuple[str, ...] = ()

    @property
    def given(self) -> tuple[str, ...]:
        """Terms that are not fitted to the runs of the stack."""
        return (*self.taken, *self.not_offered)


@functools.cache
def ways() -> Mapping[str, Way]:
    """The way in which each stack is fitted."""
    found = {}
    for name, entry in read_toml(Path(__file__).with_name("stacks.toml")).items():
        settings: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
        found[name] = Way(**settings)
    return found


def left_out(row: Mapping[str, Any]) -> str:
    """Why a serving row informs no fit; empty where it does. It is scored all the same. No prediction of ours enters the rule."""
    if speculates(row):
        return "ran with multi-token prediction"
    if family_of(row) == GAP_ANALYSIS and str(row["model_path"]) in ways()[str(row["backend"])].strange:
        return "its source says that it takes two to four times what kernels take"
    return ""


def served_points(folder: Path, stack: str) -> list[Point]:
    """The rows of *stack* without speculation, those that no fit sees included."""
    points = []
    for row in rows_of(read(folder / "e2e_silicon_agg.csv")):
        if row["backend"] != stack or speculates(row):
            continue
        points.append(
            Point(
                row=row,
                measured_s=(row["tpot_ms"] * 1e-3, row["ttft_ms"] * 1e-3),
                group="|".join(str(row[name]) for name in DEPLOYMENT),
                model=str(_SAME_MODEL.get(row["model_path"], row["model_path"])),
                device=load_device(str(row["system"])).name,
                release=serving_stack(stack, release_of(row)).release,
                folder=folder,
            )
        )
    return points


def _recorded_points(folder: Path, stack: str) -> list[Point]:
    points = []
    for path in sorted(folder.glob(RECORDED)):
        run = read(path)
        if run.source == stack:
            requests = requests_of(run)
            points.append(
                Point(
                    row={},
                    measured_s=(float(np.nanmedian(requests.tpot_s)), float(np.nanmedian(requests.ttft_s))),
                    group=path.stem,
                    model=path.stem,
                    release=serving_stack(stack).release,
                    recorded=run,
                    weight=_RECORDED_WEIGHT,
                )
            )
    return points


def _eager_points(folder: Path) -> list[Point]:
    points = []
    for path in sorted(folder.glob("iteration_*.csv")):
        for row in rows_of(read(path)):
            if row["flag"] == "ok":
                group = f"{row['model']}|{row['tensor_parallel']:g}"
                seconds = (row["token_time_ms"] * 1e-3, row["prompt_time_ms"] * 1e-3)
                points.append(Point(row=row, measured_s=seconds, group=group, model=str(row["model"])))
    return points


def predict(point: Point, stack: ServingStack) -> tuple[float, float]:
    """TPOT and TTFT of *point* in seconds under *stack*; NaN where it cannot be priced."""
    try:
        figures = _replayed(point, stack).figures
    except (Unmodelled, NotReplayable):
        return np.nan, np.nan
    return figures["tpot_s"], figures["ttft_s"]


def _replayed(point: Point, stack: ServingStack) -> Simulated:
    if point.recorded is not None:
        ratios = zip(QUANTITIES, point.measured_s, recorded_ratios(point.recorded, stack), strict=True)
        return Simulated(figures={q: s * float(np.exp(np.nanmedian(np.log(each)))) for q, s, each in ratios})
    if "prompt_size" in point.row:
        prompt_s, token_s = iteration_s(point.row, stack=stack)
        return Simulated(figures={"tpot_s": token_s, "ttft_s": prompt_s})
    replay = case_of_row(point.row, point.folder)[0].replay
    assert isinstance(replay, Replay)
    return replace(replay, ranks_stay=True)(Setting(stack=stack))


def recorded_ratios(run: Measurement, stack: ServingStack) -> list[np.ndarray]:
    """Predicted over measured TPOT and TTFT of each request of a recorded run."""
    requests, found = requests_of(run), replayed(run, stack=stack).requests
    order = sent_order(requests)
    pairs = ((metrics.tpot_s(found), requests.tpot_s), (metrics.ttft_s(found), requests.ttft_s))
    return [mine / theirs[order] for mine, theirs in pairs]


_STEPS = {"admission_s": 1e-2, "admission_s_per_token": 4e-6, "admission_serial_s": 1e-3}
_ADMISSION = ("admission_s", "admission_s_per_token", "admission_serial_s")


def predict_and_slopes(point: Point, stack: ServingStack, steps: Mapping[str, float]) -> np.ndarray:
    """TPOT and TTFT of *point* in seconds, and in further rows how the logarithm of each moves where the terms of *steps* do, by
    the schedule of this one replay (`sim.bench.frozen`), or by another replay where the front end's terms move it."""
    found = np.full((1 + len(steps), 2), np.nan)
    try:
        here = _replayed(point, stack)
    except (Unmodelled, NotReplayable):
        return found
    found[0] = [here.figures[q] for q in QUANTITIES]
    for i, (term, step) in enumerate(steps.items()):
        own = stack.overheads
        moved = replace(stack, overheads=replace(own, **{term: getattr(own, term) + step}))
        if here.moved is None or term in _ADMISSION:
            # It changes which requests run when one arrives, so that the schedule is another.
            found[1 + i] = np.log(np.array(predict(point, moved)) / found[0])
        else:
            by = here.moved(Setting(stack=moved))
            found[1 + i] = [by[q] for q in QUANTITIES]
    return found


def _names_of(versions: Versions, terms: Sequence[str]) -> list[str]:
    """The names of the terms that are fitted: *terms*, and `release/term` for those that older releases have of their own."""
    older = list(versions)[1:]
    return [*terms, *(f"{release}/{term}" for release in older for term in terms if term in RELEASED)]


def with_terms(versions: Versions, values: Mapping[str, float]) -> dict[str, ServingStack]:
    """*versions* with *values* by name; a term without a release is of all releases that have none of their own."""
    found = {}
    for i, (release, stack) in enumerate(versions.items()):
        own = {}
        for name, value in values.items():
            of, _, term = name.rpartition("/")
            if of == release or (not of and (i == 0 or term not in RELEASED)):
                own[term] = value
        found[release] = replace(stack, overheads=replace(stack.overheads, **own))
    return found


def value_of(versions: Versions, name: str) -> float:
    """A term by its name in a fit: `RELEASE/term`, or `term` of the first release."""
    of, _, term = name.rpartition("/")
    return getattr(versions[of or next(iter(versions))].overheads, term)


def limits(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Lowest and highest value that a fit of *names* may give each."""
    known = bounds(Overheads)
    found = {}
    for name in names:
        term = name.rpartition("/")[2]
        high = known[term][2] if tuple(names) == EAGER else _HIGH.get(term, known[term][2])
        found[name] = (known[term][1], high)
    return found


def on_bound(name: str, value: float, low: float, high: float) -> str:
    """Which bound *value* lies on, `low` or `high`; empty: neither."""
    margin = MARGIN * (high - low)
    if name.rpartition("/")[2] in (
        "step_s",
        "sequence_s",
        "row_s",
        "admission_s_per_token",
        "layer_host_s",
        "expert_host_s",
        "latent_host_s",
    ):
        margin = min(margin, 1e-3 * START[name.rpartition("/")[2]]) if value < high / 2 else margin
    return "low" if value - low <= margin else "high" if high - value <= margin else ""


def residuals(points: Sequence[Point], predicted: np.ndarray) -> np.ndarray:
    """The residuals that the fit makes small: weighted log ratios, two a point; nothing for what cannot be priced."""
    measured = np.log([p.measured_s for p in points])
    return np.nan_to_num((np.log(predicted) - measured) * _weight(points), nan=0.0).ravel()


def _weight(points: Sequence[Point]) -> np.ndarray:
    """The weight of TPOT and TTFT of each point."""
    return np.sqrt([p.weight for p in points])[:, None] * _WEIGHTS


def behind(point: Point, versions: Versions) -> ServingStack:
    """The release whose terms price *point*."""
    return versions[point.release] if point.release in versions else next(iter(versions.values()))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The place where a fit ended, and how its residuals move there."""

    versions: dict[str, ServingStack]
    names: tuple[str, ...]
    lines: Lines
    """In units of `unit`: weighted log ratios of predicted over measured, two a point; 0 for what cannot be priced."""
    stays: bool = False
    """Whether `versions` are terms that stand, and not where the residuals are least."""

    @property
    def unit(self) -> np.ndarray:
        return _unit(self.names)

    @property
    def values(self) -> np.ndarray:
        """The values of the terms in these units."""
        return np.array([value_of(self.versions, name) for name in self.names]) / self.unit

    def refit(self, keep: np.ndarray) -> dict[str, ServingStack]:
        """The fit to part of the points, a mask, on the straight lines of the whole one.

        Whole fits of each part would take as many simulations again; what a part leaves out has no say but in the point around
        which the model is linear. Terms that stand move by as much as the least does when a part is left out.
        """
        best, moved = self._least_of(keep)
        if self.stays:
            all_of_them, _ = self._least_of(np.ones_like(keep))
            best = np.clip(self.values + best - all_of_them, 0.0, _highest(self.names))
        values = dict(zip(self.names, (best * self.unit).tolist(), strict=True))
        for name, some in zip(self.names, moved, strict=True):
            of, _, term = name.rpartition("/")
            if not some:
                # A release of which nothing is left is taken for the newest; what nothing that is left tells is not known.
                values[name] = values.get(term, 0.0) if of else 0.0
        return with_terms(self.versions, values)

    def _least_of(self, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values at which the residuals of part of the points are least, and which of them these points move."""
        rows = np.repeat(keep, 2)
        moved = np.abs(self.lines.slope[rows]).max(axis=0, initial=0.0) > 1e-6
        best = self.values
        if moved.any():
            part = Lines(at=best[moved], residual=self.lines.residual[rows], slope=self.lines.slope[rows][:, moved])
            best[moved] = _least(part, np.minimum(_highest(self.names), 4 * best + 1)[moved])
        return best, moved


def _starts(names: Sequence[str]) -> Mapping[str, float]:
    return EAGER_START if tuple(names) == EAGER else START


def _unit(names: Sequence[str]) -> np.ndarray:
    return np.array([_starts(names)[name.rpartition("/")[2]] for name in names])


def _highest(names: Sequence[str]) -> np.ndarray:
    return np.array([high for _, high in limits(names).values()]) / _unit(names)


def _least(lines: Lines, high: np.ndarray) -> np.ndarray:
    """Terms (in units) up to *high* at which the linearised residuals are least."""
    return least(lines, np.zeros(len(high)), np.maximum(high, 1e-9), cauchy, scale=_SCATTER)


def fit_stack(
    points: Sequence[Point], versions: Versions, names: Sequence[str], price: Price, *, rounds: int, go_on: bool = False
) -> Fitted:
    """*versions* with the terms *names* fitted to *points* within their limits, by robust least squares on log ratios
    (`sim.bench.descent`). Starts at `START`, or with *go_on* at the stacks' own values."""
    unit, newest = _unit(names), next(iter(versions))
    weight = _weight(points)
    terms = list(dict.fromkeys(name.rpartition("/")[2] for name in names))
    # Wide steps, for tiles and batches make times a staircase.
    steps = {term: _STEPS.get(term, 0.1 * _starts(names)[term]) for term in terms}

    def built(x: np.ndarray) -> dict[str, ServingStack]:
        return with_terms(versions, dict(zip(names, (x * unit).tolist(), strict=True)))

    def lines_of(x: np.ndarray) -> Lines:
        found = price(points, built(x), steps)
        slope = np.zeros((len(points), 2, len(names)))
        for j, name in enumerate(names):
            of, _, term = name.rpartition("/")
            mine = np.array(
                [(p.release or newest) == (of or newest) or (not of and term not in RELEASED) for p in points]
            )
            slope[mine, :, j] = (found[:, 1 + terms.index(term)] * weight)[mine] * (unit[j] / steps[term])
        lines = Lines(
            at=x,
            residual=residuals(points, found[:, 0]),
            slope=np.nan_to_num(slope).reshape(2 * len(points), len(names)),
        )
        print(f"{versions[newest].name}: residuals of {cost_of(lines.residual, x):.1f}", flush=True)
        return lines

    def goal_of(lines: Lines) -> np.ndarray:
        goal = _least(lines, np.minimum(_highest(names), 3 * lines.at + 2))
        return np.where(goal < 2e-3, 0.0, goal)

    def cost_of(residual: np.ndarray, _x: np.ndarray) -> float:
        return float(cauchy((residual / _SCATTER) ** 2)[0].sum())

    lines = descended(
        np.array([value_of(versions, name) for name in names]) / unit if go_on else np.ones(len(names)),
        rounds,
        lines_of=lines_of,
        residual_of=lambda x: residuals(points, price(points, built(x), {})[:, 0]),
        goal_of=goal_of,
        cost_of=cost_of,
        learns=True,
        gain=3e-3,
    )
    return Fitted(versions=built(lines.at), names=tuple(names), lines=lines)


def fit_what_matters(
    points: Sequence[Point], versions: Versions, names: Sequence[str], price: Price, *, rounds: int
) -> Fitted:
    """The fit of those of *names* that it does not put on zero and that move it; ValueError for one on its upper bound."""
    begun, name_of_stack = False, next(iter(versions.values())).name
    while True:
        fitted = fit_stack(points, versions, names, price, rounds=rounds, go_on=begun)
        side = {name: on_bound(name, value_of(fitted.versions, name), *limits(names)[name]) for name in names}
        if high := [name for name in names if side[name] == "high"]:
            raise ValueError(f"{name_of_stack}: {high[0]} ends on its upper bound, {limits(names)[high[0]][1]:g}")
        zero = {name for name in names if side[name] == "low"}
        # A tenth more or less changes no residual by 1e-4.
        moves = np.abs(fitted.lines.slope * fitted.values).max(axis=0, initial=0.0) * 0.1 > 1e-4
        idle = {name for name, some in zip(names, moves, strict=True) if not some} - zero
        if not zero | idle:
            return fitted
        for gone, why in ((zero, "the data put {} on zero"), (idle, "the fit does not move {}")):
            if gone:
                print(f"{name_of_stack}: {why.format(', '.join(sorted(gone)))}: left out", flush=True)
        versions = with_terms(fitted.versions, dict.fromkeys(zero | idle, 0.0))
        names, begun = [name for name in names if name not in zero | idle], True
        if not names:
            none = Lines(at=np.zeros(0), residual=fitted.lines.residual, slope=fitted.lines.slope[:, :0])
            return Fitted(versions=versions, names=(), lines=none)


def as_they_stand(points: Sequence[Point], versions: Versions, names: Sequence[str], price: Price) -> Fitted:
    """*versions* with none of *names* moved, and how the residuals of *points* do where those of them that are not zero move."""
    names = [name for name in names if value_of(versions, name) != 0.0]
    return replace(fit_stack(points, versions, names, price, rounds=0, go_on=True), stays=True)


def fold_of(group: str) -> int:
    """The part of the deployments that *group* is held back with."""
    return hashed(group)[0] % FOLDS


def chosen(points: Sequence[Point]) -> list[Point]:
    """Those of *points* that are fitted: by a hash of the row, whatever it measured."""
    points = [p for p in points if not (left_out(p.row) or _too_many(p))]

    def what(point: Point) -> str:
        return "|".join(f"{k}={v}" for k, v in sorted(point.row.items()) if k not in ("ttft_ms", "tpot_ms"))

    rows = ways()[points[0].row["backend"]].rows if points else 0
    return sorted(points, key=lambda point: hashed(what(point)))[:rows]


def scores(points: Sequence[Point], predicted: np.ndarray) -> str:
    """Relative errors of TPOT and TTFT in words; *predicted*: seconds, shape [points, 2]."""
    measured = np.array([p.measured_s for p in points])
    off = 100.0 * np.abs(predicted / measured - 1.0)
    if not np.isfinite(off).any(axis=0).all():
        return "none predicted"
    found = np.nanmedian(off, axis=0)
    mean = np.nanmean(off, axis=0)
    return f"TPOT median {found[0]:.1f} % (mean {mean[0]:.1f} %), TTFT {found[1]:.1f} % ({mean[1]:.1f} %)"


def by_family(points: Sequence[Point], predicted: np.ndarray) -> str:
    """`scores` of the points of each family of models."""
    lines = []
    for family in sorted({p.family for p in points}):
        mine = np.array([p.family == family for p in points])
        lines.append(
            f"{family}, {mine.sum()} rows: {scores([p for p in points if p.family == family], predicted[mine])}"
        )
    return "; ".join(lines)


def _too_many(point: Point) -> bool:
    backend = str(point.row.get("backend", ""))
    return backend in ways() and point.row.get("concurrency", 0) > ways()[backend].most_clients


def _held_back(points: Sequence[Point], used: Sequence[Point], fitted: Fitted, price: Price, by: str) -> np.ndarray:
    """Predictions of *points* by fits that saw nothing of their deployment (*by* group), or of their model."""

    def part(point: Point) -> str:
        return point.model if by == "model" else str(fold_of(point.group))

    predicted = np.full((len(points), 2), np.nan)
    for each in sorted({part(p) for p in points}):
        # The recorded run is in all, for it is scored in none of them.
        keep = np.array([p.recorded is not None or part(p) != each for p in used])
        mine = [i for i, p in enumerate(points) if part(p) == each and not _too_many(p)]
        if not mine:
            continue
        predicted[mine] = price([points[i] for i in mine], fitted.refit(keep), {})[:, 0]
    return predicted


def _on_lines(used: Sequence[Point], fitted: Fitted) -> np.ndarray:
    """Log of measured over predicted, TPOT and TTFT of each of *used*, by fits without its device, on straight lines."""
    off = fitted.lines.residual.copy()
    for device in sorted({p.device for p in used} - {""}):
        mine = np.array([p.device == device for p in used])
        there = replace(fitted, versions=fitted.refit(~mine)).values
        rows = np.repeat(mine, 2)
        off[rows] += fitted.lines.slope[rows] @ (there - fitted.values)
    return -off.reshape(-1, 2) / _weight(used)


def _ends(log_ratios: np.ndarray, tail: float) -> tuple[float, float]:
    """The ends of an interval of the ratios without *tail* percent on either side; without end where there are none."""
    low, high = np.percentile(log_ratios, (tail, 100.0 - tail)) if len(log_ratios) else (-np.inf, np.inf)
    return float(low), float(high)


def _factors(log_ratios: np.ndarray, tail: float, stretch: float = 1.0) -> list[float]:
    """The same as factors, of those that are known, so many times as wide."""
    low, high = _ends(log_ratios[np.isfinite(log_ratios)], tail)
    more = 0.5 * (stretch - 1.0) * (high - low)
    return [round(float(np.exp(end)), 3) for end in (low - more, high + more)]


def model_factors(models: Sequence[str], log_ratios: np.ndarray) -> list[float]:
    """The ends for a model never seen, of ratios of *models* held back in turn."""
    return _factors(log_ratios, tail_of(models, log_ratios), stretch_of(models, log_ratios))


def tail_of(groups: Sequence[str], log_ratios: np.ndarray) -> float:
    """The percent on either side that an interval leaves out, 5 at most, so that it holds nine in ten of the ratios whose group it
    was not taken from; 0 where that is not enough. Ratios of one deployment lie together, so that 5 is too much of few."""
    return next((tail for tail in _TAILS if held_without(groups, log_ratios, tail) >= LEVEL), 0.0)


def apart(groups: Sequence[str], log_ratios: np.ndarray) -> np.ndarray:
    """How far each known ratio lies from the middle of the interval, tail and all, which the ratios of the other groups give, over
    half its width."""
    names, known = np.array(groups), np.isfinite(log_ratios)
    found = np.zeros(len(names))
    for each in set(groups):
        mine = names == each
        others = log_ratios[~mine & known]
        if len(others):
            low, high = _ends(others, tail_of([name for name in groups if name != each], log_ratios[~mine]))
            found[mine] = np.abs(2.0 * log_ratios[mine] - low - high) / max(high - low, 1e-12)
    return found[known]


def held_of(groups: Sequence[str], log_ratios: np.ndarray) -> float:
    """Share of the ratios that lie within the interval, tail and all, which the ratios of the other groups give."""
    return float((apart(groups, log_ratios) <= 1.0 + 1e-9).mean())


def stretch_of(groups: Sequence[str], log_ratios: np.ndarray) -> float:
    """The factor on an interval's width with which it holds nine in ten ratios of a group that it was not taken from, 1 at least:
    of few groups even the farthest ratios hold too few of another."""
    return max(1.0, float(np.quantile(apart(groups, log_ratios), LEVEL, method="higher")))


def held_without(groups: Sequence[str], log_ratios: np.ndarray, tail: float = 5.0) -> float:
    """Share of the ratios that lie within the interval which all *other* groups give, without *tail* percent on either side."""
    names, known = np.array(groups), np.isfinite(log_ratios)
    inside = np.zeros(len(names), bool)
    for each in set(groups):
        mine = names == each
        others = log_ratios[~mine & known]
        low, high = _ends(others, tail)
        inside |= mine & (log_ratios >= low) & (log_ratios <= high)
    return float(inside[known].mean())


def _intervals(
    points: Sequence[Point], used: Sequence[Point], fitted: Fitted, held: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The table of a stack in serving_intervals.toml."""
    measured = np.array([p.measured_s for p in points])
    by_device = _on_lines(used, fitted)[[p.recorded is None for p in used]]
    entry: dict[str, Any] = {
        "rows": len(points),
        "models": sorted({served_run(p.row, p.folder).model.name for p in points if _predictable(p)}),
        "devices": sorted({p.device for p in points}),
    }
    for i, quantity in enumerate(("tpot_s", "ttft_s")):
        deployments, models = (np.log(measured[:, i] / held[by][:, i]) for by in ("group", "model"))
        groups = [p.group for p in points]
        tail, by_model = tail_of(groups, deployments), [p.model for p in points]
        entry[quantity] = {
            "deployment": _factors(deployments, tail),
            "model": model_factors(by_model, models),
            "device": _factors(by_device[:, i], tail),
            "held": round(held_of(groups, deployments), 3),
        }
    return entry


def _predictable(point: Point) -> bool:
    try:
        served_run(point.row, point.folder)
    except Unmodelled:
        return False
    return True


def write_intervals(entries: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The widths as a TOML file; a stack that is not among *entries* keeps what the file has."""
    kept = {**(read_toml(path) if path.is_file() else {}), **entries}
    parts = [_INTERVALS_HEAD]
    for stack, entry in kept.items():
        parts.append(f"[{stack}]")
        parts += [f"{key} = {json.dumps(entry[key])}" for key in ("rows", "models", "devices")]
        for quantity in ("tpot_s", "ttft_s"):
            parts.append(f"[{stack}.{quantity}]")
            parts += [f"{key} = {json.dumps(value)}" for key, value in entry[quantity].items()]
        parts.append("")
    write_whole(path, "\n".join(parts))


_INTERVALS_HEAD = """\
# Written by `python -m sim.validation.fit_stacks MEASURED --intervals FILE`; `hwmodels.serving_intervals` says what they are: the
# ends of measured over predicted, on rows of which the fit had not seen the deployment, the model, the device (the last on the
# straight lines of the fit), without as much on either side as lets nine in ten rows lie within the interval of all other
# deployments (models), 5 percent at most; those of models as much wider as that takes. held: share of the rows within the
# interval that all other deployments give.
"""


def main(
    folder: Path,
    stacks: Sequence[str],
    out: Path | None = None,
    intervals: Path | None = None,
    *,
    jobs: int = 2,
    stay: bool = False,
) -> None:
    lines: list[dict[str, Any]] = []
    entries: dict[str, dict[str, Any]] = {}
    fits: dict[str, ServingStack] = {}
    with ProcessPoolExecutor(jobs) as pool:
        price = functools.partial(_priced, pool)
        for name in stacks:
            eager = name == "eager"
            points = _eager_points(folder) if eager else served_points(folder, name)
            recorded = [] if eager else _recorded_points(folder, name)
            used = [*(points if eager else chosen(points)), *recorded]
            terms = EAGER if eager else [term for term in SERVED if term not in ways()[name].given]
            versions = stack_releases()[name] if stay else _begun(name, fits)
            names = _names_of(versions, terms)
            fitted = (
                as_they_stand(used, versions, names, price)
                if stay
                else fit_what_matters(used, versions, names, price, rounds=ways()[name].rounds)
            )
            fits[name] = next(iter(fitted.versions.values()))
            for term in fitted.names:
                print(f"{name}: {term} = {value_of(fitted.versions, term):.4g}")
            seen = price(points, fitted.versions, {})[:, 0]
            _print_scores(f"{name}: all {len(points)} rows, fitted", points, seen)
            held: dict[str, np.ndarray] = {}
            for by, what in (("group", "deployments"), *(() if eager else (("model", "models"),))):
                held[by] = _held_back(points, used, fitted, price, by)
                _print_scores(f"{name}: {what} held back", points, held[by])
            if recorded:
                _print_recorded(name, recorded, fitted, fitted.refit(np.array([p.recorded is None for p in used])))
            if not eager:
                lines += _errors(name, points, seen, held)
                entries[name] = _intervals(points, used, fitted, held)
                print(f"{name}: 90 % intervals: {entries[name]}", flush=True)
    if intervals is not None and entries:
        write_intervals(entries, intervals)
    if out is not None and lines:
        with open_whole(out) as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


def _priced(pool: Executor, points: Sequence[Point], versions: Versions, steps: Mapping[str, float]) -> np.ndarray:
    """A `Price` by the processes of *pool*."""
    # The longest first, or one of them is waited for at the end.
    order = sorted(range(len(points)), key=lambda i: -float(points[i].row.get("concurrency") or 0))
    some = [points[i] for i in order]
    stacks = [behind(p, versions) for p in some]
    found = pool.map(predict_and_slopes, some, stacks, [steps] * len(some), chunksize=4)
    result = np.full((len(points), 1 + len(steps), 2), np.nan)
    result[order] = list(found)
    return result


def _begun(name: str, fits: Mapping[str, ServingStack]) -> dict[str, ServingStack]:
    """The releases of a stack with the terms that are not fitted to its runs: taken from one of *fits*, or 0."""
    way, values = ways()[name], {}
    if way.taken:
        theirs = fits.get(way.taken_from, serving_stack(way.taken_from)).overheads
        values = {term: getattr(theirs, term) for term in way.taken}
    return with_terms(stack_releases()[name], {**values, **dict.fromkeys(way.not_offered, 0.0)})


def _print_scores(what: str, points: Sequence[Point], predicted: np.ndarray) -> None:
    print(f"{what}: {scores(points, predicted)}; {by_family(points, predicted)}", flush=True)


def _print_recorded(name: str, recorded: Sequence[Point], fitted: Fitted, blind: Versions) -> None:
    """Errors on the *recorded* runs under the fit, and under *blind*, that of all but them."""
    for said, versions in (("fitted to it", fitted.versions), ("fitted without it", blind)):
        for point in recorded:
            assert point.recorded is not None
            errors = _recorded_errors(point.recorded, versions[point.release])
            print(f"{name}: recorded run, {said}: {errors}", flush=True)


def _errors(
    stack: str, points: Sequence[Point], seen: np.ndarray, held: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """A line for each row: what it is, and predicted over measured of each fit."""
    lines = []
    for i, point in enumerate(points):
        row = point.row
        line: dict[str, Any] = {
            "stack": stack,
            "family": point.family,
            **{
                name: row[name]
                for name in ("model_path", "system", "precision", "isl", "osl", "concurrency", "tp_size")
            },
        }
        for what, predicted in (("fitted", seen), ("deployment", held["group"]), ("model", held["model"])):
            for quantity, mine, theirs in zip(("tpot", "ttft"), predicted[i], point.measured_s, strict=True):
                line[f"{quantity}_{what}"] = f"{mine / theirs:.4f}"
        lines.append(line)
    return lines


def _recorded_errors(run: Measurement, stack: ServingStack) -> str:
    texts = []
    for what, ratios in zip(("TPOT", "TTFT"), recorded_ratios(run, stack), strict=True):
        off = 100.0 * np.abs(ratios - 1.0)
        texts.append(f"{what} median {np.nanmedian(off):.1f} % (mean {np.nanmean(off):.1f} %)")
    return ", ".join(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_stacks")
    parser.add_argument("folder", type=Path)
    parser.add_argument("stacks", nargs="*", default=list(ways()))
    parser.add_argument("--out", type=Path, help="write the error of every row, of each fit, as CSV")
    parser.add_argument(
        "--intervals", type=Path, help="write the widths of intervals, as hwmodels/serving_intervals.toml"
    )
    parser.add_argument("--as-they-stand", action="store_true", help="fit nothing: the terms of overheads.toml")
    parser.add_argument("--jobs", type=int, default=2)
    told = parser.parse_args()
    main(told.folder, told.stacks, told.out, told.intervals, jobs=told.jobs, stay=told.as_they_stand)
