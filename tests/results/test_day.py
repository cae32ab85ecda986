"""The picture of a day: what its panels show is what the summary says."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sim import Scenario, simulate
from sim.plots.fleet import fleet_figure
from sim.plots.runs import timeline_figure
from sim.results.costs import usd_per_machine_hour

SETTINGS: dict[str, Any] = {
    "scheduler": "vllm",
    "router": "least_outstanding",
    "autoscale": {
        "policy": {"policy": "schedule", "at_s": [0, 20], "machines": [1, 3]},
        "min": 1,
        "max": 3,
        "start": {"load": 5},
    },
    "failures": {"times": [{"machine": 0, "at_s": 12, "for_s": 3}]},
    "classes": {"chat": {"share": 1, "slo": {"ttft_s": 0.5}}, "batch": {"share": 1}},
    "costs": {"usd_per_device_hour": 2.0},
    "workload": {"trace": "conversation", "limit": 200},
}


def axes_of(**over: Any) -> tuple[Any, dict[str, Any]]:
    result = simulate(Scenario.from_mapping({**SETTINGS, **over})).kept()
    figure = fleet_figure(
        requests=result.columns.requests,
        fleet=result.columns.meta["fleet"],
        last_end_ns=-1,
        ttft_limit_s=None,
        title="",
        classes=result.manifest.get("classes") or (),
        usd_per_hour=usd_per_machine_hour(result.columns, result.manifest),
    )
    return figure.axes, result.summary


def test_the_money_panel_ends_at_what_the_run_cost_and_never_falls() -> None:
    axes, summary = axes_of()
    assert [ax.get_ylabel() for ax in axes] == ["requests/s", "machines", "TTFT, s", "$ spent"]
    seconds, spent = (np.asarray(values) for values in axes[3].lines[0].get_data())
    assert spent[-1] == pytest.approx(summary["costs"]["usd"], rel=1e-6)
    assert (np.diff(spent) >= 0).all()
    # One machine at 2 $ an hour until the two others start.
    early = seconds <= 19
    np.testing.assert_allclose(spent[early], 2.0 * seconds[early] / 3600, rtol=1e-9)


def test_each_class_has_its_line_and_its_limit() -> None:
    axes, _ = axes_of()
    labels = [text.get_text() for text in axes[2].get_legend().get_texts()]
    assert labels == ["chat, p95", "batch, p95", "limit of the class"]
    limits = [line.get_ydata()[0] for line in axes[2].lines if len(line.get_ydata())]
    assert limits == [0.5]


def test_where_no_price_is_known_there_is_no_panel_of_money() -> None:
    result = simulate(Scenario.from_mapping(SETTINGS))
    facts = {**result.manifest, "hardware": {**result.manifest["hardware"], "price_usd_per_hour": None}}
    facts["scenario"] = {**facts["scenario"], "costs": None}
    assert usd_per_machine_hour(result.columns, facts) is None


def test_memory_is_of_the_machines_that_are_there() -> None:
    # One machine of up to eight: what it has in use is not spread over seven that are off.
    alone = {**SETTINGS["autoscale"], "policy": {"policy": "schedule", "at_s": [0], "machines": [1]}, "max": 8}
    result = simulate(Scenario.from_mapping({**SETTINGS, "autoscale": alone, "failures": None})).kept()
    assert result.label == "llama-3.1-8b on 1 to 8 x h100-sxm, vllm"
    columns = result.columns
    figure = timeline_figure(
        requests=columns.requests,
        iterations=columns.iteration_blocks,
        last_end_ns=-1,
        kv_blocks_total=columns.meta["kv_blocks_total"],
        fleet=columns.meta["fleet"],
        title="",
    )
    (ax,) = (ax for ax in figure.axes if ax.get_ylabel() == "KV blocks used, %")
    drawn: Any = ax.patches[0]
    share = drawn.get_data().values
    assert np.mean(share) == pytest.approx(100 * result.summary["kv_utilization"]["mean"], rel=1e-6)


def test_machines_by_state_lie_on_one_another_and_add_up_to_what_is_paid() -> None:
    axes, summary = axes_of()
    stacked: list[Any] = list(axes[1].patches)
    assert len(stacked) >= 3
    for lower, upper in itertools.pairwise(stacked):
        np.testing.assert_array_equal(upper.get_data().baseline, lower.get_data().values)
    top = stacked[-1].get_data()
    assert (top.values * np.diff(top.edges)).sum() / 3600 == pytest.approx(summary["fleet"]["machine_hours"], rel=1e-6)
