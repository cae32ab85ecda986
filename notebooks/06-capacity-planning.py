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
# # From a real trace to a recommendation
#
# A team serves chats and wants to know: how many GPUs, of which kind, set up how, so that 99 % of requests see their first
# token within 1 s and 30 ms a token after that, at twice today's traffic, at least cost?
#
# ## The trace
#
# Azure published an hour of conversations of 2023 (AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv`). Where the file is not
# at hand the built-in workload takes its place, which draws arrivals and lengths fitted to it.

# %%
# %matplotlib inline
from pathlib import Path

from rooftrace import Scenario, plots, simulate, sweep
from sim.study.optimize import cheapest
from sim.study.rates import Target, highest_rate

places = [Path("AzureLLMInferenceTrace_conv.csv"), Path("../../shared/traces/AzureLLMInferenceTrace_conv.csv")]
trace = next((str(path.resolve()) for path in places if path.is_file()), None)
print("the published trace" if trace else "the built-in workload in the place of the published trace")
workload = {"trace": trace, "limit": 1500} if trace else {"trace": "conversation", "requests": 1500}
today = Scenario(
    model="llama-3.1-8b",
    hardware="h100-sxm",
    scheduler="sarathi",
    workload=workload,
    slo={"ttft_s": 1.0, "tpot_s": 0.03},
)
result = simulate(today)
result

# %%
result.requests[["prompt_tokens", "output_tokens"]].describe().round(0)

# %% [markdown]
# Today is easy for one H100. How much more would it carry?
#
# ## The limit of one GPU
#
# Every rate is judged by replaying the same requests faster. A trace has no random numbers, so that its replications are
# equal; for an interval that means something, arrivals are drawn anew, Gamma with a CV of 1.3, with the trace's own lengths.

# %%
n = 600
rate = result.summary["requests_per_s"]
drawn = today.with_value(
    "workload",
    {**({"trace": trace} if trace else {"trace": "conversation"}), "requests": n}
    | ({"arrivals": {"process": "gamma", "rate_per_s": round(rate, 2), "cv": 1.3}} if trace else {}),
)
limit = highest_rate(drawn, Target(attainment=0.99), tolerance=0.05, most_replications=6)
print(f"today {rate:.2f} requests/s; one H100 carries {limit}")

# %% [markdown]
# ## Latency as load grows

# %%
scales = sweep(drawn, axes={"workload.rate_scale": "0.5:4:8"}, replications=3)
figure = plots.figure(2, title="First tokens come late before throughput stops growing", width=4.8)
left, right = figure.subplots(1, 2)
plots.throughput_latency(scales.table, left, y="ttft_s.p99")
plots.lines(scales.table, right, x="workload.rate_scale", y="slo_attainment")
figure

# %% [markdown]
# ## The cheapest way to serve twice the traffic
#
# Candidates: two kinds of GPU, one or two of them a replica, one or two replicas, three chunk sizes. Each runs with the same
# requests; those that keep the SLO, with confidence, are ranked by dollars per million output tokens.

# %%
tomorrow = drawn.with_value("workload.rate_scale", 2.0)
choice = cheapest(
    tomorrow,
    {
        "hardware": ["h100-sxm", "a100-80gb-sxm"],
        "parallel.tensor": [1, 2],
        "replicas": [1, 2],
        "scheduler.token_budget": [256, 512, 1024],
    },
    goal="cost",
    target=Target(attainment=0.99),
    replications=2,
)
choice

# %%
figure = plots.figure(
    title="Every candidate: throughput per GPU against the speed one user sees", width=6.5, height=4.5
)
plots.pareto(choice.table, figure.subplots(), hue="hardware")
figure

# %% [markdown]
# ## The recommendation

# %%
best = choice.best
assert best is not None
print(
    f"{best['replicas']} replica(s) of {best['parallel.tensor']} x {best['hardware']}, token budget "
    f"{best['scheduler.token_budget']}: {best['slo_attainment']:.1%} of requests within the SLO at twice the traffic, "
    f"{best['usd_per_mtoken']:.2f} $ per million output tokens."
)
