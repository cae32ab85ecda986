"""A scenario: settings read from a file or a mapping, changed by key, and known by a hash."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, PrivateAttr, ValidationError

from hwmodels.model import model_file
from hwmodels.overheads import serving_stacks
from hwmodels.stack_files import load_stack_file
from hwmodels.stacks import default_scheduler, stacks
from hwmodels.stacks.description import Stack
from sim.errors import ScenarioError
from sim.scenario import explain
from sim.scenario.chosen import Scheduler
from sim.scenario.keys import Settings, Slo, StepHardware
from sim.scenario.modules import source_digest
from sim.scenario.placement_file import placed_groups
from sim.scenario.section import Mark, MayBeFile, content_of
from sim.scenario.yaml import parse_yaml, read_text
from sim.text import unknown
from workloads.sources import trace_files

DEFAULT_SCENARIO = """\
model: llama-3.1-8b
hardware: h100-sxm
workload: {trace: conversation}
slo: {ttft_s: 1.0, tpot_s: 0.05}
"""


_OF_ALL_POOLS = ("pools", "placement", "links", "handover", "encode", "failures")
"""Settings that a pool, as a scenario of its own, does not have."""


class Scenario(Settings):
    """A deployment, its traffic and their settings, which are to be simulated. Built from keyword arguments, `Scenario.load(path)`
    or `Scenario.default()`.

    Raises ScenarioError, in one sentence, for an unknown key, a value of the wrong type or out of bounds.
    Relative paths are looked up beside the scenario file, then in the current folder.
    """

    _source: str = PrivateAttr(default="scenario")
    _folder: Path = PrivateAttr(default_factory=Path)

    def __init__(self, **settings: Any) -> None:
        self._build_from(settings, "scenario", Path())

    def _build_from(self, settings: Mapping[str, Any], source: str, folder: Path) -> None:
        try:
            BaseModel.__init__(self, **_with_plain_hardware(settings, source))
        except ValidationError as error:
            raise ScenarioError(explain.sentence(error, Settings, source)) from None
        self._source = source
        self._folder = folder
        if "scheduler" not in self.model_fields_set:
            # As a default is: what was given stays what was given.
            object.__setattr__(self, "scheduler", Scheduler(policy=self._scheduler_of_the_stack()))

    def _scheduler_of_the_stack(self) -> str:
        try:
            return default_scheduler(self.stack_name)
        except ScenarioError:  # which is raised again where the stack is read
            return default_scheduler()

    @classmethod
    def from_mapping(cls, settings: Any, *, source: str = "scenario", folder: Path | None = None) -> Scenario:
        """The scenario that *settings* describe; *source* names it in errors, paths are relative to *folder*."""
        explain.check_mapping(settings, Settings, source, "a scenario")
        _check_keys(settings, source)
        scenario = cls.__new__(cls)
        scenario._build_from(settings, source, folder or Path())  # noqa: SLF001 - of this class
        return scenario

    @classmethod
    def from_yaml(cls, text: str, *, source: str = "scenario", folder: Path | None = None) -> Scenario:
        """The scenario written in *text*; `{}` is all defaults, and an empty text is none."""
        return cls.from_mapping(parse_yaml(text, source), source=source, folder=folder)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scenario:
        """The scenario in the YAML file at *path*."""
        file = Path(path)
        return cls.from_yaml(read_text(file), source=str(file), folder=file.parent)

    @classmethod
    def default(cls) -> Scenario:
        """Llama-3.1-8B on one H100 under the built-in conversation workload: what runs without a file."""
        return cls.from_yaml(DEFAULT_SCENARIO, source="default scenario")

    def with_set(self, *assignments: str) -> Scenario:
        """A copy with settings changed by 'key.path=value', the value being read as YAML; checked when all are changed.

        A mapping as the value takes the place of the whole section: 'scheduler={policy: vllm-v0}'.
        """
        settings = copy.deepcopy(self.settings())
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            key = key.strip()
            if not equals or not key:
                raise ScenarioError(f"--set {assignment!r}: expected key.path=VALUE, such as replicas=2")
            self._put(settings, key, parse_yaml(text, f"--set {key}"))
        return Scenario.from_mapping(settings, source=self._source, folder=self._folder)

    def with_value(self, key: str, value: Any) -> Scenario:
        """A copy with the setting at the dotted *key* changed to *value*."""
        return self.with_values({key: value})

    def with_values(self, changes: Mapping[str, Any]) -> Scenario:
        """A copy with settings changed by dotted key, in order; checked when all are changed."""
        settings = copy.deepcopy(self.settings())
        for key, value in changes.items():
            self._put(settings, key, copy.deepcopy(value))
        return Scenario.from_mapping(settings, source=self._source, folder=self._folder)

    def _put(self, settings: dict[str, Any], key: str, value: Any) -> None:
        at: Any = settings
        *path, last = key.split(".")
        for depth, part in enumerate(path):
            inner = at.get(part)
            if inner is None and depth == 1 and path[0] in ("pools", "links") and at:
                what = f"{self._source}: {path[0]} has no {part} ({key}; {path[0]}.{part}={{...}} adds one)"
                raise ScenarioError(unknown(what, part, at))
            if inner is None:
                inner = at[part] = self._before(settings, path[: depth + 1], last)
            elif isinstance(inner, str) and part == "hardware" and last in _LIMITED:
                inner = at[part] = {"name": inner}
            elif isinstance(inner, str) and (short := explain.short_key(Settings, path[: depth + 1])) is not None:
                inner = at[part] = {short: inner}
            elif not isinstance(inner, dict):
                raise ScenarioError(f"{self._source}: {'.'.join(path[: depth + 1])} has no settings of its own ({key})")
            at = inner
        at[last] = value

    def _before(self, settings: Mapping[str, Any], path: list[str], last: str) -> dict[str, Any]:
        """The section at *path* where nothing has been set, for its key *last*: for a pool that of the top level."""
        name = path[0]
        if len(path) == 3 and name == "pools":
            name = path[2]
            if name == "hardware" and last in _LIMITED:
                return {}
            if isinstance(settings.get(name), str):
                return {str(explain.short_key(Settings, path)): settings[name]}
            if settings.get(name) is not None:
                return copy.deepcopy(settings[name])
        elif len(path) > 1:
            return {}
        if name == "scheduler":
            stack = {key: settings[key] for key in ("serving_stack",) if key in settings}
            return {"policy": Scenario.from_mapping(stack, source=self._source, folder=self._folder).scheduler.policy}
        default = Settings.model_fields[name].default if name in Settings.model_fields else None
        return default.model_dump(exclude_unset=True) if isinstance(default, BaseModel) else {}

    def pool(self, name: str, **over: Any) -> Scenario:
        """The pool called *name* as a scenario of its own, its settings and *over* over those of the top level."""
        assert self.pools is not None
        settings = {key: value for key, value in self.settings().items() if key not in _OF_ALL_POOLS}
        own = self.pools[name].model_dump(exclude_unset=True)
        if own.get("hardware") is not None:
            settings.pop("power_limit_w", None)  # it was set for the devices beside it
        for key, value in {**own, **over}.items():
            if key in ("parallel", "memory") and value is not None:
                settings[key] = {**settings.get(key, {}), **value}
            elif key not in ("role", "models", "decoding_by_model") and value is not None:
                settings[key] = value
        return Scenario.from_mapping(settings, source=f"{self._source}: pools.{name}", folder=self._folder)

    def settings(self) -> dict[str, Any]:
        """The settings that were given, without the defaults, as plain values."""
        return self.model_dump(exclude_unset=True)

    def settings_from_anywhere(self) -> dict[str, Any]:
        """The same with whole paths of the files that they name, for a scenario that is written into another folder."""
        settings = self.settings()
        steps = settings["hardware"] if isinstance(settings.get("hardware"), dict) else {}
        named = [(settings, key) for key in ("model", "hardware", "placement", "serving_stack")]
        for section, key in (*named, (steps, "steps"), (steps, "device")):
            name = section.get(key)
            file = self._look_up(name) if isinstance(name, str) else None
            if file is not None:
                section[key] = str(file.resolve())
        return settings

    def resolved(self) -> dict[str, Any]:
        """Every setting, defaults included, as plain values."""
        return self.model_dump()

    @property
    def source(self) -> str:
        """The file that the scenario came from, or what else to call it."""
        return self._source

    @property
    def folder(self) -> Path:
        """Where relative paths are looked up first."""
        return self._folder

    @property
    def name(self) -> str:
        """A short name for folders: that of the scenario file, or 'default'."""
        stem = Path(self._source).stem
        return stem if self._source.endswith((".yaml", ".yml")) else stem.split()[0]

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits of the scenario's content: equal for equal settings and equal files."""
        text = json.dumps(content_of(self, self._behind), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _behind(self, text: str, mark: Mark) -> Any:
        """The part of the hash for a setting's *text*: the content of the file or the source of the module that it names."""
        digests: list[str] = []
        for file in dict.fromkeys(file for path in self._paths(text, mark) for file in self._files(path, mark)):
            with file.open("rb") as opened:
                digests.append("sha256:" + hashlib.file_digest(opened, "sha256").hexdigest())
        if isinstance(mark, MayBeFile):
            return digests or text
        if mark.policy and ":" in text:
            digests.append(source_digest(text.partition(":")[0]))
        # Whether a setting of something chosen by name is read as a file is not known here, so that its text counts too.
        return [text, *digests]

    def _files(self, path: str, mark: Mark) -> Iterator[Path]:
        """The files that are read for *path*: of a model its config.json, wherever it lies, and the file of formats beside it; of a
        trace all in the folder or of the pattern."""
        if isinstance(mark, MayBeFile) and mark.several:
            yield from self.trace_files(path)[1]
            return
        file = self._look_up(path)
        may_be_model = isinstance(mark, MayBeFile) and (mark.is_model or mark.lists_models)
        if file is None and may_be_model and "/" in path:
            file = model_file(path)
        if file is not None:
            yield file
            beside = file.with_name("hf_quant_config.json")
            if may_be_model and beside.is_file():
                yield beside

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the scenario and its placement name, without those that stand for a file beside it."""
        found: dict[str, None] = {}

        def put(text: str, mark: Mark) -> str:
            if isinstance(mark, MayBeFile) and (mark.is_model or mark.lists_models):
                names = dict.fromkeys(path.partition("#")[0] for path in self._paths(text, mark))
                found.update((name, None) for name in names if self._look_up(name) is None)
            return text

        content_of(self, put)
        return tuple(found)

    def _paths(self, text: str, mark: Mark) -> Iterator[str]:
        """The paths that a setting's *text* may stand for: itself, that of which it is a copy, and those that its file names."""
        if isinstance(mark, MayBeFile) and text in mark.names:
            return
        yield text
        yield text.partition("#")[0]
        file = self._look_up(text) if isinstance(mark, MayBeFile) and mark.lists_models else None
        if file is not None:
            with contextlib.suppress(ScenarioError):  # which is raised again where the placement is read
                for group in placed_groups(file):
                    for model in group.models:
                        yield from self._paths(model, MayBeFile(is_model=True))

    @property
    def has_limits(self) -> bool:
        """Whether there are limits to keep, of each request or of all together; of the whole workload, or of a class."""
        return any(slo.of_each or slo.of_all for slo in self.slos)

    @property
    def has_request_limits(self) -> bool:
        """Whether requests have limits of their own, so that a share of them keeps these."""
        return any(slo.of_each for slo in self.slos)

    @property
    def slos(self) -> list[Slo]:
        """The limits of the whole workload, and those of each class."""
        return [self.slo, *(each.slo for each in (self.classes or {}).values())]

    def find(self, name: str) -> Path | None:
        """The file that *name*, from a setting, stands for, beside the scenario or in the current folder; None for no file."""
        known: set[str] = set()
        content_of(self, lambda text, mark: known.update(self._paths(text, mark)))
        assert name in known, (
            f"{name!r} is of no setting marked as a file (FilePath), so that the hash would not follow it"
        )
        return self._look_up(name)

    def trace_files(self, name: str) -> tuple[Path, list[Path]]:
        """The path, folder or pattern that *name* is, beside the scenario or in the current folder, and its files, if any."""
        candidates = (self._folder / name, Path(name))
        for candidate in candidates:
            with contextlib.suppress(OSError, ValueError):
                if files := [file for file in trace_files(candidate) if os.path.isfile(file)]:
                    return candidate, files
        return candidates[-1], []

    def _look_up(self, name: str) -> Path | None:
        for candidate in (self._folder / name, Path(name)):
            for file in (candidate, candidate / "config.json"):
                if os.path.isfile(file):  # which is False, where Path.is_file raises, for a text too long to be a path
                    return file
        return None

    @property
    def device_name(self) -> str:
        """The device by its name or file, or the file of steps where that alone says it."""
        given = self.hardware
        return given if isinstance(given, str) else given.device or given.steps

    @property
    def stack_file(self) -> Path | None:
        """The file of a fitted stack that `serving_stack` names; None for a stack by name. ScenarioError where it is not there."""
        if not self.serving_stack.endswith(".toml"):
            return None
        file = self.find(self.serving_stack)
        if file is None:
            raise ScenarioError(
                f"{self._source}: serving_stack: {self.serving_stack} does not exist; `rooftrace bench fit` writes such a file"
            )
        return file

    @property
    def stack_name(self) -> str:
        """The engine of the serving stack, of the one that a file was fitted over too; ScenarioError for a file that is none."""
        file = self.stack_file
        if file is None:
            return serving_stacks()[self.serving_stack].engine

        with explain.told_by(self, "serving_stack"):
            return load_stack_file(file).stack.engine

    @property
    def stack(self) -> Stack:
        """The description of the serving stack, that which a file was fitted over included."""
        return stacks()[self.stack_name]

    def to_yaml(self) -> str:
        """The settings that were made, as YAML that `Scenario.load` reads back."""
        return yaml.safe_dump(self.settings(), sort_keys=False)

    def __repr__(self) -> str:
        return f"Scenario({', '.join(f'{key}={value!r}' for key, value in self.settings().items())})"

    __str__ = __repr__


_LIMITED = {"name": "hardware", "power_limit_w": "power_limit_w"}
"""Keys of `hardware: {name: ..., power_limit_w: ...}`, and the settings that they stand for."""


def _with_plain_hardware(settings: Mapping[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """*settings* where `hardware: {name: ..., power_limit_w: ...}`, of a pool too, are the two settings that it stands for."""
    plain = dict(settings)
    given = plain.get("hardware")
    if isinstance(given, Mapping) and not StepHardware.model_fields.keys() & given.keys():
        for key in given:
            if key not in _LIMITED:
                known = (*_LIMITED, *StepHardware.model_fields)
                raise ScenarioError(unknown(f"{source}: {prefix}hardware has no {key}", key, known))
        del plain["hardware"]
        if "power_limit_w" in given and plain.get("power_limit_w") is not None:
            raise ScenarioError(
                f"{source}: {prefix}power_limit_w is given beside {prefix}hardware and in it; leave out one of the two"
            )
        plain |= {_LIMITED[key]: value for key, value in given.items()}
    if not prefix and isinstance(plain.get("pools"), Mapping):
        plain["pools"] = {
            name: _with_plain_hardware(pool, source, f"pools.{name}.") if isinstance(pool, Mapping) else pool
            for name, pool in plain["pools"].items()
        }
    return plain


def _check_keys(settings: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    for key, value in settings.items():
        if not isinstance(key, str):
            raise ScenarioError(f"{source}: {prefix}{key!r} is not a setting; keys are words")
        if isinstance(value, Mapping):
            _check_keys(value, source, f"{prefix}{key}.")
