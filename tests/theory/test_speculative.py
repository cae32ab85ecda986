"""The closed forms of speculative decoding against every printed row, their limits, and each other."""

import numpy as np
import pytest

from sim.theory import speculative as th
from sim.theory.published import published


def rows(name, *columns):
    return [tuple(float(row[c]) for c in columns) for row in published(name)]


@pytest.mark.parametrize(("alpha", "k", "printed"), rows("spec_notes_expected_tokens", "alpha", "k", "expected_tokens"))
def test_expected_tokens_of_the_notes(alpha, k, printed):
    assert th.expected_tokens(alpha, k) == pytest.approx(printed, abs=0.001 + 1e-9)  # printed values are truncated


@pytest.mark.parametrize(("alpha", "k", "c", "printed"), rows("spec_notes_speedup", "alpha", "k", "c", "speedup"))
def test_speedup_of_the_notes(alpha, k, c, printed):
    assert th.speedup(alpha, k, c) == pytest.approx(printed, abs=0.001 + 1e-9)


@pytest.mark.parametrize(
    ("alpha", "k", "operations", "speed"),
    rows("spec_leviathan_ops_speed", "alpha", "k", "operations_factor", "speedup"),
)
def test_leviathan_table_1_has_no_draft_cost(alpha, k, operations, speed):
    assert th.operations_factor(alpha, k) == pytest.approx(operations, abs=0.005)
    assert th.speedup(alpha, k, 0.0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    "row", published("spec_leviathan_t5"), ids=lambda r: f"{r['task']}-{r['draft']}-{r['temperature']}"
)
def test_leviathan_t5_expected_column(row):
    # The paper prints three rows 0.05 to 0.07 above its own formula.
    above = {("EnDe", "T5-base", "1"), ("EnDe", "T5-large", "1"), ("CNNDM", "T5-large", "1")}
    tolerance = 0.1 if (row["task"], row["draft"], row["temperature"]) in above else 0.05
    value = th.speedup(float(row["alpha"]), int(row["k"]), float(row["c"]))
    assert value == pytest.approx(float(row["expected_speedup"]), abs=tolerance)


def test_optimal_k_grid():
    stated = rows("spec_optimal_k", "alpha", "c", "optimal_k")
    assert [(alpha, c, th.optimal_k(alpha, c)) for alpha, c, _ in stated] == stated


def test_optimal_k_is_the_argmax_and_works_on_arrays():
    alpha, c = np.meshgrid(np.linspace(0.05, 0.95, 19), [0.01, 0.07, 0.23, 0.6])
    k = np.arange(200)
    argmax = th.speedup(alpha[..., None], k, c[..., None]).argmax(axis=-1)
    found = th.optimal_k(alpha, c)
    np.testing.assert_allclose(th.speedup(alpha, found, c), th.speedup(alpha, argmax, c), rtol=1e-12)
    assert (found <= argmax).all()


def test_optimal_k_with_a_free_draft_is_the_cap():
    assert th.optimal_k(0.8, 0.0, k_max=40) == 40
    assert th.optimal_k(0.0, 0.0, k_max=40) == 0


def test_chinchilla_theory_values():
    for r_prime, printed in ((0.62, 2.05), (0.8, 2.65)):
        assert th.measured_rate_speedup(r_prime, 4, 1.8e-3, 14.1e-3) == pytest.approx(printed, abs=0.01)


def test_chinchilla_iid_optimum_is_four():
    alpha = th.alpha_from_mean_length(0.62 * 5, 4)
    assert alpha == pytest.approx(0.758, abs=5e-4)
    assert th.optimal_k(alpha, 1.8 / 14.1) == 4


def test_gpt2_article():
    facts = {row["quantity"]: float(row["value"]) for row in published("spec_toyllm")}
    draft_s, target_s, k = facts["t_draft_ms"] * 1e-3, facts["t_target_ms"] * 1e-3, int(facts["K"])
    r_prime = facts["r_prime"]
    assert th.measured_rate_speedup(r_prime, k, draft_s, target_s) == pytest.approx(2.463, abs=0.005)
    assert th.time_for_tokens_s(260, r_prime, k, draft_s, target_s) == pytest.approx(7.74, abs=0.005)


def test_measured_rate_form_is_the_theorem_in_other_letters():
    alpha, k, c = 0.73, 5, 0.09
    r_prime = th.expected_tokens(alpha, k) / (k + 1)
    assert th.measured_rate_speedup(r_prime, k, c, 1.0) == pytest.approx(th.speedup(alpha, k, c), rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "overhead", "printed"), rows("spec_medusa", "tokens_per_step", "overhead", "speedup")
)
def test_medusa_table(tokens, overhead, printed):
    assert th.medusa_speedup(tokens, overhead) == pytest.approx(printed, abs=0.03)


