"""LoRA adapters: who joins a batch, what is loaded, and what it costs."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import islice
from typing import Literal

import numpy as np
import pytest

from policies.adapters import MaxLoras
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.sglang import Sglang
from policies.view import WaitingSeq
from policies.vllm import Vllm, VllmV0
from sim.engine import Columns, Experiment, InvariantError, MachineSpec, ReplicaSpec, run
from sim.engine.serve.adapter_queue import AdapterQueue
from sim.engine.serve.adapters import Adapters
from sim.engine.spec.adapters import AdapterSpec
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear, Ranked
from tests.engine.random_runs import an_experiment, run_both_ways, with_adapters
from tests.sample import some
from workloads import Trace, keyed_by_adapter

MS = 1_000_000


Inner = Vllm | VllmV0 | Sarathi | Sglang


def free(*_: object) -> float:
    return 0.0


def spec(
    *ranks: int, slots: int, host: int | None = None, loaded: bool = False, step_s: Callable[[int, Collection[int]], float] = free,
    disk_s: Callable[[int], float] = free, slot_s: Callable[[int], float] = free, base_has_slot: bool = False,
    eviction: Literal["lru", "fifo"] = "lru",
) -> AdapterSpec:  # fmt: skip
    return AdapterSpec(
        ranks=ranks, max_loras=slots, max_cpu_loras=host or slots, loaded=loaded, step_s=step_s, disk_s=disk_s,
        slot_s=slot_s, base_has_slot=base_has_slot, eviction=eviction,
    )  # fmt: skip


def served(trace: Trace, adapters: AdapterSpec | None, *, inner: Inner | None = None, caches: bool = False) -> Columns:
    scheduler = Vllm(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False) if inner is None else inner
    core = ReplicaSpec(
        cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=400, adapters=adapters,
        prefix_cache="blocks" if caches else None,
    )  # fmt: skip
    if adapters is not None:
        limited = (
            scheduler.with_max_loras(adapters.max_loras)
            if isinstance(scheduler, Vllm | Sglang)
            else MaxLoras(scheduler, max_loras=adapters.max_loras, counts_base=adapters.base_has_slot)
        )
        core = replace(core, scheduler=limited)
    return run(Experiment(workload=trace, replicas=(core,), router=RoundRobin()), check_invariants=True)


def trace_of(*adapter: int, prompt: int = 8, output: int = 10, every_ns: int = 0) -> Trace:
    n = len(adapter)
    return Trace(
        arrival_ns=[i * every_ns for i in range(n)], prompt_tokens=[prompt] * n, output_tokens=[output] * n,
        adapter=adapter,
    )  # fmt: skip


def test_a_request_whose_adapter_has_no_slot_is_passed_over_and_those_behind_it_join() -> None:
    columns = served(trace_of(0, 1, 0, -1), spec(8, 8, slots=1))
    first, other, same, base = columns.requests["scheduled_ns"].tolist()
    assert first == same == base == 0
    assert other == columns.requests["finish_ns"][0] > 0


INNER = [Vllm(async_scheduling=False), Vllm(), VllmV0(), Sarathi(), Sglang(), Sglang(disable_overlap_schedule=True)]


@pytest.mark.parametrize("base_has_slot", [False, True], ids=["adapters alone", "base model, too"])
@pytest.mark.parametrize("inner", INNER, ids=lambda each: str(each)[:16])
def test_slots_that_are_never_short_and_cost_nothing_change_nothing(inner: Inner, base_has_slot: bool) -> None:
    rng = random.Random(3)
    for _ in range(6):
        trace = trace_of(*(rng.randrange(-1, 3) for _ in range(30)), every_ns=rng.choice([0, MS, 3_333_333]))
        with_slots = served(trace, spec(8, 8, 8, slots=4, loaded=True, base_has_slot=base_has_slot), inner=inner)
        without = served(replace(trace, adapter=None), None, inner=inner)
        for name in ("scheduled_ns", "first_token_ns", "finish_ns"):
            np.testing.assert_array_equal(with_slots.requests[name], without.requests[name])


def test_the_base_model_takes_a_place_by_the_rule_of_sglang() -> None:
    columns = served(trace_of(0, -1, 0, 1), spec(8, 8, slots=1, base_has_slot=True), inner=Sglang())
    first, base, same, other = columns.requests["scheduled_ns"].tolist()
    assert first == same == 0
    # The one that came first of those that were passed over.
    assert columns.requests["finish_ns"][2] <= base < other


@pytest.mark.parametrize(
    ("eviction", "loads"), [("lru", [0, 1, 2, 1]), ("fifo", [0, 1, 2, 0])], ids=["least recently used", "first come"]
)
def test_the_adapter_that_gives_up_its_slot_is_the_one_that_the_policy_says(
    eviction: Literal["lru", "fifo"], loads: list[int]
) -> None:
    # Of the three slots the base model has one. 2 takes the place of 1, used longest ago, or of 0, the first that came.
    trace = trace_of(0, 1, 0, 2, *(loads[-1:]), output=1, every_ns=100 * MS)
    slots = spec(8, 8, 8, slots=3, base_has_slot=True, eviction=eviction)
    adapters = served(trace, slots, inner=Sglang()).replicas[0].adapters
    assert adapters is not None
    assert [adapter for _, adapter, to, _ in adapters.loads if to == 1] == loads


def test_each_iteration_has_the_number_of_its_different_adapters() -> None:
    """The base model is none; of a replica that has no adapters there is no number."""
    trace = Trace(
        arrival_ns=[0, 0, 0, 0], prompt_tokens=[8] * 4, output_tokens=[2, 4, 6, 8], adapter=[0, 1, 0, -1]
    )  # fmt: skip
    slots = spec(8, 8, slots=2)
    columns = served(trace, slots, inner=Vllm(async_scheduling=False))
    # Until the adapters' last answers end, after the fourth and the sixth iteration.
    assert columns.iterations()["adapters"].tolist() == [2, 2, 2, 2, 1, 1, 0, 0]
    assert "adapters" not in served(replace(trace, adapter=None), None).iterations()


@pytest.mark.parametrize("inner", INNER, ids=lambda each: str(each)[:16])
def test_iterations_have_the_adapters_that_their_sums_have(inner: Inner) -> None:
    rng = random.Random(5)
    for _ in range(4):
        trace = trace_of(*(rng.randrange(-1, 4) for _ in range(40)), every_ns=rng.choice([0, MS, 3_333_333]))
        columns = served(trace, spec(8, 8, 8, 8, slots=2, step_s=lambda rows, ranks: 1e-4 * len(ranks)), inner=inner)
        table, adapters = columns.iterations(), columns.replicas[0].adapters
        assert adapters is not None
        assert table["adapters"].max() == adapters.most_running
        assert int((table["adapters"] * table["duration_ns"]).sum()) == adapters.adapter_ns


def test_host_memory_keeps_the_adapters_of_a_step_while_it_reads_others_for_it() -> None:
    trace = Trace(
        arrival_ns=[0, 100 * MS, 200 * MS, 300 * MS, 300 * MS], prompt_tokens=[8] * 5, output_tokens=[1] * 5,
        adapter=[3, 0, 1, 2, 3],
    )  # fmt: skip
    adapters = served(trace, spec(8, 8, 8, 8, slots=3, base_has_slot=True), inner=Sglang()).replicas[0].adapters
    assert adapters is not None
    # The last step reads 2 in the place of 0, and not of 3, which was used longest ago and is its own.
    assert [adapter for _, adapter, to, _ in adapters.loads if to == 0] == [3, 0, 1, 2]


def test_a_cold_adapter_is_read_and_copied_in_the_iteration_of_its_first_request() -> None:
    costs = spec(8, 16, slots=1, disk_s=lambda rank: rank * 1e-2, slot_s=lambda rank: rank * 1e-4)
    columns = served(trace_of(1, output=1), costs)
    alone = served(trace_of(-1, output=1), costs)
    assert columns.requests["finish_ns"][0] - alone.requests["finish_ns"][0] == 160 * MS + 1_600_000
    adapters = columns.replicas[0].adapters
    assert adapters is not None
    assert adapters.loads == ((0, 1, 0, 160 * MS), (160 * MS, 1, 1, 1_600_000))


def test_a_load_is_part_of_one_iteration_of_a_span() -> None:
    costs = spec(8, slots=1, disk_s=lambda _: 0.5)
    gaps = np.diff(served(trace_of(0, output=5), costs).iterations()["start_ns"])
    assert (gaps > 400 * MS).sum() == 1


def test_an_iteration_is_longer_by_its_tokens_and_the_ranks_of_its_different_adapters() -> None:
    costs = spec(64, 8, 16, slots=3, loaded=True, step_s=lambda rows, ranks: rows * 1e-6 + sum(ranks) * 1e-4)
    plain = served(replace(trace_of(0, 1, 1, -1), adapter=None), None).iterations()["duration_ns"]
    longer = served(trace_of(0, 1, 1, -1), costs).iterations()["duration_ns"]
    assert longer[0] - plain[0] == 4 * 8 * 1000 + 7_200_000
    assert set((longer[1:] - plain[1:]).tolist()) == {4 * 1000 + 7_200_000}


def test_loads_are_those_of_two_lists_of_the_least_recently_used() -> None:
    rng = random.Random(11)
    for _ in range(40):
        count, slots = rng.randrange(2, 7), rng.randrange(1, 4)
        host = slots + rng.randrange(0, 3)
        asked = [rng.randrange(count) for _ in range(40)]
        trace = trace_of(*asked, output=1, every_ns=10 * MS)
        adapters = served(trace, spec(*[8] * count, slots=slots, host=host)).replicas[0].adapters
        assert adapters is not None
        on_host, on_device, expected = OrderedDict[int, None](), OrderedDict[int, None](), list[tuple[int, int]]()
        for adapter in asked:
            for to, kept, room in ((0, on_host, host), (1, on_device, slots)):
                if adapter not in kept:
                    expected.append((adapter, to))
                    if len(kept) == room:
                        dropped, _ = kept.popitem(last=False)
                        on_device.pop(dropped, None) if to == 0 else None
                kept[adapter] = None
                kept.move_to_end(adapter)
        assert [(adapter, to) for _, adapter, to, _ in adapters.loads] == expected


def test_equal_prompts_are_found_again_by_requests_for_the_same_adapter_alone() -> None:
    trace = Trace(
        arrival_ns=[0, 100 * MS, 200 * MS, 300 * MS], prompt_tokens=[64] * 4, output_tokens=[1] * 4, adapter=[0, 1, 0, -1],
        prefix_blocks=[7, 8, 9, 10] * 4, prefix_offsets=[0, 4, 8, 12, 16], prefix_block_tokens=16,
    )  # fmt: skip
    columns = served(keyed_by_adapter(trace), spec(8, 8, slots=2), caches=True)
    assert (columns.requests["prefix_hit_tokens"] > 0).tolist() == [False, False, True, False]


def test_figures_say_how_many_adapters_ran_and_how_many_requests_waited_for_a_slot() -> None:
    adapters = served(trace_of(0, 1, 1), spec(8, 8, slots=1, loaded=True)).replicas[0].adapters
    assert adapters is not None
    assert adapters.most_running == 1
    assert adapters.adapter_ns == adapters.busy_ns
    # Two wait while the first is served, which takes half of the time.
    assert adapters.waiting_ns == adapters.busy_ns


@pytest.mark.parametrize("fast_forward", [True, False], ids=["spans", "steps"])
def test_requests_that_wait_for_a_slot_are_counted_from_the_instant_at_which_they_come(fast_forward: bool) -> None:
    core = ReplicaSpec(
        cost=Linear(fixed_s=1e-3), scheduler=Vllm(max_loras=1), kv_blocks=400, adapters=spec(8, 8, slots=1, loaded=True)
    )
    trace = trace_of(0, 1, output=10, every_ns=3_300_000)
    columns = run(Experiment(workload=trace, replicas=(core,), router=RoundRobin()), fast_forward=fast_forward)
    adapters = columns.replicas[0].adapters
    assert adapters is not None
    assert adapters.waiting_ns == columns.requests["finish_ns"][0] - 3_300_000


@pytest.mark.parametrize("fast_forward", [True, False], ids=["spans", "steps"])
def test_a_sequence_that_has_ended_keeps_nobody_waiting(fast_forward: bool) -> None:
    # The first has ended when the third comes in the middle of a step of the second, which then has one of two slots.
    core = ReplicaSpec(
        cost=Linear(fixed_s=1e-3), scheduler=Vllm(max_loras=2), kv_blocks=400,
        adapters=spec(8, 8, 8, slots=2, host=3, loaded=True),
    )  # fmt: skip
    trace = Trace(arrival_ns=[0, 0, 9_300_000], prompt_tokens=[8] * 3, output_tokens=[4, 30, 4], adapter=[0, 1, 2])
    adapters = run(
        Experiment(workload=trace, replicas=(core,), router=RoundRobin()), fast_forward=fast_forward
    ).replicas[0].adapters  # fmt: skip
    assert adapters is not None
    assert adapters.waiting_ns == 0


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_spans_equal_stepping_with_adapters_and_slots_hold_at_every_event(speculative: bool) -> None:
    loaded = 0
    for case in range(6):
        experiment = with_adapters(an_experiment(case, speculative=speculative), case)
        columns = run_both_ways(experiment)
        loaded += sum(len(each.adapters.loads) for each in columns.replicas if each.adapters is not None)
    assert loaded > 6


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_spans_equal_stepping_with_adapters_over_many_runs(speculative: bool) -> None:
    for case in some(range(2000, 3000)):
        experiment = with_adapters(an_experiment(case, speculative=speculative), case)
        run_both_ways(experiment)


@patches_the_engine
def test_a_batch_with_an_adapter_that_has_no_slot_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapters, "_take_in_turn", lambda self, wanted, ticks: 0)
    with pytest.raises(InvariantError, match="INV-14"):
        served(trace_of(0), spec(8, slots=1))


def test_the_queue_is_an_ordinary_one_whatever_comes_and_goes() -> None:
    rng = random.Random(5)
    of = array("q", [rng.randrange(-1, 4) for _ in range(400)])
    queue, plain = AdapterQueue(of), deque[WaitingSeq]()
    for id_ in range(400):
        seq, place = WaitingSeq(id_, 1), rng.randrange(len(plain) + 2)
        what = rng.choice(["append", "appendleft", "insert", "append"])
        for each in (queue, plain):
            each.insert(place, seq) if what == "insert" else getattr(each, what)(seq)
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            if plain:
                gone = plain.popleft() if rng.random() < 0.3 else rng.choice(list(plain))
                if gone in plain:
                    plain.remove(gone)
                queue.remove(gone)
        assert list(queue) == list(plain)
        assert list(reversed(queue)) == list(reversed(plain))
        assert len(queue) == len(plain)
        assert not plain or queue[0] == plain[0]
        some_adapters = {adapter for adapter in range(-1, 4) if rng.random() < 0.5}
        behind = rng.randrange(len(plain)) if plain and rng.random() < 0.5 else -1
        rest = islice(plain, behind + 1, None)
        found = queue.among(some_adapters, plain[behind].id if behind >= 0 else -1)
        assert list(found) == [seq for seq in rest if of[seq.id] in some_adapters]


CORE = ReplicaSpec(cost=Ranked(), scheduler=Vllm(), kv_blocks=40, adapters=spec(8, slots=1))


@pytest.mark.parametrize(
    "machine",
    [
        lambda: MachineSpec(hosted=(replace(CORE, cost=Linear(n_stages=2)),)),
        lambda: MachineSpec(hosted=(replace(CORE, micro_batches=2),)),
        lambda: MachineSpec(hosted=(CORE,), ranks=2, rank_router=RoundRobin()),
    ],
    ids=["pipeline", "micro-batches", "ranks"],
)
def test_what_is_not_modelled_beside_adapters_is_refused(machine: Callable[[], MachineSpec]) -> None:
    with pytest.raises(ValueError, match="adapters beside ranks, a pipeline or several micro-batches are not modelled"):
        machine()


def test_a_host_with_less_room_than_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="max_cpu_loras is at least max_loras"):
        spec(8, slots=4, host=3)
