"""rooftrace bench fit and bench next: a deployment's own terms from its measured runs, and which run would tell most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.exits import USER_ERROR
from sim.cli.options import Before, Files, Json, Where, set_option
from sim.cli.tables import print_facts, print_json, print_notes, print_table
from sim.errors import OutputError, RooftraceError
from sim.text import seconds_text, unknown

if TYPE_CHECKING:
    from sim.bench import BenchRun
    from sim.bench.cases import Case
    from sim.bench.fitting import Fit, Posterior, Prediction
    from sim.scenario import Scenario

_QUANTITIES = ("tpot_s", "ttft_s")


def fit(
    scenario: Annotated[
        Path, typer.Argument(help="Scenario file (YAML) of the deployment; its workload is put aside.")
    ],
    files: Files,
    out: Annotated[Path, typer.Option(help="The fitted stack (.toml), for serving_stack of scenarios.")],
    set_: Annotated[
        list[str] | None, set_option("Change a setting, or with run.NAME=VALUE say what files do not.")
    ] = None,
    where: Where = None,
    before: Before = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="RUN", help="Runs of this name, or like it with *; the others are predicted. Repeatable."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=100, help="Simulated at most of an open load that the server kept up with.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Fit few physical terms of the serving stack to measured runs, and write them as a stack of one's own."""
    from sim.bench.load import shortened
    from sim.bench.overlay import stack_text
    from sim.cli.measured_files import read_both
    from sim.cli.outputs import put_text

    if out.suffix != ".toml":
        raise RooftraceError(f"--out is a .toml file, for serving_stack tells files from names by it; got {out}")
    if not out.parent.is_dir():
        raise OutputError(f"cannot write {out}: {out.parent} is no folder")
    chosen, runs = read_both(scenario, files, set_, where, before)
    if chosen.stack_file is not None:
        raise RooftraceError(
            f"{scenario}: serving_stack is {chosen.serving_stack}, a fit already; name the stack that it was fitted over "
            f"(--set serving_stack={chosen.stack_name})"
        )
    runs = [shortened(run, requests) for run in runs]
    used = _used(runs, only)
    found, others = _fitted(chosen, runs, used)
    left_out = found.left_out() if len(found.cases) > 1 else []
    predicted = [each for case in others for each in found.predict(case)]
    put_text(out, stack_text(found, chosen, [str(path) for path in files], [*left_out, *predicted]))
    if as_json:
        print_json(_facts(found, left_out, predicted, out))
    else:
        _print(found, left_out, predicted, out)
    for i in found.contradicting:
        typer.echo(
            f"Warning: {found.cases[i].name} contradicts the other runs and was set aside; was another server, load or day "
            "measured there?",
            err=True,
        )


def _used(runs: Sequence[BenchRun], only: Sequence[str] | None) -> list[BenchRun]:
    """The runs to fit, which are those that --only names, or all; RooftraceError for a name that no run has."""
    if not only:
        return list(runs)
    for each in only:
        if not any(run.is_called(each) for run in runs):
            names = [run.name for run in runs]
            raise RooftraceError(
                unknown(f"--only {each}: no run is called so", each, names, hint=", and * stands for any text")
            )
    used = [run for run in runs if any(run.is_called(each) for each in only)]
    rest = [run.name for run in runs if run not in used]
    typer.echo(f"Fitted: {', '.join(run.name for run in used)}; predicted: {', '.join(rest) or 'none'}", err=True)
    return used


def _fitted(chosen: Scenario, runs: Sequence[BenchRun], used: Sequence[BenchRun]) -> tuple[Fit, list[Case]]:
    """The fit to the *used* runs, and the cases of the other *runs*; exit code 2 where no run can be simulated."""
    from sim.bench.cases import cases_of, priors_of
    from sim.bench.fitting import fit as fitted
    from sim.cli.measured_files import print_assumed

    problems: list[str] = []
    cases, base = cases_of(chosen, used, problems=problems)
    others, _ = cases_of(chosen, [run for run in runs if run not in used], problems=problems)
    print_notes(problems, head="Left out")
    if not cases:
        raise typer.Exit(USER_ERROR)
    print_assumed([run for run in runs if not any(problem.startswith(f"{run.name}: ") for problem in problems)])
    try:
        return fitted(cases, base, priors_of(cases[0]), names=_terms(chosen)), others
    except ValueError as error:
        raise RooftraceError(str(error)) from None


def _terms(scenario: Scenario) -> list[str] | None:
    """The terms to fit, None for all: the size of the cache is none of them where the scenario states it."""
    from sim.bench.parameters import KV, PARAMETERS

    return None if scenario.memory.kv_blocks is None else [each.name for each in PARAMETERS if each.name != KV]


