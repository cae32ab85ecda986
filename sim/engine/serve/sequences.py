"""The state of each request of an engine core, and every move between: queued, admitted, joined, paused, preempted, ended.

Moves keep the books: KV blocks, emitted tokens, admitted sequences. The plan decides which sequences move, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Sized
from typing import Final, Literal

from policies.view import (
    ALWAYS_NS,
    RunningSeq,
    WaitingSeq,
    plans_ahead,
    preempted_last,
    reserves,
    takes_by_chunk,
)
from sim.engine.batch.async_scheduling import AsyncScheduling
from sim.engine.batch.decoding import Departure
from sim.engine.batch.micro_batch import Ended, MicroBatch, Paused
from sim.engine.batch.version import Version
from sim.engine.cache.block_cache import pool_of
from sim.engine.cache.prefix_lookup import PrefixLookup
from sim.engine.kv.pool import KvPool, OutOfBlocks
from sim.engine.record.columns import ABORTED, FINISHED, UNFINISHED, Recorder
from sim.engine.requests.reservations import Reservations
from sim.engine.requests.state import RequestState
from sim.engine.serve.adapter_queue import AdapterQueue
from sim.engine.serve.grammars import Grammars
from sim.engine.serve.kv_connector import KvConnector, Outside
from sim.engine.spec.experiment import ReplicaSpec
from sim.engine.spec.roles import Part
from sim.engine.time.clock import TICK_BITS, TICKS_PER_S
from sim.engine.time.errors import PolicyError

_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor."""

_MOST_IN_VAIN = 10_000
"""Preemptions without a token after which a run is said not to end. vLLM 0.32.0 has no such bound."""


