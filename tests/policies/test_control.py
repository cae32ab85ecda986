"""Control policies, by what they answer."""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Sequence
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
    wanted_of,
)
from policies.control.hpa import Hpa, highest, most_at_once
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
        ({"machines": 2, "ready": 2, "running": 500}, 50),  # what it wishes, before any limit
        # Two start: with nothing of their own, 60 requests are 15 each of 4, and 30 are 7.5, which turns the answer round.
        ({"machines": 4, "ready": 2, "running": 60}, 6),
        ({"machines": 4, "ready": 2, "running": 30}, 4),
        # Pending ones count as machines without requests where more are wanted, and not at all where fewer are.
        ({"machines": 8, "ready": 4, "pending": 4, "running": 100}, 10),
        ({"machines": 8, "ready": 4, "pending": 4, "running": 15}, 2),
        # Four that load weights would be at the target: 55 requests are 6.9 each of 8.
        ({"machines": 8, "ready": 4, "pending": 0, "running": 15}, 6),
        ({"machines": 8, "ready": 4, "pending": 1, "running": 15}, 5),
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


def looks(policy: Knative, shown: Sequence[PoolSeen], interval_s: float, began_s: float) -> list[int]:
    """The machines it wants after each look, if the first is at *began_s*; it is shown what it remembers."""
    kept = int(policy.remembers_s / interval_s)
    return [
        policy.wanted(
            Seen(
                now_s=began_s + i * interval_s,
                interval_s=interval_s,
                mine=pool,
                past=shown[max(i + 1 - kept, 0) : i + 1],
            )
        )
        for i, pool in enumerate(shown)
    ]


def test_knative_takes_the_mean_of_its_window_and_panics_when_the_last_seconds_ask_for_twice_the_machines() -> None:
    policy = Knative(target=10.0, utilization=1.0, stable_s=60.0, panic_s=6.0)
    calm = [PoolSeen(machines=2, ready=2, running=15)] * 10
    burst = PoolSeen(machines=2, ready=2, running=45)
    # It does not shrink while the panic lasts, a stable window long; then it halves at most.
    after = [PoolSeen(machines=5, ready=5, running=1)] * 10
    assert looks(policy, [*calm, burst, *after], 6.0, 600.0) == [2] * 10 + [5] + [5] * 9 + [2]


def test_knative_aims_at_seven_tenths_of_the_target() -> None:
    seventy = [PoolSeen(machines=10, ready=10, running=70)] * 30
    assert looks(Knative(target=10.0), seventy, 2.0, 600.0)[-1] == 10


def test_knative_follows_the_mean_down_and_gives_up_the_last_after_thirty_seconds_more() -> None:
    policy, machines, found = Knative(target=10.0), 9, list[tuple[float, int]]()
    shown = [PoolSeen(machines=9, ready=9, running=63)] * 30
    for step in range(1, 61):
        shown.append(PoolSeen(machines=machines, ready=machines))
        wanted = looks(policy, shown, 2.0, 600.0)[-1]
        if wanted != machines:
            found.append((step * 2.0, wanted))
            machines = wanted
    # The mean of 60 s falls by 2.1 requests, or 0.3 machines, every 2 s, and is 0 at 60 s.
    assert found[:2] == [(8.0, 8), (14.0, 7)]
    assert found[-1] == (90.0, 0)


def test_knative_halves_at_most_in_each_decision() -> None:
    """Where the limit and the mean ask for different numbers: 9 machines, of which 1 would do."""
    shown = [PoolSeen(machines=n, ready=n, running=1) for n in (9, 4, 2, 1)]
    calm = [PoolSeen(machines=9, ready=9, running=1)] * 30
    assert looks(Knative(target=10.0), [*calm, *shown], 2.0, 600.0)[-4:] == [4, 2, 1, 1]


