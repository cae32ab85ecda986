"""Answers that grammars constrain: what is compiled, who waits for it, and what masks add to an iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.routers import RoundRobin
from policies.vllm import Vllm
from sim.engine import Columns, Experiment, PolicyError, ReplicaSpec, run
from sim.engine.batch.grammars import GrammarSpec
from sim.engine.batch.masks import Masks
from sim.engine.batch.pricing import Pricing
from sim.engine.time.clock import TICK_BITS
from tests.engine.costs import Linear
from tests.engine.random_runs import (
    an_experiment,
    apart,
    assert_same,
    grammars_on,
    with_adapters,
    with_fleet,
    with_grammars,
    with_tiers,
)
from workloads import Trace

MS = 1_000_000


def machine(grammars: GrammarSpec | None, **settings: Any) -> ReplicaSpec:
    return ReplicaSpec(
        **{
            "cost": Linear(fixed_s=1e-3),
            "scheduler": Vllm(max_num_batched_tokens=100, max_num_seqs=8, async_scheduling=False),
            "kv_blocks": 1000,
            "grammars": grammars,
            **settings,
        }
    )


def ran(spec: ReplicaSpec, arrivals_ns: list[int], prompt: int = 10, output: int = 4, **settings: Any) -> Columns:
    n = len(arrivals_ns)
    workload = Trace(arrival_ns=arrivals_ns, prompt_tokens=[prompt] * n, output_tokens=[output] * n)
    return run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), **settings), check_invariants=True)


def test_a_request_waits_for_its_grammar_and_others_pass_it() -> None:
    grammars = GrammarSpec(grammar=[0, -1, 0, 0], compile_s=[0.01])
    requests = ran(machine(grammars), [0, 0, 2 * MS, 20 * MS]).requests
    # The second asks for none. The third shares what the first has begun, and the fourth finds it compiled.
    assert requests["scheduled_ns"].tolist() == [10 * MS, 0, 10 * MS, 20 * MS]
    assert requests["grammar_wait_ns"].tolist() == [10 * MS, 0, 8 * MS, 0]


def test_grammars_wait_for_a_thread_and_the_one_used_longest_ago_is_compiled_again() -> None:
    one = GrammarSpec(grammar=[0, 1, 0, 1], compile_s=[0.01, 0.02], threads=1, kept=1)
    requests = ran(machine(one), [0, 0, 50 * MS, 100 * MS]).requests
    assert requests["grammar_wait_ns"].tolist() == [10 * MS, 30 * MS, 10 * MS, 20 * MS]
    both = replace(one, kept=2)
    assert ran(machine(both), [0, 0, 50 * MS, 100 * MS]).requests["grammar_wait_ns"].tolist() == [
        10 * MS,
        30 * MS,
        0,
        0,
    ]


def test_a_kept_grammar_that_is_used_again_is_kept_longer() -> None:
    grammars = GrammarSpec(grammar=[0, 1, 0, 2, 0], compile_s=[0.01] * 3, kept=2)
    arrivals = [0, 20 * MS, 40 * MS, 60 * MS, 80 * MS]
    assert ran(machine(grammars), arrivals).requests["grammar_wait_ns"].tolist() == [10 * MS, 10 * MS, 0, 10 * MS, 0]


@pytest.mark.parametrize(("goes_first", "order"), [(True, [0, 1, 2, 3]), (False, [0, 2, 3, 1])])
def test_one_whose_grammar_is_done_goes_ahead_of_those_that_wait_for_nothing_else(
    goes_first: bool, order: list[int]
) -> None:
    grammars = GrammarSpec(grammar=[-1, 0, -1, -1], compile_s=[0.002], goes_first=goes_first)
    one_at_a_time = Vllm(max_num_batched_tokens=100, max_num_seqs=1, async_scheduling=False)
    requests = ran(machine(grammars, scheduler=one_at_a_time), [0, 0, 1, 2]).requests
    assert np.argsort(requests["scheduled_ns"]).tolist() == order


@pytest.mark.parametrize(
    ("mask_s", "overlapped", "step_ms"),
    [(1e-4, True, 1.002), (8e-4, True, 1.602), (1e-4, False, 1.202), (8e-4, False, 2.602)],
)
def test_masks_take_what_the_forward_pass_does_not_hide(mask_s: float, overlapped: bool, step_ms: float) -> None:
    """Two of three sequences have a grammar; a mask takes 1 us on the device whether the host's work is hidden or not."""
    grammars = GrammarSpec(grammar=[0, -1, 0], compile_s=[0.0], mask_s=mask_s, apply_s=1e-6, overlapped=overlapped)
    requests = ran(machine(grammars), [0, 0, 0], output=11).requests
    assert requests["finish_ns"].tolist() == pytest.approx([11 * step_ms * MS] * 3, abs=11)


