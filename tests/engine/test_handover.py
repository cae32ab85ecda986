"""Prefill and decode on machines of their own: against queues in closed form, to the nanosecond, and over random runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from policies.trtllm import TrtLlm
from policies.view import UNTIL_CHANGE, Plan, ReplicaView
from policies.vllm import Vllm
from policies.wrappers import EvictNewest
from sim.engine import ABORTED, FINISHED, REJECTED, Experiment, InvariantError, MachineSpec, ReplicaSpec, run
from sim.engine.record.columns import Columns
from sim.engine.serve.kv_connector import KvConnector
from sim.engine.spec.experiment import LeftBehind
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec, Slowdown
from sim.metrics.handover import handover_figures
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear, Ranked
from tests.engine.random_runs import apart, assert_same, run_both_ways, with_ranks, with_tiers
from tests.sample import few, some
from workloads import Trace

MS = 1_000_000


def two(
    trace: Trace, *, prefill: ReplicaSpec | None = None, decode: ReplicaSpec | None = None, path: KvPath | None = None, **spec: Any
) -> Experiment:  # fmt: skip
    """One machine that prefills and one that decodes."""
    one = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=1000)
    handover = HandoverSpec(
        roles=("prefill", "decode"),
        pools=(0, 1),
        paths={(0, 1): path or KvPath(link=LinkSpec(inf), bytes_per_token=1000.0)},
        router=RoundRobin(),
        **spec,
    )
    return Experiment(workload=trace, replicas=(prefill or one, decode or one), router=RoundRobin(), handover=handover)


def poisson(n: int, rate_per_s: float, *, prompt: int = 16, output: int = 2, seed: int = 1) -> Trace:
    gaps = np.random.default_rng(seed).exponential(1e9 / rate_per_s, n)
    arrival = np.cumsum(gaps).astype(np.int64)
    return Trace(arrival_ns=arrival, prompt_tokens=np.full(n, prompt), output_tokens=np.full(n, output))


def departures(arrival: np.ndarray, service_ns: int) -> np.ndarray:
    """Waits in a queue with one server and one service time, first come, first served (Lindley)."""
    out, free = np.empty_like(arrival), 0
    for i, at in enumerate(arrival.tolist()):
        out[i] = free = max(at, free) + service_ns
    return out


def one_at_a_time(fixed_s: float) -> ReplicaSpec:
    return ReplicaSpec(
        cost=Linear(fixed_s=fixed_s), scheduler=EvictNewest(OrcaPaged(1, watermark=0.0)), kv_blocks=100_000
    )


@pytest.mark.parametrize(
    ("prefill_ms", "decode_ms", "n"),
    [
        (3, 4, 2_000),
        *(
            pytest.param(*case, 40_000, marks=pytest.mark.slow(reason="enough samples for narrow statistics"))
            for case in ((3, 4), (4, 3), (4, 4))
        ),
    ],
)
def test_two_machines_are_a_tandem_of_queues(prefill_ms: int, decode_ms: int, n: int) -> None:
    trace = poisson(n, 175)
    found = run(two(trace, prefill=one_at_a_time(prefill_ms / 1e3), decode=one_at_a_time(decode_ms / 1e3)))
    expected = departures(departures(trace.arrival_ns, prefill_ms * MS), decode_ms * MS)
    late = found.requests["finish_ns"] - expected
    # A nanosecond is one machine's news to another: when the prompt is done, when there is room, and again for who waited for it.
    assert late.min() >= 0
    assert late.max() < 5_000
    # Waits of deterministic servers behind each other are those of the slowest alone (M/D/1: Pollaczek and Khinchine).
    service, rate = max(prefill_ms, decode_ms) / 1e3, 175
    load = rate * service
    wait_s = load * service / (2 * (1 - load))
    sojourn = (found.requests["finish_ns"] - trace.arrival_ns) / 1e9
    warm = sojourn[n // 10 :]
    batches = warm[len(warm) % 30 :].reshape(30, -1).mean(axis=1)
    half = 2.756 * batches.std(ddof=1) / sqrt(len(batches))  # 99 % of Student's t with 29 degrees
    assert abs(batches.mean() - (prefill_ms + decode_ms) / 1e3 - wait_s) < half


def test_a_link_is_the_queue_between_them() -> None:
    # 16 tokens of 1,000 bytes at 4 MB/s: 4 ms each, first come, first served.
    trace = poisson(1_000, 175)
    path = KvPath(link=LinkSpec(4e6, latency_s=1e-3), bytes_per_token=1000.0)
    found = run(two(trace, prefill=one_at_a_time(3e-3), decode=one_at_a_time(1e-9), path=path))
    expected = departures(departures(trace.arrival_ns, 3 * MS), 4 * MS) + MS
    assert np.abs(found.requests["landed_ns"] - expected).max() < 5_000
    assert found.meta["links"] == [
        {"from_pool": 0, "to_pool": 1, "sender": 0, "receiver": -1, "busy_ns": 1_000 * 4 * MS, "places": 1}
    ]


@pytest.mark.parametrize("first_token", ["prefill", "arrival", "decode"])
@pytest.mark.parametrize("room", ["after_prefill", "before_prefill"])
def test_a_link_that_is_never_busy_adds_its_latency_to_the_nanosecond(first_token: Any, room: Any) -> None:
    trace = Trace(arrival_ns=[0, 50 * MS, 100 * MS], prompt_tokens=[10, 33, 48], output_tokens=[5, 1, 9])
    free, latent = (
        run(two(trace, path=KvPath(link=LinkSpec(inf, latency_s=late_s), bytes_per_token=1.0), first_token=first_token, room=room))
        for late_s in (0.0, 1.234567e-3)
    )  # fmt: skip
    crossed = free.requests["landed_ns"] >= 0
    assert crossed.tolist() == [True, first_token == "decode", True]
    added = latent.requests["finish_ns"] - free.requests["finish_ns"]
    np.testing.assert_array_equal(added, np.where(crossed, 1_234_567, 0))
    ttft = latent.requests["first_token_ns"] - free.requests["first_token_ns"]
    np.testing.assert_array_equal(ttft, np.where(crossed & (first_token != "prefill"), 1_234_567, 0))


def test_a_transfer_that_spans_a_slower_time_arrives_when_its_bytes_have() -> None:
    """20 tokens are 20 ms; from 11 ms on for 8 ms a quarter of the link is left, and the last byte goes before or after that."""
    trace = Trace(arrival_ns=[0], prompt_tokens=[20], output_tokens=[4])
    slow = (Slowdown(at_s=0.011, for_s=0.008, factor=0.25), Slowdown(at_s=0.02, for_s=0.1, added_latency_s=0.005))
    path = KvPath(link=LinkSpec(1e6, slowdowns=slow), bytes_per_token=1000.0)
    for fast_forward in (True, False):
        found = run(two(trace, path=path), fast_forward=fast_forward, check_invariants=True)
        # It begins at 1 ms: 10 ms by 11, 2 ms more by 19, the last 8 by 27, and 5 ms of latency.
        assert found.requests["landed_ns"].tolist() == [32 * MS + 2]
        assert found.meta["links"][0]["busy_ns"] == 26 * MS


def test_who_gives_the_first_token() -> None:
    trace = Trace(arrival_ns=[0], prompt_tokens=[20], output_tokens=[4])
    path = KvPath(link=LinkSpec(1e6), bytes_per_token=1000.0)
    by = {each: run(two(trace, path=path, first_token=each)) for each in ("prefill", "arrival", "decode")}
    prompt_ns, sent_ns = MS, 20 * MS
    first = {each: int(columns.requests["first_token_ns"][0]) for each, columns in by.items()}
    assert first == {"prefill": prompt_ns, "arrival": prompt_ns + sent_ns + 2, "decode": prompt_ns + sent_ns + 2 + MS}
    finish = {each: int(columns.requests["finish_ns"][0]) for each, columns in by.items()}
    # The token that is dropped is one that the decode machine has to emit itself.
    assert finish == {"prefill": 24 * MS + 2, "arrival": 24 * MS + 2, "decode": 25 * MS + 2}
    assert by["decode"].requests["recomputed_tokens"].tolist() == [1]
    assert all(columns.iterations()["emitted_tokens"].sum() == 4 for columns in by.values())


@pytest.mark.parametrize("ahead", [False, True])
def test_room_that_an_end_leaves_is_given_by_the_first_plan_that_knows_of_it(ahead: bool) -> None:
    # The first ends while the second goes on, and the third needs what it leaves.
    trace = Trace(arrival_ns=[0, 0, 0], prompt_tokens=[64, 16, 64], output_tokens=[5, 30, 3])
    decode = ReplicaSpec(cost=Linear(), scheduler=Vllm(async_scheduling=ahead), kv_blocks=8)
    found = run(two(trace, decode=decode), check_invariants=True).requests
    # A plan that is made while the step before it runs knows of that end a step later.
    assert found["room_ns"][2] == found["finish_ns"][0] + ahead * MS


def test_blocks_are_the_senders_until_kv_has_arrived_and_the_receivers_from_before() -> None:
    # Two prompts that fill the prefill machine: the second waits for the first one's KV to have left it.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[64, 64], output_tokens=[3, 3])
    small = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=7)
    path = KvPath(link=LinkSpec(6.4e6), bytes_per_token=1000.0)
    found = run(two(trace, prefill=small, path=path), check_invariants=True)
    landed = found.requests["landed_ns"]
    assert landed[0] == MS + 2 + 10 * MS
    assert found.requests["scheduled_ns"].tolist() == [0, landed[0]]
    # And a receiver whose memory one prompt fills lets the second cross when the first has ended.
    found = run(two(trace, decode=small, path=path), check_invariants=True)
    assert found.requests["room_ns"][1] == found.requests["finish_ns"][0]


def test_prompts_that_stay() -> None:
    trace = Trace(arrival_ns=[0, 20 * MS], prompt_tokens=[30, 31], output_tokens=[3, 3])
    found = run(two(trace, local_tokens=30))
    assert found.requests["prefill_replica"].tolist() == [-1, 0]
    assert run(two(trace, local_tokens=31)).requests["prefill_replica"].tolist() == [-1, -1]
    assert found.requests["replica"].tolist() == [1, 1]


def shared(prompt: int, **columns: Any) -> dict[str, Any]:
    """Two prompts of the same beginning, all of it in full blocks."""
    ids = np.arange(1, prompt // 16 + 1)
    return {
        "prefix_blocks": np.tile(ids, 2),
        "prefix_offsets": [0, len(ids), 2 * len(ids)],
        "prefix_block_tokens": 16,
        **columns,
    }


def test_what_the_receiver_has_cached_is_not_sent_and_what_is_cached_there_may_stay() -> None:
    trace = Trace(arrival_ns=[0, 200 * MS], prompt_tokens=[160, 160], output_tokens=[3, 3], **shared(160))
    caching = ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=1000, prefix_cache="blocks")
    found = run(two(trace, prefill=caching, decode=caching), check_invariants=True).requests
    assert found["sent_bytes"].tolist() == [160_000, 16_000]
    assert found["found_at_decode_tokens"].tolist() == [0, 144]
    assert found["prefix_hit_tokens"].tolist() == [0, 144]
    stays = run(two(trace, prefill=caching, decode=caching, local_tokens=20), check_invariants=True).requests
    assert stays["prefill_replica"].tolist() == [0, -1]
    assert stays["prefix_hit_tokens"].tolist() == [0, 144]
    # Where the receiver lacks a block of 16 tokens it is the same for as many, and for one fewer it is sent.
    assert trace.prefix_blocks is not None
    but_one = replace(trace, prefix_blocks=np.append(trace.prefix_blocks[:-1], 99))
    for local_tokens, machine in ((16, -1), (15, 0)):
        experiment = two(but_one, prefill=caching, decode=caching, local_tokens=local_tokens)
        assert run(experiment).requests["prefill_replica"].tolist() == [0, machine]


@pytest.mark.parametrize(("arrives_ms", "found"), [(20, 0), (100, 144)])
def test_a_prompt_that_was_computed_elsewhere_is_in_the_receivers_tree_when_its_sequence_has_ended(
    arrives_ms: int, found: int
) -> None:
    trace = Trace(arrival_ns=[0, arrives_ms * MS], prompt_tokens=[160, 160], output_tokens=[50, 3], **shared(160))
    caching = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=1000, prefix_cache="tree")
    columns = run(two(trace, prefill=caching, decode=caching), check_invariants=True)
    assert (columns.requests["finish_ns"][0] > arrives_ms * MS) == (found == 0)
    assert columns.requests["found_at_decode_tokens"].tolist() == [0, found]


def test_windows_leave_nothing_behind_of_what_was_computed_elsewhere() -> None:
    # Room for two prompts; the third is the first again.
    ids = np.concatenate((np.arange(10), np.arange(20, 30), np.arange(10)))
    trace = Trace(
        arrival_ns=[0, 200 * MS, 400 * MS], prompt_tokens=[160] * 3, output_tokens=[3] * 3, prefix_blocks=ids,
        prefix_offsets=[0, 10, 20, 30], prefix_block_tokens=16,
    )  # fmt: skip
    caching = ReplicaSpec(
        cost=Linear(), scheduler=Vllm(), kv_blocks=24, prefix_cache="blocks",
        left_behind=LeftBehind(per_block=2.0, window_blocks=0),
    )  # fmt: skip
    found = run(two(trace, prefill=caching, decode=caching), check_invariants=True).requests
    assert found["prefix_hit_tokens"].tolist() == [0, 0, 0]
    assert found["found_at_decode_tokens"].tolist() == [0, 0, 144]


def test_a_prompt_stays_whose_beginning_is_being_emitted_in_a_span() -> None:
    # The second is the first and its answer, of which 80 tokens are there when it comes.
    trace = Trace(arrival_ns=[0, 55 * MS], prompt_tokens=[32, 96], output_tokens=[64, 3], **shared(96))
    caching = ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=1000, prefix_cache="blocks")
    for fast_forward in (True, False):
        experiment = two(trace, prefill=caching, decode=caching, local_tokens=16)
        assert run(experiment, fast_forward=fast_forward).requests["prefill_replica"].tolist() == [0, -1]


@pytest.mark.parametrize(
    ("senders", "receivers", "waits"),
    [(1, 2, {"sender", "pools"}), (2, 1, {"receiver", "pools"}), (1, 1, {"sender", "receiver", "pair", "pools"})],
)
@pytest.mark.parametrize("shared", ["sender", "receiver", "pair", "pools"])
def test_whose_transfers_wait_for_each_other(shared: Any, senders: int, receivers: int, waits: set[str]) -> None:
    # Two prompts are done in the same step, or on two machines; each takes 4 ms.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[16, 16], output_tokens=[3, 3])
    path = KvPath(link=LinkSpec(4e6), bytes_per_token=1000.0, shared=shared)
    experiment = two(trace, path=path)
    assert experiment.handover is not None
    handover = replace(
        experiment.handover,
        roles=("prefill",) * senders + ("decode",) * receivers,
        pools=(0,) * senders + (1,) * receivers,
    )
    machines = (experiment.replicas[0],) * (senders + receivers)
    columns = run(replace(experiment, replicas=machines, handover=handover))
    assert np.diff(columns.requests["landed_ns"]).tolist() == [4 * MS if shared in waits else 0]
    # The result says of which machines each link is; -1: of all of the pool.
    ends = {(link["sender"] >= 0, link["receiver"] >= 0) for link in columns.meta["links"]}
    assert ends == {(shared in ("sender", "pair"), shared in ("receiver", "pair"))}
    assert {*map(int, (link[end] for link in columns.meta["links"] for end in ("sender", "receiver")))} <= {-1, 0, 1, 2}


def test_requests_whose_kv_has_come_are_before_all_without_in_the_order_in_which_it_came() -> None:
    # The machine that decodes does one request at a time. Short prompts are its own: one runs and four are queued when the KV of
    # three long ones comes, one after the other.
    prompts = [16, 16, 16, 16, 16, 64, 64, 64]
    trace = Trace(
        arrival_ns=[0, *[MS] * 4, *(n * 20 * MS for n in (1, 2, 3))],
        prompt_tokens=prompts,
        output_tokens=[120, *[3] * 7],
    )
    found = run(two(trace, decode=one_at_a_time(1e-3), local_tokens=16), check_invariants=True).requests
    assert (found["landed_ns"] < found["finish_ns"][0]).all()
    assert np.argsort(found["finish_ns"]).tolist() == [0, 5, 6, 7, 1, 2, 3, 4]


def test_room_is_not_made_of_the_block_that_a_step_in_vain_takes() -> None:
    # The first request might have more tokens, so that the step at 5 ms is planned with it and takes one of two free blocks.
    # The second, whose prompt needs both, has room when that step has ended, and nobody is preempted.
    trace = Trace(arrival_ns=[0, 3 * MS], prompt_tokens=[8, 7], output_tokens=[5, 3], max_tokens=[14, 12])
    spec = ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=5, block_tokens=4)
    found = run(two(trace, prefill=spec, decode=spec), check_invariants=True).requests
    assert found["preemptions"].tolist() == [0, 0]
    assert found["room_ns"][1] == found["finish_ns"][0] + MS


def test_a_prompt_that_is_done_leaves_its_machine_the_room_that_it_does_not_have() -> None:
    # Two blocks and four are all that there are. The second prompt goes on in the plan that is made before the first is known to be
    # done.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[8, 15], output_tokens=[3, 3])
    first = ReplicaSpec(
        cost=Linear(), scheduler=Vllm(max_num_batched_tokens=16, max_num_seqs=4), kv_blocks=6, block_tokens=4
    )
    second = ReplicaSpec(cost=Linear(), scheduler=Vllm(), kv_blocks=100, block_tokens=4)
    found = run(two(trace, prefill=first, decode=second), check_invariants=True).requests
    assert found["preemptions"].tolist() == [0, 0]
    assert found["prefilled_ns"].tolist() == [MS, 2 * MS]


def test_who_goes_while_waiting_for_room_gives_back_what_was_computed_and_takes_no_room() -> None:
    # The first fills the decode machine until it ends; the second waits for room there with all of the prefill machine's memory.
    trace = Trace(
        arrival_ns=[0, 0, 6 * MS], prompt_tokens=[64] * 3, output_tokens=[40, 3, 3], abort_ns=np.array([-1, 5 * MS, -1])
    )
    first, second = (ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=n) for n in (5, 7))
    found = run(two(trace, prefill=first, decode=second), check_invariants=True).requests
    assert found["status"].tolist() == [FINISHED, ABORTED, FINISHED]
    assert found["scheduled_ns"][2] == 6 * MS
    assert found["room_ns"][2] == found["finish_ns"][0]


def test_who_goes_before_the_prompt_is_computed_gives_the_room_back_that_was_taken() -> None:
    trace = Trace(
        arrival_ns=[0, 0, 0], prompt_tokens=[64] * 3, output_tokens=[3] * 3, abort_ns=np.array([-1, 3 * MS, -1])
    )
    first = ReplicaSpec(cost=Linear(fixed_s=8e-3), scheduler=EvictNewest(OrcaPaged(1)), kv_blocks=100)
    second = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=9)
    found = run(two(trace, prefill=first, decode=second, room="before_prefill"), check_invariants=True).requests
    assert found["status"].tolist() == [FINISHED, ABORTED, FINISHED]
    # The third had no room beside them.
    assert found["room_ns"].tolist() == [0, 0, 3 * MS]


def test_who_is_refused_where_the_prompt_would_be_computed_gives_the_room_back_that_was_taken() -> None:
    def refuses(view: ReplicaView, /) -> Plan:
        """One prompt at a time, and never the second request's."""
        no = tuple((seq.id, "no") for seq in view.waiting if seq.id == 1)
        run = tuple((seq.id, seq.tokens) for seq in view.waiting if seq.id != 1)[:1]
        return Plan(run=run, reject=no) if run or no else Plan(hold=UNTIL_CHANGE)

    trace = Trace(arrival_ns=[0, 0, 0], prompt_tokens=[64] * 3, output_tokens=[30] * 3)
    first = ReplicaSpec(cost=Linear(), scheduler=refuses, kv_blocks=100)
    second = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=9)
    found = run(two(trace, prefill=first, decode=second, room="before_prefill"), check_invariants=True).requests
    assert found["status"].tolist() == [FINISHED, REJECTED, FINISHED]
    # The first machine hears of the second's room, refuses it, and the decode machine hears of that a nanosecond later.
    assert found["room_ns"].tolist() == [0, 0, 2]


