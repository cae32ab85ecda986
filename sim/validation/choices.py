"""Choices between measured servers: how often a prediction names the better one, and what is lost where it does not.

Throughput is by the law of a closed loop, from the figures that a row has: requests in flight times the tokens of an answer over
TTFT and the time of its further tokens. Measured and predicted figures enter it alike.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sim.bench.published.rows import SAME_MODEL

if TYPE_CHECKING:
    from sim.validation.files import Comparison

TIE = 1.05
"""Two measured figures are a tie, and no choice, where one is less than this times the other: repeats differ as much."""
LIMITS_S = (0.01, 0.02, 0.05)
"""Limits of TPOT under which a configuration is picked."""
MISSED = 1.05
"""A pick whose measured TPOT is above this times the limit has missed it."""
PLACE = ("model", "device", "precision", "isl", "osl")
"""Columns that are the same for all servers that are chosen from."""
QUANTITIES = {"tpot_s": "TPOT", "throughput": "throughput per GPU", "ttft_s": "TTFT"}
"""The figures by which the better of two stacks is named, and their names in tables."""
CHOICES = {**{name: f"faster stack by {title}" for name, title in QUANTITIES.items()}, "layout": "best layout"}
"""Everything that is chosen, and its name in tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Predicted or measured figures of one server; a lower `cost` is better in each."""

    tpot_s: float
    ttft_s: float
    throughput: float
    """Output tokens a second and GPU."""

    def cost(self, quantity: str) -> float:
        return 1.0 / self.throughput if quantity == "throughput" else getattr(self, quantity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One measured row: a layout of a stack that serves so many requests in flight."""

    place: tuple[str, ...]
    device: str
    stack: str
    layout: str
    gpus: int
    load: float
    predicted: Figures
    measured: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Choices, those of them that are ties, and those of the others that are named right."""

    cases: int
    ties: int
    right: int
    constant: int
    """Those that one answer without any prediction names right: the stack that is better more often of two on a device, the layout
    with the fewest GPUs."""

    @property
    def right_pct(self) -> float:
        return 100.0 * self.right / (self.cases - self.ties) if self.cases > self.ties else np.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Picks under a limit of TPOT."""

    limit_s: float
    cases: int
    """Places where at least two configurations meet the limit."""
    none: int
    """Those where no prediction meets it, so that nothing is picked."""
    missed: int
    """Those where the pick misses it."""
    mean_pct: float
    """Mean of the throughput that the other picks have less than the best, in percent of it."""

    @property
    def whole_pct(self) -> float:
        """The same with picks that miss, and places where nothing is picked, as a loss of all."""
        lost = self.none + self.missed
        within = self.cases - lost
        return (100.0 * lost + (self.mean_pct * within if within else 0.0)) / self.cases if self.cases else np.nan


def servers(pair: tuple[Comparison, Comparison]) -> list[Server]:
    """The rows of TPOT and TTFT whose layout and load are known, and that have a prediction."""
    tpot, ttft = pair
    groups = tpot.groups
    if "layout" not in groups:
        return []
    found = []
    for i in range(len(tpot.measured)):
        load, gpus, osl = float(groups["load"][i]), int(groups["gpus"][i]), float(groups["osl"][i])
        seconds = [
            (float(a[i]), float(b[i])) for a, b in ((tpot.predicted, ttft.predicted), (tpot.measured, ttft.measured))
        ]
        if not (gpus and load > 0 and np.isfinite(seconds).all()):
            continue
        predicted, measured = (
            Figures(tpot_s=step, ttft_s=first, throughput=load * osl / (first + (osl - 1) * step) / gpus)
            for step, first in seconds
        )
        place = [str(groups[name][i]) for name in PLACE]
        place[0] = SAME_MODEL.get(place[0], place[0])
        found.append(
            Server(
                place=tuple(place),
                device=str(groups["device"][i]),
                stack=str(groups["stack"][i]),
                layout=str(groups["layout"][i]),
                gpus=gpus,
                load=load,
                predicted=predicted,
                measured=measured,
            )
        )
    return found


