"""Published rows, and what the documents say of them."""

import re
from collections.abc import Iterable
from pathlib import Path

from sim.reproduce import Row, summary

PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
_COUNTS = re.compile(
    r"(\d+) rows: (\d+) EM \((\d+) within\), (\d+) ET \((\d+)\), (\d+) CP \((\d+)\), (\d+) IN \((\d+)\), (\d+) SO; "
    r"(\d+) of (\d+) judged are within"
)


def stated(title: str) -> list[int]:
    """The counts that docs/reproduction.md has under a heading, as `counted` gives them."""
    under = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = _COUNTS.search(" ".join(under.split()))
    assert found, title
    return [int(each) for each in found.groups()]


def counted(rows: Iterable[Row]) -> list[int]:
    """Rows, then rows and rows within tolerance of each kind of evidence but the last, the last, within and judged of all."""
    kinds = summary(rows)
    each = [n for _, total, _, within in kinds[:-1] for n in (total, within)]
    return [
        sum(total for _, total, _, _ in kinds),
        *each,
        kinds[-1][1],
        sum(within for *_, within in kinds),
        sum(judged for _, _, judged, _ in kinds),
    ]
