"""SGLang's own schedulers of several ranks in step: what each runs in every common step.

    PYTHON_WITH_SGLANG sglang_ranks_release.py WORKER_FOLDER WORKLOADS.json DECISIONS.json

Of the release are the schedulers, driven as `policies.installed.sglang.worker` does, and the prefill delayer. Stands in for the
collectives between ranks: threads that wait for each other. A step of all ranks takes one second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

MOST_ROUNDS = 100_000


def module_of(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Exchange:
    """Lets every rank know what each has said."""

    def __init__(self, n):
        self.said, self.barrier, self.here = [None] * n, threading.Barrier(n), threading.local()

    def all(self, mine):
        self.said[self.here.rank] = mine
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found


class Idle:
    """The batch of a rank without work in a step of others."""

    def __init__(self, mode, extends):
        self.forward_mode, self.is_extend_in_batch, self.reqs = mode, extends, []


class Rank:
    """One scheduler of those in step."""

    def __init__(self, release, engine_class, number, asked, exchange):
        self.exchange, self.number = exchange, number
        self.engine = engine_class(release, asked)
        self.scheduler = self.engine.scheduler
        self.modes = release.module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.scheduler.require_mlp_sync = True
        self.scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch = self.sync
        pool, tree = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        self.scheduler.pool_stats_observer = SimpleNamespace(
            get_pool_stats=lambda: SimpleNamespace(
                get_max_pool_usage=lambda: 1 - (pool.available_size() + tree.evictable_size()) / self.engine.pool
            )
        )

    def sync(self, batch, need_sync=False):
        if not need_sync:
            return batch
        extends = batch is not None and batch.forward_mode.is_extend()
        said = self.exchange.all((batch is not None, extends))
        if not any(there for there, _ in said):
            return None
        batch = Idle(self.modes.IDLE, False) if batch is None else batch
        batch.is_extend_in_batch = any(extends for _, extends in said)
        return batch

    @property
    def waits(self):
        return bool(self.scheduler.waiting_queue or self.engine.inbox or self.scheduler.chunked_req)

    def round(self):
        """One pass of `event_loop_overlap` up to the launch: prompt tokens and decodes; None where no rank has any."""
        self.exchange.here.rank = self.number
        scheduler = self.scheduler
        self.engine.poll()
        found = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = found.running_batch, found.batch_to_run
        self.last, scheduler.last_batch = scheduler.last_batch, batch
        if batch is None:
            return None
        if isinstance(batch, Idle):
            scheduler.result_queue.append((batch, None))
            return 0, 0
        plan = self.engine.launched(batch)
        return sum(tokens for _, tokens, _ in plan["run"][: plan["prompts"]]), len(plan["run"]) - plan["prompts"]

    def end(self):
        """The rest of the pass."""
        if self.last is None:
            return
        if isinstance(self.scheduler.result_queue[0][0], Idle):
            self.scheduler.result_queue.popleft()
        else:
            self.engine.finish()


def delayer_of(release, exchange, ranks, now):
    """The release's delayer, one for each rank, made with what it asks of its surroundings."""
    import torch

    module = release.module("sglang.srt.managers.prefill_delayer")
    group = SimpleNamespace(cpu_group=None, device_group=None, device="cpu")
    module.get_parallel = lambda: SimpleNamespace(
        num_dp_ranks=ranks, attn_dp_enabled=True, tp_group=group, attn_cp_size=1, attn_tp_size=1
    )

    def gather(rows, mine, group=None):
        rows.copy_(torch.cat(exchange.all(mine.clone())))

    module.all_gather_single = gather
    module.time = SimpleNamespace(perf_counter=lambda: now[0])
    kind = module._State
    if isinstance(kind, type):
        module._State = lambda: kind(start_time=now[0])
    return module


def decide(release, worker, case):
    """[second, prompt tokens and decodes of each rank] of every step in which any computes, up to the first one in which a rank has
    nothing to run and requests that wait; requests go to the ranks in turn."""
    settings, n, now = case["settings"], case["ranks"], [0.0]
    exchange = Exchange(n)
    asked = {
        "k": 0, "kv_blocks": case["kv_blocks"], "block_tokens": case["block_tokens"], "max_model_len": case["max_model_len"],
        "prefix_cache": False, "options": {}, "ignore_eos": False, "schedule_conservativeness": 1.0, "enable_mixed_chunk": False,
        "scheduler_recv_interval": 1, "disable_overlap_schedule": False,
        "seats": settings["max_running_requests"],
        **settings,
    }  # fmt: skip
    ranks = [Rank(release, worker.Engine, number, asked, exchange) for number in range(n)]
    if settings["enable_prefill_delayer"]:
        delayers = delayer_of(release, exchange, n, now)
        schedule = release.module("sglang.srt.runtime_context").get_schedule
        fields = {
            name: settings[name]
            for name in ("prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms", "prefill_max_requests")
        }
        delayers.get_schedule = lambda: SimpleNamespace(disable_overlap_schedule=False, **fields)
        for rank in ranks:
            rank.scheduler.prefill_delayer = delayers.PrefillDelayer(
                settings["prefill_delayer_max_delay_passes"], settings["prefill_delayer_token_usage_low_watermark"]
            )
            rank.scheduler.prefill_bs_tracker = delayers.RecentPrefillBatchSizeTracker()
        assert schedule().prefill_max_requests == settings["prefill_max_requests"]
    requests, sent, second, busy, steps = case["requests"], 0, 0, False, []
    with ThreadPoolExecutor(n) as threads:
        for _ in range(MOST_ROUNDS):
            now[0] = float(second)
            # A plan is made when the step before it starts.
            while sent < len(requests) and requests[sent]["arrival"] <= (second - 1 if busy else second):
                request = requests[sent]
                ranks[sent % n].engine.add(
                    {
                        "id": sent,
                        "names": [],
                        "names_with_next": [],
                        "priority": 0,
                        **{name: request[name] for name in ("prompt", "output", "max_tokens")},
                    }
                )
                sent += 1
            ran = [future.result() for future in [threads.submit(rank.round) for rank in ranks]]
            if any(ran) and any(each == (0, 0) and rank.waits for each, rank in zip(ran, ranks, strict=True)):
                # Here such a rank plans once more when the step before has ended, and knows more.
                return steps
            if any(ran):
                steps.append([second, ran])
                second += 1
            ended = busy
            for rank in ranks:
                rank.end()
            busy = any(ran)
            if busy or ended or any(rank.waits for rank in ranks):
                continue
            for rank in ranks:
                rank.scheduler.new_token_ratio_tracker.reset()
            if sent == len(requests):
                return steps
            second = max(second, requests[sent]["arrival"])
    return None


def main():
    folder, source, target = sys.argv[1:]
    del sys.path[0]
    module_of("policies.installed.lines", os.path.join(folder, "lines.py"))
    worker = module_of("worker", os.path.join(folder, "sglang", "worker.py"))
    os.environ.update(worker.ENVIRONMENT)
    with open(source) as file:
        cases = json.load(file)
    release = worker.Release()
    found = [decide(release, worker, case) for case in cases]
    with open(target, "w") as file:
        json.dump({"release": release.name, "steps": found}, file)


if __name__ == "__main__":
    main()
