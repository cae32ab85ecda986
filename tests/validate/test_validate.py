"""Measured folders against the models: every row answered for, loudly where a file is not understood."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from hwmodels.kernels.gemm import gemm_s
from hwmodels.measured import read
from hwmodels.model import load_model
from hwmodels.overheads import serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import load_profile
from policies.acceptance import Iid
from sim.bench.load import load_of
from sim.bench.measured import Lengths
from sim.bench.published.machines import Speculation, Unmodelled, devices_of
from sim.bench.published.rows import (
    concurrency_of,
    experiment_of,
    formatted,
    half_of,
    most_clients,
    rows_of,
    seats_of,
    served_run,
    served_s,
)
from sim.bench.published.speculated import NOT_KNOWN, speculation_of
from sim.cli import build_app
from sim.errors import OutputError, RooftraceError
from sim.plots.served import draw_served
from sim.protocols import Protocol
from sim.validation.files import Comparison, compare, validate
from sim.validation.fit_acceptance import best_of
from sim.validation.served import (
    GROUP_COLUMNS,
    errors_by,
    served_markdown,
    served_pair,
    served_pairs,
    unexplained,
    write_groups,
)
from sim.validation.tables import COLUMNS, to_markdown, write_csv
from tests.sample import with_all

SILICON = (
    "model_path,system,backend,backend_version,precision,gemm_quant_mode,moe_quant_mode,mode,isl,osl,concurrency,"
    "batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,ttft_ms,tpot_ms,measured,provenance\n"
)
DENSE = "meta-llama/Llama-3.1-70B,b200_sxm,vllm,,fp8,fp8,fp8,agg,1024,128,4,4,2,1,1,2,1,90,10.6,,x\n"


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def gemm_rows(device, shapes, off=1.0):
    profile = load_profile(device)
    params = profile.get("gemm", ("bf16/vllm",))
    lines = ["m,n,k,latency_us"]
    for m, n, k in shapes:
        seconds = gemm_s(params, profile.datasheet, m, n, k, weight_copies=6.0)
        lines.append(f"{m},{n},{k},{seconds * 1e6 * off}")
    return "\n".join(lines) + "\n"


SHAPES = [(1, 4096, 4096), (64, 8192, 4096), (4096, 4096, 14336)]


def test_a_file_that_the_model_made_has_no_error(tmp_path):
    write(tmp_path, "gemm_h100_bf16_vllm0.24.csv", gemm_rows("h100-sxm", SHAPES))
    (one,) = validate(tmp_path)
    assert (one.line.rows, one.line.unmodelled, one.device, one.quantity) == (3, 0, "h100-sxm", "latency")
    assert one.line.mape_pct == pytest.approx(0.0, abs=1e-9)


def test_errors_are_those_of_the_predictions(tmp_path):
    write(tmp_path, "gemm_h100_bf16_vllm0.24.csv", gemm_rows("h100-sxm", SHAPES, off=0.8))
    (one,) = validate(tmp_path)
    assert one.line.mape_pct == pytest.approx(25.0)
    assert one.line.bias_pct == pytest.approx(25.0)


def test_a_device_without_measurements_is_priced_by_its_relative_and_said_so(tmp_path):
    write(tmp_path, "gemm_gb200_bf16_vllm0.24.csv", gemm_rows("gb200", SHAPES))
    (one,) = validate(tmp_path)
    assert one.line.mape_pct == pytest.approx(0.0, abs=1e-9)
    assert "borrowed from b200" in one.notes[0]


def test_hardware_prices_every_file(tmp_path):
    write(tmp_path, "gemm_a100_bf16_vllm0.14.csv", gemm_rows("h100-sxm", SHAPES))
    (one,) = validate(tmp_path, hardware="h100")
    assert one.device == "h100-sxm"
    assert one.line.mape_pct == pytest.approx(0.0, abs=1e-9)


def test_a_device_that_is_not_in_the_catalogue_is_counted_and_named(tmp_path):
    write(tmp_path, "gemm_mi100_fp16_llmcompass.csv", "m,n,k,latency_us\n64,64,64,10\n")
    (one,) = validate(tmp_path)
    assert (one.line.rows, one.line.unmodelled, one.line.mape_pct) == (1, 1, None)
    assert "mi100" in next(iter(one.unmodelled))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.csv", "a,b\n1,2\n", "are those of no kind of measurement"),
        ("gemm_h100_bf16_vllm0.24.csv", "m,n,k\n1,2,3\n", "lacks latency_us"),
        ("gemm_h100_bf16_vllm0.24.csv", "m,n,k,latency_us,watts\n1,2,3,4,5\n", "unknown column watts"),
        ("gemm_h100_bf16_vllm0.24.csv", "m,n,k,latency_us\n1,2,3,-4\n", "latency_us must be positive"),
        ("gemm_h100_bf16_vllm0.24.csv", "m,n,k,latency_us\n1,2\n", "truncated"),
    ],
)
def test_a_file_that_is_not_understood_stops_a_strict_validation(tmp_path, name, text, message):
    write(tmp_path, "gemm_a100_bf16_vllm0.14.csv", gemm_rows("a100-80gb-sxm", SHAPES))
    write(tmp_path, name, text)
    with pytest.raises(RooftraceError, match=message):
        validate(tmp_path)


def test_an_empty_folder_stops_the_validation(tmp_path):
    with pytest.raises(RooftraceError, match="nowhere does not exist; give a folder of tables"):
        validate(tmp_path / "nowhere")
    with pytest.raises(RooftraceError, match="holds no CSV files"):
        validate(tmp_path)


def test_serving_runs_are_simulated_and_told_apart_by_quantity(tmp_path):
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE + DENSE.replace("Llama-3.1-70B", "Llama-9"))
    ttft, tpot = validate(tmp_path)
    assert (ttft.quantity, tpot.quantity) == ("ttft", "tpot")
    assert ttft.line.rows == tpot.line.rows == 2
    assert ttft.unmodelled == {"model meta-llama/Llama-9 is not in the catalogue": 1}
    # Weights over bandwidth bound a token from below; 70 GB over two B200.
    assert 70e9 / 2 / 8e12 < tpot.predicted[0] < 15e-3
    assert tpot.predicted[0] < ttft.predicted[0] < 1.0
    assert np.isnan(tpot.predicted[1])


def test_a_folder_without_the_settings_of_servers_says_so(tmp_path):
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE)
    assert all("e2e_settings_agg.csv is not in its folder" in one.notes[-1] for one in validate(tmp_path))
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE.replace(",,x", ",,internal-gap-analysis"))
    assert not any("settings" in note for one in validate(tmp_path) for note in one.notes)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [(",agg,", ",disagg,", "mode disagg is not aggregated serving"), (",1024,", ",,", "isl is not known")],
)
def test_a_row_that_does_not_say_its_run_is_counted_with_the_reason(tmp_path, old, new, reason):
    assert old in DENSE
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE.replace(old, new, 1))
    ttft, tpot = validate(tmp_path)
    assert ttft.unmodelled == tpot.unmodelled == {reason: 1}


def test_a_folder_that_cannot_be_written_is_an_error_of_the_tool(tmp_path):
    write(tmp_path, "gemm_a100_bf16_vllm0.14.csv", gemm_rows("a100-80gb-sxm", SHAPES))
    with pytest.raises(OutputError, match="cannot write"):
        write_csv([one.line for one in validate(tmp_path)], tmp_path / "nowhere" / "table.csv")


def test_equal_rows_get_equal_predictions(tmp_path):
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE + DENSE)
    ttft, _ = validate(tmp_path)
    assert ttft.predicted[0] == ttft.predicted[1]


def row_of(text):
    return dict(zip(SILICON.strip().split(","), text.strip().split(","), strict=True))


def test_a_row_says_its_deployment():
    run = served_run(row_of(DENSE))
    assert (run.device, run.stack, run.concurrency) == ("b200", "vllm", 4)
    assert run.decode.parallel == ParallelConfig(tensor=2)
    assert run.model.mlp_precision == "fp8"
    # 8-bit weights do not imply an 8-bit cache.
    assert run.kv_precision == "bf16"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
        "Qwen/Qwen3-32B-FP8", "deepseek-ai/DeepSeek-V3.1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("modes", ["fp8,fp8", ","])
def test_a_checkpoint_with_scales_for_blocks_has_them_whatever_release_of_its_model_it_is(name, modes):
    modes = dict(zip(("gemm_quant_mode", "moe_quant_mode"), modes.split(","), strict=True))
    found = formatted(row_of(DENSE) | {"model_path": name, "precision": "fp8", **modes})
    asked = load_model(name)
    assert (found.mlp_precision, found.expert_precision) == (asked.mlp_precision, asked.expert_precision)
    assert found.mlp_precision == "fp8_block"


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ("8,1,1,8,1", ParallelConfig(tensor=8)),
        ("1,1,8,1,8", ParallelConfig(data=8, expert=8)),
        ("64,1,1,8,8", ParallelConfig(tensor=8, expert=8)),  # written down twice: a node has eight
        ("1,1,64,8,8", ParallelConfig(data=8, expert=8)),
        ("4,1,4,1,16", ParallelConfig(data=4, expert=4)),
        ("4,1,1,2,2", ParallelConfig(tensor=4, expert=2)),
    ],
)
def test_degrees_of_parallelism_are_those_of_the_devices(degrees, expected):
    cells = dict(
        zip(("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"), degrees.split(","), strict=True)
    )
    row = row_of(DENSE.replace("meta-llama/Llama-3.1-70B", "deepseek-ai/DeepSeek-V3")) | cells
    assert served_run(row).decode.parallel == expected


def test_a_model_that_does_not_fit_is_unmodelled():
    run = served_run(row_of(DENSE) | {"gemm_quant_mode": "bfloat16", "precision": "bf16", "system": "l40s"})
    with pytest.raises(Unmodelled, match=r"does not fit: llama-3.1-70b"):
        served_s(run)


def asking(served, **offered):
    return replace(served, run=replace(served.run, offered=replace(served.run.offered, **offered)))


def test_tokenisation_reaches_the_first_token_and_no_other():
    run = asking(served_run(row_of(DENSE)), output=Lengths(mean_tokens=8), concurrency=1)
    run = replace(run, run=replace(run.run, protocol=Protocol(requests_per_client=3)))
    ideal = serving_stack("ideal")
    slow = replace(ideal, overheads=replace(ideal.overheads, admission_s=0.5, admission_s_per_token=1e-4))
    before, after = served_s(run, stack=ideal), served_s(run, stack=slow)
    assert after[0] - before[0] == pytest.approx(0.5 + 1e-4 * 1024, rel=1e-6)
    assert after[1] == pytest.approx(before[1], rel=1e-6)


def test_a_published_row_is_a_measured_run_with_the_figures_of_its_protocol():
    run = served_run(row_of(DENSE)).run
    assert (run.ttft.mean_s, run.tpot.mean_s, run.protocol.name) == (0.09, 0.0106, "inferencex")
    assert (run.offered.prompt.mean_tokens, run.offered.output.mean_tokens, run.offered.concurrency) == (1024, 128, 4)
    assert len(load_of(run, seed=0).workload.prompt_tokens) == run.offered.requests
    asked = served_run(row_of(DENSE.replace(",90,10.6,", ",80,9,"))).asked
    assert asked == served_run(row_of(DENSE)).asked != served_run(row_of(DENSE) | {"concurrency": "8"}).asked


def test_more_clients_wait_longer():
    run = served_run(row_of(DENSE))
    few, many = served_s(run), served_s(asking(run, concurrency=32))
    assert few[0] < many[0]
    assert few[1] < many[1]


APART = "e2e_silicon_disagg.csv"


def rows_apart(shared, **settings):
    rows = rows_of(read(shared / "measured2" / APART))
    return [row for row in rows if all(row[key] == value for key, value in settings.items())]


def test_rows_that_state_their_layout_are_all_read(shared):
    said = [row for row in rows_apart(shared) if row["decode_num_workers"] > 0]
    assert len(said) == 112
    for row in said:
        served_run(row, shared / "measured2")
    with pytest.raises(Unmodelled, match="numbers of prefill and decode workers are not known"):
        served_run(next(row for row in rows_apart(shared) if not row["decode_num_workers"] > 0))


def test_a_run_of_separate_pools_is_near_what_was_measured(shared):
    (row,) = rows_apart(shared, backend="trtllm", precision="fp4", isl=1024, concurrency=10)
    run = served_run(row, shared / "measured2", clients=180)
    assert (run.prefill.number, run.prefill.parallel.data, run.decode.number, run.decode.parallel.tensor) == (
        1,
        4,
        5,
        8,
    )
    assert run.decode.settings.max_sequences == 32
    assert run.concurrency == 10
    found = served_s(run)
    assert found.tpot_s * 1e3 == pytest.approx(row["tpot_ms"], rel=0.25)
    assert found.ttft_s * 1e3 == pytest.approx(row["ttft_ms"], rel=0.3)
    # Who waits for room in the decode workers waits for his first token.
    seats = replace(run.decode, settings=replace(run.decode.settings, max_sequences=1))
    assert served_s(replace(run, decode=seats)).ttft_s > 5 * found.ttft_s


def test_pools_of_a_row_draft_where_they_decode_and_send_over_a_card_for_each_rank(shared):
    (row,) = rows_apart(shared, backend="trtllm", precision="fp4", isl=1024, concurrency=10)
    run = replace(served_run(row, shared / "measured2"), speculation=Speculation(k=3, acceptance=Iid(alpha=0.5)))
    made, _ = experiment_of(run)
    prefill, *decode = made.machines
    assert prefill.hosted[0].decoding is None
    assert {machine.hosted[0].decoding.num_speculative_tokens for machine in decode} == {3}
    assert {machine.hosted[0].lookahead_tokens for machine in decode} == {3}
    # Drafts are loaded and cached beside the target, which leaves less.
    plain = experiment_of(replace(run, speculation=None))[0].machines[1].hosted[0].kv_blocks
    assert decode[0].hosted[0].kv_blocks < 0.99 * plain
    path = made.handover.paths[0, 1]
    assert (path.link.concurrent_transfers, path.link.bandwidth_bytes_per_s) == (run.prefill.parallel.data, 50e9)


@pytest.mark.parametrize(
    ("stack", "clients", "workers", "ranks", "expected"),
    [
        ("trtllm", 180, 5, 1, 32),
        ("trtllm", 450, 6, 1, 64),
        ("trtllm", 1606, 1, 8, 192),
        ("trtllm", 6, 5, 1, 1),
        ("trtllm", 4, 3, 1, 1),
        ("trtllm", 128, 3, 1, None),
        ("trtllm", 8, 8, 1, None),
        ("trtllm", 9, 3, 1, 2),
        ("trtllm", 615, 1, 16, 32),
        ("sglang", 180, 5, 1, None),
    ],
)
def test_seats_are_what_the_concurrency_fills(stack, clients, workers, ranks, expected):
    assert seats_of(stack, clients, workers, ranks) == expected


def rows_of_a_recipe(*loads, workers, **columns):
    same = {"model_path": "deepseek-ai/DeepSeek-V3", "decode_num_workers": workers, "decode_attention_dp_size": 1}
    return [{**same, "concurrency": load, **columns} for load in loads]


def test_loads_that_are_all_made_for_their_seats_have_a_recipe_each():
    # 3 workers x a fifth more than 1, 2, 8 and 16, rounded up; 45 is no such load for five workers.
    assert most_clients(rows_of_a_recipe(6, 9, 30, 60, workers=3)) == [6, 9, 30, 60]
    assert most_clients(rows_of_a_recipe(10, 25, 45, 180, workers=5)) == [180] * 4
    # Other devices have recipes of their own.
    mixed = [*rows_of_a_recipe(9, 30, workers=3, system="h100_sxm"), *rows_of_a_recipe(10, 45, workers=5)]
    assert most_clients(mixed) == [9, 30, 45, 45]


def test_a_load_of_fewer_than_two_requests_a_rank_has_a_recipe_of_its_own():
    assert most_clients(rows_of_a_recipe(6, 10, 180, workers=5)) == [6, 180, 180]


def test_a_batch_says_how_many_were_in_flight_where_the_row_does_not(shared):
    (row,) = rows_apart(shared, backend="vllm")
    # Seven on each of the eight ranks of its one decode worker.
    assert concurrency_of(row) == 56


def test_halves_of_the_deployments_do_not_follow_their_names():
    halves = [half_of(f"model|{n}") for n in range(400)]
    assert 150 < sum(halves) < 250


def test_the_value_with_the_least_median_error_is_found_and_judged_by_the_others():
    grid, truth = (0.4, 0.65, 0.9), 0.7
    ratios = np.exp(np.outer(np.linspace(0.8, 1.2, 40), np.array(grid) - truth))
    value, seen, held = best_of(grid, ratios, np.arange(40) % 2)
    assert value == pytest.approx(truth, abs=0.02)
    assert max(seen, held) < 0.02


def test_iterations_of_the_public_measurements(shared):
    prompt, token = compare(read(shared / "measured2" / "iteration_splitwise_a100_llama2-70b.csv"))
    assert prompt.unmodelled == {"flagged suspect_prompt_time": 1}
    assert prompt.line.mape_pct < 20
    assert token.line.mape_pct < 20


def test_a_recorded_run_is_replayed_request_by_request(shared):
    name = "rtxpro6000_llama3.1-8b_tp1_vllm0.19.csv"
    requests = read(shared / "measured2" / f"e2e_requests_{name}")
    series = read(shared / "measured2" / f"e2e_timeseries_{name}")
    ttft, tpot = compare(requests, others=[requests, series])
    assert ttft.line.rows == 300
    assert tpot.line.median_pct < 25
    throughput = {one.quantity: one for one in compare(series, others=[requests, series])}
    assert throughput["running"].predicted.max() <= 128
    alone = list(compare(series))
    assert "not in the folder" in next(iter(alone[0].unmodelled))


@pytest.mark.slow(reason="whole tables of measurements")
def test_figures_of_the_public_serving_runs(shared, tmp_path):
    # What kernels reach is held file by file to the page on validation (tests/hwmodels/kernels/test_measured.py).
    for name in ("e2e_silicon_agg.csv", "e2e_settings_agg.csv"):
        (tmp_path / name).symlink_to(shared / "measured2" / name)
    lines = {one.quantity: one.line for one in validate(tmp_path) if one.file == "e2e_silicon_agg.csv"}
    assert all(line.unmodelled <= 0.03 * line.rows for line in lines.values())
    assert lines["tpot"].median_pct < 9
    assert lines["ttft"].median_pct < 16


@pytest.mark.slow(reason="whole tables of measurements")
@with_all
def test_dense_runs_of_the_public_measurements(shared):
    rows = rows_of(read(shared / "measured2" / "e2e_silicon_agg.csv"))
    rows = [row for row in rows if "Llama" in row["model_path"]]
    off = np.array([np.array(served_s(served_run(row))) * 1e3 / (row["ttft_ms"], row["tpot_ms"]) for row in rows])
    ttft, tpot = np.median(np.abs(off - 1.0), axis=0)
    assert tpot < 0.10
    assert ttft < 0.20


def test_the_command_prints_and_writes_the_table(tmp_path):
    folder = tmp_path / "measured"
    folder.mkdir()
    write(folder, "gemm_h100_bf16_vllm0.24.csv", gemm_rows("h100-sxm", SHAPES))
    out, page, plots = tmp_path / "errors.csv", tmp_path / "errors.md", tmp_path / "plots"
    arguments = ["validate", "--measured", str(folder), "--out", str(out)]
    result = CliRunner().invoke(build_app(), [*arguments, "--markdown", str(page), "--plots", str(plots)])
    assert result.exit_code == 0, result.output
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == COLUMNS
    assert (row["file"], row["rows"], row["unmodelled"]) == ("gemm_h100_bf16_vllm0.24.csv", "3", "0")
    assert float(row["mape_pct"]) < 0.01
    assert "| gemm | 1 | 3 | 0.0 | 0.0 | 0.0 | gemm_h100_bf16_vllm0.24.csv |" in page.read_text()
    assert [path.name for path in plots.iterdir()] == ["gemm_h100_bf16_vllm0.24.latency.png"]


def test_the_command_fails_on_what_it_does_not_understand(tmp_path):
    write(tmp_path, "notes.csv", "a,b\n1,2\n")
    result = CliRunner().invoke(build_app(), ["validate", "--measured", str(tmp_path)])
    assert result.exit_code == 2
    assert "notes.csv" in result.stderr


GARBAGE = "a,b\n1,2\n"


def folder_with_garbage(tmp_path, rows):
    folder = tmp_path / "measured"
    folder.mkdir()
    write(folder, "gemm_h100_bf16_vllm0.24.csv", rows + "64,4096,4096,fast\n")
    write(folder, "notes.csv", GARBAGE)
    return folder


def test_the_command_goes_on_without_what_it_does_not_understand_and_says_so(tmp_path):
    folder = folder_with_garbage(tmp_path, gemm_rows("h100-sxm", SHAPES))
    out, page = tmp_path / "errors.csv", tmp_path / "errors.md"
    arguments = ["validate", "--measured", str(folder)]
    result = CliRunner().invoke(build_app(), [*arguments, "--out", str(out), "--markdown", str(page)])
    assert result.exit_code == 3, result.output
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert (row["rows"], row["unmodelled"]) == ("3", "0")
    assert "Left out: notes.csv: not understood: its columns (a, b) are those of no kind" in result.stderr
    assert "1 of 4 rows refused: latency_us must be a number; got 'fast' (line 5)" in result.stderr
    assert "1 file and 1 row left out (exit code 3); --strict refuses" in result.stderr
    assert "* notes.csv: not understood" in page.read_text()
    strict = CliRunner().invoke(build_app(), [*arguments, "--strict"])
    assert strict.exit_code == 2
    assert "latency_us in line 5 must be a number" in strict.stderr


def test_fit_goes_on_without_what_it_does_not_understand_and_says_so(tmp_path):
    shapes = [(m, n, k) for m in (1, 16, 64, 200, 1000, 4000) for n in (1024, 4096, 8192) for k in (1024, 4096)]
    folder = folder_with_garbage(tmp_path, gemm_rows("h100-sxm", shapes))
    profile = tmp_path / "own.toml"
    arguments = ["fit", "--measured", str(folder), "--device", "h100", "--out", str(profile), "--max-points", "50"]
    strict = CliRunner().invoke(build_app(), [*arguments, "--strict"])
    assert strict.exit_code == 2
    assert not profile.exists()
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 3, result.output
    assert "1 file and 1 row left out" in result.stderr
    assert load_profile(str(profile)).kernel("gemm", ("bf16/vllm",)).provenance.points == len(shapes)


def test_a_file_that_does_not_say_its_device_is_priced_where_hardware_is_given(tmp_path):
    write(tmp_path, "my numbers.csv", gemm_rows("h100-sxm", SHAPES))
    (one,) = validate(tmp_path, hardware="h100")
    assert one.line.mape_pct == pytest.approx(0.0, abs=1e-9)
    assert "vLLM's kernels assumed" in one.notes[0]
    with pytest.raises(RooftraceError, match="neither its columns nor its name say the device"):
        validate(tmp_path)


def test_no_experts_of_a_dense_model_count_as_one(tmp_path):
    none = DENSE.replace(",2,1,1,2,1,", ",2,1,1,0,0,")
    assert none != DENSE
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE + none)
    ttft, tpot = validate(tmp_path)
    assert ttft.predicted[0] == ttft.predicted[1]
    assert tpot.predicted[0] == tpot.predicted[1]
    write(
        tmp_path, "e2e_silicon_agg.csv", SILICON + none.replace("meta-llama/Llama-3.1-70B", "deepseek-ai/DeepSeek-V3")
    )
    ttft, _ = validate(tmp_path)
    assert ttft.unmodelled == {"moe_tp_size or moe_ep_size is 0 for a model with experts": 1}


DEEPSEEK = "deepseek-ai/DeepSeek-R1,b200_sxm,trtllm,1.2,fp8,fp8,fp8,agg,1024,128,4,4,8,1,1,8,1,195,5.4,2026-02-05,x\n"


def test_rows_with_speculation_are_predicted_where_it_is_known_how_they_ran(tmp_path):
    header = SILICON.strip() + ",speculation\n"
    of = [(DEEPSEEK, "none"), (DEEPSEEK, "mtp"), (DEEPSEEK, "unknown"), (DENSE, "mtp")]
    write(tmp_path, "e2e_silicon_speculative_agg.csv", header + "".join(f"{row.strip()},{said}\n" for row, said in of))
    ttft, tpot = validate(tmp_path)
    dense = "ran with multi-token prediction, and how many tokens vllm drafted is not known"
    assert ttft.unmodelled == tpot.unmodelled == {NOT_KNOWN: 1, dense: 1}
    assert np.isfinite(ttft.predicted).tolist() == [True, True, False, False]
    # Three drafted tokens, of which more than one is taken on average, and a round that costs more than a plain step.
    assert 0.3 < tpot.predicted[1] / tpot.predicted[0] < 0.9


def test_what_a_model_accepts_is_one_figure_whatever_its_name_and_depths_are_the_stacks():
    r1, v3 = (speculation_of(name, "trtllm", ranks=1) for name in ("deepseek-r1", "deepseek-v3"))
    assert r1 == v3
    assert (v3.k, speculation_of("deepseek-v3", "trtllm", ranks=8).k) == (3, 1)


def test_groups_of_experts_are_as_many_as_divide_the_devices():
    model = load_model("deepseek-v3")
    assert devices_of(model, tensor=4, pipeline=1, data=1, expert=3).expert == 2
    assert devices_of(model, tensor=4, pipeline=1, data=2, expert=8).expert == 8


def test_settings_of_servers_are_no_measurement_and_no_stranger(tmp_path, shared):
    table = (shared / "measured2" / "e2e_settings_agg.csv").read_text().splitlines(keepends=True)
    write(tmp_path, "e2e_settings_agg.csv", "".join(table[:3]))
    write(tmp_path, "e2e_silicon_agg.csv", SILICON + DENSE)
    assert [one.file for one in validate(tmp_path)] == ["e2e_silicon_agg.csv"] * 2


def served(labels, ratios):
    """A comparison of TPOT and of TTFT: (stack, model, concurrency) of each row, and predicted over measured."""
    columns = dict(zip(("stack", "model", "load"), map(np.array, zip(*labels, strict=True)), strict=True))
    groups = {"family": np.array(["InferenceX"] * len(labels)), "device": np.array(["b200"] * len(labels)), **columns}
    groups |= {"precision": np.array(["fp8"] * len(labels)), "load": columns["load"].astype(float)}
    measured = np.ones(len(labels))
    return tuple(
        Comparison(file="x", device="b200", quantity=q, predicted=np.array(ratios), measured=measured, groups=groups)
        for q in ("tpot", "ttft")
    )


def test_serving_errors_are_told_by_group():
    pair = served([("vllm", "a", 4), ("vllm", "a", 16), ("trtllm", "b", 5)], [1.1, 0.8, np.nan])
    by_stack = {group.name: group for group in errors_by(pair, "stack")}
    assert by_stack["vllm"].tpot_median_pct == pytest.approx(15.0)
    assert by_stack["vllm"].tpot_bias_pct == pytest.approx(-5.0)
    assert by_stack["trtllm"].unmodelled == 1
    assert [group.name for group in errors_by(pair, "stack", "load")] == [
        "trtllm, 5 to 16",
        "vllm, 1 to 4",
        "vllm, 5 to 16",
    ]
    assert served_pair(pair) == pair
    assert served_pair([]) is None


def test_what_remains_unexplained_is_beyond_the_aims_and_the_largest_first():
    labels = [("vllm", "good", 4)] * 3 + [("vllm", "bad", 4)] * 3 + [("vllm", "worse", 4)]
    groups = unexplained(served(labels, [1.01] * 3 + [1.6] * 3 + [1.7]))
    assert [group.name.split(",")[0] for group in groups] == ["bad", "worse"]


def test_groups_of_serving_runs_are_written_with_models_and_loads(tmp_path):
    pair = served([("vllm", "a", 4), ("sglang", "b", 64)], [1.1, 0.7])
    write_groups(served_pairs(pair), tmp_path / "groups.csv")
    with (tmp_path / "groups.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == GROUP_COLUMNS
    assert {row["by"] for row in rows} == {
        "stack",
        "family stack",
        "model precision device stack family",
        "family stack load",
    }
    (one,) = [row for row in rows if row["group"] == "InferenceX, sglang, 17 to 64"]
    assert (one["rows"], one["tpot_median_pct"], one["tpot_bias_pct"]) == ("1", "30.00", "-30.00")


def test_served_runs_are_drawn_and_listed(tmp_path):
    pair = served([("vllm", "a", 4), ("sglang", "b", 64)] * 6, [1.1, 0.7] * 6)
    (path,) = draw_served(pair, tmp_path)
    assert path.name == "served.png"
    assert path.stat().st_size > 10_000
    page = served_markdown(pair)
    assert "| sglang | 6 |" not in page
    assert "| InferenceX, sglang | 6 | 0 | 30.0 | -30.0 | 30.0 | -30.0 |" in page
    assert "What remains unexplained" in page


def test_fit_writes_a_profile_that_validate_reads(tmp_path):
    folder = tmp_path / "measured"
    folder.mkdir()
    shapes = [(m, n, k) for m in (1, 16, 64, 200, 1000, 4000) for n in (1024, 4096, 8192) for k in (1024, 4096)]
    write(folder, "gemm_h100_bf16_vllm0.24.csv", gemm_rows("h100-sxm", shapes))
    profile = tmp_path / "own.toml"
    arguments = ["fit", "--measured", str(folder), "--device", "h100", "--out", str(profile), "--max-points", "50"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    assert "held-back %" in result.output
    (one,) = validate(folder, hardware=str(profile))
    assert one.line.mape_pct < 5
    # What was not measured comes from the shipped profiles, so that whole models can be priced.
    scenario = ["run", "--set", f"hardware={profile}", "--set", "workload={trace: conversation, requests: 20}"]
    result = CliRunner().invoke(build_app(), [*scenario, "--json", "--no-plots", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["hardware"]["profile"] == "h100-sxm"
    assert manifest["hardware"]["files"]


def test_lines_without_a_prediction_leave_their_errors_empty(tmp_path):
    write(tmp_path, "gemm_mi100_fp16_llmcompass.csv", "m,n,k,latency_us\n64,64,64,10\n")
    lines = [one.line for one in validate(tmp_path)]
    write_csv(lines, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().splitlines()[1].endswith(",1,1,,,,,latency")
    assert "| gemm | 1 | 1 | - | - | - | - |" in to_markdown(lines)


def test_the_page_shows_the_least_the_median_and_the_largest_error_of_a_kind(tmp_path):
    for device, off in (("h100", 0.8), ("h200", 0.5), ("b200", 1.0)):
        name = {"h100": "h100-sxm"}.get(device, device)
        write(tmp_path, f"gemm_{device}_bf16_vllm0.24.csv", gemm_rows(name, SHAPES, off=off))
    page = to_markdown([one.line for one in validate(tmp_path)])
    assert "| gemm | 3 | 9 | 0.0 | 25.0 | 100.0 | gemm_h200_bf16_vllm0.24.csv |" in page


def test_sets_that_no_shape_was_left_to_judge_are_in_no_table_of_errors_held_back():
    """Nine products of TPU v7 and one layer of AMD's experts in two formats, whose errors are of their own rows."""
    rows = [line for line in to_markdown([]).splitlines() if line.startswith("| ")]
    heads = [cell.strip() for cell in next(line for line in rows if line.startswith("| kernel | a100")).split("|")]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")] for line in rows}
    assert cells["tpu_gemm"][heads.index("tpu-v7")] == "-"
    of_one = load_profile("mi355x").kernel("moe", ["bf16/aiter"])
    assert not of_one.provenance.judged
    judged = [k.provenance for k in load_profile("mi300x").kernels if k.family == "moe" and k.provenance.judged]
    assert cells["moe"][heads.index("mi300x")] == f"{judged[0].held_mape_pct:.1f} ({judged[0].held_mape_pct:.1f})"


def test_the_page_has_a_part_for_separate_pools_with_fitted_and_held_back_apart():
    tpot, ttft = served([("trtllm", "a", 4), ("sglang", "a", 300)], [1.1, 0.7])
    halves = {"half": np.array(["fitted", "held back"])}
    pair = [replace(one, file="e2e_silicon_disagg.csv", groups={**one.groups, **halves}) for one in (tpot, ttft)]
    page = served_markdown(pair)
    part = page[page.index("### Separate pools") :]
    assert "2 of 2 rows predicted" in part
    assert "| all | 2 | 0 | 20.0 |" in part
    assert "| fitted | 1 | 0 | 10.0 |" in part
    assert "| held back, sglang | 1 | 0 | 30.0 |" in part
    assert "published: DeepSeek-V3 technical report" in page
    assert "Workers are chosen in turn" in page
    assert "Separate pools with multi-token prediction" not in page
