"""rooftrace observe: a deployment that runs, its traffic replayed, and what another deployment would have done."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exits import interrupted
from sim.cli.options import Json, set_option
from sim.cli.tables import print_facts, print_json, print_notes, print_table, written
from sim.errors import OutputError, RooftraceError

if TYPE_CHECKING:
    from sim.observe.curves import Observed
    from sim.observe.observation import Observation, Source
    from sim.observe.replay import Beside
    from sim.observe.traffic import ObservedTraffic
    from sim.observe.what_if import Alternative, Counterfactual
    from sim.scenario import Scenario
    from sim.study.compare import Difference

_TABLE = ("requests_per_s", "ttft_s", "itl_s", "running", "in_flight", "waiting", "kv_used")

_LEAST = 1e-3
"""Seconds: the least that options of time take."""


def register(app: typer.Typer) -> None:
    app.command()(observe)


def observe(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Scrapes of /metrics (text; the instant in the name, sample or file), answers of Prometheus' API (JSON), tables "
            "of counters (CSV with t_s), logs of requests (JSON lines, OpenTelemetry spans, CSV).",
            show_default=False,
        ),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="A Prometheus server to ask; it is only read.", show_default=False)
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(help="Scenario of the deployment, whose workload is put aside; without one nothing is replayed."),
    ] = None,
    set_: Annotated[list[str] | None, set_option("Change a setting of the scenario.")] = None,
    since: Annotated[
        str | None, typer.Option(help="From when on: a date and time, Unix seconds, or so long ago (6h).", show_default=False)
    ] = None,
    until: Annotated[str | None, typer.Option(help="Until when; now without it.", show_default=False)] = None,
    step: Annotated[float, typer.Option(min=_LEAST, help="Seconds between samples that a Prometheus server is asked for.")] = 15.0,
    match: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=VALUE", help="Only samples with this label; repeatable.", show_default=False),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(help="Intervals of the comparison (15m, 1h); an hour, or a twelfth of less.", show_default=False),
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean prompt, where nothing counts it.", show_default=False)
    ] = None,
    output_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean output, where nothing counts it.", show_default=False)
    ] = None,
    prefix_groups: Annotated[
        int, typer.Option(min=1, help="Beginnings that prompts share, where hits of the prefix cache are counted.")
    ] = 1,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that clients have in flight at most, waiting to send more.", show_default=False),
    ] = None,
    fit: Annotated[bool, typer.Option("--fit/--no-fit", help="Fit the stack's terms to what was observed.")] = True,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="KEY=VALUE", help="Another deployment under the same traffic; several settings between ';'. "
            "Repeatable.", show_default=False,
        ),
    ] = None,
    replications: Annotated[int, typer.Option(min=1, help="Draws of the rebuilt traffic.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the traffic, the scenario of the present and the fitted stack.")] = Path(
        "observed"
    ),
    export_dashboard: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Grafana dashboard, predicted over observed.", show_default=False)
    ] = None,
    serve: Annotated[
        int | None, typer.Option(metavar="PORT", min=0, max=65535, help="Answer /metrics as predicted.", show_default=False)
    ] = None,
    refresh: Annotated[
        float, typer.Option(min=_LEAST, help="Seconds after which --serve observes a Prometheus server again.")
    ] = 300.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Rebuild the traffic of a deployment that runs, fit and replay it, say where it drifts and what another would have done."""
    from sim.cli.given import read_scenario
    from sim.observe.observation import How, traffic_of
    from sim.observe.observation import observe as run
    from sim.observe.query import duration_of

    def read() -> tuple[Observed, ObservedTraffic]:
        asked = _source(files, prometheus, since, until, step, match)
        seen, logged = asked.read()
        found = traffic_of(asked, seen, logged, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        return seen, replace(found, share_groups=prefix_groups, in_flight=in_flight)

    if scenario is None and (what_if or serve is not None or set_):
        raise RooftraceError("--what-if, --serve and --set need a deployment to simulate; give it with --scenario FILE")
    chosen = None if scenario is None else read_scenario(scenario, set_)
    _check(chosen, what_if or ())
    every_s = None if every is None else duration_of(every, "--every")
    seen, traffic = read()
    _check(chosen, what_if or (), traffic)
    _make(out)
    if export_dashboard is not None:
        _export(export_dashboard, seen.makers, match or ())
    if chosen is None:
        _write_traffic(seen, traffic, out, files or (), as_json=as_json)
        return
    how = How(every_s=every_s, fits=fit, replications=replications)
    names = [str(path) for path in files or ()] or [prometheus or ""]
    found = run(chosen, seen, traffic, out=out, files=names, how=how)
    _write_alternatives(found, what_if or (), how, out, files or (), as_json=as_json)
    if serve is None:
        return

    def again(folder: Path) -> Observation:
        """The deployment observed now. What was fitted stays: fitted anew each time, figures would follow every drift."""
        return run(found.present, *read(), out=folder, files=names, how=replace(how, fits=False))

    _serve(found, again if prometheus is not None else None, (serve, refresh), out)


def _write_traffic(
    seen: Observed, traffic: ObservedTraffic, out: Path, given: Sequence[Path], *, as_json: bool
) -> None:
    """Write and print the traffic alone, where there is no deployment to replay it on."""
    trace = traffic.workload(0)
    trace.to_csv(out / "requests.csv")
    _remove(out, ("observed.yaml", "stack.toml", "rerouted.csv"), given)
    if as_json:
        print_json({"traffic": _traffic_facts(traffic), "missing": seen.missing, "notes": [*seen.notes, *traffic.how]})
    else:
        print_facts([*_traffic_text(seen.makers, traffic), *written(out)])
        print_notes([*seen.missing, *_assumed(traffic, seen.notes)])


def _write_alternatives(
    found: Observation, texts: Sequence[str], how: Any, out: Path, given: Sequence[Path], *, as_json: bool
) -> None:
    """Print what was *found* and the alternatives to it, and write the requests of the log that one of them routes anew."""
    others, routed, refused = _what_if(found, texts, how)
    if routed is not None:
        _write_requests(routed, out)
    used = {"stack.toml": "stack.toml" in found.present.to_yaml(), "rerouted.csv": routed is not None}
    _remove(out, [name for name, is_used in used.items() if not is_used], given)
    if as_json:
        print_json(_facts(found, others, routed, refused))
    else:
        _print(found, others, routed, out)
    print_notes([*found.seen.missing, *_assumed(found.traffic, found.seen.notes), *found.notes, *refused])


def _source(
    files: Sequence[Path] | None, prometheus: str | None, since: str | None, until: str | None, step: float,
    match: Sequence[str] | None,
) -> Source:  # fmt: skip
    from sim.observe.observation import Source
    from sim.observe.query import instant_of

    if prometheus is not None and since is None:
        raise RooftraceError("--prometheus needs --since, such as --since 6h")
    return Source(
        files=tuple(files or ()),
        url=prometheus,
        since_s=None if since is None else instant_of(since, "--since"),
        until_s=(None if prometheus is None else instant_of("now", "--until")) if until is None else instant_of(until, "--until"),
        step_s=step,
        match=tuple(match or ()),
    )  # fmt: skip


def _check(chosen: Scenario | None, texts: Sequence[str], traffic: ObservedTraffic | None = None) -> None:
    """Refuse alternatives that cannot be before the minutes that the rest takes: their settings, and all else once there is
    *traffic* for them."""
    from sim.observe.what_if import settings_of
    from sim.scenario.assembly import resolve

    scenarios = [] if chosen is None else [chosen.with_set(*settings_of(text)) for text in texts]
    if traffic is not None and scenarios:
        trace = traffic.workload(scenarios[0].seed)
        for each in scenarios:
            resolve(each, trace)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {out}: {error.strerror}") from None


def _remove(out: Path, names: Iterable[str], given: Sequence[Path]) -> None:
    """Remove what an earlier observation wrote to *out* and this one did not, so that nothing there is of another."""
    kept = {path.resolve() for path in given}
    for path in (out / name for name in names):
        if path.resolve() not in kept:
            path.unlink(missing_ok=True)


def _export(path: Path, makers: Sequence[str], match: Sequence[str]) -> None:
    import json

    from sim.cli.outputs import put_text
    from sim.observe.dashboard import dashboard
    from sim.observe.samples import Matching

    put_text(path, json.dumps(dashboard(makers, Matching.of(tuple(match)).labels), indent=2) + "\n")
    typer.echo(
        f"Dashboard: {path}; import it into Grafana, with a Prometheus that scrapes observe --serve as well", err=True
    )


def _what_if(
    found: Observation, texts: Sequence[str], how: Any
) -> tuple[list[Alternative], Counterfactual | None, list[str]]:
    """The alternatives, the requests of the log one by one for the first that changes the router, and why that could not be."""
    from sim.observe.what_if import alternative, counterfactual, settings_of

    others: list[Alternative] = []
    routed, refused = None, []
    asked = [settings_of(text) for text in texts]
    for settings in asked:
        seeds = range(found.present.seed, found.present.seed + how.replications)
        others.append(alternative(found, settings, seeds=seeds))
        named = found.traffic.logged is not None and found.traffic.logged.instance is not None
        if not named or not any(each.startswith("router") for each in settings):
            continue
        if routed is not None:
            refused.append(f"{'; '.join(settings)} is not laid request by request; {'; '.join(routed.settings)} is")
        else:
            try:
                other = counterfactual(found.present.with_set(*settings), found.traffic, found.edges_s)
                routed = replace(other, settings=settings)
            except RooftraceError as error:
                refused.append(f"no routing request by request: {error}")
    return others, routed, refused


def _write_requests(routed: Counterfactual, out: Path) -> None:
    import csv
    import io

    from sim.cli.outputs import put_text

    text = io.StringIO()
    rows = routed.rows()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    put_text(out / "rerouted.csv", text.getvalue())


def _serve(found: Observation, again: Callable[[Path], Observation] | None, at: tuple[int, float], out: Path) -> None:
    from tempfile import TemporaryDirectory

    from sim.observe.dashboard import exposition
    from sim.observe.serving import Served, serve, server_of

    port, refresh_s = at

    def renewed() -> str:
        assert again is not None
        with TemporaryDirectory() as folder:
            return exposition(again(Path(folder)))

    served = Served(
        exposition(found),
        None if again is None else renewed,
        refresh_s,
        lambda text: print_notes([text]),
    )
    server = server_of(served, "127.0.0.1", port)
    print_notes(
        [f"predicted figures are at http://127.0.0.1:{server.server_address[1]}/metrics; Ctrl-C ends"], head="Serving"
    )
    try:
        serve(served, server)
    except KeyboardInterrupt as error:
        raise interrupted(error, f"what was written to {out} is kept.") from None


def _assumed(traffic: ObservedTraffic, notes: Sequence[str]) -> list[str]:
    from sim.observe.traffic import sentences

    return [*notes, *sentences(traffic)]


def _traffic_facts(traffic: ObservedTraffic) -> dict[str, Any]:
    import numpy as np

    return {
        "begin": _when(traffic.begin_s),
        "begin_s": traffic.begin_s,
        "duration_s": float(traffic.edges_s[-1] - traffic.edges_s[0]),
        "requests": traffic.requests,
        "rate_per_s": traffic.requests / float(traffic.edges_s[-1] - traffic.edges_s[0]),
        "rate_per_s_least": float(traffic.rate_per_s.min()),
        "rate_per_s_most": float(traffic.rate_per_s.max()),
        "prompt_tokens_mean": _overall(traffic, "prompt"),
        "output_tokens_mean": _overall(traffic, "output"),
        "prefix_hit": float(np.nanmean(traffic.prefix_hit)) if np.isfinite(traffic.prefix_hit).any() else None,
    }


def _overall(traffic: ObservedTraffic, name: str) -> float | None:
    if traffic.logged is not None:
        return float(getattr(traffic.logged, f"{name}_tokens").mean())
    return getattr(traffic, name).overall


def _traffic_text(makers: Sequence[str], traffic: ObservedTraffic) -> list[tuple[str, str]]:
    facts = _traffic_facts(traffic)
    lengths = [
        f"{facts[f'{name}_tokens_mean']:,.0f} tokens of {name}" for name in ("prompt", "output") if facts[f"{name}_tokens_mean"]
    ]  # fmt: skip
    hit = "" if facts["prefix_hit"] is None else f", {facts['prefix_hit']:.0%} of prompt tokens in the prefix cache"
    return [
        ("Observed", f"{' and '.join(makers)}, {_when(traffic.begin_s)}, {facts['duration_s']:,.0f} s"),
        (
            "Traffic",
            f"{facts['requests']:,} requests, {facts['rate_per_s']:.3g}/s "
            f"({facts['rate_per_s_least']:.3g} to {facts['rate_per_s_most']:.3g}){hit}",
        ),
        ("Lengths", ", ".join(lengths) or "not known"),
    ]  # fmt: skip


def _when(at_s: float) -> str:
    """An instant as people read it: a date where it is one, seconds where tables count from their own beginning."""
    from datetime import UTC, datetime

    return (
        f"from second {at_s:,.0f}"
        if at_s < 1e8
        else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    )


def _print(found: Observation, others: Sequence[Alternative], routed: Counterfactual | None, out: Path) -> None:
    print_facts(_traffic_text(found.seen.makers, found.traffic))
    _print_hours(found.beside)
    if found.fit is not None:
        _print_fit(found)
    print_facts(_verdicts(found))
    for other in others:
        _print_alternative(found.beside, other)
    if routed is not None:
        rerouted = (
            f"{'; '.join(routed.settings)}: {routed.moved:.0%} of requests would go elsewhere; mean TTFT "
            f"{_mean(routed.ttft_s[0])} as logged, "
        )
        print_facts(
            [
                (
                    "Request by request",
                    f"{rerouted}{_mean(routed.ttft_s[1])} rerouted (both simulated); {out / 'rerouted.csv'}",
                )
            ]
        )
    name = shlex.quote(str(out / "observed.yaml"))
    print_facts(written(out, f"rooftrace run {name}", f"rooftrace advise {name}"))


def _mean(values: Any) -> str:
    import numpy as np

    from sim.text import seconds_text

    known = values[np.isfinite(values)]
    return seconds_text(float(known.mean())) if known.size else "-"


def _print_hours(both: Beside) -> None:
    from sim.observe.replay import QUANTITIES

    names = [name for name in _TABLE if name in both.observed]
    rows = []
    for at, begin_s in enumerate(both.edges_s[:-1]):
        rows.append(
            (
                _clock(float(begin_s), float(both.edges_s[0])),
                *(_pair(name, float(both.observed[name][at]), float(both.simulated[name][at])) for name in names),
            )
        )
    whole = {name: both.whole(name) for name in names}
    rows.append(("all", *("-" if (pair := whole[name]) is None else _pair(name, *pair) for name in names)))
    print_table(("from", *(QUANTITIES[name] for name in names)), rows, title="observed | simulated", left=1)


def _clock(at_s: float, first_s: float) -> str:
    from datetime import UTC, datetime

    return f"{at_s - first_s:,.0f} s" if at_s < 1e8 else datetime.fromtimestamp(at_s, UTC).strftime("%d. %H:%M:%S")


def _pair(name: str, observed: float, simulated: float) -> str:
    return f"{_figure(name, observed)} | {_figure(name, simulated)}"


def _figure(name: str, value: float) -> str:
    from sim.text import seconds_text

    if not isfinite(value):
        return "-"
    if name in ("ttft_s", "itl_s"):
        return seconds_text(value)
    return f"{value:.1%}" if name == "kv_used" else f"{value:.3g}"


def _print_fit(found: Observation) -> None:
    from sim.bench.parameters import BY_NAME, own_value
    from sim.text import seconds_text

    assert found.fit is not None
    posterior = found.fit.posterior
    rows = []
    for name in posterior.names:
        of = [own_value(posterior.base, name), own_value(posterior.setting, name), *posterior.interval(name, 1.96)]
        before, fitted, low, high = (seconds_text(v) if BY_NAME[name].kind == "time" else f"{v:.3g}" for v in of)
        rows.append((BY_NAME[name].title, before, fitted, f"{low} to {high}", f"{posterior.told(name):.0%}"))
    print_table(
        ("fitted", "before", "now", "95 % interval", "told"),
        rows,
        title=f"{len(found.fit.cases)} stretches of the observation",
    )


def _verdicts(found: Observation) -> Iterator[tuple[str, str]]:
    from sim.observe.replay import QUANTITIES

    if found.kv is not None:
        kv = found.kv
        sure = "as it says itself" if kv.exact else f"by its KV use, {kv.low:,.0f} to {kv.high:,.0f}"
        yield "KV blocks", f"{kv.told:,.0f} a machine, {sure}"
    changed = [
        f"{QUANTITIES[each.quantity]} is {abs(each.by):.0%} {'higher' if each.by > 0 else 'lower'} against its simulation since "
        f"{_clock(each.since_s, float(found.edges_s[0]))}"
        for each in found.changes
    ]
    yield "Drift", "; ".join(changed) or f"no change against the simulation over {len(found.edges_s) - 1} intervals"
    for i, cause in enumerate(found.causes):
        yield "Likely cause" if i == 0 else "", f"{cause.kind}: {cause.text}"


def _print_alternative(both: Beside, other: Alternative) -> None:
    from sim.observe.replay import QUANTITIES

    here, there = (replace(both, simulated=each.rows) for each in (other.present, other.replayed))
    rows = []
    for name in _TABLE:
        now, then = here.whole(name), there.whole(name)
        if now is not None and then is not None:
            rows.append((QUANTITIES[name], *(_figure(name, value) for value in (*now, then[1]))))
    print_table(
        ("", "observed", "present, simulated", "alternative, simulated"),
        rows,
        title=f"What if: {', '.join(other.settings)}",
    )
    print_facts(
        [
            ("Simulated against simulated" if i == 0 else "", each.verdict)
            for i, each in enumerate(_telling(other.differences))
        ]
    )
    typer.echo(f"(A is the present, B the alternative; {other.how})")


def _telling(differences: Sequence[Difference]) -> list[Difference]:
    """The differences that the table does not repeat: percentiles, rates, attainment and money."""
    return [each for each in differences if each.a != each.b or each.change is not None]


def _facts(
    found: Observation, others: Sequence[Alternative], routed: Counterfactual | None, refused: Sequence[str]
) -> dict[str, Any]:
    from sim.bench.parameters import own_value
    from sim.observe.replay import QUANTITIES

    both = found.beside
    fit = None
    if found.fit is not None:
        posterior = found.fit.posterior
        fit = [
            {
                "name": name,
                "before": own_value(posterior.base, name),
                "fitted": own_value(posterior.setting, name),
                "low_95": posterior.interval(name, 1.96)[0],
                "high_95": posterior.interval(name, 1.96)[1],
                "told": posterior.told(name),
            }
            for name in posterior.names
        ]
    return {
        "makers": found.seen.makers,
        "instances": found.seen.instances,
        "traffic": _traffic_facts(found.traffic),
        "hours": [
            {
                "from": _clock(float(begin_s), float(both.edges_s[0])),
                "from_s": float(begin_s),
                **{name: _both(both.observed.get(name), both.simulated[name], at) for name in QUANTITIES},
            }
            for at, begin_s in enumerate(both.edges_s[:-1])
        ],
        "whole": _whole(both),
        "fit": fit,
        "kv_blocks": None if found.kv is None else {"told": found.kv.told, "low_95": found.kv.low, "high_95": found.kv.high},
        "changes": [
            {"quantity": each.quantity, "since_s": each.since_s, "by": each.by} for each in found.changes
        ],
        "causes": [{"kind": each.kind, "instance": each.instance, "text": each.text} for each in found.causes],
        "what_if": [
            {
                "set": each.settings,
                "how": each.how,
                "present": _whole(replace(both, simulated=each.present.rows)),
                "whole": _whole(replace(both, simulated=each.replayed.rows)),
                "differences": [_difference(one) for one in each.differences],
            }
            for each in others
        ],
        "rerouted": None if routed is None else {"set": routed.settings, "moved": routed.moved, "requests": len(routed.went)},
        "missing": found.seen.missing,
        "notes": [*found.seen.notes, *found.traffic.how, *found.notes, *refused],
    }  # fmt: skip


def _whole(both: Beside) -> dict[str, Any]:
    from sim.observe.replay import QUANTITIES

    return {name: {"observed": pair[0], "simulated": pair[1]} for name in QUANTITIES if (pair := both.whole(name))}


def _both(observed: Any, simulated: Any, at: int) -> dict[str, Any]:
    return {"observed": None if observed is None else observed[at], "simulated": simulated[at]}


def _difference(each: Difference) -> dict[str, Any]:
    change = each.change
    return {
        "metric": each.metric,
        "present": each.a,
        "alternative": each.b,
        "change": None if change is None else change.mean,
        "low_95": None if change is None else change.low,
        "high_95": None if change is None else change.high,
        "verdict": each.verdict,
    }
