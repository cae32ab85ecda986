"""The requests of a scenario: read from a trace, or drawn, with its limit and rate scale applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import workloads
from sim.errors import ScenarioError
from sim.protocols import Protocol, protocol
from sim.scenario import keys, named
from sim.scenario.chosen import Process
from sim.scenario.explain import told_by
from sim.scenario.keys import BUILT_IN_TRACES, Workload
from sim.scenario.section import Policy
from sim.scenario.settings import Scenario
from sim.text import shown, unknown
from workloads import assign_models, azure_conversation_like, read_rates, read_sessions, read_trace
from workloads.loops import think_times_ns
from workloads.ticks import rounded, spread

if TYPE_CHECKING:
    from workloads import ClosedLoop, Trace

BUILT_IN_REQUESTS = 2500


def workload_of(scenario: Scenario) -> workloads.Workload:
    """The requests that *scenario* replays or generates, its limit and rate scale applied."""
    with told_by(scenario, "workload"):
        settings = scenario.workload
        made = _made(scenario, settings)
        if settings.limit is not None:
            made = made.limit(settings.limit)
        if settings.rate_scale != 1.0:
            if made.planned_ns is None:
                instead = "workload.arrivals.concurrency"
                if settings.shared_prefix is not None:
                    instead = "the stages' rates"
                elif settings.generator or settings.rollout:
                    instead = "a setting of the " + ("generator" if settings.generator else "rollout")
                raise ScenarioError(
                    "workload.rate_scale is for arrivals in time, and closed-loop clients have none; "
                    f"change {instead} instead"
                )
            made = made.scale_rate(settings.rate_scale)
        if settings.models is not None:
            made = assign_models(made, tuple(settings.models), list(settings.models.values()), scenario.seed)
        return made if settings.max_tokens is None else _allowing(made, settings.max_tokens)


def _made(scenario: Scenario, settings: Workload) -> workloads.Workload:
    """The requests of the source that *settings* give."""
    if settings.sessions is not None:
        return _sessions(scenario, settings)
    if settings.shared_prefix is not None:
        return settings.shared_prefix.requests(scenario.seed)
    if settings.conversations is not None:
        return _conversations(scenario, settings.conversations)
    if settings.servegen is not None:
        return _servegen(scenario, settings.servegen)
    if settings.rollout is not None:
        return _rollout(settings.rollout, settings, scenario.seed)
    if settings.generator is not None:
        return _own(settings.generator, scenario.seed)
    if settings.protocol is not None:
        return _by_protocol(settings, scenario.seed)
    source = _read(scenario, settings) if settings.trace is not None else None
    if source is not None and settings.arrivals is None:
        if settings.spread_arrivals:
            return spread(source, scenario.seed)
        note = rounded(source)
        return replace(source, notes=(*source.notes, note)) if note else source
    return _generate(scenario, source)


def _allowing(workload: workloads.Workload, max_tokens: int) -> workloads.Workload:
    """The same requests, each allowed *max_tokens* by its client."""
    if workload.max_tokens is not None:
        raise ScenarioError("workload.max_tokens: the trace has a column max_tokens; leave out one of them")
    longest = int(workload.output_tokens.max(initial=0))
    if max_tokens < longest:
        raise ScenarioError(f"workload.max_tokens is at least the longest output, {longest} tokens; got {max_tokens}")
    return replace(workload, max_tokens=np.full(len(workload), max_tokens, np.int64))


def mean_context(workload: workloads.Workload) -> int:
    """Tokens that a decode step of this workload attends to on average: steps weigh requests by their outputs. The mean prompt
    of a workload without outputs."""
    outputs = workload.output_tokens
    total = float(outputs.sum())
    if not total:
        return max(1, round(float(workload.prompt_tokens.mean()))) if len(outputs) else 1
    return max(1, round(float(((workload.prompt_tokens + 0.5 * outputs) * outputs).sum()) / total))


def _sessions(scenario: Scenario, settings: Workload) -> Trace:
    assert settings.sessions is not None
    file = scenario.find(settings.sessions)
    if file is None:
        raise ScenarioError(f"workload.sessions: {_missing(settings.sessions)}")

    return read_sessions(
        file, starts=_starts(scenario, settings), seed=scenario.seed, block_tokens=settings.block_tokens
    )


def _starts(scenario: Scenario, settings: Workload) -> Any:
    """The times at which sessions start."""
    assert settings.arrivals is not None
    starts = _process(scenario, settings.arrivals)
    if isinstance(starts, named.Clients):
        raise ScenarioError(
            "workload.arrivals says when sessions start, and each waits for its answers by itself; give arrivals in time"
        )
    return starts


def _conversations(scenario: Scenario, asked: keys.Conversations) -> Trace:
    given: dict[str, Any] = {name: getattr(asked, name) for name in type(asked).model_fields}
    for name in ("turns", "user_tokens", "answer_tokens"):
        given[name] = given[name].made(f"workload.conversations.{name}")
    return workloads.Conversations(**given).trace(_starts(scenario, scenario.workload), scenario.seed)


def _servegen(scenario: Scenario, settings: workloads.ServeGen) -> Trace:
    files = {
        name: _file(scenario, str(getattr(settings, name)), f"workload.servegen.{name}")
        for name in ("arrivals", "lengths")
    }
    return replace(settings, **files).trace(scenario.seed)


def _rollout(asked: workloads.Rollout, settings: Workload, seed: int) -> workloads.Workload:
    assert settings.prompt_tokens is not None
    assert settings.output_tokens is not None
    prompt = settings.prompt_tokens.made("workload.prompt_tokens")
    return asked.workload(prompt, settings.output_tokens.made("workload.output_tokens"), seed)


def _own(asked: Policy, seed: int) -> workloads.Workload:
    """The workload that a class or function makes of its settings, and of the seed where it takes one."""
    key, name = "workload.generator", asked.policy
    if ":" not in name:
        raise ScenarioError(f"{key} is package.module:Class, or a function there; got {shown(name)}")
    factory = named.imported(name, key=key)
    if not callable(factory):
        raise ScenarioError(f"{key}: {name} is {shown(factory)}, and neither a class nor a function")
    seeded = {"seed": seed} if "seed" in named.parameters(factory) else {}
    made = named.make(factory, {**seeded, **asked.settings}, key=key, name=name)
    if not isinstance(made, workloads.Workload):
        raise ScenarioError(f"{key}: {name} makes a Workload (`workloads.Workload`); got {shown(made)}")
    if not made.prompt_tokens.all():
        row = int(np.argmin(made.prompt_tokens))
        raise ScenarioError(
            f"{key}: {name} makes request {row} with a prompt of 0 tokens; every prompt has one at least"
        )
    return made


def _missing(name: str) -> str:
    """The error about *name* where no file is found."""
    if Path(name).is_dir():
        return f"{name} is a folder, and no file that could be read is in it; give a file"
    return f"{name} does not exist, neither beside the scenario nor in this folder"


def _file(scenario: Scenario, name: str, key: str) -> Any:
    file = scenario.find(name)
    if file is None:
        raise ScenarioError(f"{key}: {_missing(name)}")
    return file


def _by_protocol(settings: Workload, seed: int) -> workloads.Workload:
    assert settings.protocol is not None
    assert settings.concurrency is not None
    lengths = {}
    for name in ("prompt_tokens", "output_tokens"):
        lengths[name] = getattr(settings, name).made(f"workload.{name}").tokens
    return _protocol_of(settings.protocol).workload(concurrency=settings.concurrency, seed=seed, **lengths)


def _protocol_of(given: str | dict[str, Any]) -> Protocol:
    """The protocol by its name or keys, each of the type that it has in `Protocol`."""
    if isinstance(given, str):
        return protocol(given)
    kinds = {name: kind for name, (kind, _) in named.parameters(Protocol).items()} | {"like": str}
    return protocol(
        {
            key: named.checked(value, kinds[key], f"workload.protocol.{key}") if key in kinds else value
            for key, value in given.items()
        }
    )


def _process(scenario: Scenario, arrivals: Process) -> Any:
    settings = arrivals.settings
    if arrivals.process == "piecewise" and "file" in settings:
        if both := sorted({"rates_per_s", "window_s"} & set(settings)):
            raise ScenarioError(f"workload.arrivals: file says {both[0]} too; leave out one of them")
        if not isinstance(settings["file"], str):
            raise ScenarioError(f"workload.arrivals.file is the path of a file; got {shown(settings['file'])}")
        file = _file(scenario, settings["file"], "workload.arrivals.file")
        settings = {key: value for key, value in settings.items() if key != "file"} | read_rates(file)
    also = ("file",) if arrivals.process == "piecewise" else ()
    return arrivals.made("workload.arrivals", settings, also)


def _read(scenario: Scenario, settings: Workload) -> Trace:
    name = settings.trace
    assert name is not None
    if name in BUILT_IN_TRACES:
        if asked := settings.about_files():
            raise ScenarioError(f"workload.{next(iter(asked))} is about reading a file, and {name!r} is built in")
        return azure_conversation_like(settings.requests or BUILT_IN_REQUESTS, scenario.seed)
    file, files = scenario.trace_files(name)
    if not files:
        if not set("/.*") & set(name) and not Path(name).is_dir():
            raise ScenarioError(
                unknown(f"workload.trace {name!r} is neither a file nor built in", name, BUILT_IN_TRACES)
            )
        raise ScenarioError(f"workload.trace: {_missing(name)}")
    if settings.requests is not None and settings.arrivals is None:
        raise ScenarioError("workload.requests is for generated workloads; use workload.limit to shorten a trace")

    # Arrivals that are drawn have as many lengths as there are to be had.
    limit = settings.limit if settings.arrivals is None else settings.requests
    tokenizer = None if settings.tokenizer is None else _file(scenario, settings.tokenizer, "workload.tokenizer")
    return read_trace(
        file,
        settings.format,
        limit=limit,
        sort=settings.sort,
        drop_empty=settings.drop_empty,
        columns=settings.columns,
        missing_output=settings.missing_output,
        keep_failed=settings.keep_failed,
        tokenizer=tokenizer,
        timed=settings.arrivals is None or settings.since is not None or settings.until is not None,
        seed=scenario.seed,
        since=settings.since,
        until=settings.until,
        component_order=settings.component_order,
    )


def _generate(scenario: Scenario, lengths: Trace | None) -> workloads.Workload:
    settings, seed = scenario.workload, scenario.seed
    assert settings.arrivals is not None
    process = _process(scenario, settings.arrivals)
    if lengths is not None:
        if settings.requests is not None and settings.requests > len(lengths):
            raise ScenarioError(f"workload.requests is {settings.requests}, but the trace has only {len(lengths)}")
        lengths = lengths if settings.requests is None else lengths.limit(settings.requests)
        if isinstance(process, named.Clients):
            return _closed_loop_of(lengths, process, seed)
        return replace(
            lengths,
            arrival_ns=workloads.arrivals_ns(process, seed, n_requests=len(lengths)),
            source=f"lengths of {lengths.source}, arrivals {process!r}, seed {seed}",
        )
    prompt, output = (
        distribution.made(f"workload.{key}")
        for key, distribution in (("prompt_tokens", settings.prompt_tokens), ("output_tokens", settings.output_tokens))
        if distribution is not None
    )
    if isinstance(process, named.Clients):
        assert settings.requests is not None
        return workloads.closed_loop(
            n_requests=settings.requests,
            concurrency=process.concurrency,
            prompt=prompt,
            output=output,
            seed=seed,
            mean_think_s=process.mean_think_s,
        )
    return workloads.synthesize(
        arrivals=process,
        prompt=prompt,
        output=output,
        n_requests=settings.requests,
        duration_s=settings.duration_s,
        seed=seed,
    )


def _closed_loop_of(lengths: Trace, clients: named.Clients, seed: int) -> ClosedLoop:
    for name in ("priority", "abort_ns"):
        if getattr(lengths, name) is not None:
            column = name.replace("_ns", "_s")
            raise ScenarioError(
                f"workload.arrivals: closed-loop clients take the lengths of a trace, and their requests have no {column}; leave "
                f"the column {column} out of the trace or take other arrivals"
            )
    return workloads.ClosedLoop(
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
        concurrency=clients.concurrency,
        think_ns=think_times_ns(len(lengths), clients.mean_think_s, seed),
        deadline_ns=lengths.deadline_ns,
        max_tokens=lengths.max_tokens,
        notes=(*lengths.notes, *_left_out(lengths)),
        source=f"closed loop of {clients.concurrency} clients, lengths of {lengths.source}, seed {seed}",
    )


def _left_out(lengths: Trace) -> Iterator[str]:
    """A note on what a trace says of its requests that closed-loop clients do not take over."""
    facts = {
        "which model a request asks for": len(lengths.models) > 1,
        "which requests belong to one conversation": lengths.session is not None,
        "which prompts share a beginning": lengths.prefix_blocks is not None,
        "which requests wait for others": lengths.follows is not None,
    }
    if any(facts.values()):
        yield f"Closed-loop clients leave out what the trace says of {', '.join(fact for fact in facts if facts[fact])}."
