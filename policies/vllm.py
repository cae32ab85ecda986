"""vLLM's schedulers, rule for rule: `Vllm` is version 1 as of releases 0.24 to 0.33, `VllmV0` the prefill-first one before it.

The rules are those of `vllm/v1/core/sched/scheduler.py` (`Scheduler.schedule`) and `vllm/v1/core/kv_cache_manager.py`
(`KVCacheManager.allocate_slots`) of 0.32.0, and where `policies.vllm_settings.Rules` says so of other releases; settings and their
defaults are in `vllm/config/scheduler.py` and `vllm/engine/arg_utils.py` (`EngineArgs.get_batch_defaults`). `tests/oracle` lays
these decisions beside those of the releases.

Images in prompts are encoded as `ReplicaView.images` says; an image that does not fit ends admission, where 0.33 goes on with the
next sequence. The limit of LoRA adapters in a batch is `policies.adapters.admissible`. Left out, and not needed for text: Mamba
alignment, structured output, and the cadence of prompts that 0.33 has without ranks. A budget that ends within a sequence's drafted
tokens leaves the sequence out, where vLLM verifies some of them; prompts of one token are not padded to a round of speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from policies.adapters import admissible
from policies.schedulers import admissible_blocks, checked_as_given, setting_at_least, setting_is_fraction
from policies.view import (
    DECODES,
    NO_IMAGES,
    UNTIL_CHANGE,
    Plan,
    PlannedBlocks,
    PlannedImages,
    ReplicaView,
    RunningSeq,
    WaitingSeq,
    prompts,
)
from policies.vllm_settings import VllmSettings

_DECODES_THROUGH_ARRIVALS: Final = Plan(decode=True, hold=UNTIL_CHANGE, through_arrivals=True)


@checked_as_given
class Vllm(VllmSettings):
    """Running sequences first, in order of admission, then waiting ones, within a budget of tokens; prompts are cut to fit.

    KV blocks are taken as tokens are scheduled. Where they run out, the last admitted is preempted (*scheduling_policy* `fcfs`), or
    the one of the lowest priority (`priority`), and is computed again from the head of the queue. Defaults are those of a server on
    a GPU of 70 to 160 GiB other than an A100; scenarios take those of their device.
    """

    @property
    def decodes_below(self) -> int:
        """See `policies.view.decodes_below`."""
        scheduled, _, seqs, _, _ = self.limits
        return min(scheduled, seqs)

    def plan(self, view: ReplicaView, /) -> Plan:
        if view.step >= 0 and self.prefill_schedule_interval > 1:
            return self._plan_in_cadence(view)
        return self._plan(view)

    def _plan_in_cadence(self, view: ReplicaView) -> Plan:
        """The plan of a rank that starts prompts in every `prefill_schedule_interval`th step of all ranks. What is remembered is
        whether the latest step that might start prompts has left any waiting: none is put off then."""
        left_some = view.memo is True
        beyond = view.step % self.prefill_schedule_interval
        if not beyond or left_some or not view.n_decoding + view.n_leaving:
            plan = self._plan(view)
            if not plan.preempt:
                admitted = len(plan.run) - len(
                    {seq.id for seq in view.prefilling}.intersection(id_ for id_, _ in plan.run)
                )
                left_some = len(view.waiting) > admitted
            return plan._replace(memo=left_some, through_arrivals=plan.through_arrivals and left_some)
        plan = self._plan(view, puts_off=True)
        put_off = self.prefill_schedule_interval - beyond if view.waiting or view.prefilling else plan.hold
        return plan._replace(memo=left_some, hold=min(plan.hold, put_off), through_arrivals=False)

    def _plan(self, view: ReplicaView, *, puts_off: bool = False) -> Plan:
        """*puts_off*: prompts are not computed, but for the last token of those whose other tokens are cached."""
        scheduled, batched, _, in_turn, _ = self.limits
        n_decoding, query = view.n_decoding, view.query_tokens
        draft_slots = _draft_slots(self, view)
        left = scheduled - n_decoding * query
        left_input = batched - n_decoding * (query + draft_slots)
        free = view.free_blocks - view.growth_blocks
        encodes = view.images is not None and (view.prefilling or view.waiting)
        if left < 0 or left_input < 0 or free < 0 or encodes:
            return self._plan_in_order(view, puts_off=puts_off)
        prefilling = () if puts_off else view.prefilling
        if not prefilling:
            if not view.waiting and n_decoding:
                return _DECODES_THROUGH_ARRIVALS if in_turn and _seats(self, view) <= 0 else DECODES
            chunks: list[tuple[int, int]] = []
        else:
            limit = _longest_chunk(self, view)
            # A sequence that decodes may stand behind a prompt that was cut short, or put off.
            in_order = limit or self.prefill_schedule_interval > 1
            if in_order and sum(min(seq.remaining_tokens, limit or left + 1) for seq in prefilling) > left:
                return self._plan_in_order(view, puts_off=puts_off)
            chunks = []
            for partial in prefilling:
                if left <= 0 or left_input <= draft_slots:
                    break
                cached = partial.cached_tokens
                tokens = min(partial.remaining_tokens, left, left_input - draft_slots, limit or left)
                if view.by_chunk:
                    free -= _blocks(view, cached + tokens) - _blocks(view, cached)
                if free < 0:
                    return self._plan_in_order(view, puts_off=puts_off)
                left -= tokens
                left_input -= tokens + draft_slots
                chunks.append((partial.id, tokens))
        full = _admit(self, view, chunks, left, left_input, free, NO_IMAGES, puts_off)
        if chunks:
            return prompts(tuple(chunks), n_decoding > 0 or any(not tokens for _, tokens in chunks))
        return Plan(n_decoding > 0, (), (), UNTIL_CHANGE, full and in_turn)

    def _plan_in_order(self, view: ReplicaView, *, puts_off: bool = False) -> Plan:
        """The plan where the budget or the blocks do not serve all running sequences: one after the other, as admitted."""
        remaining = {partial.id: partial.remaining_tokens for partial in view.prefilling}
        query, draft_slots, limit = view.query_tokens, _draft_slots(self, view), _longest_chunk(self, view)
        left, left_input = self.max_num_scheduled_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens
        free, images = view.free_blocks, NO_IMAGES if view.images is None else view.images.planned()
        running = list(view.running)
        preempted, undone = list[int](), list[tuple[int, int]]()
        gone_holders: dict[object, int] = {}
        scheduled: dict[int, tuple[int, int]] = {}
        """Tokens and new blocks, by id."""
        at, ends = 0, False
        while at < len(running) and left > 0 and left_input > draft_slots and not ends:
            seq = running[at]
            budget = min(left, left_input - draft_slots)
            prompt = seq.id in remaining
            if seq.leaving or (puts_off if prompt else query > budget):
                at += 1
                continue
            tokens, blocks = query, seq.growth_blocks
            if seq.id in remaining:
                tokens = images.computes(seq.id, seq.cached_tokens, min(remaining[seq.id], limit or budget, budget))
                blocks = max(_blocks(view, seq.cached_tokens + tokens) - seq.blocks, 0)
            gone = False
            while blocks > free and not gone:
                victim = self._victim(running)
                place = running.index(victim)
                del running[place]
                at -= place < at
                had_tokens, had_blocks = scheduled.pop(victim.id, (0, 0))
                if had_tokens:
                    undone += [(victim.id, had_tokens)] if victim.id in remaining else []
                    left += had_tokens
                    left_input += had_tokens + draft_slots
                free += had_blocks + _freed_blocks(view, victim, gone_holders)
                preempted.append(victim.id)
                images.undo(victim.id)
                gone = victim is seq
            if gone:
                ends = not self.rules.goes_on
                continue
            scheduled[seq.id] = (tokens, blocks)
            free -= blocks
            left -= tokens
            left_input -= tokens + draft_slots
            at += 1
        chunks = [(id_, tokens) for id_, (tokens, _) in scheduled.items() if tokens and id_ in remaining]
        decodes = tuple(id_ for id_ in scheduled if id_ not in remaining)
        everybody = len(decodes) == sum(seq.id not in remaining and not seq.leaving for seq in running)
        if not preempted:
            _admit(self, view, chunks, left, left_input, free, images, puts_off)
        return Plan(
            (everybody and bool(decodes)) or decodes or False, tuple(chunks), tuple(preempted), undone=tuple(undone)
        )

    def _victim(self, running: list[RunningSeq]) -> RunningSeq:
        """The sequence to preempt."""
        if self.scheduling_policy == "fcfs":
            return running[-1]
        return max(running, key=lambda seq: (seq.priority, seq.arrival_ns))


def _admit(
    policy: Vllm, view: ReplicaView, chunks: list[tuple[int, int]], left: int, left_input: int, free: int,
    images: PlannedImages, puts_off: bool,
) -> bool:  # fmt: skip
    """Add chunks of waiting sequences; return whether a later one could not join either.

    A function as are those below: methods of an ordinary class are called by name in the compiled build.
    """
    if _seats(policy, view) <= 0:
        return True
    if not view.waiting or left <= 0 or left_input <= _draft_slots(policy, view):
        return False
    return _admit_some(policy, view, chunks, left, left_input, free, images, puts_off)


def _admit_some(
    policy: Vllm, view: ReplicaView, chunks: list[tuple[int, int]], left: int, left_input: int, free: int,
    images: PlannedImages, puts_off: bool,
) -> bool:  # fmt: skip
    seats, draft_slots, limit = _seats(policy, view), _draft_slots(policy, view), _longest_chunk(policy, view)
    blocks = _planned(view, chunks, free)
    # The release counts its null block, which no sequence gets, among all blocks.
    kept = int(policy.watermark * (view.total_blocks + 1))
    occupied = view.n_running > 0
    block_tokens = view.block_tokens
    latest: tuple[int, int, int, int, bool] | None = None
    """The arguments of `_note_admitted` for the sequence admitted last: it is noted when another one looks."""
    for seq in _queue(policy, view):
        if left <= 0 or left_input <= draft_slots or seats <= 0:
            return True
        budget = min(left, left_input - draft_slots)
        cached, to_compute = seq.cached_tokens, seq.tokens
        found = unheld = 0
        if blocks is not None:
            if latest is not None:
                _note_admitted(blocks, *latest)
            found, unheld = (0, 0) if cached or not to_compute else blocks.finds(seq.id, to_compute)
            cached += found * block_tokens
            to_compute -= found * block_tokens
        if seq.shared_blocks:
            # Blocks that were loaded for it and are its own, or are shown as found.
            found, unheld = seq.shared_blocks, 0
        first = _first_tokens(policy, to_compute, view.query_tokens, limit, budget)
        tokens = 0 if puts_off and to_compute > 1 else first
        tokens = images.fits(seq.id, cached, tokens)
        if not tokens:
            return True
        reserve = kept if occupied else 0
        if policy.scheduler_reserve_full_isl:
            whole = min(cached + (to_compute or 1), view.max_model_len)
            if view.blocks(whole) - found - seq.kept_blocks + unheld + reserve > free:
                return True
        # Hits that the engine has looked up or loaded for it are among its cached tokens.
        had = found + seq.kept_blocks
        new = _blocks(view, cached + (tokens if view.by_chunk else to_compute or tokens)) - had
        needed = new + unheld
        if needed + reserve > free:
            return True
        # A sequence with kept blocks holds them already.
        latest = (
            seq.id,
            -1 if seq.kept_blocks else found,
            new,
            cached + (tokens if to_compute else 0),
            tokens == to_compute,
        )
        free -= needed
        left -= tokens
        left_input -= tokens + draft_slots
        seats -= 1
        occupied = True
        chunks.append((seq.id, tokens if to_compute else 0))
        images.take(seq.id)
    return seats <= 0


def _draft_slots(policy: Vllm, view: ReplicaView) -> int:
    """Tokens of the budget that drafting takes for each sequence."""
    return view.draft_slots if not view.draft_slots or policy.rules.counts_draft_slots else 0


def _seats(policy: Vllm, view: ReplicaView) -> int:
    """Sequences that may still be admitted, those of other micro-batches counted."""
    return policy.limits[2] - view.n_running - len(view.elsewhere)


def _longest_chunk(policy: Vllm, view: ReplicaView) -> int:
    """Prompt tokens that a sequence may compute in this iteration; 0: no limit."""
    limit = policy.long_prefill_token_threshold
    if not limit:
        return 0
    sequences = view.n_running + len(view.waiting)
    if sequences <= 1 and policy.rules.spares_one_prompt:
        return 0
    if policy.long_prefill_token_threshold_adaptive:
        return max(limit, policy.max_num_batched_tokens // sequences)
    return limit


def _first_tokens(policy: Vllm, to_compute: int, query_tokens: int, limit: int, budget: int) -> int:
    """Tokens that a waiting sequence computes first, *to_compute* being those of its prompt; 0 where *budget* is too small."""
    if not to_compute:
        return query_tokens if query_tokens <= budget else 0
    tokens = min(to_compute, limit) if limit else to_compute
    if tokens <= budget:
        return tokens
    return budget if policy.enable_chunked_prefill else 0


def _queue(policy: Vllm, view: ReplicaView) -> Sequence[WaitingSeq]:
    """Waiting sequences, first to be served first, without those that are passed over for want of a slot for their adapter."""
    queue, (_, _, _, in_turn, _) = view.waiting, policy.limits
    if not in_turn and len(queue) > 1:
        queue = sorted(queue, key=lambda seq: (not seq.kept_blocks, seq.priority, seq.arrival_ns, seq.id))
    if policy.max_loras is None:
        return queue
    return admissible(queue, view.adapters, policy.max_loras, leaving=policy.rules.counts_leaving)


def _planned(view: ReplicaView, chunks: list[tuple[int, int]], free: int) -> PlannedBlocks | None:
    """The prefix cache, if any, as the first waiting sequence finds it: running ones have taken blocks for *chunks* and decodes,
    all but *free*."""
    if view.cache is None:
        return None
    blocks = view.cache.planned()
    blocks.take(view.free_blocks - free)
    if chunks:
        partial = {seq.id: seq for seq in view.prefilling}
        for id_, tokens in chunks:
            seq = partial[id_]
            blocks.cached(id_, seq.cached_tokens + tokens, is_all=tokens == seq.remaining_tokens)
    return blocks


def _note_admitted(
    blocks: PlannedBlocks, id_: int, found_blocks: int, new_blocks: int, cached_tokens: int, is_all: bool
) -> None:
    """Note in *blocks* what an admitted sequence takes and then has, *is_all*: of all its tokens; *found_blocks* is negative where
    it holds blocks already."""
    if found_blocks >= 0:
        blocks.admit(id_, found_blocks)
    blocks.take(new_blocks)
    if found_blocks >= 0:
        blocks.cached(id_, cached_tokens, is_all=is_all)


def _freed_blocks(view: ReplicaView, victim: RunningSeq, gone_holders: dict[object, int]) -> int:
    """Blocks that are free once *victim* is preempted: blocks that others hold too stay."""
    if view.cache is None:
        return victim.blocks - victim.shared_blocks
    return victim.blocks - view.cache.full_blocks(victim.id) + view.cache.freed_by(victim.id, gone_holders)


def _blocks(view: ReplicaView, cached: int) -> int:
    """KV blocks of a sequence with *cached* tokens, the slots that it looks ahead included."""
    return view.blocks(min(cached + view.lookahead_tokens, view.max_model_len)) if cached else 0


@checked_as_given
@dataclass(frozen=True)
class VllmV0:
    """Prefill first (vLLM before version 1, without chunked prefill): waiting prompts run alone, whole, and stall the decodes."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    watermark: float = 0.01

    def __post_init__(self) -> None:
        setting_at_least(self, "max_num_batched_tokens", 1)
        setting_at_least(self, "max_num_seqs", 1)
        setting_is_fraction(self, "watermark")

    @property
    def decodes_below(self) -> int:
        """See `policies.view.decodes_below`."""
        return self.max_num_seqs

    def plan(self, view: ReplicaView, /) -> Plan:
        if not view.waiting and not view.prefilling and view.n_decoding:
            return _DECODES_THROUGH_ARRIVALS if view.n_decoding >= self.max_num_seqs else DECODES
        chunks = [(seq.id, seq.remaining_tokens) for seq in view.prefilling]
        seats = self.max_num_seqs - view.n_running
        free = admissible_blocks(view, self.watermark)
        left = self.max_num_batched_tokens - sum(tokens for _, tokens in chunks)
        blocked = False
        for seq in view.waiting:
            free -= view.blocks_to_admit(seq)
            # A prompt longer than the budget runs alone rather than never.
            if seats <= 0 or free < 0 or (seq.tokens > left and chunks):
                blocked = True
                break
            seats -= 1
            left -= seq.tokens
            chunks.append((seq.id, seq.tokens))
        if chunks:
            return prompts(tuple(chunks), False)
        return Plan(view.n_decoding > 0, (), (), UNTIL_CHANGE, blocked or seats <= 0)
