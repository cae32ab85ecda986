"""The encoder of images that a multimodal model has before its language model, and what becomes of an image there.

Sizes follow the image processors of transformers 5.23: Qwen2-VL and its successors scale an image to whole patches between a
least and a most number of pixels (`smart_resize`), Gemma 3 to one size, Llama 4 and InternVL cut it into tiles and add one of
the whole, Pixtral scales it down to a longest side. Numbers that a config.json does not hold are the published processors'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from hwmodels.model.fields import Config, object_of

Sizing = Literal["scaled", "fixed", "llama4_tiles", "internvl_tiles", "longest_side"]


class EncodedImage(NamedTuple):
    """An image as the encoder sees it, and as the prompt does."""

    sequences: int
    """Sequences of patches, each of which attends to itself alone: tiles, or the whole image."""
    patches: int
    """Patches of each."""
    embeddings: int
    """Vectors that come out, which take the place of tokens in the prompt."""
    prompt_tokens: int
    """Those, and the tokens that mark where an image, a tile or a row begins or ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """An encoder of images: a vision transformer, and the projection of its patches to the language model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a side that become one embedding."""
    out: int
    """Width of an embedding."""
    sizing: Sizing
    gated: bool = False
    patch_values: int
    """Numbers of a patch: colours, pixels, and frames of a video that share one."""
    projection: tuple[tuple[int, int], ...]
    """The products (k, n) for each embedding."""
    class_tokens: int = 0
    """Tokens beside the patches of a sequence."""
    full_layers: int
    """Layers in which all patches of a sequence see each other; in the others those of a window do."""
    window: int = 0
    """Patches of a window."""
    least_pixels: int = 0
    most_pixels: int = 0
    """Patches and tokens of an image that is scaled."""
    side: int = 0
    """Pixels of a tile's side, of the one size, or of the longest side."""
    most_tiles: int = 0

    @property
    def params(self) -> int:
        """Parameters of the matrices and of the embedding of patches."""
        layer = 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * layer + self.patch_values * self.hidden + sum(k * n for k, n in self.projection)

    @property
    def weight_bytes(self) -> float:
        """In 16 bits, in which checkpoints of narrower language models keep their encoder."""
        return 2.0 * self.params

    def image(self, width: int, height: int) -> EncodedImage:
        """Patches and tokens of an image of so many pixels; ValueError for one that the processor refuses."""
        if width < 1 or height < 1:
            raise ValueError(f"an image has at least 1 pixel a side; got {width} x {height}")
        return _SIZINGS[self.sizing](self, width, height)


