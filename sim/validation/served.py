"""Serving runs taken apart: errors by family, stack, model, load and device, and what of them nothing here explains."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hwmodels.overheads import stack_releases
from sim.bench.published import speculated
from sim.bench.published.rows import ASSUMED
from sim.protocols import protocols
from sim.validation.aims import aims_markdown, held_back
from sim.validation.choices import choices_markdown
from sim.validation.files import Comparison
from workloads.write import open_whole

LOADS = (4, 16, 64, 256)
"""Upper ends of the ranges of requests in flight that a table shows; a last one is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupErrors:
    """Relative errors of a group of serving rows in percent, of TPOT and of TTFT."""

    name: str
    rows: int
    unmodelled: int
    tpot_median_pct: float
    tpot_bias_pct: float
    """Median of predicted / measured - 1."""
    ttft_median_pct: float
    ttft_bias_pct: float


def load_name(concurrency: float) -> str:
    """The range of `LOADS` that so many requests in flight lie in."""
    if not np.isfinite(concurrency):
        return "not known"
    low = 1
    for high in LOADS:
        if concurrency <= high:
            return f"{low} to {high}"
        low = high + 1
    return f"{low} and more"


def _labels(one: Comparison, *names: str) -> list[str]:
    """Each row's group by *names*."""
    columns = [[load_name(x) for x in one.groups[n]] if n == "load" else one.groups[n].tolist() for n in names]
    return [", ".join(str(cell) for cell in cells) for cells in zip(*columns, strict=True)]


Pair = tuple[Comparison, Comparison]
"""TPOT and TTFT of the same rows."""


def served_pairs(found: Sequence[Comparison]) -> dict[str, Pair]:
    """TPOT and TTFT of each file of serving rows among *found* that has predictions, those with the most rows first."""
    named = [one for one in found if one.groups and np.isfinite(one.predicted).any()]
    files = sorted({one.file for one in named}, key=lambda name: -max(len(o.measured) for o in named if o.file == name))
    pairs = {}
    for file in files:
        both = {one.quantity: one for one in named if one.file == file}
        pairs[file] = both["tpot"], both["ttft"]
    return pairs


def served_pair(found: Sequence[Comparison]) -> Pair | None:
    """The largest file of `served_pairs`; None where there is none with a prediction."""
    return next(iter(served_pairs(found).values()), None)


def errors_by(pair: tuple[Comparison, Comparison], *names: str) -> list[GroupErrors]:
    """Errors of each group by *names* (family, stack, model, device, precision, load), in the order of their names."""
    tpot, ttft = pair
    labels = np.array(_labels(tpot, *names))
    ranges = [*(load_name(high) for high in LOADS), load_name(np.inf if not LOADS else LOADS[-1] + 1)]

    def place(name: str) -> tuple[object, ...]:
        last = name.rpartition(", ")[2]
        return (name.rpartition(", ")[0], ranges.index(last)) if last in ranges else (name, 0)

    lines = []
    for name in sorted(set(labels.tolist()), key=place):
        mine = labels == name
        cells = []
        for one in (tpot, ttft):
            ratio = (one.predicted[mine] / one.measured[mine] - 1.0) * 100.0
            ratio = ratio[np.isfinite(ratio)]
            cells += [float(np.median(np.abs(ratio))), float(np.median(ratio))] if len(ratio) else [np.nan, np.nan]
        lines.append(
            GroupErrors(
                name=name,
                rows=int(mine.sum()),
                unmodelled=int((~np.isfinite(ttft.predicted[mine])).sum()),
                tpot_median_pct=cells[0],
                tpot_bias_pct=cells[1],
                ttft_median_pct=cells[2],
                ttft_bias_pct=cells[3],
            )
        )
    return lines


BREAKDOWNS = (
    ("by family and stack", ("family", "stack")),
    ("by model, device and stack", ("model", "precision", "device", "stack", "family")),
    ("by family, stack and requests in flight", ("family", "stack", "load")),
)


