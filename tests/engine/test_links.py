"""A link against a queue counted by hand, and against Lindley's recurrence."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import numpy as np
import pytest

from sim.engine.tiers.links import Limit, Link, Links, LinkSpec, Slowdown, Transfer


def test_an_idle_link_adds_bytes_over_bandwidth_and_its_latency() -> None:
    transfer = Link(LinkSpec(1e9, latency_s=2e-6)).send(1_000, 500)
    assert (transfer.begin_ns, transfer.sent_ns, transfer.arrived_ns) == (1_000, 1_500, 3_500)


def test_a_link_without_limit_adds_only_latency() -> None:
    link = Link(LinkSpec(inf, latency_s=7e-9))
    assert link.takes_ns(10, 10**12) == 7
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
        assert (transfer.begin_ns, transfer.arrived_ns) == (now + waited, free)


def test_a_transfer_that_spans_changes_goes_on_at_what_there_is() -> None:
    """1 byte a ns; a quarter of that from 1,000 to 1,400 ns, nothing from 2,000 to 2,500 ns, and 30 ns more from 3,000 ns on."""
    slow = (
        Slowdown(at_s=2e-6, for_s=5e-7, factor=0.0),
        Slowdown(at_s=1e-6, for_s=4e-7, factor=0.25),
        Slowdown(at_s=3e-6, added_latency_s=3e-8),
    )
    spec = LinkSpec(1e9, latency_s=1e-8, slowdowns=slow)
    # 200 before 1,000; 100 by 1,400; the last 50 by 1,450.
    assert Link(spec).send(800, 350).arrived_ns == 1_460
    assert Link(spec).send(800, 200).arrived_ns == 1_010
    assert Link(spec).send(1_100, 50).arrived_ns == 1_310
    # 100 until the link stands still, the 101st byte when it goes on.
    assert [Link(spec).send(1_900, size).sent_ns for size in (100, 101)] == [2_000, 2_501]
    # Latency is that of the instant in which the last byte is sent.
    assert [Link(spec).send(at, 100).arrived_ns for at in (2_890, 2_900)] == [3_000, 3_040]
    link = Link(spec)
    assert [link.send(800, size).sent_ns for size in (350, 50)] == [1_450, 1_500]
    assert link.busy_ns == 700
    # What a load is expected to take is by the link of the moment.
    assert [Link(spec).takes_ns(at, 100) for at in (0, 1_399, 3_000)] == [110, 410, 140]
    # Where it stands still, from when it goes on.
    assert Link(spec).takes_ns(2_100, 100) == 510


def test_a_link_whose_user_is_gone_is_free_and_was_busy_until_then() -> None:
    link = Link(LinkSpec(1e9, concurrent_transfers=2))
    for size in (100, 300, 500):
        link.send(0, size)
    link.stop(200)
    assert link.busy_ns == 100 + 200 + 100
    assert link.send(210, 10).begin_ns == 210


def test_a_transfer_to_nobody_gives_its_place_back_unless_others_wait_for_it() -> None:
    link = Link(LinkSpec(1e9))
    first, second = link.send(0, 100), link.send(0, 100)
    link.cancel(first, 50)
    assert (link.wait_ns(50), link.busy_ns) == (150, 200)
    link.cancel(second, 50)
    assert (link.wait_ns(50), link.busy_ns) == (50, 100)
    third = link.send(60, 100)
    link.cancel(third, 130)
    assert (third.begin_ns, link.wait_ns(130), link.busy_ns) == (100, 0, 130)


def test_a_place_that_waits_for_the_last_layer_is_not_at_work_whenever_it_is_given_back() -> None:
    """100 bytes that came evenly from 0 to 1,000 ns, the last 10 then: at work for 100 ns, free at 1,010."""
    for at_ns, busy_ns in ((1_005, 100), (2_000, 100)):
        for ends in ("stop", "cancel"):
            link = Link(LinkSpec(1e9))
            transfer = link.send(1_000, 100, since_ns=0, last_bytes=10)
            assert transfer.sent_ns == 1_010
            link.stop(at_ns) if ends == "stop" else link.cancel(transfer, at_ns)
            assert (link.busy_ns, link.send(at_ns, 1).begin_ns) == (busy_ns, at_ns)


def test_a_cancelled_transfer_leaves_nothing_of_the_place_that_it_held_to_a_later_stop() -> None:
    """At work from 0 to 100 ns for a transfer that is cancelled at 1,005, and for 2 of the next one's 50 bytes."""
    link = Link(LinkSpec(1e9))
    link.cancel(link.send(1_000, 100, since_ns=0, last_bytes=10), 1_005)
    link.send(1_005, 50)
    link.stop(1_007)
    assert link.busy_ns == 100 + 2


