"""rooftrace doctor: what this installation has, and why something may be slow or missing."""

from __future__ import annotations

from typing import Any

import typer

from sim.cli.extras import EXTRAS, missing
from sim.cli.options import Json
from sim.cli.tables import print_facts, print_json


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def version(package: str = "rooftrace") -> str:
    """The installed version of *package*."""
    from importlib import metadata

    return metadata.version(package)


def doctor(as_json: Json = False) -> None:
    """Print versions, extras, whether the engine is compiled, shared data, GPU and free memory."""
    found = _facts()
    if as_json:
        print_json(found)
        return

    print_facts([(name.replace("_", " "), str(value)) for name, value in found.items()])


def _facts() -> dict[str, Any]:
    import os
    import platform

    from hwmodels.model.hub import hub_cache
    from sim.build import engine_build
    from sim.packages import home, intruder

    extras = {extra: not missing(extra) for extra in EXTRAS}
    shared = home().parent / "shared"
    return {
        "rooftrace": version(),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": ", ".join(
            f"{name} {version(name)}" for name in ("numpy", "pandas", "simpy", "pyarrow", "pydantic")
        ),
        "installed_in": str(home()),
        "other_packages_in_the_way": intruder() or "none",
        "engine": engine_build(),
        "extras": ", ".join(name for name, has in extras.items() if has) or "none",
        "extras_not_installed": ", ".join(name for name, has in extras.items() if not has) or "none",
        "published_measurements": str(shared)
        if shared.is_dir()
        else f"none at {shared}; tests that need them are skipped",
        "huggingface_cache": str(hub_cache()),
        "gpu": _gpus(),
        "processors": os.cpu_count() or 1,
        "free_memory_gib": _free_gib(),
    }


def _gpus() -> str:
    """The GPUs that nvidia-smi lists, one after the other."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none: nvidia-smi is not installed"
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: nvidia-smi does not answer ({error})"
    return ", ".join(done.stdout.strip().splitlines()) or "none"


def _free_gib() -> float | str:
    """Memory that is free or can be had, GiB; in words where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return "this system does not say"
    return round(kib / 2**20, 1)
