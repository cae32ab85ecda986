"""What tables print is what they were given, whole."""

from typing import Any

import pytest

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
