"""Control policies that ask for the machines of a forecast of the load: a class for each way to forecast."""

from policies.control.forecasts.arima import Arima
from policies.control.forecasts.base import Forecast, History, LastValue, Outlook
from policies.control.forecasts.kalman import Kalman
from policies.control.forecasts.seasonal import HoltWinters, SeasonalNaive

__all__ = ["Arima", "Forecast", "History", "HoltWinters", "Kalman", "LastValue", "Outlook", "SeasonalNaive"]
