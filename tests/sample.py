"""How many of the random runs a slow test draws.

By default a tenth of what was drawn when a rule was written: enough to meet a slip in it, and short enough for every change.
`ROOFTRACE_RANDOM_RUNS=all` draws all of them, as is done after a change to the engine.
"""

from __future__ import annotations

import os

ALL = os.environ.get("ROOFTRACE_RANDOM_RUNS") == "all"
SHARE = 1.0 if ALL else 0.1


def some(seeds: range) -> range:
    """The first tenth of `seeds`, at least one; or all of them."""
    return seeds if ALL else seeds[: max(1, round(len(seeds) * SHARE))]
