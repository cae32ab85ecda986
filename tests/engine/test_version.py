"""A held plan lasts until something happens that it does not let pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.view import ALWAYS_NS
from sim.engine.batch.version import HeldPlan, Version


def held(version: Version, *, left: int = 3, through_arrivals: bool = False, until_ns: int = ALWAYS_NS) -> HeldPlan:
    return HeldPlan(left, version, through_arrivals=through_arrivals, until_ns=until_ns)


def _ends(version: Version) -> None:
    version.changes += 1


@pytest.mark.parametrize("happens", [_ends, lambda version: version.hear(5)], ids=["a sequence ends", "news comes"])
@pytest.mark.parametrize("through_arrivals", [False, True])
def test_whatever_changes_ends_a_plan(happens: Callable[[Version], None], through_arrivals: bool) -> None:
    version = Version()
    plan = held(version, through_arrivals=through_arrivals)
    assert plan.holds(version, 10)
    happens(version)
    assert not plan.holds(version, 10)


@pytest.mark.parametrize("through_arrivals", [False, True])
def test_an_arrival_passes_where_the_plan_says_so(through_arrivals: bool) -> None:
    version = Version()
    version.arrive(3)
    plan = held(version, through_arrivals=through_arrivals)
    version.arrive(5)
    assert plan.holds(version, 10) == plan.through_arrivals == through_arrivals


def test_a_plan_holds_for_as_many_iterations_as_are_left_and_before_its_instant() -> None:
    version = Version()
    assert held(version, until_ns=11).holds(version, 10)
    assert not held(version, until_ns=10).holds(version, 10)
    assert not held(version, left=0).holds(version, 10)
