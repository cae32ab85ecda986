"""Wrappers, by literals; and that spans equal stepping with any of them around any scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from policies.classes import KeepSlo, Preempt, WeightedFair
from policies.published import OrcaPaged, Static
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.view import ALWAYS_NS, UNTIL_CHANGE, PartialSeq, Plan, ReplicaView, RunningSeq, WaitingSeq, pads_to
from policies.vllm import VllmV0
from policies.wrappers import OVERDUE, TOO_LATE, Cap, EvictNewest, Order, Pad, RejectLate
from sim.engine import Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same, run_both_ways, with_scheduler
from tests.sample import some
from workloads import Trace

QUEUE = (WaitingSeq(1, tokens=300), WaitingSeq(2, tokens=100), WaitingSeq(3, tokens=50))


def view(**fields: object) -> ReplicaView:
    """Ample memory unless said otherwise."""
    return ReplicaView(**{"free_blocks": 1000, "total_blocks": 1000, **fields})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Nanoseconds:
    """A price of one nanosecond a prompt token, from *now_ns* on."""

    now_ns: int = 0

    def done_ns(self, prompts: Sequence[int], /) -> int:
        return self.now_ns + sum(prompts)


def decode_only(view: ReplicaView, /) -> Plan:
    """A scheduler that is a plain function."""
    return Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True, preempt=(9,))


def test_evict_newest_asks_the_inner_policy_while_memory_lasts() -> None:
    assert EvictNewest(Sarathi()).plan(view(n_decoding=3, growth_blocks=2, free_blocks=2)) == Sarathi().plan(
        view(n_decoding=3, growth_blocks=2, free_blocks=2)
    )


def test_evict_newest_gives_up_the_newest_until_the_others_can_grow_and_admits_nobody() -> None:
    running = (RunningSeq(1, 160, 10, 1), RunningSeq(2, 32, 2, 1), RunningSeq(3, 1, 1, 0))
    short = view(waiting=QUEUE, n_decoding=3, free_blocks=0, growth_blocks=2, running=running)
    # The newest frees one block, and two are needed; the next frees two and needs none itself.
    assert EvictNewest(Sarathi()).plan(short) == Plan(decode=True, preempt=(3, 2))


def test_evict_newest_keeps_what_the_inner_policy_preempts() -> None:
    running = (RunningSeq(9, 160, 10, 1), RunningSeq(2, 32, 2, 1))
    assert EvictNewest(decode_only).plan(view(n_decoding=2, free_blocks=1, growth_blocks=2, running=running)) == Plan(
        decode=True, through_arrivals=True, preempt=(2, 9)
    )


def test_pad_changes_the_price_and_never_the_plan() -> None:
    assert pads_to(EvictNewest(Pad(OrcaPaged(), sequences=6))) == 6
    assert Pad(OrcaPaged(), 6).plan(view(waiting=QUEUE, n_decoding=4)) == OrcaPaged().plan(
        view(waiting=QUEUE, n_decoding=4)
    )


@pytest.mark.parametrize(
    ("by", "first"),
    [("arrival", 3), ("priority", 2), ("deadline", 2), ("shortest_prompt", 3)],
)
def test_order_shows_the_queue_in_another_order(by: Any, first: int) -> None:
    queue = (
        WaitingSeq(1, 300, arrival_ns=7, priority=1),
        WaitingSeq(2, 100, arrival_ns=6, deadline_ns=90, priority=-1),
        WaitingSeq(3, 50, arrival_ns=5, deadline_ns=92),
    )
    assert Order(VllmV0(max_num_batched_tokens=1), by=by).plan(view(waiting=queue)).run[0][0] == first


def test_order_leaves_equals_as_they_are_in_the_queue() -> None:
    assert Order(VllmV0(), by="priority").plan(view(waiting=QUEUE)).run == ((1, 300), (2, 100), (3, 50))


def test_order_says_that_an_arrival_may_overtake() -> None:
    full = view(waiting=QUEUE, n_decoding=4)
    assert OrcaPaged(max_sequences=4).plan(full).through_arrivals
    assert Order(OrcaPaged(max_sequences=4)).plan(full) == Plan(decode=True, hold=UNTIL_CHANGE)


def test_cap_limits_the_sequences_at_once() -> None:
    assert Cap(OrcaPaged(), max_sequences=6).plan(view(waiting=QUEUE, n_decoding=4)) == Plan(
        decode=True, run=((1, 300), (2, 100)), through_arrivals=True
    )
    full = Cap(OrcaPaged(), max_sequences=4).plan(view(waiting=QUEUE, n_decoding=4))
    assert full == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_cap_limits_the_context_of_those_admitted() -> None:
    running = (RunningSeq(8, 200, 13), RunningSeq(9, 40, 7))
    busy = view(waiting=QUEUE, n_decoding=1, prefilling=(PartialSeq(9, 40, 60),), running=running)
    # 200, and 40 + 60: 300 tokens are there, and the first of the queue has 300 more.
    assert Cap(OrcaPaged(), max_tokens=600).plan(busy).run == ((9, 60), (1, 300))
    assert Cap(OrcaPaged(), max_tokens=599).plan(busy).run == ((9, 60),)


def test_cap_does_not_hold_while_growing_contexts_may_hide_more_of_the_queue() -> None:
    short = view(waiting=QUEUE[2:], n_decoding=1, free_blocks=0, running=(RunningSeq(8, 200, 13),))
    assert Cap(OrcaPaged(), max_tokens=1000).plan(short) == Plan(decode=True, through_arrivals=True)
    assert Cap(OrcaPaged(), max_tokens=10).plan(short) == Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


def test_cap_lets_a_request_beyond_the_limit_run_alone() -> None:
    assert Cap(OrcaPaged(), max_tokens=100).plan(view(waiting=QUEUE)).run == ((1, 300),)


def test_reject_refuses_what_is_overdue_or_would_start_too_late() -> None:
    queue = (
        WaitingSeq(1, 300, arrival_ns=0, deadline_ns=999),
        WaitingSeq(2, 100, arrival_ns=0, deadline_ns=1099),
        WaitingSeq(3, 50, arrival_ns=0, deadline_ns=1050),
        WaitingSeq(4, 70),
    )
    now = view(waiting=queue, now_ns=1000, price=Nanoseconds(1000))
    plan = RejectLate(VllmV0()).plan(now)
    assert plan == Plan(run=((3, 50), (4, 70)), reject=((1, OVERDUE), (2, TOO_LATE)), until_ns=1051)


def test_reject_holds_until_the_first_deadline_of_those_that_wait() -> None:
    queue = (WaitingSeq(1, 300, arrival_ns=5, deadline_ns=2000), WaitingSeq(2, 100, arrival_ns=6, deadline_ns=1500))
    held = view(waiting=queue, n_decoding=2, now_ns=1000)
    assert RejectLate(OrcaPaged(max_sequences=2)).plan(held) == Plan(decode=True, hold=UNTIL_CHANGE, until_ns=1507)


def test_reject_does_not_make_an_inner_policy_wait_that_plans_nothing() -> None:
    queue = (WaitingSeq(1, 300, deadline_ns=2000),)
    assert RejectLate(lambda view: Plan()).plan(view(waiting=queue)) == Plan(until_ns=ALWAYS_NS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cap(OrcaPaged()), "a cap without a limit caps nothing"),
        (lambda: Cap(OrcaPaged(), max_tokens=0), "max_tokens is a whole number of at least 1; got 0"),
        (
            lambda: Order(OrcaPaged(), by="size"),
            "by is one of arrival, priority, deadline, first_token, shortest_prompt, shortest_predicted; got 'size'",
        ),
        (lambda: Pad(OrcaPaged(), 0), "sequences is a whole number of at least 1; got 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "wrap",
    [
        EvictNewest, Order, RejectLate, Preempt, WeightedFair, KeepSlo,
        lambda inner: Pad(inner, 4), lambda inner: Cap(inner, max_sequences=4),
    ],
)  # fmt: skip
def test_a_wrapper_needs_a_scheduler(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"a scheduler has a method plan\(view\) or is such a function; got \{'policy'"):
        wrap({"policy": "sarathi"})


def a_wrapped(rng: random.Random) -> Any:
    """Up to three wrappers in any order around a scheduler, and eviction around them all or inside."""
    inner: Any = rng.choice(
        [
            Sarathi(rng.randrange(4, 200), rng.randrange(1, 12)),
            Sarathi(rng.randrange(40, 200), rng.randrange(4, 40)),
            OrcaPaged(rng.randrange(1, 12)),
            VllmV0(rng.randrange(10, 400), rng.randrange(1, 12)),
            Static(rng.randrange(1, 6)),
        ]
    )
    evict_at = rng.randrange(4)
    for depth in range(4):
        if depth == evict_at:
            inner = EvictNewest(inner)
        if depth < 3:
            inner = rng.choice(
                [
                    lambda inner: inner,
                    lambda inner: Order(inner, by=rng.choice(["arrival", "priority", "deadline", "shortest_prompt"])),
                    lambda inner: Cap(inner, max_sequences=rng.randrange(1, 8)),
                    lambda inner: Cap(inner, max_tokens=rng.randrange(40, 600)),
                    lambda inner: Pad(inner, rng.randrange(1, 6)),
                    RejectLate,
                    RejectLate,
                ]
            )(inner)
    return inner


def a_run(seed: int) -> Experiment:
    """As `an_experiment`, with deadlines and priorities where the workload is a trace."""
    rng = random.Random(seed)
    experiment = an_experiment(seed, speculative=seed % 3 == 0)
    workload = experiment.workload
    if isinstance(workload, Trace):
        n = len(workload)
        longest = rng.choice([10**7, 10**8, 10**9])
        workload = replace(
            workload,
            deadline_ns=np.array([rng.choice([-1, rng.randrange(longest)]) for _ in range(n)]),
            priority=np.array([rng.randrange(-2, 3) for _ in range(n)]),
        )
    return with_scheduler(replace(experiment, workload=workload), a_wrapped(rng))


def test_spans_equal_stepping_with_wrappers() -> None:
    reasons: set[str] = set()
    preemptions = events = iterations = 0
    for seed in range(12):
        experiment = a_run(seed)
        columns = run_both_ways(experiment, check_invariants=seed % 4 == 0 and experiment.horizon_ns is None)
        reasons |= set(columns.reasons)
        preemptions += columns.meta["preemptions"]
        events += columns.meta["events"]
        iterations += len(columns.iterations()["start_ns"])
    # The runs meet what wrappers do, and are spared events all the same.
    assert {OVERDUE, TOO_LATE} <= reasons
    assert preemptions > 5
    assert events < iterations


@pytest.mark.slow(reason="many random runs")
def test_spans_equal_stepping_with_wrappers_over_many_runs() -> None:
    for seed in some(range(1000, 3000)):
        experiment = a_run(seed)
        assert_same(run(experiment), run(experiment, fast_forward=False))


@dataclass(frozen=True)
class Overstays:
    """Rejects what is overdue, and does not say that this depends on the time."""

    inner: Any

    def plan(self, view: ReplicaView, /) -> Plan:
        return RejectLate(self.inner).plan(view)._replace(until_ns=ALWAYS_NS)


def test_a_wrapper_that_lies_about_how_long_its_answer_holds_is_caught() -> None:
    trace = Trace(arrival_ns=[0, 0], prompt_tokens=[5, 5], output_tokens=[60, 5], deadline_ns=[-1, 10_500_000])

    def ends(scheduler: Any) -> list[np.ndarray]:
        replica = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=100)
        experiment = Experiment(workload=trace, replicas=(replica,), router=RoundRobin())
        runs = (run(experiment), run(experiment, fast_forward=False))
        return [columns.iterations()["waiting"] for columns in runs]

    np.testing.assert_array_equal(*ends(RejectLate(OrcaPaged(max_sequences=1))))
    assert not np.array_equal(*ends(Overstays(OrcaPaged(max_sequences=1))))
