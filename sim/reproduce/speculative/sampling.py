"""Speculative sampling over vocabularies: exactness, acceptance, lenience and greedy decoding, token by token.

No event is simulated here: `sim.tokens` runs the algorithm of the papers on distributions, and its exact laws stand beside.
The distributions are ours, drawn at random; what is stated holds for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sim.reproduce.rows import Row
from sim.reproduce.speculative.runs import statement
from sim.theory import speculative as theory
from sim.tokens import Markov, Speculator, autoregressive, ngram_models

_PAIRS = 200
_ROUNDS = 1_000_000
_OURS = "the distributions are ours"


def rows(quick: bool) -> Iterator[Row]:
    """Exact output, acceptance, the naive and the lenient rule, and temperature 0."""
    rng = np.random.default_rng(20)
    pairs = [_pair(rng, vocabulary) for vocabulary in rng.integers(2, 50, _PAIRS)]
    yield from _exact(pairs)
    yield from _by_sampling(_ROUNDS // 10 if quick else _ROUNDS)
    yield from _naive(pairs)
    yield from _lenient(pairs)
    yield from _greedy()


def _pair(rng: np.random.Generator, vocabulary: int) -> tuple[Markov, Markov]:
    target, draft = rng.dirichlet(np.full(vocabulary, 0.5), 2)
    return Markov.from_distribution(target), Markov.from_distribution(draft)


def _identity(experiment: str, quantity: str, largest: float, case: str = f"{_PAIRS} random pairs") -> Row:
    return Row(
        experiment, case, quantity, 0.0, largest, kind="theory", evidence="closed form against print", within_abs=1e-12,
        note=_OURS,
    )  # fmt: skip


def _exact(pairs: list[tuple[Markov, Markov]]) -> Iterator[Row]:
    off = max(
        float(np.abs(Speculator(target, draft).output_distribution(k, 1) - target.probabilities[0]).max())
        for target, draft in pairs
        for k in (1, 4)
    )
    yield _identity("exact output (Chen, theorem 1)", "largest distance of output from target, K 1 and 4", off)
    target, draft = (model.filtered(temperature=0.9, top_p=0.95) for model in ngram_models((2, 1)))
    off = float(
        np.abs(
            Speculator(target, draft).output_distribution(3, 2) - Speculator(target, target).target_distribution(2)
        ).max()
    )
    yield _identity(
        "exact output (Chen, theorem 1)", "largest distance over all pairs of tokens, K 3", off,
        "bigram target, unigram draft, of text, temperature 0.9, top-p 0.95",
    )  # fmt: skip
    off = max(
        abs(float(Speculator(target, draft).acceptance()[0]) - form)
        for target, draft in pairs
        for form in (
            theory.acceptance(target.probabilities[0], draft.probabilities[0]),
            1.0 - 0.5 * float(np.abs(target.probabilities[0] - draft.probabilities[0]).sum()),
        )
    )
    yield _identity(
        "acceptance (Leviathan, corollary 3.6)",
        "largest distance of the sampler's from sum min(p, q) and 1 - D_LK",
        off,
    )


def _by_sampling(rounds: int) -> Iterator[Row]:
    from scipy.stats import chisquare

    rng = np.random.default_rng(21)
    for vocabulary, k in ((5, 4), (20, 2)):
        target, draft = _pair(rng, vocabulary)
        found = Speculator(target, draft).rounds(np.zeros(rounds, np.int64), k, rng)
        counts = np.bincount(found.tokens[:, 0], minlength=vocabulary)
        # Cells of less than 5 expected counts are joined, as the test asks for.
        expected = rounds * target.probabilities[0]
        rare = expected < 5.0
        seen, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
        chance = float(chisquare(seen[wanted > 0.0], wanted[wanted > 0.0]).pvalue)
        yield statement(
            "exact output (Chen, theorem 1)", f"{rounds:,} rounds, vocabulary {vocabulary}, K {k}",
            "chi-square of the first token against the target, p", "above 0.001", f"{chance:.3f}", chance > 0.001,
            evidence="closed form against print", note=_OURS,
        )  # fmt: skip
        alpha = theory.acceptance(target.probabilities[0], draft.probabilities[0])
        length = float(theory.expected_tokens(alpha, k))
        yield Row(
            "tokens per round over a vocabulary", f"{rounds:,} rounds, vocabulary {vocabulary}, K {k}",
            "mean, with alpha = sum min(p, q)", length, float(found.emitted.mean()), kind="theory",
            evidence="closed form against print", within_abs=3.0 * float(found.emitted.std()) / rounds**0.5, note=_OURS,
        )  # fmt: skip


def _naive(pairs: list[tuple[Markov, Markov]]) -> Iterator[Row]:
    experiment = "naive match (notes)"
    found = [(Speculator(t, d), Speculator(t, d, rule="naive_match"), t) for t, d in pairs]
    below = sum(float(naive.acceptance()[0]) <= float(best.acceptance()[0]) + 1e-15 for best, naive, _ in found)
    yield statement(
        experiment, f"{len(pairs)} random pairs", "pairs that it accepts no more often than the modified rule", "all",
        f"{below} of {len(pairs)}", below == len(pairs), evidence="closed form against print", note=_OURS,
    )  # fmt: skip
    off = max(
        float(np.abs(naive.output_distribution(3, 1) - target.probabilities[0]).max()) for _, naive, target in found
    )
    yield _identity(experiment, "largest distance of output from target, K 3", off)
    off = max(
        abs(
            float(naive.acceptance()[0])
            - theory.naive_acceptance(target.probabilities[0], naive.draft.probabilities[0])
        )
        for _, naive, target in found
    )
    yield _identity(experiment, "largest distance of its acceptance from sum p q", off)


def _lenient(pairs: list[tuple[Markov, Markov]]) -> Iterator[Row]:
    experiment = "lenient sampling (toyllm, Leviathan A.5)"
    accepted, moved = 0.0, 0.0
    for target, draft in pairs:
        q, p = target.probabilities[0], draft.probabilities[0]
        exact = float(np.minimum(q, p).sum())
        for b in (0.1, 0.5, 1.0):
            rule = Speculator(target, draft, rule="lenient", b=b)
            alpha = float(rule.acceptance()[0])
            accepted = max(accepted, abs(alpha - float(np.minimum(p, q / b).sum())))
            distance = 0.5 * float(np.abs(rule.output_distribution(2, 1) - _mixed(rule, q, b)).sum())
            moved = max(moved, abs(theory.lenient_distance(q, p, b) - (alpha - exact)), distance)
    yield _identity(experiment, "largest distance of acceptance from sum min(p, q / b), b 0.1, 0.5, 1", accepted)
    yield _identity(experiment, "largest distance of TV(output, target) from the gain in acceptance", moved)


def _mixed(rule: Speculator, target: np.ndarray, b: float) -> np.ndarray:
    """The law of the first token out of a lenient round of drafts."""
    return theory.lenient_output(target, rule.draft.probabilities[0], b)


def _greedy() -> Iterator[Row]:
    target, draft = (model.filtered(temperature=0.0) for model in ngram_models((3, 2), max_vocabulary=24))
    rng = np.random.default_rng(22)
    alone = autoregressive(target, 256, rng, sequences=4)
    same = {
        f"{rule or 'modified rejection'}, K {k}": bool(np.array_equal(_speculated(target, draft, k, b, rng), alone))
        for k in (1, 2, 4, 8)
        for rule, b in ((None, None), ("lenient, b 0.3", 0.3))
    }
    yield statement(
        "temperature 0 (toyllm)", "trigram target, bigram draft, of text, 4 x 256 tokens",
        "settings (K 1, 2, 4, 8; exact and lenient) with the target's own text", "all",
        f"{sum(same.values())} of {len(same)}", all(same.values()), evidence="closed form against print",
    )  # fmt: skip
    exact = Speculator(target, draft).statistics(4).mean_acceptance_length
    lenient = Speculator(target, draft, rule="lenient", b=0.3).statistics(4).mean_acceptance_length
    yield _identity(
        "temperature 0 (toyllm)", "distance of the acceptance lengths with and without lenience, K 4", abs(exact - lenient),
        "trigram target, bigram draft, of text",
    )  # fmt: skip


def _speculated(target: Markov, draft: Markov, k: int, b: float | None, rng: np.random.Generator) -> np.ndarray:
    made = Speculator(target, draft) if b is None else Speculator(target, draft, rule="lenient", b=b)
    return made.generate(256, k, rng, sequences=4)[0]
