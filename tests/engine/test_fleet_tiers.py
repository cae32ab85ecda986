"""Memory behind the KV cache of machines that fail: what goes with them, and what stays. Times and tiers as in `test_tiers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.routers import RoundRobin
from policies.vllm import Vllm
from sim.engine import Columns, Experiment, ReplicaSpec
from sim.engine.serve import loading
from sim.engine.spec.lifecycle import DRAINING, OFF, FleetSpec, Outage, Scaling
from sim.engine.tiers.tiers import TierSpec
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.engine.random_runs import run_both_ways
from tests.engine.test_fleet import Says, changes
from tests.engine.test_prefix import S, a_trace
from tests.engine.test_tiers import HOST, ONE_SEAT, A, B
from workloads import Trace

NS = 1e-9

DISK = TierSpec(kind="disk", capacity_bytes=100_000, read_bytes_per_s=4000.0, write_bytes_per_s=2000.0, latency_s=0.5)
STORE = TierSpec(
    kind="remote", capacity_bytes=100_000, read_bytes_per_s=4000.0, write_bytes_per_s=2000.0, latency_s=0.5, store="s"
)


def served(
    trace: Trace, *tiers: TierSpec, fails_s: float | None = None, machines: int = 1, scaling: Scaling | None = None, **spec: Any
) -> Columns:  # fmt: skip
    """The first machine fails at *fails_s* and is back a nanosecond later; requests go on."""
    replica = ReplicaSpec(
        **{
            "cost": Linear(fixed_s=1.0), "scheduler": ONE_SEAT, "kv_blocks": 4, "block_tokens": 4, "prefix_cache": "blocks",
            "tiers": tiers, "block_bytes": 1000, **spec,
        },
    )  # fmt: skip
    fleet = FleetSpec(
        pools=(0,) * machines,
        names=("all",),
        scaling=(scaling,),
        failing=(None,),
        outages=() if fails_s is None else (Outage(machine=0, at_s=fails_s, for_s=0.0),),
    )
    experiment = Experiment(workload=trace, replicas=(replica,) * machines, router=RoundRobin(), fleet=fleet)
    return run_both_ways(experiment)


def seconds(columns: Columns, name: str) -> list[float]:
    return (columns.requests[name] / S).tolist()


@pytest.mark.parametrize(
    ("tier", "hits", "finish_s", "kept"), [(HOST, 0, 6.0, 5000), (DISK, 0, 6.0, 5000), (STORE, 8, 7.0, 2000)]
)
def test_host_memory_and_disks_of_a_machine_that_fails_are_lost_and_a_remote_store_stays(
    tier: TierSpec, hits: int, finish_s: float, kept: int
) -> None:
    """A is computed by 1 s and written by 2.5 s, B from 3 s to 4 s; idle, the machine fails at 4.5 s. A comes back at 5 s: it is
    read in a second, or computed. B's blocks, on the link until 5.5 s, never came: it is computed at 10 s."""
    trace = a_trace((0, 9, 1, A), (3, 13, 1, B), (5, 9, 1, A), (10, 13, 1, B))
    columns = served(trace, tier, fails_s=4.5)
    assert columns.requests[f"{tier.kind}_hit_tokens"].tolist() == [0, 0, hits, 0]
    assert seconds(columns, "finish_ns") == [1.0, 4.0, finish_s, 11.0]
    assert columns.requests["failures"].tolist() == [0, 0, 0, 0]
    # Two blocks of A, and the three of B that are written in the end; to a store that others read they come when somebody asks.
    assert columns.meta["tiers"][tier.kind]["used_bytes"] == kept


def test_what_had_come_to_a_remote_store_before_its_writer_failed_is_found() -> None:
    trace = a_trace((0, 9, 1, A), (3, 13, 1, B), (10, 13, 1, B))
    assert served(trace, STORE, fails_s=6.5).requests["remote_hit_tokens"].tolist() == [0, 0, 12]


def test_a_load_in_flight_ends_with_its_machine_and_its_request_goes_on() -> None:
    """A, back at 5 s, is on the link until 6.5 s; at 5.2 s its machine fails and it is computed."""
    columns = served(a_trace((0, 9, 1, A), (3, 13, 1, B), (5, 9, 1, A)), HOST, fails_s=5.2)
    assert seconds(columns, "load_ns") == [0.0, 0.0, pytest.approx(0.2)]
    assert seconds(columns, "finish_ns")[2] == pytest.approx(6.2 + NS, abs=1e-10)
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 0]
    assert columns.requests["failures"].tolist() == [0, 0, 1]
    assert columns.requests["recomputed_tokens"].tolist() == [0, 0, 0]


