"""A scheduler that drives itself in the event loop: a tiny release in a process of its own."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.installed import VllmInstalled
from policies.installed.vllm.worker import NEEDED
from policies.routers import LeastOutstanding, Prefix, RoundRobin
from policies.schedulers import Sarathi
from policies.view import ReplicaView
from policies.wrappers import Cap
from sim.engine import ABORTED, FINISHED, Columns, Experiment, MachineSpec, PolicyError, ReplicaSpec, run
from sim.engine.spec.lifecycle import FleetSpec, Outage
from tests.engine.costs import Linear
from workloads import Trace

METHODS = (
    *(
        "schedule(self)",
        "update_from_output(self, scheduler_output, model_runner_output)",
        "add_request(self, request)",
    ),
    *("finish_requests(self, request_ids, finished_status)", "has_requests(self)", "has_unfinished_requests(self)"),
    "update_draft_token_ids(self, draft_token_ids)",
)
ALL_MODULES = {
    module.removeprefix("vllm."): "\n".join(
        f"class {name}:\n    def __init__(self, *, unheard_of): pass\n"
        + "".join(f"    def {method}: pass\n" for method in METHODS if name == "Scheduler")
        for name in names
    )
    for module, names in NEEDED.items()
}
"""A release in which every name is there, and nothing can be made."""
FAKE = Path(__file__).parents[1] / "policies" / "fake_release.py"
MS = 1_000_000


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that runs the tiny release, whatever script it is given."""
    path = tmp_path_factory.mktemp("tiny") / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def served(
    scheduler: Any,
    *,
    arrivals_ms: tuple[float, ...],
    prompt: int = 10,
    output: int = 3,
    machines: int = 1,
    **given: Any,
) -> Columns:
    """The columns of requests that are alike; an iteration takes 1 ms and 1 us a token."""
    n = len(arrivals_ms)
    trace = Trace.from_arrays(
        arrival_ns=[round(ms * MS) for ms in arrivals_ms],
        prompt_tokens=[prompt] * n,
        output_tokens=[output] * n,
        abort_s=given.pop("abort_s", None),
    )
    spec = ReplicaSpec(cost=Linear(fixed_s=1e-3, row_s=1e-6), scheduler=scheduler, kv_blocks=1000, block_tokens=16)
    return run(
        Experiment(workload=trace, replicas=(spec,) * machines, router=LeastOutstanding(), **given),
        check_invariants=True,
    )


def test_what_the_release_plans_is_priced_and_takes_simulated_time(python: str) -> None:
    columns = served(VllmInstalled(python=python, async_scheduling=False), arrivals_ms=(0.0, 0.5))
    iterations = columns.iterations()
    # A prompt; a prompt beside a decode; two decodes; a decode.
    assert iterations["duration_ns"].tolist() == [1_010_000, 1_011_000, 1_002_000, 1_001_000]
    assert columns.requests["first_token_ns"].tolist() == [1_010_000, 2_021_000]
    assert columns.requests["finish_ns"].tolist() == [3_023_000, 4_024_000]
    gaps, weights = columns.itl()
    assert sorted(np.repeat(gaps, weights).tolist()) == [1_001_000, 1_002_000, 1_002_000, 1_011_000]


def test_a_plan_made_ahead_misses_what_comes_during_the_iteration_before(python: str) -> None:
    ahead = served(VllmInstalled(python=python, async_scheduling=True), arrivals_ms=(0.0, 0.5), output=6)
    present = served(VllmInstalled(python=python, async_scheduling=False), arrivals_ms=(0.0, 0.5), output=6)
    # The second iteration had been planned when the request came.
    assert present.requests["scheduled_ns"].tolist() == [0, 1_010_000]
    assert ahead.requests["scheduled_ns"].tolist() == [0, 2_011_000]
    assert ahead.requests["status"].tolist() == [FINISHED, FINISHED]


