"""Control policies, by what they answer."""

from __future__ import annotations

import ast
import inspect
from math import exp

import pytest

from policies import control
from policies.control import (
    Concurrency,
    Knative,
    Perfect,
    PoolSeen,
    RateModel,
    Schedule,
    Seen,
    TargetTracking,
    stabilised,
)
from policies.control.rates import waits_longer


def seen(now_s: float = 60.0, interval_s: float = 15.0, past: tuple[PoolSeen, ...] = (), **pool: float) -> Seen:
    return Seen(now_s=now_s, interval_s=interval_s, mine=PoolSeen(**pool), past=past)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [
        ({"machines": 4, "ready": 4, "running": 80}, 8),
        ({"machines": 4, "ready": 4, "running": 43}, 4),  # within a tenth of 4 * 10
        ({"machines": 4, "ready": 4, "running": 45}, 5),
        ({"machines": 4, "ready": 4, "running": 36}, 4),
        ({"machines": 4, "ready": 4, "running": 30, "waiting": 5}, 4),
        ({"machines": 4, "ready": 4, "running": 11}, 2),
        ({"machines": 4, "ready": 4}, 0),
        ({"machines": 2, "ready": 2, "running": 500}, 6),  # four more at most
        ({"machines": 10, "ready": 10, "running": 500}, 20),  # twice as many at most
        # Two start: with nothing of their own, 60 requests are 15 each of 4, and 30 are 7.5, which turns the answer round.
        ({"machines": 4, "ready": 2, "running": 60}, 6),
        ({"machines": 4, "ready": 2, "running": 30}, 4),
        ({"machines": 3, "ready": 0, "waiting": 9}, 3),
        ({"machines": 0, "ready": 0, "waiting": 9}, 1),
        ({"machines": 0, "ready": 0}, 0),
    ],
)
def test_target_tracking_follows_the_ratio_to_its_target(pool: dict[str, int], wanted: int) -> None:
    assert TargetTracking(target=10.0).wanted(seen(**pool)) == wanted


def test_target_tracking_reads_what_it_is_told_to() -> None:
    pool = {"machines": 2, "ready": 2, "waiting": 8, "running": 4, "kv_use": 0.9, "came": 60, "finished_tokens": 9000}
    for measure, target, wanted in (
        ("waiting", 2.0, 4),
        ("running", 2.0, 2),
        ("kv_use", 0.6, 3),
        ("requests_per_s", 1.0, 4),
        ("output_tokens_per_s", 100.0, 6),
    ):
        assert TargetTracking(target=target, measure=measure).wanted(seen(**pool)) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(("current", "total", "wanted"), [(2, 21, 2), (2, 25, 3), (5, 21, 3), (0, 40, 1), (3, 0, 0)])
def test_concurrency_divides_the_total(current: int, total: int, wanted: int) -> None:
    assert Concurrency(target=10.0).wanted(seen(machines=current, ready=current, running=total)) == wanted


def test_knative_takes_the_mean_of_its_window_and_panics_when_the_last_seconds_ask_for_twice_the_machines() -> None:
    policy = Knative(target=10.0, stable_s=60.0, panic_s=6.0)
    calm = tuple(PoolSeen(machines=2, ready=2, running=15) for _ in range(10))
    assert policy.wanted(Seen(interval_s=6.0, mine=calm[-1], past=calm)) == 2
    burst = (*calm[1:], PoolSeen(machines=2, ready=2, running=45))
    assert policy.wanted(Seen(interval_s=6.0, mine=burst[-1], past=burst)) == 5
    # It does not shrink while the panic lasts, a stable window long.
    after = (*burst, *(PoolSeen(machines=5, ready=5, running=1) for _ in range(9)))
    assert policy.wanted(Seen(interval_s=6.0, mine=after[-1], past=after)) == 5
    over = (*after, PoolSeen(machines=5, ready=5, running=1))
    assert policy.wanted(Seen(interval_s=6.0, mine=over[-1], past=over)) == 1


@pytest.mark.parametrize(
    ("pool", "stable", "wanted"),
    [
        # The last seconds ask for 4: twice the 2 that are ready, and less than twice 3.
        ({"machines": 2, "ready": 2, "running": 40}, 10, 4),
        ({"machines": 3, "ready": 3, "running": 40}, 10, 2),
        # Those that start are no machines yet, and stay in a panic.
        ({"machines": 6, "ready": 2, "running": 40}, 10, 6),
        ({"machines": 1, "ready": 0, "running": 20}, 0, 2),
        ({"machines": 1, "ready": 0, "running": 10}, 0, 1),
        ({"machines": 3, "ready": 0, "running": 0}, 10, 1),
        # The stable window may ask for more than the last seconds.
        ({"machines": 2, "ready": 2, "running": 40}, 60, 6),
    ],
)
def test_knative_panics_at_twice_the_machines_that_are_ready(pool: dict[str, int], stable: int, wanted: int) -> None:
    """Ten looks, of which the last is all of the panic window; those before saw *stable* requests, by many machines."""
    policy = Knative(target=10.0, stable_s=60.0, panic_s=6.0)
    past = (*(PoolSeen(machines=50, ready=50, running=stable) for _ in range(9)), PoolSeen(**pool))  # type: ignore[arg-type]
    assert policy.wanted(Seen(interval_s=6.0, mine=past[-1], past=past)) == wanted


