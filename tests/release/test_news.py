"""News of changes, gathered by a release."""

from __future__ import annotations

from pathlib import Path

import pytest

from release import check, news

CHANGELOG = "# Changelog\n\n## [0.1.0] - 2026-01-01\n\n### Added\n\n- A run.\n\n### Fixed\n\n- A stop.\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".ci" / "news").mkdir(parents=True)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    return tmp_path


def test_news_of_the_repository_are_named_by_their_kind() -> None:
    assert news.main(["check"]) == 0


@pytest.mark.parametrize("name", ["page.md", "page.feature.md", "page.added.txt", "added.added"])
def test_a_file_that_says_no_kind_is_refused(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".ci" / "news" / name).write_text("A page.\n")
    assert news.main(["check"], root) == 1
    assert "NAME.KIND.md" in capsys.readouterr().err


def test_a_release_gathers_the_news_above_older_releases_and_removes_the_files(root: Path) -> None:
    (root / ".ci" / "news" / "README.md").write_text("# News\n")
    (root / ".ci" / "news" / "b.fixed.md").write_text("A start,\nand an end.\n")
    (root / ".ci" / "news" / "a.added.md").write_text("A page.\n")
    assert news.main(["cut", "0.2.0"], root) == 0
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.index("## [0.2.0] - ") < text.index("## [0.1.0]")
    first = text.split("## [0.1.0]")[0]
    assert news.entries_of(first) == {"added": ["A page."], "fixed": ["A start, and an end."]}
    assert [path.name for path in (root / ".ci" / "news").iterdir()] == ["README.md"]


def test_late_news_join_the_section_of_a_version_that_is_there(root: Path) -> None:
    (root / ".ci" / "news" / "a.added.md").write_text("A page.\n")
    (root / ".ci" / "news" / "b.changed.md").write_text("An answer.\n")
    news.main(["cut", "0.1.0"], root)
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count("## [0.1.0]") == 1
    found = news.entries_of(text)
    assert sorted(found["added"]) == ["A page.", "A run."]
    assert (found["changed"], found["fixed"]) == (["An answer."], ["A stop."])


def test_entries_that_a_branch_wrote_into_the_changelog_are_found() -> None:
    now = CHANGELOG.replace("- A run.\n", "- A run.\n- A page\n  of two lines.\n").replace(
        "- A stop.", "- A stop.\n- A start."
    )
    assert news.new_entries(CHANGELOG, now) == {"added": ["A page of two lines."], "fixed": ["A start."]}


def test_a_tag_is_released_when_version_changelog_and_highlights_agree(root: Path) -> None:
    (root / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (root / "docs" / "releases").mkdir(parents=True)
    (root / "docs" / "releases" / "0.1.0.md").write_text("# 0.1.0\n")
    assert check.faults("v0.1.0", root) == []
    assert len(check.faults("v0.1.1", root)) == 1
    (root / ".ci" / "news" / "a.added.md").write_text("A page.\n")
    (root / "docs" / "releases" / "0.1.0.md").unlink()
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace(" - 2026-01-01", ""))
    assert len(check.faults("v0.1.0", root)) == 3
