"""Stacks on AMD's GPUs: another stack's scheduler and settings over AITER's kernels."""

from hwmodels.stacks.description import Check, Stack


def on_amd(like: str, title: str, *, place: int) -> Stack:
    """The stack *like*, which people call *title*, on AMD's GPUs."""
    return Stack(
        name=f"{like}-rocm",
        title=f"{title} on AMD's GPUs",
        place=place,
        like=like,
        vendors=("AMD",),
        kernels_modelled="products and experts of AITER, all-reduces of RCCL; attention and what runs between products are lent by "
        "NVIDIA's GPUs ([which, by device](hardware.md#amd-tpu-v7-trainium3-and-others))",
        kernels_from="tables of ROCm/aiter at e4048607 and of RCCL, fitted on 2026-11-23",
        checks=(
            Check(
                what="kernels",
                release="ROCm/aiter at e4048607",
                against="shapes of its tables that the fits did not see ([errors](validation/kernels.md#amd-tpu-v7-and-trainium3))",
                on="2026-11-23",
            ),
        ),
        left_out=f"No run of {title} on AMD's GPUs was at hand: its host work, memory and graphs there have been compared with "
        "nothing.",
    )
