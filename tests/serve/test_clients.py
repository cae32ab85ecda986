"""Load generators that nobody here wrote, each measuring what the simulator says."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra (pip install 'rooftrace[serve]')")

from sim.serve.counting import WORDS, FromFile
from tests.serve.serving import Serving, serving

pytestmark = pytest.mark.slow

WITHIN_S, WITHIN = 0.002, 0.02
"""Medians agree to 2 ms of the wall clock or to 2 %."""
QUIET_S = 0.0005
"""Where the endpoint's own tokens are later than this in the median, the machine is too busy to measure on."""


def command(name: str) -> str:
    found = shutil.which(name) or os.environ.get(f"ROOFTRACE_{name.upper()}")
    if not found:
        pytest.skip(f"needs the command {name} (pip install {name}, or ROOFTRACE_{name.upper()}=PATH)")
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer in Hugging Face's layout, to which every word of an answer is one token."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    text = (Path(__file__).parents[2] / "sim" / "tokens" / "text.txt").read_text(encoding="utf-8")
    made.train_from_iterator([text, *[" " + " ".join(WORDS)] * 200], trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def agree(at: Serving, folder: Path, measured: dict[str, float]) -> None:
    """Medians in seconds of the wall clock lie on those of the results; skips where the machine was too busy to tell."""
    summary = at.results(folder).summary
    lag_s = at.session.pacer.handed.histogram.quantile_s(0.5)
    speed = at.session.pacer.speed
    apart = {name: (value, summary[name]["p50"] / speed) for name, value in measured.items()}
    wrong = {name: pair for name, pair in apart.items() if abs(pair[0] - pair[1]) > max(WITHIN_S, WITHIN * pair[1])}
    if wrong and lag_s > QUIET_S:
        pytest.skip(
            f"the machine is too busy: the endpoint itself was up to {lag_s * 1e3:g} ms late in the median; apart by {wrong}"
        )
    assert not wrong


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_vllm_bench_serve_measures_the_run(tokenizer: Path, tmp_path: Path, speed: float) -> None:
    vllm = command("vllm")
    with serving(speed=speed, tokens=FromFile(tokenizer)) as at:
        run(
            vllm, "bench", "serve", "--backend", "openai", "--base-url", at.url, "--endpoint", "/v1/completions",
            "--model", "llama-3.1-8b", "--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "300",
            "--random-output-len", "100", "--ignore-eos", "--num-prompts", "100", "--request-rate", "8",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-filename", str(tmp_path / "found.json"),
            cwd=tmp_path,
        )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["completed"] == 100
    agree(at, tmp_path / "served", {f"{n}_s": found[f"median_{n}_ms"] * 1e-3 for n in ("ttft", "tpot", "itl", "e2el")})


def test_guidellm_measures_the_run(tokenizer: Path, tmp_path: Path) -> None:
    guidellm = command("guidellm")
    with serving(tokens=FromFile(tokenizer)) as at:
        run(
            guidellm, "run", "--backend", f"kind=openai_http,target={at.url},model=llama-3.1-8b",
            "--profile", "kind=constant,rate=6", "--constraint", "kind=max_requests,count=60",
            "--data", "kind=synthetic_text,prompt_tokens=256,output_tokens=80",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={tmp_path / 'found.json'}",
            "--disable-console", cwd=tmp_path,
        )  # fmt: skip
    metrics = json.loads((tmp_path / "found.json").read_text())["benchmarks"][0]["metrics"]
    names = {"time_to_first_token_ms": "ttft_s", "inter_token_latency_ms": "itl_s"}
    # GuideLLM's gap of a request is its mean: (last - first) / (n - 1), which is TPOT here.
    found = {names[name]: metrics[name]["successful"]["median"] * 1e-3 for name in names}
    found = {"ttft_s": found["ttft_s"], "tpot_s": found["itl_s"]}
    found["e2el_s"] = metrics["request_latency"]["successful"]["median"]
    agree(at, tmp_path / "served", found)


LOCUST = """
import json, time
from locust import HttpUser, constant_throughput, events, task
ROWS = []
class Client(HttpUser):
    wait_time = constant_throughput(0.5)
    @task
    def ask(self):
        body = {"prompt": "one two three " * 60, "max_tokens": 80, "stream": True}
        began, at = time.perf_counter(), []
        with self.client.post("/v1/completions", json=body, stream=True) as answer:
            for piece in answer.iter_content(None):
                at += [time.perf_counter()] * piece.count(b"data: {")
        if len(at) == 80:
            ROWS.append((at[0] - began, (at[-1] - at[0]) / 79, at[-1] - began))
@events.quitting.add_listener
def write(environment, **_):
    json.dump(ROWS, open("found.json", "w"))
"""


def test_locust_measures_the_run(tmp_path: Path) -> None:
    locust = command("locust")
    (tmp_path / "locustfile.py").write_text(LOCUST)
    with serving() as at:
        run(
            locust, "-f", "locustfile.py", "--headless", "-u", "8", "-r", "2.3", "-t", "20s", "--host", at.url,
            cwd=tmp_path,
        )  # fmt: skip
    rows: list[Any] = json.loads((tmp_path / "found.json").read_text())
    assert len(rows) > 40
    agree(
        at,
        tmp_path / "served",
        dict(zip(("ttft_s", "tpot_s", "e2el_s"), map(statistics.median, zip(*rows, strict=True)), strict=True)),
    )
