"""Tables for people, readable in a terminal and in a file alike."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_FILE_COLUMNS = 120
_WRAPPED = 20
"""Columns that text which goes on over several lines has in a file at least, where it has so many."""


def console(least: int = 0) -> Console:
    """Standard output; where it is not a terminal 120 columns wide, or *least* where that is more.

    Text is printed as it is: `[1, 2]` is no style, and `:b:` no picture.
    """
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            # Rich would end with 1; `rooftrace run | head` is no failure, and the application knows what to do.
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else max(_FILE_COLUMNS, least)
    return Plain(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


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
    from rich.cells import cell_len
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
    needed = [cell_len(head) for head in heads]
    for row in rows:
        table.add_row(*row)
        needed = [max(width, cell_len(cell)) for width, cell in zip(needed, row, strict=True)]
    for index in range(len(heads)):
        if index >= len(heads) - fold or (fold_left and index < left):
            needed[index] = min(needed[index], _WRAPPED)
    # A file has room for every column, three between two of them; a terminal has the room that it has.
    console(sum(needed) + 3 * len(needed) + 1).print(table)


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print pairs of name and text, one a line."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console().print(table)
