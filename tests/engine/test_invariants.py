"""The named invariants hold at every event of random runs, and each is broken on purpose once."""

from __future__ import annotations

import numpy as np
import pytest

from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.wrappers import EvictNewest
from sim.engine import Experiment, InvariantError, ReplicaSpec, run
from sim.engine.kv.pool import KvPool
from sim.engine.requests.state import RequestState
from sim.engine.serve.sequences import Sequences
from sim.engine.simulation import cluster
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, ran
from tests.sample import some
from workloads import ClosedLoop, Trace


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_they_hold_at_every_event(speculative: bool) -> None:
    for case in range(6):
        plain = ran(case, speculative=speculative)
        checked = run(an_experiment(case, speculative=speculative), check_invariants=True)
        np.testing.assert_array_equal(checked.requests["finish_ns"], plain.requests["finish_ns"])


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_they_hold_at_every_event_of_many_runs(speculative: bool) -> None:
    for case in some(range(4000, 5000)):
        run(an_experiment(case, speculative=speculative), fast_forward=case % 2 == 0, check_invariants=True)


def a_run(kv_blocks: int = 9) -> None:
    trace = Trace(arrival_ns=[0, 0, 1_000_000], prompt_tokens=[30, 30, 30], output_tokens=[40, 30, 20])
    replica = ReplicaSpec(cost=Linear(), scheduler=EvictNewest(OrcaPaged(8)), kv_blocks=kv_blocks)
    run(Experiment(workload=trace, replicas=(replica,), router=RoundRobin()), check_invariants=True)


def test_the_run_that_is_broken_below_is_sound() -> None:
    a_run()
    a_run(kv_blocks=90)


@patches_the_engine
def test_a_pool_that_loses_a_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(self: KvPool, blocks: int) -> None:
        self.free += blocks - 1

    monkeypatch.setattr(KvPool, "give", give)
    with pytest.raises(InvariantError, match="INV-1 at t="):
        a_run(kv_blocks=90)


@patches_the_engine
def test_a_request_in_two_places_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue = Sequences.enqueue

    def twice(self: Sequences, id_: int, kv_tokens: int, now_ns: int) -> None:
        enqueue(self, id_, kv_tokens, now_ns)
        enqueue(self, id_, kv_tokens, now_ns)

    monkeypatch.setattr(Sequences, "enqueue", twice)
    with pytest.raises(InvariantError, match="INV-2 at t="):
        a_run()


@patches_the_engine
def test_a_preempted_sequence_that_forgets_what_it_emitted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_seq = RequestState.waiting_seq

    def without_output(self: RequestState, id_: int, **settings: int) -> object:
        return waiting_seq(self, id_, **settings)._replace(tokens=self.prompt[id_])

    monkeypatch.setattr(RequestState, "waiting_seq", without_output)
    with pytest.raises(InvariantError, match="INV-5 at t="):
        a_run()


def test_a_machine_that_answers_another_within_the_same_nanosecond_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "FELT_AFTER_NS", 0)
    clients = ClosedLoop(prompt_tokens=np.full(9, 10), output_tokens=np.full(9, 3), concurrency=3, think_ns=None)
    replica = ReplicaSpec(cost=Linear(), scheduler=OrcaPaged(8), kv_blocks=90)
    with pytest.raises(InvariantError, match="INV-7 at t="):
        run(Experiment(workload=clients, replicas=(replica, replica), router=RoundRobin()), check_invariants=True)