class Second:
    """A router that always takes the second."""

    def route(self, request: object, replicas: object, /) -> int:
        return 1


def test_what_is_cached_on_another_rank_than_the_first_lets_a_prompt_stay_too() -> None:
    trace = Trace(arrival_ns=[0, 200 * MS], prompt_tokens=[160, 160], output_tokens=[3, 3], **shared(160))
    caching = ReplicaSpec(cost=Ranked(), scheduler=Vllm(), kv_blocks=1000, prefix_cache="blocks")
    ranks = MachineSpec(hosted=(caching,), ranks=2, rank_router=Second())
    experiment = replace(two(trace, local_tokens=20), replicas=(caching, ranks))
    assert run(experiment, check_invariants=True).requests["prefill_replica"].tolist() == [0, -1]


def test_who_decodes_is_one_of_those_whose_memory_could_ever_hold_the_request() -> None:
    trace = Trace(arrival_ns=[0] * 4, prompt_tokens=[100] * 4, output_tokens=[30] * 4)
    large, small = (ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=n) for n in (1000, 7))
    for room in ("after_prefill", "before_prefill"):
        experiment = two(trace, room=room)
        assert experiment.handover is not None
        handover = replace(experiment.handover, roles=("prefill", "decode", "decode"), pools=(0, 1, 1))
        found = run(replace(experiment, replicas=(large, small, large), handover=handover), check_invariants=True)
        assert found.requests["replica"].tolist() == [2] * 4
        assert (found.requests["status"] == FINISHED).all()


