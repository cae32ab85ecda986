"""`parallel.data` of a scenario: machines whose ranks step together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hwmodels.totals import Totals
from policies.ranks import PromptBalance
from policies.routers import RoundRobin, TrtLlmRanks, VllmRanks
from sim import Scenario, ScenarioError, simulate
from sim.engine import MachineSpec
from sim.metrics.ranks import rank_figures
from sim.results import Result
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of
from sim.scenario.assembly.ranks import rank_router_of
from sim.study.records import gpus

RANKS = """\
model: qwen3-30b-a3b
hardware: h100-sxm
parallel: {data: 4, expert: 4}
scheduler: {policy: vllm}
workload: {trace: conversation, limit: 30, rate_scale: 5}
"""


def scenario(*assignments: str) -> Scenario:
    return Scenario.from_yaml(RANKS).with_set(*assignments)


def machine(*assignments: str) -> MachineSpec:
    (spec,) = build(scenario(*assignments)).machines
    return spec


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(scenario())


def test_each_rank_has_the_memory_of_its_own_gpus() -> None:
    _, plan = memory_plan_of(scenario())
    spec = machine()
    assert (spec.ranks, spec.hosted[0].kv_blocks) == (4, plan.rank_blocks)
    assert plan.kv_blocks == 4 * plan.rank_blocks
    assert machine("memory.kv_blocks=1001").hosted[0].kv_blocks == 1000


def test_a_run_says_how_its_ranks_were_filled(result: Result) -> None:
    found = result.summary["ranks"]
    assert found["per_machine"] == 4
    assert 1.0 <= found["token_imbalance"] <= 4.0
    assert 1.0 <= found["kv_imbalance"] <= 4.0
    assert 0.0 < found["idle_share"] < 1.0
    table = result.columns.iterations()
    starts = set(zip(table["start_ns"].tolist(), table["duration_ns"].tolist(), strict=True))
    assert len(starts) == len({start for start, _ in starts}) == found["steps"]
    assert set(result.requests["replica"]) == {0, 1, 2, 3}
    assert result.manifest["ranks"] == {"per_machine": 4, "router": "VllmRanks(waiting_weight=None)"}


def test_imbalance_by_hand() -> None:
    class Two:
        meta = {"ranks": [(0, 1)]}  # noqa: RUF012

        def iteration_blocks(self):
            steps = ((0, [0, 5, 9], [3, 1, 4], [30, 0, 4]), (1, [0, 9], [1, 4], [10, 4]))
            for replica, start, rows, kv in steps:
                columns = {"replica": [replica] * len(start), "start_ns": start, "rows": rows, "kv_tokens": kv}
                yield {name: np.array(values) for name, values in columns.items()}

    found = rank_figures(Two())["ranks"]  # type: ignore[arg-type]
    # Tokens 3 and 1, 1 and none, 4 and 4; KV 30 and 10, none, 4 and 4.
    assert found["steps"] == 3
    assert found["token_imbalance"] == pytest.approx((1.5 + 2.0 + 1.0) / 3)
    assert found["kv_imbalance"] == pytest.approx((1.5 + 1.0) / 2)
    assert found["idle_share"] == pytest.approx(1 / 6)
    late = rank_figures(Two(), 5, 9)["ranks"]  # type: ignore[arg-type]
    assert (late["steps"], late["token_imbalance"], late["kv_imbalance"]) == (1, 2.0, None)


def test_weights_that_all_ranks_read_in_a_step_are_read_once(result: Result) -> None:
    # Bytes of a step: what four GPUs hold of weights at the most, and the cache of what was asked for.
    deployment, _ = memory_plan_of(scenario())
    summary, meta = result.summary, result.columns.meta
    weights = 4 * deployment.weight_bytes_per_device
    cache = result.columns.iterations()["kv_tokens"].sum() + result.requests["prompt_tokens"].sum()
    most = summary["ranks"]["steps"] * weights + 4 * cache * deployment.kv_bytes_per_token_per_device
    assert 0.02 * most < meta["hbm_bytes"] < most


def test_gpus_are_those_of_all_ranks() -> None:
    assert gpus(scenario("replicas=3", "parallel.tensor=2", "parallel.expert=8")) == 24
    assert gpus(scenario("pools={a: {parallel: {data: 2, expert: 2}}, b: {parallel: {data: 1, expert: 1}}}")) == 3


def test_requests_go_to_ranks_as_the_stack_sends_them() -> None:
    assert machine().rank_router == VllmRanks()
    assert machine("serving_stack=trtllm", "scheduler=trtllm").rank_router == TrtLlmRanks()
    assert machine("serving_stack=sglang", "scheduler=sglang").rank_router == RoundRobin()
    assert machine("rank_router=round_robin").rank_router == RoundRobin()
    assert machine("rank_router={policy: vllm_ranks, waiting_weight: 4}").rank_router == VllmRanks(waiting_weight=4.0)


def test_ranks_of_sglang_share_a_chunk() -> None:
    assert machine("serving_stack=sglang", "scheduler=sglang").hosted[0].scheduler.chunked_prefill_size == 2048  # type: ignore[union-attr]


def test_prompts_may_be_balanced() -> None:
    assert machine().prompt_balance is None
    assert machine("prompt_balance.timeout_iters=60").prompt_balance == PromptBalance(timeout_iters=60)
    facts = resolve(scenario("prompt_balance={timeout_iters: 60, batching_wait_iters: 0}")).manifest["ranks"]
    assert facts["prompt_balance"] == {"timeout_iters": 60, "batching_wait_iters": 0}


def test_one_rank_is_the_machine_there_was() -> None:
    one = Scenario.from_yaml("model: qwen3-30b-a3b")
    assert Scenario.from_yaml("{model: qwen3-30b-a3b, parallel: {data: 1, expert: 1}}").hash == one.hash
    assert Scenario.from_yaml("{model: qwen3-30b-a3b, parallel: {data: 2, expert: 1}}").hash != one.hash
    assert build(one).machines[0].ranks == 1


def test_a_budget_of_ranks_is_the_most_that_a_step_of_all_of_them_has_time_for() -> None:
    limit_s, n, context = 0.03, 8, 2000

    def step_s(tokens: int) -> float:
        chunk = tokens - n
        pairs = chunk * (context - chunk) + chunk * (chunk + 1) // 2
        totals = Totals(tokens, chunk, 1, pairs, context, n, n * context, n + 1, 0, 0)
        return float(cost.common_step([totals] * 4))

    (tenant,) = machine(
        f"scheduler={{policy: sarathi, token_budget: auto, max_sequences: {n}}}",
        f"slo.tpot_s={limit_s}",
        "workload={arrivals: {process: deterministic, rate_per_s: 1}, requests: 4, prompt_tokens: 1900, output_tokens: 100}",
    ).hosted
    cost, budget = tenant.cost, tenant.scheduler.inner.token_budget
    assert step_s(budget) <= limit_s < step_s(budget + 32)


# Ranks whose micro-batches take turns.

PIPELINE = ("parallel={data: 2, expert: 2, pipeline: 2}",)
SHARED = (
    "pools={a: {models: [qwen3-30b-a3b, 'qwen3-30b-a3b#2']}}",
    "workload.models={qwen3-30b-a3b: 1, 'qwen3-30b-a3b#2': 1}",
)


def test_a_pipeline_of_ranks_has_the_memory_and_the_gpus_of_all_its_stages() -> None:
    asked = scenario(*PIPELINE)
    deployment, plan = memory_plan_of(asked)
    one, whole = memory_plan_of(scenario("parallel={data: 2, expert: 2}"))
    assert gpus(asked) == 4
    assert (plan.groups, len(plan.stages)) == (2, 2)
    assert plan.kv_blocks == 2 * plan.rank_blocks
    # 48 layers are 24 and 24 of weights and of cache; the embedding is on the first stage, the head on the last.
    vocabulary = 2 * 151_936 * 2048
    halves = [stage.weight_bytes for stage in plan.stages]
    assert sum(halves) == pytest.approx(one.weight_bytes_per_device, rel=1e-3)
    assert max(halves) < one.weight_bytes_per_device / 2 + vocabulary
    assert 2 * plan.stages[0].block_bytes == whole.stages[0].block_bytes
    assert plan.rank_blocks > 2 * whole.rank_blocks
    (spec,) = build(asked).machines
    assert (spec.ranks, spec.hosted[0].kv_blocks, spec.hosted[0].cost.n_stages) == (2, plan.rank_blocks, 2)
    assert deployment.parallel.n_devices == 4


def test_each_stage_of_a_pipeline_of_ranks_takes_what_the_ranks_take_together() -> None:
    asked = scenario(*PIPELINE, "workload.limit=12")
    found = simulate(asked)
    (spec,) = build(asked).machines
    cost = spec.hosted[0].cost
    ranks = [
        {
            int(span["start_ns"]): (totals_of(span), replica.stages[2 * i : 2 * i + 2])
            for i, span in enumerate(replica.spans)
        }
        for replica in found.columns.replicas
    ]
    starts = set(ranks[0]) | set(ranks[1])
    assert len(starts) == found.summary["ranks"]["steps"] > 100
    both = [start for start in starts if all(start in rank for rank in ranks)]
    assert 0 < len(both) < len(starts)
    for start in starts:
        totals = [rank[start][0] if start in rank else Totals(0) for rank in ranks]
        taken = [rank[start][1] for rank in ranks if start in rank]
        for stages in taken:
            for stage in (0, 1):
                # Starts and ends are whole nanoseconds, rounded each.
                assert stages["duration_ns"][stage] == pytest.approx(1e9 * cost.common_step(totals, stage), abs=1.01)
            handover_ns = 1e9 * cost.handover_s(2 * max(each.rows for each in totals))
            after = stages["start_ns"][1] - stages["start_ns"][0] - stages["duration_ns"][0]
            assert after >= handover_ns - 2


def totals_of(span: np.void) -> Totals:
    decodes = int(span["decode_seqs"]) * int(span["query_tokens"])
    names = ("prefill_rows", "prefill_chunks", "prefill_pairs", "prefill_kv_tokens", "decode_seqs", "decode_kv_tokens")
    rows, *rest = (int(span[name]) for name in names)
    return Totals(rows + decodes, rows, *rest, decodes + int(span["completions"]), 0, 0)


def test_a_pipeline_of_ranks_answers_between_its_parts() -> None:
    """Two stages halve the work before the next micro-batch starts; a token passes both, and more memory is left for KV."""
    plain, stages = simulate(scenario("parallel={data: 2, expert: 2}")), simulate(scenario(*PIPELINE))
    assert 0.5 < stages.summary["tpot_s"]["p50"] / plain.summary["tpot_s"]["p50"] < 1.3
    assert stages.summary["kv_utilization"]["max"] < 0.5 * plain.summary["kv_utilization"]["max"]
    # Half the share of twice the GPUs.
    assert stages.summary["mfu"] * stages.summary["makespan_s"] * 2 == pytest.approx(
        plain.summary["mfu"] * plain.summary["makespan_s"], rel=1e-9
    )
    assert stages.summary["busy_fraction"] < plain.summary["busy_fraction"]


def test_micro_batches_of_ranks_take_turns() -> None:
    asked = scenario("parallel={data: 2, expert: 2}", "micro_batches=2")
    (spec,) = build(asked).machines
    assert (spec.ranks, spec.hosted[0].micro_batches) == (2, 2)
    found, one = simulate(asked), simulate(scenario("parallel={data: 2, expert: 2}"))
    assert [set(replica.spans["lane"]) for replica in found.columns.replicas] == [{0, 1}] * 2
    # Two halves of a batch read the weights twice, one after the other.
    assert one.summary["tpot_s"]["p50"] < found.summary["tpot_s"]["p50"] < 2 * one.summary["tpot_s"]["p50"]
    assert found.summary["ranks"]["steps"] > 1.5 * one.summary["ranks"]["steps"]


def test_models_that_share_a_machine_have_ranks_each() -> None:
    asked = scenario(*SHARED)
    (spec,) = build(asked).machines
    assert (spec.ranks, len(spec.hosted), gpus(asked)) == (4, 2, 4)
    found, alone = simulate(asked), simulate(scenario())
    pool = found.manifest["pools"]["a"]
    assert (pool["rows"], pool["gpus"]) == ([0, 7], 4)
    assert [each["ranks"]["per_machine"] for each in pool["models"]] == [4, 4]
    # Rows 0 to 3 are the ranks of the first model, and 4 to 7 those of the second.
    requests = found.requests
    assert set(requests["replica"][requests["model_index"] == 0]) <= {0, 1, 2, 3}
    assert set(requests["replica"][requests["model_index"] == 1]) <= {4, 5, 6, 7}
    assert len(set(requests["replica"])) > 4
    assert spec.hosted[0].kv_blocks < build(scenario()).machines[0].hosted[0].kv_blocks / 2
    # One works while the other waits.
    table = found.columns.iterations()
    steps = sorted(
        {(int(start), int(start + lasts)) for start, lasts in zip(table["start_ns"], table["duration_ns"], strict=True)}
    )
    assert all(end <= later for (_, end), (later, _) in pairwise(steps))
    assert found.summary["tpot_s"]["p50"] > alone.summary["tpot_s"]["p50"]


def test_ranks_in_turn_are_not_planned_ahead() -> None:
    for asked in (PIPELINE, ("micro_batches=2",), SHARED):
        with pytest.raises(ScenarioError, match="async_scheduling: "):
            build(scenario(*asked, "scheduler.async_scheduling=true"))


def test_a_pipeline_of_ranks_drafts_with_the_models_own_layers() -> None:
    asked = Scenario.from_yaml("""\
