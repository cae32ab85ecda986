"""Speculative sampling puts out the target's distribution: shown exactly, and by a million samples."""

import itertools

import numpy as np
import pytest

from policies.acceptance import FromDistributions
from sim.theory import speculative as th
from sim.tokens import Markov, Speculator, autoregressive, one_target_two_drafts, residual
from tests.sample import few

EXACT_RULES = ["modified_rejection", "naive_match"]


def random_markov(rng, vocabulary, order, concentration=0.5):
    return Markov(order=order, probabilities=rng.dirichlet(np.full(vocabulary, concentration), size=vocabulary**order))


def single(target, draft, **options):
    return Speculator(Markov.from_distribution(target), Markov.from_distribution(draft), **options)


def chi_square_p(counts, probabilities):
    """p-value of *counts* under *probabilities*, cells expected below 5 merged into one."""
    from scipy.stats import chisquare

    expected = counts.sum() * probabilities
    small = expected < 5.0
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return chisquare(counts, expected).pvalue


def by_hand(target, draft, k, length, state, vocabulary):
    """Output law by enumerating drafted tuples, acceptances and replacements one after another, orders up to 1."""
    q_of = lambda s: target.probabilities[s % len(target.probabilities)]  # noqa: E731
    p_of = lambda s: draft.probabilities[s % len(draft.probabilities)]  # noqa: E731
    out = {}

    def go_on(prefix, mass):
        if len(prefix) >= length:
            out[prefix[:length]] = out.get(prefix[:length], 0.0) + mass
            return
        start = prefix[-1] if prefix else state
        for drafted in itertools.product(range(vocabulary), repeat=k):
            probability, contexts = mass, [start, *drafted]
            for s, x in zip(contexts, drafted, strict=False):
                probability *= p_of(s)[x]
            going = probability
            for j, x in enumerate(drafted):
                q, p = q_of(contexts[j]), p_of(contexts[j])
                keep = min(1.0, q[x] / p[x])
                for y in range(vocabulary):
                    lost = going * (1.0 - keep) * residual(q, p)[y]
                    if lost:
                        go_on((*prefix, *drafted[:j], y), lost)
                going *= keep
            for y in range(vocabulary):
                if going:
                    go_on((*prefix, *drafted, y), going * q_of(contexts[k])[y])

    go_on((), 1.0)
    law = np.zeros((vocabulary,) * length)
    for sequence, mass in out.items():
        law[sequence] = mass
    return law


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_one_token_has_exactly_the_targets_distribution(rule):
    rng = np.random.default_rng(0)
    for _ in range(300):
        q, p = rng.dirichlet(np.full(rng.integers(2, 40), 0.4), size=2)
        np.testing.assert_allclose(single(q, p, rule=rule).output_distribution(1, 1), q, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("target_order", "draft_order"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_sequences_have_exactly_the_targets_distribution(rule, target_order, draft_order, k):
    rng = np.random.default_rng([target_order, draft_order])
    target, draft = random_markov(rng, 3, target_order), random_markov(rng, 3, draft_order)
    pair = Speculator(target, draft, rule=rule)
    law = pair.output_distribution(k, 6, state=0)
    assert law.shape == (3,) * 6
    np.testing.assert_allclose(law, pair.target_distribution(6), atol=1e-12, rtol=0)


def test_enumeration_agrees_with_walking_through_every_draft_by_hand():
    rng = np.random.default_rng(5)
    target, draft = random_markov(rng, 3, 1), random_markov(rng, 3, 1)
    law = Speculator(target, draft).output_distribution(2, 4, state=1)
    np.testing.assert_allclose(by_hand(target, draft, 2, 4, 1, 3), law, atol=1e-12, rtol=0)


def test_target_distribution_is_the_chain_rule():
    rng = np.random.default_rng(6)
    target, draft = random_markov(rng, 3, 1), random_markov(rng, 3, 0)
    law = Speculator(target, draft).target_distribution(3, state=2)
    p = target.probabilities
    assert law[0, 2, 1] == pytest.approx(p[2, 0] * p[0, 2] * p[2, 1], abs=1e-15)


@pytest.mark.parametrize("b", [0.7, 0.3, 2.0])
def test_lenient_output_is_the_closed_form_and_its_distance_the_gain_in_acceptance(b):
    rng = np.random.default_rng(8)
    for _ in range(100):
        q, p = rng.dirichlet(np.full(12, 0.5), size=2)
        pair = single(q, p, rule="lenient", b=b)
        out = pair.output_distribution(1, 1)
        np.testing.assert_allclose(out, th.lenient_output(q, p, b), atol=1e-12)
        gain = pair.acceptance()[0] - single(q, p).acceptance()[0]
        if b < 1.0:
            assert 0.5 * np.abs(out - q).sum() == pytest.approx(gain, abs=1e-12)
        else:
            assert gain < 0.0


@pytest.mark.parametrize(
    ("rule", "b"), [("modified_rejection", None), ("naive_match", None), ("lenient", 0.5), ("lenient", 3.0)]
)
def test_acceptance_is_the_same_in_the_engine_the_theory_and_the_policy(rule, b):
    q, p = np.random.default_rng(9).dirichlet(np.full(20, 0.5), size=2)
    expected = {
        "modified_rejection": lambda: np.minimum(q, p).sum(),
        "naive_match": lambda: (q * p).sum(),
        "lenient": lambda: th.lenient_acceptance(q, p, b),
    }[rule]()
    assert single(q, p, rule=rule, b=b).acceptance()[0] == pytest.approx(expected, abs=1e-12)
    assert FromDistributions(target=q, draft=p, rule=rule, b=b).alpha == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rule", few(EXACT_RULES, reason="a million samples"))
def test_a_million_samples_pass_the_chi_square_test(rule):
    # p > 0.001: a false alarm once in a thousand seeds; the seed is fixed.
    rng = np.random.default_rng([1, EXACT_RULES.index(rule)])
    q, p = rng.dirichlet(np.full(40, 0.4), size=2)
    done = single(q, p, rule=rule).rounds(np.zeros(1_000_000, dtype=np.int64), 1, rng)
    counts = np.bincount(done.tokens[:, 0], minlength=40)
    assert chi_square_p(counts, q) > 0.001
    accepted = done.accepted.mean()
    alpha = single(q, p, rule=rule).acceptance()[0]
    # Four standard errors: a false alarm once in 16,000.
    assert abs(accepted - alpha) < 4.0 * np.sqrt(alpha * (1.0 - alpha) / 1e6)


def test_a_wrong_residual_would_fail_the_chi_square_test():
    rng = np.random.default_rng(4)
    q, p = rng.dirichlet(np.full(40, 0.4), size=2)
    done = single(q, p, rule="lenient", b=0.95).rounds(np.zeros(1_000_000, dtype=np.int64), 1, rng)
    assert chi_square_p(np.bincount(done.tokens[:, 0], minlength=40), q) < 1e-6


def test_sequences_over_several_rounds_pass_the_chi_square_test():
    rng = np.random.default_rng(12)
    target, draft = random_markov(rng, 3, 1), random_markov(rng, 3, 1)
    pair = Speculator(target, draft)
    out, _ = pair.generate(5, 2, rng, state=1, sequences=60_000)
    counts = np.bincount(out @ 3 ** np.arange(4, -1, -1), minlength=3**5)
    assert chi_square_p(counts, pair.target_distribution(5, state=1).ravel()) > 0.001


def test_rounds_put_out_one_to_k_plus_one_tokens_and_pad_the_rest():
    rng = np.random.default_rng(13)
    target, draft = random_markov(rng, 5, 1), random_markov(rng, 5, 0)
    done = Speculator(target, draft).rounds(rng.integers(5, size=20_000), 3, rng)
    assert done.emitted.min() == 1
    assert done.emitted.max() == 4
    valid = np.arange(4) < done.emitted[:, None]
    assert (done.tokens[valid] >= 0).all()
    assert (done.tokens[~valid] == -1).all()


def test_the_targets_own_draft_is_always_accepted():
    rng = np.random.default_rng(14)
    target = random_markov(rng, 6, 1)
    assert (Speculator(target, target).rounds(np.zeros(1000, dtype=int), 5, rng).accepted == 5).all()


def test_drafts_that_the_target_never_says_are_never_accepted():
    pair = single([0.5, 0.5, 0.0], [0.0, 0.0, 1.0])
    done = pair.rounds(np.zeros(1000, dtype=int), 4, np.random.default_rng(0))
    assert (done.accepted == 0).all()
    np.testing.assert_allclose(pair.output_distribution(4, 1), [0.5, 0.5, 0.0], atol=1e-15)


@pytest.mark.parametrize("rule", ["modified_rejection", "naive_match", "lenient"])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_greedy_output_is_the_targets_greedy_output(rule, k):
    rng = np.random.default_rng(15)
    target = random_markov(rng, 12, 2).filtered(temperature=0.0)
    draft = random_markov(rng, 12, 1).filtered(temperature=0.0)
    pair = Speculator(target, draft, rule=rule, b=0.5 if rule == "lenient" else None)
    start = np.arange(0, 144, 9)
    out, _ = pair.generate(60, k, rng, state=start, sequences=start.size)
    alone = autoregressive(target, 60, rng, state=start, sequences=start.size)
    np.testing.assert_array_equal(out, alone)


def test_generated_rounds_add_up_and_the_last_is_cut():
    rng = np.random.default_rng(16)
    target = random_markov(rng, 4, 1)
    out, emitted = Speculator(target, target).generate(10, 3, rng, sequences=3)
    assert out.shape == (3, 10)
    assert [e.tolist() for e in emitted] == [[4, 4, 2]] * 3


def test_order_zero_statistics_are_the_iid_closed_forms():
    q, p = np.random.default_rng(17).dirichlet(np.full(15, 0.6), size=2)
    alpha = th.acceptance(q, p)
    found = single(q, p).statistics(5)
    assert found.alpha == pytest.approx(alpha, abs=1e-12)
    np.testing.assert_allclose(found.per_position, alpha ** np.arange(1, 6), atol=1e-12)
    assert found.mean_acceptance_length == pytest.approx(th.expected_tokens(alpha, 5), abs=1e-12)
    assert found.draft_acceptance_rate == pytest.approx((th.expected_tokens(alpha, 5) - 1) / 5, abs=1e-12)


def test_exact_statistics_agree_with_long_runs():
    rng = np.random.default_rng(18)
    target, draft = random_markov(rng, 6, 1), random_markov(rng, 6, 1)
    pair, k = Speculator(target, draft), 4
    exact = pair.statistics(k)
    state = np.zeros(4000, dtype=np.int64)
    total = []
    for step in range(60):
        done = pair.rounds(state, k, rng)
        state = done.tokens[np.arange(state.size), done.accepted]
        if step >= 30:
            total.append(done.emitted.mean())
    # Rounds of a chain are only weakly correlated, so the mean of 30 steps of 4,000 chains has a standard error of
    # about the pooled one; 5 of them fail by chance less than once in a million.
    error = np.std(total, ddof=1) / np.sqrt(len(total))
    assert abs(np.mean(total) - exact.mean_acceptance_length) < 5.0 * error


def test_one_target_two_drafts_give_one_text_distribution_at_two_speeds():
    target, close, uniform = one_target_two_drafts()
    good, poor = Speculator(target, close), Speculator(target, uniform)
    for pair in (good, poor):
        np.testing.assert_allclose(pair.output_distribution(3, 3), pair.target_distribution(3), atol=1e-12, rtol=0)
    assert good.acceptance()[0] == pytest.approx(0.9)
    assert poor.acceptance()[0] == pytest.approx(0.75)
    assert good.statistics(3).mean_acceptance_length > poor.statistics(3).mean_acceptance_length


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: single([1.0], [0.5, 0.5]), "share one vocabulary"),
        (lambda: single([1.0], [1.0], rule="typical"), "rule is one of"),
        (lambda: single([1.0], [1.0], rule="lenient"), "needs b > 0"),
        (lambda: single([1.0], [1.0], b=0.5), "b belongs to rule lenient"),
        (lambda: single([1.0], [1.0]).rounds([3], 1, np.random.default_rng(0)), "state is a whole number in"),
        (lambda: single([1.0], [1.0]).rounds([0], -1, np.random.default_rng(0)), "k is a whole number, 0 or more"),
        (lambda: single(np.full(30, 1 / 30), np.full(30, 1 / 30)).output_distribution(2, 8), "too many to enumerate"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
