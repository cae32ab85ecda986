"""The error that a prediction may have: replays under terms drawn from what a fit left unknown, or from held-back errors without
one.

Each replay draws a deployment. Of a fitted stack (`serving_stack: my-stack.toml`) its parameters come from the fit's posterior, and
what no parameter explains from the errors that fits of other deployments had. Of a stack by name all of it comes from deployments
that were held back of the stack's own fit (`hwmodels.serving_intervals`). An error of TPOT makes iterations longer or shorter, so
that queues, rates and attainment follow; one of TTFT stretches the time to each first token. Each replay has a seed of its own;
some more at the middle of all draws show what of the interval is due to the simulation's own draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.calibrated import Calibrated
from hwmodels.serving_intervals import has_rows, kind_of, serving_interval
from hwmodels.stack_files import load_stack_file
from sim.bench.cases import at as experiment_at
from sim.bench.fitting import ERRORS
from sim.bench.overlay import errors_in, posterior_of, words_of
from sim.bench.parameters import Z90, Setting
from sim.errors import RooftraceError
from sim.results import Result
from sim.run import run_built
from sim.scenario.assembly import resolve
from sim.scenario.assembly.deployment import deployment_of
from sim.text import is_share
from sim.under_way import steps

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.overheads import ServingStack
    from sim.scenario import Scenario

REPLAYS = 20
"""Without --intervals N: the fewest, but for one, whose farthest lie nine tenths apart on average."""
LEVEL = 0.9
SIMULATIONS = 4
"""Replays with the middle terms and other seeds."""
FIGURES = (
    "ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "tpot_s.p50", "tpot_s.p99", "e2el_s.mean", "e2el_s.p99",
    "requests_per_s", "output_tokens_per_s", "slo_attainment",
)  # fmt: skip
"""Dotted names in a summary that intervals are given of."""
_STREAM = 0x62656E63
"""Names the random stream of the draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One deployment as it may be."""

    setting: Setting
    iteration_factor: float = 1.0
    """The time of each iteration over the time that its terms give."""
    first_token_factor: float = 1.0
    """The same of what passes until a first token, beside that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where a figure lies in nine replays of ten, and the farthest of the few in which only the seed differs."""

    middle: float
    """The figure with the middle terms and the scenario's own seed."""
    low: float
    high: float
    simulation_low: float
    simulation_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Intervals of the figures of one scenario."""

    figures: Mapping[str, Interval]
    replays: int
    simulations: int
    basis: str
    attained: tuple[float, ...] = ()
    """The share of requests within the SLO in each replay; empty where requests have no limits of their own."""
    within: tuple[bool, ...] = ()
    """Whether each replay keeps the limits of means and percentiles; empty without any."""
    saturated: int = 0
    """The number of replays that are saturated."""

    @property
    def level(self) -> float:
        """The share of further draws that the intervals hold on average: 0.9, or less where the replays are too few for that."""
        return min(LEVEL, (self.replays - 1) / (self.replays + 1))

    def kept(self, share: float | None) -> float | None:
        """The probability that the SLO is kept: in how many of the replays at least *share* of requests keep theirs (None: they
        have none), and means and percentiles keep theirs; None without an SLO."""
        shares = [each >= share for each in self.attained] if share is not None else []
        both = [mine and all_ for mine, all_ in zip(shares, self.within, strict=True)] if shares and self.within else []
        found = both or shares or self.within
        return float(np.mean(found)) if found else None

    def facts(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "level": self.level,
            "replays": self.replays,
            "simulations": self.simulations,
            "basis": self.basis,
            "saturated_replays": self.saturated,
            "figures": {name: asdict(each) for name, each in self.figures.items()},
        }


def drawn(scenario: Scenario, deployment: Deployment, n: int) -> tuple[World, list[World], str]:
    """The middle world, *n* drawn ones, and where they come from; the same draws for the same seed, whatever the workload.

    RooftraceError where nothing says how far off the deployment may be.
    """
    if not isinstance(deployment.made_by, Calibrated):
        raise RooftraceError(
            "--intervals: nothing was held back of cost_model roofline, or of measured steps, that could be drawn; leave "
            "--intervals out, or price the deployment by its device and stack"
        )
    rng = np.random.default_rng([scenario.seed, _STREAM])
    stack = deployment.made_by.stack
    file = scenario.stack_file
    if file is not None:
        return _of_fit(scenario, file, deployment, n, rng)
    middle = Setting(stack=stack)
    factors, basis = _held_back(deployment, stack, rng.standard_normal((n, 2)))
    worlds = [World(setting=middle, iteration_factor=a, first_token_factor=b) for a, b in factors]
    return World(setting=middle), worlds, basis


def _of_fit(
    scenario: Scenario, file: Path, deployment: Deployment, n: int, rng: np.random.Generator
) -> tuple[World, list[World], str]:
    found = load_stack_file(file)
    try:
        posterior = posterior_of(found)
        errors_in(found)
    except ValueError as error:
        raise RooftraceError(f"{file}: {error}") from None
    errors, _ = errors_in(found)
    z = rng.standard_normal((n, 2))
    # The scenario has the fitted number of blocks already; where it is given, nothing of it is unknown.
    own = found.kv_factor if scenario.memory.kv_blocks is None else np.inf
    settings = [
        replace(setting, kv_factor=setting.kv_factor / own if np.isfinite(own) else 1.0)
        for setting in posterior.draws(n, rng)
    ]
    facts = found.stack.fit
    runs = len(facts.get("runs", ()))
    basis = f"the posterior of {file} ({runs} run{'s' * (runs != 1)}), and "
    here = words_of(deployment, found.stack)
    if facts.get("of", here) == here:
        # A TTFT holds iterations too, whose error it has already.
        first = np.sqrt(max(errors.unseen["ttft_s"] ** 2 - errors.unseen["tpot_s"] ** 2, 0.0))
        factors = [(float(np.exp(errors.unseen["tpot_s"] * a)), float(np.exp(first * b))) for a, b in z]
        basis += "errors of fits on deployments held back"
    else:
        # What was fitted is another deployment: this one is as little known as those that no fit had seen.
        factors, theirs = _held_back(deployment, found.stack, z)
        basis += f"{theirs}, for it was fitted to {facts['of']}"
    worlds = [
        World(setting=setting, iteration_factor=a, first_token_factor=b)
        for setting, (a, b) in zip(settings, factors, strict=True)
    ]
    return World(setting=replace(posterior.setting, kv_factor=1.0)), worlds, basis


def _held_back(
    deployment: Deployment, stack: ServingStack, z: NDArray[np.float64]
) -> tuple[list[tuple[float, float]], str]:
    """For each row of standard normal numbers *z*, shape [n, 2], the factors of iterations and of first tokens, drawn from
    deployments that the fit of *stack* had not seen; and their basis in words."""
    profile = deployment.profile
    assert profile is not None
    name, device = stack.engine, deployment.measured_as
    found = serving_interval(
        name,
        deployment.model.name,
        device,
        kind=profile.kind,
        loan=deployment.loan(network_alone=has_rows(name, device)),
        model_kind=kind_of(deployment.model),
    )
    if found is None:
        raise RooftraceError(
            f"--intervals: no deployment was held back of serving_stack {name} on {device}; name a stack that was fitted (vllm, "
            "trtllm, sglang), fit one to a run of yours (rooftrace bench fit), or leave --intervals out"
        )
    factors = []
    for a, b in z:
        side = int(a > 0), int(b > 0)
        iteration, both = abs(np.log(found.tpot[side[0]])), abs(np.log(found.ttft[side[1]]))
        rest = np.sqrt(max(both**2 - np.log(found.tpot[side[1]]) ** 2, 0.0))
        factors.append((float(np.exp(a / Z90 * iteration)), float(np.exp(b / Z90 * rest))))
    return factors, found.basis


def results(scenario: Scenario, replays: int = REPLAYS) -> tuple[Result, list[Result], list[Result], str]:
    """The run with the middle terms, *replays* drawn ones, `SIMULATIONS` of other seeds, and where the draws come from."""
    if replays < 2:
        raise RooftraceError(f"--intervals takes at least 2 replays; got {replays}")
    deployment = deployment_of(scenario)
    middle, worlds, basis = drawn(scenario, deployment, replays)
    built = resolve(scenario)
    if any(spec.decoding is not None for spec in built.experiment.hosted):
        raise RooftraceError(
            "--intervals: nothing was held back of speculative decoding; leave decoding or --intervals out"
        )

    def seeded(i: int) -> Any:
        """The scenario assembled with another seed, whose requests are others."""
        return resolve(scenario.with_value("seed", scenario.seed + i)) if i else built

    asked = [*((1 + i, world) for i, world in enumerate(worlds)), *((1 + i, middle) for i in range(SIMULATIONS))]
    found = [_run(seeded(i), deployment, world) for i, world in steps(asked, "replays")]
    runs, same = found[: len(worlds)], found[len(worlds) :]
    return _run(built, deployment, middle), runs, same, basis


def _run(built: Any, deployment: Deployment, world: World) -> Result:
    experiment = experiment_at(built.experiment, deployment, _slowed(world))
    found = run_built(replace(built, experiment=experiment))
    if world.first_token_factor == 1.0:
        return found
    requests = dict(found.columns.requests)
    first, sent = requests["first_token_ns"], requests["arrival_ns"]
    later = np.where(first >= 0, np.rint((first - sent) * (world.first_token_factor - 1.0)), 0).astype(np.int64)
    requests["first_token_ns"] = first + later
    requests["finish_ns"] = np.where(requests["finish_ns"] >= 0, requests["finish_ns"] + later, -1)
    columns: Any = found.columns
    return Result(replace(columns, requests=requests), manifest=found.manifest, slo=found.slo)


def _slowed(world: World) -> Setting:
    """The world's setting with every part of an iteration so many times as long."""
    factor = world.iteration_factor
    own = world.setting.stack.overheads
    times = ("step_s", "sequence_s", "sample_s", "row_s", "layer_host_s", "expert_host_s", "latent_host_s")
    moved = {name: getattr(own, name) * factor for name in times}
    # What is lost in long arithmetic is priced with the kernels, and stretches with them.
    moved |= {name: (1.0 + getattr(own, name)) * factor - 1.0 for name in ("compute_excess", "bandwidth_excess")}
    stack = replace(world.setting.stack, overheads=replace(own, **moved))
    return replace(world.setting, stack=stack)


