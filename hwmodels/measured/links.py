"""Collectives in a node and between nodes, and the exchange of tokens between experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from hwmodels.kernels.collectives import NETWORK_BYTES_PER_S, CollectiveParams
from hwmodels.kernels.exchange import ExchangeParams
from hwmodels.kernels.families import COLLECTIVE, EXCHANGE, STEPPED
from hwmodels.kernels.parameters import Datasheet
from hwmodels.kernels.stepped import SteppedParams
from hwmodels.measured.files import Measurement
from hwmodels.measured.part import Columns, Part, Shape, pick

_COLLECTIVES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
_SIZES = {"bytes": "message_bytes", "devices": "num_gpus"}


def _part(
    m: Measurement,
    device: Datasheet,
    mask: np.ndarray,
    kind: str,
    names: Mapping[str, str],
    variants: tuple[str, ...],
    link_bytes_per_s: float,
) -> Part:
    rows, columns = pick(m, mask, names)
    columns.setdefault("adapters", np.ones(len(rows)))

    def shape(c: Columns) -> Shape:
        return {
            "kind": kind,
            "message_bytes": c["bytes"],
            "devices": c["devices"],
            "link_bytes_per_s": link_bytes_per_s * c["adapters"],
        }

    starts = (
        CollectiveParams(),
        CollectiveParams(widening=1.0, bandwidth_high=0.5, bandwidth_mid=0.2),
        CollectiveParams(start_s=3e-5, host_s=2e-5),
        CollectiveParams(widening=-0.2, bandwidth_high=0.7),
    )
    return Part(
        form=COLLECTIVE, sheet=device, variants=variants, rows=rows, columns=columns, shape=shape,
        groups=("devices", "bytes"), starts=starts,
    )  # fmt: skip


def nccl(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for name in np.unique(m.columns["collective"]):
        kind, mask = _COLLECTIVES.get(str(name), str(name)), m.columns["collective"] == name
        if m.source != "rccl":
            variants = (f"{kind}/nccl", f"{kind}/vidur-node")
            yield _part(m, device, mask, kind, _SIZES, variants, device.link_bytes_per_s)
        elif kind == "all_reduce":
            part = _part(m, device, mask, kind, _SIZES, ("all_reduce/rccl",), device.link_bytes_per_s)
            yield replace(part, form=STEPPED, starts=(SteppedParams(),))


def nodes(m: Measurement, device: Datasheet) -> Iterator[Part]:
    across = m.columns["devices_per_node"] < m.columns["num_workers"]
    pairs = "pairwise" in m.labels["topology"]
    for name in np.unique(m.columns["collective"]):
        for network in (False, True):
            mask = (m.columns["collective"] == name) & (across == network)
            if not mask.any():
                continue
            place = "network" if network else "node"
            variants = (f"{name}/vidur-{place}", f"{name}/nccl")
            if pairs:
                variants = (f"{name}/vidur-pairs-{place}", *variants)
            link = NETWORK_BYTES_PER_S if network else device.link_bytes_per_s
            names = {"bytes": "size_bytes", "devices": "num_workers"}
            if network:  # each device of a node has its adapter, and NCCL runs a ring over each
                names["adapters"] = "devices_per_node"
            yield _part(m, device, mask, str(name), names, variants, link)


def allreduce(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for backend in np.unique(m.columns["backend"]):
        # TensorRT-LLM's is only ever replayed from a graph, and its table says no more than the name.
        own = str(backend).replace("_", "-") + ("" if "_" in str(backend) else "-graph")
        yield _part(
            m, device, m.columns["backend"] == backend, "all_reduce", _SIZES,
            (f"all_reduce/{own}", "all_reduce/nccl"), device.link_bytes_per_s,
        )  # fmt: skip


_NUMBER_BYTES = {"dispatch": 1.0, "combine": 2.0}
"""Rows travel to the experts in 8 bits and back in 16."""


def exchange(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names = {
        "tokens": "num_tokens", "hidden": "hidden_size", "topk": "topk", "experts": "num_experts",
        "devices": "num_gpus", "sms": "sms",
    }  # fmt: skip
    for operation, number_bytes in _NUMBER_BYTES.items():
        for mode in np.unique(m.columns["mode"]):
            rows, columns = pick(m, (m.columns["operation"] == operation) & (m.columns["mode"] == mode), names)
            yield Part(
                form=EXCHANGE, sheet=device, variants=(f"{operation}/deepep-{str(mode).replace('_', '-')}",), rows=rows,
                columns=columns, shape=lambda c, number_bytes=number_bytes: {**c, "number_bytes": number_bytes},
                groups=("hidden", "topk", "experts", "tokens"),
                starts=(ExchangeParams(), ExchangeParams(overlap_loss=2.0, copy_s=0.0),
                        ExchangeParams(start_s=4e-5, own_copies=5.0)),
            )  # fmt: skip
