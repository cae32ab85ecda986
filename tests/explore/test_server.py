"""Answers of the page: the command's figures, estimates first, refusals in the command's words, work that is given up."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sim.errors import RooftraceError
from sim.explore.session import Limits, Session
from sim.explore.state import Refused
from sim.explore.workers import Workers
from sim.run import simulate
from sim.scenario import Scenario
from sim.study.compare import compare
from sim.study.explain import CAUSES
from sim.study.sweep import sweep
from tests.explore.serving import SMALL

EXAMPLES = Path(__file__).parents[2] / "examples" / "bench"


def value(answer: Mapping[str, Any], name: str) -> float:
    return answer["figures"][name]["value"]


def last(events: list[tuple[str, Any]], name: str) -> Any:
    return next(data for kind, data in reversed(events) if kind == name)


def sleeps(seconds: float) -> Any:
    """A job that says when it begins, and then takes its time."""
    yield "begun", {"pid": os.getpid()}
    time.sleep(seconds)
    yield "over", {}


def gone(pid: int) -> bool:
    """Whether the process is no more, some seconds at most from now."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").is_file() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_an_estimate_comes_before_the_exact_run(serving, tmp_path, monkeypatch):
    session = serving.session(tmp_path, SMALL.with_set("workload.limit=1500"))
    events_of, estimated = session._events, asyncio.Event()

    async def in_turn(kind, job):
        """On a busy machine the whole run may be over first, and then nobody wants an estimate."""
        if kind == "exact":
            await estimated.wait()
        async for event in events_of(kind, job):
            yield event
        estimated.set()

    monkeypatch.setattr(session, "_events", in_turn)
    events = serving.ask(session.run("", {}))
    assert [name for name, _ in events] == ["estimate", "exact"]
    estimate, exact = (data for _, data in events)
    assert "first" in estimate["how"]
    assert estimate["requests"] < exact["requests"] == 1500


def test_figures_are_those_of_the_command_to_the_bit(serving, tmp_path):
    state = {
        "set": {"replicas": "2", "decoding": "{method: ngram, num_speculative_tokens: 3, acceptance: {alpha: 0.6}}"}
    }
    exact = last(serving.ask(serving.session(tmp_path).run("", state)), "exact")
    summary = simulate(SMALL.with_set(*(f"{key}={text}" for key, text in state["set"].items()))).summary
    assert value(exact, "ttft_p95_s") == summary["ttft_s"]["p95"]
    assert value(exact, "tpot_mean_s") == summary["tpot_s"]["mean"]
    assert value(exact, "e2e_p99_s") == summary["e2el_s"]["p99"]
    assert value(exact, "output_tokens_per_s") == summary["output_tokens_per_s"]
    assert value(exact, "cost_per_mtoken") == summary["costs"]["usd_per_m_output"]
    assert value(exact, "devices") == 2


def test_an_interval_is_that_of_the_summary(serving, tmp_path):
    exact = last(serving.ask(serving.session(tmp_path).run("", {})), "exact")
    around = simulate(SMALL).summary["intervals"]["figures"]["ttft_s.mean"]
    assert {end: exact["figures"]["ttft_mean_s"][end] for end in around} == around
    assert "low" not in exact["figures"]["ttft_p95_s"]


def test_a_point_of_a_sweep_is_not_run_again(serving, tmp_path):
    sweep(SMALL, axes={"replicas": [1, 2]}, out=tmp_path, jobs=1)
    points = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "points").iterdir()}
    events = serving.ask(serving.session(tmp_path).curve("", {"set": {"replicas": 2}, "points": 1}))
    assert [name for name, _ in events] == ["point", "done"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "points").iterdir()} == points


def test_a_run_of_the_page_is_a_point_of_the_next_sweep(serving, tmp_path):
    exact = last(serving.ask(serving.session(tmp_path).run("", {"set": {"replicas": 2}})), "exact")
    done: list[Any] = []
    found = sweep(SMALL, axes={"replicas": [2]}, out=tmp_path, jobs=1, progress=done.append)
    assert done[-1].reused == 1
    assert found.table["ttft_s.mean"][0] == value(exact, "ttft_mean_s")


def test_what_was_answered_is_answered_at_once(serving, tmp_path):
    session = serving.session(tmp_path)
    first = last(serving.ask(session.run("", {})), "exact")
    assert serving.ask(session.run("", {})) == [("exact", first)]


