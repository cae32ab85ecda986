"""A served session: requests in flight, who waits for their tokens, and what is left when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from sim.engine import LiveRun
from sim.errors import ScenarioError
from sim.extrapolated import beyond_measured
from sim.results import Result
from sim.run import completed
from sim.scenario.assembly import resolve
from sim.scenario.settings import Scenario
from sim.serve.counted import Counted
from sim.serve.exchange import Exchange
from sim.serve.pacer import Pacer
from sim.serve.setup import Setup
from workloads.write import write_whole

_MOST_PENDING = 4096
"""Steps of a stream that wait to be written; beyond them they are written as one."""
_TRIAL_TOKENS = 40
_TRIAL_NS = 600_000_000_000
"""Simulated time that a trial before the session takes at most."""


class Session:
    """The engine behind an endpoint, and its clock."""

    def __init__(self, setup: Setup, *, speed: float, bound_s: float, warn: Callable[[str], None]) -> None:
        self.setup = setup
        try:
            self.run = LiveRun(setup.experiment, self)
        except ValueError as error:
            raise ScenarioError(f"{setup.scenario.source}: {error}") from None
        self.pacer = Pacer(self.run, speed, bound_s=bound_s, warn=warn)
        self.counted = Counted(setup.models)
        self.open: dict[int, Exchange] = {}
        self.began_s = time.time()
        self._names: dict[str, int] = {}
        self._stream = setup.experiment.stream

    def warm_up(self) -> int:
        """Have a run of its own serve a few requests to their end, and say how many it finished: what is worked out only once is
        worked out before anybody waits for it."""
        trial = LiveRun(self.setup.experiment, _Nobody())
        for model, limit in enumerate(self.setup.limits):
            for prompt in (1, 40, 700, 3000):
                if limit is None or prompt + _TRIAL_TOKENS <= limit:
                    trial.send(
                        prompt_tokens=prompt, output_tokens=_TRIAL_TOKENS, max_tokens=_TRIAL_TOKENS, digests=[], model=model
                    )  # fmt: skip
        trial.advance(_TRIAL_NS)
        return sum(trial.finish_ns(id_) >= 0 for id_ in range(len(trial)))

    # What clients ask for.

    def session_number(self, name: str | None) -> int:
        """The conversation that goes by *name*; -1 without one."""
        return -1 if name is None else self._names.setdefault(name, len(self._names))

    def drawn(self) -> int:
        """Output tokens of the next request by the scenario's workload: its rows in turn."""
        lengths = self.setup.lengths
        return int(lengths[len(self.run) % len(lengths)])

    def ask(
        self, *, prompt_tokens: int, output_tokens: int, max_tokens: int, digests: Sequence[int], model: int,
        priority: int = 0, session: str | None = None, received_ns: int | None = None,
    ) -> Exchange:  # fmt: skip
        """A request comes now, or came at *received_ns* of `time.perf_counter_ns`: since then its tokens were counted."""
        self.pacer.catch_up()
        exchange = Exchange(model, prompt_tokens, output_tokens, "length" if output_tokens == max_tokens else "stop")
        exchange.id = self.run.send(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, max_tokens=max_tokens, digests=digests, model=model,
            priority=priority, session=self.session_number(session),
            came_ns=None if received_ns is None else self.pacer.instant_ns(received_ns),
        )  # fmt: skip
        self.open[exchange.id] = exchange
        self.counted.came(model, max_tokens)
        self.pacer.ring()
        return exchange

    def give_up(self, exchange: Exchange) -> None:
        """Its client has gone."""
        if exchange.id in self.open:
            del self.open[exchange.id]
            self.pacer.catch_up()
            self.run.give_up(exchange.id)
            self.counted.ended(self.run, exchange, "abort")
            self.pacer.ring()

    # What the engine tells.

    def emitted(self, id_: int, tokens: int, now_ns: int) -> None:
        exchange = self.open.get(id_)
        if exchange is not None:
            self._got(exchange, tokens, now_ns, last=False)

    def ended(self, id_: int, now_ns: int) -> None:
        exchange = self.open.pop(id_, None)
        if exchange is None:
            return
        exchange.output_tokens = self.run.output_tokens(id_)
        self._got(exchange, exchange.output_tokens - exchange.got, now_ns, last=True)
        exchange.ended_ns = now_ns
        self.counted.ended(self.run, exchange, exchange.finish)
        exchange.wake()

    def begins_anew(self, id_: int, now_ns: int) -> None:
        exchange = self.open.get(id_)
        if exchange is not None:
            exchange.begin_anew()

    def refused(self, id_: int, reason: str, now_ns: int) -> None:
        exchange = self.open.pop(id_, None)
        if exchange is not None:
            exchange.reason = reason
            self.counted.ended(self.run, exchange, "error")
            exchange.wake()

    def _got(self, exchange: Exchange, tokens: int, now_ns: int, *, last: bool) -> None:
        self.counted.got(self.run, exchange, tokens, now_ns)
        if exchange.first_ns < 0:
            exchange.first_ns = now_ns
            self.counted.first(self.run, exchange)
        exchange.latest_ns = now_ns
        exchange.got += tokens
        # Of what is emitted again nothing is written again.
        new = min(tokens, exchange.got - exchange.shown)
        if new <= 0 and not last:
            return
        opens = not exchange.shown
        exchange.shown += new
        exchange.grouped += new
        exchange.turn += 1
        n, pending = self._stream.interval, exchange.pending
        whole = exchange.turn % n == 0 if self._stream.rule == "iterations" else exchange.grouped >= n
        if not (last or whole or opens):
            return
        if len(pending) < _MOST_PENDING:
            pending.append((exchange.grouped, now_ns))
        else:
            pending[-1] = (pending[-1][0] + exchange.grouped, now_ns)
        exchange.grouped = 0
        if not last:
            exchange.wake()

    # The end.

    def times(self, exchange: Exchange) -> dict[str, str]:
        """Simulated times of an exchange, as headers."""
        run, id_ = self.run, exchange.id
        came = run.arrival_ns(id_)
        found = {"Request": str(id_), "Speed": f"{self.pacer.speed:g}", "Arrival-Seconds": _seconds(came)}
        if exchange.first_ns >= 0:
            found["Ttft-Seconds"] = _seconds(exchange.first_ns - came)
        if run.scheduled_ns(id_) >= 0:
            found["Queue-Seconds"] = _seconds(run.scheduled_ns(id_) - came)
        if exchange.ended_ns >= 0:
            found["E2el-Seconds"] = _seconds(exchange.ended_ns - came)
            if exchange.got > 1:
                found["Tpot-Seconds"] = _seconds(round((exchange.ended_ns - exchange.first_ns) / (exchange.got - 1)))
        return {f"X-Rooftrace-{name}": value for name, value in found.items()}

    def close(self, why: str) -> None:
        """Nobody gets more tokens: *why* is what clients are told."""
        for exchange in list(self.open.values()):
            self.give_up(exchange)
            exchange.reason = why
            exchange.wake()

    def write(self, folder: Path, *, facts: dict[str, Any]) -> Result:
        """Write the results of all that came into an existing *folder*, and return them. At least one request has come."""
        setup = self.setup
        columns = completed(setup.experiment, self.run.stop(), setup.built.manifest)
        columns.meta["wall_s"] = time.time() - self.began_s
        manifest = dict(setup.built.manifest)
        manifest["workload"] = {"source": "requests that clients sent to rooftrace serve", "requests": len(self.run)}
        handed, lag = self.pacer.handed, self.pacer.lag
        manifest["served"] = {
            "speed": self.pacer.speed,
            **facts,
            "lag_bound_s": self.pacer.bound_s,
            "pacer_lag_s": _lag_facts(lag),
            "handed_over_lag_s": _lag_facts(handed),
        }
        self.run.trace().to_csv(folder / "arrivals.csv")
        write_whole(folder / "replay.yaml", _replay(setup))
        beyond = beyond_measured(setup.experiment, columns)
        manifest["notes"] = [*manifest["notes"], *beyond, *_otherwise(setup, folder / "replay.yaml")]
        result = Result(columns, manifest=manifest, slo=setup.built.slo).or_whole().kept()
        result.write(folder)
        return result


