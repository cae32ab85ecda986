"""The page of a release, as it stands beside its wheels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from release import check
from release.notes import LINK, notes

ROOT = Path(__file__).parents[2]
URL = "https://example.org/rooftrace/blob/v0.1.0"


def page(root: Path, text: str) -> str:
    (root / "docs" / "releases").mkdir(parents=True)
    (root / "docs" / "releases" / "0.1.0.md").write_text(text, encoding="utf-8")
    (root / "docs" / "trust.md").write_text("# Trust\n", encoding="utf-8")
    return notes("0.1.0", URL, root)


def test_links_of_the_repository_lead_to_its_files_at_the_tag(tmp_path: Path) -> None:
    text = page(tmp_path, "[trust](../trust.md#limits), [elsewhere](https://example.com/a.md) and [below](#below).\n")
    assert text == f"[trust]({URL}/docs/trust.md#limits), [elsewhere](https://example.com/a.md) and [below](#below).\n"


def test_a_link_to_a_file_that_is_not_there_is_in_the_way_of_a_release(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"links to \.\./truth\.md, and there is no docs/truth\.md"):
        page(tmp_path, "[trust](../truth.md)\n")
    (tmp_path / ".ci" / "news").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [0.1.0] - 2026-01-01\n")
    assert check.faults("v0.1.0", tmp_path) == [
        "docs/releases/0.1.0.md links to ../truth.md, and there is no docs/truth.md"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "releases").glob("*.md")), ids=lambda path: path.stem)
def test_every_page_of_a_release_can_stand_beside_its_wheels(path: Path) -> None:
    text = notes(path.stem, URL)
    assert not [found[0] for found in LINK.finditer(text)]
    assert len(re.findall(re.escape(f"]({URL}/"), text)) == len(LINK.findall(path.read_text(encoding="utf-8")))
