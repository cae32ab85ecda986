"""Measured runs beside their simulation: how far off, where below saturation, and in a table for people and one for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hwmodels.model import catalogue_base, load_model
from sim.bench.formats import sglang_bench, vllm_bench
from sim.bench.load import NotReplayable
from sim.bench.measured import BenchRun
from sim.bench.replay import LATENCIES, Replayed, replay
from sim.under_way import steps

if TYPE_CHECKING:
    import pandas as pd

    from sim.scenario import Scenario

HEADLINES = {
    "tpot": ("tpot_mean_s", "tpot_median_s"),
    "ttft": ("ttft_median_s", "ttft_mean_s"),
    "e2el": ("e2el_mean_s", "e2el_median_s"),
    "output_tokens_per_s": ("output_tokens_per_s", "requests_per_s"),
}
"""The figure that stands for a quantity, and the one that does where a file lacks it. TTFT goes by its median: near saturation a
mean is one queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one quantity over runs."""

    runs: int
    mean: float
    """The mean of the errors' sizes."""
    median: float
    worst: float
    """The farthest error, with its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Runs that were simulated, and a sentence for each that could not be."""

    replays: tuple[Replayed, ...]
    problems: tuple[str, ...] = ()

    def errors(self, *, saturated: bool = False) -> dict[str, Errors]:
        """The errors by quantity, over runs measured below saturation (closed loops among them), or over those beyond it."""
        found = {}
        for quantity in HEADLINES:
            values = [
                error
                for each in self.replays
                if bool(each.run.saturated) is saturated and (error := headline(each, quantity)[3]) is not None
            ]
            if values:
                sizes = [abs(value) for value in values]
                found[quantity] = Errors(
                    runs=len(values),
                    mean=statistics.fmean(sizes),
                    median=statistics.median(sizes),
                    worst=max(values, key=abs),
                )
        return found

    def exceeded(self, limits: Mapping[str, float], statistic: str = "mean") -> list[str]:
        """A sentence for each quantity whose error, a share, is above its limit in *limits* (`all`: of every quantity)."""
        found = self.errors()
        names = list(HEADLINES)
        sentences = []
        judged = {name: limits.get(name, limits.get("all")) for name in names}
        for name, limit in judged.items():
            if limit is None:
                continue
            if name not in found:
                if name in limits:
                    sentences.append(
                        f"{name}: no run below saturation gives it or is judged by it, so that its error is not known"
                    )
                continue
            value = getattr(found[name], statistic)
            if value > limit:
                sentences.append(
                    f"{name}: {statistic} error {value:.1%} over {found[name].runs} runs, above {limit:.1%}"
                )
        if not found:
            sentences.append("no run lies below saturation, so that no error can be held to a limit")
        return sentences


def compared(
    scenario: Scenario,
    runs: Iterable[BenchRun],
    *,
    replications: int | None = None,
) -> Compared:
    """Each of *runs* simulated on the deployment of *scenario* under its own protocol; what could not be is a problem."""
    replays, problems = [], []
    seeds = None if replications is None else range(scenario.seed, scenario.seed + replications)
    for run in steps(runs, "runs"):
        if not any(getattr(run, name) for name in LATENCIES):
            problems.append(f"{run.name}: it has nothing that a client measured, and is not compared")
            continue
        try:
            found = replay(scenario, run, seeds=seeds)
        except NotReplayable as error:
            problems.append(str(error))
            continue
        replays.append(found)
    return Compared(replays=tuple(replays), problems=tuple(problems))


def headline(found: Replayed, quantity: str) -> tuple[str, float | None, float | None, float | None]:
    """The headline of a quantity: the figure's name, measured, predicted, and relative error; the first of its figures that was
    measured."""
    names = HEADLINES[quantity]
    name = next((each for each in names if each in found.measured), names[0])
    return name, found.measured.get(name), found.predicted.get(name), found.error(name)


def strange(scenario: Scenario, runs: Sequence[BenchRun]) -> list[str]:
    """A sentence for each model and each engine that files name and that is not the scenario's."""
    return [*_strange_models(scenario, runs), *_strange_engines(scenario, runs)]


