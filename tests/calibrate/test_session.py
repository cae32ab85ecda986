"""Taking samples: budgets, interruptions, refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from hwmodels.calibrate import __main__ as command
from hwmodels.calibrate.backend import CalibrationError, Operation, open_backend
from hwmodels.calibrate.fake import FakeBackend
from hwmodels.calibrate.grid import grid, shapes_of
from hwmodels.calibrate.samples import LOG, Log, read_log
from hwmodels.calibrate.session import collect
from hwmodels.calibrate.take import seconds_of

ROOT = Path(__file__).parents[2]


def operations(backend: FakeBackend, count: int) -> list[Operation]:
    return grid(backend.facts, [shapes_of("gpt2")], ["fp32"])[:count]


def log(folder: Path, backend: FakeBackend) -> Log:
    return Log(folder, backend.facts, taken_on="2026-01-01")


def test_an_interruption_keeps_every_sample_and_the_next_run_goes_on(tmp_path: Path) -> None:
    seen: list[str] = []

    def interrupt(op: Operation) -> None:
        if len(set(seen) | {op.key}) > 20:
            raise KeyboardInterrupt
        seen.append(op.key)

    first = FakeBackend(on_run=interrupt)
    chosen = operations(first, 50)
    with pytest.raises(KeyboardInterrupt):
        collect(first, chosen, log(tmp_path, first), budget_s=60.0)
    _, _, kept = read_log(tmp_path)
    assert [sample.operation.key for sample in kept] == list(dict.fromkeys(seen))

    timed: list[str] = []
    second = FakeBackend(on_run=lambda op: timed.append(op.key))
    taken = collect(second, chosen, log(tmp_path, second), budget_s=60.0)
    assert not set(timed) & {sample.operation.key for sample in kept}
    assert taken.samples[: len(kept)] == tuple(kept)
    assert len(taken.samples) + sum(taken.skipped.values()) == 50


def test_a_run_that_is_killed_loses_no_finished_sample(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from hwmodels.calibrate.fake import FakeBackend
        from hwmodels.calibrate.grid import grid, shapes_of
        from hwmodels.calibrate.samples import Log
        from hwmodels.calibrate.session import collect
        backend = FakeBackend(on_run=lambda op: time.sleep(0.002))
        chosen = grid(backend.facts, [shapes_of("gpt2")], ["fp32"])
        log = Log(Path({str(tmp_path)!r}), backend.facts, taken_on="2026-01-01")
        collect(backend, chosen, log, budget_s=60.0, report=lambda p: print(p.taken, flush=True))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reported = 0
    for line in process.stdout:
        reported = int(line)
        if reported >= 10:
            break
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    _, _, kept = read_log(tmp_path)
    assert len(kept) >= reported


def test_a_torn_last_line_is_timed_again(tmp_path: Path) -> None:
    backend = FakeBackend()
    chosen = operations(backend, 10)
    collect(backend, chosen, log(tmp_path, backend), budget_s=60.0)
    path = tmp_path / LOG
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = log(tmp_path, backend)
    assert len(again.samples) == len(whole.splitlines()) - 2
    taken = collect(backend, chosen, again, budget_s=60.0)
    assert len(path.read_bytes().splitlines()) == len(whole.splitlines())
    assert len({sample.operation for sample in taken.samples}) == len(taken.samples)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    backend = FakeBackend()
    collect(backend, operations(backend, 5), log(tmp_path, backend), budget_s=60.0)
    path = tmp_path / LOG
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"seconds": [', '"seconds": [NaN, ')
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CalibrationError, match=r"line 3 is damaged .*positive finite"):
        read_log(tmp_path)


def test_samples_of_a_newer_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"format": 99, "facts": {}}\n')
    with pytest.raises(CalibrationError, match="written in format 99, this release reads up to 1"):
        read_log(tmp_path)


def test_samples_of_another_device_are_not_mixed(tmp_path: Path) -> None:
    backend = FakeBackend()
    log(tmp_path, backend)
    other = FakeBackend()
    object.__setattr__(other.facts, "cores", 2)
    with pytest.raises(CalibrationError, match=r"holds samples of .* 1 cores.*and this run is on .* 2 cores"):
        log(tmp_path, other)


def test_a_spent_budget_stops_the_run_and_counts_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock goes on by 5 ms with each operation that is run, on a busy machine as on a quiet one.
    ran: list[Operation] = []
    monkeypatch.setattr("hwmodels.calibrate.session.time", SimpleNamespace(monotonic=lambda: 0.005 * len(ran)))
    slow = FakeBackend(on_run=ran.append)
    chosen = operations(slow, 200)
    first = collect(slow, chosen, log(tmp_path, slow), budget_s=0.6, allow_noise=True)
    assert first.out_of_time
    assert 0 < len(first.samples) < 200
    more = collect(slow, chosen, log(tmp_path, slow), budget_s=0.05, allow_noise=True)
    assert [s.operation for s in more.samples] == [s.operation for s in first.samples]


def test_any_prefix_of_the_grid_covers_small_and_large_products() -> None:
    first = [op for op in operations(FakeBackend(), 120) if op.kind == "gemm"]
    rows = {op["m"] for op in first}
    assert min(rows) <= 2
    assert max(rows) >= 512
    assert len({(op["n"], op["k"]) for op in first}) >= 12


def test_scattering_repeats_are_refused_with_the_way_on(tmp_path: Path) -> None:
    noisy = FakeBackend(noise=0.5)
    with pytest.raises(CalibrationError, match=r"busy with other work.*--allow-noise"):
        collect(noisy, operations(noisy, 60), log(tmp_path, noisy), budget_s=60.0)
    assert len(read_log(tmp_path)[2]) == 12
    taken = collect(noisy, operations(noisy, 60), log(tmp_path, noisy), budget_s=60.0, allow_noise=True)
    assert len(taken.samples) > 50


def test_what_does_not_fit_in_memory_is_left_out_and_counted(tmp_path: Path) -> None:
    full = FakeBackend(memory_bytes=3e6)
    every = grid(FakeBackend().facts, [shapes_of("gpt2")], ["fp32"])[:60]
    taken = collect(full, every, log(tmp_path, full), budget_s=60.0)
    assert taken.skipped["out of memory"] > 5
    assert taken.samples


def test_a_device_without_room_for_anything_is_refused(tmp_path: Path) -> None:
    full = FakeBackend(memory_bytes=1.0)
    every = [op for op in operations(FakeBackend(), 60) if op.kind == "gemm"]
    with pytest.raises(CalibrationError, match="nothing could be timed: out of memory"):
        collect(full, every, log(tmp_path, full), budget_s=60.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("numpy", "cuda"), "numpy runs on the CPU only"),
        (("cupy", "auto"), "backend must be auto"),
        (("auto", "npu"), "device must be auto"),
    ],
)
def test_a_missing_device_is_refused_with_the_reason(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        open_backend(*arguments)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10min", 600.0), ("0.5h", 1800.0), ("45", 45.0)])
def test_budgets_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-3s", "0min", "nan"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(CalibrationError, match="budget is a time"):
        seconds_of(text)


def test_the_timing_half_imports_numpy_and_nothing_else_of_weight(tmp_path: Path) -> None:
    heavy = ("scipy", "pandas", "matplotlib", "pydantic", "typer", "rich", "simpy", "pyarrow", "torch", "jax")
    script = textwrap.dedent(
        f"""
        import sys
        for name in {heavy!r}:
            sys.modules[name] = None
        sys.argv = ["calibrate", "--backend", "numpy", "--budget", "0.1s", "--allow-noise", "--out", {str(tmp_path)!r}]
        import runpy
        runpy.run_module("hwmodels.calibrate", run_name="__main__")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rooftrace calibrate --fit-only" in done.stdout
    assert read_log(tmp_path)[2]


def test_the_module_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path), "--backend", "numpy", "--device", "cuda"]) == 2
    assert "Error: numpy runs on the CPU only" in capsys.readouterr().err