def test_a_load_from_the_memory_of_a_machine_that_fails_ends_in_vain() -> None:
    """The second machine reads what the first has from 10 s on, until 12.25 s; the first fails at 11 s, and A is computed then."""
    peer = TierSpec(kind="peer", read_bytes_per_s=1000.0, latency_s=0.25)
    columns = served(a_trace((0, 9, 1, A), (10, 9, 1, A)), HOST, peer, fails_s=11.0, machines=2)
    assert seconds(columns, "finish_ns") == [1.0, 12.0]
    assert seconds(columns, "load_ns") == [0.0, 1.0]
    assert columns.requests["peer_hit_tokens"].tolist() == [0, 0]
    assert columns.requests["failures"].tolist() == [0, 0]
    # Had it failed later, the load would have come.
    late = served(a_trace((0, 9, 1, A), (10, 9, 1, A)), HOST, peer, fails_s=12.5, machines=2)
    assert late.requests["peer_hit_tokens"].tolist() == [0, 8]


def test_of_peers_that_have_as_much_the_first_is_read() -> None:
    """The first two of three machines have computed A, and the third reads it from 10 s on; at 11 s the first fails. The second is
    read then, from 12 s, when the link is free again, to 14.25 s."""
    peer = TierSpec(kind="peer", read_bytes_per_s=1000.0, latency_s=0.25)
    trace = a_trace((0, 9, 1, A), (0, 9, 1, A), (10, 9, 1, A))
    columns = served(trace, HOST, peer, fails_s=11.0, machines=3)
    assert columns.requests["replica"].tolist() == [0, 1, 2]
    assert seconds(columns, "load_ns")[2] == 4.25
    assert columns.requests["peer_hit_tokens"].tolist() == [0, 0, 8]


@patches_the_engine
@pytest.mark.parametrize(("fails_s", "loaded"), [(None, 0), (117.5, 8)])
def test_loads_in_vain_count_no_more_when_the_machine_has_failed(
    fails_s: float | None, loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B's KV has come to the fourth request and gone back to an answer that grows; after one such load it is computed."""
    monkeypatch.setattr(loading, "_TRIES", 1)
    quick = replace(STORE, read_bytes_per_s=40_000.0, latency_s=0.0)
    trace = a_trace(
        (0, 9, 1, A), (2, 9, 1, B[:3]), (4, 1, 32, []), (100, 9, 1, A), (100, 9, 1, B[:3]), (100, 1, 18, [])
    )  # fmt: skip
    columns = served(trace, quick, fails_s=fails_s, kv_blocks=8)
    requests = columns.requests
    assert requests["remote_hit_tokens"][4] + requests["tier_again_hit_tokens"][4] == loaded


def test_a_machine_that_drains_waits_for_what_it_loads() -> None:
    """Two machines in turn. At 5.5 s, when there is to be one, each has a request: the first one decodes, that of the second waits
    for its KV until 6.5 s and ends at 7.5 s."""
    both = [(0, 9, 1, A), (0, 9, 1, A), (3, 13, 1, B), (3, 13, 1, B), (5, 1, 6, []), (5, 9, 1, A)]
    to_one = Scaling(policy=Says((1,)), min_machines=1, initial=2, interval_s=5.5)
    columns = served(a_trace(*both), HOST, machines=2, scaling=to_one)
    assert columns.requests["host_hit_tokens"].tolist() == [0, 0, 0, 0, 0, 8]
    assert seconds(columns, "finish_ns")[5] == 7.5
    assert [(at_s, machine, state) for at_s, machine, state, _ in changes(columns)] == [
        (5.5, 1, DRAINING),
        (pytest.approx(7.5 + NS, abs=1e-12), 1, OFF),
    ]


def test_sequences_that_were_moved_to_host_memory_are_computed_again_when_that_is_gone() -> None:
    """At 3.2 s the first has the KV of 6 tokens and has emitted 3, the second 4 tokens in host memory and has emitted 1. The first
    ends with its prompt of 7 and a step, the second, for which there is room then, with its prompt of 5 and three steps."""
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[4, 4], output_tokens=[5, 5])
    both = Vllm(max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False, scheduler_reserve_full_isl=False)
    columns = served(
        trace, replace(HOST, latency_s=0.0), fails_s=3.2, scheduler=both, kv_blocks=3, prefix_cache=None, swaps=True
    )
    assert columns.requests["recomputed_tokens"].tolist() == [6, 4]
    assert columns.requests["swap_hit_tokens"].tolist() == [0, 0]
    assert seconds(columns, "finish_ns") == [pytest.approx(5.2, abs=1e-8), pytest.approx(9.2, abs=1e-8)]
    assert columns.meta["tiers"]["host"]["used_bytes"] == 0
