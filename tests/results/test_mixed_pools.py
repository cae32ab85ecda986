"""Pools of which some have what others have not: their results are saved and read back like any others."""

import random

import numpy as np
import pandas as pd
import pytest

from sim import Scenario, simulate
from sim.errors import ScenarioError
from sim.plots import save_run
from sim.results import Result
from tests.sample import few

MODEL = "qwen3-30b-a3b"
FEATURES = {
    "tiers": {"memory": {"tiers": [{"kind": "host", "gib": 10}]}},
    "ranks": {"parallel": {"data": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "speculation": {"decoding": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"alpha": 0.6}}},
    "no cache": {"memory": {"prefix_caching": False}},
    "another scheduler": {"scheduler": "sglang"},
    "another stack": {"serving_stack": "eager"},
    "replicas": {"replicas": 2},
}
WORKLOAD = {
    "conversations": {"sessions": 4, "turns": 2, "user_tokens": 60, "answer_tokens": 12},
    "arrivals": {"process": "poisson", "rate_per_s": 5},
}
TIERED = ["loaded_tokens", "loads_under_way", "stores_under_way"]


def run_of(rng):
    """A run of two or three pools, all but one of which have features of their own; drawn again where that is refused."""
    apart = rng.random() < 0.3
    names = ["prefill", "decode"] if apart else ["a", "b", "c"][: rng.choice((2, 3))]
    plain = rng.choice(names)
    pools = {}
    for name in names:
        pools[name] = {"role": name} if apart else {}
        for feature in rng.sample(list(FEATURES), rng.randint(1, 2)) if name != plain else ():
            pools[name].update(FEATURES[feature])
    more = {"links": {"net": {"bandwidth_gb_per_s": 50, "latency_s": 0.0004}}} if apart else {}
    if not apart and rng.random() < 0.3:
        more["classes"] = {"chat": {"share": 0.5, "priority": 1}, "batch": {"share": 0.5}}
    try:
        return simulate(Scenario(model=MODEL, scheduler="vllm", pools=pools, workload=WORKLOAD, **more))
    except ScenarioError:
        return run_of(rng)


@pytest.mark.parametrize("seed", range(10))
def test_what_only_some_pools_have_is_blank_for_the_others(tmp_path, seed):
    made = run_of(random.Random(seed))
    loaded = Result.load(made.save(tmp_path / "out"))
    pd.testing.assert_frame_equal(loaded.requests, made.requests)
    pd.testing.assert_frame_equal(loaded.iterations, made.iterations)
    whole = made.columns.iterations()
    assert list(whole) == list(loaded.columns.iterations())
    tiered = np.array([replica.tiered for replica in made.columns.replicas])
    for name in TIERED:
        assert (name in whole) == tiered.any()
        if name in whole:
            np.testing.assert_array_equal(made.iterations[name].notna(), tiered[made.iterations["replica"]])
            np.testing.assert_array_equal(whole[name] >= 0, tiered[whole["replica"]])
            assert loaded.columns.iterations()[name].dtype == np.int32


@pytest.mark.parametrize("first", few([True, False], reason="long runs, much alike"))
def test_a_run_with_tiers_in_one_pool_has_its_columns_and_pictures(tmp_path, first):
    tiers = {"memory": {"tiers": [{"kind": "host", "gib": 10}]}}
    pools = {"a": tiers, "b": {}} if first else {"a": {}, "b": tiers}
    made = simulate(Scenario(model="qwen3-8b", pools=pools, workload=WORKLOAD))
    assert set(TIERED) <= set(made.columns.iterations())
    assert [path.name for path in save_run(made, made.save(tmp_path / "out"))] == ["latency.png", "timeline.png"]
