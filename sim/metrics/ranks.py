"""Figures of how evenly the ranks of machines were filled, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.metrics.columns import Columns, IntArray
from sim.metrics.iterations import by_replica


def rank_figures(columns: Columns, begin_ns: int | None = None, end_ns: int | None = None) -> dict[str, Any]:
    """The entry `ranks` of a summary, over steps that start from *begin_ns* on and before *end_ns*; empty without ranks.

    `steps` are common ones, of all machines together. `token_imbalance` is the mean over them of the tokens of the fullest rank
    over the mean of all ranks of its machine, 1 where all have as many; `kv_imbalance` the same of KV tokens that decodes read,
    over steps with decodes; `idle_share` the ranks that had nothing to do while others stepped, over all ranks and steps.
    """
    machines: list[tuple[int, int]] = columns.meta.get("ranks", [])
    if not machines:
        return {}
    parts: list[list[tuple[IntArray, IntArray, IntArray]]] = [[] for _ in machines]
    of = {rank: i for i, (first, last) in enumerate(machines) for rank in range(first, last + 1)}
    for block in columns.iteration_blocks():
        for replica, mine in by_replica(block):
            if (machine := of.get(replica)) is None:
                continue
            start_ns, rows, read = (block[name][mine] for name in ("start_ns", "rows", "kv_tokens"))
            inside = np.ones(start_ns.size, bool) if begin_ns is None else start_ns >= begin_ns
            inside &= True if end_ns is None else start_ns < end_ns
            parts[machine].append((start_ns[inside], rows[inside], read[inside]))
    steps = busy = places = 0
    tokens, kv = [np.empty(0)], [np.empty(0)]
    for (first, last), mine in zip(machines, parts, strict=True):
        if not mine:
            continue
        start_ns, rows, read = (np.concatenate(column) for column in zip(*mine, strict=True))
        n_ranks = last - first + 1
        _, step = np.unique(start_ns, return_inverse=True)
        n = int(step.max(initial=-1)) + 1
        steps, busy, places = steps + n, busy + start_ns.size, places + n * n_ranks
        tokens.append(_fullest_over_mean(rows, step, n, n_ranks))
        kv.append(_fullest_over_mean(read, step, n, n_ranks))
    per_machine = sorted({last - first + 1 for first, last in machines})
    return {
        "ranks": {
            "per_machine": per_machine[0] if len(per_machine) == 1 else per_machine,
            "steps": steps,
            "token_imbalance": _mean(np.concatenate(tokens)),
            "kv_imbalance": _mean(np.concatenate(kv)),
            "idle_share": 1.0 - busy / places if places else None,
        }
    }


def _fullest_over_mean(amounts: IntArray, step: IntArray, n: int, n_ranks: int) -> np.ndarray:
    """The fullest rank over the mean, for each of *n* steps in which any rank has some."""
    most, total = np.zeros(n, np.int64), np.zeros(n, np.int64)
    np.maximum.at(most, step, amounts)
    np.add.at(total, step, amounts)
    some = total > 0
    return most[some] * n_ranks / total[some]


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
