"""rooftrace capacity: sequences that fit in memory, or requests a second within an SLO."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sim.cli.exports import takes_export
from sim.cli.options import Json, Limits, ScenarioFile, set_option
from sim.cli.tables import print_facts, print_json, print_notes, print_table
from sim.errors import RooftraceError


def register(app: typer.Typer) -> None:
    app.command()(takes_export(capacity))


def capacity(
    scenario: ScenarioFile = None,
    set_: Annotated[list[str] | None, set_option("Change a setting, as in rooftrace run.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", help="Sequence length, prompt and output; may be repeated.")
    ] = None,
    reserve_gb: Annotated[
        float | None,
        typer.Option(
            help="GB of each device kept for activations and workspace; default what memory.* leaves out.",
            show_default=False,
        ),
    ] = None,
    slo: Annotated[
        bool,
        typer.Option("--slo", help="Search the highest request rate within the limits, as options of the search do."),
    ] = False,
    limit: Limits = None,
    tbt_p99: Annotated[
        float | None, typer.Option(help="Seconds that 99 % of gaps between tokens must keep to.")
    ] = None,
    queue_p50: Annotated[
        float | None,
        typer.Option(help="Median seconds a request may wait to start; default 2.", show_default=False),
    ] = None,
    attainment: Annotated[
        float | None, typer.Option(help="Share of requests that must meet the scenario's slo.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Width of the answer, as a share of it; default 0.02.", show_default=False),
    ] = None,
    replications: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs of each rate, judged together as by rooftrace optimize; default 1.",
            show_default=False,
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Explain the batch sizes that the SARATHI paper states.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say how many sequences fit in memory, or with --slo or a --limit how many requests a second are served within limits."""
    from sim.cli.given import read_scenario, with_limits

    planning = {"--tokens": tokens, "--reserve-gb": reserve_gb}
    searching = {
        "--limit": limit,
        "--tbt-p99": tbt_p99,
        "--queue-p50": queue_p50,
        "--attainment": attainment,
        "--tolerance": tolerance,
        "--replications": replications,
    }
    if published:
        given = {"a scenario": scenario, "--set": set_, "--slo": slo or None, **planning, **searching}
        _refuse(given, "--published explains fixed cases and takes neither a scenario nor other options")
        _explain(as_json)
        return

    chosen = read_scenario(scenario, set_)
    if slo or any(value is not None for value in searching.values()):
        _refuse(planning, "a rate is searched with the memory.* of the scenario")
        _search(
            with_limits(chosen, limit),
            tbt_p99,
            2.0 if queue_p50 is None else queue_p50,
            attainment,
            0.02 if tolerance is None else tolerance,
            replications or 1,
            as_json,
        )
        return
    _plan(chosen, tokens or [1024, 2048, 4096], reserve_gb, as_json)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise RooftraceError(f"{given[0]} does not apply: {why}")


def _plan(scenario: Any, lengths: list[int], reserve_gb: float | None, as_json: bool) -> None:
    from hwmodels.memory import cache_text, parts_text
    from sim.scenario.assembly import deployment_of
    from sim.scenario.assembly.memory import memory_plan_of
    from sim.study.memory import batch_plan, deployment_plan

    if min(lengths) < 1:
        raise RooftraceError(f"--tokens is a whole number, 1 or more; got {min(lengths)}")
    memory = None
    if reserve_gb is None:
        deployment, memory = memory_plan_of(scenario)
        stage = memory.tightest
        settings = {
            "memory_bytes": stage.device_bytes,
            "weight_bytes": stage.weight_bytes,
            "reserve_bytes": stage.device_bytes - stage.weight_bytes - memory.facts["kv_bytes"],
            "kv_bytes_per_token": stage.block_bytes / memory.block_tokens,
        }
        why = "what the share leaves out and the stack sets aside"
    else:
        deployment = deployment_of(scenario)
        settings, why = {}, "--reserve-gb"
        if not 0 <= reserve_gb * 1e9 < float("inf"):
            raise RooftraceError(f"--reserve-gb is a finite number of at least 0; got {reserve_gb}")
    try:
        if memory is not None:
            plans = [batch_plan(sequence_tokens=length, **settings) for length in lengths]
        else:
            assert reserve_gb is not None
            plans = [deployment_plan(deployment, length, reserve_bytes=reserve_gb * 1e9) for length in lengths]
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    first = plans[0]
    if as_json:
        facts = {
            "model": deployment.model.name,
            "hardware": deployment.device.name,
            "devices": deployment.parallel.n_devices,
            "memory_bytes": first.memory_bytes,
            "weight_bytes": first.weight_bytes,
            "reserve_bytes": first.reserve_bytes,
            "pool_bytes": first.pool_bytes,
            "kv_bytes_per_token": first.kv_bytes_per_token,
            "sequences": {str(plan.sequence_tokens): plan.sequences for plan in plans},
        }
        if memory is not None:
            facts["memory"] = memory.facts
        print_json(facts)
        return

    rows = [
        ("Deployment", f"{deployment.model.name} on {deployment.parallel.n_devices} x {deployment.device.name}"),
        ("Memory", f"{first.memory_bytes / 1e9:,.2f} GB a device (M_G)"),
        ("Weights", f"{first.weight_bytes / 1e9:,.2f} GB on the fullest (M_S)"),
        ("Reserve", f"{first.reserve_bytes / 1e9:,.2f} GB, from {why}"),
        ("KV pool", f"{first.pool_bytes / 1e9:,.2f} GB"),
        ("KV cache", f"{first.kv_bytes_per_token:,.0f} bytes a token and device (L m_kv / L)"),
    ]
    if memory is not None:
        rows += [("As in its log", cache_text(memory.facts)), ("Of which", parts_text(memory.facts))]
    print_facts(rows)
    print_table(
        ("tokens a sequence", "sequences"),
        [(f"{plan.sequence_tokens:,}", f"{plan.sequences:,}") for plan in plans],
        left=0,
    )


