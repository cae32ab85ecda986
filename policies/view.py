"""The input and the output of a scheduler: plain values, so that a policy can be tested with literals.

A sequence is a pair: tokens to compute, and tokens whose KV exists. A fresh request is (prompt, 0); one with KV, because another
machine computed it or because it was kept, is (rest, n). (0, n) has emitted tokens, the KV of all but the latest of them exists,
and there is nothing to compute before it decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, cast

UNTIL_CHANGE: Final = 1 << 40
"""`Plan.hold` of a policy that would answer the same until a sequence finishes, joins or memory runs short."""

ALWAYS_NS: Final = (1 << 62) - 1
"""`Plan.until_ns` of a policy whose answer does not depend on the time. It is the largest number that the compiled build keeps
unboxed."""

BASE_MODEL: Final = -1
"""The base model's number among LoRA adapters."""


class WaitingSeq(NamedTuple):
    """A request in the queue. *tokens* still have to be computed: the prompt, and after a preemption what was emitted."""

    id: int
    tokens: int
    arrival_ns: int = 0
    model: int = 0
    deadline_ns: int = -1
    """Time from arrival; -1: none."""
    preempted: bool = False
    cached_tokens: int = 0
    """Tokens whose KV exists and takes room here when the sequence is admitted."""
    priority: int = 0
    """Smaller goes first, as in vLLM."""
    shared_blocks: int = 0
    """KV blocks of its cached tokens that other sequences hold already: admitting it takes none for them."""
    kept_blocks: int = 0
    """KV blocks that are kept for it here with the KV of its cached tokens: they are not among the free ones, and admitting it
    takes none for them. Such sequences stand ahead of all others in the queue."""


class PartialSeq(NamedTuple):
    """An admitted sequence whose prompt is computed in part."""

    id: int
    cached_tokens: int
    remaining_tokens: int
    arrival_ns: int = 0
    model: int = 0
    deadline_ns: int = -1
    priority: int = 0


class RunningSeq(NamedTuple):
    """An admitted sequence, prefilling or decoding. *growth_blocks*: KV blocks its next decode step would add."""

    id: int
    cached_tokens: int
    blocks: int
    growth_blocks: int = 0
    arrival_ns: int = 0
    model: int = 0
    deadline_ns: int = -1
    priority: int = 0
    leaving: bool = False
    """It takes no step any more; see `ReplicaView.n_leaving`."""
    shared_blocks: int = 0
    """Blocks of these that other sequences hold as well: they do not become free with it."""


class ById(Protocol):
    """A number for each request, by id. In literals a dictionary."""

    def __getitem__(self, id_: int, /) -> int: ...


class _NotSaid:
    """The place of numbers that the policy of a view in literals does not need."""

    def __getitem__(self, id_: int, /) -> int:
        raise KeyError(f"the view says nothing of request {id_} here; give a dictionary by id")


NOT_SAID = _NotSaid()


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms and estimates of each request, by id. In literals dictionaries."""

    tenant: ById = NOT_SAID
    """The number of its sender."""
    token_cost: ById = NOT_SAID
    """Weight of one of its tokens in its tenant's share: the higher, the lower the weight of its class."""
    first_token_ns: ById = NOT_SAID
    """Limit of the first token, from arrival; -1: none."""
    predicted_tokens: ById = NOT_SAID
    """Output tokens that a predictor expects; how many there will be a policy cannot see."""
    classes: Sequence[str] = ()
    """The name of its class of service; empty where there are none."""


NO_TERMS: Final = Terms()


class StepPrice(Protocol):
    """The price of an iteration."""

    def done_ns(self, prompts: Sequence[int], /) -> int:
        """The instant, at the latest, at which an iteration that starts now is done: with all present decodes, and whole new
        prompts of these many tokens."""
        ...


NO_BLOCKS: Final[Mapping[object, int]] = {}


