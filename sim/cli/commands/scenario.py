"""rooftrace scenario: scenarios made of what people have already."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.options import Fetch, set_option
from sim.cli.tables import print_notes


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Write scenarios from commands and manifests that start servers.", no_args_is_help=True)
    group.command("from")(from_command)
    app.add_typer(group, name="scenario")


def from_command(
    command: Annotated[
        str,
        typer.Argument(
            help="In quotes: 'vllm serve ...', 'python -m sglang.launch_server ...', 'trtllm-serve ...' or 'docker run ...'; "
            "several, one a line, are pools. Or a file of them, or of YAML (Kubernetes, compose, KServe, Dynamo, charts' values), "
            "or - for standard input."
        ),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(help="Catalogue name (rooftrace hardware), which no command says.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        set_option(
            "A setting beside the command's, e.g. --set replicas=2; --set model=NAME for a name that is not known."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File for the scenario, in place of standard output.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse options that the known release does not have.")
    ] = False,
    fetch: Fetch = False,
) -> None:
    """Write the scenario of a command to standard output; what it does not carry over goes to standard error."""
    from sim.cli.given import fetch_models
    from sim.launch import models_of, scenario_from
    from workloads.write import write_whole

    text, source = _given(command)
    if fetch:
        fetch_models(models_of(text, assignments=set_ or (), source=source))
    found = scenario_from(text, hardware=hardware, assignments=set_ or (), strict=strict, source=source)
    for option in found.strange:
        typer.echo(f"Warning: {option}", err=True)
    for option in found.not_modelled:
        typer.echo(f"Not modelled: {option}", err=True)
    if found.without_effect:
        typer.echo(f"Without effect on a simulated run: {', '.join(found.without_effect)}", err=True)
    print_notes(found.notes)
    shown = re.sub(_SECRETS, r"\1...", text)
    above = shown.strip().splitlines() if source == "the command" else [f"from {source}"]
    written = "".join(f"# {line.strip()}\n" for line in above) + found.scenario.to_yaml()
    if out is None:
        typer.echo(written, nl=False)
    else:
        write_whole(out, written)


_SECRETS = r"(--(?:[\w-]+-)?(?:api-key|hf-token)[= ]+|\b\w*(?:TOKEN|KEY|SECRET|PASSWORD)\w*=)[^\s'\"]+"
"""Keys and tokens, which a scenario is not to pass on."""


def _given(command: str) -> tuple[str, str]:
    """The text that is meant and where it is from: a file, standard input, or the argument itself."""
    from sim.errors import RooftraceError

    if command == "-":
        return sys.stdin.read(), "standard input"
    if "\n" in command or len(command.split()) != 1:
        return command, "the command"
    file = Path(command)
    try:
        return file.read_text(encoding="utf-8"), command
    except (OSError, UnicodeDecodeError) as error:
        if not file.exists() and file.suffix not in (".yaml", ".yml", ".json", ".sh", ".txt"):
            return command, "the command"
        raise RooftraceError(f"{command} cannot be read: {getattr(error, 'strerror', None) or error}") from None
