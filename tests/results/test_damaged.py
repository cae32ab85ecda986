"""A folder of results with a file missing or damaged: one sentence with the file's name, whatever is asked of the folder."""

import random
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from sim import Scenario, sweep
from sim.cli import build_app
from sim.errors import OutputError
from sim.results import DATA, Result
from sim.study.sweep import SweepResult
from tests.results.fakes import plausible

TRANSFERS = "kv_transfers.parquet"
DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut at its half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut near its end": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "text": lambda path: path.write_text("see you at lunch\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a run with transfers of KV, and that of a sweep with failures."""
    there = tmp_path_factory.mktemp("folders")
    columns = plausible(60, 300)
    moved = {"begin_ns": [5, 9], "end_ns": [7, 12], "bytes": [100, 200], "what": [0, 1], "source": [1, 0]}
    columns.transfers = lambda: {name: np.array(values) for name, values in {**moved, "destination": [0, 1]}.items()}
    Result(columns, manifest={"label": "toy"}).save(there / "run")
    sweep(
        Scenario.default().with_set("workload.limit=2"), axes={"workload.limit": [2, -2]}, jobs=1, out=there / "sweep"
    )
    return there


def everything(folder):
    result = Result.load(folder)
    return result.summary, result.requests, result.iterations, result.kv_transfers


def read_or_refused(folder):
    try:
        everything(folder)
    except OutputError as error:
        return str(error)


def read_sweep(folder):
    found = SweepResult(folder)
    return found.table, found.runs, found.failures()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*DATA, TRANSFERS])
def test_a_run_whose_file_is_not_whole_is_refused_with_its_name(folders, tmp_path, name, damage):
    run = shutil.copytree(folders / "run", tmp_path / "run")
    DAMAGES[damage](run / name)
    with pytest.raises(OutputError, match=name) as refused:
        Result.load(run)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", DATA[1:])
def test_every_command_that_reads_a_run_ends_with_the_sentence(folders, tmp_path, name):
    run, app = shutil.copytree(folders / "run", tmp_path / "run"), build_app()
    DAMAGES["cut at its half"](run / name)
    reads = (
        ["plot", str(run)],
        ["plot", str(run), "--html", "r.html"],
        ["export", str(run)],
        ["compare", *[str(run)] * 2],
    )
    for arguments in reads:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert name in "".join(done.output.split()), (arguments, done.output)


def test_a_file_of_a_run_is_not_taken_for_another(folders, tmp_path):
    for name in (*DATA, TRANSFERS):
        for other in (*DATA, TRANSFERS):
            if name != other:
                run = shutil.copytree(folders / "run", tmp_path / "run")
                shutil.copy(run / other, run / name)
                with pytest.raises(OutputError, match=name):
                    Result.load(run)
                shutil.rmtree(run)


def test_bytes_changed_anywhere_are_read_or_refused_with_the_name(folders, tmp_path):
    run, rng, refused = shutil.copytree(folders / "run", tmp_path / "run"), random.Random(0), 0
    for name in ("requests.parquet", "iterations.parquet", TRANSFERS):
        whole = (run / name).read_bytes()
        for _ in range(80):
            changed = bytearray(whole)
            for _ in range(rng.choice((1, 3, 30))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            (run / name).write_bytes(changed)
            told = read_or_refused(run)
            assert told is None or name in told
            refused += told is not None
        (run / name).write_bytes(whole)
    assert refused > 20
    everything(run)


def test_a_run_of_a_version_that_listed_no_files_is_still_read(folders, tmp_path):
    run = shutil.copytree(folders / "run", tmp_path / "run")
    text = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(text.replace('"files"', '"before"'))
    assert len(Result.load(run).kv_transfers) == 2


SWEPT = ("manifest.json", "results.parquet", "runs.parquet", "failures.csv")


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in SWEPT for damage in DAMAGES if not (name.endswith("csv") and damage.startswith("cut"))],
)
def test_a_sweep_whose_file_is_not_whole_is_refused_with_its_name(folders, tmp_path, name, damage):
    assert [len(part) for part in read_sweep(folders / "sweep")] == [2, 2, 1]
    swept = shutil.copytree(folders / "sweep", tmp_path / "sweep")
    DAMAGES[damage](swept / name)
    with pytest.raises(OutputError, match=name):
        read_sweep(swept)