def test_random_arrivals_end_as_with_a_scheduler_of_ours_that_decides_alike(python: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(5):
        arrivals = tuple(np.sort(rng.uniform(0, 20, 12)).tolist())
        theirs = served(VllmInstalled(python=python, async_scheduling=False), arrivals_ms=arrivals, output=7)
        ours = served(Sarathi(token_budget=100_000, max_sequences=1024, watermark=0.0), arrivals_ms=arrivals, output=7)
        for name in ("scheduled_ns", "first_token_ns", "finish_ns"):
            assert theirs.requests[name].tolist() == ours.requests[name].tolist()
        assert sorted(zip(*(part.tolist() for part in theirs.itl()), strict=True))
        assert np.repeat(*theirs.itl()).sum() == np.repeat(*ours.itl()).sum()


def test_a_request_whose_grammar_is_compiled_waits_for_it_and_others_pass_by(python: str) -> None:
    scheduler = VllmInstalled(python=python, async_scheduling=False, grammar_s=0.05, grammar_share=0.5)
    waits = served(scheduler, arrivals_ms=tuple(range(20)))
    ttft_ms = (waits.requests["first_token_ns"] - waits.requests["arrival_ns"]) / MS
    assert 5 <= (ttft_ms > 50).sum() <= 15
    assert ((ttft_ms > 50) | (ttft_ms < 5)).all()


def test_a_client_that_goes_is_told_to_the_release(python: str) -> None:
    columns = served(
        VllmInstalled(python=python, max_num_seqs=1),
        arrivals_ms=(0.0, 0.1, 0.2),
        output=20,
        abort_s=[np.nan, 0.003, 0.5],
    )
    assert columns.requests["status"].tolist() == [FINISHED, ABORTED, FINISHED]


def test_a_machine_that_fails_begins_with_an_empty_release(python: str) -> None:
    outages = (Outage(machine=0, at_s=0.002, for_s=0.003),)
    fleet = FleetSpec(pools=(0, 0), names=("all",), scaling=(None,), failing=(None,), outages=outages)
    columns = served(VllmInstalled(python=python), arrivals_ms=(0.0, 0.1, 0.2, 0.3), output=9, machines=2, fleet=fleet)
    assert columns.requests["status"].tolist() == [FINISHED] * 4
    assert columns.requests["failures"].tolist() == [1, 0, 1, 0]
    assert columns.requests["recomputed_tokens"].tolist() == [10, 0, 0, 0]


def test_a_release_that_cannot_be_driven_says_so_in_one_sentence(python: str) -> None:
    with pytest.raises(PolicyError, match=r"Tiny 1\.0: SchedulerConfig has no unheard_of; leave it out"):
        served(VllmInstalled(python=python, options={"unheard_of": True}), arrivals_ms=(0.0,))
    with pytest.raises(PolicyError, match="does not answer as a driven release does"):
        served(VllmInstalled(python=python, options={"falls_silent": True}), arrivals_ms=(0.0,))
    with pytest.raises(PolicyError, match="give the path of an interpreter"):
        served(VllmInstalled(python="/nowhere/python"), arrivals_ms=(0.0,))


def test_what_an_installed_scheduler_does_not_serve_is_refused(python: str) -> None:
    scheduler = VllmInstalled(python=python)
    spec = ReplicaSpec(cost=Linear(), scheduler=scheduler, kv_blocks=10)
    with pytest.raises(ValueError, match="a pipeline, ranks or models that share a machine"):
        MachineSpec(hosted=(replace(spec, micro_batches=2),))
    with pytest.raises(ValueError, match="asks for what each machine has cached"):
        Experiment(
            workload=Trace.from_arrays(arrival_ns=[0], prompt_tokens=[1], output_tokens=[1]),
            replicas=(spec, spec),
            router=Prefix(),
        )
    with pytest.raises(ValueError, match="Cap wraps an installed scheduler"):
        MachineSpec(hosted=(replace(spec, scheduler=Cap(inner=scheduler, max_sequences=4)),))
    with pytest.raises(ValueError, match="leave out what wraps it"):
        scheduler.plan(ReplicaView())


def test_adapters_are_asked_for_in_turn() -> None:
    scheduler = VllmInstalled(max_loras=1, adapters=3)
    assert [scheduler.asked(id_, 0).adapter for id_ in range(5)] == [1, 2, 3, 1, 2]
    with pytest.raises(ValueError, match="max_loras and adapters go together"):
        VllmInstalled(max_loras=1)


def test_a_single_machine_takes_any_router(python: str) -> None:
    trace = Trace.from_arrays(arrival_ns=[0], prompt_tokens=[5], output_tokens=[2])
    spec = ReplicaSpec(cost=Linear(), scheduler=VllmInstalled(python=python), kv_blocks=10)
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    assert columns.requests["status"].tolist() == [FINISHED]


def with_modules(folder: Path, modules: dict[str, str]) -> str:
    """An interpreter in which a package called vllm, of release 9.9, has these *modules*; its torch has one name."""
    (folder / "torch.py").write_text("float32 = None\n")
    package = folder / "vllm"
    package.mkdir()
    (folder / "vllm-9.9.dist-info").mkdir()
    (folder / "vllm-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    for name, source in {"__init__": "", **modules}.items():
        path = package.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        (
            {"config": "raise OSError('no library')"},
            r"vLLM 9\.9 has no vllm\.config that can be imported here \(OSError: no",
        ),
        (
            {"config": "CacheConfig = 1"},
            r"vLLM 9\.9 has no DeviceConfig in vllm\.config, by which its scheduler is driven",
        ),
        (ALL_MODULES, r"driving vLLM 9\.9 failed: TypeError: "),
    ],
)
def test_the_worker_names_the_release_and_what_it_lacks(tmp_path: Path, modules: dict[str, str], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        served(VllmInstalled(python=with_modules(tmp_path, modules)), arrivals_ms=(0.0,))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this environment has vLLM")
def test_an_interpreter_without_the_package_is_told_so_with_the_way_out() -> None:
    with pytest.raises(PolicyError, match=r"has no vLLM; give scheduler\.python the interpreter that has it"):
        served(VllmInstalled(python=sys.executable), arrivals_ms=(0.0,))
