"""Throughput of SARATHI and Orca over prefill-only and decode-only batches, and where it peaks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hwmodels.cost import CostModel
from policies.published import OrcaPaged, Static
from policies.sarathi import DecodeMaximal
from sim.reproduce.rows import Row
from sim.reproduce.sarathi.runs import (
    MEASURED,
    PRINT,
    SHOWN,
    THEORY,
    Gain,
    around,
    cost_of,
    decodes_at,
    gain,
    gains_over_pd,
    iteration_s,
    published,
    stream,
    throughput,
)
from sim.theory import sarathi as theory


def rows(quick: bool) -> Iterator[Row]:
    yield from _peak_gains(quick)
    yield from _pd_optima(quick)
    yield from _pd_formula()
    yield from _coverage()
    yield from _small_chunks(quick)
    yield from _orca(quick)


def peak(line: dict[str, str], quick: bool) -> tuple[CostModel, Gain]:
    """The best of a sweep over the number of decodes, for a row of `peak_gains`."""
    cost = cost_of(line["model"], line["device"])
    batch, tokens = int(line["batch"]), int(line["tokens"])
    centre = decodes_at(tokens, theory.optimal_pd_ratio(256, batch))
    swept = range(max(1, centre - 3), centre + 4) if quick else around(centre, tokens)
    return cost, max(gains_over_pd(cost, batch, tokens, 256, swept), key=lambda found: found.gain)


def _peak_gains(quick: bool) -> Iterator[Row]:
    row_of = partial(Row, "peak gain", kind="calibrated", evidence=MEASURED)
    for line in published("peak_gains"):
        batch, tokens, pd_ratio = int(line["batch"]), int(line["tokens"]), float(line["pd_ratio"])
        cost, best = peak(line, quick)
        case = f"{line['model']}, {line['device']}, {tokens} tokens, batch {batch}, chunk 256"
        yield row_of(
            case, "throughput, SARATHI / baseline", float(line["gain"]), best.gain,
            within_pct=float(line["gain_within_pct"]),
        )  # fmt: skip
        yield row_of(
            f"{case}; published P:D {pd_ratio:g}, here {best.pd_ratio:.1f}", "decodes of a request at the peak",
            decodes_at(tokens, pd_ratio), best.decodes, within_abs=1.0,
        )  # fmt: skip
        # Contexts at the end of a request, where the paper measures.
        alone = iteration_s(cost, 0, batch, tokens) / batch
        chunk = 256 - (batch - 1)
        beside = (iteration_s(cost, chunk, batch - 1, tokens) - iteration_s(cost, 256, 0)) / (batch - 1)
        yield row_of(
            case, "decode speed-up, alone / marginal", float(line["decode_speedup"]), alone / beside, within_pct=15.0
        )


def _pd_optima(quick: bool) -> Iterator[Row]:
    row_of = partial(Row, "P:D optimum", kind="calibrated", evidence=MEASURED)
    cost = cost_of("llama-13b", "a6000")
    for chunk, pd_ratio in ((256, 14.0), (512, 28.0)):
        centre = decodes_at(1024, theory.optimal_pd_ratio(chunk, 18))
        swept = around(centre, 1024)
        best = max(gains_over_pd(cost, 18, 1024, chunk, swept, 12 if quick else 40), key=lambda found: found.gain)
        yield row_of(
            f"LLaMA-13B, 1024 tokens, B 18, chunk {chunk}; published P:D {pd_ratio:g}, here {best.pd_ratio:.1f}",
            "decodes of a request at the peak", decodes_at(1024, pd_ratio), best.decodes, within_abs=1.0,
        )  # fmt: skip
        if chunk == 512:
            yield row_of(
                "LLaMA-13B, 1024 tokens, batch 18, chunk 512", "throughput, SARATHI / baseline", 1.23, best.gain,
                within_pct=3.0,
            )  # fmt: skip


def _pd_formula() -> Iterator[Row]:
    """The ratio at the peak by the formula without tiles, as the checklist's table works it out."""
    for line in published("peak_gains"):
        yield Row(
            "P:D optimum", f"{line['model']}, {line['tokens']} tokens, batch {line['batch']}: C / (B - 1)",
            "prompt tokens to a decode", float(line["chunk_over_decodes"]),
            float(theory.optimal_pd_ratio(256, int(line["batch"]), tile_adjusted=False)), kind="theory", evidence=PRINT,
            within_abs=0.005,
        )  # fmt: skip


