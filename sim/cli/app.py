"""The application: every command registered, errors turned into one sentence."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from sim.cli import commands
from sim.cli.commands import doctor
from sim.cli.exits import USER_ERROR, interrupted
from sim.errors import RooftraceError
from sim.under_way import on_terminals

_QUESTIONS = {
    "What happens to my traffic?": ("run", "explore", "explain", "sweep", "compare", "plot", "trace"),
    "What do I need, and what would help?": ("advise", "capacity", "optimize", "place"),
    "How far is it from what I measured?": ("bench", "validate", "fit", "calibrate"),
    "From and to real servers": ("scenario", "export", "serve", "observe"),
    "Theory and papers": ("theory", "reproduce"),
    "Catalogues, settings and this installation": ("models", "hardware", "schema", "doctor"),
}
"""The commands by the question that they answer, in the order of `rooftrace --help`."""


class _Guarded(TyperGroup):
    """Turns errors that the user can mend, full disks included, into one sentence and exit code 2, and signals into another."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RooftraceError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt as error:
            raise interrupted(error) from None
        except BrokenPipeError:
            _mute()
            raise typer.Exit(0) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # A full disk, most of all. What has no name is standard output, or lies where temporary files do.
            where = error.filename or ("standard output" if _mute() else "standard output, or a temporary file")
            typer.echo(f"Error: {where}: {error.strerror or error}", err=True)
            sys.exit(USER_ERROR)


def _mute() -> bool:
    """Whether standard output takes nothing any more; if so the rest is dropped, of which Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


@functools.cache
def build_app() -> typer.Typer:
    """The application with every command registered, in the order of the questions that they answer."""
    app = typer.Typer(
        name="rooftrace",
        cls=_Guarded,
        help="Replay LLM request traces against models of real hardware.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(doctor.version())
            raise typer.Exit
        on_terminals()

    panels = {name: question for question, names in _QUESTIONS.items() for name in names}
    modules = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    for name in sorted(modules, key=list(panels).index):
        n_commands, n_groups = len(app.registered_commands), len(app.registered_groups)
        importlib.import_module(f"sim.cli.commands.{name}").register(app)
        for each in (*app.registered_commands[n_commands:], *app.registered_groups[n_groups:]):
            each.rich_help_panel = panels[name]
    return app
