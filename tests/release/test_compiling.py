"""Where the engine is compiled, and when an editable installation uses what was compiled."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import typing
from pathlib import Path
from types import ModuleType

import pytest

import compiled_finder
from sim import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling", reason="comes with builds")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = """from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

@dataclass
class Settings:
    seats: int | None | str = None
    by: Literal["a", "b"] = "a"
    pairs: dict[str, tuple[
        int | float, ...
    ]] | None = None
    evicts: ClassVar[bool] = True

LAST = 1
"""


def test_annotations_in_quotes_mean_the_same_on_the_same_lines(hook: ModuleType) -> None:
    """An annotation of which mypyc keeps anything is a text, and it keeps none with a bar."""
    text = hook.annotations_in_quotes(SOURCE)
    assert text.splitlines().index("LAST = 1") == SOURCE.splitlines().index("LAST = 1")
    found = []
    for name, source in (("as_written", SOURCE), ("in_quotes", text)):
        module = ModuleType(name)
        sys.modules[name] = module
        try:
            exec(compile(source, name, "exec"), module.__dict__)
            found.append(typing.get_type_hints(module.Settings))
            kept = module.Settings.__annotations__
        finally:
            del sys.modules[name]
    assert found[0] == found[1]
    texts = {key: ast.literal_eval(kept[key]) for key in kept}  # what mypyc keeps is within the quotes
    assert texts.pop("evicts") == "ClassVar[bool]"
    assert len(texts) == 3
    assert not any("|" in each for each in texts.values())


def test_what_stands_in_the_way_is_said(hook: ModuleType, tmp_path: Path) -> None:
    assert "ROOFTRACE_COMPILE=0" in hook._lacks({"ROOFTRACE_COMPILE": "0"})
    assert "no C compiler" in hook._lacks({"PATH": str(tmp_path)}) or sys.platform not in ("linux", "darwin")


def test_what_is_compiled_is_there(hook: ModuleType) -> None:
    assert all((ROOT / source).is_file() for source in hook.COMPILED)
    assert "policies/vllm.py" in hook.COMPILED
    assert "policies/view.py" in set(hook._imported(ROOT))


@pytest.fixture
def finder(tmp_path: Path) -> compiled_finder._Finder:
    """An installation of one compiled module, which is no module at all: it is found and not loaded."""
    source = tmp_path / "tree" / "policies" / "vllm.py"
    source.parent.mkdir(parents=True)
    source.write_text("RULE = 1\n")
    folder = tmp_path / "compiled"
    built = folder / f"policies/vllm.{sysconfig.get_config_var('SOABI')}.so"
    built.parent.mkdir(parents=True)
    built.touch()
    digests = {"policies/vllm.py": hashlib.sha256(source.read_bytes()).hexdigest()}
    sources = {"root": str(tmp_path / "tree"), "digests": digests, "compiled": ["policies/vllm.py"]}
    (folder / "sources.json").write_text(json.dumps(sources))
    return compiled_finder._Finder(str(folder))


def test_a_compiled_module_is_found_while_its_source_is_what_was_compiled(
    finder: compiled_finder._Finder, tmp_path: Path
) -> None:
    place = [str(tmp_path / "tree" / "policies")]
    spec = finder.find_spec("policies.vllm", place)
    assert spec is not None
    assert str(spec.origin).endswith(".so")
    assert finder.find_spec("policies.view", place) is None
    assert finder.find_spec("json") is None
    assert finder.find_spec("policies.vllm", [str(tmp_path / "another" / "policies")]) is None


def test_a_changed_source_is_run_as_it_is(finder: compiled_finder._Finder, tmp_path: Path) -> None:
    (tmp_path / "tree" / "policies" / "vllm.py").write_text("RULE = 2\n")
    assert finder.find_spec("policies.vllm", [str(tmp_path / "tree" / "policies")]) is None
    assert finder.changed == ["policies/vllm.py"]


def test_without_its_folder_all_is_plain(tmp_path: Path) -> None:
    assert compiled_finder._Finder(str(tmp_path / "gone")).find_spec("policies.vllm", ["policies"]) is None


MULTIPLYING = """
#include <Python.h>
PyObject *rooftrace_multiply(PyObject *, PyObject *);

