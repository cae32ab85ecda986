"""Which machines there are and which models they host: pools, those of a placement file, or one without a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hwmodels.deployment import Deployment
from hwmodels.single_pass import single_pass_catalogue
from sim.engine.spec.roles import Role
from sim.errors import ScenarioError
from sim.scenario.explain import told_by
from sim.scenario.fleet import Autoscale
from sim.scenario.placement_file import placed_groups
from sim.scenario.settings import Scenario


@dataclass(frozen=True, kw_only=True)
class PoolOf:
    """Equal machines: each of *scenarios* is a model that they host, as a scenario of its own."""

    name: str
    """Empty where the scenario has no pools."""
    serves: tuple[str, ...]
    """The names by which a workload asks for the models."""
    scenarios: tuple[Scenario, ...]
    deployments: tuple[Deployment, ...] = ()
    role: Role = "both"

    @property
    def replicas(self) -> int:
        """Machines, as many as there are at most."""
        return self.scenarios[0].replicas if self.autoscale is None else self.autoscale.max

    @property
    def autoscale(self) -> Autoscale | None:
        return self.scenarios[0].autoscale

    def prefix(self, i: int) -> str:
        """The text before the keys of the settings of its model *i*."""
        if not self.name:
            return ""
        return f"pools.{self.name}.{self.serves[i]}." if len(self.serves) > 1 else f"pools.{self.name}."

    @property
    def gpus(self) -> int:
        """GPUs of all its machines."""
        return self.replicas * self.scenarios[0].parallel.gpus


def pools_of(scenario: Scenario) -> list[PoolOf]:
    """The pools of *scenario*, nothing of them deployed yet; one without a name where it has none."""
    if scenario.placement is not None:
        return _placed(scenario)
    if scenario.pools is None:
        return [PoolOf(name="", serves=(scenario.model,), scenarios=(scenario,))]
    found = []
    for name, pool in scenario.pools.items():
        if pool.models is None:
            one = scenario.pool(name)
            found.append(PoolOf(name=name, serves=(one.model,), scenarios=(one,), role=pool.role))
        else:
            own = pool.model_dump(exclude_unset=True).get("decoding_by_model") or {}
            models = tuple(
                scenario.pool(
                    name, model=_original(scenario, model), **({"decoding": own[model]} if model in own else {})
                )
                for model in pool.models
            )
            found.append(PoolOf(name=name, serves=tuple(pool.models), scenarios=models, role=pool.role))
    return found


def _original(scenario: Scenario, model: str) -> str:
    """The model that NAME#TAG is a copy of."""
    return model if scenario.find(model) is not None else model.partition("#")[0]


def _placed(scenario: Scenario) -> list[PoolOf]:
    """A pool for each group of the placement that hosts anything: of one machine, or of as many as `autoscale` asks for."""
    assert scenario.placement is not None
    file = scenario.find(scenario.placement)
    if file is None:
        raise ScenarioError(f"{scenario.source}: placement: {scenario.placement} does not exist")
    with told_by(scenario, "placement"):
        groups = placed_groups(file)
        pools: dict[str, Any] = {}
        for number, group in enumerate(groups):
            table = [model for model in group.models if _original(scenario, model) in single_pass_catalogue()]
            if table:
                raise ScenarioError(
                    f"placement: {file} hosts {table[0]}, of which only a table of single-pass latencies is known; run replays "
                    "placements of catalogue models (rooftrace models), and rooftrace place scores this one"
                )
            if group.models:
                pools[f"group-{number}"] = {
                    "models": list(group.models),
                    "parallel": {"pipeline": group.inter_op, "tensor": group.intra_op},
                    "replicas": 1 if scenario.autoscale is None else max(scenario.autoscale.min, 1),
                }
        if not pools:
            raise ScenarioError(f"placement: {file} hosts no model")
    settings = {key: value for key, value in scenario.settings().items() if key != "placement"}
    return pools_of(Scenario.from_mapping({**settings, "pools": pools}, source=scenario.source, folder=scenario.folder))
