"""vLLM's own schedulers of several ranks in step, with a prefill cadence: what each runs in every common step.

    PYTHON_WITH_VLLM vllm_ranks_release.py WORKLOADS.json DECISIONS.json

As `vllm_release`, beside which it lies: a step of all ranks takes one second. The number of a step counts from the last time that
all ranks were idle, and a plan is throttled as `DPEngineCoreProc._should_throttle_prefills` says.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque

from vllm_release import MOST_PLANS, STOP, a_model, scheduler_of, settings_of


class Rank:
    """One scheduler, and its plans in flight."""

    def __init__(self, config, case):
        self.case = case
        self.engine = scheduler_of(config, case)
        self.ahead = case["async_scheduling"]
        self.in_flight = deque()
        self.running = None
        self.done = {}
        self.plans = 0

    def add(self, number, request):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.done[number] = 0
        self.engine.add_request(
            Request(
                request_id=f"{number:06d}",
                prompt_token_ids=[1] * request["prompt"],
                sampling_params=SamplingParams(max_tokens=request["max_tokens"], stop_token_ids=[STOP]),
                pooling_params=None,
                arrival_time=float(request["arrival"]),
            )
        )

    @property
    def busy(self):
        return bool(self.engine.has_unfinished_requests() or self.in_flight or self.running)

    def plan(self, step):
        throttles = self.case["prefill_schedule_interval"] > 1 and step % self.case["prefill_schedule_interval"] != 0
        planned = self.engine.schedule(throttle_prefills=throttles)
        complete = {id_: not self.engine.requests[id_].is_prefill_chunk for id_ in planned.num_scheduled_tokens}
        self.in_flight.appendleft((planned, complete))
        return planned

    def start(self, step):
        """The plan that runs in common step *step*, {} where there is none."""
        if self.running:
            self.finish(*self.running)
            self.running = None
        for _ in range(10):
            if not self.busy:
                return {}
            if self.engine.has_requests():
                # The plan of this step, or of the next one where this one's is in flight.
                planned = self.plan(step + len(self.in_flight))
                if (
                    self.ahead
                    and len(self.in_flight) < 2
                    and (planned.total_num_scheduled_tokens or self.engine.has_requests())
                ):
                    continue
            planned, complete = self.in_flight.pop()
            if planned.total_num_scheduled_tokens:
                self.running = planned, complete
                return {int(id_): tokens for id_, tokens in planned.num_scheduled_tokens.items()}
            self.finish(planned, complete)
        return {}

    def finish(self, planned, complete):
        from vllm.v1.outputs import ModelRunnerOutput

        ids, tokens = list(planned.num_scheduled_tokens), []
        for id_ in ids:
            number = int(id_)
            if complete[id_]:
                self.done[number] += 1
                tokens.append([STOP if self.done[number] == self.case["requests"][number]["output"] else 1])
            else:
                tokens.append([])
        self.engine.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index={id_: i for i, id_ in enumerate(ids)}, sampled_token_ids=tokens,
                logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            ),
        )  # fmt: skip


def decide(config, case):
    """[second, [{request: tokens} of each rank]] of every step in which any rank computes; requests go to the ranks in turn."""
    ranks = [Rank(config, case) for _ in range(case["ranks"])]
    requests, now, sent, step, steps = case["requests"], 0, 0, 0, []
    for _ in range(MOST_PLANS):
        while sent < len(requests) and requests[sent]["arrival"] <= now:
            ranks[sent % len(ranks)].add(sent, requests[sent])
            sent += 1
        ran = [rank.start(step) for rank in ranks]
        if any(ran):
            steps.append([now, ran])
            now, step = now + 1, step + 1
        elif not any(rank.busy for rank in ranks):
            if sent == len(requests):
                return steps
            now, step = max(now, requests[sent]["arrival"]), 0
    return None


def main():
    source, target = sys.argv[1:]
    with open(source) as file:
        cases = json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        found = [decide(settings_of(a_model(folder, case), case), case) for case in cases]
    with open(target, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
