"""Closed forms of speculative decoding.

Notation follows Chen et al.: *target* is the large model (q), *draft* the small one (p), *k* the number of drafted
tokens per round, *alpha* the probability that a drafted token is accepted given that those before it were, *c* the
draft's step time over the target's. Arguments broadcast; whole numbers may be arrays too.

Papers: Leviathan = Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
arXiv 2211.17192. Chen = Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
arXiv 2302.01318. Medusa = Cai et al., arXiv 2401.10774.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.acceptance import dense_tree, greedy_tree, path_products
from sim.theory._checks import (
    FloatArray,
    Values,
    count,
    distribution,
    finite,
    non_negative,
    plain,
    positive,
    probability,
)


def expected_tokens(alpha: Values, k: Values) -> Any:
    """Expected tokens per round, counting the one that the target always adds: (1 - alpha^(k+1)) / (1 - alpha).

    Exact in the limits: k + 1 at alpha = 1, and 1 at alpha = 0 or k = 0.

    Source: Leviathan, equation 1.
    """
    a, n = probability("alpha", alpha), count("k", k) + 1.0
    d = 1.0 - a
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -np.expm1(n * np.log1p(-d)) / d
    value = np.where(a == 1.0, n, value)
    return plain(np.where((n == 1.0) | (a == 0.0), 1.0, value))


def accepted_drafts(alpha: Values, k: Values) -> Any:
    """Expected drafted tokens accepted per round, without the target's own token: expected tokens less one.

    Source: Leviathan, equation 1, less the token that the target adds.
    """
    return plain(np.asarray(expected_tokens(alpha, k)) - 1.0)


def tokens_pmf(alpha: Values, k: int) -> FloatArray:
    """Probability of 1, 2, ..., k + 1 tokens in a round, on a new last axis of length k + 1.

    Source: Leviathan, section 3.1 (capped geometric distribution).
    """
    a, top = probability("alpha", alpha)[..., None], _one_k(k)
    n = np.arange(1, top + 2)
    return np.where(n <= top, a ** (n - 1.0) * (1.0 - a), a ** float(top))


def tokens_variance(alpha: Values, k: int) -> Any:
    """Variance of the tokens of one round.

    Source: second moment of the capped geometric distribution of Leviathan, section 3.1.
    """
    pmf, n = tokens_pmf(alpha, k), np.arange(1, _one_k(k) + 2)
    mean = (pmf * n).sum(axis=-1)
    return plain((pmf * (n - mean[..., None]) ** 2).sum(axis=-1))


def expected_rounds(n_tokens: int, alpha: float, k: int) -> float:
    """Expected rounds until *n_tokens* are out, the last round being cut at the end of the output.

    Renewal recursion m(n) = 1 + sum_j P(j tokens) m(n - j). It exceeds n / E by what the cut throws away, which is
    the end effect that a long-run rate leaves out.

    Source: renewal argument on the round distribution of Leviathan, section 3.1.
    """
    n, top = int(count("n_tokens", n_tokens)), _one_k(k)
    pmf = tokens_pmf(float(probability("alpha", alpha)), top)
    rounds = np.zeros(n + 1)
    for left in range(1, n + 1):
        reach = min(left, top + 1)
        rounds[left] = 1.0 + float(pmf[:reach] @ rounds[left - reach : left][::-1])
    return float(rounds[n])


def speedup(alpha: Values, k: Values, c: Values) -> Any:
    """Expected wall-time speed-up over plain decoding: expected tokens / (k c + 1).

    Assumes i.i.d. acceptance and a verify pass that costs one plain step (memory-bound).

    Source: Leviathan, theorem 3.8.
    """
    return plain(np.asarray(expected_tokens(alpha, k)) / (count("k", k) * non_negative("c", c) + 1.0))


def operations_factor(alpha: Values, k: Values, c_ops: Values = 0.0) -> Any:
    """Arithmetic done over arithmetic of plain decoding: (k c_ops + k + 1) / expected tokens.

    *c_ops* is the draft's operations per token over the target's.

    Source: Leviathan, theorem 3.11.
    """
    n = count("k", k)
    return plain((n * non_negative("c_ops", c_ops) + n + 1.0) / np.asarray(expected_tokens(alpha, k)))


def memory_reads_reduction(alpha: Values, k: Values) -> Any:
    """Factor by which reads of the target's weights and KV cache fall: once per round instead of once per token.

    Source: Leviathan, section 3.4.
    """
    return expected_tokens(alpha, k)


def improves(alpha: Values, c: Values) -> Any:
    """Whether some k beats plain decoding: alpha > c.

    Source: Leviathan, corollary 3.9.
    """
    return plain(probability("alpha", alpha) > non_negative("c", c))


def guaranteed_speedup(alpha: Values, c: Values) -> Any:
    """Speed-up that one drafted token gives, a lower bound of the best one where alpha > c: (1 + alpha) / (1 + c).

    Source: Leviathan, corollary 3.9.
    """
    return plain((1.0 + probability("alpha", alpha)) / (1.0 + non_negative("c", c)))


def break_even_alpha(k: Values, c: Values) -> Any:
    """Acceptance at which *k* drafted tokens neither gain nor lose: the root of expected tokens = 1 + k c.

    0 where k = 0 or c = 0; NaN where c > 1 and k > 0, since even full acceptance then loses.

    Source: Leviathan, theorem 3.8, set to 1.
    """
    n, ratio = np.broadcast_arrays(count("k", k), non_negative("c", c))
    lost = (ratio > 1.0) & (n > 0)
    target = 1.0 + n * np.where(lost, 0.0, ratio)
    return plain(np.where(lost, np.nan, _alpha_of_expected(target, n)))


def optimal_k(alpha: Values, c: Values, k_max: int = 1024) -> Any:
    """The k with the largest speed-up; the smaller one of a tie; *k_max* where the speed-up still rises there.

    Scans until the speed-up falls, which ends at the optimum because it has a single peak in k: one more token pays
    while alpha^(k+1) (1 + k c) > c E(k). With c = 0 and alpha > 0 it never falls.

    Source: Leviathan, section 3.5.
    """
    top = _one_k(k_max)
    a, ratio = np.broadcast_arrays(probability("alpha", alpha), non_negative("c", c))
    best = np.zeros(a.shape, dtype=np.int64)
    rising = np.ones(a.shape, dtype=bool)
    expected, power = np.ones(a.shape), a.copy()
    for k in range(top):
        # The margin keeps an exact tie (alpha 0.5, c 0.2: k = 1 and 2) from being decided by rounding.
        rising &= power * (1.0 + k * ratio) > ratio * expected * (1.0 + 1e-12)
        if not rising.any():
            break
        best[rising] = k + 1
        expected, power = expected + power, power * a
    # alpha^k underflows long after a free draft has stopped mattering; it still never hurts.
    best[(ratio == 0.0) & (a > 0.0)] = top
    return plain(best)


def best_speedup(alpha: Values, c: Values, k_max: int = 1024) -> Any:
    """The speed-up at the optimal k.

    Source: Leviathan, section 3.5.
    """
    return speedup(alpha, optimal_k(alpha, c, k_max), c)


def oracle_tokens(alpha: Values) -> Any:
    """Expected tokens per round if an oracle drafted exactly as many as will be accepted: 1 / (1 - alpha).

    Infinite at alpha = 1.

    Source: Leviathan, section 3.5.
    """
    a = probability("alpha", alpha)
    with np.errstate(divide="ignore"):
        return plain(1.0 / (1.0 - a))


def measured_rate_speedup(r_prime: Values, k: Values, draft_s: Values, target_s: Values) -> Any:
    """Speed-up from a measured rate r' = tokens per round / (k + 1): r' (k + 1) t_target / (k t_draft + t_target).

    Source: toyllm article, "Complexity Analysis"; r'(k + 1) is Leviathan's expected tokens.
    """
    tokens, loop = _tokens_per_round(r_prime, k), _loop_s(k, draft_s, target_s)
    return plain(tokens * positive("target_s", target_s) / loop)


def time_for_tokens_s(
    n_tokens: Values,
    r_prime: Values,
    k: Values,
    draft_s: Values,
    target_s: Values,
) -> Any:
    """Seconds for *n_tokens* at a measured rate r': n / (r' (k + 1)) rounds of k t_draft + t_target.

    Source: toyllm article, "Complexity Analysis".
    """
    rounds = non_negative("n_tokens", n_tokens) / _tokens_per_round(r_prime, k)
    return plain(rounds * _loop_s(k, draft_s, target_s))


def acceptance(target: Values, draft: Values) -> Any:
    """Acceptance probability of modified rejection sampling: sum of min(target, draft) over the last axis.

    Source: Leviathan, corollary 3.6 (alpha = 1 - D_LK); Chen, theorem 1.
    """
    q, p = _pair(target, draft)
    return plain(np.minimum(q, p).sum(axis=-1))


def naive_acceptance(target: Values, draft: Values) -> Any:
    """Probability that an independent draw from the target equals the draft's token: sum of target * draft.

    Never above the modified rule's; exact as well.

    Source: notes on the two papers, "naive" variant; collision probability.
    """
    q, p = _pair(target, draft)
    return plain((q * p).sum(axis=-1))


def one_shot_acceptance(target: Values, draft: Values) -> Any:
    """Acceptance of classic rejection sampling with M = max(target / draft), without a residual: 1 / M.

    0 where the target gives weight to a token that the draft never proposes.

    Source: Leviathan, appendix A.2.
    """
    q, p = _pair(target, draft)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0.0, p / np.where(q > 0.0, q, 1.0), np.inf)
    return plain(ratio.min(axis=-1))


def lenient_acceptance(target: Values, draft: Values, b: Values) -> Any:
    """Acceptance when the uniform number is drawn from [0, b]: sum of draft * min(1, min(1, target / draft) / b).

    For b <= 1 this is the sum of min(draft, target / b); for b > 1 it is the ordinary acceptance over b.

    Source: toyllm article, "Insights" (the idea); Leviathan, appendix A.5 with lenience l = b.
    """
    q, p = _pair(target, draft)
    accept = np.minimum(p, np.minimum(q, p) / positive("b", b)[..., None])
    return plain(accept.sum(axis=-1))


def lenient_output(target: Values, draft: Values, b: Values) -> FloatArray:
    """Distribution of the token that lenient sampling puts out, the residual left as in the exact rule.

    Equal to the target at b = 1, to the draft as b -> 0.

    Source: derived from toyllm, "Insights": accepted mass plus rejected mass times the residual.
    """
    q, p = _pair(target, draft)
    accept = np.minimum(p, np.minimum(q, p) / positive("b", b)[..., None])
    excess = np.maximum(q - p, 0.0)
    total = excess.sum(axis=-1, keepdims=True)
    # Equal distributions leave no residual; a rejection (b > 1) then draws from the target.
    residual = np.where(total > 0.0, excess / np.where(total > 0.0, total, 1.0), q)
    return accept + (1.0 - accept.sum(axis=-1, keepdims=True)) * residual


def lenient_distance(target: Values, draft: Values, b: Values) -> Any:
    """Total-variation distance between lenient output and target; for b <= 1 it equals the gain in acceptance.

    Source: derived from the lenient output distribution.
    """
    q, _ = _pair(target, draft)
    return plain(0.5 * np.abs(lenient_output(target, draft, b) - q).sum(axis=-1))


def alpha_from_mean_length(mean_length: Values, k: Values) -> Any:
    """The i.i.d. alpha whose expected tokens per round equal *mean_length* at *k*, by bisection.

    *mean_length* lies in [1, k + 1], else ValueError; k is 1 or more.

    Source: inverse of Leviathan, equation 1.
    """
    length, n = np.broadcast_arrays(finite("mean_length", mean_length), count("k", k, at_least=1))
    wrong = (length < 1.0) | (length > n + 1.0)
    if wrong.any():
        raise ValueError(
            f"mean_length counts the target's own token and lies in [1, k + 1]; "
            f"got {length[wrong].flat[0]:g} with k = {n[wrong].flat[0]:g}"
        )
    return plain(_alpha_of_expected(length, n))


def draft_acceptance_rate(mean_length: Values, k: Values) -> Any:
    """Accepted over drafted tokens: (mean acceptance length - 1) / k. It falls as k grows; it is not alpha.

    Source: vLLM's metric of that name.
    """
    return plain((finite("mean_length", mean_length) - 1.0) / count("k", k, at_least=1))


def mean_length_from_positions(rates: Values) -> Any:
    """Mean acceptance length from unconditional per-position rates: 1 + their sum over the last axis.

    Source: vLLM's mean acceptance length; linearity of expectation.
    """
    p = probability("rates", rates)
    _falling(p)
    return plain(1.0 + p.sum(axis=-1))


def unconditional_rates(conditional: Values) -> FloatArray:
    """Probability that position i is accepted, from the probabilities given that all before it were.

    Source: chain rule, cumulative product over the last axis.
    """
    return np.cumprod(probability("conditional", conditional), axis=-1)


def conditional_rates(unconditional: Values) -> FloatArray:
    """Probability that position i is accepted given that all before it were; 0 after a position never reached.

    Unconditional rates never rise with the position, else ValueError.

    Source: chain rule, ratio of neighbours.
    """
    p = probability("unconditional", unconditional)
    _falling(p)
    before = np.concatenate([np.ones((*p.shape[:-1], 1)), p[..., :-1]], axis=-1)
    return np.where(before > 0.0, p / np.where(before > 0.0, before, 1.0), 0.0)


def medusa_speedup(tokens_per_step: Values, overhead: Values) -> Any:
    """Speed-up of extra heads: tokens per step over (step time / plain step time).

    Source: Medusa, appendix B.1 and table 1 (acceleration rate over overhead).
    """
    return plain(positive("tokens_per_step", tokens_per_step) / positive("overhead", overhead))


def typical_acceptance_threshold(target: Values, epsilon: Values = 0.3, delta: Values = 0.09) -> Any:
    """Target probability above which a candidate is kept: min(epsilon, delta * exp(-entropy)).

    Source: Medusa, section 2.3.1; defaults of FasterDecoding/Medusa, medusa/model/utils.py.
    """
    q = distribution("target", target)
    entropy = -(q * np.log(np.where(q > 0.0, q, 1.0))).sum(axis=-1)
    return plain(np.minimum(positive("epsilon", epsilon), positive("delta", delta) * np.exp(-entropy)))


def dense_tree_nodes(branching: Sequence[int]) -> int:
    """Nodes of a tree in which every node of level i has branching[i] children, without the root.

    Source: Medusa, section 2.1.2.
    """
    sizes = count("branching", np.asarray(branching), at_least=1)
    return int(np.cumprod(sizes).sum())


def tree_mean_length(accuracies: Sequence[Sequence[float]], paths: Sequence[Sequence[int]]) -> float:
    """Mean acceptance length of a tree: 1 + the sum over its nodes of the product of accuracies along the path.

    accuracies[h][i] is the probability that the (i + 1)-th best guess of head h is right; a node is a path of such
    indices from the root.

    Source: Medusa, section 2.3.3.
    """
    return 1.0 + sum(path_products(accuracies, paths))


def sparse_tree_mean_length(accuracies: Sequence[Sequence[float]], nodes: int) -> float:
    """Mean acceptance length of the best tree of *nodes* nodes (root not counted), grown greedily.

    Source: Medusa, section 2.3.3.
    """
    return tree_mean_length(accuracies, greedy_tree(accuracies, nodes))


def dense_tree_mean_length(accuracies: Sequence[Sequence[float]], branching: Sequence[int]) -> float:
    """Mean acceptance length of a tree with branching[i] children below every node of level i.

    Source: Medusa, sections 2.1.2 and 2.3.3.
    """
    return tree_mean_length(accuracies, dense_tree(branching))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearServer:
    """A server whose step times are linear in tokens and in KV tokens, in seconds.

    The draft's time is for a whole proposal: one per speculative step, whatever k.
    """

    base_s: float
    per_token_s: float
    per_kv_token_s: float
    draft_base_s: float
    draft_per_kv_token_s: float
    overhead_s: float

    def step_s(self, width: Values, batch: Values, context: Values) -> Any:
        """Target's seconds for *batch* sequences of *width* query tokens and *context* KV tokens each."""
        b = non_negative("batch", batch)
        rows, kv = b * count("width", width), b * non_negative("context", context)
        return plain(self.base_s + self.per_token_s * rows + self.per_kv_token_s * kv)

    def draft_s(self, batch: Values, context: Values) -> Any:
        """Draft's seconds for one proposal of all k tokens for *batch* sequences."""
        kv = non_negative("batch", batch) * non_negative("context", context)
        return plain(self.draft_base_s + self.draft_per_kv_token_s * kv)