def unexplained(
    pair: tuple[Comparison, Comparison], tpot_pct: float = 15.0, ttft_pct: float = 30.0
) -> list[GroupErrors]:
    """Groups of rows (a model on a device behind a stack) whose median error is beyond what a prediction is meant to reach.

    The largest first, by rows times how far beyond.
    """

    def beyond(group: GroupErrors) -> float:
        over = max(group.tpot_median_pct / tpot_pct, group.ttft_median_pct / ttft_pct) - 1.0
        return group.rows * over

    groups = errors_by(pair, "model", "precision", "device", "stack", "family")
    return sorted((group for group in groups if beyond(group) > 0), key=beyond, reverse=True)


GROUP_COLUMNS = (
    "file",
    "by",
    "group",
    "rows",
    "unmodelled",
    "tpot_median_pct",
    "tpot_bias_pct",
    "ttft_median_pct",
    "ttft_bias_pct",
)


def write_groups(pairs: Mapping[str, Pair], path: Path) -> None:
    """Write a row for each group of serving rows of each file, with the columns of `GROUP_COLUMNS`."""
    with open_whole(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(GROUP_COLUMNS)
        for name, pair in pairs.items():
            first = HALVES if name in dict(OWN_FILES) else (("stack",),)
            for by in (*first, *(names for _, names in BREAKDOWNS)):
                for group in errors_by(pair, *by):
                    cells = ("" if np.isnan(value) else f"{value:.2f}" for value in _cells(group))
                    writer.writerow([name, " ".join(by), group.name, group.rows, group.unmodelled, *cells])


def _cells(group: GroupErrors) -> tuple[float, float, float, float]:
    return group.tpot_median_pct, group.tpot_bias_pct, group.ttft_median_pct, group.ttft_bias_pct


def _table(groups: Sequence[GroupErrors]) -> Iterator[str]:
    yield "| rows of | rows | without prediction | TPOT median % | TPOT bias % | TTFT median % | TTFT bias % |"
    yield "| --- | --: | --: | --: | --: | --: | --: |"
    for group in groups:
        cells = " | ".join(_shown(value, "+.1f" if i % 2 else ".1f") for i, value in enumerate(_cells(group)))
        yield f"| {group.name} | {group.rows:,} | {group.unmodelled:,} | {cells} |"


def _shown(value: float, how: str) -> str:
    return "-" if np.isnan(value) else format(value, how)


def served_markdown(found: Sequence[Comparison]) -> str:
    """The part of docs/validation.md on serving runs; what is known of them without a comparison where *found* holds none."""
    parts = [_HEAD]
    parts += [f"* `{name}`: {rule.source}" for name, rule in protocols().items()]
    parts.append(_TERMS)
    for releases in stack_releases().values():
        parts += [f"* {s.name} {s.release}".rstrip() + f": {s.held_back}" for s in releases.values() if s.held_back]
    pair, pairs = served_pair(found), served_pairs(found)
    if pair is not None:
        held = held_back()
        parts += aims_markdown(pairs, pair)
        parts += choices_markdown(pair, {kind: each["choices"] for kind, each in held.items()})
        parts += ["\n### Errors by family and stack\n", *_table(errors_by(pair, "family", "stack"))]
        parts.append(_UNEXPLAINED)
        parts += _table(unexplained(pair))
    parts += _of_their_own(pairs)
    parts.append(_OTHERS)
    return "\n".join(parts)


HALVES = (("half",), ("half", "stack"))
"""The keys by which the page groups the rows of `OWN_FILES`; `write_groups` has models and loads too."""

OWN_FILES = (
    ("e2e_silicon_speculative_agg.csv", "Multi-token prediction"),
    ("e2e_silicon_disagg.csv", "Separate pools"),
    ("e2e_silicon_speculative_disagg.csv", "Separate pools with multi-token prediction"),
)
"""Files with a part of their own, and what it is called."""


def _of_their_own(pairs: Mapping[str, Pair]) -> Iterator[str]:
    """The parts on runs with multi-token prediction, and on separate pools."""
    yield _SPECULATED
    for model, table in speculated.acceptances().items():
        yield from (
            f"* {model}, {k} drafted: {100 * entry['alpha']:.0f} %, {entry['source']}" for k, entry in table.items()
        )
    yield f"\n### Assumptions about separate pools\n\n{ASSUMED}"
    for file, title in OWN_FILES:
        if file not in pairs:
            continue
        pair = pairs[file]
        known = int(np.isfinite(pair[0].predicted).sum())
        yield f"\n### {title}\n\n`{file}`: {known:,} of {len(pair[0].measured):,} rows predicted.\n"
        yield from _table([*_whole(pair), *(g for names in HALVES for g in errors_by(pair, *names))])
    yield _STRANGE_POOLS


def _whole(pair: Pair) -> list[GroupErrors]:
    """All rows as one group."""
    everything = [replace(one, groups={**one.groups, "all": np.full(len(one.measured), "all")}) for one in pair]
    return errors_by((everything[0], everything[1]), "all")


_SPECULATED = """
### Acceptance of drafted tokens

Rows with multi-token prediction say neither how many tokens a round drafted nor how many were accepted. Depths are those of the
benchmark's launch scripts: two with SGLang, three with TensorRT-LLM, one with its data-parallel attention. The chance that a
drafted token is accepted, given that those before it were:
"""
_STRANGE_POOLS = """
What is known of the largest errors:

* SGLang 0.5.8 in NVFP4 on B200, prompts of 1024 tokens: measured first tokens take 3 s at 16 requests in flight and 8 s at 512,
  ten times as long as with multi-token prediction on the same layout. No queue explains it.
* SGLang's prefill workers on B200 in FP8, kept full, compute 22,000 to 26,000 tokens a second with experts over eight devices,
  with and without data-parallel attention, at prompts of 1024 and of 8192 tokens, and 41,000 to 44,000 with every expert on all
  eight. Kernels alone price the first at 40,000 to 50,000. What is missing is the same for each operation of the experts: 4.2 fs,
  which rows of Qwen3.5 over four devices determine (`python -m sim.validation.fit_blocks`). With their kernels that is a rate
  near 175 TFLOP/s. DeepSeek's prompts over eight devices, to which it was not fitted, lack as much: TTFT of 37 rows, 36 % off
  with a time for each token instead, is 29 % off. Which kernels ran is not known: SGLang 0.5.8 chooses FlashInfer's by itself,
  and DeepGEMM with DeepEP, which puts experts on all devices. TensorRT-LLM 1.1 has 3.0 fs.
* Where every expert is on all eight, SGLang sends the rows of prompts by all-reduces, and its prefill servers draw the rank of a
  prompt (both from its sources): TTFT of 16 such rows, 0.48 of what was measured in the median before these two were simulated,
  is 0.70. A kept full worker computes 5 to 10 % more tokens than was measured. On H200, with every expert on all devices and no
  ranks, it computes the 27,000 to 28,000 that are priced.
* SGLang, prompts of 1024 tokens on one prefill worker of eight devices and three decode workers: from 32 requests in flight on
  first tokens come 0.2 to 0.4 s later than is priced, at 16 and fewer they do not. At 32 the worker is busy a tenth of the time.
* Multi-token prediction on one machine: behind TensorRT-LLM 1.1 TPOT lacks what rows of that release without it lack. SGLang's
  lacks 17 to 28 us for each token of a prompt, at prompts of 1024 and 8192 alike, on eight devices without expert parallelism. It
  is not the draft's pass over prompts, which is priced, nor drafting: prefill workers compute as many tokens with it as without.
  The 4.2 fs above would bring TPOT of nine of these rows from 16 to 11 % off, and TTFT of 8192 tokens from 20 % too short to 30 %
  too long.
* Three rows of SGLang with multi-token prediction (8192 tokens, one prefill and six decode workers, 16 to 64 requests in flight)
  take the token times of those without, of which only 8 requests are in the table: their label may be wrong.
* Rows without numbers of workers: of 30, every second one of up to 128 requests in flight, one prefill worker with one, two or
  four decode workers gives the nearest TPOT in 14, 7 and 9. Any one of these for all would leave TPOT 28 to 32 % off, so none is
  assumed.
* TensorRT-LLM with multi-token prediction on H100 at 60 requests in flight and more, and six requests on five decode workers of
  one seat each on B200: TTFT is half of what was measured. There requests wait though other workers have seats free, as if
  workers were not chosen in turn.
"""

_HEAD = """\
Each row of `e2e_silicon_agg.csv` is replayed on a server with the settings of its launch script (`e2e_settings_agg.csv`), under the
stack's own scheduler and account of memory. The client follows the protocol of the row's family:
"""

_TERMS = """
### Terms and errors held back

Errors on deployments and models that the stacks' terms did not see: the terms as they stand, less what those rows did to their
fit on straight lines, at today's prices (`python -m sim.validation.fit_stacks MEASURED --as-they-stand`); those of the eager
stack are of its fit. The tables below replay every row.
"""

_UNEXPLAINED = """
![Errors of serving runs by model, device and stack, and by requests in flight](images/served.png)

### What remains unexplained

The table below has models on devices behind stacks whose median error is beyond 15 % of TPOT or 30 % of TTFT, the most rows and the
farthest first; [files_served.csv](validation/files_served.csv) has all models and loads. No correction is made. What is known:

* TensorRT-LLM in InferenceX: one time of admission stands for all models and devices, and the first tokens of gpt-oss on B200
  come sooner than that. With attention data parallelism prompts are held back until every rank has one, by settings that are
  assumed to be the same in all rows ([evidence](validation/servers.md#ranks)).
* DeepSeek-R1-NVFP4 takes two to four times what its kernels take, as the publishers of the rows say, and informs no fit.
  Qwen3-235B in FP8 blocks behind vLLM 0.12 takes twice as much, which a time of a layer's experts at few tokens explains in part:
  it was fitted to [other servers](validation/power.md#experts-of-vllm-011), and to none of these rows.
* Prompts behind SGLang 0.5.6: those of Qwen3-235B take 0.3 to 0.5 ms a token, several times their kernels.
* SGLang's admission is one constant, 0.124 s for 0.5.9 and 0.060 s for 0.5.6, fitted to models of 8 billion parameters and more.
  Smaller models were not measured: Llama-3.2-1B on one H100 gets a TTFT of 128 and 68 ms, against 19 ms behind vLLM.
* Experts at few clients: with 4 in flight MiniMax-M2.5 behind vLLM takes 16 us (FP4) and 35 us (FP8) a layer more than its
  kernels, gpt-oss behind it on Hopper 24, Qwen3.5 and GLM-5 behind SGLang about 30. One time of a layer with experts, offered to
  the fit, was put on zero for vLLM. 12 us would bring its rows with experts from 6.9 to 5.9 % of TPOT; taken from the other
  models it brings MiniMax-M2.5 from 12 to 9 % and Kimi-K2.5 from 5.5 to 5, and gpt-oss from 5 to 8, so that it is not used.
  SGLang's deployments that a fit had not seen were no better for it.
* GLM-5 in FP4 behind SGLang on B200: a decode step of four sequences takes 5 ms more than its kernels, 66 us a layer, and prompts
  of 8,192 tokens take 1.5 times as long. In FP8 on the same device, with the same modules of sparse attention, steps are 9 % off.
* DeepSeek behind TensorRT-LLM: rows of 2026-01-14 are as fast as those of that day with multi-token prediction, and may have had
  it. Two of FP8 on B200, which are called without it, stand at the very loads that the table lacks with it (8 and 32 requests),
  and their times continue those of the loads beside them. Replayed with it they are 20 and 4 % too fast in TPOT, without 62 and
  43 % too slow. In FP8 on B200 (1.1.0rc2, experts over 8 devices, December 2025) a decode step takes 56 to 89 us a layer more
  than kernels, about as much with 4 clients as with 64, and prompts 1.5 times as long. In FP4, with the same attention,
  collectives and head, steps of other releases are right within 14 % up to 128 clients. Two terms of release 1.1 stand for it: 68
  us a layer, fitted to these rows and judged by those with multi-token prediction, and 0.26 us for each token of a prompt and
  layer, taken from SGLang.
* First tokens of gpt-oss behind TensorRT-LLM at 4 and 8 clients would need an admission of 9 to 14 ms on one B200, 21 to 31 on
  two to eight, 33 to 62 on two H200, 50 to 73 on four and 63 to 89 on eight; DeepSeek's on B200 63 to 114. It grows with the
  devices on H200 and not on B200, so that no count of tokens, ranks or parameters gives it.
* Rows of no known concurrency are replayed at their batch size.
"""

_OTHERS = """
### Beside another predictor

aiconfigurator 0.12 (tables of measured kernels, November 2026) covers 1,662 of the 2,644 aggregated rows published then. On the
1,524 rows common to both its median error is 14.0 % of TPOT and 44.8 % of TTFT. Rooftrace had 11.0 and 43.4 % before rows were
replayed by their protocols. The rows here are a sample of those.
"""