class _Nobody:
    """Listens to nothing."""

    def emitted(self, id_: int, tokens: int, now_ns: int) -> None: ...

    def ended(self, id_: int, now_ns: int) -> None: ...

    def begins_anew(self, id_: int, now_ns: int) -> None: ...

    def refused(self, id_: int, reason: str, now_ns: int) -> None: ...


def _otherwise(setup: Setup, replay: Path) -> list[str]:
    """A note where the scenario at *replay* is not the deployment that was served, for the lengths that it is planned for."""
    served, again = setup.experiment, resolve(Scenario.load(replay)).experiment
    names = [each.name for each in fields(served) if each.name != "workload"]
    other = [name for name in names if repr(getattr(served, name)) != repr(getattr(again, name))]
    if not other:
        return []
    return [
        f"replay.yaml plans for the requests that came, where the session planned for those of its scenario, and differs in "
        f"{', '.join(other)}: its times are not those of the session."
    ]


def _replay(setup: Setup) -> str:
    """The scenario with the requests that came, to lie beside them; files that it names are found from anywhere, and what was
    chosen by the lengths that were planned for stays as it is."""
    scenario = setup.scenario.with_set(*(f"{key}={tokens}" for key, tokens in setup.chosen.items()))
    settings = {**scenario.settings_from_anywhere(), "workload": {"trace": "arrivals.csv"}}
    return Scenario.from_mapping(settings, source=scenario.source).to_yaml()


def _seconds(ns: int) -> str:
    return f"{ns * 1e-9:.9f}"


def _lag_facts(lag: Any) -> dict[str, Any]:
    histogram = lag.histogram
    n = histogram.n
    bound = {name: histogram.quantile_s(share) for name, share in (("p50_at_most", 0.5), ("p99_at_most", 0.99))}
    return {
        "n": n,
        "mean": histogram.total / n if n else None,
        **{name: None if not n or np.isinf(value) else value for name, value in bound.items()},
        "max": lag.worst_s,
        "beyond_the_bound": lag.late,
    }
