"""SGLang's scheduler, step for step: prompts first, against an estimate of future memory, and retraction where it was too low.

Rules are those of release 0.5.23, named by the file under `sglang/srt/` where they are applied:

* the order of a step: `managers/scheduler.py` (`get_next_batch_to_run`, `_get_new_batch_prefill_raw`, `update_running_batch`);
* who joins: `managers/schedule_policy.py` (`PrefillAdder`), over the budget of `mem_cache/prefill_budget.py`;
* who is retracted: `managers/schedule_batch.py` (`retract_decode`, `check_decode_mem`);
* the new-token ratio: `managers/scheduler_components/new_token_ratio_tracker.py`, its constants in `environ.py`;
* polling: `managers/scheduler_components/recv_skipper.py`.

`tests/oracle/test_sglang.py` lays the release's own scheduler beside this one.

Left out: orders of the queue that need a prefix cache, `random` and `routing-key` (refused); priorities and preemption by them,
LoRA, beams, grammars, data-parallel attention and its prefill delayer, hybrid and windowed pools, disaggregation, dynamic chunks
of pipelines, `prefill_decode_interval`, `min_free_slots_delay`. A request that is retracted while its latest token is in flight
keeps that token, which SGLang drops and makes again; a poll may be a step off. Speculating sequences hold the slots that the
engine gives them. Each micro-batch of a pipeline remembers for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, NamedTuple

from policies.schedulers import at_least
from policies.view import UNTIL_CHANGE, PartialSeq, Plan, ReplicaView, RunningSeq, WaitingSeq

INIT_NEW_TOKEN_RATIO = 0.7
"""Share of what a request may still emit that is kept for it at first; this and the next four: environ.py."""
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
"""The share falls to this part of the first one ..."""
NEW_TOKEN_RATIO_DECAY_STEPS = 600
"""... in this many decode steps."""
RETRACT_DECODE_STEPS = 20
"""Decode steps that a retraction leaves room for in the share."""
CLIP_MAX_NEW_TOKENS = 4096
"""No request is expected to emit more than this."""
IGNORE_EOS_RESERVE_TOKENS = 1
"""For each sequence, where all emit as much as they may: schedule_policy.py."""
PROMPT_STEP = 1000
"""What a step with prompt tokens counts towards `scheduler_recv_interval`; one of decodes counts 1: environ.py."""
INPUT_MARGIN = 6
"""Tokens that a prompt leaves of the pool at least: tp_worker.py (max_req_input_len), utils.py (validate_input_length)."""

NEEDS_A_CACHE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
OUT_OF_ROOM = "prompt leaves no room in the KV pool for an answer"


_new = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor."""


class Past(NamedTuple):
    """What the scheduler remembers from step to step: handed over as `Plan.memo`, and found again in `ReplicaView.memo`."""

    ratio: float
    """The new-token ratio, noted ..."""
    rounds: int = 0
    """... at this count of decode steps ..."""
    decays: bool = False
    """... and whether it falls with each step since."""
    full: bool = False
    """`batch_is_full`: nobody is let in until somebody leaves."""
    n_running: int = 0
    """Sequences in the decode batch unless somebody has ended since."""
    order: tuple[int, ...] | None = None
    """The decode batch as SGLang lists it, where that is not the order of admission; others follow, in that order."""
    late: bool | tuple[int, ...] = ()
    """Whose latest token the scheduler has not seen yet, where it plans ahead; True: that of all."""
    polled: int = 0
    """What the steps up to the latest one count since requests were last received ..."""
    weight: int = 0
    """... and what each one since does."""
    known: tuple[int, ...] | None = None
    """The queue as far as it was received, where that is not before every step."""


class _Running(NamedTuple):
    """A sequence of the decode batch, by what the scheduler knows of it."""

    seq: RunningSeq
    prompt: int
    emitted: int
    max_new: int
    """Tokens that it may emit in all."""


