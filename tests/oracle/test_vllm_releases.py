"""Our `vllm` by the rules of a release, beside what the scheduler class of that release decided where its rules differ from 0.32's.

`ROOFTRACE_VLLM_PYTHONS=...` (see `test_installed`) `python -m tests.oracle.test_vllm_releases` writes the record anew.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.engines_diff import fitted, nearest_rules, ours_of, vllm_case
from policies.view import ReplicaView, RunningSeq
from policies.vllm import Vllm
from policies.vllm_settings import RELEASES
from tests.engine.build import patches_the_engine
from tests.oracle.test_vllm import by_number
from tests.oracle.vllm_driven import PADDED, driven_decisions, release_of

RECORDED = Path(__file__).with_name("vllm-releases.json.gz")
"""[seed, steps] of workloads, by release."""
EACH = 5


def rules_of(release: str) -> list[str]:
    """The rules of a release that are not 0.32's and that steps without adapters show."""
    mine, usual = RELEASES[release]._asdict(), RELEASES["0.32"]._asdict()
    return [
        name for name in mine if mine[name] != usual[name] and name not in ("lacks", "drafts_if_used", "counts_leaving")
    ]


def without(rule: str, case: dict[str, Any], release: str) -> Any:
    """Our steps where *release* has 0.32's *rule*."""
    other = RELEASES[release]._replace(**{rule: getattr(RELEASES["0.32"], rule)})
    with mock.patch.dict(RELEASES, {release: other}):
        return ours_of(case, release)


def recorded() -> dict[str, list[Any]]:
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


@patches_the_engine
@pytest.mark.parametrize("release", [release for release in RELEASES if release != "0.32"])
def test_decisions_are_those_of_the_release_and_each_of_its_rules_shows_in_some(release: str) -> None:
    unseen = set(rules_of(release))
    for seed, steps in recorded()[release]:
        case = fitted(vllm_case(seed), release)
        assert ours_of(case, release) == by_number(steps), f"workload {seed}"
        unseen -= {rule for rule in unseen if without(rule, case, release) != by_number(steps)}
    assert not unseen


def test_a_release_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match=r"release is one whose scheduler is known.*0\.24, 0\.28, 0\.32, 0\.33; got '0\.30'"
    ):
        Vllm(release="0.30")


def test_a_setting_that_came_after_the_release_is_refused_with_the_first_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"release 0\.28 has no max_num_active_seqs; .* release 0\.32 or a later one"):
        Vllm(release="0.28", max_num_active_seqs=4)


@pytest.mark.parametrize(("release", "goes_on"), [("0.32", False), ("0.33", True)])
def test_who_stands_behind_a_sequence_that_has_preempted_itself_goes_on_from_0_33(release: str, goes_on: bool) -> None:
    # The second lacks a block and is of the lowest priority; the third has the room that it leaves.
    running = (
        RunningSeq(0, cached_tokens=16, blocks=1, growth_blocks=1, priority=0),
        RunningSeq(1, cached_tokens=32, blocks=2, growth_blocks=1, priority=2),
        RunningSeq(2, cached_tokens=16, blocks=1, growth_blocks=1, priority=1),
    )
    view = ReplicaView(running=running, n_decoding=3, growth_blocks=3, free_blocks=1, total_blocks=5)
    plan = Vllm(scheduling_policy="priority", release=release).plan(view)
    assert plan.preempt == (1,)
    assert plan.decode == (True if goes_on else (0,))


def record() -> None:
    """Workloads that each rule shows in."""
    found: dict[str, list[Any]] = {}
    for python in os.environ["ROOFTRACE_VLLM_PYTHONS"].split(":"):
        release = nearest_rules(release_of(python))
        found[release] = [kept for rule in rules_of(release) for kept in seen_by(rule, release, python)]
    RECORDED.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


def seen_by(rule: str, release: str, python: str) -> Iterator[list[Any]]:
    """[seed, steps] of workloads whose steps are others without *rule*."""
    n = 0
    for seed in count(1):
        case = fitted(vllm_case(seed), release)
        if sum(request["output"] for request in case["requests"]) > 250:
            continue
        if ours_of(case, release) == without(rule, case, release):
            continue
        steps = driven_decisions(case, python)
        if steps != PADDED:
            yield [seed, steps]
            n += 1
        if n == EACH:
            return


if __name__ == "__main__":
    record()
