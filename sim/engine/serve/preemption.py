"""Preemption in the order of vLLM's loop, which matters to what the prefix cache evicts."""

from __future__ import annotations

from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.serve.sequences import Sequences


def preempt_in_turn(
    sequences: Sequences,
    batch: MicroBatch,
    decode: bool | tuple[int, ...],
    run: tuple[tuple[int, int], ...],
    preempt: tuple[int, ...],
) -> None:
    """Preempt as vLLM does, which matters to what is evicted: running sequences take their blocks in order of admission, and one
    that lacks some preempts the next of *preempt*. One preempted later may have taken its own before."""
    kv, decoding = sequences.kv, batch.decoding
    chunks, gone, taken = dict(run), set[int](), dict[int, int]()
    left = list(preempt)
    steps = {*preempt, *(() if isinstance(decode, bool) else decode)}
    for id_ in list(batch.admitted):
        if id_ in gone:
            continue
        if id_ in batch.partial:
            cached, tokens = batch.partial[id_].cached_tokens, chunks.get(id_, 0)
            blocks = kv.held(cached + tokens) - kv.held(cached) if kv.by_chunk else 0
        elif id_ in batch.leaving:
            ended = batch.leaving[id_]
            blocks = ended.growth_blocks if ended.steps_on and (decode is True or id_ in steps) else 0
        elif id_ in batch.paused:
            # It takes blocks when it resumes.
            blocks = 0
        else:
            blocks = decoding.growth_of(id_) if decode is True or id_ in steps else 0
        while blocks > kv.free and left:
            victim = left.pop(0)
            gone.add(victim)
            _preempt_for(sequences, batch, victim, taken.get(victim, -1), chunks)
        if id_ in gone:
            # The plan says whether those behind it go on.
            continue
        if blocks <= kv.free:
            kv.prepay(blocks)
            taken[id_] = blocks
    for victim in left:
        _preempt_for(sequences, batch, victim, taken.get(victim, -1), chunks)


def _preempt_for(sequences: Sequences, batch: MicroBatch, id_: int, taken: int, chunks: dict[int, int]) -> None:
    """One is preempted that had taken *taken* blocks for its next step; -1: it had not been planned yet."""
    if taken >= 0 and id_ in batch.partial and id_ in chunks:
        partial, tokens = batch.partial[id_], chunks[id_]
        sequences.kv.cached(id_, partial.cached_tokens + tokens, is_all=tokens == partial.remaining_tokens)
    sequences.kv.hand_over(max(taken, 0))
    sequences.preempt(batch, id_, scheduled=taken >= 0, beside=max(taken, 0))
