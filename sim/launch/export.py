"""From what was simulated to the commands, or the manifest, that start it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.errors import OutputError, RooftraceError
from sim.launch.arguments import ENGINES
from sim.launch.chosen import Chosen, Export
from sim.launch.dynamo import manifest
from sim.launch.forced import forced_rates
from sim.launch.kubernetes import kserve, kubernetes, llm_d
from sim.launch.writers import commands, of_the_whole
from sim.results import Result
from sim.results.trust import trust_rows
from sim.scenario import Scenario
from sim.scenario.tiers import Tier
from sim.text import unknown

_MANIFESTS = {"dynamo": manifest, "kubernetes": kubernetes, "llm-d": llm_d, "kserve": kserve}
TARGETS = (*ENGINES, *_MANIFESTS)


def recommended(folder: Path) -> Chosen:
    """The scenario of a run's folder, or the best candidate of that of `rooftrace optimize --out`; or the scenario of a file.

    OutputError where it holds neither; RooftraceError where no candidate keeps the SLO, ScenarioError for a file that is none.
    """
    if folder.is_file():
        return Chosen(scenario=Scenario.load(folder), reasons=(f"from {folder.name}, not simulated",))
    if (folder / "ranked.csv").is_file():
        return _best_candidate(folder)

    result = Result.load(folder)
    scenario = Scenario.from_mapping(_given(result.manifest["scenario"]), source=str(folder))
    return Chosen(scenario=scenario, reasons=_figures(result.summary))


def _figures(summary: Mapping[str, Any]) -> tuple[str, ...]:
    found = [f"{summary['output_tokens_per_s']:,.0f} output tokens/s, {summary['requests_per_s']:.3g} requests/s"]
    for name, scale, unit in (("ttft_s", 1.0, "s"), ("tpot_s", 1e3, "ms")):
        spread = summary.get(name) or {}
        if spread.get("p50") is not None:
            found.append(
                f"{name[:-2].upper()} median {spread['p50'] * scale:.3g} {unit}, p99 {spread['p99'] * scale:.3g} {unit}"
            )
    if summary.get("slo_attainment") is not None:
        found.append(f"{summary['slo_attainment']:.1%} of the requests within the SLO")
    return (*found, *(f"{name}: {text}" for name, text in trust_rows(summary)))


def _best_candidate(folder: Path) -> Chosen:
    import pandas as pd

    manifest_file = folder / "manifest.json"
    if not manifest_file.is_file():
        raise OutputError(
            f"{folder} has ranked.csv and no manifest.json; give the folder that rooftrace optimize wrote"
        )
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    axes = list(manifest["axes"])
    table = pd.read_csv(folder / "ranked.csv")
    kept = table[table["keeps"]]
    if kept.empty:
        raise RooftraceError(
            f"none of the {len(table)} candidates in {folder} keeps the SLO; there is nothing to start"
        )
    best = kept.iloc[0]
    scenario = Scenario.from_mapping(_given(manifest["base"]), source=str(folder))
    scenario = scenario.with_set(*(f"{key}={best[key]}" for key in axes))
    reasons = [
        f"best of {len(table)} candidates, {len(kept)} of which keep the SLO: "
        + ", ".join(f"{key}={best[key]}" for key in axes)
    ]
    # Of limits of means and percentiles alone there is no share of requests.
    share = (
        "the limits of the SLO kept"
        if pd.isna(best["slo_attainment"])
        else f"{best['slo_attainment']:.1%} within the SLO"
    )
    reasons.append(f"{best['tokens_per_s_per_gpu']:,.0f} output tokens/s a GPU, {share}")
    reasons += [
        f"{scale * best[column]:,.3g} {unit}"
        for column, scale, unit in _PRICES
        if column in best and pd.notna(best[column])
    ]
    if len(kept) > 1:
        second = kept.iloc[1]
        reasons.append(
            "next: "
            + ", ".join(f"{key}={second[key]}" for key in axes)
            + f" with {second['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU"
        )
    return Chosen(scenario=scenario, reasons=tuple(reasons))


_PRICES = (
    ("usd_per_mtoken", 1.0, "$ per million output tokens"),
    ("joule_per_mtoken", 1e-6, "J per output token"),
    ("gpus", 1.0, "GPUs"),
)
"""Columns of candidates that goals go by, and their units."""


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that are not set, which were defaults; of tiers those that they do not have are not."""
    found: dict[str, Any] = {
        key: _given(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value is not None
    }
    if found.get("tiers"):
        found["tiers"] = [_changed(tier) for tier in found["tiers"]]
    return found


def _changed(tier: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: field.default for name, field in Tier.model_fields.items()}
    return {key: value for key, value in tier.items() if value != defaults[key]}


def export(chosen: Chosen, target: str, *, forced_acceptance: bool = False) -> Export:
    """Commands that start *chosen* with *target*, one a kind of machine, the reasons as comments above them.

    *forced_acceptance*: for benchmarks, servers are made to accept drafts as the scenario says, whatever their texts become.
    """
    if target not in TARGETS:
        raise RooftraceError(unknown(f"--for {target} is not known", target, list(TARGETS)))
    scenario = chosen.scenario
    if target in _MANIFESTS:
        if forced_acceptance:
            raise RooftraceError(
                f"--forced-acceptance is of commands (--for {', '.join(ENGINES)}); {target} writes a manifest"
            )
        return _MANIFESTS[target](chosen)
    lines = [
        f"# {scenario.model} on {scenario.device_name}, as simulated:" if not scenario.pools else "# as simulated:"
    ]
    lines += [f"#   {reason}" for reason in chosen.reasons]
    left = list(of_the_whole(scenario))
    written = list(commands(scenario, target, forced_acceptance=forced_acceptance))
    if forced_acceptance and all(forced_rates(command) is None for _, command in written):
        raise RooftraceError("--forced-acceptance: the scenario drafts nothing; leave it out")
    for name, command in written:
        part = command.scenario
        times = f": start this {part.replicas} times" if part.replicas > 1 or name else ""
        router = f", behind a router ({scenario.router.policy})" if scenario.pools or part.replicas > 1 else ""
        if name:
            lines.append(f"# pool {name}, {part.model} on {part.device_name}, role {command.role}{times}{router}")
        elif times:
            lines.append(f"# {times[2:]}{router}")
        lines.append(command.text())
        left += [f"pool {name}: {text}" if name else text for text in command.left_out()]
    return Export(text="\n".join(lines) + "\n", left_out=tuple(dict.fromkeys(left)))
