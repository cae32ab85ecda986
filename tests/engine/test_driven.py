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

from policies.adapters import MaxLoras
from policies.driving import DrivingError, Engine
from policies.installed import SglangInstalled, VllmInstalled
from policies.installed.settings import Installed
from policies.installed.sglang.worker import NEEDED as SGLANG
from policies.installed.vllm.worker import NEEDED
from policies.routers import LeastOutstanding, Prefix, RoundRobin
from policies.schedulers import Sarathi
from policies.view import ReplicaView
from policies.wrappers import Cap
from sim.engine import ABORTED, FINISHED, Columns, Experiment, MachineSpec, PolicyError, ReplicaSpec, run
from sim.engine.record.columns import ADAPTERS
from sim.engine.spec.adapters import AdapterSpec
from sim.engine.spec.lifecycle import FleetSpec, Outage
from sim.engine.time.clock import TICKS_PER_S
from sim.metrics import summary
from sim.results.words import fact_rows
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
ENGINE = Engine(100, 16, 1024, False, 0, 0, 0)


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


def test_what_adapters_add_to_an_iteration_is_recorded_as_with_a_scheduler_of_ours(python: str) -> None:
    plain = Trace.from_arrays(arrival_ns=[0, 500_000], prompt_tokens=[10, 10], output_tokens=[3, 3])
    trace = replace(plain, adapter=np.array([0, 1]))
    slots = AdapterSpec(
        ranks=(8, 8), max_loras=2, max_cpu_loras=2, step_s=lambda rows, ranks: 1e-3 * len(ranks), disk_s=lambda _: 0.05,
        slot_s=lambda _: 0.01, loaded=False,
    )  # fmt: skip

    def extras_ms(scheduler: Any) -> list[tuple[float, float]]:
        spec = ReplicaSpec(
            cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=1000, block_tokens=16, adapters=slots
        )
        columns = run(Experiment(workload=trace, replicas=(spec,), router=LeastOutstanding()), check_invariants=True)
        ticks = columns.replicas[0].extras
        ticks = ticks[ticks["what"] == ADAPTERS]
        return [
            (start / TICKS_PER_S * 1e3, amount / TICKS_PER_S * 1e3)
            for start, amount in ticks[["start_ticks", "amount"]].tolist()
        ]

    theirs = extras_ms(VllmInstalled(python=python, async_scheduling=False))
    # A load of 60 ms beside 1 ms of kernels; the same for the other, beside 2 ms; both; the second alone.
    assert [amount for _, amount in theirs] == pytest.approx([61.0, 62.0, 2.0, 1.0])
    ours = extras_ms(MaxLoras(Sarathi(token_budget=100_000, max_sequences=1024, watermark=0.0), max_loras=2))
    assert np.array(ours) == pytest.approx(np.array(theirs))


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


def test_a_single_machine_takes_any_router(python: str) -> None:
    trace = Trace.from_arrays(arrival_ns=[0], prompt_tokens=[5], output_tokens=[2])
    spec = ReplicaSpec(cost=Linear(), scheduler=VllmInstalled(python=python), kv_blocks=10)
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin()))
    assert columns.requests["status"].tolist() == [FINISHED]


