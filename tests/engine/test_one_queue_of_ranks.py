"""TensorRT-LLM's queue of all ranks: who waits there while every seat is taken, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from policies.routers import LeastOutstanding, RoundRobin, TrtLlmRanks
from policies.trtllm import TrtLlm
from policies.vllm import Vllm
from sim.engine import ABORTED, Columns, Experiment, MachineSpec, ReplicaSpec, run
from tests.engine.costs import Ranked
from workloads import Trace

MS = 1_000_000


def served(
    prompts: list[int],
    outputs: list[int],
    *,
    arrival_ms: list[float] | None = None,
    router: Any = None,
    scheduler: Any = None,
    ranks: int = 2,
    stages: int = 1,
    **columns: Any,
) -> Columns:
    trace = Trace.from_arrays(
        arrival_ns=[round(at * MS) for at in arrival_ms or [0] * len(prompts)],
        prompt_tokens=prompts,
        output_tokens=outputs,
        **columns,
    )
    scheduler = scheduler or TrtLlm(max_batch_size=1, disable_overlap_scheduler=True)
    spec = ReplicaSpec(cost=Ranked(fixed_s=1e-3, n_stages=stages), scheduler=scheduler, kv_blocks=1000)
    machine = MachineSpec(hosted=(spec,), ranks=ranks, rank_router=router or TrtLlmRanks())
    experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin())
    fast = run(experiment, check_invariants=True)
    stepped = run(experiment, fast_forward=False)
    for name in ("first_token_ns", "finish_ns", "replica"):
        assert fast.requests[name].tolist() == stepped.requests[name].tolist()
    return fast


def test_requests_wait_together_for_a_seat_of_any_rank() -> None:
    # Every step takes 1 ms. Rank 1 is taken for 50 steps; the third and the fourth request follow the first on rank 0.
    columns = served([10, 40, 30, 20], [2, 50, 2, 2])
    assert columns.requests["replica"].tolist() == [0, 1, 0, 0]
    assert (columns.requests["finish_ns"] // MS).tolist() == [2, 50, 4, 6]


def test_without_the_queue_a_request_stays_behind_the_rank_that_it_was_given_to() -> None:
    columns = served([10, 40, 30, 20], [2, 50, 2, 2], router=LeastOutstanding())
    assert columns.requests["replica"].tolist() == [0, 1, 0, 1]
    assert (columns.requests["finish_ns"] // MS).tolist() == [2, 50, 4, 52]


def test_those_that_leave_together_are_spread_the_longest_prompt_first() -> None:
    # Both ranks have two seats each, and all four are free after two steps.
    columns = served(
        [10, 10, 10, 10, 20, 90, 50, 30], [2] * 8, scheduler=TrtLlm(max_batch_size=2, disable_overlap_scheduler=True)
    )
    # 90 to rank 0, 50 and 30 to rank 1, and 20 to the seat that is left.
    assert columns.requests["replica"].tolist()[4:] == [0, 0, 1, 1]


def test_a_rank_that_has_served_long_prompts_gets_the_shorter_ones() -> None:
    assert TrtLlmRanks().spread([20, 90, 50, 30], [Load(0), Load(60)]) == [(1, 0), (2, 1), (3, 0), (0, 1)]
    # Rank 1 has two more requests than an even share leaves it.
    assert TrtLlmRanks().spread([20, 90], [Load(0), Load(0, running=3)]) == [(1, 0), (0, 0)]


@dataclass
class Load:
    prompt_tokens: int
    waiting: int = 0
    running: int = 0


def test_those_that_wait_are_counted_with_the_first_rank() -> None:
    iterations = served([10, 40, 30, 20], [2, 50, 2, 2]).iterations()
    first = iterations["start_ns"] == 0
    assert iterations["waiting"][first].max() == 2


def test_a_client_that_goes_leaves_the_queue() -> None:
    columns = served([10, 40, 30, 20], [2, 50, 2, 2], abort_s=[np.nan, np.nan, 1.5e-3, np.nan])
    assert columns.requests["status"].tolist()[2] == ABORTED
    assert (columns.requests["finish_ns"] // MS).tolist()[3] == 4


def test_a_scheduler_without_seats_to_wait_for_is_given_all() -> None:
    columns = served([10, 40, 30, 20], [2, 50, 2, 2], scheduler=Vllm(max_num_seqs=1, async_scheduling=False))
    assert columns.requests["replica"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_random_workloads_are_served_alike_step_by_step(overlap: bool) -> None:
    for seats in (1, 2, 3):
        served(
            [7 + 13 * i % 90 for i in range(30)],
            [1 + 5 * i % 17 for i in range(30)],
            arrival_ms=[0.7 * (i // 3) for i in range(30)],
            scheduler=TrtLlm(max_batch_size=seats, disable_overlap_scheduler=not overlap),
            ranks=3,
        )


def test_ranks_of_a_pipeline_have_a_seat_in_each_micro_batch() -> None:
    # Two stages, and two micro-batches of one seat each on both ranks: four requests run, and two follow together.
    columns = served([10, 20, 30, 40, 50, 60], [3] * 6, stages=2)
    assert columns.requests["replica"].tolist() == [0, 1, 0, 1, 1, 0]
    # Beside these two the first rank has one for its second micro-batch.
    assert columns.iterations()["waiting"].max() == 2 + 1
