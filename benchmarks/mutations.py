"""Changes of meaning, each of which some fast test has to notice.

    python -m benchmarks.mutations [--only WORD] [--from WORD] [--jobs 2] [--narrow]

Each change replaces one short text in a copy of the tree and runs the tests beside it in the table, then, where they all
pass, the whole fast suite (not with --narrow). Prints which test noticed, and ends with 1 if none did. A text that is not
found exactly once, or tests that fail without any change, are an error: whoever moves code moves its entry here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
_OURS = ("sim", "hwmodels", "policies", "workloads", "tests", "benchmarks")
# A process for each change, with what others wrote imported beforehand: imports would take most of the time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "numpy",
        "pandas",
        "scipy.special",
        "simpy",
        "pydantic",
        "typer.testing",
        "rich",
        "matplotlib.pyplot",
    ]
)
ENGINE = (
    "tests/engine/test_meanings.py",
    "tests/engine/test_waiting.py",
    "tests/engine/test_doors.py",
    "tests/engine/test_spans.py",
    "tests/engine/test_replica.py",
    "tests/engine/test_pipeline.py",
    "tests/engine/test_luck.py",
    "tests/engine/test_conservation.py",
    "tests/engine/test_identity.py",
)
SPECULATION = ("tests/engine/test_meanings.py", "tests/policies/test_decoding.py", "tests/policies/test_acceptance.py")
POLICIES = ("tests/policies/test_schedulers.py", "tests/policies/test_sarathi.py")
TIERS = ("tests/engine/test_stores.py", "tests/engine/test_tiers.py")
POOLS = (
    "tests/engine/test_handover.py",
    "tests/engine/test_second_pools.py",
    "tests/engine/test_links.py",
)
FLEETS = (
    "tests/engine/test_fleet_apart.py",
    "tests/engine/test_fleet_tiers.py",
    "tests/engine/test_fleet.py",
)
RANKS = ("tests/engine/test_ranks.py", "tests/hwmodels/test_ranks.py", "tests/hwmodels/test_mtp.py")
EXPERTS = ("tests/hwmodels/test_experts.py", "tests/scenario/test_expert_settings.py")
PREFIXES = ("tests/engine/test_prefix.py", "tests/oracle/test_vllm.py")
ROUTING = ("tests/engine/test_routing.py",)
SGLANG = ("tests/policies/test_sglang.py",)
INTERVALS = ("tests/study/test_paired.py", "tests/study/test_statistics.py", "tests/study/test_compare.py")
COSTS = ("tests/hwmodels/test_roofline.py", "tests/hwmodels/test_work.py", "tests/hwmodels/test_calibrated.py")


@dataclass(frozen=True)
class Mutation:
    """*old* becomes *new* in *file*; *tests* are those that should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(file: str, tests: tuple[str, ...], *changes: tuple[str, str, str]) -> list[Mutation]:
    return [Mutation(name, file, old, new, tests) for name, old, new in changes]


