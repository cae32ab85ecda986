"""Fit serving stacks' overheads to measured serving runs and iterations, part of the deployments held back.

`python -m sim.validation.fit_stacks MEASURED [STACK ...]` prints, for each stack, the terms of a fit on all deployments as they
stand in hwmodels/overheads.toml, and the errors on deployments that a fit did not see. A term that the data put on zero
is left out and the others fitted again; one that moves nothing where the fit ends, a floor below every layer say, is left
out too; one that ends on its upper bound is an error.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.kernels.parameters import bounds
from hwmodels.measured import Measurement, read
from hwmodels.overheads import Overheads, ServingStack, serving_stack
from sim.validation.runs import (
    Unmodelled,
    served_s,
    iteration_s,
    latencies_s,
    replayed,
    rows_of,
    served_run,
    speculates,
)

SERVED = ("step_s", "sequence_s", "row_s", "layer_host_s", "expert_host_s", "launch_overlap", "sustained_loss", "narrow_loss",
          "expand_loss", "admission_s", "admission_s_per_token")  # fmt: skip
EAGER = ("step_s", "sequence_s", "row_s", "layer_host_s", "sustained_loss")
TAKEN_OVER = {"trtllm": ("layer_host_s",), "sglang": ("layer_host_s", "sustained_loss")}
"""Terms that a stack takes from vLLM's fit: only vLLM has runs of models without experts, which tell them from
expert_host_s, and a recorded run in 16 bits, which tells sustained_loss from narrow_loss."""
NOT_OFFERED = {"trtllm": ("narrow_loss",)}
"""TensorRT-LLM's rows cannot tell two losses apart, and vLLM's fit is of other kernels: one loss stands for both."""
DERIVED = {"trtllm": ("expand_loss",), "sglang": ("expand_loss",)}
"""Terms that kernels of the stack itself say (`expansion_loss`): its serving runs hold one such deployment, or none."""
RECORDED = "e2e_requests_*.csv"
START = {"step_s": 2e-4, "sequence_s": 1e-5, "row_s": 2e-6, "layer_host_s": 3e-4, "expert_host_s": 3e-4, "launch_overlap": 0.1,
         "sustained_loss": 0.3, "narrow_loss": 0.4, "expand_loss": 1.5, "admission_s": 2e-2,
         "admission_s_per_token": 4e-6}  # fmt: skip
EAGER_START = {"step_s": 2e-3, "sequence_s": 1e-4, "row_s": 2e-5, "layer_host_s": 4e-4, "sustained_loss": 0.2}
# Tighter than what `Overheads` accepts of anyone: more is no compiled stack's host work.
_HIGH = {"step_s": 5e-3, "sequence_s": 2e-4, "row_s": 5e-5}
MARGIN = 0.01
"""A fitted value this share of the range from a bound, or nearer, lies on it."""
_DEPLOYMENT = ("model_path", "system", "backend_version", "gemm_quant_mode", "tp_size", "attention_dp_size",
               "moe_tp_size", "moe_ep_size")  # fmt: skip
_WEIGHTS = np.array([1.0, 0.5])  # a run's TTFT varies several times as much between repeats as its TPOT
_RECORDED_WEIGHT = 30.0
"""Rows that the recorded run counts for: those of a deployment."""
_MOST_CLIENTS = 16
"""Runs of more clients are scored and not fitted: simulating them takes most of the time."""
_ROWS = 96
"""Rows of a stack that are fitted at most, chosen by a hash; all are scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A row, its measured seconds of two quantities, and what must be held back together with it."""

    row: Mapping[str, Any]
    measured_s: tuple[float, float]
    group: str
    recorded: Measurement | None = None
    """A run replayed request by request; its prediction is the median ratio times the measured median."""
    weight: float = 1.0


def left_out(row: Mapping[str, Any]) -> str:
    """Why a serving row informs no fit; empty where it does. The rule looks at how the row was run alone."""
    return "ran with multi-token prediction" if speculates(row) else ""


def _served_points(folder: Path, stack: str, *, out: bool = False) -> list[_Point]:
    """The rows of *stack* that a fit may see, or with *out* those that `left_out` keeps from it."""
    points = []
    for row in rows_of(read(folder / "e2e_silicon_agg.csv")):
        if row["backend"] != stack or bool(left_out(row)) != out:
            continue
        group = "|".join(str(row[name]) for name in _DEPLOYMENT)
        points.append(_Point(row=row, measured_s=(row["tpot_ms"] * 1e-3, row["ttft_ms"] * 1e-3), group=group))
    return points


def _recorded_points(folder: Path, stack: str) -> list[_Point]:
    points = []
    for path in sorted(folder.glob(RECORDED)):
        run = read(path)
        if run.source == stack:
            tpot, ttft = (float(np.nanmedian(values)) for values in _recorded_s(run))
            points.append(
                _Point(row={}, measured_s=(tpot, ttft), group=path.stem, recorded=run, weight=_RECORDED_WEIGHT)
            )
    return points


def _recorded_s(run: Measurement) -> tuple[np.ndarray, np.ndarray]:
    """Measured TPOT (NaN for one output token) and TTFT of each request."""
    first, last, arrival, tokens = (
        run.columns[name] for name in ("first_token_s", "last_token_s", "arrival_s", "output_toks")
    )
    return np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), np.nan), first - arrival


def _eager_points(folder: Path) -> list[_Point]:
    points = []
    for path in sorted(folder.glob("iteration_*.csv")):
        for row in rows_of(read(path)):
            if row["flag"] == "ok":
                group = f"{row['model']}|{row['tensor_parallel']:g}"
                seconds = (row["token_time_ms"] * 1e-3, row["prompt_time_ms"] * 1e-3)
                points.append(_Point(row=row, measured_s=seconds, group=group))
    return points


def _predict(point: _Point, stack: ServingStack) -> tuple[float, float]:
    try:
        if point.recorded is not None:
            run, order = replayed(point.recorded, stack=stack)
            ttft, tpot = latencies_s(run)
            ratios = [
                float(np.exp(np.nanmedian(np.log(mine / theirs[order]))))
                for mine, theirs in zip((tpot, ttft), _recorded_s(point.recorded), strict=True)
            ]
            return point.measured_s[0] * ratios[0], point.measured_s[1] * ratios[1]
        if "prompt_size" in point.row:
            prompt_s, token_s = iteration_s(point.row, stack=stack)
            return token_s, prompt_s
        ttft_s, tpot_s = served_s(served_run(point.row), stack=stack)
        return tpot_s, ttft_s
    except Unmodelled:
        return np.nan, np.nan


def limits(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Lowest and highest value that a fit of *names* may give each."""
    high = {} if tuple(names) == EAGER else _HIGH
    known = bounds(Overheads)
    return {name: (known[name][1], high.get(name, known[name][2])) for name in names}