def test_a_stored_point_is_shown_before_it_is_run_for_its_course(serving, tmp_path):
    serving.ask(serving.session(tmp_path).curve("", {"points": 1}))
    answers = [data for name, data in serving.ask(serving.session(tmp_path).run("", {})) if name == "exact"]
    assert ["series" in each for each in answers] == [False, True]
    assert answers[0]["figures"] == answers[1]["figures"]


def test_the_course_of_a_run_covers_it(serving, tmp_path):
    exact = last(serving.ask(serving.session(tmp_path).run("", {})), "exact")
    series = exact["series"]
    lengths = {len(each) for each in series.values()}
    assert lengths == {len(series["time_s"])}
    assert all(0 <= share <= 1 for share in series["kv_used_share"])
    whole = exact["distributions"]["e2e_s"]
    assert whole["share"][0] == 0
    assert whole["share"][-1] == 1
    assert whole["x"][-1] == pytest.approx(simulate(SMALL).summary["e2el_s"]["max"], rel=1e-5)


def test_sources_say_what_kind_they_are_of(serving, tmp_path):
    sources = last(serving.ask(serving.session(tmp_path).run("", {})), "exact")["trust"]["sources"]
    assert {each["kind"] for each in sources} == {"measured", "fitted", "borrowed", "datasheet", "assumed"}
    memory = next(each for each in sources if each["name"].endswith("hbm_bytes_per_s"))
    assert (memory["kind"], memory["unit"], memory["date"]) == ("datasheet", "bytes/s", "2023")


def test_commands_run_the_same_scenario(serving, tmp_path):
    session = serving.session(tmp_path, file="mine.yaml", settings=("seed=3",))
    commands = last(serving.ask(session.run("", {"set": {"replicas": 2}})), "exact")["commands"]
    assert commands["run"] == "rooftrace run mine.yaml --set seed=3 --set replicas=2"
    assert "vllm serve" in commands["server"]
    assert Scenario.from_yaml(commands["scenario"]).hash == SMALL.with_set("replicas=2").hash


REFUSED = [
    ({"replicas": -2}, "replicas", "replicas is a number at least 1; got -2"),
    ({"parallel.tensr": 2}, "parallel.tensr", "parallel.tensr is not a setting; did you mean tensor?"),
]


@pytest.mark.parametrize(("given", "key", "says"), REFUSED)
def test_a_setting_is_refused_in_the_commands_sentence(serving, tmp_path, given, key, says):
    with pytest.raises(RooftraceError, match=says.split(";")[0]) as command:
        SMALL.with_values(given)
    with pytest.raises(Refused) as page:
        serving.ask(serving.session(tmp_path).run("", {"set": given}))
    assert page.value.facts == {"sentence": str(command.value), "key": key}


@pytest.mark.parametrize("given", [{"hardware": "h900"}, {"model": "llama-3.1-405b"}])
def test_a_deployment_is_refused_in_the_commands_sentence(serving, tmp_path, given):
    with pytest.raises(RooftraceError) as command:
        simulate(SMALL.with_values(given))
    (event,) = serving.ask(serving.session(tmp_path).run("", {"set": given}))
    assert event == ("refused", {"sentence": str(command.value)})


OWN = ("adapters.max_loras", "encode.cache_tokens")


@pytest.mark.parametrize(
    ("example", "key", "value"), [("lora", OWN[0], 8), ("images", OWN[1], None), ("speculative", None, None)]
)
def test_slots_of_adapters_and_the_cache_of_an_encoder_slide_where_there_are_any(
    serving, tmp_path, example, key, value
):
    base = Scenario.load(EXAMPLES.parent / f"{example}.yaml")
    found = serving.session(tmp_path, base).controls({})["groups"]
    own = {each["key"]: each for group in found for each in group["controls"] if each["key"] in OWN}
    assert set(own) == ({key} if key else set())
    for slider in own.values():
        assert (slider["kind"], slider["scale"], slider["value"]) == ("integer", "log", value)
        assert slider["minimum"] < slider["maximum"]
        assert slider["help"]


def test_fewer_slots_let_requests_wait_longer(serving, tmp_path):
    base = Scenario.load(EXAMPLES.parent / "lora.yaml").with_set("workload.requests=150")
    session = serving.session(tmp_path, base)
    waits = [
        value(last(serving.ask(session.run("", {"set": {OWN[0]: slots}})), "exact"), "ttft_p95_s")
        for slots in (2, 8, 40)
    ]
    assert waits[0] > 2 * waits[1] > 2 * waits[2]


