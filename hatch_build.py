"""Compiles the engine with mypyc, from the same sources, where Rooftrace is installed or a wheel is built.

It does so where mypyc makes modules that are known to work (`_lacks`), and goes on with plain Python otherwise, which `rooftrace
doctor` and the manifest of each run say, with the reason. `ROOFTRACE_COMPILE=0` asks for plain Python, `ROOFTRACE_COMPILE=1` makes
it an error that something is missing. docs/performance.md says what is gained.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "ROOFTRACE_COMPILE"
LEVEL = "ROOFTRACE_COMPILE_LEVEL"
"""The C compiler's level of optimisation, 0 to 3; 1 where it is not set, which is as fast as 2 in two thirds of its time."""

BUILT_WITH = ("mypy[mypyc]==2.4.1", "setuptools==84.2.1", "numpy==2.4.6")
"""The releases that the compiled build was tried with; numpy is there for its types alone. Another mypyc may refuse these
sources or end with an error of its own."""

PYTHONS = ((3, 11), (3, 12), (3, 13))
MACHINES = ("x86_64", "amd64", "aarch64", "arm64")

COMPILED = (
    *(
        f"sim/engine/{name}.py"
        for name in (
            "batch/async_scheduling", "batch/decode_set", "batch/decoding", "batch/masks", "batch/micro_batch", "batch/padding",
            "batch/prices", "batch/pricing", "batch/rank_prices", "batch/span", "batch/speculative_set",
            "batch/stages", "batch/version",
            "cache/block_cache", "cache/prefix_lookup", "cache/radix_cache", "kv/block_runs", "kv/caching_pool", "kv/content",
            "kv/page_tree", "kv/pool", "kv/run_twins", "machine/groups", "machine/loads", "machine/machine", "machine/ranks",
            "machine/together", "machine/turns", "machine/driven", "machine/any_machine", "machine/encoder",
            "machine/one_queue",
            "record/columns", "requests/reservations", "requests/state", "serve/grammars", "serve/iterations", "serve/planner",
            "serve/sequences", "serve/engine_core", "simulation/cluster", "simulation/online", "time/alarm", "time/clock",
        )
    ),
    *(f"policies/{name}.py" for name in ("sarathi", "schedulers", "view", "vllm")),
    *(f"policies/sglang/{name}.py" for name in ("joining", "past")),
    "hwmodels/kernels/single.py",
    "hwmodels/layerwise.py",
    "hwmodels/row_table.py",
    "hwmodels/totals.py",
    "sim/placement/screening.py",
)  # fmt: skip
"""The modules that an iteration passes through, the loop that screens placements, and whatever is derived from a class in there: of
a compiled class mypyc makes objects of no class that is not compiled. Not `events`, whose classes are SimPy's; classes that check
their settings stay ordinary ones with compiled methods."""

PACKAGES = ("hwmodels", "policies", "sim", "workloads")

MULTIPLY = """
#undef PyNumber_Multiply
#include <Python.h>

static int raise_it(void *error) {
    PyErr_SetObject((PyObject *)Py_TYPE((PyObject *)error), (PyObject *)error);
    Py_DECREF((PyObject *)error);
    return -1;
}

static int is_integer(PyObject *factor) {  // and not of a class with a product of its own, which may fail each time
    return PyLong_Check(factor) && Py_TYPE(factor)->tp_as_number->nb_multiply == PyLong_Type.tp_as_number->nb_multiply;
}

PyObject *rooftrace_multiply(PyObject *left, PyObject *right) {
    PyObject *product = PyNumber_Multiply(left, right);
    while (product == NULL && is_integer(left) && is_integer(right) && !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        Py_XDECREF(type);
        Py_XDECREF(trace);
        if (Py_AddPendingCall(raise_it, error) < 0)
            Py_XDECREF(error);
        product = PyNumber_Multiply(left, right);
    }
    return product;
}
"""
"""CPython's product of integers of more than 30 bits looks for signals, and fails with what their handler raises (Ctrl-C:
KeyboardInterrupt; `SIGCHECK` in Objects/longobject.c). mypyc takes a product that fails for missing memory and aborts the
process (`CPyTagged_Multiply_` in its lib-rt/int_ops.c). This one multiplies to the end; the error is raised at the next line
of Python."""


