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
# # How many adapter slots?
#
# A server of 48 LoRA adapters has at most `max_loras` different ones in a batch. With few slots requests wait while the GPU has
# room for them. Each slot takes memory from the KV cache and makes every step longer, whether it is used or not. How many are
# enough depends on how the adapters are asked for.
#
# ## One load, two popularities
#
# 12 requests a second for adapters of rank 16 of Llama-3.1-8B on one H100: once all adapters are asked for alike, and once a
# few are asked for far more often than the others (Zipf's law with exponent 1.5: the first gets two fifths of the requests).

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pandas as pd

from rooftrace import Scenario, simulate

base = Scenario(
    model="llama-3.1-8b",
    hardware="h100-sxm",
    scheduler="vllm",
    adapters={"count": 48, "rank": 16, "max_cpu_loras": 48},
    workload={
        "arrivals": {"process": "poisson", "rate_per_s": 12},
        "prompt_tokens": {"distribution": "lognormal", "mean": 226, "median": 150, "max_tokens": 1024},
        "output_tokens": {"distribution": "lognormal", "mean": 195, "median": 130, "max_tokens": 1024},
        "requests": 400,
    },
)
popularities = {"all alike": "uniform", "some popular": {"zipf": 1.5}}
numbers = [1, 2, 4, 8, 16, 24, 32, 48]
found = {
    name: [
        simulate(base.with_values({"adapters.popularity": popularity, "adapters.max_loras": n})).summary
        for n in numbers
    ]
    for name, popularity in popularities.items()
}

# %% [markdown]
# The throughput rises with the slots for as long as requests wait for one, and no further. Where some adapters are popular that
# is so with a third of the slots, because most requests share a few of them.

# %%
COLOURS = {"all alike": "#0072B2", "some popular": "#D55E00"}
MARKERS = {"all alike": "o", "some popular": "s"}
panels = {
    "output tokens/s": lambda run: run["output_tokens_per_s"],
    "requests waiting for a slot, mean": lambda run: run["adapters"]["waiting_for_slot_mean"],
}
fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for ax, (label, figure) in zip(axes, panels.items(), strict=True):
    for name, runs in found.items():
        ax.plot(numbers, [figure(run) for run in runs], MARKERS[name] + "-", color=COLOURS[name], label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, numbers)
    ax.set(xlabel="adapter slots (max_loras)", ylabel=label, ylim=(0, None))
    ax.grid(alpha=0.3)
axes[0].legend(title="48 adapters, asked for", loc="lower right")
fig.suptitle("More slots help until no request waits for one; popular adapters need fewer")
plt.show()

# %% [markdown]
# ## The price of a slot
#
# Past that point slots only cost: 704 tokens of the KV cache each, and time in every step. Of popular adapters the time to the
# first token (TTFT) has nothing left to gain from 24 slots on, while the time per output token (TPOT) goes on growing, so that
# 16 slots answer soonest from end to end.

# %%
pd.DataFrame(
    [
        {
            "asked for": name,
            "slots": n,
            "TTFT, mean (s)": run["ttft_s"]["mean"],
            "TPOT, mean (ms)": 1e3 * run["tpot_s"]["mean"],
            "end to end, mean (s)": run["e2el_s"]["mean"],
            "KV cache (tokens)": run["memory"]["blocks"] * run["memory"]["block_tokens"],
        }
        for name, runs in found.items()
        for n, run in zip(numbers, runs, strict=True)
        if n >= 8
    ]
).set_index(["asked for", "slots"]).round(2)

# %% [markdown]
# `rooftrace advise FILE --only adapters` searches the number for a scenario of yours, with several seeds and the scenario's
# SLO.
