"""A GPU's calibrated kernels under a serving stack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hwmodels.kernels.attention import widest_group
from hwmodels.kernels.families import (
    COMPRESSED_DECODE,
    COMPRESSED_PREFILL,
    DECODE,
    ELEMENTWISE,
    ENCODER,
    GEMM,
    MLA_BMM,
    MLA_DECODE,
    MLA_PREFILL,
    MOE,
    PREFILL,
)
from hwmodels.kernels.gemm import library_of
from hwmodels.kernels.linear_attention import DECODED_AS, KERNELS, layer_forms
from hwmodels.kernels.moe import EXPERT_FORMATS, ExpertFormat
from hwmodels.kernels.ops import DecodeForm, Ops, PrefillForm, Running
from hwmodels.operations import AttentionShape, ExpertMlp, HeadProducts, Recurrence, StageWork
from hwmodels.precision import precision as number_format
from hwmodels.profiles import Kernel, Profile
from hwmodels.stack_kernels import WIDTH, StackKernels, Table, gemm_nodes, moe_nodes, weights_of
from hwmodels.stacks import kernels_of, latent_alone, narrow_heads

_CALIBRATED = ("torch", "jax")  # cuBLAS on operands that are in the format already
_BLOCK_ROWS = 128
"""Rows of a tile of DeepGEMM's grouped products."""
_ROUTING = "power_law_1.01"
"""The skew by which tokens choose experts: the mildest skew that the measured tables hold."""
_BLOCK_TILE_TOKENS = 64
"""Tokens of a tile of experts in FP8 blocks at any batch where none was tuned (vLLM 0.11.1, fused_moe.get_default_config; its
DeepGEMM experts pad each expert to 128)."""
# Formats of dense products whose fitted efficiencies may serve one, the best first, by arithmetic and by format where
# the scales make a difference.
_FORMATS = {
    "fp8": ("fp8", "fp8_block", "bf16"),
    "fp8_static": ("fp8", "fp8_block", "bf16"),
    "fp8_block": ("fp8_block", "fp8", "bf16"),
    "int8": ("int8", "fp8", "fp8_block", "bf16"),
    "fp4": ("nvfp4", "mxfp4", "fp8", "bf16"),
    "mxfp4": ("mxfp4", "nvfp4", "fp8", "bf16"),
}
# Experts of a format by the arithmetic that a device has for it, where that is not the format's first.
_EXPERTS_AS = {
    ("mxfp4", "fp8"): "mxfp4_mxfp8", ("mxfp4", "fp4"): "mxfp4_mxfp4", ("nvfp4", "bf16"): "mxfp4", ("nvfp4_a16", "bf16"): "mxfp4",
    ("int4_g32", "bf16"): "int4", ("fp16", "bf16"): "bf16",
}  # fmt: skip


