"""rooftrace bench: tables, exit codes and what is said where."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from sim.cli import build_app
from tests.bench import own

EXAMPLES = Path(__file__).parents[2] / "examples" / "bench"
MADE = [str(EXAMPLES / f"made-{rate}.json") for rate in (2, 8)]
DEPLOYMENT = str(EXAMPLES / "deployment.yaml")


def bench(*arguments: Any) -> Result:
    return CliRunner().invoke(build_app(), ["bench", *map(str, arguments)])


def test_show_prints_one_table_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(own.REQUEST_LOG)
    (tmp_path / "broken.json").write_text('{"a": ')
    shown = bench("show", *MADE, tmp_path / "log.csv", tmp_path / "broken.json")
    assert shown.exit_code == 0
    assert "made-2" in shown.stdout
    assert "as sent" in shown.stdout
    assert f"Not read: {tmp_path}/broken.json: it is cut off" in shown.stderr


def test_show_as_csv_and_json_are_the_whole_table() -> None:
    table = pd.read_csv(io.StringIO(bench("show", *MADE, "--csv").stdout))
    assert table["rate_req_s"].tolist() == [2.0, 8.0]
    assert table["ttft_p99_s"].notna().all()
    (first, _) = json.loads(bench("show", *MADE, "--json").stdout)
    assert first["ttft_mean_s"] == pytest.approx(table["ttft_mean_s"][0])


def test_show_asks_for_what_is_missing_and_takes_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("requests,prompt_tokens,ttft_mean_ms\n100,512,40\n")
    asked = bench("show", tmp_path / "a.csv").stdout
    assert "needs to be told run.rate_per_s or run.concurrency, run.output_tokens (--set)" in asked
    told = bench("show", tmp_path / "a.csv", "--set", "run.concurrency=4", "--set", "run.output_tokens=64").stdout
    assert "4 clients" in told
    assert "needs to be told" not in told


def test_nothing_that_could_be_read_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for found in (bench("show", tmp_path / "a.json"), bench("compare", DEPLOYMENT, tmp_path / "a.json")):
        assert found.exit_code == 2
        assert "Not read" in found.stderr
        assert found.stdout == ""


def test_compare_holds_errors_to_a_limit_by_its_exit_code() -> None:
    near = bench("compare", DEPLOYMENT, *MADE, "--max-error", "15")
    assert near.exit_code == 0
    assert "below saturation, TPOT: mean error" in near.stdout
    far = bench("compare", DEPLOYMENT, *MADE, "--max-error", "tpot=1,ttft=50", "--replications", "1")
    assert far.exit_code == 1
    assert "Above --max-error: tpot: mean error" in far.stderr
    assert "ttft" not in far.stderr


def test_compare_writes_a_page_and_a_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    found = bench("compare", DEPLOYMENT, *MADE, "--html", page, "--plot", picture, "--replications", "1", "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["errors"]["below_saturation"]["tpot"]["runs"] == 2
    text = page.read_text()
    assert "Errors below saturation" in text
    assert "made-8" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_compare_takes_settings_of_the_scenario_and_facts_of_runs_and_picks_runs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(own.RUNS)
    how = [
        "--where",
        "arm=a",
        "--set",
        "run.output_tokens=16",
        "--set",
        "hardware=h200-sxm",
        "--replications",
        "1",
        "--csv",
    ]
    table = pd.read_csv(io.StringIO(bench("compare", DEPLOYMENT, tmp_path / "a.csv", *how).stdout))
    assert set(table["run"]) == {"a, row 1"}
    assert "ttft_mean_s" in set(table["figure"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", MADE[0], "--set", "replicas=2"], "without a scenario only facts of runs can be set"),
        (["show", MADE[0], "--json", "--csv"], "give one of them"),
        (["show", MADE[0], "--where", "arm=a"], "no run's configuration has it"),
        (["compare", DEPLOYMENT, MADE[0], "--max-error", "much"], "expected a percentage such as 15"),
        (["compare", DEPLOYMENT, MADE[0], "--max-error", "tpto=3"], "tpto is not a quantity; did you mean tpot?"),
        (["compare", DEPLOYMENT, MADE[0], "--html", "/nowhere/a.html"], "there is no folder /nowhere"),
        (["compare", DEPLOYMENT, MADE[0], "--statistic", "mode"], "--statistic is mean or median"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(arguments: list[str], words: str) -> None:
    found = bench(*arguments)
    assert found.exit_code == 2
    assert words in found.stderr


def test_another_model_than_the_files_is_noted() -> None:
    found = bench("compare", DEPLOYMENT, MADE[0], "--set", "model=llama-3.2-1b", "--replications", "1")
    assert (
        "files name the model meta-llama/Llama-3.1-8B-Instruct, and the scenario simulates llama-3.2-1b" in found.stderr
    )