def stack_pairs(rows: Sequence[Server]) -> list[tuple[Server, Server]]:
    """Every two rows of different stacks on the same model, device, format, lengths, GPUs and load, by the stacks' names."""
    alike: dict[tuple[object, ...], list[Server]] = defaultdict(list)
    for row in rows:
        alike[(*row.place, row.gpus, row.load)].append(row)
    return [
        (a, b) if a.stack < b.stack else (b, a)
        for several in alike.values()
        for a, b in itertools.combinations(several, 2)
        if a.stack != b.stack
    ]


def named(pairs: Sequence[tuple[Server, Server]], quantity: str) -> Share:
    """How often the better of two servers is named by *quantity*: tpot_s, ttft_s or throughput."""
    ties = right = 0
    firsts: dict[tuple[str, ...], list[bool]] = defaultdict(list)
    for a, b in pairs:
        measured = a.measured.cost(quantity) / b.measured.cost(quantity)
        if max(measured, 1.0 / measured) < TIE:
            ties += 1
        else:
            right += (a.predicted.cost(quantity) < b.predicted.cost(quantity)) == (measured < 1.0)
            firsts[a.device, a.stack, b.stack].append(measured < 1.0)
    constant = sum(max(sum(first), len(first) - sum(first)) for first in firsts.values())
    return Share(cases=len(pairs), ties=ties, right=right, constant=constant)


