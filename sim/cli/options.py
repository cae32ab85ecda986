"""Arguments and options that mean the same to several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def set_option(help_: str) -> Any:
    """The option --set KEY=VALUE of a command that says what it sets."""
    return typer.Option("--set", metavar="KEY=VALUE", help=help_)


ScenarioFile = Annotated[
    Path | None, typer.Argument(help="Scenario file (YAML); without one, the built-in default.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print a CSV table of every figure, and nothing else.")]
SummaryJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]

Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; all cores by default.", show_default=False)]
Axes = Annotated[
    list[str] | None,
    typer.Option("--axis", metavar="KEY=VALUES", help="256,512,1024, or a range FROM:TO:COUNT[:log]; repeatable."),
]
Dtype = Annotated[str | None, typer.Option(help="Number format of tables that do not say theirs; bf16 without.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a folder with a file or row that is not understood.")]

Fetch = Annotated[
    bool,
    typer.Option("--fetch", help="Ask the HuggingFace hub for the config.json of a model that is unknown otherwise."),
]

Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=TIME",
        help="A limit beside those of the scenario's slo: ttft_p95=1s, tpot_p99=40ms, or of each request ttft=1s; repeatable.",
    ),
]

IntervalReplays = Annotated[
    int | None,
    typer.Option(
        "--intervals",
        min=2,
        metavar="N",
        help="Say how far off the model may be, from N more replays of deployments as they may be; 20 is a good number.",
        show_default=False,
    ),
]

Files = Annotated[list[Path], typer.Argument(help="Result files of benchmark tools; which tool, their content says.")]

Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Only runs whose configuration says so, such as arm=plain; repeatable."),
]  # fmt: skip

Facts = Annotated[
    list[str] | None, set_option("run.KEY: what files do not say of their runs, RUN:run.KEY of one; repeatable.")
]

Before = Annotated[
    Path | None,
    typer.Option(
        help="Metrics of the server from before the run, which are taken off those among FILES.", show_default=False
    ),
]


def wants_json(ctx: typer.Context, as_json: bool) -> bool:
    """Whether --json stands behind a subcommand, or behind the command that it belongs to."""
    return as_json or (ctx.parent is not None and bool(ctx.parent.params.get("as_json")))
