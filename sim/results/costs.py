"""Device-hours, money, energy and carbon of a run: functions of what its machines did and of what their devices cost and draw.

Energy is of the devices alone, times `pue`: idle power while nothing runs, and otherwise by the bandwidth and arithmetic that each
iteration reaches (`hwmodels.power`), with a 90 % interval; `tdp_joule` is every device at its limit for the whole run, the upper
bound. Where machines come and go each counts for the time for which it was there: starting, serving, or failed.

Money is device-hours times price. `usd_per_m_output` puts all of it on the answers. Divided between prompts and answers
(`usd_per_m_input`, of computed prompt tokens, and `usd_per_m_generated`) it follows the time that each would take on a roofline of
its own (`prompt_share`); idle time is divided alike. Prompt tokens found in a cache are not computed and cost no more than
the memory that holds them: `usd_per_m_cached` is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sim.metrics import Columns, paid_s

_J_PER_KWH = 3.6e6
_DEVICES = ("tensor", "pipeline", "data")
"""Degrees of parallelism whose product is the devices of a machine."""


def costs_of(columns: Columns, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a whole run costs; None for an experiment made by hand, and for models that are tables of latencies, of unknown work.

    The scenario's `costs` says what is other than in the catalogue.
    """
    machines = _machines(manifest)
    meta, requests = columns.meta, columns.requests
    shares, busy, part = (meta.get(name) for name in ("power_share_s", "busy_s", "prompt_share"))
    if not machines or shares is None or busy is None or len(shares) != len(machines):
        return None
    asked = manifest.get("scenario", {}).get("costs") or {}
    answered = requests["first_token_ns"] >= 0
    computed = requests["computed_prompt_tokens"] if "computed_prompt_tokens" in requests else requests["prompt_tokens"]
    prompt, output = int(computed[answered].sum()), int(requests["emitted_tokens"].sum())
    span_s = max(0, int(requests["finish_ns"].max()) - int(requests["arrival_ns"].min())) * 1e-9
    begin = int(requests["arrival_ns"].min())
    paid = paid_s(meta, begin, begin + round(span_s * 1e9))
    there_s = [span_s] * len(machines) if paid is None else paid.tolist()
    usd = _usd(machines, asked.get("usd_per_device_hour"), there_s)
    energy = _energy(machines, shares, busy, there_s, asked.get("pue", 1.0))
    carbon = asked.get("carbon_g_per_kwh")
    return {
        "device_hours": sum(n for n, _ in machines) * span_s / 3600
        if paid is None
        else sum(n * each_s / 3600 for (n, _), each_s in zip(machines, there_s, strict=True)),
        "usd": usd,
        "usd_per_m_output": _per_million(usd, 1.0, output),
        "usd_per_m_input": _per_million(usd, part, prompt),
        "usd_per_m_generated": _per_million(usd, None if part is None else 1 - part, output),
        "usd_per_m_cached": None if usd is None else 0.0,
        "prompt_share": part,
        **energy,
        "joule_per_output_token": energy["joule"] / output if output else None,
        "mean_w": energy["joule"] / span_s if span_s else None,
        "carbon_g": None if carbon is None else energy["joule"] / _J_PER_KWH * carbon,
    }


def _machines(manifest: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Devices of each machine, and what the manifest says of them."""
    if "pools" in manifest:
        pools = manifest["pools"].values()
        return [(pool["gpus"] // pool["replicas"], pool["hardware"]) for pool in pools for _ in range(pool["replicas"])]
    if "hardware" not in manifest or "scenario" not in manifest:
        return []
    scenario = manifest["scenario"]
    scaled = scenario.get("autoscale")
    replicas = scenario["replicas"] if scaled is None else scaled["max"]
    return [(math.prod(scenario["parallel"][name] for name in _DEVICES), manifest["hardware"])] * replicas


def _usd(
    machines: Sequence[tuple[int, Mapping[str, Any]]], price: float | None, there_s: Sequence[float]
) -> float | None:
    prices = [facts["price_usd_per_hour"] if price is None else price for _, facts in machines]
    if any(each is None for each in prices):
        return None
    return sum(n * each_s / 3600 * each for (n, _), each, each_s in zip(machines, prices, there_s, strict=True))


def _energy(
    machines: Sequence[tuple[int, Mapping[str, Any]]],
    shares: Sequence[float],
    busy: Sequence[float],
    there_s: Sequence[float],
    pue: float,
) -> dict[str, Any]:
    from hwmodels.power import power_model

    joule = low = high = limit = 0.0
    bases: dict[str, None] = {}
    for (n, facts), share_s, busy_s, span_s in zip(machines, shares, busy, there_s, strict=True):
        model = power_model(facts["name"])
        bases[model.basis] = None
        full, idle_s = n * facts["tdp_w"] * pue, model.idle * max(0.0, span_s - busy_s)
        joule += full * (share_s + idle_s)
        low += full * share_s * model.low
        high += full * min(share_s * model.high + idle_s, span_s)
        limit += full * span_s
    return {"joule": joule, "joule_low": low, "joule_high": high, "tdp_joule": limit, "power_basis": "; ".join(bases)}


def _per_million(usd: float | None, part: float | None, tokens: int) -> float | None:
    return None if usd is None or part is None or not tokens else usd * part / tokens * 1e6
