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
# # How large a chunk?
#
# Sarathi-Serve puts all decodes and a chunk of a prompt into each iteration, up to a token budget. A small budget keeps the
# gaps between tokens short and makes prompts wait; a large one does the opposite. Where is the best place? That depends
# on the load and on which latency matters, so it is a sweep.

# %%
# %matplotlib inline
from hwmodels.budget import saturating_tokens
from rooftrace import Scenario, plots, sweep
from sim.scenario.assembly import build
from sim.study.compare import compare

base = Scenario.default().with_set("workload.requests=500", "scheduler={policy: sarathi}")

budgets = sweep(
    base,
    axes={"scheduler.token_budget": [128, 256, 512, 1024, 2048], "workload.rate_scale": [1.0, 2.0]},
    replications=3,
)
budgets

# %%
figure = plots.figure(2, title="A larger budget: first tokens sooner, later tokens later", width=4.8)
left, right = figure.subplots(1, 2)
plots.lines(budgets.table, left, x="scheduler.token_budget", y="ttft_s.p99", hue="workload.rate_scale", log_x=True)
plots.lines(budgets.table, right, x="scheduler.token_budget", y="itl_s.p99", hue="workload.rate_scale", log_x=True)
figure

# %% [markdown]
# What is best depends on what is promised. With a limit on both, the share of requests that keep them says where: here 1 s
# for the first token, and 1.3 times the shortest median time of a later token that the sweep has seen.

# %%
tpot_limit_s = round(1.3 * float(budgets.table["tpot_s.p50"].min()), 4)
strict = base.with_value("slo", {"ttft_s": 1.0, "tpot_s": tpot_limit_s})
kept = sweep(strict, axes={"scheduler.token_budget": [64, 128, 256, 512, 1024, 2048, 4096]}, replications=3)
figure = plots.figure(title=f"Requests within 1 s and {1e3 * tpot_limit_s:.3g} ms a token")
plots.lines(kept.table, figure.subplots(), x="scheduler.token_budget", y="slo_attainment", log_x=True)
figure

# %%
share, half = kept.table["slo_attainment"], kept.table["slo_attainment.half_width"]
best = kept.table.loc[share.idxmax()]
rivals = kept.table[(share + half >= share[best.name] - half[best.name]) & (kept.table.index != best.name)]
others = ", ".join(f"{budget:.0f}" for budget in rivals["scheduler.token_budget"]) or "none"
print(f"most at a budget of {best['scheduler.token_budget']:.0f}: {share[best.name]:.1%} of requests")
print(f"budgets whose intervals overlap with its own, so that three replications do not settle it: {others}")

# %% [markdown]
# ## Why not smaller?
#
# Below some size a chunk leaves the arithmetic units idle: the weights are read for few rows. The cost model knows where
# 80 % of the best prompt throughput is reached; the policy takes it, or what `slo.tpot_s` allows, when `token_budget` is
# `auto`.

# %%
cost = build(base).replicas[0].cost
print(f"80 % of the best prompt throughput from {saturating_tokens(cost)} tokens on")

# %% [markdown]
# ## Against prompts first
#
# The usual alternative computes whole prompts as soon as they come. On the same random numbers:

# %%
comparison = compare(
    base.with_set("workload.rate_scale=2"),
    base.with_set("workload.rate_scale=2").with_set("scheduler={policy: vllm-v0}"),
    metrics=["ttft_s.p99", "itl_s.p99", "tpot_s.p99", "output_tokens_per_s"],
    replications=3,
)
comparison

# %%
verdicts = {each.metric: each for each in comparison}
assert verdicts["itl_s.p99"].change.mean > 0, "whole prompts should lengthen the gaps between tokens"
