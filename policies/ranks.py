"""The start of prompts where ranks step together, so that a prompt on one of them delays all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

from annotated_types import Ge

from policies.view import ALWAYS_NS, asked


class RankWork(NamedTuple):
    """A rank's work before a step."""

    prompts: bool
    """Its scheduler would compute some in the step: a rank without a seat or memory for one has none, however many wait."""
    decodes: bool
    running: int = 0
    """Sequences of its decode batch."""
    waiting: int = 0
    """Requests in its queue."""
    used: float = 0.0
    """Share of its KV memory that sequences hold."""
    started: int = 0
    """Prompts that its previous step computed."""


class Moment(NamedTuple):
    """The moment before a step of all ranks."""

    now_ns: int = 0
    since_prompts: int = ALWAYS_NS
    """Steps since the last one with prompts, where a scheduler counts them; ALWAYS_NS: there was none."""


START = Moment()


class Balance(Protocol):
    """A rule for the moments at which prompts of ranks may start."""

    chunks_go_on: ClassVar[bool]
    """Whether prompts that have begun go on while others wait."""
    counts_idle: ClassVar[bool]
    """Whether moments at which nothing runs count, which take no time; otherwise prompts start where nothing else runs."""

    def begin(self) -> Any:
        """The state before the first step."""
        ...

    def start(self, ranks: Sequence[RankWork], state: Any, moment: Moment, /) -> tuple[bool, Any]:
        """Whether prompts may start in the coming step, and the state after it."""
        ...


def balance_of(scheduler: object, pool_tokens: int, context_tokens: int) -> Balance | None:
    """The rule by which *scheduler*, or one that it wraps, has prompts of ranks start together, if any: by a method
    `prompt_balance` of the tokens of a rank's KV pool and of the model's context."""
    rule: Any = asked(scheduler, "prompt_balance")
    return None if rule is None else rule(pool_tokens, context_tokens)


class Waited(NamedTuple):
    """Steps that prompts have waited."""

    for_others: int = 0
    """Steps since prompts were started that not every rank had."""
    for_more: int = 0
    """Steps since every rank had some."""


@dataclass(frozen=True, kw_only=True)
class PromptBalance:
    """The moment at which prompts of ranks may start: where every rank has some, so that decodes wait for them once and not in
    turn, as TensorRT-LLM's `attention_dp_config` with `enable_balance`.

    Prompts do not wait while some rank has no decodes (1.1 to 1.3, tensorrt_llm/_torch/pyexecutor/py_executor.py,
    `_balance_adp_requests`, whose defaults these are).
    """

    timeout_iters: Annotated[int, Ge(1)] = 50
    """Steps after which they start although not every rank has one."""
    batching_wait_iters: Annotated[int, Ge(0)] = 10
    """Steps for which they wait for more where every rank has one."""

    chunks_go_on: ClassVar[bool] = False
    counts_idle: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.timeout_iters < 1:
            raise ValueError(f"timeout_iters is at least 1; got {self.timeout_iters}")
        if self.batching_wait_iters < 0:
            raise ValueError(f"batching_wait_iters is at least 0; got {self.batching_wait_iters}")

    def begin(self) -> Waited:
        return Waited()

    def start(self, ranks: Sequence[RankWork], waited: Waited, moment: Moment = START, /) -> tuple[bool, Waited]:
        """Whether prompts may start in the coming step, and what has been waited after it."""
        all_decode = all(rank.decodes for rank in ranks)
        if all(rank.prompts for rank in ranks):
            if all_decode and waited.for_more < self.batching_wait_iters:
                return False, Waited(0, waited.for_more + 1)
            return True, Waited(0, 0 if all_decode else waited.for_more)
        for_others = waited.for_others + 1
        if all_decode and for_others < self.timeout_iters:
            return False, Waited(for_others, waited.for_more)
        return True, Waited(0, waited.for_more)
