"""Pictures of speculative decoding; simulated points over closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.acceptance import Iid
from sim.metrics import e2el_s, saturated
from sim.plots import speculation as draw
from sim.plots.style import save
from sim.reproduce.speculative.runs import iid_run
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build
from sim.study.speedup import alone, at_batch, costs_of, explain_gap, specdecode_speedup
from sim.theory import speculative as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plots(folder: Path) -> list[Path]:
    """Draw the pictures of speculative decoding into *folder*; simulated points over closed forms."""
    written = []
    for name, picture in (
        ("speculative-k.png", _draw_k),
        ("speculative-tokens-per-round.png", _draw_tokens_per_round),
        ("speculative-load.png", _draw_load),
        ("speculative-crossover.png", _draw_crossover),
        ("speculative-gap.png", _draw_gap),
    ):
        written += save(picture(), folder / name, svg=False)
    return written


def _draw_k() -> Figure:
    alphas, at = (0.5, 0.7, 0.8, 0.9), (1, 2, 3, 4, 6, 8, 10, 12)
    fine = np.arange(0, 13)
    made, axes = draw.figure(
        12, 4.2, columns=3, sharey=True, title="A costlier draft lowers the best speed-up and the K that reaches it: "
        "theorem 3.8 (lines), event loop with 99 % intervals (points)",
    )  # fmt: skip
    for ax, c in zip(axes, (0.01, 0.05, 0.2), strict=True):
        curves = {alpha: (fine, np.asarray(theory.speedup(alpha, fine, c))) for alpha in alphas}
        points = {
            alpha: [(k, alone(alpha, k, draft_s=c, requests=20, output_tokens=801, seed=k).speedup) for k in at]
            for alpha in alphas
        }
        draw.plot_speedup_against_k(ax, curves, points, c=c)
    axes[0].set_ylabel("speed-up over plain decoding", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    return made


def _draw_tokens_per_round() -> Figure:
    alphas, k = (0.3, 0.6, 0.8, 0.95), 5
    made, axes = draw.figure(
        12, 3.4, columns=4, sharey=True, title=f"Tokens per round at K = {k}: a geometric law with a cap, which "
        f"{0.95**k:.0%} of rounds reach at alpha 0.95",
    )  # fmt: skip
    for ax, alpha in zip(axes, alphas, strict=True):
        run = iid_run(alpha, k, 0.0, True)
        draw.plot_tokens_per_round(ax, run.rounds, theory.tokens_pmf(alpha, k), alpha=alpha)
    axes[0].set_ylabel("share of rounds", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    return made


def _draw_load() -> Figure:
    batches = np.geomspace(1, 1024, 200)
    curves, points = {}, {}
    for mean, k in ((3.0, 5), (2.4, 3), (1.8, 1)):
        name = f"K = {k}, {mean:g} tokens a round"
        curves[name] = np.asarray(theory.server_speedup(mean, k, batches, 500))
        points[name] = [
            (batch, specdecode_speedup(batch, k=k, mean_length=mean)) for batch in (1, 4, 16, 64, 256, 512, 1024)
        ]
    rates = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0, 56.0, 64.0])
    measures = speedup_against_rate(rates)
    crossing = float(theory.crossover_batch(3.0, 5, 500))
    made, (left, right) = draw.figure(
        12, 4.6, columns=2, title=f"Speculation pays while the batch is small: on SpecDecode-Bench's H100, K = 5 stops "
        f"paying at {crossing:.0f} sequences",
    )  # fmt: skip
    draw.plot_speedup_against_batch(left, batches, curves, points)
    left.set_title("Llama-3.1-8B with EAGLE, fitted step times; points: event loop", fontsize=10)
    left.set_ylabel("speed-up in tokens per second", fontsize=9)
    draw.plot_speedup_against_rate(right, rates, measures)
    right.set_title("Llama-3.1-8B on an H100, K = 5, 500 + 250 tokens (event loop)", fontsize=10)
    right.set_ylabel("speed-up of mean end-to-end latency", fontsize=9)
    return made


def speedup_against_rate(
    rates_per_s: NDArray[np.float64], *, mean_lengths: tuple[float, ...] = (3.0, 2.0), seconds: float = 30.0
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Mean end-to-end latency of plain over speculative decoding under *seconds* of Poisson arrivals, by tokens a round; and
    whether either is saturated, so that the ratio would be another one in a longer run."""
    ratios: dict[str, list[tuple[float, bool]]] = {f"{mean:g} tokens a round": [] for mean in mean_lengths}
    for rate in rates_per_s.tolist():
        base = Scenario(
            model="llama-3.1-8b",
            hardware="h100-sxm",
            scheduler={"policy": "sarathi", "token_budget": 2048, "max_sequences": 512},
            workload={
                "arrivals": {"process": "poisson", "rate_per_s": rate},
                "prompt_tokens": 500,
                "output_tokens": 250,
                "requests": max(200, round(rate * seconds)),
            },
        )
        plain = simulate(base).columns.requests
        for name, mean in zip(ratios, mean_lengths, strict=True):
            fast = base.with_value(
                "decoding",
                {
                    "method": "eagle",
                    "num_speculative_tokens": 5,
                    "acceptance": {"mean_length": mean},
                    "draft": {"cost_ratio": 0.07},
                    "overhead_s": 1e-3,
                },
            )
            drafted = simulate(fast).columns.requests
            ratio = float(np.nanmean(e2el_s(plain)) / np.nanmean(e2el_s(drafted)))
            ratios[name].append((ratio, bool(saturated(plain) or saturated(drafted))))
    return {name: (np.array([r for r, _ in found]), np.array([s for _, s in found])) for name, found in ratios.items()}


