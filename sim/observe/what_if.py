"""The observed traffic through another deployment: what was observed, the simulated present, the simulated alternative.

Differences are between the two simulations of the same requests, never between a simulation and what was observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.routers import ReplicaLoad, RoutedRequest
from sim.errors import RooftraceError
from sim.observe.replay import Replayed, Run, replay
from sim.scenario.assembly import resolve
from sim.study import statistics as st
from sim.study.compare import METRICS, Difference, compare
from sim.study.table import flatten
from sim.text import is_share

if TYPE_CHECKING:
    from sim.observe.observation import Observation
    from sim.observe.traffic import ObservedTraffic
    from sim.scenario import Scenario

FloatArray = NDArray[np.float64]
MONEY = "costs.usd"
_NS = 1e-9
_STACK = frozenset({"serving_stack", "serving_release"})
_ROOM = frozenset({"hardware", "model", "parallel", "memory", "kv_precision", "precision"})
"""Settings, or their first parts, that change how many KV blocks memory has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another deployment under the same traffic."""

    settings: tuple[str, ...]
    present: Replayed
    """The run that it is compared with."""
    replayed: Replayed
    differences: tuple[Difference, ...]
    """A is the simulated present, B the alternative."""
    how: str


def settings_of(text: str) -> tuple[str, ...]:
    """The settings of one alternative: KEY=VALUE, several between `;`."""
    found = tuple(part.strip() for part in text.split(";") if part.strip())
    if not found or any("=" not in part for part in found):
        raise RooftraceError(f"--what-if {text!r}: expected KEY=VALUE, or several as 'KEY=VALUE; KEY=VALUE'")
    for key in (part.partition("=")[0].strip() for part in found):
        if key.partition(".")[0] in ("workload", "seed"):
            raise RooftraceError(
                f"--what-if {key}: the traffic is the one that was observed, and no alternative has another"
            )
    return found


def alternative(found: Observation, settings: Sequence[str], *, seeds: Sequence[int]) -> Alternative:
    """The deployment that was observed with other *settings*, under the same requests, and by how much it differs from the present.

    What was fitted is of the present release: for another one both are simulated without it. KV blocks that were observed are of
    the present memory: another has as large a share of what it has room for.
    """
    keys = {text.partition("=")[0].strip() for text in settings}
    base, present, notes = found.present, found.replayed, list[str]()
    if keys & _STACK and found.present.serving_stack != found.told.serving_stack:
        base = base.with_value("serving_stack", found.told.serving_stack)
        present = replay(base, found.traffic, found.edges_s, seeds=seeds)
        notes.append("both without what was fitted, which is of the present release")
    other = base.with_set(*settings)
    observed = found.told.memory.kv_blocks is None and found.present.memory.kv_blocks is not None
    if observed and "memory.kv_blocks" not in keys and {key.partition(".")[0] for key in keys} & _ROOM:
        share = (base.memory.kv_blocks or 0) / room(found.told, found.traffic)
        blocks = round(share * room(other.with_value("memory.kv_blocks", None), found.traffic))
        other = other.with_value("memory.kv_blocks", max(1, blocks))
        notes.append(f"{blocks:,} KV blocks a machine, {share:.0%} of what memory has room for, as observed")
    replayed = replay(other, found.traffic, found.edges_s, seeds=seeds)
    differences, how = differences_of(present.runs, replayed.runs)
    return Alternative(
        settings=tuple(settings),
        present=present,
        replayed=replayed,
        differences=differences,
        how="; ".join([how, *notes]),
    )


def room(scenario: Scenario, traffic: ObservedTraffic) -> int:
    """The KV blocks that the memory of a machine has room for."""
    return next(iter(resolve(scenario, traffic.workload(scenario.seed)).experiment.hosted)).kv_blocks


def differences_of(present: Sequence[Run], other: Sequence[Run]) -> tuple[tuple[Difference, ...], str]:
    """The differences of *other* from *present*, paired seed by seed; of one run each, stretch by stretch."""
    if min(len(present), len(other)) == 1:
        found = compare(present[0].result, other[0].result)
        money = _difference(MONEY, *([_figures(each[0]).get(MONEY)] for each in (present, other)))
        return (*found.differences, *money), found.how
    a, b = ([_figures(each) for each in runs] for runs in (present, other))
    said = [
        each
        for metric in (*METRICS, MONEY)
        for each in _difference(metric, [row.get(metric) for row in a], [row.get(metric) for row in b])
    ]
    n = min(len(a), len(b))
    return tuple(said), f"{n} draws of the observed traffic, each through both; intervals hold the difference at 95 %"


def _figures(run: Run) -> Mapping[str, Any]:
    return flatten(run.result.summary)


def _difference(metric: str, a: Sequence[Any], b: Sequence[Any]) -> list[Difference]:
    """The difference at one metric; none where a run has no such figure."""
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    if not pairs:
        return []
    first, second = (np.array(each, dtype=np.float64) for each in zip(*pairs, strict=True))
    change, why = None, ""
    if len(pairs) > 1 and is_share(metric):
        change = st.point_interval(first, second)
    elif len(pairs) > 1 and first.mean() > 0:
        change = st.ratio_interval(first, second)
    elif first.mean() > 0:
        size = float(second.mean() / first.mean() - 1.0)
        change, why = (
            st.Change(mean=size, low=np.nan, high=np.nan, n=1),
            "one run of each, so that nothing says how sure it is",
        )
    else:
        why = "no relative change from 0"
    return [Difference(metric=metric, where={}, a=float(first.mean()), b=float(second.mean()), change=change, why=why)]


@dataclass(frozen=True, kw_only=True)
class AsLogged:
    """A router that sends each request to the machine that served it."""

    machines: tuple[int, ...]
    """By request, in order of arrival."""

    def route(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        return self.machines[request.id] % len(loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """Requests one by one: where they went, where another router sends them, and what they would have had, by two simulations."""

    instances: tuple[str, ...]
    """By machine of the simulation."""
    went: NDArray[np.int64]
    goes: NDArray[np.int64]
    ttft_s: tuple[FloatArray, FloatArray]
    """As logged and rerouted; NaN where there is none."""
    e2el_s: tuple[FloatArray, FloatArray]
    settings: tuple[str, ...] = ()
    """Those of the alternative whose router it is."""

    @property
    def moved(self) -> float:
        """The share of requests that go elsewhere."""
        return float((self.went != self.goes).mean())

    def rows(self) -> list[dict[str, Any]]:
        """One row a request."""
        return [
            {
                "request": i,
                "went_to": self.instances[self.went[i]],
                "goes_to": self.instances[self.goes[i]],
                "ttft_as_logged_s": self.ttft_s[0][i],
                "ttft_rerouted_s": self.ttft_s[1][i],
                "e2el_as_logged_s": self.e2el_s[0][i],
                "e2el_rerouted_s": self.e2el_s[1][i],
            }
            for i in range(len(self.went))
        ]


def counterfactual(scenario: Scenario, traffic: ObservedTraffic, edges_s: FloatArray) -> Counterfactual:
    """The requests of a log as it routed them and as the router of *scenario* does, each in a simulation of its own.

    RooftraceError where the log does not say which instance served a request, or names more than the scenario has machines.
    """
    logged = traffic.logged
    if logged is None or logged.instance is None or "" in logged.instance:
        raise RooftraceError("routing request by request needs a log that says for each which instance served it")
    names = tuple(sorted(set(logged.instance)))
    number = {name: at for at, name in enumerate(names)}
    went = np.array([number[name] for name in logged.instance], np.int64)
    rerouted = replay(scenario, traffic, edges_s, seeds=[scenario.seed]).runs[0]
    machines = rerouted.machines
    if len(names) > machines:
        raise RooftraceError(
            f"the log names {len(names)} instances and the scenario has {machines} machines; --set replicas={len(names)}"
        )
    as_logged = replay(
        scenario, traffic, edges_s, seeds=[scenario.seed], router=AsLogged(machines=tuple(went.tolist()))
    ).runs[0]
    return Counterfactual(
        instances=(*names, *(f"machine {m}" for m in range(len(names), machines))),
        went=went,
        goes=rerouted.columns.requests["replica"].astype(np.int64),
        ttft_s=(_since_arrival(as_logged, "first_token_ns"), _since_arrival(rerouted, "first_token_ns")),
        e2el_s=(_since_arrival(as_logged, "finish_ns"), _since_arrival(rerouted, "finish_ns")),
    )


def _since_arrival(run: Run, column: str) -> FloatArray:
    requests = run.columns.requests
    return np.where(requests[column] >= 0, (requests[column] - requests["arrival_ns"]) * _NS, np.nan)