def test_one_machine_waits_as_in_an_m_m_1_queue_and_two_as_erlang_c_says() -> None:
    assert waits_longer(0.5, 1, 2.0, 3.0) == pytest.approx(0.5 * exp(-0.5 * 2.0 * 3.0))
    # Erlang C of a load of 1 on two servers is 1/3.
    assert waits_longer(1.0, 2, 2.0, 0.0) == pytest.approx(1 / 3)
    assert waits_longer(2.0, 2, 2.0, 9.0) == 1.0


def test_the_rate_model_has_the_fewest_machines_that_keep_the_limit() -> None:
    policy = RateModel(rate_per_s=2.0, ttft_s=0.5, share=0.95)
    quiet = PoolSeen(machines=1, ready=1, came=0)
    for came, wanted in ((0, 0), (15, 2), (30, 3), (60, 4)):
        load = came / 15.0 / 2.0
        pool = PoolSeen(machines=1, ready=1, came=came)
        assert policy.wanted(Seen(mine=pool, past=(quiet, pool))) == wanted
        assert wanted == 0 or waits_longer(load, wanted, 2.0, 0.5) <= 0.05 < waits_longer(load, wanted - 1, 2.0, 0.5)
    # The highest rate of what it remembers counts, and a limit that is not kept.
    assert policy.wanted(Seen(mine=quiet, past=(PoolSeen(came=60), quiet))) == 4
    late = PoolSeen(machines=5, ready=5, came=15, ttft_p95_s=0.9)
    assert policy.wanted(Seen(mine=late, past=(late,))) == 6
    # While machines start nobody knows yet whether they are enough.
    starting = PoolSeen(machines=5, ready=4, came=15, ttft_p95_s=0.9)
    assert policy.wanted(Seen(mine=starting, past=(starting,))) == 2
    kept = PoolSeen(machines=5, ready=5, came=15, ttft_p95_s=0.5)
    assert policy.wanted(Seen(mine=kept, past=(kept,))) == 2


def test_a_schedule_holds_its_last_number_or_begins_again() -> None:
    once = Schedule(at_s=(0.0, 10.0, 20.0), machines=(1, 5, 2))
    assert [once.wanted(seen(now_s=at)) for at in (0.0, 9.9, 10.0, 19.9, 20.0, 500.0)] == [1, 1, 5, 5, 2, 2]
    daily = Schedule(at_s=(0.0, 10.0, 20.0), machines=(1, 5, 2), every_s=30.0)
    assert [daily.wanted(seen(now_s=at)) for at in (29.9, 30.0, 41.0, 320.0)] == [2, 1, 5, 2]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"at_s": (5.0,), "machines": (1,)}, "starts with 0 and ascends"),
        ({"at_s": (0.0, 5.0), "machines": (1,)}, "as many machines as times"),
        ({"at_s": (0.0,), "machines": (-1,)}, "at least 0 machines; got -1"),
        ({"at_s": (0.0, 9.0), "machines": (1, 2), "every_s": 9.0}, "every_s lies after the last of at_s, 9"),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Schedule(**settings)  # type: ignore[arg-type]


def test_the_perfect_policy_looks_as_far_as_a_start_takes() -> None:
    # 2 requests in the first step of 10 s, none in the second, 30 in the third.
    policy = Perfect(rate_per_s=1.0, step_s=10.0).told([0.0, 5.0, *(20.0 + i / 3 for i in range(30))], lead_s=4.0)
    assert policy.counts == (2, 0, 30)
    assert [policy.wanted(seen(now_s=at, interval_s=2.0)) for at in (0.0, 10.0, 12.0, 14.0, 14.5, 20.0, 30.0)] == [
        1,
        0,
        0,
        0,
        3,
        3,
        0,
    ]


def test_fewer_are_wanted_only_when_they_were_for_the_whole_window() -> None:
    asked = [(0.0, 5), (15.0, 3), (30.0, 4), (45.0, 2)]
    # What was asked at the window's very beginning is before it.
    for window_s, wanted in ((0.0, 2), (15.0, 2), (15.1, 4), (20.0, 4), (45.0, 4), (50.0, 5)):
        assert stabilised(asked, 45.0, 5, down_window_s=window_s) == wanted
    # More are wanted at once, unless a window says otherwise.
    rising = [(0.0, 1), (15.0, 4), (30.0, 6)]
    assert stabilised(rising, 30.0, 1, down_window_s=300.0) == 6
    for window_s, wanted in ((15.0, 6), (15.1, 4), (20.0, 4), (30.0, 4), (30.1, 1)):
        assert stabilised(rising, 30.0, 1, down_window_s=0.0, up_window_s=window_s) == wanted


def test_every_control_policy_is_at_most_fifty_lines() -> None:
    for name in ("TargetTracking", "Concurrency", "Knative", "RateModel", "Schedule", "Perfect"):
        lines = inspect.getsource(getattr(control, name)).splitlines()
        assert len(lines) <= 50, name
        assert ast.parse("\n".join(lines))
