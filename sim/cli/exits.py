"""Exit codes of the command line, beside 0 and those of a single command, and what is said when a signal ends it."""

from __future__ import annotations

from pathlib import Path

import typer

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
TERMINATED = 143  # 128 + SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does: half-written results are removed, and what was finished is kept."""


def code_of(error: KeyboardInterrupt) -> int:
    """The exit code of a command that a signal has ended."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def interrupted(error: KeyboardInterrupt, kept: str = "nothing was written.") -> typer.Exit:
    """The end of a command that a signal has ended, once it is said what was *kept*."""
    typer.echo(f"{'Terminated' if isinstance(error, Terminated) else 'Interrupted'}; {kept}", err=True)
    return typer.Exit(code_of(error))


def going_on(folder: Path) -> str:
    """The sentence about a *folder* whose finished runs an interrupted command keeps."""
    return f"what was finished is kept in {folder}/, and the same command goes on."
