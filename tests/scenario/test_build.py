from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from policies.published import Orca
from policies.schedulers import Sarathi
from policies.view import Plan
from policies.vllm import VllmV0
from policies.wrappers import Cap, EvictNewest, Order, Pad, RejectLate
from sim import simulate
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from sim.scenario.workload import workload_of
from sim.work import work_done
from workloads import ClosedLoop

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@dataclass(frozen=True)
class OneAtATime:
    """A scheduler of the user's own, named by its import path."""

    patience: int = 1

    def plan(self, view, /):
        if view.prefilling:
            return Plan(run=tuple((seq.id, seq.remaining_tokens) for seq in view.prefilling))
        if view.n_decoding:
            return Plan(decode=True)
        return Plan(run=tuple((seq.id, seq.tokens) for seq in view.waiting[:1]))


@dataclass(frozen=True)
class Idle:
    """Breaks the rules: plans nothing while work waits."""

    def plan(self, view, /):
        return Plan()


def scenario(text="", **settings):
    return Scenario.from_yaml(text, source="my.yaml") if text else Scenario(**settings)


def workload(**settings):
    return workload_of(Scenario(workload=settings))


def refusal(text):
    with pytest.raises(ScenarioError) as error:
        resolve(scenario(text))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_default_scenario_follows_the_azure_conversation_trace():
    made = workload_of(Scenario.default())
    # Mean, median, p90 and p99 of AzureLLMInferenceTrace_conv.csv.
    for values, published in (
        (made.prompt_tokens, (1154.7, 1020.0, 2734.5, 4142.0)),
        (made.output_tokens, (211.1, 129.0, 424.0, 601.0)),
    ):
        found = (values.mean(), *np.percentile(values, [50, 90, 99]))
        assert found == pytest.approx(published, rel=0.1)


def test_preemption_wraps_the_scheduler():
    def made(preemption):
        memory = {"preemption": preemption}
        return build(Scenario(scheduler={"policy": "vllm-v0"}, memory=memory)).replicas[0].scheduler

    assert made("recompute") == EvictNewest(inner=VllmV0())
    assert made("none") == VllmV0()


def test_policy_settings_reach_the_policy():
    experiment = build(Scenario(scheduler={"policy": "sarathi", "token_budget": 64}, replicas=2, router="random"))
    assert experiment.replicas[0].scheduler == EvictNewest(inner=Sarathi(token_budget=64))
    assert len(experiment.replicas) == 2
    assert type(experiment.router).__name__ == "Random"


def test_a_policy_of_ones_own_is_found_by_its_import_path():
    name = f"{__name__}:OneAtATime"
    result = simulate(
        Scenario(scheduler={"policy": name, "patience": 3}, workload={"trace": "conversation", "limit": 5})
    )
    assert result.summary["requests"]["finished"] == 5
    assert "patience=3" in result.manifest["scheduler"]


def first_come(view):
    return Plan(decode=view.n_decoding > 0, run=tuple((seq.id, seq.tokens) for seq in view.waiting))


def to_the_last(request, replicas):
    return len(replicas) - 1


def test_a_policy_may_be_a_plain_function():
    scenario = Scenario(
        scheduler=f"{__name__}:first_come",
        router=f"{__name__}:to_the_last",
        replicas=2,
        workload={"trace": "conversation", "limit": 5},
    )
    result = simulate(scenario)
    assert result.columns.requests["replica"].tolist() == [1] * 5
    assert result.manifest["scheduler"] == "EvictNewest(inner=first_come)"


def test_wrappers_nest_and_settings_reach_the_innermost():
    text = "{policy: order, by: deadline, inner: {policy: cap, max_tokens: 900, inner: {policy: sarathi, token_budget: 64}}}"
    made = build(scenario(f"scheduler: {text}")).replicas[0].scheduler
    assert made == EvictNewest(Order(Cap(Sarathi(token_budget=64), max_tokens=900), by="deadline"))
    assert build(scenario("scheduler: {policy: pad, sequences: 4, inner: orca}\nmemory: {preemption: none}")).replicas[
        0
    ].scheduler == Pad(Orca(), 4)
    named = scenario("scheduler: {policy: 'policies.wrappers:EvictNewest', inner: {policy: sarathi}}")
    assert build(named).replicas[0].scheduler == EvictNewest(Sarathi())


def test_a_scheduler_that_says_evict_newest_is_not_wrapped_a_second_time():
    text = "{policy: reject, inner: {policy: evict_newest, inner: {policy: vllm-v0}}}"
    assert build(scenario(f"scheduler: {text}")).replicas[0].scheduler == RejectLate(EvictNewest(VllmV0()))


