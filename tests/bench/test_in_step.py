"""Closed loops whose outputs differ in length, of which a file has the mean alone, are not judged by their first tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.bench import BenchRun, Lengths, read_bytes, replay
from sim.bench.cases import cases_of
from sim.bench.compare import compared, to_json
from sim.cli import build_app
from sim.scenario import Scenario
from tests.bench import own

SCENARIO = Scenario.from_mapping({"model": "llama-3.1-8b", "hardware": "h100-sxm", "scheduler": "vllm"})
UNIFORM = {"distribution": "uniform", "min_tokens": 20, "max_tokens": 380}


def result(outputs: int, **changed: Any) -> dict[str, Any]:
    """The file that `vllm bench serve` writes, without details, of 64 requests with 16 clients."""
    return {
        "date": "20260101-000000", "backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B-Instruct", "num_prompts": 64,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 20.0, "completed": 64,
        "total_input_tokens": 64 * 512, "total_output_tokens": outputs, "request_throughput": 3.2, "output_throughput": 640.0,
        "mean_ttft_ms": 30.0, "median_ttft_ms": 25.0, "mean_tpot_ms": 9.0, "median_tpot_ms": 9.0, **changed,
    }  # fmt: skip


def run_of(document: dict[str, Any]) -> BenchRun:
    (run,) = read_bytes(json.dumps(document).encode(), name="a", file="a.json").runs
    return run


def test_lengths_that_differ_without_a_word_how_leave_ttft_unjudged() -> None:
    found = replay(SCENARIO, run_of(result(64 * 200 + 7)))
    assert found.unjudged == ("ttft",)
    assert found.error("ttft_median_s") is None
    assert found.error("tpot_mean_s") is not None
    assert any("put clients in step" in sentence for sentence in found.assumed)


@pytest.mark.parametrize(
    "changed",
    [
        {"total_output_tokens": 64 * 200},  # fixed, as vLLM draws them by default
        {"max_concurrency": 1},
        {"request_rate": 3.0},
        {"output_lens": [200, 207] * 32},
    ],
    ids=["fixed", "one client", "open", "detailed"],
)
def test_loads_that_are_known_or_do_not_go_in_step_are_judged(changed: dict[str, Any]) -> None:
    assert replay(SCENARIO, run_of({**result(64 * 200 + 7), **changed}), seeds=[0]).unjudged == ()


def test_lengths_that_are_told_are_judged_and_nearer_to_the_truth() -> None:
    plain = run_of(result(64 * 200 + 7))
    told = replace(plain, offered=replace(plain.offered, output=Lengths(distribution=UNIFORM)))
    truth, equal = replay(SCENARIO, told), replay(SCENARIO, plain)
    assert truth.unjudged == ()
    # All 16 prompts at once: the first token waits for the others' prompts.
    assert equal.predicted["ttft_median_s"] > 1.5 * truth.predicted["ttft_median_s"]


def test_the_table_marks_the_row_and_sums_up_without_it(tmp_path: Path) -> None:
    for name, outputs in (("differ", 64 * 200 + 7), ("fixed", 64 * 200)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result(outputs)))
    (tmp_path / "s.yaml").write_text(SCENARIO.to_yaml())
    words = ["bench", "compare", *(str(tmp_path / name) for name in ("s.yaml", "differ.json", "fixed.json"))]
    printed = CliRunner().invoke(build_app(), [*words, "--replications", "1"])
    assert printed.exit_code == 0, printed.output
    rows = {words[0]: words for line in printed.stdout.splitlines() if (words := line.split()) and "16" in words}
    assert ("~" in rows["differ"], "~" in rows["fixed"]) == (True, False)
    assert "~ not judged: clients wait for answers whose lengths differ" in " ".join(printed.stdout.split())
    runs = [run_of(result(outputs)) for outputs in (64 * 200 + 7, 64 * 200)]
    found = compared(SCENARIO, runs, replications=1)
    assert (found.errors()["ttft"].runs, found.errors()["tpot"].runs) == (1, 2)
    assert [each["not_judged"] for each in to_json(found)["runs"]] == [["ttft"], []]
    alone = compared(SCENARIO, runs[:1], replications=1)
    assert "ttft: no run below saturation gives it or is judged by it" in alone.exceeded({"ttft": 0.1})[0]


def test_a_fit_takes_no_first_token_of_clients_in_step() -> None:
    runs = [run_of(result(outputs)) for outputs in (64 * 200 + 7, 64 * 200)]
    cases, _ = cases_of(SCENARIO, runs)
    assert [set(case.measured_s) for case in cases] == [{"tpot_s"}, {"tpot_s", "ttft_s"}]


def test_an_output_length_that_sglang_was_asked_for_is_of_all() -> None:
    line = json.loads(own.FILES["sglang.jsonl"].splitlines()[0])
    (run,) = read_bytes(
        json.dumps({**line, "dataset_name": "sharegpt", "sharegpt_output_len": 128}).encode(), name="a", file="a"
    ).runs
    assert run.offered.output.equal
    assert not run.offered.prompt.equal
