"""Limits that links share, over whole runs: a store that many machines read and write, and a fabric under all transfers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.routers import RoundRobin
from sim.engine import Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.record.columns import HAND_OVER, PLACES
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import Limit, LinkSpec
from sim.engine.tiers.tiers import TierSpec
from tests.engine.costs import Linear
from tests.engine.random_runs import (
    an_experiment,
    apart,
    assert_same,
    run_both_ways,
    with_fleet,
    with_limits,
    with_tiers,
)
from tests.engine.test_handover import MS, two
from tests.engine.test_prefix import S, a_trace
from tests.engine.test_tiers import HOST, ONE_SEAT, A, B, seconds, served
from tests.sample import some
from workloads import Trace

STORE = TierSpec(kind="remote", capacity_bytes=100_000, read_bytes_per_s=1000.0, store="s")
"""A block a second for each machine."""


def drawn(seed: int) -> Experiment:
    found = (apart if seed % 3 == 0 else an_experiment)(seed, speculative=seed % 2 == 0)
    found = with_limits(with_tiers(found, seed), seed)
    return with_fleet(found, seed) if isinstance(found.workload, Trace) and seed % 5 == 0 else found


def test_machines_that_read_one_store_share_its_limit_by_hand() -> None:
    # Three machines in turn. The first computes A by 1 s; its two blocks are in the store by 3 s. At 10 s the others ask for them:
    # two blocks each, in two seconds, or where the store gives 1,250 bytes a second, together in 3.2.
    trace = a_trace((0, 9, 1, A), (10, 9, 1, A), (10, 9, 1, A))
    free = served(trace, STORE, machines=3)
    assert seconds(free, "load_ns") == [0.0, 2.0, 2.0]
    limited = served(trace, replace(STORE, limits=(Limit("read", 1250.0, "read"),)), machines=3)
    assert seconds(limited, "load_ns") == [0.0, 2.0, 3.2]
    assert seconds(limited, "finish_ns") == [1.0, 13.0, 14.2]
    # What is written has no part in it.
    written = served(trace, replace(STORE, limits=(Limit("written", 1250.0, "write"),)), machines=3)
    assert seconds(written, "load_ns") == [0.0, 2.0, 2.0]


def test_machines_that_write_one_store_share_its_limit_by_hand() -> None:
    # Two machines compute A and B by 1 s, two and three blocks: written by 3 s and 4 s, or where the store takes a block a second
    # from both together, by 3 s and 6 s.
    trace = a_trace((0, 9, 1, A), (0, 13, 1, B))
    moved = served(trace, replace(STORE, limits=(Limit("written", 1000.0, "write"),)), machines=2).transfers()
    assert moved is not None
    assert (moved["sent_ns"] / S).tolist() == [3.0, 6.0]
    assert (moved["begin_ns"] / S).tolist() == [1.0, 1.0]


def test_a_load_that_would_wait_for_the_store_is_left_out() -> None:
    # Alone two blocks take 2 s, as long as A and the fixed second; behind the other machine's, longer.
    trace = a_trace((0, 9, 1, A), (10, 9, 1, A), (10, 9, 1, A))
    limited = replace(STORE, skip_when_slower=True, limits=(Limit("read", 1000.0, "read"),))
    columns = served(trace, limited, machines=3, cost=Linear(fixed_s=2.5))
    assert columns.requests["remote_hit_tokens"].tolist() == [0, 8, 0]
    assert columns.meta["tiers"]["remote"]["skipped_slower"] > 0


def test_machines_that_ask_in_one_instant_are_served_in_their_order() -> None:
    # Two machines in turn, the first with iterations of 1.5 s. Both ask for what the other has computed at 26 s: the first after
    # an iteration that began at 24.5 s, the second after six of 1 s, which are one event or six.
    trace = a_trace(
        (0, 9, 1, A), (0, 13, 1, B), (20, 1, 1, []), (20, 1, 6, []), (20.2, 1, 1, []), (20.5, 9, 1, A), (24.5, 1, 1, []),
        (24.6, 1, 1, []), (24.7, 13, 1, B),
    )  # fmt: skip
    tier = replace(STORE, limits=(Limit("read", 1000.0, "read"),))
    spec = ReplicaSpec(
        cost=Linear(fixed_s=1.0), scheduler=ONE_SEAT, kv_blocks=4, block_tokens=4, prefix_cache="blocks", tiers=(tier,),
        block_bytes=1000,
    )  # fmt: skip
    replicas = (replace(spec, cost=Linear(fixed_s=1.5)), spec)
    for fast_forward in (True, False):
        columns = run(Experiment(workload=trace, replicas=replicas, router=RoundRobin()), fast_forward=fast_forward)
        moved = columns.transfers()
        assert moved is not None
        loads = moved["destination"] == PLACES.index("device")
        assert (moved["asked_ns"][loads] / S).tolist() == [26.0, 26.0]
        assert (moved["sent_ns"][loads] / S).tolist() == [29.0, 31.0]


def test_hand_overs_of_several_senders_share_a_fabric_by_hand() -> None:
    # Two machines prefill, each with a link of its own to the machine that decodes; the fabric carries as much as one of them.
    # Both prompts are there at once, 16 kB each at 16 MB/s.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[16, 16], output_tokens=[3, 3])
    one = two(trace)
    for limits, ms in (((), [1, 1]), ((Limit("fabric", 16e6),), [1, 2])):
        spec = HandoverSpec(
            roles=("prefill", "prefill", "decode"),
            pools=(0, 0, 1),
            paths={(0, 1): KvPath(link=LinkSpec(16e6, limits=limits), bytes_per_token=1000.0)},
            router=RoundRobin(),
        )
        experiment = replace(one, replicas=(one.replicas[0],) * 3, handover=spec)
        columns = run(experiment, check_invariants=True)
        requests = columns.requests
        assert ((requests["landed_ns"] - requests["sent_ns"]) // MS).tolist() == ms
        assert_same(columns, run(experiment, fast_forward=False))


def test_models_of_a_machine_share_a_link_by_its_name() -> None:
    # Two models on one machine, a prompt each; A and B are computed one after the other, and the second waits for the link.
    trace = replace(a_trace((0, 9, 1, A), (0, 13, 1, B)), models=("a", "b"), model_index=[0, 1])
    for link, begun in (("", [1.0, 2.0]), ("host", [1.0, 3.0])):
        tier = replace(HOST, write_bytes_per_s=1000.0, latency_s=0.0, link=link)
        spec = ReplicaSpec(
            cost=Linear(fixed_s=1.0), scheduler=ONE_SEAT, kv_blocks=4, block_tokens=4, prefix_cache="blocks", tiers=(tier,),
            block_bytes=1000,
        )  # fmt: skip
        machine = MachineSpec(hosted=(replace(spec, model=0), replace(spec, model=1)))
        experiment = Experiment(workload=trace, replicas=(machine,), router=RoundRobin())
        columns = run_both_ways(experiment)
        moved = columns.transfers()
        assert moved is not None
        assert (moved["begin_ns"] / S).tolist() == begun
        # The link that both have counts once.
        assert columns.meta["tiers"]["host"]["link_busy_ns"] == 5 * S


def assert_limits_hold(experiment: Experiment) -> int:
    """No stretch of a run has more bytes of a limit than it allows; how many transfers there were under one."""
    columns = run(experiment)
    moved = columns.transfers()
    if moved is None or experiment.fleet is not None:
        return 0
    cores, n = experiment.hosted, 0
    limits = {limit for core in cores for tier in core.tiers for limit in tier.limits}
    paths = {} if experiment.handover is None else experiment.handover.paths
    limits |= {limit for path in paths.values() for limit in path.link.limits}
    first = [machine for machine, spec in enumerate(experiment.machines) for _ in spec.hosted * spec.ranks]
    for limit in limits:
        mine = []
        for row in range(len(moved["what"])):
            replica, tier, handed = (int(moved[name][row]) for name in ("replica", "tier", "what"))
            if handed == HAND_OVER:
                assert experiment.handover is not None
                pools = experiment.handover.pools
                ends = (pools[first[int(moved[f"{end}_replica"][row])]] for end in ("source", "destination"))
                sender, receiver = ends
                link = paths[sender, receiver].link
                if limit in link.limits and paths[sender, receiver].layers == 1:
                    mine.append(row)
            elif limit in cores[replica].tiers[tier].limits:
                reads = moved["destination"][row] == PLACES.index("device")
                if limit.way == "both" or limit.way == ("read" if reads else "write"):
                    mine.append(row)
        n += len(mine)
        begin, sent, size = (moved[name][mine] for name in ("begin_ns", "sent_ns", "bytes"))
        order = np.argsort(sent, kind="stable")
        for from_ns in np.unique(begin)[:: max(len(begin) // 20, 1)]:
            carried = np.cumsum(np.where(begin[order] >= from_ns, size[order], 0))
            room = (sent[order] - from_ns + len(mine)) * limit.bytes_per_s / 1e9
            assert (carried <= room)[begin[order] >= from_ns].all()
    return n


def test_no_stretch_of_a_run_carries_more_than_its_limits() -> None:
    assert sum(assert_limits_hold(drawn(seed)) for seed in range(16)) > 100


def assert_spans_equal_stepping(seeds: range) -> int:
    slower = 0
    for seed in seeds:
        experiment = drawn(seed)
        slower += run_both_ways(experiment, check_invariants=False).meta.get("tiers") is not None
    return slower


def test_spans_equal_stepping_with_limits() -> None:
    assert assert_spans_equal_stepping(range(5)) > 3


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(30_000, 32_000, 500))
def test_spans_equal_stepping_with_limits_over_many_runs(seed: int) -> None:
    assert_spans_equal_stepping(some(range(seed, seed + 500)))


def test_the_books_hold_at_every_event_with_limits() -> None:
    for seed in range(100, 102):
        experiment = drawn(seed)
        checked, plain = run(experiment, check_invariants=True), run(experiment)
        np.testing.assert_array_equal(checked.requests["finish_ns"], plain.requests["finish_ns"])


def test_a_limit_that_is_never_reached_changes_nothing() -> None:
    ample = (Limit("ample", 1e30),)
    for seed in range(3):
        experiment = with_tiers(an_experiment(seed, speculative=False), seed)
        limited = tuple(
            replace(
                spec,
                hosted=tuple(
                    replace(core, tiers=tuple(replace(tier, limits=ample) for tier in core.tiers))
                    if not any(tier.kind == "peer" for tier in core.tiers)
                    else core
                    for core in spec.hosted
                ),
            )
            for spec in experiment.machines
        )
        assert_same(run(experiment), run(replace(experiment, replicas=limited)))


def test_a_limit_on_what_host_memory_that_others_read_gives_up_is_refused() -> None:
    tiers = (
        HOST,
        TierSpec(kind="disk", capacity_bytes=9, read_bytes_per_s=1.0, write="eviction", limits=(Limit("x", 1.0),)),
        TierSpec(kind="peer", read_bytes_per_s=1.0),
    )
    with pytest.raises(ValueError, match="write it through, or leave the limit out"):
        served(a_trace((0, 9, 1, A)), *tiers)
