"""`experts:` and `cuda_graphs:` of a scenario: how experts are chosen, placed and reached; what decode steps are padded to."""

from pathlib import Path

import pytest

from hwmodels.experts import ExpertLayout, Zipf
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly.deployment import deployment_of

MOE = {"model": "qwen3-30b-a3b", "hardware": "h200", "parallel": {"tensor": 1, "data": 4, "expert": 4}}


def layout(experts, folder=Path(), **settings):
    given = Scenario.from_mapping({**MOE, **settings, "experts": experts}, source="my.yaml", folder=folder)
    return deployment_of(given).parallel.layout


def test_settings_reach_the_deployment(tmp_path):
    assert layout({}) == ExpertLayout()
    assert layout({"popularity": {"zipf": 0.8}, "placement": "eplb", "redundant": 8, "exchange": "all_to_all"}) == (
        ExpertLayout(popularity=Zipf(zipf=0.8), placement="eplb", redundant=8, exchange="all_to_all")
    )
    (tmp_path / "shares.txt").write_text("\n".join(["1"] * 127 + ["30"]))
    assert layout({"popularity": "shares.txt"}, folder=tmp_path).popularity == (1.0,) * 127 + (30.0,)


def test_pools_have_experts_of_their_own():
    base = Scenario.from_mapping(
        {**MOE, "pools": {"a": {}, "b": {"experts": {"popularity": "even"}}}, "experts": {"popularity": {"zipf": 1.0}}}
    )
    found = [deployment_of(base.pool(name)).parallel.layout.popularity for name in "ab"]
    assert found == [Zipf(zipf=1.0), "even"]


@pytest.mark.parametrize(
    ("experts", "settings", "message"),
    [
        ({"popularity": "none.txt"}, {},
         "my.yaml: experts: popularity 'none.txt' is neither measured, even, {zipf: EXPONENT} nor a file"),
        ({"popularity": "short.txt"}, {},
         "my.yaml: experts.popularity has 2 weights and qwen3-30b-a3b has 128 experts; give one for each"),
        ({"popularity": "wrong.txt"}, {}, "line 2: expected a number of at least 0, got 'x'"),
        ({"redundant": 4}, {}, "my.yaml: experts: redundant is 4, and copies of experts are made by placement eplb alone"),
        ({"popularity": "even", "placement": "eplb", "redundant": 3}, {},
         "my.yaml: experts.redundant 3 makes 131 experts, which do not divide over 4 ranks; it may be 0, 4, 8, ..."),
        ({"popularity": "even"}, {"model": "llama-3.1-8b", "parallel": {"tensor": 2}},
         "my.yaml: experts is about a mixture of experts, and llama-3.1-8b is dense; leave experts out"),
        ({"exchange": "deepep_low_latency"}, {"hardware": "l40s"},
         "my.yaml: DeepEP needs NVLink, and devices of l40s are joined by PCIe; set experts.exchange: allgather_reducescatter"),
        ({"exchange": "nccl"}, {}, "experts.exchange"),
        ({"popularity": {"zipf": -1}}, {}, "experts.popularity"),
        ({}, {"parallel": {"data": 3, "expert": 3}}, "my.yaml: parallel.expert 3 does not divide the 128 experts of qwen3-30b-a3b"),
    ],
)  # fmt: skip
def test_bad_settings_in_a_sentence(tmp_path, experts, settings, message):
    (tmp_path / "short.txt").write_text("1\n2\n")
    (tmp_path / "wrong.txt").write_text("1\nx\n")
    with pytest.raises(ScenarioError) as caught:
        layout(experts, folder=tmp_path, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def graphs(settings, **others):
    given = Scenario.from_mapping({"model": "llama-3.1-8b", "cuda_graphs": settings, **others}, source="my.yaml")
    return deployment_of(given).cost.kernels.captured


def test_sglang_counts_sequences_of_a_graph_and_vllm_tokens():
    """With three drafted tokens a sequence verifies four, in whose rows prices pad."""
    decoding = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.6}}
    rows = {
        stack: graphs({"sizes": [2, 8]}, serving_stack=stack, decoding=decoding)
        for stack in ("vllm", "sglang", "trtllm")
    }
    assert rows == {"vllm": (2, 8), "sglang": (8, 32), "trtllm": (8, 32)}
    assert graphs({"largest": 6}, serving_stack="sglang", decoding=decoding)[-1] == 24
    assert graphs({"sizes": [2, 8]}, serving_stack="sglang") == (2, 8)


def test_graphs_that_a_server_was_told_of():
    assert graphs({"sizes": [8, 2]}) == (2, 8)
    assert graphs({"largest": 6}) == (1, 2, 4, 6)
    assert graphs({"eager": True}) == ()
    assert graphs({})[-1] == graphs(None)[-1] == 512
    assert graphs(None, serving_stack="ideal") is None


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({"sizes": [8], "largest": 16}, {}, "my.yaml: cuda_graphs: sizes of CUDA graphs say the largest too; leave largest out"),
        ({"eager": True, "sizes": [8]}, {}, "my.yaml: cuda_graphs: a server without graphs (eager) has no sizes of them"),
        ({"largest": 8}, {"serving_stack": "ideal"},
         "my.yaml: cuda_graphs: CUDA graphs of given sizes are of vllm, trtllm, sglang on GPUs; ideal on h100-sxm has none"),
        ({"largest": 8}, {"cost_model": "roofline"}, "my.yaml: cuda_graphs: cost_model roofline has no launches"),
        ({"larges": 8}, {}, "cuda_graphs.larges is not a setting; did you mean largest?"),
        ({"sizes": [0]}, {}, "cuda_graphs.sizes"),
    ],
)  # fmt: skip
def test_bad_graphs_in_a_sentence(settings, others, message):
    with pytest.raises(ScenarioError) as caught:
        graphs(settings, **others)
    assert message in str(caught.value)
