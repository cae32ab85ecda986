"""The cost model of published times: what goes in comes out, and what else follows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hwmodels.deployment import deploy
from hwmodels.published import Published, PublishedTimes, efficiencies
from hwmodels.roofline import Roofline
from hwmodels.slowed import slowed
from hwmodels.totals import Totals


def prefill(tokens: int) -> Totals:
    return Totals(tokens, tokens, 1, tokens * (tokens + 1) // 2, tokens, 0, 0, 1)


def decode(sequences: int, context: int) -> Totals:
    return Totals(sequences, 0, 0, 0, 0, sequences, sequences * context, sequences)


@pytest.fixture(scope="module")
def cost():
    return deploy(model="llama-13b", hardware="a6000", precision="fp16", cost=Published).cost


def test_a_deployment_says_what_its_prices_come_from():
    found = {
        cost: deploy(model="llama-13b", hardware="a6000", precision="fp16", cost=cost).provenance["profile"]
        for cost in (Published, Roofline, halved)
    }
    assert found[Published].startswith("five published times of LLaMA-13B on one A6000")
    assert found[Roofline].startswith("datasheet roofline")
    assert found[halved] == "a cost model of one's own: halved"


def halved(*args, **settings):
    return slowed(Roofline(*args, **settings), 0.5)


def test_the_times_that_go_in_come_out(cost):
    times = PublishedTimes()
    whole = times.prefill_linear_s + times.prefill_attention_s
    assert cost.iteration_s(prefill(1024)) == pytest.approx(whole, rel=1e-9)
    step = times.decode_linear_s + times.decode_attention_s
    assert cost.iteration_s(decode(4, 1024)) == pytest.approx(step, rel=1e-9)
    assert cost.iteration_s(prefill(256)) == pytest.approx(times.batch_256_s, rel=1e-9)


def test_efficiencies_are_shares_of_the_datasheet():
    found = dataclasses.asdict(efficiencies())
    sharpness = found.pop("sharpness")
    assert all(0.2 < share < 0.9 for share in found.values())
    assert 1 < sharpness < 5


def test_one_token_beyond_a_tile_costs_a_tile(cost):
    below, at, beyond = (cost.iteration_s(prefill(tokens)) for tokens in (255, 256, 257))
    assert at - below < 0.01 * at
    assert beyond / at == pytest.approx(1.32, abs=0.05)  # SARATHI, section 4.4


def test_times_do_not_fall_with_rows_and_arrays_equal_scalars(cost):
    rows = np.arange(1, 700)
    zero = np.zeros_like(rows)
    columns = Totals(rows, rows, zero + 1, rows * (rows + 1) // 2, rows, zero, zero, zero + 1, zero, zero)
    seconds = cost.iteration_s(columns)
    assert (np.diff(seconds) >= 0).all()
    assert seconds.tolist() == [cost.iteration_s(prefill(int(n))) for n in rows]


def test_times_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="256 tokens cannot take"):
        efficiencies(PublishedTimes(batch_256_s=0.04))


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ValueError, match="has experts; use Roofline"):
        deploy(model="mixtral-8x7b", hardware="a100-80gb-sxm", parallel={"tensor": 2}, cost=Published)


def test_another_chip_is_refused():
    with pytest.raises(ValueError, match="not for a100-80gb-sxm; use Calibrated"):
        deploy(model="llama-13b", hardware="a100-80gb-sxm", cost=Published)


def test_the_a40_takes_over_shares_of_its_own_peaks(cost):
    a40 = deploy(model="llama-13b", hardware="a40", precision="fp16", cost=Published).cost
    # A decode goes by the memory, a long prompt by the arithmetic: 768 to 696 GB/s, 154.8 to 149.7 TFLOP/s.
    assert a40.iteration_s(decode(4, 1024)) / cost.iteration_s(decode(4, 1024)) == pytest.approx(768 / 696, rel=0.01)
    assert a40.iteration_s(prefill(1024)) / cost.iteration_s(prefill(1024)) == pytest.approx(154.8 / 149.7, rel=0.01)
