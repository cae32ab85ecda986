"""SGLang's own scheduler on a CPU, without a model: which request runs how many tokens in each step, and who is retracted.

    python3 -m venv v && v/bin/pip install torch==2.13.0 transformers triton gguf orjson msgspec pyzmq IPython psutil numpy ...
    v/bin/pip install --no-deps sglang==0.5.23        # its own requirements are those of GPUs; add what its import asks for
    v/bin/python tests/oracle/sglang_scheduler.py < workloads.json > steps.json

Reads a JSON list of workloads (`a_workload` in `test_sglang.py`), writes the release and the steps of each.

Nothing of the scheduling is replaced: `Scheduler.get_next_batch_to_run` and all that it calls (`SchedulePolicy`, `PrefillAdder`,
`ScheduleBatch`, the allocators, the table of requests, the disabled prefix cache, `retract_decode`, the new-token ratio) are the
release's, and so is `SchedulerBatchResultProcessor`, which ends requests and gives memory back. What stands in: the modules
`sgl_kernel` (compiled kernels) and `torchvision` (images), imported and never called; for the forward pass, tokens that say stop
where a request ends; for sockets, metrics and logs, nothing. The loops are those of `event_loop_normal` and `event_loop_overlap`,
written out here with a clock that counts steps.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
import warnings
from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

PLAIN, STOP, VOCABULARY = 7, 9, 1 << 40


class _Name(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Thing,), {})


class _Thing(metaclass=_Name):
    """Whatever an import takes from a module that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Thing,), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of kernels and images that the import of the scheduler asks for and a step of it never uses."""

    names = ("sgl_kernel", "torchvision")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top == "vllm":
            # Found beside it, it would be asked for kernels.
            raise ModuleNotFoundError(name, name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if top in self.names else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load() -> None:
    """Import SGLang without its front door, which patches transformers for models that are not loaded here."""
    warnings.filterwarnings("ignore")
    import transformers.image_utils  # noqa: F401  # asks whether torchvision is there before it seems to be

    sys.meta_path.insert(0, _StandIns())
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("no sglang here")
    package = types.ModuleType("sglang")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["sglang"] = package
    import sglang.srt.managers.scheduler  # noqa: F401

    logging.disable(logging.CRITICAL)


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Quiet:
    """Metrics, sockets and the like: takes everything, answers nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


def a_scheduler(settings: dict[str, Any]) -> Any:
    """`Scheduler`, with what `get_next_batch_to_run` reads of it and no more."""
    import torch
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
    from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    tokens, page = settings["pool_tokens"], settings["page_size"]
    overlap = not settings["disable_overlap_schedule"]
    kv = SimpleNamespace(full_to_swa_index_mapping=None)
    if page == 1:
        allocator = TokenToKVPoolAllocator(tokens, torch.float16, "cpu", kv, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", kv, False)
    seats = min(settings["max_running_requests"], tokens // 2)
    rows = ReqToTokenPool(seats, tokens + page + 8, "cpu", False)
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=not settings.get("id_tokens"), req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=page,
            tree_components=(ComponentType.FULL,),
        )
    )  # fmt: skip
    model = SimpleNamespace(
        is_encoder_decoder=False,
        vocab_size=VOCABULARY,
        is_multimodal=False,
        context_len=10**9,
        hf_eos_token_id={STOP},
        self_opened_think_start_ids=None,
        think_end_ids=None,
        think_end_id=None,
    )
    self = Scheduler.__new__(Scheduler)
    beams = Quiet()
    beams.pending_member_rows = lambda batch: 0
    beams.commit_decode = lambda batch: set()
    chunk = settings["chunked_prefill_size"]
    vars(self).update(
        waiting_queue=[], running_batch=ScheduleBatch(reqs=[], batch_is_full=False), last_batch=None, chunked_req=None,
        _pending_chunked_abort_req=None, dllm_config=None, enable_hisparse=False, hisparse_coordinator=None,
        enable_hierarchical_cache=False, enable_hicache_storage=False, enable_lmcache=False,
        enable_unified_cache_external_linker=False, require_mlp_sync=False, spec_algorithm=SpeculativeAlgorithm.NONE,
        dp_attn_adapter=SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=False: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        ),
        ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch),
        prefill_decode_interval=0, _prefill_decode_interval_remaining=0, prefill_decode_interval_min_bs=0,
        prefill_delayer=None, grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
        enable_priority_preemption=False, enable_priority_scheduling=False, priority_scheduling_preemption_threshold=10,
        is_hybrid_swa=False, min_free_slots_delayer=None, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator,
        tree_cache=tree, beam_coordinator=beams, processed_tokens_counter=0,
        chunked_prefill_size=None if chunk <= 0 else chunk, max_prefill_tokens=settings["max_prefill_tokens"],
        dynamic_chunk_sizer=None, page_size=page, max_running_requests=seats, max_prefill_bs=0,
        is_mixed_chunk=chunk > 0 and settings["enable_mixed_chunk"], enable_lora=False, lora_drainer=None,
        truncation_align_size=None, model_config=model, enable_overlap=overlap, enable_overlap_mlx=False,
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(prefill_aware_swa=False, attn_backend=SimpleNamespace())
        ),
        load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct=0: 0),
        decode_offload_manager=None, metrics_reporter=Quiet(), device="cpu", max_req_len=10**9, max_new_tokens_limit=None,
        max_total_num_tokens=tokens, kv_shard_widening=1, sliding_window_size=None,
        disaggregation_mode=DisaggregationMode.NULL, max_queued_requests=None, default_priority_value=None,
        abort_on_priority_when_disabled=False, enable_skip_finishing_decode=overlap, result_queue=deque(), forward_ct=0,
        new_token_ratio_tracker=NewTokenRatioTracker.from_config(),
        policy=SchedulePolicy(settings["schedule_policy"], tree, False, False, False),
    )  # fmt: skip
    self.metrics_reporter.num_generated_tokens = 0
    self.metrics_reporter.forward_ct_decode = 0
    self.metrics_reporter.enable_metrics = False
    self._prefetch_kvcache = nothing
    self.scheduler_stage_metrics = None
    self.recv_skipper = SchedulerRecvSkipper.maybe_create()
    self.batch_result_processor = SchedulerBatchResultProcessor(
        is_generation=True, disaggregation_mode=DisaggregationMode.NULL, enable_overlap=overlap, enable_overlap_mlx=False,
        model_config=model, token_to_kv_pool_allocator=allocator, tree_cache=tree, hisparse_coordinator=None,
        req_to_token_pool=rows, decode_offload_manager=None, metrics_collector=Quiet(),
        metrics_reporter=self.metrics_reporter, draft_worker=None, model_worker=None, logprob_result_processor=Quiet(),
        output_streamer=Quiet(), beam_coordinator=beams, abort_request=nothing,
    )  # fmt: skip
    return self


