"""Releases of vLLM and SGLang that drive inside our event loop.

Each release is in an environment of its own, on a CPU and without a model. ROOFTRACE_VLLM_PYTHONS names their interpreters, with a
colon between them. One environment may serve several, whose packages lie in folders of their own:

    python -m venv v && v/bin/pip install torch==2.13.0 vllm==0.32.0
    v/bin/pip uninstall -y torchvision torchaudio torchcodec
    v/bin/pip install --no-deps --target vllm-0.24.0 vllm==0.24.0
    printf '#!/bin/sh\\nPYTHONPATH=%s/vllm-0.24.0 exec %s/v/bin/python "$@"\\n' "$PWD" "$PWD" > v024 && chmod +x v024
    ROOFTRACE_VLLM_PYTHONS=v/bin/python:$PWD/v024 pytest -m slow tests/oracle/test_installed.py

Tried with 0.24.0, 0.28.0, 0.32.0 and 0.33.0.

ROOFTRACE_SGLANG_PYTHONS does the same for SGLang, whose own requirements are those of GPUs; its import asks for these:

    python -m venv s && s/bin/pip install torch==2.13.0 transformers triton gguf orjson msgspec pyzmq IPython psutil numpy \\
        pydantic fastapi uvicorn uvloop aiohttp requests pybase64 setproctitle pillow partial_json_parser python-multipart \\
        xgrammar einops compressed-tensors tiktoken interegular prometheus-client packaging blobfile cuda-python dill \\
        sentencepiece openai
    s/bin/pip install --no-deps sglang==0.5.23
    s/bin/pip install --no-deps --target sglang-0.5.20 sglang==0.5.20

Tried with 0.5.20 and 0.5.23.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import islice

import numpy as np
import pytest

from benchmarks.engines_diff import ENDLESS, decided, fitted, nearest_rules, ours_of, sglang_workloads, vllm_case
from policies.installed import SglangInstalled, VllmInstalled
from policies.installed.settings import Installed
from policies.routers import RoundRobin
from sim.engine import FINISHED, Columns, Experiment, PolicyError, ReplicaSpec, run
from tests.engine.costs import Linear
from tests.oracle import test_sglang
from tests.oracle.adapter_cases import with_adapters
from tests.oracle.sglang_driven import driven
from tests.oracle.sglang_driven import release_of as sglang_release_of
from tests.oracle.test_vllm import release_python
from tests.oracle.vllm_driven import PADDED, driven_decisions, release_of
from workloads import Trace

pytestmark = pytest.mark.slow(reason="an installed release decides in a process of its own")
SGLANG_COMPARED = "SGLang 0.5.23"
PYTHONS = [python for python in os.environ.get("ROOFTRACE_VLLM_PYTHONS", "").split(":") if python]
SGLANG_PYTHONS = [python for python in os.environ.get("ROOFTRACE_SGLANG_PYTHONS", "").split(":") if python]


@pytest.fixture(params=PYTHONS or [""])
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter with vLLM."""
    return request.param or release_python()


@pytest.fixture(params=SGLANG_PYTHONS or [""])
def sglang(request: pytest.FixtureRequest) -> str:
    """An interpreter with SGLang."""
    if not request.param:
        pytest.skip("needs SGLang: ROOFTRACE_SGLANG_PYTHONS names the Pythons of environments that have it")
    return request.param


def served(scheduler: Installed, *, requests: int = 40) -> Columns:
    rng = np.random.default_rng(3)
    trace = Trace.from_arrays(
        arrival_ns=np.sort(rng.integers(0, 2_000_000_000, requests)).tolist(),
        prompt_tokens=rng.integers(20, 400, requests).tolist(),
        output_tokens=rng.integers(2, 60, requests).tolist(),
    )
    spec = ReplicaSpec(cost=Linear(fixed_s=5e-3, row_s=1e-5), scheduler=scheduler, kv_blocks=500)
    return run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()), check_invariants=True)


def ttft_s(columns: Columns) -> float:
    assert set(columns.requests["status"].tolist()) == {FINISHED}
    return float((columns.requests["first_token_ns"] - columns.requests["arrival_ns"]).mean() * 1e-9)