class PlannedBlocks(Protocol):
    """The moves of a plan on the KV blocks that can be found again: what it takes, and would find on its way, one move after the
    other. The blocks themselves stay as they are."""

    def take(self, blocks: int, /) -> None:
        """New blocks are taken, for which others are evicted."""
        ...

    def admit(self, id_: int, blocks: int, /) -> None:
        """A sequence takes the first *blocks* blocks that are found."""
        ...

    def cached(self, id_: int, tokens: int, /, *, is_all: bool = False) -> None:
        """An admitted sequence is to be computed to *tokens* tokens: its full blocks can be found. *is_all*: it has no token
        behind these yet."""
        ...

    def finds(self, id_: int, tokens: int, /) -> tuple[int, int]:
        """Blocks that a waiting sequence with so many tokens would find, and how many of them no sequence holds: these count among
        the free ones until it takes them."""
        ...


class PrefixCache(Protocol):
    """The KV blocks of a model that can be found again, for a scheduler that `admits_in_turn` or `looks_itself`. Nothing here
    changes them, and lookups do not count as use: see `Plan.looks`."""

    @property
    def queue_looks(self) -> int:
        """Plans so far that had looked over the queue (`Looks.of_queue`)."""
        ...

    def planned(self) -> PlannedBlocks:
        """For a scheduler that `admits_in_turn`: what its plan takes and finds from now on."""
        ...

    def found_blocks(self, id_: int, tokens: int, /) -> int:
        """Blocks that a waiting sequence with so many tokens would find now."""
        ...

    def beginning(self, id_: int, tokens: int, /) -> object:
        """A name for the first *tokens* tokens of a request, the same for all that begin with them. None: they are not known."""
        ...

    def unheld_blocks(self, id_: int, blocks: int, held: Mapping[object, int] = NO_BLOCKS, /) -> int:
        """The number of its first *blocks* blocks that no sequence holds: they count among the free ones until it takes them.
        *held*: what sequences are to hold that the plan admits, for a scheduler that `looks_itself`."""
        ...

    def hold(self, id_: int, blocks: int, held: dict[object, int], /) -> None:
        """Notes in *held* that a waiting sequence is to hold its first *blocks* blocks; nothing else changes."""
        ...

    def freed_by(self, id_: int, gone: dict[object, int], /) -> int:
        """Blocks with content that become free when an admitted sequence is preempted after others; *gone* keeps count of these,
        and is empty for the first."""
        ...

    def full_blocks(self, id_: int, /) -> int:
        """Blocks with content of an admitted sequence."""
        ...


class AdaptersSeen(Protocol):
    """The LoRA adapters that requests of a model on a machine ask for."""

    @property
    def of(self) -> ById:
        """The adapter of each request, by id; -1: the base model."""
        ...

    @property
    def waiting(self) -> Mapping[int, int]:
        """Requests in the queue, by adapter; those that have none are not named."""
        ...

    def among(
        self, waiting: Sequence[WaitingSeq], adapters: set[int], behind: WaitingSeq | None, /
    ) -> Iterator[WaitingSeq]:
        """Those of *waiting*, a view's queue or what a policy has made of it, that ask for these *adapters*, of those that come
        *behind* one of them; None: of all."""
        ...

    def running(self, *, leaving: bool) -> set[int]:
        """Adapters of admitted sequences, -1 for the base model; with *leaving* those of sequences that take no step any more
        (`ReplicaView.n_leaving`)."""
        ...


class PlannedImages(Protocol):
    """The images that a plan encodes, one sequence after the other."""

    def fits(self, id_: int, cached: int, tokens: int, /) -> int:
        """How many of *tokens* prompt tokens behind *cached* ones can be computed: those ahead of the first image that is not
        encoded and cannot be."""
        ...

    def take(self, id_: int, /) -> object:
        """The sequence asked about last is planned."""
        ...

    def computes(self, id_: int, cached: int, tokens: int, /) -> int:
        """As many of *tokens* prompt tokens as `fits` says, which are planned."""
        ...

    def undo(self, id_: int, /) -> None:
        """A sequence is preempted."""
        ...


