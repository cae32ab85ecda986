"""KV blocks that schedulers without preemption reserve: for each admitted request the most that it may hold."""

from __future__ import annotations

from sim.engine.kv.pool import KvPool
from sim.engine.requests.state import RequestState


class Reservations:
    """The sum, where a scheduler `reserves`; see `policies.view.ReplicaView.promised_blocks`.

    A block that several hold counts for each.
    """

    __slots__ = ("_beyond", "_kv", "_limit", "_made", "_state", "blocks", "one_token")

    def __init__(self, kept: bool, kv: KvPool, state: RequestState, limit: int | None, drafted: int) -> None:
        """*limit*: tokens of prompt and output that the model takes; *drafted*: those that the last round may verify."""
        self.one_token = False
        """Whether prompts are only computed here, and decoded elsewhere."""
        self.blocks = 0 if kept else -1
        """-1: no blocks are counted."""
        self._made: dict[int, int] = {}
        """Blocks by admitted request, whose limit of tokens may become less meanwhile."""
        self._kv = kv
        self._state = state
        self._limit = limit
        # The last token is never cached, so that the first drafted one takes no slot of its own.
        self._beyond = max(drafted - 1, 0)

    def _of(self, id_: int) -> int:
        state = self._state
        longest = state.to_hand(id_) + 1 if self.one_token else (state.prompt[id_] or 1) + state.max_tokens[id_]
        if self._limit is not None:
            longest = min(longest, self._limit)
        return min(self._kv.blocks(longest + self._beyond), self._kv.total)

    def counted(self, id_: int) -> int:
        """Blocks that are, or would be, reserved for a request; 0 without counts."""
        if self.blocks < 0:
            return 0
        made = self._made.get(id_)
        return self._of(id_) if made is None else made

    def has_room_for(self, id_: int) -> bool:
        """Whether one more's blocks can be reserved beside others."""
        return self.blocks < 0 or self.blocks + self._of(id_) <= self._kv.total

    def make(self, id_: int) -> None:
        """A request is admitted."""
        if self.blocks >= 0:
            self._made[id_] = self._of(id_)
            self.blocks += self._made[id_]

    def end(self, id_: int) -> int:
        """Ends and returns a request's reservation."""
        if self.blocks < 0:
            return 0
        blocks = self._made.pop(id_)
        self.blocks -= blocks
        return blocks

    def reset(self) -> None:
        """Ends all reservations."""
        self._made.clear()
        self.blocks = min(self.blocks, 0)
