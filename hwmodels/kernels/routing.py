"""The division of work in a mixture of experts: slots, experts awake and tiles on the busiest rank, by how tokens choose."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from hwmodels.experts import ExpertLoad, awake_of, copies_of

TILE_ROWS = (8, 16, 32, 64, 128, 256)
"""Token sides of a grouped tile for which `Routed.tiles` counts."""
_DRAWS = 8  # of loads over ranks; one rank takes quantiles, which need no draw
_SEED = 20_240_601
# Of the normal distribution at 1/16, 3/16 ... 15/16.
_QUANTILES = np.array([-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534])


class Routed(NamedTuple):
    """The rows that reach the busiest rank of an expert-parallel group; arrays over tokens."""

    slots: np.ndarray
    """(token, expert) pairs."""
    awake: np.ndarray
    """Experts with at least one token."""
    tiles: np.ndarray
    """Row tiles summed over experts, for each of `TILE_ROWS` (last axis)."""


def exponent(distribution: str) -> float:
    """The exponent of "power_law_A"; ValueError for what is neither that, balanced nor uniform."""
    prefix = "power_law_"
    if not distribution.startswith(prefix):
        raise ValueError(f"distribution must be balanced, uniform or power_law_<exponent>; got {distribution!r}")
    try:
        alpha = float(distribution[len(prefix) :])
    except ValueError:
        raise ValueError(f"distribution {distribution!r} lacks a number after {prefix}") from None
    if not (alpha > 0 and alpha != 1.0):
        raise ValueError(f"the exponent of a power law must be positive and not 1; got {alpha:g}; use 1.01")
    return alpha


def power_law_counts(tokens: np.ndarray, *, topk: int, experts: int, alpha: float, draws: np.ndarray) -> np.ndarray:
    """Tokens of each expert, shape (tokens, *draws.shape), where `draws` holds uniform numbers, experts last.

    The skewed routing of aiconfigurator's benchmarks (`power_law_logits`): popularity follows a power law of exponent
    `alpha` from 1 to 0.8 tokens (0.01 to 2 where there are no more slots than experts), is scaled to the slots and
    rounded. What rounding lost goes to the least popular, one each: with it the measured times at 8 to 128 tokens ask
    for the experts awake that are counted here, and without it for 20 of 256 more. No expert has a token twice.
    """
    shape = (-1,) + (1,) * draws.ndim
    total = np.asarray(tokens, float).reshape(shape) * topk
    many = total > experts
    low = np.where(many, 1.0, 0.01)
    high = np.where(many, np.maximum(1.0 + 1e-9, 0.8 * total / topk), 2.0)
    rest = 1.0 - alpha
    weights = ((high**rest - low**rest) * draws + low**rest) ** (1.0 / rest)
    share = weights / weights.sum(axis=-1, keepdims=True)
    most = 1.0 / topk
    for _ in range(8):
        over = np.maximum(0.0, share - most)
        if not over.any():
            break
        room = np.where(over > 0, 0.0, share)
        share = np.minimum(share, most) + over.sum(axis=-1, keepdims=True) * room / np.maximum(
            room.sum(axis=-1, keepdims=True), 1e-12
        )
    counts = np.rint(share * total)
    lost = total - counts.sum(axis=-1, keepdims=True)
    # Popularity rises with the draw, so that the order of the draws is that of the counts.
    rank = np.argsort(np.argsort(draws, axis=-1), axis=-1)
    each = np.floor(np.maximum(lost, 0.0) / experts)
    counts = counts + each + (rank < np.maximum(lost, 0.0) - each * experts)
    return np.maximum(0.0, counts - (rank == experts - 1) * np.maximum(-lost, 0.0))


def _sums(counts: np.ndarray) -> Routed:
    """The sums of the counts of one rank's experts, last axis; other axes but the first are averaged over."""
    over = tuple(range(1, counts.ndim - 1))
    tiles = np.stack([np.ceil(counts / rows).sum(axis=-1) for rows in TILE_ROWS], axis=-1)
    slots, awake = counts.sum(axis=-1), (counts > 0).sum(axis=-1).astype(float)
    if over:
        return Routed(slots.mean(axis=over), awake.mean(axis=over), tiles.mean(axis=over))
    return Routed(slots, awake, tiles)


