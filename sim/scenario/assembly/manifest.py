"""The facts that the results of an experiment keep about its origin."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import Deployment
from hwmodels.serving_intervals import has_rows, kind_of, serving_interval
from hwmodels.steps.cost import StepTimes
from sim.build import engine_build, installed
from sim.engine import Experiment
from sim.scenario import named
from sim.scenario.assembly.handover import facts_of, notes_of_handover
from sim.scenario.assembly.notes import notes_of
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prices import price_of
from sim.scenario.assembly.ranks import ranks_of
from sim.scenario.assembly.replica import Hosted
from sim.scenario.settings import Scenario


def manifest_of(
    scenario: Scenario, pools: list[PoolOf], built: list[list[Hosted]], experiment: Experiment
) -> dict[str, Any]:
    """The manifest of a run, without what only the run itself can say."""
    workload = experiment.workload
    plain = scenario.pools is None and scenario.placement is None
    router = named.shown_policy(experiment.router)
    if plain:
        facts = _facts(pools[0], built[0], 0)
        decoding = facts.pop("decoding")
        facts |= {"router": router, "decoding": decoding}
    else:
        names = dict.fromkeys(deployment.model.name for pool in pools for deployment in pool.deployments)
        models = list(workload.models or names)
        facts = {"models": models, "pools": _pool_facts(pools, built), "router": router}
        if len(built) == len(built[0]) == 1:
            only = pools[0].deployments[0]
            found = _trust(only, built[0][0], only.provenance)
            facts |= {"interval": found["interval"]} if "interval" in found else {}
        facts |= facts_of(scenario, pools, experiment.handover)
    chosen = {
        f"{pool.prefix(i)}{key}": {"tokens": tokens, "why": why}
        for pool, hosted in zip(pools, built, strict=True)
        for i, each in enumerate(hosted)
        for key, (tokens, why) in each.chosen.items()
    }
    return {
        "label": _label(pools, built, plain),
        "hash": scenario.hash,
        "seed": scenario.seed,
        "scenario": scenario.resolved(),
        **facts,
        "workload": {
            "source": workload.source,
            "requests": len(workload),
            "closed_loop": workload.planned_ns is None,
        },
        "notes": notes_of(
            scenario,
            pools,
            [hosted.spec.scheduler for pool in built for hosted in pool],
            [hosted.plan for pool in built for hosted in pool],
            workload,
            experiment.router,
        )
        + list(dict.fromkeys(note for pool in built for each in pool if each.decoding for note in each.decoding.notes))
        + notes_of_handover(scenario, pools, experiment.handover),
        "versions": versions(),
        **({"auto": chosen} if chosen else {}),
    }


_SEVERAL = "of several pools, or models, together no run was held back"


def _label(pools: list[PoolOf], built: list[list[Hosted]], plain: bool) -> str:
    """Models, devices, schedulers and decoding methods in one line."""
    parts = []
    for pool in pools:
        models = " and ".join(_name(pool, i, plain) for i in range(len(pool.serves)))
        parts.append(f"{models} on {_gpus(pool)} x {pool.deployments[0].device.name}")
    schedulers = dict.fromkeys(pool.scenarios[0].scheduler.policy for pool in pools)
    methods = dict.fromkeys(
        each.decoding.decoding.method for hosted in built for each in hosted if each.decoding is not None
    )
    return " + ".join(parts) + f", {'/'.join(schedulers)}" + (f", {'/'.join(methods)}" if methods else "")


def _gpus(pool: PoolOf) -> str:
    """The number of GPUs, from the fewest to the most where machines come and go."""
    if pool.autoscale is None or pool.autoscale.min == pool.autoscale.max:
        return f"{pool.gpus}"
    return f"{pool.autoscale.min * pool.scenarios[0].parallel.gpus} to {pool.gpus}"


def _name(pool: PoolOf, i: int, plain: bool) -> str:
    name = pool.deployments[i].model.name
    tag = "" if plain else pool.serves[i].partition("#")[2]
    return f"{name}#{tag}" if tag else name


def _pool_facts(pools: list[PoolOf], built: list[list[Hosted]]) -> dict[str, Any]:
    """The manifest's facts about each pool; `rows` are the values of the column `replica` that are its own."""
    found, first = {}, 0
    alone = len(built) == len(built[0]) == 1
    for pool, hosted in zip(pools, built, strict=True):
        facts = [_facts(pool, hosted, i) for i in range(len(hosted))]
        last = first + pool.replicas * len(hosted) * pool.scenarios[0].parallel.data - 1
        found[pool.name] = {
            "role": pool.role,
            "replicas": pool.replicas,
            "gpus": pool.gpus,
            "rows": [first, last],
            "hardware": facts[0]["hardware"],
            "models": [
                {
                    "serves": name,
                    **each["model"],
                    **({"ranks": each["ranks"]} if "ranks" in each else {}),
                    "memory": each["memory"],
                    "trust": each["trust"] if alone else {**each["trust"], "why_not": _SEVERAL},
                    "scheduler": each["scheduler"],
                    "decoding": each["decoding"],
                }
                for name, each in zip(pool.serves, facts, strict=True)
            ],
        }
        first = last + 1
    return found


