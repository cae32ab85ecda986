import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sim import RooftraceError, Scenario
from sim.cli import build_app
from sim.cli.commands.optimize import attained_text
from sim.launch import recommended
from sim.study.optimize import cheapest, choose, pareto_front, with_costs
from sim.study.rates import Target, highest_rate, judge, target_of

BASE = Scenario.default().with_set(
    "workload={arrivals: {process: poisson, rate_per_s: 10}, prompt_tokens: 600, output_tokens: 60, requests: 80}"
)


def summaries(*shares, saturated=False):
    return [{"slo_attainment": share, "saturated": saturated} for share in shares]


@pytest.mark.parametrize(
    ("runs", "met"),
    [
        (summaries(0.995, 0.996, 0.994), True),
        (summaries(0.90, 0.91, 0.92), False),
        (summaries(0.97, 1.0, 1.0), None),
        (summaries(1.0, 1.0), True),
        (summaries(1.0, 1.0, 1.0, saturated=True), False),
        (summaries(1.0, 1.0, 1.0, saturated=None), True),
    ],
)
def test_a_target_is_met_missed_or_left_open(runs, met):
    assert judge(runs, Target(attainment=0.99), 1.0, level=0.95).met is met


def test_the_highest_rate_is_bracketed_and_holds_when_run_again():
    scenario = BASE.with_set("slo={ttft_s: 0.2, tpot_s: 0.03}", "workload.requests=100")
    found = highest_rate(scenario, tolerance=0.5, most_replications=2)
    assert 0 < found.outside_per_s - found.rate_per_s <= 0.5 * found.rate_per_s * (1 + 1e-9)
    met = {each.rate_per_s: each.met for each in found.judgements}
    assert met[found.rate_per_s] is True
    assert met[found.outside_per_s] is not True
    # A tighter SLO carries less.
    tight = highest_rate(scenario.with_set("slo.ttft_s=0.05"), tolerance=0.5, most_replications=2)
    assert tight.rate_per_s < found.rate_per_s


LIMITED = BASE.with_set("slo={ttft_p95_s: 0.2, tpot_p95_s: 0.0077}")