def test_a_run_of_too_many_requests_is_refused(serving, tmp_path):
    session = serving.session(tmp_path, limits=Limits(requests=100))
    assert "at most 100 requests, and this one 120" in last(serving.ask(session.run("", {})), "refused")["sentence"]
    drawn = (
        "{arrivals: {process: poisson, rate_per_s: 5}, prompt_tokens: 10, output_tokens: 10, requests: 1000000000000}"
    )
    events = serving.ask(session.run("", {"set": {"workload": drawn}}))
    assert "1,000,000,000,000" in last(events, "refused")["sentence"]
    assert not (tmp_path / "points").exists()  # a sweep may run them


@pytest.mark.parametrize("points", [0, 65, "9", True])
def test_points_are_bounded(serving, tmp_path, points):
    with pytest.raises(RooftraceError, match="points is a whole number from 1 to 64"):
        serving.ask(serving.session(tmp_path).curve("", {"points": points}))


def test_too_many_candidates_are_refused(serving, tmp_path):
    over = {"replicas": "1:50:50", "seed": "0:9:10"}
    with pytest.raises(RooftraceError, match="at most 64 candidates are tried on the page, and these are 500"):
        serving.ask(serving.session(tmp_path).candidates("", {"over": over}))


def test_a_curve_closes_in_on_the_highest_rate_within_the_slo(serving, tmp_path):
    events = serving.ask(serving.session(tmp_path).curve("", {"points": 9}))
    points = [data for name, data in events if name == "point"]
    assert len(points) == 9
    kept = [each["rate_per_s"] for each in points if each["slo"]["kept"]]
    missed = [each["rate_per_s"] for each in points if not each["slo"]["kept"]]
    assert last(events, "done")["knee_per_s"] == max(kept)
    assert min(rate for rate in missed if rate > max(kept)) < 1.5 * max(kept)


def test_candidates_that_are_asked_for_are_ranked_by_cost(serving, tmp_path):
    over = {"replicas": [3, 2, 1], "hardware": ["h100-sxm", "h900"]}
    base = SMALL.with_set("slo={ttft_p95_s: 5}", "cost_model=roofline")
    events = serving.ask(serving.session(tmp_path, base).candidates("", {"over": over}))
    refused = {data["name"] for name, data in events if name == "candidate" and "refused" in data}
    assert refused == {f"replicas={n}, hardware=h900" for n in (1, 2, 3)}
    assert last(events, "done")["ranked"] == [f"replicas={n}, hardware=h100-sxm" for n in (1, 2, 3)]
    probable = [data for name, data in events if "slo_probability_why_not" in data]
    assert "roofline" in probable[0]["slo_probability_why_not"]


def test_the_front_is_of_candidates_that_no_other_beats(serving, tmp_path):
    over = {"parallel.tensor": [1, 2], "replicas": [1, 2]}
    base = SMALL.with_set("slo=null")
    events = serving.ask(serving.session(tmp_path, base).candidates("", {"over": over}))
    found = {data["name"]: data["figures"] for name, data in events if name == "candidate"}

    def both(name: str) -> tuple[float, ...]:
        return tuple(found[name][f"output_tokens_per_s_per_{of}"]["value"] for of in ("user", "device"))

    beaten = {
        one
        for one in found
        for other in found
        if both(one) != both(other) and all(a <= b for a, b in zip(both(one), both(other), strict=True))
    }
    assert set(last(events, "done")["front"]) == set(found) - beaten


@pytest.mark.slow(reason="a server and processes of its own")
def test_a_search_finds_the_least_machines_of_each_layout_and_their_probability(serving, tmp_path):
    base = Scenario.default().with_set("workload.limit=400", "workload.rate_scale=8")
    events = serving.ask(serving.session(tmp_path, base).candidates("", {"points": 40}))
    told = {data["name"]: data for name, data in events if name == "candidate" and "slo" in data}
    for name, data in told.items():
        if data["slo"]["kept"] and data["set"].get("replicas", 1) > 1:
            fewer = name.replace(f"{data['set']['replicas']} machine", f"{data['set']['replicas'] - 1} machine")
            assert fewer.replace("1 machines", "1 machine") in told
    assert any(name.startswith("FP8 weights, ") for name in told)
    assert any("prefill and" in name for name in told)
    probable = [each["slo_probability"] for each in told.values() if each.get("slo_probability") is not None]
    assert probable
    assert all(0 <= each <= 1 for each in probable)