def _facts(pool: PoolOf, hosted: list[Hosted], i: int) -> dict[str, Any]:
    """The manifest's facts about a model on its machines."""
    deployment, decoding = pool.deployments[i], hosted[i].decoding
    model, device, provenance = deployment.model, deployment.device, deployment.provenance
    usd_per_hour, price_source = price_of(pool.scenarios[i], device)
    limit_w = pool.scenarios[0].power_limit_w
    return {
        "model": {
            "name": model.name,
            "source": model.source,
            "params": model.params,
            "weight_bytes_per_device": deployment.weight_bytes_per_device,
            "kv_precision": deployment.kv_precision,
        },
        "hardware": {
            "name": device.name,
            "title": device.title,
            **provenance,
            "memory_bytes": device.memory_bytes,
            "hbm_bytes_per_s": device.hbm_bytes_per_s,
            "peak_flops_per_s": dict(device.peak_flops_per_s),
            "tdp_w": device.tdp_w,
            **({} if limit_w is None else {"power_limit_w": limit_w}),
            "price_usd_per_hour": usd_per_hour,
            "sources": {
                **{key: source for key, source in device.sources.items() if key != "price_usd_per_hour"},
                **({"price_usd_per_hour": price_source} if price_source else {}),
            },
        },
        **_trust(deployment, hosted[i], provenance),
        **ranks_of(pool.scenarios[i]),
        "memory": hosted[i].plan.facts,
        "scheduler": named.shown_policy(hosted[i].spec.scheduler),
        "decoding": {"method": "autoregressive"} if decoding is None else decoding.manifest,
    }


def _trust(deployment: Deployment, hosted: Hosted, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The sources of the prices (`trust`), and factors of a 90 % interval for TPOT and TTFT where deployments were held back of the
    stack's fit; `why_not` where there are none."""
    profile = deployment.profile
    stack = provenance.get("serving_stack", {})
    priced = {"kernels": provenance.get("calibration", provenance["profile"])}
    priced |= {key: provenance[key] for key in ("measured_kernels", "borrowed_kernels") if key in provenance}
    priced |= {
        f"stack_{key}" if key != "name" else "stack": stack[key]
        for key in ("name", "release", "fitted_to")
        if key in stack
    }

    def without(tier: str, why: str) -> dict[str, Any]:
        return {"trust": {"tier": tier, **priced, "why_not": why}}

    if isinstance(deployment.made_by, StepTimes):
        return _measured_steps(deployment, deployment.made_by)
    if not isinstance(deployment.made_by, Calibrated) or profile is None:
        return without("no measurements", "no measured deployment was laid beside this cost model")
    if deployment.made_by.stack.fit:
        return without(
            "fitted to your runs",
            "the stack was fitted to runs of its own; --intervals N replays what its fit left unknown",
        )
    if hosted.decoding is not None:
        return without("nothing held back", "no run with speculative decoding was held back of the stack's fit")
    name = deployment.made_by.stack.engine
    found = serving_interval(
        name,
        deployment.model.name,
        deployment.measured_as,
        kind=profile.kind,
        loan=deployment.loan(network_alone=has_rows(name, deployment.measured_as)),
        model_kind=kind_of(deployment.model),
    )
    if found is None:
        return without(
            "nothing held back",
            f"no measured deployment was held back of serving_stack {deployment.made_by.stack.name} on {deployment.device.name}",
        )
    return {
        "interval": {**found.facts, "tpot_floor_s": deployment.least_step_s},
        "trust": {"tier": f"{found.unseen} not seen by the fit", **priced},
    }


def _measured_steps(deployment: Deployment, times: StepTimes) -> dict[str, Any]:
    """The trust in times of steps that a file has, and the interval that halves of its rows show."""
    trust, factors = {"tier": "steps as measured", "kernels": f"within steps of {times.title}"}, times.table.factors()
    if factors is None:
        return {"trust": {**trust, "why_not": f"{times.file.name} has too few steps to hold half of them back"}}
    basis = f"half of the steps in {times.file.name}, from the other half; steps with prompts and decodes are not among them"
    each = list(factors)
    return {
        "interval": {"tpot_s": each, "ttft_s": each, "basis": basis, "tpot_floor_s": deployment.least_step_s},
        "trust": trust,
    }


def versions() -> dict[str, str]:
    """Versions of Python, Rooftrace and the libraries whose numbers a result depends on, and the engine's build."""
    found = {"python": platform.python_version(), "engine": engine_build()}
    return found | {name: installed(name) for name in ("rooftrace", "numpy", "simpy", "pyarrow")}
