"""LoRA adapters as measured and as simulated: memory of slots, loads, steps, and hour-long serving runs.

    python -m benchmarks.lora FOLDER [--seconds 900] [--every 1] [--parts memory,loads,steps,serving]

FOLDER has the tables lora_memory.csv, lora_load.csv, lora_step.csv and lora_serving_vllm0.8.5.csv, converted from
FerranAgulloLopez/GPULLMAdapterOptimization (commit bae36e2, Apache-2.0): Llama-3.1-8B on vLLM 0.8.5, and Llama-2 on vLLM 0.5.0, on
one Hopper of 64 GB. Of serving runs the first `--seconds` of arrivals are replayed, one run in `--every`. A run is saturated that
completes less than 95 % of what is offered.
"""

from __future__ import annotations

import argparse
import csv
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.adapters import AdapterCost, slot_rules, times_of
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from sim.engine import run
from sim.metrics import summary
from sim.scenario import Scenario
from sim.scenario.assembly import build
from sim.scenario.assembly.memory import memory_plan_of

MODELS = {
    "llama-3.1-8b-instruct": "llama-3.1-8b",
    "llama-2-7b": "llama-2-7b",
    "llama-2-13b": "llama-2-13b",
    "qwen2.5-7b-instruct": "qwen2.5-7b",
}
"""Models of the tables, as the catalogue calls them."""
RELEASES = {"vllm-0.8.5-v1": "0.8.5", "vllm-0.5.0": "0.5.0"}
SERVED = "vllm-0.8.5-v1"
SATURATED = 0.95
Row = Mapping[str, str]


def rows_of(folder: Path, name: str) -> list[Row]:
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["model"] in MODELS]


def was_fitted(row: Row) -> bool:
    """Whether a cell of steps or of a run without a queue was among those that the constants were fitted to: about one in two."""
    key = f"{float(row['itl_p50_ms']):.3f}{float(row['running_mean']):.2f}{row['max_loras']}"
    return zlib.crc32(key.encode()) % 2 == 0


def scenario(row: Row, workload: Mapping[str, Any], adapters: Mapping[str, Any] | None, sequences: int) -> Scenario:
    """The server of a cell."""
    settings: dict[str, Any] = {
        "model": MODELS[row["model"]],
        "hardware": "h100-64gb",
        "serving_release": RELEASES[row["engine"]],
        "scheduler": {
            "policy": "vllm",
            "release": "0.24",
            "max_num_batched_tokens": 2048,
            "max_num_seqs": sequences,
            "async_scheduling": False,
            "scheduler_reserve_full_isl": False,
        },
        "memory": {"prefix_caching": False, "gpu_memory_utilization": 0.9, "release": "0.19"},
        "workload": dict(workload),
    }
    if adapters is not None:
        settings["adapters"] = dict(adapters)
    return Scenario.from_mapping(settings)


def shown(errors: Iterable[float]) -> str:
    each = np.abs(np.array(list(errors)))
    if not len(each):
        return "none"
    within = np.percentile(each, 90)
    return f"mean {each.mean():.1%}, median {np.median(each):.1%}, 90 % within {within:.1%}, {len(each)} cells"


def memory(folder: Path) -> None:
    """KV tokens that slots leave, against those that the fewest slots leave, and bytes of a slot."""
    cells = [row for row in rows_of(folder, "lora_memory.csv") if row["status"] == "ok"]
    for engine, model in sorted({(row["engine"], row["model"]) for row in cells}):
        spec = load_model(MODELS[model])
        token = spec.kv_bytes_per_token()
        mine = [row for row in cells if (row["engine"], row["model"]) == (engine, model)]
        slots, kv = [], []
        for rank in sorted({int(row["max_lora_rank"]) for row in mine}):
            of_rank = [row for row in mine if int(row["max_lora_rank"]) == rank]
            each = _cost(spec, engine, 1, rank).slot_bytes(range(spec.n_layers))
            n = np.array([int(row["max_loras"]) for row in of_rank])
            tokens = np.array([int(row["kv_tokens"]) for row in of_rank])
            measured = -np.polyfit(n, tokens * token, 1)[0]
            slots.append(each / measured - 1)
            print(f"  {model} rank {rank}: {each / 2**20:.1f} MiB a slot, measured {measured / 2**20:.1f}")
            first = int(np.argmin(n))
            kv += list((tokens[first] - (n - n[first]) * each / token) / tokens - 1)
        print(f"{engine} {model}: bytes of a slot {shown(slots)}; KV tokens {shown(kv)}")
        if engine != SERVED:
            continue
        whole = []
        for row in mine:
            adapters = {
                "count": 1,
                "rank": 8,
                "max_loras": int(row["max_loras"]),
                "max_lora_rank": int(row["max_lora_rank"]),
            }
            plan = memory_plan_of(scenario(row, {"trace": "conversation", "limit": 1}, adapters, 2048))[1]
            whole.append(plan.device_blocks * plan.block_tokens / int(row["kv_tokens"]) - 1)
        print(f"{engine} {model}: KV tokens from the flags alone {shown(whole)}")


def _cost(spec: Any, engine: str, slots: int, rank: int) -> AdapterCost:
    times = times_of("vllm", RELEASES[engine])
    rules = slot_rules("vllm")
    return AdapterCost(
        spec=spec, parallel=ParallelConfig(), max_loras=slots, max_lora_rank=rank, times=times, rules=rules
    )


