"""Tests that are marked slow say why."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def marks_without_a_reason(source: str) -> list[int]:
    """The lines of *source* on which a test is marked slow without `reason`."""
    tree = ast.parse(source)
    said = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            each.arg == "reason" and (isinstance(each.value, ast.Name) or getattr(each.value, "value", ""))
            for each in node.keywords
        )
    }
    marks = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "slow" and ast.unparse(node.value).endswith("mark")
    )
    return sorted(node.lineno for node in marks if id(node) not in said)


def test_a_slow_test_says_why() -> None:
    files = sorted(TESTS.rglob("*.py"))
    sources = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert sum(source.count("mark.slow") for source in sources.values()) > 100
    marked = {name: source for name, source in sources.items() if "mark.slow" in source}
    found = [f"tests/{name}:{line}" for name, source in marked.items() for line in marks_without_a_reason(source)]
    assert not found, 'a test is marked slow as @pytest.mark.slow(reason="why")'


def test_marks_without_a_reason_are_found() -> None:
    marks = ("", '(reason="long")', '(reason="")')
    source = "\n".join(f"@pytest.mark.slow{mark}\ndef test(): ..." for mark in marks)
    assert marks_without_a_reason(source) == [1, 5]
