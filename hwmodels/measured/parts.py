"""Which equations a kind of file is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured import (
    attention,
    compressed,
    experts,
    host,
    latent_attention,
    linear_attention,
    links,
    products,
    tpus,
)
from hwmodels.measured.files import Measurement
from hwmodels.measured.names import catalogue_name
from hwmodels.measured.part import Part


def _gemm(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Products on systolic arrays have an equation of their own."""
    systolic = catalogue_name(m.device).startswith(("tpu", "trn", "trainium")) and m.dtype == "bf16"
    yield from (tpus if systolic else products).gemm(m, device)


_PARTS: dict[str, Callable[[Measurement, Datasheet], Iterator[Part]]] = {
    "gemm": _gemm,
    "attention_prefill": attention.prefill,
    "attention_decode": attention.decode,
    "attention_windowed_prefill": attention.prefill,
    "attention_windowed_decode": attention.decode,
    "attention_mixed": attention.mixed,
    "encoder_attention": attention.encoder,
    "host": host.host,
    "attention_paged": attention.paged,
    "collectives_nccl": links.nccl,
    "collectives_nodes": links.nodes,
    "allreduce": links.allreduce,
    "dispatch": links.exchange,
    "elementwise": products.elementwise,
    "elementwise_rates": products.elementwise_rates,
    "computescale": products.compute_scale,
    "quantize": products.quantize,
    "layers": products.layers,
    "linear_attention": linear_attention.linear,
    "kda": linear_attention.kda,
    "mamba2": linear_attention.mamba2,
    "compressed_prefill": compressed.module,
    "compressed_decode": compressed.module,
    "blocks_prefill": compressed.blocks,
    "blocks_decode": compressed.blocks,
    "sparse_prefill": compressed.sparse,
    "sparse_decode": compressed.sparse,
    "hyper_connections": compressed.hyper_connections,
    "moe": experts.moe,
    "moe_layer": experts.moe_layer,
    "mla": latent_attention.kernel,
    "mla_bmm": latent_attention.products,
    "mla_module_prefill": latent_attention.module,
    "mla_module_decode": latent_attention.module,
    "tpu_attention": tpus.attention,
    "tpu_layers": tpus.layers,
}


def parts(measurement: Measurement, device: Datasheet) -> Iterator[Part]:
    """The equations behind a file's rows, for prediction and for fitting alike."""
    yield from _PARTS[measurement.kind](measurement, device)
