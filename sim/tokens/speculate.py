"""Speculative sampling on real distributions: rounds of drafting and verifying, vectorised, and their exact laws.

Chen et al., arXiv 2302.01318, algorithm 2; Leviathan et al., ICML 2023, algorithm 1. q is the target, p the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.acceptance import Rule, check_rule
from sim.tokens.distributions import FloatArray, IntArray, Markov, draw, flat_cumulative


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """Rounds run side by side. tokens has shape (rounds, k + 1), -1 after the round's end; accepted counts drafts."""

    tokens: IntArray
    accepted: IntArray

    @property
    def emitted(self) -> IntArray:
        """Tokens that each round put out: accepted + 1."""
        return self.accepted + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceStatistics:
    """Exact acceptance of a draft by a target, under its four names.

    alpha averages the acceptance probability over the contexts that the target itself produces; the other three are of
    rounds of k tokens in the long run.
    """

    alpha: float
    per_position: tuple[float, ...]
    mean_acceptance_length: float
    draft_acceptance_rate: float


class Speculator:
    """A target and a draft with an acceptance rule, ready to run and to be analysed.

    Both are Markov models over one vocabulary. *rule* is modified_rejection, naive_match or lenient (uniform number
    from [0, b]). A rejected token is replaced from the residual max(0, q - p), normalised, under the lenient rule too;
    where q = p leaves no residual, from q.
    """

    def __init__(
        self, target: Markov, draft: Markov, *, rule: Rule = "modified_rejection", b: float | None = None
    ) -> None:
        check_rule(rule, b)
        if target.vocabulary != draft.vocabulary:
            raise ValueError(
                f"target and draft share one vocabulary; got {target.vocabulary} and {draft.vocabulary} tokens"
            )
        self.target, self.draft, self.rule, self.b = target, draft, rule, b
        self.vocabulary = target.vocabulary
        self.order = max(target.order, draft.order)
        self.n_states = self.vocabulary**self.order
        q, p = target.lifted(self.order), draft.lifted(self.order)
        if rule == "naive_match":
            # Given the drafted x, an independent token y of the target is put out, and y = x goes on.
            self._keep = q
            self._accepting = p * q
            self._rejecting = q - self._accepting
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(p > 0.0, q / np.where(p > 0.0, p, 1.0), 0.0)
            self._keep = np.minimum(np.minimum(ratio, 1.0) / (1.0 if b is None else b), 1.0)
            self._accepting = p * self._keep
            self._residual = residual(q, p)
            rejected = (p * (1.0 - self._keep)).sum(axis=-1, keepdims=True)
            self._rejecting = rejected * self._residual
            self._residual_cumulative = flat_cumulative(self._residual)
        self._q = q

    def rounds(self, state: npt.ArrayLike, k: int, rng: np.random.Generator) -> Rounds:
        """One round of *k* drafted tokens from each state: an array of states, or of zeros for models of order 0."""
        first = self._states(state)
        n, k = first.size, _whole("k", k)
        drafted = np.empty((n, k), dtype=np.int64)
        states = np.empty((n, k + 1), dtype=np.int64)
        states[:, 0] = first
        for j in range(k):
            drafted[:, j] = self.draft.sample(self._of(self.draft, states[:, j]), rng)
            states[:, j + 1] = self._next(states[:, j], drafted[:, j])
        accepted = np.full(n, k)
        tokens = np.full((n, k + 1), -1, dtype=np.int64)
        alive = np.arange(n)
        for j in range(k):
            here, token = states[alive, j], drafted[alive, j]
            if self.rule == "naive_match":
                other = self.target.sample(self._of(self.target, here), rng)
                kept = other == token
            else:
                kept = rng.random(alive.size) < self._keep[here, token]
                other = token.copy()
                other[~kept] = draw(self._residual_cumulative, self.vocabulary, here[~kept], rng)
            tokens[alive, j] = other
            accepted[alive[~kept]] = j
            alive = alive[kept]
        tokens[alive, k] = self.target.sample(self._of(self.target, states[alive, k]), rng)
        return Rounds(tokens=tokens, accepted=accepted)

    def generate(
        self, n_tokens: int, k: int, rng: np.random.Generator, *, state: npt.ArrayLike = 0, sequences: int = 1
    ) -> tuple[IntArray, list[IntArray]]:
        """*sequences* outputs of *n_tokens* tokens, shape (sequences, n_tokens), and the tokens each round emitted.

        The last round is cut at the end of the output, as a server does.
        """
        n_tokens = _whole("n_tokens", n_tokens)
        states = np.broadcast_to(self._states(state), (sequences,)).copy()
        out = np.full((sequences, n_tokens), -1, dtype=np.int64)
        length = np.zeros(sequences, dtype=np.int64)
        emitted: list[list[int]] = [[] for _ in range(sequences)]
        alive = np.arange(sequences)[length < n_tokens]
        while alive.size:
            done = self.rounds(states[alive], k, rng)
            room = np.minimum(done.emitted, n_tokens - length[alive])
            for j in range(int(room.max())):
                on = room > j
                token = done.tokens[on, j]
                out[alive[on], length[alive[on]] + j] = token
                states[alive[on]] = self._next(states[alive[on]], token)
            for i, count in zip(alive.tolist(), room.tolist(), strict=True):
                emitted[i].append(count)
            length[alive] += room
            alive = alive[length[alive] < n_tokens]
        return out, [np.array(e, dtype=np.int64) for e in emitted]

    def output_distribution(self, k: int, length: int, *, state: int = 0) -> FloatArray:
        """Exact probability of every sequence of *length* tokens from rounds of *k*, shape (vocabulary,) * length.

        Follows all ways in which drafts are accepted and replaced, over as many rounds as it takes.
        """
        k, length = _whole("k", k), _whole("length", length)
        if self.vocabulary**length > 1 << 24:
            raise ValueError(f"{self.vocabulary} ** {length} sequences are too many to enumerate; shorten length")
        states = self._states(state)
        # mass[j] holds, for each prefix, the probability of having come to it with j drafts accepted in this round.
        mass = [np.ones(1), *(np.zeros(1) for _ in range(k))]
        for _ in range(length):
            grown = [np.zeros((states.size, self.vocabulary)) for _ in range(k + 1)]
            for j in range(k):
                grown[j + 1] += mass[j][:, None] * self._accepting[states]
                grown[0] += mass[j][:, None] * self._rejecting[states]
            grown[0] += mass[k][:, None] * self._q[states]
            mass = [g.ravel() for g in grown]
            states = self._next(states[:, None], np.arange(self.vocabulary)).ravel()
        return np.sum(mass, axis=0).reshape((self.vocabulary,) * length)

    def target_distribution(self, length: int, *, state: int = 0) -> FloatArray:
        """Exact probability of every sequence of *length* tokens under the target alone."""
        return Speculator(self.target, self.target).output_distribution(
            0, length, state=state % self._rows(self.target)
        )

    def acceptance(self) -> FloatArray:
        """Acceptance probability of one drafted token in every state, shape (states,)."""
        return self._accepting.sum(axis=-1)

    def statistics(self, k: int) -> AcceptanceStatistics:
        """Exact long-run acceptance for rounds of *k* tokens, from the stationary distributions of the two chains."""
        k = _whole("k", k)
        alone = self._stationary(lambda weight: self._push(weight, self._q))
        alpha = float(alone @ self.acceptance())

        def one_round(weight: FloatArray) -> FloatArray:
            ended = np.zeros(self.n_states)
            for _ in range(k):
                ended += self._push(weight, self._rejecting)
                weight = self._push(weight, self._accepting)
            return ended + self._push(weight, self._q)

        weight = self._stationary(one_round)
        reached = []
        for _ in range(k):
            weight = self._push(weight, self._accepting)
            reached.append(float(weight.sum()))
        return AcceptanceStatistics(
            alpha=alpha,
            per_position=tuple(reached),
            mean_acceptance_length=1.0 + sum(reached),
            draft_acceptance_rate=sum(reached) / k if k else float("nan"),
        )

    def _push(self, weight: FloatArray, step: FloatArray) -> FloatArray:
        """Weights of states after one token, *step* giving the probability of each token in each state."""
        flow = weight[:, None] * step
        if self.order == 0:
            return np.array([flow.sum()])
        # The oldest token leaves the state, so states that differ in it alone flow into the same ones.
        oldest = flow.reshape(self.vocabulary, self.n_states // self.vocabulary, self.vocabulary)
        return oldest.sum(axis=0).ravel()

    def _stationary(self, step: Callable[[FloatArray], FloatArray]) -> FloatArray:
        weight = np.full(self.n_states, 1.0 / self.n_states)
        for _ in range(20_000):
            after = step(weight)
            after /= after.sum()
            # Averaging with the step before makes a periodic chain settle too.
            settled = 0.5 * (weight + after)
            if np.abs(settled - weight).sum() < 1e-13:
                return settled
            weight = settled
        raise ValueError("the chain of contexts does not settle in 20,000 steps; smooth the models")

    def _states(self, state: npt.ArrayLike) -> IntArray:
        array = np.atleast_1d(np.asarray(state))
        if array.ndim != 1 or array.dtype.kind not in "iu" or ((array < 0) | (array >= self.n_states)).any():
            raise ValueError(f"state is a whole number in [0, {self.n_states}), or an array of them; got {state!r}")
        return array.astype(np.int64)

    def _next(self, state: IntArray, token: IntArray) -> IntArray:
        return (state * self.vocabulary + token) % self.n_states

    def _of(self, model: Markov, state: IntArray) -> IntArray:
        return state % self._rows(model)

    def _rows(self, model: Markov) -> int:
        return model.probabilities.shape[0]


def residual(target: npt.ArrayLike, draft: npt.ArrayLike) -> FloatArray:
    """The distribution that replaces a rejected token: max(0, q - p), normalised; q itself where q = p.

    Chen et al., theorem 1.
    """
    q, p = np.asarray(target, dtype=np.float64), np.asarray(draft, dtype=np.float64)
    excess = np.maximum(q - p, 0.0)
    total = excess.sum(axis=-1, keepdims=True)
    return np.where(total > 0.0, excess / np.where(total > 0.0, total, 1.0), q)


def autoregressive(
    model: Markov, n_tokens: int, rng: np.random.Generator, *, state: npt.ArrayLike = 0, sequences: int = 1
) -> IntArray:
    """*sequences* outputs of the model alone, shape (sequences, n_tokens)."""
    out, _ = Speculator(model, model).generate(n_tokens, 0, rng, state=state, sequences=sequences)
    return out


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{name} is a whole number, 0 or more; got {value!r}")
    return int(value)
