"""Rows of a measured file that one equation with one parameter set describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.kernels.fitting import Fit
from hwmodels.kernels.form import KernelForm
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement

Columns = Mapping[str, np.ndarray]
Shape = dict[str, Any]
"""Keyword arguments of a form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a measurement beside the form that prices them, for prediction and for fitting alike."""

    form: KernelForm[Any]
    sheet: Datasheet
    variants: tuple[str, ...]
    """Parameter sets that may serve, the best first; a fit fills the first."""
    rows: np.ndarray
    columns: Columns
    shape: Callable[[Columns], Shape] = dict
    """The function from the columns to what the form takes."""
    groups: tuple[str, ...]
    """Columns whose values make a shape: held back together."""
    strata: tuple[str, ...] = ()
    """Columns within whose values every other shape is held back; none: about half of all shapes is."""
    starts: tuple[Any, ...]
    fixed: tuple[str, ...] = ()
    calls: float = 1.0
    """The calls of the kernel in one row's time."""

    @property
    def family(self) -> str:
        return self.form.family

    def seconds(self, params: Any, columns: Columns) -> Any:
        return self.calls * self.form.seconds(params, self.sheet, self.shape(columns))

    def fit(self, columns: Columns, measured_s: Any, *, held_back: Any = None, max_points: int) -> Fit[Any]:
        """The form's parameters fitted to *columns*, which may pool those of several files."""
        return self.form.fit(
            self.sheet,
            columns,
            measured_s,
            start=self.starts[0],
            shape_of=self.shape,
            calls=self.calls,
            starts=self.starts[1:],
            fixed=self.fixed,
            held_back=held_back,
            max_points=max_points,
        )


def pick(m: Measurement, mask: np.ndarray, names: Mapping[str, str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows of *mask*, and their columns under new names."""
    rows = np.flatnonzero(mask)
    return rows, {new: m.columns[old][rows] for new, old in names.items()}


def every(m: Measurement) -> np.ndarray:
    """The mask of all rows."""
    return np.ones(len(m), bool)
