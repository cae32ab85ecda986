"""Images in a scenario: their tokens, what encodes them and where, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwmodels.memory import parts_text
from hwmodels.model import load_model
from sim.errors import ScenarioError
from sim.results import Result, fact_rows
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of
from tests.engine.random_runs import assert_same
from tests.scenario.media import ENGINE, IMAGES, POOL
from tests.scenario.media import with_images as scenario

TRACE = """arrival_s,prompt_tokens,output_tokens,images
0.0,900,5,1024x768#1
10.0,100,5,
20.0,1700,5,1024x768#2 1024x768#1
"""


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
    assert "12 encoded, 0 found encoded (0.0%); encoding takes " in dict(fact_rows(result.summary))["Images and speech"]
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


def test_the_weights_of_an_encoder_have_a_part_of_their_own_in_the_account_of_memory() -> None:
    found = resolve(scenario(ENGINE)).manifest["memory"]
    apart = resolve(scenario(POOL)).manifest["memory"]
    vision = load_model("qwen3-vl-8b").vision
    assert vision is not None
    assert found["encoder_bytes"] == vision.weight_bytes
    assert (found["reserve_bytes"], apart["encoder_bytes"]) == (0.0, 0.0)
    assert found["kv_bytes"] == pytest.approx(apart["kv_bytes"] - vision.weight_bytes, abs=1e7)
    assert f"encoder {vision.weight_bytes / 2**30:.2f}" in parts_text(found)


def test_workloads_that_do_not_go_with_drawn_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(TRACE)
    with pytest.raises(ScenarioError, match=r"leave workload\.images out"):
        build(scenario(ENGINE, folder=tmp_path, workload={"trace": "images.csv", "images": IMAGES}))
    (tmp_path / "short.csv").write_text(TRACE.replace("900", "700"))
    with pytest.raises(
        ScenarioError,
        match=r"request 1 of the trace, which arrives at 0 s, has a prompt of 700 tokens, .* and clips alone take 770",
    ):
        build(scenario(ENGINE, folder=tmp_path, workload={"trace": "short.csv"}))
    (tmp_path / "talk.csv").write_text("arrival_s,prompt_tokens,output_tokens,session,prefix_blocks_16\n0,90,5,1,1 2\n")
    with pytest.raises(ScenarioError, match="the prompts of a conversation hold those of its earlier turns"):
        build(scenario(ENGINE, folder=tmp_path, workload={"trace": "talk.csv", "images": IMAGES}))
    notes = resolve(scenario(None, folder=tmp_path, workload={"trace": "images.csv"})).manifest["notes"]
    assert any("there is no encode: every prompt is computed at once" in note for note in notes)


# Equal images in the prefix cache.

POPULAR = {**IMAGES, "distinct": 3, "zipf": 1.0, "after_tokens": 64}


def groups_of_text(folder: Path) -> Scenario:
    """Two system prompts of 64 tokens, with a question of 30 behind each and a popular image between, one at a time."""
    rows = [f"{10 * row},94,5,{' '.join(str(4 * (row % 2) + block) for block in range(4))}" for row in range(24)]
    (folder / "groups.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,prefix_blocks_16", *rows]))
    return scenario(ENGINE, folder=folder, workload={"trace": "groups.csv", "images": POPULAR})


def found_of(prompts: list[list[Any]], block: int = 16) -> list[int]:
    """Tokens of the full blocks that each prompt has in common with an earlier one, all but its last token at most."""
    found = []
    for row, prompt in enumerate(prompts):
        common = (
            next((i for i, pair in enumerate(zip(prompt, each, strict=False)) if pair[0] != pair[1]), len(prompt))
            for each in prompts[:row]
        )
        found.append(max((min(n, len(prompt) - 1) // block * block for n in common), default=0))
    return found


def test_equal_images_behind_equal_text_are_found_by_the_prefix_cache_and_others_are_not(tmp_path: Path) -> None:
    experiment = build(groups_of_text(tmp_path))
    prompts = [
        [("system", row % 2, k) for k in range(64)]
        + [(experiment.workload.media_of("image", row)[0][-1], k) for k in range(770)]
        + [("own", row, k) for k in range(30)]
        for row in range(24)
    ]
    expected = found_of(prompts)
    # Nothing, the system prompt alone, and the image's full blocks too.
    assert set(expected) == {0, 64, 832}
    requests = simulate(experiment).columns.requests
    assert requests["prefix_hit_tokens"].tolist() == expected
    # An image that reaches into the last block, which is computed again, is needed again.
    assert (requests["encoded_images"] + requests["image_hits"]).tolist() == [1] * 24
    assert requests["encoded_images"].sum() == 3


def test_equal_images_of_a_trace_without_blocks_are_found_too(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,images\n0,900,5,1024x768#1\n10,950,5,1024x768#1\n20,900,5,1024x768#2\n"
    )
    requests = simulate(build(scenario(ENGINE, folder=tmp_path, workload={"trace": "images.csv"}))).columns.requests
    # 48 full blocks of 770 tokens.
    assert requests["prefix_hit_tokens"].tolist() == [0, 768, 0]


@pytest.mark.parametrize("encode", [ENGINE, POOL])
def test_where_all_images_differ_a_prefix_cache_finds_nothing_and_changes_nothing(encode: Any) -> None:
    with_cache, without = (
        simulate(build(scenario(encode, memory={"prefix_caching": caching}))).columns for caching in (True, False)
    )
    assert_same(with_cache, without)


def test_machines_that_only_encode_keep_images_and_the_summary_says_how_many_were_found(tmp_path: Path) -> None:
    popular = {**IMAGES, "distinct": 3}
    kept = simulate(build(scenario({**POOL, "cache_tokens": 3 * 768}, popular)))
    requests = kept.columns.requests
    assert (requests["encoded_images"].sum(), requests["image_hits"].sum()) == (3, 9)
    assert kept.summary["encode"]["images"] == {"encoded": 3, "hits": 9, "hit_rate": 0.75}
    assert dict(fact_rows(kept.summary))["Images and speech"] == "3 encoded, 9 found encoded (75.0%)"
    assert Result.load(kept.save(tmp_path / "out")).summary == kept.summary
    none = simulate(build(scenario(POOL, popular)))
    assert none.summary["encode"]["stages"]["encode_s"]["mean"] > kept.summary["encode"]["stages"]["encode_s"]["mean"]
    with pytest.raises(ScenarioError, match="cache_tokens keeps images and clips by what they hold"):
        build(scenario({**POOL, "cache_tokens": 9, "token_s": 0, "encoder_tokens": 5}, None))


# SGLang.


def test_sglang_encodes_in_its_steps_and_finds_equal_images_to_the_token(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,images\n0,900,5,1024x768#1\n10,950,5,1024x768#1\n20,900,5,1024x768#2\n"
    )
    found = resolve(
        scenario(ENGINE, folder=tmp_path, workload={"trace": "images.csv"}, scheduler="sglang", serving_stack="sglang")
    )
    (machine,) = found.experiment.machines
    images = machine.hosted[0].images
    assert images is not None
    # 100 MiB of embeddings of 4 x 4,096 numbers in 16 bits.
    assert (images.budget, images.cache) == (None, 3200)
    requests = simulate(found.experiment).columns.requests
    assert requests["prefix_hit_tokens"].tolist() == [0, 770, 0]
    assert requests["encoded_images"].tolist() == [1, 0, 1]
    with pytest.raises(ScenarioError, match="without a budget; leave budget_tokens out"):
        build(scenario({**ENGINE, "budget_tokens": 9000}, scheduler="sglang", serving_stack="sglang"))
