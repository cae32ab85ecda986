"""Random runs by rules that random runs do not draw: invariants hold, and spans of iterations end as single steps do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from policies.routers import TrtLlmRanks
from policies.trtllm import TrtLlm
from policies.wrappers import EvictNewest
from sim.engine import Experiment
from tests.engine.random_runs import a_trtllm, a_vllm, an_experiment, run_both_ways, with_ranks, with_scheduler
from tests.sample import few


def reading_the_target(experiment: Experiment) -> Experiment:
    """The same, whose drafters read the target's states."""
    machines = tuple(
        replace(
            spec, hosted=tuple(replace(tenant, prefix_drops_last=tenant.decoding is not None) for tenant in spec.hosted)
        )
        for spec in experiment.machines
    )
    return replace(experiment, replicas=machines)


def by_one_queue(experiment: Experiment) -> Experiment:
    """The same, whose ranks have TensorRT-LLM's router."""
    machines = tuple(
        replace(spec, rank_router=TrtLlmRanks() if spec.ranks > 1 else None) for spec in experiment.machines
    )
    return replace(experiment, replicas=machines)


SEEDS = few([range(2), range(2, 8)])


def assert_spans_are_steps(experiment: Experiment) -> None:
    run_both_ways(experiment)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("release", ["0.24", "0.33"])
def test_releases_of_vllm(release: str, seeds: range) -> None:
    lacks: dict[str, Any] = {"long_prefill_token_threshold_adaptive": False, "max_num_active_seqs": None}
    for seed in seeds:
        scheduler = replace(a_vllm(random.Random(seed)), release=release, **lacks)
        # Shares of memory may take it from each other for ever.
        experiment = with_scheduler(an_experiment(seed, speculative=seed % 3 > 0), EvictNewest(scheduler))
        assert_spans_are_steps(reading_the_target(experiment))


@pytest.mark.parametrize("seeds", SEEDS)
def test_kv_manager_v2(seeds: range) -> None:
    for seed in seeds:
        scheduler = replace(a_trtllm(random.Random(seed)), use_kv_cache_manager_v2=True)
        assert_spans_are_steps(with_scheduler(an_experiment(seed, speculative=seed % 2 > 0), EvictNewest(scheduler)))


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("in_turn", [False, True])
def test_one_queue_of_ranks(in_turn: bool, seeds: range) -> None:
    for seed in seeds:
        experiment = with_ranks(an_experiment(seed, speculative=seed % 2 > 0), seed, in_turn=in_turn)
        scheduler = EvictNewest(
            TrtLlm(max_batch_size=1 + seed % 3, max_num_tokens=200, disable_overlap_scheduler=seed % 4 > 1)
        )
        assert_spans_are_steps(by_one_queue(with_scheduler(experiment, scheduler)))
