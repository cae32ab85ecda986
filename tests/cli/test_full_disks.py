"""A disk without room: every command ends with one sentence and exit code 2, and leaves nothing that is half written."""

import contextlib
import io
import json
import resource
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from sim.cli import build_app
from tests.bench.own import VLLM_DETAILED
from tests.cli.test_every_table import PLACE

APP = build_app()
COMMAND = typer.main.get_command(APP)
SMALL = "scheduler: vllm\nworkload: {trace: conversation, limit: 5}\nslo: {ttft_s: 1.0}\n"
TRACE = "arrival_s,prompt_tokens,output_tokens,prefix_blocks_16\n0,40,5,1 2\n1,40,5,1 3\n"
AXIS = ("--axis", "scheduler.max_num_seqs=8,16", "--jobs", "1")
PRINTING = {
    "run": ("run", "s.yaml", "--no-plots", "--out", "out"),
    "run --json": ("run", "s.yaml", "--json", "--no-plots", "--out", "out"),
    "sweep": ("sweep", "s.yaml", *AXIS, "--out", "out"),
    "sweep --json": ("sweep", "s.yaml", *AXIS, "--json", "--out", "out"),
    "sweep --json, processes": ("sweep", "s.yaml", *AXIS[:2], "--json", "--jobs", "2", "--out", "out"),
    "optimize": ("optimize", "s.yaml", "--goal", "devices", *AXIS, "--replications", "2", "--attainment", "0.5"),
    "compare": ("compare", "s.yaml", "s.yaml", "--replications", "2", "--jobs", "1"),
    "capacity": ("capacity", "s.yaml"),
    "place": ("place", "place.yaml", "--json"),
    "plot": ("plot", "done", "--out", "out"),
    "export": ("export", "done"),
    "scenario from": ("scenario", "from", "vllm serve Qwen/Qwen3-8B", "--hardware", "h100-sxm"),
    "schema": ("schema",),
    "trace describe": ("trace", "describe", "t.csv"),
    "trace convert": ("trace", "convert", "t.csv", "/dev/full"),
    "trace reuse": ("trace", "reuse", "t.csv", "--json"),
    "hardware": ("hardware",),
    "models": ("models", "--json"),
    "theory": ("theory",),
    "bench show": ("bench", "show", "log.json"),
    "--version": ("--version",),
    "--help": ("--help",),
    "run --help": ("run", "--help"),
}
WRITING = {
    "run": ("run", "s.yaml", "--out", "out"),
    "run --html": ("run", "s.yaml", "--no-plots", "--html", "--out", "out"),
    "run --timeline": ("run", "s.yaml", "--no-plots", "--timeline", "events.json", "--out", "out"),
    "sweep": ("sweep", "s.yaml", *AXIS, "--out", "out"),
    "sweep, processes": ("sweep", "s.yaml", *AXIS[:2], "--jobs", "2", "--out", "out"),
    "optimize": ("optimize", "s.yaml", "--goal", "devices", *AXIS, "--replications", "2", "--out", "out"),
    "place": ("place", "place.yaml", "--out", "out"),
    "plot": ("plot", "done", "--out", "out"),
    "trace convert": ("trace", "convert", "t.csv", "converted.csv"),
    "trace reuse": ("trace", "reuse", "t.csv", "--out", "reuse.png"),
    "reproduce": ("reproduce", "speculative", "--quick", "--jobs", "1", "--out", "out"),
}
SLOW = (
    "sweep --json, processes",
    "sweep, processes",
    "reproduce",
    "plot",
    "optimize",
    "run --html",
    "compare",
    "schema",
)


def commands(table):
    return [
        pytest.param(name, marks=pytest.mark.slow(reason="several whole runs")) if name in SLOW else name
        for name in table
    ]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("s.yaml", SMALL), ("place.yaml", PLACE), ("t.csv", TRACE)):
        Path(name).write_text(text)
    Path("log.json").write_text(json.dumps(VLLM_DETAILED))


def finished_run():
    assert CliRunner().invoke(APP, ["run", "s.yaml", "--no-plots", "--out", "done"]).exit_code == 0


@contextlib.contextmanager
def files_of_at_most(n_bytes):
    """No file of this process, or of those that it starts, grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_into(stdout, words):
    """Exit code and standard error of a command whose standard output goes there."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout), pytest.raises(SystemExit) as ended:
        COMMAND(list(words), prog_name="rooftrace")
    return ended.value.code, stderr.getvalue()


def one_error(said):
    assert "Traceback" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("Error: ")]
    return error


def files():
    return {str(path) for path in Path().rglob("*") if path.is_file()}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("command", commands(PRINTING))
def test_standard_output_on_a_full_disk(command):
    if "done" in PRINTING[command]:
        finished_run()
    with open("/dev/full", "w") as full:
        code, said = run_into(full, PRINTING[command])
    assert code == 2
    assert ("/dev/full" if "/dev/full" in PRINTING[command] else "standard output") in one_error(said)
    assert "No space left on device" in said
    if command.startswith("run") and "--out" in PRINTING[command]:
        assert Path("out/summary.json").is_file()


@pytest.mark.parametrize("command", commands(WRITING))
def test_files_on_a_full_disk(command):
    if "done" in WRITING[command]:
        finished_run()
    before = files()
    with files_of_at_most(1):
        code, said = run_into(io.StringIO(), WRITING[command])
    assert code == 2, said
    assert "File too large" in one_error(said)
    assert files() == before


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow(reason="several whole runs"))])
def test_a_sweep_keeps_what_it_finished_before_the_disk_was_full(jobs):
    # Figures by class make the points larger than the manifest, which shall find room.
    Path("s.yaml").write_text(SMALL + "\nclasses: {a: {share: 1}, b: {share: 1}}\n")
    words = ("sweep", "s.yaml", "--axis", "scheduler.max_num_seqs=8,16", "--json", "--jobs", jobs, "--out")
    assert run_into(io.StringIO(), (*words, "whole"))[0] == 0
    points = {path.name: path.stat().st_size for path in Path("whole/points").iterdir()}
    manifest = Path("whole/manifest.json").stat().st_size
    assert manifest < min(points.values())
    Path("out/points").mkdir(parents=True)
    kept = next(iter(points))
    Path("out/points", kept).write_bytes(Path("whole/points", kept).read_bytes())
    # Points are not always as long: they have the time that their run took.
    with files_of_at_most((manifest + min(points.values())) // 2):
        code, said = run_into(io.StringIO(), (*words, "out"))
    assert code == 2
    assert "what was finished is kept, and the same command goes on" in one_error(said)
    assert [path.name for path in Path("out/points").iterdir()] == [kept]
    stdout = io.StringIO()
    assert run_into(stdout, (*words, "out"))[0] == 0
    assert json.loads(stdout.getvalue().splitlines()[-2])["reused"] == 1
