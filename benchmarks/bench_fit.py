"""How well deployments fitted to few of their runs predict the others, and whether the intervals hold.

    python -m benchmarks.bench_fit served [--concurrency lowest|middle|highest] [../shared/measured2]
    python -m benchmarks.bench_fit inference-perf [../shared/serving]
    python -m benchmarks.bench_fit synthetic [--trials 100]
    python -m benchmarks.bench_fit eight

`served`: each deployment of the aggregated serving rows is fitted to its rows of one concurrency, and predicts those of the others.
`inference-perf`: Llama-3.1-8B on one H100 fitted to its lowest rate, and to that and the highest rate that the server kept up with.
`synthetic`: eight simulated runs of a deployment whose terms are drawn from the priors, with noise, one of them of another server;
how often the terms come back. `eight`: how long a fit to eight runs takes, as seconds of one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.bench.cases import cases_of, priors_of
from sim.bench.fitting import ERRORS, QUANTITIES, Case, Fit, Prediction, fit
from sim.bench.measured import BenchRun, Latency, Lengths, Offered
from sim.bench.parameters import KV, PARAMETERS, Z90, Prior, Setting, own_value, setting_at
from sim.bench.public import Unmodelled, case_of_row, deployments, inference_perf
from sim.scenario import Scenario
from sim.validation.fit_stacks import fold_of

MOST_CLIENTS = 256
"""Rows of more clients are neither fitted nor predicted here: each takes as long as all others of its deployment."""
NOISE = {"tpot_s": 0.02, "ttft_s": 0.06}
"""Standard deviations of the log, as repeats of measurements have them."""
BAD_FACTOR = 1.6
"""The figures of the run that is of another server are multiplied by it."""
PLACES = ("lowest", "middle", "highest")


def served(folder: Path, place: str, every: int, offset: int, table: Path | None) -> None:
    """Prints the errors of rows whose concurrency the fit had not seen; *table* gets each of them as a line of CSV."""
    found: list[tuple[str, str, Prediction, float]] = []
    lines = ["deployment,quantity,clients,fitted_clients,measured_s,predicted_s,low_s,high_s"]
    left_out: dict[str, int] = {}
    deployments_fitted = 0
    for i, (name, rows) in enumerate(sorted(deployments(folder).items())):
        if i % every != offset:
            continue
        cases = _cases(rows, folder, left_out)
        levels = sorted({clients for clients, _, _ in cases})
        if len(levels) < 2:
            continue
        level = {"lowest": levels[0], "middle": levels[len(levels) // 2], "highest": levels[-1]}[place]
        mine = [case for clients, case, _ in cases if clients == level]
        fitted = fit(mine, cases[0][2], priors_of(mine[0]))
        deployments_fitted += 1
        for clients, case, base in cases:
            if clients != level:
                before = case.replay(base).figures
                stack = name.split("|")[2]
                predicted = fitted.predict(case)
                found += [(name, stack, each, before[each.quantity] / each.measured_s - 1.0) for each in predicted]
                lines += [
                    f"{name},{p.quantity},{clients},{level},{p.measured_s},{p.predicted_s},{p.low_s},{p.high_s}"
                    for p in predicted
                ]
        print(f"  {name}: {len(mine)} rows at {level} clients, {len(cases) - len(mine)} predicted", flush=True)
        if table is not None:
            table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\n{deployments_fitted} deployments, each fitted to its rows at its {place} concurrency alone")
    for why, rows_left in sorted(left_out.items()):
        print(f"left out: {rows_left} rows, {why}")
    _print_errors(found)
    _print_widths(found)


def _cases(
    rows: Sequence[Mapping[str, Any]], folder: Path, left_out: dict[str, int]
) -> list[tuple[int, Case, Setting]]:
    """Clients, case and setting of each row; why others cannot be replayed is counted in *left_out*."""
    cases: list[tuple[int, Case, Setting]] = []
    for row in rows:
        try:
            case, base = case_of_row(row, folder)
        except Unmodelled as error:
            left_out[str(error)] = left_out.get(str(error), 0) + 1
            continue
        clients = int(case.name.split(", ")[1].split(" ")[0])
        if clients <= MOST_CLIENTS:
            cases.append((clients, case, base))
        else:
            why = f"more than {MOST_CLIENTS} clients"
            left_out[why] = left_out.get(why, 0) + 1
    return cases


def _print_errors(found: Sequence[tuple[str, str, Prediction, float]]) -> None:
    """A table by stack and quantity of deployments, stacks, predictions and errors before the fit."""
    print(
        "| stack | quantity | rows predicted | unfitted median % | median % | mean % | median over deployments % | in 90 % |"
    )
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for stack in ("all", *sorted({each[1] for each in found})):
        for quantity in QUANTITIES:
            some = [each for each in found if each[2].quantity == quantity and stack in ("all", each[1])]
            off = 100 * np.abs([each[2].error for each in some])
            before = 100 * np.abs([each[3] for each in some])
            names = [each[0] for each in some]
            by = [np.median([o for o, n in zip(off, names, strict=True) if n == name]) for name in sorted(set(names))]
            held = 100 * np.mean([each[2].held for each in some])
            print(
                f"| {stack} | {quantity.removesuffix('_s').upper()} | {len(some)} | {np.median(before):.1f} | "
                f"{np.median(off):.1f} | {np.mean(off):.1f} | {np.median(by):.1f} | {held:.1f} % |"
            )


def _print_widths(found: Sequence[tuple[str, str, Prediction, float]]) -> None:
    """How wide the errors of runs that a fit has not seen must be taken: by the deployments of one half, for the other."""
    for quantity in QUANTITIES:
        some = [each for each in found if each[2].quantity == quantity]
        halves = [[each[2] for each in some if fold_of(each[0]) % 2 == half] for half in (0, 1)]
        if not all(halves):
            continue
        for half, rows in enumerate(halves):
            deviation = width_of(rows, quantity)
            own, other, stated = (
                100 * share_held(each, quantity, width)
                for each, width in (
                    (rows, deviation),
                    (halves[1 - half], deviation),
                    (rows, ERRORS.unseen[quantity]),
                )
            )
            print(
                f"{quantity}: a deviation of {100 * deviation:.1f} % holds {own:.1f} % of half {half} of the deployments "
                f"({len(rows)} rows) and {other:.1f} % of the other; the stated {100 * ERRORS.unseen[quantity]:.1f} % hold "
                f"{stated:.1f} % of half {half}"
            )


def share_held(rows: Sequence[Prediction], quantity: str, deviation: float) -> float:
    """The share of *rows* whose 90 % intervals hold, were what fits leave unexplained of that standard deviation."""
    stated = Z90 * ERRORS.of_unseen(quantity)
    own = Z90 * np.hypot(deviation, ERRORS.repeat[quantity])
    held = []
    for each in rows:
        off = np.log(each.measured_s / each.predicted_s)
        end = np.log((each.high_s if off > 0 else each.low_s) / each.predicted_s)
        held.append(abs(off) <= np.sqrt(max(end**2 - stated**2, 0.0) + own**2))
    return float(np.mean(held))


def width_of(rows: Sequence[Prediction], quantity: str) -> float:
    """The smallest standard deviation, in steps of 0.1 %, with which nine in ten of *rows* are held."""
    return next(
        (width for width in np.arange(0.0, 1.0, 0.001).tolist() if share_held(rows, quantity, width) >= 0.9),
        float("nan"),
    )


def inference(folder: Path) -> None:
    """Prints the errors of the stages that a fit had not seen."""
    held: list[bool] = []
    print("| arm | fitted to | quantity | mean absolute % | median % | each stage % (* saturated) |")
    print("| --- | --- | --- | --: | --: | --- |")
    every: dict[tuple[str, str], list[float]] = {}
    for arm, (scenario, runs) in inference_perf(folder).items():
        cases, base = cases_of(scenario, runs)
        kept_up = max(i for i, run in enumerate(runs) if run.saturated is False)
        for what, which in (("unfitted", ()), ("lowest", (0,)), ("two", (0, kept_up))):
            others = [i for i in range(len(runs)) if i not in which]
            if which:
                fitted = fit([cases[i] for i in which], base, priors_of(cases[0]))
                predicted = [each for i in others for each in fitted.predict(cases[i])]
                held += [each.held for each in predicted]
                off = {q: [each.error for each in predicted if each.quantity == q] for q in QUANTITIES}
            else:
                figures = [cases[i].replay(base).figures for i in others]
                off = {
                    q: [f[q] / cases[i].measured_s[q] - 1.0 for i, f in zip(others, figures, strict=True)]
                    for q in QUANTITIES
                }
            for quantity, errors in off.items():
                every.setdefault((what, quantity), []).extend(errors)
                each = " ".join(
                    f"{100 * error:+.0f}{'*' if runs[i].saturated else ''}"
                    for i, error in zip(others, errors, strict=True)
                )
                print(
                    f"| {arm} | {what} | {quantity.removesuffix('_s').upper()} | {100 * np.mean(np.abs(errors)):.1f} | "
                    f"{100 * np.median(np.abs(errors)):.1f} | {each} |",
                    flush=True,
                )
    for (what, quantity), errors in every.items():
        print(
            f"all arms, {what}: {quantity.removesuffix('_s').upper()} mean absolute {100 * np.mean(np.abs(errors)):.1f} %, median "
            f"{100 * np.median(np.abs(errors)):.1f} %"
        )
    print(f"90 % intervals hold {100 * np.mean(held):.1f} % of {len(held)} figures of stages that were not fitted")


LOADS = (
    (1, 256, 64),
    (4, 512, 128),
    (8, 1024, 128),
    (16, 256, 128),
    (16, 2048, 64),
    (32, 512, 64),
    (48, 1024, 64),
    (64, 256, 64),
)
"""Clients, tokens of prompts and of outputs of the eight runs."""


def eight_runs() -> list[BenchRun]:
    """Eight runs of closed loops, nothing of them measured."""
    return [
        BenchRun(
            name=f"{clients} clients, {prompt} + {output}",
            file="",
            format="synthetic",
            offered=Offered(
                concurrency=clients,
                requests=max(8, 4 * clients),
                prompt=Lengths(mean_tokens=prompt, std_tokens=0.0),
                output=Lengths(mean_tokens=output, std_tokens=0.0),
            ),
            ttft=Latency(mean_s=1.0),
            tpot=Latency(mean_s=1.0),
        )
        for clients, prompt, output in LOADS
    ]


def synthetic_case(
    rng: np.random.Generator, cases: Sequence[Case], base: Setting, widths: dict[str, Prior]
) -> tuple[Setting, list[Case], int]:
    """A truth drawn from the priors, the cases as it would have been measured, and which of them is of another server."""
    names = [each.name for each in PARAMETERS if each.name != KV]
    truth = setting_at(base, names, [widths[name].width * rng.standard_normal() for name in names])
    bad = int(rng.integers(len(cases)))
    measured = []
    for i, case in enumerate(cases):
        figures = case.replay(truth).figures
        factor = BAD_FACTOR if i == bad else 1.0
        seconds = {q: figures[q] * factor * float(np.exp(NOISE[q] * rng.standard_normal())) for q in QUANTITIES}
        measured.append(replace(case, measured_s=seconds))
    return truth, measured, bad


def recovered(truth: Setting, found: Fit) -> dict[str, bool]:
    """Whether each parameter's 95 % interval holds the truth."""
    inside = {}
    for name in found.posterior.names:
        low, high = found.posterior.interval(name, 1.96)
        slack = 1e-9 + 1e-6 * abs(high)
        inside[name] = low - slack <= own_value(truth, name) <= high + slack
    return inside


