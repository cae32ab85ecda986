"""Our `vllm` and `sglang` beside the scheduler of any installed release, over the random workloads of the oracles.

    python -m benchmarks.engines_diff --python PYTHON_WITH_VLLM [--workloads 500] [--first 0] [--adapters]
    python -m benchmarks.engines_diff --engine sglang --python PYTHON_WITH_SGLANG

The release drives inside our event loop (`policies.installed`), where our own policy drives once more. Drawn are prefix cache,
asynchronous scheduling and overlap; of vLLM priorities and speculation, of SGLang chunks, mixed steps, orders of the queue and
polls. Printed are the workloads whose steps are all the same, and of the others what differs on the first step that does, such as
who runs or how many tokens, who is preempted, blocks held, tokens found, blocks evicted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, zip_longest
from typing import Any

from hwmodels.overheads import at_or_before
from policies.vllm_settings import RELEASES
from sim.engine.time.errors import PolicyError
from tests.oracle import test_sglang, vllm_prefix_cases
from tests.oracle.adapter_cases import with_adapters
from tests.oracle.sglang_driven import driven
from tests.oracle.sglang_driven import release_of as sglang_release_of
from tests.oracle.vllm_cases import a_case, our_decisions
from tests.oracle.vllm_driven import PADDED, USUAL, driven_decisions, release_of
from tests.oracle.vllm_prefix_cases import a_drafter_case

PARTS = ("second", "requests and their tokens", "preempted", "blocks held", "tokens found", "blocks evicted")
ENDLESS = "endless"
"""In place of steps: sequences take memory from each other in turn."""


def vllm_case(seed: int) -> dict[str, Any]:
    """Every other workload has prompts that begin alike, and the prefix cache."""
    return a_drafter_case(seed) if seed % 2 else a_case(seed)


def decided(decide: Callable[[], Any]) -> Any:
    """The steps; ENDLESS for a workload that does not end."""
    try:
        return decide()
    except PolicyError as error:
        if "take memory from each other in turn" not in " ".join(str(error).split()):
            raise
        return ENDLESS


def ours_of(case: dict[str, Any], release: str) -> Any:
    decide = vllm_prefix_cases.our_decisions if "id_tokens" in case else our_decisions
    return decided(lambda: decide(case, release))


def circumstances(case: Mapping[str, Any]) -> str:
    """The features of a workload that may make its rules differ."""
    there = {
        "prefix cache": "id_tokens" in case,
        f"{case['scheduling_policy']}": case["scheduling_policy"] != "fcfs",
        "speculation": case["k"] > 0,
        "target's states": case["reads_target"],
        "asynchronous": case["async_scheduling"],
    }
    return ", ".join(name for name, given in there.items() if given) or "plain"


def first_difference(ours: Any, theirs: Any) -> tuple[int, str]:
    """The first step that is not the same, and which of its parts are not."""
    if ours == ENDLESS or theirs == ENDLESS:
        return 0, "only ours goes on for ever" if ours == ENDLESS else "only the release goes on for ever"
    for step, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        parts = [name for name, a, b in zip(PARTS, mine, its, strict=False) if a != b]
        if parts:
            return step, " and ".join(parts)
    return min(len(ours), len(theirs)), "one has more steps"


def nearest_rules(installed: str) -> str:
    """The release whose rules `vllm` has for an installed one: its own, or the nearest before it."""
    return at_or_before(installed.split()[-1], tuple(RELEASES)[::-1])


def fitted(case: dict[str, Any], release: str) -> dict[str, Any]:
    """A workload without settings that *release* does not have."""
    return case | {name: USUAL[name] for name in RELEASES[release].lacks}


def vllm_differences(
    python: str, seeds: range, rules: str | None = None, *, adapters: bool = False
) -> Iterator[tuple[int, str, str]]:
    """(seed, kind, circumstances) of each workload; kind "" where all steps are the same. *rules*: the release whose rules `vllm`
    has; None: those of the release that is installed. *adapters*: requests ask for more of them than a batch may have."""
    release = rules or nearest_rules(release_of(python))
    for seed in seeds:
        case = fitted(vllm_case(seed), release)
        case = with_adapters(case, seed) if adapters else case
        try:
            theirs = decided(partial(driven_decisions, case, python))
        except PolicyError as error:
            yield seed, f"not driven: {error}", circumstances(case)
            continue
        if theirs == PADDED:
            yield seed, PADDED, circumstances(case)
            continue
        ours = ours_of(case, release)
        kind = ""
        if ours != theirs:
            step, what = first_difference(ours, theirs)
            kind = what
            print(f"  workload {seed}, step {step}: {what} ({circumstances(case)})")
            if ENDLESS not in (ours, theirs) and step < min(len(ours), len(theirs)):
                print(f"    ours    {ours[step]}\n    release {theirs[step]}", flush=True)
        yield seed, kind, circumstances(case)


def sglang_workloads(n: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """*n* of the oracle's workloads and what is around them, one kind after the other."""
    kinds = {
        "overlap, prefix cache": test_sglang.prefix_workloads(n, overlap=True),
        "overlap": test_sglang.workloads(n, overlap=True),
        "prefix cache": test_sglang.prefix_workloads(n, overlap=False),
        "plain": test_sglang.workloads(n, overlap=False),
    }
    for row in zip_longest(*kinds.values()):
        yield from ((around, case) for around, case in zip(kinds, row, strict=True) if case is not None)


