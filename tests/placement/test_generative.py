"""Generative models that take turns on the stages of a group."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.model import load_model
from hwmodels.oneshot import load_oneshot
from policies.placement import Cluster, EqualGroups, Group, Placement
from policies.routers import RoundRobin
from policies.schedulers import EvictNewest, Sarathi
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.turns import GenerativeGroup, GenerativeGroups, run_generative
from sim.placement import find
from sim.placement.generative import GenerativeModel, GenerativeServing
from workloads import Fixed, Poisson, Trace, multi_model


def replica(pipeline: int = 1, kv_blocks: int = 2000) -> ReplicaSpec:
    deployment = deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel={"pipeline": pipeline})
    return ReplicaSpec(cost=deployment.cost, scheduler=EvictNewest(inner=Sarathi()), kv_blocks=kv_blocks)


def traffic(*rates: float, n: int = 60) -> Trace:
    arrivals = {f"m{i}": Poisson(rate_per_s=rate) for i, rate in enumerate(rates)}
    return multi_model(arrivals, prompt=Fixed(tokens=300), output=Fixed(tokens=20), n_requests=n, seed=3)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_model_alone_in_its_group_is_a_replica(pipeline):
    workload = traffic(6.0)
    plain = run(Experiment(workload=workload, replicas=(replica(pipeline),), router=RoundRobin()))
    group = GenerativeGroup(models=(0,), replicas=(replica(pipeline),))
    shared = run_generative(GenerativeGroups(workload=workload, groups=(group,)))
    # The shared stages round a start to the nanosecond where a replica keeps the tick.
    assert np.abs(plain.requests["finish_ns"] - shared.requests["finish_ns"]).max() <= 1


@pytest.mark.parametrize("pipeline", [1, 2])
def test_no_stage_is_used_by_two_models_at_a_time(pipeline):
    group = GenerativeGroup(models=(0, 1), replicas=(replica(pipeline), replica(pipeline)))
    found = run_generative(GenerativeGroups(workload=traffic(10.0, 10.0), groups=(group,)))
    assert np.all(found.requests["status"] == 0)
    uses = np.concatenate([part.stages for part in found.replicas])
    assert {0, 1} == set(found.requests["replica"].tolist())
    for stage in range(pipeline):
        mine = np.sort(uses[uses["stage"] == stage], order="start_ns")
        assert np.all(mine["start_ns"][1:] >= (mine["start_ns"] + mine["duration_ns"])[:-1])


def test_a_busy_neighbour_slows_a_model_down_and_cannot_shut_it_out():
    def mean_s(neighbour: float) -> float:
        group = GenerativeGroup(models=(0, 1), replicas=(replica(), replica()))
        found = run_generative(GenerativeGroups(workload=traffic(2.0, neighbour, n=80), groups=(group,))).requests
        mine = found["model_index"] == 0
        assert np.all(found["status"][mine] == 0)
        return float((found["finish_ns"] - found["arrival_ns"])[mine].mean()) / 1e9

    alone, crowded = mean_s(0.1), mean_s(30.0)
    assert alone < crowded < 4 * alone


def test_requests_go_to_the_hosting_group_with_the_least_backlog():
    groups = tuple(GenerativeGroup(models=(0,), replicas=(replica(),)) for _ in range(2))
    workload = Trace(arrival_ns=np.zeros(4, int), prompt_tokens=np.full(4, 100), output_tokens=np.full(4, 5))
    found = run_generative(GenerativeGroups(workload=workload, groups=groups))
    assert found.requests["replica"].tolist() == [0, 1, 0, 1]


def test_model_without_a_group_is_refused():
    group = GenerativeGroup(models=(0,), replicas=(replica(),))
    with pytest.raises(ValueError, match="no group hosts m1"):
        GenerativeGroups(workload=traffic(1.0, 1.0), groups=(group,))


def test_models_of_one_group_have_as_many_stages():
    with pytest.raises(ValueError, match="run on the same stages; got pipelines of 1, 2 stages"):
        GenerativeGroup(models=(0, 1), replicas=(replica(1), replica(2)))


def serving(memory_gb: float = 40.0, **settings: object) -> GenerativeServing:
    model = GenerativeModel(
        name="llama-3.1-8b",
        spec=load_model("llama-3.1-8b"),
        device=load_device("h100-sxm"),
        prompt_tokens=300,
        output_tokens=20,
    )
    return GenerativeServing(
        cluster=Cluster(n_devices=2, memory_bytes=memory_gb * 1e9), models={"m0": model, "m1": model}, **settings
    )  # type: ignore[arg-type]


def test_search_places_generative_models_by_simulation():
    plan = find(EqualGroups(inter_op=2), serving(slo_scale=4.0), traffic(4.0, 4.0, n=40))
    assert plan.placement.groups[0].models == (0, 1)
    assert plan.train.attainment > 0.9


def test_kv_memory_is_what_weights_leave_and_is_split_evenly():
    one, two = (serving()._replicas(models, (1, 1))[0].kv_blocks for models in ((0,), (0, 1)))
    assert one > 2 * two > 0


def test_requests_of_a_model_that_is_not_hosted_are_unserved():
    kept = serving(slo_scale=None)
    workload = kept.workload(traffic(4.0, 4.0, n=20))
    outcome = kept.outcome(Placement(groups=(Group(inter_op=1, intra_op=1, models=(1,)),)), workload)
    assert outcome.unserved.tolist() == [int((workload.model_index == 0).sum()), 0]


def test_one_shot_table_model_is_refused_by_name():
    with pytest.raises(ValueError, match="bert has measured one-shot latencies only"):
        GenerativeServing(cluster=Cluster(n_devices=1, memory_bytes=1e10), models={"bert": load_oneshot("bert-1.3b")})
