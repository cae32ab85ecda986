"""Checks of any scenario: `faults` runs one in every way and says what does not, `shrunk` leaves out what it does not need.

    python -m tests.scenario.check_scenario 0 2000

draws the scenarios of these seeds, counts by their sentences those that are refused, and prints of each kind of fault the smallest
scenario that still has it.
"""

from __future__ import annotations

import contextlib
import copy
import re
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

from sim import Scenario
from sim.engine import run
from sim.errors import RooftraceError
from sim.results import Result
from sim.run import run_built
from sim.scenario.assembly import resolve
from tests.engine.random_runs import assert_same
from tests.scenario.random_scenarios import draw, write_files
from tests.scenario.recompute import differences, summary_of

LIMIT_S = 60.0
"""Processor seconds for one scenario: they take a tenth of a second, and what takes so long never ends."""


_OF_SPANS = frozenset({"power_share_s", "prompt_share", "prompt_attention_share", "decode_kv_share"})


class Refused(Exception):
    """The scenario is not run, which the product says in a sentence."""


def faults(mapping: dict[str, Any], folder: Path, *, invariants: bool) -> list[str]:
    """The checks that fail for a scenario, *folder* being that of its files; Refused where it is refused. With *invariants* these
    are looked at after every event, which takes longer."""
    try:
        with _in_time(), warnings.catch_warnings():
            warnings.simplefilter("error")
            return list(_faults(mapping, folder, invariants))
    except Refused:
        raise
    except Exception as error:
        frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return [f"{type(error).__name__}: {error} ({' '.join(frames[-6:])})"]


def _faults(mapping: dict[str, Any], folder: Path, invariants: bool) -> Iterator[str]:
    try:
        built = resolve(Scenario.from_mapping(copy.deepcopy(mapping), folder=folder))
    except RooftraceError as error:
        raise Refused(_one_sentence(error)) from None
    try:
        # Whether a window holds anything is known when the run has ended.
        result = run_built(built).or_whole()
    except RooftraceError as error:
        # Memory in which no sequence gets on is found in the run alone, as vLLM itself never ends there.
        if "sequences take memory from each other in turn" not in str(error):
            raise
        raise Refused(_one_sentence(error)) from None
    summary = result.summary
    yield from differences({key: value for key, value in summary.items() if key != "wall_s"},
                           summary_of(result.columns, result.manifest, result.slo))  # fmt: skip
    yield from _unaccounted(result)
    yield from _read_back(result)
    others: dict[str, Any] = {"stepping": run_built(built, fast_forward=False).columns}
    if invariants:
        others["invariants"] = run(built.experiment, check_invariants=True)
    for name, other in others.items():
        try:
            assert_same(result.columns, other)  # type: ignore[arg-type]
        except AssertionError as error:
            yield f"{name}: {_in_a_line(error)}"
        # How many events there were is what spans save. Power and shares are the mean of a span's first and last iteration.
        for names, within in ((_OF_SPANS, 0.01), (other.meta.keys() - {"wall_s", "events", *_OF_SPANS}, 1e-9)):
            one, two = (
                {key: meta[key] for key in names if key in other.meta} for meta in (result.columns.meta, other.meta)
            )
            yield from (f"{name}: {each}" for each in differences(one, two, "meta.", within=within))


def _one_sentence(error: Exception) -> str:
    text = str(error)
    assert text.strip(), "an error without a sentence"
    assert "\n" not in text, f"an error of several lines: {text}"
    return text


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _unaccounted(result: Result) -> Iterator[str]:
    """Requests of which nothing, or too little, is said."""
    columns = result.columns
    requests = result.requests
    n = len(requests)
    if (requests["request_id"] != np.arange(n)).any():
        yield "requests are not numbered one by one"
    by_status = requests.groupby("status")
    for status, mine in by_status:
        if status == "finished" and (mine["emitted_tokens"] != mine["output_tokens"]).any():
            yield "a request finished and has not emitted its output"
        if status == "rejected" and mine["reason"].isna().any():
            yield "a request was rejected without a reason"
    done = requests[requests["status"] == "finished"]
    if not ((done["arrival_ns"] <= done["scheduled_ns"]) & (done["scheduled_ns"] <= done["finish_ns"])).all():
        yield "a request finished before it was scheduled, or was scheduled before it arrived"
    if (requests["emitted_tokens"] > requests["output_tokens"]).any():
        yield "a request has emitted more than its output"
    left = requests[requests["status"] == "unfinished"]
    never_sent = int((columns.requests["arrival_ns"] < 0).sum())
    fleet = columns.meta.get("fleet")
    held = 0 if fleet is None else fleet["held_to_the_end"]
    # Prompts that are held on machines that prefill, none being left that decodes, have others wait behind them.
    behind = "prefilled_ns" in requests and held > 0
    if len(left) - never_sent != held and not (behind and len(left) - never_sent > held):
        yield f"{len(left) - never_sent} requests that were sent are unfinished, and {held} were held to the end of the run"
    if never_sent and not len(left) > never_sent:
        yield f"{never_sent} requests were never sent, though none was held"


