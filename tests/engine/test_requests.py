"""Columns of requests that grow, and what runs in threads share of the process."""

from __future__ import annotations

import gc
import random
from array import array
from itertools import product
from threading import Event, Thread
from unittest.mock import Mock

import pytest

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.view import Plan, ReplicaView
from policies.vllm import Vllm
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.record.columns import UNFINISHED, Recorder
from sim.engine.requests.state import RequestState
from sim.engine.serve.sequences import Sequences
from tests.engine.costs import Linear
from workloads import Trace


@pytest.mark.parametrize(("allows", "models", "classes"), list(product([False, True], repeat=3)))
def test_a_request_more_is_kept_in_every_column_that_the_run_has(allows: bool, models: bool, classes: bool) -> None:
    def one(value: int) -> array[int]:
        return array("q", [value])

    state = RequestState(
        one(1),
        one(2),
        one(3),
        pipelined=True,
        max_tokens=one(9) if allows else None,
    )
    state.model = state.keep(one(0)) if models else None
    state.priority = state.keep(one(4)) if classes else None
    state.add(100, 7, 99, 5, model=2, priority=6)
    assert (list(state.prompt), list(state.output), list(state.left)) == ([1, 100], [2, 7], [2, 7])
    assert list(state.arrival) == [3, 5]
    # Where nothing says what clients allow, it is what they get.
    assert list(state.max_tokens) == ([9, 99] if allows else [2, 7])
    assert state.model is None or list(state.model) == [0, 2]
    assert state.priority is None or list(state.priority) == [4, 6]
    assert (list(state.finish), list(state.status)) == ([-1, -1], [UNFINISHED] * 2)


class Waits:
    """Serves one request after the other, and at its first look waits to be told to go on."""

    def __init__(self) -> None:
        self.begun, self.goes_on = Event(), Event()

    def plan(self, view: ReplicaView, /) -> Plan:
        self.begun.set()
        assert self.goes_on.wait(30)
        return OrcaPaged(1).plan(view)


def test_runs_that_overlap_in_threads_leave_the_garbage_collector_as_it_was() -> None:
    before = gc.get_threshold()
    workload = Trace(arrival_ns=[0], prompt_tokens=[8], output_tokens=[3])
    schedulers = [Waits(), Waits(), Waits()]
    threads: list[Thread] = []
    seen: list[tuple[int, ...]] = []
    for scheduler in schedulers:
        spec = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=10)
        experiment = Experiment(workload=workload, replicas=(spec,), router=RoundRobin())
        threads.append(Thread(target=run, args=(experiment,)))
        threads[-1].start()
        assert scheduler.begun.wait(30)
    # The first to begin ends first, and the others have it as it was for them.
    for scheduler, thread in zip(schedulers, threads, strict=True):
        seen.append(gc.get_threshold())
        scheduler.goes_on.set()
        thread.join(30)
    assert seen == [(50_000, *before[1:])] * 3
    assert gc.get_threshold() == before


@pytest.mark.parametrize("seed", range(20))
def test_the_short_way_to_say_that_a_request_fits_agrees_with_the_long_one(seed: int) -> None:
    rng = random.Random(seed)
    prompt, output = (array("q", rng.choices(range(50), k=300)) for _ in range(2))
    decoding = rng.choice(
        [None, Speculative(method="draft_model", num_speculative_tokens=3, acceptance=Iid(alpha=0.6))]
    )
    spec = ReplicaSpec(
        cost=Linear(),
        scheduler=rng.choice([Sarathi(), Vllm()]),
        kv_blocks=rng.randint(1, 5),
        max_model_len=rng.choice([None, rng.randint(1, 90)]),
        decoding=decoding,
    )
    state = RequestState(prompt, output, array("q", bytes(8 * 300)))
    sequences = Sequences(spec, state, Mock(), Recorder(), alone=True)
    for id_ in range(300):
        assert sequences.refusal(id_) == sequences.never_fits(prompt[id_], output[id_])