def test_a_prompt_that_was_preempted_is_sent_whole_when_it_is_done() -> None:
    # The first has all its blocks when the second, without room for its last, gives way again and again; 64 KB take 6.4 ms.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[64, 64], output_tokens=[3, 3])
    scheduler = Vllm(
        max_num_batched_tokens=48, max_num_seqs=8, scheduler_reserve_full_isl=False, async_scheduling=False
    )
    tight = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=7)
    path = KvPath(link=LinkSpec(1e7), bytes_per_token=1000.0, layers=4)
    found = run(two(trace, prefill=tight, path=path, room="before_prefill"), check_invariants=True).requests
    assert (found["preemptions"] > 0).tolist() == [False, True]
    behind = found["landed_ns"] - found["prefilled_ns"]
    assert behind[0] < 6_400_000
    assert behind[1] == 6_400_000 + 1


def test_where_no_token_is_to_be_sent_no_state_is() -> None:
    path = KvPath(link=LinkSpec(inf), bytes_per_token=10.0, bytes_per_sequence=500.0)
    assert [path.n_bytes(tokens) for tokens in (0, 1, 20)] == [0, 510, 700]


def test_layers_go_behind_the_computation() -> None:
    trace = Trace(arrival_ns=[0], prompt_tokens=[100], output_tokens=[3])
    slow = ReplicaSpec(cost=Linear(fixed_s=8e-3), scheduler=EvictNewest(Sarathi()), kv_blocks=100)
    landed = {
        (bandwidth, layers): int(
            run(
                two(
                    trace, prefill=slow, room="before_prefill",
                    path=KvPath(link=LinkSpec(bandwidth), bytes_per_token=1000.0, layers=layers),
                )
            ).requests["landed_ns"][0]
        )
        for bandwidth in (1e8, 1e7)
        for layers in (1, 4)
    }  # fmt: skip
    # The receiver's room is heard of 1 ns after the arrival, the end of the prompt 1 ns after that.
    done = 8 * MS + 2
    # 1 ms over the link: a quarter of it is left when the last layer is done. 10 ms: they begin when the first is, at 2 ms.
    assert landed == {(1e8, 1): done + MS, (1e8, 4): done + MS // 4, (1e7, 1): done + 10 * MS, (1e7, 4): 12 * MS + 1}


def test_the_use_of_links_is_a_share_of_all_their_places() -> None:
    # Two prompts of one instant, 2 ms each on a link of three places, and all ends 1 ms later.
    path = KvPath(link=LinkSpec(1e7, concurrent_transfers=3), bytes_per_token=1000.0)
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[20, 20], output_tokens=[2, 2])
    found = run(two(trace, path=path))
    assert [link["places"] for link in found.meta["links"]] == [3]
    figures = handover_figures(found.requests, found.meta, span_s=0.008)["handover"]
    assert figures["link_use"] == pytest.approx(2 * 2 / (3 * 8))
    # And of a second link with one place, which has carried as much.
    meta = {"links": [*found.meta["links"], {"busy_ns": 4 * MS, "places": 1}]}
    figures = handover_figures(found.requests, meta, span_s=0.008)["handover"]
    assert figures["link_use"] == pytest.approx(2 * 4 / (4 * 8))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_who_can_never_be_held_is_rejected_and_says_where(role: str) -> None:
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[100, 20], output_tokens=[30, 3])
    small = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=7 if role == "decode" else 6)
    for room in ("after_prefill", "before_prefill"):
        found = run(two(trace, room=room, **{role: small}), check_invariants=True)  # type: ignore[arg-type]
        assert found.requests["status"].tolist() == [REJECTED, FINISHED]
        assert found.reasons == (
            "to decode it, needs 9 KV blocks for prompt and output but the replica has 7"
            if role == "decode"
            else "needs 7 KV blocks for its prompt but the replica has 6",
        )


