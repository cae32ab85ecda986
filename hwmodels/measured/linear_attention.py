"""Linear attention: the convolution and the update of a state, of prompts and decodes, each kernel a part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hwmodels.kernels.families import LINEAR_DECODE, LINEAR_PREFILL
from hwmodels.kernels.linear_attention import LinearParams
from hwmodels.kernels.parameters import Datasheet, bounds
from hwmodels.measured.files import Measurement
from hwmodels.measured.part import Columns, Part, Shape, pick
from hwmodels.stacks import default_stack, kernels_of

_COLUMNS = {
    "batch": "batch_size", "query": "seq_len", "key_heads": "num_k_heads", "key_dim": "head_k_dim",
    "value_heads": "num_v_heads", "value_dim": "head_v_dim", "conv_width": "d_conv",
}  # fmt: skip
_SHAPE = ("key_heads", "key_dim", "value_heads", "value_dim", "conv_width")


def _starts(kernel: str, prompts: bool) -> tuple[LinearParams, ...]:
    if kernel == "conv" and not prompts:
        return LinearParams(launch_s=2e-6, block_s=1e-7, step_s=0.0), LinearParams(
            launch_s=3e-6, block_s=1e-8, step_s=0.0, value_share=0.1, bandwidth_efficiency=0.6, cache_gain=1.0
        )
    if kernel == "conv":
        usual = LinearParams(launch_s=2e-6, block_s=1e-7, step_s=1.5e-7)
        return usual, LinearParams(launch_s=4e-6, sequence_s=2e-6, block_s=1e-7, step_s=1e-8, value_share=0.5)
    if prompts:
        usual = LinearParams(launch_s=1e-5, tile=1.0, step_s=3e-6, whole_waves=0.9)
        return usual, LinearParams(launch_s=2e-5, tile=2.0, step_s=1e-6, row_passes=6.0, overlap_loss=3.0)
    return LinearParams(tile=4.0, block_s=5e-7, step_s=1e-7), LinearParams(tile=8.0, block_s=1e-6, step_s=1e-8)


def linear(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names, phases = m.columns["kernel"], m.columns["phase"]
    for kernel, of_kernel in (("conv", "causal_conv1d"), ("delta", "delta_rule")):
        for prompts, form in ((True, LINEAR_PREFILL), (False, LINEAR_DECODE)):
            mask = (np.char.find(names, of_kernel) >= 0) & (phases == ("prefill" if prompts else "decode"))
            rows, columns = pick(m, mask, _COLUMNS)
            if not len(rows):
                continue

            if kernel == "conv" and prompts and kernels_of(m.source).convolved_keys_alone:
                columns |= {"key_heads": 0.5 * columns["key_heads"], "value_heads": 0.0 * columns["value_heads"]}

            def shape(c: Columns, kernel: str = kernel, prompts: bool = prompts) -> Shape:
                sums = {"rows": c["batch"] * c["query"], "chunks": c["batch"]} if prompts else {"seqs": c["batch"]}
                return {"kernel": kernel, "resident": True, **sums, **{name: c[name] for name in _SHAPE}}

            # One parameter set for two stacks with the same convolution and packed decode.
            shared = kernels_of(m.source).recurrent_from if kernel == "conv" or not prompts else ""
            source = shared or m.source
            several = len(np.unique(columns["value_heads"] / columns["key_heads"])) > 1
            # A decode is one token: blocks and steps are one; convolutions and decodes move their rows once.
            fixed = {
                "short_share",
                *(("sequence_s", "value_share") if kernel == "delta" else ("row_passes",)),
                *(() if prompts else ("sequence_s", "row_passes", "step_s", "tile", "whole_waves")),
                *(() if several else ("value_share",)),
            }
            shapes = len(np.unique(np.stack([columns[name] for name in _SHAPE]), axis=1).T)
            yield Part(
                form=form, sheet=device, variants=(f"{kernel}/{source}", f"{kernel}/{default_stack().name}"), rows=rows,
                columns=columns, shape=shape, groups=_SHAPE if shapes > 4 else (*_SHAPE, "batch"),
                starts=_starts(kernel, prompts), fixed=tuple(sorted(fixed)),
            )  # fmt: skip


_MAMBA = {
    "batch": "batch_size", "query": "seq_len", "key_heads": "n_groups", "key_dim": "d_state", "value_heads": "num_heads",
    "value_dim": "head_dim", "conv_width": "d_conv",
}  # fmt: skip
_MAMBA_STARTS = {
    ("mamba-conv", True): LinearParams(
        launch_s=5e-6, block_s=5e-8, step_s=5e-8, short_share=0.3, whole_waves=0.0, tile=1.0
    ),
    ("mamba-conv", False): LinearParams(launch_s=3e-6, block_s=1e-8, step_s=0.0, whole_waves=0.0, tile=1.0),
    ("mamba-scan", True): LinearParams(launch_s=1e-5, tile=1.0, step_s=9e-6, short_share=0.3, row_passes=4.0),
}
_MAMBA_FREE = {
    ("mamba-conv", True): ("launch_s", "block_s", "step_s", "short_share", "bandwidth_efficiency", "overlap_loss"),
    ("mamba-conv", False): ("launch_s", "block_s", "bandwidth_efficiency", "cache_gain", "overlap_loss"),
    ("mamba-scan", True): (
        *("launch_s", "block_s", "step_s", "short_share", "tile", "whole_waves"),
        *("bandwidth_efficiency", "overlap_loss", "row_passes"),
    ),
}
"""Terms that the tables determine: their states and inputs are no part of what stays in L2 but in decodes."""


def mamba2(m: Measurement, device: Datasheet) -> Iterator[Part]:
    names = m.columns["kernel"]
    for kernel, of_kernel, prompts in (
        ("mamba-conv", "causal_conv1d_fn", True),
        ("mamba-conv", "causal_conv1d_update", False),
        ("mamba-scan", "mamba_chunk_scan_combined", True),
    ):
        rows, columns = pick(m, names == of_kernel, _MAMBA)
        if not len(rows):
            continue

        def shape(c: Columns, kernel: str = kernel, prompts: bool = prompts) -> Shape:
            sums = {"rows": c["batch"] * c["query"], "chunks": c["batch"]} if prompts else {"seqs": c["batch"]}
            return {"kernel": kernel, "resident": True, **sums, **{name: c[name] for name in _SHAPE}}

        start, free = _MAMBA_STARTS[kernel, prompts], _MAMBA_FREE[kernel, prompts]
        yield Part(
            form=LINEAR_PREFILL if prompts else LINEAR_DECODE, sheet=device, variants=(f"{kernel}/{m.source}",), rows=rows,
            columns=columns, shape=shape, groups=("value_heads", "key_dim", "batch"), starts=(start,),
            fixed=tuple(sorted(set(bounds(LinearParams)).difference(free))),
        )  # fmt: skip


_KDA_WIDTH, _KDA_TAPS = 128, 4
"""Numbers of a head and inputs of its convolution, which tables of Kimi delta attention leave out: Kimi Linear's and Kimi-K3's."""
_KDA_KERNELS = (
    ("kda-conv", "prefill", ("causal_conv1d_fn_qkv3",)),
    ("kda-conv", "decode", ("causal_conv1d_update",)),
    ("kda-conv", "verify", ("causal_conv1d_update",)),
    ("kda", "prefill", ("flashkda_fwd", "chunk_kda")),
    ("kda", "decode", ("fused_recurrent_kda_packed_decode",)),
    ("kda", "verify", ("fused_recurrent_kda", "fused_sigmoid_gating_delta_rule_update")),
)


def kda(m: Measurement, device: Datasheet) -> Iterator[Part]:
    """Convolution and update of prompts and decodes; kernels that join both are not modelled.

    Verification is predicted from the fit of decodes, as it is priced: a state is read once and written for each drafted token.
    """
    for kernel, phase, names in _KDA_KERNELS:
        prompts, verify = phase == "prefill", phase == "verify"
        of_kernel = [name for name in names if name not in kernels_of(m.source).timed_by_launches]
        rows, columns = pick(
            m,
            np.isin(m.columns["kernel"], of_kernel) & (m.columns["phase"] == phase),
            {"batch": "batch_size", "query": "seq_len", "heads": "num_heads"},
        )
        if not len(rows):
            continue

        def shape(c: Columns, kernel: str = kernel, prompts: bool = prompts, verify: bool = verify) -> Shape:
            decodes = 0.5 * (c["batch"] + c["batch"] * c["query"]) if verify else c["batch"]
            sums = {"rows": c["batch"] * c["query"], "chunks": c["batch"]} if prompts else {"seqs": decodes}
            widths = {"key_dim": _KDA_WIDTH, "value_dim": _KDA_WIDTH, "conv_width": _KDA_TAPS}
            return {
                "kernel": kernel,
                "resident": True,
                **sums,
                "key_heads": c["heads"],
                "value_heads": c["heads"],
                **widths,
            }

        conv = kernel == "kda-conv"
        fixed = {
            *(("row_passes",) if conv else ("sequence_s", "short_share")),
            "value_share",
            *(() if prompts else ("sequence_s", "row_passes", "step_s", "tile", "whole_waves", "short_share")),
        }
        fixed |= {"short_share"} if conv else set()
        yield Part(
            form=LINEAR_PREFILL if prompts else LINEAR_DECODE, sheet=device, variants=(f"{kernel}/{m.source}",), rows=rows,
            columns=columns, shape=shape, groups=() if verify else ("heads", "batch"),
            starts=_starts("conv" if conv else "delta", prompts),
            fixed=tuple(sorted(fixed)),
        )  # fmt: skip
