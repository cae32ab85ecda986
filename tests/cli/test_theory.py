"""`rooftrace theory` lists, describes and evaluates closed forms."""

import json

import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.theory import THEORIES


def theory(*arguments):
    return CliRunner().invoke(build_app(), ["theory", *arguments])


def test_every_closed_form_is_listed_with_its_source():
    listed = json.loads(theory("--json").stdout)
    assert [entry["name"] for entry in listed] == list(THEORIES)
    assert all(entry["source"] for entry in listed)
    assert "speedup" in theory().stdout


def test_optional_arguments_are_listed_with_their_defaults():
    assert "c_ops=0.0" in theory().stdout


def test_without_numbers_a_form_is_described():
    answer = theory("speedup").stdout
    assert "Leviathan, theorem 3.8" in answer
    assert "alpha" in answer


def test_a_number_is_printed_as_such():
    answer = theory("speedup", "alpha=0.8", "k=4", "c=0.05")
    assert answer.exit_code == 0
    assert answer.stdout.strip() == "2.80133"


def test_a_list_or_a_range_is_printed_as_a_table():
    lines = theory("optimal_k", "alpha=0.5,0.8", "c=0.05").stdout.split("\n")
    cells = [line.split() for line in lines if line.strip() and line.strip()[0].isdigit()]
    assert cells == [["0.5", "3"], ["0.8", "8"]]


def test_json_keeps_infinity_as_text():
    answer = json.loads(theory("crossover_batch", "mean_length=6", "k=5", "context=500", "--json").stdout)
    assert answer["value"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["speedp"], "speedp is not a theory, did you mean speedup?"),
        (["speedup", "alpha=1.2", "k=1", "c=0"], "alpha is a probability in [0, 1]; got 1.2"),
        (["speedup", "alpha=0.5", "k=-1", "c=0"], "k is a whole number, 0 or more; got -1"),
        (["speedup", "alpha=0.5"], "speedup needs k, c as well"),
        (["speedup", "alfa=0.5"], "speedup has no argument alfa, did you mean alpha?"),
        (["speedup", "alpha"], "'alpha': expected ARGUMENT=VALUE"),
        (["speedup", "alpha=0.5", "alpha=0.6", "k=1", "c=0"], "given twice"),
        (["speedup", "alpha=a", "k=1", "c=0"], "'a' is not a value"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(arguments, expected):
    answer = theory(*arguments)
    assert answer.exit_code == 2
    assert expected in answer.stderr
    assert answer.stderr.count("\n") == 1
