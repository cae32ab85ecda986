"""`policies.sglang` in our engine beside SGLang's own scheduler: the same requests, tokens and memory in every step.

Needs a Python with sglang 0.5.23: ROOFTRACE_SGLANG_PYTHON names it. The release drives inside our event loop, by the parts that
`policies.installed.sglang.worker` names; `test_installed` says how to make such an environment. Recorded decisions of the release
on the first workloads, from loops of their own over a clock that counts steps, are compared everywhere.

Switched off on both sides: what `policies.sglang` leaves out, and the prefix cache, but for the workloads of
`sglang_prefix_cases`, where the tokens found and evicted, those free and those kept for others are compared in every step as well.
Where plans are made ahead, a workload is compared up to its first retraction, and requests are received before every step: of 900
workloads with longer intervals among them two differed by the step of a poll, which is not understood yet.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import policies.installed
from policies.routers import RoundRobin
from policies.sglang import Sglang
from policies.view import Plan, ReplicaView
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.time.errors import PolicyError
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.oracle import sglang_prefix_cases
from tests.oracle.adapter_cases import free_slots
from tests.oracle.sglang_driven import driven, given, release_of, trace_of
from tests.oracle.sglang_ranks_cases import an_sglang_ranks_case, in_ranks, our_ranks

RELEASE = "0.5.23"
RECORDED = Path(__file__).with_name(f"sglang-{RELEASE}.json.gz")
RECORDED_PREFIXES = Path(__file__).with_name(f"sglang-{RELEASE}-prefixes.json.gz")
"""Steps of the release over the first short workloads with shared beginnings."""
RECORDED_RANKS = Path(__file__).with_name(f"sglang-{RELEASE}-ranks.json.gz")
STEP = ("step", "run", "decode", "retract", "free")
"""The notes of a step: when an iteration starts, prompt tokens by request, who decodes, who is retracted, tokens of the pool
left."""
STEP_NS = 1_000_000


def a_workload(rng: random.Random, *, overlap: bool = False) -> dict[str, Any]:
    """Settings and requests: pools from starving to ample, prompts cut or whole, arrivals at any step, limits near and far."""
    page = rng.choice([1, 1, 1, 4, 16])
    starving = rng.random() < 0.5
    n = rng.randrange(1, 40)
    pool = -(-rng.choice([150, 300, 500] if starving else [200, 400, 1000, 3000, 20_000]) // page) * page
    seats = min(rng.choice([5, 10, 40, 40] if starving else [1, 2, 5, 10, 40]), pool // 2)
    chunk = rng.choice([-1, 16, 32, 64, 128, 512])
    ignore_eos = rng.random() < 0.15
    settings = {
        "pool_tokens": pool,
        "page_size": page,
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": rng.choice([30, 100, 1000, 16384]),
        "prefill_max_requests": rng.choice([None, None, None, 1, 2, 4]),
        "max_running_requests": seats,
        "schedule_policy": rng.choice(["fcfs", "fcfs", "lof"]),
        "schedule_conservativeness": rng.choice([0.0, 0.1, 0.3] if starving else [0.0, 0.3, 1.0, 1.0, 1.3, 2.0]),
        "enable_mixed_chunk": chunk > seats + page and rng.random() < 0.4,
        "scheduler_recv_interval": rng.choice([1, 1, 1, 2, 7, 30]),
        "disable_overlap_schedule": not overlap,
        "ignore_eos": ignore_eos,
    }
    last = rng.choice([1, 20, 100] if starving else [1, 20, 100, 400])
    longest_prompt = 20 if starving else rng.choice([20, 60, 200])
    shortest_output, longest_output = (20, 120) if starving else (1, rng.choice([4, 20, 60]))
    slack = 0 if ignore_eos else rng.choice([0, 0, 5] if starving else [0, 0, 1, 5, 60, 5000])
    requests = []
    for step in sorted(rng.randrange(last) for _ in range(n)):
        prompt = min(rng.randrange(1, longest_prompt), pool - 2 * page - 8)
        room = pool - -(-prompt // page) * page - page - 1
        output = min(rng.randrange(shortest_output, longest_output), room)
        limit = output + rng.randrange(slack + 1)
        if overlap:
            # Cut by the scheduler, not by the engine, which then would not know the end of a request ahead.
            limit = min(limit, room)
        requests.append({"step": step, "prompt": prompt, "output": output, "max_tokens": limit})
    return {"settings": settings, "requests": requests}


@dataclass(frozen=True)
class Noted:
    """A scheduler whose plans are written down as they are made."""

    inner: Sglang
    steps: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, view: ReplicaView, /) -> Plan:
        plan = self.inner.plan(view)
        gone = set(plan.preempt)
        partial = {seq.id: seq.cached_tokens for seq in view.prefilling}
        decoding = [seq for seq in view.running[:] if seq.id not in partial and not seq.leaving]
        staying = [seq for seq in decoding if seq.id not in gone]
        free = view.free_blocks + sum(seq.blocks for seq in decoding if seq.id in gone)
        if plan.decode:
            free -= sum(seq.growth_blocks for seq in staying)
        for id_, tokens in plan.run:
            cached = partial.get(id_, 0)
            free -= view.blocks(cached + tokens) - view.blocks(cached)
        if plan.reject:
            self.steps.append({"reject": [id_ for id_, _ in plan.reject]})
        if plan.run or plan.decode:
            self.steps.append(
                {
                    "step": view.now_ns // STEP_NS,
                    "run": [list(entry) for entry in plan.run],
                    "decode": sorted(seq.id for seq in staying) if plan.decode else [],
                    "retract": list(plan.preempt),
                    "free": free * view.block_tokens,
                }
            )
        return plan


def ours(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of our engine, up to where memory is not there."""
    settings = workload["settings"]
    scheduler = Noted(Sglang(**given(settings), disable_radix_cache=True))
    replica = ReplicaSpec(
        cost=Linear(fixed_s=1e-3),
        scheduler=scheduler,
        kv_blocks=settings["pool_tokens"] // settings["page_size"],
        block_tokens=settings["page_size"],
        adapters=free_slots(settings.get("max_loras_per_batch"), base_has_slot=True),
    )
    with contextlib.suppress(PolicyError):
        run(Experiment(workload=trace_of(workload), replicas=(replica,), router=RoundRobin()), fast_forward=False)
    return scheduler.steps


