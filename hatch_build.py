"""The optional compiled build: the same sources through mypyc, where ROOFTRACE_COMPILE=1 asks for it.

Without it nothing here runs, and neither mypyc nor a compiler is needed. docs/performance.md says what it gains.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "ROOFTRACE_COMPILE"
LEVEL = "ROOFTRACE_COMPILE_LEVEL"
"""The C compiler's level of optimisation, 0 to 3; 2 where it is not set. Level 0, for tests, takes a sixth of its time."""

BUILT_WITH = ("mypy[mypyc]==2.4.1", "setuptools==84.2.1", "numpy==2.4.6")
"""The releases that the compiled build was tried with; numpy is there for its types alone. Another mypyc may refuse these
sources or end with an error of its own."""

COMPILED = (
    *(
        f"sim/engine/{name}.py"
        for name in (
            "batch/async_scheduling", "batch/decode_set", "batch/decoding", "batch/micro_batch", "batch/padding", "batch/prices",
            "batch/pricing", "batch/rank_prices", "batch/span", "batch/speculative_set", "batch/stages", "batch/version",
            "cache/block_cache", "cache/prefix_lookup", "cache/radix_cache", "kv/block_runs", "kv/caching_pool", "kv/content",
            "kv/page_tree", "kv/pool", "kv/run_twins", "machine/groups", "machine/loads", "machine/machine", "machine/ranks",
            "machine/together", "machine/turns", "machine/driven", "machine/any_machine", "machine/encoder",
            "machine/one_queue",
            "record/columns", "requests/state", "serve/iterations", "serve/planner",
            "serve/sequences", "serve/engine_core", "simulation/cluster", "simulation/online", "time/alarm", "time/clock",
        )
    ),
    *(f"policies/{name}.py" for name in ("sarathi", "schedulers", "view", "vllm")),
    "hwmodels/layerwise.py",
    "hwmodels/totals.py",
)  # fmt: skip
"""The modules that an iteration passes through, and whatever is derived from a class in there: of a compiled class mypyc makes
objects of no class that is not compiled. Not `events`, whose classes are SimPy's; classes that check their settings stay ordinary
ones with compiled methods. Of such a class mypyc keeps no annotation but the name of a class: `int | None` and `Literal` become
`type`, by which scenarios would refuse every value, and a `ClassVar` becomes a setting. So the settings of vLLM's
scheduler are in a module of their own, and `policies.wrappers` is left out."""


class CompiledBuild(BuildHookInterface[Any]):
    """Adds compiled modules to a wheel, or puts them beside the sources of an editable installation."""

    def _wanted(self) -> bool:
        return os.environ.get(SWITCH, "") not in ("", "0")

    def dependencies(self) -> list[str]:
        return list(BUILT_WITH) if self._wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted():
            return
        root = Path(self.root)
        folder = _compile(root)
        wanted = {Path(source).with_suffix("") for source in COMPILED}
        for built in sorted(folder.rglob("*.so")) + sorted(folder.rglob("*.pyd")):
            place = built.relative_to(folder)
            if "__mypyc" not in place.name and place.parent / place.name.split(".")[0] not in wanted:
                continue  # of an earlier list
            if version == "editable":
                shutil.copy2(built, root / place)
            else:
                build_data["force_include"][str(built)] = str(place)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _compile(root: Path) -> Path:
    """The folder with the compiled modules, laid out as in the source tree. Made twice by pip, and compiled once."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    folder = root / "build" / "compiled"
    here = Path.cwd()
    os.chdir(root)
    try:
        extensions = mypycify(
            ["--ignore-missing-imports", "--follow-imports=silent", *COMPILED],
            opt_level=os.environ.get(LEVEL, "2"),
            debug_level="0",
            target_dir=str(folder / "c"),
        )
        distribution = Distribution({"name": "rooftrace", "ext_modules": extensions})
        command = distribution.get_command_obj("build_ext")
        command.build_lib = str(folder / "lib")  # type: ignore[attr-defined]
        command.build_temp = str(folder / "objects")  # type: ignore[attr-defined]
        distribution.run_command("build_ext")
    finally:
        os.chdir(here)
    return folder / "lib"
