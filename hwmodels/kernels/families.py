"""Every kernel that this project has an equation for, by the name that profiles call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

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
    "gemm", GemmParams, gemm.gemm_s,
    "tiles in waves over the multiprocessors (NVIDIA, Matrix Multiplication Background User's Guide) on a roofline",
)  # fmt: skip
PREFILL = FoldedForm(
    "prefill", PrefillParams, attention.attention_prefill_s,
    "tiles of 128 query rows (FlashAttention-2, Dao, arXiv 2307.08691) on a roofline",
    folded=attention.prefill_form,
)  # fmt: skip
DECODE = FoldedForm(
    "decode", DecodeParams, attention.attention_decode_s,
    "a stream of the cache, split over blocks and combined (Flash-Decoding, Dao et al., 2023)",
    folded=attention.decode_form,
)  # fmt: skip
MIXED = KernelForm(
    "mixed", PrefillParams, attention.attention_mixed_s,
    "the form of prompts, in which a decode is a chunk of its query tokens",
)  # fmt: skip
ENCODER = FoldedForm(
    "encoder", PrefillParams, attention.attention_prefill_s,
    "the form of prompts over all pairs of an item's patches, a set for each width of a head",
    folded=attention.prefill_form,
)  # fmt: skip
MOE = KernelForm(
    "moe", MoeParams, moe.moe_s,
    "grouped GEMMs over the experts that a batch wakes, on a roofline",
)  # fmt: skip
MLA_PREFILL = FoldedForm(
    "mla_prefill", PrefillParams, mla.mla_prefill_s,
    "the form of prompts over expanded keys and values, or over the latent (DeepSeek-V2, arXiv 2405.04434, 2.1)",
    folded=mla.prefill_form,
)  # fmt: skip
MLA_DECODE = FoldedForm(
    "mla_decode", MlaDecodeParams, mla.mla_decode_s,
    "the latent met by absorbed queries (DeepSeek-V2, arXiv 2405.04434, 2.1) on a roofline",
    folded=mla.decode_form,
)  # fmt: skip
COLLECTIVE = KernelForm(
    "collective", CollectiveParams, _without_sheet(collectives.collective_s),
    "latency plus size over bandwidth for each of NCCL's three protocols, the fastest of which its tuner takes",
)  # fmt: skip
STEPPED = SteppedForm(
    "stepped", SteppedParams, stepped_s,
    "RCCL's protocols by size: a time each, and the link under the longest messages",
)  # fmt: skip
EXCHANGE = KernelForm(
    "exchange", ExchangeParams, exchange.exchange_s,
    "copies of tokens by SMs and over the link (DeepEP, github.com/deepseek-ai/DeepEP)",
)  # fmt: skip
ELEMENTWISE = KernelForm(
    "elementwise", ElementwiseParams, elementwise.elementwise_s,
    "bytes over bandwidth, with a start and a cost of rows",
)  # fmt: skip
MLA_BMM = KernelForm(
    "mla_bmm", MlaBmmParams, mla.mla_bmm_s,
    "a product for each head on a roofline",
)  # fmt: skip
MLA_MODULE = KernelForm(
    "mla_module", MlaModuleParams, mla.mla_module_s,
    "projections and attention of a DeepSeek-V3 layer (arXiv 2412.19437), each on a roofline",
)  # fmt: skip
LINEAR_PREFILL = FoldedForm(
    "linear_prefill", LinearParams, linear_attention.linear_prefill_s,
    "chunks of a gated delta net in turn (Yang et al., arXiv 2412.06464), and its convolution, on a roofline",
    folded=linear_attention.linear_form,
)  # fmt: skip
LINEAR_DECODE = FoldedForm(
    "linear_decode", LinearParams, linear_attention.linear_decode_s,
    "states read and written once a token (Yang et al., arXiv 2412.06464)",
    folded=linear_attention.decode_form,
)  # fmt: skip
COMPRESSED_PREFILL = FoldedForm(
    "compressed_prefill", CompressedParams, compressed.compressed_prefill_s,
    "rows, scored and attended keys (DeepSeek-V4's compressed attention), beside its products",
    folded=compressed.prefill_form,
)  # fmt: skip
COMPRESSED_DECODE = FoldedForm(
    "compressed_decode", CompressedParams, compressed.compressed_decode_s,
    "as of prompts, with the cache read once",
    folded=compressed.decode_form,
)  # fmt: skip
TPU_GEMM = KernelForm(
    "tpu_gemm", TpuGemmParams, tpu.tpu_gemm_s,
    "a systolic array that is filled and drained (Jouppi et al., arXiv 1704.04760) on a roofline",
)  # fmt: skip
TPU_PREFILL = FoldedForm(
    "tpu_prefill", TpuAttentionParams, _without_sheet(tpu.tpu_prefill_s),
    "sums of rows, pairs and keys",
    folded=tpu.prefill_form,
)  # fmt: skip
TPU_DECODE = FoldedForm(
    "tpu_decode", TpuAttentionParams, _without_sheet(tpu.tpu_decode_s),
    "paged attention that walks sequences one after the other",
    folded=tpu.decode_form,
)  # fmt: skip
CPU_GEMM = KernelForm(
    "cpu_gemm", CpuGemmParams, cpu.cpu_gemm_s,
    "the faster of packed panels (Goto and van de Geijn, ACM TOMS 34, 2008) and row by row",
)  # fmt: skip
CPU_PREFILL = FoldedForm(
    "cpu_prefill", CpuAttentionParams, cpu.cpu_attention_s,
    "pairs and cached bytes on a roofline, with a cost of blocks and rows",
    folded=cpu.attention_form,
)  # fmt: skip
CPU_DECODE = FoldedForm(
    "cpu_decode", CpuAttentionParams, cpu.cpu_attention_s,
    "as of prompts",
    folded=cpu.attention_form,
)  # fmt: skip
HOST = KernelForm(
    "host", HostParams, _without_sheet(cpu.host_s),
    "a step's own time and that of each layer",
)  # fmt: skip

_FORMS = cast("list[KernelForm[Any]]", [each for each in vars().values() if isinstance(each, KernelForm)])
FAMILIES: Mapping[str, KernelForm[Any]] = {form.family: form for form in _FORMS}
"""Family -> its equation."""