def test_the_context_of_a_machine_that_prefills_has_to_hold_one_token_of_the_answer() -> None:
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[99, 100], output_tokens=[30, 30])
    short = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=1000, max_model_len=100)
    found = run(two(trace, prefill=short))
    assert found.requests["status"].tolist() == [FINISHED, REJECTED]
    assert found.reasons == ("prompt and output exceed the model's context of 100 tokens",)


def test_kv_that_comes_to_a_rank_while_ranks_step_waits_for_the_end_of_the_step_of_all() -> None:
    # The first is decoded on one rank in steps of 1,010 us, 10 of them for the row of whoever decodes on any.
    trace = Trace(arrival_ns=[0, 3 * MS], prompt_tokens=[16, 16], output_tokens=[20, 3])
    one = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=100)
    ranks = MachineSpec(
        hosted=(replace(one, cost=Ranked(fixed_s=1e-3, shared_row_s=1e-5)),), ranks=2, rank_router=RoundRobin()
    )
    experiment = two(trace, prefill=one)
    found = run(replace(experiment, replicas=(one, ranks)), check_invariants=True).requests
    step, joined = 1_010_000, MS + 2
    assert found["joined_ns"][0] == joined
    # Its prompt is done at 4 ms; the decode machine hears it 1 ns later, in the third step.
    assert found["prefilled_ns"][1] == 4 * MS
    room = joined + 3 * step
    assert found["room_ns"][1] == room
    # The room is known in the fourth step, the KV is there at once and joins in the fifth, on the other rank.
    assert found["joined_ns"][1] == room + step
    assert found["replica"].tolist() == [1, 2]
    assert found["finish_ns"][1] == room + step + 2 * (step + 10_000)


