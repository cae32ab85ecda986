"""Settings of machines in time: `autoscale` and `failures`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sim.engine.spec.lifecycle import Outage
from sim.scenario.chosen import Control
from sim.scenario.section import Section

_Time = Annotated[float, Field(ge=0)]
_Mean = Annotated[float, Field(gt=0)]


class Autoscale(Section):
    """The number of machines, by a policy that is asked after each interval. `replicas` are those of the beginning."""

    policy: Control
    min: Annotated[int, Field(ge=0)] = 1
    """Never fewer machines; a policy that asks for fewer gets these, and the summary counts how often."""
    max: Annotated[int, Field(ge=1, le=100_000)]
    """Never more."""
    interval_s: _Mean | None = None
    """Where it is left out, 2 for knative, 60 for forecasts and 15 for others."""
    start: Annotated[str, Field(min_length=1)] | dict[str, _Time] | None = None
    """The phases that a machine goes through until it is ready: in order, with their seconds ({image: 2, weights: 130}), or
    the name of a measured start (qwen3-32b-h100-cold, qwen3-32b-h100-restore); where it is left out, it is ready at once, which a
    note says."""
    provision_s: _Time = 0.0
    """Getting the machine, a phase before those."""
    down_window_s: _Time | None = None
    """Machines go when fewer were asked for throughout so long; where it is left out, 300 for target_tracking and concurrency, and
    0 for others. Without either window these two have no `behavior`: the most that was asked for within 300 s counts, both ways."""
    up_window_s: _Time | None = None
    """Machines come when more were asked for throughout so long; where it is left out, at once."""
    drain_s: _Time | None = None
    """A machine that is to go ends what it has; what it still has after so long is treated as when a machine fails. Where it is
    left out, it ends all of it."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max is at least min; got {self.max} and {self.min}")
        return self


class SlowMachine(Section):
    """A machine whose iterations take longer than those of its like."""

    machine: Annotated[int, Field(ge=0)]
    factor: float
    """Times as long, at least 1: 2 halves its speed."""

    @model_validator(mode="after")
    def _is_slow(self) -> Self:
        if not self.factor >= 1:
            raise ValueError(
                f"factor is how many times as long its iterations take, at least 1, and a machine at half its speed has 2; "
                f"got {self.factor:g}"
            )
        return self


class Failures(Section):
    """Which machines fail when, and what becomes of their requests."""

    mean_up_s: _Mean | None = None
    """Mean time from when a machine is ready until it fails ..."""
    mean_down_s: _Mean | None = None
    """Mean time from a failure until the machine is ready again."""
    shape: _Mean = 1.0
    """Shape of the Weibull distribution of times until machines fail; 1 is exponential. Times until they are back are
    exponential."""
    times: list[Outage] = Field(default_factory=list)
    """Failures at known times; a machine that does not serve then does not fail."""
    slow: list[SlowMachine] = Field(default_factory=list)
    in_flight: Literal["resume", "retry", "lose"] = "resume"
    """`resume`: requests go on on another machine, which computes the tokens emitted so far like a prompt, less what its prefix
    cache has; `retry`: they begin anew there, and what they had emitted is discarded; `lose`: they are lost."""
    retries: Annotated[int, Field(ge=0)] | None = 3
    """A request whose machine fails once more than so often is lost; null: never."""
    when_none: Literal["wait", "lose"] = "wait"
    """The fate of requests that come when no machine is ready."""

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.mean_up_s is None) != (self.mean_down_s is None):
            raise ValueError("mean_up_s and mean_down_s go together; give both, or times")
        return self
