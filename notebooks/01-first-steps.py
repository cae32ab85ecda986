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
# # First steps
#
# A scenario says what runs where under which load. `simulate` replays it and returns columns: one row a request, one row
# an iteration. Everything else is a function of those.

# %%
# %matplotlib inline
from rooftrace import Scenario, plots, simulate, sweep
from sim.study.compare import compare

base = Scenario.default().with_set("workload.requests=800")
print(base.to_yaml())

# %% [markdown]
# ## Run it

# %%
result = simulate(base)
result

# %%
result.requests.head()

# %% [markdown]
# Half of the requests see a first token within a few hundredths of a second; the tail waits behind long prompts.

# %%
figure = plots.figure(2, title="One H100 keeps up: hardly a request waits while a dozen run", width=4.6)
left, right = figure.subplots(1, 2)
plots.latency_cdf(result.requests, left, column="ttft_s")
plots.running(result.requests, right)
figure

# %% [markdown]
# ## Change one thing
#
# `with_set` takes the same text as `--set` on the command line. Both scenarios meet the same requests, because random
# numbers hang on the seed and on what they are for, not on what was drawn before. So few replications tell much.

# %%
prompts_first = base.with_set("scheduler={policy: vllm-v0}")
compare(base, prompts_first, replications=3)

# %% [markdown]
# Prompts first give the first token sooner, and make those who are already reading wait.
#
# ## Change many things
#
# A sweep runs every combination, on all cores, and keeps what it has finished. Its table has one row a point; the dotted
# names are those of the scenario and of the summary.

# %%
loads = sweep(base, axes={"workload.rate_scale": "0.5:3:6", "replicas": [1, 2]}, replications=2)
loads

# %%
figure = plots.figure(2, title="A second replica shortens both latencies, more so as the load grows", width=4.6)
left, right = figure.subplots(1, 2)
plots.lines(loads.table, left, x="workload.rate_scale", y="ttft_s.p99", hue="replicas")
plots.throughput_latency(loads.table, right, y="tpot_s.p99", hue="replicas")
figure

# %% [markdown]
# From here: `result.save("folder")` writes the files of `rooftrace run` and `plots.save_run(result, folder)` its pictures, and
# `rooftrace compare`, `plot` and `sweep` do on the command line what these cells did.
