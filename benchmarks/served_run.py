"""A measured run of a served model beside its simulation, nothing fitted to it.

    python -m benchmarks.served_run [../shared/serving/inference_perf_h100_llama3-8b.csv]

Llama-3.1-8B on one H100 behind vLLM 0.11.0, measured by inference-perf (commit 7de5ef2 of kubernetes-sigs/inference-perf,
Apache-2.0): seven rates of 60 s for each arm, prompts of 204 tokens and 64 output tokens. The client holds at most 440 requests in
flight, so that rates beyond saturation are a closed loop of 440. Below it TPOT and TTFT are compared, beyond it throughput.

The arm `chunk_prefix` repeats its prompts to a server with a prefix cache, which is not simulated: its rows show what is missing.
"""

from __future__ import annotations

import argparse
import csv

from sim.run import simulate
from sim.scenario import Scenario

IN_FLIGHT = 440
SETTINGS = {
    "plain": "max_num_seqs: 128, enable_chunked_prefill: false",
    "batch192": "max_num_seqs: 192, enable_chunked_prefill: false",
    "chunk_prefix": "max_num_seqs: 128",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="../shared/serving/inference_perf_h100_llama3-8b.csv")
    with open(parser.parse_args().file) as file:
        rows = list(csv.DictReader(file))
    print(f"{'arm':14}{'rate':>8}{'':3}{'TPOT ms':>9}{'measured':>9}{'error':>7}{'TTFT ms':>9}{'measured':>9}", end="")
    print(f"{'req/s':>8}{'measured':>9}{'error':>7}")
    for row in rows:
        rate, requests = float(row["requested_rate_req_s"]), int(row["requests"])
        saturated = float(row["completed_rate_req_s"]) < 0.97 * rate
        arrivals = (
            f"{{process: closed_loop, concurrency: {IN_FLIGHT}}}"
            if saturated
            else f"{{process: poisson, rate_per_s: {rate}}}"
        )
        scenario = Scenario.default().with_set(
            "model=llama-3.1-8b",
            "hardware=h100-sxm",
            # Release 0.11.0 did not schedule asynchronously unless asked to.
            f"scheduler={{policy: vllm, max_num_batched_tokens: 8192, async_scheduling: false, {SETTINGS[row['arm']]}}}",
            f"workload={{arrivals: {arrivals}, prompt_tokens: 204, output_tokens: 64, requests: {requests}}}",
        )
        summary = simulate(scenario).summary
        tpot, ttft, served = summary["tpot_s"]["mean"], summary["ttft_s"]["mean"], summary["requests_per_s"]
        measured = [float(row[name]) for name in ("tpot_mean_s", "ttft_mean_s", "completed_rate_req_s")]
        mark = "*" if saturated else ""
        print(
            f"{row['arm']:14}{rate:8.1f}{mark:3}{tpot * 1e3:9.2f}{measured[0] * 1e3:9.2f}{tpot / measured[0] - 1:7.1%}",
            end="",
        )
        print(
            f"{ttft * 1e3:9.1f}{measured[1] * 1e3:9.1f}{served:8.1f}{measured[2]:9.1f}{served / measured[2] - 1:7.1%}"
        )
    print("* beyond saturation")


if __name__ == "__main__":
    main()
