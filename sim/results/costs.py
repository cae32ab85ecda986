"""Device-hours, money, energy and carbon of a run: functions of what its machines did and of what their devices cost and draw.

Energy is of the devices alone, times `pue`: idle power while nothing runs, and otherwise by the bandwidth and arithmetic that
each iteration reaches (`hwmodels.power`), with 90 % intervals: of the power (`joule`, `mean_w`: for the time that the run takes
here) and of energy per output token, where the speed of measured runs differs too. `tdp_joule` is every device at its limit, its
TDP or the lower one that was set, for the whole run, the upper bound.

Money is device-hours times price, and `price_basis` says whose price and of when.
`usd_per_m_output` puts all of it on the answers. Divided between prompts and answers
(`usd_per_m_input`, of computed prompt tokens, and `usd_per_m_generated`) it follows the time that each would take on a roofline of
its own (`prompt_share`); idle time is divided alike. Prompt tokens found in a cache are not computed and cost no more than
the memory that holds them: `usd_per_m_cached` is 0.

Of classes of service each has its part of what prompts and of what answers cost, by its tokens, and for the share of the time that
attention takes by the tokens that these had to attend to (`classes`); the parts add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hwmodels.power import PowerModel, basis_of, power_model
from sim.metrics import Columns, last_iteration_end_ns, span_ns
from sim.metrics.columns import FloatArray, IntArray
from sim.metrics.fleet import OFF, seconds_by_state

_J_PER_KWH = 3.6e6
HOURS_A_MONTH = 730
_DEVICES = ("tensor", "pipeline", "data")
"""Degrees of parallelism whose product is the devices of a machine."""


def costs_of(columns: Columns, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The costs of a whole run; None for an experiment made by hand, and for models that are tables of latencies, of unknown work.

    The scenario's `costs` says what is other than in the catalogue. `usd_per_hour` is the mean over the run of what its machines
    cost while they are not off, and `usd_per_month` that for 730 hours.
    """
    meta, requests = columns.meta, columns.requests
    machines = machines_of(manifest, meta.get("fleet"))
    shares, busy, part = (meta.get(name) for name in ("power_share_s", "busy_s", "prompt_share"))
    if not machines or shares is None or busy is None or len(shares) != len(machines):
        return None
    asked = manifest.get("scenario", {}).get("costs") or {}
    answered = requests["first_token_ns"] >= 0
    computed = requests["computed_prompt_tokens"] if "computed_prompt_tokens" in requests else requests["prompt_tokens"]
    prompt, output = int(computed[answered].sum()), int(requests["emitted_tokens"].sum())
    begin_ns, end_ns = span_ns(requests, last_iteration_end_ns(columns))
    paid_s = _paid_s(meta, begin_ns, end_ns, len(machines))
    span_s = (end_ns - begin_ns) * 1e-9
    prices = _prices(machines)
    usd = None if prices is None else sum(price * s / 3600 for price, s in zip(prices, paid_s, strict=True))
    usd_per_hour = None
    if prices is not None and span_s > 0:
        usd_per_hour = sum(price * (s / span_s) for price, s in zip(prices, paid_s, strict=True))
    energy = _energy(machines, shares, busy, paid_s, asked.get("pue", 1.0), output, span_s)
    carbon = asked.get("carbon_g_per_kwh")
    return {
        "device_hours": sum(n * each for (n, _), each in zip(machines, paid_s, strict=True)) / 3600,
        "usd": usd,
        "usd_per_hour": usd_per_hour,
        "usd_per_month": None if usd_per_hour is None else usd_per_hour * HOURS_A_MONTH,
        "price_basis": price_basis(facts for _, facts in machines),
        "usd_per_m_output": _per_million(usd, 1.0, output),
        "usd_per_m_input": _per_million(usd, part, prompt),
        "usd_per_m_generated": _per_million(usd, None if part is None else 1 - part, output),
        "usd_per_m_cached": None if usd is None else 0.0,
        "prompt_share": part,
        **_by_class(columns, manifest, usd),
        **energy,
        "carbon_g": None if carbon is None else energy["joule"] / _J_PER_KWH * carbon,
    }


def _by_class(columns: Columns, manifest: Mapping[str, Any], usd: float | None) -> dict[str, Any]:
    """`classes` of a run of one model with classes: what each costs. Empty where there are none, no price is known, or several
    models take part, whose tokens cost differently."""
    meta, requests = columns.meta, columns.requests
    names = [each["name"] for each in manifest.get("classes", ())]
    part = meta.get("prompt_share")
    if not names or usd is None or part is None or len(manifest.get("models", ())) > 1:
        return {}
    of_class, n = requests["class_index"], len(names)
    answered = requests["first_token_ns"] >= 0
    prompts = requests["prompt_tokens"] * answered
    computed = requests.get("computed_prompt_tokens", requests["prompt_tokens"]) * answered
    emitted = requests["emitted_tokens"]
    attended = computed * (prompts - computed) + computed * (computed + 1) // 2
    read = emitted * requests["prompt_tokens"] + emitted * (emitted - 1) // 2

    def by_class(each: IntArray) -> FloatArray:
        return np.bincount(of_class, weights=each, minlength=n).astype(float)

    of_input = part * usd * _shares(by_class(computed), by_class(attended), meta["prompt_attention_share"])
    of_output = (1 - part) * usd * _shares(by_class(emitted), by_class(read), meta["decode_kv_share"])
    tokens = zip(
        *(by_class(each).astype(int).tolist() for each in (computed, prompts - computed, emitted)), strict=True
    )
    return {
        "classes": {
            name: {
                "usd": paid_in + paid_out,
                "usd_input": paid_in,
                "usd_generated": paid_out,
                "input_tokens": into,
                "cached_tokens": cached,
                "output_tokens": out,
                "usd_per_m_output": _per_million(paid_in + paid_out, 1.0, out),
                "usd_per_m_input": _per_million(paid_in, 1.0, into),
                "usd_per_m_generated": _per_million(paid_out, 1.0, out),
                "usd_per_m_cached": 0.0,
            }
            for name, paid_in, paid_out, (into, cached, out) in zip(
                names, of_input.tolist(), of_output.tolist(), tokens, strict=True
            )
        }
    }


