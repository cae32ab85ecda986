"""Speech in a scenario: its tokens, what encodes it and where, and what is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwmodels.model import load_model
from sim.errors import ScenarioError
from sim.run import simulate
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of
from tests.scenario.media import ENGINE, POOL, TEN_SECONDS
from tests.scenario.media import with_speech as scenario


def test_speech_takes_25_tokens_a_second_and_is_encoded_in_the_engines_steps() -> None:
    result = simulate(build(scenario({**ENGINE, "token_s": 1e-4})))
    requests = result.columns.requests
    assert requests["prompt_tokens"].tolist() == [100 + 250 + 2] * 12
    assert requests["encoded_images"].tolist() == [1] * 12
    assert (requests["encode_ns"] % 25_000_000 == 0).all()


def test_clips_of_a_trace_are_in_its_prompts_behind_its_images_and_equal_ones_are_encoded_once(tmp_path: Path) -> None:
    (tmp_path / "speech.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,images,audio_s\n0,1400,5,1024x768#3,10#3\n10,300,5,,10#3\n20,260,5,,10\n"
    )
    built = resolve(scenario(ENGINE, folder=tmp_path, workload={"trace": "speech.csv"}))
    (machine,) = built.experiment.machines
    images = machine.hosted[0].images
    assert images is not None
    # 37 x 27 tokens of an image, and two that mark it.
    assert [(each.first, each.tokens) for each in images.of[0]] == [(0, 1001), (1001, 252)]
    requests = simulate(built.experiment).columns.requests
    assert requests["encoded_images"].tolist() == [2, 0, 1]
    assert requests["image_hits"].tolist() == [0, 1, 0]


def test_the_models_own_encoder_says_what_machines_that_encode_take_and_send() -> None:
    requests = simulate(build(scenario(POOL))).columns.requests
    took_ns = requests["encoded_ns"] - requests["encode_begin_ns"]
    assert (took_ns > 2_000_000).all()
    sent_ns = requests["encode_landed_ns"] - requests["encoded_ns"]
    assert sent_ns.min() == pytest.approx(250 * 3584 * 2 / 25, rel=1e-2)


def test_the_weights_of_both_encoders_are_taken_from_the_cache() -> None:
    blocks = [memory_plan_of(scenario(encode))[1].rank_blocks for encode in (POOL, ENGINE)]
    model = load_model("qwen2.5-omni-7b")
    assert model.vision is not None
    assert model.speech is not None
    lost_bytes = (blocks[0] - blocks[1]) * 16 * 2 * 2 * 4 * 128 * 28
    assert lost_bytes == pytest.approx(model.vision.weight_bytes + model.speech.weight_bytes, rel=0.01)


def test_drawn_speech_changes_nothing_else_that_is_drawn() -> None:
    audio = {"milliseconds": {"distribution": "lognormal", "mean": 9000, "median": 6000}}
    without, spoken = (build(scenario(*each)).workload.sent_ns for each in ((None, None), (ENGINE, audio)))
    assert np.array_equal(without, spoken)


def test_a_clip_of_no_length_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(ScenarioError, match=r"workload\.audio\.milliseconds is at least 1; the distribution gives 0"):
        build(scenario(ENGINE, {"milliseconds": {"distribution": "uniform", "min_tokens": 0, "max_tokens": 1}}))


@pytest.mark.parametrize("encode", [ENGINE, POOL])
def test_a_note_says_how_many_clips_are_cut_to_what_the_model_hears(encode: Any) -> None:
    def cut(seconds: int, **settings: Any) -> list[str]:
        notes = resolve(scenario(encode, {"milliseconds": 1000 * seconds}, **settings)).manifest["notes"]
        return [each for each in notes if "cut" in each]

    (note,) = cut(400)
    assert note.startswith("12 of 12 clips of speech are longer than the 300 s that qwen2.5-omni-7b hears of one")
    assert not cut(300)
    (note,) = cut(31, model="qwen2-audio-7b")
    assert "longer than the 30 s that qwen2-audio-7b hears" in note


def test_popularity_without_a_number_of_clips_is_refused() -> None:
    with pytest.raises(ScenarioError, match="give distinct, their number"):
        scenario(ENGINE, {**TEN_SECONDS, "zipf": 1.0})


def test_an_encoder_decoder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    whisper = {"model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280, "vocab_size": 51_866}
    (tmp_path / "config.json").write_text(json.dumps(whisper))
    with pytest.raises(
        ScenarioError, match="an encoder-decoder with cross-attention is not modelled; choose another model"
    ):
        build(scenario(ENGINE, model=str(tmp_path / "config.json")))
