"""A serving stack is one description: engines' names stand nowhere else, and a folder more is a stack more."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwmodels.stack_page import PAGE, with_stacks
from hwmodels.stacks import servers, stacks
from sim.launch.engines import launches
from tests.sources import nodes

ROOT = Path(__file__).parents[1]
ENGINES = servers()
QUOTED = re.compile(rf"[\"'](?:{'|'.join(ENGINES)})")
OWN = ("hwmodels/stacks/", "sim/launch/engines/", "policies/installed/")
"""Folders with a folder for each engine."""
EXCEPTED = {
    "sim/bench/formats/": "",
    "hwmodels/steps/recording.py": "vllm_version",
    "sim/bench/published/powered.py": "vllm",
    "sim/validation/fit_kinds.py": "vllm",
    "sim/bench/reading.py": "vllm bench serve",
    "sim/serve/counted.py": "vllm:",
    "sim/launch/documents.py": "vllmConfig",
}
"""How texts begin that may stand elsewhere: formats and protocols of measurements, which are of engines by name; the metrics of the
endpoint, called as a server's; a key of a chart's values."""


def literals(code: tuple[ast.AST, ...]) -> Iterator[tuple[int, str]]:
    """Lines and texts that are no docstrings and are an engine's name, or begin with one."""
    bare = {id(node.value) for node in code if isinstance(node, ast.Expr)}
    for node in code:
        if isinstance(node, ast.Constant) and id(node) not in bare and str(node.value).startswith(ENGINES):
            yield node.lineno, str(node.value)


def in_own_folder(path: str) -> bool:
    return any(path.startswith(folder) and path.count("/") > folder.count("/") for folder in OWN)


def test_no_literal_of_an_engines_name_stands_outside_of_its_folders() -> None:
    found = []
    for path in (path for room in ("sim", "hwmodels", "policies", "workloads") for path in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        allowed = tuple(begin for where, begin in EXCEPTED.items() if name.startswith(where))
        # Most files have no such text, and need not be parsed.
        if not in_own_folder(name) and QUOTED.search(path.read_text(encoding="utf-8")):
            found += [(name, *each) for each in literals(nodes(path)) if not each[1].startswith(allowed)]
    assert not found


def test_a_literal_is_found_in_a_comparison_and_not_in_a_docstring() -> None:
    code = ast.parse(
        'def f(stack):\n    """vllm is one."""\n    return stack == "vllm" or stack in {"sglang:x": 1} or "a vllm"\n'
    )
    assert [text for _, text in literals(tuple(ast.walk(code)))] == ["vllm", "sglang:x"]


def test_the_page_of_engines_is_made_from_the_descriptions() -> None:
    """`python -m hwmodels.stack_page` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert with_stacks(text) == text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no <!-- made by"):
        with_stacks("# Engines\n")


def test_every_engine_says_its_release_what_it_was_checked_against_and_when() -> None:
    for name in ENGINES:
        stack = stacks()[name]
        assert stack.release
        assert stack.scheduler in stack.schedulers
        assert [check for check in stack.checks if check.what == "scheduler"]
        assert all(len(check.on.split("-")) == 3 for check in stack.checks)
        assert name in launches()


def test_an_engine_on_other_makers_devices_says_where_its_kernels_are_from_and_what_was_not_compared() -> None:
    for stack in (stack for stack in stacks().values() if stack.like is not None):
        assert re.search(r"fitted on 20\d\d-\d\d-\d\d", stack.kernels_from)
        assert stack.kernels_modelled
        assert [check for check in stack.checks if check.what == "kernels" and check.release and check.on]
        assert stack.left_out.endswith(".")


MADE_UP = """
from hwmodels.stacks.description import Check, EngineDefaults, Graphs, Scheduler, Stack


def limits(device, memory_bytes, *, offline, tensor):
    return EngineDefaults(max_num_seqs=7, max_num_batched_tokens=333, graph_sequences=7, source="nowhere")


def choices(settings, around):
    return {"max_num_seqs": around.limits.max_num_seqs, "max_num_batched_tokens": around.limits.max_num_batched_tokens}


STACK = Stack(
    name="madeup",
    title="Made Up",
    place=50,
    release="3.1",
    scheduler="madeup",
    schedulers={"madeup": Scheduler(policy="policies.vllm:Vllm", known_from="nothing", compared_with="nobody")},
    choices=choices,
    limits=limits,
    prefix_cache="blocks",
    graphs=Graphs(sizes=lambda largest: range(1, largest), of_sequences=False, source="nowhere"),
    checks=(Check(what="scheduler", release="3.1", against="itself", on="2026-11-23"),),
)
"""
RUN = """
import sys

import hwmodels.stacks

hwmodels.stacks.__path__.append(sys.argv[1])

from hwmodels.stack_page import PAGE, with_stacks
from sim import Scenario, simulate

result = simulate(Scenario(serving_stack="madeup", workload={"trace": "conversation", "limit": 20}))
print(result.summary["requests"]["finished"], "requests")
print(result.manifest)
print(with_stacks(PAGE.read_text(encoding="utf-8")))
"""


def test_a_folder_with_a_description_is_an_engine_that_runs_and_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "stacks" / "made_up"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(MADE_UP, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(folder.parent)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "20 requests" in ran.stdout
    assert "max_num_batched_tokens=333, max_num_seqs=7" in ran.stdout
    assert "### Made Up\n\n`serving_stack: madeup`. Rules and launch options are those of release 3.1." in ran.stdout
    assert "| scheduler | 3.1 | itself | 2026-11-23 |" in ran.stdout
