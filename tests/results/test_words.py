"""The table of a run says what its summary holds."""

import pytest

from sim import Scenario, simulate
from sim.results import LATENCY_HEADS, fact_rows, figure_text, latency_rows, tables
from sim.results.trust import interval_text, trust_rows
from sim.results.words import limits_text
from sim.text import seconds_text, within_text


@pytest.fixture(scope="module")
def summary():
    # A limit that few keep, so that goodput is not throughput.
    asked = {"workload": {"trace": "conversation", "limit": 60, "rate_scale": 20}, "slo": {"ttft_s": 0.1}}
    return simulate(Scenario.from_mapping({"scheduler": "vllm", **asked})).summary


def test_each_latency_has_its_own_row(summary):
    keys = ("ttft_s", "tpot_s", "itl_s", "e2el_s", "queue_s")
    rows = latency_rows(summary)
    assert [name.split()[0] for name, _ in rows] == ["TTFT", "TPOT", "ITL", "E2EL", "Queue"]
    for key, (_, cells) in zip(keys, rows, strict=True):
        assert cells == [seconds_text(summary[key][head]) for head in LATENCY_HEADS]


def test_facts_are_those_of_the_summary(summary):
    facts, kv, costs = dict(fact_rows(summary)), summary["kv_utilization"], summary["costs"]
    assert 0 < summary["goodput_requests_per_s"] < summary["requests_per_s"]
    kept = f"{summary['slo_attainment']:.1%} of requests (TTFT at most 100 ms)"
    kept += f", goodput {summary['goodput_requests_per_s']:.3g} requests/s"
    assert facts["Within the SLO"] == kept
    assert facts["Request throughput"] == f"{summary['requests_per_s']:.3g} requests/s"
    # As the tables of docs/engines.md say it: the terms of release 0.14 are those of later ones too.
    assert "overheads of vllm from release 0.14, fitted to 0.15 to 0.19" in facts["Trust"]
    assert facts["Saturated"].startswith("cannot be said: it takes 64 arrivals")  # these are 60
    assert facts["Output throughput"] == f"{summary['output_tokens_per_s']:,.0f} tokens/s"
    assert facts["KV memory in use"] == f"{kv['mean']:.1%} on average, {kv['max']:.1%} at most"
    assert f"${costs['usd_per_m_input']:,.3g} input, ${costs['usd_per_m_generated']:,.3g} output" in facts["Cost"]
    assert f"${costs['usd']:,.3g} for {costs['device_hours']:,.3g} device-hours" in facts["Cost"]


@pytest.mark.parametrize(
    ("value_s", "half_width_s", "text"),
    [
        (8.01e-3, 4.95e-11, "8.01 ms"),
        (8.01e-3, 3e-6, "8.01 ms"),
        (8.01e-3, 2e-5, "8.01 ms ± 20 µs"),
        (1.25, 1.0, "1.25 s ± 1 s"),
        (0.0, 0.002, "0 s ± 2 ms"),
        (0.5, None, "500 ms"),
    ],
)
def test_an_interval_below_the_digits_of_a_figure_is_left_out(value_s, half_width_s, text):
    assert within_text(value_s, half_width_s, seconds_text) == text


@pytest.mark.parametrize(
    ("more", "between"),
    [
        ({}, "with 23 s between them"),
        ({"update_s": 0, "pause_s": 0}, None),
        ({"leftover": "continue", "wanted": 3}, None),
    ],
)
def test_a_rollout_says_what_passes_between_steps_beside_what_each_takes(more, between):
    rollout = {"prompts": 4, "samples": 2, "steps": 3, "update_s": 20, "pause_s": 3, **more}
    load = {
        "rollout": rollout,
        "prompt_tokens": 50,
        "output_tokens": {"distribution": "uniform", "min_tokens": 1, "max_tokens": 90},
    }
    found = simulate(Scenario.from_mapping({"workload": load, "scheduler": "vllm"})).summary
    said = dict(fact_rows(found))["Rollout"]
    first, second, _ = found["rollout"]["steps"]
    gap_s = second["begin_s"] - first["begin_s"] - first["step_s"]
    assert gap_s == pytest.approx(23.0 if between else 0.0)
    assert (between or " each: 90 %") in said


def test_large_costs_are_written_out(summary):
    large = {name: each * 1e6 if isinstance(each, float) else each for name, each in summary["costs"].items()}
    facts = dict(fact_rows({**summary, "costs": large}))
    assert large["mean_w"] > large["usd_per_m_output"] > 1000
    assert f"{large['mean_w']:,.0f} W in the mean" in facts["Energy"]
    assert "e+" not in facts["Energy"] + facts["Cost"]


def test_what_a_protocol_reports_is_first_token_then_later_ones():
    assert trust_rows({"reported": {"ttft_s": 0.1, "tpot_s": None}}) == [
        ("As the protocol reports", "TTFT 100 ms, TPOT -")
    ]


def test_an_interval_says_how_much_it_holds_and_whose_errors_it_is_from():
    figures = {"tpot_s.mean": {"low": 0.01, "high": 0.03}, "ttft_s.mean": {"low": 0.1, "high": 0.4}}
    said = "mean TTFT 100 ms to 400 ms, TPOT 10 ms to 30 ms (90 % interval), by the errors on 12 rows"
    assert interval_text({"level": 0.9, "basis": "12 rows", "figures": figures}) == said


@pytest.mark.parametrize(
    ("prompt_tokens", "rate_per_s", "waits"), [(4000, 1.0, False), (10, 1.0, False), (4000, 6.0, True)]
)
def test_a_run_near_saturation_says_that_its_first_tokens_mostly_wait(prompt_tokens, rate_per_s, waits):
    arrivals = {"process": "poisson", "rate_per_s": rate_per_s}
    load = {"requests": 60, "prompt_tokens": prompt_tokens, "output_tokens": 4, "arrivals": arrivals}
    one_seat = {"policy": "vllm", "max_num_seqs": 1}
    found = simulate(Scenario.from_mapping({"workload": load, "scheduler": one_seat})).summary
    said = dict(trust_rows(found))["Expect to measure"]
    assert ("of TTFT is waiting, near saturation" in said) == waits == ("waiting_share" in found["intervals"])


def test_a_run_that_answered_nobody_still_has_its_price():
    asked = {"workload": {"trace": "conversation", "limit": 3}, "memory": {"kv_blocks": 2}}
    found = simulate(Scenario.from_mapping({"scheduler": "vllm", **asked})).summary
    assert found["costs"]["usd_per_m_output"] is None
    assert dict(fact_rows(found))["Cost"] == "$0 for 0 device-hours"


def test_limits_are_said_by_the_names_of_the_table():
    assert limits_text({"ttft_s": 1.0, "tpot_p95_s": 0.04, "e2el_mean_s": 30}) == (
        "TTFT at most 1 s, TPOT p95 at most 40 ms, E2EL mean at most 30 s"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("costs.usd_per_month", 10044.8, "10,045"),
        ("output_tokens_per_s", 1234567.0, "1,234,567"),
        ("costs.usd_per_m_output", 3.8542, "3.854"),
        ("ttft_s.p99", 0.204, "204 ms"),
        ("slo_attainment", 0.97, "97.0%"),
    ],
)
def test_figures_are_written_out(name, value, said):
    assert figure_text(name, value) == said


def test_tables_leave_out_those_without_rows_and_give_every_row_a_text_for_each_head(summary):
    shown = tables(summary)
    assert [table.title for table in shown] == ["Latency"]
    assert all(len(row) == 1 + len(table.heads) for table in shown for row in table.rows)
