"""Autoscalers by forecast, by the present load and by perfect foresight, over a week: money and missed limits.

python -m benchmarks.forecasts [LOAD ...] [--only POLICY ...] [--days 7] [--json FILE]
python -m benchmarks.forecasts --json FILE --plot FILE

Two loads, each with the week before it as its history:

* servegen: when requests came in the second week of ServeGen's m-small, of the clients whose lengths are published, so
  many that 0.35 a second come on average. Its requests are tiny; lengths are drawn as for the other load.
* weekly: drawn from a rate with days and weekends in the style of Azure's conversations of May 2024 (the trace itself is not used):
  the same on average, three times as many in the afternoon as at night, 40 % fewer at weekends, 5 % more each week, noise that
  lasts an hour, and three half hours with half as many again that no forecast knows.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim import Result, Scenario, simulate
from sim.metrics.fleet import fleet_figures
from sim.results.costs import usd_per_machine_hour
from workloads import LogNormal, ServeGen

WEEK_S, DAY_S, STEP_S, INTERVAL_S = 604_800, 86_400, 300, 60
MEAN_PER_S = 0.35
CAPACITY_PER_S = 0.14
"""The rate that one machine serves with 99 % of its requests within the limits: `rooftrace capacity --slo`."""
CONCURRENCY = 12.0
"""Requests that a machine has under way on average at that rate."""
SLO = {"ttft_s": 2.0, "tpot_s": 0.025}
START = "qwen3-32b-h100-cold"

_FORECAST = {"rate_per_s": CAPACITY_PER_S, "step_s": float(STEP_S)}
_REACTIVE = {"policy": "concurrency", "target": CONCURRENCY}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "perfect": {"policy": "perfect", "rate_per_s": CAPACITY_PER_S, "step_s": float(STEP_S)},
    "last_value": {"policy": "last_value", **_FORECAST},
    "kalman": {"policy": "kalman", **_FORECAST},
    "arima": {"policy": "arima", **_FORECAST},
    "seasonal_naive, day": {"policy": "seasonal_naive", **_FORECAST},
    "seasonal_naive, week": {"policy": "seasonal_naive", "season_s": float(WEEK_S), **_FORECAST},
    "holt_winters": {"policy": "holt_winters", **_FORECAST},
    "holt_winters or concurrency": {"policy": "holt_winters", "inner": _REACTIVE, **_FORECAST},
    "concurrency": _REACTIVE,
    "knative": {"policy": "knative", "target": CONCURRENCY, "utilization": 1.0},
    "rate_model": {"policy": "rate_model", "rate_per_s": CAPACITY_PER_S, "ttft_s": 2.0},
}
"""The policies that are compared. Those with a forecast know the week before."""


@dataclass(frozen=True)
class Load:
    """Arrivals of a week, and the rates of each step of the week before it."""

    arrival_s: NDArray[np.float64]
    before: tuple[float, ...]


def rates(arrival_s: NDArray[np.float64], length_s: float = WEEK_S) -> tuple[float, ...]:
    """Requests/s in each step."""
    counts = np.bincount((arrival_s // STEP_S).astype(np.int64), minlength=round(length_s / STEP_S))
    return tuple((counts / STEP_S).tolist())


def servegen(data: Path, seed: int) -> Load:
    """Two weeks of ServeGen's clients, as many requests as give the mean rate in the second."""

    def week(start_s: float, scale: float, seed: int) -> NDArray[np.float64]:
        traffic = ServeGen(
            arrivals=data / "servegen_arrivals.parquet", lengths=data / "servegen_lengths.parquet", model="m-small",
            start_s=start_s, duration_s=float(WEEK_S), rate_scale=scale, leave_out_without_lengths=True,
        )  # fmt: skip
        return traffic.trace(seed).arrival_ns * 1e-9

    scale = 1e-3 * MEAN_PER_S * WEEK_S / len(week(WEEK_S, 1e-3, seed))
    return Load(week(WEEK_S, scale, seed), rates(week(0.0, scale, seed)))


