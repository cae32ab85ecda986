"""Scenarios drawn at random over every key hold what any must; `tests.scenario.check_scenario` shrinks one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import yaml

from sim.scenario import named
from sim.scenario.keys import Settings
from sim.scenario.section import is_section, settings_of
from tests.sample import ALL, few
from tests.scenario.check_scenario import Refused, faults
from tests.scenario.random_scenarios import draw, write_files

AT_ONCE = 25
TODAY = int(datetime.now(UTC).strftime("%Y%m%d")) * 1000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenarios")
    write_files(folder)
    return folder


def assert_all_hold(seeds: range, files: Path) -> None:
    refused = []
    for seed in seeds:
        scenario = draw(Random(seed))
        try:
            found = faults(scenario, files, invariants=seed % 3 == 0)
        except Refused as error:
            refused.append(f"{seed}: {error}")
            continue
        whole = yaml.safe_dump(scenario, sort_keys=False, default_flow_style=None)
        assert not found, "\n".join(
            [*found, f"python -m tests.scenario.check_scenario {seed} {seed + 1} makes it smaller:", whole]
        )
    # Of 2,000 drawn one in fifty is refused: more than a quarter of 25 would come once in 10^6 times.
    assert len(refused) <= max(3, len(seeds) // 4), "\n".join(refused)


@pytest.mark.parametrize("seeds", few([range(200, 202), range(202, 208)]))
def test_random_scenarios_hold(seeds: range, files: Path) -> None:
    assert_all_hold(seeds, files)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("seed", range(1000, 3000 if ALL else 1300, AT_ONCE))
def test_many_random_scenarios_hold(seed: int, files: Path) -> None:
    assert_all_hold(range(seed, seed + AT_ONCE), files)


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize("first", [0, AT_ONCE])
def test_random_scenarios_of_this_day_hold(first: int, files: Path) -> None:
    # Others every day: a fault that no seed above meets is met in time, and its seed stands in the failure.
    assert_all_hold(range(TODAY + first, TODAY + first + AT_ONCE), files)


def _keys(kind: Any, seen: dict[type, None]) -> Iterator[str]:
    """Every key that a scenario may have, by the name that it has in its section."""
    if is_section(kind):
        if kind in seen:
            return
        seen[kind] = None
        for name, inner in settings_of(kind).items():
            yield name
            yield from _keys(inner, seen)
    for inner in get_args(kind):
        yield from _keys(inner, seen)


def _words(value: Any) -> Iterator[str]:
    """All keys and texts of a scenario."""
    if isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _words(each)
    elif isinstance(value, list):
        for each in value:
            yield from _words(each)
    elif isinstance(value, str):
        yield value


def test_every_key_and_policy_is_drawn() -> None:
    drawn = {word for seed in range(1500) for word in _words(draw(Random(seed)))}
    # A tokenizer needs a package that no test requires.
    assert set(_keys(Settings, {})) - {"tokenizer"} <= drawn
    for table in (
        named.SCHEDULERS,
        named.ROUTERS,
        named.EVICTIONS,
        named.CONTROLS,
        named.PROCESSES,
        named.DISTRIBUTIONS,
    ):
        # An installed release is not there, and neither is the package that arima needs.
        drawable = {
            name: paths
            for name, paths in table.items()
            if name != "arima" and not hasattr(named.load(paths.split("|")[0]), "connect")
        }
        assert set(drawable) <= drawn
        for path in (path for paths in drawable.values() for path in paths.split("|")):
            # What `perfect` is told of the workload is no setting of a scenario.
            assert set(named.parameters(named.load(path))) - {"counts", "lead_s"} <= drawn
