"""rooftrace trace: look at request traces and convert them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.cli.exports import Columns, KeepFailed, MissingOutput, Since, Tokenizer, Until, columns_of
from sim.cli.options import Json
from sim.cli.tables import print_facts, print_json, print_notes, print_table
from sim.errors import OutputError, RooftraceError
from sim.under_way import under_way

_File = Annotated[Path, typer.Argument(help="Trace file, folder or pattern; its format is recognised by its content.")]
_Format = Annotated[
    str, typer.Option("--format", help="auto, azure_llm, burstgpt, mooncake, components, plain or export.")
]
_Sort = Annotated[bool, typer.Option("--sort", help="Accept arrivals out of order.")]
_Limit = Annotated[int | None, typer.Option(min=1, help="Read the first requests only.", show_default=False)]
_Components = Annotated[
    str, typer.Option(help="Order of a prompt's components, where these are named: as_sent or seen.")
]
_DropEmpty = Annotated[bool, typer.Option("--drop-empty", help="Leave out rows with neither prompt nor output.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at request traces and convert them.", no_args_is_help=True)
    group.command()(describe)
    group.command()(convert)
    group.command()(reuse)
    app.add_typer(group, name="trace")


def describe(
    file: _File,
    format_: _Format = "auto",
    columns: Columns = None,
    missing_output: MissingOutput = None,
    keep_failed: KeepFailed = False,
    tokenizer: Tokenizer = None,
    since: Since = None,
    until: Until = None,
    sort: _Sort = False,
    drop_empty: _DropEmpty = False,
    component_order: _Components = "as_sent",
    limit: _Limit = None,
    untimed: Annotated[bool, typer.Option("--untimed", help="Take a file that says no arrivals.")] = False,
    out: Annotated[Path | None, typer.Option(help="Picture to write (.png).", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Print what a trace holds and what of its file is left out: arrivals, lengths, bursts, sessions, reuse."""
    from workloads.ticks import rounded

    _check_picture(out)
    trace = _read(
        file, format_, columns, sort=sort, drop_empty=drop_empty, keep_failed=keep_failed, missing_output=missing_output,
        tokenizer=tokenizer, limit=limit, since=since, until=until, component_order=component_order, timed=not untimed,
    )  # fmt: skip
    with under_way("Describing"):
        found, curve = _described(trace)
    notes = [*trace.notes, *filter(None, [rounded(trace)])]
    print_notes(notes)
    if out is not None:
        from sim.plots.style import save
        from sim.plots.trace import plot_trace

        with _picture(out):
            save(plot_trace(trace, curve), out, svg=False)
    if as_json:
        print_json({**found, "notes": notes})
        return
    _print_described(found)
    if out is not None:
        typer.echo(f"Picture: {out}", err=True)


def _described(trace: Any) -> tuple[dict[str, Any], Any]:
    """The facts of *trace*, and what ideal prefix caches of all sizes find of it, where it can be told."""
    from workloads.describe import rates_over_time, turns_of_sessions
    from workloads.reuse import reuse as reuse_of

    found = trace.describe()
    width_s, rates = rates_over_time(trace, 12)
    found["rate_over_time"] = {"window_s": width_s, "per_s": rates.tolist()}
    turns = turns_of_sessions(trace)
    found["requests_of_a_session"] = float(turns.mean()) if len(turns) else None
    curve = None if trace.prefix_blocks is None else reuse_of(trace)
    found["best_prefix_hit_rate"] = None if curve is None else curve.best_hit_rate
    return found, curve


def _print_described(found: dict[str, Any]) -> None:
    lengths = {key: value for key, value in found.items() if isinstance(value, dict) and "p99" in value}
    heads = list(next(iter(lengths.values())))
    rates = found["rate_over_time"]
    print_facts([(key, _text(value)) for key, value in found.items() if key not in lengths and value is not rates])
    print_table(("", *heads), [(key, *(_text(values[head]) for head in heads)) for key, values in lengths.items()])
    if rates["per_s"]:
        top = max(rates["per_s"])
        print_table(
            ("From, s", "requests/s", ""),
            [
                (f"{at * rates['window_s']:,.5g}", f"{rate:,.4g}", "#" * round(30 * rate / top))
                for at, rate in enumerate(rates["per_s"])
            ],
            fold=1,
        )


