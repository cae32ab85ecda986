"""The order of a step: prompts first, decodes where none joins, retraction where decodes cannot grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.adapters import admissible
from policies.sglang.delayer import DELAY_MS, PrefillDelayer
from policies.sglang.joining import GO_ON, NO_MEMORY, OUT_OF_ROOM, SPENT, Adder, Room
from policies.sglang.past import Past, Running
from policies.sglang.settings import PROMPT_STEP, Settings
from policies.view import (
    ALWAYS_NS,
    UNTIL_CHANGE,
    Encodes,
    Largest,
    Looks,
    Plan,
    PrefixCache,
    ReplicaView,
    RunningSeq,
    WaitingSeq,
)

RETRACT_DECODE_STEPS = 20
"""Decode steps that a retraction leaves room for in the share: environ.py."""
IN_BATCH_PREFIX_CACHING_THRESHOLD = 32
"""A request with no longer hit waits for another that begins with as many equal tokens: schedule_policy.py, two names for it."""
WAITING_QUEUE_PREFIX_MATCH_MAX = 128
"""A longer queue is not sorted by what its requests find; this and the next: schedule_policy.py."""
WAITING_PREFIX_REFRESH_INTERVAL = 32
"""Looks over an unsorted queue of which one counts as use of the hits of up to 128 requests at its head."""
_new = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor."""


