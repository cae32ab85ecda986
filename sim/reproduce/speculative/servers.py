"""Speculation in servers: EAGLE heads, threads, and what a growing batch does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from hwmodels.cost import CostModel
from hwmodels.device import load_device
from hwmodels.latency_models import LinearTime
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from policies.acceptance import Iid, PerPosition, Tree
from sim.metrics import e2el_s
from sim.reproduce.rows import Evidence, Row
from sim.reproduce.speculative.runs import alone_run, iid_run, shown, size, statement, three_sigma
from sim.run import simulate
from sim.scenario import Scenario
from sim.study.speedup import alone, at_batch, plain_step_s, specdecode_speedup
from sim.theory import speculative as theory
from sim.theory.published import published

EAGLE1_PLAIN_TPOT_S = 7.07e-3  # vllm-project/vllm issue 20780
EAGLE1_PLAIN_16937_S = 1.0 / 133.0  # vllm-project/vllm issue 16937


def eagle(quick: bool) -> Iterator[Row]:
    measured = {
        int(row["k"]): (float(row["mean_acceptance_length"]), float(row["tpot_ms"]))
        for row in published("spec_vllm_20780")
        if row["method"] == "EAGLE-1"
    }
    # K = 2 and 3 fix the acceptance and the step's time a + b K; no number of a larger K is an input.
    rates = eagle1_rates(measured[2][0], measured[3][0], positions=max(measured))
    step_ms = {k: measured[k][0] * measured[k][1] for k in (2, 3)}
    per_k_s = 1e-3 * (step_ms[3] - step_ms[2])
    fixed_s = 1e-3 * step_ms[2] - 2 * per_k_s
    for k, (length, tpot_ms) in measured.items():
        run = alone_run(rates, k, EAGLE1_PLAIN_TPOT_S, per_k_s, fixed_s - EAGLE1_PLAIN_TPOT_S, size(quick), "eagle")
        for quantity, printed, simulated in (
            ("mean acceptance length", length, run.tokens_per_round.mean),
            ("TPOT, ms", tpot_ms, 1e3 * run.seconds_per_token),
        ):
            yield Row(
                "EAGLE-1 on Llama-3.1-8B, vLLM issue 20780", f"K {k} " + ("(fitted)" if k <= 3 else "(predicted)"),
                quantity, printed, simulated, kind="calibrated",
                evidence="input returned" if k <= 3 else "event loop against measurement",
                within_pct=1.0 if k <= 3 else 5.0,
            )  # fmt: skip
    yield from _eagle3(fixed_s, per_k_s, quick)
    # The other thread gives no acceptance; that of the first one stands in, and K = 2 and 4 fix the step.
    speeds = {int(row["k"]): float(row["tokens_per_s"]) for row in published("spec_vllm_16937")}
    step_s = {k: rates.mean_length(k) / speeds[k] for k in (2, 4)}
    per_k_s = (step_s[4] - step_s[2]) / 2
    fixed_s = step_s[2] - 2 * per_k_s
    for k, speed in speeds.items():
        run = alone_run(rates, k, EAGLE1_PLAIN_16937_S, per_k_s, fixed_s - EAGLE1_PLAIN_16937_S, size(quick), "eagle")
        yield Row(
            "EAGLE-1 on one H100, vLLM issue 16937", f"K {k} " + ("(fitted)" if k <= 4 else "(predicted)"), "tokens/s",
            speed, 1.0 / run.seconds_per_token, kind="calibrated",
            evidence="input returned" if k <= 4 else "event loop against measurement",
            within_pct=1.0 if k <= 4 else 5.0,
        )  # fmt: skip


def _eagle3(fixed_s: float, per_k_s: float, quick: bool) -> Iterator[Row]:
    """EAGLE-3 in the same thread: its acceptance lengths go in, and a step takes what EAGLE-1's takes there."""
    lengths = {
        int(row["k"]): (float(row["mean_acceptance_length"]), float(row["tpot_ms"]))
        for row in published("spec_vllm_20780")
        if row["method"] == "EAGLE-3"
    }
    rates = eagle1_rates(lengths[2][0], lengths[3][0], positions=3)
    for k, (length, tpot_ms) in lengths.items():
        run = alone_run(rates, k, EAGLE1_PLAIN_TPOT_S, per_k_s, fixed_s - EAGLE1_PLAIN_TPOT_S, size(quick), "eagle")
        made: tuple[tuple[str, float, float, float, Evidence, str], ...] = (
            ("mean acceptance length", length, run.tokens_per_round.mean, 1.0, "input returned", ""),
            (
                *("TPOT, ms, with the step of EAGLE-1", tpot_ms, 1e3 * run.seconds_per_token, 5.0),
                "event loop against measurement",
                "the thread gives EAGLE-3 two points, which would only fix its own two constants; its head reads three layers "
                "of the target, and its steps took 11 to 16 % longer than EAGLE-1's",
            ),
        )
        for quantity, printed, simulated, percent, evidence, note in made:
            yield Row(
                "EAGLE-3 on Llama-3.1-8B, vLLM issue 20780", f"K {k}", quantity, printed, simulated, kind="calibrated",
                evidence=evidence, within_pct=percent, note=note,
            )  # fmt: skip


