"""Images in a scenario: their tokens, what encodes them and where, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwmodels.model import load_model
from sim.errors import ScenarioError
from sim.results import Result, fact_rows
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of
from tests.engine.random_runs import assert_same

IMAGES = {"width": 1024, "height": 768}
TRACE = """arrival_s,prompt_tokens,output_tokens,images
0.0,900,5,1024x768#1
10.0,100,5,
20.0,1700,5,1024x768#2 1024x768#1
"""


def scenario(encode: Any, images: Any = IMAGES, folder: Path = Path(), **settings: Any) -> Scenario:
    load = {
        "arrivals": {"process": "poisson", "rate_per_s": 5.0}, "prompt_tokens": 100, "output_tokens": 5, "requests": 12,
        **({} if images is None else {"images": images}),
    }  # fmt: skip
    return Scenario.from_mapping(
        {"model": "qwen3-vl-8b", "scheduler": "vllm", "workload": load, "encode": encode, **settings}, folder=folder
    )


ENGINE = {"at": "engine"}
POOL = {"bandwidth_gb_per_s": 25.0}


def test_drawn_images_come_on_top_of_the_prompt_and_are_encoded_in_the_engines_steps(tmp_path: Path) -> None:
    result = simulate(build(scenario({**ENGINE, "token_s": 1e-4})))
    requests = result.columns.requests
    assert requests["prompt_tokens"].tolist() == [870] * 12
    assert requests["encoded_images"].tolist() == [1] * 12
    # 768 embeddings, alone or with others that came together.
    assert (requests["encode_ns"] % 76_800_000 == 0).all()
    alone = simulate(build(scenario({**ENGINE, "token_s": 0})))
    later = np.median(requests["first_token_ns"] - alone.columns.requests["first_token_ns"])
    assert later >= 76_800_000
    assert result.summary["images"] == {
        "encoded": 12, "hits": 0, "hit_rate": 0.0, "encode_s": result.summary["images"]["encode_s"],
    }  # fmt: skip
    assert "12 encoded, 0 found encoded (0.0%), " in dict(fact_rows(result.summary))["Images"]
    assert Result.load(result.save(tmp_path / "out")).summary == result.summary


def test_a_manifest_states_settings_that_run_again() -> None:
    for encode in (ENGINE, POOL):
        found = resolve(scenario(encode))
        again = build(Scenario.from_mapping(found.manifest["scenario"]))
        assert_same(simulate(again).columns, simulate(found.experiment).columns)


def test_images_of_a_trace_are_in_its_prompts_and_equal_ones_are_encoded_once(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(TRACE)
    result = simulate(build(scenario(ENGINE, folder=tmp_path, workload={"trace": "images.csv"})))
    requests = result.columns.requests
    assert requests["prompt_tokens"].tolist() == [900, 100, 1700]
    assert requests["encoded_images"].tolist() == [1, 0, 1]
    assert requests["image_hits"].tolist() == [0, 0, 1]


def test_the_models_own_encoder_says_what_machines_that_encode_take() -> None:
    requests = simulate(build(scenario({**POOL, "max_batch": 2}))).columns.requests
    took_ns = requests["encoded_ns"] - requests["encode_begin_ns"]
    assert (took_ns > 10_000_000).all()
    # Three layers beside the last have projections of their own: four vectors of 4,096 numbers for an embedding.
    sent_ns = requests["encode_landed_ns"] - requests["encoded_ns"]
    assert sent_ns.min() == pytest.approx(768 * 4 * 4096 * 2 / 25, rel=1e-3)
    slower = simulate(build(scenario({**POOL, "hardware": "l40s"}))).columns.requests
    assert (slower["encoded_ns"] - slower["encode_begin_ns"]).mean() > took_ns.mean()
    assert not {"encoded_images", "image_hits"} & requests.keys()


def test_the_encoders_weights_are_taken_from_the_cache() -> None:
    blocks = [memory_plan_of(scenario(encode))[1].rank_blocks for encode in (None, POOL, ENGINE)]
    assert blocks[0] == blocks[1] > blocks[2]
    lost_bytes = (blocks[0] - blocks[2]) * 16 * 147_456
    vision = load_model("qwen3-vl-8b").vision
    assert vision is not None
    assert lost_bytes == pytest.approx(vision.weight_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("images", "encode"),
    [
        (None, ENGINE),
        ({**IMAGES, "per_request": 0}, ENGINE),
        ({**IMAGES, "per_request": 0}, {**ENGINE, "budget_tokens": 10}),
        ({**IMAGES, "per_request": 0}, POOL),
    ],
)
def test_without_images_a_run_is_the_one_without_encoders_to_the_nanosecond(images: Any, encode: Any) -> None:
    with_encoder = resolve(scenario(encode, images))
    without = simulate(build(scenario(None, None)))
    assert_same(without.columns, simulate(with_encoder.experiment).columns)
    assert any("No request has images" in note for note in with_encoder.manifest["notes"])


@pytest.mark.parametrize(
    ("encode", "settings", "sentence"),
    [
        (None, {}, r"workload\.images: nothing encodes the images; give encode"),
        (ENGINE, {"model": "qwen3-8b"}, "qwen3-8b has no encoder of images that is modelled; choose a model"),
        (ENGINE, {"scheduler": "sarathi"}, "encode: this scheduler does not know of images that are encoded in steps; take vllm"),
        (ENGINE, {"model": "qwen3-vl-30b-a3b", "parallel": {"data": 2, "expert": 2}}, "in steps of ranks, or of models"),
        ({**POOL, "encoder_tokens": 5}, {}, "the workload has images, which say what there is to encode"),
        ({**POOL, "tensor": 3}, {}, "an encoder of 16 heads cannot be shared by 3 devices"),
        ({**POOL, "cache_tokens": 3}, {}, "cache_tokens is of encoding in the steps of an engine"),
        ({**ENGINE, "replicas": 3}, {}, "replicas is of machines that only encode"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(encode: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ScenarioError, match=sentence):
        build(scenario(encode, **settings))


def test_workloads_that_do_not_go_with_drawn_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(TRACE)
    with pytest.raises(ScenarioError, match=r"leave workload\.images out"):
        build(scenario(ENGINE, folder=tmp_path, workload={"trace": "images.csv", "images": IMAGES}))
    (tmp_path / "short.csv").write_text(TRACE.replace("900", "700"))
    with pytest.raises(
        ScenarioError, match="row 0 of the trace has a prompt of 700 tokens, and its images alone take 770"
    ):
        build(scenario(ENGINE, folder=tmp_path, workload={"trace": "short.csv"}))
    (tmp_path / "named.csv").write_text("arrival_s,prompt_tokens,output_tokens,prefix_blocks_16\n0,90,5,1 2\n")
    with pytest.raises(ScenarioError, match="names the blocks of its prompts"):
        build(scenario(ENGINE, folder=tmp_path, workload={"trace": "named.csv", "images": IMAGES}))
    notes = resolve(scenario(None, folder=tmp_path, workload={"trace": "images.csv"})).manifest["notes"]
    assert any("there is no encode: every prompt is computed at once" in note for note in notes)
