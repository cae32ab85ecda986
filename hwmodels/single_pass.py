"""Models that answer in one forward pass: how long each stage takes and what it weighs, for every shape of group.

For the models of AlpaServe's table stage times are those measured, as ratios to the measured single-device latency,
where the artifact gives them; otherwise the roofline cost model's for the model's layers, scaled to that latency.
Any other model of the catalogue comes from the cost model alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from hwmodels.autoparallel import ParallelPlan, layer_seconds, parallelise, plan
from hwmodels.device import Device, load_device
from hwmodels.model import ModelSpec, spec_from_config
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.tables import packaged_rows
from hwmodels.work import stage_work

TOKENS = 2048
"""The tokens of one request to the models of the table (AlpaServe, section 6.1)."""

# Makes the roofline's two-device split of the 2.7B model take the measured 0.0985 / 0.1452 of one device, over the 1024 tokens
# that were measured; a test computes it. XLA's all-reduces on those machines ran at a tenth of what NVLink could carry.
LINK_EFFICIENCY = 0.0882
DEVICES_PER_NODE = 8
# In a node 0.3 to 0.4 ms (artifact, scripts/pipeline_latency/plot.py); between nodes 25 Gb/s (AlpaServe, section 6.1).
HANDOVER_S = 0.35e-3
NETWORK_BYTES_PER_S = 25e9 / 8
# What a batch sends beyond its first request, over one link: NVLink 2.0, 25 GB/s a direction (NVIDIA, Tesla V100 whitepaper).
NVLINK_BYTES_PER_S = 25e9


class SinglePass(Protocol):
    """A model that answers in one pass, on groups of any shape."""

    @property
    def name(self) -> str: ...

    @property
    def latency_s(self) -> float:
        """The latency of one request on one device."""
        ...

    def stage_s(self, inter_op: int, intra_op: int, batch: int = 1) -> tuple[float, ...]:
        """Seconds of each stage; ValueError where the model cannot be split so."""
        ...

    def device_bytes(self, inter_op: int, intra_op: int) -> float:
        """Weights on each device of the fullest stage; ValueError where the model cannot be split so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableModel:
    """A model of AlpaServe's table."""

    name: str
    weight_bytes: float
    latency_s: float
    layers: int
    hidden: int
    """0 where the architecture is not published: equal layer groups, which split over devices like the 1.3B model."""
    vocab: int
    """The vocabulary of the embedding, which weighs on the first stage and takes no time."""
    measured: Mapping[tuple[int, int], tuple[float, ...]] = field(hash=False, repr=False)
    """(inter_op, intra_op) -> stage times over the single-device latency."""
    batches: Mapping[int, float] = field(hash=False, repr=False)
    """Batch size -> latency over that of one request."""

    def stage_s(self, inter_op: int, intra_op: int, batch: int = 1) -> tuple[float, ...]:
        if batch not in self.batches:
            raise ValueError(
                f"{self.name}: latencies of batches {', '.join(map(str, self.batches))} are known; got {batch}"
            )
        return tuple(stage * self.batches[batch] for stage in self._one(inter_op, intra_op))

    def _one(self, inter_op: int, intra_op: int) -> tuple[float, ...]:
        if (inter_op, intra_op) in self.measured:
            return tuple(ratio * self.latency_s for ratio in self.measured[inter_op, intra_op])
        return self.plan(inter_op, intra_op).stage_s

    def plan(self, inter_op: int, intra_op: int) -> ParallelPlan:
        """The automatic split by the cost model, also for shapes that have been measured."""
        groups = self.layer_groups_s(intra_op)
        if inter_op > len(groups):
            raise ValueError(f"{self.name} has {len(groups)} layer groups; got {inter_op} stages")

        sending = _handover(TOKENS * (self.hidden or _ASSUMED_HIDDEN) * 2, 1, intra_op)
        return plan(groups, inter_op, single_device_s=self.latency_s, intra_op=intra_op, handover_s=sending)

    def layer_groups_s(self, intra_op: int) -> tuple[float, ...]:
        """Seconds of each group of layers on *intra_op* devices; of a shape that is assumed where the model's own is not known."""
        if self.hidden:
            return _layers_of(self.layers, self.hidden, self.latency_s, intra_op)
        like = load_single_pass(_ASSUMED_LIKE)
        factor = sum(like.layer_groups_s(intra_op)) / like.latency_s
        return (self.latency_s * factor / self.layers,) * self.layers

    def device_bytes(self, inter_op: int, intra_op: int) -> float:
        bounds = self.plan(inter_op, intra_op).bounds
        layer, table = (12 * self.hidden**2, self.vocab * self.hidden) if self.hidden else (1, 0)
        stages = [(b - a) * layer + (a == 0) * table for a, b in pairwise(bounds)]
        return self.weight_bytes * max(stages) / sum(stages) / intra_op


_ASSUMED_LIKE = "bert-1.3b"
_ASSUMED_HIDDEN = 2048


