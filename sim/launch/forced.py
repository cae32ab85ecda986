"""Acceptance that a server is made to have, so that a benchmark accepts what the simulation did."""

from __future__ import annotations

import math

import numpy as np

from sim.errors import RooftraceError
from sim.launch.reading import Reading
from sim.launch.writing import Writing
from sim.scenario.assembly.acceptance import acceptance_of


def forced_rates(command: Writing) -> tuple[float, ...] | None:
    """The chances that the first 1, 2, ... drafted tokens are all accepted; None where acceptance is not to be forced, or nothing
    is drafted. RooftraceError where the server cannot be told."""
    settings = command.scenario.decoding
    if not command.forced_acceptance or settings.method == "autoregressive":
        return None
    k = settings.num_speculative_tokens
    if not isinstance(k, int):
        raise RooftraceError(
            "--forced-acceptance: a server is told one acceptance for one number of drafted tokens; give "
            "decoding.num_speculative_tokens a number"
        )
    try:
        process = acceptance_of(settings, command.scenario.find)
        if process.width(k) != k + 1:
            raise RooftraceError(
                "--forced-acceptance: servers are told the acceptance of a chain of drafts, not of a tree"
            )
        rates = np.minimum.accumulate(np.round(process.per_position(k), 6))
    except (TypeError, ValueError) as error:
        raise RooftraceError(f"--forced-acceptance: {error}") from None
    return tuple(rates.tolist())


def mean_length(rates: tuple[float, ...]) -> float:
    """Tokens of a step, the target's own counted."""
    return round(1.0 + sum(rates), 6)


def put_mean_length(reading: Reading, length: float, k: int | None) -> None:
    """A forced mean length as acceptance: every step has the whole numbers around it, as the engines draw them."""
    if k is None or not 1.0 <= length <= k + 1:
        raise RooftraceError(
            f"a forced acceptance length lies between 1 and one more than the drafted tokens ({k}); got {length:g}"
        )
    whole = math.floor(length - 1.0)
    rates = [1.0] * whole + [round(length - 1.0 - whole, 6)] + [0.0] * k
    put_rates(reading, rates[:k])


def put_rates(reading: Reading, rates: list[float]) -> None:
    reading.assumed.pop("decoding.acceptance", None)
    reading.put("decoding.acceptance.per_position", rates)
    reading.put("decoding.acceptance.kind", "unconditional")
    reading.notes.append("the command forces acceptance: it is that of decoding.acceptance")
