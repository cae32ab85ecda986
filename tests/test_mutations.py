"""The table of `benchmarks.mutations` fits the code: each text is there once, and so are the tests that should notice."""

from __future__ import annotations

from collections import Counter

from benchmarks.mutations import MUTATIONS, ROOT


def test_every_text_that_is_replaced_is_found_exactly_once() -> None:
    texts = {each.file: (ROOT / each.file).read_text(encoding="utf-8") for each in MUTATIONS}
    found = {f"{each.file}: {each.name}": texts[each.file].count(each.old) for each in MUTATIONS}
    assert len(found) > 100
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_every_change_has_a_name_of_its_own_and_tests_that_exist() -> None:
    names = Counter((each.file, each.name) for each in MUTATIONS)
    assert [name for name, count in names.items() if count > 1] == []
    missing = {test for each in MUTATIONS for test in each.tests if not (ROOT / test.split("::")[0]).exists()}
    assert missing == set()
    assert all(each.old != each.new for each in MUTATIONS)