SPECDECODE_BENCH = LinearServer(
    # Llama-3.1-8B with EAGLE on one H100, fitted constants of SpecDecode-Bench, arXiv 2601.11580.
    base_s=5.886e-3,
    per_token_s=21.0e-6,
    per_kv_token_s=39.3e-9,
    draft_base_s=2.135e-3,
    draft_per_kv_token_s=2.38e-9,
    overhead_s=1.207e-3,
)


def load_aware_speedup(
    mean_length: Values,
    k: Values,
    plain_s: Values,
    verify_s: Values,
    draft_s: Values,
    overhead_s: Values = 0.0,
    speculation_s: Values = 0.0,
) -> Any:
    """Speed-up at a given load: AL (T(1, b) + o) / (T(k+1, b) + k D(b) + o + f).

    plain_s = T(1, b) and verify_s = T(k+1, b) are the target's steps at that batch, draft_s = D(b) one draft step,
    overhead_s = o what every step pays, speculation_s = f what only a speculative step pays.

    Source: generalises Leviathan, theorem 3.8, to step times that depend on width and batch.
    """
    common = non_negative("overhead_s", overhead_s)
    plain_step = positive("plain_s", plain_s) + common
    step = positive("verify_s", verify_s) + count("k", k) * non_negative("draft_s", draft_s)
    step = step + common + non_negative("speculation_s", speculation_s)
    return plain(_length(mean_length, k) * plain_step / step)


