"""A run as the page shows it: figures, how far to trust them, its course, distributions, and commands to copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.errors import RooftraceError
from sim.launch import export
from sim.launch.chosen import Chosen
from sim.plots.over_time import over_time
from sim.results import Result
from sim.results.trust import interval_text, trust_text
from sim.scenario import Scenario
from sim.study.advise import assignments, command
from sim.study.rates import target_of

BINS = 240
_SHARES = np.concatenate([np.linspace(0.0, 0.98, 99), np.linspace(0.981, 1.0, 20)])
_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2el_s"}
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_OTHERS = {
    "requests_per_s": ("requests_per_s", "requests/s"),
    "output_tokens_per_s": ("output_tokens_per_s", "tokens/s"),
    "goodput_per_s": ("goodput_requests_per_s", "requests/s"),
    "slo_share": ("slo_attainment", "share"),
    "kv_used_share": ("kv_utilization.mean", "share"),
    "kv_used_max_share": ("kv_utilization.max", "share"),
    "prefix_hit_share": ("prefix_cache.hit_rate", "share"),
    "preemptions": ("preemptions", ""),
    "cost_per_hour": ("costs.usd_per_hour", "$/h"),
    "cost_per_mtoken": ("costs.usd_per_m_output", "$ per M output tokens"),
    "joule_per_token": ("costs.joule_per_output_token", "J per output token"),
}
"""Names of figures on the page: where a summary has them, and their units."""


def at(summary: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted *name*; None where the summary has none."""
    found: Any = summary
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def figures(summary: Mapping[str, Any], devices: int) -> dict[str, dict[str, Any]]:
    """Those figures of a run on so many *devices* that it has, by their names on the page, with the intervals of its summary."""
    around = summary.get("intervals", {}).get("figures", {})
    found: dict[str, dict[str, Any]] = {}

    def put(name: str, value: Any, unit: str, dotted: str = "") -> None:
        if value is not None and not isinstance(value, bool) and np.isfinite(value):
            ends = around.get(dotted, {})
            found[name] = {"value": value, **{end: ends[end] for end in ("low", "high") if end in ends}, "unit": unit}

    for name, measure in _LATENCIES.items():
        for statistic in _STATISTICS:
            dotted = f"{measure}.{statistic}"
            put(f"{name}_{statistic}_s", at(summary, dotted), "s", dotted)
    for name, (dotted, unit) in _OTHERS.items():
        put(name, at(summary, dotted), unit, dotted)
    put("devices", devices, "devices")
    tokens, median = at(summary, "output_tokens_per_s"), at(summary, "tpot_s.p50")
    put("output_tokens_per_s_per_device", None if tokens is None else tokens / devices, "tokens/s per device")
    put("output_tokens_per_s_per_user", 1.0 / median if median else None, "tokens/s per user")
    return found