class Sequences:
    """The requests of one model on a machine."""

    def __init__(
        self, spec: ReplicaSpec, state: RequestState, outside: Outside, recorder: Recorder, *, alone: bool,
        part: Part | None = None,
    ) -> None:  # fmt: skip
        """*part*: what the machine has to do with handing over; None: nothing."""
        self.waiting_by_adapter = AdapterQueue(state.adapter) if spec.adapters and state.adapter is not None else None
        """The queue, where requests may ask for adapters."""
        self.queue: deque[WaitingSeq] = deque() if self.waiting_by_adapter is None else self.waiting_by_adapter
        self.behind: Sized = ()
        """Requests that wait for a seat of any rank, where this is the first of the ranks."""
        # Not by chunk where several micro-batches share a pool: each may hold part of a prompt that can only continue if another is
        # preempted, and a scheduler sees its own alone.
        self._kv_comes = part is not None or bool(spec.tiers)
        """KV may come from elsewhere."""
        by_chunk = alone and takes_by_chunk(spec.scheduler)
        self.kv = pool_of(spec, state, by_chunk=by_chunk, connected=self._kv_comes)
        self.state = state
        self.n_admitted = 0
        self.version = Version()
        """Counts what may change a plan, in whichever micro-batch."""
        self.n_computed = 0
        """Waiting sequences with nothing to compute before they decode."""
        self.given_up: dict[int, int] = {}
        """Requests whose clients have gone, and when; they are aborted when the plan knows it."""
        self.in_vain = 0
        """Preemptions since a token was emitted."""
        self._outside = outside
        self._recorder = recorder
        self._alone = alone
        self.scheduler = spec.scheduler
        self._preempted_last = preempted_last(spec.scheduler)
        self.max_model_len = spec.max_model_len
        # KV slots beyond a request's tokens: for drafted ones, twice where a round is planned before the last is known.
        drafted = 0 if spec.decoding is None else spec.decoding.max_query_tokens - 1
        self.came_ns: deque[int] | None = deque() if alone and plans_ahead(spec.scheduler) else None
        """Arrivals in the queue that the latest plan may not know of (ns); None where they are not needed."""
        self.ahead = None if self.came_ns is None else AsyncScheduling(self.came_ns)
        self.most_beyond = drafted * (1 if self.ahead is None else 2) + self.kv.lookahead_tokens
        self.grammars = None if spec.grammars is None else Grammars(spec.grammars, state.grammar_wait_ns)
        self.reservations = Reservations(reserves(spec.scheduler), self.kv, state, spec.max_model_len, self.most_beyond)
        self.prefix_lookup = PrefixLookup(self.kv, state, self.ahead, spec)
        self.connector = KvConnector(self, part, outside, recorder)
        self.hands_over = self.reservations.one_token = self.connector.hands_over
        slots = self.kv.total * self.kv.block_tokens - self.most_beyond - 1
        self._fit_always = -1 if self.hands_over else min(slots, spec.max_model_len or slots)
        """Requests with so many tokens of prompt and output fit in any case (`never_fits`)."""

    def come(self, id_: int, kv_tokens: int, now_ns: int) -> bool:
        """Queue a request at *now_ns*, or have it wait until its grammar is compiled; whether it is in the queue."""
        if self.grammars is not None and self.grammars.holds(id_, kv_tokens, now_ns):
            return False
        self.enqueue(id_, kv_tokens, now_ns)
        return True

    def take_compiled(self, known_ns: int) -> None:
        """Queue the requests whose grammars were done by *known_ns*, ahead of those that wait for nothing else, oldest first."""
        grammars, queue = self.grammars, self.queue
        assert grammars is not None
        while grammars.compiled and grammars.compiled[0][0] <= known_ns:
            _, id_, kv_tokens = grammars.compiled.popleft()
            seq = self.state.waiting_seq(id_, cached_tokens=kv_tokens)
            place = self.connector.n_with_blocks()
            while place < len(queue) and queue[place].id in grammars.first and queue[place].id < id_:
                place += 1
            queue.insert(place, seq)
            grammars.first.add(id_)
            self.n_computed += not seq.tokens
            self.version.changes += 1

    def enqueue(self, id_: int, kv_tokens: int, now_ns: int) -> None:
        """Queue a request at *now_ns*; KV of its first *kv_tokens* tokens is at hand."""
        if self.came_ns is not None:
            self.came_ns.append(now_ns)
        seq = self.state.waiting_seq(id_, cached_tokens=kv_tokens)
        self.queue.append(seq)
        self.n_computed += not seq.tokens
        self.version.arrive(now_ns)

    def note_arrivals(self) -> None:
        """Keep arrival times for `sim.engine.machine.loads.left_waiting`."""
        if self.came_ns is None:
            self.came_ns = deque()

    def give_up(self, id_: int, now_ns: int) -> None:
        """The client of a request has gone; the request leaves when it is known to the scheduler."""
        self.given_up[id_] = now_ns
        self.version.hear(now_ns)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue, and on their way to it from another machine, whether their messages have been read or not."""
        compiling = 0 if self.grammars is None else len(self.grammars)
        return len(self.queue) + self.connector.coming + self.connector.n_unread + compiling

    def take_out(self, batch: MicroBatch, id_: int) -> tuple[int, int, int]:
        """A sequence that is not in flight leaves its micro-batch: its tokens cached, the KV blocks to give back, and when it
        emitted its latest token (-1: none since it was admitted)."""
        if id_ in batch.decoding:
            departure = self.leave(batch, id_)
            found = departure.cached_tokens, departure.blocks, _last_token_ns(batch, departure)
        elif id_ in batch.paused:
            found = batch.paused.pop(id_)
        elif id_ in batch.partial:
            partial = batch.partial.pop(id_)
            cached = partial.cached_tokens
            found = cached, self.kv.held(cached, partial.remaining_tokens), -1
        else:
            raise PolicyError(f"{self.scheduler!r} preempted request {id_}, which is not running here")
        del batch.admitted[id_]
        self.n_admitted -= 1
        self.reservations.end(id_)
        return found

    @property
    def busy(self) -> bool:
        """Whether any request waits, is admitted or asks for blocks, or there are messages to read. One whose grammar is being
        compiled gives nothing to do."""
        connector = self.connector
        if self.n_admitted > 0 or self.queue or connector.mail or connector.machines.wanted:
            return True
        return self.grammars is not None and len(self.grammars.compiled) > 0

    def running_seq(self, batch: MicroBatch, id_: int) -> RunningSeq:
        """An admitted sequence as policies see it."""
        leaving = False
        if id_ in batch.leaving:
            cached, blocks, growth, steps_on, _, _ = batch.leaving[id_]
            leaving = not steps_on
        elif id_ in batch.decoding:
            cached, blocks = batch.decoding.state_of(id_)
            growth = batch.decoding.growth_of(id_)
        elif id_ in batch.partial:
            partial = batch.partial[id_]
            cached, growth = partial.cached_tokens, 0
            blocks = self.kv.held(cached, partial.remaining_tokens)
        else:
            paused = batch.paused[id_]
            cached, blocks, growth = paused.cached, paused.blocks, self.paused_growth(batch, paused)
        state = self.state
        return _new(
            RunningSeq,
            (
                id_, cached, blocks, growth, state.arrival[id_], 0 if state.model is None else state.model[id_],
                -1 if state.deadline is None else state.deadline[id_],
                0 if state.priority is None else state.priority[id_], leaving,
                self.kv.shared_blocks(id_) if self.kv.caches else 0,
            ),
        )  # fmt: skip

    def paused_growth(self, batch: MicroBatch, paused: Paused) -> int:
        return max(0, self.kv.held(paused.cached + batch.decoding.query_tokens) - paused.blocks)

    def refusal(self, id_: int) -> str | None:
        """The reason a request can never be served here; None if it can."""
        state = self.state
        if state.prompt[id_] + state.output[id_] <= self._fit_always:
            return None
        carried = 0 if state.carried is None else state.carried[id_]
        return self.never_fits(state.prompt[id_], state.output[id_], carried)

    def never_fits(self, prompt: int, output: int, carried: int = 0) -> str | None:
        """The reason a request of so many tokens, *carried* of which were emitted elsewhere, can never be served here, if any."""
        limit = self.max_model_len
        handed = 0
        if self.hands_over:
            # One token is asked of it, whatever the client requested.
            output = min(output, 1)
            handed = carried
        if limit is not None and prompt + handed + output > limit:
            return f"prompt and output exceed the model's context of {limit} tokens"
        # The last token is never cached: nothing comes after it.
        kv = self.kv
        slots = (prompt or 1) + handed + (output - 1 + self.most_beyond if output else kv.lookahead_tokens)
        needed = kv.blocks(slots if limit is None else min(slots, limit))
        if needed <= kv.total:
            return None
        what = "prompt and output"
        if self.hands_over:
            what = "its prompt and what it has emitted" if carried else "its prompt"
        return f"needs {needed} KV blocks for {what} but the replica has {kv.total}"

    def growth_of(self, batch: MicroBatch) -> int:
        """KV blocks that a decode step of all would take that a micro-batch has."""
        growth = batch.decoding.growth_blocks if batch.decoding.n else 0
        return growth + sum(self.paused_growth(batch, paused) for paused in batch.paused.values())

    def finished(self, id_: int, now_ns: int) -> None:
        """Tell the run that a request has ended."""
        self._outside.finished(id_, now_ns)

    def reject(self, refused: Sequence[tuple[int, str]]) -> None:
        for id_, reason in refused:
            seq = next((seq for seq in self.queue if seq.id == id_), None)
            if seq is None:
                raise PolicyError(f"{self.scheduler!r} rejected request {id_}, which does not wait here")
            self.queue.remove(seq)
            self.n_computed -= not seq.tokens
            self.connector.gone(id_)
            self.version.changes += 1
            self._outside.rejected(id_, reason)

    def choose_decodes(self, batch: MicroBatch, decode: Literal[True] | tuple[int, ...]) -> None:
        """Bring the decoding set in line with the plan: pause sequences that it leaves out, resume those it names again."""
        decoding, paused = batch.decoding, batch.paused
        wanted = set(paused) | set(decoding) if decode is True else set(decode)
        unknown = [id_ for id_ in wanted if id_ not in decoding and id_ not in paused]
        if unknown:
            raise PolicyError(
                f"{self.scheduler!r} planned a decode step for request {unknown[0]}, which is not decoding here"
            )
        if decode is not True:
            for id_ in [id_ for id_ in decoding if id_ not in wanted]:
                departure = self.leave(batch, id_)
                paused[id_] = Paused(departure.cached_tokens, departure.blocks, _last_token_ns(batch, departure))
        for id_ in [id_ for id_ in paused if id_ in wanted]:
            seq = paused.pop(id_)
            self._join(batch, id_, seq.cached, seq.token_ns, seq.blocks)

    def start_anew(self, batch: MicroBatch) -> None:
        """The next round is planned when all is known of the last one: it takes no slots for tokens that may have been accepted."""
        for id_ in list(batch.decoding):
            departure = self.leave(batch, id_)
            self._join(batch, id_, departure.cached_tokens, _last_token_ns(batch, departure), departure.blocks)

    def leave(self, batch: MicroBatch, id_: int) -> Departure:
        """Take a sequence out of the decodes of its micro-batch."""
        departure = batch.decoding.leave(id_)
        self._log_departure(batch, departure)
        self.state.left[id_] -= departure.emitted
        if self.kv.by_chunk:
            return departure
        # Slots held for drafted tokens beyond what is cached go back.
        kept = self.kv.held(departure.cached_tokens)
        self.kv.give(departure.blocks - kept)
        return departure._replace(blocks=kept)

    def _join(self, batch: MicroBatch, id_: int, cached: int, token_ns: int, blocks: int | None = None) -> None:
        self.version.changes += 1
        held = self.kv.held(cached) if blocks is None else blocks
        batch.decoding.join(id_, cached, self.state.left[id_], token_ns, held)
        if not self._alone:
            batch.bubbles_at_join[id_] = batch.bubbles.copy()

    def _log_departure(self, batch: MicroBatch, departure: Departure) -> None:
        if not self._alone:
            before = batch.bubbles_at_join.pop(departure.id)
            for kind, column in enumerate(self.state.bubbles):
                column[departure.id] += batch.bubbles[kind] - before[kind]
        _, _, _, _, since, cached_before, token_ns, _ = departure
        self._recorder.joins.add(batch.index, since, batch.decoding.round, cached_before, token_ns, departure.id)

    def preempt(self, batch: MicroBatch, id_: int, *, scheduled: bool = False, beside: int = 0) -> None:
        """Give back a sequence's blocks; it returns to the queue, to its head unless asked otherwise, to be computed again.

        *scheduled*: its next step had been planned, and *beside* blocks been taken for it.
        """
        state = self.state
        if id_ in batch.leaving:
            state.preemptions[id_] += 1
            self.prefix_lookup.free_one(id_, beside, batch.leaving[id_].emitted_last, scheduled=scheduled)
            return
        known = self.prefix_lookup.kept(batch, id_, self.ahead is not None and self.ahead.made, scheduled=scheduled)
        cached, blocks, token_ns = self.take_out(batch, id_)
        if token_ns >= 0:
            state.token_ns[id_] = token_ns
        self.kv.release(id_, blocks + beside, known)
        self.version.changes += 1
        self.in_vain += 1
        if self.in_vain > _MOST_IN_VAIN:
            raise PolicyError(
                f"{self.scheduler!r} has preempted {_MOST_IN_VAIN:,} times while nobody emitted a token: sequences take memory "
                "from each other in turn and none gets on; give more KV blocks, or admit a sequence only when all of it fits"
            )
        state.preemptions[id_] += 1
        if self.connector.moves_out is None or not self.connector.moves_out(id_, cached):
            state.recomputed[id_] += cached
        seq = state.waiting_seq(id_, preempted=True)
        # At the end, ahead of requests that arrived after the plan was made.
        unknown = 0 if self.ahead is None else self.ahead.n_unknown
        # Behind requests whose blocks are here already, which would have to wait for it otherwise.
        first = self.connector.n_with_blocks() if self.connector.takes_part else 0
        self.queue.insert(max(len(self.queue) - unknown, 0) if self._preempted_last else first, seq)

    def admit(self, batch: MicroBatch, id_: int, now_ns: int, tokens: int) -> WaitingSeq:
        """Take a request from the queue into the micro-batch, to compute *tokens* tokens; blocks that it lacks are its caller's."""
        queue = self.queue
        if queue and queue[0].id == id_:
            seq = queue.popleft()
        elif self.waiting_by_adapter is not None:
            seq = self.waiting_by_adapter.take(id_)
        else:
            found = next((each for each in queue if each.id == id_), None)
            if found is None:
                raise PolicyError(
                    f"{self.scheduler!r} planned prompt tokens for request {id_}, which neither waits nor prefills here"
                )
            seq = found
            queue.remove(seq)
        batch.admitted[id_] = None
        self.n_admitted += 1
        self.version.changes += 1
        if self.state.scheduled[id_] < 0:
            self.state.scheduled[id_] = now_ns
        if not self._kv_comes:
            self.reservations.make(id_)
        elif self.connector.admitted(seq, now_ns):
            return seq
        return self.prefix_lookup.find(seq, tokens) if self.kv.caches else seq

    def join_the_decodes(
        self, batch: MicroBatch, run: tuple[tuple[int, int], ...], ticks: int
    ) -> tuple[tuple[int, int], ...]:
        """Admit the sequences of *run* that have nothing to compute; return the rest."""
        for id_, tokens in run:
            if tokens:
                continue
            seq = self.admit(batch, id_, ticks >> TICK_BITS, 0)
            if seq.tokens:
                raise PolicyError(
                    f"{self.scheduler!r} planned 0 prompt tokens for request {id_}, of which {seq.tokens} are left to compute"
                )
            self.n_computed -= 1
            _take_what_lacks(self, seq, ticks)
            if self.kv.caches:
                self.kv.cached(id_, seq.cached_tokens)
            self._join(batch, id_, seq.cached_tokens, self.state.token_ns[id_])
        return tuple(entry for entry in run if entry[1])

    def take(self, blocks: int, ticks: int) -> None:
        """Take KV blocks that a plan counts on; PolicyError where they are not free."""
        try:
            self.kv.take(blocks)
        except OutOfBlocks:
            raise self.short_of(blocks, ticks) from None

    def short_of(self, blocks: int, ticks: int) -> PolicyError:
        """The error of a plan that takes more blocks than are free."""
        return PolicyError(
            f"{self.scheduler!r} planned {blocks} new KV blocks at t={ticks / TICKS_PER_S:.6f} s but only "
            f"{self.kv.free} are free; wrap it in EvictNewest or admit less",
            short_of_memory=True,
        )

    def end_all(self, batch: MicroBatch, departures: Sequence[Departure], end_ns: int) -> None:
        """Sequences have emitted their last tokens in the rounds of their micro-batch that ended at *end_ns*."""
        decoding = batch.decoding
        state = self.state
        for departure in departures:
            self._log_departure(batch, departure)
            id_, cached, blocks, emitted, _, _, _, emitted_last = departure
            state.left[id_] -= emitted
            slots_before = cached - emitted_last + decoding.query_tokens
            self._end(batch, id_, blocks, end_ns, cached, emitted_last, slots_before)

    def complete_prompts(self, batch: MicroBatch, end_ns: int) -> None:
        """The prompts that the iteration completed emit a token, and decode from there or have ended."""
        state = self.state
        for id_ in batch.completing:
            cached = batch.partial.pop(id_).cached_tokens
            if self.hands_over and self.connector.leaves(id_):
                self.in_vain = 0
                self.connector.depart(batch, id_, cached, end_ns)
                continue
            left = state.left[id_]
            if left:
                self.in_vain = 0
                if state.first_token[id_] < 0:
                    state.first_token[id_] = end_ns
                else:
                    self._recorder.resumed_gaps_ns.append(end_ns - state.token_ns[id_])
                state.left[id_] = left = left - 1
            if left:
                self._join(batch, id_, cached, end_ns)
                if self.kv.caches_late:
                    self.prefix_lookup.complete(id_, cached)
            else:
                self._end(batch, id_, self.kv.held(cached), end_ns, cached, 1, slots_before=cached)

    def _end(
        self, batch: MicroBatch, id_: int, blocks: int, end_ns: int, cached: int, emitted_last: int, slots_before: int
    ) -> None:
        """*slots_before*: KV slots that it would have used if all that its last iteration submitted had been accepted."""
        if self.kv.caches:
            self.prefix_lookup.end(id_, blocks, cached, emitted_last)
        else:
            self.kv.give(blocks)
        given_up_ns = self.given_up.pop(id_, None)
        if given_up_ns is not None and self.ahead is not None and given_up_ns <= self.ahead.seen_ns:
            # Its last iteration had been planned before its client went.
            self.prefix_lookup.free_one(id_, 0, emitted_last)
            del batch.admitted[id_]
            self.n_admitted -= 1
            self.reservations.end(id_)
            self.version.changes += 1
            self.state.status[id_] = ABORTED
            return
        promised = self.reservations.end(id_)
        if self.ahead is not None:
            # Each iteration emits one token at least: a sequence that has so few to go is known to end.
            sure = self.state.max_tokens[id_] - self.state.output[id_] + emitted_last <= 1
            growth = max(self.kv.held(slots_before + batch.decoding.query_tokens) - blocks, 0)
            batch.leaving[id_] = _new(Ended, (cached, blocks, growth, not sure, promised, emitted_last))
        else:
            del batch.admitted[id_]
        self.n_admitted -= 1
        self.version.changes += 1
        state = self.state
        state.finish[id_] = end_ns
        state.status[id_] = FINISHED
        self._outside.finished(id_, end_ns)


