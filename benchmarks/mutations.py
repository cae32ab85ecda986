"""Changes of meaning, made by rule in the files that are named, each of which some test has to notice.

    python -m benchmarks.mutations FILE ... [--tests PATH ...] [--count 40] [--seed 0] [--jobs 2]
    python -m benchmarks.mutations --since main~1
    python -m benchmarks.mutations --named

Every comparison, sum, difference, `and`, `or`, `not`, small number, `continue` and statement that is a call is a place where a
meaning can change. *count* of them are drawn, each is made in a copy of the tree, and the tests run until one fails. The tests are
those given or, without, the folder of `tests` that mirrors the file's room. Prints every change that no test noticed, and ends with
1 if there was one; some of these change nothing that can be seen, which a person has to judge. `--since` takes the files of the
package that have changed since a commit, `--named` ten changes whose texts are kept here.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""A change after which the tests run longer counts as noticed: it made something endless."""
_COPIED = ("sim", "hwmodels", "policies", "workloads", "tests", "benchmarks", "examples", "docs", "notebooks", ".ci")
_ROOMS = ("sim/", "hwmodels/", "policies/", "workloads/", "rooftrace.py")
_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutation:
    """One changed text of a file."""

    file: str
    line: int
    old: str
    new: str
    source: str
    """The whole file, changed."""
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old} -> {self.new}"