def test_a_rate_is_missed_where_most_runs_are_above_the_limit_of_a_percentile():
    def runs(*values_s):
        found = []
        for value_s in values_s:
            limit = {"limit_s": 1.0, "value_s": value_s, "kept": value_s <= 1.0}
            found.append({**summaries(None)[0], "slo": {"ttft_p95_s": limit}})
        return found

    target = Target(attainment=None)
    assert [judge(runs(*each), target, 1.0, level=0.95).met for each in ((1.0,), (1.1,), (0.9, 1.1), (0.9, 1.1, 1.2))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert judge(runs(1.1), target, 1.0, level=0.95).why == "TTFT p95 1.1 s, above 1 s"


def test_limits_of_percentiles_bound_the_rate_and_choose_the_candidate():
    found = highest_rate(LIMITED, replications=1, tolerance=0.2)
    missed = [each.why for each in found.judgements if not each.met]
    assert missed
    assert all("TPOT p95" in why for why in missed)
    assert found.rate_per_s > 0
    best = cheapest(LIMITED, {"replicas": [1, 2]}, replications=2, jobs=1)
    assert best.table["slo_kept"].tolist() == best.table["keeps"].tolist() == [False, True]
    assert best.table["slo.tpot_p95_s.limit_s"].tolist() == [0.0077] * 2


def test_a_candidate_chosen_by_percentiles_is_exported_with_its_model_error_said(tmp_path):
    file, out = tmp_path / "s.yaml", tmp_path / "candidates"
    file.write_text(LIMITED.with_set("slo={}").to_yaml())
    arguments = ["optimize", str(file), "--limit", "tpot_p95=9ms", "--goal", "cost", "--axis", "replicas=1,2"]
    more = ["--replications", "2", "--intervals", "2", "--jobs", "1", "--out", str(out), "--json"]
    done = CliRunner().invoke(build_app(), [*arguments, *more])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["best"]["slo_attainment"] is None
    assert found["kept"][0]["probability"] is not None
    assert "the limits of the SLO kept" in " ".join(recommended(out).reasons)


def test_limits_of_percentiles_do_not_hide_requests_that_were_rejected():
    limits = target_of(LIMITED)
    assert limits == Target(attainment=None, all_finish=True)
    assert target_of(LIMITED.with_set("slo.ttft_s=1")) == Target()
    counts = {"requests": {"total": 2, "finished": 1}}
    assert judge([{**summaries(None)[0], **counts}], limits, 1.0, level=0.95).met is False


def test_a_search_needs_an_slo_and_a_rate():
    with pytest.raises(RooftraceError, match="no SLO"):
        highest_rate(BASE.with_set("slo={}"))
    clients = BASE.with_value("workload.arrivals", {"process": "closed_loop", "concurrency": 4})
    with pytest.raises(RooftraceError, match="no arrival rate"):
        highest_rate(clients.with_set("slo.ttft_s=1"))


def test_the_front_is_what_no_other_beats():
    frame = pd.DataFrame({"x": [1, 2, 3, 2, 3, 1, np.nan], "y": [9, 5, 1, 6, 1, 9, 99]})
    assert pareto_front(frame, "x", "y").tolist() == [True, False, True, True, True, True, False]


def test_the_front_agrees_with_trying_every_pair():
    rng = np.random.default_rng(3)
    frame = pd.DataFrame(rng.integers(0, 8, size=(200, 2)), columns=["x", "y"])
    points = frame.to_numpy()
    beaten = [any((other >= point).all() and (other > point).any() for other in points) for point in points]
    assert pareto_front(frame, "x", "y").tolist() == [not each for each in beaten]


def test_the_front_among_some_leaves_the_others_out():
    frame = pd.DataFrame({"x": [1, 2, 3], "y": [9, 5, 6]})
    assert pareto_front(frame, "x", "y", among=np.array([True, True, False])).tolist() == [True, True, False]


def test_costs_follow_from_gpus_price_and_throughput():
    table = pd.DataFrame({"gpus": [2], "output_tokens_per_s": [1000.0], "tpot_s.p50": [0.02], "hardware": ["h100-sxm"]})
    row = with_costs(table, BASE).iloc[0]
    from hwmodels.device import load_device

    device = load_device("h100-sxm")
    assert row["gpu_s_per_mtoken"] == pytest.approx(2000)
    assert row["joule_per_mtoken"] == pytest.approx(2000 * device.tdp_w)
    assert row["usd_per_mtoken"] == pytest.approx(2000 / 3600 * device.price_usd_per_hour)
    assert (row["tokens_per_s_per_gpu"], row["tokens_per_s_per_user"]) == (500, 50)


def test_the_cheapest_candidate_keeps_the_slo():
    scenario = BASE.with_set("slo={ttft_s: 0.3, tpot_s: 0.02}").with_set("workload.arrivals.rate_per_s=25")
    found = cheapest(scenario, {"replicas": [1, 2, 4]}, goal="gpu-seconds", replications=2, jobs=1)
    kept = found.table[found.table["keeps"]]
    assert found.best["gpu_s_per_mtoken"] == kept["gpu_s_per_mtoken"].min()
    assert found.best["replicas"] == kept["replicas"].min()
    impossible = cheapest(scenario.with_set("slo.ttft_s=0.0001"), {"replicas": [1, 2]}, replications=2, jobs=1)
    assert impossible.best is None
    assert "none of 2 candidates" in str(impossible)


class Finished:
    """A sweep with four candidates: sound, saturated, too wide an interval, and one run that failed."""

    axes = ("replicas",)
    folder = None
    table = pd.DataFrame(
        {
            "replicas": [4, 1, 2, 3], "gpus": [4, 1, 2, 3], "replications": 3, "failed": [0, 0, 0, 1],
            "saturated": [False, True, False, False], "slo_attainment": 0.995, "tpot_s.p50": 0.02,
            "output_tokens_per_s": 1000.0,
        }
    )  # fmt: skip
    level = 0.95
    notes = ()

    def summaries(self):
        sound, wide = summaries(0.995, 0.995, 0.996), summaries(0.98, 1.0, 1.0)
        return [sound, summaries(0.995, 0.995, 0.996, saturated=True), wide, [*sound[:2], None]]

    def failures(self, n):
        return []


def test_candidates_within_the_slo_whose_price_is_not_known_are_named():
    # Nobody lists a price of a B300.
    found = cheapest(BASE, {"hardware": ["b300", "h100"]}, replications=2, jobs=1)
    assert found.best["hardware"] == "h100"
    assert str(found).endswith(
        ". Within the SLO at a cost that is not known (costs.usd_per_device_hour says it): hardware=b300"
    )
    none = replace(found, table=found.table.assign(usd_per_mtoken=math.nan))
    assert none.best is None
    assert str(none) == (
        "none of 2 candidates keeps 99.0% of requests within the SLO at a cost that is known. Within the SLO at a cost that is not "
        "known (costs.usd_per_device_hour says it): hardware=b300; hardware=h100"
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.98969, "98.97%"), (0.98997, "98.997%"), (0.99, "99.0%"), (0.98, "98.0%"), (0.9951, "99.5%"),
    ],
)  # fmt: skip
def test_a_share_below_the_target_is_not_shown_as_the_target(share, text):
    assert attained_text(share, 0.99) == text


