"""The exchange of tokens between experts: whom a token reaches, and what bounds the time."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.device import load_device
from hwmodels.kernels.exchange import ExchangeParams, distinct_devices, exchange_s
from hwmodels.profiles import datasheet_of

H200 = datasheet_of(load_device("h200"))


def seconds(params=None, **shape):
    usual = {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "devices": 8, "number_bytes": 1.0, "sms": 20}
    return exchange_s(params or ExchangeParams(), H200, **(usual | shape))


def test_a_token_reaches_as_many_devices_as_its_experts_lie_on():
    assert distinct_devices(8, 1, 16) == pytest.approx(1.0)
    assert distinct_devices(8, 2, 8) == pytest.approx(2.0)  # an expert a device: two experts, two devices
    assert distinct_devices(2, 2, 4) == pytest.approx(1 + 2 / 3)  # the second of three left lies on the other with 2/3
    assert distinct_devices(8, np.array([1, 8]), 256).tolist() == pytest.approx([1.0, 5.29], abs=0.01)


def test_no_token_costs_nothing_and_more_tokens_never_less():
    assert seconds(tokens=0) == 0.0
    times = [seconds(tokens=2**power) for power in range(18)]
    assert all(np.diff(times) > 0)


def test_scalars_and_columns_give_the_same_bits():
    tokens = np.array([1, 7, 128, 9000])
    assert seconds(tokens=tokens).tolist() == [seconds(tokens=int(count)) for count in tokens]


def test_many_sms_leave_the_link_as_the_bound():
    params = ExchangeParams(overlap_loss=0.0)
    copies = distinct_devices(8, 8, 256)
    by_link = 131072 * copies * 7 / 8 * 7168 / (H200.link_bytes_per_s * params.bandwidth)
    assert seconds(params, tokens=131072, sms=132) == pytest.approx(by_link, rel=1e-2)
    assert seconds(params, tokens=131072, sms=4) > 2 * by_link


def test_the_low_latency_mode_sends_a_copy_to_each_expert_and_works_with_an_sm_for_each():
    params = ExchangeParams(overlap_loss=0.0, start_s=1e-6, byte_start_s=0.0, expert_s=0.0)
    few, many = (seconds(params, sms=0, tokens=1024, topk=2, hidden=256, experts=experts) for experts in (8, 64))
    assert few - 1e-6 == pytest.approx(8 * (many - 1e-6))
    by_link = 1024 * 8 * 7 / 8 * 7168 / (H200.link_bytes_per_s * params.bandwidth)
    assert seconds(params, sms=0, tokens=1024, topk=8, experts=256) - 1e-6 == pytest.approx(by_link)
