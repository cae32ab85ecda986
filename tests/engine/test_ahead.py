"""Plans made ahead, and clients that go: what the engine makes of them, by hand. An iteration takes 1 ms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.routers import RoundRobin
from policies.vllm import Vllm
from sim import metrics
from sim.engine import ABORTED, FINISHED, Columns, Experiment, ReplicaSpec, run
from tests.engine.costs import Linear
from workloads import Trace

MS = 1_000_000


def served(*rows: tuple[float, int, int], ahead: bool, kv_blocks: int = 100, seats: int = 8, **columns: Any) -> Columns:
    """Rows of (arrival in ms, prompt, output) on one machine; stepping gives the same."""
    arrival, prompt, output = zip(*rows, strict=True)
    trace = Trace(
        arrival_ns=np.array([round(ms * MS) for ms in arrival]),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        **{name: np.array(values) for name, values in columns.items()},
    )
    scheduler = Vllm(max_num_batched_tokens=64, max_num_seqs=seats, async_scheduling=ahead)
    spec = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=kv_blocks)
    experiment = Experiment(workload=trace, replicas=(spec,), router=RoundRobin())
    found = run(experiment, check_invariants=True)
    stepped = run(experiment, fast_forward=False)
    for name, column in found.requests.items():
        np.testing.assert_array_equal(column, stepped.requests[name], err_msg=name)
    return found


def ends_ms(columns: Columns, name: str = "finish_ns") -> list[float]:
    return [ns / MS for ns in columns.requests[name].tolist()]


def test_who_comes_during_an_iteration_waits_for_the_next_one_too_where_that_is_planned() -> None:
    rows = ((0, 10, 20), (2.5, 10, 1))
    assert ends_ms(served(*rows, ahead=False))[1] == 4
    assert ends_ms(served(*rows, ahead=True))[1] == 5


def test_who_comes_to_an_idle_machine_does_not_wait() -> None:
    assert ends_ms(served((0, 10, 2), (7.5, 10, 1), ahead=True)) == [2, 8.5]


def test_a_seat_is_free_an_iteration_later() -> None:
    rows = ((0, 10, 3), (0, 10, 9), (0.5, 10, 1))
    assert ends_ms(served(*rows, ahead=False, seats=2))[2] == 4
    assert ends_ms(served(*rows, ahead=True, seats=2))[2] == 5


def test_who_stops_before_its_limit_takes_a_step_that_comes_to_nothing() -> None:
    columns = served((0, 10, 3), (2.5, 10, 1), ahead=True, max_tokens=[9, 1])
    # The first ends at 3 ms; the step until 4 ms had been planned, and holds up the second.
    assert ends_ms(columns) == [3, 5]
    steps = columns.iterations()
    assert steps["emitted_tokens"].tolist() == [1, 1, 1, 0, 1]
    assert steps["sequences"].tolist()[3] == 1
    # One that reaches its limit is known to: with nothing else to do the plan is made again.
    assert ends_ms(served((0, 10, 3), (2.5, 10, 1), ahead=True)) == [3, 4]


def test_the_block_of_a_step_that_comes_to_nothing_is_kept_for_it() -> None:
    # The first stops at 3 ms. Where the step after that begins a block, the second, which needs all that is free, waits for it.
    assert ends_ms(served((0, 29, 3), (1.5, 30, 1), ahead=True, kv_blocks=4, max_tokens=[9, 1])) == [3, 4]
    assert ends_ms(served((0, 30, 3), (1.5, 30, 1), ahead=True, kv_blocks=4, max_tokens=[9, 1])) == [3, 5]


@pytest.mark.parametrize(("ahead", "second"), [(False, 4.0), (True, 5.0)])
def test_what_a_client_gives_up_leaves_with_the_iteration_and_its_memory_is_free(ahead: bool, second: float) -> None:
    # Five blocks: the second waits for the first, which holds four of them from the beginning.
    columns = served((0, 60, 20), (0.5, 60, 1), ahead=ahead, kv_blocks=5, abort_ns=[round(2.5 * MS), -1])
    assert columns.requests["status"].tolist() == [ABORTED, FINISHED]
    assert ends_ms(columns)[1] == second
    assert columns.requests["finish_ns"][0] == -1


def test_one_that_waits_or_has_not_come_through_the_front_end_is_given_up_too() -> None:
    columns = served((0, 60, 20), (0.5, 60, 1), ahead=False, kv_blocks=5, abort_ns=[-1, MS])
    assert columns.requests["status"].tolist() == [FINISHED, ABORTED]
    assert columns.requests["emitted_tokens"].tolist() == [20, 0]
    summary = metrics.summary(columns)
    assert summary["requests"] == {"total": 2, "finished": 1, "rejected": 0, "unfinished": 0, "aborted": 1}
    assert "aborted" not in metrics.summary(served((0, 60, 2), ahead=False))["requests"]


def test_an_answer_that_comes_before_the_client_goes_is_an_answer() -> None:
    assert served((0, 10, 3), ahead=True, abort_ns=[5 * MS]).requests["status"].tolist() == [FINISHED]


def test_a_request_emits_no_more_than_its_limit() -> None:
    with pytest.raises(ValueError, match="row 0: a request emits no more than its max_tokens"):
        served((0, 10, 3), ahead=False, max_tokens=[2])
