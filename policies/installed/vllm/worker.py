"""Drives the scheduler of the vLLM beside this interpreter, on a CPU and without a model; `policies.installed.lines` runs it."""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from concurrent.futures import Future
from importlib import import_module

from policies.installed.lines import PLAIN, STOP, Found, Unfit, name_of, text

TITLE = "vLLM"
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "torch_dtype": "bfloat16",
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
"""The least of a model that the scheduler's configuration asks for."""

NEEDED = {
    "vllm.config": ("CacheConfig", "DeviceConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig"),
    "vllm.sampling_params": ("SamplingParams",),
    "vllm.utils.hashing": ("sha256",),
    "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher", "init_none_hash"),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.kv_cache_interface": ("FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec"),
    "vllm.v1.outputs": ("DraftTokenIds", "ModelRunnerOutput"),
    "vllm.v1.request": ("Request", "RequestStatus"),
    "vllm.v1.structured_output": ("StructuredOutputManager",),
}
"""Names of the release that driving it takes, by module."""


EVICTS = "_maybe_evict_cached_block"
"""The method of the release's pool by which evictions are counted; where it has another they are not."""


class Release(Found):
    """The classes of the vLLM that is installed here."""

    def __init__(self):
        super().__init__(TITLE, "vllm")
        self.find(NEEDED)
        for method, arguments in (
            ("schedule", ()), ("update_from_output", ("scheduler_output", "model_runner_output")), ("add_request", ("request",)),
            ("finish_requests", ("request_ids", "finished_status")), ("has_requests", ()), ("has_unfinished_requests", ()),
            ("update_draft_token_ids", ("draft_token_ids",)),
        ):  # fmt: skip
            self.takes("Scheduler", method, arguments)
        self.folder = tempfile.TemporaryDirectory()
        with open(os.path.join(self.folder.name, "config.json"), "w") as file:
            json.dump(MODEL, file)


class Drafting:
    """Stands where the configuration of speculation would, for the one property that planning reads of it."""

    def __init__(self, slots):
        self.max_num_new_slots_for_drafting = slots


