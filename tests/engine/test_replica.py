"""One replica, run by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from policies.published import OrcaPaged, Static
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.view import Plan, ReplicaView
from policies.vllm import VllmV0
from policies.wrappers import EvictNewest
from sim.engine import Columns, Experiment, PolicyError, ReplicaSpec, run
from tests.engine.costs import Linear
from workloads import ClosedLoop, Trace

MS = 1_000_000


def replay(trace: Trace | ClosedLoop, scheduler: object, **spec: object) -> Columns:
    replica = replace(ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=1000), **spec)  # type: ignore[arg-type]
    return run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()))


def trace(*rows: tuple[float, int, int]) -> Trace:
    """Requests as (arrival in ms, prompt tokens, output tokens)."""
    return Trace(
        arrival_ns=[round(row[0] * MS) for row in rows],
        prompt_tokens=[row[1] for row in rows],
        output_tokens=[row[2] for row in rows],
    )


def test_a_lone_request_takes_one_iteration_a_chunk_and_one_a_later_token() -> None:
    columns = replay(trace((0, 100, 4)), Sarathi(token_budget=40))
    # Chunks of 40, 40 and 20, then three decodes, 1 ms each.
    assert columns.requests["first_token_ns"].tolist() == [3 * MS]
    assert columns.requests["finish_ns"].tolist() == [6 * MS]
    assert columns.iterations()["prefill_tokens"].tolist() == [40, 40, 20, 0, 0, 0]


def test_arrival_during_decode_waits_for_the_iteration_to_end() -> None:
    columns = replay(trace((0, 10, 50), (2.5, 10, 1)), Sarathi())
    assert columns.requests["scheduled_ns"][1] == 3 * MS
    assert columns.requests["first_token_ns"][1] == 4 * MS


def test_arrival_at_the_very_end_of_an_iteration_joins_the_next() -> None:
    columns = replay(trace((0, 10, 50), (3, 10, 1)), Sarathi())
    assert columns.requests["scheduled_ns"][1] == 3 * MS


def test_cost_follows_the_growing_context() -> None:
    cost = Linear(fixed_s=1e-3, kv_s=1e-6)
    columns = replay(trace((0, 10, 4)), OrcaPaged(), cost=cost)
    # Decodes read 11, 12 and 13 tokens; the prompt's iteration reads none of them as decode.
    assert columns.requests["finish_ns"].tolist() == [4 * MS + (11 + 12 + 13) * 1000]


def test_prefill_first_stalls_decodes_and_stall_free_does_not() -> None:
    rows = trace((0, 10, 20), (5.5, 10, 1), (6.5, 10, 1))
    gaps_vllm, _ = replay(rows, VllmV0()).itl()
    gaps_sarathi, _ = replay(rows, Sarathi()).itl()
    assert gaps_vllm.max() == 3 * MS
    assert gaps_sarathi.max() == MS


def test_static_batches_admit_nobody_until_all_have_left() -> None:
    columns = replay(trace((0, 10, 10), (1.5, 10, 1)), Static(batch_size=4))
    assert columns.requests["scheduled_ns"][1] == columns.requests["finish_ns"][0]


def test_a_request_that_never_fits_is_rejected_with_its_reason_and_the_rest_goes_on() -> None:
    columns = replay(trace((0, 60_000_000, 1), (0, 10, 2)), EvictNewest(Sarathi()), kv_blocks=10)
    assert columns.requests["status"].tolist() == [1, 0]
    assert columns.reasons == ("needs 3750000 KV blocks for prompt and output but the replica has 10",)


def test_a_request_that_just_fits_is_served_and_one_token_more_is_rejected() -> None:
    # The last token is never cached: 16 + 17 tokens need two blocks of 16, 16 + 18 need three.
    columns = replay(trace((0, 16, 17), (0, 16, 18)), EvictNewest(Sarathi()), kv_blocks=2)
    assert columns.requests["status"].tolist() == [0, 1]
    assert columns.iterations()["kv_blocks_used"].max() == 2


def test_a_request_beyond_the_context_of_the_model_is_rejected() -> None:
    columns = replay(trace((0, 90, 10), (0, 90, 11)), Sarathi(), max_model_len=100)
    assert columns.requests["status"].tolist() == [0, 1]
    assert columns.reasons == ("prompt and output exceed the model's context of 100 tokens",)


def test_iterations_of_minutes_add_up_over_hours() -> None:
    # 300 decodes of a minute each: longer than int64 ticks reach in one span.
    columns = replay(trace((0, 1, 301)), Sarathi(), cost=Linear(fixed_s=60.0))
    iterations = columns.iterations()
    assert (iterations["duration_ns"] == 60 * 10**9).all()
    assert columns.requests["finish_ns"].tolist() == [301 * 60 * 10**9]


def test_an_iteration_longer_than_the_clock_takes_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"a cost model returned 5000\.0 seconds for one iteration; expected 0 to 4,398"
    ):
        replay(trace((0, 1, 2)), Sarathi(), cost=Linear(fixed_s=5000.0))


def test_preemption_recomputes_prompt_and_emitted_tokens_at_the_head_of_the_queue() -> None:
    # Two sequences of 16 + 40 tokens in a pool of 6 blocks of 16: they cannot both grow to 4 blocks.
    columns = replay(trace((0, 16, 40), (0, 16, 40)), EvictNewest(Sarathi()), kv_blocks=6)
    assert columns.requests["preemptions"].tolist() == [0, 1]
    assert columns.requests["emitted_tokens"].tolist() == [40, 40]
    iterations = columns.iterations()
    assert iterations["kv_blocks_used"].max() <= 6
    # The newer had emitted 33 tokens (its prompt's and 32 more) when it gave way: 49 tokens are computed again.
    assert iterations["prefill_tokens"].sum() == 32 + 49


def test_a_plan_beyond_memory_is_an_error_that_names_policy_and_way_out() -> None:
    with pytest.raises(
        PolicyError, match=r"Sarathi.*planned 3 new KV blocks .* only 1 are free; wrap it in EvictNewest"
    ):
        replay(trace((0, 16, 40), (0, 16, 40), (0, 16, 40)), Sarathi(watermark=0.0), kv_blocks=4)


@dataclass(frozen=True)
class Idler:
    def plan(self, view: ReplicaView, /) -> Plan:
        return Plan()


def test_a_policy_that_never_plans_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(PolicyError, match=r"Idler\(\) planned nothing at t=0\.000000 s with 1 waiting"):
        replay(trace((0, 16, 4)), Idler())


@dataclass(frozen=True)
class Alternating:
    """Admits everyone at once, then decodes one sequence at a time, the one with the fewest cached tokens."""

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.waiting:
            return Plan(run=tuple((seq.id, seq.tokens) for seq in view.waiting))
        return Plan(decode=(min(view.running, key=lambda seq: (seq.cached_tokens, seq.id)).id,))


def test_a_policy_may_choose_who_decodes() -> None:
    columns = replay(trace((0, 10, 4), (0, 10, 4)), Alternating())
    # One prompt iteration for both, then six decodes that alternate.
    assert columns.requests["finish_ns"].tolist() == [6 * MS, 7 * MS]
    gaps, weights = columns.itl()
    assert weights.sum() == 6
    assert sorted(np.repeat(gaps, weights).tolist()) == [MS, 2 * MS, 2 * MS, 2 * MS, 2 * MS, 2 * MS]


def test_closed_loop_clients_send_when_their_last_request_ends() -> None:
    clients = ClosedLoop(
        prompt_tokens=np.array([10, 10, 10]), output_tokens=np.array([3, 1, 1]), concurrency=2, think_ns=None
    )
    columns = replay(clients, OrcaPaged())
    assert columns.requests["arrival_ns"].tolist() == [0, 0, MS]
    # The third is felt 1 ns after the second's end, when the next iteration is already on its way.
    assert columns.requests["finish_ns"].tolist() == [3 * MS, MS, 3 * MS]


def test_a_request_of_one_output_token_ends_with_its_prompt() -> None:
    columns = replay(trace((0, 10, 1)), Sarathi())
    assert columns.requests["finish_ns"].tolist() == columns.requests["first_token_ns"].tolist() == [MS]


def test_a_request_to_a_single_pass_model_ends_without_a_token() -> None:
    columns = replay(trace((0, 10, 0)), Sarathi())
    assert columns.requests["finish_ns"].tolist() == [MS]
    assert columns.requests["first_token_ns"].tolist() == [-1]


def test_two_runs_in_one_process_do_not_touch_each_other() -> None:
    first = replay(trace((0, 100, 20)), Sarathi())
    replay(trace((0, 7, 300)), VllmV0())
    again = replay(trace((0, 100, 20)), Sarathi())
    for name, column in first.requests.items():
        np.testing.assert_array_equal(column, again.requests[name])
