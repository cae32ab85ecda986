"""Readers take what follows the conventions and refuse the rest by name; shipped profiles meet their figures."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from hwmodels.device import load_device
from hwmodels.kernels.fitting import errors
from hwmodels.measured import catalogue_model, catalogue_name, is_kernel_level, predict, read, read_folder, survey
from hwmodels.profiles import borrow, load_profile

GEMM = "m,n,k,latency_us\n1,4096,4096,12.5\n64,4096,4096,14.0\n"


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_a_name_says_kind_device_format_and_software(tmp_path):
    m = read(write(tmp_path, "gemm_h200_fp8_vllm0.24.csv", GEMM))
    assert (m.kind, m.device, m.dtype, m.source, m.version) == ("gemm", "h200", "fp8", "vllm", "0.24")
    assert m.measured_s is not None
    assert m.measured_s.tolist() == pytest.approx([12.5e-6, 14e-6])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("matmul_h200.csv", "a,b\n1,2\n", r"its columns \(a, b\) are those of no kind of measurement"),
        ("gemm_h200_bf16_vllm0.24.csv", "m,m,n,k,latency_us\n1,1,1,1,1\n", "the column m is there twice"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace("k,", "depth,"), "a gemm file has the columns m, n, k"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace("latency_us", "latency_us,colour"), "unknown column colour"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace("14.0", "fast"), "latency_us in line 3 must be a number"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace("14.0", "-1"), "latency_us must be positive; line 3"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace("64,", "0,"), "m must be at least 1; line 3"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace("14.0", "nan"), "latency_us must be finite"),
        ("gemm_h200_bf16_vllm0.24.csv", GEMM.replace(",14.0", ""), "line 3 has 3 cells, the header 4"),
        ("gemm_h200_bf16_vllm0.24.csv", "m,n,k,latency_us\n", "a header but no row"),
        ("gemm_h200_bf16_vllm0.24.csv", "", "the file is empty"),
    ],
)
def test_malformed_files_are_refused(tmp_path, name, text, message):
    if "colour" in message:
        text = text.replace("12.5", "12.5,red").replace("14.0", "14.0,red")
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, name, text))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemm_b200_nvfp4_vllm0.24.csv", "nvfp4"),
        ("gemm_h200_fp8_block_vllm0.24.csv", "fp8_block"),
        ("gemm_h200_bfloat16_vllm0.24.csv", "bf16"),
        ("gemm_h200_w4a16_vllm0.24.csv", "w4a16"),
        ("gemm_h100_llama70b_lssv0.csv", "bf16"),
    ],
)
def test_the_format_in_a_name_is_never_taken_for_a_model(tmp_path, name, dtype):
    m = read(write(tmp_path, name, GEMM))
    assert (m.dtype, m.labels.get("model")) == (dtype, "llama70b" if "llama" in name else None)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("collectives_nccl_h100_pcie.csv", "h100-pcie"),
        ("collectives_nccl_l40s_pcie.csv", "l40s"),
        ("collectives_nccl_h200.csv", "h200"),
        ("gemm_h100pcie_bf16_vllm0.24.csv", "h100-pcie"),
        ("gemm_a100_fp16_vidur.csv", "a100-80gb-sxm"),
    ],
)
def test_a_card_is_not_taken_for_its_module(tmp_path, name, device):
    reduce = "collective,dtype,num_gpus,message_bytes,latency_us\nall_reduce,half,2,512,5\n"
    m = read(write(tmp_path, name, reduce if "nccl" in name else GEMM))
    assert load_device(catalogue_name(m.device)).name == device


def test_an_unknown_distribution_leaves_the_other_rows(tmp_path):
    text = (
        "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution,latency_us\n"
        "bfloat16,16,4096,1536,8,128,1,1,power_law_1.2,100\nbfloat16,16,4096,1536,8,128,1,1,zipf,100\n"
    )
    result = predict(read(write(tmp_path, "moe_h200_vllm0.24.csv", text)), load_profile("h200"))
    assert np.isfinite(result.seconds).tolist() == [True, False]
    assert dict(result.unmodelled) == {"distribution zipf has no model": 1}


def test_layers_without_matrices_are_counted_with_the_reason(tmp_path):
    text = "model,tp,layer,m,n,k,latency_us\nx,4,rotary_emb,16,,,5\n"
    result = predict(read(write(tmp_path, "layers_h100_llama3.1-70b_lss.csv", text)), load_profile("h100"))
    (reason,) = result.unmodelled
    assert reason.startswith("no matrix multiplication in the file")


def test_a_format_without_a_model_is_counted_by_name(tmp_path):
    result = predict(read(write(tmp_path, "gemm_h200_w4a16_vllm0.24.csv", GEMM)), load_profile("h200"))
    assert np.isnan(result.seconds).all()
    assert dict(result.unmodelled) == {"format w4a16 has no kernel model": 2}


def test_four_bit_operands_cost_less_than_eight_bit_ones_where_weights_are_what_takes_time(tmp_path):
    profile = load_profile("b200")
    large = "m,n,k,latency_us\n1,28672,16384,50\n64,28672,16384,60\n"
    four, eight = (
        predict(read(write(tmp_path, f"gemm_b200_{dtype}_vllm0.24.csv", large)), profile).seconds
        for dtype in ("nvfp4", "fp8")
    )
    assert (four < 0.8 * eight).all()


def test_cached_keys_in_eight_bits_are_read_faster(tmp_path):
    text = "batch_size,kv_len,num_heads,num_kv_heads,head_dim,latency_us\n64,8191,32,8,128,700\n"
    wide, narrow = (
        predict(read(write(tmp_path, f"attention_decode_h200_{name}vllm0.24.csv", text)), load_profile("h200")).seconds
        for name in ("", "fp8_")
    )
    assert wide[0] / 2 < narrow[0] < wide[0]


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("llama3.1-8b", "llama-3.1-8b"),
        ("BLOOM-176B", "bloom-176b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-2507"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b-fp8"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    ],
)
def test_releases_have_the_shapes_of_their_model(label, name):
    assert catalogue_model(label).name == name


def test_another_model_is_not_taken_for_a_release():
    with pytest.raises(ValueError, match=r"model moonshotai/Kimi-K9 is not in the catalogue"):
        catalogue_model("moonshotai/Kimi-K9")


def test_mixed_batches_take_head_counts_from_the_catalogue(tmp_path):
    text = "prefill_chunk,kv_prefill,n_decode,kv_decode,latency_us\n512,0,0,0,50\n"
    known = read(write(tmp_path, "attention_mixed_rtxpro6000_qwen2.5-7b_tp1_lss.csv", text))
    assert predict(known, load_profile("rtx-pro-6000")).seconds[0] > 0
    unknown = read(write(tmp_path, "attention_mixed_rtxpro6000_falcon-9b_tp1_lss.csv", text))
    assert dict(predict(unknown, load_profile("rtx-pro-6000")).unmodelled) == {
        "model falcon-9b is not in the catalogue": 1
    }


def test_a_folder_with_a_stranger_is_refused(tmp_path):
    write(tmp_path, "gemm_h200_bf16_vllm0.24.csv", GEMM)
    write(tmp_path, "notes.csv", "a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"notes\.csv: its columns \(a, b\) are those of no kind"):
        read_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no CSV files"):
        read_folder(tmp_path / "empty")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_folder(tmp_path / "nowhere")


DECODE = "batch_size,kv_len,num_heads,num_kv_heads,head_dim,latency_us\n1,127,32,8,128,11\n"
PAGED = (
    "is_prefill,batch_size,prefill_chunk_size,kv_cache_size,latency_us,heads_per_rank,kv_heads_per_rank\n"
    "True,1,128,0,50,32,8\n"
)
LAYERS = "model,tp,layer,m,n,k,latency_us\nx,1,qkv_proj,16,6144,4096,20\nx,1,rope,16,,,5\n"
SERIES = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n1.0,9069.0,166.0,9,0,0.0\n"


@pytest.mark.parametrize(
    ("name", "text", "kind", "device", "dtype", "source"),
    [
        ("my numbers (H100).csv", GEMM, "gemm", "", "bf16", "vllm"),
        ("my_numbers_h100.csv", GEMM, "gemm", "h100", "bf16", "vllm"),
        ("vllm0.24_fp8_h200_matmuls.csv", GEMM, "gemm", "h200", "fp8", "vllm"),
        ("gemm_fp8_h200_trtllm1.3.csv", GEMM, "gemm", "h200", "fp8", "trtllm"),
        ("gemm_h200_bf16_vllm0.24.csv", DECODE, "attention_decode", "h200", "bf16", "vllm"),  # the name is wrong
        ("times_h100_pcie.csv", DECODE, "attention_decode", "h100pcie", "bf16", "vllm"),
        ("attn_h100_llama70b_tp4_lss.csv", PAGED, "attention_paged", "h100", "bf16", "lss"),
        ("attn_v6e_llama3.1-8b.csv", PAGED, "tpu_attention", "v6e", "bf16", ""),
        ("ops_h100_llama3.1-8b_vllm0.24.csv", LAYERS, "layers", "h100", "bf16", "vllm"),
        ("series_tp1_llama3.1-8b_h100_vllm0.24.csv", SERIES, "e2e_timeseries", "h100", "bf16", "vllm"),
    ],
)
def test_columns_say_the_kind_and_the_name_only_what_they_lack(tmp_path, name, text, kind, device, dtype, source):
    m = read(write(tmp_path, name, text))
    assert (m.kind, m.device, m.dtype, m.source) == (kind, device, dtype, source)


def test_what_neither_columns_nor_name_say_is_assumed_aloud(tmp_path):
    (note,) = read(write(tmp_path, "my_numbers_h100.csv", GEMM)).notes
    assert "bf16 and vLLM's kernels assumed" in note
    assert read(write(tmp_path, "gemm_h100_bf16_vllm0.24.csv", GEMM)).notes == ()


def test_columns_that_need_a_name_ask_for_what_it_should_say(tmp_path):
    with pytest.raises(ValueError, match="its columns are those of mla; let its name also say prefill or decode"):
        read(write(tmp_path, "x_h200.csv", "batch_size,isl,step,num_heads,tp_size,latency_us\n1,1,1,1,1,1\n"))


def test_what_is_not_understood_is_named_and_counted_and_the_rest_is_read(tmp_path):
    bad = GEMM + "64,4096,4096,fast\n64,4096\n64,0,4096,9\n64,4096,4096,-2\n64,4096,4096,-3\n"
    write(tmp_path, "gemm_h200_bf16_vllm0.24.csv", bad)
    write(tmp_path, "notes.csv", "a,b\n1,2\n")
    (tmp_path / "photo.csv").write_bytes(b"\x89PNG\xff\xfe\x00")
    found = survey(tmp_path)
    (m,) = found.measurements
    assert m.columns["m"].tolist() == [1, 64]
    assert m.measured_s is not None
    assert m.measured_s.tolist() == pytest.approx([12.5e-6, 14e-6])
    assert dict(m.refused) == {
        "latency_us must be a number; got 'fast' (line 4)": 1,
        "the line has 2 cells, the header 4 (line 5)": 1,
        "n must be at least 1 (line 6)": 1,
        "latency_us must be positive (line 7 and others)": 2,
    }
    assert set(found.not_understood) == {"notes.csv", "photo.csv"}
    assert "no text in UTF-8" in found.not_understood["photo.csv"]
    assert sum(sum(each.refused.values()) for each in found.measurements) == 5
    assert len(found.left_out) == 6
    with pytest.raises(ValueError, match="line 5 has 2 cells, the header 4"):
        survey(tmp_path, strict=True)


def test_a_cell_with_braces_is_quoted_as_it_is(tmp_path):
    file = write(tmp_path, "gemm_h200_bf16_vllm0.24.csv", GEMM + "64,4096,4096,{fast}\n")
    with pytest.raises(ValueError, match=r"latency_us in line 4 must be a number; got '\{fast\}'"):
        read(file)


def test_a_file_of_bad_rows_alone_is_not_understood(tmp_path):
    write(tmp_path, "gemm_h200_bf16_vllm0.24.csv", "m,n,k,latency_us\n0,1,1,5\n")
    assert "no row is left: m must be at least 1" in survey(tmp_path).not_understood["gemm_h200_bf16_vllm0.24.csv"]


def test_rows_without_a_model_are_nan_and_counted_by_reason(tmp_path):
    text = "prefill_chunk,kv_prefill,n_decode,kv_decode,latency_us\n128,0,4,127,11\n0,0,0,0,9\n"
    name = "attention_mixed_rtxpro6000_llama3.1-8b_tp1_lss.csv"
    result = predict(read(write(tmp_path, name, text)), load_profile("rtx-pro-6000"))
    assert np.isfinite(result.seconds).tolist() == [True, False]
    assert dict(result.unmodelled) == {"an empty batch": 1}


def test_a_format_the_device_lacks_is_counted_with_the_reason(tmp_path):
    result = predict(read(write(tmp_path, "gemm_a100_fp8_vllm0.24.csv", GEMM)), load_profile("a100"))
    assert np.isnan(result.seconds).all()
    assert list(result.unmodelled.values()) == [2]
    assert "no fp8 tensor cores" in next(iter(result.unmodelled))


def test_end_to_end_files_are_read_and_not_priced(tmp_path):
    text = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n1.0,9069.0,166.0,9,0,0.0\n"
    m = read(write(tmp_path, "e2e_timeseries_rtxpro6000_llama3.1-8b_tp1_vllm0.19.csv", text))
    assert m.columns["running"].tolist() == [9]
    assert not is_kernel_level(m)
    with pytest.raises(ValueError, match="are simulated"):
        predict(m, load_profile("rtx-pro-6000"))


@pytest.mark.slow(reason="whole tables of measurements")
def test_every_public_file_is_understood(shared):
    kinds = {m.kind for m in read_folder(shared / "measured2")}
    assert {"gemm", "attention_mixed", "e2e_silicon_agg", "e2e_requests", "iteration", "tpu_layers"} <= kinds


STATED = Path(__file__).resolve().parents[3] / "docs" / "validation" / "files.csv"


def stated_means_pct() -> dict[str, float]:
    """The mean error of each file with latencies is the one that the table beside the page on validation states."""
    with STATED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {row["file"]: float(row["mape_pct"]) for row in rows if row["quantity"] == "latency" and row["mape_pct"]}


@pytest.mark.slow(reason="whole tables of measurements")
def test_profiles_reach_on_every_public_file_what_the_documents_state(shared):
    stated = stated_means_pct()
    files = {
        m.path.name: m
        for folder in ("measured2", "measured3")
        for m in survey(shared / folder).measurements
        if is_kernel_level(m)
    }
    priced = set()
    for name, m in files.items():
        assert m.measured_s is not None
        seconds = predict(m, load_profile(catalogue_name(m.device))).seconds
        if np.isfinite(seconds).any():
            priced.add(name)
            assert errors(seconds, m.measured_s).mape_pct == pytest.approx(stated[name], rel=0.02, abs=0.1), name
    assert priced == set(stated)


@pytest.mark.slow(reason="whole tables of measurements")
@pytest.mark.parametrize(
    ("source", "target", "file"),
    [
        ("a100-80gb-sxm", "h100-sxm", "gemm_h100_bf16_vllm0.24.csv"),
        ("h100-sxm", "h200", "gemm_h200_bf16_vllm0.24.csv"),
        ("l40s", "rtx-pro-6000", "gemm_rtxpro6000_bf16_vllm0.24.csv"),
    ],
)
def test_gemm_transfers_to_another_device_by_its_datasheet(shared, source, target, file):
    m = read(shared / "measured2" / file)
    assert m.measured_s is not None
    profile = borrow(load_profile(source), load_profile(target).datasheet)
    # The figure to reach is 18; L40S to RTX PRO, across a generation, stays at 18.2.
    assert errors(predict(m, profile).seconds, m.measured_s).mape_pct <= 18.5
