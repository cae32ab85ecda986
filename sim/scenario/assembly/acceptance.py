"""Acceptance as a scenario states it, made into a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from policies import acceptance as kinds
from policies.acceptance import TwoState
from sim.engine import PolicyError
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.decoding import DecodingSettings, TwoStates
from sim.scenario.section import Policy

if TYPE_CHECKING:
    from policies.acceptance import Acceptance
    from policies.acceptance.process import FloatArray, IntArray
    from policies.decoding import Speculative
    from workloads import ClosedLoop, Trace


ADAPTIVE_K_MAX = 8
_KEY = "decoding.acceptance"


def acceptance_of(settings: DecodingSettings, find: Callable[[str], Path | None]) -> Acceptance:
    """The process that `decoding.acceptance` states; ValueError with the key of what cannot be. *find*: where a named file is."""
    given = settings.acceptance
    assert given is not None
    k = settings.num_speculative_tokens
    largest = largest_k(settings)
    if given.policy is not None:
        return _own(given.policy)
    key = _KEY
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


def _own(settings: Policy) -> Acceptance:
    """A process of the user's own; ScenarioError where it is not there, or lacks what a process has."""
    process = named.policy(settings.policy, settings.settings, {}, key=_KEY, method="accepted")
    asked = ("accepted", "per_position", "mean_length", "width")
    if missing := [name for name in asked if not callable(getattr(process, name, None))]:
        raise ScenarioError(
            f"{_KEY}: {settings.policy} has no {missing[0]}; a subclass of policies.acceptance.Chain needs accepted and "
            "per_position alone"
        )
    kind = OwnRecording if getattr(process, "finite", False) else OwnAcceptance
    return kind(process=process, name=settings.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAcceptance:
    """An acceptance process of the user's own, whose answers are checked as they come."""

    finite: ClassVar[bool] = False
    process: Any
    name: str

    def __repr__(self) -> str:
        return named.shown_policy(self.process)

    def accepted(self, request_id: int, round_start: int, n_rounds: int, k: int, seed: int) -> IntArray:
        """The process's own counts; PolicyError for what cannot be accepted, and for errors of its code."""
        asked = f"accepted({request_id}, {round_start}, {n_rounds}, {k}, {seed})"
        try:
            counts = np.asarray(self.process.accepted(request_id, round_start, n_rounds, k, seed))
        except Exception as error:
            raise PolicyError(f"{_KEY}: {self.name} failed at {asked}: {type(error).__name__}: {error}") from error
        if counts.shape != (n_rounds,) or counts.dtype.kind not in "iu" or counts.min() < 0 or counts.max() > k:
            raise PolicyError(
                f"{_KEY}: {self.name} answered {asked} with {named.shown(counts.tolist())}; expected {n_rounds} whole numbers "
                f"from 0 to {k}"
            )
        return counts.astype(np.int64)

    def per_position(self, k: int) -> FloatArray:
        return np.asarray(self._asked("per_position", k), dtype=float)

    def mean_length(self, k: int) -> float:
        return float(self._asked("mean_length", k))

    def width(self, k: int) -> int:
        return int(self._asked("width", k))

    def _asked(self, what: str, k: int) -> Any:
        try:
            return getattr(self.process, what)(k)
        except Exception as error:
            raise ScenarioError(
                f"{_KEY}: {self.name} failed at {what}({k}): {type(error).__name__}: {error}"
            ) from error


class OwnRecording(OwnAcceptance):
    """One that has only so many rounds."""

    finite: ClassVar[bool] = True


def _two_state(settings: TwoStates, at_k: int) -> Acceptance:
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
