import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim import metrics
from sim.cli import build_app
from sim.engine.disaggregation.handovers import Handovers
from sim.results import FILES, Result
from sim.scenario import Scenario
from tests.engine.build import patches_the_engine

APP = build_app()
TINY = ["--set", "workload.limit=20"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def rooftrace(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def everything_under(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def assert_refused(result, expected, *, left=()):
    """Exit code 2, one sentence on standard error, nothing on standard output, nothing written."""
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert everything_under(".") == sorted(left)


def trace(text, name="trace.csv"):
    Path(name).write_text(text)
    return name


def test_without_arguments_results_go_to_a_folder_and_the_table_says_which():
    result = rooftrace("run", "--no-plots", *TINY)
    assert result.exit_code == 0, result.output
    folder = next(Path("results").iterdir())
    assert f"results/{folder.name}/" in result.stdout
    assert "TTFT" in result.stdout
    assert "20: 20 finished" in result.stdout
    memory = json.loads((Path("results") / folder.name / "manifest.json").read_text())["memory"]
    text = " ".join(result.stdout.split())
    assert f"KV cache {memory['blocks']:,} blocks of 16 tokens" in text
    assert "gpu_memory_utilization 0.92 of 79.19 GiB, by vllm 0.32: weights 14.96, activations" in text
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES[:4])


def test_a_run_says_what_it_wrote_and_its_commands_show_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = rooftrace("run", "--no-plots", *TINY, "--out", "out")
    said = result.stdout.splitlines()
    (files,) = [line for line in said if line.startswith("Results")]
    assert files.split(": ")[1].strip().split(", ") == sorted(FILES[:4])
    commands = [line[line.index("rooftrace") :].strip() for line in said if "rooftrace " in line]
    assert [command.split()[1] for command in commands] == ["plot", "compare", "export"]
    for command in commands:
        shown = rooftrace(*command.replace("OTHER", "out").split()[1:])
        assert shown.exit_code == 0, shown.output
    assert Path("out.html").is_file()
    assert "out/report.html in a browser" in rooftrace("run", "--no-plots", "--html", *TINY, "--out", "out").stdout


def test_json_prints_the_summary_and_nothing_else():
    result = rooftrace("run", "--json", "--no-plots", *TINY, "--out", "out")
    assert json.loads(result.stdout) == json.loads(Path("out/summary.json").read_text())
    assert set(json.loads(result.stdout)["ttft_s"]) == set(metrics.STATISTICS)


def test_same_scenario_and_seed_give_the_same_whole_folder_but_for_wall_s():
    for out in ("a", "b"):
        assert rooftrace("run", *TINY, "--set", "replicas=2", "--set", "router=random", "--out", out).exit_code == 0
        assert sorted(path.name for path in Path(out).iterdir()) == sorted(FILES)
    for name in FILES:
        first, second = (Path(out, name).read_bytes() for out in ("a", "b"))
        if name == "summary.json":
            summaries = [json.loads(content) for content in (first, second)]
            for summary in summaries:
                assert summary.pop("wall_s") > 0
            assert summaries[0] == summaries[1]
            text = [[line for line in content.split(b"\n") if b"wall_s" not in line] for content in (first, second)]
            assert text[0] == text[1]
        else:
            assert first == second, name


def test_another_seed_gives_other_results():
    for out, seed in (("a", 0), ("b", 1)):
        rooftrace("run", "--no-plots", *TINY, "--set", f"seed={seed}", "--out", out)
    assert Path("a/requests.parquet").read_bytes() != Path("b/requests.parquet").read_bytes()


def test_the_manifest_holds_the_scenario_as_run():
    rooftrace("run", "--no-plots", *TINY, "--set", "scheduler={policy: vllm-v0}", "--set", "seed=3", "--out", "out")
    manifest = json.loads(Path("out/manifest.json").read_text())
    again = Scenario.from_mapping(manifest["scenario"])
    assert again.scheduler.policy == "vllm-v0"
    assert again.hash == manifest["hash"]
    assert manifest["seed"] == 3
    assert "max_num_batched_tokens=8192" in manifest["scheduler"]
    assert manifest["hardware"]["name"] == "h100-sxm"
    assert "whitepaper" in manifest["hardware"]["sources"]["peak.bf16"]
    assert {"python", "rooftrace", "numpy", "simpy"} <= set(manifest["versions"])
    assert Result.load("out").label == "llama-3.1-8b on 1 x h100-sxm, vllm-v0"


def test_a_request_that_can_never_fit_is_rejected_and_the_rest_goes_on():
    trace("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,60000000,5\n2,10,5\n")
    result = rooftrace("run", "--no-plots", "--set", "workload.trace=trace.csv", "--out", "out")
    assert result.exit_code == 0
    assert "3: 2 finished, 1 rejected" in result.stdout
    assert "context of 131072 tokens" in result.stdout
    loaded = Result.load("out")
    assert loaded.summary["requests"] == {"total": 3, "finished": 2, "rejected": 1, "unfinished": 0}
    assert loaded.requests["status"].tolist() == ["finished", "rejected", "finished"]
    assert "context of 131072" in loaded.requests["reason"][1]


def test_only_single_pass_requests_leave_token_latencies_empty():
    trace("arrival_s,prompt_tokens,output_tokens\n0,10,1\n1,20,1\n")
    assert rooftrace("run", "--set", "workload.trace=trace.csv", "--out", "out").exit_code == 0
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["tpot_s"]["mean"] is None
    assert summary["itl_s"]["p99"] is None
    assert summary["ttft_s"]["mean"] > 0


@pytest.mark.parametrize(
    "command", [("run", "--no-plots"), ("sweep", "--axis", "workload.rate_scale=1", "--jobs", "1")]
)
def test_a_limit_joins_those_of_the_slo(command):
    Path("mine.yaml").write_text("workload: {trace: conversation, limit: 20}\nslo: {ttft_s: 1}\n")
    limits = ("--limit", "ttft_p95=2s", "--limit", "tpot=40ms")
    result = rooftrace(command[0], "mine.yaml", *command[1:], *limits, "--out", "out")
    assert result.exit_code == 0
    manifest = json.loads(Path("out/manifest.json").read_text())
    slo = (manifest.get("scenario") or manifest["base"])["slo"]
    assert {key: value for key, value in slo.items() if value} == {"ttft_s": 1.0, "ttft_p95_s": 2.0, "tpot_s": 0.04}


def test_what_a_run_leaves_out_of_the_trace_is_said():
    trace("arrival_s,prompt_tokens,output_tokens,model\n0,10,1,small\n1,20,1,large\n")
    result = rooftrace("run", "--json", "--no-plots", "--set", "workload.trace=trace.csv", "--out", "out")
    assert "Note: The trace asks for 2 models (small, large); all requests go to llama-3.1-8b." in result.stderr
    assert json.loads(result.stdout)["requests"]["finished"] == 2
    assert json.loads(Path("out/manifest.json").read_text())["notes"] == [result.stderr.strip().removeprefix("Note: ")]


HEAD = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "trace.csv"),
        (HEAD, "request"),
        (HEAD + "0,-5,1\n", "line 2"),
        (HEAD + "0,1.5,1\n", "line 2"),
        (HEAD + "0,5,1\n1,abc,1\n", "line 3"),
        (HEAD + "0,0,0\n", "line 2"),
        (HEAD + "nan,5,1\n", "line 2"),
        (HEAD + "5,5,1\n1,5,1\n", "line 3"),
        ("arrival_s,prompt_tokens\n0,5\n", "output_tokens"),
    ],
    ids=["empty", "no-rows", "negative", "fraction", "text", "neither", "nan", "unsorted", "missing-column"],
)
def test_a_bad_trace_is_refused(content, expected):
    trace(content)
    assert_refused(rooftrace("run", "--set", "workload.trace=trace.csv"), expected, left=["trace.csv"])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("model=lama", "unknown model"),
        ("hardware=h1000", "unknown hardware"),
        ("scheduler=sarthi", "did you mean sarathi?"),
        ("replikas=2", "did you mean replicas?"),
        ("scheduler.max_nun_seqs=2", "did you mean max_num_seqs?"),
        ("model=llama-3.1-70b", "GB is missing"),
        ("memory.gpu_memory_utilization=.nan", "finite number"),
        ("seed=[", "not valid YAML"),
        ("workload.trace=nowhere.csv", "does not exist"),
    ],
)
def test_a_bad_setting_is_refused(assignment, expected):
    assert_refused(rooftrace("run", "--set", assignment), expected)