def tokens_of(id_: int, request: dict[str, Any], id_tokens: int) -> list[int]:
    """All tokens of prompt and answer, no two of them the same: those that its ids name, and others of its own."""
    prompt, whole = request["prompt"], request["prompt"] + request["output"]
    ids = request["ids"]
    named = min(len(ids) * id_tokens, whole if len(ids) > -(-prompt // id_tokens) else prompt)
    own = (1 << 30) + (id_ << 20)
    return [1000 + ids[at // id_tokens] * id_tokens + at % id_tokens if at < named else own + at for at in range(whole)]


def a_request(id_: int, tokens: list[int], asked: dict[str, Any], *, ignore_eos: bool) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    # A request stops at its last token, which it has but once.
    sampling = SamplingParams(
        max_new_tokens=asked["max_tokens"], temperature=0.0, stop_token_ids=[tokens[-1]], ignore_eos=ignore_eos
    )
    sampling.normalize(None)
    prompt = array("q", tokens[: asked["prompt"]])
    return Req(str(id_), "", prompt, sampling, eos_token_ids={tokens[-1]}, vocab_size=VOCABULARY)


class Loop:
    """`event_loop_normal` and `event_loop_overlap`, over a clock that counts steps."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.settings = workload["settings"]
        self.requests = workload["requests"]
        self.scheduler = a_scheduler(self.settings)
        self.reqs: dict[int, Any] = {}
        id_tokens = self.settings.get("id_tokens", 0)
        # Without a cache prompts share nothing that matters.
        self.tokens = [
            tokens_of(id_, asked, id_tokens)
            if id_tokens
            else [PLAIN] * (asked["prompt"] + asked["output"] - 1) + [STOP]
            for id_, asked in enumerate(self.requests)
        ]
        self.evicted = 0
        self.begun: set[int] = set()
        """Those who have been admitted."""
        tree = self.scheduler.tree_cache
        tree.update_eviction_metrics = self.evict
        self.came = 0
        self.steps: list[dict[str, Any]] = []
        self.retracted: list[int] = []
        add = self.scheduler._add_request_to_queue

        def added(req: Any, is_retracted: bool = False) -> None:
            if is_retracted:
                self.retracted.append(int(req.rid))
            add(req, is_retracted)

        self.scheduler._add_request_to_queue = added

    def evict(self, n: int, start: float) -> None:
        self.evicted += n

    def receive(self, step: int) -> None:
        """`ingest_requests` before step *step*: those that have come by then."""
        scheduler = self.scheduler
        skipper = scheduler.recv_skipper
        if skipper is not None and not skipper.handle(scheduler.last_batch):
            return
        while self.came < len(self.requests) and self.requests[self.came]["step"] <= step:
            id_, asked = self.came, self.requests[self.came]
            self.came += 1
            req = self.reqs[id_] = a_request(id_, self.tokens[id_], asked, ignore_eos=self.settings["ignore_eos"])
            scheduler.init_req_max_new_tokens(req)
            scheduler._add_request_to_queue(req)

    def launch(self, batch: Any, step: int) -> Any:
        """`run_batch` without the model: what the step runs, and the tokens that will come out."""
        import torch

        mode = batch.forward_mode
        extends = [0] * len(batch.reqs) if mode.is_decode() else list(batch.extend_lens)
        decoding = {id(req) for req in batch.decoding_reqs or ()} if not mode.is_decode() else set()
        run = [
            [int(req.rid), tokens]
            for req, tokens in zip(batch.reqs, extends, strict=True)
            if not mode.is_decode() and id(req) not in decoding
        ]
        decodes = [int(req.rid) for req in batch.reqs if mode.is_decode() or id(req) in decoding]
        self.steps.append(
            {
                "step": step,
                "run": run,
                "decode": sorted(decodes),
                "retract": list(self.retracted),
                "free": self.scheduler.token_to_kv_pool_allocator.available_size(),
            }
        )
        tree = self.scheduler.tree_cache
        if not tree.disable:
            step_now = self.steps[-1]
            self.begun.difference_update(self.retracted)
            # Those whose prompts go on have found nothing now.
            starts = (
                {}
                if mode.is_decode()
                else dict(zip((int(req.rid) for req in batch.reqs), batch.prefix_lens, strict=True))
            )
            step_now["found"] = {id_: starts[id_] for id_, _ in run if id_ not in self.begun}
            self.begun.update(id_ for id_, _ in run)
            step_now["evictable"] = tree.evictable_size()
            step_now["evicted"], self.evicted = self.evicted, 0
        self.retracted = []
        self.scheduler.forward_ct += 1
        batch.input_ids = torch.zeros(len(batch.reqs), dtype=torch.int64)
        return batch.forward_mode

    def finish(self, batch: Any, mode: Any) -> None:
        """`process_batch_result`, with the tokens that the model would have made."""
        import torch

        made = []
        for req in batch.reqs:
            output = self.requests[int(req.rid)]["output"]
            tokens = self.tokens[int(req.rid)]
            made.append(tokens[min(len(tokens) - output + len(req.output_ids), len(tokens) - 1)])
        result = SimpleNamespace(
            copy_done=None, auxiliary_host_output=None, routed_experts_output=None, indexer_topk_output=None,
            logits_output=None, next_token_ids=torch.tensor(made), can_run_cuda_graph=False,
            extend_input_len_per_req=None, extend_logprob_start_len_per_req=None, num_correct_drafts=0,
            num_correct_drafts_per_req_cpu=None,
            get_num_generated_tokens=lambda size: size, customized_info=None, grammar_advanced=False,
        )  # fmt: skip
        processor = self.scheduler.batch_result_processor
        if mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            processor.process_batch_result_prefill(batch, result)

    def next_batch(self) -> Any:
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        return plan.batch_to_run

    def idle(self, step: int) -> int:
        """`on_idle`: the ratio starts anew; the clock goes to whoever comes next."""
        self.scheduler.new_token_ratio_tracker.reset()
        if self.came < len(self.requests):
            return max(step, self.requests[self.came]["step"])
        return -1

    def normal(self) -> None:
        scheduler, step = self.scheduler, 0
        while True:
            self.receive(step)
            batch = self.next_batch()
            if batch:
                mode = self.launch(batch, step)
                self.finish(batch, mode)
                step += 1
            else:
                step = self.idle(step)
                if step < 0:
                    return
            scheduler.last_batch = batch

    def overlap(self) -> None:
        """A batch is chosen when the one before it starts, and those who have come by then are known."""
        scheduler, step = self.scheduler, 0
        queue = scheduler.result_queue
        while True:
            last = scheduler.last_batch
            # The latest batch runs from step - 1 to step.
            self.receive(step - 1 if last else step)
            batch = self.next_batch()
            if batch:
                queue.append((batch.copy(), self.launch(batch, step)))
                step += 1
            if last:
                self.finish(*queue.popleft())
            elif not batch:
                step = self.idle(step)
                if step < 0:
                    return
            scheduler.last_batch = batch


def run(workload: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt import runtime_context

    settings = workload["settings"]
    fields = {
        "chunked_prefill_size": settings["chunked_prefill_size"],
        "max_prefill_tokens": settings["max_prefill_tokens"],
        "prefill_max_requests": settings["prefill_max_requests"],
        "schedule_policy": settings["schedule_policy"],
        "schedule_conservativeness": settings["schedule_conservativeness"],
        "scheduler_recv_interval": settings["scheduler_recv_interval"],
        "disable_overlap_schedule": settings["disable_overlap_schedule"],
        "page_size": settings["page_size"],
        "disable_radix_cache": not settings.get("id_tokens"),
        "attention_backend": "torch_native",
        "pp_max_micro_batch_size": min(settings["max_running_requests"], settings["pool_tokens"] // 2),
    }
    with runtime_context.get_context().override_server_args(**fields):
        loop = Loop(workload)
        try:
            loop.normal() if settings["disable_overlap_schedule"] else loop.overlap()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return {"steps": loop.steps, "died": str(error).splitlines()[0]}
    waiting = loop.scheduler.waiting_queue
    return {"steps": loop.steps, "died": "stalled" if waiting else None}


def main() -> None:
    load()
    from importlib.metadata import version

    workloads = json.load(sys.stdin)
    results = [run(workload) for workload in workloads]
    json.dump({"release": version("sglang"), "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
