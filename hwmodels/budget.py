"""Tokens in a batch that suit a cost model: what `token_budget: auto` and `chunk: auto` choose."""

from __future__ import annotations

from typing import cast

from hwmodels.cost import CostModel, RankedCostModel
from hwmodels.totals import Totals, seen

BUDGET_STEP = 32
"""Budgets tried are multiples of this, as Sarathi-Serve's own scheduler rounds its chunks."""
LARGEST_BUDGET = 4096


def _step_s(cost: CostModel, totals: Totals, stage: int, ranks: int) -> float:
    """Duration of a step that so many ranks take together, each with such a batch."""
    if ranks == 1:
        return float(cost.iteration_s(totals, stage))
    return float(cast(RankedCostModel, cost).common_step([totals] * ranks, stage))


def _prefill_s(cost: CostModel, tokens: int, ranks: int) -> float:
    pairs = tokens * (tokens + 1) // 2
    totals = Totals(tokens, tokens, 1, pairs, tokens, 0, 0, 1, pairs if cost.window_tokens else 0)
    return max(_step_s(cost, totals, stage, ranks) for stage in range(cost.n_stages))


def saturating_tokens(cost: CostModel, *, loss: float = 0.2, ranks: int = 1) -> int:
    """The fewest tokens in a batch whose throughput is within *loss* of the best of any batch of up to LARGEST_BUDGET; with
    *ranks*, in the batch of each, all having as many.

    What SARATHI does by profiling (arXiv 2308.16369, section 4.4): saturation shows as a plateau, and tiles as steps, of
    which the last tokens come for nothing and are taken too.
    """
    sizes = range(BUDGET_STEP, LARGEST_BUDGET + 1, BUDGET_STEP)
    seconds = [_prefill_s(cost, tokens, ranks) for tokens in sizes]
    rates = [tokens / each for tokens, each in zip(sizes, seconds, strict=True)]
    enough = (1 - loss) * max(rates)
    found = next(i for i, rate in enumerate(rates) if rate >= enough)
    while found + 1 < len(sizes) and seconds[found + 1] < 1.01 * seconds[found]:
        found += 1
    return sizes[found]


def tokens_within(cost: CostModel, *, tbt_s: float, decodes: int, context_tokens: int, ranks: int = 1) -> int:
    """The largest budget whose iteration, with *decodes* at *context_tokens* each and a chunk at the end of such a
    context in the rest, takes at most *tbt_s* over all stages; with *ranks*, all of which have as much to do.

    Sarathi-Serve, OSDI 2024, section 4.3. ValueError where not even the decodes and one step of tokens fit.
    """
    best = 0
    for budget in range(BUDGET_STEP, LARGEST_BUDGET + 1, BUDGET_STEP):
        chunk = budget - decodes
        if chunk <= 0:
            continue
        past = max(context_tokens - chunk, 0)
        window = cost.window_tokens
        pairs = chunk * past + chunk * (chunk + 1) // 2
        totals = Totals(
            budget, chunk, 1, pairs, past + chunk, decodes, decodes * context_tokens, decodes + 1,
            min(pairs, chunk * window) if window else 0,
            decodes * seen(context_tokens, window) if window else 0,
        )  # fmt: skip
        seconds = sum(_step_s(cost, totals, stage, ranks) for stage in range(cost.n_stages))
        seconds += (cost.n_stages - 1) * float(cost.handover_s(ranks * budget))
        if seconds > tbt_s:
            break
        best = budget
    if not best:
        raise ValueError(
            f"no token budget keeps an iteration with {decodes} decodes of {context_tokens} tokens within {tbt_s:g} s; "
            "allow more time, fewer sequences or more devices"
        )
    return best