def on_bound(name: str, value: float, low: float, high: float) -> str:
    """Which bound *value* lies on, `low` or `high`; empty: neither."""
    margin = MARGIN * (high - low)
    return "low" if value - low <= margin else "high" if high - value <= margin else ""


def residuals(points: Sequence[_Point], predicted: np.ndarray) -> np.ndarray:
    """What the fit makes small: weighted log ratios, two a point; nothing for what cannot be priced."""
    measured = np.log([p.measured_s for p in points])
    weight = np.sqrt([p.weight for p in points])[:, None] * _WEIGHTS
    return np.nan_to_num((np.log(predicted) - measured) * weight, nan=0.0).ravel()


def undetermined(
    points: Sequence[_Point],
    stack: ServingStack,
    names: Sequence[str],
    price: Callable[[Sequence[_Point], ServingStack], np.ndarray],
) -> list[str]:
    """Terms of *names* that do not move the fit: a tenth more or less changes no residual by 1e-4."""
    here = residuals(points, price(points, stack))
    found = []
    for name in names:
        value = getattr(stack.overheads, name)
        moved = replace(stack, overheads=replace(stack.overheads, **{name: 1.1 * value}))
        if not np.abs(residuals(points, price(points, moved)) - here).max() > 1e-4:
            found.append(name)
    return found


