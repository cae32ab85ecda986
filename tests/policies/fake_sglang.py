"""The names of an SGLang by which its scheduler is driven, made up: prompts first, whole, no end of memory, no prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Mode:
    def __init__(self, decodes: bool) -> None:
        self._decodes = decodes

    def is_decode(self) -> bool:
        return self._decodes


class Req:
    def __init__(self, rid: str, text: str, ids: Any, sampling: Any, **rest: Any) -> None:
        self.rid, self.ids, self.sampling = rid, ids, sampling
        self.output_ids: list[int] = []
        self.aborted = False

    def finished(self) -> bool:
        return self.aborted or bool(self.output_ids and self.output_ids[-1] in self.sampling.stop_token_ids)


@dataclass
class ScheduleBatch:
    reqs: list[Req]
    batch_is_full: bool = False
    forward_mode: Mode = field(default_factory=lambda: Mode(True))
    extend_lens: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    decoding_reqs: Any = None

    def copy(self) -> ScheduleBatch:
        return ScheduleBatch(list(self.reqs), False, self.forward_mode, self.extend_lens, self.prefix_lens)


class Scheduler:
    waiting_queue: list[Req]
    grammar_manager: Any
    max_running_requests: int

    def init_req_max_new_tokens(self, req: Req) -> None:
        assert req.sampling.max_new_tokens > 0

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)

    def abort_request(self, recv_req: Any) -> None:
        self.waiting_queue = [req for req in self.waiting_queue if req.rid != recv_req.rid]
        for req in self.running_batch.reqs:
            req.aborted = req.aborted or req.rid == recv_req.rid

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> Any:
        self.waiting_queue += self.grammar_manager.get_ready_grammar_requests()
        running = [req for req in running_batch.reqs if not req.finished()]
        come = self.waiting_queue[: self.max_running_requests - len(running)]
        self.waiting_queue = self.waiting_queue[len(come) :]
        batch = None
        if come:
            lengths = [len(req.ids) for req in come]
            batch = ScheduleBatch(come, False, Mode(False), lengths, [0] * len(come))
        elif running:
            batch = ScheduleBatch(running)
        return SimpleNamespace(batch_to_run=batch, running_batch=ScheduleBatch([*running, *come]))


@dataclass
class SchedulerBatchResultProcessor:
    is_generation: bool

    def process_batch_result_decode(self, batch: ScheduleBatch, result: Any) -> None:
        for req, token in zip(batch.reqs, result.next_token_ids, strict=True):
            if not req.finished():
                req.output_ids.append(token)

    process_batch_result_prefill = process_batch_result_decode


class Pool:
    def __init__(self, tokens: int, *rest: Any) -> None:
        self.tokens = tokens

    def available_size(self) -> int:
        return self.tokens


PagedTokenToKVPoolAllocator = TokenToKVPoolAllocator = ReqToTokenPool = Pool


class SamplingParams(SimpleNamespace):
    def normalize(self, tokenizer: Any) -> None: ...


class AbortReq(SimpleNamespace):
    rid: str


class CacheInitParams(SimpleNamespace):
    def __init__(
        self,
        disable: Any,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: Any,
        tree_components: Any,
    ):
        pass


class UnifiedRadixCache:
    def __init__(self, params: Any) -> None: ...

    def evictable_size(self) -> int:
        return 0


class NewTokenRatioTracker:
    @classmethod
    def from_config(cls) -> NewTokenRatioTracker:
        return cls()

    def reset(self) -> None: ...


class SchedulerRecvSkipper:
    @staticmethod
    def maybe_create() -> None:
        return None


class SchedulePolicy:
    def __init__(self, *settings: Any) -> None: ...


@dataclass
class ServerArgs:
    retraction_policy: str = "length"
    tp_size: int = 1


class Context:
    def override_server_args(self, **fields: Any) -> Any:
        return SimpleNamespace(install=lambda: None, restore=lambda: None)


def get_context() -> Context:
    return Context()


def alloc_decode_naive() -> None: ...


DisaggregationMode = SimpleNamespace(NULL=0)
SpeculativeAlgorithm = SimpleNamespace(NONE=0)
ComponentType = SimpleNamespace(FULL=0)
