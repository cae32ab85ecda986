"""Acceptance processes: their laws, and draws that depend on (seed, request, round) alone."""

import numpy as np
import pytest

from policies.acceptance import (
    BetaAlpha,
    FromDistributions,
    Iid,
    MeanLength,
    PerPosition,
    Recorded,
    Tree,
    TwoState,
    dense_tree,
    greedy_tree,
    path_products,
    read_recorded,
)
from sim.theory import speculative as th

HEADS = ((0.60, 0.15, 0.05), (0.50, 0.15, 0.05), (0.40, 0.10, 0.05), (0.30, 0.10))
RANDOM = [
    Iid(alpha=0.8),
    PerPosition(rates=(0.8, 0.6, 0.5, 0.45), kind="unconditional"),
    PerPosition(rates=(0.8, 0.6, 0.7, 0.9), kind="conditional"),
    MeanLength(mean=2.8, at_k=4),
    BetaAlpha(mean=0.7, sd=0.15),
    TwoState(alpha_good=0.9, alpha_bad=0.4, stay_good=0.8, stay_bad=0.7),
    FromDistributions(target=(0.5, 0.3, 0.2), draft=(0.2, 0.3, 0.5)),
    Tree(accuracies=HEADS, nodes=20),
]


def name(process):
    return type(process).__name__


def many(process, k, requests=2000, rounds=50, seed=1):
    return np.stack([process.accepted(i, 0, rounds, k, seed) for i in range(requests)])


@pytest.mark.parametrize("process", RANDOM, ids=name)
def test_counts_follow_the_stated_positions(process):
    # 100,000 rounds in 2,000 independent requests; each position within 5 standard errors over requests, which fails
    # by chance less than once in 100,000 for all positions and processes together.
    counts = many(process, 4)
    assert counts.dtype == np.int64
    assert counts.min() >= 0
    assert counts.max() <= 4
    for position, expected in enumerate(process.per_position(4), start=1):
        shares = (counts >= position).mean(axis=1)
        assert abs(shares.mean() - expected) < 5.0 * shares.std(ddof=1) / np.sqrt(shares.size)


@pytest.mark.parametrize("process", RANDOM, ids=name)
def test_mean_length_is_one_plus_the_positions(process):
    for k in range(5):
        assert process.mean_length(k) == pytest.approx(1.0 + process.per_position(k).sum())


@pytest.mark.parametrize("process", RANDOM, ids=name)
def test_more_drafted_tokens_keep_the_draws_of_every_round(process):
    long = process.accepted(7, 0, 200, 4, 3)
    for k in range(4):
        np.testing.assert_array_equal(process.accepted(7, 0, 200, k, 3), np.minimum(long, k))


@pytest.mark.parametrize("process", RANDOM, ids=name)
def test_rounds_are_addressed_by_number(process):
    whole = process.accepted(7, 0, 300, 4, 3)
    for start, n in ((0, 1), (1, 10), (123, 177), (299, 1), (40, 0)):
        np.testing.assert_array_equal(process.accepted(7, start, n, 4, 3), whole[start : start + n])


@pytest.mark.parametrize("process", RANDOM, ids=name)
def test_seeds_and_requests_have_draws_of_their_own(process):
    first = process.accepted(7, 0, 300, 4, 3)
    assert (process.accepted(8, 0, 300, 4, 3) != first).any()
    assert (process.accepted(7, 0, 300, 4, 4) != first).any()
    np.testing.assert_array_equal(process.accepted(7, 0, 300, 4, 3), first)


def test_rounds_beyond_the_prepared_table_continue_the_stream():
    process = Iid(alpha=0.5)
    whole = process.accepted(1, 0, 10_000, 3, 0)
    np.testing.assert_array_equal(process.accepted(1, 4000, 6000, 3, 0), whole[4000:])


@pytest.mark.parametrize("process", RANDOM, ids=name)
def test_processes_are_values(process):
    namespace = {cls.__name__: cls for cls in map(type, RANDOM)}
    assert eval(repr(process), namespace) == process
    assert {process: 1}[process] == 1


