"""What a run leaves behind: columns of integers, one row a request and one row a span of iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.clock import TICK_BITS

IntArray = NDArray[np.int64]
Table = dict[str, NDArray[Any]]

FINISHED, REJECTED, UNFINISHED = 0, 1, 2
STATUS_NAMES = ("finished", "rejected", "unfinished")


class Span(NamedTuple):
    """Iterations of one lane that differ only in the KV tokens they read; the field order is that of the record."""

    start_ns: int
    start_frac: int
    """Ticks past start_ns."""
    n: int
    first_ticks: int
    growth_ticks: int
    """The i-th iteration lasts first_ticks + i * growth_ticks."""
    lane: int
    prefill_rows: int
    prefill_chunks: int
    prefill_pairs: int
    prefill_kv_tokens: int
    prefill_pairs_window: int
    decode_seqs: int
    query_tokens: int
    draft_steps: int
    decode_kv_tokens: int
    """Read by the first iteration; grows by decode_seqs with each."""
    decode_kv_window: int
    window_growth: int
    completions: int
    """Prompts that complete."""
    emitted: int
    """Tokens that each iteration emits."""
    running: int
    waiting: int
    kv_blocks_used: int
    """In the first iteration."""
    round: int
    """Decode rounds of the lane before this span."""
    bubble_ticks: int
    """Idle time of the stages ahead of this micro-batch."""


_WIDE = {"start_ns", "first_ticks", "growth_ticks", "prefill_pairs", "prefill_pairs_window", "bubble_ticks"}
_DTYPES = {name: np.dtype(np.int64 if name in _WIDE else np.int32) for name in Span._fields}
_FLUSH_ROWS = 8192


class Recorder:
    """Collects the spans of one replica, a block of rows at a time in narrow columns."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._blocks: list[Table] = []
        self.joins: list[tuple[int, ...]] = []
        """(lane, round after which it joined, round after which it left, cached tokens, time of its latest token): a row a stay."""
        self.queued_ns: list[int] = []
        """Arrivals during a span that they did not cut: the first instant whose iterations find them in the queue."""
        self.resumed_gaps_ns: list[int] = []
        """Inter-token gaps across a preemption."""
        self.stage_rows: list[tuple[int, ...]] = []
        """Pipelines: (micro-batch, stage, start ns, duration ns), micro-batches numbered as they are sent off."""

    def flush_if_full(self) -> None:
        if len(self.rows) >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self.rows:
            table = np.array(self.rows, np.int64)
            self._blocks.append({name: table[:, i].astype(_DTYPES[name]) for i, name in enumerate(Span._fields)})
            self.rows.clear()

    def spans(self) -> Table:
        self._flush()
        return {
            name: np.concatenate([block[name] for block in self._blocks])
            if self._blocks
            else np.empty(0, _DTYPES[name])
            for name in Span._fields
        }

    def stage_table(self) -> Table:
        table = np.array(self.stage_rows, np.int64).reshape(-1, 4)
        return {name: table[:, i] for i, name in enumerate(("micro_batch", "stage", "start_ns", "duration_ns"))}

    def join_table(self) -> Table:
        table = np.array(self.joins, np.int64).reshape(-1, 5)
        names = ("lane", "since", "until", "cached", "token_ns")
        return {name: table[:, i] for i, name in enumerate(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaColumns:
    """The record of one replica."""

    spans: Table
    joins: Table
    queued_ns: IntArray
    resumed_gaps_ns: IntArray
    stages: Table
    """Pipelines: micro_batch (row of `spans`), stage, start_ns, duration_ns; empty otherwise."""
    kv_blocks_total: int
    block_tokens: int
    speculation: dict[str, Any] | None = None
    """Counts of the rounds that drafted tokens; None without speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All that a run recorded. Times are nanoseconds from the start; -1 where an event did not happen."""

    requests: Table
    reasons: tuple[str, ...]
    replicas: tuple[ReplicaColumns, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    def iterations(self) -> Table:
        """One row an iteration, ordered by start time, then replica.

        Columns: replica, lane, start_ns, duration_ns, rows, prefill_tokens, decode_tokens (query tokens of the decodes),
        sequences (that take part), running, waiting, kv_tokens (read by the decodes), kv_blocks_used, emitted_tokens,
        bubble_ns.
        """
        parts = [self._iterations_of(index) for index in range(len(self.replicas))]
        table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.lexsort((table["replica"], table["start_ns"]))
        return {name: column[order] for name, column in table.items()}

    def _iterations_of(self, index: int) -> Table:
        replica = self.replicas[index]
        spans = replica.spans
        n = spans["n"].astype(np.int64)
        row, step = expand(n)
        first = spans["first_ticks"][row]
        growth = spans["growth_ticks"][row]
        start = spans["start_frac"][row] + step * first + growth * (step * (step - 1) // 2)
        end = start + first + step * growth
        start_ns = spans["start_ns"][row] + (start >> TICK_BITS)
        decode = spans["decode_seqs"][row].astype(np.int64)
        decode_tokens = decode * spans["query_tokens"][row]
        prefill = spans["prefill_rows"][row].astype(np.int64)
        return {
            "replica": np.full(len(row), index, np.int32),
            "lane": spans["lane"][row],
            "start_ns": start_ns,
            "duration_ns": spans["start_ns"][row] + (end >> TICK_BITS) - start_ns,
            "rows": prefill + decode_tokens,
            "prefill_tokens": prefill,
            "decode_tokens": decode_tokens,
            "sequences": decode + spans["prefill_chunks"][row],
            "running": spans["running"][row].astype(np.int64),
            "waiting": spans["waiting"][row] + self._queued_since(replica, spans["start_ns"][row], start_ns),
            "kv_tokens": spans["decode_kv_tokens"][row] + decode * step,
            "kv_blocks_used": self._kv_blocks(replica, row, step),
            "emitted_tokens": spans["emitted"][row].astype(np.int64),
            "bubble_ns": spans["bubble_ticks"][row] >> TICK_BITS,
        }

    def _queued_since(self, replica: ReplicaColumns, span_ns: IntArray, start_ns: IntArray) -> IntArray:
        """Requests that have joined the queue between a span's start and an iteration of it."""
        queued = replica.queued_ns
        return np.searchsorted(queued, start_ns, side="right") - np.searchsorted(queued, span_ns, side="right")

    def _kv_blocks(self, replica: ReplicaColumns, row: IntArray, step: IntArray) -> IntArray:
        """KV blocks in use in every iteration: the recorded value of a span's first, plus what each sequence's growth
        has added since. Only spans of one lane have more than one iteration."""
        spans = replica.spans
        used = spans["kv_blocks_used"][row].astype(np.int64)
        inside = step > 0
        if not inside.any():
            return used
        block, joins = replica.block_tokens, replica.joins
        n_rounds = int(max(spans["round"].max() + spans["n"].max(), joins["until"].max(initial=0))) + 2
        # A sequence that joined after round r with c cached tokens takes a block in round d (from 0) when (c + d - r) % block == 0.
        first = joins["since"] + (-joins["cached"]) % block
        count = np.maximum(0, -(-(joins["until"] - first) // block))
        which, turn = expand(count)
        grown = np.bincount(first[which] + turn * block, minlength=n_rounds)
        total = np.concatenate(([0], np.cumsum(grown)))
        round_ = spans["round"][row].astype(np.int64)
        # Growth of rounds round_ + 1 ... round_ + step, the first round's being in the recorded value.
        used[inside] += (total[round_ + step + 1] - total[round_ + 1])[inside]
        return used

    def itl(self) -> tuple[IntArray, IntArray]:
        """Inter-token gaps in ns and how many gaps have that length.

        A sequence that decodes in two rounds of its lane, one after the other, sees the time between their ends; one that
        joins sees the time since its latest token. Tokens that a speculative round emits together count as one arrival.
        """
        gaps: list[IntArray] = []
        weights: list[IntArray] = []
        for replica in self.replicas:
            spans, joins = replica.spans, replica.joins
            for lane in np.unique(spans["lane"]):
                decoding = (spans["lane"] == lane) & (spans["decode_seqs"] > 0)
                ends, seqs = _round_ends(spans, decoding)
                mine = joins["lane"] == lane
                since, until = joins["since"][mine], joins["until"][mine]
                took_part = until > since
                new = np.bincount(since[took_part], minlength=len(ends)) if len(ends) else np.empty(0, np.int64)
                if len(ends) > 1:
                    gaps.append(np.diff(ends))
                    weights.append((seqs - new[: len(ends)])[1:])
                joined_ns = joins["token_ns"][mine][took_part]
                gaps.append(ends[since[took_part]] - joined_ns)
                weights.append(np.ones(len(joined_ns), np.int64))
            gaps.append(replica.resumed_gaps_ns)
            weights.append(np.ones(len(replica.resumed_gaps_ns), np.int64))
        if not gaps:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        gap, weight = np.concatenate(gaps), np.concatenate(weights)
        return gap[weight > 0], weight[weight > 0]


def expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Row index and position within the row for counts[i] copies of each row i."""
    row = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - starts[row]


def _round_ends(spans: Table, decoding: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """End time in ns, and number of sequences, of every decode round of one lane."""
    part = {
        name: spans[name][decoding].astype(np.int64)
        for name in ("n", "start_ns", "start_frac", "first_ticks", "growth_ticks", "decode_seqs")
    }
    row, step = expand(part["n"])
    done = step + 1
    elapsed = done * part["first_ticks"][row] + part["growth_ticks"][row] * (done * step // 2)
    ends = part["start_ns"][row] + ((part["start_frac"][row] + elapsed) >> TICK_BITS)
    return ends, part["decode_seqs"][row]