def _search(
    scenario: Any,
    tbt_p99: float | None,
    queue_p50: float,
    attainment: float | None,
    tolerance: float,
    replications: int,
    as_json: bool,
) -> None:
    from sim.study.rates import ATTAINMENT, Target, highest_rate

    if not 0 < tolerance < 1:
        raise RooftraceError(f"--tolerance is a share in (0, 1); got {tolerance}")
    if attainment is None and tbt_p99 is None:
        if not scenario.has_limits:
            raise RooftraceError("--slo needs limits: give --limit or --tbt-p99, or slo settings in the scenario")
        attainment = ATTAINMENT if scenario.has_request_limits else None
    for name, value in (("--tbt-p99", tbt_p99), ("--queue-p50", queue_p50)):
        if value is not None and not 0 < value < float("inf"):
            raise RooftraceError(f"{name} is a finite number of seconds above 0; got {value}")
    if attainment is not None and not 0 < attainment <= 1:
        raise RooftraceError(f"--attainment is a share above 0 and at most 1; got {attainment}")
    of_all = {key: limit_s for slo in scenario.slos for key, limit_s in slo.of_all.items()}
    target = Target(attainment=attainment, tbt_p99_s=tbt_p99, queue_p50_s=queue_p50, all_finish=True)
    found = highest_rate(scenario, target, replications=replications, tolerance=tolerance)
    print_notes(found.notes)
    if as_json:
        print_json(
            {
                "rate_per_s": found.rate_per_s,
                "outside_per_s": found.outside_per_s,
                "limits": {"tbt_p99_s": tbt_p99, "queue_p50_s": queue_p50, "attainment": attainment, **of_all},
                "probes": [{"rate_per_s": each.rate_per_s, "miss": each.miss} for each in found.judgements],
            }
        )
        return
    from sim.results.words import limits_text

    tried = sorted(found.judgements, key=lambda each: each.rate_per_s)
    rows = [(f"{each.rate_per_s:.4g}", each.why) for each in tried]
    print_table(("requests/s", "limits"), rows, left=0, fold=1)
    within = [f"median delay at most {queue_p50:g} s"]
    if tbt_p99 is not None:
        within.append(f"p99 gap between tokens at most {tbt_p99:g} s")
    within += [limits_text(of_all)] if of_all else []
    if attainment is not None:
        within.append(f"{attainment:.4g} of requests within the scenario's slo")
    within += ["every request finished", "no growing queue"]
    print_facts(
        [
            ("Limits", ", ".join(within)),
            ("Capacity", f"{found.rate_per_s:.4g} requests/s" if found.rate_per_s else "no rate tried is within"),
            ("Outside", f"{found.outside_per_s:.4g} requests/s"),
        ]
    )


def _explain(as_json: bool) -> None:
    """The paper's stated batches against its formula, and the reserve that would explain them."""
    from sim.reproduce.sarathi import stated_batches

    cases = stated_batches()
    if as_json:
        print_json(cases)
        return

    rows = []
    for case in cases:
        for batch in case["batches"]:
            rows.append(
                (
                    case["model"],
                    f"{batch['tokens']:,}",
                    str(batch["formula"]),
                    str(batch["stated"]),
                    f"{batch['pool_gb'][0]:.2f} to {batch['pool_gb'][1]:.2f}",
                    f"{case['free_gb']:.2f}",
                )
            )
    heads = ("model", "tokens", "formula", "stated", "pool that the stated batch needs, GB", "M_G - M_S, GB")
    print_table(heads, rows, title="B = floor((M_G - M_S) / (L m_kv)), SARATHI section 4.3.1, no reserve")
    for case in cases:
        typer.echo(f"{case['model']}: {case['verdict']}")
