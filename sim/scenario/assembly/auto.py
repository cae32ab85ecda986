"""Scheduler settings that are `auto`: tokens chosen from the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hwmodels.budget import saturating_tokens, tokens_within
from sim.scenario import named
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from workloads import Workload


def chosen_by_auto(scenario: Scenario, deployment: Deployment, workload: Workload) -> dict[str, tuple[int, str]]:
    """Scheduler settings that are `auto` by their dotted keys, with the tokens chosen from the cost model and the reason."""
    found = left_to_choose(scenario)
    if not found:
        return {}

    limit_s, ranks = scenario.slo.tpot_s, deployment.parallel.data
    alike = "" if ranks == 1 else f", on each of {ranks} ranks that have as much to do"
    chosen = {}
    for key, settings in found:
        with told_by(scenario, key):
            if limit_s is None:
                tokens = saturating_tokens(deployment.cost, ranks=ranks)
                why = "fewest tokens that reach 80 % of the best throughput"
            else:
                decodes = settings.get("max_sequences", settings.get("max_num_seqs", 128))
                context = int((workload.prompt_tokens + workload.output_tokens).mean())
                tokens = tokens_within(
                    deployment.cost, tbt_s=limit_s, decodes=decodes, context_tokens=context, ranks=ranks
                )
                why = f"most tokens within slo.tpot_s {limit_s:g} s beside {decodes} decodes of {context} tokens"
            chosen[key] = (tokens, why + alike)
    return chosen


def left_to_choose(scenario: Scenario) -> list[tuple[str, Mapping[str, Any]]]:
    """Scheduler settings that are `auto`, by their dotted keys, each with all settings of its policy."""
    return [
        (f"{at}.{key}", settings)
        for at, settings in named.chain(scenario.scheduler.settings, "scheduler")
        for key in named.AUTO
        if settings.get(key) == named.AUTO_VALUE
    ]
