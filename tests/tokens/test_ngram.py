"""N-gram models of the bundled text, and how well small ones draft for larger ones."""

import numpy as np
import pytest

from sim.tokens import Speculator, Tokenizer, bundled_text, ngram_acceptance, ngram_models, train_ngram


def test_bundled_text_is_long_enough_to_learn_from():
    assert 1500 <= len(bundled_text().split()) <= 3000


@pytest.mark.parametrize("level", ["character", "word"])
def test_tokenizer_takes_text_apart_and_back(level):
    tokenizer = Tokenizer.of("a queue, a queue.", level=level)
    assert tokenizer.decode(tokenizer.encode("a queue")) == "a queue"


def test_rare_words_become_unknown():
    tokenizer = Tokenizer.of("a a a b b c d", level="word", max_vocabulary=3)
    assert tokenizer.vocabulary == ("a", "b", "<unk>")
    assert tokenizer.encode("a c e").tolist() == [0, 2, 2]


def test_unigram_is_the_smoothed_frequency():
    model = train_ngram([0, 0, 0, 1], 3, 1, pseudo_count=1.0)
    np.testing.assert_allclose(model.probabilities, [[4 / 7, 2 / 7, 1 / 7]])


def test_bigram_mixes_in_the_unigram_by_the_number_of_followers():
    tokens, unigram = [0, 1, 0, 1, 0, 0], train_ngram([0, 1, 0, 1, 0, 0], 2, 1).probabilities[0]
    # After 0: 1, 1, 0 (three seen, two distinct); after 1: 0, 0 (two seen, one distinct).
    expected = [[(1 + 2 * unigram[0]) / 5, (2 + 2 * unigram[1]) / 5], [(2 + unigram[0]) / 3, unigram[1] / 3]]
    np.testing.assert_allclose(train_ngram(tokens, 2, 2).probabilities, expected)


def test_an_unseen_context_takes_the_shorter_ones_distribution():
    unigram, bigram = (train_ngram([0, 1, 0, 1, 2], 3, n) for n in (1, 2))
    np.testing.assert_allclose(bigram.probabilities[2], unigram.probabilities[0])


def test_trigram_state_is_read_in_the_order_of_the_text():
    model = train_ngram([0, 1, 2] * 50, 3, 3)
    state = 0 * 3 + 1  # the last two tokens were 0, then 1
    assert model.probabilities[state].argmax() == 2
    assert model.probabilities[state, 2] > 0.95


def test_every_row_is_a_positive_distribution():
    for model in ngram_models((1, 2, 3)):
        assert (model.probabilities > 0.0).all()
        np.testing.assert_allclose(model.probabilities.sum(axis=-1), 1.0, atol=1e-12)


def test_longer_contexts_draft_better():
    unigram, bigram = (ngram_acceptance(3, n, 4) for n in (1, 2))
    assert 0.2 < unigram.alpha < bigram.alpha < 0.9
    assert unigram.mean_acceptance_length < bigram.mean_acceptance_length
    assert list(bigram.per_position) == sorted(bigram.per_position, reverse=True)


def test_real_acceptance_is_not_iid():
    found = ngram_acceptance(3, 2, 6)
    assert abs(found.per_position[5] - found.alpha**6) > 1e-4


def test_words_work_as_well_as_characters():
    found = ngram_acceptance(2, 1, 3, level="word", max_vocabulary=300)
    assert 0.2 < found.alpha < 0.9


def test_a_narrow_nucleus_changes_acceptance():
    target, draft = (model.filtered(top_p=0.8) for model in ngram_models((3, 2)))
    narrow = Speculator(target, draft).statistics(4)
    assert narrow.alpha != pytest.approx(ngram_acceptance(3, 2, 4).alpha, abs=1e-3)


def test_generated_text_keeps_the_targets_words_likely():
    tokenizer = Tokenizer.of(bundled_text())
    target, draft = ngram_models((3, 1))
    out, emitted = Speculator(target, draft).generate(400, 4, np.random.default_rng(1))
    text = tokenizer.decode(out[0])
    assert len(text) == 400
    assert sum(int(e) for e in emitted[0]) == 400
    assert " the" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tokenizer.of("  "), "the text is empty"),
        (lambda: Tokenizer.of("abc").encode("xyz"), "is not in the vocabulary"),
        (lambda: Tokenizer.of("abc", level="syllable"), "level is character or word"),
        (lambda: train_ngram([0, 5], 3, 1), "ids in \\[0, 3\\)"),
        (lambda: train_ngram([0, 1], 3, 0), "n and vocabulary are 1 or more"),
        (lambda: train_ngram([0] * 10, 1000, 3), "lower n or max_vocabulary"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