class CompiledBuild(BuildHookInterface[Any]):
    """Adds compiled modules to a wheel; an editable installation finds them while its sources are those that were compiled."""

    def dependencies(self) -> list[str]:
        return [] if _lacks(os.environ) else list(BUILT_WITH)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        why = _lacks(os.environ) or _lacks_packages()
        asked = os.environ.get(SWITCH, "") not in ("", "0")
        if asked and why:
            raise RuntimeError(f"{SWITCH}={os.environ[SWITCH]} asks for the compiled engine, and {why}")
        folder = None
        if not why:
            try:
                folder = _compile(root)
            except (Exception, SystemExit) as error:  # mypyc and setuptools end in many ways
                if asked:
                    raise
                why = f"compiling it failed ({type(error).__name__}: {error}); {SWITCH}=1 shows how"
        built = {"why": why} if why else {"with": f"{BUILT_WITH[0]}, -O{_level()}"}
        self.app.display_info(f"Rooftrace's engine: plain Python: {why}" if why else "Rooftrace's engine: compiled")
        note = root / "build" / "engine.json"
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps(built), encoding="utf-8")
        build_data["extra_metadata"][str(note)] = "engine.json"
        if folder is None:
            return
        if version == "editable":
            finder = root / "build" / "rooftrace_compiled.pth"
            finder.write_text(
                f"import rooftrace_compiled; rooftrace_compiled.find_in({str(folder)!r})\n",
                encoding="utf-8",
            )
            build_data["force_include_editable"] = {
                str(finder): finder.name,
                str(root / "compiled_finder.py"): "rooftrace_compiled.py",
            }
            return
        for file in _modules_of(folder):
            build_data["force_include"][str(file)] = str(file.relative_to(folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _lacks(environ: Mapping[str, str]) -> str:
    """The reason why no compiled engine can be made here, before anything is fetched for it; empty where nothing is missing."""
    if environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 asked for it"
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in PYTHONS:
        return f"the compiled engine is for CPython 3.11 to 3.13; this is {sys.implementation.name} {platform.python_version()}"
    if sys.platform not in ("linux", "darwin") or platform.machine().lower() not in MACHINES:
        return f"the compiled engine is for Linux and macOS on x86-64 and arm64; this is {sys.platform} on {platform.machine()}"
    wanted = shlex.split(environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(wanted[0], path=environ.get("PATH")) is None:
        return f"no C compiler ({wanted[0]}) was found"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python's C headers are not installed (python3-dev, python3-devel)"
    return ""


def _lacks_packages() -> str:
    """The same of the packages that compile it, which an installation without isolation has to have."""
    for requirement in BUILT_WITH:
        name, _, wanted = requirement.partition("==")
        try:
            found = metadata.version(name.partition("[")[0])
        except metadata.PackageNotFoundError:
            found = ""
        if found != wanted:
            return f"{requirement} is not installed in the environment that builds it"
    return ""


def _level() -> str:
    return os.environ.get(LEVEL, "1")


def _modules_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix in (".so", ".pyd")]


def _compile(root: Path) -> Path:
    """The folder with the compiled modules, laid out as in the source tree, and `sources.json` with the digest of each file that
    went into them. Made twice by pip, and compiled once."""
    digests = {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in sorted({*COMPILED, *_imported(root)})
    }
    recipe = [sys.version, sysconfig.get_config_var("SOABI"), _level(), BUILT_WITH, COMPILED, digests]
    name = hashlib.sha256(json.dumps(recipe).encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    folder = root / "build" / "compiled" / name
    if (folder / "sources.json").is_file():
        return folder
    work = root / "build" / "compiled" / "work"
    shutil.rmtree(work, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(root / package, work / package, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    for source in COMPILED:
        text = (root / source).read_text(encoding="utf-8")
        (work / source).write_text(annotations_in_quotes(text), encoding="utf-8")
    _build(work, folder)
    sources = {"root": str(root), "digests": digests, "compiled": COMPILED}
    (folder / "sources.json").write_text(json.dumps(sources, indent=1), encoding="utf-8")
    shutil.rmtree(work)
    return folder


def _build(work: Path, folder: Path) -> None:
    mypycify = import_module("mypyc.build").mypycify
    distribution = import_module("setuptools").Distribution
    here = Path.cwd()
    os.chdir(work)
    try:
        extensions = mypycify(
            ["--ignore-missing-imports", "--follow-imports=silent", *COMPILED],
            opt_level=_level(),
            debug_level="0",
            target_dir=str(work / "c"),
        )
        for extension in extensions:
            # A product and a sum in one step would round once where plain Python rounds twice.
            extension.extra_compile_args.append("-ffp-contract=off")
            if extension.name.endswith("__mypyc"):  # what all modules share, with all their products
                (work / "c" / "multiply.c").write_text(MULTIPLY, encoding="utf-8")
                extension.sources.append(str(work / "c" / "multiply.c"))
                extension.define_macros.append(("PyNumber_Multiply", "rooftrace_multiply"))
        built = distribution({"name": "rooftrace", "ext_modules": extensions})
        command = built.get_command_obj("build_ext")
        command.build_lib = str(folder)
        command.build_temp = str(work / "objects")
        built.run_command("build_ext")
    finally:
        os.chdir(here)


def _imported(root: Path) -> Iterator[str]:
    """The files of Rooftrace's own modules that compiled ones import: values of their constants are compiled in."""
    for source in COMPILED:
        for node in ast.walk(ast.parse((root / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                place = root.joinpath(*node.module.split("."))
                for file in (
                    place.with_suffix(".py"),
                    place / "__init__.py",
                    *(place / f"{each.name}.py" for each in node.names),
                ):
                    if file.is_file():
                        yield file.relative_to(root).as_posix()


def annotations_in_quotes(text: str) -> str:
    """*text*, in which the annotations of settings are texts, on the same lines.

    Of an ordinary class mypyc keeps an annotation that is a text or the name of a class; of `int | None` and `Literal` it would
    keep `type`, by which scenarios refuse every value, and a `ClassVar` would become a setting. It reads no text with `|`.
    """
    lines = text.encode().splitlines(keepends=True)
    spots = [
        statement.annotation
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and not isinstance(statement.annotation, ast.Constant)
    ]
    for spot in sorted(spots, key=lambda spot: (spot.lineno, spot.col_offset), reverse=True):
        first, last = spot.lineno - 1, (spot.end_lineno or spot.lineno) - 1
        before, after = lines[first][: spot.col_offset], lines[last][spot.end_col_offset :]
        quoted = repr(ast.unparse(_without_bars(spot))).encode()
        lines[first : last + 1] = [before + quoted + after] + [b"\n"] * (last - first)
    future = b"from __future__ import annotations\n"
    return b"".join(
        future.replace(b"\n", b"; from typing import Union as _Union\n") if line == future else line for line in lines
    ).decode()


class _Unions(ast.NodeTransformer):
    """`a | b` as `_Union[a, b]`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self.visit(node.left), self.visit(node.right)
        return ast.Subscript(ast.Name("_Union", ast.Load()), ast.Tuple([left, right], ast.Load()), ast.Load())


def _without_bars(annotation: ast.expr) -> ast.expr:
    return _Unions().visit(ast.parse(ast.unparse(annotation), mode="eval").body)