def test_settings_of_an_inner_policy_can_be_set_and_chosen():
    base = scenario("scheduler: {policy: cap, max_sequences: 9, inner: sarathi}")
    made = build(base.with_set("scheduler.inner.token_budget=77")).replicas[0].scheduler
    assert made == EvictNewest(Cap(Sarathi(token_budget=77), max_sequences=9))
    built = resolve(base.with_set("scheduler.inner.token_budget=auto"))
    tokens = built.manifest["auto"]["scheduler.inner.token_budget"]["tokens"]
    assert f"token_budget={tokens}" in built.manifest["scheduler"]


def test_running_out_of_memory_names_the_setting_that_preempts():
    tight = {
        "scheduler": "sarathi",
        "memory": {"preemption": "none", "kv_blocks": 595},
        "workload": {"trace": "conversation", "limit": 400},
    }
    with pytest.raises(ScenarioError, match=r"in a scenario: memory\.preemption: recompute"):
        simulate(Scenario(**tight).with_set("workload.rate_scale=20"))


def test_the_schedulers_limits_are_those_of_the_profile_run():
    def memory(policy):
        return resolve(Scenario(scheduler=policy)).manifest["memory"]

    few = memory({"policy": "sarathi", "token_budget": 256, "max_sequences": 64})
    many = memory({"policy": "vllm-v0", "max_num_batched_tokens": 4096, "max_num_seqs": 512})
    capped = memory({"policy": "cap", "max_sequences": 9, "inner": "sarathi"})
    assert few["profile_run"] == {"tokens": 256, "sequences": 64}
    assert many["profile_run"] == {"tokens": 4096, "sequences": 512}
    assert capped["profile_run"] == {"tokens": 512, "sequences": 9}
    assert few["blocks"] > many["blocks"]
    # Where a scheduler sets none, the engine does.
    assert memory({"policy": "orca"})["profile_run"] == {"tokens": 8192, "sequences": 128}


def test_blocks_that_are_given_hold_a_null_block():
    made = build(Scenario(memory={"kv_blocks": 100, "block_tokens": 8})).replicas[0]
    assert (made.kv_blocks, made.block_tokens) == (99, 8)
    plain = build(Scenario(memory={"kv_blocks": 100}, serving_stack="ideal")).replicas[0]
    assert (plain.kv_blocks, plain.block_tokens) == (100, 16)
    assert build(Scenario(serving_stack="sglang")).replicas[0].block_tokens == 1