def test_an_unknown_key_in_a_file_names_the_file_the_key_and_the_nearest():
    Path("mine.yaml").write_text("shceduler: sarathi\n")
    expected = "mine.yaml: shceduler is not a setting; did you mean scheduler?"
    assert_refused(rooftrace("run", "mine.yaml"), expected, left=["mine.yaml"])


def test_a_missing_scenario_file_is_refused():
    assert_refused(rooftrace("run", "nowhere.yaml"), "scenario nowhere.yaml does not exist")


def test_a_model_file_with_missing_fields_is_refused():
    Path("config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')
    assert_refused(rooftrace("run", "--set", "model=config.json"), "config.json", left=["config.json"])


def test_an_output_folder_with_other_files_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("sim.run.run_built", lambda built: pytest.fail("simulated before looking at the folder"))
    Path("precious").mkdir()
    Path("precious/thesis.txt").write_text("years")
    result = rooftrace("run", "--out", "precious")
    assert_refused(result, "choose another --out", left=["precious", "precious/thesis.txt"])
    assert_refused(
        rooftrace("run", "--out", "precious/thesis.txt"), "is a file", left=["precious", "precious/thesis.txt"]
    )


def test_an_unwritable_output_folder_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("sim.run.run_built", lambda built: pytest.fail("simulated before looking at the folder"))
    # Nobody, root included, can make a folder there.
    assert_refused(rooftrace("run", "--out", "/proc/rooftrace/out"), "choose another --out")


@pytest.mark.parametrize("where", ["sim.run.run", "sim.results.result.write_parquet", "sim.plots.runs.save"])
def test_ctrl_c_leaves_nothing_and_exits_with_130(monkeypatch, where):
    def interrupt(*_arguments, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    result = rooftrace("run", *TINY, "--out", "deep/out")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert everything_under(".") == []


def test_a_disk_that_records_of_iterations_fill_is_a_sentence(monkeypatch):
    def full(*_arguments, **_settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sim.engine.record.spill.IN_MEMORY_BYTES", 1)
    monkeypatch.setattr("sim.engine.record.spill._LEAST_BYTES", 1)
    monkeypatch.setattr("sim.engine.record.spill.tempfile.TemporaryFile", full)
    assert_refused(rooftrace("run", *TINY, "--out", "deep/out"), "No space left on device; choose another --out")


@pytest.mark.slow(reason="processes are started and ended")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing(number, code):
    # 60,000 requests take seconds: the signal comes while they are simulated.
    command = ["run", "--out", "out", "--set", "workload={trace: conversation, requests: 60000, rate_scale: 20}"]
    # A process in the background of a script, as these tests may be, inherits that Ctrl-C is ignored.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{listen}; import sys; from sim.cli import main; sys.argv[0] = 'rooftrace'; main()"
    with subprocess.Popen(
        [sys.executable, "-c", start, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not everything_under(".") and process.poll() is None:
            time.sleep(0.02)
        assert everything_under(".") != []
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    assert everything_under(".") == []


def imported_by(*arguments, options=()):
    """The packages that a command imports in a process of its own, *options* of Python before it."""
    start = (
        "import sys; sys.argv = ['rooftrace', *sys.argv[1:]]; from sim.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\nprint(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, *options, "-c", start, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_help_imports_nothing_that_takes_long():
    assert not imported_by("--help") & {"numpy", "pandas", "pyarrow", "scipy", "matplotlib", "pydantic", "simpy"}


def test_a_run_without_plots_finds_a_policy_in_its_folder_and_imports_no_plotting_and_no_data_frames():
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from policies.published import OrcaPaged\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(OrcaPaged):\n"
        "    max_sequences: int = 3\n"
    )
    # -P: as for an installed command, Python itself does not look into the current folder.
    loaded = imported_by("run", "--no-plots", "--out", "out", *TINY, "--set", "scheduler=mine:Mine", options=["-P"])
    assert "Mine(max_sequences=3" in json.loads(Path("out/manifest.json").read_text())["scheduler"]
    assert {"simpy", "mine"} <= loaded
    assert not loaded & {"pandas", "scipy", "matplotlib"}


@pytest.mark.slow(reason="processes are started and ended")
def test_whoever_reads_the_first_lines_only_gets_exit_code_zero():
    command = [sys.executable, "-c", "from sim.cli import main; main()", "run", "--no-plots", "--out", "out", *TINY]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.close()
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (0, b"")
    assert Path("out/summary.json").exists()


def test_an_empty_folder_is_no_trace_and_no_run():
    Path("traces").mkdir()
    assert_refused(
        rooftrace("run", "--set", "workload.trace=traces/"),
        "traces/ is a folder, and no file that could be read is in it; give a file",
        left=["traces"],
    )
    assert_refused(rooftrace("plot", "traces"), "traces is not the folder of a run or a sweep", left=["traces"])
    assert_refused(
        rooftrace("plot", "traces", "--out", "p.png"), "--out is the folder of the pictures", left=["traces"]
    )


@patches_the_engine
def test_a_run_with_requests_that_nobody_can_ever_serve_is_refused_and_leaves_nothing(monkeypatch):
    scenario = """
model: llama-3.1-8b
memory: {kv_blocks: 60}
pools: {p: {role: prefill}, d: {role: decode, replicas: 2}}
links: {net: {bandwidth_gb_per_s: 1, latency_s: 0}}
handover: {like: sglang, headroom_tokens: 0}
failures: {times: [{machine: 1, at_s: 0.5, for_s: 0.3}]}
workload:
  arrivals: {process: poisson, rate_per_s: 30}
  prompt_tokens: {distribution: uniform, min_tokens: 40, max_tokens: 600}
  output_tokens: 40
  requests: 60
seed: 50
scheduler: sarathi
"""
    Path("circle.yaml").write_text(scenario)
    # As if a computed prompt whose decode machine has failed waited for room at another.
    monkeypatch.setattr(Handovers, "no_room", lambda *_: None)
    assert_refused(rooftrace("run", "circle.yaml"), "53 of 60 requests can never be served (", left=["circle.yaml"])
