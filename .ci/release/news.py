"""News of changes: a file in `.ci/news/` for each, which a release gathers into CHANGELOG.md.

    PYTHONPATH=.ci python -m release.news check                    # are all files named as they should be?
    PYTHONPATH=.ci python -m release.news cut 0.2.0                # gather them into the section of this version, and remove them
    PYTHONPATH=.ci python -m release.news take COMMIT              # make files of lines that CHANGELOG.md has and had not at COMMIT

A file `.ci/news/NAME.KIND.md` holds one entry, plain sentences without the dash; KIND is one of added, changed, fixed, removed,
deprecated. Files instead of lines in one list, so that branches do not meet there.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("added", "changed", "deprecated", "removed", "fixed")
Entries = Mapping[str, list[str]]
"""Kind -> its entries."""


def fragments(folder: Path) -> dict[Path, str]:
    """Each file of news with its kind; ValueError where a name says none, or a file is empty."""
    found = {}
    for path in sorted(folder.glob("*")):
        if path.name == "README.md":
            continue
        kind = path.name.removesuffix(".md").rpartition(".")[2]
        if path.suffix != ".md" or kind not in KINDS:
            raise ValueError(f".ci/news/{path.name}: a file is called NAME.KIND.md, KIND one of {', '.join(KINDS)}")
        if not path.read_text(encoding="utf-8").strip():
            raise ValueError(f".ci/news/{path.name} is empty; say what changed in a sentence")
        found[path] = kind
    return found


def entries_of(text: str) -> dict[str, list[str]]:
    """The entries of a section of a changelog by kind, each as one line."""
    found: dict[str, list[str]] = {}
    kind = ""
    for line in text.splitlines():
        if line.startswith("#"):
            kind = line.lstrip("# ").lower()
        elif line.startswith("- "):
            found.setdefault(kind, []).append(line[2:].strip())
        elif line.startswith("  ") and found.get(kind):
            found[kind][-1] += f" {line.strip()}"
    return found


def cut(changelog: str, version: str, date: str, entries: Entries) -> str:
    """*changelog* with *entries* in the section of *version*, which is made above all others where it is not there."""
    sections = re.split(r"(?m)^(?=## )", changelog)
    places = [i for i, section in enumerate(sections) if section.startswith(f"## [{version}]")]
    if places:
        place = places[0]
    else:
        place = 1
        sections.insert(place, f"## [{version}] - {date}\n\n")
    section = sections[place]
    for kind in KINDS:
        added = "".join(f"- {entry}\n" for entry in entries.get(kind, ()))
        if not added:
            continue
        heading = f"### {kind.capitalize()}\n\n"
        if heading not in section:
            section = f"{section.rstrip()}\n\n{heading}"
        before, after = section.split(heading, 1)
        section = f"{before}{heading}{added}{after}" if after.strip() else f"{before}{heading}{added}\n"
    sections[place] = section
    return "".join(sections)


def new_entries(before: str, now: str) -> dict[str, list[str]]:
    """Entries that *now*, a changelog, has and *before* has not, by kind; of all sections."""
    old = {entry for entries in entries_of(before).values() for entry in entries}
    return {kind: new for kind, entries in entries_of(now).items() if (new := [e for e in entries if e not in old])}


def _write(folder: Path, entries: Entries) -> Iterable[Path]:
    for kind, texts in entries.items():
        if kind not in KINDS:
            raise ValueError(
                f"CHANGELOG.md has entries below {kind or 'no heading'!r}; headings are {', '.join(KINDS)}"
            )
        for text in texts:
            words = re.findall(r"[a-z0-9]+", text.lower())[:6]
            path = folder / f"{'-'.join(words)[:60]}.{kind}.md"
            if path.exists() and path.read_text(encoding="utf-8").strip() != text:
                path = path.with_name(f"{'-'.join(words)[:54]}-{len(list(folder.glob('*')))}.{kind}.md")
            path.write_text(f"{text}\n", encoding="utf-8")
            yield path


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("cut").add_argument("version")
    taking = commands.add_parser("take")
    taking.add_argument("commit", help="whose entries are known")
    taking.add_argument(
        "--from", dest="of", help="the commit whose CHANGELOG.md is read; the file as it is, where not said"
    )
    given = parser.parse_args(arguments)
    folder, page = root / ".ci" / "news", root / "CHANGELOG.md"
    try:
        found = fragments(folder)
        if given.command == "check" and "## [Unreleased]" in page.read_text(encoding="utf-8"):
            raise ValueError(
                "CHANGELOG.md has a section [Unreleased]; news are files (PYTHONPATH=.ci python -m release.news take COMMIT)"
            )
        if given.command == "cut":
            entries: dict[str, list[str]] = {}
            for path, kind in found.items():
                entries.setdefault(kind, []).append(" ".join(path.read_text(encoding="utf-8").split()))
            text = page.read_text(encoding="utf-8")
            page.write_text(cut(text, given.version, datetime.date.today().isoformat(), entries), encoding="utf-8")
            for path in found:
                path.unlink()
        elif given.command == "take":
            now = _at(root, given.of) if given.of else page.read_text(encoding="utf-8")
            known = _at(root, given.commit) + (page.read_text(encoding="utf-8") if given.of else "")
            for path in _write(folder, new_entries(known, now)):
                print(path.relative_to(root))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _at(root: Path, commit: str) -> str:
    """CHANGELOG.md as of *commit*."""
    done = subprocess.run(["git", "show", f"{commit}:CHANGELOG.md"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"CHANGELOG.md of {commit} cannot be read: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
