"""Decoding methods: widths, tables of k, and tokens per round."""

import numpy as np
import pytest

from policies.acceptance import BetaAlpha, FromDistributions, Iid, PerPosition, Recorded, Tree, TwoState
from policies.decoding import Autoregressive, Speculative, best_table, statistics_of_counts
from sim.theory import speculative as th

PROCESSES = [
    Iid(alpha=0.8),
    Iid(alpha=0.1),
    PerPosition(rates=(0.8, 0.6, 0.5, 0.45), kind="unconditional"),
    BetaAlpha(mean=0.7, sd=0.15),
    TwoState(alpha_good=0.9, alpha_bad=0.4, stay_good=0.8, stay_bad=0.7),
    Tree(accuracies=((0.6, 0.2), (0.5, 0.2), (0.4, 0.2), (0.3, 0.2)), nodes=20),
    Recorded(rows=(tuple(np.random.default_rng(0).integers(0, 5, 300).tolist()),), recorded_k=4),
]


def speculative(acceptance, k=4, method="eagle", **options):
    return Speculative(method=method, num_speculative_tokens=k, acceptance=acceptance, **options)


def name(process):
    return type(process).__name__


def test_autoregressive_decoding_is_one_token_a_step():
    plain = Autoregressive()
    assert (plain.k(5), plain.query_tokens(5), plain.draft_steps(5), plain.max_query_tokens) == (0, 1, 0, 1)
    assert plain.round_tokens(3, 0, 4, 0, 1).tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="drafts nothing"):
        plain.round_tokens(3, 0, 4, 2, 1)


@pytest.mark.parametrize("process", PROCESSES, ids=name)
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 5, 100, 257])
def test_rounds_end_with_the_round_that_completes_the_output(process, n_tokens):
    drawn = speculative(process).round_tokens(11, 0, n_tokens, 4, 2)
    assert drawn.dtype == np.int64
    assert drawn.sum() >= n_tokens
    assert drawn[:-1].sum() < max(n_tokens, 1)
    assert ((drawn >= 1) & (drawn <= 5)).all()


@pytest.mark.parametrize("process", PROCESSES, ids=name)
def test_a_round_is_the_accepted_drafts_and_one_token_in_every_round(process):
    drawn = speculative(process).round_tokens(11, 0, 100, 4, 2)
    np.testing.assert_array_equal(drawn, process.accepted(11, 0, drawn.size, 4, 2) + 1)


@pytest.mark.parametrize("process", PROCESSES, ids=name)
def test_rounds_continue_where_they_were_left_off(process):
    decoding = speculative(process)
    whole = decoding.round_tokens(11, 0, 120, 4, 2)
    for rounds in (1, 7, whole.size - 1):
        rest = decoding.round_tokens(11, rounds, 120 - int(whole[:rounds].sum()), 4, 2)
        np.testing.assert_array_equal(np.concatenate([whole[:rounds], rest]), whole)


@pytest.mark.parametrize("process", PROCESSES, ids=name)
def test_changing_k_in_the_middle_keeps_the_draws_of_each_round(process):
    decoding = speculative(process, k=[[1, 8, 4], [9, None, 2]])
    start = decoding.round_tokens(11, 0, 200, 4, 2)[:10]
    rest = decoding.round_tokens(11, 10, 200 - int(start.sum()), 2, 2)
    np.testing.assert_array_equal(rest[:-1], np.minimum(process.accepted(11, 10, rest.size - 1, 4, 2), 2) + 1)
    plain = decoding.round_tokens(11, 10, 3, 0, 2)
    assert plain.tolist() == [1, 1, 1]


def test_k_of_zero_gives_ones():
    assert speculative(Iid(alpha=0.9)).round_tokens(1, 0, 5, 0, 0).tolist() == [1] * 5


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 3), (0.3, 2), (0.8, 4), (0.95, 8), (1.0, 5)])
def test_rounds_per_request_are_as_the_renewal_theory_says(alpha, k):
    # 2,000 requests of 64 tokens; five standard errors, a false alarm less than once in a million.
    decoding = speculative(Iid(alpha=alpha), k=k, method="draft_model")
    rounds = np.array([decoding.round_tokens(i, 0, 64, k, 5).size for i in range(2000)])
    error = 5.0 * rounds.std(ddof=1) / np.sqrt(rounds.size)
    assert abs(rounds.mean() - th.expected_rounds(64, alpha, k)) <= error + 1e-12


