"""Control policies, which decide how many machines there should be: frozen dataclasses with one pure method."""

from policies.control.concurrency import Concurrency, Knative
from policies.control.rates import RateModel
from policies.control.schedule import Perfect, Schedule
from policies.control.seen import Control, PoolSeen, Seen, remembers_s, stabilised
from policies.control.tracking import TargetTracking

__all__ = [
    "Concurrency",
    "Control",
    "Knative",
    "Perfect",
    "PoolSeen",
    "RateModel",
    "Schedule",
    "Seen",
    "TargetTracking",
    "remembers_s",
    "stabilised",
]
