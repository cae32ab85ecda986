"""The application: every command registered, errors turned into one sentence."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from sim.cli.exits import INTERRUPTED, USER_ERROR
from sim.errors import RooftraceError


class _Guarded(TyperGroup):
    """Turns errors that the user can mend into one sentence and exit code 2, and Ctrl-C into 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RooftraceError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            typer.echo("Interrupted; nothing was written.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read our output has closed; Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


def build_app() -> typer.Typer:
    """The application with every command registered: `run` first, the others by name."""
    app = typer.Typer(
        name="rooftrace",
        cls=_Guarded,
        help="Replay LLM request traces against models of real hardware.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            from importlib.metadata import version as installed

            typer.echo(installed("rooftrace"))
            raise typer.Exit

    from sim.cli import commands

    names = sorted((module.name for module in pkgutil.iter_modules(commands.__path__)), key=lambda n: (n != "run", n))
    for name in names:
        importlib.import_module(f"sim.cli.commands.{name}").register(app)
    return app
