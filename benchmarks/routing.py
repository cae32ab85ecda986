"""Routers under cache pressure: measured ladders of rates beside their simulation. `python -m benchmarks.routing --help`.

The load is that of inference-perf (`workload: {shared_prefix: ...}`), 8 replicas of Qwen3-32B on two H100 each. Nothing is fitted
to these tables. What the sources do not say is assumed: the KV capacity of the ladder is what the memory model finds, routers read
loads every 50 ms, and clients have no limit on requests in flight unless `--in-flight` gives one. A gateway with the exact index
brings prompts to tokens, which takes it as long as it takes an engine.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.engine.simulation.cluster import run
from sim.scenario import Scenario
from sim.scenario.assembly import build

WARM_UP = (15.0, 50.0)
"""Rate and seconds of the stage before the first that is reported."""

_MACHINES = {
    "model": "qwen3-32b", "hardware": "h100-sxm", "parallel": {"tensor": 2}, "replicas": 8,
}  # fmt: skip
_GUIDE = {"queue": 2.0, "kv": 2.0, "prefix": 3.0, "no_hit_lru": 2.0, "poll_s": 0.05}


@dataclass(frozen=True)
class Case:
    """One table: its rows by arm, and each arm's scenario."""

    table: str
    pause_s: float
    engine: dict[str, Any]
    arms: dict[str, dict[str, Any]]


CASES = {
    "ladder": Case(
        "routing_ladder_qwen3-32b.csv",
        30.0,
        {"serving_release": "0.19.1", "scheduler": {"policy": "vllm"}},
        {
            # A Kubernetes Service picks at random.
            "k8s_round_robin": {"router": {"policy": "random"}, "memory": {"release": "0.19", "gpu_memory_utilization": 0.95}},
            "approximate": {
                "router": {"policy": "llm_d", "index": "approximate", **_GUIDE},
                "memory": {"release": "0.19", "gpu_memory_utilization": 0.95},
            },
            "precise": {
                "router": {"policy": "llm_d", "index": "exact", **_GUIDE},
                "gateway": {"tokenizes": True},
                "memory": {"release": "0.19", "gpu_memory_utilization": 0.95, "block_tokens": 64},
            },
        },
    ),
    "capacity73": Case(
        "routing_capacity73.csv",
        1.0,
        # Of September 2025, which was 0.10: it planned when an iteration had ended.
        {"serving_release": "0.10", "scheduler": {"policy": "vllm", "async_scheduling": False}},
        {
            # 307,328 tokens in blocks of 16, and the null block.
            "load": {
                "router": {"policy": "llm_d", "queue": 1.0, "kv": 1.0, "prefix": 0.0, "no_hit_lru": 0.0, "poll_s": 0.05},
                "memory": {"kv_blocks": 19_209},
            },
            # 256 blocks of 64 characters are 16,384 characters; of random text 4 to 5.5 make a token, here 4: 16 tokens a block.
            "estimated": {
                "router": {
                    "policy": "llm_d", "queue": 1.0, "kv": 1.0, "prefix": 1.0, "no_hit_lru": 0.0, "poll_s": 0.05,
                    "index": "approximate", "block_tokens": 16, "capacity_blocks": 31_250, "max_blocks": 256,
                },
                "memory": {"kv_blocks": 19_209},
            },
        },
    ),
}  # fmt: skip


def measured(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def simulated(
    case: Case, arm: str, stages: list[tuple[float, float]], *, seed: int, in_flight: int | None = None
) -> Iterator[dict[str, float]]:
    """The table's figures of each stage, and the share of prompt tokens found."""
    settings = {**_MACHINES, **case.engine, **case.arms[arm], "seed": seed}
    settings["workload"] = {
        "shared_prefix": {
            "groups": 150, "prompts_per_group": 5, "system_prompt_tokens": 6000, "question_tokens": 1200,
            "output_tokens": 1000, "pause_s": case.pause_s, "in_flight": in_flight,
            "stages": [{"rate_per_s": rate, "duration_s": duration} for rate, duration in (WARM_UP, *stages)],
        }
    }  # fmt: skip
    experiment = build(Scenario.from_mapping(settings))
    requests = run(experiment).requests
    counts = [int(np.floor(rate * duration + 1e-9)) for rate, duration in (WARM_UP, *stages)]
    for stage, rows in enumerate(np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])):
        if stage:
            ttft_s = (requests["first_token_ns"][rows] - requests["arrival_ns"][rows]) / 1e9
            span_s = (requests["finish_ns"][rows].max() - requests["arrival_ns"][rows].min()) / 1e9
            yield {
                "output_tokens_per_s": float(requests["output_tokens"][rows].sum() / span_s),
                "ttft_mean_s": float(ttft_s.mean()),
                "ttft_p90_s": float(np.quantile(ttft_s, 0.9)),
                "hit": float(requests["prefix_hit_tokens"][rows].sum() / requests["prompt_tokens"][rows].sum()),
            }


