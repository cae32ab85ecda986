"""Files are written whole or not at all, and nothing that is no file is replaced."""

import ast
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.sources import PACKAGES, nodes
from workloads.write import open_whole, unwritable, write_whole

ROOT = Path(__file__).parents[2]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["a\r\nb\n", b"\x00\xff"])
def test_a_file_has_what_was_written_and_nothing_lies_beside_it(tmp_path, content):
    write_whole(tmp_path / "out", content)
    assert (tmp_path / "out").read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["out"]


def test_a_file_that_could_not_be_finished_is_what_it_was(tmp_path):
    (tmp_path / "out").write_text("before")
    with pytest.raises(UnicodeEncodeError), open_whole(tmp_path / "out") as file:
        file.writelines(["after", "\udcff"])
    assert (tmp_path / "out").read_text() == "before"
    assert names(tmp_path) == ["out"]


def test_a_new_file_has_the_rights_of_any_and_an_old_one_keeps_its_own(tmp_path):
    write_whole(tmp_path / "new", "")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "new").chmod(0o640)
    write_whole(tmp_path / "new", "more")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path, there):
    (tmp_path / "far").mkdir()
    if there:
        (tmp_path / "far" / "target").write_text("before")
    (tmp_path / "middle").symlink_to("far/target")
    (tmp_path / "link").symlink_to("middle")
    write_whole(tmp_path / "link", "after")
    assert (tmp_path / "far" / "target").read_text() == "after"
    assert os.readlink(tmp_path / "link") == "middle"
    assert names(tmp_path / "far") == ["target"]


def test_a_device_is_written_through():
    before = os.stat("/dev/null")
    write_whole("/dev/null", "nothing")
    assert os.path.samestat(before, os.stat("/dev/null"))
    assert unwritable("/dev/null") == ""


def test_a_pipe_is_written_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "content")
    reader.join(10)
    assert read == ["content"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_standard_output_is_not_replaced_where_it_is_a_file(tmp_path):
    code = "from workloads.write import write_whole; write_whole('/dev/stdout', 'content')"
    with (tmp_path / "out").open("w") as out:
        before = os.fstat(out.fileno()).st_ino
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=ROOT)
    assert (tmp_path / "out").read_text() == "content"
    assert (tmp_path / "out").stat().st_ino == before


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path.name)])
def test_what_cannot_be_written_is_an_error_with_its_name(tmp_path, make):
    make(tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "nowhere" / "out"):
        with pytest.raises(OSError, match=r"Is a directory|No such file|symbolic links") as error:
            write_whole(path, "content")
        assert error.value.filename == str(path)
    assert names(tmp_path) == ["out"]
    assert unwritable(tmp_path / "nowhere" / "out").endswith("nowhere is not a folder that can be written to")


# Every other place that makes or replaces a file, and why it does without.
ELSEWHERE = {
    ("workloads/write.py", "_open"): "the one function",
    ("sim/results/folder.py", "_swap_in"): "renames folders",
    ("sim/explore/notebook.py", "explore"): "a temporary folder",
    ("sim/study/store.py", "put"): "thousands of runs under names of their own, swept up by process",
    ("sim/validation/live.py", "_spec"): "a temporary folder",
    ("hwmodels/calibrate/samples.py", "__init__"): "cuts off what a killed run was writing",
    ("hwmodels/calibrate/samples.py", "_append"): "a log, which grows sample by sample",
    ("hwmodels/calibrate/samples.py", "write_measured"): "in the folder of a calibration, read again at once",
    ("hwmodels/profiles/files.py", "write_profile"): "in the folder of a calibration, and profiles that ship",
    ("hwmodels/model/hub.py", "fetch_config"): "in a cache folder of our own, in which nothing else is written",
    ("hwmodels/left_out.py", "write_widths"): "a table that ships",
    ("hwmodels/stack_page.py", ""): "a page of the documentation",
    ("policies/installed/connection.py", "__init__"): "a temporary file without a name",
    ("policies/installed/vllm/worker.py", "__init__"): "a temporary folder",
    ("policies/installed/lines.py", "main"): "the process's own standard output",
    ("sim/cli/app.py", "_mute"): "/dev/null in the place of standard output",
    ("sim/engine/record/spill.py", "write"): "a temporary file without a name",
    ("sim/study/table.py", "__init__"): "a temporary file without a name",
}
CALLS = {
    *(
        "write_text",
        "write_bytes",
        "rename",
        "savefig",
        "to_parquet",
        "to_json",
        "to_excel",
        "ParquetWriter",
        "write_table",
    ),
    *(
        "to_csv",
        "mkstemp",
        "NamedTemporaryFile",
        "TemporaryFile",
        "copyfile",
        "copy2",
        "move",
        "touch",
        "symlink_to",
        "savez",
    ),
}