@pytest.mark.parametrize("room", ["after_prefill", "before_prefill"])
def test_news_that_a_plan_does_not_know_yet_ends_steps_of_ranks_that_are_alike(room: Any) -> None:
    trace = Trace(arrival_ns=[0, 50 * MS + 1, 120 * MS], prompt_tokens=[16] * 3, output_tokens=[400, 90, 3])
    one = ReplicaSpec(cost=Ranked(fixed_s=1e-3, shared_row_s=1e-5), scheduler=Vllm(), kv_blocks=100)
    ranks = MachineSpec(hosted=(one,), ranks=2, rank_router=RoundRobin())
    path = KvPath(link=LinkSpec(1e7), bytes_per_token=1000.0)
    experiment = replace(two(trace, path=path, room=room), replicas=(one, ranks))
    found = run(experiment)
    assert_same(found, run(experiment, fast_forward=False))
    assert found.meta["events"] < 60


@pytest.mark.parametrize("first_token", ["prefill", "arrival", "decode"])
@pytest.mark.parametrize(
    "scheduler",
    [Vllm(), Vllm(async_scheduling=False), Sglang(), TrtLlm(), TrtLlm(capacity_scheduler_policy="MAX_UTILIZATION")],
)
def test_engines_hand_over_and_their_books_balance(scheduler: Any, first_token: Any) -> None:
    trace = poisson(30, 200, prompt=150, output=30, seed=3)
    evicts = scheduler if isinstance(scheduler, (Vllm, Sglang, TrtLlm)) else EvictNewest(scheduler)
    one = ReplicaSpec(cost=Linear(fixed_s=1e-3, row_s=1e-6), scheduler=evicts, kv_blocks=120)
    path = KvPath(link=LinkSpec(2e8), bytes_per_token=1000.0)
    for room in ("after_prefill", "before_prefill"):
        experiment = two(trace, prefill=one, decode=one, path=path, first_token=first_token, room=room)
        found = run(experiment, check_invariants=True)
        assert (found.requests["status"] == FINISHED).all()
        assert (found.requests["landed_ns"] >= 0).all()
        assert_same(found, run(experiment, fast_forward=False))
        assert_balanced(experiment, found)