def fit_stack(
    points: Sequence[_Point],
    stack: ServingStack,
    names: Sequence[str],
    price: Callable[[Sequence[_Point], ServingStack], np.ndarray],
    *,
    steps: int,
    go_on: bool = False,
) -> ServingStack:
    """*stack* with the terms *names* fitted to *points* within their limits, by robust least squares on log ratios.

    Starts at `START`, or with *go_on* at the stack's own values.
    """
    from scipy.optimize import least_squares

    begin = EAGER_START if tuple(names) == EAGER else START
    if go_on:
        begin = {name: getattr(stack.overheads, name) for name in names}
    scale = np.array([begin[name] for name in names])
    high = np.array([limits(names)[name][1] for name in names]) / scale

    def built(x: np.ndarray) -> ServingStack:
        terms = {name: float(value) for name, value in zip(names, x * scale, strict=True)}
        return replace(stack, overheads=replace(stack.overheads, **terms))

    # Wide steps: tiles and batches make the simulated time a staircase.
    best = least_squares(
        lambda x: residuals(points, price(points, built(x))),
        np.ones(len(names)),
        bounds=(0.0, high),
        loss="cauchy",
        f_scale=0.08,
        diff_step=0.05,
        max_nfev=steps,
    )
    return built(best.x)


def refits(
    points: Sequence[_Point],
    fitted: ServingStack,
    names: Sequence[str],
    price: Callable[[Sequence[_Point], ServingStack], np.ndarray],
    keep: Sequence[np.ndarray],
) -> list[ServingStack]:
    """*fitted* fitted again to part of its *points*, once for each mask of *keep*, the model linearised around *fitted*.

    Whole fits of each part would take as many simulations again; what a part leaves out has no say but in the point
    around which the model is linear.
    """
    from scipy.optimize import least_squares

    value = np.array([getattr(fitted.overheads, name) for name in names])
    high = np.array([limits(names)[name][1] for name in names])
    here = residuals(points, price(points, fitted))
    columns = []
    for name, x in zip(names, value, strict=True):
        moved = replace(fitted, overheads=replace(fitted.overheads, **{name: 1.05 * x}))
        columns.append((residuals(points, price(points, moved)) - here) / 0.05)
    slope = np.stack(columns, axis=1)
    found = []
    for mask in keep:
        rows = np.repeat(mask, 2)
        best = least_squares(
            lambda u, rows=rows: here[rows] + slope[rows] @ (u - 1.0),
            np.ones(len(names)),
            bounds=(0.0, high / value),
            loss="cauchy",
            f_scale=0.08,
        )
        terms = {name: float(v) for name, v in zip(names, best.x * value, strict=True)}
        found.append(replace(fitted, overheads=replace(fitted.overheads, **terms)))
    return found


