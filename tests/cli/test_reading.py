"""Every command's answer to files that hold nothing, or are nested without end: one sentence, and nothing is run."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.cli import build_app

APP = build_app()
AXIS = ("--axis", "scheduler.max_num_seqs=8,16")
OF_SCENARIOS = {
    "run": ("run", "FILE"),
    "run --set": ("run", "FILE", "--set", "seed=1"),
    "sweep": ("sweep", "FILE", *AXIS),
    "compare, first": ("compare", "FILE", "good.yaml"),
    "compare, second": ("compare", "good.yaml", "FILE"),
    "compare --set": ("compare", "good.yaml", "FILE", "--set", "seed=1"),
    "capacity": ("capacity", "FILE"),
    "optimize": ("optimize", "FILE"),
    "place": ("place", "FILE"),
    "place --set": ("place", "FILE", "--set", "cluster.devices=16"),
    "serve": ("serve", "FILE", "--port", "0"),
    "bench compare": ("bench", "compare", "FILE", "log.json"),
    "bench fit": ("bench", "fit", "FILE", "log.json", "--out", "fit.toml"),
    "bench next": ("bench", "next", "FILE"),
}
OF_YAML = {
    **OF_SCENARIOS,
    "run --set value": ("run", "--set", "workload.models=TEXT"),
    "sweep --axis": ("sweep", "--axis", "workload.limit=TEXT"),
    "sweep --points": ("sweep", "--points", "points.csv"),
    "serve --script": ("serve", "--script", "FILE", "--port", "0"),
    "scenario from, vLLM": ("scenario", "from", "vllm serve --config FILE", "--hardware", "h100-sxm"),
    "scenario from, TensorRT": ("scenario", "from", "trtllm-serve qwen3-8b --config FILE", "--hardware", "h100-sxm"),
    "bench show": ("bench", "show", "FILE"),
}
OF_JSON = {
    "model": ("run", "--set", "model=FILE"),
    "placement": ("run", "--set", "placement=FILE", "--set", "pools={a: {}}"),
    "trace": ("run", "--set", "workload.trace=FILE"),
    "trace describe": ("trace", "describe", "FILE"),
    "scenario from": ("scenario", "from", "vllm serve qwen3-8b --speculative-config 'TEXT'", "--hardware", "h100-sxm"),
    "bench show": ("bench", "show", "FILE"),
    "plot": ("plot", "folder"),
    "compare": ("compare", "folder", "folder"),
    "export": ("export", "folder"),
}
DEEP = {
    "lists": "[" * 5_000 + "]" * 5_000,
    "very deep lists": "[" * 100_000,
    "mappings": "{model: " * 5_000 + "1" + "}" * 5_000,
    "lists in lines": "- " * 5_000 + "1",
    "a cycle": "model: &model {name: *model}\n" + "#" * 100,
    "a cycle of two": "model: &a [&b [*a, *b]]\n" + "#" * 100,
    "anchors of anchors": "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(5_000)),
    "billions of values": "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(12)),
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text("workload: {trace: conversation, limit: 5}\n")
    Path("log.json").write_text('{"backend": "vllm"}')


def refused(arguments, content, name="m.yaml"):
    """The one sentence that a command ends with, exit code 2, where the file that it names has such a content."""
    Path(name).write_text(content)
    if "folder" in arguments:
        Path("folder").mkdir()
        for file in ("manifest.json", "summary.json", "requests.parquet", "iterations.parquet"):
            Path("folder", file).write_text(content)
    if "points.csv" in arguments:
        Path("points.csv").write_text('workload.limit\n"' + content.replace('"', '""') + '"\n')
    words = [each.replace("FILE", name).replace("TEXT", content) for each in arguments]
    before = {path.name for path in Path().iterdir()}
    result = CliRunner().invoke(APP, words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert len(result.stderr) < 1_000
    assert {path.name for path in Path().iterdir()} == before
    return result.stderr


@pytest.mark.parametrize("command", OF_SCENARIOS)
def test_an_empty_file_is_no_scenario(command):
    assert "m.yaml is empty" in refused(OF_SCENARIOS[command], "")


@pytest.mark.parametrize("content", ["\n", "# vllm serve qwen3-8b\n", "null\n", "---\n", "~"])
def test_a_file_without_settings_is_as_good_as_empty(content):
    assert "m.yaml is empty" in refused(("run", "FILE"), content)


@pytest.mark.parametrize("command", OF_YAML)
def test_a_command_refuses_yaml_that_is_nested_without_end(command):
    refused(OF_YAML[command], DEEP["very deep lists"])


@pytest.mark.parametrize("text", DEEP)
@pytest.mark.parametrize("command", ["run", "run --set value"])
def test_yaml_that_is_nested_without_end_is_refused(command, text):
    refused(OF_YAML[command], DEEP[text])


@pytest.mark.parametrize("command", OF_JSON)
def test_json_that_is_nested_without_end_is_refused(command):
    name = "m.jsonl" if "trace" in command else "config.json"
    refused(OF_JSON[command], '{"a": ' + "[" * 100_000, name)


def test_toml_that_is_nested_without_end_is_refused():
    for key in ("hardware", "serving_stack"):
        refused(("run", "--set", f"{key}=FILE"), "a = " + "[" * 5_000, "mine.toml")
