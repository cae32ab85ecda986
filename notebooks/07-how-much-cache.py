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
# # How much cache?
#
# In a conversation each prompt contains all that was said before. A server that keeps the KV blocks of earlier turns computes only
# what is new. How much memory does that take, which router finds the blocks again, and what is the cheapest deployment that keeps
# first tokens within 300 ms?
#
# ## The load
#
# Two hundred conversations that share a system prompt. People read for half a minute before they answer.

# %%
# %matplotlib inline
import pandas as pd

from hwmodels.model import load_model
from rooftrace import Scenario, plots, simulate, sweep
from sim.plots.reuse import plot_reuse
from sim.scenario.workload import workload_of
from sim.study.optimize import cheapest
from workloads import reuse

base = Scenario(
    model="llama-3.1-8b",
    hardware="l40s",
    replicas=4,
    scheduler="vllm",
    router={"policy": "session", "inner": "least_outstanding"},
    workload={
        "conversations": {
            "sessions": 200,
            "turns": {"distribution": "uniform", "min_tokens": 2, "max_tokens": 12},
            "user_tokens": {"distribution": "lognormal", "mean": 300, "median": 200},
            "answer_tokens": {"distribution": "lognormal", "mean": 250, "median": 200},
            "system_prompt_tokens": 1500,
            "mean_think_s": 30,
        },
        "arrivals": {"process": "poisson", "rate_per_s": 1.0},
    },
    slo={"ttft_s": 0.3, "tpot_s": 0.05},
)
trace = workload_of(base)
trace.describe()["prompt_tokens"]

# %% [markdown]
# ## What could be found
#
# The reuse curve answers for all sizes at once, before any simulation: an ideal cache that gives up the least recently used block
# finds a block again if its size exceeds the number of different blocks used in between.

# %%
curve = reuse(trace)
figure = plots.figure(title=f"A cache without limit finds {100 * curve.best_hit_rate:.0f} % of the prompt tokens again")
plot_reuse(
    figure.subplots(), curve, bytes_per_token=load_model("llama-3.1-8b").kv_bytes_per_token(), model="llama-3.1-8b"
)
figure

# %%
enough = curve.tokens_for(0.9)
f"{enough:,} tokens hold nine tenths of what can be found"

# %% [markdown]
# The curve knows nothing of time: it takes requests in the order in which sessions would send them if answers took no time, and
# forgets that running requests need room too. The simulation knows both.
#
# ## What is found, by router
#
# An L40S has room for some 150,000 tokens beside the weights. With `round_robin` a conversation wanders over all machines and each
# keeps its own copy of it; by session it stays where its blocks are. A router that looks at blocks alone sends whoever shares the
# system prompt to where it already is, until that machine is full; weighed against queues and memory in use, as llm-d does it,
# blocks are a good guide.

# %%
routers = {
    "round robin": "round_robin",
    "session": {"policy": "session", "inner": "least_outstanding"},
    "blocks alone": {"policy": "prefix"},
    "blocks, queues and memory": {"policy": "llm_d"},
}
rows = {}
for name, router in routers.items():
    result = simulate(base.with_value("router", router))
    rows[name] = {
        "prompt tokens found": result.summary["prefix_cache"]["hit_rate"],
        "TTFT p50, s": result.summary["ttft_s"]["p50"],
        "TTFT p99, s": result.summary["ttft_s"]["p99"],
    }
off = simulate(base.with_set("memory.prefix_caching=false"))
rows["no prefix cache"] = {
    "prompt tokens found": 0.0,
    "TTFT p50, s": off.summary["ttft_s"]["p50"],
    "TTFT p99, s": off.summary["ttft_s"]["p99"],
}
pd.DataFrame(rows).T.round(3)

# %% [markdown]
# ## Less memory
#
# What if the same machines had fewer blocks for KV? The found share falls along the reuse curve, and first tokens come later.

# %%
loads = sweep(base, axes={"memory.kv_blocks": [600, 1200, 2400, 4800, 9000]}, jobs=1)
columns = ["memory.kv_blocks", "prefix_cache.hit_rate", "ttft_s.p50", "ttft_s.p99", "preemptions"]
loads.table[[name for name in columns if name in loads.table]].round(3)

# %% [markdown]
# ## The cheapest deployment
#
# Fewer machines mean less memory and less arithmetic at once. The least number that keeps 99 % of the requests within both limits:

# %%
choice = cheapest(base, {"hardware": ["l40s", "h100-sxm"], "replicas": [1, 2, 3, 4]}, goal="cost", replications=2)
choice

# %%
best = choice.best
assert best is not None
print(
    f"{best['replicas']} x {best['hardware']}: {best['slo_attainment']:.1%} of requests within the limits, "
    f"{best['usd_per_mtoken']:.2f} $ per million output tokens."
)
