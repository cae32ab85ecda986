"""Licences of what is needed and of what is shipped, and the lock file that says which releases of it are tried."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from release import licences

ROOT = Path(__file__).parents[2]


def test_files_of_others_have_their_licences_beside_them(tmp_path: Path) -> None:
    assert licences.faults({}) == []
    assert all(licences.ALLOWED.search(each) for parts in licences.SHIPPED.values() for each in parts.values())
    file = tmp_path / "sim" / "explore" / "page" / "vendor" / "chart.js"
    file.parent.mkdir(parents=True)
    file.touch()
    found = licences.faults({}, tmp_path)
    assert found[0] == f"{file.relative_to(tmp_path)} is of others, and SHIPPED does not say under which licence"
    assert found[1:] == [
        f"{next(iter(licences.SHIPPED))}: LICENSE-{name} is not beside it" for name in ("preact", "htm")
    ]


@pytest.mark.parametrize("licence", ["", "GPL-3.0-only", "Proprietary"])
def test_a_licence_that_is_not_known_is_named(licence: str) -> None:
    (fault,) = licences.faults({"simpy": "MIT", "stranger": licence})
    assert fault.startswith(f"stranger: its licence, {licence or 'which it does not say'}, is not one of those known")


@pytest.mark.parametrize("extra", ["", "explore", "serve", "forecast"])
def test_the_lock_file_has_all_that_is_required(extra: str) -> None:
    """With what requirements require, as installed here."""
    text = (ROOT / ".ci" / "requirements" / "ci.txt").read_text(encoding="utf-8")
    locked = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", text))
    if metadata.version("pandas") != locked["pandas"]:
        pytest.skip("other releases are installed, which may require others: PIP_CONSTRAINT=.ci/requirements/ci.txt")
    try:
        required = licences.required("rooftrace", extras=("", extra))
    except metadata.PackageNotFoundError as error:
        if extra in ("", "explore", "serve"):  # the tests require these
            raise
        pytest.skip(f"{error.name} of the extra {extra} is not installed")
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in required}
    assert names - {*locked} == {"rooftrace"}


def test_what_formats_a_commit_is_what_checks_it() -> None:
    lock, hooks = (ROOT / ".ci" / "requirements" / "ci.txt", ROOT / ".pre-commit-config.yaml")
    (ruff,) = re.findall(r"(?m)^ruff==.*$", lock.read_text(encoding="utf-8"))
    used = re.findall(r"additional_dependencies: \[(.*)\]", hooks.read_text(encoding="utf-8"))
    assert used == [ruff, ruff]