def fit_what_matters(
    points: Sequence[_Point],
    stack: ServingStack,
    names: Sequence[str],
    price: Callable[[Sequence[_Point], ServingStack], np.ndarray],
    *,
    steps: int,
) -> tuple[ServingStack, tuple[str, ...]]:
    """The fit of those of *names* that it does not put on zero, and their names; ValueError for one on its upper bound."""
    begun = False
    while names:
        fitted = fit_stack(points, stack, names, price, steps=steps, go_on=begun)
        side = {name: on_bound(name, getattr(fitted.overheads, name), *limits(names)[name]) for name in names}
        if high := [name for name in names if side[name] == "high"]:
            raise ValueError(f"{stack.name}: {high[0]} ends on its upper bound, {limits(names)[high[0]][1]:g}")
        zero = {name for name in names if side[name] == "low"}
        if not zero:
            idle = undetermined(points, fitted, names, price)
            if not idle:
                return fitted, tuple(names)
            # What moves nothing is left out without another fit: the others are where they would be.
            print(f"{stack.name}: the fit does not move {', '.join(idle)}: left out", flush=True)
            kept = tuple(name for name in names if name not in idle)
            return replace(fitted, overheads=replace(fitted.overheads, **dict.fromkeys(idle, 0.0))), kept
        print(f"{stack.name}: the data put {', '.join(sorted(zero))} on zero: left out", flush=True)
        stack = replace(fitted, overheads=replace(fitted.overheads, **dict.fromkeys(zero, 0.0)))
        names, begun = [name for name in names if name not in zero], True
    return stack, ()


def _hash(text: str) -> bytes:
    # Not a CRC: that is linear in the bits of the text, and names that differ in pairs fall together.
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _held(group: str, part: int) -> bool:
    return _hash(group)[0] % 2 == part


def _scores(points: Sequence[_Point], predicted: np.ndarray) -> str:
    measured = np.array([p.measured_s for p in points])
    off = 100.0 * np.abs(predicted / measured - 1.0)
    found = np.nanmedian(off, axis=0)
    mean = np.nanmean(off, axis=0)
    return f"median {found[0]:.1f} % and {found[1]:.1f} %, mean {mean[0]:.1f} % and {mean[1]:.1f} %"


def main(folder: Path, stacks: Sequence[str]) -> None:
    with ProcessPoolExecutor(2) as pool:

        def price(points: Sequence[_Point], stack: ServingStack) -> np.ndarray:
            return np.array(list(pool.map(_predict, points, [stack] * len(points), chunksize=8)))

        taken: dict[str, float] = {}
        for name in stacks:
            stack = serving_stack(name)
            eager = name == "eager"
            points = _eager_points(folder) if eager else _served_points(folder, name)
            outside = [] if eager else _served_points(folder, name, out=True)
            recorded = [] if eager else _recorded_points(folder, name)
            terms: Sequence[str] = EAGER if eager else [t for t in SERVED if t not in _given(name)]
            if name in TAKEN_OVER:
                values = {t: taken.get(t, getattr(serving_stack("vllm").overheads, t)) for t in TAKEN_OVER[name]}
                stack = replace(stack, overheads=replace(stack.overheads, **values))
            outside_fit = {t: 0.0 for t in NOT_OFFERED.get(name, ())}
            stack = replace(stack, overheads=replace(stack.overheads, **outside_fit))
            light = [p for p in points if not p.row.get("concurrency", 0) > _MOST_CLIENTS]
            light = sorted(light, key=lambda p: _hash(str(sorted(p.row.items()))))[:_ROWS]
            used = [*light, *recorded]
            final, terms = fit_what_matters(used, stack, terms, price, steps=30 if eager else 6)
            taken |= {t: getattr(final.overheads, t) for t in ("layer_host_s", "sustained_loss") if name == "vllm"}
            print(f"{name}: all {len(points)} rows: {_scores(points, price(points, final))}")
            for term in terms:
                print(f"{term} = {getattr(final.overheads, term):.4g}")
            sys.stdout.flush()
            # The recorded run is in both halves, for it is scored in neither; the last fit is that of all but the run.
            parts = [np.array([p.recorded is not None or not _held(p.group, part) for p in used]) for part in (0, 1)]
            parts.append(np.array([p.recorded is None for p in used]))
            *halves, blind = refits(used, final, terms, price, parts)
            seen_by = {half: [p for p in points if _held(p.group, half)] for half in (0, 1)}
            beside = {half: [p for p in outside if _held(p.group, half)] for half in (0, 1)}
            scored = [p for half in (0, 1) for p in seen_by[half]]
            predicted = [price(seen_by[half], halves[half]) for half in (0, 1) if seen_by[half]]
            print(f"{name}: held back, second quantity after the first, {len(scored)} rows: ", end="")
            print(_scores(scored, np.concatenate(predicted)), flush=True)
            if outside:
                predicted += [price(beside[half], halves[half]) for half in (0, 1) if beside[half]]
                scored += [p for half in (0, 1) for p in beside[half]]
                print(f"{name}: and with the {len(outside)} rows left out: ", end="")
                print(_scores(scored, np.concatenate(predicted)), flush=True)
            for said, fitted in (("fitted to it", final), ("fitted without it", blind)):
                for point in recorded:
                    print(f"{name}: recorded run, {said}: {_recorded_errors(point, fitted)}", flush=True)