def test_a_recording_may_end_with_the_request():
    decoding = speculative(Recorded(rows=((4, 0, 4),), recorded_k=4))
    assert decoding.round_tokens(0, 0, 11, 4, 0).tolist() == [5, 1, 5]
    assert decoding.round_tokens(0, 0, 8, 4, 0).tolist() == [5, 1, 5]
    with pytest.raises(ValueError, match="ends after 3"):
        decoding.round_tokens(0, 0, 12, 4, 0)


def test_width_is_k_plus_one_or_the_tree_and_its_root():
    assert speculative(Iid(alpha=0.5), k=3).query_tokens(7) == 4
    tree = Tree(accuracies=((0.6, 0.2), (0.5, 0.2)), branching=(2, 2))
    decoding = speculative(tree, k=2, method="medusa")
    assert decoding.query_tokens(1) == decoding.max_query_tokens == 7


def test_draft_steps_are_passes_of_a_model():
    assert speculative(Iid(alpha=0.5), k=3, method="draft_model").draft_steps(1) == 3
    assert speculative(Iid(alpha=0.5), k=3, method="ngram").draft_steps(1) == 0
    assert speculative(Iid(alpha=0.5), k=3, method="medusa").draft_steps(1) == 0


def test_k_follows_the_running_batch():
    decoding = speculative(Iid(alpha=0.5), k=[[1, 8, 5], [9, 64, 3], [65, 999, 0]])
    assert [decoding.k(n) for n in (1, 8, 9, 64, 65, 999)] == [5, 5, 3, 3, 0, 0]
    assert [decoding.query_tokens(n) for n in (8, 64, 65)] == [6, 4, 1]
    assert decoding.max_query_tokens == 6
    with pytest.raises(ValueError, match="the table ends at 999"):
        decoding.k(1000)


def test_an_open_table_has_no_end():
    assert speculative(Iid(alpha=0.5), k=[[1, 8, 5], [9, None, 1]]).k(10**6) == 1


def test_methods_are_values():
    first, second = (speculative(Iid(alpha=0.5), k=[[1, 8, 5], [9, None, 1]]) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert eval(repr(first), {"Speculative": Speculative, "Iid": Iid}) == first


def test_best_table_follows_the_load_aware_speedup():
    server, acceptance, batches = th.SPECDECODE_BENCH, Iid(alpha=0.8), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    table = best_table(
        lambda width, batch: server.step_s(width, batch, 500) + server.overhead_s,
        lambda batch: 0.2e-3,
        acceptance,
        8,
        batches,
    )
    assert table[0][0] == 1
    assert table[-1][1] is None
    chosen = speculative(acceptance, k=table)
    k = np.arange(9)
    for batch in batches:
        gain = th.load_aware_speedup(
            th.expected_tokens(0.8, k),
            k,
            server.step_s(1, batch, 500),
            server.step_s(k + 1, batch, 500),
            0.2e-3,
            overhead_s=server.overhead_s,
        )
        assert chosen.k(batch) == gain.argmax()
    assert chosen.k(1) > chosen.k(512)


def test_best_table_drafts_nothing_where_drafting_costs_more_than_it_gives():
    assert best_table(lambda w, b: 1.0 * w, lambda b: 0.1, Iid(alpha=0.9), 5, [1, 10]) == ((1, None, 0),)


def test_best_table_counts_the_overhead_and_gives_a_tie_to_the_smaller_k():
    perfect = Iid(alpha=1.0)

    def table(overhead_s):
        return best_table(lambda w, b: 1.0, lambda b: 0.0, perfect, 1, [1], overhead_s)

    # Two tokens in a step of 1 s and the overhead, against one token in 1 s.
    assert table(0.9) == ((1, None, 1),)
    assert table(1.0) == table(1.1) == ((1, None, 0),)


def test_best_table_counts_the_width_of_a_tree():
    tree = Tree(accuracies=((0.6, 0.2), (0.5, 0.2)), branching=(2, 2))
    table = best_table(lambda w, b: max(1.0, w * b / 70.0), lambda b: 0.0, tree, 2, [1, 23, 100])
    assert [row[2] for row in table] == [2, 1, 0]


def test_the_four_rates_have_four_names():
    accepted = Iid(alpha=0.8).accepted(1, 0, 200_000, 5, 0)
    found = statistics_of_counts({(5, 5): np.bincount(accepted, minlength=6).tolist()})
    assert found.num_drafts == 200_000
    assert found.num_draft_tokens == 1_000_000
    # Standard errors are near 0.004 for the length; the others are smaller.
    assert found.mean_acceptance_length == pytest.approx(th.expected_tokens(0.8, 5), abs=0.02)
    assert found.alpha == pytest.approx(0.8, abs=0.005)
    assert found.draft_acceptance_rate == pytest.approx((found.mean_acceptance_length - 1.0) / 5.0, abs=1e-12)
    np.testing.assert_allclose(found.acceptance_rate_per_pos, 0.8 ** np.arange(1, 6), atol=0.006)
    assert found.draft_acceptance_rate < found.alpha


def test_statistics_by_hand_with_rounds_of_different_k():
    found = statistics_of_counts({(2, 2): [0, 0, 1], (3, 3): [1, 0, 0, 0], (1, 1): [0, 1]})
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 6, 3)
    assert found.num_accepted_tokens_per_pos == (2, 1, 0)
    assert found.acceptance_rate_per_pos == pytest.approx((2 / 3, 1 / 2, 0.0))
    assert found.alpha == pytest.approx(3 / 4)
    assert found.mean_acceptance_length == 2.0