def test_every_step_of_random_workloads_is_the_one_that_vllm_takes_by_the_rules_of_the_release(python: str) -> None:
    rules, compared = nearest_rules(release_of(python)), 0
    for seed in range(6000, 6040):
        case = fitted(vllm_case(seed), rules)
        theirs = decided(partial(driven_decisions, case, python))
        if theirs not in (ENDLESS, PADDED):
            assert theirs == ours_of(case, rules), f"workload {seed}"
            compared += 1
    assert compared > 30


def test_an_answer_whose_grammar_is_compiled_waits_in_the_release(python: str) -> None:
    plain = ttft_s(served(VllmInstalled(python=python, max_num_seqs=16)))
    compiled = ttft_s(served(VllmInstalled(python=python, max_num_seqs=16, grammar_s=0.5)))
    assert plain + 0.5 <= compiled <= plain + 0.6


def test_a_limit_of_adapters_is_the_one_of_the_release(python: str) -> None:
    rules, compared = nearest_rules(release_of(python)), 0
    for seed in range(6000, 6020):
        case = with_adapters(fitted(vllm_case(seed), rules), seed)
        theirs = decided(partial(driven_decisions, case, python))
        if theirs not in (ENDLESS, PADDED):
            assert theirs == ours_of(case, rules), f"workload {seed}"
            compared += 1
    assert compared > 15


def test_a_setting_that_the_release_does_not_have_is_named_with_it(python: str) -> None:
    with pytest.raises(
        PolicyError, match=rf"{release_of(python)}: SchedulerConfig has no no_such_setting; leave it out"
    ):
        served(VllmInstalled(python=python, options={"no_such_setting": 1}))


# SGLang.


def test_the_release_of_sglang_serves_every_random_workload(sglang: str) -> None:
    release = sglang_release_of(sglang)
    for i, (around, case) in enumerate(islice(sglang_workloads(30), 100)):
        found = driven(case, sglang)
        if release == SGLANG_COMPARED:
            difference = test_sglang.difference(case, found)
            assert difference is None, f"workload {i}, {around}: {difference}"


def test_a_limit_of_adapters_is_the_one_of_sglang(sglang: str) -> None:
    for i, (around, case) in enumerate(islice(sglang_workloads(5), 20)):
        asking = with_adapters(case, i)
        found = driven(asking, sglang)
        if sglang_release_of(sglang) == SGLANG_COMPARED:
            difference = test_sglang.difference(asking, found)
            assert difference is None, f"workload {i}, {around}: {difference}"


def test_an_answer_whose_grammar_is_compiled_waits_in_sglang(sglang: str) -> None:
    plain = ttft_s(served(SglangInstalled(python=sglang, max_running_requests=16)))
    compiled = ttft_s(served(SglangInstalled(python=sglang, max_running_requests=16, grammar_s=0.5)))
    assert plain + 0.5 <= compiled <= plain + 0.6


def test_orders_of_the_queue_that_are_not_modelled_have_their_effect(sglang: str) -> None:
    crowded = {"python": sglang, "max_running_requests": 2}
    order = {
        policy: served(SglangInstalled(**crowded, schedule_policy=policy)).requests["scheduled_ns"].argsort().tolist()
        for policy in ("fcfs", "lof", "random")
    }
    assert order["fcfs"] == [*range(40)]
    assert order["fcfs"] != order["lof"] != order["random"] != order["fcfs"]


def test_server_arguments_that_are_not_modelled_have_their_effect(sglang: str) -> None:
    at_once = SglangInstalled(python=sglang, max_running_requests=16)
    spaced = SglangInstalled(python=sglang, max_running_requests=16, prefill_decode_interval=10)
    gaps = [int(np.repeat(*served(scheduler).itl()).max()) for scheduler in (at_once, spaced)]
    firsts = [ttft_s(served(scheduler)) for scheduler in (at_once, spaced)]
    assert gaps[1] < gaps[0]
    assert firsts[0] < firsts[1]


def test_a_server_argument_that_sglang_does_not_have_is_named_with_it(sglang: str) -> None:
    with pytest.raises(
        PolicyError, match=rf"{sglang_release_of(sglang)}: ServerArgs has no no_such_setting; leave it out"
    ):
        served(SglangInstalled(python=sglang, options={"no_such_setting": 1}))
