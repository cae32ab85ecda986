"""How far the steps of a run lie outside the measured ones that priced them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hwmodels.steps.cost import StepCost
from hwmodels.steps.table import Reach
from sim.engine import Columns, Experiment
from sim.engine.record.spill import in_blocks

SOME_OUTSIDE = "Steps lie outside the measured ones that price them; a single run says how many, and how far."
"""The note of a run among many."""
_SPANS_AT_ONCE = 1 << 17
_UNITS = {"prompts": ("prompt steps", "tokens"), "decodes": ("decode steps", "sequences")}


@dataclass
class _Seen:
    """Steps of one kind: how many there are, how many lie outside, and the least and most tokens and keys of them."""

    reach: Reach
    steps: int = 0
    outside: int = 0
    rows: list[float] = field(default_factory=lambda: [np.inf, 0.0])
    keys: list[float] = field(default_factory=lambda: [np.inf, 0.0])

    def add(self, rows: Any, first_keys: Any, times: Any, growth: int) -> None:
        """Steps of *rows* each *times* over, whose keys grow by *growth* with each."""
        if not len(rows):
            return
        last_keys = first_keys + growth * (times - 1)
        for seen, low, high in ((self.rows, rows, rows), (self.keys, first_keys, last_keys)):
            seen[:] = min(seen[0], float(low.min())), max(seen[1], float(high.max()))
        (least_rows, most_rows), (least, most) = self.reach
        within = times
        if growth:
            # The steps of a span whose keys are from least to most.
            within = np.clip(np.floor(most - first_keys) + 1, 0, times) - np.clip(np.ceil(least - first_keys), 0, times)
        else:
            within = times * ((first_keys >= least) & (first_keys <= most))
        inside = np.maximum(within, 0) * ((rows >= least_rows) & (rows <= most_rows))
        self.steps += int(times.sum())
        self.outside += int(times.sum() - inside.sum())

    def said(self, what: str) -> str:
        """How far the steps go, where that is beyond what was measured."""
        steps, unit = _UNITS[what]
        found = [
            f"{seen[0]:,.0f} to {seen[1]:,.0f} {name} (measured {measured[0]:,.0f} to {measured[1]:,.0f})"
            for seen, measured, name in (
                (self.rows, self.reach.rows, unit),
                (self.keys, self.reach.keys, "tokens of context each"),
            )
            if seen[0] < measured[0] or seen[1] > measured[1]
        ]
        return f"{self.outside:,} of {self.steps:,} {steps}, of {' and '.join(found)}"


def beyond_measured(experiment: Experiment, columns: Columns) -> Iterator[str]:
    """A note for each table of measured steps outside of which steps of the run lie, with how far."""
    seen: dict[int, dict[str, _Seen]] = {}
    rows = iter(columns.replicas)
    for machine in experiment.machines:
        for spec in machine.hosted:
            cost = getattr(spec.cost, "inner", spec.cost)
            spans = [next(rows).spans for _ in range(machine.ranks)]
            if not isinstance(cost, StepCost):
                continue
            reach = cost.table.reach
            of_it = seen.setdefault(id(cost.table), {what: _Seen(each) for what, each in reach.items()})
            for block in (block for each in spans for block in in_blocks(each, _SPANS_AT_ONCE)):
                _add(of_it, block)
    for of_it in seen.values():
        outside = [each.said(what) for what, each in of_it.items() if each.outside]
        if outside:
            yield (
                f"Outside the measured steps lie {'; and '.join(outside)}. Beyond the largest the time grows along a straight line "
                "fitted to all of them; below the smallest it is that of the smallest, or for prompts falls to that of a decode."
            )


def _add(seen: dict[str, _Seen], spans: np.ndarray) -> None:
    times = spans["n"].astype(np.int64)
    for what, rows, total, growth in (
        ("prompts", "prefill_rows", "prefill_pairs", 0),
        ("decodes", "decode_seqs", "decode_kv_tokens", 1),
    ):
        there = spans[rows] > 0
        each = spans[rows][there].astype(np.float64)
        seen[what].add(each, spans[total][there] / each, times[there], growth)
