"""Words for people."""

from __future__ import annotations

import pytest

from sim.text import nearest, short_keys, told_apart


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["workload.arrivals.concurrency", "replicas"], ["concurrency", "replicas"]),
        (["scheduler.k", "decoding.k"], ["scheduler.k", "decoding.k"]),
        (["pools.p.replicas", "pools.d.replicas", "pools.d.parallel.tensor"], ["p.replicas", "d.replicas", "d.tensor"]),
        (["pools.p.replicas", "links.net.latency_s", "replicas"], ["p.replicas", "net.latency_s", "replicas"]),
        (["pools.a.x", "links.a.x"], ["pools.a.x", "links.a.x"]),
        (["pools.a"], ["a"]),
    ],
)
def test_keys_are_short_and_say_whose_they_are(keys: list[str], short: list[str]) -> None:
    assert short_keys(keys) == short


@pytest.mark.parametrize(
    ("texts", "short"),
    [
        (['{"method": "eagle", "draft": {"step_s": 0.1}, "n": 2}', '{"method": "ngram"}'], ["eagle", "ngram"]),
        (
            ['{"policy": "a", "x": {"y": 1, "z": 0}}', '{"policy": "a", "x": {"y": 2, "z": 0}}'],
            ["a, x.y 1", "a, x.y 2"],
        ),
        (['{"policy": "a"}', '{"policy": "a", "n": 2}'], ["a", "a, n 2"]),
        (['{"n": 1, "m": 1}', '{"n": 1, "m": null}', "vllm", "1"], ["m 1", "m null", "vllm", "1"]),
        (['{"policy": "vllm", "n": 1}', "vllm"], ['{"policy": "vllm", "n": 1}', "vllm"]),
        (["{a path"], ["{a path"]),
        ([], []),
    ],
)
def test_sections_are_told_apart_by_few_of_their_settings(texts: list[str], short: list[str]) -> None:
    assert told_apart(texts) == short


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("rocm-vllm", "vllm-rocm"),
        ("ROCm_SGLang", "sglang-rocm"),
        ("vlm", "vllm"),
        ("vllm rocm", "vllm-rocm"),
        ("x", None),
    ],
)
def test_the_nearest_name_has_the_same_parts_where_one_does(word: str, meant: str | None) -> None:
    assert nearest(word, ["vllm", "trtllm", "sglang", "vllm-rocm", "sglang-rocm"]) == meant
