"""Prefill and decode in pools of their own, from a scenario: what is taken from where, what is refused, and what results say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.routers import Dynamo
from sim import simulate
from sim.engine.tiers.links import Slowdown
from sim.errors import ScenarioError
from sim.report.timeline import events
from sim.results import Result, stage_rows
from sim.scenario import Scenario
from sim.scenario.assembly import resolve

SMALL = "llama-3.2-1b"
LATE = {"policy": "reject", "inner": "vllm"}
POOLS = {"p": {"role": "prefill"}, "d": {"role": "decode", "replicas": 2}}
WORKLOAD = {
    "arrivals": {"process": "poisson", "rate_per_s": 40},
    "prompt_tokens": {"distribution": "uniform", "min_tokens": 100, "max_tokens": 3000},
    "output_tokens": {"distribution": "uniform", "min_tokens": 2, "max_tokens": 60},
    "requests": 60,
}


def apart(**settings: Any) -> Scenario:
    base = {
        "model": SMALL,
        "scheduler": "vllm",
        "pools": POOLS,
        "links": {"net": {"bandwidth_gb_per_s": 10, "latency_s": 0.001}},
        "workload": WORKLOAD,
    }
    return Scenario.from_mapping({**base, **settings}, source="my.yaml")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pools": {"d": {"role": "decode"}}}, "pools.d has role decode and no pool has role prefill; give one, or role both"),
        ({"links": None}, "links is missing: say how KV gets from the prefill pool to the decode pool, such as links: {net: {}}"),
        ({"pools": {**POOLS, "d": {"role": "decode", "model": "llama-3.1-8b"}}},
         f"pools.p: {SMALL} is to prefill here, and the pools that decode host llama-3.1-8b"),
        ({"pools": {**POOLS, "d": {"role": "decode", "kv_precision": "fp8"}}},
         "pools.d.kv_precision is fp8 and pools.p's is bf16, and KV is sent as it is kept"),
        ({"pools": {**POOLS, "e": {"role": "decode"}}}, "links.net.receiver: several pools decode (d, e); say which"),
        ({"pools": {**POOLS, "e": {"role": "decode"}}, "links": {"net": {"receiver": "d"}}}, "links: none joins p and e"),
        ({"links": {"net": {"sender": "d"}}}, "links.net.sender: d has role decode, and a link goes from prefill to decode"),
        ({"links": {"net": {"sender": "pp"}}}, "links.net.sender: no pool is called pp; did you mean p?"),
        ({"links": {"a": {}, "b": {}}}, "links.b: links.a joins p and d already"),
        ({"links": {"net": {"sent": "layers"}}}, "KV that goes while the prompt is computed needs room before that"),
        ({"links": {"net": {"bandwidth": 3}}}, "links.net.bandwidth is not a setting; did you mean bandwidth_gb_per_s?"),
        ({"pools": {"a": {}}}, "links is between pools with role prefill and pools with role decode, and there are none"),
        ({"pools": {**POOLS, "d": {"role": "decode", "memory": {"kv_blocks": 3}}}, "workload": {**WORKLOAD, "prompt_tokens": 500}},
         "pools.d: the KV cache of a machine holds 32 tokens and the shortest prompt has 500"),
        ({"handover": {"router": "shortest"}}, "handover.router"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_a_sentence(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ScenarioError) as error:
        resolve(apart(**settings))
    assert expected in str(error.value)
    assert str(error.value).startswith("my.yaml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "first_token", "room", "headroom"),
    [
        ({}, "decode", "after_prefill", 0),
        ({"serving_stack": "sglang", "scheduler": "sglang"}, "arrival", "before_prefill", 512),
        ({"serving_stack": "trtllm", "scheduler": "trtllm"}, "arrival", "after_prefill", 0),
        ({"serving_stack": "ideal", "scheduler": "sarathi"}, "arrival", "after_prefill", 0),
        ({"handover": {"like": "splitwise", "headroom_tokens": 9}}, "prefill", "before_prefill", 9),
        ({"handover": {"like": "dynamo", "first_token": "arrival"}}, "arrival", "after_prefill", 0),
    ],
)
def test_the_way_is_the_serving_stacks_unless_said_otherwise(
    settings: dict[str, Any], first_token: str, room: str, headroom: int
) -> None:
    result = simulate(apart(**settings))
    said = result.manifest["handover"]
    assert (said["first_token"], said["room"], said["headroom_tokens"]) == (first_token, room, headroom)
    assert result.summary["requests"]["finished"] == 60
    assert result.summary["handover"]["requests"] == 60


def test_dynamo_chooses_machines_that_decode_by_what_they_hold_alone() -> None:
    experiment = resolve(apart(router={"policy": "dynamo", "overlap_weight": 2.0})).experiment
    assert experiment.handover is not None
    assert (experiment.router, experiment.handover.router) == (Dynamo(overlap_weight=2.0), Dynamo(overlap_weight=0.0))


def test_each_rank_of_the_receiver_gets_what_it_keeps() -> None:
    # 8 KV heads of 64 in 16 layers: 32,768 bytes a token; over 16 GPUs every head is kept, and sent, twice.
    by_tensor = {
        tensor: resolve(apart(pools={**POOLS, "d": {"role": "decode", "parallel": {"tensor": tensor}}}))
        for tensor in (1, 4, 16)
    }
    paths = {tensor: built.experiment.handover.paths[0, 1] for tensor, built in by_tensor.items()}  # type: ignore[union-attr]
    assert {tensor: path.bytes_per_token for tensor, path in paths.items()} == {1: 32_768, 4: 32_768, 16: 65_536}
    note = "p divides KV over 1 and d over 16 GPUs: each rank reads its part in place, at no further cost, and 2 of"
    assert any(note in each for each in by_tensor[16].manifest["notes"])
    copied = resolve(
        apart(pools={**POOLS, "d": {"role": "decode", "parallel": {"tensor": 4}}}, handover={"repack": True})
    )
    path = copied.experiment.handover.paths[0, 1]  # type: ignore[union-attr]
    assert path.repack_s_per_byte == pytest.approx(2 / (4 * 3.35e12))


def test_a_pool_that_drafts_says_that_the_draft_s_own_kv_is_left_out() -> None:
    decoding = {"method": "eagle", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.7}, "draft": {"step_s": 1e-3}}
    said = [resolve(apart(**more)).manifest["notes"] for more in ({"decoding": decoding}, {})]
    assert [any("d drafts with layers that keep KV of their own" in note for note in notes) for notes in said] == [
        True,
        False,
    ]


def test_a_link_without_a_bandwidth_takes_the_datasheets_and_says_so() -> None:
    built = resolve(apart(links={"net": {}}))
    path = built.experiment.handover.paths[0, 1]  # type: ignore[union-attr]
    assert path.link.bandwidth_bytes_per_s == 50e9
    assert any("links.net has no bandwidth of its own: 50 GB/s are taken" in note for note in built.manifest["notes"])
    measured = resolve(apart(links={"net": {"connector": "mooncake_sglang", "bandwidth_gb_per_s": 100}}))
    path = measured.experiment.handover.paths[0, 1]  # type: ignore[union-attr]
    assert path.link.bandwidth_bytes_per_s == pytest.approx(88.4e9)
    assert path.link.latency_s == pytest.approx(1.87e-3)


def test_the_stages_of_a_life_are_all_of_its_time(tmp_path: Any) -> None:
    result = simulate(apart())
    stages = result.summary["handover"]["stages"]
    assert sum(stage["mean"] for stage in stages.values()) == pytest.approx(result.summary["e2el_s"]["mean"])
    assert sum(stage["share"] for stage in stages.values()) == pytest.approx(1)
    # Nobody waits for a link of 10 GB/s at this load for long: 1 ms, and 32,768 bytes a token.
    tokens = result.columns.requests["prompt_tokens"]
    assert stages["transfer_s"]["mean"] == pytest.approx(1e-3 + (-(-tokens.mean() // 1)) * 32_768 / 10e9, rel=0.05)
    assert result.summary["handover"]["sent_bytes"] == int(tokens.sum()) * 32_768
    rows = stage_rows(result.summary)
    assert [name for name, _ in rows][:2] == ["Queue", "Prefill"]
    assert len({len(cells[-1]) for _, cells in rows}) == 1
    moved = result.kv_transfers
    assert moved["bytes"].tolist() == (tokens[moved["request"]] * 32_768).tolist()
    assert {*moved["what"], *moved["source"], *moved["destination"]} == {"hand_over", "device"}
    result.save(tmp_path / "out")
    assert (tmp_path / "out" / "kv_transfers.parquet").is_file()
    again = Result.load(tmp_path / "out")
    assert again.kv_transfers is not None
    pd.testing.assert_frame_equal(again.kv_transfers, moved)
    np.testing.assert_array_equal(again.columns.requests["landed_ns"], result.columns.requests["landed_ns"])
    assert again.summary == json.loads(json.dumps(result.summary))


def test_timelines_show_each_transfer_of_the_record() -> None:
    result = simulate(apart())
    found = list(events(result.columns))
    shown = {event["id"]: event for event in found if event.get("cat") == "transfer" and event["ph"] == "b"}
    ends = {event["id"]: event["ts"] for event in found if event.get("cat") == "transfer" and event["ph"] == "e"}
    moved = result.kv_transfers
    assert moved is not None
    assert [(event["args"]["request"], event["args"]["bytes"]) for event in shown.values()] == [
        *zip(moved["request"], moved["bytes"], strict=True)
    ]
    assert [event["ts"] for event in shown.values()] == (moved["begin_ns"] / 1e3).tolist()
    assert [ends[number] for number in shown] == (moved["arrived_ns"] / 1e3).tolist()
    assert {event["name"] for event in found if event.get("cat") == "request" and event["ph"] == "b"} >= {
        "queue", "prefill", "transfer", "decode",
    }  # fmt: skip


def test_timelines_say_the_pool_of_each_replica() -> None:
    result = simulate(apart(workload={**WORKLOAD, "requests": 4}))
    found = list(events(result.columns, pools=result.manifest["pools"]))
    named = {event["args"]["name"] for event in found if event["ph"] == "M" and "replica" in event["args"]["name"]}
    assert named == {"replica 0 (p)", "replica 1 (d)", "replica 2 (d)", "from replica 0 (p)"}
    transfers = {event["name"] for event in found if event.get("cat") == "transfer"}
    assert transfers == {"to replica 1 (d)", "to replica 2 (d)"}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("pools.pp.replicas=2", "my.yaml: pools has no pp (pools.pp.replicas; pools.pp={...} adds one); did you mean p?"),
        ("pools.pp.parallel.tensor=2", "pools has no pp (pools.pp.parallel.tensor; pools.pp={...} adds one)"),
        ("links.nett.latency_s=1", "links has no nett (links.nett.latency_s; links.nett={...} adds one); did you mean net?"),
    ],
)  # fmt: skip
def test_a_setting_of_a_pool_that_there_is_not_makes_none(assignment: str, expected: str) -> None:
    with pytest.raises(ScenarioError) as error:
        apart().with_set(assignment)
    assert expected in str(error.value)
    assert set(apart().with_set("pools.e={role: decode}").pools or ()) == {"p", "d", "e"}


def test_the_ratio_of_pools_and_their_forms_can_be_swept() -> None:
    from sim.study.optimize import cheapest

    scenario = apart(slo={"ttft_s": 5.0}, workload={**WORKLOAD, "requests": 5})
    found = cheapest(
        scenario,
        {"pools.p.replicas": [1, 2], "pools.d.parallel.tensor": [1, 2]},
        goal="gpu-seconds",
        replications=2,
        jobs=1,
    )
    assert found.table["gpus"].tolist() == [3, 5, 4, 6]
    assert found.best is not None
    assert found.best["pools.p.replicas"] == 1


def test_links_are_degraded_for_a_time() -> None:
    degraded = [{"at_s": 60.0, "for_s": 30.0, "factor": 0.1}, {"at_s": 100.0, "added_latency_s": 0.01}]
    built = resolve(apart(links={"net": {"bandwidth_gb_per_s": 10, "latency_s": 0.001, "degraded": degraded}}))
    assert built.experiment.handover is not None
    (path,) = built.experiment.handover.paths.values()
    assert path.link.slowdowns == (
        Slowdown(at_s=60.0, for_s=30.0, factor=0.1),
        Slowdown(at_s=100.0, added_latency_s=0.01),
    )
    assert built.manifest["handover"]["links"][0]["degraded"][1]["added_latency_s"] == 0.01


@pytest.mark.parametrize(
    ("degraded", "text"),
    [
        ([{"at_s": 1.0}], "nothing is degraded: give factor below 1, or added_latency_s"),
        ([{"at_s": 1.0, "factor": 0.0}], "without for_s it never goes on"),
        ([{"at_s": 1.0, "latency_s": 1.0}], "latency_s is not a setting; did you mean added_latency_s"),
        (
            [{"at_s": 1.0, "factor": 0.5}, {"at_s": 2.0, "factor": 0.5}],
            "links.net.degraded: from 2 s on the link is slowed down twice: the one of 1 s holds to the end",
        ),
    ],
)
def test_links_that_cannot_be_degraded_so_are_refused(degraded: Any, text: str) -> None:
    with pytest.raises(ScenarioError, match=text):
        resolve(apart(links={"net": {"degraded": degraded}}))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_of_a_refused_request_are_given_to_others_at_the_next_look(seed: int) -> None:
    # A decode machine refuses requests that have landed too late, in a plan that goes on holding for many iterations.
    late = apart(
        pools={"p": {"role": "prefill"}, "d": {"role": "decode", "scheduler": LATE, "memory": {"kv_blocks": 40}}},
        classes={"soon": {"share": 1, "deadline_s": 0.5}, "whenever": {"share": 1}},
        workload={
            "arrivals": {"process": "poisson", "rate_per_s": 200},
            "prompt_tokens": {"distribution": "uniform", "min_tokens": 50, "max_tokens": 300},
            "output_tokens": {"distribution": "uniform", "min_tokens": 5, "max_tokens": 200},
            "requests": 60,
        },
        seed=seed,
    )
    spans, stepping = simulate(late), simulate(late, fast_forward=False)
    assert spans.summary["requests"]["rejected"] > 10
    for name, column in spans.columns.requests.items():
        np.testing.assert_array_equal(column, stepping.columns.requests[name], err_msg=name)