def server_speedup(
    mean_length: Values,
    k: Values,
    batch: Values,
    context: Values,
    server: LinearServer = SPECDECODE_BENCH,
) -> Any:
    """Speed-up of *k* drafted tokens at *batch* running sequences of *context* tokens on a linear server.

    k = 0 is plain decoding: no draft time, speed-up 1 with a mean length of 1.

    Source: SpecDecode-Bench, arXiv 2601.11580 (constants); the load-aware form of Leviathan, theorem 3.8.
    """
    n = count("k", k)
    draft = np.where(n > 0, np.asarray(server.draft_s(batch, context)), 0.0)
    plain_step = np.asarray(server.step_s(1, batch, context)) + server.overhead_s
    step = np.asarray(server.step_s(n + 1, batch, context)) + draft + server.overhead_s
    return plain(_length(mean_length, n) * plain_step / step)


def crossover_batch(
    mean_length: Values,
    k: Values,
    context: Values,
    server: LinearServer = SPECDECODE_BENCH,
) -> Any:
    """Batch at which the speed-up on a linear server is exactly 1.

    Speculation gains below it. Infinite where it gains at every batch, 0 where it gains at none or only beyond some
    batch. k is 1 or more.

    Source: the load-aware speed-up set to 1, solved for the batch.
    """
    n, length = count("k", k, at_least=1), _length(mean_length, k)
    kv = non_negative("context", context)
    fixed = (length - 1.0) * (server.base_s + server.overhead_s) - server.draft_base_s
    slope = (n + 1.0 - length) * server.per_token_s
    slope = slope + kv * (server.draft_per_kv_token_s - (length - 1.0) * server.per_kv_token_s)
    fixed, slope = np.broadcast_arrays(fixed, slope)
    batch = np.where(slope > 0.0, fixed / np.where(slope > 0.0, slope, 1.0), np.inf)
    return plain(np.where(fixed <= 0.0, 0.0, batch))