@pytest.mark.parametrize(("machines", "kept_s"), [(4, 58.0), (1, 0.0)])
def test_knative_starts_in_a_panic_where_more_than_one_machine_is_there(machines: int, kept_s: float) -> None:
    """Ten requests are one machine's: four stay for the first 60 s."""
    shown = [PoolSeen(machines=machines, ready=machines, running=7)] * 40
    found = looks(Knative(target=10.0), shown, 2.0, 2.0)
    kept = [2.0 * (i + 1) for i, wanted in enumerate(found) if wanted == 4]
    assert max(kept, default=0.0) == kept_s
    assert found[-1] == max(machines // 2, 1)


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
    past = [*[PoolSeen(machines=50, ready=50, running=stable)] * 9, PoolSeen(**pool)]
    assert looks(Knative(target=10.0, utilization=1.0), past, 6.0, 600.0)[-1] == wanted


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


class KubernetesHpa:
    """A HorizontalPodAutoscaler of one metric in whole steps, written from the rules and not from the code: 15 s a sync."""

    def __init__(self, replicas: int, most: int, *, behaviour: bool) -> None:
        self.replicas, self.most, self.behaviour = replicas, most, behaviour
        self.wishes, self.had = [replicas], [replicas]

    def sync(self, wish: int) -> int:
        self.wishes.append(wish)
        window = self.wishes[-20:]  # 300 s
        if self.behaviour:
            wanted = wish if wish >= self.replicas else min(max(window), self.replicas)
            limit = max(2 * self.had[-1], self.had[-1] + 4)
        else:
            wanted = max(window)
            limit = max(2 * self.replicas, 4)
        self.replicas = max(min(wanted, limit, self.most), 1)
        self.had.append(self.replicas)
        return self.replicas


def steps(hpa: Hpa, wishes: Sequence[int], replicas: int, most: int) -> list[int]:
    """The decision of our rules on the same."""
    asked, changes, found = [(0.0, replicas)], list[tuple[float, int]](), list[int]()
    for i, wish in enumerate(wishes):
        now_s = 15.0 * (i + 1)
        asked.append((now_s, wish))
        either = {
            "default": highest(asked, now_s, 300.0),
            "behavior": stabilised(asked, now_s, replicas, down_window_s=300.0),
        }
        wanted = either[hpa]
        wanted = max(min(wanted, most_at_once(hpa, replicas, changes, now_s), most), 1)
        changes.append((now_s, wanted - replicas))
        replicas = wanted
        found.append(replicas)
    return found


@pytest.mark.parametrize("hpa", ["default", "behavior"])
def test_a_horizontal_pod_autoscaler_takes_the_steps_of_an_independent_one(hpa: Hpa) -> None:
    rng = random.Random(7)
    for _ in range(300):
        replicas, most = rng.randrange(1, 6), rng.randrange(6, 60)
        wishes = [rng.choice([0, 1, 3, 5, 8, 20, 40]) for _ in range(rng.randrange(1, 60))]
        theirs = KubernetesHpa(replicas, most, behaviour=hpa == "behavior")
        assert steps(hpa, wishes, replicas, most) == [theirs.sync(wish) for wish in wishes], (replicas, most, wishes)


def test_without_behavior_a_burst_that_the_limit_cut_is_followed_afterwards() -> None:
    assert steps("default", [20, 5, 5, 5], 4, 100) == [8, 16, 20, 20]
    assert steps("behavior", [20, 5, 5, 5], 4, 100) == [8, 8, 8, 8]
    # KEDA's autoscaler from 1 to 12, and limits below 4 machines.
    assert steps("default", [12] * 4, 1, 100) == [4, 8, 12, 12]
    assert [most_at_once("default", n, (), 0.0) for n in (1, 2, 3, 4, 10)] == [4, 4, 6, 8, 20]
    assert [most_at_once("behavior", n, (), 0.0) for n in (1, 2, 3, 4, 10)] == [5, 6, 7, 8, 20]


def test_with_behavior_the_limit_is_of_what_there_was_fifteen_seconds_ago() -> None:
    """From 4 at 0 s to 6 at 5 s: 8 until 20 s, then 12. What went within the period counts as there."""
    changes = [(5.0, 2)]
    assert [most_at_once("behavior", 6, changes, now_s) for now_s in (10.0, 19.9, 20.0)] == [8, 8, 12]
    assert most_at_once("behavior", 2, [(5.0, -6)], 10.0) == 16
    # Never fewer than there are.
    assert most_at_once("behavior", 30, [(5.0, 26)], 10.0) == 30


def test_every_control_policy_is_at_most_fifty_lines() -> None:
    for name in ("TargetTracking", "Concurrency", "Knative", "RateModel", "Schedule", "Perfect"):
        lines = inspect.getsource(getattr(control, name)).splitlines()
        assert len(lines) <= 50, name
        assert ast.parse("\n".join(lines))


def test_a_policy_decides_by_its_method_and_a_function_by_itself() -> None:
    class Called(Concurrency):
        def __call__(self) -> None: ...

    called = Called(target=10.0)
    method = called.wanted
    assert wanted_of(called) == method
    assert wanted_of(method) == method