def value_at(summary: Mapping[str, Any], name: str) -> float:
    """The figure of a dotted *name*; NaN where the summary has none."""
    found: Any = summary
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float("nan") if found is None else float(found)


def intervals(scenario: Scenario, replays: int = REPLAYS, names: Sequence[str] = FIGURES) -> Intervals:
    """Intervals of the figures *names* of *scenario*, from *replays* drawn deployments and `SIMULATIONS` more seeds.

    No interval of a time or a rate is narrower than repeats of one measurement lie apart (`ERRORS.repeat`).
    """
    middle, runs, same, basis = results(scenario, replays)
    found = {}
    for name in names:
        at = value_at(middle.summary, name)
        if not np.isfinite(at):
            continue
        found[name] = _interval(
            name, at, [value_at(each.summary, name) for each in runs], [value_at(each.summary, name) for each in same]
        )
    attained = [value_at(each.summary, "slo_attainment") for each in runs]
    return Intervals(
        figures=found,
        replays=replays,
        simulations=SIMULATIONS,
        basis=basis,
        attained=tuple(attained) if np.isfinite(attained).all() else (),
        within=tuple(each.summary["slo_kept"] for each in runs if "slo_kept" in each.summary),
        saturated=sum(bool(each.summary["saturated"]) for each in runs),
    )