_SERVED_BY = {
    (tool.FORMAT, backend): engine for tool in (vllm_bench, sglang_bench) for backend, engine in tool.ENGINES.items()
}


def _strange_engines(scenario: Scenario, runs: Sequence[BenchRun]) -> Iterator[str]:
    ours = scenario.stack_name
    backends = [(run.format, run.config.get("backend")) for run in runs]
    for key in dict.fromkeys(backends) if ours in _SERVED_BY.values() else ():
        if _SERVED_BY.get(key, ours) != ours:
            yield f"files were measured with the backend {key[1]}, and the scenario simulates {ours}"


def _strange_models(scenario: Scenario, runs: Sequence[BenchRun]) -> list[str]:
    try:
        ours = (catalogue_base(scenario.model) or load_model(scenario.model)).name
    except ValueError:
        return []
    found = {}
    for label in dict.fromkeys(str(run.config["model"]) for run in runs if "model" in run.config):
        theirs = catalogue_base(label)
        if theirs is not None and theirs.name != ours:
            found[label] = f"files name the model {label}, and the scenario simulates {ours}"
    return list(found.values())


def load_text(run: BenchRun) -> str:
    """The offered load, in a few letters: '31.4/s', '16 clients', '100/s ≤ 440', 'as sent'."""
    offered = run.offered
    rate, limit = offered.rate_per_s, offered.concurrency
    if offered.ramped:
        text = f"{float(offered.ramp['start_per_s']):.4g} to {float(offered.ramp['end_per_s']):.4g}/s"
        return text + (f" ≤ {limit}" if limit is not None else "")
    if rate is not None and math.isfinite(rate):
        return f"{rate:.4g}/s" + (f" ≤ {limit}" if limit is not None else "")
    if limit is not None:
        return f"{limit} clients"
    return "all at once" if rate is not None else "as sent"


def saturation_text(found: Replayed) -> str:
    """The text about saturation: '', 'saturated', or which of measurement and simulation alone is."""
    theirs, ours = found.run.saturated, found.saturated
    if theirs and ours:
        return "saturated"
    if theirs and ours is False:
        return "saturated, not simulated so"
    return "simulated saturated" if ours and theirs is False else ""


def frame_of(found: Compared) -> pd.DataFrame:
    """One row a run and figure: measured, predicted, its spread between replications, and the relative error."""
    import pandas as pd

    return pd.DataFrame(
        {
            "run": each.run.name,
            "load": load_text(each.run),
            "saturated_measured": each.run.saturated,
            "saturated_predicted": each.saturated,
            "figure": name,
            **of,
            "replications": each.replications,
        }
        for each in found.replays
        for name, of in _figures(each).items()
        if name not in ("prompt_tokens_mean", "output_tokens_mean")
    )


def _figures(of: Replayed) -> dict[str, dict[str, float | None]]:
    """Every figure by name: measured, predicted, its spread between replications, and the relative error."""
    return {
        name: {
            "measured": of.measured.get(name),
            "predicted": of.predicted.get(name),
            "predicted_std": of.spread.get(name),
            "error": of.error(name),
        }
        for name in sorted({*of.measured, *of.predicted})
    }


def to_json(found: Compared) -> dict[str, Any]:
    """Everything that a comparison says, as plain values."""
    return {
        "runs": [
            {
                "run": each.run.name,
                "file": each.run.file,
                "format": each.run.format,
                "load": load_text(each.run),
                "saturated": {"measured": each.run.saturated, "predicted": each.saturated},
                "replications": each.replications,
                "not_judged": list(each.unjudged),
                "figures": _figures(each),
                "assumed": list(each.assumed),
                "notes": list(each.run.notes),
            }
            for each in found.replays
        ],
        "errors": {
            where: {name: asdict(of) for name, of in found.errors(saturated=saturated).items()}
            for where, saturated in (("below_saturation", False), ("saturated", True))
        },
        "problems": list(found.problems),
    }