def test_shares_of_explain_add_up_to_the_mean(serving, tmp_path):
    session = serving.session(tmp_path)
    events = serving.ask(session.explain("", {}))
    assert [name for name, _ in events] == ["explained", *["what_if"] * 5, "done"]
    explained = events[0][1]
    summary = simulate(SMALL).summary
    for name in ("tpot", "ttft"):
        parts = explained[name]["parts"]
        assert sum(parts.values()) == pytest.approx(summary[f"{name}_s"]["mean"], rel=1e-9)
        assert set(parts) <= set(CAUSES)
        assert explained[name]["slowest"]["mean_s"] >= explained[name]["mean_s"]


def test_two_states_differ_as_their_runs_do_over_the_same_requests(serving, tmp_path):
    state = {"set": {"replicas": 2}, "from": {"set": {}}}
    (event,) = serving.ask(serving.session(tmp_path).compare("", state))
    of_runs = compare(simulate(SMALL), simulate(SMALL.with_set("replicas=2")), metrics=["tpot_s.mean"]).rows()[0]
    told = event[1]["differences"]["tpot_mean_s"]
    assert {key: told[key] for key in ("change", "low", "high")} == {
        key: of_runs[key] for key in ("change", "low", "high")
    }


def test_states_of_other_requests_are_compared_over_several_seeds(serving, tmp_path):
    state = {"set": {"workload.rate_scale": 2}, "from": {"set": {}}}
    (event,) = serving.ask(serving.session(tmp_path, SMALL.with_set("workload.limit=40")).compare("", state))
    assert "5 replications on the same random numbers" in event[1]["how"]
    told = event[1]["differences"]["tpot_mean_s"]
    assert told["low"] < told["change"] < told["high"]


@pytest.mark.parametrize("view", ["speculation", "chunks", "bubbles", "placement"])
def test_a_closed_form_lies_where_the_event_loop_does(serving, tmp_path, view):
    import numpy as np

    events = serving.ask(serving.session(tmp_path).theory("", {"view": view}))
    compared = 0
    for name, picture in events:
        lines = {line["name"]: line for line in picture.get("lines", ())}
        for called, line in lines.items():
            form = lines.get(called.replace("event loop", "closed form"))
            if line["kind"] == "simulated" and form is not None:
                expected = np.interp(line["x"], form["x"], form["y"])
                assert line["y"] == pytest.approx(expected, rel=0.1, abs=0.01), f"{name} {called}"
                compared += 1
    assert compared


def test_an_unknown_view_is_refused(serving, tmp_path):
    events = serving.ask(serving.session(tmp_path).theory("", {"view": "chunk"}))
    assert events == [("refused", {"sentence": "view chunk is not known; did you mean chunks?"})]


def test_measured_runs_are_laid_beside_their_simulation(serving, tmp_path):
    session = serving.session(tmp_path, Scenario.load(EXAMPLES / "deployment.yaml"))
    data = (EXAMPLES / "made-8.json").read_bytes()
    found = serving.run(session.bench("a", {}, "made-8.json", data))
    (point,) = found["points"]
    name = "tpot_mean_s"
    assert point["error"][name] == pytest.approx(point["simulated"][name] / point["measured"][name] - 1)
    assert point["rate_per_s"] > 0


def test_a_file_that_is_no_measurement_is_refused(serving, tmp_path):
    with pytest.raises(RooftraceError, match=r"notes\.json: it is not a result that is known here"):
        serving.run(serving.session(tmp_path).bench("a", {}, "notes.json", b'{"a": 1}'))


def test_a_fit_needs_a_file(serving, tmp_path):
    with pytest.raises(RooftraceError, match=r"there is no measured file 'run\.json' here; drop it on the page again"):
        serving.ask(serving.session(tmp_path).fit("a", {"file": "run.json"}))


@pytest.mark.slow(reason="a server and processes of its own")
def test_a_fit_moves_the_figures_towards_the_measurement(serving, tmp_path):
    session = serving.session(tmp_path / "results", Scenario.load(EXAMPLES / "deployment.yaml"))
    serving.run(session.bench("a", {}, "made-8.json", (EXAMPLES / "made-8.json").read_bytes()))
    fitted = last(serving.ask(session.fit("a", {"file": "made-8.json"})), "fitted")
    assert fitted["after"]["tpot_mean_s"] <= fitted["before"]["tpot_mean_s"]
    exact = last(serving.ask(session.run("a", {"set": fitted["set"]})), "exact")
    assert exact["trust"]["tier"] == "fitted to your runs"


