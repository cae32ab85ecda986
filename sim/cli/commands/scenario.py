"""rooftrace scenario: scenarios made of what people have already."""

from __future__ import annotations

from typing import Annotated

import typer

from sim.cli.options import Fetch, fetch_models


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Write scenarios from commands that start servers.", no_args_is_help=True)
    group.command("from")(from_command)
    app.add_typer(group, name="scenario")


def from_command(
    command: Annotated[
        str,
        typer.Argument(
            help="In quotes: 'vllm serve ...', 'python -m sglang.launch_server ...' or 'trtllm-serve ...'; several, one a line, "
            "are pools."
        ),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(help="Catalogue name (rooftrace hardware), which no command says.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting beside the command's, e.g. --set replicas=2."),
    ] = None,
    fetch: Fetch = False,
) -> None:
    """Write the scenario of a command to standard output; what it does not carry over goes to standard error."""
    from sim.launch import models_of, scenario_from

    if fetch:
        fetch_models(models_of(command, assignments=set_ or ()))
    found = scenario_from(command, hardware=hardware, assignments=set_ or ())
    for option in found.not_modelled:
        typer.echo(f"Not modelled: {option}", err=True)
    if found.without_effect:
        typer.echo(f"Without effect on a simulated run: {', '.join(found.without_effect)}", err=True)
    for note in found.notes:
        typer.echo(f"Note: {note}", err=True)
    for line in command.strip().splitlines():
        typer.echo(f"# {line.strip()}")
    typer.echo(found.scenario.to_yaml(), nl=False)
