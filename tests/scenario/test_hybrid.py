"""Scenarios of models whose layers are not alike: their cache, their notes, and the formats they keep."""

import pytest

from sim import Scenario
from sim.engine import run
from sim.scenario.assembly import build, resolve
from sim.scenario.assembly.memory import memory_plan_of
from tests.engine.random_runs import assert_same

FEW = {"trace": "conversation", "requests": 20}


def scenario(**settings):
    return Scenario(**{"workload": FEW, **settings})


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"precision": "fp8"}, "bf16"),
        ({"precision": "fp8", "kv_precision": "fp8"}, "fp8"),
        ({"model": "gpt-oss-20b"}, "bf16"),
        ({"precision": "fp16"}, "fp16"),
        ({"precision": "int4"}, "bf16"),
        ({"model": "qwen3-32b-fp8"}, "bf16"),
    ],
)
def test_the_cache_is_as_wide_as_it_is_told_to_be(settings, kept):
    assert resolve(scenario(**settings)).manifest["model"]["kv_precision"] == kept


def test_a_hybrid_says_at_which_context_its_cache_is_counted():
    asked = scenario(model="gemma-3-4b")
    built = resolve(asked)
    notes = [note for note in built.manifest["notes"] if note.startswith("Cache of gemma-3-4b")]
    assert len(notes) == 1
    assert "of 34 layers 29 keep a window of 1,024 tokens" in notes[0]
    outputs = built.experiment.workload.output_tokens
    held = ((built.experiment.workload.prompt_tokens + outputs / 2) * outputs).sum() / outputs.sum()
    assert f"as if every sequence held {round(held):,}, in vLLM's groups of layers" in notes[0]
    assert memory_plan_of(asked)[1].kv_blocks == build(asked).hosted[0].kv_blocks


def lengths(prompt, output):
    return {
        "arrivals": {"process": "poisson", "rate_per_s": 0.5},
        "requests": 12,
        "prompt_tokens": prompt,
        "output_tokens": output,
    }


def test_long_contexts_of_windows_leave_room_for_more_tokens():
    blocks = {
        prompt: memory_plan_of(scenario(model="gemma-3-4b", workload=lengths(prompt, 100)))[1].kv_blocks
        for prompt in (500, 2_000, 20_000)
    }
    assert blocks[500] < blocks[2_000] < blocks[20_000]
    # 5 layers of 34 keep all of 20,050 tokens, the others 1,023: pages of five layers each.
    of_500, of_20_000 = 7 * 35 / 35, (1254 + 6 * 65) / 1254
    assert blocks[20_000] / blocks[500] == pytest.approx(of_500 / of_20_000, rel=0.01)


@pytest.mark.parametrize(
    "settings", [{}, {"decoding": {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.5}}}]
)
def test_chunks_are_crossed_alike_one_by_one_and_in_spans(settings):
    """Llama 4 behind 8,192 tokens: each request crosses from one chunk into the next."""
    asked = scenario(
        model="llama-4-scout", hardware="h200", parallel={"tensor": 4}, workload=lengths(8_150, 120), **settings
    )
    experiment = build(asked)
    fast, stepped = run(experiment), run(experiment, fast_forward=False)
    assert_same(fast, stepped)
    spans = stepped.replicas[0].spans
    within, kv = spans["decode_kv_window"], spans["decode_kv_tokens"]
    alone = (spans["decode_seqs"] == 1) & (kv > 8192)
    assert alone.any()
    assert (within[alone] == kv[alone] - 8192).all()
