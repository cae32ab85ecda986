"""TensorRT-LLM's rules written a second time, as its loops run: one list of active requests, oldest first, each looked at in turn.

`TrtLlm` takes short cuts (sums in place of loops, a look at as much of the queue as matters); here nothing is cut short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from policies.trtllm import TrtLlm
from policies.view import PartialSeq, ReplicaView, RunningSeq, WaitingSeq


@dataclass
class Request:
    id: int
    prompt: int
    limit: int
    context: int
    """Tokens of its context: the prompt, and after a pause what it had emitted."""
    done: int
    """Those of these that are computed."""
    tokens: int
    """With KV, where it decodes."""
    held: int
    """Blocks."""
    generating: bool
    paused_before: bool = False

    @property
    def started(self) -> bool:
        return self.generating or self.done > 0


@dataclass
class Answer:
    generation: list[int]
    context: dict[int, int]
    paused: list[int]
    rejected: list[int]
    waited: int


def blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def to_completion(request: Request, pool: int, block: int, drafted: int) -> int:
    """`getRemainingBlocksToCompletion`, with the slots of drafted tokens, and no more than there are."""
    longest = request.prompt + request.limit + max(drafted - 1, 0)
    return max(min(blocks(longest, block), pool) - request.held, 0)


def one_step(request: Request, block: int, query: int) -> int:
    """`getNeededBlocksOneStep`."""
    if request.generating:
        return max(blocks(request.tokens + query, block) - request.held, 0)
    return 0 if request.started else blocks(request.context, block)


def no_evict(active: list[Request], settings: TrtLlm, free: int, pool: int, block: int, drafted: int) -> list[Request]:
    scheduled, pending = [], []
    for request in active:
        if len(scheduled) >= settings.max_batch_size:
            break
        if request.generating:
            scheduled.append(request)
            free -= to_completion(request, pool, block, drafted)
        else:
            pending.append(request)
    if settings.capacity_scheduler_policy == "STATIC_BATCH" and scheduled:
        return scheduled
    # What prompts half computed may become has been promised.
    for request in pending:
        if len(scheduled) >= settings.max_batch_size:
            break
        needed = to_completion(request, pool, block, drafted)
        if needed > free:
            break
        scheduled.append(request)
        free -= needed
    return scheduled


def max_utilization(
    active: list[Request], settings: TrtLlm, free: int, block: int, query: int
) -> tuple[list[Request], list[Request]]:
    scheduled: list[Request] = []
    paused: list[Request] = []
    taken, at, end = 0, 0, len(active)
    while at < end:
        request = active[at]
        needed = one_step(request, block, query)
        if len(scheduled) < settings.max_batch_size and taken + needed <= free:
            taken += needed
            scheduled.append(request)
            at += 1
            continue
        last = next((i for i in range(end - 1, at - 1, -1) if active[i].started), None)
        if last is None:
            break
        paused.append(active[last])
        free += active[last].held
        end = last
    return scheduled, paused


def micro_batch(
    fitting: list[Request], settings: TrtLlm, block: int, query: int
) -> tuple[list[Request], dict[int, int], list[Request]]:
    generation: list[Request] = []
    contexts: list[Request] = []
    to_chunk: list[Request] = []
    batch_tokens = 0
    limit = settings.max_num_tokens
    for size, request in enumerate(fitting):
        if size == settings.max_batch_size:
            break
        if request.generating:
            if batch_tokens + query > limit:
                break
            generation.append(request)
            batch_tokens += query
        elif settings.enable_chunked_prefill:
            to_chunk.append(request)
        else:
            if batch_tokens + min(request.context, limit) > limit:
                break
            contexts.append(request)
            batch_tokens += min(request.context, limit)
    chunks = {request.id: request.context for request in contexts}
    capacity, unit = limit - batch_tokens, min(block, limit)
    left = {request.id: request.context - request.done for request in to_chunk}
    if sum(left.values()) <= capacity:
        chunks |= left
    elif settings.context_chunking_policy == "FIRST_COME_FIRST_SERVED":
        for id_, suggested in left.items():
            actual = min(capacity, suggested)
            if actual != suggested:
                actual = actual // unit * unit
            chunks[id_] = actual
            capacity -= actual
    else:
        chunks |= dict.fromkeys(left, 0)
        spent, loop = 0, 1
        while spent < capacity and loop:
            loop = 0
            for id_, most in left.items():
                past = chunks[id_]
                more = min(past + unit, most) - past
                if spent + more > capacity:
                    continue
                chunks[id_] = past + more
                spent += more
                loop += more
    return generation, {id_: n for id_, n in chunks.items() if n}, contexts + to_chunk


def step(
    active: list[Request], settings: TrtLlm, *, free: int, pool: int, block: int, query: int, waited: int
) -> Answer:
    rejected = [
        request.id
        for request in active
        if not settings.enable_chunked_prefill
        and not request.started
        and not request.paused_before
        and request.context > settings.max_num_tokens
    ]
    active = [request for request in active if request.id not in rejected]
    paused: list[Request] = []
    if settings.capacity_scheduler_policy == "MAX_UTILIZATION":
        fitting, paused = max_utilization(active, settings, free, block, query)
    else:
        drafted = (query - 1) * (1 if settings.disable_overlap_scheduler else 2)
        fitting = no_evict(active, settings, free, pool, block, drafted)
    generation, chunks, contexts = micro_batch(fitting, settings, block, query)
    if chunks and generation and settings.batch_wait_timeout_iters and settings.batch_wait_max_tokens_ratio:
        tokens = sum(request.context for request in contexts if request.id in chunks) + query * len(generation)
        enough = settings.batch_wait_max_tokens_ratio * settings.max_num_tokens
        if waited < settings.batch_wait_timeout_iters and tokens < enough:
            chunks, waited = {}, waited + 1
        else:
            waited = 0
    return Answer([request.id for request in generation], chunks, [request.id for request in paused], rejected, waited)


def a_case(rng: random.Random) -> tuple[TrtLlm, list[Request], dict[str, int]]:
    chunked = rng.random() < 0.5
    settings = TrtLlm(
        max_batch_size=rng.choice([3, 6, 12, 40]),
        max_num_tokens=rng.choice([5, 20, 60, 150, 1000]),
        capacity_scheduler_policy=rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
        enable_chunked_prefill=chunked,
        context_chunking_policy=rng.choice(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]),
        batch_wait_timeout_iters=rng.choice([0, 0, 3]),
        batch_wait_max_tokens_ratio=rng.choice([0.0, 0.3, 0.9]),
        disable_overlap_scheduler=rng.random() < 0.5,
    )
    block, query = rng.choice([1, 4, 16]), rng.choice([1, 1, 4])
    active: list[Request] = []
    n_running = rng.randrange(0, settings.max_batch_size + 1)
    for id_ in range(n_running + rng.randrange(0, 9)):
        prompt, limit = rng.randrange(1, 90), rng.randrange(1, 60)
        if id_ >= n_running:
            again = rng.random() < 0.2
            emitted = rng.randrange(0, limit) if again else 0
            active.append(Request(id_, prompt, limit, prompt + emitted, 0, 0, 0, False, again))
        elif chunked and prompt > 1 and rng.random() < 0.3:
            done = rng.randrange(1, prompt)
            active.append(Request(id_, prompt, limit, prompt, done, 0, blocks(prompt, block), False))
        else:
            tokens = prompt + rng.randrange(0, limit)
            active.append(Request(id_, prompt, limit, prompt, prompt, tokens, blocks(tokens, block), True))
    free = rng.choice([0, 2, 10, 40, 400])
    held = sum(request.held for request in active)
    if settings.capacity_scheduler_policy != "MAX_UTILIZATION":
        # Whoever runs was promised what it may become.
        drafted = (query - 1) * (1 if settings.disable_overlap_scheduler else 2)
        free += sum(to_completion(request, 1 << 40, block, drafted) for request in active if request.started)
    return settings, active, {
        "free": free, "pool": held + free, "block": block, "query": query, "waited": rng.randrange(0, 4),
    }  # fmt: skip


def view_of(active: list[Request], case: dict[str, int]) -> ReplicaView:
    block, query = case["block"], case["query"]
    running = [request for request in active if request.started]
    growth = {request.id: one_step(request, block, query) for request in running}
    return ReplicaView(
        waiting=[
            WaitingSeq(request.id, request.context, preempted=request.paused_before)
            for request in active
            if not request.started
        ],
        prefilling=[
            PartialSeq(request.id, request.done, request.context - request.done)
            for request in running
            if not request.generating
        ],
        n_decoding=sum(request.generating for request in running),
        query_tokens=query,
        free_blocks=case["free"],
        growth_blocks=sum(growth.values()),
        block_tokens=block,
        total_blocks=case["pool"],
        running=[
            RunningSeq(request.id, request.tokens or request.done, request.held, growth[request.id])
            for request in running
        ],
        prompt_tokens={request.id: request.prompt for request in active},
        max_tokens={request.id: request.limit for request in active},
        memo=case["waited"],
    )


def decoding(view: ReplicaView, decode: Any) -> list[int]:
    begun = {seq.id for seq in view.prefilling}
    if decode is True:
        return [seq.id for seq in view.running if seq.id not in begun]
    return list(decode or ())


@pytest.mark.parametrize("part", range(4))
def test_short_cuts_come_to_what_the_loops_do(part: int) -> None:
    seen = {"paused": 0, "rejected": 0, "cut": 0, "waited": 0, "admitted": 0}
    for seed in range(part * 1000, (part + 1) * 1000):
        settings, active, case = a_case(random.Random(seed))
        view = view_of(active, case)
        plan, expected = settings.plan(view), step(active, settings, **case)
        assert [*plan.preempt] == expected.paused, (seed, settings)
        gone = set(plan.preempt)
        assert [id_ for id_ in decoding(view, plan.decode) if id_ not in gone] == expected.generation, (seed, settings)
        assert dict(plan.run) == expected.context, (seed, settings)
        # Those behind who is not admitted are refused when they are looked at.
        refused = [id_ for id_, _ in plan.reject]
        assert refused == expected.rejected[: len(refused)], (seed, settings)
        if settings.batch_wait_timeout_iters:
            assert plan.memo == expected.waited, (seed, settings)
        seen["paused"] += bool(plan.preempt)
        seen["rejected"] += bool(plan.reject)
        seen["cut"] += any(id_ in {s.id for s in view.waiting if s.tokens > n} for id_, n in plan.run)
        seen["waited"] += isinstance(plan.memo, int) and plan.memo > case["waited"]
        seen["admitted"] += bool(plan.run)
    assert min(seen.values()) > 10, seen