def test_a_policy_that_breaks_the_rules_is_an_error_and_not_a_hang():
    with pytest.raises(ScenarioError, match="Idle"):
        simulate(Scenario(scheduler=f"{__name__}:Idle", workload={"trace": "conversation", "limit": 5}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: lama-3.1-8b", "my.yaml: model: unknown model 'lama-3.1-8b'; nearest valid names: llama-3.1-8b"),
        ("hardware: h100", None),
        ("hardware: h1000", "my.yaml: hardware: unknown hardware 'h1000'"),
        ("hardware: nowhere.toml", "my.yaml: hardware: hardware profile nowhere.toml does not exist"),
        ("model: llama-3.1-70b", "GB is missing"),
        ("model: llama-3.1-70b", "it would fit with tensor"),
        ("parallel: {tensor: 3}", "my.yaml: parallel.tensor 3 does not divide"),
        (
            "memory: {mem_fraction_static: 0.8}",
            "memory.mem_fraction_static is another stack's name; with serving_stack vllm it is memory.gpu_memory_utilization",
        ),
        (
            "{serving_stack: sglang, memory: {gpu_memory_utilization: 0.8}}",
            "with serving_stack sglang it is memory.mem_fraction_static",
        ),
        (
            "{cost_model: roofline, memory: {free_gpu_memory_fraction: 0.8}}",
            "with cost_model roofline it is memory.gpu_mem",
        ),
        (
            "memory: {release: new}",
            "my.yaml: memory.release: a release begins with numbers, such as 0.32 or 0.19 or 0.11",
        ),
        ("{serving_stack: eager, memory: {release: '0.19'}}", "eager has no account of memory"),
        ("memory: {kv_blocks: 1}", "my.yaml: kv_blocks 1 leaves no block for a sequence; give at least 2"),
        ("scheduler: sarthi", "my.yaml: scheduler: 'sarthi' is not a policy; did you mean sarathi?"),
        ("scheduler: {policy: sarathi, token_bugdet: 1}", "token_bugdet is not a setting of sarathi; did you mean"),
        ("scheduler: {policy: sarathi, token_budget: 0}", "token_budget is a whole number of at least 1; got 0"),
        ("scheduler: {policy: sarathi, token_budget: '9'}", "scheduler.token_budget is a whole number; got '9'"),
        ("scheduler: {policy: sarathi, watermark: .nan}", "scheduler.watermark is a finite number; got nan"),
        ("scheduler: {policy: static, token_budget: 1}", "valid here: batch_size"),
        ("scheduler: {policy: vllm, scheduling_policy: priority, max_num_active_seqs: 3}", None),
        ("scheduler: {policy: vllm, scheduling_policy: sjf}", "scheduler.scheduling_policy is one of fcfs, priority"),
        ("scheduler: {policy: vllm, evicts: true}", "scheduler.evicts is not a setting of vllm; valid here: max_num"),
        ("scheduler: nowhere:Thing", "my.yaml: scheduler: cannot import 'nowhere:Thing'"),
        ("scheduler: policies.schedulers:Thing", "policies.schedulers has no 'Thing'"),
        ("scheduler: os:path", "a policy is a class with the method plan, or a function of (view)"),
        (
            "router: 'os.path:basename'",
            "a policy is a class with the method route, or a function of (request, replicas)",
        ),
        (
            f"scheduler: {{policy: '{__name__}:first_come', seats: 3}}",
            "scheduler.seats is not a setting of tests.scenario.test_build:first_come, which is a function and has none",
        ),
        (
            "scheduler: {policy: evict_newest, inner: {policy: sarthi}}",
            "my.yaml: scheduler.inner: 'sarthi' is not a policy; did you mean sarathi?",
        ),
        (
            "scheduler: {policy: order, inner: {policy: cap, max_sequences: 3, inner: {policy: sarathi, budget: 3}}}",
            "scheduler.inner.inner.budget is not a setting of sarathi; did you mean token_budget?",
        ),
        (
            "scheduler: {policy: evict_newest, inner: {token_budget: 3}}",
            "scheduler.inner is a policy, such as {policy: ",
        ),
        ("scheduler: {policy: evict_newest, inner: 3}", "scheduler.inner is a policy, such as {policy: "),
        ("scheduler: evict_newest", "scheduler.inner is missing; evict_newest needs it"),
        ("scheduler: {policy: order, by: size, inner: sarathi}", "scheduler.by is one of arrival, priority, "),
        ("router: {policy: random, x: 1}", "router.x is not a setting of random, which has none"),
        ("router: power_of_too", "did you mean power_of_two?"),
        ("workload: {trace: nowhere.csv}", "workload.trace: nowhere.csv does not exist"),
        ("workload: {trace: conversatio}", "did you mean conversation?"),
        ("workload: {trace: conversation, format: plain}", "workload.format is about reading a file"),
        ("model: bert-base", "bert-base is an encoder and emits no tokens"),
    ],
)
def test_what_cannot_be_built_names_the_key_and_the_way_out(text, expected):
    if expected is None:
        resolve(scenario(text))
    else:
        assert expected in refusal(text)


GENERATED = "workload: {{requests: 10, prompt_tokens: {prompt}, output_tokens: {output}, arrivals: {arrivals}}}"
POISSON = "{process: poisson, rate_per_s: 1}"


@pytest.mark.parametrize(
    ("prompt", "output", "arrivals", "expected"),
    [
        ("-1", "1", POISSON, "workload.prompt_tokens.tokens is a number at least 0; got -1"),
        ("1.5", "1", POISSON, "workload.prompt_tokens is a mapping of settings"),
        ("0", "0", POISSON, "a request needs prompt_tokens or output_tokens above 0"),
        ("{distribution: lognormal, mu: 1, mean: 3}", "1", POISSON, "lognormal needs mu, sigma or mean, median"),
        ("{distribution: lognormal, mu: a, sigma: 3}", "1", POISSON, "workload.prompt_tokens.mu is a number; got 'a'"),
        ("{distribution: uniform, min_token: 1}", "1", POISSON, "did you mean min_tokens?"),
        ("{distribution: normal}", "1", POISSON, "'normal' is not a distribution; did you mean lognormal?"),
        ("1", "1", "{process: poison}", "'poison' is not an arrival process; did you mean poisson?"),
        ("1", "1", "{process: poisson}", "poisson needs rate_per_s; got nothing"),
        ("1", "1", "{process: poisson, rate_per_s: .nan}", "workload.arrivals.rate_per_s is a finite number"),
        ("1", "1", "{process: poisson, rate_per_s: 0}", "workload.arrivals.rate_per_s is a number above 0; got 0"),
        ("1", "1", "{process: closed_loop, concurrency: 0}", "concurrency is at least 1; got 0"),
        ("1", "1", "{process: closed_loop}", "closed_loop needs concurrency"),
    ],
)
def test_a_generator_that_cannot_work_is_refused(prompt, output, arrivals, expected):
    assert expected in refusal(GENERATED.format(prompt=prompt, output=output, arrivals=arrivals))


