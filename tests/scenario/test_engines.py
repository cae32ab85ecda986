"""Schedulers of engines and what they ask of a scenario: by name, with limits on outputs, and how tokens reach clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policies.published import FasterTransformer, Orca, OrcaPaged
from policies.trtllm import TrtLlm
from policies.view import Largest, Plan, ReplicaView
from policies.wrappers import EvictNewest
from sim import Scenario, simulate
from sim.engine import Experiment
from sim.engine.record.streaming import Stream
from sim.errors import ScenarioError
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of

SHORT = "workload={trace: conversation, limit: 60, rate_scale: 8}"


def scenario(*settings: str) -> Scenario:
    return Scenario.default().with_set(SHORT, *settings)


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("{policy: trtllm, max_num_tokens: 4096}", EvictNewest(TrtLlm(max_num_tokens=4096))),
        # It says itself who is preempted.
        (
            "{policy: trtllm, capacity_scheduler_policy: MAX_UTILIZATION}",
            TrtLlm(capacity_scheduler_policy="MAX_UTILIZATION"),
        ),
        ("{policy: orca, n_slots: 1000}", EvictNewest(Orca(n_slots=1000))),
        ("{policy: orca_paged, max_prompts: 1}", EvictNewest(OrcaPaged(max_prompts=1))),
        ("{policy: fastertransformer, batch_size: 4}", EvictNewest(FasterTransformer(4))),
    ],
)
def test_schedulers_by_name(written: str, made: Any) -> None:
    assert build(scenario(f"scheduler={written}")).hosted[0].scheduler == made


def test_pipelines_have_no_overlap_scheduler() -> None:
    pipeline = scenario("scheduler={policy: trtllm}", "parallel.pipeline=2")
    assert build(pipeline).hosted[0].scheduler == EvictNewest(TrtLlm(disable_overlap_scheduler=True))
    asked = scenario("scheduler={policy: trtllm, disable_overlap_scheduler: false}", "parallel.pipeline=2")
    with pytest.raises(ScenarioError, match="disable_overlap_scheduler: micro-batches of a pipeline are planned while"):
        build(asked)


def test_what_clients_allow_is_what_is_kept_for_them() -> None:
    tight = ("scheduler={policy: trtllm}", "memory.gpu_memory_utilization=0.37")
    told = simulate(scenario(*tight, "workload.max_tokens=4000"))
    guessed = simulate(scenario(*tight))
    assert told.summary["preemptions"] == guessed.summary["preemptions"] == 0
    assert told.summary["queue_s"]["mean"] > 2 * guessed.summary["queue_s"]["mean"]
    # What is kept holds no tokens.
    assert told.summary["kv_utilization"]["mean"] < guessed.summary["kv_utilization"]["mean"]


def test_a_scheduler_that_is_told_nothing_of_limits_says_so() -> None:
    def notes(*settings: str) -> list[str]:
        return [note for note in resolve(scenario(*settings)).manifest["notes"] if "workload.max_tokens" in note]

    assert len(notes("scheduler={policy: orca}")) == 1
    assert not notes("scheduler={policy: orca}", "workload.max_tokens=2000")
    assert not notes("scheduler={policy: orca_paged}")


def test_a_limit_below_an_output_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"workload.max_tokens is at least the longest output, \d+ tokens; got 3"):
        build(scenario("workload.max_tokens=3"))


def test_the_workload_alone_says_what_clients_allow(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,max_tokens\n0,10,3,8\n1,10,3,5\n2,10,3,4\n"
    )
    column = f"workload={{trace: {tmp_path / 'trace.csv'}}}"
    clients = "workload.arrivals={process: closed_loop, concurrency: 1}"
    for arrivals in ([], [clients]):
        assert build(scenario(column, *arrivals)).workload.max_tokens.tolist() == [8, 5, 4]
        assert build(scenario(column, *arrivals, "workload.limit=2")).workload.max_tokens.tolist() == [8, 5]
        with pytest.raises(ScenarioError, match="the trace has a column max_tokens; leave out one of them"):
            build(scenario(column, *arrivals, "workload.max_tokens=9"))
    with pytest.raises(TypeError, match="max_tokens"):
        Experiment(workload=build(scenario(column)).workload, replicas=(), max_tokens=9)  # type: ignore[call-arg]


def test_tokens_are_grouped_by_the_rule_of_the_serving_stack() -> None:
    assert build(scenario()).stream == Stream(1, "tokens")
    assert build(scenario("stream_interval=8")).stream == Stream(8, "tokens")
    assert build(scenario("stream_interval=8", "serving_stack=sglang")).stream == Stream(8, "tokens")
    assert build(scenario("stream_interval=8", "serving_stack=trtllm")).stream == Stream(8, "iterations")


def test_groups_change_the_gaps_that_clients_see_and_nothing_else() -> None:
    one, eight = (simulate(scenario(f"stream_interval={n}")).summary for n in (1, 8))
    changed = [key for key in one if key != "wall_s" and one[key] != eight[key]]
    assert changed == ["itl_s"]
    assert eight["itl_s"]["mean"] > 6 * one["itl_s"]["mean"]


def test_pools_that_group_tokens_differently_are_refused() -> None:
    pools = "pools={a: {serving_stack: ideal}, b: {serving_stack: trtllm}}"
    mixed = scenario(pools, "cost_model=roofline", "stream_interval=4")
    with pytest.raises(ScenarioError, match="stream_interval: ideal and trtllm group tokens by different rules"):
        build(mixed)


def test_limits_that_are_left_out_follow_those_that_are_given() -> None:
    def limits(*settings: str) -> tuple[int, int]:
        made = build(scenario(*settings)).hosted[0].scheduler
        return made.max_num_batched_tokens, made.max_num_seqs  # type: ignore[union-attr]

    assert limits() == (8192, 1024)
    assert limits("hardware=a100-80gb-sxm") == (2048, 256)
    assert limits("scheduler={policy: vllm, max_num_batched_tokens: 256}") == (256, 256)
    # A whole prompt has to fit where it is not cut.
    assert limits("scheduler={policy: vllm, enable_chunked_prefill: false}") == (131072, 1024)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("scheduler={policy: vllm, max_num_seqs: 0}",), "max_num_seqs is a whole number of at least 1; got 0"),
        (
            ("scheduler={policy: vllm, enable_chunked_prefill: false, max_num_batched_tokens: 2048}",),
            r"an iteration holds all tokens of a request, \d+ in this workload, and max_num_batched_tokens is 2048",
        ),
        (
            ("scheduler={policy: sglang, chunked_prefill_size: 8}",),
            r"chunked_prefill_size \(8\) holds no whole page of 16 tokens",
        ),
        (
            (
                "scheduler={policy: cap, max_sequences: 4, inner: {policy: vllm, max_num_batched_tokens: 7}}",
                "decoding={method: eagle, num_speculative_tokens: 7, acceptance: {alpha: 0.5}, draft: {cost_ratio: 0.05}}",
            ),
            r"max_num_batched_tokens \(7\) holds no round of speculation, 8 tokens",
        ),
        (
            (
                "scheduler={policy: trtllm, max_num_tokens: 7, enable_chunked_prefill: true}",
                "decoding={method: eagle, num_speculative_tokens: 7, acceptance: {alpha: 0.5}, draft: {cost_ratio: 0.05}}",
            ),
            r"max_num_tokens \(7\) holds no round of speculation, 8 tokens",
        ),
    ],
)
def test_settings_with_which_nobody_could_go_on_are_refused(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        build(scenario(*settings))


def test_models_that_share_a_machine_are_not_planned_ahead() -> None:
    shared = ("pools={a: {models: [llama-3.1-8b, llama-3.2-1b]}}", "workload.models={llama-3.1-8b: 1, llama-3.2-1b: 1}")
    made = build(scenario(*shared))
    assert [tenant.scheduler.async_scheduling for tenant in made.hosted] == [False, False]  # type: ignore[union-attr]
    for asked in (
        "{policy: vllm, async_scheduling: true}",
        "{policy: sglang, disable_overlap_schedule: false}",
        "{policy: trtllm, disable_overlap_scheduler: false}",
    ):
        with pytest.raises(ScenarioError, match="models that share a machine take turns"):
            build(scenario(*shared, f"scheduler={asked}"))


@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-80gb-sxm"])
def test_capacity_divides_memory_as_a_run_does(hardware: str) -> None:
    asked = scenario(f"hardware={hardware}")
    assert memory_plan_of(asked)[1].kv_blocks == build(asked).hosted[0].kv_blocks


def test_a_scheduler_on_the_stack_of_another_engine_is_noted() -> None:
    def notes(*settings: str) -> list[str]:
        return [note for note in resolve(scenario(*settings)).manifest["notes"] if "serving stack" in note]

    assert notes("scheduler={policy: sglang}") == [
        "The scheduler sglang plans here for the serving stack vllm, whose host work, memory and pages the run has; "
        "scheduler: {policy: vllm} plans as vllm does, and serving_stack: sglang has what else is sglang's."
    ]
    (note,) = notes("scheduler=vllm", "serving_stack=trtllm")
    assert "scheduler: {policy: trtllm} plans as trtllm does" in note
    for alike in (
        "scheduler={policy: vllm-v0}",
        "scheduler={policy: sarathi}",
        "serving_stack=ideal",
        "serving_stack=trtllm",
    ):
        assert not notes(alike)
    assert not notes("scheduler={policy: trtllm}", "serving_stack=trtllm")


@pytest.mark.parametrize("inner", ["vllm", "sglang", "{policy: cap, max_sequences: 3, inner: vllm}"])
def test_a_scheduler_that_says_who_gives_way_is_not_told_by_another(inner: str) -> None:
    with pytest.raises(ScenarioError, match="evict_newest wraps a scheduler that says itself who is preempted"):
        build(scenario(f"scheduler={{policy: evict_newest, inner: {inner}}}"))


@dataclass(frozen=True)
class AtMost:
    """A scheduler of one's own that says what it could never plan."""

    tokens: int

    def plan(self, view: ReplicaView, /) -> Plan:
        raise AssertionError("it is refused before")

    def never_planned(self, largest: Largest) -> str | None:
        return None if largest.request_tokens <= self.tokens else f"{largest.request_tokens} tokens are never planned"


def test_a_scheduler_of_ones_own_says_itself_what_it_could_never_plan() -> None:
    at_most = scenario("scheduler={policy: 'tests.scenario.test_engines:AtMost', tokens: 10}")
    with pytest.raises(ScenarioError, match=r"scheduler: \d+ tokens are never planned"):
        build(at_most)
    build(at_most.with_set("scheduler.tokens=100000"))
