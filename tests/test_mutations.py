"""The tool that changes meanings changes one at a time, and its named changes fit the code."""

import ast

from benchmarks.mutations import NAMED, mirror_of, mutations_of, named

SOURCE = """
def least(values, limit):
    found = 0
    for value in values:
        if value < limit and not value == 7:
            continue
        found += value
        print(found)
    return found - 1
"""


def test_each_mutation_changes_one_place_and_parses():
    changed = list(mutations_of("least.py", SOURCE))
    assert {(each.old, each.new) for each in changed} == {
        ("value < limit and not value == 7", "(value < limit or not value == 7)"),
        ("value < limit", "value <= limit"),
        ("not value == 7", "bool(value == 7)"),
        ("value == 7", "value != 7"),
        ("0", "1"),
        ("1", "2"),
        ("continue", "break"),
        ("found += value", "found -= value"),
        ("print(found)", "pass"),
        ("found - 1", "(found + 1)"),
    }
    for each in changed:
        assert ast.dump(ast.parse(each.source)) != ast.dump(ast.parse(SOURCE))


def test_the_named_changes_fit_the_code():
    assert len(list(named())) == len(NAMED) == 10


def test_the_mirror_of_a_file_are_those_of_its_room():
    assert mirror_of("sim/engine/kv/runs.py") == mirror_of("sim/engine/kv/block_runs.py") == ("tests/engine",)
    assert mirror_of("policies/vllm.py") == ("tests/policies",)
    assert mirror_of("sim/text.py") == ("tests/test_text.py",)
    assert mirror_of("rooftrace.py") == mirror_of("sim/run.py") == ("tests",)