MUTATIONS = [
    *_of(
        "sim/engine/stores.py",
        TIERS,
        (
            "what has not arrived is found",
            "kept.ready_ns <= now_ns:\n                    at",
            "True:\n                    at",
        ),
        (
            "the first block of a prompt gives way first",
            "(kept.stamp, -kept.lo, self._n, kept)",
            "(kept.stamp, kept.lo, self._n, kept)",
        ),
        (
            "what is on its way is found with what has come",
            " and max(last.ready_ns, now_ns) == max(kept.ready_ns, now_ns):",
            ":",
        ),
        ("moved sequences do not count each other", "if sum(self._moved.values()) + n_bytes", "if n_bytes"),
        (
            "machines see at once what others do",
            "(now_ns + 1, machine, self._told, tuple",
            "(now_ns, machine, self._told, tuple",
        ),
    ),
    *_of(
        "sim/engine/tiers.py",
        TIERS,
        ("loads do not renew what they read", "            self._use(source, self._pieces(id_, lo, hi))\n", ""),
        (
            "a host gives nothing on to the disk",
            "        if (\n            gone\n",
            "        if (\n            not gone\n",
        ),
        ("a load ends with its last tier", "ends_ns = max(ends_ns, sent", "ends_ns = max(self.now_ns + 1, sent"),
        ("one's own host is a peer's", "if number != self._number:", "if True:"),
        ("a load saves what the prompt takes alone", "price_ns(tokens, at * self.block_tokens)", "price_ns(tokens, 0)"),
    ),
    *_of(
        "sim/engine/loading.py",
        TIERS,
        (
            "who has been loaded stands last",
            "sequences.queue.appendleft(seq._replace",
            "sequences.queue.append(seq._replace",
        ),
        ("the last to come is the first in the queue", "for _, _, id_ in reversed(due):", "for _, _, id_ in due:"),
        (
            "the first who waits gives its KV back",
            "for seq in reversed(sequences.queue) if",
            "for seq in sequences.queue if",
        ),
    ),
    *_of(
        "sim/engine/prefix.py",
        PREFIXES,
        ("all of a prompt is found", "upto = (tokens - 1) // self.block_tokens", "upto = tokens // self.block_tokens"),
        ("the first block of a sequence goes first", "in reversed(held.entries):", "in held.entries:"),
        (
            "decoded blocks are blank",
            "        self.cached(id_, tokens)\n        held = self._held.pop(id_)",
            "        held = self._held.pop(id_)",
        ),
        ("what is found leaves something behind", "held.full - held.found - left", "held.full - left"),
    ),
    *_of(
        "sim/engine/runs.py",
        PREFIXES,
        ("the copy that came last is found", "key=lambda run: run.rank)", "key=lambda run: -run.rank)"),
        (
            "cached blocks go before blank ones",
            "        if blocks <= blank:",
            "        if blocks <= blank - self.total:",
        ),
        ("what is left behind takes no room", "        self.free += blocks\n        chain", "        chain"),
    ),
    *_of(
        "sim/engine/runs.py",
        TIERS,
        (
            "what is left behind goes to tiers",
            "gives_up is not None and (chain.number >= 0 or chain.owner >= 0):",
            "gives_up is not None:",
        ),
    ),
    *_of(
        "sim/engine/exchange.py",
        POOLS,
        (
            "windows leave something of what was sent",
            "sequences.kv.loaded(id_, tokens)",
            "sequences.kv.cached(id_, tokens)",
        ),
    ),
    *_of(
        "sim/engine/content.py",
        PREFIXES,
        (
            "ids after those of the prompt name nothing",
            "prompt + output if count > of_the_prompt else prompt",
            "prompt",
        ),
    ),
    *_of(
        "sim/engine/finding.py",
        PREFIXES,
        (
            "a plan that is made ahead knows what is in flight",
            "return cached - emitted + scheduled if emitted else cached",
            "return cached + scheduled",
        ),
    ),
    *_of(
        "sim/engine/sequences.py",
        PREFIXES,
        ("who gives way does so before anybody takes blocks", "while blocks > kv.free and left:", "while left:"),
    ),
    *_of(
        "sim/engine/finding.py",
        PREFIXES,
        (
            "a span goes on though who waits may find more",
            "return kv.writes or (kv.caches_late",
            "return (kv.caches_late",
        ),
    ),
    *_of(
        "sim/engine/machine.py",
        ROUTING,
        (
            "routers do not find what the span in flight has emitted",
            "finding.rounds_since = rounds - 1",
            "finding.rounds_since = 0",
        ),
    ),
    *_of(
        "sim/engine/routing.py",
        ROUTING,
        ("late events are of the first model", "model = 0 if self._model is None else self._model[id_]", "model = 0"),
    ),
    *_of(
        "sim/engine/tenant.py",
        ("tests/engine/test_fleet.py",),
        (
            "the step in which a machine fails has no room made for it",
            "take_for_rounds(tenant.sequences.kv, lane.decoding, 1, 0)",
            "tenant.sequences.kv.take(lane.decoding.growth_blocks)",
        ),
    ),
    *_of(
        "policies/sglang/scheduler.py",
        SGLANG,
        (
            "the ratio does not fall",
            "ratio=self.ratio_after(past.ratio, steps) if past.decays else",
            "ratio=past.ratio if past.decays else",
        ),
        (
            "the ratio falls beside prompts",
            "            full=stays_full,\n",
            "            full=stays_full,\n            decays=True,\n",
        ),
        ("a retraction leaves the ratio", "            ratio=min(1.0, ratio),\n", ""),
        (
            "a retraction leaves the batch closed",
            "            full=False,\n            n_running=len(kept),",
            "            n_running=len(kept),",
        ),
        ("a retraction leaves the batch in its order", "            order=tuple(each.seq.id for each in kept),\n", ""),
        (
            "those that have emitted most are retracted",
            "(each.emitted, -each.prompt), reverse=True",
            "(each.emitted, -each.prompt)",
        ),
        (
            "of equals the shortest prompt is retracted",
            "(each.emitted, -each.prompt), reverse=True",
            "(each.emitted, each.prompt), reverse=True",
        ),
        ("one is retracted and no more", "        while kept and growth > free:", "        while kept and not gone:"),
        (
            "decodes share without memory",
            "and adder.blocks + view.growth_blocks <= view.free_blocks",
            "and view.growth_blocks <= 10**9",
        ),
        (
            "a batch stays closed when somebody leaves",
            "full=past.full and 0 < n_batch >= past.n_running,",
            "full=past.full and n_batch > 0,",
        ),
        (
            "a batch is never closed",
            "                    full = bool(adder.chunks) or n_batch > 0\n",
            "                    full = False\n",
        ),
        (
            "an iteration with prompts leaves the batch closed",
            "stays_full = full and n_batch > 0 and not (cut or mixed",
            "stays_full = full and not (mixed",
        ),
        (
            "seats are not counted",
            "full = full or len(adder.chunks) >= seats - n_batch",
            "full = full or len(adder.chunks) > seats - n_batch",
        ),
        (
            "those who leave hold no seats",
            "if not view.prefilling and view.n_decoding + view.n_leaving >= seats:",
            "if not view.prefilling and view.n_decoding >= seats:",
        ),
        ("the latest token is known ahead", " - (of_all or id_ in some)", ""),
        (
            "who cannot grow does not wait for those who end",
            "if view.growth_blocks > view.free_blocks and not view.n_leaving:",
            "if view.growth_blocks > view.free_blocks:",
        ),
        ("those who end leave the batch closed", "full = past.full and not view.n_leaving", "full = past.full"),
        (
            "who comes is seen before the poll",
            "if past.known is None or past.polled >= self.scheduler_recv_interval:",
            "if True:",
        ),
        (
            "steps with prompts are not followed by a poll",
            "            weight=PROMPT_STEP,\n",
            "            weight=1,\n",
        ),
        (
            "a plan is held beyond the next poll",
            "hold = min(hold, max(self.scheduler_recv_interval - polled, 1))",
            "hold = UNTIL_CHANGE",
        ),
        (
            "nobody is polled for when there is nothing to do",
            "if past.known is not None and idle and not",
            "if False and not",
        ),
        (
            "those who may emit least go first",
            "key=lambda seq: -room.max_new(seq.id)",
            "key=lambda seq: room.max_new(seq.id)",
        ),
        ("prompts that never fit are kept", "            if adder.never_fits(seq):", "            if False:"),
    ),
    *_of(
        "policies/sglang/joining.py",
        SGLANG,
        (
            "nothing is kept for running ones",
            "            expected += (left if",
            "            expected += 0 * (left if",
        ),
        (
            "no page is kept",
            "min(to_come, CLIP_MAX_NEW_TOKENS) + self.page + self._drafted",
            "min(to_come, CLIP_MAX_NEW_TOKENS) + self._drafted",
        ),
        (
            "nothing is kept for what a request may emit",
            "return tokens + min(to_come, CLIP_MAX_NEW_TOKENS) + self.page",
            "return tokens + self.page",
        ),
        (
            "a request joins that fits to the last token",
            "if self._demand(seq) - found * self.page >= self._left - unheld * self.page:",
            "if self._demand(seq) - found * self.page > self._left - unheld * self.page:",
        ),
        (
            "what joined before counts without what it may emit",
            "self._in_all += paged + self.page + to_come",
            "self._in_all += paged + self.page",
        ),
        (
            "limits are not clipped in the share",
            "(left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS) * ratio",
            "left * ratio",
        ),
        (
            "limits are not cut to the pool",
            "room = min(self._context - 2 - prompt, self.pool",
            "room = min(self._context - 2 - prompt, 10**9 + self.pool",
        ),
        (
            "limits are not cut to the context",
            "room = min(self._context - 2 - prompt, self",
            "room = min(self._context - prompt, self",
        ),
        ("chunks do not end with a page", "tokens = self._chunk // self.page * self.page", "tokens = self._chunk"),
        (
            "prompts are charged as they are long",
            "        self._input -= paged\n        if self._chunk is not None:\n            self._chunk -= paged\n",
            "        self._input -= tokens\n        if self._chunk is not None:\n            self._chunk -= tokens\n",
        ),
        (
            "a whole prompt may take all that is left",
            "if self.chunks and paged >= self._input:",
            "if self.chunks and paged > self._input:",
        ),
        (
            "the first whole prompt keeps to the limit",
            "if self.chunks and paged >= self._input:",
            "if paged >= self._input:",
        ),
        (
            "prompts of an iteration are not counted",
            "if most is not None and len(self.chunks) >= most:",
            "if most is not None and len(self.chunks) > most:",
        ),
        ("a cut prompt takes its chunk whatever the memory", "within = min(chunk, int(self._left))", "within = chunk"),
        ("a cut prompt waits for memory", "within = within if within > 0 else chunk", "within = max(within, 1)"),
        (
            "decodes take no tokens of a mixed iteration",
            "beside = len(running) if settings.enable_mixed_chunk else 0",
            "beside = 0",
        ),
        ("what others give back at their end is not counted", "            free += holds\n", ""),
        (
            "without an end token the share still falls",
            "ratio = 1.0 if settings.ignore_eos else past.ratio",
            "ratio = past.ratio",
        ),
    ),
    *_of(
        "policies/sglang/settings.py",
        SGLANG,
        (
            "conservativeness is left out",
            "INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0",
            "INIT_NEW_TOKEN_RATIO, 1.0",
        ),
        (
            "the first ratio may exceed 1",
            "return min(INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0)",
            "return INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness",
        ),
        (
            "with ends known the share is kept as well",
            "return self.ignore_eos and self.disable_radix_cache",
            "return False",
        ),
    ),
    *_of(
        "sim/engine/tenant.py",
        SGLANG,
        (
            "a memo outlives a pause",
            "                lane.view.memo = None\n                if self._ahead is not None and _has_come",
            "                if self._ahead is not None and _has_come",
        ),
        (
            "decode steps are not counted for policies",
            "view.now_ns, view.rounds = ticks >> TICK_BITS, decoding.round",
            "view.now_ns = ticks >> TICK_BITS",
        ),
    ),
    *_of(
        "sim/engine/sequences.py",
        SGLANG,
        (
            "preempted requests wait at the head whatever is asked",
            "if self._preempted_last else first, seq)",
            "if False else first, seq)",
        ),
    ),
    *_of(
        "sim/engine/sequences.py",
        ENGINE,
        (
            "a preempted request joins the tail of the queue",
            "if self._preempted_last else first, seq)",
            "if True else first, seq)",
        ),
        (
            "look-ahead is left out of the fit check",
            "output - 1 + sequences.most_beyond if output",
            "output - 1 if output",
        ),
        (
            "the last token is cached in the fit check",
            "output - 1 + sequences.most_beyond if output",
            "output + sequences.most_beyond if output",
        ),
        ("a preempted request loses its first start", "if self.state.scheduled[id_] < 0:", "if True:"),
        ("a preempted request is given its first token again", "if state.first_token[id_] < 0:", "if True:"),
        (
            "preemption keeps the blocks",
            "        self.kv.release(id_, blocks + beside, known)\n        self.n_changes += 1\n        self._in_vain += 1",
            "        self.n_changes += 1\n        self._in_vain += 1",
        ),
        ("what preemption gives up is not counted", "        state.recomputed[id_] += cached\n", ""),
        (
            "a limit on the model's context is off by one",
            "if limit is not None and prompt + handed + output > limit:",
            "if limit is not None and prompt + handed + output >= limit:",
        ),
        ("rejected requests stay in the queue", "            self.queue.remove(seq)\n", ""),
    ),
    *_of(
        "sim/engine/sequences.py",
        ("tests/engine/test_ahead.py",),
        (
            "a request that was given up keeps its memory",
            "        sequences.kv.release(id_, sequences.take_out(lane, id_)[1], known)",
            "        sequences.take_out(lane, id_)",
        ),
        ("who was given up while it waited is served", "            sequences.queue.remove(waiting)\n", ""),
        (
            "who has gone is known at once",
            "known_ns = ALWAYS_NS if sequences.ahead is None else sequences.ahead.seen_ns",
            "known_ns = ALWAYS_NS",
        ),
    ),
    *_of(
        "sim/engine/ahead.py",
        ("tests/engine/test_ahead.py", "tests/oracle/test_vllm.py"),
        ("who came later is shown", "queue.hidden = came_after(self._came_ns, seen_ns)", "queue.hidden = 0"),
        ("who leaves keeps no seat", "                view.n_leaving += 1\n", ""),
        (
            "the memory of those who leave is seen at once",
            "            view.free_blocks -= blocks if given else 0\n            if steps_on:",
            "            if steps_on:",
        ),
        ("the step in vain is not taken", "if ended.steps_on and id_ in wanted}", "if False}"),
        ("a step in vain takes no blocks", "                view.growth_blocks += growth_blocks\n", ""),
        (
            "a plan outlives what was hidden from it",
            "        plan = plan._replace(hold=1)\n    return plan, stepping_on",
            "        pass\n    return plan, stepping_on",
        ),
    ),
    *_of(
        "sim/engine/tenant.py",
        ENGINE,
        ("completing prompts have no logit rows", "decode_kv, decode_rows + n_completing,", "decode_kv, decode_rows,"),
        ("every chunk has a logit row", "decode_kv, decode_rows + n_completing,", "decode_kv, decode_rows + len(run),"),
        (
            "a chunk does not attend to its past",
            "pairs += tokens * cached + tokens * (tokens + 1) // 2",
            "pairs += tokens * (tokens + 1) // 2",
        ),
        (
            "a chunk attends to all of itself",
            "pairs += tokens * cached + tokens * (tokens + 1) // 2",
            "pairs += tokens * cached + tokens * tokens",
        ),
        ("a chunk does not read its past", "            prompt_kv += cached\n", "            prompt_kv += tokens\n"),
        (
            "decodes beside prompts do not read their own tokens",
            "decode_kv = decoding.cached + decode_rows",
            "decode_kv = decoding.cached",
        ),
        ("chunks beyond what is left are accepted", "if remaining < 0 or tokens <= 0:", "if tokens <= 0:"),
        (
            "a plan held in a pipeline outlives a finish",
            "        and held.changes == tenant.sequences.n_changes\n",
            "",
        ),
        (
            "a plan held in a pipeline outlives its instant",
            "        and ticks >> TICK_BITS < held.until_ns\n",
            "",
        ),
        (
            "a plan held in a pipeline outlives arrivals",
            "        and held.arrivals in (-1, tenant.sequences.n_arrivals)\n",
            "",
        ),
    ),
    *_of(
        "sim/engine/requests.py",
        ENGINE,
        (
            "a preempted request forgets its tokens",
            "(self.prompt[id_] or 1) + emitted - cached_tokens",
            "(self.prompt[id_] or 1) - cached_tokens",
        ),
    ),
    *_of(
        "sim/engine/machine.py",
        (*ENGINE, "tests/engine/test_independent.py"),
        (
            "arrivals wait for the end of the span",
            "        if not lane.through_arrivals:\n",
            "        if False:\n",
        ),
        (
            "an iteration in flight counts when a machine stops",
            "done = span.index_at(now_ns << TICK_BITS) - 1",
            "done = span.index_at(now_ns << TICK_BITS)",
        ),
        (
            "tenants do not take turns",
            "self._turn = (self.tenants.index(tenant) + 1) % len(self.tenants)",
            "self._turn = 0",
        ),
        (
            "nobody wakes a machine whose policy waits for an instant",
            "            if self._alone:\n                self._alarm.set(wake_ns)\n",
            "",
        ),
    ),
    *_of(
        "sim/engine/stages.py",
        ENGINE,
        ("hand-over between stages is free", "ready = end + handover", "ready = end"),
        ("a stage does not wait to be free", "end = max(ready, free) + duration", "end = ready + duration"),
    ),
    *_of(
        "sim/engine/taped.py",
        ENGINE,
        (
            "acceptance rounds start again after a preemption",
            "rounds_before = self._rounds[id_]",
            "rounds_before = 0",
        ),
        (
            "drafted tokens hold no slots",
            "after += cached + self.query_tokens + self._lookahead",
            "after += cached + 1 + self._lookahead",
        ),
    ),
    *_of(
        "sim/engine/uniform.py",
        ENGINE,
        (
            "windows do not limit what decodes read",
            "self.window_sum += reads",
            "self.window_sum += cached + 1",
        ),
        ("a chunk that begins still reads the one before", "self.window_sum -= self._window\n", "pass\n"),
        (
            "a chunk begins once",
            "heappush(bends, (at + int(self._window), order, id_))",
            "pass",
        ),
        ("decodes do not read their own token", "kv = self.cached + n\n", "kv = self.cached\n"),
        (
            "a span runs on past the instant until which its plan holds",
            "until_ticks = min((until_ns << TICK_BITS) - start_ticks, LONGEST_TICKS)",
            "until_ticks = LONGEST_TICKS",
        ),
    ),
    *_of(
        "sim/engine/front_end.py",
        ENGINE,
        (
            "long prompts pass the front end as fast as short ones",
            "self._admission_s + self._admission_s_per_token * prompt_tokens",
            "self._admission_s + 0.0 * prompt_tokens",
        ),
        (
            "nobody waits at the desk of a closed loop",
            "max(sent_ns, self._free_ns) + self.serial_ns",
            "sent_ns + self.serial_ns",
        ),
        (
            "nobody waits at the desk of an open loop",
            "np.maximum.accumulate(arrival_ns - place) + place + self.serial_ns",
            "arrival_ns + self.serial_ns",
        ),
    ),
    *_of(
        "sim/engine/cluster.py",
        ENGINE,
        (
            "the front end is skipped in an open loop",
            "visible = self._front_end.visible_ns(workload.arrival_ns, workload.prompt_tokens)",
            "visible = workload.arrival_ns",
        ),
        (
            "the front end is skipped in a closed loop",
            "seen_ns = max(self._front_end.seen_ns(sent_ns, self._prompt[id_]), felt_ns)",
            "seen_ns = max(sent_ns, felt_ns)",
        ),
        (
            "clients come to the desk in the order in which others ended",
            "if self._front_end.serial_ns and sent_ns > self._clock.now_ns:",
            "if False:",
        ),
        (
            "clients do not think",
            "self._clock.now_ns if ended_ns is None else ended_ns + self._think[id_]",
            "self._clock.now_ns if ended_ns is None else ended_ns",
        ),
        (
            "clients think before their first request",
            "self._clock.now_ns if ended_ns is None else ended_ns + self._think[id_]",
            "(ended_ns or self._clock.now_ns) + self._think[id_]",
        ),
        (
            "a rejected request ends its client",
            "        self.finished(id_, self._clock.now_ns)\n",
            "",
        ),
    ),
    *_of(
        "sim/engine/gate.py",
        ENGINE,
        (
            "machines that do not host the model are shown to routers",
            "return self._hosting[0 if self._state.model is None else self._state.model[id_]]",
            "return self._machines",
        ),
    ),
    *_of(
        "sim/engine/gate.py",
        ("tests/engine/test_routing.py", "tests/engine/test_independent.py"),
        ("turns of a model are those of all", "id_ if self._turn is None else self._turn[id_],", "id_,"),
        ("sessions are not shown to routers", "-1 if self._session is None else self._session[id_],", "-1,"),
    ),
    *_of(
        "sim/engine/pricing.py",
        ("tests/engine/test_pricing.py", *ENGINE),
        (
            "a draft takes one step",
            "seconds = seconds + draft_steps * self.draft.iteration_s(",
            "seconds = seconds + self.draft.iteration_s(",
        ),
        ("rounds have no fixed cost", "+ (self.round_ticks if query_tokens > 1 else 0)", ""),
        (
            "the draft does not compute prompts",
            "                ticks += to_ticks(self.draft.iteration_s(own))\n",
            "                pass\n",
        ),
        (
            "rounds beside prompts have no fixed cost",
            "        if rows - prompt > n:\n            ticks += self.round_ticks",
            "        if False:\n            ticks += self.round_ticks",
        ),
        (
            "a draft takes one step beside prompts",
            "ticks += times * (line.base + line.slope * kv)",
            "ticks += line.base + line.slope * kv",
        ),
        ("verified tokens cost as one", "rows = none + n * query_tokens", "rows = none + n"),
        ("lines a thousand times as coarse", "LINE_ERROR: Final = 2e-7\n", "LINE_ERROR: Final = 2e-4\n"),
    ),
    *_of(
        "policies/schedulers.py",
        POLICIES,
        (
            "admission keeps no watermark",
            "reserve = int(watermark * view.total_blocks) if view.n_running else 0",
            "reserve = 0",
        ),
        ("an empty replica keeps a watermark", "if view.n_running else 0", ""),
        (
            "admission ignores what decodes will need",
            "return view.free_blocks - view.growth_blocks - reserve",
            "return view.free_blocks - reserve",
        ),
        (
            "new prompts go before unfinished ones",
            "for partial in view.prefilling:\n        if budget <= 0:",
            "for partial in reversed(view.prefilling):\n        if budget <= 0:",
        ),
        (
            "later requests overtake the head of the queue",
            "if budget <= 0 or seats <= 0 or free < 0:",
            "if free < 0:\n                free += view.blocks(seq.tokens)\n                continue\n"
            "            if budget <= 0 or seats <= 0:",
        ),
        (
            "decodes take one token of the budget each",
            "left = self.token_budget - n_decoding * view.query_tokens",
            "left = self.token_budget - n_decoding",
        ),
        (
            "seats for Sarathi forget the unfinished prompts",
            "seats = max_sequences - view.n_decoding - len(view.prefilling)",
            "seats = max_sequences - view.n_decoding",
        ),
    ),
    *_of(
        "policies/vllm.py",
        POLICIES,
        (
            "vLLM before version 1 decodes beside prompts",
            "return prompts(tuple(chunks), False)",
            "return prompts(tuple(chunks), True)",
        ),
        (
            "a prompt beyond the budget of vLLM before version 1 never runs",
            "(seq.tokens > left and chunks)",
            "seq.tokens > left",
        ),
    ),
    *_of(
        "policies/vllm.py",
        ("tests/policies/test_vllm.py", "tests/oracle/test_vllm.py"),
        ("vLLM keeps no watermark", "kept if occupied else 0", "0"),
        ("an idle vLLM keeps a watermark", "kept if occupied else 0", "kept"),
        ("a long prompt is limited though it is alone", "if sequences <= 1:", "if False:"),
        ("vLLM's first gives way", "return running[-1]", "return running[0]"),
        ("vLLM admits where somebody gives way", "        if not preempted:\n", "        if True:\n"),
        (
            "a chunk's blocks do not count beside decodes",
            "free -= _blocks(view, cached + tokens) - _blocks(view, cached)",
            "pass",
        ),
        (
            "a chunk's blocks do not count where memory is short",
            "blocks = max(_blocks(view, seq.cached_tokens + tokens) - seq.blocks, 0)",
            "blocks = 0",
        ),
        ("what vLLM admits takes no blocks", "            free -= needed\n", ""),
        (
            "who gives way gives nothing back",
            "                free += victim.blocks + had_blocks\n",
            "                free += had_blocks\n",
        ),
        (
            "the budget of one who gives way is lost",
            "                    left += had_tokens\n",
            "",
        ),
        (
            "the whole prompt need not fit",
            "if view.blocks(whole) - found - seq.kept_blocks + unheld + reserve > free:",
            "if False:",
        ),
        ("who leaves takes a step", "            if seq.leaving:\n", "            if False:\n"),
    ),
    *_of(
        "policies/wrappers.py",
        ("tests/policies/test_wrappers.py",),
        ("the oldest sequence is evicted", "for seq in reversed(view.running):", "for seq in view.running:"),
        (
            "an evicting iteration admits",
            "            waiting=(),\n            prefilling=prefilling,",
            "            prefilling=prefilling,",
        ),
        (
            "an order does not say that arrivals may overtake",
            "(view)._replace(through_arrivals=False)",
            "(view)",
        ),
    ),
    *_of(
        "policies/sarathi.py",
        POLICIES,
        (
            "an aligned chunk is a whole one",
            "return self.chunk - (self.max_sequences - 1) if self.align else self.chunk",
            "return self.chunk",
        ),
        (
            "chunks and decodes do not take turns",
            "return Plan(decode=True) if view.after_prefill else Plan(run=chunks)",
            "return Plan(run=chunks)",
        ),
    ),
    *_of(
        "policies/reserving.py",
        ("tests/policies/test_trtllm.py", "tests/policies/test_published.py"),
        ("an output is not reserved for", "+ view.max_tokens[id_], view.max_model_len)", ", view.max_model_len)"),
        ("a context longer than the model's is reserved for", ", view.max_model_len)", ", 1 << 62)"),
        ("drafted tokens are not reserved for", "+ max(drafted - 1, 0)), view.total_blocks)", "), view.total_blocks)"),
        (
            "who outgrows memory never runs",
            "+ max(drafted - 1, 0)), view.total_blocks)",
            "+ max(drafted - 1, 0)), 1 << 62)",
        ),
        ("who has ended is reserved for", "if not seq.leaving]\n    if view.elsewhere", "]\n    if view.elsewhere"),
        ("what is held counts twice", "drafted) - seq.blocks, 0)", "drafted), 0)"),
        (
            "others' growth is not kept",
            "ids = (*(seq.id for seq in running), *view.elsewhere)",
            "ids = [seq.id for seq in running]",
        ),
    ),
    *_of(
        "policies/published.py",
        ("tests/policies/test_published.py", "tests/policies/test_sarathi.py"),
        (
            "Orca reserves what a request computes now",
            "free -= longest_blocks(view, seq.id, drafted)",
            "free -= view.blocks_to_admit(seq)",
        ),
        ("Orca's slots are not counted", "slots -= self._slots_of(view, seq.id)", "slots -= 0"),
        ("those who run have no slots", "return self.n_slots - sum(", "return self.n_slots - 0 * sum("),
        (
            "later requests overtake in Orca",
            "                if seats <= 0 or free < 0 or slots < 0:\n",
            "                if free < 0:\n                    free += longest_blocks(view, seq.id, drafted)\n"
            "                    continue\n                if seats <= 0 or slots < 0:\n",
        ),
        (
            "a padded batch reserves each for itself",
            "wanted = (len(chunks) + 1) * view.blocks(prompt + output + drafted)",
            "wanted = view.blocks(prompt + output + drafted)",
        ),
        (
            "a padded batch reserves the first output alone",
            "output = max(output, view.max_tokens[seq.id])",
            "output = output or view.max_tokens[seq.id]",
        ),
        (
            "somebody joins a padded batch",
            "        if view.n_decoding:\n            return Plan(decode=True, through_arrivals=True)\n        free, drafted",
            "        free, drafted",
        ),
    ),
    *_of(
        "policies/trtllm.py",
        ("tests/policies/test_trtllm.py", "tests/policies/test_trtllm_again.py"),
        (
            "prompts go before decodes",
            "left = self.max_num_tokens - view.decode_tokens\n        policy",
            "left = self.max_num_tokens\n        policy",
        ),
        ("seats forget those who run", "seats = self.max_batch_size - view.n_running", "seats = self.max_batch_size"),
        ("a static batch is joined", 'if policy == "STATIC_BATCH" and decode:', "if False:"),
        (
            "prompts go on beside decodes that the budget cuts",
            "[partial[seq.id]] if packed else []",
            "[partial[seq.id]]",
        ),
        (
            "memory is packed by default",
            'reserves = self.capacity_scheduler_policy != "MAX_UTILIZATION"',
            "reserves = False",
        ),
        ("packing reserves", 'reserves = self.capacity_scheduler_policy != "MAX_UTILIZATION"', "reserves = True"),
        (
            "packing forgets what decodes need",
            "else view.free_blocks - view.growth_blocks\n",
            "else view.free_blocks\n",
        ),
        ("drafts planned ahead are reserved once", "(2 if self.async_scheduling else 1)", "1"),
        ("whole prompts too long wait", "if seq.tokens > self.max_num_tokens and not seq.preempted:", "if False:"),
        (
            "who was evicted is refused",
            "if seq.tokens > self.max_num_tokens and not seq.preempted:",
            "if seq.tokens > self.max_num_tokens:",
        ),
        ("who was evicted and is too long never runs", "left -= min(length, self.max_num_tokens)", "left -= length"),
        (
            "memory's queue is overtaken",
            "                if free < 0 or len(fitting) == seats:\n",
            "                if free < 0:\n                    free += longest_blocks(view, seq.id, drafted)\n"
            "                    continue\n                if len(fitting) == seats:\n",
        ),
        ("who has ended gives way", "for seq in view.running[:] if not seq.leaving]", "for seq in view.running[:]]"),
        ("nobody gives way", "running, paused = _paused(running, view.free_blocks)", "pass"),
        (
            "the first gives way",
            "    at, end = 0, len(running)\n",
            "    running = running[::-1]\n    at, end = 0, len(running)\n",
        ),
        (
            "one who gives way gives nothing back",
            "            free += running[end].blocks - running[end].shared_blocks\n",
            "",
        ),
        ("chunks end within a block", "left // unit * unit", "left"),
        (
            "a prompt that fits in what a cut one leaves waits",
            "        chunk = length if length <= left else left // unit * unit\n        left -= chunk",
            "        chunk = length if length <= left else left // unit * unit\n        left -= length",
        ),
        ("fair chunks are not fair", "more = min(unit, length - chunks[i])", "more = min(left, length - chunks[i])"),
        (
            "fair chunks stop at the first that does not fit",
            "            if 0 < more <= left:",
            "            if more > left:\n                return chunks\n            if 0 < more:",
        ),
        ("prompts wait beside nothing", "if not (run and decode_tokens and self", "if not (run and self"),
        ("prompts wait for ever", "if waited < self.batch_wait_timeout_iters and tokens", "if tokens"),
        (
            "prompts wait whatever their number",
            "and tokens < self.batch_wait_max_tokens_ratio * self.max_num_tokens:",
            ":",
        ),
        ("decodes are no company", "tokens = decode_tokens + sum(", "tokens = sum("),
        (
            "a cut prompt counts as its chunk",
            "seq.cached_tokens + _to_compute(seq) for seq",
            "_to_compute(seq) for seq",
        ),
        ("the count of waits stays after a release", "        return run, 0\n", "        return run, waited\n"),
        (
            "the count of waits is lost where nothing decodes",
            "            return run, view.memo\n",
            "            return run, None\n",
        ),
        ("plans are never made ahead", "return not self.disable_overlap_scheduler", "return False"),
    ),
    *_of(
        "sim/engine/streaming.py",
        ("tests/engine/test_streaming.py",),
        (
            "the last tokens are not sent",
            'sent = begins | ((token == requests["output_tokens"][request]) & _ended(requests, request))',
            "sent = begins",
        ),
        ("the first token waits for its group", "sent = begins | (", "sent = ("),
        (
            "tokens are grouped by iterations",
            'return sent | ((token if stream.rule == "iterations" else token - 1) % n == 0)',
            "return sent | (token % n == 0)",
        ),
        (
            "speculated tokens are grouped by iterations",
            '    if stream.rule == "iterations":\n        return sent | ((at',
            "    if True:\n        return sent | ((at",
        ),
        (
            "a group is one token too long",
            "np.searchsorted(keys, keys[latest] + n)",
            "np.searchsorted(keys, keys[latest] + n + 1)",
        ),
        (
            "who joins again has got a token twice",
            "new[1:] = (request[1:] != request[:-1]) | (token[1:] != token[:-1])",
            "pass",
        ),
        (
            "a prompt's token is not counted",
            'np.maximum(requests["prompt_tokens"][stays["request"]], 1) + 1',
            'np.maximum(requests["prompt_tokens"][stays["request"]], 1)',
        ),
        ("rounds end as they start", "rounds - source.rounds[row] + 1", "rounds - source.rounds[row]"),
    ),
    *_of(
        "sim/engine/padding.py",
        ("tests/policies/test_sarathi.py", *ENGINE),
        (
            "decode steps are padded to those who are left",
            "n, longest = max(totals.decode_seqs, sequences), context",
            "n, longest = totals.decode_seqs, context",
        ),
        ("prompts are not padded", "        rows = sum(gap for _, gap in gaps)\n", "        rows = 0\n"),
    ),
    *_of(
        "policies/routers.py",
        ("tests/policies/test_routers.py",),
        ("queues are not seen by the router", "return load.waiting + load.running\n\n", "return load.running\n\n"),
        ("who waits on a rank counts where memory is ample", "max(0.0, load.kv_use - 0.5)", "load.kv_use"),
        ("ties between ranks go to the first", "((request.turn + i) % n for i in range(n))", "range(n)"),
        (
            "TensorRT-LLM's ranks fill unevenly",
            "below = [i for i in range(len(replicas)) if active[i] < expected]",
            "below = range(len(replicas))",
        ),
        ("the second draw may be the first", "second += second >= first", "second += 0"),
        (
            "the fuller of two is taken",
            "if _outstanding(replicas[second]) < _outstanding(replicas[first]):",
            "if _outstanding(replicas[second]) > _outstanding(replicas[first]):",
        ),
    ),
    *_of(
        "policies/ranks.py",
        ("tests/policies/test_ranks.py",),
        ("prompts of ranks wait for nobody", "if all_decode and for_others < self.timeout_iters:", "if False:"),
        ("prompts wait although a rank has nothing to decode", "all(rank.decodes for rank in ranks)", "True"),
        (
            "who waits for others waits for more as well",
            "return False, Waited(0, waited.for_more + 1)",
            "return False, waited",
        ),
    ),
    *_of(
        "sim/engine/ranks.py",
        ("tests/engine/test_ranks.py",),
        ("an arrival does not end the steps in flight", "elif self._n_steps > 1:", "elif False:"),
        (
            "only the first rank's work is priced",
            "duration = self._prices.step(totals, draft_steps)",
            "duration = self._prices.step([totals[taking[0]]] + [IDLE] * (len(totals) - 1), draft_steps)",
        ),
        (
            "steps alike go on beyond the first to finish",
            "decoding.until_finish(), decoding.until_bend()",
            "decoding.until_bend()",
        ),
        (
            "steps alike go on beyond what memory has",
            "                n = decoding.rounds_within(sequences.kv.free + prepared.growth, n)\n",
            "                pass\n",
        ),
        (
            "steps alike go on beyond a bend of the window",
            "decoding.until_finish(), decoding.until_bend())",
            "decoding.until_finish())",
        ),
        (
            "steps alike do not age what waits",
            "for _ in range(n - 1):",
            "for _ in range(0):",
        ),
        (
            "who comes to a rank whose plan holds waits for all",
            "if self._n_steps > 1 and held is not None and held.arrivals == -1 and self._balance is None:",
            "if False:",
        ),
        (
            "plans end a step late",
            "ends = ends[: int(ends.searchsorted((until_ns << TICK_BITS) - ticks)) + 1]",
            "ends = ends[: int(ends.searchsorted((until_ns << TICK_BITS) - ticks)) + 2]",
        ),
        (
            "a stop counts the step in flight",
            "done = 0 if span is None else span.index_at(now_ns << TICK_BITS) - 1",
            "done = 0 if span is None else span.index_at(now_ns << TICK_BITS)",
        ),
    ),
    *_of(
        "sim/engine/roles.py",
        POOLS,
        (
            "states of constant size are not sent",
            "tokens * self.bytes_per_token + self.bytes_per_sequence",
            "tokens * self.bytes_per_token",
        ),
        ("states are sent with what is all there", "if tokens > 0 else 0", "if tokens >= 0 else 0"),
        (
            "what may stay is not known when it comes",
            'return self.room == "before_prefill" or self.local_tokens > 0',
            'return self.room == "before_prefill"',
        ),
    ),
    *_of(
        "sim/engine/handover.py",
        POOLS,
        ("who asks for one token is decoded elsewhere", "self.least_left = 0 if", "self.least_left = 0 if True or"),
        (
            "a prompt that is there may not stay",
            "return prompt <= local or prompt - receiver.found_tokens",
            "return prompt <= local or prompt + receiver.found_tokens",
        ),
        (
            "machines of several memories are all able",
            "        if not refusing:\n            return hosting\n",
            "        return hosting\n",
        ),
        (
            "the receiver is chosen among all who decode",
            "able = None if one_kind and self.present is None else self.able(id_)",
            "able = None",
        ),
        (
            "what the receiver has is sent as well",
            "tokens = state.to_hand(id_) - leg.found\n",
            "tokens = state.to_hand(id_)\n",
        ),
        ("a layer's share is not left", "last_bytes = -(-n_bytes // path.layers)", "last_bytes = 0"),
        (
            "layers begin with the computation",
            'since_ns = begun_ns + (handovers._at["prefilled_ns"][id_] - begun_ns) // path.layers',
            "since_ns = begun_ns",
        ),
        (
            "prompts that were preempted go layer by layer",
            "came_once = not state.preemptions[id_] and not",
            "came_once = not",
        ),
        (
            "repacking takes no time",
            "transfer.arrived_ns + round(n_bytes * path.repack_s_per_byte * 1e9)",
            "transfer.arrived_ns",
        ),
        (
            "all links are the sender's own",
            '"receiver": (*between, -1, receiver.index)',
            '"receiver": (*between, sender.index, -1)',
        ),
        (
            "a pair shares its sender's link",
            '"pair": (*between, sender.index, receiver.index)',
            '"pair": (*between, sender.index, -1)',
        ),
        (
            "links of a pool are one for each sender",
            '"pools": (*between, -1, -1)',
            '"pools": (*between, sender.index, -1)',
        ),
        (
            "the last token is there although it was dropped",
            "            tokens -= 1\n            state.recomputed",
            "            state.recomputed",
        ),
        (
            "who has gone keeps the sender's blocks",
            "            if leg.computed:\n                leg.collect(id_)\n",
            "",
        ),
        (
            "who has gone keeps the receiver's room",
            "            handovers.legs.pop(id_).end()\n            leg.drop(id_)\n",
            "            handovers.legs.pop(id_).end()\n",
        ),
        (
            "room that nobody will use is kept",
            "                    leg.drop(id_)\n                    self._needs_no_more(",
            "                    self._needs_no_more(",
        ),
        ("news is heard at once", "HEARD_AFTER_NS: Final = 1", "HEARD_AFTER_NS: Final = 0"),
    ),
    *_of(
        "sim/engine/exchange.py",
        POOLS,
        (
            "room is taken from what decodes will need",
            "if fresh + self._spoken_for(lane) > kv.free:",
            "if fresh > kv.free:",
        ),
        (
            "others overtake who waits for room",
            "while self.asked and self._make_room(self.asked[0], lane, ticks):\n            self.asked.popleft()",
            "for id_ in [each for each in self.asked if self._make_room(each, lane, ticks)]:\n            self.asked.remove(id_)",
        ),
        (
            "headroom is for one sequence",
            "others = sequences.n_admitted + len(self.kept) + len(self.landed)",
            "others = 1",
        ),
        (
            "who has room counts for no headroom",
            "sequences.n_admitted + len(self.kept) + len(self.landed)",
            "sequences.n_admitted + len(self.landed)",
        ),
        (
            "who has landed waits behind all",
            "sequences.queue.insert(n_with_blocks(sequences), seq)",
            "sequences.queue.append(seq)",
        ),
        ("the first to land gives its room up", "id_ = next(reversed(self.landed))", "id_ = next(iter(self.landed))"),
        (
            "who gives its room up was not preempted",
            "        state.preemptions[id_] += 1\n        state.recomputed[id_] += seq.cached_tokens\n",
            "        state.recomputed[id_] += seq.cached_tokens\n",
        ),
        (
            "what is computed here is not held for others",
            "return bool(self.lent or self.kept)",
            "return bool(self.kept)",
        ),
        (
            "one token is decoded elsewhere too",
            "self.sequences.state.left[id_] > (0 if self.drops_token else 1)",
            "self.sequences.state.left[id_] > 0",
        ),
        (
            "the token of prefill is emitted again",
            "        if not self.drops_token:\n            state.left[id_] -= 1\n",
            "        if not self.drops_token:\n",
        ),
        ("plans know news of the step that they are made in", "while mail and mail[0][0] <= known_ns:", "while mail:"),
        (
            "who takes what is promised gets room",
            "        if not promises.has_room_for(id_):\n            return False\n",
            "",
        ),
        (
            "steps of who leaves are not spoken for",
            "blocks += (0 if sequences.kv.caches else gone.blocks) + gone.growth_blocks * gone.steps_on",
            "blocks += 0",
        ),
    ),
    *_of(
        "sim/engine/links.py",
        (*POOLS, *TIERS),
        ("a link has one place", "self._free_ns = [0] * spec.concurrent_transfers", "self._free_ns = [0]"),
        (
            "latency occupies the link",
            "heapq.heapreplace(self._free_ns, sent)",
            "heapq.heapreplace(self._free_ns, sent + self._latency_ns)",
        ),
        ("writes go as fast as reads", "if writes and self.write_bytes_per_s is not None:", "if False:"),
        ("a slower time has no end", "            found.append((round(each.end_ns), *_UNHARMED))", "            pass"),
        ("a transfer goes on as it began", "for until_ns, after, _ in changes[at:]:", "for until_ns, after, _ in ():"),
        (
            "more latency is that of the beginning",
            "sent + self._latency_ns + self._state_at(sent)[1], n_bytes)",
            "sent + self._latency_ns + self._state_at(begin)[1], n_bytes)",
        ),
        (
            "a transfer to nobody keeps its place",
            "self._free_ns[self._free_ns.index(transfer.sent_ns)] = end_ns",
            "pass",
        ),
    ),
    *_of(
        "sim/engine/parted.py",
        FLEETS,
        (
            "who has room at a machine that goes is lost with it",
            "            chosen_again += 1\n            if leg.computed:\n                choose_anew(handovers, id_)\n",
            "            on_link.append(id_)\n",
        ),
        (
            "room is kept for who will not come",
            "            leg.drop(id_)\n            handovers._needs_no_more(leg.receiver)\n",
            "            handovers._needs_no_more(leg.receiver)\n",
        ),
        ("links of machines that fail go on", "            link.stop(clock.now_ns)\n", "            pass\n"),
        ("KV that is lost was not computed", "    state.recomputed[id_] += state.to_hand(id_)\n", ""),
        ("a token that nobody got is emitted", "    state.left[id_] += 1\n    return 1\n", "    return 0\n"),
        (
            "a machine that holds KV for others may go",
            "or leg.receiver is machine for leg in handovers.legs.values()) or any(",
            "or leg.receiver is machine for leg in handovers.legs.values()) and any(",
        ),
    ),
    *_of(
        "sim/engine/apart.py",
        FLEETS,
        ("KV is sent again whatever the rule", 'stays = fleet._spec.in_flight == "resume" and', "stays = True and"),
        ("a request comes twice for a stage", "if not self._taken[id_] & stage:", "if True:"),
    ),
    *_of(
        "sim/engine/fleet.py",
        FLEETS,
        ("machines go while they load", "machine.waiting or any(map(n_loading, machine.tenants)))", "machine.waiting)"),
        (
            "who was moved to host memory keeps its KV",
            "        state.given_back |= loading.stop(now_ns)\n",
            "        loading.stop(now_ns)\n",
        ),
        (
            "memory of a machine that fails is there afterwards",
            "        _lose_sources(fleet, loading.tiers.lost(now_ns))\n",
            "        pass\n",
        ),
    ),
    *_of(
        "sim/engine/common.py",
        RANKS,
        (
            "windows do not grow",
            "decode_kv_window=totals.decode_kv_window + step * window,",
            "decode_kv_window=totals.decode_kv_window + 0 * window,",
        ),
        (
            "a spread draft takes its passes alone",
            'self._draft = cast("RankedCostModel | None", pricing.draft if spread else None)',
            "self._draft = None",
        ),
        (
            "the first pass reads one token a sequence",
            "[_decodes_of(totals, totals.rows - totals.prefill_rows) for totals in ranks]",
            "[_decodes_of(totals, totals.decode_seqs) for totals in ranks]",
        ),
        ("a rank drafts as few tokens as the least", "steps = max(draft_steps)", "steps = min(draft_steps)"),
        (
            "drafts of ranks take turns",
            "return max(pricing.draft_ticks(totals, steps)",
            "return sum(pricing.draft_ticks(totals, steps)",
        ),
        ("prompts are not drafted for", "if any(totals.prefill_rows for totals in ranks):", "if False:"),
    ),
    *_of(
        "hwmodels/experts.py",
        EXPERTS,
        ("a token may choose an expert twice", "over = (found > 1.0) & ~sure", "over = (found > 99.0) & ~sure"),
        (
            "popularity falls with the root",
            "np.arange(1.0, n_experts + 1.0) ** -self.popularity.exponent",
            "np.arange(1.0, n_experts + 1.0) ** (-0.5 * self.popularity.exponent)",
        ),
        (
            "popular experts are neighbours",
            "weights = np.random.default_rng(self.popularity.seed).permutation(weights)",
            "weights = weights",
        ),
        (
            "experts are dealt out in rows",
            "tuple(tuple(range(rank, n_experts, ranks)) for rank in range(ranks))",
            "tuple(tuple(range(rank * (n_experts // ranks), (rank + 1) * (n_experts // ranks))) for rank in range(ranks))",
        ),
        (
            "copies go to the hottest, whatever copies it has",
            "hottest = int(np.argmax(weights / count))",
            "hottest = int(np.argmax(weights))",
        ),
        ("copies carry all tokens of an expert", "each = weights[copies] / count[copies]", "each = weights[copies]"),
        (
            "the mean rank sets the step",
            "means = tokens[:, None] * mean\n",
            "means = tokens[:, None] * mean.mean() + 0 * mean\n",
        ),
        ("choices are with replacement", "* max(0.0, n - k) / max(1.0, n - 1.0)", "* 1.0"),
        (
            "experts wake by their mean tokens",
            "missed = np.where(tokens > 0, np.exp(tokens * np.log1p(-chosen)), 1.0)",
            "missed = np.where(tokens > 0, np.exp(-tokens * chosen), 1.0)",
        ),
        (
            "a token reaches a rank as if drawn again",
            "missed * np.clip((n - drawn - effective) / (n - drawn), 0.0, 1.0)",
            "missed * np.clip((n - effective) / n, 0.0, 1.0)",
        ),
    ),
    *_of(
        "hwmodels/mtp.py",
        ("tests/hwmodels/test_mtp.py", "tests/scenario/test_decoding.py", "tests/engine/test_pricing.py"),
        (
            "prompts pass through one module",
            "np.where(prompt > 0, self.modules, 1) if isinstance(prompt, np.ndarray) else self.modules if prompt else 1",
            "1",
        ),
        ("ranks' prompts pass through one module", "return (self.modules if prompts else 1) * cast", "return cast"),
        (
            "passes have host work of their own",
            "own = replace(made_by.stack.overheads, step_s=0.0, sequence_s=0.0, row_s=0.0)",
            "own = made_by.stack.overheads",
        ),
        ("modules that do not draft read prompts", "min(model.mtp_layers, max(k, 1))", "model.mtp_layers"),
        ("only modules that draft are loaded", "deployed(model.mtp_layers))", "deployed(min(model.mtp_layers, k)))"),
        ("a pass reads the tokens of its first", "reads_whole_step = True", "reads_whole_step = False"),
    ),
    *_of(
        "sim/validation/apart.py",
        ("tests/validate/test_validate.py",),
        (
            "concurrency is a worker's",
            'whole(row, "decode_batch_size", 0) * ranks',
            'whole(row, "decode_batch_size", 0)',
        ),
        (
            "seats bind where the concurrency is a power of two",
            'if stack != "trtllm" or clients & (clients - 1) == 0:',
            'if stack != "trtllm":',
        ),
        (
            "seats are powers of two alone",
            "return power * 3 // 2 if power > 1 and power * 1.5 <= share else power",
            "return power",
        ),
        (
            "a rank's transfers wait for those of others",
            "concurrent_transfers=run.prefill.parallel.data",
            "concurrent_transfers=1",
        ),
        (
            "prefill drafts too",
            "speculation=run.speculation if workers is run.decode else None",
            "speculation=run.speculation",
        ),
        ("prefill's token is the client's first", 'first_token="decode",', 'first_token="prefill",'),
    ),
    *_of(
        "sim/validation/machines.py",
        ("tests/validate/test_validate.py",),
        ("drafts take no memory", "None if draft is None else draft.held", "None"),
        ("rounds have no slots beyond a token", '"lookahead_tokens": speculation.k,', '"lookahead_tokens": 0,'),
        ("groups that do not divide are kept", "while (tensor * data) % expert:", "while False:"),
    ),
    *_of(
        "sim/validation/speculated.py",
        ("tests/validate/test_validate.py",),
        ("ranks draft as others do", "(_DEPTH_OF_RANKS if ranks > 1 else {})", "({})"),
        ("R1 has no entry", "_SAME.get(model, model)", "model"),
    ),
    *_of(
        "sim/engine/ranks.py",
        ("tests/engine/test_handover.py",),
        (
            "KV that lies in the mail waits for steps alike",
            "if sequences.exchange is not None and sequences.exchange.mail:",
            "if False:",
        ),
        (
            "KV comes to a resting machine and is not heard of",
            "        put(tenant, self._clock.now_ns, id_, what, tokens)\n        self.interrupt(self._clock.now_ns)\n",
            "        put(tenant, self._clock.now_ns, id_, what, tokens)\n",
        ),
        (
            "routers inside see the first rank's cache",
            "return max(load.found_tokens(request) for load in self._loads)",
            "return self._loads[0].found_tokens(request)",
        ),
    ),
    *_of(
        "sim/metrics/ranks.py",
        ("tests/scenario/test_ranks.py",),
        (
            "the mean is of the ranks that step",
            "return most[some] * n_ranks / total[some]",
            "return most[some] / total[some]",
        ),
    ),
    *_of(
        "policies/acceptance/process.py",
        SPECULATION,
        (
            "a round forgets the target's own token",
            "return 1.0 + float(self.per_position(k).sum())",
            "return float(self.per_position(k).sum())",
        ),
        (
            "a step verifies the drafts alone",
            "return drafted(k) + 1",
            "return drafted(k)",
        ),
    ),
    *_of(
        "policies/acceptance/chains.py",
        SPECULATION,
        (
            "conditional rates are read as unconditional",
            'if self.kind == "unconditional" else _running_products',
            'if self.kind != "x" else _running_products',
        ),
    ),
    *_of(
        "hwmodels/deployment.py",
        ("tests/hwmodels/test_deployment.py",),
        (
            "the whole memory is for the cache",
            "usable = device.memory_bytes * gpu_fraction - reserve_bytes\n    found",
            "usable = device.memory_bytes - reserve_bytes\n    found",
        ),
        (
            "weights take no memory",
            "found.append(usable - stage.resident_bytes - _state_bytes(stage, parallel))",
            "found.append(usable - _state_bytes(stage, parallel))",
        ),
        (
            "reserved bytes are not reserved",
            "usable = device.memory_bytes * gpu_fraction - reserve_bytes\n    found",
            "usable = device.memory_bytes * gpu_fraction\n    found",
        ),
        ("attention groups share one cache", "return blocks * self.parallel.data", "return blocks"),
        ("the emptiest stage decides", "blocks = min(\n", "blocks = max(\n"),
    ),
    *_of(
        "hwmodels/totals.py",
        ("tests/engine/test_meanings.py",),
        ("chunks are windows", "return (context - 1) % int(window) + 1", "return min(context, int(window))"),
        ("a token does not see itself", "rest * (rest + 1) // 2", "rest * (rest - 1) // 2"),
    ),
    *_of(
        "hwmodels/cache.py",
        ("tests/hwmodels/test_hybrid.py",),
        ("windows keep every block", "return max(0, context - window + 1) if", "return 0 if"),
        ("chunks keep every block", "else context // window * window", "else 0"),
        ("neighbouring layers share a group", "layers[i::n]", "layers[i * size : (i + 1) * size]"),
        ("states do not enlarge pages", "page = max(page, block_tokens *", "page = max(page, 0 *"),
    ),
    *_of(
        "hwmodels/memory.py",
        ("tests/hwmodels/test_memory.py",),
        (
            "the null block is given out",
            "return (self.device_blocks - self.null_blocks) * self.groups",
            "return self.device_blocks * self.groups",
        ),
        (
            "CUDA graphs take nothing",
            "graphs = rules.graph_bytes_per_layer * len(layers) if captured else 0.0",
            "graphs = 0.0",
        ),
        (
            "every stage runs the sampler",
            "last=i == parallel.pipeline - 1",
            "last=True",
        ),
        (
            "a server's share is of the memory as it is sold",
            "total = device.memory_bytes if rules is None else visible_bytes(device)",
            "total = device.memory_bytes",
        ),
        (
            "TensorRT-LLM's share is of the whole device",
            "budget, cache_share = total, share",
            "budget, cache_share = share * total, 1.0",
        ),
        (
            "SGLang's context comes out of its share",
            "budget = share * (total - context - communicator) + context + communicator",
            "budget = share * total",
        ),
        (
            "models that take turns do not see each other's weights",
            "+ sum(other.stages[i].used_bytes - other.stages[i].reserve_bytes for other in others),",
            "+ 0.0,",
        ),
        (
            "the scheduler's limits do not reach the profile run",
            "rows = min(sequences, tokens)",
            "rows = 1024",
        ),
    ),
    *_of(
        "hwmodels/roofline.py",
        COSTS,
        (
            "products and weights add up",
            "return np.maximum(2.0 * m * n * k / self._flops_per_s(precision), weights / self._bytes_per_s)",
            "return 2.0 * m * n * k / self._flops_per_s(precision) + weights / self._bytes_per_s",
        ),
        (
            "a multiply-add is one operation",
            "return np.maximum(2.0 * m * n * k /",
            "return np.maximum(1.0 * m * n * k /",
        ),
        (
            "verified tokens read the cache again",
            "return kv * ops.maximum(queries / seqs * pair_s, kv_s)",
            "return kv * ops.maximum(queries / seqs * pair_s, queries / seqs * kv_s)",
        ),
    ),
    *_of(
        "hwmodels/gpu.py",
        COSTS,
        (
            "latent attention of an 8-bit cache is priced as of 16 bits",
            'formats = ("fp8/", "") if cache_bytes < 1.5 else ("",)\n        return [fmt + name for name in names',
            'formats = ("",)\n        return [fmt + name for name in names',
        ),
    ),
    *_of(
        "hwmodels/kernels/attention.py",
        ("tests/hwmodels/test_calibrated.py", "tests/hwmodels/kernels/test_forms.py"),
        ("a batch of one pays for regrouping", "ops.minimum(1.0, ops.maximum(0.0, seqs - 1.0))", "1.0"),
        ("padding of prompts costs nothing", "0.5 * _TILE * params.padding * tile_heads * pair_s", "0.0"),
    ),
    *_of(
        "hwmodels/layerwise.py",
        COSTS,
        (
            "a prompt with one token left is launched kernel by kernel",
            "self.prompt_floor_s if prompt > chunks else",
            "self.prompt_floor_s if prompt else",
        ),
        (
            "an encoder's attention is causal",
            "            pairs = 2 * pairs - prompt_f\n        if prompt:",
            "            pass\n        if prompt:",
        ),
        (
            "windowed layers read everything",
            "seconds += decode(SCALARS, seqs_f, queries, kv_window, kv - kv_window)",
            "seconds += decode(SCALARS, seqs_f, queries, kv)",
        ),
        (
            "sampling is free",
            "total = self._collectives_s(own, True) + self.kernels.sample_s(own)",
            "total = self._collectives_s(own, True)",
        ),
        (
            "no time for each sequence",
            "own = (seqs + chunks) * self.sequence_s + self.step_s\n        # A prompt",
            "own = self.step_s\n        # A prompt",
        ),
    ),
    *_of(
        "sim/study/statistics.py",
        INTERVALS,
        (
            "the variance of the whole population",
            "values.std(ddof=1)) / math.sqrt(n)",
            "values.std(ddof=0)) / math.sqrt(n)",
        ),
        (
            "as many degrees of freedom as values",
            "half_width=student_t((1 + level) / 2, n - 1)",
            "half_width=student_t((1 + level) / 2, n)",
        ),
        (
            "a one-sided interval",
            "half_width=student_t((1 + level) / 2, n - 1)",
            "half_width=student_t(level, n - 1)",
        ),
        (
            "what is left over goes from the end",
            "values[values.size % n_batches :].reshape(n_batches, -1)",
            "values[: values.size - values.size % n_batches].reshape(n_batches, -1)",
        ),
        ("the mean of ratios", "ratio = float(b.mean()) / base", "ratio = float((b / a).mean())"),
        (
            "batches of compare are not paired",
            "statistic(np.concatenate([a[:i], a[j:]]))",
            "statistic(np.concatenate([a[: a.size - j], a[a.size - i :]]))",
        ),
        (
            "the jackknife's pseudo-values are not scaled up",
            "_arms((n_batches - 1) * (without.mean() - without), level)",
            "_arms(without.mean() - without, level)",
        ),
        (
            "batches are skewed to the other side",
            "_arms((n_batches - 1) * (without.mean() - without), level)",
            "_arms((n_batches - 1) * (without - without.mean()), level)",
        ),
        (
            "one batch is left out of neither series",
            "without = np.array(",
            "edges = edges[:-1]\n    without = np.array(",
        ),
        ("batches that share their luck widen nothing", "wider = math.sqrt(1 + n_batches / stretches)", "wider = 1.0"),
        ("a ratio's interval is one-sided", "t = student_t((1 + level) / 2, n - 1)", "t = student_t(level, n - 1)"),
        ("the skewness seen is all there is", "SKEW_FACTOR = 1.5\n", "SKEW_FACTOR = 1.0\n"),
        (
            "the interval reaches further on the short side",
            "(t * error, longer * error) if bend > 0",
            "(t * error, longer * error) if bend < 0",
        ),
        (
            "correlation counts on one side of a value",
            "max(1.0, 2 * float(pairs.sum()) - 1)",
            "max(1.0, float(pairs.sum()))",
        ),
        (
            "noise of far lags counts as correlation",
            "np.minimum.accumulate(pairs[: negative[0]] if negative.size else pairs)",
            "np.abs(pairs)",
        ),
    ),
    *_of(
        "sim/study/paired.py",
        INTERVALS,
        (
            "requests that only A finished count",
            "known = ~(np.isnan(a) | np.isnan(b))",
            "known = ~np.isnan(a)",
        ),
        ("four stretches of a queue suffice", "LEAST_STRETCHES = 12\n", "LEAST_STRETCHES = 4\n"),
        (
            "the queue's memory is ignored",
            "short = min(stretches, seen) / LEAST_STRETCHES",
            "short = seen / LEAST_STRETCHES",
        ),
        (
            "the latencies' correlation is ignored",
            "short = min(stretches, seen) / LEAST_STRETCHES",
            "short = stretches / LEAST_STRETCHES",
        ),
        (
            "what the ratio leaves over may be correlated",
            "for each in (a, b, b - b.mean() / a.mean() * a))",
            "for each in (a, b))",
        ),
        (
            "only the first run has to reach its tail",
            "for side in (a, b))\n        # Few",
            "for side in (a,))\n        # Few",
        ),
        (
            "a quantile needs no more stretches than a mean",
            "least_stretches = max(LEAST_STRETCHES, 1 / min(probability, 1 - probability) - 1e-9)",
            "least_stretches = LEAST_STRETCHES",
        ),
        (
            "a single excursion is enough for a quantile",
            "LEAST_BEYOND, ENOUGH_BEYOND = 2, 4",
            "LEAST_BEYOND, ENOUGH_BEYOND = 0, 4",
        ),
        (
            "a run as short as it may be is aimed at",
            "ENOUGH_STRETCHES = 20\n",
            "ENOUGH_STRETCHES = 12\n",
        ),
        (
            "idle replicas count as service",
            "np.diff(start)[since[1:] < start[:-1]]",
            "np.diff(start)",
        ),
        ("a load is that of one replica", "(between.mean() * hosts.size)", "between.mean()"),
        ("arrivals are as even as can be", "between.var() / between.mean() ** 2 + gaps.var()", "gaps.var()"),
        ("service is as even as can be", "+ gaps.var() / gaps.mean() ** 2", ""),
        ("a full queue holds stretches", "    if load >= 1:\n        return 0.0\n", ""),
    ),
    *_of(
        "sim/study/compare.py",
        INTERVALS,
        (
            "seeds of scenarios are not paired",
            "for x, y in zip(*values, strict=True) if _known(x)",
            "for x, y in zip(values[0], values[1][::-1], strict=True) if _known(x)",
        ),
        ("A's window alone decides", "kept = a.in_window & b.in_window", "kept = a.in_window"),
        (
            "results are compared whatever their load",
            "stretches = min(_stretches(each, order) for each in (a, b))",
            "stretches = math.inf",
        ),
        (
            "only A's queue counts",
            "stretches = min(_stretches(each, order) for each in (a, b))",
            "stretches = _stretches(a, order)",
        ),
        (
            "clients that wait are taken for a queue",
            'if (workload.get("arrivals") or {}).get("process") == "closed_loop":',
            "if False:",
        ),
        (
            "saturated results have a change",
            "        if any(saturated) and metric.startswith(UNSTEADY):",
            "        if False:",
        ),
        (
            "saturated scenarios have a change",
            "    elif any(verdicts) and metric.startswith(UNSTEADY):",
            "    elif False:",
        ),
    ),
    *_of(
        "sim/warmup.py",
        ("tests/study/test_statistics.py", "tests/results/test_window.py"),
        ("the warm-up rule divides once", "/ left.astype(np.float64) ** 2", "/ left.astype(np.float64)"),
        ("no warm-up is cut", "return cut * batch", "return 0"),
        ("a warm-up that never ends is cut in the middle", "if cut == half:", "if cut > half:"),
    ),
    *_of(
        "sim/metrics/fleet.py",
        ("tests/results/test_metrics.py",),
        ("a machine that drains serves nobody", "[:, [READY, DRAINING]]", "[:, [READY]]"),
    ),
    *_of(
        "sim/metrics/figures.py",
        ("tests/scenario/test_fleet.py",),
        (
            "machines could compute while they were off",
            '(serving @ np.array(meta["machine_peaks"])).tolist()',
            '(span_s * np.array(meta["machine_peaks"])).sum(axis=0).tolist()',
        ),
    ),
    *_of(
        "sim/metrics/windows.py",
        ("tests/results/test_window.py", "tests/results/test_metrics.py"),
        (
            "a run is cut unasked",
            'WHOLE: Mapping[str, Any] = {"rule": "whole"}',
            'WHOLE: Mapping[str, Any] = {"rule": "after_warmup", "from_s": None, "to_s": None}',
        ),
        (
            "a window holds the tail after the last arrival",
            "return int(arrival_ns[order[cut]]), last",
            'return int(arrival_ns[order[cut]]), int(requests["finish_ns"].max())',
        ),
        (
            "a stated window holds the tail",
            'end = last if window["to_s"] is None',
            'end = int(requests["finish_ns"].max()) if window["to_s"] is None',
        ),
    ),
    *_of(
        "sim/study/optimize.py",
        ("tests/study/test_optimize.py",),
        ("candidates that are left open keep the SLO", "found.met is True for", "found.met is not False for"),
        (
            "candidates with a run that failed keep the SLO",
            "if len(whole) == len(runs) else None",
            "if whole else None",
        ),
        (
            "energy of one GPU",
            ".fillna(gpu_s * watt),",
            ".fillna(gpu_s / table['gpus'] * watt),",
        ),
        ("prices are by the second", "/ 3600.0", "/ 1.0"),
        ("equal rows push each other off the front", "or (second[index] == best_y and first[index] == best_x)", ""),
    ),
    *_of(
        "policies/classes.py",
        ("tests/policies/test_classes.py",),
        ("the highest class gives way first", "key=lambda seq: -seq.priority)", "key=lambda seq: seq.priority)"),
        (
            "equals give way too",
            "if seq.priority > first.priority and not seq.leaving",
            "if seq.priority >= first.priority and not seq.leaving",
        ),
        (
            "all of a lower class give way",
            "for n in range(1, len(lower) + 1) if enough(n)",
            "for n in (len(lower),) if enough(n)",
        ),
        (
            "who gives way is driven out in vain",
            "        if not enough(len(lower)):\n            return []\n",
            "        if not enough(len(lower)):\n            return lower\n",
        ),
        (
            "a tenant that comes back is not lifted",
            "counters[tenant] = max(counters.get(tenant, 0), least)",
            "counters[tenant] = max(counters.get(tenant, 0), 0)",
        ),
        (
            "weights of classes do not count",
            "counters.get(tenant, 0) + tokens * terms.token_cost[id_]",
            "counters.get(tenant, 0) + tokens",
        ),
        ("prompts are counted with each look", "prompt_weight * prompt if before < 0 else 0", "prompt_weight * prompt"),
        (
            "who gave way is counted anew",
            "back=frozenset(id_ for id_ in still if id_ in emitted)",
            "back=frozenset(id_ for id_ in still if id_ not in emitted)",
        ),
        ("late are those whose limit is still to come", "if due_ns < view.now_ns}", "if due_ns > view.now_ns}"),
        (
            "the demoted go first",
            "return (*on_time, *(seq._replace(priority=DEMOTED)",
            "return (*reversed(on_time), *(seq._replace(priority=-DEMOTED)",
        ),
        (
            "answers are shortened of all who wait",
            "if seq.id in late and view.max_tokens[seq.id] > tokens",
            "if view.max_tokens[seq.id] > tokens",
        ),
    ),
    *_of(
        "sim/engine/requests.py",
        ("tests/policies/test_classes.py",),
        (
            "a shortened answer loses what it has",
            "tokens = max(tokens, self.output[id_] - self.left[id_] + 1)",
            "tokens = max(tokens, 1)",
        ),
        (
            "what a shortened answer lacks is not counted",
            "self.shortened[id_] = self.shortened.get(id_, 0) + lacks",
            "self.shortened[id_] = lacks",
        ),
        (
            "clients allow what they did",
            "self.max_tokens[id_] = min(self.max_tokens[id_], tokens)",
            "self.max_tokens[id_] = self.max_tokens[id_]",
        ),
    ),
    *_of(
        "policies/control/tracking.py",
        ("tests/policies/test_control.py",),
        (
            "machines that start are counted as ready",
            "again = (total + (0.0 if ratio > 1",
            "again = (total + (0.0 if ratio < 1",
        ),
        ("tolerance is not kept", "abs(ratio - 1.0) <= self.tolerance", "abs(ratio - 1.0) <= 0.0"),
        (
            "as many more as the ratio asks for",
            "return min(ceil(ratio * ready - 1e-9), most)",
            "return ceil(ratio * ready - 1e-9)",
        ),
        ("four more are not allowed to a few", "most = max(2 * current, current + 4)", "most = 2 * current"),
        ("KV use of all machines is their mean", "return pool.kv_use * pool.ready", "return pool.kv_use"),
    ),
    *_of(
        "policies/control/concurrency.py",
        ("tests/policies/test_control.py",),
        ("a panic lets machines go", "asked(self.stable_s, now), seen.mine.machines)", "asked(self.stable_s, now))"),
        ("who comes to none waits for ever", "return min(1, total)", "return 0"),
        ("the window is all of the past", "n = min(max(round(seconds / seen.interval_s), 1), end)", "n = end"),
    ),
    *_of(
        "policies/control/rates.py",
        ("tests/policies/test_control.py",),
        ("everybody waits", "waits = blocked / (1.0 - load / machines * (1.0 - blocked))", "waits = 1.0"),
        ("the mean rate decides", "max((each.came for each in seen.past)", "min((each.came for each in seen.past)"),
        (
            "those who are late do not matter",
            "machines = max(machines, pool.machines + 1)",
            "machines = max(machines, pool.machines)",
        ),
    ),
    *_of(
        "policies/control/schedule.py",
        ("tests/policies/test_control.py", "tests/engine/test_fleet.py"),
        (
            "a schedule looks ahead",
            "bisect_right(self.at_s, now_s + 1e-9) - 1]",
            "bisect_right(self.at_s, now_s + 1e-9) % len(self.machines)]",
        ),
        (
            "the perfect one does not know how long a start takes",
            "(seen.now_s + self.lead_s + seen.interval_s)",
            "(seen.now_s + seen.interval_s)",
        ),
    ),
    *_of(
        "policies/control/seen.py",
        ("tests/policies/test_control.py",),
        ("machines go at once", "if at_s > now_s - down_window_s", "if at_s > now_s"),
        ("machines come at once", "if at_s > now_s - up_window_s", "if at_s > now_s"),
    ),
    *_of(
        "sim/engine/control.py",
        ("tests/engine/test_control.py",),
        (
            "the busiest machine goes",
            "return 2, machine.running + _waiting(machine), -index",
            "return 2, -machine.running - _waiting(machine), -index",
        ),
        ("p95 is the median", "firsts[-(-95 * len(firsts) // 100) - 1]", "firsts[len(firsts) // 2]"),
        (
            "asking for fewer than the least is not counted",
            "pool.at_least += wanted < scaling.min_machines",
            "pool.at_least += wanted < 0",
        ),
    ),
    *_of(
        "sim/engine/lives.py",
        ("tests/engine/test_fleet.py",),
        (
            "the mean of Weibull's is its scale",
            "float(rng.weibull(self.shape)) / gamma(1.0 + 1.0 / self.shape)",
            "float(rng.weibull(self.shape))",
        ),
        (
            "all machines fail together",
            "[seed, _FAILURE_STREAM, machine, number]",
            "[seed, _FAILURE_STREAM, 0, number]",
        ),
    ),
    *_of(
        "workloads/curves.py",
        ("tests/workloads/test_curves.py",),
        (
            "gaps vary by the root",
            "standard_gamma(1 / self.cv**2, _CHUNK) * self.cv**2",
            "standard_gamma(1 / self.cv, _CHUNK) * self.cv",
        ),
        (
            "bursts come as often as they last",
            "self._curve.burst_every_s if calm else",
            "self._curve.burst_s if calm else",
        ),
        (
            "the peak is the trough",
            "wave = np.sin(turn * (seconds - self.peak_s))",
            "wave = -np.sin(turn * (seconds - self.peak_s))",
        ),
        (
            "the mean rate leaves out bursts",
            "(1 + share * (self.burst_factor - 1))",
            "(1 + 0 * share * (self.burst_factor - 1))",
        ),
    ),
    *_of(
        "workloads/servegen.py",
        ("tests/workloads/test_servegen.py",),
        ("fractions of requests are dropped", "n = int(wanted) + int(rng.random() < wanted % 1)", "n = int(wanted)"),
        (
            "lengths are of the first window",
            "return histograms[client, max(before) if before else min(own)]",
            "return histograms[client, min(own)]",
        ),
        (
            "the last request ends the window",
            "np.cumsum(gaps)[:-1] / max(float(gaps.sum()), 1e-300)",
            "np.cumsum(gaps)[:-1] / max(float(gaps[:-1].sum()), 1e-300)",
        ),
        ("Weibull is Gamma", "return rng.weibull(shape, n)", "return rng.standard_gamma(shape, n)"),
        ("a window is taken whole or not at all", "(starts + WINDOW_S > self.start_s)", "(starts >= self.start_s)"),
        (
            "the rate is not scaled",
            'float(row["rate_req_s"]) * self.rate_scale * WINDOW_S',
            'float(row["rate_req_s"]) * WINDOW_S',
        ),
    ),
    *_of(
        "sim/work.py",
        ("tests/results/test_costs.py",),
        (
            "power is that of the first iteration of a span",
            'for steps in (0, span["n"] - 1):',
            'for steps in (0, 0 * span["n"]):',
        ),
        (
            "power follows the work of a span, not of an iteration",
            "each = np.where(busy, seconds / times, 1.0)",
            "each = np.where(busy, seconds, 1.0)",
        ),
        (
            "prompts take what decodes take",
            "return of_prompts / both,",
            "return of_decodes / both,",
        ),
        (
            "reading KV takes all of a decode step",
            "np.maximum(of_decodes - unread, 0.0) / both",
            "of_decodes / both",
        ),
    ),
    *_of(
        "sim/results/costs.py",
        ("tests/results/test_costs.py", "tests/results/test_day.py"),
        ("machines that are off are paid", "(by_state.sum(axis=1) - by_state[:, OFF])", "by_state.sum(axis=1)"),
        ("idle devices draw nothing", "joule += full * (share_s + idle_s)", "joule += full * share_s"),
        (
            "answers pay for the prompts",
            "_per_million(usd, None if part is None else 1 - part, output)",
            "_per_million(usd, part, output)",
        ),
        ("classes pay by tokens alone", "return (1 - part) * by_tokens + part * (", "return by_tokens + 0 * ("),
        ("what is cached is not attended to", "attended = computed * (prompts - computed) +", "attended ="),
        (
            "requests without an answer pay for prompts",
            'answered = requests["first_token_ns"] >= 0\n    prompts',
            "answered = 1\n    prompts",
        ),
        ("carbon is by the joule", 'energy["joule"] / _J_PER_KWH * carbon', 'energy["joule"] * carbon'),
        (
            "the building's share is not of the lower end",
            'full, idle_s = n * facts["tdp_w"] * pue',
            'full, idle_s = n * facts["tdp_w"]',
        ),
    ),
    *_of(
        "sim/launch/arguments.py",
        ("tests/test_launch.py",),
        ("--no- is yes", "return table[opposite], False", "return table[opposite], True"),
        ("the first beginning is meant", "        if len(meant) == 1:\n", "        if meant:\n"),
        ("a negative number is an option", 'not word[1:2].isdigit() and word[1:2] != "."', "True"),
    ),
    *_of(
        "sim/launch/reading.py",
        ("tests/test_launch.py", "tests/test_launch_back.py"),
        ("4k is 4,096", '{"k": 1_000, "K": 1_024', '{"k": 1_024, "K": 1_024'),
        (
            "what was not taken is without effect",
            "for name, text in found.items() if self._timing[name]]",
            "for name, text in found.items() if not name]",
        ),
    ),
    *_of(
        "sim/launch/tiers.py",
        ("tests/test_launch_back.py",),
        ("LMCache is of the server", "found.append(_host(size * devices(reading)))", "found.append(_host(size))"),
        (
            "hierarchical cache counts in GiB",
            "_host(size * 1e9 * devices(reading) / GIB",
            "_host(float(size * devices(reading))",
        ),
    ),
    *_of(
        "sim/launch/writing.py",
        ("tests/test_launch_back.py",),
        ("what is left is not said", 'if key.split(".")[0] not in BESIDE]', "if not key]"),
        ("what wraps a scheduler is not said", 'while isinstance(given, dict) and "inner" in given:', "while False:"),
    ),
]


