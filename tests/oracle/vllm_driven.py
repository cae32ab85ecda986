"""The decisions of an installed release on the oracle's workloads where it drives inside our event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.driving import Driven, Engine
from policies.installed import VllmInstalled
from policies.routers import RoundRobin
from sim.engine import ABORTED, FINISHED, Experiment, run
from tests.oracle.vllm_cases import SETTINGS, STEP_NS, spec_of
from tests.oracle.vllm_prefix_cases import trace_of

OWN = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "scheduling_policy")
"""Settings that have a name of their own in `VllmInstalled`, or another in the release."""
USUAL = {
    "max_num_active_seqs": None,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_scheduled_tokens": None,
    "watermark": 0.0,
}
"""Settings that earlier releases do not have: left out where they are as if they were not there."""
PADDED = "a prompt of one token is padded to a round of speculation, which is not modelled"
"""In place of the steps of a workload in which that happens."""


@dataclass(frozen=True)
class Overheard(VllmInstalled):
    """Writes down the steps that the release plans."""

    plans: list[dict[str, Any]] = field(default_factory=list, compare=False, repr=False)

    def connect(self, engine: Engine, /) -> Driven:
        return Overhearing(super().connect(engine), self.plans)


class Overhearing:
    def __init__(self, inner: Driven, plans: list[dict[str, Any]]) -> None:
        self._inner = inner
        self._plans = plans

    @property
    def release(self) -> str:
        return self._inner.release

    def anew(self) -> None:
        self._inner.anew()

    def step(self, told: Mapping[str, Any], /) -> dict[str, Any]:
        answer = self._inner.step(told)
        if answer["plan"] is not None:
            self._plans.append(answer["plan"])
        return answer


def options_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the release's `SchedulerConfig` beside those that `VllmInstalled` has itself."""
    options = {name: case[name] for name in SETTINGS if name not in OWN}
    options = {name: value for name, value in options.items() if name not in USUAL or value != USUAL[name]}
    return {**options, "policy": case["scheduling_policy"]}


def release_of(python: str) -> str:
    """The name and number of the release that an interpreter has."""
    return VllmInstalled(python=python).connect(Engine(10, 16, 1024, False, 0, 0, 0)).release


def driven_decisions(case: Mapping[str, Any], python: str) -> list[Any] | str:
    """The steps in the words of `vllm_cases.our_decisions`, or of `vllm_prefix_cases.our_decisions` where *case* has contents;
    PADDED where there are none to compare."""
    caching = "id_tokens" in case
    scheduler = Overheard(
        python=python,
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        async_scheduling=case["async_scheduling"],
        max_loras=case.get("max_loras", 0),
        options=options_of(case),
    )
    found = {"prefix_cache": "blocks", "prefix_drops_last": case["reads_target"]} if caching else {}
    spec = spec_of(case, scheduler, **found)
    unnamed = [{**request, "ids": []} for request in case["requests"]]
    trace = trace_of({**case} if caching else {**case, "id_tokens": case["block_tokens"], "requests": unnamed})
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin(), seed=case["seed"]))
    assert set(columns.requests["status"].tolist()) <= {FINISHED, ABORTED}, columns.reasons
    if any(drafted and id_ in dict(plan["found"]) for plan in scheduler.plans for id_, _, drafted in plan["run"]):
        return PADDED
    starts = (columns.iterations()["start_ns"] // STEP_NS).tolist()
    steps: list[Any] = []
    preempted: list[int] = []
    evicted = 0
    for plan in scheduler.plans:
        # A plan may do no more than take memory back; another follows at once.
        preempted += plan["preempted"]
        evicted += plan["evicted"]
        if plan["run"]:
            step = [
                starts[len(steps)],
                {id_: tokens for id_, tokens, _ in plan["run"]},
                sorted(preempted),
                plan["held"],
            ]
            steps.append([*step, dict(plan["found"]), evicted] if caching else step)
            preempted, evicted = [], 0
    assert len(steps) == len(starts)
    return steps
