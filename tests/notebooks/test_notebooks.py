"""Each notebook is a pair: text that is edited and reviewed, and the .ipynb of the same cells. Both run."""

import json
import os
import re
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


def cells_of(text):
    """The cells of the half that is text, as jupytext reads them: loading that takes longer than all tests here."""
    found = []
    for cell in text.split("\n# %%")[1:]:
        head, _, body = cell.partition("\n")
        kind = "markdown" if head == " [markdown]" else "code"
        behind = re.compile(r"^# ?" if kind == "markdown" else r"^# (?=%)", re.MULTILINE)
        found.append((kind, behind.sub("", body.strip("\n"))))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_both_halves_of_a_pair_have_the_same_cells(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells_of((FOLDER / f"{name}.py").read_text(encoding="utf-8")) == cells, (
        f"run: jupytext --sync notebooks/{name}.py"
    )


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
