"""The steps of a rollout: how long each took, how much of it was the tail, and what was thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.columns import STATUS_NAMES
from sim.metrics.requests import finished
from sim.metrics.spread import statistics
from workloads.rollout import Groups, Rollout


def rollout_figures(
    requests: Mapping[str, NDArray[Any]], rollout: Rollout, groups: Groups, replicas: int | None
) -> dict[str, Any]:
    """The entry `rollout` of a summary; *replicas*: schedulers with KV memory of their own, None where the last one that a request
    had is not the only one, or where they come and go: nothing is said of idle time then.

    A step lasts from its first prompt, or from the end of the one before where answers go on meanwhile, to the last answer of
    the groups that end it: `step_s`; where answers are aborted, update and pause lie between steps. `p90_s` and `p99_s` are the
    times from its beginning until so many of these answers were there, `tail_share` the part of its time after `p90_s`; where
    machines stand still or give answers back, `recomputed_tokens` are those whose KV was given up. `idle_s` is the time that
    replicas, together, had no request before it ended, `idle_share` the same over all their time. Of all answers `kept` were
    for groups that ended a step, `dropped` for others that had finished, `aborted` when a step ended. Where some were rejected,
    lost or never ended, `answers` counts them, and there are no steps: a trainer has no rule for when it stops waiting for them.
    """
    done = finished(requests)
    counts = {name: int((requests["status"] == code).sum()) for code, name in enumerate(STATUS_NAMES)}
    elsewise = {name: n for name, n in counts.items() if n and name not in ("finished", "aborted")}
    n, samples = len(groups.step), rollout.samples
    finish_ns = requests["finish_ns"]
    whole = done.reshape(n, samples).all(axis=1)
    ended_ns = finish_ns.reshape(n, samples).max(axis=1)
    sent_ns = requests["arrival_ns"].reshape(n, samples)[:, 0]
    steps: list[dict[str, Any]] = []
    end_ns = 0
    kept = np.zeros(n, bool)
    for step in range(0 if elsewise else rollout.steps):
        # Groups of the step, or those that an earlier one left under way: the first that end.
        mine = groups.step == step if rollout.leftover == "abort" else ~kept
        taken = np.flatnonzero(mine & whole & groups.informative)
        taken = taken[np.argsort(ended_ns[taken], kind="stable")][: rollout.of_a_step]
        kept[taken] = True
        begin_ns = int(sent_ns[groups.step == step].min())
        if rollout.leftover != "abort" and step:
            begin_ns = end_ns
        end_ns = int(ended_ns[taken].max())
        steps.append(_step(requests, _rows(taken, rollout), begin_ns, end_ns, replicas))
    durations = np.array([each["step_s"] for each in steps])
    idle_s = None if replicas is None else sum(each["idle_s"] for each in steps)
    all_s = (replicas or 0) * float(durations.sum())
    tails = [1 - each["p90_s"] / each["step_s"] for each in steps if each["step_s"] > 0]
    return {
        "rollout": {
            "steps": steps,
            "step_s": statistics(durations),
            "tail_share": float(np.mean(tails)) if tails else None,
            **({"recomputed_tokens": int(requests["recomputed_tokens"].sum())} if rollout.stops_machines else {}),
            "idle_s": idle_s,
            "idle_share": idle_s / all_s if idle_s is not None and all_s else None,
            "answers": {
                "kept": int(kept.sum()) * samples,
                "dropped": int((done & ~np.repeat(kept, samples)).sum()),
                "aborted": counts["aborted"],
                **elsewise,
            },
        }
    }


def _rows(taken: NDArray[np.int64], rollout: Rollout) -> NDArray[np.int64]:
    return (taken[:, None] * rollout.samples + np.arange(rollout.samples)).ravel()


def _step(
    requests: Mapping[str, NDArray[Any]], rows: NDArray[np.int64], begin_ns: int, end_ns: int, replicas: int | None
) -> dict[str, Any]:
    """The figures of one step that the answers *rows* ended."""
    answered_s = np.sort(np.maximum(requests["finish_ns"][rows] - begin_ns, 0)) * 1e-9
    return {
        "begin_s": begin_ns * 1e-9,
        "step_s": (end_ns - begin_ns) * 1e-9,
        "p90_s": float(answered_s[-(-9 * len(rows) // 10) - 1]),
        "p99_s": float(answered_s[-(-99 * len(rows) // 100) - 1]),
        "idle_s": None if replicas is None else _idle_s(requests, begin_ns, end_ns, replicas),
    }


def _idle_s(requests: Mapping[str, NDArray[Any]], begin_ns: int, end_ns: int, replicas: int) -> float:
    """The time from the last request of each replica to the end of a step, added up."""
    there = (requests["scheduled_ns"] >= 0) & (requests["scheduled_ns"] <= end_ns) & (requests["finish_ns"] > begin_ns)
    last_ns = np.full(replicas, begin_ns)
    np.maximum.at(last_ns, requests["replica"][there], np.minimum(requests["finish_ns"][there], end_ns))
    return float((end_ns - last_ns).sum()) * 1e-9
