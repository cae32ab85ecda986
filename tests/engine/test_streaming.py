"""Gaps that clients see where tokens come in groups, against a count of each client's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.view import Plan, ReplicaView, Scheduler
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.engine.record.streaming import Stream, streamed_gaps
from sim.engine.spec.lifecycle import FleetSpec, InFlight, Outage
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, apart, gap_counts, ran, with_fleet
from tests.sample import some
from workloads import Trace

TOKENS, ITERATIONS = "tokens", "iterations"


def replay(outputs: list[int], stream: Stream) -> Columns:
    """One request after the other, an iteration every millisecond."""
    trace = Trace(
        arrival_ns=np.arange(len(outputs)) * 10**9,
        prompt_tokens=np.full(len(outputs), 5),
        output_tokens=np.array(outputs),
    )
    spec = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=OrcaPaged(1), kv_blocks=100)
    return run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin(), stream=stream))


@pytest.mark.parametrize(
    ("rule", "output", "gaps_ms"),
    [
        # After 1, 5, 9 and 11 tokens.
        (TOKENS, 11, [4, 4, 2]),
        (TOKENS, 9, [4, 4]),
        # After 1, 4, 8 and 11 iterations.
        (ITERATIONS, 11, [3, 4, 3]),
        (ITERATIONS, 8, [3, 4]),
        (TOKENS, 1, []),
        (ITERATIONS, 2, [1]),
    ],
)
def test_the_first_token_comes_at_once_then_groups_then_the_last(
    rule: Literal["tokens", "iterations"], output: int, gaps_ms: list[int]
) -> None:
    columns = replay([output], Stream(4, rule))
    gaps, weights = columns.itl()
    assert (gaps // 10**6).tolist() == gaps_ms
    assert weights.tolist() == [1] * len(gaps_ms)
    # What is no gap is as it was.
    alone = replay([output], Stream())
    for name, column in columns.requests.items():
        np.testing.assert_array_equal(column, alone.requests[name])


@dataclass
class Watching:
    """Keeps how many tokens each sequence has got at every look, and when."""

    inner: Scheduler
    seen: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By request: (cached tokens, time)."""

    def plan(self, view: ReplicaView, /) -> Plan:
        begun = {seq.id for seq in view.prefilling}
        for seq in view.running[:]:
            log = self.seen.setdefault(seq.id, [])
            if seq.id not in begun and (not log or log[-1][0] < seq.cached_tokens):
                log.append((seq.cached_tokens, view.now_ns))
        return self.inner.plan(view)


def client_gaps(columns: Columns, seen: dict[int, list[tuple[int, int]]], stream: Stream) -> Counter[int]:
    """The gaps again, request by request and token by token."""
    found: Counter[int] = Counter()
    requests = columns.requests
    for id_ in range(len(requests["status"])):
        prompt, output = max(int(requests["prompt_tokens"][id_]), 1), int(requests["output_tokens"][id_])
        looks = [(cached - prompt + 1, at) for cached, at in seen.get(id_, [])]
        # Where plans are made ahead, who has ended is still there at the next look.
        events = [(tokens, at) for tokens, at in looks if tokens < output]
        ended = requests["status"][id_] == 0 and output > 0
        if ended:
            events.append((output, int(requests["finish_ns"][id_])))
        sent_tokens, sent_ns = 0, -1
        for turn, (tokens, at) in enumerate(events, start=1):
            due = tokens - sent_tokens >= stream.interval if stream.rule == TOKENS else turn % stream.interval == 0
            if turn == 1 or due or (ended and turn == len(events)):
                if turn > 1:
                    found[at - sent_ns] += 1
                sent_tokens, sent_ns = tokens, at
    return found


def watched(seed: int, *, speculative: bool) -> tuple[Experiment, list[Watching]]:
    """A random run on machines with one model and no pipeline, whose schedulers are watched."""
    experiment = an_experiment(seed, speculative=speculative)
    watching: list[Watching] = []
    replicas = []
    for machine in experiment.machines:
        spec = machine.hosted[0]
        watching.append(Watching(spec.scheduler))
        assert isinstance(spec.cost, Linear)
        cost = replace(spec.cost, n_stages=1, transfer_s=0.0)
        replicas.append(replace(spec, cost=cost, scheduler=watching[-1], micro_batches=1, model=None))
    workload = experiment.workload
    if isinstance(workload, Trace):
        # Who is given up leaves before anybody looks.
        workload = replace(workload, abort_ns=None)
    return replace(experiment, replicas=tuple(replicas), workload=workload), watching


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_groups_are_those_that_a_client_counts(speculative: bool) -> None:
    preempted = many = 0
    for seed in range(8):
        stream = Stream(2 + seed % 7, (TOKENS, ITERATIONS)[seed % 2])
        experiment, watching = watched(seed, speculative=speculative)
        if experiment.horizon_ns is not None:
            # Nobody looks when the clock stops.
            experiment = replace(experiment, horizon_ns=None)
        columns = run(replace(experiment, stream=stream), fast_forward=False)
        seen = {id_: log for each in watching for id_, log in each.seen.items()}
        expected = client_gaps(columns, seen, stream)
        assert Counter(gap_counts(columns)) == expected, seed
        # With spans the same.
        assert Counter(gap_counts(run(replace(experiment, stream=stream)))) == expected, seed
        preempted += int(columns.requests["preemptions"].sum())
        many += sum(expected.values())
    assert preempted > 3
    assert many > 500


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("rule", [TOKENS, ITERATIONS])
def test_groups_of_one_are_the_gaps_between_tokens(rule: Literal["tokens", "iterations"], speculative: bool) -> None:
    # Pipelines, models that share a machine, micro-batches, runs that are cut off: everything.
    for seed in range(20):
        columns = ran(seed, speculative=speculative)
        parts = list(streamed_gaps(columns.replicas, columns.requests, Stream(1, rule)))
        counted = Counter(np.concatenate([gaps for gaps, _ in parts]).tolist())
        assert counted == Counter(gap_counts(columns)), seed


