"""Limits of means and percentiles: what a summary has of each, and whether it is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sim.metrics.classes import LIMITS

_MAY_LACK = ("tpot_s", "itl_s")
"""Requests with one token have none of these to keep to a limit."""


def with_limits(
    summary: dict[str, Any], slo: Mapping[str, float | None] | None, classes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """*summary* with `slo`, which has `limit_s`, `value_s` and `kept` of each mean or percentile that *slo* limits, the same in the
    classes that have such limits, and `slo_kept`, whether all of them are; `request_limits` are those that requests are held to
    one by one (`slo_attainment`). The same summary without any.

    Values are of the requests that the summary's latencies are of, so that a request without a first token is in no percentile.
    """
    found = dict(summary)
    # With classes a request is held to those of its class in their place.
    if (of_requests := _of_requests(slo or {})) and not classes:
        found["request_limits"] = of_requests
    top = _held(summary, slo or {})
    if top:
        found["slo"] = top
    for each in classes:
        group = summary["classes"][each["name"]]
        own = {"request_limits": _of_requests(each["slo"]), "slo": _held(group, each["slo"])}
        if any(own.values()):
            mine = {**group, **{key: value for key, value in own.items() if value}}
            found["classes"] = {**found["classes"], each["name"]: mine}
    limits = list(limits_in(found))
    return {**found, "slo_kept": all(limit["kept"] for _, _, limit in limits)} if limits else found


def limits_in(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The limits of means and percentiles in a *summary*: the class, "" for the whole workload; the limit's key; what `with_limits`
    found of it."""
    groups = {"": summary, **summary.get("classes", {})}
    for name, group in groups.items():
        for key, limit in group.get("slo", {}).items():
            yield name, key, limit


def _of_requests(slo: Mapping[str, float | None]) -> dict[str, float]:
    return {key: limit_s for key in LIMITS if (limit_s := slo.get(key)) is not None}


def _held(figures: Mapping[str, Any], slo: Mapping[str, float | None]) -> dict[str, dict[str, Any]]:
    found = {}
    for key, limit_s in slo.items():
        if key in LIMITS or limit_s is None:
            continue
        measure, statistic, _ = key.split("_")
        value_s = figures[f"{measure}_s"][statistic]
        lacks = f"{measure}_s" in _MAY_LACK and figures["requests"]["finished"] > 0
        found[key] = {"limit_s": limit_s, "value_s": value_s, "kept": lacks if value_s is None else value_s <= limit_s}
    return found
