# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your benchmark
#
# A server was measured at some rates. What does one of these runs, or two, tell about the others? Llama-3.1-8B on one H100 behind
# vLLM 0.11 was measured by inference-perf at seven rates, from one request a second to far beyond what it can take
# (kubernetes-sigs/inference-perf, Apache-2.0). The table is looked for in `../../shared/serving`; without it the cells say so and
# do nothing.

# %%
# %matplotlib inline
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.ticker import LogFormatter

from rooftrace import plots
from sim.bench.cases import cases_of, priors_of
from sim.bench.fitting import fit
from sim.bench.parameters import BY_NAME, own_value
from sim.bench.public import INFERENCE_PERF, inference_perf

folder = next(
    (path for path in map(Path, ("../../shared/serving", "../shared/serving")) if (path / INFERENCE_PERF).is_file()),
    None,
)
print("measurements found" if folder else f"{INFERENCE_PERF} is not here: the cells below do nothing")

# %% [markdown]
# ## As it is
#
# Each run is simulated as its clients asked: times between requests are exponential and stretched to fill a minute, and at most 440
# requests are in flight. Below, what is predicted without any fit, over what was measured.

# %%
table = pd.DataFrame()
if folder:
    scenario, runs = inference_perf(folder)["plain"]
    cases, base = cases_of(scenario, runs)
    widths = priors_of(cases[0])
    table = pd.DataFrame(
        {
            "requests/s": [run.offered.rate_per_s for run in runs],
            "saturated": [run.saturated for run in runs],
            "TPOT measured, ms": [1e3 * case.measured_s["tpot_s"] for case in cases],
            "unfitted": [case.replay(base).figures["tpot_s"] / case.measured_s["tpot_s"] - 1 for case in cases],
        }
    ).round(3)
table

# %% [markdown]
# ## Fitted to one run, and to two
#
# The lowest rate alone fixes what an iteration takes, and not which part of it is host work. The highest rate that the server kept
# up with tells how that grows with the batch.

# %%
found = {}
if folder:
    kept_up = max(i for i, run in enumerate(runs) if run.saturated is False)
    found = {
        "the lowest rate": fit([cases[0]], base, widths),
        "two rates": fit([cases[0], cases[kept_up]], base, widths),
    }
terms = {
    BY_NAME[name].title: {
        what: f"{own_value(each.posterior.setting, name):.3g} ({each.posterior.told(name):.0%} told)"
        for what, each in found.items()
    }
    for name in (next(iter(found.values())).posterior.names if found else ())
}
pd.DataFrame(terms).T

# %% [markdown]
# ## Held-out runs
#
# Every run that a fit had not seen, with its 90 % interval. Near saturation the time to a first token hangs on whether a queue
# grows: the interval there is wide, and says so.

# %%
rows = []
for what, each in found.items():
    seen = {case.name for case in each.cases}
    for case, run in zip(cases, runs, strict=True):
        if case.name not in seen:
            for one in each.predict(case):
                rows.append(
                    {
                        "fitted to": what,
                        "requests/s": run.offered.rate_per_s,
                        "quantity": one.quantity,
                        "measured": one.measured_s,
                        "predicted": one.predicted_s,
                        "low": one.low_s,
                        "high": one.high_s,
                        "error": one.error,
                        "held": one.held,
                    }
                )
held_out = pd.DataFrame(rows)
if len(held_out):
    by = held_out.assign(size=held_out["error"].abs()).groupby(["fitted to", "quantity"])
    print(by.agg(mean=("size", "mean"), median=("size", "median"), held=("held", "mean")).round(3))

# %%
figure = plots.figure(title="Runs that the fit had not seen, and the intervals predicted for them", width=9, height=4)
for axes, quantity in zip(figure.subplots(1, 2), ("tpot_s", "ttft_s"), strict=True):
    some = (
        held_out[(held_out["quantity"] == quantity) & (held_out["fitted to"] == "two rates")] if len(held_out) else []
    )
    if len(some):
        middle = some["predicted"]
        ends = np.abs(np.stack((middle - some["low"], some["high"] - middle)))
        axes.errorbar(some["requests/s"], 1e3 * middle, 1e3 * ends, fmt="o", capsize=3, label="predicted, 90 %")
        axes.plot(some["requests/s"], 1e3 * some["measured"], "x", color="black", label="measured")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter())
        axes.legend()
    axes.set_xlabel("requests/s")
    axes.set_ylabel(f"{quantity.removesuffix('_s').upper()}, ms")
figure