def release_python() -> str:
    """The Python of an environment with the release."""
    python = os.environ.get("ROOFTRACE_SGLANG_PYTHON")
    if python is None:
        pytest.skip(f"needs SGLang {RELEASE}: ROOFTRACE_SGLANG_PYTHON names the Python of an environment that has it")
    return python


def theirs(workloads: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps of SGLang's scheduler."""
    python = release_python()
    assert release_of(python) == f"SGLang {RELEASE}"
    return (driven(workload, python) for workload in workloads)


def by_number(result: dict[str, Any]) -> dict[str, Any]:
    """The same with requests by number, which JSON writes as strings."""
    for step in result["steps"]:
        if "found" in step:
            step["found"] = {int(id_): tokens for id_, tokens in step["found"].items()}
    return result


def aligned(workload: dict[str, Any], other: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | str:
    """Our steps and SGLang's as far as they are compared; a sentence where one stopped and the other did not."""
    steps = sglang_prefix_cases.ours(workload) if "id_tokens" in workload["settings"] else ours(workload)
    theirs, died = other["steps"], other["died"]
    if not workload["settings"]["disable_overlap_schedule"]:
        # After a retraction a token in flight has been dropped there, and kept here.
        last = next((j for j, step in enumerate(theirs) if step["retract"]), None)
        if last is not None:
            steps, theirs, died = steps[: last + 1], theirs[: last + 1], None
    refused = next((j for j, step in enumerate(steps) if "reject" in step), None)
    if refused is not None:
        # Theirs leaves it at the queue's head, and waits for ever when all others have ended.
        if died is None:
            return f"SGLang served what is refused here at step {refused}: {steps[refused]}"
        return steps[:refused], theirs[:refused]
    return f"SGLang stopped: {died}" if died is not None else (steps, theirs)


def first_difference(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """The first step that is not the same, as here and there; None where all are. {}: there is none."""
    for j, (our, their) in enumerate(zip_longest(ours, theirs, fillvalue={})):
        if our != their:
            return j, our, their
    return None


def difference(workload: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first step in which ours and SGLang's differ; None where none does."""
    found = aligned(workload, other)
    if isinstance(found, str):
        return found
    first = first_difference(*found)
    if first is None:
        return None
    return f"step {first[0]}, {workload['settings']}\nours   {first[1]}\nSGLang {first[2]}"


def compare(workloads: list[dict[str, Any]]) -> dict[str, int]:
    """Compare step by step; counts of what SGLang did. Fails at the first workload that differs."""
    names = ("workloads", "steps", "with prompts", "mixed", "cut", "retracted", "stalled", "found", "evicted")
    seen = dict.fromkeys(names, 0)
    for i, (workload, other) in enumerate(zip(workloads, theirs(workloads), strict=True)):
        found = difference(workload, other)
        assert found is None, f"workload {i}: {found}"
        steps = other["steps"]
        seen["workloads"] += 1
        seen["steps"] += len(steps)
        seen["with prompts"] += sum(bool(step["run"]) for step in steps)
        seen["mixed"] += sum(bool(step["run"] and step["decode"]) for step in steps)
        seen["retracted"] += sum(len(step["retract"]) for step in steps)
        seen["cut"] += sum(len(step["run"]) - len(step["retract"]) for step in steps) - len(workload["requests"])
        seen["stalled"] += other["died"] is not None
        seen["found"] += sum(sum(step.get("found", {}).values()) for step in steps)
        seen["evicted"] += sum(step.get("evicted", 0) for step in steps)
    return seen


def workloads(n: int, *, overlap: bool) -> list[dict[str, Any]]:
    rng = random.Random(15 if overlap else 14)
    drawn = [a_workload(rng, overlap=overlap) for _ in range(n)]
    return [each for each in drawn if not overlap or each["settings"]["scheduler_recv_interval"] == 1]


def prefix_workloads(n: int, *, overlap: bool) -> list[dict[str, Any]]:
    """Those of *n* drawn that are compared."""
    rng = random.Random(17 if overlap else 16)
    drawn = [sglang_prefix_cases.with_prefixes(a_workload(rng, overlap=overlap), rng) for _ in range(n)]
    return [each for each in drawn if not overlap or each["settings"]["scheduler_recv_interval"] == 1]


def short(workloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of which little is to be kept, and that find, evict or retract something."""
    return [each for each in workloads if sum(request["output"] for request in each["requests"]) < 500][:15]


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_every_step_is_the_one_that_sglang_has_been_recorded_to_take(overlap: bool) -> None:
    """The same comparison with the first few workloads, on what the release has decided."""
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    assert recorded["release"] == RELEASE
    decided = [
        {"steps": [dict(zip(STEP, step, strict=True)) for step in each["steps"]], "died": each["died"]}
        for each in recorded["overlap" if overlap else "synchronous"]
    ]
    for i, (workload, other) in enumerate(zip(workloads(15, overlap=overlap), decided, strict=False)):
        found = difference(workload, other)
        assert found is None, f"workload {i}: {found}"


@patches_the_engine
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_what_is_found_and_evicted_is_what_sglang_has_been_recorded_to_find_and_evict(overlap: bool) -> None:
    recorded = json.loads(gzip.decompress(RECORDED_PREFIXES.read_bytes()))
    assert recorded["release"] == RELEASE
    decided = recorded["overlap" if overlap else "synchronous"]
    cases = short(prefix_workloads(150, overlap=overlap))
    assert len(cases) == len(decided) == 15
    for i, (workload, other) in enumerate(zip(cases, decided, strict=True)):
        found = difference(workload, by_number(other))
        assert found is None, f"workload {i}: {found}"
    steps = [step for each in decided for step in each["steps"]]
    assert sum(sum(step["found"].values()) for step in steps) > 1000
    assert sum(step["evicted"] for step in steps) > 1000


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_every_token_that_is_found_or_evicted_is_sglang_s_own(first: int) -> None:
    seen = compare(prefix_workloads(2000, overlap=False)[first : first + 500])
    assert seen["found"] > 50_000
    assert seen["evicted"] > 100_000
    assert seen["retracted"] > 100


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
def test_every_token_found_or_evicted_by_plans_made_ahead_is_sglang_s_own() -> None:
    seen = compare(prefix_workloads(1000, overlap=True))
    assert seen["found"] > 50_000
    assert seen["evicted"] > 100_000


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
def test_every_step_is_the_one_that_sglang_takes() -> None:
    seen = compare(workloads(2000, overlap=False))
    assert seen["retracted"] > 1000
    assert seen["mixed"] > 1000


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
def test_every_step_made_ahead_is_the_one_that_sglang_takes() -> None:
    seen = compare(workloads(1000, overlap=True))
    assert seen["mixed"] > 500
    assert seen["retracted"] > 100


def steps_of_ranks(cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The steps of SGLang's schedulers of ranks."""
    here = Path(__file__).parent
    worker = Path(policies.installed.__file__).parent
    source, target = folder / "cases.json", folder / "steps.json"
    source.write_text(json.dumps(cases))
    done = subprocess.run(
        [release_python(), str(here / "sglang_ranks_release.py"), str(worker), str(source), str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    answer = json.loads(target.read_text())
    assert answer["release"] == f"SGLang {RELEASE}"
    return [in_ranks(steps) for steps in answer["steps"]]


def recorded_ranks() -> list[tuple[dict[str, Any], list[Any]]]:
    """Workloads of ranks and what the release has been recorded to decide on them."""
    kept = json.loads(gzip.decompress(RECORDED_RANKS.read_bytes()))
    return [
        (an_sglang_ranks_case(seed), [[at, {int(rank): ran for rank, ran in step.items()}] for at, step in steps])
        for seed, steps in kept
    ]


def test_prompts_of_ranks_start_when_sglang_has_been_recorded_to_start_them() -> None:
    recorded = recorded_ranks()
    for case, steps in recorded:
        assert our_ranks(case)[: len(steps)] == steps, f"workload {case['seed']}"
    settings = [case["settings"] for case, _ in recorded]
    assert {each["enable_prefill_delayer"] for each in settings} == {False, True}
    assert len({each["prefill_decode_interval"] for each in settings}) > 2


def test_steps_of_ranks_that_are_one_event_are_those_that_are_asked_for_one_by_one() -> None:
    for case, _ in recorded_ranks():
        assert our_ranks(case) == our_ranks(case, fast_forward=False), f"workload {case['seed']}"


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_prompts_of_ranks_start_when_those_of_sglang_do(first: int, tmp_path: Path) -> None:
    cases = [an_sglang_ranks_case(seed) for seed in range(first, first + 100)]
    compared = 0
    for case, steps in zip(cases, steps_of_ranks(cases, tmp_path), strict=True):
        assert our_ranks(case)[: len(steps)] == steps, f"workload {case['seed']}"
        compared += len(steps)
    assert compared > 5000


@pytest.mark.slow(reason="thousands of recorded steps of the release's scheduler")
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlap"])
def test_rounds_without_prompts_are_sglang_s_own(overlap: bool) -> None:
    rng = random.Random(23)
    cases = workloads(150, overlap=overlap)
    for case in cases:
        case["settings"] |= {
            "prefill_decode_interval": rng.choice([1, 2, 3, 7, 22]),
            "prefill_decode_interval_min_bs": rng.choice([0, 0, 1, 2, 4]),
        }
    compare(cases)


def record() -> None:
    """Write the recorded steps with shared beginnings anew: `python -m tests.oracle.test_sglang`."""
    found = {
        "synchronous" if not overlap else "overlap": [*theirs(short(prefix_workloads(150, overlap=overlap)))]
        for overlap in (False, True)
    }
    kept = json.dumps({"release": RELEASE, **found}, separators=(",", ":"))
    RECORDED_PREFIXES.write_bytes(gzip.compress(kept.encode(), mtime=0))
    chosen = [
        case
        for case in map(an_sglang_ranks_case, range(5000, 5200))
        if sum(request["output"] for request in case["requests"]) < 200
    ][:20]
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            [case["seed"], steps] for case, steps in zip(chosen, steps_of_ranks(chosen, Path(folder)), strict=True)
        ]
    RECORDED_RANKS.write_bytes(gzip.compress(json.dumps(steps, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    record()
