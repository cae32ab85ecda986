"""Our `vllm` beside the scheduler of vLLM 0.32.0 itself: the same steps, evictions and blocks over random workloads.

The release runs in an environment of its own, on a CPU and without a model. ROOFTRACE_VLLM_PYTHON names its Python:

    python -m venv v && v/bin/pip install torch==2.13.0 vllm==0.32.0
    v/bin/pip uninstall -y torchvision torchaudio torchcodec
    ROOFTRACE_VLLM_PYTHON=v/bin/python pytest -m slow tests/oracle/test_vllm.py

Switched off on both sides: a budget that ends within the drafted tokens of a sequence; prompts of one token; and the prefix cache,
but for the workloads of `vllm_prefix_cases`, where the tokens found and the blocks evicted in every step are compared as well.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest

from sim.engine.time.errors import PolicyError
from tests.engine.build import patches_the_engine
from tests.oracle import vllm_prefix_cases
from tests.oracle.vllm_cases import a_case, our_decisions, with_more_limits
from tests.oracle.vllm_prefix_cases import a_prefix_case
from tests.oracle.vllm_ranks_cases import a_ranks_case, our_ranks

HERE = Path(__file__).parent
RECORDED = HERE / "vllm-0.32.0.json.gz"
"""The release's decisions on the first workloads: seed, and [second, {request: tokens}, preempted, blocks held] of each step."""
RECORDED_PREFIXES = HERE / "vllm-0.32.0-prefixes.json.gz"
"""The same of workloads with shared beginnings, with {request: tokens found} and blocks evicted besides."""
RECORDED_RANKS = HERE / "vllm-0.32.0-ranks.json.gz"
"""[second, {request: tokens}] of each step of ranks with a prefill cadence, as the schedulers of the release take it."""


def release_python() -> str:
    """A Python that has vLLM; the test is skipped where there is none."""
    python = os.environ.get("ROOFTRACE_VLLM_PYTHON")
    if python:
        return python
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    pytest.skip("needs vLLM 0.32.0: ROOFTRACE_VLLM_PYTHON names the Python of an environment that has it")


def decisions(cases: list[dict[str, Any]], folder: Path) -> list[list[Any] | None]:
    """The release's decisions; None where it goes on for ever."""
    return [
        steps if steps == PADDED else steps and by_number(steps) for steps in answered("vllm_release.py", cases, folder)
    ]


