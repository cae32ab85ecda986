"""Number formats: what a weight or a cached key costs in memory, and which arithmetic multiplies it."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One number format.

    `weight_bytes` is the memory of one weight with its share of the block scales; `math` lists the arithmetic
    that multiplies it, first choice first: the device must offer one of them.
    """

    name: str
    weight_bytes: float
    math: tuple[str, ...]
    element_bytes: float
    """Bytes of one activation or cached element in this format, without scales."""
    words: str = ""
    """The format as messages call it; empty: by its name."""

    def __str__(self) -> str:
        return self.words or self.name


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision(name="fp32", weight_bytes=4.0, math=("fp32",), element_bytes=4.0),
        Precision(name="bf16", weight_bytes=2.0, math=("bf16",), element_bytes=2.0),
        Precision(name="fp16", weight_bytes=2.0, math=("fp16", "bf16"), element_bytes=2.0),
        Precision(name="fp8", weight_bytes=1.0, math=("fp8",), element_bytes=1.0),
        # FP8 whose activations have one scale a tensor that the checkpoint states (ModelOpt's FP8), not found in the call.
        Precision(
            name="fp8_static", weight_bytes=1.0, math=("fp8",), element_bytes=1.0, words="fp8 with static scales"
        ),
        # DeepSeek-V3 report (arXiv 2412.19437), 3.3: one fp32 scale for each 128 x 128 block of weights.
        Precision(name="fp8_block", weight_bytes=1.0 + 4.0 / (128 * 128), math=("fp8",), element_bytes=1.0),
        Precision(name="int8", weight_bytes=1.0, math=("int8",), element_bytes=1.0),
        # AWQ and GPTQ with the usual group of 128: a 16-bit scale each; expanded to 16 bits to multiply.
        Precision(name="int4", weight_bytes=0.5 + 2.0 / 128, math=("bf16", "fp16"), element_bytes=0.5),
        # Kimi-K2 releases: int4 in groups of 32 with a 16-bit scale.
        Precision(name="int4_g32", weight_bytes=0.5 + 2.0 / 32, math=("bf16", "fp16"), element_bytes=0.5),
        # SGLang's W4AFP8 and ModelOpt's W4A8_AWQ: int4 in groups of 128, multiplied by 8-bit activations.
        Precision(name="int4_fp8", weight_bytes=0.5 + 2.0 / 128, math=("fp8",), element_bytes=0.5),
        # OCP Microscaling Formats v1.0: 4 bits and one 8-bit scale for 32 elements.
        Precision(name="mxfp4", weight_bytes=0.5 + 1.0 / 32, math=("bf16", "fp16"), element_bytes=0.5),
        # NVIDIA NVFP4: 4 bits and one fp8 scale for 16 elements; without fp4 arithmetic the weights are expanded.
        Precision(name="nvfp4", weight_bytes=0.5 + 1.0 / 16, math=("fp4", "bf16"), element_bytes=0.5),
        # The same weights where a checkpoint has 16-bit activations meet them (W4A16_NVFP4 of ModelOpt, NVFP4A16).
        Precision(name="nvfp4_a16", weight_bytes=0.5 + 1.0 / 16, math=("bf16", "fp16"), element_bytes=0.5),
    )
}


def precision(name: str) -> Precision:
    """The format called *name*; ValueError with the nearest valid names otherwise."""
    found = PRECISIONS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, PRECISIONS, n=2) or list(PRECISIONS)
        raise ValueError(f"{name!r} is not a precision; valid here: {', '.join(near)}")
    return found


def math_of(fmt: str, peaks: Collection[str], vendor: str) -> tuple[str, ...]:
    """The arithmetic that multiplies *fmt* on a device of *vendor* that has *peaks*, first choice first.

    NVIDIA's cores that know block-scaled formats take MXFP4 weights beside MXFP8 activations, at the fp8 rate; AITER brings the
    activations to MXFP4 as well. Others expand the weights.
    """
    if fmt == "mxfp4" and "fp4" in peaks and "fp8" in peaks:
        return ("fp4",) if vendor == "AMD" else ("fp8",)
    return precision(fmt).math
