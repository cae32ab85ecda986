"""Every kernel that this project has an equation for, by the name that profiles call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hwmodels.kernels import (
    attention,
    collectives,
    compressed,
    cpu,
    elementwise,
    exchange,
    gemm,
    linear_attention,
    mla,
    moe,
    tpu,
)
from hwmodels.kernels.attention import DecodeParams, PrefillParams
from hwmodels.kernels.collectives import CollectiveParams
from hwmodels.kernels.compressed import CompressedParams
from hwmodels.kernels.cpu import CpuAttentionParams, CpuGemmParams, HostParams
from hwmodels.kernels.elementwise import ElementwiseParams
from hwmodels.kernels.exchange import ExchangeParams
from hwmodels.kernels.form import FoldedForm, KernelForm
from hwmodels.kernels.gemm import GemmParams
from hwmodels.kernels.linear_attention import LinearParams
from hwmodels.kernels.mla import MlaBmmParams, MlaDecodeParams, MlaModuleParams
from hwmodels.kernels.moe import MoeParams
from hwmodels.kernels.parameters import Datasheet
from hwmodels.kernels.stepped import SteppedForm, SteppedParams, stepped_s
from hwmodels.kernels.tpu import TpuAttentionParams, TpuGemmParams


def _without_sheet(equation: Callable[..., Any]) -> Callable[..., Any]:
    """An *equation* of parameters and a shape as one that takes a datasheet too."""

    def of_sheet(params: Any, _sheet: Datasheet, **shape: Any) -> Any:
        return equation(params, **shape)

    return of_sheet


GEMM = KernelForm(
    family="gemm",
    parameters=GemmParams,
    equation=gemm.gemm_s,
    source="tiles in waves over the multiprocessors (NVIDIA, Matrix Multiplication Background User's Guide) on a roofline",
)
PREFILL = FoldedForm(
    family="prefill",
    parameters=PrefillParams,
    equation=attention.attention_prefill_s,
    source="tiles of 128 query rows (FlashAttention-2, Dao, arXiv 2307.08691) on a roofline",
    folded=attention.prefill_form,
)
DECODE = FoldedForm(
    family="decode",
    parameters=DecodeParams,
    equation=attention.attention_decode_s,
    source="a stream of the cache, split over blocks and combined (Flash-Decoding, Dao et al., 2023)",
    folded=attention.decode_form,
)
MIXED = KernelForm(
    family="mixed",
    parameters=PrefillParams,
    equation=attention.attention_mixed_s,
    source="the form of prompts, in which a decode is a chunk of its query tokens",
)
ENCODER = FoldedForm(
    family="encoder",
    parameters=PrefillParams,
    equation=attention.attention_prefill_s,
    source="the form of prompts over all pairs of an item's patches, a set for each width of a head",
    folded=attention.prefill_form,
)
MOE = KernelForm(
    family="moe",
    parameters=MoeParams,
    equation=moe.moe_s,
    source="grouped GEMMs over the experts that a batch wakes, on a roofline",
)
MLA_PREFILL = FoldedForm(
    family="mla_prefill",
    parameters=PrefillParams,
    equation=mla.mla_prefill_s,
    source="the form of prompts over expanded keys and values, or over the latent (DeepSeek-V2, arXiv 2405.04434, 2.1)",
    folded=mla.prefill_form,
)
MLA_DECODE = FoldedForm(
    family="mla_decode",
    parameters=MlaDecodeParams,
    equation=mla.mla_decode_s,
    source="the latent met by absorbed queries (DeepSeek-V2, arXiv 2405.04434, 2.1) on a roofline",
    folded=mla.decode_form,
)
MLA_BMM = KernelForm(
    family="mla_bmm",
    parameters=MlaBmmParams,
    equation=mla.mla_bmm_s,
    source="a product for each head on a roofline",
)
MLA_MODULE = KernelForm(
    family="mla_module",
    parameters=MlaModuleParams,
    equation=mla.mla_module_s,
    source="projections and attention of a DeepSeek-V3 layer (arXiv 2412.19437), each on a roofline",
)
LINEAR_PREFILL = FoldedForm(
    family="linear_prefill",
    parameters=LinearParams,
    equation=linear_attention.linear_prefill_s,
    source="chunks of a gated delta net in turn (Yang et al., arXiv 2412.06464), and its convolution, on a roofline",
    folded=linear_attention.linear_form,
)
LINEAR_DECODE = FoldedForm(
    family="linear_decode",
    parameters=LinearParams,
    equation=linear_attention.linear_decode_s,
    source="states read and written once a token (Yang et al., arXiv 2412.06464)",
    folded=linear_attention.decode_form,
)
COMPRESSED_PREFILL = FoldedForm(
    family="compressed_prefill",
    parameters=CompressedParams,
    equation=compressed.compressed_prefill_s,
    source="rows, scored and attended keys (DeepSeek-V4's compressed attention), beside its products",
    folded=compressed.prefill_form,
)
COMPRESSED_DECODE = FoldedForm(
    family="compressed_decode",
    parameters=CompressedParams,
    equation=compressed.compressed_decode_s,
    source="as of prompts, with the cache read once",
    folded=compressed.decode_form,
)
COLLECTIVE = KernelForm(
    family="collective",
    parameters=CollectiveParams,
    equation=_without_sheet(collectives.collective_s),
    source="latency plus size over bandwidth for each of NCCL's three protocols, the fastest of which its tuner takes",
)
STEPPED = SteppedForm(
    family="stepped",
    parameters=SteppedParams,
    equation=stepped_s,
    source="RCCL's protocols by size: a time each, and the link under the longest messages",
)
EXCHANGE = KernelForm(
    family="exchange",
    parameters=ExchangeParams,
    equation=exchange.exchange_s,
    source="copies of tokens by SMs and over the link (DeepEP, github.com/deepseek-ai/DeepEP)",
)
ELEMENTWISE = KernelForm(
    family="elementwise",
    parameters=ElementwiseParams,
    equation=elementwise.elementwise_s,
    source="bytes over bandwidth, with a start and a cost of rows",
)
TPU_GEMM = KernelForm(
    family="tpu_gemm",
    parameters=TpuGemmParams,
    equation=tpu.tpu_gemm_s,
    source="a systolic array that is filled and drained (Jouppi et al., arXiv 1704.04760) on a roofline",
)
TPU_PREFILL = FoldedForm(
    family="tpu_prefill",
    parameters=TpuAttentionParams,
    equation=_without_sheet(tpu.tpu_prefill_s),
    source="sums of rows, pairs and keys",
    folded=tpu.prefill_form,
)
TPU_DECODE = FoldedForm(
    family="tpu_decode",
    parameters=TpuAttentionParams,
    equation=_without_sheet(tpu.tpu_decode_s),
    source="paged attention that walks sequences one after the other",
    folded=tpu.decode_form,
)
CPU_GEMM = KernelForm(
    family="cpu_gemm",
    parameters=CpuGemmParams,
    equation=cpu.cpu_gemm_s,
    source="the faster of packed panels (Goto and van de Geijn, ACM TOMS 34, 2008) and row by row",
)
CPU_PREFILL = FoldedForm(
    family="cpu_prefill",
    parameters=CpuAttentionParams,
    equation=cpu.cpu_attention_s,
    source="pairs and cached bytes on a roofline, with a cost of blocks and rows",
    folded=cpu.attention_form,
)
CPU_DECODE = FoldedForm(
    family="cpu_decode",
    parameters=CpuAttentionParams,
    equation=cpu.cpu_attention_s,
    source="as of prompts",
    folded=cpu.attention_form,
)
HOST = KernelForm(
    family="host",
    parameters=HostParams,
    equation=_without_sheet(cpu.host_s),
    source="a step's own time and that of each layer",
)

FAMILIES: Mapping[str, KernelForm[Any]] = {
    form.family: form
    for form in (
        *(
            GEMM,
            PREFILL,
            DECODE,
            MIXED,
            ENCODER,
            MOE,
            MLA_PREFILL,
            MLA_DECODE,
            COLLECTIVE,
            STEPPED,
            EXCHANGE,
            ELEMENTWISE,
        ),
        *(MLA_BMM, MLA_MODULE, LINEAR_PREFILL, LINEAR_DECODE, COMPRESSED_PREFILL, COMPRESSED_DECODE),
        *(TPU_GEMM, TPU_PREFILL, TPU_DECODE, CPU_GEMM, CPU_PREFILL, CPU_DECODE, HOST),
    )
}
"""Family -> its equation."""