def _facts(found: Fit, left_out: Sequence[Prediction], predicted: Sequence[Prediction], out: Path) -> dict[str, Any]:
    from sim.bench.overlay import errors_of
    from sim.bench.parameters import own_value

    posterior = found.posterior
    return {
        "file": str(out),
        "replays": found.replays,
        "scale": found.scale,
        "set_aside": [found.cases[i].name for i in found.contradicting],
        "parameters": [
            {
                "name": name,
                "before": own_value(posterior.base, name),
                "fitted": own_value(posterior.setting, name),
                "low_95": posterior.interval(name, 1.96)[0],
                "high_95": posterior.interval(name, 1.96)[1],
                "told": posterior.told(name),
                "prior_width": found.priors[name].width,
                "prior_source": found.priors[name].source,
            }
            for name in posterior.names
        ],
        "runs": [
            {
                "name": case.name,
                "measured_s": dict(case.measured_s),
                "before_s": dict(before),
                "fitted_s": dict(figures),
                "error_before": _errors(before, case.measured_s),
                "error_fitted": _errors(figures, case.measured_s),
            }
            for case, before, figures in zip(found.cases, found.before, found.figures, strict=True)
        ],
        "left_out": [_plain(each) for each in left_out],
        "predicted": [_plain(each) for each in predicted],
        "errors": {q: errors_of(found, left_out, q) for q in ("tpot_s", "ttft_s")},
    }