static PyObject *multiply(PyObject *self, PyObject *factors) {
    PyObject *product = rooftrace_multiply(PyTuple_GET_ITEM(factors, 0), PyTuple_GET_ITEM(factors, 1));
    if (product == NULL && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        Py_FatalError("a product that a signal interrupted was not made");  // as mypyc ends the process
    return product;
}
static PyMethodDef METHODS[] = {{"multiply", multiply, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "multiplying", "", -1, METHODS};
PyMODINIT_FUNC PyInit_multiplying(void) { return PyModule_Create(&MODULE); }
"""

MULTIPLIED = """
import signal
from multiplying import multiply

class Refuses(int):
    def __mul__(self, other):
        raise ArithmeticError("never")

def interrupt(*_):
    raise KeyboardInterrupt("by the signal")

assert multiply(6, True) == 6 and multiply(0.5, 3) == 1.5
signal.alarm(20)  # ends what would go on for ever
try:
    multiply(Refuses(3), 4)
except ArithmeticError as error:
    print(error)
signal.signal(signal.SIGALRM, interrupt)
large = 3**1_000_000
signal.setitimer(signal.ITIMER_REAL, 0.001)
try:
    for _ in range(1000):
        multiply(large, large)
except KeyboardInterrupt as error:
    print(error)
"""


def test_products_of_integers_go_on_when_a_signal_comes_and_others_fail_as_ever(
    hook: ModuleType, tmp_path: Path
) -> None:
    compiler = shlex.split(sysconfig.get_config_var("LDSHARED") or "")
    headers = Path(sysconfig.get_paths()["include"])
    if not compiler or shutil.which(compiler[0]) is None or not (headers / "Python.h").is_file():
        pytest.skip("no C compiler, or no headers of Python")
    (tmp_path / "multiply.c").write_text(hook.MULTIPLY)
    (tmp_path / "module.c").write_text(MULTIPLYING)
    subprocess.run(
        [*compiler, "-fPIC", "-Wall", "-Werror", f"-I{headers}", "multiply.c", "module.c", "-o", "multiplying.so"],
        cwd=tmp_path, check=True,
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", MULTIPLIED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "never\nby the signal\n", "")


def test_the_build_says_why_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_compiled", lambda: False)
    monkeypatch.setattr(build, "_noted", lambda: {"why": "no C compiler (cc) was found"})
    assert build.engine_build() == "plain Python: no C compiler (cc) was found"
    monkeypatch.setattr(build, "_noted", lambda: {"with": "mypy, -O2"})
    fake = ModuleType("rooftrace_compiled")
    monkeypatch.setattr(fake, "changed_sources", lambda: ["policies/vllm.py", "a.py"], raising=False)
    monkeypatch.setitem(sys.modules, "rooftrace_compiled", fake)
    assert build.engine_build().startswith(
        "plain Python: policies/vllm.py and 1 more changed since the engine was compiled"
    )
    monkeypatch.setattr(build, "is_compiled", lambda: True)
    assert build.engine_build() == "compiled (mypy, -O2)"


def test_the_sources_of_a_release_are_those_of_a_clone() -> None:
    """With tests and what they need: continuous integration's own files, notebooks, this page."""
    builders = pytest.importorskip("hatchling.builders.sdist", reason="comes with builds")
    files = {
        Path(file.distribution_path).as_posix() for file in builders.SdistBuilder(str(ROOT)).recurse_included_files()
    }
    assert {
        ".ci/release/check.py",
        ".github/workflows/tests.yml",
        "notebooks/01-first-steps.py",
        "CONTRIBUTING.md",
    } <= files
    assert not [file for file in files if file.startswith(("build/", "dist/", ".venv/", "results/"))]
