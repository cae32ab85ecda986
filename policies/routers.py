"""Routers, which choose a replica for each request: frozen dataclasses with one pure method.

The engine keeps a router's state for it (where prompts were sent, which machine served a session), as its `knows` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import exp, isfinite
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, cast


class RoutedRequest(NamedTuple):
    """A request at the router. *draws*: two uniform numbers in [0, 1) that belong to this request."""

    id: int
    prompt_tokens: int = 0
    model: int = 0
    draws: tuple[float, float] = (0.0, 0.0)
    arrival_ns: int = 0
    deadline_ns: int = -1
    """Time from arrival; -1: none."""
    turn: int = 0
    """The number of earlier requests for the same model; where every machine serves every model, of all earlier ones."""
    session: int = -1
    """The conversation that it belongs to; -1: none."""
    served_by: int = -1
    """The shown replica that got the last request of its session; -1: none. For routers that need it (`Knowledge.sessions`)."""
    priority: int = 0
    """Smaller goes first, as in vLLM."""
    adapter: int = -1
    """The LoRA adapter that it asks for; -1: the base model."""


class Refused(NamedTuple):
    """A router's answer that rejects the request, which costs nothing.

    *at*: the replica on whose account, for the record; -1: none.
    """

    reason: str
    at: int = -1


class Booked(NamedTuple):
    """A router's own account of a machine: the requests that it sent there and that have not ended."""

    blocks: int = 0
    """KV blocks of their prompts, each once, the last one rounded up; nothing that they have generated."""
    shared_blocks: int = 0
    """Those of the present request's prompt that are among them."""
    prefill_tokens: int = 0
    """Tokens of the prompts without a first token that were not thought to be cached there when they were sent."""


NOTHING_BOOKED: Final = Booked()


class AdapterLoad(NamedTuple):
    """The LoRA adapters of a machine."""

    running: frozenset[int] = frozenset()
    """Those of running requests."""
    waiting: frozenset[int] = frozenset()
    """Those of waiting requests."""
    max_loras: int = 0
    """Different adapters that a batch has at most."""

    def score(self, adapter: int) -> float:
        """The worth of the machine for a request for *adapter*, from 0 to 1: 1 where it runs or the base model is asked for, 0.8
        where there is room for one more, 0.6 where it waits, otherwise 0."""
        if adapter < 0 or adapter in self.running:
            return 1.0
        if len(self.running | self.waiting) < self.max_loras:
            return 0.8
        return 0.6 if adapter in self.waiting else 0.0


NO_ADAPTERS: Final = AdapterLoad()


class ReplicaLoad(Protocol):
    """A machine as the router sees it: what has happened up to the last iteration that has ended.

    Only machines that host the request's model are shown.
    """

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def kv_blocks_used(self) -> int: ...

    @property
    def kv_use(self) -> float:
        """The share of its KV blocks that sequences hold, 0 to 1; blocks that are only cached count as free."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        ...

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that it has still to compute, of waiting and running requests."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of waiting and running requests, computed or not."""
        ...

    def found_tokens(self, request: RoutedRequest) -> int:
        """Tokens from the beginning of the request's prompt that the machine is thought to have cached, in full blocks: by its own
        events, or by the router's index (`Knowledge.sent`)."""
        ...

    def booked(self, request: RoutedRequest) -> Booked:
        """The router's own account of the machine (`Knowledge.booked`)."""
        ...

    @property
    def no_hit_order(self) -> int:
        """The number, in order, of its last request of which no machine had anything; -1: it got none."""
        ...

    @property
    def adapter_load(self) -> AdapterLoad:
        """Its LoRA adapters."""
        ...

    @property
    def promised_ns(self) -> int:
        """The end of all accepted work at the last stage (ns); for machines that serve single-pass models."""
        ...

    def done_ns(self, model: int, *, waiting: bool) -> int:
        """The end (ns) of a request of *model* that arrives now: after all accepted work or, not *waiting*, after all started work;
        for machines that serve single-pass models."""
        ...


