"""rooftrace place: find out which models should share which devices."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.options import SummaryJson, set_option
from sim.cli.tables import print_facts, print_json, print_table, written
from sim.under_way import under_way

if TYPE_CHECKING:
    from sim.placement import Outcome, Plan


def register(app: typer.Typer) -> None:
    app.command()(place)


def place(
    scenario: Annotated[Path, typer.Argument(help="Placement scenario (YAML).", show_default=False)],
    set_: Annotated[list[str] | None, set_option("Change a setting, e.g. --set cluster.devices=16.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for placement.json, placement.png and summary.json.", show_default=False)
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Serve with this saved placement; nothing is searched.", show_default=False)
    ] = None,
    as_json: SummaryJson = False,
) -> None:
    """Search a placement of many models on one cluster by simulation, and say what share it serves in time."""
    from sim.errors import RooftraceError, ScenarioError
    from sim.placement import find, load_placement, serve
    from sim.placement.scenario import PlaceScenario

    chosen = PlaceScenario.load(scenario, set_ or ())
    serving, settings = chosen.serving, chosen.settings
    train, test = chosen.traffic()
    plan: Plan | None = None
    if replay is not None:
        placements, window_s = [load_placement(replay, serving.names)], None
        trained = _served(serve, chosen.source, serving, placements, train, None)
    else:
        try:
            with _progress(not as_json) as progress:
                plan = find(
                    chosen.search, serving, train, jobs=settings.jobs, budget_s=settings.budget_s, progress=progress
                )
        except ScenarioError:
            raise
        except ValueError as error:
            raise RooftraceError(f"{chosen.source}: {error}") from error
        placements, window_s, trained = list(plan.placements), plan.window_s, plan.train
    tested = None if test is None else _served(serve, chosen.source, serving, placements, test, window_s)
    summary = _summary(chosen, plan, placements, trained, tested)
    if out is not None:
        _write(out, placements[0], serving, summary)
    if plan is not None and plan.note is not None:
        typer.echo(f"Note: {plan.note}", err=True)
    if as_json:
        print_json(summary)
    else:
        _print(placements, serving, summary, out)


def _served(serve: Any, source: str, *arguments: Any) -> Outcome:
    from sim.errors import ScenarioError

    try:
        return serve(*arguments)
    except ValueError as error:
        raise ScenarioError(f"{source}: {error}") from error


def _progress(shown: bool) -> Any:
    """A context that gives a callback to be told of progress; drawn on standard error where that is a terminal."""
    import contextlib
    import sys

    @contextlib.contextmanager
    def bar() -> Any:
        if not shown or not sys.stderr.isatty():
            yield None
            return
        said = ""

        def tell(simulations: int, best: float) -> None:
            nonlocal said
            said = f"{simulations:,} placements simulated, best {best:.2%} in time"

        with under_way("Searching", said=lambda: said):
            yield tell

    return bar()


def _outcome(outcome: Outcome) -> dict[str, Any]:
    import numpy as np

    latency = outcome.latency_s
    facts: dict[str, Any] = {"requests": len(outcome.workload), "attainment": outcome.attainment}
    if latency.size:
        facts["mean_latency_s"] = float(latency.mean())
        facts["p99_latency_s"] = float(np.quantile(latency, 0.99))
    return facts


def _summary(chosen: Any, plan: Any, placements: list[Any], trained: Any, tested: Any) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "scenario": chosen.settings.model_dump(mode="json"),
        "groups": placements[0].describe(),
        "placement": _groups(placements[0], chosen.serving),
        "replicas": placements[0].replicas,
        "not_placed": _not_placed(chosen.serving.names, placements),
        "train": _outcome(trained),
    }
    if tested is not None:
        summary["test"] = _outcome(tested)
    if plan is not None:
        summary["planning"] = {
            "search": repr(plan.search),
            "simulations": plan.simulations,
            "wall_s": plan.planning_s,
            "processor_s": plan.processor_s,
            "windows": len(plan.placements),
            "cut_short": plan.cut_short,
            "screened_by": plan.screened_by,
        }
    return summary


def _groups(placement: Any, serving: Any) -> list[dict[str, Any]]:
    """The groups of *placement*: their devices, from the first to the last, their shape, and what they host."""
    from policies.placement import group_bytes

    found, device = [], 0
    for group in placement.groups:
        last = device + group.n_devices - 1
        found.append(
            {
                "devices": [device, last],
                "inter_op": group.inter_op,
                "intra_op": group.intra_op,
                "bytes_per_device": group_bytes(group, serving.views_without_traffic),
                "models": [serving.names[model] for model in group.models],
            }
        )
        device = last + 1
    return found


def _not_placed(names: Any, placements: list[Any]) -> list[str]:
    """Models that no group hosts in any window."""
    hosted = {model for placement in placements for group in placement.groups for model in group.models}
    return [name for index, name in enumerate(names) if index not in hosted]


def _gathered(names: list[str]) -> str:
    """Names in one line, copies of a model gathered: 'bert-1.3b#0 #3 #4, moe-2.4b'."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        kind, mark, copy = name.partition("#")
        by_kind.setdefault(kind, []).append(mark + copy)
    return ", ".join(kind + " ".join(copies) for kind, copies in by_kind.items())


def _write(out: Path, placement: Any, serving: Any, summary: dict[str, Any]) -> None:
    from sim.errors import OutputError
    from sim.placement import save_placement
    from sim.plots.placement import placement_figure
    from sim.plots.style import save
    from sim.results.folder import write_json

    try:
        out.mkdir(parents=True, exist_ok=True)
        about = {key: value for key, value in summary.items() if key not in ("scenario", "placement")}
        save_placement(placement, serving.names, out / "placement.json", about=about)
        save(placement_figure(placement, serving.names, serving.cluster), out / "placement.png", svg=False)
        write_json(out / "summary.json", summary)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"cannot write to the folder {out}: {error.strerror}") from error


def _print(placements: list[Any], serving: Any, summary: dict[str, Any], out: Path | None) -> None:

    rows = [
        (
            str(index),
            "-".join(map(str, dict.fromkeys(group["devices"]))),
            f"({group['inter_op']}, {group['intra_op']})",
            f"{group['bytes_per_device'] / 1e9:.1f} GB",
            str(len(group["models"])),
            _gathered(group["models"]) or "nothing",
        )
        for index, group in enumerate(summary["placement"])
    ]
    heads = ("Group", "Devices", "(inter, intra)", "Per device", "Hosts", "Models")
    print_table(heads, rows, fold=1)
    facts = [("Groups", summary["groups"])]
    missing = summary["not_placed"]
    if missing:
        facts.append(("Not placed", f"{len(missing)} of {len(serving.names)} models: {_gathered(missing)}"))
    for key, title in (("train", "In time, planned traffic"), ("test", "In time, other traffic")):
        if key in summary:
            part = summary[key]
            facts.append((title, f"{part['attainment']:.2%} of {part['requests']:,} requests"))
    if "planning" in summary:
        planning = summary["planning"]
        windows = f", {planning['windows']} windows (the first is shown)" if planning["windows"] > 1 else ""
        cut = ", cut short by budget_s" if planning["cut_short"] else ""
        took = f"{planning['wall_s']:.2f} s for {planning['simulations']:,} simulations"
        facts.append(("Planning", f"{took}{windows}{cut}"))
    if out is not None:
        only = "; the placement saved is that of the first window" if len(placements) > 1 else ""
        replay = shlex.quote(str(out / "placement.json"))
        (name, text), *see = written(out, f"rooftrace place SCENARIO --replay {replay}")
        facts += [(name, text + only), *see]
    print_facts(facts)