def weekly(_data: Path, seed: int) -> Load:
    """Two weeks drawn from a rate with days and weekends, noise and surges."""
    rng = np.random.default_rng(seed)
    at_s = np.arange(0, 2 * WEEK_S, STEP_S)
    hour, day = at_s % DAY_S / 3600, at_s // DAY_S % 7
    daily = 1.0 - 0.5 * np.cos((hour - 3.0) / 24 * 2 * np.pi)
    noise, kept = np.zeros(len(at_s)), float(np.exp(-STEP_S / 3600))
    for i in range(1, len(at_s)):
        noise[i] = kept * noise[i - 1] + 0.08 * np.sqrt(1 - kept * kept) * rng.standard_normal()
    shape = daily * np.where(day >= 5, 0.6, 1.0) * 1.05 ** (at_s / WEEK_S) * np.exp(noise)
    for begin_s in WEEK_S + rng.choice(WEEK_S - 1800, 3, replace=False):
        shape[(at_s >= begin_s) & (at_s < begin_s + 1800)] *= 1.5
    per_s = MEAN_PER_S * shape / shape[at_s >= WEEK_S].mean()
    counts = rng.poisson(per_s * STEP_S)
    arrival_s = np.sort(np.repeat(at_s, counts) + STEP_S * rng.random(int(counts.sum())))
    return Load(arrival_s[arrival_s >= WEEK_S] - WEEK_S, rates(arrival_s[arrival_s < WEEK_S]))


LOADS: Mapping[str, Callable[[Path, int], Load]] = {"servegen": servegen, "weekly": weekly}


def write(load: Load, path: Path, days: float, seed: int) -> None:
    """The trace of the first *days*, with lengths as in conversations and answers of a model that reasons."""
    arrival_s = load.arrival_s[load.arrival_s < days * DAY_S]
    rng = np.random.default_rng([seed, 1])
    prompt = LogNormal.from_mean_median(mean=1150, median=930, max_tokens=8192).sample(rng, len(arrival_s))
    output = LogNormal.from_mean_median(mean=4000, median=3000, max_tokens=16000).sample(rng, len(arrival_s))
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        rows.writerows(zip(np.round(arrival_s, 6).tolist(), prompt.tolist(), output.tolist(), strict=True))


def scenario(trace: Path, policy: Mapping[str, Any], before: tuple[float, ...]) -> Scenario:
    """The deployment: Qwen3-32B on one H200 a machine, which takes 278 s to start."""
    known = {"before": list(before)} if "step_s" in policy and policy["policy"] != "perfect" else {}
    first = max(round(before[-1] / CAPACITY_PER_S), 1)
    return Scenario.from_mapping(
        {
            "model": "qwen3-32b",
            "hardware": "h200-sxm",
            "scheduler": {"policy": "vllm"},
            "router": {"policy": "least_outstanding"},
            "replicas": first,
            "autoscale": {
                "policy": {**policy, **known}, "min": 1, "max": 16, "start": START,
                **({"interval_s": INTERVAL_S} if policy["policy"] == "perfect" or known else {}),
                **({"down_window_s": 300} if known or policy["policy"] in ("perfect", "rate_model") else {}),
            },
            "workload": {"trace": str(trace)},
            "slo": dict(SLO),
        }
    )  # fmt: skip


def figures(result: Result) -> dict[str, float]:
    """Those of the table alone: a summary would look at each of the hundreds of millions of tokens."""
    requests, meta = result.columns.requests, result.columns.meta
    ttft_s = (requests["first_token_ns"] - requests["arrival_ns"]) * 1e-9
    tpot_s = (requests["finish_ns"] - requests["first_token_ns"]) * 1e-9 / np.maximum(requests["output_tokens"] - 1, 1)
    kept = (requests["finish_ns"] >= 0) & (ttft_s <= SLO["ttft_s"]) & (tpot_s <= SLO["tpot_s"])
    begin_ns, end_ns = int(requests["arrival_ns"].min()), int(requests["finish_ns"].max())
    fleet = fleet_figures(requests, meta, begin_ns, end_ns)["fleet"]
    prices = usd_per_machine_hour(result.columns, result.manifest)
    assert prices is not None
    return {
        "usd": fleet["machine_hours"] * prices[0],
        "machine_hours": fleet["machine_hours"],
        "starts": fleet["starts"],
        "missed": 1.0 - float(kept.mean()),
        "ttft_p99_s": float(np.quantile(ttft_s, 0.99)),
    }