@dataclass(frozen=True)
class Load:
    """A `ReplicaLoad` in literals, for tests and examples. *service_ns*: of one request, for `done_ns`; *found*: tokens;
    *account*: as `booked` says."""

    waiting: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    promised_ns: int = 0
    service_ns: int = 0
    kv_use: float = 0.0
    block_tokens: int = 16
    prefill_tokens: int = 0
    prompt_tokens: int = 0
    found: int = 0
    no_hit_order: int = -1
    account: Booked = NOTHING_BOOKED
    adapter_load: AdapterLoad = NO_ADAPTERS

    def booked(self, request: RoutedRequest) -> Booked:
        return self.account

    def done_ns(self, model: int, *, waiting: bool) -> int:
        return self.promised_ns + self.service_ns

    def found_tokens(self, request: RoutedRequest) -> int:
        return self.found


NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBlocks:
    """An index that a router keeps of where it sent prompts.

    For each machine it has the blocks of prompts that were sent last, the least recently sent forgotten first. Within a prompt the
    first block is the older, and without it the others are not found.
    """

    block_tokens: int | None = None
    """None: a KV block of the machine, or 16 tokens where that holds one."""
    capacity_blocks: int | None = None
    """Limit for each machine; None: its number of KV blocks."""
    max_age_s: float | None = None
    """Blocks sent longer ago are forgotten; None: never."""
    max_blocks: int | None = None
    """Blocks of a prompt that are looked up; None: all."""
    rest: bool = False
    """Whether the end of a prompt that does not fill a block counts as one, which no other prompt has."""

    def tokens_in(self, kv_block_tokens: int) -> int:
        """Tokens of a block of the index, for a machine whose KV blocks have *kv_block_tokens*."""
        if self.block_tokens is not None:
            return self.block_tokens
        return kv_block_tokens if kv_block_tokens > 1 else 16

    def blocks_of(self, prompt_tokens: int, block_tokens: int) -> int:
        """Blocks of a prompt that the index has; none of one that does not fill the first."""
        blocks = prompt_tokens // block_tokens
        if self.rest and blocks and prompt_tokens % block_tokens:
            blocks += 1
        return blocks if self.max_blocks is None else min(blocks, self.max_blocks)

    def __post_init__(self) -> None:
        for name in ("block_tokens", "capacity_blocks", "max_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1; got {value}")
        if self.max_age_s is not None and not (isfinite(self.max_age_s) and self.max_age_s > 0):
            raise ValueError(f"max_age_s is a time above 0; got {self.max_age_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Knowledge that a router needs beside the loads of a `ReplicaLoad`; its property `knows`."""

    prefixes: bool = False
    """`ReplicaLoad.found_tokens`, by the machines' own events."""
    sent: SentBlocks | None = None
    """The same, by an index of where prompts were sent."""
    event_delay_s: float = 0.0
    """Age of what is known of the machines' blocks."""
    poll_s: float = 0.0
    """Loads are read at whole multiples of it, as engines have published them, and are the same until the next: waiting requests
    are those that the latest plan left waiting. 0: loads are the present ones, and a request that has just arrived waits as
    well."""
    sessions: bool = False
    """`RoutedRequest.served_by`."""
    no_hits: bool = False
    """`ReplicaLoad.no_hit_order`."""
    booked: bool = False
    """`ReplicaLoad.booked`."""


class Router(Protocol):
    """Chooses a machine for each request. Implementations are frozen dataclasses; a function will do as well (`RouteFunction`)."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        """The place in *replicas* of the machine that gets *request*, or why none does."""
        ...


RouteFunction = Callable[[RoutedRequest, Sequence[ReplicaLoad]], "int | Refused"]


SpreadFunction = Callable[[Sequence[int], Sequence[ReplicaLoad]], list[tuple[int, int]]]
"""Prompts and ranks -> which prompt goes to which rank, in the order in which they join."""


def spread_of(router: object) -> SpreadFunction | None:
    """The method `spread` of a router between ranks whose requests wait in one queue of all ranks; None: it has none."""
    found = getattr(router, "spread", None)
    return cast(SpreadFunction, found) if callable(found) else None


def route_of(router: Router | RouteFunction) -> RouteFunction:
    """The function that routes: the router's method, or the function itself. TypeError for anything else."""
    route = getattr(router, "route", router)
    if not callable(route):
        raise TypeError(f"a router has a method route(request, replicas) or is such a function; got {router!r}")
    return cast(RouteFunction, route)


def least_of(router: object) -> Callable[[ReplicaLoad], Any] | None:
    """The figure by which *router* takes the least loaded replica, the lowest index among equals, whatever the request: a method
    `least_of` of the class that has its method `route`. It reads the requests that wait and run, which only a machine's turns and
    new requests change, so that the engine keeps machines in that order and does not ask. None: it is asked."""
    for each in type(router).__mro__:
        if "route" in vars(each):
            return getattr(router, "least_of", None) if "least_of" in vars(each) else None
    return None


def _outstanding(load: ReplicaLoad) -> int:
    return load.waiting + load.running


@dataclass(frozen=True)
class RoundRobin:
    """The requests for a model are sent to the replicas that host it in turn, in order of their numbers."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return request.turn % len(replicas)


@dataclass(frozen=True)
class Random:
    """A replica drawn uniformly."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return int(request.draws[0] * len(replicas))


@dataclass(frozen=True)
class LeastOutstanding:
    """The replica with the fewest requests waiting and running; the lowest index among equals."""

    def least_of(self, load: ReplicaLoad, /) -> int:
        """See `least_of`."""
        return _outstanding(load)

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        best, fewest = 0, _outstanding(replicas[0])
        for index in range(1, len(replicas)):
            outstanding = _outstanding(replicas[index])
            if outstanding < fewest:
                best, fewest = index, outstanding
        return best


@dataclass(frozen=True)
class PowerOfTwo:
    """The less loaded of two replicas drawn at random (Mitzenmacher, 2001)."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        n = len(replicas)
        if n == 1:
            return 0
        first = int(request.draws[0] * n)
        second = int(request.draws[1] * (n - 1))
        second += second >= first
        if _outstanding(replicas[second]) < _outstanding(replicas[first]):
            return second
        return first


@dataclass(frozen=True)
class LeastKv:
    """The replica with the fewest KV blocks in use; then the fewest requests; then the lowest index."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].kv_blocks_used, _outstanding(replicas[i]), i))


@dataclass(frozen=True)
class LeastQueue:
    """The replica with the fewest requests waiting; then the fewest running; then the lowest index."""

    def least_of(self, load: ReplicaLoad, /) -> tuple[int, int]:
        """See `least_of`."""
        return load.waiting, load.running

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].waiting, replicas[i].running, i))


