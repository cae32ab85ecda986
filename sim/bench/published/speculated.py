"""Multi-token prediction in published serving rows: how many tokens were drafted, and how many of them were taken.

Rows say that it was on and no more. How many tokens a round drafts is what the launch scripts of the benchmark ask the stack for,
one rule for all rows (`Published.drafted`); how many are accepted is one figure for each model and depth (`acceptances.toml`),
published where somebody has published it, else fitted to the token times of half of the deployments
(`sim.validation.fit_acceptance`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwmodels.tables import read_toml
from policies.acceptance import Iid
from sim.bench.published.machines import Speculation, Unmodelled
from sim.bench.published.servers import published_by

FILE = Path(__file__).with_name("acceptances.toml")
NOT_KNOWN = "whether it ran with multi-token prediction is not known"
NO_ACCEPTANCE = "ran with multi-token prediction, and no acceptance is known for"
_SAME = {"deepseek-r1": "deepseek-v3"}
"""Models with one entry."""


@functools.cache
def acceptances() -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
    """Model -> depth -> alpha (of a drafted token, given that those before it were accepted), and its source."""
    return {model: {int(depth): entry for depth, entry in table.items()} for model, table in read_toml(FILE).items()}


def speculation_of(model: str, stack: str, *, ranks: int) -> Speculation:
    """The way in which the servers of *stack* speculated with *model*; `Unmodelled` where that is not known."""
    published = published_by(stack)
    depth = (published.drafted_on_ranks if ranks > 1 else None) or published.drafted
    if depth is None:
        raise Unmodelled(f"ran with multi-token prediction, and how many tokens {stack} drafted is not known")
    entry = acceptances().get(_SAME.get(model, model), {}).get(depth)
    if entry is None:
        raise Unmodelled(f"{NO_ACCEPTANCE} {model} drafting {depth}")
    return Speculation(k=depth, acceptance=Iid(alpha=float(entry["alpha"])))
