"""Prefill and decode apart a second time, from docs/pools.md and with nothing of `sim.engine`: machines as in
`tests.engine.independent`, news between them in a heap, and a link as a list of instants at which its places are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from tests.engine.independent import TICKS, Model, Request, Rules, Seq

ARRIVED, GONE, ROOM, PREFILLED = 0, 1, 2, 3
"""News of one instant is heard in this order, and by the number of the request."""


@dataclass(frozen=True)
class Between:
    """How KV goes from one pool to the other."""

    first_token: str
    room_first: bool
    shared: str
    places: int
    ns_per_token: int
    latency_ns: int
    ns_per_sequence: int = 0
    repack_ns_per_ns: int = 0
    """Laying KV out takes so many times as long as sending it."""
    layers: int = 1
    local: int = 0
    """Prompts of no more tokens stay."""
    headroom: int = 0
    fewest: bool = False
    """Requests go, on either side, to the machine with the fewest, the first of these; else in turn."""


@dataclass
class Trip:
    """When things happened to a request."""

    prefilled: int = -1
    room: int = -1
    sent: int = -1
    landed: int = -1
    joined: int = -1


class Machine:
    """One batch at a time; *lends*: it hands prompts over when they are done."""

    def __init__(self, rules: Rules, between: Between, *, lends: bool) -> None:
        self.model = Model(rules)
        self.batch = self.model.all[0]
        self.between, self.lends = between, lends
        self.ticks = 0
        self.flying = False
        self.inbox: list[tuple[str, Request]] = []
        self.asked: deque[Request] = deque()
        self.held: dict[int, int] = {}
        """Blocks of those on their way: out of here, or in."""
        self.landed: list[Seq] = []
        """Ahead of all others."""
        self.elsewhere: set[int] = set()
        """Requests that were sent here and wait elsewhere, for room or for their prompt."""

    def requests(self) -> int:
        """Requests that are here or were sent here, but for those whose prompt has been computed here for another."""
        here = len(self.batch.seqs) + len(self.model.queue) + len(self.landed) + len(self.asked) + len(self.elsewhere)
        return here + sum(what == "ask" for what, _ in self.inbox) + (0 if self.lends else len(self.held))

    def growth(self) -> int:
        return sum(self.model.grows(seq) for seq in self.batch.seqs)

    def read(self) -> list[Request]:
        """Take in the news; who gets room."""
        model, rules = self.model, self.model.rules
        for what, request in self.inbox:
            if what == "ask":
                self.asked.append(request)
            elif what == "collect":
                model.free += self.held.pop(request.id)
            else:
                again = self.between.first_token == "decode"
                self.landed.append(Seq(request, self.held.pop(request.id), max(request.prompt, 1) - again, int(again)))
        self.inbox.clear()
        given = []
        while self.asked:
            others = len(self.batch.seqs) + len(self.held) + len(self.landed)
            needed = rules.held(max(self.asked[0].prompt, 1))
            if needed + self.growth() + rules.held(self.between.headroom * others) > model.free:
                break
            given.append(self.asked.popleft())
            model.free -= needed
            self.held[given[-1].id] = needed
        return given

    def plan(self) -> tuple[list[Request], list[tuple[Seq | Request, int]]]:
        """The requests that get room, and those that take part: those with their KV first, then as on a machine that does both."""
        model, given = self.model, self.read()
        evicts = self.growth() > model.free
        while self.growth() > model.free:
            self.goes_back(self.batch.seqs.pop())
        steps = self.of_budget([] if evicts else [*self.landed, *model.queue])
        # Nobody is left after the eviction, or nothing runs and all memory is that of who waits with KV: it looks anew.
        if not steps and not evicts and not self.batch.seqs and self.landed and not self.held:
            self.goes_back(self.landed.pop())
            evicts = True
        if evicts and not steps:
            more, steps = self.plan()
            given += more
        return given, steps

    def goes_back(self, seq: Seq) -> None:
        """It gives its blocks up and is computed again from the beginning."""
        self.model.free += seq.blocks
        seq.request.preemptions += 1
        seq.request.recomputed += seq.cached
        self.model.queue.appendleft(seq.request)

    def of_budget(self, waiting: Sequence[Seq | Request]) -> list[tuple[Seq | Request, int]]:
        model, rules, seqs = self.model, self.model.rules, self.batch.seqs
        steps: list[tuple[Seq | Request, int]] = [(seq, 0) for seq in seqs if not seq.to_compute]
        budget = 1 << 60 if rules.budget is None else rules.budget - len(steps)
        for seq in seqs:
            if seq.to_compute and budget > 0:
                steps.append((seq, min(seq.to_compute, budget)))
                budget -= steps[-1][1]
        free = model.free - self.growth() - (int(rules.watermark * rules.blocks) if seqs else 0)
        seats = rules.seats - len(seqs)
        for who in waiting:
            if isinstance(who, Seq):
                free -= rules.held(who.cached + 1) - who.blocks
                tokens = who.to_compute
            else:
                free -= rules.held(who.context)
                tokens = who.context
            if budget <= 0 or seats <= 0 or free < 0:
                break
            steps.append((who, min(tokens, budget)))
            budget -= min(tokens, budget) or 1
            seats -= 1
        return steps

    def turn(self, now: int, trips: Sequence[Trip]) -> tuple[list[Request], list[Request]]:
        """End what ends in this instant and start what comes next; whose prompts are done, and who has got room."""
        model, seqs = self.model, self.batch.seqs
        done: list[Request] = []
        if self.flying and self.ticks // TICKS == now:
            self.flying = False
            leaving = [
                seq for seq, tokens in self.batch.steps or () if 0 < tokens == seq.to_compute and self.leaves(seq)
            ]
            for seq in leaving:
                seqs.remove(seq)
                self.held[seq.request.id] = seq.blocks
                if self.between.first_token != "decode":
                    seq.request.emitted += 1
                if self.between.first_token == "prefill":
                    seq.request.first_token = now
            done = [seq.request for seq in leaving]
            self.batch.steps = [step for step in self.batch.steps or () if step[0] not in leaving]
            model.end(self.batch, now, lambda _request, _now: None)
        if self.flying:
            return done, []
        given, steps = self.plan()
        if steps:
            self.ticks = max(self.ticks, now * TICKS)
            for who, _ in steps:
                if any(who is each for each in self.landed):
                    assert isinstance(who, Seq)
                    self.landed = [each for each in self.landed if each is not who]
                    trips[who.request.id].joined = now
                    seqs.append(who)
            self.ticks += model.start(self.batch, steps, now)
            self.flying = True
        return done, given

    def leaves(self, seq: Seq) -> bool:
        return self.lends and seq.request.output > (0 if self.between.first_token == "decode" else 1)


def never(rules: Rules, prompt: int, output: int) -> bool:
    too_long = rules.longest is not None and prompt + output > rules.longest
    return too_long or rules.held(max(prompt, 1) + max(output - 1, 0)) > rules.blocks


def serve_apart(
    requests: Sequence[Request], senders: Sequence[Rules], receivers: Sequence[Rules], between: Between
) -> list[Trip]:
    """Serve the requests; results are written into them."""
    first = [Machine(rules, between, lends=True) for rules in senders]
    second = [Machine(rules, between, lends=False) for rules in receivers]
    trips = [Trip() for _ in requests]
    links: dict[tuple[int, ...], list[int]] = {}
    coming = deque(requests)
    news: list[tuple[int, int, int]] = []

    senders_of, receivers_of = dict[int, int](), dict[int, int]()
    # Else when the prompt has been computed.
    at_arrival = between.room_first or between.local > 0

    def choose(id_: int, machines: list[Machine], chosen: dict[int, int]) -> Machine:
        turn = id_ % len(machines)
        chosen[id_] = min(range(len(machines)), key=lambda i: machines[i].requests()) if between.fewest else turn
        return machines[chosen[id_]]

    def send(id_: int, now: int) -> None:
        i, j = senders_of[id_], receivers_of[id_]
        key = {"sender": (i,), "receiver": (-1, j), "pair": (i, j), "pools": ()}[between.shared]
        places = links.setdefault(key, [0] * between.places)
        place = places.index(min(places))
        takes = max(requests[id_].prompt, 1) * between.ns_per_token + between.ns_per_sequence
        if not takes:
            trips[id_].sent = now
            heappush(news, (now, ARRIVED, id_))
            return
        since, last = now, 0
        if between.layers > 1:
            # The first layer is there when its share of the prompt's time has passed, the last when the prompt is done.
            begun = requests[id_].scheduled
            since, last = begun + (trips[id_].prefilled - begun) // between.layers, -(-takes // between.layers)
        begin = max(since, places[place])
        places[place] = max(begin + takes, now + last)
        trips[id_].sent = max(begin, now)
        heappush(news, (places[place] + between.latency_ns + takes * between.repack_ns_per_ns, ARRIVED, id_))

    while True:
        times = [machine.ticks // TICKS for machine in (*first, *second) if machine.flying]
        times += [request.arrival for request in list(coming)[:1]] + [entry[0] for entry in news[:1]]
        if not times:
            return trips
        now = min(times)
        while coming and coming[0].arrival == now:
            request = coming.popleft()
            goes = request.output > (0 if between.first_token == "decode" else 1)
            able = not goes or not never(receivers[0], request.prompt, request.output)
            receiver = None
            if goes and able and at_arrival:
                receiver = choose(request.id, second, receivers_of)
                if between.local and max(request.prompt, 1) <= between.local:
                    receiver.model.queue.append(request)
                    continue
            sender = choose(request.id, first, senders_of)
            refused = never(senders[0], request.prompt, min(request.output, 1))
            if receiver is not None and not (refused and between.room_first):
                if between.room_first:
                    receiver.inbox.append(("ask", request))
                    sender.elsewhere.add(request.id)
                    continue
                receiver.elsewhere.add(request.id)
            if not able or refused:
                request.status = "rejected"
                heappush(news, (now + 1, GONE, request.id))
            else:
                sender.model.queue.append(request)
        while news and news[0][0] == now:
            _, what, id_ = heappop(news)
            request, sender = requests[id_], first[senders_of[id_]]
            if what == PREFILLED and not at_arrival:
                choose(id_, second, receivers_of)
            elif what == GONE and id_ not in receivers_of:
                continue
            receiver = second[receivers_of[id_]]
            receiver.elsewhere.discard(id_)
            if what == ARRIVED:
                trips[id_].landed = now
                sender.inbox.append(("collect", request))
                receiver.inbox.append(("land", request))
                if between.first_token == "arrival":
                    request.first_token = now
                elif between.first_token == "decode":
                    request.recomputed += 1
            elif what == ROOM and trips[id_].prefilled < 0:
                sender.elsewhere.remove(id_)
                sender.model.queue.append(request)
            elif what == ROOM or (what == PREFILLED and between.room_first):
                send(id_, now)
            elif what == PREFILLED:
                receiver.inbox.append(("ask", request))
        for machine in (*first, *second):
            done, given = machine.turn(now, trips)
            for request in done:
                trips[request.id].prefilled = now
                heappush(news, (now + 1, PREFILLED, request.id))
            for request in given:
                trips[request.id].room = now
                heappush(news, (now + 1, ROOM, request.id))
