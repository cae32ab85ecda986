"""How fast a fleet with prefill and decode apart is replayed, beside as many plain machines.

Eight machines that prefill and eight that decode, each with a link, and sixteen that do both, replay the same Poisson traffic of an
8B model; the ratio of their rates is what the figure in docs/pools.md is.

    python benchmarks/pools_speed.py [--requests 100000] [--repeat 3]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from sim.engine import run
from sim.scenario import Scenario
from sim.scenario.assembly import build

PLAIN = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "scheduler": {"policy": "vllm"},
    "workload": {
        "arrivals": {"process": "poisson", "rate_per_s": 80},
        "prompt_tokens": {"distribution": "lognormal", "mean": 1000, "median": 700, "max_tokens": 8000},
        "output_tokens": {"distribution": "lognormal", "mean": 200, "median": 150, "max_tokens": 1000},
    },
}
APART = {
    "pools": {"p": {"role": "prefill", "replicas": 8}, "d": {"role": "decode", "replicas": 8}},
    "links": {"net": {"bandwidth_gb_per_s": 50, "latency_s": 0.0004}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    workload = {**PLAIN["workload"], "requests": asked.requests}
    experiments = {
        "16 that do both": build(Scenario(**{**PLAIN, "replicas": 16, "workload": workload})),
        **{
            f"8 + 8, as {like}": build(Scenario(**{**PLAIN, **APART, "workload": workload, "handover": {"like": like}}))
            for like in ("vllm", "sglang")
        },
    }
    best: dict[str, float] = {}
    for _ in range(asked.repeat):
        # In turn, so that what else the machine does falls on all.
        for name, experiment in experiments.items():
            began = time.process_time()
            columns = run(replace(experiment))
            took = time.process_time() - began
            assert (columns.requests["finish_ns"] >= 0).all()
            best[name] = max(best.get(name, 0.0), asked.requests / took)
    plain = best["16 that do both"]
    for name, rate in best.items():
        print(f"{name:<16} {rate:>9,.0f} requests a CPU second   {rate / plain:.2f} of plain")


if __name__ == "__main__":
    main()