def synthetic(trials: int, seed: int = 0) -> None:
    """Prints how often the terms of a known truth come back within their 95 % intervals."""
    scenario = Scenario.default()
    cases, base = cases_of(scenario, eight_runs())
    widths = priors_of(cases[0])
    inside: dict[str, list[bool]] = {}
    found_bad = 0
    for trial in range(trials):
        rng = np.random.default_rng([seed, trial])
        truth, measured, bad = synthetic_case(rng, cases, base, widths)
        found = fit(measured, base, widths)
        found_bad += bad in found.contradicting
        for name, held in recovered(truth, found).items():
            inside.setdefault(name, []).append(held)
        if (trial + 1) % 10 == 0:
            print(f"  {trial + 1} trials", flush=True)
    print(
        f"{trials} trials of eight runs with noise (log sd {NOISE}), one of another server (figures times {BAD_FACTOR:g})"
    )
    for name, held in inside.items():
        print(f"| {name} | {sum(held)} of {len(held)} within its 95 % interval |")
    together = np.array(list(inside.values()))
    print(
        f"all parameters at once: {int(together.all(axis=0).sum())} of {trials}; on average {100 * together.mean():.1f} %"
    )
    print(f"the bad run was set aside in {found_bad} of {trials}")


def eight() -> None:
    """Prints what a fit to eight runs and their predictions left out take."""
    cases, base = cases_of(Scenario.default(), eight_runs())
    widths = priors_of(cases[0])
    _, measured, _ = synthetic_case(np.random.default_rng(1), cases, base, widths)
    began, wall = time.process_time(), time.perf_counter()
    found = fit(measured, base, widths)
    found.left_out()
    print(
        f"{time.process_time() - began:.1f} s of one core ({time.perf_counter() - wall:.1f} s), {found.replays} replays"
    )


def main() -> None:
    """Runs one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("served", "inference-perf", "synthetic", "eight"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--concurrency", choices=PLACES, default="lowest")
    parser.add_argument("--every", type=int, default=1, help="of the deployments, every so many-th alone")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--table", type=Path, help="of served: a CSV file for every figure predicted")
    told: Any = parser.parse_intermixed_args()
    if told.part == "served":
        served(told.folder or Path("../shared/measured2"), told.concurrency, told.every, told.offset, told.table)
    elif told.part == "inference-perf":
        inference(told.folder or Path("../shared/serving"))
    elif told.part == "synthetic":
        synthetic(told.trials)
    else:
        eight()


if __name__ == "__main__":
    main()
