import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sim import Scenario
from sim.cli import build_app
from sim.scenario.adapters import AdapterSettings
from sim.study.advise import advise, proposals
from sim.study.points import Sweep
from sim.study.slots import Slots, advice, best_of, next_number, numbers_to_try, settings_of
from sim.study.sweep import sweep

SHARED = Scenario.default().with_set(
    "workload={arrivals: {process: poisson, rate_per_s: 12}, prompt_tokens: 200, output_tokens: 60, requests: 60}",
    "slo={e2el_p95_s: 2.0}",
    "adapters={count: 12, max_loras: 2, max_cpu_loras: 12}",
)


def ran(n, *e2el_s, keeps=True):
    return Slots(n=n, keeps=keeps, e2el_s=e2el_s, kv_tokens=None, kv_tokens_a_slot=None, figures={}, half_widths={})


def test_the_fewest_slots_are_chosen_among_those_that_are_surely_no_worse():
    few, enough, more = ran(2, 3.0, 3.1, 3.2), ran(8, 1.0, 1.2, 1.1), ran(16, 1.01, 1.19, 1.09)
    assert best_of([few, enough, more]) is enough
    # Each seed is a little below, so that the difference is sure.
    assert best_of([few, enough, ran(16, 0.9, 1.1, 1.0)]).n == 16


def test_slots_that_keep_the_slo_go_before_those_that_are_faster():
    assert best_of([ran(2, 3.0, 3.1), ran(8, 1.0, 1.1, keeps=False)]).n == 2
    assert best_of([ran(2, 3.0, 3.1, keeps=False), ran(8, 1.0, 1.1, keeps=False)]).n == 8


def test_slots_with_which_nothing_finishes_are_never_better():
    assert best_of([ran(1, math.inf, math.inf), ran(4, 2.0, 3.0)]).n == 4
    assert advice([ran(1, math.inf, math.inf), ran(4, 2.0, 3.0)], now=1).change is None


def test_one_seed_has_no_interval_and_the_least_latency_decides():
    found = advice([ran(2, 3.0), ran(4, 1.0), ran(8, 1.0)], now=2)
    assert found.best.n == 4
    assert found.change is not None
    assert found.change.mean == pytest.approx(-2 / 3)
    assert not found.change.certain


def test_half_and_doubles_are_tried_first_up_to_the_number_of_adapters():
    assert numbers_to_try(now=8, most=40) == [4, 16, 32, 40]
    assert numbers_to_try(now=1, most=3) == [2, 3]
    assert numbers_to_try(now=1, most=1) == []


def test_the_base_model_counts_as_one_more_where_it_takes_a_slot():
    of = {"vllm": ["1 adapter slot", "4 adapter slots", "6 adapter slots"],
          "sglang": ["1 adapter slot", "4 adapter slots", "7 adapter slots"]}  # fmt: skip
    for stack, names in of.items():
        scenario = SHARED.with_set(f"serving_stack={stack}", f"scheduler={stack}", "adapters={count: 6, max_loras: 2}")
        tried = [each.name for each in proposals(scenario, ["adapters"]) if "slot" in each.name]
        assert tried == names


def test_host_memory_has_room_for_the_slots_that_are_tried():
    assert settings_of(AdapterSettings(count=40, max_loras=8, max_cpu_loras=10), 16) == {
        "adapters.max_loras": 16,
        "adapters.max_cpu_loras": 16,
    }
    for host in (None, 20):
        adapters = AdapterSettings(count=40, max_loras=8, max_cpu_loras=host)
        assert settings_of(adapters, 16) == {"adapters.max_loras": 16}