model: deepseek-v3
hardware: h200
parallel: {data: 8, expert: 8, pipeline: 2}
decoding: {method: mtp, num_speculative_tokens: 2, acceptance: {alpha: 0.7}}
workload: {arrivals: {process: deterministic, rate_per_s: 4}, requests: 24, prompt_tokens: 500, output_tokens: 40}
""")
    found = simulate(asked)
    assert found.summary["requests"]["finished"] == 24
    assert found.summary["ranks"]["per_machine"] == 8
    assert found.summary["speculation"]["mean_acceptance_length"] > 1.5


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("parallel.expert=3", "parallel.expert 3 must divide tensor * data = 4"),
        ("parallel={data: 3, expert: 3}", "parallel.expert 3 does not divide the 128 experts of qwen3-30b-a3b"),
        ("model=llama-3.1-8b", "parallel.expert needs a mixture of experts, and llama-3.1-8b is dense"),
        ("rank_router=dynamo", "rank_router: Dynamo(index='exact'"),
        ("rank_router=nearest", "rank_router: 'nearest' is not a policy; valid here: round_robin"),
        ("prompt_balance={timeout_iters: 0}", "prompt_balance.timeout_iters is a number at least 1; got 0"),
        ("prompt_balance={timeout: 5}", "prompt_balance.timeout is not a setting; did you mean timeout_iters?"),
        ("parallel.pipeline=49", "parallel.pipeline 49 exceeds the 48 layers of qwen3-30b-a3b"),
    ],
)
def test_what_ranks_cannot_be_is_said_in_one_sentence(assignment: str, sentence: str) -> None:
    with pytest.raises(ScenarioError) as error:
        build(scenario(assignment))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_pools_without_ranks_stand_beside_one_that_has_some() -> None:
    mixed = Scenario.from_yaml("""\