def test_bigram_draft_of_leviathan_section_3_6():
    assert th.speedup(0.2, 3, 0.0) == pytest.approx(1.248, abs=1e-9)


@pytest.mark.parametrize(("batch", "printed"), rows("spec_decode_bench", "batch", "speedup"))
def test_specdecode_bench_speedup_falls_with_the_batch(batch, printed):
    assert th.server_speedup(3.0, 5, batch, 500) == pytest.approx(printed, rel=0.005)


def test_server_speedup_is_the_load_aware_form():
    server, batch = th.SPECDECODE_BENCH, 64
    general = th.load_aware_speedup(
        2.0,
        1,
        server.step_s(1, batch, 500),
        server.step_s(2, batch, 500),
        server.draft_s(batch, 500),
        overhead_s=server.overhead_s,
    )
    assert th.server_speedup(2.0, 1, batch, 500) == pytest.approx(general, rel=1e-12)


def test_load_aware_form_becomes_the_theorem_when_width_and_overhead_are_free():
    alpha, k, c = 0.8, 4, 0.05
    value = th.load_aware_speedup(th.expected_tokens(alpha, k), k, 2e-3, 2e-3, c * 2e-3)
    assert value == pytest.approx(th.speedup(alpha, k, c), rel=1e-12)


def test_crossover_batch_is_where_the_server_speedup_is_one():
    batch = th.crossover_batch(3.0, 5, 500)
    assert 400 < batch < 512
    assert th.server_speedup(3.0, 5, batch, 500) == pytest.approx(1.0, abs=1e-12)
    assert th.server_speedup(3.0, 5, batch - 1, 500) > 1.0 > th.server_speedup(3.0, 5, batch + 1, 500)


def test_crossover_batch_is_infinite_or_zero_where_speculation_always_or_never_gains():
    assert th.crossover_batch(6.0, 5, 500) == np.inf
    assert th.crossover_batch(1.0, 5, 500) == 0.0


def test_verification_is_free_up_to_the_ridge():
    assert th.free_verification_batch(300.0, 4) == 60.0


@pytest.mark.parametrize("k", [0, 1, 4, 17])
def test_limits_are_exact(k):
    assert th.expected_tokens(1.0, k) == k + 1
    assert th.expected_tokens(0.0, k) == 1.0
    assert th.expected_tokens(0.37, 0) == 1.0
    assert th.speedup(0.37, 0, 0.4) == 1.0
    assert th.speedup(1.0, k, 0.0) == k + 1
    assert th.speedup(0.8, k, 0.0) == th.expected_tokens(0.8, k)
    assert th.operations_factor(1.0, k) == 1.0


def test_expected_tokens_near_one_matches_the_sum():
    for alpha in (1.0 - 1e-15, 1.0 - 1e-9, 0.999, 1e-12):
        assert th.expected_tokens(alpha, 30) == pytest.approx(sum(alpha**j for j in range(31)), rel=1e-13)


def test_expected_tokens_broadcasts():
    grid = th.expected_tokens(np.linspace(0, 1, 5)[:, None], np.arange(4))
    assert grid.shape == (5, 4)
    assert grid[2, 3] == th.expected_tokens(0.5, 3)


def test_pmf_has_the_closed_mean_and_covers_one_to_k_plus_one():
    alpha, k = np.array([0.0, 0.3, 0.9, 1.0]), 6
    pmf = th.tokens_pmf(alpha, k)
    assert pmf.shape == (4, 7)
    np.testing.assert_allclose(pmf.sum(axis=-1), 1.0, atol=1e-15)
    np.testing.assert_allclose(pmf @ np.arange(1, 8), th.expected_tokens(alpha, k), rtol=1e-13)
    assert th.tokens_variance(1.0, k) == 0.0
    assert th.tokens_variance(0.5, 1) == pytest.approx(0.25)


def test_accepted_drafts_leave_out_the_targets_own_token():
    assert th.accepted_drafts(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)


def test_memory_reads_fall_by_the_tokens_per_round():
    assert th.memory_reads_reduction(0.7, 3) == th.expected_tokens(0.7, 3)


def test_expected_rounds_count_the_cut_at_the_end():
    assert th.expected_rounds(1, 0.9, 8) == 1.0
    assert th.expected_rounds(9, 1.0, 8) == 1.0
    assert th.expected_rounds(10, 1.0, 8) == 2.0
    assert th.expected_rounds(7, 0.0, 3) == 7.0
    # Two tokens, k = 1: one round with probability alpha, else two.
    assert th.expected_rounds(2, 0.3, 1) == pytest.approx(1.7)


