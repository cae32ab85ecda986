"""A fit as a file that scenarios name as their serving stack, and what such a file leaves unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.overheads import Overheads
from hwmodels.stack_files import StackFile, dump_stack_file
from sim.bench.fitting import QUANTITIES, Errors, Fit, Posterior, Prediction
from sim.bench.parameters import BY_NAME, KV, Setting, own_value
from sim.build import installed
from sim.scenario.assembly.deployment import deployment_of

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from hwmodels.overheads import ServingStack
    from sim.scenario import Scenario

TOLD = 0.5
"""Share of a prior's variance that runs must take away for a parameter to count as told by them."""


def stack_text(fit: Fit, scenario: Scenario, files: Sequence[str], left_out: Sequence[Prediction]) -> str:
    """The text of the stack file of *fit*, which was made of the *files* on the deployment of *scenario*."""
    posterior = fit.posterior
    setting, stack = posterior.setting, posterior.base.stack
    deployment = deployment_of(scenario)
    sources = dict(stack.sources)
    for name in posterior.names:
        if name == KV:
            continue
        low, high = posterior.interval(name, 1.96)
        share = posterior.told(name)
        how = f"the runs took away {share:.0%} of its prior's variance" if share >= TOLD else "keeps its prior, all but"
        sources[name] = f"fitted to {len(fit.cases)} runs, 95 % interval {low:.4g} to {high:.4g}; {how}"
    for each in fields(Overheads):
        if getattr(setting.stack.overheads, each.name) and each.name not in sources:
            sources[each.name] = "left as it was"
    facts: dict[str, Any] = {
        "of": words_of(deployment, stack),
        "model": deployment.model.name,
        "hardware": deployment.device.name,
        "tensor": deployment.parallel.tensor,
        "scenario": scenario.hash,
        "rooftrace": installed("rooftrace"),
        "files": list(files),
        "runs": [case.name for case in fit.cases],
        "set_aside": [fit.cases[i].name for i in fit.contradicting],
        "told": [name for name in posterior.names if posterior.told(name) >= TOLD],
        "kept_prior": [name for name in posterior.names if posterior.told(name) < TOLD],
        "widths": [f"{name}: {each.width:.3g} ({each.source})" for name, each in fit.priors.items()],
    }
    for quantity in QUANTITIES:
        for what, value in errors_of(fit, left_out, quantity).items():
            if np.isfinite(value):
                facts[f"{quantity.removesuffix('_s')}_error_{what}"] = round(float(value), 4)
    return dump_stack_file(
        stack=replace(setting.stack, sources=sources),
        release=scenario.serving_release if scenario.stack_file is None else None,
        kv_factor=setting.kv_factor,
        fit=facts,
        errors={
            "repeat": dict(fit.errors.repeat),
            "model": dict(fit.errors.model),
            "unseen": dict(fit.errors.unseen),
            "scale": fit.scale,
            "source": fit.errors.source,
        },
        posterior={
            "names": list(posterior.names),
            "own": [own_value(posterior.base, name) for name in posterior.names],
            "at": [float(x) for x in posterior.at],
            "widths": [float(x) for x in posterior.widths],
            "covariance": [[float(x) for x in row] for row in posterior.covariance],
        },
    )


def words_of(deployment: Deployment, stack: ServingStack) -> str:
    """The deployment that a fit is of, in words that tell it from others."""
    return f"{deployment.model.name} on {deployment.device.name}, tensor {deployment.parallel.tensor}, {stack.name}"


def errors_of(fit: Fit, left_out: Sequence[Prediction], quantity: str) -> dict[str, float]:
    """Mean absolute relative errors of a quantity over runs that were not set aside: with the stack's own terms, fitted, and of
    each run by the fit of the others."""
    found: dict[str, float] = {}
    aside = {fit.cases[i].name for i in fit.contradicting}
    for what, figures in (("before", fit.before), ("fitted", fit.figures)):
        off = [
            abs(each.get(quantity, np.nan) / case.measured_s[quantity] - 1.0)
            for case, each in zip(fit.cases, figures, strict=True)
            if quantity in case.measured_s and case.name not in aside
        ]
        off = [value for value in off if np.isfinite(value)]
        found[what] = float(np.mean(off)) if off else float("nan")
    off = [abs(each.error) for each in left_out if each.quantity == quantity and each.name not in aside]
    found["left_out"] = float(np.mean(off)) if off else float("nan")
    return found


def posterior_of(file: StackFile) -> Posterior:
    """The posterior that the fit behind *file* left."""
    given = file.posterior
    names = tuple(str(name) for name in given["names"])
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"posterior.names: {unknown[0]} is not a parameter; valid: {', '.join(BY_NAME)}")
    own = dict(zip(names, given["own"], strict=True))
    kv_factor = float(own.pop(KV, file.kv_factor))
    terms = replace(file.stack.overheads, **{name: float(value) for name, value in own.items()})
    return Posterior(
        names=names,
        at=np.array(given["at"], float),
        covariance=np.array(given["covariance"], float).reshape(len(names), len(names)),
        widths=np.array(given["widths"], float),
        base=Setting(stack=replace(file.stack, overheads=terms), kv_factor=kv_factor),
    )


def errors_in(file: StackFile) -> tuple[Errors, float]:
    """The stated errors of the fit behind *file*, and how many times these its residuals are."""
    given = file.errors
    for name in ("repeat", "model", "unseen"):
        if not isinstance(given.get(name), Mapping) or any(q not in given[name] for q in QUANTITIES):
            raise ValueError(f"errors.{name} has a number for each of {', '.join(QUANTITIES)}; is the file whole?")
    errors = Errors(
        repeat={q: float(given["repeat"][q]) for q in QUANTITIES},
        model={q: float(given["model"][q]) for q in QUANTITIES},
        unseen={q: float(given["unseen"][q]) for q in QUANTITIES},
        source=str(given.get("source", "")),
    )
    return errors, float(given.get("scale", 1.0))