def test_counts_of_a_round_are_capped_geometric():
    from scipy.stats import chisquare

    # Chi-square over 100,000 rounds, p > 0.001.
    counts = np.bincount(many(Iid(alpha=0.7), 5).ravel(), minlength=6)
    assert chisquare(counts, counts.sum() * th.tokens_pmf(0.7, 5)).pvalue > 0.001


def test_draws_of_rounds_and_requests_are_not_correlated():
    # Under independence a correlation over 100,000 pairs has a standard deviation of 0.0032; five of them.
    counts = many(Iid(alpha=0.7), 5).astype(float)
    along = np.corrcoef(counts[:, :-1].ravel(), counts[:, 1:].ravel())[0, 1]
    across = np.corrcoef(counts[:-1].ravel(), counts[1:].ravel())[0, 1]
    assert abs(along) < 0.016
    assert abs(across) < 0.016


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 0), (1.0, 6)])
def test_certain_acceptance_is_certain(alpha, expected):
    assert (Iid(alpha=alpha).accepted(0, 0, 100_000, 6, 0) == expected).all()


def test_iid_mean_length_is_the_closed_form():
    for alpha in (0.0, 0.3, 0.9, 1.0):
        for k in (0, 1, 7):
            assert Iid(alpha=alpha).mean_length(k) == pytest.approx(th.expected_tokens(alpha, k))


def test_conditional_rates_multiply_into_unconditional_ones():
    conditional = PerPosition(rates=(0.8, 0.5, 0.9), kind="conditional")
    unconditional = PerPosition(rates=tuple(conditional.per_position(3)), kind="unconditional")
    np.testing.assert_array_equal(conditional.accepted(1, 0, 999, 3, 5), unconditional.accepted(1, 0, 999, 3, 5))


def test_mean_length_is_met_at_its_k_and_used_at_others():
    process = MeanLength(mean=2.8, at_k=4)
    assert process.mean_length(4) == pytest.approx(2.8, abs=1e-12)
    assert process.alpha == pytest.approx(th.alpha_from_mean_length(2.8, 4), abs=1e-12)
    assert process.mean_length(8) > 2.8
    assert MeanLength(mean=5.0, at_k=4).alpha == 1.0
    assert MeanLength(mean=1.0, at_k=4).alpha == 0.0


def test_beta_alphas_have_the_stated_mean_and_spread_and_stay_with_their_request():
    process = BetaAlpha(mean=0.7, sd=0.15)
    alphas = np.array([process.alpha_of(i, 9) for i in range(4000)])
    # Standard errors 0.0024 and about 0.0017; five of each.
    assert alphas.mean() == pytest.approx(0.7, abs=0.012)
    assert alphas.std() == pytest.approx(0.15, abs=0.009)
    np.testing.assert_array_equal(process.accepted(5, 0, 500, 4, 9), Iid(alpha=alphas[5]).accepted(5, 0, 500, 4, 9))
    assert BetaAlpha(mean=0.7, sd=0.0).alpha_of(3, 1) == 0.7


def test_two_states_have_the_stated_autocorrelation():
    process = TwoState.from_autocorrelation(alpha_good=0.95, alpha_bad=0.2, lag1=0.3, at_k=5)
    assert process.autocorrelation(5) == pytest.approx(0.3, abs=1e-12)
    counts = many(process, 5, requests=1000, rounds=200).astype(float)
    centred = counts - counts.mean()
    found = (centred[:, 1:] * centred[:, :-1]).mean(axis=1) / (centred**2).mean()
    assert abs(found.mean() - 0.3) < 5.0 * found.std(ddof=1) / np.sqrt(found.size)


