"""SARATHI's closed forms against the numbers it prints."""

import numpy as np
import pytest

from sim.theory import sarathi as sa

GB = 1e9
LLAMA_13B = (40, 5120)
LLAMA_33B = (60, 6656)


def test_kv_bytes_per_token():
    assert sa.kv_bytes_per_token(*LLAMA_13B) == 819_200
    assert sa.kv_bytes_per_token(*LLAMA_33B) == 1_597_440


@pytest.mark.parametrize(
    ("shape", "memory_gb", "weights_gb", "tokens", "batch"),
    [
        (LLAMA_13B, 48, 26, 1024, 26),
        (LLAMA_13B, 48, 26, 2048, 13),
        (LLAMA_13B, 48, 26, 3072, 8),
        (LLAMA_33B, 80, 65, 1024, 9),
        (LLAMA_33B, 80, 65, 2048, 4),
        (LLAMA_33B, 80, 65, 3072, 3),
    ],
)
def test_capacity_formula_without_reserve(shape, memory_gb, weights_gb, tokens, batch):
    assert sa.batch_capacity(memory_gb * GB, weights_gb * GB, tokens, sa.kv_bytes_per_token(*shape)) == batch


def test_33b_batches_as_stated_need_a_pool_of_17_gb():
    kv = sa.kv_bytes_per_token(*LLAMA_33B)
    assert [sa.batch_capacity(17 * GB, 0, n, kv) for n in (1024, 2048, 3072)] == [10, 5, 3]


def test_13b_batches_as_stated_contradict_each_other():
    kv = sa.kv_bytes_per_token(*LLAMA_13B)
    _, below = sa.implied_pool_bytes(18, 1024, kv)
    at_least, _ = sa.implied_pool_bytes(10, 2048, kv)
    assert below < at_least


def test_reserve_comes_off_the_pool():
    kv = sa.kv_bytes_per_token(*LLAMA_13B)
    assert sa.batch_capacity(48 * GB, 26 * GB, 1024, kv, reserve_bytes=6.5 * GB) == 18
    assert sa.batch_capacity(48 * GB, 60 * GB, 1024, kv) == 0


@pytest.mark.parametrize(
    ("chunk", "batch", "stated"), [(256, 18, 14), (512, 18, 28), (256, 6, 50), (256, 5, 63), (256, 3, 127)]
)
def test_optimal_pd_ratio_as_stated(chunk, batch, stated):
    assert sa.optimal_pd_ratio(chunk, batch) == pytest.approx(stated, abs=1.2)


def test_optimal_pd_ratio_in_its_plain_form():
    assert sa.optimal_pd_ratio(256, 6, tile_adjusted=False) == pytest.approx(51.2)
    assert sa.optimal_pd_ratio(128, 4, tile_adjusted=False) == pytest.approx(42.67, abs=0.01)
    assert sa.optimal_pd_ratio(256, 1) == np.inf


def test_tile_adjusted_chunk_fills_the_tile():
    assert sa.tile_adjusted_chunk(256, 18) + 17 == 256


def test_chunks_and_kv_rereads():
    assert sa.chunk_count(1024, 256) == 4
    assert sa.chunk_count(1025, 256) == 5
    assert sa.kv_chunk_reads(4) == sum(range(1, 5))
    assert sa.kv_chunk_reads(4, first_touch=False) == sum(range(1, 4))


def test_linear_intensity_starts_at_the_number_of_rows():
    assert sa.linear_intensity(1, 5120, 5120) == pytest.approx(1.0, rel=1e-3)
    assert sa.linear_intensity(256, 5120, 5120) == pytest.approx(256.0 / 1.1, rel=1e-9)


def test_decode_attention_has_an_intensity_of_one():
    assert sa.attention_intensity(1, 4096) == pytest.approx(1.0, rel=1e-3)
    assert sa.attention_intensity(1, 4096, query_heads_per_kv_head=8) == pytest.approx(8.0, rel=1e-2)


@pytest.mark.parametrize(
    ("flops", "bandwidth", "tokens"),
    [
        (125e12, 900e9, 139),
        (312e12, 2.0e12, 156),
        (154.8e12, 768e9, 201),
        (275e12, 1.2e12, 229),
        (989e12, 3.35e12, 295),
    ],
    ids=["V100", "A100", "A6000", "TPU v4", "H100"],
)
def test_ridge_points_of_known_devices(flops, bandwidth, tokens):
    assert sa.ridge_tokens(flops, bandwidth) == pytest.approx(tokens, abs=1.0)
    assert sa.ridge_intensity(flops, bandwidth) == sa.ridge_tokens(flops, bandwidth)


def test_one_byte_weights_halve_the_ridge():
    assert sa.ridge_tokens(1e15, 2e12, weight_bytes=1) == pytest.approx(250.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sa.tile_adjusted_chunk(4, 6), "leave room in the chunk"),
        (lambda: sa.batch_capacity(48e9, 26e9, 0, 819_200), "sequence_tokens is a whole number, 1 or more"),
        (lambda: sa.batch_capacity(48e9, 26e9, 1024, 819_200, reserve_bytes=-1), "reserve_bytes must be 0 or more"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
