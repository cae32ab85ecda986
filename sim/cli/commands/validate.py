"""rooftrace validate: measured files against the models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.options import Dtype, Json, Strict
from sim.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from hwmodels.measured import Said
    from hwmodels.profiles import Profile
    from sim.validation.choices import Share
    from sim.validation.coverage import Coverage
    from sim.validation.files import Comparison, ErrorLine, Folder
    from sim.validation.served import GroupErrors
    from sim.validation.sessions import Sessions


def register(app: typer.Typer) -> None:
    app.command()(validate)


def validate(
    measured: Annotated[
        Path | None, typer.Option(help="Folder of measured tables (CSV, Parquet), or one table.", show_default=False)
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Device or profile (.toml) to price every file with; default: the device in its name."),
    ] = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the table as CSV, and groups of serving runs beside it (NAME_served.csv).", show_default=False
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table as Markdown, with the reasons of what is not modelled.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw measured against predicted, and errors by size, into this folder.")
    ] = None,
    strict: Strict = False,
    live: Annotated[
        bool, typer.Option("--live", help="Run transformers on this machine beside their simulation.")
    ] = False,
    backend: Annotated[str, typer.Option(help="With --live: torch runs the models.")] = "torch",
    device: Annotated[str, typer.Option(help="With --live: auto, cuda or cpu.")] = "auto",
    scale: Annotated[
        float | None, typer.Option(help="With --live: share of the models' parameters, in (0, 1].")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --live: the target's shape, a GPT-2 or Llama model.")] = None,
    draft: Annotated[str | None, typer.Option(help="With --live: the draft's shape.")] = None,
    alpha: Annotated[float, typer.Option(help="With --live: probability that a drafted token is accepted.")] = 0.8,
    as_json: Json = False,
) -> None:
    """Predict every row of a folder of measurements and say how far off the models are, file by file.

    Tables are recognised by their columns, which carry their units
    (docs/calibration.md). Exit code 3 when a file or row that is not
    understood was left out.
    """
    from sim.cli.outputs import check_folder_of, end_with_left_out, put_text
    from sim.errors import RooftraceError

    if live == (measured is not None):
        raise RooftraceError("give one of --measured DIR (files) and --live (models that run here)")
    if measured is None:
        from sim.cli.live import live_settings, validate_live

        settings = live_settings(
            hardware, backend=backend, device=device, scale=scale, target=target, draft=draft, alpha=alpha
        )
        validate_live(settings, out=out, plots=plots, as_json=as_json)
        return
    check_folder_of(out, markdown)  # before the minutes that the simulations take
    _check_plots(plots)
    found = _compared(measured, hardware=hardware, dtype=dtype, strict=strict)
    if out is not None:
        _write_csv(found, out)
    if markdown is not None:
        put_text(markdown, _page(found))
    if as_json:
        print_json(_facts(found))
    else:
        _print(found)
    pictures = [] if plots is None else _draw(found, plots)
    if not as_json:
        for path in (out, markdown, *pictures):
            if path is not None:
                typer.echo(f"Written: {path}")
    end_with_left_out(found.folder)


def _check_plots(plots: Path | None) -> None:
    """OutputError where *plots*, or what it would lie in, is a file."""
    from sim.errors import OutputError

    if plots is not None:
        there = next(path for path in (plots, *plots.parents) if path.exists())
        if not there.is_dir():
            raise OutputError(f"cannot draw into {plots}: {there} is a file, not a folder; choose another --plots")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """A folder of measurements beside the predictions of its rows."""

    folder: Folder
    comparisons: Sequence[Comparison]
    covered: Sequence[Coverage]
    sessions: Sessions

    @property
    def lines(self) -> list[ErrorLine]:
        return [comparison.line for comparison in self.comparisons]

    def served(self) -> list[tuple[str, Sequence[GroupErrors]]]:
        """The errors of serving runs by family, stack, model and load, each with its title; none where no run was served."""
        from sim.validation.served import BREAKDOWNS, errors_by, served_pair

        pair = served_pair(self.comparisons)
        return [] if pair is None else [(title, errors_by(pair, *names)) for title, names in BREAKDOWNS]

    def choices(self) -> dict[str, Share]:
        """How often the better of two servers is named, by what is chosen; nothing without a choice."""
        from sim.validation.choices import servers, shares
        from sim.validation.served import served_pair

        pair = served_pair(self.comparisons)
        return {} if pair is None else {name: one for name, one in shares(servers(pair)).items() if one.cases}


def _compared(measured: Path, *, hardware: str | None, dtype: str | None, strict: bool) -> _Compared:
    from sim.validation.coverage import coverage
    from sim.validation.files import comparisons, read_measured
    from sim.validation.sessions import sessions

    folder = read_measured(measured, hardware=hardware, strict=strict, said=_said(hardware, dtype))
    return _Compared(
        folder=folder,
        comparisons=list(comparisons(folder, hardware=hardware)),
        covered=coverage(folder.measurements, _profile_of(hardware)),
        sessions=sessions(folder.measurements, hardware=hardware),
    )


def _write_csv(found: _Compared, out: Path) -> None:
    """Write the table, and groups of serving runs beside it."""
    from sim.validation.served import served_pairs, write_groups
    from sim.validation.tables import write_csv

    write_csv(found.lines, out)
    if pairs := served_pairs(found.comparisons):
        write_groups(pairs, out.with_name(f"{out.stem}_served.csv"))


def _page(found: _Compared) -> str:
    """The table as Markdown."""
    from hwmodels.left_out import loans
    from sim.validation.coverage import coverage_markdown, loans_markdown
    from sim.validation.sessions import sessions_markdown
    from sim.validation.tables import to_markdown

    sections = (
        coverage_markdown(found.covered),
        loans_markdown(loans(found.folder.measurements)),
        sessions_markdown(found.sessions),
    )
    return to_markdown(found.lines, found.folder.left_out, sections, served=found.comparisons)


def _draw(found: _Compared, plots: Path) -> list[Path]:
    from sim.plots.served import draw_served
    from sim.plots.sessions import draw_sessions
    from sim.plots.validation import draw_validation
    from sim.validation.served import served_pair

    pair = served_pair(found.comparisons)
    served = [] if pair is None else draw_served(pair, plots)
    return [*served, *draw_sessions(found.sessions.runs, plots), *draw_validation(found.comparisons, plots)]


def _facts(found: _Compared) -> dict[str, Any]:
    return {
        "files": [asdict(line) for line in found.lines],
        "intervals": [asdict(line) for line in found.covered],
        "served": [{"by": title, **asdict(group)} for title, groups in found.served() for group in groups],
        "choices": [{"choice": name, **asdict(one)} for name, one in found.choices().items()],
        "sessions": [asdict(run) for run in found.sessions.runs],
        "left_out": found.folder.left_out,
    }


def _print(found: _Compared) -> None:
    if found.lines:
        _print_files(found.lines)
    if found.covered:
        rows = [(line.family, f"{line.rows:,}", *_percents(line.held_pct, line.inside_pct)) for line in found.covered]
        print_table(("90 % intervals of", "rows", "held-back rows in %", "all rows in %"), rows)
    _print_reasons(found.lines)
    for title, groups in found.served():
        _print_served(title, groups)
    _print_choices(found.choices())
    _print_sessions(found.sessions)


def _print_choices(found: Mapping[str, Share]) -> None:
    """Print how often the better of two stacks and the best layout are named."""
    from sim.validation.choices import CHOICES

    if found:
        rows = [
            (CHOICES[name], f"{one.cases}", f"{one.ties}", *_percents(one.right_pct)) for name, one in found.items()
        ]
        print_table(("Choices between servers", "cases", "ties", "named right %"), rows, fold_left=True)


def _print_sessions(found: Sessions) -> None:
    """Print the runs of each table of sessions, and what the clean ones say."""
    from sim.validation.sessions import HEADS, PRINTED, by_file, cells, verdicts

    for file, runs in by_file(found).items():
        typer.echo(f"Sessions of {file.removesuffix('.csv')}, measured / simulated:")
        print_table([HEADS[i] for i in PRINTED], [[cells(run)[i] for i in PRINTED] for run in runs], fold_left=True)
        for sentence in verdicts(runs):
            typer.echo(f"  {sentence}")
    for file, reason in (found.unmodelled or {}).items():
        typer.echo(f"{file}: sessions are not replayed: {reason}")


def _percents(*values: float | None) -> list[str]:
    return ["-" if value is None or math.isnan(value) else f"{value:.1f}" for value in values]


def _print_files(lines: Sequence[ErrorLine]) -> None:
    rows = [
        (
            line.file.removesuffix(".csv") + ("" if line.quantity == "latency" else f", {line.quantity}"),
            f"{line.rows:,}",
            f"{line.unmodelled:,}",
            *_percents(line.mape_pct, line.median_pct, line.p90_pct, line.bias_pct),
        )
        for line in lines
    ]
    print_table(("file, quantity", "rows", "unmod.", "MAPE %", "median", "p90", "bias"), rows, fold_left=True)


def _print_reasons(lines: Sequence[ErrorLine]) -> None:
    """Print once for each file why rows have no prediction, and its notes."""
    seen: set[tuple[str, str]] = set()
    for line in lines:
        said = [(f"{count:,} rows without a prediction: {reason}", reason) for reason, count in line.reasons.items()]
        for text, key in (*said, *((note, note) for note in line.notes)):
            if (line.file, key) not in seen:
                seen.add((line.file, key))
                typer.echo(f"{line.file}: {text}")


def _print_served(title: str, groups: Sequence[GroupErrors]) -> None:
    """Print the errors of serving runs by family, stack, model or load."""

    def shown(value: float, how: str) -> str:
        return "-" if math.isnan(value) else format(value, how)

    rows = [
        (
            group.name, f"{group.rows:,}", f"{group.unmodelled:,}", shown(group.tpot_median_pct, ".1f"),
            shown(group.tpot_bias_pct, "+.1f"), shown(group.ttft_median_pct, ".1f"), shown(group.ttft_bias_pct, "+.1f"),
        )
        for group in groups
    ]  # fmt: skip
    heads = (f"Serving runs {title}", "rows", "unmod.", "TPOT %", "TPOT bias", "TTFT %", "TTFT bias")
    print_table(heads, rows, fold_left=True)


def _profile_of(hardware: str | None) -> Profile | None:
    """The profile that `--hardware` prices every file with; None where each file names its device."""
    from hwmodels.profiles import load_profile

    return None if hardware is None else load_profile(hardware)


def _said(hardware: str | None, dtype: str | None) -> Said:
    """The device and format of tables that do not say them themselves."""
    from hwmodels.device import load_device
    from hwmodels.measured import Said, format_of
    from hwmodels.profiles import load_profile
    from sim.errors import RooftraceError

    try:
        device = (
            "" if hardware is None else (load_profile if hardware.endswith(".toml") else load_device)(hardware).name
        )
        return Said(device=device, dtype=format_of(dtype) if dtype else "")
    except (ValueError, OSError) as error:
        raise RooftraceError(str(error)) from None