def _check(root: Path, mutation: Mutation) -> str:
    """The file's text with the change; ValueError where the old text is not found exactly once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    found = text.count(mutation.old)
    if found != 1:
        raise ValueError(
            f"{mutation.name}: its old text is found {found} times in {mutation.file}, expected once; "
            f"write it as the code is now: {mutation.old!r}"
        )
    return text.replace(mutation.old, mutation.new)


def _copy(folder: Path) -> Path:
    tree = folder / "tree"
    left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")

    def ignored(place: str, names: list[str]) -> set[str]:
        # Runs are written to results/, but tests/results/ holds tests.
        return {*left_out(place, names), *(["results"] if Path(place) == ROOT else [])}

    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (folder / "shared").symlink_to(shared.resolve())
    return tree


def _pytest(tree: Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
    """Exit code (None where time ran out) and output of the fast tests among *tests*, up to the first that fails."""
    output = tree.parent / "output.txt"
    child = _CONTEXT.Process(target=_child, args=(str(tree), tests, str(output)))
    child.start()
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        return None, ""
    return child.exitcode, output.read_text(encoding="utf-8", errors="replace")


def _child(tree: str, tests: tuple[str, ...], output: str) -> None:
    """pytest in this process, on the packages of *tree*."""
    import pytest

    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    os.chdir(tree)
    os.environ.update(PYTHONPATH=tree, OMP_NUM_THREADS="1", COLUMNS="240")
    sys.path.insert(0, tree)
    code = pytest.main(["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(int(code))


def _noticed(tree: Path, tests: tuple[str, ...]) -> str | None:
    """The test that fails first; None where all pass."""
    code, output = _pytest(tree, tests)
    if code == 0:
        return None
    if code is None:
        return f"no end within {LIMIT_S:.0f} s"
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {code} and no failed test:\n{output[-2000:]}")
    return failed[1]


@contextmanager
def _changed(tree: Path, mutation: Mutation) -> Iterator[None]:
    path = tree / mutation.file
    before = path.read_text(encoding="utf-8")
    _write(path, _check(tree, mutation))
    try:
        yield
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    """Write a module and forget its bytecode, which knows its source by second and size alone."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _try(trees: Queue[Path], mutation: Mutation, narrow: bool) -> tuple[Mutation, str | None, float]:
    tree, began = trees.get(), time.perf_counter()
    try:
        with _changed(tree, mutation):
            noticed = _noticed(tree, mutation.tests)
            if noticed is None and not narrow:
                noticed = _noticed(tree, ())
    finally:
        trees.put(tree)
    return mutation, noticed, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only changes whose name or file holds this word")
    parser.add_argument(
        "--from", dest="first", default="", help="begin with the first change whose name holds this word"
    )
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that are tested at once")
    parser.add_argument("--narrow", action="store_true", help="do not try the whole suite where the tests named pass")
    options = parser.parse_args()
    chosen = [each for each in MUTATIONS if options.only in each.name or options.only in each.file]
    try:
        for each in MUTATIONS:
            _check(ROOT, each)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.first:
        names = [each.name for each in chosen]
        chosen = chosen[next((i for i, name in enumerate(names) if options.first in name), len(names)) :]
    if not chosen:
        print(f"no change is left by --only {options.only!r} --from {options.first!r}", file=sys.stderr)
        return 2
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for job in range(max(1, options.jobs)):
            (Path(folder) / str(job)).mkdir()
            trees.put(_copy(Path(folder) / str(job)))
        tree = trees.get()
        already = _noticed(tree, tuple(sorted({test for each in chosen for test in each.tests})))
        trees.put(tree)
        if already is not None:
            print(f"{already} fails without any change; nothing can be told", file=sys.stderr)
            return 2
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            for mutation, noticed, seconds in pool.map(lambda each: _try(trees, each, options.narrow), chosen):
                survivors += noticed is None
                verdict = "SURVIVED" if noticed is None else f"noticed by {noticed}"
                print(f"{mutation.file:28} {mutation.name:56} {seconds:5.0f} s  {verdict}", flush=True)
    print(f"{len(chosen)} changes, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
