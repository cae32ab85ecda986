"""Published serving runs as cases of a fit: rows of aggregated serving, by deployment."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwmodels.measured import read
from hwmodels.overheads import serving_stack
from sim.bench.cases import case_of_run
from sim.bench.fitting import Case
from sim.bench.load import load_of
from sim.bench.measured import BenchRun, Latency, Lengths, Offered, SharedPrompts
from sim.bench.parameters import Setting
from sim.bench.published.machines import Unmodelled
from sim.bench.published.rows import DEPLOYMENT, experiment_of, rows_of, served_run, speculates
from sim.scenario import Scenario


def deployments(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of the e2e_silicon_agg table in *folder* by deployment and source, without speculation, in the order of the table."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(read(folder / "e2e_silicon_agg.csv")):
        if not speculates(row):
            found.setdefault("|".join(str(row[name]) for name in (*DEPLOYMENT, "provenance")), []).append(row)
    return found


def case_of_row(row: Mapping[str, Any], folder: Path | None) -> tuple[Case, Setting]:
    """A row as a case, and the stack that its deployment has before any fit; `Unmodelled` where it cannot be simulated."""
    served = served_run(row, folder)
    experiment, deployment = experiment_of(served)
    case = case_of_run(served.run, load_of(served.run, seed=0), experiment, deployment)
    return case, Setting(stack=serving_stack(served.stack, served.release))


INFERENCE_PERF = "inference_perf_h100_llama3-8b.csv"
_ARMS = {
    "plain": ("max_num_seqs: 128, enable_chunked_prefill: false", "false"),
    "batch192": ("max_num_seqs: 192, enable_chunked_prefill: false", "false"),
    "chunk_prefix": ("max_num_seqs: 128", "true"),
}
"""Scheduler and prefix cache of each arm, as its setup says (vLLM 0.11.0, which schedules asynchronously only when asked to)."""
IN_FLIGHT = 440
"""Requests that the clients of inference-perf have in flight at most."""


def inference_perf(folder: Path) -> dict[str, tuple[Scenario, list[BenchRun]]]:
    """The stages of `INFERENCE_PERF` in *folder* by arm, with the deployment that they ran on: Llama-3.1-8B on one H100.

    Ten groups of ten prompts, 128 tokens of each group's own, are sent again in every stage. Only the arm with a prefix cache
    profits, and its stages but the first find all of their prompts there.
    """
    found: dict[str, tuple[Scenario, list[BenchRun]]] = {}
    with (folder / INFERENCE_PERF).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for arm, (scheduler, caching) in _ARMS.items():
        scenario = Scenario.default().with_set(
            "serving_release='0.11'",
            f"scheduler={{policy: vllm, max_num_batched_tokens: 8192, async_scheduling: false, {scheduler}}}",
            f"memory={{gpu_memory_utilization: 0.9, release: '0.11', prefix_caching: {caching}}}",
        )
        runs = [_stage(row, arm, caching == "true") for row in rows if row["arm"] == arm]
        found[arm] = scenario, runs
    return found


def _stage(row: Mapping[str, str], arm: str, caching: bool) -> BenchRun:
    rate, requests = float(row["requested_rate_req_s"]), int(row["requests"])
    prompt = round(float(row["prompt_tokens_mean"]))
    shared = SharedPrompts(groups=10, prefix_tokens=128, prompts_per_group=10, warm=int(row["stage"]) > 0)

    def latency(name: str) -> Latency:
        return Latency(
            mean_s=float(row[f"{name}_mean_s"]),
            median_s=float(row[f"{name}_p50_s"]),
            quantiles_s={share: float(row[f"{name}_p{round(100 * share)}_s"]) for share in (0.9, 0.99)},
        )

    return BenchRun(
        name=f"{arm}, {rate:g}/s",
        file=INFERENCE_PERF,
        format="inference-perf",
        offered=Offered(
            rate_per_s=rate,
            concurrency=IN_FLIGHT,
            fills_time=True,
            requests=requests,
            prompt=Lengths(mean_tokens=prompt, std_tokens=0.0),
            # The published count is of the text encoded again; 64 were generated.
            output=Lengths(mean_tokens=64, std_tokens=0.0),
            shared=shared if caching else None,
        ),
        duration_s=requests / float(row["completed_rate_req_s"]),
        completed=requests,
        failed=0,
        requests_per_s=float(row["completed_rate_req_s"]),
        ttft=latency("ttft"),
        tpot=latency("tpot"),
        e2el=latency("e2e"),
    )


__all__ = ["INFERENCE_PERF", "Unmodelled", "case_of_row", "deployments", "inference_perf"]
