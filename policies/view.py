"""What a scheduler sees and what it answers: plain values, so that a policy can be tested with literals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

UNTIL_CHANGE = 1 << 40
"""`Plan.hold` of a policy that would answer the same until a sequence finishes, joins or memory runs short."""


class WaitingSeq(NamedTuple):
    """A request in the queue. *tokens* still have to be computed: the prompt, and after a preemption what was emitted."""

    id: int
    tokens: int
    arrival_ns: int = 0
    model: int = 0
    deadline_ns: int = -1
    preempted: bool = False


class PartialSeq(NamedTuple):
    """An admitted sequence whose prompt is computed in part."""

    id: int
    cached_tokens: int
    remaining_tokens: int


class RunningSeq(NamedTuple):
    """An admitted sequence, prefilling or decoding. *growth_blocks*: KV blocks its next decode step would add."""

    id: int
    cached_tokens: int
    blocks: int
    growth_blocks: int = 0
    arrival_ns: int = 0


class ReplicaView(NamedTuple):
    """A replica at the moment it may start an iteration. Read-only; sequences in flight elsewhere are left out."""

    waiting: Sequence[WaitingSeq] = ()
    """The queue, first to be served first."""
    prefilling: Sequence[PartialSeq] = ()
    """Admitted, prompt not complete, in order of admission."""
    n_decoding: int = 0
    """Sequences ready for a decode step."""
    query_tokens: int = 1
    """Tokens that each decode submits: 1, or K + 1 when it verifies K drafted tokens."""
    free_blocks: int = 0
    growth_blocks: int = 0
    """New KV blocks that the decodes need for one step."""
    block_tokens: int = 16
    total_blocks: int = 0
    now_ns: int = 0
    running: Sequence[RunningSeq] = ()
    """Prefilling and decoding sequences, oldest admission first; built when looked at."""
    cached: dict[int, int] | None = None
    """Prompt tokens found in the prefix cache by request id; None: no prefix caching."""
    after_prefill: bool = False
    """Whether the iteration before this one computed prompt tokens."""

    @property
    def n_running(self) -> int:
        return self.n_decoding + len(self.prefilling)

    @property
    def decode_tokens(self) -> int:
        """Tokens of budget that one step of all decodes takes."""
        return self.n_decoding * self.query_tokens

    def blocks(self, tokens: int) -> int:
        """KV blocks that *tokens* tokens occupy."""
        return -(-tokens // self.block_tokens)


class Plan(NamedTuple):
    """Who runs in the next iteration, and for how many tokens."""

    decode: bool | tuple[int, ...] = False
    """True: every decoding sequence takes a step; or the ids of those that do."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(id, prompt tokens to compute); the id is of a prefilling sequence or, to admit it, of a waiting one.

    Admission takes KV blocks for all of the request's tokens at once."""
    preempt: tuple[int, ...] = ()
    """Ids whose KV blocks are given back first; they return to the head of the queue and are recomputed."""
    hold: int = 1
    """For how many iterations the same answer holds if no sequence finishes and no request arrives. Only plans of decodes
    alone are held; an iteration with chunks is always followed by another look."""
    through_arrivals: bool = False
    """True: an arrival behind the present queue would not change the answer either."""
    pad_tokens: int = 0
    """Shorter chunks, and the contexts of decodes, take as long as if they had this many tokens; 0: no padding."""
    pad_sequences: int = 0
    """With *pad_tokens*: the decode step takes as long as one of this many sequences, if there are fewer."""


class Scheduler(Protocol):
    """Decides, from a view alone, what the next iteration runs. Implementations are frozen dataclasses."""

    def plan(self, view: ReplicaView, /) -> Plan: ...