def _shares(tokens: FloatArray, attended: FloatArray, part: float) -> FloatArray:
    """The share of each class in a cost, *part* of which goes by what was attended to and the rest by tokens; none of a cost that
    nobody caused. They add up to 1."""
    if not tokens.sum():
        return np.zeros_like(tokens)
    by_tokens = tokens / tokens.sum()
    return (1 - part) * by_tokens + part * (attended / attended.sum() if attended.sum() else by_tokens)


def machines_of(manifest: Mapping[str, Any], fleet: Mapping[str, Any] | None) -> list[tuple[int, Mapping[str, Any]]]:
    """Devices of each machine, and what the manifest says of them; machines that only encode, behind the others, are left out."""
    indices = (
        [] if fleet is None else [i for i, role in zip(fleet["pools"], fleet["roles"], strict=True) if role != "encode"]
    )
    if "pools" in manifest:
        pools = {name: (pool["gpus"] // pool["replicas"], pool["hardware"]) for name, pool in manifest["pools"].items()}
        of_each = [name for name, pool in manifest["pools"].items() for _ in range(pool["replicas"])]
        if fleet is not None:
            of_each = [fleet["names"][index] for index in indices]
        return [pools[name] for name in of_each]
    if "hardware" not in manifest or "scenario" not in manifest:
        return []
    scenario = manifest["scenario"]
    one = (math.prod(scenario["parallel"][name] for name in _DEVICES), manifest["hardware"])
    return [one] * (scenario["replicas"] if fleet is None else len(indices))


def _paid_s(meta: Mapping[str, Any], begin_ns: int, end_ns: int, n: int) -> list[float]:
    """Seconds of each machine that are paid for: the whole run, or all but the time for which it is off."""
    if meta.get("fleet") is None:
        return [(end_ns - begin_ns) * 1e-9] * n
    by_state = seconds_by_state(meta["fleet"], begin_ns, end_ns)
    return (by_state.sum(axis=1) - by_state[:, OFF]).tolist()[:n]


def usd_per_machine_hour(columns: Columns, manifest: Mapping[str, Any]) -> list[float] | None:
    """The price of each machine while it is not off; None where the price of one is not known."""
    return _prices(machines_of(manifest, columns.meta.get("fleet"))) or None


def _prices(machines: Sequence[tuple[int, Mapping[str, Any]]]) -> list[float] | None:
    """US dollars an hour of each machine; None where one is not known."""
    prices = [(n, facts["price_usd_per_hour"]) for n, facts in machines]
    return None if any(each is None for _, each in prices) else [n * each for n, each in prices]


def price_basis(facts: Iterable[Mapping[str, Any]]) -> str:
    """Where the prices of devices are from, by what the manifest says of each; empty where none is known."""
    sources = [f"{each['name']}: {source}" for each in facts if (source := each["sources"].get("price_usd_per_hour"))]
    return "; ".join(dict.fromkeys(sources))


def powers_of(manifest: Mapping[str, Any], fleet: Mapping[str, Any] | None) -> list[PowerModel]:
    """The power model of each machine of a run; empty for an experiment made by hand. *fleet*: where machines come and go."""
    return [power_of(facts) for _, facts in machines_of(manifest, fleet)]


def power_of(facts: Mapping[str, Any]) -> PowerModel:
    """The power model of devices by what a manifest says of them."""
    model = power_model(facts["name"])
    limit_w = facts.get("power_limit_w")
    return model if limit_w is None else model.limited(limit_w, facts["tdp_w"])


def _energy(
    machines: Sequence[tuple[int, Mapping[str, Any]]],
    shares: Sequence[float],
    busy: Sequence[float],
    paid_s: Sequence[float],
    pue: float,
    output: int,
    span_s: float,
) -> dict[str, Any]:
    joule = low = high = limit = token_low = token_high = 0.0
    for (n, facts), share_s, busy_s, there_s in zip(machines, shares, busy, paid_s, strict=True):
        model = power_of(facts)
        tdp_w = n * facts["tdp_w"] * pue
        mine, most = (
            tdp_w * (share_s + model.idle * max(0.0, there_s - busy_s)),
            tdp_w * model.most * max(there_s, busy_s),
        )
        joule, limit = joule + mine, limit + most
        low, high = low + mine * model.watt[0], high + min(mine * model.watt[1], most)
        token_low, token_high = token_low + mine * model.joule[0], token_high + mine * model.joule[1]
    found: dict[str, Any] = {"joule": joule, "joule_low": low, "joule_high": high, "tdp_joule": limit}
    three = ("", "_low", "_high")
    for name, values, over in (
        ("joule_per_output_token", (joule, token_low, token_high), output),
        ("mean_w", (joule, low, high), span_s),
    ):
        found |= {f"{name}{end}": value / over if over > 0 else None for end, value in zip(three, values, strict=True)}
    return {**found, "power_basis": basis_of(facts["name"] for _, facts in machines)}


def _per_million(usd: float | None, part: float | None, tokens: int) -> float | None:
    return None if usd is None or part is None or not tokens else usd * part / tokens * 1e6
