"""Conversations of several turns, in which each prompt is all that was said before and something new."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.arrivals import ArrivalProcess, arrivals_ns
from workloads.columns import NS_PER_S
from workloads.follows import Follows
from workloads.lengths import LengthDistribution
from workloads.streams import Count, CountFromZero, FromZero, Stream, check_bounds, stream
from workloads.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """*sessions* conversations, each of a number of *turns* drawn for it. The prompt of turn k is

    system_prompt_tokens + (user and answer tokens of turns 1 to k - 1) + user tokens of turn k,

    with *user_tokens* and *answer_tokens* drawn for each turn. It is sent when the answer before it has ended and a person has
    thought for an exponential time of *mean_think_s*. The system prompt is the same for all. *block_tokens*: of the trace's block
    ids, which name the answers too.
    """

    sessions: Count
    turns: LengthDistribution
    user_tokens: LengthDistribution
    answer_tokens: LengthDistribution
    system_prompt_tokens: CountFromZero = 0
    mean_think_s: FromZero = 0.0
    block_tokens: Count = 16

    def __post_init__(self) -> None:
        check_bounds(self)

    def trace(self, starts: ArrivalProcess, seed: int) -> Trace:
        """The requests of all sessions, which start as *starts* says; `Trace.session` numbers them by their start."""
        turns = np.maximum(self.turns.sample(stream(seed, Stream.TURNS), self.sessions), 1)
        n = int(turns.sum())
        user = np.maximum(self.user_tokens.sample(stream(seed, Stream.PROMPT_LENGTHS), n), 1)
        answer = np.maximum(self.answer_tokens.sample(stream(seed, Stream.OUTPUT_LENGTHS), n), 1)
        think_s = stream(seed, Stream.THINK_TIMES).standard_exponential(n) * self.mean_think_s
        think_ns = np.rint(think_s * NS_PER_S).astype(np.int64)
        session = np.repeat(np.arange(self.sessions), turns)
        first = np.cumsum(turns) - turns
        turn = np.arange(n) - first[session]
        said = np.cumsum(user + answer)
        before = (said - user - answer) - (said - user - answer)[first][session]
        prompt = self.system_prompt_tokens + before + user
        # What waits for an answer has a place in the order only: behind those before it by the time that people take alone.
        thought = np.cumsum(think_ns)
        nominal = arrivals_ns(starts, seed, n_requests=self.sessions)[session] + thought - thought[first][session]
        order = np.lexsort((np.arange(n), nominal))
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        waits = turn[order] > 0
        follows = None
        if waits.any():
            follows = Follows(
                offsets=np.concatenate(([0], np.cumsum(waits))),
                rows=place[order[waits] - 1],
                delay_ns=think_ns[order][waits],
            )
        shared = self.system_prompt_tokens // self.block_tokens
        counts = (prompt + answer) // self.block_tokens
        counts = np.maximum(counts, -(-prompt // self.block_tokens))
        longest = np.maximum.reduceat(counts, first)
        base = shared + np.cumsum(longest) - longest
        at = np.arange(counts[order].sum()) - np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
        ids = np.where(at < shared, at, np.repeat(base[session[order]], counts[order]) + at)
        return Trace(
            arrival_ns=nominal[order],
            prompt_tokens=prompt[order],
            output_tokens=answer[order],
            session=session[order],
            prefix_blocks=ids.astype(np.int64),
            prefix_offsets=np.concatenate(([0], np.cumsum(counts[order]))),
            prefix_block_tokens=self.block_tokens,
            follows=follows,
            source=f"{self!r}, started by {starts!r}, seed {seed}",
        )
