"""A forecast by an ARIMA model, which statsmodels fits: an optional package."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.control.forecasts.base import Forecast, History, steps_of
from policies.control.forecasts.seasonal import DAY_S, check_season

_FEWEST: Final = 20
"""Values of a series below which no model is fitted to it."""


@dataclass(frozen=True, kw_only=True)
class Arima(Forecast):
    """ARIMA(p, d, q) of the rates, or of their differences from one season before (Box and Jenkins 1970).

    Parameters are fitted anew every *refit_s*. With too few steps, or where all are equal, the last one is repeated; with a season,
    the last one of it.
    """

    order: tuple[int, int, int] = (2, 1, 1)
    """Lags of the series, differences, and lags of the errors."""
    season_s: float | None = None
    """A season by which the series is differenced first; none where it is left out."""
    remembered_s: float = 2 * DAY_S
    """Seconds of history that it is made from."""
    refit_s: float = DAY_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("statsmodels") is None:
            raise ValueError("arima needs statsmodels: pip install statsmodels; kalman and holt_winters do not")
        if min(self.order) < 0:
            raise ValueError(f"order has three numbers of at least 0; got {self.order!r}")
        if self.season_s is not None:
            check_season(self.season_s, self.step_s)
        for name in ("remembered_s", "refit_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= self.step_s):
                raise ValueError(f"{name} is one step at least; got {getattr(self, name)!r}")

    @property
    def history_s(self) -> float:
        # What the parameters were fitted to is still remembered when they are fitted again.
        return self.remembered_s + self.refit_s

    def ahead(self, history: History, steps: int, /) -> Sequence[float]:
        season = 0 if self.season_s is None else steps_of(self.season_s, self.step_s)
        own = history.last(self.remembered_s).rates_per_s
        base = [own[-season + h % season] if len(own) >= season > 0 else own[-1] for h in range(steps)]
        refit = steps_of(self.refit_s, self.step_s)
        end = (history.first + len(history.rates_per_s)) // refit * refit
        learnt = _differences(history.until(end).last(self.remembered_s).rates_per_s, season)
        series = _differences(own, season)
        if min(len(series), len(learnt)) < _FEWEST or np.ptp(series) == 0 or np.ptp(learnt) == 0:
            return base
        # In units of its own spread, so that the search for parameters is as well posed at any rate.
        unit = float(np.std(learnt))
        parameters = _fitted(tuple((learnt / unit).tolist()), self.order)
        coming = np.asarray(_coming(tuple((series / unit).tolist()), self.order, parameters, steps)) * unit
        return (coming + np.asarray(base)).tolist() if season else coming.tolist()


def _differences(rates: Sequence[float], season: int) -> NDArray[np.float64]:
    """The rates, or with a season of some steps their differences from those one season before."""
    found = np.asarray(rates, dtype=np.float64)
    return found[season:] - found[:-season] if season else found


def _model(series: NDArray[np.float64], order: tuple[int, int, int]) -> Any:
    return importlib.import_module("statsmodels.tsa.arima.model").ARIMA(series, order=order)


@lru_cache(maxsize=32)
def _coming(
    series: tuple[float, ...], order: tuple[int, int, int], parameters: tuple[float, ...], steps: int
) -> tuple[float, ...]:
    """The next *steps* values; the same for the same arguments, as a policy is asked several times in a step."""
    # Without the covariance of the parameters, which takes as long as all the rest.
    filtered = _model(np.asarray(series), order).filter(parameters, cov_type="none")
    return tuple(np.asarray(filtered.forecast(steps), dtype=np.float64).tolist())


@lru_cache(maxsize=32)
def _fitted(series: tuple[float, ...], order: tuple[int, int, int]) -> tuple[float, ...]:
    """The parameters of the greatest likelihood; the same for the same arguments."""
    with warnings.catch_warnings():
        # Of a search that begins elsewhere than it would, or ends at its limit of steps: its best is what is used.
        warnings.simplefilter("ignore")
        found = _model(np.asarray(series), order).fit()
    return tuple(np.asarray(found.params, dtype=np.float64).tolist())