def test_a_transfer_too_small_to_take_of_a_limit_gives_nothing_of_it_back() -> None:
    links, spec = Links(), LinkSpec(1.0, limits=(Limit("fabric", 1e12),))
    one, two = links.of("one", spec), links.of("two", spec)
    one.cancel(one.send(0, 1), 0)
    assert (one.busy_ns, two.send(0, 1).sent_ns) == (0, 10**9)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"at_s": -1.0}, "at_s is a finite time of at least 0"),
        ({"at_s": 0.0, "factor": 1.5}, "factor is a share of the bandwidth"),
        ({"at_s": 0.0, "factor": 0.0}, "without for_s it never goes on"),
        ({"at_s": 0.0}, "nothing is degraded"),
    ],
)
def test_what_no_slowdown_can_be_is_refused(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Slowdown(**wrong)


def test_two_slowdowns_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"from 3 s on the link is slowed down twice: the one of 1 s holds to 4 s"):
        LinkSpec(1.0, slowdowns=(Slowdown(at_s=3.0, factor=0.5), Slowdown(at_s=1.0, for_s=3.0, factor=0.5)))


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


def test_two_links_with_a_limit_carry_no_more_than_that_together() -> None:
    # 1 byte a ns each, and no more than that together.
    links, spec = Links(), LinkSpec(1e9, latency_s=5e-9, limits=(Limit("fabric", 1e9),))
    one, two = links.of("one", spec), links.of("two", spec)
    assert one.send(0, 100).times == (0, 0, 100, 105)
    # Begun at once, and through when the first has let it.
    assert two.send(0, 100).times == (0, 0, 200, 205)
    # Its own link is free at 100, the limit at 200.
    assert one.send(50, 50).times == (50, 100, 250, 255)
    assert links.of("three", LinkSpec(1e9)).send(60, 10).sent_ns == 70


def test_a_transfer_that_waits_for_its_own_link_leaves_the_limit_to_others() -> None:
    links, spec = Links(), LinkSpec(1e9, limits=(Limit("fabric", 2e9),))
    one, two = links.of("one", spec), links.of("two", spec)
    assert [one.send(0, 100).sent_ns for _ in range(2)] == [100, 200]
    # The limit is taken from 0 to 50 and from 100 to 150: 100 bytes of the third pass between, the others behind.
    assert two.send(0, 100).sent_ns == 100
    assert two.send(100, 120).sent_ns == 220


def test_reading_and_writing_have_limits_of_their_own() -> None:
    limits = (Limit("store, read", 1e9, "read"), Limit("store, written", 5e8, "write"))
    links, spec = Links(), LinkSpec(1e10, limits=limits)
    one, two = links.of("one", spec), links.of("two", spec)
    assert one.send(0, 100).sent_ns == 100
    assert two.send(0, 100, writes=True).sent_ns == 200
    assert links.of("three", spec).send(0, 100).sent_ns == 200
    assert links.of("four", spec).send(0, 100, writes=True).sent_ns == 400


def test_the_time_that_a_load_would_take_counts_its_limits() -> None:
    links, spec = Links(), LinkSpec(1e9, latency_s=7e-9, limits=(Limit("fabric", 1e9),))
    one, two = links.of("one", spec), links.of("two", spec)
    one.send(0, 100)
    for link in (two, one):
        expected = link.wait_ns(20) + link.takes_ns(20, 30)
        assert link.send(20, 30).arrived_ns - 20 == expected