class Engine:
    """A scheduler of the release, with the requests that it has been given."""

    def __init__(self, release, asked):
        import torch

        self.release = release
        self.k, self.ahead, self.caches = asked["k"], asked["async_scheduling"], asked["prefix_cache"]
        self.block_tokens = block = asked["block_tokens"]
        options = asked["options"]
        own = {
            "max_num_seqs": asked["max_num_seqs"], "max_num_batched_tokens": asked["max_num_batched_tokens"],
            "max_model_len": asked["max_model_len"], "is_encoder_decoder": False, "async_scheduling": self.ahead,
        }  # fmt: skip
        blocks = asked["kv_blocks"] + 1  # The release counts the null block, which no sequence gets.
        model = release.ModelConfig(
            model=release.folder.name, skip_tokenizer_init=True, dtype="float16", max_model_len=asked["max_model_len"]
        )
        given = {
            "model_config": model,
            "scheduler_config": release.made("SchedulerConfig", {**options, **own}, options),
            "cache_config": release.CacheConfig(block_size=block, enable_prefix_caching=self.caches),
            "device_config": release.DeviceConfig("cpu"),
            "parallel_config": release.ParallelConfig(),
        }
        config = release.VllmConfig(**given)
        if asked["max_loras"]:
            config.lora_config = import_module("vllm.config").LoRAConfig(max_loras=asked["max_loras"])
        config.cache_config.block_size = block
        config.cache_config.num_gpu_blocks = blocks
        if asked["reads_target"]:
            config.speculative_config = self.drafter(self.k)
        spec = release.FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = release.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[release.KVCacheGroupSpec(["layer"], spec)]
        )
        self.scheduler = release.made(
            "AsyncScheduler" if self.ahead else "Scheduler",
            {
                "vllm_config": config, "kv_cache_config": cache, "block_size": block, "log_stats": False,
                "structured_output_manager": release.StructuredOutputManager(config),
            },
            ("vllm_config", "kv_cache_config", "structured_output_manager"),
        )  # fmt: skip
        if self.k:
            # What a configuration of speculation would set: without a draft model there is none to give.
            self.set("num_spec_tokens", self.k)
            self.set("num_lookahead_tokens", asked["lookahead_tokens"])
            config.speculative_config = Drafting(asked["draft_slots"])
            if hasattr(self.scheduler, "can_skip_drafts"):
                # As with the model runner that servers have by default.
                self.scheduler.can_skip_drafts = asked["reads_target"]
            if self.ahead:
                self.set("_spec_token_placeholders", [-1] * self.k)
        self.hasher = None
        if self.caches:
            release.init_none_hash(release.sha256)
            # Tokens behind a block that its hash covers, in releases that have such.
            behind = getattr(self.scheduler, "num_hash_lookahead_tokens", 0)
            self.hasher = release.get_request_block_hasher(block, release.sha256, *([behind] if behind else []))
        self.evicted = 0
        self.pool = self.scheduler.kv_cache_manager.block_pool
        evict = getattr(self.pool, EVICTS, None)
        if evict is not None:

            def counted(block):
                found = evict(block)
                self.evicted += bool(found)
                return found

            setattr(self.pool, EVICTS, counted)
        self.told, self.begun, self.ended = {}, set(), {}
        self.in_flight = deque()

    def drafter(self, k):
        """A drafter that reads the target's states, whose model the configuration would look for."""
        made = import_module("vllm.config").SpeculativeConfig(method="ngram", num_speculative_tokens=k)
        made.method = "eagle"
        return made

    def set(self, name, value):
        if not hasattr(self.scheduler, name):
            raise Unfit(f"{self.release.name}: its scheduler has no {name}, by which it is told of speculation")
        setattr(self.scheduler, name, value)

    # Requests.

    def add(self, told):
        release, id_, prompt = self.release, told["id"], told["prompt"]
        self.told[id_] = told
        told["stop"] = text(told, prompt + told["output"] - 1, self.block_tokens) if self.caches else STOP
        sampling = {"max_tokens": told["max_tokens"], "stop_token_ids": [told["stop"]]}
        if told.get("grammar"):
            sampling["structured_outputs"] = import_module("vllm.sampling_params").StructuredOutputsParams(
                json_object=True
            )
        request = release.Request(
            request_id=name_of(id_),
            prompt_token_ids=[text(told, i, self.block_tokens) for i in range(prompt)]
            if self.caches
            else [PLAIN] * prompt,
            sampling_params=release.SamplingParams(**sampling),
            pooling_params=None,
            priority=told["priority"],
            arrival_time=told["arrival_s"],
            block_hasher=self.hasher,
            lora_request=self.adapter(told["adapter"]) if told.get("adapter") else None,
        )
        if told.get("grammar"):
            # Compiled elsewhere, for as long as the simulation says.
            request.structured_output_request.grammar = Future()
        self.scheduler.add_request(request)

    def adapter(self, number):
        return import_module("vllm.lora.request").LoRARequest(f"adapter-{number}", number, f"/adapter-{number}")

    def compiled(self, id_):
        request = self.scheduler.requests.get(name_of(id_))
        if request is not None and request.structured_output_request is not None:
            request.structured_output_request.grammar = True

    def abort(self, id_):
        if name_of(id_) in self.scheduler.requests:
            self.scheduler.finish_requests(name_of(id_), self.release.RequestStatus.FINISHED_ABORTED)
        self.forget(id_)

    def forget(self, id_):
        self.told.pop(id_, None)
        self.begun.discard(id_)

    # Steps.

    def plan(self):
        evicted = self.evicted
        planned = self.scheduler.schedule()
        found, run, drafts = [], [], planned.scheduled_spec_decode_tokens
        preempted = sorted(int(id_) for id_ in planned.preempted_req_ids or ())
        self.begun.difference_update(preempted)
        for name, tokens in planned.num_scheduled_tokens.items():
            id_, request = int(name), self.scheduler.requests[name]
            if id_ not in self.begun:
                self.begun.add(id_)
                found.append([id_, request.num_computed_tokens - tokens])
                # Masks are the model runner's, and it is not here.
                request.structured_output_request = None
            run.append([id_, tokens, len(drafts.get(name) or ())])
        self.in_flight.append(planned)
        held = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
        return {
            "run": run, "found": found, "preempted": preempted, "held": held, "evicted": self.evicted - evicted,
            "skips_drafts": bool(getattr(planned, "skip_drafts", False)),
        }  # fmt: skip

    def finish(self, done):
        """The oldest plan has run; *done*: pairs of a request and the tokens that it would emit. What each has emitted."""
        planned, may = self.in_flight.popleft(), dict(done)
        names, tokens = list(planned.num_scheduled_tokens), []
        for name in names:
            id_, request = int(name), self.scheduler.requests.get(name)
            told = self.told.get(id_)
            emits = may.get(id_, 0)
            if request is None or told is None:
                tokens.append([PLAIN] * emits)
                continue
            before = request.num_output_tokens
            said = [
                text(told, told["prompt"] + before + i, self.block_tokens) if self.caches else PLAIN
                for i in range(emits)
            ]
            last = told["output"] - before - 1
            tokens.append([told["stop"] if i == last else token for i, token in enumerate(said)])
        had = {name: len(request.output_token_ids) for name, request in self.of(names)}
        kept = dict(self.of(names))
        self.scheduler.update_from_output(
            planned,
            self.release.made(
                "ModelRunnerOutput",
                {
                    "req_ids": names, "req_id_to_index": {name: i for i, name in enumerate(names)}, "sampled_token_ids": tokens,
                    "logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": [],
                },
            ),
        )  # fmt: skip
        if self.k and not self.ahead:
            drafted = [
                name for name, said in zip(names, tokens, strict=True) if said and name in self.scheduler.requests
            ]
            self.scheduler.update_draft_token_ids(self.release.DraftTokenIds(drafted, [[2] * self.k for _ in drafted]))
        emitted, ended = [], []
        for name, request in kept.items():
            id_ = int(name)
            n = len(request.output_token_ids) - had[name]
            if n:
                emitted.append([id_, n])
            if request.is_finished():
                ended.append(id_)
                self.forget(id_)
        return emitted, ended

    def of(self, names):
        return [(name, self.scheduler.requests[name]) for name in names if name in self.scheduler.requests]

    def step(self, told):
        emitted, ended = self.finish(told["done"]) if told["done"] is not None else ([], [])
        for each in told["add"]:
            self.add(each)
        for id_ in told["abort"]:
            self.abort(id_)
        for id_ in told["ready"]:
            self.compiled(id_)
        plan = self.plan() if self.scheduler.has_requests() else None
        return {"emitted": emitted, "ended": ended, "plan": plan, "has_requests": self.scheduler.has_requests()}
