"""Which run would tell most about a question: how far each of a grid of runs is expected to narrow the answer.

On straight lines around what is known now: a run adds to the precision of the parameters what its figures' slopes say, and the
answer's variance is that of the parameters along its own slopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hwmodels.calibrated import Calibrated
from hwmodels.stack_files import load_stack_file
from sim import metrics
from sim.bench.cases import case_of
from sim.bench.fitting import ERRORS, QUANTITIES, Errors, Posterior, slopes_of
from sim.bench.overlay import errors_in, posterior_of
from sim.bench.parameters import KV, PARAMETERS, Z90, Setting, priors
from sim.errors import RooftraceError
from sim.scenario.assembly import resolve
from sim.scenario.assembly.deployment import deployment_of

if TYPE_CHECKING:
    from sim.engine.record.columns import Columns
    from sim.scenario import Scenario

REQUESTS = (300, 1000, 3000)
"""The number of requests of each candidate's simulation: as few as keep sending for `_ANSWERS` times as long as an answer takes."""
_ANSWERS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A run that could be made: an open load of one rate and fixed lengths."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    half_width: float
    """Half the width of the 90 % interval of the answer after it, as a share of the answer; NaN where the server could not take
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer as it is known now, and as each run would make it known, the best first."""

    quantity: str
    answer_s: float
    half_width: float
    """Half the width of the 90 % interval from parameters alone, as a share of the answer."""
    candidates: tuple[Candidate, ...]
    basis: str

    @property
    def best(self) -> Candidate | None:
        """The run that narrows the answer most; None where the server could take none of them."""
        return next((each for each in self.candidates if np.isfinite(each.half_width)), None)


def known_of(scenario: Scenario) -> tuple[Posterior, Errors, str]:
    """The knowledge of the parameters of *scenario*'s stack: the posterior of its file, or the priors of a stack by name."""
    file = scenario.stack_file
    deployment = deployment_of(scenario)
    if not isinstance(deployment.made_by, Calibrated):
        raise RooftraceError(
            "cost_model roofline and measured steps have no terms that a run could tell; leave cost_model and hardware.steps out"
        )
    if file is not None:
        found = load_stack_file(file)
        try:
            return posterior_of(found), errors_in(found)[0], f"the fit of {file}"
        except ValueError as error:
            raise RooftraceError(f"{file}: {error}") from None
    widths = priors(deployment.profile)
    names = tuple(p.name for p in PARAMETERS if p.name != KV)
    at = np.array([widths[name].width for name in names])
    posterior = Posterior(
        names=names,
        at=np.zeros(len(names)),
        covariance=np.diag(at**2),
        widths=at,
        base=Setting(stack=deployment.made_by.stack),
    )
    return posterior, ERRORS, f"the priors of {scenario.serving_stack}"


def advise(
    scenario: Scenario,
    *,
    quantity: str = "tpot_s",
    rates: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
) -> Advice:
    """The advice that runs of *rates* and lengths would give about the mean TTFT or TPOT of *scenario*'s own workload.

    RooftraceError for another quantity, and where the workload has no answer.
    """
    if quantity not in QUANTITIES:
        raise RooftraceError(f"a question is about {' or '.join(QUANTITIES)}; got {quantity!r}")
    if not (rates and prompts and outputs):
        raise RooftraceError("give at least one rate and one length of prompts and of outputs")
    posterior, errors, basis = known_of(scenario)
    i = QUANTITIES.index(quantity)
    answer, asked, _, _ = _slopes(scenario, posterior)
    if not np.isfinite(answer[i]):
        raise RooftraceError(f"no request of the scenario's workload has a {quantity.removesuffix('_s').upper()}")
    now = _half_width(asked[i], posterior.covariance)
    precision = np.linalg.pinv(posterior.covariance)
    noise = np.diag([errors.of(each) ** -2 for each in QUANTITIES])
    found = []
    for rate in rates:
        for prompt in prompts:
            for output in outputs:
                slope, steady = _of_candidate(scenario, posterior, rate, prompt, output)
                after = np.linalg.inv(precision + slope.T @ noise @ slope)
                width = _half_width(asked[i], after) if steady else float("nan")
                found.append(Candidate(rate_per_s=rate, prompt_tokens=prompt, output_tokens=output, half_width=width))
    found.sort(key=lambda each: (not np.isfinite(each.half_width), each.half_width))
    return Advice(quantity=quantity, answer_s=float(answer[i]), half_width=now, candidates=tuple(found), basis=basis)


def _half_width(slope: np.ndarray, covariance: np.ndarray) -> float:
    return float(np.expm1(Z90 * np.sqrt(max(float(slope @ covariance @ slope), 0.0))))


def _of_candidate(
    scenario: Scenario, posterior: Posterior, rate: float, prompt: int, output: int
) -> tuple[np.ndarray, bool]:
    """Slopes of a run of that load, and whether the server kept up: fewer requests than are in flight at once are a burst, of which
    every server keeps up with the first half."""
    slope, steady = np.zeros((len(QUANTITIES), len(posterior.names))), False
    for requests in REQUESTS:
        _, slope, steady, answer_s = _slopes(_with_load(scenario, rate, prompt, output, requests), posterior)
        if not steady or requests / rate >= _ANSWERS * answer_s:
            return slope, steady
    return slope, False


def _with_load(scenario: Scenario, rate: float, prompt: int, output: int, requests: int) -> Scenario:
    return scenario.with_value(
        "workload",
        {
            "arrivals": {"process": "poisson", "rate_per_s": float(rate)},
            "prompt_tokens": int(prompt),
            "output_tokens": int(output),
            "requests": requests,
        },
    )


def _slopes(scenario: Scenario, posterior: Posterior) -> tuple[np.ndarray, np.ndarray, bool, float]:
    """Seconds of each quantity over all requests, how their logarithms move with the parameters, whether the server kept up, and
    the median of the seconds that an answer takes."""
    deployment = deployment_of(scenario)
    seen: list[tuple[bool, float]] = []

    def figure(columns: Columns) -> tuple[np.ndarray, dict[str, float]]:
        done = columns.requests["finish_ns"] >= 0
        part = {name: column[done] for name, column in columns.requests.items()}
        tpot, ttft = metrics.tpot_s(part), metrics.ttft_s(part)
        if not done.any():
            seen.append((False, 0.0))
            return done, {"tpot_s": np.nan, "ttft_s": np.nan}
        sent, end = part["arrival_ns"], part["finish_ns"]
        # The first half of the arrivals against the last half: a queue that grows shows there.
        order = np.argsort(sent, kind="stable")
        half = len(order) // 2
        early, late = (np.median(ttft[some]) for some in (order[:half], order[half:])) if half else (1.0, 1.0)
        seen.append((bool(late < 2.0 * early + 0.05), float(np.median(end - sent)) * 1e-9))
        known = tpot[np.isfinite(tpot)]
        return done, {"tpot_s": float(known.mean()) if len(known) else np.nan, "ttft_s": float(ttft.mean())}

    case = case_of("candidate", {}, resolve(scenario).experiment, deployment, figure)
    # A scenario with a fitted stack has the fitted number of KV blocks already.
    relative = posterior.base.kv_factor / posterior.setting.kv_factor
    base = replace(posterior, base=replace(posterior.base, kv_factor=relative))
    here = case.replay(base.setting)
    # Slopes replay other settings, whose queues are not asked for.
    kept_up, answer_s = seen[0]
    slope = slopes_of(case, base.at, base.names, base.widths, base.base, here)
    return np.array([here.figures[q] for q in QUANTITIES]), slope, kept_up, answer_s
