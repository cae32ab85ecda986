"""What a request costs in the prefix cache, by the size of the cache; and the conversation trace with the cache and without.

    python -m benchmarks.prefix [--trace MOONCAKE.jsonl]

Requests of 4,000 tokens in blocks of 16, one after the other, half of each shared with an earlier one, over a cache that is full:
processor time in microseconds a request. Then requests per second of processor time of a replay on 8 machines, with the cache and
without, the best of three runs each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from sim.engine.content import contents_of
from sim.engine.prefix import BlockCache

DEFAULT_TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
BLOCK_TOKENS = 16
BLOCKS = 250
"""Of a request."""


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


def requests_per_s(trace: Path, caching: bool) -> float:
    from sim.engine import run
    from sim.scenario import Scenario
    from sim.scenario.assembly import build

    scenario = Scenario.default().with_set(f"workload={{trace: {trace}}}").with_set("replicas=8")
    experiment = build(scenario.with_set(f"memory.prefix_caching={'true' if caching else 'false'}"))
    best = 0.0
    for _ in range(3):
        began = time.process_time()
        run(experiment)
        best = max(best, len(experiment.workload) / (time.process_time() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="Mooncake's conversation trace")
    options = parser.parse_args()
    for exponent in range(3, 8):
        print(f"10^{exponent} blocks: {us_per_request(10**exponent):6.1f} us a request", flush=True)
    if not options.trace.exists():
        print(f"{options.trace} is not here: the replay is left out")
        return
    on, off = requests_per_s(options.trace, True), requests_per_s(options.trace, False)
    print(f"replay on 8 machines: {on:,.0f} requests/s with the cache, {off:,.0f} without, ratio {on / off:.2f}")


if __name__ == "__main__":
    main()
