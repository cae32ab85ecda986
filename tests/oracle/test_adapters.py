"""Our schedulers beside those of installed releases where requests ask for LoRA adapters, more than a batch may have.

The release drives inside our event loop (`policies.installed`), with prefix caches, priorities, speculation and overlap as drawn.
Before vLLM 0.32 requests that were passed over once go ahead of preempted ones, which is not modelled.
With ROOFTRACE_VLLM_PYTHONS and ROOFTRACE_SGLANG_PYTHONS (see `test_installed`) `python -m tests.oracle.test_adapters` writes the
record anew.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_diff import decided, fitted, nearest_rules, ours_of, sglang_workloads, vllm_case
from sim.engine.batch.decode_set import DecodeSet
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.batch.prices import AdapterPrices, prices_of
from sim.engine.serve.adapter_queue import AdapterQueue
from sim.engine.serve.adapters import Adapters
from sim.engine.spec.adapters import AdapterSpec
from sim.engine.time.clock import TICK_BITS
from sim.engine.time.events import Clock
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.oracle import test_sglang
from tests.oracle.adapter_cases import with_adapters
from tests.oracle.sglang_driven import driven
from tests.oracle.sglang_pool_release import SEEDS, Batches, batches
from tests.oracle.test_vllm import by_number
from tests.oracle.vllm_driven import PADDED, driven_decisions, release_of

RECORDED = Path(__file__).with_name("adapters.json.gz")
"""[seed, steps] of workloads whose steps are others without the limit, by release, and the loads of SGLang's memory pool."""
EACH = 12
_FIRST = 7000
_SGLANG = 120
"""Workloads of SGLang that are looked at."""


def recorded() -> dict[str, list[Any]]:
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


def an_adapter_case(seed: int, rules: str) -> dict[str, Any]:
    return with_adapters(fitted(vllm_case(seed), rules), seed)


def sglang_cases() -> dict[int, dict[str, Any]]:
    """Short workloads by their place."""
    drawn = enumerate(islice(sglang_workloads(_SGLANG), _SGLANG))
    cases = {seed: with_adapters(case, seed) for seed, (_, case) in drawn}
    return {seed: case for seed, case in cases.items() if sum(each["output"] for each in case["requests"]) < 300}


@patches_the_engine
@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_vllm_passes_over_the_requests_that_its_release_has_been_recorded_to_pass_over(release: str) -> None:
    steps_of = recorded()[release]
    assert len(steps_of) == EACH
    for seed, steps in steps_of:
        assert ours_of(an_adapter_case(seed, release), release) == by_number(steps), f"workload {seed}"


@patches_the_engine
def test_sglang_passes_over_the_requests_that_it_has_been_recorded_to_pass_over() -> None:
    cases, steps_of = sglang_cases(), recorded()["sglang"]
    assert len(steps_of) == EACH
    for seed, theirs in steps_of:
        found = test_sglang.difference(cases[seed], test_sglang.by_number(theirs))
        assert found is None, f"workload {seed}: {found}"


def our_loads(case: Batches) -> list[list[int]]:
    """The adapters that our slots load for each batch."""
    host = max(max(adapters) for adapters in case.adapters) + 1
    spec = AdapterSpec(
        ranks=(8,) * host, max_loras=case.slots, max_cpu_loras=max(host, case.slots), base_has_slot=True,
        eviction="fifo" if case.eviction == "fifo" else "lru",
        step_s=lambda rows, ranks: 0.0, disk_s=lambda rank: 0.0, slot_s=lambda rank: 0.0,
    )  # fmt: skip
    prices = AdapterPrices(prices_of(Linear(), None, 0.0, drafts_prompts=False))
    slots = Adapters(spec, AdapterQueue(array("q")), prices, Clock())
    batch = MicroBatch(0, DecodeSet(16, None))
    for at_ns, adapters in enumerate(case.adapters):
        slots.begin(batch, {*adapters}, 1, at_ns << TICK_BITS)
        assert slots.fault([]) is None
    loads = slots.columns().loads
    return [[adapter for at, adapter, to, _ in loads if at == at_ns and to == 1] for at_ns in range(len(case.adapters))]


def test_slots_are_filled_as_the_memory_pool_of_sglang_has_been_recorded_to_fill_them() -> None:
    theirs = recorded()["sglang pool"]
    assert len(theirs) == len(SEEDS)
    for seed, loads in zip(SEEDS, theirs, strict=True):
        assert our_loads(batches(seed)) == loads, f"workload {seed}"


def pool_loads(python: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "loads.json"
        subprocess.run([python, "-m", "tests.oracle.sglang_pool_release", str(file)], check=True)
        return json.loads(file.read_text())


def vllm_steps(python: str, release: str) -> Iterator[list[Any]]:
    """[seed, steps] of workloads that the limit shows in."""
    for seed in count(_FIRST):
        case = an_adapter_case(seed, release)
        if sum(request["output"] for request in case["requests"]) > 250:
            continue
        if ours_of(case, release) == ours_of({**case, "max_loras": 100}, release):
            continue
        steps = decided(partial(driven_decisions, case, python))
        if isinstance(steps, list) and steps != PADDED:
            yield [seed, steps]


def sglang_steps(python: str) -> Iterator[list[Any]]:
    for seed, case in sglang_cases().items():
        free = {**case, "settings": {**case["settings"], "max_loras_per_batch": 100}}
        theirs = driven(case, python)
        if test_sglang.difference(free, theirs) is not None:
            yield [seed, theirs]


def record() -> None:
    sglang = os.environ["ROOFTRACE_SGLANG_PYTHONS"].split(":")[0]
    found = {"sglang": [*islice(sglang_steps(sglang), EACH)], "sglang pool": pool_loads(sglang)}
    for python in os.environ["ROOFTRACE_VLLM_PYTHONS"].split(":"):
        release = nearest_rules(release_of(python))
        found[release] = [*islice(vllm_steps(python, release), EACH)]
    RECORDED.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    record()
