"""KV tiers beside measurements: host memory, a shared file system, pulling from a peer, host memory behind prefill machines.

    python -m benchmarks.kv_tiers [cpu] [lustre] [peers] [apart] [--data FOLDER] [--seed N]

The load is that of inference-perf, 8 replicas of Qwen3-32B on two H100 each, for peers two of gpt-oss-120b on one H200, and for
`apart` eight of these that prefill and two on four H200 that decode. Nothing is fitted to these tables. A host link is that of the
GPU's datasheet. What the sources do not say is assumed and printed: the bandwidth of the file system, that of links between
machines, and the router of the file system's table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing import measured
from policies.routers import RoundRobin
from sim.engine import Columns, Experiment, run
from sim.scenario import Scenario
from sim.scenario.assembly import build
from workloads import Follows, Trace

QWEN = {
    "model": "qwen3-32b", "hardware": "h100-sxm", "parallel": {"tensor": 2}, "replicas": 8, "serving_release": "0.19.1",
    "scheduler": {"policy": "vllm"},
}  # fmt: skip
GUIDE = {"policy": "llm_d", "index": "approximate", "block_tokens": 16, "poll_s": 0.05}
STAGES = (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0)

ROUTERS = {
    # 298,000 tokens.
    "hbm": {**GUIDE, "queue": 2.0, "kv": 2.0, "prefix": 3.0, "no_hit_lru": 2.0, "capacity_blocks": 18_625},
    "random": {"policy": "random"},
    # As `hbm`, with an index of the 8,474 blocks of the file system's table.
    "guide": {**GUIDE, "queue": 2.0, "kv": 2.0, "prefix": 3.0, "no_hit_lru": 2.0, "capacity_blocks": 8474},
    # Two indexes of weight 1, of the blocks of HBM and of 82,000 blocks; here one, the larger, has the weight of both.
    "hbm_cpu": {**GUIDE, "queue": 1.0, "kv": 1.0, "prefix": 2.0, "no_hit_lru": 1.0, "capacity_blocks": 82_000},
}


def figures(requests: Mapping[str, Any], rows: Any) -> dict[str, float]:
    """The tables' figures of the requests *rows*, and how much of their prompts was found and loaded."""
    arrival, finish = requests["arrival_ns"][rows], requests["finish_ns"][rows]
    ttft_s = (requests["first_token_ns"][rows] - arrival) / 1e9
    e2e_s = (finish - arrival) / 1e9
    span_s = (finish.max() - arrival.min()) / 1e9
    prompt, output = requests["prompt_tokens"][rows].sum(), requests["output_tokens"][rows].sum()
    loaded = sum(requests[name][rows].sum() for name in ("host_hit_tokens", "remote_hit_tokens") if name in requests)
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p90_s": float(np.quantile(ttft_s, 0.9)),
        "e2e_mean_s": float(e2e_s.mean()),
        "e2e_p90_s": float(np.quantile(e2e_s, 0.9)),
        "per_s": len(e2e_s) / span_s,
        "tokens_per_s": float((prompt + output) / span_s),
        "hit": float(requests["prefix_hit_tokens"][rows].sum() / prompt),
        "loaded": float(loaded / prompt),
    }