def eagle1_rates(length_2: float, length_3: float, *, positions: int) -> PerPosition:
    """Conditional rates by position from the mean acceptance lengths at K = 2 and 3 alone.

    The first two positions share the i.i.d. alpha of K = 2; from the third on the rate is the one that K = 3 adds.
    """
    alpha = float(theory.alpha_from_mean_length(length_2, 2))
    later = (length_3 - length_2) / alpha**2
    return PerPosition(rates=(alpha, alpha, *(later,) * (positions - 2)), kind="conditional")


def maverick(quick: bool) -> Iterator[Row]:
    lengths: dict[str, dict[int, float]] = {}
    for row in published("spec_llama4_eagle3"):
        lengths.setdefault(row["task"], {})[int(row["k"])] = float(row["mean_acceptance_length"])
    for task, by_k in lengths.items():
        rates = tuple(by_k[k] - (by_k[k - 1] if k > 1 else 1.0) for k in sorted(by_k))
        process = PerPosition(rates=rates, kind="unconditional")
        for k, length in by_k.items():
            run = alone_run(process, k, 1.0, 0.0, 0.0, size(quick), "eagle")
            yield Row(
                "EAGLE-3 on Llama-4-Maverick", f"{task}, K {k}", "mean acceptance length, per-position rates", length,
                run.tokens_per_round.mean, kind="theory", evidence="input returned",
                within_abs=0.005 + three_sigma(run.tokens_per_round.half_width),
            )  # fmt: skip
        run = iid_run(by_k[1] - 1.0, 7, 0.0, quick)
        yield Row(
            "EAGLE-3 on Llama-4-Maverick", f"{task}, K 7", "i.i.d. alpha of K = 1 over-predicts by, %", 25.0,
            100.0 * (run.tokens_per_round.mean / by_k[7] - 1.0), kind="calibrated",
            evidence="event loop against measurement", within_abs=3.0,
        )  # fmt: skip
        foretold = eagle1_rates(by_k[2], by_k[3], positions=max(by_k))
        for k in sorted(by_k.keys() - {2, 3}):
            run = alone_run(foretold, k, 1.0, 0.0, 0.0, size(quick), "eagle")
            yield Row(
                "EAGLE-3 on Llama-4-Maverick", f"{task}, K {k} (predicted)",
                "mean acceptance length, from K 2 and 3 alone", by_k[k], run.tokens_per_round.mean, kind="calibrated",
                evidence="event loop against measurement", within_pct=5.0,
                note="the rule is that of EAGLE-1: the rate that K = 3 adds holds from there on. Measured rates fall further",
            )  # fmt: skip


def specdecode(_quick: bool) -> Iterator[Row]:
    found = {}
    for row in published("spec_decode_bench"):
        batch, printed = int(row["batch"]), float(row["speedup"])
        found[batch] = specdecode_speedup(batch)
        closed = float(theory.server_speedup(3.0, 5, batch, 500))
        made: tuple[tuple[str, float, Evidence], ...] = (
            ("speed-up, closed form", closed, "closed form against print"),
            ("speed-up, event loop", found[batch], "event loop against theory"),
        )
        for quantity, value, evidence in made:
            yield Row(
                "SpecDecode-Bench constants", f"batch {batch}, context 500, K 5", quantity, printed, value,
                kind="calibrated", evidence=evidence, within_pct=3.0,
            )  # fmt: skip
    speeds = [found[batch] for batch in sorted(found)]
    yield statement(
        "small batches only", "batch 1 to 512", "speed-up falls with the batch and ends below 1", "falls below 1",
        f"{speeds[0]:.2f} to {speeds[-1]:.2f}", all(b < a for a, b in itertools.pairwise(speeds)) and speeds[-1] < 1.0,
    )  # fmt: skip


def threads(_quick: bool) -> Iterator[Row]:
    """Rows of what users report of servers, without all that one would need to run it again."""
    why = {
        "vLLM issue 24343": "model, plain speed and the draft's cost are not given",
        "vLLM issue 17202": "rate, lengths and acceptance are not given",
        "vLLM issue 17984": "hardware, K and acceptance are not given; simulated with four H100, K 4 and alpha 0.8, which "
        "are ours",
        "vLLM pull request 2188": "hardware and acceptance are not given; simulated with alpha 0.3, 0.5 and 0.7 on four A100, "
        "OPT-125M for the draft on one of them, 2 requests/s of 200 + 200 tokens, ours",
    }
    for row in published("spec_threads"):
        thread = row["thread"]
        simulated: float | str = "not run"
        if thread == "vLLM issue 17984":
            simulated = draft_model_crossing()
        elif thread == "vLLM pull request 2188":
            simulated = ", ".join(f"{draft_model_latency_reduction(alpha):.2f}" for alpha in (0.3, 0.5, 0.7))
        yield shown(thread, row["case"], row["quantity"], float(row["value"]), simulated, why[thread])


