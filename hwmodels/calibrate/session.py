"""Taking samples: within a time budget, kept as they are taken, refused when they scatter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hwmodels.calibrate.backend import Backend, CalibrationError, Operation, OutOfMemory
from hwmodels.calibrate.samples import Log, Sample, median_spread

MAX_SPREAD = 0.25
_FIRST_LOOK = 12  # operations after which scatter is judged for the first time
_SHORTEST_S = 2e-4  # runs are looped up to this long, so that a clock tick is no error
_FEWEST, _MOST = 5, 25
_HARDLY_REPEATED_S = 0.3  # runs longer than this are repeated three times


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run: operations kept (earlier runs too), how many there are, and seconds of the budget left."""

    taken: int
    of: int
    left_s: float
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The outcome of a run: samples in all, why operations were left out (with how many), and whether time ran out."""

    samples: tuple[Sample, ...]
    skipped: dict[str, int]
    out_of_time: bool


def collect(
    backend: Backend,
    operations: Sequence[Operation],
    log: Log,
    *,
    budget_s: float,
    allow_noise: bool = False,
    report: Callable[[Progress], None] = lambda _: None,
) -> Taken:
    """Time the operations that *log* lacks, in their order, until *budget_s* of all runs together is spent.

    Each sample is on the disk before the next is taken, so that an interruption loses the one in hand at most.
    CalibrationError when repeats of one operation scatter by more than `MAX_SPREAD` in the median and *allow_noise* is
    not set, and when everything is out of memory or unsupported; what was taken stays.
    """
    if not budget_s > 0:
        raise CalibrationError(f"budget must be a positive time; got {budget_s:g} s")
    have = {sample.operation.key for sample in log.samples}
    spent = sum(sample.spent_s for sample in log.samples)
    todo = [op for op in operations if op.key not in have]
    target_s = budget_s / max(1, len(operations))
    skipped: dict[str, int] = {}
    start, earlier = time.monotonic(), len(log.samples)
    out_of_time = False
    for op in todo:
        left_s = budget_s - spent - (time.monotonic() - start)
        report(Progress(taken=len(log.samples), of=len(operations), left_s=max(0.0, left_s), now=op.key))
        if left_s <= 0:
            out_of_time = True
            break
        reason = backend.supports(op)
        if reason is None:
            try:
                log.add(_time(backend, op, min(1.5, max(0.02, target_s))))
            except OutOfMemory:
                reason = "out of memory"
        if reason is not None:
            skipped[reason] = skipped.get(reason, 0) + 1
        if len(log.samples) - earlier == _FIRST_LOOK:
            _check_spread(log.samples, allow_noise)
    if not log.samples:
        why = "; ".join(f"{reason} ({count} operations)" for reason, count in skipped.items()) or "no time was left"
        raise CalibrationError(f"nothing could be timed: {why}; free memory, raise --budget or take another device")
    _check_spread(log.samples, allow_noise)
    return Taken(samples=tuple(log.samples), skipped=skipped, out_of_time=out_of_time)


def _time(backend: Backend, op: Operation, target_s: float) -> Sample:
    began = time.monotonic()
    run = backend.prepare(op)
    first = run(1)
    if first < _HARDLY_REPEATED_S:
        first = min(first, run(2))
    loops = max(1, int(_SHORTEST_S / max(first, 1e-9)))
    loops = min(loops, 2000)
    repeats = int(target_s / (loops * first)) if first < _HARDLY_REPEATED_S else 3
    repeats = max(3 if first >= _HARDLY_REPEATED_S else _FEWEST, min(_MOST, repeats))
    seconds = tuple(max(run(loops), 1e-9) for _ in range(repeats))
    return Sample(operation=op, seconds=seconds, spent_s=time.monotonic() - began)


def _check_spread(samples: Sequence[Sample], allow_noise: bool) -> None:
    spread = median_spread(samples)
    if spread > MAX_SPREAD and not allow_noise:
        raise CalibrationError(
            f"repeats of one operation scatter by {100 * spread:.0f} % of their median (limit "
            f"{100 * MAX_SPREAD:.0f} %): the device is busy with other work; samples so far are kept. Go on when it is "
            "quiet, with fewer --threads on a CPU, or with --allow-noise"
        )
