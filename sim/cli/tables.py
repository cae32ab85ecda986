"""The output of commands: tables and facts for people, readable in 80 columns and in a file alike, and the same as JSON."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_FILE_COLUMNS = 120
_WRAPPED = 20
"""Columns that text which goes on over several lines has at least, where it has so many."""


def print_json(value: Any) -> None:
    """Print *value* as indented JSON and nothing else: NaN as null, other numbers that JSON lacks and paths as text."""
    typer.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def print_notes(sentences: Iterable[object], *, head: str = "Note") -> None:
    """Print each of *sentences* on standard error, behind *head*."""
    for sentence in sentences:
        typer.echo(f"{head}: {sentence}", err=True)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array of numpy, or a number
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _room() -> int | None:
    """Columns that lines may have: those of the terminal, or what COLUMNS says; None for a file, which has room for all."""
    if sys.stdout.isatty():
        return None if (width := _console(None).width) <= 0 else width
    said = os.environ.get("COLUMNS", "")
    return int(said) if said.isdigit() and int(said) else None


def _console(width: int | None) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            # Rich would end with 1; `rooftrace run | head` is no failure, and the application knows what to do.
            raise BrokenPipeError

    return Plain(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def console(least: int = 0) -> Console:
    """Standard output, as wide as the terminal or as COLUMNS says; a file has 120 columns, or *least* where that is more.

    Text is printed as it is: `[1, 2]` is no style, and `:b:` no picture.
    """
    return _console(_room() or max(_FILE_COLUMNS, least))


def print_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 1,
    fold: int = 0,
    fold_left: bool = False,
    together: int = 1,
) -> None:
    """Print a table whose first *left* and last *fold* columns are text, and the others numbers set to the right.

    The last *fold* columns go on over several lines where they are long; with *fold_left* the first *left* do too. Where there is
    no room for all columns side by side, they are folded into blocks of lines below one another, each with the first columns again;
    so many of the others as are meant *together* stay in one block. Nothing is cut.
    """
    table = _Table(heads, list(rows), left=left, fold=fold, fold_left=fold_left)
    room = _room()
    columns = range(len(heads))
    if room is None or table.width(columns, table.least, gap=3) <= room:
        out = console(table.width(columns, table.least, gap=3))
        out.print(table.wide(title))
        return
    out = _console(room)
    if title:
        out.print(title, style="italic")
    for block in table.blocks(room, together):
        out.print(block)


class _Table:
    """The cells of a table, and how wide its columns are."""

    def __init__(
        self, heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, fold: int, fold_left: bool
    ) -> None:
        from rich.cells import cell_len

        self.heads, self.rows, self.left = list(heads), rows, left
        n = len(heads)
        self.tail = range(n - fold, n)
        self.wraps = {*self.tail, *(range(left) if fold_left else ())}
        self.cells = [max((cell_len(line) for row in rows for line in row[i].split("\n")), default=0) for i in range(n)]
        whole = [max(self.cells[i], *map(cell_len, head.split("\n"))) for i, head in enumerate(heads)]
        self.least = [min(width, _WRAPPED) if i in self.wraps else width for i, width in enumerate(whole)]
        # Heads go on over several lines where there is little room, long names of settings at their dots.
        self.parts = [
            [
                part
                for word in head.split()
                for part in (re.findall(r"[^.]+\.?|\.", word) if len(word) > _WRAPPED else [word])
            ]
            for head in heads
        ]
        self.narrow = [
            max(self.least[i] if i in self.wraps else self.cells[i], *map(cell_len, self.parts[i] or [""]))
            for i in range(n)
        ]

    @staticmethod
    def width(columns: Iterable[int], widths: Sequence[int], *, gap: int) -> int:
        """The width of a line with *columns*, *gap* between two of them; a gap of 3 is framed by blanks."""
        mine = [widths[i] for i in columns]
        return sum(mine) + gap * (len(mine) - 1) + (2 if gap == 3 else 0)

    def wide(self, title: str | None) -> Any:
        """All columns side by side."""
        from rich import box
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, head in enumerate(self.heads):
            wraps = i in self.wraps
            least = min(self.least[i], 8) if wraps else None
            table.add_column(head, justify=self._justify(i), overflow="fold", no_wrap=not wraps, min_width=least)
        for row in self.rows:
            table.add_row(*row)
        return table

    def blocks(self, room: int, together: int) -> Iterator[Any]:
        """Tables of at most *room* columns, one below the other."""
        keys, tail = list(range(max(self.left, 1))), [i for i in self.tail if i >= max(self.left, 1)]
        middle = [i for i in range(len(keys), len(self.heads)) if i not in tail]
        groups = [middle[i : i + together] for i in range(0, len(middle), together)] + [[i] for i in tail]
        narrow = list(self.narrow)
        everything = [*keys, *middle, *tail]
        # Names are narrowed first, between words, to a third of the room or what makes all columns fit.
        over = self.width(everything, narrow, gap=2) - room
        third = room // 3 // len(keys)
        rest = (room - max((narrow[i] for i in [*middle, *tail]), default=0)) // len(keys) - 2
        for i in sorted(keys, key=lambda i: -narrow[i]):
            words = (len(word) for row in [*self.rows, self.heads] for word in row[i].split())
            given = min(over, narrow[i] - max(third, min(_WRAPPED, rest, max(words, default=0))))
            if given > 0:
                narrow[i], over = narrow[i] - given, over - given
        # What is wider together than a line comes apart.
        groups = [
            part
            for group in groups
            for part in ([group] if self.width([*keys, *group], narrow, gap=2) <= room else [[i] for i in group])
        ]
        block = list(keys)
        for group in groups:
            if len(block) > len(keys) and self.width([*block, *group], narrow, gap=2) > room:
                yield self._block(block, narrow, room)
                block = list(keys)
            block += group
        yield self._block(block, narrow, room)

    def _block(self, columns: Sequence[int], narrow: Sequence[int], room: int) -> Any:
        from rich import box
        from rich.table import Table

        spare = max(0, room - self.width(columns, narrow, gap=2))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
        alone = len(columns) == max(self.left, 1) + 1
        for i in columns:
            width = narrow[i]
            if alone and i == columns[-1]:
                width = min(width, room - self.width(columns[:-1], narrow, gap=2) - 2)
            if spare and i in self.wraps | set(range(max(self.left, 1))):
                more = min(spare, max(self.cells[i] - width, 0))
                width, spare = width + more, spare - more
            table.add_column(self._head(i, width), justify=self._justify(i), overflow="fold", width=width)
        keys = max(self.left, 1)
        for row in self.rows:
            # A row without anything in this block is in another.
            if len(columns) == keys or any(row[i] for i in columns[keys:]):
                table.add_row(*(row[i] for i in columns))
        table.add_row()
        return table

    def _head(self, column: int, width: int) -> str:
        """The head on as few lines of *width* as its parts take."""
        lines = [""]
        for part in self.parts[column]:
            space = " " if lines[-1] and not lines[-1].endswith(".") else ""
            if lines[-1] and len(lines[-1]) + len(space) + len(part) > width:
                lines.append(part)
            else:
                lines[-1] += space + part
        return "\n".join(lines)

    def _justify(self, column: int) -> Any:
        return "left" if column < self.left or column in self.wraps else "right"


def written(folder: Path, *commands: str) -> list[tuple[str, str]]:
    """Facts that say what a command has written into *folder*, and by which other commands to look at it."""
    names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in folder.iterdir() if each.name[0] != ".")
    page = [f"{folder / 'report.html'} in a browser"] if "report.html" in names else []
    facts = [("Results", f"{folder}/: {', '.join(names)}")]
    return [*facts, *(("See" if i == 0 else "", text) for i, text in enumerate([*page, *commands]))]


def seen_by(folder: Path) -> tuple[str, ...]:
    """Commands that look at the results folder of a run."""
    name = shlex.quote(str(folder))
    page = f"rooftrace plot {name} --html {shlex.quote(str(folder) + '.html')}"
    return (
        *([] if (folder / "report.html").exists() else [page]),
        f"rooftrace compare {name} OTHER",
        f"rooftrace export {name} --for vllm",
    )


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print pairs of name and text, one a line."""
    from rich.table import Table

    rows = list(rows)
    if not rows:
        return
    out = console()
    names = max(len(name) for name, _ in rows)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", no_wrap=names <= out.width // 2, max_width=out.width // 2)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    out.print(table)
