"""`memory.tiers`: what a scenario makes of them, what a run says of them, and what is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from policies.eviction import CachedBlocks, Lfu, Mru, Retention
from sim.errors import ScenarioError
from sim.report.timeline import events
from sim.results import Result
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve

LOAD = {
    "groups": 12, "prompts_per_group": 2, "system_prompt_tokens": 800, "question_tokens": 40, "output_tokens": 4,
    "stages": [{"rate_per_s": 4.0, "duration_s": 10.0}],
}  # fmt: skip


def scenario(memory: dict[str, Any], **settings: Any) -> Scenario:
    model = {} if "models" in str(settings.get("pools")) else {"model": "llama-3.1-8b"}
    return Scenario.from_mapping(
        {
            **model, "hardware": "h100-sxm", "scheduler": {"policy": "vllm"}, "memory": memory,
            "workload": {"shared_prefix": LOAD}, **settings,
        }
    )  # fmt: skip


def test_a_host_tier_has_the_link_of_the_datasheet_once_for_each_gpu() -> None:
    (tier,) = build(scenario({"tiers": [{"kind": "host", "gib": 2.0}]})).hosted[0].tiers
    assert (tier.read_bytes_per_s, tier.latency_s, tier.capacity_bytes) == (63e9, 3e-6, 2 << 30)
    two = build(scenario({"tiers": [{"kind": "host", "gib": 2.0}]}, parallel={"tensor": 2})).hosted[0]
    assert two.tiers[0].read_bytes_per_s == 126e9
    # 32 layers, 8 heads of 128, two bytes, keys and values, 16 tokens.
    assert two.block_bytes == 32 * 8 * 128 * 2 * 2 * 16
    notes = resolve(scenario({"tiers": [{"kind": "host", "gib": 2.0}]})).manifest["notes"]
    assert any("by its datasheet" in note for note in notes)


def test_what_is_loaded_is_in_the_summary_the_requests_and_a_file(tmp_path: Path) -> None:
    memory = {"kv_blocks": 120, "tiers": [{"kind": "host", "gib": 2.0, "read_gb_per_s": 10.0}]}
    result = simulate(build(scenario(memory)))
    tier = result.summary["kv_tiers"]["host"]
    assert tier["hits"] == int(result.requests["host_hit_tokens"].sum()) > 1000
    assert tier["hit_rate"] == tier["hits"] / result.summary["prefix_cache"]["queries"]
    assert tier["loads"] == len(result.kv_transfers.query("what == 'load'"))
    found = Result.load(result.save(tmp_path / "run"))
    assert found.summary["kv_tiers"] == result.summary["kv_tiers"]
    # What was read back has its transfers, and writes them again.
    pd.testing.assert_frame_equal(found.kv_transfers, result.kv_transfers)
    assert Result.load(found.save(tmp_path / "again")).kv_transfers.equals(result.kv_transfers)
    assert (tmp_path / "run" / "kv_transfers.parquet").is_file()
    assert {"loads_under_way", "stores_under_way"} <= set(found.iterations.columns)
    computed = result.requests.eval("prompt_tokens - prefix_hit_tokens - host_hit_tokens")
    assert computed.tolist() == result.requests["computed_prompt_tokens"].tolist()
    without = simulate(build(scenario({"kv_blocks": 120})))
    assert "kv_tiers" not in without.summary
    assert without.summary["ttft_s"]["mean"] > result.summary["ttft_s"]["mean"]


def test_ranks_have_their_share_of_a_host() -> None:
    memory = {"tiers": [{"kind": "host", "gib": 4.0, "read_gb_per_s": 80.0}]}
    moe = scenario(memory, model="qwen3-30b-a3b", parallel={"data": 4, "tensor": 1, "expert": 4})
    (tier,) = build(moe).hosted[0].tiers
    assert (tier.capacity_bytes, tier.read_bytes_per_s) == (1 << 30, 20e9)


DISK = {"kind": "disk", "gib": 10.0, "read_gb_per_s": 5.0}
HOST = {"kind": "host", "gib": 2.0}
PEER = {"kind": "peer", "read_gb_per_s": 5.0}
REMOTE = {"kind": "remote", "gib": 10.0, "read_gb_per_s": 5.0}


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"tiers": [{"kind": "disk", "gib": 10.0}]}, "a tier of kind disk needs read_gb_per_s, the bandwidth of"),
        ({"tiers": [{"kind": "host"}]}, "a tier of kind host needs gib, its size in GiB"),
        ({"tiers": [{"kind": "peer", "gib": 1.0, "read_gb_per_s": 1.0}]}, "leave gib out"),
        ({"tiers": [{"kind": "peer", "read_gb_per_s": 1.0}]}, "there is no tier of kind host"),
        ({"tiers": [{**DISK, "staged": True}]}, "staged loads come over the link of the host tier"),
        ({"tiers": [DISK], "prefix_caching": False}, "tiers keep the blocks of a prefix cache, and there is none"),
        ({"tiers": [{**DISK, "gib": 0.001}]}, "do not hold one KV block of"),
        ({"tiers": [DISK], "preemption": "swap"}, "moved to a tier of kind host, and memory.tiers has none"),
        ({"preemption": "swap"}, "moved to a tier of kind host, and memory.tiers has none"),
        ({"kv_blocks": 100_000}, "are 210 GB on each device, which has 8"),
        ({"tiers": [REMOTE, REMOTE]}, "two tiers of kind remote are the store shared; give each a name of its own"),
        (
            {"tiers": [{**HOST, "store": "a"}]},
            "store is of a tier of kind remote; leave it out of this host",
        ),
        (
            {"tiers": [{**DISK, "store_read_gb_per_s": 1.0}]},
            "store_read_gb_per_s is of a tier of kind remote; leave it out of this disk",
        ),
        (
            {"tiers": [{**HOST, "staged": True}]},
            "staged is of a tier of kind disk or remote or peer; leave it out of this host",
        ),
        (
            {"tiers": [HOST, {**PEER, "write": "eviction"}]},
            "leave it out of this peer, the host memory of other replicas",
        ),
        (
            {"tiers": [HOST, {**PEER, "write_gb_per_s": 2.0}]},
            "leave it out of this peer, the host memory of other replicas",
        ),
        (
            {"tiers": [{"kind": "host", "gb": 2.0}]},
            r"memory.tiers.0.gb is not a setting; (did you mean gib|valid here: kind, gib)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(memory: dict[str, Any], words: str) -> None:
    with pytest.raises(ScenarioError, match=words) as caught:
        build(scenario(memory))
    assert "\n" not in str(caught.value)


SHARED = {"models": ["llama-3.1-8b", "llama-3.1-8b#2"]}
BOTH = {
    "scheduler": "sarathi",
    "workload": {"shared_prefix": LOAD, "models": {"llama-3.1-8b": 1, "llama-3.1-8b#2": 1}},
}


def test_models_of_a_machine_have_equal_parts_of_its_tiers_and_the_same_links() -> None:
    tiers = [{"kind": "host", "gib": 4.0, "read_gb_per_s": 10.0}, REMOTE]
    built = build(scenario({"tiers": tiers}, pools={"a": SHARED}, **BOTH))
    one, other = built.hosted
    assert one.tiers == other.tiers
    assert [tier.capacity_bytes >> 30 for tier in one.tiers] == [2, 10]
    assert [tier.read_bytes_per_s for tier in one.tiers] == [10e9, 5e9]
    assert all(tier.link for tier in one.tiers)
    assert len({tier.link for tier in one.tiers}) == 2


def test_models_of_a_machine_load_from_its_tiers() -> None:
    memory = {"kv_blocks": 120, "tiers": [{"kind": "host", "gib": 2.0, "read_gb_per_s": 10.0}]}
    result = simulate(scenario(memory, pools={"a": SHARED}, **BOTH))
    loads = result.kv_transfers.query("what == 'load'")
    assert set(loads["replica"]) == {0, 1}
    assert result.summary["kv_tiers"]["host"]["hits"] > 1000
    # One link: no two transfers at once.
    moved = result.kv_transfers.sort_values("begin_ns")
    assert (moved["begin_ns"].to_numpy()[1:] >= moved["sent_ns"].to_numpy()[:-1]).all()


def test_a_store_gives_all_replicas_together_no_more_than_it_says() -> None:
    def loads(**limits: float) -> Any:
        memory = {"kv_blocks": 120, "tiers": [{**REMOTE, "read_gb_per_s": 2.0, **limits}]}
        moved = simulate(build(scenario(memory, replicas=4))).kv_transfers
        return moved[moved["what"] == ("store" if "store_write_gb_per_s" in limits else "load")]

    free, read, written = loads(), loads(store_read_gb_per_s=1.0), loads(store_write_gb_per_s=1.0)
    assert (free.eval("sent_ns - begin_ns") * 2).tolist() == pytest.approx(free["bytes"].tolist(), rel=1e-6)
    for limited in (read, written):
        took_ns = limited.eval("sent_ns - begin_ns")
        # At 1 GB/s a byte takes a nanosecond, and longer behind those of others.
        assert (took_ns >= limited["bytes"] - 1).all()
        assert (took_ns > limited["bytes"] + 1).any()


def test_a_fabric_is_one_for_tiers_and_links_of_its_name() -> None:
    def run(**fabric: Any) -> Any:
        pools = {
            "p": {"role": "prefill", "replicas": 2},
            "d": {"role": "decode", "memory": {"tiers": [{**REMOTE, **fabric}]}},
        }
        links = {"net": {"bandwidth_gb_per_s": 5.0, "latency_s": 0.0, **fabric}}
        return simulate(scenario({}, pools=pools, links=links))

    free, shared = run(), run(fabric={"name": "spine", "gb_per_s": 1.0})
    for result, ns_per_byte in ((free, 0.2), (shared, 1.0)):
        moved = result.kv_transfers
        assert {"hand_over", "store"} <= set(moved["what"])
        assert (moved.eval("sent_ns - begin_ns") >= ns_per_byte * moved["bytes"] - 1).all()
    assert shared.manifest["handover"]["links"][0]["limits"][0]["name"] == "fabric spine"
    assert shared.summary["e2el_s"]["mean"] > free.summary["e2el_s"]["mean"]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"store_read_gb_per_s": 1.0}, {"store_read_gb_per_s": 2.0},
         "store_read_gb_per_s: of shared, which is shared, 1 and 2 GB/s are said; give one rate"),
        ({"fabric": {"name": "f", "gb_per_s": 1.0}}, {"fabric": {"name": "f", "gb_per_s": 3.0}},
         "fabric.gb_per_s: of f, which is shared, 1 and 3 GB/s are said"),
    ],
)  # fmt: skip
def test_replicas_that_disagree_about_a_limit_are_refused(one: Any, other: Any, words: str) -> None:
    pools = {
        name: {"model": "llama-3.1-8b", "replicas": 1, "memory": {"tiers": [{**REMOTE, **mine}]}}
        for name, mine in (("one", one), ("other", other))
    }
    with pytest.raises(ScenarioError, match=words):
        build(scenario({}, pools=pools))


def test_sequences_are_swapped_to_host_memory_that_others_read() -> None:
    load = {
        "arrivals": {"process": "poisson", "rate_per_s": 50.0}, "prompt_tokens": 200, "output_tokens": 200, "requests": 60,
    }  # fmt: skip
    memory = {"kv_blocks": 150, "preemption": "swap", "tiers": [{"kind": "host", "gib": 4.0}, PEER]}
    result = simulate(build(scenario(memory, replicas=2, workload=load)))
    assert result.summary["preemptions"] > 0
    assert result.summary["kv_tiers"]["swapped_tokens"] > 0
    assert result.requests["recomputed_tokens"].sum() == 0


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("gib", (10.0, 20.0), "say that it has 10 and 20 GiB"),
        ("eviction", ("lfu", "fifo"), "do not say the same of its eviction"),
    ],
)
def test_replicas_that_disagree_about_their_store_are_refused_in_a_sentence(key: str, values: Any, said: str) -> None:
    pools = {
        name: {"model": "llama-3.1-8b", "replicas": 1, "memory": {"tiers": [{**REMOTE, key: value}]}}
        for name, value in zip(("one", "other"), values, strict=True)
    }
    with pytest.raises(ScenarioError, match=f"replicas share the store shared, and {said}"):
        build(scenario({}, pools=pools))


def test_timelines_show_loads_and_stores_by_where_they_come_from() -> None:
    memory = {"kv_blocks": 120, "tiers": [{"kind": "host", "gib": 2.0}, REMOTE]}
    result = simulate(build(scenario(memory)))
    found = [event for event in events(result.columns) if event["pid"] == 2_000_000]
    named = {event["tid"]: event["args"]["name"] for event in found if event["ph"] == "M" and "tid" in event}
    assert {*named.values()} == {"from replica 0", "from host of replica 0"}
    shown = [(named[event["tid"]], event["name"], event["args"]["what"]) for event in found if event["ph"] == "b"]
    assert {*shown} == {
        ("from replica 0", "to host of replica 0", "store"),
        ("from replica 0", "to remote", "store"),
        ("from host of replica 0", "to replica 0", "load"),
    }
    assert len(shown) == len(result.kv_transfers)


def test_a_tier_evicts_by_the_policy_that_it_names() -> None:
    evictions = ["lfu", {"policy": "retention", "tokens": 800}, "policies.eviction:Mru"]
    tiers = [{"kind": "disk", "gib": 9.0, "read_gb_per_s": 6.0, "eviction": each} for each in evictions]
    built = build(scenario({"tiers": [HOST, *tiers]})).hosted[0].tiers
    assert [tier.eviction for tier in built] == [None, Lfu(), Retention(tokens=800), Mru()]


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        ({**HOST, "eviction": "belady"}, "memory.tiers.0: a tier is not told which request looks for its blocks next"),
        ({**HOST, "eviction": "lfru"}, "memory.tiers.0.eviction: 'lfru' is not a policy; did you mean lru"),
        (
            {**HOST, "eviction": {"policy": "lfu", "tokens": 1}},
            "memory.tiers.0.eviction.tokens is not a setting of lfu",
        ),
        (
            {**PEER, "eviction": "lfu"},
            "eviction is of a tier of kind host or disk or remote; leave it out of this peer, the host memory of other "
            "replicas, whose own tier of kind host says it",
        ),
    ],
)
def test_an_eviction_policy_that_a_tier_does_not_have_is_refused_in_a_sentence(
    tier: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ScenarioError, match=sentence):
        build(scenario({"tiers": [tier]}))


def _raises(blocks: CachedBlocks) -> float:
    raise KeyError(blocks.uses)


def _a_name(blocks: CachedBlocks) -> str:
    return f"{blocks.uses}"


def _nothing(blocks: CachedBlocks) -> tuple[float, ...]:
    return ()


def _no_number(blocks: CachedBlocks) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (_raises, r"_raises fails at CachedBlocks\(.*\): KeyError: "),
        (_a_name, "ranks by a number, or a tuple of numbers; got "),
        (_nothing, "ranks by a number, or a tuple of numbers; got "),
        (_no_number, "ranks by a number, or a tuple of numbers; got nan"),
    ],
)
@pytest.mark.parametrize("where", ["memory.eviction", "memory.tiers.0.eviction"])
def test_an_eviction_policy_that_cannot_rank_is_refused_before_the_run(
    where: str, function: Callable[[CachedBlocks], object], sentence: str
) -> None:
    eviction = f"{__name__}:{function.__name__}"
    memory = {"tiers": [HOST | ({"eviction": eviction} if "tiers" in where else {})]}
    with pytest.raises(ScenarioError, match=f"{where}: .*{sentence}"):
        build(scenario(memory if "tiers" in where else memory | {"eviction": eviction}))


ALIKE_IN_NOTHING = {
    "arrivals": {"process": "poisson", "rate_per_s": 1.0}, "prompt_tokens": 50, "output_tokens": 5, "requests": 3,
}  # fmt: skip


def test_what_a_tier_or_a_cache_has_to_find_nothing_in_is_said() -> None:
    def notes(memory: dict[str, Any], **settings: Any) -> list[str]:
        return resolve(scenario(memory, **settings)).manifest["notes"]

    alone = "A tier of kind peer is the host memory of other replicas, and there is one replica: it finds nothing."
    assert alone in notes({"tiers": [HOST, PEER]})
    assert alone not in notes({"tiers": [HOST, PEER]}, replicas=2)
    nothing = (
        "memory.prefix_caching is on, and the workload does not say which prompts begin alike: nothing is found again."
    )
    assert nothing in notes({"prefix_caching": True}, workload=ALIKE_IN_NOTHING)
    assert nothing not in notes({}, workload=ALIKE_IN_NOTHING)


@pytest.mark.parametrize("write", ["through", "eviction"])
def test_behind_sglang_tiers_keep_what_its_tree_gives_up(write: str) -> None:
    tiers = [{"kind": "host", "gib": 2.0, "read_gb_per_s": 10.0, "write": write}]
    built = resolve(
        scenario({"kv_blocks": 2500, "tiers": tiers}, serving_stack="sglang", scheduler={"policy": "sglang"})
    )
    assert built.experiment.hosted[0].prefix_cache == "tree"
    assert not [note for note in built.manifest["notes"] if "vLLM's rules" in note]
    found = simulate(built.experiment)
    assert found.summary["kv_tiers"]["host"]["hits"] == int(found.requests["host_hit_tokens"].sum()) > 1000


def test_a_device_whose_host_link_nobody_knows_needs_a_bandwidth() -> None:
    with pytest.raises(ScenarioError, match="a tier of kind host needs read_gb_per_s: nothing is known of the link"):
        build(scenario({"tiers": [{"kind": "host", "gib": 1.0}]}, hardware="tpu-v5e", parallel={"tensor": 4}))


def test_a_workload_that_shares_nothing_says_that_tiers_find_nothing() -> None:
    tiers = {"tiers": [{"kind": "host", "gib": 2.0}]}
    notes = resolve(scenario(tiers, workload=ALIKE_IN_NOTHING)).manifest["notes"]
    assert "The workload does not say which prompts begin alike: tiers find nothing." in notes
    swapping = resolve(scenario({**tiers, "preemption": "swap"}, workload=ALIKE_IN_NOTHING)).manifest["notes"]
    assert "The workload does not say which prompts begin alike: only swapped sequences use the host tier." in swapping


def test_sequences_that_give_way_are_swapped() -> None:
    load = {
        "arrivals": {"process": "poisson", "rate_per_s": 50.0}, "prompt_tokens": 200, "output_tokens": 200, "requests": 40,
    }  # fmt: skip
    tiers = [{"kind": "host", "gib": 4.0}]
    for policy in ("vllm", "sarathi"):
        settings = {"workload": load, "scheduler": {"policy": policy}}
        swapped = simulate(build(scenario({"kv_blocks": 200, "tiers": tiers, "preemption": "swap"}, **settings)))
        again = simulate(build(scenario({"kv_blocks": 200}, **settings)))
        assert again.summary["preemptions"] > 0
        assert again.requests["recomputed_tokens"].sum() > 0
        assert swapped.requests["recomputed_tokens"].sum() == 0
        assert swapped.summary["kv_tiers"]["swapped_tokens"] > 0