def loads(folder: Path) -> None:
    errors = []
    for row in rows_of(folder, "lora_load.csv"):
        rank = int(row["adapter_rank"])
        cost = _cost(load_model(MODELS[row["model"]]), row["engine"], 1, int(row["max_lora_rank"] or rank))
        seconds = cost.disk_s(rank) if row["kind"] == "disk" else cost.slot_s(rank)
        errors.append(seconds * 1e3 / float(row["mean_ms"]) - 1)
        print(
            f"  {row['engine']} {row['kind']} rank {rank} of {row['max_lora_rank']}: {seconds * 1e3:.1f} ms, "
            f"measured {row['mean_ms']}"
        )
    print(f"loads: {shown(errors)}")


def steps(folder: Path) -> None:
    """Gaps between tokens in closed batches."""
    errors: dict[str, list[float]] = {}
    for row in rows_of(folder, "lora_step.csv"):
        if row["engine"] != SERVED or float(row["output_len_mean"]) < 2:
            continue
        n, slots = int(row["max_num_seqs"]), int(row["max_loras"])
        adapters = None
        if slots:
            adapters = {"count": int(row["adapters"]), "rank": int(row["adapter_rank"]), "max_loras": slots}
            adapters["max_lora_rank"] = int(row["max_lora_rank"])
        workload = {
            "arrivals": {"process": "deterministic", "rate_per_s": 1e5},
            "prompt_tokens": {"distribution": "fixed", "tokens": int(float(row["input_len_mean"]))},
            "output_tokens": {"distribution": "fixed", "tokens": round(float(row["output_len_mean"]))},
            "requests": min(int(row["prompts"]), 6 * n),
        }
        found = summary_of(scenario(row, workload, adapters, n))
        error = found["itl_s"]["p50"] * 1e3 / float(row["itl_p50_ms"]) - 1
        what = "without slots" if not slots else "fitted" if was_fitted(row) else "held back"
        errors.setdefault(what, []).append(error)
        print(
            f"  {n} sequences, {row['adapters']} adapters in {slots} slots, {row['output_len_mean']} out: "
            f"{found['itl_s']['p50'] * 1e3:.2f} ms, measured {row['itl_p50_ms']} ({error:+.1%})"
        )
    for what, each in errors.items():
        print(f"steps, {what}: {shown(each)}")


def summary_of(asked: Scenario, horizon_s: float | None = None) -> dict[str, Any]:
    experiment = build(asked)
    horizon_ns = None if horizon_s is None else round(horizon_s * 1e9)
    return summary(run(replace(experiment, horizon_ns=horizon_ns)))


def runs(folder: Path, every: int) -> Iterator[Row]:
    cells = [row for row in rows_of(folder, "lora_serving_vllm0.8.5.csv") if row["status"] == "ok"]
    yield from cells[::every]


def serving(folder: Path, seconds: float, every: int) -> None:
    throughput: list[float] = []
    gaps: dict[str, list[float]] = {}
    right = n = 0
    for row in runs(folder, every):
        offered, slots, count = float(row["offered_req_s"]), int(row["max_loras"]), int(row["adapters"])
        span_s = min(seconds, float(row["run_s"]))
        prompt, output = float(row["input_len_mean"]), float(row["output_len_mean"])
        workload = {
            "arrivals": {"process": "poisson", "rate_per_s": offered},
            "prompt_tokens": {"distribution": "lognormal", "mean": prompt, "median": 0.5 * prompt, "max_tokens": 1024},
            "output_tokens": {"distribution": "lognormal", "mean": output, "median": 0.66 * output, "max_tokens": 1024},
            "requests": max(100, round(offered * span_s)),
        }
        adapters = {
            "count": count,
            "rank": [int(rank) for rank in row["ranks"].split(";")][:count],
            "popularity": {"shares": [float(rate) for rate in row["rates"].split(";")][:count]},
            "max_loras": slots,
            "max_lora_rank": int(row["max_lora_rank"]),
            "max_cpu_loras": max(count, slots),
        }
        found = summary_of(scenario(row, workload, adapters, 2048), span_s)
        rate = found["requests"]["finished"] / span_s
        measured = float(row["requests_per_s"])
        throughput.append(rate / measured - 1)
        saturated, ours = measured < SATURATED * offered, rate < SATURATED * offered
        n, right = n + 1, right + (saturated == ours)
        quiet = not saturated and float(row["waiting_mean"]) < 0.5 and float(row["itl_p50_ms"]) > 1
        text = ""
        if quiet:
            gap = found["itl_s"]["p50"] * 1e3
            error = gap / float(row["itl_p50_ms"]) - 1
            gaps.setdefault("fitted" if was_fitted(row) else "held back", []).append(error)
            text = f", ITL {gap:.1f} ms, measured {row['itl_p50_ms']} ({error:+.1%})"
        print(
            f"  {count} adapters, {slots} slots of {row['max_lora_rank']}, {offered:g} offered: {rate:.2f} requests/s, measured "
            f"{measured:.2f} ({throughput[-1]:+.1%}){text}{'' if saturated == ours else ' WRONG'}",
            flush=True,
        )
    print(f"throughput: {shown(throughput)}")
    for what, each in gaps.items():
        print(f"median ITL where no queue builds, {what}: {shown(each)}")
    print(f"saturated or not: {right} of {n} right")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--parts", default="memory,loads,steps,serving")
    given = parser.parse_args()
    parts = given.parts.split(",")
    for name, part in (("memory", memory), ("loads", loads), ("steps", steps)):
        if name in parts:
            part(given.folder)
    if "serving" in parts:
        serving(given.folder, given.seconds, given.every)


if __name__ == "__main__":
    main()