def answered(script: str, cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The decisions that a script writes which runs beside the release."""
    source, target = folder / "workloads.json", folder / "decisions.json"
    source.write_text(json.dumps(cases))
    command = [release_python(), str(HERE / script), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(target.read_text())


def steps_of_ranks(cases: list[dict[str, Any]], folder: Path) -> list[list[Any]]:
    """[second, {request: tokens}] of each step, all ranks together, as their schedulers of the release plan it."""
    found = answered("vllm_ranks_release.py", cases, folder)
    return [[[second, numbered(dict(ChainMap(*ran)))] for second, ran in steps] for steps in found]


PADDED = "padded"
"""In place of the steps of a workload in which a prompt of one token is padded to a round of speculation, which is not modelled."""


def by_number(steps: list[Any]) -> list[Any]:
    """The same steps with requests by number, which JSON writes as strings."""
    return [[numbered(part) if isinstance(part, dict) else part for part in step] for step in steps]


def numbered(of_requests: dict[str, int]) -> dict[int, int]:
    return {int(id_): tokens for id_, tokens in of_requests.items()}


def assert_alike(case: dict[str, Any], theirs: list[Any] | None) -> None:
    decide = vllm_prefix_cases.our_decisions if "id_tokens" in case else our_decisions
    if theirs is None:
        with pytest.raises(PolicyError, match="take memory from each other in turn"):
            decide(case)
        return
    ours = decide(case)
    for step, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == its, f"workload {case['seed']}, step {step}"
    assert len(ours) == len(theirs), f"workload {case['seed']}"


def test_decisions_are_those_that_the_release_made() -> None:
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    assert len(recorded) == 40
    for seed, steps in recorded:
        assert_alike(a_case(seed), by_number(steps))


@patches_the_engine
def test_what_is_found_and_evicted_is_what_the_release_found_and_evicted() -> None:
    recorded = json.loads(gzip.decompress(RECORDED_PREFIXES.read_bytes()))
    assert len(recorded) == 30
    for seed, steps in recorded:
        assert_alike(a_prefix_case(seed), by_number(steps))
    steps = [step for _, found in recorded for step in found]
    assert sum(sum(found.values()) for *_, found, _ in steps) > 10_000
    assert sum(evicted for *_, evicted in steps) > 1000


def test_ranks_with_a_prefill_cadence_step_as_the_release_s_schedulers_do() -> None:
    recorded = json.loads(gzip.decompress(RECORDED_RANKS.read_bytes()))
    assert len(recorded) == 20
    assert {a_ranks_case(seed)["prefill_schedule_interval"] for seed, _ in recorded} == {1, 2, 3, 4, 7}
    for seed, steps in recorded:
        assert our_ranks(a_ranks_case(seed)) == by_number(steps), f"workload {seed}"


def test_plans_of_a_cadence_that_are_held_are_those_that_are_asked_for_each_step() -> None:
    for seed in range(18, 40):
        case = a_ranks_case(seed)
        asked = [[second, sum(run.values())] for second, run in our_ranks(case)]
        assert our_ranks(case, asked_each_step=False) == asked, f"workload {seed}"


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_every_step_of_ranks_with_a_prefill_cadence_is_the_release_s_own(first: int, tmp_path: Path) -> None:
    cases = [a_ranks_case(seed) for seed in range(first, first + 250)]
    for case, theirs in zip(cases, steps_of_ranks(cases, tmp_path), strict=True):
        assert our_ranks(case) == theirs, f"workload {case['seed']}"


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_every_block_that_is_found_or_evicted_is_the_release_s_own(first: int, tmp_path: Path) -> None:
    cases = [a_prefix_case(seed) for seed in range(first, first + 250)]
    compared = 0
    for case, theirs in zip(cases, decisions(cases, tmp_path), strict=True):
        if theirs != PADDED:
            assert_alike(case, theirs)
            compared += 1
    assert compared > 220


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_every_step_is_the_release_s_own(first: int, tmp_path: Path) -> None:
    cases = [a_case(seed) for seed in range(first, first + 250)]
    for case, theirs in zip(cases, decisions(cases, tmp_path), strict=True):
        assert_alike(case, theirs)


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
def test_limits_that_are_rarely_set_are_the_release_s_own(tmp_path: Path) -> None:
    cases = [with_more_limits(a_case(seed)) for seed in range(20_000, 20_240)]
    for case, theirs in zip(cases, decisions(cases, tmp_path), strict=True):
        assert_alike(case, theirs)


def record() -> None:
    """Write the recorded decisions anew: `python -m tests.oracle.test_vllm`."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        # Short workloads, so that little is kept.
        cases = [case for case in map(a_case, range(5000, 5400)) if sum(r["output"] for r in case["requests"]) < 250][
            :40
        ]
        found = [[case["seed"], steps] for case, steps in zip(cases, decisions(cases, Path(folder)), strict=True)]
        chosen = [
            case for case in map(a_prefix_case, range(5000, 5400)) if sum(r["output"] for r in case["requests"]) < 250
        ]
        beside = [
            [case["seed"], steps]
            for case, steps in zip(chosen, decisions(chosen, Path(folder)), strict=True)
            if steps not in (None, PADDED)
        ][:30]
        short = [
            case
            for case in map(a_ranks_case, range(5000, 5400))
            if sum(r["output"] for r in case["requests"]) < 150 and case["kv_blocks"] < 2000
        ][:20]
        ranks = [[case["seed"], steps] for case, steps in zip(short, steps_of_ranks(short, Path(folder)), strict=True)]
    for file, kept in ((RECORDED, found), (RECORDED_PREFIXES, beside), (RECORDED_RANKS, ranks)):
        file.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    record()
