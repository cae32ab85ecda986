"""The page of highlights of a release as it stands beside its wheels: PYTHONPATH=.ci python -m release.notes 0.1.0 URL

A page of a release has no folder that its links could start from: each leads below URL, that of the repository's files at the tag.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from release.news import ROOT

PAGES = "docs/releases"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s]+(?=\))")
"""Where a link or a picture leads to, in the repository."""


def notes(version: str, url: str, root: Path = ROOT) -> str:
    """The page of *version* with links below *url*; ValueError where one leads to a file that is not there."""

    def absolute(found: re.Match[str]) -> str:
        path, mark, heading = found[0].partition("#")
        path = posixpath.normpath(posixpath.join(PAGES, path))
        if not (root / path).is_file():
            raise ValueError(f"{PAGES}/{version}.md links to {found[0]}, and there is no {path}")
        return f"{url.rstrip('/')}/{path}{mark}{heading}"

    return LINK.sub(absolute, (root / PAGES / f"{version}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(
            "Usage: PYTHONPATH=.ci python -m release.notes VERSION URL, where the repository's files are below URL at the tag"
        )
    print(notes(*sys.argv[1:]), end="")
