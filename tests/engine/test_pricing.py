"""Decode iterations on straight lines, against the cost model called for each: an iteration, and when requests finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwmodels.totals import Totals
from sim.engine import Columns, Experiment, run
from sim.engine.batch import pricing
from sim.engine.batch.pricing import Line, LineAt, Pricing
from sim.engine.record.columns import Table
from sim.engine.simulation.front_end import FrontEnd
from sim.engine.time.clock import TICKS_PER_S, to_ticks
from sim.scenario import Scenario
from sim.scenario.assembly import build
from tests.engine.build import patches_the_engine
from tests.engine.costs import Linear
from tests.sample import with_all
from workloads import Trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "AzureLLMInferenceTrace_conv.csv"
DRAFT = "{method: draft_model, num_speculative_tokens: 4, acceptance: {alpha: 0.8}, draft: {model: llama-3.2-1b}}"
MOST_OF_AN_ITERATION = 5e-4
MOST_OF_A_FINISH = 5e-3
BESIDE_A_FINISH = 2e-5
MOST_OF_A_DRIFT_NS = 1_000


def an_experiment(*settings: str, workload: str = "{trace: conversation, limit: 120}") -> Experiment:
    scenario = Scenario.default().with_set(f"workload={workload}")
    for setting in settings:
        scenario = scenario.with_set(setting)
    return build(scenario)


class Exact:
    """Every decode iteration at its own price: lines of one token."""

    def __init__(self, ticks: Callable[..., Any], windowed: bool) -> None:
        self._ticks = ticks
        self._windowed = windowed

    def of(self, n: int, query_tokens: int, draft_steps: int) -> LineAt:
        def line_at(kv: int, kv_window: int) -> Line:
            ticks = self._ticks((n, query_tokens, draft_steps), kv, kv_window)
            return Line(int(ticks), 0, 0, kv + 1, kv_window + 1 if self._windowed else 1 << 62)

        return line_at


def priced_exactly(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Columns:
    with monkeypatch.context() as patch:
        patch.setattr(pricing, "Lines", Exact)
        return run(experiment)


def on(line: Line, kv: int, kv_window: int) -> int:
    assert kv < line.kv_end
    assert kv_window < line.kv_window_end
    return line.base + line.slope * kv + line.slope_window * kv_window


def changes(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Latencies by exact prices in ns, and what the lines change of each, as a share of it."""
    lines, exact = run(experiment).requests, priced_exactly(experiment, monkeypatch).requests
    latency = exact["finish_ns"] - exact["arrival_ns"]
    return latency, (lines["finish_ns"] - exact["finish_ns"]) / latency


def seen_at(experiment: Experiment) -> np.ndarray:
    """When machines see the requests of a trace."""
    trace = experiment.workload
    assert isinstance(trace, Trace)
    return FrontEnd(experiment).visible_ns(trace.arrival_ns, trace.prompt_tokens)


def with_arrivals(experiment: Experiment, arrival_ns: np.ndarray) -> Experiment:
    assert isinstance(experiment.workload, Trace)
    assert (np.diff(arrival_ns) >= 0).all()
    return replace(experiment, workload=replace(experiment.workload, arrival_ns=arrival_ns))


