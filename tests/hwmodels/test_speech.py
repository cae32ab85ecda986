"""Encoders of speech: what a config.json says of them, the tokens that clips take, and the time."""

from __future__ import annotations

from typing import Any

import pytest

from hwmodels.encoder_cost import EncoderCost
from hwmodels.model import load_model
from hwmodels.model.speech import Speech, speech_of
from hwmodels.model.tower import Encoded
from tests.hwmodels.test_vision import cost

VOXTRAL: dict[str, Any] = {
    "model_type": "voxtral",
    "audio_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20, "num_mel_bins": 128,
    },
}  # fmt: skip


def shipped(name: str) -> Speech:
    found = load_model(name).speech
    assert found is not None
    return found


def voxtral() -> Speech:
    found = speech_of(VOXTRAL, text_hidden=3072, where="config.json")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("speech", "seconds", "expected"),
    [
        # 25 tokens a second and two marks; every clip is padded to half a minute, and a longer one is cut.
        (shipped("qwen2-audio-7b"), 10.0, Encoded(1, 1500, 250, 252)),
        (shipped("qwen2-audio-7b"), 45.0, Encoded(1, 1500, 750, 752)),
        (shipped("qwen2.5-omni-7b"), 10.0, Encoded(1, 500, 250, 252)),
        (shipped("qwen2.5-omni-7b"), 9.995, Encoded(1, 500, 250, 252)),
        (shipped("qwen2.5-omni-7b"), 9.97, Encoded(1, 499, 249, 251)),
        (shipped("qwen2.5-omni-7b"), 600.0, Encoded(1, 15_000, 7500, 7502)),
        # Three halvings of each second: 50, 25, 13.
        (shipped("qwen3-omni-30b-a3b"), 10.0, Encoded(1, 130, 130, 132)),
        (shipped("qwen3-omni-30b-a3b"), 10.08, Encoded(1, 131, 131, 133)),
        (shipped("qwen3-omni-30b-a3b"), 10.09, Encoded(1, 132, 132, 134)),
        (voxtral(), 10.0, Encoded(1, 1500, 375, 376)),
        (voxtral(), 61.0, Encoded(3, 1500, 1125, 1126)),
    ],
)
def test_a_clip_takes_the_tokens_that_the_familys_processor_gives_it(
    speech: Speech, seconds: float, expected: Encoded
) -> None:
    assert speech.clip(round(seconds * 1000)) == expected


@pytest.mark.parametrize("name", ["qwen2-audio-7b", "qwen2.5-omni-7b", "qwen3-omni-30b-a3b"])
def test_parameters_are_those_of_whispers_large_encoder(name: str) -> None:
    """637 million, and the projection; Qwen3-Omni's convolutions are larger."""
    assert shipped(name).params == pytest.approx(637e6, rel=0.03)


def test_what_is_computed_of_a_position_ahead_of_the_layers_and_within_windows() -> None:
    """Whisper: two frames of 128 mel bins through 3-tap convolutions. Qwen3-Omni: eight frames x 128 bins, halved three times,
    behind 3 x 3 convolutions of 480 channels."""
    whisper = ((2, 384, 1280), (1, 3840, 1280))
    assert (shipped("qwen2-audio-7b").stem, shipped("qwen2-audio-7b").full_layers) == (whisper, 32)
    assert (shipped("qwen2.5-omni-7b").stem, shipped("qwen2.5-omni-7b").window) == (whisper, 100)
    omni = shipped("qwen3-omni-30b-a3b")
    assert omni.stem == ((4 * 64, 9, 480), (2 * 32, 4320, 480), (1 * 16, 4320, 480), (1, 480 * 16, 1280))
    assert (omni.window, omni.full_layers) == (104, 0)
    assert voxtral().projection == ((5120, 3072), (3072, 3072))


def test_a_model_that_hears_nothing_has_no_encoder_of_speech() -> None:
    assert load_model("qwen3-vl-8b").speech is None
    assert speech_of({"model_type": "gemma4", "audio_config": {"d_model": 8}}, text_hidden=1, where="here") is None
    with pytest.raises(ValueError, match="longer than 20 ms; got 20 ms"):
        shipped("qwen2-audio-7b").clip(20)
    assert shipped("qwen2-audio-7b").clip(21).embeddings == 1


def test_longer_speech_takes_longer_but_where_it_is_padded() -> None:
    def seconds_of(speech: Speech, seconds: float) -> float:
        priced: EncoderCost = cost(speech, launched=False)
        return priced.seconds([speech.clip(round(seconds * 1000))])

    windows, padded = shipped("qwen2.5-omni-7b"), shipped("qwen2-audio-7b")
    assert seconds_of(windows, 5) < seconds_of(windows, 30) < 0.5 * seconds_of(windows, 90)
    assert seconds_of(padded, 5) == pytest.approx(seconds_of(padded, 30), rel=0.01)
    # At half a minute windows of two seconds save attention alone.
    assert 0.7 * seconds_of(padded, 30) < seconds_of(windows, 30) < seconds_of(padded, 30)
    # Two passes of a model of 637 million parameters over 1,500 positions, at an H100's 989 Tflop/s, at the very least.
    assert 2 * 637e6 * 1500 / 989e12 < seconds_of(padded, 30) < 0.02
