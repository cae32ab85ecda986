"""SGLang's scheduler, step for step: prompts first, against an estimate of future memory, and retraction where it was too low.

Rules are those of release 0.5.23, named by the file under `sglang/srt/` where they are applied:

* the order of a step: `managers/scheduler.py` (`get_next_batch_to_run`, `_get_new_batch_prefill_raw`, `update_running_batch`);
* admission: `managers/schedule_policy.py` (`PrefillAdder`), over the budget of `mem_cache/prefill_budget.py`;
* retraction: `managers/schedule_batch.py` (`retract_decode`, `check_decode_mem`);
* the new-token ratio: `managers/scheduler_components/new_token_ratio_tracker.py`, its constants in `environ.py`;
* polling: `managers/scheduler_components/recv_skipper.py`.

`tests/oracle/test_sglang.py` lays the release's own scheduler beside this one.

Left out: orders of the queue that need a prefix cache, `random` and `routing-key` (refused); priorities and preemption by them,
LoRA, beams, grammars, data-parallel attention and its prefill delayer, hybrid and windowed pools, disaggregation, dynamic chunks
of pipelines, `min_free_slots_delay`. A request that is retracted while its latest token is in flight
keeps that token, which SGLang drops and makes again; a poll may be a step off. Speculating sequences hold the slots that the
engine gives them. Each micro-batch of a pipeline remembers for itself.
"""

from policies.sglang.joining import OUT_OF_ROOM
from policies.sglang.past import Past
from policies.sglang.scheduler import Sglang

__all__ = ["OUT_OF_ROOM", "Past", "Sglang"]
