"""A command's options, taken one by one: what has not been taken at the end is not modelled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import RooftraceError
from sim.launch.arguments import Command, json_object, options_of


class Reading:
    """Options as they are taken, and the settings of a scenario as they are put."""

    def __init__(self, command: Command, role: str | None = None) -> None:
        """*role*: prefill or decode, where a manifest says it and not the command."""
        self.command = command
        self.settings: dict[str, Any] = {}
        self.assumed: dict[str, tuple[Any, str]] = {}
        """Settings that hold where the command says no others, each with the sentence that says so."""
        self.notes: list[str] = []
        self.release: str | None = None
        """The server's release, where it is not the one that is taken without a name."""
        self.role = role
        """prefill or decode, of a server that does one of the two."""
        self.connector: str | None = None
        """The connector that takes its KV to the other role, as `links` calls it."""
        self.host_tier: tuple[float, Mapping[str, Any]] | None = None
        """Size of a host tier as a multiple of the KV cache, which is known when the scenario is, and what else it is."""
        self.encoders: tuple[str, ...] = ()
        """The kinds of content that the model's encoders read: images, speech."""
        self.no_adapters = ""
        """Why adapters of the model are not modelled, where they are not."""
        self._left = dict(command.options)
        self.aside = list(command.aside)
        """Words before the server's own that were not taken."""
        self._timing = {option.name: option.timing for option in options_of(command.engine).values()}

    def _take(self, name: str) -> Any:
        if name not in self._timing:
            raise KeyError(f"{self.command.engine} has no option --{name}")
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self._take(name)
        return None if value is None else str(value)

    def variable(self, name: str) -> float | None:
        """The number in a variable that is set for the server."""
        word = next((each for each in self.aside if each.startswith(f"{name}=")), None)
        if word is None:
            return None
        self.aside.remove(word)
        try:
            return float(word.partition("=")[2])
        except ValueError:
            raise RooftraceError(f"{name} takes a number; got {word.partition('=')[2]!r}") from None

    def switch(self, name: str) -> bool | None:
        """True or False where it was given; None where the engine decides."""
        value = self._take(name)
        return value if isinstance(value, bool) else None if value is None else str(value).lower() not in ("false", "0")

    def integer(self, name: str) -> int | None:
        """A whole number; vLLM's 4k (4,000) and 4K (4,096) are read as well."""
        text = self.text(name)
        if text is None:
            return None
        factor = {"k": 1_000, "K": 1_024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
        try:
            return int(text) if factor == 1 else int(float(text[:-1]) * factor)
        except ValueError:
            raise RooftraceError(f"--{name} takes a whole number; got {text!r}") from None

    def longest(self, name: str) -> None:
        """Put the limit of prompt and answer together; what leaves it to the server stays so."""
        if self._left.get(name) in ("auto", "-1"):
            self.notes.append(f"--{name} {self.text(name)} is left to the server: as long as its memory has room for")
        else:
            self.put("memory.max_model_len", self.integer(name))

    def integers(self, name: str) -> list[int] | None:
        """Whole numbers of an option that takes a list."""
        value = self._take(name)
        try:
            return None if value is None else [int(each) for each in value]
        except ValueError:
            raise RooftraceError(f"--{name} takes whole numbers; got {_value(value)!r}") from None

    def words(self, name: str) -> list[str]:
        """Words of an option that takes a list; none where it was not given."""
        value = self._take(name)
        return [] if value is None else [str(each) for each in value] if isinstance(value, list) else [str(value)]

    def number(self, name: str) -> float | None:
        text = self.text(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise RooftraceError(f"--{name} takes a number; got {text!r}") from None

    def json(self, name: str) -> dict[str, Any] | None:
        value = self._take(name)
        return None if value is None else json_object(value, f"--{name}")

    def object_or_word(self, name: str) -> dict[str, Any] | str | None:
        """The JSON object of an option that takes other words as well."""
        value = self._take(name)
        if value is None or (isinstance(value, str) and not value.lstrip().startswith("{")):
            return value
        return json_object(value, f"--{name}")

    def took_role(self, role: str | None, why: str) -> None:
        """The server does prompts or answers alone, or (None) both sides of a handover that is not named."""
        self.role = role or self.role
        if self.role is None:
            self.notes.append(
                f"{why} takes KV to or from other servers, which is not modelled for a server of both roles"
            )

    def give_back(self, name: str, value: Any) -> None:
        """An option that was looked at and is not modelled after all."""
        self._left[name] = value

    def put(self, key: str, value: Any) -> None:
        """Set the scenario's dotted *key*; None leaves it out."""
        if value is None:
            return
        at = self.settings
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value

    def put_graphs(self, *, eager: bool | None, largest: Any, sizes: Any) -> None:
        """Set what is said of CUDA graphs; beside none of them, and beside all sizes, the rest is without effect."""
        self.put("cuda_graphs.eager", eager)
        self.put("cuda_graphs.sizes", None if eager else sizes)
        self.put("cuda_graphs.largest", None if eager or sizes else largest)

    def left(self) -> tuple[list[str], list[str]]:
        """Sentences on what was not taken: options that may change how long requests take, and those that cannot."""
        found = {name: _shown(name, value) for name, value in self._left.items()}
        return [text for name, text in found.items() if self._timing[name]], [
            text for name, text in found.items() if not self._timing[name]
        ]


def _shown(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name} {_value(value)}"


def _value(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


FLOATS: Mapping[str, str | None] = {
    "auto": None,
    "half": "fp16",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}
"""Names of number formats that the engines share; None: as the checkpoint has it."""
CACHES: Mapping[str, str | None] = {
    **FLOATS,
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_per_token_head": "int8",
}
WEIGHTS: Mapping[str, str | None] = {
    "fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "w8a8_fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_fp8": "fp8",
    "fp8_per_block": "fp8_block",
    "w8a8_int8": "int8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
"""Quantisations by the engines' names."""


def formats(reading: Reading, *, cache: str = "kv-cache-dtype") -> None:
    """Number formats of weights and KV cache, whose options are called alike by all engines."""
    for option, key, names in (
        ("dtype", "precision", FLOATS),
        ("quantization", "precision", WEIGHTS),
        (cache, "kv_precision", CACHES),
    ):
        given = reading.text(option)
        if given is None:
            continue
        if given in names:
            reading.put(key, names[given])
        else:
            reading.give_back(option, given)
