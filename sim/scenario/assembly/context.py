"""The effect of a server's limit of prompt and answer (`memory.max_model_len`) on the requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hwmodels.model import load_model
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from hwmodels.memory import MemoryPlan
    from workloads import Workload
    from workloads.columns import IntArray


def limits_of(scenario: Scenario, pools: Sequence[PoolOf]) -> dict[str, int]:
    """The limit of each model that has one, by the name that it is hosted as; ScenarioError where its pools have different ones."""
    given: dict[str, set[int | None]] = {}
    for pool in pools:
        for name, each in zip(pool.serves, pool.scenarios, strict=True):
            given.setdefault(name, set()).add(each.memory.max_model_len)
    for name, limits in given.items():
        if len(limits) > 1:
            said = " and ".join(sorted("none" if limit is None else str(limit) for limit in limits))
            raise ScenarioError(
                f"{scenario.source}: memory.max_model_len: the pools that serve {name} have different ones ({said}); "
                "give all of them one"
            )
    return {name: limit for name, (limit,) in given.items() if limit is not None}


def within_context(
    workload: Workload, limits: Mapping[str, int], rows: Mapping[str, int]
) -> tuple[Workload, list[str]]:
    """The requests with answers that end at the limit of their model, and what was cut in a sentence.

    vLLM ends an answer when prompt and answer have as many tokens as `--max-model-len`, and refuses a prompt that leaves no room
    for one token: such a request keeps its length here and is rejected by the engine. *rows*: numbers of the models that the
    workload asks for.
    """
    outputs = np.asarray(workload.output_tokens)
    cut = outputs.copy()
    for name, limit in limits.items():
        room, row = limit - np.asarray(workload.prompt_tokens), rows.get(name)
        chosen = room > 0 if row is None else (room > 0) & (workload.model_index == row)
        cut = np.where(chosen, np.minimum(cut, room), cut)
    shortened = int((cut < outputs).sum())
    if not shortened:
        return workload, []
    note = f"memory.max_model_len cuts the answers of {shortened:,} of {len(outputs):,} requests where prompt and answer reach it."
    return replace(workload, output_tokens=cut, **_blocks_within(workload, cut)), [note]


def _blocks_within(workload: Workload, outputs: IntArray) -> dict[str, IntArray]:
    """The block ids of requests whose answers have *outputs* tokens: none of what is no longer emitted."""
    ids, offsets, size = workload.prefix_blocks, workload.prefix_offsets, workload.prefix_block_tokens
    if ids is None or offsets is None or size is None:
        return {}
    counts = np.diff(offsets)
    kept = np.minimum(counts, -(-(np.asarray(workload.prompt_tokens) + outputs) // size))
    within = np.arange(len(ids)) - np.repeat(offsets[:-1], counts)
    return {
        "prefix_blocks": ids[within < np.repeat(kept, counts)],
        "prefix_offsets": np.concatenate(([0], np.cumsum(kept))),
    }


def check_longest(scenario: Scenario, plan: MemoryPlan) -> None:
    """ScenarioError where the engine would not start: its KV cache has to hold one request as long as the limit."""
    limit, tokens = scenario.memory.max_model_len, plan.device_blocks * plan.block_tokens
    counted = plan.override is None and plan.layer_groups is None and all(stage.block_bytes for stage in plan.stages)
    if limit is not None and scenario.stack.needs_longest and counted and tokens < limit:
        raise ScenarioError(
            f"{scenario.source}: memory.max_model_len: {scenario.stack.title} does not start where the KV cache ({tokens:,} "
            f"tokens) does not hold one request of {limit:,} tokens; lower it, raise memory.gpu_memory_utilization, or use more "
            "devices"
        )


def beyond_own_context(pools: Sequence[PoolOf]) -> Iterator[str]:
    """A note where a limit is above what the model's own config has."""
    for each in (scenario for pool in pools for scenario in pool.scenarios):
        limit = each.memory.max_model_len
        own = None if limit is None else load_model(each.find(each.model) or each.model).max_positions
        if limit is not None and own is not None and limit > own:
            yield (
                f"memory.max_model_len is {limit:,}, and the model's config ends at {own:,} tokens: servers take that with rope "
                "scaling, or refuse to start."
            )