class _NoImages:
    """Prompts without images."""

    def fits(self, id_: int, cached: int, tokens: int, /) -> int:
        return tokens

    def take(self, id_: int, /) -> None:
        return

    def computes(self, id_: int, cached: int, tokens: int, /) -> int:
        return tokens

    def undo(self, id_: int, /) -> None:
        return


NO_IMAGES: Final = _NoImages()


class EncodedImages(Protocol):
    """The images of a model's requests, for a scheduler that `encodes`."""

    def planned(self) -> PlannedImages:
        """For a plan, from nothing planned on."""
        ...


@dataclass(slots=True)
class ReplicaView:
    """A machine's model at the moment it may start an iteration. Policies read it, and keep nothing of it for later.

    The engine keeps one view of each micro-batch slot up to date (a frozen class would take eight times as long to set). Sequences
    that are in flight in other micro-batches are left out.
    """

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
    elsewhere: Sequence[int] = ()
    """Ids of sequences admitted to the model's other micro-batches."""
    promised_blocks: int = -1
    """KV blocks that all admitted sequences, in every micro-batch, may come to hold by `policies.reserving.longest_blocks`, kept
    for a scheduler that `reserves`; -1: to be computed."""
    leaving_blocks: int = 0
    """KV blocks of leaving sequences (`n_leaving`)."""
    after_prefill: bool = False
    """Whether the iteration before this one computed prompt tokens."""
    price: StepPrice | None = None
    """None in literals that do not need it."""
    by_chunk: bool = True
    """For a scheduler that `takes_by_chunk`: False where a prompt takes all its blocks on admission after all (in a pipeline)."""
    n_leaving: int = 0
    """Sequences that the iteration before has brought to their `max_tokens`, where the plan is made ahead: they take no step, but
    their seats and their blocks are not free yet. Those that may have ended sooner still count among the decodes. See
    `plans_ahead`."""
    prompt_tokens: ById = NOT_SAID
    """Prompt tokens of each request, by id."""
    max_tokens: ById = NOT_SAID
    """Output tokens that the client of each request allows at most, by id; how many there will be a policy cannot see."""
    lookahead_tokens: int = 0
    """KV slots that each running sequence holds beyond the tokens it computes, for a method of speculation that writes there."""
    draft_slots: int = 0
    """Tokens of an iteration's budget that drafting takes for each sequence beside those that it computes."""
    max_model_len: int = ALWAYS_NS
    """Tokens of prompt and output that a sequence may have."""
    memo: object | None = None  # "object" alone is a name that the compiled class does not find.
    """The `Plan.memo` of the plan before this one; None for the first one, and after there was nothing to do here."""
    rounds: int = 0
    """Decode steps done here so far, those beside prompts included: how many a plan has been held for is their difference."""
    step: int = -1
    """For a scheduler that `counts_steps`, on a machine with ranks: their common steps since the last time that all were idle; -1:
    not counted."""
    since_prompts: int = ALWAYS_NS
    """The same since the last step in which a rank computed prompt tokens; ALWAYS_NS: there was none."""
    terms: Terms = NO_TERMS
    """Terms of classes of service."""
    cache: PrefixCache | None = None
    """None without a prefix cache, and for a scheduler that asks nothing of it. The hit of each waiting request is among its
    `cached_tokens`, but for a scheduler that `admits_in_turn` or `looks_itself`, which looks it up here."""
    adapters: AdaptersSeen | None = None
    """None where no request asks for an adapter."""
    images: EncodedImages | None = None
    """None where no images are encoded in iterations."""

    @property
    def n_running(self) -> int:
        return self.n_decoding + len(self.prefilling) + self.n_leaving

    @property
    def decode_tokens(self) -> int:
        """Tokens of budget that one step of all decodes takes."""
        return self.n_decoding * self.query_tokens

    def blocks(self, tokens: int) -> int:
        """KV blocks that *tokens* tokens occupy."""
        return -(-tokens // self.block_tokens)

    def blocks_to_admit(self, seq: WaitingSeq) -> int:
        """KV blocks that admitting *seq* takes: of the KV that it brings, and of what it computes first, which is its tokens or,
        where it has none to compute, a decode step. Blocks that others hold already, and those kept for it, are not taken again."""
        whole = -(-((seq.tokens or self.query_tokens) + seq.cached_tokens) // self.block_tokens)
        return whole - seq.shared_blocks - seq.kept_blocks


class Looks(NamedTuple):
    """Lookups in the prefix cache by a scheduler that `looks_itself`. Where a lookup counts as use, the engine counts it once, when
    the plan is carried out: planning uses nothing."""

    used: tuple[tuple[int, int], ...] = ()
    """(id, tokens), first to last: what a sequence with so many tokens finds has been used."""
    of_queue: bool = False
    """The queue has been looked over without a lookup for each request; see `PrefixCache.queue_looks`."""


class Plan(NamedTuple):
    """The sequences that run in the next iteration, and their numbers of tokens."""

    decode: bool | tuple[int, ...] = False
    """True: every decoding sequence takes a step; or the ids of those that do."""
    run: tuple[tuple[int, int], ...] = ()
    """(id, prompt tokens to compute); the id is of a prefilling sequence or, to admit it, of a waiting one.

    Admission takes KV blocks for all of the request's tokens at once, or, for a scheduler with `by_chunk`, each chunk takes
    those of its own tokens (see `ReplicaView.by_chunk`). 0 tokens, for a waiting sequence that has none to compute,
    is joining the decodes; it is one of those that *decode* speaks of."""
    preempt: tuple[int, ...] = ()
    """Ids whose KV blocks are given back first; they return to the head of the queue, or to its end (`preempted_last`),
    and are recomputed."""
    hold: int = 1
    """For how many iterations the same answer holds if no sequence finishes and no request arrives. Only plans of decodes
    alone are held; an iteration with prompt tokens is always followed by another look."""
    through_arrivals: bool = False
    """True: an arrival behind the present queue would not change the answer either."""
    reject: tuple[tuple[int, str], ...] = ()
    """(id, reason) of waiting requests that are refused; recorded as rejected."""
    until_ns: int = ALWAYS_NS
    """The answer holds for iterations that start before this instant. An empty plan with an instant still to come waits for it."""
    memo: object | None = None
    """State for the next plan of this micro-batch: a plain value, which `ReplicaView.memo` brings back."""
    undone: tuple[tuple[int, int], ...] = ()
    """(id, prompt tokens) of sequences in *preempt* that had been planned to run before they were preempted, by a scheduler that
    `admits_in_turn`: they took blocks first, for which others were evicted."""
    order: tuple[int, ...] | None = None
    """Running sequences, as the scheduler lists them, where that is not in order of admission and content is cached when it has
    been computed: of sequences that end together the content of the last was used last. Others follow."""
    shorten: tuple[tuple[int, int], ...] = ()
    """(id, output tokens) of waiting requests whose answers end after so many tokens at the latest from now on, as if their clients
    allowed no more (`ReplicaView.max_tokens`)."""
    looks: Looks | None = None
    """Lookups in the prefix cache that a scheduler which `looks_itself` made for this plan."""


DECODES: Final = Plan(decode=True, hold=UNTIL_CHANGE)
"""A step of all decodes, held until something changes."""

_new: Final = tuple[object, ...].__new__


def prompts(run: tuple[tuple[int, int], ...], decode: bool) -> Plan:
    """`Plan(decode, run)`, without the detour through the constructor of a NamedTuple: once an iteration with prompt tokens."""
    return _new(Plan, (decode, run, (), 1, False, (), ALWAYS_NS, None, (), None, (), None))


def held_once(plan: Plan) -> Plan:
    """*plan* with a `hold` of 1, made in the same way."""
    return _new(Plan, (*plan[:3], 1, *plan[4:]))


class Largest(NamedTuple):
    """The most that the sequences of a run may ask of an iteration, in tokens."""

    block_tokens: int
    query_tokens: int
    """Tokens of a sequence in a round of speculation."""
    drafting_tokens: int
    """Those, and the slots that drafting takes beside them."""
    request_tokens: int
    """The longest prompt with its answer."""


class Scheduler(Protocol):
    """Decides, from a view alone, what the next iteration runs. Implementations are frozen dataclasses.

    A function `(view) -> Plan` will do as well. Attributes say what a scheduler needs of the engine beside the view; functions
    below look for them: `by_chunk`, `async_scheduling`, `admits_in_turn`, `looks_itself`, `asks_beginnings`, `evicts`,
    `preempted_last`, `reserves`, `counts_steps`, `orders_queue`, `pads_to`, `seats`, `rules`. A wrapper has those of its `inner`
    unless it has its own. A method `never_planned(largest: Largest) -> str | None` says why some sequence could never be planned,
    and what helps; such a run is refused.
    """

    def plan(self, view: ReplicaView, /) -> Plan: ...


PlanFunction = Callable[[ReplicaView], Plan]


def plan_of(scheduler: Scheduler | PlanFunction) -> PlanFunction:
    """The function that plans: the scheduler's method, or the function itself. TypeError for anything else."""
    plan = getattr(scheduler, "plan", scheduler)
    if not callable(plan):
        raise TypeError(f"a scheduler has a method plan(view) or is such a function; got {scheduler!r}")
    return cast(PlanFunction, plan)


def takes_by_chunk(scheduler: object) -> bool:
    """Whether KV blocks are taken as tokens are scheduled, rather than for a whole prompt when it is admitted: asked for with an
    attribute `by_chunk` of *scheduler* or of the one that it wraps."""
    return bool(asked(scheduler, "by_chunk"))


def plans_ahead(scheduler: object) -> bool:
    """Whether each iteration is planned while the one before it runs (asynchronous scheduling, overlap scheduling): set by an
    attribute `async_scheduling` of *scheduler* or of the one that it wraps.

    Such a plan is made when the iteration before starts. It knows what that iteration will have computed, but not which sequences
    end in it and which requests arrive during it. An empty plan is made again when the iteration has ended, with all that is known
    then.
    """
    return bool(asked(scheduler, "async_scheduling"))


def admits_in_turn(scheduler: object) -> bool:
    """Whether *scheduler*, or one that it wraps, looks prefix-cache hits of waiting requests up itself, as vLLM does in each one's
    turn: by an attribute `admits_in_turn`. Its queue then shows sequences without their hits.

    For others the engine shows the hits at the time of the look, and keeps them for requests that the plan admits.
    """
    return bool(asked(scheduler, "admits_in_turn"))


def looks_itself(scheduler: object) -> bool:
    """Whether *scheduler*, or one that it wraps, looks prefix-cache hits of waiting requests up itself, as SGLang does for one
    after the other: by an attribute `looks_itself`. Its queue shows sequences without their hits, and those that its plan admits
    hold them before any blocks are taken. `Plan.looks` has its lookups."""
    return bool(asked(scheduler, "looks_itself"))


def asks_beginnings(scheduler: object) -> bool:
    """Whether *scheduler*, or one that it wraps, asks which prompts begin alike (`PrefixCache.beginning`), and nothing else, of a
    prefix cache whose hits it is shown: by an attribute `asks_beginnings`."""
    return bool(asked(scheduler, "asks_beginnings"))


def seats(scheduler: object) -> int | None:
    """Requests that *scheduler*, or one that it wraps, is given at once where those of several ranks wait in one queue: by an
    attribute `seats`. None: all that there are."""
    found = asked(scheduler, "seats")
    return found if isinstance(found, int) else None


def evicts(scheduler: object) -> bool:
    """Whether *scheduler*, or one that it wraps, decides itself what is preempted when memory runs out: by an attribute
    `evicts`."""
    return bool(asked(scheduler, "evicts"))


def preempted_last(scheduler: object) -> bool:
    """Whether preempted sequences wait at the end of the queue rather than at its head: set by an attribute `preempted_last` of
    *scheduler* or of the one that it wraps."""
    return bool(asked(scheduler, "preempted_last"))


def reserves(scheduler: object) -> bool:
    """Whether *scheduler*, or one that it wraps, keeps memory for what clients allow (`ReplicaView.max_tokens`): by an attribute
    `reserves`."""
    return bool(asked(scheduler, "reserves"))


Encodes = Literal["as planned", "as needed"]
"""Which images an iteration encodes: those that the scheduler plans by `ReplicaView.images`, or all that its chunks reach."""


def encodes(scheduler: object) -> Encodes | None:
    """How *scheduler*, or one that it wraps, has images encoded, by an attribute `encodes`; None where it has none encoded."""
    return cast(Encodes | None, asked(scheduler, "encodes"))


def counts_steps(scheduler: object) -> bool:
    """Whether plans of *scheduler*, or of one that it wraps, depend on the number of the step that ranks take together
    (`ReplicaView.step`): by an attribute `counts_steps`."""
    return bool(asked(scheduler, "counts_steps"))


def orders_queue(scheduler: object) -> bool:
    """Whether *scheduler*, or one that it wraps, admits waiting requests in another order than that of the queue, or goes on behind
    one that does not fit: by an attribute `orders_queue`."""
    return bool(asked(scheduler, "orders_queue"))


def decodes_below(scheduler: object) -> int:
    """Where no request waits, no prompt is incomplete and the KV blocks of a step are free, *scheduler* plans `DECODES` as long as
    the sequences, and the tokens that they submit, are fewer than this: the engine then does not ask it. 0: it is always asked.

    It is an attribute `decodes_below` of the class that has the method `plan`: neither a class derived from it with a plan of its
    own nor a wrapper takes it over."""
    for each in type(scheduler).__mro__:
        if "plan" in vars(each):
            return getattr(scheduler, "decodes_below", 0) if "decodes_below" in vars(each) else 0
    return 0


def rule_of(scheduler: object, name: str) -> bool | None:
    """A rule of the release whose scheduler *scheduler* is, or the one that it wraps, by name: found in an attribute `rules`. None:
    it has none."""
    return getattr(asked(scheduler, "rules"), name, None)


def drafts_prompts(scheduler: object) -> bool:
    """Whether an iteration drafts for sequences that compute prompts as well: where *scheduler*, or one that it wraps, has a rule
    for when it does not (`drafts_if_used`)."""
    return rule_of(scheduler, "drafts_if_used") is not None


def asked(scheduler: object, name: str) -> object:
    """An attribute of *scheduler*, or of the nearest that it wraps which has it; None where none has."""
    while scheduler is not None:
        if hasattr(scheduler, name):
            return getattr(scheduler, name)
        scheduler = getattr(scheduler, "inner", None)
    return None


def pads_to(scheduler: object) -> int:
    """Sequences that the batches of *scheduler*, or of the one that it wraps, are padded to; 0: they are not padded.

    A scheduler that pads has the attribute `pads_to`. Shorter chunks of an iteration then take as long as its longest, and a decode
    step as long as one of that many sequences with the longest context. Padding changes what an iteration costs, never what runs.
    """
    while scheduler is not None:
        sequences = getattr(scheduler, "pads_to", 0)
        if sequences:
            return int(sequences)
        scheduler = getattr(scheduler, "inner", None)
    return 0
