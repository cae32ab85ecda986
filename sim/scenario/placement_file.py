"""Placements in files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.placement import Group, Placement
from sim.errors import OutputError, ScenarioError
from workloads.write import write_whole

FORMAT = "rooftrace-placement-1"


def save_placement(
    placement: Placement, names: Sequence[str], path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None
) -> None:
    """Write *placement* as JSON that names its models and numbers its devices; *about* is kept beside it."""
    device, groups = 0, []
    for group in placement.groups:
        devices = list(range(device, device + group.n_devices))
        device += group.n_devices
        groups.append(
            {
                "devices": devices,
                "inter_op": group.inter_op,
                "intra_op": group.intra_op,
                "models": [names[model] for model in group.models],
            }
        )
    try:
        write_whole(path, json.dumps({"format": FORMAT, "groups": groups, "about": dict(about or {})}, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write the placement {path}: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True)
class PlacedGroup:
    """A group of a placement file: devices in *inter_op* stages of *intra_op*, and the names of the models that share them."""

    inter_op: int
    intra_op: int
    models: tuple[str, ...]


def placed_groups(path: str | os.PathLike[str]) -> list[PlacedGroup]:
    """The groups in the file at *path*; ScenarioError where it is no placement."""
    file = Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"cannot read the placement {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{file} is not a placement: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ScenarioError(f"{file} is not a placement of this version; write one with rooftrace place --out")
    try:
        return [
            PlacedGroup(
                inter_op=int(group["inter_op"]),
                intra_op=int(group["intra_op"]),
                models=tuple(map(str, group["models"])),
            )
            for group in found["groups"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ScenarioError(f"{file} is not a placement: {what}") from error


def load_placement(path: str | os.PathLike[str], names: Sequence[str]) -> Placement:
    """The placement in the file at *path*, for models in the order of *names*.

    ScenarioError where the file is no placement or hosts a model that is not among *names*.
    """
    row = {name: index for index, name in enumerate(names)}
    groups = []
    for group in placed_groups(path):
        strangers = [name for name in group.models if name not in row]
        if strangers:
            raise ScenarioError(f"{path} hosts {', '.join(strangers)}, which the scenario does not have")
        try:
            groups.append(
                Group(
                    inter_op=group.inter_op,
                    intra_op=group.intra_op,
                    models=tuple(sorted(row[name] for name in group.models)),
                )
            )
        except ValueError as error:
            raise ScenarioError(f"{path} is not a placement: {error}") from error
    return Placement(groups=tuple(groups))
