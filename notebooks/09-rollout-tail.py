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
# # The tail of a rollout
#
# A step of reinforcement learning samples several answers of each prompt and waits for the last. How long is the wait for the last
# tenth, what would theory allow, and which remedy brings most?
#
# ## One step
#
# 64 prompts with eight answers each on two machines. Lengths are lognormal, as those of reasoning models are: half of the answers
# have 800 tokens or fewer, and some have ten times as many.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from rooftrace import Scenario, simulate
from sim.theory.rollout import longest_lognormal_tokens, packing_bound_s

base = Scenario(
    model="qwen3-8b",
    hardware="h100-sxm",
    replicas=2,
    router="least_outstanding",
    scheduler="vllm",
    memory={"max_model_len": 12288},
    workload={
        "rollout": {"prompts": 64, "samples": 8},
        "prompt_tokens": 200,
        "output_tokens": {"distribution": "lognormal", "mean": 1500, "median": 800, "max_tokens": 10000},
    },
)
step = simulate(base)
requests = step.requests
ends_s = np.sort(requests["finish_ns"].to_numpy()) * 1e-9
(figures,) = step.summary["rollout"]["steps"]

# %% [markdown]
# Answers under way fall quickly and then hardly at all. The last tenth takes longer than the nine before it.

# %%
fig, ax = plt.subplots(figsize=(8, 3.2))
ax.step(np.r_[0, ends_s], np.r_[len(ends_s) - np.arange(len(ends_s)), 0], where="post")
for name in ("p90_s", "p99_s"):
    ax.axvline(figures[name], color="0.6", linewidth=1)
    ax.annotate(
        name.removesuffix("_s"),
        (figures[name], len(ends_s) * 0.9),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
    )
ax.set(xlabel="time, s", ylabel="answers under way", xlim=(0, None), ylim=(0, None))
ax.set_title("A tenth of the answers takes most of the step")
plt.show()

# %% [markdown]
# ## What theory says
#
# The longest of 512 such answers is expected at more tokens than `max_tokens` allows, so that the limit decides. No assignment to
# machines is faster than the time of the longest answer alone, and none than all work spread evenly.

# %%
lengths = requests["output_tokens"].to_numpy()
alone_s = simulate(base.with_set("workload.rollout={prompts: 1, samples: 1}")).summary["tpot_s"]["mean"]
full = {"replicas": 1, "workload.rollout": {"prompts": 32, "samples": 8}, "workload.output_tokens": 1500}
work_s = lengths.sum() / simulate(base.with_values(full)).summary["output_tokens_per_s"]
bound_s = packing_bound_s(lengths.max() * alone_s, work_s, 2)
pd.Series(
    {
        "longest answer expected without a limit, tokens": longest_lognormal_tokens(1500, 800, 512),
        "longest answer here, tokens": lengths.max(),
        "that answer alone on a machine, s": lengths.max() * alone_s,
        "all answers on one machine that is always full, s": work_s,
        "bound, s": bound_s,
        "the step, s": figures["step_s"],
    }
).round(1)

# %% [markdown]
# ## Remedies
#
# Four steps of 64 groups each, with 15 s between them: more prompts than are waited for; answers that go on while weights are
# updated and after it, with their KV kept or dropped; answers spread over the machines once four fifths have ended; and drafts of
# an n-gram look-up that grow as the batch drains.

# %%
steps = {"prompts": 64, "samples": 8, "steps": 4, "update_s": 15}
recipes = {
    "a step at a time": {},
    "a quarter more prompts": {"prompts": 80, "wanted": 64},
    "KV kept": {"prompts": 80, "wanted": 64, "leftover": "continue", "pause_s": 3},
    "KV dropped": {"prompts": 80, "wanted": 64, "leftover": "recompute", "pause_s": 3},
    "spread at four fifths": {"redistribute": 0.8},
}
drafts = {
    "method": "ngram",
    "num_speculative_tokens": [[1, 16, 4], [17, 64, 2], [65, None, 0]],
    "acceptance": {"alpha": 0.5},
}
rows = {}
for name, more in recipes.items():
    rows[name] = simulate(base.with_values({"workload.rollout": {**steps, **more}})).summary
rows["drafts as it drains"] = simulate(base.with_values({"workload.rollout": steps, "decoding": drafts})).summary
table = pd.DataFrame(
    {
        name: {
            "all steps (s)": each["rollout"]["steps"][-1]["begin_s"] + each["rollout"]["steps"][-1]["step_s"],
            "tail": each["rollout"]["tail_share"],
            "answers aborted": each["rollout"]["answers"]["aborted"],
            "tokens computed again": each["rollout"].get("recomputed_tokens", 0),
        }
        for name, each in rows.items()
    }
).T
table.round(2)

# %% [markdown]
# Not waiting for the last answers shortens the steps, and keeping those under way wastes few of them. Dropping their KV costs one
# prefill of what they have. Spreading the tail gains nothing: a machine with few answers is not much faster for each of them than
# one with twice as many. Drafts help exactly then, when the device has arithmetic to spare.

# %%
ax = (table["all steps (s)"] / table["all steps (s)"].iloc[0]).plot.barh(figsize=(8, 2.8), color="0.5")
ax.set(
    xlabel="time of all steps, the first recipe being 1",
    title="Drafting and surplus prompts shorten a rollout, spreading does not",
)
ax.invert_yaxis()
plt.show()
