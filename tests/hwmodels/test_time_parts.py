"""The time of iterations by part, and cost models with one resource changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.changed import Factors, changed
from hwmodels.device import load_device
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.time_parts import PARTS
from hwmodels.totals import Totals

DEPLOYMENTS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "dense": ("llama-3.1-8b", "h100-sxm", "vllm", {}),
    "tensor parallel": ("llama-3.1-70b", "h100-sxm", "trtllm", {"tensor": 4}),
    "experts": ("qwen3-30b-a3b", "h100-sxm", "sglang", {"tensor": 2, "expert": 2}),
    "latent attention on ranks": ("deepseek-v3", "h200-sxm", "sglang", {"data": 8, "expert": 8}),
    "windows": ("gpt-oss-20b", "b200", "vllm", {}),
    "linear attention": ("qwen3-next-80b-a3b", "h100-sxm", "vllm", {"tensor": 4}),
    "modules timed whole": ("deepseek-v4-flash", "b200", "sglang", {"tensor": 4}),
    "without graphs": ("llama-3.1-8b", "a100-80gb-sxm", "eager", {}),
}


DENSE = {"weights", "arithmetic"}


def cost_of(name: str) -> LayerwiseCost:
    model, device, stack, parallel = DEPLOYMENTS[name]
    return Calibrated.for_stack(stack)(load_model(model), load_device(device), ParallelConfig(**parallel))


def draw(seed: int, n: int = 200) -> Totals:
    """Totals of *n* iterations: decodes alone, prompts alone, and both."""
    rng = np.random.default_rng(seed)
    seqs, prompt = rng.integers(1, 300, n), rng.integers(1, 4000, n)
    kind = rng.integers(0, 3, n)
    seqs, prompt = np.where(kind == 1, 0, seqs), np.where(kind == 0, 0, prompt)
    chunks = np.where(prompt > 0, 1 + prompt // 1500, 0)
    kv = seqs * rng.integers(50, 4000, n)
    pairs = prompt * (prompt + 1) // 2
    return Totals(seqs + prompt, prompt, chunks, pairs, prompt, seqs, kv, seqs + chunks, pairs // 2, kv // 2)


def without_prompts(totals: Totals) -> Totals:
    zero = np.zeros_like(totals.rows)
    return totals._replace(
        rows=totals.decode_seqs, prefill_rows=zero, prefill_chunks=zero, prefill_pairs=zero, prefill_kv_tokens=zero,
        prefill_pairs_window=zero, logit_rows=totals.decode_seqs,
    )  # fmt: skip


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_parts_add_up_to_the_iteration_and_none_is_negative(name: str) -> None:
    cost, totals = cost_of(name), draw(1)
    parts = cost.parts_s(totals)
    assert list(parts) == list(PARTS)
    np.testing.assert_allclose(np.sum(list(parts.values()), axis=0), cost.iteration_s(totals), rtol=1e-12)
    assert all((each > -1e-12).all() for each in parts.values())


def test_parts_are_those_of_a_roofline_counted_by_hand() -> None:
    # Llama-3.2-1B: 16 layers of hidden 2048, 8 KV heads of 64, MLPs of 8192, a vocabulary of 128256; 2 bytes a number.
    device = load_device("h100-sxm")
    cost = Roofline(load_model("llama-3.2-1b"), device)
    layers = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    head = 2048 * 128256
    one = Totals(*(np.array([each]) for each in (4, 0, 0, 0, 0, 4, 8000, 4, 0, 0)))
    parts = {name: float(each[0]) for name, each in cost.parts_s(one).items() if each[0] > 0}
    assert parts.keys() == {"weights", "kv"}
    assert parts["weights"] == pytest.approx(2 * (layers + head) / device.hbm_bytes_per_s)
    assert parts["kv"] == pytest.approx(8000 * 16 * 2 * 8 * 64 * 2 / device.hbm_bytes_per_s)
    # A prompt of 4,096 tokens computes beyond what its weights take to read; the head sees one row of it.
    prompt = Totals(*(np.array([each]) for each in (4096, 4096, 1, 4096 * 4097 // 2, 4096, 0, 0, 1, 0, 0)))
    flops_s = 2 * 4096 * layers / device.peak_flops_per_s["bf16"]
    parts = {name: float(each[0]) for name, each in cost.parts_s(prompt).items()}
    # The layers' products are bound by arithmetic, and hide the reading of their weights; that of the head for one row is not.
    assert parts["arithmetic"] == pytest.approx(flops_s)
    assert parts["weights"] == pytest.approx(2 * head / device.hbm_bytes_per_s)


def test_padding_is_what_rows_up_to_the_next_graph_take() -> None:
    cost = cost_of("dense")
    decodes = without_prompts(draw(2))
    padding = cost.parts_s(decodes)["padding"]
    sizes = np.array(cost.kernels.captured or ())
    assert (padding[np.isin(decodes.rows, sizes)] == 0).all()
    assert (padding[(decodes.rows > 0) & (decodes.rows < sizes[-1]) & ~np.isin(decodes.rows, sizes)] > 0).any()


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"bandwidth": 2.0}, {"weights", "kv"}),
        ({"arithmetic": 2.0}, {"arithmetic", "prompt_attention"}),
        ({"host": 2.0}, {"host"}),
        ({"links": 2.0}, {"collectives"}),
    ],
)
def test_a_changed_resource_changes_its_own_parts(change: dict[str, Any], moved: set[str]) -> None:
    cost, totals = cost_of("tensor parallel"), draw(3)
    before, after = cost.parts_s(totals), changed(cost, Factors(**change)).parts_s(totals)
    for name in moved:
        some = before[name] > 1e-7
        assert (after[name][some] < before[name][some]).all(), name
    if "links" in change or "host" in change:
        (name,) = moved
        assert after[name].sum() == pytest.approx(before[name].sum() / 2.0, rel=0.03)
    # Products that arithmetic no longer bounds are bound by reading, and those that reading does not by arithmetic.
    rest = {"kv", "prompt_attention", "host", "collectives"} | (set() if moved & {"weights", "arithmetic"} else DENSE)
    for name in rest - moved:
        assert after[name].sum() == pytest.approx(before[name].sum(), rel=0.03), name


def test_factors_of_one_change_nothing_and_others_are_positive() -> None:
    cost, totals = cost_of("dense"), draw(4)
    np.testing.assert_array_equal(changed(cost, Factors()).iteration_s(totals), cost.iteration_s(totals))
    with pytest.raises(ValueError, match="the factor host is above 0 and finite; got 0"):
        Factors(host=0.0)