def with_modules(folder: Path, modules: dict[str, str], package: str = "vllm") -> str:
    """An interpreter in which *package*, of release 9.9, has these *modules*; its torch has five names."""
    (folder / "torch.py").write_text(
        "float16 = float32 = int64 = None\ndef zeros(n, dtype): return [0] * n\ndef tensor(values): return values\n"
    )
    (folder / "transformers").mkdir()
    for name in ("__init__", "image_utils"):
        (folder / "transformers" / f"{name}.py").touch()
    (folder / f"{package}-9.9.dist-info").mkdir()
    (folder / f"{package}-9.9.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n"
    )
    for name, source in {"__init__": "", **modules}.items():
        path = folder.joinpath(package, *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for each in path.relative_to(folder).parents[:-1]:
            (folder / each / "__init__.py").touch()
        path.write_text(source)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:{FAKE.parent}" exec "{sys.executable}" "$@"\n')
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


@pytest.mark.parametrize(
    ("scheduler", "title"),
    [(VllmInstalled(python=sys.executable), "vLLM"), (SglangInstalled(python=sys.executable), "SGLang")],
)
def test_an_interpreter_without_the_package_is_told_so_with_the_way_out(scheduler: Installed, title: str) -> None:
    if find_spec(title.lower()) is not None:
        pytest.skip(f"this environment has {title}")
    with pytest.raises(PolicyError, match=rf"has no {title}; give scheduler\.python the interpreter that has it"):
        served(scheduler, arrivals_ms=(0.0,))


@pytest.mark.parametrize("scheduler", [VllmInstalled, SglangInstalled])
def test_an_interpreter_is_looked_up_as_a_shell_does(
    scheduler: type[Installed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = r"python tiny-python: no program of that name is on the PATH; give the path of an interpreter"
    with pytest.raises(PolicyError, match=sentence):
        served(scheduler(python="tiny-python"), arrivals_ms=(0.0,))
    program = tmp_path / "tiny-python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scheduler(python="tiny-python").connect(ENGINE).release == "Tiny 1.0"


def test_the_summary_names_the_release_that_has_decided(python: str) -> None:
    columns = served(VllmInstalled(python=python), arrivals_ms=(0.0, 0.5))
    found = summary(columns)
    assert found["releases"] == ["Tiny 1.0"]
    assert ("Scheduled by", "Tiny 1.0") in fact_rows(found)


# SGLang, of which a release is made up.

SGLANG_MODULES = {
    **{
        module.removeprefix("sglang."): f"from fake_sglang import {', '.join(names)}\n"
        for module, names in SGLANG.items()
    },
    "srt.mem_cache.unified_cache.components": "from fake_sglang import ComponentType\n",
    "srt.mem_cache.allocator.paged": "from fake_sglang import PagedTokenToKVPoolAllocator, alloc_decode_naive\n",
}


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with a made-up SGLang."""
    return with_modules(tmp_path_factory.mktemp("sglang"), SGLANG_MODULES, "sglang")


def test_prompts_of_sglang_go_before_decodes_and_take_simulated_time(sglang: str) -> None:
    columns = served(SglangInstalled(python=sglang, disable_overlap_schedule=True), arrivals_ms=(0.0, 0.5))
    # A prompt; the other; two decodes, twice.
    assert columns.iterations()["duration_ns"].tolist() == [1_010_000, 1_010_000, 1_002_000, 1_002_000]
    assert columns.requests["first_token_ns"].tolist() == [1_010_000, 2_020_000]
    assert columns.requests["finish_ns"].tolist() == [4_024_000, 4_024_000]
    assert columns.meta["releases"] == ["SGLang 9.9"]


def test_with_overlap_sglang_plans_while_the_iteration_before_runs(sglang: str) -> None:
    ahead = served(SglangInstalled(python=sglang), arrivals_ms=(0.0, 0.5))
    # The second iteration, a decode, had been planned when the other request came.
    assert ahead.requests["scheduled_ns"].tolist() == [0, 2_011_000]
    assert ahead.requests["status"].tolist() == [FINISHED, FINISHED]


def test_sglang_serves_random_arrivals_clients_that_go_and_grammars(sglang: str) -> None:
    rng = np.random.default_rng(8)
    for overlap in (False, True):
        scheduler = SglangInstalled(
            python=sglang,
            disable_overlap_schedule=not overlap,
            max_running_requests=3,
            grammar_s=0.05,
            grammar_share=0.3,
        )
        arrivals = tuple(np.sort(rng.uniform(0, 20, 20)).tolist())
        patience = np.where(rng.random(20) < 0.3, rng.uniform(0, 0.06, 20), np.nan)
        columns = served(scheduler, arrivals_ms=arrivals, output=6, abort_s=patience.tolist())
        status = columns.requests["status"]
        assert set(status[np.isnan(patience)].tolist()) == {FINISHED}
        assert ABORTED in status.tolist()
        compiles = np.array([scheduler.asked(id_, 0).grammar_ns > 0 for id_ in range(20)])
        waited_ms = (columns.requests["scheduled_ns"] - columns.requests["arrival_ns"]) / MS
        begun = columns.requests["scheduled_ns"] >= 0
        assert (waited_ms[compiles & begun] >= 50).all()
        assert (waited_ms[~compiles & begun]).min() < 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"no_such_argument": 1}, r"SGLang 9\.9: ServerArgs has no no_such_argument; leave it out, or take a release"),
        (
            {"tp_size": 2},
            r"SGLang 9\.9: tp_size does not reach the scheduler where it is driven without a model; leave it out",
        ),
    ],
)
def test_a_server_argument_that_sglang_would_not_heed_is_refused(
    sglang: str, options: dict[str, Any], sentence: str
) -> None:
    served(SglangInstalled(python=sglang, options={"retraction_policy": "priority"}), arrivals_ms=(0.0,))
    with pytest.raises(PolicyError, match=sentence):
        served(SglangInstalled(python=sglang, options=options), arrivals_ms=(0.0,))


@pytest.mark.parametrize(
    ("module", "source", "sentence"),
    [
        (
            "srt.managers.scheduler",
            "class Scheduler: pass",
            r"SGLang 9\.9: Scheduler has no get_next_batch_to_run, by which its scheduler is driven",
        ),
        (
            "srt.managers.scheduler",
            "class Scheduler:\n    def get_next_batch_to_run(self, running_batch): pass",
            r"SGLang 9\.9: Scheduler\.get_next_batch_to_run takes no last_batch, by which",
        ),
        ("srt.managers.io_struct", "", r"SGLang 9\.9 has no AbortReq in sglang\.srt\.managers\.io_struct, by which"),
    ],
)
def test_what_has_changed_in_sglang_is_named_with_the_release(
    tmp_path: Path, module: str, source: str, sentence: str
) -> None:
    python = with_modules(tmp_path, {**SGLANG_MODULES, module: source}, "sglang")
    with pytest.raises(PolicyError, match=sentence):
        served(SglangInstalled(python=python), arrivals_ms=(0.0,))


def test_speculation_under_an_installed_sglang_is_refused(sglang: str) -> None:
    with pytest.raises(DrivingError, match=r"SGLang 9\.9 is driven without speculation; leave decoding out"):
        SglangInstalled(python=sglang).connect(ENGINE._replace(k=2))


def test_settings_of_an_installed_sglang_are_those_of_ours_with_every_order_of_the_queue() -> None:
    assert SglangInstalled(schedule_policy="hrrn").schedule_policy == "hrrn"
    with pytest.raises(ValueError, match="max_prefill_tokens is a whole number of at least 1"):
        SglangInstalled(max_prefill_tokens=0)
    with pytest.raises(ValueError, match="grammar_s is a time of at least 0"):
        SglangInstalled(grammar_s=-1.0)
