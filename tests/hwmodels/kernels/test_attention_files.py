"""Files of attention: windows, 8-bit queries, wide heads, latent and linear attention are read and predicted."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.measured import predict, read
from hwmodels.profiles import load_profile
from tests.sample import few

DEVICES = ("h100", "h200", "b200")
KINDS = {
    "attention_windowed_prefill_{}_vllm0.24": "attention_windowed_prefill",
    "attention_windowed_decode_{}_trtllm1.3rc20": "attention_windowed_decode",
    "attention_prefill_{}_fp8q_sglang0.5.14": "attention_prefill",
    "mla_decode_{}_fp8_trtllm1.3rc20": "mla",
    "mla_module_prefill_{}_vllm0.24": "mla_module_prefill",
    "mla_module_decode_{}_trtllm1.3rc20": "mla_module_decode",
    "mla_bmm_{}_sglang0.5.14": "mla_bmm",
    "linear_attention_{}_vllm0.24": "linear_attention",
    "mamba2_{}_bf16_trtllm1.3rc20": "mamba2",
    "dsv4_csa_module_prefill_{}_vllm0.24": "compressed_prefill",
    "dsv4_hca_module_decode_{}_sglang0.5.14": "compressed_decode",
    "mhc_module_{}_bf16_vllm0.24": "hyper_connections",
    "msa_module_decode_{}_vllm0.24": "blocks_decode",
    "msa_module_prefill_{}_sglang0.5.16": "blocks_prefill",
    "dsa_module_decode_{}_trtllm1.3rc20": "sparse_decode",
    "dsa_module_prefill_{}_sglang0.5.14": "sparse_prefill",
}


@pytest.mark.parametrize("device", few(DEVICES, reason="whole tables of measurements"))
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_read_and_predicted_in_full(shared, device, name):
    path = next(shared.glob(f"measured[23]/{name.format(device)}.csv"))
    measurement = read(path)
    assert measurement.kind == KINDS[name]
    found = predict(measurement, load_profile(device))
    assert dict(found.unmodelled) == {}
    off = np.abs(found.seconds / measurement.measured_s - 1)
    assert np.median(off) < 0.12


def test_windows_and_formats_are_told_apart_by_columns(tmp_path):
    header = "batch_size,kv_len,num_heads,num_kv_heads,head_dim,window_size,query_dtype,kv_dtype,latency_us\n"
    path = tmp_path / "attention_windowed_decode_h200_vllm0.24.csv"
    rows = (
        "64,16383,32,8,128,128,bf16,bf16,20",
        "64,16383,32,8,128,128,bf16,fp8,20",
        "64,16383,32,8,128,99999,bf16,bf16,9",
    )
    path.write_text(header + "\n".join(rows) + "\n")
    cut, narrow, whole = predict(read(path), load_profile("h200")).seconds
    full = tmp_path / "attention_decode_h200_vllm0.24.csv"
    full.write_text("batch_size,kv_len,num_heads,num_kv_heads,head_dim,latency_us\n64,16383,32,8,128,20\n")
    assert predict(read(full), load_profile("h200")).seconds[0] == whole
    assert cut < 0.2 * whole
    assert narrow < 0.2 * whole


def test_the_format_of_queries_is_read_from_the_name(tmp_path):
    path = tmp_path / "attention_prefill_h100_fp8q_trtllm1.3rc20.csv"
    path.write_text("batch_size,seq_len,num_heads,num_kv_heads,head_dim,latency_us\n4,8192,32,8,128,2000\n")
    measurement = read(path)
    assert measurement.dtype == "fp8q"
    eight = predict(measurement, load_profile("h100")).seconds[0]
    other = path.with_name("attention_prefill_h100_fp8_trtllm1.3rc20.csv")
    other.write_text(path.read_text())
    assert eight < predict(read(other), load_profile("h100")).seconds[0]
