"""A command for each of a scenario's servers, and what none of them says."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from sim.launch.engines import launches, writer_of
from sim.launch.writing import BESIDE, Writing, beside
from sim.scenario import Scenario


def commands(
    scenario: Scenario, target: str | None, *, forced_acceptance: bool = False
) -> Iterator[tuple[str, Writing]]:
    """A command of *target* for each pool, by its name; for a scenario without pools one, without a name. *target* None: the pool's
    own stack where that runs in containers, or else the first that does. *forced_acceptance*: as of `Writing`."""
    links = (scenario.links or {}).values()
    connector = next((link.connector for link in links if link.connector is not None), None)
    in_containers = [name for name, launch in launches().items() if launch.image is not None]
    for name in scenario.pools or ("",):
        part = scenario.pool(name) if name else scenario
        role = scenario.pools[name].role if scenario.pools else "both"
        engine = target or (part.stack_name if part.stack_name in in_containers else in_containers[0])
        command = Writing(part, engine, name=name, role=role, connector=connector, forced_acceptance=forced_acceptance)
        command.carries("encode")
        if name:
            command.carries("router", *(key for key in BESIDE if key != "autoscale"))
        writer_of(engine)(command)
        yield name, command


def _encode(scenario: Scenario) -> Iterator[str]:
    """The settings of `encode` but for encoding in steps, as servers do that are not told otherwise."""
    given = scenario.model_dump(exclude_defaults=True).get("encode", {})
    if given.pop("at", None) == "engine":
        yield from (f"encode.{key}: {value}" for key, value in given.items())
    elif given:
        flow = yaml.safe_dump(given, default_flow_style=True, width=10_000, sort_keys=False).strip()
        yield f"encode: {flow} (the command encodes on the same machine; set up those that only encode beside it)"


def of_the_whole(scenario: Scenario) -> Iterator[str]:
    """The settings that a scenario has for all pools, and no command says."""
    yield from _encode(scenario)
    if not scenario.pools:
        return
    if any(pool.models for pool in scenario.pools.values()):
        yield "pools.*.models: a server of one model is written for each pool; others that share its machine are not"
    given = scenario.model_dump(exclude_defaults=True)
    yield from (beside(key, given[key]) for key in BESIDE if key in given and key != "autoscale")
    for key, value in scenario.router.settings.items():
        yield f"router.{key}: {value}"
