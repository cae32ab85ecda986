"""rooftrace explore: a page that answers while settings are moved."""

from __future__ import annotations

import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.exports import takes_export
from sim.cli.extras import needs
from sim.cli.options import ScenarioFile, set_option


def register(app: typer.Typer) -> None:
    app.command()(takes_export(explore))


def explore(
    scenario: ScenarioFile = None,
    set_: Annotated[list[str] | None, set_option("Change a setting, e.g. --set replicas=2; VALUE is YAML.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8010,
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that other machines reach needs the token that is printed.")
    ] = "127.0.0.1",
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            "--bench", metavar="FILE", help="Measured runs to lay over the curves; repeatable.", show_default=False
        ),
    ] = None,
    watch: Annotated[
        list[str] | None,
        typer.Option(
            "--watch",
            metavar="ADDRESS",
            help="Show a fleet that runs too, and what the scenario's autoscale would do: a Prometheus server, or an endpoint's "
            "/metrics (repeatable). It is only read.",
            show_default=False,
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE.html",
            help="Write the page as one file that needs no server, and end.",
            show_default=False,
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of finished runs, as of `rooftrace sweep`; default results/sweep-NAME.", show_default=False
        ),
    ] = None,
    most_requests: Annotated[int, typer.Option(min=1, help="Requests of a run at most.")] = 20_000,
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,
) -> None:
    """Open a page that answers while settings are moved: an estimate at once, then the exact run with its interval, and why."""
    from sim.cli.given import read_scenario

    needs("explore")
    from sim.cli.outputs import check_folder_of, put_text
    from sim.explore.workers import prepare

    check_folder_of(export)
    measured = [_content(path) for path in bench or ()]
    prepare()
    from sim.explore.measured import runs_in
    from sim.explore.server import Opened, address, frozen_page, serve, token_for
    from sim.explore.session import Limits
    from sim.explore.watching import Watched, source_of
    from sim.serve.server import listen

    base = read_scenario(scenario, set_)
    for name, data in measured:
        runs_in(name, data)  # which says what is wrong with it
    folder = out if out is not None else Path("results") / f"sweep-{base.name}"
    opened = Opened(
        base=base, store=folder / "points", file=None if scenario is None else str(scenario), settings=tuple(set_ or ()),
        measured=measured, limits=Limits(requests=most_requests),
        watched=Watched(source_of(watch), base) if watch else None,
    )  # fmt: skip
    if export is not None:
        put_text(export, frozen_page(opened))
        typer.echo(f"{export} opens without a server")
        return
    listening = listen(host, port)
    token = token_for(host)
    url = address(host, listening.getsockname()[1], token)

    def started(stop: Callable[[], None]) -> None:
        typer.echo(f"{base.name} at {url}; Ctrl-C ends it")
        if open_:
            webbrowser.open(url)
        if until_stdin_ends:
            threading.Thread(target=lambda: (sys.stdin.read(), stop()), daemon=True).start()

    serve(opened, listening, host=host, token=token, started=started)


def _content(path: Path) -> tuple[str, bytes]:
    from sim.errors import RooftraceError

    try:
        return path.name, path.read_bytes()
    except OSError as error:
        raise RooftraceError(f"--bench {path}: {error.strerror}") from None