def _ends(values: Sequence[float], middle: float) -> tuple[float, float]:
    """The values between which nine further draws of ten lie, on average over draws like *values*: those at rank 0.05 and 0.95
    (n + 1), the farthest where n is below 19. *middle* where none is finite."""
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return middle, middle
    low, high = np.quantile(known, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), method="weibull")
    return float(low), float(high)


def _interval(name: str, middle: float, values: Sequence[float], same: Sequence[float]) -> Interval:
    low, high = _ends(values, middle)
    share = name == "slo_attainment"
    repeat = 0.0 if share else ERRORS.repeat["ttft_s" if name.startswith("ttft") else "tpot_s"]
    factor = float(np.exp(Z90 * repeat))
    low, high = min(low, middle / factor), max(high, middle * factor)
    seeds = [middle, *(value for value in same if np.isfinite(value))]
    return Interval(middle=middle, low=low, high=high, simulation_low=min(seeds), simulation_high=max(seeds))


def changes(a: Scenario, b: Scenario, replays: int = REPLAYS, names: Sequence[str] = FIGURES) -> dict[str, Interval]:
    """Figures of *b* over those of *a*, less 1, or of shares their difference.

    The two share the draws of a replay, so that what is off in both cancels. RooftraceError where they are not of one serving
    stack, model and device, whose errors would not be the same.
    """
    one, other = deployment_of(a), deployment_of(b)
    if (a.serving_stack, one.device.name, one.model.name) != (b.serving_stack, other.device.name, other.model.name):
        raise RooftraceError(
            "--intervals compares deployments that share their serving stack, model and device, so that one draw is of both; "
            "leave it out to compare without model error"
        )
    ours, theirs = results(b, replays), results(a, replays)

    def change(name: str, up: Result, down: Result) -> float:
        before = value_at(down.summary, name)
        if is_share(name):
            return value_at(up.summary, name) - before
        return value_at(up.summary, name) / before - 1.0 if before else float("nan")

    found = {}
    for name in names:
        middle = change(name, ours[0], theirs[0])
        if not np.isfinite(middle):
            continue
        values = [change(name, up, down) for up, down in zip(ours[1], theirs[1], strict=True)]
        seeds = [change(name, up, down) for up, down in zip(ours[2], theirs[2], strict=True)]
        low, high = _ends(values, middle)
        around = [middle, *(value for value in seeds if np.isfinite(value))]
        found[name] = Interval(
            middle=middle,
            low=min(low, middle),
            high=max(high, middle),
            simulation_low=min(around),
            simulation_high=max(around),
        )
    return found