def test_expected_rounds_approach_the_long_run_rate():
    n, alpha, k = 4000, 0.7, 4
    assert th.expected_rounds(n, alpha, k) == pytest.approx(n / th.expected_tokens(alpha, k), rel=1e-3)


def test_speculation_can_improve_exactly_when_alpha_exceeds_c():
    alpha, c = np.meshgrid(np.linspace(0.01, 0.99, 29), np.linspace(0.015, 0.9, 17))
    gains = th.best_speedup(alpha, c) > 1.0 + 1e-12
    np.testing.assert_array_equal(gains, th.improves(alpha, c))
    better = th.best_speedup(alpha, c) >= th.guaranteed_speedup(alpha, c) - 1e-12
    assert better[th.improves(alpha, c)].all()


def test_break_even_alpha_gives_a_speedup_of_one():
    c, k = np.array([0.02, 0.1, 0.5, 1.0]), np.array([1, 4, 8])[:, None]
    alpha = th.break_even_alpha(k, c)
    np.testing.assert_allclose(th.speedup(alpha, k, c), 1.0, atol=1e-12)
    np.testing.assert_allclose(alpha[0], c, atol=1e-12)  # one drafted token: corollary 3.9
    assert th.break_even_alpha(0, 0.3) == 0.0
    assert th.break_even_alpha(5, 0.0) == 0.0
    assert np.isnan(th.break_even_alpha(2, 1.2))


def test_no_fixed_k_beats_the_oracle():
    for alpha in (0.2, 0.6, 0.9):
        assert th.expected_tokens(alpha, 200) <= th.oracle_tokens(alpha)
    assert th.oracle_tokens(1.0) == np.inf


def test_alpha_from_mean_length_inverts_expected_tokens():
    alpha, k = np.linspace(0.0, 1.0, 21), np.array([1, 3, 8])[:, None]
    np.testing.assert_allclose(th.alpha_from_mean_length(th.expected_tokens(alpha, k), k), alpha + 0 * k, atol=1e-12)


def test_the_rates_that_are_all_called_acceptance_rate_differ():
    alpha, k = 0.8, 5
    conditional = np.full(k, alpha)
    per_position = th.unconditional_rates(conditional)
    length = th.mean_length_from_positions(per_position)
    assert length == pytest.approx(th.expected_tokens(alpha, k))
    assert th.draft_acceptance_rate(length, k) == pytest.approx(per_position.mean())
    np.testing.assert_allclose(th.conditional_rates(per_position), conditional)
    assert th.draft_acceptance_rate(length, k) < alpha


def test_conditional_rates_after_a_position_never_reached_are_zero():
    np.testing.assert_array_equal(th.conditional_rates([0.5, 0.0, 0.0]), [0.5, 0.0, 0.0])


def test_iid_alpha_from_one_position_overpredicts_the_published_length():
    lengths = {
        int(r["k"]): float(r["mean_acceptance_length"])
        for r in published("spec_llama4_eagle3")
        if r["task"] == "coding"
    }
    alpha = th.alpha_from_mean_length(lengths[1], 1)
    assert th.expected_tokens(alpha, 7) / lengths[7] - 1.0 == pytest.approx(0.25, abs=0.03)


@pytest.fixture
def pairs():
    rng = np.random.default_rng(7)
    q, p = rng.dirichlet(np.full(30, 0.3), size=(2, 500))
    return q, p


def test_acceptance_is_one_minus_total_variation(pairs):
    q, p = pairs
    np.testing.assert_allclose(th.acceptance(q, p), 1.0 - 0.5 * np.abs(q - p).sum(axis=-1), atol=1e-12)


def test_naive_and_one_shot_acceptance_never_beat_the_modified_rule(pairs):
    q, p = pairs
    assert (th.naive_acceptance(q, p) <= th.acceptance(q, p)).all()
    assert (th.one_shot_acceptance(q, p) <= th.acceptance(q, p)).all()


def test_one_shot_acceptance_by_hand():
    assert th.one_shot_acceptance([0.5, 0.5], [0.25, 0.75]) == pytest.approx(0.5)
    assert th.one_shot_acceptance([0.5, 0.5], [1.0, 0.0]) == 0.0


@pytest.mark.parametrize("b", [0.9, 0.5, 0.1, 1e-3])
def test_lenient_distance_is_the_gain_in_acceptance(pairs, b):
    q, p = pairs
    gain = th.lenient_acceptance(q, p, b) - th.acceptance(q, p)
    np.testing.assert_allclose(th.lenient_distance(q, p, b), gain, atol=1e-12)
    np.testing.assert_allclose(th.lenient_output(q, p, b).sum(axis=-1), 1.0, atol=1e-12)
    assert (gain > 0.0).all()


