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
# # Calibrate this machine
#
# A roofline from a data sheet says what a device could do. A calibrated profile says what it does: kernels are timed at the
# sizes that serving uses, and a model is fitted to the times. Here that is done for the CPU that this notebook runs on, with
# numpy, for GPT-2's shapes. `rooftrace calibrate --out DIR` does the same in full, on GPUs and TPUs with torch or JAX.

# %%
# %matplotlib inline
import datetime
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd

from hwmodels.calibrate.backend import open_backend
from hwmodels.calibrate.fitting import PROFILE, fit_samples
from hwmodels.calibrate.grid import grid, shapes_of
from hwmodels.calibrate.samples import Log
from hwmodels.calibrate.session import collect
from rooftrace import Scenario, plots, simulate

# Processor time of one thread: what else runs on the machine then hardly matters.
machine = open_backend("numpy", "cpu", threads=1, clock="cpu")


def group(operation):
    """Prompts and decodes are fitted apart."""
    if operation.kind != "attention":
        return operation.kind
    return "decode" if dict(operation.shape)["query"] == 1 else "prefill"


everything = grid(machine.facts, [shapes_of("gpt2")], ("fp32",))
Counter(map(group, everything))

# %% [markdown]
# All of these take a quarter of an hour. Some fifteen small ones of each group, and more of prompts, whose shapes vary most,
# are enough for a first profile; what it lacks is certainty about other sizes. The fit's error, on points that were held
# back from it, says how much that is.

# %%
LIMITS = {"query": 256, "past": 512, "batch": 8, "m": 64, "n": 4096, "rows": 4096}
small = [each for each in everything if all(size <= LIMITS.get(name, size) for name, size in each.shape)]
few = []
for name in dict.fromkeys(map(group, small)):
    members = [each for each in small if group(each) == name]
    few += members[:: max(1, len(members) // (60 if name == "prefill" else 15))]
folder = Path(tempfile.mkdtemp())
today = datetime.date.today().isoformat()
taken = collect(machine, few, Log(folder, machine.facts, taken_on=today), budget_s=45, allow_noise=True)
machine.close()
print(f"{machine.facts.title}: {len(taken.samples)} of {len(few)} operations timed")

# %%
profile = fit_samples(folder, fitted_on=today)
pd.DataFrame(
    [
        {
            "kernel": kernel.family,
            "points": kernel.provenance.points,
            "fit, median %": kernel.provenance.fit_median_pct,
            "held back, median %": kernel.provenance.held_median_pct,
        }
        for kernel in profile.kernels
    ]
).round(1)

# %% [markdown]
# ## Use it
#
# A profile is hardware like any other. GPT-2 on this CPU, one request every five seconds:

# %%
served = Scenario(
    model="gpt2",
    hardware=str(folder / PROFILE),
    precision="fp32",
    workload={
        "arrivals": {"process": "poisson", "rate_per_s": 0.2},
        "prompt_tokens": 128,
        "output_tokens": 32,
        "requests": 40,
    },
)
result = simulate(served)
result

# %%
figure = plots.figure(2, width=4.6)
left, right = figure.subplots(1, 2)
plots.latency_cdf(result.requests, left, column="ttft_s")
plots.latency_cdf(result.requests, right, column="tpot_s")
figure
