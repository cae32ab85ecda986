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
# # Speculative decoding against theory
#
# A draft model proposes K tokens, the target checks them in one step. If every token is accepted with probability alpha,
# given that those before it were, and a draft pass takes c target steps, then theory (Leviathan et al., ICML 2023,
# theorem 3.8) says by how much decoding becomes faster:
#
# $$ \frac{1 - \alpha^{K+1}}{(1 - \alpha)(K c + 1)} $$
#
# The theory assumes one sequence and a check that costs one plain step. First the simulator is put under exactly those
# conditions; then they are given up.

# %%
# %matplotlib inline
import pandas as pd

from rooftrace import Scenario, plots, simulate
from sim.study.statistics import relative_difference
from sim.theory.speculative import speedup

C = 0.05
ALPHAS, KS = (0.6, 0.8, 0.9), (1, 2, 3, 4, 6, 8)

# One client, so that one sequence runs at a time; short prompts, so that decoding is nearly all of the time.
one_client = Scenario.default().with_value(
    "workload",
    {
        "arrivals": {"process": "closed_loop", "concurrency": 1},
        "prompt_tokens": 16,
        "output_tokens": 400,
        "requests": 40,
    },
)


def speculative(scenario, alpha, k):
    return scenario.with_value(
        "decoding",
        {
            "method": "draft_model",
            "num_speculative_tokens": k,
            "acceptance": {"alpha": alpha},
            "draft": {"cost_ratio": C},
        },
    )


def decode_s(scenario):
    """Seconds that all requests together spend on decoding."""
    requests = simulate(scenario).requests
    return float((requests["e2el_s"] - requests["ttft_s"]).sum())


# %% [markdown]
# Three seeds for each point: the interval shows how much random acceptance leaves open.

# %%
rows = []
for alpha in ALPHAS:
    for k in KS:
        seeds = [one_client.with_value("seed", seed) for seed in range(3)]
        plain = [decode_s(each) for each in seeds]
        drafted = [decode_s(speculative(each, alpha, k)) for each in seeds]
        gain = relative_difference(drafted, plain)
        rows.append({"alpha": alpha, "k": k, "speedup": 1 + gain.mean, "speedup.half_width": gain.half_width})
measured = pd.DataFrame(rows)
theory = pd.DataFrame(
    [{"alpha": alpha, "k": k, "speedup": float(speedup(alpha, k, C))} for alpha in ALPHAS for k in range(1, 9)]
)
figure = plots.figure(title=f"Speed-up of speculative decoding, c = {C}: points simulated, lines theory")
plots.speedup(measured, figure.subplots(), theory=theory)
figure

# %%
joined = measured.merge(theory, on=["alpha", "k"], suffixes=("", ".theory"))
joined["error_pct"] = 100 * (joined["speedup"] / joined["speedup.theory"] - 1)
joined.round(3)

# %% [markdown]
# The simulated check is a little dearer than a plain step, since K + 1 tokens are computed, and the last round of an
# output is cut short. Otherwise theory and event loop agree:

# %%
assert joined["error_pct"].abs().max() < 8, joined

# %% [markdown]
# ## Many clients
#
# With many sequences the check is no longer free: the batch of a plain step already keeps the arithmetic units busy, and
# K + 1 times as many rows take longer.

# %%
rows = []
for clients in (1, 8, 32, 128):
    busy = one_client.with_value("workload.arrivals.concurrency", clients).with_value(
        "workload.requests", max(40, 3 * clients)
    )
    busy = busy.with_value("scheduler", {"policy": "vllm-v0", "max_num_seqs": 256})
    plain, drafted = (simulate(each).summary["output_tokens_per_s"] for each in (busy, speculative(busy, 0.8, 4)))
    rows.append({"clients": clients, "speedup": drafted / plain})
many = pd.DataFrame(rows)
figure = plots.figure(title="alpha = 0.8, K = 4: what is left of the speed-up in a batch")
ax = figure.subplots()
plots.lines(many, ax, x="clients", y="speedup", log_x=True)
ax.axhline(float(speedup(0.8, 4, C)), color="#5A5A5A", linestyle=":", linewidth=1)
ax.text(1, float(speedup(0.8, 4, C)), "theory, one sequence", va="bottom", fontsize=8)
ax.set_ylabel("speed-up of output throughput", fontsize=9)
figure

# %%
assert many["speedup"].iloc[0] > many["speedup"].iloc[-1]