def _errors(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    return {name: predicted[name] / value - 1 for name, value in measured.items() if name in predicted}


def _plain(each: Prediction) -> dict[str, Any]:
    names = ("name", "quantity", "measured_s", "error", "predicted_s", "low_s", "high_s")
    return {name: getattr(each, name) for name in names}


def _print(found: Fit, left_out: Sequence[Prediction], predicted: Sequence[Prediction], out: Path) -> None:
    for quantity in _QUANTITIES:
        _print_runs(found, {each.name: each for each in left_out if each.quantity == quantity}, quantity)
    if predicted:
        rows = [
            (each.name, _title(each.quantity), seconds_text(each.measured_s), f"{each.error:+.1%}", _between(each))
            for each in predicted
        ]
        print_table(("Not fitted", "", "measured", "predicted", "90 % interval"), rows, left=2)
    _print_parameters(found.posterior)
    more = f"; residuals are {found.scale:.1f} times what is usual" if found.scale > 1.5 else ""
    print_facts(
        [
            (
                "Told",
                "share of a prior's variance that the runs took away; without the runs' word a parameter keeps its prior",
            ),
            ("Mean error", "; ".join(_mean_errors(found, left_out)) + more),
            ("Fitted stack", f"{out}; in a scenario: serving_stack: {out.name}"),
        ]
    )


def _print_runs(found: Fit, left_out: Mapping[str, Prediction], quantity: str) -> None:
    """A quantity of each run as measured and simulated."""
    rows = []
    for i, (case, before, figures) in enumerate(zip(found.cases, found.before, found.figures, strict=True)):
        if quantity in case.measured_s:
            measured, out_of = case.measured_s[quantity], left_out.get(case.name)
            rows.append(
                (
                    case.name + (" (set aside)" if i in found.contradicting else ""),
                    seconds_text(measured),
                    _off(before.get(quantity), measured),
                    _off(figures.get(quantity), measured),
                    "-" if out_of is None else f"{out_of.error:+.1%}",
                    "-" if out_of is None else _between(out_of),
                )
            )
    print_table((_title(quantity), "measured", "before", "fitted", "left out", "interval then"), rows)


def _print_parameters(posterior: Posterior) -> None:
    from sim.bench.overlay import TOLD
    from sim.bench.parameters import BY_NAME, PROMPTS, own_value

    rows = []
    for name in posterior.names:
        low, high = posterior.interval(name, 1.96)
        told = posterior.told(name)
        rows.append(
            (
                BY_NAME[name].title,
                _value(name, own_value(posterior.base, name)),
                _value(name, own_value(posterior.setting, name)),
                f"{_value(name, low)} to {_value(name, high)}",
                f"{told:.0%}",
                "by the runs" if told >= TOLD else "prior" if told < 0.1 else "both",
            )
        )
    print_table(("Parameter", "before", "fitted", "95 % interval", "told", "known"), rows, fold=1)
    if posterior.told(PROMPTS) < TOLD:
        typer.echo(
            f"The runs do not tell arithmetic with prompts from that of decodes: of what the two may differ by they took away "
            f"{posterior.told(PROMPTS):.0%}. Runs that differ in prompt tokens by output token do; rooftrace bench next names one."
        )


def _mean_errors(found: Fit, left_out: Sequence[Prediction]) -> Iterator[str]:
    from sim.bench.overlay import errors_of

    for quantity in _QUANTITIES:
        errors = errors_of(found, left_out, quantity).items()
        parts = [f"{error:.1%} {what.replace('_', ' ')}" for what, error in errors if error == error]
        if parts:
            yield f"{_title(quantity)} {', '.join(parts)}"


def _title(quantity: str) -> str:
    return quantity.removesuffix("_s").upper()


def _between(each: Prediction) -> str:
    return f"{seconds_text(each.low_s)} to {seconds_text(each.high_s)}"


def _off(predicted: float | None, measured: float) -> str:
    """The error in percent; a dash where the simulation has no such figure."""
    return "-" if predicted is None or predicted != predicted else f"{predicted / measured - 1:+.1%}"


def _value(name: str, value: float) -> str:
    from sim.bench.parameters import BY_NAME

    kind = BY_NAME[name].kind
    if kind == "time":
        return seconds_text(value) if value else "0"
    return f"{value:.3f}" if kind == "factor" else f"{value:+.1%}" if kind == "excess" else f"{value:.1%}"


def next_run(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML) whose workload is the question.")],
    ask: Annotated[str, typer.Option(help="Of which mean the answer is to be narrower: tpot or ttft.")] = "tpot",
    rate: Annotated[
        list[float] | None, typer.Option(help="A rate that could be run, in requests a second; repeatable.")
    ] = None,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="A length of prompts; repeatable.")] = None,
    output_tokens: Annotated[list[int] | None, typer.Option(help="A length of outputs; repeatable.")] = None,
    set_: Annotated[list[str] | None, set_option("Change a setting.")] = None,
    as_json: Json = False,
) -> None:
    """Name the run that would narrow the answer to a question most."""
    from sim.bench.next_run import advise
    from sim.cli.given import read_scenario

    if ask not in ("tpot", "ttft"):
        raise RooftraceError(f"--ask is tpot or ttft; got {ask}")
    for name, values in (("--rate", rate), ("--prompt-tokens", prompt_tokens), ("--output-tokens", output_tokens)):
        if any(not value > 0 for value in values or ()):
            raise RooftraceError(f"{name} is a number above 0; got {', '.join(map(str, values or ()))}")
    chosen = read_scenario(scenario, set_)
    rates, prompts, outputs = _grid(chosen, rate, prompt_tokens, output_tokens)
    found = advise(chosen, quantity=f"{ask}_s", rates=rates, prompts=prompts, outputs=outputs)
    if as_json:
        from dataclasses import asdict

        print_json(asdict(found))
        return

    rows = [
        (
            f"{each.rate_per_s:g}",
            f"{each.prompt_tokens:,}",
            f"{each.output_tokens:,}",
            f"± {each.half_width:.1%}" if each.half_width == each.half_width else "saturated",
        )
        for each in found.candidates[:12]
    ]
    print_table(("requests/s", "prompt tokens", "output tokens", f"{ask.upper()} then known to"), rows, left=0)
    best = found.best
    print_facts(
        [
            (f"{ask.upper()} now", f"{seconds_text(found.answer_s)} ± {found.half_width:.1%} by {found.basis}"),
            (
                "Run next",
                "none: the server could take none of these loads; give lower rates (--rate)"
                if best is None
                else f"{best.rate_per_s:g} requests/s, prompts of {best.prompt_tokens:,} tokens, outputs of {best.output_tokens:,}",
            ),
        ]
    )


def _grid(
    scenario: Any, rates: list[float] | None, prompts: list[int] | None, outputs: list[int] | None
) -> tuple[list[float], list[int], list[int]]:
    """The loads that may be run: those given, or around the scenario's own workload."""
    import numpy as np

    from sim.scenario.workload import workload_of
    from sim.study.rates import own_rate_per_s

    workload = workload_of(scenario)
    if rates is None:
        try:
            own = own_rate_per_s(scenario)
        except RooftraceError:
            raise RooftraceError("the scenario's workload has no rate to vary; give --rate, several of them") from None
        rates = [float(f"{own * share:.3g}") for share in (0.1, 0.5, 1.0, 1.5)]
    mean = {name: max(2, round(float(np.mean(getattr(workload, name))))) for name in ("prompt_tokens", "output_tokens")}
    prompts = prompts or [max(1, round(mean["prompt_tokens"] * share)) for share in (0.25, 1.0, 4.0)]
    outputs = outputs or [max(2, round(mean["output_tokens"] * share)) for share in (0.5, 1.0)]
    return rates, prompts, outputs
