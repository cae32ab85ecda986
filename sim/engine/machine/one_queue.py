"""One queue of all ranks: requests wait there while every seat of the ranks is taken, and are spread when some are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from policies.routers import SpreadFunction
from sim.engine.machine.loads import CoreLoad


class OneQueue:
    """The requests for a model that none of its ranks has a seat for."""

    def __init__(
        self, spread: SpreadFunction, loads: Sequence[CoreLoad], seats: int, put: Callable[[CoreLoad, int, int], None]
    ) -> None:
        """*seats*: of each rank; *put* hands a request to a rank, with the KV of so many tokens."""
        self._spread = spread
        self._loads = loads
        self._seats = seats * len(loads)
        self._put = put
        self.waiting: deque[tuple[int, int, int]] = deque()
        """(request, tokens of its prompt, tokens whose KV it has)."""

    @property
    def _free(self) -> int:
        return self._seats - sum([load.waiting + load.running for load in self._loads])

    @property
    def holds(self) -> bool:
        """Whether a request that comes now waits here."""
        return bool(self.waiting) or self._free <= 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that wait here."""
        return sum(prompt for _, prompt, _ in self.waiting)

    def give_out(self) -> None:
        """Spread as many as there are seats free."""
        if not self.waiting:
            return
        taken = [self.waiting.popleft() for _ in range(min(self._free, len(self.waiting)))]
        for at, rank in self._spread([prompt for _, prompt, _ in taken], self._loads):
            id_, _, kv_tokens = taken[at]
            self._put(self._loads[rank], id_, kv_tokens)

    def take_out(self, id_: int) -> bool:
        """A request leaves the queue; False where it is not in it."""
        entry = next((each for each in self.waiting if each[0] == id_), None)
        if entry is not None:
            self.waiting.remove(entry)
        return entry is not None