def cpu(data: Path, seed: int, gib: float) -> str:
    """HBM alone and with host memory, stages of 5 to 40 req/s."""
    said = {(row["arm"], float(row["offered_rate_req_s"])): row for row in measured(data / "kv_tiers_cpu.csv")}
    workload = {
        "shared_prefix": {
            "groups": 250, "prompts_per_group": 5, "system_prompt_tokens": 16_000, "question_tokens": 256,
            "output_tokens": 256, "pause_s": 60.0,
            "stages": [{"rate_per_s": rate, "duration_s": 60.0} for rate in STAGES],
        }
    }  # fmt: skip
    tiers = {"hbm": [], "hbm_cpu": [{"kind": "host", "gib": gib}]}
    ends = np.cumsum([round(rate * 60) for rate in STAGES])
    found: dict[tuple[str, float], dict[str, float]] = {}
    for arm in tiers:
        began = time.perf_counter()
        memory = {"kv_blocks": 18_626, "release": "0.19", "tiers": tiers[arm]}
        columns = run(
            build(
                Scenario.from_mapping(
                    {**QWEN, "memory": memory, "router": ROUTERS[arm], "workload": workload, "seed": seed}
                )
            )
        )
        print(f"cpu, {arm}: {time.perf_counter() - began:.1f} s", links(columns), flush=True)
        for rate, rows in zip(STAGES, np.split(np.arange(ends[-1]), ends[:-1]), strict=True):
            found[arm, rate] = figures(columns.requests, rows)
    lines = [
        f"host memory of {gib:g} GiB a replica",
        "",
        "| arm | req/s | tokens/s | | mean TTFT (s) | | p90 TTFT (s) | | mean E2E (s) | | found | loaded |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (arm, rate), row in said.items():
        lines.append(_row(f"| {arm} | {rate:g} |", row, found[arm, rate], "input_plus_output_tokens_per_s"))
    lines += ["", "| gain of host memory at | tokens/s | | mean TTFT | | p90 TTFT | |", "|---|---|---|---|---|---|---|"]
    for rate in sorted({rate for _, rate in said}):
        lines.append(
            _gains(
                f"| {rate:g}/s |", (said["hbm", rate], said["hbm_cpu", rate]),
                (found["hbm", rate], found["hbm_cpu", rate]), "input_plus_output_tokens_per_s",
            )
        )  # fmt: skip
    return "\n".join(lines)


def lustre(data: Path, seed: int, read_gb_per_s: float, router: str) -> str:
    """Host memory alone and with a file system that all replicas share, 20 requests at a time."""
    said = {row["arm"]: row for row in measured(data / "kv_tiers_lustre.csv")}
    host = {"kind": "host", "gib": 60.0}
    store = {"kind": "remote", "gib": 18_000.0, "read_gb_per_s": read_gb_per_s, "staged": True}
    tiers = {"hbm_cpu": [host], "hbm_cpu_lustre": [host, store]}
    found: dict[str, dict[str, float]] = {}
    for arm, mine in tiers.items():
        began = time.perf_counter()
        settings = {
            **QWEN, "memory": {"kv_blocks": 8474, "release": "0.19", "tiers": mine}, "router": ROUTERS[router], "seed": seed,
            "workload": {
                "shared_prefix": {
                    "groups": 50, "prompts_per_group": 50, "system_prompt_tokens": 30_000, "question_tokens": 256,
                    "output_tokens": 1024, "stages": [{"rate_per_s": 2700.0, "duration_s": 1.0}],
                }
            },
        }  # fmt: skip
        columns = run(in_turns(build(Scenario.from_mapping(settings)), 20))
        print(f"lustre, {arm}: {time.perf_counter() - began:.1f} s", links(columns), flush=True)
        found[arm] = figures(columns.requests, np.arange(2700))
    lines = [
        f"file system read at {read_gb_per_s:g} GB/s by each replica, router {router} (both assumed)",
        "",
        "| arm | tokens/s | | mean TTFT (s) | | p90 TTFT (s) | | mean E2E (s) | | found | loaded |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(f"| {arm} |", said[arm], found[arm], "total_tokens_per_s") for arm in said),
        "",
        "| gain of the file system | tokens/s | | mean TTFT | | p90 TTFT | |",
        "|---|---|---|---|---|---|---|",
        _gains(
            "| |",
            (said["hbm_cpu"], said["hbm_cpu_lustre"]),
            (found["hbm_cpu"], found["hbm_cpu_lustre"]),
            "total_tokens_per_s",
        ),
    ]
    return "\n".join(lines)


def in_turns(experiment: Experiment, clients: int) -> Experiment:
    """The same requests, sent by *clients* clients, each of whom sends its next when its last has ended."""
    trace = experiment.workload
    assert isinstance(trace, Trace)
    n = len(trace)
    follows = Follows(
        offsets=np.concatenate((np.zeros(clients + 1, np.int64), np.arange(1, n - clients + 1))),
        rows=np.arange(n - clients),
        delay_ns=np.zeros(n - clients, np.int64),
    )
    return replace(experiment, workload=replace(trace, arrival_ns=np.zeros(n, np.int64), follows=follows))


def peers(data: Path, read_gb_per_s: float) -> str:
    """A prefix computed, and pulled from the host memory of another replica."""
    lines = [
        f"peers read at {read_gb_per_s:g} GB/s (assumed)",
        "",
        "| prefix tokens | computed (ms) | | error | pulled (ms) | | error | pulled / computed | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured(data / "p2p_pull_vs_recompute.csv"):
        tokens = int(row["prefix_tokens"])
        settings = {
            "model": "gpt-oss-120b", "hardware": "h200", "replicas": 2, "scheduler": {"policy": "vllm"},
            "memory": {
                "tiers": [
                    {"kind": "host", "gib": 100.0},
                    {"kind": "peer", "read_gb_per_s": read_gb_per_s, "staged": True, "latency_ms": 0.005},
                ]
            },
            "workload": {
                "requests": 2, "prompt_tokens": tokens, "output_tokens": 1,
                "arrivals": {"process": "poisson", "rate_per_s": 1.0},
            },
        }  # fmt: skip
        experiment = build(Scenario.from_mapping(settings))
        ids = np.arange(-(-tokens // 16), dtype=np.int64)
        trace = Trace(
            arrival_ns=np.array([0, 100 * 10**9]),
            prompt_tokens=np.array([tokens, tokens]),
            output_tokens=np.array([1, 1]),
            prefix_blocks=np.tile(ids, 2),
            prefix_offsets=np.array([0, len(ids), 2 * len(ids)]),
            prefix_block_tokens=16,
        )
        requests = run(replace(experiment, workload=trace, router=RoundRobin())).requests
        # A latency of prefill: without the front end, which a client would see as well.
        front_s = experiment.admission_s + tokens * experiment.admission_s_per_token
        ms = (requests["first_token_ns"] - requests["arrival_ns"]) / 1e6 - front_s * 1e3
        computed, pulled = float(row["recompute_ms"]), float(row["p2p_pull_ms"])
        lines.append(
            f"| {tokens:,} | {computed:.0f} | {ms[0]:.0f} | {ms[0] / computed - 1:+.0%} | {pulled:.0f} | {ms[1]:.0f} | "
            f"{ms[1] / pulled - 1:+.0%} | {pulled / computed:.2f} | {ms[1] / ms[0]:.2f} |"
        )
    return "\n".join(lines)


def apart(data: Path, seed: int, kv_blocks: int, link_gb_per_s: float) -> str:
    """Prefill machines with and without host memory behind them, which their router does not know of."""
    stages = measured(data / "pd_multitier_stages.csv")
    runs = {(row["workload"], row["arm"]): row for row in measured(data / "pd_multitier_runs.csv")}
    rates = sorted({float(row["offered_rate_req_s"]) for row in stages})
    ends = np.cumsum([round(rate * 60) for rate in rates])
    eviction = {
        "shared_prefix": {
            "groups": 1000, "prompts_per_group": 5, "system_prompt_tokens": 16_000, "question_tokens": 256,
            "output_tokens": 256, "pause_s": 60.0,
            "stages": [{"rate_per_s": rate, "duration_s": 60.0} for rate in rates],
        }
    }  # fmt: skip
    # Nothing in common: a question each behind a beginning of one token.
    alone = {
        "shared_prefix": {
            "groups": 5400, "prompts_per_group": 1, "system_prompt_tokens": 1, "question_tokens": 4999,
            "output_tokens": 250, "arrival": "constant", "stages": [{"rate_per_s": 45.0, "duration_s": 120.0}],
        }
    }  # fmt: skip
    lines = [
        f"{link_gb_per_s:g} GB/s between machines (assumed)",
        "",
        "| arm | req/s | finished/s | | p90 E2E (s) | | found | loaded |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole = [
        "",
        "| workload | arm | finished/s | | mean E2E (s) | | mean TTFT (s) | | found | loaded |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, tiers in (("nixl", []), ("cpu_blind", [{"kind": "host", "gib": 100.0}])):
        for name, workload in (("eviction", eviction), ("random", alone), ("documents", alone)):
            settings = {
                "model": "gpt-oss-120b", "hardware": "h200", "serving_release": "0.27.1", "scheduler": {"policy": "vllm"},
                "memory": {"block_tokens": 128}, "seed": seed, "workload": workload,
                "router": {
                    "policy": "llm_d", "index": "exact", "prefix": 3.0, "queue": 2.0, "kv": 2.0, "no_hit_lru": 0.0,
                    "poll_s": 0.05,
                },
                "pools": {
                    "prefill": {
                        "role": "prefill", "replicas": 8,
                        # One more for the null block.
                        "memory": {"block_tokens": 128, "kv_blocks": kv_blocks + 1, "tiers": tiers},
                    },
                    "decode": {"role": "decode", "replicas": 2, "parallel": {"tensor": 4}},
                },
                "links": {"net": {"bandwidth_gb_per_s": link_gb_per_s}},
                "handover": {"like": "vllm", "router": "least_outstanding"},
            }  # fmt: skip
            began = time.perf_counter()
            experiment = build(Scenario.from_mapping(settings))
            if name == "documents":
                experiment = replace(experiment, workload=documents(seed))
            columns = run(experiment)
            print(f"apart, {name}, {arm}: {time.perf_counter() - began:.1f} s", links(columns), flush=True)
            requests = columns.requests
            if name == "eviction":
                mine = [row for row in stages if row["arm"] == arm]
                for row, rows in zip(mine, np.split(np.arange(ends[-1]), ends[:-1]), strict=True):
                    figure = figures(requests, rows)
                    lines.append(
                        f"| {arm} | {float(row['offered_rate_req_s']):g} | {float(row['rate_req_s']):.1f} | "
                        f"{figure['per_s']:.1f} | {float(row['e2e_p90_s']):.2f} | {figure['e2e_p90_s']:.2f} | "
                        f"{figure['hit']:.3f} | {figure['loaded']:.3f} |"
                    )
            said, figure = runs[name, arm], figures(requests, np.arange(len(requests["arrival_ns"])))
            whole.append(
                f"| {name} | {arm} | {float(said['rate_req_s']):.2f} | {figure['per_s']:.2f} | "
                f"{float(said['e2e_mean_s']):.2f} | {figure['e2e_mean_s']:.2f} | {float(said['ttft_mean_s']):.2f} | "
                f"{figure['ttft_mean_s']:.2f} | {figure['hit']:.3f} | {figure['loaded']:.3f} |"
            )
    return "\n".join([*lines, *whole])


def documents(seed: int) -> Trace:
    """192 conversations of six turns, each behind a document of 49,152 tokens of its own.

    There are 128 clients, of whom 64 have two conversations, one after the other. A turn adds a question and the answer before it,
    of 256 tokens each, one to two seconds after that answer.
    """
    conversations, clients, turns, tokens = 192, 128, 6, 128
    rng = np.random.default_rng([seed, 1])
    turn = np.tile(np.arange(turns), conversations)
    which = np.repeat(np.arange(conversations), turns)
    prompt = 49_152 + 256 + turn * 512
    counts = (prompt + 256) // tokens
    first = np.cumsum(counts) - counts
    at = np.arange(counts.sum()) - np.repeat(first, counts)
    n = conversations * turns
    waits = (turn > 0) | (which >= clients)
    before = np.where(turn > 0, np.arange(n) - 1, (which - clients + 1) * turns - 1)
    trace = Trace(
        arrival_ns=np.zeros(n, np.int64),
        prompt_tokens=prompt,
        output_tokens=np.full(n, 256),
        prefix_blocks=np.repeat(which * counts.max(), counts) + at,
        prefix_offsets=np.concatenate(([0], np.cumsum(counts))),
        prefix_block_tokens=tokens,
        follows=Follows(
            offsets=np.concatenate(([0], np.cumsum(waits))),
            rows=before[waits],
            delay_ns=np.rint(rng.uniform(1e9, 2e9, n)).astype(np.int64)[waits],
        ),
    )
    return trace


def links(columns: Columns) -> str:
    """The transfers over the links of tiers, in words."""
    return "; ".join(
        f"{kind}: {facts['loads']} loads of {facts['load_bytes'] / 1e9:.0f} GB, "
        f"{facts['load_wait_ns'] / max(facts['loads'], 1) / 1e6:.0f} ms in the queue each, "
        f"{facts['stores']} stores of {facts['store_bytes'] / 1e9:.0f} GB"
        for kind, facts in columns.meta.get("tiers", {}).items()
    )


def _row(head: str, said: Mapping[str, str], found: Mapping[str, float], tokens: str) -> str:
    cells = [f"{float(said[tokens]):,.0f}", f"{found['tokens_per_s']:,.0f}"]
    for key in ("ttft_mean_s", "ttft_p90_s", "e2e_mean_s"):
        cells += [f"{float(said[key]):.2f}", f"{found[key]:.2f}"]
    return f"{head} {' | '.join(cells)} | {found['hit']:.3f} | {found['loaded']:.3f} |"


def _gains(head: str, said: Any, found: Any, tokens: str) -> str:
    """With the tier over without it, measured and simulated."""
    cells = [
        f"x {float(said[1][tokens]) / float(said[0][tokens]):.2f}",
        f"x {found[1]['tokens_per_s'] / found[0]['tokens_per_s']:.2f}",
    ]
    for key in ("ttft_mean_s", "ttft_p90_s"):
        cells += [f"x {float(said[1][key]) / float(said[0][key]):.2f}", f"x {found[1][key] / found[0][key]:.2f}"]
    return f"{head} {' | '.join(cells)} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help="cpu, lustre, peers, apart; all without it")
    parser.add_argument("--data", type=Path, default=Path("../shared/serving"), help="folder of the measured tables")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for name in asked.case or ("cpu", "lustre", "peers", "apart"):
        if name == "cpu":
            # The text says 200 GiB, the manifest 100.
            for gib in (200.0, 100.0):
                print(cpu(asked.data, asked.seed, gib), flush=True)
        elif name == "lustre":
            # 18,000 GiB at 1,000 MB/s a TiB, the fastest that is sold, for one replica or shared by eight.
            for router in ("random", "guide", "hbm_cpu"):
                for rate in (17.6, 2.2):
                    print(lustre(asked.data, asked.seed, rate, router), flush=True)
        elif name == "peers":
            # 400 Gbit/s of a rail.
            print(peers(asked.data, 50.0), flush=True)
        elif name == "apart":
            # 1,630,790 tokens, as published; a rail of 400 Gbit/s.
            print(apart(asked.data, asked.seed, 12_740, 50.0), flush=True)
        else:
            parser.error(f"there is no case {name}; they are cpu, lustre, peers and apart")


if __name__ == "__main__":
    main()
