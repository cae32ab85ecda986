"""Speculating sequences as running totals; the tokens of each of their rounds are drawn when they join."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from hwmodels.reach import Chunk, Window
from hwmodels.totals import seen
from sim.engine.batch.decoding import Decoding, Departure, RunningSet
from sim.engine.batch.pricing import Prices
from sim.engine.batch.span import SpeculativeSpan
from sim.engine.record.columns import IntArray, RoundCounts
from sim.engine.time.clock import LONGEST_TICKS, TICK_BITS

_LONGEST_SPECULATIVE_SPAN = 4096


class _Sequence(NamedTuple):
    since: int
    cached: int
    order: int
    token_ns: int
    rounds_before: int
    """Rounds that the request had done before it joined (its acceptance draws go on from there)."""
    drawn: IntArray
    """Tokens emitted in each round since it joined."""
    held: IntArray
    """KV blocks held before each round, and after the last."""
    total: int
    """Tokens emitted from joining to the end."""
    cut: int
    """Tokens of the last round that the end of the output cuts off."""
    counted: int = 0
    """Rounds that are in the acceptance statistics already."""


class SpeculativeSet(RunningSet):
    """Speculating sequences: the tokens of each round are drawn when they join.

    Each sequence holds KV slots for the tokens that the current round submits; those of rejected tokens are used again.
    """

    def __init__(
        self, block_tokens: int, window_tokens: Window, decoding: Decoding, seed: int, rounds: MutableSequence[int],
        *, lookahead_tokens: int = 0, max_model_len: int | None = None, ahead: bool = False,
    ) -> None:  # fmt: skip
        """*rounds*: rounds done, by request; a request keeps its count when it changes sets.

        *lookahead_tokens*: slots held beyond those of the round; *max_model_len*: slots held at most; *ahead*: a round's slots
        are taken when the one before starts, as if all that it submits were accepted.
        """
        self.n = 0
        self.cached = 0
        self.round = 0
        self.k = decoding.k(1)
        self.query_tokens = decoding.query_tokens(1)
        self.draft_steps = decoding.draft_steps(1)
        self.rounds_by_k: RoundCounts = {}
        """Rounds that have been run."""
        self._decoding = decoding
        self._seed = seed
        self._block_tokens = block_tokens
        self._window = window_tokens
        self._chunked = type(window_tokens) is Chunk
        self._seqs: dict[int, _Sequence] = {}
        self._finishes: list[tuple[int, int, int]] = []
        self._joined = 0
        self._followed: int = 1
        """Batch that `k` was chosen for."""
        self._rounds = rounds
        self._emitted = bytearray()
        self._lookahead = lookahead_tokens
        self._max_model_len = max_model_len
        self._ahead = ahead
        # Sums over the sequences for each coming round, starting with round self._base.
        self._base = 0
        self._tokens = np.zeros(4096, np.int64)
        self._blocks = np.zeros(4096, np.int64)
        self._windowed = np.zeros(4096, np.int64)

    def __iter__(self) -> Iterator[int]:
        return iter(self._seqs)

    def __contains__(self, id_: int, /) -> bool:
        return id_ in self._seqs

    def _reserve(self, rounds: int) -> None:
        """Makes room for *rounds* rounds from now, and drops past ones."""
        here = self.round - self._base
        if here + rounds <= len(self._tokens):
            return
        size = max(2 * rounds, len(self._tokens))
        for name in ("_tokens", "_blocks", "_windowed"):
            fresh = np.zeros(size, np.int64)
            rest = getattr(self, name)[here:]
            fresh[: len(rest)] = rest
            setattr(self, name, fresh)
        self._base = self.round

    def _draw(
        self, id_: int, rounds_before: int, cached: int, remaining: int, blocks: int
    ) -> tuple[IntArray, IntArray, int]:
        """The tokens of rounds from here to the last token, the KV blocks held along them, and the tokens cut off at its end."""
        drawn = self._decoding.round_tokens(id_, rounds_before, remaining, self.k, self._seed)
        held = np.empty(len(drawn) + 1, np.int64)
        held[0] = blocks
        after = held[1:]
        drawn.cumsum(out=after)
        cut = int(after[-1]) - remaining
        after -= drawn
        # Slots for the tokens that the round submits, in whole blocks; those of an earlier, larger k are kept.
        after += cached + self.query_tokens + self._lookahead
        if self._ahead:
            after[1:] = after[:-1] + self.query_tokens
        if self._max_model_len is not None:
            np.minimum(after, self._max_model_len, out=after)
        after += self._block_tokens - 1
        after //= self._block_tokens
        if after[0] < blocks:
            np.maximum(after, blocks, out=after)
        if cut:
            drawn[-1] -= cut
        return drawn, held, cut

    def _book(self, cached: int, drawn: IntArray, held: IntArray, sign: int) -> None:
        """Adds coming rounds to the sums; sign -1 takes them back."""
        n = len(drawn)
        self._reserve(n + 1)
        here = self.round - self._base
        self._tokens[here : here + n] += sign * drawn
        self._blocks[here : here + n] += sign * (held[1:] - held[:-1])
        if self._window is not None:
            reads = cached + drawn.cumsum() - drawn + self.query_tokens
            self._windowed[here : here + n] += sign * seen(reads, self._window)

    def join(self, id_: int, cached: int, remaining: int, token_ns: int, blocks: int, /) -> None:
        rounds_before = self._rounds[id_]
        drawn, held, cut = self._draw(id_, rounds_before, cached, remaining, blocks)
        self._book(cached, drawn, held, 1)
        self.n += 1
        self.cached += cached
        self._joined = order = self._joined + 1
        self._seqs[id_] = _Sequence(self.round, cached, order, token_ns, rounds_before, drawn, held, remaining, cut)
        heappush(self._finishes, (self.round + len(drawn), order, id_))

    def leave(self, id_: int) -> Departure:
        """Removes a sequence before it has finished."""
        seq = self._seqs.pop(id_)
        done = self.round - seq.since
        emitted = int(seq.drawn[:done].sum())
        self._book(seq.cached + emitted, seq.drawn[done:], seq.held[done:], -1)
        return self._depart(id_, seq, done, emitted)

    def _depart(self, id_: int, seq: _Sequence, done: int, emitted: int) -> Departure:
        self.n -= 1
        cached = seq.cached + emitted
        self.cached -= cached
        self._rounds[id_] = seq.rounds_before + done
        self._count(seq, done)
        self._emitted += seq.drawn[:done].astype("<u2").tobytes()
        return Departure(id_, cached, int(seq.held[done]), emitted, seq.since, seq.cached, seq.token_ns)

    def _count(self, seq: _Sequence, done: int) -> None:
        """Adds rounds that have been run to the acceptance statistics; a request's last one counts in full."""
        if not self.k or done == seq.counted:
            return
        key = (self.k, self.query_tokens - 1)
        counts = self.rounds_by_k.get(key)
        if counts is None:
            counts = self.rounds_by_k[key] = [0] * (self.k + 1)
        drawn = seq.drawn[seq.counted : done]
        for emitted, rounds in enumerate(np.bincount(drawn).tolist()):
            if rounds:
                counts[emitted - 1] += rounds
        if seq.cut and done == len(seq.drawn):
            last = int(drawn[-1]) - 1
            counts[last] -= 1
            counts[last + seq.cut] += 1

    def follow_batch(self) -> None:
        """Sets `k` to what the decoding method drafts at the present batch; rounds are drawn again if that has changed."""
        n = max(self.n, 1)
        if n == self._followed:
            return
        self._followed = n
        k, query_tokens = self._decoding.k(n), self._decoding.query_tokens(n)
        if k == self.k and query_tokens == self.query_tokens:
            return
        taken: list[tuple[int, _Sequence, int, int]] = []
        for id_, seq in self._seqs.items():
            done = self.round - seq.since
            cached = seq.cached + int(seq.drawn[:done].sum())
            self._book(cached, seq.drawn[done:], seq.held[done:], -1)
            self._count(seq, done)
            taken.append((id_, seq, done, cached))
        self.k, self.query_tokens, self.draft_steps = k, query_tokens, self._decoding.draft_steps(n)
        for id_, seq, done, cached in taken:
            remaining = int(seq.drawn[done:].sum())
            drawn, held, cut = self._draw(id_, seq.rounds_before + done, cached, remaining, int(seq.held[done]))
            self._book(cached, drawn, held, 1)
            self._seqs[id_] = seq._replace(
                drawn=np.concatenate((seq.drawn[:done], drawn)),
                held=np.concatenate((seq.held[:done], held)),
                cut=cut,
                counted=done,
            )
            heappush(self._finishes, (self.round + len(drawn), seq.order, id_))

    @property
    def growth_blocks(self) -> int:
        return int(self._blocks[self.round - self._base])

    def growth_of(self, id_: int, /) -> int:
        seq = self._seqs[id_]
        done = self.round - seq.since
        return int(seq.held[done + 1] - seq.held[done])

    def state_of(self, id_: int, /) -> tuple[int, int]:
        seq = self._seqs[id_]
        done = self.round - seq.since
        return seq.cached + int(seq.drawn[:done].sum()), int(seq.held[done])

    def last_emitted(self, id_: int, /) -> int:
        seq = self._seqs[id_]
        done = self.round - seq.since
        return int(seq.drawn[done - 1]) if done else 0

    def after(self, rounds: int, id_: int, /) -> tuple[int, int]:
        seq = self._seqs[id_]
        done = self.round + rounds - seq.since
        return seq.cached + int(seq.drawn[:done].sum()), int(seq.drawn[done - 1]) if done else 0

    def _finishes_at(self, id_: int, finish: int, order: int) -> bool:
        seq = self._seqs.get(id_)
        return seq is not None and seq.order == order and seq.since + len(seq.drawn) == finish

    def until_finish(self) -> int:
        """Rounds until the first sequence finishes."""
        finishes = self._finishes
        while True:
            finish, order, id_ = finishes[0]
            if self._finishes_at(id_, finish, order):
                return finish - self.round
            heappop(finishes)

    def speculation(self) -> RoundCounts:
        return self.rounds_by_k

    def emitted(self) -> IntArray:
        """Tokens of every round of the sequences that have left, in the order in which they left. Shape [rounds]."""
        return np.frombuffer(bytes(self._emitted), "<u2")

    def next_round(self) -> tuple[int, int]:
        here = self.round - self._base
        return int(self._tokens[here]), int(self._windowed[here])

    def span(
        self, start_ticks: int, hold: int, until_ns: int, free_blocks: int, growth: int, pricing: Prices, /
    ) -> SpeculativeSpan:
        n, query = self.n, self.query_tokens
        rounds = min(hold, self.until_finish(), _LONGEST_SPECULATIVE_SPAN)
        if rounds > 1:
            rounds = self.rounds_within(free_blocks, rounds)
        emitted = self.emitted_in(rounds)
        first_kv = self.cached + n * query
        kv = emitted.cumsum()
        kv -= emitted
        kv += first_kv
        windows = None if self._window is None else self.window_in(rounds)
        durations = np.empty(rounds, np.int64)
        line_at = pricing.decode_lines(n, query, self.draft_steps)
        done = 0
        while done < rounds:
            window = 0 if windows is None else int(windows[done])
            line = line_at(int(kv[done]), window)
            to = int(kv.searchsorted(line.kv_end))
            if windows is not None:
                beyond = windows[done:to] >= line.kv_window_end
                if self._chunked:
                    # A chunk that begins takes the totals below where the line holds.
                    beyond[1:] |= windows[done + 1 : to] < windows[done : to - 1]
                if beyond.any():
                    to = done + int(beyond.argmax())
            np.multiply(kv[done:to], line.slope, out=durations[done:to])
            durations[done:to] += line.base
            if windows is not None:
                durations[done:to] += line.slope_window * windows[done:to]
            done = to
        longest = int(durations.max())
        if longest * rounds >= LONGEST_TICKS:
            rounds = max(1, LONGEST_TICKS // longest)
        ends = durations[:rounds].cumsum()
        if until_ns << TICK_BITS < start_ticks + int(ends[-1]):
            # The first round is run in any case; a further one if the one before it ends before that instant.
            ends = ends[: int(ends.searchsorted((until_ns << TICK_BITS) - start_ticks)) + 1]
        return SpeculativeSpan(start_ticks, ends, growth, self, kv, windows, emitted)

    def emitted_in(self, rounds: int) -> IntArray:
        """Tokens emitted in each of the next *rounds* rounds: a view, good until a sequence joins or leaves."""
        here = self.round - self._base
        return self._tokens[here : here + rounds]

    def window_in(self, rounds: int) -> IntArray:
        """KV tokens read in each of the next *rounds* rounds, each sequence limited to the window; a view."""
        here = self.round - self._base
        return self._windowed[here : here + rounds]

    def blocks_in(self, rounds: int) -> IntArray:
        """New KV blocks in each of the next *rounds* rounds; a view."""
        here = self.round - self._base
        return self._blocks[here : here + rounds]

    def blocks_for(self, rounds: int, /) -> int:
        here = self.round - self._base
        return int(self._blocks[here : here + rounds].sum())

    def rounds_within(self, free_blocks: int, rounds: int) -> int:
        """The most of the next *rounds* rounds that *free_blocks* new KV blocks allow."""
        # A round adds at most the blocks of its query tokens, and one more where they begin within a block.
        if rounds * self.n * (self.query_tokens // self._block_tokens + 1) <= free_blocks:
            return rounds
        here = self.round - self._base
        blocks = self._blocks[here : here + rounds]
        if blocks.sum() <= free_blocks:
            return rounds
        return int(blocks.cumsum().searchsorted(free_blocks, side="right"))

    def advance(self, rounds: int, /) -> Sequence[Departure]:
        here = self.round - self._base
        tokens = self._tokens
        self.cached += int(tokens[here] if rounds == 1 else tokens[here : here + rounds].sum())
        self.round = round_ = self.round + rounds
        departures: list[Departure] = []
        finishes = self._finishes
        while finishes and finishes[0][0] <= round_:
            finish, order, id_ = heappop(finishes)
            if self._finishes_at(id_, finish, order):
                seq = self._seqs.pop(id_)
                departure = self._depart(id_, seq, len(seq.drawn), seq.total)
                departures.append(departure._replace(emitted_last=int(seq.drawn[-1])))
        return departures
