"""rooftrace serve: an endpoint of OpenAI's interface that answers in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sim.cli.extras import needs
from sim.cli.options import ScenarioFile, SummaryJson, set_option
from sim.cli.tables import console, print_facts, print_json, print_notes, print_table, seen_by, written
from sim.errors import RooftraceError

if TYPE_CHECKING:
    from sim.results import Result
    from workloads.texts import Tokens


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    scenario: ScenarioFile = None,
    set_: Annotated[list[str] | None, set_option("Change a setting, e.g. --set replicas=2; VALUE is YAML.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    speed: Annotated[float, typer.Option(help="Simulated seconds in a second of the wall clock.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default in results/.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json to count prompts by; without one, approximately.", show_default=False),
    ] = None,
    outputs: Annotated[
        Literal["asked", "workload"],
        typer.Option(
            help="How long answers are: as max_tokens asks (without it, as the workload's), or as the scenario's workload's, "
            "max_tokens at most."
        ),
    ] = "asked",
    model_name: Annotated[
        list[str] | None,
        typer.Option(help="Another name of the model, or NAME=MODEL of one of several; repeat it.", show_default=False),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Faults (YAML): [{from_s: 30, to_s: 40, status: 503}, ...].", show_default=False
        ),
    ] = None,
    max_streams: Annotated[
        int, typer.Option(min=1, help="Requests under way at most; more are answered by 503.")
    ] = 2048,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections at most, idle ones included; more are answered by 503 and closed.")
    ] = 4096,
    head_timeout_s: Annotated[
        float, typer.Option(help="A connection is closed whose request has not come as far as its body by then.")
    ] = 10.0,
    max_body_mb: Annotated[float, typer.Option(help="Largest body in MiB; a larger one is answered by 413.")] = 8.0,
    lag_bound_ms: Annotated[float, typer.Option(help="Warn where tokens are written so much later than due.")] = 20.0,
    plots: Annotated[bool, typer.Option(help="Draw latency.png and timeline.png.")] = True,
    as_json: SummaryJson = False,
) -> None:
    """Serve a simulated deployment at an OpenAI-compatible endpoint; write its results when it is stopped (Ctrl-C)."""
    from sim.cli.given import read_scenario

    _check_numbers(
        {
            "--speed": speed,
            "--head-timeout-s": head_timeout_s,
            "--max-body-mb": max_body_mb,
            "--lag-bound-ms": lag_bound_ms,
        }
    )
    needs("serve")
    from sim.serve.app import Endpoint, Limits
    from sim.serve.script import read_script
    from sim.serve.server import listen
    from sim.serve.session import Session
    from sim.serve.setup import names_of, set_up

    chosen = read_scenario(scenario, set_)
    setup = set_up(chosen)
    names = names_of(setup, model_name or ())
    tokens = _tokens(tokenizer)
    faults = None if script is None else read_script(script)
    print_notes(setup.built.manifest["notes"])
    typer.echo(f"Note: Tokens of prompts are counted so: {tokens.told}.", err=True)
    folder = out if out is not None else Path("results") / f"{chosen.name}-{chosen.hash[:8]}-served"
    session = Session(
        setup, speed=speed, bound_s=lag_bound_ms * 1e-3, warn=lambda text: typer.echo(f"Warning: {text}", err=True)
    )
    limits = Limits(
        body_bytes=round(max_body_mb * 2**20), streams=max_streams, connections=max_connections, head_s=head_timeout_s
    )
    endpoint = Endpoint(session, tokens, names=names, limits=limits, outputs=outputs, script=faults)
    listening = listen(host, port)
    bound = listening.getsockname()[1]
    where = f"[{host}]" if ":" in host else host

    def started(_stop: object) -> None:
        typer.echo(
            f"{setup.built.manifest['label']} at http://{where}:{bound}/v1, speed {speed:g}; Ctrl-C ends it",
            err=as_json,
        )

    facts = {"tokens": tokens.told, "outputs": outputs}
    result = _served(endpoint, listening, started, folder, facts, plots=plots)
    if result is None:
        typer.echo("No request came; nothing was written.", err=True)
        return
    if as_json:
        print_json(result.summary)
    else:
        _print(result, folder)


def _check_numbers(options: Mapping[str, float]) -> None:
    """RooftraceError for one of *options*, by their names, that is no number of a use."""
    for name, value in options.items():
        if not 0 < value < 1e6:
            raise RooftraceError(f"{name} is a number above 0 and below a million; got {value:g}")


def _tokens(tokenizer: Path | None) -> Tokens:
    from workloads.texts import tokens_of

    try:
        return tokens_of(tokenizer)
    except ValueError as error:
        raise RooftraceError(f"--tokenizer: {error}") from None


def _print(result: Result, folder: Path) -> None:
    from sim.results import fact_rows, tables

    console().print(result.label, style="bold", markup=False)
    for title, heads, rows in tables(result.summary):
        print_table((title, *heads), rows)
    print_facts([*fact_rows(result.summary), *_lags(result.manifest), *written(folder, *seen_by(folder))])


def _served(
    endpoint: Any, listening: Any, started: Any, folder: Path, facts: dict[str, Any], *, plots: bool
) -> Result | None:
    from sim.results import staging
    from sim.serve.server import serve as serve_at

    class NothingCame(RooftraceError):
        """Leaves the folder as it was."""

    try:
        with staging(folder) as scratch:
            serve_at(endpoint, listening, started=started)
            if not len(endpoint.session.run):
                raise NothingCame
            result = endpoint.session.write(scratch, facts=facts)
            if plots:
                from sim.plots import save_run

                save_run(result, scratch)
            return result
    except NothingCame:
        return None


def _lags(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    from sim.text import seconds_text

    lag = manifest["served"]["handed_over_lag_s"]
    if not lag["n"]:
        return []
    late = lag["beyond_the_bound"]
    return [
        (
            "Written late by",
            f"{seconds_text(lag['mean'])} in the mean, {seconds_text(lag['max'])} at worst; {late:,} of {lag['n']:,} writes beyond "
            f"{seconds_text(manifest['served']['lag_bound_s'])} of the wall clock",
        )
    ]
