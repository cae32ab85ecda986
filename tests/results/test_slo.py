"""Limits of means and percentiles: in the summary, in tables, in reports, in sweeps and in searches."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sim import RooftraceError, Scenario, ScenarioError, simulate, sweep
from sim.cli import build_app
from sim.cli.given import with_limits
from sim.report.html import write_run_report
from sim.results import fact_rows
from sim.scenario.keys import SLO_MEASURES, SLO_STATISTICS
from sim.scenario.schema import json_schema

BASE = Scenario.default().with_set(
    "workload={arrivals: {process: poisson, rate_per_s: 20}, prompt_tokens: 600, output_tokens: 60, requests: 80}",
    "slo={}",
)
LIMITS = [f"{measure}_{statistic}_s" for measure in SLO_MEASURES for statistic in SLO_STATISTICS]


def test_every_measure_and_statistic_is_held_to_its_limit_at_the_bound_and_below_it():
    free = simulate(BASE).summary
    assert "slo" not in free
    assert "slo_kept" not in free
    values = {key: free[f"{key.split('_')[0]}_s"][key.split("_")[1]] for key in LIMITS}
    at = simulate(BASE.with_value("slo", values)).summary
    assert at["slo"] == {key: {"limit_s": value, "value_s": value, "kept": True} for key, value in values.items()}
    assert at["slo_kept"] is True
    below = simulate(BASE.with_value("slo", {key: value * (1 - 1e-12) for key, value in values.items()})).summary
    assert not any(limit["kept"] for limit in below["slo"].values())
    assert below["slo_kept"] is False
    # Nothing else of the run is touched, and no share of requests is made of limits that no single request has.
    assert at["slo_attainment"] is None
    assert {key: value for key, value in at.items() if key not in ("slo", "slo_kept", "wall_s")} == {
        key: value for key, value in free.items() if key != "wall_s"
    }


def test_a_class_is_held_to_its_own_percentiles_and_the_run_to_all_of_them():
    classes = {"chat": {"share": 1, "slo": {"ttft_p95_s": 1e-9, "ttft_s": 9.0}}, "batch": {"share": 1}}
    result = simulate(BASE.with_values({"classes": classes, "slo": {"ttft_p95_s": 9.0}}))
    found = result.summary
    chat = result.columns.requests["class_index"] == list(found["classes"]).index("chat")
    assert found["classes"]["chat"]["slo"]["ttft_p95_s"]["value_s"] == np.quantile(
        result.requests["ttft_s"][chat], 0.95
    )
    assert "slo" not in found["classes"]["batch"]
    assert found["slo"]["ttft_p95_s"]["kept"]
    assert found["slo_kept"] is False
    assert dict(fact_rows(found))["SLO of chat"].endswith("above 0.001 µs")


def test_percentiles_are_of_the_requests_of_the_window():
    found = simulate(BASE.with_set("window={from_s: 1, to_s: 3}", "slo.ttft_p95_s=1")).summary
    assert found["slo"]["ttft_p95_s"]["value_s"] == found["ttft_s"]["p95"]
    assert found["window"]["requests"] < 80


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ttft_p96_s", "ttft_p95_s"),
        ("itl_p999_s", "itl_p99_s"),
        ("e2el_p75", "e2el_p90_s"),
        ("tpot_p5_s", "tpot_p50_s"),
        ("tpot_median_s", "tpot_mean_s"),
        ("ttfs_p95_s", "ttft_p95_s"),
    ],
)
def test_an_unknown_percentile_is_refused_with_the_nearest(key, meant):
    with pytest.raises(ScenarioError, match=f"slo: {key} is not a limit; did you mean {meant}"):
        BASE.with_value(f"slo.{key}", 1.0)


def test_a_limit_is_a_number_above_0_and_of_gaps_only_for_all_requests():
    with pytest.raises(ScenarioError, match=r"slo\.ttft_p95_s is a number above 0; got -1"):
        BASE.with_set("slo.ttft_p95_s=-1")
    with pytest.raises(ScenarioError, match="give itl_p99_s at the top level"):
        BASE.with_set("classes={a: {share: 1, slo: {itl_p99_s: 0.1}}}")


def test_the_schema_has_every_limit_and_no_other():
    limits = json_schema()["$defs"]["Slo"]
    (pattern,) = limits["patternProperties"]
    import re

    assert all(re.search(pattern, key) for key in LIMITS)
    assert not re.search(pattern, "ttft_p96_s")
    assert limits["additionalProperties"] is False


def test_the_report_and_the_table_have_the_value_beside_the_limit(tmp_path):
    result = simulate(BASE.with_set("slo={ttft_p95_s: 1.0, tpot_p95_s: 0.000001}"))
    text = dict(fact_rows(result.summary))["SLO"]
    first, second = text.split("; ")
    assert first.startswith("TTFT p95 ")
    assert first.endswith(", within 1 s")
    assert second.endswith(", above 1 µs")
    assert text in write_run_report(result, tmp_path / "r.html").read_text()


def test_a_sweep_has_limit_value_and_verdict_as_columns_and_the_verdict_of_most(tmp_path):
    table = sweep(BASE, axes={"slo.ttft_p95_s": [1e-6, 1.0]}, replications=3, out=tmp_path / "s", jobs=1).table
    assert table["slo.ttft_p95_s"].tolist() == [1e-6, 1.0]
    assert table["slo_kept"].tolist() == [False, True]
    assert table["slo.ttft_p95_s.kept"].tolist() == [False, True]
    assert table["slo.ttft_p95_s.value_s"].tolist() == pytest.approx(table["ttft_s.p95"].tolist())


def test_limits_are_given_on_the_command_line_with_their_units():
    given = with_limits(BASE, ["ttft_p95=1s", "tpot_p99_s=40ms", "e2el=2min", "itl_p50=0.5"])
    assert given.slo.of_all == {"ttft_p95_s": 1.0, "tpot_p99_s": 0.04, "itl_p50_s": 0.5}
    assert given.slo.of_each == {"e2el_s": 120.0}
    for wrong in ("ttft_p95", "ttft_p95=fast", "=1s", "ttft_p95=1h"):
        with pytest.raises(RooftraceError, match="expected NAME=TIME"):
            with_limits(BASE, [wrong])


def test_capacity_searches_the_rate_within_limits_of_percentiles(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(BASE.to_yaml())
    arguments = ["capacity", str(file), "--slo", "--limit", "tpot_p95=9ms", "--tolerance", "0.2", "--json"]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["limits"]["tpot_p95_s"] == 0.009
    assert found["limits"]["attainment"] is None
    assert found["rate_per_s"] > 0
    missed = [each["miss"] for each in found["probes"] if each["miss"]]
    assert any("TPOT p95" in why for why in missed)