def hand_back(sequences: Sequences, batches: Sequence[MicroBatch]) -> list[int]:
    """Free all blocks and return the requests, micro-batch by micro-batch, running ones before waiting ones."""
    ids: list[int] = []
    given_back: dict[int, int] = {}
    for batch in batches:
        for id_ in list(batch.decoding):
            departure = sequences.leave(batch, id_)
            sequences.state.token_ns[id_] = _last_token_ns(batch, departure)
            given_back[id_] = departure.cached_tokens
        for id_, paused in batch.paused.items():
            sequences.state.token_ns[id_] = paused.token_ns
            given_back[id_] = paused.cached
        given_back |= {id_: partial.cached_tokens for id_, partial in batch.partial.items()}
        batch.forget_the_leaving()
        ids += batch.admitted
        batch.admitted.clear()
        batch.partial.clear()
        batch.paused.clear()
    given_back |= {seq.id: seq.cached_tokens for seq in sequences.queue if seq.kept_blocks}
    given_back |= sequences.connector.landing()
    sequences.state.given_back |= given_back
    ids += [seq.id for seq in sequences.queue]
    sequences.queue.clear()
    if sequences.grammars is not None:
        ids += sequences.grammars.ids()
        sequences.grammars.reset()
    ids += sequences.connector.hand_back()
    if sequences.came_ns is not None:
        sequences.came_ns.clear()
    if sequences.ahead is not None:
        sequences.ahead.reset()
    sequences.given_up.clear()
    sequences.n_admitted = sequences.n_computed = 0
    sequences.reservations.reset()
    sequences.prefix_lookup.ended.clear()
    sequences.kv.reset()
    return ids