def covered(cost: CostModel, batch: int, tokens: int, chunk: int) -> float:
    """Share of decodes that ride along with a chunk at the best ratio, away from both ends of the run."""
    decodes = decodes_at(tokens, theory.optimal_pd_ratio(chunk, batch))
    iterations = stream(cost, DecodeMaximal(chunk, batch), batch, tokens - decodes, decodes).iterations()
    count = len(iterations["decode_tokens"])
    middle = slice(count // 4, count * 3 // 4)
    riding = iterations["prefill_tokens"][middle] > 0
    return float((iterations["decode_tokens"][middle] * riding).sum() / iterations["decode_tokens"][middle].sum())


def _coverage() -> Iterator[Row]:
    """The checklist's own cost model beside the event loop: its gains are shown, the decodes covered are judged."""
    row_of = partial(Row, "decodes covered", kind="theory")
    cost = cost_of("llama-13b", "a6000")
    for line in published("model_check"):
        tokens, batch, chunk = int(line["tokens"]), int(line["batch"]), int(line["chunk"])
        yield row_of(
            f"LLaMA-13B, {tokens} tokens, batch {batch}, chunk {chunk}, at the best P:D",
            "share of decodes beside a chunk", float(line["coverage"]), covered(cost, batch, tokens, chunk),
            evidence=THEORY, within_abs=0.02,
        )  # fmt: skip
        decodes = decodes_at(tokens, theory.optimal_pd_ratio(chunk, batch))
        yield row_of(
            f"LLaMA-13B, {tokens} tokens, batch {batch}, chunk {chunk}: a cost model of straight lines",
            "throughput, SARATHI / baseline", float(line["gain"]),
            gain(cost, DecodeMaximal(chunk, batch), batch, tokens, decodes, 12).gain, evidence=SHOWN,
            note="neither is measured",
        )  # fmt: skip


def _small_chunks(quick: bool) -> Iterator[Row]:
    """End to end with chunks below two tiles. SARATHI, section 5.4 and figure 9a."""
    row_of = partial(Row, "small chunks", evidence=MEASURED)
    cost = cost_of("llama-13b", "a6000")
    best = {}
    for chunk in (64, 128, 256):
        # No ratio is published for them: the best over the batches of the paper.
        found = []
        for batch in (6, 18):
            centre = decodes_at(1024, theory.optimal_pd_ratio(chunk, batch))
            swept = range(max(1, centre - 3), centre + 4)
            found += gains_over_pd(cost, batch, 1024, chunk, swept, 12 if quick else 40)
        best[chunk] = max(each.gain for each in found)
    for chunk, figure in ((128, 1.16), (64, 1.0)):
        yield row_of(
            f"LLaMA-13B, A6000, 1024 tokens, chunk {chunk}, best of batches 6 and 18"
            + (" (up to 1.16)" if chunk == 128 else " (about the baseline)"),
            "throughput, SARATHI / baseline", figure, best[chunk], kind="emulated", within_pct=4.0,
        )  # fmt: skip
    yield row_of(
        "LLaMA-13B, A6000, 1024 tokens: chunk 128 gains much less than 256, as the printed peaks have it",
        "(gain of 128 - 1) / (gain of 256 - 1)", "at most 0.6 (1.16 against 1.27)", (best[128] - 1) / (best[256] - 1),
        kind="qualitative", holds=best[128] - 1 <= 0.6 * (best[256] - 1),
    )  # fmt: skip


def _orca(quick: bool) -> Iterator[Row]:
    row_of = partial(Row, "Orca", kind="emulated")
    cost = cost_of("llama-13b", "a6000")
    batches = 16 if quick else 40
    for line in published("orca"):
        tokens, batch = int(line["tokens"]), int(line["batch"])
        decodes = decodes_at(tokens, theory.optimal_pd_ratio(256, batch))
        # The nearest number of decodes at which whole chunks make up the prompt.
        chunk = 256 - (batch - 1)
        prompt = round((tokens - decodes) / chunk) * chunk
        decodes = tokens - prompt
        case = f"LLaMA-13B, A6000, {tokens} tokens, batch {batch}, P:D {prompt / decodes:.1f}"
        for system, scheduler, figure, tolerance in (
            ("SARATHI", DecodeMaximal(256, batch), float(line["sarathi"]), 4.0),
            ("Orca best case", OrcaPaged(batch, max_prompts=1), float(line["orca_best"]), 4.0),
            ("Orca worst case", OrcaPaged(batch), 1.0, 4.0),
        ):
            yield row_of(
                case, f"throughput, {system} / baseline", figure,
                gain(cost, scheduler, batch, tokens, decodes, batches).gain, evidence=MEASURED, within_pct=tolerance,
            )  # fmt: skip
        together = throughput(cost, OrcaPaged(batch), batch, prompt, decodes, batches)
        static = throughput(cost, Static(batch), batch, prompt, decodes, batches)
        yield row_of(
            f"{case}; request-level batching, prompts computed together", "throughput, Orca worst case / request-level",
            1.0, together / static, evidence=THEORY, within_pct=2.0,
        )  # fmt: skip