def test_two_states_walk_like_a_chain_simulated_step_by_step():
    for stay_good, stay_bad in ((0.8, 0.7), (0.2, 0.3), (0.0, 0.0), (0.5, 0.5)):
        process = TwoState(alpha_good=1.0, alpha_bad=0.0, stay_good=stay_good, stay_bad=stay_bad)
        good = many(process, 1, requests=500, rounds=200) == 1
        stays = good[:, 1:][good[:, :-1]]
        moves = good[:, 1:][~good[:, :-1]]
        # About 50,000 moves each; 0.012 is five standard errors.
        assert stays.mean() == pytest.approx(stay_good, abs=0.012)
        assert moves.mean() == pytest.approx(1.0 - stay_bad, abs=0.012)
        assert good[:, 0].mean() == pytest.approx(process.good_share, abs=0.12)


def test_two_states_with_negative_autocorrelation():
    process = TwoState.from_autocorrelation(alpha_good=0.95, alpha_bad=0.1, lag1=-0.3, at_k=3)
    assert process.autocorrelation(3) == pytest.approx(-0.3, abs=1e-12)
    assert process.autocorrelation(3, lag=2) > 0.0


def test_recording_is_replayed_by_request_modulo_rows():
    recorded = Recorded(rows=((4, 0, 2), (1, 1, 3, 4)), recorded_k=4)
    assert recorded.accepted(0, 0, 3, 4, 99).tolist() == [4, 0, 2]
    assert recorded.accepted(3, 1, 3, 4, 0).tolist() == [1, 3, 4]
    assert recorded.accepted(1, 0, 4, 2, 0).tolist() == [1, 1, 2, 2]
    np.testing.assert_allclose(recorded.per_position(2), [6 / 7, 4 / 7])


def test_recording_is_read_from_a_file(tmp_path):
    path = tmp_path / "recorded.csv"
    path.write_text("request,round,accepted\n9,1,0\n9,0,3\n2,0,1\n")
    assert read_recorded(path, recorded_k=3) == Recorded(rows=((1,), (3, 0)), recorded_k=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("request,accepted\n1,2\n", "missing \\['round'\\]"),
        ("request,round,accepted\n1,0,many\n", "line 2: request, round and accepted are whole numbers"),
        ("request,round,accepted\n1,0,1\n1,0,1\n", "line 3: round 0 of request 1 comes twice"),
        ("request,round,accepted\n1,1,1\n", "must run from 0 without a gap"),
        ("request,round,accepted\n", "rows is empty"),
        ("request,round,accepted\n1,0,9\n", "accepted counts in \\[0, 3\\]"),
    ],
)
def test_a_broken_recording_is_refused(tmp_path, text, message):
    path = tmp_path / "recorded.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recorded(path, recorded_k=3)


def test_distributions_give_the_acceptance_of_their_rule():
    q, p = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    assert FromDistributions(target=q, draft=p).alpha == pytest.approx(0.7)
    assert FromDistributions(target=q, draft=p, rule="naive_match").alpha == pytest.approx(0.29)
    assert FromDistributions(target=q, draft=p, rule="lenient", b=0.5).alpha == pytest.approx(0.2 + 0.3 + 0.4)


def test_distributions_by_position_are_conditional_rates():
    process = FromDistributions(target=((0.5, 0.5), (1.0, 0.0)), draft=((0.9, 0.1), (0.5, 0.5)))
    np.testing.assert_allclose(process.per_position(2), [0.6, 0.3])
    with pytest.raises(ValueError, match="no single alpha"):
        _ = process.alpha


def test_tree_accepts_the_sum_of_path_products():
    tree = Tree(accuracies=HEADS, nodes=20)
    assert tree.width(tree.depth) == 21
    assert tree.mean_length(tree.depth) == pytest.approx(th.sparse_tree_mean_length(HEADS, 20))


def test_a_shallower_tree_is_its_upper_levels():
    tree = Tree(accuracies=HEADS, branching=(3, 2, 1))
    assert [tree.width(k) for k in range(4)] == [1, 4, 10, 16]
    assert tree.mean_length(1) == pytest.approx(1.8)
    assert tree.mean_length(2) == pytest.approx(1.8 + 0.8 * 0.65)


