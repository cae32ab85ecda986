"""The time of a drafter in iterations that compute prompts: a pass over their tokens, and in vLLM the passes behind it."""

from __future__ import annotations

import pytest

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.routers import RoundRobin
from policies.sglang import Sglang
from policies.vllm import Vllm
from sim.engine import Experiment, MachineSpec, ReplicaSpec, run
from tests.engine.costs import Linear, Ranked
from workloads import Trace

TARGET, FIRST, REST = 10_000_000, 1_000_000, 3_000_000
"""Times of the target's step, of the draft's first pass and of the three behind it (ns)."""


def prompt_steps_ns(scheduler: object, *, max_tokens: int = 5, reads_target: bool = True) -> list[int]:
    """Times of the steps that compute a prompt of 250 tokens in chunks of 100."""
    trace = Trace.from_arrays(arrival_ns=[0], prompt_tokens=[250], output_tokens=[1], max_tokens=[max_tokens])
    spec = ReplicaSpec(
        cost=Linear(fixed_s=10e-3),
        draft_cost=Linear(fixed_s=1e-3),
        scheduler=scheduler,
        kv_blocks=100,
        decoding=Speculative(method="eagle", num_speculative_tokens=4, acceptance=Iid(alpha=0.5)),
        prefix_drops_last=reads_target,
    )
    iterations = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin())).iterations()
    return iterations["duration_ns"][iterations["prefill_tokens"] > 0].tolist()


def vllm(release: str) -> Vllm:
    return Vllm(max_num_batched_tokens=100, max_num_seqs=10, release=release)


def test_all_passes_are_taken_with_every_chunk_of_a_prompt() -> None:
    assert prompt_steps_ns(vllm("0.32")) == [TARGET + FIRST + REST] * 3


def test_from_0_33_passes_behind_the_first_are_taken_where_a_token_is_left_for_their_drafts() -> None:
    assert prompt_steps_ns(vllm("0.33")) == [TARGET + FIRST, TARGET + FIRST, TARGET + FIRST + REST]
    assert prompt_steps_ns(vllm("0.33"), max_tokens=1) == [TARGET + FIRST] * 3


def test_a_draft_model_of_its_own_takes_all_passes_in_every_release() -> None:
    for release in ("0.32", "0.33"):
        assert prompt_steps_ns(vllm(release), reads_target=False) == [TARGET + FIRST + REST] * 3


def test_another_engine_drafts_when_it_decodes() -> None:
    assert prompt_steps_ns(Sglang(chunked_prefill_size=100, max_running_requests=10)) == [TARGET + FIRST] * 3


@pytest.mark.parametrize(("release", "all_passes"), [("0.32", True), ("0.33", False)])
def test_ranks_leave_passes_out_where_all_of_them_can(release: str, all_passes: bool) -> None:
    trace = Trace.from_arrays(arrival_ns=[0, 0], prompt_tokens=[150, 200], output_tokens=[1, 1], max_tokens=[5, 5])
    spec = ReplicaSpec(
        cost=Ranked(fixed_s=10e-3),
        draft_cost=Linear(fixed_s=1e-3),
        scheduler=vllm(release),
        kv_blocks=100,
        decoding=Speculative(method="eagle", num_speculative_tokens=4, acceptance=Iid(alpha=0.5)),
        prefix_drops_last=True,
    )
    machine = MachineSpec(hosted=(spec,), ranks=2, rank_router=RoundRobin())
    iterations = run(Experiment(workload=trace, replicas=(machine,), router=RoundRobin())).iterations()
    steps_ns = dict(zip(iterations["start_ns"].tolist(), iterations["duration_ns"].tolist(), strict=True))
    # In the second step one rank completes its prompt, and the other does not.
    assert list(steps_ns.values())[:2] == [TARGET + FIRST + all_passes * REST, TARGET + FIRST + REST]
