"""How many drafted tokens a round of speculative decoding accepts: random processes with addressable draws.

The luck of a round is one number that depends on (seed, request, round) alone: neither the batch, nor the schedule, nor
k moves it. A round that accepts n of 8 drafted tokens accepts min(n, k) of k, so that two values of k, two schedulers
and two machines are compared on the same draws.

Each process is a frozen value with

* ``accepted(request_id, round_start, n_rounds, k, seed)``: drafted tokens accepted in rounds round_start,
  round_start + 1, ... as int64, each in [0, k];
* ``per_position(k)``: unconditional probability that position 1, ..., k is accepted, averaged over requests and rounds;
* ``mean_length(k)``: mean acceptance length, 1 + their sum;
* ``width(k)``: query tokens that the target verifies per sequence, k + 1 for a chain, nodes + 1 for a tree.
"""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Rule: TypeAlias = Literal["modified_rejection", "naive_match", "lenient"]
RULES: tuple[Rule, ...] = ("modified_rejection", "naive_match", "lenient")

_MASK = (1 << 64) - 1
# splitmix64, Steele, Lea, Flood, OOPSLA 2014: Weyl increment and the two multipliers of its mixer.
_GAMMA, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUND_STREAM, _STATE_STREAM, _REQUEST_STREAM = 1, 2, 3
_U64_A, _U64_B = np.uint64(_MIX_A), np.uint64(_MIX_B)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)
_ONE = 1 << 53


def _weyl(n: int) -> npt.NDArray[np.uint64]:
    multiples = np.arange(n, dtype=np.uint64) * np.uint64(_GAMMA)
    multiples.flags.writeable = False
    return multiples


_WEYL = _weyl(4096)


class Acceptance(Protocol):
    """What a decoding method asks of an acceptance process; see the module's text."""

    finite: ClassVar[bool]
    """Whether only so many rounds exist, so that none may be asked for in advance."""

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray: ...

    def per_position(self, k: int) -> FloatArray: ...

    def mean_length(self, k: int) -> float: ...

    def width(self, k: int) -> int: ...


