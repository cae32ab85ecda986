"""`python -m hwmodels.calibrate --out DIR`: take samples with nothing but numpy and a back end, to be fitted elsewhere."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from hwmodels.calibrate.backend import BACKENDS, DEVICES, CalibrationError, Facts
from hwmodels.calibrate.session import Progress
from hwmodels.calibrate.take import FULL_S, QUICK_S, Request, seconds_of, take


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 refused, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m hwmodels.calibrate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the samples")
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument("--device", default="auto", choices=("auto", *DEVICES))
    parser.add_argument("--model", action="append", default=[], help="time this model's shapes (more than once: each)")
    parser.add_argument("--dtype", action="append", default=[], help="number format (more than once: each)")
    parser.add_argument("--budget", help="time to spend, such as 10min; earlier runs into the same folder count")
    parser.add_argument("--quick", action="store_true", help=f"the same as --budget {QUICK_S:g}s")
    parser.add_argument("--threads", type=int, help="of a CPU; left out: the cores that are free of other work")
    parser.add_argument("--clock", default="auto", choices=("auto", "wall", "cpu"))
    parser.add_argument("--allow-noise", action="store_true", help="go on when repeats scatter")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.quick and chosen.budget:
            raise CalibrationError("--quick is a budget of its own; give one of --quick and --budget")
        budget_s = seconds_of(chosen.budget) if chosen.budget else QUICK_S if chosen.quick else FULL_S
        request = Request(
            out=chosen.out, backend=chosen.backend, device=chosen.device, models=tuple(chosen.model),
            dtypes=tuple(chosen.dtype), budget_s=budget_s, threads=chosen.threads, clock=chosen.clock,
            allow_noise=chosen.allow_noise,
        )  # fmt: skip
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        taken = take(request, taken_on=today, opened=_introduce, report=_show)
    except CalibrationError as error:
        print(f"\nError: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nInterrupted; the samples in {chosen.out} are kept. The same command goes on.", file=sys.stderr)
        return 130
    print(f"\n{len(taken.samples)} operations in {chosen.out}.")
    for reason, count in taken.skipped.items():
        print(f"left out: {reason} ({count})")
    print(f"Fit them with: rooftrace calibrate --fit-only --out {chosen.out}")
    return 0


def _introduce(facts: Facts) -> None:
    print(
        f"{facts.title}: {facts.backend} {facts.backend_version}, {facts.cores} cores, {facts.clock} clock", flush=True
    )


def _show(progress: Progress) -> None:
    if sys.stderr.isatty():
        text = f"{progress.taken} of {progress.of}, {progress.left_s:.0f} s left: {progress.now}"
        print(f"\r{text:<110.110}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
