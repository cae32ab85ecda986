"""Multi-token prediction in published serving rows: how many tokens were drafted, and how many of them were taken.

Rows say that it was on and no more. How many tokens a round drafts is read from what the launch scripts of the benchmark ask for,
one rule for all rows (`depth_of`); how many are accepted is one figure for each model and depth (`acceptances.toml`), published
where somebody has published it, else fitted to the token times of half of the deployments (`sim.validation.fit_acceptance`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwmodels.tables import read_toml
from policies.acceptance import Iid
from sim.bench.published.machines import Speculation, Unmodelled

FILE = Path(__file__).with_name("acceptances.toml")
NOT_KNOWN = "whether it ran with multi-token prediction is not known"
NO_ACCEPTANCE = "ran with multi-token prediction, and no acceptance is known for"
_SAME = {"deepseek-r1": "deepseek-v3"}
"""Models with one entry."""
_DEPTHS = {"sglang": 2, "trtllm": 3}
_DEPTH_OF_RANKS = {"trtllm": 1}


def depth_of(stack: str, *, ranks: int) -> int | None:
    """Tokens drafted in a round by the benchmark's servers of *stack*, with so many ranks of attention; None: not known.

    InferenceX's scripts ask SGLang for two steps (`--speculative-num-steps 2 --speculative-num-draft-tokens 3`), and TensorRT-LLM
    for three drafted tokens, or one where attention is data-parallel (`num_nextn_predict_layers`); from knowledge of the scripts,
    for the measurements do not hold it.
    """
    return (_DEPTH_OF_RANKS if ranks > 1 else {}).get(stack, _DEPTHS.get(stack))


@functools.cache
def acceptances() -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
    """Model -> depth -> alpha (of a drafted token, given that those before it were accepted), and its source."""
    return {model: {int(depth): entry for depth, entry in table.items()} for model, table in read_toml(FILE).items()}


def speculation_of(model: str, stack: str, *, ranks: int) -> Speculation:
    """The way in which the servers of *stack* speculated with *model*; `Unmodelled` where that is not known."""
    depth = depth_of(stack, ranks=ranks)
    if depth is None:
        raise Unmodelled(f"ran with multi-token prediction, and how many tokens {stack} drafted is not known")
    entry = acceptances().get(_SAME.get(model, model), {}).get(depth)
    if entry is None:
        raise Unmodelled(f"{NO_ACCEPTANCE} {model} drafting {depth}")
    return Speculation(k=depth, acceptance=Iid(alpha=float(entry["alpha"])))
