"""Every router that is shipped, with settings that change what it looks at, and the part that routers around others share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.routers import (
    AdapterAffinity,
    Dynamo,
    Knowledge,
    LeastKv,
    LeastKvUse,
    LeastOutstanding,
    LeastQueue,
    LlmD,
    PowerOfTwo,
    Prefix,
    Random,
    Reserve,
    RoundRobin,
    Router,
    SessionAffinity,
    Shed,
    TrtLlmRanks,
    VllmRanks,
    knowledge_of,
)

ROUTED: Mapping[str, Sequence[Router]] = {
    "round_robin": [RoundRobin()],
    "random": [Random()],
    "least_outstanding": [LeastOutstanding()],
    "power_of_two": [PowerOfTwo()],
    "least_kv": [LeastKv()],
    "least_queue": [LeastQueue()],
    "least_kv_use": [LeastKvUse()],
    "session": [SessionAffinity(inner=LeastQueue(), max_waiting=1), SessionAffinity(inner=Prefix(), max_waiting=0)],
    "prefix": [Prefix(), Prefix(index="approximate", block_tokens=4), Prefix(event_delay_s=3e-3)],
    "llm_d": [
        LlmD(), LlmD(session=1.0), LlmD(index="approximate", block_tokens=4),
        LlmD(queue=1.0, kv=0.0, prefix=0.0, no_hit_lru=0.0),
    ],
    "dynamo": [Dynamo(), Dynamo(temperature=0.5)],
    "vllm_ranks": [VllmRanks(), VllmRanks(waiting_weight=4.0)],
    "trtllm_ranks": [TrtLlmRanks()],
    "adapter": [AdapterAffinity()],
    "reserve": [Reserve(LeastQueue(), 1), Reserve(LlmD(), 1)],
    "shed": [Shed(LeastQueue(), max_waiting=5), Shed(Dynamo(), priority=0, max_waiting=1)],
}  # fmt: skip
"""By short name."""
ROUTERS = tuple(router for routers in ROUTED.values() for router in routers)


def may_be_of_ranks(router: Router) -> bool:
    """No router of ranks is told more than what prefixes are cached."""
    return knowledge_of(router) in (None, Knowledge(prefixes=True))


@dataclass(frozen=True)
class Around:
    """A router around *inner*, which is told what that one asks for."""

    inner: Router

    @property
    def knows(self) -> Knowledge | None:
        return knowledge_of(self.inner)