def draft_model_crossing() -> float:
    """The batch, to a power of two, from which a 1B draft slows Llama-3.1-70B on four H100 down (K 4, alpha 0.8)."""
    target, draft = _roofline("llama-3.1-70b", "h100-sxm", 4), _roofline("llama-3.2-1b", "h100-sxm", 1)
    for power in range(11):
        if at_batch(target, draft, Iid(alpha=0.8), 4, 1 << power, 500, rounds=32, least_rounds=1000) < 1.0:
            return float(1 << power)
    return float("inf")


def draft_model_latency_reduction(alpha: float) -> float:
    """Share of mean end-to-end latency that a small draft saves Llama-2-13B on four A100, K 3, under light load."""
    plain = Scenario(
        model="llama-2-13b",
        hardware="a100-80gb-sxm",
        parallel={"tensor": 4},
        scheduler="sarathi",
        workload={
            "arrivals": {"process": "poisson", "rate_per_s": 2.0},
            "prompt_tokens": 200,
            "output_tokens": 200,
            "requests": 100,
        },
    )
    section = {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "acceptance": {"alpha": alpha},
        # No 68M draft of the family is in the catalogue; only its cost counts here, not its vocabulary.
        "draft": {"model": "opt-125m", "tensor": 1, "allow_vocabulary_mismatch": True},
    }
    slow, fast = (
        float(np.nanmean(e2el_s(simulate(scenario).columns.requests)))
        for scenario in (plain, plain.with_value("decoding", section))
    )
    return 1.0 - fast / slow


def _roofline(model: str, device: str, tensor: int) -> CostModel:
    return Roofline(load_model(model), load_device(device), ParallelConfig(tensor=tensor))


def ridge(_quick: bool) -> Iterator[Row]:
    """Speculation stops paying near the batch whose n (K + 1) query tokens fill the ridge of the device."""
    k, c = 4, 0.05
    device = load_device("h100-sxm")
    target = _roofline("llama-3.1-8b", "h100-sxm", 1)
    draft = LinearTime(fixed_s=c * plain_step_s(target))
    near = device.peak("bf16") / device.hbm_bytes_per_s / (k + 1)
    for alpha in (0.2, 0.4, 0.6):
        crossing = float("inf")
        for step in range(-8, 17):
            batch = round(near * 2.0 ** (step / 8))
            if at_batch(target, draft, Iid(alpha=alpha), k, batch, 128, rounds=32, least_rounds=4000) < 1.0:
                crossing = batch
                break
        yield statement(
            "small batches only", f"Llama-3.1-8B on an H100 by the roofline, K {k}, alpha {alpha:g}, c {c:g}",
            "batch at which the speed-up crosses 1, over ridge tokens / (K + 1)", "0.5 to 2", f"{crossing / near:.2f}",
            0.5 < crossing / near <= 2.0,
            note="model, alpha and c are ours. Up to the ridge a verify step is free and beyond it its time grows in proportion: "
            "the crossing lies near tokens a round / (1 + K c) times the ridge: it moves with alpha",
        )  # fmt: skip


# Guesses 1 to 10 of four heads, ours: no accuracies are published.
_HEADS = tuple(
    tuple(0.85**head * rate for rate in (0.6, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008))
    for head in range(4)
)


def trees(quick: bool) -> Iterator[Row]:
    """Medusa's static tree: 64 nodes with the root, depth 4, the ten best guesses of each head."""
    tree = Tree(accuracies=_HEADS, nodes=63)
    run = alone(tree, tree.depth, method="medusa", requests=size(quick), output_tokens=4001, seed=20)
    yield Row(
        "tree attention (Medusa)", "64 nodes, depth up to 4, top 10",
        "mean acceptance length, event loop against the sum of path products",
        theory.sparse_tree_mean_length(_HEADS, 63), run.tokens_per_round.mean, kind="theory",
        evidence="event loop against theory", within_abs=three_sigma(run.tokens_per_round.half_width),
        note="the heads' accuracies are ours",
    )  # fmt: skip
    lengths = [theory.sparse_tree_mean_length(_HEADS, nodes) for nodes in (4, 16, 63, 255)]
    yield statement(
        "tree attention (Medusa)", "4, 16, 63, 255 nodes", "mean acceptance length rises ever less per doubling", "rises",
        " ".join(f"{length:.2f}" for length in lengths),
        all(b > a for a, b in itertools.pairwise(lengths))
        and all(c - b < b - a for a, b, c in zip(lengths, lengths[1:], lengths[2:], strict=False)),
        evidence="closed form against print", note="the heads' accuracies are ours",
    )  # fmt: skip
    yield shown(
        "tree attention (Medusa)", "Vicuna-7B, batch 1", "nodes at which the speed peaks", "48 to 64", "not run",
        "accuracies of the heads and times of the tree kernels are not published; on a roofline 64 query tokens are free",
    )  # fmt: skip