@dataclass(frozen=True)
class Sglang:
    """Prompts first, whole or in chunks, while the decodes wait; with *enable_mixed_chunk* the decodes share the iteration.

    A request joins if the KV pool has room for its tokens, for all that it may still emit, for a page, and for a share of what
    each running one may still emit. That share, the new-token ratio, starts at 0.7 times *schedule_conservativeness*, falls to a
    seventh over 600 decode steps, starts anew after a pause, and is worked out from the batch after a retraction. Where decodes
    cannot grow, those that have emitted least, of equals those with the longest prompt, give their KV back and wait at the
    queue's end. What clients allow at most (`ReplicaView.max_tokens`) is cut to what the pool could hold. A page is a block.
    """

    chunked_prefill_size: int = 8192
    """Prompt tokens of an iteration at most, one prompt being cut at a time; -1: none is. Scenarios take that of their device."""
    max_prefill_tokens: int = 16384
    """No further prompt joins an iteration that has as many tokens."""
    prefill_max_requests: int | None = None
    """Prompts of an iteration at most."""
    max_running_requests: int | None = None
    """None: 2,048, or up to 4,096 where the pool holds more than four times the model's context (kv_cache_configurator.py)."""
    schedule_policy: str = "fcfs"
    """fcfs, or lof: those that may emit most first."""
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    scheduler_recv_interval: int = 1
    """Decode steps between two looks at who has come; a step with prompt tokens is always followed by one."""
    disable_overlap_schedule: bool = False
    """False: each iteration is planned while the one before it runs; see `policies.view.plans_ahead`."""
    ignore_eos: bool = False
    """Every request emits all that it may, and its client has said so, as benchmarks do: all of it is kept for it."""
    disable_radix_cache: bool = False
    """True: with *ignore_eos* a request joins as soon as the pool lasts at each of the ends to come. There is no prefix cache here
    either way."""

    by_chunk: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    reserves: ClassVar[bool] = True
    preempted_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.chunked_prefill_size != -1:
            at_least("chunked_prefill_size", self.chunked_prefill_size, 1)
        at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        at_least("scheduler_recv_interval", self.scheduler_recv_interval, 1)
        for name in ("prefill_max_requests", "max_running_requests"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.scheduler_recv_interval > PROMPT_STEP:
            raise ValueError(f"scheduler_recv_interval is at most {PROMPT_STEP}; got {self.scheduler_recv_interval}")
        if self.schedule_policy in NEEDS_A_CACHE:
            raise ValueError(
                f"schedule_policy {self.schedule_policy} orders requests by what a prefix cache holds, and there is none here; "
                "SGLang takes fcfs in its place where its cache is disabled"
            )
        if self.schedule_policy not in ("fcfs", "lof"):
            raise ValueError(f"schedule_policy is fcfs or lof; got {self.schedule_policy!r}")
        if not (isfinite(self.schedule_conservativeness) and self.schedule_conservativeness >= 0):
            raise ValueError(
                f"schedule_conservativeness is a number of at least 0; got {self.schedule_conservativeness!r}"
            )
        if self.enable_mixed_chunk and self.chunked_prefill_size <= (self.max_running_requests or 4096):
            raise ValueError(
                f"enable_mixed_chunk leaves no prompt tokens in a chunk of {self.chunked_prefill_size} beside "
                f"{self.max_running_requests or 'up to 4096'} decodes; give max_running_requests below chunked_prefill_size"
            )

    @property
    def async_scheduling(self) -> bool:
        return not self.disable_overlap_schedule

    @property
    def to_its_end(self) -> bool:
        """Whether requests join by `add_one_req_ignore_eos`."""
        return self.ignore_eos and self.disable_radix_cache

    @property
    def first_ratio(self) -> float:
        return min(INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0)

    @property
    def last_ratio(self) -> float:
        return min(self.first_ratio * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)

    def ratio_after(self, ratio: float, steps: int) -> float:
        """The new-token ratio *steps* decode steps after it was *ratio*; taken off step by step, for floats to round as there."""
        least = self.last_ratio
        decay = (self.first_ratio - least) / NEW_TOKEN_RATIO_DECAY_STEPS
        for _ in range(steps):
            before, ratio = ratio, max(ratio - decay, least)
            if ratio == before:
                break
        return ratio

    def seats(self, pool_tokens: int, context_tokens: int) -> int:
        """Requests that run at once over a KV pool of so many tokens: `resolve_max_num_reqs`."""
        seats = self.max_running_requests
        if seats is None:
            seats = max(min(int(pool_tokens / context_tokens * 512), 4096), 2048)
        return max(min(seats, pool_tokens // 2), 1)

    def plan(self, view: ReplicaView, /) -> Plan:
        past = self._recalled(view)
        queue, known = self._queue(view, past)
        past = past._replace(known=known)
        if not (view.prefilling or (queue and not past.full)):
            return self._decode(view, past, bool(queue))
        seats = self.seats(view.total_blocks * view.block_tokens, view.max_model_len)
        if not view.prefilling and view.n_decoding + view.n_leaving >= seats:
            return self._decode(view, past._replace(full=True), True)
        return self._prefill(view, past, queue, seats)

    def _is_ahead(self, view: ReplicaView) -> bool:
        """Whether the plan is made ahead: not in a pipeline, where prompts take all their blocks at once."""
        return self.async_scheduling and view.by_chunk

    def _recalled(self, view: ReplicaView) -> Past:
        """What holds at this look: after a pause nothing does."""
        past = view.memo
        n_batch = view.n_decoding + view.n_leaving
        if not isinstance(past, Past):
            return Past(self.first_ratio, view.rounds)
        idle = not (n_batch or view.prefilling or (self._is_ahead(view) and past.weight))
        steps = view.rounds - past.rounds
        polled = past.polled + past.weight * (steps if past.decays else 1)
        # A poll that is due anyway comes before the scheduler finds that it has nothing to do.
        idle = idle and polled < self.scheduler_recv_interval
        if past.known is not None and idle and not self._heard(view, past.known):
            return Past(self.first_ratio, view.rounds)
        return past._replace(
            ratio=self.ratio_after(past.ratio, steps) if past.decays else past.ratio,
            rounds=view.rounds,
            decays=False,
            # Whoever leaves the decode batch reopens it, and an empty one is open.
            full=past.full and 0 < n_batch >= past.n_running,
            polled=polled,
            weight=0,
        )

    def _heard(self, view: ReplicaView, known: tuple[int, ...]) -> list[int]:
        waiting = {seq.id for seq in view.waiting}
        return [id_ for id_ in known if id_ in waiting]

    def _queue(self, view: ReplicaView, past: Past) -> tuple[Sequence[WaitingSeq], tuple[int, ...] | None]:
        """Who waits as far as the scheduler knows, first to be served first; and in order of arrival, if that is to be kept."""
        queue: Sequence[WaitingSeq] = view.waiting
        known = None
        if self.scheduler_recv_interval > 1:
            known = tuple(self._heard(view, past.known or ()))
            waiting = {seq.id: seq for seq in queue}
            if past.known is None or past.polled >= self.scheduler_recv_interval:
                heard = set(known)
                known += tuple(id_ for id_ in waiting if id_ not in heard)
            queue = [waiting[id_] for id_ in known]
        if self.schedule_policy == "lof" and len(queue) > 1:
            room = _Room(view)
            queue = sorted(queue, key=lambda seq: -room.max_new(seq.id))
        return queue, known

    def _running(self, view: ReplicaView, past: Past) -> list[_Running]:
        """The decode batch as SGLang lists it, with those that are leaving."""
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
        running: list[_Running] = []
        # As _Room.max_new, which takes too long for each of a batch.
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
            running.append(_new(_Running, (seq, prompt, emitted, most if most > 0 else 0)))
        return running

    def _polled(self, past: Past) -> int:
        return 0 if past.polled >= self.scheduler_recv_interval else past.polled

    def _prefill(self, view: ReplicaView, past: Past, queue: Sequence[WaitingSeq], seats: int) -> Plan:
        """`_get_new_batch_prefill_raw`: the prompt that is cut goes on, then others from the head of the queue."""
        n_leaving = view.n_leaving
        n_batch = view.n_decoding + n_leaving
        running = self._running(view, past)
        adder = _Adder(self, view, past, running)
        goes_on = False
        for partial in view.prefilling:
            goes_on = adder.go_on(partial)
        full = past.full
        reject: list[tuple[int, str]] = []
        for seq in queue:
            if adder.verdict() == SPENT:
                break
            full = full or len(adder.chunks) >= seats - n_batch
            if full:
                break
            if adder.never_fits(seq):
                reject.append((seq.id, OUT_OF_ROOM))
                continue
            verdict = adder.add(seq)
            if verdict != GO_ON:
                if verdict == NO_MEMORY:
                    full = bool(adder.chunks) or n_batch > 0
                break
        chunks = tuple(adder.chunks)
        if not chunks:
            return self._decode(view, past._replace(full=full), bool(queue), tuple(reject))
        mixed = (
            self.enable_mixed_chunk and view.n_decoding > 0 and adder.blocks + view.growth_blocks <= view.free_blocks
        )
        cut = adder.cut or goes_on
        done = tuple(id_ for id_, _ in chunks)
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
        memo = Past(
            past.ratio,
            view.rounds,
            full=stays_full,
            n_running=n_batch + len(done),
            order=order,
            late=late,
            polled=self._polled(past),
            weight=PROMPT_STEP,
            known=past.known,
        )
        return Plan(decode=mixed, run=chunks, reject=tuple(reject), memo=memo)

    def _decode(self, view: ReplicaView, past: Past, waits: bool, reject: tuple[tuple[int, str], ...] = ()) -> Plan:
        """`update_running_batch`: a decode step of all, or of those who are left after a retraction."""
        n, ahead = view.n_decoding, self._is_ahead(view)
        polled = self._polled(past)
        full = past.full and not view.n_leaving
        memo = past._replace(full=full, n_running=n, polled=polled)
        if view.growth_blocks > view.free_blocks and not view.n_leaving:
            return self._retract(view, memo)._replace(reject=reject)
        if not n or view.growth_blocks > view.free_blocks:
            # Who ends in the iteration in flight will have given memory back.
            return Plan(reject=reject, memo=memo._replace(late=(), polled=polled + 1))
        memo = memo._replace(decays=True, late=ahead, weight=1)
        hold = UNTIL_CHANGE if full or not waits else 1
        through_arrivals = full
        if self.scheduler_recv_interval > 1:
            hold = min(hold, max(self.scheduler_recv_interval - polled, 1))
            through_arrivals = True
        return Plan(True, (), (), hold, through_arrivals, reject, memo=memo)

    def _retract(self, view: ReplicaView, past: Past) -> Plan:
        """`retract_decode`: fewest tokens emitted first, of equals the longest prompt, of those again the last of the batch."""
        free, growth = view.free_blocks, view.growth_blocks
        kept = self._running(view, past)
        kept.sort(key=lambda each: (each.emitted, -each.prompt), reverse=True)
        gone: list[int] = []
        while kept and growth > free:
            seq = kept.pop().seq
            gone.append(seq.id)
            free += seq.blocks - seq.shared_blocks
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
        return Plan(decode=bool(kept), preempt=tuple(gone), memo=memo)


GO_ON, NO_MEMORY, SPENT = "go on", "no memory", "spent"
"""What `PrefillAdder` says of the next request: CONTINUE, NO_TOKEN, OTHER."""


class _Room:
    """The pool, and what a request may emit by its client and by the pool."""

    def __init__(self, view: ReplicaView) -> None:
        self.page = view.block_tokens
        self.pool = view.total_blocks * view.block_tokens
        self._context = view.max_model_len
        self._limits = view.max_tokens
        self._prompts = view.prompt_tokens

    def paged(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def prompt(self, id_: int) -> int:
        return self._prompts[id_] or 1

    def max_new(self, id_: int) -> int:
        """`init_req_max_new_tokens`: what a request may emit fits the context, and the pool if it were alone there."""
        prompt = self.prompt(id_)
        room = min(self._context - 2 - prompt, self.pool - self.paged(prompt) - self.page - 1)
        return max(0, min(self._limits[id_], room))


class _Adder(_Room):
    """`PrefillAdder`: the budgets of one step, spent as prompts are added."""

    def __init__(self, settings: Sglang, view: ReplicaView, past: Past, running: Sequence[_Running]) -> None:
        super().__init__(view)
        self.chunks: list[tuple[int, int]] = []
        self.blocks = 0
        """KV blocks that they take."""
        self.cut = False
        """Whether the last prompt is cut that was added from the queue."""
        self._settings = settings
        self._running = running
        self._by_chunk = view.by_chunk
        self._drafted = view.lookahead_tokens
        self._goes_on: tuple[int, int] | None = None
        self._lives: list[tuple[int, int]] | None = None
        beside = len(running) if settings.enable_mixed_chunk else 0
        chunk = settings.chunked_prefill_size
        self._chunk = None if chunk == -1 else chunk - beside
        self._input = settings.max_prefill_tokens - beside
        self._available = view.free_blocks * view.block_tokens
        ratio = 1.0 if settings.ignore_eos else past.ratio
        expected: float = 0
        for _, _, emitted, max_new in running:
            left = max_new - emitted
            expected += (left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS) * ratio
        self._now = beside
        self._in_all = beside + expected

    def _blocks(self, tokens: int) -> int:
        return -(-(tokens + self._drafted) // self.page) if tokens else 0

    @property
    def _left(self) -> float:
        """Tokens of the pool that nobody has or is expected to need."""
        return self._available - self._in_all

    def verdict(self) -> str:
        """On whoever comes next: `budget_state`."""
        if not (self._left > 0 and self._available - self._now > 0):
            return NO_MEMORY
        if self._input <= 0 or (self._chunk is not None and self._chunk <= 0):
            return SPENT
        return GO_ON

    def _spend(self, id_: int, tokens: int, to_come: int) -> None:
        """`_update_prefill_budget`, in whole pages and one more."""
        paged = self.paged(tokens)
        self._now += paged + self.page
        self._in_all += paged + self.page + to_come
        self._input -= paged
        if self._chunk is not None:
            self._chunk -= paged
        self.chunks.append((id_, tokens))

    def go_on(self, seq: PartialSeq) -> bool:
        """`add_chunked_req`: of the cut prompt as much as the chunk and the memory left allow, or the chunk where none is left.
        Whether it stays cut."""
        left = seq.remaining_tokens
        chunk = left if self._chunk is None else self._chunk
        within = min(chunk, int(self._left))
        within = within if within > 0 else chunk
        tokens = min(left, within)
        if self._by_chunk:
            self.blocks += self._blocks(seq.cached_tokens + tokens) - self._blocks(seq.cached_tokens)
        self._goes_on = self._life(seq.id, seq.cached_tokens + left)
        self._spend(seq.id, tokens, 0 if left > within else self._clipped(seq.id))
        return left > within

    def _clipped(self, id_: int) -> int:
        return min(self.max_new(id_), CLIP_MAX_NEW_TOKENS)

    def _demand(self, seq: WaitingSeq) -> int:
        tokens = seq.cached_tokens + seq.tokens
        to_come = max(self.max_new(seq.id) - (tokens - self.prompt(seq.id)), 0)
        return tokens + min(to_come, CLIP_MAX_NEW_TOKENS) + self.page + self._drafted

    def never_fits(self, seq: WaitingSeq) -> bool:
        """Not even in an empty pool: SGLang refuses such a prompt when it comes, or leaves it at the queue's head for ever."""
        if self.prompt(seq.id) >= self.pool - INPUT_MARGIN:
            return True
        if self._settings.to_its_end:
            left, tokens = self._life(seq.id, seq.cached_tokens + seq.tokens)
            return self.paged(tokens) + self.page + max(left, 0) + IGNORE_EOS_RESERVE_TOKENS >= self.pool
        return self._demand(seq) >= self.pool

    def add(self, seq: WaitingSeq) -> str:
        """`add_one_req`: take the request in if it fits, and say what that leaves for the next one."""
        most = self._settings.prefill_max_requests
        if most is not None and len(self.chunks) >= most:
            return SPENT
        if self._settings.to_its_end:
            return self._add_to_its_end(seq)
        if self._demand(seq) >= self._left:
            return NO_MEMORY
        paged = self.paged(seq.tokens)
        if self._chunk is None:
            if self.chunks and paged >= self._input:
                return SPENT
        elif paged > self._chunk:
            tokens = self._chunk // self.page * self.page
            if tokens <= 0:
                return SPENT
            return self._take(seq, tokens)
        return self._take(seq, seq.tokens)

    def _take(self, seq: WaitingSeq, tokens: int) -> str:
        self.cut = tokens < seq.tokens
        self.blocks += self._blocks(seq.cached_tokens + (tokens if self._by_chunk else seq.tokens))
        self._spend(seq.id, tokens, 0 if self.cut else self._clipped(seq.id))
        return self.verdict()

    def _add_to_its_end(self, seq: WaitingSeq) -> str:
        """`add_one_req_ignore_eos`: the pool has to last at each of the ends to come, first to last."""
        needed = self.paged(seq.tokens) + self.page
        free = self._available - self._now
        if needed > min(free, self._left):
            return NO_MEMORY
        life = self._life(seq.id, seq.cached_tokens + seq.tokens)
        if self._lives is None:
            lives = [life, *(self._life(each.seq.id, each.prompt + each.emitted) for each in self._running)]
            lives += [self._goes_on] if self._goes_on is not None else []
            self._lives = sorted((life for life in lives if life[0] > 0), key=lambda life: life[0])
        elif life[0] > 0:
            # Behind the last one nothing is put there, but ahead of it.
            last = max(len(self._lives) - 1, 0)
            at = next((i for i, other in enumerate(self._lives) if life[0] <= other[0]), last)
            self._lives.insert(at, life)
        free -= needed
        for i, (left, holds) in enumerate(self._lives):
            n = len(self._lives) - i
            if free - left * n <= IGNORE_EOS_RESERVE_TOKENS * n:
                return NO_MEMORY
            free += holds
        if self._chunk is None or seq.tokens <= self._chunk:
            return self._take(seq, seq.tokens)
        return self._take(seq, self._chunk) if self._chunk > 0 else SPENT

    def _life(self, id_: int, tokens: int) -> tuple[int, int]:
        """What it may still emit, and the tokens that it gives back then."""
        return self.max_new(id_) - (tokens - self.prompt(id_)), tokens
