"""The cost of a request in the prefix cache, by the size of the cache; and the conversation trace with the cache and without.

    python -m benchmarks.prefix [--trace MOONCAKE.jsonl] [--sessions SESSIONS.parquet]

Requests of 4,000 tokens in blocks of 16, one after the other, half of each shared with an earlier one, over a cache that is full:
processor time in microseconds a request. Then, on one machine, what the engine finds at several loads beside an ideal cache that is
as large as the pool, and one that is as large as what running requests leave of it. Then requests per second of processor time of a
replay on 8 machines, with the cache and without, the best of three runs each in turn: with vLLM's blocks and with SGLang's tree.
Before all that the recorded sessions of a coding agent on four replicas, in a process of their own: its processor time until the
file is read and until the run has ended, both from its start, and the most memory that it held.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sim.engine import run
from sim.engine.cache.block_cache import BlockCache
from sim.engine.kv.content import contents_of
from sim.scenario import Scenario
from sim.scenario.assembly import build
from workloads import reuse

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
DEFAULT_TRACE = SHARED / "traces" / "mooncake_conversation.jsonl"
DEFAULT_SESSIONS = SHARED / "serving" / "agentic_sessions.parquet"
BLOCK_TOKENS = 16
LOADS = (0.002, 0.03, 0.06, 0.09, 0.12, 0.15)
"""Multiples of the trace's rate; at the first, requests are served one at a time but for bursts."""
BLOCKS = 250
"""The blocks of a request."""


def us_per_request(total: int, n: int = 4000) -> float:
    """Microseconds a request in a cache of *total* blocks that is full."""
    rng = np.random.default_rng(total)
    # As many as fill the cache, and those that are timed.
    filling = min(2 * total // BLOCKS + 1, 100_000)
    long = max(total // filling, BLOCKS)
    first = np.arange(filling + n) * (long + BLOCKS)
    lengths = np.where(np.arange(filling + n) < filling, long, BLOCKS)
    rows = [start + np.arange(length) for start, length in zip(first.tolist(), lengths.tolist(), strict=True)]
    for row in range(filling, filling + n):
        rows[row][: BLOCKS // 2] = rows[rng.integers(max(row - 2000, 0), row)][: BLOCKS // 2]
    tokens = lengths * BLOCK_TOKENS
    contents = contents_of(
        np.concatenate(rows),
        np.concatenate(([0], np.cumsum(lengths))),
        BLOCK_TOKENS,
        tokens,
        np.ones(filling + n, np.int64),
        BLOCK_TOKENS,
    )
    pool = BlockCache(max(total, long), BLOCK_TOKENS, contents)
    began = 0.0
    for id_, (length, of_tokens) in enumerate(zip(lengths.tolist(), tokens.tolist(), strict=True)):
        if id_ == filling:
            began = time.process_time()
        found = pool.found_blocks(id_, of_tokens)
        pool.admit(id_, found)
        pool.take(length - found)
        pool.cached(id_, of_tokens)
        pool.release(id_, length, of_tokens)
    return 1e6 * (time.process_time() - began) / n


def requests_per_s(trace: Path, stack: str) -> tuple[float, float]:
    """With the cache and without."""
    scenario = Scenario.default().with_set(f"workload={{trace: {trace}}}").with_set("replicas=8")
    scenario = scenario.with_set(f"serving_stack={stack}").with_set(f"scheduler={{policy: {stack}}}")
    experiments = [build(scenario.with_set(f"memory.prefix_caching={caching}")) for caching in ("true", "false")]
    best = [0.0, 0.0]
    for _ in range(3):
        for at, experiment in enumerate(experiments):
            began = time.process_time()
            run(experiment)
            best[at] = max(best[at], len(experiment.workload) / (time.process_time() - began))
    return best[0], best[1]


def by_load(trace: Path, factor: float) -> tuple[float, ...]:
    """At *factor* of the trace's rate: requests a second, the share of the pool that running requests hold when prompts are
    computed, and shares of prompt tokens found: by the engine, and by ideal caches of the pool's size and of the rest's."""
    experiment = build(Scenario.default().with_set(f"workload={{trace: {trace}}}"))
    workload = experiment.workload.scale_rate(factor)
    columns = run(replace(experiment, workload=workload))
    held, computed = [], []
    for block in columns.iteration_blocks():
        prompts = block["prefill_tokens"] > 0
        held.append(block["kv_blocks_used"][prompts])
        computed.append(block["prefill_tokens"][prompts])
    pool = columns.meta["kv_blocks_total"][0]
    used = float(np.average(np.concatenate(held), weights=np.concatenate(computed))) / pool
    curve = reuse(workload)
    tokens = pool * experiment.hosted[0].block_tokens
    found = columns.requests["prefix_hit_tokens"].sum() / workload.prompt_tokens.sum()
    rate = len(workload) / (int(workload.arrival_ns.max() - workload.arrival_ns.min()) * 1e-9)
    return rate, used, float(found), float(curve.hit_rate(tokens)), float(curve.hit_rate(tokens * (1 - used)))


def sessions_cost(sessions: Path) -> tuple[int, float, float, float]:
    """The requests of the sessions; seconds of processor time since this process began, when the file is read and when the run has
    ended; and its peak in GB."""
    config = json.loads((ROOT / "hwmodels" / "models" / "qwen3-32b.json").read_text())
    with TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        # Their prompts are longer than what the model was released for.
        model.write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
        scenario = Scenario.default().with_set(f"model={model}").with_set("hardware=h200-sxm")
        for setting in ("parallel={tensor: 4}", "replicas=4", "router=session", "scheduler={policy: vllm}"):
            scenario = scenario.with_set(setting)
        arrivals = "{process: poisson, rate_per_s: 0.02}"
        experiment = build(scenario.with_set(f"workload={{sessions: {sessions}, arrivals: {arrivals}}}"))
        read_s = time.process_time()
        columns = run(experiment)
        ended_s = time.process_time()
    return (
        len(columns.requests["arrival_ns"]),
        read_s,
        ended_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--sessions", type=Path, default=DEFAULT_SESSIONS, help="recorded sessions of a coding agent")
    options = parser.parse_args()
    # First, since a process counts the peak of the one that started it as its own.
    if options.sessions.exists():
        with ProcessPoolExecutor(1, get_context("spawn")) as own:
            _, read_s, ended_s, peak = own.submit(sessions_cost, options.sessions).result()
        print(f"sessions: {ended_s:.2f} s of processor time, {read_s:.2f} s until they are read; {peak:.2f} GB")
    else:
        print(f"{options.sessions} is not here: the sessions are left out")
    for exponent in range(3, 8):
        print(f"10^{exponent} blocks: {us_per_request(10**exponent):6.1f} us a request", flush=True)
    if options.trace.exists():
        replays(options.trace)
    else:
        print(f"{options.trace} is not here: the replay is left out")


def replays(trace: Path) -> None:
    """Prints what is found at several loads, and the speed with the cache and without."""
    print("requests/s  held by who runs  found, %  ideal, %  ideal of the rest, %")
    for factor in LOADS:
        rate, used, *found = by_load(trace, factor)
        print(f"{rate:10.3f}  {used:16.2f}  " + "  ".join(f"{100 * share:8.2f}" for share in found), flush=True)
    for stack in ("vllm", "sglang"):
        on, off = requests_per_s(trace, stack)
        print(
            f"replay on 8 machines, {stack}: {on:,.0f} requests/s with the cache, {off:,.0f} without, ratio {on / off:.2f}"
        )


if __name__ == "__main__":
    main()