def compared(load: Load, names: list[str], days: float, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each policy, as it is found."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "week.csv"
        write(load, trace, days, seed)
        for name in names:
            began = time.process_time()
            found = simulate(scenario(trace, POLICIES[name], load.before))
            yield {
                "policy": name,
                **figures(found),
                "processor_s": time.process_time() - began,
            }


_LOOKS = {"servegen": ("o", "#0072B2", "ServeGen"), "weekly": ("s", "#D55E00", "weekly")}
"""Marker, colour (of Okabe and Ito's, told apart without red and green) and name of each load."""


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Money and missed limits of each policy, a line a policy and a panel a figure; on top the cheapest on the first load."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter

    loads = list(dict.fromkeys(row["load"] for row in rows))
    bound = {row["load"]: row["usd"] for row in rows if row["policy"] == "perfect"}
    first = sorted((row for row in rows if row["load"] == loads[0]), key=lambda row: -row["usd"])
    order = {row["policy"]: place for place, row in enumerate(first)}
    figure = Figure(figsize=(10, 0.34 * len(order) + 1.2), layout="constrained")
    money, missed = figure.subplots(1, 2, sharey=True)
    for which in loads:
        marker, colour, name = _LOOKS[which]
        mine = [row for row in rows if row["load"] == which]
        at = [order[row["policy"]] + (0.13 if which == loads[0] else -0.13) for row in mine]
        look = {"marker": marker, "color": colour, "markersize": 6.5, "linestyle": "none", "label": name}
        money.plot([row["usd"] / bound[which] for row in mine], at, **look)
        missed.plot([100 * row["missed"] for row in mine], at, **look)
    money.set(xscale="log", xlabel="Cost over that of perfect foresight (log scale)")
    money.xaxis.set_major_locator(FixedLocator([0.9, 1.0, 1.2, 1.5, 2.0, 3.0]))
    money.axvline(1.0, color="#9aa0a6", linewidth=1, zorder=0)
    missed.set_xscale("symlog", linthresh=0.01, linscale=0.4)
    missed.set(xlabel="Requests outside the limits (%, log scale above 0.01)", xlim=(-0.002, 15))
    missed.xaxis.set_major_locator(FixedLocator([0, 0.01, 0.1, 1, 10]))
    for axes in (money, missed):
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(FixedLocator([]))
        axes.set_yticks([*order.values()], [*order])
        axes.grid(color="#e6e9ec")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    money.legend(loc="center right", frameon=False, title="a week of")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", nargs="*", help="servegen, weekly; both without it")
    parser.add_argument("--only", nargs="+", choices=[*POLICIES], help="some policies")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("../shared/serving"))
    parser.add_argument("--json", type=Path, help="add rows to this file, one a line")
    parser.add_argument("--plot", type=Path, help="draw the rows of --json, and run nothing")
    asked = parser.parse_args()
    if asked.plot is not None:
        plot([json.loads(line) for line in asked.json.read_text(encoding="utf-8").splitlines()], asked.plot)
        return
    for which in asked.load or LOADS:
        load = LOADS[which](asked.data, asked.seed)
        print(f"\n{which}: {len(load.arrival_s):,} requests\n")
        print("| policy | US dollars | machine-hours | starts | outside the limits | TTFT p99 (s) |")
        print("|---|---|---|---|---|---|", flush=True)
        for row in compared(load, asked.only or [*POLICIES], asked.days, asked.seed):
            print(
                f"| {row['policy']} | {row['usd']:,.0f} | {row['machine_hours']:,.0f} | {row['starts']} | {row['missed']:.2%} | "
                f"{row['ttft_p99_s']:.2f} |",
                flush=True,
            )
            if asked.json is not None:
                with asked.json.open("a") as file:
                    file.write(json.dumps({"load": which, **row}) + "\n")


if __name__ == "__main__":
    main()
