"""Statements of a summary about how far its figures can be trusted: intervals, what prices come from, memory, what a protocol
reports.

They are derived once, from the manifest and the other figures, for everything that shows or writes a summary.

`intervals` has `level` (the share of measured means that intervals hold), `basis` (whose errors they are from) and `figures`: by
the dotted name of a figure its `low` and `high`. They are those of `hwmodels.serving_intervals`, or of replays (`--intervals`),
which have more figures and more about each; where there are none, `why_not` says why in a sentence. TPOT's `low` is no less than
the reading of the weights takes. `waiting_share` is there where most of TTFT is waiting for a seat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwmodels.memory import cache_text, parts_text
from sim.text import is_share, seconds_text

LEVEL = 0.9
REPLAYED = "replayed_intervals"
"""Where a manifest has the intervals of replays."""
_MEANS = ("ttft_s", "tpot_s")
_MOSTLY = 0.5
"""The share of the mean TTFT from which a queue makes it: the runs that were held back have none that grows by itself."""


def trusted(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The parts `intervals`, `trust` and `memory` of a summary; of an experiment made by hand the first alone."""
    found = {"intervals": _intervals(manifest, summary)}
    for key in ("trust", "memory"):
        if key in manifest:
            found[key] = {name: value for name, value in manifest[key].items() if name != "why_not"}
        elif "pools" in manifest:
            found[key] = {
                whose: {name: value for name, value in model[key].items() if name != "why_not"}
                for whose, model in _models(manifest["pools"])
            }
    return found


