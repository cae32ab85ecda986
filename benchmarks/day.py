"""A day with classes, autoscaling and failures, replayed beside the same day without: requests a second of processor time, in turn.

python -m benchmarks.day [REQUESTS]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from sim import Scenario, simulate

MEAN_PER_S = 40.0


def scenarios(requests: int) -> dict[str, Scenario]:
    """A sinusoidal day of about *requests* requests on four machines, plain, with all that a fleet has, and with a scheduler that
    heeds the classes besides."""
    day_s = requests / MEAN_PER_S
    plain: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "scheduler": {"policy": "vllm"},
        "router": "least_outstanding",
        "replicas": 4,
        "workload": {
            "arrivals": {
                "process": "sinusoidal",
                "rate_per_s": MEAN_PER_S,
                "amplitude": 0.6,
                "period_s": day_s,
                "peak_s": day_s / 2,
            },
            "prompt_tokens": {"distribution": "lognormal", "mean": 300, "median": 200, "max_tokens": 4096},
            "output_tokens": {"distribution": "lognormal", "mean": 120, "median": 80, "max_tokens": 1024},
            "duration_s": day_s,
        },
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    }
    fleet: dict[str, Any] = {
        "autoscale": {
            "policy": {"policy": "target_tracking", "measure": "concurrency", "target": 40},
            "min": 2,
            "max": 8,
            "start": "qwen3-32b-h100-restore",
        },
        "failures": {"mean_up_s": 1800, "mean_down_s": 60, "in_flight": "resume"},
        "classes": {"chat": {"share": 3, "priority": 0}, "batch": {"share": 1, "priority": 1}},
    }
    heeded = {**plain, **fleet, "scheduler": {"policy": "preempt", "inner": "vllm"}}
    settings = {"plain": plain, "fleet": {**plain, **fleet}, "preempt": heeded}
    return {name: Scenario.from_mapping(given) for name, given in settings.items()}


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    speeds: dict[str, float] = {}
    for name, scenario in scenarios(requests).items():
        began = time.process_time()
        n = len(simulate(scenario).columns.requests["arrival_ns"])
        speeds[name] = n / (time.process_time() - began)
        ratio = speeds[name] / speeds["plain"]
        print(
            f"{name:7} {n:>9,} requests, {speeds[name]:>8,.0f} a second of processor time, {ratio:.2f} of plain",
            flush=True,
        )


if __name__ == "__main__":
    main()