def sglang_differences(python: str, seeds: range, *, adapters: bool = False) -> Iterator[tuple[int, str, str]]:
    """The same of SGLang; the number of a workload is its place."""
    for seed, (around, case) in enumerate(islice(sglang_workloads(seeds.stop), seeds.stop)):
        if seed < seeds.start:
            continue
        case = with_adapters(case, seed) if adapters else case
        try:
            found = test_sglang.aligned(case, driven(case, python))
        except PolicyError as error:
            yield seed, f"not driven: {error}".partition(" (at t=")[0], around
            continue
        if isinstance(found, str):
            yield seed, found.partition(":")[0], around
            continue
        first = test_sglang.first_difference(*found)
        if first is None:
            yield seed, "", around
            continue
        step, ours, theirs = first
        parts = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        kind = " and ".join(parts) if ours and theirs else "one has more steps"
        print(f"  workload {seed}, step {step}: {kind} ({around}; {case['settings']})")
        print(f"    ours    {ours}\n    release {theirs}", flush=True)
        yield seed, kind, around


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--python", default=sys.executable, help="the Python of an environment that has the release")
    parser.add_argument("--workloads", type=int, default=500)
    parser.add_argument(
        "--rules", choices=tuple(RELEASES), help="our release; left out: the installed one, or the one before it"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--adapters", action="store_true", help="requests ask for LoRA adapters")
    options = parser.parse_args()
    seeds = range(options.first, options.first + 2 * options.workloads)
    differences = partial(vllm_differences, rules=options.rules) if options.engine == "vllm" else sglang_differences
    differences = partial(differences, adapters=options.adapters)
    began, kinds, alike = time.perf_counter(), Counter[str](), Counter[str]()
    compared = 0
    for _, kind, around in differences(options.python, seeds):
        kinds[kind] += 1
        alike[around] += not kind
        compared += kind != PADDED and not kind.startswith("not driven")
        if compared == options.workloads:
            break
    name = (release_of if options.engine == "vllm" else sglang_release_of)(options.python)
    print(f"{name}: {kinds['']:,} of {compared:,} random workloads have the same steps", end="")
    print(f" ({time.perf_counter() - began:.0f} s)")
    for around, n in sorted(alike.items()):
        print(f"  {n:5,} the same: {around}")
    for kind, n in kinds.most_common():
        if kind:
            print(f"  {n:5,} {'not compared: ' if kind == PADDED else ''}{kind}")


if __name__ == "__main__":
    main()
