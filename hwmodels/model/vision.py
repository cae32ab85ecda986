"""The encoder of images ahead of a language model, and the patches and tokens that an image takes in it.

Sizes follow the image processors of transformers 5.23: Qwen2-VL and its successors scale an image to whole patches between a
least and a most number of pixels (`smart_resize`), Gemma 3 to one size, Llama 4 and InternVL cut it into tiles and add one of
the whole, Pixtral scales it down to a longest side. Numbers that a config.json does not hold are the published processors'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hwmodels.model.fields import Config
from hwmodels.model.tower import Encoded, Tower, family_of

Sizing = Literal["scaled", "fixed", "llama4_tiles", "internvl_tiles", "longest_side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(Tower):
    """An encoder of images: a vision transformer, and the projection of its patches to the language model."""

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a side that become one embedding."""
    sizing: Sizing
    class_tokens: int = 0
    """Tokens beside the patches of a sequence."""
    least_pixels: int = 0
    most_pixels: int = 0
    """Patches and tokens of an image that is scaled."""
    side: int = 0
    """Pixels of a tile's side, of the one size, or of the longest side."""
    most_tiles: int = 0

    def image(self, width: int, height: int) -> Encoded:
        """Patches and tokens of an image of so many pixels; ValueError for one that the processor refuses."""
        if width < 1 or height < 1:
            raise ValueError(f"an image has at least 1 pixel a side; got {width} x {height}")
        return _SIZINGS[self.sizing](self, width, height)


