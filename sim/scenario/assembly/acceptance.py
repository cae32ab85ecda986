"""Acceptance as a scenario states it, made into a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sim.scenario.decoding import DecodingSettings, TwoStates

if TYPE_CHECKING:
    from policies.acceptance import Acceptance
    from policies.decoding import Speculative
    from workloads import ClosedLoop, Trace


ADAPTIVE_K_MAX = 8


def acceptance_of(settings: DecodingSettings, find: Callable[[str], Path | None]) -> Acceptance:
    """The process that `decoding.acceptance` states; ValueError with the key of what cannot be. *find*: where a named file is."""
    from policies import acceptance as kinds

    given = settings.acceptance
    assert given is not None
    k = settings.num_speculative_tokens
    largest = largest_k(settings)
    key = "decoding.acceptance"
    try:
        if given.alpha is not None:
            return kinds.Iid(alpha=given.alpha)
        if given.per_position is not None:
            key += ".per_position"
            assert given.kind is not None
            return kinds.PerPosition(rates=tuple(given.per_position), kind=given.kind)
        if given.mean_length is not None:
            key += ".mean_length"
            if given.at_k is None and not isinstance(k, int):
                raise ValueError("say with how many drafted tokens it was measured, as at_k")
            return kinds.MeanLength(mean=given.mean_length, at_k=given.at_k or largest)
        if given.beta is not None:
            key += ".beta"
            return kinds.BetaAlpha(mean=given.beta.mean, sd=given.beta.sd)
        if given.two_state is not None:
            key += ".two_state"
            return _two_state(given.two_state, largest)
        if given.recorded is not None:
            key += ".recorded"
            return kinds.read_recorded(_file(given.recorded, find), recorded_k=given.recorded_k or largest)
        if given.distributions is not None:
            key += ".distributions"
            return kinds.FromDistributions(
                target=given.distributions.target,
                draft=given.distributions.draft,
                rule=settings.rule or "modified_rejection",
                b=settings.b,
            )
        if given.published is not None:
            key += ".published"
            return kinds.published(given.published).acceptance
        assert given.tree is not None
        key += ".tree"
        if settings.method in ("ngram", "draft_model"):
            raise ValueError(
                f"a tree of candidates comes from heads, and method {settings.method} drafts a chain; "
                "use medusa, eagle or mtp"
            )
        return kinds.Tree(
            accuracies=tuple(map(tuple, given.tree.accuracies)),
            nodes=given.tree.nodes,
            branching=None if given.tree.branching is None else tuple(given.tree.branching),
            paths=None if given.tree.paths is None else tuple(map(tuple, given.tree.paths)),
        )
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _two_state(settings: TwoStates, at_k: int) -> Acceptance:
    from policies.acceptance import TwoState

    if settings.lag1 is None:
        assert settings.stay_good is not None
        assert settings.stay_bad is not None
        return TwoState(
            alpha_good=settings.alpha_good,
            alpha_bad=settings.alpha_bad,
            stay_good=settings.stay_good,
            stay_bad=settings.stay_bad,
        )
    return TwoState.from_autocorrelation(
        alpha_good=settings.alpha_good,
        alpha_bad=settings.alpha_bad,
        lag1=settings.lag1,
        at_k=at_k,
        good_share=0.5 if settings.good_share is None else settings.good_share,
    )


def _file(name: str, find: Callable[[str], Path | None]) -> Path:
    found = find(name)
    if found is None:
        raise ValueError(f"{name} does not exist, neither beside the scenario nor here")
    return found


def largest_k(settings: DecodingSettings) -> int:
    """The most tokens that a round drafts, whatever the batch."""
    k = settings.num_speculative_tokens
    if k == "adaptive":
        return settings.max_speculative_tokens or ADAPTIVE_K_MAX
    if isinstance(k, list):
        return max((row[2] or 0 for row in k if len(row) == 3), default=1)
    return k or 1  # type: ignore[return-value]


def check_recording(decoding: Speculative, workload: Trace | ClosedLoop) -> None:
    """Refuse a recording that may end before its request does, at the smallest k that the run may use."""
    import numpy as np

    rows = decoding.acceptance.rows  # type: ignore[attr-defined]
    smallest = min(k for _, _, k in decoding.table)
    reach = np.array([sum(min(accepted, smallest) + 1 for accepted in row) for row in rows])
    # The prompt's iteration emits the first token.
    needed = np.maximum(np.asarray(workload.output_tokens) - 1, 0)
    row = np.arange(len(needed)) % len(rows)
    short = np.flatnonzero(needed > reach[row])
    if short.size:
        request = int(short[0])
        which = int(row[request])
        raise ValueError(
            f"decoding.acceptance.recorded: request {request} needs {int(needed[request])} tokens from rounds, but row "
            f"{which} of the recording ends after {len(rows[which])} rounds with {int(reach[which])}; "
            "record longer answers or shorten the outputs"
        )