def _balanced(tokens: np.ndarray, topk: int, experts: int, ep: int) -> Routed:
    """Round robin: token t takes the experts t + i stride; few tokens are spread over a stride."""
    local, stride = experts // ep, math.ceil(experts / topk)
    mean = tokens * topk / experts
    floor = np.floor(mean)
    fuller = np.rint((mean - floor) * local)
    starts = np.arange(0, local, stride, dtype=float)
    few = np.minimum(tokens[:, None], np.ceil((local - starts) * tokens[:, None] / stride)).sum(axis=-1)
    few = np.where(tokens > 0, np.minimum(few, local), 0.0)
    many = tokens >= stride
    awake = np.where(many, np.where(floor > 0, local, np.maximum(fuller, 1.0)), few)
    tiles: list[np.ndarray] = []
    for rows in TILE_ROWS:
        of_many = fuller * np.ceil((floor + 1) / rows) + (local - fuller) * np.ceil(floor / rows)
        tiles.append(np.where(many, np.maximum(of_many, awake), few))
    slots = np.where(many, np.maximum(local * mean, awake), few)
    return Routed(slots, awake, np.stack(tiles, axis=-1))


def _uniform(tokens: np.ndarray, topk: int, experts: int, ep: int) -> Routed:
    """Independent choices: loads are nearly normal around their mean; expected values, ranks alike."""
    local, mean = experts // ep, tokens * topk / experts
    hit = 1.0 if topk >= experts else -np.expm1(tokens * math.log1p(-topk / experts))
    awake = np.where(tokens > 0, np.maximum(local * hit, np.minimum(1.0, tokens * topk)), 0.0)
    loads = np.maximum(0.0, mean[:, None] + np.sqrt(mean)[:, None] * _QUANTILES)
    tiles = [np.maximum(awake, local * np.ceil(loads / rows - 0.5).mean(axis=-1)) for rows in TILE_ROWS]
    return Routed(np.maximum(tokens * topk / ep, awake), awake, np.stack(tiles, axis=-1))


def routed(tokens: Any, *, topk: int, experts: int, ep: int = 1, distribution: str = "uniform") -> Routed:
    """The rows that `tokens` (one-dimensional) send to the busiest of `ep` ranks of consecutive experts.

    "uniform": independent choices. "balanced": round robin. "power_law_A": skewed; over several ranks the expectation
    is taken over a fixed set of draws, and the rank with the most slots counts.
    """
    if experts % ep:
        raise ValueError(f"experts ({experts}) must divide by ep ({ep}); choose an ep that divides it")
    tokens = np.asarray(tokens, float)
    if distribution == "balanced":
        return _balanced(tokens, topk, experts, ep)
    if distribution == "uniform":
        return _uniform(tokens, topk, experts, ep)
    alpha = exponent(distribution)
    if ep == 1:
        draws = (np.arange(experts) + 0.5) / experts
        return _sums(power_law_counts(tokens, topk=topk, experts=experts, alpha=alpha, draws=draws))
    counts = power_law_counts(tokens, topk=topk, experts=experts, alpha=alpha, draws=_draws(experts))
    ranks = counts.reshape(len(tokens), _DRAWS, ep, experts // ep)
    fullest = np.argmax(ranks.sum(axis=-1), axis=-1)
    return _sums(np.take_along_axis(ranks, fullest[..., None, None], axis=2)[:, :, 0, :])


def routed_by(load: ExpertLoad, tokens: Any) -> Routed:
    """The rows that *tokens* (one-dimensional) send to the busiest of the ranks of *load*, expected values."""
    tokens = np.asarray(tokens, float)
    slots, mean = load.busiest_slots(tokens), load.rank_slots
    fullest = int(np.argmax(mean))
    # Where chance fills a rank beyond its share, it is as if more tokens had come.
    drawn = (slots / max(float(mean[fullest]), 1e-300))[:, None]
    own = copies_of(load)[fullest]
    awake = np.minimum(slots, awake_of(own, drawn))
    expected = drawn * own
    loads = np.rint(np.maximum(0.0, expected[..., None] + np.sqrt(expected)[..., None] * _QUANTILES))
    tiles = [np.maximum(awake, np.ceil(loads / rows).mean(axis=-1).sum(axis=-1)) for rows in TILE_ROWS]
    return Routed(slots, awake, np.stack(tiles, axis=-1))


@functools.cache
def _draws(experts: int) -> np.ndarray:
    """Uniform numbers, the same in every process."""
    return np.random.default_rng(_SEED).random((_DRAWS, experts))


@functools.lru_cache(maxsize=65536)
def routed_row(tokens: float, topk: int, experts: int, ep: int, distribution: str) -> tuple[float, ...]:
    """`routed` of one number of tokens: slots, experts awake, tiles."""
    found = routed(np.array([tokens]), topk=topk, experts=experts, ep=ep, distribution=distribution)
    return (float(found.slots[0]), float(found.awake[0]), *(float(t) for t in found.tiles[0]))
