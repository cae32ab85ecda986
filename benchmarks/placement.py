"""Processor time of a full placement search: 64 devices, 32 models, 30,000 requests.

    python benchmarks/placement.py

The aim is 15 s; AlpaServe's own tool took 5.5 s for 2,920 simulations with a compiled special case of its simulator, and
its event-driven one served 4,300 requests a second. `loop` is compiled where the engine is.
"""

from __future__ import annotations

import time

from hwmodels.single_pass import load_single_pass
from policies.placement import Cluster, PartitionSearch
from sim.placement import ARTIFACT_OVERHEAD_S, ARTIFACT_STAGE_OVERHEAD, Serving, find
from sim.placement.groups import run_groups
from workloads import Fixed, Gamma, Trace, multi_model, power_law_rates

REQUESTS, DEVICES, MODELS = 30_000, 64, 32


def case(kinds: tuple[str, ...], rate_per_s: float) -> tuple[Serving, Trace]:
    names = [f"m{i}" for i in range(MODELS)]
    rates = power_law_rates(rate_per_s, MODELS).tolist()
    trace = multi_model(
        {name: Gamma(rate_per_s=rate, cv=4.0) for name, rate in zip(names, rates, strict=True)},
        prompt=Fixed(tokens=2048),
        n_requests=REQUESTS,
        seed=0,
    )
    serving = Serving(
        cluster=Cluster(n_devices=DEVICES, memory_bytes=13 * 2**30),
        models={name: load_single_pass(kinds[i % len(kinds)]) for i, name in enumerate(names)},
        slo_scale=5.0,
        overhead_s=ARTIFACT_OVERHEAD_S,
        stage_overhead=ARTIFACT_STAGE_OVERHEAD,
    )
    return serving, trace


def main() -> None:
    began = time.process_time()
    print(f"{DEVICES} devices, {MODELS} models, {REQUESTS:,} requests")
    for kinds, rate in ((("bert-1.3b",), 300.0), (("bert-6.7b",), 120.0), (("bert-1.3b", "bert-6.7b"), 160.0)):
        serving, trace = case(kinds, rate)
        plan = find(PartitionSearch(), serving, trace)
        print(
            f"{' and '.join(kinds):<24} {plan.processor_s:6.2f} s of processor time, {plan.simulations:,} simulations, "
            f"{plan.train.attainment:.2%} in time with {plan.placement.describe()}"
        )
        experiment = serving.experiment(plan.placement, serving.workload(trace))
        for engine in ("events", "loop"):
            run_groups(experiment, engine=engine)
            start = time.process_time()
            run_groups(experiment, engine=engine)
            print(f"    {engine:<9} {REQUESTS / (time.process_time() - start):>12,.0f} requests a second")
    print(f"{time.process_time() - began:.1f} s in all, compilation included")


if __name__ == "__main__":
    main()
