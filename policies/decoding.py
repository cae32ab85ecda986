"""Decoding methods: how many tokens a decode step verifies, and how many it emits.

A method counts tokens; the engine, which needs no more than `Decoding`, prices them. A *round* is one decode step of one request,
numbered from 0 within the request whatever the number of tokens drafted in it, so that a request's draw in round r does not depend
on k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from policies.acceptance import Acceptance, FromDistributions, Rule, Tree, check_rule

IntArray: TypeAlias = npt.NDArray[np.int64]
Method: TypeAlias = Literal["draft_model", "ngram", "medusa", "eagle", "mtp"]
TableRow: TypeAlias = tuple[int, int | None, int]

# Medusa's heads run inside the target's own step, and n-gram look-up runs no model at all.
_WITHOUT_DRAFT_STEPS = ("ngram", "medusa")
_TREE_METHODS = ("medusa", "eagle", "mtp")
MAX_K = 1024
"""More is a slip: published systems draft 1 to 32 tokens, and a round's time grows with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoregressive:
    """One token per sequence and step."""

    @property
    def max_query_tokens(self) -> int:
        """One token, and so no look-ahead KV slot."""
        return 1

    def k(self, n_decoding: int, /) -> int:
        return 0

    def query_tokens(self, n_decoding: int, /) -> int:
        return 1

    def draft_steps(self, n_decoding: int, /) -> int:
        return 0

    def round_tokens(self, request_id: int, round_start: int, n_tokens: int, k: int, seed: int) -> IntArray:
        if k:
            raise ValueError(f"autoregressive decoding drafts nothing; got k = {k}")
        return np.ones(n_tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Draft some tokens, verify them in one step of the target, keep those accepted and one more.

    *num_speculative_tokens* is k, or rows [lowest batch, highest batch, k] that start at 1 and leave no gap; the last
    highest batch may be None for "and beyond". With a tree, k is its depth. *rule* and *b* say how tokens are accepted
    where *acceptance* comes from distributions; None leaves that to the acceptance.
    """

    method: Method
    num_speculative_tokens: int | Sequence[Sequence[int | None]]
    acceptance: Acceptance
    rule: Rule | None = None
    b: float | None = None
    table: tuple[TableRow, ...] = field(init=False, repr=False, compare=False)
    _highest: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(
                f"method is one of {', '.join(get_args(Method))} (or Autoregressive() for plain decoding); "
                f"got {self.method!r}"
            )
        table = _table(self.num_speculative_tokens)
        if not isinstance(self.num_speculative_tokens, int):
            object.__setattr__(self, "num_speculative_tokens", table)
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "_highest", tuple(high for _, high, _ in table if high is not None))
        if isinstance(self.acceptance, Tree) and self.method not in _TREE_METHODS:
            raise ValueError(
                f"a tree of candidates comes from heads: method {self.method} drafts a chain; "
                f"use one of {', '.join(_TREE_METHODS)}"
            )
        self._check_rule()
        for k in {k for _, _, k in table}:
            self.acceptance.mean_length(k)  # refuses a k that the acceptance says nothing about

    def k(self, n_decoding: int, /) -> int:
        """Drafted positions per sequence at this running batch; ValueError beyond the table."""
        row = bisect_left(self._highest, n_decoding)
        if row == len(self.table):
            raise ValueError(
                f"num_speculative_tokens says nothing about a batch of {n_decoding}: the table ends at "
                f"{self._highest[-1]}; raise its last bound or make it null"
            )
        return self.table[row][2]

    def query_tokens(self, n_decoding: int, /) -> int:
        """k + 1, or the nodes of the tree and its root; 1 where k is 0."""
        return self.acceptance.width(self.k(n_decoding))

    def draft_steps(self, n_decoding: int, /) -> int:
        """k passes of a draft model, EAGLE or MTP head (a tree's level is one pass); 0 for n-grams and Medusa heads."""
        return 0 if self.method in _WITHOUT_DRAFT_STEPS else self.k(n_decoding)

    @property
    def max_query_tokens(self) -> int:
        """The widest step of any batch; one less is the number of look-ahead KV slots per sequence."""
        return max(self.acceptance.width(k) for _, _, k in self.table)

    def round_tokens(self, request_id: int, round_start: int, n_tokens: int, k: int, seed: int) -> IntArray:
        """Tokens emitted per round from round_start on, as int64 in [1, k + 1], until their sum reaches *n_tokens*.

        The last round is whole and may go beyond; the caller cuts them at the output's length, and still knows what was
        accepted. Rounds that start where others ended continue them.
        """
        if n_tokens < 0 or round_start < 0:
            raise ValueError(f"n_tokens and round_start are 0 or more; got {n_tokens} and {round_start}")
        if k == 0 or n_tokens == 0:
            return np.ones(n_tokens, dtype=np.int64)
        process = self.acceptance
        if process.finite:
            return _one_by_one(process, request_id, round_start, n_tokens, k, seed)
        # Enough if at least half of the tokens of full acceptance are emitted; where they are not, more rounds are drawn.
        n_rounds = min(n_tokens, 2 * n_tokens // (k + 1) + 8)
        emitted = process.accepted(request_id, round_start, n_rounds, k, seed)
        emitted += 1
        total = emitted.cumsum()
        while total[-1] < n_tokens:
            more = process.accepted(
                request_id, round_start + emitted.size, min(emitted.size, n_tokens - int(total[-1])), k, seed
            )
            emitted = np.concatenate([emitted, more + 1])
            total = emitted.cumsum()
        return emitted[: int(total.searchsorted(n_tokens)) + 1]

    def _check_rule(self) -> None:
        if self.rule is None:
            if self.b is not None:
                raise ValueError(f"b belongs to rule lenient; got b = {self.b!r} without a rule")
            return
        check_rule(self.rule, self.b)
        if isinstance(self.acceptance, FromDistributions):
            if (self.acceptance.rule, self.acceptance.b) != (self.rule, self.b):
                raise ValueError(
                    f"rule {self.rule} with b = {self.b} contradicts the acceptance's own rule {self.acceptance.rule} "
                    f"with b = {self.acceptance.b}; give it once"
                )
        elif self.rule != "modified_rejection":
            raise ValueError(
                f"what rule {self.rule} accepts follows from the two distributions; use FromDistributions, or give "
                f"{type(self.acceptance).__name__} the acceptance that the rule leads to and leave rule out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatistics:
    """Counts of speculative rounds, by vLLM's names, and the four rates that are all called acceptance rate.

    *num_draft_tokens* counts drafted tokens, all nodes of a tree. *num_accepted_tokens_per_pos[i]* counts rounds that
    accepted position i + 1. Rates are NaN where nothing was drafted.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_drafts_per_pos: tuple[int, ...]
    num_rejections: int

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative round, the target's own counted: 1 + accepted / rounds."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Unconditional rate of each position, among the rounds that drafted it."""
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_drafts_per_pos, strict=True)
        return tuple(_ratio(accepted, drafts) for accepted, drafts in pairs)

    @property
    def alpha(self) -> float:
        """Maximum-likelihood i.i.d. alpha: accepted / (accepted + rejections); what follows a rejection is untried."""
        return _ratio(self.num_accepted_tokens, self.num_accepted_tokens + self.num_rejections)


def statistics_of_counts(counts: Mapping[tuple[int, int], Sequence[int]]) -> DraftStatistics:
    """Statistics from counts by (k, draft tokens per round): how many rounds accepted 0, 1, ..., k drafts.

    A chain of k drafts k tokens per round; a tree of depth k drafts its nodes, of which k at most are accepted.
    """
    deepest = max((k for k, _ in counts), default=0)
    accepted_per_pos, drafts_per_pos = [0] * deepest, [0] * deepest
    drafts = draft_tokens = accepted = rejections = 0
    for (k, drafted), rounds in counts.items():
        n = sum(rounds)
        drafts += n
        draft_tokens += n * drafted
        rejections += n - rounds[k]
        for j in range(1, k + 1):
            reached = sum(rounds[j:])
            accepted += reached
            accepted_per_pos[j - 1] += reached
            drafts_per_pos[j - 1] += n
    return DraftStatistics(
        num_drafts=drafts,
        num_draft_tokens=draft_tokens,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=tuple(accepted_per_pos),
        num_drafts_per_pos=tuple(drafts_per_pos),
        num_rejections=rejections,
    )


def best_table(
    step_s: Callable[[int, int], float],
    draft_s: Callable[[int], float],
    acceptance: Acceptance,
    k_max: int,
    batches: Sequence[int],
    overhead_s: float = 0.0,
) -> tuple[TableRow, ...]:
    """For each batch the k in [0, k_max] with the most tokens per second, as rows [lowest batch, highest batch, k].

    step_s(width, batch) prices the target's step, draft_s(batch) one draft pass (0.0 for n-grams and Medusa heads),
    *overhead_s* what every speculative step pays besides. *batches* rise from 1; a batch between two of them takes the
    k of the lower one, and the last row is open. A tie goes to the smaller k.
    """
    if not batches or batches[0] != 1 or any(b <= a for a, b in pairwise(batches)):
        raise ValueError(f"batches rise and start at 1; got {list(batches)}")
    if k_max < 0:
        raise ValueError(f"k_max is 0 or more; got {k_max}")
    lengths = [acceptance.mean_length(k) for k in range(k_max + 1)]
    widths = [acceptance.width(k) for k in range(k_max + 1)]
    rows: list[TableRow] = []
    for i, batch in enumerate(batches):
        best, best_rate = 0, 0.0
        for k in range(k_max + 1):
            step = step_s(widths[k], batch) + (k * draft_s(batch) + overhead_s if k else 0.0)
            if not 0.0 < step < float("inf"):
                raise ValueError(
                    f"a step of width {widths[k]} at batch {batch} takes {step!r} s; expected a positive time"
                )
            if lengths[k] / step > best_rate:
                best, best_rate = k, lengths[k] / step
        high = batches[i + 1] - 1 if i + 1 < len(batches) else None
        if rows and rows[-1][2] == best:
            rows[-1] = (rows[-1][0], high, best)
        else:
            rows.append((batch, high, best))
    return tuple(rows)


def _one_by_one(process: Acceptance, request_id: int, round_start: int, n_tokens: int, k: int, seed: int) -> IntArray:
    """The same where no round may be drawn that is not needed: a recording may end with the request."""
    parts: list[IntArray] = []
    left, at = n_tokens, round_start
    while left > 0:
        emitted = process.accepted(request_id, at, -(-left // (k + 1)), k, seed) + 1
        at += emitted.size
        parts.append(emitted)
        left -= int(emitted.sum())
    return np.concatenate(parts)


def _is_whole_or_none(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | None)


def _table(value: int | Sequence[Sequence[int | None]]) -> tuple[TableRow, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"num_speculative_tokens is 0 or more; got {value}")
        _check_largest(value)
        return ((1, None, value),)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise ValueError(
            f"num_speculative_tokens is a whole number or rows [lowest batch, highest batch, k]; got {value!r}"
        )
    rows: list[TableRow] = []
    expected = 1
    for i, row in enumerate(value):
        if len(row) != 3 or not all(map(_is_whole_or_none, row)):
            raise ValueError(f"row {i} of num_speculative_tokens is [lowest batch, highest batch, k]; got {list(row)}")
        low, high, k = row
        if low is None or k is None or k < 0:
            raise ValueError(
                f"row {i} of num_speculative_tokens needs a lowest batch and a k of 0 or more; got {list(row)}"
            )
        _check_largest(k)
        if low != expected:
            raise ValueError(
                f"row {i} of num_speculative_tokens starts at batch {low}; expected {expected}: "
                "rows start at 1 and follow each other without gap or overlap"
            )
        if (high is None) != (i == len(value) - 1) and high is None:
            raise ValueError(f"row {i} of num_speculative_tokens is open, which only the last row may be")
        if high is not None and high < low:
            raise ValueError(f"row {i} of num_speculative_tokens ends at {high}, before it starts at {low}")
        rows.append((low, high, k))
        expected = low if high is None else high + 1
    return tuple(rows)


def _check_largest(k: int) -> None:
    if k > MAX_K:
        raise ValueError(f"num_speculative_tokens is at most {MAX_K}; got {k}")


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
