"""The turns of a machine whose scheduler drives itself (`policies.driving`): a release of an engine, in a process of its own.

The release keeps queue, KV blocks and prefix cache, and decides what each iteration runs; here its batches are priced and pass in
simulated time, requests come and emit, and what routers and records see of them is kept. Plans that are made ahead are asked for
when the release would make them: the next one as soon as an iteration starts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hwmodels.totals import Totals, pairs_within, seen
from policies.driving import Driven, Driving, DrivingError, Engine
from policies.view import ALWAYS_NS
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.machine.groups import Group
from sim.engine.machine.turns import Turns
from sim.engine.record.columns import ABORTED, FINISHED, UNFINISHED, IntArray, RoundCounts, Standing, Tally
from sim.engine.serve.engine_core import EngineCore
from sim.engine.time.clock import TICK_BITS, TICKS_PER_S
from sim.engine.time.errors import PolicyError
from sim.engine.time.events import ARRIVALS, Alarm, Clock

_DRAWN_AT_ONCE: Final = 20
_MOST_IN_VAIN: Final = 10_000
"""Preemptions without a token after which a run is said not to end."""
_NO_LIMIT: Final = 1 << 20
"""The longest context of a model that has no limit."""


class _Stay:
    """The rounds, one after the other, in which a sequence decodes."""

    __slots__ = ("cached", "last", "since", "token_ns", "tokens")

    def __init__(self, since: int, cached: int, token_ns: int) -> None:
        self.since = self.last = since
        self.cached = cached
        self.token_ns = token_ns
        self.tokens: list[int] = []
        """Tokens of each round."""


class _Step:
    """A plan of the release."""

    __slots__ = ("evicted", "found", "held", "preempted", "run", "skips_drafts")

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.run: list[list[int]] = plan["run"]
        """Request, tokens, and those of them that were drafted."""
        self.found: dict[int, int] = {id_: tokens for id_, tokens in plan["found"]}
        """Tokens whose KV was found, of each sequence that begins."""
        self.preempted: list[int] = plan["preempted"]
        self.held: int = plan["held"]
        self.evicted: int = plan["evicted"]
        self.skips_drafts: bool = plan["skips_drafts"]
        """Whether no sequence can use what would be drafted."""


class _Running:
    """The iteration in flight."""

    __slots__ = ("computed", "decoding", "done", "standing", "start", "tally", "ticks", "totals")

    def __init__(self, start: int) -> None:
        self.start = start
        self.ticks = 0
        self.totals = Totals(0)
        self.tally = Tally()
        self.standing: Standing = (0, 0, 0, 0, 0)
        self.done: list[tuple[int, int]] = []
        """Tokens that each request may emit."""
        self.computed: dict[int, int] = {}
        """Prompt tokens that each request computes."""
        self.decoding: list[int] = []


class DrivenTurns(Turns):
    """One engine core whose scheduler drives itself, with one stage."""

    def __init__(self, group: Group, clock: Clock, scheduler: Driving, seed: int, *, fast_forward: bool) -> None:
        super().__init__((group,), clock, fast_forward=fast_forward)
        (core,) = group.cores
        self._core: EngineCore = core
        self._batch: MicroBatch = core.batches[0]
        self._scheduler = scheduler
        self._seed = seed
        self._depth = 2 if scheduler.async_scheduling else 1
        self._decoding = core.spec.decoding
        self._k = 0 if self._decoding is None else self._decoding.k(1)
        self._named = core.state.contents_in is not None and core.spec.prefix_cache is not None
        try:
            self._release: Driven = scheduler.connect(_engine_of(core, self._k, caches=self._named))
        except DrivingError as error:
            raise PolicyError(str(error)) from error
        self._names: dict[tuple[int, int, int], int] = {}
        """Names of blocks by content."""
        self._drawn_rounds: dict[int, IntArray] = {}
        """Tokens of the rounds of each request that drafts."""
        self._rounds_by_k: RoundCounts = {}
        self._emitted = array("H")
        """Tokens of every round of the stays that are over, in their order."""
        self._round = 0
        self._in_vain = 0
        self._forget()
        core.driven = self

    def _forget(self) -> None:
        self._given: set[int] = set()
        """Requests that the release has and that have not ended."""
        self._compiling: dict[int, int] = {}
        """The instants at which grammars are compiled."""
        self._begun: dict[int, int] = {}
        """Tokens with KV, of every admitted request."""
        self._stays: dict[int, _Stay | None] = {}
        """The stay of every request that decodes; None before its first round."""
        self._planned: deque[_Step] = deque()
        self._running: _Running | None = None
        self._done: list[tuple[int, int]] | None = None
        self._has_requests = False
        self._idle = 0
        """Plans in sequence that scheduled nothing and preempted nobody."""

    # The loop.

    def _turn(self, now_ns: int, /) -> int:
        running = self._running
        if running is not None:
            self.events += 1
            self._running = None
            self._close(running)
        elif self._ticks < now_ns << TICK_BITS:
            self._ticks = now_ns << TICK_BITS
        ended = running
        while True:
            news = self._news(now_ns)
            if self._rests(news):
                # Until something comes, or the time for which it waits has passed.
                return min(self._compiling.values(), default=ALWAYS_NS)
            if self._plans_another(news, ended, now_ns):
                ended = None
                continue
            ended = None
            if not self._planned:
                continue
            step = self._planned.popleft()
            if step.run:
                self._ticks = self._start(step)
                return self._ticks >> TICK_BITS
            self._take_back(step)
            self._done = []

    def _rests(self, news: Mapping[str, Any]) -> bool:
        """Whether the release has nothing to do, or has planned nothing several times and hears of nothing new."""
        if news["add"] or news["ready"] or news["abort"]:
            self._idle = 0
            return False
        return self._idle > 2 * self._depth or (self._done is None and not self._given and not self._planned)

    def _plans_another(self, news: Mapping[str, Any], ended: _Running | None, now_ns: int) -> bool:
        """Take a plan; whether the release makes another one before it carries one out."""
        step = self._ask(news, ended, now_ns)
        scheduled = step is not None and bool(step.run)
        self._idle = 0 if scheduled or (step is not None and step.preempted) else self._idle + 1
        if step is None:
            return False
        self._planned.append(step)
        return len(self._planned) < self._depth and (scheduled or self._has_requests)

    def _news(self, now_ns: int) -> dict[str, Any]:
        """Events since the release was last told of any: requests that came, went, or became ready."""
        sequences, state = self._core.sequences, self._core.state
        if sequences.came_ns is not None:
            sequences.came_ns.clear()
        gone = [id_ for id_ in sequences.given_up if state.status[id_] == UNFINISHED]
        sequences.given_up.clear()
        abort = [id_ for id_ in gone if id_ in self._given]
        for id_ in gone:
            state.status[id_] = ABORTED
            self._leave(id_)
        add = [self._arrival(seq.id, now_ns) for seq in sequences.queue if seq.id not in self._given]
        ready = [id_ for id_, at_ns in self._compiling.items() if at_ns <= now_ns]
        for id_ in ready:
            del self._compiling[id_]
        return {"add": add, "abort": abort, "ready": ready}

    def _arrival(self, id_: int, now_ns: int) -> dict[str, Any]:
        """A request as the release is told of it."""
        state = self._core.state
        emitted = state.output[id_] - state.left[id_]
        asked = self._scheduler.asked(id_, self._seed)
        if asked.grammar_ns:
            self._compiling[id_] = now_ns + asked.grammar_ns
            self._wake_at(now_ns + asked.grammar_ns)
        self._given.add(id_)
        return {
            "id": id_,
            "prompt": (state.prompt[id_] or 1) + emitted,
            # A request that emits nothing ends with its prompt, and so with its first token.
            "output": max(state.left[id_], 1),
            "max_tokens": max(state.max_tokens[id_] - emitted, 1),
            "priority": 0 if state.priority is None else state.priority[id_],
            "arrival_s": state.arrival[id_] * 1e-9,
            "names": self._names_of(id_),
            "names_with_next": self._names_of(id_, 1) if self._core.spec.prefix_drops_last else [],
            "adapter": 0 if state.adapter is None else state.adapter[id_] + 1,
            "grammar": asked.grammar_ns > 0,
        }

    def _wake_at(self, at_ns: int) -> None:
        """A grammar will be compiled: an idle machine looks again."""
        Alarm(self._clock, ARRIVALS, lambda _event: self.heed(self._clock.now_ns)).set(at_ns)

    def _names_of(self, id_: int, next_tokens: int = 0) -> list[int]:
        """Numbers that name the contents of a request's blocks, *next_tokens* tokens behind them included: equal blocks have equal
        ones."""
        core, names = self._core, self._names
        if not self._named or core.state.contents_in is None:
            return []
        contents = core.state.contents_in(core.spec.block_tokens, next_tokens)
        return [
            names.setdefault((next_tokens, chain, block), len(names))
            for chain, first, end in contents.path(id_, contents.named[id_])
            for block in range(first, end)
        ]

    def _ask(self, news: Mapping[str, Any], ended: _Running | None, now_ns: int) -> _Step | None:
        """Tell the release of what has run and of *news*; its next plan, if any."""
        try:
            answer = self._release.step({"done": self._done, **news})
        except DrivingError as error:
            raise PolicyError(f"{error} (at t={now_ns / 1e9:.6f} s)") from error
        self._done = None
        self._has_requests = answer["has_requests"]
        if ended is not None:
            self._take_in(ended, answer["emitted"], answer["ended"], now_ns)
        plan = answer["plan"]
        return None if plan is None else _Step(plan)

    # An iteration.

    def _take_back(self, step: _Step) -> None:
        """Sequences that are preempted return to the head of the queue."""
        core = self._core
        state, sequences = core.state, core.sequences
        for id_ in reversed(step.preempted):
            self._in_vain += 1
            if self._in_vain > _MOST_IN_VAIN:
                raise PolicyError(
                    f"{self._release.release} has preempted {_MOST_IN_VAIN:,} times while nobody emitted a token: sequences take "
                    "memory from each other in turn and none gets on; give more KV blocks"
                )
            state.preemptions[id_] += 1
            if state.status[id_] != UNFINISHED or id_ not in self._begun:
                continue
            state.recomputed[id_] += self._begun.pop(id_)
            self._end_stay(id_)
            del self._batch.admitted[id_]
            sequences.n_admitted -= 1
            sequences.queue.appendleft(state.waiting_seq(id_, preempted=True))
        sequences.kv.free = sequences.kv.total - step.held

    def _admit(self, step: _Step, work: Tally, start_ns: int) -> None:
        """Requests that begin leave the queue."""
        core = self._core
        state, sequences = core.state, core.sequences
        begin = {id_: found for id_, found in step.found.items() if state.status[id_] == UNFINISHED}
        if not begin:
            return
        left = [seq for seq in sequences.queue if seq.id not in begin]
        sequences.queue.clear()
        sequences.queue.extend(left)
        for id_, found in begin.items():
            again = state.scheduled[id_] >= 0
            if not again:
                state.scheduled[id_] = start_ns
            if state.prefix_hits:
                (state.prefix_hits_again if again else state.prefix_hits)[id_] += found
            work.found += found
            self._begun[id_] = found
            self._batch.admitted[id_] = None
            sequences.n_admitted += 1

    def _start(self, step: _Step) -> int:
        """Price a plan and start it; the tick at which it ends."""
        core, ticks = self._core, self._ticks
        self._take_back(step)
        running = _Running(ticks)
        work = running.tally
        self._admit(step, work, ticks >> TICK_BITS)
        running.totals = self._totals(step, running)
        work.evicted = step.evicted
        if self._decoding is not None:
            n = running.totals.decode_seqs
            work.draft_steps = self._decoding.draft_steps(max(n, 1))
            if step.skips_drafts and work.draft_steps:
                work.draft_steps = 1
            work.query_tokens = (
                (running.totals.rows - running.totals.prefill_rows) // n if n else self._decoding.query_tokens(1)
            )
        sequences, kv = core.sequences, core.sequences.kv
        running.standing = (0, sequences.n_admitted, len(sequences.queue), kv.total - kv.free, self._round)
        if core.adapters is not None:
            of = core.adapters.of
            core.adapters.begin(self._batch, {of[id_] for id_, _, _ in step.run}, running.totals.rows, ticks)
            core.recorder.add_adapters(self._batch.index, ticks, core.adapters.extra_ticks, core.adapters.n_running)
        running.ticks = core.iterations.prices.iteration(running.totals, work.draft_steps)
        self._batch.view.now_ns = ticks >> TICK_BITS
        self._running = running
        return ticks + running.ticks

    def _totals(self, step: _Step, running: _Running) -> Totals:
        state, window, work = self._core.state, self._core.iterations.window, running.tally
        rows = chunks = pairs = pairs_window = prompt_kv = 0
        decodes = query = decode_kv = decode_window = 0
        for id_, tokens, drafted in step.run:
            if state.status[id_] != UNFINISHED or id_ in self._stays:
                # A decode; of a request that has ended, a wasted one.
                lives = state.status[id_] == UNFINISHED
                had = (state.prompt[id_] or 1) + state.output[id_] - state.left[id_]
                after = (self._begun[id_] if lives else had) + tokens
                decodes += 1
                query += tokens
                decode_kv += after
                decode_window += 0 if window is None else seen(after, window)
                emits = self._emits(id_, drafted) if lives else 1
                work.wasted += not lives
                work.emitted += min(emits, state.left[id_]) if lives else 0
                running.done.append((id_, emits))
                if lives:
                    running.decoding.append(id_)
                continue
            before = self._begun[id_]
            left = (state.prompt[id_] or 1) + state.output[id_] - state.left[id_] - before
            rows += tokens
            chunks += 1
            pairs += tokens * before + tokens * (tokens + 1) // 2
            pairs_window += 0 if window is None else pairs_within(before, tokens, window)
            prompt_kv += before + tokens
            completes = tokens >= left
            running.computed[id_] = min(tokens, left)
            running.done.append((id_, (self._emits(id_, drafted) if drafted else 1) if completes else 0))
            work.completions += completes
            work.emitted += completes and state.left[id_] > 0
        return Totals(
            rows + query, rows, chunks, pairs, prompt_kv, decodes, decode_kv, query + work.completions, pairs_window,
            decode_window,
        )  # fmt: skip

    def _emits(self, id_: int, drafted: int) -> int:
        """Tokens that a request's next round emits, of which *drafted* were drafted."""
        if not drafted or self._decoding is None:
            return 1
        state, at = self._core.state, self._core.state.rounds[id_]
        drawn = self._drawn_rounds.get(id_)
        if drawn is None or at >= len(drawn):
            drawn = self._drawn_rounds[id_] = self._decoding.round_tokens(
                id_, 0, state.output[id_] + (_DRAWN_AT_ONCE + at) * (self._k + 1), self._k, self._seed
            )
        tokens = min(int(drawn[min(at, len(drawn) - 1)]), drafted + 1)
        state.rounds[id_] += 1
        counts = self._rounds_by_k.setdefault((drafted, drafted), [0] * (drafted + 1))
        counts[tokens - 1] += 1
        return tokens

    def _close(self, running: _Running) -> None:
        """An iteration has ended: it is recorded, and the release is about to hear of it."""
        core = self._core
        core.recorder.add_iteration(running.start, running.ticks, running.totals, running.tally, running.standing)
        if core.adapters is not None:
            core.adapters.ran(running.start, running.start + running.ticks)
        self._done = running.done

    def _take_in(self, running: _Running, emitted: Sequence[Sequence[int]], ended: Sequence[int], now_ns: int) -> None:
        """Requests have emitted what the release has taken of an iteration, and some have ended with it."""
        core, state = self._core, self._core.state
        for id_, tokens in running.computed.items():
            if id_ in self._begun:
                self._begun[id_] += tokens
        tokens_of = {id_: n for id_, n in emitted}
        if running.decoding or running.tally.wasted:
            self._count_round(running, tokens_of, now_ns)
        for id_, n in tokens_of.items():
            if state.status[id_] != UNFINISHED:
                continue
            self._in_vain = 0
            n = min(n, state.left[id_])
            if n and state.first_token[id_] < 0:
                state.first_token[id_] = now_ns
            elif n and id_ in running.computed:
                core.recorder.resumed_gaps_ns.append(now_ns - state.token_ns[id_])
            state.left[id_] -= n
            state.token_ns[id_] = now_ns
            if id_ in self._begun and id_ not in self._stays:
                self._stays[id_] = None
        for id_ in ended:
            self._end(id_, now_ns)

    def _count_round(self, running: _Running, tokens_of: Mapping[int, int], now_ns: int) -> None:
        """The sequences that decode have had a round."""
        state = self._core.state
        if running.decoding:
            self._round += 1
        for id_ in running.decoding:
            n = tokens_of.get(id_, 0)
            if id_ not in self._begun or id_ not in self._stays:
                continue
            stay = self._stays[id_]
            if stay is None or stay.last != self._round - 1:
                if stay is not None:
                    self._end_stay(id_)
                stay = self._stays[id_] = _Stay(self._round - 1, self._begun[id_], state.token_ns[id_])
            stay.last = self._round
            stay.tokens.append(min(n, state.left[id_]))
            self._begun[id_] += n

    def _end_stay(self, id_: int) -> None:
        stay = self._stays.pop(id_, None)
        if stay is not None:
            self._core.recorder.joins.add(0, stay.since, stay.last, stay.cached, stay.token_ns, id_)
            self._emitted.extend(stay.tokens)

    def _leave(self, id_: int) -> None:
        """A request is the release's no more."""
        sequences = self._core.sequences
        self._end_stay(id_)
        self._given.discard(id_)
        self._compiling.pop(id_, None)
        self._drawn_rounds.pop(id_, None)
        if self._begun.pop(id_, None) is not None:
            del self._batch.admitted[id_]
            sequences.n_admitted -= 1
        elif any(seq.id == id_ for seq in sequences.queue):
            left = [seq for seq in sequences.queue if seq.id != id_]
            sequences.queue.clear()
            sequences.queue.extend(left)

    def _end(self, id_: int, now_ns: int) -> None:
        state = self._core.state
        if state.status[id_] != UNFINISHED:
            return
        if state.left[id_]:
            raise PolicyError(
                f"{self._release.release} ended request {id_} at t={self._ticks / TICKS_PER_S:.6f} s with {state.left[id_]} tokens "
                "to emit"
            )
        self._leave(id_)
        state.finish[id_] = now_ns
        state.status[id_] = FINISHED
        self._core.sequences.finished(id_, now_ns)

    # Called by the machine.

    def arrive(self, core: EngineCore, now_ns: int, /) -> None:
        self.heed(now_ns)

    def heed(self, now_ns: int, /) -> None:
        if self._running is None:
            self._alarm.set(now_ns)

    def stop(self, now_ns: int, /) -> None:
        self._alarm.cancel()
        for id_ in list(self._stays):
            self._end_stay(id_)
        self._core.state.given_back |= self._begun
        if self._given:
            self._release.anew()
        self._forget()
        self._ticks = now_ns << TICK_BITS

    # Results.

    @property
    def release(self) -> str:
        """The name and number of the release that has decided."""
        return self._release.release

    def emitted(self) -> dict[int, IntArray] | None:
        """Tokens of every round, as `ReplicaColumns` has them; None where each is one."""
        return None if self._decoding is None else {0: np.frombuffer(bytes(self._emitted), "<u2")}

    def speculation(self) -> RoundCounts | None:
        return None if self._decoding is None else self._rounds_by_k


def _engine_of(core: EngineCore, k: int, *, caches: bool) -> Engine:
    """Facts about the engine that the release is started with."""
    spec = core.spec
    return Engine(
        kv_blocks=spec.kv_blocks,
        block_tokens=spec.block_tokens,
        max_model_len=_NO_LIMIT if spec.max_model_len is None else spec.max_model_len,
        prefix_cache=caches,
        k=k,
        lookahead_tokens=spec.lookahead_tokens,
        draft_slots=spec.draft_slots,
        reads_target=spec.prefix_drops_last,
    )
