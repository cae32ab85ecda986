"""rooftrace explain: where the time of a token goes, what bounds the deployment, and what more of each resource would change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exports import takes_export
from sim.cli.options import Json, set_option
from sim.cli.tables import console, print_facts, print_json, print_notes, print_table
from sim.errors import RooftraceError
from sim.under_way import under_way

if TYPE_CHECKING:
    from sim.results import Result
    from sim.scenario import Scenario
    from sim.study.explain import Explained
    from sim.study.what_if import Effect

_KEYS = {"mean": "mean", "slowest 1 %": "slowest_hundredth"}
_SHOWN = 0.0005
"""The share below which a cause is left out of the tables; --json has all."""


def register(app: typer.Typer) -> None:
    app.command()(takes_export(explain))


def explain(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Results folder of a run, or a scenario file; without one, the built-in default.", show_default=False
        ),
    ] = None,
    set_: Annotated[list[str] | None, set_option("Change a setting of the scenario.")] = None,
    effects: Annotated[
        bool, typer.Option(help="Run it again with a tenth more of each resource, and say what that changes.")
    ] = True,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the shares as a PNG.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where the time of a token goes, what bounds the deployment, and what a tenth more of each resource would change."""
    from sim.cli.outputs import check_folder_of
    from sim.run import run_built
    from sim.scenario.assembly import resolve
    from sim.study.explain import check_explained, explained
    from sim.study.what_if import bound
    from sim.study.what_if import effects as effects_of

    check_folder_of(picture)
    if picture is not None and picture.suffix != ".png":
        raise RooftraceError(f"--picture {picture}: pictures are PNG files; give a name that ends in .png")
    scenario, stored = _scenario_of(source, set_)
    with under_way("Reading the workload and building the deployment"):
        built = resolve(scenario)
    print_notes(built.manifest["notes"])
    check_explained(built.experiment)
    result = run_built(built)
    print_notes(_changed_since(stored, result))
    with under_way("Dividing the time"):
        found = explained(built.experiment, result.columns)
    sentence = bound(found)
    means = {
        measure: dict(zip(_KEYS, found.means(measure, result.in_window), strict=True))
        for measure in ("tpot_s", "ttft_s")
    }
    changes: list[Effect] = []
    if effects:
        with under_way("Running it with a tenth more of each resource"):
            changes = list(effects_of(built.experiment, result.summary))
    if picture is not None:
        from sim.plots.shares import draw_shares

        draw_shares(means, result.label, picture)
    if as_json:
        print_json(_facts(result, sentence, means, found, changes))
    else:
        _print(result, sentence, means, changes, picture)


def _scenario_of(source: Path | None, settings: list[str] | None) -> tuple[Scenario, Result | None]:
    """The scenario to run, and the stored result where *source* is its folder and nothing is changed."""
    from sim.cli.given import read_scenario
    from sim.launch import recommended
    from sim.results import Result

    if source is None or not source.is_dir():
        return read_scenario(source, settings), None
    scenario = recommended(source).scenario.with_set(*(settings or ()))
    return scenario, None if settings or not (source / "summary.json").is_file() else Result.load(source)


def _changed_since(stored: Result | None, result: Result) -> list[str]:
    """A note where the run of a folder is no longer what it was."""
    if stored is None:
        return []
    moved = [
        name.removesuffix("_s").upper()
        for name in ("ttft_s", "tpot_s")
        if stored.summary[name]["mean"] != result.summary[name]["mean"]
    ]
    if not moved:
        return []
    return [
        f"The scenario of the folder was run again, and its mean {' and '.join(moved)} came out otherwise: another version wrote "
        "the folder, or a file that it read has changed. What follows is of the new run."
    ]


def _facts(
    result: Result,
    sentence: str,
    means: dict[str, dict[str, dict[str, float]]],
    found: Explained,
    changes: list[Effect],
) -> dict[str, Any]:
    return {
        "label": result.label,
        "bound": sentence,
        **{
            measure: {_KEYS[name]: _shares(parts) for name, parts in groups.items()}
            for measure, groups in means.items()
        },
        "busy_s": found.busy_s,
        "effects": [{"change": each.name, "ttft": each.ttft, "tpot": each.tpot, "e2el": each.e2el} for each in changes],
        "prices_from": result.manifest.get("trust"),
    }


def _shares(parts: dict[str, float]) -> dict[str, Any]:
    whole = sum(parts.values())
    return {
        "s": whole if parts else None,
        "causes": {cause: {"s": each, "share": each / whole} for cause, each in parts.items()},
    }


def _print(
    result: Result,
    sentence: str,
    means: dict[str, dict[str, dict[str, float]]],
    changes: list[Effect],
    picture: Path | None,
) -> None:
    from sim.results.trust import trust_rows
    from sim.study.explain import CAUSES
    from sim.text import seconds_text

    out = console()
    out.print(result.label, style="bold", markup=False)
    out.print(sentence)
    for measure, title in (("tpot_s", "TPOT, per later token"), ("ttft_s", "TTFT, first token")):
        columns = list(means[measure].values())
        if not columns[0]:
            continue
        whole = [sum(each.values()) for each in columns]
        rows = [
            [
                cause,
                *(text for each, of in zip(columns, whole, strict=True) for text in _cells(each.get(cause, 0.0), of)),
                CAUSES[cause],
            ]
            for cause in CAUSES
            if any(abs(each.get(cause, 0.0)) >= _SHOWN * of for each, of in zip(columns, whole, strict=True))
        ]
        rows.append(["together", *(text for of in whole for text in (seconds_text(of), "")), ""])
        heads = (text for name in means[measure] for text in (name, "share"))
        print_table((title, *heads, "what it is"), rows, fold=1, together=2)
    if changes:
        rows = [[each.name, *map(_change, (each.ttft, each.tpot, each.e2el))] for each in changes]
        print_table(("With", "mean TTFT", "mean TPOT", "mean E2EL"), rows)
    print_facts([*trust_rows(result.summary), *([("Picture", str(picture))] if picture is not None else [])])


def _cells(seconds: float, whole: float) -> tuple[str, str]:
    from sim.text import seconds_text

    return seconds_text(seconds), f"{seconds / whole:.1%}"


def _change(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"
