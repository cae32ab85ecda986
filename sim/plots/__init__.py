"""Pictures of results: each function draws a DataFrame on an Axes that it is given, and returns nothing.

    figure = plots.figure(); plots.lines(result.table, figure.subplots(), x="workload.rate_scale"); plots.save(figure, path)

Colours are Okabe and Ito's, told apart with any colour vision, and each hue has a marker of its own. A column
`NAME.half_width` beside NAME is drawn as an error bar. matplotlib is imported where a figure is made, without pyplot.
"""

from sim.plots.columns import MAX_HUES, label
from sim.plots.frames import (
    gantt,
    heatmap,
    latency_cdf,
    lines,
    pareto,
    roofline,
    running,
    speedup,
    throughput,
    throughput_latency,
)
from sim.plots.runs import run_figures, save_run
from sim.plots.style import MARKERS, OKABE_ITO, dress, figure, save
from sim.plots.sweeps import sweep_figures

__all__ = [
    "MARKERS",
    "MAX_HUES",
    "OKABE_ITO",
    "dress",
    "figure",
    "gantt",
    "heatmap",
    "label",
    "latency_cdf",
    "lines",
    "pareto",
    "roofline",
    "run_figures",
    "running",
    "save",
    "save_run",
    "speedup",
    "sweep_figures",
    "throughput",
    "throughput_latency",
]
