"""The engine's rules written a second time, from docs/exactness.md and with nothing of `sim.engine`: every iteration is an
event of its own, every sequence an object, every sum made anew.

Costs are whole ticks, linear in what an iteration does, so that both models can be compared to the nanosecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

TICKS = 1 << 20
"""In a nanosecond."""


@dataclass
class Request:
    id: int
    prompt: int
    output: int
    think_ns: int = 0
    model: int = 0
    arrival: int = -1
    scheduled: int = -1
    first_token: int = -1
    finish: int = -1
    emitted: int = 0
    preemptions: int = 0
    recomputed: int = 0
    status: str = "unfinished"

    @property
    def context(self) -> int:
        """The tokens to compute when nothing is cached."""
        return max(self.prompt, 1) + self.emitted


@dataclass
class Seq:
    """An admitted request. Decoding when nothing is to compute; its next token then needs room beside those cached."""

    request: Request
    blocks: int
    cached: int
    to_compute: int


@dataclass(frozen=True)
class Rules:
    """A queue and a batch of one model on a machine. *budget*: prompt tokens and decodes of an iteration; None: whole prompts,
    with no such limit."""

    fixed: int
    row: int
    pair: int
    kv: int
    handover: int
    n_stages: int
    micro_batches: int
    budget: int | None
    seats: int
    watermark: float
    blocks: int
    block_tokens: int
    longest: int | None = None
    model: int | None = None

    def held(self, tokens: int) -> int:
        return (tokens + self.block_tokens - 1) // self.block_tokens


@dataclass
class Batch:
    """A micro-batch slot; in flight when *steps* is not None."""

    seqs: list[Seq] = field(default_factory=list)
    steps: list[tuple[Seq, int]] | None = None
    """(sequence, prompt tokens that it computes, 0 for a decode)."""


class Model:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.queue: deque[Request] = deque()
        self.free = rules.blocks
        self.idle = deque(Batch() for _ in range(rules.micro_batches))
        self.all = list(self.idle)

    def outstanding(self) -> int:
        return len(self.queue) + sum(len(batch.seqs) for batch in self.all)

    def plan(self, batch: Batch) -> list[tuple[Seq | Request, int]]:
        """The requests that take part, after those have been evicted whose place the older need."""
        rules = self.rules
        evicted = False
        while sum(self.grows(seq) for seq in batch.seqs) > self.free:
            evicted = True
            newest = batch.seqs.pop()
            self.free += newest.blocks
            newest.request.preemptions += 1
            newest.request.recomputed += newest.cached
            self.queue.appendleft(newest.request)
        decoding = [seq for seq in batch.seqs if not seq.to_compute]
        steps: list[tuple[Seq | Request, int]] = [(seq, 0) for seq in decoding]
        budget = 1 << 60 if rules.budget is None else rules.budget - len(decoding)
        for seq in batch.seqs:
            if seq.to_compute and budget > 0:
                steps.append((seq, min(seq.to_compute, budget)))
                budget -= steps[-1][1]
        free = self.free - sum(self.grows(seq) for seq in batch.seqs)
        free -= int(rules.watermark * rules.blocks) if batch.seqs else 0
        seats = rules.seats - len(batch.seqs)
        for request in [] if evicted else self.queue:
            free -= rules.held(request.context)
            if budget <= 0 or seats <= 0 or free < 0:
                break
            steps.append((request, min(request.context, budget)))
            budget -= steps[-1][1]
            seats -= 1
        # Nobody is left after the eviction: it may start over with the queue.
        return self.plan(batch) if evicted and not steps and self.queue else steps

    def grows(self, seq: Seq) -> int:
        return 0 if seq.to_compute else self.rules.held(seq.cached + 1) - seq.blocks

    def start(self, batch: Batch, steps: Sequence[tuple[Seq | Request, int]], now: int) -> int:
        """Take memory and make the batch; ticks of each stage."""
        rules = self.rules
        ticks = rules.fixed
        batch.steps = []
        for who, tokens in steps:
            if isinstance(who, Request):
                self.queue.remove(who)
                who.scheduled = now if who.scheduled < 0 else who.scheduled
                seq = Seq(who, rules.held(who.context), 0, who.context)
                self.free -= seq.blocks
                batch.seqs.append(seq)
            else:
                seq = who
                self.free -= self.grows(seq)
                seq.blocks += self.grows(seq)
            if tokens:
                ticks += tokens * rules.row + rules.pair * sum(seq.cached + i for i in range(1, tokens + 1))
                seq.cached += tokens
            else:
                ticks += rules.row + (seq.cached + 1) * rules.kv
            batch.steps.append((seq, tokens))
        assert self.free >= 0
        return ticks

    def end(self, batch: Batch, now: int, ended: Callable[[Request, int], None]) -> None:
        assert batch.steps is not None
        for seq, tokens in batch.steps:
            request = seq.request
            if tokens:
                seq.to_compute -= tokens
            else:
                seq.cached += 1
            if seq.to_compute:
                continue
            if request.output:
                request.emitted += 1
                request.first_token = now if request.first_token < 0 else request.first_token
            if request.emitted == request.output:
                batch.seqs.remove(seq)
                self.free += seq.blocks
                request.finish, request.status = now, "finished"
                ended(request, now)
        batch.steps = None


class Machine:
    def __init__(self, models: Sequence[Rules]) -> None:
        self.models = [Model(rules) for rules in models]
        self.stages = [0] * models[0].n_stages
        """Tick at which each is free."""
        self.flying: list[tuple[int, int, Model, Batch]] = []
        self.sent = self.turn = 0
        self.look: int | None = None

    def next_ns(self) -> int | None:
        times = [entry[0] for entry in self.flying[:1]] + ([] if self.look is None else [self.look])
        return min(times, default=None)

    def act(self, now: int, ended: Callable[[Request, int], None]) -> None:
        """End what ends in this instant, then send one micro-batch if the first stage is free."""
        while self.flying and self.flying[0][0] == now:
            _, _, model, batch = heappop(self.flying)
            model.end(batch, now, ended)
            model.idle.append(batch)
            self.notice(now)
        if self.look != now:
            return
        self.look = None
        n = len(self.models)
        for index in [(self.turn + i) % n for i in range(n)]:
            model = self.models[index]
            for _ in range(len(model.idle)):
                batch = model.idle.popleft()
                steps = model.plan(batch)
                if steps:
                    at = max(self.stages[0], now * TICKS)
                    ticks = model.start(batch, steps, now)
                    for stage, free in enumerate(self.stages):
                        at = max(at, free) + ticks
                        self.stages[stage] = at
                        at += model.rules.handover
                    self.sent += 1
                    heappush(self.flying, (self.stages[-1] // TICKS, self.sent, model, batch))
                    self.turn = (index + 1) % n
                    self.look = self.stages[0] // TICKS
                    return
                model.idle.append(batch)

    def notice(self, now: int) -> None:
        if self.stages[0] // TICKS <= now:
            self.look = now


def serve(
    requests: Sequence[Request], machines: Sequence[Sequence[Rules]], *,
    router: str, concurrency: int | None = None, delay_ns: int = 0, delay_ns_per_token: int = 0, horizon_ns: int | None = None,
) -> None:  # fmt: skip
    """Serve the requests, which carry their arrivals unless *concurrency* clients send them; results are written into them."""
    fleet = [Machine(rules) for rules in machines]
    coming: list[tuple[int, int, Request]] = []
    unsent = deque(requests)

    def send(ended_ns: int | None) -> None:
        if unsent:
            request = unsent.popleft()
            request.arrival = 0 if ended_ns is None else ended_ns + request.think_ns
            seen = request.arrival + delay_ns + delay_ns_per_token * request.prompt
            heappush(coming, (seen if ended_ns is None else max(seen, ended_ns + 1), request.id, request))

    def ended(_request: Request, now: int) -> None:
        if concurrency is not None:
            send(now)

    if concurrency is None:
        for request in requests:
            heappush(coming, (request.arrival + delay_ns + delay_ns_per_token * request.prompt, request.id, request))
    else:
        for _ in range(concurrency):
            send(None)
    turns: dict[int, int] = {}
    turn_of = {}
    for request in requests:
        turn_of[request.id] = turns.get(request.model, 0)
        turns[request.model] = turn_of[request.id] + 1

    while True:
        times = [at for machine in fleet if (at := machine.next_ns()) is not None] + [entry[0] for entry in coming[:1]]
        now = min(times, default=None)
        if now is None or (horizon_ns is not None and now >= horizon_ns):
            return
        while coming and coming[0][0] == now:
            _, _, request = heappop(coming)
            hosts = [
                (machine, model)
                for machine in fleet
                for model in machine.models
                if model.rules.model in (None, request.model)
            ]
            if router == "round_robin":
                machine, model = hosts[turn_of[request.id] % len(hosts)]
            else:
                machine, model = min(hosts, key=lambda host: sum(model.outstanding() for model in host[0].models))
            rules = model.rules
            most = max(request.prompt, 1) + max(request.output - 1, 0)
            too_long = rules.longest is not None and request.prompt + request.output > rules.longest
            if too_long or rules.held(most) > rules.blocks:
                request.status = "rejected"
                ended(request, now)
            else:
                model.queue.append(request)
                machine.notice(now)
        for machine in fleet:
            while machine.next_ns() == now:
                machine.act(now, ended)
