"""A kernel's equation as one object: fits, prices, validation and pictures take the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hwmodels.kernels.fitting import Columns, Fit, fit
from hwmodels.kernels.parameters import Datasheet

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class KernelForm(Generic[P]):
    """The seconds of one kernel as a function of parameters, a datasheet and a shape."""

    family: str
    """The name that profiles have for its parameter sets."""
    parameters: type[P]
    equation: Callable[..., Any]
    """(parameters, datasheet, **shape) -> seconds; says what a shape consists of."""
    source: str
    """Where the equation comes from."""

    def seconds(self, params: P, sheet: Datasheet, shape: Mapping[str, Any]) -> Any:
        """Seconds of *shape*: numbers or columns of them."""
        return self.equation(params, sheet, **shape)

    def fit(
        self,
        sheet: Datasheet,
        columns: Columns,
        measured_s: Any,
        *,
        start: P,
        shape_of: Callable[[Columns], Mapping[str, Any]] = dict,
        calls: float = 1.0,
        starts: Sequence[P] = (),
        fixed: Sequence[str] = (),
        held_back: Any = None,
        max_points: int = 1500,
    ) -> Fit[P]:
        """Parameters that make `calls` times the seconds of `shape_of(columns)` meet *measured_s*; see `fitting.fit`."""
        return fit(
            lambda params, some: calls * self.seconds(params, sheet, shape_of(some)),
            start,
            columns,
            measured_s,
            held_back=held_back,
            fixed=fixed,
            starts=starts,
            max_points=max_points,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedForm(KernelForm[P]):
    """A form that is priced once an iteration, so that what does not change between iterations is folded beforehand."""

    folded: Callable[..., Any]
    """(parameters, datasheet where it needs one, **what does not change) -> the equation, over an iteration's sums."""