def _take_what_lacks(sequences: Sequences, seq: WaitingSeq, ticks: int) -> None:
    """Take the blocks that a sequence lacks to decode from where it is."""
    kv = sequences.kv
    lacks = kv.held(seq.cached_tokens) - (seq.kept_blocks or kv.found(seq.id))
    # A block may be held for a token more than has arrived, which its first step computes.
    kv.give(max(-lacks, 0))
    sequences.take(max(lacks, 0), ticks)


def refuse(sequences: Sequences, reject: Sequence[tuple[int, str]], shorten: Sequence[tuple[int, int]]) -> None:
    """Reject some waiting requests, and limit others to so many output tokens from now on."""
    if reject:
        sequences.reject(reject)
    for id_, tokens in shorten:
        what = f"{sequences.scheduler!r} shortens the answer of request {id_}"
        if not any(seq.id == id_ for seq in sequences.queue):
            raise PolicyError(f"{what}, which does not wait here")
        if tokens < 1:
            raise PolicyError(f"{what} to {tokens} tokens; the least is 1")
        sequences.version.changes += sequences.state.shorten(id_, tokens)


def take_for_rounds(kv: KvPool, batch: MicroBatch, rounds: int) -> None:
    """Take the blocks of the first *rounds* decode steps in flight, as far as they have not been taken."""
    if rounds <= batch.rounds_taken:
        return
    decoding, taken = batch.decoding, batch.blocks_taken
    batch.rounds_taken = rounds
    if kv.caches_late:
        # The eviction of the last depends on what there was before it.
        before = decoding.blocks_for(rounds - 1)
        kv.take(before - taken)
        kv.before_decodes(decoding.n)
        taken = before
    kv.take(decoding.blocks_for(rounds) - taken)


