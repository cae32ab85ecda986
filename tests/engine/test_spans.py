"""A span's iterations end at the very tick at which they end one by one, not only in the same nanosecond."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from hwmodels.reach import Chunk
from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.routers import RoundRobin
from policies.schedulers import Sarathi
from policies.view import ALWAYS_NS
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.batch.decode_set import DecodeSet
from sim.engine.batch.pricing import Pricing
from sim.engine.batch.span import PiecewiseSpan
from sim.engine.batch.speculative_set import SpeculativeSet
from tests.engine.costs import Linear
from tests.engine.random_runs import assert_same
from workloads import Trace

START = 12_345
PRICING = Pricing(Linear(fixed_s=1.2345e-3, kv_s=3.3e-7, window_s=1.7e-8, window_tokens=300), None, 0.0)
REACHES = [300, Chunk(300)]
SPECULATIVE = Speculative(method="ngram", num_speculative_tokens=3, acceptance=Iid(alpha=0.5))


def a_set(*, speculative: bool, window: int = 300) -> Any:
    decodes: Any = DecodeSet(16, window)
    if speculative:
        decodes = SpeculativeSet(16, window, SPECULATIVE, 1, array("i", bytes(4 * 3)))
    for id_, (cached, remaining) in enumerate([(3, 2000), (250, 1500), (600, 1400)]):
        decodes.join(id_, cached, remaining, 0, -(-cached // 16))
    return decodes


def span_of(decodes: Any, at: int, hold: int, until_ns: int = ALWAYS_NS) -> Any:
    return decodes.span(at, hold, until_ns, 10**6, decodes.growth_blocks, PRICING)


@pytest.mark.parametrize("window", REACHES, ids=["window", "chunks"])
@pytest.mark.parametrize("speculative", [False, True])
def test_iterations_of_a_span_end_where_they_end_alone(speculative: bool, window: int) -> None:
    whole, one_by_one = (a_set(speculative=speculative, window=window) for _ in range(2))
    at, spans = START, []
    while not spans or spans[-1].n > 1:
        span = span_of(whole, at, 1 << 40)
        spans.append(span)
        for j in range(1, span.n + 1):
            alone = span_of(one_by_one, at, 1)
            assert alone.n == 1
            assert span.end(j) == alone.end(1)
            at = alone.end(1)
            # What ends at a tick is in flight there still, and the next one a tick later.
            assert span.index_at(at) == j
            assert span.index_at(at + 1) == min(j + 1, span.n)
            one_by_one.advance(1)
        if whole.advance(span.n):
            break
    assert sum(span.n for span in spans) > 400
    assert speculative or any(isinstance(span, PiecewiseSpan) for span in spans)


@pytest.mark.parametrize("speculative", [False, True])
def test_no_iteration_of_a_span_starts_at_the_instant_until_which_it_holds(speculative: bool) -> None:
    whole = span_of(a_set(speculative=speculative), START, 1 << 40)
    for j in (1, 2, whole.n // 2, whole.n - 1):
        end_ns = whole.end(j) >> 20
        # The next one starts within this nanosecond: at the instant, or before the one after it.
        assert span_of(a_set(speculative=speculative), START, 1 << 40, end_ns).n == j
        assert span_of(a_set(speculative=speculative), START, 1 << 40, end_ns + 1).n == j + 1


def test_a_span_that_bends_counts_who_has_come_to_the_queue_meanwhile() -> None:
    trace = Trace(
        arrival_ns=[0, *range(20_000_500, 900_000_000, 40_000_000)], prompt_tokens=[200] * 23, output_tokens=[900] + [2] * 22
    )  # fmt: skip
    spec = ReplicaSpec(cost=Linear(kv_s=1e-7), scheduler=Sarathi(max_sequences=1), kv_blocks=100)
    experiment = Experiment(workload=trace, replicas=(spec,), router=RoundRobin())
    found, stepped = run(experiment), run(experiment, fast_forward=False)
    assert len(found.replicas[0].spans) < 100
    assert found.iterations()["waiting"].max() == 22
    assert_same(found, stepped)
