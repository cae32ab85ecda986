"""A deployment in simulated time: our own endpoint's session, sent the requests of a scenario and scraped as it goes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from sim import Scenario
from sim.observe.samples import Matching, Series, read_files
from sim.scenario.workload import workload_of
from sim.serve.pacer import Pacer
from sim.serve.session import Session
from sim.serve.setup import set_up
from workloads import Trace

BEGAN_S = 1_700_000_000
"""Unix time of the first scrape."""


class _Still(Pacer):
    """A pacer that never moves the clock: it stands where the test put it."""

    def catch_up(self) -> None: ...

    def ring(self) -> None: ...


class Deployed:
    """The scrapes of a deployment, and what it logged."""

    def __init__(self, scenario: Scenario, scrape_s: float = 15.0) -> None:
        self.scrapes: list[tuple[float, str]] = []
        self.log: list[dict[str, Any]] = []
        trace = workload_of(scenario)
        assert isinstance(trace, Trace)
        session = Session(set_up(scenario), speed=1.0, bound_s=1.0, warn=lambda _: None)
        session.pacer = _Still(session.run, 1.0, bound_s=1.0, warn=lambda _: None)
        self.session = session
        arrivals = iter(
            zip(trace.arrival_ns.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
        )
        coming = next(arrivals, None)
        step_ns = round(scrape_s * 1e9)
        exchanges = []
        for scrape in itertools.count():
            until_ns = scrape * step_ns
            while coming is not None and coming[0] <= until_ns:
                session.run.advance(max(coming[0], session.run.now_ns))
                exchanges.append(
                    session.ask(
                        prompt_tokens=coming[1], output_tokens=coming[2], max_tokens=coming[2], digests=[], model=0
                    )
                )
                coming = next(arrivals, None)
            session.run.advance(max(until_ns, session.run.now_ns))
            self.scrapes.append((BEGAN_S + scrape * scrape_s, "\n".join(session.counted.lines(session.run))))
            if coming is None and not session.open:
                break
        run = session.run
        for each in exchanges:
            self.log.append(
                {
                    "arrival_s": BEGAN_S + run.arrival_ns(each.id) * 1e-9,
                    "prompt_tokens": each.prompt_tokens,
                    "output_tokens": each.got,
                    "ttft_s": (each.first_ns - run.arrival_ns(each.id)) * 1e-9,
                    "e2el_s": (each.ended_ns - run.arrival_ns(each.id)) * 1e-9,
                    "instance": str(run.replica(each.id)),
                }
            )

    def files(self, folder: Path) -> list[Path]:
        """The scrapes as files that say their instant."""
        found = []
        for at_s, text in self.scrapes:
            path = folder / f"scrape-{at_s:.3f}.prom"
            path.write_text(text)
            found.append(path)
        return found

    def series(self, folder: Path) -> list[Series]:
        return read_files(self.files(folder), Matching(labels={}))