def test_requests_of_a_run_are_bounded(serving, tmp_path):
    session = serving.session(tmp_path, limits=Limits(rows=50))
    key = last(serving.ask(session.run("", {})), "exact")["key"]
    found = serving.run(session.requests(key))
    assert found["of"] == 120
    assert {len(column) for column in found["columns"].values()} == {50}


def test_a_timeline_is_what_perfetto_opens(serving, tmp_path):
    session = serving.session(tmp_path)
    key = last(serving.ask(session.run("", {})), "exact")["key"]
    events = json.loads(gzip.decompress(serving.run(session.timeline(key))))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) > 120


def test_a_run_that_nobody_asked_for_is_unknown(serving, tmp_path):
    with pytest.raises(RooftraceError, match="this run is not known here any more; run it again"):
        serving.run(serving.session(tmp_path).requests("0" * 20))


def test_superseded_work_is_killed_and_another_process_takes_its_place(serving):
    async def give_up() -> int:
        events = serving.workers.events("exact", _Sleep(600), most_s=600)
        begun = await anext(events)
        await events.aclose()
        return begun.data["pid"]

    pids = {serving.run(give_up()) for _ in range(4)}
    assert len(pids) == 4
    assert all(map(gone, pids))
    assert [name for name, _ in serving.ask(serving.workers.events("exact", _Sleep(0), most_s=60))] == ["begun", "over"]


def test_quick_work_does_not_wait_for_long_work(serving):
    async def quick_beside_long() -> list[str]:
        long = [serving.workers.events("exact", _Sleep(600), most_s=600) for _ in range(2)]
        for each in long:
            await anext(each)
        said = [event.name async for event in serving.workers.events("quick", _Sleep(0), most_s=60)]
        for each in long:
            await each.aclose()
        return said

    assert serving.run(quick_beside_long()) == ["begun", "over"]


def test_work_that_waits_in_vain_is_skipped(serving):
    async def give_up_waiting() -> None:
        long = [serving.workers.events("exact", _Sleep(600), most_s=600) for _ in range(2)]
        for each in long:
            await anext(each)
        waiting = asyncio.ensure_future(anext(serving.workers.events("exact", _Sleep(0), most_s=60)))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        for each in long:
            await each.aclose()

    serving.run(give_up_waiting())
    assert [name for name, _ in serving.ask(serving.workers.events("exact", _Sleep(0), most_s=60))] == ["begun", "over"]


def test_work_beyond_its_time_is_stopped(serving):
    with pytest.raises(RooftraceError, match=r"it took more than 0\.3 s and was stopped; ask for less"):
        serving.ask(serving.workers.events("exact", _Sleep(600), most_s=0.3))


def test_a_worker_that_dies_is_replaced(serving):
    with pytest.raises(RooftraceError, match="the process that ran it died"):
        serving.ask(serving.workers.events("exact", _Die(), most_s=60))
    assert [name for name, _ in serving.ask(serving.workers.events("exact", _Sleep(0), most_s=60))] == ["begun", "over"]


def test_a_policy_that_was_edited_is_run_anew(serving, tmp_path, monkeypatch):
    """A worker that has loaded a module of the user's own makes room for one that has not."""
    file = tmp_path / "policy_of_mine.py"
    monkeypatch.syspath_prepend(tmp_path)
    base = SMALL.with_set("workload.limit=20", "router={policy: policy_of_mine:Mine}", "replicas=2")

    async def machines_chosen() -> list[set[int]]:
        workers = Workers(1)
        await workers.start()
        found = []
        for machine, more in ((0, ""), (1, "# edited\n")):
            file.write_text(f"{more}class Mine:\n    def route(self, request, loads, /):\n        return {machine}\n")
            session = Session(base, tmp_path / "points", workers)
            key = [event async for event in session.run("", {})][-1].data["key"]
            found.append(set((await session.requests(key))["columns"]["machine"]))
        await workers.close()
        return found

    assert serving.run(machines_chosen()) == [{0}, {1}]


def test_closing_ends_all_processes(serving):
    async def some() -> list[int]:
        workers = Workers(2)
        await workers.start()
        pids = workers.processes
        events = workers.events("exact", _Sleep(600), most_s=600)
        await anext(events)
        await events.aclose()
        pids += workers.processes
        await workers.close()
        return pids

    pids = serving.run(some())
    assert len(set(pids)) >= 3
    assert all(map(gone, pids))


class _Sleep:
    """`sleeps`, which travels to another process."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self) -> Any:
        return sleeps(self._seconds)


class _Die:
    def __call__(self) -> Any:
        os._exit(1)
        yield
