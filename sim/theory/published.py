"""Tables printed in papers and articles, packaged as small CSVs whose first line names the source."""

from __future__ import annotations

import csv
from importlib.resources import files


def published(name: str) -> list[dict[str, str]]:
    """Rows of the table *name* as text by column; ValueError naming the tables there are otherwise."""
    folder = files("sim") / "reproduce" / "data"
    path = folder / f"{name}.csv"
    if not path.is_file():
        known = sorted(p.name.removesuffix(".csv") for p in folder.iterdir() if p.name.endswith(".csv"))
        raise ValueError(f"{name} is not a packaged table; there are {', '.join(known)}")
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
