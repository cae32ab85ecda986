"""A link against a queue counted by hand, and against Lindley's recurrence."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from sim.engine.links import Link, LinkSpec


def test_an_idle_link_adds_bytes_over_bandwidth_and_its_latency() -> None:
    transfer = Link(LinkSpec(1e9, latency_s=2e-6)).send(1_000, 500)
    assert (transfer.begin_ns, transfer.sent_ns, transfer.arrived_ns) == (1_000, 1_500, 3_500)


def test_a_link_without_limit_adds_only_latency() -> None:
    link = Link(LinkSpec(inf, latency_s=7e-9))
    assert [link.send(10, 10**12).arrived_ns, link.send(10, 1).arrived_ns] == [17, 17]


def test_two_at_once_and_the_third_waits_for_the_first_to_be_sent_not_to_arrive() -> None:
    link = Link(LinkSpec(1e9, latency_s=1.0, concurrent_transfers=2))
    assert [link.send(0, size).begin_ns for size in (100, 300, 50, 50)] == [0, 0, 100, 150]
    assert link.wait_ns(150) == 50
    assert link.busy_ns == 500


def test_one_place_is_lindleys_queue() -> None:
    rng = np.random.default_rng(3)
    asked = np.cumsum(rng.integers(0, 200, 500)).tolist()
    sizes = rng.integers(1, 200, 500).tolist()
    link, free = Link(LinkSpec(1e9)), 0
    for now, size in zip(asked, sizes, strict=True):
        waited = max(0, free - now)
        free = now + waited + size
        transfer = link.send(now, size)
        assert (transfer.waited_ns, transfer.arrived_ns) == (waited, free)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": 1.0, "latency_s": -1.0},
        {"bandwidth_bytes_per_s": 1.0, "concurrent_transfers": 0},
    ],
)
def test_what_no_link_can_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LinkSpec(**wrong)  # type: ignore[arg-type]
