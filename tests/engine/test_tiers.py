"""KV behind the device: what is loaded, what it takes, and that spans, books and everybody else stay as they were."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.eviction import Belady, Eviction, Fifo, Lfu, Lru, Mru, Retention
from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView
from policies.vllm import Vllm
from sim.engine import UNFINISHED, Columns, Experiment, InvariantError, ReplicaSpec, run
from sim.engine.record.columns import LOAD
from sim.engine.spec.experiment import LeftBehind
from sim.engine.tiers.stores import Store
from sim.engine.tiers.tiers import TierSpec
from sim.metrics.tiers import kv_tiers
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same, run_both_ways, with_tiers
from tests.engine.test_prefix import S, a_trace
from tests.engine.two_levels import Key, found_by_level
from tests.sample import some
from workloads import Trace

ONE_SEAT = Vllm(max_num_batched_tokens=64, max_num_seqs=1, async_scheduling=False)
HOST = TierSpec(kind="host", capacity_bytes=100_000, read_bytes_per_s=4000.0, write_bytes_per_s=2000.0, latency_s=0.5)
"""Four blocks of 1,000 bytes a second to the device, two from it."""

A, B = [1, 2, 3], [11, 12, 13, 14]


def served(trace: Trace, *tiers: TierSpec, machines: int = 1, fast_forward: bool = True, **spec: Any) -> Columns:
    replica = ReplicaSpec(
        **{
            "cost": Linear(fixed_s=1.0), "scheduler": ONE_SEAT, "kv_blocks": 4, "block_tokens": 4, "prefix_cache": "blocks",
            "tiers": tiers,
            "block_bytes": 1000, **spec,
        },
    )  # fmt: skip
    experiment = Experiment(workload=trace, replicas=(replica,) * machines, router=RoundRobin())
    checked = run(experiment, check_invariants=True)
    assert_same(checked, run(experiment, fast_forward=fast_forward))
    return checked


def seconds(columns: Columns, name: str) -> list[float]:
    return (columns.requests[name] / S).tolist()


def test_two_prompts_one_seat_and_a_host_tier_by_hand() -> None:
    # A is computed by 1 s; its two full blocks are written from then to 2 s, and are there at 2.5 s. B needs all of the device from
    # 3 s to 4 s; its three blocks are on the link until 5.5 s. A, back at 5 s, waits half a second for its turn, is read in another
    # half and is here at 6.5 s. C takes the seat meanwhile, from 5.25 s to 6.25 s. Of A one token is computed.
    trace = a_trace((0, 9, 1, A), (3, 13, 1, B), (5, 9, 1, A), (5.25, 1, 1, []))
    columns = served(trace, HOST)
    assert seconds(columns, "first_token_ns") == [1.0, 4.0, 7.5, 6.25]
    assert seconds(columns, "scheduled_ns") == [0.0, 3.0, 6.5, 5.25]
    assert seconds(columns, "load_ns") == [0.0, 0.0, 1.5, 0.0]
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 8, 0]
    assert columns.requests["computed_prompt_tokens"].tolist() == [9, 13, 1, 1]
    moved = columns.transfers()
    assert moved is not None
    assert [moved[name].tolist() for name in ("what", "request", "bytes")] == [[1, 1, 0], [0, 1, 2], [2000, 3000, 2000]]
    assert [(moved[name] / S).tolist() for name in ("asked_ns", "begin_ns", "sent_ns", "arrived_ns")] == [
        [1.0, 4.0, 5.0], [1.0, 4.0, 5.5], [2.0, 5.5, 6.0], [2.5, 6.0, 6.5],
    ]  # fmt: skip
    assert columns.iterations()["loads_under_way"].tolist() == [0, 0, 1, 0]
    assert columns.iterations()["loaded_tokens"].tolist() == [0, 0, 0, 8]
    facts = columns.meta["tiers"]["host"]
    assert (facts["used_bytes"], facts["load_wait_ns"], facts["link_busy_ns"]) == (5000, S // 2, 3 * S)


def test_what_has_not_arrived_is_not_found() -> None:
    late = replace(HOST, latency_s=10.0)
    columns = served(a_trace((0, 9, 1, A), (3, 13, 1, B), (5, 9, 1, A)), late)
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "loads", "skipped"),
    [
        ({}, 1, "skipped_short"),
        ({"min_load_tokens": 8}, 1, "skipped_short"),
        ({"min_load_tokens": 9}, 0, "skipped_short"),
        # Half a second for its turn, half to be read and half of latency, against a second of computing.
        ({"skip_when_slower": True}, 0, "skipped_slower"),
        ({"skip_when_slower": True, "latency_s": 0.0}, 1, "skipped_slower"),
    ],
)
def test_a_load_that_is_not_worth_it_is_left_out(rule: dict[str, Any], loads: int, skipped: str) -> None:
    columns = served(a_trace((0, 9, 1, A), (3, 13, 1, B), (5, 9, 1, A)), replace(HOST, **rule))
    facts = columns.meta["tiers"]["host"]
    assert facts["loads"] == loads
    assert (facts[skipped] > 0) == (not loads)
    assert columns.requests["computed_prompt_tokens"].tolist() == [9, 13, 1 if loads else 9]


def test_what_a_load_saves_is_priced_behind_what_the_device_has() -> None:
    # A short answer takes the last of A's three blocks. It comes in 0.25 + 0.5 s; 4 tokens behind 8 are 42 pairs, alone 10.
    trace = a_trace((0, 13, 1, A), (20, 1, 8, []), (50, 13, 1, A))
    for pair_s, loaded in ((0.02, 4), (0.015, 0)):
        columns = served(trace, replace(HOST, skip_when_slower=True), cost=Linear(fixed_s=0.0, pair_s=pair_s))
        assert columns.requests["prefix_hit_tokens"].tolist() == [0, 0, 8]
        assert columns.requests["host_hit_tokens"].tolist() == [0, 0, loaded]


def test_a_tier_that_nobody_loads_from_changes_nothing() -> None:
    unused = replace(HOST, min_load_tokens=1 << 40)
    for seed in range(6):
        drawn = an_experiment(seed, speculative=seed % 2 == 0)

        def with_tenants(**changes: Any) -> Any:
            machines = (
                replace(spec, hosted=tuple(replace(tenant, **changes) for tenant in spec.hosted))
                for spec in drawn.machines  # noqa: B023
            )
            return replace(drawn, replicas=tuple(machines))  # noqa: B023

        # A tree feeds no tiers.
        with_tier = run(with_tenants(prefix_cache="blocks", tiers=(unused,), block_bytes=1000))
        without = run(with_tenants(prefix_cache="blocks"))
        for name, column in without.requests.items():
            np.testing.assert_array_equal(column, with_tier.requests[name], err_msg=name)


def test_what_the_device_gives_up_goes_to_the_host_and_what_that_gives_up_to_the_disk() -> None:
    host = replace(HOST, write="eviction", capacity_bytes=2000, latency_s=0.0)
    disk = TierSpec(kind="disk", capacity_bytes=10_000, read_bytes_per_s=1000.0, write="eviction")
    # B gives up A's blocks to the host; C (B's of another name) gives up B's, for which A's go on to the disk.
    trace = a_trace((0, 9, 1, A), (10, 13, 1, B), (20, 13, 1, [21, 22, 23, 24]), (40, 9, 1, A))
    columns = served(trace, host, disk)
    assert columns.requests["disk_hit_tokens"].tolist() == [0, 0, 0, 8]
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 0, 0]
    # Two blocks at 1,000 bytes a second, and a step.
    assert seconds(columns, "finish_ns")[3] == 43.0


def who_waits_with_its_kv(answer: int) -> Columns:
    """Two loads of two blocks, of requests 3 and 4, come while request 5, of one token and *answer* more, has the only seat and the
    device eight blocks. A long answer has made it give up what they ask for."""
    quick = replace(HOST, read_bytes_per_s=40_000.0, latency_s=0.0)
    trace = a_trace(
        (0, 9, 1, A), (2, 9, 1, B[:3]), (4, 1, 32, []), (100, 9, 1, A), (100, 9, 1, B[:3]), (100, 1, answer, [])
    )  # fmt: skip
    return served(trace, quick, kv_blocks=8)


def test_what_windows_leave_behind_goes_to_no_tier() -> None:
    # A leaves one block and B takes all four: A's two go to the host.
    host = replace(HOST, write="eviction")
    trace = a_trace((0, 9, 1, A), (10, 13, 1, B))
    for left in (None, LeftBehind(per_block=1.0, window_blocks=0)):
        columns = served(trace, host, left_behind=left)
        assert columns.meta["tiers"]["host"]["store_bytes"] == 2000
        assert columns.iterations()["prefix_evictions"].tolist() == [0, 2 if left is None else 3]


def test_of_loads_that_come_during_a_step_the_first_to_come_is_the_first_in_the_queue() -> None:
    columns = who_waits_with_its_kv(1)
    assert seconds(columns, "scheduled_ns")[3:] == [101.0, 102.0, 100.0]
    assert columns.requests["host_hit_tokens"].tolist()[3:] == [8, 8, 0]


def test_who_runs_out_of_memory_has_the_last_of_those_who_wait_give_their_kv_back() -> None:
    columns = who_waits_with_its_kv(18)
    moved = columns.transfers()
    assert moved is not None
    # The fifth block of the answer is one of the second's, which loads it again when it is its turn.
    assert moved["request"][moved["what"] == 0].tolist() == [3, 4, 4]
    assert seconds(columns, "scheduled_ns")[3] == 118.0


@dataclass(frozen=True)
class PromptsFirst:
    """The first of the queue with its whole prompt, whatever memory it takes; decodes where nobody waits."""

    def plan(self, view: ReplicaView, /) -> Plan:
        run = tuple((seq.id, seq.tokens) for seq in view.waiting[:1])
        return Plan(decode=not run and view.n_decoding > 0, run=run)


def test_decodes_go_on_while_a_prompt_waits_for_memory_beside_a_load() -> None:
    # A gives way to 29 other tokens, and is loaded from 20 s on for 5 s. The last request, four blocks, comes at 21 s: beside the
    # load and the answer of 30 tokens there are three.
    trace = a_trace((0, 9, 1, A), (2, 29, 1, []), (10, 1, 30, []), (20, 9, 1, A), (21, 13, 1, []))
    slow = replace(HOST, read_bytes_per_s=400.0, latency_s=0.0)
    columns = served(trace, slow, scheduler=PromptsFirst(), kv_blocks=8)
    assert seconds(columns, "load_ns")[3] == 5.0
    assert seconds(columns, "scheduled_ns")[4] > 25.0
    # A prompt may run between two of its tokens.
    assert columns.itl()[0].max() <= 3 * S


# In the first a plan of Orca, which counts on memory that a load has just taken, admits nobody with a load; in the second SGLang
# puts decodes off for prompts whose loads wait for the one whose KV has come, which it does not admit beside them.
@pytest.mark.parametrize("seed", [12_791, 13_439])
def test_a_plan_that_has_to_wait_for_loads_is_no_error(seed: int) -> None:
    assert_spans_equal_stepping(range(seed, seed + 1))


def test_a_prompt_in_two_tiers_waits_for_the_later_of_its_loads() -> None:
    # The host has room for two of A's three blocks, and the disk for all. What gives them up on the device is a long answer, which
    # is written nowhere. Two blocks take half a second and five of latency, one a tenth.
    host = replace(HOST, capacity_bytes=2000, latency_s=5.0)
    disk = TierSpec(kind="disk", capacity_bytes=10_000, read_bytes_per_s=10_000.0)
    columns = served(a_trace((0, 13, 1, A), (20, 1, 16, []), (50, 13, 1, A)), host, disk)
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 8]
    assert columns.requests["disk_hit_tokens"].tolist() == [0, 0, 4]
    assert seconds(columns, "finish_ns")[2] == 50 + 0.5 + 5 + 1


def test_iterations_add_up_to_what_requests_found_and_loaded() -> None:
    loaded = 0
    for seed in range(200, 212):
        experiment = with_tiers(an_experiment(seed, speculative=False), seed)
        if experiment.machines[0].hosted[0].swaps:
            continue
        columns = run(experiment)
        requests, iterations = columns.requests, columns.iterations()
        if "prefix_hit_tokens" not in requests:
            continue
        kinds = [name for name in requests if name.endswith("_hit_tokens") and not name.startswith("prefix")]
        assert iterations["loaded_tokens"].sum() == sum(requests[name].sum() for name in kinds)
        on_device = requests["prefix_hit_tokens"].sum() + requests["prefix_hit_again_tokens"].sum()
        assert iterations["prefix_hit_tokens"].sum() == on_device
        loaded += int(iterations["loaded_tokens"].sum())
    assert loaded > 0


def test_of_peers_the_one_with_most_is_read_and_never_oneself() -> None:
    # Three machines in turn; a prompt of their own makes the first give up what it had.
    peer = TierSpec(kind="peer", read_bytes_per_s=1000.0)
    host = replace(HOST, latency_s=0.0)
    trace = a_trace((0, 13, 1, A), (0, 5, 1, A[:1]), (0, 1, 1, []), (20, 1, 16, []), (20, 1, 1, []), (50, 13, 1, A))
    columns = served(trace, host, peer, machines=3)
    # The third machine finds three blocks at the first, where the second has one.
    assert columns.requests["peer_hit_tokens"].tolist() == [0, 0, 0, 0, 0, 12]
    # The first reads its own, in its own time.
    trace = a_trace((0, 13, 1, A), (0, 1, 1, []), (20, 1, 16, []), (20, 1, 1, []), (50, 13, 1, A))
    own = served(trace, replace(host, min_load_tokens=100), peer, machines=2)
    assert own.requests["peer_hit_tokens"].tolist() == [0, 0, 0, 0, 0]


def test_what_host_memory_that_others_read_gives_up_goes_to_the_disk() -> None:
    # On the first of two machines B gives up A's blocks in a host memory of three, which go to its disk.
    tiers = (
        replace(HOST, capacity_bytes=3000, latency_s=0.0),
        TierSpec(kind="disk", capacity_bytes=10_000, read_bytes_per_s=1000.0, write="eviction"),
        TierSpec(kind="peer", read_bytes_per_s=1000.0),
    )
    trace = a_trace((0, 9, 1, A), (10, 1, 1, []), (20, 13, 1, B), (30, 1, 1, []), (60, 9, 1, A))
    columns = served(trace, *tiers, machines=2)
    assert columns.requests["disk_hit_tokens"].tolist() == [0, 0, 0, 0, 8]
    assert columns.meta["tiers"]["disk"]["stores"] == 1


# On the first of two machines a sequence gives way at 22 s and takes the place of A's second block in host memory, as others see a
# nanosecond later. The second machine asks for A.
@pytest.mark.parametrize(("asks_s", "found"), [(22.0, 8), (22.5, 4)])
def test_a_sequence_may_be_moved_to_host_memory_that_others_read(asks_s: float, found: int) -> None:
    peer = TierSpec(kind="peer", read_bytes_per_s=1000.0)
    host = replace(HOST, latency_s=0.0, capacity_bytes=2000)
    trace = a_trace((0, 9, 1, A), (0, 1, 1, []), (20, 3, 10, []), (20, 1, 1, []), (20, 3, 10, []), (asks_s, 9, 1, A))
    both = Vllm(max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False, scheduler_reserve_full_isl=False)
    columns = served(trace, host, peer, scheduler=both, kv_blocks=3, swaps=True, machines=2)
    assert columns.requests["replica"].tolist() == [0, 1, 0, 1, 0, 1]
    assert columns.requests["swap_hit_tokens"].tolist() == [0, 0, 0, 0, 4, 0]
    assert columns.requests["peer_hit_tokens"].tolist() == [0, 0, 0, 0, 0, found]


def test_a_remote_store_is_read_by_all_machines_and_a_peer_by_others() -> None:
    # Requests go to two machines in turn: the second asks for what the first has computed.
    trace = a_trace((0, 9, 1, A), (10, 9, 1, A))
    remote = TierSpec(kind="remote", capacity_bytes=10_000, read_bytes_per_s=1000.0, store="s")
    assert served(trace, remote, machines=2).requests["remote_hit_tokens"].tolist() == [0, 8]
    peer = TierSpec(kind="peer", read_bytes_per_s=1000.0, latency_s=0.25)
    columns = served(trace, HOST, peer, machines=2)
    assert columns.requests["peer_hit_tokens"].tolist() == [0, 8]
    assert seconds(columns, "finish_ns")[1] == 10 + 2 + 0.25 + 1
    staged = served(trace, HOST, replace(peer, staged=True), machines=2)
    # The two blocks go on from host memory: half a second, and the latency of its link.
    assert seconds(staged, "finish_ns")[1] == 10 + 2 + 0.25 + 0.5 + 0.5 + 1
    assert served(trace, HOST, machines=2).requests["host_hit_tokens"].tolist() == [0, 0]


def test_who_gives_way_comes_back_from_host_memory_by_hand() -> None:
    # Two prompts of 4 tokens, a block each, and memory for three blocks. Both decode from 1 s; the second gives way at once, when
    # two more blocks are needed and one is free: 4 tokens, a block, are written by 1.5 s. The first ends at 5 s, with 4 decode
    # steps. The second is read from 5 s to 5.25 s and decodes four times more.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[4, 4], output_tokens=[5, 5])
    host = replace(HOST, latency_s=0.0)
    both = Vllm(max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False, scheduler_reserve_full_isl=False)
    columns = served(trace, host, scheduler=both, kv_blocks=3, prefix_cache=None, swaps=True)
    assert seconds(columns, "finish_ns") == [5.0, 9.25]
    assert columns.requests["preemptions"].tolist() == [0, 1]
    assert columns.requests["recomputed_tokens"].tolist() == [0, 0]
    assert columns.requests["swap_hit_tokens"].tolist() == [0, 4]
    assert columns.meta["tiers"]["host"]["used_bytes"] == 0
    again = served(trace, scheduler=both, kv_blocks=3, prefix_cache=None)
    assert again.requests["recomputed_tokens"].tolist() == [0, 4]


def test_who_finds_no_room_in_host_memory_is_computed_again() -> None:
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[4, 4], output_tokens=[5, 5])
    both = Vllm(max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False, scheduler_reserve_full_isl=False)
    columns = served(
        trace, replace(HOST, capacity_bytes=999), scheduler=both, kv_blocks=3, prefix_cache=None, swaps=True
    )
    assert columns.requests["recomputed_tokens"].tolist() == [0, 4]


def test_what_a_sequence_takes_the_place_of_in_host_memory_goes_to_the_disk() -> None:
    # A's two blocks are in a host memory of three. The second of two prompts without full blocks gives way with two blocks, so that
    # the last of A goes to the disk.
    trace = a_trace((0, 9, 1, A), (20, 3, 10, []), (20, 3, 10, []), (100, 9, 1, A))
    both = Vllm(max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False, scheduler_reserve_full_isl=False)
    disk = TierSpec(kind="disk", capacity_bytes=10_000, read_bytes_per_s=1000.0, write="eviction")
    columns = served(trace, replace(HOST, capacity_bytes=3000), disk, scheduler=both, swaps=True)
    assert columns.requests["swap_hit_tokens"][1:3].any()
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 0, 4]
    assert columns.requests["disk_hit_tokens"].tolist() == [0, 0, 0, 4]


@dataclass(frozen=True)
class LooksAtNoMemory:
    """The first of the queue with its whole prompt beside all decodes; one whose KV has come, when what it lacks is free."""

    def plan(self, view: ReplicaView, /) -> Plan:
        free = view.free_blocks - view.growth_blocks
        run = tuple(
            (seq.id, seq.tokens)
            for seq in view.waiting[:1]
            if not seq.shared_blocks or view.blocks_to_admit(seq) <= free
        )
        return Plan(decode=view.n_decoding > 0, run=run)


# A gives way to a prompt that fills the device. An answer behind a prompt of 3 tokens, from 10 s on, takes its fourth block with
# the step at 20 s and its fifth with the one at 24 s.
@pytest.mark.parametrize(("blocks", "loads_s"), [(5, 24.0), (6, 20.0)])
def test_a_load_leaves_decodes_the_blocks_that_the_coming_step_takes(blocks: int, loads_s: float) -> None:
    trace = a_trace((0, 9, 1, A), (2, 4 * blocks - 3, 1, []), (10, 3, 14, []), (20, 9, 1, A))
    moved = served(trace, HOST, scheduler=LooksAtNoMemory(), kv_blocks=blocks).transfers()
    assert moved is not None
    assert (moved["asked_ns"][moved["what"] == LOAD] / S).tolist() == [loads_s]


def test_a_prompt_beside_a_load_leaves_decodes_the_blocks_that_the_coming_step_takes() -> None:
    trace = a_trace((0, 9, 1, A), (2, 25, 1, []), (10, 3, 17, []), (20, 9, 1, A), (23.5, 4, 1, []))
    slow = replace(HOST, read_bytes_per_s=200.0, latency_s=0.0)
    columns = served(trace, slow, scheduler=LooksAtNoMemory(), kv_blocks=7)
    # The load has two blocks from 20 s to 30 s, and at 24 s one of seven is free.
    assert seconds(columns, "load_ns")[3] == 10.0
    assert seconds(columns, "scheduled_ns")[4] == 27.0


def test_blocks_that_a_load_has_taken_are_not_to_be_had_again_when_its_sequence_is_admitted() -> None:
    # An answer has one of four blocks, and the load two: what A lacks is free, although three are not.
    trace = a_trace((0, 9, 1, A), (2, 13, 1, []), (10, 1, 3, []), (10, 9, 1, A))
    quick = replace(HOST, read_bytes_per_s=1e6, latency_s=0.0)
    two = Vllm(max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False)
    columns = served(trace, quick, scheduler=two)
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 0, 8]
    assert seconds(columns, "scheduled_ns")[3] == 11.0


def test_facts_of_tiers_are_the_sums_over_machines() -> None:
    """Requests go to two machines in turn: what each reads, writes and gives up is what it does alone."""
    first = [(0, 9, 1, A), (10, 13, 1, []), (20, 5, 1, A[:1]), (30, 13, 1, []), (40, 9, 1, A)]
    second = [(0, 13, 1, B), (10, 13, 1, []), (20, 13, 1, B), (30, 9, 1, []), (40, 13, 1, B)]
    tiers = (
        replace(HOST, capacity_bytes=4000),
        TierSpec(kind="disk", capacity_bytes=9000, read_bytes_per_s=500.0, write="eviction"),
    )
    turns = [each for pair in zip(first, second, strict=True) for each in pair]
    both = served(a_trace(*turns), *tiers, machines=2)
    alone = [served(a_trace(*requests), *tiers) for requests in (first, second)]
    for kind in ("host", "disk"):
        parts = [columns.meta["tiers"][kind] for columns in alone]
        assert both.meta["tiers"][kind] == {name: parts[0][name] + parts[1][name] for name in parts[0]}
        assert all(part["evicted_blocks"] and part["loads"] for part in parts) or kind == "disk"
    moved = both.transfers()
    assert moved is not None
    took_ns = moved["arrived_ns"] - moved["asked_ns"]
    for tier, kind in enumerate(("host", "disk")):
        facts = both.meta["tiers"][kind]
        assert facts["load_ns"] == took_ns[(moved["tier"] == tier) & (moved["what"] == LOAD)].sum()
        assert facts["evicted_blocks"] * 1000 == facts["store_bytes"] - facts["used_bytes"]
    facts = both.meta["tiers"]["host"]
    said = kv_tiers(both.requests, both.meta)["kv_tiers"]
    assert said["host"]["load_mean_s"] == pytest.approx(facts["load_ns"] / facts["loads"] / S)
    assert said["host"]["load_wait_mean_s"] == pytest.approx(facts["load_wait_ns"] / facts["loads"] / S)
    held_s = [held for columns in alone for held in seconds(columns, "load_ns") if held]
    assert len({*held_s}) > 1
    assert said["load_s"]["mean"] == pytest.approx(np.mean(held_s))
    assert said["load_s"]["max"] == max(held_s)


def test_a_store_that_machines_share_counts_once() -> None:
    trace = a_trace(*((10.0 * i, 13, 1, []) for i in range(6)))
    remote = TierSpec(kind="remote", capacity_bytes=5000, read_bytes_per_s=4000.0, store="s")
    one, two = (served(trace, remote, machines=n).meta["tiers"]["remote"] for n in (1, 2))
    assert one["evicted_blocks"] > 0
    assert one == two


KEYS: dict[Eviction | None, Key | None] = {
    None: None,
    Lru(): lambda used, entered, uses, place: used,
    Lfu(): lambda used, entered, uses, place: (uses, used),
    Fifo(): lambda used, entered, uses, place: entered,
    Retention(tokens=10): lambda used, entered, uses, place: (place < 3, used),
}


# Blocks that a device evicts together enter a tier together, which a count of single blocks does not know.
@pytest.mark.parametrize(
    ("eviction", "on_eviction"),
    [(each, late) for each in KEYS for late in (False, True) if not (late and each == Fifo())],
)
def test_requests_one_at_a_time_find_what_a_plain_count_of_two_levels_finds(
    eviction: Eviction | None, on_eviction: bool
) -> None:
    loaded = differs = 0
    for seed in range(12 if eviction is None else 4):
        rng = random.Random(seed)
        groups = [[100 * g + i for i in range(rng.randrange(1, 8))] for g in range(6)]
        requests = []
        for n in range(60):
            ids = [*rng.choice(groups), *(10_000 + 20 * n + i for i in range(rng.randrange(0, 4)))]
            ids = rng.choice(requests)[3] if requests and rng.random() < 0.3 else ids
            # Not whole blocks: of a prompt that is known in full the last block is computed again, and for a while held twice.
            requests.append((100.0 * n, 4 * len(ids) + rng.choice([1, 2, 3]), 1, ids))
        trace = a_trace(*requests)
        device, tier = rng.choice([12, 20]), rng.choice([15, 30, 60])
        host = TierSpec(
            kind="host",
            capacity_bytes=1000 * tier,
            read_bytes_per_s=1e6,
            write="eviction" if on_eviction else "through",
            eviction=eviction,
        )
        replica = ReplicaSpec(
            cost=Linear(fixed_s=1.0), scheduler=ONE_SEAT, kv_blocks=device, block_tokens=4, prefix_cache="blocks",
            tiers=(host,), block_bytes=1000,
        )  # fmt: skip
        found = run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin())).requests
        hits = list(
            zip((found["prefix_hit_tokens"] // 4).tolist(), (found["host_hit_tokens"] // 4).tolist(), strict=True)
        )
        assert hits == found_by_level(trace, device, tier, on_eviction=on_eviction, key=KEYS[eviction])
        differs += hits != found_by_level(trace, device, tier, on_eviction=on_eviction)
        loaded += sum(in_tier for _, in_tier in hits)
    assert loaded > (500 if eviction is None else 100)
    assert (differs > 0) == (eviction not in (None, Lru()))


def with_evictions(experiment: Experiment, seed: int) -> Experiment:
    """The same with an eviction policy for each kind of tier."""
    rng = random.Random(f"evictions of {seed}")
    chosen = {kind: rng.choice([*KEYS, Mru()]) for kind in ("host", "disk", "remote")}

    def evicting(spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, tiers=tuple(replace(tier, eviction=chosen.get(tier.kind)) for tier in spec.tiers))

    machines = (replace(spec, hosted=tuple(evicting(each) for each in spec.hosted)) for spec in experiment.machines)
    return replace(experiment, replicas=tuple(machines))


def assert_spans_equal_stepping(seeds: range) -> None:
    for seed in seeds:
        experiment = with_evictions(with_tiers(an_experiment(seed, speculative=seed % 2 == 0), seed), seed)
        run_both_ways(experiment, check_invariants=False)


def test_spans_equal_stepping_with_tiers() -> None:
    assert_spans_equal_stepping(range(8))


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(10_000, 15_000, 500))
def test_spans_equal_stepping_with_tiers_over_many_runs(seed: int) -> None:
    assert_spans_equal_stepping(some(range(seed, seed + 500)))


def test_the_books_hold_at_every_event_with_tiers() -> None:
    for seed in range(100, 103):
        experiment = with_evictions(with_tiers(an_experiment(seed, speculative=seed % 2 == 0), seed), seed)
        checked, plain = run(experiment, check_invariants=True), run(experiment)
        np.testing.assert_array_equal(checked.requests["finish_ns"], plain.requests["finish_ns"])


@pytest.mark.slow(reason="many random runs")
def test_the_random_runs_use_every_kind_of_tier() -> None:
    loads = dict.fromkeys(("host", "disk", "remote", "peer"), 0)
    swapped = 0
    for seed in range(2_400):
        columns = run(with_tiers(an_experiment(seed, speculative=seed % 2 == 0), seed))
        for kind, facts in columns.meta.get("tiers", {}).items():
            loads[kind] += facts["loads"]
        swapped += int(columns.requests["swap_hit_tokens"].sum()) if "swap_hit_tokens" in columns.requests else 0
    assert min(loads.values()) > 9
    assert swapped > 100


@patches_the_engine
def test_a_store_that_loses_a_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put = Store.put

    def lossy(self: Store, pieces: Any, now_ns: int, ready_ns: int) -> Any:
        gone = put(self, pieces, now_ns, ready_ns)
        self.used_bytes -= 1000
        return gone

    monkeypatch.setattr(Store, "put", lossy)
    with pytest.raises(InvariantError, match="INV-9 at t="):
        served(a_trace((0, 9, 1, A), (3, 13, 1, B)), HOST)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"tiers": (HOST,), "prefix_cache": None}, "tiers keep what a prefix cache gives up, and there is none"),
        ({"tiers": (HOST, HOST)}, "one tier of kind host at most"),
        ({"tiers": (TierSpec(kind="peer", read_bytes_per_s=1.0),)}, "there is no tier of kind host"),
        (
            {
                "tiers": (
                    HOST,
                    TierSpec(kind="remote", capacity_bytes=9, read_bytes_per_s=1.0),
                    TierSpec(kind="disk", capacity_bytes=9, read_bytes_per_s=1.0, write="eviction"),
                )
            },
            "the disk tier would take what a remote tier gives up, which is no machine's own",
        ),
        ({"swaps": True}, "swapped to a tier of kind host, and there is none"),
        ({"tiers": (HOST,), "block_bytes": 0}, "block_bytes is at least 1"),
    ],
)
def test_tiers_that_cannot_be_are_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplicaSpec(
            **{
                "cost": Linear(),
                "scheduler": ONE_SEAT,
                "kv_blocks": 4,
                "prefix_cache": "blocks",
                "block_bytes": 1,
                **spec,
            }
        )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"read_bytes_per_s": 0.0}, "bandwidth of the tier's link and above 0"),
        ({"capacity_bytes": 0}, "a host tier has capacity_bytes"),
        ({"latency_s": -1.0}, "latency_s is a finite time"),
        ({"write": "sometimes"}, "write is through or eviction"),
        ({"kind": "tape"}, "kind is one of host, disk, remote, peer"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(HOST, **setting)


def test_the_smallest_tier_has_a_byte() -> None:
    assert replace(HOST, capacity_bytes=1).capacity_bytes == 1


# Any two of them fill the memory; each was loaded again as soon as it had been driven out. In the second run the scheduler wants,
# whenever the KV of one has come, another one first.
# In the first one after the other is loaded by itself, so that nothing is computed again; in the second they have to be.
@pytest.mark.parametrize(("seed", "computed_again"), [(10_508, False), (11_890, True)])
def test_some_that_were_moved_do_not_drive_each_other_out_for_ever(seed: int, computed_again: bool) -> None:
    experiment = with_tiers(an_experiment(seed, speculative=True), seed)
    machines = tuple(
        replace(spec, hosted=tuple(replace(core, prefix_cache="blocks", block_bytes=1000) for core in spec.hosted))
        for spec in experiment.machines
    )
    found = run(replace(experiment, replicas=machines, horizon_ns=20 * S)).requests
    assert found["swap_hit_tokens"].any() != computed_again
    assert found["recomputed_tokens"].any() == computed_again
    assert UNFINISHED not in found["status"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"eviction": Belady()}, "a tier is not told which request looks for its blocks next"),
        (
            {"kind": "peer", "capacity_bytes": 0, "eviction": Lfu()},
            "reads the host memory of other machines, which evicts",
        ),
    ],
)
def test_an_eviction_policy_that_a_tier_cannot_follow_is_refused(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(HOST, **spec)


def test_machines_that_share_a_store_share_its_eviction_policy() -> None:
    remote = TierSpec(kind="remote", capacity_bytes=5000, read_bytes_per_s=4000.0, store="s", eviction=Lfu())
    specs = [
        ReplicaSpec(
            cost=Linear(), scheduler=ONE_SEAT, kv_blocks=4, block_tokens=4, prefix_cache="blocks", block_bytes=1000,
            tiers=(replace(remote, eviction=policy),),
        )
        for policy in (Lfu(), Fifo())
    ]  # fmt: skip
    trace = a_trace((0.0, 13, 1, A))
    run(Experiment(workload=trace, replicas=(specs[0], specs[0]), router=RoundRobin()))
    with pytest.raises(ValueError, match="share the store 's' and give it eviction Lfu"):
        run(Experiment(workload=trace, replicas=tuple(specs), router=RoundRobin()))