def _scaled(v: Vision, width: int, height: int) -> EncodedImage:
    unit = v.patch * v.merge
    if max(width, height) / min(width, height) > 200:
        raise ValueError(f"an image is at most 200 times as long as wide; got {width} x {height}")
    rows, columns = max(1, round(height / unit)), max(1, round(width / unit))
    if rows * columns * unit * unit > v.most_pixels:
        shrink = math.sqrt(height * width / v.most_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif rows * columns * unit * unit < v.least_pixels:
        grow = math.sqrt(v.least_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    embeddings = rows * columns
    # One token before and one after.
    return EncodedImage(1, embeddings * v.merge**2, embeddings, embeddings + 2)


def _fixed(v: Vision, width: int, height: int) -> EncodedImage:
    patches = (v.side // v.patch) ** 2
    embeddings = patches // v.merge**2
    return EncodedImage(1, patches + v.class_tokens, embeddings, embeddings + 2)


def _of_tiles(v: Vision, tiles: int, marks: int) -> EncodedImage:
    patches = (v.side // v.patch) ** 2
    embeddings = tiles * (patches // v.merge**2)
    return EncodedImage(tiles, patches + v.class_tokens, embeddings, embeddings + marks)


def _llama4_tiles(v: Vision, width: int, height: int) -> EncodedImage:
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


def _internvl_tiles(v: Vision, width: int, height: int) -> EncodedImage:
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


def _longest_side(v: Vision, width: int, height: int) -> EncodedImage:
    ratio = max(width, height) / v.side
    if ratio > 1.0:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    unit = v.patch * v.merge
    columns, rows = (width - 1) // unit + 1, (height - 1) // unit + 1
    # A token behind each row.
    return EncodedImage(1, rows * columns * v.merge**2, rows * columns, rows * columns + rows)


_SIZINGS: Final[Mapping[Sizing, Callable[[Vision, int, int], EncodedImage]]] = {
    "scaled": _scaled,
    "fixed": _fixed,
    "llama4_tiles": _llama4_tiles,
    "internvl_tiles": _internvl_tiles,
    "longest_side": _longest_side,
}


def vision_of(config: Mapping[str, Any], *, text_hidden: int, where: str) -> Vision | None:
    """The encoder that a config.json describes; None where it has none, or one of a family that is not modelled."""
    given = object_of(config.get("vision_config"), f"{where}: vision_config")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None or not given:
        return None
    if not given.keys() - {"model_type"}:
        return None
    return family(Config(given, f"{where}: vision_config"), config, text_hidden)


def _qwen2_5(c: Config, _: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, merge = c.integer("hidden_size"), c.integer("depth"), c.integer("spatial_merge_size")
    patch, merged, out = c.integer("patch_size"), hidden * merge**2, c.integer("out_hidden_size", text_hidden)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_heads"), patch=patch, merge=merge,
        out=out, sizing="scaled", gated=True, patch_values=3 * c.integer("temporal_patch_size", 2) * patch**2,
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
        out=out * projections, sizing="scaled", patch_values=3 * c.integer("temporal_patch_size", 2) * patch**2,
        projection=((merged, merged), (merged, out)) * projections, full_layers=layers, least_pixels=256 * 256,
        most_pixels=4096 * 4096,
    )  # fmt: skip


def _gemma3(c: Config, config: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("patch_size")
    side, tokens = c.integer("image_size"), Config(config, c.where).integer("mm_tokens_per_image", 256)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_attention_heads"), patch=patch,
        merge=side // patch // math.isqrt(tokens), out=text_hidden, sizing="fixed", patch_values=3 * patch**2,
        projection=((hidden, text_hidden),), full_layers=layers, side=side,
    )  # fmt: skip


def _llama4(c: Config, _: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("patch_size")
    shrink = c.data.get("pixel_shuffle_ratio", 0.5)
    middle, out = c.integer("projector_input_dim", 4096), c.integer("projector_output_dim", 4096)
    merge = round(1 / shrink)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_attention_heads"), patch=patch,
        merge=merge, out=text_hidden, sizing="llama4_tiles", patch_values=3 * patch**2,
        projection=((hidden * merge**2, middle), (middle, out), (out, text_hidden)), class_tokens=1, full_layers=layers,
        side=c.integer("image_size"), most_tiles=16,
    )  # fmt: skip


def _internvl(c: Config, config: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.integer("patch_size")
    merge, outer = round(1 / float(config.get("downsample_ratio") or 0.5)), Config(config, c.where)
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size"), heads=c.integer("num_attention_heads"), patch=patch,
        merge=merge, out=text_hidden, sizing="internvl_tiles", patch_values=3 * patch**2,
        projection=((hidden * merge**2, text_hidden), (text_hidden, text_hidden)), class_tokens=1, full_layers=layers,
        side=c.integer("image_size"), most_tiles=outer.integer("max_dynamic_patch", 12),
    )  # fmt: skip


def _pixtral(c: Config, config: Mapping[str, Any], text_hidden: int) -> Vision:
    hidden, layers, patch = c.integer("hidden_size", 1024), c.integer("num_hidden_layers", 24), c.integer("patch_size")
    merge = Config(config, c.where).integer("spatial_merge_size", 1)
    merging = ((hidden * merge**2, hidden),) if merge > 1 else ()
    return Vision(
        layers=layers, hidden=hidden, ffn=c.integer("intermediate_size", 4096), heads=c.integer("num_attention_heads", 16),
        patch=patch, merge=merge, out=text_hidden, sizing="longest_side", gated=True, patch_values=3 * patch**2,
        projection=(*merging, (hidden, text_hidden), (text_hidden, text_hidden)), full_layers=layers,
        side=c.integer("image_size"),
    )  # fmt: skip


_FAMILIES: Final[Mapping[str, Callable[[Config, Mapping[str, Any], int], Vision]]] = {
    "qwen2_5_vl": _qwen2_5,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3),
    "gemma3": _gemma3,
    "llama4": _llama4,
    "internvl_chat": _internvl,
    **dict.fromkeys(("mistral3", "llava"), _pixtral),
}
"""Families of multimodal models by the model_type of their config.json."""