def _draw_crossover() -> Figure:
    batches, alphas, ks = np.geomspace(1, 1024, 90), np.linspace(0.3, 0.98, 80), (1, 3, 5, 8)
    made, axes = draw.figure(
        12.5, 4.0, columns=4, sharey=True, title="Where speculation pays, by alpha, K and batch: blue gains, red loses, "
        "black neither (SpecDecode-Bench's H100, context 500; dots: event loop)",
    )  # fmt: skip
    shown: Any = None
    for ax, k in zip(axes, ks, strict=True):
        lengths = np.asarray(theory.expected_tokens(alphas, k))
        values = np.asarray(theory.server_speedup(lengths[:, None], k, batches, 500))
        costs = costs_of(theory.SPECDECODE_BENCH, k)
        points = [
            (batch, alpha, at_batch(*costs, Iid(alpha=alpha), k, batch, 500, least_rounds=4000))
            for alpha in (0.4, 0.6, 0.75, 0.9)
            for batch in (2, 16, 128, 768)
        ]
        shown = draw.plot_crossover(ax, batches, alphas, values, points, k=k, limits=(0.3, 4.0))
    axes[0].set_ylabel("alpha", fontsize=9)
    bar = made.colorbar(shown, ax=axes, pad=0.01, extend="both")
    bar.set_label("speed-up", fontsize=9)
    bar.set_ticks([0.3, 0.5, 0.75, 1, 2, 3, 4])
    return made


def _draw_gap() -> Figure:
    gap = explain_gap(build(gap_scenario()))
    made, ax = draw.figure(
        11, 4.8, title=f"Why not the paper's speed-up? {gap.speedups[0]:.2f} on paper becomes {gap.speedups[-1]:.2f} under "
        "load: Llama-3.1-70B with a 1B draft, K = 4, alpha 0.8,\nfour H100, 8 conversations a second (each bar adds one "
        "effect to those on its left; green adds speed-up)",
    )  # fmt: skip
    draw.plot_gap(ax, gap)
    return made


def gap_scenario() -> Scenario:
    """A 70B model with a 1B draft on four H100 under a moderate load of conversations."""
    return Scenario(
        model="llama-3.1-70b",
        hardware="h100-sxm",
        parallel={"tensor": 4},
        scheduler={"policy": "sarathi", "token_budget": 1024, "max_sequences": 128},
        decoding={
            "method": "draft_model",
            "num_speculative_tokens": 4,
            "acceptance": {"alpha": 0.8},
            "draft": {"model": "llama-3.2-1b", "tensor": 1},
            "overhead_s": 1e-3,
        },
        workload={
            "trace": "conversation",
            "arrivals": {"process": "poisson", "rate_per_s": 8.0},
            "requests": 800,
        },
    )
