"""vLLM's own scheduler serving a trace in simulated time: a small event loop that shares only the price of an iteration with ours.

    PYTHON_WITH_VLLM -m benchmarks.vllm_in_loop CASE.pickle

Prints preemptions, mean latency and mean TTFT in seconds. `benchmarks.schedulers` writes the case and calls it.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from hwmodels.totals import Totals
from tests.oracle.vllm_release import a_model, scheduler_of, settings_of


def serve(case: dict[str, Any], folder: Path) -> tuple[int, float, float]:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    full = {
        "max_num_active_seqs": None, "long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False,
        "enable_chunked_prefill": True, "scheduler_reserve_full_isl": True, "watermark": 0.0, "scheduling_policy": "fcfs",
        "k": 0, "lookahead_tokens": 0,
    } | case  # fmt: skip
    engine = scheduler_of(settings_of(a_model(folder, full), full), full)
    prompt, output, visible, n = case["prompt"], case["output"], case["visible_ns"], len(case["prompt"])
    order = sorted(range(n), key=lambda i: visible[i])
    first, last, emitted = [0] * n, [0] * n, [0] * n
    now, sent, preemptions = 0, 0, 0
    in_flight: deque[Any] = deque()

    def plan() -> Any:
        nonlocal preemptions
        planned = engine.schedule()
        preemptions += len(planned.preempted_req_ids or ())
        rows = prefill = n_prefill = pairs = prompt_kv = decodes = decode_kv = logits = 0
        complete = []
        for name, tokens in planned.num_scheduled_tokens.items():
            request = engine.requests[name]
            after = request.num_computed_tokens
            before = after - tokens
            complete.append(not request.is_prefill_chunk)
            rows += tokens
            logits += complete[-1]
            # A resumed sequence computes its emitted tokens again, as a prompt.
            if tokens > 1 or before < prompt[int(name)]:
                prefill += tokens
                n_prefill += 1
                pairs += tokens * before + tokens * (tokens + 1) // 2
                prompt_kv += after
            else:
                decodes += 1
                decode_kv += after
        seconds = 0.0
        if rows:
            totals = Totals(rows, prefill, n_prefill, pairs, prompt_kv, decodes, decode_kv, logits, pairs, decode_kv)
            seconds = float(case["cost"].iteration_s(totals))
        return planned, complete, round(seconds * 1e9)

    def finish(planned: Any, complete: list[bool]) -> None:
        ids = list(planned.num_scheduled_tokens)
        for name, done in zip(ids, complete, strict=True):
            i = int(name)
            if done and emitted[i] < output[i]:
                first[i] = first[i] or now
                last[i] = now
                emitted[i] += 1
        engine.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={name: at for at, name in enumerate(ids)},
                sampled_token_ids=[[1] if done else [] for done in complete],
                logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            ),
        )  # fmt: skip

    while True:
        while sent < n and visible[order[sent]] <= now:
            i = order[sent]
            sampling = SamplingParams(ignore_eos=True, max_tokens=output[i])
            engine.add_request(
                Request(
                    request_id=f"{i:07d}",
                    prompt_token_ids=[1] * prompt[i],
                    sampling_params=sampling,
                    pooling_params=None,
                )
            )
            sent += 1
        if not engine.has_unfinished_requests() and not in_flight:
            if sent == n:
                break
            now = visible[order[sent]]
            continue
        if engine.has_requests():
            in_flight.appendleft(plan())
            if case["async_scheduling"] and len(in_flight) < 2 and in_flight[0][0].total_num_scheduled_tokens:
                continue
        planned, complete, duration_ns = in_flight.pop()
        now += duration_ns
        finish(planned, complete)
    arrival = case["arrival_ns"]
    latency = sum(b - a for a, b in zip(arrival, last, strict=True)) / n * 1e-9
    return preemptions, latency, sum(b - a for a, b in zip(arrival, first, strict=True)) / n * 1e-9


def main() -> None:
    case = pickle.loads(Path(sys.argv[1]).read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        print(*serve(case, Path(folder)))


if __name__ == "__main__":
    main()
