"""The work between a request's arrival and the router: serial work on one request at a time, then a delay of each its own."""

from __future__ import annotations

import numpy as np

from sim.engine.record.columns import IntArray
from sim.engine.spec.experiment import Experiment


class FrontEnd:
    """One for all machines; requests are worked on in the order in which they are sent."""

    def __init__(self, experiment: Experiment) -> None:
        self._admission_s = experiment.admission_s
        self._admission_s_per_token = experiment.admission_s_per_token
        self.serial_ns = round(experiment.admission_serial_s * 1e9)
        """Serial time of one request; 0: no request waits for another."""
        self._free_ns = 0

    def _delay_ns(self, prompt_tokens: int) -> int:
        return round((self._admission_s + self._admission_s_per_token * prompt_tokens) * 1e9)

    def visible_ns(self, arrival_ns: IntArray, prompt_tokens: IntArray) -> IntArray:
        """Times at which the router sees requests that follow no answer, in order of arrival."""
        if self.serial_ns:
            place = np.arange(len(arrival_ns), dtype=np.int64) * self.serial_ns
            arrival_ns = np.maximum.accumulate(arrival_ns - place) + place + self.serial_ns
        delay_s = self._admission_s + self._admission_s_per_token * prompt_tokens
        return arrival_ns + np.rint(delay_s * 1e9).astype(np.int64)

    def seen_ns(self, sent_ns: int, prompt_tokens: int) -> int:
        """Time at which the router sees a request sent then; with serial work, sent now."""
        if self.serial_ns:
            sent_ns = self._free_ns = max(sent_ns, self._free_ns) + self.serial_ns
        return sent_ns + self._delay_ns(prompt_tokens)

    def sent_ns(self, came_ns: int, now_ns: int, prompt_tokens: int) -> int:
        """The first instant from *came_ns* to *now_ns* at which a request may be sent so that the router has not seen it by now."""
        wait_ns = self._delay_ns(prompt_tokens) + self.serial_ns
        if self.serial_ns and self._free_ns + wait_ns >= now_ns:
            # Earlier requests keep it from being seen.
            return came_ns
        return min(max(came_ns, now_ns - wait_ns), now_ns)
