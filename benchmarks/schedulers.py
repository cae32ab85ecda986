"""Schedulers on one overloaded replica, vLLM's own among them.

    python -m benchmarks.schedulers [--trace FILE] [--rate-scale 6] [--kv-blocks 3456] [--vllm PYTHON_WITH_VLLM_0.32.0]

A trace at a multiple of its rate, with little KV memory: preemptions, latency and TTFT under each scheduler. The
last lines are decided by the release's scheduler itself, in a loop of its own (`vllm_in_loop`) with the same prices.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.schedulers import Sarathi
from policies.vllm import Vllm, VllmV0
from policies.wrappers import EvictNewest
from sim.engine import run
from sim.scenario import Scenario
from sim.scenario.assembly import build

BUDGET, SEQUENCES = 8192, 1024


def schedulers() -> dict[str, Any]:
    def vllm(**settings: Any) -> Vllm:
        return Vllm(max_num_batched_tokens=BUDGET, max_num_seqs=SEQUENCES, **settings)

    return {
        "vllm-v0 (prefill first)": EvictNewest(VllmV0(BUDGET, SEQUENCES)),
        "sarathi, 1 % of blocks kept free": EvictNewest(Sarathi(BUDGET, SEQUENCES, watermark=0.01)),
        "sarathi, none kept free": EvictNewest(Sarathi(BUDGET, SEQUENCES, watermark=0.0)),
        "vllm, room for the first chunk": vllm(async_scheduling=False, scheduler_reserve_full_isl=False),
        "vllm": vllm(async_scheduling=False),
        "vllm, asynchronous (default)": vllm(),
    }


def line(name: str, preemptions: int, latency_s: float, ttft_s: float) -> None:
    print(f"{name:42}{preemptions:12,}{latency_s:14.3f}{ttft_s:12.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-scale", type=float, default=6.0)
    parser.add_argument("--kv-blocks", type=int, default=3456)
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM 0.32.0")
    parser.add_argument("--trace", default="conversation", help="a file, or the name of a built-in trace")
    parser.add_argument("--limit", type=int, help="requests; all of the trace where left out")
    options = parser.parse_args()
    limit = f", limit: {options.limit}" if options.limit else ""
    experiment = build(
        Scenario.default().with_set(f"workload={{trace: {options.trace}, rate_scale: {options.rate_scale}{limit}}}")
    )
    (spec,) = experiment.replicas
    print(f"{'scheduler':42}{'preemptions':>12}{'mean E2E, s':>14}{'TTFT, s':>12}")
    for name, scheduler in schedulers().items():
        columns = run(replace(experiment, replicas=(replace(spec, scheduler=scheduler, kv_blocks=options.kv_blocks),)))
        table = columns.requests
        done = table["status"] == 0
        latency, ttft = (
            (table[end] - table["arrival_ns"])[done].mean() * 1e-9 for end in ("finish_ns", "first_token_ns")
        )
        line(name, columns.meta["preemptions"], latency, ttft)
    if not options.vllm:
        print("vLLM's own scheduler: give --vllm, the Python of an environment that has vLLM 0.32.0")
        return
    trace = experiment.workload
    delay_ns = np.rint((experiment.admission_s + experiment.admission_s_per_token * trace.prompt_tokens) * 1e9).astype(
        int
    )
    if experiment.admission_serial_s:
        place = np.arange(len(trace)) * round(experiment.admission_serial_s * 1e9)
        through = np.maximum.accumulate(trace.arrival_ns - place) + place + round(experiment.admission_serial_s * 1e9)
        delay_ns = delay_ns + through - trace.arrival_ns
    for ahead in (False, True):
        case = {
            "cost": spec.cost, "max_model_len": spec.max_model_len,
            "kv_blocks": options.kv_blocks, "block_tokens": spec.block_tokens,
            "max_num_batched_tokens": BUDGET, "max_num_seqs": SEQUENCES, "async_scheduling": ahead,
            "arrival_ns": trace.arrival_ns.tolist(), "visible_ns": (trace.arrival_ns + delay_ns).tolist(),
            "prompt": trace.prompt_tokens.tolist(), "output": trace.output_tokens.tolist(),
        }  # fmt: skip
        with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
            file.write(pickle.dumps(case))
            file.flush()
            root = Path(__file__).parents[1]
            command = [options.vllm, "-m", "benchmarks.vllm_in_loop", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
        preemptions, latency, ttft = done.stdout.split()[-3:]
        line(
            "vLLM's own scheduler" + (", asynchronous" if ahead else ""), int(preemptions), float(latency), float(ttft)
        )


if __name__ == "__main__":
    main()
