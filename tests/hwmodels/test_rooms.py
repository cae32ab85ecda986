"""The rooms of hwmodels: equations at the bottom, no circle among files, each equation priced as it is fitted."""

from __future__ import annotations

from pathlib import Path

from hwmodels.kernels.families import FAMILIES
from tests.test_layers import ROOT, files, imports


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _below() -> dict[str, set[str]]:
    """File -> the files of ours that it imports, at any depth of nesting."""
    names = {_name(path): path for path in files("hwmodels")}
    return {name: ({*imports(path)} & set(names)) - {name} for name, path in names.items()}


def test_no_circle_ties_files_of_the_hardware_models() -> None:
    below = _below()
    done: set[str] = set()
    while free := {name for name, needs in below.items() if name not in done and not needs - done - {_room(name)}}:
        done |= free
    assert done == set(below), f"circles among {sorted(set(below) - done)}"


def _room(name: str) -> str:
    """The package that a file lies in, whose `__init__` only repeats names."""
    return name.rpartition(".")[0]


def test_equations_know_neither_devices_nor_models_nor_profiles() -> None:
    allowed = {"hwmodels.operations", "hwmodels.precision"}
    for name, needs in _below().items():
        if name.startswith("hwmodels.kernels"):
            assert {n for n in needs if not n.startswith("hwmodels.kernels")} <= allowed, name


def test_cost_models_know_no_kind_of_device_and_devices_no_cost_model() -> None:
    below = _below()
    assert not below["hwmodels.layerwise"] & {"hwmodels.gpu", "hwmodels.tpu", "hwmodels.cpu", "hwmodels.profiles"}
    assert not {name for name in below["hwmodels.device"] if name != "hwmodels.tables"}


def test_every_family_has_an_equation_with_a_source() -> None:
    for family, form in FAMILIES.items():
        assert form.family == family
        assert len(form.source) > 10
