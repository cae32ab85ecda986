"""Why stages idle: the kinds of bubbles, for each stage and each request."""

from __future__ import annotations

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.sarathi import DecodeMaximal
from policies.schedulers import Sarathi
from policies.view import Scheduler
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.engine.record.columns import BUBBLES
from tests.engine.costs import Linear
from workloads import Trace


def pipeline(
    scheduler: Scheduler, prompts: list[int], outputs: list[int], *, lanes: int | None = None, **cost: float
) -> Columns:
    trace = Trace(arrival_ns=[0] * len(prompts), prompt_tokens=prompts, output_tokens=outputs)
    spec = ReplicaSpec(
        cost=Linear(n_stages=4, row_s=1e-5, **cost),  # type: ignore[arg-type]
        scheduler=scheduler,
        kv_blocks=100_000,
        micro_batches=lanes,
    )
    return run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))


def totals(columns: Columns) -> dict[str, int]:
    stages = columns.replicas[0].stages
    sums = np.bincount(stages["bubble"], weights=stages["bubble_ns"], minlength=len(BUBBLES))
    return dict(zip(BUBBLES, sums.astype(int).tolist(), strict=True))


def test_prompts_of_unequal_length_leave_pb1() -> None:
    found = totals(pipeline(OrcaPaged(max_sequences=1), [800, 100] * 8, [1] * 16))
    assert found["pb1"] > 0
    assert found["pb2"] == found["pb3"] == 0


def test_prompts_behind_decodes_leave_pb2() -> None:
    found = totals(pipeline(OrcaPaged(max_sequences=1), [400] * 16, [3, 9] * 8))
    assert found["pb2"] > 0
    assert found["pb1"] == found["pb3"] == 0


def test_decodes_over_unequal_contexts_leave_pb3() -> None:
    found = totals(pipeline(OrcaPaged(max_sequences=1), [10, 4000, 10, 4000], [40] * 4, kv_s=1e-6))
    assert found["pb3"] > 0


def test_too_few_micro_batches_leave_bubbles_for_lack_of_depth() -> None:
    found = totals(pipeline(Sarathi(token_budget=64, max_sequences=1), [64] * 2, [50] * 2))
    assert found["depth"] > 0
    assert found["pb1"] == found["pb3"] == 0


def test_hand_overs_need_a_micro_batch_more_than_stages() -> None:
    scheduler = Sarathi(token_budget=64, max_sequences=1)
    # Hand-overs of 0.3 ms leave four micro-batches of about 1 ms short of a round; five fill it, but for the start.
    four = pipeline(scheduler, [64] * 4, [60] * 4, transfer_s=3e-4)
    five = pipeline(scheduler, [64] * 5, [60] * 5, transfer_s=3e-4, lanes=5)
    assert totals(four)["depth"] > 20 * sum(totals(five).values())


def test_requests_are_charged_with_the_bubbles_ahead_of_their_micro_batches() -> None:
    columns = pipeline(OrcaPaged(max_sequences=1), [800, 100] * 8, [5] * 16)
    kinds = totals(columns)
    # One sequence a micro-batch: the requests' bubbles are the stages', kind by kind.
    for kind in ("pb1", "pb2", "pb3"):
        assert columns.requests[f"bubble_{kind}_ns"].sum() == kinds[kind]
    assert columns.requests["bubble_ns"].sum() == sum(kinds.values())
    assert columns.iterations()["bubble_ns"].sum() == sum(kinds.values())


@pytest.mark.parametrize("outputs", [[12] * 24, [5, 40, 20] * 8])
def test_chunks_close_the_bubbles_that_whole_prompts_leave(outputs: list[int]) -> None:
    prompts = [900, 100, 500] * 8
    whole = pipeline(OrcaPaged(max_sequences=4, max_prompts=1), prompts, outputs)
    chunked = pipeline(DecodeMaximal(100, 4), prompts, outputs)
    assert np.median(chunked.requests["bubble_ns"]) < 0.6 * np.median(whole.requests["bubble_ns"])
