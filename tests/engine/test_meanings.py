"""Rules of the engine, one small run each: queue order, memory of drafts, draws of acceptance, delays, heads and pasts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hwmodels.reach import Chunk
from hwmodels.totals import Totals, pairs_within, seen
from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.view import Plan, ReplicaView
from policies.vllm import VllmV0
from policies.wrappers import EvictNewest
from sim.engine import Experiment, MachineSpec, PolicyError, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.test_replica import MS, replay, trace
from workloads import ClosedLoop, Trace

DRAFTS = Speculative(method="draft_model", num_speculative_tokens=4, acceptance=Iid(alpha=0.5))


def test_a_preempted_request_is_served_before_those_that_waited_behind_it() -> None:
    # Two sequences fill six blocks; the newer is evicted while a third waits, whose two blocks would be free at once.
    columns = replay(trace((0, 16, 40), (0, 16, 40), (20, 30, 2)), EvictNewest(Sarathi()), kv_blocks=6)
    assert columns.requests["preemptions"].tolist() == [0, 1, 0]
    first, _, third = columns.requests["finish_ns"].tolist()
    assert columns.requests["scheduled_ns"][2] >= first
    assert third > first


def test_slots_of_drafted_tokens_count_for_whether_a_request_can_ever_fit() -> None:
    # 16 + 16 cached tokens are two blocks; four drafted tokens more need a third.
    two = replay(trace((0, 16, 17)), EvictNewest(Sarathi()), kv_blocks=2, decoding=DRAFTS)
    assert two.requests["status"].tolist() == [1]
    assert two.reasons == ("needs 3 KV blocks for prompt and output but the replica has 2",)
    three = replay(trace((0, 16, 17)), EvictNewest(Sarathi()), kv_blocks=3, decoding=DRAFTS)
    assert three.requests["status"].tolist() == [0]


@dataclass
class OneEach:
    """Every draft is rejected; writes down which rounds a request's draws are for."""

    asked: list[tuple[int, int, int]] = field(default_factory=list)
    max_query_tokens: int = 3

    def query_tokens(self, n_decoding: int, /) -> int:
        return 3

    def k(self, n_decoding: int, /) -> int:
        return 2

    def draft_steps(self, n_decoding: int, /) -> int:
        return 2

    def round_tokens(self, request_id: int, round_start: int, n_tokens: int, k: int, seed: int, /) -> Any:
        self.asked.append((request_id, round_start, n_tokens))
        return np.ones(n_tokens, np.int64)


def test_the_draws_of_a_preempted_request_go_on_where_they_stopped() -> None:
    decoding = OneEach()
    columns = replay(trace((0, 16, 40), (0, 16, 40)), EvictNewest(Sarathi()), kv_blocks=6, decoding=decoding)
    assert columns.requests["preemptions"].tolist() == [0, 1]
    (first, again) = [(start, tokens) for id_, start, tokens in decoding.asked if id_ == 1]
    assert first == (0, 39)
    # One token a round; the first token after the recomputation comes from the prompt's iteration.
    assert again[0] > 0
    assert again[0] + again[1] == 39 - 1


@pytest.mark.parametrize("per_token_s", [0.0, 1e-5])
def test_a_request_is_seen_after_the_front_end_has_had_it(per_token_s: float) -> None:
    spec = ReplicaSpec(cost=Linear(), scheduler=Sarathi(), kv_blocks=1000)
    experiment = Experiment(
        workload=trace((1, 100, 1)), replicas=(spec,), router=RoundRobin(), admission_s=2e-3, admission_s_per_token=per_token_s
    )  # fmt: skip
    requests = run(experiment).requests
    seen_ns = 3 * MS + round(100 * per_token_s * 1e9)
    assert requests["arrival_ns"].tolist() == [MS]
    assert requests["scheduled_ns"].tolist() == [seen_ns]
    assert requests["first_token_ns"].tolist() == [seen_ns + MS]


def test_a_client_thinks_before_it_sends_and_then_waits_for_the_front_end() -> None:
    clients = ClosedLoop(concurrency=1, prompt_tokens=[10] * 3, output_tokens=[2] * 3, think_ns=[7, 5 * MS, 9 * MS])
    spec = ReplicaSpec(cost=Linear(), scheduler=Sarathi(), kv_blocks=1000)
    requests = run(Experiment(workload=clients, replicas=(spec,), router=RoundRobin(), admission_s=1e-3)).requests
    arrival, scheduled, finish = (requests[name].tolist() for name in ("arrival_ns", "scheduled_ns", "finish_ns"))
    # Nobody thinks before the first request.
    assert arrival == [0, finish[0] + 5 * MS, finish[1] + 9 * MS]
    assert scheduled == [each + MS for each in arrival]


@dataclass(frozen=True, kw_only=True)
class Heads(Linear):
    """A millisecond for each row through the LM head, and nothing else."""

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return 1e-3 * totals.logit_rows + 1e-6 * totals.prefill_chunks


