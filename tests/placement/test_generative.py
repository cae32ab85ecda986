"""Generative models that take turns on the stages of a group."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.model import load_model
from hwmodels.single_pass import load_single_pass
from policies.placement import Cluster, EqualGroups, Group, Placement
from policies.routers import LeastOutstanding, RoundRobin
from policies.schedulers import Sarathi
from policies.wrappers import EvictNewest
from sim.engine import REJECTED, Columns, Experiment, MachineSpec, ReplicaSpec, run
from sim.placement import find
from sim.placement.generative import GenerativeModel, GenerativeServing
from workloads import Fixed, Poisson, Trace, multi_model


def replica(pipeline: int = 1, kv_blocks: int = 2000) -> ReplicaSpec:
    deployment = deploy(model="llama-3.1-8b", hardware="h100-sxm", parallel={"pipeline": pipeline})
    return ReplicaSpec(cost=deployment.cost, scheduler=EvictNewest(inner=Sarathi()), kv_blocks=kv_blocks)


def group(*replicas: ReplicaSpec, first_model: int = 0) -> MachineSpec:
    """A machine that hosts models first_model, first_model + 1, ..."""
    return MachineSpec(
        hosted=tuple(dataclasses.replace(spec, model=first_model + i) for i, spec in enumerate(replicas))
    )


def serve(workload: Trace, *machines: MachineSpec) -> Columns:
    return run(Experiment(workload=workload, replicas=machines, router=LeastOutstanding()), check_invariants=True)


def traffic(*rates: float, n: int = 60) -> Trace:
    arrivals = {f"m{i}": Poisson(rate_per_s=rate) for i, rate in enumerate(rates)}
    return multi_model(arrivals, prompt=Fixed(tokens=300), output=Fixed(tokens=20), n_requests=n, seed=3)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_model_alone_in_its_group_is_a_replica(pipeline):
    workload = traffic(6.0)
    plain = run(Experiment(workload=workload, replicas=(replica(pipeline),), router=RoundRobin()))
    shared = serve(workload, group(replica(pipeline)))
    assert plain.requests["finish_ns"].tolist() == shared.requests["finish_ns"].tolist()


@pytest.mark.parametrize("pipeline", [1, 2])
def test_no_stage_is_used_by_two_models_at_a_time(pipeline):
    found = serve(traffic(10.0, 10.0), group(replica(pipeline), replica(pipeline)))
    assert np.all(found.requests["status"] == 0)
    uses = np.concatenate([part.stages for part in found.replicas])
    assert {0, 1} == set(found.requests["replica"].tolist())
    for stage in range(pipeline):
        mine = np.sort(uses[uses["stage"] == stage], order="start_ns")
        assert np.all(mine["start_ns"][1:] >= (mine["start_ns"] + mine["duration_ns"])[:-1])


def test_a_busy_neighbour_slows_a_model_down_and_cannot_shut_it_out():
    def mean_s(neighbour: float) -> float:
        found = serve(traffic(2.0, neighbour, n=80), group(replica(), replica())).requests
        mine = found["model_index"] == 0
        assert np.all(found["status"][mine] == 0)
        return float((found["finish_ns"] - found["arrival_ns"])[mine].mean()) / 1e9

    alone, crowded = mean_s(0.1), mean_s(30.0)
    assert alone < crowded < 4 * alone


def test_requests_go_to_the_hosting_group_with_the_least_backlog():
    workload = Trace(arrival_ns=np.zeros(4, int), prompt_tokens=np.full(4, 100), output_tokens=np.full(4, 5))
    found = serve(workload, group(replica()), group(replica()))
    assert found.requests["replica"].tolist() == [0, 1, 0, 1]


def test_requests_of_a_model_that_no_machine_hosts_are_rejected_with_the_reason():
    found = serve(traffic(5.0, 5.0), group(replica()))
    other = found.requests["model_index"] == 1
    assert (found.requests["status"] == REJECTED).tolist() == other.tolist()
    assert found.reasons == ("no machine hosts the model",)


def test_models_of_one_group_have_as_many_stages():
    with pytest.raises(ValueError, match="run on the same stages; got pipelines of 1, 2 stages"):
        group(replica(1), replica(2))


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
    one, two = (serving()._hosted(models, (1, 1))[0].kv_blocks for models in ((0,), (0, 1)))
    assert one > 2 * two > 0


def test_requests_of_a_model_that_is_not_hosted_are_unserved():
    kept = serving(slo_scale=None)
    workload = kept.workload(traffic(4.0, 4.0, n=20))
    outcome = kept.outcome(Placement(groups=(Group(inter_op=1, intra_op=1, models=(1,)),)), workload)
    assert outcome.unserved.tolist() == [int((workload.model_index == 0).sum()), 0]


def test_single_pass_model_is_refused_by_name():
    with pytest.raises(ValueError, match="bert has measured single-pass latencies only"):
        GenerativeServing(
            cluster=Cluster(n_devices=1, memory_bytes=1e10), models={"bert": load_single_pass("bert-1.3b")}
        )
