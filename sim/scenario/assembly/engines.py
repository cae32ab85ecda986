"""The choices that an engine makes by itself where the settings of its scheduler are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwmodels.deployment import Deployment
from hwmodels.memory import engine_defaults
from hwmodels.stacks import stack_with
from hwmodels.stacks.description import Circumstances, RefusedSettingError
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.decoding import DRAFT_HAS_KV
from sim.scenario.settings import Scenario

_PLANNED_AS_IT_IS = "micro-batches of a pipeline are planned while others run as it is"
_TAKE_TURNS = "models that share a machine take turns, and no turn is planned ahead"


def left_to_the_engine(
    scenario: Scenario, deployment: Deployment, chosen: Mapping[str, int], *, shared: bool
) -> dict[str, Any]:
    """Settings by their dotted keys that the engine whose scheduler is asked for chooses by itself, where they are left out;
    *chosen* are those that were `auto`, *shared*: the machine serves other models too."""
    pipelined = scenario.parallel.pipeline > 1 or (scenario.micro_batches or 1) > 1
    method = scenario.decoding.method
    found: dict[str, Any] = {}
    for at, settings in named.chain({"policy": scenario.scheduler.policy, **scenario.scheduler.settings}, "scheduler"):
        settings = {name: chosen.get(f"{at}.{name}", value) for name, value in settings.items()}
        policy = settings.get("policy")
        if not isinstance(policy, str):
            continue
        stack = stack_with(policy, scenario.stack_name)
        if stack is None or stack.choices is None:
            continue
        if policy != stack.scheduler and not stack.schedulers[policy].chosen_for:
            continue
        around = Circumstances(
            limits=engine_defaults(stack.name, deployment.device, tensor=scenario.parallel.tensor),
            decoding=method,
            draft_has_kv=method in DRAFT_HAS_KV,
            data=scenario.parallel.data,
            max_positions=deployment.model.max_positions or 0,
            no_overlap=_PLANNED_AS_IT_IS if pipelined else _TAKE_TURNS if shared else None,
            has_windows=deployment.model.window_tokens is not None,
        )
        try:
            found |= {f"{at}.{name}": value for name, value in stack.choices(settings, around).items()}
        except RefusedSettingError as error:
            raise ScenarioError(f"{scenario.source}: {at}.{error.setting}: {error}; leave it out") from None
    return found
