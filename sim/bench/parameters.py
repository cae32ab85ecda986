"""The terms of a serving stack that are fitted to a deployment's runs: few terms, each with a prior from what is known of stacks.

A parameter is held as the logarithm of how it moved: 0 is the stack's own value, and the prior is normal around 0. Times that may
be 0 move on a logarithm that is shifted by a scale (`Parameter.scale`), so that a term that the stack does not have can appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from hwmodels.kernels.parameters import bounds
from hwmodels.overheads import Overheads, ServingStack, stack_releases
from hwmodels.stacks import servers

if TYPE_CHECKING:
    from hwmodels.profiles import Profile

KV = "kv_factor"
"""The KV blocks over those that the account of memory gives; no term of `Overheads`."""
PROMPTS = "prompt_excess"
"""The term by which arithmetic of iterations with prompts differs from that of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One thing that may be fitted."""

    name: str
    """A term of `hwmodels.overheads.Overheads`, or `KV`."""
    title: str
    kind: Literal["time", "excess", "share", "factor"]
    scale: float = 0.0
    """The scale of a time: seconds up to which it moves by adding rather than by multiplying."""

    def value(self, at: float, own: float) -> float:
        """The value *at* so far from the stack's *own*, within the bounds of the term."""
        if self.kind == "time":
            found = (own + self.scale) * np.exp(at) - self.scale
        elif self.kind == "share":
            found = 1.0 - (1.0 - own) * np.exp(at)
        else:
            # An excess is over 1, a factor is the whole.
            one = 1.0 if self.kind == "excess" else 0.0
            found = (own + one) * np.exp(at) - one
        if self.name == KV:
            return float(found)
        _, low, high = bounds(Overheads)[self.name]
        return float(np.clip(found, low, high))

    def limits(self, own: float) -> tuple[float, float]:
        """The places between which `value` is within its bounds, no farther than three widths of any prior takes it."""
        if self.name == KV:
            return -1.5, 1.5
        _, low, high = bounds(Overheads)[self.name]
        if self.kind == "time":
            return float(np.log((low + self.scale) / (own + self.scale))), float(
                np.log((high + self.scale) / (own + self.scale))
            )
        if self.kind == "share":
            return float(np.log((1.0 - high) / (1.0 - own))), float(np.log((1.0 - low) / (1.0 - own)))
        return float(np.log((1.0 + low) / (1.0 + own))), float(np.log((1.0 + high) / (1.0 + own)))


PARAMETERS = (
    Parameter(name="step_s", title="host time of a step", kind="time", scale=2e-4),
    Parameter(name="sequence_s", title="host time of a sequence in a step", kind="time", scale=1e-5),
    Parameter(name="compute_excess", title="arithmetic, beyond the profile's", kind="excess"),
    Parameter(name=PROMPTS, title="arithmetic with prompts, beyond that without", kind="excess"),
    Parameter(name="bandwidth_excess", title="reading of memory, beyond the profile's", kind="excess"),
    Parameter(name="launch_overlap", title="share of kernel starts that is hidden", kind="share"),
    Parameter(name="admission_s", title="front-end delay of a request", kind="time", scale=1e-2),
    Parameter(name="admission_serial_s", title="front-end work of a request, one at a time", kind="time", scale=1e-3),
    Parameter(name=KV, title="KV blocks over what the account of memory gives", kind="factor"),
)
"""All that may be fitted. The scales are those at which `sim.validation.fit_stacks` starts."""
BY_NAME: Mapping[str, Parameter] = {each.name: each for each in PARAMETERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The width of one parameter's prior: the standard deviation of its logarithm."""

    width: float
    source: str


KV_WIDTH = 0.05
"""KV blocks of published logs against the account of memory: nearly all within a few percent (docs/validation.md)."""


def priors(profile: Profile | None) -> dict[str, Prior]:
    """Widths by name: times by how far they differ among the releases and stacks whose terms are known, efficiencies by how far off
    the kernels of *profile* are on shapes that their fits did not see."""
    releases = [stack for name in servers() for stack in stack_releases()[name].values()]
    found: dict[str, Prior] = {}
    for parameter in PARAMETERS:
        if parameter.kind in ("time", "share"):
            values = np.array([getattr(stack.overheads, parameter.name) for stack in releases])
            logs = np.log(values + parameter.scale) if parameter.kind == "time" else np.log(1.0 - values)
            width = float(logs.std(ddof=1))
            source = f"spread of the term among {len(releases)} releases of {', '.join(servers())} (hwmodels/stacks)"
            if width == 0.0:
                width, source = 1.0, "no release has the term: it may be some milliseconds or nothing"
            found[parameter.name] = Prior(width=width, source=source)
    arithmetic = ("gemm", "prefill")
    for name, families in (
        ("compute_excess", arithmetic),
        (PROMPTS, arithmetic),
        ("bandwidth_excess", ("gemm", "decode")),
    ):
        spreads = [
            kernel.provenance.spread
            for kernel in (profile.kernels if profile is not None else ())
            if kernel.family in families
        ]
        widths = [np.log((1 + s.high_pct / 100) / (1 + s.low_pct / 100)) / (2 * Z90) for s in spreads]
        found[name] = (
            Prior(
                width=float(np.median(widths)),
                source=f"90 % intervals of {' and '.join(families)} on shapes held back (profile of {profile.name})",
            )
            if profile is not None and widths
            else Prior(width=0.15, source="no profile with intervals; assumed")
        )
    found[KV] = Prior(width=KV_WIDTH, source="KV blocks of published logs against the account of memory")
    return found


Z90 = 1.6448536269514722
"""Standard deviations from the middle of a normal distribution to either end of its middle 90 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting that a replay runs with: a stack, and a factor on the KV blocks that are accounted for."""

    stack: ServingStack
    kv_factor: float = 1.0


def setting_at(base: Setting, names: Sequence[str], at: Sequence[float] | np.ndarray) -> Setting:
    """*base* with the parameters *names* moved to *at*."""
    values = {
        name: BY_NAME[name].value(float(place), own_value(base, name)) for name, place in zip(names, at, strict=True)
    }
    kv_factor = values.pop(KV, base.kv_factor)
    stack = replace(base.stack, overheads=replace(base.stack.overheads, **values)) if values else base.stack
    return Setting(stack=stack, kv_factor=kv_factor)


def own_value(base: Setting, name: str) -> float:
    """The value that the stack has without a fit: the term's seconds or share, and of `KV` the factor on blocks."""
    return base.kv_factor if name == KV else float(getattr(base.stack.overheads, name))
