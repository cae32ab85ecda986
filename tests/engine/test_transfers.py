"""The record of KV transfers: each that crosses a link is a row, of tiers and between machines, with its ends and its bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from sim.engine import run
from sim.engine.record.columns import HAND_OVER, LOAD, PLACES, TRANSFER_NAMES
from sim.engine.spec.roles import KvPath
from sim.engine.tiers.links import LinkSpec
from sim.engine.tiers.tiers import TierSpec
from sim.metrics import columns as of_metrics
from tests.engine.random_runs import an_experiment, apart, with_fleet, with_tiers
from tests.engine.test_handover import MS, two
from tests.engine.test_prefix import a_trace
from tests.engine.test_tiers import HOST, A, B, served
from workloads import Trace
from workloads.columns import IntArray


def rows(columns: Any) -> list[tuple[Any, ...]]:
    """(what, request, from, to, bytes, asked, begun, sent, arrived) of each transfer."""
    found = columns.transfers()
    ends = [
        [(PLACES[place], number) for place, number in zip(found[end], found[f"{end}_replica"], strict=True)]
        for end in ("source", "destination")
    ]
    names = ("request", "bytes", "asked_ns", "begin_ns", "sent_ns", "arrived_ns")
    request, n_bytes, *times = (found[name].tolist() for name in names)
    what = [TRANSFER_NAMES[each] for each in found["what"]]
    return list(zip(what, request, *ends, n_bytes, *times, strict=True))


def test_a_hand_over_is_a_transfer_from_one_device_to_another() -> None:
    # Both prompts of 16 tokens are done together, at 1 ms or so; each is 16 kB, a millisecond and a half on the link with 1 ms of
    # latency, and 1 ns a byte to lay it out. The second waits for the first.
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[16, 16], output_tokens=[3, 3])
    link = LinkSpec(16_000 / 1.5e-3, latency_s=1e-3)
    columns = run(two(trace, path=KvPath(link=link, bytes_per_token=1000.0, repack_s_per_byte=1e-9)))
    asked, half = int(columns.requests["room_ns"][0]) + 1, 3 * MS // 2
    sent = [asked + half, asked + 2 * half]
    assert rows(columns) == [
        ("hand_over", 0, ("device", 0), ("device", 1), 16_000, asked, asked, sent[0], sent[0] + MS + 16_000),
        ("hand_over", 1, ("device", 0), ("device", 1), 16_000, asked, sent[0], sent[1], sent[1] + MS + 16_000),
    ]
    assert columns.requests["landed_ns"].tolist() == [each[-1] for each in rows(columns)]


def test_a_load_says_whose_memory_it_is_from_and_a_store_where_it_goes() -> None:
    tiers = (
        replace(HOST, latency_s=0.0),
        TierSpec(kind="remote", capacity_bytes=10_000, read_bytes_per_s=1000.0, min_load_tokens=100, store="s"),
        TierSpec(kind="peer", read_bytes_per_s=1000.0),
    )
    columns = served(a_trace((0, 9, 1, A), (10, 9, 1, A)), *tiers, machines=2)
    assert [each[:4] for each in rows(columns)] == [
        ("store", 0, ("device", 0), ("host", 0)),
        ("store", 0, ("device", 0), ("remote", -1)),
        ("load", 1, ("peer", 0), ("device", 1)),
        # What has come from a peer is written to host memory, too.
        ("store", 1, ("device", 1), ("host", 1)),
    ]


def test_what_host_memory_gives_up_goes_from_there_to_the_disk() -> None:
    host = replace(HOST, write="eviction", capacity_bytes=2000, latency_s=0.0)
    disk = TierSpec(kind="disk", capacity_bytes=10_000, read_bytes_per_s=1000.0, write="eviction")
    columns = served(a_trace((0, 9, 1, A), (10, 13, 1, B), (20, 13, 1, [21, 22, 23, 24])), host, disk)
    ends = [each[2:4] for each in rows(columns)]
    assert (("device", 0), ("host", 0)) in ends
    assert (("host", 0), ("disk", 0)) in ends
    assert (("device", 0), ("disk", 0)) not in ends


def test_bytes_that_requests_have_sent_are_those_of_the_record() -> None:
    n_sent = n_again = 0
    for seed in range(12):
        drawn = apart(seed, speculative=seed % 2 == 0)
        drawn = with_tiers(drawn, seed) if seed % 2 else drawn
        columns = run(with_fleet(drawn, seed) if isinstance(drawn.workload, Trace) and seed % 3 == 0 else drawn)
        found, requests = columns.transfers(), columns.requests
        assert found is not None
        handed = found["what"] == HAND_OVER
        assert (found["tier"][handed] == -1).all()
        sent = np.bincount(found["request"][handed], found["bytes"][handed], len(requests["sent_bytes"]))
        np.testing.assert_array_equal(sent, requests["sent_bytes"])
        assert (found["bytes"][handed] > 0).all()
        # The latest transfer of a request that has landed arrived when it landed.
        last = np.full(len(sent), -1, np.int64)
        np.maximum.at(last, found["request"][handed], found["arrived_ns"][handed])
        landed = (requests["landed_ns"] >= 0) & (sent > 0)
        if "prompts_computed" not in requests:
            np.testing.assert_array_equal(last[landed], requests["landed_ns"][landed])
        n_sent += int(handed.sum())
        n_again += int((np.bincount(found["request"][handed]) > 1).sum()) if handed.any() else 0
    assert n_sent > 50
    assert n_again > 0


def test_the_ends_of_a_load_are_a_tier_and_the_device_that_asked() -> None:
    n = 0
    for seed in range(12):
        found = run(with_tiers(an_experiment(seed, speculative=False), seed)).transfers()
        if found is None:
            continue
        loads = found["what"] == LOAD
        here, there = ("destination", "source")
        for mine, (device, tier) in ((loads, (here, there)), (~loads, (there, here))):
            near = found[device][mine]
            # What a tier evicts goes on to the next.
            assert ((near == PLACES.index("device")) | ((near < found[tier][mine]) & (device == there))).all()
            np.testing.assert_array_equal(found[f"{device}_replica"][mine], found["replica"][mine])
            kinds, owners = found[tier][mine], found[f"{tier}_replica"][mine]
            assert (kinds != PLACES.index("device")).all()
            own = (kinds == PLACES.index("host")) | (kinds == PLACES.index("disk"))
            np.testing.assert_array_equal(owners[own], found["replica"][mine][own])
            assert (owners[kinds == PLACES.index("remote")] == -1).all()
            peer = kinds == PLACES.index("peer")
            assert (owners[peer] != found["replica"][mine][peer]).all()
        n += len(loads)
    assert n > 200


def most_at_once(begin_ns: IntArray, sent_ns: IntArray) -> int:
    """The most transfers that have a place at one instant; one that ends leaves it to one that begins."""
    held = sent_ns > begin_ns
    changes = sorted([(at, 1) for at in begin_ns[held].tolist()] + [(at, -1) for at in sent_ns[held].tolist()])
    return max(accumulate(change for _, change in changes), default=0)


def test_the_record_adds_up_to_the_facts_of_each_tier_and_no_link_has_more_at_once_than_its_places() -> None:
    n = crowded = 0
    for seed in range(12):
        drawn = (apart if seed % 3 == 0 else an_experiment)(seed, speculative=False)
        experiment = with_tiers(drawn, seed)
        columns = run(experiment)
        found = columns.transfers()
        if found is None:
            continue
        loads, handed = found["what"] == LOAD, found["what"] == HAND_OVER
        for kind, facts in columns.meta["tiers"].items():
            place = PLACES.index(kind)
            read, written = loads & (found["source"] == place), ~loads & ~handed & (found["destination"] == place)
            assert (facts["loads"], facts["load_bytes"]) == (read.sum(), found["bytes"][read].sum())
            assert (facts["stores"], facts["store_bytes"]) == (written.sum(), found["bytes"][written].sum())
        for replica, tier in {*zip(found["replica"].tolist(), found["tier"].tolist(), strict=True)}:
            if tier < 0:
                continue
            mine = (found["replica"] == replica) & (found["tier"] == tier)
            at_once = most_at_once(found["begin_ns"][mine], found["sent_ns"][mine])
            places = experiment.hosted[replica].tiers[tier].concurrent_transfers
            assert at_once <= places
            crowded += at_once == places
        n += len(loads)
    assert n > 200
    assert crowded > 4


def test_names_of_transfers_are_those_that_metrics_write() -> None:
    assert of_metrics.TRANSFER_NAMES == TRANSFER_NAMES
    assert of_metrics.PLACES == PLACES
