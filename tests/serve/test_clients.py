"""Load generators that nobody here wrote, each measuring what the simulator says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra (pip install -e '.[serve]')")

from sim.serve.filler import WORDS
from tests.serve.serving import Serving, serving
from tests.sources import PACKAGES
from workloads.texts import FromFile

pytestmark = pytest.mark.slow(reason="clients talk to a server in real time")

WITHIN_S, WITHIN = 0.002, 0.02
"""Medians agree to 2 ms of the wall clock or to 2 %."""


def command(name: str) -> str:
    found = os.environ.get(f"ROOFTRACE_{name.upper()}") or shutil.which(name)
    if not found:
        pytest.skip(f"needs the command {name} (pip install {name}, or ROOFTRACE_{name.upper()}=PATH)")
    return found


@pytest.fixture(params=[1.0, 10.0])
def speed(request: pytest.FixtureRequest) -> float:
    return request.param


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
    text = (PACKAGES / "sim" / "tokens" / "text.txt").read_text(encoding="utf-8")
    made.train_from_iterator([text, *[" " + " ".join(WORDS)] * 200], trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TRIPS = """
import socket, sys, threading, time
host, port = sys.argv[1].removeprefix("http://").split(":")
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
with socket.create_connection((host, int(port))) as there:
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while not over.wait(0.03):
        began = time.perf_counter()
        there.sendall(b"GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        if not there.recv(65536):
            break
        print(time.perf_counter() - began)
"""
"""A client that does nothing but ask for the endpoint's health, and prints how long each answer took."""


@contextlib.contextmanager
def trips(at: Serving, found_s: list[float]) -> Iterator[None]:
    """Meanwhile, requests that need nothing go to and fro; what they took is added to *found_s*."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRIPS, at.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield
    finally:
        said, _ = process.communicate("", timeout=30)
        found_s.extend(map(float, said.split()))


def run(at: Serving, *arguments: str, cwd: Path, offline: bool = True) -> list[float]:
    """Run a client against *at* to its end; how long an empty request took meanwhile, again and again."""
    environment = {**os.environ, **({"HF_HUB_OFFLINE": "1"} if offline else {}), "OMP_NUM_THREADS": "1"}
    trips_s: list[float] = []
    with trips(at, trips_s):
        done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return trips_s


def agree(
    at: Serving,
    folder: Path,
    measured: dict[str, float],
    rates: dict[str, float],
    trips_s: list[float],
    own_trips_s: list[float] | None = None,
    from_below: tuple[str, ...] = (),
) -> None:
    """Medians in seconds of the wall clock lie on those of the results, and throughputs by second of the wall clock.

    A client sees no token before it was simulated, and may see it later by what the run itself measured: how late the endpoint
    wrote in the median, and how long a request takes there and back that needs nothing: by the client's own account where it has
    one (*own_trips_s*), since what it does for each request is in all of its times. TPOT and ITL begin and end with a token,
    so that they are given neither. Of those *from_below* only that they are not too early is held. Where a request that needs
    nothing, or a write, takes longer than the bound for one in ten, the machine is too busy to tell; a disagreement is then said
    and not held against the endpoint.
    """
    summary = at.results(folder).summary
    speed = at.session.pacer.speed
    late_s, trip_s = statistics.median(at.written_late_s), statistics.median(own_trips_s or trips_s)
    worst_s = max(statistics.quantiles(at.written_late_s, n=10)[-1], statistics.quantiles(trips_s, n=10)[-1])
    wrong, rows = [], []
    for name, value in measured.items():
        simulated = summary[name]["p50"] / speed
        bound = max(WITHIN_S, WITHIN * simulated)
        later = late_s + trip_s if name in ("ttft_s", "e2el_s") else 0.0
        rows.append(f"{name} {value * 1e3:.2f} for {simulated * 1e3:.2f} ms")
        if value < simulated - bound or (value > simulated + later + bound and name not in from_below):
            wrong.append(rows[-1])
    for name, value in rates.items():
        simulated = summary[name] * speed
        rows.append(f"{name} {value:.2f} for {simulated:.2f}")
        if abs(value - simulated) > WITHIN * simulated:
            wrong.append(rows[-1])
    told = (
        f"writes {late_s * 1e3:.2f} ms late and empty requests {trip_s * 1e3:.2f} ms long in the median, one in ten of them more "
        f"than {worst_s * 1e3:.1f} ms, load {os.getloadavg()[0]:.1f}"
    )
    print(f"speed {speed:g}: {'; '.join(rows)}; {told}")
    if wrong and worst_s > WITHIN_S:
        pytest.skip(f"the machine is too busy to tell: {'; '.join(wrong)}; {told}")
    assert not wrong, told


def rates(requests: int, tokens_each: int, took_s: float) -> dict[str, float]:
    """Throughputs from the first request to the last end, as in results: what clients print begins with their own beginning."""
    return {"requests_per_s": requests / took_s, "output_tokens_per_s": requests * tokens_each / took_s}


def test_vllm_bench_serve_measures_the_run(tokenizer: Path, tmp_path: Path, speed: float) -> None:
    vllm = command("vllm")
    with serving(speed=speed, tokens=FromFile(tokenizer)) as at:
        trips_s = run(
            at, vllm, "bench", "serve", "--backend", "openai", "--base-url", at.url, "--endpoint", "/v1/completions",
            "--model", "llama-3.1-8b", "--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "300",
            "--random-output-len", "100", "--ignore-eos", "--num-prompts", "100", "--request-rate", "8", "--save-detailed",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-filename", str(tmp_path / "found.json"),
            cwd=tmp_path,
        )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["completed"] == 100
    # Its percentiles are over requests, and of ITL over gaps, between the two nearest values: as those of results.
    gaps = [gap for gaps in found["itls"] for gap in gaps]
    for name, values in (("ttft", found["ttfts"]), ("itl", gaps)):
        assert found[f"p99_{name}_ms"] == pytest.approx(float(np.percentile(values, 99)) * 1e3)
    measured = {f"{n}_s": found[f"median_{n}_ms"] * 1e-3 for n in ("ttft", "tpot", "itl", "e2el")}
    ends = np.add(found["start_times"], found["latencies"])
    agree(at, tmp_path / "served", measured, rates(100, 100, ends.max() - min(found["start_times"])), trips_s)


def test_aiperf_measures_the_run(tokenizer: Path, tmp_path: Path, speed: float) -> None:
    aiperf = command("aiperf")
    with serving(speed=speed, tokens=FromFile(tokenizer)) as at:
        # Told to stay offline it takes no folder for a tokenizer.
        trips_s = run(
            at, aiperf, "profile", "--model", "llama-3.1-8b", "--url", at.url, "--endpoint-type", "completions", "--streaming",
            "--tokenizer", str(tokenizer), "--synthetic-input-tokens-mean", "300", "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", "80", "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true",
            "--request-rate", "8", "--request-count", "80", "--random-seed", "1", "--use-server-token-count", "--ui", "none",
            "--artifact-dir", str(tmp_path / "found"), cwd=tmp_path, offline=False,
        )  # fmt: skip
    found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 80
    lines = (tmp_path / "found" / "profile_export.jsonl").read_text().splitlines()
    values = [json.loads(line)["metrics"]["time_to_first_token"]["value"] for line in lines]
    when = [json.loads(line)["metadata"] for line in lines]
    took_ns = max(each["request_end_ns"] for each in when) - min(each["request_start_ns"] for each in when)
    assert found["time_to_first_token"]["p99"] == pytest.approx(float(np.percentile(values, 99)))
    # What it calls inter-token latency is (end - first token) / (tokens - 1) of a request: TPOT here.
    names = {"time_to_first_token": "ttft_s", "inter_token_latency": "tpot_s", "inter_chunk_latency": "itl_s"}
    names["request_latency"] = "e2el_s"
    agree(
        at, tmp_path / "served", {mine: found[name]["p50"] * 1e-3 for name, mine in names.items()},
        rates(80, 80, took_ns * 1e-9), trips_s,
    )  # fmt: skip


def test_guidellm_measures_the_run(tokenizer: Path, tmp_path: Path) -> None:
    guidellm = command("guidellm")
    with serving(tokens=FromFile(tokenizer)) as at:
        trips_s = run(
            at, guidellm, "run", "--backend", f"kind=openai_http,target={at.url},model=llama-3.1-8b",
            "--profile", "kind=constant,rate=6", "--constraint", "kind=max_requests,count=60",
            "--data", "kind=synthetic_text,prompt_tokens=256,output_tokens=80",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={tmp_path / 'found.json'}",
            "--disable-console", cwd=tmp_path,
        )  # fmt: skip
    metrics = json.loads((tmp_path / "found.json").read_text())["benchmarks"][0]["metrics"]
    median = {name: metrics[name]["successful"]["median"] for name in (
        "time_to_first_token_ms", "inter_token_latency_ms", "request_latency",
    )}  # fmt: skip
    # GuideLLM's gap of a request is its mean, (last - first) / (n - 1): TPOT here. Its own TPOT has TTFT in it.
    found = {"ttft_s": median["time_to_first_token_ms"] * 1e-3, "tpot_s": median["inter_token_latency_ms"] * 1e-3}
    theirs = {"requests_per_s": "requests_per_second", "output_tokens_per_s": "output_tokens_per_second"}
    throughput = {mine: metrics[name]["successful"]["mean"] for mine, name in theirs.items()}
    agree(at, tmp_path / "served", found | {"e2el_s": median["request_latency"]}, throughput, trips_s)


LOCUST = """
import json, time
from locust import HttpUser, constant_throughput, events, task
ROWS, TRIPS_S = [], []
class Client(HttpUser):
    wait_time = constant_throughput(0.5)
    @task
    def ask(self):
        body = {"prompt": "one two three " * 60, "max_tokens": 80, "stream": True}
        began, at = time.perf_counter(), []
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            for piece in answer.iter_content(None):
                at += [time.perf_counter()] * piece.count(b"data: {")
        if len(at) == 80:
            ROWS.append((at[0] - began, (at[-1] - at[0]) / 79, at[-1] - began))
        began = time.perf_counter()
        self.client.get("/health")
        TRIPS_S.append(time.perf_counter() - began)
@events.quitting.add_listener
def write(environment, **_):
    json.dump({"rows": ROWS, "trips_s": TRIPS_S}, open("found.json", "w"))
"""


def test_locust_measures_the_run(tmp_path: Path, speed: float) -> None:
    locust = command("locust")
    (tmp_path / "locustfile.py").write_text(LOCUST)
    with serving(speed=speed) as at:
        trips_s = run(
            at, locust, "-f", "locustfile.py", "--headless", "-u", "8", "-r", "2.3", "-t", "20s", "-s", "5", "--host", at.url,
            cwd=tmp_path,
        )  # fmt: skip
    found: dict[str, list[Any]] = json.loads((tmp_path / "found.json").read_text())
    assert len(found["rows"]) > 40
    medians = map(statistics.median, zip(*found["rows"], strict=True))
    measured = dict(zip(("ttft_s", "tpot_s", "e2el_s"), medians, strict=True))
    # How many requests it sends is its own clock's matter, and when the run ends that of its last users. It takes 2 ms for a
    # request that needs nothing and more for one with a body and a stream: TTFT has that in it.
    agree(at, tmp_path / "served", measured, {}, trips_s, found["trips_s"], from_below=("ttft_s",))
