"""Grammars of an engine core's requests: compiled on its machine by a few threads, kept, and waited for."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush

from sim.engine.batch.grammars import GrammarSpec


class Grammars:
    """Compiled grammars, and the requests that wait for one."""

    def __init__(self, spec: GrammarSpec, wait_ns: array[int]) -> None:
        """*wait_ns*: for how long each request has waited for its grammar, added up."""
        self.goes_first = spec.goes_first
        self.waiting: dict[int, tuple[int, int, int]] = {}
        """Requests whose grammars are being compiled: when each is done and came (ns), and tokens whose KV is at hand."""
        self.compiled: deque[tuple[int, int, int]] = deque()
        """Requests whose grammars are done and that no plan has known of yet: the instant, the request and its tokens with KV."""
        self.first: set[int] = set()
        """Requests that have been put ahead of those that wait for nothing else."""
        self.rings_at: Callable[[int, int], None] | None = None
        """Called with a request and the instant (ns) at which its grammar is done."""
        self._spec = spec
        self._wait_ns = wait_ns
        self._done_ns: OrderedDict[int, int] = OrderedDict()
        """When each kept grammar is compiled, the one used longest ago first."""
        self._free_ns: list[int] = []
        """When the threads that have worked are free, as a heap."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.compiled)

    def ids(self) -> list[int]:
        """Requests that are not in the queue yet."""
        return [*self.waiting, *[id_ for _, id_, _ in self.compiled]]

    def holds(self, id_: int, kv_tokens: int, now_ns: int) -> bool:
        """Whether a request that comes now waits for its grammar."""
        done_ns = self._compiled_ns(self._spec.grammar[id_], now_ns)
        if done_ns <= now_ns:
            return False
        self.waiting[id_] = done_ns, now_ns, kv_tokens
        assert self.rings_at is not None
        self.rings_at(id_, done_ns)
        return True

    def _compiled_ns(self, grammar: int, now_ns: int) -> int:
        """When a grammar is compiled that is asked for now; -1 for none."""
        if grammar < 0:
            return -1
        done_ns = self._done_ns.get(grammar)
        if done_ns is None:
            begin_ns = now_ns
            if len(self._free_ns) == self._spec.threads:
                begin_ns = max(heappop(self._free_ns), now_ns)
            done_ns = self._done_ns[grammar] = begin_ns + round(self._spec.compile_s[grammar] * 1e9)
            heappush(self._free_ns, done_ns)
            if len(self._done_ns) > self._spec.kept:
                self._done_ns.popitem(last=False)
        self._done_ns.move_to_end(grammar)
        return done_ns

    def done(self, id_: int, now_ns: int) -> int:
        """Tokens with KV of a request that waits for the grammar that is done now; -1: it does not wait any more."""
        done_ns, came_ns, kv_tokens = self.waiting.get(id_, (-1, 0, 0))
        if done_ns != now_ns:
            return -1
        del self.waiting[id_]
        self._wait_ns[id_] += now_ns - came_ns
        return kv_tokens

    def give_up(self, id_: int) -> bool:
        """A request leaves; False where it does not wait here."""
        for each in self.compiled:
            if each[1] == id_:
                self.compiled.remove(each)
                return True
        return self.waiting.pop(id_, None) is not None

    def reset(self) -> None:
        """The machine stops: what was compiled is gone."""
        self.waiting.clear()
        self.compiled.clear()
        self.first.clear()
        self._done_ns.clear()
        self._free_ns.clear()
