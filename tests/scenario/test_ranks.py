"""`parallel.data` of a scenario: machines whose ranks step together."""

from __future__ import annotations

import numpy as np
import pytest

from policies.ranks import PromptBalance
from policies.routers import RoundRobin, TrtLlmRanks, VllmRanks
from sim import Scenario, ScenarioError, simulate
from sim.engine import MachineSpec
from sim.metrics.ranks import rank_figures
from sim.results import Result
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of
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
    from hwmodels.totals import Totals

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


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        (
            "parallel.pipeline=2",
            "parallel: data 4 beside pipeline 2: pipelines whose stages have ranks are not modelled",
        ),
        ("parallel.expert=3", "parallel.expert 3 must divide tensor * data = 4"),
        ("parallel={data: 3, expert: 3}", "parallel.expert 3 does not divide the 128 experts of qwen3-30b-a3b"),
        ("model=llama-3.1-8b", "parallel.expert needs a mixture of experts, and llama-3.1-8b is dense"),
        ("micro_batches=2", "micro_batches 2: ranks take one batch a step each"),
        ("rank_router=llm_d", "rank_router: LlmD(index='exact'"),
        ("rank_router=nearest", "rank_router: 'nearest' is not a policy; valid here: round_robin"),
        ("prompt_balance={timeout_iters: 0}", "prompt_balance.timeout_iters is a number at least 1; got 0"),
        ("prompt_balance={timeout: 5}", "prompt_balance.timeout is not a setting; did you mean timeout_iters?"),
        ("pools={a: {models: [qwen3-30b-a3b, qwen3-30b-a3b#2]}}", "models that share a machine have no ranks"),
    ],
)
def test_what_ranks_cannot_be_is_said_in_one_sentence(assignment: str, sentence: str) -> None:
    more = ["workload.models={qwen3-30b-a3b: 1, 'qwen3-30b-a3b#2': 1}"] if assignment.startswith("pools") else []
    with pytest.raises(ScenarioError) as error:
        build(scenario(assignment, *more))
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