@pytest.mark.parametrize(("interval", "gaps_ms"), [(1, [1] * 7), (3, [3, 3, 1]), (10, [7])])
def test_tokens_that_a_retry_discards_are_no_part_of_the_answer(interval: int, gaps_ms: list[int]) -> None:
    """A token a millisecond: the machine fails at 5.5 ms, and all 8 tokens come from the other one, the first at 6.5 ms."""
    trace = Trace(arrival_ns=[0], prompt_tokens=[5], output_tokens=[8])
    spec = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=OrcaPaged(1), kv_blocks=100)
    outage = Outage(machine=0, at_s=0.0055)
    fleet = FleetSpec(
        pools=(0, 0), names=("all",), scaling=(None,), failing=(None,), outages=(outage,), in_flight="retry"
    )
    experiment = Experiment(workload=trace, replicas=(spec,) * 2, router=RoundRobin(), fleet=fleet)
    columns = run(replace(experiment, stream=Stream(interval)))
    gaps, weights = columns.itl()
    assert (np.repeat(gaps, weights) // 10**6).tolist() == gaps_ms


def sent_times(output: int, stream: Stream) -> int:
    """How often a client that gets one token an iteration hears from its server."""
    middle = range(2, output)
    due = [k % stream.interval == 0 if stream.rule == ITERATIONS else (k - 1) % stream.interval == 0 for k in middle]
    return min(output, 2) + sum(due)


def answers_add_up(seed: int, in_flight: InFlight, stream: Stream, *, pools: bool) -> tuple[int, int]:
    """Checks a random fleet whose machines fail, and returns how many tokens were discarded and how many gaps were counted."""
    speculative = seed % 5 == 0
    experiment = (apart if pools else an_experiment)(seed, speculative=speculative)
    experiment = with_fleet(replace(experiment, horizon_ns=None, stream=stream), seed)
    assert experiment.fleet is not None
    columns = run(replace(experiment, fleet=replace(experiment.fleet, in_flight=in_flight, retries=5)))
    gaps, weights = columns.itl()
    assert (gaps >= 0).all()
    requests = columns.requests
    emitted = np.where(requests["first_token_ns"] >= 0, requests["emitted_tokens"], 0)
    if stream.interval == 1 and not speculative:
        assert weights.sum() == np.maximum(emitted - 1, 0).sum()
    ended = (requests["status"] == 0) & (requests["first_token_ns"] >= 0)
    if not emitted[~ended].any():
        # Nobody was cut off in the middle of an answer.
        assert (gaps * weights).sum() == (requests["finish_ns"] - requests["first_token_ns"])[ended].sum()
        if not speculative:
            assert weights.sum() == sum(sent_times(int(tokens), stream) - 1 for tokens in emitted[ended])
    return columns.meta["fleet"]["discarded_tokens"], int(weights.sum())


STREAMS = (Stream(), Stream(2), Stream(5, ITERATIONS), Stream(10))


@pytest.mark.parametrize(("n_runs", "pools"), [(8, False), (6, True)], ids=["plain", "pools"])
def test_gaps_of_each_answer_add_up_whatever_fails_and_however_tokens_are_grouped(n_runs: int, pools: bool) -> None:
    rules: tuple[InFlight, ...] = ("retry", "retry", "resume", "retry", "lose")
    found = [answers_add_up(seed, rules[seed % 5], STREAMS[seed % 4], pools=pools) for seed in range(3, 3 + n_runs)]
    assert sum(discarded for discarded, _ in found) > 20
    assert sum(n_gaps for _, n_gaps in found) > 500


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("pools", [False, True], ids=["plain", "pools"])
@pytest.mark.parametrize("in_flight", ["resume", "retry", "lose"])
def test_gaps_of_each_answer_add_up_in_many_fleets(in_flight: InFlight, pools: bool) -> None:
    for case in some(range(100, 150)):
        for stream in STREAMS:
            answers_add_up(case, in_flight, stream, pools=pools)


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="a stream's interval is at least 1; got 0"):
        Stream(0)