def test_every_verified_token_has_a_mask() -> None:
    grammars = GrammarSpec(grammar=[0], compile_s=[0.0], mask_s=1e-3, overlapped=False)
    drafting = Speculative(method="ngram", num_speculative_tokens=3, acceptance=Iid(alpha=1.0))
    spec = machine(grammars, decoding=drafting)
    # The prompt's token, and two rounds of four each.
    finish = ran(spec, [0], output=9).requests["finish_ns"]
    assert finish.tolist() == pytest.approx([(2 + 5 + 5) * MS], abs=3)


@pytest.mark.parametrize("windowed", [False, True])
def test_prices_with_masks_are_the_longer_of_the_two_at_every_point(windowed: bool) -> None:
    cost = Linear(fixed_s=1e-4, kv_s=1e-7, window_s=2e-7 if windowed else 0.0, window_tokens=512 if windowed else None)
    plain = Pricing(cost, None, 0.0)
    spec = GrammarSpec(grammar=[], compile_s=[], mask_s=1e-4, apply_s=1e-6)
    inner, masked = (each.decode_lines(4, 1, 0) for each in (plain, Masks(spec, plain).prices(3)))
    for kv in (4, 100, 1900, 1999, 2000, 2001, 2500, 50_000):
        for window in (4, min(kv, 2000)):
            line, under = inner(kv, window), masked(kv, window)
            here = [each.base + each.slope * kv + each.slope_window * window for each in (line, under)]
            assert here[1] == max(here[0], round(3e-4 * 1e9) << TICK_BITS) + (3000 << TICK_BITS)
            assert kv < under.kv_end <= line.kv_end
            last = under.kv_end - 1
            at_the_end = inner(last, window)
            longest = max(
                at_the_end.base + at_the_end.slope * last + at_the_end.slope_window * window, 300_000 << TICK_BITS
            )
            assert under.base + under.slope * last + under.slope_window * window == longest + (3000 << TICK_BITS)


def none_has_one(experiment: Experiment) -> Experiment:
    """The same with a share of zero: settings that would cost much, and nobody who has a grammar."""
    spec = GrammarSpec(grammar=[-1] * len(experiment.workload), compile_s=[1.0], step_s=1.0, mask_s=1.0, apply_s=1.0)
    return grammars_on(experiment, spec)


KINDS: dict[str, Callable[[int], Experiment]] = {
    "plain": lambda seed: an_experiment(seed, speculative=False),
    "speculative": lambda seed: an_experiment(seed, speculative=True),
    "apart": lambda seed: apart(seed, speculative=seed % 3 == 0),
    "fleet": lambda seed: with_fleet(an_experiment(seed, speculative=False), seed),
    "tiers": lambda seed: with_tiers(an_experiment(seed, speculative=False), seed),
    "adapters": lambda seed: with_adapters(an_experiment(seed, speculative=seed % 2 == 0), seed),
}


def outcome(experiment: Experiment, **how: bool) -> Columns | str:
    try:
        return run(experiment, **how)
    except PolicyError as error:
        return str(error)


def check(kind: str, seed: int) -> None:
    experiment = KINDS[kind](seed)
    masked = with_grammars(experiment, seed)
    spans, steps = outcome(masked, check_invariants=True), outcome(masked, fast_forward=False)
    same(spans, steps)
    same(outcome(experiment), outcome(none_has_one(experiment)))


def same(a: Columns | str, b: Columns | str) -> None:
    if isinstance(a, str) or isinstance(b, str):
        assert a == b
        return
    requests = {name: column for name, column in a.requests.items() if name in b.requests}
    assert_same(replace(a, requests=requests), replace(b, requests={name: b.requests[name] for name in requests}))


@pytest.mark.parametrize("kind", KINDS)
def test_random_runs_with_grammars_are_the_same_step_by_step_and_without_any_as_before(kind: str) -> None:
    check(kind, 0)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_runs_with_grammars(kind: str) -> None:
    for seed in range(1, 250):
        check(kind, seed)