def test_tree_paths_and_their_products():
    assert dense_tree([2, 1]) == ((0,), (1,), (0, 0), (1, 0))
    assert path_products(HEADS, [(0,), (1, 0), (0, 0, 1)]) == pytest.approx([0.6, 0.075, 0.03])
    assert greedy_tree(HEADS, 4) == ((0,), (0, 0), (1,), (0, 0, 0))
    paths = ((0,), (1,), (0, 0))
    assert Tree(accuracies=HEADS, paths=paths).mean_length(2) == pytest.approx(1.0 + 0.75 + 0.3)


def test_a_larger_tree_gains_less_and_less():
    lengths = [Tree(accuracies=HEADS, nodes=n).mean_length(Tree(accuracies=HEADS, nodes=n).depth) for n in range(1, 60)]
    gains = np.diff(lengths)
    assert (gains > 0.0).all()
    assert (np.diff(gains) <= 1e-12).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Iid(alpha=1.2), "alpha is a probability in \\[0, 1\\]; got 1.2"),
        (lambda: Iid(alpha=float("nan")), "alpha is a probability in"),
        (lambda: Iid(alpha=0.5).accepted(0, 0, 3, -1, 0), "k is the number of drafted tokens, 0 or more"),
        (lambda: PerPosition(rates=(0.5, 0.6), kind="unconditional"), "cannot rise with the position"),
        (lambda: PerPosition(rates=(), kind="conditional"), "at least one probability"),
        (lambda: PerPosition(rates=(0.5,), kind="marginal"), "kind is conditional or unconditional"),
        (lambda: PerPosition(rates=(0.5,), kind="conditional").mean_length(2), "more positions than the 1"),
        (lambda: MeanLength(mean=5.1, at_k=4), "lies in \\[1, k \\+ 1\\] = \\[1, 5\\]; got 5.1"),
        (lambda: MeanLength(mean=0.9, at_k=4), "lies in"),
        (lambda: MeanLength(mean=1.0, at_k=0), "at_k is the number of drafted tokens"),
        (lambda: BetaAlpha(mean=0.5, sd=0.5), "sd must stay below sqrt"),
        (lambda: BetaAlpha(mean=0.5, sd=-0.1), "sd is a standard deviation"),
        (lambda: TwoState(alpha_good=0.4, alpha_bad=0.9, stay_good=0.5, stay_bad=0.5), "cannot exceed alpha_good"),
        (
            lambda: TwoState(alpha_good=0.9, alpha_bad=0.4, stay_good=1.0, stay_bad=0.5),
            "never left is Iid or BetaAlpha",
        ),
        (
            lambda: TwoState.from_autocorrelation(alpha_good=0.7, alpha_bad=0.6, lag1=0.5, at_k=4),
            "lag1 = 0.5 is out of reach",
        ),
        (lambda: Recorded(rows=((3, 1),), recorded_k=3).accepted(0, 0, 3, 3, 0), "needs round 3 but row 0"),
        (lambda: Recorded(rows=((3, 1),), recorded_k=3).accepted(0, 0, 1, 4, 0), "more than the 3 of the recording"),
        (lambda: FromDistributions(target=(0.5, 0.5), draft=(1.0,)), "share one vocabulary"),
        (lambda: FromDistributions(target=(0.5, 0.4), draft=(0.5, 0.5)), "target must sum to 1"),
        (lambda: FromDistributions(target=(1.0,), draft=(1.0,), rule="lenient"), "needs b > 0"),
        (lambda: FromDistributions(target=(1.0,), draft=(1.0,), b=0.5), "b belongs to rule lenient"),
        (lambda: Tree(accuracies=HEADS), "exactly one of nodes, branching and paths"),
        (lambda: Tree(accuracies=HEADS, nodes=500), "nodes is a whole number in"),
        (lambda: Tree(accuracies=((0.5, 0.6),), nodes=1), "cannot rise"),
        (lambda: Tree(accuracies=((0.6, 0.5),), nodes=1), "sum to 1 at most"),
        (lambda: Tree(accuracies=HEADS, paths=((0, 0),)), "hangs in the air"),
        (lambda: Tree(accuracies=HEADS, nodes=4).mean_length(9), "deeper than the tree"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
