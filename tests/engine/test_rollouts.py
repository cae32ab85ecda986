"""Steps of rollouts, against a count by hand on machines whose iterations take a millisecond whatever runs in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.routers import LeastOutstanding
from policies.schedulers import Sarathi
from policies.vllm import Vllm
from sim.engine import ABORTED, FINISHED, Columns, Experiment, ReplicaSpec, run
from sim.metrics.rollout import rollout_figures
from sim.theory.rollout import packing_bound_s
from tests.engine.costs import Linear
from tests.sample import few
from workloads import Fixed, LogNormal, Resampled, Rollout, Uniform
from workloads.rollout import RolloutRequests

MS = 1_000_000


def made(rollout: Rollout, *, lengths: Any = None, seed: int = 0) -> RolloutRequests:
    return rollout.workload(Fixed(tokens=4), lengths or Uniform(min_tokens=1, max_tokens=40), seed)


def served(
    requests: RolloutRequests,
    *,
    machines: int = 1,
    scheduler: Any = None,
    cost: Any = None,
    kv_blocks: int = 100_000,
    **how: Any,
) -> Columns:
    """All prompts fit in one iteration, and each iteration takes a millisecond."""
    spec = ReplicaSpec(cost=cost or Linear(), scheduler=scheduler or Sarathi(token_budget=10_000), kv_blocks=kv_blocks)
    return run(Experiment(workload=requests, replicas=(spec,) * machines, router=LeastOutstanding()), **how)


def counted(requests: RolloutRequests) -> list[float]:
    """The ends of steps in ms, on one machine, by the tick: whoever is under way has a token after each."""
    rollout, samples = requests.rollout, requests.rollout.samples
    left = dict[int, int]()
    coming = list[tuple[int, int]]()
    ends: list[float] = []
    batch = taken = now = 0
    ended = np.zeros(len(requests.groups.step), int)

    def send(at: int) -> None:
        nonlocal batch
        groups = np.flatnonzero(requests.groups.batch == batch)
        coming.extend((at, row) for group in groups for row in range(group * samples, (group + 1) * samples))
        batch += 1

    send(0)
    while True:
        now = now if left else max(now, min(at for at, _ in coming))
        left |= {row: int(requests.output_tokens[row]) for at, row in coming if at <= now}
        coming = [(at, row) for at, row in coming if row not in left]
        now += 1
        left = {row: tokens - 1 for row, tokens in left.items()}
        for row in [row for row, tokens in sorted(left.items()) if tokens == 0]:
            if left.pop(row, None) is None:
                continue  # It was aborted at this instant.
            ended[row // samples] += 1
            if ended[row // samples] == samples and requests.groups.informative[row // samples]:
                taken += 1
                if taken == rollout.of_a_step:
                    taken = 0
                    ends.append(now)
                    if len(ends) == rollout.steps:
                        return ends
                    if rollout.leftover == "abort":
                        left.clear()
                    send(now + round(rollout.update_s * 1e3))
                    continue
            if rollout.leftover == "abort" and not left and not coming:
                send(now)


def ends_ms(columns: Columns, requests: RolloutRequests) -> list[float]:
    """The ends of steps by `rollout_figures`."""
    found = rollout_figures(columns.requests, requests.rollout, requests.groups, 1)["rollout"]["steps"]
    return [(each["begin_s"] + each["step_s"]) * 1e3 for each in found]


def drawn(seed: int) -> RolloutRequests:
    rng = np.random.default_rng(seed)
    prompts = int(rng.integers(2, 7))
    leftover: Any = "abort" if rng.random() < 0.6 else "continue"
    some = leftover == "abort" and rng.random() < 0.5
    rollout = Rollout(
        prompts=prompts,
        samples=int(rng.integers(1, 4)),
        steps=int(rng.integers(1, 5)),
        wanted=int(rng.integers(1, prompts + 1)),
        informative=0.5 if some else 1.0,
        leftover=leftover,
        # An iteration begins with the answers that are being aborted: an update that is as long hides it.
        update_s=float(rng.integers(1, 30)) * 1e-3,
    )
    return made(rollout, seed=seed)


def stopping(seed: int) -> RolloutRequests:
    """The same with machines that stand still, drop what they keep, or give answers to others."""
    requests, rng = drawn(seed), np.random.default_rng(seed + 1_000_000)
    rollout = replace(
        requests.rollout,
        leftover=str(rng.choice(["continue", "recompute"])),
        informative=1.0,
        pause_s=float(rng.choice([0.0, 2.5e-3, 0.1])),
        redistribute=None if rng.random() < 0.5 else float(rng.choice([0.3, 0.6, 0.9])),
    )
    return made(rollout, seed=seed)


@pytest.mark.parametrize("first", few(range(0, 200, 50)))
def test_steps_end_when_a_count_by_the_tick_says(first: int) -> None:
    for seed in range(first, first + 50):
        requests = drawn(seed)
        assert ends_ms(served(requests), requests) == pytest.approx(counted(requests), abs=1e-4), seed


@pytest.mark.parametrize("seeds", few([range(20), range(20, 60)]))
def test_spans_equal_stepping(seeds: range) -> None:
    for seed in seeds:
        requests = drawn(seed)
        columns, stepped = (
            served(requests, machines=2, fast_forward=fast, check_invariants=not fast) for fast in (True, False)
        )
        for name in ("status", "arrival_ns", "first_token_ns", "finish_ns", "emitted_tokens", "replica"):
            assert (columns.requests[name] == stepped.requests[name]).all(), (seed, name)


@pytest.mark.parametrize("seeds", few([range(20), range(20, 1_000)]))
def test_spans_equal_stepping_where_machines_stand_still(seeds: range) -> None:
    for seed in seeds:
        requests, rng = stopping(seed), np.random.default_rng(seed)
        scheduler = Vllm(max_num_batched_tokens=64, max_num_seqs=5, async_scheduling=bool(rng.random() < 0.7))
        cost = Linear(kv_s=float(rng.choice([0.0, 1e-6])))
        columns, stepped = (
            served(
                requests,
                machines=3,
                scheduler=scheduler,
                cost=cost,
                kv_blocks=60,
                fast_forward=fast,
                check_invariants=not fast,
            )
            for fast in (True, False)
        )
        for name in (
            "status",
            "arrival_ns",
            "first_token_ns",
            "finish_ns",
            "emitted_tokens",
            "replica",
            "recomputed_tokens",
        ):
            assert (columns.requests[name] == stepped.requests[name]).all(), (seed, name)
        wanted = np.isin(columns.requests["status"], (FINISHED, ABORTED))
        assert wanted[columns.requests["arrival_ns"] >= 0].all()


def test_machines_stand_still_while_weights_are_loaded_and_keep_their_kv() -> None:
    rollout = Rollout(prompts=2, wanted=1, steps=2, leftover="continue", update_s=5e-3, pause_s=0.1)
    requests = replace(made(rollout), output_tokens=np.array([10, 30, 2]))
    columns = served(requests)

    # The first step ends at 10 ms. An iteration that begins at 15 ms ends; two more begin behind the pause, and then all is over.
    assert columns.requests["finish_ns"].tolist() == [10 * MS, -1, 117 * MS]
    assert columns.requests["arrival_ns"].tolist() == [0, 0, 115 * MS]
    assert columns.requests["emitted_tokens"].tolist() == [10, 18, 2]
    assert not columns.requests["recomputed_tokens"].any()


def test_answers_are_computed_again_with_what_they_have_where_kv_is_dropped() -> None:
    rollout = Rollout(prompts=2, wanted=1, steps=2, leftover="recompute", update_s=5e-3, pause_s=0.1)
    requests = replace(made(rollout), output_tokens=np.array([10, 19, 40]))
    columns = served(requests)

    # The iteration that ends at 15 ms is dropped: 14 tokens, of which the latest has no KV yet, and 5 more behind the pause.
    assert columns.requests["finish_ns"][:2].tolist() == [10 * MS, 120 * MS]
    assert columns.requests["recomputed_tokens"][:2].tolist() == [0, 4 + 13]


def test_the_tail_is_spread_over_the_machines_once_a_share_has_ended() -> None:
    """Six answers in turn on two machines: those of the second are short, and half of the long ones go there."""
    rollout = Rollout(prompts=6, redistribute=0.5)
    requests = replace(made(rollout), output_tokens=np.array([50, 5, 50, 5, 50, 5]))
    spread = served(requests, machines=2).requests
    stay = served(replace(requests, rollout=replace(rollout, redistribute=None)), machines=2).requests
    assert stay["replica"].tolist() == [0, 1, 0, 1, 0, 1]
    assert sorted(spread["replica"][[0, 2, 4]].tolist()) in ([0, 0, 1], [0, 1, 1])
    assert spread["recomputed_tokens"][[1, 3, 5]].tolist() == [0, 0, 0]
    assert (spread["recomputed_tokens"][[0, 2, 4]] > 0).all()


def test_answers_under_way_are_aborted_when_enough_groups_have_ended() -> None:
    requests = replace(made(Rollout(prompts=3, wanted=2)), output_tokens=np.array([5, 50, 9]))
    columns = served(requests)

    assert columns.requests["status"].tolist() == [FINISHED, ABORTED, FINISHED]
    assert columns.requests["finish_ns"].max() < 12 * MS


def test_leftover_answers_go_on_with_what_they_have() -> None:
    rollout = Rollout(prompts=2, wanted=1, steps=2, leftover="continue")
    requests = made(rollout, lengths=Resampled(tokens=(10, 14)), seed=1)
    columns = served(requests)

    assert len(requests) == 3
    finished = columns.requests["status"] == FINISHED
    assert finished.sum() == 2
    assert (columns.requests["recomputed_tokens"] == 0).all()


def test_no_step_is_shorter_than_the_longest_answer_that_it_waits_for() -> None:
    for seed in range(100):
        requests = drawn(seed)
        if requests.rollout.leftover == "continue" or requests.rollout.of_a_step < requests.rollout.prompts:
            continue
        figures = rollout_figures(served(requests, machines=2).requests, requests.rollout, requests.groups, 2)[
            "rollout"
        ]
        groups = requests.groups
        for step, each in enumerate(figures["steps"]):
            rows = np.repeat((groups.step == step) & groups.informative, requests.rollout.samples)
            assert (
                each["step_s"] * 1e3 >= requests.output_tokens[rows].max() - 1e-6
                or rows.sum() > requests.rollout.of_a_step
            )


@pytest.mark.parametrize("seeds", few([range(20), range(20, 1_060)]))
def test_the_last_answer_comes_when_a_count_says_and_not_before_the_bound(seeds: range) -> None:
    """Machines that serve one answer at a time, a millisecond a token: the count is of each machine's own tokens."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rollout = Rollout(prompts=int(rng.integers(1, 20)), samples=int(rng.integers(1, 5)))
        requests, machines = (
            made(rollout, lengths=LogNormal(mu=2.7, sigma=1.2, max_tokens=300), seed=seed),
            int(rng.integers(1, 6)),
        )
        alone = Sarathi(token_budget=10_000, max_sequences=1)
        found = served(requests, machines=machines, scheduler=alone).requests
        lengths = requests.output_tokens
        by_machine = [int(lengths[found["replica"] == machine].sum()) for machine in range(machines)]
        assert found["finish_ns"].max() == max(by_machine) * MS, seed
        assert max(by_machine) >= packing_bound_s(int(lengths.max()), int(lengths.sum()), machines), seed
        together = served(requests, machines=machines).requests
        assert together["finish_ns"].max() == lengths.max() * MS, seed


def test_figures_of_a_step_by_hand() -> None:
    """Ten answers of 1 to 10 ms on two machines, five each: the last of the first machine is there after 9 ms, then it idles."""
    requests = replace(made(Rollout(prompts=10)), output_tokens=np.arange(1, 11))
    figures = rollout_figures(served(requests, machines=2).requests, requests.rollout, requests.groups, 2)["rollout"]

    (step,) = figures["steps"]
    assert step["step_s"] == pytest.approx(10e-3)
    assert (step["p90_s"], step["p99_s"]) == (pytest.approx(9e-3), pytest.approx(10e-3))
    assert figures["tail_share"] == pytest.approx(0.1)
    assert step["idle_s"] == pytest.approx(1e-3)
    assert figures["idle_share"] == pytest.approx(0.05)
    assert figures["answers"] == {"kept": 10, "dropped": 0, "aborted": 0}
