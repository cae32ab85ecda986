"""Words for people."""

from __future__ import annotations

import pytest

from sim.text import short_keys


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["workload.arrivals.concurrency", "replicas"], ["concurrency", "replicas"]),
        (["scheduler.k", "decoding.k"], ["scheduler.k", "decoding.k"]),
        (["pools.p.replicas", "pools.d.replicas", "pools.d.parallel.tensor"], ["p.replicas", "d.replicas", "d.tensor"]),
        (["pools.p.replicas", "links.net.latency_s", "replicas"], ["p.replicas", "net.latency_s", "replicas"]),
        (["pools.a.x", "links.a.x"], ["pools.a.x", "links.a.x"]),
        (["pools.a"], ["a"]),
    ],
)
def test_keys_are_short_and_say_whose_they_are(keys: list[str], short: list[str]) -> None:
    assert short_keys(keys) == short
