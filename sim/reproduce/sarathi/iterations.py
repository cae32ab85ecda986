"""LLaMA-13B on an A6000: times of iterations, tiles, chunks. Five published times go in and their rows say so."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sim.reproduce.rows import Row
from sim.reproduce.sarathi.runs import INPUT, MEASURED, THEORY, batch_s, cost_of, iteration_s, prefill_s, published
from sim.theory import sarathi as theory


def rows() -> Iterator[Row]:
    yield from _iteration_times()
    yield from _ratios()
    yield from _tiles()
    yield from _saturation()
    yield from _chunking()


def _iteration_times() -> Iterator[Row]:
    row_of = partial(Row, experiment="iteration time", kind="calibrated")
    cost = cost_of("llama-13b", "a6000")
    found = {}
    for line in published("iterations")[:3]:
        prompt, decodes = int(line["prompt_tokens"]), int(line["decodes"])
        found[line["scheme"]] = ms = 1e3 * iteration_s(cost, prompt, decodes)
        goes_in = line["scheme"] != "decode-maximal"
        yield row_of(
            case=f"{line['scheme']}, {prompt} prompt tokens, {decodes} decodes" + (" (goes in)" if goes_in else ""),
            quantity="ms",
            published=float(line["total_ms"]),
            simulated=ms,
            evidence=INPUT if goes_in else MEASURED,
            within_pct=1.0,
        )
    for case, figure, ms in (
        ("prefill-only, a prompt token (goes in)", 0.229, found["prefill-only"] / 1024),
        ("decode-only, a decode of four (goes in)", 12.49, found["decode-only"] / 4),
    ):
        yield row_of(case=case, quantity="ms a token", published=figure, simulated=ms, evidence=INPUT, within_pct=3.0)
    marginal_ms = (found["decode-maximal"] - found["prefill-only"]) / 3
    yield row_of(
        case="marginal decode: (decode-maximal - prefill-only) / 3",
        quantity="ms",
        published=1.2,
        simulated=marginal_ms,
        evidence=MEASURED,
        within_pct=10.0,
    )
    yield row_of(
        case="a decode alone over a marginal one",
        quantity="ratio",
        published=10.4,
        simulated=found["decode-only"] / 4 / marginal_ms,
        evidence=MEASURED,
        within_pct=10.0,
    )


def _ratios() -> Iterator[Row]:
    cost = cost_of("llama-13b", "a6000")
    per_prompt_token = iteration_s(cost, 1024, 0) / 1024
    for batch, ratio in ((1, 200.0), (2, 100.0), (18, 16.7)):
        yield Row(
            experiment="decode over prefill, per token",
            case=f"LLaMA-13B, A6000, 1024 tokens, batch {batch}",
            quantity="ratio",
            published=ratio,
            simulated=iteration_s(cost, 0, batch) / batch / per_prompt_token,
            kind="calibrated",
            evidence=MEASURED,
            within_pct=3.0,
        )


def _tiles() -> Iterator[Row]:
    row_of = partial(Row, experiment="tile steps", kind="calibrated")
    cost = cost_of("llama-13b", "a6000")
    found = {}
    for line in published("iterations")[3:]:
        tokens = int(line["prompt_tokens"])
        found[tokens] = ms = 1e3 * iteration_s(cost, tokens, 0)
        yield row_of(
            case=f"{tokens} tokens" + (" (goes in)" if tokens == 256 else ""),
            quantity="ms",
            published=float(line["total_ms"]),
            simulated=ms,
            evidence=INPUT if tokens == 256 else MEASURED,
            within_pct=5.0,
        )
    yield row_of(
        case="two tiles over one",
        quantity="step, %",
        published=27.0,
        simulated=100 * (found[256] / found[128] - 1),
        evidence=MEASURED,
        within_abs=5.0,
    )
    yield row_of(
        case="one token beyond two tiles",
        quantity="step, %",
        published=32.0,
        simulated=100 * (found[257] / found[256] - 1),
        evidence=MEASURED,
        within_abs=5.0,
    )


def _saturation() -> Iterator[Row]:
    """How fast prompts are computed. SARATHI, section 3: from 512 tokens in a batch, and what 256 lose."""
    row_of = partial(Row, experiment="prefill rate", kind="calibrated", evidence=MEASURED)
    cost = cost_of("llama-13b", "a6000")
    best = max(tokens / (1e3 * batch_s(cost, tokens // 512, 512)) for tokens in (512, 1024, 2048))
    yield row_of(
        case="LLaMA-13B, A6000, prompts of 512 tokens, the best of one, two and four together",
        quantity="prompt tokens a ms and layer",
        published=180.0,
        simulated=best * 40,
        within_pct=5.0,
    )
    yield row_of(
        case="LLaMA-13B, A6000, 256 tokens (their time goes in)",
        quantity="below the best rate, %",
        published=12.5,
        simulated=100 * (1 - 256 / (1e3 * batch_s(cost, 1, 256)) / best),
        within_abs=10.0,
    )


def _chunking() -> Iterator[Row]:
    cost = cost_of("llama-13b", "a6000")
    whole, _ = prefill_s(cost, 1024, 1024)
    for line in published("chunking"):
        chunk = int(line["chunk"])
        chunked, kv_read = prefill_s(cost, 1024, chunk)
        yield Row(
            experiment="chunking overhead",
            case=f"LLaMA-13B, A6000, 1024 tokens, chunk {chunk}",
            quantity="more prefill time, %",
            published=100 * float(line["loss"]),
            simulated=100 * (chunked / whole - 1),
            kind="emulated",
            evidence=MEASURED,
            within_abs=float(line["within_points"]),
        )
        n = int(theory.chunk_count(1024, chunk))
        yield Row(
            experiment="chunking overhead",
            case=f"KV reads of {n} chunks: N (N + 1) / 2",
            quantity="chunk-sized reads",
            published=float(theory.kv_chunk_reads(n)),
            simulated=kv_read / chunk,
            kind="theory",
            evidence=THEORY,
            within_abs=0.0,
        )
    better = prefill_s(cost, 1024, 256)[0]
    worse = prefill_s(cost, 1024, 320)[0]
    yield Row(
        experiment="chunking overhead",
        case="chunk 256 beats 320, which is no multiple of the tile",
        quantity="prefill time, chunk 256 / chunk 320",
        published="below 1",
        simulated=better / worse,
        kind="qualitative",
        evidence=MEASURED,
        holds=better < worse,
    )
