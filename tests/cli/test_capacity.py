"""rooftrace capacity, and budgets that are chosen from the cost model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hwmodels.budget import saturating_tokens, tokens_within
from hwmodels.totals import Totals
from sim.cli import build_app
from sim.errors import RooftraceError, ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.study.memory import batch_plan, reserve_range
from sim.study.optimize import cheapest
from sim.study.rates import Target, bisect

POISSON = "workload={arrivals: {process: poisson, rate_per_s: 4}, prompt_tokens: 600, output_tokens: 60, requests: 100}"


def rooftrace(*arguments: str):
    return CliRunner().invoke(build_app(), ["capacity", *arguments])


def test_the_formula_with_its_reserve():
    facts = {"memory_bytes": 48e9, "weight_bytes": 26e9, "kv_bytes_per_token": 819_200.0, "sequence_tokens": 1024}
    assert batch_plan(**facts).sequences == 26
    plan = batch_plan(**facts, reserve_bytes=6.5e9)
    assert (plan.sequences, plan.pool_bytes) == (18, 15.5e9)


def test_one_reserve_may_explain_several_batches_or_none():
    facts = {"memory_bytes": 100.0, "weight_bytes": 20.0, "kv_bytes_per_token": 1.0}
    assert reserve_range(**facts, batches={10: 5, 20: 2}) == (20.0, 30.0)
    assert reserve_range(**facts, batches={10: 5, 20: 3}) is None


def test_the_planner_says_what_it_keeps_back():
    done = rooftrace("--set", "model=llama-13b", "--set", "hardware=a6000", "--reserve-gb", "10", "--json")
    facts = json.loads(done.stdout)
    assert facts["reserve_bytes"] == 10e9
    assert facts["kv_bytes_per_token"] == 819_200
    pool = facts["memory_bytes"] - facts["weight_bytes"] - 10e9
    assert facts["sequences"]["1024"] == pool // (1024 * 819_200)


def test_the_planner_prints_the_blocks_of_an_engines_log_and_its_parts():
    settings = ["--set", 'memory={gpu_memory_utilization: 0.95, release: "0.19"}', "--set", "scheduler=orca"]
    limits = ["--set", "scheduler={policy: sarathi, token_budget: 8192, max_sequences: 1024}"]
    facts = json.loads(rooftrace(*settings, *limits, "--json").stdout)
    # vLLM 0.19.0 printed 58.11 GiB and 476,016 tokens (docs/validation.md).
    assert facts["memory"]["blocks"] * 16 == pytest.approx(476_016, rel=0.005)
    assert facts["pool_bytes"] == pytest.approx(facts["memory"]["kv_bytes"])
    assert facts["sequences"]["1024"] == facts["pool_bytes"] // (1024 * 131_072)
    text = " ".join(rooftrace(*settings, *limits).stdout.split())
    assert f"{facts['memory']['blocks']:,} blocks of 16 tokens" in text
    assert "0.95 of 79.19 GiB, by vllm 0.19: weights 14.96, activations 1.89, context 0.25" in text


def test_the_published_batches_are_explained():
    done = rooftrace("--published")
    assert done.exit_code == 0
    assert "no single pool gives the stated batches" in done.stdout


def test_bisection_closes_in_on_the_rate():
    within, outside = bisect(lambda rate: None if rate <= 3.7 else "too fast", start_per_s=1.0, tolerance=0.01)
    assert within <= 3.7 < outside
    assert outside - within <= 0.01 * within
    assert bisect(lambda _: "never", start_per_s=1.0)[0] == 0.0
    with pytest.raises(RooftraceError, match="tighten the limits"):
        bisect(lambda _: None, start_per_s=1.0)


def test_the_rate_found_keeps_to_the_limits_and_the_next_does_not():
    done = rooftrace("--slo", "--tbt-p99", "0.03", "--set", POISSON, "--json")
    facts = json.loads(done.stdout)
    by_rate = {probe["rate_per_s"]: probe["miss"] for probe in facts["probes"]}
    assert by_rate[facts["rate_per_s"]] is None
    assert by_rate[facts["outside_per_s"]]


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        ({}, None),
        ({"requests": {"total": 10, "finished": 9}}, "1 of 10 requests did not finish"),
        ({"saturated": True}, "queue still grows"),
        ({"itl_s": {"p99": 0.11}}, "gap between tokens 0.110 s > 0.1 s"),
        ({"queue_s": {"p50": 2.5}}, "median delay 2.500 s > 2 s"),
        ({"slo_attainment": 0.9896}, "98.9% of requests within the SLO < 99.0%"),
    ],
)
def test_every_limit_can_be_missed(change, miss):
    kept = {
        "requests": {"total": 10, "finished": 10},
        "saturated": False,
        "itl_s": {"p99": 0.09},
        "queue_s": {"p50": 1.5},
        "slo_attainment": 0.995,
    }
    found = Target(tbt_p99_s=0.1, queue_p50_s=2.0, attainment=0.99, all_finish=True).miss({**kept, **change})
    assert found is None if miss is None else miss in found


def test_an_attainment_without_an_slo_is_refused():
    summary = {"requests": {"total": 1, "finished": 1}, "saturated": False, "slo_attainment": None}
    with pytest.raises(RooftraceError, match=r"give slo\.ttft_s"):
        Target(attainment=0.99).miss(summary)


@pytest.mark.slow(reason="several searches")
def test_one_search_answers_both_commands():
    settings = ["--set", POISSON, "--set", "slo.ttft_s=0.3"]
    ours = rooftrace("--slo", "--queue-p50", "1e6", "--replications", "3", "--tolerance", "0.5", *settings, "--json")
    theirs = CliRunner().invoke(build_app(), ["optimize", "--tolerance", "0.5", *settings, "--json"])
    best = json.loads(theirs.stdout)["best"]
    assert json.loads(ours.stdout)["rate_per_s"] == best["rate_per_s"] > 0
    assert len(json.loads(ours.stdout)["probes"]) == len(best["tried"])


def test_candidates_of_a_sweep_are_judged_by_every_limit_of_the_target():
    base = Scenario.default().with_set("workload.limit=20")
    free = cheapest(base, {"replicas": [1]}, goal="devices", replications=1, jobs=1)
    assert free.best is not None
    held = cheapest(base, {"replicas": [1]}, goal="devices", target=Target(tbt_p99_s=1e-6), replications=1, jobs=1)
    assert held.best is None


def test_a_tighter_limit_carries_less():
    rates = [
        json.loads(rooftrace("--tbt-p99", limit, "--set", POISSON, "--json").stdout)["rate_per_s"]
        for limit in ("0.0065", "0.05")
    ]
    assert rates[0] < rates[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "--set", "slo={}"], "--slo needs limits"),
        (["--slo", "--set", "workload.arrivals={process: closed_loop, concurrency: 4}"], "no arrival rate to search"),
        (["--tokens", "0"], "--tokens is a whole number"),
        (["--queue-p50", "1", "--reserve-gb", "1"], "--reserve-gb does not apply"),
        (["--slo", "--tokens", "64"], "--tokens does not apply"),
        (["--published", "--reserve-gb", "1"], "--reserve-gb does not apply"),
        (["--slo", "--tbt-p99", "nan"], "--tbt-p99 is a finite number of seconds"),
        (["--slo", "--tbt-p99", "0"], "--tbt-p99 is a finite number of seconds"),
        (["--slo", "--attainment", "1.5"], "--attainment is a share"),
    ],
)
def test_what_cannot_be_answered_is_said(arguments, message):
    done = rooftrace(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


class Tiled:
    """A millisecond a tile of 128 rows, beside three for the weights."""

    n_stages = 1
    window_tokens = None

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> float:
        return 3e-3 + 1e-3 * -(-totals.rows // 128)

    def handover_s(self, rows, /):
        return 0.0


def test_a_budget_is_a_whole_number_of_tiles():
    budget = saturating_tokens(Tiled(), loss=0.5)  # type: ignore[arg-type]
    assert budget % 128 == 0
    assert budget / (3 + budget / 128) >= 0.5 * 4096 / (3 + 32)


def test_a_budget_keeps_to_a_time_between_tokens():
    assert tokens_within(Tiled(), tbt_s=7.5e-3, decodes=10, context_tokens=500) == 512  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allow more time"):
        tokens_within(Tiled(), tbt_s=1e-3, decodes=10, context_tokens=500)  # type: ignore[arg-type]


def test_a_budget_counts_the_time_of_every_stage():
    class TwoStages(Tiled):
        n_stages = 2

    assert tokens_within(TwoStages(), tbt_s=15e-3, decodes=10, context_tokens=500) == 512  # type: ignore[arg-type]


def test_a_budget_of_ranks_counts_the_rows_of_all_of_them():
    class Ranks(Tiled):
        def common_step(self, ranks, stage: int = 0, /) -> float:
            return 3e-3 + 1e-3 * -(-sum(totals.rows for totals in ranks) // 128)

    assert tokens_within(Ranks(), tbt_s=7.5e-3, decodes=10, context_tokens=500, ranks=2) == 256  # type: ignore[arg-type]
    # Half of what all have together.
    one, two = (saturating_tokens(Ranks(), loss=0.5, ranks=ranks) for ranks in (1, 2))  # type: ignore[arg-type]
    assert two * 2 == one


def scenario(scheduler: str, slo: str = "{}") -> Scenario:
    return Scenario.from_yaml(f"scheduler: {scheduler}\nslo: {slo}\nworkload: {{trace: conversation, requests: 20}}")


def test_auto_is_resolved_and_the_manifest_says_why():
    built = resolve(scenario("{policy: sarathi, token_budget: auto, max_sequences: 32}", "{tpot_s: 0.03}"))
    chosen = built.manifest["auto"]["scheduler.token_budget"]
    assert f"token_budget={chosen['tokens']}" in built.manifest["scheduler"]
    assert "slo.tpot_s 0.03 s" in chosen["why"]
    without = resolve(scenario("{policy: decode_maximal, chunk: auto}")).manifest["auto"]["scheduler.chunk"]
    assert "80 %" in without["why"]


def test_auto_that_cannot_be_met_is_an_error():
    with pytest.raises(ScenarioError, match=r"scheduler.token_budget: no token budget keeps"):
        resolve(scenario("{policy: sarathi, token_budget: auto}", "{tpot_s: 0.0001}"))