def _scaled(v: Vision, width: int, height: int) -> Encoded:
    unit = v.patch * v.merge
    if max(width, height) / min(width, height) > 200:
        raise ValueError(f"an image is at most 200 times as long as wide; got {width} x {height}")
    # An image with a side that rounds to 0 is scaled up, as one of too few pixels is.
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit * unit > v.most_pixels:
        shrink = math.sqrt(height * width / v.most_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif rows * columns * unit * unit < v.least_pixels:
        grow = math.sqrt(v.least_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    embeddings = rows * columns
    # One token before and one after.
    return Encoded(1, embeddings * v.merge**2, embeddings, embeddings + 2)


def _fixed(v: Vision, width: int, height: int) -> Encoded:
    patches = (v.side // v.patch) ** 2
    embeddings = patches // v.merge**2
    # Gemma 3: a mark and an empty line before, and the same after (transformers, processing_gemma3.py, `full_image_sequence`).
    return Encoded(1, patches + v.class_tokens, embeddings, embeddings + 4)


def _of_tiles(v: Vision, tiles: int, marks: int) -> Encoded:
    patches = (v.side // v.patch) ** 2
    embeddings = tiles * (patches // v.merge**2)
    return Encoded(tiles, patches + v.class_tokens, embeddings, embeddings + marks)


def _llama4_tiles(v: Vision, width: int, height: int) -> Encoded:
    grids = [(r, n // r) for n in range(1, v.most_tiles + 1) for r in range(1, n + 1) if n % r == 0]
    scales = {grid: min(grid[0] * v.side / height, grid[1] * v.side / width) for grid in grids}
    growing = [scale for scale in scales.values() if scale >= 1.0]
    scale = min(growing) if growing else max(scales.values())
    rows, columns = min((grid for grid in grids if scales[grid] == scale), key=lambda grid: grid[0] * grid[1])
    tiles = rows * columns
    if tiles == 1:
        return _of_tiles(v, 1, 3)
    # A separator behind each tile, and the whole image as one more.
    return _of_tiles(v, tiles + 1, tiles + 3)


def _internvl_tiles(v: Vision, width: int, height: int) -> Encoded:
    grids = sorted(
        ((c, n // c) for n in range(1, v.most_tiles + 1) for c in range(1, n + 1) if n % c == 0),
        key=lambda grid: grid[0] * grid[1],
    )
    best, least = (1, 1), math.inf
    for columns, rows in grids:
        off = abs(width / height - columns / rows)
        if off < least or (off == least and width * height > 0.5 * v.side**2 * columns * rows):
            best, least = (columns, rows), off
    tiles = best[0] * best[1]
    return _of_tiles(v, tiles + (tiles > 1), 2)


def _longest_side(v: Vision, width: int, height: int) -> Encoded:
    ratio = max(width, height) / v.side
    if ratio > 1.0:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    unit = v.patch * v.merge
    columns, rows = (width - 1) // unit + 1, (height - 1) // unit + 1
    # A token behind each row.
    return Encoded(1, rows * columns * v.merge**2, rows * columns, rows * columns + rows)


_SIZINGS: Final[Mapping[Sizing, Callable[[Vision, int, int], Encoded]]] = {
    "scaled": _scaled,
    "fixed": _fixed,
    "llama4_tiles": _llama4_tiles,
    "internvl_tiles": _internvl_tiles,
    "longest_side": _longest_side,
}


def vision_of(config: Mapping[str, Any], *, text_hidden: int, where: str) -> Vision | None:
    """The encoder that a config.json describes; None where it has none, or one of a family that is not modelled."""
    found = family_of(_FAMILIES, config, "vision_config", where)
    if found is None:
        return None
    family, given = found
    return family(given, config, text_hidden) if given.data.keys() - {"model_type"} else None


def _qwen2_5(c: Config, _: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, merge = c.integer("hidden_size"), c.integer("depth"), c.integer("spatial_merge_size")
    patch, merged, out = c.integer("patch_size"), hidden * merge**2, c.integer("out_hidden_size", text_hidden)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_heads"), patch=patch, merge=merge,
        out=out, sizing="scaled", gated=True, stem=((1, 3 * c.integer("temporal_patch_size", 2) * patch**2, hidden),),
        projection=((merged, merged), (merged, out)), full_layers=len(c.listed("fullatt_block_indexes", int) or range(layers)),
        window=(c.integer("window_size", 112) // patch) ** 2, least_pixels=56 * 56, most_pixels=14 * 14 * 4 * 16384,
    )  # fmt: skip


def _qwen3(c: Config, _: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, merge = c.integer("hidden_size"), c.integer("depth"), c.integer("spatial_merge_size")
    patch, merged, out = c.integer("patch_size"), hidden * merge**2, c.integer("out_hidden_size", text_hidden)
    # Three layers on the way have projections of their own, whose vectors are added in the first layers of the language model.
    projections = 1 + len(c.listed("deepstack_visual_indexes", int) or ())
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_heads"), patch=patch, merge=merge,
        out=out * projections, sizing="scaled", stem=((1, 3 * c.integer("temporal_patch_size", 2) * patch**2, hidden),),
        projection=((merged, merged), (merged, out)) * projections, full_layers=layers, least_pixels=256 * 256,
        most_pixels=4096 * 4096,
    )  # fmt: skip


def _gemma3(c: Config, config: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("patch_size")
    side, tokens = c.integer("image_size"), Config(config, c.where).integer("mm_tokens_per_image", 256)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_attention_heads"), patch=patch,
        merge=side // patch // math.isqrt(tokens), out=text_hidden, sizing="fixed", stem=((1, 3 * patch**2, hidden),),
        projection=((hidden, text_hidden),), full_layers=layers, side=side,
    )  # fmt: skip


def _llama4(c: Config, _: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("patch_size")
    shrink = c.data.get("pixel_shuffle_ratio", 0.5)
    middle, out = c.integer("projector_input_dim", 4096), c.integer("projector_output_dim", 4096)
    merge = round(1 / shrink)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_attention_heads"), patch=patch,
        merge=merge, out=text_hidden, sizing="llama4_tiles", stem=((1, 3 * patch**2, hidden),),
        projection=((hidden * merge**2, middle), (middle, out), (out, text_hidden)), class_tokens=1, full_layers=layers,
        side=c.integer("image_size"), most_tiles=16,
    )  # fmt: skip


def _internvl(c: Config, config: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("patch_size")
    merge, outer = round(1 / float(config.get("downsample_ratio") or 0.5)), Config(config, c.where)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_attention_heads"), patch=patch,
        merge=merge, out=text_hidden, sizing="internvl_tiles", stem=((1, 3 * patch**2, hidden),),
        projection=((hidden * merge**2, text_hidden), (text_hidden, text_hidden)), class_tokens=1, full_layers=layers,
        side=c.integer("image_size"), most_tiles=outer.integer("max_dynamic_patch", 12),
    )  # fmt: skip


def _pixtral(c: Config, config: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size", 1024), c.integer("num_hidden_layers", 24), c.integer("patch_size")
    merge = Config(config, c.where).integer("spatial_merge_size", 1)
    merging = ((hidden * merge**2, hidden),) if merge > 1 else ()
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size", 4096), heads=c.integer("num_attention_heads", 16),
        patch=patch, merge=merge, out=text_hidden, sizing="longest_side", gated=True, stem=((1, 3 * patch**2, hidden),),
        projection=(*merging, (hidden, text_hidden), (text_hidden, text_hidden)), full_layers=layers,
        side=c.integer("image_size"),
    )  # fmt: skip


_FAMILIES: Final[Mapping[str, Callable[[Config, Mapping[str, Any], int], Vision]]] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_omni_thinker"), _qwen2_5),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker"), _qwen3),
    "gemma3": _gemma3,
    "llama4": _llama4,
    "internvl_chat": _internvl,
    **dict.fromkeys(("mistral3", "llava"), _pixtral),
}
"""Families of multimodal models by the model_type of their config.json."""