def _models(pools: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The models of each pool, named for the pool where it has one."""
    for name, pool in pools.items():
        for model in pool["models"]:
            yield f"{name}/{model['serves']}" if len(pool["models"]) > 1 else name, model


def _intervals(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    if REPLAYED in manifest:
        return dict(manifest[REPLAYED])
    factors = manifest.get("interval")
    if factors is None:
        return {"why_not": _why_not(manifest)}
    if summary["saturated"]:
        return {"why_not": "the run is saturated, and the runs that were held back are not"}
    figures = {}
    for name in _MEANS:
        mean = summary[name]["mean"]
        if mean is not None:
            low, high = factors[name]
            # Nothing is measured faster than the datasheet allows.
            floor = min(mean, factors.get("tpot_floor_s", 0.0)) if name == "tpot_s" else 0.0
            figures[f"{name}.mean"] = {"low": max(mean * low, floor), "high": mean * high}
    if not figures:
        return {"why_not": "no request has a TTFT"}
    return {"level": LEVEL, "basis": factors["basis"], "figures": figures, **_waiting(manifest, summary)}


def _waiting(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, float]:
    """`waiting_share` of the mean TTFT, where requests come at a rate of their own and most of it is waiting for a seat, not for
    the front end."""
    waited, mean = summary["queue_s"]["mean"], summary["ttft_s"]["mean"]
    terms = manifest.get("hardware", {}).get("serving_stack", {}).get("terms", {})
    if manifest.get("workload", {}).get("closed_loop", True) or not mean or not terms:
        return {}
    front_end_s = terms.get("admission_s", 0.0) + terms.get("admission_serial_s", 0.0)
    share = max(0.0, waited - front_end_s) / mean
    return {"waiting_share": share} if share >= _MOSTLY else {}


def _why_not(manifest: Mapping[str, Any]) -> str:
    for whose in (manifest, *(model for _, model in _models(manifest.get("pools", {})))):
        if "why_not" in whose.get("trust", {}):
            return whose["trust"]["why_not"]
    return "nothing is said of the deployment"


def interval_text(intervals: Mapping[str, Any]) -> str:
    """Intervals of means for people: 'mean TPOT 5.4 ms to 14 ms, TTFT 54 ms to 143 ms (90 % interval), by the errors on ...'."""
    if "why_not" in intervals:
        return f"no interval: {intervals['why_not']}"
    means = {name: intervals["figures"].get(f"{name}.mean") for name in _MEANS}
    texts = [
        f"{name.removesuffix('_s').upper()} {seconds_text(each['low'])} to {seconds_text(each['high'])}"
        for name, each in means.items()
        if each is not None
    ]
    basis = f"{'from' if 'replays' in intervals else 'by the errors on'} {intervals['basis']}"
    text = f"mean {', '.join(texts) or 'of nothing'} ({100 * intervals['level']:.0f} % interval), {basis}"
    if (share := intervals.get("waiting_share")) is not None:
        text += (
            f"; {share:.0%} of TTFT is waiting, near saturation, where a server a few per cent slower answers several times as "
            "late: the interval of TTFT does not hold that, --intervals N replays it"
        )
    return text


INTERVAL_HEADS = ("middle", "model and simulation", "simulation alone")


def interval_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Figures with the intervals of replays for a table under `INTERVAL_HEADS`; none without replays (`--intervals`)."""
    intervals = summary.get("intervals", {})
    if "replays" not in intervals:
        return []
    return [
        (
            name,
            figure_text(name, each["middle"]),
            f"{figure_text(name, each['low'])} to {figure_text(name, each['high'])}",
            f"{figure_text(name, each['simulation_low'])} to {figure_text(name, each['simulation_high'])}",
        )
        for name, each in intervals["figures"].items()
    ]


def figure_text(name: str, value: float) -> str:
    """A figure of a summary for people, by its dotted name."""
    if name.split(".")[0].endswith("_s") and "per_s" not in name:
        return seconds_text(value)
    if is_share(name):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _replay_rows(intervals: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "replays" not in intervals:
        return []
    replays = intervals["replays"]
    rows = [
        ("", f"{replays} replays, and {intervals['simulations']} more seeds for the simulation's own"),
        *level_facts(replays),
    ]
    if intervals["saturated_replays"]:
        rows.append(("Saturated", f"{intervals['saturated_replays']} of {replays} replays"))
    return rows


def level_facts(replays: int) -> list[tuple[str, str]]:
    """A row that says what so few *replays* hold; none where they are enough."""
    held = (replays - 1) / (replays + 1)
    if held >= LEVEL:
        return []
    return [("Too few", f"the farthest of {replays} replays hold {held:.0%} on average; 90 % take 19 of them or more")]


def trust_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows for people: within what the means would be measured, where the prices come from, and the memory, to lay beside the log
    of an engine; those that the summary of an older run has."""
    rows = []
    if "reported" in summary:
        texts = (
            "-" if (value := summary["reported"][name]) is None else seconds_text(value)
            for name in ("ttft_s", "tpot_s")
        )
        rows.append(("As the protocol reports", "TTFT {}, TPOT {}".format(*texts)))
    if "intervals" in summary:
        rows += [("Expect to measure", interval_text(summary["intervals"])), *_replay_rows(summary["intervals"])]
    for whose, found in _by_pool(summary.get("trust"), "tier"):
        rows.append((f"Trust{whose}", trust_text(found)))
    for whose, found in _by_pool(summary.get("memory"), "blocks"):
        rows += [(f"KV cache{whose}", cache_text(found)), (f"Memory{whose}", parts_text(found))]
    return rows


def trust_text(trust: Mapping[str, Any]) -> str:
    """The sources of the prices, for people."""
    text = f"{trust['tier']}; kernels {trust['kernels']}"
    if "measured_kernels" in trust:
        text += f" ({trust['measured_kernels']} sets of the device, {trust['borrowed_kernels']} lent)"
    if "stack" in trust:
        of = (
            f" from release {trust['stack_release']}, fitted to {trust['stack_fitted_to']}"
            if "stack_release" in trust
            else ""
        )
        text += f"; overheads of {trust['stack']}{of}"
    return text


def _by_pool(found: Mapping[str, Any] | None, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The text about the deployment, or about each pool with its name before it."""
    if not found:
        return
    if key in found:
        yield "", found
        return
    for name, each in found.items():
        yield f" of {name}", each
