"""Whether two checkouts give the same results, to the nanosecond.

    python -m benchmarks.same_results REFERENCE [--runs 100] [--scenarios 60] [--first 0] [--reproduce] [--stepping]

*REFERENCE* is the other checkout, such as a git worktree of an earlier commit. Every example, random runs of the engine and random
scenarios are run once in each checkout, by the code of that checkout, and their columns, iterations and gaps between tokens are
compared where both have them; what differs is named, and the exit code is 1. `--reproduce` adds the rows of `rooftrace reproduce`,
which take minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

# Of the checkout that is first on the path: a worker runs the code of its own.
from sim import Scenario
from sim.engine import run
from sim.run import run_built
from sim.scenario.assembly import resolve
from tests.engine import random_runs
from tests.scenario.random_scenarios import draw, write_files

Digest = dict[str, str]
"""By name of a column or figure, what stands for its values."""

_UNRELATED = ("wall_s", "events", "created", "versions", "commit")
"""Figures of a run that say how it was run and not what came of it."""


def examples(root: Path) -> list[str]:
    return [f"example {path.name}" for path in sorted((root / "examples").glob("*.yaml"))]


def cases(root: Path, options: argparse.Namespace) -> list[str]:
    """The names of what is compared, in order."""
    seeds = range(options.first, options.first + max(options.runs, options.scenarios))
    found = [f"run {seed}" for seed in seeds[: options.runs]] + [
        f"scenario {seed}" for seed in seeds[: options.scenarios]
    ]
    if options.examples:
        found += examples(root)
    if options.reproduce:
        found += [f"reproduce {name}" for name in ("sarathi", "alpaserve", "speculative")]
    return [name for name in found if options.only in name]


# In one checkout.


def random_run(seed: int) -> Any:
    """An experiment over all that the engine does: each tenth of the seeds adds other features."""
    speculative, kind = random.Random(seed).random() < 0.4, seed % 10
    experiment = random_runs.apart(seed, speculative=speculative) if kind in (3, 4, 5, 8) else None
    if experiment is None:
        experiment = random_runs.an_experiment(seed, speculative=speculative)
    if kind in (2, 5, 7, 9):
        experiment = random_runs.with_ranks(experiment, seed)
    if kind in (1, 4, 7, 8):
        experiment = random_runs.with_tiers(experiment, seed)
    if kind in (6, 7, 8, 9) and hasattr(experiment.workload, "arrival_ns"):
        experiment = random_runs.with_fleet(experiment, seed)
    if seed % 7 == 0 and kind in (0, 1, 2):
        experiment = random_runs.with_looks(experiment, seed)[0]
    return experiment


def _digest(values: Any) -> str:
    if isinstance(values, np.ndarray):
        whole = np.ascontiguousarray(values.astype(np.int64) if values.dtype.kind in "iub" else values)
        return hashlib.sha256(whole.tobytes()).hexdigest()[:16]
    return hashlib.sha256(repr(_rounded(values)).encode()).hexdigest()[:16]


def _rounded(value: Any) -> Any:
    """*value* with floats at twelve digits, since sums of them depend on their order; integers stay exact."""
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: _rounded(value[name]) for name in sorted(value, key=str)}
    return value


def _of_columns(columns: Any) -> Iterator[tuple[str, str]]:
    for name, column in columns.requests.items():
        yield f"requests.{name}", _digest(column)
    for name, column in columns.iterations().items():
        yield f"iterations.{name}", _digest(column)
    transfers = columns.transfers()
    for name, column in () if transfers is None else transfers.items():
        # Older checkouts have those of tiers alone.
        yield f"transfers.{name}", _digest(column[transfers["tier"] >= 0])
    gaps, weights = columns.itl()
    lengths, index = np.unique(gaps, return_inverse=True)
    yield "gaps", _digest(lengths) + _digest(np.bincount(index, weights=weights))
    yield "reasons", _digest(columns.reasons)
    for name, value in columns.meta.items():
        if name not in _UNRELATED:
            yield f"meta.{name}", _digest(value)


def _of_mapping(mapping: dict[str, Any], under: str) -> Iterator[tuple[str, str]]:
    for name, value in mapping.items():
        if isinstance(value, dict):
            yield from _of_mapping(value, f"{under}.{name}")
        elif name not in _UNRELATED:
            yield f"{under}.{name}", _digest(value)


def _of_scenario(scenario: Any, fast_forward: bool) -> Digest:
    result = run_built(resolve(scenario), fast_forward=fast_forward).or_whole()
    return {**dict(_of_columns(result.columns)), **dict(_of_mapping(result.summary, "summary"))}


def _of_reproduction(name: str) -> Digest:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", "from sim.cli import main; main()", "reproduce", name, "--out", folder],
            capture_output=True,
            text=True,
        )
        tables = {
            str(path.relative_to(folder)): _digest(path.read_bytes()) for path in sorted(Path(folder).rglob("*.csv"))
        }
    if not tables:
        raise RuntimeError(f"rooftrace reproduce {name} wrote no table: {done.stderr[-200:]}")
    return {"exit code": str(done.returncode), **tables}


def outcome(case: str, root: Path, files: Path, *, fast_forward: bool) -> Digest:
    """The outcome of one case in this checkout; an error is one, too."""
    kind, _, name = case.partition(" ")
    try:
        if kind == "run":
            return dict(_of_columns(run(random_run(int(name)), fast_forward=fast_forward)))
        if kind == "reproduce":
            return _of_reproduction(name)
        if kind == "example":
            return _of_scenario(Scenario.load(root / "examples" / name), fast_forward)
        drawn = draw(random.Random(int(name)))
        return _of_scenario(Scenario.from_mapping(drawn, folder=files), fast_forward)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def work(root: Path, stepping: bool) -> None:
    """Read names of cases and print what comes of each, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for line in sys.stdin:
            case = line.strip()
            print(json.dumps([case, outcome(case, root, Path(folder), fast_forward=not stepping)]), flush=True)


