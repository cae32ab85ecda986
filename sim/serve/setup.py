"""From a scenario to a run that takes requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from policies.routers import knowledge_of
from sim.engine import Experiment, live_trace
from sim.errors import ScenarioError
from sim.scenario.assembly import resolve
from sim.scenario.assembly.auto import chosen_by_auto, left_to_choose
from sim.scenario.assembly.deployment import deployment_of
from sim.scenario.assembly.experiment import Built
from sim.scenario.assembly.pools import pools_of
from sim.scenario.settings import Scenario
from sim.scenario.workload import workload_of
from workloads import Trace, Workload

ID_TOKENS = 16
"""Tokens whose content has one name, where the KV blocks allow it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a session needs of its scenario."""

    scenario: Scenario
    built: Built
    """Its workload is a live one."""
    models: tuple[str, ...]
    """Names of the models, by row; one where all requests go to the same."""
    limits: tuple[int | None, ...]
    """Tokens of prompt and output that each takes."""
    lengths: np.ndarray
    """Output tokens of the scenario's workload, request after request."""
    chosen: Mapping[str, int] = field(default_factory=dict)
    """Settings that were `auto`, by dotted key."""

    @property
    def experiment(self) -> Experiment:
        return self.built.experiment


def set_up(scenario: Scenario) -> Setup:
    """The deployment of *scenario*, with a live workload in place of its own.

    Its own says what lengths to plan for, and may say how long answers are. ScenarioError for what cannot be built or served.
    """
    _check(scenario)
    expected = workload_of(scenario)
    pools = pools_of(scenario)
    hosted = tuple(dict.fromkeys(name for pool in pools for name in pool.serves))
    several = scenario.pools is not None or scenario.placement is not None
    names = hosted if len(hosted) > 1 else ()
    planned = _planned(expected, names)
    built = resolve(scenario, workload=planned)
    sizes = {hosted.block_tokens for hosted in built.experiment.hosted}
    size = ID_TOKENS if all(ID_TOKENS % each == 0 or each % ID_TOKENS == 0 for each in sizes) else min(sizes)
    workload = live_trace(names, size)
    limits = {hosted.model: hosted.max_model_len for hosted in built.experiment.hosted}
    if not (expected.output_tokens > 0).any():
        raise ScenarioError(
            f"{scenario.source}: workload: its requests emit no tokens, and an endpoint answers with tokens"
        )
    manifest = built.manifest
    manifest["notes"] = [*manifest["notes"], *_notes(scenario, built)]
    if several:
        called = {model["serves"]: model["name"] for pool in manifest["pools"].values() for model in pool["models"]}
        shown = tuple(called.get(name, name) if "#" not in name else name for name in hosted)
    else:
        shown = (manifest["model"]["name"],)
    return Setup(
        scenario=scenario,
        built=replace(built, experiment=replace(built.experiment, workload=workload)),
        models=shown,
        limits=tuple(limits.get(row, limits.get(None)) for row in range(len(shown))),
        lengths=np.maximum(expected.output_tokens[expected.output_tokens > 0], 1),
        chosen={} if several else _chosen(scenario, planned),
    )


def _check(scenario: Scenario) -> None:
    """ScenarioError for what cannot be said of requests that clients send."""
    if scenario.classes:
        raise ScenarioError(
            f"{scenario.source}: classes: a request that a client sends says no class of service; leave classes out, and give "
            "requests a priority"
        )
    if scenario.structured_output is not None:
        raise ScenarioError(
            f"{scenario.source}: structured_output: clients say themselves which answers keep to a grammar, and the endpoint does "
            "not constrain any; leave structured_output out"
        )
    if scenario.encode is not None:
        raise ScenarioError(
            f"{scenario.source}: encode: clients send text, and nobody says what there is to encode; leave encode out"
        )
    if scenario.adapters is not None:
        raise ScenarioError(
            f"{scenario.source}: adapters: requests of clients ask for no adapter yet; leave adapters out"
        )
    if scenario.workload.predictor is not None:
        raise ScenarioError(
            f"{scenario.source}: workload.predictor: nobody guesses how long the answers to clients' requests will be; leave it out"
        )
    for at, settings in (
        (None, scenario.autoscale),
        *((pool, each.autoscale) for pool, each in (scenario.pools or {}).items()),
    ):
        if settings is not None and settings.policy.policy == "perfect":
            where = "autoscale" if at is None else f"pools.{at}.autoscale"
            raise ScenarioError(
                f"{scenario.source}: {where}.policy: perfect knows when requests come, and nobody knows when clients send them; "
                "choose another policy"
            )


def _notes(scenario: Scenario, built: Built) -> list[str]:
    """A note for each thing that differs where requests come one by one."""
    knows = knowledge_of(built.experiment.router)
    if knows is None or knows.sent is not None or not knows.prefixes or not knows.event_delay_s:
        return []
    return [
        f"The router hears of what machines have cached {knows.event_delay_s:g} s late, and of a request only when it has come: it "
        "is told what they had when it came where that is later. A replay, which knows requests beforehand, may route otherwise."
    ]


def _chosen(scenario: Scenario, planned: Any) -> dict[str, int]:
    """Settings of the scheduler that are chosen by the lengths that are planned for, by dotted key."""
    if not left_to_choose(scenario):
        return {}
    return {key: tokens for key, (tokens, _) in chosen_by_auto(scenario, deployment_of(scenario), planned).items()}


def _planned(expected: Workload, names: tuple[str, ...]) -> Workload:
    """The scenario's own requests as far as a deployment is planned for them: their lengths, in turn for each model."""
    n = len(expected)
    if expected.models or not names:
        return expected
    return Trace(
        arrival_ns=np.arange(n),
        prompt_tokens=expected.prompt_tokens,
        output_tokens=expected.output_tokens,
        models=names,
        model_index=np.arange(n) % len(names) if names else None,
        source=expected.source,
    )


def names_of(setup: Setup, given: Sequence[str]) -> list[list[str]]:
    """Each model's own name and those that are *given*, NAME or NAME=MODEL; ScenarioError where they clash."""
    found = [[name] for name in setup.models]
    for text in given:
        name, equals, model = text.partition("=")
        if not name or (equals and model not in setup.models) or (not equals and len(found) > 1):
            raise ScenarioError(
                f"--model-name {text!r}: expected NAME, or NAME=MODEL with one of {', '.join(setup.models)}"
            )
        row = setup.models.index(model) if equals else 0
        if any(name in names for i, names in enumerate(found) if i != row):
            raise ScenarioError(f"--model-name {text!r}: another model goes by that name")
        if name not in found[row]:
            found[row].append(name)
    return found
