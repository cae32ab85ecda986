"""Commands, containers and manifests as people write them are taken, or refused with the way out; nothing is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import RooftraceError
from sim.launch import scenario_from
from tests.launch.as_written import WRITTEN, Written


def leaf(settings: Any, path: str) -> Any:
    for key in path.split("."):
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings


@pytest.mark.parametrize("written", [pytest.param(each, id=name) for name, each in WRITTEN.items()])
def test_it_is_taken_or_refused_with_the_way_out(written: Written) -> None:
    if written.refused is not None:
        with pytest.raises(RooftraceError) as refused:
            scenario_from(written.text)
        assert written.refused in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    try:
        found = scenario_from(written.text)
    except RooftraceError as error:
        assert written.where_known
        assert "--set model=" in str(error)
        found = scenario_from(written.text, assignments=["model=llama-3.1-405b"])
    resolved = found.scenario.model_dump()
    resolved["scheduler"] = found.scenario.settings()["scheduler"]
    for path, value in written.settings.items():
        assert leaf(found.scenario.settings(), path) == value or leaf(resolved, path) == value, path
    said = "\n".join((*found.strange, *found.not_modelled, *found.without_effect, *found.notes))
    for text in written.says:
        assert text in said


def test_there_are_sixty() -> None:
    assert len(WRITTEN) == 60