def moved_until_alike(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests whose arrival has to be moved, each by less than `MOST_OF_A_DRIFT_NS`, for the replay at exact prices to be
    that on lines: the same iterations, and no finish further away than `BESIDE_A_FINISH`, as a share of its latency."""
    lines, moved = run(experiment), list[int]()
    on_lines, arrival_ns = lines.iterations(), experiment.workload.arrival_ns
    while True:
        experiment = with_arrivals(experiment, arrival_ns)
        columns = priced_exactly(experiment, monkeypatch)
        exact = columns.iterations()
        n = min(len(each["start_ns"]) for each in (on_lines, exact))
        differ = np.flatnonzero(
            (on_lines["prefill_tokens"][:n] != exact["prefill_tokens"][:n])
            | (on_lines["sequences"][:n] != exact["sequences"][:n])
        )
        if not len(differ):
            latency = columns.requests["finish_ns"] - columns.requests["arrival_ns"]
            change = (lines.requests["finish_ns"] - columns.requests["finish_ns"]) / latency
            assert np.abs(change).max() < BESIDE_A_FINISH
            return moved
        request, by_ns = _between(on_lines, exact, int(differ[0]), seen_at(experiment))
        assert abs(by_ns) < MOST_OF_A_DRIFT_NS
        moved.append(request)
        assert len(set(moved)) == len(moved) < 10
        arrival_ns = arrival_ns.copy()
        arrival_ns[request] += by_ns


def _between(on_lines: Table, exact: Table, row: int, seen_ns: np.ndarray) -> tuple[int, int]:
    """The requests that came between the two instants at which the plan of iteration *row* was made, and by how many ns it is to
    be moved so that this plan knows of it at exact prices if it did on lines."""
    # A plan that is made ahead is made when the iteration before starts.
    for at in (row, row - 1):
        line, true = int(on_lines["start_ns"][at]), int(exact["start_ns"][at])
        found = np.flatnonzero((seen_ns > min(line, true)) & (seen_ns <= max(line, true)))
        if len(found):
            request = int(found[0])
            return request, true + (line < true) - int(seen_ns[request])
    raise AssertionError(f"iteration {row} differs, and nobody came between its two starts")


def furthest_finish(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest change of a request's latency by the lines, as a share of it."""
    return float(np.abs(changes(experiment, monkeypatch)[1]).max())


@pytest.mark.parametrize(
    "settings",
    [(), ("cost_model=roofline",), ("model=gpt-oss-20b",), ("model=gpt-oss-20b", "cost_model=roofline")],
    ids=["calibrated", "roofline", "windowed", "windowed roofline"],
)
def test_a_decode_iteration_is_within_a_thousandth_of_a_percent_of_its_cost_model(settings: tuple[str, ...]) -> None:
    cost = an_experiment(*settings).replicas[0].cost
    window = cost.window_tokens
    prices = Pricing(cost, None, 0.0)
    rng = np.random.default_rng(1)
    for _ in range(400):
        n = int(rng.choice([1, 2, 7, 16, 33, 64, 128, 256]))
        kv = int(n * 2 ** rng.uniform(0.0, 15.0)) + n
        kv_window = 0 if window is None else min(kv, int(n * window * rng.uniform(0.0, 1.0)))
        exact = to_ticks(cost.iteration_s(Totals(n, 0, 0, 0, 0, n, kv, n, 0, kv_window)))
        priced = on(prices.decode_lines(n, 1, 0)(kv, kv_window), kv, kv_window)
        assert priced == pytest.approx(exact, rel=1e-5), (n, kv, kv_window)
    assert MOST_OF_AN_ITERATION >= 1e-5


def test_a_speculative_round_prices_the_target_the_draft_and_the_fixed_cost_of_a_round() -> None:
    target, draft = Linear(fixed_s=3e-3, row_s=1e-5, kv_s=1e-7), Linear(fixed_s=1e-4, row_s=1e-6, kv_s=1e-8)
    line = Pricing(target, draft, 2e-3).decode_lines(6, 5, 4)(7000, 0)
    expected_s = (3e-3 + 30 * 1e-5 + 7000 * 1e-7) + 4 * (1e-4 + 6 * 1e-6 + 7000 * 1e-8) + 2e-3
    assert on(line, 7000, 0) / TICKS_PER_S == pytest.approx(expected_s, rel=1e-9)


@dataclass(frozen=True, kw_only=True)
class Tiled(Linear):
    """A step up at every *tile* of KV tokens, as kernels with thread blocks have."""

    tile: int

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return self.fixed_s + 1e-4 * (totals.decode_kv_tokens // self.tile)


@pytest.mark.parametrize("tile", [100, 5000])
def test_a_cost_with_jumps_is_priced_to_the_token(tile: int) -> None:
    cost = Tiled(tile=tile)
    prices = Pricing(cost, None, 0.0)
    for kv in range(tile - 3, 3 * tile + 3):
        exact = to_ticks(cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, kv, 1)))
        assert on(prices.decode_lines(1, 1, 0)(kv, 0), kv, 0) == pytest.approx(exact, rel=1e-6), kv


@dataclass(frozen=True, kw_only=True)
class Floored(Linear):
    """Not the sum of a part in KV tokens and one in windowed tokens: the host's time is the least."""

    least_s: float

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        seconds = self.fixed_s + self.kv_s * totals.decode_kv_tokens + self.window_s * totals.decode_kv_window
        return np.maximum(self.least_s, seconds)


