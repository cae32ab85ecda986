"""The state of every request, by id: columns shared by all machines of a run.

A request's progress belongs to it, never to the machine or the micro-batch that it is in.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

from policies.view import NO_TERMS, Terms, WaitingSeq
from sim.engine.batch.micro_batch import MicroBatch
from sim.engine.kv.content import ContentsIn
from sim.engine.record.columns import BUBBLES, UNFINISHED

_new: Final = tuple[object, ...].__new__
"""Builds a NamedTuple without the detour through its constructor."""


class RequestState:
    """One entry a request in each column. Columns grow together: those made by `column`, or given to `keep`."""

    adapter: array[int] | None = None
    """The LoRA adapter that each request asks for, -1: the base model; None: none asks for one."""

    def __init__(
        self, prompt: array[int], output: array[int], arrival: array[int], *, pipelined: bool = False,
        max_tokens: array[int] | None = None, contents_in: ContentsIn | None = None,
    ) -> None:  # fmt: skip
        """*pipelined*: stages may idle ahead of micro-batches. Columns that some runs have alone are given afterwards: `model`,
        `turn`, `deadline`, `priority` (0 where there is none), `session` (-1: none)."""
        self._columns: list[tuple[array[int] | bytearray, int]] = []
        self.contents_in = contents_in
        """Contents of requests in blocks of so many tokens; None: the workload names none."""
        self.prompt = self.keep(prompt)
        self.output = self.keep(output)
        self.max_tokens = output if max_tokens is None else self.keep(max_tokens)
        """Output tokens that the client allows at most."""
        self.model: array[int] | None = None
        self.turn: array[int] | None = None
        """The number of earlier requests for the same model, where there are models."""
        self.deadline: array[int] | None = None
        """ns after the arrival, -1 absent; None: none has one."""
        self.priority: array[int] | None = None
        self.session: array[int] | None = None
        self.terms: Terms = NO_TERMS
        """Classes of service."""
        self.left = self.keep(output[:])
        """Tokens still to emit; of a sequence that decodes, as of when it joined the others."""
        self.arrival = self.keep(arrival)
        self.scheduled, self.first_token, self.finish = (self.column("q", -1) for _ in range(3))
        self.token_ns = self.column("q", -1)
        """The latest token (ns) of a request that was preempted or handed back."""
        self.rounds = self.column("i")
        """Decode rounds done, where it speculates: the acceptance of the next one is drawn by their number."""
        self.recomputed = self.column("q")
        """Tokens whose KV was computed and given up."""
        self.bubbles = tuple(self.column("q") for _ in BUBBLES) if pipelined else ()
        """Idle time of stages ahead of its micro-batches, by kind."""
        self.replica, self.reason, self.preemptions = self.column("i", -1), self.column("i", -1), self.column("i")
        self.prefix_hits, self.prefix_hits_again = (
            array("q") if contents_in is None else self.column("q") for _ in range(2)
        )
        """Tokens found in the prefix cache when first admitted, and after preemptions."""
        self.tier_hits: dict[str, array[int]] = {}
        """Tokens loaded for a first admission, by kind of tier, and (`swap`) those copied back after a preemption."""
        self.load_ns, self.grammar_wait_ns = array("q"), array("q")
        """ns held for loads, during a load less the instant of its start; and ns of waiting for a grammar to be compiled. Empty
        where there are no tiers, or no grammars."""
        self.status = bytearray([UNFINISHED]) * len(prompt)
        self._columns.append((self.status, UNFINISHED))
        self.given_back: dict[int, int] = {}
        """Tokens whose KV was lost with machines that have been stopped, by request."""
        self.again: array[int] | None = None
        """Whether each request's machine has failed, where machines do."""
        self.carried: array[int] | None = None
        """Tokens that a request had emitted when it came to the router, where machines that only prefill may fail: they are
        computed, and handed over, like those of its prompt."""
        self.shortened: dict[int, int] = {}
        """Tokens that answers shortened by a scheduler lack, by request; 0 where they would have ended sooner."""
        self.encoded_images, self.image_hits, self.encode_ns = (array("i"), array("i"), array("q"))
        """Images that were encoded for a request in steps, those that were found encoded, and the time of its steps' encodings;
        empty where no images are encoded in steps."""
        self.told: Callable[[MicroBatch, int], None] | None = None
        """Called with a micro-batch and the instant when a step of the micro-batch has ended; None: not called."""

    def keep(self, values: array[int], blank: int = 0) -> array[int]:
        """A column that has an entry for each request already; *blank* is the value of a request without any progress."""
        self._columns.append((values, blank))
        return values

    def column(self, code: str, blank: int = 0) -> array[int]:
        """A new column of integers of the type *code* of `array`."""
        return self.keep(array(code, [blank]) * len(self.prompt), blank)

    def clear(self) -> None:
        """Removes all requests."""
        for values, _ in self._columns:
            del values[:]

    def add(
        self, prompt: int, output: int, max_tokens: int, arrival_ns: int, model: int = 0, priority: int = 0, session: int = -1
    ) -> None:  # fmt: skip
        """Appends a request; values for columns that the run does not have are dropped."""
        for values, blank in self._columns:
            values.append(blank)
        self.prompt[-1], self.output[-1], self.left[-1], self.arrival[-1] = prompt, output, output, arrival_ns
        if self.max_tokens is not self.output:
            self.max_tokens[-1] = max_tokens
        if self.model is not None:
            self.model[-1] = model
        if self.priority is not None:
            self.priority[-1] = priority
        if self.session is not None:
            self.session[-1] = session

    def keep_tier_hits(self, kinds: Sequence[str]) -> None:
        """Has loads from tiers of *kinds* counted."""
        if not self.tier_hits:
            self.load_ns = self.column("q")
        for kind in kinds:
            if kind not in self.tier_hits:
                self.tier_hits[kind] = self.column("q")

    def keep_images(self) -> None:
        """Has images that are encoded in steps counted."""
        if not self.encoded_images:
            self.encoded_images, self.image_hits, self.encode_ns = self.column("i"), self.column("i"), self.column("q")

    def to_hand(self, id_: int) -> int:
        """Tokens whose KV goes to the machine that decodes the request."""
        return (self.prompt[id_] or 1) + (0 if self.carried is None else self.carried[id_])

    def load_began(self, id_: int, now_ns: int) -> None:
        self.load_ns[id_] -= now_ns

    def load_ended(self, id_: int, now_ns: int) -> None:
        self.load_ns[id_] += now_ns

    def shorten(self, id_: int, tokens: int) -> bool:
        """Has a request that is not running end after *tokens* output tokens at the latest, or with the next if it has as many;
        whether it might have had more."""
        tokens = max(tokens, self.output[id_] - self.left[id_] + 1)
        lacks = max(self.output[id_] - tokens, 0)
        self.shortened[id_] = self.shortened.get(id_, 0) + lacks
        self.output[id_] -= lacks
        self.left[id_] -= lacks
        if self.max_tokens is self.output:
            return lacks > 0
        had, self.max_tokens[id_] = self.max_tokens[id_], min(self.max_tokens[id_], tokens)
        return had > tokens

    def waiting_seq(self, id_: int, *, cached_tokens: int = 0, preempted: bool = False) -> WaitingSeq:
        """The request as a waiting one, which has to compute all but *cached_tokens* whose KV exists.

        One with a token emitted and the KV of all before it has nothing to compute: it decodes from there. One with none emitted
        computes one token of its prompt at least. A request without a prompt starts from one begin-of-sequence token. ValueError
        for KV that cannot be.
        """
        emitted = self.output[id_] - self.left[id_]
        tokens = (self.prompt[id_] or 1) + emitted - cached_tokens
        if cached_tokens:
            if cached_tokens < 0 or tokens < 1:
                raise ValueError(
                    f"request {id_} has {tokens + cached_tokens} tokens, of which {cached_tokens} are said to have KV; the latest "
                    "never has"
                )
            if tokens == 1 and emitted:
                tokens = 0
        return _new(
            WaitingSeq,
            (
                id_,
                tokens,
                self.arrival[id_],
                0 if self.model is None else self.model[id_],
                -1 if self.deadline is None else self.deadline[id_],
                preempted,
                cached_tokens,
                0 if self.priority is None else self.priority[id_],
                0,
                0,
            ),
        )
