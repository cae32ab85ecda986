"""Checkpoints in the HuggingFace cache, and those that the hub is asked for: config.json alone."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from hwmodels.model import fetch_unknown, load_model, model_catalogue
from hwmodels.model.hub import cached_config, fetch_config, is_hub_name
from sim.cli import build_app
from sim.scenario import Scenario

LLAMA = json.loads(model_catalogue()["llama-3.2-1b"].read_text())
NAME = "somebody/mystery-1"
FP8 = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.fixture(autouse=True)
def _homes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers what a test puts into `answers`: by path, a status and a body; it keeps what it was asked."""

    class Hub(BaseHTTPRequestHandler):
        answers: ClassVar[dict[str, tuple[int, bytes]]]
        asked: ClassVar[list[tuple[str, str | None]]]
        cut = False

        def do_GET(self):
            self.asked.append((self.path, self.headers.get("Authorization")))
            status, body = self.answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + 100 * self.cut))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    Hub.answers, Hub.asked = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def put(hub, config=LLAMA, side=None, name=NAME):
    hub.answers[f"/{name}/resolve/main/config.json"] = (200, json.dumps(config).encode())
    if side is not None:
        hub.answers[f"/{name}/resolve/main/hf_quant_config.json"] = (200, json.dumps(side).encode())


def cached(home, config, snapshot="abc", main=True):
    folder = home / "hf" / "hub" / "models--somebody--mystery-1"
    (folder / "snapshots" / snapshot).mkdir(parents=True)
    (folder / "snapshots" / snapshot / "config.json").write_text(json.dumps(config))
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(snapshot)
    return folder / "snapshots" / snapshot


def test_a_model_in_the_cache_of_huggingface_is_known_by_its_name(tmp_path):
    folder = cached(tmp_path, {**LLAMA, "num_hidden_layers": 3})
    spec = load_model(NAME)
    assert (spec.name, spec.n_layers, spec.source) == (NAME, 3, LLAMA["rooftrace"]["source"])
    (folder / "hf_quant_config.json").write_text(json.dumps(FP8))
    assert (load_model(NAME).mlp_precision, load_model(NAME).kv_precision) == ("fp8_static", "fp8")


def test_the_snapshot_of_the_main_branch_counts(tmp_path):
    cached(tmp_path, {**LLAMA, "num_hidden_layers": 3}, "one")
    cached(tmp_path, {**LLAMA, "num_hidden_layers": 5}, "two", main=False)
    assert load_model(NAME).n_layers == 3


def test_a_cache_may_lie_elsewhere(tmp_path, monkeypatch):
    cached(tmp_path, LLAMA)
    (tmp_path / "hf" / "hub").rename(tmp_path / "moved")
    assert cached_config(NAME) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "moved"))
    assert cached_config(NAME) is not None


def test_config_json_is_fetched_and_kept(hub):
    put(hub, side=FP8)
    fetch_unknown(NAME)
    spec = load_model(NAME)
    assert (spec.params, spec.mlp_precision) == (load_model("llama-3.2-1b").params, "fp8_static")
    assert [path.rpartition("/")[2] for path, _ in hub.asked] == ["config.json", "hf_quant_config.json"]
    fetch_unknown(NAME)
    assert len(hub.asked) == 2


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "Qwen/Qwen3-8B", "somebody/Qwen3-8B-SFT-FP8", "TheBloke/Llama-2-7B-GGUF"]
)
def test_the_hub_is_not_asked_for_what_is_known(hub, name):
    fetch_unknown(name)
    assert hub.asked == []


