"""Pictures of one run: its latencies, and what went on over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.plots.classes import classes_figure
from sim.plots.fleet import fleet_figure
from sim.plots.frames import blocks_of, latency_cdf, running, throughput
from sim.plots.latency import plot_latency_ecdf, plot_steps, weighted_ecdf
from sim.plots.levels import Blocks, plot_level
from sim.plots.over_time import over_time
from sim.plots.style import figure, lighten, save, sheet
from sim.results import Result
from sim.results.costs import usd_per_machine_hour
from sim.text import seconds_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]


def save_run(result: Result, folder: Path) -> list[Path]:
    """Draw what `rooftrace run` draws, latency.png and timeline.png, classes.png where there are classes of service, and fleet.png
    where machines come, go or fail, into *folder*; their paths.

    A result that is also written is `Result.kept` for both, so that its iterations are worked out once. ValueError for a
    result that was read from a folder, which has no gaps between tokens.
    """
    columns, itl = result.kept().columns, result.summary["itl_s"]
    requests = columns.requests
    latency = latency_figure(
        ttft_s=metrics.ttft_s(requests),
        e2el_s=metrics.e2el_s(requests),
        itl_blocks=columns.itl_blocks,
        itl_quantiles_s=None if itl["p50"] is None else [itl["p50"], itl["p90"], itl["p99"]],
        title=f"{_latency_headline(result.summary)}\n{result.label}",
    )
    timeline = timeline_figure(
        requests=requests,
        iterations=columns.iteration_blocks,
        last_end_ns=metrics.last_iteration_end_ns(columns),
        kv_blocks_total=columns.meta["kv_blocks_total"],
        fleet=columns.meta.get("fleet"),
        title=f"{_timeline_headline(result)}\n{result.label}",
    )
    lighten(latency)
    lighten(timeline)
    paths = [*save(latency, folder / "latency.png", svg=False), *save(timeline, folder / "timeline.png", svg=False)]
    if result.manifest.get("classes"):
        title = f"{_classes_headline(result)}\n{result.label}"
        of_classes = classes_figure(requests=requests, classes=result.manifest["classes"], title=title)
        paths += save(of_classes, folder / "classes.png", svg=False)
    if "fleet" not in columns.meta:
        return paths

    fleet = fleet_figure(
        requests=requests,
        fleet=columns.meta["fleet"],
        last_end_ns=metrics.last_iteration_end_ns(columns),
        ttft_limit_s=result.slo.get("ttft_s"),
        title=f"{_fleet_headline(result.summary)}\n{result.label}",
        classes=result.manifest.get("classes") or (),
        usd_per_hour=usd_per_machine_hour(columns, result.manifest),
    )
    return [*paths, *save(fleet, folder / "fleet.png", svg=False)]


def _fleet_headline(summary: Mapping[str, Any]) -> str:
    fleet = summary["fleet"]
    text = f"{fleet['machine_hours']:,.2f} machine-hours, {fleet['machines_mean'] or 0:.1f} machines on average"
    text += f" and {fleet['machines_max']} at most"
    if fleet["failures"]:
        text += f"; machines failed {fleet['failures']:,} time{'s' if fleet['failures'] > 1 else ''}"
    within = summary["slo_attainment"]
    return text if within is None else f"{text}; {within:.1%} of requests within the SLO"


def _classes_headline(result: Result) -> str:
    classes = result.manifest["classes"]
    limited = [each["name"] for each in classes if any(each["slo"].values()) or each.get("deadline_s") is not None]
    kept = {name: result.summary["classes"][name]["slo_attainment"] for name in limited}
    texts = [f"{name} {share:.1%}" for name, share in kept.items() if share is not None]
    return f"Requests within their limits: {', '.join(texts)}" if texts else _latency_headline(result.summary)


def _latency_headline(summary: Mapping[str, Any]) -> str:
    finished = summary["requests"]["finished"]
    first, whole = summary["ttft_s"], summary["e2el_s"]
    if first["p99"] is None:
        return f"{finished:,} requests finished, none with a first token"
    return (
        f"Half of {finished:,} requests see a first token within {seconds_text(first['p50'])}, "
        f"99 % within {seconds_text(first['p99'])}; half are done within {seconds_text(whole['p50'])}"
    )


def _timeline_headline(result: Result) -> str:
    summary = result.summary
    kv = summary["kv_utilization"]["max"]
    queue = {
        True: "Arrivals outrun the deployment: the queue still grows when they end",
        False: "The deployment keeps up with its arrivals",
    }.get(summary["saturated"], "Queue, batch and memory over the run")
    if result.manifest.get("workload", {}).get("closed_loop"):
        # Any deployment keeps up with clients that wait for an answer before they ask again.
        queue = "Clients ask again when they are answered"
    where = " of the fullest replica" if len(result.columns.meta["kv_blocks_total"]) > 1 else ""
    memory = "" if kv is None else f"; KV memory{where} peaks at {kv:.0%}"
    preempted = summary["preemptions"]
    return f"{queue}{memory}" + (f"; {preempted:,} preemption{'s' * (preempted != 1)}" if preempted else "")


def latency_figure(
    *,
    ttft_s: FloatArray,
    e2el_s: FloatArray,
    itl_blocks: metrics.Blocks,
    itl_quantiles_s: Sequence[float] | None,
    title: str,
) -> Figure:
    """Distributions of TTFT, ITL and end-to-end latency side by side; latencies with NaN where there is none.

    *itl_blocks* gives gaps in ns with their weights, *itl_quantiles_s* their p50, p90 and p99, None where there are no gaps.
    """
    figure = sheet(11, 4.1, title=title, layout=None)
    figure.subplots_adjust(left=0.07, right=0.985, bottom=0.14, top=0.79, wspace=0.09)
    ttft, itl, e2e = figure.subplots(1, 3, sharey=True)
    plot_latency_ecdf(ttft, ttft_s, name="Time to first token (TTFT)")
    found = None
    if itl_quantiles_s is not None:

        def gaps_s() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
            return ((np.maximum(gaps_ns * 1e-9, 1e-9), weights) for gaps_ns, weights in itl_blocks())

        found = weighted_ecdf(gaps_s), itl_quantiles_s
    plot_steps(itl, found, name="Gap between tokens (ITL)")
    plot_latency_ecdf(e2e, e2el_s, name="End to end (E2EL)")
    ttft.set_ylabel("share at or below", fontsize=9)
    for ax in (ttft, itl, e2e):
        ax.set_xlabel("latency, log scale", fontsize=9)
    return figure


def timeline_figure(
    *,
    requests: Mapping[str, NDArray[Any]],
    iterations: Blocks,
    last_end_ns: int,
    kv_blocks_total: Sequence[int],
    title: str,
    fleet: Mapping[str, Any] | None = None,
) -> Figure:
    """Requests waiting and running, KV memory in use, the share of prompt tokens found in a prefix cache, where there is one, and
    tokens a second over time, one above the other.

    KV memory is the mean share of the replicas that could serve then, as in the summary: *fleet* says which, all without it.

    *last_end_ns* is the end of the last iteration, -1 without any.
    """
    found = over_time(requests, iterations, last_end_ns=last_end_ns, kv_blocks_total=kv_blocks_total, fleet=fleet)
    edges_s = found.edges_s
    figure = sheet(11, 8.4 if found.prefix_share is None else 9.9, title=title, layout=None)
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.06, top=0.92, hspace=0.12)
    axes = list(figure.subplots(5 if found.prefix_share is None else 6, 1, sharex=True))
    if found.prefix_share is not None:
        found_ax = axes.pop(3)
        plot_level(found_ax, edges_s, {"found": 100 * found.prefix_share}, label="prompt found, %", fill=True)
        found_ax.set_ylim(0, 104)
    queue_ax, running_ax, kv_ax, prompt_ax, output_ax = axes
    plot_level(queue_ax, edges_s, {"waiting": found.waiting}, label="requests waiting", fill=True)
    plot_level(running_ax, edges_s, {"running": found.running}, label="requests running", fill=True)
    plot_level(kv_ax, edges_s, {"KV": found.kv_share * 100}, label="KV blocks used, %", fill=True)
    plot_level(prompt_ax, edges_s, {"prompt": found.prompt_tokens_per_s}, label="prompt tokens/s", fill=True)
    plot_level(output_ax, edges_s, {"output": found.output_tokens_per_s}, label="output tokens/s", fill=True)
    for ax in (prompt_ax, output_ax):
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    width = seconds_text(float(edges_s[1] - edges_s[0]))
    output_ax.set_xlabel(f"time since the first arrival, s (means over intervals of {width})", fontsize=9)
    output_ax.set_xlim(0, float(edges_s[-1]))
    return figure


def run_figures(requests: pd.DataFrame, iterations: pd.DataFrame | Blocks) -> Mapping[str, Figure]:
    """Figures of one run by file name: latency distributions, and what went on over time. *iterations*: `Result.iterations`, or
    `Result.columns.iteration_blocks`, which are never in memory all at once."""
    columns = [name for name in ("ttft_s", "tpot_s", "e2el_s") if requests[name].notna().any()]
    if not columns:
        raise ValueError("no request finished in this run, so that there is nothing to draw")
    latency = figure(len(columns), title="How long requests took", width=4.2)
    for ax, name in zip(np.atleast_1d(latency.subplots(1, len(columns))), columns, strict=True):
        latency_cdf(requests, ax, column=name)
    levels = figure(1, 2, title="Requests in the system, and tokens worked on", width=9, height=2.8)
    top, bottom = levels.subplots(2, 1, sharex=True)
    running(requests, top)
    top.set_xlabel("")
    if any(len(block["start_ns"]) for block in blocks_of(iterations)()):
        throughput(iterations, bottom, arrival_ns=int(requests["arrival_ns"].min()))
    return {"latency-distributions": latency, "over-time": levels}