@settings(max_examples=30, deadline=None)
@given(best=st.integers(1, 300), most=st.integers(1, 300), now=st.integers(1, 300), room=st.integers(1, 300))
def test_the_search_ends_near_the_best_number_that_there_is_room_for(best, most, now, room):
    room = max(room, now)
    tried, refused = [], []
    n = now
    while n is not None:
        assert n not in refused
        assert n not in [each.n for each in tried]
        if n <= room:
            tried.append(ran(n, 1.0 + abs(math.log(n / best))))
        else:
            refused.append(n)
        n = next_number(tried, refused, max(most, now))
    reached = min(best, max(most, now), room)
    assert abs(best_of(tried).n - reached) <= max(1, reached // 2)
    assert len(tried) + len(refused) <= 2 * np.log2(300) + 4


def test_advice_on_slots_is_that_of_its_rows_and_says_what_each_slot_takes(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(SHARED.with_set("adapters.count=4", "workload.requests=40").to_yaml())
    asked = ["advise", str(file), "--only", "adapters", "--replications", "2", "--jobs", "1"]
    done = CliRunner().invoke(build_app(), [*asked, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    slots = found["adapter_slots"]
    assert slots["now"] == 2
    assert slots["best"] > 2
    assert slots["e2el_change"]["mean"] < 0
    changes = {each["change"]: each["figures"] for each in found["candidates"]}
    assert set(changes) == {"as it is", "1 adapter slot", "3 adapter slots", "4 adapter slots"}
    tried = {each["slots"]: each for each in slots["tried"]}
    # By the tokens that are left with one slot and with four, in whole blocks of 16.
    given_up = tried[1]["kv_tokens"] - tried[4]["kv_tokens"]
    assert tried[1]["kv_tokens_a_slot"] == pytest.approx(given_up / 3, abs=16 / 3)


def test_the_command_shows_throughput_against_slots_and_names_the_number_to_set():
    asked = ["advise", "--only", "adapters", "--replications", "1", "--jobs", "1"]
    changed = [
        "workload={arrivals: {process: poisson, rate_per_s: 12}, prompt_tokens: 200, output_tokens: 60, requests: 30}",
        "adapters={count: 3, max_loras: 1}",
        "slo={e2el_p95_s: 5}",
    ]
    done = CliRunner().invoke(build_app(), [*asked, *(f"--set={each}" for each in changed)])
    assert done.exit_code == 0, done.output
    assert "1 (now)" in done.stdout
    assert "output tokens/s" in done.stdout
    assert "Slots to set" in done.stdout
    assert "adapters.max_loras=" in done.stdout
    assert "(one seed, so without an interval)" in " ".join(done.stdout.split())
    assert "KV tokens on every machine" in " ".join(done.stdout.split())


def test_without_adapters_there_is_no_advice_on_slots():
    plain = SHARED.with_set("adapters=null", "workload.requests=5")
    found = advise(plain, only=["adapters"], replications=1, jobs=1)
    assert found.adapter_slots is None
    assert found.said == ("adapters: the scenario has none.",)


def test_an_axis_keeps_its_values_where_a_result_is_called_the_same_and_a_point_fails(tmp_path):
    base = SHARED.with_set("workload.requests=3", "adapters.max_cpu_loras=2")
    plan = Sweep(base=base, axes={"adapters.max_loras": [1, 2, 4]})
    found = sweep(plan, jobs=1, out=tmp_path / "s")
    assert found.table["adapters.max_loras"].to_list() == [1, 2, 4]
    assert found.table["adapters.max_loras"].dtype == np.int64
    assert found.table["failed"].to_list() == [0, 0, 1]
    lines = (Path(found.folder) / "results.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["adapters.max_loras", "1", "2", "4"]
    assert lines[0].split(",").count("adapters.max_loras") == 1


@pytest.mark.slow(reason="several searches or whole runs")
def test_the_best_number_of_slots_is_exported_though_another_candidate_cannot_run(tmp_path):
    file, out = tmp_path / "s.yaml", str(tmp_path / "found")
    file.write_text(SHARED.with_set("adapters.max_cpu_loras=2", "slo.e2el_p95_s=60", "workload.requests=20").to_yaml())
    asked = ["--axis", "adapters.max_loras=1,2,4", "--replications", "2", "--jobs", "1", "--out", out]
    done = CliRunner().invoke(build_app(), ["optimize", str(file), "--goal", "latency", *asked])
    assert done.exit_code == 0, done.output
    assert "least latency: adapters.max_loras=2 at" in " ".join(done.stdout.split())
    assert "give adapters.max_cpu_loras of at least 4, or leave it out" in done.stderr
    written = CliRunner().invoke(build_app(), ["export", out, "--for", "vllm"])
    assert "--max-loras 2 " in written.stdout