def _last_token_ns(batch: MicroBatch, departure: Departure) -> int:
    return batch.last_round_ns if departure.emitted else departure.token_ns


def let_go(sequences: Sequences, batch: MicroBatch) -> None:
    """Abort the requests in the queue or in *batch* whose clients are known to have gone."""
    state = sequences.state
    known_ns = ALWAYS_NS if sequences.ahead is None else sequences.ahead.seen_ns
    for id_ in [id_ for id_, at_ns in sequences.given_up.items() if at_ns <= known_ns]:
        waiting = next((seq for seq in sequences.queue if seq.id == id_), None)
        if state.status[id_] == UNFINISHED and waiting is None and id_ not in batch.admitted:
            # In flight in another micro-batch.
            continue
        del sequences.given_up[id_]
        if state.status[id_] != UNFINISHED:
            continue
        state.status[id_] = ABORTED
        sequences.version.changes += 1
        if waiting is not None:
            sequences.queue.remove(waiting)
            sequences.n_computed -= not waiting.tokens
            sequences.connector.gone(id_)
            continue
        ahead = sequences.ahead
        known = sequences.prefix_lookup.known(batch, id_, ahead is not None and ahead.seen_ns != ALWAYS_NS)
        sequences.kv.release(id_, sequences.take_out(batch, id_)[1], known)