def test_a_token_goes_to_the_hub(hub, monkeypatch):
    put(hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch_config(NAME)
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"", r"the hub answers 404 Not Found; give a path to its config\.json instead"),
        (
            401,
            b"",
            "the hub answers 401 Unauthorized; it is private or gated, or there is none of that name: set HF_TOKEN",
        ),
        (403, b"", "the hub answers 403 Forbidden; it is private or gated"),
        (500, b"", "the hub answers 500"),
        (200, b"<html>Log in</html>", "what answers is no JSON object"),
        (200, b"[1]", "what answers is no JSON object"),
        (200, b"\xff\xfe", "what answers is no JSON object"),
    ],
)
def test_trouble_with_the_hub_is_a_sentence_and_nothing_is_kept(hub, status, body, words):
    hub.answers[f"/{NAME}/resolve/main/config.json"] = (status, body)
    with pytest.raises(ValueError, match=rf"http://127\.0\.0\.1:\d+/{NAME}/resolve/main/config\.json: {words}"):
        fetch_config(NAME)
    assert cached_config(NAME) is None


def test_an_answer_that_breaks_off_is_a_sentence_and_nothing_is_kept(hub):
    put(hub)
    hub.cut = True
    with pytest.raises(ValueError, match=r"cannot be read \(.*\); give a path to its config\.json instead"):
        fetch_config(NAME, timeout_s=1.0)
    assert cached_config(NAME) is None


def test_formats_that_cannot_be_read_are_not_taken_to_be_none(hub):
    """Without them an FP8 checkpoint would be priced in 16 bits."""
    put(hub)
    hub.answers[f"/{NAME}/resolve/main/hf_quant_config.json"] = (500, b"")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: the hub answers 500"):
        fetch_config(NAME)
    assert cached_config(NAME) is None


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense", "ftp-like://x"])
def test_a_hub_that_is_not_there_is_a_sentence(monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ValueError, match=r"cannot be read \(.*\); give a path to its config\.json instead"):
        fetch_config(NAME, timeout_s=2.0)


@pytest.mark.parametrize("name", ["mystery", "a/b/c", "../mystery", "./mystery", "a/..", "/a", "a/"])
def test_what_is_no_name_on_the_hub_is_not_asked_for(hub, name):
    assert not is_hub_name(name)
    with pytest.raises(ValueError, match="is no name on the HuggingFace hub; give PUBLISHER/NAME"):
        fetch_config(name)
    assert hub.asked == []


def invoke(*arguments):
    return CliRunner().invoke(build_app(), list(arguments))


def test_models_show_fetches_where_it_is_told(hub):
    put(hub)
    refused = invoke("models", "show", NAME)
    assert "or --fetch, which asks the HuggingFace hub for it" in " ".join(refused.stderr.split())
    assert hub.asked == []
    assert json.loads(invoke("models", "show", NAME, "--fetch", "--json").stdout)["name"] == NAME


def test_run_fetches_and_the_hash_follows_what_came(hub, tmp_path):
    put(hub)
    (tmp_path / "s.yaml").write_text(f"model: {NAME}\nworkload: {{trace: conversation, requests: 3}}\n")
    before = Scenario.load(tmp_path / "s.yaml").hash
    done = invoke("run", "s.yaml", "--fetch", "--no-plots", "--out", "out")
    assert done.exit_code == 0, done.output
    said = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert before != Scenario.load(tmp_path / "s.yaml").hash == said["hash"]


def test_scenario_from_fetches_the_commands_model(hub):
    put(hub)
    done = invoke("scenario", "from", f"vllm serve {NAME}", "--fetch")
    assert done.exit_code == 0, done.output
    assert f"model: {NAME}" in done.stdout


def test_scenario_from_takes_a_model_in_place_of_an_unknown_one(hub):
    done = invoke("scenario", "from", f"vllm serve {NAME}", "--set", "model=qwen3-8b", "--fetch")
    assert done.exit_code == 0, done.output
    assert "model: qwen3-8b" in done.stdout
    assert hub.asked == []
    refused = invoke("scenario", "from", f"vllm serve {NAME}")
    assert "or set one in its place: --set model=NAME" in " ".join(refused.stderr.split())


def test_trouble_of_fetch_ends_a_command_with_one_sentence(hub):
    refused = invoke("models", "show", NAME, "--fetch")
    assert refused.exit_code == 2
    assert "--fetch: http://127.0.0.1" in refused.stderr
    assert "Traceback" not in refused.output