@dataclass(frozen=True)
class Sglang(Settings):
    """Prompts first, whole or in chunks, while the decodes wait; with *enable_mixed_chunk* the decodes share the iteration.

    A request joins if the KV pool has room for its tokens, for all that it may still emit, for a page, and for a share of what
    each running one may still emit. That share, the new-token ratio, starts at 0.7 times *schedule_conservativeness*, falls to a
    seventh over 600 decode steps, starts anew after a pause, and is worked out from the batch after a retraction. Where decodes
    cannot grow, those that have emitted least, of equals those with the longest prompt, give their KV back and wait at the
    queue's end. What clients allow at most (`ReplicaView.max_tokens`) is cut to what the pool could hold. A page is a block.
    """

    by_chunk: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    reserves: ClassVar[bool] = True
    preempted_last: ClassVar[bool] = True
    looks_itself: ClassVar[bool] = True
    orders_queue: ClassVar[bool] = True
    encodes: ClassVar[Encodes] = "as needed"

    def never_planned(self, largest: Largest) -> str | None:
        if not 0 < self.chunked_prefill_size < largest.block_tokens:
            return None
        return (
            f"chunked_prefill_size ({self.chunked_prefill_size}) holds no whole page of {largest.block_tokens} tokens, and a "
            "prompt that is cut is cut to whole pages; give more, or less as memory.block_tokens"
        )

    def prompt_balance(self, pool_tokens: int, context_tokens: int) -> PrefillDelayer | None:
        """The rule for prompts of ranks with a KV pool of so many tokens each."""
        if not self.enable_prefill_delayer:
            return None
        return PrefillDelayer(
            seats=self.seats(pool_tokens, context_tokens),
            interval=self.prefill_decode_interval,
            max_delay_passes=self.prefill_delayer_max_delay_passes,
            low_watermark=self.prefill_delayer_token_usage_low_watermark,
            queue_min_ratio=self.prefill_delayer_queue_min_ratio,
            max_delay_ms=DELAY_MS if self.prefill_delayer_max_delay_ms is None else self.prefill_delayer_max_delay_ms,
            prefill_max_requests=self.prefill_max_requests,
        )

    def plan(self, view: ReplicaView, /) -> Plan:
        past = self._recalled(view)
        queue, known = self._queue(view, past)
        if known is not None or self.by_prefix:
            past = past._replace(known=known, queue=tuple(seq.id for seq in queue) if self.by_prefix else None)
        if self.prefill_decode_interval:
            left, past = self._rounds_left(view, past)
            if left > 0:
                plan = self._decode(view, past, bool(queue))
                # The batch may become smaller with any step.
                hold = 1 if self.prefill_decode_interval_min_bs else min(plan.hold, left)
                return plan._replace(hold=hold, through_arrivals=False)
        if not (view.prefilling or (queue and not past.full)):
            return self._decode(view, past, bool(queue))
        seats = self.seats(view.total_blocks * view.block_tokens, view.max_model_len)
        if not view.prefilling and view.n_decoding + view.n_leaving >= seats:
            return self._decode(view, past._replace(full=True), True)
        return self._prefill(view, past, queue, seats)

    def _rounds_left(self, view: ReplicaView, past: Past) -> tuple[int, Past]:
        """`_should_defer_prefill`: rounds for which prompts wait yet, this one among them."""
        n_batch = view.n_decoding + view.n_leaving
        if view.step < 0:
            # Where nothing runs, rounds take no time.
            if not n_batch or n_batch < self.prefill_decode_interval_min_bs:
                past = past._replace(since_prompts=ALWAYS_NS)
            return self.prefill_decode_interval - past.since_prompts, past
        left = self.prefill_decode_interval - view.since_prompts
        if left <= 0 or past.let_in >= view.step - view.since_prompts:
            return 0, past
        if n_batch < self.prefill_decode_interval_min_bs:
            return 0, past._replace(let_in=view.step)
        return left, past

    def _is_ahead(self, view: ReplicaView) -> bool:
        """Whether the plan is made ahead: not in a pipeline, where prompts take all their blocks at once."""
        return self.async_scheduling and view.by_chunk

    def _cache(self, view: ReplicaView) -> PrefixCache | None:
        return None if self.disable_radix_cache else view.cache

    def _recalled(self, view: ReplicaView) -> Past:
        """The state at this look: after a pause it starts anew."""
        past = view.memo
        n_batch = view.n_decoding + view.n_leaving
        if not isinstance(past, Past):
            return Past(self.first_ratio, view.rounds)
        idle = not (n_batch or view.prefilling or (self._is_ahead(view) and past.weight))
        steps = view.rounds - past.rounds
        polled = past.polled + past.weight * (steps if past.decays else 1)
        # A poll that is due anyway precedes the scheduler's finding that it has nothing to do.
        idle = idle and polled < self.scheduler_recv_interval
        if past.known is not None and idle and not self._heard(view, past.known):
            return Past(self.first_ratio, view.rounds)
        ratio = self.ratio_after(past.ratio, steps) if past.decays else past.ratio
        # A sequence that leaves the decode batch reopens it, and an empty one is open.
        full = past.full and 0 < n_batch >= past.n_running
        since = past.since_prompts + (steps if past.decays else 0)
        order, late, known = past.order, past.late, past.known
        return _new(
            Past,
            (
                *(ratio, view.rounds, False, full, past.n_running, order, late, polled, 0, known, past.queue, since),
                past.let_in,
            ),
        )

    def _heard(self, view: ReplicaView, known: tuple[int, ...]) -> list[int]:
        waiting = {seq.id for seq in view.waiting}
        return [id_ for id_ in known if id_ in waiting]

    def _queue(self, view: ReplicaView, past: Past) -> tuple[Sequence[WaitingSeq], tuple[int, ...] | None]:
        """Waiting requests that the scheduler knows, first to be served first; and in order of arrival, if that is to be kept."""
        queue: Sequence[WaitingSeq] = view.waiting
        known = None
        if self.scheduler_recv_interval > 1:
            known = tuple(self._heard(view, past.known or ()))
            waiting = {seq.id: seq for seq in queue}
            if past.known is None or past.polled >= self.scheduler_recv_interval:
                heard = set(known)
                known += tuple(id_ for id_ in waiting if id_ not in heard)
            queue = [waiting[id_] for id_ in known]
        if self.by_prefix:
            # The last sorted order, with later arrivals behind and those that have just been preempted at the end.
            waiting = {seq.id: seq for seq in queue}
            queue = [waiting.pop(id_) for id_ in past.queue or () if id_ in waiting]
            queue += sorted(waiting.values(), key=lambda seq: seq.preempted)
        if self.schedule_policy == "lof" and len(queue) > 1:
            room = Room(view)
            queue = sorted(queue, key=lambda seq: -room.max_new(seq.id))
        return queue, known

    def _looked_over(
        self, view: ReplicaView, queue: Sequence[WaitingSeq], used: list[tuple[int, int]]
    ) -> tuple[Sequence[WaitingSeq], bool]:
        """The queue as `calc_priority` leaves it, and `Looks.of_queue`. With `lpm` the longest hits are first, and requests whose
        beginning another waiting one is to compute are last. Lookups for that are added to *used*."""
        cache = self._cache(view)
        if cache is None or not queue:
            return queue, False
        if not self.by_prefix or len(queue) > WAITING_QUEUE_PREFIX_MATCH_MAX:
            if cache.queue_looks % WAITING_PREFIX_REFRESH_INTERVAL == 0:
                first = queue[:WAITING_QUEUE_PREFIX_MATCH_MAX]
                used += ((seq.id, seq.tokens + seq.cached_tokens + 1) for seq in reversed(first))
            return queue, True
        found: dict[int, float] = {}
        begun: set[object] = set()
        for seq in queue:
            tokens = seq.tokens + seq.cached_tokens
            matched = cache.found_blocks(seq.id, tokens + 1) * view.block_tokens
            used.append((seq.id, tokens + 1))
            found[seq.id] = -min(matched, tokens - 1)
            if matched <= IN_BATCH_PREFIX_CACHING_THRESHOLD <= tokens:
                beginning = cache.beginning(seq.id, IN_BATCH_PREFIX_CACHING_THRESHOLD)
                if beginning in begun:
                    found[seq.id] = inf
                begun.add(beginning)
        return sorted(queue, key=lambda seq: found[seq.id]), False

    def _running(self, view: ReplicaView, past: Past) -> list[Running]:
        """The decode batch as SGLang lists it, with leaving sequences."""
        if not view.n_decoding + view.n_leaving:
            return []
        listed: Sequence[RunningSeq] = view.running[:]
        if view.prefilling:
            partial = {seq.id for seq in view.prefilling}
            listed = [seq for seq in listed if seq.id not in partial]
        if past.order is not None:
            by_id = {seq.id: seq for seq in listed}
            listed = [by_id.pop(id_) for id_ in past.order if id_ in by_id]
            listed += by_id.values()
        late = past.late
        of_all = late is True
        some = () if late is True or not late else late
        page, prompts, limits = view.block_tokens, view.prompt_tokens, view.max_tokens
        context = view.max_model_len - 2
        pool = view.total_blocks * page - page - 1
        running: list[Running] = []
        # As Room.max_new, which takes too long for each of a batch.
        for seq in listed:
            id_, cached, *_ = seq
            prompt = prompts[id_] or 1
            most = limits[id_]
            if most > context - prompt:
                most = context - prompt
            room = pool + -prompt // page * page
            if most > room:
                most = room
            # The latest token has no KV yet.
            emitted = cached + 1 - prompt - (of_all or id_ in some)
            running.append(_new(Running, (seq, prompt, emitted, most if most > 0 else 0)))
        return running

    def _polled(self, past: Past) -> int:
        return 0 if past.polled >= self.scheduler_recv_interval else past.polled

    def _prefill(self, view: ReplicaView, past: Past, queue: Sequence[WaitingSeq], seats: int) -> Plan:
        """`_get_new_batch_prefill_raw`: continue the cut prompt, then add others from the head of the queue."""
        n_batch = view.n_decoding + view.n_leaving
        running = self._running(view, past)
        used: list[tuple[int, int]] = []
        queue, of_queue = self._looked_over(view, queue, used)
        if self.by_prefix:
            past = past._replace(queue=tuple(seq.id for seq in queue))
        adder = Adder(self, view, past, running)
        goes_on = False
        for partial in view.prefilling:
            goes_on = adder.go_on(partial)
        reject: list[tuple[int, str]] = []
        may_join = self._with_slots(view, queue)
        full = self._admit(view, adder, may_join, past.full, seats - n_batch, used, reject)
        looks = _new(Looks, (tuple(used), of_queue)) if used or of_queue else None
        chunks = tuple(adder.chunks)
        if not chunks:
            # With `by_prefix` the whole queue is sorted in every step, requests without a slot for their adapter included.
            waits = bool(queue if self.by_prefix else may_join)
            return self._decode(view, past._replace(full=full), waits, tuple(reject), looks)
        mixed = (
            self.enable_mixed_chunk and view.n_decoding > 0 and adder.blocks + view.growth_blocks <= view.free_blocks
        )
        memo = self._after_prompts(view, past, adder, running, full, goes_on, mixed)
        listed = (*(id_ for id_, _ in chunks), *(each.seq.id for each in running)) if mixed else None
        return Plan(decode=mixed, run=chunks, reject=tuple(reject), memo=memo, order=listed, looks=looks)

    def _with_slots(self, view: ReplicaView, queue: Sequence[WaitingSeq]) -> Sequence[WaitingSeq]:
        """`can_schedule_lora_req`: *queue* without the requests for whose adapter there is no slot. The base model takes a slot as
        an adapter does, and a sequence that has emitted its last token keeps the slot until it has left the batch."""
        most = self.max_loras_per_batch
        return queue if most is None else admissible(queue, view.adapters, most, leaving=True, counts_base=True)

    def _admit(
        self,
        view: ReplicaView,
        adder: Adder,
        queue: Sequence[WaitingSeq],
        full: bool,
        seats: int,
        used: list[tuple[int, int]],
        reject: list[tuple[int, str]],
    ) -> bool:
        """Add prompts from the head of *queue* while the adder takes them; whether the batch is full then.

        What is looked up is added to *used*, sequences that never fit to *reject*.
        """
        cache, held = self._cache(view), dict[object, int]()
        for seq in queue:
            if adder.verdict() == SPENT:
                break
            full = full or len(adder.chunks) >= seats
            if full:
                break
            if adder.never_fits(seq):
                reject.append((seq.id, OUT_OF_ROOM))
                continue
            found = unheld = 0
            if cache is not None and not seq.cached_tokens:
                found = cache.found_blocks(seq.id, seq.tokens)
                used.append((seq.id, seq.tokens))
                unheld = cache.unheld_blocks(seq.id, found, held)
            n_before = len(adder.chunks)
            verdict = adder.add(seq, found, unheld)
            if cache is not None and len(adder.chunks) > n_before:
                cache.hold(seq.id, found, held)
            if verdict == NO_MEMORY:
                full = bool(adder.chunks) or view.n_decoding + view.n_leaving > 0
            if verdict != GO_ON:
                break
        return full

    def _after_prompts(
        self,
        view: ReplicaView,
        past: Past,
        adder: Adder,
        running: list[Running],
        full: bool,
        goes_on: bool,
        mixed: bool,
    ) -> Past:
        """The scheduler's state after an iteration of prompts, *mixed* with the decode batch or alone."""
        n_leaving = view.n_leaving
        n_batch = view.n_decoding + n_leaving
        cut = adder.cut or goes_on
        done = tuple(id_ for id_, _ in adder.chunks)
        if cut:
            done = done[1:] if goes_on else done[:-1]
        order = past.order if n_batch else None
        if mixed:
            # The whole iteration becomes the decode batch, prompts first: mix_with_running.
            order = (*done, *(each.seq.id for each in running if not each.seq.leaving))
        if self.enable_mixed_chunk:
            n_batch -= n_leaving
        # The batch of an iteration is not full; it stands in for an empty one, and loses the prompt that is cut.
        stays_full = full and n_batch > 0 and not (cut or mixed or (self.enable_mixed_chunk and n_leaving))
        late: bool | tuple[int, ...] = ()
        if self._is_ahead(view):
            late = mixed or done
        return Past(
            past.ratio,
            view.rounds,
            full=stays_full,
            n_running=n_batch + len(done),
            order=order,
            late=late,
            polled=self._polled(past),
            weight=PROMPT_STEP,
            known=past.known,
            queue=past.queue,
            since_prompts=0,
            let_in=past.let_in,
        )

    def _decode(
        self,
        view: ReplicaView,
        past: Past,
        waits: bool,
        reject: tuple[tuple[int, str], ...] = (),
        looks: Looks | None = None,
    ) -> Plan:
        """`update_running_batch`: a decode step of all, or of the sequences left after a retraction."""
        n, ahead = view.n_decoding, self._is_ahead(view)
        polled = self._polled(past)
        full = past.full and not view.n_leaving
        if view.growth_blocks > view.free_blocks and not view.n_leaving:
            return self._retract(view, past._replace(polled=polled))._replace(reject=reject, looks=looks)
        if not n or view.growth_blocks > view.free_blocks:
            # Sequences that end in the iteration in flight will have freed memory.
            memo = past._replace(
                full=full, n_running=n, polled=polled + 1, late=(), since_prompts=past.since_prompts + 1
            )
            return Plan(reject=reject, memo=memo, looks=looks)
        memo = _new(
            Past,
            (
                *(past.ratio, past.rounds, True, full, n, past.order, ahead, polled, 1, past.known, past.queue),
                *(past.since_prompts, past.let_in),
            ),
        )
        hold = UNTIL_CHANGE if full or not waits else 1
        # With `by_prefix` each arrival has to be put behind the queue that the memo keeps.
        through_arrivals = full and not self.by_prefix
        if self.scheduler_recv_interval > 1:
            hold = min(hold, max(self.scheduler_recv_interval - polled, 1))
            through_arrivals = True
        return Plan(True, (), (), hold, through_arrivals, reject, memo=memo, order=memo.order, looks=looks)

    def _retract(self, view: ReplicaView, past: Past) -> Plan:
        """`retract_decode`: fewest tokens emitted first, of equals the longest prompt, of those again the last of the batch."""
        free, growth, cache = view.free_blocks, view.growth_blocks, view.cache
        freed: dict[object, int] = {}
        kept = self._running(view, past)
        kept.sort(key=lambda each: (each.emitted, -each.prompt), reverse=True)
        gone: list[int] = []
        while kept and growth > free:
            seq = kept.pop().seq
            gone.append(seq.id)
            if cache is None:
                free += seq.blocks
            else:
                free += seq.blocks - cache.full_blocks(seq.id) + cache.freed_by(seq.id, freed)
            growth -= seq.growth_blocks
        emitted = sum(each.emitted for each in kept)
        ratio = (emitted + RETRACT_DECODE_STEPS * len(kept)) / (sum(each.max_new for each in kept) + 1)
        memo = past._replace(
            ratio=min(1.0, ratio),
            full=False,
            n_running=len(kept),
            order=tuple(each.seq.id for each in kept),
            late=self._is_ahead(view),
            polled=past.polled + 1,
            known=None if past.known is None else (*past.known, *gone),
        )
        return Plan(decode=bool(kept), preempt=tuple(gone), memo=memo, order=memo.order)
