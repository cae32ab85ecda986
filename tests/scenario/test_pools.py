"""Several models on several machines from one scenario: pools, models that share machines, and placements replayed."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hwmodels.device import load_device
from hwmodels.model import load_model
from policies.placement import Group, Placement
from policies.published import Orca
from policies.schedulers import Sarathi
from policies.wrappers import EvictNewest
from sim import simulate, sweep
from sim.cli import build_app
from sim.engine import FINISHED, run
from sim.engine.spec.lifecycle import READY
from sim.errors import RooftraceError, ScenarioError
from sim.placement import save_placement
from sim.placement.scenario import PlaceScenario
from sim.results import Result
from sim.scenario import Scenario
from sim.scenario.assembly import build, deployment_of, resolve
from sim.study.optimize import with_costs
from sim.study.points import check_key
from workloads import Trace

SMALL, LARGE = "llama-3.2-1b", "llama-3.1-8b"
MIX = {"trace": "conversation", "limit": 60, "models": {SMALL: 2, LARGE: 1}}
TWO = {"small": {"model": SMALL, "hardware": "l40s", "replicas": 2}, "large": {"parallel": {"tensor": 2}}}


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"alpha": 0.5}}
DRAFT = {
    "method": "draft_model",
    "num_speculative_tokens": 3,
    "acceptance": {"alpha": 0.7},
    "draft": {"model": SMALL},
}


def pools(**settings):
    return Scenario.from_mapping({"pools": TWO, "workload": MIX, **settings}, source="my.yaml")


def refusal(**settings):
    with pytest.raises(ScenarioError) as error:
        resolve(pools(**settings))
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_same(a, b):
    for name, column in a.columns.requests.items():
        np.testing.assert_array_equal(column, b.columns.requests[name], err_msg=name)
    assert a.iterations.equals(b.iterations)


def test_a_pool_that_says_nothing_is_the_scenario_of_the_top_level():
    settings = {"scheduler": {"policy": "vllm-v0"}, "replicas": 2, "workload": {"trace": "conversation", "limit": 60}}
    alone = simulate(Scenario(**settings))
    pooled = simulate(Scenario(**settings, pools={"all": {}}))
    assert_same(alone, pooled)
    named = {key: {"all": alone.summary[key]} for key in ("trust", "memory")}
    assert alone.summary | {"wall_s": 0, **named} == pooled.summary | {"wall_s": 0}


def test_a_pool_has_what_it_says_and_the_rest_from_the_top_level():
    experiment = build(
        pools(
            scheduler={"policy": "sarathi", "token_budget": 99},
            memory={"block_tokens": 32, "gpu_memory_utilization": 0.8},
            pools={
                "a": {"memory": {"gpu_memory_utilization": 0.5}, "scheduler": {"policy": "orca"}},
                "b": {"model": SMALL, "micro_batches": 3, "parallel": {"pipeline": 2}},
            },
        )
    )
    a, b = experiment.replicas
    assert (a.scheduler, b.scheduler) == (EvictNewest(Orca()), EvictNewest(Sarathi(token_budget=99)))
    assert (a.block_tokens, b.block_tokens, b.micro_batches, b.cost.n_stages) == (32, 32, 3, 2)
    alone = build(
        Scenario(memory={"block_tokens": 32, "gpu_memory_utilization": 0.5}, scheduler={"policy": "orca"})
    ).replicas[0]
    assert a.kv_blocks == alone.kv_blocks


def test_settings_of_a_pool_can_be_set_and_start_from_those_of_the_top_level():
    made = pools(scheduler={"policy": "sarathi", "max_sequences": 7}).with_set("pools.large.scheduler.token_budget=64")
    assert build(made).replicas[2].scheduler == EvictNewest(Sarathi(token_budget=64, max_sequences=7))
    assert build(made).replicas[0].scheduler == EvictNewest(Sarathi(max_sequences=7))


def test_every_request_is_served_by_a_machine_of_its_model():
    result = simulate(pools(router="least_outstanding"))
    requests = result.requests
    assert (requests["status"] == "finished").all()
    names = result.manifest["models"]
    hosts = {0: SMALL, 1: SMALL, 2: LARGE}
    served = [
        (names[row], hosts[replica]) for row, replica in zip(requests["model_index"], requests["replica"], strict=True)
    ]
    assert all(asked == host for asked, host in served)
    assert set(requests["replica"]) == {0, 1, 2}
    counted = {name: facts["requests"]["total"] for name, facts in result.summary["models"].items()}
    assert counted == {name: sum(asked == name for asked, _ in served) for name in (SMALL, LARGE)}
    assert [pool["rows"] for pool in result.manifest["pools"].values()] == [[0, 1], [2, 2]]


def test_two_pools_give_what_two_separate_runs_give(tmp_path):
    together = simulate(pools())
    trace = together.columns.requests
    for row, name in enumerate(together.manifest["models"]):
        mine = trace["model_index"] == row
        part = Trace(
            arrival_ns=trace["arrival_ns"][mine],
            prompt_tokens=trace["prompt_tokens"][mine],
            output_tokens=trace["output_tokens"][mine],
        )
        part.to_csv(tmp_path / f"{row}.csv")
        pool = {"small": TWO["small"], "large": {"model": LARGE, **TWO["large"]}}["small" if name == SMALL else "large"]
        alone = simulate(Scenario(**pool, workload={"trace": str(tmp_path / f"{row}.csv")})).columns.requests
        for column in ("scheduled_ns", "first_token_ns", "finish_ns", "preemptions"):
            np.testing.assert_array_equal(trace[column][mine], alone[column], err_msg=f"{name} {column}")
        first = 0 if name == SMALL else 2
        np.testing.assert_array_equal(trace["replica"][mine], alone["replica"] + first)


def test_pools_of_one_model_serve_every_request():
    result = simulate(
        pools(pools={"a": {}, "b": {"hardware": "a100-80gb-sxm"}}, workload={"trace": "conversation", "limit": 20})
    )
    assert result.columns.requests["replica"].tolist() == [0, 1] * 10
    assert "models" not in result.summary


def test_models_that_share_a_machine_have_equal_parts_of_the_memory_that_weights_leave():
    built = resolve(pools(pools={"both": {"models": [SMALL, LARGE], "replicas": 2}}))
    (machine, _) = built.experiment.replicas
    alone = [resolve(Scenario(model=name)).manifest["memory"] for name in (SMALL, LARGE)]
    # What each alone leaves of the share, less what the other takes besides its cache.
    left = alone[0]["kv_bytes"] + alone[1]["kv_bytes"] - alone[0]["budget_bytes"]
    for spec, name in zip(machine.hosted, (SMALL, LARGE), strict=True):
        block = 16 * deployment_of(Scenario(model=name)).kv_bytes_per_token_per_device
        assert spec.kv_blocks == int(left // 2 // block) - 1
    result = simulate(pools(pools={"both": {"models": [SMALL, LARGE], "replicas": 2}}))
    assert (result.columns.requests["status"] == 0).all()
    # Rows of the column replica are models on machines: even ones are of the first model.
    assert (result.columns.requests["replica"] % 2 == result.columns.requests["model_index"]).all()


def test_work_and_peaks_are_sums_over_pools():
    together = simulate(pools()).columns.meta
    assert together["peak_flops_per_s"] == pytest.approx(
        2 * deployment_of(Scenario(model=SMALL, hardware="l40s")).cost.peak_flops_per_s
        + deployment_of(Scenario(model=LARGE, parallel={"tensor": 2})).cost.peak_flops_per_s
    )
    shared = simulate(pools(pools={"both": {"models": [SMALL, LARGE]}})).columns.meta
    assert shared["peak_flops_per_s"] == deployment_of(Scenario(model=LARGE)).cost.peak_flops_per_s


def test_a_trace_says_by_its_column_which_models_are_asked_for(tmp_path):
    (tmp_path / "t.csv").write_text(
        f"arrival_s,prompt_tokens,output_tokens,model,priority\n0,9,2,{LARGE},1\n0,9,2,{SMALL},0\n1,9,2,{LARGE},-1\n"
    )
    result = simulate(pools(workload={"trace": str(tmp_path / "t.csv")}))
    assert result.columns.requests["replica"].tolist() == [2, 0, 2]
    assert result.requests["priority"].tolist() == [1, 0, -1]
    assert "priority" not in simulate(pools()).requests


def test_a_log_may_call_the_only_model_by_another_name(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens,model\n0,9,2,acme-chat\n1,9,2,acme-code\n")
    apart = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}
    built = resolve(pools(model=SMALL, pools=apart, links={"net": {}}, workload={"trace": str(tmp_path / "t.csv")}))
    assert (run(built.experiment).requests["status"] == FINISHED).all()
    assert f"The trace asks for 2 models (acme-chat, acme-code); all requests go to {SMALL}." in built.manifest["notes"]


def test_a_priority_decides_who_goes_first_where_the_scheduler_asks_for_it(tmp_path):
    (tmp_path / "t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,priority\n" + "".join(f"0,500,2,{p}\n" for p in (0, 3, -1, 2))
    )
    scheduler = {"policy": "order", "by": "priority", "inner": {"policy": "vllm-v0", "max_num_batched_tokens": 500}}
    workload = {"trace": str(tmp_path / "t.csv")}
    result = simulate(Scenario(scheduler=scheduler, workload=workload))
    assert result.manifest["notes"] == []
    (note,) = resolve(Scenario(workload=workload)).manifest["notes"]
    assert note.startswith("Requests have priorities and no scheduler asks for them")
    clients = {**workload, "arrivals": {"process": "closed_loop", "concurrency": 2}}
    with pytest.raises(ScenarioError, match="their requests have no priority"):
        resolve(Scenario(workload=clients))
    assert np.argsort(result.columns.requests["first_token_ns"]).tolist() == [2, 0, 3, 1]


def test_an_order_by_priority_without_priorities_is_said_to_change_nothing():
    order = {"policy": "order", "by": "priority", "inner": {"policy": "sarathi"}}
    (note,) = resolve(Scenario(scheduler=order)).manifest["notes"]
    assert note.startswith("The scheduler orders by priority and no request has one")
    assert resolve(Scenario(scheduler={**order, "by": "arrival"})).manifest["notes"] == []


def test_settings_of_the_top_level_that_every_pool_replaces_are_said_not_to_be_used():
    both = {"small": {"model": SMALL}, "large": {"model": LARGE, "parallel": {"tensor": 2}}}
    (note,) = resolve(pools(pools=both, model=LARGE, scheduler="vllm")).manifest["notes"]
    assert note == "The top level's model is not used: every pool has its own."
    assert resolve(pools(model=LARGE, scheduler="vllm")).manifest["notes"] == []


def test_closed_loop_clients_keep_deadlines_of_a_trace_and_say_what_they_leave_out(tmp_path):
    (tmp_path / "t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,deadline_s,session\n0,9,2,0.5,1\n1,9,2,,1\n2,9,2,0.1,2\n"
    )
    arrivals = {"process": "closed_loop", "concurrency": 2}
    built = resolve(Scenario(workload={"trace": str(tmp_path / "t.csv"), "arrivals": arrivals, "limit": 2}))
    (note,) = built.manifest["notes"]
    assert note.startswith(
        "Closed-loop clients leave out what the trace says of which requests belong to one conversation"
    )
    assert run(built.experiment).requests["deadline_ns"].tolist() == [500_000_000, -1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pools": {"a": {"modle": SMALL}}}, "my.yaml: pools.a.modle is not a setting; did you mean model?"),
        ({"pools": {"a": {"memory": {"gpu_fracton": 1}}}}, "pools.a.memory.gpu_fracton is not a setting; did you mean"),
        ({"pools": {"a": {"role": "prefill"}}}, "pools.a has role prefill and no pool has role decode; give one"),
        ({"pools": {"a": {"role": "decode"}}}, "pools.a has role decode and no pool has role prefill; give one"),
        ({"pools": {"a": {"role": "bath"}}}, "did you mean both?"),
        ({"pools": {}}, "pools needs at least one pool"),
        ({"pools": {"a.b": {}}}, "pools: a name is of letters, digits, - and _; got 'a.b'"),
        ({"pools": {"a": {"models": [SMALL, SMALL]}}}, "models that share a machine differ"),
        ({"pools": {"a": {"models": [SMALL], "model": SMALL}}}, "give model, or models that share each machine"),
        ({"pools": {"a": {"model": "lama"}, "b": {}}}, "my.yaml: pools.a: model: "),
        (
            {
                "pools": {"a": {"model": SMALL}},
                "workload": {"trace": "conversation", "limit": 50, "models": {"gpt-9": 1}},
            },
            "50 requests ask for gpt-9, which no pool hosts",
        ),
        (
            {"pools": {"a": {"scheduler": "sarthi"}}, "workload": {"trace": "conversation"}},
            "my.yaml: pools.a: scheduler: 'sarthi' is not a policy",
        ),
        ({"placement": "p.json"}, "give pools or placement, one of the two"),
        ({"workload": {"trace": "conversation"}}, "the workload does not say which of them a request asks for; give"),
        (
            {"workload": {"trace": "conversation", "limit": 9, "models": {SMALL: 1, "llama-3.1-8c": 1}}},
            "requests ask for llama-3.1-8c, which no pool hosts; did you mean llama-3.1-8b?",
        ),
        ({"workload": {"trace": "conversation", "models": {SMALL: 0}}}, "shares that are not all 0"),
        (
            {
                "workload": {
                    "arrivals": {"process": "closed_loop", "concurrency": 2},
                    "prompt_tokens": 9,
                    "output_tokens": 2,
                    "requests": 4,
                }
            },
            "the workload does not say which of them a request asks for; give",
        ),
        (
            {"pools": {**TWO, "large": {"serving_stack": "ideal"}}},
            "one router with several front ends is not modelled; give all pools one serving_stack",
        ),
        (
            {
                "scheduler": "sarathi",
                "pools": {"a": {"models": ["llama-2-13b", "llama-2-70b"]}},
                "workload": {"trace": "conversation", "models": {"llama-2-13b": 1}},
            },
            "do not fit beside each other: their weights and what their stack sets aside take 168.5 GB of the 78.2 GB",
        ),
        (
            {"pools": {"a": {"models": [SMALL, LARGE], "decoding_by_model": {"llama-2-13b": NGRAM}}}},
            "decoding_by_model has 'llama-2-13b', which is not among models (llama-3.2-1b, llama-3.1-8b)",
        ),
        (
            {"pools": {"a": {"models": ["llama-2-13b", "qwen3-8b"], "memory": {"gpu_memory_utilization": 0.62},
             "decoding_by_model": {"llama-2-13b": DRAFT | {"draft": {"model": "llama-2-7b"}}}}},
             "workload": {"trace": "conversation", "models": {"llama-2-13b": 1}}},
            "do not fit beside each other: their weights, their drafters and what their stack sets aside take",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_built_names_the_pool_and_the_way_out(settings, expected):
    assert expected in refusal(**settings)


def sharing(**pool):
    return resolve(pools(pools={"both": {"models": [LARGE, SMALL], **pool}}))


def test_models_that_share_a_machine_draft_each_by_a_method_of_its_own_or_not():
    made = sharing(decoding=NGRAM, decoding_by_model={LARGE: DRAFT})
    (machine,) = made.experiment.replicas
    assert [core.decoding.method for core in machine.hosted] == ["draft_model", "ngram"]
    assert [core.draft_cost is not None for core in machine.hosted] == [True, False]
    assert made.manifest["label"].endswith("draft_model/ngram")
    facts = made.manifest["pools"]["both"]["models"]
    assert [each["decoding"]["method"] for each in facts] == ["draft_model", "ngram"]
    one = sharing(decoding=NGRAM, decoding_by_model={SMALL: {"method": "autoregressive"}})
    assert [core.decoding is None for core in one.experiment.replicas[0].hosted] == [False, True]
    (of_both,) = sharing(decoding=NGRAM).experiment.replicas
    assert [core.decoding.method for core in of_both.hosted] == ["ngram", "ngram"]


def test_a_draft_beside_several_models_takes_memory_from_all_of_them():
    plain, drafted = (
        made.manifest["pools"]["both"]["models"] for made in (sharing(), sharing(decoding_by_model={LARGE: DRAFT}))
    )
    weights = deployment_of(Scenario(model=SMALL)).weight_bytes_per_device
    assert [each["memory"]["draft_bytes"] for each in drafted] == [weights, 0]
    # Its graphs are captured as well. What all leave is divided equally, as without it.
    beside = weights + drafted[0]["memory"]["graph_bytes"] - plain[0]["memory"]["graph_bytes"]
    for before, after in zip(plain, drafted, strict=True):
        assert after["memory"]["kv_bytes"] == pytest.approx(before["memory"]["kv_bytes"] - beside / 2)
    # The draft's cache is kept with the blocks of the model for which it drafts, and with no others.
    small, large = (16 * deployment_of(Scenario(model=name)).kv_bytes_per_token_per_device for name in (SMALL, LARGE))
    for each, block_bytes in zip(drafted, (large + small, small), strict=True):
        assert each["memory"]["blocks"] == each["memory"]["kv_bytes"] // block_bytes


def test_models_that_share_a_machine_speculate_to_the_end():
    result = simulate(pools(pools={"both": {"models": [LARGE, SMALL], "decoding_by_model": {LARGE: DRAFT}}}))
    assert (result.requests["status"] == "finished").all()
    first, second = result.columns.replicas
    assert first.speculation
    assert second.speculation is None


def test_a_recording_is_replayed_by_the_numbers_of_requests_in_the_whole_workload(tmp_path):
    """Requests 1 and 3 ask for the model that speculates. Row 0 of the recording is too short for anyone."""
    (tmp_path / "rounds.csv").write_text("request,round,accepted\n0,0,0\n" + "".join(f"1,{i},1\n" for i in range(9)))
    (tmp_path / "trace.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,model\n" + "".join(f"0,9,9,{name}\n" for name in [SMALL, LARGE] * 2)
    )
    decoding = NGRAM | {"num_speculative_tokens": 1, "acceptance": {"recorded": "rounds.csv"}}

    def made(model):
        settings = {
            "pools": {"both": {"models": [LARGE, SMALL], "decoding_by_model": {model: decoding}}},
            "workload": {"trace": str(tmp_path / "trace.csv")},
        }
        return Scenario.from_mapping(settings, source="my.yaml", folder=tmp_path)

    assert (simulate(made(LARGE)).requests["status"] == "finished").all()
    with pytest.raises(
        ScenarioError, match="request 0 needs 8 tokens from rounds, but row 0 of the recording ends after 1"
    ):
        resolve(made(SMALL))


def test_questions_about_one_deployment_are_refused():
    with pytest.raises(
        ScenarioError, match=r"pools: this is about one deployment; leave pools out \(--set pools=null\)"
    ):
        deployment_of(pools())
    assert deployment_of(pools().with_set("pools=null")).model == load_model(LARGE)


def test_a_pool_of_another_kind_is_another_scenario():
    assert pools().hash != pools().with_set("pools.small.replicas=3").hash


def a_placement(folder):
    """Three generative models on two groups, their traffic, and what `rooftrace place` says of them."""
    place = PlaceScenario.from_mapping(
        {
            "cluster": {"devices": 4, "memory_gib": 70.0, "hardware": "h100-sxm"},
            "models": [
                {"model": LARGE, "copies": 2, "prompt_tokens": 512, "output_tokens": 32},
                {"model": "llama-2-13b", "prompt_tokens": 512, "output_tokens": 32},
            ],
            "workload": {"arrivals": {"process": "poisson", "rate_per_s": 20.0}, "duration_s": 4.0},
        }
    )
    groups = (Group(inter_op=2, intra_op=1, models=(0, 2)), Group(inter_op=1, intra_op=2, models=(0, 1)))
    traffic = place.serving.workload(place.traffic()[0])
    traffic.to_csv(folder / "traffic.csv")
    save_placement(Placement(groups=groups), place.serving.names, folder / "placement.json")
    return place.serving.outcome(Placement(groups=groups), traffic)


def test_a_placement_is_replayed_as_it_was_scored(tmp_path):
    outcome = a_placement(tmp_path)
    result = simulate(
        Scenario(
            placement=str(tmp_path / "placement.json"),
            # The scheduler of a placement's score.
            scheduler="sarathi",
            router="least_outstanding",
            # What `rooftrace place` prices generative models by, and the memory that it gave them.
            cost_model="roofline",
            memory={"gpu_memory_utilization": 70 * 2**30 / load_device("h100-sxm").memory_bytes},
            workload={"trace": str(tmp_path / "traffic.csv")},
        )
    )
    requests = result.columns.requests
    late = requests["finish_ns"] - requests["arrival_ns"] > requests["deadline_ns"]
    np.testing.assert_array_equal(np.where(late, -1, requests["finish_ns"]), outcome.columns.finish_ns)
    assert list(result.summary["models"]) == [f"{LARGE}#0", "llama-2-13b", f"{LARGE}#1"]
    assert [pool["gpus"] for pool in result.manifest["pools"].values()] == [2, 2]


def test_groups_of_a_placement_scale_each_by_themselves(tmp_path):
    """Each group begins with `min` machines and has as many as its own requests ask for."""
    a_placement(tmp_path)
    scale = {"policy": {"policy": "concurrency", "target": 2}, "min": 1, "max": 4, "interval_s": 0.5}
    scenario = Scenario(
        placement=str(tmp_path / "placement.json"),
        router="least_outstanding",
        cost_model="roofline",
        workload={"trace": str(tmp_path / "traffic.csv")},
        autoscale=scale,
    )
    result = simulate(scenario)
    fleet = result.columns.meta["fleet"]
    assert [fleet["pools"].count(pool) for pool in (0, 1)] == [4, 4]
    log = np.array([fleet["log"][name] for name in ("at_ns", "machine", "state")])
    began = log[1, (log[0] == 0) & (log[2] == READY)].tolist()
    assert began == [0, 4]
    assert fleet["starts"] > 0
    replica, model = (result.columns.requests[name] for name in ("replica", "model_index"))
    # Two models on each machine; only the machines of a group serve its models.
    assert set(replica[model == 1] // 2 // 4) | set(replica[model == 2] // 2 // 4) == {0, 1}
    assert (result.columns.requests["status"] == FINISHED).all()
    two = resolve(scenario.with_set("autoscale.min=2")).experiment.fleet
    assert [scaling.initial for scaling in two.scaling] == [2, 2]
    # As many as there are at most, from the beginning: the run of a fleet that does not change.
    fixed = simulate(scenario.with_set("autoscale={policy: {policy: concurrency, target: 2}, min: 1, max: 1}"))
    plain = simulate(Scenario.from_mapping({k: v for k, v in scenario.settings().items() if k != "autoscale"}))
    np.testing.assert_array_equal(fixed.columns.requests["finish_ns"], plain.columns.requests["finish_ns"])


def test_placements_of_measured_tables_are_not_replayed(tmp_path):
    group = Group(inter_op=1, intra_op=1, models=(0,))
    save_placement(Placement(groups=(group,)), ["bert-1.3b#0"], tmp_path / "p.json")
    with pytest.raises(
        ScenarioError, match=r"hosts bert-1\.3b#0, of which only a table of single-pass latencies is known"
    ):
        resolve(Scenario(placement=str(tmp_path / "p.json")))
    with pytest.raises(ScenarioError, match=r"placement: nowhere\.json does not exist"):
        resolve(Scenario(placement="nowhere.json"))
    (tmp_path / "q.json").write_text("{}")
    with pytest.raises(ScenarioError, match="is not a placement of this version"):
        resolve(Scenario(placement=str(tmp_path / "q.json")))


def test_a_sweep_varies_a_pool_and_sums_what_pools_cost(tmp_path):
    base = pools(workload={**MIX, "limit": 20})
    table = sweep(base, axes={"pools.small.replicas": [1, 2]}, out=tmp_path / "s", jobs=1).table
    assert table["gpus"].tolist() == [3, 4]
    l40s, h100 = load_device("l40s"), load_device("h100-sxm")
    assert table["fleet.tdp_w"].tolist() == [n * l40s.tdp_w + 2 * h100.tdp_w for n in (1, 2)]
    row = with_costs(table, base).iloc[1]
    usd_per_s = (2 * l40s.price_usd_per_hour + 2 * h100.price_usd_per_hour) / 3600
    assert row["usd_per_mtoken"] == pytest.approx(usd_per_s / row["output_tokens_per_s"] * 1e6)
    assert f"models.{SMALL}.ttft_s.p99" in table


@pytest.mark.parametrize(
    "key",
    [
        "pools.a.replicas",
        "pools.a.scheduler",
        "pools.a.scheduler.inner.token_budget",
        "workload.models.llama",
        "placement",
    ],
)
def test_settings_of_pools_and_inner_policies_are_axes(key):
    check_key(key)


@pytest.mark.parametrize("key", ["pools.a.replicos", "pools.a.replicas.x", "scheduler.outer.token_budget", "slo.x.y"])
def test_what_is_no_setting_is_no_axis(key):
    with pytest.raises(RooftraceError, match=f"{key} is not a setting"):
        check_key(key)


def test_the_command_line_runs_and_compares_pools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(pools(workload={**MIX, "limit": 20}).to_yaml())
    app, out = build_app(), tmp_path / "out"
    done = CliRunner().invoke(
        app, ["run", "my.yaml", "--out", str(out), "--no-plots", "--html", "--timeline", str(tmp_path / "t.json")]
    )
    assert done.exit_code == 0, done.output
    assert f"{SMALL} on 2 x l40s + {LARGE} on 2 x h100-sxm, vllm" in done.stdout
    assert LARGE in (out / "report.html").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    stored = Result.load(out)
    assert stored.summary["models"][SMALL]["requests"]["finished"] > 0
    Path("fewer.yaml").write_text(Scenario.load("my.yaml").with_set("pools.small.replicas=1").to_yaml())
    done = CliRunner().invoke(app, ["compare", "my.yaml", "fewer.yaml", "--replications", "2", "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert f"{SMALL} on 1 x l40s + {LARGE} on 2 x h100-sxm" in done.stdout
