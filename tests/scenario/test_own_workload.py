"""A third kind of workload, one class of the user's own: named in a scenario, run, swept, compared and summed up."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

import rooftrace
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.engine.time.errors import PolicyError
from sim.errors import RooftraceError, ScenarioError
from sim.scenario import Scenario
from sim.scenario.workload import workload_of
from sim.study.rates import own_rate_per_s
from tests.engine.costs import Linear
from workloads import Trace, Workload

MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Batches(Workload):
    """Requests that come in batches, each `pause_ns` after the one before has ended."""

    size: int
    pause_ns: int = 0

    @classmethod
    def drawn(cls, *, requests: int, size: int, seed: int) -> Batches:
        prompts = np.random.default_rng(seed).integers(50, 200, requests)
        return cls(prompt_tokens=prompts, output_tokens=np.full(requests, 8), size=size, source=f"batches of {size}")

    def clients(self) -> Sender:
        return Sender(self)


class Sender:
    starts_ns = (0,)

    def __init__(self, batches: Batches) -> None:
        self._rows, self._batches, self._under_way = iter(range(len(batches))), batches, 0

    def start(self, now_ns: int, /) -> list[tuple[int, int]]:
        batch = [(row, now_ns) for row in islice(self._rows, self._batches.size)]
        self._under_way = len(batch)
        return batch

    def ended(self, row: int, now_ns: int, /) -> list[tuple[int, int]]:
        self._under_way -= 1
        return [] if self._under_way else self.start(now_ns + self._batches.pause_ns)


@pytest.fixture(autouse=True)
def _as_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # The hash of a scenario is over the whole package of a module, and this one's is all tests.
    monkeypatch.setitem(sys.modules, "batches", sys.modules[__name__])


def scenario(**settings: object) -> Scenario:
    own = {"policy": "batches:Batches.drawn", "requests": 24, "size": 4} | settings
    own = {key: value for key, value in own.items() if value is not None}
    return Scenario.from_mapping({"model": "llama-3.2-1b", "workload": {"generator": own}}, source="my.yaml")


def one_by_one(workload: Workload, **experiment: Any) -> Columns:
    """*workload* on a machine where an iteration takes a millisecond."""
    replica = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=OrcaPaged(max_sequences=8), kv_blocks=100)
    return run(Experiment(workload=workload, replicas=(replica,), router=RoundRobin(), **experiment))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Own(Workload):
    """Requests that *made* sends, whatever it is."""

    made: Any

    def clients(self) -> Any:
        return self.made


def three_sent_by(clients: object) -> Own:
    return Own(prompt_tokens=np.ones(3, int), output_tokens=np.ones(3, int), made=clients)


def test_a_batch_is_sent_when_the_one_before_has_ended() -> None:
    fives = np.full(5, 5)
    found = one_by_one(Batches(prompt_tokens=fives, output_tokens=fives - 2, size=2, pause_ns=2 * MS)).requests
    assert found["arrival_ns"].tolist() == [0, 0, 5 * MS, 5 * MS, 10 * MS]
    assert found["finish_ns"].tolist() == [3 * MS, 3 * MS, 8 * MS, 8 * MS, 13 * MS]


def test_it_has_every_column_that_a_trace_has() -> None:
    ones = np.ones(4, int)
    columns = {"prompt_tokens": 32 * ones, "output_tokens": ones, "priority": [3, 1, 2, 0], "session": [0, 0, 1, 1],
               "deadline_ns": [-1, 5, 5, 10**10], "prefix_blocks": [1, 2, 1, 2], "prefix_offsets": [0, 2, 4, 4, 4],
               "prefix_block_tokens": 16}  # fmt: skip
    kinds = (Batches(**columns, size=4), Trace(**columns, arrival_ns=0 * ones))
    own, trace = (one_by_one(each).requests for each in kinds)
    assert own.keys() == trace.keys()
    assert all((own[name] == trace[name]).all() for name in own)
    first = kinds[0].take([True, False, True, True])
    assert first.priority is not None
    assert (first.size, first.priority.tolist()) == (4, [3, 2, 0])
    assert (first.prefix_of(0).tolist(), len(first.limit(2))) == ([1, 2], 2)


def test_it_runs_in_a_scenario_and_its_summary_accounts_for_every_request() -> None:
    result = rooftrace.simulate(scenario())
    columns = result.columns.requests
    assert result.summary["requests"]["finished"] == 24
    assert result.manifest["workload"] == {"source": "batches of 4", "requests": 24, "closed_loop": True}
    assert np.unique(columns["arrival_ns"], return_counts=True)[1].tolist() == [4] * 6
    assert columns["prompt_tokens"].tolist() == Batches.drawn(requests=24, size=4, seed=0).prompt_tokens.tolist()


def test_its_settings_are_swept_and_compared() -> None:
    table = rooftrace.sweep(scenario(), axes={"workload.generator.size": [1, 4]}, jobs=1).table
    alone, batched = table["makespan_s"].tolist()
    assert batched < alone
    found = rooftrace.compare(scenario(size=1), scenario(size=4), replications=2, jobs=1).differences
    ttft = next(each for each in found if each.metric == "ttft_s.mean")
    assert ttft.b > ttft.a


def test_limits_classes_and_models_are_put_on_it_as_on_any_other() -> None:
    asked = scenario().with_set("workload.limit=6", "workload.max_tokens=50", "workload.models={a: 1, b: 1}")
    made = workload_of(asked)
    assert isinstance(made, Batches)
    assert (len(made), made.size, made.models) == (6, 4, ("a", "b"))
    assert made.max_tokens is not None
    assert set(made.max_tokens.tolist()) == {50}


def careless(batches, lowest=1, names=("a",)):
    """A generator as people write them: no types, no checks."""
    prompts = np.concatenate([np.full(3, lowest) for _ in range(len(batches))]) // {"a": 1}[names[0]]
    return Batches(prompt_tokens=prompts, output_tokens=np.full(len(prompts), 2), size=max(batches))


def failing_late(*, requests: int, seed: int) -> Workload:
    if seed > 3:
        raise ValueError("nothing to send")
    return Batches.drawn(requests=requests, size=4, seed=seed)


def test_a_comparison_is_refused_where_a_later_replication_fails() -> None:
    """Not only one of the first few, which say whether anything is random."""
    late = scenario(policy="batches:failing_late", size=None)
    with pytest.raises(RooftraceError, match=r"A cannot be run: .*nothing to send"):
        rooftrace.compare(late, late, replications=6, jobs=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batches": 3}, "failed with {'batches': 3}: TypeError: object of type 'int' has no len()"),
        ({"batches": []}, "failed with {'batches': []}: ValueError: need at least one array to concatenate"),
        ({"batches": [1], "lowest": "x"}, "'x'}: "),
        ({"batches": [1], "lowest": -4}, "ValueError: row 0: prompt_tokens"),
        ({"batches": [1], "names": []}, "'names': []}: IndexError: "),
        ({"batches": [1], "names": ["b"]}, "'names': ['b']}: KeyError: 'b'"),
        ({"batches": [1], "lowest": 0}, "makes request 0 with a prompt of 0 tokens; every prompt has one at least"),
    ],
)
def test_what_goes_wrong_in_a_generator_is_told_with_its_key_and_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        workload_of(scenario(policy="batches:careless", requests=None, size=None, **settings))
    assert str(error.value).startswith("my.yaml: workload.generator: batches:careless ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"policy": "batches"}, "workload.generator is package.module:Class, or a function there; got 'batches'"),
        ({"policy": "batches:Batchs.drawn"}, "workload.generator: batches has no 'Batchs.drawn'"),
        ({"policy": "batches:MS"}, "is 1000000, and neither a class nor a function"),
        ({"policy": "collections:Counter"}, "collections:Counter makes a Workload (`workloads.Workload`); got Counter()"),
        ({"policy": "batches:Batches.drawn", "requests": 3}, "workload.generator.size is missing"),
        ({"policy": "batches:Batches.drawn", "requests": 3, "sise": 2}, "did you mean size?"),
        ({"policy": "batches:Batches.drawn", "requests": "3", "size": 2}, "workload.generator.requests is a whole number"),
        ({"policy": "batches:Batches.drawn", "requests": 0, "size": 2}, "at least one request"),
    ],
)  # fmt: skip
def test_a_generator_that_cannot_be_is_refused_in_a_sentence(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(sentence)) as error:
        workload_of(Scenario.from_mapping({"workload": {"generator": asked}}, source="my.yaml"))
    assert "\n" not in str(error.value)


def test_what_only_arrivals_have_is_refused_where_answers_say_when_requests_are_sent() -> None:
    own = workload_of(scenario())
    with pytest.raises(ScenarioError, match=r"workload\.rate_scale is for arrivals in time"):
        workload_of(scenario().with_set("workload.rate_scale=2"))
    with pytest.raises(RooftraceError, match="no arrival rate to search"):
        own_rate_per_s(scenario())
    with pytest.raises(ValueError, match="have no rate to scale"):
        own.scale_rate(2.0)
    with pytest.raises(ValueError, match="in_flight is for a trace"):
        one_by_one(own, in_flight=3)
    with pytest.raises(ValueError, match="cannot be given up as well; leave out abort_ns"):
        replace(own, abort_ns=np.zeros(len(own), int))


@pytest.mark.parametrize(
    ("start", "ended", "sentence"),
    [
        ([(0, 0)], [(0, 9 * MS)], "send request 0 at 9000000 ns; expected one of 3 that has not been sent"),
        ([(0, 0)], [(3, 9 * MS)], "send request 3 at 9000000 ns; expected one of 3"),
        (
            [(0, 0)],
            [(1, 0)],
            "send request 1 at 0 ns; expected one of 3 that has not been sent, and an instant from 1000000 ns",
        ),
        ([(2, 0)], [], "have not sent 2 requests (0, 1), and nothing is left to happen"),
        ([(0, 0)], None, "do not answer with pairs of a row and an instant in ns, both whole numbers: 'NoneType'"),
        ([(0, 0.5)], [], "do not answer with pairs of a row and an instant in ns, both whole numbers"),
    ],
)
def test_clients_that_send_what_they_cannot_are_told_so(start: list, ended: list, sentence: str) -> None:
    class Sends:
        starts_ns = (0,)

        def start(self, _now_ns: int, /) -> Iterable[tuple[int, int]]:
            return start

        def ended(self, _row: int, _now_ns: int, /) -> Iterable[tuple[int, int]]:
            return ended

    with pytest.raises(PolicyError, match=re.escape(sentence)):
        one_by_one(three_sent_by(Sends()))


def test_clients_start_at_whole_nanoseconds() -> None:
    class Starts(Sender):
        starts_ns: Any = (0.5,)

    own = Batches.drawn(requests=3, size=1, seed=0)
    with pytest.raises(PolicyError, match=re.escape("start at whole nanoseconds: ")):
        one_by_one(three_sent_by(Starts(own)))
