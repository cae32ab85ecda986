"""A command as it is written for a scenario, option by option: what of the scenario has not been asked for is not carried."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hwmodels.model import hub_name
from sim.scenario import Scenario

_NOT_OF_A_SERVER = (
    *("workload", "slo", "window", "seed", "costs", "cost_model", "hardware", "serving_stack", "serving_release"),
    "decoding.acceptance",
)
"""Settings that a scenario is simulated under: traffic, limits, figures, and on what it runs, which stands above the command."""


BESIDE: Mapping[str, str] = {
    "autoscale": "set up what starts and stops servers beside them",
    "failures": "of the simulation",
    "classes": "requests say themselves what they are",
    "links": "of the network",
    "handover": "by the servers' own rules",
    "placement": "of the simulation",
}
"""Sections that no command says, and why."""


def beside(key: str, value: Any) -> str:
    """A section of `BESIDE` in one line."""
    flow = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return f"{key}: {flow.removesuffix('...').strip()} ({BESIDE[key]})"


def model_name(scenario: Scenario) -> str:
    """The name that a server loads: the scenario's where it is the hub's or a folder, or else the hub's of the catalogue's."""
    return to_load(scenario.model)


def to_load(model: str) -> str:
    """A config.json stands for its folder, where its weights would be."""
    if Path(model).name == "config.json":
        return str(Path(model).parent)
    return model if "/" in model else hub_name(model) or model


_CACHES = {"fp8": "fp8", "bf16": "bfloat16", "fp16": "float16"}


class Writing:
    """A command as it grows, and which of the scenario's settings it carries: all others are named at the end."""

    def __init__(
        self,
        scenario: Scenario,
        target: str,
        *,
        name: str = "",
        role: str = "both",
        connector: str | None = None,
        forced_acceptance: bool = False,
    ) -> None:
        """*name*: of its pool; *role*: prefill, decode or both; *connector*: of the link between them, as scenarios say it;
        *forced_acceptance*: the server is made to accept what the scenario says."""
        self.name = name
        self.forced_acceptance = forced_acceptance
        self.variables: list[str] = []
        self.scenario = scenario
        self.target = target
        self.role = role
        self.connector = connector
        self.words: list[str] = []
        self.files: dict[str, str] = {}
        self._left: list[str] = []
        self._settings = _leaves(scenario.model_dump(exclude_defaults=True))
        self._memory = scenario.memory.model_dump(exclude_defaults=True)
        self.carries("model", "scheduler", "memory", "pools", "replicas", "router.policy", *_NOT_OF_A_SERVER)
        if scenario.replicas == 1 and not scenario.pools:
            self.carries("router")
        if model_name(scenario).endswith(".json"):
            self._left.append(
                f"{scenario.model} describes a model and holds no weights: write their folder or repository in its place"
            )
        self._scheduler = self._own_scheduler()
        if scenario.memory.tiers:
            self._memory["tiers"] = scenario.memory.tiers
        if scenario.stack_name not in (target, "ideal", "eager"):
            self._left.append(
                f"it was simulated with the kernels and overheads of {scenario.serving_stack}, not of {target}"
            )

    def _own_scheduler(self) -> dict[str, Any]:
        """Settings of the target's own scheduler, inside of what is wrapped around it."""
        given: Any = self.scenario.scheduler.model_dump()
        while isinstance(given, dict) and "inner" in given:
            around = {key: value for key, value in given.items() if key != "inner"}
            self._left.append(
                f"scheduler {around.pop('policy')}{around or ''} around another; the server has no such thing"
            )
            given = given["inner"]
        given = {"policy": given} if isinstance(given, str) else dict(given)
        own = given.pop("policy")
        if own == self.target:
            return given
        self._left.append(f"scheduler {own} is not {self.target}'s own; the server runs its own")
        return {}

    def carries(self, *keys: str) -> None:
        """The settings at the dotted *keys*, and below them, are said, or said not to be."""
        self._settings = {
            name: value
            for name, value in self._settings.items()
            if not any(name == key or name.startswith(f"{key}.") for key in keys)
        }

    def start(self, *words: str) -> None:
        self.words += words

    def flag(self, option: str, value: Any) -> None:
        """An option with a value; None leaves it to the server, True is a switch."""
        if value is None or value is False:
            return
        self.words.append(option)
        if value is not True:
            self.words.append(str(value))

    def several(self, option: str, values: Sequence[int | str] | None) -> None:
        """An option that takes several values."""
        if values is not None:
            self.words += [option, *map(str, values)]

    def scheduler(self, key: str) -> Any:
        return self._scheduler.pop(key, None)

    def memory(self, key: str) -> Any:
        return self._memory.pop(key, None)

    def file(self, name: str, values: Mapping[str, Any]) -> None:
        """A YAML file that the command reads."""
        self.files[name] = yaml.safe_dump(dict(values), sort_keys=False)

    def not_carried(self, text: str) -> None:
        self._left.append(text)

    def left_out(self) -> list[str]:
        """The settings of the scenario that the command does not say."""
        found = list(self._left)
        found += [f"scheduler.{key}: {value}" for key, value in self._scheduler.items()]
        found += [f"memory.{key}: {value}" for key, value in self._memory.items()]
        found += [f"{key}: {value}" for key, value in self._settings.items() if key.split(".")[0] not in BESIDE]
        given = self.scenario.model_dump(exclude_defaults=True)
        return found + [
            beside(key, given[key]) for key in BESIDE if any(name.split(".")[0] == key for name in self._settings)
        ]

    def text(self) -> str:
        """The files as comments, and the command with one option a line."""
        above = "".join(
            f"# {name}:\n" + "".join(f"#   {line}\n" for line in body.splitlines()) for name, body in self.files.items()
        )
        lines: list[str] = []
        for word in self.words:
            if word.startswith("--"):
                lines.append(f"    {word}")
            elif lines:
                lines[-1] += f" {shlex.quote(word)}"
            else:
                lines.append(word)
        return above + " ".join([*self.variables, ""]) + " \\\n".join(lines)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            found[f"{prefix}{key}"] = value
    return found


def formats(command: Writing, caches: Mapping[str, str] = _CACHES) -> None:
    """Number formats, where the scenario changes what the checkpoint has; *caches*: the engine's own names of the cache's."""
    scenario = command.scenario
    command.carries("precision", "kv_precision")
    if scenario.precision in ("bf16", "fp16", "fp32"):
        command.flag("--dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[scenario.precision])
    elif scenario.precision == "fp8":
        command.flag("--quantization", "fp8")
    elif scenario.precision is not None:
        command.not_carried(f"precision {scenario.precision}: serve a checkpoint that has it")
    if scenario.kv_precision is not None:
        names = {**_CACHES, **caches}
        command.flag("--kv-cache-dtype", names.get(scenario.kv_precision, scenario.kv_precision))