def kept(scenario: Scenario, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether a run keeps the limits of *scenario*, and the first that it misses in words; None without limits."""
    if not scenario.has_limits:
        return None
    miss = target_of(scenario).miss(summary)
    return {"kept": miss is None, "why": miss or "within all limits"}


def series(result: Result) -> dict[str, list[float | None]]:
    """The course of a run as means over `BINS` equal intervals."""
    columns = result.columns
    found = over_time(
        columns.requests,
        columns.iteration_blocks,
        last_end_ns=metrics.last_iteration_end_ns(columns),
        kv_blocks_total=columns.meta["kv_blocks_total"],
        fleet=columns.meta.get("fleet"),
        bins=BINS,
    )
    levels = {
        "time_s": found.edges_s[:-1],
        "queued": found.waiting,
        "running": found.running,
        "kv_used_share": found.kv_share,
        "prompt_tokens_per_s": found.prompt_tokens_per_s,
        "output_tokens_per_s": found.output_tokens_per_s,
        "prefix_hit_share": found.prefix_share,
        "machines": found.replicas,
    }
    return {name: _rounded(each) for name, each in levels.items() if each is not None}


def distributions(result: Result) -> dict[str, dict[str, list[float | None]]]:
    """The latencies below which each share of the requests of a summary lies."""
    inside = result.in_window
    measures = {"ttft_s": metrics.ttft_s, "tpot_s": metrics.tpot_s, "e2e_s": metrics.e2el_s}
    found = {}
    for name, measure in measures.items():
        values = measure(result.columns.requests)[inside]
        values = values[np.isfinite(values)]
        if values.size:
            found[name] = {"x": _rounded(np.quantile(values, _SHARES)), "share": _rounded(_SHARES)}
    return found


def _rounded(values: NDArray[Any]) -> list[float | None]:
    """Six digits, more than a picture shows; None where there is no value."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def trust(summary: Mapping[str, Any], manifest: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How far to trust a run: its tier, the sentences of its summary, and with its *manifest* the sources of what went in."""
    found = summary.get("trust") or {}
    several = {"": found} if "tier" in found else found
    tiers = dict.fromkeys(each["tier"] for each in several.values())
    sentences = [f"{name}: {trust_text(each)}" if name else trust_text(each) for name, each in several.items()]
    if "intervals" in summary:
        expected = "" if "why_not" in summary["intervals"] else "expect to measure "
        sentences.append(f"{expected}{interval_text(summary['intervals'])}")
    return {
        "tier": "; ".join(tiers) or "not known",
        "sentence": "; ".join(sentences),
        "sources": [] if manifest is None else list(_sources(manifest)),
    }


_UNITS = (
    ("bytes_per_s", "bytes/s"), ("flops_per_s", "FLOP/s"), ("usd_per_hour", "$/h"), ("_bytes", "bytes"), ("_s", "s"),
    ("_w", "W"), ("_hz", "Hz"), ("peak.", "FLOP/s"),
)  # fmt: skip
_KINDS = (
    ("assumed", ("assumption", "assumed", "usual server")),
    ("fitted", ("fitted",)),
    ("measured", ("measured", "nvidia-smi")),
    ("borrowed", ("borrowed", "lent")),
)
_DATE = re.compile(r"\b(20\d\d(?:-\d\d){0,2})\b")


def _sources(manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for whose, hardware, model in _parts(manifest):
        prefix = f"{whose}: " if whose else ""
        yield _source(
            f"{prefix}model {model.get('name', '')}", model.get("params"), "parameters", model.get("source", "")
        )
        fitted_on = ", ".join(hardware.get("fitted_on", ()))
        for kind in ("measured", "borrowed"):
            if f"{kind}_kernels" in hardware:
                text = f"{kind} kernels of profile {hardware['profile']}, {hardware.get('calibration', '')}"
                row = _source(f"{prefix}kernels", hardware[f"{kind}_kernels"], "sets", text)
                yield {**row, "kind": kind, **({"date": fitted_on} if fitted_on else {})}
        stack = hardware.get("serving_stack", {})
        for name, source in stack.get("sources", {}).items():
            value = stack.get("terms", {}).get(name)
            yield _source(f"{prefix}{stack.get('name', 'stack')} {name}", value, _unit(name), source)
        for name, source in hardware.get("sources", {}).items():
            yield _source(
                f"{prefix}{hardware.get('name', '')} {name}", _device_value(hardware, name), _unit(name), source
            )


def _parts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    if "hardware" in manifest:
        yield "", manifest["hardware"], manifest.get("model", {})
    for name, pool in manifest.get("pools", {}).items():
        models = pool.get("models") or [{}]
        yield name, pool["hardware"], models[0].get("model", {}) if isinstance(models[0], Mapping) else {}


def _device_value(hardware: Mapping[str, Any], name: str) -> Any:
    first, _, rest = name.partition(".")
    return hardware.get("peak_flops_per_s", {}).get(rest) if first == "peak" else hardware.get(name)


def _unit(name: str) -> str:
    return next((unit for part, unit in _UNITS if part in name), "")


def _source(name: str, value: Any, unit: str, source: str) -> dict[str, Any]:
    kind = next((kind for kind, words in _KINDS if any(word in source for word in words)), "datasheet")
    date = _DATE.search(source)
    return {
        "name": name.strip(),
        "value": value,
        **({"unit": unit} if unit else {}),
        "source": source,
        "kind": kind,
        **({"date": date[1]} if date else {}),
    }


def commands(
    scenario: Scenario, opened: tuple[str | None, Sequence[str]], settings: Mapping[str, Any]
) -> dict[str, str]:
    """Ways to start the same elsewhere: the scenario as a file, the command that runs it, and the commands of its servers.
    *opened*: the file and the settings that the page was opened with, over which *settings* were changed."""
    file, given = opened
    found = {"scenario": scenario.to_yaml(), "run": command(file or "", [*given, *assignments(settings)])}
    for name, target in (("server", scenario.stack_name), ("manifest", "kubernetes")):
        try:
            written = export(Chosen(scenario=scenario, reasons=()), target)
        except (
            RooftraceError,
            ValueError,
        ):  # a server that Rooftrace cannot start, such as an ideal one, has no command
            continue
        found[name] = written.text + "".join(f"# not carried over: {text}\n" for text in written.left_out)
    return found


def answer(
    key: str, scenario: Scenario, record: Mapping[str, Any], *, kind: str, how: str, said: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer from the *record* of a run, as the sweep stores it. *said*: `commands` of it, and what only the run itself has
    (`course`)."""
    summary = record["summary"]
    return {
        "key": key,
        "kind": kind,
        "how": how,
        "label": record["label"],
        "requests": summary["requests"]["total"],
        "finished": summary["requests"]["finished"],
        "saturated": summary["saturated"],
        "figures": figures(summary, record["gpus"]),
        "slo": kept(scenario, summary),
        "trust": trust(summary),
        "notes": list(record["notes"]),
        **said,
    }


def course(result: Result) -> dict[str, Any]:
    """The parts of an answer that only the run itself has."""
    return {
        "series": series(result),
        "distributions": distributions(result),
        "trust": trust(result.summary, result.manifest),
    }


def rows(result: Result, most: int) -> dict[str, Any]:
    """Columns of requests, *most* of them at most, evenly over the run: their times, lengths and latencies."""
    requests = result.columns.requests
    n = len(requests["arrival_ns"])
    chosen = np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))
    begin = metrics.first_arrival_ns(requests)
    found: dict[str, Sequence[Any]] = {
        "request": chosen.tolist(),
        "arrival_s": _rounded((requests["arrival_ns"][chosen] - begin) * 1e-9),
        "prompt_tokens": requests["prompt_tokens"][chosen].tolist(),
        "output_tokens": requests["output_tokens"][chosen].tolist(),
        "machine": requests["replica"][chosen].tolist(),
        "preemptions": requests["preemptions"][chosen].tolist(),
        "status": [metrics.STATUS_NAMES[code] for code in requests["status"][chosen].tolist()],
    }
    measures = {
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s,
        "e2e_s": metrics.e2el_s,
        "queued_s": metrics.queue_s,
    }
    if "prefix_hit_tokens" in requests:
        found["cached_tokens"] = requests["prefix_hit_tokens"][chosen].tolist()
    limits = {f"{name}_limit_s": result.slo.get(f"{name}_s") for name in ("ttft", "tpot", "e2el")}
    if any(limits.values()) and not result.manifest.get("classes"):
        found["slo_met"] = metrics.slo_met(requests, **limits)[chosen].tolist()
    return {"of": n, "columns": {**found, **{name: _rounded(of(requests)[chosen]) for name, of in measures.items()}}}