class Use(NamedTuple):
    """A kernel that prices part of a deployment."""

    what: str
    kernel: Kernel
    usual: frozenset[str]
    """The variants that are the stack's own for the format."""
    far: bool
    """Whether it runs over the network between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels(StackKernels):
    """GEMMs and experts by tiles and waves, attention by blocks; ValueError names what the profile lacks."""

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        def table(dtype: str, weight_bytes: float) -> Table:
            fmt = product_format(precision, dtype)
            return _gemm_table(self.profile, self.sources, int(n), int(k), fmt, dtype, weight_bytes)

        return self.tabulated_s(m, 2.0 * m * n * k, precision, table)

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        def table(dtype: str, weight_bytes: float) -> Table:
            return _moe_table(
                self.profile, self._expert_sources(experts.precision), experts, dtype, self._backend(experts)
            )

        seconds = self.tabulated_s(rows, experts.flops(rows) / experts.layers, experts.precision, table)
        own = self.stack.overheads
        if experts.precision == "fp8_block":
            filled = np.asarray(rows) * experts.per_token / (experts.n_experts * _BLOCK_TILE_TOKENS)
            seconds = seconds + np.where(np.asarray(rows) > 0, own.block_experts_s * np.maximum(0.0, 1.0 - filled), 0.0)
            if experts.expert > 1 and own.spread_experts_s_per_flop and not self.handed_over:
                replayed = max(self.captured or (0,))
                more_s = own.spread_experts_s_per_flop * experts.flops(rows) / experts.layers
                seconds = seconds + np.where(np.asarray(rows) > replayed, more_s, 0.0)
            return seconds
        if experts.expert > 1 and number_format(experts.precision).weight_bytes == WIDTH["bf16"]:
            return seconds * np.where(
                np.asarray(rows) > experts.n_experts / experts.expert, 1.0 + own.untuned_experts, 1.0
            )
        return seconds

    def multiplied_pairs(self, rows: Any, experts: ExpertMlp) -> Any:
        """Pairs of token and expert that a device multiplies in one layer, those among them that only fill tiles; None: no such.

        vLLM's releases with a time of experts in FP8 blocks (`Overheads.block_experts_s`) run DeepGEMM, for which the rows of each
        expert begin at a multiple of 128 and there is room for those of every expert of the device (0.11.1,
        model_executor/layers/fused_moe/deep_gemm_utils.py, `compute_aligned_M`). Hopper's kernels skip tiles without a token;
        Blackwell's multiply all: neither the steps nor the power of B200 grow with the experts that are awake.
        """
        blocks = experts.precision == "fp8_block" and self.stack.overheads.block_experts_s > 0
        if not blocks or experts.backend not in (None, "deep_gemm"):
            return None
        pairs = rows * (experts.per_token / experts.expert)
        if "fp4" in self.profile.datasheet.peak_flops_per_s:
            return pairs + (experts.n_experts + experts.redundant) / experts.expert * (_BLOCK_ROWS - 1)
        awake = experts.active_experts(rows) / experts.expert
        # An expert's last tile is filled by half in the mean, and its only one as far as it has tokens.
        return np.maximum(awake * _BLOCK_ROWS, pairs + awake * (0.5 * (_BLOCK_ROWS - 1)))

    def _backend(self, experts: ExpertMlp) -> str | None:
        """The parameter set of the backend that was asked for; None: none was, or its tables do not tell it apart."""
        backends = kernels_of(self.stack.kernels).expert_backends
        if experts.backend is None or backends is None:
            return None
        return backends.of(weights_of(experts), self.device.name)[1].get(experts.backend)

    def _expert_sources(self, precision: str) -> tuple[str, ...]:
        """The stacks whose measured experts stand for the stack's, the best first.

        Those of FP4 and block-scaled FP8 may have been measured under another's name on Blackwell (`experts_with_fp4`).
        """
        other = kernels_of(self.sources[0]).experts_with_fp4
        generated = precision in ("nvfp4", "fp8_block") and "fp4" in self.profile.datasheet.peak_flops_per_s
        if other and generated and self.arithmetic(precision)[0] in ("fp4", "fp8"):
            return (other, *self.sources)
        return self.sources

    def head_products_s(self, rows: Any, products: HeadProducts) -> Any:
        dtype, variants = self._head_format(products.precision)
        params = self.profile.get("mla_bmm", variants)
        total = self._loss_s(products.flops(rows), dtype, WIDTH[dtype])
        for k, n in products.shapes:
            shape = {
                "tokens": rows,
                "heads": products.heads,
                "n": n,
                "k": k,
                "dtype": dtype,
                "weight_bytes": WIDTH[dtype],
            }
            seconds = MLA_BMM.seconds(params, self.profile.datasheet, shape)
            total = total + seconds - np.where(rows > 0, params.launch_s * self._own.launch_overlap, 0.0)
        return total

    def _head_format(self, precision: str) -> tuple[str, list[str]]:
        """The arithmetic of products head by head, and the parameter sets that may price them."""
        peaks = self.profile.datasheet.peak_flops_per_s
        own, eight = self.sources[0], precision in ("fp8", "fp8_static", "fp8_block") and "fp8" in peaks
        way = kernels_of(own).head_products
        if eight and (way == "8 bits" or (way == "8 bits before FP4" and "fp4" not in peaks)):
            return "fp8", [f"fp8/{own}", f"fp8/{narrow_heads()[0]}", "bf16/cublas"]
        return "bf16", ["bf16/cublas"]

    def uses(self, products: Iterable[str], stages: Iterable[StageWork]) -> list[Use]:
        """The kernels that price *stages*, but for what only streams: of each the best that the profile has.

        `products` are the precisions of the dense layers.
        """
        found: dict[tuple[str, str], Use] = {}

        def ask(what: str, family: str, variants: Sequence[str], usual: Iterable[str], far: bool = False) -> None:
            kernel = self.profile.kernel(family, variants)
            if kernel is not None:
                found.setdefault((what, kernel.variant), Use(what, kernel, frozenset(usual), far))

        for precision in dict.fromkeys(products):
            dtype, _, expanded = self.arithmetic(precision)
            variants = _variants(self.sources, product_format(precision, dtype))
            # No product of expanded weights has been timed: those of 16 bits stand in, reading narrower weights.
            usual = f"{precision}/{self.sources[0]}" if expanded else variants[0]
            ask(f"{number_format(precision)} matrix products", "gemm", variants, [usual])
        for stage in stages:
            if stage.experts is not None:
                precision = stage.experts.precision
                own = expert_format(precision, self.arithmetic(precision)[0])
                variants = _layer_variants(
                    self.profile, self._expert_sources(precision), own, stage.experts, self._backend(stage.experts)
                )
                # Experts that a stack runs as the format's usual ones have no table of their own.
                usual = {variants[0], variants[0].replace("-other", "").replace("-refused", "")}
                ask(f"{number_format(precision)} experts", "moe", variants, usual)
            for shape in stage.attention:
                self._ask_attention(ask, shape)
            if stage.head_products is not None:
                variants = self._head_format(stage.head_products.precision)[1]
                ask("products of each head", "mla_bmm", variants, variants[:1])
            if stage.recurrence is not None and self.profile.has("linear_decode"):
                self._ask_recurrence(ask, stage.recurrence.rule)
            if self.profile.links_measured:
                self._ask_collectives(ask, stage)
        return list(found.values())

    def _ask_recurrence(self, ask: Callable[..., None], rule: str) -> None:
        for family, whose in (("linear_prefill", "prompts"), ("linear_decode", "decodes")):
            for kernel in KERNELS[rule]:
                variants = self._recurrent_variants(family, kernel)
                ask(f"linear attention's {kernel} kernels for {whose}", family, variants, variants[:1])

    def _recurrent_variants(self, family: str, kernel: str) -> list[str]:
        names = [kernel, DECODED_AS[kernel]] if family == "linear_decode" and kernel in DECODED_AS else [kernel]
        return [f"{name}/{source}" for name in names for source in self.sources]

    def _ask_collectives(self, ask: Callable[..., None], stage: StageWork) -> None:
        pairs = [(each.kind, each.n) for each in stage.collectives]
        if stage.shared_kv is not None:
            pairs += [(each.kind, each.n) for each in stage.shared_kv.of_decodes]
        exchange = stage.exchange
        if exchange is not None and (exchange.mode or "").startswith("deepep"):
            for way in ("dispatch", "combine"):
                variants = self.exchange_variants(way, exchange.mode)
                ask(f"DeepEP's {way}", "exchange", variants, variants)
        elif exchange is not None and exchange.mode == "all_to_all":
            pairs.append(("all_to_all", exchange.n))
        elif exchange is not None:
            pairs += [(kind, exchange.n) for kind in ("all_gather", "reduce_scatter")]
        for collective, n in pairs:
            far = n > self.device.devices_per_node
            form, variants = self.link_form(collective, far)
            ask("collectives between nodes" if far else "collectives", form.family, variants, variants[:1], far)

    def _timed(self, shape: AttentionShape) -> AttentionShape:
        """The shape by which *shape* is priced: a module of latent attention to chosen tokens where one was measured, or itself."""
        module = shape.timed_as
        if module is None or self.profile.kernel("compressed_decode", self._compressed_variants(module)) is None:
            return shape
        return module

    def _ask_attention(self, ask: Callable[..., None], shape: AttentionShape) -> None:
        shape = self._timed(shape)
        cache = _cache_bytes(shape)
        if not shape.layers:
            return
        if shape.kind == "compressed":
            variants = self._compressed_variants(shape)
            for family, whose in (("compressed_prefill", "prompts"), ("compressed_decode", "decodes")):
                ask(f"compressed-attention kernels for {whose}", family, variants, variants[:1])
        elif shape.kind == "gqa":
            for family, whose in (("prefill", "prompts"), ("decode", "decodes")):
                variants = self.attention_variants(shape, cache, prompts=whose == "prompts")
                ask(f"attention kernels for {whose}", family, variants, variants[:1])
        else:
            prompts = self._latent_variants("mla_prefill", cache, absorbed=shape.kind == "indexer" or shape.absorbed)
            decodes = self._latent_variants("mla_decode", cache)
            for family, whose, variants in (("mla_prefill", "prompts", prompts), ("mla_decode", "decodes", decodes)):
                own = [name for name in variants[:1] if self.sources[0] in name]
                kind = "indexer" if shape.kind == "indexer" else "latent-attention"
                ask(f"{kind} kernels for {whose}", family, variants, own)

    def stand_ins(self, products: Iterable[str], stages: Iterable[StageWork]) -> Iterator[str]:
        """A sentence for each of `uses` that was measured of another format, with other software or on another device.

        Where nothing was measured on the device the profile's note says who lends; what is left to say is which kernels are of
        another format or software, and which cross a network.
        """
        for experts in dict.fromkeys(stage.experts for stage in stages if stage.experts is not None):
            if experts.backend is not None and self._backend(experts) is None:
                yield (
                    f"{self.device.name}: experts in {weights_of(experts)} run by {experts.backend} were not timed under "
                    f"{self.stack.kernels}; those that were stand in."
                )
        lent = not self.profile.kernels
        priced: dict[tuple[str, str], list[str]] = {}
        for what, kernel, usual, far in self.uses(products, stages):
            other = kernel.provenance.borrowed_from
            if kernel.variant in usual and (not other or (lent and not far)):
                continue
            priced.setdefault((kernel.variant, other or self.profile.name), []).append(what)
        for (variant, place), what in priced.items():
            yield (
                f"{self.device.name}: {' and '.join(what)} under {self.stack.kernels} are priced as {variant} was measured on "
                f"{place}."
            )

    def _compressed_variants(self, shape: AttentionShape) -> list[str]:
        """Layers without compressed keys were not timed alone: theirs are those of the kind that has fewest."""
        names = dict.fromkeys((shape.module, shape.module.removesuffix("-fp8")))
        return [f"{name}/{source}" for name in names for source in self.sources]

    def _encoder_variants(self, shape: AttentionShape) -> list[str]:
        """Heads of a width that was not timed are priced as the next wider ones that were, or as the widest."""
        widths = sorted(float(name.partition("/")[0]) for name in self.profile.variants("encoder"))
        if not widths:
            raise ValueError(
                f"{self.device.name}: attention of encoders has not been measured; price it by cost_model roofline"
            )
        width = next((each for each in widths if each >= shape.qk_dim), widths[-1])
        return [f"{width:g}/{source}" for source in self.sources]

    def _compressed_shape(self, shape: AttentionShape) -> dict[str, Any]:
        return {
            "heads": shape.n_heads,
            "head_dim": shape.qk_dim,
            "hidden": shape.hidden,
            "compress": float(shape.compress),
            "window": float(shape.near),
            "chosen": float(shape.chosen) if shape.chosen else None,
            "index_flops": shape.index_flops,
            "in_blocks": float(shape.in_blocks),
            "multiplied_heads": float(shape.multiplied_heads) or None,
            "token_bytes": shape.kv_bytes,
            "run": self.running(shape),
        }

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        shape = self._timed(shape)
        run, sheet = self.running(shape), self.profile.datasheet
        if shape.kind == "compressed":
            params = self.profile.get("compressed_prefill", self._compressed_variants(shape))
            return COMPRESSED_PREFILL.folded(params, sheet, **self._compressed_shape(shape))
        if shape.kind == "encoder":
            return ENCODER.folded(
                self.profile.get("encoder", self._encoder_variants(shape)),
                sheet,
                heads=shape.n_heads,
                kv_heads=shape.n_kv_heads,
                head_dim=shape.qk_dim,
                token_bytes=shape.kv_bytes,
                run=run,
            )
        if shape.kind == "gqa":
            wanted = self.attention_variants(shape, _cache_bytes(shape), prompts=True)
            params = self.profile.get("prefill", wanted)
            kernel = self.profile.kernel("prefill", wanted)
            return PREFILL.folded(
                params,
                sheet,
                heads=shape.n_heads,
                kv_heads=shape.n_kv_heads,
                head_dim=shape.qk_dim,
                v_dim=shape.v_dim,
                token_bytes=shape.kv_bytes,
                dtype="fp8" if kernel is not None and kernel.variant.startswith("fp8q/") else "bf16",
                run=run,
            )
        if shape.kind == "indexer":
            # Queries meet one key a token and mix no values.
            return PREFILL.folded(
                self._latent("mla_prefill", _cache_bytes(shape), absorbed=True),
                sheet,
                heads=shape.n_heads,
                kv_heads=1.0,
                head_dim=shape.qk_dim,
                v_dim=0.0,
                token_bytes=shape.kv_bytes,
                run=run,
            )
        return MLA_PREFILL.folded(
            self._latent("mla_prefill", _cache_bytes(shape), absorbed=shape.absorbed),
            sheet,
            heads=shape.n_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            kv_rank=shape.latent_dim,
            rope_dim=shape.rope_dim,
            latent_bytes=_cache_bytes(shape),
            expand_flops=shape.expand_flops,
            absorbed=shape.absorbed,
            run=run,
        )

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        shape = self._timed(shape)
        run, sheet = self.running(shape), self.profile.datasheet
        if shape.kind == "compressed":
            params = self.profile.get("compressed_decode", self._compressed_variants(shape))
            own = {**self._compressed_shape(shape), "entry_bytes": shape.entry_bytes}
            # Of the cache the keys of the indexer are read, and the vectors that are attended.
            own["token_bytes"] = shape.kv_bytes - shape.entry_bytes / shape.compress if shape.compress else 0.0
            return COMPRESSED_DECODE.folded(params, sheet, **own)
        if shape.kind == "gqa":
            wanted = self.attention_variants(shape, _cache_bytes(shape), prompts=False)
            params = self.profile.get("decode", wanted)
            kernel = self.profile.kernel("decode", wanted)
            source = "" if kernel is None else kernel.variant.rpartition("/")[2].partition("-")[0]
            return DECODE.folded(
                params,
                sheet,
                heads=shape.n_heads,
                kv_heads=shape.n_kv_heads,
                head_dim=shape.qk_dim,
                token_bytes=shape.kv_bytes,
                widest_group=widest_group(source),
                run=run,
            )
        indexer = shape.kind == "indexer"
        return MLA_DECODE.folded(
            self._latent("mla_decode", _cache_bytes(shape)),
            sheet,
            heads=shape.n_heads,
            kv_rank=0.0 if indexer else shape.latent_dim,
            rope_dim=shape.qk_dim if indexer else shape.rope_dim,
            latent_bytes=_cache_bytes(shape),
            run=run,
        )

    def _latent(self, family: str, cache_bytes: float, *, absorbed: bool = False) -> Any:
        return self.profile.get(family, self._latent_variants(family, cache_bytes, absorbed=absorbed))

    def _latent_variants(self, family: str, cache_bytes: float, *, absorbed: bool = False) -> list[str]:
        """The measured kernels that may stand for the stack's, the best first.

        All stacks expand keys and values of fresh prompts, as TensorRT-LLM's tables have it and SGLang's on Blackwell;
        on Hopper SGLang's table times its absorbed kernel, which its server runs behind a short prefix only (0.5.23,
        srt/models/deepseek_common/attention_backend_handler.py), and which stands for absorbed prompts here.
        SGLang's decodes of an 8-bit cache on Hopper take four times what the whole module of vLLM does, whose own kernels are
        near TensorRT-LLM's.
        """
        first = (self.sources[0],) if kernels_of(self.sources[0]).latent_alone else ()
        others = latent_alone()
        if family != "mla_prefill" and (cache_bytes >= 1.5 or "fp4" in self.profile.datasheet.peak_flops_per_s):
            others = others[::-1]
        over_latent = [f"{name}-absorbed" for name in others if absorbed and kernels_of(name).latent_absorbed_on]
        names = dict.fromkeys((*over_latent, *first, *others))
        formats = ("fp8/", "") if cache_bytes < 1.5 else ("",)
        return [fmt + name for name in names for fmt in formats]

    def recurrence_forms(self, shape: Recurrence) -> tuple[PrefillForm, DecodeForm]:
        """By the kernels measured; by the datasheet where the profile has none.

        Decodes read a state for each sequence and write one for each query token, so that rejected drafts can be undone.
        """
        if not self.profile.has("linear_decode"):
            return StackKernels.recurrence_forms(self, shape)
        found = {
            family: [
                self.profile.get(family, self._recurrent_variants(family, kernel)) for kernel in KERNELS[shape.rule]
            ]
            for family in ("linear_prefill", "linear_decode")
        }
        of_prompts, of_decodes = layer_forms(
            self.profile.datasheet,
            found["linear_prefill"],
            found["linear_decode"],
            rule=shape.rule,
            key_heads=shape.n_key_heads,
            key_dim=shape.key_dim,
            value_heads=shape.n_value_heads,
            value_dim=shape.value_dim,
            conv_width=shape.conv_width,
            run=Running(layers=float(shape.layers), start_share=1.0 - self._own.launch_overlap),
        )

        def prefill(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
            return of_prompts(ops, rows, chunks)

        def decode(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
            return of_decodes(ops, 0.5 * (seqs + queries))

        return prefill, decode


def _cache_bytes(shape: AttentionShape) -> float:
    """The bytes of one number in the cache."""
    numbers = {"gqa": shape.n_kv_heads * (shape.qk_dim + shape.v_dim), "mla": shape.latent_dim + shape.rope_dim}
    return shape.kv_bytes / numbers.get(shape.kind, shape.qk_dim)


def product_format(precision: str, dtype: str) -> str:
    """The name that `_FORMATS` has for a dense product of *precision* in the arithmetic *dtype*."""
    own = {("fp8_static", "fp8"), ("fp8_block", "fp8"), ("mxfp4", "fp4")}
    return precision if (precision, dtype) in own else dtype


def expert_format(precision: str, dtype: str) -> ExpertFormat:
    """The format in which experts of *precision* run in the arithmetic *dtype*, with the bytes of their own weights."""
    name = _EXPERTS_AS.get((precision, dtype), precision)
    if name not in EXPERT_FORMATS or EXPERT_FORMATS[name].dtype != dtype:
        name = dtype if dtype in EXPERT_FORMATS else "nvfp4"
    return EXPERT_FORMATS[name]._replace(weight_bytes=number_format(precision).weight_bytes)


def _expert_variants(
    profile: Profile, sources: Sequence[str], fmt: ExpertFormat, hidden: int, topk: int, count: int, gated: bool = True
) -> tuple[str, ...]:
    blackwell = "fp4" in profile.datasheet.peak_flops_per_s
    return fmt.variants(sources, layer=(hidden, topk, count), gated=gated, blackwell=blackwell)


def _layer_variants(
    profile: Profile, sources: Sequence[str], fmt: ExpertFormat, experts: ExpertMlp, backend: str | None = None
) -> tuple[str, ...]:
    """*backend*: the parameter set of one that was asked for, which goes before."""
    shape = experts.hidden, experts.per_token, experts.n_experts
    asked = [] if backend is None else [f"{backend}/{source}" for source in sources]
    return (*asked, *_expert_variants(profile, sources, fmt, *shape, gated=experts.gated))


def _variants(sources: Sequence[str], fmt: str) -> list[str]:
    return [f"{name}/{source}" for name in _FORMATS.get(fmt, ("bf16",)) for source in sources]


def gemm_seconds(
    profile: Profile, sources: Sequence[str], m: Any, n: Any, k: Any, *, dtype: str, weight_bytes: float, fmt: str = ""
) -> Any:
    """C[m, n] = A[m, k] B[k, n] with weights from memory; weight-only formats: dtype bf16 and their bytes.

    `fmt` is the key of `_FORMATS` where it differs from `dtype`.
    """
    wanted, narrow = _variants(sources, fmt or dtype), WIDTH.get(dtype, 2.0)
    params = profile.get("gemm", wanted)
    kernel = profile.kernel("gemm", wanted)
    # Serving software's tables of narrow operands have the quantisation pass inside, and tiles of their own.
    fitted, _, source = ("", "", "") if kernel is None else kernel.variant.partition("/")
    library = "search" if source in _CALIBRATED else library_of(fitted, source, profile.datasheet.name)
    shape = {
        "m": m,
        "n": n,
        "k": k,
        "dtype": dtype,
        "weight_bytes": weight_bytes,
        "activation_bytes": narrow,
        "library": library,
        "quantise_activations": narrow < 2.0,
    }
    seconds = GEMM.seconds(params, profile.datasheet, shape)
    passes = _fused_passes(profile, fmt, kernel)
    if not passes:
        return seconds
    return np.maximum(seconds - _passes_s(profile, passes, m, k), _least_product_s(profile, sources, m, n, k))


def _fused_passes(profile: Profile, fmt: str, kernel: Kernel | None) -> list[tuple[str, Any]]:
    """The passes in a fitted product's time that a checkpoint with static scales does not run, each with its parameters.

    The kernel before writes 8 bits then: the norm, attention, the activation (from knowledge of the modules, not measured).
    """
    fitted, _, source = ("", "", "") if kernel is None else kernel.variant.partition("/")
    passes = kernels_of(source).passes_with_scales if (fmt, fitted) == ("fp8_static", "fp8") else ()
    found = [(op, profile.find("elementwise", (f"{op}/{source}",))) for op in passes]
    return [(op, params) for op, params in found if params is not None]


def _passes_s(profile: Profile, passes: Sequence[tuple[str, Any]], m: Any, k: Any) -> Any:
    """Seconds of *passes* over m x k activations of 16 bits."""
    shapes = [(params, {"op": op, "rows": m, "width": k, "bytes_per_number": 2.0}) for op, params in passes]
    return sum(ELEMENTWISE.seconds(params, profile.datasheet, shape) for params, shape in shapes)


def _least_product_s(profile: Profile, sources: Sequence[str], m: Any, n: Any, k: Any) -> Any:
    """Half of what the product of 16-bit operands takes: arithmetic and weights of 8 bits are no faster than that."""
    return 0.5 * gemm_seconds(profile, sources, m, n, k, dtype="bf16", weight_bytes=2.0)


@functools.lru_cache(maxsize=4096)
def _gemm_table(
    profile: Profile, sources: tuple[str, ...], n: int, k: int, fmt: str, dtype: str, weight_bytes: float
) -> Table:
    nodes = gemm_nodes()
    seconds = gemm_seconds(profile, sources, nodes, n, k, dtype=dtype, weight_bytes=weight_bytes, fmt=fmt)
    start_s = profile.get("gemm", _variants(sources, fmt)).launch_s
    start_s -= sum(
        params.launch_s for _, params in _fused_passes(profile, fmt, profile.kernel("gemm", _variants(sources, fmt)))
    )
    return nodes, np.maximum.accumulate(np.asarray(seconds, float)), start_s


@functools.lru_cache(maxsize=1024)
def _moe_table(
    profile: Profile, sources: tuple[str, ...], experts: ExpertMlp, dtype: str, backend: str | None = None
) -> Table:
    nodes = moe_nodes()
    fmt = expert_format(experts.precision, dtype)
    if backend is not None:
        fmt = EXPERT_FORMATS[backend.partition("-")[0]]._replace(weight_bytes=fmt.weight_bytes)
    params = profile.get("moe", _layer_variants(profile, sources, fmt, experts, backend))
    shape = {
        "tokens": nodes,
        **fmt.options,
        "hidden_size": experts.hidden,
        "inter_size": experts.ffn,
        "topk": experts.per_token,
        "experts": experts.n_experts + experts.redundant,
        "ep": experts.expert,
        "gated": experts.gated,
        "distribution": _ROUTING,
        "by": experts.load,
    }
    seconds = MOE.seconds(params, profile.datasheet, shape)
    return nodes, np.maximum.accumulate(np.asarray(seconds, float)), params.launch_s