def test_lenient_output_runs_from_target_to_draft(pairs):
    q, p = pairs
    np.testing.assert_allclose(th.lenient_output(q, p, 1.0), q, atol=1e-12)
    np.testing.assert_allclose(th.lenient_output(q, p, 1e-200), p, atol=1e-9)


def test_strictness_above_one_costs_acceptance(pairs):
    q, p = pairs
    np.testing.assert_allclose(th.lenient_acceptance(q, p, 2.0), th.acceptance(q, p) / 2.0, atol=1e-12)


def test_at_temperature_zero_lenience_does_nothing_and_naive_equals_modified():
    one, other = np.eye(4)[0], np.eye(4)[2]
    for target, draft, expected in ((one, one, 1.0), (one, other, 0.0)):
        assert th.acceptance(target, draft) == th.naive_acceptance(target, draft) == expected
        assert th.lenient_acceptance(target, draft, 0.3) == expected


def test_typical_acceptance_is_stricter_for_sure_targets():
    assert th.typical_acceptance_threshold([1.0, 0.0]) == pytest.approx(0.09)
    assert th.typical_acceptance_threshold(np.full(10, 0.1)) == pytest.approx(0.009)


def test_dense_tree_nodes():
    assert th.dense_tree_nodes([4, 4, 4]) == 4 + 16 + 64
    assert th.dense_tree_nodes([2, 3]) == 8


def test_chain_is_a_tree_of_one_guess_per_head():
    heads = [[0.8], [0.8], [0.8]]
    assert th.dense_tree_mean_length(heads, [1, 1, 1]) == pytest.approx(th.expected_tokens(0.8, 3))
    assert th.sparse_tree_mean_length(heads, 3) == pytest.approx(th.expected_tokens(0.8, 3))


def test_sparse_tree_beats_a_dense_one_of_the_same_size():
    heads = [[0.6 * 0.35**i for i in range(6)] for _ in range(4)]
    dense = th.dense_tree_mean_length(heads, [2, 2, 2, 2])
    assert th.sparse_tree_mean_length(heads, th.dense_tree_nodes([2, 2, 2, 2])) > dense


def test_sparse_tree_is_optimal_on_a_small_case():
    import itertools

    heads = [[0.6, 0.25], [0.5, 0.3]]
    every = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    for nodes in range(1, 7):
        best = max(
            th.tree_mean_length(heads, tree)
            for tree in itertools.combinations(every, nodes)
            if all(len(p) == 1 or p[:-1] in tree for p in tree)
        )
        assert th.sparse_tree_mean_length(heads, nodes) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: th.expected_tokens(1.2, 3), "alpha is a probability in [0, 1]; got 1.2"),
        (lambda: th.expected_tokens(np.array([0.5, -0.1]), 3), "alpha is a probability in [0, 1]; got -0.1"),
        (lambda: th.expected_tokens(float("nan"), 3), "alpha must be finite"),
        (lambda: th.expected_tokens(0.5, -1), "k is a whole number, 0 or more; got -1"),
        (lambda: th.expected_tokens(0.5, 2.5), "k is a whole number"),
        (lambda: th.speedup(0.5, 2, -0.1), "c must be 0 or more; got -0.1"),
        (lambda: th.alpha_from_mean_length(6.5, 5), "lies in [1, k + 1]; got 6.5 with k = 5"),
        (lambda: th.alpha_from_mean_length(0.9, 5), "lies in [1, k + 1]"),
        (lambda: th.mean_length_from_positions([0.5, 0.6]), "cannot rise with the position"),
        (lambda: th.conditional_rates([0.5, 0.6]), "cannot rise with the position"),
        (lambda: th.acceptance([0.5, 0.4], [0.5, 0.5]), "target must sum to 1"),
        (lambda: th.acceptance([0.5, 0.5], [1.0]), "share one vocabulary"),
        (lambda: th.lenient_acceptance([1.0], [1.0], 0.0), "b must be greater than 0"),
        (lambda: th.measured_rate_speedup(0.1, 4, 1.0, 1.0), "at least 1 / (k + 1)"),
        (lambda: th.server_speedup(7.0, 5, 1, 500), "mean_length lies in [1, k + 1]"),
        (lambda: th.tokens_pmf(0.5, np.array([1, 2])), "k is one whole number here"),
        (lambda: th.dense_tree_nodes([2, 0]), "branching is a whole number, 1 or more"),
        (lambda: th.sparse_tree_mean_length([[0.5]], 2), "nodes is a whole number in [1, 1]"),
        (lambda: th.tree_mean_length([[0.5, 0.6]], [(0,)]), "cannot rise"),
        (lambda: th.tree_mean_length([[0.5]], [(0, 0)]), "there are 1 heads"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below, brackets and all
        call()
    assert message in str(error.value)
