"""Devices that share sequences (`parallel.decode_context`, `parallel.prefill_context`), and what is not modelled beside it."""

from __future__ import annotations

from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.keys import StepHardware

_WITH_KV = ("draft_model", "eagle", "mtp")
"""Methods of drafting that keep KV of their own."""


def check_shared_context(pool: PoolOf) -> None:
    """ScenarioError where a pool's devices share sequences, and something beside it is not modelled."""
    for scenario in pool.scenarios:
        parallel = scenario.parallel
        name = "decode_context" if parallel.decode_context > 1 else "prefill_context"
        if getattr(parallel, name) == 1:
            continue
        priced = scenario.cost_model == "roofline" or scenario.stack_name == "ideal"
        lacks = {
            f"serving_stack {scenario.stack_name}": not (priced or scenario.stack.shares_context),
            "measured times of whole steps": isinstance(scenario.hardware, StepHardware),
            f"decoding.method {scenario.decoding.method}": scenario.decoding.method in _WITH_KV,
            "memory.tiers": bool(scenario.memory.tiers),
            f"a pool that can only {pool.role}": pool.role != "both",
        }
        found = next((what for what, there in lacks.items() if there), None)
        if found is not None:
            raise ScenarioError(
                f"{scenario.source}: parallel.{name} with {found} is not modelled; leave one of the two out "
                f"(--set parallel.{name}=1)"
            )
