"""Whether a tag may be released: PYTHONPATH=.ci python -m release.check v0.1.0

Its version is that of pyproject.toml, CHANGELOG.md begins with it and has a date, it has its page of highlights, whose
links lead to files, and no news is left.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from release.news import ROOT, fragments
from release.notes import notes


def faults(tag: str, root: Path = ROOT) -> list[str]:
    """A sentence for each thing that is in the way of releasing *tag*."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    found = [] if tag == f"v{version}" else [f"the tag is {tag} and pyproject.toml's version is {version}"]
    first = re.search(r"(?m)^## \[(.*?)\](.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if first is None or first[1] != version or not re.fullmatch(r" - \d{4}-\d\d-\d\d", first[2]):
        found.append(
            f"CHANGELOG.md does not begin with `## [{version}] - DATE`; PYTHONPATH=.ci python -m release.news cut {version}"
        )
    try:
        notes(version, "", root)
    except FileNotFoundError:
        found.append(f"docs/releases/{version}.md, the page of highlights, is not there")
    except ValueError as error:
        found.append(str(error))
    left = fragments(root / ".ci" / "news")
    if left:
        found.append(f"{len(left)} files of news are left; PYTHONPATH=.ci python -m release.news cut {version}")
    return found


if __name__ == "__main__":
    print("\n".join(faults(sys.argv[1])) or f"{sys.argv[1]} may be released")
    sys.exit(bool(faults(sys.argv[1])))
