"""Every command that prints a table prints it in 80 columns, and prints the same figures as JSON."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

import sim.cli.tables as tables
from sim.cli import build_app
from tests.validate.test_own_tables import gemms, saved

EXAMPLES = Path(__file__).parents[2] / "examples"
APP = build_app()
SCENARIO = """\
scheduler: vllm
workload: {trace: conversation, limit: 20}
slo: {ttft_s: 1.0, ttft_p95_s: 0.9}
"""
PLACE = """\
cluster: {devices: 2, memory_gib: 13.0}
models: [{model: bert-1.3b, copies: 2}]
workload: {arrivals: {process: poisson, rate_per_s: 4}, duration_s: 5}
serving: {slo_scale: 5}
placement: {policy: partition}
"""
TRACE = "arrival_s,prompt_tokens,output_tokens,prefix_blocks_16\n0,40,5,1 2\n1,40,5,1 3\n2,41,7,1 2\n"
AXES = ("--axis", "scheduler.max_num_seqs=8,16", "--axis", "memory.gpu_memory_utilization=0.8,0.9", "--jobs", "1")
BENCH = (EXAMPLES / "bench" / "deployment.yaml", EXAMPLES / "bench" / "made-2.json", EXAMPLES / "bench" / "made-8.json")
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "run": [("s.yaml", "--no-plots", "--out", "out")],
    "explain": [("s.yaml", "--no-effects")],
    "sweep": [("s.yaml", *AXES, "--replications", "2", "--out", "out")],
    "compare": [("s.yaml", "t.yaml", "--replications", "2", "--jobs", "1")],
    "trace describe": [("t.csv",)],
    "capacity": [("s.yaml",), ("--published",)],
    "validate": [("--measured", "gemm.csv", "--hardware", "h200")],
    "bench show": [BENCH[1:]],
    "bench compare": [(*BENCH, "--replications", "1")],
    "theory": [(), ("speedup",), ("speedup", "alpha=0.5,0.7", "k=4", "c=0.05")],
    "models": [()],
    "models show": [("llama-3.1-8b",)],
    "hardware": [()],
    "hardware show": [("h100-sxm",)],
    "hardware diff": [("a100-80gb-sxm", "tpu-v6e")],
    "doctor": [()],
}
"""Arguments of commands that print tables."""
SLOW = {
    "optimize": ("s.yaml", "--goal", "devices", *AXES, "--replications", "2", "--attainment", "0.5"),
    "trace reuse": ("t.csv", "--out", "t.png"),
    "advise": ("s.yaml", "--only", "machines,tensor", "--replications", "2", "--jobs", "1"),
    "place": ("place.yaml",),
    "fit": ("--measured", "gemm.csv", "--device", "h200", "--out", "h200.toml", "--no-borrow"),
    "capacity": ("s.yaml", "--set", "workload.limit=300", "--slo", "--limit", "ttft_p95=0.2s", "--tolerance", "0.3"),
    "calibrate": ("--backend", "numpy", "--budget", "6s", "--allow-noise", "--out", "out"),
    "reproduce": ("speculative", "--quick", "--jobs", "1"),
    "bench fit": (*BENCH, "--out", "stack.toml"),
    "observe": (
        EXAMPLES / "observe" / "counters.csv", "--scenario", EXAMPLES / "observe" / "deployment.yaml", "--no-fit",
        "--replications", "2", "--what-if", "replicas=3", "--out", "out",
    ),
    "bench next": (BENCH[0], "--rate", "2", "--prompt-tokens", "256", "--output-tokens", "32"),
}  # fmt: skip
BY_HAND = ("serve",)
"""Its table comes when it is stopped (tests/serve)."""
NO_TABLE: dict[str, tuple[Any, ...]] = {
    "plot": ("done", "--html", "done.html"),
    "export": ("done",),
    "explore": ("s.yaml", "--set", "workload.limit=60", "--set", "slo=null", "--export", "page.html"),
    "schema": (),
    "scenario from": ("vllm serve Qwen/Qwen3-8B", "--hardware", "h100-sxm"),
    "trace convert": ("t.csv", "converted.csv"),
}


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something of its own, by its words."""
    found = getattr(command, "commands", None)
    if found is None or (name and command.invoke_without_command):
        yield name, command
    for word, each in (found or {}).items():
        yield from leaves(each, f"{name} {word}".strip())


COMMANDS = dict(leaves(typer.main.get_command(APP)))


@pytest.fixture(autouse=True)
def in_a_folder_80_columns_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("s.yaml").write_text(SCENARIO)
    Path("t.yaml").write_text(SCENARIO + "replicas: 2\n")
    Path("place.yaml").write_text(PLACE)
    Path("t.csv").write_text(TRACE)
    saved(gemms(gpu="H200"), Path("gemm.csv"))