class _Chain:
    """What processes that draft one token after another share."""

    __slots__ = ()
    finite: ClassVar[bool] = False

    def per_position(self, k: int) -> FloatArray:
        raise TypeError(f"{type(self).__name__} does not say per_position")

    def mean_length(self, k: int) -> float:
        """Mean acceptance length at *k*, the target's own token counted: in [1, k + 1]."""
        return 1.0 + float(self.per_position(k).sum())

    def width(self, k: int) -> int:
        """Query tokens verified per sequence: k drafts and the token before them."""
        return _k(k) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Iid(_Chain):
    """Every drafted token is accepted with probability *alpha*, given that those before it were.

    Leviathan et al., ICML 2023, section 3.1.
    """

    alpha: float

    def __post_init__(self) -> None:
        _probability("alpha", self.alpha)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        return _count_below(_draws(seed, _ROUND_STREAM, request_id, round_start, n_rounds), _powers(self.alpha, k))

    def per_position(self, k: int) -> FloatArray:
        return self.alpha ** np.arange(1.0, _k(k) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerPosition(_Chain):
    """Acceptance that depends on the position in the round, alike in all rounds.

    *rates* holds one probability per position: conditional (given that all before it were accepted) or unconditional
    (never rising with the position). A k beyond them is refused.
    """

    rates: tuple[float, ...]
    kind: Literal["conditional", "unconditional"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", _probabilities("rates", self.rates))
        if self.kind not in ("conditional", "unconditional"):
            raise ValueError(f"kind is conditional or unconditional; got {self.kind!r}")
        if self.kind == "unconditional" and any(b > a for a, b in pairwise(self.rates)):
            raise ValueError(
                f"unconditional rates cannot rise with the position; got {list(self.rates)}: "
                "say kind='conditional' if each is given that those before it were accepted"
            )

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        thresholds = _survival_thresholds(self._survival(k))
        return _count_below(_draws(seed, _ROUND_STREAM, request_id, round_start, n_rounds), thresholds)

    def per_position(self, k: int) -> FloatArray:
        return np.array(self._survival(k))

    def _survival(self, k: int) -> tuple[float, ...]:
        if _k(k) > len(self.rates):
            raise ValueError(
                f"k = {k} drafts more positions than the {len(self.rates)} that have a rate; give more rates or lower k"
            )
        return self.rates[:k] if self.kind == "unconditional" else _running_products(self.rates[:k])


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLength(_Chain):
    """I.i.d. acceptance with the alpha that gives *mean_length* tokens per round when *at_k* tokens are drafted."""

    mean: float
    at_k: int
    alpha: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _is_whole(self.at_k):
            raise ValueError(
                f"at_k is the number of drafted tokens behind the mean length, 1 or more; got {self.at_k!r}"
            )
        if not 1.0 <= self.mean <= self.at_k + 1.0:
            raise ValueError(
                f"mean length counts the target's own token and lies in [1, k + 1] = [1, {self.at_k + 1}]; "
                f"got {self.mean!r}"
            )
        object.__setattr__(self, "alpha", _alpha_of_mean_length(float(self.mean), self.at_k))

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        return _count_below(_draws(seed, _ROUND_STREAM, request_id, round_start, n_rounds), _powers(self.alpha, k))

    def per_position(self, k: int) -> FloatArray:
        return self.alpha ** np.arange(1.0, _k(k) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaAlpha(_Chain):
    """Every request has an alpha of its own, drawn from a Beta distribution with this mean and standard deviation.

    sd = 0 gives all requests the mean. ``per_position`` averages over requests that run equally many rounds.
    """

    mean: float
    sd: float

    def __post_init__(self) -> None:
        _probability("mean", self.mean)
        if not 0.0 <= self.sd < math.inf:
            raise ValueError(f"sd is a standard deviation, 0 or more; got {self.sd!r}")
        if self.sd > 0.0 and self.sd**2 >= self.mean * (1.0 - self.mean):
            raise ValueError(
                f"sd must stay below sqrt(mean (1 - mean)) = {math.sqrt(self.mean * (1.0 - self.mean)):.4g} "
                f"for a Beta distribution; got {self.sd!r}"
            )

    def alpha_of(self, request_id: int, seed: int) -> float:
        """The alpha of one request."""
        return _beta_alpha(self.mean, self.sd, request_id, seed)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        thresholds = _fresh_powers(self.alpha_of(request_id, seed), k)
        return _count_below(_draws(seed, _ROUND_STREAM, request_id, round_start, n_rounds), thresholds)

    def per_position(self, k: int) -> FloatArray:
        j = np.arange(1.0, _k(k) + 1.0)
        if self.sd == 0.0:
            return self.mean**j
        a, b = _beta_shape(self.mean, self.sd)
        return np.cumprod((a + j - 1.0) / (a + b + j - 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoState(_Chain):
    """Acceptance that comes in runs: a good and a bad state, each with its alpha, as a Markov chain over rounds.

    *stay_good* and *stay_bad* are the probabilities that the next round is in the same state. The chain starts in its
    stationary distribution. Both states are visited, so neither probability is 1.
    """

    alpha_good: float
    alpha_bad: float
    stay_good: float
    stay_bad: float
    _limits: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    """Thresholds of a state draw: good whatever was before, good after good, good in the first round."""

    def __post_init__(self) -> None:
        for name in ("alpha_good", "alpha_bad", "stay_good", "stay_bad"):
            _probability(name, getattr(self, name))
        if self.alpha_bad > self.alpha_good:
            raise ValueError(f"alpha_bad cannot exceed alpha_good; got {self.alpha_bad!r} and {self.alpha_good!r}")
        if self.stay_good == 1.0 or self.stay_bad == 1.0:
            raise ValueError("stay_good and stay_bad are below 1: a state that is never left is Iid or BetaAlpha")
        limits = tuple(map(_threshold, (1.0 - self.stay_bad, self.stay_good, self.good_share)))
        object.__setattr__(self, "_limits", limits)

    @classmethod
    def from_autocorrelation(
        cls, *, alpha_good: float, alpha_bad: float, lag1: float, at_k: int, good_share: float = 0.5
    ) -> TwoState:
        """The chain whose accepted counts at *at_k* have lag-1 autocorrelation *lag1* over rounds.

        *good_share* is the share of rounds in the good state. ValueError where the two alphas are too close for that
        much autocorrelation.
        """
        if not 0.0 < good_share < 1.0:
            raise ValueError(f"good_share is a share of rounds strictly between 0 and 1; got {good_share!r}")
        still = cls(alpha_good=alpha_good, alpha_bad=alpha_bad, stay_good=good_share, stay_bad=1.0 - good_share)
        between = still._share_between(at_k)
        if lag1 == 0.0:
            return still
        memory = lag1 / between if between > 0.0 else math.inf
        lowest = -min(good_share / (1.0 - good_share), (1.0 - good_share) / good_share)
        if not lowest <= memory < 1.0:
            raise ValueError(
                f"lag1 = {lag1:g} is out of reach: with these alphas at k = {at_k} it lies in "
                f"[{lowest * between:.4g}, {between:.4g}); move alpha_good and alpha_bad apart"
            )
        return cls(
            alpha_good=alpha_good,
            alpha_bad=alpha_bad,
            stay_good=min(max(good_share + (1.0 - good_share) * memory, 0.0), 1.0),
            stay_bad=min(max(1.0 - good_share + good_share * memory, 0.0), 1.0),
        )

    @property
    def good_share(self) -> float:
        """Stationary share of rounds in the good state."""
        leave_good, leave_bad = 1.0 - self.stay_good, 1.0 - self.stay_bad
        return leave_bad / (leave_good + leave_bad)

    def autocorrelation(self, k: int, lag: int = 1) -> float:
        """Autocorrelation of accepted counts *lag* rounds apart; 0 where the counts do not vary."""
        return self._share_between(k) * (self.stay_good + self.stay_bad - 1.0) ** lag

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        # The state of a round follows from those of all rounds before it.
        both = _draws(seed, (_ROUND_STREAM, _STATE_STREAM), request_id, 0, round_start + n_rounds)
        luck, bad = both[0, round_start:], self._is_bad(both[1])[round_start:]
        # Draws of bad rounds move up to where the bad state's thresholds lie, so that one search serves both states.
        luck += bad * _ONE
        at = _stacked_powers(self.alpha_good, self.alpha_bad, k).searchsorted(luck, side="right")
        bad *= k
        bad += k
        bad -= at
        return bad

    def per_position(self, k: int) -> FloatArray:
        j, share = np.arange(1.0, _k(k) + 1.0), self.good_share
        return share * self.alpha_good**j + (1.0 - share) * self.alpha_bad**j

    def _is_bad(self, u: IntArray) -> IntArray:
        # Every round's uniform number is a map of the state: to good, to bad, unchanged or (where states tend to
        # alternate) swapped. The state is the last constant map's, turned over once per swap since, so that no loop
        # over rounds is needed.
        if not u.size:
            return u
        from_bad, from_good, first = self._limits
        swapping = from_bad > from_good
        to_bad = u >= (from_bad if swapping else from_good)
        constant = to_bad | (u < (from_good if swapping else from_bad))
        # Twice the round plus the state that it sets: the running maximum is the last round that set one.
        setter = np.arange(0, 2 * u.size, 2)
        setter += to_bad
        setter *= constant
        setter[0] = u[0] >= first
        np.maximum.accumulate(setter, out=setter)
        state = setter & 1
        if swapping:
            constant[0] = True
            swaps = np.cumsum(~constant)
            state ^= (swaps - swaps[setter >> 1]) & 1
        return state

    def _share_between(self, k: int) -> float:
        """Share of the variance of accepted counts that lies between the states."""
        share = self.good_share
        (good_mean, good_var), (bad_mean, bad_var) = _moments(self.alpha_good, k), _moments(self.alpha_bad, k)
        between = share * (1.0 - share) * (good_mean - bad_mean) ** 2
        total = between + share * good_var + (1.0 - share) * bad_var
        return between / total if total > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(_Chain):
    """Accepted counts measured on a real pair of models, replayed.

    rows[i][r] is the number of drafted tokens accepted in round r of recording i, out of *recorded_k*. Request n
    replays row n modulo the number of rows, from its first round. Fewer drafted tokens replay as min(count, k); more
    than were recorded, or more rounds, are refused. The seed changes nothing.
    """

    finite: ClassVar[bool] = True
    rows: tuple[tuple[int, ...], ...]
    recorded_k: int
    _columns: tuple[IntArray, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _is_whole(self.recorded_k):
            raise ValueError(f"recorded_k is the number of tokens drafted in the recording; got {self.recorded_k!r}")
        if not self.rows:
            raise ValueError("rows is empty; give the accepted counts of at least one request")
        columns: list[IntArray] = []
        for i, row in enumerate(self.rows):
            values = np.asarray(row)
            if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
                raise ValueError(f"row {i} is a sequence of whole accepted counts, at least one; got {row!r}")
            if values.min() < 0 or values.max() > self.recorded_k:
                raise ValueError(
                    f"row {i} holds accepted counts in [0, {self.recorded_k}]; got {values.min()} to {values.max()}"
                )
            columns.append(values.astype(np.int64))
        object.__setattr__(self, "rows", tuple(tuple(c.tolist()) for c in columns))
        object.__setattr__(self, "_columns", tuple(columns))

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        self._check(k)
        row = request_id % len(self._columns)
        counts = self._columns[row]
        if round_start + n_rounds > counts.size:
            raise ValueError(
                f"request {request_id} needs round {round_start + n_rounds} but row {row} of the recording ends after "
                f"{counts.size}; record longer answers or shorten the outputs"
            )
        return np.minimum(counts[round_start : round_start + n_rounds], k)

    def per_position(self, k: int) -> FloatArray:
        self._check(k)
        counts = np.concatenate(self._columns)
        return (counts[:, None] >= np.arange(1, k + 1)).mean(axis=0)

    def _check(self, k: int) -> None:
        if _k(k) > self.recorded_k:
            raise ValueError(
                f"k = {k} drafts more than the {self.recorded_k} of the recording, which says nothing about further "
                "tokens; lower k or record with a larger one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDistributions(_Chain):
    """Acceptance that follows from the target's and the draft's next-token probabilities.

    *target* and *draft* are one distribution each (the same at every position), or one per drafted position. *rule* is
    modified_rejection (sum of min(q, p)), naive_match (sum of q p) or lenient (uniform number from [0, b]).
    Leviathan et al., ICML 2023, corollary 3.6; for lenience, its appendix A.5.
    """

    target: Sequence[Sequence[float]] | Sequence[float]
    draft: Sequence[Sequence[float]] | Sequence[float]
    rule: Rule = "modified_rejection"
    b: float | None = None
    rates: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _everywhere: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        q, p = _distributions("target", self.target), _distributions("draft", self.draft)
        if q.shape != p.shape:
            raise ValueError(
                f"target and draft share one vocabulary and as many positions; got shapes {q.shape} and {p.shape}"
            )
        check_rule(self.rule, self.b)
        both = np.minimum(q, p)
        if self.rule == "naive_match":
            rates = (q * p).sum(axis=-1)
        else:
            rates = np.minimum(p, both / (1.0 if self.b is None else self.b)).sum(axis=-1)
        for name, rows in (("target", q), ("draft", p)):
            lists: list[list[float]] = np.atleast_2d(rows).tolist()
            object.__setattr__(self, name, tuple(tuple(row) for row in lists))
        object.__setattr__(self, "rates", tuple(np.clip(np.atleast_1d(rates), 0.0, 1.0).tolist()))
        object.__setattr__(self, "_everywhere", len(self.rates) == 1)

    @property
    def alpha(self) -> float:
        """The acceptance probability, where it is the same at every position."""
        if not self._everywhere:
            raise ValueError("these distributions differ by position and have no single alpha; use rates")
        return self.rates[0]

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        return self._process(k).accepted(request_id, round_start, n_rounds, k, seed)

    def per_position(self, k: int) -> FloatArray:
        return self._process(k).per_position(k)

    def _process(self, k: int) -> Iid | PerPosition:
        return Iid(alpha=self.rates[0]) if self._everywhere else PerPosition(rates=self.rates, kind="conditional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree of candidates verified at once, as Medusa's heads and EAGLE make them.

    accuracies[h][i] is the probability that the (i + 1)-th best guess of head h is right, given that the guesses before
    it on the path were; they fall within a head and sum to at most 1. *nodes* (root not counted) asks for the best tree
    of that size, *branching* for a dense one with that many children per level, *paths* for an explicit one; give
    exactly one. k is the depth: a smaller k keeps the nodes down to that level.

    Cai et al., Medusa, arXiv 2401.10774, sections 2.1.2 and 2.3.3.
    """

    finite: ClassVar[bool] = False
    accuracies: tuple[tuple[float, ...], ...]
    nodes: int | None = None
    branching: tuple[int, ...] | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    _mass: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accuracies", check_accuracies(self.accuracies))
        given = [name for name in ("nodes", "branching", "paths") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of nodes, branching and paths; got {given or 'none'}")
        if self.nodes is not None:
            tree = greedy_tree(self.accuracies, self.nodes)
        elif self.branching is not None:
            object.__setattr__(self, "branching", tuple(self.branching))
            tree = dense_tree(self.branching)
        else:
            tree = tuple(map(tuple, self.paths or ()))
            object.__setattr__(self, "paths", tree)
            if not tree:
                raise ValueError("paths is empty; a tree has at least one node besides its root")
            _check_paths(tree)
        products = path_products(self.accuracies, tree)
        depth = max(map(len, tree))
        levels = [[m for path, m in zip(tree, products, strict=True) if len(path) == d] for d in range(1, depth + 1)]
        object.__setattr__(self, "_mass", tuple(min(math.fsum(level), 1.0) for level in levels))
        object.__setattr__(self, "_sizes", tuple(map(len, levels)))

    @property
    def depth(self) -> int:
        """Levels below the root: the largest k."""
        return len(self._mass)

    @property
    def n_nodes(self) -> int:
        """Candidates in the whole tree, without the root."""
        return sum(self._sizes)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        thresholds = _survival_thresholds(self._levels(k))
        return _count_below(_draws(seed, _ROUND_STREAM, request_id, round_start, n_rounds), thresholds)

    def per_position(self, k: int) -> FloatArray:
        return np.array(self._levels(k))

    def mean_length(self, k: int) -> float:
        """Mean acceptance length: 1 + the sum of path products over the nodes down to level *k*."""
        return 1.0 + math.fsum(self._levels(k))

    def width(self, k: int) -> int:
        """Query tokens verified per sequence: the nodes down to level *k* and the root."""
        return 1 + sum(self._sizes[: len(self._levels(k))])

    def _levels(self, k: int) -> tuple[float, ...]:
        if _k(k) > self.depth:
            raise ValueError(f"k = {k} is deeper than the tree, which has {self.depth} levels; lower k or add nodes")
        return self._mass[:k]


def read_recorded(path: Path | str, *, recorded_k: int) -> Recorded:
    """Recorded acceptance from a CSV with the columns request, round, accepted.

    Requests in ascending order become rows 0, 1, ...; the rounds of each are 0, 1, ... without a gap, in any order.
    """
    counts: dict[int, dict[int, int]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = {"request", "round", "accepted"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: columns request, round and accepted are needed; missing {sorted(missing)}")
        for line in reader:
            try:
                request, round_, accepted = (int(line[name]) for name in ("request", "round", "accepted"))
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {reader.line_num}: request, round and accepted are whole numbers"
                ) from None
            if round_ in counts.setdefault(request, {}):
                raise ValueError(f"{path}, line {reader.line_num}: round {round_} of request {request} comes twice")
            counts[request][round_] = accepted
    rows: list[tuple[int, ...]] = []
    for request in sorted(counts):
        rounds = counts[request]
        if set(rounds) != set(range(len(rounds))):
            raise ValueError(f"{path}: rounds of request {request} must run from 0 without a gap")
        rows.append(tuple(rounds[r] for r in range(len(rounds))))
    return Recorded(rows=tuple(rows), recorded_k=recorded_k)


def check_rule(rule: str, b: float | None) -> None:
    """ValueError unless *rule* is known and *b* is given for lenient sampling, and only for it."""
    if rule not in RULES:
        raise ValueError(f"rule is one of {', '.join(RULES)}; got {rule!r}")
    if rule == "lenient" and (b is None or not 0.0 < b < math.inf):
        raise ValueError(f"rule lenient needs b > 0, the upper end of the uniform number; got {b!r}")
    if rule != "lenient" and b is not None:
        raise ValueError(f"b belongs to rule lenient; got b = {b!r} with rule {rule}")


def check_accuracies(accuracies: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Head accuracies as tuples; ValueError unless each head's fall and sum to at most 1."""
    heads = tuple(_probabilities(f"accuracies of head {h}", head) for h, head in enumerate(accuracies))
    if not heads:
        raise ValueError("accuracies is empty; give one list of accuracies per head")
    for h, head in enumerate(heads):
        if any(b > a for a, b in pairwise(head)):
            raise ValueError(f"accuracies of head {h} are by rank of the guess and cannot rise; got {list(head)}")
        if math.fsum(head) > 1.0 + 1e-9:
            raise ValueError(
                f"guesses of head {h} exclude each other, so they sum to 1 at most; got {math.fsum(head):g}"
            )
    return heads


def path_products(accuracies: Sequence[Sequence[float]], paths: Iterable[Sequence[int]]) -> list[float]:
    """For each path, the probability that all its guesses are right: the product of accuracies along it."""
    heads = check_accuracies(accuracies)
    products: list[float] = []
    for path in paths:
        if not 1 <= len(path) <= len(heads):
            raise ValueError(f"path {tuple(path)} has {len(path)} levels; there are {len(heads)} heads")
        for h, i in enumerate(path):
            if not 0 <= i < len(heads[h]):
                raise ValueError(
                    f"path {tuple(path)} takes guess {i} of head {h}, which has {len(heads[h])} accuracies"
                )
        products.append(math.prod(heads[h][i] for h, i in enumerate(path)))
    return products


def greedy_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """The tree of *nodes* nodes (root not counted) with the largest sum of path products, in the order of growth.

    A node's first child and its next sibling never have a larger product than itself, so taking the best open node each
    time is optimal; ties go to the shallower, then leftmost. Medusa, section 2.3.3.
    """
    heads = check_accuracies(accuracies)
    possible = sum(math.prod(map(len, heads[: d + 1])) for d in range(len(heads)))
    if not _is_whole(nodes) or nodes > possible:
        raise ValueError(f"nodes is a whole number in [1, {possible}] with these accuracies; got {nodes!r}")
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-heads[0][0], 1, (0,))]
    tree: list[tuple[int, ...]] = []
    while len(tree) < nodes:
        negative, depth, path = heapq.heappop(heap)
        tree.append(path)
        if depth < len(heads):
            heapq.heappush(heap, (negative * heads[depth][0], depth + 1, (*path, 0)))
        if path[-1] + 1 < len(heads[depth - 1]):
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(heap, (-math.prod(heads[h][i] for h, i in enumerate(sibling)), depth, sibling))
    return tuple(tree)


def dense_tree(branching: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """All paths of a tree in which every node of level i has branching[i] children. Medusa, section 2.1.2."""
    if not branching or not all(map(_is_whole, branching)):
        raise ValueError(f"branching is a list of whole numbers, 1 or more; got {list(branching)}")
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for size in branching:
        level = [(*path, i) for path in level for i in range(size)]
        paths += level
    return tuple(paths)


def _check_paths(paths: Sequence[tuple[int, ...]]) -> None:
    known = set(paths)
    if len(known) != len(paths):
        raise ValueError("paths name a node twice")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"path {path} hangs in the air: its parent {path[:-1]} is not in the tree")


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_A) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_B) & _MASK
    return z ^ (z >> 31)


def _key(seed: int, stream: int, request_id: int) -> int:
    z = _mix((seed * _GAMMA + stream) & _MASK)
    return _mix((z + request_id * _GAMMA) & _MASK)


def _draws(seed: int, stream: int | tuple[int, ...], request_id: int, round_start: int, n_rounds: int) -> IntArray:
    """Uniform whole numbers in [0, 2^53), the draw of a round being a hash of (seed, stream, request, round).

    Shape [n_rounds], or [streams, n_rounds] for several streams.
    """
    start = round_start * _GAMMA
    first: Any
    if isinstance(stream, tuple):
        first = np.array([[(_key(seed, s, request_id) + start) & _MASK] for s in stream], np.uint64)
    else:
        first = np.uint64((_key(seed, stream, request_id) + start) & _MASK)
    z = (_WEYL[:n_rounds] if n_rounds <= _WEYL.size else _weyl(n_rounds)) + first
    z ^= z >> _S30
    z *= _U64_A
    z ^= z >> _S27
    z *= _U64_B
    z ^= z >> _S31
    z >>= _S11
    return z.view(np.int64)


def _count_below(draws: IntArray, thresholds: IntArray) -> IntArray:
    """How many of the ascending *thresholds* each draw stays below."""
    return thresholds.size - thresholds.searchsorted(draws, side="right")


def _threshold(probability: float) -> int:
    """A draw stays below it with that probability, to 2^-53; never at 0, always at 1."""
    return round(probability * _ONE)


@lru_cache(maxsize=4096)
def _survival_thresholds(survival: tuple[float, ...]) -> IntArray:
    thresholds = np.array([_threshold(s) for s in reversed(survival)], dtype=np.int64)
    thresholds.flags.writeable = False
    return thresholds


@lru_cache(maxsize=4096)
def _powers(alpha: float, k: int) -> IntArray:
    return _fresh_powers(alpha, k)


@lru_cache(maxsize=4096)
def _stacked_powers(alpha_good: float, alpha_bad: float, k: int) -> IntArray:
    return np.concatenate([_fresh_powers(alpha_good, k), _ONE + _fresh_powers(alpha_bad, k)])


def _fresh_powers(alpha: float, k: int) -> IntArray:
    return np.array([round(alpha**j * _ONE) for j in range(_k(k), 0, -1)], dtype=np.int64)


@lru_cache(maxsize=65536)
def _beta_alpha(mean: float, sd: float, request_id: int, seed: int) -> float:
    if sd == 0.0:
        return mean
    from scipy.special import betaincinv  # pyright: ignore[reportMissingTypeStubs]

    u = (int(_draws(seed, _REQUEST_STREAM, request_id, 0, 1)[0]) + 0.5) / _ONE
    return float(betaincinv(*_beta_shape(mean, sd), u))


def _beta_shape(mean: float, sd: float) -> tuple[float, float]:
    size = mean * (1.0 - mean) / sd**2 - 1.0
    return mean * size, (1.0 - mean) * size


def _moments(alpha: float, k: int) -> tuple[float, float]:
    """Mean and variance of accepted counts of k drafted tokens at *alpha*."""
    survival = alpha ** np.arange(1.0, _k(k) + 1.0)
    mean = float(survival.sum())
    return mean, float((survival * (2.0 * np.arange(1.0, k + 1.0) - 1.0)).sum()) - mean**2


def _alpha_of_mean_length(mean: float, k: int) -> float:
    if mean == 1.0:
        return 0.0
    if mean == k + 1.0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if sum(middle**j for j in range(k + 1)) < mean:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _running_products(rates: tuple[float, ...]) -> tuple[float, ...]:
    products: list[float] = []
    product = 1.0
    for rate in rates:
        product *= rate
        products.append(product)
    return tuple(products)


def _is_whole(value: object) -> bool:
    """Whether *value* is a whole number, 1 or more; files and callers without types give others."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool)


def _k(k: int) -> int:
    if k < 0:
        raise ValueError(f"k is the number of drafted tokens, 0 or more; got {k!r}")
    return k


def _probability(name: str, value: float) -> float:
    if not _is_number(value):
        raise TypeError(f"{name} is a probability; got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is a probability in [0, 1]; got {value!r}")
    return float(value)


def _probabilities(name: str, values: Sequence[float]) -> tuple[float, ...]:
    rates = tuple(_probability(name, v) for v in values)
    if not rates:
        raise ValueError(f"{name}: give at least one probability")
    return rates


def _distributions(name: str, values: Sequence[Sequence[float]] | Sequence[float]) -> FloatArray:
    try:
        array = np.asarray(cast("Sequence[float]", values), dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is one distribution or one per position, all over one vocabulary") from None
    if array.ndim not in (1, 2) or array.shape[-1] == 0:
        raise ValueError(f"{name} is one distribution or one per position; got an array of shape {array.shape}")
    if not (np.isfinite(array).all() and (array >= 0.0).all()):
        raise ValueError(f"{name} holds probabilities of 0 or more")
    sums = np.atleast_1d(array.sum(axis=-1))
    if (np.abs(sums - 1.0) > 1e-9).any():
        raise ValueError(f"{name} must sum to 1; got {float(sums[np.abs(sums - 1.0) > 1e-9][0]):g}")
    return array
