"""Acceptance as a scenario states it, made into a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from policies import acceptance as kinds
from policies.acceptance import Acceptance, TwoState
from policies.acceptance.process import FloatArray, IntArray
from policies.decoding import Speculative
from sim.engine import PolicyError
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.decoding import AcceptanceSettings, DecodingSettings, Distributions, TwoStates
from sim.scenario.section import Policy
from workloads import Workload

Find = Callable[[str], Path | None]
"""Finds a named file beside the scenario or here."""
ADAPTIVE_K_MAX = 8
_KEY = "decoding.acceptance"


def acceptance_of(settings: DecodingSettings, find: Find) -> Acceptance:
    """The process that `decoding.acceptance` states; ValueError with the key of what cannot be. *find*: where a named file is."""
    given = settings.acceptance
    assert given is not None
    if given.policy is not None:
        return _own(given.policy)
    kind, value = next((kind, value) for kind in _KINDS if (value := getattr(given, kind)) is not None)
    try:
        return _KINDS[kind](value, settings, given, find)
    except ValueError as error:
        key = _KEY if kind == "alpha" else f"{_KEY}.{kind}"
        raise ValueError(f"{key}: {error}") from None


def _per_position(rates: list[float], settings: DecodingSettings, given: AcceptanceSettings, find: Find) -> Acceptance:
    assert given.kind is not None
    return kinds.PerPosition(rates=tuple(rates), kind=given.kind)


def _mean_length(mean: float, settings: DecodingSettings, given: AcceptanceSettings, find: Find) -> Acceptance:
    if given.at_k is None and not isinstance(settings.num_speculative_tokens, int):
        raise ValueError("say with how many drafted tokens it was measured, as at_k")
    return kinds.MeanLength(mean=mean, at_k=given.at_k or largest_k(settings))


def _two_state(states: TwoStates, settings: DecodingSettings, given: AcceptanceSettings, find: Find) -> Acceptance:
    if states.lag1 is None:
        assert states.stay_good is not None
        assert states.stay_bad is not None
        return TwoState(
            alpha_good=states.alpha_good,
            alpha_bad=states.alpha_bad,
            stay_good=states.stay_good,
            stay_bad=states.stay_bad,
        )
    return TwoState.from_autocorrelation(
        alpha_good=states.alpha_good,
        alpha_bad=states.alpha_bad,
        lag1=states.lag1,
        at_k=largest_k(settings),
        good_share=0.5 if states.good_share is None else states.good_share,
    )


def _recorded(name: str, settings: DecodingSettings, given: AcceptanceSettings, find: Find) -> Acceptance:
    path = find(name)
    if path is None:
        raise ValueError(f"{name} does not exist, neither beside the scenario nor here")
    return kinds.read_recorded(path, recorded_k=given.recorded_k or largest_k(settings))


def _from_distributions(
    stated: Distributions, settings: DecodingSettings, given: AcceptanceSettings, find: Find
) -> Acceptance:
    rule = settings.rule or "modified_rejection"
    return kinds.FromDistributions(target=stated.target, draft=stated.draft, rule=rule, b=settings.b)


_KINDS: dict[str, Callable[[Any, DecodingSettings, AcceptanceSettings, Find], Acceptance]] = {
    "alpha": lambda alpha, *_: kinds.Iid(alpha=alpha),
    "per_position": _per_position,
    "mean_length": _mean_length,
    "lengths": lambda lengths, *_: kinds.PerPosition(rates=kinds.rates_of(tuple(lengths))[0], kind="conditional"),
    "beta": lambda beta, *_: beta,
    "two_state": _two_state,
    "recorded": _recorded,
    "distributions": _from_distributions,
    "published": lambda name, *_: kinds.published(name).acceptance,
    "tree": lambda tree, *_: tree,
}
"""Each key that states a process, and the function that makes it of the key's value."""


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
        if counts.shape != (n_rounds,) or counts.dtype.kind not in "iu" or ((counts < 0) | (counts > k)).any():
            raise PolicyError(
                f"{_KEY}: {self.name} answered {asked} with {named.shown(counts.tolist())}; expected {n_rounds} whole numbers "
                f"from 0 to {k}"
            )
        return counts.astype(np.int64)

    def per_position(self, k: int) -> FloatArray:
        return np.asarray(
            self._asked("per_position", k, f"{k} probabilities", lambda each: each.shape == (k,) and (each <= 1).all()),
            dtype=float,
        )

    def mean_length(self, k: int) -> float:
        return float(self._asked("mean_length", k, "a number of at least 1", lambda each: not each.shape and each >= 1))

    def width(self, k: int) -> int:
        return int(
            self._asked(
                "width", k, "a whole number of at least 1", lambda each: not each.shape and each >= 1 and each % 1 == 0
            )
        )

    def _asked(self, what: str, k: int, expected: str, holds: Callable[[Any], bool]) -> Any:
        """The process's answer as an array of finite numbers that are not negative and for which *holds*; else ScenarioError."""
        try:
            answer = getattr(self.process, what)(k)
        except Exception as error:
            raise ScenarioError(
                f"{_KEY}: {self.name} failed at {what}({k}): {type(error).__name__}: {error}"
            ) from error
        numbers = np.asarray(answer)
        if (
            numbers.dtype.kind not in "biuf"
            or not np.isfinite(numbers).all()
            or (numbers < 0).any()
            or not holds(numbers)
        ):
            raise ScenarioError(
                f"{_KEY}: {self.name} answered {what}({k}) with {named.shown(answer)}; expected {expected}"
            )
        return numbers


class OwnRecording(OwnAcceptance):
    """One that has only so many rounds."""

    finite: ClassVar[bool] = True


def largest_k(settings: DecodingSettings) -> int:
    """The most tokens that a round drafts, whatever the batch."""
    k = settings.num_speculative_tokens
    if k == "adaptive":
        return settings.max_speculative_tokens or ADAPTIVE_K_MAX
    if isinstance(k, list):
        return max((row[2] or 0 for row in k if len(row) == 3), default=1)
    return k or 1  # type: ignore[return-value]


def check_recording(decoding: Speculative, workload: Workload, numbers: IntArray) -> None:
    """Refuse a recording that may end before its request does, at the smallest k that the run may use; *numbers*: of the requests
    of *workload* in the whole run, by which rows are replayed."""
    rows = decoding.acceptance.rows  # type: ignore[attr-defined]
    smallest = min(k for _, _, k in decoding.table)
    reach = np.array([sum(min(accepted, smallest) + 1 for accepted in row) for row in rows])
    # The prompt's iteration emits the first token.
    needed = np.maximum(np.asarray(workload.output_tokens) - 1, 0)
    row = numbers % len(rows)
    short = np.flatnonzero(needed > reach[row])
    if short.size:
        first = int(short[0])
        which = int(row[first])
        raise ValueError(
            f"decoding.acceptance.recorded: request {numbers[first]} needs {int(needed[first])} tokens from rounds, but row "
            f"{which} of the recording ends after {len(rows[which])} rounds with {int(reach[which])}; "
            "record longer answers or shorten the outputs"
        )
