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
# # Statistical multiplexing with model parallelism
#
# Two models, two GPUs. The obvious way gives each model its own GPU. AlpaServe (Li et al., OSDI 2023) splits both models over
# both GPUs in a pipeline instead: no request becomes faster, but whichever model is asked for, both GPUs work for it. With
# bursty traffic that is worth more than what the pipeline costs.

# %%
# %matplotlib inline
import numpy as np
import pandas as pd

from hwmodels.single_pass import load_single_pass
from policies.placement import Cluster, PartitionSearch, SelectiveReplication
from rooftrace import plots
from sim.placement import Serving, find, serve
from workloads import Fixed, Gamma, multi_model

N_MODELS, N_GPUS = 6, 8
models = {f"m{i}": load_single_pass("bert-2.7b") for i in range(N_MODELS)}


def traffic(rate_per_s, cv, seed):
    """Two minutes of requests: the same rate for each model, arrivals as bursty as *cv*."""
    arrivals = {name: Gamma(rate_per_s=rate_per_s, cv=cv) for name in models}
    return multi_model(arrivals, prompt=Fixed(tokens=2048), duration_s=120.0, seed=seed)


# %% [markdown]
# ## One placement, looked at
#
# A search plans on one sample of the traffic and is judged on another.

# %%
serving = Serving(cluster=Cluster(n_devices=N_GPUS, memory_bytes=13 * 2**30), models=models, slo_scale=5.0)
plan = find(PartitionSearch(), serving, traffic(3.0, 4.0, seed=0))
print(plan.placement.describe())
print(
    f"served in time, on traffic that was not seen: {serve(serving, plan.placements, traffic(3.0, 4.0, 1)).attainment:.1%}"
)

# %% [markdown]
# ## Burstiness
#
# Model parallelism (a partition into groups) against replication alone, as traffic becomes burstier. Three fresh samples of
# traffic for each point.

# %%
rows = []
for cv in (1.0, 2.0, 4.0, 6.0):
    for name, search in (("model parallelism", PartitionSearch()), ("replication", SelectiveReplication())):
        found = find(search, serving, traffic(3.0, cv, seed=0))
        attained = [serve(serving, found.placements, traffic(3.0, cv, seed)).attainment for seed in (1, 2, 3)]
        half = 4.303 * np.std(attained, ddof=1) / np.sqrt(3)  # Student's t, 95 %, 2 degrees of freedom
        rows.append({"cv": cv, "placement": name, "attained": np.mean(attained), "attained.half_width": half})
table = pd.DataFrame(rows)
table.round(3)

# %%
figure = plots.figure(title=f"{N_MODELS} models on {N_GPUS} GPUs, 3 requests/s each")
ax = figure.subplots()
plots.lines(table, ax, x="cv", y="attained", hue="placement")
ax.set_xlabel("burstiness of arrivals, coefficient of variation", fontsize=9)
ax.set_ylabel("share of requests within 5 x their latency", fontsize=9)
figure

# %% [markdown]
# The burstier the traffic, the more sharing is worth.

# %%
wide = table.pivot(index="cv", columns="placement", values="attained")
gain = wide["model parallelism"] - wide["replication"]
print(gain.round(3))
assert gain.loc[4.0] > 0
