"""Whether the licences of what Rooftrace needs, and of what it ships of others, are among those that it may be used with.

PYTHONPATH=.ci python -m release.licences [EXTRA ...]      # with all that it requires, as installed here
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from release.news import ROOT

ALLOWED = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|HPND|MPL|Mozilla Public|CC0|Zlib|0BSD|Unlicense|LLVM)\b",
    re.IGNORECASE,
)
SHIPPED = {
    "sim/explore/page/vendor/preact.js": {"preact": "MIT", "htm": "Apache-2.0"},
}
"""Files of others in the wheel -> what is in them, with its licence, whose text is beside the file as LICENSE-NAME."""


def required(name: str, seen: dict[str, str] | None = None, extras: tuple[str, ...] = ("",)) -> dict[str, str]:
    """The licence of *name* and of all that it requires, with *extras*; all of these are installed."""
    seen = {} if seen is None else seen
    found = metadata.distribution(name)
    seen[found.name] = _licence(found)
    for text in found.requires or ():
        requirement = Requirement(text)
        known = {each.lower().replace("_", "-") for each in seen}
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": each}) for each in extras):
            continue
        if requirement.name.lower().replace("_", "-") not in known:
            required(requirement.name, seen)
    return seen


def _licence(found: metadata.Distribution) -> str:
    said = [found.metadata.get("License-Expression") or ""]
    said += [each for each in found.metadata.get_all("Classifier") or () if each.startswith("License ::")]
    said.append((found.metadata.get("License") or "").strip().partition("\n")[0])
    return "; ".join(filter(None, said))


def faults(licences: dict[str, str], root: Path = ROOT) -> list[str]:
    found = [
        f"{name}: its licence, {licence or 'which it does not say'}, is not one of those known"
        for name, licence in sorted(licences.items())
        if not ALLOWED.search(licence)
    ]
    vendored = {
        path.relative_to(root).as_posix() for path in root.glob("[a-z]*/**/vendor/*") if "LICENSE" not in path.name
    }
    found += [
        f"{name} is of others, and SHIPPED does not say under which licence" for name in sorted(vendored - {*SHIPPED})
    ]
    for name, parts in SHIPPED.items():
        texts = [f"LICENSE-{part}" for part in parts]
        found += [f"{name}: {text} is not beside it" for text in texts if not (root / name).with_name(text).is_file()]
    return found


def main(*extras: str) -> int:
    licences = required("rooftrace", extras=("", *extras))
    for package, licence in sorted(licences.items()):
        print(f"{package:24} {licence}")
    wrong = faults(licences)
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
