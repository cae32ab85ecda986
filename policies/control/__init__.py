"""Control policies, which decide how many machines there should be: frozen dataclasses with one pure method."""

from policies.control.concurrency import Concurrency, Knative
from policies.control.forecasts import Arima, Forecast, History, HoltWinters, Kalman, LastValue, Outlook, SeasonalNaive
from policies.control.hpa import Hpa, highest, most_at_once
from policies.control.rates import RateModel
from policies.control.schedule import Perfect, Schedule
from policies.control.seen import Control, PoolSeen, Seen, remembers_s, stabilised, wanted_of
from policies.control.tracking import TargetTracking

__all__ = [
    "Arima",
    "Concurrency",
    "Control",
    "Forecast",
    "History",
    "HoltWinters",
    "Hpa",
    "Kalman",
    "Knative",
    "LastValue",
    "Outlook",
    "Perfect",
    "PoolSeen",
    "RateModel",
    "Schedule",
    "SeasonalNaive",
    "Seen",
    "TargetTracking",
    "highest",
    "most_at_once",
    "remembers_s",
    "stabilised",
    "wanted_of",
]