@pytest.mark.parametrize("ends", ["stop", "cancel"])
def test_what_a_link_that_stops_had_of_a_limit_is_there_for_others(ends: str) -> None:
    links, spec = Links(), LinkSpec(1e9, limits=(Limit("fabric", 1e9),))
    one, two, three = (links.of(name, spec) for name in ("one", "two", "three"))
    transfer = one.send(0, 100)
    assert two.send(0, 50).sent_ns == 150
    if ends == "stop":
        one.stop(40)
    else:
        one.cancel(transfer, 40)
    assert one.busy_ns == 40
    # 60 are left of the first; the second keeps its times.
    assert three.send(40, 70).sent_ns == 160


def brute_force(taken: Counter[int], begin: int, n_bytes: int) -> int:
    """The end of a transfer of so many bytes that takes the first nanoseconds that are free, one for each byte."""
    at = begin
    for _ in range(n_bytes):
        while taken[at]:
            at += 1
        taken[at] += 1
        at += 1
    return at


@pytest.mark.parametrize("seed", range(20))
def test_limits_are_those_that_count_each_nanosecond(seed: int) -> None:
    rng = random.Random(seed)
    links, both, read = Links(), Counter[int](), Counter[int]()
    limits = (Limit("both", 1e9), Limit("read", 1e9, "read"))
    several = [
        links.of(i, LinkSpec(rng.choice([inf, 1e9, 4e8]), concurrent_transfers=rng.choice([1, 2]), limits=limits[:n]))
        for i, n in enumerate((1, 2, 2))
    ]
    sent: list[tuple[Link, Transfer]] = []
    free = {link: [0] * link.spec.concurrent_transfers for link in several}
    held = {link: Counter[int]() for link in several}
    now, cancels = 0, seed % 2
    for _ in range(120):
        now += rng.choice([0, 0, 1, 5, 40])
        link, n_bytes, writes = rng.choice(several), rng.randrange(1, 30), rng.random() < 0.5
        transfer = link.send(now, n_bytes, writes=writes)
        if not cancels:
            assert transfer.begin_ns == max(now, min(free[link]))
        rate = link.spec.bandwidth_bytes_per_s
        end = transfer.begin_ns + (0 if rate == inf else round(n_bytes / rate * 1e9))
        end = max(end, brute_force(both, transfer.begin_ns, n_bytes))
        if len(link.spec.limits) == 2 and not writes:
            end = max(end, brute_force(read, transfer.begin_ns, n_bytes))
        assert transfer.sent_ns == end
        free[link][free[link].index(min(free[link]))] = end
        held[link].update(range(transfer.begin_ns, end))
        sent.append((link, transfer))
        if cancels and rng.random() < 0.2:
            link, transfer = sent.pop(rng.randrange(len(sent)))
            if transfer.sent_ns > now:
                link.cancel(transfer, now)
                held[link].subtract(range(max(transfer.begin_ns, now), transfer.sent_ns))
                for capacity, stretches in transfer.taken:
                    slots = both if capacity.limit.name == "both" else read
                    slots.subtract(at for low, high in stretches for at in range(max(low, now), high))
    assert max(both.values()) == 1
    assert [max(held[link].values()) for link in several] == [link.spec.concurrent_transfers for link in several]


def test_links_that_say_different_things_of_one_limit_are_refused() -> None:
    links = Links()
    links.of("one", LinkSpec(1e9, limits=(Limit("fabric", 1e9),)))
    with pytest.raises(ValueError, match="links share the limit 'fabric'"):
        links.of("two", LinkSpec(1e9, limits=(Limit("fabric", 2e9),)))
    with pytest.raises(ValueError, match="the link 'one' is shared"):
        links.of("one", LinkSpec(2e9))
    with pytest.raises(ValueError, match="finite and above 0"):
        Limit("fabric", 0.0)
