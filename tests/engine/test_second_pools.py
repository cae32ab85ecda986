"""Two pools and a link of so many places beside a second model of them: request by request, to the nanosecond."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from policies.routers import LeastOutstanding, RoundRobin
from sim.engine import Columns, Experiment, run
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from tests.engine.independent import Request
from tests.engine.second_pools import Between, Trip, serve_apart
from tests.engine.test_independent import difference, some_rules, spec_of
from workloads import Trace


def both(seed: int, *, late_ns: int = 0, fewest: bool = False) -> tuple[list[Request], list[Trip], Columns]:
    """One random case by both models; *late_ns*: that the second one's link takes more; *fewest*: requests go to who has the fewest
    and not in turn, and come in bursts to more machines."""
    rng = random.Random(f"second pools {seed}")
    rules = [replace(some_rules(rng, 1, None), micro_batches=1) for _ in range(2)]
    n = rng.randrange(1, 60)
    prompt = [rng.randrange(0, 80) for _ in range(n)]
    output = [rng.randrange(0, 50) if tokens else rng.randrange(1, 50) for tokens in prompt]
    grid, last = rng.choice([1, 10**6]), rng.choice([1, 10**7, 10**8, 10**9])
    arrival = sorted(rng.randrange(last + 1) // grid * grid for _ in range(n))
    room_first = rng.random() < 0.5
    between = Between(
        first_token=rng.choice(["prefill", "arrival", "decode"]),
        room_first=room_first,
        shared=rng.choice(["sender", "receiver", "pair", "pools"]),
        places=rng.choice([1, 2, 3]),
        ns_per_token=rng.choice([0, 1000, 50_000, 300_000]),
        latency_ns=rng.choice([0, 1234, 10**6]),
        ns_per_sequence=rng.choice([0, 0, 500_000]),
        repack_ns_per_ns=rng.choice([0, 0, 1]),
        layers=rng.choice([1, 4]) if room_first else 1,
        local=rng.choice([0, 0, 20]),
        headroom=rng.choice([0, 0, 8]),
    )
    n_first, n_second = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    if fewest:
        n_first, n_second = n_first + 1, n_second + 1
        arrival = sorted(at - at % rng.choice([1, 10**7]) + rng.choice([0, 1]) for at in arrival)
        between = replace(between, fewest=True)
    requests = [Request(i, prompt[i], output[i], arrival=arrival[i]) for i in range(n)]
    slower = replace(between, latency_ns=between.latency_ns + late_ns)
    trips = serve_apart(requests, [rules[0]] * n_first, [rules[1]] * n_second, slower)
    path = KvPath(
        # A byte takes a nanosecond.
        link=LinkSpec(1e9, latency_s=between.latency_ns * 1e-9, concurrent_transfers=between.places),
        shared=between.shared,  # type: ignore[arg-type]
        bytes_per_token=float(between.ns_per_token),
        bytes_per_sequence=float(between.ns_per_sequence),
        layers=between.layers,
        repack_s_per_byte=between.repack_ns_per_ns * 1e-9,
    )
    router = LeastOutstanding() if fewest else RoundRobin()
    handover = HandoverSpec(
        roles=("prefill",) * n_first + ("decode",) * n_second,
        pools=(0,) * n_first + (1,) * n_second,
        paths={(0, 1): path},
        router=router,
        first_token=between.first_token,  # type: ignore[arg-type]
        room="before_prefill" if between.room_first else "after_prefill",
        headroom_tokens=between.headroom,
        local_tokens=between.local,
    )
    machines = tuple(spec_of(each) for each in [rules[0]] * n_first + [rules[1]] * n_second)
    trace = Trace(arrival_ns=arrival, prompt_tokens=prompt, output_tokens=output)
    experiment = Experiment(workload=trace, replicas=machines, router=router, handover=handover)
    return requests, trips, run(experiment)


def differs(requests: list[Request], trips: list[Trip], columns: Columns) -> str | None:
    """Where the two first differ."""
    for i, trip in enumerate(trips):
        for name in ("prefilled", "room", "sent", "landed", "joined"):
            engine, other = int(columns.requests[f"{name}_ns"][i]), getattr(trip, name)
            if engine != other:
                return f"request {i}: {name}_ns is {engine}, by the other model {other}"
    return difference(requests, columns)


def assert_equal(seeds: range, *, fewest: bool = False) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        requests, trips, columns = both(seed, fewest=fewest)
        assert differs(requests, trips, columns) is None, f"seed {seed}"
        seen.update(request.status for request in requests)
        seen["preempted"] += sum(request.preemptions for request in requests)
        seen["waited for the link"] += sum(trip.sent > max(trip.room, trip.prefilled) + 1 for trip in trips)
    return seen


def test_pools_equal_a_second_model_of_their_rules() -> None:
    seen = assert_equal(range(12))
    assert min(seen["finished"], seen["rejected"], seen["preempted"], seen["waited for the link"]) > 20


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(1000, 3000, 500))
def test_pools_equal_a_second_model_of_their_rules_over_two_thousand_runs(seed: int) -> None:
    assert_equal(range(seed, seed + 500))


def test_pools_equal_a_second_model_where_requests_go_to_who_has_the_fewest() -> None:
    seen = assert_equal(range(12), fewest=True)
    assert min(seen["finished"], seen["rejected"], seen["preempted"], seen["waited for the link"]) > 20


@pytest.mark.slow(reason="many random runs")
def test_pools_equal_a_second_model_where_requests_go_to_who_has_the_fewest_over_four_hundred_runs() -> None:
    assert_equal(range(1000, 1400), fewest=True)


def test_the_comparison_notices_a_link_that_takes_a_nanosecond_more() -> None:
    # Of some cases nothing crosses the link: all KV is there at once, or no answer goes on.
    assert sum(differs(*both(seed, late_ns=1)) is not None for seed in range(8)) >= 5