@dataclass(frozen=True)
class LeastKvUse:
    """The replica with the smallest share of its KV blocks in use; then the fewest requests; then the lowest index. For machines
    that have different memories; `LeastKv` counts blocks."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].kv_use, _outstanding(replicas[i]), i))


@dataclass(frozen=True)
class VllmRanks:
    """The rank with the lowest score; a tie goes to the first from one place on, which moves by one with each request:

    score = waiting + running + 6 x waiting x max(0, share of KV blocks in use - 0.5).

    vLLM 0.32.0's internal load balancer (v1/engine/core_client.py, `DPLBAsyncMPClient.get_core_engine_for_request`) with one front
    end, whose own count of requests in flight is exact. There waiting requests and KV use are up to 100 ms old (coordinator.py);
    here they are the present ones. With *waiting_weight* w the score is w x waiting + running, as releases before had it with 4
    (from knowledge, to be checked there).
    """

    waiting_weight: float | None = None

    def __post_init__(self) -> None:
        if self.waiting_weight is not None and not (isfinite(self.waiting_weight) and self.waiting_weight >= 0):
            raise ValueError(f"waiting_weight is a finite number of at least 0; got {self.waiting_weight}")

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        n = len(replicas)
        return min(((request.turn + i) % n for i in range(n)), key=lambda i: self._score(replicas[i]))

    def _score(self, load: ReplicaLoad) -> float:
        if self.waiting_weight is not None:
            return self.waiting_weight * load.waiting + load.running
        return load.waiting + load.running + load.waiting * 6.0 * max(0.0, load.kv_use - 0.5)


@dataclass(frozen=True)
class TrtLlmRanks:
    """The rank with the fewest prompt tokens, of those with fewer requests than in an even spread; then fewest requests, lowest
    index. Where all seats are taken requests wait in one queue of all ranks, and those that leave it together are spread together,
    the longest prompts first.

    TensorRT-LLM, tensorrt_llm/_torch/pyexecutor/scheduler/adp_router.py, `DefaultADPRouter` at 02385f29 of 2026. There requests
    that come during one iteration are spread together, too; here each goes to a rank when it comes, while there are seats.
    """

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        return self.spread([request.prompt_tokens], replicas)[0][1]

    def spread(self, prompts: Sequence[int], replicas: Sequence[ReplicaLoad], /) -> list[tuple[int, int]]:
        """Which of *prompts* goes to which rank, in the order in which they join."""
        active = [_outstanding(load) for load in replicas]
        even = max(-(-(sum(active) + len(prompts)) // len(replicas)), max(active))
        ranks = [
            (load.prompt_tokens, n, i) for i, (load, n) in enumerate(zip(replicas, active, strict=True)) if n < even
        ]
        heapify(ranks)
        found: list[tuple[int, int]] = []
        for at in sorted(range(len(prompts)), key=lambda at: -prompts[at]):
            tokens, n, rank = heappop(ranks)
            found.append((at, rank))
            if n + 1 < even:
                heappush(ranks, (tokens + prompts[at], n + 1, rank))
        return found


@dataclass(frozen=True, kw_only=True)
class SessionAffinity:
    """A session stays with the replica that got its last request, unless more than *max_waiting* wait there (None: always).

    *inner* routes requests without a session, first requests, and those whose replica has too long a queue.
    """

    inner: Router = LeastOutstanding()
    max_waiting: int | None = None

    @property
    def knows(self) -> Knowledge:
        return replace(knowledge_of(self.inner) or Knowledge(), sessions=True)

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        stay = request.served_by
        if stay >= 0 and (self.max_waiting is None or replicas[stay].waiting <= self.max_waiting):
            return stay
        return route_of(self.inner)(request, replicas)


@dataclass(frozen=True, kw_only=True)
class _ByPrefix:
    """A router's knowledge of what machines have cached.

    *index* `exact`: by the machines' events, *event_delay_s* late, in their own blocks; `approximate`: by where prompts were sent,
    with the other settings (see `SentBlocks`), which are none of the exact index.
    """

    index: Literal["exact", "approximate"] = "exact"
    event_delay_s: float = 0.0
    block_tokens: int | None = None
    capacity_blocks: int | None = None
    max_age_s: float | None = None
    max_blocks: int | None = None
    poll_s: float = 0.0
    """Interval at which loads are read."""
    approximate: ClassVar[SentBlocks] = SentBlocks()
    """The approximate index where settings are left out."""

    def __post_init__(self) -> None:
        if self.index not in ("exact", "approximate"):
            raise ValueError(f"index is exact or approximate; got {self.index!r}")
        for name in ("event_delay_s", "poll_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is a finite time of at least 0; got {getattr(self, name)}")
        own = ("block_tokens", "capacity_blocks", "max_age_s", "max_blocks")
        given = [name for name in own if getattr(self, name) is not None]
        if self.index == "exact" and given:
            raise ValueError(
                f"{given[0]} is a setting of index: approximate; an exact index has the blocks of the machines"
            )
        if self.index == "approximate" and self.event_delay_s:
            raise ValueError("event_delay_s is a setting of index: exact; an approximate index hears of no events")
        self._sent()

    def _sent(self) -> SentBlocks | None:
        if self.index == "exact":
            return None
        given = {name: getattr(self, name) for name in ("block_tokens", "capacity_blocks", "max_age_s", "max_blocks")}
        return replace(self.approximate, **{name: value for name, value in given.items() if value is not None})

    @property
    def knows(self) -> Knowledge:
        return Knowledge(prefixes=True, sent=self._sent(), event_delay_s=self.event_delay_s, poll_s=self.poll_s)

    def shares(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> list[float]:
        """The share of a prompt's looked-up blocks that each replica is thought to have."""
        sent = self._sent()
        shares: list[float] = []
        for load in replicas:
            size = load.block_tokens if sent is None else sent.tokens_in(load.block_tokens)
            blocks = request.prompt_tokens // size if sent is None else sent.blocks_of(request.prompt_tokens, size)
            shares.append(min(load.found_tokens(request) / (blocks * size), 1.0) if blocks else 0.0)
        return shares