# Two of them.


def _outcomes(root: Path, wanted: list[str], stepping: bool) -> dict[str, Digest]:
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", __file__, str(root), "--work", *(["--stepping"] if stepping else [])]
    given = "\n".join(wanted) + "\n"
    done = subprocess.run(command, cwd=root, env=environment, input=given, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def differences(here: Digest, there: Digest) -> list[str]:
    """Names of what differs between two outcomes of a case, of what both have; all where one ended with an error."""
    if ("error" in here) != ("error" in there):
        return ["error"]
    return sorted(name for name in here.keys() & there.keys() if here[name] != there[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("reference", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=100, help="random runs of the engine")
    parser.add_argument("--scenarios", type=int, default=60, help="random scenarios")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", default="", help="compare only what has this word in its name")
    parser.add_argument("--no-examples", dest="examples", action="store_false", help="leave the examples out")
    parser.add_argument("--reproduce", action="store_true", help="add the rows of `rooftrace reproduce`")
    parser.add_argument("--stepping", action="store_true", help="step through every iteration, in both")
    parser.add_argument("--errors", action="store_true", help="print those that end with an error in both")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.reference, options.stepping)
        return 0
    root = Path(__file__).parents[1]
    wanted = cases(root, options)
    with ThreadPoolExecutor(2) as pool:
        both = (root, options.reference.resolve())
        here, there = pool.map(lambda each: _outcomes(each, wanted, options.stepping), both)
    n_different = n_errors = 0
    one_sided: dict[str, set[str]] = {"here": set(), "there": set()}
    for case in wanted:
        mine, theirs = here.get(case, {"error": "nothing came of it"}), there.get(case, {"error": "nothing came of it"})
        n_errors += "error" in mine
        different = differences(mine, theirs)
        if different != ["error"]:
            one_sided["here"] |= mine.keys() - theirs.keys()
            one_sided["there"] |= theirs.keys() - mine.keys()
        if different:
            n_different += 1
            print(f"{case}: {', '.join(different[:8])}{' ...' if len(different) > 8 else ''}")
            for name, outcome_ in (("here", mine), ("there", theirs)):
                if "error" in outcome_:
                    print(f"  {name}: {outcome_['error']}")
    if options.errors:
        for case in wanted:
            if "error" in here.get(case, {}):
                print(f"{case}: {here[case]['error'][:160]}")
    for where, names in one_sided.items():
        if names:
            print(f"only {where}, not compared: {', '.join(sorted(names)[:12])}{' ...' if len(names) > 12 else ''}")
    print(
        f"{len(wanted)} cases, of which {n_errors} end with an error and are compared by its text alone: {n_different} differ"
    )
    return int(n_different > 0)


if __name__ == "__main__":
    sys.exit(main())
