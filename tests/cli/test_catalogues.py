import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from tests.sources import PACKAGES

APP = build_app()
ROOT = Path(__file__).parents[2]


def rooftrace(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("command", "names"), [("models", ["llama-3.1-8b", "gpt2-xl"]), ("hardware", ["h100-sxm", "l40s"])]
)
def test_a_catalogue_lists_names_with_sources(command, names):
    text = rooftrace(command, *(["--sources"] if command == "hardware" else []))
    assert text.exit_code == 0, text.output
    assert all(name in text.stdout for name in names)
    assert "Source" in text.stdout
    entries = json.loads(rooftrace(command, "--json").stdout)
    assert set(names) <= {entry["name"] for entry in entries}
    assert all(entry.get("source") or entry.get("sources") or entry.get("refused") for entry in entries)


def test_the_list_of_devices_fits_a_hundred_columns():
    lines = rooftrace("hardware").stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("Source" in line for line in lines)


@pytest.mark.parametrize(
    ("command", "name", "shown"), [("models", "llama-3.1-8b", "8,030,261,248"), ("hardware", "h100-sxm", "whitepaper")]
)
def test_one_entry_is_shown_in_full(command, name, shown):
    assert shown in rooftrace(command, "show", name).stdout


def test_a_hybrid_model_is_shown_with_the_kinds_of_its_layers():
    shown = rooftrace("models", "show", "qwen3.5-397b-a17b").stdout
    assert "45 linear, 15 full" in shown
    assert "40 window, 8 full" in rooftrace("models", "show", "gemma-3-12b").stdout


@pytest.mark.parametrize(("command", "name"), [("models", "deepseek-r1"), ("hardware", "rtx-4090")])
def test_one_entry_is_shown_as_json_wherever_the_option_stands(command, name):
    behind = rooftrace(command, "show", name, "--json")
    assert json.loads(behind.stdout)["name"] == name
    assert rooftrace(command, "--json", "show", name).stdout == behind.stdout


def test_a_model_is_shown_with_its_formats():
    shown = json.loads(rooftrace("models", "show", "gpt-oss-20b", "--json").stdout)
    assert (shown["attention_precision"], shown["expert_precision"], shown["kv_precision"]) == ("bf16", "mxfp4", "bf16")
    assert "fp8_block" in rooftrace("models", "show", "deepseek-r1").stdout


def test_a_device_is_shown_with_what_prices_its_kernels():
    measured, lent = (rooftrace("hardware", "show", name).stdout for name in ("b200", "b300"))
    assert "parameter sets fitted to measurements of the device: " in " ".join(measured.split())
    assert "borrowed from b200," in " ".join(lent.split())
    assert all(entry["sources"].get("host.bytes_per_s") for entry in json.loads(rooftrace("hardware", "--json").stdout)
               if entry["numbers"]["host.bytes_per_s"])  # fmt: skip


def test_a_datasheet_that_nobody_lends_to_is_shown_all_the_same(tmp_path):
    mine = tmp_path / "npu.toml"
    mine.write_text(
        """[npu]
title = "An NPU"
vendor = "Somebody"
peak = { bf16 = [1e14, "test"] }
memory_bytes = [1e10, "test"]
hbm_bytes_per_s = [1e12, "test"]
n_cores = [8, "test"]
link = { kind = "PCIe", latency_s = [1e-6, "test"], bytes_per_s = [3e10, "test"] }
network = { kind = "Ethernet", latency_s = [5e-6, "test"], bytes_per_s = [1e10, "test"] }
devices_per_node = [1, "test"]
tdp_w = [100, "test"]
"""
    )
    shown = rooftrace("hardware", "show", mine)
    assert shown.exit_code == 0, shown.output
    assert "no calibrated device is of a kind with those from Somebody" in " ".join(shown.stdout.split())


def test_two_profiles_of_one_device_are_told_apart_by_their_files(tmp_path):
    mine = tmp_path / "m.toml"
    mine.write_text((PACKAGES / "hwmodels" / "profiles" / "l40s.toml").read_text())
    assert "m.toml" in rooftrace("hardware", "diff", mine, "l40s").stdout
    assert "first  " in rooftrace("hardware", "diff", mine, mine).stdout
    assert "parameter sets fitted to measurements of the device: 11 (" in " ".join(
        rooftrace("hardware", "show", mine).stdout.split()
    )


@pytest.mark.parametrize("command", ["models", "hardware"])
def test_an_unknown_entry_is_refused_with_the_nearest(command):
    result = rooftrace(command, "show", "h100-sxn" if command == "hardware" else "llama-3.1-8c")
    assert result.exit_code == 2
    assert ("h100-sxm" if command == "hardware" else "llama-3.1-8b") in result.stderr
    assert "Traceback" not in result.output


def test_version_is_printed():
    assert rooftrace("--version").stdout.strip().count(".") == 2


