"""Tables for people, readable in a terminal and in a file alike."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_FILE_COLUMNS = 120


def console() -> Console:
    """Standard output; 120 columns wide where it is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS, highlight=False, soft_wrap=False)


def print_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 1,
    fold: int = 0,
    fold_left: bool = False,
    least: int = 0,
) -> None:
    """Print a table whose first *left* and last *fold* columns are text, and the others numbers set to the right.

    The last *fold* columns go on over several lines where they are long; with *fold_left* the first *left* do too,
    but never below *least* columns of the terminal each.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        wraps = index >= len(heads) - fold or (fold_left and index < left)
        text = index < left or wraps
        table.add_column(
            head,
            justify="left" if text else "right",
            overflow="fold" if wraps else "ellipsis",
            no_wrap=not wraps,
            min_width=least if index < left and least else None,
        )
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print pairs of name and text, one a line."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console().print(table)
