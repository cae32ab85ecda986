"""TensorRT-LLM's scheduler: in-flight batching behind a capacity scheduler, as its PyTorch backend runs it (release 1.2).

Each iteration is planned in three steps, each from a file of TensorRT-LLM:

1. The capacity scheduler says what may run at all, by seats and KV blocks (`GuaranteedNoEvictScheduler`, `MaxUtilizationScheduler`,
   `StaticBatchScheduler` in cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp; blocks by `getRemainingBlocksToCompletion` and
   `getNeededBlocksOneStep` in kvCacheManager.cpp beside it).
2. The micro-batch scheduler takes of these what `max_num_tokens` holds, decodes before prompts, and cuts prompts where
   chunking is on (`MicroBatchScheduler::operator()`, `setCtxRequestsChunkSize` in
   cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp; the unit of a chunk in _torch/pyexecutor/py_executor_creator.py).
3. The executor may hold prompts back until there are enough of them (`PyExecutor._waiting_requests` in
   tensorrt_llm/_torch/pyexecutor/py_executor.py). With overlap an iteration is planned when the one before starts
   (`_executor_loop_overlap`), and `stream_interval` counts iterations (`_handle_responses`). A prompt longer than
   `max_num_tokens` is refused without chunks (`_check_arguments` in llmapi/llm.py).

Settings have the names and defaults of `TorchLlmArgs` and `SchedulerConfig` (tensorrt_llm/llmapi/llm_args.py), which
`trtllm-serve` takes over. docs/validation/schedulers.md says what of this could be compared with the source and what could not.

4. With `use_kv_cache_manager_v2` prompts that do not fit are passed over (`_schedule_loop` in
   tensorrt_llm/_torch/pyexecutor/scheduler/scheduler_v2.py of 2026, read in part).

Not modelled: reuse of partly filled blocks, prompts that preempt others under KV manager v2, beam search, LoRA pages, encoders,
disaggregation, `batch_wait_timeout_ms`, and the second step that `MAX_UTILIZATION` looks ahead with pipelines.
Sequences of a pipeline stay in their micro-batch. Ranks under attention data parallelism are `policies.ranks` and
`policies.routers.TrtLlmRanks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from policies.reserving import longest_blocks, unpromised_blocks
from policies.schedulers import at_least
from policies.view import UNTIL_CHANGE, Largest, PartialSeq, Plan, ReplicaView, RunningSeq, WaitingSeq

Capacity = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
Chunking = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]


@dataclass(frozen=True)
class TrtLlm:
    """In-flight batching: all decodes, then whole prompts, first come first served, within a budget of tokens.

    A prompt's KV blocks are taken when it is admitted. By default a request is admitted once memory has room for the longest that
    it and all before it may become, and nothing is evicted. With `MAX_UTILIZATION` it is admitted once its prompt fits; where the
    decodes cannot grow, the last admitted sequence is preempted and computed again.
    """

    max_batch_size: int = 2048
    """Sequences of an iteration, and admitted ones, in each micro-batch."""
    max_num_tokens: int = 8192
    """Tokens of an iteration."""
    capacity_scheduler_policy: Capacity = "GUARANTEED_NO_EVICT"
    enable_chunked_prefill: bool = False
    """False: prompts are computed whole, and those of more than *max_num_tokens* are refused."""
    context_chunking_policy: Chunking = "FIRST_COME_FIRST_SERVED"
    """Distribution of the rest of the budget where it does not hold all prompts: to the first, or to all, a KV block at a time."""
    batch_wait_timeout_iters: int = 0
    """Iterations for which prompts are held back beside decodes at most."""
    batch_wait_max_tokens_ratio: float = 0.0
    """Prompts are held back while the iteration would have fewer tokens than this share of *max_num_tokens*. Without both nothing
    is."""
    count_cached_tokens: bool = True
    """Whether what is cached of a prompt counts as tokens of the iteration that starts it, as in 1.x; the scheduler of 2026 counts
    what is computed."""
    enable_prefix_aware_scheduling: bool = True
    """A prompt waits while another computes the block that it would be the first to miss, since it finds that afterwards; those
    behind it do not wait. Without a prefix cache it has no effect; the engine has it off where layers have windows."""
    chunk_unit_size: int = 0
    """Tokens of which chunks are multiples, where a KV block has fewer."""
    use_kv_cache_manager_v2: bool = False
    """Memory is packed as by `MAX_UTILIZATION`, whatever *capacity_scheduler_policy* says, and prompts that do not fit are passed
    over. Preempted sequences are suspended, which `memory.preemption: swap` simulates."""
    max_util_for_resume: float = 0.95
    """Share of memory up to which such sequences come back."""
    disable_overlap_scheduler: bool = False
    """True: an iteration is planned when the one before has ended, not while it runs; see `policies.view.plans_ahead`."""

    asks_beginnings: ClassVar[bool] = True
    orders_queue: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("max_batch_size", self.max_batch_size, 1)
        at_least("chunk_unit_size", self.chunk_unit_size, 0)
        if not 0 < self.max_util_for_resume <= 1:
            raise ValueError(f"max_util_for_resume is a share of memory in (0, 1]; got {self.max_util_for_resume!r}")
        at_least("max_num_tokens", self.max_num_tokens, 1)
        at_least("batch_wait_timeout_iters", self.batch_wait_timeout_iters, 0)
        if not 0 <= self.batch_wait_max_tokens_ratio <= 1:
            raise ValueError(
                f"batch_wait_max_tokens_ratio is a share of max_num_tokens in [0, 1]; got {self.batch_wait_max_tokens_ratio!r}"
            )
        for name, choices in (("capacity_scheduler_policy", Capacity), ("context_chunking_policy", Chunking)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} is one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")

    def never_planned(self, largest: Largest) -> str | None:
        if self.max_num_tokens >= largest.query_tokens:
            return None
        return (
            f"max_num_tokens ({self.max_num_tokens}) holds no round of speculation, {largest.query_tokens} tokens of a sequence; "
            "give more, or draft fewer"
        )

    @property
    def evicts(self) -> bool:
        """Whether it decides itself what is preempted; see `policies.view.evicts`."""
        return self._capacity == "MAX_UTILIZATION"

    @property
    def seats(self) -> int:
        """See `policies.view.seats`."""
        return self.max_batch_size

    @property
    def _capacity(self) -> Capacity:
        return "MAX_UTILIZATION" if self.use_kv_cache_manager_v2 else self.capacity_scheduler_policy

    @property
    def reserves(self) -> bool:
        """Whether it keeps memory for what clients allow; see `policies.view.reserves`."""
        return not self.evicts

    @property
    def async_scheduling(self) -> bool:
        """Whether plans are made ahead."""
        return not self.disable_overlap_scheduler

    def plan(self, view: ReplicaView, /) -> Plan:
        decode = view.n_decoding > 0
        left = self.max_num_tokens - view.decode_tokens
        policy = self._capacity
        if left < 0 or (policy == "MAX_UTILIZATION" and view.growth_blocks > view.free_blocks):
            return self._plan_in_order(view)
        if policy == "STATIC_BATCH" and decode:
            return Plan(True, hold=UNTIL_CHANGE, through_arrivals=True, memo=view.memo)
        seats = self.max_batch_size - view.n_running
        if not view.prefilling and (seats <= 0 or not view.waiting):
            return Plan(decode, hold=UNTIL_CHANGE, through_arrivals=seats <= 0, memo=view.memo)
        fitting, rejected, full = self._fitting(view, seats)
        contexts: list[PartialSeq | WaitingSeq] = [*view.prefilling, *fitting]
        run = self._run(contexts, left, self._unit(view))
        if run:
            run, memo = self._in_company(view, contexts, run, view.decode_tokens)
            return Plan(decode or any(not tokens for _, tokens in run), run, reject=rejected, memo=memo)
        # A whole prompt that is more than the decodes leave of the budget holds up all behind it.
        blocked = full or (bool(contexts) and not (self.enable_chunked_prefill or self.use_kv_cache_manager_v2))
        hold = 1 if rejected else UNTIL_CHANGE
        return Plan(decode, hold=hold, through_arrivals=blocked, reject=rejected, memo=view.memo)

    def _fitting(self, view: ReplicaView, seats: int) -> tuple[list[WaitingSeq], tuple[tuple[int, str], ...], bool]:
        """Waiting sequences that seats and memory admit, those that are refused, and whether a later one would not be admitted
        either."""
        fitting: list[WaitingSeq] = []
        rejected: list[tuple[int, str]] = []
        full = seats <= 0
        if view.waiting and not full:
            free = self._free(view)
            tokens_left = self.max_num_tokens - view.decode_tokens
            computed, passes_over = self._being_computed(view), self.use_kv_cache_manager_v2
            for seq in view.waiting:
                tokens = 0 if self.enable_chunked_prefill else self._counted(seq)
                if tokens > self.max_num_tokens and not seq.preempted:
                    rejected.append((seq.id, self._too_long(tokens)))
                    continue
                name = self._first_missed(view, seq)
                if name is not None and name in computed:
                    continue
                needed = self._needed(view, seq)
                lacks = needed + self._kept_free(view, seq) > free
                # Whole prompts are taken in order: none behind a spent budget needs a look.
                spent = tokens_left <= 0 and not self.enable_chunked_prefill
                if spent or len(fitting) == seats or (lacks and not passes_over):
                    full = True
                    break
                if passes_over and (lacks or min(tokens, self.max_num_tokens) > tokens_left):
                    continue
                tokens_left -= tokens
                free -= needed
                computed.add(name)
                fitting.append(seq)
        return fitting, tuple(rejected), full or len(fitting) == seats

    def _free(self, view: ReplicaView) -> int:
        """KV blocks that admissions may take."""
        return (
            view.free_blocks - view.growth_blocks
            if self.evicts
            else unpromised_blocks(view, self._drafted_tokens(view))
        )

    def _needed(self, view: ReplicaView, seq: WaitingSeq) -> int:
        """KV blocks that must be free for a waiting sequence."""
        if not self.evicts:
            return longest_blocks(view, seq.id, self._drafted_tokens(view))
        return view.blocks_to_admit(seq)

    def _kept_free(self, view: ReplicaView, seq: WaitingSeq) -> int:
        """KV blocks that must be free behind them: where others run, a suspended sequence does not fill memory."""
        if not (self.use_kv_cache_manager_v2 and seq.preempted and view.n_running):
            return 0
        return view.total_blocks - int(self.max_util_for_resume * view.total_blocks)

    def _drafted_tokens(self, view: ReplicaView) -> int:
        return (view.query_tokens - 1) * (2 if self.async_scheduling else 1)

    def _being_computed(self, view: ReplicaView) -> set[object]:
        """The blocks that prompts half computed compute next, by name."""
        return {self._name(view, seq.id, seq.cached_tokens, seq.remaining_tokens) for seq in view.prefilling}

    def _first_missed(self, view: ReplicaView, seq: WaitingSeq) -> object:
        """The first block of a prompt that is not cached, by name; None where it has no other."""
        return None if seq.kept_blocks else self._name(view, seq.id, seq.cached_tokens, seq.tokens)

    def _name(self, view: ReplicaView, id_: int, cached: int, tokens: int) -> object:
        """The name of the block behind *cached* tokens of a prompt, of which *tokens* are to be computed; None where they fill
        none, and where no request waits for it."""
        if view.cache is None or not self.enable_prefix_aware_scheduling or self._capacity == "STATIC_BATCH":
            return None
        upto = (cached // view.block_tokens + 1) * view.block_tokens
        return (view.cache.beginning(id_, upto), upto) if upto <= cached + tokens else None

    def _unit(self, view: ReplicaView) -> int:
        return max(view.block_tokens, self.chunk_unit_size)

    def _too_long(self, tokens: int) -> str:
        return f"a prompt of {tokens} tokens exceeds max_num_tokens ({self.max_num_tokens}) and enable_chunked_prefill is off"

    def _plan_in_order(self, view: ReplicaView) -> Plan:
        """The plan where memory or the budget does not serve all running sequences: in order of admission, the last preempted
        first."""
        packed = self.evicts
        running: Sequence[RunningSeq] = [seq for seq in view.running[:] if not seq.leaving]
        paused: tuple[int, ...] = ()
        if packed:
            running, paused = _paused(running, view.free_blocks)
        partial = {seq.id: seq for seq in view.prefilling}
        left = self.max_num_tokens
        decode: list[int] = []
        contexts: list[PartialSeq] = []
        for seq in running:
            if seq.id in partial:
                # Where memory is reserved, decodes come before all prompts, and one of them does not fit.
                contexts += [partial[seq.id]] if packed else []
            elif view.query_tokens > left:
                break
            else:
                left -= view.query_tokens
                decode.append(seq.id)
        run = self._run(contexts, left, self._unit(view))
        run, memo = self._in_company(view, contexts, run, len(decode) * view.query_tokens)
        return Plan(tuple(decode), run, paused, memo=memo)

    def _run(self, contexts: Sequence[PartialSeq | WaitingSeq], left: int, unit: int) -> tuple[tuple[int, int], ...]:
        """(id, prompt tokens) of the sequences of *contexts* that run within *left* tokens."""
        lengths = [self._counted(seq) for seq in contexts]
        if not self.enable_chunked_prefill:
            tokens: list[int] = []
            for length in lengths:
                # A preempted sequence that has outgrown the budget runs without decodes.
                left -= min(length, self.max_num_tokens)
                if left < 0:
                    break
                tokens.append(length)
        elif sum(lengths) <= left:
            tokens = lengths
        elif self.context_chunking_policy == "FIRST_COME_FIRST_SERVED":
            tokens = _first_come(lengths, left, min(unit, self.max_num_tokens))
        else:
            tokens = _equal_progress(lengths, left, min(unit, self.max_num_tokens))
        # Cached tokens move a chunk on, and a sequence with nothing to compute joins the decodes.
        return tuple(
            (seq.id, min(n, _to_compute(seq)))
            for seq, n, length in zip(contexts, tokens, lengths, strict=False)
            if n or not length
        )

    def _counted(self, seq: PartialSeq | WaitingSeq) -> int:
        """Tokens that the rest of a prompt counts for in the budget: all of one that has not begun, unless its KV has come from
        another machine."""
        if isinstance(seq, PartialSeq) or not self.count_cached_tokens or not seq.tokens or seq.kept_blocks:
            return _to_compute(seq)
        return seq.tokens + seq.cached_tokens

    def _in_company(
        self,
        view: ReplicaView,
        contexts: Sequence[PartialSeq | WaitingSeq],
        run: tuple[tuple[int, int], ...],
        decode_tokens: int,
    ) -> tuple[tuple[tuple[int, int], ...], object]:
        """*run*, or nothing where prompts are held back beside the decodes; and for how many iterations they have been.

        A prompt counts in full, whatever its chunk is. The count stays where nothing decodes, and prompts are not held back.
        """
        if not (run and decode_tokens and self.batch_wait_timeout_iters and self.batch_wait_max_tokens_ratio):
            return run, view.memo
        waited = view.memo if isinstance(view.memo, int) else 0
        runs = {id_ for id_, _ in run}
        tokens = decode_tokens + sum(seq.cached_tokens + _to_compute(seq) for seq in contexts if seq.id in runs)
        if waited < self.batch_wait_timeout_iters and tokens < self.batch_wait_max_tokens_ratio * self.max_num_tokens:
            return (), waited + 1
        return run, 0


def _to_compute(seq: PartialSeq | WaitingSeq) -> int:
    return seq.remaining_tokens if isinstance(seq, PartialSeq) else seq.tokens


def _paused(running: Sequence[RunningSeq], free: int) -> tuple[Sequence[RunningSeq], tuple[int, ...]]:
    """The sequences that continue in *free* blocks, in order of admission, and the ids of those preempted for them, the last
    admitted first."""
    at, end = 0, len(running)
    paused: list[int] = []
    while at < end:
        if running[at].growth_blocks <= free:
            free -= running[at].growth_blocks
            at += 1
        else:
            end -= 1
            free += running[end].blocks - running[end].shared_blocks
            paused.append(running[end].id)
    return running[:end], tuple(paused)


def _first_come(lengths: Sequence[int], left: int, unit: int) -> list[int]:
    """Chunks within *left* tokens, one prompt after the other; one that is cut is cut to a multiple of *unit*."""
    chunks: list[int] = []
    for length in lengths:
        chunk = length if length <= left else left // unit * unit
        left -= chunk
        chunks.append(chunk)
    return chunks


def _equal_progress(lengths: Sequence[int], left: int, unit: int) -> list[int]:
    """Chunks within *left* tokens that grow in turns by *unit* tokens, until none can."""
    chunks = [0] * len(lengths)
    grown = True
    while grown:
        grown = False
        for i, length in enumerate(lengths):
            more = min(unit, length - chunks[i])
            if 0 < more <= left:
                chunks[i] += more
                left -= more
                grown = True
    return chunks