def assert_balanced(experiment: Experiment, found: Columns) -> None:
    """Tokens emitted and computed are those asked for, and times are in order."""
    spec = experiment.handover
    assert spec is not None
    requests, iterations = found.requests, found.iterations()
    assert iterations["emitted_tokens"].sum() == requests["emitted_tokens"].sum()
    landed = requests["landed_ns"] >= 0
    done = landed & (requests["joined_ns"] >= 0)
    for before, after in (("prefilled_ns", "sent_ns"), ("room_ns", "sent_ns"), ("sent_ns", "landed_ns")):
        assert (requests[before][landed] <= requests[after][landed]).all()
    assert (requests["landed_ns"][done] <= requests["joined_ns"][done]).all()
    status, prefilled = requests["status"], requests["prefilled_ns"] >= 0
    if experiment.horizon_ns is None and not (status == ABORTED).any() and not (status == REJECTED).any():
        assert (landed == prefilled).all()
        output = requests["output_tokens"]
        asked = np.maximum(requests["prompt_tokens"], 1) + np.maximum(output - 1, 0)
        completions = sum(int(replica.spans["completions"].sum()) for replica in found.replicas)
        dropped = int(landed.sum()) if spec.first_token == "decode" else 0
        by_completion = completions - int((output == 0).sum()) - dropped
        decoded = requests["emitted_tokens"].sum() - by_completion
        hits = sum(
            requests[name].sum() for name in ("prefix_hit_tokens", "prefix_hit_again_tokens") if name in requests
        )
        assert iterations["prefill_tokens"].sum() + decoded + hits == asked.sum() + requests["recomputed_tokens"].sum()
    gaps, weights = found.itl()
    assert (gaps >= 0).all()
    if all(tenant.decoding is None for tenant in experiment.hosted):
        assert weights.sum() == np.maximum(requests["emitted_tokens"] - 1, 0).sum()