def mutations_of(file: str, source: str) -> Iterator[Mutation]:
    """All changes that the rules make in a file, in the order of its nodes."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    for node in ast.walk(tree):
        new = _changed(node)
        if new is None or not isinstance(node, ast.expr | ast.stmt):
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = raw[begin:end].decode()
        changed = (raw[:begin] + new.encode() + raw[end:]).decode()
        yield Mutation(file, node.lineno, " ".join(old.split()), " ".join(new.split()), changed)


def _changed(node: ast.AST) -> str | None:
    """The text of *node* with its meaning changed; None where no rule applies."""
    match node:
        case ast.Compare(left, [operator], [right]):
            return ast.unparse(ast.Compare(left, [_COMPARED[type(operator)]()], [right]))
        case ast.BoolOp(operator, values):
            return "(" + ast.unparse(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)) + ")"
        case ast.UnaryOp(ast.Not(), operand):
            return "bool(" + ast.unparse(operand) + ")"
        case ast.BinOp(left, operator, right) if type(operator) in _COMPUTED:
            return "(" + ast.unparse(ast.BinOp(left, _COMPUTED[type(operator)](), right)) + ")"
        case ast.Constant(value) if type(value) is int and 0 <= value <= 2:
            return str(value + 1)
        case ast.AugAssign(target, operator, value) if type(operator) in _COMPUTED:
            return ast.unparse(ast.AugAssign(target, _COMPUTED[type(operator)](), value))
        case ast.Continue():
            return "break"
        case ast.Expr(ast.Call()):
            return "pass"
    return None


NAMED = (
    ("sim/engine/batch/stages.py", "ready = end + handover", "ready = end", ("tests/engine/test_pipeline.py",)),
    ("sim/engine/tiers/links.py", "[0] * spec.concurrent_transfers", "[0]", ("tests/engine/test_links.py",)),
    ("sim/engine/record/streaming.py", "sent = begins | (", "sent = (", ("tests/engine/test_streaming.py",)),
    ("hwmodels/totals.py", "rest * (rest + 1) // 2", "rest * (rest - 1) // 2", ("tests/engine/test_meanings.py",)),
    ("hwmodels/cache.py", "layers[i::n]", "layers[i * size : (i + 1) * size]", ("tests/hwmodels/test_hybrid.py",)),
    (
        "hwmodels/memory.py",
        "return (self.device_blocks - self.null_blocks) * self.groups",
        "return self.device_blocks * self.groups",
        ("tests/hwmodels/test_memory.py",),
    ),
    ("policies/vllm.py", "return running[-1]", "return running[0]", ("tests/policies",)),
    (
        "policies/sglang/scheduler.py",
        "(each.emitted, -each.prompt), reverse=True",
        "(each.emitted, -each.prompt)",
        ("tests/policies",),
    ),
    ("sim/metrics/fleet.py", "[:, [READY, DRAINING]]", "[:, [READY]]", ("tests/results/test_metrics.py",)),
    (
        "sim/metrics/ranks.py",
        "return most[some] * n_ranks / total[some]",
        "return most[some] / total[some]",
        ("tests/scenario/test_ranks.py",),
    ),
)
"""A text that stands once in a file, what it becomes, and the tests beside it: meanings that no rule changes."""


def named() -> Iterator[Mutation]:
    """The changes of `NAMED`; ValueError for a text that its file does not have exactly once."""
    for file, old, new, tests in NAMED:
        source = (ROOT / file).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise ValueError(f"{file} has {old!r} {source.count(old)} times")
        line = source[: source.index(old)].count("\n") + 1
        yield Mutation(file, line, old, new, source.replace(old, new), tests)


def mirror_of(file: str) -> tuple[str, ...]:
    """The folder of tests that mirrors the room of a file: of `sim/engine/kv/runs.py` it is `tests/engine`, and of `sim/text.py`
    `tests/test_text.py`."""
    parts = Path(file).parts
    room = parts[1] if parts[0] == "sim" else parts[0]
    mirrors = (f"tests/{room.removesuffix('.py')}", f"tests/test_{room}")
    return next(((each,) for each in mirrors if (ROOT / each).exists()), ("tests",))


def noticed(mutation: Mutation, tree: Path) -> str | None:
    """The first test that fails with *mutation* in the copy at *tree*; None where all pass."""
    place = tree / mutation.file
    before = place.read_bytes()
    place.write_text(mutation.source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *mutation.tests]
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:g} s"
    finally:
        place.write_bytes(before)
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or ended.stdout.splitlines()[-1:] or [f"exit code {ended.returncode}"])[0]


def survivors(mutations: Sequence[Mutation], jobs: int) -> list[Mutation]:
    """Make each change in a copy of the tree, *jobs* at once, and print what notices it; those that nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for i in range(jobs):
            tree = Path(folder) / str(i)
            for name in _COPIED:
                if (ROOT / name).exists():
                    shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            for each in ROOT.glob("*.*"):
                if each.is_file():
                    shutil.copy(each, tree)
            if (ROOT.parent / "shared").exists() and not (Path(folder) / "shared").exists():
                (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
            trees.put(tree)

        def run(mutation: Mutation) -> str | None:
            tree = trees.get()
            try:
                return noticed(mutation, tree)
            finally:
                trees.put(tree)

        found: list[Mutation] = []
        with ThreadPoolExecutor(jobs) as pool:
            for mutation, by in zip(mutations, pool.map(run, mutations), strict=True):
                print(f"{mutation}\n    {'NOTHING NOTICED' if by is None else by}", flush=True)
                if by is None:
                    found.append(mutation)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--since", help="take the Python files that have changed since this commit")
    parser.add_argument("--named", action="store_true", help="make the ten named changes")
    parser.add_argument("--tests", nargs="+", help="the tests that have to notice, for every file")
    parser.add_argument("--count", type=int, default=40, help="changes that are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    files = list(given.files)
    if given.since:
        changed = ["git", "diff", "--name-only", "--diff-filter=d", given.since, "--", "*.py"]
        listed = subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        files += [file for file in listed if file.startswith(_ROOMS)]
    drawn: list[Mutation] = list(named()) if given.named else []
    if files:
        every = [each for file in files for each in mutations_of(file, (ROOT / file).read_text(encoding="utf-8"))]
        drawn += random.Random(given.seed).sample(every, min(given.count, len(every)))
    if not drawn and given.since:
        print(f"nothing that can be changed has changed since {given.since}")
        return 0
    if not drawn:
        parser.error("name files, or give --since or --named")
    with_tests = [replace(each, tests=tuple(given.tests or each.tests or mirror_of(each.file))) for each in drawn]
    left = survivors(with_tests, given.jobs)
    print(f"\n{len(drawn) - len(left)} of {len(drawn)} changes were noticed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