def test_a_prompt_pays_for_one_row_of_the_head_when_it_completes() -> None:
    columns = replay(trace((0, 100, 3)), Sarathi(token_budget=40), cost=Heads())
    # Chunks of 40, 40 and 20, of which the last has a row; then two decodes of a row each.
    assert columns.iterations()["duration_ns"].tolist() == [1000, 1000, MS + 1000, MS, MS]


def test_decodes_and_a_completing_prompt_share_an_iterations_head() -> None:
    columns = replay(trace((0, 10, 9), (1.5, 10, 2)), OrcaPaged(), cost=Heads())
    assert MS + 1000 + MS in columns.iterations()["duration_ns"].tolist()


def test_a_chunk_attends_to_all_that_was_computed_before_it() -> None:
    columns = replay(trace((0, 100, 1)), Sarathi(token_budget=40), cost=Linear(fixed_s=0.0, pair_s=1e-6))
    pairs = [40 * 41 // 2, 40 * 40 + 40 * 41 // 2, 20 * 80 + 20 * 21 // 2]
    assert columns.iterations()["duration_ns"].tolist() == [1000 * each for each in pairs]


@dataclass(frozen=True, kw_only=True)
class Windowed(Linear):
    """A microsecond for each windowed query-key pair and each windowed token that decodes read."""

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return 1e-6 * (totals.prefill_pairs_window + totals.decode_kv_window)


def test_windows_limit_what_chunks_and_decodes_attend_to() -> None:
    columns = replay(trace((0, 20, 3)), Sarathi(token_budget=12), cost=Windowed(window_tokens=8))
    # Chunk of 12: 1 + ... + 8, then 8 for each of four; chunk of 8: 8 each. Decodes read the window.
    assert columns.iterations()["duration_ns"].tolist() == [1000 * each for each in (36 + 32, 64, 8, 8)]


def test_a_window_grows_until_it_is_full() -> None:
    columns = replay(trace((0, 5, 6)), OrcaPaged(), cost=Windowed(window_tokens=8))
    assert columns.iterations()["duration_ns"].tolist() == [1000 * each for each in (15, 6, 7, 8, 8, 8)]


def test_queries_see_the_tokens_of_their_own_chunk() -> None:
    columns = replay(trace((0, 20, 15)), Sarathi(token_budget=12), cost=Windowed(window_tokens=Chunk(8)))
    # Of chunk 0: 1 to 8, of chunk 1: 1 to 4, then 5 to 8; of chunk 2: 1 to 4. Decodes read 5 tokens of it and more, then 1 of
    # the next, and 1 again of the one after it.
    prompts, decodes = [36 + 10, 26 + 10], [5, 6, 7, 8, *range(1, 9), 1, 2]
    assert columns.iterations()["duration_ns"].tolist() == [1000 * each for each in (*prompts, *decodes)]


def test_what_is_seen_of_chunks_is_counted_token_by_token() -> None:
    for past, tokens, chunk in [(0, 1, 8), (0, 8, 8), (7, 2, 8), (8, 30, 8), (3, 4, 8), (5, 9, 1)]:
        places = range(past, past + tokens)
        assert pairs_within(past, tokens, Chunk(chunk)) == sum(place % chunk + 1 for place in places)
        assert [seen(place + 1, Chunk(chunk)) for place in places] == [place % chunk + 1 for place in places]
        assert pairs_within(past, tokens, chunk) == sum(min(place + 1, chunk) for place in places)
        assert [seen(place + 1, chunk) for place in places] == [min(place + 1, chunk) for place in places]


@dataclass(frozen=True, kw_only=True)
class KvOfChunks(Linear):
    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return 1e-6 * totals.prefill_kv_tokens + 1e-3 * totals.prefill_chunks


def test_a_chunk_reads_its_past_and_itself() -> None:
    columns = replay(trace((0, 100, 1)), Sarathi(token_budget=40), cost=KvOfChunks())
    assert columns.iterations()["duration_ns"].tolist() == [MS + 1000 * each for each in (40, 80, 100)]


def test_a_request_keeps_its_first_token_and_its_first_start_when_it_is_computed_again() -> None:
    columns = replay(trace((0, 16, 40), (0, 16, 40)), EvictNewest(Sarathi()), kv_blocks=6)
    assert columns.requests["scheduled_ns"].tolist() == [0, 0]
    assert columns.requests["first_token_ns"].tolist() == [MS, MS]
    assert columns.requests["emitted_tokens"].tolist() == [40, 40]
    # What it emitted is computed again with the prompt: 16 + 33 tokens in one chunk.
    assert 49 in columns.iterations()["prefill_tokens"].tolist()
    gaps, _ = columns.itl()
    assert gaps.max() > 2 * MS


def test_a_speculative_round_costs_its_draft_steps_and_its_fixed_time() -> None:
    columns = replay(
        trace((0, 16, 5)), Sarathi(), cost=Linear(fixed_s=1e-3, row_s=1e-4), draft_cost=Linear(fixed_s=2e-4, row_s=1e-6),
        decoding=OneEach(), speculation_overhead_s=5e-3,
    )  # fmt: skip
    prompt, *rounds = columns.iterations()["duration_ns"].tolist()
    # The draft computes the prompt too; a round verifies three tokens after two passes of one row.
    assert prompt == 1_000_000 + 16 * 100_000 + 200_000 + 16 * 1000
    assert rounds == [1_000_000 + 300_000 + 2 * 201_000 + 5_000_000] * 4


def test_drafts_beside_a_prompt_cost_what_they_cost_alone() -> None:
    columns = replay(
        trace((0, 16, 30), (8, 16, 1)), Sarathi(), cost=Linear(fixed_s=1e-3), draft_cost=Linear(fixed_s=2e-4, kv_s=1e-6),
        decoding=OneEach(), speculation_overhead_s=5e-3,
    )  # fmt: skip
    iterations = columns.iterations()
    both = (iterations["prefill_tokens"] > 0) & (iterations["decode_tokens"] > 0)
    (duration,) = iterations["duration_ns"][both].tolist()
    kv = 16 + 2 + 3  # two rounds are over when the prompt is computed, and the third has three tokens
    assert duration == 1_000_000 + 200_000 + 2 * (200_000 + 1000 * kv) + 5_000_000


def test_stages_wait_for_the_hand_over_of_as_many_rows() -> None:
    cost = Linear(fixed_s=1e-3, n_stages=2, transfer_s=3e-4)
    columns = replay(trace((0, 10, 1)), OrcaPaged(), cost=cost)
    assert columns.requests["finish_ns"].tolist() == [2 * MS + 300_000]


def test_prefill_first_stops_the_decodes_while_prompts_run() -> None:
    iterations = replay(trace((0, 10, 20), (5.5, 10, 1)), VllmV0()).iterations()
    assert iterations["decode_tokens"][iterations["prefill_tokens"] > 0].tolist() == [0, 0]


def test_drafted_tokens_hold_slots_from_the_first_round() -> None:
    columns = replay(trace((0, 14, 3)), Sarathi(), decoding=OneEach())
    # 14 cached tokens are one block; a round submits three more.
    assert columns.iterations()["kv_blocks_used"].tolist() == [1, 2, 2]


def test_a_client_whose_request_is_rejected_sends_its_next() -> None:
    clients = ClosedLoop(concurrency=1, prompt_tokens=[10, 900, 10], output_tokens=[2] * 3, think_ns=[0, 0, 0])
    columns = replay(clients, EvictNewest(Sarathi()), kv_blocks=4)
    assert columns.requests["status"].tolist() == [0, 1, 0]


@dataclass(frozen=True)
class Greedy:
    """Wants more of a prompt than there is."""

    def plan(self, view: ReplicaView, /) -> Plan:
        return Plan(run=tuple((seq.id, seq.tokens + 1) for seq in view.waiting))


def test_a_plan_beyond_the_prompt_is_an_error() -> None:
    with pytest.raises(PolicyError, match="planned 11 prompt tokens for request 0, of which 10 are left"):
        replay(trace((0, 10, 1)), Greedy())


def test_a_sequence_keeps_its_model_deadline_and_priority_wherever_policies_see_it() -> None:
    seen: set[tuple[str, int, int, int, int, int]] = set()

    def watching(view: ReplicaView) -> Plan:
        for where, seqs in (("waiting", view.waiting), ("prefilling", view.prefilling), ("running", view.running)):
            seen.update((where, seq.id, seq.model, seq.deadline_ns, seq.priority, seq.arrival_ns) for seq in seqs)
        decodes = view.n_decoding > 0
        if view.prefilling:
            return Plan(decode=decodes, run=tuple((seq.id, min(7, seq.remaining_tokens)) for seq in view.prefilling))
        if view.waiting:
            return Plan(decode=decodes, run=((view.waiting[0].id, 7),))
        return Plan(decode=True)

    workload = Trace(
        arrival_ns=[0, 5, 9], prompt_tokens=[20] * 3, output_tokens=[5] * 3, model_index=[0, 1, 1], models=("a", "b"),
        deadline_ns=[100, -1, 7], priority=[3, -2, 0],
    )  # fmt: skip
    tenants = tuple(ReplicaSpec(cost=Linear(), scheduler=watching, kv_blocks=100, model=model) for model in (0, 1))
    run(Experiment(workload=workload, replicas=(MachineSpec(hosted=tenants),), router=RoundRobin()))
    facts = [(0, 0, 100, 3, 0), (1, 1, -1, -2, 5), (2, 1, 7, 0, 9)]
    assert seen == {(where, *each) for where in ("waiting", "prefilling", "running") for each in facts}