def assert_pools_hold(cases: Iterable[int], speculative: bool) -> None:
    for case in cases:
        experiment = apart(case, speculative=speculative)
        found = run_both_ways(experiment, check_invariants=case % 3 == 0)
        assert_balanced(experiment, found)
        if experiment.horizon_ns is None:
            assert np.isin(found.requests["status"], (FINISHED, REJECTED, ABORTED)).all()


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_spans_equal_stepping_and_the_invariants_hold_with_pools_and_links(speculative: bool) -> None:
    # The last have trees, and clients who go before there is room for them.
    assert_pools_hold((*range(3), *(() if speculative else (69, 231, 288))), speculative)


@pytest.mark.parametrize("case", [1580, 1584, 2236])
def test_steps_of_ranks_end_when_news_brings_a_prompt_that_may_start(case: int) -> None:
    # Trees, and prompts that start together: KV lands while a plan is made that does not show it yet.
    experiment = with_ranks(apart(case, speculative=False), case)
    assert_same(run(experiment), run(experiment, fast_forward=False))


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", range(0, 4000, 500))
def test_spans_equal_stepping_where_ranks_compute_and_decode(first: int) -> None:
    for case in some(range(first, first + 500)):
        experiment = with_ranks(apart(case, speculative=case % 4 == 1), case)
        assert_same(run(experiment), run(experiment, fast_forward=False))


