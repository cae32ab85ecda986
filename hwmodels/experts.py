"""Which experts tokens choose and which rank holds them: popularity, placement, copies of the hottest, and the load of each rank.

An expert's popularity is the chance that a token chooses it, so that all of them add up to the experts a token visits. Tokens
choose independently of each other; of a token's own choices nothing else is assumed, which makes the experts that a batch wakes
exact: the sum over experts of 1 - (1 - p)^tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from annotated_types import Ge

Placement = Literal["linear", "round_robin", "eplb"]
Exchange = Literal["allgather_reducescatter", "all_to_all", "deepep_high_throughput", "deepep_low_latency"]
PLACEMENTS, EXCHANGES = get_args(Placement), get_args(Exchange)
_GRID = 129  # points over which the fullest of several loads is integrated


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Popularity of experts that falls as a power of their rank."""

    zipf: Annotated[float, Ge(0)]
    """The exponent; 0 is even."""
    seed: Annotated[int, Ge(0)] = 0
    """Which expert has which rank is drawn from it."""

    def __post_init__(self) -> None:
        if not 0 <= self.zipf < math.inf:
            raise ValueError(f"the exponent of a Zipf popularity is a number of at least 0; got {self.zipf!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """The way in which the experts of a mixture are chosen, placed and reached."""

    popularity: Literal["measured", "even"] | Zipf | tuple[float, ...] | Path = "measured"
    """`measured`: mildly skewed, as the tables of kernels were timed (a power law of 1.01); `even`; `{zipf: EXPONENT}`; the weight
    of each expert, tokens that chose it for instance; or a file of these, one a line."""
    placement: Placement = "linear"
    """`linear`: consecutive experts on a rank; `round_robin`: dealt out; `eplb`: packed by popularity (vLLM's --enable-eplb)."""
    redundant: Annotated[int, Ge(0)] = 0
    """Copies of the hottest experts over all ranks, which placement eplb makes (vLLM's num_redundant_experts)."""
    exchange: Exchange | None = None
    """The way in which rows reach the experts of other ranks of data-parallel attention; where it is left out, all rows go to every
    GPU (vLLM's allgather_reducescatter)."""
    backend: str | None = None
    """The implementation that computes them, by the engine's name for it (vLLM's --moe-backend); None: the one that was timed."""

    def __post_init__(self) -> None:
        if isinstance(self.popularity, str) and self.popularity not in ("measured", "even"):
            raise ValueError(
                f"popularity is measured, even, a Zipf or a weight for each expert; got {self.popularity!r}"
            )
        if isinstance(self.popularity, tuple) and not (
            all(0 <= weight < math.inf for weight in self.popularity) and sum(self.popularity) > 0
        ):
            raise ValueError("popularity has a weight of at least 0 for each expert, not all of them 0")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement of experts is {', '.join(PLACEMENTS)}; got {self.placement!r}")
        if isinstance(self.redundant, bool) or not isinstance(self.redundant, int) or self.redundant < 0:
            raise ValueError(f"redundant experts are a whole number of at least 0; got {self.redundant!r}")
        if self.exchange is not None and self.exchange not in EXCHANGES:
            raise ValueError(f"the exchange with experts is {', '.join(EXCHANGES)}; got {self.exchange!r}")
        if self.redundant and self.placement != "eplb":
            raise ValueError(
                f"redundant is {self.redundant}, and copies of experts are made by placement eplb alone; set it, or leave "
                "redundant out"
            )

    def check(self, name: str, n_experts: int | None, ranks: int, groups: int) -> None:
        """ValueError in one sentence where a model of *n_experts* (None: dense) on *ranks* cannot be laid out so.

        *groups* is the degree of data-parallel attention.
        """
        if self == ExpertLayout():
            return
        if isinstance(self.popularity, Path):
            raise ValueError(f"experts.popularity is the file {self.popularity}, which `read_popularity` reads")
        if n_experts is None:
            raise ValueError(f"experts is about a mixture of experts, and {name} is dense; leave experts out")
        if self.popularity == "measured" and self.placement != "linear":
            raise ValueError(
                f"experts.placement {self.placement} goes by which experts are popular, and popularity measured does not say; "
                "give popularity even, a Zipf or a file"
            )
        if isinstance(self.popularity, tuple) and len(self.popularity) != n_experts:
            raise ValueError(
                f"experts.popularity has {len(self.popularity)} weights and {name} has {n_experts} experts; give one for each"
            )
        if ranks == 1 and self.placement != "linear":
            raise ValueError(
                f"experts.placement {self.placement} needs experts on several ranks; set parallel.expert or leave it out"
            )
        if (n_experts + self.redundant) % ranks:
            fits = [r for r in range(n_experts) if (n_experts + r) % ranks == 0][:3]
            raise ValueError(
                f"experts.redundant {self.redundant} makes {n_experts + self.redundant} experts, which do not divide over "
                f"{ranks} ranks; it may be {', '.join(map(str, fits))}, ..."
            )
        if self.exchange is not None and groups == 1:
            raise ValueError(
                f"experts.exchange {self.exchange} needs data-parallel attention (parallel.data): one attention group has "
                "its rows on every device already"
            )
        if self.exchange is not None and self.exchange != "allgather_reducescatter" and ranks == 1:
            raise ValueError(
                f"experts.exchange {self.exchange} sends rows to the ranks of their experts, and every device has a part of "
                "each expert; set parallel.expert"
            )

    def load(self, n_experts: int, per_token: int, ranks: int) -> ExpertLoad | None:
        """The load of each rank; None where experts are chosen as the tables of kernels were measured."""
        if self.popularity == "measured":
            return None
        if isinstance(self.popularity, Zipf):
            weights = np.arange(1.0, n_experts + 1.0) ** -self.popularity.zipf
            weights = np.random.default_rng(self.popularity.seed).permutation(weights)
        elif isinstance(self.popularity, tuple):
            weights = np.array(self.popularity, float)
        else:
            weights = np.ones(n_experts)
        chosen = tuple(chances(weights, per_token).tolist())
        if self.placement == "eplb":
            held = balanced(chosen, ranks, self.redundant)
        elif self.placement == "round_robin":
            held = tuple(tuple(range(rank, n_experts, ranks)) for rank in range(ranks))
        else:
            local = n_experts // ranks
            held = tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ranks))
        return ExpertLoad(chosen=chosen, held=held)