def test_trace_describe_gives_counts_and_lengths():
    file = ROOT / "examples" / "tiny-trace.csv"
    found = json.loads(rooftrace("trace", "describe", file, "--json").stdout)
    assert found["requests"] == 40
    assert found["prompt_tokens"]["p99"] >= found["prompt_tokens"]["median"]
    text = rooftrace("trace", "describe", file).stdout
    assert "prompt_tokens" in text
    assert "p99" in text


def test_trace_convert_writes_the_plain_format(tmp_path):
    source = tmp_path / "azure.csv"
    source.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    out = tmp_path / "plain.csv"
    assert rooftrace("trace", "convert", source, out).exit_code == 0
    assert out.read_text().splitlines() == [
        "arrival_s,prompt_tokens,output_tokens",
        "0.000000000,374,44",
        "4.314579000,396,109",
    ]


def test_trace_convert_replaces_a_file_only_when_told(tmp_path):
    source = ROOT / "examples" / "tiny-trace.csv"
    out = tmp_path / "out.csv"
    out.write_text("mine")
    refused = rooftrace("trace", "convert", source, out)
    assert refused.exit_code == 2
    assert "--overwrite" in refused.stderr
    assert out.read_text() == "mine"
    assert rooftrace("trace", "convert", source, out, "--limit", "5", "--overwrite").exit_code == 0
    assert len(out.read_text().splitlines()) == 6


def test_trace_reuse_gives_hit_rates_by_size_and_a_picture(tmp_path):
    trace = tmp_path / "shared.csv"
    rows = ["0,8,1,1 2", "1,8,1,3 4", "2,12,1,1 2 5", "3,8,1,6 7"]
    trace.write_text("arrival_s,prompt_tokens,output_tokens,prefix_blocks_4\n" + "\n".join(rows) + "\n")
    found = json.loads(rooftrace("trace", "reuse", trace, "--json", "--model", "llama-2-7b").stdout)
    assert found["best_hit_rate"] == pytest.approx(8 / 36)
    assert found["never_hit"] == pytest.approx(28 / 36)
    # 1 and 2 come back after 3 and 4, beside 5: five blocks.
    assert {size["blocks"]: size["hit_rate"] for size in found["sizes"]} == pytest.approx({1: 0, 3: 0, 5: 8 / 36})
    assert found["sizes"][-1]["gb"] == pytest.approx(20 * 2 * 32 * 4096 * 2 / 1e9)
    picture = tmp_path / "deep" / "reuse.png"
    shown = rooftrace("trace", "reuse", trace, "--out", picture)
    assert "77.8 %" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_trace_reuse_replays_eviction_policies_beside(tmp_path):
    trace = tmp_path / "shared.csv"
    rows = [f"{i},8,1,{a} {a + 1}" for i, a in enumerate([10, 20, 30, 10, 20, 30])]
    trace.write_text("arrival_s,prompt_tokens,output_tokens,prefix_blocks_4\n" + "\n".join(rows) + "\n")
    asked = ("--eviction", "lru", "--eviction", "belady")
    found = json.loads(rooftrace("trace", "reuse", trace, "--json", *asked).stdout)
    by_size = {size["blocks"]: (size["hit_rate_lru"], size["hit_rate_belady"]) for size in found["sizes"]}
    # With room for three blocks: one of 10's two stays until they come again, and then one of 30's.
    assert by_size[3] == pytest.approx((0, 8 / 48))
    assert by_size[6] == pytest.approx((0.5, 0.5))
    shown = rooftrace("trace", "reuse", trace, *asked, "--out", tmp_path / "x.png").stdout
    assert "16.7" in shown
    refused = rooftrace("trace", "reuse", trace, "--eviction", "lifo", "--json")
    assert refused.exit_code == 2
    assert "--eviction" in refused.stderr


def test_trace_reuse_takes_sessions_and_says_how(tmp_path):
    lines = ROOT / "examples" / "agents.jsonl"
    found = json.loads(rooftrace("trace", "reuse", lines, "--sessions-per-s", "0.1", "--json").stdout)
    assert 0.5 < found["best_hit_rate"] < 1
    parquet = tmp_path / "s.parquet"
    pd.read_json(lines, lines=True).to_parquet(parquet)
    refused = rooftrace("trace", "reuse", parquet)
    assert refused.exit_code == 2
    assert "--sessions-per-s" in refused.stderr


def test_trace_reuse_needs_block_ids(tmp_path):
    result = rooftrace("trace", "reuse", ROOT / "examples" / "tiny-trace.csv", "--out", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "does not say which prompts share blocks" in result.stderr
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("command", ["describe", "convert"])
@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", "arrival_s,prompt_tokens,output_tokens\n0,-1,1\n"])
def test_a_bad_trace_is_refused_and_nothing_written(tmp_path, command, content):
    source, out = tmp_path / "bad.csv", tmp_path / "out.csv"
    if content is not None:
        source.write_text(content)
    result = rooftrace("trace", command, source, *([out] if command == "convert" else []))
    assert result.exit_code == 2
    assert "bad.csv" in result.stderr
    assert "Traceback" not in result.output
    assert not out.exists()
