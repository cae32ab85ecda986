"""Result files as they are read: published samples where they are at hand, and files of our own after the tools' fields."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.bench import BenchRun, to_frame
from sim.bench.compare import strange
from sim.bench.facts import with_facts
from sim.bench.load import load_of
from sim.bench.reading import read_bytes, read_files
from sim.errors import RooftraceError
from sim.scenario import Scenario
from tests.bench import own
from tests.bench.fuzz import FIXTURES

published = pytest.mark.skipif(not FIXTURES.is_dir(), reason="the published samples are not beside the repository")


def of(text: str | dict[str, Any] | list[Any]) -> list[BenchRun]:
    data = text if isinstance(text, str) else json.dumps(text)
    found = read_bytes(data.encode(), name="a", file="a")
    assert not found.problems, found.problems
    return list(found.runs)


def refused(text: str | dict[str, Any]) -> str:
    data = text if isinstance(text, str) else json.dumps(text)
    found = read_bytes(data.encode(), name="a", file="a")
    assert not found.runs
    (sentence,) = found.problems
    return sentence


def sample(name: str) -> BenchRun:
    (run,) = read_files([FIXTURES / name]).runs
    return run


@published
def test_vllm_in_milliseconds_with_the_old_key_of_goodput() -> None:
    run = sample("vllm_bench/vllm_bench_h100_2replicas.json")
    assert run.format == "vllm bench serve"
    assert (run.offered.rate_per_s, run.offered.burstiness, run.offered.concurrency) == (3.6, 100.0, None)
    assert (run.completed, run.failed, run.duration_s) == (200, 0, 57.42171942605637)
    assert run.ttft is not None
    assert run.ttft.mean_s == pytest.approx(0.24357119981985306)
    assert run.ttft.quantiles_s == pytest.approx({0.95: 0.2570488001947524, 0.99: 0.26166546687526766})
    assert (run.offered.prompt.mean_tokens, run.offered.output.mean_tokens) == (7999.0, 200.0)
    assert run.config["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert run.missing == ()


@published
def test_requests_that_failed_are_those_that_did_not_complete() -> None:
    run = sample("vllm_bench/vllm_bench_a100_failures.json")
    assert (run.completed, run.failed, run.offered.requests) == (240, 10, 250)
    assert any("10 of 250 requests failed" in note for note in run.notes)


@published
def test_vllm_in_seconds() -> None:
    run = sample("vllm_bench/inferencex_seconds.json")
    assert run.tpot is not None
    assert (run.tpot.median_s, run.tpot.mean_s) == (0.021819560194578695, None)
    assert (run.offered.rate_per_s, run.offered.concurrency) == (math.inf, 16)


@published
def test_aiperf_says_the_same_three_ways() -> None:
    runs = [sample(f"aiperf/profile_export{end}") for end in ("_aiperf.json", "_aiperf.csv", ".jsonl")]
    for run in runs:
        assert (run.completed, run.failed) == (89, 11)
        for quantity in ("ttft", "tpot", "itl", "e2el"):
            theirs, ours = getattr(runs[0], quantity), getattr(run, quantity)
            assert ours.mean_s == pytest.approx(theirs.mean_s, rel=1e-3)
            assert ours.at("p99") == pytest.approx(theirs.at("p99"), rel=1e-3)
        assert run.output_tokens == 21624
    assert runs[0].offered.concurrency == 100
    assert runs[1].missing == ("rate_per_s", "concurrency")


@published
def test_guidellm_of_both_versions() -> None:
    one = sample("guidellm/guidellm_benchmarks_v1.json")
    assert (one.format, one.offered.concurrency, one.completed) == ("GuideLLM v1", 1, 46)
    assert one.tpot is not None
    assert one.tpot.mean_s == pytest.approx(4.941609e-3)
    runs = read_files([FIXTURES / "guidellm/guidellm_report_v2.json"]).runs
    assert [run.offered.rate_per_s for run in runs] == [2.0, 4.0]
    assert {run.format for run in runs} == {"GuideLLM v2"}
    assert runs[0].offered.burstiness == math.inf
    assert runs[0].offered.shared is not None
    assert (runs[0].offered.shared.groups, runs[0].offered.shared.prefix_tokens) == (4, 16)


@published
def test_guidellm_counts_what_lies_between_warm_up_and_cool_down() -> None:
    document = json.loads((FIXTURES / "guidellm/guidellm_report_v2.json").read_text())
    (plain, _) = of(document)
    one = document["benchmarks"][0]
    one |= {"warmup_duration": one["duration"], "cooldown_duration": 0.5 * one["duration"]}
    (run, _) = of(document)
    assert plain.offered.requests is not None
    assert plain.duration_s is not None
    assert run.offered.requests == 2.5 * plain.offered.requests
    assert run.duration_s == pytest.approx(2.5 * plain.duration_s)
    assert (run.completed, run.requests_per_s) == (plain.completed, plain.requests_per_s)
    (note,) = set(run.notes) - set(plain.notes)
    assert "are taken to have been sent" in note


@published
def test_blank_lines_that_were_counted_as_tokens_are_taken_out_with_a_note() -> None:
    run = sample("inference_perf/stage_3_lifecycle_metrics.json")
    assert run.tpot is not None
    # The server's own histogram over the same stage has 15.4 ms.
    assert run.tpot.mean_s == pytest.approx(0.0154, rel=0.02)
    assert run.itl is None
    assert any("blank lines" in note for note in run.notes)
    newer = sample("inference_perf/inference_perf_lifecycle.yaml")
    assert newer.tpot is not None
    assert newer.tpot.how == "as given"


@published
def test_clients_at_their_limit_send_longer_and_the_stage_is_saturated_all_the_same() -> None:
    # 44 workers with 10 requests each, of figures made up: 7,200 requests at 120/s went out in 70 s and were answered in 73.
    def of(mean: float) -> dict[str, float]:
        return {"mean": mean, "min": mean, "median": mean, "p90": mean}

    latency = {"time_to_first_token": of(2.6), "time_per_output_token": of(0.0195), "request_latency": of(3.83)}
    report = {
        "load_summary": {"count": 7200, "send_duration": 70.0, "requested_rate": 120.0, "achieved_rate": 102.9},
        "successes": {
            "count": 7200, "latency": latency, "prompt_len": of(200), "output_len": of(64),
            "throughput": {"requests_per_sec": 7200 / 73, "output_tokens_per_sec": 64 * 7200 / 73},
        },
        "failures": {"count": 0},
    }  # fmt: skip
    (run,) = read_bytes(json.dumps(report).encode(), name="a", file="a").runs
    assert run.saturated is True


def test_releases_of_vllm_before_the_key_was_mended_did_not_stretch_times(tmp_path: Path) -> None:
    old, new = (own.VLLM_DETAILED | more for more in ({"request_goodput:": None}, {}))
    found = [read_bytes(json.dumps(one).encode(), name="a", file="a").runs[0].offered.fills_time for one in (old, new)]
    assert found == [False, True]


@published
def test_the_servers_side_of_a_stage() -> None:
    run = sample("inference_perf/stage_3_prometheus_metrics.json")
    assert run.ttft is None
    assert run.server is not None
    assert run.server.ttft is not None
    assert (run.server.ttft.mean_s, run.server.preemptions) == (0.038419, 0)


@published
def test_metrics_of_sglang() -> None:
    run = sample("prometheus/sglang_metrics.prom")
    assert run.server is not None
    assert (run.server.running, run.server.waiting, run.server.kv_used) == (162.0, 2826.0, 0.28)
    assert run.server.ttft is not None
    # 77 % of the first tokens lie above the last bucket.
    assert run.server.ttft.median_s is None
    assert run.server.ttft.at("p10") == pytest.approx(7.5 + 2.5 * (1100.8 - 941) / (1330 - 941))


def test_vllm_with_details_has_rows() -> None:
    (run,) = of(own.VLLM_DETAILED)
    assert run.rows is not None
    assert run.rows.failed.tolist() == [False, False, False, True]
    assert run.rows.sent_s.tolist() == pytest.approx([0.0, 0.4, 1.0, 1.5])
    assert run.rows.e2el_s[:3] == pytest.approx([0.09, 0.09, 0.06])
    assert run.rows.tpot_s[:3] == pytest.approx([0.02, 0.01, 0.02])
    assert run.offered.prompt.each_tokens == (100, 110, 90, 100)
    assert run.offered.output.each_tokens == (3, 4, 2)


def test_lines_of_sglang_are_runs() -> None:
    runs = of(own.FILES["sglang.jsonl"])
    assert [run.offered.rate_per_s for run in runs] == [2.0, 4.0, math.inf]
    assert runs[0].offered.prompt.distribution == {"distribution": "uniform", "min_tokens": 512, "max_tokens": 1024}
    assert runs[0].config["tensor_parallel"] == 2


def test_a_line_that_is_cut_off_leaves_the_others() -> None:
    text = own.FILES["sglang.jsonl"]
    found = read_bytes(text[:-40].encode(), name="a", file="a")
    assert len(found.runs) == 2
    assert found.problems == ("a: line 3 is left out: it is cut off: the JSON ends in line 1 before its last bracket",)


def test_genai_perf() -> None:
    (run,) = of(own.GENAI_PERF)
    assert run.format == "genai-perf JSON"
    assert run.tpot is not None
    assert (run.offered.concurrency, run.tpot.mean_s, run.completed) == (1, 7.4e-3, 20)


def test_metrics_of_vllm() -> None:
    (run,) = of(own.VLLM_PROMETHEUS)
    side = run.server
    assert side is not None
    assert (side.running, side.waiting, side.kv_used, side.kv_tokens, side.preemptions) == (3.0, 1.0, 0.25, 16_000, 2)
    assert (side.prefix_hit, side.accepted, side.acceptance_length, side.finished) == (0.25, 0.5, 2.5, 10)
    assert side.ttft is not None
    assert (side.ttft.mean_s, side.ttft.median_s) == pytest.approx((0.035, 0.03))
    assert side.ttft.at("p90") is None
    assert (run.offered.prompt.mean_tokens, run.offered.output.mean_tokens) == (100.0, 40.0)


def test_busy_lines_of_a_log() -> None:
    (run,) = of(own.VLLM_LOG)
    assert run.server is not None
    assert (run.output_tokens_per_s, run.server.running, run.server.kv_used) == pytest.approx((40.0, 3.0, 0.2))
    assert (run.server.kv_tokens, run.server.preemptions) == (446_128, 3)


def test_the_load_behind_a_log_follows_from_throughput_and_one_fact() -> None:
    lines = [each for each in own.VLLM_LOG.splitlines(keepends=True) if "Running: 4" not in each]
    quiet = "".join(lines)
    (run,) = of(quiet)
    assert run.missing[0] == "rate_per_s"
    for fact in ({"output_tokens": 10}, {"rate_per_s": 2.0}):
        told = with_facts(run, fact)
        assert (told.offered.rate_per_s, told.offered.output.mean_tokens) == pytest.approx((2.0, 10.0))
        assert (told.offered.prompt.mean_tokens, told.missing) == (50.0, ())
        # One busy line, twenty seconds before the next.
        assert told.offered.duration_s == 20.0
        # Little's law: 2 requests under way, 20 tokens a second.
        assert told.running_s_per_token == pytest.approx(0.1)
    assert run.server is not None
    assert run.server.running_error == pytest.approx(2**-0.5)


def test_engines_that_log_beside_each_other_are_one_server() -> None:
    one = "".join(line for line in own.VLLM_LOG.splitlines(keepends=True) if "Running: 4" not in line)
    both = "".join(line + line.replace("Engine 000", "Engine 001") for line in one.splitlines(keepends=True))
    (single,), (double,) = of(one), of(both)
    assert single.server is not None
    assert double.server is not None
    for name in ("output_tokens_per_s", "input_tokens_per_s"):
        assert getattr(double, name) == 2 * getattr(single, name)
    (one_running, one_error), (running, error) = (
        (server.running, server.running_error) for server in (single.server, double.server)
    )
    assert one_running is not None
    assert one_error is not None
    assert running == 2 * one_running
    assert error == pytest.approx(one_error / 2**0.5)
    assert double.offered.duration_s == single.offered.duration_s
    assert double.running_s_per_token == single.running_s_per_token
    assert "2 engines log here" in " ".join(double.notes)


def test_prompts_that_follow_from_throughput_lack_what_the_cache_had() -> None:
    quiet = "".join(line for line in own.VLLM_LOG.splitlines(keepends=True) if "Running: 4" not in line)
    (run,), (cold,) = (
        of(quiet),
        of(quiet.replace("hit rate: 60.0%", "hit rate: 0.0%").replace("rate: 50.0%", "rate: 0.0%")),
    )
    assert "of prompt tokens were found in the prefix cache" in with_facts(run, {"rate_per_s": 2.0}).notes[-1]
    assert "cache" not in with_facts(cold, {"rate_per_s": 2.0}).notes[-1]
    assert "cache" not in with_facts(run, {"rate_per_s": 2.0, "prompt_tokens": 80}).notes[-1]


def test_a_log_with_requests_waiting_does_not_say_what_was_offered() -> None:
    (run,) = of(own.VLLM_LOG)
    told = with_facts(run, {"output_tokens": 10})
    assert "rate_per_s" in told.missing
    assert any("requests waited" in note for note in told.notes)


def test_lines_may_end_in_carriage_returns() -> None:
    for text in (own.RUNS, own.REQUEST_LOG):
        for end in ("\r", "\r\n"):
            there, here = (read_bytes(each.encode(), name="a", file="a") for each in (text.replace("\n", end), text))
            assert [run.to_record() for run in there.runs] == [run.to_record() for run in here.runs]
    assert read_bytes(b"a\rb,c\n1,2\n", name="a", file="a").problems


def test_a_request_that_failed_before_it_was_timed_leaves_the_log() -> None:
    (run,) = of(own.REQUEST_LOG + ",,,190,,rejected\n")
    assert (run.completed, run.failed, run.missing) == (3, 2, ())
    load = load_of(run, 0)
    assert load.workload.arrival_ns.tolist() == [0, 500_000_000, 700_000_000]  # type: ignore[union-attr]


def test_a_log_of_requests_is_an_open_load() -> None:
    (run,) = of(own.REQUEST_LOG)
    assert (run.completed, run.failed, run.missing) == (3, 1, ())
    assert run.ttft is not None
    assert run.ttft.mean_s == pytest.approx((0.05 + 0.06 + 0.07) / 3)
    assert any("not in order of arrival" in note for note in run.notes)


def test_a_row_that_is_no_run_leaves_the_others() -> None:
    found = read_bytes(own.RUNS.encode(), name="a", file="a")
    assert [run.offered.rate_per_s for run in found.runs] == [2.0, 8.0]
    assert found.runs[0].config == {"arm": "a"}
    assert found.problems == ("a: row 2: ttft_mean_ms is a number; got 'x'",)


def test_single_requests_of_inference_perf() -> None:
    (run,) = of(own.REQUESTS_OF_INFERENCE_PERF)
    assert run.ttft is not None
    assert run.tpot is not None
    assert (run.ttft.mean_s, run.tpot.mean_s) == pytest.approx((0.1, 0.075))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completed": 0, "failed": 4}, "no request completed"),
        ({"mean_ttft_ms": -3.0}, "mean_ttft_ms is at least 0; got -3 (a clock that ran backwards?)"),
        ({"mean_ttft_ms": "fast"}, "mean_ttft_ms is a number; got 'fast'"),
        ({"request_rate": "soon"}, "request_rate is a number of requests a second or inf; got 'soon'"),
        ({"duration": 0}, "duration is above 0"),
        ({"max_concurrency": 0}, "max_concurrency is at least 1 or null; got 0"),
        ({"completed": 9, "failed": None}, "completed is 9, more than the 4 prompts"),
    ],
)
def test_what_cannot_be_is_one_sentence(change: dict[str, Any], words: str) -> None:
    assert words in refused({**own.VLLM_DETAILED, **change})


def test_tokens_that_do_not_add_up_are_noted() -> None:
    (run,) = of({**own.VLLM_DETAILED, "total_output_tokens": 90})
    assert any("output tokens of the requests add up to 9; the file gives 90" in note for note in run.notes)
    assert any("90 output tokens in 2.5 s are 36 a second; the file says 3.6" in note for note in run.notes)


def test_requests_whose_clock_ran_backwards_are_counted_as_failed() -> None:
    (run,) = of({**own.VLLM_DETAILED, "ttfts": [0.05, -0.06, 0.04, 0.0]})
    assert run.rows is not None
    assert run.rows.failed.tolist() == [False, True, False, True]
    assert any("end before they begin" in note for note in run.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("{", "it is cut off"),
        ('{"a": 1}', "it is not a result that is known here (its keys: 'a'); read are vllm bench serve"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("[" * 100_000, "it is nested or filled beyond"),
        ("a,b,c\n1,2,3\n", "it is a table, and its columns"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("vllm:x_total counter\nvllm:y gauge\n", "holds no values"),
        ("# TYPE go_threads gauge\ngo_threads 3\n", "none of vLLM"),
    ],
)
def test_what_is_no_result_is_one_sentence(text: str, words: str) -> None:
    assert words in refused(text)


def test_a_folder_or_a_file_that_is_not_there_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(own.VLLM_DETAILED))
    found = read_files([tmp_path, tmp_path / "b.json", tmp_path / "a.json"])
    assert [run.name for run in found.runs] == ["a"]
    assert [problem.rpartition(": ")[2] for problem in found.problems] == [
        "it is a folder; give the files in it",
        "there is no such file",
    ]


def test_a_table_of_runs_has_units_in_its_names() -> None:
    frame = to_frame([*of(own.VLLM_DETAILED), *of(own.GENAI_PERF)])
    assert frame["ttft_mean_s"].tolist() == pytest.approx([0.05, 0.03])
    assert frame["output_tokens_per_s"].tolist() == pytest.approx([3.6, 128.0])
    assert np.isnan(frame["rate_req_s"][1])


VLLM_LATER = "\n".join(
    re.sub(r" ([\d.]+)$", lambda found: f" {3 * float(found[1])}", line) if line and line[0] != "#" else line
    for line in own.VLLM_PROMETHEUS.splitlines()
)
"""The same server after twice as much again: every value is three times what it was."""


def test_metrics_of_a_server_less_those_before_are_of_the_time_between() -> None:
    before, after = own.VLLM_PROMETHEUS, VLLM_LATER
    (run,) = read_bytes(after.encode(), name="a", file="a", before=before).runs
    server = run.server
    assert server is not None
    assert (server.finished, server.prompt_tokens, server.output_tokens, server.preemptions) == (20, 2000, 800, 4)
    assert (server.prefix_hit, server.accepted) == (0.25, 0.5)
    assert server.ttft is not None
    assert (server.ttft.count, server.ttft.mean_s, server.ttft.median_s) == (20, pytest.approx(0.035), 0.03)
    assert (server.running, server.kv_tokens) == (9.0, 16_000)  # gauges are as they were scraped last
    assert run.notes == ("counters and histograms are those of this scrape less those of the one before",)


@pytest.mark.parametrize("typed", [True, False], ids=["with types", "without"])
def test_a_difference_is_the_same_with_and_without_types(typed: bool) -> None:
    counters = [f"# TYPE {name} counter" for name in ("vllm:num_preemptions_total", "vllm:prompt_tokens_total")]
    text = "\n".join([*(counters if typed else []), VLLM_LATER])
    (run,) = read_bytes(text.encode(), name="a", file="a", before=own.VLLM_PROMETHEUS).runs
    assert run.server is not None
    assert (run.server.preemptions, run.server.prompt_tokens) == (4, 2000)


def test_metrics_that_fell_are_no_difference() -> None:
    found = read_bytes(own.VLLM_PROMETHEUS.encode(), name="a", file="a", before=VLLM_LATER)
    assert not found.runs
    (problem,) = found.problems
    assert "is less than before: the server was started anew between, or the two are swapped" in problem


def test_a_file_without_metrics_is_refused_as_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    (tmp_path / "after.prom").write_text(VLLM_LATER)
    with pytest.raises(RooftraceError, match=r"log.csv: it has no metrics of a server"):
        read_files([tmp_path / "after.prom"], before=tmp_path / "log.csv")


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "said"),
    [
        (90, 12, []),
        (0.09, 12, ["a TTFT of 0.09 ms is of no server"]),
        (90_000, 12_000, ["a TPOT of 1.2e+04 ms is of no server"]),
        (90, 0, ["a TPOT of 0 ms is of no server"]),
    ],
)
def test_latencies_of_another_unit_than_they_are_said_to_be_are_noted(
    ttft_ms: float, tpot_ms: float, said: list[str]
) -> None:
    columns = "rate_req_s,requests,prompt_tokens,output_tokens,ttft_mean_ms,tpot_mean_ms"
    (run,) = of(f"{columns}\n1,100,1000,200,{ttft_ms},{tpot_ms}\n")
    assert [note.split(":")[0] for note in run.notes] == said
    (one_token,) = of(f"{columns}\n1,100,1000,1,90,0\n")
    assert not one_token.notes


def test_files_of_another_model_or_engine_are_noted() -> None:
    beside = {"perf_analyzer": {"stimulus": {"concurrency": 1}}, "model_names": ["Qwen/Qwen3-32B"]}
    (of_model,) = of({**own.GENAI_PERF, "input_config": beside})
    (of_engine,) = of(own.SGLANG)
    scenario = Scenario.default()
    assert strange(scenario, [of_model]) == [
        "files name the model Qwen/Qwen3-32B, and the scenario simulates llama-3.1-8b"
    ]
    assert strange(scenario, [of_engine]) == [
        f"files were measured with the backend {own.SGLANG['backend']}, and the scenario simulates vllm"
    ]
    assert strange(scenario.with_set("serving_stack=sglang", "scheduler=sglang"), [of_engine]) == []
    assert strange(scenario.with_set("serving_stack=ideal"), [of_engine]) == []


def of_phases(*phases: dict[str, Any]) -> BenchRun:
    (run,) = of({**own.GENAI_PERF, "aiperf_version": "0.13.0", "input_config": {"phases": list(phases)}})
    return run


def test_phases_of_aiperf_say_the_load() -> None:
    warmup = {"name": "w", "kind": "warmup", "type": "concurrency", "concurrency": 2, "requests": 5}
    run = of_phases(warmup, {"name": "p", "kind": "profiling", "type": "poisson", "rate": 7.5, "concurrency": 64})
    assert (run.offered.rate_per_s, run.offered.concurrency, run.offered.burstiness) == (7.5, 64, 1.0)
    assert of_phases({"type": "gamma", "rate": 3, "smoothness": 0.5}).offered.burstiness == 0.5
    assert of_phases({"type": "constant", "rate": 3}).offered.burstiness == math.inf
    ramped = of_phases({"type": "concurrency", "concurrency": 8, "concurrency_ramp": {"duration": 30.0}})
    assert (ramped.offered.concurrency, ramped.offered.ramp) == (8, {"clients_s": 30.0})


def test_phases_of_aiperf_that_no_one_load_stands_for_are_noted() -> None:
    run = of_phases({"type": "poisson", "rate": 1}, {"type": "poisson", "rate": 2})
    assert run.offered.rate_per_s is None
    assert "2 phases were measured" in run.notes[0]
    assert "followed a series" in of_phases({"type": "poisson", "rate_series": {"points": []}}).notes[0]
    assert "rose to its value" in of_phases({"type": "poisson", "rate": 2, "rate_ramp": 10}).notes[0]


def test_a_recorded_run_of_the_public_measurements_is_a_log_of_requests() -> None:
    text = "request_id,input_toks,output_toks,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s\n"
    (run,) = read_bytes((text + "a,64,3,0.5,0.5,0.6,1.0,2.0\n").encode(), name="a", file="a.csv").runs
    assert run.rows is not None
    assert (run.rows.ttft_s[0], run.rows.tpot_s[0], run.rows.prompt_tokens[0]) == (0.5, 0.5, 64)