def _given(stack: str) -> tuple[str, ...]:
    return (*TAKEN_OVER.get(stack, ()), *DERIVED.get(stack, ()), *NOT_OFFERED.get(stack, ()))


_LONG_TOKENS = 4096
_NODE = 8


def expansion_loss(folder: Path, source: str) -> float:
    """`expand_loss` from grouped GEMMs of *source* whose weights are expanded to 16 bits, in the moe files of *folder*.

    The median over experts of whole models (gpt-oss, Kimi) on at most a node and at least 4096 tokens of (measured -
    predicted) / (time at the peak), the prediction being that of narrow weights without any loss. Devices that multiply
    the format themselves are left out.
    """
    from hwmodels.device import load_device
    from hwmodels.measured import catalogue_name, predict
    from hwmodels.profiles import load_profile

    losses = []
    for path in sorted(folder.glob("moe_*.csv")):
        table = read(path)
        if table.source != source or table.kind != "moe":
            continue
        device = load_device(catalogue_name(table.device))
        sheet = load_profile(device.name).datasheet
        c = table.columns
        mine = np.isin(c["moe_dtype"], ("w4a16_mxfp4", "int4_wo")) & ("fp4" not in sheet.peak_flops_per_s)
        mine &= np.isin(c["topk"] * 1000 + c["num_experts"], (4128, 8384)) & (c["num_tokens"] >= _LONG_TOKENS)
        mine &= (c["moe_tp_size"] * c["moe_ep_size"] <= _NODE) & (c["distribution"] == "power_law_1.01")
        if not mine.any():
            continue
        assert table.measured_s is not None
        gap_s = table.measured_s - predict(table, load_profile(device.name)).seconds
        flops = (
            6.0 * c["num_tokens"] * c["topk"] / c["moe_ep_size"] * c["hidden_size"] * c["inter_size"] / c["moe_tp_size"]
        )
        losses += (gap_s / (flops / sheet.flops_per_s("bf16")))[mine].tolist()
    if not losses:
        raise ValueError(f"{folder} holds no grouped GEMMs of {source} with weights of four bits in 16-bit arithmetic")
    return max(0.0, float(np.median(losses)))


def _recorded_errors(point: _Point, stack: ServingStack) -> str:
    assert point.recorded is not None
    run, order = replayed(point.recorded, stack=stack)
    ttft, tpot = latencies_s(run)
    texts = []
    for what, mine, theirs in zip(("TPOT", "TTFT"), (tpot, ttft), _recorded_s(point.recorded), strict=True):
        off = 100.0 * np.abs(mine / theirs[order] - 1.0)
        texts.append(f"{what} median {np.nanmedian(off):.1f} % (mean {np.nanmean(off):.1f} %)")
    return ", ".join(texts)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m sim.validation.fit_stacks [--expansion] MEASURED_DIR [STACK ...]")
    if sys.argv[1] == "--expansion":
        for source in sys.argv[3:] or DERIVED:
            print(f"{source}: expand_loss = {expansion_loss(Path(sys.argv[2]), source):.4g}")
        sys.exit()
    main(Path(sys.argv[1]), sys.argv[2:] or ["vllm", "trtllm", "sglang", "eager"])
