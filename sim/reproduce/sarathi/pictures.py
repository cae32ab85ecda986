"""Pictures of this group, and the timeline of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwmodels.totals import Totals
from policies.published import OrcaPaged
from policies.sarathi import DecodeMaximal
from sim.plots import batching
from sim.plots.stages import gantt_figure
from sim.plots.style import dress, save
from sim.report.timeline import write_timeline
from sim.reproduce.sarathi.machines import deployment
from sim.reproduce.sarathi.pipelines import gpt3_trace
from sim.reproduce.sarathi.runs import (
    batch_s,
    cost_of,
    decodes_at,
    gain,
    gains_over_pd,
    iteration_s,
    prefill_s,
    published,
    replay,
)
from sim.reproduce.sarathi.serving import DATASETS, SERVE_RATES, capacity, serve_ablation
from sim.theory import sarathi as theory

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plots(folder: Path) -> list[Path]:
    """Draw the pictures of this group into *folder*, and write the timeline of the pipeline."""
    made = []
    for name, draw in (
        ("sarathi-per-token", _draw_per_token),
        ("sarathi-intensity", _draw_intensity),
        ("sarathi-pd-ratio", _draw_pd_ratio),
        ("sarathi-chunk-size", _draw_chunk_size),
        ("sarathi-ablation", _draw_ablation),
        ("sarathi-capacity", _draw_capacity),
    ):
        made += save(draw(), folder / f"{name}.png", svg=False)
    return made + _draw_pipeline(folder)


def _draw_per_token() -> Figure:
    cost = cost_of("llama-13b", "a6000")
    batches = (1, 2, 4, 8, 16, 32)
    figure, (prefill, decode) = batching.figure_of(2, "LLaMA-13B on an A6000: time a token")
    together = {
        f"{tokens} tokens": [(batch, 1e3 * batch_s(cost, batch, tokens) / (batch * tokens)) for batch in batches]
        for tokens in (64, 256, 1024)
    }
    alone = {
        f"context {tokens}": [(batch, 1e3 * iteration_s(cost, 0, batch, tokens) / batch) for batch in batches]
        for tokens in (256, 1024, 3072)
    }
    batching.plot_lines(prefill, together, log_x=True, log_y=True)
    batching.plot_lines(decode, alone, log_x=True, log_y=True)
    for ax, title in ((prefill, "prefill"), (decode, "decode")):
        dress(ax, x="prompts or sequences in the batch", y="ms a token", title=title)
        batching.plain_numbers(ax.xaxis, batches)
    batching.plain_numbers(prefill.yaxis, (0.2, 0.3, 0.5, 0.8))
    batching.plain_numbers(decode.yaxis, (2, 5, 10, 20, 50))
    return figure


def _draw_intensity() -> Figure:
    cost = cost_of("llama-13b", "a6000")
    rows = [2**i for i in range(12)]

    def intensity(totals: Totals) -> float:
        work = cost.work(totals)
        return float(work.flops / work.hbm_bytes)

    lines = {
        "prefill, a prompt of n tokens": [(n, intensity(Totals(n, n, 1, n * (n + 1) // 2, n, 0, 0, 1))) for n in rows],
        "decode, n sequences of 1024 tokens": [(n, intensity(Totals(n, 0, 0, 0, 0, n, n * 1024, n))) for n in rows],
        "hybrid, n rows: 17 decodes, the rest a chunk": [
            (n, intensity(Totals(n, n - 17, 1, (n - 17) * (n - 16) // 2, n - 17, 17, 17 * 1024, 18)))
            for n in rows
            if n > 17
        ],
    }
    figure, (ax,) = batching.figure_of(1, "LLaMA-13B on an A6000: arithmetic intensity by phase")
    batching.plot_lines(ax, lines, log_x=True, log_y=True)
    ridge = cost.peak_flops_per_s / cost.peak_bytes_per_s
    ax.axhline(ridge, color="#5A5A5A", linewidth=1.0)
    ax.annotate(
        f"ridge of the datasheet, {ridge:.0f}", (1, ridge), xytext=(0, 3), textcoords="offset points", fontsize=8
    )
    dress(ax, x="n", y="FLOP a byte of weights and KV cache", title="")
    batching.plain_numbers(ax.xaxis, rows[::2])
    batching.plain_numbers(ax.yaxis, (1, 10, 100, 1000))
    return figure


def _draw_pd_ratio() -> Figure:
    cost = cost_of("llama-13b", "a6000")
    title = "LLaMA-13B on an A6000: gain of SARATHI over prefill-only and decode-only batches"
    figure, axes = batching.figure_of(3, title)
    for ax, (tokens, batch) in zip(axes, ((1024, 18), (2048, 10), (3072, 6)), strict=True):
        lines, peaks = {}, {}
        wide = {round(tokens / (ratio + 1)) for ratio in np.geomspace(2, 120, 24)}
        for chunk in (128, 256, 512):
            peaks[chunk] = theory.optimal_pd_ratio(chunk, batch)
            centre = decodes_at(tokens, peaks[chunk])
            swept = sorted(d for d in wide | {centre - 1, centre, centre + 1} if d >= 1)
            found = gains_over_pd(cost, batch, tokens, chunk, swept, 12)
            lines[chunk] = [(each.pd_ratio, each.gain) for each in found]
        uncut = [
            gain(cost, DecodeMaximal(256, batch, chunk_when_full=True), batch, tokens, decodes, 12)
            for decodes in sorted(wide)
        ]
        batching.plot_gain_over_pd(ax, lines, peaks, uncut={256: [(each.pd_ratio, each.gain) for each in uncut]})
        dress(ax, x="prompt tokens / decodes", y="throughput / baseline", title=f"{tokens} tokens, batch {batch}")
    return figure


def _draw_chunk_size() -> Figure:
    cost = cost_of("llama-13b", "a6000")
    chunks = (64, 128, 192, 256, 320, 384, 512)
    whole, _ = prefill_s(cost, 1024, 1024)
    figure, (left, right) = batching.figure_of(
        2, "LLaMA-13B on an A6000, 1024 tokens: what a chunk size costs and gains"
    )
    overhead = [(chunk, prefill_s(cost, 1024, chunk)[0] / whole) for chunk in chunks]
    printed = sorted((float(line["chunk"]), 1 + float(line["loss"])) for line in published("chunking"))
    batching.plot_lines(left, {"here": overhead, "published: at most (512, 256), over (128), about (64)": printed})
    dress(left, x="chunk, tokens", y="prefill time, chunked / whole", title="prefill alone")
    lines: dict[str, list[tuple[float, float]]] = {}
    for batch in (6, 18):
        lines[f"batch {batch}"] = []
        for chunk in chunks:
            centre = decodes_at(1024, theory.optimal_pd_ratio(chunk, batch))
            found = gains_over_pd(cost, batch, 1024, chunk, range(max(1, centre - 3), centre + 4), 12)
            best = max(found, key=lambda each: each.gain)
            lines[f"batch {batch}"].append((chunk, best.gain))
    batching.plot_lines(right, lines)
    dress(right, x="chunk, tokens", y="throughput / baseline", title="end to end, at the best P:D of each chunk")
    for ax in (left, right):
        ax.set_xticks(chunks)
    return figure


def _draw_ablation() -> Figure:
    figure, axes = batching.figure_of(2, "Sarathi-Serve's ablation: Yi-34B on two A100, token budget 1024")
    for ax, dataset in zip(axes, DATASETS, strict=True):
        batching.plot_tradeoff(ax, serve_ablation(dataset, 4))
        dress(
            ax,
            x="median TTFT, s",
            y="p99 time between tokens, s",
            title=f"{dataset}, {SERVE_RATES[dataset]} requests/s",
        )
    return figure


def _draw_capacity() -> Figure:
    figure, (ax,) = batching.figure_of(1, "Yi-34B on two A100, openchat lengths: highest rate within an SLO")
    deployed = deployment("yi-34b", "a100-80gb-sxm", 2)
    # Sarathi-Serve's strict and relaxed limits for this model.
    groups = {
        f"p99 TBT {limit:g} s": {
            system: capacity(deployed, system, "openchat", limit, 400) for system in ("vLLM", "Orca", "Sarathi-Serve")
        }
        for limit in (0.2, 1.0)
    }
    batching.plot_bars(ax, groups)
    dress(ax, x="", y="requests/s", title="median delay at most 2 s, no growing queue")
    return figure


def _draw_pipeline(folder: Path) -> list[Path]:
    cost = cost_of("gpt3-175b", "a100-80gb-sxm", 8, 8)
    trace = gpt3_trace(600)
    runs = {
        "Orca, best case": replay(cost, OrcaPaged(27, max_prompts=1), trace),
        "SARATHI, chunk 256": replay(cost, DecodeMaximal(256, 27), trace),
        "SARATHI, chunk 256, nine micro-batches in flight": replay(cost, DecodeMaximal(256, 27), trace, lanes=9),
    }
    figure = gantt_figure(
        {name: columns.replicas[0] for name, columns in runs.items()},
        begin_s=60.0,
        end_s=62.0,
        title="GPT-3 on 64 A100, eight stages: two seconds of a run",
    )
    files = save(figure, folder / "sarathi-pipeline.png", svg=False)
    for name, key in (("orca", "Orca, best case"), ("sarathi", "SARATHI, chunk 256")):
        files.append(folder / f"sarathi-pipeline-{name}.events.json")
        write_timeline(runs[key], files[-1], begin_s=60.0, end_s=70.0)
    return files
