"""Images and speech alike: a run without any, and what is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.errors import ScenarioError
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from tests.engine.random_runs import assert_same
from tests.scenario.media import ENGINE, IMAGES, POOL, TEN_SECONDS, with_images, with_speech


@pytest.mark.parametrize(("scenario", "media"), [(with_images, IMAGES), (with_speech, TEN_SECONDS)])
@pytest.mark.parametrize(
    ("encode", "drawn"), [(ENGINE, False), (ENGINE, True), ({**ENGINE, "budget_tokens": 10}, True), (POOL, True)]
)
def test_without_media_a_run_is_the_one_without_encoders_to_the_nanosecond(
    scenario: Callable[..., Scenario], media: dict[str, Any], encode: Any, drawn: bool
) -> None:
    with_encoder = resolve(scenario(encode, {**media, "per_request": 0} if drawn else None))
    without = simulate(build(scenario(None, None)))
    assert_same(without.columns, simulate(with_encoder.experiment).columns)
    assert any("No request has images or speech" in note for note in with_encoder.manifest["notes"])


@pytest.mark.parametrize(
    ("scenario", "encode", "settings", "sentence"),
    [
        (with_images, None, {}, r"workload\.images: nothing encodes the images; give encode"),
        (with_speech, None, {}, r"workload\.audio: nothing encodes the audio; give encode"),
        (
            with_images,
            ENGINE,
            {"model": "qwen3-8b"},
            "qwen3-8b has no encoder of images that is modelled; choose a model",
        ),
        (
            with_speech,
            ENGINE,
            {"model": "qwen3-vl-8b"},
            "qwen3-vl-8b has no encoder of speech that is modelled; choose a model",
        ),
        (
            with_images,
            ENGINE,
            {"scheduler": "sarathi"},
            "encode: this scheduler does not know of images that are encoded in steps; take vllm",
        ),
        (
            with_images,
            ENGINE,
            {"model": "qwen3-vl-30b-a3b", "parallel": {"data": 2, "expert": 2}},
            "in steps of ranks, or of models",
        ),
        (
            with_images,
            {**POOL, "encoder_tokens": 5},
            {},
            "the workload has images or clips, which say what there is to encode",
        ),
        (with_images, {**POOL, "tensor": 3}, {}, "an encoder of 16 heads cannot be shared by 3 devices"),
        (with_speech, {**POOL, "tensor": 3}, {}, "an encoder of 20 heads cannot be shared by 3 devices"),
        (with_images, {**POOL, "budget_tokens": 3}, {}, "budget_tokens is of encoding in the steps of an engine"),
        (with_images, {**ENGINE, "replicas": 3}, {}, "replicas is of machines that only encode"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    scenario: Callable[..., Scenario], encode: Any, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ScenarioError, match=sentence):
        build(scenario(encode, **settings))
