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
    row_of = partial(Row, "iteration time", kind="calibrated")
    cost = cost_of("llama-13b", "a6000")
    found = {}
    for line in published("iterations")[:3]:
        prompt, decodes = int(line["prompt_tokens"]), int(line["decodes"])
        found[line["scheme"]] = ms = 1e3 * iteration_s(cost, prompt, decodes)
        goes_in = line["scheme"] != "decode-maximal"
        yield row_of(
            f"{line['scheme']}, {prompt} prompt tokens, {decodes} decodes" + (" (goes in)" if goes_in else ""), "ms",
            float(line["total_ms"]), ms, evidence=INPUT if goes_in else MEASURED, within_pct=1.0,
        )  # fmt: skip
    for case, figure, ms in (
        ("prefill-only, a prompt token (goes in)", 0.229, found["prefill-only"] / 1024),
        ("decode-only, a decode of four (goes in)", 12.49, found["decode-only"] / 4),
    ):
        yield row_of(case, "ms a token", figure, ms, evidence=INPUT, within_pct=3.0)
    marginal_ms = (found["decode-maximal"] - found["prefill-only"]) / 3
    yield row_of(
        "marginal decode: (decode-maximal - prefill-only) / 3", "ms", 1.2, marginal_ms, evidence=MEASURED,
        within_pct=10.0,
    )  # fmt: skip
    yield row_of(
        "a decode alone over a marginal one", "ratio", 10.4, found["decode-only"] / 4 / marginal_ms, evidence=MEASURED,
        within_pct=10.0,
    )  # fmt: skip


def _ratios() -> Iterator[Row]:
    cost = cost_of("llama-13b", "a6000")
    per_prompt_token = iteration_s(cost, 1024, 0) / 1024
    for batch, ratio in ((1, 200.0), (2, 100.0), (18, 16.7)):
        yield Row(
            "decode over prefill, per token", f"LLaMA-13B, A6000, 1024 tokens, batch {batch}", "ratio", ratio,
            iteration_s(cost, 0, batch) / batch / per_prompt_token, kind="calibrated", evidence=MEASURED,
            within_pct=3.0,
        )  # fmt: skip


def _tiles() -> Iterator[Row]:
    row_of = partial(Row, "tile steps", kind="calibrated")
    cost = cost_of("llama-13b", "a6000")
    found = {}
    for line in published("iterations")[3:]:
        tokens = int(line["prompt_tokens"])
        found[tokens] = ms = 1e3 * iteration_s(cost, tokens, 0)
        yield row_of(
            f"{tokens} tokens" + (" (goes in)" if tokens == 256 else ""), "ms", float(line["total_ms"]), ms,
            evidence=INPUT if tokens == 256 else MEASURED, within_pct=5.0,
        )  # fmt: skip
    yield row_of(
        "two tiles over one", "step, %", 27.0, 100 * (found[256] / found[128] - 1), evidence=MEASURED, within_abs=5.0
    )
    yield row_of(
        "one token beyond two tiles", "step, %", 32.0, 100 * (found[257] / found[256] - 1), evidence=MEASURED,
        within_abs=5.0,
    )  # fmt: skip


def _saturation() -> Iterator[Row]:
    """How fast prompts are computed. SARATHI, section 3: from 512 tokens in a batch, and what 256 lose."""
    row_of = partial(Row, "prefill rate", kind="calibrated", evidence=MEASURED)
    cost = cost_of("llama-13b", "a6000")
    best = max(tokens / (1e3 * batch_s(cost, tokens // 512, 512)) for tokens in (512, 1024, 2048))
    yield row_of(
        "LLaMA-13B, A6000, prompts of 512 tokens, the best of one, two and four together",
        "prompt tokens a ms and layer", 180.0, best * 40, within_pct=5.0,
    )  # fmt: skip
    yield row_of(
        "LLaMA-13B, A6000, 256 tokens (their time goes in)", "below the best rate, %", 12.5,
        100 * (1 - 256 / (1e3 * batch_s(cost, 1, 256)) / best), within_abs=10.0,
    )  # fmt: skip


def _chunking() -> Iterator[Row]:
    cost = cost_of("llama-13b", "a6000")
    whole, _ = prefill_s(cost, 1024, 1024)
    for line in published("chunking"):
        chunk = int(line["chunk"])
        chunked, kv_read = prefill_s(cost, 1024, chunk)
        yield Row(
            "chunking overhead", f"LLaMA-13B, A6000, 1024 tokens, chunk {chunk}", "more prefill time, %",
            100 * float(line["loss"]), 100 * (chunked / whole - 1), kind="emulated", evidence=MEASURED,
            within_abs=float(line["within_points"]),
        )  # fmt: skip
        n = int(theory.chunk_count(1024, chunk))
        yield Row(
            "chunking overhead", f"KV reads of {n} chunks: N (N + 1) / 2", "chunk-sized reads",
            float(theory.kv_chunk_reads(n)), kv_read / chunk, kind="theory", evidence=THEORY, within_abs=0.0,
        )  # fmt: skip
    better = prefill_s(cost, 1024, 256)[0]
    worse = prefill_s(cost, 1024, 320)[0]
    yield Row(
        "chunking overhead", "chunk 256 beats 320, which is no multiple of the tile",
        "prefill time, chunk 256 / chunk 320", "below 1", better / worse, kind="qualitative", evidence=MEASURED,
        holds=better < worse,
    )  # fmt: skip
