"""The ends of commands: files that are checked before the work that they hold and written whole, and what of measured files was
left out."""

from __future__ import annotations

from pathlib import Path

import typer

from sim.cli.tables import print_notes
from sim.errors import OutputError
from sim.validation.files import LEFT_OUT, Folder
from workloads.write import write_whole


def check_folder_of(*paths: Path | None) -> None:
    """OutputError where the folder of a file that will be written does not exist; None is no file."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OutputError(f"cannot write {path}: its folder does not exist; create it first")


def put_text(path: Path, text: str) -> None:
    """Write *text* to *path*, all of it or nothing; OutputError where that cannot be."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


def end_with_left_out(folder: Folder) -> None:
    """Print what of a folder of measurements was not understood, and end the command with exit code 3 where that is anything."""
    print_notes(folder.left_out, head="Left out")
    if folder.left_out:
        typer.echo(folder.verdict, err=True)
        raise typer.Exit(LEFT_OUT)
