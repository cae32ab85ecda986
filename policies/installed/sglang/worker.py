"""Drives the scheduler of the SGLang beside this interpreter, on a CPU and without a model; `policies.installed.lines` runs it.

Nothing of the scheduling is replaced: `Scheduler.get_next_batch_to_run` and all that it calls (`SchedulePolicy`, `PrefillAdder`,
`ScheduleBatch`, the allocators, the table of requests, the prefix cache, `retract_decode`, the new-token ratio) are the release's,
and so is `SchedulerBatchResultProcessor`, which ends requests and gives memory back. What stands in: the modules `sgl_kernel`
(compiled kernels) and `torchvision` (images), imported and never called; for the forward pass, the tokens that the simulation says;
for sockets, metrics and logs, nothing. Polls, plans and results follow each other as in `event_loop_normal` and
`event_loop_overlap`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from array import array
from collections import deque
from types import SimpleNamespace

from policies.installed.lines import PLAIN, STOP, Found, Unfit, name_of, text

TITLE = "SGLang"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
VOCABULARY = 1 << 60

NEEDED = {
    "sglang.srt.disaggregation.utils": ("DisaggregationMode",),
    "sglang.srt.managers.io_struct": ("AbortReq",),
    "sglang.srt.managers.schedule_batch": ("Req", "ScheduleBatch"),
    "sglang.srt.managers.schedule_policy": ("SchedulePolicy",),
    "sglang.srt.managers.scheduler": ("Scheduler",),
    "sglang.srt.managers.scheduler_components.batch_result_processor": ("SchedulerBatchResultProcessor",),
    "sglang.srt.managers.scheduler_components.new_token_ratio_tracker": ("NewTokenRatioTracker",),
    "sglang.srt.managers.scheduler_components.recv_skipper": ("SchedulerRecvSkipper",),
    "sglang.srt.mem_cache.allocator.paged": ("PagedTokenToKVPoolAllocator",),
    "sglang.srt.mem_cache.allocator.token": ("TokenToKVPoolAllocator",),
    "sglang.srt.mem_cache.cache_init_params": ("CacheInitParams",),
    "sglang.srt.mem_cache.memory_pool": ("ReqToTokenPool",),
    "sglang.srt.mem_cache.unified_radix_cache": ("UnifiedRadixCache",),
    "sglang.srt.runtime_context": ("get_context",),
    "sglang.srt.sampling.sampling_params": ("SamplingParams",),
    "sglang.srt.server_args": ("ServerArgs",),
    "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm",),
}
"""Names of the release that driving it takes, by module."""

OPTIONS = (
    "disable_priority_preemption", "enable_priority_scheduling", "priority_scheduling_preemption_threshold",
    "radix_eviction_policy", "retraction_policy", "schedule_low_priority_values_first",
)  # fmt: skip
"""Server arguments that reach the scheduler as it is driven here, beside those that the simulation has a setting for."""


class _Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Thing,), {})


class _Thing(metaclass=_Name):
    """Whatever an import takes from a module that is not here."""

    def __init__(self, *args, **kwargs):
        pass


class _Absent(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Thing,), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of kernels and images that the import of the scheduler asks for and a step of it never uses."""

    names = ("sgl_kernel", "torchvision")

    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top == "vllm":
            # Found beside it, it would be asked for kernels.
            raise ModuleNotFoundError(name, name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if top in self.names else None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def nothing(*args, **kwargs):
    return None


class Quiet:
    """Metrics, sockets and the like: takes everything, answers nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


class Release(Found):
    """The classes of the SGLang that is installed here."""

    def __init__(self):
        super().__init__(TITLE, "sglang")
        warnings.filterwarnings("ignore")
        if importlib.util.find_spec("transformers") is not None:
            # Asks whether torchvision is there, before it seems to be.
            self.module("transformers.image_utils")
        sys.meta_path.insert(0, _StandIns())
        # Without its front door, which patches transformers for models that are not loaded here.
        found = importlib.util.find_spec("sglang")
        package = types.ModuleType("sglang")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["sglang"] = package
        self.find(NEEDED)
        logging.disable(logging.CRITICAL)
        for name, method, arguments in (
            ("Scheduler", "get_next_batch_to_run", ("running_batch", "last_batch")),
            ("Scheduler", "init_req_max_new_tokens", ("req",)),
            ("Scheduler", "_add_request_to_queue", ("req", "is_retracted")),
            ("Scheduler", "abort_request", ("recv_req",)),
            ("SchedulerBatchResultProcessor", "process_batch_result_decode", ("batch", "result")),
            ("SchedulerBatchResultProcessor", "process_batch_result_prefill", ("batch", "result")),
        ):
            self.takes(name, method, arguments)
        paged = self.module("sglang.srt.mem_cache.allocator.paged")
        if not hasattr(paged, "alloc_decode_naive"):
            # Of releases that allocate pages by kernels of a GPU alone, with the same arithmetic beside them for tests.
            paged.alloc_extend_kernel = _Pages(paged.alloc_extend_naive, decode=False)
            paged.alloc_decode_kernel = _Pages(paged.alloc_extend_naive, decode=True)
        self.context = self.get_context()
        self._published = None
        self._by = None

    def publish(self, arguments):
        """Have the release read these server *arguments* from now on; several engines in turn have their own."""
        if self._by is not arguments:
            if self._published is not None:
                self._published.restore()
            self._published = self.context.override_server_args(**arguments)
            self._published.install()
            self._by = arguments

    def cache(self, disable, params):
        """The prefix cache, or what stands where there is none."""
        if disable and importlib.util.find_spec("sglang.srt.mem_cache.chunk_cache") is not None:
            # Of releases in which a disabled tree is a class of its own.
            return self.module("sglang.srt.mem_cache.chunk_cache").ChunkCache(params)
        return self.UnifiedRadixCache(params)


class _Pages:
    """Called as a kernel that allocates pages for tokens of prompts, or for one token of each decode."""

    def __init__(self, allocate, *, decode):
        self.allocate, self.decode = allocate, decode

    def __getitem__(self, grid):
        return self.decode_pages if self.decode else self.prompt_pages

    def prompt_pages(self, prefix_lens, seq_lens, last_loc, free_pages, out_indices, width, page_size):
        self.allocate(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)

    def decode_pages(self, seq_lens, last_loc, free_pages, out_indices, width, page_size):
        self.prompt_pages(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, width, page_size)


def arguments_of(release, asked):
    """Server arguments of the release for an engine."""
    options = asked["options"]
    release.has_settings("ServerArgs", options)
    for name in options:
        if name not in OPTIONS:
            raise Unfit(
                f"{release.name}: {name} does not reach the scheduler where it is driven without a model; leave it out "
                f"(options are {', '.join(OPTIONS)})"
            )
    own = (
        "chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests", "schedule_policy", "schedule_conservativeness",
        "scheduler_recv_interval", "disable_overlap_schedule", "enable_mixed_chunk", "prefill_decode_interval",
    )  # fmt: skip
    later = {"prefill_decode_interval_min_bs": asked["prefill_decode_interval_min_bs"]}
    later = {name: value for name, value in later.items() if value}
    release.has_settings("ServerArgs", later)
    return {
        **options,
        **{name: asked[name] for name in own},
        **later,
        "page_size": asked["block_tokens"],
        "disable_radix_cache": not asked["prefix_cache"],
        "attention_backend": "torch_native",
        "pp_max_micro_batch_size": asked["seats"],
    }


class Grammars:
    """Stands where the release compiles grammars, for as long as the simulation says."""

    def __init__(self):
        self.waiting, self.ready = {}, []

    def has_waiting_grammars(self):
        return bool(self.waiting or self.ready)

    def get_ready_grammar_requests(self):
        found, self.ready = self.ready, []
        return found

    def abort_requests(self, recv_req):
        self.waiting.pop(recv_req.rid, None)
        self.ready = [req for req in self.ready if req.rid != recv_req.rid]


def heard(kind):
    """The scheduler class *kind* of the release, derived so that it reports the requests that it retracts."""

    class Heard(kind):
        def hear(self, req):
            self._add_request_to_queue(req)

        def _add_request_to_queue(self, req, is_retracted=False):
            if is_retracted:
                # Since the last plan.
                self.retracted.append(int(req.rid))
            super()._add_request_to_queue(req, is_retracted)

        def _prefetch_kvcache(self, *args, **kwargs):
            pass

        @property
        def rounds_left(self):
            """Rounds in which prompts are deferred yet."""
            return self._prefill_decode_interval_remaining

    return Heard


def adapters_of(release, max_loras):
    """`LoRAManager`, with what `validate_lora_batch` reads of it and no more; None where there are no adapters."""
    if not max_loras:
        return None
    kind = release.module("sglang.srt.lora.lora_manager").LoRAManager
    manager = kind.__new__(kind)
    manager.max_loras_per_batch, manager.num_pinned_loras = max_loras, 0
    return manager


def scheduler_of(release, asked):
    """`Scheduler`, with what `get_next_batch_to_run` reads of it and no more."""
    import torch

    tokens, page = asked["kv_blocks"] * asked["block_tokens"], asked["block_tokens"]
    overlap, options = not asked["disable_overlap_schedule"], asked["options"]
    kv = SimpleNamespace(full_to_swa_index_mapping=None)
    if page == 1:
        allocator = release.TokenToKVPoolAllocator(tokens, torch.float16, "cpu", kv, False)
    else:
        allocator = release.PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", kv, False)
    rows = release.ReqToTokenPool(asked["seats"], tokens + page + 8, "cpu", False)
    params = {
        "disable": not asked["prefix_cache"], "req_to_token_pool": rows, "token_to_kv_pool_allocator": allocator, "page_size": page,
    }  # fmt: skip
    components = importlib.util.find_spec("sglang.srt.mem_cache.unified_cache.components")
    where = "unified_cache.components" if components is not None else "unified_cache_components"
    params["tree_components"] = (release.module(f"sglang.srt.mem_cache.{where}").ComponentType.FULL,)
    if "radix_eviction_policy" in options:
        params["eviction_policy"] = options["radix_eviction_policy"]
    tree = release.cache(params["disable"], release.made("CacheInitParams", params, params))
    model = SimpleNamespace(
        is_encoder_decoder=False,
        vocab_size=VOCABULARY,
        is_multimodal=False,
        context_len=asked["max_model_len"],
        hf_eos_token_id={STOP},
        self_opened_think_start_ids=None,
        think_end_ids=None,
        think_end_id=None,
    )
    kind = heard(release.Scheduler)
    scheduler = kind.__new__(kind)
    beams = Quiet()
    beams.pending_member_rows = lambda batch: 0
    beams.commit_decode = lambda batch: set()
    chunk, null = asked["chunked_prefill_size"], release.DisaggregationMode.NULL
    by_priority = options.get("enable_priority_scheduling", False)
    low_first = options.get("schedule_low_priority_values_first", False)
    # As tp_worker.py has it.
    longest = min(asked["max_model_len"] - 1, tokens - 1)
    vars(scheduler).update(
        waiting_queue=[], retracted=[], running_batch=release.ScheduleBatch(reqs=[], batch_is_full=False), last_batch=None,
        chunked_req=None,
        _pending_chunked_abort_req=None, dllm_config=None, enable_hisparse=False, hisparse_coordinator=None,
        enable_hierarchical_cache=False, enable_hicache_storage=False, enable_lmcache=False, enable_fpm=False,
        enable_unified_cache_external_linker=False, require_mlp_sync=False, spec_algorithm=release.SpeculativeAlgorithm.NONE,
        dp_attn_adapter=SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=False: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        ),
        ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch),
        prefill_decode_interval=asked["prefill_decode_interval"], _prefill_decode_interval_remaining=0,
        prefill_decode_interval_min_bs=asked["prefill_decode_interval_min_bs"],
        prefill_delayer=None, grammar_manager=Grammars(), enable_priority_scheduling=by_priority,
        enable_priority_preemption=by_priority and not options.get("disable_priority_preemption", False),
        priority_scheduling_preemption_threshold=options.get("priority_scheduling_preemption_threshold", 10),
        schedule_low_priority_values_first=low_first,
        is_hybrid_swa=False, min_free_slots_delayer=None, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator,
        tree_cache=tree, beam_coordinator=beams, processed_tokens_counter=0,
        chunked_prefill_size=None if chunk <= 0 else chunk, max_prefill_tokens=asked["max_prefill_tokens"],
        dynamic_chunk_sizer=None, page_size=page, max_running_requests=asked["seats"], max_prefill_bs=0,
        is_mixed_chunk=chunk > 0 and asked["enable_mixed_chunk"], enable_lora=asked["max_loras"] > 0, lora_drainer=None,
        enable_lora_overlap_loading=False, max_loras_per_batch=asked["max_loras"],
        truncation_align_size=None, model_config=model, enable_overlap=overlap, enable_overlap_mlx=False,
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(
                prefill_aware_swa=False, attn_backend=SimpleNamespace(), lora_manager=adapters_of(release, asked["max_loras"])
            )
        ),
        load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct=0: 0),
        decode_offload_manager=None, metrics_reporter=Quiet(), device="cpu", max_req_len=longest, max_new_tokens_limit=None,
        max_total_num_tokens=tokens, kv_shard_widening=1, sliding_window_size=None, mm_receiver=None, send_abort_output=nothing,
        disaggregation_mode=null, max_queued_requests=None, default_priority_value=None,
        abort_on_priority_when_disabled=False, enable_skip_finishing_decode=overlap, result_queue=deque(), forward_ct=0,
        new_token_ratio_tracker=release.NewTokenRatioTracker.from_config(),
        policy=release.SchedulePolicy(asked["schedule_policy"], tree, False, by_priority, low_first),
    )  # fmt: skip
    scheduler.metrics_reporter.num_generated_tokens = 0
    scheduler.metrics_reporter.forward_ct_decode = 0
    scheduler.metrics_reporter.enable_metrics = False
    scheduler.scheduler_stage_metrics = None
    scheduler.recv_skipper = release.SchedulerRecvSkipper.maybe_create()
    scheduler.batch_result_processor = release.made(
        "SchedulerBatchResultProcessor",
        {
            "is_generation": True, "disaggregation_mode": null, "enable_overlap": overlap, "enable_overlap_mlx": False,
            "model_config": model, "token_to_kv_pool_allocator": allocator, "tree_cache": tree, "hisparse_coordinator": None,
            "req_to_token_pool": rows, "decode_offload_manager": None, "metrics_collector": Quiet(),
            "metrics_reporter": scheduler.metrics_reporter, "draft_worker": None, "model_worker": None,
            "logprob_result_processor": Quiet(), "output_streamer": Quiet(), "beam_coordinator": beams, "abort_request": nothing,
        },
    )  # fmt: skip
    return scheduler


class Engine:
    """A scheduler of the release, with the requests that it has been given."""

    def __init__(self, release, asked):
        if asked["k"]:
            raise Unfit(f"{release.name} is driven without speculation; leave decoding out")
        self.release, self.page = release, asked["block_tokens"]
        self.arguments = arguments_of(release, asked)
        self.ignore_eos, self.caches = asked["ignore_eos"], asked["prefix_cache"]
        self.by_priority = asked["options"].get("enable_priority_scheduling", False)
        release.publish(self.arguments)
        self.scheduler = scheduler_of(release, asked)
        self.pool = asked["kv_blocks"] * self.page
        self.evicted = 0
        self.scheduler.tree_cache.update_eviction_metrics = self._evict
        self.told, self.begun = {}, set()
        self.inbox = []
        """Requests that the scheduler has not polled yet."""

    def _evict(self, n, start):
        self.evicted += n

    # Requests.

    def add(self, told):
        self.told[told["id"]] = told
        release, whole = self.release, told["prompt"] + told["output"]
        told["tokens"] = (
            [text(told, place, self.page) for place in range(whole)] if self.caches else [PLAIN] * (whole - 1) + [STOP]
        )
        # A request stops at its last token, which it has but once.
        last = told["tokens"][-1]
        sampling = release.SamplingParams(
            max_new_tokens=told["max_tokens"], temperature=0.0, stop_token_ids=[last], ignore_eos=self.ignore_eos
        )
        sampling.normalize(None)
        req = release.Req(
            name_of(told["id"]), "", array("q", told["tokens"][: told["prompt"]]), sampling, eos_token_ids={last},
            vocab_size=VOCABULARY, priority=told["priority"] if self.by_priority else None,
            lora_id=f"adapter-{told['adapter']}" if told["adapter"] else None,
        )  # fmt: skip
        self.inbox.append(req)

    def poll(self):
        """`ingest_requests`: the scheduler hears of those that have come, where it listens."""
        scheduler = self.scheduler
        skipper = scheduler.recv_skipper
        if skipper is not None and not skipper.handle(scheduler.last_batch):
            return
        for req in self.inbox:
            scheduler.init_req_max_new_tokens(req)
            if self.told[int(req.rid)].get("grammar"):
                scheduler.grammar_manager.waiting[req.rid] = req
            else:
                scheduler.hear(req)
        self.inbox = []

    def compiled(self, id_):
        grammars = self.scheduler.grammar_manager
        req = grammars.waiting.pop(name_of(id_), None)
        if req is not None:
            grammars.ready.append(req)
        elif id_ in self.told:
            # The scheduler has not heard of it yet.
            self.told[id_]["grammar"] = False

    def abort(self, id_):
        self.inbox = [req for req in self.inbox if req.rid != name_of(id_)]
        self.scheduler.abort_request(self.release.AbortReq(rid=name_of(id_)))

    # Steps.

    def plan(self):
        """The next batch; None where there is none, and nothing to be heard of."""
        scheduler = self.scheduler
        while True:
            self.poll()
            found = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = found.running_batch, found.batch_to_run
            last, scheduler.last_batch = scheduler.last_batch, batch
            if batch:
                return self.launched(batch)
            if scheduler.result_queue:
                # What is in flight may make room.
                return None
            if last is None or not scheduler.enable_overlap:
                if not scheduler.waiting_queue:
                    # `on_idle`.
                    scheduler.new_token_ratio_tracker.reset()
                waits = scheduler.prefill_decode_interval and scheduler.rounds_left
                if not self.inbox and not waits:
                    return None

    def launched(self, batch):
        """`run_batch` without the model: what the step runs."""
        import torch

        scheduler = self.scheduler
        decodes = batch.forward_mode.is_decode()
        beside = set() if decodes else {id(req) for req in batch.decoding_reqs or ()}
        run, found, prompts = [], [], 0
        self.begun.difference_update(scheduler.retracted)
        lengths = [1] * len(batch.reqs) if decodes else batch.extend_lens
        starts = [0] * len(batch.reqs) if decodes else batch.prefix_lens
        for req, tokens, start in zip(batch.reqs, lengths, starts, strict=True):
            id_ = int(req.rid)
            prompt = not decodes and id(req) not in beside
            run.append([id_, tokens if prompt else 1, 0])
            prompts += prompt
            if prompt and id_ not in self.begun:
                self.begun.add(id_)
                found.append([id_, start])
        kept = scheduler.tree_cache.evictable_size()
        held = self.pool - scheduler.token_to_kv_pool_allocator.available_size() - kept
        plan = {
            "run": run,
            "found": found,
            "preempted": scheduler.retracted,
            "held": held // self.page,
            "evicted": self.evicted // self.page,
            "skips_drafts": False,
            # For comparisons: the number of prompts, which come first in the run, and the KV blocks that are cached and not in use.
            "prompts": prompts,
            "kept": kept // self.page,
        }
        scheduler.retracted, self.evicted = [], 0
        scheduler.forward_ct += 1
        batch.input_ids = torch.zeros(len(batch.reqs), dtype=torch.int64)
        scheduler.result_queue.append((batch.copy() if scheduler.enable_overlap else batch, decodes))
        return plan

    def finish(self):
        """Call the release's `process_batch_result` for the oldest batch, with made-up output tokens. Return the tokens that each
        request emitted, and the requests that have finished."""
        import torch

        batch, decodes = self.scheduler.result_queue.popleft()
        made, kept = [], []
        for req in batch.reqs:
            told = self.told.get(int(req.rid))
            at = 0 if told is None else min(told["prompt"] + len(req.output_ids), len(told["tokens"]) - 1)
            made.append(PLAIN if told is None else told["tokens"][at])
            if not req.finished():
                kept.append((req, len(req.output_ids)))
        result = SimpleNamespace(
            copy_done=None, auxiliary_host_output=None, routed_experts_output=None, indexer_topk_output=None,
            logits_output=None, next_token_ids=torch.tensor(made), can_run_cuda_graph=False,
            extend_input_len_per_req=None, extend_logprob_start_len_per_req=None, num_correct_drafts=0,
            num_correct_drafts_per_req_cpu=None,
            get_num_generated_tokens=lambda size: size, customized_info=None, grammar_advanced=False,
        )  # fmt: skip
        processor = self.scheduler.batch_result_processor
        (processor.process_batch_result_decode if decodes else processor.process_batch_result_prefill)(batch, result)
        emitted = [[int(req.rid), len(req.output_ids) - had] for req, had in kept if len(req.output_ids) > had]
        ended = [int(req.rid) for req, _ in kept if req.finished()]
        for id_ in ended:
            self.told.pop(id_, None)
            self.begun.discard(id_)
        return emitted, ended

    def step(self, told):
        self.release.publish(self.arguments)
        emitted, ended = self.finish() if told["done"] is not None else ([], [])
        for each in told["add"]:
            self.add(each)
        for id_ in told["ready"]:
            self.compiled(id_)
        for id_ in told["abort"]:
            self.abort(id_)
        plan = self.plan()
        return {"emitted": emitted, "ended": ended, "plan": plan, "has_requests": plan is not None}
