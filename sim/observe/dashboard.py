"""A Grafana dashboard that lays predicted over observed, and the predicted figures as a server of metrics answers them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.observe.names import Maker, Name, makers
from sim.observe.replay import QUANTITIES
from sim.serve.prometheus import head, sample

if TYPE_CHECKING:
    from sim.observe.observation import Observation

_PANELS: Mapping[str, tuple[str, str, str, str]] = {
    "requests_per_s": ("Requests finished", "reqps", "counter", "finished"),
    "output_tokens_per_s": ("Output tokens", "short", "counter", "output_tokens"),
    "ttft_s": ("TTFT, mean", "s", "histogram", "ttft"),
    "itl_s": ("ITL, mean", "s", "histogram", "itl"),
    "running": ("Running requests", "short", "gauge", "running"),
    "in_flight": ("Requests in flight", "short", "gauge", "in_flight"),
    "waiting": ("Waiting requests", "short", "gauge", "waiting"),
    "kv_used": ("KV cache in use", "percentunit", "share", "kv_used"),
}
"""By quantity: title, unit of Grafana, and kind and quantity of the makers' names."""
_NAMES: Mapping[str, tuple[str, str]] = {
    "requests_per_s": ("requests_per_second", "Requests that end in a second"),
    "output_tokens_per_s": ("output_tokens_per_second", "Tokens emitted in a second"),
    "ttft_s": ("time_to_first_token_seconds", "Mean time to the first token"),
    "itl_s": ("inter_token_latency_seconds", "Mean time between tokens"),
    "running": ("requests_running", "Requests that run"),
    "in_flight": ("requests_in_flight", "Requests in flight"),
    "waiting": ("requests_waiting", "Requests that wait"),
    "kv_used": ("kv_cache_usage", "Share of the KV cache in use"),
}
_PREFIX = "rooftrace_predicted_"
_WIDE, _HIGH = 12, 8
_RATE = "$__rate_interval"


def predicted_name(quantity: str) -> str:
    """The metric under which a predicted quantity is served."""
    return _PREFIX + _NAMES[quantity][0]


def dashboard(
    found: Iterable[str], matching: Mapping[str, str], title: str = "Observed and predicted"
) -> dict[str, Any]:
    """A dashboard of Grafana with a panel for each quantity that a maker of *found* (titles) counts, observed and predicted.

    It has one variable, the Prometheus data source, which must scrape `observe --serve` as well.
    """
    titles = set(found)
    known = [maker for maker in makers().values() if maker.title in titles]
    panels = []
    for quantity, (name, unit, kind, counted) in _PANELS.items():
        expression = _expression(known, kind, counted, matching)
        if not expression:
            continue
        at = len(panels)
        panels.append(
            {
                "id": at + 1,
                "type": "timeseries",
                "title": name,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "gridPos": {"h": _HIGH, "w": _WIDE, "x": _WIDE * (at % 2), "y": _HIGH * (at // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": "AB"[i], "expr": text, "legendFormat": legend}
                    for i, (legend, text) in enumerate(
                        (("observed", expression), ("predicted", predicted_name(quantity)))
                    )
                ],
            }
        )
    return {
        "title": title,
        "uid": "rooftrace-observe",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "tags": ["rooftrace"],
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": panels,
    }


def _expression(known: Sequence[Maker], kind: str, counted: str, matching: Mapping[str, str]) -> str:
    """PromQL of the observed quantity; of several names that a maker has had, the one that is there. Empty where none has it."""
    table = "gauge" if kind == "share" else kind
    for maker in known:
        names = getattr(maker, table).get(counted, ())
        if names:
            return " or ".join(_of_name(kind, each, matching) for each in names)
    return ""


def _of_name(kind: str, name: Name, matching: Mapping[str, str]) -> str:
    labels = [f"{label}={json.dumps(value)}" for label, value in matching.items()]
    labels += [] if name.label is None else [f"{name.label}={json.dumps(name.value)}"]
    where = "{" + ",".join(labels) + "}" if labels else ""
    if kind == "counter":
        return f"sum(rate({name.metric}{where}[{_RATE}]))"
    if kind == "histogram":
        parts = (f"sum(rate({name.metric}_{part}{where}[{_RATE}]))" for part in ("sum", "count"))
        return "({} / {})".format(*parts)
    return f"{'avg' if kind == 'share' else 'sum'}({name.metric}{where})"


def exposition(found: Observation) -> str:
    """The predicted figures of the latest interval in Prometheus' text format, with the errors of all and what drifts."""
    lines: list[str] = []
    for quantity in QUANTITIES:
        values = found.beside.simulated[quantity]
        known = values[np.isfinite(values)]
        if known.size:
            name, text = predicted_name(quantity), _NAMES[quantity][1]
            lines += [*head(name, "gauge", f"{text}, simulated."), sample(name, {}, float(known[-1]))]
    error = "rooftrace_prediction_error"
    lines += head(
        error, "gauge", "Simulated over observed less 1 over the whole observation; of KV use the difference."
    )
    for quantity in QUANTITIES:
        whole = found.beside.whole(quantity)
        if whole is not None and (quantity == "kv_used" or whole[0] > 0):
            theirs, ours = whole
            apart = ours - theirs if quantity == "kv_used" else ours / theirs - 1.0
            lines.append(sample(error, {"quantity": _NAMES[quantity][0]}, apart))
    drift = "rooftrace_drift"
    lines += head(drift, "gauge", "1 for each change against the simulation, and for each candidate for its cause.")
    for change in found.changes:
        lines.append(sample(drift, {"kind": "change", "of": _NAMES[change.quantity][0], "instance": ""}, 1))
    for cause in found.causes:
        lines.append(sample(drift, {"kind": cause.kind, "of": "", "instance": cause.instance}, 1))
    stamp = "rooftrace_prediction_timestamp_seconds"
    lines += [*head(stamp, "gauge", "The end of what was observed."), sample(stamp, {}, float(found.edges_s[-1]))]
    return "\n".join(lines) + "\n"
