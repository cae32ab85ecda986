"""Closed forms of queueing that the simulator is laid over.

Rates in 1/s, times in seconds. "Wait" is time before service starts; "latency" is wait plus service. A queue whose load
reaches 1 has no finite mean wait: the value is infinite there. AlpaServe = Li et al., OSDI 2023, arXiv 2302.11665.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.theory._checks import FloatArray, Values, count, finite, non_negative, plain, positive, probability


def utilisation(rate_per_s: Values, service_s: Values, servers: Values = 1) -> Any:
    """Share of time that each server is busy if it keeps up: rate * service / servers.

    Source: Little's law applied to the servers.
    """
    load = non_negative("rate_per_s", rate_per_s) * non_negative("service_s", service_s)
    return plain(load / count("servers", servers, at_least=1))


def mg1_wait_s(rate_per_s: Values, service_s: Values, service_cv: Values) -> Any:
    """Mean wait with Poisson arrivals and any service time of the given mean and coefficient of variation.

    rate * E[S^2] / (2 (1 - load)); infinite at a load of 1 or more.

    Source: Pollaczek 1930, Khinchine 1932.
    """
    rate, mean = non_negative("rate_per_s", rate_per_s), non_negative("service_s", service_s)
    second_moment = mean**2 * (1.0 + non_negative("service_cv", service_cv) ** 2)
    left = 1.0 - rate * mean
    return plain(np.where(left > 0.0, rate * second_moment / (2.0 * np.where(left > 0.0, left, 1.0)), np.inf))


def md1_wait_s(rate_per_s: Values, service_s: Values) -> Any:
    """Mean wait with Poisson arrivals and fixed service: rate D^2 / (2 (1 - rate D)).

    Source: Pollaczek-Khinchine with a coefficient of variation of 0.
    """
    return mg1_wait_s(rate_per_s, service_s, 0.0)


def mm1_wait_s(rate_per_s: Values, service_s: Values) -> Any:
    """Mean wait with Poisson arrivals and exponential service: load D / (1 - load).

    Source: Pollaczek-Khinchine with a coefficient of variation of 1.
    """
    return mg1_wait_s(rate_per_s, service_s, 1.0)


def erlang_c(load: Values, servers: int) -> Any:
    """Probability that a request waits, with Poisson arrivals, exponential service and *servers* servers.

    *load* is the utilisation of each server; 1 at a load of 1 or more.

    Source: Erlang 1917 (Kleinrock, Queueing Systems 1, equation 3.40).
    """
    rho, c = non_negative("load", load), int(count("servers", servers, at_least=1))
    offered = np.minimum(rho, 1.0) * c
    # Erlang B by its recursion, which neither overflows nor cancels.
    blocked = np.ones_like(offered)
    for n in range(1, c + 1):
        blocked = offered * blocked / (n + offered * blocked)
    left = 1.0 - np.minimum(rho, 1.0)
    return plain(np.where(rho >= 1.0, 1.0, blocked / (left + (1.0 - left) * blocked)))


def mmc_wait_s(rate_per_s: Values, service_s: Values, servers: int) -> Any:
    """Mean wait with Poisson arrivals, exponential service and *servers* servers: C D / (servers (1 - load)).

    Source: Erlang 1917 (Kleinrock, Queueing Systems 1, section 3.5).
    """
    rate, mean = non_negative("rate_per_s", rate_per_s), non_negative("service_s", service_s)
    load = rate * mean / count("servers", servers, at_least=1)
    left = np.where(load < 1.0, 1.0 - load, 1.0)
    return plain(np.where(load < 1.0, erlang_c(load, servers) * mean / (servers * left), np.inf))


def priority_wait_s(rates_per_s: Values, service_s: float, servers: int = 1, service_cv: float = 1.0) -> Any:
    """Mean wait of each class, first class first, where nobody who is served is preempted: W0 / ((1 - s_before) (1 - s_with)).

    *rates_per_s* are those of the classes, all with the same service; s_before and s_with are the load of the classes before each,
    without and with it, and W0 is what is left of a service on arrival. Infinite for a class that is not reached. With more than
    one server service is exponential (*service_cv* 1).

    Source: Cobham, "Priority assignment in waiting line problems", Operations Research 2 (1954), equations 3 and 8.
    """
    rates, mean = np.atleast_1d(non_negative("rates_per_s", rates_per_s)), float(non_negative("service_s", service_s))
    c, cv = int(count("servers", servers, at_least=1)), float(non_negative("service_cv", service_cv))
    if c > 1 and cv != 1.0:
        raise ValueError(
            f"with several servers the formula is for exponential service, service_cv 1; got {service_cv!r}"
        )
    load = np.cumsum(rates) * mean / c
    busy = float(load[-1])
    first = 0.5 * float(rates.sum()) * mean**2 * (1.0 + cv**2) if c == 1 else float(erlang_c(busy, c)) * mean / c
    before = np.concatenate(([0.0], load[:-1]))
    reached = load < 1.0
    left = np.where(reached, (1.0 - before) * (1.0 - load), 1.0)
    # Classes that are not reached keep the servers busy all the time.
    if busy >= 1.0:
        first = mean / c if c > 1 else 0.5 * mean * (1.0 + cv**2)
    return plain(np.where(reached, first / left, np.inf))


def dd1_wait_s(rate_per_s: Values, service_s: Values, n: Values) -> Any:
    """Wait of the *n*-th request (from 0) with evenly spaced arrivals and fixed service: n max(0, D - 1/rate).

    Source: Lindley recursion with constant increments.
    """
    gap = 1.0 / positive("rate_per_s", rate_per_s)
    return plain(count("n", n) * np.maximum(non_negative("service_s", service_s) - gap, 0.0))


def simple_placement_latency_s(rate_per_s: Values, service_s: Values, share: Values = 0.5) -> Any:
    """Mean latency of two models on two devices, one model on each, *share* of the requests going to the first.

    Source: AlpaServe, section 3.4 (two M/D/1 queues).
    """
    rate, mean = non_negative("rate_per_s", rate_per_s), non_negative("service_s", service_s)
    p = probability("share", share)
    first, second = md1_wait_s(p * rate, mean), md1_wait_s((1.0 - p) * rate, mean)
    # A device that gets no request has no say, even where a formula of its own would be infinite.
    return plain(mean + _weighted(p, first) + _weighted(1.0 - p, second))


def pipeline_latency_s(rate_per_s: Values, pass_s: Values, slowest_stage_s: Values) -> Any:
    """Mean latency of a pipeline: one pass through all stages plus the M/D/1 wait for the slowest stage.

    Source: AlpaServe, section 3.4.
    """
    through, slowest = non_negative("pass_s", pass_s), non_negative("slowest_stage_s", slowest_stage_s)
    if (through < slowest).any():
        raise ValueError(
            f"pass_s covers all stages, so it is at least slowest_stage_s; got {pass_s!r}, {slowest_stage_s!r}"
        )
    return plain(through + md1_wait_s(rate_per_s, slowest))


def pipeline_placement_latency_s(
    rate_per_s: Values,
    service_s: Values,
    communication: Values = 1.0,
    unevenness: Values = 1.0,
) -> Any:
    """Mean latency of two models split in two stages over the same two devices.

    *communication* multiplies the whole pass (and so each stage), *unevenness* the slower stage alone; 1 is none.

    Source: AlpaServe, section 3.4.
    """
    mean = non_negative("service_s", service_s)
    alpha, beta = _overhead("communication", communication), _overhead("unevenness", unevenness)
    if (beta > 2.0).any():
        raise ValueError(f"unevenness is slowest stage over half of the pass, in [1, 2]; got {unevenness!r}")
    return pipeline_latency_s(rate_per_s, alpha * mean, 0.5 * alpha * beta * mean)


def tolerable_communication(load: Values) -> Any:
    """Communication overhead at which the two-stage pipeline only just matches one model per device.

    *load* = total rate times service, in [0, 2); requests split evenly. Root of
    3 r a^2 - (8 + 4 h r) a + 8 h = 0 with h = (4 - r) / (4 - 2 r). It is not monotone: 1 at both ends.

    Source: AlpaServe, section 3.4 (maximal alpha).
    """
    r = _two_device_load(load)
    h = (4.0 - r) / (4.0 - 2.0 * r)
    middle = 8.0 + 4.0 * h * r
    # The smaller root in the form that does not cancel as r -> 0.
    return plain(16.0 * h / (middle + np.sqrt(middle**2 - 96.0 * h * r)))


def tolerable_unevenness(load: Values) -> Any:
    """Uneven split at which the two-stage pipeline only just matches one model per device.

    (sqrt(r^2 - 4 r + 8) - r) / (2 - r) for load r in [0, 2): sqrt(2) at r = 0, falling to 1.

    Source: AlpaServe, section 3.4 (maximal beta).
    """
    r = _two_device_load(load)
    # Multiplied through by sqrt(...) + r, which removes the 0/0 at r = 2.
    return plain(4.0 / (np.sqrt(r**2 - 4.0 * r + 8.0) + r))


def _weighted(share: FloatArray, wait: Any) -> FloatArray:
    return np.where(share > 0.0, np.where(share > 0.0, share, 1.0) * wait, 0.0)


def _overhead(name: str, value: Values) -> FloatArray:
    factor = finite(name, value)
    if (factor < 1.0).any():
        raise ValueError(f"{name} is a factor of 1 or more (1: no overhead); got {value!r}")
    return factor


def _two_device_load(load: Values) -> FloatArray:
    r = non_negative("load", load)
    if (r >= 2.0).any():
        raise ValueError(f"load is rate times service over two devices, below 2; got {load!r}")
    return r
