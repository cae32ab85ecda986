"""The table of closed forms that the command line lists, describes and evaluates."""

import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

from sim import theory
from sim.theory.published import published


def test_every_theory_has_a_summary_a_source_and_parameters():
    for name, entry in theory.THEORIES.items():
        assert entry.name == name
        assert entry.summary.endswith((".", ":")) or len(entry.summary) > 20, name
        assert len(entry.source) > 10, name
        assert entry.parameters, name


def test_a_theory_says_what_it_takes():
    entry = theory.theory("speedup")
    assert [p.name for p in entry.parameters] == ["alpha", "k", "c"]
    assert all(p.required for p in entry.parameters)
    assert "theorem 3.8" in entry.source
    assert entry.group == "speculative"


def test_text_arguments_are_read_as_numbers_lists_ranges_and_rows():
    entry = theory.theory("speedup")
    np.testing.assert_allclose(
        entry.evaluate({"alpha": "0.8", "k": "1:3", "c": "0.05"}), [1.8 / 1.05, 2.44 / 1.1, 2.952 / 1.15]
    )
    assert theory.theory("acceptance").evaluate({"target": "0.5,0.5", "draft": "0.2,0.8"}) == pytest.approx(0.7)
    rows = theory.theory("sparse_tree_mean_length").evaluate({"accuracies": "0.6,0.2;0.5,0.1", "nodes": "2"})
    assert rows == pytest.approx(1.0 + 0.6 + 0.3)


def test_defaults_may_be_left_out_and_overridden():
    entry = theory.theory("optimal_pd_ratio")
    assert entry.evaluate({"chunk": "256", "batch": "6"}) == pytest.approx(50.2)
    assert entry.evaluate({"chunk": "256", "batch": "6", "tile_adjusted": "false"}) == pytest.approx(51.2)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("speedup", {"alpha": "0.8", "k": "4", "cc": "1"}, "has no argument cc, did you mean c?"),
        ("speedup", {"alpha": "0.8"}, "needs k, c as well"),
        ("speedup", {"alpha": "eight", "k": "4", "c": "0"}, "'eight' is not a value"),
        ("speedup", {"alpha": "1.8", "k": "4", "c": "0"}, "alpha is a probability"),
        ("tokens_pmf", {"alpha": "0.8", "k": "1:3"}, "k of tokens_pmf is one whole number"),
    ],
)
def test_wrong_arguments_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        theory.theory(name).evaluate(arguments)


def test_an_unknown_theory_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean speedup"):
        theory.theory("speed_up")


def test_published_tables_are_read_by_name():
    assert len(published("spec_notes_expected_tokens")) == 35
    assert len(published("spec_notes_speedup")) == 32
    with pytest.raises(ValueError, match=r"there are .*spec_chinchilla, spec_decode_bench"):
        published("nothing")


def test_import_stays_light():
    code = "import sys, sim.theory; print([m for m in ('scipy', 'pandas', 'matplotlib') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_published_table_names_its_source():
    for path in (files("sim") / "reproduce" / "data").iterdir():
        head = path.read_text(encoding="utf-8").splitlines()[0]
        rows = published(path.name.removesuffix(".csv"))
        assert rows
        assert head.startswith("# source:") or all(row["source"] for row in rows), path.name
