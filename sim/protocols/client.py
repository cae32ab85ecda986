"""A `Protocol`: how the clients of a measurement behave, and what of their requests its figures are.

The same server shows other latencies to other clients. Clients that all start at once begin with a burst of prompts, which ends
up in a mean and not in a median; lengths that are all equal keep the clients of a burst in step for good; clients that do not
wait for their last answer let a queue grow without limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, NamedTuple
from typing import Protocol as Typed

import numpy as np

from workloads import Fixed, Poisson, Uniform, Workload, closed_loop, synthesize

Statistic = Literal["mean", "median"]
_STARTS = 0x73746172
"""Names the random stream of the instants at which ramped clients start."""


class _Requests(Typed):
    @property
    def requests(self) -> Mapping[str, Any]: ...


class Figures(NamedTuple):
    """Seconds, over the requests that a protocol counts; NaN where none of them has the quantity."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way of asking a server and of counting its answers."""

    name: str = ""
    loop: Literal["closed", "open"] = "closed"
    """closed: a client sends its next request when its last has ended; open: requests come at *rate_per_s*, whoever waits."""
    rate_per_s: float | None = None
    """open: requests a second; closed: clients that start each second. Times between are exponential. None, for a closed loop: all
    clients start at once."""
    requests_per_client: int = 10
    """Requests that are sent for the figures, for each client of the concurrency."""
    warmup_per_client: int = 0
    """Requests sent before those, which no figure counts."""
    warmup: Literal["apart", "running"] = "apart"
    """apart: the clock starts when the warm-up has been answered, on an idle server; running: the others follow without a pause."""
    drop_first: float = 0.0
    """Share of the requests, the first to be sent, that no figure counts."""
    drop_last: float = 0.0
    """The same of the last."""
    shortest_share: float = 1.0
    """Prompts and outputs have lengths spread evenly from this share of the nominal ones to all of them; 1: all are equal."""
    think_s: float = 0.0
    """Between an answer and the client's next request, on average (exponential)."""
    statistic: Statistic = "mean"
    """The figure that is reported of the requests that count."""
    source: str = ""
    """Where this is known from."""

    def __post_init__(self) -> None:
        if self.loop not in ("closed", "open"):
            raise ValueError(f"loop is closed or open; got {self.loop!r}")
        if self.warmup not in ("apart", "running"):
            raise ValueError(f"warmup is apart or running; got {self.warmup!r}")
        if self.statistic not in ("mean", "median"):
            raise ValueError(f"statistic is mean or median; got {self.statistic!r}")
        if self.loop == "open" and self.rate_per_s is None:
            raise ValueError("an open loop needs rate_per_s, the requests that come each second")
        if self.rate_per_s is not None and not (isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise ValueError(f"rate_per_s is a positive number; got {self.rate_per_s!r}")
        for name, least in (("requests_per_client", 1), ("warmup_per_client", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number of at least {least}; got {value!r}")
        if not 0 < self.shortest_share <= 1:
            raise ValueError(f"shortest_share is a share of the nominal length in (0, 1]; got {self.shortest_share!r}")
        if not (self.drop_first >= 0 and self.drop_last >= 0 and self.drop_first + self.drop_last < 1):
            raise ValueError(
                f"drop_first and drop_last are shares that leave some requests; got {self.drop_first!r} and {self.drop_last!r}"
            )
        if not (isfinite(self.think_s) and self.think_s >= 0):
            raise ValueError(f"think_s is a finite time of at least 0; got {self.think_s!r}")
        if self.think_s and self.loop == "open":
            raise ValueError("think_s is for a closed loop; in an open one nobody waits for an answer")

    def requests(self, concurrency: int) -> int:
        """Requests that a simulation of it replays: those of a warm-up apart are none of them."""
        running = self.warmup_per_client if self.warmup == "running" else 0
        return (running + self.requests_per_client) * concurrency

    def lengths(self, nominal_tokens: int) -> Fixed | Uniform:
        """How long prompts or outputs of so many nominal tokens are."""
        least = max(1, int(self.shortest_share * nominal_tokens))
        if least < nominal_tokens:
            return Uniform(min_tokens=least, max_tokens=nominal_tokens)
        return Fixed(tokens=nominal_tokens)

    def workload(self, *, prompt_tokens: int, output_tokens: int, concurrency: int, seed: int = 0) -> Workload:
        """Requests of these nominal lengths from *concurrency* clients (in an open loop: for so many times
        *requests_per_client* requests)."""
        prompt, output = self.lengths(prompt_tokens), self.lengths(output_tokens)
        n = self.requests(concurrency)
        source = f"protocol {self.name or 'without a name'}, {concurrency} clients"
        if self.loop == "open":
            assert self.rate_per_s is not None
            arrivals = Poisson(rate_per_s=self.rate_per_s)
            return synthesize(arrivals=arrivals, prompt=prompt, output=output, n_requests=n, seed=seed, source=source)
        made = closed_loop(
            n_requests=n,
            concurrency=concurrency,
            prompt=prompt,
            output=output,
            seed=seed,
            mean_think_s=self.think_s,
            source=source,
        )
        if self.rate_per_s is None:
            return made
        gaps_s = np.random.default_rng([seed, _STARTS]).standard_exponential(concurrency) / self.rate_per_s
        gaps_s[0] = 0.0
        return replace(made, start_ns=np.rint(np.cumsum(gaps_s) * 1e9).astype(np.int64))

    def counted(self, sent_ns: np.ndarray, concurrency: int) -> np.ndarray:
        """Which requests the figures are over, as a mask over *sent_ns*, when each was sent."""
        n = len(sent_ns)
        order = np.argsort(sent_ns, kind="stable")
        warm = self.warmup_per_client * concurrency if self.warmup == "running" else 0
        measured = n - warm
        first = warm + int(np.floor(self.drop_first * measured))
        last = n - int(np.floor(self.drop_last * measured))
        mask = np.zeros(n, bool)
        mask[order[first:last]] = True
        return mask

    def figures(self, columns: _Requests, concurrency: int) -> Figures:
        """The figures that the protocol reports of a run: `statistic` of TTFT, and of TPOT where there is more than one token.

        TTFT is from sending to the first token, TPOT the rest of the latency over the tokens after the first, as InferenceX's
        benchmark_serving.py and genai-perf have them. Requests that did not finish are left out.
        """
        names = ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
        sent, first, finish, output = (np.asarray(columns.requests[name], float) for name in names)
        done = self.counted(sent, concurrency) & (finish >= 0)
        several = done & (output > 1)
        of = np.mean if self.statistic == "mean" else np.median
        ttft = of((first - sent)[done]) * 1e-9 if done.any() else np.nan
        tpot = of(((finish - first) / np.maximum(output - 1, 1))[several]) * 1e-9 if several.any() else np.nan
        return Figures(float(ttft), float(tpot))
