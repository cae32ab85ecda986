"""The adapters that SGLang's own memory pool loads into slots, batch by batch.

    PYTHON_WITH_SGLANG -m tests.oracle.sglang_pool_release LOADS.json

Of the release are `LoRAMemoryPool.prepare_lora_batch` and its eviction policies; weights are not copied.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from policies.installed.sglang.worker import Release

SEEDS = range(60)


class Batches(NamedTuple):
    """Slots, and the adapters of one batch after the other; -1: the base model."""

    slots: int
    eviction: str
    adapters: list[list[int]]


def batches(seed: int) -> Batches:
    rng = random.Random(seed)
    slots, count = rng.choice([1, 2, 3, 4, 6]), rng.choice([2, 4, 7])
    each: list[list[int]] = []
    for _ in range(30):
        asked = rng.sample(range(-1, count), rng.randrange(1, min(slots, count) + 1))
        each.append(sorted(asked))
    return Batches(slots, rng.choice(["lru", "fifo"]), each)


def loads_of(module: Any, case: Batches) -> Iterator[list[int]]:
    """The adapters that the pool of the release loads for each batch, the base model left out."""
    pool = module.LoRAMemoryPool.__new__(module.LoRAMemoryPool)
    loaded: list[str | None] = []
    pool.max_loras_per_batch, pool.uid_to_buffer_id = case.slots, {}
    pool.buffer_id_to_uid = [module.EMPTY_SLOT] * case.slots
    pool.eviction_policy = module.get_eviction_policy(case.eviction)
    pool.load_lora_weight_to_buffer = lambda uid, *_: loaded.append(uid)
    pool.prepare_lora_batch({None}, {}, [], {}, None, None)
    for adapters in case.adapters:
        loaded.clear()
        uids = {None if adapter < 0 else f"{adapter:03d}" for adapter in adapters}
        pool.prepare_lora_batch(uids, {}, [], {}, None, None)
        yield [int(uid) for uid in loaded if uid is not None]


if __name__ == "__main__":
    pools = Release().module("sglang.srt.lora.mem_pool")
    with open(sys.argv[1], "w") as file:
        json.dump([[*loads_of(pools, batches(seed))] for seed in SEEDS], file)
