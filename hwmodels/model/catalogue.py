"""Models by name: those that are shipped, checkpoints that are one of these by their name, and any config.json."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwmodels.model.config import spec_from_config
from hwmodels.model.hub import cached_config, fetch_config, is_hub_name
from hwmodels.model.names import REFUSED, NameReading, normalised, quantization_config, read_name, stated_anew
from hwmodels.model.spec import ModelSpec
from hwmodels.tables import ROOM, read_json

CATALOGUE = ROOM / "models"


@functools.cache
def model_catalogue() -> Mapping[str, Path]:
    """Names of the shipped models, each with its file."""
    return {path.stem: path for path in sorted(CATALOGUE.glob("*.json"))}


@functools.cache
def _aliases() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, path in model_catalogue().items():
        for alias in read_json(path).get("rooftrace", {}).get("aliases", ()):
            found[alias.lower()] = name
    return found


@functools.lru_cache(maxsize=256)
def _shipped(name: str) -> ModelSpec:
    path = model_catalogue()[name]
    return spec_from_config(read_json(path), name=name, where=f"models/{path.name}")


@functools.cache
def _compared() -> Mapping[str, str]:
    """Names and aliases in the form that names are compared in -> the catalogue's name."""
    return {normalised(alias): name for alias, name in {**{n: n for n in model_catalogue()}, **_aliases()}.items()}


def _shipped_as(name: str) -> str | None:
    """The catalogue's own name of a model, alias or hub name; None for other names, and for a path."""
    if "/" in name and (not is_hub_name(name) or Path(name).exists()):
        return None
    return None if stated_anew(name, _compared()) else _compared().get(normalised(name))


def hub_name(name: str) -> str | None:
    """The name that the HuggingFace hub has for a model: of one in the catalogue as its source says; None for other models."""
    if _shipped_as(name) is None:
        return name if is_hub_name(name) and not Path(name).exists() else None
    found = re.search(r"config\.json of (\S+/\S+) on the HuggingFace hub", load_model(name).source)
    return found[1] if found else None


def model_file(name_or_path: str | Path) -> Path | None:
    """The config.json outside of the catalogue that `load_model` reads for *name_or_path*; None where it reads none."""
    text = str(name_or_path)
    if _shipped_as(text) is not None:
        return None
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path
    return None if _by_its_name(text) is not None else cached_config(text)


def fetch_unknown(name: str) -> None:
    """Has the HuggingFace hub asked for config.json of the model *name*, where `load_model` finds it nowhere else.

    ValueError in a sentence where the hub does not give it.
    """
    if (
        not Path(name).exists()
        and _shipped_as(name) is None
        and model_file(name) is None
        and _by_its_name(name) is None
    ):
        fetch_config(name)


def load_model(name_or_path: str | Path, *, given: Collection[str] = ()) -> ModelSpec:
    """The model called *name_or_path*.

    In this order: a model of the catalogue by its name, alias or hub name; the config.json of a path or its folder (and a
    `hf_quant_config.json` beside it); a model of the catalogue that the name is a variant of, in the number format that it
    states, which a note of the model says (`hwmodels.model.names`); the config.json of that name in the HuggingFace cache.
    *given*: formats that the caller sets (`precision`, `kv_precision`), in whose place the checkpoint may state one that is not
    modelled. ValueError names the nearest valid models for an unknown name, and file and field for a config that cannot be used.
    """
    text = str(name_or_path)
    shipped = _shipped_as(text)
    if shipped is not None:
        return _shipped(shipped)
    path = model_file(text)
    if path is not None:
        side = path.with_name("hf_quant_config.json")
        quant = read_json(side) if side.is_file() else None
        name = (
            text if not Path(text).exists() else path.parent.resolve().name if path.name == "config.json" else path.stem
        )
        return _spec(read_json(path), name, str(path), quant, given)
    if Path(text).is_dir():
        raise ValueError(f"folder {text} has no config.json")
    reading = _by_its_name(text)
    if reading is not None:
        return _variant(text, reading, tuple(sorted(given)))
    if text.endswith(".json") or ("/" in text.strip("/") and Path(text).parent.is_dir()):
        raise ValueError(f"model file {text} does not exist")
    names = difflib.get_close_matches(normalised(text), _compared(), n=3, cutoff=0.4)
    near = f"nearest valid names: {', '.join(names)}" if names else "no name that `rooftrace models` lists is near"
    fetch = ", or --fetch, which asks the HuggingFace hub for it" if is_hub_name(text) else ""
    raise ValueError(f"unknown model {text!r}; {near} (or a path to a config.json{fetch})")


