"""Models by name: those that are shipped, and any config.json."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from hwmodels.model.config import spec_from_config
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


def hub_name(name: str) -> str | None:
    """Under which name the HuggingFace hub has a catalogue model, as its source says; None for other models."""
    try:
        source = load_model(name).source
    except ValueError:
        return None
    found = re.search(r"config\.json of (\S+/\S+) on the HuggingFace hub", source)
    return found[1] if found else None


def load_model(name_or_path: str | Path, *, given: Collection[str] = ()) -> ModelSpec:
    """The model called *name_or_path* in the catalogue (alias or hub name too), or that of a config.json or its folder.

    A `hf_quant_config.json` beside the file is read as well. *given*: formats that whoever asks sets (`precision`,
    `kv_precision`), in whose place what a checkpoint says may be something that is not modelled. ValueError names the nearest
    valid models for an unknown name, and file and field for a config that cannot be used.
    """
    text = str(name_or_path)
    key = text.strip().lower()
    key = _aliases().get(key, _aliases().get(key.rpartition("/")[2], key))
    if key in model_catalogue():
        return _shipped(key)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        side = path.with_name("hf_quant_config.json")
        quant = read_json(side) if side.is_file() else None
        name = path.parent.resolve().name if path.name == "config.json" else path.stem
        data = read_json(path)
        try:
            return spec_from_config(data, name=name, where=str(path), quant_config=quant)
        except ValueError:
            if not given:
                raise
            return spec_from_config(data, name=name, where=str(path), quant_config=quant, given=given)
    if Path(text).is_dir():
        raise ValueError(f"folder {text} has no config.json")
    if text.endswith(".json") or ("/" in text.strip("/") and Path(text).parent.is_dir()):
        raise ValueError(f"model file {text} does not exist")
    known = [*model_catalogue(), *_aliases()]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.4) or list(model_catalogue())
    raise ValueError(f"unknown model {text!r}; nearest valid names: {', '.join(near)} (or a path to a config.json)")
