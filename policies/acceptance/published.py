"""Acceptance rates that were published, by name, with where each was read."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from policies.acceptance.chains import PerPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rates of the drafted positions, and their source."""

    rates: tuple[float, ...]
    source: str
    kind: Literal["conditional", "unconditional"] = "conditional"

    @property
    def acceptance(self) -> PerPosition:
        """The rates as a process; a K beyond them is refused."""
        return PerPosition(rates=self.rates, kind=self.kind)


_REPORT = "DeepSeek-V3 technical report, arXiv 2412.19437, section 5.4.3: 85 to 90 % of second tokens are accepted across topics"
PUBLISHED: dict[str, Published] = {
    "deepseek-v3": Published(rates=(0.875,), source=f"{_REPORT}; the middle of the range"),
    "deepseek-v3-low": Published(rates=(0.85,), source=f"{_REPORT}; its lower end"),
    "deepseek-v3-high": Published(rates=(0.90,), source=f"{_REPORT}; its upper end"),
}
"""Published rates."""


def published(name: str) -> Published:
    """The rates called *name*; ValueError with the nearest names for another."""
    found = PUBLISHED.get(name)
    if found is None:
        near = difflib.get_close_matches(name, PUBLISHED, n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(PUBLISHED)}"
        raise ValueError(f"{name!r} is not a published acceptance; {meant}")
    return found
