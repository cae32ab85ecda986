"""Tables print what they were given, whole."""

import contextlib
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cli.tables import print_facts, print_table


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("axis", "outcome"), [("a:b:3", "[1, 2]"), ("[bold]x", ":cat:")])
    print_facts([("[red]", "[8, 16]")])
    out = capsys.readouterr().out
    for text in ("a:b:3", "[1, 2]", "[bold]x", ":cat:", "[red]", "[8, 16]"):
        assert text in out


@pytest.mark.parametrize("more", [{}, {"left": 2, "fold_left": True}, {"fold": 1}], ids=["plain", "left", "right"])
def test_a_file_gets_every_column_of_a_wide_table_side_by_side(
    more: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    row = ("row 1", "31.4/s ≤ 440", *(f"+{i}.7%" for i in range(10, 24)), "why")
    print_table([f"column {i}" for i in range(len(row))], [row], **more)
    out = capsys.readouterr().out
    for cell in (*row, "column 16"):
        assert cell in out
    assert sum(line.startswith(" row 1") for line in out.splitlines()) == 1


@settings(max_examples=25)
@given(
    words=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=16), min_size=1, max_size=4),
    left=st.integers(0, 3),
    fold=st.integers(0, 2),
    fold_left=st.booleans(),
    together=st.integers(1, 3),
    columns=st.integers(80, 120),
)
def test_a_table_that_is_too_wide_goes_on_below_and_loses_nothing(
    words: list[list[int]], left: int, fold: int, fold_left: bool, together: int, columns: int
) -> None:
    n = len(words[0])
    left, fold = min(left, n), min(fold, max(0, n - left))
    # Cells that no other has, so that each is found if it is there.
    rows = [
        [f"{i:02}.{j:02}" + "x" * (row[j % len(row)] // (1 if j < left else 3)) for j in range(n)]
        for i, row in enumerate(words)
    ]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        print_table([f"head {j}" for j in range(n)], rows, left=left, fold=fold, fold_left=fold_left, together=together)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in out.getvalue()
    for row in rows:
        for j, cell in enumerate(row):
            assert any(cell[:5] in line for line in lines)
            if len(cell) <= 20 and j >= max(left, 1):
                assert any(cell in line for line in lines)
    # Letters that are nowhere else: a cell on several lines has all of its own.
    keys = {0} if left == 0 else set(range(left))
    expected = sum(cell.count("x") for row in rows for j, cell in enumerate(row) if j not in keys)
    keyed = sum(cell.count("x") for row in rows for j, cell in enumerate(row) if j in keys)
    found = out.getvalue().count("x")
    assert (found - expected) % keyed == 0 if keyed else found == expected


def test_blocks_of_a_folded_table_begin_with_its_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    heads = ["run", *(f"{what}{i}" for i in range(3) for what in ("measured ", "simulated ", "error "))]
    print_table(heads, [["first", *(f"{i}.000" for i in range(9))]], together=3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("first")]
    assert rows == [["first", *(f"{i + j}.000" for j in range(3))] for i in (0, 3, 6)]