def rooftrace(name: str, *arguments: Any) -> Result:
    return CliRunner().invoke(APP, [*name.split(), *map(str, arguments)])


def test_every_command_is_known_here_and_has_json_where_it_prints_a_table() -> None:
    assert set(COMMANDS) == {*CALLS, *SLOW, *BY_HAND, *NO_TABLE}
    for name, command in COMMANDS.items():
        assert any("--json" in each.opts for each in command.params) == (name not in NO_TABLE), name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            each, marks=[pytest.mark.slow(reason="several whole runs")] * (each in ("plot", "explore", "schema"))
        )
        for each in NO_TABLE
    ],
)
def test_commands_without_json_print_no_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "done" in NO_TABLE[name]:
        assert rooftrace("run", "s.yaml", "--no-plots", "--out", "done").exit_code == 0
    for each in ("print_table", "print_facts"):
        monkeypatch.delattr(tables, each)
    result = rooftrace(name, *NO_TABLE[name])
    assert result.exit_code == 0, result.output


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = [*value.values(), *value]  # keys, for lengths of sequences are some
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in NUMBER.findall(value))


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
UNITS = np.array([1, 100, 1e3, 1e6, 1e-3, 1e-6, 1e-9, 1e-12, 2.0**-30, 1 / 60])
"""In how many a figure may be shown: percent, ms, GB, GiB and the like."""


def is_of(text: str, figures: np.ndarray) -> bool:
    """Whether a number is one of the sorted *figures* rounded to its digits."""
    value = Decimal(text.replace(",", ""))
    half_a_digit = 0.5 * 10.0 ** int(value.as_tuple().exponent) * (1 + 1e-9)
    first, last = np.searchsorted(figures, [float(value) - half_a_digit, float(value) + half_a_digit])
    return bool(last > first) or bool(figures[min(first, len(figures) - 1)] == float(value))


def printed(name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[list[str], list[list[str]]]] = []
    facts: list[tuple[str, str]] = []
    print_table, print_facts = tables.print_table, tables.print_facts

    def table(heads: Any, rows: Any, **how: Any) -> None:
        rows = [list(row) for row in rows]
        given.append((list(heads), rows))
        print_table(heads, rows, **how)

    def pairs(rows: Any) -> None:
        rows = list(rows)
        facts.extend(rows)
        print_facts(rows)

    for module in [module for key, module in sys.modules.items() if key.startswith("sim.cli.")]:
        for called, replaced in (("print_table", table), ("print_facts", pairs)):
            if hasattr(module, called):
                monkeypatch.setattr(module, called, replaced)
    shown = rooftrace(name, *arguments)
    assert shown.exit_code in (0, 1), shown.output
    assert given or facts or name == "theory"
    assert "…" not in shown.stdout
    folded = re.sub(r"\s+", " ", shown.stdout)
    for heads, rows in given:
        for cells in (heads, *rows):
            for word in (word for cell in cells for word in cell.split() if len(word) <= 20):
                assert word in folded
        assert all(len(line) <= 80 for line in shown.stdout.splitlines() if line.startswith(("─", " ─")))
    # What has been timed is fitted once more: timed again, it would be other figures.
    again = ("--fit-only",) if name == "calibrate" else ()
    as_json = rooftrace(name, *arguments, *again, "--json")
    assert as_json.exit_code == shown.exit_code, as_json.output
    text = as_json.stdout
    found = [json.loads(line) for line in text.splitlines()] if name == "sweep" else json.loads(text)
    if name == "sweep":
        return  # its lines say which runs are done, and the folder has the figures
    figures = np.sort(np.outer(np.abs([*numbers_in(found)]), UNITS), axis=None)
    for _, rows in given:
        for row in rows:
            for cell in row[1:]:
                for number in NUMBER.findall(cell):
                    assert is_of(number, figures), (number, row)


@pytest.mark.parametrize(
    ("name", "arguments"), [pytest.param(name, each, id=name) for name, calls in CALLS.items() for each in calls]
)
def test_a_table_is_whole_in_80_columns_and_the_same_as_json(
    name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(name, arguments, monkeypatch)


@pytest.mark.slow(reason="several whole runs")
@pytest.mark.parametrize("name", SLOW)
def test_a_table_that_takes_long_is_whole_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The budget runs down by the look, not by the second: a slow machine takes as many samples as a fast one.
    looks = itertools.count()
    monkeypatch.setattr("hwmodels.calibrate.session.time", SimpleNamespace(monotonic=lambda: 0.022 * next(looks)))
    printed(name, SLOW[name], monkeypatch)
