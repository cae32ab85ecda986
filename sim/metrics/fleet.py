"""Machines in time: how long they were in which state, and what their coming, going and failing did to requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import LOST, FloatArray
from sim.metrics.spread import statistics

STATES = ("off", "starting", "ready", "draining", "failed")
OFF, STARTING, READY, DRAINING, FAILED = range(5)


def stays(fleet: Mapping[str, Any], begin_ns: int, end_ns: int) -> dict[str, NDArray[Any]]:
    """A row for each time that a machine was in a state between two instants: `machine`, `state`, `phase` (of one that starts),
    `begin_ns` and `end_ns`, cut at the two."""
    log = {name: np.asarray(column, np.int64) for name, column in fleet["log"].items()}
    order = np.lexsort((np.arange(len(log["at_ns"])), log["machine"]))
    at_ns, machine = log["at_ns"][order], log["machine"][order]
    last = np.append(machine[1:] != machine[:-1], True)
    until_ns = np.where(last, end_ns, np.append(at_ns[1:], end_ns))
    begins = np.clip(at_ns, begin_ns, end_ns)
    return {
        "machine": machine,
        "state": log["state"][order],
        "phase": log["phase"][order],
        "begin_ns": begins,
        "end_ns": np.clip(until_ns, begins, end_ns),
    }


def seconds_by_state(fleet: Mapping[str, Any], begin_ns: int, end_ns: int) -> FloatArray:
    """Seconds that each machine was in each state between two instants: shape [machines, states]."""
    found = np.zeros((len(fleet["pools"]), len(STATES)), np.int64)
    each = stays(fleet, begin_ns, end_ns)
    np.add.at(found, (each["machine"], each["state"]), each["end_ns"] - each["begin_ns"])
    return np.asarray(found * 1e-9, np.float64)


def seconds_by_phase(fleet: Mapping[str, Any], begin_ns: int, end_ns: int) -> dict[str, float]:
    """Seconds that machines spent in each phase of starting, all machines together."""
    each = stays(fleet, begin_ns, end_ns)
    starting = np.flatnonzero(each["state"] == STARTING)
    found: dict[str, int] = {}
    for row in starting.tolist():
        name = fleet["phases"][fleet["pools"][each["machine"][row]]][each["phase"][row]]
        found[name] = found.get(name, 0) + int(each["end_ns"][row] - each["begin_ns"][row])
    return {name: length_ns * 1e-9 for name, length_ns in found.items()}


def serving_s(meta: Mapping[str, Any], begin_ns: int, end_ns: int) -> FloatArray | None:
    """Seconds that each machine could serve, ready or draining; None where all are there from beginning to end."""
    fleet = meta.get("fleet")
    if fleet is None:
        return None
    return seconds_by_state(fleet, begin_ns, end_ns)[:, [READY, DRAINING]].sum(axis=1)


def stage_s(meta: Mapping[str, Any], begin_ns: int, end_ns: int) -> float:
    """Seconds of pipeline stages (one a machine without a pipeline) that could serve between two instants."""
    serving = serving_s(meta, begin_ns, end_ns)
    if serving is None:
        return (end_ns - begin_ns) * 1e-9 * meta["n_stages"]
    return float((serving * np.asarray(meta["fleet"]["n_stages"])).sum())


def replica_s(meta: Mapping[str, Any], begin_ns: int, end_ns: int) -> float:
    """The same of replicas, a model on a machine or a rank of one each."""
    serving = serving_s(meta, begin_ns, end_ns)
    if serving is None:
        return (end_ns - begin_ns) * 1e-9 * len(meta["kv_blocks_total"])
    return float((serving * np.asarray(meta["fleet"]["n_tenants"])).sum())


def fleet_figures(
    requests: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], begin_ns: int, end_ns: int
) -> dict[str, Any]:
    """`fleet` of a summary: time of machines by state between two instants, and counts of the run. Empty without a fleet.

    `machine_hours` are those that somebody pays for: all but `off`. `availability` is the share of the time for which a machine was
    to serve in which it did, starting apart. `without_machine_s` is how long none was ready, or none of those of a stage.
    """
    fleet = meta.get("fleet")
    if fleet is None:
        return {}
    by_state = seconds_by_state(fleet, begin_ns, end_ns)
    seconds = {name: float(by_state[:, i].sum()) for i, name in enumerate(STATES)}
    up, down = seconds["ready"] + seconds["draining"], seconds["failed"]
    span_s = (end_ns - begin_ns) * 1e-9
    held = requests["held_ns"] > 0
    counts = ("starts", "called_back", "drains", "drains_cut_short", "failures", "outages_missed")
    return {
        "fleet": {
            "machine_hours": (sum(seconds.values()) - seconds["off"]) / 3600,
            "machine_s": seconds,
            "starting_s": seconds_by_phase(fleet, begin_ns, end_ns),
            "machines_mean": up / span_s if span_s else None,
            "machines_max": int(_levels(fleet, READY, begin_ns, end_ns)[1].max(initial=0)),
            "without_machine_s": _time_at_none(fleet, begin_ns, end_ns),
            "availability": up / (up + down) if up + down else None,
            **{name: fleet[name] for name in (*counts, "asked_below_least", "asked_above_most")},
            "in_flight": fleet["in_flight"],
            "requests": {
                "resumed": fleet["resumed"],
                "retried": fleet["retried"],
                "lost": int((requests["status"] == LOST).sum()),
                "held": int(held.sum()),
                "held_to_the_end": fleet["held_to_the_end"],
                "chosen_again": fleet["chosen_again"],
                "discarded_tokens": fleet["discarded_tokens"],
            },
            "held_s": statistics(requests["held_ns"][held] * 1e-9),
        }
    }


def _levels(
    fleet: Mapping[str, Any], wanted: int, begin_ns: int, end_ns: int, of: NDArray[np.bool_] | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Instants between two, and how many machines, all or those *of* a kind, are in a state from each on."""
    log = {name: np.asarray(column, np.int64) for name, column in fleet["log"].items()}
    now = np.zeros(len(fleet["pools"]), bool)
    at_ns, levels = [begin_ns], [0]
    for at, machine, state in zip(log["at_ns"].tolist(), log["machine"].tolist(), log["state"].tolist(), strict=True):
        if at >= end_ns and at > begin_ns:
            break
        now[machine] = state == wanted and (of is None or bool(of[machine]))
        if at <= at_ns[-1]:
            levels[-1] = int(now.sum())
        else:
            at_ns.append(at)
            levels.append(int(now.sum()))
    return np.array(at_ns), np.array(levels)


def _time_at_none(fleet: Mapping[str, Any], begin_ns: int, end_ns: int) -> float:
    """How long none was ready of those to which requests come, or of those of another stage."""
    roles = np.array(["prefill" if role == "both" else role for role in fleet["roles"]])
    kinds = [roles == stage for stage in dict.fromkeys(roles.tolist())]
    found = [_levels(fleet, READY, begin_ns, end_ns, of) for of in kinds]
    at_ns = found[0][0]
    none = np.any([levels == 0 for _, levels in found], axis=0)
    return float((np.append(at_ns[1:], end_ns) - at_ns)[none].sum() * 1e-9)