def writes(call):
    """Whether a call makes, changes or replaces a file, as far as its name and arguments tell."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in ("open", "fdopen"):
        texts = [
            each.value for each in [*call.args, *(key.value for key in call.keywords)] if isinstance(each, ast.Constant)
        ]
        flags = owner == "os" and name == "open"
        how = any(key.arg is None for key in call.keywords)
        return (
            flags
            or how
            or any(isinstance(text, str) and set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)
        )
    if name == "replace":  # Path.replace and os.replace; a text is replaced by a text, and a dataclass by keywords
        return owner == "os" or (len(call.args) == 1 and not call.keywords)
    if name in ("ParquetWriter", "write_table"):  # on an open file, or on a writer
        return ast.unparse(call.args[0]) not in ("file", "table") and not ast.unparse(call.args[0]).startswith("pa.")
    if name in ("to_csv", "to_json"):  # without a path, the text; that of a Trace is the one function
        return bool(owner and call.args) and "trace" not in owner
    return name in CALLS and not (call.args and ast.unparse(call.args[0]) == "buffer")


NAMED = re.compile(rf"\b(?:open|fdopen|replace|{'|'.join(sorted(CALLS))})\(")


def writers(path):
    # Most files call nothing of such a name, and need not be parsed.
    if not NAMED.search(path.read_text(encoding="utf-8")):
        return
    functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for call in nodes(path):
        if isinstance(call, ast.Call) and writes(call):
            around = [each for each in functions if each.lineno <= call.lineno <= (each.end_lineno or 0)]
            yield max(around, key=lambda each: each.lineno).name if around else "", ast.unparse(call)


def test_every_file_is_written_by_the_one_function():
    found = {}
    for room in ("sim", "workloads", "hwmodels", "policies"):
        for path in sorted((PACKAGES / room).rglob("*.py")):
            for function, call in writers(path):
                found.setdefault((path.relative_to(PACKAGES).as_posix(), function), []).append(call)
    assert {place: calls for place, calls in found.items() if place not in ELSEWHERE} == {}
    assert set(ELSEWHERE) == set(found), "places that write no more"


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')", "path.open('ab')", "open(path, mode='r+')", "path.write_text(x)", "os.replace(a, b)", "a.replace(b)",
        "os.open(path, flags)", "frame.to_csv(path)", "pq.ParquetWriter(path, schema)", "figure.savefig(path)", "open(path, **how)",
    ],
)  # fmt: skip
def test_a_line_that_writes_is_seen(tmp_path, line):
    (tmp_path / "a.py").write_text(line)
    assert [call for _, call in writers(tmp_path / "a.py")] == [line.replace('"', "'")]


@pytest.mark.parametrize(
    "line", ["open(path)", "path.open('rb')", "a.replace('x', 'y')", "replace(a, x=1)", "frame.to_csv(index=False)"]
)
def test_a_line_that_writes_nothing_is_not(tmp_path, line):
    (tmp_path / "a.py").write_text(line)
    assert list(writers(tmp_path / "a.py")) == []
