"""Encoders of images: what a config.json says of them, the tokens that images take, and the time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.encoder_cost import EncoderCost
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import load_model
from hwmodels.model.config import spec_from_config
from hwmodels.model.tower import Encoded, Tower
from hwmodels.model.vision import Vision, vision_of

QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "vision_config": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 16, "spatial_merge_size": 2,
    },
}  # fmt: skip
INTERNVL: dict[str, Any] = {
    "model_type": "internvl_chat", "downsample_ratio": 0.5, "max_dynamic_patch": 12,
    "vision_config": {
        "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "num_attention_heads": 16, "patch_size": 14,
        "image_size": 448,
    },
}  # fmt: skip
PIXTRAL: dict[str, Any] = {
    "model_type": "llava",
    "vision_config": {
        "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "num_attention_heads": 16, "patch_size": 16,
        "image_size": 1024,
    },
}  # fmt: skip


def of(config: dict[str, Any]) -> Vision:
    found = vision_of(config, text_hidden=3584, where="config.json")
    assert found is not None
    return found


def shipped(name: str) -> Vision:
    found = load_model(name).vision
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("vision", "size", "expected"),
    [
        # `smart_resize` of the two processors: multiples of 28 and 32 pixels, within a least and a most area.
        (of(QWEN2_5), (1024, 768), Encoded(1, 37 * 27 * 4, 37 * 27, 37 * 27 + 2)),
        (of(QWEN2_5), (20, 30), Encoded(1, 3 * 2 * 4, 6, 8)),
        (shipped("qwen3-vl-8b"), (1024, 768), Encoded(1, 3072, 768, 770)),
        (shipped("qwen3-vl-8b"), (100, 50), Encoded(1, 12 * 6 * 4, 72, 74)),
        (shipped("qwen3-vl-8b"), (8192, 4096), Encoded(1, 181 * 90 * 4, 181 * 90, 181 * 90 + 2)),
        (shipped("gemma-3-12b"), (1024, 768), Encoded(1, 4096, 256, 260)),
        # Grids of tiles: the smallest that the image need not be shrunk for.
        (shipped("llama-4-scout"), (336, 336), Encoded(1, 577, 144, 147)),
        (shipped("llama-4-scout"), (600, 300), Encoded(3, 577, 432, 437)),
        (of(INTERNVL), (448, 448), Encoded(1, 1025, 256, 258)),
        (of(INTERNVL), (1344, 896), Encoded(7, 1025, 7 * 256, 7 * 256 + 2)),
        (of(PIXTRAL), (512, 256), Encoded(1, 512, 512, 512 + 16)),
        (of(PIXTRAL), (2048, 1024), Encoded(1, 64 * 32, 64 * 32, 64 * 32 + 32)),
    ],
)  # fmt: skip
def test_an_image_takes_the_tokens_that_the_familys_processor_gives_it(
    vision: Vision, size: tuple[int, int], expected: Encoded
) -> None:
    assert vision.image(*size) == expected


@pytest.mark.parametrize(
    ("vision", "millions"),
    [(of(QWEN2_5), 676), (shipped("gemma-3-4b"), 417), (of(INTERNVL), 304 + 28), (of(PIXTRAL), 403 + 16)],
)  # fmt: skip
def test_parameters_are_those_of_the_published_encoders(vision: Vision, millions: int) -> None:
    assert vision.params == pytest.approx(millions * 1e6, rel=0.03)


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of units, as the processor works them out in pixels."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        beta = math.sqrt(height * width / most)
        tall = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif tall * wide < least:
        beta = math.sqrt(least / (height * width))
        tall, wide = math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return tall // factor, wide // factor


@given(st.integers(1, 20_000), st.integers(1, 20_000))
@example(10, 1990)
@example(1990, 10)
@example(1, 200)
def test_images_of_any_size_are_scaled_as_the_processor_scales_them(width: int, height: int) -> None:
    assume(max(width, height) <= 200 * min(width, height))
    for vision in (of(QWEN2_5), shipped("qwen3-vl-8b")):
        unit = vision.patch * vision.merge
        rows, columns = smart_resize(height, width, unit, vision.least_pixels, vision.most_pixels)
        assert vision.image(width, height).embeddings == rows * columns


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({}, []),
        (QWEN3_VL, ["Its encoder of images counts where encode is given."]),
        (
            {**QWEN3_VL, "audio_config": {"d_model": 8}},
            [
                "Its encoder of images counts where encode is given.",
                "Its encoder of speech is not modelled and left out.",
            ],
        ),
        (
            {"model_type": "new_vl", "vision_config": {"depth": 3}},
            ["Its encoder of images is not modelled and left out."],
        ),
        (
            {"model_type": "new_vl"},
            ["The text model alone: the encoders of its other inputs are not modelled and left out."],
        ),
    ],
)
def test_a_note_says_which_encoders_a_model_has_and_nothing_of_one_that_reads_text_alone(
    stated: dict[str, Any], said: list[str]
) -> None:
    text = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "torch_dtype": "bfloat16",
    }  # fmt: skip
    config = {**stated, "text_config": text} if stated else text
    spec = spec_from_config(config, name="made-up", where="config.json")
    assert [note for note in spec.notes if "ncoder" in note] == said


def test_a_model_without_an_encoder_has_none() -> None:
    assert load_model("qwen3-8b").vision is None
    assert vision_of({"model_type": "qwen3_vl", "vision_config": None}, text_hidden=1, where="config.json") is None
    with pytest.raises(ValueError, match="vision_config: hidden_size"):
        vision_of({"model_type": "qwen3_vl", "vision_config": {"depth": 3}}, text_hidden=1, where="config.json")
    with pytest.raises(ValueError, match="at most 200 times as long"):
        shipped("qwen3-vl-8b").image(10, 9000)


def cost(vision: Tower, device: str = "h100-sxm", *, tensor: int = 1, launched: bool = True) -> EncoderCost:
    found = deploy(model="qwen3-vl-8b", hardware=device, cost=Calibrated.for_stack("vllm")).cost
    assert isinstance(found, LayerwiseCost)
    return EncoderCost(vision, found.kernels, tensor=tensor, launched=launched)


def test_more_and_larger_images_take_longer_and_more_devices_less() -> None:
    vision = shipped("qwen3-vl-8b")
    small, large = vision.image(640, 480), vision.image(1920, 1080)
    one = cost(vision, launched=False)
    assert one.seconds([]) == 0
    assert one.seconds([small]) < one.seconds([small, small]) < one.seconds([large]) < 0.05
    assert cost(vision, tensor=2, launched=False).seconds([large]) < 0.7 * one.seconds([large])
    assert cost(vision, "b200", launched=False).seconds([large]) < one.seconds([large])
    assert cost(vision).seconds([small]) > one.seconds([small])
    with pytest.raises(ValueError, match="16 heads cannot be shared by 3"):
        cost(vision, tensor=3)


def test_windows_of_an_encoder_save_most_of_its_attention() -> None:
    windows = of(QWEN2_5)
    everywhere = replace(windows, full_layers=32, window=0)
    image = windows.image(2048, 2048)
    assert cost(windows).seconds([image]) < 0.6 * cost(everywhere).seconds([image])
