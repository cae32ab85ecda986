"""Micro-batches through pipeline stages."""

from __future__ import annotations

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.metrics import summary
from tests.engine.costs import Linear
from workloads import Trace

MS = 1_000_000


def pipeline(trace: Trace, scheduler: object, *, stages: int = 4, **cost: float) -> Columns:
    replica = ReplicaSpec(
        cost=Linear(n_stages=stages, **cost),  # type: ignore[arg-type]
        scheduler=scheduler,  # type: ignore[arg-type]
        kv_blocks=100_000,
    )
    return run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()))


def all_at_once(prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(arrival_ns=[0] * len(prompts), prompt_tokens=prompts, output_tokens=outputs)


def test_a_lone_micro_batch_passes_every_stage_and_hand_over() -> None:
    columns = pipeline(all_at_once([10], [1]), OrcaPaged(), transfer_s=1e-4)
    assert columns.requests["finish_ns"].tolist() == [4 * MS + 3 * MS // 10]


def test_uniform_micro_batches_leave_no_bubble_after_the_pipeline_has_filled() -> None:
    # 64 prompts of one size, one a micro-batch: stage k starts the next when it ends the one before.
    columns = pipeline(all_at_once([64] * 64, [1] * 64), Sarathi(token_budget=64), row_s=1e-5)
    assert len(columns.iterations()["start_ns"]) == 64
    assert columns.requests["bubble_ns"].sum() == 0
    stages = columns.replicas[0].stages
    for stage in range(4):
        mine = stages[stages["stage"] == stage]
        np.testing.assert_array_equal(mine["start_ns"][1:], (mine["start_ns"] + mine["duration_ns"])[:-1])


def test_uniform_decodes_of_one_size_leave_no_bubble_either() -> None:
    columns = pipeline(all_at_once([64] * 4, [100] * 4), Sarathi(token_budget=64, max_sequences=1))
    assert columns.requests["bubble_ns"].sum() == 0


def test_mixed_micro_batches_leave_bubbles() -> None:
    columns = pipeline(all_at_once([512, 16] * 8, [8] * 16), OrcaPaged(max_sequences=1), row_s=1e-5)
    assert (columns.requests["bubble_ns"] > 0).all()


def test_sequences_in_flight_are_left_out_of_the_next_micro_batch() -> None:
    columns = pipeline(all_at_once([10] * 8, [20] * 8), OrcaPaged(max_sequences=2))
    stages = columns.replicas[0].stages
    spans = columns.replicas[0].spans
    for batch in range(4):
        rows = np.flatnonzero(spans["lane"] == batch)
        first = stages[stages["stage"] == 0]["start_ns"][rows]
        last = stages[stages["stage"] == 3]
        ends = (last["start_ns"] + last["duration_ns"])[rows]
        assert (first[1:] >= ends[:-1]).all()


def test_a_stage_starts_when_the_one_before_has_handed_over_and_it_is_free() -> None:
    columns = pipeline(
        all_at_once([300, 20, 100, 50], [5] * 4), OrcaPaged(max_sequences=1), row_s=1e-5, transfer_s=2e-4
    )
    stages = columns.replicas[0].stages
    start = {(int(r["micro_batch"]), int(r["stage"])): int(r["start_ns"]) for r in stages}
    end = {(int(r["micro_batch"]), int(r["stage"])): int(r["start_ns"] + r["duration_ns"]) for r in stages}
    for (batch, stage), begun in start.items():
        if stage:
            free = end.get((batch - 1, stage), 0)
            assert abs(begun - max(end[batch, stage - 1] + 200_000, free)) <= 1


def test_busy_time_is_that_of_the_stages_and_memory_is_held_between_micro_batches() -> None:
    # One request: every stage works 1 ms in 4, and its blocks are held all the time.
    columns = pipeline(all_at_once([32], [40]), OrcaPaged())
    summary_ = summary(columns)
    assert summary_["busy_fraction"] == pytest.approx(0.25)
    used = columns.iterations()["kv_blocks_used"] / 100_000
    assert summary_["kv_utilization"]["mean"] == pytest.approx(used.mean())


def test_an_idle_pipeline_starts_without_a_bubble() -> None:
    trace = Trace(arrival_ns=[0, 10**9], prompt_tokens=[10, 10], output_tokens=[1, 1])
    assert pipeline(trace, OrcaPaged()).requests["bubble_ns"].tolist() == [0, 0]
