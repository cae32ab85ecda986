"""Our `vllm` by the rules of a release, beside what the scheduler class of that release decided where its rules differ from 0.32's.

`ROOFTRACE_VLLM_PYTHONS=...` (see `test_installed`) `python -m tests.oracle.test_vllm_releases` writes the record anew.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines_diff import fitted, nearest_rules, ours_of, vllm_case
from policies.vllm import RELEASES, Vllm
from tests.oracle.test_vllm import by_number
from tests.oracle.vllm_driven import PADDED, driven_decisions, release_of

RECORDED = Path(__file__).with_name("vllm-releases.json.gz")
"""[seed, steps] of workloads, by release."""
EACH = 16


def recorded() -> dict[str, list[Any]]:
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


@pytest.mark.parametrize("release", [release for release in RELEASES if release != "0.32"])
def test_decisions_are_those_of_the_release_and_not_of_another(release: str) -> None:
    for seed, steps in recorded()[release]:
        case = fitted(vllm_case(seed), release)
        assert ours_of(case, release) == by_number(steps), f"workload {seed}"
        assert ours_of(case, "0.32") != by_number(steps), f"workload {seed}"


def test_a_release_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match=r"release is one whose scheduler is known.*0\.24, 0\.28, 0\.32, 0\.33; got '0\.30'"
    ):
        Vllm(release="0.30")


def test_a_setting_that_came_after_the_release_is_refused_with_the_first_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"release 0\.28 has no max_num_active_seqs; .* release 0\.32 or a later one"):
        Vllm(release="0.28", max_num_active_seqs=4)


def record() -> None:
    found: dict[str, list[Any]] = {}
    for python in os.environ["ROOFTRACE_VLLM_PYTHONS"].split(":"):
        release = nearest_rules(release_of(python))
        kept: list[Any] = []
        seed = 0
        while release != "0.32" and len(kept) < EACH:
            seed += 1
            case = fitted(vllm_case(seed), release)
            if sum(request["output"] for request in case["requests"]) > 250:
                continue
            if ours_of(case, release) != ours_of(case, "0.32"):
                steps = driven_decisions(case, python)
                kept += [[seed, steps]] if steps != PADDED else []
        found[release] = kept
    RECORDED.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    record()