def test_rate_scale_is_refused_for_closed_loop_clients():
    with pytest.raises(ScenarioError, match=r"change workload\.arrivals\.concurrency instead"):
        workload(trace="conversation", arrivals={"process": "closed_loop", "concurrency": 2}, rate_scale=2.0)


def test_a_trace_lends_its_lengths_to_generated_arrivals():
    plain = workload(trace="conversation", limit=50)
    paced = workload(
        trace="conversation", requests=2500, limit=50, arrivals={"process": "deterministic", "rate_per_s": 4}
    )
    assert paced.prompt_tokens.tolist() == plain.prompt_tokens.tolist()
    assert set(np.diff(paced.arrival_ns).tolist()) == {250_000_000}
    clients = workload(trace="conversation", limit=50, arrivals={"process": "closed_loop", "concurrency": 3})
    assert isinstance(clients, ClosedLoop)
    assert clients.output_tokens.tolist() == plain.output_tokens.tolist()


def test_think_times_do_not_depend_on_where_lengths_come_from():
    arrivals = {"process": "closed_loop", "concurrency": 3, "mean_think_s": 2.0}
    lent = workload(trace="conversation", requests=20, arrivals=arrivals)
    drawn = workload(requests=20, prompt_tokens=5, output_tokens=5, arrivals=arrivals)
    assert lent.think_ns.tolist() == drawn.think_ns.tolist()


def test_paths_are_relative_to_the_scenario_file(tmp_path):
    (tmp_path / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,20,3\n")
    (tmp_path / "s.yaml").write_text("workload: {trace: mine.csv, rate_scale: 2}\n")
    assert workload_of(Scenario.load(tmp_path / "s.yaml")).arrival_ns.tolist() == [0, 500_000_000]


def test_a_requests_count_for_a_trace_file_points_to_limit(tmp_path):
    (tmp_path / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n")
    text = "workload: {trace: mine.csv, requests: 1}"
    with pytest.raises(ScenarioError, match=r"use workload\.limit"):
        workload_of(Scenario.from_yaml(text, folder=tmp_path))


@pytest.mark.parametrize(
    "limit", [32, pytest.param(None, marks=pytest.mark.slow(reason="every example at its full length"))]
)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_account_for_every_request(path, limit):
    scenario = Scenario.load(path)
    if scenario.workload.rollout is not None:
        scenario = scenario if limit is None else scenario.with_value("workload.rollout.prompts", limit // 16)
    elif scenario.workload.protocol is None:
        scenario = scenario.with_value("workload.limit", limit)
    result = simulate(scenario)
    counts = result.summary["requests"]
    assert counts["finished"] + counts["rejected"] == counts["total"] == len(result.columns.requests["status"])
    assert 0 < result.summary["mfu"] < 1
    assert 0 < result.summary["mbu"] <= 1
    assert result.summary["kv_utilization"]["max"] <= 1


def test_the_examples_show_what_they_say():
    def summary(name):
        return simulate(Scenario.load(next(path for path in EXAMPLES if path.stem == name))).summary

    assert summary("prefill-first")["itl_s"]["p99"] > summary("conversation")["itl_s"]["p99"]
    tight = summary("tight-memory")
    assert tight["preemptions"] > 0
    assert tight["requests"]["rejected"] > 0


def test_work_over_spans_equals_work_over_single_iterations():
    experiment = build(Scenario(workload={"trace": "conversation", "limit": 30}))
    from sim.engine import run

    fast, slow = (work_done(experiment, run(experiment, fast_forward=way)) for way in (True, False))
    # Power is no line in the KV tokens that a span reads.
    for name in ("power_share_s", "prompt_share", "prompt_attention_share", "decode_kv_share"):
        assert fast.pop(name) == pytest.approx(slow.pop(name), rel=1e-3)
    assert fast.pop("busy_s") == pytest.approx(slow.pop("busy_s"), rel=1e-12)
    assert fast == pytest.approx(slow, rel=1e-12)


def test_memory_bound_decoding_has_full_bandwidth_utilisation():
    alone = Scenario(
        cost_model="roofline",
        workload={
            "requests": 1,
            "prompt_tokens": 8,
            "output_tokens": 500,
            "arrivals": {"process": "deterministic", "rate_per_s": 1},
        },
    )
    assert simulate(alone).summary["mbu"] == pytest.approx(1.0, abs=0.03)


def test_simulate_says_what_it_takes():
    with pytest.raises(TypeError, match="simulate takes a Scenario or an Experiment; got str"):
        simulate("scenario.yaml")
    assert simulate(build(Scenario(workload={"trace": "conversation", "limit": 3}))).label == "experiment"