def _read_back(result: Result) -> Iterator[str]:
    import json

    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "run")
        stored = Result.load(Path(folder) / "run")
        if json.loads(json.dumps(result.summary)) != stored.summary:
            yield f"read back: {next(differences(stored.summary, json.loads(json.dumps(result.summary))), 'a summary')}"
        manifest = json.loads(json.dumps(result.manifest))
        if manifest != {key: stored.manifest.get(key) for key in manifest}:
            yield "read back: another manifest"
        for name in ("requests", "iterations", "kv_transfers"):
            one, other = getattr(result, name), getattr(stored, name)
            if one is None and other is None:
                continue
            if not one.equals(other[one.columns]) or set(one.columns) != set(other.columns):
                yield f"read back: other {name}"


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """TimeoutError after LIMIT_S of processor time; no limit outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {LIMIT_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def kind_of(fault: str) -> str:
    """A fault without its numbers, to tell kinds apart."""
    return re.sub(r"[0-9][0-9_.,e+-]*", "N", fault.split(" (", 1)[0])[:120]


def shrunk(mapping: dict[str, Any], folder: Path, *, invariants: bool) -> dict[str, Any]:
    """The scenario without all keys that its first fault does not need."""
    wanted = kind_of(faults(mapping, folder, invariants=invariants)[0])

    def fails(smaller: dict[str, Any]) -> bool:
        try:
            return any(kind_of(each) == wanted for each in faults(smaller, folder, invariants=invariants))
        except Refused:
            return False

    again = True
    while again:
        again = False
        for path in sorted(_paths(mapping), key=len):
            smaller = _without(mapping, path)
            if smaller is not None and fails(smaller):
                mapping, again = smaller, True
    return mapping


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from _paths(each, (*path, key))


def _without(mapping: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any] | None:
    """The same without what *path* leads to; a wrapper's `inner` takes its place. None where that is gone already."""
    found = copy.deepcopy(mapping)
    at: Any = found
    try:
        for key in path[:-1]:
            at = at[key]
        value = at[path[-1]]
        if isinstance(value, dict) and "inner" in value:
            at[path[-1]] = value["inner"]
        else:
            del at[path[-1]]
    except (KeyError, IndexError, TypeError):
        return None
    return found


def main(first: int, last: int, *, shrink: bool = True) -> int:
    """Check the scenarios of these seeds; how many failed."""
    refused: Counter[str] = Counter()
    failed = 0
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        for seed in range(first, last):
            mapping, invariants = draw(Random(seed)), seed % 3 == 0
            try:
                found = faults(mapping, folder, invariants=invariants)
            except Refused as error:
                refused[kind_of(str(error))] += 1
                continue
            if found:
                failed += 1
                kind = kind_of(found[0])
                seen[kind] += 1
                print(f"seed {seed}: " + "\n    ".join(found[:6]), flush=True)
                if shrink and seen[kind] == 1:
                    print(
                        yaml.safe_dump(shrunk(mapping, folder, invariants=invariants), default_flow_style=None),
                        flush=True,
                    )
    print(f"{last - first} drawn, {failed} failed, {refused.total()} refused")
    for what in (seen, refused):
        for text, n in what.most_common():
            print(f"{n:6d}  {text}")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), shrink="--whole" not in sys.argv)))