def catalogue_base(name: str) -> ModelSpec | None:
    """The model of the catalogue that *name* is, or is a variant of, in the formats of the catalogue; None for other names."""
    shipped = _shipped_as(name)
    if shipped is None and not Path(name).exists() and (reading := _by_its_name(name)) is not None:
        shipped = _compared()[reading.base]
    return None if shipped is None else _shipped(shipped)


def _by_its_name(name: str) -> NameReading | None:
    return read_name(name, _compared())


@functools.lru_cache(maxsize=256)
def _variant(name: str, reading: NameReading, given: tuple[str, ...]) -> ModelSpec:
    """The catalogue model of *reading* under the *name* that was given, in the format that the name states."""
    base = _compared()[reading.base]
    data = read_json(model_catalogue()[base])
    said = f"The model {name} is read as {base} of the catalogue"
    if reading.words:
        verb = "is" if len(reading.words) == 1 else "are"
        said += f"; {', '.join(map(repr, reading.words))} in its name {verb} taken to leave the shape as it is"
    if reading.format == REFUSED and "precision" not in given:
        raise ValueError(
            f"model {name!r}: the format {reading.spelt} is not modelled; name {base} with another format in its place "
            "(precision: int4, fp8, ...)"
        )
    if reading.spelt is not None:
        data = {key: value for key, value in data.items() if key != "quantization_config"}
        if "text_config" in data:
            text = data["text_config"]
            data["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
        if reading.format not in ("", REFUSED):
            latent = "kv_lora_rank" in data or "kv_lora_rank" in data.get("text_config", {})
            data["quantization_config"] = quantization_config(
                reading.format, latent=latent, fp8_cache=reading.fp8_cache
            )
    spec = _spec(data, name, f"models/{base}.json as {name}", None, given)
    if reading.spelt is not None and "precision" not in given:
        said += f"; its weights are in {_formats(spec)}"
        said += ", and its KV cache in fp8" if reading.fp8_cache and "kv_precision" not in given else ""
        said += f", from {reading.spelt!r} in its name"
    positions = [int(word[:-1]) * 1024 for word in reading.words if re.fullmatch(r"\d+k", word)]
    if positions and positions[-1] != spec.max_positions:
        said += f"; sequences have up to {positions[-1]:,} tokens"
        spec = replace(spec, max_positions=positions[-1])
    return replace(spec, notes=(*spec.notes, f"{said}. A path to its own config.json takes the place of this reading."))


def _formats(spec: ModelSpec) -> str:
    parts = {"attention": spec.attention_precision, "MLPs": spec.mlp_precision}
    if spec.experts is not None:
        parts["experts"] = spec.expert_precision
    if len(set(parts.values())) == 1:
        return str(spec.mlp_precision)
    return " and ".join(f"{fmt} ({part})" for part, fmt in parts.items())


def _spec(data: Mapping[str, Any], name: str, where: str, quant: Any, given: Collection[str]) -> ModelSpec:
    try:
        return spec_from_config(data, name=name, where=where, quant_config=quant)
    except ValueError:
        if not given:
            raise
        return spec_from_config(data, name=name, where=where, quant_config=quant, given=given)
