"""A command as it is written for a scenario, option by option: what of the scenario has not been asked for is not carried."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sim.scenario import Scenario


class Writing:
    """A command as it grows, and which of the scenario's settings it carries."""

    def __init__(self, scenario: Scenario, target: str) -> None:
        self.scenario = scenario
        self.target = target
        self.words: list[str] = []
        self.files: dict[str, str] = {}
        self._speculates = False
        self._scheduler = dict(scenario.scheduler.settings)
        self._memory = scenario.memory.model_dump(exclude_defaults=True)
        self._left: list[str] = []
        own = scenario.scheduler.policy
        if own != target:
            self._left.append(f"scheduler {own} is not {target}'s own; the server runs its own")
            self._scheduler = {}
        if scenario.stack_name not in (target, "ideal", "eager"):
            self._left.append(
                f"it was simulated with the kernels and overheads of {scenario.serving_stack}, not of {target}"
            )

    def start(self, *words: str) -> None:
        self.words += words

    def flag(self, option: str, value: Any) -> None:
        """An option with a value; None leaves it to the server, True is a switch."""
        if value is None or value is False:
            return
        self.words.append(option)
        if value is not True:
            self.words.append(str(value))

    def numbers(self, option: str, values: Sequence[int] | None) -> None:
        """An option that takes several numbers."""
        if values is not None:
            self.words += [option, *map(str, values)]

    def scheduler(self, key: str) -> Any:
        return self._scheduler.pop(key, None)

    def memory(self, key: str) -> Any:
        return self._memory.pop(key, None)

    def carries_speculation(self) -> None:
        self._speculates = True

    def file(self, name: str, values: Mapping[str, Any]) -> None:
        """A YAML file that the command reads."""
        import yaml

        self.files[name] = yaml.safe_dump(dict(values), sort_keys=False)

    def not_carried(self, text: str) -> None:
        self._left.append(text)

    def left_out(self) -> list[str]:
        """What of the scenario the command does not say."""
        found = list(self._left)
        found += [f"scheduler.{key}: {value}" for key, value in self._scheduler.items() if key != "policy"]
        found += [f"memory.{key}: {value}" for key, value in self._memory.items()]
        if self.scenario.decoding.method != "autoregressive" and not self._speculates:
            found.append(f"decoding.method: {self.scenario.decoding.method}")
        return found

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
        return above + " \\\n".join(lines)
