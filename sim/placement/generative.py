"""Generative models in groups: continuous batching and KV limits on shared stages, scored by the same searches.

Beyond AlpaServe. Each model that a group hosts has the scheduler of its own and an equal part of the KV memory that the group's
weights leave; they take turns on the stages (`sim.engine.machine`). Nothing is rejected on arrival, since the length of an answer
is not known then: a request counts as in time when it has finished by its deadline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from hwmodels.deployment import Deployment, deploy
from hwmodels.device import Device
from hwmodels.model import ModelSpec
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals
from policies.placement import Placement, Score, check
from policies.routers import LeastOutstanding
from policies.schedulers import Sarathi
from policies.view import Scheduler
from policies.wrappers import EvictNewest
from sim.engine import Experiment, MachineSpec, ReplicaSpec, run
from sim.placement.groups import GroupColumns
from sim.placement.serving import NS_PER_S, Outcome, ScreenedBy, Serving
from workloads import Trace

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class GenerativeModel:
    """A model of the catalogue that generates; as a search sees it, one typical request."""

    name: str
    spec: ModelSpec
    device: Device
    prompt_tokens: int
    """The prompt of a typical request ..."""
    output_tokens: int
    """... for which `latency_s` and the least KV memory are worked out."""

    def deployment(self, inter_op: int, intra_op: int) -> Deployment:
        """On groups of one shape; ValueError where the model cannot be split so."""
        return deploy(
            model=self.spec, hardware=self.device, parallel=ParallelConfig(tensor=intra_op, pipeline=inter_op)
        )

    @property
    def latency_s(self) -> float:
        return self.alone_s(self.prompt_tokens, self.output_tokens)

    def alone_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds of one request on one device with nothing else to do."""
        return _alone_s(self.deployment(1, 1), max(prompt_tokens, 1), output_tokens)

    def stage_s(self, inter_op: int, intra_op: int, batch: int = 1) -> tuple[float, ...]:
        """Seconds of each stage for *batch* prompts; decoding is priced step by step when it runs."""
        cost = self.deployment(inter_op, intra_op).cost
        return tuple(float(cost.iteration_s(_prompt(self.prompt_tokens, batch), s)) for s in range(inter_op))

    def device_bytes(self, inter_op: int, intra_op: int) -> float:
        """Weights on each device of the fullest stage, and the KV cache of one typical request."""
        deployment = self.deployment(inter_op, intra_op)
        tokens = -(-(self.prompt_tokens + self.output_tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
        return deployment.weight_bytes_per_device + tokens * deployment.kv_bytes_per_token_per_device


@dataclass(frozen=True, kw_only=True)
class GenerativeServing(Serving):
    """A cluster of generative models; deadlines are the SLO scale times each request's own time alone on one device."""

    scheduler: Scheduler = field(default_factory=lambda: EvictNewest(inner=Sarathi()))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, model in self.models.items():
            if not isinstance(model, GenerativeModel):
                raise ValueError(
                    f"{name} has measured single-pass latencies only and cannot share a group with models that generate; "
                    "take a model of the catalogue (rooftrace models)"
                )
        if self.batch_sizes != (1,):
            raise ValueError("batch_sizes are for single-pass models; generative models are batched by their scheduler")
        if self.stage_overhead or self.overhead_s:
            raise ValueError("overhead_s and stage_overhead are of the single-pass engine; set both to 0 here")

    def workload(self, trace: Trace) -> Trace:
        """*trace* with its models in the order of this cluster's, and a deadline for each request."""
        ordered = super().workload(trace)
        if self.slo_scale is None:
            return ordered
        models = [self.models[name] for name in self.names]
        index = np.zeros(len(ordered), np.int64) if ordered.model_index is None else ordered.model_index
        alone = [
            models[model].alone_s(prompt, output)  # type: ignore[attr-defined]
            for model, prompt, output in zip(
                index.tolist(), ordered.prompt_tokens.tolist(), ordered.output_tokens.tolist(), strict=True
            )
        ]
        return replace(ordered, deadline_ns=np.rint(np.array(alone) * self.slo_scale * NS_PER_S).astype(np.int64))

    def outcome(self, placement: Placement, workload: Trace, *, screening: bool = False) -> Outcome:
        """Serve the requests whose models are hosted; the others, and those that end late, are not served in time."""
        check(placement, self.cluster, self.views_without_traffic)
        n = len(workload)
        index = np.zeros(n, np.int64) if workload.model_index is None else workload.model_index
        hosted = sorted({model for group in placement.groups for model in group.models})
        rows = np.flatnonzero(np.isin(index, hosted))
        columns = {name: np.full(n, -1, np.int64) for name in ("start_ns", "finish_ns", "group", "batch")}
        if len(rows):
            position = {model: i for i, model in enumerate(hosted)}
            part = replace(
                workload.take(rows),
                models=tuple(self.names[model] for model in hosted),
                model_index=np.array([position[m] for m in index[rows].tolist()]),
            )
            machines, group_of = [], []
            for number, group in enumerate(placement.groups):
                if group.models:
                    specs = self._hosted(group.models, group.shape)
                    machines.append(
                        MachineSpec(
                            hosted=tuple(
                                replace(hosted, model=position[m])
                                for hosted, m in zip(specs, group.models, strict=True)
                            )
                        )
                    )
                    group_of += [number] * len(group.models)
            # Of the groups that host a request's model, the one with the fewest requests of all its models.
            requests = run(Experiment(workload=part, replicas=tuple(machines), router=LeastOutstanding())).requests
            finish = requests["finish_ns"].copy()
            if workload.deadline_ns is not None:
                deadline = workload.deadline_ns[rows]
                finish[(deadline >= 0) & (finish - workload.arrival_ns[rows] > deadline)] = -1
            columns["finish_ns"][rows] = finish
            columns["start_ns"][rows] = requests["scheduled_ns"]
            columns["group"][rows] = np.array(group_of, np.int64)[requests["replica"]]
        return Outcome(workload=workload, columns=GroupColumns(**columns), n_groups=len(placement.groups))

    @property
    def screened_by(self) -> ScreenedBy:
        return "events"

    def scorer(self, workload: Trace) -> Callable[[Placement], Score]:
        return lambda placement: self.outcome(placement, workload).score(placement.replicas)

    def _hosted(self, models: tuple[int, ...], shape: tuple[int, int]) -> tuple[ReplicaSpec, ...]:
        deployments = [self.models[self.names[m]].deployment(*shape) for m in models]  # type: ignore[attr-defined]
        weights = sum(deployment.weight_bytes_per_device for deployment in deployments)
        share = (self.cluster.memory_bytes - weights) / len(models)
        return tuple(
            ReplicaSpec(
                cost=deployment.cost,
                scheduler=self.scheduler,
                kv_blocks=max(int(share // (deployment.kv_bytes_per_token_per_device * BLOCK_TOKENS)), 1),
                block_tokens=BLOCK_TOKENS,
            )
            for deployment in deployments
        )


def _prompt(tokens: int, batch: int = 1) -> Totals:
    pairs = batch * (tokens * (tokens + 1) // 2)
    return Totals(
        rows=batch * tokens, prefill_rows=batch * tokens, prefill_chunks=batch, prefill_pairs=pairs,
        prefill_kv_tokens=batch * tokens, logit_rows=batch, prefill_pairs_window=pairs,
    )  # fmt: skip


@functools.lru_cache(maxsize=65536)
def _alone_s(deployment: Deployment, prompt: int, output: int) -> float:
    seconds = float(deployment.cost.iteration_s(_prompt(prompt)))
    if output > 1:
        # A step's time is linear in the context between kinks that are far apart: the middle step stands for all.
        kv = prompt + output // 2
        step = Totals(rows=1, decode_seqs=1, decode_kv_tokens=kv, logit_rows=1, decode_kv_window=kv)
        seconds += (output - 1) * float(deployment.cost.iteration_s(step))
    return seconds
