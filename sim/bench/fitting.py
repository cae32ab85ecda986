"""Few physical parameters of a serving stack fitted to measured runs of one deployment, by simulating each run.

The fit is a robust posterior mode: log ratios of predicted over measured, in units of how far apart repeats and the model may be,
count by soft-l1, and priors (`sim.bench.parameters`) by their square. Each round replays every run once; how its figures move with
the parameters is read off the schedule of that replay (`Simulated.moved`), or off another replay where there is none. From where
that ends a second descent goes on, which sees by replays how figures move over larger distances, schedule and all. What the
posterior says of other runs is worked out on these straight lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.bench.descent import Lines, descended, least, soft_l1
from sim.bench.parameters import BY_NAME, KV, PARAMETERS, Z90, Prior, Setting, own_value, setting_at
from sim.under_way import steps

FloatArray = NDArray[np.float64]
QUANTITIES = ("tpot_s", "ttft_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated run: its figures, and how they move without another simulation."""

    figures: Mapping[str, float]
    """Seconds by quantity, of the statistics that were measured; NaN where there are none."""
    moved: Callable[[Setting], Mapping[str, float]] | None = None
    """Log of the figures with other terms over these, while the schedule stays; None: only another replay can tell."""
    short_of_memory: bool = False
    """Whether the KV cache was full, so that its size matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measured run that can be replayed."""

    name: str
    measured_s: Mapping[str, float]
    """The measured figures by quantity; NaN and what is missing are not fitted."""
    replay: Callable[[Setting], Simulated] = field(repr=False)
    noise: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of the log by quantity, of a measurement that is less sure than repeats are (`Errors.repeat`)."""
    bends: bool = False
    """Whether its figures bend within what parameters may be: an open load, whose queue grows without limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The distance that a measurement and its simulation may have without telling a parameter: standard deviations of the log."""

    repeat: Mapping[str, float]
    """The error of the same run, measured again."""
    model: Mapping[str, float]
    """The error that no parameter of the fit explains, in most runs, by which a fit weighs its residuals."""
    unseen: Mapping[str, float]
    """The same of runs that a fit did not see, those of deployments that fit badly included: what intervals are made of."""
    source: str

    def of(self, quantity: str) -> float:
        """The error of one measurement against its simulation, in most runs."""
        return float(np.hypot(self.repeat[quantity], self.model[quantity]))

    def of_unseen(self, quantity: str) -> float:
        """The same of a run that no fit has seen."""
        return float(np.hypot(self.repeat[quantity], self.unseen[quantity]))


ERRORS = Errors(
    repeat={"tpot_s": 0.02, "ttft_s": 0.06},
    model={"tpot_s": 0.03, "ttft_s": 0.10},
    unseen={"tpot_s": 0.078, "ttft_s": 0.161},
    source=(
        "repeat: between the median and the 90th percentile of 94 repeated points of aiconfigurator's silicon sample; model: a "
        "weight that was chosen; unseen: such that intervals hold 90 % of the rows of one half of its deployments, each fitted "
        "to its lowest concurrency alone, which the other half checks (benchmarks/bench_fit.py)"
    ),
)
OUTLIER = 4.0
"""Standard deviations beyond which a run contradicts the others and is set aside."""
ROUNDS = 8
_ROUNDS_APART = 3
"""Figures go up and down in steps as terms move, so that a descent may end beside the least: another goes on from there."""
_APART = 0.5
"""The distance in standard deviations of the posterior over which that one sees how figures move, by replays: beyond the steps."""
_CLOSE = 0.1
"""A share of a parameter's own standard deviation: a parameter that would move less stays."""
_STEP = 0.05
"""The distance that a parameter is moved, in widths of its prior, to see how figures move."""
_REPLAY_STEP = 0.5
"""The same where another replay shows it, whose order of events may be another."""
_REPLAYED = (KV, "admission_serial_s")
"""Parameters that make requests wait for each other, which no schedule that stays can show."""
_FEWEST_TO_JUDGE = 3
"""Runs of which one may be found to contradict the others."""
_SURE_DEGREES = 6.0
"""Degrees of freedom that the stated errors count for beside the residuals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """The knowledge of parameters after a fit: normal in their logarithms, around `at`."""

    names: tuple[str, ...]
    at: FloatArray
    covariance: FloatArray
    widths: FloatArray
    """The widths of the priors."""
    base: Setting

    @property
    def setting(self) -> Setting:
        return setting_at(self.base, self.names, self.at)

    def draws(self, n: int, rng: np.random.Generator) -> list[Setting]:
        """*n* settings drawn from it."""
        if not self.names:
            return [self.base] * n
        values = rng.multivariate_normal(self.at, self.covariance, size=n, method="eigh")
        return [setting_at(self.base, self.names, value) for value in values]

    def interval(self, name: str, z: float) -> tuple[float, float]:
        """Values of the parameter *name* that many standard deviations to either side."""
        i = self.names.index(name)
        sd = float(np.sqrt(self.covariance[i, i]))
        ends = [BY_NAME[name].value(self.at[i] + side * z * sd, own_value(self.base, name)) for side in (-1, 1)]
        return min(ends), max(ends)

    def told(self, name: str) -> float:
        """Share of the prior's variance that the runs took away: 0 where it keeps its prior."""
        i = self.names.index(name)
        return float(1.0 - self.covariance[i, i] / self.widths[i] ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A figure of a run that a fit had not seen."""

    name: str
    quantity: str
    measured_s: float
    predicted_s: float
    low_s: float
    """Ends of the interval in which nine measurements in ten are meant to lie."""
    high_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted deployment."""

    posterior: Posterior
    cases: tuple[Case, ...]
    figures: tuple[Mapping[str, float], ...]
    """The figures of each case, predicted with what was fitted."""
    before: tuple[Mapping[str, float], ...]
    """The same with the stack's own terms."""
    contradicting: tuple[int, ...]
    """Cases that were set aside."""
    lines: Lines
    """The log of predicted over measured of each case and quantity, NaN where there is none, in units of its stated error."""
    priors: Mapping[str, Prior]
    errors: Errors
    scale: float
    """The residuals over the stated errors."""
    replays: int

    def predict(self, case: Case) -> list[Prediction]:
        """Figures of a run that was not fitted, with their errors, from one replay."""
        return predict(self.posterior, case, self.errors)

    def without(self, i: int) -> Posterior:
        """The posterior of the fit without run *i*, on the straight lines of the whole fit."""
        keep = np.ones(len(self.cases), bool)
        keep[[i, *self.contradicting]] = False
        return _solved(self.lines, self.posterior.names, self.posterior.widths, self.posterior.base, keep)[0]

    def left_out(self) -> list[Prediction]:
        """Each run predicted by the fit of the others; those set aside by the fit of all that were kept."""
        found = []
        for i, case in enumerate(steps(self.cases, "runs left out")):
            posterior = self.posterior if i in self.contradicting else self.without(i)
            found += predict(posterior, case, self.errors)
        return found


def _compared(case: Case, figures: Mapping[str, float]) -> FloatArray:
    return np.array(
        [np.log(figures.get(q, np.nan) / case.measured_s[q]) if q in case.measured_s else np.nan for q in QUANTITIES]
    )


def slopes_of(
    case: Case, posterior_at: FloatArray, names: Sequence[str], widths: FloatArray, base: Setting, here: Simulated
) -> FloatArray:
    """The change of the log figures of *case* with each parameter; shape [quantities, parameters]."""
    found = np.zeros((len(QUANTITIES), len(names)))
    for j, name in enumerate(names):
        place = posterior_at.copy()
        _, high = BY_NAME[name].limits(own_value(base, name))
        by_replay = here.moved is None or name in _REPLAYED
        step = (_REPLAY_STEP if by_replay else _STEP) * widths[j]
        step = step if place[j] + step <= high else -step
        place[j] += step
        there = setting_at(base, names, place)
        if name == KV and not here.short_of_memory:
            continue
        if here.moved is not None and not by_replay:
            moved = here.moved(there)
        else:
            figures = case.replay(there).figures
            moved = {q: np.log(figures[q] / here.figures[q]) for q in figures}
        found[:, j] = [moved.get(q, 0.0) / step for q in QUANTITIES]
    return np.nan_to_num(found)


def predict(posterior: Posterior, case: Case, errors: Errors) -> list[Prediction]:
    """Figures of *case* under *posterior* with 90 % intervals.

    Near saturation figures do not move on straight lines: for a case that says so (`Case.bends`) the ends are replays, `Z90`
    standard deviations to either side on the line along which TPOT moves most. What no parameter explains comes on top.
    """
    here = case.replay(posterior.setting)
    slope = slopes_of(case, posterior.at, posterior.names, posterior.widths, posterior.base, here)
    sides = {
        quantity: np.full(2, Z90 * np.sqrt(max(float(slope[i] @ posterior.covariance @ slope[i]), 0.0)))
        for i, quantity in enumerate(QUANTITIES)
    }
    if case.bends and posterior.names:
        along = posterior.covariance @ slope[0]
        length = float(np.sqrt(max(slope[0] @ along, 1e-30)))
        for side in (-1, 1):
            there = case.replay(setting_at(posterior.base, posterior.names, posterior.at + side * Z90 * along / length))
            for quantity in QUANTITIES:
                off = np.log(there.figures.get(quantity, np.nan) / here.figures.get(quantity, np.nan))
                if np.isfinite(off):
                    end = 0 if off < 0 else 1
                    sides[quantity][end] = max(sides[quantity][end], abs(off))
    found = []
    for quantity in QUANTITIES:
        measured, middle = case.measured_s.get(quantity, np.nan), here.figures.get(quantity, np.nan)
        if not (np.isfinite(measured) and np.isfinite(middle)):
            continue
        own = Z90 * float(np.hypot(errors.of_unseen(quantity), case.noise.get(quantity, 0.0)))
        low, high = np.exp(np.hypot(sides[quantity], own) * (-1, 1))
        found.append(
            Prediction(
                name=case.name,
                quantity=quantity,
                measured_s=measured,
                predicted_s=middle,
                low_s=float(middle * low),
                high_s=float(middle * high),
            )
        )
    return found


def _solved(
    lines: Lines, names: Sequence[str], widths: FloatArray, base: Setting, keep: NDArray[np.bool_]
) -> tuple[Posterior, float]:
    """The posterior on straight lines of the runs of the mask *keep*, and how many times the stated errors its residuals are."""
    mine = np.repeat(keep, len(QUANTITIES)) & np.isfinite(lines.residual)
    slope, here = lines.slope[mine], lines.residual[mine]
    n, k = len(here), len(names)
    limits = np.array([BY_NAME[name].limits(own_value(base, name)) for name in names]).reshape(k, 2)
    kept = Lines(at=lines.at, residual=here, slope=slope)
    best = least(kept, limits[:, 0] - 1e-9, limits[:, 1] + 1e-9, soft_l1, widths=widths)
    left = here + slope @ (best - lines.at)
    trust = 1.0 / np.sqrt(1.0 + left**2)
    precision = (slope * trust[:, None]).T @ slope + np.diag(1.0 / widths**2)
    # Parameters that the data take up leave fewer residuals to judge by.
    told = float(np.trace(np.linalg.solve(precision, (slope * trust[:, None]).T @ slope)))
    spread = (_SURE_DEGREES + float(trust @ left**2)) / (_SURE_DEGREES + max(n - told, 0.0))
    scale = max(1.0, float(np.sqrt(spread)))
    covariance = np.linalg.inv((slope * trust[:, None]).T @ slope / scale**2 + np.diag(1.0 / widths**2))
    found = Posterior(
        names=tuple(names), at=best, covariance=np.asarray(covariance, np.float64), widths=widths, base=base
    )
    return found, scale


class _End(NamedTuple):
    """Where a descent ended."""

    lines: Lines
    keep: NDArray[np.bool_]
    """The runs that the others do not contradict."""
    figures: tuple[Mapping[str, float], ...]


class _Search:
    """The descents of one fit: what has been replayed last, and which runs are kept."""

    def __init__(
        self, cases: Sequence[Case], base: Setting, names: Sequence[str], priors: Mapping[str, Prior], errors: Errors
    ) -> None:
        self.cases, self.base, self.names = tuple(cases), base, tuple(names)
        noise = np.array([case.noise.get(q, 0.0) for case in cases for q in QUANTITIES])
        usual = np.tile([errors.of(q) for q in QUANTITIES], len(cases))
        self._weights = 1.0 / np.hypot(usual, noise)
        self._usual = (usual * self._weights) ** 2
        self.keep = np.ones(len(cases), bool)
        self._now: list[Simulated] = []
        self._figures: tuple[Mapping[str, float], ...] = ()
        self.replays = 0
        self.residual = self.replayed(np.zeros(len(self.names)))
        """With the stack's own terms."""
        self.before = tuple(each.figures for each in self._now)
        if not any(each.short_of_memory for each in self._now):
            self.names = tuple(name for name in self.names if name != KV)
        self.widths = np.array([priors[name].width for name in self.names])

    def replayed(self, at: FloatArray) -> FloatArray:
        self.replays += len(self.cases)
        setting = setting_at(self.base, self.names, at)
        self._now = [case.replay(setting) for case in steps(self.cases, "runs replayed")]
        return self._compared()

    def _compared(self) -> FloatArray:
        pairs = zip(self.cases, self._now, strict=True)
        return self._weights * np.concatenate([_compared(case, each.figures) for case, each in pairs])

    def _lines_of(self, at: FloatArray) -> Lines:
        """The lines around the place that was replayed last."""
        pairs = list(zip(self.cases, self._now, strict=True))
        slope = [
            slopes_of(case, at, self.names, self.widths, self.base, each)
            for case, each in steps(pairs, "slopes of runs")
        ]
        self._figures = tuple(each.figures for each in self._now)
        return Lines(at=at, residual=self._compared(), slope=np.vstack(slope) * self._weights[:, None])

    def solved(self, lines: Lines) -> tuple[Posterior, float]:
        """The posterior on *lines* of the runs that the others do not contradict there."""
        posterior, _ = _solved(lines, self.names, self.widths, self.base, self.keep)
        self.keep = _kept(lines, posterior, self._usual, self.keep)
        return _solved(lines, self.names, self.widths, self.base, self.keep)

    def _goal_of(self, lines: Lines) -> FloatArray | None:
        posterior, _ = self.solved(lines)
        close = np.abs(posterior.at - lines.at) < _CLOSE * np.sqrt(np.diag(posterior.covariance))
        return None if close.all() else posterior.at

    def _cost_of(self, residual: FloatArray, at: FloatArray) -> float:
        return self._cost(residual, at, self.keep)

    def _cost(self, residual: FloatArray, at: FloatArray, keep: NDArray[np.bool_]) -> float:
        z = residual[np.repeat(keep, len(QUANTITIES)) & np.isfinite(residual)] ** 2
        return float(soft_l1(z)[0].sum() + ((at / self.widths) ** 2).sum())

    def _lines_apart(self, at: FloatArray, apart: FloatArray) -> Lines:
        """The lines around the place that was replayed last by two replays for each parameter, *apart* to either side."""
        here, now, slope = self._compared(), self._now, list[FloatArray]()
        for j, name in enumerate(self.names):
            low, high = BY_NAME[name].limits(own_value(self.base, name))
            ends = max(at[j] - apart[j], low), min(at[j] + apart[j], high)
            places = (np.concatenate((at[:j], [end], at[j + 1 :])) for end in ends)
            below, above = (self.replayed(place) for place in places)
            slope.append((above - below) / (ends[1] - ends[0]))
        self._now, self._figures = now, tuple(each.figures for each in now)
        return Lines(at=at, residual=here, slope=np.nan_to_num(np.stack(slope, axis=1)))

    def _end(self, at: FloatArray, rounds: int, lines_of: Callable[[FloatArray], Lines]) -> _End:
        """Where going on from *at* ends, which was replayed last."""
        lines = descended(
            at,
            rounds,
            lines_of=lines_of,
            residual_of=self.replayed,
            goal_of=self._goal_of,
            cost_of=self._cost_of,
        )
        return _End(lines, self.keep, self._figures)

    def best(self, rounds: int) -> _End:
        """The end that costs less, over all runs: of a descent from the stack's own terms, or of another from where it ended."""
        first = self._end(np.zeros(len(self.names)), rounds, self._lines_of)
        if not self.names:
            return first
        apart = _APART * np.sqrt(np.diag(self.solved(first.lines)[0].covariance))
        self.replayed(first.lines.at)
        second = self._end(first.lines.at, min(rounds, _ROUNDS_APART), lambda at: self._lines_apart(at, apart))
        everyone = np.ones(len(self.cases), bool)
        end = min(first, second, key=lambda each: self._cost(each.lines.residual, each.lines.at, everyone))
        self.keep = end.keep
        return end


def fit(
    cases: Sequence[Case],
    base: Setting,
    priors: Mapping[str, Prior],
    *,
    names: Sequence[str] | None = None,
    errors: Errors = ERRORS,
    rounds: int = ROUNDS,
) -> Fit:
    """*base* fitted to *cases*; ValueError where none of them can be compared.

    *names*: of `PARAMETERS`, all of them without it. KV capacity is left out where no replay is short of it.
    """
    if not cases:
        raise ValueError("a fit needs at least one run")
    search = _Search(cases, base, [p.name for p in PARAMETERS] if names is None else names, priors, errors)
    if not np.isfinite(search.residual).any():
        raise ValueError("no run has a TPOT or a TTFT that its simulation has too, so that there is nothing to fit")
    end = search.best(rounds)
    posterior, scale = search.solved(end.lines)
    return Fit(
        # What is said of the fit is of the place that was replayed.
        posterior=replace(posterior, at=end.lines.at),
        cases=tuple(cases),
        figures=end.figures,
        before=search.before,
        contradicting=tuple(int(i) for i in np.flatnonzero(~search.keep)),
        lines=end.lines,
        priors={name: priors[name] for name in search.names},
        errors=errors,
        scale=scale,
        replays=search.replays,
    )


def _kept(lines: Lines, posterior: Posterior, usual: FloatArray, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which runs the others do not contradict: a run is judged by the fit of the others alone.

    *usual*: the share of each squared error that is of all measurements, and not one's own noise.
    """
    runs = len(keep)
    if runs < _FEWEST_TO_JUDGE:
        return np.ones(runs, bool)
    worst = np.zeros(runs)
    for i in range(runs):
        others = keep.copy()
        others[i] = False
        if not others.any():
            continue
        theirs, around = _solved(lines, posterior.names, posterior.widths, posterior.base, others)
        rows = slice(i * len(QUANTITIES), (i + 1) * len(QUANTITIES))
        slope = lines.slope[rows]
        off = lines.residual[rows] + slope @ (theirs.at - lines.at)
        own = usual[rows] * around**2 + 1.0 - usual[rows]
        sd = np.sqrt(np.einsum("ij,jk,ik->i", slope, theirs.covariance, slope) + own)
        worst[i] = np.nanmax(np.abs(off) / sd) if np.isfinite(off).any() else 0.0
    found = worst <= OUTLIER
    # Most runs cannot contradict most runs: only the farthest quarter may be set aside.
    most = max(1, runs // 4)
    if (~found).sum() > most:
        found = np.ones(runs, bool)
        found[np.argsort(worst)[-most:]] = False
    return found
