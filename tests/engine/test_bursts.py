"""A burst that comes within one step is spread as its router says, wherever it goes: routers count what they have just sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from policies.routers import (
    NOTHING_BOOKED,
    Booked,
    LeastKv,
    LeastKvUse,
    LeastOutstanding,
    LeastQueue,
    Load,
    Prefix,
    Refused,
    ReplicaLoad,
    RoundRobin,
    RoutedRequest,
    Router,
    Shed,
    TrtLlmRanks,
    VllmRanks,
    route_of,
)
from policies.vllm import Vllm
from sim.engine import Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.spec.roles import HandoverSpec, KvPath, Role, Room
from sim.engine.tiers.links import LinkSpec
from tests.engine.costs import Ranked
from tests.routers import ROUTERS, Around, may_be_of_ranks
from tests.sample import few
from workloads import Trace

N, OF, TOKENS, S = 16, 4, 100, 10**9
LEVELS = (LeastOutstanding(), LeastKv(), LeastQueue(), LeastKvUse(), VllmRanks(), TrtLlmRanks(), Prefix())
"""Routers that look for the fewest: among equal machines that have nothing cached all get as many."""


@dataclass(frozen=True)
class Noted(Around):
    """Routes as *inner*, but for the first few, of which each machine gets one; writes down what it was asked for and shown."""

    asked: list[RoutedRequest] = field(default_factory=list[RoutedRequest])
    shown: list[Load] = field(default_factory=list[Load])
    """As the burst begins."""
    answers: list[int | Refused] = field(default_factory=list["int | Refused"])

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        if request.id < OF:
            return request.id
        if not self.asked:
            names = (
                *("waiting", "running", "kv_blocks_used", "kv_use", "block_tokens", "prefill_tokens", "prompt_tokens"),
                "no_hit_order",
            )
            self.shown.extend(
                Load(**{name: getattr(each, name) for name in names}, account=each.booked(request)) for each in replicas
            )
        self.asked.append(request)
        self.answers.append(route_of(self.inner)(request, replicas))
        return self.answers[-1]


def spread(noted: Noted, prompt_tokens: int, booked_tokens: int) -> list[int | Refused]:
    """The router's answer where each that it has sent waits, with so many tokens to compute, and nothing else has happened;
    *booked_tokens*: as the router counts them, until there is a first token."""
    loads, answers, unhit = list(noted.shown), list[int | Refused](), OF
    for request in noted.asked:
        answers.append(route_of(noted.inner)(request, loads))
        if isinstance(at := answers[-1], int):
            load = loads[at]
            last = unhit if load.no_hit_order >= 0 else -1
            more: dict[str, Any] = {
                "waiting": load.waiting + 1,
                "prefill_tokens": load.prefill_tokens + prompt_tokens,
                "prompt_tokens": load.prompt_tokens + TOKENS,
            }
            if load.account != NOTHING_BOOKED:
                blocks, shared, booked = load.account
                more["account"] = Booked(blocks + -(-TOKENS // load.block_tokens), shared, booked + booked_tokens)
            loads[at] = replace(load, **more, no_hit_order=last)
            unhit += 1
    return answers


def a_machine(*, ranks: int = 1, rank_router: Router | None = None) -> ReplicaSpec | MachineSpec:
    spec = ReplicaSpec(
        cost=Ranked(fixed_s=1.0),
        scheduler=Vllm(max_num_batched_tokens=2 * N * TOKENS, max_num_seqs=2 * N),
        kv_blocks=4000,
        prefix_cache="blocks",
    )
    return spec if ranks == 1 else MachineSpec(hosted=(spec,), ranks=ranks, rank_router=rank_router)


def burst(before_s: float) -> Trace:
    """One for each, *before_s* earlier, and then the others."""
    return Trace(
        arrival_ns=np.repeat([20 * S - round(before_s * S), 20 * S], [OF, N]),
        prompt_tokens=np.full(OF + N, TOKENS),
        output_tokens=np.repeat([30, 2], [OF, N]),
        priority=np.arange(OF + N) % 3 % 2,
    )


def served(
    router: Router, machines: Sequence[ReplicaSpec | MachineSpec], *roles: Role, late: Router | None = None,
    room: Room = "after_prefill", local_tokens: int = 0, before_s: float = 0.5,
) -> Columns:  # fmt: skip
    handover = None
    if roles:
        handover = HandoverSpec(
            roles=roles, pools=tuple(int(role == "decode") for role in roles), router=late or RoundRobin(), room=room,
            local_tokens=local_tokens,
            paths={(0, 1): KvPath(link=LinkSpec(1e9, latency_s=1e-3), bytes_per_token=1000.0)},
        )  # fmt: skip
    experiment = Experiment(workload=burst(before_s), replicas=tuple(machines), router=router, handover=handover)
    return run(experiment, check_invariants=True)


def where(kind: str, noted: Noted) -> None:
    """Serve a burst on four equal machines, or ranks, that *noted* chooses from, each in the middle of a step."""
    one, four = [a_machine()], [a_machine()] * OF
    ranks = [a_machine(ranks=OF, rank_router=noted)] if "ranks" in kind else []
    first: Room = "before_prefill"
    match kind:
        case "machines":
            served(noted, four)
        case "ranks":
            served(RoundRobin(), ranks)
        case "decode machines":
            served(RoundRobin(), one + four, "prefill", *["decode"] * OF, late=noted, before_s=9.6)
        case "decode machines chosen at arrival":
            served(RoundRobin(), one + four, "prefill", *["decode"] * OF, late=noted, before_s=9.6, local_tokens=1)
        case "decode machines that take room first":
            served(RoundRobin(), one + four, "prefill", *["decode"] * OF, late=noted, before_s=9.6, room=first)
        case "prefill machines":
            served(noted, four + one, *["prefill"] * OF, "decode")
        case "prefill machines behind room":
            served(noted, four + one, *["prefill"] * OF, "decode", room=first)
        case "decode ranks":
            served(RoundRobin(), one + ranks, "prefill", "decode", before_s=9.6)
        case "decode ranks that take room first":
            served(RoundRobin(), one + ranks, "prefill", "decode", room=first, before_s=9.6)
        case _:
            served(RoundRobin(), ranks + one, "prefill", "decode", room=first)


COMPUTE = ("machines", "ranks", "prefill machines", "prefill machines behind room", "prefill ranks behind room")
DECODE = (
    "decode machines", "decode machines chosen at arrival", "decode machines that take room first", "decode ranks",
    "decode ranks that take room first",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", few([*COMPUTE[:3], *DECODE[::4], *COMPUTE[3:], *DECODE[1:4]], 5, reason="much like those of the same role")
)
def test_a_burst_is_spread_as_its_router_says(kind: str) -> None:
    for router in ROUTERS:
        if "ranks" in kind and not may_be_of_ranks(router):
            continue
        if isinstance(router, Shed) and kind in DECODE:
            # Who has its prompt computed is not refused.
            continue
        noted = Noted(router)
        where(kind, noted)
        assert len(noted.asked) == N
        expected = spread(noted, TOKENS if kind in COMPUTE else 0, 0 if kind == "decode machines" else TOKENS)
        assert noted.answers == expected, f"{router} among {kind}"
        if router in LEVELS:
            assert [noted.answers.count(i) for i in range(OF)] == [N // OF] * OF
