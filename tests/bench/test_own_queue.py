"""Production logs of a server written here from scratch: a queue and a batch in a loop, whose host times are known.

The loop shares with the simulator what an iteration of kernels costs, and nothing of how requests come to run together.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.overheads import serving_stack
from hwmodels.totals import Totals
from sim.bench.load import shortened
from sim.bench.measured import BenchRun
from sim.bench.reading import read_bytes
from tests.cli.test_run import rooftrace as invoke

STEP_S, FRONT_END_S = 0.002, 0.045
SCENARIO = "{model: llama-3.1-8b, hardware: h100-sxm, serving_stack: vllm, scheduler: {policy: vllm}}"
BUDGET_TOKENS = 8192
Times = NDArray[np.float64]


class Served(NamedTuple):
    """Instants in seconds and tokens of each request, and (instant, requests running, tokens made so far) of each iteration."""

    arrival: Times
    first: Times
    end: Times
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    trail: list[tuple[float, int, int]]


def served(rate_per_s: float, n: int, prompt: int, output: int, seed: int) -> Served:
    stack = serving_stack("vllm")
    own = replace(stack.overheads, step_s=STEP_S)
    cost = deploy(model="llama-3.1-8b", hardware="h100-sxm", cost=Calibrated(stack=replace(stack, overheads=own))).cost
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_per_s, n))
    prompts, outputs = (rng.integers(mean // 2, 3 * mean // 2, n) for mean in (prompt, output))
    ready = arrival + FRONT_END_S + own.admission_s_per_token * prompts
    waiting = np.argsort(ready).tolist()
    first, end = np.zeros(n), np.zeros(n)
    made = np.zeros(n, int)
    decoding: list[int] = []
    now, trail = 0.0, []
    while waiting or decoding:
        if not decoding:
            now = max(now, ready[waiting[0]])
        left, begun = BUDGET_TOKENS - len(decoding), []
        while waiting and ready[waiting[0]] <= now and prompts[waiting[0]] <= left:
            begun.append(waiting.pop(0))
            left -= prompts[begun[-1]]
        lengths = prompts[begun]
        now += float(
            cost.iteration_s(
                Totals(
                    rows=int(lengths.sum()) + len(decoding),
                    prefill_rows=int(lengths.sum()),
                    prefill_chunks=len(begun),
                    prefill_pairs=int((lengths * (lengths + 1) // 2).sum()),
                    prefill_kv_tokens=int(lengths.sum()),
                    decode_seqs=len(decoding),
                    decode_kv_tokens=int((prompts + made)[decoding].sum()),
                    logit_rows=len(decoding) + len(begun),
                )
            )
        )
        first[begun] = now
        decoding += begun
        made[decoding] += 1
        trail.append((now, len(decoding), int(made.sum())))
        end[[i for i in decoding if made[i] >= outputs[i]]] = now
        decoding = [i for i in decoding if made[i] < outputs[i]]
    return Served(arrival, first, end, prompts, outputs, trail)


def csv_of(run: Served) -> str:
    lines = ["arrival_s,first_token_s,end_s,prompt_tokens,output_tokens"]
    lines += [
        f"{1.7e9 + a:.6f},{1.7e9 + f:.6f},{1.7e9 + e:.6f},{p},{o}"
        for a, f, e, p, o in zip(run.arrival, run.first, run.end, run.prompt, run.output, strict=True)
    ]
    return "\n".join(lines) + "\n"


def lines_of(run: Served, every_s: float) -> str:
    """As the server would have logged it: throughput since the last line, and who runs at that instant."""
    at = np.array([each[0] for each in run.trail])
    text, before, prompts = "", 0, 0
    for i, second in enumerate(np.arange(every_s, at[-1] - every_s, every_s)):
        _, running, made = run.trail[int(np.searchsorted(at, second)) - 1]
        begun = int(run.prompt[run.first <= second].sum())
        text += (
            f"INFO 11-21 10:{int(second) // 60:02}:{int(second) % 60:02} [loggers.py:1] Engine 000: Avg prompt throughput: "
            f"{(begun - prompts) / every_s:.1f} tokens/s, Avg generation throughput: {(made - before) / every_s:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: {i % 3}.0%, Prefix cache hit rate: 0.0%\n"
        )
        before, prompts = made, begun
    return text


def fitted(folder: Path, *args: object) -> dict[str, Any]:
    scenario = folder / "s.yaml"
    scenario.write_text(SCENARIO)
    done = invoke("bench", "fit", scenario, *args, "--out", folder / "mine.toml", "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


@pytest.mark.slow(reason="a fit by many simulations")
def test_logs_of_requests_bring_the_host_times_of_another_server_back(tmp_path: Path) -> None:
    for i, (rate, prompt, output) in enumerate(((2.0, 600, 40), (10.0, 300, 30))):
        (tmp_path / f"{i}.csv").write_text(csv_of(served(rate, 50, prompt, output, i)))
    found = fitted(tmp_path, tmp_path / "0.csv", tmp_path / "1.csv")
    of = {each["name"]: each for each in found["parameters"]}
    for name, truth in (("step_s", STEP_S), ("admission_s", FRONT_END_S)):
        assert of[name]["low_95"] <= truth <= of[name]["high_95"]
        assert of[name]["told"] > 0.8
    assert of["step_s"]["fitted"] == pytest.approx(STEP_S, rel=0.3)
    assert of["admission_s"]["fitted"] == pytest.approx(FRONT_END_S, rel=0.3)
    assert found["errors"]["tpot_s"]["before"] > 0.15
    assert found["errors"]["tpot_s"]["fitted"] < 0.02


@pytest.mark.slow(reason="a fit by many simulations")
def test_lines_that_the_server_logs_tell_its_step(tmp_path: Path) -> None:
    (tmp_path / "v.log").write_text(lines_of(served(6.0, 400, 300, 60, 5), 2.0))
    found = fitted(tmp_path, tmp_path / "v.log", "--set", "run.rate_per_s=6")
    assert "outputs of 5" in found["stderr"] or "outputs of 6" in found["stderr"]
    of = {each["name"]: each for each in found["parameters"]}
    assert of["step_s"]["low_95"] <= STEP_S <= of["step_s"]["high_95"]
    # Counts every two seconds are a coarse measurement of one figure, and tell nothing of what it cannot show.
    assert of["admission_s"]["told"] == pytest.approx(0.0, abs=0.01)
    (run,) = found["runs"]
    before, after = (run[f"{when}_s"]["tpot_s"] / run["measured_s"]["tpot_s"] - 1 for when in ("before", "fitted"))
    assert before < -0.1
    assert abs(after) < 0.7 * abs(before)


def test_a_log_without_its_load_leaves_the_other_files_to_be_fitted(tmp_path: Path) -> None:
    run = served(6.0, 60, 300, 30, 5)
    (tmp_path / "v.log").write_text(lines_of(run, 1.0))
    (tmp_path / "r.csv").write_text(csv_of(run))
    found = fitted(tmp_path, tmp_path / "v.log", tmp_path / "r.csv")
    assert [each["name"] for each in found["runs"]] == ["r"]
    assert "Left out: v: the file does not say run.rate_per_s (or run.concurrency)" in found["stderr"]


def log_of(n: int) -> BenchRun:
    (run,) = read_bytes(csv_of(served(6.0, n, 300, 10, 5)).encode(), name="a", file="a").runs
    return run


def test_a_long_log_is_fitted_by_its_first_requests_against_what_they_measured() -> None:
    whole = log_of(150)
    few = shortened(whole, 100)
    assert few.rows is not None
    assert len(few.rows) == 100
    assert few.ttft is not None
    assert whole.rows is not None
    assert few.ttft.mean_s == pytest.approx(whole.rows.ttft_s[:100].mean())
    assert "the first 100 requests" in few.notes[-1]
    assert shortened(whole, 150) is whole


def test_only_loads_that_the_server_kept_up_with_are_shortened() -> None:
    plain = replace(log_of(40), rows=None)
    open_load = replace(plain.offered, rate_per_s=4.0, requests=5000)
    kept_up = replace(plain, offered=open_load, duration_s=1250.5)
    assert shortened(kept_up, 1000).offered.requests == 1000
    assert "5,000" in shortened(kept_up, 1000).notes[-1]
    for as_it_is in (
        replace(plain, offered=open_load, duration_s=2000.0),
        replace(plain, offered=replace(open_load, rate_per_s=None, concurrency=64), duration_s=1250.5),
        replace(kept_up, offered=replace(open_load, ramp={"strategy": "linear", "start_per_s": 1, "end_per_s": 9})),
    ):
        assert shortened(as_it_is, 1000) is as_it_is