def knee(rates: list[float], mean_ttft_s: list[float], limit_s: float) -> float:
    """The first rate from which on the mean TTFT stays above *limit_s*; infinity where it does not."""
    above = [value > limit_s for value in mean_ttft_s]
    first = next((i for i in range(len(above)) if all(above[i:])), None)
    return float("inf") if first is None else rates[first]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help="which tables; all without it")
    parser.add_argument("--data", type=Path, default=Path("../shared/serving"), help="folder of the measured tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--in-flight", type=int, help="requests that the client has under way at most; no limit without it"
    )
    asked = parser.parse_args()
    for name in asked.case or CASES:
        case = CASES[name]
        rows = measured(asked.data / case.table)
        found: dict[str, list[dict[str, float]]] = {}
        said: dict[str, list[dict[str, float]]] = {}
        rates: list[float] = []
        for arm in case.arms:
            mine = sorted((row for row in rows if row["arm"] == arm), key=lambda row: int(row["stage"]))
            stages = [(float(row["offered_rate_req_s"]), float(row["stage_s"])) for row in mine]
            rates = [rate for rate, _ in stages]
            columns = ("output_tokens_per_s", "ttft_mean_s", "ttft_p90_s")
            said[arm] = [{key: float(row[key]) for key in columns} for row in mine]
            began = time.perf_counter()
            found[arm] = list(simulated(case, arm, stages, seed=asked.seed, in_flight=asked.in_flight))
            print(f"{name}, {arm}: {time.perf_counter() - began:.1f} s", flush=True)
        print(_table(rates, said, found))
        print(_verdicts(rates, said, found), flush=True)


def _table(rates: list[float], said: dict[str, Any], found: dict[str, Any]) -> str:
    lines = [
        "| arm | req/s | tokens/s | | mean TTFT (s) | | p90 TTFT (s) | | hit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in said:
        for rate, theirs, ours in zip(rates, said[arm], found[arm], strict=True):
            cells = [f"{theirs['output_tokens_per_s']:.0f}", f"{ours['output_tokens_per_s']:.0f}"]
            for key in ("ttft_mean_s", "ttft_p90_s"):
                cells += [f"{theirs[key]:.3f}", f"{ours[key]:.3f}"]
            lines.append(f"| {arm} | {rate:g} | {' | '.join(cells)} | {ours['hit']:.3f} |")
    return "\n".join(lines)


def _verdicts(rates: list[float], said: dict[str, Any], found: dict[str, Any]) -> str:
    """The order of arms by throughput and by mean TTFT where the measured ones differ by more than 20 %, and the knees."""
    lines, arms = [], list(said)
    for key in ("output_tokens_per_s", "ttft_mean_s"):
        right = wrong = 0
        misses = []
        for place, rate in enumerate(rates):
            for i, a in enumerate(arms):
                for b in arms[i + 1 :]:
                    x, y = said[a][place][key], said[b][place][key]
                    if max(x, y) <= 1.2 * min(x, y):
                        continue
                    same = (x > y) == (found[a][place][key] > found[b][place][key])
                    right, wrong = right + same, wrong + (not same)
                    if not same:
                        misses.append(f"{a} and {b} at {rate:g}/s")
        lines.append(
            f"order by {key}: {right} of {right + wrong} pairs right" + "".join(f"; {miss}" for miss in misses)
        )
    for arm in arms:
        knees = [knee(rates, [row["ttft_mean_s"] for row in rows[arm]], 2.0) for rows in (said, found)]
        lines.append(f"mean TTFT above 2 s from: {arm} measured {knees[0]:g}/s, simulated {knees[1]:g}/s")
    for arm in arms:
        for key in ("output_tokens_per_s", "ttft_mean_s"):
            errors = [ours[key] / theirs[key] - 1 for ours, theirs in zip(found[arm], said[arm], strict=True)]
            lines.append(
                f"{arm} {key}: median error {np.median(np.abs(errors)):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
