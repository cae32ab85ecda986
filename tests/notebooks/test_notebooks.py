"""Each notebook is a pair: text that is edited and reviewed, and the .ipynb of the same cells. Both run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def test_there_is_a_notebook_for_each_story():
    assert [name.split("-", 1)[1] for name in NAMES] == [
        "first-steps",
        "speculative-speedup",
        "sarathi-chunk-size",
        "alpaserve-multiplexing",
        "calibrate-this-machine",
        "capacity-planning",
        "how-much-cache",
        "your-benchmark",
        "rollout-tail",
        "adapters",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_both_halves_of_a_pair_have_the_same_cells(name):
    jupytext = pytest.importorskip("jupytext", reason="needs the extra [notebooks]")
    text, notebook = (jupytext.read(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    cells = [[(cell.cell_type, cell.source) for cell in each.cells] for each in (text, notebook)]
    assert cells[0] == cells[1], f"run: jupytext --sync notebooks/{name}.py"


@pytest.mark.slow(reason="a whole notebook")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    pytest.importorskip("nbmake", reason="needs the extra [notebooks]")
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=240", "--override-ini=addopts="]
    command += ["--override-ini=filterwarnings=", "-q", "-p", "no:cacheprovider", str(FOLDER / f"{name}.ipynb")]
    # The kernel starts in notebooks/: it imports the code beside them, whatever else is installed.
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
