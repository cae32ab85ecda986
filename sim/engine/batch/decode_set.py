"""Decoding sequences that emit one token each round, as running totals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

import numpy as np

from hwmodels.reach import Chunk, Window
from hwmodels.totals import seen
from policies.view import ALWAYS_NS
from sim.engine.batch.decoding import Departure, RunningSet
from sim.engine.batch.pricing import Line, LineAt, Prices
from sim.engine.batch.span import DecodeSpan, PiecewiseSpan
from sim.engine.record.columns import IntArray, Piece, Reads, RoundCounts
from sim.engine.time.clock import LONGEST_TICKS, TICK_BITS, elapsed, iterations_to_reach

_LONGEST_SPAN: Final = 1 << 20
_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor."""
_NOBODY: Final[tuple[Departure, ...]] = ()


class DecodeSet(RunningSet):
    """Sequences that emit one token each round."""

    def __init__(self, block_tokens: int, window_tokens: Window) -> None:
        self.n = 0
        self.cached = 0
        self.query_tokens = 1
        self.draft_steps = 0
        self.window_sum = 0
        """KV tokens cached, each sequence limited to the window, with the token of its next round."""
        self.window_growth = 0
        """Sequences whose windowed context still grows: with chunks, all of them."""
        self.round = 0
        self._block_tokens = block_tokens
        self._window = window_tokens
        self._chunked = type(window_tokens) is Chunk
        # Keyed by (cached - round) mod block: constant for as long as a sequence runs.
        self._residues = [0] * block_tokens
        self._seqs: dict[int, tuple[int, int, int, int]] = {}
        self._finishes: list[tuple[int, int, int]] = []
        self._bends: list[tuple[int, int, int]] = []
        self._joined = 0
        self._lines: dict[int, LineAt] = {}
        """Prices of rounds by the number of sequences, of `_pricing`."""
        self._pricing: Prices | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(self._seqs)

    def __contains__(self, id_: int, /) -> bool:
        return id_ in self._seqs

    def join(self, id_: int, cached: int, remaining: int, token_ns: int, blocks: int, /) -> None:
        round_ = self.round
        self.n += 1
        self.cached += cached
        self._residues[(cached - round_) % self._block_tokens] += 1
        self._joined = order = self._joined + 1
        self._seqs[id_] = (round_, cached, order, token_ns)
        heappush(self._finishes, (round_ + remaining, order, id_))
        if self._window is not None:
            reads = seen(cached + 1, self._window)
            self.window_sum += reads
            if self._chunked or reads < self._window:
                self.window_growth += 1
                heappush(self._bends, (round_ + int(self._window) - reads + self._chunked, order, id_))

    def leave(self, id_: int, /) -> Departure:
        since, cached, _, token_ns = self._seqs.pop(id_)
        emitted = self.round - since
        after = cached + emitted
        self._forget(cached - since, after)
        return Departure(id_, after, -(-after // self._block_tokens), emitted, since, cached, token_ns)

    def _forget(self, residue: int, cached: int) -> None:
        self.n -= 1
        self.cached -= cached
        self._residues[residue % self._block_tokens] -= 1
        if self._window is not None:
            reads = seen(cached + 1, self._window)
            self.window_sum -= reads
            if self._chunked or reads < self._window:
                self.window_growth -= 1

    @property
    def growth_blocks(self) -> int:
        return self._residues[-self.round % self._block_tokens]

    def follow_batch(self) -> None:
        """Does nothing: no round drafts."""

    def speculation(self) -> RoundCounts:
        """No round drafts."""
        return {}

    def emitted(self) -> None:
        """None: one a round."""

    def next_round(self) -> tuple[int, int]:
        return self.n, self.window_sum

    def span(
        self, start_ticks: int, hold: int, until_ns: int, free_blocks: int, growth: int, pricing: Prices, /
    ) -> DecodeSpan | PiecewiseSpan:
        n = self.n
        rounds = 1
        if hold > 1:
            rounds = min(self.until_finish(), hold)
            rounds = min(rounds, _LONGEST_SPAN)
            if self._window is not None:
                rounds = min(rounds, self.until_bend())
            if rounds > 1 and free_blocks < (rounds // self._block_tokens + 1) * n:
                rounds = self.rounds_within(free_blocks, rounds)
        if pricing is not self._pricing:
            self._pricing, self._lines = pricing, {}
        line_at = self._lines.get(n)
        if line_at is None:
            line_at = self._lines[n] = pricing.decode_lines(n, 1, 0)
        kv, window = self.cached + n, self.window_sum
        window_growth = self.window_growth
        base, slope, slope_window, kv_end, _ = line = line_at(kv, window)
        here, first, growth_ticks = (kv_end - 1 - kv) // n + 1, base + slope * kv, slope * n
        if window_growth or slope_window:
            here, first, growth_ticks = self._on_windowed_line(line, kv, window)
        reads: Reads = (n, kv, window, window_growth)
        until_ticks = LONGEST_TICKS
        if until_ns < ALWAYS_NS:
            until_ticks = min((until_ns << TICK_BITS) - start_ticks, LONGEST_TICKS)
        end = rounds * first + growth_ticks * (rounds * (rounds - 1) // 2)
        if here >= rounds and end < until_ticks:
            return DecodeSpan(start_ticks, rounds, first, growth_ticks, growth, reads)
        pieces, rounds, end = self._pieces(line_at, here, first, growth_ticks, rounds, until_ticks)
        if len(pieces) > 1:
            return PiecewiseSpan(start_ticks, pieces, rounds, end, growth, reads)
        return DecodeSpan(start_ticks, rounds, first, growth_ticks, growth, reads)

    def _on_windowed_line(self, line: Line, kv: int, window: int) -> tuple[int, int, int]:
        """(rounds priced on *line* from here on, ticks of the first, ticks by which each next one is longer)."""
        n, window_growth = self.n, self.window_growth
        rounds = (line.kv_end - 1 - kv) // n + 1
        if window_growth:
            rounds = min(rounds, (line.kv_window_end - 1 - window) // window_growth + 1)
        first = line.base + line.slope * kv + line.slope_window * window
        return rounds, first, line.slope * n + line.slope_window * window_growth

    def _pieces(
        self, line_at: LineAt, here: int, first: int, growth_ticks: int, rounds: int, until_ticks: int
    ) -> tuple[list[Piece], int, int]:
        """(pieces, rounds, ticks) of the next *rounds* rounds, one piece a line; ticks of the first *here* rounds are known.
        Rounds that would begin *until_ticks* after the start or later are left out."""
        n, kv, window, window_growth = self.n, self.cached + self.n, self.window_sum, self.window_growth
        pieces: list[Piece] = []
        done = at = 0
        while True:
            if here > rounds - done:
                here = rounds - done
            end = at + here * first + growth_ticks * (here * (here - 1) // 2)
            if end >= until_ticks:
                here = min(here, iterations_to_reach(until_ticks - at, first, growth_ticks))
                end = at + elapsed(here, first, growth_ticks)
                rounds = done + here
            pieces.append((at, here, first, growth_ticks))
            done += here
            at = end
            if done == rounds:
                return pieces, rounds, end
            here_kv, here_window = kv + done * n, window + done * window_growth
            base, slope, slope_window, kv_end, _ = line = line_at(here_kv, here_window)
            here, first, growth_ticks = (kv_end - 1 - here_kv) // n + 1, base + slope * here_kv, slope * n
            if window_growth or slope_window:
                here, first, growth_ticks = self._on_windowed_line(line, here_kv, here_window)

    def growth_of(self, id_: int, /) -> int:
        since, cached, _, _ = self._seqs[id_]
        return int((cached + self.round - since) % self._block_tokens == 0)

    def state_of(self, id_: int, /) -> tuple[int, int]:
        since, cached, _, _ = self._seqs[id_]
        cached += self.round - since
        return cached, -(-cached // self._block_tokens)

    def last_emitted(self, id_: int, /) -> int:
        return int(self.round > self._seqs[id_][0])

    def after(self, rounds: int, id_: int, /) -> tuple[int, int]:
        since, cached, _, _ = self._seqs[id_]
        emitted = self.round + rounds - since
        return cached + emitted, int(emitted > 0)

    def until_finish(self) -> int:
        """Rounds until the first sequence finishes."""
        finishes = self._finishes
        while True:
            finish, order, id_ = finishes[0]
            seq = self._seqs.get(id_)
            if seq is not None and seq[2] == order:
                return finish - self.round
            heappop(finishes)

    def until_bend(self) -> int:
        """Rounds until a windowed context stops growing or a chunk begins, after which the totals grow differently."""
        bends = self._bends
        while bends:
            at, order, id_ = bends[0]
            seq = self._seqs.get(id_)
            if seq is not None and seq[2] == order:
                return at - self.round
            heappop(bends)
        return 1 << 62

    def blocks_for(self, rounds: int, /) -> int:
        block = self._block_tokens
        turns, rest = divmod(rounds, block)
        blocks = turns * self.n
        if rest:
            # Residues of rounds round, ..., round + rest - 1 are those at -round, -round - 1, ...: one slice or two.
            residues = self._residues
            first, last = -(self.round + rest - 1) % block, -self.round % block
            if first <= last:
                blocks += sum(residues[first : last + 1])
            else:
                blocks += sum(residues[first:]) + sum(residues[: last + 1])
        return blocks

    def blocks_in(self, rounds: int, /) -> IntArray:
        """New KV blocks in each of the next *rounds* rounds."""
        at = -(self.round + np.arange(rounds)) % self._block_tokens
        return np.array(self._residues, np.int64)[at]

    def rounds_within(self, free_blocks: int, rounds: int) -> int:
        """The most of the next *rounds* rounds that *free_blocks* new KV blocks allow."""
        block = self._block_tokens
        if free_blocks >= (rounds // block + 1) * self.n:
            return rounds
        turns = free_blocks // self.n
        done = turns * block
        free = free_blocks - turns * self.n
        residues, round_ = self._residues, self.round + done
        while done < rounds:
            free -= residues[-round_ % block]
            if free < 0:
                break
            done += 1
            round_ += 1
        return min(done, rounds)

    def advance(self, rounds: int, /) -> Sequence[Departure]:
        self.round = round_ = self.round + rounds
        self.cached += rounds * self.n
        if self._window is not None:
            self.window_sum += rounds * self.window_growth
            bends = self._bends
            while bends and bends[0][0] <= round_:
                at, order, id_ = heappop(bends)
                seq = self._seqs.get(id_)
                if seq is not None and seq[2] == order:
                    if self._chunked:
                        self.window_sum -= self._window
                        heappush(bends, (at + int(self._window), order, id_))
                    else:
                        self.window_growth -= 1
        finishes = self._finishes
        if finishes[0][0] > round_:
            return _NOBODY
        departures: list[Departure] = []
        while finishes and finishes[0][0] <= round_:
            finish, order, id_ = heappop(finishes)
            seq = self._seqs.get(id_)
            if seq is None or seq[2] != order:
                continue
            since, cached, _, token_ns = self._seqs.pop(id_)
            emitted = finish - since
            after = cached + emitted
            self._forget(cached - since, after)
            blocks = -(-after // self._block_tokens)
            departures.append(_new(Departure, (id_, after, blocks, emitted, since, cached, token_ns, 1)))
        return departures
