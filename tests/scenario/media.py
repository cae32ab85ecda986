"""Scenarios of twelve requests with images or clips of speech, drawn or of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.scenario import Scenario

ENGINE = {"at": "engine"}
POOL = {"bandwidth_gb_per_s": 25.0}
IMAGES = {"width": 1024, "height": 768}
TEN_SECONDS = {"milliseconds": 10_000}


def with_images(encode: Any, images: Any = IMAGES, folder: Path = Path(), **settings: Any) -> Scenario:
    return _scenario("images", images, folder, {"model": "qwen3-vl-8b", "encode": encode, **settings})


def with_speech(encode: Any, audio: Any = TEN_SECONDS, folder: Path = Path(), **settings: Any) -> Scenario:
    return _scenario("audio", audio, folder, {"model": "qwen2.5-omni-7b", "encode": encode, **settings})


def _scenario(key: str, media: Any, folder: Path, settings: dict[str, Any]) -> Scenario:
    load = {
        "arrivals": {"process": "poisson", "rate_per_s": 5.0}, "prompt_tokens": 100, "output_tokens": 5, "requests": 12,
        **({} if media is None else {key: media}),
    }  # fmt: skip
    return Scenario.from_mapping({"scheduler": "vllm", "workload": load, **settings}, folder=folder)
