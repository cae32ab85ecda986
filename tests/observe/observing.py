"""Logs, servers and runs of the command that the tests of observations share."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from sim.cli import build_app

ROW = {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 20, "ttft_s": 0.05, "e2el_s": 0.5}


def log(folder: Path, *rows: dict[str, Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({**ROW, **row}) + "\n" for row in rows))
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(build_app(), ["observe", *map(str, arguments)])


def refused(*arguments: object, said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert isinstance(done.exception, SystemExit)


@contextlib.contextmanager
def answering(server: socketserver.BaseServer) -> Iterator[str]:
    """The address of *server*, which answers until the end."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