def even_load(n_experts: int, per_token: int, ranks: int) -> ExpertLoad:
    """All experts equally popular, consecutive ones on a rank."""
    held = np.arange(n_experts).reshape(ranks, -1).tolist()
    return ExpertLoad(chosen=(per_token / n_experts,) * n_experts, held=tuple(map(tuple, held)))


def chances(weights: Any, per_token: int) -> np.ndarray:
    """The chance that a token chooses each expert: in proportion to *weights*, together *per_token*, none above 1."""
    weights = np.asarray(weights, float)
    if (weights > 0).sum() < per_token:
        raise ValueError(f"tokens choose {per_token} experts, and {(weights > 0).sum()} have a popularity above 0")
    sure = np.zeros(len(weights), bool)
    while True:
        rest = np.where(sure, 0.0, weights)
        found = np.where(sure, 1.0, rest * ((per_token - sure.sum()) / max(rest.sum(), 1e-300)))
        over = (found > 1.0) & ~sure
        if not over.any():
            return found
        sure |= over


def balanced(load: Sequence[float], ranks: int, redundant: int = 0) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank by the rule of EPLB (github.com/deepseek-ai/eplb, global; vLLM 0.32.0, distributed/eplb).

    Copies go one by one to the expert with the most load a copy. Then all copies, the heaviest first, go to the rank with the
    least load that has room; where ranks hold a single one they stay in order. ValueError where ranks would differ in size.
    """
    weights = np.asarray(load, float)
    copies = list(range(len(weights)))
    count = np.ones(len(weights))
    for _ in range(redundant):
        hottest = int(np.argmax(weights / count))
        copies.append(hottest)
        count[hottest] += 1
    if len(copies) % ranks:
        raise ValueError(f"{len(copies)} experts do not divide over {ranks} ranks")
    room = len(copies) // ranks
    if room == 1:
        return tuple((expert,) for expert in copies)
    each = weights[copies] / count[copies]
    held: list[list[int]] = [[] for _ in range(ranks)]
    carried = np.zeros(ranks)
    for i in np.argsort(-each, kind="stable").tolist():
        rank = int(np.argmin(carried))
        held[rank].append(copies[i])
        carried[rank] = carried[rank] + each[i] if len(held[rank]) < room else np.inf
    return tuple(map(tuple, held))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """The experts that tokens choose, and the ranks that hold them."""

    chosen: tuple[float, ...]
    """For each expert the chance that a token chooses it."""
    held: tuple[tuple[int, ...], ...]
    """The experts on each rank; one on several ranks shares its tokens evenly between its copies."""

    @property
    def per_token(self) -> float:
        return float(sum(self.chosen))

    def awake(self, tokens: Any) -> np.ndarray:
        """Expected experts with a token, rank by rank: *tokens*, of any shape, with a last axis of ranks."""
        return awake_of(copies_of(self), np.asarray(tokens, float)[..., None, None])

    def distinct(self, tokens: Any) -> np.ndarray:
        """Expected experts with a token, whatever their copies; the shape of *tokens*."""
        return awake_of(np.array(self.chosen), np.asarray(tokens, float)[..., None])

    @property
    def rank_slots(self) -> np.ndarray:
        """(token, expert) pairs of a token, rank by rank."""
        return copies_of(self).sum(axis=-1)

    def hits(self, sets: int | None = None) -> np.ndarray:
        """The chance that a token chooses an expert of a rank, rank by rank, or of each of *sets* of consecutive ranks.

        Choices without replacement, from so many equal experts as the popularity there amounts to: exact where all are
        equally popular.
        """
        n, k = len(self.chosen), round(self.per_token)
        effective = self.rank_slots.reshape(sets or len(self.held), -1).sum(axis=-1) * (n / k)
        missed = np.ones(len(effective))
        for drawn in range(k):
            missed = missed * np.clip((n - drawn - effective) / (n - drawn), 0.0, 1.0)
        return 1.0 - missed

    def busiest_slots(self, tokens: Any) -> np.ndarray:
        """Expected (token, expert) pairs of the rank that has the most; *tokens* one-dimensional.

        Loads of ranks are taken as independent normal numbers, with the variance of choices without replacement.
        """
        tokens, mean = np.asarray(tokens, float), self.rank_slots
        k = self.per_token
        if len(mean) == 1:
            return tokens * k
        n, share = len(self.chosen), mean / k
        variance = k * share * (1.0 - share) * max(0.0, n - k) / max(1.0, n - 1.0)
        means = tokens[:, None] * mean
        spread = np.sqrt(np.maximum(tokens[:, None] * variance, 1e-300))
        low, high = (means - 6.0 * spread).max(axis=1), (means + 6.0 * spread).max(axis=1)
        at = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _GRID)
        below = np.ones_like(at)
        for rank in range(len(mean)):
            below *= _normal((at - means[:, rank, None]) / spread[:, rank, None])
        above = 1.0 - below
        found = low + (high - low) * (above.sum(axis=1) - 0.5 * (above[:, 0] + above[:, -1])) / (_GRID - 1)
        local = max(len(rank) for rank in self.held)
        most = tokens * min(k, local)
        return np.minimum(np.maximum(found, np.maximum(tokens * float(mean.max()), np.minimum(1.0, tokens))), most)


@functools.lru_cache(maxsize=256)
def copies_of(load: ExpertLoad) -> np.ndarray:
    """The chance that a token visits each copy, shape (ranks, copies on a rank)."""
    count = np.bincount([expert for rank in load.held for expert in rank], minlength=len(load.chosen))
    found = (np.array(load.chosen) / count)[np.array(load.held)]
    found.setflags(write=False)
    return found


def awake_of(chosen: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Sum over the last axis of 1 - (1 - p)^tokens."""
    with np.errstate(divide="ignore", invalid="ignore"):
        missed = np.where(tokens > 0, np.exp(tokens * np.log1p(-chosen)), 1.0)
    return (1.0 - missed).sum(axis=-1)


def _normal(x: np.ndarray) -> np.ndarray:
    """The normal distribution function (Abramowitz and Stegun, 7.1.26; within 1e-7)."""
    z = np.abs(x) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * z)
    terms = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * terms * np.exp(-z * z)
    return np.where(x > 0, 1.0 - tail, tail)


def read_popularity(path: str | Path) -> tuple[float, ...]:
    """The weights of a file with a number a line, expert by expert; blank lines and those that begin with # are skipped.

    ValueError names the line that is no number of at least 0.
    """
    found: list[float] = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            weight = float(line)
        except ValueError:
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise ValueError(f"{path}, line {number}: expected a number of at least 0, got {line.strip()!r}")
        found.append(weight)
    if not found:
        raise ValueError(f"{path} has no numbers; give the popularity of each expert, one a line")
    return tuple(found)