def test_a_floor_under_a_windowed_cost_is_kept() -> None:
    cost = Floored(fixed_s=1e-3, kv_s=1e-6, window_s=2e-6, window_tokens=500, least_s=2e-3)
    prices = Pricing(cost, None, 0.0)
    for kv in range(300, 1200, 7):
        for kv_window in range(0, 500, 13):
            exact = to_ticks(float(cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, kv, 1, 0, kv_window))))
            line = prices.decode_lines(1, 1, 0)(kv, kv_window)
            assert on(line, kv, kv_window) == pytest.approx(exact, rel=1e-6), (kv, kv_window)


def test_which_line_holds_does_not_depend_on_what_was_asked_before() -> None:
    cost = an_experiment().replicas[0].cost
    points = [(16, kv) for kv in range(17_000, 60_000, 997)]
    upwards, downwards = Pricing(cost, None, 0.0), Pricing(cost, None, 0.0)
    up = {point: upwards.decode_lines(point[0], 1, 0)(point[1], 0) for point in points}
    down = {point: downwards.decode_lines(point[0], 1, 0)(point[1], 0) for point in reversed(points)}
    assert up == down


def test_a_straight_cost_is_one_line_an_octave() -> None:
    prices = Pricing(Linear(kv_s=1e-7), None, 0.0)
    assert prices.decode_lines(8, 1, 0)(40_000, 0).kv_end == 65_536


@patches_the_engine
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("scheduler={policy: vllm-v0}",),
        ("model=gpt-oss-20b",),
        (f"decoding={DRAFT}",),
        ("memory={gpu_memory_utilization: 0.25}", "scheduler={policy: sarathi, max_sequences: 256}"),
    ],
    ids=["vllm", "vllm-v0", "windowed", "speculative", "little memory"],
)
def test_no_request_finishes_elsewhen_for_the_lines(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 < furthest_finish(an_experiment(*settings), monkeypatch) < MOST_OF_A_FINISH


@patches_the_engine
def test_who_comes_between_the_two_ends_of_an_iteration_is_all_that_lines_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clocks drift by nanoseconds. Here one request comes within these of an iteration's end: on lines it joins that iteration
    and at exact prices the next, or the other way round, and others behind it move with it."""
    experiment = an_experiment("scheduler={policy: vllm-v0}")
    lines, exact = (columns.iterations() for columns in (run(experiment), priced_exactly(experiment, monkeypatch)))
    row = int(np.argmax(np.abs(lines["start_ns"] - exact["start_ns"])))
    between = int(max(lines["start_ns"][row], exact["start_ns"][row]))
    seen_ns = seen_at(experiment)
    request = int(np.searchsorted(seen_ns, between))
    arrival_ns = experiment.workload.arrival_ns.copy()
    arrival_ns[request] -= seen_ns[request] - between
    experiment = with_arrivals(experiment, arrival_ns)
    assert furthest_finish(experiment, monkeypatch) > 10 * BESIDE_A_FINISH
    assert len(moved_until_alike(experiment, monkeypatch)) == 1


@patches_the_engine
@pytest.mark.slow(reason="a whole recorded trace")
@pytest.mark.skipif(not TRACE.exists(), reason="needs the public conversation trace")
@pytest.mark.parametrize("rate_scale", [pytest.param(1, marks=with_all), 2, pytest.param(4, marks=with_all)])
@pytest.mark.parametrize(
    "settings", [(), ("scheduler={policy: vllm-v0}",), ("model=gpt-oss-20b",)], ids=["vllm", "vllm-v0", "windowed"]
)
def test_the_conversation_trace_on_lines_is_that_at_exact_prices_with_an_arrival_or_two_moved_by_nanoseconds(
    settings: tuple[str, ...], rate_scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line short of the exact price rules out that a request comes between the ends that an iteration has by the two prices,
    and the exact price is no righter there. How far that carries depends on the load: of a machine that is never idle it is never
    forgotten, so that no bound on means or quantiles of latencies holds at every load. What holds is that nothing else moves."""
    experiment = an_experiment(*settings, workload=f"{{trace: {TRACE}, rate_scale: {rate_scale}}}")
    assert len(moved_until_alike(experiment, monkeypatch)) <= 4