def convert(
    file: _File,
    out: Annotated[Path, typer.Argument(help="CSV file to write: arrival_s, prompt_tokens, output_tokens, ...")],
    format_: _Format = "auto",
    columns: Columns = None,
    missing_output: MissingOutput = None,
    keep_failed: KeepFailed = False,
    tokenizer: Tokenizer = None,
    since: Since = None,
    until: Until = None,
    sort: _Sort = False,
    drop_empty: _DropEmpty = False,
    component_order: _Components = "as_sent",
    limit: _Limit = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT where it exists.")] = False,
) -> None:
    """Write a trace in Rooftrace's plain CSV format."""
    trace = _read(
        file, format_, columns, sort=sort, drop_empty=drop_empty, keep_failed=keep_failed, missing_output=missing_output,
        tokenizer=tokenizer, limit=limit, since=since, until=until, component_order=component_order,
    )  # fmt: skip
    print_notes(trace.notes)
    if out.is_file() and not overwrite:
        raise OutputError(f"{out} exists already; give another name or --overwrite")
    try:
        trace.to_csv(out)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror}") from None
    typer.echo(f"{len(trace):,} requests written to {out}", err=True)


def reuse(
    file: _File,
    format_: _Format = "auto",
    columns: Columns = None,
    tokenizer: Tokenizer = None,
    model: Annotated[
        str, typer.Option(help="Catalogue model, or path to a config.json, whose KV cache gives sizes in GB.")
    ] = "llama-3.1-8b",
    kv_precision: Annotated[
        str | None, typer.Option(help="Number format of the KV cache; the model's own by default.", show_default=False)
    ] = None,
    sort: _Sort = False,
    drop_empty: _DropEmpty = False,
    component_order: _Components = "as_sent",
    sessions_per_s: Annotated[
        float | None,
        typer.Option(help="FILE holds sessions, which start so often (Poisson).", min=1e-9, show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture to write (.png).  [default: results/reuse-NAME.png; none with --json]", show_default=False
        ),
    ] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(
            help="Eviction policy to replay as well: lru, lfu, belady (no other finds more), module:Class, ...; may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print and draw how much of the prompts an ideal prefix cache finds again, by its size."""
    from hwmodels.model import load_model
    from workloads.reuse import reuse as reuse_of

    _check_picture(out)
    if sessions_per_s is None:
        trace = _read(
            file, format_, columns, sort=sort, drop_empty=drop_empty, tokenizer=tokenizer, timed=False,
            component_order=component_order,
        )  # fmt: skip
        print_notes(trace.notes)
    else:
        trace = _read_sessions(file, sessions_per_s)
    with _user_errors(file):
        with under_way("Finding what is said again"):
            curve = reuse_of(trace)
        per_token = load_model(model).kv_bytes_per_token(kv_precision)
    picture = out if out is not None or as_json else Path("results") / f"reuse-{file.stem}.png"
    if picture is not None:
        _draw_reuse(picture, curve, trace.source, per_token, model)
    sizes = _reuse_by_size(curve, per_token)
    for name in eviction or ():
        with under_way(f"Replaying with {name}"):
            _add_replayed(sizes, trace, name)
    if as_json:
        found = {
            "source": trace.source,
            "requests": len(trace),
            "model": model,
            "kv_bytes_per_token": per_token,
            "block_tokens": curve.block_tokens,
            "prompt_tokens": curve.prompt_tokens,
            "blocks": curve.blocks,
            "distinct_blocks": curve.distinct_blocks,
            "best_hit_rate": curve.best_hit_rate,
            "never_hit": 1.0 - curve.best_hit_rate,
            "sizes": sizes,
        }
        print_json(found)
        return
    _print_reuse(curve, trace, sizes, per_token, model)
    typer.echo(f"Picture: {picture}", err=True)


def _reuse_by_size(curve: Any, per_token: float) -> list[dict[str, Any]]:
    """The shares that caches of 1, 3, 10, 30, ... blocks find, up to the size that finds all that can be found."""
    import numpy as np

    last = int(curve.capacity_blocks[-1]) if len(curve.capacity_blocks) else 1
    marks = {int(mark) for power in range(len(str(last))) for mark in (10**power, 3 * 10**power) if mark < last}
    blocks = np.array(sorted(marks | {last}), dtype=np.int64)
    tokens = blocks * curve.block_tokens
    columns = (blocks, tokens, curve.hit_rate(tokens), curve.block_hit_rate(blocks))
    return [
        {"blocks": b, "tokens": t, "gb": t * per_token / 1e9, "hit_rate": rate, "block_hit_rate": block_rate}
        for b, t, rate, block_rate in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _add_replayed(sizes: list[dict[str, Any]], trace: Any, name: str) -> None:
    """Adds to each size the share that a cache of it finds with the eviction policy called *name*."""
    from sim.engine.cache.replayed import found_tokens
    from sim.scenario.named import EVICTIONS, policy

    chosen = policy(name, {}, EVICTIONS, key="--eviction", method="rank")
    tokens = int(trace.prompt_tokens.sum())
    for size in sizes:
        size[f"hit_rate_{name}"] = found_tokens(trace, size["blocks"], chosen) / tokens


def _print_reuse(curve: Any, trace: Any, sizes: list[dict[str, Any]], per_token: float, model: str) -> None:
    best = curve.best_hit_rate
    replayed = [name for name in (sizes[0] if sizes else ()) if name.startswith("hit_rate_")]
    columns = [f"found with {name.removeprefix('hit_rate_')}, %" for name in replayed]
    print_table(
        (
            "Cache, tokens",
            f"GB of {model}",
            "prompt tokens found, %",
            "of what a cache without limit finds, %",
            *columns,
        ),
        [
            (
                f"{size['tokens']:,}",
                f"{size['gb']:,.1f}",
                f"{100 * size['hit_rate']:.1f}",
                f"{100 * size['hit_rate'] / best:.0f}" if best else "-",
                *(f"{100 * size[name]:.1f}" for name in replayed),
            )
            for size in sizes
        ],
        title=f"Ideal prefix cache, {trace.source}: {len(trace):,} requests, {curve.prompt_tokens:,} prompt tokens",
        left=0,
    )
    typer.echo(
        f"{100 * (1.0 - best):.1f} % of the prompt tokens are named for the first time or in no block: no cache finds them."
    )
    if best:
        near = curve.tokens_for(0.9)
        typer.echo(
            f"Nine tenths of what can be found need {near:,} tokens ({near * per_token / 1e9:,.1f} GB of {model})."
        )


def _draw_reuse(path: Path, curve: Any, source: str, per_token: float, model: str) -> None:
    from sim.plots.reuse import plot_reuse
    from sim.plots.style import save, sheet

    figure = sheet(
        7.2,
        4.4,
        title=f"{source}: an ideal cache finds at most {100 * curve.best_hit_rate:.0f} % of the prompt tokens again",
    )
    plot_reuse(figure.subplots(), curve, bytes_per_token=per_token, model=model)
    with _picture(path):
        save(figure, path, svg=False)


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix != ".png":
        raise RooftraceError(f"--out {path}: the picture is a PNG file; end its name in .png")


@contextlib.contextmanager
def _picture(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


def _read_sessions(file: Path, per_s: float) -> Any:
    from workloads import Poisson, read_sessions

    with _user_errors(file):
        return read_sessions(file, starts=Poisson(rate_per_s=per_s))


def _holds_sessions(file: Path) -> bool:
    """Whether *file* is a Parquet file with the columns of recorded sessions, whose requests have no arrivals of their own."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        if opened.read(4) != b"PAR1":
            return False
    import pyarrow
    import pyarrow.parquet

    try:
        names = set(pyarrow.parquet.read_schema(file).names)
    except (OSError, pyarrow.ArrowException):
        return False  # said where it is read
    return {"session_id", "request", "delay", "hash_ids"} <= names


def _read(file: Path, format_: str, columns: list[str] | None, **how: Any) -> Any:
    from workloads import read_trace

    with _user_errors(file):
        if _holds_sessions(file):
            raise RooftraceError(
                f"{file} is a Parquet file of recorded sessions: workload.sessions replays them, and rooftrace trace reuse takes "
                "them with --sessions-per-s"
            )
        with reading():
            return read_trace(file, format_, columns=columns_of(columns), **how)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Show how much of the file that is being read has been."""
    from workloads.sources import megabytes_read

    with under_way("Reading", unit="MB", done=lambda: megabytes_read()[0], total=lambda: megabytes_read()[1]):
        yield


@contextlib.contextmanager
def _user_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    except OSError as error:
        raise RooftraceError(f"cannot read {file}: {error.strerror}") from None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.5g}" if isinstance(value, float) else "-" if value is None else str(value)
