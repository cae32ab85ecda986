"""Drives vLLM's own scheduler on a CPU, without a model, and writes what it decides in each step.

    PYTHON_WITH_VLLM vllm_release.py WORKLOADS.json DECISIONS.json

Runs in an environment of its own, which need not have this project. A step takes one second of simulated time; who arrives at
second s is known to the plans made at s. Written for vLLM 0.32.0 with PyTorch 2.13.0 for CPUs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

MOST_PLANS = 50_000
STOP = 99
"""The token that ends an answer."""


def settings_of(model, case):
    from vllm.config import CacheConfig, DeviceConfig, ParallelConfig, SchedulerConfig, VllmConfig

    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["max_num_batched_tokens"],
            max_num_active_seqs=case["max_num_active_seqs"],
            max_num_scheduled_tokens=case["max_num_scheduled_tokens"],
            max_model_len=case["max_model_len"],
            long_prefill_token_threshold=case["long_prefill_token_threshold"],
            long_prefill_token_threshold_adaptive=case["long_prefill_token_threshold_adaptive"],
            enable_chunked_prefill=case["enable_chunked_prefill"],
            scheduler_reserve_full_isl=case["scheduler_reserve_full_isl"],
            watermark=case["watermark"],
            policy=case["scheduling_policy"],
            is_encoder_decoder=False,
            async_scheduling=case["async_scheduling"],
        ),
        cache_config=CacheConfig(block_size=case["block_tokens"], enable_prefix_caching="id_tokens" in case),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
    )
    config.cache_config.block_size = case["block_tokens"]
    # The release counts the null block, which no sequence gets.
    config.cache_config.num_gpu_blocks = case["kv_blocks"] + 1
    return config


def scheduler_of(config, case):
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=case["block_tokens"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=case["kv_blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=groups)
    engine = (AsyncScheduler if case["async_scheduling"] else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=case["block_tokens"],
        log_stats=False,
    )
    # What a configuration of speculation would set: without a draft model there is none to give.
    engine.num_spec_tokens = case["k"]
    engine.num_lookahead_tokens = case["lookahead_tokens"]
    if case["async_scheduling"]:
        engine._spec_token_placeholders = [-1] * case["k"]
    return engine


class Drafting:
    """Stands where the configuration of speculation would, for the one property that planning reads of it."""

    def __init__(self, draft_slots):
        self.max_num_new_slots_for_drafting = draft_slots


def contents(number, request, case):
    """The tokens that a request reads and writes: those of equal ids at equal places are equal, all others differ."""
    each, prompt = case["id_tokens"], request["prompt"]
    # Ids that the prompt alone needs do not name what is emitted.
    named = prompt + request["output"] if len(request["ids"]) > -(-prompt // each) else prompt
    found = []
    for place in range(prompt + request["output"]):
        block = place // each
        if block < len(request["ids"]) and place < named:
            found.append(1000 + request["ids"][block] * each + place % each)
        else:
            found.append(10_000_000 + number * 100_000 + place)
    return found


def decide(config, case):
    """The work of each step, [second, {request: tokens}], who was preempted, and the blocks held once it was planned; None for a
    workload that does not end. With the prefix cache on (`id_tokens`) also the tokens that each who was admitted found, and the
    cached blocks that were evicted; "padded" for a workload in which a prompt of one token is padded to a round of speculation."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    engine = scheduler_of(config, case)
    if case["k"]:
        config.speculative_config = Drafting(case["draft_slots"])
    k, requests, ahead = case["k"], case["requests"], case["async_scheduling"]
    now, sent, steps = 0, 0, []
    rounds, done = [0] * len(requests), [0] * len(requests)
    in_flight = deque()
    caching = "id_tokens" in case
    hasher, evicted, padded = None, [], []
    texts = [contents(number, request, case) for number, request in enumerate(requests)] if caching else []
    if caching:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        hasher = get_request_block_hasher(case["block_tokens"], sha256)
        pool = engine.kv_cache_manager.block_pool
        evict = pool._maybe_evict_cached_block

        def counted(block):
            found = evict(block)
            if found:
                evicted.append(block)
            return found

        pool._maybe_evict_cached_block = counted

    def arrive():
        nonlocal sent
        while sent < len(requests) and requests[sent]["arrival"] <= now:
            request = requests[sent]
            engine.add_request(
                Request(
                    request_id=f"{sent:06d}",
                    prompt_token_ids=texts[sent][: request["prompt"]] if caching else [1] * request["prompt"],
                    sampling_params=SamplingParams(max_tokens=request["max_tokens"], stop_token_ids=[STOP]),
                    pooling_params=None,
                    priority=request["priority"],
                    arrival_time=float(request["arrival"]),
                    block_hasher=hasher,
                )
            )
            sent += 1
        for id_, request in enumerate(requests[:sent]):
            if request["abort"] == now and f"{id_:06d}" in engine.requests:
                engine.finish_requests(f"{id_:06d}", RequestStatus.FINISHED_ABORTED)

    def plan():
        before = {request.request_id for request in engine.running}
        evicted.clear()
        planned = engine.schedule()
        complete, found = {}, {}
        for id_, tokens in planned.num_scheduled_tokens.items():
            request = engine.requests[id_]
            complete[id_] = not request.is_prefill_chunk
            if id_ not in before:
                found[int(id_)] = request.num_computed_tokens - tokens
                if planned.scheduled_spec_decode_tokens.get(id_):
                    padded.append(id_)
        pool = engine.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        gone = sorted(int(i) for i in planned.preempted_req_ids or ())
        return planned, complete, (held, found, len(evicted)), gone

    def finish(planned, complete):
        ids = list(planned.num_scheduled_tokens)
        tokens = []
        for id_ in ids:
            number = int(id_)
            if not complete[id_]:
                tokens.append([])
                continue
            emitted = 1
            if planned.scheduled_spec_decode_tokens.get(id_):
                # A step of who has ended may come after its tape.
                tape = requests[number]["tape"]
                emitted = tape[min(rounds[number], len(tape) - 1)]
                rounds[number] += 1
            before = done[number]
            done[number] += emitted
            said = (texts[number][requests[number]["prompt"] + before :] if caching else []) + [1] * (emitted + 1)
            tokens.append([STOP if before + i + 1 == requests[number]["output"] else said[i] for i in range(emitted)])
        engine.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={id_: i for i, id_ in enumerate(ids)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        if k and not ahead:
            drafted = [id_ for id_, emitted in zip(ids, tokens, strict=True) if emitted and id_ in engine.requests]
            engine.update_draft_token_ids(DraftTokenIds(drafted, [[2] * k for _ in drafted]))

    gone, taken = [], []

    def ran(planned, held, preempted):
        nonlocal now
        held, found, n_evicted = held
        taken.append(n_evicted)
        # A plan may do no more than take memory back; another follows at once.
        gone.extend(preempted)
        if planned.total_num_scheduled_tokens:
            run = {int(id_): tokens for id_, tokens in planned.num_scheduled_tokens.items()}
            steps.append([now, run, sorted(gone), held] + ([found, sum(taken)] if caching else []))
            gone.clear()
            taken.clear()
            now += 1

    for _ in range(MOST_PLANS):
        arrive()
        if padded:
            return "padded"
        if not engine.has_unfinished_requests() and not in_flight:
            if sent == len(requests):
                return steps
            now = requests[sent]["arrival"]
            continue
        if not ahead:
            planned, complete, held, preempted = plan()
            ran(planned, held, preempted)
            finish(planned, complete)
            continue
        if engine.has_requests():
            planned, complete, held, preempted = plan()
            in_flight.appendleft((planned, complete, held, preempted))
            if len(in_flight) < 2 and (planned.total_num_scheduled_tokens or engine.has_requests()):
                continue
        planned, complete, held, preempted = in_flight.pop()
        ran(planned, held, preempted)
        finish(planned, complete)
    # Sequences that take memory from each other in turn go on so for ever.
    return None


MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "torch_dtype": "bfloat16",
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


def a_model(folder, case):
    """The least of a model that the scheduler's configuration asks for; its file goes into *folder*."""
    from vllm.config import ModelConfig

    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(MODEL, file)
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=case["max_model_len"]
    )


def main():
    source, target = sys.argv[1:]
    with open(source) as file:
        cases = json.load(file)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            found.append(decide(settings_of(a_model(folder, case), case), case))
    with open(target, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