def free_verification_batch(ridge_tokens: Values, k: Values) -> Any:
    """Batch up to which verifying k + 1 tokens per sequence stays memory-bound: ridge / (k + 1).

    Source: roofline argument of Leviathan, section 6, and Medusa, appendix G.
    """
    return plain(positive("ridge_tokens", ridge_tokens) / (count("k", k) + 1.0))


def _one_k(k: int) -> int:
    value = count("k", k)
    if value.ndim:
        raise ValueError(f"k is one whole number here; got an array of shape {value.shape}")
    return int(value)


def _pair(target: Values, draft: Values) -> tuple[FloatArray, FloatArray]:
    q, p = distribution("target", target), distribution("draft", draft)
    if q.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"target and draft share one vocabulary; got {q.shape[-1]} and {p.shape[-1]} entries on the last axis"
        )
    return q, p


def _falling(rates: FloatArray) -> None:
    if rates.ndim == 0:
        raise ValueError("per-position rates are an array with one entry per drafted position")
    if (np.diff(rates, axis=-1) > 0.0).any():
        raise ValueError(
            "unconditional per-position rates cannot rise with the position; unconditional_rates takes conditional ones"
        )


def _length(mean_length: Values, k: Values) -> FloatArray:
    length, n = finite("mean_length", mean_length), count("k", k)
    if ((length < 1.0) | (length > n + 1.0)).any():
        raise ValueError(f"mean_length lies in [1, k + 1]; got {mean_length!r} with k = {k!r}")
    return length


def _tokens_per_round(r_prime: Values, k: Values) -> FloatArray:
    n = count("k", k)
    tokens = probability("r_prime", r_prime) * (n + 1.0)
    if (tokens < 1.0 - 1e-12).any():
        raise ValueError(
            f"r_prime is tokens per round over k + 1 and at least 1 / (k + 1); got {r_prime!r} with k = {k!r}"
        )
    return tokens


def _loop_s(k: Values, draft_s: Values, target_s: Values) -> FloatArray:
    return count("k", k) * non_negative("draft_s", draft_s) + positive("target_s", target_s)


def _alpha_of_expected(expected: FloatArray, k: FloatArray) -> FloatArray:
    """Root of expected_tokens(alpha, k) = expected for 1 <= expected <= k + 1; 0 where k = 0."""
    low, high = np.zeros(expected.shape), np.ones(expected.shape)
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = np.asarray(expected_tokens(middle, k)) < expected
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    root = 0.5 * (low + high)
    return np.where(expected <= 1.0, 0.0, np.where(expected >= k + 1.0, 1.0, root))