rank_router: round_robin
pools:
  a: {model: qwen3-30b-a3b, parallel: {data: 2, expert: 2}}
  b: {model: llama-3.2-1b, replicas: 2}
workload: {trace: conversation, limit: 10, models: {qwen3-30b-a3b: 1, llama-3.2-1b: 1}}
""")
    found = resolve(mixed)
    assert [machine.ranks for machine in found.experiment.machines] == [2, 1, 1]
    assert [pool["rows"] for pool in found.manifest["pools"].values()] == [[0, 1], [2, 3]]
    with pytest.raises(ScenarioError, match=r"pools\.b\.rank_router: this is between the ranks of a machine"):
        resolve(mixed.with_set("pools.b.rank_router=round_robin"))


@pytest.mark.parametrize("key", ["rank_router=round_robin", "prompt_balance={}"])
def test_what_is_between_ranks_needs_some(key: str) -> None:
    with pytest.raises(
        ScenarioError, match=f"{key.partition('=')[0]}: this is between the ranks of a machine, and it has one"
    ):
        build(Scenario.default().with_set(key))


def test_each_stack_has_its_own_way_between_ranks() -> None:
    found = [rank_router_of(stack) for stack in ("vllm", "trtllm", "sglang", "eager")]
    assert found == [VllmRanks(), TrtLlmRanks(), RoundRobin(), RoundRobin()]
