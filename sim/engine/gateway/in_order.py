"""Machines in order of their loads, so that a router that takes the least loaded one need not look at each for every request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from policies.routers import ReplicaLoad
from sim.engine.machine.machine import Machine


class InOrder:
    """Keeps *machines*, which have the numbers 0, 1, 2, ..., in order of *load*, which changes in their turns and when they get a
    request."""

    __slots__ = ("_heap", "_load", "_loads", "_machines", "_moved")

    def __init__(self, load: Callable[[ReplicaLoad], Any], machines: Sequence[Machine]) -> None:
        self._load = load
        self._machines = machines
        self._moved: set[int] = set()
        """Machines that have had a turn or a request since their loads were read."""
        self._loads = [load(machine) for machine in machines]
        self._heap = [(read, index) for index, read in enumerate(self._loads)]
        """Loads that were read; an entry whose machine has another one by now is dropped when it comes first."""
        heapify(self._heap)
        for machine in machines:
            machine.turns.tell(self._moved, machine.index)

    def first(self) -> int:
        """The machine with the least load, the lowest number among equals: it is about to get a request."""
        heap, loads, load, machines = self._heap, self._loads, self._load, self._machines
        for index in self._moved:
            now = load(machines[index])
            if now != loads[index]:
                loads[index] = now
                heappush(heap, (now, index))
        self._moved.clear()
        if len(heap) > 4 * len(loads):
            heap[:] = [(read, index) for index, read in enumerate(loads)]
            heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:
            heappop(heap)
        index = heap[0][1]
        self._moved.add(index)
        return index