def best_layout(rows: Sequence[Server]) -> Share:
    """How often the layout with the highest throughput per GPU is named, of all of one stack at one load; rows of one layout that
    was measured again count by their mean. A tie: the second layout is as good."""
    alike: dict[tuple[object, ...], dict[str, list[Server]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        alike[(*row.place, row.stack, row.load)][row.layout].append(row)
    cases = ties = right = constant = 0
    for layouts in alike.values():
        if len(layouts) < 2:
            continue
        cases += 1
        measured, predicted = (
            {name: float(np.mean([getattr(r, what).throughput for r in each])) for name, each in layouts.items()}
            for what in ("measured", "predicted")
        )
        first, second = sorted(measured.values(), reverse=True)[:2]
        if first / second < TIE:
            ties += 1
        else:
            best = max(measured, key=measured.__getitem__)
            right += best == max(predicted, key=predicted.__getitem__)
            constant += best == min(layouts, key=lambda name: (layouts[name][0].gpus, name))
    return Share(cases=cases, ties=ties, right=right, constant=constant)


def loss_under(rows: Sequence[Server], limit_s: float) -> Loss:
    """The loss where, of all stacks, layouts and loads of one model on one device with the same lengths, the one is picked that is
    predicted to have the highest throughput per GPU within *limit_s*."""
    places: dict[tuple[str, ...], list[Server]] = defaultdict(list)
    for row in rows:
        places[row.place].append(row)
    cases = none = missed = 0
    lost = []
    for several in places.values():
        true = [row.measured.throughput for row in several if row.measured.tpot_s <= limit_s]
        if len(true) < 2:
            continue
        cases += 1
        within = [row for row in several if row.predicted.tpot_s <= limit_s]
        if not within:
            none += 1
            continue
        pick = max(within, key=lambda row: row.predicted.throughput)
        if pick.measured.tpot_s > MISSED * limit_s:
            missed += 1
        else:
            # One a little beyond the limit may have more than the best within it, which makes up for no other.
            lost.append(max(0.0, 100.0 * (1.0 - pick.measured.throughput / max(true))))
    return Loss(
        limit_s=limit_s, cases=cases, none=none, missed=missed, mean_pct=float(np.mean(lost)) if lost else np.nan
    )


def shares(rows: Sequence[Server]) -> dict[str, Share]:
    """How often each of `CHOICES` is named right."""
    pairs = stack_pairs(rows)
    return {**{name: named(pairs, name) for name in QUANTITIES}, "layout": best_layout(rows)}


Scores = dict[str, list[float]]
"""Numbers of each question of `scores`, to be stored: of a `Share` cases, ties, right and constant ones; of a `Loss` cases, none,
missed, and the mean."""


def scores(rows: Sequence[Server]) -> Scores:
    """All shares and losses of *rows*."""
    losses = {f"{1e3 * limit:g} ms": loss_under(rows, limit) for limit in LIMITS_S}
    return {
        **{name: [one.cases, one.ties, one.right, one.constant] for name, one in shares(rows).items()},
        **{name: [one.cases, one.none, one.missed, one.mean_pct] for name, one in losses.items()},
    }


def right_pct(numbers: Sequence[float]) -> float:
    """The share of a question in `Scores`."""
    return Share(cases=int(numbers[0]), ties=int(numbers[1]), right=int(numbers[2]), constant=0).right_pct


def whole_pct(numbers: Sequence[float]) -> float:
    """The loss of picks in `Scores` with those that miss as a loss of all."""
    cases, none, missed, mean_pct = numbers
    lost = Loss(limit_s=np.nan, cases=int(cases), none=int(none), missed=int(missed), mean_pct=mean_pct)
    return lost.whole_pct


def choices_markdown(pair: tuple[Comparison, Comparison], held: Mapping[str, Scores]) -> Iterator[str]:
    """The part of docs/validation.md on choices, empty without any; *held*: scores of predictions held back, by what was."""
    rows = servers(pair)
    pairs = stack_pairs(rows)
    if not pairs:
        return
    found = scores(rows)
    heads = "".join(f" {name} held back |" for name in held)
    yield _CHOICES
    yield f"| named right, in % of those that are no tie | cases | ties | constant answer | as replayed |{heads}"
    yield f"| --- | --: | --: | --: | --: |{' --: |' * len(held)}"
    for name, title in CHOICES.items():
        cases, ties, _, constant = found[name]
        cells = [right_pct([cases, ties, constant]), *(right_pct(each[name]) for each in (found, *held.values()))]
        yield f"| {title} | {cases:.0f} | {ties:.0f} | {' | '.join(map(_shown, cells))} |"
    yield "\n| two stacks | on | pairs | TPOT % | throughput per GPU % | TTFT % |"
    yield "| --- | --- | --: | --: | --: | --: |"
    for key in sorted({(a.stack, b.stack, a.device) for a, b in pairs}):
        mine = [(a, b) for a, b in pairs if (a.stack, b.stack, a.device) == key]
        cells = " | ".join(_shown(named(mine, quantity).right_pct) for quantity in QUANTITIES)
        yield f"| {key[0]} and {key[1]} | {key[2]} | {len(mine)} | {cells} |"
    yield f"\n| pick within | cases | misses the limit | nothing picked | mean loss % |{heads}"
    yield f"| --- | --: | --: | --: | --: |{' --: |' * len(held)}"
    for limit in LIMITS_S:
        cases, none, missed, mean = found[name := f"{1e3 * limit:g} ms"]
        cells = [f"{each[name][3]:.1f} ({each[name][2]:.0f} miss)" for each in held.values()]
        yield f"| {name} TPOT | {cases:.0f} | {missed:.0f} | {none:.0f} | {' | '.join([_shown(mean), *cells])} |"
    yield _WRONG


def _shown(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1f}"


_CHOICES = """
### Choices between stacks and layouts

Two rows of different stacks on the same model, device, format, number of GPUs, lengths and load are a pair; the better of them is
named by prediction. Layouts are compared within a stack, at the same lengths and load, by throughput per GPU: output tokens a
second, from load, TTFT and TPOT. Two that were measured within 5 % of each other are a tie and count in no share. A constant
answer needs no prediction: the stack that is better more often of two on a device, the layout with the fewest GPUs. DeepSeek-R1 and
DeepSeek-V3 are one model.

A pick is, of all stacks, layouts and loads of a model on a device with the same format and lengths, the one with the highest
throughput per GPU whose predicted TPOT is within the limit. Its loss is the throughput that it has less, as measured, than the
best of those that truly meet the limit, of which there are two at least, and 0 at least; picks more than 5 % beyond the limit
count apart.
"""

_WRONG = """
Most pairs named wrong are DeepSeek in FP4 on B200, where SGLang and TensorRT-LLM are predicted within 4 % of each other:
TensorRT-LLM's steps of 4 clients are priced about 12 % too slow there, those of 128 clients on 4 GPUs 14 % too fast."""
