"""Tables that the papers and notes work out from a formula, beside the formula and the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sim.reproduce.rows import Row
from sim.reproduce.speculative.runs import iid_run, shown, speedup_rows, statement, three_sigma, twice
from sim.study.speedup import Measured, grid
from sim.theory import speculative as theory
from sim.theory.published import published

GRID_ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
GRID_KS = (1, 2, 4, 6, 8)
GRID_CS = (0.0, 0.01, 0.05, 0.1, 0.2)


def notes_tokens(quick: bool) -> Iterator[Row]:
    for row in published("spec_notes_expected_tokens"):
        alpha, k, printed = float(row["alpha"]), int(row["k"]), float(row["expected_tokens"])
        closed, run = float(theory.expected_tokens(alpha, k)), iid_run(alpha, k, 0.0, quick)
        # The table is truncated to three decimals.
        yield from twice(
            "notes: tokens per round", f"alpha {alpha:g}, K {k}", "", printed, closed, run.tokens_per_round, 0.001
        )


def notes_speedup(quick: bool) -> Iterator[Row]:
    for row in published("spec_notes_speedup"):
        alpha, k, c, printed = float(row["alpha"]), int(row["k"]), float(row["c"]), float(row["speedup"])
        yield from speedup_rows("notes: speed-up", alpha, k, c, printed, 0.001, quick)


def leviathan_table_1(quick: bool) -> Iterator[Row]:
    for row in published("spec_leviathan_ops_speed"):
        alpha, k = float(row["alpha"]), int(row["k"])
        case = f"alpha {alpha:g}, K {k}"
        run = iid_run(alpha, k, 0.0, quick)
        relative = run.speedup.half_width / run.speedup.mean
        submitted = Measured(mean=run.query_tokens_per_token, half_width=relative * run.query_tokens_per_token)
        closed, printed = float(theory.operations_factor(alpha, k)), float(row["operations_factor"])
        yield from twice("Leviathan table 1", case, "operations", printed, closed, submitted, 0.005)
        yield from speedup_rows("Leviathan table 1", alpha, k, 0.0, float(row["speedup"]), 0.005, quick)


def bigram_draft(quick: bool) -> Iterator[Row]:
    """A bigram model as a draft that costs nothing (section 3.6)."""
    yield from speedup_rows("Leviathan, bigram draft", 0.2, 3, 0.0, 1.25, 0.005, quick)


def leviathan_t5(quick: bool) -> Iterator[Row]:
    # The paper prints these three 0.05 to 0.07 above its own formula.
    above = {("EnDe", "T5-base", "1"), ("EnDe", "T5-large", "1"), ("CNNDM", "T5-large", "1")}
    for row in published("spec_leviathan_t5"):
        alpha, k, c = float(row["alpha"]), int(row["k"]), float(row["c"])
        name = f"{row['task']} {row['draft']} T={row['temperature']}"
        tolerance = 0.1 if (row["task"], row["draft"], row["temperature"]) in above else 0.05
        yield from speedup_rows(
            "Leviathan T5-XXL, expected", alpha, k, c, float(row["expected_speedup"]), tolerance, quick, name
        )
        yield Row(
            experiment="Leviathan T5-XXL, measured",
            case=name,
            quantity="speed-up",
            published=float(row["measured_speedup"]),
            simulated=iid_run(alpha, k, c, quick).speedup.mean,
            kind="calibrated",
            evidence="event loop against measurement",
            # The tolerance that is asked of measured rows of the other system with published alpha and c (Chinchilla).
            within_pct=10.0,
            note="the paper's own formula with the paper's alpha and c is as far off: four of the twelve exceed what any c "
            "allows. It names the baseline's implementation and acceptance that is not i.i.d. (appendix A.3)",
        )


def alpha_presets(quick: bool) -> Iterator[Row]:
    presets = [
        ("Leviathan alpha presets", f"{row['target']}, {row['draft']}, T={row['temperature']}", row["alpha"])
        for row in published("spec_leviathan_alpha")
    ]
    presets += [
        ("Leviathan lenient alpha presets", f"T5-XXL, {row['draft']}, lenience {row['b']}", row["alpha"])
        for row in published("spec_leviathan_lenience")
    ]
    for experiment, case, text in presets:
        alpha = float(text)
        run = iid_run(alpha, 5, 0.0, quick)
        statistics = run.statistics
        tried = statistics.num_accepted_tokens + statistics.num_rejections
        yield Row(
            experiment, case, "alpha, estimated from the run's counters", alpha, statistics.alpha, kind="theory",
            evidence="input returned", within_abs=3.0 * float(np.sqrt(alpha * (1.0 - alpha) / tried)) + 1e-12,
        )  # fmt: skip


def whole_grid(quick: bool) -> Iterator[Row]:
    points = grid(GRID_ALPHAS, GRID_KS, GRID_CS, requests=12 if quick else 30)
    inside = sum(run.speedup.covers(float(theory.speedup(alpha, k, c))) for alpha, k, c, run in points)
    share = inside / len(points)
    yield statement(
        "grid at batch one", f"{len(points)} points (alpha, K, c)",
        "closed form within the event loop's own 99 % interval", "98 % of points", f"{share:.1%}", share >= 0.98,
    )  # fmt: skip


def rounds_have_bounds(quick: bool) -> Iterator[Row]:
    """At least one token a round, and at most K + 1: both are met, and alpha = 1 meets the upper one alone."""
    for alpha, k in ((0.1, 1), (0.5, 4), (0.9, 7), (1.0, 5)):
        run = iid_run(alpha, k, 0.0, quick)
        seen = np.flatnonzero(run.rounds) + 1
        least = k + 1 if alpha == 1.0 else 1
        yield statement(
            "tokens a round", f"alpha {alpha:g}, K {k}", "least and most of all rounds", f"{least} to {k + 1}",
            f"{seen[0]} to {seen[-1]}", (seen[0], seen[-1]) == (least, k + 1),
        )  # fmt: skip


def optimal_k(quick: bool) -> Iterator[Row]:
    """The best K as an integer, the condition alpha > c, and the speed-up that it promises."""
    for row in published("spec_optimal_k"):
        alpha, c = float(row["alpha"]), float(row["c"])
        yield Row(
            "best K (Leviathan, section 3.5)", f"alpha {alpha:g}, c {c:g}", "K of theorem 3.8's maximum",
            float(row["optimal_k"]), float(theory.optimal_k(alpha, c)), kind="theory",
            evidence="closed form against print", within_abs=0.0,
        )  # fmt: skip
    for alpha, c in ((0.5, 0.05), (0.7, 0.05), (0.8, 0.1)):
        best = int(theory.optimal_k(alpha, c))
        found = {k: iid_run(alpha, k, c, quick).speedup for k in (best - 2, best, best + 2)}
        yield statement(
            "best K (Leviathan, section 3.5)", f"alpha {alpha:g}, c {c:g}",
            "event loop: K two lower and two higher are slower", f"K {best}",
            ", ".join(f"{k}: {speedup.mean:.3f}" for k, speedup in found.items()),
            found[best].mean > max(found[best - 2].mean, found[best + 2].mean),
            note="alpha and c are ours",
        )  # fmt: skip
    for c in (0.1, 0.3, 0.6):
        for alpha, sign in ((c - 0.08, "below 1"), (c + 0.08, "above 1")):
            speedup = iid_run(alpha, 1, c, quick).speedup
            yield statement(
                "improvement condition alpha > c (corollary 3.9)", f"alpha {alpha:g}, c {c:g}, K 1", "speed-up", sign,
                f"{speedup.mean:.4f} +- {speedup.half_width:.4f}",
                (speedup.mean > 1.0) == (alpha > c) and not speedup.covers(1.0),
                note="alpha and c are ours",
            )  # fmt: skip
    for alpha, c in ((0.5, 0.1), (0.8, 0.05)):
        run = iid_run(alpha, 1, c, quick)
        yield Row(
            "promised speed-up (1 + alpha) / (1 + c) (corollary 3.9)", f"alpha {alpha:g}, c {c:g}, K 1",
            "speed-up, event loop", (1.0 + alpha) / (1.0 + c), run.speedup.mean, kind="theory",
            evidence="event loop against theory", within_abs=three_sigma(run.speedup.half_width),
            note="alpha and c are ours",
        )  # fmt: skip


def lenience_speeds(quick: bool) -> Iterator[Row]:
    """Speeds that the paper gives for its lenient variants at c = 0.015."""
    for row in published("spec_leviathan_lenience_speed"):
        experiment, c = "Leviathan lenience, speeds", 0.015
        case = f"T5-small, lenience {row['b']}, temperature {row['temperature']}"
        if not row["alpha"]:
            yield shown(experiment, case, "speed-up", float(row["speedup"]), "not run", "its alpha is not printed")
            continue
        alpha = float(row["alpha"])
        k = int(row["k"]) if row["k"] else int(theory.optimal_k(alpha, c))
        run = iid_run(alpha, k, c, quick)
        yield Row(
            experiment=experiment,
            case=f"{case}, K {k}" + ("" if row["k"] else " (the best)"),
            quantity="speed-up, event loop",
            published=float(row["speedup"]),
            simulated=run.speedup.mean,
            kind="theory",
            evidence="event loop against theory",
            within_abs=0.05 + three_sigma(run.speedup.half_width),
            note="" if row["k"] else "the printed speeds at temperature 1 are above theorem 3.8 with the printed alpha at "
            "every K, by 3 to 7 %",
        )  # fmt: skip