def test_statistics_without_drafts_are_not_numbers():
    found = statistics_of_counts({})
    assert found.num_drafts == 0
    assert np.isnan(found.draft_acceptance_rate)


def test_rule_is_given_where_there_are_distributions():
    process = FromDistributions(target=(0.5, 0.5), draft=(0.9, 0.1), rule="lenient", b=0.5)
    assert speculative(process, rule="lenient", b=0.5).acceptance.mean_length(1) == pytest.approx(1.0 + process.alpha)
    with pytest.raises(ValueError, match="contradicts the acceptance's own rule"):
        speculative(process, rule="modified_rejection")
    with pytest.raises(ValueError, match="use FromDistributions"):
        speculative(Iid(alpha=0.5), rule="naive_match")
    with pytest.raises(ValueError, match="without a rule"):
        speculative(Iid(alpha=0.5), b=0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: speculative(Iid(alpha=0.5), method="guess"),
            "method is one of draft_model, ngram, medusa, eagle, mtp",
        ),
        (lambda: speculative(Iid(alpha=0.5), k=-1), "num_speculative_tokens is 0 or more; got -1"),
        (lambda: speculative(Iid(alpha=0.5), k=2.5), "is a whole number or rows"),
        (lambda: speculative(Iid(alpha=0.5), k=[]), "is a whole number or rows"),
        (lambda: speculative(Iid(alpha=0.5), k=[[2, 8, 3]]), "starts at batch 2; expected 1"),
        (lambda: speculative(Iid(alpha=0.5), k=[[1, 8, 3], [10, 20, 1]]), "starts at batch 10; expected 9"),
        (lambda: speculative(Iid(alpha=0.5), k=[[1, None, 3], [9, 20, 1]]), "only the last row may be"),
        (lambda: speculative(Iid(alpha=0.5), k=[[1, 0, 3]]), "before it starts"),
        (lambda: speculative(Iid(alpha=0.5), k=[[1, 8, -3]]), "a k of 0 or more"),
        (lambda: speculative(Iid(alpha=0.5), k=[[1, 8]]), "is \\[lowest batch, highest batch, k\\]"),
        (lambda: speculative(PerPosition(rates=(0.5,), kind="conditional"), k=2), "more positions than the 1"),
        (lambda: speculative(Tree(accuracies=((0.5,),), nodes=1), k=1, method="ngram"), "method ngram drafts a chain"),
        (lambda: speculative(Iid(alpha=0.5)).round_tokens(0, 0, -1, 4, 0), "n_tokens and round_start are 0 or more"),
        (lambda: best_table(lambda w, b: 1.0, lambda b: 0.0, Iid(alpha=0.5), 2, [2, 4]), "batches rise and start at 1"),
        (lambda: best_table(lambda w, b: 0.0, lambda b: 0.0, Iid(alpha=0.5), 2, [1]), "expected a positive time"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