def test_a_candidate_keeps_the_slo_with_confidence_without_saturation_and_in_every_run():
    found = choose(Finished(), BASE, goal="gpu-seconds", target=Target(attainment=0.99))
    assert found.table["keeps"].tolist() == [True, False, False, False]
    assert found.best["replicas"] == 4
    # All are equal but for the GPUs, and those that miss the SLO are not on the front.
    assert found.table["on_front"].tolist() == [True, False, False, False]
    none = choose(Finished(), BASE, goal="gpu-seconds", target=Target(attainment=0.999))
    assert none.table["on_front"].tolist() == [False, True, False, False]


def test_a_candidate_that_cannot_be_is_said_with_its_reason(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(BASE.with_set("slo.ttft_s=1", "workload.requests=5").to_yaml())
    arguments = ["optimize", str(file), "--goal", "devices", "--axis", "parallel.tensor=1,3", "--replications", "2"]
    done = CliRunner().invoke(build_app(), [*arguments, "--jobs", "1"])
    assert "1 of 2 candidates failed:" in done.output
    assert "parallel.tensor=3: " in done.output
    assert "does not divide the 32 attention heads" in done.output


def test_the_command_finds_a_rate_and_a_deployment(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(BASE.with_set("slo={ttft_s: 0.3, tpot_s: 0.05}", "workload.requests=40").to_yaml())
    rate = CliRunner().invoke(build_app(), ["optimize", str(file), "--tolerance", "0.2", "--json"])
    assert rate.exit_code == 0, rate.output
    assert json.loads(rate.stdout)["best"]["rate_per_s"] > 0
    arguments = [
        "optimize",
        str(file),
        "--goal",
        "cost",
        "--axis",
        "replicas=1,2",
        "--replications",
        "2",
        "--jobs",
        "1",
    ]
    cost = CliRunner().invoke(build_app(), [*arguments, "--out", str(tmp_path / "o")])
    assert cost.exit_code == 0, cost.output
    assert "replicas=1" in cost.stdout
    assert (tmp_path / "o" / "ranked.csv").is_file()
    assert (tmp_path / "o" / "pareto.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goal", "cots", "--axis", "replicas=1"], "did you mean cost"),
        (["--goal", "cost"], "give --axis"),
        (["--attainment", "99"], "attainment is a share"),
        (["--tolerance", "2"], "--tolerance"),
        (["--set", "slo={}"], "no SLO"),
        (["--axis", "replicas=1", "--axis", "replicas=2"], "given twice"),
        (["--goal", "cost", "--axis", "replicas=1", "--tolerance", "0.1"], "is about --goal rate"),
    ],
)
def test_what_cannot_be_optimised_is_refused(arguments, message):
    done = CliRunner().invoke(build_app(), ["optimize", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr


@pytest.mark.slow(reason="processes are started and ended")
def test_candidates_have_the_same_rates_in_processes_of_their_own_as_in_this_one(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(BASE.with_set("slo.ttft_s=0.05").with_set("workload.requests=60").to_yaml())
    asked = ["optimize", str(file), "--axis", "replicas=1,2", "--tolerance", "0.5", "--replications", "2", "--json"]
    alone, apart = (CliRunner().invoke(build_app(), [*asked, "--jobs", jobs]) for jobs in ("1", "2"))
    assert apart.exit_code == 0, apart.output
    assert json.loads(apart.stdout) == json.loads(alone.stdout)
    assert [row["replicas"] for row in json.loads(apart.stdout)["candidates"]] == [1, 2]


def test_an_slo_that_no_rate_keeps_is_said_and_ends_with_one(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(BASE.with_set("slo.ttft_s=1e-7").with_set("workload.requests=20").to_yaml())
    done = CliRunner().invoke(build_app(), ["optimize", str(file)])
    assert done.exit_code == 1, done.output
    assert "none: 0.99 of requests is not reached even at" in done.stdout


def test_an_interrupted_choice_says_what_is_kept(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.study.optimize.cheapest", stop)
    asked = ("optimize", "--goal", "cost", "--axis", "replicas=1,2")
    kept = CliRunner().invoke(build_app(), [*asked, "--out", str(tmp_path / "some")])
    assert (kept.exit_code, f"kept in {tmp_path / 'some'}/, and the same command goes on" in kept.stderr) == (130, True)
    lost = CliRunner().invoke(build_app(), [*asked])
    assert (lost.exit_code, lost.stderr) == (130, "Interrupted; nothing was written.\n")