@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_machine_at_rest_reads_news_with_all_that_the_instant_brings(n_stages: int) -> None:
    # The client goes in the instant in which its request comes, before any machine has had its turn.
    trace = Trace(arrival_ns=[0], prompt_tokens=[16], output_tokens=[2], abort_ns=[0])
    decode = ReplicaSpec(cost=Linear(n_stages=n_stages), scheduler=EvictNewest(Sarathi()), kv_blocks=1000)
    found = run(two(trace, decode=decode, room="before_prefill"))
    assert (found.requests["status"][0], found.requests["room_ns"][0]) == (ABORTED, -1)


@pytest.mark.parametrize("case", few([2, 26, 29]))
def test_spans_equal_stepping_with_tiers_behind_pools(case: int) -> None:
    experiment = with_tiers(apart(case, speculative=False), case)
    run_both_ways(experiment)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(2000, 4000, 250))
def test_spans_equal_stepping_with_pools_over_many_runs(seed: int, speculative: bool) -> None:
    assert_pools_hold(some(range(seed, seed + 250)), speculative)


@pytest.mark.slow(reason="many random runs")
def test_the_random_runs_with_pools_cover_what_they_should() -> None:
    experiments = [apart(seed, speculative=seed % 2 == 0) for seed in range(40)]
    runs = [run(experiment) for experiment in experiments]
    joined = [columns.requests for columns in runs]
    assert sum(int((requests["landed_ns"] >= 0).sum()) for requests in joined) > 500
    assert sum(int((requests["found_at_decode_tokens"] > 0).sum()) for requests in joined) > 10
    assert sum(int((requests["preemptions"][requests["landed_ns"] >= 0] > 0).sum()) for requests in joined) > 30
    assert sum(int(((requests["prefilled_ns"] >= 0) & (requests["landed_ns"] < 0)).sum()) for requests in joined) > 5
    specs = [experiment.handover for experiment in experiments]
    assert {(spec.first_token, spec.room) for spec in specs if spec is not None} == {
        (first, room) for first in ("prefill", "arrival", "decode") for room in ("after_prefill", "before_prefill")
    }


@patches_the_engine
def test_a_sender_that_gives_its_blocks_back_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    depart = KvConnector.depart

    def hasty(self: KvConnector, batch: Any, id_: int, cached: int, end_ns: int) -> None:
        depart(self, batch, id_, cached, end_ns)
        self._collect(id_)

    monkeypatch.setattr(KvConnector, "depart", hasty)
    trace = Trace(arrival_ns=[0], prompt_tokens=[64], output_tokens=[3])
    with pytest.raises(InvariantError, match="INV-10 at t="):
        run(two(trace), check_invariants=True)


def test_pools_without_the_other_or_without_a_path_are_refused() -> None:
    path = KvPath(link=LinkSpec(inf), bytes_per_token=1.0)
    spec = HandoverSpec(roles=("prefill", "decode"), pools=(0, 1), paths={(0, 1): path}, router=RoundRobin())
    with pytest.raises(ValueError, match="machines that decode alone need some that prefill"):
        replace(spec, roles=("decode", "decode"))
    with pytest.raises(ValueError, match="no path leads from pool 0"):
        replace(spec, paths={})
    with pytest.raises(ValueError, match="take room before_prefill"):
        replace(spec, paths={(0, 1): replace(path, layers=2)})
    trace = Trace(arrival_ns=[0], prompt_tokens=[1], output_tokens=[1])
    one = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(Sarathi()), kv_blocks=10)
    with pytest.raises(ValueError, match="roles for 2 machines and there are 1"):
        Experiment(workload=trace, replicas=(one,), router=RoundRobin(), handover=spec)
