"""Tables of a user's own: recognised by columns under other names and units, fitted, validated, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from hwmodels.kernels.families import COLLECTIVE
from hwmodels.kernels.gemm import gemm_s
from hwmodels.measured import Measurement, Said, predict, read_own, survey
from hwmodels.profiles import load_profile, write_profile
from sim.cli import build_app
from sim.errors import RooftraceError
from sim.validation.files import validate

H200 = load_profile("h200")
WIDTHS = [
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
    (2048, 7168),
]


def gemms(**changes: object) -> pd.DataFrame:
    """Products as H200's fitted kernel times them, under names of their own."""
    m = np.array([1, 4, 16, 64, 128, 256, 512, 1024, 4096, 8192])
    rows = np.array([(each, n, k) for n, k in WIDTHS for each in m])
    params = H200.get("gemm", ("bf16/vllm",))
    seconds = gemm_s(params, H200.datasheet, *rows.T, weight_copies=6.0)
    return pd.DataFrame({"M": rows[:, 0], "N": rows[:, 1], "K": rows[:, 2], "Latency (ms)": 1e3 * seconds} | changes)


def saved(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return path


def measured(folder: Path, text: str, **options: object) -> list[Measurement]:
    (folder / "mine.csv").write_text(text)
    return read_own(folder / "mine.csv", **options)  # type: ignore[arg-type]


def run(*arguments: object):
    return CliRunner().invoke(build_app(), [str(each) for each in arguments])


def test_csv_and_parquet_give_the_same_numbers(tmp_path):
    frame = gemms(gpu="H200")
    (a,) = read_own(saved(frame, tmp_path / "mine.csv"))
    (b,) = read_own(saved(frame, tmp_path / "mine.parquet"))
    assert (
        (a.kind, a.device, a.dtype, a.source)
        == (b.kind, b.device, b.dtype, b.source)
        == ("gemm", "h200", "bf16", "vllm")
    )
    assert a.measured_s.tolist() == b.measured_s.tolist()
    assert all(a.columns[name].tolist() == b.columns[name].tolist() for name in "mnk")
    assert a.notes == ("read as a GEMM table by its columns; nothing says other: vLLM's kernels and bf16 assumed",)


@pytest.mark.parametrize(
    ("column", "scale"), [("latency_us", 1e6), ("time_ms", 1e3), ("Duration [s]", 1.0), ("elapsed_ns", 1e9)]
)
def test_times_are_in_the_unit_that_their_name_says(tmp_path, column, scale):
    (found,) = measured(tmp_path, f"m,n,k,{column}\n64,4096,4096,{20e-6 * scale!r}\n")
    assert found.measured_s == pytest.approx([20e-6], rel=1e-12)


def fitted_and_validated(frame: pd.DataFrame, folder: Path, family: str, variant: str) -> tuple[float, float]:
    """Held-back error of a fit to *frame*, and the error of the profile on the table itself, both in percent."""
    table, profile = saved(frame, folder / "mine.parquet"), folder / "mine.toml"
    fitted = run("fit", "--measured", table, "--device", "h200", "--out", profile)
    assert fitted.exit_code == 0, fitted.output
    assert "the file says no device: h200, as given beside it" in fitted.output
    kernel = load_profile(str(profile)).kernel(family, (variant,))
    assert kernel is not None
    assert (kernel.provenance.files, kernel.provenance.points) == (("mine.parquet",), len(frame))
    validated = run("validate", "--measured", table, "--hardware", profile, "--json")
    assert validated.exit_code == 0, validated.output
    (line,) = json.loads(validated.stdout)["files"]
    return kernel.provenance.held_mape_pct, line["mape_pct"]


def test_a_fit_to_a_synthetic_table_recovers_it_and_validation_agrees(tmp_path):
    devices, size = (each.ravel() for each in np.meshgrid([2, 4, 8], 2.0 ** np.arange(-3, 10)))
    params = H200.get("collective", ("all_reduce/nccl",))
    seconds = COLLECTIVE.seconds(
        params,
        H200.datasheet,
        {
            "kind": "all_reduce",
            "message_bytes": size * 2**20,
            "devices": devices,
            "link_bytes_per_s": H200.datasheet.link_bytes_per_s,
        },
    )
    scatter = 1.0 + 0.02 * np.random.default_rng(0).standard_normal(len(size))
    frame = pd.DataFrame(
        {"collective": "AllReduce", "gpus": devices, "size_mib": size, "time_ms": 1e3 * seconds * scatter}
    )
    held, own = fitted_and_validated(frame, tmp_path, "collective", "all_reduce/nccl")
    assert held < 4.0  # of which the scatter is 1.6
    assert own < 3.0


@pytest.mark.slow(reason="a fit by many simulations")
def test_a_fit_to_synthetic_products_recovers_them(tmp_path):
    frame = gemms()
    frame["Latency (ms)"] *= 1.0 + 0.02 * np.random.default_rng(0).standard_normal(len(frame))
    held, own = fitted_and_validated(frame, tmp_path, "gemm", "bf16/vllm")
    assert held < 4.0
    assert own < 3.0


def test_lines_of_several_devices_and_formats_are_measurements_of_their_own(tmp_path):
    text = "gpu,dtype,m,n,k,time_us\nH100,bf16,1,64,64,9\nA100,float16,1,64,64,9\nH100,fp8,1,64,64,9\nH100,bf16,2,64,64,9\n"
    several = measured(tmp_path, text)
    assert several[0].path.name == "mine.csv (a100-80gb-sxm, fp16)"
    found = {(m.device, m.dtype): m.columns["m"].tolist() for m in several}
    assert found == {("h100-sxm", "bf16"): [1, 2], ("a100-80gb-sxm", "bf16"): [1], ("h100-sxm", "fp8"): [1]}


def test_what_is_said_beside_a_table_is_for_what_it_does_not_say(tmp_path):
    said = Said(device="l40s", dtype="fp8")
    (beside,) = measured(tmp_path, "m,n,k,time_us\n1,64,64,9\n", said=said)
    assert (beside.device, beside.dtype) == ("l40s", "fp8")
    (own,) = measured(tmp_path, "device,dtype,m,n,k,time_us\nh200,bf16,1,64,64,9\n", said=said)
    assert (own.device, own.dtype) == ("h200", "bf16")
    (tmp_path / "products_fp8.csv").write_text("m,n,k,latency_us\n1,64,64,9\n")
    (usual,) = [m for m in survey(tmp_path, said=Said(device="h200")).measurements if m.path.stem == "products_fp8"]
    assert (usual.device, usual.dtype) == ("h200", "fp8")


def test_attention_is_told_from_its_lengths(tmp_path):
    shapes = pd.DataFrame(
        {"batch_size": [1, 16], "kv_len": [999, 4000], "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    )
    usual = shapes.assign(latency_us=[8.0, 60.0])
    saved(usual, tmp_path / "attention_decode_h200_bf16_vllm0.24.csv")
    names = {
        "batch_size": "bs",
        "kv_len": "context_len",
        "num_heads": "heads",
        "num_kv_heads": "kv_heads",
        "latency_us": "time_us",
    }
    saved(usual.rename(columns=names).assign(gpu="H200"), tmp_path / "mine.parquet")
    by_name, by_columns = validate(tmp_path)
    assert np.isfinite(by_name.predicted).all()
    assert by_columns.predicted.tolist() == by_name.predicted.tolist()
    (prefill,) = measured(tmp_path, "bs,seq_len,past_len,heads,kv_heads,head_dim,time_us\n1,64,128,32,8,128,9\n")
    assert (prefill.kind, prefill.columns["past_len"].tolist()) == ("attention_prefill", [128])


def test_collectives_and_experts(tmp_path):
    (links,) = measured(tmp_path, "collective,gpus,message_mib,time_us\nAllReduce,8,1,30\nall-gather,8,64,300\n")
    assert (links.kind, links.source) == ("collectives_nccl", "nccl")
    assert links.columns["collective"].tolist() == ["all_reduce", "all_gather"]
    assert links.columns["message_bytes"].tolist() == [2.0**20, 2.0**26]
    header = "tokens,hidden,intermediate_size,top_k,experts,tp,dtype,time_us\n"
    (experts,) = measured(tmp_path, header + "64,4096,14336,2,8,2,bf16,200\n")
    assert (experts.kind, experts.columns["moe_dtype"].tolist()) == ("moe", ["bfloat16"])
    assert (experts.columns["moe_tp_size"].tolist(), experts.columns["moe_ep_size"].tolist()) == ([2], [1])


@pytest.mark.parametrize("word", ["fp8_block", "nvfp4", "int4", "int4_g32", "int4_fp8", "w4afp8", "mxfp4", "fp16"])
def test_experts_of_every_format_are_predicted(tmp_path, word):
    header = "gpu,dtype,tokens,hidden,inter_size,top_k,experts,ep,time_us\n"
    (tmp_path / "mine.csv").write_text(header + f"b200,{word},64,7168,2048,8,256,8,200\n")
    (one,) = validate(tmp_path / "mine.csv")
    assert np.isfinite(one.predicted).all()


@pytest.mark.parametrize(
    ("header", "good", "bad", "reason"),
    [
        (
            "bs,kv_len,heads,kv_heads,head_dim,time_us",
            "1,64,32,8,128,9",
            "1,64,32,7,128,9",
            "num_heads must be a multiple",
        ),
        (
            "collective,gpus,message_mib,time_us",
            "allreduce,8,1,30",
            "allreduce,1,1,30",
            "a collective takes at least 2",
        ),
        (
            "tokens,hidden,inter_size,topk,experts,ep,time_us",
            "1,64,64,2,8,2,9",
            "1,64,64,9,8,2,9",
            "cannot choose more",
        ),
        (
            "tokens,hidden,inter_size,topk,experts,ep,time_us",
            "1,64,64,2,8,2,9",
            "1,64,64,2,8,3,9",
            "must divide num_experts",
        ),
        (
            "tokens,hidden,inter_size,topk,experts,tp,time_us",
            "1,64,64,2,8,2,9",
            "1,64,64,2,8,3,9",
            "must divide inter_size",
        ),
    ],
)
def test_a_line_whose_cells_contradict_each_other_is_left_out_and_spoils_no_other(tmp_path, header, good, bad, reason):
    (tmp_path / "mine.csv").write_text(f"gpu,{header}\nh100,{good}\nh200,{good}\nh100,{bad}\n")
    found = survey(tmp_path)
    assert [len(m) for m in found.measurements] == [1, 1]
    (sentence,) = found.left_out
    assert sentence.startswith("mine.csv: 1 of 3 rows refused: ")
    assert reason in sentence
    with pytest.raises(RooftraceError, match=reason):
        validate(tmp_path)
    for m in found.measurements:
        assert np.isfinite(predict(m, load_profile(m.device)).seconds).all()


def test_a_serving_table_is_simulated(tmp_path):
    rows = "model,gpu,tp,prompt_tokens,output_tokens,clients,ttft_s,tpot_ms,dtype\n"
    (tmp_path / "ours.csv").write_text(rows + "llama-3.1-8b,H200,1,256,16,2,0.02,5.0,bf16\n")
    result = run("validate", "--measured", tmp_path / "ours.csv")
    assert result.exit_code == 0, result.output
    lines = [line.split()[1:4] for line in result.output.splitlines() if line.strip().startswith("ours, ")]
    assert lines == [["ttft", "1", "0"], ["tpot", "1", "0"]]
    assert "vLLM and the protocol genai-perf assumed" in result.output
    ttft, tpot = validate(tmp_path)
    assert (ttft.measured.tolist(), tpot.measured.tolist()) == ([0.02], [0.005])
    assert 0.1 < ttft.predicted[0] / 0.02 < 10
    assert 0.3 < tpot.predicted[0] / 0.005 < 3


def test_a_serving_table_may_name_its_protocol(tmp_path):
    rows = "model,gpu,isl,osl,concurrency,ttft_ms,tpot_ms,protocol\n"
    row = "llama-3.1-8b,h200,256,16,2,20,5,"
    (tmp_path / "ours.csv").write_text(f"{rows}{row}inferencex\n{row}genai-perf\n")
    ttft, _ = validate(tmp_path)
    assert np.isfinite(ttft.predicted).tolist() == [True, True]
    assert ttft.predicted[0] != ttft.predicted[1]  # lengths of the one vary


def test_a_protocol_that_is_not_known_is_left_out_and_counted(tmp_path):
    rows = "model,gpu,isl,osl,concurrency,ttft_ms,tpot_ms,protocol\n"
    row = "llama-3.1-8b,h200,256,16,2,20,5,"
    table = tmp_path / "ours.csv"
    table.write_text(f"{rows}{row}genai-perf\n{row}inferencx\n")
    result = run("validate", "--measured", table)
    assert result.exit_code == 3, result.output
    said = " ".join(result.output.split())
    assert "ours.csv: 1 of 2 rows refused: protocol: 'inferencx' is not a protocol; did you mean inferencex" in said
    assert "1 row left out (exit code 3)" in said
    strict = run("validate", "--strict", "--measured", table)
    assert strict.exit_code == 2, strict.output
    assert "'inferencx' is not a protocol" in " ".join(strict.output.split())
    table.write_text(f"{rows}{row}wrk\n")
    nothing = run("validate", "--measured", table)
    assert nothing.exit_code == 2, nothing.output
    assert "no row is left: protocol: 'wrk' is not a protocol" in " ".join(nothing.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m,n,latency_us\n1,2,3\n", "mine.csv: its columns fit no kind of measurement: for a GEMM table it lacks k"),
        (
            "m,n,k,latency\n1,2,3,4\n",
            "for a GEMM table it has latency without a unit (name it latency_us, latency_ms or latency_s)",
        ),
        (
            "batch,heads,kv_heads,head_dim,time_us\n1,32,8,128,12\n",
            "for a prefill attention table it lacks seq_len; for a decode attention table it lacks kv_len",
        ),
        ("m,n,k,time_us,watts\n1,2,3,4,5\n", "it has the unknown column watts (meta.watts would be passed over)"),
        ("m,n,k,time_us,time_ms\n1,2,3,4,5\n", "it says the same with time_us and time_ms (keep one)"),
        ("m,n,k,time_us\n1,2,3,-4\n", "time_us must be positive"),
        ("m,n,k,time_us\n0,2,3,4\n", "m must be at least 1"),
        ("m,n,k,time_us\n1,2,wide,4\n", "k must be a number; got 'wide'"),
        ("m,n,k,time_us,dtype\n1,2,3,4,bf17\n", "'bf17' is not a number format; give one of fp32, bf16"),
        ("m,n,k,time_us,gpu\n1,2,3,4,h201\n", "unknown hardware 'h201'; nearest valid names: h20, h200"),
        ("m,n,k,time_us,backend\n1,2,3,4,cublas\n", "'cublas' is not software whose kernels are known; give one of vllm"),
        ("m,n,k,time_us\n1,2,3\n", "a line has not the 4 cells of the header; truncated file?"),
        ("model,gpu,isl,osl,ttft_s,tpot_s\nllama-3.1-8b,h200,1,2,3,4\n", "for a serving table it lacks concurrency"),
        ("a,b\n1,2\n", "are those of no kind of measurement; a table of one's own is GEMM: m, n, k, latency_us; or"),
    ],
)  # fmt: skip
def test_a_near_miss_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "mine.csv").write_text(text)
    for command in (("validate", "--hardware", "h200"), ("fit", "--device", "h200", "--out", tmp_path / "p.toml")):
        result = run(*command, "--measured", tmp_path / "mine.csv")
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
        assert not (tmp_path / "p.toml").exists()


def test_rows_that_do_not_fit_are_counted_and_what_begins_with_meta_is_passed_over(tmp_path):
    text = "m,n,k,time_us,meta.watts\n1,64,64,9,700\n1,64,64,-9,700\n1,64,64,0,x\n"
    (found,) = measured(tmp_path, text, strict=False)
    assert len(found) == 1
    assert found.refused == {"time_us must be positive (line 3 and others)": 2}
    with pytest.raises(ValueError, match="time_us must be positive; see line 3"):
        measured(tmp_path, text)


def test_where_nothing_can_be_read_or_written_is_said_before_the_work(tmp_path):
    table = saved(gemms(gpu="H200"), tmp_path / "mine.csv")
    for arguments, message in (
        (("validate", "--measured", tmp_path / "none"), "none does not exist"),
        (
            ("fit", "--measured", table, "--device", "h200", "--out", tmp_path / "no" / "p.toml"),
            "its folder does not exist",
        ),
        (("validate", "--measured", table, "--plots", table / "x"), "mine.csv is a file, not a folder"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in "".join(result.stderr.split("\n"))
        assert "held" not in result.stdout


def test_a_file_that_is_no_parquet_says_so(tmp_path):
    (tmp_path / "mine.parquet").write_text("m,n,k,time_us\n")
    result = run("validate", "--measured", tmp_path / "mine.parquet")
    assert (result.exit_code, "the file is no Parquet" in result.output) == (2, True)


def test_a_format_that_is_not_known_is_refused_beside_the_table_too(tmp_path):
    saved(gemms(), tmp_path / "mine.csv")
    result = run("validate", "--measured", tmp_path / "mine.csv", "--hardware", "h200", "--dtype", "bf17")
    assert (result.exit_code, "'bf17' is not a number format" in result.output) == (2, True)


def links() -> pd.DataFrame:
    """Times of a collective over three widths and thirteen sizes: a start, and bytes over a bandwidth."""
    devices, size = (each.ravel() for each in np.meshgrid([2, 4, 8], 2.0 ** np.arange(-3, 10)))
    time_us = 8.0 + devices + size * 2**20 * 2 * (devices - 1) / devices / 300e3
    return pd.DataFrame({"collective": "AllReduce", "gpus": devices, "size_mib": size, "time_us": time_us})


def entries(profile: Path) -> dict[str, str]:
    """The text of each kernel of a profile, by family and variant."""
    kernels = profile.read_text().split("\n[[kernel]]\n")[1:]
    return {" ".join(line.split('"')[1] for line in text.splitlines()[:2]): text.rstrip("\n") for text in kernels}


def test_only_refits_some_families_and_leaves_the_others_as_they_are(tmp_path):
    profile, name = tmp_path / "mine.toml", "collective all_reduce/nccl"
    write_profile(H200, profile)
    before = entries(profile)
    saved(links(), tmp_path / "links.csv")
    fit = ("fit", "--device", "h200", "--out", profile, "--max-points", 50, "--only", "collective")
    changed = run(*fit, "--measured", tmp_path / "links.csv")
    assert changed.exit_code == 0, changed.output
    after = entries(profile)
    assert list(after) == list(before)
    assert [each for each in after if after[each] != before[each]] == [name]
    assert "links.csv" in after[name]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("gem", "--only gem: there is no such family of kernels; did you mean gemm?"),
        ("gemm", "the measurements hold nothing of gemm"),
        (",", "--only names families of kernels; there are gemm"),
    ],
)
def test_only_is_refused_in_a_sentence(tmp_path, only, message):
    profile = tmp_path / "mine.toml"
    write_profile(H200, profile)
    text = profile.read_text()
    saved(links(), tmp_path / "links.csv")
    result = run("fit", "--device", "h200", "--out", profile, "--measured", tmp_path / "links.csv", "--only", only)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert profile.read_text() == text


def test_only_needs_a_profile_of_the_device(tmp_path):
    saved(links(), tmp_path / "links.csv")
    fit = ("fit", "--measured", tmp_path / "links.csv", "--out", tmp_path / "mine.toml", "--only", "collective")
    assert "does not exist; fit without --only first" in " ".join(run(*fit, "--device", "h200").output.split())
    write_profile(H200, tmp_path / "mine.toml")
    assert "is a profile of h200; got --device l40s" in " ".join(run(*fit, "--device", "l40s").output.split())


def test_a_table_too_short_to_fit_says_so(tmp_path):
    (tmp_path / "few.csv").write_text("m,n,k,time_us\n1,64,64,9\n2,64,64,9\n")
    result = run("fit", "--measured", tmp_path / "few.csv", "--device", "h200", "--out", tmp_path / "mine.toml")
    assert result.exit_code == 2
    assert "nothing can be fitted: too few points for gemm bf16/vllm (2 points)" in " ".join(result.output.split())


def test_a_serving_table_is_described_once_and_takes_names_as_drivers_print_them(tmp_path):
    rows = "llama-3.1-8b,NVIDIA H200,4,512,64,0.05,0.008\nllama-3.1-8b,NVIDIA H100 80GB HBM3,4,512,64,0.05,0.01\n"
    (tmp_path / "mine.csv").write_text("model,gpu,concurrency,isl,osl,ttft_s,tpot_s\n" + rows)
    result = run("validate", "--measured", tmp_path / "mine.csv")
    assert result.exit_code == 0, result.output
    assert result.output.count("read as a serving table by its columns") == 1
