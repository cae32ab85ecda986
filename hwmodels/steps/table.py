"""Seconds of any step from those of measured steps with prompts alone and with decodes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hwmodels.steps.surface import Floats, Points, Surface
from hwmodels.totals import Totals

FEWEST = 2
"""Points of each kind that a table needs."""
FEWEST_TO_HOLD_BACK = 2 * FEWEST
_HALVES = 5
_LEVEL = 0.9


class Reach(NamedTuple):
    """How far measured steps of one kind go: the least and the most rows, and keys of a row."""

    rows: tuple[float, float]
    keys: tuple[float, float]


class Table:
    """Seconds of steps.

    A step with prompts alone takes what the surface of the measured ones says of its prompt tokens and the keys of each; one with
    decodes alone what theirs says of its sequences and the tokens that each reads. One prompt token takes as long as one decode:
    so goes the surface of prompts below its smallest. A step with both takes what its prompts take, and what its decodes take
    beyond the least decode step of the table: weights are read and kernels launched once.
    """

    def __init__(self, prompts: Points, decodes: Points) -> None:
        for points, what in ((prompts, "prompts"), (decodes, "decodes")):
            if len(points.seconds) < FEWEST:
                raise ValueError(
                    f"{len(points.seconds)} measured steps with {what} alone are too few; a table needs {FEWEST} or more, of "
                    "prompts and of decodes"
                )
        self.decodes = Surface(decodes)
        self.prompts = Surface(prompts, anchor=self.decodes)
        self.measured = {"prompts": prompts, "decodes": decodes}
        self._least_s = self.decodes.least_s

    @property
    def reach(self) -> dict[str, Reach]:
        each = {"prompts": self.prompts, "decodes": self.decodes}
        return {what: Reach(surface.rows_range, surface.keys_range) for what, surface in each.items()}

    def second(self, totals: Totals) -> float:
        """`seconds` of one step whose totals are ints, bit for bit."""
        _, prompt_rows, _, pairs, _, seqs, kv, _, _, _ = totals
        if not seqs:
            return self.prompts.second(float(prompt_rows), pairs / prompt_rows) if prompt_rows else 0.0
        decoding = self.decodes.second(float(seqs), kv / seqs)
        if not prompt_rows:
            return decoding
        return self.prompts.second(float(prompt_rows), pairs / prompt_rows) + (decoding - self._least_s)

    def seconds(self, totals: Totals) -> Floats:
        """Seconds of steps whose totals are int64 arrays; 0 for one without tokens."""
        shapes = np.broadcast_arrays(
            totals.prefill_rows, totals.prefill_pairs, totals.decode_seqs, totals.decode_kv_tokens
        )
        rows, pairs, seqs, kv = (np.asarray(each, np.float64) for each in shapes)
        has_prompts, has_decodes = rows > 0, seqs > 0
        prompting = self.prompts.seconds(rows, pairs / np.where(has_prompts, rows, 1.0))
        decoding = self.decodes.seconds(seqs, kv / np.where(has_decodes, seqs, 1.0))
        both = prompting + (decoding - self._least_s)
        return np.where(has_prompts, np.where(has_decodes, both, prompting), np.where(has_decodes, decoding, 0.0))

    def of(self, what: str, points: Points) -> Floats:
        """Seconds of *points* of that kind, prompts or decodes."""
        return {"prompts": self.prompts, "decodes": self.decodes}[what].seconds(points.rows, points.keys)

    def levelled(self) -> tuple[int, float]:
        """The number of measured points that the table does not give back within a part in a thousand, and the most that it is off
        one, as a share."""
        off = np.concatenate([np.abs(self.of(what, points) / points.seconds - 1.0) for what, points in self._kinds()])
        return int((off > 1e-3).sum()), float(off.max())

    def _kinds(self) -> Iterator[tuple[str, Points]]:
        yield from self.measured.items()

    def factors(self) -> tuple[float, float] | None:
        """The factors of what half of the points gives between which nine in ten of the other half were measured; None where
        there are too few to divide.

        Five random halves, each of which is predicted from the other. The whole table has twice the points of a half.
        """
        if any(len(points.seconds) < FEWEST_TO_HOLD_BACK for _, points in self._kinds()):
            return None
        rng = np.random.default_rng(0)
        ratios: list[Floats] = []
        for _ in range(_HALVES):
            orders = {what: rng.permutation(len(points.seconds)) for what, points in self._kinds()}
            halves = [{what: order[part::2] for what, order in orders.items()} for part in (0, 1)]
            for known, held in (halves, halves[::-1]):
                from_known = Table(*(points.at(known[what]) for what, points in self._kinds()))
                for what, points in self._kinds():
                    theirs = points.at(held[what])
                    ratios.append(theirs.seconds / from_known.of(what, theirs))
        low, high = np.quantile(np.concatenate(ratios), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]).tolist()
        return min(1.0, low), max(1.0, high)


def keys_of_prompts(new_tokens: Any, cached_tokens: Any) -> Any:
    """Keys that each of *new_tokens* of a sequence attends to on average, after *cached_tokens*."""
    return cached_tokens + (new_tokens + 1) / 2