def _handover(request_bytes: float, batch: int, intra_op: int) -> Callable[[int], float]:
    """Seconds to hand a batch from a stage to the next, between nodes where the stage ends one."""

    def seconds(stage: int) -> float:
        if (stage + 1) * intra_op % DEVICES_PER_NODE == 0:
            return batch * request_bytes / NETWORK_BYTES_PER_S
        return HANDOVER_S + (batch - 1) * request_bytes / NVLINK_BYTES_PER_S

    return seconds


def encoder_plan(
    layers: int, hidden: int, single_s: float, *, inter_op: int, intra_op: int = 1, tokens: int = TOKENS, batch: int = 1
) -> ParallelPlan:
    """The automatic split of an encoder whose batch of *batch* requests of *tokens* tokens takes one V100 *single_s*."""
    groups = _layers_of(layers, hidden, single_s, intra_op, tokens)
    sending = _handover(tokens * hidden * 2, batch, intra_op)
    return plan(groups, inter_op, single_device_s=single_s, intra_op=intra_op, handover_s=sending)


@functools.lru_cache(maxsize=256)
def _layers_of(layers: int, hidden: int, latency_s: float, intra_op: int, tokens: int = TOKENS) -> tuple[float, ...]:
    """Seconds of each layer by the roofline, with the efficiency at which one device takes *latency_s*."""
    device = load_device("v100-16")
    spec = encoder(layers, hidden)
    efficiency = sum(layer_seconds(spec, device, 1, tokens)) / latency_s

    def groups(intra: int) -> tuple[float, ...]:
        cost = functools.partial(Roofline, compute_efficiency=efficiency, link_efficiency=LINK_EFFICIENCY)
        return layer_seconds(spec, device, intra, tokens, cost)

    # What is bound by memory does not slow down with the arithmetic; the last percent is scaled away.
    scale = latency_s / sum(groups(1))
    return tuple(scale * group for group in groups(intra_op))


def encoder(layers: int, hidden: int) -> ModelSpec:
    """An encoder of equal layers without a head.

    The artifact's four stages of the 2.7B model take the same time each, which leaves no room for a head.
    """
    config = {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "intermediate_size": 4 * hidden,
        "vocab_size": 1,
        "max_position_embeddings": TOKENS,
        "torch_dtype": "float16",
    }
    spec = spec_from_config(config, name=f"encoder of {layers} layers of {hidden}", where="hwmodels.single_pass")
    return replace(spec, lm_head_params=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """Any model of the catalogue asked for one forward pass (its prompt), priced by the cost model."""

    name: str
    spec: ModelSpec
    device: Device
    tokens: int

    @property
    def latency_s(self) -> float:
        return sum(layer_seconds(self.spec, self.device, 1, self.tokens))

    def stage_s(self, inter_op: int, intra_op: int, batch: int = 1) -> tuple[float, ...]:
        # A batch of prompts is as many rows; attention stays within each, which a longer prompt would overstate.
        one = parallelise(self.spec, self.device, inter_op=inter_op, intra_op=intra_op, tokens=self.tokens).stage_s
        return tuple(stage * batch for stage in one)

    def device_bytes(self, inter_op: int, intra_op: int) -> float:
        parallel = ParallelConfig(tensor=intra_op, pipeline=inter_op)
        return max(stage_work(self.spec, parallel, stage).resident_bytes for stage in range(inter_op))


@functools.cache
def single_pass_catalogue() -> Mapping[str, TableModel]:
    """The models of AlpaServe's table, by name."""
    measured: dict[str, dict[tuple[int, int], tuple[float, ...]]] = {}
    for row in packaged_rows("alpaserve_measured.csv"):
        ratios = tuple(float(stage) / float(row["single_s"]) for stage in row["stage_s"].split())
        measured.setdefault(row["name"], {})[int(row["inter_op"]), int(row["intra_op"])] = ratios
    batches: dict[int, dict[int, float]] = {}
    for row in packaged_rows("alpaserve_batches.csv"):
        batches.setdefault(int(row["hidden"]), {})[int(row["batch"])] = float(row["latency_s"])
    found = {}
    for row in packaged_rows("alpaserve_models.csv"):
        # The wider of the two models measured with batches stands for those that take as long as it or longer.
        times = batches[4096 if float(row["latency_s"]) > 0.3 else 2560]
        found[row["name"]] = TableModel(
            name=row["name"],
            weight_bytes=float(row["weight_bytes"]),
            latency_s=float(row["latency_s"]),
            layers=int(row["layers"]),
            hidden=int(row["hidden"]),
            vocab=int(row["vocab"]),
            measured=measured.get(row["name"], {}),
            # Measured with 1024 tokens a request: twice as many of those are the tokens of a batch here.
            batches={size // 2: time / times[2] for size, time in times.items() if size > 1},
        )
    return found


def load_single_pass(name: str) -> TableModel:
    """The model called *name* in AlpaServe's table; ValueError naming those there are."""
    catalogue = single_pass_catalogue()
    if name not in catalogue:
        raise ValueError(f"{name!r} is not a model of AlpaServe's table; there are {', '.join(catalogue)}")
    return catalogue[name]