@dataclass(frozen=True, kw_only=True)
class Prefix(_ByPrefix):
    """The replica that has most of the prompt; of equals the one with the fewest requests; then the lowest index."""

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        shares = self.shares(request, replicas)
        return min(range(len(replicas)), key=lambda i: (-shares[i], _outstanding(replicas[i]), i))


@dataclass(frozen=True, kw_only=True)
class LlmD(_ByPrefix):
    """The replica with the highest weighted sum of scores from 0 to 1, of equals one drawn, as llm-d's endpoint picker has it:

    * *queue*: (longest - own) / (longest - shortest) of the queues; 1 for all where they are equal;
    * *kv*: 1 - share of KV blocks in use;
    * *prefix*: share of the prompt's blocks that it is thought to have;
    * *session*: 1 for the replica that got the session's last request;
    * *no_hit_lru*: where no replica has anything of the prompt, 1 for the one that got such a prompt longest ago, down to 0 for
      the latest; where any has, the same for all;
    * *adapter*: `AdapterLoad.score`, its lora-affinity scorer (from knowledge, to be checked there).

    The weights are those of its default profile, which has none of the last three; guides give no_hit_lru 2. What is read is
    *poll_s* old at most (50 ms there).

    llm-d/llm-d-inference-scheduler at 520af478, pkg/epp/framework/plugins/scheduling/scorer and picker/maxscore; the approximate
    index of plugins/requestcontrol/dataproducer/approximateprefix has the engine's blocks and as many of them (its autotuning), 256
    of a prompt at most. There a token is taken for 4 characters; here it is one.
    """

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0
    session: float = 0.0
    no_hit_lru: float = 0.0
    adapter: float = 0.0
    approximate: ClassVar[SentBlocks] = SentBlocks(max_blocks=256, rest=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: getattr(self, name) for name in ("queue", "kv", "prefix", "session", "no_hit_lru", "adapter")}
        for name, weight in weights.items():
            if not (isfinite(weight) and weight >= 0):
                raise ValueError(f"{name} is a weight of at least 0; got {weight}")
        if not any(weights.values()):
            raise ValueError("some weight has to be above 0; all are 0")

    @property
    def knows(self) -> Knowledge:
        asks = self.prefix > 0 or self.no_hit_lru > 0
        return replace(super().knows, prefixes=asks, sessions=self.session > 0, no_hits=self.no_hit_lru > 0)

    @property
    def by_adapter(self) -> bool:
        """Whether it asks which adapters machines have."""
        return self.adapter > 0

    def scores(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> list[float]:
        """The weighted sum of each replica."""
        queues = [load.waiting for load in replicas]
        most, least = max(queues), min(queues)
        shares = self.shares(request, replicas) if self.prefix or self.no_hit_lru else [0.0] * len(replicas)
        unhit = [0.5] * len(replicas)
        if self.no_hit_lru and not any(shares):
            order = sorted(range(len(replicas)), key=lambda i: (replicas[i].no_hit_order, i))
            for rank, i in enumerate(order):
                unhit[i] = 1.0 - rank / (len(replicas) - 1) if len(replicas) > 1 else 1.0
        return [
            self.queue * (1.0 if most == least else (most - queues[i]) / (most - least))
            + self.kv * (1.0 - load.kv_use)
            + self.prefix * shares[i]
            + self.session * (request.served_by == i)
            + self.no_hit_lru * unhit[i]
            + (self.adapter * load.adapter_load.score(request.adapter) if self.adapter else 0.0)
            for i, load in enumerate(replicas)
        ]

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        scores = self.scores(request, replicas)
        best = max(scores)
        return _drawn([i for i, score in enumerate(scores) if score == best], request.draws[0])


@dataclass(frozen=True, kw_only=True)
class Dynamo(_ByPrefix):
    """The replica of the lowest cost, or one drawn the likelier the lower its cost, as Dynamo's KV router has it:

    cost = *overlap_weight* x blocks of prompts that it would have to compute + blocks of prompts that it would hold,

    this request's among both: it would compute what it is not thought to have, and hold what unfinished requests there do not
    share. Both are counts of the router's own (`Booked`): blocks that are cached and idle are not held, nor is what was generated.
    With *temperature* 0 the lowest cost, of equals one drawn; above 0 with probabilities exp(-cost / (highest - lowest) /
    temperature), scaled to 1. With *overlap_weight* 0 prefixes count for nothing but what is held, as for machines that decode.

    ai-dynamo/dynamo 1.6.1, lib/kv-router/src/scheduling/selector.rs and sequences/prompt_registry.rs (prefill_load_scale is the
    weight's name there). The approximate index has the engine's blocks and forgets them after 120 s, without another limit.
    """

    overlap_weight: float = 1.0
    temperature: float = 0.0
    approximate: ClassVar[SentBlocks] = SentBlocks(capacity_blocks=NO_LIMIT, max_age_s=120.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("overlap_weight", "temperature"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is a finite number of at least 0; got {getattr(self, name)}")

    @property
    def knows(self) -> Knowledge:
        return replace(super().knows, booked=True)

    def costs(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> list[float]:
        """The cost of each replica, in its KV blocks."""
        costs: list[float] = []
        for load in replicas:
            booked = load.booked(request)
            new = request.prompt_tokens - min(load.found_tokens(request), request.prompt_tokens)
            prefill_blocks = (booked.prefill_tokens + new) / load.block_tokens
            held = booked.blocks + -(-request.prompt_tokens // load.block_tokens) - booked.shared_blocks
            costs.append(self.overlap_weight * prefill_blocks + held)
        return costs

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int:
        costs = self.costs(request, replicas)
        lowest, highest = min(costs), max(costs)
        if self.temperature == 0 or lowest == highest:
            return _drawn([i for i, cost in enumerate(costs) if cost == lowest], request.draws[0])
        weights = [exp(-(cost - lowest) / (highest - lowest) / self.temperature) for cost in costs]
        left = request.draws[0] * sum(weights)
        for i, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return i
        return costs.index(lowest)


def _drawn(among: Sequence[int], draw: float) -> int:
    return among[int(draw * len(among))]


def knowledge_of(router: object) -> Knowledge | None:
    """The knowledge that *router* needs; None where it needs none."""
    return cast("Knowledge | None", getattr(router, "knows", None))


@dataclass(frozen=True)
class Reserve:
    """The first *machines* machines are kept for requests of priority *priority* and before it (smaller goes first).

    Such requests may use any machine; the inner router chooses among those that are shown to it. Where there are no others, all are
    shown.
    """

    inner: Router | RouteFunction
    machines: int
    priority: int = 0

    def __post_init__(self) -> None:
        route_of(self.inner)
        if isinstance(self.machines, bool) or self.machines < 1:
            raise ValueError(f"machines is a whole number of at least 1; got {self.machines!r}")

    @property
    def knows(self) -> Knowledge | None:
        """The knowledge that the inner router needs."""
        return knowledge_of(self.inner)

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        kept = 0 if request.priority <= self.priority or self.machines >= len(replicas) else self.machines
        if not kept:
            return route_of(self.inner)(request, replicas)
        request = request._replace(served_by=max(request.served_by - kept, -1))
        answer = route_of(self.inner)(request, replicas[kept:])
        if isinstance(answer, Refused):
            return answer if answer.at < 0 else answer._replace(at=answer.at + kept)
        return answer + kept


@dataclass(frozen=True)
class AdapterAffinity:
    """The inner router chooses among the machines whose `AdapterLoad.score` for the request's LoRA adapter is the highest; with
    *apart*, among the *each* machines that the adapter has, which adapters are given in turn. It chooses among all machines for the
    base model.

    Dynamo (ai-dynamo 1.6.1, lib/llm/src/lora) lets its KV router choose among the machines that a controller has given the
    adapter. *apart* with `Dynamo` inside does so too, with *each* machines for every adapter.
    """

    inner: Router | RouteFunction = LeastOutstanding()
    apart: bool = False
    each: int = 1
    by_adapter: ClassVar[bool] = True
    """It asks which adapters machines have."""

    def __post_init__(self) -> None:
        route_of(self.inner)
        if self.each < 1 or (self.each > 1 and not self.apart):
            raise ValueError(
                f"each is the machines of an adapter: at least 1, and more only with apart; got {self.each}"
            )

    @property
    def knows(self) -> Knowledge | None:
        """The knowledge that the inner router needs."""
        return knowledge_of(self.inner)

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        if request.adapter < 0:
            return route_of(self.inner)(request, replicas)
        best = self._own(request.adapter, len(replicas)) if self.apart else _highest(request.adapter, replicas)
        stays = best.index(request.served_by) if request.served_by in best else -1
        answer = route_of(self.inner)(request._replace(served_by=stays), [replicas[i] for i in best])
        if isinstance(answer, Refused):
            return answer if answer.at < 0 else answer._replace(at=best[answer.at])
        return best[answer]

    def _own(self, adapter: int, n: int) -> list[int]:
        """The machines of an adapter, of *n*."""
        return sorted({(adapter * self.each + place) % n for place in range(self.each)})


def _highest(adapter: int, replicas: Sequence[ReplicaLoad]) -> list[int]:
    """The machines whose score for an adapter is the highest."""
    scores = [load.adapter_load.score(adapter) for load in replicas]
    return [i for i, score in enumerate(scores) if score == max(scores)]


SATURATED = "class is shed: the machines are saturated"


@dataclass(frozen=True)
class Shed:
    """Requests of priority *priority* and after it (larger goes last) are refused while the machines are saturated.

    They are where the mean over machines of the larger of queue / *max_waiting* and share of KV blocks in use / *max_kv_use* is 1
    or more: one very long queue will do. The inner router routes all others.

    llm-d/llm-d-inference-scheduler at 520af478, pkg/epp/framework/plugins/flowcontrol/saturationdetector/utilization, whose
    defaults these are; its sheddable requests are those of a priority below 0.
    """

    inner: Router | RouteFunction
    priority: int = 1
    max_waiting: int = 5
    max_kv_use: float = 0.8

    def __post_init__(self) -> None:
        route_of(self.inner)
        if isinstance(self.max_waiting, bool) or self.max_waiting < 1:
            raise ValueError(f"max_waiting is a whole number of at least 1; got {self.max_waiting!r}")
        if not 0 < self.max_kv_use <= 1:
            raise ValueError(f"max_kv_use is a share above 0 and at most 1; got {self.max_kv_use!r}")

    @property
    def knows(self) -> Knowledge | None:
        """The knowledge that the inner router needs."""
        return knowledge_of(self.inner)

    def route(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad], /) -> int | Refused:
        if request.priority >= self.priority and self.saturation(replicas) >= 1.0:
            return Refused(SATURATED)
        return route_of(self.inner)(request, replicas)

    def saturation(self, replicas: Sequence[ReplicaLoad]) -> float:
        """The mean over machines; 1 or more: saturated."""
        of_each = (max(load.waiting / self.max_waiting, load.kv_use / self.max_kv_use) for load in replicas)
        return sum(of_each) / len(replicas)
